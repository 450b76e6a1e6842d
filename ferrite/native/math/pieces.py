"""What the functions over the reals share: polynomials, exponents, and numbers kept as a sum of two.

How the coefficients in these files were made: Remez exchange in 42 digits for the function that the comment names, on
the interval that it names, with the relative error of the whole result as weight; the leading coefficients are rounded
to the type first and the others fitted again. "2**-58" in a comment is the largest weighted error that is left, before
the rounding errors of evaluation. What comes out, measured, is in docs/vector-math.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ferrite.loops.dtypes import f32, f64, i32
from ferrite.native.builder import Builder, Value

LN2 = 0.6931471805599453
LOG2_E = 1.4426950408889634
# ln(2) in two parts; the first has so few bits that its product with an exponent is exact. Both are positive, so that
# an infinite exponent gives an infinite sum.
LN2_PARTS = {"f32": (0.693145751953125, 1.428606765330187e-06), "f64": (0.6931471803691238, 1.9082149292705877e-10)}


def polynomial(b: Builder, x: Value, coefficients: Sequence[float]) -> Value:
    """coefficients[0] + coefficients[1] * x + ... Long ones in two interleaved halves, for the sake of latency."""
    if len(coefficients) < 8:
        return horner(b, x, coefficients)
    square = b.mul(x, x)
    odd = horner(b, square, coefficients[1::2])
    even = horner(b, square, coefficients[::2])
    return b.mad(odd, x, even)


def horner(b: Builder, x: Value, coefficients: Sequence[float]) -> Value:
    result = b.like(x, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        result = b.mad(result, x, coefficient)
    return result


def nearest_integer(b: Builder, x: Value) -> tuple[Value, Value]:
    """A small number rounded, as a float and as an integer of the same width.

    1.5 * 2**23 (for f64: 2**52) leaves no room for a fraction; what was added shows in the low bits of the sum. Right
    for |x| < 2**22 (2**51); NaN stays NaN, with some integer.
    """
    magic = 1.5 * 2.0 ** (52 if x.dtype is f64 else 23)
    shifted = b.add(x, magic)
    return b.sub(shifted, magic), b.sub(b.integer_bits(shifted), _magic_bits(x))


def nearest_multiple(b: Builder, x: Value, factor: float) -> tuple[Value, Value]:
    """The integer nearest to x * factor, as above; the product is not rounded by itself."""
    magic = 1.5 * 2.0 ** (52 if x.dtype is f64 else 23)
    shifted = b.mad(x, factor, magic)
    return b.sub(shifted, magic), b.sub(b.integer_bits(shifted), _magic_bits(x))


def _magic_bits(x: Value) -> int:
    return 0x4338000000000000 if x.dtype is f64 else 0x4B400000


def scale(b: Builder, x: Value, n: Value, integer: Value) -> Value:
    """x * 2**n for x of the order of 1 and any n within the exponents of the type and its denormals; x may be NaN.

    n comes as a float and as an integer. In two steps, of which the second one may overflow or round to a denormal.
    """
    if b.has_scalef(x):
        return b.scalef(x, n)
    part = 600 if x.dtype is f64 else 64
    small = b.lt(integer, 0)
    shift = b.select(small, b.like(integer, part), b.like(integer, -part))
    first = b.power_of_two(b.add(integer, shift), x.dtype)
    second = b.select(small, b.like(x, 2.0**-part), b.like(x, 2.0**part))
    return b.mul(b.mul(x, first), second)


def scale_moderately(b: Builder, x: Value, n: Value, integer: Value) -> Value:
    """The same where 2**n is a normal number."""
    return b.scalef(x, n) if b.has_scalef(x) else b.mul(x, b.power_of_two(integer, x.dtype))


def exponent_and_fraction(b: Builder, x: Value) -> tuple[Value, Value]:
    """x = 2**e * m with m between sqrt(1/2) and sqrt(2), for positive finite x; e is a float. Denormals too."""
    if b.has_scalef(x):
        e, m = b.getexp(x), b.getmant(x)
        upper = b.gt(m, 2.0**0.5)
        return b.select(upper, b.add(e, 1.0), e), b.select(upper, b.mul(m, 0.5), m)
    wide = x.dtype is f64
    fraction_bits = 52 if wide else 23
    middle = 0x3FE6A09E667F3BCD if wide else 0x3F3504F3  # sqrt(1/2)
    tiny = b.lt(x, 2.0**-1022 if wide else 2.0**-126)
    lifted = b.select(tiny, b.mul(x, 2.0**fraction_bits), x)
    bits = b.integer_bits(lifted)
    exponent = b.shr(b.sub(bits, middle), fraction_bits)
    fraction = b.bits(b.sub(bits, b.shl(exponent, fraction_bits)), x.dtype)
    lowered = b.sub(exponent, b.select(tiny, b.like(exponent, fraction_bits), b.like(exponent, 0)))
    return small_integer_to_float(b, lowered), fraction


def unscaled(b: Builder, x: Value, e: Value) -> Value:
    """x * 2**-e for a float e that is a whole number and not large; beyond, some number that is small beside x."""
    if b.has_scalef(x):
        return b.scalef(x, b.neg(e))
    _, integer = nearest_integer(b, b.neg(b.clamp_high(e, 1000.0 if x.dtype is f64 else 120.0)))
    return b.mul(x, b.power_of_two(integer, x.dtype))


def small_integer_to_float(b: Builder, n: Value) -> Value:
    """An integer of at most 22 (51) bits as a float of the same width. Below AVX-512 nothing converts an i64."""
    if n.dtype is i32:
        return b.convert(n, f32)
    magic = 0x4338000000000000
    return b.sub(b.bits(b.add(n, magic), f64), 1.5 * 2.0**52)


def log_corners(b: Builder, x: Value, result: Value, *, sound: bool = False) -> Value:
    """What a logarithm is where x is not a positive number: -inf at 0, NaN below, infinity and NaN themselves.

    `sound`: the result is that already if the exponent is infinite and the fraction of a negative number is NaN.
    """
    if sound and b.has_scalef(x):
        return result
    result = b.select(b.lt(x, float("inf")), result, x)
    result = b.select(b.lt(x, 0.0), float("nan"), result)
    return b.select(b.eq(x, 0.0), float("-inf"), result)


def fast_two_sum(b: Builder, large: Value, small: Value) -> tuple[Value, Value]:
    """The rounded sum and its error, if the first is not the smaller one."""
    total = b.add(large, small)
    return total, b.sub(small, b.sub(total, large))


def in_double(function: Callable[..., Value]) -> Callable[..., Value]:
    """The same function for f32 too, computed in f64 and rounded."""

    def either(b: Builder, *operands: Value) -> Value:
        if operands[0].dtype is f64:
            return function(b, *operands)
        return b.convert(function(b, *(b.convert(operand, f64) for operand in operands)), f32)

    either.__name__ = function.__name__
    either.__doc__ = function.__doc__
    return either


def by_width(x: Value, single: Sequence[float], double: Sequence[float]) -> Sequence[float]:
    return double if x.dtype is f64 else single
