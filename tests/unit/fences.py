"""Memory between two pages that nobody may touch: who reads or writes one byte too far dies."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

import numpy as np


class Fences:
    """Room for at least `capacity` bytes."""

    def __init__(self, capacity: int) -> None:
        page = mmap.PAGESIZE
        self.room = max(-(-capacity // page), 1) * page
        self.memory = mmap.mmap(-1, self.room + 2 * page)
        self.start = ctypes.addressof(ctypes.c_char.from_buffer(self.memory)) + page
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for fence in (self.start - page, self.start + self.room):
            assert protect(fence, page, 0) == 0, os.strerror(ctypes.get_errno())

    def bytes(self, count: int, *, at_end: bool) -> Any:
        return np.asarray(_Bytes(self.start + self.room - count if at_end else self.start, count))


class _Bytes:
    """Memory at an address, as NumPy takes it; there may be none."""

    def __init__(self, address: int, count: int) -> None:
        self.__array_interface__ = {"data": (address, False), "shape": (count,), "typestr": "|u1", "version": 3}
