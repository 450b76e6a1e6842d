"""Rows of arithmetic with two and three operands: sums, products, division, powers, and what is built from them.

Integers wrap around. Integer division raises where eager raises: a zero divisor stops the kernel. Where eager's kernels
fuse a product and a sum into one rounding, so do the rows: `fma` is written where they do, and nowhere else.
"""

from __future__ import annotations

from typing import Any

import torch

from ferrite.errors import Unsupported
from ferrite.loops.dtypes import DType, bf16, f16, i32
from ferrite.loops.index import Index
from ferrite.loops.nodes import Const, Expr, Require
from ferrite.lower.pointwise import (
    Number,
    arithmetic,
    floats_only,
    is_single,
    not_bool,
    one,
    real,
    representable,
    zero,
)
from ferrite.lower.table import lowers
from ferrite.lower.value import (
    Tensor,
    apply,
    cast,
    compute_dtype,
    const,
    of_one_dtype,
    pointwise,
    promote,
    scalar,
    select,
    to_float,
)

aten = torch.ops.aten


# ---- sums and products


@lowers(aten.add.Tensor, aten.add.Scalar)
def add(x: Any, y: Any, alpha: Number = 1) -> Tensor:
    """x + alpha * y; of truth values: or."""
    if promote(x, y).is_bool:
        _alpha_fits(alpha, promote(x, y))
        return arithmetic(lambda a, b: apply("or_", a, b) if alpha else a, x, y)
    return _sum(x, y, alpha, "add")


@lowers(aten.sub.Tensor, aten.sub.Scalar)
def sub(x: Any, y: Any, alpha: Number = 1) -> Tensor:
    _no_truth_values(x, y)
    return _sum(x, y, alpha, "sub")


@lowers(aten.rsub.Tensor, aten.rsub.Scalar)
def rsub(x: Any, y: Any, alpha: Number = 1) -> Tensor:
    """y - alpha * x"""
    _no_truth_values(x, y)
    return _sum(y, x, alpha, "sub")


def _no_truth_values(*operands: Any) -> None:
    for operand in operands:
        if isinstance(operand, bool) or (isinstance(operand, Tensor) and operand.dtype.is_bool):
            raise Unsupported("a difference with truth values", why="eager raises")


def _sum(x: Any, y: Any, alpha: Number, operation: str) -> Tensor:
    """Unlike products, eager's sums round numbers and alpha to the dtype of the tensor first."""
    common = promote(x, y)
    _alpha_fits(alpha, common)

    def body(a: Expr, b: Expr) -> Expr:
        if isinstance(alpha, (int, float)) and alpha == 1:
            return apply(operation, a, b)
        factor = cast(scalar(alpha, common), b.dtype)
        if not common.is_float:
            return apply(operation, a, apply("mul", b, factor))
        return apply("fma", b, factor if operation == "add" else apply("neg", factor), a)

    return arithmetic(body, x, y, common=common)


def _alpha_fits(alpha: Number, common: DType) -> None:
    kinds = {"bool": (bool, int), "int": (int, Index), "float": (int, float, Index)}[common.kind]
    representable(alpha, common)
    if not isinstance(alpha, kinds) or (isinstance(alpha, bool) and not common.is_bool):
        raise Unsupported(f"alpha = {alpha} for a sum of {common}", why="eager raises")


@lowers(aten.mul.Tensor, aten.mul.Scalar)
def mul(x: Any, y: Any) -> Tensor:
    """x * y; of truth values: and."""
    common = promote(x, y)
    operation = "and_" if common.is_bool else "mul"
    return arithmetic(lambda a, b: apply(operation, a, b), x, y, common=common, wide_second=True)


# ---- division


@lowers(aten.div.Tensor, aten.div.Scalar)
def true_divide(x: Any, y: Any) -> Tensor:
    return real(lambda a, b: apply("div", a, b), x, y, wide_second=True)


@lowers(aten.div.Tensor_mode, aten.div.Scalar_mode)
def divide(x: Any, y: Any, rounding_mode: str | None = None) -> Tensor:
    match rounding_mode:
        case None:
            return true_divide(x, y)
        case "floor":
            return floor_divide(x, y)
        case "trunc":
            return _truncated(x, y)
    raise Unsupported(f"the rounding mode {rounding_mode!r}")


