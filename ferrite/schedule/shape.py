"""How the innermost loops run: which axis goes into vector lanes, which around it, how many vectors at once.

Lanes go along the axis on which most memory is read and written without gaps; the others are loops around it, in their
order. A reduction that the lanes do not touch gets lanes of its own, along one of its axes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ferrite.loops.access import Access, accesses, axis_at, written_by
from ferrite.loops.index import Axis, Index, coefficient_of, free_axes, holds_data, product
from ferrite.loops.nodes import (
    Accumulate,
    Apply,
    Buffer,
    Expr,
    Load,
    Random,
    Reduce,
    Scan,
    Statement,
    Store,
)
from ferrite.loops.rewrite import Tree, met_always, walk
from ferrite.loops.shapes import contiguous_strides, linear

MOST_WAYS = 4
RANDOM_WEIGHT = 49  # operations: ten rounds of two products keep the processor busy by themselves
FEW_WAYS = 2  # where memory takes longer than what is done with it: half the code, as fast
QUICK = frozenset(("add", "sub", "mul", "neg", "abs", "fma", "minimum", "maximum", "fmin", "fmax", "copysign", "isnan"))
QUICK |= {"eq", "ne", "lt", "le", "gt", "ge", "and_", "or_", "xor", "not_"}
ONE_BY_ONE = frozenset(("div", "sqrt", "rsqrt"))  # a unit is busy with each vector: more at once do not help
LONG_BODY, LONGEST_BODY = 16, 48  # operations: more of them need the registers for themselves
MOST_ROWS = 16  # of a square that is turned in registers
SQUARE = 32  # elements: every vector has so many or a part of them
STORE_WEIGHT = 3  # a store with gaps costs more than a load with gaps
LARGE = 1 << 25  # bytes of a buffer that no cache holds
LARGE_ACROSS = 1 << 23  # the same if it is written from what is read across it (three of 8 MiB: 1.3 times as fast)


@dataclass(frozen=True)
class Shape:
    """`outer`: loops around; `vector`: the axis in lanes, if there is one; `width`: bytes of an element in lanes.

    `turned`: loads with gaps between the lanes, but none along the last of the outer loops. Squares of them are read
    row by row and turned in registers. `is_single`: a lane for each way, so that chains of single elements run side by
    side.
    """

    outer: tuple[Axis, ...]
    vector: Axis | None
    width: int
    ways: int
    turned: tuple[Load, ...] = ()
    is_single: bool = False

    def lanes(self, vector_bytes: int) -> int:
        if self.is_single:
            return 1
        lanes = max(vector_bytes // self.width, 1)
        return min(lanes, MOST_ROWS) if self.turned else lanes


def shape_of(axes: tuple[Axis, ...], body: Sequence[Statement]) -> Shape:
    """Where the order of points matters (scatters, scans), lanes go along an axis whose points never meet, if what they
    write are neighbours; otherwise it goes element by element. With gaps, a scan in lanes took 2.5 times as long; but
    each addition waits for the one before it, so several rows are scanned at once, an element each."""
    reductions = [node for statement in body for node in reductions_in(statement)]
    free = [
        axis
        for axis in axes
        if are_independent(body, axis)
        and all(_may_be_in_lanes(statement, axis) for statement in body)
        and not any(_goes_along_its_own(node, axis) for node in reductions)
    ]
    vector = best_axis(free, places_of(body))
    if vector is None:
        rows = [axis for axis in axes if are_independent(body, axis)]
        if rows and all(isinstance(statement, Scan) for statement in body) and _is_long_enough(rows[-1]):
            outer = tuple(axis for axis in axes if axis is not rows[-1])
            return Shape(outer, rows[-1], width_of(*body), MOST_WAYS, is_single=True)
        return Shape(axes, None, width_of(*body), 1)
    outer = tuple(axis for axis in axes if axis is not vector)
    turned = tuple(_turned_loads(outer[-1], vector, body)) if outer else ()
    ways = ways_of(*body, along=vector)
    in_lanes = any(vector in free_axes(node) for node in reductions)
    if not in_lanes and not any(map(_gains_by_ways, _operations_in(body, vector))):
        ways = min(ways, FEW_WAYS)
    return Shape(outer, vector, width_of(*body, along=vector), ways, turned)


def _turned_loads(row: Axis, lane: Axis, body: Sequence[Statement]) -> Iterator[Load]:
    """Only where both loops are whole squares of any vector's length, as `tile.py` makes them."""
    if any(axis.extent.terms or axis.extent.constant % SQUARE for axis in (row, lane)):
        return
    written = {buffer for statement in body for buffer in written_by(statement)}
    for node in dict.fromkeys(node for statement in body for node in always_read(statement)):
        place = linear(node.index, node.buffer.strides)
        if smoothness(place, lane) == 0 and smoothness(place, row) == 2 and node.buffer not in written:
            yield node


