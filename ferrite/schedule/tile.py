"""A nest that reads along one axis and writes along another runs in small squares, so that both stay in the cache.

    for i, j in box(2048, 2048):                for i_block, j_block, i, j in box(64, 64, 32, 32):
        z[i, j] = x[i, j] + y[j, i]      ->         z[32*i_block + i, 32*j_block + j] = ...

Where the squares do not fit the box there are further nests, for the rows and the columns that are left.

Law: points of a nest of plain stores write to different places, so their order does not matter.
"""

from __future__ import annotations

from ferrite.loops.index import ZERO, Axis, Index, known_nonnegative, of_atom
from ferrite.loops.nodes import Nest, Program, Statement
from ferrite.loops.rewrite import can_raise, fresh_name, names_in, substitute_axes
from ferrite.schedule.shape import SQUARE, are_independent, best_axis, is_free_of_order, places_of, smoothness

SIDE = SQUARE  # two cache lines of f32, and few enough rows for the first level of the TLB


def tile_transposes(program: Program, side: int = SIDE) -> Program:
    """Only in a kernel of one nest: nests that share loops run row by row."""
    if len(program.nests) != 1:
        return program
    (nest,) = program.nests
    crossed = _crossed_axes(nest, side)
    if crossed is None:
        return program
    nests = tuple(_squares(nest, *crossed, side, names_in(program)))
    return Program(program.name, program.sizes, program.parameters, program.locals, nests)


def _crossed_axes(nest: Nest, side: int) -> tuple[Axis, Axis] | None:
    """The axis that goes into lanes, and another one along which something that has gaps there has none."""
    if not all(is_free_of_order(statement) for statement in nest.body) or any(map(can_raise, nest.body)):
        return None
    if not all(are_independent(nest.body, axis) for axis in nest.axes):
        return None
    places = [offset for offset, _ in places_of(nest.body)]
    lane = best_axis(nest.axes, places_of(nest.body))
    if lane is None or not _is_long(lane, side):
        return None
    jumping = [place for place in places if smoothness(place, lane) <= 0]
    for other in nest.axes:
        if other is not lane and _is_long(other, side) and any(smoothness(place, other) == 2 for place in jumping):
            return other, lane
    return None


def _is_long(axis: Axis, side: int) -> bool:
    """Shorter axes stay whole."""
    return bool(axis.extent.terms) or known_nonnegative(axis.extent - 4 * side)


def _squares(nest: Nest, rows: Axis, columns: Axis, side: int, taken: set[str]) -> list[Nest]:
    """Whole squares, then all of the rows that are left, then the columns that are left of the other rows."""
    whole_rows, whole_columns = rows.extent // side, columns.extent // side
    row_block, column_block = (_named(f"{axis.name}_block", axis.extent // side, taken) for axis in (rows, columns))
    row, column = (_named(axis.name, side, taken) for axis in (rows, columns))
    others = tuple(axis for axis in nest.axes if axis not in (rows, columns))
    places = {rows: of_atom(row_block) * side + of_atom(row), columns: of_atom(column_block) * side + of_atom(column)}
    made = [_moved(nest, (*others, row_block, column_block, row, column), places)]
    last_row = _named(rows.name, rows.extent % side, taken)
    if last_row.extent is not ZERO:
        made.append(_moved(nest, (*others, last_row, columns), {rows: whole_rows * side + of_atom(last_row)}))
    last_column = _named(columns.name, columns.extent % side, taken)
    if last_column.extent is not ZERO:
        rest = {rows: places[rows], columns: whole_columns * side + of_atom(last_column)}
        made.append(_moved(nest, (*others, row_block, row, last_column), rest))
    return made


def _named(wish: str, extent: Index | int, taken: set[str]) -> Axis:
    name = fresh_name(wish, taken)
    taken.add(name)
    return Axis(name, ZERO + extent)


def _moved(nest: Nest, axes: tuple[Axis, ...], places: dict[Axis, Index]) -> Nest:
    body: tuple[Statement, ...] = tuple(substitute_axes(statement, places, axes) for statement in nest.body)
    return Nest(axes, body)
