"""Sums across rows: row by row into a row of running values, instead of column by column.

    for i in lanes of box(1024):                    total = row(1024), all 0
        y[i] = sum(x[r, i] for r in box(64))   ->   for r in box(64), eight at a time:
                                                        for i in lanes of box(1024):
                                                            total[i] += (x[r, i] + x[r + 1, i]) + ...
                                                    for i in lanes of box(1024):
                                                        y[i] = total[i]

A vector of columns at a time goes from row to row, and takes a line or two of each: memory answers that at a quarter of
the speed at which it gives rows (one thread, 32 MiB of f32 in rows of 4 KiB: 5 GB/s, and 20 to 25 by rows). The running
values stay in the first cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

from ferrite.loops.index import Axis, coefficient_of, free_axes
from ferrite.loops.nodes import Apply, Expr, Fold, Guarded, Load, Nest, Random, Reduce, Statement
from ferrite.loops.rewrite import walk
from ferrite.loops.shapes import linear
from ferrite.native.ahead import next_rows_across
from ferrite.native.builder import Value, scalar
from ferrite.native.reduce import FOLDS, STRETCH, Reducer, Running, wide_of
from ferrite.native.scope import Lanes, Scope
from ferrite.schedule.shape import smoothness
from ferrite.schedule.split_reduction import movable_reductions

MOST_COLUMNS = 2048  # whose running values are kept at once
FEWEST_ROWS = 32  # 16 rows of 3 KiB to 4 MiB took as long column by column, in half the code
FAR = 1 << 10  # bytes from row to row
MANY_ROWS, FEW_ROWS = 8, 4  # read at once
LITTLE, MOST_WORK = 1, 8  # operations: with no more than so many the most rows; with more it is not worth it

Kept = dict[Reduce, Value]


def sums_across(around: Sequence[Axis], body: Sequence[Statement], lane: Axis) -> list[Reduce]:
    """Reductions of a loop in lanes that can run row by row, all along the same axis."""
    found = [node for node in movable_reductions(Nest(tuple(around), tuple(body))) if _runs_across(node, lane)]
    return [node for node in found if node.axes == found[0].axes]


def _runs_across(node: Reduce, lane: Axis) -> bool:
    if node.operation not in ("sum", "max", "min") or len(node.axes) != 1 or lane not in free_axes(node):
        return False
    if node.body.dtype.is_bool:
        return False
    (row,) = node.axes
    parts = [*walk(node.body)]
    if row.extent.terms or not FEWEST_ROWS <= row.extent.constant <= STRETCH * FEW_ROWS:
        return False
    if any(isinstance(part, (Reduce, Fold, Guarded, Random)) for part in parts) or _work([node]) > MOST_WORK:
        return False
    loads = [part for part in parts if isinstance(part, Load) and lane in free_axes(part)]
    return all(smoothness(linear(load.index, load.buffer.strides), lane) == 2 for load in loads) and any(
        _steps_far(load, row) for load in loads
    )


def _steps_far(load: Load, row: Axis) -> bool:
    step = coefficient_of(linear(load.index, load.buffer.strides), row)
    return step is not None and not step.terms and abs(step.constant) * load.buffer.dtype.bytes >= FAR


def _work(nodes: Sequence[Reduce]) -> int:
    return len({part for node in nodes for part in walk(node.body) if isinstance(part, Apply)})


def fold_rows(
    evaluator: Reducer, nodes: Sequence[Reduce], vector: Lanes, stop: Value, *, is_even: bool, scope: Scope
) -> Kept:
    """Memory with the results of the columns from where the lanes start to `stop`; `is_even`: whole vectors of them."""
    b, lane, lanes, start = evaluator.b, vector.axis, vector.lanes, vector.base
    (row,) = nodes[0].axes
    slots = {node: b.slot(scalar(wide_of(node)), MOST_COLUMNS + lanes) for node in nodes}
    loads = [part for part in dict.fromkeys(chain(*(walk(node.body) for node in nodes))) if isinstance(part, Load)]

    def over_columns(body: Callable[[Value, Value | None], None]) -> None:
        whole = stop if is_even else b.sub(stop, b.split(b.sub(stop, start), lanes)[1])
        with b.loop(start, whole, lanes, surely=is_even) as here:
            here.next()
            body(here.index, None)
        if not is_even:
            with b.loop(whole, stop, lanes) as here:
                here.next()
                body(here.index, b.tail(b.sub(stop, here.index), lanes).mask)

    def nothing(node: Reduce) -> Value:
        ((dtype, number),) = FOLDS[node.operation].start(wide_of(node), wide_of(node))
        return b.constant(dtype, number, lanes)

    def clear(position: Value, mask: Value | None) -> None:
        for node, slot in slots.items():
            b.store(nothing(node), slot, b.sub(position, start))

    def add(first: Value, count: int, *, afresh: bool = False) -> None:
        rows = [scope.inner(axes={row: b.add(first, number)}) for number in range(count)]
        ahead = next_rows_across(loads, row, lane, count)
        for number, each in enumerate(rows):
            for load in loads if number else ():
                evaluator.step_address(load, lane, row, number, rows[0], each)
            evaluator.hoist([node.body for node in nodes], lane, each)

        def one(position: Value, mask: Value | None) -> None:
            here = Lanes(lane, position, lanes, 1)
            inside = [each.inner(axes={lane: position}, vector=here, mask=mask, ahead=ahead) for each in rows]
            for node, slot in slots.items():
                fold, wide, place = FOLDS[node.operation], wide_of(node), b.sub(position, start)
                values: list[Running] = [(b.convert(evaluator.lanes(node.body, each), wide),) for each in inside]
                while len(values) > 1:
                    pairs = [fold.merge(b, *values[n : n + 2]) for n in range(0, len(values) - 1, 2)]
                    values = pairs + values[len(pairs) * 2 :]
                # Also the first ones are added to nothing: a sum of negative zeros is 0.
                before = nothing(node) if afresh else b.load(wide, slot, place, lanes)
                (total,) = fold.merge(b, (before,), values[0])
                b.store(total, slot, place)

        over_columns(one)

    at_once = MANY_ROWS if _work(nodes) <= LITTLE else FEW_ROWS
    left = row.extent.constant % at_once
    if left:
        add(b.constant(start.dtype, 0), left, afresh=True)
    else:
        over_columns(clear)
    with b.loop(left, row.extent.constant, at_once) as down:
        down.next()
        add(down.index, at_once)
    return slots


def kept_values(evaluator: Reducer, kept: Kept, start: Value, vector: Lanes) -> dict[Expr, Value]:
    """What was found for the columns in lanes."""
    b = evaluator.b
    found: dict[Expr, Value] = {}
    for node, slot in kept.items():
        value = b.load(wide_of(node), slot, b.sub(vector.base, start), vector.lanes, vector.ways)
        found[node] = b.convert(value, node.dtype)
    return found
