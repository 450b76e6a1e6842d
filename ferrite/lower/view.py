"""Rows of views and of ops that only move elements: the result reads its operand elsewhere.

`views` are those whose results share memory with their operand in eager; the others (copies of views, flip, roll,
repeat, cat, pad, and what autograd makes of views) give new tensors. Sizes may be symbolic; zero-size and
zero-dimensional tensors take the same road.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ferrite.errors import Unsupported
from ferrite.loops.index import (
    ZERO,
    Index,
    IndexLike,
    ceildiv,
    floordiv,
    index,
    known_nonnegative,
    maximum,
    minimum,
    mod,
    multiply,
    product,
)
from ferrite.loops.nodes import Buffer, Expr, Guarded, Nest, Position, Reduce, Store
from ferrite.loops.shapes import contiguous_strides
from ferrite.loops.shapes import reshape_index as reshaped
from ferrite.lower.table import lowers, views
from ferrite.lower.value import (
    Built,
    Result,
    Tensor,
    accumulator,
    apply,
    axes_for,
    cast,
    const,
    expand,
    is_one,
    normalize_dim,
    points,
    reduce_axes,
    scalar,
    view,
)
from ferrite.lower.value import select as choose

aten = torch.ops.aten


# ---- views


@views(aten.alias.default, aten.detach.default, aten.lift_fresh.default)
def alias(x: Tensor) -> Tensor:
    return x


@views(aten.view.default, aten.reshape.default, aten._unsafe_view.default)
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
def slice_(
    x: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: IndexLike = 1, *, result: Result
) -> Tensor:
    """Bounds are clamped to the tensor; the trace knows the length."""
    dim = normalize_dim(dim, x.rank)
    begin = slice_start(start, x.sizes[dim])
    return view(x, result.sizes, lambda *here: [*here[:dim], begin + multiply(here[dim], step), *here[dim + 1 :]])


def slice_start(start: Any, extent: Index) -> Index:
    """Where a slice starts: below zero counts from the end, and what lies outside is moved to the nearer end."""
    if start is None:
        return ZERO
    start = index(start)
    if known_nonnegative(start):
        return minimum(start, extent)
    if known_nonnegative(-start - 1):
        return maximum(start + extent, 0)
    raise Unsupported(f"a slice that starts at {start}, of unknown sign")


@views(
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unsafe_split.Tensor,  # the unsafe ones share memory as well, they only do not say so to autograd
    aten.unsafe_split_with_sizes.default,
)
def split(x: Tensor, length: Any, dim: int = 0, *, result: Sequence[Result]) -> list[Tensor]:
    """Stretches of a dimension, one behind the other; the trace knows how long each is."""
    dim = normalize_dim(dim, x.rank)
    parts, start = [], ZERO
    for part in result:
        parts.append(_stretch(x, dim, start, part.sizes))
        start = start + part.sizes[dim]
    return parts


def _stretch(x: Tensor, dim: int, start: Index, sizes: Sequence[Index]) -> Tensor:
    return view(x, sizes, lambda *here: [*here[:dim], here[dim] + start, *here[dim + 1 :]])


@views(aten.unbind.int)
def unbind(x: Tensor, dim: int = 0, *, result: Sequence[Result]) -> list[Tensor]:
    return [select(x, dim, number) for number in range(len(result))]


@views(aten.diagonal.default)
def diagonal(x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1, *, result: Result) -> Tensor:
    """The diagonal of two dimensions as a new last one; a positive offset starts that many columns in."""
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
def as_strided(x: Tensor, sizes: Any, strides: Any, offset: Any = None) -> Tensor:
    """Refused: it reads memory by distance, and a row does not know how its operand will lie in memory. Run by eager
    it costs nothing, and what reads it is lowered."""
    raise Unsupported("as_strided", why="eager's view needs no loop")


# ---- copies of views: the same rows, but the result is a tensor of its own

for _copy, _row in (
    (aten.alias_copy.default, alias), (aten.detach_copy.default, alias), (aten.lift_fresh_copy.default, alias),
    (aten.view_copy.default, reshape), (aten.expand_copy.default, expanded), (aten.permute_copy.default, permute),
    (aten.t_copy.default, t), (aten.transpose_copy.int, transpose), (aten.squeeze_copy.default, squeeze),
    (aten.squeeze_copy.dim, squeeze), (aten.squeeze_copy.dims, squeeze), (aten.unsqueeze_copy.default, unsqueeze),
    (aten.select_copy.int, select), (aten.slice_copy.Tensor, slice_), (aten.diagonal_copy.default, diagonal),
    (aten.unfold_copy.default, unfold), (aten.split_copy.Tensor, split),
    (aten.split_with_sizes_copy.default, split),
    (aten.unbind_copy.int, unbind),
):  # fmt: skip
    lowers(_copy)(_row)


@lowers(aten.narrow_copy.default)
def narrow_copy(x: Tensor, dim: int, start: IndexLike, length: IndexLike, *, result: Result) -> Tensor:
    dim = normalize_dim(dim, x.rank)
    return _stretch(x, dim, from_front(start, x.sizes[dim]), result.sizes)


# ---- what autograd makes of views, and writes through views: elements where they came from, something else elsewhere


def replaced(inside: list[Expr], value: Expr, otherwise: Expr) -> Expr:
    """`value` where all conditions hold; there, and only there, it may be read."""
    if not inside:
        return value
    condition = inside[0]
    for another in inside[1:]:
        condition = apply("and_", condition, another)
    return Guarded(condition, value, otherwise)


def within(at: Index, low: IndexLike, end: IndexLike) -> list[Expr]:
    """The conditions of low <= at < end that are not known to hold anyway."""
    conditions = []
    if not known_nonnegative(at - low):
        conditions.append(apply("ge", Position(at), Position(index(low))))
    if not known_nonnegative(index(end) - 1 - at):
        conditions.append(apply("lt", Position(at), Position(index(end))))
    return conditions


def sliced_into(base: Tensor, source: Tensor, dim: int, start: Index, step: IndexLike) -> Tensor:
    """`base` with `source` on every `step`-th place of a dimension from `start` on."""
    here = points(base.axes)
    ahead = here[dim] - start
    inside = within(ahead, 0, multiply(source.sizes[dim], step))
    if not is_one(index(step)):
        inside.append(apply("eq", Position(mod(ahead, step)), Position(ZERO)))
    value = source.at([*here[:dim], floordiv(ahead, step), *here[dim + 1 :]])
    return Tensor(base.axes, replaced(inside, cast(value, base.dtype), base.body))


def zeros(sizes: Sequence[Index], like: Tensor) -> Tensor:
    return Tensor(axes_for(sizes), const(0, like.dtype))


@lowers(aten.slice_backward.default)
def slice_backward(
    grad: Tensor, sizes: Any, dim: int, start: Any, end: Any, step: IndexLike, *, result: Result
) -> Tensor:
    dim = normalize_dim(dim, grad.rank)
    return sliced_into(zeros(result.sizes, grad), grad, dim, slice_start(start, result.sizes[dim]), step)


@lowers(aten.slice_scatter.default)
def slice_scatter(
    x: Tensor, source: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: IndexLike = 1
) -> Tensor:
    """The length of the source says where the slice ends."""
    dim = normalize_dim(dim, x.rank)
    return sliced_into(x, source, dim, slice_start(start, x.sizes[dim]), step)


def selected_into(base: Tensor, source: Tensor, dim: int, position: IndexLike) -> Tensor:
    """`base` with `source` as the slice at a position."""
    here = points(base.axes)
    at = Position(from_front(position, base.sizes[dim]))
    value = cast(source.at([*here[:dim], *here[dim + 1 :]]), base.dtype)
    return Tensor(base.axes, replaced([apply("eq", Position(here[dim]), at)], value, base.body))


@lowers(aten.select_backward.default)
def select_backward(grad: Tensor, sizes: Any, dim: int, position: IndexLike, *, result: Result) -> Tensor:
    return selected_into(zeros(result.sizes, grad), grad, normalize_dim(dim, len(result.sizes)), position)


@lowers(aten.select_scatter.default)
def select_scatter(x: Tensor, source: Tensor, dim: int, position: IndexLike) -> Tensor:
    return selected_into(x, source, normalize_dim(dim, x.rank), position)


def diagonal_into(base: Tensor, source: Tensor, offset: int, dim1: int, dim2: int) -> Tensor:
    """`base` with `source` on the diagonal of two dimensions; its last dimension runs along."""
    here = points(base.axes)
    first, second = normalize_dim(dim1, base.rank), normalize_dim(dim2, base.rank)
    rest = [at for dim, at in enumerate(here) if dim not in (first, second)]
    along = here[first] - max(-offset, 0)
    inside = [apply("eq", Position(here[second]), Position(here[first] + offset))]
    inside += within(along, 0, source.sizes[-1])
    value = cast(source.at([*rest, along]), base.dtype)
    return Tensor(base.axes, replaced(inside, value, base.body))


@lowers(aten.diagonal_backward.default)
def diagonal_backward(grad: Tensor, sizes: Any, offset: int, dim1: int, dim2: int, *, result: Result) -> Tensor:
    return diagonal_into(zeros(result.sizes, grad), grad, offset, dim1, dim2)


@lowers(aten.diagonal_scatter.default)
def diagonal_scatter(x: Tensor, source: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    return diagonal_into(x, source, offset, dim1, dim2)


@lowers(aten.diag_embed.default)
def diag_embed(x: Tensor, offset: int = 0, dim1: int = -2, dim2: int = -1, *, result: Result) -> Tensor:
    return diagonal_into(zeros(result.sizes, x), x, offset, dim1, dim2)


@lowers(aten.unfold_backward.default)
def unfold_backward(grad: Tensor, sizes: Any, dim: int, size: int, step: int, *, result: Result) -> Tensor:
    """Each element was in the windows w with w*step <= place < w*step + size: their gradients are summed, the first
    window first. Eager rounds halves after each addition; here they are summed in f32."""
    if not result.sizes:
        return Tensor((), grad.at([ZERO]))
    dim = normalize_dim(dim, len(result.sizes))
    axes = axes_for(result.sizes)
    here = points(axes)
    windows, compute = grad.sizes[dim], accumulator(grad.dtype)

    def of(window: Index) -> Expr:
        place = here[dim] - multiply(window, step)
        inside = [*within(window, 0, windows), *within(place, 0, size)]
        return replaced(inside, grad.at([*here[:dim], window, *here[dim + 1 :], place]), const(0, grad.dtype))

    last, overlap = floordiv(here[dim], step), ceildiv(size, step)
    if is_one(overlap):
        return Tensor(axes, of(last))
    (back,) = reduce_axes(grad.body, [overlap])
    summed = Reduce("sum", (back,), cast(of(last - overlap + 1 + points((back,))[0]), compute), "value")
    return Tensor(axes, cast(summed, grad.dtype))


# ---- moves


@lowers(aten.flip.default)
def flip(x: Tensor, dims: Sequence[int]) -> Tensor:
    turned = {normalize_dim(dim, x.rank) for dim in dims}

    def where(*here: Index) -> list[IndexLike]:
        return [x.sizes[dim] - 1 - at if dim in turned else at for dim, at in enumerate(here)]

    return view(x, x.sizes, where)


@lowers(aten.rot90.default)
def rot90(x: Tensor, times: int = 1, dims: Sequence[int] = (0, 1)) -> Tensor:
    """Quarter turns from the first dimension towards the second; negative ones turn back."""
    match times % 4:
        case 1:
            return transpose(flip(x, [dims[1]]), *dims)
        case 2:
            return flip(x, dims)
        case 3:
            return transpose(flip(x, [dims[0]]), *dims)
    return x


@lowers(aten.roll.default)
def roll(x: Tensor, shifts: Sequence[Any], dims: Sequence[int] = ()) -> Tensor:
    """Elements move up by the shift and come in again at the start; without dimensions, in row-major order."""
    if ZERO in x.sizes:
        return x  # there is no element, and no place to come in again
    if not dims:
        flat = [product(x.sizes)]
        straight = view(x, flat, lambda *here: reshaped(here, flat, x.sizes))
        rolled = roll(straight, shifts, (0,))
        return view(rolled, x.sizes, lambda *here: reshaped(here, x.sizes, flat))
    moved: dict[int, Index] = {}
    for dim, shift in zip(dims, shifts, strict=True):
        place = normalize_dim(dim, x.rank)
        if x.rank:
            moved[place] = moved.get(place, ZERO) + shift

    def where(*here: Index) -> list[IndexLike]:
        return [mod(at - moved[dim], x.sizes[dim]) if dim in moved else at for dim, at in enumerate(here)]

    return view(x, x.sizes, where)


@lowers(aten.repeat.default)
def repeat(x: Tensor, repeats: Sequence[Any], *, result: Result) -> Tensor:
    ahead = len(result.sizes) - x.rank

    def where(*here: Index) -> list[IndexLike]:
        return [
            at if size is extent or extent is ZERO else mod(at, extent)
            for at, size, extent in zip(here[ahead:], result.sizes[ahead:], x.sizes, strict=True)
        ]

    return view(x, result.sizes, where)


@lowers(aten.pixel_shuffle.default)
def pixel_shuffle(x: Tensor, factor: int, *, result: Result) -> Tensor:
    """Channels c*factor**2 + i*factor + j become the pixels (h*factor + i, w*factor + j) of channel c."""

    def where(*here: Index) -> list[IndexLike]:
        *batch, channel, high, wide = here
        corner = channel * factor * factor + mod(high, factor) * factor + mod(wide, factor)
        return [*batch, corner, floordiv(high, factor), floordiv(wide, factor)]

    return view(x, result.sizes, where)


@lowers(aten.pixel_unshuffle.default)
def pixel_unshuffle(x: Tensor, factor: int, *, result: Result) -> Tensor:
    """The way back."""

    def where(*here: Index) -> list[IndexLike]:
        *batch, channel, high, wide = here
        down, right = mod(floordiv(channel, factor), factor), mod(channel, factor)
        return [*batch, floordiv(channel, factor * factor), high * factor + down, wide * factor + right]

    return view(x, result.sizes, where)


@lowers(aten.channel_shuffle.default)
def channel_shuffle(x: Tensor, groups: IndexLike) -> Tensor:
    """Channels (group, place) are put in the order (place, group)."""
    inner = floordiv(x.sizes[1], groups)

    def where(*here: Index) -> list[IndexLike]:
        return [here[0], mod(here[1], groups) * inner + floordiv(here[1], groups), *here[2:]]

    return view(x, x.sizes, where)


# ---- tensors put together


def result_buffer(result: Result) -> Buffer:
    """The stand-in that a row's own loops write."""
    return Buffer("result", result.dtype, result.sizes, contiguous_strides(result.sizes))


