"""The numbers that a random program is made of, kept so that it can be made again, and made smaller.

A generator asks for numbers in ranges. A `Choices` answers from a random source and writes down what it said; given a
list of what was said before, it says that again. Whatever the list, the generator makes a sound program of it, so that
fewer and smaller numbers are a simpler program: `smaller` looks for them without knowing what they stand for.
"""

from __future__ import annotations

import math
import random
import struct
import time
from collections.abc import Callable, Iterator, Sequence

SPECIAL = (0.0, 1.0, -1.0, 0.5, -0.0, math.inf, -math.inf, math.nan, 1e-310, 5e-324, 2.0**-126, 65504.0, 3e38, -1e300)


class Choices:
    """Answers of `given` first, then of `rng`, or the simplest ones if there is none. `made`: all that was said."""

    def __init__(self, rng: random.Random | None = None, given: Sequence[int] = ()) -> None:
        self.rng, self.given = rng, given
        self.made: list[int] = []

    def number(self, low: int, high: int) -> int:
        """From `low` to `high`; 0, or what is nearest to it, is the simplest."""
        place, room = len(self.made), high - low
        if place < len(self.given):
            said = min(self.given[place], room)
        else:
            said = self.rng.randint(0, room) if self.rng else 0
        self.made.append(said)
        return _counted(said, low, high)

    def real(self) -> float:
        """Any float: often special ones, small ones, or any bits."""
        kind = self.number(0, 3)
        if kind < 2:
            return SPECIAL[self.number(0, len(SPECIAL) - 1)]
        if kind == 2:
            return self.number(-64, 64) / 8
        found: float = struct.unpack("d", struct.pack("q", self.number(-(2**63), 2**63 - 1)))[0]
        return found


def _counted(place: int, low: int, high: int) -> int:
    """The numbers from `low` to `high` by their distance from 0: that with this place."""
    if low >= 0 or high <= 0:
        return low + place if low >= 0 else high - place
    both = 2 * min(-low, high)
    if place <= both:
        return (place + 1) // 2 * (1 if place % 2 else -1)
    return place - both // 2 if high > -low else both // 2 - place


def smaller(made: list[int], fails: Callable[[Choices], bool], seconds: float) -> list[int]:
    """The simplest choices found for which `fails` says so: fewer first, then smaller ones."""
    stop = time.monotonic() + seconds
    progress = True
    while progress and time.monotonic() < stop:
        progress = False
        for candidate in _simpler(made):
            if time.monotonic() > stop:
                break
            choices = Choices(given=candidate)
            # What was said in the end counts: other answers may make the generator ask for more.
            if fails(choices) and _rank(choices.made) < _rank(made):
                made, progress = choices.made, True
                break
    return made


def _rank(made: list[int]) -> tuple[int, list[int]]:
    return len(made), made


def _simpler(made: list[int]) -> Iterator[list[int]]:
    length = len(made)
    width = 1 << max(length.bit_length() - 1, 0)
    while width:
        for start in range(length - width, -1, -max(width // 2, 1)):
            yield made[:start] + made[start + width :]
        width //= 2
    for place, said in enumerate(made):
        for less in dict.fromkeys((0, said // 2, said - 1)):
            if 0 <= less < said:
                yield [*made[:place], less, *made[place + 1 :]]
