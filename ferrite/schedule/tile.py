"""A nest that reads along one axis and writes along another runs in small tiles, so that both stay in the cache.

    for i, j in box(2048, 2048):                for i_block, j_block, i, j in box(64, 64, 32, 32):
        z[i, j] = x[i, j] + y[j, i]      ->         z[32*i_block + i, 32*j_block + j] = ...

Where the tiles do not fit the box there are further nests, for the rows and the columns that are left.

A tile is turned in registers, square by square (`native/emit.py`). If what is written is large, it goes past the caches
from there, and tiles are high and narrow: 1 KiB of memory that is read across, from which 32 rows are taken at once, as
many pages as the processor has at hand; two lines of each row that is written. While a tile is turned, all lines of the
next one are asked for, those that need no turning as well, in the order in which they lie (`native/ahead.py`). Loops in
C, two threads, three of [16384, 2048], a copy of as many bytes in 9.1 ms: 9.4 in tiles of 256 by 32, 10.1 by 64, 11.4
by 128; in tiles that are turned into memory of their own and then written 11.5, whatever their size; if lines are asked
for in the order in which squares need them 13; with plain stores 20. (Kernels of ours, turned into memory of their own
before, of the bandwidth of a copy: f32 plus a transpose 0.84, now 1.19; transposed 0.83, now 1.29; three of [2048,
2048] 0.87, now 1.26; f64 0.84, now 1.14; [4096, 4096] of bf16 transposed 0.40, now 1.15. What has rows that are not
whole lines is as it was.)

Law: points of a nest of plain stores write to different places, so their order does not matter.
"""

from __future__ import annotations

from ferrite.decisions import Decision
from ferrite.loops.access import written_by
from ferrite.loops.index import ZERO, Axis, Index, known_nonnegative, of_atom, product
from ferrite.loops.nodes import Load, Nest, Program, Statement
from ferrite.loops.rewrite import can_raise, fresh_name, names_in, substitute_axes
from ferrite.loops.shapes import linear
from ferrite.schedule.arrange import FEW_POINTS
from ferrite.schedule.decided import Decided, Refusal, on, refused
from ferrite.schedule.shape import (
    SQUARE,
    always_read,
    are_independent,
    best_axis,
    is_free_of_order,
    is_large,
    places_of,
    smoothness,
)

SIDE = SQUARE  # two cache lines of f32, and few enough rows for the first level of the TLB
HEIGHTS, WIDTH = (1024, 512, 256), 128  # bytes of large tiles, along what is read across and along what is written
WASTE = 8  # at most one part in so many of an axis is left by tiles


def tile_transposes(program: Program, side: int = SIDE) -> Decided:
    """Only in a kernel of one nest: nests that share loops run row by row."""
    if len(program.nests) != 1:
        crossed = [nest for nest in program.nests if isinstance(_crossed_axes(nest, side), tuple)]
        why = f"the kernel has {len(program.nests)} nests, which run row by row if they share loops"
        return Decided(program, tuple(refused("tile", on(program, nest.body), why) for nest in crossed))
    (nest,) = program.nests
    found = _crossed_axes(nest, side)
    if found is None:
        return Decided(program)
    if isinstance(found, Refusal):
        return Decided(program, (refused("tile", on(program, nest.body), found),))
    rows, columns = found
    taken = names_in(program)
    large = _large_tile(nest, rows, columns, side)
    height, width = large or (side, side)
    how = "the next of which is asked for" if large else "which the cache holds"
    why = f"{columns.name} and {rows.name} both run along memory: tiles of {height} by {width}, {how}"
    nests = tuple(_tiles(nest, rows, columns, (height, width), taken))
    tiled = Program(program.name, program.sizes, program.parameters, program.locals, nests)
    return Decided(tiled, (Decision("tile", on(program, nest.body), True, why),))


