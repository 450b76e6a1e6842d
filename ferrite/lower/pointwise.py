"""Rows of pointwise ops: one output element from one element of each operand, operands stretched to one shape.

Each row says what eager does in odd corners where it handles them. Halves are computed in f32 and rounded once at the
end of the op, as eager's kernels do; the cast back stands in the expression, so a chain of ops rounds where eager
rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ferrite.errors import Unsupported
from ferrite.loops.dtypes import DType, b8, f32
from ferrite.loops.index import Index
from ferrite.loops.nodes import Expr
from ferrite.lower.table import lowers
from ferrite.lower.value import (
    FROM_DTYPE,
    Tensor,
    apply,
    axes_for,
    broadcast_sizes,
    cast,
    compute_dtype,
    const,
    dtype_of,
    expand,
    pointwise,
    promote,
    scalar,
    select,
    to_float,
)

aten, prims = torch.ops.aten, torch.ops.prims

Number = bool | int | float | Index


# ---- building blocks


def unary(function: Callable[[Expr], Expr], x: Tensor) -> Tensor:
    """A function over the reals: integers become f32, halves are computed in f32."""
    result = to_float(x.dtype)
    return pointwise(function, x, compute=compute_dtype(result), result=result)


def arithmetic(
    function: Callable[..., Expr], *operands: Any, result: DType | None = None, rounded_numbers: bool = False
) -> Tensor:
    """Arithmetic in the promoted dtype, halves in f32. Numbers are f32 beside halves, or rounded to the half first."""
    common = promote(*operands)
    numbers = common if rounded_numbers else None
    return pointwise(function, *operands, compute=compute_dtype(common), result=result or common, numbers=numbers)


def not_bool(common: DType, op: str) -> None:
    if common.is_bool:
        raise Unsupported(f"{op} of truth values", why="eager raises")


def one(dtype: DType) -> Expr:
    return const(1, dtype)


def zero(dtype: DType) -> Expr:
    return const(0, dtype)


def logical_not(condition: Expr) -> Expr:
    return apply("not_", condition)


def floats_only(x: Tensor, op: str) -> None:
    if not x.dtype.is_float:
        raise Unsupported(f"{op} of {x.dtype}", why="eager raises")


def limit(value: Expr, low: Expr, high: Expr) -> Expr:
    """min(max(value, low), high); NaN stays NaN."""
    return apply("minimum", apply("maximum", value, low), high)


# ---- functions of one number

_PLAIN = (
    "sqrt", "rsqrt", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin", "acos",
    "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "sigmoid", "erf", "erfc", "erfinv", "lgamma",
    "digamma", "i0",
)  # fmt: skip


def _enter_plain(name: str) -> None:
    def row(x: Tensor) -> Tensor:
        return unary(lambda v: apply(name, v), x)

    row.__name__ = name
    lowers(getattr(aten, name).default)(row)


for _name in _PLAIN:
    _enter_plain(_name)


def _enter_special(name: str, operation: str) -> None:
    def row(x: Tensor) -> Tensor:
        return unary(lambda v: apply(operation, v), x)

    row.__name__ = name
    lowers(getattr(aten, name).default)(row)


for _name, _operation in (
    ("special_i0e", "i0e"),
    ("special_i1", "i1"),
    ("special_i1e", "i1e"),
    ("special_ndtri", "ndtri"),
    ("special_log_ndtr", "log_ndtr"),
):
    _enter_special(_name, _operation)


@lowers(aten.reciprocal.default)
def reciprocal(x: Tensor) -> Tensor:
    return unary(lambda v: apply("div", one(v.dtype), v), x)


@lowers(aten.abs.default)
def absolute(x: Tensor) -> Tensor:
    """Truth values stay as they are."""
    return x if x.dtype.is_bool else arithmetic(lambda v: apply("abs", v), x)


@lowers(aten.neg.default)
def negative(x: Tensor) -> Tensor:
    not_bool(x.dtype, "neg")
    return arithmetic(lambda v: apply("neg", v), x)


@lowers(aten.sign.default)
def sign(x: Tensor) -> Tensor:
    """-1, 0 or 1; 0 for NaN and for both zeros. Truth values stay."""
    if x.dtype.is_bool:
        return x

    def body(v: Expr) -> Expr:
        above = cast(apply("gt", v, zero(v.dtype)), v.dtype)
        below = cast(apply("lt", v, zero(v.dtype)), v.dtype)
        return apply("sub", above, below)

    return arithmetic(body, x)


@lowers(aten.sgn.default)
def sgn(x: Tensor) -> Tensor:
    return sign(x)


@lowers(aten.square.default)
def square(x: Tensor) -> Tensor:
    return power_scalar(x, 2)


def _rounding(name: str) -> Callable[[Tensor], Tensor]:
    def row(x: Tensor) -> Tensor:
        """Integers are round already; truth values raise in eager."""
        not_bool(x.dtype, name)
        return arithmetic(lambda v: apply(name, v), x) if x.dtype.is_float else x

    row.__name__ = name
    return row


for _name in ("floor", "ceil", "trunc"):
    lowers(getattr(aten, _name).default)(_rounding(_name))
lowers(aten.round.default)(_rounding("round"))


@lowers(aten.frac.default)
def frac(x: Tensor) -> Tensor:
    if not x.dtype.is_float:
        raise Unsupported("frac of integers", why="eager raises")
    return arithmetic(lambda v: apply("sub", v, apply("trunc", v)), x)


@lowers(aten.isnan.default)
def isnan(x: Tensor) -> Tensor:
    return test(lambda v: apply("isnan", v), x, otherwise=False)


@lowers(aten.isinf.default)
def isinf(x: Tensor) -> Tensor:
    return test(lambda v: apply("isinf", v), x, otherwise=False)


@lowers(aten.isposinf.default)
def isposinf(x: Tensor) -> Tensor:
    return test(lambda v: apply("eq", v, const(math.inf, v.dtype)), x, otherwise=False)


@lowers(aten.isneginf.default)
def isneginf(x: Tensor) -> Tensor:
    return test(lambda v: apply("eq", v, const(-math.inf, v.dtype)), x, otherwise=False)


@lowers(aten.isfinite.default)
def isfinite(x: Tensor) -> Tensor:
    return test(lambda v: apply("lt", apply("abs", v), const(math.inf, v.dtype)), x, otherwise=True)


def test(function: Callable[[Expr], Expr], x: Tensor, *, otherwise: bool) -> Tensor:
    """A question about floats; of other dtypes the answer is always `otherwise`."""
    if not x.dtype.is_float:
        return Tensor(x.axes, const(otherwise, b8))
    return pointwise(function, x, compute=compute_dtype(x.dtype))


@lowers(aten.signbit.default)
def signbit(x: Tensor) -> Tensor:
    if x.dtype.is_bool:
        return Tensor(x.axes, const(False, b8))
    if x.dtype.is_float:
        return pointwise(lambda v: apply("signbit", v), x, compute=compute_dtype(x.dtype))
    return pointwise(lambda v: apply("lt", v, zero(v.dtype)), x, compute=x.dtype)


@lowers(aten.nan_to_num.default)
def nan_to_num(x: Tensor, nan: float | None = None, posinf: float | None = None, neginf: float | None = None) -> Tensor:
    if not x.dtype.is_float:
        return x
    limits = torch.finfo(FROM_DTYPE[x.dtype])

    def body(v: Expr) -> Expr:
        high = const(limits.max if posinf is None else posinf, v.dtype)
        low = const(limits.min if neginf is None else neginf, v.dtype)
        finite = select(apply("eq", v, const(math.inf, v.dtype)), high, v)
        finite = select(apply("eq", v, const(-math.inf, v.dtype)), low, finite)
        return select(apply("isnan", v), const(nan or 0.0, v.dtype), finite)

    return arithmetic(body, x)


# ---- arithmetic of two


@lowers(aten.add.Tensor, aten.add.Scalar)
def add(x: Any, y: Any, alpha: Number = 1) -> Tensor:
    """x + alpha * y; of truth values: or."""
    return _sum(x, y, alpha, "add")


@lowers(aten.sub.Tensor, aten.sub.Scalar)
def sub(x: Any, y: Any, alpha: Number = 1) -> Tensor:
    not_bool(promote(x, y), "sub")
    return _sum(x, y, alpha, "sub")


@lowers(aten.rsub.Tensor, aten.rsub.Scalar)
def rsub(x: Any, y: Any, alpha: Number = 1) -> Tensor:
    """y - alpha * x"""
    not_bool(promote(x, y), "rsub")
    return _sum(y, x, alpha, "sub")


def _sum(x: Any, y: Any, alpha: Number, operation: str) -> Tensor:
    common = promote(x, y)
    if common.is_bool:
        if alpha not in (1, True):
            raise Unsupported("truth values added with alpha")
        return arithmetic(lambda a, b: apply("or_", a, b), x, y)

    def body(a: Expr, b: Expr) -> Expr:
        if isinstance(alpha, Index) or alpha != 1:
            b = apply("mul", b, cast(scalar(alpha, common), b.dtype))
        return apply(operation, a, b)

    # Unlike mul and div, eager's sums round numbers and alpha to the dtype of the tensor first.
    return arithmetic(body, x, y, rounded_numbers=True)


@lowers(aten.mul.Tensor, aten.mul.Scalar)
def mul(x: Any, y: Any) -> Tensor:
    """x * y; of truth values: and."""
    operation = "and_" if promote(x, y).is_bool else "mul"
    return arithmetic(lambda a, b: apply(operation, a, b), x, y)


@lowers(aten.div.Tensor, aten.div.Scalar)
def true_divide(x: Any, y: Any) -> Tensor:
    result = to_float(promote(x, y))
    return pointwise(lambda a, b: apply("div", a, b), x, y, compute=compute_dtype(result), result=result)


@lowers(aten.div.Tensor_mode, aten.div.Scalar_mode)
def divide(x: Any, y: Any, rounding_mode: str | None = None) -> Tensor:
    if rounding_mode is None:
        return true_divide(x, y)
    return floor_divide(x, y) if rounding_mode == "floor" else _truncated(x, y)


def _truncated(x: Any, y: Any) -> Tensor:
    common = promote(x, y)
    if common.is_float:
        return arithmetic(lambda a, b: apply("trunc", apply("div", a, b)), x, y)
    raise Unsupported("integer division", why="division by zero must raise as in eager")


@lowers(aten.floor_divide.default)
def floor_divide(x: Any, y: Any) -> Tensor:
    """Floats: eager corrects the quotient by the remainder; a zero divisor divides plainly. Integers: see why."""
    common = promote(x, y)
    if not common.is_float:
        raise Unsupported("integer division", why="division by zero must raise as in eager")

    def body(a: Expr, b: Expr) -> Expr:
        null = zero(a.dtype)
        remainder = apply("truncmod", a, b)
        quotient = apply("div", apply("sub", a, remainder), b)
        differs = apply(
            "and_", apply("ne", remainder, null), apply("ne", apply("lt", b, null), apply("lt", remainder, null))
        )
        quotient = select(differs, apply("sub", quotient, one(a.dtype)), quotient)
        low = apply("floor", quotient)
        half = apply("gt", apply("sub", quotient, low), const(0.5, a.dtype))
        low = select(half, apply("add", low, one(a.dtype)), low)
        signed_zero = apply("copysign", null, apply("div", a, b))
        whole = select(apply("ne", quotient, null), low, signed_zero)
        return select(apply("eq", b, null), apply("div", a, b), whole)

    return arithmetic(body, x, y)


@lowers(aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor)
def remainder(x: Any, y: Any) -> Tensor:
    """The sign of the divisor; integers raise on zero in eager."""
    common = promote(x, y)
    if not common.is_float:
        raise Unsupported("integer remainder", why="division by zero must raise as in eager")

    def body(a: Expr, b: Expr) -> Expr:
        null = zero(a.dtype)
        rest = apply("truncmod", a, b)
        differs = apply("and_", apply("ne", rest, null), apply("ne", apply("lt", b, null), apply("lt", rest, null)))
        return select(differs, apply("add", rest, b), rest)

    return arithmetic(body, x, y)


@lowers(aten.fmod.Tensor, aten.fmod.Scalar)
def fmod(x: Any, y: Any) -> Tensor:
    if not promote(x, y).is_float:
        raise Unsupported("integer remainder", why="division by zero must raise as in eager")
    return arithmetic(lambda a, b: apply("truncmod", a, b), x, y)


def _enter_binary(ops: tuple[Any, ...], operation: str, *, floats: bool = False) -> None:
    def row(x: Any, y: Any) -> Tensor:
        common = promote(x, y)
        if floats and not common.is_float:
            common = f32
        return pointwise(lambda a, b: apply(operation, a, b), x, y, compute=compute_dtype(common), result=common)

    row.__name__ = operation
    lowers(*ops)(row)


_enter_binary((aten.maximum.default,), "maximum")
_enter_binary((aten.minimum.default,), "minimum")
_enter_binary((aten.atan2.default,), "atan2", floats=True)
_enter_binary((aten.copysign.Tensor, aten.copysign.Scalar), "copysign", floats=True)


@lowers(aten.fmax.default)
def fmax(x: Tensor, y: Tensor) -> Tensor:
    """The larger; the other one if one is NaN."""
    return arithmetic(lambda a, b: apply("fmax" if a.dtype.is_float else "maximum", a, b), x, y)


@lowers(aten.fmin.default)
def fmin(x: Tensor, y: Tensor) -> Tensor:
    return arithmetic(lambda a, b: apply("fmin" if a.dtype.is_float else "minimum", a, b), x, y)


@lowers(aten.hypot.default)
def hypot(x: Tensor, y: Tensor) -> Tensor:
    floats_only(x, "hypot")
    return arithmetic(lambda a, b: apply("hypot", a, b), x, y)


@lowers(aten.nextafter.default)
def nextafter(x: Tensor, y: Tensor) -> Tensor:
    """In the dtype itself: the next half is not the next f32."""
    common = promote(x, y)
    if not common.is_float:
        raise Unsupported("nextafter of integers", why="eager raises")
    return pointwise(lambda a, b: apply("nextafter", a, b), x, y, compute=common)


@lowers(aten.logaddexp.default)
def logaddexp(x: Tensor, y: Tensor) -> Tensor:
    """m + log1p(exp(-|x - y|)), m the larger; equal infinities are themselves."""
    floats_only(x, "logaddexp")

    def body(a: Expr, b: Expr) -> Expr:
        most = apply("maximum", a, b)
        gap = apply("neg", apply("abs", apply("sub", a, b)))
        same = apply("and_", apply("isinf", a), apply("eq", a, b))
        return select(same, a, apply("add", most, apply("log1p", apply("exp", gap))))

    return arithmetic(body, x, y)


@lowers(aten.pow.Tensor_Tensor)
def power(x: Tensor, y: Tensor) -> Tensor:
    common = promote(x, y)
    if not common.is_float:
        raise Unsupported("a power of integers", why="a negative exponent must raise as in eager")
    return arithmetic(lambda a, b: apply("pow", a, b), x, y)


@lowers(aten.pow.Scalar)
def power_of_scalar(x: Number, y: Tensor) -> Tensor:
    if isinstance(x, (int, float)) and x == 1:
        return Tensor(y.axes, const(1, promote(x, y)))
    if not promote(x, y).is_float:
        raise Unsupported("a power of integers", why="a negative exponent must raise as in eager")
    return arithmetic(lambda a, b: apply("pow", a, b), x, y)


@lowers(aten.pow.Tensor_Scalar)
def power_scalar(x: Tensor, exponent: Number) -> Tensor:
    """Small whole exponents are products, as in eager's kernel; a half is a square root."""
    if isinstance(exponent, Index):
        raise Unsupported("a symbolic exponent")
    common = promote(x, exponent)
    if exponent == 0:
        return Tensor(x.axes, const(1, common))
    if exponent == 1:
        return Tensor(x.axes, cast(x.body, common))
    compute = compute_dtype(common)
    if exponent in (2, 3) and not common.is_bool:

        def multiplied(v: Expr) -> Expr:
            twice = apply("mul", v, v)
            return twice if exponent == 2 else apply("mul", twice, v)

        return pointwise(multiplied, x, compute=compute, result=common)
    if not common.is_float:
        raise Unsupported("a power of integers", why="only squares and cubes have a kernel")
    special: dict[float, Callable[[Expr], Expr]] = {
        0.5: lambda v: apply("sqrt", v),
        -0.5: lambda v: apply("rsqrt", v),
        -1: lambda v: apply("div", one(v.dtype), v),
        -2: lambda v: apply("div", one(v.dtype), apply("mul", v, v)),
    }
    body = special.get(exponent, lambda v: apply("pow", v, const(exponent, v.dtype)))
    return pointwise(body, x, compute=compute, result=common)