MOST_PARTS_IN_ONE = 4  # more parts are copied by a loop each: every element would have to find its part


@lowers(aten.cat.default)
def cat(parts: Sequence[Tensor], dim: int = 0, *, result: Result) -> Tensor | Built:
    """Each part on its own stretch of the dimension; empty one-dimensional tensors are passed over, as in eager."""
    rank = len(result.sizes)
    dim = normalize_dim(dim, rank)
    kept = [part for part in parts if part.rank == rank and part.sizes[dim] is not ZERO]
    if not kept:
        return Tensor(axes_for(result.sizes), const(0, result.dtype))
    starts: list[Index] = [ZERO]
    for part in kept:
        starts.append(starts[-1] + part.sizes[dim])
    if len(kept) > MOST_PARTS_IN_ONE:
        return _copied(kept, result, lambda number, here: [*here[:dim], here[dim] + starts[number], *here[dim + 1 :]])
    axes = axes_for(result.sizes)
    here = points(axes)

    def piece(number: int) -> Expr:
        moved = [*here[:dim], here[dim] - starts[number], *here[dim + 1 :]]
        return cast(kept[number].at(moved), result.dtype)

    last = len(kept) - 1
    body = piece(last)
    if last:
        along = Position(here[dim])
        body = Guarded(apply("ge", along, Position(starts[last])), body, const(0, result.dtype))
        for number in range(last - 1, -1, -1):
            inside = apply("lt", along, Position(starts[number + 1]))
            if number:
                inside = apply("and_", apply("ge", along, Position(starts[number])), inside)
            body = Guarded(inside, piece(number), body)
    return Tensor(axes, body)


