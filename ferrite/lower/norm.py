"""Rows of normalisations: layer, batch, group and weight norm, forward and backward.

Statistics run in at least f32, whatever the dtype of the tensor, and are rounded to the dtype in which they are kept.
Parameters have the dtype of the tensor, or f32 beside halves; eager raises for any other mixture, and the rows refuse
it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._prims_common import suggest_memory_format

from ferrite.errors import Unsupported
from ferrite.loops.dtypes import DType, f32, f64
from ferrite.loops.index import index, known_nonnegative
from ferrite.loops.nodes import Expr
from ferrite.lower.reduce import converted, moments, number_of, total_of
from ferrite.lower.table import lowers
from ferrite.lower.value import (
    After,
    Result,
    Tensor,
    accumulator,
    apply,
    axes_for,
    cast,
    const,
    expand,
    normalize_dim,
    pointwise,
    reduction,
    select,
    view,
)

aten = torch.ops.aten

Parts = tuple[Tensor | After | None, ...]
Mask = Sequence[bool]


def parameters_fit(x: Tensor, *parameters: Tensor | None) -> DType:
    """The dtype in which eager keeps statistics: that of the parameters. Refuses mixtures that have no kernel."""
    given = [parameter.dtype for parameter in parameters if parameter is not None]
    if not x.dtype.is_float:
        raise Unsupported(f"a normalisation of {x.dtype}", why="eager raises")
    if all(dtype is x.dtype for dtype in given):
        return x.dtype
    if x.dtype.is_half and all(dtype is f32 for dtype in given):
        return f32
    raise Unsupported(f"a normalisation of {x.dtype} with parameters of another dtype", why="eager raises")


def statistics_fit(expected: DType, *found: Result | None) -> None:
    """For halves beside f32 parameters PyTorch traces statistics of halves, but eager makes f32 (see
    `graph/decompose.py`, which splits such norms). Such a trace is refused: a kernel would read the wrong bytes."""
    if any(entry is not None and entry.dtype is not expected for entry in found):
        raise Unsupported("a normalisation that was traced with statistics of another dtype than eager's")


def same_sizes(x: Tensor, body: Expr) -> Tensor:
    return Tensor(x.axes, body)


def product_of(left: Tensor, right: Tensor) -> Tensor:
    """The product at every point of the left one; the right one is stretched."""
    return same_sizes(left, apply("mul", left.body, expand(right, left.sizes).body))


def normalized(x: Tensor, mean: Tensor, rstd: Tensor, compute: DType) -> Tensor:
    """(x - mean) * rstd, with statistics that stretch to the shape of x."""
    centre, scale = expand(converted(mean, compute), x.sizes), expand(converted(rstd, compute), x.sizes)
    return same_sizes(x, apply("mul", apply("sub", cast(x.body, compute), centre.body), scale.body))


def gradient_of(x: Tensor, grad: Tensor, compute: DType) -> Tensor:
    """What comes back for x, over the axes of x: a size that is one by a guard may be a number in one of them only."""
    return expand(converted(grad, compute), x.sizes)


def past_statistics(slope: Tensor, normal: Tensor, mean_slope: Tensor, mean_along: Tensor) -> Tensor:
    """What is left of a gradient when mean and variance depend on the elements: g - mean(g) - y * mean(g * y).

    The means stretch to the shape of the gradient.
    """
    left = apply("sub", slope.body, expand(mean_slope, slope.sizes).body)
    removed = apply("mul", normal.body, expand(mean_along, slope.sizes).body)
    return same_sizes(slope, apply("sub", left, removed))


def average(x: Tensor, dims: list[int], *, keep: bool) -> Tensor:
    """The mean over some dimensions. `x` is in the accumulator's dtype."""
    return divided(reduction("sum", x, dims, keep=keep, result="value"), x, dims)


def divided(summed: Tensor, x: Tensor, dims: list[int], fewer: int = 0) -> Tensor:
    """A sum over some dimensions of x over their number of elements (less a few), which is rounded as the sum is."""
    return Tensor(summed.axes, apply("div", summed.body, number_of(x, dims, summed.dtype, fewer)))


def kept(made: Callable[[], Tensor], wanted: bool, result: Result | None) -> Tensor | None:
    """A gradient that somebody asks for, in the dtype of eager."""
    return converted(made(), result.dtype) if wanted and result is not None else None


