"""The threads that share the work of a kernel: those of the OpenMP runtime that torch has loaded.

    ferrite_launch(ptr work, ptr buffers, ptr sizes, ptr error, i64 units, i64 team)

does all units of a work, alone or each thread of a team an equal, consecutive part of them. Kernels call it by its
address: it is made once in a process, not with each of them.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from ferrite.errors import ToolFailed
from ferrite.loops.dtypes import i32, i64
from ferrite.native.build import Library, build, library_addresses, load
from ferrite.native.builder import Builder, Type, Value, pointer, scalar
from ferrite.native.target import Target, host

LAUNCH, PART = "ferrite_launch", "part_of_a_team"
PARAMETERS = {"work": pointer, "buffers": pointer, "sizes": pointer, "error": pointer, "units": i64, "team": i64}
I32: Type = scalar(i32)


def imports(names: Iterable[str]) -> dict[str, int]:
    """The addresses of what kernels call: the launch, and functions of C's library."""
    wanted = set(names)
    ours = {LAUNCH: _launcher().address(LAUNCH)} if LAUNCH in wanted else {}
    return library_addresses(sorted(wanted - ours.keys())) | ours


def call_launch(b: Builder, work: str, *arguments: Value) -> None:
    """Does a function's work from a kernel."""
    types = [scalar(dtype) for dtype in PARAMETERS.values()]
    b.call(b.external(LAUNCH, None, types), None, Value(scalar(pointer), (f"@{work}",)), *arguments)


@cache
def _launcher() -> Library:
    target = host()
    return load([build(launch_text(target), target)], [LAUNCH], _openmp())


def launch_text(target: Target) -> str:
    b = Builder(target)
    with (
        b.function(LAUNCH, PARAMETERS) as (*frame, units, team),
        b.either(b.le(team, 1)) as (alone, together),
    ):
        with b.inside(alone):
            work, *rest = frame
            b.call(work.names[0], None, *rest, b.constant(i64, 0), units)
        with b.inside(together):
            slot = b.slot(scalar(i64), len(frame) + 1)
            for place, value in enumerate((*frame, units)):
                b.store(value, slot, place)
            parallel = b.external("GOMP_parallel", None, [slot.type, slot.type, I32, I32])
            b.call(parallel, None, Value(slot.type, (f"@{PART}",)), slot, b.convert(team, i32), b.constant(i32, 0))
    with b.function(PART, {"frame": pointer}, internal=True) as (slot,):
        work, *rest = (b.load(pointer, slot, place) for place in range(4))
        units = b.load(i64, slot, 4)
        thread = b.convert(b.call(b.external("omp_get_thread_num", I32, []), I32), i64)
        count = b.convert(b.call(b.external("omp_get_num_threads", I32, []), I32), i64)
        low, _ = b.split(b.mul(units, thread), count)
        high, _ = b.split(b.mul(units, b.add(thread, 1)), count)
        with b.if_(b.lt(low, high)):
            b.call(work.names[0], None, *rest, low, high)
    return b.text()


def _openmp() -> dict[str, int]:
    """The entry points of the runtime that torch has loaded, so that both share one pool of threads."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(None, 5)[-1].strip()
        if re.search(r"/lib(gomp|iomp5|omp)[-.\w]*\.so", path):
            library = ctypes.CDLL(path)
            names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
            return {name: ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in names}
    raise ToolFailed("no OpenMP runtime", ran="a search of the libraries of this process")