def _crossed_axes(nest: Nest, side: int) -> tuple[Axis, Axis] | Refusal | None:
    """The axis that goes into lanes behind another one, along which something that has gaps there has none. None if
    there is no such; why they are not tiled, if there is."""
    if len(nest.axes) < 2:
        return None
    places = [*places_of(nest.body)]
    lane = best_axis(nest.axes, places)
    jumping = [place for place, _ in places if lane is not None and smoothness(place, lane) <= 0]
    across = [axis for axis in nest.axes if any(smoothness(place, axis) == 2 for place in jumping)]
    if lane is None or not across:
        return None
    long = [axis for axis in across if axis is not lane and _is_long(axis, side)]
    if not long or not _is_long(lane, side):
        short = lane if long else across[0]
        return Refusal(f"{short.name} has {short.extent} points, no more than a tile of {side}")
    if not all(is_free_of_order(statement) for statement in nest.body):
        return Refusal("the order of its points matters")
    if any(map(can_raise, nest.body)):
        return Refusal("it may raise")
    if not all(are_independent(nest.body, axis) for axis in nest.axes):
        return Refusal("its points touch what others write")
    return long[0], lane


def _is_long(axis: Axis, side: int) -> bool:
    """Whether it is longer than a tile: a tile is not cut again. (Where a cache holds all lines of a short axis it pays
    to turn them in registers all the same: copies and sums of transposed rows of 48 to 96 took 0.9 to 3.6 times as long
    without, in the middle 1.2.)"""
    return bool(axis.extent.terms) or known_nonnegative(axis.extent - side - 1)


def _large_tile(nest: Nest, rows: Axis, columns: Axis, side: int) -> tuple[int, int] | None:
    """Height and width of tiles of what is large, if there are enough of them."""
    stores = {buffer for statement in nest.body for buffer in written_by(statement)}
    loads = _across(nest, rows, columns)
    if not loads or not all(is_large(buffer, across=True) for buffer in stores):
        return None
    width = max(WIDTH // max(buffer.dtype.bytes for buffer in stores), side)
    for length in HEIGHTS:
        height = max(length // max(load.dtype.bytes for load in loads), side)
        if not (_fits(rows, height) and _fits(columns, width)):
            continue
        others = product(axis.extent for axis in nest.axes if axis not in (rows, columns))
        if known_nonnegative(others * (rows.extent // height) * (columns.extent // width) - FEW_POINTS):
            return height, width
    return None


def _across(nest: Nest, rows: Axis, columns: Axis) -> list[Load]:
    """Loads at every point that have gaps along the columns and none along the rows."""
    loads = dict.fromkeys(load for statement in nest.body for load in always_read(statement))
    places = {load: linear(load.index, load.buffer.strides) for load in loads}
    return [load for load, at in places.items() if smoothness(at, columns) == 0 and smoothness(at, rows) == 2]


def _fits(axis: Axis, length: int) -> bool:
    extent = axis.extent
    return not extent.terms and extent.constant >= length and extent.constant % length * WASTE <= extent.constant


def _tiles(nest: Nest, rows: Axis, columns: Axis, tile: tuple[int, int], taken: set[str]) -> list[Nest]:
    """Whole tiles, then all of the rows that are left, then the columns that are left of the other rows."""
    height, width = tile
    row_block = _named(f"{rows.name}_block", rows.extent // height, taken)
    column_block = _named(f"{columns.name}_block", columns.extent // width, taken)
    row, column = _named(rows.name, height, taken), _named(columns.name, width, taken)
    others = tuple(axis for axis in nest.axes if axis not in (rows, columns))
    row_place, column_place = (
        of_atom(row_block) * height + of_atom(row),
        of_atom(column_block) * width + of_atom(column),
    )
    places = {rows: row_place, columns: column_place}
    made = [_moved(nest, (*others, row_block, column_block, row, column), places)]
    last_row = _named(rows.name, rows.extent % height, taken)
    if last_row.extent is not ZERO:
        at = rows.extent // height * height + of_atom(last_row)
        made.append(_moved(nest, (*others, last_row, columns), {rows: at}))
    last_column = _named(columns.name, columns.extent % width, taken)
    if last_column.extent is not ZERO:
        at = columns.extent // width * width + of_atom(last_column)
        made.append(_moved(nest, (*others, row_block, row, last_column), places | {columns: at}))
    return made


def _named(wish: str, extent: Index | int, taken: set[str]) -> Axis:
    name = fresh_name(wish, taken)
    taken.add(name)
    return Axis(name, ZERO + extent)


def _moved(nest: Nest, axes: tuple[Axis, ...], places: dict[Axis, Index]) -> Nest:
    body: tuple[Statement, ...] = tuple(substitute_axes(statement, places, axes) for statement in nest.body)
    return Nest(axes, body)
