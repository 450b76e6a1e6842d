"""Every scalar operation, reduction and scan of the loop IR, with its types and meaning.

The one table that the checker, the oracle and the emitter read; `docs/loop-ir.md` is checked against it.

Operands of one operation have one dtype (casts are explicit). Integers wrap around. Floats follow IEEE 754; halves
are legal operands and mean: compute in f32, round once. `same`: the result has the dtype of the operands; `bool`: it
is b8.
"""

from __future__ import annotations

from dataclasses import dataclass

FLOAT, INT, BOOL = "float", "int", "bool"
NUMBER = (FLOAT, INT)
ANY = (FLOAT, INT, BOOL)


@dataclass(frozen=True)
class Operation:
    """`kinds`: which kinds of dtype it takes. `result`: "same" or "bool". `symbol`: how it prints as an operator."""

    name: str
    arity: int
    kinds: tuple[str, ...]
    meaning: str
    result: str = "same"
    symbol: str = ""


def _table(*rows: Operation) -> dict[str, Operation]:
    return {row.name: row for row in rows}


OPERATIONS: dict[str, Operation] = _table(
    # arithmetic
    Operation("add", 2, NUMBER, "a + b", symbol="+"),
    Operation("sub", 2, NUMBER, "a - b", symbol="-"),
    Operation("mul", 2, NUMBER, "a * b", symbol="*"),
    Operation("div", 2, (FLOAT,), "a / b; x / 0 is infinite, 0 / 0 is NaN", symbol="/"),
    Operation("neg", 1, NUMBER, "-a; the sign of zero flips, the least integer stays itself"),
    Operation("abs", 1, NUMBER, "|a|; the least integer stays itself"),
    Operation("fma", 3, (FLOAT,), "a * b + c, rounded once"),
    Operation("floordiv", 2, (INT,), "a / b rounded down; b is not 0; the least integer over -1 is itself"),
    Operation("truncdiv", 2, (INT,), "a / b rounded towards 0; b is not 0; the least integer over -1 is itself"),
    Operation("floormod", 2, (INT,), "a - floordiv(a, b) * b: the sign of b; b is not 0"),
    Operation("truncmod", 2, NUMBER, "C's remainder: the sign of a; for floats fmod; an integer b is not 0"),
    Operation("minimum", 2, ANY, "the smaller one, of equals the first; NaN if one is NaN"),
    Operation("maximum", 2, ANY, "the larger one, of equals the first; NaN if one is NaN"),
    Operation("fmin", 2, (FLOAT,), "the smaller one, of equals the first; the other one if one is NaN"),
    Operation("fmax", 2, (FLOAT,), "the larger one, of equals the first; the other one if one is NaN"),
    Operation("copysign", 2, (FLOAT,), "|a| with the sign of b, NaN and zero included"),
    Operation("nextafter", 2, (FLOAT,), "the next representable number from a towards b"),
    # rounding
    Operation("floor", 1, (FLOAT,), "rounded down"),
    Operation("ceil", 1, (FLOAT,), "rounded up"),
    Operation("trunc", 1, (FLOAT,), "rounded towards 0"),
    Operation("round", 1, (FLOAT,), "rounded to the nearest, ties to even"),
    # comparison; with NaN all are false but ne
    Operation("eq", 2, ANY, "a == b", "bool", "=="),
    Operation("ne", 2, ANY, "a != b", "bool", "!="),
    Operation("lt", 2, ANY, "a < b", "bool", "<"),
    Operation("le", 2, ANY, "a <= b", "bool", "<="),
    Operation("gt", 2, ANY, "a > b", "bool", ">"),
    Operation("ge", 2, ANY, "a >= b", "bool", ">="),
    # bits and logic
    Operation("and_", 2, (INT, BOOL), "bitwise and", symbol="&"),
    Operation("or_", 2, (INT, BOOL), "bitwise or", symbol="|"),
    Operation("xor", 2, (INT, BOOL), "bitwise exclusive or", symbol="^"),
    Operation("not_", 1, (INT, BOOL), "all bits flipped; for b8 the other truth value"),
    Operation("shl", 2, (INT,), "a << b for 0 <= b < bits; 0 for any other b"),
    Operation("shr", 2, (INT,), "arithmetic a >> b for 0 <= b < bits; 0 or -1 by the sign of a for any other b"),
    Operation("popcount", 1, (INT,), "the number of set bits"),
    Operation("signbit", 1, (FLOAT,), "whether the sign bit is set, of NaN and -0.0 too", "bool"),
    Operation("isnan", 1, (FLOAT,), "whether it is NaN", "bool"),
    Operation("isinf", 1, (FLOAT,), "whether it is infinite", "bool"),
    # powers and exponentials
    Operation("sqrt", 1, (FLOAT,), "square root, correctly rounded"),
    Operation("rsqrt", 1, (FLOAT,), "1 / sqrt(a)"),
    Operation("exp", 1, (FLOAT,), "e**a"),
    Operation("exp2", 1, (FLOAT,), "2**a"),
    Operation("expm1", 1, (FLOAT,), "e**a - 1, exact near 0"),
    Operation("log", 1, (FLOAT,), "natural logarithm"),
    Operation("log2", 1, (FLOAT,), "logarithm to base 2"),
    Operation("log10", 1, (FLOAT,), "logarithm to base 10"),
    Operation("log1p", 1, (FLOAT,), "log(1 + a), exact near 0"),
    Operation("pow", 2, NUMBER, "a**b as C's pow; an integer with b < 0 is 0, unless a is 1 or -1"),
    Operation("hypot", 2, (FLOAT,), "sqrt(a*a + b*b) without overflow"),
    Operation("ldexp", 2, (FLOAT,), "a * 2**b, b a whole number of the same dtype"),
    # trigonometric and hyperbolic
    Operation("sin", 1, (FLOAT,), "sine"),
    Operation("cos", 1, (FLOAT,), "cosine"),
    Operation("tan", 1, (FLOAT,), "tangent"),
    Operation("asin", 1, (FLOAT,), "inverse sine"),
    Operation("acos", 1, (FLOAT,), "inverse cosine"),
    Operation("atan", 1, (FLOAT,), "inverse tangent"),
    Operation("atan2", 2, (FLOAT,), "angle of the point (b, a)"),
    Operation("sinh", 1, (FLOAT,), "hyperbolic sine"),
    Operation("cosh", 1, (FLOAT,), "hyperbolic cosine"),
    Operation("tanh", 1, (FLOAT,), "hyperbolic tangent"),
    Operation("asinh", 1, (FLOAT,), "inverse hyperbolic sine"),
    Operation("acosh", 1, (FLOAT,), "inverse hyperbolic cosine"),
    Operation("atanh", 1, (FLOAT,), "inverse hyperbolic tangent"),
    Operation("sigmoid", 1, (FLOAT,), "1 / (1 + exp(-a))"),
    # special functions
    Operation("erf", 1, (FLOAT,), "error function"),
    Operation("erfc", 1, (FLOAT,), "1 - erf(a), exact for large a"),
    Operation("erfinv", 1, (FLOAT,), "inverse error function"),
    Operation("lgamma", 1, (FLOAT,), "log of |gamma(a)|"),
    Operation(
        "digamma",
        1,
        (FLOAT,),
        "derivative of lgamma; of 0 an infinity of the other sign, NaN at negative integers and -inf",
    ),
    Operation("i0", 1, (FLOAT,), "modified Bessel function, first kind, order 0; NaN at the infinities"),
    Operation("i0e", 1, (FLOAT,), "exp(-|a|) * i0(a)"),
    Operation("i1", 1, (FLOAT,), "modified Bessel function, first kind, order 1; NaN at the infinities"),
    Operation("i1e", 1, (FLOAT,), "exp(-|a|) * i1(a)"),
    Operation("ndtr", 1, (FLOAT,), "normal distribution function; for f32 exact beside 1, not beside small results"),
    Operation("ndtri", 1, (FLOAT,), "inverse of the normal distribution function"),
    Operation("log_ndtr", 1, (FLOAT,), "log of the normal distribution function"),
)


