"""Where each inner buffer of a program lies in one piece of memory: buffers that are not alive at once may share it."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass

LINE = 64  # bytes: where a buffer starts, no other one ends


@dataclass(frozen=True)
class Life:
    """A buffer is written at step `first` and read last at step `last`."""

    name: str
    bytes: int
    first: int
    last: int


def place(lives: Iterable[Life]) -> tuple[dict[str, int], int]:
    """An offset for each buffer, and the length of the whole: in order of birth, each into the smallest gap that it
    fits in, or at the end."""
    ordered = sorted(lives, key=lambda life: life.first)
    gaps: list[tuple[int, int]] = []  # offset, length: in order, none touches the next
    dying: list[tuple[int, int, int]] = []  # last step, offset, length: in order
    offsets: dict[str, int] = {}
    end = 0
    for life in ordered:
        while dying and dying[0][0] < life.first:
            _, offset, length = dying.pop(0)
            _give_back(gaps, offset, length)
        length = -(-max(life.bytes, 1) // LINE) * LINE
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
