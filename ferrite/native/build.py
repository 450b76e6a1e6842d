"""From LLVM IR to code in memory: verify, make an object, load it.

`build` makes the bytes of an object; they depend on the text and the target alone. `load` puts an object into memory
and gives a `Library`, which owns the code: when the last reference to it goes, the code is unmapped. Nothing here
optimises: the text is written so that instruction selection is enough.

An object is trusted. LLVM may crash on bytes that were tampered with, so whoever keeps objects checks them first.

Note [Side by side]
    Every call of llvmlite takes one lock, so that two threads never work at once, though LLVM could: it shares nothing
    between contexts. Making an object is nearly all of the time, and only that call goes around the lock, each with a
    context and a target machine of its own thread. Two threads on two cores took 0.53 of the time of one, with equal
    bytes.

Note [Forking while LLVM works]
    A child that is forked while another thread holds a lock would wait for it for ever, so llvmlite's lock is taken
    before a fork and released after it, on both sides; and a fork waits until no thread is making an object. Forks
    wait one after the other: two that each hold some of the permits would wait for each other. The child has a
    semaphore of its own, as a thread that is gone may have held the lock inside of the old one.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import llvmlite.binding as llvm

from ferrite.errors import ToolFailed
from ferrite.native.target import Target, start_llvm


class Library:
    """Loaded code. The addresses are good for as long as this object lives. `leaving`: what to call before it goes;
    `told`: who knows of its functions."""

    def __init__(self, tracker: Any, engine: Any, addresses: Mapping[str, int], objects: tuple[bytes, ...]) -> None:
        self._tracker = tracker
        self._engine = engine
        self.addresses = dict(addresses)
        self.objects = objects
        self.leaving: tuple[Callable[[], None], ...] = ()
        self.told: frozenset[str] = frozenset()

    def address(self, name: str) -> int:
        return self.addresses[name]

    def close(self) -> None:
        """Frees the code now. Calling into it afterwards crashes."""
        self._say_so()
        self._tracker.close()
        self._engine.close()

    def _say_so(self) -> None:
        leaving, self.leaving = self.leaving, ()
        for call in leaving:
            call()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # At the end of a process modules may be gone already, and nobody needs to be told.
        if self.leaving and not is_finalizing():
            self._say_so()
        # The code first, then the engine that it lives in; Python promises no order.
        self._tracker = None
        self._engine = None


def build(ir: str, target: Target) -> bytes:
    """The object file of a module. The same text and target give the same bytes."""
    module, machine = _verified(ir), _machine(target)
    with llvm.ffi.OutputString() as message:
        with _WORKING:
            # See Note [Side by side].
            made = llvm.ffi.lib.LLVMPY_TargetMachineEmitToMemory._cfn(machine, module, 1, message)
        if not made:
            raise ToolFailed("LLVM made no object", ran=_excerpt(ir), why=str(message))
    library = llvm.ffi.lib
    try:
        return ctypes.string_at(library.LLVMPY_GetBufferStart(made), library.LLVMPY_GetBufferSize(made))
    finally:
        library.LLVMPY_DisposeMemoryBuffer(made)


def build_all(texts: Iterable[str], target: Target, workers: int) -> list[bytes]:
    """The objects of several modules, made side by side, while the texts that follow are still being written."""
    if workers <= 1:
        return [build(text, target) for text in texts]
    with ThreadPoolExecutor(workers) as pool:
        made = [pool.submit(build, text, target) for text in texts]
        return [each.result() for each in made]


def assembly(ir: str, target: Target) -> str:
    """What the processor will run, for people."""
    return _machine(target).emit_assembly(_verified(ir))


LASTING: list[Library] = []  # code that is made once in a process


def load(
    objects: Iterable[bytes], names: Iterable[str], imports: Mapping[str, int] | None = None, *, lasting: bool = False
) -> Library:
    """Code in memory, with the addresses of the named functions. `imports`: symbols from outside, by address;
    `lasting`: to be listed as such.

    Functions of C's library are found by name. A symbol that nobody has is an error here, not at the call.
    """
    start_llvm()
    _guard_forks()
    engine = llvm.create_lljit_compiler(use_jit_link=True, suppress_errors=True)
    library = llvm.JITLibraryBuilder()
    kept = tuple(objects)
    for each in kept:
        library.add_object_img(each)
    for name, address in (imports or {}).items():
        library.import_symbol(name, address)
    exports = list(names)
    for name in exports:
        library.export_symbol(name)
    try:
        tracker = library.link(engine, "kernels")
    except RuntimeError as error:
        raise ToolFailed("code did not load", ran=f"link of {', '.join(exports)}", why=str(error)) from error
    made = Library(tracker, engine, {name: tracker[name] for name in exports}, kept)
    if lasting:
        LASTING.append(made)
    return made


def library_addresses(names: Iterable[str]) -> dict[str, int]:
    """Addresses of functions of C's mathematical library, for `load`."""
    library = _c_library()
    found = {}
    for name in names:
        try:
            found[name] = ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
        except AttributeError as error:
            raise ToolFailed(f"C's library has no {name}", ran="dlsym") from error
    return found


