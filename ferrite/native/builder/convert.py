"""Conversions between element types as PyTorch casts, and whole-number division.

A float that does not fit an integer, or NaN, becomes the least i64 or i32; i8 and i16 are cut from an i32, u8 from an
i64. LLVM leaves such a conversion undefined, so the number is replaced before it. Halves are kept as bits and pass
through f32; where the processor cannot convert f16, integers do it: LLVM's routines for that are in no library here.
"""

from __future__ import annotations

from ferrite.loops.dtypes import DType, b8, bf16, f16, f32, f64, i16, i32, i64, u8
from ferrite.native.builder.arithmetic import Arithmetic
from ferrite.native.builder.values import Value, u32, vector, wrapped
from ferrite.native.builder.writer import Operand


class Convert(Arithmetic):
    def convert(self, a: Value, dtype: DType) -> Value:
        """As PyTorch casts."""
        source = a.dtype
        if source is dtype:
            return a
        if a.literal is not None and not source.is_float and (dtype.is_int or dtype in (f32, f64)):
            return self.constant(dtype, float(a.literal) if dtype.is_float else int(a.literal), a.lanes)
        if source.is_half:
            wide = self._from_f16(a) if source is f16 else self._from_bf16(a)
            return self.convert(wide, dtype)
        if dtype is b8:
            return self.ne(a, 0.0 if source.is_float else 0)
        if dtype.is_half:
            single = self.convert(a, f32)
            return self._to_f16(single) if dtype is f16 else self._to_bf16(single)
        if source.is_bool:
            return self.select(a, self.constant(dtype, 1, a.lanes), self.constant(dtype, 0, a.lanes))
        if source.is_float:
            return self._from_float(a, dtype)
        if dtype.is_float:
            return self._cast("sitofp" if source.signed else "uitofp", a, dtype)
        return self._resize(a, dtype)

    def _cast(self, word: str, a: Value, dtype: DType) -> Value:
        type = vector(dtype, a.lanes)
        return self._unary(word, a, type, f" to {type.text}")

    def _resize(self, a: Value, dtype: DType) -> Value:
        """Between integers; also of halves, as bits."""
        if a.dtype.bits == dtype.bits:
            return self.bits(a, dtype)
        if a.dtype.bits > dtype.bits:
            return self._cast("trunc", a, dtype)
        return self._cast("sext" if a.dtype.signed and not a.dtype.is_half else "zext", a, dtype)

    def _from_float(self, a: Value, dtype: DType) -> Value:
        if dtype.is_float:
            return self._cast("fpext" if dtype.bits > a.dtype.bits else "fptrunc", a, dtype)
        wide = i64 if dtype in (i64, u8) else i32
        bound = 2.0 ** (wide.bits - 1)
        fitting = self.select(self.lt(self.abs(a), bound), a, -bound)
        return self._resize(self._cast("fptosi", fitting, wide), dtype)

    # ---- halves

    def _from_bf16(self, a: Value) -> Value:
        return self.bits(self.shl(self._resize(a, i32), 16), f32)

    def _to_bf16(self, a: Value) -> Value:
        """To the nearest, ties to even, by a carry into the bits that stay. NaN has one pattern."""
        bits = self.bits(a, u32)
        odd = self.and_(self.shr(bits, 16), 1)
        carried = self.add(self.add(bits, 0x7FFF), odd)
        return self.bits(self._resize(self.shr(self.select(self.isnan(a), 0x7FC00000, carried), 16), i16), bf16)

    def _from_f16(self, a: Value) -> Value:
        if self.target.has_f16c:
            half = f"half{''}" if a.lanes == 1 else f"<{a.lanes} x half>"
            names = [self._line(f"bitcast {a.type.text} {name} to {half}") for name in a.names]
            type = vector(f32, a.lanes)
            return Value(type, tuple([self._line(f"fpext {half} {name} to {type.text}") for name in names]))
        # Without the sign: exponent and fraction move into place. Normal numbers need another bias; numbers below them
        # come right by a subtraction of floats; infinity and NaN get the largest exponent.
        bits = self._resize(a, u32)
        moved = self.shl(self.and_(bits, 0x7FFF), 13)
        normal = self.add(moved, 112 << 23)
        tiny = self.bits(self.sub(self.bits(self.add(moved, 113 << 23), f32), 2.0**-14), u32)
        special = self.add(moved, 224 << 23)
        size = self.select(self.lt(moved, 1 << 23), tiny, self.select(self.ge(moved, 0x7C00 << 13), special, normal))
        return self.bits(self.or_(size, self.shl(self.and_(bits, 0x8000), 16)), f32)

    def _to_f16(self, a: Value) -> Value:
        if self.target.has_f16c:
            half = "half" if a.lanes == 1 else f"<{a.lanes} x half>"
            names = [self._line(f"fptrunc {a.type.text} {name} to {half}") for name in a.names]
            type = vector(f16, a.lanes)
            return Value(type, tuple([self._line(f"bitcast {half} {name} to {type.text}") for name in names]))
        # The same three cases. Adding 0.5 leaves the bits of a number below 2**-14 where an f16 has them, rounded.
        bits = self.bits(a, u32)
        size = self.and_(bits, 0x7FFFFFFF)
        odd = self.and_(self.shr(size, 13), 1)
        normal = self.shr(self.add(self.add(size, (0xC8000FFF)), odd), 13)
        tiny = self.sub(self.bits(self.add(self.bits(size, f32), 0.5), u32), 126 << 23)
        large = self.select(self.gt(size, 0x7F800000), self.constant(u32, 0x7E00, a.lanes), 0x7C00)
        chosen = self.select(self.lt(size, 113 << 23), tiny, self.select(self.ge(size, 143 << 23), large, normal))
        signed = self.or_(chosen, self.shr(self.and_(bits, 0x80000000), 16))
        return self.bits(self._resize(signed, i16), f16)

    # ---- division of integers

    def truncdiv(self, a: Operand, b: Operand) -> Value:
        """Never traps: the least integer over -1 is itself, and x / 0 is a number that nobody should use."""
        x, y = self.match(a, b)
        return self._quotient(x, y, down=False)

    def floordiv(self, a: Operand, b: Operand) -> Value:
        x, y = self.match(a, b)
        if x.literal is not None and y.literal:
            return self.like(x, wrapped(x.dtype, int(x.literal) // int(y.literal)))
        shift = power_of_two(y)
        return self.shr(x, shift) if shift is not None else self._quotient(x, y, down=True)

    def floormod(self, a: Operand, b: Operand) -> Value:
        x, y = self.match(a, b)
        if x.literal is not None and y.literal:
            return self.like(x, int(x.literal) % int(y.literal))
        if power_of_two(y) is not None:
            return self.and_(x, int(y.literal or 0) - 1)
        return self.sub(x, self.mul(self._quotient(x, y, down=True), y))

    def split(self, count: Value, size: Operand) -> tuple[Value, Value]:
        """Quotient and rest of integers that are never negative, by one that is never 0: the plain division."""
        x, y = self.match(count, size)
        if y.literal is not None and (x.literal is not None or power_of_two(y) is not None):
            return self.floordiv(x, y), self.floormod(x, y)
        quotient = self._binary("udiv", x, y)
        return quotient, self.sub(x, self.mul(quotient, y))

    def integer_truncmod(self, a: Operand, b: Operand) -> Value:
        """C's remainder: the sign of a."""
        x, y = self.match(a, b)
        return self.sub(x, self.mul(self.truncdiv(x, y), y))

    def _quotient(self, x: Value, y: Value, *, down: bool) -> Value:
        """By floats where they hold the operands exactly. The rounded quotient is then whole only if the true one is:
        it is at least 1/|y| away from a whole number otherwise, and |x/y| / (1/|y|) = |x| stays below 2**32."""
        bits = x.dtype.bits
        known = y.literal is not None
        if bits == 64 or x.lanes == 1 or known:
            return self._quotient_of_integers(x, y, down=down)
        wide = f64 if bits == 32 else f32
        real = self.div(self.convert(x, wide), self.convert(y, wide))
        if down and x.dtype.signed:
            real = self.floor(real)
        # Unsigned and 32 bits do not fit an i32; the least integer over -1 does not fit either and comes out right.
        return (
            self.convert(real, i64 if bits == 32 and not x.dtype.signed else i32)
            if bits == 32
            else self._resize(self.convert(real, i32), x.dtype)
        )

    def _quotient_of_integers(self, x: Value, y: Value, *, down: bool) -> Value:
        if not x.dtype.signed:
            return self._binary("udiv", x, y if y.literal else self.select(self.eq(y, 0), 1, y))
        if y.literal == -1:
            return self.neg(x)
        if y.literal:
            quotient = self._binary("sdiv", x, y)
        else:
            # -1 and 0 are the divisors that trap; both become 1, and -x is the quotient by -1.
            odd = self._binary("icmp ult", self.add(y, 1), self.like(y, 2), vector(b8, x.lanes))
            quotient = self._binary("sdiv", x, self.select(odd, 1, y))
            quotient = self.select(self.eq(y, -1), self.neg(x), quotient)
        if not down:
            return quotient
        rest = self.sub(x, self.mul(quotient, y))
        below = self.and_(self.ne(rest, 0), self.lt(self.xor(rest, y), 0))
        return self.select(below, self.sub(quotient, 1), quotient)


def power_of_two(divisor: Value) -> int | None:
    """The exponent of a divisor that is known to be a positive power of two."""
    number = divisor.literal
    if number is None or number <= 0 or int(number) & (int(number) - 1):
        return None
    return int(number).bit_length() - 1
