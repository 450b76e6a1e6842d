"""Which loops share a kernel, in what order, in what memory. The order of its passes is the tuple."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps

from ferrite.host.lowered import Lowered
from ferrite.loops.nodes import Program
from ferrite.schedule.cut_at_guards import cut_at_guards
from ferrite.schedule.decided import Decided
from ferrite.schedule.fuse import fuse
from ferrite.schedule.keep_exponentials import keep_exponentials
from ferrite.schedule.keep_rows import keep_rows
from ferrite.schedule.lift_reductions import lift_reductions
from ferrite.schedule.reuse_memory import reuse_memory
from ferrite.schedule.run_early import run_early
from ferrite.schedule.split_axes import split_axes
from ferrite.schedule.split_reduction import split_reductions
from ferrite.schedule.tile import tile_transposes


def of_each_kernel(run: Callable[[Program], Decided]) -> Callable[[Lowered], Lowered]:
    """A pass over one kernel as a pass over all kernels of a graph, with the decisions on all of them."""

    @wraps(run)
    def over_all(lowered: Lowered) -> Lowered:
        found = [run(program) for program in lowered.kernels]
        decisions = tuple(decision for each in found for decision in each.decisions)
        kernels = tuple(each.program for each in found)
        return replace(lowered, kernels=kernels, decisions=lowered.decisions + decisions)

    return over_all


SCHEDULE_PASSES: tuple[Callable[[Lowered], Lowered], ...] = (
    of_each_kernel(lift_reductions),
    fuse,
    run_early,
    of_each_kernel(split_axes),
    of_each_kernel(split_reductions),
    of_each_kernel(keep_rows),
    of_each_kernel(keep_exponentials),
    of_each_kernel(tile_transposes),
    reuse_memory,
    of_each_kernel(cut_at_guards),
)
