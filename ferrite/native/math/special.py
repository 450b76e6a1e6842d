"""The error function and its kin, the normal distribution and its quantiles, gamma functions, Bessel functions.

f32 of all but erf and ndtr is computed in f64 and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ferrite.loops.dtypes import f32, f64
from ferrite.native.builder import Builder, Value
from ferrite.native.math.exponential import exp, exp_moderate, exp_of_sum, half_exp2
from ferrite.native.math.logarithm import log, log1p
from ferrite.native.math.pieces import by_width, horner, in_double, polynomial
from ferrite.native.math.trigonometric import tan

# erf(x) / x - 1 as a polynomial of x**2, for |x| <= 0.95 (1): 2**-25 and 2**-54
ERF_NEAR_32 = (
    0.12837913632392883, -0.3761240839958191, 0.11280950158834457, -0.026736227795481682, 0.004950107075273991,
    -0.0005778993363492191,
)  # fmt: skip
ERF_NEAR_64 = (
    0.1283791670955126, -0.376126389031841, 0.11283791670971278, -0.026866170648080428, 0.005223977653312419,
    -0.0008548328579013392, 0.00012055388030339913, -1.4926931520436556e-05, 1.6481951492608068e-06,
    -1.6567491671887156e-07, 1.60886504377352e-08, -1.677724122996358e-09, 1.490580338166133e-10,
)  # fmt: skip
# log(erfc(x)) for 0.9 <= x <= 4, weighted by erfc(x) / erf(x): 2**-29
LOG_ERFC_32 = (
    -0.00016654135833960027, -1.1277967691421509, -0.6369770765304565, -0.10411258786916733, 0.022314557805657387,
    -0.003065287135541439, 0.00019819432054646313,
)  # fmt: skip
# exp(x**2) * erfc(x) * (1 + 2 * x) as a polynomial of (x - 4) / (x + 4), for x >= 1/2: 2**-52, and 2**-33 for f32
ERFCX_64 = (
    1.2329951186255526, -0.13962111684055564, 0.015379652102603681, 0.06809705425392348, -0.10103906603524089,
    0.09373283502373317, -0.06633036584141062, 0.037167515154163756, -0.016197733636239296, 0.005031973147542116,
    -0.0007577768576264469, -0.0001992723225550157, 0.00015064042171971103, -2.435173013194208e-05,
    -1.128471151488047e-05, 5.622009019925447e-06, 4.271537871916562e-07, -7.354530582771484e-07,
    -9.987541860348591e-08, 7.622866231089084e-08, 1.1006223154221496e-07, -3.155275438037104e-08,
    -3.8393994882400475e-08, 1.616307425523136e-08,
)  # fmt: skip
ERFCX_32 = (
    1.232995118588723, -0.13962111923854525, 0.015379657303835871, 0.06809715485439638, -0.10103920234272581,
    0.09373163963085773, -0.0663289309358675, 0.0371735097478789, -0.016205107861191746, 0.005017943394464776,
    -0.0007382552787163406, -0.00018567096448907054, 0.00012506002077349208, -2.4700636677421386e-05,
    2.070953542888739e-06,
)  # fmt: skip

# log2(2 * ndtr(-x)) / x for 0 <= x <= 7, fitted in f64, weighted by x * ndtr(-x) so that the error of ndtr(x) counts:
# 2**-26 beside 1. The last one is negative: beyond 7 the polynomial falls faster than the tail, to -inf.
LOG2_NDTR_32 = (
    -1.1511051654815674, -0.45920851826667786, -0.05249525234103203, 0.007062140852212906, -0.0001359966117888689,
    -0.00018655437452252954, 3.945355274481699e-05, -2.841031118805404e-06,
)  # fmt: skip

# Rational approximations of the normal quantile by M. J. Wichura, algorithm AS 241 (1988), good to 1e-16: the middle in
# 0.180625 - q**2 for the distance q from 1/2; the tails in sqrt(-log(tail)) - 1.6, and from 5 on - 5.
QUANTILE_MIDDLE = (
    (3.3871328727963665, 133.14166789178438, 1971.5909503065513, 13731.69376550946, 45921.95393154987, 67265.7709270087,
     33430.57558358813, 2509.0809287301227),
    (1.0, 42.31333070160091, 687.1870074920579, 5394.196021424751, 21213.794301586597, 39307.89580009271,
     28729.085735721943, 5226.495278852854),
)  # fmt: skip
QUANTILE_TAIL = (
    (1.4234371107496835, 4.630337846156546, 5.769497221460691, 3.6478483247632045, 1.2704582524523684,
     0.2417807251774506, 0.022723844989269184, 0.0007745450142783414),
    (1.0, 2.053191626637759, 1.6763848301838038, 0.6897673349851, 0.14810397642748008, 0.015198666563616457,
     0.0005475938084995345, 1.0507500716444169e-09),
)  # fmt: skip
QUANTILE_FAR_TAIL = (
    (6.657904643501103, 5.463784911164114, 1.7848265399172913, 0.29656057182850487, 0.026532189526576124,
     0.0012426609473880784, 2.7115555687434876e-05, 2.0103343992922881e-07),
    (1.0, 0.599832206555888, 0.1369298809227358, 0.014875361290850615, 0.0007868691311456133, 1.8463183175100548e-05,
     1.421511758316446e-07, 2.0442631033899397e-15),
)  # fmt: skip

# I0(x) and I1(x) / (x/2) as power series of x**2 / 4, which only add: as many terms as count in f64 up to x = 8
I0_SERIES = [1 / math.factorial(k) ** 2 for k in range(23)]
I1_SERIES = [1 / (math.factorial(k) * math.factorial(k + 1)) for k in range(23)]
# exp(-x) * sqrt(x) * I(x) from x = 8 on as Chebyshev series of 16/x - 1: interpolated in 36 nodes with 34 digits
I0_FAR = (
    0.4022452055070544, 0.0033691164782556943, 6.889758346916825e-05, 2.8913705208347567e-06,
    2.0489185894690638e-07, 2.266668990498178e-08, 3.3962320257083865e-09, 4.94060238822497e-10,
    1.1889147107846439e-11, -3.1499165279632416e-11, -1.3215811840447713e-11, -1.7941785315068062e-12,
    7.180124451383666e-13, 3.8527783827421426e-13, 1.540086217521415e-14, -4.150569347287224e-14,
    -9.554846698828476e-15, 3.811680669352971e-15, 1.7725601330566224e-15, -3.425485619692254e-16,
    -2.8276239804969706e-16, 3.4612228679909e-17, 4.4656214190710166e-17, -4.830504479509467e-18,
    -7.233180447476745e-18,
)  # fmt: skip
I1_FAR = (
    0.38928811750914005, -0.009761097491361469, -0.00011058893876262371, -3.882564808877691e-06,
    -2.512236237870209e-07, -2.6314688468895196e-08, -3.835380385964237e-09, -5.589743462196584e-10,
    -1.8974958123505413e-11, 3.2526035830154884e-11, 1.4125807436613782e-11, 2.0356285441470896e-12,
    -7.198551776245908e-13, -4.083551111092197e-13, -2.1015418427726697e-14, 4.2724400167119536e-14,
    1.0420276984128972e-14, -3.814403072437366e-15, -1.8803547755108634e-15, 3.3082023109361146e-16,
    2.962628997625507e-16, -3.209525922280163e-17, -4.650305367239895e-17, 4.414348316004607e-18,
    7.517296270388092e-18,
)  # fmt: skip

# B(2k) / 2k of the asymptotic series of digamma
DIGAMMA_SERIES = (1 / 12, -1 / 120, 1 / 252, -1 / 240, 1 / 132, -691 / 32760, 1 / 12)


# ---- the error function


def erf(b: Builder, x: Value) -> Value:
    """A polynomial near 0; then 1 - erfc(x), for f32 with a polynomial for its logarithm."""
    size = b.abs(x)
    square = b.mul(x, x)
    near = b.mad(polynomial(b, square, by_width(x, ERF_NEAR_32, ERF_NEAR_64)), size, size)
    if x.dtype is f32:
        far = b.sub(1.0, exp_moderate(b, horner(b, b.clamp_high(size, 4.0), LOG_ERFC_32)))
        return b.copysign(b.select(b.lt(size, 0.95), near, far), x)
    far = b.sub(1.0, _erfc_beyond(b, b.clamp_high(size, 6.0)))
    return b.copysign(b.select(b.lt(size, 1.0), near, far), x)


def erfc(b: Builder, x: Value) -> Value:
    return b.convert(_erfc_rough(b, b.convert(x, f64)), f32) if x.dtype is f32 else _erfc(b, x)


def _erfc_rough(b: Builder, x: Value) -> Value:
    """In f64, but good enough for f32 only: shorter polynomials, and x**2 need not be exact."""
    size = b.abs(x)
    near = b.sub(1.0, b.mad(polynomial(b, b.mul(x, x), ERF_NEAR_64[:9]), x, x))
    beyond = b.clamp_high(size, 15.0)
    scaled = b.div(polynomial(b, b.div(b.sub(beyond, 4.0), b.add(beyond, 4.0)), ERFCX_32), b.mad(beyond, 2.0, 1.0))
    far = b.mul(exp_moderate(b, b.mul(beyond, b.neg(beyond)), rough=True), scaled)
    return b.select(b.lt(size, 0.5), near, b.select(b.lt(x, 0.0), b.sub(2.0, far), far))


def _erfc(b: Builder, x: Value) -> Value:
    size = b.abs(x)
    near = b.sub(1.0, b.mad(polynomial(b, b.mul(x, x), ERF_NEAR_64), x, x))
    far = _erfc_beyond(b, b.clamp_high(size, 28.0))
    return b.select(b.lt(size, 0.5), near, b.select(b.lt(x, 0.0), b.sub(2.0, far), far))


def _erfc_beyond(b: Builder, x: Value) -> Value:
    """erfc(x) for 1/2 <= x <= 28: with the square as a sum of two, whose error exp would multiply."""
    square, lost = b.two_product(x, x)
    return exp_of_sum(b, b.neg(square), b.neg(lost), *_erfcx(b, x))


def _erfcx(b: Builder, x: Value) -> tuple[Value, Value]:
    """exp(x**2) * erfc(x) for 1/2 <= x <= 2**500, and what rounding took in the last division."""
    t = b.div(b.sub(x, 4.0), b.add(x, 4.0))
    numerator = polynomial(b, t, ERFCX_64)
    double = b.add(x, x)
    denominator, lost = b.two_sum(double, 1.0)
    inverse = b.div(b.like(x, 1.0), denominator)
    value = b.mul(numerator, inverse)
    product, error = b.two_product(value, denominator)
    rest = b.sub(b.sub(b.sub(numerator, product), error), b.mul(value, lost))
    return value, b.mul(rest, inverse)


# ---- the normal distribution


def ndtr(b: Builder, x: Value) -> Value:
    """The tail at -|x|, or what it leaves of 1. f64 by erf between -1 and 1.

    f32 by one polynomial for the logarithm of the tail, where erf needs two: what it does to be exact near 0 is lost
    when 1 is added. The largest error is 6.8e-8, that of (1 + erf(x / sqrt(2))) / 2 was 7.2e-8. Beside a small result
    it is not small: 2e-4 of ndtr(-4), 1% of ndtr(-5), and left of -8 too little is left of it to speak of.
    """
    size = b.abs(x)
    if x.dtype is f32:
        tail = half_exp2(b, b.mul(horner(b, size, LOG2_NDTR_32), size))
        return b.select(b.signbit(x), tail, b.sub(1.0, tail))
    tail = _tail(b, size, *_half_erfcx(b, b.clamp_high(size, 40.0)))
    outside = b.select(b.lt(x, 0.0), tail, b.sub(1.0, tail))
    return b.select(b.lt(size, 1.0), b.mad(_middle(b, x), 0.5, 0.5), outside)


@in_double
def log_ndtr(b: Builder, x: Value) -> Value:
    """With q = erfcx(|x| / sqrt(2)) / 2: left of -1 log(q) - x**2 / 2, which cannot underflow; right of 1
    log1p(-q * exp(-x**2 / 2)); between them by erf."""
    size = b.clamp_high(b.abs(x), 2.0**400)
    q, q_low = _half_erfcx(b, size)
    left = b.sub(log(b, q), b.mul(b.mul(x, x), 0.5))
    near = b.mad(_middle(b, x), 0.5, -0.5)
    right = log1p(b, b.select(b.gt(x, 1.0), b.neg(_tail(b, size, q, q_low)), near))
    return b.select(b.lt(x, -1.0), left, right)


def _half_erfcx(b: Builder, size: Value) -> tuple[Value, Value]:
    """erfcx(x / sqrt(2)) / 2 from 1 on, and what rounding took."""
    value, lost = _erfcx(b, b.mul(b.clamp_low(size, 1.0), math.sqrt(0.5)))
    return b.mul(value, 0.5), b.mul(lost, 0.5)


def _tail(b: Builder, size: Value, q: Value, q_low: Value) -> Value:
    """ndtr(-x) from 1 on; q as above."""
    size = b.clamp_high(size, 40.0)
    square, lost = b.two_product(size, b.mul(size, -0.5))
    return exp_of_sum(b, square, lost, q, q_low)


def _middle(b: Builder, x: Value) -> Value:
    """erf(x / sqrt(2)) for |x| <= 1."""
    side = b.mul(x, math.sqrt(0.5))
    return b.mad(polynomial(b, b.mul(side, side), ERF_NEAR_64), side, side)


# ---- quantiles


@in_double
def ndtri(b: Builder, p: Value) -> Value:
    """-inf at 0, inf at 1, NaN outside, because the logarithm of a tail is."""
    tail = b.select(b.lt(p, 0.5), p, b.sub(1.0, p))
    return _quantile(b, b.sub(p, 0.5), tail)


@in_double
def erfinv(b: Builder, x: Value) -> Value:
    """The quantile at (1 + x) / 2, over sqrt(2); half of 1 - |x| is exact where it counts. The sign is that of x."""
    tail = b.mul(b.sub(1.0, b.abs(x)), 0.5)
    return b.copysign(b.mul(_quantile(b, b.mul(x, 0.5), tail), math.sqrt(0.5)), x)


def _quantile(b: Builder, distance: Value, tail: Value) -> Value:
    """Of the normal distribution, from the signed distance of the probability to 1/2 and that to 0 or 1."""
    square = b.mul(distance, distance)
    middle = b.mul(_ratio(b, b.sub(0.180625, square), QUANTILE_MIDDLE), distance)
    root = b.sqrt(b.neg(log(b, tail)))
    near = _ratio(b, b.sub(root, 1.6), QUANTILE_TAIL)
    far = _ratio(b, b.sub(b.clamp_high(root, 28.0), 5.0), QUANTILE_FAR_TAIL)
    ends = b.select(b.gt(root, 5.0), far, near)
    ends = b.select(b.eq(tail, 0.0), float("inf"), ends)
    return b.select(b.le(b.abs(distance), 0.425), middle, b.copysign(ends, distance))


def _ratio(b: Builder, x: Value, parts: tuple[Sequence[float], Sequence[float]]) -> Value:
    return b.div(horner(b, x, parts[0]), horner(b, x, parts[1]))


# ---- gamma functions


@in_double
def lgamma(b: Builder, x: Value) -> Value:
    """C's library, lane by lane. TODO: a vector form would be faster; the zeros left of 0 stand in its way."""
    return b.call_lanes("lgamma_r", (x,), scratch=True)


