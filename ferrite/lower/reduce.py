"""Rows of reductions: sums, extremes, statistics, normalisations and softmax.

Sums of halves run in f32 and are rounded once. Empty reductions give eager's identities; those that eager refuses are
refused by tracing before they reach us.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ferrite.errors import Unsupported
from ferrite.loops.dtypes import DType, i64
from ferrite.loops.index import Index, known_nonnegative, product
from ferrite.loops.nodes import Expr, Position
from ferrite.lower.pointwise import truth_of
from ferrite.lower.table import lowers
from ferrite.lower.value import (
    Result,
    Tensor,
    accumulator,
    apply,
    cast,
    const,
    dtype_of,
    expand,
    normalize_dim,
    pointwise,
    reduction,
    select,
    to_float,
)

aten = torch.ops.aten

Dims = Sequence[int] | int | None


def all_dims(dims: Dims, rank: int) -> list[int]:
    """The dimensions to reduce; none given means all of them."""
    if dims is None or (isinstance(dims, (list, tuple)) and len(dims) == 0):
        return list(range(rank))
    chosen = [dims] if isinstance(dims, int) else list(dims)
    return sorted({normalize_dim(dim, rank) for dim in chosen if rank or dim in (0, -1)} if rank else [])


def count(x: Tensor, dims: list[int]) -> Index:
    return product(x.sizes[dim] for dim in dims)


def total_of(x: Tensor, dims: list[int], keep: bool, result: DType) -> Tensor:
    """The sum in the accumulator's dtype, not yet rounded."""
    return reduction("sum", x, dims, keep=keep, result="value", accumulate=accumulator(result))


def converted(x: Tensor, dtype: DType) -> Tensor:
    return Tensor(x.axes, cast(x.body, dtype))


# ---- sums and products


@lowers(aten.sum.dim_IntList)
def sum_dims(
    x: Tensor, dims: Dims = None, keep: bool = False, *, dtype: torch.dtype | None = None, result: Result
) -> Tensor:
    """Integers and truth values are summed in i64."""
    return converted(
        total_of(converted(x, _operand(x, result)), all_dims(dims, x.rank), keep, result.dtype), result.dtype
    )


@lowers(aten.sum.default)
def sum_all(x: Tensor, *, dtype: torch.dtype | None = None, result: Result) -> Tensor:
    return sum_dims(x, None, False, dtype=dtype, result=result)


def _operand(x: Tensor, result: Result) -> DType:
    """What is summed: a wider result dtype applies before the sum, a half operand is widened by the sum itself."""
    return x.dtype if x.dtype is result.dtype else result.dtype


@lowers(aten.mean.dim, aten.mean.default)
def mean(
    x: Tensor, dims: Dims = None, keep: bool = False, *, dtype: torch.dtype | None = None, result: Result
) -> Tensor:
    chosen = all_dims(dims, x.rank)
    summed = total_of(converted(x, result.dtype), chosen, keep, result.dtype)
    number = cast(Position(count(x, chosen)), summed.dtype)
    return Tensor(summed.axes, cast(apply("div", summed.body, number), result.dtype))


@lowers(aten.prod.default)
def prod_all(x: Tensor, *, dtype: torch.dtype | None = None, result: Result) -> Tensor:
    return _product(x, list(range(x.rank)), False, result)


@lowers(aten.prod.dim_int)
def prod_dim(x: Tensor, dim: int, keep: bool = False, *, dtype: torch.dtype | None = None, result: Result) -> Tensor:
    return _product(x, all_dims(dim, x.rank), keep, result)


def _product(x: Tensor, dims: list[int], keep: bool, result: Result) -> Tensor:
    made = reduction(
        "prod", converted(x, result.dtype), dims, keep=keep, result="value", accumulate=accumulator(result.dtype)
    )
    return converted(made, result.dtype)


# ---- extremes


def not_empty(x: Tensor, dims: list[int]) -> None:
    if not all(known_nonnegative(x.sizes[dim] - 1) for dim in dims):
        raise Unsupported("an extreme over a dimension that may be empty", why="eager raises")


def extreme(operation: str, x: Tensor, dims: list[int], keep: bool, result: str) -> Tensor:
    not_empty(x, dims)
    return reduction(operation, x, dims, keep=keep, result=result)


@lowers(aten.amax.default)
def amax(x: Tensor, dims: Dims = (), keep: bool = False) -> Tensor:
    return extreme("max", x, all_dims(dims, x.rank), keep, "value")


@lowers(aten.amin.default)
def amin(x: Tensor, dims: Dims = (), keep: bool = False) -> Tensor:
    return extreme("min", x, all_dims(dims, x.rank), keep, "value")


@lowers(aten.max.default)
def max_all(x: Tensor) -> Tensor:
    return extreme("max", x, list(range(x.rank)), False, "value")


@lowers(aten.min.default)
def min_all(x: Tensor) -> Tensor:
    return extreme("min", x, list(range(x.rank)), False, "value")