# ---- comparison and logic


def _enter_comparison(name: str) -> None:
    def row(x: Any, y: Any) -> Tensor:
        return pointwise(lambda a, b: apply(name, a, b), x, y, compute=promote(x, y))

    row.__name__ = name
    packet = getattr(aten, name)
    lowers(packet.Tensor, packet.Scalar)(row)


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    _enter_comparison(_name)


def truth(value: Expr) -> Expr:
    """Whether it is not zero; NaN is true."""
    return value if value.dtype.is_bool else apply("ne", value, zero(value.dtype))


def truth_of(x: Tensor) -> Tensor:
    return Tensor(x.axes, truth(cast(x.body, compute_dtype(x.dtype))))


@lowers(aten.logical_not.default)
def logical_not_(x: Tensor) -> Tensor:
    return pointwise(logical_not, truth_of(x), compute=b8)


def _enter_logic(name: str, operation: str) -> None:
    def row(x: Tensor, y: Tensor) -> Tensor:
        return pointwise(lambda a, b: apply(operation, a, b), truth_of(x), truth_of(y), compute=b8)

    row.__name__ = name
    lowers(getattr(aten, name).default)(row)


for _name, _operation in (("logical_and", "and_"), ("logical_or", "or_"), ("logical_xor", "xor")):
    _enter_logic(_name, _operation)


