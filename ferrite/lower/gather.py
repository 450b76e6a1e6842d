"""Rows of indexing: reads and writes at positions that come from data.

Every position is checked as eager checks it: which ops count negative positions from the end, which exception is
raised and with which words differs from op to op and stands in the row. Writes that may meet at one element combine
in loop order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ferrite.errors import Unsupported
from ferrite.loops.dtypes import DType, i64
from ferrite.loops.index import Index, IndexLike, data, index
from ferrite.loops.nodes import Accumulate, Buffer, Checked, Expr, Nest, Position, Statement, Store
from ferrite.loops.shapes import contiguous_strides
from ferrite.lower.table import lowers
from ferrite.lower.value import (
    Built,
    Result,
    Tensor,
    accumulator,
    apply,
    axes_for,
    broadcast_sizes,
    cast,
    const,
    expand,
    normalize_dim,
    points,
    scalar,
    select,
    tensor,
    view,
)
from ferrite.lower.view import from_front, slice_start

aten = torch.ops.aten

OUT_OF_RANGE = "index out of range in self"
OUT_OF_BOUNDS = "index {index} is out of bounds for dimension %d with size {size}"


def position(value: Expr, size: Index, *, wrap: bool, error: str, message: str) -> Index:
    """A position from data, checked against the size of the dimension that it points into."""
    return data(Checked(cast(value, i64), size, wrap, error, message), 0, size - 1)


def result_buffer(result: Result) -> Buffer:
    """The stand-in that a row's own loops write."""
    return Buffer("result", result.dtype, result.sizes, contiguous_strides(result.sizes))


def fill_nest(buffer: Buffer, value: Tensor) -> Nest:
    axes = axes_for(buffer.sizes)
    return Nest(axes, (Store(buffer, points(axes), cast(value.at(points(axes)), buffer.dtype)),))


# ---- reads


