"""Exact operations on floats that take several instructions, and calls of C's library lane by lane."""

from __future__ import annotations

from ferrite.loops.dtypes import DType, f16, f32, f64, i16, i32, i64
from ferrite.native.builder.memory import Memory
from ferrite.native.builder.values import Value, pointer, scalar
from ferrite.native.builder.writer import Operand, spread

_BITS = {16: i16, 32: i32, 64: i64}
_FRACTION = {"f64": 52, "f32": 23}


class Floats(Memory):
    # ---- calls

    def call_lanes(
        self,
        function: str,
        operands: tuple[Value, ...],
        *,
        mask: Value | None = None,
        otherwise: Value | None = None,
        scratch: bool = False,
    ) -> Value:
        """A function of C's library, called with the numbers of each lane; with a mask only where it is on, else the
        lane of `otherwise`. `scratch`: its last argument is a pointer to an int that nobody reads."""
        matched = self.match(*operands)
        ways = max(value.ways for value in (*matched, *(() if mask is None else (mask,))))
        helper = self._lanes_helper(function, matched[0].type.dtype, matched[0].lanes, len(matched), scratch)
        results = []
        for way in range(ways):
            fill = otherwise.way(way) if otherwise is not None else matched[0].way(way)
            bits = self.constant(i64, -1) if mask is None else self.mask_bits(mask.way(way))
            arguments = (bits, fill, *(value.way(way) for value in matched))
            results.append(self.call(helper, matched[0].type, *arguments))
        return self.join_ways(results)

    def _lanes_helper(self, function: str, dtype: DType, lanes: int, arity: int, scratch: bool) -> str:
        """A function of this module that loops over lanes, so that the code around a call stays small."""
        name = f"lanes.{function}.{lanes}"
        if self.has_function(name):
            return f"@{name}"
        one = scalar(dtype)
        callee = self.external(function, one, [one] * arity + ([scalar(pointer)] if scratch else []), "willreturn")
        vector = self.splat(self.constant(dtype, 0.0), lanes).type
        parameters = {"bits": scalar(i64), "fill": vector, **{f"x{k}": vector for k in range(arity)}}
        with self.function(name, parameters, vector, internal=True, attributes="noinline") as (bits, fill, *inputs):
            slots = [self.slot(vector) for _ in inputs]
            for slot, value in zip(slots, inputs, strict=True):
                self.store(value, slot, align=64)
            result = self.slot(vector)
            self.store(fill, result, align=64)
            extra = [self.slot(scalar(i32))] if scratch else []
            with self.loop(0, lanes) as loop:
                on = self.ne(self.and_(self._binary("lshr", bits, loop.index), 1), 0)
                with self.if_(on):
                    arguments = [self.load(dtype, slot, loop.index) for slot in slots]
                    self.store(self.call(callee, one, *arguments, *extra), result, loop.index)
                loop.next()
            self.ret(self.load(dtype, result, 0, lanes, align=64))
        return f"@{name}"

    def c_function(self, name: str, dtype: DType) -> str:
        """How C's library names a function of this type: `sin` and `sinf`."""
        return name if dtype is f64 else f"{name}f"

    # ---- rounded once

    def fma(self, a: Operand, b: Operand, c: Operand) -> Value:
        """a * b + c, rounded once, on every target.

        Without the instruction: an f32 product is exact in f64; the sum is rounded there to odd (its last bit says that
        something was lost), so that rounding it again to f32 is right. For f64 C's library does it.
        """
        x, y, z = self.match(a, b, c)
        if self.target.has_fma:
            return self._intrinsic("fma", x.type, x, y, z)
        if x.dtype is f64:
            return self.call_lanes("fma", (x, y, z))
        left, right, addend = (self.convert(value, f64) for value in (x, y, z))
        product = self.mul(left, right)
        total, lost = self.two_sum(product, addend)
        bits = self.bits(total, i64)
        grows = self.eq(self.gt(lost, 0.0), self.gt(total, 0.0))
        odd = self.add(bits, self.select(grows, self.constant(i64, 1, x.lanes), self.constant(i64, -1, x.lanes)))
        is_even = self.eq(self.and_(bits, 1), 0)
        lossy = self.or_(self.lt(lost, 0.0), self.gt(lost, 0.0))  # false for NaN, which an infinite total leaves
        return self.convert(self.bits(self.select(self.and_(lossy, is_even), odd, bits), f64), f32)

    def two_sum(self, a: Operand, b: Operand) -> tuple[Value, Value]:
        """The rounded sum, and what rounding took from it, exactly (Knuth)."""
        x, y = self.match(a, b)
        total = self.add(x, y)
        part = self.sub(total, x)
        return total, self.add(self.sub(x, self.sub(total, part)), self.sub(y, part))

    def two_product(self, a: Operand, b: Operand) -> tuple[Value, Value]:
        """The rounded product, and what rounding took from it: exact unless it underflows (Dekker, without fma)."""
        x, y = self.match(a, b)
        product = self.mul(x, y)
        if self.target.has_fma:
            return product, self.mad(x, y, self.neg(product))
        (xh, xl), (yh, yl) = self._split(x), self._split(y)
        rest = self.sub(self.mul(xh, yh), product)
        rest = self.add(self.add(rest, self.mul(xh, yl)), self.mul(xl, yh))
        return product, self.add(rest, self.mul(xl, yl))

    def _split(self, a: Value) -> tuple[Value, Value]:
        """Two halves of the bits of a number: the upper ones by masking, which cannot overflow."""
        keep = -(1 << (27 if a.dtype is f64 else 12))
        high = self.bits(self.and_(self.integer_bits(a), keep), a.dtype)
        return high, self.sub(a, high)

    # ---- remainder

    def truncmod(self, a: Operand, b: Operand) -> Value:
        """C's remainder, with the sign of a: exact. For integers see `integer_truncmod`.

        While the quotient has few bits, a - trunc(a / b) * b is exact with one rounding of the product; the rounded
        quotient may be one too large, which shows in the sign. All else goes to C's library.
        """
        x, y = self.match(a, b)
        if not x.dtype.is_float:
            return self.integer_truncmod(x, y)
        name = self.c_function("fmod", x.dtype)
        if not self.target.has_fma:
            return self.call_lanes(name, (x, y))
        size, divisor = self.abs(x), self.abs(y)
        ratio = self.div(size, divisor)
        rest = self.mad(self.neg(self.trunc(ratio)), divisor, size)
        rest = self.select(self.lt(rest, 0.0), self.add(rest, divisor), rest)
        rest = self.copysign(rest, x)
        # NaN: 0 / 0, infinity / infinity, or a NaN; and 0 goes to the fast path whatever finite number divides it.
        rest = self.select(self.isnan(ratio), ratio, rest)
        few_bits = self.and_(self.lt(ratio, 2.0**22), self.lt(divisor, float("inf")))
        hard = self.not_(self.or_(few_bits, self.isnan(ratio)))
        with self.if_(self.any(hard), (rest,), unlikely=True) as branch:
            branch.give(self.call_lanes(name, (x, y), mask=hard, otherwise=rest))
        return branch.results[0]

    # ---- steps and scales

    def nextafter(self, a: Operand, b: Operand) -> Value:
        """One step of the bits, which count magnitudes. Halves too."""
        x, y = self.match(a, b)
        dtype = x.dtype
        integer = _BITS[dtype.bits]
        left, right = (self.convert(each, f32) if dtype.is_half else each for each in (x, y))
        bits = self.bits(x, integer)
        away = self.eq(self.lt(left, right), self.ge(bits, 0))
        one, minus = self.constant(integer, 1, x.lanes), self.constant(integer, -1, x.lanes)
        step = self.add(bits, self.select(away, one, minus))
        least = self.or_(self.and_(self.bits(y, integer), 1 << (dtype.bits - 1)), one)
        moved = self.select(self.eq(left, 0.0), least, step)
        result = self.select(self.eq(left, right), self.bits(y, integer), moved)
        is_nan = self.or_(self.isnan(left), self.isnan(right))
        nan = {64: 0x7FF8 << 48, 32: 0x7FC0 << 16, 16: 0x7E00 if dtype is f16 else 0x7FC0}[dtype.bits]
        return self.bits(self.select(is_nan, self.constant(integer, nan, x.lanes), result), dtype)

    def power_of_two(self, exponent: Value, dtype: DType) -> Value:
        """2**n for an integer n (as wide as the float) for which that is a normal number."""
        fraction = _FRACTION[dtype.name]
        bias = 1023 if dtype is f64 else 127
        return self.bits(self.shl(self.add(exponent, bias), fraction), dtype)

    def ldexp(self, a: Operand, b: Operand) -> Value:
        """a * 2**b for a whole number b of the same type, rounded once."""
        x, y = self.match(a, b)
        if x.dtype is f32:
            # In f64 the product is exact: nothing but the conversion back rounds.
            exponent = self.convert(self.clamp_high(self.clamp_low(y, -400.0), 400.0), i32)
            scaled = self.mul(self.convert(x, f64), self.power_of_two(self.convert(exponent, i64), f64))
            return self._of_infinite_power(x, y, self.convert(scaled, f32))
        exponent = self.convert(self.clamp_high(self.clamp_low(y, -3000.0), 3000.0), i64)
        # At most the last product may round. 2**-969 keeps all bits of what is not lost for certain by the rest.
        low = self.lt(exponent, -1022)
        first = self.select(low, -969, self.minimum(exponent, 1023))
        rest = self.sub(exponent, first)
        second = self.select(self.lt(rest, -1022), -969, self.minimum(rest, 1023))
        third = self.maximum(self.minimum(self.sub(rest, second), 1023), -1022)
        scaled = x
        for part in (first, second, third):
            scaled = self.mul(scaled, self.power_of_two(part, f64))
        return self._of_infinite_power(x, y, scaled)

    def _of_infinite_power(self, x: Value, y: Value, scaled: Value) -> Value:
        """An exponent that is infinite or NaN: the product with 2**y is what IEEE says."""
        power = self.select(self.lt(y, 0.0), self.like(x, 0.0), self.like(x, float("inf")))
        power = self.select(self.isnan(y), y, power)
        return self.select(self.lt(self.abs(y), float("inf")), scaled, self.mul(x, power))

    # ---- instructions of AVX-512

    def has_scalef(self, a: Value) -> bool:
        """Whether `scalef`, `getexp` and `getmant` exist for vectors of this shape."""
        size = a.lanes * a.dtype.bytes
        return self.target.has_avx512 and (size in (16, 32) or size % 64 == 0)

    def scalef(self, a: Value, n: Value) -> Value:
        """a * 2**floor(n) for a float n, rounded once; 0 * 2**inf and inf * 2**-inf are NaN."""
        return self._avx512("scalef", a, n)

    def getexp(self, a: Value) -> Value:
        """floor(log2(|a|)) as a float: -inf of 0, inf of an infinity. Denormals are counted right."""
        return self._avx512("getexp", a)

    def getmant(self, a: Value) -> Value:
        """a / 2**getexp(a), from 1 to 2: 1 of 0 and of infinity, -1 of -0.0, NaN of what is below 0."""
        return self._avx512("getmant", a, more=", i32 8")

    def _avx512(self, name: str, *operands: Value, more: str = "") -> Value:
        """Wider vectors than there are registers go through in halves."""
        first = operands[0]
        bits = first.lanes * first.dtype.bits
        if bits > 512:
            halves = [self.halves(operand) for operand in operands]
            return self.join(*(self._avx512(name, *part, more=more) for part in zip(*halves, strict=True)))
        text = first.type.text
        kind = "pd" if first.dtype is f64 else "ps"
        every = f"i{max(first.lanes, 8)} -1"
        names = []
        for way in zip(*spread(*operands), strict=True):
            inside = ", ".join(f"{text} {operand}" for operand in way) + more
            after = ", i32 4" if bits == 512 else ""  # rounding as the processor is set
            call = f"call {text} @llvm.x86.avx512.mask.{name}.{kind}.{bits}({inside}, {text} poison, {every}{after})"
            names.append(self._line(call))
        return Value(first.type, tuple(names))
