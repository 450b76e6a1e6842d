"""Kernels as functions on tensors: what a host program calls when it launches one."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import torch

from ferrite.errors import ToolFailed
from ferrite.loops.index import Atom, evaluate, product
from ferrite.loops.nodes import Buffer, Program

Kernel = Callable[..., None]


@dataclass(frozen=True)
class Kernels:
    """Every program as a function on its buffers and sizes. `refused`: those without machine code, and why."""

    functions: dict[str, Kernel]
    refused: dict[str, str] = field(default_factory=dict)


def kernels_of(programs: Sequence[Program], executor: str) -> Kernels:
    if executor == "native" and programs:
        return native_kernels(programs)
    return Kernels({program.name: oracle_kernel(program) for program in programs})


def native_kernels(programs: Sequence[Program]) -> Kernels:
    """Machine code. A program that native code refuses is run by the oracle."""
    from ferrite.native import build, emit, target  # LLVM is loaded by the first graph that has kernels

    host = target.host()
    emitted = emit.emit(programs, host)
    kernels = {program.name: oracle_kernel(program) for program in programs}
    if emitted.names:
        ours = {name: address for name, address in openmp().items() if name in emitted.externals}
        others = build.library_addresses(name for name in emitted.externals if name not in ours)
        library = build.load([build.build(emitted.text, host)], emitted.names, ours | others)
        for program in programs:
            if program.name in emitted.names:
                kernels[program.name] = _native_kernel(program, library, kernels[program.name])
    return Kernels(kernels, emitted.refused)


def _native_kernel(program: Program, library: Any, explain: Kernel) -> Kernel:
    """Calls the code. If a check in it fails, `explain` runs the same program and raises what eager would."""
    count = len(program.parameters)
    addresses, sizes = ctypes.c_void_p * (count + len(program.locals) + 1), ctypes.c_int64 * (len(program.sizes) + 1)
    function = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32)
    entry = function(library.address(program.name))
    entry.library = library  # type: ignore[attr-defined]

    def run(*arguments: Any) -> None:
        own = [_memory_for(buffer, program, arguments[count:]) for buffer in program.locals]
        given = addresses(*[tensor.data_ptr() for tensor in (*arguments[:count], *own)])
        if entry(given, sizes(*map(int, arguments[count:])), thread_count()):
            explain(*arguments)
            raise ToolFailed("a kernel stopped", ran=program.name, why="a check failed that the oracle does not see")

    return run


def _memory_for(buffer: Buffer, program: Program, sizes: Sequence[Any]) -> torch.Tensor:
    """A local of a kernel: bytes enough for it."""
    known: dict[Atom, int] = dict(zip(program.sizes, map(int, sizes), strict=True))
    return torch.empty(evaluate(product(buffer.sizes), known) * buffer.dtype.bytes, dtype=torch.uint8)


def thread_count() -> int:
    """As many as torch uses; one in a forked child, where the pool of the parent's threads is gone."""
    return 1 if os.getpid() != _started_in else torch.get_num_threads()


_started_in = os.getpid()


@cache
def openmp() -> dict[str, int]:
    """The entry points of the OpenMP runtime that torch has loaded, so that both share one pool of threads."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(None, 5)[-1].strip()
        if re.search(r"/lib(gomp|iomp5|omp)[-.\w]*\.so", path):
            library = ctypes.CDLL(path)
            names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
            return {name: ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in names}
    raise ToolFailed("no OpenMP runtime", ran="a search of the libraries of this process")


def oracle_kernel(program: Program) -> Kernel:
    """A kernel that NumPy runs, plainly and slowly: the reference for every other way to run it."""
    from ferrite.loops import oracle  # only graphs with kernels need it

    names = [parameter.buffer.name for parameter in program.parameters]
    size_names = [size.name for size in program.sizes]

    def run(*arguments: Any) -> None:
        tensors, sizes = arguments[: len(names)], arguments[len(names) :]
        arrays = {name: as_array(tensor) for name, tensor in zip(names, tensors, strict=True)}
        oracle.run(program, dict(zip(size_names, map(int, sizes), strict=True)), arrays)

    return run


def as_array(tensor: torch.Tensor) -> numpy.ndarray[Any, Any]:
    """The memory of a tensor as an array; bf16, which NumPy does not know, as its bits."""
    plain = tensor.detach()
    if plain.dtype == torch.bfloat16:
        return plain.view(torch.int16).numpy().view(numpy.uint16)
    return plain.numpy()
