"""Where code stands: the loops around it, the values already computed there, the lanes that count.

Scopes form a chain, innermost first. A value is looked up in all of them and kept in the one that computes it; a loop
body is a scope of its own, so what is computed in it is not seen outside of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ferrite.errors import Malformed
from ferrite.loops.index import Axis, Index, free_axes
from ferrite.loops.nodes import Expr, Load
from ferrite.native.builder import Value


@dataclass(frozen=True)
class Ask:
    """For memory so many elements after what a load reads, into the first cache or the second (`ahead.py`)."""

    distance: int | Value
    cache: int = 1


@dataclass
class Lanes:
    """The axis that runs over vector lanes: lane k of way w stands at `base + w * lanes + k`."""

    axis: Axis
    base: Value
    lanes: int
    ways: int


@dataclass(frozen=True)
class Groups:
    """An axis walked in groups of `ways` vectors, from where a group may start; what is left of it if that is known."""

    extent: Index
    lanes: int
    ways: int

    @property
    def size(self) -> int:
        return self.lanes * self.ways

    @property
    def any(self) -> bool:
        """Whether there may be a whole group."""
        return bool(self.extent.terms) or self.extent.constant >= self.size

    @property
    def left(self) -> int | None:
        """Elements after the last whole group, if known."""
        return None if self.extent.terms else self.extent.constant % self.size

    @property
    def are_vectors_left(self) -> bool:
        """Whether what is left is known to be whole vectors."""
        return self.lanes == 1 or (self.left is not None and self.left % self.lanes == 0)


def whole_ways(extent: Index, lanes: int, most: int) -> int:
    """The most ways, halved as often as needed, of which there may be a whole group."""
    while most > 1 and not Groups(extent, lanes, most).any:
        most //= 2
    return most


def even_ways(extent: Index, lanes: int, most: int) -> int:
    """The most ways, but two or more, in which a known extent comes out even: then nothing is left after the groups,
    and there is half the code. If there are none, those of which there is a whole group."""
    ways = whole_ways(extent, lanes, most)
    while ways > 1:
        if Groups(extent, lanes, ways).left == 0:
            return ways
        ways //= 2
    return whole_ways(extent, lanes, most)


@dataclass
class Scope:
    """`mask`: lanes that count, None for all. Outside of them nothing is read, written or checked. `ahead`: what loads
    ask for beside what they read."""

    parent: Scope | None = None
    axes: dict[Axis, Value] = field(default_factory=dict)  # scalar positions; of the axis in lanes, where they start
    vector: Lanes | None = None
    mask: Value | None = None
    ahead: Mapping[Load, Sequence[Ask]] = field(default_factory=dict)
    known: dict[Any, Value] = field(default_factory=dict)

    def inner(self, **changes: Any) -> Scope:
        """A scope inside this one, with the same lanes unless told otherwise."""
        return Scope(self, **{"vector": self.vector, "mask": self.mask, "ahead": self.ahead, **changes})

    def find(self, key: Any) -> Value | None:
        scope: Scope | None = self
        while scope is not None:
            value = scope.known.get(key)
            if value is not None:
                return value
            scope = scope.parent
        return None

    def position(self, axis: Axis) -> Value:
        scope: Scope | None = self
        while scope is not None:
            value = scope.axes.get(axis)
            if value is not None:
                return value
            scope = scope.parent
        raise Malformed(f"the axis {axis.name} is not bound here", where="native")

    def innermost_axes(self) -> Collection[Axis]:
        """The axes of the loop that turns fastest here."""
        scope: Scope | None = self
        while scope is not None and not scope.axes:
            scope = scope.parent
        return () if scope is None else scope.axes

    def binds(self, axes: Iterable[Axis]) -> bool:
        return all(self._binds(axis) for axis in axes)

    def _binds(self, axis: Axis) -> bool:
        scope: Scope | None = self
        while scope is not None:
            if axis in scope.axes:
                return True
            scope = scope.parent
        return False

    def varies(self, node: Expr) -> bool:
        """Whether a value differs from lane to lane."""
        return self.vector is not None and self.vector.axis in free_axes(node)
