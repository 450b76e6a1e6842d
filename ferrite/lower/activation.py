"""Rows of activations and their gradients: functions of one number, computed in f32 for halves and rounded once."""

from __future__ import annotations

import math
from typing import Any

import torch

from ferrite.errors import Unsupported
from ferrite.loops.nodes import Expr
from ferrite.lower.pointwise import Number, arithmetic, clamp, floats_only, limit, not_bool, one, unary, zero
from ferrite.lower.table import lowers
from ferrite.lower.value import Tensor, apply, const, scalar, select

aten = torch.ops.aten


# ---- activations


@lowers(aten.relu.default)
def relu(x: Tensor) -> Tensor:
    """max(x, 0); NaN stays NaN, -0.0 becomes what eager's maximum gives: 0."""
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
    floats_only(x, "gelu")

    def exact(v: Expr) -> Expr:
        root = const(math.sqrt(0.5), v.dtype)
        inner = apply("add", one(v.dtype), apply("erf", apply("mul", v, root)))
        return apply("mul", apply("mul", v, const(0.5, v.dtype)), inner)

    def by_tanh(v: Expr) -> Expr:
        cube = apply("mul", apply("mul", v, v), v)
        inner = apply("add", v, apply("mul", const(0.044715, v.dtype), cube))
        bent = apply("tanh", apply("mul", const(math.sqrt(2 / math.pi), v.dtype), inner))
        return apply("mul", apply("mul", const(0.5, v.dtype), v), apply("add", one(v.dtype), bent))

    return unary(by_tanh if approximate == "tanh" else exact, x)


@lowers(aten.leaky_relu.default)
def leaky_relu(x: Tensor, negative_slope: Number = 0.01) -> Tensor:
    floats_only(x, "leaky_relu")

    def body(v: Expr) -> Expr:
        return select(apply("gt", v, zero(v.dtype)), v, apply("mul", v, scalar(negative_slope, v.dtype)))

    return unary(body, x)


@lowers(aten.elu.default)
def elu(x: Tensor, alpha: Number = 1, scale: Number = 1, input_scale: Number = 1) -> Tensor:
    floats_only(x, "elu")

    def body(v: Expr) -> Expr:
        below = apply("expm1", apply("mul", v, scalar(input_scale, v.dtype)))
        below = apply("mul", apply("mul", below, scalar(alpha, v.dtype)), scalar(scale, v.dtype))
        return select(apply("gt", v, zero(v.dtype)), apply("mul", v, scalar(scale, v.dtype)), below)

    return unary(body, x)


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
    return clamp(x, min_val, max_val)


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
def log_sigmoid_forward(x: Tensor) -> Any:
    raise Unsupported("log_sigmoid_forward", why="its second result is a scratch buffer of eager's own")


# ---- gradients of activations


@lowers(aten.threshold_backward.default)
def threshold_backward(grad: Tensor, x: Tensor, limit_: Number) -> Tensor:
    """0 where x <= limit. A NaN in x lets the gradient through, as in eager."""

    def body(g: Expr, v: Expr) -> Expr:
        return select(apply("le", v, scalar(limit_, v.dtype)), zero(g.dtype), g)

    return arithmetic(body, grad, x)


@lowers(aten.tanh_backward.default)
def tanh_backward(grad: Tensor, y: Tensor) -> Tensor:
    return arithmetic(lambda g, v: apply("mul", g, apply("sub", one(g.dtype), apply("mul", v, v))), grad, y)


@lowers(aten.sigmoid_backward.default)
def sigmoid_backward(grad: Tensor, y: Tensor) -> Tensor:
    return arithmetic(lambda g, v: apply("mul", apply("mul", g, apply("sub", one(g.dtype), v)), v), grad, y)


@lowers(aten.silu_backward.default)
def silu_backward(grad: Tensor, x: Tensor) -> Tensor:
    def body(g: Expr, v: Expr) -> Expr:
        s = apply("div", one(v.dtype), apply("add", one(v.dtype), apply("exp", apply("neg", v))))
        slope = apply("add", one(v.dtype), apply("mul", v, apply("sub", one(v.dtype), s)))
        return apply("mul", apply("mul", g, s), slope)

    return arithmetic(body, grad, x)


@lowers(aten.gelu_backward.default)
def gelu_backward(grad: Tensor, x: Tensor, approximate: str = "none") -> Tensor:
    def exact(g: Expr, v: Expr) -> Expr:
        d = v.dtype
        cdf = apply("mul", const(0.5, d), apply("add", one(d), apply("erf", apply("mul", v, const(math.sqrt(0.5), d)))))
        bell = apply("exp", apply("mul", apply("mul", v, v), const(-0.5, d)))
        density = apply("mul", const(1 / math.sqrt(2 * math.pi), d), bell)
        return apply("mul", g, apply("add", cdf, apply("mul", v, density)))

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

    return arithmetic(by_tanh if approximate == "tanh" else exact, grad, x)


@lowers(aten.leaky_relu_backward.default)
def leaky_relu_backward(grad: Tensor, x: Tensor, negative_slope: Number, self_is_result: bool) -> Tensor:
    def body(g: Expr, v: Expr) -> Expr:
        return select(apply("gt", v, zero(v.dtype)), g, apply("mul", g, scalar(negative_slope, g.dtype)))

    return arithmetic(body, grad, x)


@lowers(aten.hardtanh_backward.default)
def hardtanh_backward(grad: Tensor, x: Tensor, low: Number, high: Number) -> Tensor:
    def body(g: Expr, v: Expr) -> Expr:
        outside = apply("or_", apply("le", v, scalar(low, v.dtype)), apply("ge", v, scalar(high, v.dtype)))
        return select(outside, zero(g.dtype), g)

    return arithmetic(body, grad, x)