@lowers(aten.max.dim)
def max_dim(x: Tensor, dim: int, keep: bool = False) -> tuple[Tensor, Tensor]:
    chosen = all_dims(dim, x.rank)
    return extreme("argmax", x, chosen, keep, "value"), extreme("argmax", x, chosen, keep, "index")


@lowers(aten.min.dim)
def min_dim(x: Tensor, dim: int, keep: bool = False) -> tuple[Tensor, Tensor]:
    chosen = all_dims(dim, x.rank)
    return extreme("argmin", x, chosen, keep, "value"), extreme("argmin", x, chosen, keep, "index")


@lowers(aten.argmax.default)
def argmax(x: Tensor, dim: int | None = None, keep: bool = False) -> Tensor:
    return extreme("argmax", x, all_dims(dim, x.rank), keep, "index")


@lowers(aten.argmin.default)
def argmin(x: Tensor, dim: int | None = None, keep: bool = False) -> Tensor:
    return extreme("argmin", x, all_dims(dim, x.rank), keep, "index")


@lowers(aten.aminmax.default)
def aminmax(x: Tensor, *, dim: int | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    chosen = all_dims(dim, x.rank)
    return extreme("min", x, chosen, keepdim, "value"), extreme("max", x, chosen, keepdim, "value")


# ---- truth


@lowers(aten.any.default, aten.any.dim, aten.any.dims)
def any_(x: Tensor, dims: Dims = None, keep: bool = False, *, result: Result) -> Tensor:
    made = reduction("any", truth_of(x), all_dims(dims, x.rank), keep=keep, result="value")
    return converted(made, result.dtype)


@lowers(aten.all.default, aten.all.dim, aten.all.dims)
def all_(x: Tensor, dims: Dims = None, keep: bool = False, *, result: Result) -> Tensor:
    made = reduction("all", truth_of(x), all_dims(dims, x.rank), keep=keep, result="value")
    return converted(made, result.dtype)


@lowers(aten.count_nonzero.default, aten.count_nonzero.dim_IntList)
def count_nonzero(x: Tensor, dims: Dims = None) -> Tensor:
    return reduction("sum", truth_of(x), all_dims(dims, x.rank), keep=False, result="value", accumulate=i64)


# ---- statistics


def moments(x: Tensor, dims: list[int], keep: bool, compute: DType) -> tuple[Tensor, Tensor]:
    """Mean, and the sum of squared distances from it."""
    made = [reduction("welford", x, dims, keep=keep, result=result, accumulate=compute) for result in ("mean", "m2")]
    return made[0], made[1]


def spread(x: Tensor, dims: list[int], keep: bool, correction: Any) -> Tensor:
    """m2 / max(n - correction, 0); NaN where that is 0 / 0, as eager."""
    compute = accumulator(x.dtype)
    _, m2 = moments(x, dims, keep, compute)
    number = apply(
        "sub", cast(Position(count(x, dims)), compute), const(1 if correction is None else correction, compute)
    )
    divisor = apply("maximum", number, const(0, compute))
    return Tensor(m2.axes, apply("div", m2.body, divisor))


@lowers(aten.var.correction)
def var(x: Tensor, dims: Dims = None, *, correction: Any = None, keepdim: bool = False) -> Tensor:
    return converted(spread(x, all_dims(dims, x.rank), keepdim, correction), x.dtype)


@lowers(aten.std.correction)
def std(x: Tensor, dims: Dims = None, *, correction: Any = None, keepdim: bool = False) -> Tensor:
    variance = spread(x, all_dims(dims, x.rank), keepdim, correction)
    return Tensor(variance.axes, cast(apply("sqrt", variance.body), x.dtype))


@lowers(aten.var_mean.correction)
def var_mean(x: Tensor, dims: Dims = None, *, correction: Any = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    chosen = all_dims(dims, x.rank)
    mean_, _ = moments(x, chosen, keepdim, accumulator(x.dtype))
    return var(x, dims, correction=correction, keepdim=keepdim), converted(mean_, x.dtype)


# ---- softmax


@lowers(aten._softmax.default)
def softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """exp(x - max) / sum(exp(x - max)) in at least f32; a row of -inf gives NaN, as eager."""
    shifted, denominator, compute = _shifted(x, dim)
    body = apply("div", apply("exp", shifted.body), denominator.body)
    return Tensor(x.axes, cast(body, compute if half_to_float else x.dtype))


@lowers(aten._log_softmax.default)
def log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    shifted, denominator, compute = _shifted(x, dim)
    body = apply("sub", shifted.body, apply("log", denominator.body))
    return Tensor(x.axes, cast(body, compute if half_to_float else x.dtype))


def _shifted(x: Tensor, dim: int) -> tuple[Tensor, Tensor, DType]:
    """x - max and sum(exp(x - max)) along a dimension, both in the accumulator's dtype and the shape of x."""
    chosen = all_dims(dim, x.rank)
    compute = accumulator(x.dtype)
    most = reduction("softmax", x, chosen, keep=True, result="max", accumulate=compute)
    summed = reduction("softmax", x, chosen, keep=True, result="sum", accumulate=compute)
    if x.rank == 0:
        most, summed = Tensor((), most.body), Tensor((), summed.body)
    wide = cast(x.body, compute)
    return Tensor(x.axes, apply("sub", wide, expand(most, x.sizes).body)), expand(summed, x.sizes), compute


@lowers(aten._softmax_backward_data.default)
def softmax_backward(grad: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    """(g - sum(g * y)) * y"""
    compute = accumulator(grad.dtype)
    weighted = pointwise(lambda g, y: apply("mul", g, y), grad, output, compute=compute)
    summed = reduction("sum", weighted, all_dims(dim, grad.rank), keep=True, result="value")
    summed = expand(summed if grad.rank else Tensor((), summed.body), grad.sizes)
    body = apply("mul", apply("sub", cast(grad.body, compute), summed.body), cast(output.body, compute))
    return Tensor(grad.axes, cast(body, dtype_of(input_dtype)))


@lowers(aten._log_softmax_backward_data.default)
def log_softmax_backward(grad: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    """g - exp(y) * sum(g)"""
    compute = accumulator(grad.dtype)
    summed = reduction("sum", grad, all_dims(dim, grad.rank), keep=True, result="value", accumulate=compute)
    summed = expand(summed if grad.rank else Tensor((), summed.body), grad.sizes)
    scaled = apply("mul", apply("exp", cast(output.body, compute)), summed.body)
    return Tensor(grad.axes, cast(apply("sub", cast(grad.body, compute), scaled), dtype_of(input_dtype)))


@lowers(aten.logsumexp.default)
def logsumexp(x: Tensor, dims: Dims, keep: bool = False) -> Tensor:
    """max + log(sum(exp(x - max))); where the maximum is infinite nothing is subtracted."""
    result = to_float(x.dtype)
    chosen = all_dims(dims, x.rank)
    not_empty(x, chosen)
    compute = accumulator(result)
    wide = converted(x, compute)
    most = reduction("max", wide, chosen, keep=True, result="value")
    if x.rank == 0:
        most = Tensor((), most.body)
    finite = Tensor(most.axes, select(apply("isinf", most.body), const(0, compute), most.body))
    gap = Tensor(x.axes, apply("exp", apply("sub", wide.body, expand(finite, x.sizes).body)))
    summed = reduction("sum", gap, chosen, keep=keep, result="value")
    base = reduction("max", wide, chosen, keep=keep, result="value")
    shift = select(apply("isinf", base.body), const(0, compute), base.body)
    return Tensor(summed.axes, cast(apply("add", apply("log", summed.body), shift), result))


# ---- normalisation


@lowers(aten.native_layer_norm.default)
def layer_norm(
    x: Tensor, shape: Sequence[Any], weight: Tensor | None, bias: Tensor | None, eps: float, *, result: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """(x - mean) * rstd * weight + bias over the last dimensions; statistics in at least f32."""
    dims = list(range(x.rank - len(shape), x.rank))
    compute = accumulator(x.dtype)
    mean_, m2 = moments(x, dims, True, compute)
    number = cast(Position(count(x, dims)), compute)
    rstd = Tensor(m2.axes, apply("rsqrt", apply("add", apply("div", m2.body, number), const(eps, compute))))
    centred = apply("sub", cast(x.body, compute), expand(mean_, x.sizes).body)
    body = apply("mul", centred, expand(rstd, x.sizes).body)
    if weight is not None:
        body = apply("mul", body, cast(expand(weight, x.sizes).body, compute))
    if bias is not None:
        body = apply("add", body, cast(expand(bias, x.sizes).body, compute))
    normal, kept_mean, kept_rstd = result
    return (
        Tensor(x.axes, cast(body, normal.dtype)),
        converted(mean_, kept_mean.dtype),
        converted(rstd, kept_rstd.dtype),
    )


@lowers(aten.linalg_vector_norm.default)
def vector_norm(
    x: Tensor, order: Any = 2, dims: Dims = None, keep: bool = False, *, dtype: Any = None, result: Result
) -> Tensor:
    """sum(|x|**order)**(1/order), with the limits for 0 and the infinities."""
    chosen = all_dims(dims, x.rank)
    compute = accumulator(result.dtype)
    size = Tensor(x.axes, apply("abs", cast(x.body, compute)))
    if order in (math.inf, -math.inf):
        not_empty(x, chosen)
        made = reduction("max" if order > 0 else "min", size, chosen, keep=keep, result="value")
        return converted(made, result.dtype)
    if order == 0:
        nonzero = Tensor(x.axes, cast(apply("ne", size.body, const(0, compute)), compute))
        return converted(reduction("sum", nonzero, chosen, keep=keep, result="value"), result.dtype)
    powered: Expr = size.body
    if order == 2:
        powered = apply("mul", size.body, size.body)
    elif order != 1:
        powered = apply("pow", size.body, const(order, compute))
    summed = reduction("sum", Tensor(x.axes, powered), chosen, keep=keep, result="value")
    if order == 1:
        return converted(summed, result.dtype)
    root = apply("sqrt", summed.body) if order == 2 else apply("pow", summed.body, const(1 / order, compute))
    return Tensor(summed.axes, cast(root, result.dtype))
