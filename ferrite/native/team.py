"""The threads that share the work of a kernel: those of the OpenMP runtime that torch has loaded.

    i64 ferrite_launch(ptr kernel, ptr buffers, ptr sizes, i32 threads)      0, or 1 if a check failed

runs the trees of a kernel one after the other: all units of a tree, alone or each thread of a team an equal,
consecutive part of them. It is made once in a process (`launch.py`). A kernel is a table for it: the number of trees,
then for each

    work      the function that does units
    plan      the function that finds the two numbers from sizes; null if they are here
    units     how many there are
    parts     how many threads have enough to do; none if there is nothing to do at all

Note [The last quarter]
    Equal parts do not take equal time: memory of one part may lie farther away than that of the other, a core may be
    lent to somebody else for a while. Where there is much to do, a thread holds on to three quarters of its part only,
    so that it finds most of what it wrote last time in its own caches; the last quarter of each part is cut in pieces,
    and who is done takes one of them, its own or another's. What a unit computes does not depend on who computes it.
    (Loops in C that sum 256 MiB with two threads, one half of which was slower to read: 10.1 ms in halves, 9.2 so.
    Where parts are equal it makes no difference: ten cases of `bench.kernels`, with and without in one process.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ferrite.loops.dtypes import i32, i64
from ferrite.native.builder import Builder, Type, Value, pointer, scalar
from ferrite.native.launch import LAUNCH
from ferrite.native.target import Target

PART = "part_of_a_team"
PARAMETERS = {"kernel": pointer, "buffers": pointer, "sizes": pointer, "threads": i32}
PLAN_PARAMETERS = {"sizes": pointer, "numbers": pointer}
I32: Type = scalar(i32)
PIECES, LOOSE = 16, 4  # of a thread's part, and how many of them, the last ones, are for whoever is done
MUCH = 8  # times the work for which a thread pays: from there on there are loose pieces
NOTHING = Value(scalar(pointer), ("null",))


@dataclass(frozen=True)
class Row:
    """What a kernel's table says of a tree: names of functions, and numbers if there is no `plan`."""

    work: str
    units: int = 0
    parts: int = 0
    plan: str | None = None


def write_kernel(b: Builder, name: str, rows: Sequence[Row]) -> None:
    """The table of a kernel, under its name."""
    words = [b.constant(i64, len(rows))]
    for row in rows:
        plan = NOTHING if row.plan is None else _function(row.plan)
        words += [_function(row.work), plan, b.constant(i64, row.units), b.constant(i64, row.parts)]
    b.record(name, words)


def _function(name: str) -> Value:
    return Value(scalar(pointer), (f"@{name}",))


def launch_text(target: Target) -> str:
    b = Builder(target)
    with b.function(LAUNCH, PARAMETERS, i64) as (kernel, buffers, sizes, threads):
        error, found = b.slot(scalar(i64)), b.slot(scalar(i64), 2)
        b.store(b.constant(i64, 0), error)
        with b.loop(0, b.load(i64, kernel)) as tree:
            tree.next()
            row = b.advance(kernel, i64, b.add(b.mul(tree.index, 4), 1))
            work, plan = (b.load(pointer, row, place) for place in range(2))
            with b.if_(b.ne(b.load(i64, row, 1), 0), [b.advance(row, i64, 2)]) as planned:
                b.call(plan.names[0], None, sizes, found)
                planned.give(found)
            units, parts = (b.load(i64, planned.results[0], place) for place in range(2))
            team = b.minimum(b.convert(threads, i64), b.minimum(parts, units))
            with b.if_(b.gt(parts, 0)):
                _do(b, (work, buffers, sizes, error), units, parts, team)
            with b.if_(b.ne(b.load(i64, error), 0), unlikely=True):
                b.ret(b.constant(i64, 1))
        b.ret(b.constant(i64, 0))
    _write_part(b)
    return b.text()


def _do(b: Builder, frame: Sequence[Value], units: Value, parts: Value, team: Value) -> None:
    """All units of a tree."""
    with b.either(b.le(team, 1)) as (alone, together):
        with b.inside(alone):
            work, *rest = frame
            b.call(work.names[0], None, *rest, b.constant(i64, 0), units)
        with b.inside(together):
            loose = b.and_(b.ge(parts, b.mul(team, MUCH)), b.ge(units, b.mul(team, PIECES)))
            slot = b.slot(scalar(i64), len(frame) + 3)
            for place, value in enumerate((*frame, units, b.convert(loose, i64), b.constant(i64, 0))):
                b.store(value, slot, place)
            parallel = b.external("GOMP_parallel", None, [slot.type, slot.type, I32, I32])
            b.call(parallel, None, _function(PART), slot, b.convert(team, i32), b.constant(i32, 0))


def _write_part(b: Builder) -> None:
    """What a thread of a team does. See Note [The last quarter]."""
    with b.function(PART, {"frame": pointer}, internal=True) as (slot,):
        work, *rest = (b.load(pointer, slot, place) for place in range(4))
        units, loose, taken = b.load(i64, slot, 4), b.load(i64, slot, 5), b.advance(slot, i64, 6)
        thread = b.convert(b.call(b.external("omp_get_thread_num", I32, []), I32), i64)
        count = b.convert(b.call(b.external("omp_get_num_threads", I32, []), I32), i64)

        def start(thread: Value, piece: Value | int) -> Value:
            """Where a piece of a thread's part starts; the first one after the last is the next thread's."""
            return b.split(b.mul(units, b.add(b.mul(thread, PIECES), piece)), b.mul(count, PIECES))[0]

        def do(thread: Value, first: Value | int, last: Value | int) -> None:
            low, high = start(thread, first), start(thread, last)
            with b.if_(b.lt(low, high)):
                b.call(work.names[0], None, *rest, low, high)

        do(thread, 0, b.sub(PIECES, b.mul(loose, LOOSE)))
        with b.if_(b.ne(loose, 0)), b.repeat(()) as again:
            piece, owner = b.split(b.atomic("add", taken, b.constant(i64, 1)), count)
            is_left = b.lt(piece, LOOSE)
            with b.if_(is_left):
                first = b.add(piece, PIECES - LOOSE)
                do(owner, first, b.add(first, 1))
            again.again(is_left)
