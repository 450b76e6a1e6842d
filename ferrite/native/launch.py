"""The launcher in this process: code that `team.py` describes, linked with the OpenMP runtime that torch has loaded."""

from __future__ import annotations

import ctypes
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
    """The entry points of the OpenMP runtime that torch is bound to, so that both share one pool of threads.

    A process may have loaded several: the wheel of scikit-learn, for one, brings a libgomp of its own. The dynamic
    linker binds torch to the first definition in the global scope, else to the one among torch's own dependencies, and
    `dlsym` searches these two in the same order.
    """
    names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
    for scope in (ctypes.CDLL(None), _torch()):
        if all(hasattr(scope, name) for name in names):
            return {name: ctypes.cast(getattr(scope, name), ctypes.c_void_p).value or 0 for name in names}
    raise ToolFailed("no OpenMP runtime", ran="a search of the libraries that torch is linked with")


def _torch() -> ctypes.CDLL | None:
    """The library of torch that runs loops in parallel, if this process has loaded it."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(None, 5)[-1].strip()
        if path.endswith("/libtorch_cpu.so"):
            return ctypes.CDLL(path)
    return None
