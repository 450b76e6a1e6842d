"""Benchmarks, the demo and the models they share with the tests. Not part of the installed package.

What compiles in this process does so without the cache on disk; `compare` gives each child caches of its own.
"""

import os

os.environ.setdefault("FERRITE_CACHE", "off")
