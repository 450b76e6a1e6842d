"""Where each inner buffer of a program lies in one piece of memory: buffers that are not alive at once may share it.

Where sizes are known, each buffer goes into a gap that it fits in. Where they change, which gap that is
changes with them; there, buffers share places, each as long as the longest buffer that it ever has, and the lengths are
polynomials that are worked out in each call.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ferrite.loops.index import ZERO, Index, ceildiv, constant, evaluate, free_atoms, maximum

LINE = 64  # bytes: where a buffer starts, no other one ends


@dataclass(frozen=True)
class Life:
    """A buffer is written at step `first` and read last at step `last`."""

    name: str
    bytes: int
    first: int
    last: int


@dataclass(frozen=True)
class Span:
    """The same of a buffer whose length in bytes may change from call to call."""

    name: str
    bytes: Index
    first: int
    last: int


NOMINAL = 64  # what a size that changes is taken for where lengths are compared


def arrange(spans: Iterable[Span]) -> tuple[dict[str, Index], Index]:
    """An offset for each buffer, and the length of the whole, as `place` does it or, if lengths change, by places."""
    spans = list(spans)
    if any(span.bytes.terms for span in spans):
        return _share_places(spans)
    offsets, end = place(Life(span.name, span.bytes.constant, span.first, span.last) for span in spans)
    return {name: constant(offset) for name, offset in offsets.items()}, constant(end)


def in_lines(length: Index) -> Index:
    """Rounded up, so that what comes next starts on a line of its own."""
    return ceildiv(length, LINE) * LINE


@dataclass
class _Place:
    length: Index
    last: int  # the step after which it is free
    names: list[str]

    @property
    def nominal(self) -> int:
        return nominal(self.length)


def nominal(length: Index) -> int:
    return evaluate(length, dict.fromkeys(free_atoms(length), NOMINAL))


def _share_places(spans: Iterable[Span]) -> tuple[dict[str, Index], Index]:
    """In order of birth, each into the free place that is nearest to its length, which grows if it has to. A place that
    is more than twice as long as needed is left for a longer buffer."""
    places: list[_Place] = []
    for span in sorted(spans, key=lambda span: span.first):
        length, wanted = in_lines(span.bytes), nominal(span.bytes)
        free = [place for place in places if place.last < span.first and place.nominal <= 2 * wanted]
        if free:
            best = min(free, key=lambda place: (abs(place.nominal - wanted), place.names[0]))
            best.length, best.last = maximum(best.length, length), span.last
            best.names.append(span.name)
        else:
            places.append(_Place(length, span.last, [span.name]))
    offsets: dict[str, Index] = {}
    end = ZERO
    for each in places:
        offsets |= dict.fromkeys(each.names, end)
        end = end + each.length
    return offsets, end


def place(lives: Iterable[Life]) -> tuple[dict[str, int], int]:
    """An offset for each buffer, and the length of the whole: in order of birth; if that leaves too many gaps, in other
    orders too, and the shortest is taken. Of few buffers, those that lie too high come first in the next round."""
    lives = list(lives)
    found, enough = _in_order_of_birth(lives), SLACK * most_alive(lives)
    for order in ORDERS if len(lives) <= MOST_TO_SORT else ():
        ordered = sorted(lives, key=order)
        for _ in range(ROUNDS if len(lives) <= FEW else 1):
            if found[1] > enough:
                made = _one_by_one(ordered)
                found = min(found, made, key=lambda each: each[1])
                ends = {life: made[0][life.name] + life.bytes for life in ordered}
                ordered.sort(key=lambda life: ends[life] <= enough)
    return found


SLACK = 1.02  # how much longer than what is alive at once is good enough
MOST_TO_SORT = 1000  # placing one by one takes a time that grows with the square
FEW, ROUNDS = 128, 6  # so many of so few: 10 ms
ORDERS: tuple[Callable[[Life], Any], ...] = (
    lambda life: (-life.bytes, life.first, life.name),
    lambda life: (life.first - life.last, -life.bytes, life.name),
    lambda life: (life.bytes * (life.first - life.last - 1), life.name),
    lambda life: (-life.last, -life.bytes, life.name),
)


def most_alive(lives: Iterable[Life]) -> int:
    """The bytes of the buffers that are alive at once where they are most: no plan needs less."""
    changes: dict[int, int] = {}
    for life in lives:
        length = _in_lines(life.bytes)
        changes[life.first] = changes.get(life.first, 0) + length
        changes[life.last + 1] = changes.get(life.last + 1, 0) - length
    alive = most = 0
    for step in sorted(changes):
        alive += changes[step]
        most = max(most, alive)
    return most


def _in_lines(length: int) -> int:
    return -(-max(length, 1) // LINE) * LINE


class Gaps:
    """A piece of memory, and who lies where in it when. `length`: of the piece, if it has an end."""

    def __init__(self, length: int | None = None) -> None:
        self.length = length
        self.end = 0  # where the last one ends, in whole lines
        self.placed: list[tuple[int, int, int, int]] = []  # offset, end, first, last: by offset

    def take(self, life: Life) -> int | None:
        """The lowest offset where nothing lies that is alive with it; None if there is no room."""
        needed, offset = _in_lines(life.bytes), 0
        for start, stop, first, last in self.placed:
            if first > life.last or last < life.first:
                continue
            if start >= offset + needed:
                break
            offset = max(offset, stop)
        if self.length is not None and offset + life.bytes > self.length:
            return None
        self.put(life, offset)
        return offset

    def put(self, life: Life, offset: int) -> None:
        stop = offset + _in_lines(life.bytes)
        insort(self.placed, (offset, stop, life.first, life.last))
        self.end = max(self.end, stop)


def _one_by_one(lives: Iterable[Life]) -> tuple[dict[str, int], int]:
    """Each at the lowest offset where nothing lies that is alive with it."""
    gaps = Gaps()
    offsets = {life.name: gaps.take(life) or 0 for life in lives}
    return offsets, gaps.end


def _in_order_of_birth(lives: Iterable[Life]) -> tuple[dict[str, int], int]:
    """Each into the smallest gap that it fits in, or at the end."""
    ordered = sorted(lives, key=lambda life: life.first)
    gaps: list[tuple[int, int]] = []  # offset, length: in order, none touches the next
    dying: list[tuple[int, int, int]] = []  # last step, offset, length: in order
    offsets: dict[str, int] = {}
    end = 0
    for life in ordered:
        while dying and dying[0][0] < life.first:
            _, offset, length = dying.pop(0)
            _give_back(gaps, offset, length)
        length = _in_lines(life.bytes)
        fitting = [gap for gap in gaps if gap[1] >= length]
        if fitting:
            gap = min(fitting, key=lambda gap: (gap[1], gap[0]))
            offset = gap[0]
            gaps.remove(gap)
            if gap[1] > length:
                insort(gaps, (offset + length, gap[1] - length))
        else:
            offset = end
            if gaps and sum(gaps[-1]) == end:  # the last gap touches the end: grow it
                offset = gaps.pop()[0]
            end = offset + length
        offsets[life.name] = offset
        insort(dying, (life.last, offset, length))
    return offsets, end


def _give_back(gaps: list[tuple[int, int]], offset: int, length: int) -> None:
    """The piece becomes a gap, one with those that it touches."""
    insort(gaps, (offset, length))
    at = gaps.index((offset, length))
    if at + 1 < len(gaps) and offset + length == gaps[at + 1][0]:
        length += gaps.pop(at + 1)[1]
        gaps[at] = (offset, length)
    if at > 0 and sum(gaps[at - 1]) == offset:
        before = gaps[at - 1]
        gaps[at - 1 : at + 1] = [(before[0], before[1] + length)]