# ---- layer norm


@lowers(aten.native_layer_norm.default)
def layer_norm(
    x: Tensor, shape: Sequence[Any], weight: Tensor | None, bias: Tensor | None, eps: float, *, result: Any
) -> tuple[Tensor, ...]:
    """(x - mean) * rstd * weight + bias over the last dimensions. Over no elements the mean is 0 and rstd NaN.

    Where there is no bias, eager adds zeros, which leave no -0.0.
    """
    statistics_fit(parameters_fit(x, weight, bias), *result[1:])
    dims = list(range(x.rank - len(shape), x.rank))
    compute = accumulator(x.dtype)
    mean, rstd = standard(x, dims, eps, compute, keep=True)
    normal = weighted(normalized(x, mean, rstd, compute), weight, bias)
    if bias is None:
        normal = same_sizes(normal, apply("add", normal.body, const(0, compute)))
    return tuple(converted(part, entry.dtype) for part, entry in zip((normal, mean, rstd), result, strict=True))


def weighted(x: Tensor, weight: Tensor | None, bias: Tensor | None = None) -> Tensor:
    """x * weight + bias, for those of them that there are; parameters stretch to the shape of x."""
    body = x.body
    if weight is not None:
        body = apply("mul", body, cast(expand(weight, x.sizes).body, x.dtype))
    if bias is not None:
        body = apply("add", body, cast(expand(bias, x.sizes).body, x.dtype))
    return same_sizes(x, body)


def standard(x: Tensor, dims: list[int], eps: float, compute: DType, *, keep: bool) -> tuple[Tensor, Tensor]:
    """Mean and 1 / sqrt(variance + eps) over some dimensions. With an infinite element both are NaN: eager combines
    running means, and infinity less infinity is none (but in the last lane of its vectors, which we do not follow)."""
    mean, m2 = moments(x, dims, keep, compute)
    variance = divided(m2, x, dims).body
    told = select(apply("isnan", m2.body), const(math.nan, compute), mean.body)
    return Tensor(mean.axes, told), Tensor(m2.axes, apply("rsqrt", apply("add", variance, const(eps, compute))))


@lowers(aten.native_layer_norm_backward.default)
def layer_norm_backward(
    grad: Tensor,
    x: Tensor,
    shape: Sequence[Any],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: Mask,
    *,
    result: Any,
) -> Parts:
    """Gradients of x, weight and bias; halves round once. Without rows those of weight and bias are 0."""
    parameters_fit(x, weight, bias, mean, rstd)
    outer = x.rank - len(shape)
    dims, rows = list(range(outer, x.rank)), list(range(outer))
    compute = accumulator(x.dtype)
    slope = gradient_of(x, grad, compute)
    normal = normalized(x, mean, rstd, compute)

    def to_input() -> Tensor:
        scaled = weighted(slope, weight)
        means = (average(part, dims, keep=True) for part in (scaled, product_of(scaled, normal)))
        return product_of(past_statistics(scaled, normal, *means), converted(rstd, compute))

    def to_weight() -> Tensor:
        return total_of(product_of(slope, normal), rows, False, compute)

    return (
        kept(to_input, mask[0], result[0]),
        kept(to_weight, mask[1], result[1]),
        kept(lambda: total_of(slope, rows, False, compute), mask[2], result[2]),
    )


# ---- batch norm


def by_channel(parameter: Tensor, x: Tensor) -> Tensor:
    """A vector of one value for each channel, stretched to the shape of x."""
    return view(converted(parameter, accumulator(x.dtype)), x.sizes, lambda *here: [here[1]])


def channel_parameter(parameter: Tensor | None, x: Tensor) -> Tensor | None:
    return None if parameter is None else by_channel(parameter, x)


def all_but_channels(x: Tensor) -> list[int]:
    return [dim for dim in range(x.rank) if dim != 1]


