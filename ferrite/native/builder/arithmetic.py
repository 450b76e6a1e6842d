"""Arithmetic, comparison, bits and rounding, each named and defined as in `loops/operations.py`.

Operands are values of one type; a number stands for a constant of that type, a scalar for a vector with the same number
in every lane. Nothing here needs more than one basic block or a library.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

from ferrite.errors import Malformed
from ferrite.loops.dtypes import DType, b8, f32, f64, i32, i64
from ferrite.native.builder.values import Value, scalar, single, u32, u64, vector, wrapped
from ferrite.native.builder.writer import Operand, Writer

_SAME_WIDTH = {32: (i32, u32), 64: (i64, u64)}
_COMPARISONS = {each: getattr(operator, each) for each in ("eq", "ne", "lt", "le", "gt", "ge")}
_BITWISE = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}


class Arithmetic(Writer):
    # ---- the four operations

    def add(self, a: Operand, b: Operand) -> Value:
        return self._arithmetic("add", operator.add, a, b)

    def sub(self, a: Operand, b: Operand) -> Value:
        return self._arithmetic("sub", operator.sub, a, b)

    def mul(self, a: Operand, b: Operand) -> Value:
        return self._arithmetic("mul", operator.mul, a, b)

    def div(self, a: Operand, b: Operand) -> Value:
        """Of floats."""
        return self._both("fdiv", a, b)

    def _both(self, word: str, a: Operand, b: Operand) -> Value:
        x, y = self.match(a, b)
        return self._binary(word, x, y)

    def _arithmetic(self, word: str, python: Callable[[int, int], int], a: Operand, b: Operand) -> Value:
        x, y = self.match(a, b)
        if x.type.dtype.is_float:
            return self._binary(f"f{word}", x, y)
        # Integers only: addresses are made of sums with 0 and products with 1, and sizes are often known.
        if x.literal is not None and y.literal is not None:
            return self.like(x, wrapped(x.dtype, python(int(x.literal), int(y.literal))))
        if y.literal == (1 if word == "mul" else 0):
            return x
        if x.literal == (1 if word == "mul" else 0) and word != "sub":
            return y
        return self._binary(word, x, y)

    def mad(self, a: Operand, b: Operand, c: Operand) -> Value:
        """a * b + c, rounded once where the target can, else twice: for approximations, which allow for both."""
        x, y, z = self.match(a, b, c)
        if self.target.has_fma:
            return self._intrinsic("fma", x.type, x, y, z)
        return self._binary("fadd", self._binary("fmul", x, y), z)

    def neg(self, a: Value) -> Value:
        if a.dtype.is_float:
            return self._unary("fneg", a, a.type)
        return self.sub(0, a)

    def abs(self, a: Value) -> Value:
        if a.dtype.is_float:
            return self._intrinsic("fabs", a.type, a)
        return self._intrinsic("abs", a.type, a, after=", i1 false") if a.dtype.signed else a

    def sqrt(self, a: Value) -> Value:
        return self._intrinsic("sqrt", a.type, a)

    # ---- the smaller and the larger of two

    def minimum(self, a: Operand, b: Operand) -> Value:
        return self._extreme("lt", "min", a, b, nan_wins=True)

    def maximum(self, a: Operand, b: Operand) -> Value:
        return self._extreme("gt", "max", a, b, nan_wins=True)

    def fmin(self, a: Operand, b: Operand) -> Value:
        return self._extreme("lt", "min", a, b, nan_wins=False)

    def fmax(self, a: Operand, b: Operand) -> Value:
        return self._extreme("gt", "max", a, b, nan_wins=False)

    def _extreme(self, word: str, name: str, a: Operand, b: Operand, *, nan_wins: bool) -> Value:
        """Floats: `b if b < a else a` is the processor's min: a if they are equal, and a if there is a NaN. Then
        the NaN that it may have missed is that of b; or, if numbers are to win, what a NaN of a hides is b."""
        x, y = self.match(a, b)
        if x.dtype.is_bool:
            return self._binary("and" if name == "min" else "or", x, y)
        if not x.dtype.is_float:
            if x.literal is not None and y.literal is not None:
                return self.like(x, (min if name == "min" else max)(x.literal, y.literal))
            return self._intrinsic(("s" if x.dtype.signed else "u") + name, x.type, x, y)
        chosen = self.select(self._compare(word, y, x), y, x)
        return self.select(self.isnan(y if nan_wins else x), y, chosen)

    def clamp_low(self, a: Value, low: float) -> Value:
        """One instruction: `low if a < low else a`, so NaN stays."""
        x, y = self.match(a, low)
        return self.select(self._compare("lt", x, y), y, x)

    def clamp_high(self, a: Value, high: float) -> Value:
        """One instruction: `high if a > high else a`, so NaN stays."""
        x, y = self.match(a, high)
        return self.select(self._compare("gt", x, y), y, x)

    # ---- comparison

    def eq(self, a: Operand, b: Operand) -> Value:
        return self._compared("eq", a, b)

    def ne(self, a: Operand, b: Operand) -> Value:
        return self._compared("ne", a, b)

    def lt(self, a: Operand, b: Operand) -> Value:
        return self._compared("lt", a, b)

    def le(self, a: Operand, b: Operand) -> Value:
        return self._compared("le", a, b)

    def gt(self, a: Operand, b: Operand) -> Value:
        return self._compared("gt", a, b)

    def ge(self, a: Operand, b: Operand) -> Value:
        return self._compared("ge", a, b)

    def _compared(self, word: str, a: Operand, b: Operand) -> Value:
        x, y = self.match(a, b)
        return self._compare(word, x, y)

    def _compare(self, word: str, a: Value, b: Value) -> Value:
        """With NaN only `ne` is true."""
        dtype = a.type.dtype
        if a.literal is not None and b.literal is not None:
            return self.constant(b8, _COMPARISONS[word](_exact(a), _exact(b)), a.type.lanes)
        if dtype.is_float:
            predicate = "fcmp une" if word == "ne" else f"fcmp o{word}"
        elif word in ("eq", "ne"):
            predicate = f"icmp {word}"
        else:
            predicate = f"icmp {'s' if dtype.signed else 'u'}{word}"
        return self._binary(predicate, a, b, vector(b8, a.type.lanes))

    def isnan(self, a: Value) -> Value:
        if a.literal is not None:
            return self.constant(b8, a.literal != a.literal, a.type.lanes)
        return self._binary("fcmp uno", a, a, vector(b8, a.type.lanes))

    def isinf(self, a: Value) -> Value:
        return self.eq(self.abs(a), float("inf"))

    def signbit(self, a: Value) -> Value:
        return self.lt(self.integer_bits(a), 0)

    # ---- selection

    def select(self, condition: Value, yes: Operand, no: Operand) -> Value:
        a, b = self.match(yes, no)
        if condition.literal is not None:
            return a if condition.literal else b
        if condition.type.lanes not in (1, a.type.lanes):
            if a.type.lanes != 1:
                raise Malformed(f"{condition.type.lanes} and {a.type.lanes} lanes", where="native builder")
            a, b = self.splat(a, condition.type.lanes), self.splat(b, condition.type.lanes)
        test, text = condition.type.text, a.type.text
        ways = max(condition.ways, a.ways, b.ways)
        triples = zip(*(each.names * (ways // each.ways) for each in (condition, a, b)), strict=True)
        return Value(a.type, tuple([self._line(f"select {test} {c}, {text} {x}, {text} {y}") for c, x, y in triples]))

    # ---- bits

    def and_(self, a: Operand, b: Operand) -> Value:
        return self._bitwise("and", a, b)

    def or_(self, a: Operand, b: Operand) -> Value:
        return self._bitwise("or", a, b)

    def xor(self, a: Operand, b: Operand) -> Value:
        return self._bitwise("xor", a, b)

    def not_(self, a: Value) -> Value:
        return self._bitwise("xor", a, self.like(a, True if a.dtype.is_bool else -1))

    def _bitwise(self, word: str, a: Operand, b: Operand) -> Value:
        x, y = self.match(a, b)
        if x.literal is not None and y.literal is not None:
            made = _BITWISE[word](int(x.literal), int(y.literal))
            return self.like(x, bool(made) if x.dtype.is_bool else wrapped(x.dtype, made))
        if x.dtype.is_bool and word != "xor":
            # A truth value that is known decides, or says nothing.
            for known, other in ((x, y), (y, x)):
                if known.literal is not None:
                    return other if known.literal == (word == "and") else self.like(other, word == "or")
        return self._binary(word, x, y)

    def popcount(self, a: Value) -> Value:
        return self._intrinsic("ctpop", a.type, a)

    def shl(self, a: Operand, b: Operand) -> Value:
        """Any count: one that is negative or too large gives 0."""
        x, count = self.match(a, b)
        bits = x.dtype.bits
        if count.literal is not None:
            return self._binary("shl", x, count) if 0 <= count.literal < bits else self.like(x, 0)
        inside = self._binary("icmp ult", count, self.like(count, bits), vector(b8, x.type.lanes))
        shifted = self._binary("shl", x, self.and_(count, bits - 1))
        return self.select(inside, shifted, 0)

    def shr(self, a: Operand, b: Operand) -> Value:
        """Any count, as if there were sign bits, or without a sign zeros, without end."""
        x, count = self.match(a, b)
        bits = x.dtype.bits
        if x.literal is not None and count.literal is not None and 0 <= count.literal < bits:
            return self.like(x, int(x.literal) >> int(count.literal))
        if x.dtype.signed:
            if count.literal is not None:
                return self._binary("ashr", x, self.like(x, count.literal if 0 <= count.literal < bits else bits - 1))
            return self._binary("ashr", x, self._intrinsic("umin", x.type, count, self.like(count, bits - 1)))
        if count.literal is not None:
            return self._binary("lshr", x, count) if 0 <= count.literal < bits else self.like(x, 0)
        inside = self._binary("icmp ult", count, self.like(count, bits), vector(b8, x.type.lanes))
        return self.select(inside, self._binary("lshr", x, self.and_(count, bits - 1)), 0)

    def shr_logical(self, a: Value, count: int) -> Value:
        """Zeros come in from the left, whatever the sign."""
        return self._binary("lshr", a, self.like(a, count))

    def bits(self, a: Value, dtype: DType) -> Value:
        """The same bits as another type; of another width, in more or fewer lanes."""
        type = vector(dtype, a.type.lanes * a.type.dtype.bits // dtype.bits)
        if type.element == a.type.element:
            return Value(type, a.names)
        return self._unary("bitcast", a, type, f" to {type.text}")

    def integer_bits(self, a: Value, *, signed: bool = True) -> Value:
        """The bits of a float of 32 or 64 bits as an integer."""
        return self.bits(a, _SAME_WIDTH[a.dtype.bits][0 if signed else 1])

    def copysign(self, a: Operand, b: Operand) -> Value:
        """By bits. LLVM's copysign looks through conversions for the sign, and so may come to convert an f64 to f16 at
        once; the routine for that is in no library here."""
        x, y = self.match(a, b)
        sign = 1 << (x.dtype.bits - 1)
        size, other = (self.integer_bits(each, signed=False) for each in (x, y))
        return self.bits(self.or_(self.and_(size, sign - 1), self.and_(other, sign)), x.dtype)

    # ---- rounding

    def round(self, a: Value) -> Value:
        """To the nearest, ties to even."""
        if self.target.has_rounding:
            return self._intrinsic("roundeven", a.type, a)
        return self._small_only(a, self.copysign(self._nearest(self.abs(a)), a))

    def floor(self, a: Value) -> Value:
        if self.target.has_rounding:
            return self._intrinsic("floor", a.type, a)
        near = self.copysign(self._nearest(self.abs(a)), a)
        down = self.sub(near, self.select(self.gt(near, a), self.like(a, 1.0), self.like(a, 0.0)))
        return self._small_only(a, self.copysign(down, a))

    def ceil(self, a: Value) -> Value:
        if self.target.has_rounding:
            return self._intrinsic("ceil", a.type, a)
        near = self.copysign(self._nearest(self.abs(a)), a)
        up = self.add(near, self.select(self.lt(near, a), self.like(a, 1.0), self.like(a, 0.0)))
        return self._small_only(a, self.copysign(up, a))

    def trunc(self, a: Value) -> Value:
        if self.target.has_rounding:
            return self._intrinsic("trunc", a.type, a)
        size = self.abs(a)
        near = self._nearest(size)
        down = self.sub(near, self.select(self.gt(near, size), self.like(a, 1.0), self.like(a, 0.0)))
        return self._small_only(a, self.copysign(down, a))

    def _nearest(self, size: Value) -> Value:
        """Of a number that is not negative: adding 2**23 leaves no room for a fraction."""
        whole = 2.0 ** (52 if size.dtype is f64 else 23)
        return self.sub(self.add(size, whole), whole)

    def _small_only(self, a: Value, rounded: Value) -> Value:
        """From 2**23 on every number is whole; NaN and infinity stay as they are too."""
        return self.select(self.lt(self.abs(a), 2.0 ** (52 if a.dtype is f64 else 23)), rounded, a)

    # ---- questions about all lanes

    def any(self, mask: Value) -> Value:
        """Whether any lane of any way is true, as a scalar bool."""
        return self._over_ways_and_lanes("or", "ne", mask, lambda bits: 0)

    def all(self, mask: Value) -> Value:
        """Whether every lane of every way is true, as a scalar bool."""
        return self._over_ways_and_lanes("and", "eq", mask, lambda bits: -1)

    def _over_ways_and_lanes(self, word: str, test: str, mask: Value, against: Callable[[int], int]) -> Value:
        if mask.literal is not None:
            return self.constant(b8, mask.literal)
        names = list(mask.names)
        while len(names) > 1:
            pairs = zip(names[::2], names[1::2], strict=False)
            joined = [self._line(f"{word} {mask.type.text} {x}, {y}") for x, y in pairs]
            names = joined + names[len(joined) * 2 :]
        lanes = mask.type.lanes
        if lanes == 1:
            return Value(mask.type, (names[0],))
        bits = self._line(f"bitcast {mask.type.text} {names[0]} to i{lanes}")
        return Value(scalar(b8), (self._line(f"icmp {test} i{lanes} {bits}, {against(lanes)}"),))

    def mask_bits(self, mask: Value) -> Value:
        """The lanes of a mask as the low bits of an i64, with the ways of the mask."""
        lanes = mask.type.lanes
        if lanes == 1:
            return self._unary("zext", mask, scalar(i64), " to i64")
        names = [self._line(f"bitcast {mask.type.text} {name} to i{lanes}") for name in mask.names]
        if lanes < 64:
            names = [self._line(f"zext i{lanes} {name} to i64") for name in names]
        return Value(scalar(i64), tuple(names))


def _exact(value: Value) -> bool | int | float:
    """The number that a literal is in its type: f32 rounds."""
    assert value.literal is not None
    return single(value.literal) if value.dtype is f32 else value.literal
