"""How one nest runs: which axis goes into vector lanes, which around it, how many vectors at once.

Lanes go along the axis on which most memory is read and written without gaps; the others are loops around it, in the
order of the nest. A reduction that the lanes do not touch gets lanes of its own, along one of its axes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ferrite.loops.index import Axis, Index, coefficient_of, free_axes
from ferrite.loops.nodes import Accumulate, Apply, Expr, Load, Nest, Random, Reduce, Scan, Statement, Store
from ferrite.loops.rewrite import walk
from ferrite.loops.shapes import linear

MOST_WAYS = 4
LONG_BODY, LONGEST_BODY = 16, 48  # operations: more of them need the registers for themselves
STORE_WEIGHT = 3  # a store with gaps costs more than a load with gaps


@dataclass(frozen=True)
class Shape:
    """`outer`: loops around; `vector`: the axis in lanes, if there is one; `width`: bytes of an element in lanes."""

    outer: tuple[Axis, ...]
    vector: Axis | None
    width: int
    ways: int


def shape_of(nest: Nest) -> Shape:
    """Statements that combine along the loop (scatters, scans) run element by element."""
    if any(not isinstance(statement, Store) for statement in nest.body) or not nest.axes:
        return Shape(nest.axes, None, width_of(nest), 1)
    accesses = [*_accesses(nest)]
    vector = best_axis(nest.axes, accesses)
    if vector is None:
        return Shape(nest.axes, None, width_of(nest), 1)
    outer = tuple(axis for axis in nest.axes if axis is not vector)
    return Shape(outer, vector, width_of(nest), ways_of(nest))


def best_axis(axes: Sequence[Axis], accesses: Iterable[tuple[Index, int]]) -> Axis | None:
    """The axis along which most accesses are without gaps; of equals the last. None if it would be all gaps."""
    accesses = [*accesses]
    best: tuple[int, int] | None = None
    chosen: Axis | None = None
    for position, axis in enumerate(axes):
        score = sum(weight * _smoothness(offset, axis) for offset, weight in accesses)
        if not _is_long_enough(axis):
            score -= 1 << 20
        if best is None or (score, position) >= best:
            best, chosen = (score, position), axis
    return chosen


def _smoothness(offset: Index, axis: Axis) -> int:
    """2 for neighbours in memory, 1 for one place, 0 for a known step, -1 for a place that must be looked up."""
    step = coefficient_of(offset, axis)
    if step is None:
        return -1
    if step.terms:
        return 0
    return {1: 2, 0: 1}.get(step.constant, 0)


def _is_long_enough(axis: Axis) -> bool:
    return bool(axis.extent.terms) or axis.extent.constant >= 4


def _accesses(nest: Nest) -> Iterable[tuple[Index, int]]:
    for node in walk(nest):
        if isinstance(node, Load):
            yield linear(node.index, node.buffer.strides), 1
        elif isinstance(node, (Store, Accumulate)):
            yield linear(node.index, node.buffer.strides), STORE_WEIGHT


def loads_in(body: Expr) -> Iterable[tuple[Index, int]]:
    return ((linear(node.index, node.buffer.strides), 1) for node in walk(body) if isinstance(node, Load))


def width_of(node: Nest | Expr) -> int:
    """Bytes of the widest element that is computed with; positions and seeds do not count. At least 1."""
    widest = 1
    for part in walk(node):
        if isinstance(part, (Load, Apply)):
            dtype = part.dtype
            widest = max(widest, 4 if dtype.is_half else dtype.bytes)
        elif isinstance(part, Random):
            widest = max(widest, 4)
    return widest


def ways_of(node: Nest | Expr) -> int:
    """Fewer vectors at once the more is computed with each of them."""
    operations = sum(isinstance(part, (Apply, Random)) for part in walk(node))
    return MOST_WAYS if operations <= LONG_BODY else 2 if operations <= LONGEST_BODY else 1


def is_independent(statement: Statement, axis: Axis) -> bool:
    """Whether points that differ along the axis write to different places, so that threads may share the axis."""
    match statement:
        case Store():
            return True
        case Accumulate(index=index) | Scan(targets=((_, index), *_)):
            return any(place.constant == 0 and place.terms == ((1, (axis,)),) for place in index)
        case Scan(targets=targets):
            return all(target is None or any(p.terms == ((1, (axis,)),) for p in target[1]) for target in targets)
    return False


def reductions_in(node: Nest | Expr) -> list[Reduce]:
    return [part for part in walk(node) if isinstance(part, Reduce)]


def depends_on(node: Expr, axis: Axis | None) -> bool:
    return axis is not None and axis in free_axes(node)
