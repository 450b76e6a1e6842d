"""Operations on constants are carried out, where Python gives the very bits that the kernel would.

    i8(100) + i8(100)      ->  i8(-56)
    f32(0.1) < f32(0.2)    ->  b8(True)
    f32(i64(3))            ->  f32(3.0)
    value(7)               ->  i64(7)

Laws: integers wrap to their width. A float constant means the nearest value of its dtype. For + - * / a double is
wide enough that rounding its result to f32, f16 or bf16 gives the correctly rounded one (53 >= 2*24 + 2 bits). A result
that is NaN, a number that does not fit its integer type and min/max of zeros of two signs are left to the kernel.
"""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Callable
from typing import Any, TypeAlias

from ferrite.loops.dtypes import DType, bf16, f16, i64
from ferrite.loops.nodes import Apply, Cast, Const, Expr, Position, Program
from ferrite.loops.rewrite import apply_rules

Number: TypeAlias = "bool | int | float"


def fold_constants(program: Program) -> Program:
    return apply_rules(program, (fold_position, fold_cast, fold_operation))


def fold_position(node: Expr) -> Expr | None:
    """value(7) -> i64(7)"""
    match node:
        case Position(index=place) if not place.terms and _fits(place.constant, i64):
            return Const(place.constant, i64)
    return None


def fold_cast(node: Expr) -> Expr | None:
    """t(c) -> the constant c in t"""
    match node:
        case Cast(kind=kind, value=Const() as held):
            number = _converted(exact_value(held), kind)
            return None if number is None else Const(number, kind)
    return None


def fold_operation(node: Expr) -> Expr | None:
    """op(c, ...) -> the constant it gives"""
    match node:
        case Apply(operation=operation, operands=operands) if all(isinstance(operand, Const) for operand in operands):
            dtype = operands[0].dtype
            numbers = [exact_value(operand) for operand in operands if isinstance(operand, Const)]
            if any(number is None for number in numbers):
                return None
            result = _computed(operation, dtype, numbers)
            return None if result is None else Const(result, node.dtype)
    return None


def exact_value(node: Const) -> Number | None:
    """The number that a constant means in its dtype; None for NaN, whose bits nobody promises."""
    if not node.kind.is_float:
        return node.value
    value = rounded(float(node.value), node.kind)
    return None if math.isnan(value) else value


def rounded(value: float, dtype: DType) -> float:
    """The nearest value of the dtype, ties to even; to halves by way of f32, as eager converts."""
    if math.isnan(value) or math.isinf(value) or dtype.bits == 64:
        return value
    value = _packed(value, "<f")
    if dtype == f16:
        return _packed(value, "<e")
    if dtype == bf16 and math.isfinite(value):
        (bits,) = struct.unpack("<I", struct.pack("<f", value))
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
        (value,) = struct.unpack("<f", struct.pack("<I", bits))
    return value


def _packed(value: float, layout: str) -> float:
    try:
        (result,) = struct.unpack(layout, struct.pack(layout, value))
    except OverflowError:
        return math.copysign(math.inf, value)
    return float(result)


def _fits(value: int, dtype: DType) -> bool:
    return wrapped(value, dtype) == value


def wrapped(value: int, dtype: DType) -> int:
    """The low bits, read as the dtype reads them."""
    low = value & ((1 << dtype.bits) - 1)
    return low - (1 << dtype.bits) if dtype.signed and low >> (dtype.bits - 1) else low


def _converted(value: Number | None, kind: DType) -> Number | None:
    if value is None:
        return None
    if kind.is_bool:
        return bool(value != 0)
    if kind.is_float:
        # A double holds integers up to 2**53; beyond, f32 would be rounded twice.
        return rounded(float(value), kind) if isinstance(value, float) or abs(value) <= 1 << 53 else None
    if not isinstance(value, float):
        return wrapped(int(value), kind)
    whole = math.trunc(value) if math.isfinite(value) else None
    return whole if whole is not None and _fits(whole, kind) else None


def _computed(operation: str, dtype: DType, numbers: list[Any]) -> Number | None:
    if operation in _COMPARE:
        return bool(_COMPARE[operation](*numbers))
    if dtype.is_float:
        return _float_result(operation, dtype, numbers)
    if dtype.is_bool:
        return bool(_BOOL[operation](*numbers)) if operation in _BOOL else None
    return _int_result(operation, dtype, numbers)


_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}

_BOOL: dict[str, Callable[..., bool]] = {
    "and_": operator.and_,
    "or_": operator.or_,
    "xor": operator.xor,
    "not_": operator.not_,
    "minimum": operator.and_,
    "maximum": operator.or_,
}

_INT: dict[str, Callable[..., int]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "neg": operator.neg,
    "abs": abs,
    "minimum": min,
    "maximum": max,
    "and_": operator.and_,
    "or_": operator.or_,
    "xor": operator.xor,
    "not_": operator.invert,
}

_INT_DIVISION: dict[str, Callable[[int, int], int]] = {
    "floordiv": operator.floordiv,
    "floormod": operator.mod,
    "truncdiv": lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    "truncmod": lambda a, b: abs(a) % abs(b) * (-1 if a < 0 else 1),
}


def _int_result(operation: str, dtype: DType, numbers: list[int]) -> int | None:
    if operation in _INT:
        return wrapped(_INT[operation](*numbers), dtype)
    if operation in _INT_DIVISION:
        return wrapped(_INT_DIVISION[operation](*numbers), dtype) if numbers[1] else None
    if operation == "popcount":
        return wrapped((numbers[0] & ((1 << dtype.bits) - 1)).bit_count(), dtype)
    if operation in ("shl", "shr"):
        value, by = numbers
        inside = 0 <= by < dtype.bits
        if operation == "shl":
            return wrapped(value << by, dtype) if inside else 0
        return value >> by if inside else -1 if value < 0 else 0
    return None


_ROUNDING: dict[str, Callable[[float], int]] = {
    "floor": math.floor,
    "ceil": math.ceil,
    "trunc": math.trunc,
    "round": round,
}

_FLOAT: dict[str, Callable[..., float]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "neg": operator.neg,
    "abs": abs,
    "copysign": math.copysign,
}

_FLOAT_TEST: dict[str, Callable[[float], bool]] = {
    "isnan": math.isnan,
    "isinf": math.isinf,
    "signbit": lambda value: math.copysign(1.0, value) < 0,
}


def _float_result(operation: str, dtype: DType, numbers: list[float]) -> Number | None:
    if operation in _FLOAT_TEST:
        return _FLOAT_TEST[operation](*numbers)
    if operation in ("minimum", "maximum", "fmin", "fmax"):
        left, right = numbers
        if left == right and math.copysign(1, left) != math.copysign(1, right):
            return None
        return min(left, right) if operation in ("minimum", "fmin") else max(left, right)
    if operation in _ROUNDING:
        (value,) = numbers
        # An integer forgets the sign of zero; infinities are whole.
        return math.copysign(_ROUNDING[operation](value), value) if math.isfinite(value) else value
    if operation in _FLOAT:
        result = _FLOAT[operation](*numbers)
    elif operation == "div" and numbers[1]:
        result = numbers[0] / numbers[1]
    else:
        return None
    return None if math.isnan(result) else rounded(result, dtype)
