"""Passes over loop programs: one file each, a function from a program to a new one. The orders are the tuples.

Each keeps every value bit for bit: what is not an identity for NaN, for signed zeros, for numbers that do not fit or
where something is rounded is not used. Nothing that can raise is dropped.
"""

from __future__ import annotations

from collections.abc import Callable

from ferrite.loops.nodes import Program
from ferrite.loops.passes.drop_dead_stores import drop_dead_stores
from ferrite.loops.passes.drop_identity import drop_identity
from ferrite.loops.passes.drop_unit_axes import drop_unit_axes
from ferrite.loops.passes.fold_constants import fold_constants
from ferrite.loops.passes.fold_select import fold_select
from ferrite.loops.passes.merge_axes import merge_axes
from ferrite.loops.passes.simplify_guards import simplify_guards

# Before fusion: expressions become smaller, the boxes of the nests keep all axes that are longer than 1.
LOOP_PASSES: tuple[Callable[[Program], Program], ...] = (
    drop_identity,
    fold_constants,
    simplify_guards,
    fold_select,
    drop_dead_stores,
    drop_unit_axes,
)

# After fusion: nests with fewer and longer axes. Before it they would hide that two nests run over the same box.
BOX_PASSES: tuple[Callable[[Program], Program], ...] = (merge_axes,)
