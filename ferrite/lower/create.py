"""Rows of tensors made from nothing: filled, counted, and the same bits as another dtype."""

from __future__ import annotations

from typing import Any

import torch

from ferrite.errors import Unsupported
from ferrite.loops.dtypes import DType, f32, f64, i64
from ferrite.loops.index import ZERO, Index, floordiv, index
from ferrite.loops.nodes import Bits, Expr, Position
from ferrite.lower.table import lowers, views
from ferrite.lower.value import Tensor, apply, axes_for, cast, const, dtype_of, is_one, scalar, select, tensor

aten = torch.ops.aten


# ---- filled tensors


@lowers(aten.full.default)
def full(sizes: list[Any], value: Any, *, result: Any, **others: Any) -> Tensor:
    return Tensor(axes_for(result.sizes), scalar(value, result.dtype))


@lowers(aten.full_like.default)
def full_like(x: Tensor, value: Any, *, result: Any, **others: Any) -> Tensor:
    return Tensor(axes_for(result.sizes), scalar(value, result.dtype))


@lowers(
    aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default, aten.empty_permuted.default,
    aten.new_empty.default, aten.new_empty_strided.default,
)  # fmt: skip
def empty(*ignored: Any, result: Any, **others: Any) -> Tensor:
    """Eager gives whatever is in memory; zeros are as good, and cost nothing where never read. Where it must be
    deterministic it fills the memory, which is left to it; a graph is traced anew when that changes."""
    if torch.are_deterministic_algorithms_enabled():
        raise Unsupported("an empty tensor where algorithms are deterministic", why="eager fills it")
    if ZERO in result.strides:
        raise Unsupported("an empty tensor that lies over itself", why="no loop may write it")
    return Tensor(axes_for(result.sizes), const(0, result.dtype))


@lowers(aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default, aten.zero.default)
def zeros(*ignored: Any, result: Any, **others: Any) -> Tensor:
    return Tensor(axes_for(result.sizes), const(0, result.dtype))


@lowers(aten.ones.default, aten.ones_like.default, aten.new_ones.default)
def ones(*ignored: Any, result: Any, **others: Any) -> Tensor:
    return Tensor(axes_for(result.sizes), const(1, result.dtype))


@lowers(aten.new_full.default)
def new_full(x: Tensor, sizes: list[Any], value: Any, *, result: Any, **others: Any) -> Tensor:
    return Tensor(axes_for(result.sizes), scalar(value, result.dtype))


@lowers(aten.scalar_tensor.default)
def scalar_tensor(value: Any, *, result: Any, **others: Any) -> Tensor:
    return Tensor((), scalar(value, result.dtype))


@lowers(aten.fill.Scalar)
def fill(x: Tensor, value: Any) -> Tensor:
    return Tensor(x.axes, scalar(value, x.dtype))


@lowers(aten.fill.Tensor)
def fill_tensor(x: Tensor, value: Tensor) -> Tensor:
    return Tensor(x.axes, cast(value.at(()), x.dtype))


@lowers(aten.arange.default)
def arange_to(end: Any, *, result: Any, **others: Any) -> Tensor:
    return arange(0, end, 1, result=result)


@lowers(aten.arange.start, aten.arange.start_step)
def arange(start: Any, end: Any, step: Any = 1, *, result: Any, **others: Any) -> Tensor:
    """start + i * step, computed in i64 for integers and in f64 for floats, as eager accumulates."""

    def body(i: Index) -> Expr:
        if all(isinstance(v, (int, Index)) for v in (start, step)):
            value: Expr = apply("add", scalar(start, i64), apply("mul", Position(i), scalar(step, i64)))
            return cast(value, result.dtype)
        wide = apply("mul", cast(Position(i), f64), scalar(step, f64))
        return cast(apply("add", scalar(start, f64), wide), result.dtype)

    return tensor(result.sizes, body)


# An end may be a tensor without dimensions.


@lowers(aten.linspace.default, aten.linspace.Tensor_Tensor, aten.linspace.Tensor_Scalar, aten.linspace.Scalar_Tensor)
def linspace(start: Any, end: Any, steps: Any, *, result: Any, **others: Any) -> Tensor:
    """From both ends towards the middle, in the dtype of the result; integers by way of f64, cut off at the end."""

    def body(i: Index) -> Expr:
        return cast(_spaced(start, end, index(steps), i, result.dtype), result.dtype)

    return tensor(result.sizes, body)


@lowers(aten.logspace.default, aten.logspace.Tensor_Tensor, aten.logspace.Tensor_Scalar, aten.logspace.Scalar_Tensor)
def logspace(start: Any, end: Any, steps: Any, base: float = 10.0, *, result: Any, **others: Any) -> Tensor:
    """base to the power of what linspace gives, not rounded to a half in between."""

    def body(i: Index) -> Expr:
        exponent = _spaced(start, end, index(steps), i, result.dtype)
        return cast(apply("pow", const(base, exponent.dtype), exponent), result.dtype)

    return tensor(result.sizes, body)


def _spaced(start: Any, end: Any, steps: Index, i: Index, dtype: DType) -> Expr:
    """The first half counts up from `start`, the second one down from `end`: both ends are met exactly."""
    compute = f64 if not dtype.is_float else f32 if dtype.is_half else dtype
    # The ends are converted to the dtype of the result before anything else: of integers 2.7 is 2.
    low, high = (cast(_number(value, dtype), compute) for value in (start, end))
    if is_one(steps):
        return low
    step = apply("div", apply("sub", high, low), cast(Position(steps - 1), compute))
    ahead = apply("add", low, apply("mul", step, cast(Position(i), compute)))
    behind = apply("sub", high, apply("mul", step, cast(Position(steps - 1 - i), compute)))
    return select(apply("lt", Position(i), Position(floordiv(steps, 2))), ahead, behind)


def _number(value: Any, dtype: DType) -> Expr:
    return cast(value.at(()), dtype) if isinstance(value, Tensor) else scalar(value, dtype)


@lowers(aten.eye.default, aten.eye.m)
def eye(*ignored: Any, result: Any, **others: Any) -> Tensor:
    def body(row: Index, column: Index) -> Expr:
        return cast(apply("eq", Position(row), Position(column)), result.dtype)

    return tensor(result.sizes, body)


@views(aten.view.dtype)
def view_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The same bits as another dtype of the same width."""
    kind = dtype_of(dtype)
    if kind.bits != x.dtype.bits or kind.is_bool or x.dtype.is_bool:
        raise Unsupported("a view as a dtype of another width")
    return Tensor(x.axes, x.body if kind is x.dtype else Bits(kind, x.body))
