"""What outlives a compile: the compiled graph, and later the cache and packages that keep it."""
