"""Benchmarks, the demo and the models they share with the tests. Not part of the installed package."""
