"""Interning: two nodes with equal fields are one object, so equality is identity and hashing costs nothing.

The table holds nodes weakly: a node lives as long as some program does. Building one that exists gives the existing one.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

_nodes: WeakValueDictionary[tuple[Any, ...], Any] = WeakValueDictionary()


class Interned(type):
    """Metaclass of interned node classes; fields must be hashable. `1`, `1.0`, `True` and `-0.0` are told apart."""

    def __call__(cls, *args: Any) -> Any:
        key = (cls, *map(_exact, args))
        found = _nodes.get(key)
        if found is None:
            # Two threads may build the same node: the first one that enters stays.
            found = _nodes.setdefault(key, super().__call__(*args))
        return found


def _exact(value: Any) -> Any:
    """Python says that 1 == 1.0 == True and 0.0 == -0.0; as fields of a node they differ."""
    kind = type(value)
    if kind is float:
        return (kind, value.hex())
    if kind is bool or kind is int:
        return (kind, value)
    if kind is tuple:
        return tuple(map(_exact, value))
    return value