@in_double
def digamma(b: Builder, x: Value) -> Value:
    """Reflected to the right of 0, moved up to 10, then the asymptotic series.

    digamma(x) = digamma(1 - x) - pi / tan(pi * x), and digamma(x) = digamma(x + 1) - 1 / x. The sum of 1 / x is kept as
    a fraction, so that one division does. At 0 it is an infinity of the other sign, at -1, -2, ... and -inf NaN.
    """
    left = b.lt(x, 0.0)
    step = b.sub(x, b.round(x))
    turn = b.div(b.like(x, -math.pi), tan(b, b.mul(step, math.pi)))
    pole = b.and_(left, b.or_(b.eq(step, 0.0), b.isinf(x)))
    at = b.select(left, b.sub(1.0, x), x)
    numerator, denominator = b.like(x, 0.0), b.like(x, 1.0)
    for _ in range(10):
        low = b.lt(at, 10.0)
        numerator = b.select(low, b.mad(numerator, at, denominator), numerator)
        denominator = b.select(low, b.mul(denominator, at), denominator)
        at = b.select(low, b.add(at, 1.0), at)
    inverse = b.div(b.like(x, 1.0), at)
    square = b.mul(inverse, inverse)
    series = b.mad(square, horner(b, square, DIGAMMA_SERIES), b.mul(inverse, 0.5))
    result = b.sub(b.sub(log(b, at), series), b.div(numerator, denominator))
    result = b.add(result, b.select(left, turn, 0.0))
    result = b.select(b.eq(x, 0.0), b.copysign(b.like(x, float("inf")), b.neg(x)), result)
    return b.select(pole, float("nan"), result)


