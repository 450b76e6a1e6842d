"""log and what is made of it: log2, log10, log1p, the inverse hyperbolic functions, powers."""

from __future__ import annotations

from ferrite.loops.dtypes import f32, f64
from ferrite.native.builder import Builder, Value
from ferrite.native.math.exponential import exp2_moderate, exp_of_sum
from ferrite.native.math.pieces import (
    LN2,
    LN2_PARTS,
    exponent_and_fraction,
    fast_two_sum,
    in_double,
    log_corners,
    polynomial,
    unscaled,
)

# (log(1 + f) - f + f**2 / 2) / f**3 for 1 + f between sqrt(1/2) and sqrt(2): 2**-27 of log(1 + f)
LOG_32 = (
    0.3333333134651184, -0.2500082552433014, 0.20001265406608582, -0.16623228788375854, 0.14200757443904877,
    -0.13160380721092224, 0.12768705189228058, -0.07642906159162521,
)  # fmt: skip
# (log((1 + s) / (1 - s)) / s - 2) / s**2 as a polynomial of s**2, for the same range of (1 + s) / (1 - s): 2**-58
LOG_64 = (
    0.6666666666666711, 0.3999999999958544, 0.28571428700357565, 0.22222203164886561, 0.1818331919320311,
    0.15320327497724426, 0.147342220061756,
)  # fmt: skip
LOG2_E_32 = (1.4426950216293335, 1.925963033500011e-08)
LOG10_E_32 = (0.4342944920063019, -1.0103049952192578e-08)
LOG10_2_32 = (0.301025390625, 4.605039066518657e-06)  # the first has 12 bits
LOG2_E_64 = (1.4426950407214463, 1.6751713164886512e-10)  # the first has 32 bits
LOG10_E_64 = (0.4342944818781689, 2.5082946711645275e-11)
LOG10_2_64 = (0.30102999566361177, 3.694239077158931e-13)


def log(b: Builder, x: Value) -> Value:
    e, m = exponent_and_fraction(b, x)
    return log_corners(b, x, _log_of(b, e, b.sub(m, 1.0)), sound=True)


def log2(b: Builder, x: Value) -> Value:
    e, m = exponent_and_fraction(b, x)
    f = b.sub(m, 1.0)
    if x.dtype is f32:
        # Of log(1 + f) = f + rest the first part is exact; its product with 1 / ln(2) gets both parts of that.
        rest = b.mul(_rest_32(b, f, b.mul(f, f)), LOG2_E_32[0])
        result = b.add(e, b.mad(f, LOG2_E_32[0], b.mad(f, LOG2_E_32[1], rest)))
    else:
        high, low = _product_64(b, f, LOG2_E_64)
        total, error = fast_two_sum(b, e, high)
        result = b.add(total, b.add(error, low))
    return log_corners(b, x, result, sound=x.dtype is f32)


def log10(b: Builder, x: Value) -> Value:
    e, m = exponent_and_fraction(b, x)
    f = b.sub(m, 1.0)
    if x.dtype is f32:
        rest = b.mul(_rest_32(b, f, b.mul(f, f)), LOG10_E_32[0])
        rest = b.mad(e, LOG10_2_32[1], b.mad(f, LOG10_E_32[1], rest))
        result = b.mad(e, LOG10_2_32[0], b.mad(f, LOG10_E_32[0], rest))
    else:
        high, low = _product_64(b, f, LOG10_E_64)
        total, error = fast_two_sum(b, b.mul(e, LOG10_2_64[0]), high)
        result = b.add(total, b.add(error, b.mad(e, LOG10_2_64[1], low)))
    return log_corners(b, x, result, sound=x.dtype is f32)


def log1p(b: Builder, x: Value) -> Value:
    """log(u + c), where u is the rounded 1 + x and c what rounding took; c moves into the fraction. Sign of x."""
    return b.copysign(_log_of_sum(b, *b.two_sum(b.like(x, 1.0), x)), x)


@in_double
def asinh(b: Builder, x: Value) -> Value:
    """log1p(|x| + x**2 / (1 + sqrt(1 + x**2))); from 2**60 on log(2 * |x|)."""
    size = b.abs(x)
    large = b.gt(size, 2.0**60)
    safe = b.select(large, 1.0, size)
    square = b.mul(safe, safe)
    step = b.div(square, b.add(b.sqrt(b.add(square, 1.0)), 1.0))
    result = log1p(b, b.select(large, size, b.add(safe, step)))
    return b.copysign(b.add(result, b.select(large, b.like(x, LN2), b.like(x, 0.0))), x)


