"""Values of native code: an element type, a number of lanes, and one SSA name for each way.

Several vectors that go through the same operations are *ways* of one value. An operation writes its instruction for all
ways before the next operation writes any, so independent instructions stand next to one another and hide each other's
latency. A scalar is a value with one lane and one way.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from ferrite.loops.dtypes import DType

# Element types that only native code knows, besides those of the loop IR.
u16 = DType("u16", "int", 16, signed=False)
u32 = DType("u32", "int", 32, signed=False)
u64 = DType("u64", "int", 64, signed=False)
pointer = DType("ptr", "pointer", 64, signed=False)

# How an element is written in LLVM: as a value, and in memory. Halves are handled as their bits.
_TEXT = {
    "f64": "double", "f32": "float", "f16": "i16", "bf16": "i16", "i64": "i64", "i32": "i32", "i16": "i16", "i8": "i8",
    "u8": "i8", "u16": "i16", "u32": "i32", "u64": "i64", "b8": "i1", "ptr": "ptr",
}  # fmt: skip
_MANGLED = {"double": "f64", "float": "f32", "half": "f16", "ptr": "p0"}


@dataclass(frozen=True, slots=True, eq=False)
class Type:
    """Made by `vector` and `scalar` only, so that equal types are one object.

    `element` is LLVM's word for one lane, `text` for all of them, `mangled` its part of the name of an intrinsic.
    """

    dtype: DType
    lanes: int
    element: str
    text: str
    mangled: str

    def __repr__(self) -> str:
        return str(self.dtype) if self.lanes == 1 else f"{self.lanes} x {self.dtype}"


_TYPES: dict[tuple[str, int], Type] = {}


def vector(dtype: DType, lanes: int) -> Type:
    key = (dtype.name, lanes)
    found = _TYPES.get(key)
    if found is None:
        element = _TEXT[dtype.name]
        text = element if lanes == 1 else f"<{lanes} x {element}>"
        found = _TYPES[key] = Type(dtype, lanes, element, text, mangled(element, lanes))
    return found


def scalar(dtype: DType) -> Type:
    return vector(dtype, 1)


def mangled(element: str, lanes: int) -> str:
    short = _MANGLED.get(element, element)
    return short if lanes == 1 else f"v{lanes}{short}"


class Value:
    """Never changed after it is made. `literal` is the number that every lane holds, if that is known."""

    __slots__ = ("literal", "names", "type")

    def __init__(self, type: Type, names: tuple[str, ...], literal: bool | int | float | None = None) -> None:
        self.type = type
        self.names = names
        self.literal = literal

    @property
    def dtype(self) -> DType:
        return self.type.dtype

    @property
    def lanes(self) -> int:
        return self.type.lanes

    @property
    def ways(self) -> int:
        return len(self.names)

    def way(self, k: int) -> Value:
        """One of the ways, as a value."""
        return self if len(self.names) == 1 else Value(self.type, (self.names[k],), self.literal)

    def __repr__(self) -> str:
        return f"Value({self.type!r}, {', '.join(self.names)})"


def number_text(dtype: DType, number: bool | int | float) -> str:
    """A literal. f32 is printed as the hexadecimal double of the same value, which LLVM asks for."""
    if dtype.is_float:
        if dtype.is_half:
            raise ValueError("halves are handled as bits: write a constant in f32 and convert it")
        exact = single(number) if dtype.bits == 32 else number
        return f"0x{_double.pack(exact).hex()}"
    if dtype.is_bool:
        return "true" if number else "false"
    return str(wrapped(dtype, int(number)))


_double, _single = struct.Struct(">d"), struct.Struct("<f")


def single(number: float) -> float:
    """The nearest f32, as a Python number."""
    try:
        return _single.unpack(_single.pack(number))[0]
    except OverflowError:
        return float("inf") if number > 0 else float("-inf")


def wrapped(dtype: DType, number: int) -> int:
    """An integer modulo 2**bits, in the range of the dtype."""
    number &= (1 << dtype.bits) - 1
    if dtype.signed and number >> (dtype.bits - 1):
        number -= 1 << dtype.bits
    return number
