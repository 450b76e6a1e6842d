"""Functions over the reals as vector code, for f32 and f64, on any target and for any number of ways.

`FUNCTIONS` has every operation of `loops/operations.py` that is such a function, by its name. Each takes a builder and
values, writes its code there and gives the result. NaN, infinities, zeros with their signs and denormals come out as
in eager. Accuracy and speed, measured: docs/vector-math.md, written by `python -m bench.vector_math`.

    pieces          polynomials, exponents, sums of two numbers
    exponential     exp, exp2, expm1, sigmoid, tanh, sinh, cosh
    logarithm       log, log2, log10, log1p, asinh, acosh, atanh, pow
    trigonometric   sin, cos, tan, asin, acos, atan, atan2
    root            rsqrt, hypot
    special         erf, erfc, erfinv, ndtr, ndtri, log_ndtr, lgamma, digamma, i0, i0e, i1, i1e
"""

from __future__ import annotations

from collections.abc import Callable

from ferrite.native.builder import Value
from ferrite.native.math import exponential, logarithm, root, special, trigonometric

FUNCTIONS: dict[str, Callable[..., Value]] = {
    function.__name__: function
    for function in (
        exponential.exp,
        exponential.exp2,
        exponential.expm1,
        exponential.sigmoid,
        exponential.tanh,
        exponential.sinh,
        exponential.cosh,
        logarithm.log,
        logarithm.log2,
        logarithm.log10,
        logarithm.log1p,
        logarithm.asinh,
        logarithm.acosh,
        logarithm.atanh,
        logarithm.pow,
        trigonometric.sin,
        trigonometric.cos,
        trigonometric.tan,
        trigonometric.asin,
        trigonometric.acos,
        trigonometric.atan,
        trigonometric.atan2,
        root.rsqrt,
        root.hypot,
        special.erf,
        special.erfc,
        special.erfinv,
        special.ndtr,
        special.ndtri,
        special.log_ndtr,
        special.lgamma,
        special.digamma,
        special.i0,
        special.i0e,
        special.i1,
        special.i1e,
    )
}
