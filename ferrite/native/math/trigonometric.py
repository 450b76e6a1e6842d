"""sin, cos, tan and their inverses.

Note [Large angles]
    x is reduced to r = x - n * pi/2, |r| <= pi/4, with pi/2 as a sum of parts whose products with n are exact or fused.
    That is right as long as n is, up to 2**17 for f32 and 2**40 (without fma: 2**20) for f64. Larger angles, which
    hardly ever occur, are left to C's library, lane by lane.
"""

from __future__ import annotations

from ferrite.loops.dtypes import f32, f64
from ferrite.native.builder import Builder, Value, u32, u64
from ferrite.native.math.pieces import by_width, fast_two_sum, horner, in_double, nearest_multiple, polynomial

TWO_OVER_PI = 0.6366197723675814
HALF_PI_FUSED = {
    "f32": (1.5707963705062866, -4.371138828673793e-08, -1.7151245100058819e-15),
    "f64": (1.5707963267948966, 6.123233995736766e-17, -1.4973849048591833e-33),
}
# 33 bits each, so that products with n < 2**20 are exact
HALF_PI_EXACT = (1.5707963267341256, 6.077100506303966e-11, 2.0222662487111665e-21, 8.4784276603689e-32)

# (sin(r) / r - 1) / r**2 and (cos(r) - 1 + r**2 / 2) / r**4 as polynomials of r**2, for |r| <= 1.015 (1.001) * pi/4:
# 2**-26 and 2**-30, 2**-56 and 2**-61
SIN_32 = (-0.16666653752326965, 0.008332171477377415, -0.00019516302563715726)
COS_32 = (0.041666653007268906, -0.001388769131153822, 2.447267615934834e-05)
SIN_64 = (
    -0.1666666666666664, 0.00833333333332489, -0.0001984126983197125, 2.755731445805135e-06, -2.5050875378642157e-08,
    1.5903268171193808e-10,
)  # fmt: skip
COS_64 = (
    0.04166666666666665, -0.0013888888888883612, 2.4801587295773965e-05, -2.755731624398851e-07, 2.0875985977491056e-09,
    -1.1373343604607158e-11,
)  # fmt: skip
# (atan(t) / t - 1) / t**2 as a polynomial of t**2, for t <= tan(pi/8): 2**-28 and 2**-57
ATAN_32 = (-0.33333319425582886, 0.19998815655708313, -0.14250385761260986, 0.10642023384571075, -0.06189189851284027)
ATAN_64 = (
    -0.33333333333333265, 0.19999999999971918, -0.14285714282056242, 0.11111110878723159, -0.09090900554097596,
    0.07692110489250992, -0.06663675496243116, 0.05852007379601668, -0.05057533916436858, 0.03851656057601974,
    -0.018387686814070145,
)  # fmt: skip
# (asin(x) / x - 1) / x**2 as a polynomial of x**2, for x <= 1/2: 2**-25 and 2**-58
ASIN_32 = (0.16666731238365173, 0.07496426999568939, 0.04532259330153465, 0.02485196851193905, 0.04117783531546593)
ASIN_64 = (
    0.16666666666666702, 0.07499999999986234, 0.04464285715979869, 0.030381943434817323, 0.022372193970746468,
    0.017351998050205576, 0.013976115708022504, 0.011437804627138587, 0.010561309183895355, 0.004532680719410845,
    0.019707941217512, -0.018195704876046364, 0.030897493638098416,
)  # fmt: skip

TAN_PI_8, TAN_3_PI_8 = 0.41421356237309503, 2.414213562373095
# pi/4 and what is left of it
QUARTER_PI = {"f32": (0.7853981852531433, -2.1855694143368964e-08), "f64": (0.7853981633974483, 3.061616997868383e-17)}


def sin(b: Builder, x: Value) -> Value:
    """The sign is that of x, at zero too, so the work is done on |x|."""
    size = b.abs(x)
    r, quadrant = _reduced(b, size)
    s, c = _sin_and_cos(b, r)
    result = b.select(b.ne(b.and_(quadrant, 1), 0), c, s)
    return _with_library(b, "sin", x, _flipped(b, result, b.xor(_sign(b, x), _sign_of_bit(b, quadrant, 1))))


def cos(b: Builder, x: Value) -> Value:
    r, quadrant = _reduced(b, b.abs(x))
    s, c = _sin_and_cos(b, r)
    result = b.select(b.ne(b.and_(quadrant, 1), 0), s, c)
    return _with_library(b, "cos", x, _flipped(b, result, _sign_of_bit(b, b.add(quadrant, 1), 1)))


