"""Rows of tensors made from nothing: filled, counted, and the same bits as another dtype."""

from __future__ import annotations

from typing import Any

import torch

from ferrite.errors import Unsupported
from ferrite.loops.dtypes import f64, i64
from ferrite.loops.index import Index
from ferrite.loops.nodes import Bits, Expr, Position
from ferrite.lower.table import lowers
from ferrite.lower.value import Tensor, apply, axes_for, cast, const, dtype_of, scalar, tensor

aten = torch.ops.aten


# ---- filled tensors


@lowers(aten.full.default)
def full(sizes: list[Any], value: Any, *, result: Any, **others: Any) -> Tensor:
    return Tensor(axes_for(result.sizes), scalar(value, result.dtype))


@lowers(aten.full_like.default)
def full_like(x: Tensor, value: Any, *, result: Any, **others: Any) -> Tensor:
    return Tensor(axes_for(result.sizes), scalar(value, result.dtype))


@lowers(aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
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


@lowers(aten.arange.start_step)
def arange(start: Any, end: Any, step: Any = 1, *, result: Any, **others: Any) -> Tensor:
    """start + i * step, computed in i64 for integers and in f64 for floats, as eager accumulates."""

    def body(i: Index) -> Expr:
        if all(isinstance(v, (int, Index)) for v in (start, step)):
            value: Expr = apply("add", scalar(start, i64), apply("mul", Position(i), scalar(step, i64)))
            return cast(value, result.dtype)
        wide = apply("mul", cast(Position(i), f64), scalar(step, f64))
        return cast(apply("add", scalar(start, f64), wide), result.dtype)

    return tensor(result.sizes, body)


@lowers(aten.view.dtype)
def view_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The same bits as another dtype of the same width."""
    kind = dtype_of(dtype)
    if kind.bits != x.dtype.bits or kind.is_bool or x.dtype.is_bool:
        raise Unsupported("a view as a dtype of another width")
    return Tensor(x.axes, x.body if kind is x.dtype else Bits(kind, x.body))
