"""Tests. The cache on disk is off, or what an earlier run compiled would be what is tested; tests of it turn it on."""

import os

os.environ.setdefault("FERRITE_CACHE", "off")
