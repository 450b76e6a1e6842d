"""Which stores go past the caches: those to memory that is larger than any cache, and that nobody reads again here.

A plain store first brings the line that it writes to into the cache, so to write costs as much again as to read; and
what was written first is gone when somebody comes to read it. One thread, 64 MiB of f32 to 64 MiB, on caches of 32 KiB,
512 KiB and 32 MiB: 16 to 18 GB/s with plain stores, 22 past the caches. Memory wants long pieces of it: in pieces of
256 bytes it took longer than plain stores, in pieces of 512 it did not.

Such stores are of whole vectors at aligned addresses. Of what a loop adds to an address that is known here, of where
memory starts not: `emit.py` asks, and has plain stores for memory that starts elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ferrite.loops.access import accesses
from ferrite.loops.index import Axis, coefficient_of, of_atom, product
from ferrite.loops.nodes import Buffer, Store
from ferrite.loops.shapes import linear
from ferrite.native.target import Target
from ferrite.schedule.arrange import Loop
from ferrite.schedule.shape import shape_of

LARGE = 1 << 25  # bytes of a buffer
LONG_PIECE = 512  # bytes that are written one after the other
WIDTHS = (16, 32, 64)  # bytes that one instruction stores past the caches


def streamed_in(loop: Loop, target: Target) -> frozenset[Buffer]:
    """Buffers to which all stores of a tree go past the caches, if they start at a multiple of 64 bytes."""
    if not target.is_x86:
        return frozenset()
    large = {access.buffer for part in loop.statements() for access in accesses(part) if _is_large(access.buffer)}
    if not large:
        return frozenset()
    read = {access.buffer for part in loop.statements() for access in accesses(part) if not access.writes}
    return frozenset(large - read - set(_unfit(loop, (), target)))


def _is_large(buffer: Buffer) -> bool:
    elements = product(buffer.sizes)
    return not elements.terms and elements.constant * buffer.dtype.bytes >= LARGE


def _unfit(loop: Loop, around: Sequence[Axis], target: Target) -> Iterable[Buffer]:
    """Buffers that are written otherwise than in whole aligned vectors, one after the other."""
    shape = shape_of(loop.axes, [*loop.statements()]) if loop.is_leaf else None
    for part in loop.body:
        if isinstance(part, Loop):
            yield from _unfit(part, (*around, *loop.axes), target)
        elif shape is None or shape.vector is None or shape.turned or not isinstance(part, Store):
            yield from (access.buffer for access in accesses(part) if access.writes)
        elif not _in_long_pieces(part, (*around, *shape.outer), shape.vector, shape.lanes(target.vector_bytes)):
            yield part.buffer


def _in_long_pieces(store: Store, around: Sequence[Axis], lane: Axis, lanes: int) -> bool:
    place, size = linear(store.index, store.buffer.strides), store.buffer.dtype.bytes
    step = coefficient_of(place, lane)
    if step is None or step.terms or step.constant != 1 or lane.extent.terms or lanes * size not in WIDTHS:
        return False
    rest = place - of_atom(lane)
    if rest.constant % lanes or any(coefficient % lanes for coefficient, _ in rest.terms):
        return False
    piece = lane.extent.constant
    for axis in reversed(around):
        step = coefficient_of(place, axis)
        if step is None or step.terms or step.constant != piece or axis.extent.terms:
            break
        piece *= axis.extent.constant
    return piece * size >= LONG_PIECE