# ---- Bessel functions


@in_double
def i0(b: Builder, x: Value) -> Value:
    size = b.abs(x)
    return b.select(b.le(size, 8.0), _near(b, size, I0_SERIES), _unscaled(b, _far(b, size, I0_FAR), size))


@in_double
def i0e(b: Builder, x: Value) -> Value:
    size = b.abs(x)
    return b.select(b.le(size, 8.0), _scaled(b, _near(b, size, I0_SERIES), size), _far(b, size, I0_FAR))


@in_double
def i1(b: Builder, x: Value) -> Value:
    """The sign of zero is lost, as in eager; also in i1e."""
    size = b.abs(x)
    near = b.mul(_near(b, size, I1_SERIES), b.mul(size, 0.5))
    value = b.select(b.le(size, 8.0), near, _unscaled(b, _far(b, size, I1_FAR), size))
    return b.select(b.lt(x, 0.0), b.neg(value), value)


@in_double
def i1e(b: Builder, x: Value) -> Value:
    size = b.abs(x)
    near = b.mul(_scaled(b, _near(b, size, I1_SERIES), size), b.mul(size, 0.5))
    value = b.select(b.le(size, 8.0), near, _far(b, size, I1_FAR))
    return b.select(b.lt(x, 0.0), b.neg(value), value)