@in_double
def tan(b: Builder, x: Value) -> Value:
    """sin / cos of the reduced angle, all three as sums of two: a quotient of rounded ones would be off by 2.5 ulp."""
    size = b.abs(x)
    r, lost, quadrant = _reduced_precisely(b, size)
    z = b.mul(r, r)
    s, s_low = fast_two_sum(b, r, b.mul(b.mul(horner(b, z, SIN_64), z), r))
    half = b.mul(z, 0.5)
    first, first_low = fast_two_sum(b, b.like(x, 1.0), b.neg(half))
    c, c_low = fast_two_sum(b, first, b.mad(b.mul(z, z), horner(b, z, COS_64), first_low))
    s_low, c_low = b.mad(c, lost, s_low), b.mad(b.neg(s), lost, c_low)
    odd = b.ne(b.and_(quadrant, 1), 0)
    upper, upper_low = b.select(odd, b.neg(c), s), b.select(odd, b.neg(c_low), s_low)
    lower, lower_low = b.select(odd, s, c), b.select(odd, s_low, c_low)
    inverse = b.div(b.like(x, 1.0), lower)
    t = b.mul(upper, inverse)
    product, error = b.two_product(t, lower)
    rest = b.sub(b.add(b.sub(b.sub(upper, product), error), upper_low), b.mul(t, lower_low))
    return _with_library(b, "tan", x, _flipped(b, b.mad(rest, inverse, t), _sign(b, x)))


def atan(b: Builder, x: Value) -> Value:
    """atan(t) = k * pi/4 + atan(...): t up to tan(pi/8), (t - 1) / (t + 1) up to tan(3 pi/8), then -1/t."""
    size = b.abs(x)
    middle, far = b.gt(size, TAN_PI_8), b.gt(size, TAN_3_PI_8)
    numerator = b.select(far, -1.0, b.select(middle, b.sub(size, 1.0), size))
    denominator = b.select(far, size, b.select(middle, b.add(size, 1.0), 1.0))
    quarters = b.select(far, 2.0, b.select(middle, b.like(x, 1.0), b.like(x, 0.0)))
    return b.copysign(_turned(b, quarters, b.div(numerator, denominator)), x)


def atan2(b: Builder, y: Value, x: Value) -> Value:
    """The angle of the smaller side over the larger one, put into its octant. One division."""
    y, x = b.match(y, x)
    height, width = b.abs(y), b.abs(x)
    steep = b.gt(height, width)
    short, long = b.select(steep, width, height), b.select(steep, height, width)
    # inf / inf counts as 1, 0 / 0 as 0
    both = b.and_(b.eq(short, float("inf")), b.eq(long, float("inf")))
    short, long = b.select(both, 1.0, short), b.select(both, 1.0, long)
    long = b.select(b.eq(long, 0.0), 1.0, long)
    middle = b.gt(short, b.mul(long, TAN_PI_8))
    factor = b.select(b.gt(long, 1.0), b.like(x, 0.5), b.like(x, 1.0))  # so that the sum does not overflow
    half_short, half_long = b.mul(short, factor), b.mul(long, factor)
    numerator = b.select(middle, b.sub(half_short, half_long), short)
    denominator = b.select(middle, b.add(half_short, half_long), long)
    left = b.signbit(x)
    quarters = b.select(middle, b.like(x, 1.0), b.like(x, 0.0))
    quarters = b.select(steep, b.sub(2.0, quarters), quarters)
    quarters = b.select(left, b.sub(4.0, quarters), quarters)
    numerator = b.select(b.xor(steep, left), b.neg(numerator), numerator)
    return b.copysign(_turned(b, quarters, b.div(numerator, denominator)), y)


def asin(b: Builder, x: Value) -> Value:
    """Beyond 1/2 by the angle that is left: pi/2 - 2 * asin(sqrt((1 - |x|) / 2)). NaN beyond 1, because of the root."""
    size = b.abs(x)
    far, side, rest = _asin_parts(b, size)
    beyond = _rest_of_angle(b, 2.0, b.mul(side, -2.0), b.mul(rest, -2.0))
    return b.copysign(b.select(far, beyond, b.add(side, rest)), x)


def acos(b: Builder, x: Value) -> Value:
    """Near 0: pi/2 - asin(x). Else 2 * asin(sqrt((1 - |x|) / 2)), on the left taken from pi."""
    far, side, rest = _asin_parts(b, b.abs(x))
    left = b.lt(x, 0.0)
    sign = b.select(left, b.like(x, 1.0), b.like(x, -1.0))
    near = _rest_of_angle(b, 2.0, b.mul(side, sign), b.mul(rest, sign))
    right = b.mul(b.add(side, rest), 2.0)
    beyond = b.select(left, _rest_of_angle(b, 4.0, b.mul(side, -2.0), b.mul(rest, -2.0)), right)
    return b.select(far, beyond, near)


# ---- parts


