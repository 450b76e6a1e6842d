"""exp and what is made of it: exp2, expm1, sigmoid and the hyperbolic functions."""

from __future__ import annotations

from collections.abc import Callable

from ferrite.loops.dtypes import f64
from ferrite.native.builder import Builder, Value
from ferrite.native.math.pieces import (
    LN2,
    LN2_PARTS,
    LOG2_E,
    by_width,
    horner,
    nearest_integer,
    nearest_multiple,
    polynomial,
    scale,
    scale_moderately,
)

# (exp(r) - 1 - r) / r**2 for |r| <= ln(2)/2: 2**-28 and 2**-57 of exp(r)
EXP_32 = (0.4999999403953552, 0.16666515171527863, 0.04166829586029053, 0.00836926233023405, 0.0013818759471178055)
EXP_64 = (
    0.5000000000000011, 0.16666666666666421, 0.04166666666652444, 0.008333333333462962, 0.0013888888945674989,
    0.00019841269618797253, 2.4801490465977187e-05, 2.755745250380986e-06, 2.76313477990887e-07,
    2.5051947325062768e-08,
)  # fmt: skip
# 2**r / 2 for |r| <= 1/2, fitted in f64: 2**-28 of 1/2
HALF_EXP2_32 = (
    0.5, 0.3465735912322998, 0.12011325359344482, 0.027751797810196877, 0.0048090312629938126, 0.0006695492193102837,
    7.731441291980445e-05,
)  # fmt: skip
# (sinh(x) / x - 1) / x**2 as a polynomial of x**2, for |x| <= 1: 2**-29 and 2**-60
SINH_32 = (0.1666666716337204, 0.008333306759595871, 0.00019844491907861084, 2.77033132078941e-06)
SINH_64 = (
    0.16666666666666669, 0.008333333333332865, 0.00019841269841631743, 2.755731909591029e-06,
    2.5052132357828527e-08, 1.6056584291835531e-10, 7.777978859005984e-13,
)  # fmt: skip

# (tanh(x) / x - 1) / x**2 as a polynomial of x**2, for |x| <= 0.55: 2**-27 and 2**-53
TANH_32 = (-0.33333319425582886, 0.13332688808441162, -0.053863275796175, 0.021108366549015045, -0.006310139782726765)
TANH_64 = (
    -0.333333333333328, 0.13333333333229763, -0.05396825390483088, 0.02186948665076242, -0.008863203443716746,
    0.0035917902416372728, -0.0014535554059168802, 0.0005801056309147196, -0.0002118187579018852,
    5.2021045795715096e-05,
)  # fmt: skip


def exp(b: Builder, x: Value) -> Value:
    low, high = (-746.0, 710.0) if x.dtype is f64 else (-105.0, 89.0)
    r, n, integer = _reduced(b, b.clamp_low(b.clamp_high(x, high), low))
    return scale(b, _exp_near_zero(b, r), n, integer)


def exp2(b: Builder, x: Value) -> Value:
    low, high = (-1080.0, 1025.0) if x.dtype is f64 else (-151.0, 129.0)
    x = b.clamp_low(b.clamp_high(x, high), low)
    n, integer = nearest_integer(b, x)
    return scale(b, _exp_near_zero(b, b.mul(b.sub(x, n), LN2)), n, integer)


def expm1(b: Builder, x: Value) -> Value:
    """2**n * (exp(r) - 1) + (2**n - 1): exact near 0, where n is 0. The sign is that of x, at zero too."""
    low, high, most = (-40.0, 710.0, 1024) if x.dtype is f64 else (-20.0, 89.0, 128)
    r, _, n = _reduced(b, b.clamp_low(b.clamp_high(x, high), low))
    near = b.mad(b.mul(r, r), polynomial(b, r, by_width(r, EXP_32, EXP_64)), r)
    # The largest power of two is no number: half of it, and the result doubled.
    top = b.eq(n, most)
    power = b.power_of_two(b.select(top, b.sub(n, 1), n), x.dtype)
    result = b.mad(power, near, b.sub(power, 1.0))
    return b.copysign(b.select(top, b.add(result, result), result), x)


def sigmoid(b: Builder, x: Value) -> Value:
    """By exp(-|x|), which cannot overflow: 1 / (1 + e) on the right, e / (1 + e) on the left."""
    e = exp(b, b.neg(b.abs(x)))
    return b.div(b.select(b.lt(x, 0.0), e, 1.0), b.add(e, 1.0))


