"""Objects that every graph needs and that are the same for all: the launcher of kernels (`team.py`) and the machine for
host programs (`machine.py`).

Each is made by LLVM once in a process, which takes longer than reading an entry of the cache. So compiled graphs carry
them, and a process that finds one has no need to make them: they depend on the sources of Ferrite, on LLVM, on Python
and on the processor, all of which the key of an entry names. The first one that is given, or made, is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

LAUNCHER, MACHINE = "launcher", "machine"
NAMES = (LAUNCHER, MACHINE)

_objects: dict[str, bytes] = {}


def object_of(name: str, make: Callable[[], bytes]) -> bytes:
    if name not in _objects:
        _objects[name] = make()
    return _objects[name]


def give(objects: Mapping[str, bytes]) -> None:
    """What a graph carried that was compiled with the same sources for the same machine. Raises `ValueError` for
    anything else."""
    for name, data in objects.items():
        if name not in NAMES:
            raise ValueError(f"no graph needs a {name}")
        _objects.setdefault(name, data)


def held() -> dict[str, bytes]:
    """What this process has by now, for graphs to carry."""
    return {name: _objects[name] for name in NAMES if name in _objects}