def _copied(parts: Sequence[Tensor], result: Result, where: Callable[[int, tuple[Index, ...]], Any]) -> Built:
    """Every part copied by a loop of its own to the place that `where` gives."""
    buffer = result_buffer(result)
    nests = []
    for number, part in enumerate(parts):
        target = tuple(map(index, where(number, points(part.axes))))
        nests.append(Nest(part.axes, (Store(buffer, target, cast(part.body, result.dtype)),)))
    return Built((buffer,), tuple(nests))


@lowers(aten.stack.default)
def stack(parts: Sequence[Tensor], dim: int = 0, *, result: Result) -> Tensor | Built:
    dim = normalize_dim(dim, len(result.sizes))
    if len(parts) > MOST_PARTS_IN_ONE:
        return _copied(parts, result, lambda number, here: [*here[:dim], number, *here[dim:]])
    axes = axes_for(result.sizes)
    here = points(axes)
    rest = [*here[:dim], *here[dim + 1 :]]
    body = cast(parts[-1].at(rest), result.dtype)
    for number in range(len(parts) - 2, -1, -1):
        chosen = apply("eq", Position(here[dim]), Position(index(number)))
        body = choose(chosen, cast(parts[number].at(rest), result.dtype), body)
    return Tensor(axes, body)


@lowers(aten.block_diag.default)
def block_diag(parts: Sequence[Tensor], *, result: Result) -> Tensor | Built:
    """Matrices along the diagonal, zeros elsewhere; a vector is a row, a number a matrix of one."""
    if len(parts) > MOST_PARTS_IN_ONE:
        raise Unsupported(f"block_diag of {len(parts)} tensors")
    body: Expr = const(0, result.dtype)
    here = points(axes_for(result.sizes))
    row = column = ZERO
    for part in parts:
        high, wide = [index(1), index(1), *part.sizes][-2:]
        down, right = here[0] - row, here[1] - column
        value = part.at([down, right][2 - part.rank :])
        body = replaced([*within(down, 0, high), *within(right, 0, wide)], cast(value, result.dtype), body)
        row, column = row + high, column + wide
    return Tensor(axes_for(result.sizes), body)


