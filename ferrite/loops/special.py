"""Functions over the reals, in double precision: what the oracle computes `IN_DOUBLE` before it rounds once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]


def _ldexp(a: Array, b: Array) -> Array:
    """Exact also where 2**b alone would overflow or vanish."""
    exponent = np.where(np.isfinite(b), b, 0).clip(-5000, 5000).astype(np.int32)
    return np.where(np.isfinite(b), np.ldexp(a, exponent), a * np.exp2(b))


def _each(function: Callable[[float], float]) -> Callable[[Array], Array]:
    over_array = np.frompyfunc(function, 1, 1)
    return lambda a: np.asarray(over_array(a), np.float64)


_erf, _erfc = _each(math.erf), _each(math.erfc)


@_each
def _lgamma(a: float) -> float:
    try:
        return math.lgamma(a)
    except (ValueError, OverflowError):  # a pole, or too large
        return math.inf


def _digamma(a: Array) -> Array:
    """In long double: reflected to the positive side, and moved up to where the asymptotic series is exact."""
    pi = np.longdouble("3.14159265358979323846264338327950288")
    x = a.astype(np.longdouble)
    below = a < 0
    # digamma(x) = digamma(1 - x) - pi / tan(pi * x); only the distance to the next integer matters to the tangent
    result = np.where(below, -pi / np.tan(pi * (x - np.rint(x))), 0)
    x = np.where(below, 1 - x, x)
    for _ in range(20):
        small = x < 20
        result = result - np.where(small, 1 / x, 0)
        x = np.where(small, x + 1, x)
    square = 1 / (x * x)
    series = np.zeros_like(x)
    for numerator, denominator in ((1, 12), (-691, 32760), (1, 132), (-1, 240), (1, 252), (-1, 120), (1, 12)):
        series = square * (np.longdouble(numerator) / denominator + series)
    result = result + np.log(x) - 1 / (2 * x) - series
    pole = below & ((a == np.rint(a)) | np.isinf(a))
    return np.where(pole, np.nan, np.where(a == 0, np.copysign(np.inf, -a), result)).astype(np.float64)


def _erfcx(x: Array) -> Array:
    """exp(x*x) * erfc(x) for x >= 0: as it stands while erfc is not small, then by its continued fraction."""
    far = np.maximum(x, 3.0)
    tail = far
    for numerator in range(120, 0, -1):
        tail = far + numerator / 2 / tail
    return np.where(x < 3, np.exp(np.minimum(x, 3) ** 2) * _erfc(x), 1 / (math.sqrt(math.pi) * tail))


def _erfinv(a: Array) -> Array:
    """Newton's method on erf near 0, on erfc towards the ends."""
    y = np.where(np.abs(a) < 0.5, a, 0)
    x = y * (math.sqrt(math.pi) / 2)
    for _ in range(6):
        x = x - (_erf(x) - y) * np.exp(x * x) * (math.sqrt(math.pi) / 2)
    ends = np.copysign(_erfcinv(1 - np.abs(a)), a)
    return np.where(np.abs(a) < 0.5, np.where(y == 0, y, x), ends)


def _erfcinv(q: Array) -> Array:
    """x with erfc(x) == q, for 0 <= q <= 1/2: Newton's method on the logarithm, from Winitzki's approximation."""
    inside = (q > 0) & (q <= 0.5)
    safe = np.where(inside, q, 0.5)
    log_q = np.log(safe)
    half = (log_q + np.log(2 - safe)) / 2
    shift = 2 / (math.pi * 0.147) + half
    x = np.sqrt(np.sqrt(shift * shift - 2 * half / 0.147) - shift)
    for _ in range(5):
        scaled = _erfcx(x)
        x = x + (np.log(scaled) - x * x - log_q) * scaled * (math.sqrt(math.pi) / 2)
    return np.where(inside, x, np.where(q == 0, np.inf, np.nan))


def _ndtr(a: Array) -> Array:
    """By erfc, which has a tail where 1 + erf is 0."""
    return _erfc(-a / math.sqrt(2)) / 2


def _ndtri(a: Array) -> Array:
    """The quantile by erfinv in the middle, where 2*a - 1 is exact; by erfcinv of the nearer tail outside."""
    tail = np.where(a < 0.5, a, 1 - a)
    ends = np.copysign(_erfcinv(2 * tail), a - 0.5)
    return np.where((a >= 0.25) & (a <= 0.75), _erfinv(2 * a - 1), ends) * math.sqrt(2)


def _log_ndtr(a: Array) -> Array:
    low = np.log(_erfcx(np.maximum(-a, 1) / math.sqrt(2)) / 2) - a * a / 2
    return np.where(a < -1, low, np.log1p(-_erfc(a / math.sqrt(2)) / 2))


def _bessel(order: int, x: Array) -> Array:
    """exp(-x) * I_order(x) for x >= 0: the power series, which only adds, or for large x the asymptotic one."""
    near, far = np.minimum(x, 30), np.maximum(x, 30)
    term = near / 2 if order else np.ones_like(near)
    power = term
    for k in range(1, 80):
        term = term * (near * near / 4) / (k * (k + order))
        power = power + term
    term = np.ones_like(far)
    asymptotic = term
    for k in range(1, 30):
        term = term * ((2 * k - 1) ** 2 - 4 * order) / (8 * k * far)
        asymptotic = asymptotic + term
    return np.where(x <= 30, np.exp(-near) * power, asymptotic / (math.sqrt(2 * math.pi) * np.sqrt(far)))


def _i0e(a: Array) -> Array:
    return _bessel(0, np.abs(a))


def _i1e(a: Array) -> Array:
    """Eager loses the sign of zero."""
    return np.where(a < 0, -_bessel(1, np.abs(a)), _bessel(1, np.abs(a)))


def _unscaled(value: Array, a: Array) -> Array:
    """value * exp(|a|), where exp alone may overflow. NaN at infinity, as eager."""
    half = np.exp(np.abs(a) / 2)
    return value * half * half


def _pow(a: Array, b: Array) -> Array:
    """For an exponent that is one number, 0.5, NumPy takes the square root, which of -0.0 is -0.0 and of -inf NaN."""
    return np.power(np.where((b == 0.5) & ((a == 0) | np.isinf(a)), np.abs(a), a), b)


# Functions that are computed in double precision and rounded.
IN_DOUBLE: dict[str, Callable[..., Any]] = {
    "rsqrt": lambda a: 1 / np.sqrt(a),
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "log": np.log,
    "log2": np.log2,
    "log10": np.log10,
    "log1p": np.log1p,
    "pow": _pow,
    "hypot": np.hypot,
    "ldexp": _ldexp,
    "sin": np.sin,
    "cos": np.cos,
    "tan": np.tan,
    "asin": np.arcsin,
    "acos": np.arccos,
    "atan": np.arctan,
    "atan2": np.arctan2,
    "sinh": np.sinh,
    "cosh": np.cosh,
    "tanh": np.tanh,
    "asinh": np.arcsinh,
    "acosh": np.arccosh,
    "atanh": np.arctanh,
    "sigmoid": lambda a: 1 / (1 + np.exp(-a)),
    "erf": _erf,
    "erfc": _erfc,
    "erfinv": _erfinv,
    "lgamma": _lgamma,
    "digamma": _digamma,
    "i0": lambda a: _unscaled(_i0e(a), a),
    "i0e": _i0e,
    "i1": lambda a: _unscaled(_i1e(a), a),
    "i1e": _i1e,
    "ndtr": _ndtr,
    "ndtri": _ndtri,
    "log_ndtr": _log_ndtr,
}
