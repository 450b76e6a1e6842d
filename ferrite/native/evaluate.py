"""Expressions and indices as instructions, at one place of a loop nest.

What does not vary over the lanes is computed once, as a scalar. Loads follow from how an address grows along the lanes:
by nothing (one element for all), by one (neighbours), by a step (strided), or irregularly (gathered). Errors stop the
kernel: `Checked` and `Require` leave it by way of `fail`, and whoever called it finds out what to raise.

Note [Halves of 64 bits]
    Random numbers are products of 32 bits by 32, of which both halves are needed. Processors multiply so in lanes of 64
    bits, and take the low half of each. So the words of the generator are kept there, those of the even lanes apart
    from those of the odd ones, and what stands above them is never cleared; lanes are moved only at the end. The ten
    rounds are a loop. A mask for dropout of 786432 elements (AVX-512), milliseconds to compile and to run:

        words in lanes of 32 bits, one round after the other    12    1.36
        in halves of 64 bits, one round after the other         17    1.08
        in halves of 64 bits, a loop                             5    1.26
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TypeAlias

from ferrite.errors import Unsupported
from ferrite.loops.dtypes import DType, b8, f32, i32, i64, u8
from ferrite.loops.index import (
    ZERO,
    Atom,
    Axis,
    Data,
    FloorDiv,
    Index,
    Least,
    Mod,
    Monomial,
    Most,
    Size,
    bounds,
    coefficient_of,
    free_axes,
    holds_data,
    known_nonnegative,
    parts,
)
from ferrite.loops.nodes import (
    Apply,
    Bits,
    Buffer,
    Cast,
    Checked,
    Const,
    Expr,
    Fold,
    Guarded,
    Load,
    Position,
    Random,
    Reduce,
    Require,
    Select,
)
from ferrite.loops.operations import OPERATIONS
from ferrite.loops.rewrite import walk
from ferrite.loops.shapes import linear
from ferrite.native.builder import Builder, Value, u32, u64
from ferrite.native.math import FUNCTIONS
from ferrite.native.scope import Scope

I32_MOST = (1 << 31) - 1
U32_MOST = (1 << 32) - 1


Term: TypeAlias = "tuple[int, Monomial]"


class Evaluator:
    """Writes expressions with a builder. `reduce` is how a reduction is written (`reduce.py`)."""

    def __init__(
        self,
        builder: Builder,
        buffers: Mapping[Buffer, Value],
        sizes: Mapping[Size, Value],
        fail: Callable[[], None],
    ) -> None:
        self.b, self.buffers, self.sizes, self.fail = builder, buffers, sizes, fail
        self.read: frozenset[Buffer] = frozenset()  # what is looked at, before it is written or after
        self.streamed: frozenset[Buffer] = frozenset()  # to which whole vectors go past the caches (`stream.py`)

    def reduce(self, node: Reduce | Fold, scope: Scope) -> Value:
        raise NotImplementedError

    # ---- expressions

    def value(self, node: Expr, scope: Scope) -> Value:
        """The value of an expression: scalar if it is the same in all lanes."""
        found = scope.find(node)
        if found is None:
            found = scope.known[node] = self._compute(node, scope)
        return found

    def lanes(self, node: Expr, scope: Scope) -> Value:
        """The value in every lane of every way of the scope."""
        return self.spread(self.value(node, scope), scope)

    def spread(self, value: Value, scope: Scope) -> Value:
        if scope.vector is None:
            return value
        return self.b.with_ways(self.b.splat(value, scope.vector.lanes), scope.vector.ways)

    def _compute(self, node: Expr, scope: Scope) -> Value:
        match node:
            case Const(value=number, kind=dtype):
                return self.constant(number, dtype)
            case Load():
                return self._load(node, scope)
            case Cast(kind=dtype, value=inner):
                return self.b.convert(self.value(inner, scope), dtype)
            case Bits(kind=dtype, value=inner):
                given = self.value(inner, scope)  # a truth value is a byte in memory, but not in registers
                return self.b.bits(self.b.convert(given, u8) if given.dtype is b8 else given, dtype)
            case Apply():
                return self._apply(node, scope)
            case Select(condition=condition, yes=yes, no=no):
                return self._select(*(self.value(part, scope) for part in (condition, yes, no)))
            case Guarded():
                return self._guarded(node, scope)
            case Position(index=place):
                return self.index(place, scope)
            case Checked():
                return self._checked(node, scope)
            case Require(condition=condition, value=inner):
                self.require(self.value(condition, scope), scope)
                return self.value(inner, scope)
            case Random():
                return self._random(node, scope)
            case Reduce() | Fold():
                return self.reduce(node, scope)
        raise Unsupported(f"{type(node).__name__} in native code")

    def constant(self, number: bool | int | float, dtype: DType) -> Value:
        if dtype.is_half:
            return self.b.convert(self.b.constant(f32, number), dtype)
        return self.b.constant(dtype, number)

    def _select(self, condition: Value, yes: Value, no: Value) -> Value:
        lanes = max(condition.lanes, yes.lanes, no.lanes)
        return self.b.select(condition, self.b.splat(yes, lanes), self.b.splat(no, lanes))

    def _apply(self, node: Apply, scope: Scope) -> Value:
        operands = [self.value(operand, scope) for operand in node.operands]
        dtype = operands[0].dtype
        # Halves are computed in f32, and what is no comparison is rounded back; a neighbour is one among halves.
        if dtype.is_half and node.operation != "nextafter":
            made = self.apply(node.operation, [self.b.convert(operand, f32) for operand in operands])
            return made if OPERATIONS[node.operation].result == "bool" else self.b.convert(made, dtype)
        return self.apply(node.operation, operands)

    def apply(self, operation: str, operands: list[Value]) -> Value:
        function = FUNCTIONS.get(operation)
        if function is not None:
            return function(self.b, *operands)
        method = getattr(self.b, operation, None)
        if method is None:
            raise Unsupported(f"the operation {operation} in native code")
        return method(*operands)

    # ---- memory

    def _load(self, node: Load, scope: Scope) -> Value:
        self._check_repeated(node, scope)
        offset = linear(node.index, node.buffer.strides)
        dtype = node.dtype
        vector = scope.vector
        step = None if vector is None else coefficient_of(offset, vector.axis)
        if vector is None or (step is not None and not step.terms and step.constant == 0):
            return self._load_one(node.buffer, offset, scope)
        if step is None:
            offsets = self.offsets(offset, scope)
            return self.b.gather(dtype, self.buffers[node.buffer], offsets, mask=scope.mask)
        base, start = self.address(node.buffer, offset, scope)
        lanes, ways = vector.lanes, vector.ways
        if step.constant == 1 and not step.terms:
            for ask in scope.ahead.get(node, ()):
                self.b.prefetch(base, dtype, start, ask.distance, lanes * ways, level=ask.cache)
            return self.b.load(dtype, base, start, lanes, ways, mask=scope.mask)
        stride = self.scalar_index(step, scope)
        return self.b.load_strided(dtype, base, start, stride, lanes, ways, mask=scope.mask)

    def _check_repeated(self, node: Load, scope: Scope) -> None:
        """Where memory repeats, an index has no part in the address; what is checked in it may fail all the same."""
        for place, stride in zip(node.index, node.buffer.strides, strict=True):
            if not stride.terms and stride.constant == 0 and holds_data(place):
                self.index(place, scope)

    def _load_one(self, buffer: Buffer, offset: Index, scope: Scope) -> Value:
        """One element for all lanes; if no lane counts, its address may be bad."""
        dtype = buffer.dtype
        if scope.mask is None:
            return self.b.load(dtype, *self.address(buffer, offset, scope))
        nothing = self.constant(False if dtype is b8 else 0, dtype)
        with self.b.if_(self.b.any(scope.mask), (nothing,)) as branch:
            branch.give(self.b.load(dtype, *self.address(buffer, offset, scope.inner())))
        return branch.results[0]

    def address(self, buffer: Buffer, offset: Index, scope: Scope) -> tuple[Value, Value]:
        """A pointer that the innermost loop around does not move, and how many elements after it."""
        still, moving = _apart(offset, _none_of(scope.innermost_axes()))
        return self._pointer(buffer, still, scope), self.scalar_index(moving, scope)

    def _pointer(self, buffer: Buffer, offset: Index, scope: Scope) -> Value:
        """The address of an element; what loops around do not move of it may be known already."""
        if not offset.terms:
            return self.b.advance(self.buffers[buffer], buffer.dtype, offset.constant)
        key = ("address", buffer, offset)
        found = scope.find(key)
        if found is None:
            still, moving = _apart(offset, _none_of(scope.innermost_axes()))
            if not moving.terms:
                still, moving = moving, still
            base = self._pointer(buffer, still, scope)
            found = scope.known[key] = self.b.advance(base, buffer.dtype, self.scalar_index(moving, scope))
        return found

    def hoist_address(self, buffer: Buffer, place: tuple[Index, ...], axis: Axis, scope: Scope) -> None:
        """Before a loop over `axis`: find what the loop will not move of an address."""
        still, _ = _apart(linear(place, buffer.strides), lambda axes: axis not in axes and scope.binds(axes))
        if free_axes(still):
            self._pointer(buffer, still, scope)

    def step_address(self, load: Load, lane: Axis, row: Axis, rows: int, first: Scope, scope: Scope) -> None:
        """`hoist_address` so many rows after a scope where it was done: all that the row adds is a number."""
        place = linear(load.index, load.buffer.strides)
        step = coefficient_of(place, row)
        still, _ = _apart(place, lambda axes: lane not in axes and scope.binds(axes))
        key = ("address", load.buffer, still)
        known = first.known.get(key)
        if known is not None and step is not None and not step.terms:
            scope.known[key] = self.b.advance(known, load.dtype, step.constant * rows)

    def offsets(self, offset: Index, scope: Scope) -> Value:
        """Element offsets, lane by lane, all positions in lanes."""
        value = self.index(offset, scope)
        return self.spread(value, scope)

    def store(self, buffer: Buffer, place: tuple[Index, ...], value: Value, scope: Scope) -> None:
        """Write a value to one element, or to one for each lane."""
        offset = linear(place, buffer.strides)
        vector = scope.vector
        if vector is None:
            self.b.store(value, *self.address(buffer, offset, scope))
            return
        step = coefficient_of(offset, vector.axis)
        value = self.spread(value, scope)
        if step is None:
            self.b.scatter(value, self.buffers[buffer], self.offsets(offset, scope), mask=scope.mask)
            return
        base, start = self.address(buffer, offset, scope)
        if buffer in self.streamed and scope.mask is None:
            self.b.store(value, base, start, nontemporal=True, align=vector.lanes * buffer.dtype.bytes)
        elif not step.terms and step.constant == 1:
            self.b.store(value, base, start, mask=scope.mask, is_read=buffer in self.read)
        else:
            self.b.store_strided(value, base, start, self.scalar_index(step, scope), mask=scope.mask)

    # ---- conditions

    def _guarded(self, node: Guarded, scope: Scope) -> Value:
        """Lanes where the condition fails are left alone. A condition for all lanes is a branch, and so is one for each
        if a reduction depends on it: where no lane asks, it is not computed."""
        condition = self.value(node.condition, scope)
        otherwise = self.value(node.otherwise, scope)
        if condition.literal is not None:
            return self.value(node.value, scope) if condition.literal else otherwise
        if condition.lanes == 1 and condition.ways == 1:
            varies = scope.varies(node.value) or scope.varies(node.otherwise)
            rest = self.spread(otherwise, scope) if varies else otherwise
            with self.b.if_(condition, (rest,)) as branch:
                inside = self.value(node.value, scope.inner())
                branch.give(self.spread(inside, scope) if varies else inside)
            return branch.results[0]
        mask = condition if scope.mask is None else self.b.and_(scope.mask, condition)
        if not any(isinstance(part, (Reduce, Fold)) for part in walk(node.value)):
            return self._select(condition, self.value(node.value, scope.inner(mask=mask)), otherwise)
        rest = self.spread(otherwise, scope)
        with self.b.if_(self.b.any(mask), (rest,), unlikely=True) as branch:
            branch.give(self._select(condition, self.value(node.value, scope.inner(mask=mask)), rest))
        return branch.results[0]

    def require(self, condition: Value, scope: Scope) -> None:
        """Leave the kernel if the condition fails in a lane that counts."""
        if condition.literal:
            return
        bad = self.b.not_(condition)
        if scope.mask is not None:
            bad = self.b.and_(self.spread(bad, scope), scope.mask)
        with self.b.if_(self.b.any(bad), unlikely=True):
            self.fail()

    def _checked(self, node: Checked, scope: Scope) -> Value:
        value = self.b.convert(self.value(node.value, scope), i64)
        size = self.scalar_index(node.size, scope)
        low = self.b.neg(size) if node.wrap else self.b.constant(i64, 0)
        inside = self.b.and_(self.b.ge(value, low), self.b.lt(value, size))
        self.require(inside, scope)
        return self.b.select(self.b.lt(value, 0), self.b.add(value, size), value) if node.wrap else value

    # ---- indices

    def scalar_index(self, value: Index, scope: Scope) -> Value:
        """An index as an i64; the axis in lanes counts as where the lanes start."""
        return self._kept(("scalar", value), value, scope, lambda: self._polynomial(value, scope, i64, vector=False))

    def index(self, value: Index, scope: Scope) -> Value:
        """An index as i64, lane by lane where it varies."""
        if scope.vector is None or scope.vector.axis not in free_axes(value):
            return self.scalar_index(value, scope)
        narrow = i32 if _fits_i32(value) else i64
        return self._kept(
            ("lanes", value),
            value,
            scope,
            lambda: self.b.convert(self._polynomial(value, scope, narrow, vector=True), i64),
        )

    def _kept(self, key: object, node: Index | Atom, scope: Scope, make: Callable[[], Value]) -> Value:
        """What is made of data changes with it: only the expressions in it are kept, and forgotten in time."""
        if holds_data(node):
            return make()
        found = scope.find(key)
        if found is None:
            found = scope.known[key] = make()
        return found

    def _polynomial(self, value: Index, scope: Scope, dtype: DType, *, vector: bool) -> Value:
        result = self.b.constant(dtype, value.constant)
        for coefficient, monomial in value.terms:
            term = self.b.constant(dtype, coefficient)
            for atom in monomial:
                term = self.b.mul(term, self._atom(atom, scope, dtype, vector=vector))
            result = self.b.add(result, term)
        return result

    def _atom(self, atom: Atom, scope: Scope, dtype: DType, *, vector: bool) -> Value:
        key = ("atom", atom, dtype.name, vector)
        return self._kept(key, atom, scope, lambda: self._compute_atom(atom, scope, dtype, vector=vector))

    def _compute_atom(self, atom: Atom, scope: Scope, dtype: DType, *, vector: bool) -> Value:
        def part(value: Index) -> Value:
            return self._polynomial(value, scope, dtype, vector=vector)

        match atom:
            case Axis():
                return self._axis(atom, scope, dtype, vector=vector)
            case Size():
                return self.b.convert(self.sizes[atom], dtype)
            case FloorDiv(dividend=a, divisor=c):
                plain = _are_counts(a, c)
                return self.b.split(part(a), part(c))[0] if plain else self.b.floordiv(part(a), part(c))
            case Mod(dividend=a, divisor=c):
                plain = _are_counts(a, c)
                return self.b.split(part(a), part(c))[1] if plain else self.b.floormod(part(a), part(c))
            case Least(left=a, right=c):
                return self.b.minimum(part(a), part(c))
            case Most(left=a, right=c):
                return self.b.maximum(part(a), part(c))
            case Data(value=expression):
                return self.b.convert(self.value(expression, scope), dtype)
        raise Unsupported(f"{type(atom).__name__} in an index of native code")

    def _axis(self, axis: Axis, scope: Scope, dtype: DType, *, vector: bool) -> Value:
        start = self.b.convert(scope.position(axis), dtype)
        if not vector or scope.vector is None or axis is not scope.vector.axis:
            return start
        return self.b.add(start, self.b.lane_numbers(dtype, scope.vector.lanes, scope.vector.ways))

    # ---- random numbers

    def _random(self, node: Random, scope: Scope) -> Value:
        """Philox 4x32-10, word for word as `oracle.philox` says."""
        key = ("words", node.seed, node.stream, node.counter)
        words = scope.find(key)
        if words is None:
            words = scope.known[key] = self._philox(node, scope)  # type: ignore[assignment]
        first, second = words  # type: ignore[misc]
        b = self.b
        if node.draw == "bits":
            return b.bits(first, i32)
        uniform = self._unit(first)
        if node.draw == "uniform":
            return uniform
        radius = b.sqrt(b.mul(FUNCTIONS["log"](b, b.sub(1.0, uniform)), -2.0))
        return b.mul(radius, FUNCTIONS["cos"](b, b.mul(self._unit(second), 6.283185307179586)))

    def _unit(self, word: Value) -> Value:
        return self.b.mul(self.b.convert(self.b.bits(self.b.shr_logical(word, 8), i32), f32), 2.0**-24)

    def _philox(self, node: Random, scope: Scope) -> tuple[Value, Value]:
        """The first two words. See Note [Halves of 64 bits]."""
        b = self.b
        seed, counter = self.value(node.seed, scope), self.index(node.counter, scope)
        ways = max(seed.ways, counter.ways)
        low = lambda wide: _apart_by_lanes(b, b.bits(b.convert(wide, i32), u32), ways)
        high = lambda wide: _apart_by_lanes(b, b.bits(b.convert(b.shr_logical(wide, 32), i32), u32), ways)
        k0, k1, c0 = low(seed), high(seed), low(counter)
        c1 = b.constant(u64, 0) if _fits_u32(node.counter) else high(counter)
        c2, c3 = b.constant(u64, node.stream), b.constant(u64, 0)
        lanes, pieces = max(c0.lanes, k0.lanes), max(c0.ways, k0.ways)
        start = [b.with_ways(b.splat(word, lanes), pieces) for word in (c0, c1, c2, c3)]
        with b.loop(0, 10, 1, [*start, b.splat(k0, lanes), b.splat(k1, lanes)]) as rounds:
            c0, c1, c2, c3, k0, k1 = rounds.carried
            left, right = b.mul(b.and_(c0, U32_MOST), 0xD2511F53), b.mul(b.and_(c2, U32_MOST), 0xCD9E8D57)
            first = b.xor(b.xor(b.shr_logical(right, 32), c1), k0)
            third = b.xor(b.xor(b.shr_logical(left, 32), c3), k1)
            rounds.next(first, right, third, left, b.add(k0, 0x9E3779B9), b.add(k1, 0xBB67AE85))
        first, second = rounds.results[:2]
        if seed.lanes == counter.lanes == 1:
            return b.convert(first, u32), b.convert(second, u32)
        return _together(b, first), _together(b, second)


def _apart_by_lanes(b: Builder, words: Value, ways: int) -> Value:
    """The even lanes, in 64 bits each, then the odd ones, as further ways. One lane stays one."""
    if words.lanes == 1:
        return b.convert(words, u64)
    even = b.bits(b.with_ways(words, ways), u64)
    return b.join_ways([even, b.shr_logical(even, 32)])


def _together(b: Builder, words: Value) -> Value:
    """The low halves, lane by lane again."""
    half = words.ways // 2
    even, odd = Value(words.type, words.names[:half]), Value(words.type, words.names[half:])
    return b.bits(b.or_(b.and_(even, U32_MOST), b.shl(odd, 32)), u32)


def _are_counts(dividend: Index, divisor: Index) -> bool:
    return known_nonnegative(dividend) and known_nonnegative(divisor - 1)


def _none_of(moving: Collection[Axis]) -> Callable[[frozenset[Axis]], bool]:
    return lambda axes: axes.isdisjoint(moving)


def _apart(value: Index, is_still: Callable[[frozenset[Axis]], bool]) -> tuple[Index, Index]:
    """The terms whose axes do not move, and the rest with the constant. What is read from data counts as moving."""
    if not value.terms:
        return ZERO, value
    still: list[Term] = []
    moving: list[Term] = []
    for term in value.terms:
        for atom in term[1]:
            if holds_data(atom) or not is_still(free_axes(atom)):
                moving.append(term)
                break
        else:
            still.append(term)
    if not still:
        return ZERO, value
    if not moving and value.constant == 0:
        return value, ZERO
    return Index(0, tuple(still)), Index(value.constant, tuple(moving))


def _fits_u32(value: Index) -> bool:
    low, high = bounds(value)
    return low is not None and high is not None and low >= 0 and high <= U32_MOST


def _fits_i32(value: Index) -> bool:
    """Whether the index and all that it is made of stays within 32 bits."""
    low, high = bounds(value)
    if low is None or high is None or low < -I32_MOST or high > I32_MOST:
        return False
    for coefficient, monomial in value.terms:
        reach = abs(coefficient)
        for atom in monomial:
            if isinstance(atom, Data) or not all(_fits_i32(part) for part in parts(atom)):
                return False
            low, high = bounds(Index(0, ((1, (atom,)),)))
            if low is None or high is None:
                return False
            reach *= max(abs(low), abs(high))
        if reach > I32_MOST:
            return False
    return True
