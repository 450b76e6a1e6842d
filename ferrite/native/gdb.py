"""Names of loaded code for `gdb`, by its interface for code that is made at run time.

A debugger stops a process at an empty function, `__jit_debug_register_code`, and reads from `__jit_debug_descriptor`
which object file was loaded or is to go. It finds the two by their names, so they must be those of a library that it
can read. LLVM has them, but llvmlite exports neither and never asks LLVM to use them for code that LLJIT loads; so they
are looked up in the symbol table of llvmlite's own file, which is where the debugger finds them. What is registered is
an object with names alone (`elf.names_only`). A debugger that comes later reads the whole list.

LLVM changes the list too, for users of its older engine: every change here is made under the lock that llvmlite takes
for each call. The lock does not keep out its own thread, where a collection in the middle of a change may free other
code: what is asked for then is done after it.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import llvmlite.binding as llvm

from ferrite.native.elf import Function, is_elf, names_only, places_of

log = logging.getLogger(__name__)

REGISTER, DESCRIPTOR = "__jit_debug_register_code", "__jit_debug_descriptor"
_KNOWN = "LLVMPY_GetVersionInfo"  # which is exported: where it is tells where the file is mapped
_NOTHING, _ADDED, _REMOVED = range(3)
_VERSION = 1


class _Entry(ctypes.Structure):
    """An element of the list of registered objects."""


_Entry._fields_ = [
    ("next", ctypes.POINTER(_Entry)),
    ("previous", ctypes.POINTER(_Entry)),
    ("file", ctypes.c_char_p),
    ("size", ctypes.c_uint64),
]


class _Descriptor(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint32),
        ("action", ctypes.c_uint32),
        ("relevant", ctypes.POINTER(_Entry)),
        ("first", ctypes.POINTER(_Entry)),
    )


def tell_gdb(model: bytes, functions: Sequence[Function]) -> Callable[[], None]:
    """Registers code; what is given takes that back. `model`: an object for the same machine. Never raises for a
    library without the interface, which is warned of once."""
    found = _interface()
    if found is None or not functions:
        return _do_nothing
    descriptor, register = found
    # The list points into both for as long as they are in it.
    content = names_only(model, functions)
    entry = _Entry(file=content, size=len(content))

    def add() -> None:
        if descriptor.first:
            entry.next = descriptor.first
            descriptor.first.contents.previous = ctypes.pointer(entry)
        descriptor.first = ctypes.pointer(entry)
        _say(descriptor, register, _ADDED, entry)

    def remove() -> None:
        if entry.previous:
            entry.previous.contents.next = entry.next
        else:
            descriptor.first = entry.next
        if entry.next:
            entry.next.contents.previous = entry.previous
        _say(descriptor, register, _REMOVED, entry)

    _change(add)
    return lambda: _change(remove)


_waiting: deque[Callable[[], None]] = deque()
_is_changing = False


def _change(action: Callable[[], None]) -> None:
    global _is_changing
    with llvm.ffi.lib._lock._lock:
        _waiting.append(action)
        if _is_changing:
            return
        _is_changing = True
        try:
            while _waiting:
                _waiting.popleft()()
        finally:
            _is_changing = False


def _do_nothing() -> None:
    pass


def _say(descriptor: _Descriptor, register: Callable[[], None], action: int, entry: _Entry) -> None:
    descriptor.action, descriptor.relevant = action, ctypes.pointer(entry)
    register()
    descriptor.action, descriptor.relevant = _NOTHING, ctypes.POINTER(_Entry)()


@cache
def _interface() -> tuple[_Descriptor, Callable[[], None]] | None:
    path = Path(llvm.ffi.lib._lib._name)
    places = symbols_of(path, (REGISTER, DESCRIPTOR, _KNOWN)) if path.is_file() else {}
    if len(places) < 3:
        log.warning("Ferrite does not tell gdb the names of its kernels: %s has no %s", path, REGISTER)
        return None
    known = ctypes.cast(getattr(llvm.ffi.lib._lib, _KNOWN), ctypes.c_void_p).value or 0
    start = known - places[_KNOWN]
    descriptor = _Descriptor.from_address(start + places[DESCRIPTOR])
    if descriptor.version != _VERSION:
        log.warning("Ferrite does not tell gdb the names of its kernels: version %d", descriptor.version)
        return None
    return descriptor, ctypes.CFUNCTYPE(None)(start + places[REGISTER])


def symbols_of(path: Path, names: Sequence[str]) -> dict[str, int]:
    """Where symbols are in a library, local ones too; those that its full symbol table does not have are left out."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return places_of(data, names) if is_elf(data[:16]) else {}
