"""The launcher in this process: code that `team.py` describes, linked with the OpenMP runtime that torch has loaded."""

from __future__ import annotations

import ctypes
import re
from functools import cache
from pathlib import Path

from ferrite.errors import ToolFailed
from ferrite.native import support
from ferrite.native.build import Library, build, load
from ferrite.native.target import host

LAUNCH = "ferrite_launch"


@cache
def launch_address() -> int:
    """Where `ferrite_launch` is in this process."""
    return _launcher().address(LAUNCH)


@cache
def _launcher() -> Library:
    return support.loaded(support.LAUNCHER, _build, lambda made: load([made], [LAUNCH], _openmp(), lasting=True))


def _build() -> bytes:
    from ferrite.native.team import launch_text  # a process that was given the object need not know how to write it

    return build(launch_text(host()), host())


def _openmp() -> dict[str, int]:
    """The entry points of the runtime that torch has loaded, so that both share one pool of threads."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(None, 5)[-1].strip()
        if re.search(r"/lib(gomp|iomp5|omp)[-.\w]*\.so", path):
            library = ctypes.CDLL(path)
            names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
            return {name: ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in names}
    raise ToolFailed("no OpenMP runtime", ran="a search of the libraries of this process")
