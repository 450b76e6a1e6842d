"""Rows of cumulative ops: running results along one dimension."""

from __future__ import annotations

from typing import Any

import torch

from ferrite.errors import Unsupported
from ferrite.loops.index import Axis
from ferrite.loops.nodes import Buffer, Nest, Scan
from ferrite.loops.shapes import contiguous_strides
from ferrite.lower.table import lowers
from ferrite.lower.value import Built, Result, Tensor, axes_for, cast, const, normalize_dim, points

aten = torch.ops.aten


@lowers(aten.cumsum.default)
def cumsum(x: Tensor, dim: int, *, dtype: Any = None, result: Result) -> Any:
    """Integers and truth values run in i64, or in the dtype asked for, to which elements are converted first."""
    return running("cumsum", numbers(x, result, "cumsum"), dim, result)


@lowers(aten.cumprod.default)
def cumprod(x: Tensor, dim: int, *, dtype: Any = None, result: Result) -> Any:
    return running("cumprod", numbers(x, result, "cumprod"), dim, result)


@lowers(aten.logcumsumexp.default)
def logcumsumexp(x: Tensor, dim: int, *, result: Result) -> Any:
    if not x.dtype.is_float:
        raise Unsupported(f"logcumsumexp of {x.dtype}", why="eager raises")
    return running("logcumsumexp", x, dim, result)


@lowers(aten.cummax.default)
def cummax(x: Tensor, dim: int, *, result: Any) -> Any:
    """The greatest so far and its position, the last of equals; NaN stays."""
    return running("cummax", x, dim, *result)


@lowers(aten.cummin.default)
def cummin(x: Tensor, dim: int, *, result: Any) -> Any:
    return running("cummin", x, dim, *result)


def numbers(x: Tensor, result: Result, op: str) -> Tensor:
    """The elements in the dtype of the result. Eager has no kernel for truth values."""
    if result.dtype.is_bool:
        raise Unsupported(f"{op} of truth values", why="eager raises")
    return Tensor(x.axes, cast(x.body, result.dtype))


def running(operation: str, x: Tensor, dim: int, *results: Result) -> Built | Tensor | tuple[Tensor, ...]:
    """One nest over the other dimensions, a scan along this one. A tensor without dimensions is its own result, at
    position 0."""
    if x.rank == 0:
        parts = (x, *(Tensor((), const(0, entry.dtype)) for entry in results[1:]))
        return parts if len(results) > 1 else x
    dim = normalize_dim(dim, x.rank)
    buffers = tuple(
        Buffer(f"result_{number}", entry.dtype, entry.sizes, contiguous_strides(entry.sizes))
        for number, entry in enumerate(results)
    )
    axes = axes_for(x.sizes)
    along: Axis = axes[dim]
    targets = tuple((buffer, points(axes)) for buffer in buffers)
    scan = Scan(operation, along, targets, x.at(points(axes)))
    return Built(buffers, (Nest(tuple(axis for axis in axes if axis is not along), (scan,)),))
