"""Makes torch's allocator lend memory of ours to operators that have no form for writing where they are told to:
Note [Lent memory] of `native/machine.py`.

The allocator is a C++ object without members. Ours has the table of its functions with two of them replaced: the one
that gives memory, and the one that says how to free it. All that is taken for granted of it is looked at before.
"""

from __future__ import annotations

import ctypes
import threading
from functools import cache
from typing import Any

from ferrite.artifact.doors import host_machine, libraries
from ferrite.native import machine

_WORD = ctypes.sizeof(ctypes.c_int64)
_ABOUT = 2  # words about the type, in front of the table
_FUNCTIONS = 8  # in the table, and more than it has
_ALLOCATE, _DELETER = _ABOUT + 2, _ABOUT + 4  # the first two are destructors
_LOCK = threading.Lock()
_KEPT: list[Any] = []  # what torch points to from now on


def can_lend() -> bool:
    """Whether operators can be lent memory, from the first question on. Not if somebody else has replaced torch's
    allocator before; whoever does so later ends it, and results lie where that allocator puts them."""
    with _LOCK:
        return _replace_allocator()


@cache
def _replace_allocator() -> bool:
    torch_library, _ = libraries()
    default = _asked(torch_library["_ZN3c1022GetDefaultCPUAllocatorEv"])
    table = machine.address_of(torch_library, "_ZTVN3c1019DefaultCPUAllocatorE")
    is_plain = ctypes.c_int64.from_address(default).value == table + _ABOUT * _WORD
    if not is_plain or _asked(torch_library["_ZN3c1015GetCPUAllocatorEv"]) != default:
        return False
    words = _ABOUT + _FUNCTIONS
    functions = (ctypes.c_int64 * words).from_buffer_copy(ctypes.string_at(table, words * _WORD))
    delete = _asked(ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(functions[_DELETER]), default)
    library = host_machine()
    facts = (ctypes.c_int64 * 6).from_address(library.address("ferrite_allocator"))
    facts[:3] = [functions[_ALLOCATE], delete, default]
    given = (ctypes.c_int64 * 4)()
    ask = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)(library.address("ferrite_ask_allocator"))
    ask(ctypes.addressof(given), _WORD)
    address, *rest, device = given
    if sorted(rest) != sorted((address, delete)):
        return False  # and the word stays: nobody knows how to give it back
    ctypes.CFUNCTYPE(None, ctypes.c_int64)(delete)(address)
    facts[3:] = [1 + rest.index(address), 1 + rest.index(delete), device]
    functions[_ALLOCATE] = library.address("ferrite_allocate")
    functions[_DELETER] = library.address("ferrite_deleter")
    ours = ctypes.c_int64(ctypes.addressof(functions) + _ABOUT * _WORD)
    _KEPT.extend((functions, ours))
    replace = torch_library["_ZN3c1015SetCPUAllocatorEPNS_9AllocatorEh"]
    replace.argtypes = (ctypes.c_int64, ctypes.c_uint8)
    replace(ctypes.addressof(ours), 0)
    return True


def _asked(function: Any, *arguments: int) -> int:
    function.restype = ctypes.c_int64
    return int(function(*arguments))