@lowers(aten.embedding.default)
def embedding(
    weight: Tensor, indices: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Tensor:
    """Rows of the table. Negative positions are out of range."""

    def body(*here: Index) -> Expr:
        row = position(indices.at(here[:-1]), weight.sizes[0], wrap=False, error="IndexError", message=OUT_OF_RANGE)
        return weight.at([row, here[-1]])

    return tensor([*indices.sizes, weight.sizes[1]], body)


@lowers(aten.index_select.default)
def index_select(x: Tensor, dim: int, indices: Tensor) -> Tensor:
    """Negative positions are out of range. Along the first dimension eager raises IndexError, else RuntimeError."""
    if x.rank == 0:
        raise Unsupported("index_select of a tensor without dimensions")
    dim = normalize_dim(dim, x.rank)
    error, message = "IndexError", OUT_OF_RANGE
    if dim > 0:
        error, message = "RuntimeError", "INDICES element is out of DATA bounds, id={index} axis_dim={size}"
    flat = indices if indices.rank else view(indices, [index(1)], lambda here: [])

    def body(*here: Index) -> Expr:
        at = position(flat.at([here[dim]]), x.sizes[dim], wrap=False, error=error, message=message)
        return x.at([*here[:dim], at, *here[dim + 1 :]])

    return tensor([*x.sizes[:dim], flat.sizes[0], *x.sizes[dim + 1 :]], body)


@lowers(aten.gather.default)
def gather(x: Tensor, dim: int, indices: Tensor, *, sparse_grad: bool = False) -> Tensor:
    """One element for each position; negative positions are out of bounds."""
    if x.rank == 0 or indices.rank == 0:
        raise Unsupported("gather of a tensor without dimensions")
    dim = normalize_dim(dim, x.rank)

    def body(*here: Index) -> Expr:
        at = position(indices.at(here), x.sizes[dim], wrap=False, error="RuntimeError", message=OUT_OF_BOUNDS % dim)
        return x.at([*here[:dim], at, *here[dim + 1 :]])

    return tensor(indices.sizes, body)


@lowers(aten.take.default)
def take(x: Tensor, indices: Tensor) -> Tensor:
    """Positions in row-major order, below zero from the end."""
    if x.rank != 1:
        raise Unsupported("take from several dimensions")
    message = "out of range: tried to access index {index} on a tensor of {size} elements."

    def body(*here: Index) -> Expr:
        return x.at([position(indices.at(here), x.sizes[0], wrap=True, error="IndexError", message=message)])

    return tensor(indices.sizes, body)


def advanced(x: Tensor, indices: Sequence[Tensor | None]) -> tuple[list[Index], Any]:
    """Sizes of `x[indices]`, and a function from a point of it to a point of x.

    Indexed dimensions that stand together are replaced where they stand; otherwise the positions come first.
    """
    padded = [*indices, *([None] * (x.rank - len(indices)))]
    indexed = [dim for dim, part in enumerate(padded) if part is not None]
    if any(part is not None and not part.dtype.is_int for part in padded):
        raise Unsupported("indexing with a mask", why="its size depends on data")
    shape = broadcast_sizes([part.sizes for part in padded if part is not None])
    together = indexed == list(range(indexed[0], indexed[-1] + 1))
    start = indexed[0] if together else 0
    others = [dim for dim in range(x.rank) if dim not in indexed]
    before = [dim for dim in others if dim < start] if together else []
    after = [dim for dim in others if dim not in before]
    sizes = [*(x.sizes[d] for d in before), *shape, *(x.sizes[d] for d in after)]

    def where(*here: Index) -> list[IndexLike]:
        middle = here[len(before) : len(before) + len(shape)]
        rest = [*here[: len(before)], *here[len(before) + len(shape) :]]
        at: dict[int, IndexLike] = dict(zip([*before, *after], rest, strict=True))
        for dim in indexed:
            part = padded[dim]
            assert part is not None
            value = expand(part, shape).at(middle)
            # Eager moves indexed dimensions to the front before it checks: its message counts from there.
            message = OUT_OF_BOUNDS % indexed.index(dim)
            at[dim] = position(value, x.sizes[dim], wrap=True, error="IndexError", message=message)
        return [at[dim] for dim in range(x.rank)]

    return sizes, where


@lowers(aten.index.Tensor, aten._unsafe_index.Tensor)
def index_tensor(x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    sizes, where = advanced(x, indices)
    return view(x, sizes, where)


# ---- writes


@lowers(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(
    x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False, *, result: Result
) -> Built:
    """A copy with elements replaced or added to; where positions repeat, the last one in loop order stays."""
    sizes, where = advanced(x, indices)
    buffer = result_buffer(result)
    axes = axes_for(sizes)
    here = points(axes)
    source = cast(expand(values, sizes).at(here), x.dtype)
    target = tuple(map(index, where(*here)))
    return Built((buffer,), (fill_nest(buffer, x), Nest(axes, (_write(buffer, target, source, accumulate),))))


def _write(buffer: Buffer, target: tuple[Index, ...], value: Expr, accumulate: bool) -> Statement:
    if not accumulate:
        return Store(buffer, target, value)
    if buffer.dtype.is_bool:
        return Accumulate("maximum", buffer, target, value)
    return Accumulate("add", buffer, target, value)


def scattered(x: Tensor, dim: int, indices: Tensor, value: Any, result: Result, operation: str | None) -> Built:
    """A copy of x with `value(here)` written to, or combined into, the position that `indices` names along `dim`."""
    if x.rank == 0 or indices.rank == 0:
        raise Unsupported("a scatter into a tensor without dimensions")
    dim = normalize_dim(dim, x.rank)
    buffer = result_buffer(result)
    axes = axes_for(indices.sizes)
    here = points(axes)
    at = position(indices.at(here), x.sizes[dim], wrap=False, error="RuntimeError", message=OUT_OF_BOUNDS % dim)
    target = (*here[:dim], at, *here[dim + 1 :])
    written = cast(value.at(here) if isinstance(value, Tensor) else scalar(value, x.dtype), x.dtype)
    statement: Statement = Store(buffer, target, written)
    if operation is not None:
        statement = Accumulate(operation, buffer, target, written)
    return Built((buffer,), (fill_nest(buffer, x), Nest(axes, (statement,))))


@lowers(aten.scatter.src)
def scatter_src(x: Tensor, dim: int, indices: Tensor, source: Tensor, *, result: Result) -> Built:
    return scattered(x, dim, indices, source, result, None)


@lowers(aten.scatter.value)
def scatter_value(x: Tensor, dim: int, indices: Tensor, value: Any, *, result: Result) -> Built:
    return scattered(x, dim, indices, value, result, None)


@lowers(aten.scatter_add.default)
def scatter_add(x: Tensor, dim: int, indices: Tensor, source: Tensor, *, result: Result) -> Built:
    half_sums(x.dtype, "scatter_add")
    return scattered(x, dim, indices, source, result, "maximum" if x.dtype.is_bool else "add")


def half_sums(dtype: DType, op: str) -> None:
    if accumulator(dtype) is not dtype and not dtype.is_bool:
        raise Unsupported(f"{op} of halves", why="eager rounds in an order of its own")


@lowers(aten.scatter_reduce.two)
def scatter_reduce(
    x: Tensor, dim: int, indices: Tensor, source: Tensor, reduce: str, *, include_self: bool = True, result: Result
) -> Built:
    operations = {"sum": "add", "prod": "mul", "amax": "maximum", "amin": "minimum"}
    if reduce not in operations or not include_self:
        raise Unsupported(f"scatter_reduce with {reduce}, include_self={include_self}")
    half_sums(x.dtype, "scatter_reduce")
    if x.dtype.is_bool:
        raise Unsupported("scatter_reduce of truth values")
    return scattered(x, dim, indices, source, result, operations[reduce])


@lowers(aten.index_add.default)
def index_add(x: Tensor, dim: int, indices: Tensor, source: Tensor, *, alpha: Any = 1, result: Result) -> Built:
    """Slices added at positions; negative ones are out of range."""
    if x.rank == 0 or indices.rank != 1 or x.dtype.is_bool:
        raise Unsupported("index_add without dimensions or of truth values")
    half_sums(x.dtype, "index_add")
    dim = normalize_dim(dim, x.rank)
    buffer = result_buffer(result)
    axes = axes_for(source.sizes)
    here = points(axes)
    error, message = ("IndexError", OUT_OF_RANGE) if x.rank == 1 else ("RuntimeError", OUT_OF_BOUNDS % dim)
    at = position(indices.at([here[dim]]), x.sizes[dim], wrap=False, error=error, message=message)
    value = cast(source.at(here), x.dtype)
    if isinstance(alpha, Index) or alpha != 1:
        value = apply("mul", value, scalar(alpha, x.dtype))
    nest = Nest(axes, (Accumulate("add", buffer, (*here[:dim], at, *here[dim + 1 :]), value),))
    return Built((buffer,), (fill_nest(buffer, x), nest))


@lowers(aten.embedding_dense_backward.default)
def embedding_dense_backward(
    grad: Tensor, indices: Tensor, num_weights: Any, padding_idx: int, scale_grad_by_freq: bool, *, result: Result
) -> Built:
    """Gradients added to the rows that were read; the padding row stays zero."""
    if scale_grad_by_freq:
        raise Unsupported("an embedding whose gradients are scaled by frequency")
    half_sums(grad.dtype, "embedding_dense_backward")
    buffer = result_buffer(result)
    axes = axes_for(grad.sizes)
    here = points(axes)
    row = cast(indices.at(here[:-1]), i64)
    at = position(row, index(num_weights), wrap=False, error="IndexError", message=OUT_OF_RANGE)
    value = select(apply("eq", row, const(padding_idx, i64)), const(0, grad.dtype), grad.at(here))
    zeros = Tensor(axes_for(result.sizes), const(0, result.dtype))
    nest = Nest(axes, (Accumulate("add", buffer, (at, here[-1]), value),))
    return Built((buffer,), (fill_nest(buffer, zeros), nest))


# ---- slices written as tensors


@lowers(aten.slice_scatter.default)
def slice_scatter(
    x: Tensor, source: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1, *, result: Result
) -> Built:
    dim = normalize_dim(dim, x.rank)
    buffer = result_buffer(result)
    axes = axes_for(source.sizes)
    here = points(axes)
    begin = slice_start(start, x.sizes[dim])
    target = (*here[:dim], begin + here[dim] * step, *here[dim + 1 :])
    return Built(
        (buffer,), (fill_nest(buffer, x), Nest(axes, (Store(buffer, target, cast(source.at(here), x.dtype)),)))
    )


@lowers(aten.select_scatter.default)
def select_scatter(x: Tensor, source: Tensor, dim: int, place: IndexLike) -> Tensor:
    """x with one slice replaced."""
    dim = normalize_dim(dim, x.rank)
    at = from_front(place, x.sizes[dim])
    here = points(x.axes)
    chosen = apply("eq", Position(here[dim]), Position(at))
    inner = cast(source.at([*here[:dim], *here[dim + 1 :]]), x.dtype)
    return Tensor(x.axes, select(chosen, inner, x.body))
