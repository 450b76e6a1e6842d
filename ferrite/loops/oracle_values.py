"""How the oracle holds values, and what scalar operations make of them.

    arrays   f64, f32, f16, i64..i8, u8, b8: the NumPy type of that name; bf16: its bits as uint16
    values   the same, but both halves are float32 that hold a half: every operation computes in f32 and rounds
    f32      functions without an exact IEEE result are computed in f64 and rounded once (`special.py`)

Where eager has no one answer (the sign of min(0.0, -0.0) depends on how far a vector loop came) the first operand wins.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ferrite.loops.dtypes import DType, b8, bf16, f16, f32, f64, i8, i16, i32, i64, u8
from ferrite.loops.special import IN_DOUBLE

Array: TypeAlias = NDArray[Any]

# ---- element types

STORAGE: dict[DType, np.dtype[Any]] = {
    f64: np.dtype(np.float64),
    f32: np.dtype(np.float32),
    f16: np.dtype(np.float16),
    bf16: np.dtype(np.uint16),
    i64: np.dtype(np.int64),
    i32: np.dtype(np.int32),
    i16: np.dtype(np.int16),
    i8: np.dtype(np.int8),
    u8: np.dtype(np.uint8),
    b8: np.dtype(np.bool_),
}


def value_type(dtype: DType) -> np.dtype[Any]:
    return STORAGE[f32] if dtype.is_half else STORAGE[dtype]


def from_storage(array: Array, dtype: DType) -> Array:
    if dtype is bf16:
        return (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return np.asarray(array, value_type(dtype))


def to_storage(value: Array, dtype: DType) -> Array:
    """A value as it lies in memory. For bf16: the nearest, ties to even, by carrying into the kept bits."""
    if dtype is not bf16:
        return np.asarray(value, STORAGE[dtype])
    bits = np.ascontiguousarray(value, np.float32).reshape(np.shape(value)).view(np.uint32)
    nearest = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(np.isnan(value), quiet, nearest).astype(np.uint16)


def rounded(value: Array, dtype: DType) -> Array:
    """A float of more precision as the nearest value of the dtype; halves by way of f32, as C++ converts them."""
    value = np.asarray(value, value_type(dtype))
    return from_storage(to_storage(value, dtype), dtype) if dtype.is_half else value


def cast(value: Array, source: DType, target: DType) -> Array:
    """To b8: != 0. To a float: rounded. From a float to an integer: truncated. Between integers: wraps."""
    if target is b8:
        return np.asarray(value != 0)
    if target.is_float:
        return rounded(value, target)
    if source.is_float:
        # What the CPU gives when it does not fit, as eager compiles it: u8 by way of i64, i8 and i16 by way of i32.
        value = _truncated(value, i64 if target in (i64, u8) else i32)
    return value.astype(STORAGE[target])


def _truncated(value: Array, target: DType) -> Array:
    """Towards zero; NaN and what does not fit become the least integer, as x86 does."""
    least = -(2.0 ** (target.bits - 1))
    whole = np.trunc(value.astype(np.float64))
    fits = (whole >= least) & (whole < -least)
    return np.where(fits, whole, least).astype(STORAGE[target])


def bits(value: Array, source: DType, target: DType) -> Array:
    stored = np.ascontiguousarray(to_storage(value, source)).reshape(value.shape)
    return from_storage(stored.view(STORAGE[target]), target)


# ---- scalar operations

INTEGER_DIVISIONS = ("floordiv", "truncdiv", "floormod", "truncmod")


def operate(operation: str, dtype: DType, *operands: Array) -> Array:
    """One operation of the table on operands of one dtype; a float result is rounded to it."""
    if operation in BY_DTYPE:
        return np.asarray(BY_DTYPE[operation](dtype, *operands))
    if operation in EXACT:
        result = np.asarray(EXACT[operation](*operands))
    else:
        result = np.asarray(IN_DOUBLE[operation](*(operand.astype(np.float64) for operand in operands)))
    return result if result.dtype == np.bool_ or not dtype.is_float else rounded(result, dtype)


def _minimum(a: Array, b: Array) -> Array:
    return np.where((a <= b) | (a != a), a, b)


def _maximum(a: Array, b: Array) -> Array:
    return np.where((a >= b) | (a != a), a, b)


def _fmin(a: Array, b: Array) -> Array:
    return np.where((a <= b) | (b != b), a, b)


def _fmax(a: Array, b: Array) -> Array:
    return np.where((a >= b) | (b != b), a, b)


def _truncdiv(a: Array, b: Array) -> Array:
    """One more than the floor where that was rounded down past zero."""
    floor = np.floor_divide(a, b)
    return np.asarray(floor + ((np.remainder(a, b) != 0) & ((a < 0) != (b < 0))).astype(a.dtype))


def _popcount(a: Array) -> Array:
    each_byte = np.unpackbits(np.ascontiguousarray(a).view(np.uint8).reshape(*a.shape, -1), axis=-1)
    return np.asarray(each_byte.sum(axis=-1), a.dtype)


def _shl(dtype: DType, a: Array, b: Array) -> Array:
    inside = (b >= 0) & (b < dtype.bits)
    return np.where(inside, np.left_shift(a, np.where(inside, b, 0).astype(a.dtype)), np.zeros((), a.dtype))


def _shr(dtype: DType, a: Array, b: Array) -> Array:
    inside = (b >= 0) & (b < dtype.bits)
    sign = np.where(a < 0, -1, 0).astype(a.dtype)
    return np.where(inside, np.right_shift(a, np.where(inside, b, 0).astype(a.dtype)), sign)


def _pow(dtype: DType, a: Array, b: Array) -> Array:
    """Of integers: by squaring, which wraps as multiplication does; 1 and -1 are their own inverses."""
    if dtype.is_float:
        return rounded(IN_DOUBLE["pow"](a.astype(np.float64), b.astype(np.float64)), dtype)
    left, result = np.abs(b.astype(np.int64)).astype(np.uint64), np.ones(np.broadcast_shapes(a.shape, b.shape), a.dtype)
    power = a
    while left.any():
        result = np.where(left & np.uint64(1), result * power, result)
        left, power = left >> np.uint64(1), power * power
    return np.where((b < 0) & (a != 1) & (a != -1), np.zeros((), a.dtype), result)


def _nextafter(dtype: DType, a: Array, b: Array) -> Array:
    """For halves: one step of the bit pattern, which counts magnitudes."""
    if not dtype.is_half:
        return np.nextafter(a, b)
    bits = to_storage(a, dtype).view(np.uint16)
    away = np.where(np.signbit(a), b < a, b > a)
    step = np.where(away, bits + np.uint16(1), bits - np.uint16(1))
    from_zero = np.where(np.signbit(b), np.uint16(0x8001), np.uint16(1))
    moved = from_storage(np.where(a == 0, from_zero, step).astype(np.uint16).view(STORAGE[dtype]), dtype)
    return np.where((a != a) | (b != b), np.float32(np.nan), np.where(a == b, b, moved))


def _fma(dtype: DType, a: Array, b: Array, c: Array) -> Array:
    return _fma_double(a, b, c) if dtype is f64 else rounded(_fma_single(a, b, c), dtype)


def _fma_single(a: Array, b: Array, c: Array) -> Array:
    """The product is exact in f64. The sum is rounded to odd there, so that rounding to f32 sees what was lost."""
    product, addend = np.broadcast_arrays(a.astype(np.float64) * b, c.astype(np.float64))
    total = np.asarray(product + addend)
    part = total - product
    lost = (product - (total - part)) + (addend - part)
    even = (np.ascontiguousarray(total).reshape(total.shape).view(np.int64) & 1) == 0
    odd = np.nextafter(total, np.where(lost > 0, np.inf, -np.inf))
    return np.where(np.isfinite(total) & (lost != 0) & even, odd, total).astype(np.float32)


def _fma_double(a: Array, b: Array, c: Array) -> Array:
    def exactly(a: float, b: float, c: float) -> float:
        if not (math.isfinite(a) and math.isfinite(b)):
            return float(np.float64(a) * b + c)
        if not math.isfinite(c):
            return c  # whatever the product is: rounded it might be an infinity of the other sign
        exact = Fraction(a) * Fraction(b) + Fraction(c)
        if not exact:
            return float(np.float64(a) * b + c)  # for the sign
        try:
            return float(exact)
        except OverflowError:
            return math.inf if exact > 0 else -math.inf

    return np.asarray(np.frompyfunc(exactly, 3, 1)(a, b, c), np.float64)


# Operations with one right answer in every dtype that they know.
EXACT: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "neg": np.negative,
    "abs": np.abs,
    "floordiv": np.floor_divide,
    "truncdiv": _truncdiv,
    "floormod": np.remainder,
    "truncmod": np.fmod,
    "minimum": _minimum,
    "maximum": _maximum,
    "fmin": _fmin,
    "fmax": _fmax,
    "copysign": np.copysign,
    "floor": np.floor,
    "ceil": np.ceil,
    "trunc": np.trunc,
    "round": np.rint,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "and_": np.bitwise_and,
    "or_": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not_": np.invert,
    "popcount": _popcount,
    "signbit": np.signbit,
    "isnan": np.isnan,
    "isinf": np.isinf,
    "sqrt": np.sqrt,
}

# Operations that have to know the dtype, and round by themselves.
BY_DTYPE: dict[str, Callable[..., Array]] = {
    "shl": _shl,
    "shr": _shr,
    "pow": _pow,
    "nextafter": _nextafter,
    "fma": _fma,
}
