"""Rows of losses and their gradients.

A loss is a value for each element, rounded to its dtype, and then its sum or mean, which runs in at least f32. Eager's
kernels differ in what they round on the way; the rows say which ones compute in the dtype of halves (every step
rounds) and which in f32 (only the end rounds). Losses over classes check their targets: an ignored target may lie
anywhere, any other must name a class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ferrite.errors import Unsupported
from ferrite.loops.dtypes import DType, f32, f64, i64
from ferrite.loops.index import Index, IndexLike, index, product
from ferrite.loops.nodes import Expr, Guarded, Load, Position, Require
from ferrite.loops.shapes import is_contiguous
from ferrite.lower.gather import position
from ferrite.lower.pointwise import floats_only, one, zero
from ferrite.lower.reduce import converted, mean, number_of, sum_all
from ferrite.lower.table import lowers
from ferrite.lower.value import (
    Result,
    Tensor,
    accumulator,
    apply,
    axes_for,
    broadcast_sizes,
    cast,
    compute_dtype,
    const,
    join,
    of_one_dtype,
    points,
    pointwise,
    promote,
    reduction,
    select,
)

aten = torch.ops.aten

NONE, MEAN, SUM = 0, 1, 2  # how a loss is reduced


def reduced(loss: Tensor, how: int, result: Result) -> Tensor:
    """The losses of all elements as eager gives them: as they are, their mean, or their sum. No losses: NaN, or 0."""
    if how == MEAN:
        return mean(loss, result=result)
    if how == SUM:
        return sum_all(loss, result=result)
    return loss


def common_dtype(x: Tensor, target: Tensor, op: str) -> DType:
    """The dtype of both together. Only floats have a kernel."""
    common = join(x.dtype, target.dtype)
    if not common.is_float or (target.rank == 0) != (x.rank == 0):
        raise Unsupported(f"{op} of {x.dtype} and {target.dtype}")
    return common


def norm_of(factor: float, sizes: tuple[Index, ...], how: int, dtype: DType) -> Expr:
    """factor, over the number of elements for a mean: computed in f64 and rounded to the dtype, as eager does."""
    number = product(sizes)
    if how != MEAN:
        return const(factor, dtype)
    if not number.terms:
        return const(factor / max(number.constant, 1), dtype)  # without elements nobody reads it
    return cast(apply("div", const(factor, f64), cast(Position(number), f64)), dtype)


def scaled(loss: Tensor, weight: Tensor | None) -> Tensor:
    """Times a weight, in place as it were: the weight may stretch, the loss may not."""
    if weight is None:
        return loss
    stretches(weight, loss)
    return pointwise(lambda v, w: apply("mul", v, w), loss, weight, compute=loss.dtype)


def stretches(weight: Tensor, x: Tensor) -> None:
    """Refuse a weight that does not stretch to the shape of x, or has another dtype; eager raises, or promotes."""
    if weight.dtype is not x.dtype or weight.rank > x.rank or broadcast_sizes([x.sizes, weight.sizes]) != x.sizes:
        raise Unsupported("a weight that is larger than the loss, or of another dtype")


def same_kind(op: str, *tensors: Tensor | None) -> None:
    """Floats of one dtype and shape; eager raises for others."""
    first = tensors[0]
    assert first is not None
    floats_only(first, op)
    if any(t is not None and (t.dtype is not first.dtype or t.sizes != first.sizes) for t in tensors):
        raise Unsupported(f"{op} of tensors that differ in dtype or shape")


# ---- distances


@lowers(aten.mse_loss.default)
def mse_loss(x: Tensor, target: Tensor, how: int = MEAN, *, result: Result) -> Tensor:
    """(x - target)**2; halves round the difference and the square."""
    common = common_dtype(x, target, "mse_loss")

    def body(v: Expr, t: Expr) -> Expr:
        gap = apply("sub", v, t)
        return apply("mul", gap, gap)

    return reduced(pointwise(body, x, target, compute=common), how, result)


@lowers(aten.mse_loss_backward.default)
def mse_loss_backward(grad: Tensor, x: Tensor, target: Tensor, how: int) -> Tensor:
    """norm * (x - target) * grad with norm = 2 or 2 / n, every step rounded, norm too."""
    common = gradient_dtype(grad, x, target, "mse_loss_backward")
    norm = norm_of(2.0, x.sizes, how, common)

    def body(g: Expr, v: Expr, t: Expr) -> Expr:
        return apply("mul", apply("mul", norm, apply("sub", v, t)), g)

    return pointwise(body, grad, x, target, compute=common)


def gradient_dtype(grad: Tensor, x: Tensor, target: Tensor, op: str) -> DType:
    """The dtype of a gradient's kernel: what all three are promoted to, as tracing has it. Eager's kernels compute in
    it too, and give the dtype of x, to which the graph converts."""
    if not all(each.dtype.is_float for each in (grad, x, target)):
        raise Unsupported(f"{op} of integers")
    return promote(grad, x, target)


@lowers(aten.smooth_l1_loss.default)
def smooth_l1_loss(x: Tensor, target: Tensor, how: int = MEAN, beta: float = 1.0, *, result: Result) -> Tensor:
    """|z| - beta / 2, near 0 z**2 / (2 beta), for z = x - target. f16 rounds every step, bf16 only the last.

    beta = 0 is plainly |z|.
    """
    common = common_dtype(x, target, "smooth_l1_loss")
    compute = f32 if common.name == "bf16" else common

    def body(v: Expr, t: Expr) -> Expr:
        size, half, limit = apply("abs", apply("sub", v, t)), const(0.5, compute), const(beta, compute)
        if beta == 0:
            return size
        near = apply("div", apply("mul", apply("mul", half, size), size), limit)
        return select(apply("lt", size, limit), near, apply("sub", size, apply("mul", half, limit)))

    return reduced(pointwise(body, x, target, compute=compute, result=common), how, result)


@lowers(aten.smooth_l1_loss_backward.default)
def smooth_l1_loss_backward(
    grad: Tensor, x: Tensor, target: Tensor, how: int, beta: float, *, result: Result
) -> Tensor:
    """norm * (z / beta, or its sign from beta on) * grad; halves round once. The sign of 0 is -1, met if beta is 0."""
    common = gradient_dtype(grad, x, target, "smooth_l1_loss_backward")

    def slope(z: Expr) -> Expr:
        sign = select(apply("gt", z, zero(z.dtype)), const(1, z.dtype), const(-1, z.dtype))
        limit = const(beta, z.dtype)
        return select(apply("ge", apply("abs", z), limit), sign, apply("div", z, limit))

    return _sloped(slope, grad, x, target, how, compute=compute_dtype(common))


@lowers(aten.huber_loss.default)
def huber_loss(x: Tensor, target: Tensor, how: int = MEAN, delta: float = 1.0, *, result: Result) -> Tensor:
    """z**2 / 2 up to delta, delta * (|z| - delta / 2) from there on. bf16 rounds every step, f16 only the last."""
    floats_only(x, "huber_loss")
    common = common_dtype(x, target, "huber_loss")
    compute = f32 if common.name == "f16" else common

    def body(v: Expr, t: Expr) -> Expr:
        size, half, limit = apply("abs", apply("sub", v, t)), const(0.5, compute), const(delta, compute)
        near = apply("mul", apply("mul", half, size), size)
        far = apply("mul", limit, apply("sub", size, apply("mul", half, limit)))
        return select(apply("le", size, limit), near, far)

    return reduced(pointwise(body, x, target, compute=compute, result=common), how, result)


@lowers(aten.huber_loss_backward.default)
def huber_loss_backward(grad: Tensor, x: Tensor, target: Tensor, how: int, delta: float) -> Tensor:
    """norm * (z, at most delta) * grad, every step rounded."""
    of_one_dtype("huber_loss_backward", grad, x, target)
    common = gradient_dtype(grad, x, target, "huber_loss_backward")

    def slope(z: Expr) -> Expr:
        limit = const(delta, z.dtype)
        edge = select(apply("gt", z, zero(z.dtype)), limit, const(-delta, z.dtype))
        return select(apply("ge", apply("abs", z), limit), edge, z)

    return _sloped(slope, grad, x, target, how, compute=common)


def _sloped(
    slope: Callable[[Expr], Expr], grad: Tensor, x: Tensor, target: Tensor, how: int, *, compute: DType
) -> Tensor:
    """norm * slope(x - target) * grad."""
    norm = norm_of(1.0, x.sizes, how, compute)

    def body(g: Expr, v: Expr, t: Expr) -> Expr:
        return apply("mul", apply("mul", norm, slope(apply("sub", v, t))), g)

    return pointwise(body, grad, x, target, compute=compute, result=promote(grad, x, target))


# ---- two classes

NO_PROBABILITY = "all elements of input should be between 0 and 1"


@lowers(aten.binary_cross_entropy.default)
def binary_cross_entropy(
    x: Tensor, target: Tensor, weight: Tensor | None = None, how: int = MEAN, *, result: Result
) -> Tensor:
    """(t - 1) log(1 - x) - t log(x), logarithms not below -100; every step rounds. x outside 0..1, or NaN, raises."""
    same_kind("binary_cross_entropy", x, target)
    d = x.dtype

    def body(v: Expr, t: Expr) -> Expr:
        least = const(-100, d)
        no = apply("maximum", apply("log1p", apply("neg", v)), least)
        yes = apply("maximum", apply("log", v), least)
        value = apply("sub", apply("mul", apply("sub", t, one(d)), no), apply("mul", t, yes))
        inside = apply("and_", apply("ge", v, zero(d)), apply("le", v, one(d)))
        return Require(inside, value, "RuntimeError", NO_PROBABILITY)

    return reduced(scaled(pointwise(body, x, target, compute=d), weight), how, result)


@lowers(aten.binary_cross_entropy_backward.default)
def binary_cross_entropy_backward(
    grad: Tensor, x: Tensor, target: Tensor, weight: Tensor | None = None, how: int = MEAN
) -> Tensor:
    """g (x - t) / max((1 - x) x, 1e-12), every step rounded: in f16 the least divisor is 0."""
    same_kind("binary_cross_entropy_backward", x, target)
    gradient_dtype(grad, x, target, "binary_cross_entropy_backward")
    d = x.dtype

    def body(g: Expr, v: Expr, t: Expr) -> Expr:
        divisor = apply("maximum", apply("mul", apply("sub", one(d), v), v), const(1e-12, d))
        return apply("div", apply("mul", g, apply("sub", v, t)), divisor)

    made = scaled(pointwise(body, grad, x, target, compute=d), weight)
    if how != MEAN:
        return made
    number = number_of(x, list(range(x.rank)), compute_dtype(d))
    return pointwise(lambda v: apply("div", v, number), made, compute=compute_dtype(d), result=d)


@lowers(aten.binary_cross_entropy_with_logits.default)
def binary_cross_entropy_with_logits(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    how: int = MEAN,
    *,
    result: Result,
) -> Tensor:
    """(1 - t) x - (1 + (p - 1) t) log_sigmoid(x), as a row of ops that each round."""
    same_kind("binary_cross_entropy_with_logits", x, target)
    d = x.dtype
    if pos_weight is not None:
        stretches(pos_weight, x)

    def body(v: Expr, t: Expr, *positive: Expr) -> Expr:
        loss = apply("mul", apply("sub", one(d), t), v)
        log = log_sigmoid(v)
        for p in positive:
            log = apply("mul", apply("add", apply("mul", apply("sub", p, one(d)), t), one(d)), log)
        return apply("sub", loss, log)

    operands = (x, target) if pos_weight is None else (x, target, pos_weight)
    return reduced(scaled(pointwise(body, *operands, compute=d), weight), how, result)


def log_sigmoid(value: Expr) -> Expr:
    """min(x, 0) - log(1 + exp(-|x|)), in f32 for halves."""
    v = cast(value, compute_dtype(value.dtype))
    tail = apply("log1p", apply("exp", apply("neg", apply("abs", v))))
    return cast(apply("sub", apply("minimum", v, zero(v.dtype)), tail), value.dtype)


@lowers(aten.soft_margin_loss.default)
def soft_margin_loss(x: Tensor, target: Tensor, how: int = MEAN, *, result: Result) -> Tensor:
    """log(1 + exp(-t x)), as a row of ops that each round."""
    same_kind("soft_margin_loss", x, target)

    def body(v: Expr, t: Expr) -> Expr:
        return apply("log1p", apply("exp", apply("mul", apply("neg", t), v)))

    return reduced(pointwise(body, x, target, compute=x.dtype), how, result)


@lowers(aten.soft_margin_loss_backward.default)
def soft_margin_loss_backward(grad: Tensor, x: Tensor, target: Tensor, how: int) -> Tensor:
    """t z * -norm / (z + 1) * g for z = exp(-t x); every step rounds, norm too."""
    same_kind("soft_margin_loss_backward", x, target)
    d = gradient_dtype(grad, x, target, "soft_margin_loss_backward")
    norm = norm_of(-1.0, x.sizes, how, d)

    def body(g: Expr, v: Expr, t: Expr) -> Expr:
        z = apply("exp", apply("mul", apply("neg", t), v))
        scaled_target = apply("mul", apply("mul", t, z), norm)
        return apply("mul", apply("div", scaled_target, apply("add", z, one(d))), g)

    return pointwise(body, grad, x, target, compute=d)


# ---- many classes

OUT_OF_CLASSES = "Target {index} is out of bounds."


@lowers(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def nll_loss(
    x: Tensor, target: Tensor, weight: Tensor | None, how: int, ignore_index: IndexLike, *, result: Any
) -> tuple[Tensor, Tensor]:
    """-x * weight of the class that each target names; 0 where it is ignored. The mean divides by the sum of weights,
    which is the second result; without a reduction of several targets that is 0.

    Halves round the product, the sums (that run in f32) and the quotient. No targets: the mean is NaN.
    """
    classes = _class_dim(x, target, weight)
    losses, weights = _chosen(x, target, weight, ignore_index, classes)
    loss, kept = result
    if how == NONE and x.rank > 1:
        return losses, Tensor((), const(0, kept.dtype))
    counted = reduction(
        "sum", weights, range(target.rank), keep=False, result="value", accumulate=accumulator(weights.dtype)
    )
    total, summed = converted(counted, kept.dtype), sum_all(losses, result=loss)
    if how != MEAN:
        return summed, total
    return pointwise(lambda v, w: apply("div", v, w), summed, total, compute=loss.dtype), total


def _class_dim(x: Tensor, target: Tensor, weight: Tensor | None) -> int:
    """Which dimension counts classes. Refuses what eager raises for: other targets, weights of another dtype."""
    floats_only(x, "nll_loss")
    allowed = ("i64", "u8") if x.rank <= 2 else ("i64",)
    if target.dtype.name not in allowed or target.rank != x.rank - 1:
        raise Unsupported(f"nll_loss with targets of {target.dtype} and rank {target.rank}")
    if weight is not None and weight.dtype is not x.dtype:
        raise Unsupported("nll_loss with weights of another dtype")
    return 0 if x.rank == 1 else 1


def _chosen(
    x: Tensor, target: Tensor, weight: Tensor | None, ignore_index: IndexLike, classes: int
) -> tuple[Tensor, Tensor]:
    """For each target the loss and the weight of its class; both 0 where it is ignored. Without weights they are
    counted in i64: a sum of halves would not be exact."""
    here = points(target.axes)
    label = cast(target.body, i64)
    place = position(label, x.sizes[classes], wrap=False, error="IndexError", message=OUT_OF_CLASSES)
    taken = apply("ne", label, const(ignore_index, i64))
    loss = apply("neg", x.at([*here[:classes], place, *here[classes:]]))
    if weight is None:
        losses = Guarded(taken, loss, zero(x.dtype))
        return Tensor(target.axes, losses), Tensor(target.axes, cast(taken, i64))
    factor = weight.at([place])
    losses = Guarded(taken, apply("mul", loss, factor), zero(x.dtype))
    return Tensor(target.axes, losses), Tensor(target.axes, Guarded(taken, factor, zero(x.dtype)))


@lowers(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def nll_loss_backward(
    grad: Tensor,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    how: int,
    ignore_index: IndexLike,
    total_weight: Tensor,
) -> Tensor:
    """-g * weight (over the sum of weights, for a mean) at the class of each target, 0 elsewhere.

    Asked of every class, so that nothing is scattered; a target outside, for which the loss has raised, is met nowhere.
    """
    classes = _class_dim(x, target, weight)
    if x.rank == 4 and isinstance(x.body, Load) and not is_contiguous(x.sizes, x.body.buffer.strides):
        raise Unsupported("nll_loss2d_backward of a picture in another layout", why="eager raises")
    axes = axes_for(x.sizes)
    here = points(axes)
    label = cast(target.at([*here[:classes], *here[classes + 1 :]]), i64)
    hit = apply("eq", label, Position(here[classes]))
    if isinstance(ignore_index, Index) or ignore_index >= 0:
        hit = apply("and_", hit, apply("ne", label, const(ignore_index, i64)))
    factor = None if weight is None else weight.at([here[classes]])
    if how == NONE and x.rank > 1:
        slope = grad.at([*here[:classes], *here[classes + 1 :]])
        value = apply("neg", slope) if factor is None else apply("mul", apply("neg", factor), slope)
    else:
        slope = _single(grad)
        if how == MEAN:
            slope = apply("div", slope, _single(total_weight))
        value = apply("neg", slope)
        value = value if factor is None else apply("mul", factor, value)
    return Tensor(axes, select(hit, value, zero(x.dtype)))


def _single(x: Tensor) -> Expr:
    """The value of a tensor with one element."""
    return x.at([index(0)] * x.rank)
