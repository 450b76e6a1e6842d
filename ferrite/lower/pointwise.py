"""Rows of pointwise ops: one output element from one element of each operand, operands stretched to one shape.

Here are the building blocks, functions of one number, comparison, logic, choices and conversions; arithmetic with two
and three operands is in `binary.py`, activations in `activation.py`.

Each row says what eager does in odd corners where it handles them. Halves are computed in f32 and rounded once at the
end of the op, as eager's kernels do; the cast back stands in the expression, so a chain of ops rounds where eager
rounds. Where eager's vector loop and what it does with the last few elements round differently, we follow the former.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ferrite.errors import Unsupported
from ferrite.loops.dtypes import DType, b8
from ferrite.loops.index import Index
from ferrite.loops.nodes import Expr
from ferrite.lower.table import lowers
from ferrite.lower.value import (
    FROM_DTYPE,
    Tensor,
    apply,
    as_tensor,
    axes_for,
    broadcast_sizes,
    cast,
    compute_dtype,
    const,
    dtype_of,
    expand,
    is_one,
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
    function: Callable[..., Expr],
    *operands: Any,
    common: DType | None = None,
    wide_second: bool = False,
    each_step: bool = False,
) -> Tensor:
    """Arithmetic in the promoted dtype, or in `common`; halves are computed in f32 and rounded once at the end.

    Numbers and tensors of another dtype become the common one first, as in eager, even if f32 would hold more of them.
    Some of eager's kernels differ for halves: those that take a second operand that is a single number as it stands
    (`wide_second`), and those that round after every operation (`each_step`).
    """
    common = promote(*operands) if common is None else common
    if common.is_half:
        kept = 1 if wide_second and is_single(operands[1]) else None
        operands = tuple(o if position == kept else as_dtype(o, common) for position, o in enumerate(operands))
    compute = common if each_step else compute_dtype(common)
    return pointwise(function, *operands, compute=compute, result=common)


def real(function: Callable[..., Expr], *operands: Any, wide_second: bool = False, each_step: bool = False) -> Tensor:
    """As `arithmetic`, for functions over the reals: integers become f32."""
    common = to_float(promote(*operands))
    return arithmetic(function, *operands, common=common, wide_second=wide_second, each_step=each_step)


def is_single(operand: Any) -> bool:
    """A number, or a tensor of one element: what eager's kernels call a scalar."""
    return not isinstance(operand, Tensor) or all(is_one(extent) for extent in operand.sizes)


def as_dtype(operand: Any, dtype: DType) -> Tensor:
    if isinstance(operand, Tensor):
        return Tensor(operand.axes, cast(operand.body, dtype))
    return Tensor((), scalar(operand, dtype))


def representable(operand: Any, dtype: DType) -> None:
    """Refuse a parameter that does not fit an integer dtype: eager raises. In u8 negative ones wrap, down to -255.
    Operands of arithmetic and of comparisons are no parameters: whatever they are, they wrap."""
    if not dtype.is_int or not isinstance(operand, (int, float)):
        return
    high = (1 << (dtype.bits - dtype.signed)) - 1
    if not (-high - 1 if dtype.signed else -high) <= operand <= high:  # NaN is on neither side
        raise Unsupported(f"the number {operand} for {dtype}", why="eager raises")


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

# Functions over the reals that are one operation: the name of the op, and of the operation where it is another.
_PLAIN = {
    name: name
    for name in (
        "sqrt", "rsqrt", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin", "acos",
        "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "sigmoid", "erf", "erfc", "erfinv", "lgamma",
        "digamma", "i0",
    )
}  # fmt: skip
_PLAIN |= {f"special_{name}": name for name in ("i0e", "i1", "i1e")}
_NOT_OF_HALVES = {
    "special_ndtri": "ndtri",
    "special_log_ndtr": "log_ndtr",
    "special_modified_bessel_i0": "i0",
    "special_modified_bessel_i1": "i1",
}


def _enter_plain(name: str, operation: str) -> None:
    def row(x: Tensor) -> Tensor:
        if x.dtype.is_half and name in _NOT_OF_HALVES:
            raise Unsupported(f"{name} of halves", why="eager raises")
        return unary(lambda v: apply(operation, v), x)

    row.__name__ = name
    lowers(getattr(aten, name).default)(row)


for _name, _operation in (_PLAIN | _NOT_OF_HALVES).items():
    _enter_plain(_name, _operation)


@lowers(aten.reciprocal.default)
def reciprocal(x: Tensor) -> Tensor:
    return unary(lambda v: apply("div", one(v.dtype), v), x)


@lowers(aten.abs.default)
def absolute(x: Tensor) -> Tensor:
    not_bool(x.dtype, "abs")
    return arithmetic(lambda v: apply("abs", v), x)


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


def _rounding(name: str) -> Callable[[Tensor], Tensor]:
    def row(x: Tensor) -> Tensor:
        """Integers are round already; truth values raise in eager."""
        not_bool(x.dtype, name)
        return arithmetic(lambda v: apply(name, v), x) if x.dtype.is_float else x

    row.__name__ = name
    return row