def shifted(x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """x * alpha + beta with alpha = rstd * weight and beta = bias - mean * alpha: eager's order."""
    compute = accumulator(x.dtype)
    alpha = weighted(by_channel(rstd, x), channel_parameter(weight, x)).body
    offset = const(0, compute) if bias is None else by_channel(bias, x).body
    beta = apply("sub", offset, apply("mul", by_channel(mean, x).body, alpha))
    return same_sizes(x, cast(apply("add", apply("mul", cast(x.body, compute), alpha), beta), x.dtype))


@lowers(aten._native_batch_norm_legit_no_training.default)
def batch_norm_inference(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
    *,
    result: Any,
) -> Parts:
    """By the running statistics, per channel; what is saved for backward is empty, as in eager."""
    parameters_fit(x, weight, bias, running_mean, running_var)
    rstd = running_rstd(running_var, eps, accumulator(x.dtype))
    normal = shifted(x, running_mean, rstd, weight, bias)
    return (normal, *(empty(entry) for entry in result[1:]))


def running_rstd(running_var: Tensor, eps: float, compute: DType) -> Tensor:
    inside = apply("add", cast(running_var.body, compute), const(eps, compute))
    return Tensor(running_var.axes, apply("div", const(1, compute), apply("sqrt", inside)))


def empty(entry: Result) -> Tensor:
    return Tensor(axes_for(entry.sizes), const(0, entry.dtype))


@dataclass(frozen=True)
class Batch:
    """A batch norm by its own statistics: the result, what is saved for backward, and what running statistics see.
    What is saved are the parts behind the result: this is made of them, so that x is summed up once."""

    normal: After
    saved_mean: Tensor
    saved_rstd: Tensor
    mean: Tensor
    m2: Tensor  # the sum of squared distances from the mean


def by_batch(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, saved: DType) -> Batch:
    """The mean and the sum of squares are rounded to the dtype in which statistics are saved before anything else is
    made of them, but for f16, which only rounds what is saved. What is saved is what x is normalised with."""
    if not all(known_nonnegative(extent - 1) for extent in x.sizes):
        raise Unsupported("a batch norm of a tensor that may be empty", why="eager raises")
    exact = f32 if saved.name == "f16" else saved
    mean, m2 = (converted(moment, exact) for moment in moments(x, all_but_channels(x), False, accumulator(x.dtype)))
    variance = cast(divided(m2, x, all_but_channels(x)).body, f64)
    rstd = apply("div", const(1, f64), apply("sqrt", apply("add", variance, const(eps, f64))))
    saved_mean, saved_rstd = converted(mean, saved), Tensor(m2.axes, cast(rstd, saved))
    normal = After((1, 2), lambda mean, rstd: shifted(x, mean, rstd, weight, bias))
    return Batch(normal, saved_mean, saved_rstd, mean, m2)


def moved(running: Tensor, latest: Tensor, momentum: float, *, product_in: DType) -> Tensor:
    """momentum * latest + (1 - momentum) * running. Numbers and the second product are rounded to the dtype of the
    statistics; the first product is made in `product_in`."""
    d = latest.dtype

    def body(old: Expr, new: Expr) -> Expr:
        rest = apply("mul", const(1 - momentum, d), old)
        first = apply("mul", cast(const(momentum, d), product_in), cast(new, product_in))
        return apply("add", first, cast(rest, product_in))

    return pointwise(body, running, latest, compute=d, result=running.dtype)


@lowers(aten._native_batch_norm_legit_functional.default)
def batch_norm_functional(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
    *,
    result: Any,
) -> Parts:
    """By the statistics of the batch; the running ones come back moved towards them, or in inference as they
    were."""
    if not training:
        made = batch_norm_inference(x, weight, bias, running_mean, running_var, momentum, eps, result=result[:3])
        return *made, converted(running_mean, result[3].dtype), converted(running_var, result[4].dtype)
    statistics_fit(parameters_fit(x, weight, bias, running_mean, running_var), *result[1:3])
    batch = by_batch(x, weight, bias, eps, result[1].dtype)
    mean = moved(running_mean, batch.mean, momentum, product_in=batch.mean.dtype)
    unbiased = divided(batch.m2, x, all_but_channels(x), fewer=1)  # NaN for a single element
    variance = moved(running_var, unbiased, momentum, product_in=f64)
    # For halves tracing promises f32, which is then copied into buffers of halves.
    moved_parts = converted(mean, result[3].dtype), converted(variance, result[4].dtype)
    return batch.normal, batch.saved_mean, batch.saved_rstd, *moved_parts


@lowers(aten._batch_norm_with_update_functional.default)
def batch_norm_with_update(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
    *,
    result: Any,
) -> Parts:
    """The same, with an empty tensor that only libraries fill between the saved statistics and the running ones."""
    five = (*result[:3], *result[4:])
    made = batch_norm_functional(x, weight, bias, running_mean, running_var, True, momentum, eps, result=five)
    return (*made[:3], empty(result[3]), *made[3:])


@lowers(aten._native_batch_norm_legit.no_stats)
def batch_norm_no_stats(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    *,
    result: Any,
) -> Parts:
    """By the statistics of the batch, whether in training or not: there are no others."""
    statistics_fit(parameters_fit(x, weight, bias), *result[1:])
    batch = by_batch(x, weight, bias, eps, result[1].dtype)
    return batch.normal, batch.saved_mean, batch.saved_rstd


@lowers(aten.native_batch_norm_backward.default)
def batch_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    saved_mean: Tensor | None,
    saved_rstd: Tensor | None,
    train: bool,
    eps: float,
    mask: Mask,
    *,
    result: Any,
) -> Parts:
    """Gradients of x, weight and bias. By running statistics these are constants; by those of the batch they depend on
    every element. Halves round once."""
    parameters_fit(x, weight, running_mean, running_var, *((saved_mean, saved_rstd) if train else ()))
    compute = accumulator(x.dtype)
    if train:
        mean, rstd = saved_mean, saved_rstd
    else:
        mean, rstd = running_mean, running_rstd(running_var, eps, compute) if running_var is not None else None
    if mean is None or rstd is None:
        raise Unsupported("a batch norm without the statistics that it was made with")
    dims = all_but_channels(x)
    slope, scale = gradient_of(x, grad, compute), by_channel(rstd, x)
    normal = normalized(x, by_channel(mean, x), scale, compute)

    total = total_of(slope, dims, False, compute)
    along = total_of(product_of(slope, normal), dims, False, compute)

    def to_input(along: Tensor, total: Tensor) -> Tensor:
        passed = slope
        if train:
            means = (by_channel(divided(summed, x, dims), x) for summed in (total, along))
            passed = past_statistics(slope, normal, *means)
        return weighted(product_of(passed, scale), channel_parameter(weight, x))

    of_weight, of_bias = kept(lambda: along, mask[1], result[1]), kept(lambda: total, mask[2], result[2])
    of_input: Tensor | After | None = kept(lambda: to_input(along, total), mask[0], result[0])
    if mask[0] and mask[1] and mask[2] and result[1].dtype is result[2].dtype is compute:  # halves round what is stored
        of_input = After((1, 2), lambda *sums: converted(to_input(*sums), result[0].dtype))
    return of_input, of_weight, of_bias