def always_read(part: Statement | Expr) -> Iterator[Load]:
    """Loads at every point, each once: not those that a guard or a requirement protects, nor those of reductions."""
    return (node for node in met_always(part) if isinstance(node, Load))


def best_axis(axes: Sequence[Axis], accesses: Iterable[tuple[Index, int]]) -> Axis | None:
    """The axis along which most accesses are without gaps; of equals the last. None if there is none."""
    accesses = [*accesses]
    best: tuple[int, int] | None = None
    chosen: Axis | None = None
    for position, axis in enumerate(axes):
        score = sum(weight * smoothness(offset, axis) for offset, weight in accesses)
        if not _is_long_enough(axis):
            score -= 1 << 20
        if best is None or (score, position) >= best:
            best, chosen = (score, position), axis
    return chosen


def _may_be_in_lanes(statement: Statement, axis: Axis) -> bool:
    if is_free_of_order(statement):
        return True
    writes = (access for access in accesses(statement) if access.writes)
    return all(smoothness(linear(access.index, access.buffer.strides), axis) == 2 for access in writes)


def _goes_along_its_own(node: Reduce, axis: Axis) -> bool:
    """Whether lanes along the axis would make a reduction step over memory that it could read without gaps."""
    return axis in free_axes(node) and best_axis((*node.axes, axis), loads_in(node.body)) is not axis


def smoothness(offset: Index, axis: Axis) -> int:
    """2 for neighbours in memory, 1 for one place, 0 for a known step, -1 for a place that must be looked up."""
    step = coefficient_of(offset, axis)
    if step is None:
        return -1
    if step.terms:
        return 0
    return {1: 2, 0: 1}.get(step.constant, 0)


def _is_long_enough(axis: Axis) -> bool:
    return bool(axis.extent.terms) or axis.extent.constant >= 4


def places_of(parts: Iterable[Statement | Expr]) -> Iterable[tuple[Index, int]]:
    """Every place in memory that is read or written, with what it weighs."""
    for part in parts:
        for node in walk(part):
            if isinstance(node, Load):
                yield linear(node.index, node.buffer.strides), 1
            elif isinstance(node, (Store, Accumulate)):
                yield linear(node.index, node.buffer.strides), STORE_WEIGHT


def loads_in(body: Expr) -> Iterable[tuple[Index, int]]:
    return places_of([body])


def width_of(*parts: Statement | Expr, along: Axis | None = None) -> int:
    """Bytes of the widest element that is computed with; positions and seeds do not count. At least 1.

    `along`: the axis in lanes, if only what varies along it matters.
    """
    widest = 1
    for part in _everything_in(parts, along):
        if isinstance(part, (Load, Apply, Store)):
            dtype = part.buffer.dtype if isinstance(part, Store) else part.dtype
            widest = max(widest, 4 if dtype.is_half else dtype.bytes)
        elif isinstance(part, Random):
            widest = max(widest, 4)
        elif isinstance(part, Scan) and part.value.dtype.is_float:
            widest = 8  # what runs along is kept in f64
    return widest