for _name in ("floor", "ceil", "trunc", "round"):
    lowers(getattr(aten, _name).default)(_rounding(_name))


@lowers(aten.round.decimals)
def round_decimals(x: Tensor, *, decimals: int) -> Tensor:
    """Scaled, rounded, scaled back; what overflows on the way stays infinite or NaN, as in eager."""
    floats_only(x, "round with decimals")
    power = 10.0 ** abs(decimals) if abs(decimals) <= 308 else math.inf

    def body(v: Expr) -> Expr:
        there, back = ("mul", "div") if decimals > 0 else ("div", "mul")
        scale = const(power, v.dtype)
        return apply(back, apply("round", apply(there, v, scale)), scale)

    return arithmetic(body, x)


@lowers(aten.frac.default)
def frac(x: Tensor) -> Tensor:
    floats_only(x, "frac")
    return arithmetic(lambda v: apply("sub", v, apply("trunc", v)), x)


@lowers(aten.deg2rad.default)
def deg2rad(x: Tensor) -> Tensor:
    return unary(lambda v: apply("mul", v, const(math.pi / 180, v.dtype)), x)


@lowers(aten.rad2deg.default)
def rad2deg(x: Tensor) -> Tensor:
    return unary(lambda v: apply("mul", v, const(180 / math.pi, v.dtype)), x)


@lowers(aten.angle.default)
def angle(x: Tensor) -> Tensor:
    """0, or pi below zero; NaN stays."""

    def body(v: Expr) -> Expr:
        turned = select(apply("lt", v, zero(v.dtype)), const(math.pi, v.dtype), zero(v.dtype))
        return select(apply("isnan", v), v, turned)

    return unary(body, x)


@lowers(aten.sinc.default)
def sinc(x: Tensor) -> Tensor:
    """sin(pi x) / (pi x); 1 at both zeros."""

    def body(v: Expr) -> Expr:
        turn = apply("mul", const(math.pi, v.dtype), v)
        return select(apply("eq", v, zero(v.dtype)), one(v.dtype), apply("div", apply("sin", turn), turn))

    return unary(body, x)


@lowers(aten.logit.default)
def logit(x: Tensor, eps: float | None = None) -> Tensor:
    """log(x / (1 - x)), x first brought between eps and 1 - eps; where these cross, the lower one is asked first. NaN
    stays. Halves are rounded at every step."""

    def body(v: Expr) -> Expr:
        if eps is not None and eps >= 0:
            low, high = const(eps, v.dtype), apply("sub", one(v.dtype), const(eps, v.dtype))
            v = select(apply("lt", v, low), low, select(apply("gt", v, high), high, v))
        return apply("log", apply("div", v, apply("sub", one(v.dtype), v)))

    return real(body, x, each_step=True)


@lowers(aten.logit_backward.default)
def logit_backward(grad: Tensor, x: Tensor, eps: float | None = None) -> Tensor:
    """grad / (x (1 - x)) from 0 to 1, or from eps to 1 - eps; elsewhere and for NaN, 0 if there is an eps, NaN if not.
    Halves are rounded at every step."""
    floats_only(x, "logit_backward")

    def body(g: Expr, v: Expr) -> Expr:
        null, unit = zero(v.dtype), one(v.dtype)
        low, high, outside = null, unit, const(math.nan, v.dtype)
        if eps is not None and eps >= 0:
            low, outside = const(eps, v.dtype), null
            high = apply("sub", unit, low)
        inside = apply("and_", apply("ge", v, low), apply("le", v, high))
        return select(inside, apply("div", g, apply("mul", v, apply("sub", unit, v))), outside)

    return arithmetic(body, grad, x, each_step=True)


@lowers(aten.special_entr.default)
def entr(x: Tensor) -> Tensor:
    """-x log(x); 0 at both zeros, -inf below, NaN stays. Halves: the logarithm is rounded, too."""

    def body(v: Expr) -> Expr:
        null = zero(v.dtype)
        inner = apply("mul", apply("neg", v), apply("log", v))
        outside = select(apply("eq", v, null), null, const(-math.inf, v.dtype))
        return select(apply("isnan", v), v, select(apply("gt", v, null), inner, outside))

    return real(body, x, each_step=True)


@lowers(aten.polygamma.default)
def polygamma(order: int, x: Tensor) -> Tensor:
    """The derivatives of digamma; that of order 0 is digamma itself."""
    if order == 0:
        return unary(lambda v: apply("digamma", v), x)
    if order == 1:
        return unary(_trigamma, x)
    raise Unsupported(f"polygamma of order {order}", why="the loop IR has no zeta function")


