"""Interning: two nodes with equal fields are one object, so equality is identity and hashing costs nothing.

The table holds nodes weakly: a node lives as long as some program does. Building one that exists gives the existing
one. The entries of nodes that are gone are swept out now and then. Only sweeping and taking the place of a node that is
gone need the lock: an entry that is there is never replaced without it, and `setdefault` on a dict is atomic.
"""

from __future__ import annotations

from collections import deque
from threading import RLock
from typing import Any
from weakref import ref


class _Entry(ref[Any]):
    """A weak reference that knows its place in the table."""

    __slots__ = ("key",)
    key: tuple[Any, ...]


_entries: dict[tuple[Any, ...], _Entry] = {}
_gone: deque[_Entry] = deque()
_note_gone: Any = _gone.append
_lock = RLock()
_SWEEP_AT = 512  # entries of nodes that are gone


class Interned(type):
    """Metaclass of interned node classes; fields must be hashable. `1`, `1.0`, `True` and `-0.0` are told apart.

    A class that says `plain = True` promises that its numbers are all of type int: its key is its fields as they are.
    """

    plain = False

    def __call__(cls, *args: Any) -> Any:
        key = (cls, *args) if cls.plain else (cls, *map(_exact, args))
        entry = _entries.get(key)
        found = None if entry is None else entry()
        return _enter(key, type.__call__(cls, *args)) if found is None else found


def _enter(key: tuple[Any, ...], node: Any) -> Any:
    """The node, or the one that another thread entered first."""
    if len(_gone) > _SWEEP_AT:
        _sweep()
    entry = _Entry(node, _note_gone)
    entry.key = key
    there = _entries.setdefault(key, entry)
    if there is entry:
        return node
    with _lock:
        there = _entries.setdefault(key, entry)
        found = there()
        if found is None:
            _entries[key] = entry
            found = node
    return found


def _sweep() -> None:
    with _lock:
        while _gone:
            entry = _gone.popleft()
            if _entries.get(entry.key) is entry:
                del _entries[entry.key]


def _exact(value: Any) -> Any:
    """Python says that 1 == 1.0 == True and 0.0 == -0.0; as fields of a node they differ."""
    kind = type(value)
    if kind is tuple:
        return tuple(map(_exact, value)) if value else value
    if kind is float:
        return (kind, value.hex())
    if kind is bool or kind is int:
        return (kind, value)
    return value