def _truncated(x: Any, y: Any) -> Tensor:
    """Halves divided by a tensor are rounded before they are cut off."""
    if not promote(x, y).is_float:
        return _integer_division("truncdiv", x, y)

    def body(a: Expr, b: Expr) -> Expr:
        return apply("trunc", apply("div", a, b))

    return arithmetic(body, x, y, wide_second=True, each_step=not is_single(y))


@lowers(aten.floor_divide.default, aten.floor_divide.Scalar)
def floor_divide(x: Any, y: Any) -> Tensor:
    """Floats: eager corrects the quotient by the remainder; a zero divisor divides plainly. Halves divided by a tensor
    are rounded at every step."""
    if not promote(x, y).is_float:
        return _integer_division("floordiv", x, y)

    def body(a: Expr, b: Expr) -> Expr:
        null = zero(a.dtype)
        rest = apply("truncmod", a, b)
        quotient = apply("div", apply("sub", a, rest), b)
        quotient = select(_other_sign(rest, b), apply("sub", quotient, one(a.dtype)), quotient)
        low = apply("floor", quotient)
        half = apply("gt", apply("sub", quotient, low), const(0.5, a.dtype))
        low = select(half, apply("add", low, one(a.dtype)), low)
        signed_zero = apply("copysign", null, apply("div", a, b))
        whole = select(apply("ne", quotient, null), low, signed_zero)
        return select(apply("eq", b, null), apply("div", a, b), whole)

    return arithmetic(body, x, y, wide_second=True, each_step=not is_single(y))


@lowers(aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor)
def remainder(x: Any, y: Any) -> Tensor:
    """The sign of the divisor; of a finite number by an infinity of the other sign: that infinity."""
    if not promote(x, y).is_float:
        return _integer_division("floormod", x, y)

    def body(a: Expr, b: Expr) -> Expr:
        rest = apply("truncmod", a, b)
        return select(_other_sign(rest, b), apply("add", rest, b), rest)

    return arithmetic(body, x, y)


@lowers(aten.fmod.Tensor, aten.fmod.Scalar)
def fmod(x: Any, y: Any) -> Tensor:
    """The sign of the dividend."""
    if not promote(x, y).is_float:
        return _integer_division("truncmod", x, y)
    return arithmetic(lambda a, b: apply("truncmod", a, b), x, y)


def _other_sign(rest: Expr, divisor: Expr) -> Expr:
    """Whether a remainder is not zero, and lies on the other side of zero than the divisor."""
    null = zero(rest.dtype)
    apart = apply("ne", apply("lt", divisor, null), apply("lt", rest, null))
    return apply("and_", apply("ne", rest, null), apart)


def _integer_division(operation: str, x: Any, y: Any) -> Tensor:
    """Division of integers. A zero anywhere among the divisors raises, as in eager; of no elements it does not."""
    not_bool(promote(x, y), operation)

    def body(a: Expr, b: Expr) -> Expr:
        divided = apply(operation, a, b)
        if isinstance(b, Const) and b.value:
            return divided
        return Require(apply("ne", b, zero(b.dtype)), divided, "RuntimeError", "ZeroDivisionError")

    return arithmetic(body, x, y)


# ---- powers


@lowers(aten.pow.Tensor_Tensor)
def power(x: Any, y: Any) -> Tensor:
    """Integers: a negative exponent gives 0, but 1 and -1 have inverses."""
    not_bool(promote(x, y), "pow")
    return arithmetic(lambda a, b: apply("pow", a, b), x, y)


@lowers(aten.pow.Scalar)
def power_of_scalar(x: Number, y: Tensor) -> Tensor:
    if isinstance(x, (int, float)) and x == 1:
        not_bool(promote(x, y), "pow")
        return Tensor(y.axes, one(promote(x, y)))
    return power(x, y)


@lowers(aten.pow.Tensor_Scalar)
def power_scalar(x: Tensor, exponent: Number) -> Tensor:
    """Small whole exponents are products, as in eager's kernel (bf16 rounds between them); a half is a square root.
    Any other exponent of floats is rounded to the dtype first. Of integers, negative exponents raise in eager."""
    common = promote(x, exponent)
    if isinstance(exponent, Index):
        return power(x, exponent)
    representable(exponent, common)
    if exponent == 0:
        return Tensor(x.axes, one(common))
    if exponent == 1:
        return Tensor(x.axes, cast(x.body, common))
    if not common.is_float and exponent < 0:
        raise Unsupported("a power of integers with a negative exponent", why="eager raises")
    if exponent in (2, 3) or not common.is_float:
        return arithmetic(lambda v: _product(v, int(exponent)), x, common=common, each_step=common is bf16)
    if exponent == -2:
        return arithmetic(
            lambda v: apply("div", one(v.dtype), apply("mul", v, v)), x, common=common, each_step=common is bf16
        )
    named = {0.5: "sqrt", -0.5: "rsqrt"}.get(exponent)
    if named and common is not f16:  # there eager keeps to pow: -inf ** 0.5 is inf, its square root is NaN
        return arithmetic(lambda v: apply(named, v), x, common=common)
    if exponent == -1:
        return arithmetic(lambda v: apply("div", one(v.dtype), v), x, common=common)
    return arithmetic(lambda a, b: apply("pow", a, b), x, exponent, common=common)


