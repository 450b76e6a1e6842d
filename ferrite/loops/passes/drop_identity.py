"""What gives back what it was given is left out.

    f32(x[i])           ->  x[i]                 if x is f32
    x[i] * f32(1.0)     ->  x[i]
    f32(f64(x[i]))      ->  x[i]                 if x is f32: f64 holds every f32
    i8(i32(n[i]))       ->  i8(n[i])             if n is i64: both keep the low bits

Laws: x * 1, x / 1, x - 0.0 and x + -0.0 are x for every float, NaN and -0.0 included; x + 0.0 is not (-0.0 + 0.0 is
0.0), and stays. A cast that rounds stays: f32(bf16(x)) is not x.
"""

from __future__ import annotations

from math import copysign

from ferrite.loops.dtypes import DType
from ferrite.loops.nodes import Apply, Bits, Cast, Const, Expr, Program
from ferrite.loops.rewrite import apply_rules


def drop_identity(program: Program) -> Program:
    return apply_rules(program, (drop_cast, join_casts, join_bits, drop_operation, drop_twice))


def drop_cast(node: Expr) -> Expr | None:
    """t(x) -> x, bits(x, t) -> x where x has the type t"""
    match node:
        case Cast(kind=kind, value=value) | Bits(kind=kind, value=value) if value.dtype == kind:
            return value
    return None


def join_bits(node: Expr) -> Expr | None:
    """bits(bits(x, t), u) -> bits(x, u)"""
    match node:
        case Bits(kind=kind, value=Bits(value=value)):
            return Bits(kind, value)
    return None


def join_casts(node: Expr) -> Expr | None:
    """u(t(x)) -> u(x) where the way through t changes nothing"""
    match node:
        case Cast(kind=last, value=Cast(kind=middle, value=value)) if _passes_through(value.dtype, middle, last):
            return Cast(last, value)
    return None


def _passes_through(first: DType, middle: DType, last: DType) -> bool:
    if first.is_bool:
        return True  # 0 and 1 are in every type
    if first.is_int and middle.is_int and last.is_int:
        return _holds(middle, first) or middle.bits >= last.bits
    if not _holds(middle, first):
        return False
    # From a float to an integer, what does not fit depends on the float's width; by way of a float, integers may be
    # rounded twice. Left are ways back, ways from float to float, and "is it zero".
    return last == first or last.is_bool or (first.is_float and last.is_float)


_SIGNIFICAND = {"f64": 53, "f32": 24, "f16": 11, "bf16": 8}
_EXPONENT = {"f64": 11, "f32": 8, "f16": 5, "bf16": 8}


def _holds(wide: DType, narrow: DType) -> bool:
    """Whether every value of `narrow` is a value of `wide`, exactly."""
    if wide.is_bool:
        return narrow.is_bool
    if narrow.is_bool or wide == narrow:
        return True
    if wide.is_float and narrow.is_float:
        return _SIGNIFICAND[wide.name] >= _SIGNIFICAND[narrow.name] and _EXPONENT[wide.name] >= _EXPONENT[narrow.name]
    if narrow.is_float:
        return False
    magnitude = narrow.bits - narrow.signed
    if wide.is_float:
        return _SIGNIFICAND[wide.name] >= magnitude and wide.bits > narrow.bits
    return wide.bits - wide.signed >= magnitude and (wide.signed or not narrow.signed)


# Which constant on which side leaves the other operand as it is. Floats and integers differ where zeros have signs.
_RIGHT: dict[str, tuple[int | None, float | None]] = {
    "add": (0, -0.0),
    "sub": (0, 0.0),
    "mul": (1, 1.0),
    "div": (None, 1.0),
    "floordiv": (1, None),
    "truncdiv": (1, None),
    "or_": (0, None),
    "xor": (0, None),
    "and_": (-1, None),
    "shl": (0, None),
    "shr": (0, None),
}
_EITHER_SIDE = ("add", "mul", "or_", "xor", "and_")


def drop_operation(node: Expr) -> Expr | None:
    """x * 1 -> x, x + -0.0 -> x, n + 0 -> n, n & -1 -> n, ..."""
    match node:
        case Apply(operation=operation, operands=(left, right)) if operation in _RIGHT:
            if _is_neutral(operation, right):
                return left
            if operation in _EITHER_SIDE and _is_neutral(operation, left):
                return right
    return None


def _is_neutral(operation: str, node: Expr) -> bool:
    if not isinstance(node, Const):
        return False
    whole, real = _RIGHT[operation]
    if node.kind.is_float:
        return real is not None and node.value == real and copysign(1, node.value) == copysign(1, real)
    if node.kind.is_bool:
        return operation in ("or_", "xor", "and_") and node.value is (operation == "and_")
    return node.value == (255 if whole == -1 and not node.kind.signed else whole)


_UNDONE_BY_ITSELF = ("neg", "not_")
_SETTLED_AT_ONCE = ("abs", "floor", "ceil", "trunc", "round")


def drop_twice(node: Expr) -> Expr | None:
    """-(-x) -> x, not_(not_(x)) -> x, abs(abs(x)) -> abs(x), floor(floor(x)) -> floor(x), ..."""
    match node:
        case Apply(operation=outer, operands=(Apply(operation=inner, operands=(value,)) as once,)) if outer == inner:
            if outer in _UNDONE_BY_ITSELF:
                return value
            if outer in _SETTLED_AT_ONCE:
                return once
    return None
