"""Rows of normalisations over channels: batch norm and group norm, forward."""

from __future__ import annotations

from typing import Any

import torch

from ferrite.errors import Unsupported
from ferrite.loops.index import Index, index, product
from ferrite.loops.nodes import Expr, Position
from ferrite.loops.shapes import reshape_index
from ferrite.lower.reduce import moments
from ferrite.lower.table import lowers
from ferrite.lower.value import Tensor, accumulator, apply, axes_for, cast, const, points, view

aten = torch.ops.aten


def per_channel(parameter: Tensor | None, x: Tensor, default: float) -> Any:
    """A vector of one value for each channel, read at a point of x; `default` if there is none."""
    compute = accumulator(x.dtype)
    if parameter is None:
        return lambda here: const(default, compute)
    return lambda here: cast(parameter.at([here[1]]), compute)


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
) -> tuple[Tensor | None, ...]:
    """(x - mean) / sqrt(var + eps) * weight + bias, by channel; the saved statistics are empty, as in eager."""
    compute = accumulator(x.dtype)
    scale, shift = per_channel(weight, x, 1.0), per_channel(bias, x, 0.0)
    mean, var = per_channel(running_mean, x, 0.0), per_channel(running_var, x, 1.0)

    def body(here: tuple[Index, ...]) -> Expr:
        rstd = apply("div", const(1, compute), apply("sqrt", apply("add", var(here), const(eps, compute))))
        alpha = apply("mul", rstd, scale(here))
        beta = apply("sub", shift(here), apply("mul", mean(here), alpha))
        return cast(apply("add", apply("mul", cast(x.body, compute), alpha), beta), x.dtype)

    empty = [Tensor(axes_for(entry.sizes), const(0, entry.dtype)) for entry in result[1:]]
    return (Tensor(x.axes, body(points(x.axes))), *empty)


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
) -> tuple[Tensor, ...]:
    """Statistics over the channels of a group and all pixels, in at least f32."""
    compute = accumulator(x.dtype)
    if isinstance(channels, Index):
        raise Unsupported("a symbolic number of channels")
    inner = product([index(channels // groups), *x.sizes[2:]])
    sizes = [x.sizes[0], index(groups), inner]
    grouped = view(x, sizes, lambda *here: reshape_index(here, sizes, x.sizes))
    mean, m2 = moments(grouped, [2], False, compute)
    variance = apply("div", m2.body, cast(Position(inner), compute))
    rstd = Tensor(m2.axes, apply("rsqrt", apply("add", variance, const(eps, compute))))
    scale, shift = per_channel(weight, x, 1.0), per_channel(bias, x, 0.0)
    here = points(x.axes)
    group = [here[0], here[1] // (channels // groups)]
    centred = apply("sub", cast(x.body, compute), mean.at(group))
    normal = apply("mul", centred, rstd.at(group))
    body = apply("add", apply("mul", normal, scale(here)), shift(here))
    kept_mean, kept_rstd = result[1].dtype, result[2].dtype
    return (
        Tensor(x.axes, cast(body, result[0].dtype)),
        Tensor(mean.axes, cast(mean.body, kept_mean)),
        Tensor(rstd.axes, cast(rstd.body, kept_rstd)),
    )
