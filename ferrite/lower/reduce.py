"""Rows of reductions: sums, extremes, statistics, norms and softmax.

Sums of halves run in f32 and are rounded once. Empty reductions give eager's identities; those that eager refuses are
refused by tracing before they reach us.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ferrite.errors import Unsupported
from ferrite.loops.dtypes import DType, b8, f64, i64
from ferrite.loops.index import ONE, Index, known_nonnegative, minimum, of_atom, product
from ferrite.loops.nodes import Expr, Guarded, Position
from ferrite.loops.shapes import contiguous_strides, linear
from ferrite.lower.pointwise import floats_only, isfinite, logical_not, not_bool, truth_of
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
    of_one_dtype,
    pointwise,
    promote,
    reduction,
    select,
    to_float,
    view,
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


def number_of(x: Tensor, dims: list[int], dtype: DType, fewer: int = 0) -> Expr:
    """How many elements are reduced, less a few, as a number."""
    number = count(x, dims) - fewer
    return cast(Position(number), dtype) if number.terms else const(number.constant, dtype)


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
    """Integers and truth values are summed in i64. A sum that is asked for as a truth value is `any`."""
    if result.dtype.is_bool:
        return reduction("any", truth_of(x), all_dims(dims, x.rank), keep=keep, result="value")
    return converted(
        total_of(converted(x, _operand(x, result)), all_dims(dims, x.rank), keep, result.dtype), result.dtype
    )


@lowers(aten.sum.default)
def sum_all(x: Tensor, *, dtype: torch.dtype | None = None, result: Result) -> Tensor:
    return sum_dims(x, None, False, dtype=dtype, result=result)


def _operand(x: Tensor, result: Result) -> DType:
    """What is summed: a wider result dtype applies before the sum, a half operand is widened by the sum itself."""
    return x.dtype if x.dtype is result.dtype else result.dtype


@lowers(aten.nansum.default)
def nansum(
    x: Tensor, dims: Dims = None, keep: bool = False, *, dtype: torch.dtype | None = None, result: Result
) -> Tensor:
    """NaN counts as 0, before anything is converted."""
    if x.dtype.is_float:
        x = Tensor(x.axes, select(apply("isnan", x.body), const(0, x.dtype), x.body))
    return sum_dims(x, dims, keep, dtype=dtype, result=result)


@lowers(aten.trace.default)
def trace(x: Tensor, *, result: Result) -> Tensor:
    """The sum of the diagonal; integers in i64."""
    if x.dtype.is_bool:
        raise Unsupported("the trace of truth values", why="eager raises")
    diagonal = view(x, [minimum(*x.sizes)], lambda place: [place, place])
    return sum_all(diagonal, result=result)


@lowers(aten.mean.dim, aten.mean.default)
def mean(
    x: Tensor, dims: Dims = None, keep: bool = False, *, dtype: torch.dtype | None = None, result: Result
) -> Tensor:
    chosen = all_dims(dims, x.rank)
    summed = total_of(converted(x, result.dtype), chosen, keep, result.dtype)
    number = number_of(x, chosen, summed.dtype)
    return Tensor(summed.axes, cast(apply("div", summed.body, number), result.dtype))


@lowers(aten.prod.default)
def prod_all(x: Tensor, *, dtype: torch.dtype | None = None, result: Result) -> Tensor:
    return _product(x, list(range(x.rank)), False, result)


@lowers(aten.prod.dim_int)
def prod_dim(x: Tensor, dim: int, keep: bool = False, *, dtype: torch.dtype | None = None, result: Result) -> Tensor:
    return _product(x, all_dims(dim, x.rank), keep, result)


def _product(x: Tensor, dims: list[int], keep: bool, result: Result) -> Tensor:
    """A product that is asked for as a truth value is `all`."""
    if result.dtype.is_bool:
        return reduction("all", truth_of(x), dims, keep=keep, result="value")
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
    not_bool(x.dtype, "argmax")
    return extreme("argmax", x, all_dims(dim, x.rank), keep, "index")


@lowers(aten.argmin.default)
def argmin(x: Tensor, dim: int | None = None, keep: bool = False) -> Tensor:
    not_bool(x.dtype, "argmin")
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
    """m2 / max(n - correction, 0); NaN where that is 0 / 0, as eager. In f64, as eager: of 10000 and thousandths around
    it f32 has hardly a digit, and numbers of 3e38 have no sum in it."""
    _, m2 = moments(converted(x, f64), dims, keep, f64)
    number = number_of(x, dims, f64)
    less = apply("sub", number, const(1 if correction is None else correction, f64))
    divisor = apply("maximum", less, const(0, f64))
    return Tensor(m2.axes, apply("div", m2.body, divisor))


@lowers(aten.var.correction)
def var(x: Tensor, dims: Dims = None, *, correction: Any = None, keepdim: bool = False) -> Tensor:
    return converted(spread(x, all_dims(dims, x.rank), keepdim, correction), x.dtype)


@lowers(aten.std.correction)
def std(x: Tensor, dims: Dims = None, *, correction: Any = None, keepdim: bool = False) -> Tensor:
    """Its root may fit f32 where the variance does not."""
    floats_only(x, "std")
    variance = spread(x, all_dims(dims, x.rank), keepdim, correction)
    return Tensor(variance.axes, cast(apply("sqrt", variance.body), x.dtype))


@lowers(aten.var_mean.correction)
def var_mean(x: Tensor, dims: Dims = None, *, correction: Any = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return var(x, dims, correction=correction, keepdim=keepdim), _mean_of(x, all_dims(dims, x.rank), keepdim)


@lowers(aten.std_mean.correction)
def std_mean(x: Tensor, dims: Dims = None, *, correction: Any = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return std(x, dims, correction=correction, keepdim=keepdim), _mean_of(x, all_dims(dims, x.rank), keepdim)


def _mean_of(x: Tensor, dims: list[int], keep: bool) -> Tensor:
    """The mean that goes with a variance; NaN over no elements.

    Eager keeps a running mean. An infinite element makes it infinite and the next one NaN, so that the mean is infinite
    only if no element but the last one is. Nobody looks for others unless the variance says that there is something.
    """
    mean_, m2 = moments(converted(x, f64), dims, keep, f64)
    number = count(x, dims)
    sizes = [x.sizes[dim] for dim in dims]
    place = linear([of_atom(x.axes[dim]) for dim in dims], contiguous_strides(sizes))
    is_followed = apply("lt", Position(place), Position(number - 1))
    odd = apply("and_", logical_not(isfinite(x).body), is_followed)
    others = reduction("any", Tensor(x.axes, odd), dims, keep=keep, result="value")
    is_nan = Guarded(apply("isnan", m2.body), others.body, const(False, b8))
    body = select(is_nan, const(math.nan, m2.dtype), mean_.body)
    if not known_nonnegative(number - 1):
        body = select(apply("eq", Position(number), const(0, i64)), const(math.nan, body.dtype), body)
    return Tensor(mean_.axes, cast(body, x.dtype))


# ---- softmax


@lowers(aten._softmax.default)
def softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """exp(x - max) / sum(exp(x - max)) in at least f32; a row of -inf gives NaN, as eager."""
    shifted, denominator, compute = _shifted(x, dim)
    body = apply("div", apply("exp", shifted.body), denominator.body)
    return Tensor(x.axes, cast(body, compute if half_to_float else x.dtype))


@lowers(aten._safe_softmax.default)
def safe_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """As softmax, but a row of -inf gives zeros."""
    wide = x if dtype is None else converted(x, dtype_of(dtype))
    made = softmax(wide, dim, False)
    masked = Tensor(wide.axes, apply("eq", wide.body, const(-math.inf, wide.dtype)))
    hidden = reduction("all", masked, all_dims(dim, x.rank), keep=True, result="value")
    hidden = expand(hidden if x.rank else Tensor((), hidden.body), x.sizes)
    return Tensor(made.axes, select(hidden.body, const(0, made.dtype), made.body))


@lowers(aten._log_softmax.default)
def log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """(x - max) - log(sum(exp(x - max))). Along the last dimension eager keeps the sum of halves, and its logarithm, in
    halves: where one element is far above the others the result is 0."""
    shifted, denominator, compute = _shifted(x, dim)
    if x.dtype.is_half and normalize_dim(dim, x.rank) == max(x.rank - 1, 0):
        denominator = converted(denominator, x.dtype)
    logarithm = cast(apply("log", denominator.body), compute)
    return Tensor(x.axes, cast(apply("sub", shifted.body, logarithm), compute if half_to_float else x.dtype))


def _shifted(x: Tensor, dim: int) -> tuple[Tensor, Tensor, DType]:
    """x - max and sum(exp(x - max)) along a dimension, both in the accumulator's dtype and the shape of x."""
    floats_only(x, "softmax")
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
    floats_only(grad, "softmax backward")
    of_one_dtype("softmax backward", grad, output)
    compute = accumulator(grad.dtype)
    weighted = pointwise(lambda g, y: apply("mul", g, y), grad, output, compute=compute)
    summed = reduction("sum", weighted, all_dims(dim, grad.rank), keep=True, result="value")
    summed = expand(summed if grad.rank else Tensor((), summed.body), grad.sizes)
    body = apply("mul", apply("sub", cast(grad.body, compute), summed.body), cast(output.body, compute))
    return Tensor(grad.axes, cast(body, dtype_of(input_dtype)))


