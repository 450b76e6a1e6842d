"""Rows of views and of ops that only move elements: the result reads its operand elsewhere.

`views` are those whose results share memory with their operand in eager; the others (flip, roll, repeat, cat, pad)
give new tensors. Sizes may be symbolic; zero-size and zero-dimensional tensors take the same road.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ferrite.errors import Unsupported
from ferrite.loops.index import Index, IndexLike, index, known_nonnegative, known_within, mod
from ferrite.loops.nodes import Expr, Guarded, Load, Position
from ferrite.loops.shapes import reshape_index as reshaped
from ferrite.lower.table import lowers, views
from ferrite.lower.value import (
    Result,
    Tensor,
    apply,
    axes_for,
    cast,
    const,
    expand,
    is_one,
    normalize_dim,
    points,
    scalar,
    tensor,
    view,
)
from ferrite.lower.value import select as choose

aten = torch.ops.aten


# ---- views


@views(aten.alias.default, aten.detach.default, aten.lift_fresh.default)
def alias(x: Tensor) -> Tensor:
    return x


@views(aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.view_copy.default)
def reshape(x: Tensor, sizes: Sequence[Any], *, result: Result) -> Tensor:
    """The same elements in row-major order; the trace has solved -1."""
    return view(x, result.sizes, lambda *here: reshaped(here, result.sizes, x.sizes))


@views(aten.expand.default)
def expanded(x: Tensor, sizes: Sequence[Any], *, implicit: bool = False, result: Result) -> Tensor:
    return expand(x, result.sizes)


@views(aten.permute.default)
def permute(x: Tensor, dims: Sequence[int]) -> Tensor:
    order = [normalize_dim(dim, x.rank) for dim in dims]
    return view(x, [x.sizes[dim] for dim in order], lambda *here: [here[order.index(dim)] for dim in range(x.rank)])


@views(aten.t.default)
def t(x: Tensor) -> Tensor:
    return x if x.rank < 2 else permute(x, [1, 0])


@views(aten.transpose.int)
def transpose(x: Tensor, first: int, second: int) -> Tensor:
    if x.rank == 0:
        return x
    order = list(range(x.rank))
    first, second = normalize_dim(first, x.rank), normalize_dim(second, x.rank)
    order[first], order[second] = order[second], order[first]
    return permute(x, order)


@views(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def squeeze(x: Tensor, dims: Any = None, *, result: Result) -> Tensor:
    return reshape(x, [], result=result)


@views(aten.unsqueeze.default)
def unsqueeze(x: Tensor, dim: int) -> Tensor:
    dim = dim + x.rank + 1 if dim < 0 else dim
    sizes = [*x.sizes[:dim], index(1), *x.sizes[dim:]]
    return view(x, sizes, lambda *here: [*here[:dim], *here[dim + 1 :]])


@views(aten.select.int)
def select(x: Tensor, dim: int, position: IndexLike) -> Tensor:
    """One slice along a dimension; below zero counts from the end. The trace has checked the range."""
    dim = normalize_dim(dim, x.rank)
    at = from_front(position, x.sizes[dim])
    return view(x, [*x.sizes[:dim], *x.sizes[dim + 1 :]], lambda *here: [*here[:dim], at, *here[dim:]])


def from_front(position: IndexLike, extent: Index) -> Index:
    position = index(position)
    if known_nonnegative(position):
        return position
    if known_nonnegative(-position - 1):
        return position + extent
    raise Unsupported(f"a position {position} of unknown sign")


@views(aten.slice.Tensor)
def slice_(x: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1, *, result: Result) -> Tensor:
    """Bounds are clamped to the tensor; the trace knows the length."""
    dim = normalize_dim(dim, x.rank)
    begin = slice_start(start, x.sizes[dim])
    return view(x, result.sizes, lambda *here: [*here[:dim], begin + here[dim] * step, *here[dim + 1 :]])


def slice_start(start: Any, extent: Index) -> Index:
    if start is None:
        return index(0)
    start = index(start)
    if start is index(0) or (known_nonnegative(start) and known_nonnegative(extent - start)):
        return start
    if known_nonnegative(start - extent):
        return extent
    if known_nonnegative(-start - 1):
        return (
            start + extent if known_nonnegative(start + extent) else index(0) if not extent.terms else _unknown(start)
        )
    return _unknown(start)


def _unknown(start: Index) -> Index:
    raise Unsupported(f"a slice that starts at {start}, which may lie before, in or behind the tensor")


@views(aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int)
def split(x: Tensor, *ignored: Any, result: Any, **others: Any) -> Any:
    raise Unsupported("a list of views", why="eager makes them without touching memory")


@views(aten.diagonal.default)
def diagonal(x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1, *, result: Result) -> Tensor:
    first, second = normalize_dim(dim1, x.rank), normalize_dim(dim2, x.rank)
    rest = [dim for dim in range(x.rank) if dim not in (first, second)]

    def where(*here: Index) -> list[IndexLike]:
        along = here[-1]
        position: dict[int, IndexLike] = dict(zip(rest, here[:-1], strict=True))
        position[first] = along + max(-offset, 0)
        position[second] = along + max(offset, 0)
        return [position[dim] for dim in range(x.rank)]

    return view(x, result.sizes, where)


@views(aten.unfold.default)
def unfold(x: Tensor, dim: int, size: int, step: int, *, result: Result) -> Tensor:
    """Windows along a dimension; the place in the window is a new last dimension."""
    if x.rank == 0:
        return view(x, result.sizes, lambda *here: [])
    dim = normalize_dim(dim, x.rank)
    return view(x, result.sizes, lambda *here: [*here[:dim], here[dim] * step + here[-1], *here[dim + 1 : -1]])


@views(aten.as_strided.default)
def as_strided(x: Tensor, sizes: Any, strides: Any, offset: Any = None, *, result: Result) -> Tensor:
    """Reads storage by distance. Only of a tensor that lies in memory in row-major order, from its start."""
    body = x.body
    if not isinstance(body, Load) or body.index != points(x.axes):
        raise Unsupported("as_strided of a value that is not in memory")
    raise Unsupported("as_strided", why="eager's view needs no loop")


# ---- moves


@lowers(aten.flip.default)
def flip(x: Tensor, dims: Sequence[int]) -> Tensor:
    turned = {normalize_dim(dim, x.rank) for dim in dims}

    def where(*here: Index) -> list[IndexLike]:
        return [x.sizes[dim] - 1 - at if dim in turned else at for dim, at in enumerate(here)]

    return view(x, x.sizes, where)


@lowers(aten.roll.default)
def roll(x: Tensor, shifts: Sequence[Any], dims: Sequence[int] = ()) -> Tensor:
    """Elements move up by the shift and come in again at the start; without dimensions, in row-major order."""
    if not dims:
        if x.rank != 1:
            raise Unsupported("a roll of all dimensions at once")
        dims = (0,)
    moved: dict[int, Index] = {}
    for dim, shift in zip(dims, shifts, strict=True):
        place = normalize_dim(dim, x.rank)
        moved[place] = moved.get(place, index(0)) + shift

    def where(*here: Index) -> list[IndexLike]:
        return [
            mod(at - moved[dim] + x.sizes[dim] * 0, x.sizes[dim]) if dim in moved and not is_one(x.sizes[dim]) else at
            for dim, at in enumerate(here)
        ]

    if any(not _positive(x.sizes[dim]) for dim in moved):
        raise Unsupported("a roll of a dimension that may be empty")
    return view(x, x.sizes, where)


def _positive(extent: Index) -> bool:
    return known_nonnegative(extent - 1)


@lowers(aten.repeat.default)
def repeat(x: Tensor, repeats: Sequence[Any], *, result: Result) -> Tensor:
    ahead = len(result.sizes) - x.rank

    def where(*here: Index) -> list[IndexLike]:
        return [
            at if size is extent else mod(at, extent) if _positive(extent) else at
            for at, size, extent in zip(here[ahead:], result.sizes[ahead:], x.sizes, strict=True)
        ]

    if any(not _positive(extent) for extent in x.sizes):
        raise Unsupported("a repeat of a tensor that may be empty")
    return view(x, result.sizes, where)


@lowers(aten.cat.default)
def cat(parts: Sequence[Tensor], dim: int = 0, *, result: Result) -> Tensor:
    """Each part on its own stretch of the dimension; empty one-dimensional tensors are passed over, as in eager."""
    rank = len(result.sizes)
    kept = [part for part in parts if not (part.rank == 1 and rank != 1)]
    dim = normalize_dim(dim, rank)
    axes = axes_for(result.sizes)
    here = points(axes)
    starts: list[Index] = [index(0)]
    for part in kept:
        starts.append(starts[-1] + part.sizes[dim])

    def piece(number: int) -> Expr:
        part, start = kept[number], starts[number]
        moved = [*here[:dim], here[dim] - start, *here[dim + 1 :]]
        return cast(part.at(moved), result.dtype)

    if not kept:
        raise Unsupported("a cat of nothing")
    body = piece(len(kept) - 1)
    if len(kept) > 1:
        last = len(kept) - 1
        along = Position(here[dim])
        body = Guarded(apply("ge", along, Position(starts[last])), body, const(0, result.dtype))
        for number in range(last - 1, -1, -1):
            inside = apply("lt", along, Position(starts[number + 1]))
            if number:
                inside = apply("and_", apply("ge", along, Position(starts[number])), inside)
            body = Guarded(inside, piece(number), body)
    return Tensor(axes, body)


@lowers(aten.constant_pad_nd.default)
def constant_pad(x: Tensor, pad: Sequence[Any], value: Any = 0, *, result: Result) -> Tensor:
    """Amounts come in pairs from the last dimension backwards; negative ones cut off."""
    before = [index(0)] * x.rank
    for number in range(len(pad) // 2):
        before[x.rank - 1 - number] = index(pad[2 * number])
    axes = axes_for(result.sizes)
    here = points(axes)
    moved = [at - ahead for at, ahead in zip(here, before, strict=True)]
    body = x.at(moved)
    for dim, at in enumerate(moved):
        if known_within(at, 0, x.sizes[dim]):
            continue
        low = apply("ge", Position(at), const(0, Position(at).dtype))
        high = apply("lt", Position(at), Position(x.sizes[dim]))
        body = Guarded(apply("and_", low, high), body, scalar(value, x.dtype))
    return Tensor(axes, body)


@lowers(aten.tril.default)
def tril(x: Tensor, diagonal: int = 0) -> Tensor:
    return _triangle(x, diagonal, "le")


@lowers(aten.triu.default)
def triu(x: Tensor, diagonal: int = 0) -> Tensor:
    return _triangle(x, diagonal, "ge")


def _triangle(x: Tensor, diagonal: int, keep: str) -> Tensor:
    """Elements with column - row <= (or >=) diagonal; zeros elsewhere, whatever stands there."""
    row, column = points(x.axes)[-2:]
    inside = apply(keep, Position(column), Position(row + diagonal))
    return Tensor(x.axes, choose(inside, x.body, const(0, x.dtype)))


@lowers(aten.eye.default, aten.eye.m)
def eye(*ignored: Any, result: Result, **others: Any) -> Tensor:
    def body(row: Index, column: Index) -> Expr:
        return cast(apply("eq", Position(row), Position(column)), result.dtype)

    return tensor(result.sizes, body)