@in_double
def acosh(b: Builder, x: Value) -> Value:
    """log1p(t + sqrt(2 * t + t**2)) for t = x - 1; from 2**60 on log(2 * x); NaN below 1."""
    large = b.gt(x, 2.0**60)
    t = b.sub(b.select(large, 1.0, x), 1.0)
    root = b.sqrt(b.mad(t, t, b.add(t, t)))
    result = log1p(b, b.select(large, x, b.add(t, root)))
    result = b.add(result, b.select(large, b.like(x, LN2), b.like(x, 0.0)))
    return b.select(b.lt(x, 1.0), float("nan"), result)


@in_double
def atanh(b: Builder, x: Value) -> Value:
    """log1p(2 * |x| / (1 - |x|)) / 2: infinite at 1, NaN beyond, because the logarithm is."""
    size = b.abs(x)
    ratio = b.div(b.add(size, size), b.sub(1.0, size))
    return b.copysign(b.mul(log1p(b, ratio), 0.5), x)


def pow(b: Builder, x: Value, y: Value) -> Value:
    """C's pow for floats. Integers wrap; a negative exponent gives 0, unless the base is 1 or -1."""
    if not x.dtype.is_float:
        return _integer_pow(b, x, y)
    if x.dtype is f32:
        wide = (b.convert(operand, f64) for operand in b.match(x, y))
        return b.convert(_pow(b, *wide, precise=False), f32)
    return _pow(b, *b.match(x, y), precise=True)


# ---- parts of logarithms


def _log_of(b: Builder, e: Value, f: Value) -> Value:
    """e * ln(2) + log(1 + f)."""
    large, small = LN2_PARTS[f.dtype.name]
    square = b.mul(f, f)
    if f.dtype is f32:
        rest = b.mad(e, small, _rest_32(b, f, square))
        return b.mad(e, large, b.add(f, rest))
    half = b.mul(square, 0.5)
    s = b.div(f, b.add(f, 2.0))
    rest = b.mad(e, small, b.mul(s, b.add(half, _series_64(b, b.mul(s, s)))))
    return b.sub(b.mul(e, large), b.sub(b.sub(half, rest), f))


def _rest_32(b: Builder, f: Value, square: Value) -> Value:
    """log(1 + f) - f."""
    return b.mad(b.mul(square, f), polynomial(b, f, LOG_32), b.mul(square, -0.5))


def _series_64(b: Builder, z: Value) -> Value:
    """log((1 + s) / (1 - s)) / s - 2 for z = s * s."""
    return b.mul(z, polynomial(b, z, LOG_64))


def _product_64(b: Builder, f: Value, factor: tuple[float, float]) -> tuple[Value, Value]:
    """log(1 + f) * factor as a sum of two. The upper part of log(1 + f) has so few bits that products are exact."""
    half = b.mul(b.mul(f, f), 0.5)
    s = b.div(f, b.add(f, 2.0))
    rest = b.mul(s, b.add(half, _series_64(b, b.mul(s, s))))
    high = b.bits(b.and_(b.integer_bits(b.sub(f, half)), -(1 << 32)), f64)
    low = b.add(b.sub(b.sub(f, high), half), rest)
    upper = b.mul(high, factor[0])
    return upper, b.mad(b.add(high, low), factor[1], b.mul(low, factor[0]))


def _log_of_sum(b: Builder, u: Value, c: Value) -> Value:
    """log(u + c), where c is small beside u."""
    e, m = exponent_and_fraction(b, u)
    return log_corners(b, u, _log_of(b, e, b.add(b.sub(m, 1.0), unscaled(b, c, e))))


# ---- powers


def _pow(b: Builder, x: Value, y: Value, *, precise: bool) -> Value:
    size = b.abs(x)
    power = _power_precise(b, size, y) if precise else _power_single(b, size, y)
    zero, nothing = b.eq(size, 0.0), b.eq(size, float("inf"))
    rises = b.eq(zero, b.lt(y, 0.0))  # 0 to a negative power, or infinity to a positive one
    edge = b.select(rises, b.like(x, float("inf")), b.like(x, 0.0))
    power = b.select(b.or_(zero, nothing), edge, power)
    # A base below zero has powers for whole exponents only; the odd ones keep the sign.
    whole = b.eq(b.trunc(y), y)
    half = b.mul(y, 0.5)
    odd = b.and_(whole, b.ne(b.trunc(half), half))
    power = b.select(b.and_(odd, b.signbit(x)), b.neg(power), power)
    real = b.or_(whole, b.or_(b.ge(x, 0.0), b.eq(x, float("-inf"))))
    power = b.select(b.or_(real, zero), power, float("nan"))
    power = b.select(b.or_(b.isnan(x), b.isnan(y)), float("nan"), power)
    one = b.or_(b.eq(y, 0.0), b.or_(b.eq(x, 1.0), b.and_(b.eq(size, 1.0), b.isinf(y))))
    return b.select(one, 1.0, power)


