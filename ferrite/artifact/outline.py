"""What a stored entry says of itself without being loaded: enough to list, compare and prune entries without torch.

The same bytes as `artifact/entry.py` reads; fields that are not named here are skipped.
"""

from __future__ import annotations

import msgspec


class GraphFacts(msgspec.Struct, frozen=True):
    """Of one compiled graph; more of it is in `artifact/compiled.py`."""

    seconds: float  # that its compile took
    executor: str
    host: str


class GraphOutline(msgspec.Struct, frozen=True):
    kernels: dict[str, str]
    facts: GraphFacts


class Outline(msgspec.Struct, frozen=True):
    """`fields`: of the key. `objects`: by phase, the names of the machine code."""

    fields: dict[str, str]
    sources: tuple[str, ...]
    guards: str
    graphs: dict[str, GraphOutline]
    objects: dict[str, tuple[str, ...]]
    format: int

    @property
    def object_names(self) -> frozenset[str]:
        return frozenset(name for names in self.objects.values() for name in names)


def outline_of(body: bytes) -> Outline:
    """Raises `ValueError` if the bytes are no entry."""
    try:
        return msgspec.msgpack.decode(body, type=Outline)
    except (ValueError, RecursionError) as error:  # msgspec's errors are of the first kind
        raise ValueError(f"it is no entry: {error}") from error
