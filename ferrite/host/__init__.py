"""The program around the kernels: what is called, in which order, and when each value dies."""
