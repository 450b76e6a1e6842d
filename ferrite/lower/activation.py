"""Rows of activations and their gradients: functions of one number, computed in f32 for halves and rounded once.

Parameters (slopes, limits, betas) are not rounded to halves unless a row says so. Comparisons are written so that NaN
takes the branch that it takes in eager.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from ferrite.errors import Unsupported
from ferrite.loops.dtypes import f16, u8
from ferrite.loops.index import Index
from ferrite.loops.nodes import Expr
from ferrite.lower.pointwise import Number, arithmetic, clamp, clamped, floats_only, limit, not_bool, one, unary, zero
from ferrite.lower.table import lowers
from ferrite.lower.value import Built, Result, Tensor, apply, const, normalize_dim, scalar, select, view
from ferrite.lower.view import cat

aten = torch.ops.aten


# ---- activations


@lowers(aten.relu.default)
def relu(x: Tensor) -> Tensor:
    """max(x, 0); NaN and -0.0 stay what they are."""
    not_bool(x.dtype, "relu")
    return arithmetic(lambda v: apply("maximum", v, zero(v.dtype)), x)


@lowers(aten.relu6.default)
def relu6(x: Tensor) -> Tensor:
    return clamp(x, 0, 6)


@lowers(aten.silu.default)
def silu(x: Tensor) -> Tensor:
    """x / (1 + exp(-x))"""
    floats_only(x, "silu")
    return unary(lambda v: apply("div", v, apply("add", one(v.dtype), apply("exp", apply("neg", v)))), x)


@lowers(aten.gelu.default)
def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """x times the normal distribution function at x. -inf * 0 is NaN, as in eager."""
    floats_only(x, "gelu")

    def by_tanh(v: Expr) -> Expr:
        cube = apply("mul", apply("mul", v, v), v)
        inner = apply("fma", const(0.044715, v.dtype), cube, v)
        bent = apply("tanh", apply("mul", const(math.sqrt(2 / math.pi), v.dtype), inner))
        return apply("mul", apply("mul", const(0.5, v.dtype), v), apply("add", one(v.dtype), bent))

    return unary(by_tanh if approximate == "tanh" else lambda v: apply("mul", v, apply("ndtr", v)), x)


@lowers(aten.leaky_relu.default)
def leaky_relu(x: Tensor, negative_slope: Number = 0.01) -> Tensor:
    floats_only(x, "leaky_relu")

    def body(v: Expr) -> Expr:
        return select(apply("gt", v, zero(v.dtype)), v, apply("mul", v, scalar(negative_slope, v.dtype)))

    return unary(body, x)


@lowers(aten.elu.default)
def elu(x: Tensor, alpha: Number = 1, scale: Number = 1, input_scale: Number = 1) -> Tensor:
    """scale * x above zero, alpha * scale * (exp(input_scale * x) - 1) below."""
    floats_only(x, "elu")

    def body(v: Expr) -> Expr:
        below = apply("expm1", apply("mul", v, scalar(input_scale, v.dtype)))
        below = apply("mul", below, _negative_factor(alpha, scale, v))
        return select(apply("gt", v, zero(v.dtype)), apply("mul", v, scalar(scale, v.dtype)), below)

    return unary(body, x)


def _negative_factor(alpha: Number, scale: Number, v: Expr) -> Expr:
    return apply("mul", scalar(alpha, v.dtype), scalar(scale, v.dtype))


@lowers(aten.celu.default)
def celu(x: Tensor, alpha: Number = 1.0) -> Tensor:
    """An elu whose slope is 1 at zero. Eager divides 1 by alpha in double precision; it raises for 0."""
    if not isinstance(alpha, (int, float)) or not alpha:
        raise Unsupported(f"celu with alpha = {alpha}")
    return elu(x, alpha, 1, 1.0 / alpha)


@lowers(aten.softplus.default)
def softplus(x: Tensor, beta: Number = 1, threshold: Number = 20) -> Tensor:
    """log1p(exp(beta x)) / beta; x itself where beta x passes the threshold."""
    floats_only(x, "softplus")

    def body(v: Expr) -> Expr:
        scaled = apply("mul", v, scalar(beta, v.dtype))
        soft = apply("div", apply("log1p", apply("exp", scaled)), scalar(beta, v.dtype))
        return select(apply("gt", scaled, scalar(threshold, v.dtype)), v, soft)

    return unary(body, x)


@lowers(aten.hardtanh.default)
def hardtanh(x: Tensor, min_val: Number = -1, max_val: Number = 1) -> Tensor:
    """Keeps the dtype: limits of integers lose their fractions. Eager raises for truth values, and for u8 if a limit is
    negative."""
    not_bool(x.dtype, "hardtanh")
    if x.dtype is u8:
        raise Unsupported("hardtanh of u8", why="eager raises for negative limits")
    low, high = (int(v) if x.dtype.is_int and isinstance(v, float) else v for v in (min_val, max_val))
    return clamped(x, low, high, x.dtype)


@lowers(aten.hardsigmoid.default)
def hardsigmoid(x: Tensor) -> Tensor:
    floats_only(x, "hardsigmoid")

    def body(v: Expr) -> Expr:
        shifted = apply("add", v, const(3, v.dtype))
        return apply("div", limit(shifted, const(0, v.dtype), const(6, v.dtype)), const(6, v.dtype))

    return unary(body, x)


@lowers(aten.hardswish.default)
def hardswish(x: Tensor) -> Tensor:
    floats_only(x, "hardswish")

    def body(v: Expr) -> Expr:
        shifted = limit(apply("add", v, const(3, v.dtype)), const(0, v.dtype), const(6, v.dtype))
        return apply("div", apply("mul", v, shifted), const(6, v.dtype))

    return unary(body, x)


@lowers(aten.mish.default)
def mish(x: Tensor) -> Tensor:
    floats_only(x, "mish")
    return unary(lambda v: apply("mul", v, apply("tanh", apply("log1p", apply("exp", v)))), x)


@lowers(aten.log_sigmoid_forward.default)
def log_sigmoid_forward(x: Tensor) -> tuple[Tensor, Tensor]:
    """min(x, 0) - log1p(exp(-|x|)), and exp(-|x|) for the gradient."""
    floats_only(x, "log_sigmoid")

    def body(v: Expr) -> Expr:
        return apply("sub", apply("minimum", v, zero(v.dtype)), apply("log1p", _decay(v)))

    return unary(body, x), unary(_decay, x)


def _decay(v: Expr) -> Expr:
    return apply("exp", apply("neg", apply("abs", v)))


@lowers(aten._prelu_kernel.default)
def prelu(x: Tensor, weight: Tensor) -> Tensor:
    """x above zero, weight * x elsewhere; the weight comes in a shape that stretches to that of x."""
    floats_only(x, "prelu")
    return arithmetic(lambda v, w: select(apply("gt", v, zero(v.dtype)), v, apply("mul", w, v)), x, weight)


@lowers(aten.glu.default)
def glu(x: Tensor, dim: int = -1, *, result: Result) -> Tensor:
    """a * sigmoid(b), for the first half a and the second half b of a dimension."""
    floats_only(x, "glu")
    value, gate = _halves(x, dim, result.sizes)
    return arithmetic(lambda a, b: apply("mul", a, apply("sigmoid", b)), value, gate)


def _halves(x: Tensor, dim: int, sizes: Sequence[Index]) -> tuple[Tensor, Tensor]:
    dim = normalize_dim(dim, x.rank)
    behind = view(x, sizes, lambda *here: [*here[:dim], here[dim] + sizes[dim], *here[dim + 1 :]])
    return view(x, sizes, lambda *here: here), behind


# ---- gradients of activations


def gradient(function: Callable[..., Expr], *operands: Tensor, each_step: bool = False) -> Tensor:
    """Arithmetic that eager does with floats only."""
    for operand in operands:
        floats_only(operand, "a gradient")
    return arithmetic(function, *operands, each_step=each_step)


@lowers(aten.threshold_backward.default)
def threshold_backward(grad: Tensor, x: Tensor, limit_: Number) -> Tensor:
    """0 where x <= limit. A NaN in x lets the gradient through, as in eager."""

    def body(g: Expr, v: Expr) -> Expr:
        return select(apply("le", v, scalar(limit_, v.dtype)), zero(g.dtype), g)

    return arithmetic(body, grad, x)


@lowers(aten.tanh_backward.default)
def tanh_backward(grad: Tensor, y: Tensor) -> Tensor:
    """g (1 - y*y), rounded once inside the brackets"""
    return gradient(lambda g, v: apply("mul", g, _one_less_square(v)), grad, y)


def _one_less_square(v: Expr) -> Expr:
    return apply("fma", apply("neg", v), v, one(v.dtype))


@lowers(aten.sigmoid_backward.default)
def sigmoid_backward(grad: Tensor, y: Tensor) -> Tensor:
    """g (1 - y) y; eager rounds f16 at every step, bf16 once."""

    def body(g: Expr, v: Expr) -> Expr:
        return apply("mul", apply("mul", g, apply("sub", one(g.dtype), v)), v)

    return gradient(body, grad, y, each_step=y.dtype is f16)


@lowers(aten.silu_backward.default)
def silu_backward(grad: Tensor, x: Tensor) -> Tensor:
    def body(g: Expr, v: Expr) -> Expr:
        s = _sigmoid(v)
        slope = apply("fma", v, apply("sub", one(v.dtype), s), one(v.dtype))
        return apply("mul", apply("mul", g, s), slope)

    return gradient(body, grad, x)


def _sigmoid(v: Expr) -> Expr:
    return apply("div", one(v.dtype), apply("add", one(v.dtype), apply("exp", apply("neg", v))))


@lowers(aten.gelu_backward.default)
def gelu_backward(grad: Tensor, x: Tensor, approximate: str = "none") -> Tensor:
    def exact(g: Expr, v: Expr) -> Expr:
        d = v.dtype
        bell = apply("exp", apply("mul", apply("mul", v, v), const(-0.5, d)))
        density = apply("mul", const(1 / math.sqrt(2 * math.pi), d), bell)
        return apply("mul", g, apply("add", apply("ndtr", v), apply("mul", v, density)))

    def by_tanh(g: Expr, v: Expr) -> Expr:
        d = v.dtype
        beta, kappa = const(math.sqrt(2 / math.pi), d), const(0.044715, d)
        squared = apply("mul", v, v)
        inner = apply("mul", beta, apply("add", v, apply("mul", kappa, apply("mul", squared, v))))
        bent = apply("tanh", inner)
        left, right = apply("mul", const(0.5, d), v), apply("add", one(d), bent)
        slope = apply("sub", one(d), apply("mul", bent, bent))
        steep = apply("mul", beta, apply("add", one(d), apply("mul", apply("mul", const(3, d), kappa), squared)))
        derivative = apply("add", apply("mul", const(0.5, d), right), apply("mul", left, apply("mul", slope, steep)))
        return apply("mul", g, derivative)

    return gradient(by_tanh if approximate == "tanh" else exact, grad, x)


@lowers(aten.leaky_relu_backward.default)
def leaky_relu_backward(grad: Tensor, x: Tensor, negative_slope: Number, self_is_result: bool) -> Tensor:
    def body(g: Expr, v: Expr) -> Expr:
        return select(apply("gt", v, zero(v.dtype)), g, apply("mul", g, scalar(negative_slope, g.dtype)))

    return gradient(body, grad, x)


@lowers(aten.hardtanh_backward.default)
def hardtanh_backward(grad: Tensor, x: Tensor, low: Number, high: Number) -> Tensor:
    """g strictly between the limits, 0 elsewhere and for NaN."""

    def body(g: Expr, v: Expr) -> Expr:
        inside = apply("and_", apply("gt", v, scalar(low, v.dtype)), apply("lt", v, scalar(high, v.dtype)))
        return select(inside, g, zero(g.dtype))

    return gradient(body, grad, x)


@lowers(aten.elu_backward.default)
def elu_backward(grad: Tensor, alpha: Number, scale: Number, input_scale: Number, is_result: bool, x: Tensor) -> Tensor:
    """`x` is the input or, for the operation in place, the result."""

    def body(g: Expr, v: Expr) -> Expr:
        factor = _negative_factor(alpha, scale, v)
        inner = scalar(input_scale, v.dtype)
        below = apply("mul", g, inner)
        if is_result:
            below = apply("mul", below, apply("add", v, factor))
        else:
            below = apply("mul", apply("mul", below, factor), apply("exp", apply("mul", v, inner)))
        return select(apply("gt", v, zero(v.dtype)), apply("mul", g, scalar(scale, v.dtype)), below)

    return gradient(body, grad, x)


@lowers(aten.softplus_backward.default)
def softplus_backward(grad: Tensor, x: Tensor, beta: Number, threshold: Number) -> Tensor:
    """g z / (z + 1) for z = exp(beta x); g where beta x passes the threshold."""

    def body(g: Expr, v: Expr) -> Expr:
        scaled = apply("mul", v, scalar(beta, v.dtype))
        z = apply("exp", scaled)
        soft = apply("div", apply("mul", g, z), apply("add", z, one(v.dtype)))
        return select(apply("gt", scaled, scalar(threshold, v.dtype)), g, soft)

    return gradient(body, grad, x)


@lowers(aten.hardshrink_backward.default, aten.softshrink_backward.default)
def shrink_backward(grad: Tensor, x: Tensor, lambd: Number) -> Tensor:
    """0 from -lambd to lambd, and for NaN. The limit is rounded to halves."""

    def body(g: Expr, v: Expr) -> Expr:
        width = scalar(lambd, v.dtype)
        outside = apply("or_", apply("gt", v, width), apply("lt", v, apply("neg", width)))
        return select(outside, g, zero(g.dtype))

    return gradient(body, grad, x, each_step=True)


_SIXTH = 0.1666666716337204  # 1 / 6 in single precision, which eager uses for f64 as well


@lowers(aten.hardsigmoid_backward.default)
def hardsigmoid_backward(grad: Tensor, x: Tensor) -> Tensor:
    """g / 6 strictly between -3 and 3, 0 elsewhere and for NaN."""

    def body(g: Expr, v: Expr) -> Expr:
        inside = apply("and_", apply("gt", v, const(-3, v.dtype)), apply("lt", v, const(3, v.dtype)))
        return select(inside, apply("mul", g, const(_SIXTH, g.dtype)), zero(g.dtype))

    return gradient(body, grad, x)


@lowers(aten.hardswish_backward.default)
def hardswish_backward(grad: Tensor, x: Tensor) -> Tensor:
    """0 up to -3, g from 3, g (x / 3 + 0.5) between; NaN for NaN."""

    def body(g: Expr, v: Expr) -> Expr:
        three = const(3, v.dtype)
        between = apply("mul", g, apply("add", apply("div", v, three), const(0.5, v.dtype)))
        above = select(apply("ge", v, three), g, between)
        return select(apply("le", v, const(-3, v.dtype)), zero(g.dtype), above)

    return gradient(body, grad, x)


@lowers(aten.mish_backward.default)
def mish_backward(grad: Tensor, x: Tensor) -> Tensor:
    """g (t + x sigmoid(x) (1 - t*t)) for t = tanh(log1p(exp(x)))"""

    def body(g: Expr, v: Expr) -> Expr:
        bent = apply("tanh", apply("log1p", apply("exp", v)))
        slope = apply("fma", apply("mul", v, _sigmoid(v)), _one_less_square(bent), bent)
        return apply("mul", g, slope)

    return gradient(body, grad, x)


@lowers(aten.log_sigmoid_backward.default)
def log_sigmoid_backward(grad: Tensor, x: Tensor, decay: Tensor) -> Tensor:
    """g (1 - z / (1 + z)) below zero, g z / (1 + z) elsewhere and for NaN, for z = exp(-|x|) from the forward op."""

    def body(g: Expr, v: Expr, z: Expr) -> Expr:
        below = apply("lt", v, zero(v.dtype))
        part = apply("div", z, apply("add", one(v.dtype), z))
        return apply("mul", g, select(below, apply("sub", one(v.dtype), part), part))

    return gradient(body, grad, x, decay)


@lowers(aten.rrelu_with_noise_backward.default)
def rrelu_with_noise_backward(
    grad: Tensor, x: Tensor, noise: Tensor, lower: Number, upper: Number, training: bool, self_is_result: bool
) -> Tensor:
    """The slopes that the forward op drew; outside training, and where it had nothing to draw from, their mean."""
    if not isinstance(lower, (int, float)) or not isinstance(upper, (int, float)):
        raise Unsupported("rrelu with symbolic limits")
    if training and upper - lower > 1e-6:
        return gradient(lambda g, n: apply("mul", g, n), grad, noise)
    return leaky_relu_backward(grad, x, (lower + upper) / 2, self_is_result)


@lowers(aten._prelu_kernel_backward.default)
def prelu_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of x and, at every element of x, of the weight: what is shared is summed by another op."""

    def of_input(g: Expr, v: Expr, w: Expr) -> Expr:
        return select(apply("gt", v, zero(v.dtype)), g, apply("mul", w, g))

    def of_weight(g: Expr, v: Expr) -> Expr:
        return select(apply("gt", v, zero(v.dtype)), zero(g.dtype), apply("mul", v, g))

    return gradient(of_input, grad, x, weight), gradient(of_weight, grad, x)


@lowers(aten.glu_backward.default)
def glu_backward(grad: Tensor, x: Tensor, dim: int, *, result: Result) -> Tensor | Built:
    """g s for the first half, (1 - s) s a g for the second, for s = sigmoid(b); s of halves is rounded, too."""
    value, gate = _halves(x, dim, grad.sizes)
    gate = unary(lambda b: apply("sigmoid", b), gate)

    def of_gate(s: Expr, a: Expr, g: Expr) -> Expr:
        slope = apply("mul", apply("sub", one(s.dtype), s), s)
        return apply("mul", apply("mul", slope, a), g)

    first = gradient(lambda s, g: apply("mul", s, g), gate, grad)
    return cat([first, gradient(of_gate, gate, value, grad)], dim, result=result)
