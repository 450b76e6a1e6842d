"""How exact and how fast are the functions over the reals in native code?

    python -m bench.vector_math                          # all functions; writes docs/vector-math.md
    python -m bench.vector_math --functions exp,tanh --points 1000000 --no-write

Every function runs over many numbers: bit patterns from the whole range, denormals, infinities and NaN included, and a
dense row where it changes most. The largest error is given in ulp, the distance of neighbours at the exact result, for
each instruction set and for eager; 0.5 is perfect rounding. The exact result comes from long doubles, from the oracle's
functions in f64 (for f32), or from mpmath. Times are for one thread and 16384 numbers, the best of many runs; those of
eager include allocating its result.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mpmath
import numpy as np
import torch
from rich.console import Console

from bench.native_code import TARGETS, Kernel, Module, prepared
from ferrite.loops.dtypes import DType, f32, f64
from ferrite.loops.operations import OPERATIONS
from ferrite.loops.oracle import STORAGE
from ferrite.loops.special import IN_DOUBLE
from ferrite.native.math import FUNCTIONS
from ferrite.native.target import host, named, runs_here

PAGE = Path(__file__).parents[1] / "docs" / "vector-math.md"
TIMED = 16384
WAYS = 2


# Where a function is not constant, for f32 and f64; for two operands: for each.
RANGES: dict[str, tuple[tuple[float, float], tuple[float, float]]] = {
    "exp": ((-105, 90), (-750, 712)),
    "exp2": ((-151, 129), (-1078, 1026)),
    "expm1": ((-20, 90), (-40, 712)),
    "sigmoid": ((-105, 40), (-746, 40)),
    "tanh": ((-10, 10), (-20, 20)),
    "sinh": ((-91, 91), (-712, 712)),
    "cosh": ((-91, 91), (-712, 712)),
    "log1p": ((-1, 4), (-1, 4)),
    "acosh": ((1, 12), (1, 12)),
    "erfc": ((-4.2, 10.5), (-6, 27.5)),
    "i0": ((-92, 92), (-714, 714)),
    "i1": ((-92, 92), (-714, 714)),
    "i0e": ((-40, 40), (-40, 40)),
    "i1e": ((-40, 40), (-40, 40)),
    "sin": ((-700, 700), (-700, 700)),
    "cos": ((-700, 700), (-700, 700)),
    "tan": ((-700, 700), (-700, 700)),
    "ndtr": ((-14, 6), (-39, 9)),
    "log_ndtr": ((-40, 14), (-50, 39)),
    "lgamma": ((-20, 40), (-20, 40)),
    "digamma": ((-20, 40), (-20, 40)),
    "asin": ((-1, 1), (-1, 1)),
    "acos": ((-1, 1), (-1, 1)),
    "atanh": ((-1, 1), (-1, 1)),
    "erfinv": ((-1, 1), (-1, 1)),
    "ndtri": ((0, 1), (0, 1)),
}
EVERYWHERE_ELSE = ((-6.0, 6.0), (-6.0, 6.0))
# Functions with zeros that are no exact numbers, or made to be exact beside 1: below 1 its ulp is the measure.
MEASURED_AT_ONE = {("digamma", f32), ("digamma", f64), ("lgamma", f32), ("lgamma", f64), ("ndtr", f32)}

LONG: dict[str, Callable[..., Any]] = {
    "rsqrt": lambda a: 1 / np.sqrt(a),
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "log": np.log,
    "log2": np.log2,
    "log10": np.log10,
    "log1p": np.log1p,
    "pow": np.power,
    "hypot": np.hypot,
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
    "sigmoid": lambda a: np.where(a < 0, np.exp(a), 1) / (1 + np.exp(-np.abs(a))),
}


# ---- exact results


def exact(name: str, dtype: DType, *operands: Any) -> Any:
    """In long double, good to far below an ulp of the dtype."""
    with np.errstate(all="ignore"):
        if name in LONG:
            return LONG[name](*(operand.astype(np.longdouble) for operand in operands))
        if dtype is f32:
            return IN_DOUBLE[name](*(operand.astype(np.float64) for operand in operands)).astype(np.longdouble)
    with mpmath.workdps(36):
        return np.array([_long(_by_mpmath(name, float(number))) for number in operands[0]], np.longdouble)


def _long(value: Any) -> Any:
    high = float(value)
    if not np.isfinite(high):
        return np.longdouble(high)
    return np.longdouble(high) + np.longdouble(float(value - mpmath.mpf(high)))


def _by_mpmath(name: str, x: float) -> Any:
    """Functions that NumPy does not have, where their value is not a matter of convention."""
    if np.isnan(x):
        return mpmath.nan
    if name in ("erf", "erfc"):
        return getattr(mpmath, name)(min(max(x, -60), 60))
    if name == "erfinv":
        return _erfinv(mpmath.mpf(x))
    if name == "ndtr":
        return mpmath.erfc(-min(max(x, -60), 60) * mpmath.sqrt(mpmath.mpf(1) / 2)) / 2
    if name == "ndtri":
        return _ndtri(x)
    if name == "log_ndtr":
        return _log_ndtr(x)
    if name == "digamma":
        return _digamma(x)
    if name == "lgamma":
        return _lgamma(x)
    return _bessel(name, x)


def _erfinv(x: Any) -> Any:
    if abs(x) >= 1:
        return mpmath.sign(x) * mpmath.inf if abs(x) == 1 else mpmath.nan
    if abs(x) < 1e-12:
        return x * mpmath.sqrt(mpmath.pi) / 2
    return mpmath.erfinv(x)


def _ndtri(p: float) -> Any:
    if not 0 < p < 1:
        return {0.0: -mpmath.inf, 1.0: mpmath.inf}.get(p, mpmath.nan)
    if p > 0.01:
        return mpmath.sqrt(2) * _erfinv(2 * mpmath.mpf(p) - 1)
    # Newton's method on the logarithm of the tail
    target = mpmath.log(p)
    z = -mpmath.sqrt(-2 * target)
    for _ in range(50):
        tail = mpmath.erfc(-z / mpmath.sqrt(2)) / 2
        step = (mpmath.log(tail) - target) * tail * mpmath.sqrt(2 * mpmath.pi) * mpmath.exp(z * z / 2)
        z -= step
        if abs(step) < abs(z) * mpmath.mpf(10) ** -25:
            break
    return z


def _log_ndtr(x: float) -> Any:
    root = mpmath.sqrt(mpmath.mpf(1) / 2)
    if x > 0:
        return mpmath.log1p(-mpmath.erfc(min(x, 100.0) * root) / 2)
    if x < -1000:
        wide = mpmath.mpf(x)
        if not np.isfinite(x):
            return -mpmath.inf
        return (
            -wide * wide / 2 - mpmath.log(-wide * mpmath.sqrt(2 * mpmath.pi)) + mpmath.log1p(3 / wide**4 - 1 / wide**2)
        )
    return mpmath.log(mpmath.erfc(-x * root) / 2)


def _digamma(x: float) -> Any:
    if x == 0:
        return mpmath.inf if np.signbit(x) else -mpmath.inf
    if x < 0 and (np.isinf(x) or x == np.floor(x)):
        return mpmath.nan
    wide = mpmath.mpf(x)
    if x < 0:
        return mpmath.digamma(1 - wide) - mpmath.pi * mpmath.cot(mpmath.pi * (wide - mpmath.nint(wide)))
    return mpmath.digamma(wide)


def _lgamma(x: float) -> Any:
    if np.isinf(x) or (x <= 0 and x == np.floor(x)):
        return mpmath.inf
    wide = mpmath.mpf(x)
    if abs(x) < 1e-20:
        return -mpmath.log(abs(wide))
    if x < 0:
        sine = abs(mpmath.sin(mpmath.pi * (wide - mpmath.nint(wide))))
        return mpmath.log(mpmath.pi / sine) - mpmath.re(mpmath.loggamma(1 - wide))
    return mpmath.re(mpmath.loggamma(wide))


def _bessel(name: str, x: float) -> Any:
    order, scaled, size = int(name[1]), name.endswith("e"), abs(mpmath.mpf(x))
    if np.isinf(x):
        return mpmath.mpf(0) if scaled else mpmath.nan
    if not scaled and size > 800:
        return mpmath.inf * (-1 if order and x < 0 else 1)
    if size > 1000:
        term = result = mpmath.mpf(1)
        for k in range(1, 12):
            term = term * ((2 * k - 1) ** 2 - 4 * order * order) / (8 * k * size)
            result += term
        value = result / mpmath.sqrt(2 * mpmath.pi * size)
    else:
        value = mpmath.besseli(order, size) * (mpmath.exp(-size) if scaled else 1)
    return -value if order and x < 0 else value


# ---- numbers to try


def points(name: str, dtype: DType, count: int, seed: int = 0) -> list[Any]:
    """Corners, or all pairs of them; `count` bit patterns from the whole range; `count` numbers where it matters."""
    storage = STORAGE[dtype]
    rng = np.random.default_rng(seed)
    info = np.finfo(storage)
    some = [0.0, 0.5, 1.0, 2.0, 3.0, np.inf, info.max, info.tiny, info.smallest_subnormal, info.tiny * 3, info.eps]
    corners = np.array([*some, *(-number for number in some), np.nan], storage)
    if OPERATIONS[name].arity == 2:
        return _pairs(name, dtype, corners, count, rng)
    patterns = rng.integers(0, 2**dtype.bits - 1, count, np.uint64).astype(f"u{dtype.bytes}").view(storage)
    low, high = RANGES.get(name, EVERYWHERE_ELSE)[dtype is f64]
    row = rng.uniform(low, high, count)
    near = np.concatenate([1 + rng.uniform(-0.01, 0.01, count // 8), rng.uniform(-1, 1, count // 2)])
    small = rng.uniform(-1, 1, count // 8) * 10 ** rng.uniform(-12, 0, count // 8)
    return [np.concatenate([corners, patterns, *(part.astype(storage) for part in (row, near, small))])]


def _pairs(name: str, dtype: DType, corners: Any, count: int, rng: np.random.Generator) -> list[Any]:
    storage = STORAGE[dtype]
    first, second = (
        part.ravel() for part in np.meshgrid(corners, np.append(corners, [2.5, -2.5, 1e9]).astype(storage))
    )
    reach = 80 if dtype is f32 else 600
    with np.errstate(all="ignore"):
        if name == "pow":
            left = [
                rng.uniform(0, 10, count),
                np.exp(rng.uniform(-reach, reach, count)),
                1 + rng.uniform(-0.1, 0.1, count),
            ]
            right = [rng.uniform(-30, 30, count), rng.uniform(-1.2, 1.2, count), rng.uniform(-900, 900, count)]
        else:
            left = [rng.uniform(-10, 10, count), np.exp(rng.uniform(-reach, reach, count))]
            right = [rng.uniform(-10, 10, count), -np.exp(rng.uniform(-reach, reach, count))]
    columns = ((first, left), (second, right))
    return [np.concatenate([start, *(part.astype(storage) for part in more)]) for start, more in columns]


# ---- errors


def ulp_errors(found: Any, truth: Any, dtype: DType, least: float = 0.0) -> Any:
    """Distances in ulp of the exact result. Overflow counts as the power of two after the largest number. NaN for a
    number, or a number for NaN, is an infinite error."""
    info = np.finfo(STORAGE[dtype])
    beyond = np.ldexp(np.longdouble(1), int(info.maxexp))
    with np.errstate(all="ignore"):
        value, wide = found.astype(np.longdouble), truth.astype(np.longdouble)
        size = np.maximum(np.abs(np.where(np.isfinite(wide), wide, 0)), least)
        exponent = np.clip(np.frexp(size)[1] - 1, info.minexp, info.maxexp - 1)
        unit = np.ldexp(np.longdouble(1), exponent - info.nmant)
        overflows = np.isinf(wide.astype(STORAGE[dtype]))
        value = np.where(np.isinf(value), np.copysign(beyond, value), value)
        wide = np.where(overflows, np.copysign(beyond, wide), wide)
        unit = np.where(overflows, np.ldexp(np.longdouble(1), info.maxexp - 1 - info.nmant), unit)
        errors = np.abs(value - wide) / unit
    nan = np.isnan(found), np.isnan(truth)
    return np.where(nan[0] & nan[1], 0.0, np.where(nan[0] != nan[1], np.inf, errors)).astype(np.float64)


def eager(name: str) -> Callable[..., torch.Tensor]:
    if hasattr(torch, name):
        return getattr(torch, name)
    return getattr(torch.special, name)


# ---- measurement


@dataclass
class Row:
    name: str
    dtype: DType
    errors: dict[str, float] = field(default_factory=dict)
    worst: tuple[float, ...] = ()  # where the error is largest, of the last instruction set
    eager_error: float = 0.0
    times: dict[str, float] = field(default_factory=dict)  # ns a number
    eager_time: float = 0.0
    build: float = 0.0  # ms, with a loop of WAYS vectors around it
    note: str = ""


def measure(name: str, dtype: DType, count: int) -> Row:
    row = Row(name, dtype)
    slow = name not in LONG and dtype is f64
    operands = points(name, dtype, min(count, 1500) if slow else count)
    truth = exact(name, dtype, *operands)
    least = 1.0 if (name, dtype) in MEASURED_AT_ONE else 0.0
    function = FUNCTIONS[name]
    for target in TARGETS:
        start = time.perf_counter()
        module = Module(target, [Kernel("kernel", (dtype,) * len(operands), dtype, function, ways=WAYS)])
        row.build = (time.perf_counter() - start) * 1e3
        errors = ulp_errors(module.run("kernel", *operands), truth, dtype, least)
        row.errors[target] = float(errors.max())
        row.worst = tuple(float(operand[errors.argmax()]) for operand in operands)
        if runs_here(named(target)):
            row.times[target] = _time_native(module, name, dtype)
        if any(symbol in module.text for symbol in ("@lgamma", "@fmod")):
            row.note = "C's library, lane by lane"
    call_eager = eager(name)
    found = call_eager(*(torch.from_numpy(operand) for operand in operands)).numpy()
    row.eager_error = float(ulp_errors(found, truth, dtype, least).max())
    row.eager_time = _time_eager(call_eager, name, dtype)
    return row


def _ordinary(name: str, dtype: DType) -> list[Any]:
    """Numbers that a model would meet."""
    low, high = {"acosh": (1, 6), "ndtri": (0, 1), "log": (0, 6), "log2": (0, 6), "log10": (0, 6), "rsqrt": (0, 6)}.get(
        name, (-0.99, 0.99) if RANGES.get(name, EVERYWHERE_ELSE)[0] == (-1, 1) else (0 if name == "pow" else -0.99, 6)
    )
    rng = np.random.default_rng(0)
    return [rng.uniform(low, high, TIMED).astype(STORAGE[dtype]) for _ in range(OPERATIONS[name].arity)]


def _time_native(module: Module, name: str, dtype: DType) -> float:
    operands, output = _ordinary(name, dtype), np.empty(TIMED, STORAGE[dtype])
    return _best(prepared(module.library, "kernel", *operands, output, TIMED))


def _time_eager(function: Callable[..., torch.Tensor], name: str, dtype: DType) -> float:
    operands = [torch.from_numpy(operand) for operand in _ordinary(name, dtype)]
    return _best(lambda: function(*operands))


def _best(run: Callable[[], Any]) -> float:
    """ns a number: the best of runs for about 20 ms."""
    best, spent = float("inf"), 0.0
    while spent < 0.02:
        start = time.perf_counter()
        run()
        took = time.perf_counter() - start
        best, spent = min(best, took), spent + took
    return best * 1e9 / TIMED


# ---- results


def markdown(rows: Sequence[Row], count: int) -> str:
    here = [target for target in TARGETS if runs_here(named(target))]
    head = ["function", "type", *(f"{target}, ulp" for target in TARGETS), "eager, ulp"]
    head += [*(f"{target}, ns" for target in here), "eager, ns", "note"]
    lines = ["| " + " | ".join(head) + " |", "| " + " | ".join("---" for _ in head) + " |"]
    for row in rows:
        cells = [f"`{row.name}`", str(row.dtype), *(_figure(row.errors[target]) for target in TARGETS)]
        cells += [_figure(row.eager_error), *(f"{row.times[target]:.2f}" for target in here)]
        lines.append("| " + " | ".join([*cells, f"{row.eager_time:.2f}", row.note]) + " |")
    emulated = [target for target in TARGETS if target not in here]
    missing = f" {', '.join(emulated)} ran on {host().cpu}, with its own instructions replaced." if emulated else ""
    return "\n".join(
        [
            "# Vector math",
            "",
            "Written by `python -m bench.vector_math`. Largest errors in ulp of the exact result (0.5 is perfect",
            "rounding), and nanoseconds a number, of the functions in `ferrite/native/math`: each as native code for",
            "three instruction sets, and of eager on the same numbers.",
            "",
            f"{count} bit patterns from the whole range and as many numbers where the function changes, with zeros,",
            "denormals, infinities and NaN (f64 of functions without a long double: 1500). Errors of `lgamma` and",
            "`digamma`, which have zeros that are no floats, and of `ndtr` in f32, made for x * ndtr(x), are in ulp of",
            "at least 1. f32 of all but the common functions is computed in f64 and rounded once. `inf`: NaN for a",
            "number, or the other way round.",
            "",
            f"Times: {host().cpu}, one thread, {TIMED} numbers, {WAYS} vectors at a time, best of many.{missing}",
            "",
            *lines,
            "",
        ]
    )


def _figure(error: float) -> str:
    if np.isinf(error):
        return "inf"
    return f"{error:.2f}" if error < 100 else f"{error:.0f}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--functions", default=",".join(FUNCTIONS), help="names, with commas")
    parser.add_argument("--dtypes", default="f32,f64")
    parser.add_argument("--points", type=int, default=100_000)
    parser.add_argument("--no-write", action="store_true", help="print, but leave the page alone")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    console = Console(soft_wrap=True)
    dtypes = [{"f32": f32, "f64": f64}[name] for name in options.dtypes.split(",")]
    rows = []
    for name in options.functions.split(","):
        for dtype in dtypes:
            rows.append(measure(name, dtype, options.points))
            row = rows[-1]
            errors = "  ".join(f"{target} {_figure(error)}" for target, error in row.errors.items())
            times = "  ".join(f"{target} {took:.2f}" for target, took in row.times.items())
            console.print(
                f"{name:9} {dtype}  ulp {errors}  eager {_figure(row.eager_error)}  "
                f"ns {times}  eager {row.eager_time:.2f}  build {row.build:.0f} ms  worst {row.worst}"
            )
    complete = set(options.functions.split(",")) == set(FUNCTIONS) and len(dtypes) == 2
    if complete and not options.no_write:
        PAGE.write_text(markdown(rows, options.points))
    return 0


if __name__ == "__main__":
    sys.exit(main())