def _product(v: Expr, exponent: int) -> Expr:
    """v * v * v, for larger exponents by squaring: products of integers may be grouped in any way."""
    if exponent == 1:
        return v
    halfway = _product(v, exponent // 2)
    even = apply("mul", halfway, halfway)
    return apply("mul", even, v) if exponent % 2 else even


@lowers(aten.square.default)
def square(x: Tensor) -> Tensor:
    return power_scalar(x, 2)


@lowers(aten.ldexp.Tensor)
def ldexp(x: Tensor, y: Tensor) -> Tensor:
    """x * 2**y: exactly for floats by integers, of which eager's kernel takes the low 32 bits; else as a product."""
    if y.dtype.is_float or not x.dtype.is_float:
        return mul(x, power_of_scalar(2.0, y))
    not_bool(y.dtype, "ldexp")
    result = to_float(promote(x, y))
    exponent = Tensor(y.axes, cast(y.body, i32))
    return pointwise(lambda a, b: apply("ldexp", a, b), x, exponent, compute=compute_dtype(result), result=result)


# ---- extremes and signs


def _enter(name: str, *ops: Any, over_reals: bool = False) -> None:
    def row(x: Any, y: Any) -> Tensor:
        return (real if over_reals else arithmetic)(lambda a, b: apply(name, a, b), x, y)

    row.__name__ = name
    lowers(*ops)(row)


_enter("maximum", aten.maximum.default)
_enter("minimum", aten.minimum.default)
_enter("atan2", aten.atan2.default, over_reals=True)
_enter("copysign", aten.copysign.Tensor, aten.copysign.Scalar, over_reals=True)


@lowers(aten.fmax.default)
def fmax(x: Tensor, y: Tensor) -> Tensor:
    """The larger; the other one if one is NaN."""
    return arithmetic(lambda a, b: apply("fmax" if a.dtype.is_float else "maximum", a, b), x, y)


@lowers(aten.fmin.default)
def fmin(x: Tensor, y: Tensor) -> Tensor:
    return arithmetic(lambda a, b: apply("fmin" if a.dtype.is_float else "minimum", a, b), x, y)


@lowers(aten.heaviside.default)
def heaviside(x: Tensor, y: Tensor) -> Tensor:
    """0 below zero, 1 above, y at both zeros; 0 for NaN."""
    of_one_dtype("heaviside", x, y)

    def body(a: Expr, b: Expr) -> Expr:
        null = zero(a.dtype)
        return select(apply("eq", a, null), b, cast(apply("gt", a, null), a.dtype))

    return arithmetic(body, x, y)


@lowers(aten.nextafter.default)
def nextafter(x: Tensor, y: Tensor) -> Tensor:
    """In the dtype itself: the next half is not the next f32."""
    floats_only(x, "nextafter")
    return arithmetic(lambda a, b: apply("nextafter", a, b), x, y, each_step=True)


# ---- functions of two numbers


@lowers(aten.hypot.default)
def hypot(x: Tensor, y: Tensor) -> Tensor:
    floats_only(x, "hypot")
    return arithmetic(lambda a, b: apply("hypot", a, b), x, y)


@lowers(aten.logaddexp.default)
def logaddexp(x: Tensor, y: Tensor) -> Tensor:
    """log(exp(x) + exp(y)) = m + log1p(exp(-|x - y|)), m the larger; equal infinities are themselves."""
    floats_only(x, "logaddexp")

    def body(a: Expr, b: Expr) -> Expr:
        return _apart(a, b, apply("log1p", apply("exp", _gap(a, b))))

    return arithmetic(body, x, y)


@lowers(aten.logaddexp2.default)
def logaddexp2(x: Tensor, y: Tensor) -> Tensor:
    """log2(2**x + 2**y) = m + log2(1 + 2**-|x - y|)"""
    floats_only(x, "logaddexp2")

    def body(a: Expr, b: Expr) -> Expr:
        per_octave = const(1.4426950408889634, a.dtype)  # 1 / log(2)
        return _apart(a, b, apply("mul", apply("log1p", apply("exp2", _gap(a, b))), per_octave))

    return arithmetic(body, x, y)


def _gap(a: Expr, b: Expr) -> Expr:
    return apply("neg", apply("abs", apply("sub", a, b)))


def _apart(a: Expr, b: Expr, beyond: Expr) -> Expr:
    """The larger plus what lies beyond it, but an infinity where both are that infinity: their distance is NaN."""
    same = apply("and_", apply("isinf", a), apply("eq", a, b))
    return select(same, a, apply("add", apply("maximum", a, b), beyond))


@lowers(aten.xlogy.Tensor, aten.xlogy.Scalar_Self, aten.xlogy.Scalar_Other)
def xlogy(x: Any, y: Any) -> Tensor:
    return _x_times("log", x, y)


@lowers(aten.special_xlog1py.default, aten.special_xlog1py.self_scalar, aten.special_xlog1py.other_scalar)
def xlog1py(x: Any, y: Any) -> Tensor:
    return _x_times("log1p", x, y)


def _x_times(name: str, x: Any, y: Any) -> Tensor:
    """x * log(y); 0 where x is 0, but NaN where y is NaN. Halves: the logarithm is rounded, too."""

    def body(a: Expr, b: Expr) -> Expr:
        product = select(apply("eq", a, zero(a.dtype)), zero(a.dtype), apply("mul", a, apply(name, b)))
        return select(apply("isnan", b), b, product)

    return real(body, x, y, each_step=True)


# ---- three operands


@lowers(aten.lerp.Scalar, aten.lerp.Tensor)
def lerp(start: Tensor, end: Tensor, weight: Any) -> Tensor:
    """From the nearer end: start + w (end - start), or end - (1 - w)(end - start) where |w| >= 0.5. The product is not
    rounded before the sum; a weight that is a number is not rounded to halves."""
    floats_only(start, "lerp")

    def body(a: Expr, b: Expr, w: Expr) -> Expr:
        near = apply("lt", apply("abs", w), const(0.5, w.dtype))
        step = select(near, w, apply("sub", w, one(w.dtype)))
        return apply("fma", step, apply("sub", b, a), select(near, a, b))

    if isinstance(weight, Tensor):
        return arithmetic(body, start, end, weight)
    return arithmetic(lambda a, b: body(a, b, scalar(weight, a.dtype)), start, end)


@lowers(aten.addcmul.default)
def addcmul(x: Tensor, a: Tensor, b: Tensor, *, value: Number = 1) -> Tensor:
    """x + value * a * b; of floats the last product is not rounded before the sum."""
    common = promote(x, a, b)
    not_bool(common, "addcmul")
    representable(value, common)
    if not common.is_float and isinstance(value, float):
        raise Unsupported("addcmul of integers with a fraction", why="eager raises or cuts it off")

    def body(v: Expr, p: Expr, q: Expr) -> Expr:
        scaled = apply("mul", scalar(value, v.dtype), p)
        if v.dtype.is_float:
            return apply("fma", scaled, q, v)
        return apply("add", v, apply("mul", scaled, q))

    return arithmetic(body, x, a, b)


@lowers("prims.fma.default")
def fused_multiply_add(a: Any, b: Any, c: Any) -> Tensor:
    """a * b + c, which Dynamo writes for addcmul_, addcdiv_ and add_ with a factor: every step of Adam.

    Of floats the product is not rounded before the sum, as in the kernels of those ops. Tracing may leave `b`, the
    factor, a number.
    """
    common = promote(a, b, c)
    not_bool(common, "fma")
    if common.is_float:
        return arithmetic(lambda p, q, v: apply("fma", p, q, v), a, b, c)
    return arithmetic(lambda p, q, v: apply("add", apply("mul", p, q), v), a, b, c)


@lowers(aten.addcdiv.default)
def addcdiv(x: Tensor, a: Tensor, b: Tensor, *, value: Number = 1) -> Tensor:
    """x + value * a / b"""
    if not promote(x, a, b).is_float:
        raise Unsupported("addcdiv of integers", why="eager raises")

    def body(v: Expr, p: Expr, q: Expr) -> Expr:
        return apply("add", v, apply("div", apply("mul", scalar(value, v.dtype), p), q))

    return arithmetic(body, x, a, b)
