"""Loads and stores: contiguous, the first n lanes, strided, gathered and scattered, with and without masks.

An address is a scalar pointer and an offset in elements. Vectors are never assumed to be aligned to more than their
elements. Way k of a contiguous access stands `k * lanes` elements further on. Masked lanes are not touched: they may
lie on a page that does not exist. Bools are bytes in memory, and any byte but 0 is true.

Note [The only lane of narrowed lanes]
    For AVX-512, LLVM narrows lanes and stores them under a mask in one instruction. If it then finds that the mask has
    but one lane, it stores that lane as an element, and LLVM 22.1 stores it as it was before: eight bytes for four,
    over the next element or past the end (llvm-project issue 179489; mended since). There are two ways to come there.
    A store under a mask that is known: `_store_masked` stores the only lane of such a mask itself. And a store of what
    was there before except in some lanes, `y[i] = where(i == 3, x[i], y[i])`, which LLVM turns into one under a mask,
    and finds the lanes where the text has a comparison: `store` hides what is written to memory that is also read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TypeAlias

from ferrite.loops.dtypes import DType, b8, i32, i64, u8
from ferrite.native.builder.shuffle import Shuffle
from ferrite.native.builder.values import Value, scalar, vector
from ferrite.native.builder.writer import memory_element, memory_type


@dataclass(frozen=True, slots=True)
class Tail:
    """The first `count` lanes, counted over all ways."""

    count: Value
    mask: Value


Mask: TypeAlias = "Tail | Value | None"
CACHE_LINE = 64  # bytes
LARGEST_I32_STRIDE = 2**20  # so that lane * stride fits an i32 with room


class Memory(Shuffle):
    def tail(self, count: Value, lanes: int, ways: int = 1) -> Tail:
        """A mask for what is left at the end of a loop: `count` is an i64, from 0 up, and may exceed all lanes."""
        if count.literal is not None:
            return Tail(count, self._first_lanes(int(count.literal), lanes, ways))
        least = self._intrinsic("smin", count.type, count, self.constant(i64, lanes * ways))
        numbers = self.lane_numbers(i32, lanes, ways)
        return Tail(count, self.lt(numbers, self.splat(self.convert(least, i32), lanes)))

    def _first_lanes(self, count: int, lanes: int, ways: int) -> Value:
        """A known mask."""
        if lanes == 1:
            return Value(vector(b8, 1), tuple("true" if way < count else "false" for way in range(ways)))
        names = []
        for way in range(ways):
            lane_is_on = (way * lanes + lane < count for lane in range(lanes))
            names.append(f"<{', '.join('i1 true' if on else 'i1 false' for on in lane_is_on)}>")
        return Value(vector(b8, lanes), tuple(names))

    # ---- contiguous

    def load(
        self,
        dtype: DType,
        base: Value,
        offset: Value | int = 0,
        lanes: int = 1,
        ways: int = 1,
        *,
        mask: Mask = None,
        otherwise: Value | None = None,
        invariant: bool = False,
        align: int | None = None,
    ) -> Value:
        """Elements that stand next to one another. Masked lanes are `otherwise`, or zeros.

        `invariant`: nobody writes there while the function runs. `align`: in bytes, if more than an element is known.
        """
        address = self.advance(base, dtype, offset)
        stored = _stored(dtype)
        if mask is not None:
            fill = self._fill(dtype, lanes, otherwise)
            if isinstance(mask, Tail) and not self._masks(stored, lanes):
                return self._loaded(self._load_tail(stored, address, lanes, mask, fill, ways), dtype)
            return self._loaded(self._load_masked(stored, address, lanes, _lanes_of(mask), fill, ways), dtype)
        text = memory_type(dtype, lanes)[0]
        after = f", align {align or stored.bytes}{', !invariant.load !1' if invariant else ''}"
        places = [self.advance(address, stored, way * lanes).names[0] for way in range(ways)]
        names = [self._line(f"load {text}, ptr {place}{after}") for place in places]
        return self._loaded(Value(vector(stored, lanes), tuple(names)), dtype)

    def store(
        self,
        value: Value,
        base: Value,
        offset: Value | int = 0,
        *,
        mask: Mask = None,
        nontemporal: bool = False,
        align: int | None = None,
        is_read: bool = False,
    ) -> None:
        """`nontemporal` goes past the caches; it needs `align` to be that of the whole vector. `is_read`: what is
        there may be a part of the value."""
        address = self.advance(base, value.dtype, offset)
        data = self._as_stored(value)
        if isinstance(mask, Tail) and not self._masks(data.dtype, data.lanes):
            self._store_tail(data, address, mask)
            return
        if mask is not None:
            self._store_masked(data, address, _lanes_of(mask))
            return
        if is_read and self._may_be_narrowed(data):
            data = self._in_register(data, "v")
        text = data.type.text
        after = f", align {align or data.dtype.bytes}{', !nontemporal !2' if nontemporal else ''}"
        places = [self.advance(address, data.dtype, way * data.lanes).names[0] for way in range(data.ways)]
        for name, place in zip(data.names, places, strict=True):
            self._void(f"store {text} {name}, ptr {place}{after}")

    def _may_be_narrowed(self, data: Value) -> bool:
        """Whether it is a register of lanes that LLVM could store as wider ones, cut. See Note [The only lane of
        narrowed lanes]."""
        in_register = data.lanes * data.dtype.bytes in (16, 32, 64)
        return self.target.has_avx512 and in_register and data.type.element in ("i8", "i16", "i32")

    def are_aligned(self, bases: Sequence[Value]) -> Value:
        """Whether every pointer is a multiple of a cache line."""
        numbers = [Value(scalar(i64), (self._line(f"ptrtoint ptr {base.names[0]} to i64"),)) for base in bases]
        return self.eq(self.and_(reduce(self.or_, numbers), CACHE_LINE - 1), 0)

    def streams_end(self) -> None:
        """Stores past the caches are seen by others before all that follows."""
        if self.target.is_x86:
            self._void("call void @llvm.x86.sse.sfence()")

    def prefetch(
        self, base: Value, dtype: DType, offset: Value | int, distance: Value | int, count: int, *, level: int = 1
    ) -> None:
        """Asks for `count` elements that stand a distance after an offset, into the first cache or the second. Memory
        that is not there does no harm."""
        start = self.advance(self.advance(base, dtype, offset), dtype, distance)
        for line in range(0, count * _stored(dtype).bytes, CACHE_LINE):
            place = self.advance(start, u8, line)
            self._void(f"call void @llvm.prefetch.p0(ptr {place.names[0]}, i32 0, i32 {4 - level}, i32 1)")

    def broadcast(
        self, dtype: DType, base: Value, offset: Value | int, lanes: int, *, invariant: bool = False
    ) -> Value:
        """One element in all lanes."""
        return self.splat(self.load(dtype, base, offset, invariant=invariant), lanes)

    def _masks(self, stored: DType, lanes: int) -> bool:
        return lanes > 1 and self.target.has_masked(stored.bits)

    def _load_tail(self, stored: DType, address: Value, lanes: int, tail: Tail, fill: Value, ways: int) -> Value:
        """Without masks: all at once if all lanes are on, else lane by lane."""
        ways = max(ways, tail.mask.ways)
        with self.either(self.ge(tail.count, lanes * ways)) as (whole, part):
            with self.inside(whole):
                whole.give(self.load(stored, address, 0, lanes, ways))
            with self.inside(part):
                part.give(self._load_masked(stored, address, lanes, tail.mask, fill, ways))
        return whole.results[0]

    def _store_tail(self, data: Value, address: Value, tail: Tail) -> None:
        data = self.with_ways(data, tail.mask.ways)
        with self.either(self.ge(tail.count, data.lanes * data.ways)) as (whole, part):
            with self.inside(whole):
                self.store(data, address)
            with self.inside(part):
                self._store_masked(data, address, tail.mask)

    def _load_masked(self, stored: DType, address: Value, lanes: int, active: Value, fill: Value, ways: int) -> Value:
        ways = max(ways, active.ways)
        if self._masks(stored, lanes):
            text, name = memory_type(stored, lanes)
            names = []
            for way in range(ways):
                place = self.advance(address, stored, way * lanes).names[0]
                mask = f"{active.type.text} {active.way(way).names[0]}"
                inside = f"ptr {place}, i32 {stored.bytes}, {mask}, {text} {fill.way(way).names[0]}"
                names.append(self._line(f"call {text} @llvm.masked.load.{name}.p0({inside})"))
            return Value(vector(stored, lanes), tuple(names))
        starts = [self.advance(address, stored, way * lanes) for way in range(ways)]
        results = [
            self._collect(stored, lanes, active.way(way), fill.way(way), start, None)
            for way, start in enumerate(starts)
        ]
        return self.join_ways(results)

    def _store_masked(self, data: Value, address: Value, active: Value) -> None:
        lanes, stored = data.lanes, data.dtype
        masked = self._masks(stored, lanes)
        for way in range(max(data.ways, active.ways)):
            place = self.advance(address, stored, way * lanes)
            only = _only_lane(active.way(way).names[0])
            if only is not None:
                self.store(self.extract(data.way(way), only), place, only)
            elif masked:
                mask = f"{active.type.text} {active.way(way).names[0]}"
                inside = f"{data.type.text} {data.way(way).names[0]}, ptr {place.names[0]}, i32 {stored.bytes}, {mask}"
                self._void(f"call void @llvm.masked.store.{data.type.mangled}.p0({inside})")
            else:
                self._distribute(data.way(way), active.way(way), place, None)

    # ---- strided

    def load_strided(
        self,
        dtype: DType,
        base: Value,
        offset: Value | int,
        stride: Value | int,
        lanes: int,
        ways: int = 1,
        *,
        mask: Mask = None,
        otherwise: Value | None = None,
    ) -> Value:
        """Elements that stand `stride` elements apart, the lanes of all ways in one row."""
        step = _known(stride)
        if step == 1 or lanes == ways == 1:
            return self.load(dtype, base, offset, lanes, ways, mask=mask, otherwise=otherwise)
        if step == 0 and mask is None:
            return self.broadcast(dtype, base, offset, lanes)
        address = self.advance(base, dtype, offset)
        if step == -1 and mask is None:
            rows = [self.load(dtype, address, 1 - (way + 1) * lanes, lanes) for way in range(ways)]
            return self.reverse(self.join_ways(rows))
        if mask is None and not self._gathers(_stored(dtype)):
            places = self._places_apart(dtype, address, stride, lanes * ways)
            return self._loaded(self._load_each(_stored(dtype), places, lanes), dtype)
        return self.gather(dtype, address, self._offsets(stride, lanes, ways), mask=mask, otherwise=otherwise)

    def store_strided(
        self, value: Value, base: Value, offset: Value | int, stride: Value | int, *, mask: Mask = None
    ) -> None:
        step = _known(stride)
        if step == 1 or value.lanes == value.ways == 1:
            self.store(value, base, offset, mask=mask)
            return
        address = self.advance(base, value.dtype, offset)
        if step == -1 and mask is None:
            turned = self.reverse(value)
            for way in range(value.ways):
                self.store(turned.way(way), address, 1 - (way + 1) * value.lanes)
        elif mask is None and not self._gathers(_stored(value.dtype)):
            data = self._as_stored(value)
            self._store_each(data, self._places_apart(value.dtype, address, stride, value.lanes * value.ways))
        else:
            self.scatter(value, address, self._offsets(stride, value.lanes, value.ways), mask=mask)

    def _offsets(self, stride: Value | int, lanes: int, ways: int) -> Value:
        step = _known(stride)
        if step is not None and abs(step) <= LARGEST_I32_STRIDE:
            return self.lane_numbers(i32, lanes, ways, step)
        numbers = self.lane_numbers(i64, lanes, ways)
        return self.mul(numbers, stride if isinstance(stride, Value) else self.constant(i64, stride))

    def _places_apart(self, dtype: DType, address: Value, stride: Value | int, count: int) -> list[Value]:
        """The addresses of `count` elements. Known strides need no arithmetic; else each is a step from the last."""
        step = _known(stride)
        if step is not None:
            return [self.advance(address, dtype, lane * step) for lane in range(count)]
        places = [address]
        for _ in range(count - 1):
            places.append(self.advance(places[-1], dtype, stride))
        return places

    # ---- gathered

    def gather(
        self, dtype: DType, base: Value, offsets: Value, *, mask: Mask = None, otherwise: Value | None = None
    ) -> Value:
        """Elements at offsets, i32 (with sign) or i64, a lane each."""
        stored, lanes = _stored(dtype), offsets.lanes
        active = None if mask is None else _lanes_of(mask)
        if lanes > 1 and self._gathers(stored):
            return self._loaded(self._gather_at_once(stored, base, offsets, active, dtype, otherwise), dtype)
        if active is None:
            places = self._places_at(base, stored, offsets)
            return self._loaded(self._load_each(stored, places, lanes), dtype)
        fill = self._fill(dtype, lanes, otherwise)
        results = [
            self._collect(stored, lanes, active.way(way), fill.way(way), base, offsets.way(way))
            for way in range(max(offsets.ways, active.ways))
        ]
        return self._loaded(self.join_ways(results), dtype)

    def scatter(self, value: Value, base: Value, offsets: Value, *, mask: Mask = None) -> None:
        """Stores every lane at its offset. Of lanes with equal offsets the last one stays."""
        data, lanes = self._as_stored(value), value.lanes
        ways = max(value.ways, offsets.ways)
        active = None if mask is None else _lanes_of(mask)
        if lanes > 1 and self._gathers(data.dtype):
            for way in range(ways):
                places = self.advance(base, data.dtype, offsets.way(way))
                on = self._mask_text(None if active is None else active.way(way), lanes)
                inside = f"{data.type.text} {data.way(way).names[0]}, <{lanes} x ptr> {places.names[0]}"
                name = f"@llvm.masked.scatter.{data.type.mangled}.v{lanes}p0"
                self._void(f"call void {name}({inside}, i32 {data.dtype.bytes}, {on})")
        elif active is None:
            self._store_each(
                self.with_ways(data, ways), self._places_at(base, data.dtype, self.with_ways(offsets, ways))
            )
        else:
            for way in range(ways):
                self._distribute(data.way(way), active.way(way), base, offsets.way(way))

    def _gathers(self, stored: DType) -> bool:
        return self.target.fast_gather and stored.bits >= 32

    def _gather_at_once(
        self, stored: DType, base: Value, offsets: Value, active: Value | None, dtype: DType, otherwise: Value | None
    ) -> Value:
        lanes = offsets.lanes
        type = vector(stored, lanes)
        fill = "poison" if active is None else self._fill(dtype, lanes, otherwise).names[0]
        names = []
        for way in range(max(offsets.ways, 1 if active is None else active.ways)):
            places = self.advance(base, stored, offsets.way(way)).names[0]
            on = self._mask_text(None if active is None else active.way(way), lanes)
            inside = f"<{lanes} x ptr> {places}, i32 {stored.bytes}, {on}, {type.text} {fill}"
            names.append(self._line(f"call {type.text} @llvm.masked.gather.{type.mangled}.v{lanes}p0({inside})"))
        return Value(type, tuple(names))

    def _mask_text(self, active: Value | None, lanes: int) -> str:
        return f"<{lanes} x i1> {'splat (i1 true)' if active is None else active.names[0]}"

    def _places_at(self, base: Value, stored: DType, offsets: Value) -> list[Value]:
        places = []
        for way in range(offsets.ways):
            one = offsets.way(way)
            places += [self.advance(base, stored, self.extract(one, lane)) for lane in range(one.lanes)]
        return places

    def _load_each(self, stored: DType, places: list[Value], lanes: int) -> Value:
        element = memory_element(stored)
        loads = [self._line(f"load {element}, ptr {place.names[0]}, align {stored.bytes}") for place in places]
        ones = [Value(scalar(stored), (name,)) for name in loads]
        if lanes == 1:
            return self.join_ways(ones)
        return self.join_ways([self.gathered(ones[start : start + lanes]) for start in range(0, len(ones), lanes)])

    def _store_each(self, data: Value, places: list[Value]) -> None:
        for way in range(data.ways):
            for lane in range(data.lanes):
                one = self.extract(data.way(way), lane)
                place = places[way * data.lanes + lane].names[0]
                self._void(f"store {one.type.text} {one.names[0]}, ptr {place}, align {data.dtype.bytes}")

    # ---- lane by lane, by way of the stack: where the processor has no mask for the width

    def each_active(self, mask: Value, body: Callable[[Value], None]) -> None:
        """Runs `body` with the number, an i64, of every lane of a mask with one way that is on, in order."""
        bits = self.mask_bits(mask)
        with self.if_(self.ne(bits, 0)), self.repeat((bits,)) as loop:
            (left,) = loop.carried
            body(self._intrinsic("cttz", left.type, left, after=", i1 true"))
            left = self.and_(left, self.sub(left, 1))
            loop.again(self.ne(left, 0), left)

    def _collect(
        self, stored: DType, lanes: int, mask: Value, fill: Value, base: Value, offsets: Value | None
    ) -> Value:
        slot = self.slot(vector(stored, lanes))
        self.store(fill, slot, align=64)
        where = self._spilled(offsets)

        def one(lane: Value) -> None:
            place = lane if where is None else self.load(where[1], where[0], lane)
            self.store(self.load(stored, base, place), slot, lane)

        self.each_active(mask, one)
        return self.load(stored, slot, 0, lanes, align=64)

    def _distribute(self, data: Value, mask: Value, base: Value, offsets: Value | None) -> None:
        slot = self.slot(data.type)
        self.store(data, slot, align=64)
        where = self._spilled(offsets)

        def one(lane: Value) -> None:
            place = lane if where is None else self.load(where[1], where[0], lane)
            self.store(self.load(data.dtype, slot, lane), base, place)

        self.each_active(mask, one)

    def _spilled(self, offsets: Value | None) -> tuple[Value, DType] | None:
        if offsets is None:
            return None
        slot = self.slot(offsets.type)
        self.store(offsets, slot, align=64)
        return slot, offsets.dtype

    # ---- between memory and registers

    def _loaded(self, value: Value, dtype: DType) -> Value:
        if dtype is b8:
            return self.ne(value, 0)
        return value

    def _as_stored(self, value: Value) -> Value:
        return self._cast("zext", value, u8) if value.dtype is b8 else value

    def _fill(self, dtype: DType, lanes: int, otherwise: Value | None) -> Value:
        """What masked lanes hold, as it would be in memory."""
        if otherwise is not None:
            return self._as_stored(self.splat(otherwise, lanes))
        type = vector(_stored(dtype), lanes)
        if lanes == 1:
            return Value(type, ("0.0" if dtype.is_float and not dtype.is_half else "0",))
        return Value(type, ("zeroinitializer",))

    def atomic(self, operation: str, base: Value, value: Value) -> Value:
        """Combines a scalar with memory that other threads use too: "add", "umin", "or", "fadd", ... Gives the old."""
        text = f"atomicrmw {operation} ptr {base.names[0]}, {value.type.text} {value.names[0]} monotonic"
        return Value(value.type, (self._line(text),))


def _stored(dtype: DType) -> DType:
    """The type of the bytes: bools are u8."""
    return u8 if dtype is b8 else dtype


def _lanes_of(mask: Tail | Value) -> Value:
    return mask.mask if isinstance(mask, Tail) else mask


def _known(stride: Value | int) -> int | None:
    if isinstance(stride, Value):
        return None if stride.literal is None else int(stride.literal)
    return stride


def _only_lane(mask: str) -> int | None:
    """The lane that counts, of a mask that is known to have but one. See Note [The only lane of narrowed lanes]."""
    lanes = mask.strip("<>").split(", ")
    return lanes.index("i1 true") if mask.startswith("<") and lanes.count("i1 true") == 1 else None
