"""Which stores go past the caches: those to memory that is larger than any cache, and that nobody reads again here.

A plain store first brings the line that it writes to into the cache, so to write costs as much again as to read; and
what was written first is gone when somebody comes to read it. Loops in C, one thread, 64 MiB of f32 to 64 MiB, on
caches of 32 KiB, 512 KiB and 32 MiB: 16 to 18 GB/s with plain stores, 22 past the caches. Memory wants long pieces of
it: in pieces of 256 bytes it took longer than plain stores, in pieces of 512 it did not.

Such stores are of whole vectors at aligned addresses. Of what a loop adds to an address that is known here, of where
memory starts not: `emit.py` asks, and has plain stores for memory that starts elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ferrite.loops.access import accesses
from ferrite.loops.index import ZERO, Axis, Index, coefficient_of, of_atom
from ferrite.loops.nodes import Buffer, Store
from ferrite.loops.shapes import linear
from ferrite.native.target import Target
from ferrite.schedule.arrange import Loop
from ferrite.schedule.shape import Shape, is_large, shape_of, smoothness

LONG_PIECE = 512  # bytes that are written one after the other
TILE_PIECE = 128  # the same where rows of a tile are turned in registers (`schedule/tile.py` has the times)
WIDTHS = (16, 32, 64)  # bytes that one instruction stores past the caches


def streamed_in(loop: Loop, target: Target) -> frozenset[Buffer]:
    """Buffers to which all stores of a tree go past the caches, if they start at a multiple of 64 bytes."""
    if not target.is_x86:
        return frozenset()
    touched = {access.buffer for part in loop.statements() for access in accesses(part)}
    leaves = [loop] if loop.is_leaf else [part for part in loop.body if isinstance(part, Loop)]
    turns = any(shape_of(leaf.axes, [*leaf.statements()]).turned for leaf in leaves)
    large = {buffer for buffer in touched if is_large(buffer, across=turns)}
    if not large:
        return frozenset()
    read = {access.buffer for part in loop.statements() for access in accesses(part) if not access.writes}
    return frozenset(large - read - set(_unfit(loop, (), target)))


def _unfit(loop: Loop, around: Sequence[Axis], target: Target, beside: Sequence[Loop] = ()) -> Iterable[Buffer]:
    """Buffers that are written otherwise than in whole aligned vectors, one after the other."""
    inner = [part for part in loop.body if isinstance(part, Loop)]
    for each in inner:
        yield from _unfit(each, (*around, *loop.axes), target, inner)
    shape = None if inner else shape_of(loop.axes, [*loop.statements()])
    for part in loop.body:
        if isinstance(part, Loop):
            continue
        if shape is None or not isinstance(part, Store) or not _in_long_pieces(part, shape, around, beside, target):
            yield from (access.buffer for access in accesses(part) if access.writes)


def _in_long_pieces(store: Store, shape: Shape, around: Sequence[Axis], beside: Sequence[Loop], target: Target) -> bool:
    """`beside`: the loops that run in turn with the one that stores, which may write what follows."""
    lane, lanes = shape.vector, shape.lanes(target.vector_bytes)
    place, size = linear(store.index, store.buffer.strides), store.buffer.dtype.bytes
    if lane is None or lane.extent.terms or smoothness(place, lane) != 2 or lanes * size not in WIDTHS:
        return False
    rest = place - of_atom(lane)
    if rest.constant % lanes or any(coefficient % lanes for coefficient, _ in rest.terms):
        return False
    piece = lane.extent.constant if shape.outer else _side_by_side(store.buffer, rest, lane, beside)
    for axis in reversed((*around, *shape.outer)):
        step = coefficient_of(place, axis)
        if step is None or step.terms or step.constant != piece or axis.extent.terms:
            break
        piece *= axis.extent.constant
    return piece * size >= (TILE_PIECE if shape.turned else LONG_PIECE)


def _side_by_side(buffer: Buffer, rest: Index, lane: Axis, beside: Sequence[Loop]) -> int:
    """How many elements loops of one axis write together, if each goes on where the one before it ended."""
    parts: list[tuple[Index, int]] = []
    for loop in beside:
        for part in loop.body:
            if isinstance(part, Store) and part.buffer is buffer and len(loop.axes) == 1:
                (axis,) = loop.axes
                start = linear(part.index, buffer.strides) - of_atom(axis) - rest
                parts.append((start, axis.extent.constant))
    end = parts[0][0] if parts else ZERO
    for start, length in parts:
        if start is not end or start.terms:
            return lane.extent.constant
        end = start + length
    return sum(length for _, length in parts) or lane.extent.constant