def ways_of(*parts: Statement | Expr, along: Axis | None = None) -> int:
    """Fewer vectors at once the more is computed with each of them."""
    operations = sum(RANDOM_WEIGHT if isinstance(part, Random) else 1 for part in _operations_in(parts, along))
    return MOST_WAYS if operations <= LONG_BODY else 2 if operations <= LONGEST_BODY else 1


def ways_in_reduction(body: Expr, along: Axis) -> int:
    """Of what a reduction with lanes along an axis combines: a vector from each of the places that it reads comes
    sooner than four from one and then four from the next. (256 MiB from four places, GB/s of loops in C on a Zen 4:
    27.5 and 31.4, from one place 27.5.)"""
    places = {part for part in _everything_in([body], along) if isinstance(part, Load)}
    return max(ways_of(body) // max(len(places), 1), 1)


def is_quick(part: Apply | Random) -> bool:
    """Whether it is done in a few instructions."""
    return isinstance(part, Apply) and part.operation in QUICK


def _gains_by_ways(part: Apply | Random) -> bool:
    """Whether it is a chain of instructions, each waiting for the one before, that others fill the gaps of."""
    return not is_quick(part) and not (isinstance(part, Apply) and part.operation in ONE_BY_ONE)


def _operations_in(parts: Iterable[Statement | Expr], along: Axis | None) -> list[Apply | Random]:
    return [part for part in _everything_in(parts, along) if isinstance(part, (Apply, Random))]


def _everything_in(parts: Iterable[Statement | Expr], along: Axis | None) -> set[Tree]:
    return {node for part in parts for node in walk(part) if along is None or along in free_axes(node)}


def are_independent(statements: Iterable[Statement], axis: Axis) -> bool:
    """Whether points that differ along the axis touch different places of what is written, so that their order does not
    matter along it. For every buffer that is written: all touch it at the one place of the point, or some dimension is
    indexed by the axis alone wherever it is touched, or several are that tell it."""
    touched: defaultdict[Buffer, list[Access]] = defaultdict(list)
    in_order: set[Buffer] = set()
    for statement in statements:
        for access in accesses(statement):
            touched[access.buffer].append(access)
        if not is_free_of_order(statement):
            in_order.update(written_by(statement))
    for buffer, those in touched.items():
        if not any(access.writes for access in those):
            continue
        if buffer not in in_order and len({access.index for access in those}) == 1:
            continue
        if any(all(axis_at(access.index[n]) is axis for access in those) for n in range(len(buffer.sizes))):
            continue
        if not _is_told_by_dimensions(buffer, those, axis):
            return False
    return True


def _is_told_by_dimensions(buffer: Buffer, those: Sequence[Access], axis: Axis) -> bool:
    """Whether dimensions that depend on the axis alone, and are the same wherever the buffer is touched, tell together
    where along the axis that was: `i_j // 16` and `i_j % 16`."""
    same = [n for n, places in enumerate(zip(*(access.index for access in those), strict=True)) if len({*places}) == 1]
    own = [n for n in same if free_axes(those[0].index[n]) == {axis} and not holds_data(those[0].index[n])]
    if len(own) < 2:
        return False
    place = linear([those[0].index[n] for n in own], contiguous_strides([buffer.sizes[n] for n in own]))
    step = coefficient_of(place, axis)
    return step is not None and not step.terms and step.constant != 0


def is_free_of_order(statement: Statement) -> bool:
    """Whether points never meet at one element, so that their order does not matter. Places from data may meet."""
    if not isinstance(statement, Store):
        return False
    return not any(map(holds_data, statement.index))


def is_large(buffer: Buffer, *, across: bool = False) -> bool:
    """Whether it is known to be larger than any cache, or than what a cache holds of a transpose."""
    elements = product(buffer.sizes)
    return not elements.terms and elements.constant * buffer.dtype.bytes >= (LARGE_ACROSS if across else LARGE)


def reductions_in(node: Statement | Expr) -> list[Reduce]:
    return [part for part in walk(node) if isinstance(part, Reduce)]
