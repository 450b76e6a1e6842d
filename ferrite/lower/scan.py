"""Rows of cumulative ops: running results along one dimension."""

from __future__ import annotations

from typing import Any

import torch

from ferrite.errors import Unsupported
from ferrite.loops.index import Axis
from ferrite.loops.nodes import Buffer, Nest, Scan
from ferrite.loops.shapes import contiguous_strides
from ferrite.lower.table import lowers
from ferrite.lower.value import Built, Result, Tensor, axes_for, cast, normalize_dim, points

aten = torch.ops.aten


@lowers(aten.cumsum.default)
def cumsum(x: Tensor, dim: int, *, dtype: Any = None, result: Result) -> Built:
    """Integers and truth values run in i64, or in the dtype asked for."""
    return running("cumsum", x, dim, (result,))


@lowers(aten.cumprod.default)
def cumprod(x: Tensor, dim: int, *, dtype: Any = None, result: Result) -> Built:
    return running("cumprod", x, dim, (result,))


@lowers(aten.logcumsumexp.default)
def logcumsumexp(x: Tensor, dim: int, *, result: Result) -> Built:
    return running("logcumsumexp", x, dim, (result,))


@lowers(aten.cummax.default)
def cummax(x: Tensor, dim: int, *, result: Any) -> Built:
    return running("cummax", x, dim, result)


@lowers(aten.cummin.default)
def cummin(x: Tensor, dim: int, *, result: Any) -> Built:
    return running("cummin", x, dim, result)


def running(operation: str, x: Tensor, dim: int, results: tuple[Result, ...]) -> Built:
    """One nest over the other dimensions, a scan along this one; the first result has the dtype of the operand."""
    if x.rank == 0:
        raise Unsupported(f"{operation} of a tensor without dimensions")
    if x.dtype.is_bool and results[0].dtype.is_bool:
        raise Unsupported(f"{operation} of truth values")
    dim = normalize_dim(dim, x.rank)
    buffers = tuple(
        Buffer(f"result_{number}", entry.dtype, entry.sizes, contiguous_strides(entry.sizes))
        for number, entry in enumerate(results)
    )
    axes = axes_for(x.sizes)
    along: Axis = axes[dim]
    targets = tuple((buffer, points(axes)) for buffer in buffers)
    value = cast(x.at(points(axes)), results[0].dtype)
    scan = Scan(operation, along, targets, value)
    return Built(buffers, (Nest(tuple(axis for axis in axes if axis is not along), (scan,)),))
