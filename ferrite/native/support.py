"""Objects that every graph needs and that are the same for all: the launcher of kernels (`team.py`) and the machine for
host programs (`machine.py`).

Each is made by LLVM once in a process, which takes longer than reading an entry of the cache. So compiled graphs carry
them, and a process that finds one has no need to make them: they depend on the sources of Ferrite, on LLVM, on Python
and on the processor, all of which the key of an entry names. The first one that is given, or made, is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ferrite.errors import ToolFailed

if TYPE_CHECKING:
    from ferrite.native.build import Library  # a process that has no kernels loads no LLVM

LAUNCHER, MACHINE = "launcher", "machine"
NAMES = (LAUNCHER, MACHINE)

_objects: dict[str, bytes] = {}


def loaded(name: str, make: Callable[[], bytes], load: Callable[[bytes], Library]) -> Library:
    """What was given or made, in memory. An object that does not load is forgotten: whoever carried it fails, and the
    next one makes it anew."""
    if name not in _objects:
        _objects[name] = make()
    try:
        return load(_objects[name])
    except ToolFailed:
        del _objects[name]
        raise


def give(objects: Mapping[str, bytes]) -> None:
    """What a graph carried that was compiled with the same sources for the same machine. Raises `ValueError` for a name
    that nobody knows."""
    for name, data in objects.items():
        if name not in NAMES:
            raise ValueError(f"no graph needs a {name}")
        _objects.setdefault(name, data)


def held() -> dict[str, bytes]:
    """What this process has by now, for graphs to carry."""
    return {name: _objects[name] for name in NAMES if name in _objects}
