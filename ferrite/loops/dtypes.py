"""Element types of the loop IR."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DType:
    """One element type. `kind` is "float", "int" or "bool"; complex numbers stay outside the loop IR."""

    name: str
    kind: str
    bits: int
    signed: bool = True

    @property
    def is_float(self) -> bool:
        return self.kind == "float"

    @property
    def is_int(self) -> bool:
        return self.kind == "int"

    @property
    def is_bool(self) -> bool:
        return self.kind == "bool"

    @property
    def is_half(self) -> bool:
        """Kept in 16 bits, computed in 32."""
        return self.kind == "float" and self.bits == 16

    @property
    def bytes(self) -> int:
        return max(self.bits // 8, 1)

    def __str__(self) -> str:
        return self.name


f64 = DType("f64", "float", 64)
f32 = DType("f32", "float", 32)
f16 = DType("f16", "float", 16)
bf16 = DType("bf16", "float", 16)
i64 = DType("i64", "int", 64)
i32 = DType("i32", "int", 32)
i16 = DType("i16", "int", 16)
i8 = DType("i8", "int", 8)
u8 = DType("u8", "int", 8, signed=False)
b8 = DType("b8", "bool", 8, signed=False)

DTYPES: dict[str, DType] = {dtype.name: dtype for dtype in (f64, f32, f16, bf16, i64, i32, i16, i8, u8, b8)}