def _enter_bitwise(name: str, operation: str) -> None:
    def row(x: Any, y: Any) -> Tensor:
        if promote(x, y).is_float:
            raise Unsupported(f"{name} of floats", why="eager raises")
        return arithmetic(lambda a, b: apply(operation, a, b), x, y)

    row.__name__ = name
    packet = getattr(aten, name)
    lowers(packet.Tensor, packet.Scalar, packet.Scalar_Tensor)(row)


for _name, _operation in (("bitwise_and", "and_"), ("bitwise_or", "or_"), ("bitwise_xor", "xor")):
    _enter_bitwise(_name, _operation)


def _enter_shift(name: str, operation: str, ops: tuple[Any, ...]) -> None:
    def row(x: Any, y: Any) -> Tensor:
        common = promote(x, y)
        if not common.is_int:
            raise Unsupported(f"{name} of {common}", why="eager raises or goes through floats")
        return arithmetic(lambda a, b: apply(operation, a, b), x, y)

    row.__name__ = name
    lowers(*ops)(row)


_enter_shift(
    "bitwise_left_shift",
    "shl",
    (
        aten.bitwise_left_shift.Tensor,
        aten.bitwise_left_shift.Tensor_Scalar,
        aten.__lshift__.Tensor,
        aten.__lshift__.Scalar,
    ),
)
_enter_shift(
    "bitwise_right_shift",
    "shr",
    (
        aten.bitwise_right_shift.Tensor,
        aten.bitwise_right_shift.Tensor_Scalar,
        aten.__rshift__.Tensor,
        aten.__rshift__.Scalar,
    ),
)