@lowers(aten.batch_norm_backward.default)
def batch_norm_backward_reserved(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    saved_mean: Tensor | None,
    saved_rstd: Tensor | None,
    update: bool,
    eps: float,
    mask: Mask,
    reserve: Tensor,
    *,
    result: Any,
) -> Parts:
    """The same; the reserve is empty on the CPU."""
    return batch_norm_backward(
        grad, x, weight, running_mean, running_var, saved_mean, saved_rstd, update, eps, mask, result=result
    )


# ---- group norm


def grouped(x: Tensor, groups: int) -> Tensor:
    """[N, groups, channels of a group, pixels...]: what has statistics of its own is in front."""
    size = group_size(x, groups)
    sizes = [x.sizes[0], index(groups), index(size), *x.sizes[2:]]
    return view(x, sizes, lambda image, group, place, *pixel: [image, group * size + place, *pixel])


def group_size(x: Tensor, groups: int) -> int:
    if x.sizes[1].terms:
        raise Unsupported("a symbolic number of channels")
    return x.sizes[1].constant // groups


def inside_groups(x: Tensor) -> list[int]:
    """The dimensions of a grouped tensor that share statistics."""
    return list(range(2, x.rank + 1))


def by_group(statistic: Tensor, like: Tensor, compute: DType) -> Tensor:
    """A value for each image and group, at every element."""
    size = group_size(like, statistic.sizes[1].constant)
    return view(converted(statistic, compute), like.sizes, lambda *here: [here[0], here[1] // size])


@lowers(aten.native_group_norm.default)
def group_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    batch: Any,
    channels: Any,
    pixels: Any,
    groups: int,
    eps: float,
    *,
    result: Any,
    traced: tuple[Any, ...],
) -> Parts:
    """Statistics over the channels of a group and all pixels. Over no elements the mean is 0 and 1 / std NaN. Eager
    raises if x is neither contiguous nor channels-last."""
    if not traced[0].is_contiguous(memory_format=suggest_memory_format(traced[0])):
        raise Unsupported("group norm of a tensor with gaps or in another order")
    statistics_fit(parameters_fit(x, weight, bias), *result[1:])
    compute = accumulator(x.dtype)
    mean, rstd = standard(grouped(x, groups), inside_groups(x), eps, compute, keep=False)
    normal = normalized(x, by_group(mean, x, compute), by_group(rstd, x, compute), compute)
    normal = weighted(normal, channel_parameter(weight, x), channel_parameter(bias, x))
    return tuple(converted(part, entry.dtype) for part, entry in zip((normal, mean, rstd), result, strict=True))


@lowers(aten.native_group_norm_backward.default)
def group_norm_backward(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    batch: Any,
    channels: Any,
    pixels: Any,
    groups: int,
    mask: Mask,
    *,
    result: Any,
) -> Parts:
    statistics_fit(parameters_fit(x, weight, mean, rstd), *result[1:])
    if result[0].dtype is not x.dtype:
        raise Unsupported("a gradient that was traced with another dtype than eager's")
    compute = accumulator(x.dtype)
    slope, scale = gradient_of(x, grad, compute), by_group(rstd, x, compute)
    normal = normalized(x, by_group(mean, x, compute), scale, compute)
    dims = all_but_channels(x)

    def to_input() -> Tensor:
        scaled = weighted(slope, channel_parameter(weight, x))
        parts = (grouped(part, groups) for part in (scaled, product_of(scaled, normal)))
        means = (by_group(average(part, inside_groups(x), keep=False), x, compute) for part in parts)
        return product_of(past_statistics(scaled, normal, *means), scale)

    def to_weight() -> Tensor:
        return total_of(product_of(slope, normal), dims, False, compute)

    return (
        kept(to_input, mask[0], result[0]),
        kept(to_weight, mask[1], result[1]),
        kept(lambda: total_of(slope, dims, False, compute), mask[2], result[2]),
    )


# ---- weight norm


def all_but(dim: int, x: Tensor) -> list[int]:
    return [other for other in range(x.rank) if other != normalize_dim(dim, x.rank)]


@lowers(aten._weight_norm_interface.default)
def weight_norm(v: Tensor, g: Tensor, dim: int = 0, *, result: Any) -> Parts:
    """v * (g / norm) with a norm for each slice of `dim`; norms of halves are kept in f32."""
    parameters_fit(v, g)
    compute = accumulator(v.dtype)
    squares = pointwise(lambda e: apply("mul", e, e), v, compute=compute)
    summed = reduction("sum", squares, all_but(dim, v), keep=True, result="value")
    norms = Tensor(summed.axes, apply("sqrt", summed.body))
    made = pointwise(
        lambda e, scale, norm: apply("mul", e, apply("div", scale, norm)),
        v, g, norms, compute=compute, result=result[0].dtype,
    )  # fmt: skip
    return made, converted(norms, result[1].dtype)


@lowers(aten._weight_norm_interface_backward.default)
def weight_norm_backward(grad: Tensor, v: Tensor, g: Tensor, norms: Tensor, dim: int, *, result: Any) -> Parts:
    """For s = sum(grad * v): g / norm * (grad - v * s / norm**2), and s / norm."""
    parameters_fit(v, grad, g)
    compute = accumulator(v.dtype)
    products = pointwise(lambda slope, e: apply("mul", slope, e), grad, v, compute=compute)
    summed = reduction("sum", products, all_but(dim, v), keep=True, result="value")

    def to_v(slope: Expr, e: Expr, scale: Expr, norm: Expr, along: Expr) -> Expr:
        removed = apply("mul", e, apply("div", along, apply("mul", norm, norm)))
        return apply("mul", apply("div", scale, norm), apply("sub", slope, removed))

    return (
        pointwise(to_v, grad, v, g, norms, summed, compute=compute, result=result[0].dtype),
        pointwise(lambda s, norm: apply("div", s, norm), summed, norms, compute=compute, result=result[1].dtype),
    )
