"""The loop IR: what a kernel computes, as data. Knows neither torch nor LLVM."""