def _trigamma(v: Expr) -> Expr:
    """As eager: reflected to the right of 1/2, moved up by six, then the asymptotic series."""
    unit = one(v.dtype)

    def inverse_square(a: Expr) -> Expr:
        return apply("div", unit, apply("mul", a, a))

    left = apply("lt", v, const(0.5, v.dtype))
    sine = apply("sin", apply("mul", const(math.pi, v.dtype), v))
    reflected = apply("div", const(-math.pi * math.pi, v.dtype), apply("mul", sine, sine))
    at = select(left, apply("sub", unit, v), v)
    total = select(left, reflected, zero(v.dtype))
    for _ in range(6):
        total = apply("add", total, inverse_square(at))
        at = apply("add", at, unit)
    square = inverse_square(at)
    series = apply("sub", const(1 / 30, v.dtype), apply("mul", square, const(1 / 42, v.dtype)))
    series = apply("sub", const(1 / 6, v.dtype), apply("mul", square, series))
    series = apply("add", apply("div", const(0.5, v.dtype), at), apply("mul", square, series))
    total = apply("add", total, apply("div", apply("add", unit, series), at))
    return select(left, apply("neg", total), total)


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


# ---- comparison and logic


def _enter_comparison(name: str) -> None:
    def row(x: Any, y: Any) -> Tensor:
        """In the promoted dtype: a number beside halves is rounded to them."""
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
        """In the promoted dtype, in which a tensor without dimensions may become zero beside a narrower one."""
        return pointwise(lambda a, b: apply(operation, truth(a), truth(b)), x, y, compute=promote(x, y))

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


def _enter_shift(name: str, operation: str, *ops: Any) -> None:
    def row(x: Any, y: Any) -> Tensor:
        common = promote(x, y)
        if not common.is_int:
            raise Unsupported(f"{name} of {common}", why="eager raises or goes through floats")
        return arithmetic(lambda a, b: apply(operation, a, b), x, y)

    row.__name__ = name
    packet = getattr(aten, name)
    lowers(packet.Tensor, packet.Tensor_Scalar, packet.Scalar_Tensor, *ops)(row)


_enter_shift("bitwise_left_shift", "shl", aten.__lshift__.Tensor, aten.__lshift__.Scalar)
_enter_shift("bitwise_right_shift", "shr", aten.__rshift__.Tensor, aten.__rshift__.Scalar)


@lowers(aten.bitwise_not.default)
def bitwise_not(x: Tensor) -> Tensor:
    if x.dtype.is_float:
        raise Unsupported("bitwise_not of floats", why="eager raises")
    return arithmetic(lambda v: apply("not_", v), x)


# ---- choosing


@lowers(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)
def where(condition: Tensor, x: Any, y: Any) -> Tensor:
    """The condition may be u8; the branches are promoted."""
    return choose(truth_of(condition), x, y)


def choose(condition: Tensor, x: Any, y: Any) -> Tensor:
    common = promote(x, y)
    representable(x, common)
    representable(y, common)
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
        representable(value, x.dtype)
        fill = scalar(value, x.dtype)
    return Tensor(axes_for(sizes), select(expand(truth_of(mask), sizes).body, fill, expand(x, sizes).body))


@lowers(aten.clamp.default, aten.clamp.Tensor)
def clamp(x: Tensor, low: Any = None, high: Any = None) -> Tensor:
    """NaN stays NaN, and a limit that is NaN makes NaN; where low > high the result is high."""
    common = promote(*(v for v in (x, low, high) if v is not None))
    not_bool(common, "clamp")
    return clamped(x, low, high, common)


def clamped(x: Tensor, low: Any, high: Any, common: DType) -> Tensor:
    representable(low, common)
    representable(high, common)
    if low is not None:
        x = arithmetic(lambda a, b: apply("maximum", a, b), x, low, common=common, each_step=True)
    if high is not None:
        x = arithmetic(lambda a, b: apply("minimum", a, b), x, high, common=common, each_step=True)
    return Tensor(x.axes, cast(x.body, common))


@lowers(aten.clamp_min.default, aten.clamp_min.Tensor)
def clamp_min(x: Tensor, low: Any) -> Tensor:
    """By a tensor, eager takes truth values as well."""
    return clamped(x, low, None, promote(x, low)) if isinstance(low, Tensor) else clamp(x, low, None)


@lowers(aten.clamp_max.default, aten.clamp_max.Tensor)
def clamp_max(x: Tensor, high: Any) -> Tensor:
    return clamped(x, None, high, promote(x, high)) if isinstance(high, Tensor) else clamp(x, None, high)


@lowers(aten.threshold.default)
def threshold(x: Tensor, limit_: Number, value: Number) -> Tensor:
    """value where x <= limit; NaN stays NaN. Neither number is rounded to halves before it is compared."""
    not_bool(x.dtype, "threshold")
    representable(limit_, x.dtype)
    representable(value, x.dtype)

    def body(v: Expr) -> Expr:
        return select(apply("le", v, scalar(limit_, v.dtype)), scalar(value, v.dtype), v)

    return arithmetic(body, x)


# ---- conversions and copies


@lowers(aten._to_copy.default)
def to_copy(x: Tensor, *, dtype: torch.dtype | None = None, **others: Any) -> Tensor:
    """Another dtype, the same values; the memory format shows in the strides, which come from the trace."""
    if others.get("layout") not in (None, torch.strided) or others.get("pin_memory"):
        raise Unsupported("a copy to another layout or to pinned memory")
    x = as_tensor(x)
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
    return Tensor(x.axes, cast(expand(as_tensor(source), x.sizes).body, x.dtype))