@lowers(aten.bitwise_not.default)
def bitwise_not(x: Tensor) -> Tensor:
    if x.dtype.is_float:
        raise Unsupported("bitwise_not of floats", why="eager raises")
    return arithmetic(lambda v: apply("not_", v), x)


# ---- choosing


@lowers(aten.where.self)
def where(condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The condition may be u8; the branches are promoted."""
    return choose(truth_of(condition), x, y)


@lowers(aten.where.ScalarOther)
def where_scalar_other(condition: Tensor, x: Tensor, y: Number) -> Tensor:
    return choose(truth_of(condition), x, y)


@lowers(aten.where.ScalarSelf)
def where_scalar_self(condition: Tensor, x: Number, y: Tensor) -> Tensor:
    return choose(truth_of(condition), x, y)


@lowers(aten.where.Scalar)
def where_scalars(condition: Tensor, x: Number, y: Number) -> Tensor:
    return choose(truth_of(condition), x, y)


def choose(condition: Tensor, x: Any, y: Any) -> Tensor:
    common = promote(x, y)
    sizes = broadcast_sizes([v.sizes for v in (condition, x, y) if isinstance(v, Tensor)])

    def branch(v: Any) -> Expr:
        return cast(expand(v, sizes).body, common) if isinstance(v, Tensor) else scalar(v, common)

    return Tensor(axes_for(sizes), select(expand(condition, sizes).body, branch(x), branch(y)))


@lowers(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(x: Tensor, mask: Tensor, value: Any) -> Tensor:
    """Keeps the dtype of x, whatever the value is."""
    sizes = broadcast_sizes([x.sizes, mask.sizes])
    if isinstance(value, Tensor):
        fill = cast(expand(value, sizes).body, x.dtype)
    else:
        fill = scalar(value, x.dtype)
    return Tensor(axes_for(sizes), select(expand(truth_of(mask), sizes).body, fill, expand(x, sizes).body))


@lowers(aten.clamp.default)
def clamp(x: Tensor, low: Number | None = None, high: Number | None = None) -> Tensor:
    """NaN stays NaN; where low > high the result is high."""
    common = promote(*(v for v in (x, low, high) if v is not None))
    not_bool(common, "clamp")
    return _clamp(x, low, high, common)


@lowers(aten.clamp.Tensor)
def clamp_tensor(x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    common = promote(*(v for v in (x, low, high) if v is not None))
    not_bool(common, "clamp")
    return _clamp(x, low, high, common)


def _clamp(x: Tensor, low: Any, high: Any, common: DType) -> Tensor:
    if low is not None:
        x = pointwise(lambda a, b: apply("maximum", a, b), x, low, compute=common)
    if high is not None:
        x = pointwise(lambda a, b: apply("minimum", a, b), x, high, compute=common)
    return Tensor(x.axes, cast(x.body, common))


@lowers(aten.clamp_min.default, aten.clamp_min.Tensor)
def clamp_min(x: Tensor, low: Any) -> Tensor:
    return clamp_tensor(x, low, None)


@lowers(aten.clamp_max.default, aten.clamp_max.Tensor)
def clamp_max(x: Tensor, high: Any) -> Tensor:
    return clamp_tensor(x, None, high)


@lowers(aten.threshold.default)
def threshold(x: Tensor, limit_: Number, value: Number) -> Tensor:
    """value where x <= limit; NaN stays NaN."""

    def body(v: Expr) -> Expr:
        return select(apply("le", v, scalar(limit_, v.dtype)), scalar(value, v.dtype), v)

    return arithmetic(body, x)


@lowers(aten.lerp.Scalar, aten.lerp.Tensor)
def lerp(start: Tensor, end: Tensor, weight: Any) -> Tensor:
    """From the nearer end: start + w (end - start), or end - (1 - w)(end - start) where |w| >= 0.5."""

    def body(a: Expr, b: Expr, w: Expr) -> Expr:
        gap = apply("sub", b, a)
        near = apply("add", a, apply("mul", w, gap))
        far = apply("sub", b, apply("mul", gap, apply("sub", one(a.dtype), w)))
        return select(apply("lt", apply("abs", w), const(0.5, a.dtype)), near, far)

    return arithmetic(body, start, end, weight, result=start.dtype)


@lowers(aten.addcmul.default)
def addcmul(x: Tensor, a: Tensor, b: Tensor, *, value: Number = 1) -> Tensor:
    def body(v: Expr, p: Expr, q: Expr) -> Expr:
        return apply("add", v, apply("mul", apply("mul", scalar(value, v.dtype), p), q))

    return arithmetic(body, x, a, b)


@lowers(aten.addcdiv.default)
def addcdiv(x: Tensor, a: Tensor, b: Tensor, *, value: Number = 1) -> Tensor:
    if not promote(x, a, b).is_float:
        raise Unsupported("addcdiv of integers", why="eager raises")

    def body(v: Expr, p: Expr, q: Expr) -> Expr:
        return apply("add", v, apply("div", apply("mul", scalar(value, v.dtype), p), q))

    return arithmetic(body, x, a, b)


@lowers(aten.xlogy.Tensor, aten.xlogy.Scalar_Self, aten.xlogy.Scalar_Other)
def xlogy(x: Any, y: Any) -> Tensor:
    """x * log(y); 0 where x is 0, but NaN where y is NaN."""
    result = to_float(promote(x, y))

    def body(a: Expr, b: Expr) -> Expr:
        product = select(apply("eq", a, zero(a.dtype)), zero(a.dtype), apply("mul", a, apply("log", b)))
        return select(apply("isnan", b), b, product)

    return pointwise(body, x, y, compute=compute_dtype(result), result=result)


# ---- conversions and copies


@lowers(aten._to_copy.default)
def to_copy(x: Tensor, *, dtype: torch.dtype | None = None, **others: Any) -> Tensor:
    """Another dtype, the same values; the memory format shows in the strides, which come from the trace."""
    if others.get("layout") not in (None, torch.strided) or others.get("pin_memory"):
        raise Unsupported("a copy to another layout or to pinned memory")
    return Tensor(x.axes, cast(x.body, x.dtype if dtype is None else dtype_of(dtype)))


@lowers(prims.convert_element_type.default)
def convert_element_type(x: Tensor, dtype: torch.dtype) -> Tensor:
    return Tensor(x.axes, cast(x.body, dtype_of(dtype)))


@lowers(aten.clone.default, aten.contiguous.default)
def clone(x: Tensor, *, memory_format: Any = None) -> Tensor:
    return x


@lowers(aten.copy.default)
def copy(x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """The values of source in the shape and dtype of x."""
    return Tensor(x.axes, cast(expand(source, x.sizes).body, x.dtype))