def _reduced(b: Builder, size: Value) -> tuple[Value, Value]:
    """r and n of Note [Large angles], for |x|; n as an integer."""
    if b.target.has_fma:
        n, integer = nearest_multiple(b, size, TWO_OVER_PI)
        r = size
        for part in HALF_PI_FUSED[size.dtype.name]:
            r = b.mad(n, -part, r)
        return r, b.bits(integer, u64 if size.dtype is f64 else u32)
    if size.dtype is f32:
        wide = b.convert(size, f64)
        n, integer = nearest_multiple(b, wide, TWO_OVER_PI)
        r = b.sub(b.sub(wide, b.mul(n, HALF_PI_EXACT[0])), b.mul(n, 6.077100506506192e-11))
        return b.convert(r, f32), b.convert(integer, u32)
    r, lost, quadrant = _reduced_precisely(b, size)
    return b.add(r, lost), quadrant


def _reduced_precisely(b: Builder, size: Value) -> tuple[Value, Value, Value]:
    """r as a sum of two, and n, for f64."""
    n, integer = nearest_multiple(b, size, TWO_OVER_PI)
    if b.target.has_fma:
        first, second, third = HALF_PI_FUSED["f64"]
        start = b.mad(n, -first, size)
        r = b.mad(n, -second, start)
        lost = b.mad(n, -third, b.mad(n, -second, b.sub(start, r)))
    else:
        first, second, third, fourth = HALF_PI_EXACT
        start = b.sub(size, b.mul(n, first))
        product = b.mul(n, second)
        middle = b.sub(start, product)
        lost = b.sub(b.sub(start, middle), product)
        r = b.sub(middle, b.mul(n, third))
        lost = b.add(lost, b.sub(b.sub(b.sub(middle, r), b.mul(n, third)), b.mul(n, fourth)))
    return r, lost, b.bits(integer, u64)


def _sin_and_cos(b: Builder, r: Value) -> tuple[Value, Value]:
    z = b.mul(r, r)
    s = b.mad(b.mul(horner(b, z, by_width(r, SIN_32, SIN_64)), z), r, r)
    tail = b.mul(b.mul(z, z), horner(b, z, by_width(r, COS_32, COS_64)))
    half = b.mul(z, 0.5)
    first = b.sub(1.0, half)
    return s, b.add(first, b.add(b.sub(b.sub(1.0, first), half), tail))


def _with_library(b: Builder, name: str, x: Value, result: Value) -> Value:
    """Large angles, and infinite ones, by C's library."""
    limit = 2.0**17 if x.dtype is f32 else 2.0**40 if b.target.has_fma else 2.0**20
    hard = b.ge(b.abs(x), limit)
    with b.if_(b.any(hard), (result,), unlikely=True) as branch:
        branch.give(b.call_lanes(b.c_function(name, x.dtype), (x,), mask=hard, otherwise=result))
    return branch.results[0]


def _sign(b: Builder, x: Value) -> Value:
    """The sign bit alone."""
    return b.and_(b.integer_bits(x, signed=False), 1 << (x.dtype.bits - 1))


def _sign_of_bit(b: Builder, n: Value, bit: int) -> Value:
    """One bit of an integer, moved to where the sign is."""
    return b.and_(b.shl(n, n.dtype.bits - 1 - bit), 1 << (n.dtype.bits - 1))


def _flipped(b: Builder, x: Value, sign: Value) -> Value:
    return b.bits(b.xor(b.integer_bits(x, signed=False), sign), x.dtype)


def _asin_parts(b: Builder, size: Value) -> tuple[Value, Value, Value]:
    """Whether |x| is beyond 1/2; the sine of the angle that is then computed; and by how much the angle is larger."""
    far = b.gt(size, 0.5)
    z = b.select(far, b.mul(b.sub(1.0, size), 0.5), b.mul(size, size))
    side = b.select(far, b.sqrt(z), size)
    return far, side, b.mul(b.mul(polynomial(b, z, by_width(size, ASIN_32, ASIN_64)), z), side)


def _rest_of_angle(b: Builder, quarters: float, large: Value, small: Value) -> Value:
    """quarters * pi/4 + large + small, where the first sum is nearly exact."""
    first, second = QUARTER_PI[large.dtype.name]
    return b.add(b.add(large, quarters * first), b.add(small, quarters * second))


def _turned(b: Builder, quarters: Value, t: Value) -> Value:
    """quarters * pi/4 + atan(t), for |t| <= tan(pi/8)."""
    large, small = QUARTER_PI[t.dtype.name]
    z = b.mul(t, t)
    rest = b.mul(b.mul(polynomial(b, z, by_width(t, ATAN_32, ATAN_64)), z), t)
    return b.add(b.mad(quarters, large, t), b.mad(quarters, small, rest))