def _near(b: Builder, size: Value, series: Sequence[float]) -> Value:
    """Up to 8."""
    return polynomial(b, b.mul(b.mul(size, size), 0.25), series)


def _far(b: Builder, size: Value, series: Sequence[float]) -> Value:
    """exp(-x) * I(x) from 8 on."""
    size = b.clamp_low(size, 8.0)
    return b.div(_chebyshev(b, b.sub(b.div(b.like(size, 16.0), size), 1.0), series), b.sqrt(size))


def _scaled(b: Builder, value: Value, size: Value) -> Value:
    """value * exp(-x) up to 8."""
    return b.mul(value, exp_moderate(b, b.neg(b.clamp_high(size, 8.0))))


def _unscaled(b: Builder, value: Value, size: Value) -> Value:
    """value * exp(x), where exp alone may overflow. At infinity 0 * inf: NaN, as eager."""
    half = exp(b, b.mul(size, 0.5))
    return b.mul(b.mul(value, half), half)


def _chebyshev(b: Builder, x: Value, coefficients: Sequence[float]) -> Value:
    """The sum of coefficients[k] * T_k(x), by Clenshaw's recurrence."""
    double = b.add(x, x)
    above, current = b.like(x, 0.0), b.like(x, coefficients[-1])
    for coefficient in coefficients[-2:0:-1]:
        above, current = current, b.mad(double, current, b.sub(coefficient, above))
    return b.mad(x, current, b.sub(coefficients[0], above))
