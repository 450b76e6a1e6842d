"""A choice that the compiler made. Every part may make some; the record keeps them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Decision:
    """Something that was done or not, to what, and why."""

    what: str
    subjects: tuple[str, ...]
    taken: bool
    reason: str