@dataclass(frozen=True)
class Reduction:
    """`kinds`: which kinds of dtype it takes. `results`: the named results, with their dtype rule.

    A dtype rule is "same" (the dtype of the operand), "i64", or "b8".
    """

    name: str
    kinds: tuple[str, ...]
    results: tuple[tuple[str, str], ...]
    meaning: str
    empty: str  # what an empty box gives


def _reductions(*rows: Reduction) -> dict[str, Reduction]:
    return {row.name: row for row in rows}


_VALUE = (("value", "same"),)
_PLACE = (("value", "same"), ("index", "i64"))
_MOMENTS = (("mean", "same"), ("m2", "same"))
_SHIFTED = (("max", "same"), ("sum", "same"))

REDUCTIONS: dict[str, Reduction] = _reductions(
    Reduction("sum", NUMBER, _VALUE, "sum; halves are summed in f32 and rounded once", "0"),
    Reduction("prod", NUMBER, _VALUE, "product; halves in f32, rounded once", "1"),
    Reduction("min", ANY, _VALUE, "least; NaN if any is NaN", "is refused"),
    Reduction("max", ANY, _VALUE, "greatest; NaN if any is NaN", "is refused"),
    Reduction("any", (BOOL,), (("value", "b8"),), "whether any is true", "false"),
    Reduction("all", (BOOL,), (("value", "b8"),), "whether all are true", "true"),
    Reduction("argmin", ANY, _PLACE, "least and its position; first of equals; the first NaN wins", "is refused"),
    Reduction("argmax", ANY, _PLACE, "greatest and its position; first of equals; the first NaN wins", "is refused"),
    Reduction("welford", (FLOAT,), _MOMENTS, "mean, and sum of squared distances from it", "(0, 0)"),
    Reduction("softmax", (FLOAT,), _SHIFTED, "greatest m; sum of exp(a - m), NaN if m is infinite", "(-inf, 0)"),
)  # fmt: skip

# The position that argmin and argmax give counts over `axes` in row-major order: the last axis moves fastest.

SCANS: dict[str, Reduction] = _reductions(
    Reduction("cumsum", NUMBER, _VALUE, "running sum", "nothing"),
    Reduction("cumprod", NUMBER, _VALUE, "running product", "nothing"),
    Reduction("cummax", ANY, _PLACE, "running greatest, its position; last of equals; NaN stays", "nothing"),
    Reduction("cummin", ANY, _PLACE, "running least, its position; last of equals; NaN stays", "nothing"),
    Reduction("logcumsumexp", (FLOAT,), _VALUE, "log of the running sum of exponentials", "nothing"),
)  # fmt: skip

# How an accumulation combines what is there with what comes; in program order, so repeated positions are well defined.
ACCUMULATIONS = ("add", "mul", "minimum", "maximum")