def _power_single(b: Builder, size: Value, y: Value) -> Value:
    """2**(y * log2(x)) in f64, good to 2**-30: for operands and a result in f32."""
    e, m = exponent_and_fraction(b, size)
    s = b.div(b.sub(m, 1.0), b.add(m, 1.0))
    z = b.mul(s, s)
    # 2 * atanh(s) / ln(2) = s * (2/ln(2) + ...): the first terms of the series suffice for s**2 < 0.03
    logarithm = b.mad(s, polynomial(b, z, [2 / LN2 / k for k in (1, 3, 5, 7, 9, 11, 13)]), e)
    exponent = b.clamp_low(b.clamp_high(b.mul(logarithm, y), 200.0), -200.0)
    return exp2_moderate(b, exponent, rough=True)


def _power_precise(b: Builder, size: Value, y: Value) -> Value:
    """exp(y * log(x)) with the logarithm as a sum of two numbers, good to 2**-66 of it."""
    e, m = exponent_and_fraction(b, size)
    # s = (m - 1) / (m + 1), with the error of the division
    numerator, (denominator, rest) = b.sub(m, 1.0), fast_two_sum(b, b.like(m, 1.0), m)
    s = b.div(numerator, denominator)
    product, error = b.two_product(s, denominator)
    s_low = b.div(b.sub(b.sub(b.sub(numerator, product), error), b.mul(s, rest)), denominator)
    # z = s**2 = (z + z_low); log(m) = 2 * s + s * z * (2/3 + z * (2/5 + ...)), of which 2/3 needs two numbers too
    z, z_low = b.two_product(s, s)
    z_low = b.mad(b.add(s, s), s_low, z_low)
    series = polynomial(b, z, [2.0 / k for k in (5, 7, 9, 11, 13, 15, 17, 19, 21)])
    third, third_low = b.two_product(z, 2.0 / 3.0)
    third_low = b.add(third_low, b.mad(z_low, 2.0 / 3.0, b.mul(z, 3.700743415417188e-17)))
    tail, tail_low = fast_two_sum(b, third, b.mul(b.mul(z, z), series))
    tail_low = b.add(tail_low, third_low)
    cube, cube_low = b.two_product(s, tail)
    cube_low = b.mad(s_low, tail, b.mad(s, tail_low, cube_low))
    fraction, fraction_low = fast_two_sum(b, b.add(s, s), cube)
    fraction_low = b.add(fraction_low, b.add(b.add(s_low, s_low), cube_low))
    # plus e * ln(2): the product with the first part is exact, and not smaller than the rest unless e is 0
    logarithm, logarithm_low = fast_two_sum(b, b.mul(e, LN2_PARTS["f64"][0]), fraction)
    logarithm_low = b.add(logarithm_low, b.mad(e, LN2_PARTS["f64"][1], fraction_low))
    logarithm, logarithm_low = fast_two_sum(b, logarithm, logarithm_low)
    high, low = b.two_product(y, logarithm)
    low = b.mad(y, logarithm_low, low)
    # Beyond these the result is 0 or infinite, and the second part may be NaN.
    inside = b.lt(b.abs(high), 800.0)
    return exp_of_sum(b, high, b.select(inside, low, 0.0))


def _integer_pow(b: Builder, base: Value, exponent: Value) -> Value:
    """By squaring, while any lane has bits left."""
    base, exponent = b.match(base, exponent)
    ways = max(base.ways, exponent.ways)
    base, exponent = b.with_ways(base, ways), b.with_ways(exponent, ways)
    one = b.with_ways(b.like(base, 1), ways)
    with b.repeat((one, base, b.abs(exponent))) as loop:
        result, power, left = loop.carried
        result = b.select(b.ne(b.and_(left, 1), 0), b.mul(result, power), result)
        left = b.shr_logical(left, 1)
        loop.again(b.any(b.ne(left, 0)), result, b.mul(power, power), left)
    result = loop.results[0]
    if not base.dtype.signed:
        return result
    unit = b.eq(b.abs(base), 1)
    return b.select(b.or_(b.ge(exponent, 0), unit), result, 0)
