"""What is asked for before it is needed: the processor foresees one stream of addresses, and starts anew wherever the
next address is elsewhere. A load in lanes then asks for memory some elements after its own, line by line.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence

from ferrite.loops.dtypes import i64
from ferrite.loops.index import Axis, Index, coefficient_of, free_axes, holds_data, of_atom, product
from ferrite.loops.nodes import Buffer, Checked, Expr, Load, Reduce, Statement
from ferrite.loops.rewrite import apply_rules, can_raise, walk
from ferrite.loops.shapes import linear
from ferrite.native.builder import Value
from ferrite.native.evaluate import Evaluator
from ferrite.native.scope import Ask, Scope
from ferrite.schedule.shape import LARGE, Shape, always_read, is_large, reductions_in, smoothness

PIECE_BYTES = range(1 << 10, 1 << 17)  # that are read one after the other, for which it pays to ask for the next ones
SOON, EARLY = 2, 4  # rows before one that is looked up: for its lines, and for where its page is
FURTHER = 1 << 11  # bytes to what is asked for of one stream
FEWEST_VECTORS = 8  # of a piece, if several are read together
FAR = 1 << 20  # bytes of a buffer that the second cache does not hold
CACHED = LARGE  # bytes of a buffer that the third cache may hold
LINE = 64  # bytes
FIRST_CACHE = 1 << 14  # bytes, half of it: what is needed only after more than that goes to the second one

Ahead = dict[Load, list[Ask]]


def together(*parts: Ahead) -> Ahead:
    found: Ahead = {}
    for part in parts:
        for load, asks in part.items():
            found.setdefault(load, []).extend(asks)
    return found


def next_rows(statements: Sequence[Statement], again: Iterable[Statement], inside: Sequence[Axis], row: Axis) -> Ahead:
    """What the next row starts with, for buffers that a reduction has read along the row and a loop over the axes
    `inside` reads again. (A layer norm of 8 MiB: 1.2 times as fast. Loops in C for a batch norm of 64 MiB, whose rows
    are channels of 1 MiB in pieces: 3.3 ms without, 3.6 with the next channel in the first cache, 2.9 in the second.)
    """
    summed = {node for part in statements for each in reductions_in(part) for node in walk(each.body)}
    loads = [node for part in again for node in walk(part) if isinstance(node, Load) and node not in summed]
    found: Ahead = {}
    elements = product(axis.extent for axis in inside)
    for buffer in {node.buffer for node in summed if isinstance(node, Load)}:
        is_short = not elements.terms and elements.constant * buffer.dtype.bytes <= FIRST_CACHE
        those = [node for node in loads if node.buffer is buffer]
        steps = {coefficient_of(linear(node.index, buffer.strides), row) for node in those}
        step = steps.pop() if len(steps) == 1 else None
        if step is not None and not step.terms and step.constant * buffer.dtype.bytes in PIECE_BYTES:
            found[those[0]] = [Ask(step.constant, 1 if is_short else 2)]
    return found


def next_looked_up(
    evaluator: Evaluator, statements: Iterable[Statement], made: Container[Buffer], row: Axis, lane: Axis, scope: Scope
) -> Ahead:
    """Where the next row is that an index from memory leads to: the index is looked up early, and not checked, since
    nothing is read from there. Where the index itself lies must need no check, and nothing of `made`, what the tree
    writes, may hold it. Of a row that comes later the ends are asked for here: then the processor knows the page when
    its lines are wanted. One that comes soon is asked for line by line, but only where results go past the caches:
    there it takes nobody's place. (Quarters of the rows of a table of 32, 64, 96, 128 and 256 MiB: with both 1.11,
    1.05, 1.04, 0.82 and 0.79 times as long as with neither, by ends alone 1.03, 0.91, 0.92, 0.90, 0.86; results of 32
    MiB and more go past the caches. All that with lines of the next row in the first cache; with those of the one after
    it in the second 1.08 times as fast.)"""
    found: Ahead = {}
    for node in dict.fromkeys(node for part in statements for node in always_read(part)):
        place = linear(node.index, node.buffer.strides)
        if not holds_data(place) or smoothness(place, lane) != 2 or row not in free_axes(place):
            continue
        unchecked = apply_rules(node, (_without_check,))
        if not _is_piece(node.buffer, lane) or not _is_far(node.buffer, CACHED + 1) or _takes_long(unchecked):
            continue
        if not all(
            _is_there(each, made) for each in walk(unchecked) if isinstance(each, Load) and each is not unchecked
        ):
            continue
        b, bare = evaluator.b, linear(unchecked.index, unchecked.buffer.strides) - of_atom(lane)
        if evaluator.streamed:
            following = _rows_after(evaluator, bare, row, SOON, scope)
            found[node] = [Ask(b.sub(following, evaluator.scalar_index(place - of_atom(lane), scope)), 2)]
        later = _rows_after(evaluator, bare, row, EARLY, scope)
        for end in (0, lane.extent.constant - 1):
            b.prefetch(evaluator.buffers[node.buffer], node.dtype, later, end, 1)
    return found


def _rows_after(evaluator: Evaluator, place: Index, row: Axis, count: int, scope: Scope) -> Value:
    """The place so many rows later, or in the last row."""
    b = evaluator.b
    axes = {axis: scope.position(axis) for axis in free_axes(place)}
    axes[row] = b.minimum(b.add(axes[row], count), b.sub(evaluator.scalar_index(row.extent, scope), 1))
    return evaluator.scalar_index(place, Scope(axes=axes))


def next_pieces(loads: Iterable[Load], around: Axis, lane: Axis) -> Ahead:
    """What is read in the next round of the loop around the lanes, where that is not what follows in memory.
    (Statistics of 64 channels of 64 MiB, 4 KiB by 4 KiB: 1.05 times as fast.)"""
    pieces = (node for node in loads if _is_piece(node.buffer, lane) and _is_far(node.buffer, FAR))
    return {node: [Ask(step, 2)] for node, step in _with_steps(pieces, around, lane) if step > lane.extent.constant}


def next_group(loads: Iterable[Load], lane: Axis, elements: int) -> Ahead:
    """What the next round of a long reduction along one stream reads, if the second cache does not hold it; along
    several, of memory that no cache holds, what is further on. (A sum of 32 MiB 1.035 times as fast, of 16 MiB 1.0;
    loops in C alike, and by twice as far 0.83 in both. Rows of 4 KiB that are read again 0.85. A sum of 256 MiB in four
    streams 1.03 to 1.08.)"""
    streams = [node for node in dict.fromkeys(loads) if smoothness(linear(node.index, node.buffer.strides), lane) == 2]
    if lane.extent.terms or lane.extent.constant * sum(node.dtype.bytes for node in streams) <= FIRST_CACHE:
        return {}
    if len(streams) == 1:
        return {node: [Ask(elements)] for node in streams if _is_far(node.buffer, FAR)}
    return {node: [Ask(FURTHER // node.dtype.bytes, 2)] for node in streams if is_large(node.buffer)}


def are_pieces_apart(body: Expr, around: Axis, lane: Axis, lanes: int) -> bool:
    """Whether rounds of the loop around the lanes of a reduction are taken together, from places that are far apart:
    all that it reads are pieces, of many vectors each, of memory that no cache holds. (Batch norm of 64 MiB, 4 KiB by
    4 KiB: 1.07 times as fast, and its three passes in C 1.3 times; of 8 MiB 0.95.)"""
    loads = [load for load in always_read(body) if lane in free_axes(load)]
    if not loads or around.extent.terms or lane.extent.terms or lane.extent.constant < FEWEST_VECTORS * lanes:
        return False
    return len(next_pieces(loads, around, lane)) == len(loads) and all(is_large(load.buffer) for load in loads)


def next_rows_across(loads: Iterable[Load], row: Axis, lane: Axis, count: int) -> Ahead:
    """What a sum across rows of memory that no cache holds reads after so many of them. (256 MiB in rows of 4 KiB: 1.1
    times as fast; into the first cache, as long as without.)"""
    large = (node for node in loads if is_large(node.buffer))
    return {node: [Ask(step * count, 2)] for node, step in _with_steps(large, row, lane) if step}


def next_tile(
    evaluator: Evaluator,
    turned: Iterable[Load],
    along: Iterable[Load],
    shape: Shape,
    tiles: Sequence[Axis],
    scope: Scope,
) -> Callable[[Value, int], None]:
    """Asks for vectors of the next tile, so many from a number on: of what is turned and of what is read along the
    lanes, each in the order in which it lies. `tiles`: the loops around one. So memory reads while lanes are moved
    about, and while results go past the caches. (Times are in `schedule/tile.py`.)"""
    b, row, lane, lanes = evaluator.b, shape.outer[-1], shape.vector, shape.lanes(evaluator.b.target.vector_bytes)
    assert lane is not None
    further = _one_further(evaluator, tiles, scope)
    wanted = [*((node, lane, row) for node in turned), *((node, row, lane) for node in along)]

    def ask(first: Value, count: int) -> None:
        for node, outer, inner in wanted:
            place = linear(node.index, node.buffer.strides)
            across = inner.extent.constant // lanes
            down, start = b.split(first, across)
            axes = {axis: scope.position(axis) for axis in free_axes(place) if axis not in (outer, inner)} | further
            for number in range(0, count, max(LINE // (lanes * node.dtype.bytes), 1)):
                axes[outer] = b.add(down, number // across)
                axes[inner] = b.mul(b.add(start, number % across), lanes)
                at = evaluator.scalar_index(place, Scope(axes=dict(axes)))
                b.prefetch(evaluator.buffers[node.buffer], node.dtype, at, 0, lanes, level=2)

    return ask


def _one_further(evaluator: Evaluator, axes: Sequence[Axis], scope: Scope) -> dict[Axis, Value]:
    """Where loops are, one in the other, when the innermost has turned once more."""
    b = evaluator.b
    *around, inner = axes
    position = b.add(scope.position(inner), 1)
    if not around:
        return {inner: position}
    is_over = b.eq(position, evaluator.scalar_index(inner.extent, scope))
    further = b.add(scope.position(around[-1]), b.convert(is_over, i64))
    return {inner: b.select(is_over, 0, position), around[-1]: further}


def rows_apart(statements: Iterable[Statement], row: Axis, lane: Axis) -> list[Load]:
    """What is read along the lanes, in rows that lie apart."""
    steps = _with_steps((node for part in statements for node in always_read(part)), row, lane)
    return [node for node, step in steps if step > lane.extent.constant]


def further_on(statements: Iterable[Statement], lane: Axis) -> Ahead:
    """What comes later in memory that no cache holds, where results go past the caches: nothing is read for them, and
    memory has time. (Loops in C, 64 MiB: a copy 1.04 times as fast; a rotary embedding, which has two tables to read
    from the second cache, 1.23.)"""
    found: Ahead = {}
    for node in dict.fromkeys(node for part in statements for node in always_read(part)):
        place = linear(node.index, node.buffer.strides)
        if smoothness(place, lane) == 2 and is_large(node.buffer) and not holds_data(place):
            found[node] = [Ask(FURTHER // node.dtype.bytes)]
    return found


def _with_steps(loads: Iterable[Load], around: Axis, lane: Axis) -> Iterator[tuple[Load, int]]:
    """Those that read memory along the lanes, with how far a round of the loop around moves them, if that is known."""
    for node in dict.fromkeys(loads):
        place = linear(node.index, node.buffer.strides)
        step = coefficient_of(place, around)
        if step is not None and not step.terms and smoothness(place, lane) == 2:
            yield node, step.constant


def _without_check(node: Expr) -> Expr | None:
    """checked(n[i], ...) -> n[i]"""
    return node.value if isinstance(node, Checked) else None


def _is_there(load: Load, made: Container[Buffer]) -> bool:
    """Whether memory may be read before its turn: nothing here writes it, and no data say where it is."""
    return load.buffer not in made and not any(map(holds_data, load.index))


def _takes_long(node: Load) -> bool:
    return can_raise(node) or any(isinstance(part, Reduce) for part in walk(node)) or len([*walk(node)]) > 8


def _is_piece(buffer: Buffer, lane: Axis) -> bool:
    return not lane.extent.terms and lane.extent.constant * buffer.dtype.bytes in PIECE_BYTES


def _is_far(buffer: Buffer, least: int) -> bool:
    """Whether it has so many bytes, or an unknown number."""
    elements = product(buffer.sizes)
    return bool(elements.terms) or elements.constant * buffer.dtype.bytes >= least