@lowers(aten.constant_pad_nd.default)
def constant_pad(x: Tensor, pad: Sequence[Any], value: Any = 0, *, result: Result) -> Tensor:
    """Amounts come in pairs from the last dimension backwards; negative ones cut off."""
    if ZERO in result.sizes:
        raise Unsupported("padding without a result", why="eager's strides are not those of the trace")
    before = [ZERO] * x.rank
    for number in range(len(pad) // 2):
        before[x.rank - 1 - number] = index(pad[2 * number])
    axes = axes_for(result.sizes)
    here = points(axes)
    moved = [at - ahead for at, ahead in zip(here, before, strict=True)]
    inside = [condition for at, extent in zip(moved, x.sizes, strict=True) for condition in within(at, 0, extent)]
    return Tensor(axes, replaced(inside, x.at(moved), scalar(value, x.dtype)))


@lowers(aten.tril.default)
def tril(x: Tensor, diagonal: IndexLike = 0) -> Tensor:
    return _triangle(x, diagonal, "le")


@lowers(aten.triu.default)
def triu(x: Tensor, diagonal: IndexLike = 0) -> Tensor:
    return _triangle(x, diagonal, "ge")


def _triangle(x: Tensor, diagonal: IndexLike, keep: str) -> Tensor:
    """Elements with column - row <= (or >=) diagonal; zeros elsewhere, whatever stands there."""
    row, column = points(x.axes)[-2:]
    inside = apply(keep, Position(column), Position(row + diagonal))
    return Tensor(x.axes, choose(inside, x.body, const(0, x.dtype)))