@lowers(aten._log_softmax_backward_data.default)
def log_softmax_backward(grad: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    """g - exp(y) * sum(g)"""
    floats_only(grad, "log_softmax backward")
    of_one_dtype("log_softmax backward", grad, output)
    compute = accumulator(grad.dtype)
    summed = reduction("sum", grad, all_dims(dim, grad.rank), keep=True, result="value", accumulate=compute)
    summed = expand(summed if grad.rank else Tensor((), summed.body), grad.sizes)
    scaled = apply("mul", apply("exp", cast(output.body, compute)), summed.body)
    return Tensor(grad.axes, cast(apply("sub", cast(grad.body, compute), scaled), dtype_of(input_dtype)))


@lowers(aten.logsumexp.default)
def logsumexp(x: Tensor, dims: Dims, keep: bool = False) -> Tensor:
    """max + log(sum(exp(x - max))); an infinite maximum is the result, and so is that of no elements: -inf."""
    result = to_float(x.dtype)
    chosen = all_dims(dims, x.rank)
    if x.rank and not isinstance(dims, int) and not dims:
        raise Unsupported("logsumexp over no dimension", why="eager raises")
    compute = accumulator(result)
    wide = converted(x, compute)
    most = reduction("softmax", wide, chosen, keep=keep, result="max")
    summed = reduction("softmax", wide, chosen, keep=keep, result="sum")
    body = apply("add", apply("log", summed.body), most.body)
    body = select(apply("isinf", most.body), most.body, body)
    return Tensor(most.axes, cast(body, result))


# ---- norms


@lowers(aten.linalg_vector_norm.default)
def vector_norm(
    x: Tensor, order: Any = 2, dims: Dims = None, keep: bool = False, *, dtype: Any = None, result: Result
) -> Tensor:
    """sum(|x|**order)**(1/order), with the limits for 0 and the infinities. Orders without an identity have none over
    no elements: eager raises."""
    return converted(norm_in(accumulator(result.dtype), x, order, dims, keep), result.dtype)


def norm_in(compute: DType, x: Tensor, order: Any, dims: Dims, keep: bool) -> Tensor:
    """A norm in a dtype, not yet rounded. That of one element is its size, whatever the order, and leaves no range."""
    if isinstance(order, Index) or not x.dtype.is_float:
        raise Unsupported(f"a norm of {x.dtype} of order {order}")
    chosen = all_dims(dims, x.rank)
    if order < 0 or order == math.inf:
        not_empty(x, chosen)
    size = Tensor(x.axes, apply("abs", cast(x.body, compute)))
    if order != 0 and product(x.sizes[dim] for dim in chosen) is ONE:
        order = 1
    if order in (math.inf, -math.inf):
        return reduction("max" if order > 0 else "min", size, chosen, keep=keep, result="value")
    powered: Expr = size.body
    if order == 0:
        powered = cast(apply("ne", size.body, const(0, compute)), compute)
    elif order == 2:
        powered = apply("mul", size.body, size.body)
    elif order != 1:
        powered = apply("pow", size.body, const(order, compute))
    summed = reduction("sum", Tensor(x.axes, powered), chosen, keep=keep, result="value")
    if order in (0, 1):
        return summed
    root = apply("sqrt", summed.body) if order == 2 else apply("pow", summed.body, const(1 / order, compute))
    return Tensor(summed.axes, root)


@lowers(aten.norm.Scalar, aten.norm.ScalarOpt_dtype)
def norm_all(x: Tensor, order: Any = 2, *, dtype: torch.dtype | None = None, result: Result) -> Tensor:
    return norm_dims(x, order, None, False, dtype=dtype, result=result)


@lowers(aten.norm.ScalarOpt_dim, aten.norm.ScalarOpt_dim_dtype)
def norm_dims(
    x: Tensor, order: Any, dims: Dims, keep: bool = False, *, dtype: torch.dtype | None = None, result: Result
) -> Tensor:
    """The older name of the same; no order is 2."""
    return vector_norm(x, 2 if order is None else order, dims, keep, result=result)


@lowers(aten.dist.default)
def dist(x: Tensor, other: Tensor, order: Any = 2, *, result: Result) -> Tensor:
    """The norm of the difference, which is rounded first."""
    not_bool(x.dtype, "dist")
    not_bool(other.dtype, "dist")
    gap = pointwise(lambda a, b: apply("sub", a, b), x, other, compute=promote(x, other))
    return vector_norm(gap, order, None, False, result=result)


@lowers(aten.renorm.default)
def renorm(x: Tensor, order: Any, dim: int, most: Any) -> Tensor:
    """Slices along `dim` with a norm above `most` are scaled down to it; factors are rounded to the dtype of x."""
    others = [other for other in range(x.rank) if other != normalize_dim(dim, x.rank)]
    compute = accumulator(x.dtype)
    norms = norm_in(compute, x, order, others, True)
    limit = const(most, compute)
    smaller = apply("div", limit, apply("add", norms.body, const(1e-7, compute)))
    factor = select(apply("gt", norms.body, limit), smaller, const(1, compute))
    scale = expand(Tensor(norms.axes, cast(factor, x.dtype)), x.sizes)
    return Tensor(x.axes, apply("mul", x.body, scale.body))