@cache
def _c_library() -> ctypes.CDLL:
    """What this process has loaded already: to look for a file starts a process in Python's `find_library`."""
    return ctypes.CDLL(None)


# ---- LLVM

_machines = threading.local()  # a target machine is not safe to share between threads


def _machine(target: Target) -> Any:
    """Kept for the life of the thread: making one costs 0.2 ms.

    Level 1 is level 2 without ordering instructions a second time, after registers are given out. LLVM does that for
    Zen 3 and 4, where a kernel takes 4 to 5% longer to compile with it and as long to run; for Haswell and Ice Lake the
    machine code of 168 kernels is the same at both levels.
    """
    kept: dict[Target, Any] = _machines.__dict__.setdefault("kept", {})
    if target not in kept:
        start_llvm()
        _guard_forks()
        kept[target] = llvm.Target.from_triple(target.triple).create_target_machine(
            cpu=target.cpu, features=target.features, opt=1, reloc="pic", codemodel="small"
        )
    return kept[target]


def _verified(ir: str) -> Any:
    """Parsed and verified: LLVM aborts the process if it is asked to compile a module that is not sound."""
    start_llvm()
    _guard_forks()
    try:
        module = llvm.parse_assembly(ir, llvm.create_context())
        module.verify()
    except RuntimeError as error:
        raise ToolFailed("LLVM does not take this module", ran=_excerpt(ir, str(error)), why=str(error)) from error
    return module


def _excerpt(ir: str, error: str = "") -> str:
    """A few lines around the one that a parse error names, or the start."""
    lines = ir.splitlines()
    spot = 0
    for word in error.replace(",", ":").split(":"):
        if word.strip().isdigit():
            spot = int(word)
            break
    start = max(spot - 4, 0)
    return "\n".join(lines[start : start + 8])


MOST_WORKERS = 8
_WORKING = threading.Semaphore(MOST_WORKERS)  # each object that is being made holds one


@cache
def _guard_forks() -> None:
    """See Note [Forking while LLVM works]."""
    lock, forking = llvm.ffi.lib._lock._lock, threading.Lock()

    def wait() -> None:
        forking.acquire()
        for _ in range(MOST_WORKERS):
            _WORKING.acquire()
        lock.acquire()

    def go_on() -> None:
        lock.release()
        _WORKING.release(MOST_WORKERS)
        forking.release()

    def start_anew() -> None:
        global _WORKING
        lock.release()
        _WORKING = threading.Semaphore(MOST_WORKERS)
        forking.release()

    os.register_at_fork(before=wait, after_in_parent=go_on, after_in_child=start_anew)
