"""No garbage collection while a graph is compiled.

A compile makes objects by the hundred thousand and keeps most of them, and a process that has traced a model holds
millions. A full collection in the middle of it takes a quarter of a second and finds next to nothing.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_compiles = 0  # that are under way
_was_enabled = False


@contextmanager
def without_collection() -> Iterator[None]:
    """Compiles may be nested and run side by side: the last one to end switches collection on, if it was."""
    global _compiles, _was_enabled
    with _lock:
        if _compiles == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _compiles += 1
    try:
        yield
    finally:
        with _lock:
            _compiles -= 1
            if _compiles == 0 and _was_enabled:
                gc.enable()
