"""Lanes that change places: halves, reductions over all lanes in a fixed order, transposes in registers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from ferrite.native.builder.control import Control
from ferrite.native.builder.values import Value

Group: TypeAlias = "tuple[Value, ...]"


class Shuffle(Control):
    def halves(self, a: Value) -> tuple[Value, Value]:
        """The lower lanes and the upper lanes."""
        middle = a.lanes // 2
        if middle == 1:
            return self.extract(a, 0), self.extract(a, 1)
        return self._shuffle(a, None, range(middle)), self._shuffle(a, None, range(middle, a.lanes))

    def join(self, low: Value, high: Value) -> Value:
        """The lanes of one after those of the other."""
        if low.lanes == 1:
            ways = [self.gathered([low.way(k), high.way(k)]) for k in range(max(low.ways, high.ways))]
            return self.join_ways(ways)
        return self._shuffle(low, high, range(low.lanes + high.lanes))

    def reverse(self, a: Value) -> Value:
        return a if a.lanes == 1 else self._shuffle(a, None, range(a.lanes - 1, -1, -1))

    # ---- reductions

    def reduce(self, operation: str, a: Value) -> Value:
        """All lanes of all ways combined to a scalar by "add", "mul", "minimum", "maximum", "and_", "or_", ..."""
        combine = getattr(self, operation)
        return self.reduce_by(lambda x, y: (combine(x[0], y[0]),), (a,))[0]

    def reduce_by(self, combine: Callable[[Group, Group], Group], values: Group) -> Group:
        """The same for several values that are combined together, such as a maximum and its position.

        The order is fixed: the first half of the ways with the second half, and so on, then the lower half of the
        lanes with the upper half, and so on.
        """
        while values[0].ways > 1:
            values = self._halve_ways(combine, values)
        while values[0].lanes > 1:
            pairs = [self.halves(value) for value in values]
            values = combine(tuple(low for low, _ in pairs), tuple(high for _, high in pairs))
        return values

    def reduce_ways(self, operation: str, a: Value) -> Value:
        """The ways combined lane by lane to a value with one way."""
        combine = getattr(self, operation)
        while a.ways > 1:
            (a,) = self._halve_ways(lambda x, y: (combine(x[0], y[0]),), (a,))
        return a

    def _halve_ways(self, combine: Callable[[Group, Group], Group], values: Group) -> Group:
        ways = values[0].ways
        middle = ways // 2
        low = tuple(Value(value.type, value.names[:middle]) for value in values)
        high = tuple(Value(value.type, value.names[middle : 2 * middle]) for value in values)
        joined = combine(low, high)
        if ways % 2 == 0:
            return joined
        return tuple(Value(one.type, (*one.names, value.names[-1])) for one, value in zip(joined, values, strict=True))

    # ---- transposes

    def transpose(self, rows: Sequence[Value]) -> list[Value]:
        """n values of n lanes: row i, lane j becomes row j, lane i. n is a power of two. One way each.

        First within blocks of 16 bytes, by interleaving, then whole blocks change places: both are single instructions.
        """
        count, row = len(rows), rows[0]
        if count != row.lanes:
            raise ValueError(f"a transpose of {count} rows of {row.lanes} lanes")
        in_block = min(max(128 // (8 if row.dtype.is_bool else row.dtype.bits), 1), count)
        rows = list(rows)
        width = 1
        while width < in_block:
            rows = self._interleave_blocks(rows, width, in_block)
            width *= 2
        while width < count:
            rows = self._exchange_blocks(rows, width)
            width *= 2
        return rows

    def _interleave_blocks(self, rows: list[Value], width: int, in_block: int) -> list[Value]:
        """Pairs of rows `width` apart; units of `width` lanes of the lower, then of the upper half of every block."""
        lanes = rows[0].lanes
        half = in_block // 2
        result = list(rows)
        for group in range(0, len(rows), 2 * width):
            for k in range(width):
                a, b = rows[group + k], rows[group + width + k]
                for upper in (0, 1):
                    order = []
                    for block in range(0, lanes, in_block):
                        start = block + upper * half
                        for unit in range(start, start + half, width):
                            order += [*range(unit, unit + width), *range(lanes + unit, lanes + unit + width)]
                    result[group + 2 * k + upper] = self._shuffle(a, b, order)
        return result

    def _exchange_blocks(self, rows: list[Value], width: int) -> list[Value]:
        """Blocks of `width` lanes of rows `width` apart: the odd ones of the first for the even ones of the second."""
        lanes = rows[0].lanes
        result = list(rows)
        for i in range(len(rows)):
            if i & width:
                continue
            a, b = rows[i], rows[i + width]
            result[i] = self._shuffle(a, b, [k if not k & width else lanes + k - width for k in range(lanes)])
            result[i + width] = self._shuffle(a, b, [k + width if not k & width else lanes + k for k in range(lanes)])
        return result