def tanh(b: Builder, x: Value) -> Value:
    """A polynomial up to 0.55, then 1 - 2 / (exp(2 * |x|) + 1); from 9.1 (19.1) on the nearest number is 1."""
    size = b.abs(x)
    double = b.clamp_high(b.add(size, size), 38.2 if x.dtype is f64 else 18.2)
    far = b.sub(1.0, b.div(b.like(x, 2.0), b.add(exp_moderate(b, double), 1.0)))
    z = b.mul(x, x)
    near = b.mad(b.mul(polynomial(b, z, by_width(x, TANH_32, TANH_64)), z), size, size)
    return b.copysign(b.select(b.lt(size, 0.55), near, far), x)


def sinh(b: Builder, x: Value) -> Value:
    """A polynomial up to 1, then e - 1 / (4 * e) for e = exp(|x|) / 2, which overflows no sooner than the result."""
    size = b.abs(x)
    half = _half_exp(b, size)
    far = b.sub(half, b.div(b.like(x, 0.25), half))
    square = b.mul(x, x)
    near = b.mad(b.mul(polynomial(b, square, by_width(x, SINH_32, SINH_64)), square), size, size)
    return b.copysign(b.select(b.lt(size, 1.0), near, far), x)


def cosh(b: Builder, x: Value) -> Value:
    half = _half_exp(b, b.abs(x))
    return b.add(half, b.div(b.like(x, 0.25), half))


def _reduced(b: Builder, x: Value) -> tuple[Value, Value, Value]:
    """x = n * ln(2) + r with |r| a bit over ln(2)/2 at most: r, n, and n as an integer."""
    n, integer = nearest_multiple(b, x, LOG2_E)
    large, small = LN2_PARTS[x.dtype.name]
    return b.mad(n, -small, b.mad(n, -large, x)), n, integer


def _exp_near_zero(b: Builder, r: Value, *, rough: bool = False) -> Value:
    """Without the last terms of the polynomial the error is 2**-32."""
    tail = polynomial(b, r, EXP_64[:7] if rough else by_width(r, EXP_32, EXP_64))
    if b.target.has_fma:
        return b.mad(b.mad(tail, r, 1.0), r, 1.0)
    return b.add(b.mad(b.mul(r, r), tail, r), 1.0)  # the same, with smaller errors if products are rounded


def exp_moderate(b: Builder, x: Value, *, rough: bool = False) -> Value:
    """exp(x) where the result is a normal number. NaN stays NaN. `rough`: in f64, but good enough for f32 only."""
    r, n, integer = _reduced(b, x)
    return scale_moderately(b, _exp_near_zero(b, r, rough=rough), n, integer)


def exp2_moderate(b: Builder, x: Value, *, rough: bool = False) -> Value:
    n, integer = nearest_integer(b, x)
    return scale_moderately(b, _exp_near_zero(b, b.mul(b.sub(x, n), LN2), rough=rough), n, integer)


def half_exp2(b: Builder, x: Value) -> Value:
    """2**x / 2 for f32 and x <= 0: 1/2 at 0 exactly, and 0 at -inf. NaN stays NaN."""
    if b.target.has_avx512:
        return _half_exp2(b, b.clamp_low(x, -151.0), scale)  # what is no vector gives the same denormals
    # The bits of 2**-127 would be those of 0, so the result is 0 from there on.
    return _half_exp2(b, b.clamp_low(x, -127.0), scale_moderately)


def _half_exp2(b: Builder, x: Value, scaled: Callable[[Builder, Value, Value, Value], Value]) -> Value:
    n, integer = nearest_integer(b, x)
    return scaled(b, horner(b, b.sub(x, n), HALF_EXP2_32), n, integer)


def exp_of_sum(b: Builder, high: Value, low: Value, factor: Value | None = None, rest: Value | None = None) -> Value:
    """exp(high + low) * (factor + rest), where low and rest are what rounding took from the others, for f64.

    The product is rounded before it is scaled, so that a result below the normal numbers is rounded only once more.
    """
    r, n, integer = _reduced(b, b.clamp_low(b.clamp_high(high, 710.0), -746.0))
    if factor is None or rest is None:
        return scale(b, _exp_near_zero(b, b.add(r, low)), n, integer)
    r = b.add(r, low)
    beyond_one = b.mad(b.mul(r, r), polynomial(b, r, EXP_64), r)
    return scale(b, b.add(factor, b.mad(factor, beyond_one, rest)), n, integer)


def _half_exp(b: Builder, size: Value) -> Value:
    """exp(x) / 2 for x >= 0."""
    r, n, integer = _reduced(b, b.clamp_high(size, 712.0 if size.dtype is f64 else 91.0))
    return scale(b, _exp_near_zero(b, r), b.sub(n, 1.0), b.sub(integer, 1))
