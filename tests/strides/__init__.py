"""Strides of every output and gradient against eager's: see `__main__`."""
