"""Kernels as functions on tensors: what a host program calls when it launches one.

A process that finds all its kernels compiled neither writes nor reads a loop: what does is imported where that starts.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import numpy
import torch

from ferrite.decisions import Decision
from ferrite.errors import ToolFailed, Unsupported
from ferrite.loops.index import ZERO, Atom, Index, Size, evaluate, index, maximum, product, total
from ferrite.loops.shapes import is_contiguous

if TYPE_CHECKING:
    from ferrite.loops.nodes import Buffer, Program

Kernel = Callable[..., None]

LINE = 64  # bytes: where a local starts, no other one ends
FEWEST_KERNELS = 2  # of a module: starting a thread for less does not pay


@dataclass(frozen=True)
class NativeKernel:
    """The code of a kernel: `int64 launch(void *kernel, void **buffers, int64 *sizes, int32 threads)` runs what is at
    its address, and gives not 0 if a check failed.

    Behind the addresses of the parameters come those of locals: `places` says for sizes where each starts in memory of
    its own, and how long that is; `lengths` are the bytes of each, over the program's `symbols`. `explain` runs the
    same program and raises what eager would. `put_back`: parameters that are written in place although the kernel may
    stop in the middle of that.
    """

    launch: int
    address: int
    source: Source
    facts: KernelFacts
    places: Callable[[tuple[int, ...]], list[int]]
    explain: Kernel
    library: Any  # owns the code

    @property
    def parameters(self) -> int:
        return self.facts.parameters

    @property
    def put_back(self) -> tuple[int, ...]:
        return self.facts.put_back

    @property
    def symbols(self) -> tuple[Size, ...]:
        return program_of(self.source).sizes if self.facts.sizes else ()

    @property
    def lengths(self) -> tuple[Index, ...]:
        if self.facts.locals is not None:
            return tuple(map(index, self.facts.locals))
        return _lengths_of_locals(program_of(self.source), self.facts.spared)


class KernelFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a caller of a kernel must know. `locals`: the length of each in bytes, None if that depends on sizes;
    `spared`: those that the kernel keeps in registers; `in_place`: parameters whose memory it changes, `put_back` as in
    `NativeKernel`."""

    parameters: int
    sizes: int
    locals: tuple[int, ...] | None
    spared: tuple[str, ...]
    in_place: tuple[int, ...]
    put_back: tuple[int, ...]

    def fits(self) -> bool:
        """Whether such a kernel can be."""
        numbers = (self.parameters, self.sizes, *(self.locals or ()))
        return min(numbers) >= 0 and all(0 <= index < self.parameters for index in (*self.in_place, *self.put_back))


class Code(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The machine code of some kernels before it is linked into a process. `externals`: what it calls outside;
    `refused`: the kernels that have no code, and why."""

    objects: tuple[bytes, ...]
    kernels: dict[str, KernelFacts]
    externals: tuple[str, ...]
    refused: dict[str, str]


@dataclass(frozen=True)
class StoredProgram:
    """A loop program that is read from its text when somebody asks for it."""

    name: str
    text: str

    @cached_property
    def program(self) -> Program:
        from ferrite.loops.text import parse_program

        return parse_program(self.text)


Source: TypeAlias = "Program | StoredProgram"


def program_of(source: Source) -> Program:
    return source.program if isinstance(source, StoredProgram) else source


def text_of(source: Source) -> str:
    if isinstance(source, StoredProgram):
        return source.text
    from ferrite.loops.text import show

    return show(source)


@dataclass(frozen=True)
class Kernels:
    """Every program as a function on its buffers and sizes. `native`: those with machine code; `in_place`: parameters
    that they change, by name."""

    functions: dict[str, Kernel]
    native: dict[str, NativeKernel] = field(default_factory=dict)
    in_place: dict[str, tuple[int, ...]] = field(default_factory=dict)


def kernels_of(sources: Sequence[Source], code: Code | None) -> Kernels:
    """The kernels of a graph, by the machine code that was built for them, here or in another process."""
    if code is not None:
        return link(sources, code)
    in_place = {source.name: _in_place(program_of(source)) for source in sources}
    return Kernels({source.name: oracle_kernel(source) for source in sources}, {}, in_place)


def build_code(programs: Sequence[Program]) -> tuple[Code, tuple[Decision, ...]]:
    """Machine code, of as many modules as threads make objects at once: each kernel is in one of them."""
    from ferrite.native import build, emit, target  # LLVM is loaded by the first graph that has kernels

    host = target.host()
    workers = max(min(torch.get_num_threads(), len(programs) // FEWEST_KERNELS, build.MOST_WORKERS), 1)
    modules: list[Any] = []

    def texts() -> Iterator[str]:
        for number in range(workers):
            modules.append(emit.emit(programs[number::workers], host))
            yield modules[-1].text

    objects = build.build_all(texts(), host, workers)
    spared = {name: those for module in modules for name, those in module.spared.items()}
    code = Code(
        tuple(objects),
        {program.name: _facts(program, spared[program.name]) for program in programs if program.name in spared},
        tuple(sorted({name for module in modules for name in module.externals})),
        {name: why for module in modules for name, why in module.refused.items()},
    )
    return code, tuple(decision for module in modules for decision in module.decisions)


def link(sources: Sequence[Source], code: Code) -> Kernels:
    """Code in this process. A program that native code refuses is run by the oracle."""
    from ferrite.native import build, launch

    library = build.load(code.objects, code.kernels, build.library_addresses(code.externals))
    address = launch.launch_address()
    functions = {source.name: oracle_kernel(source) for source in sources}
    native = {}
    for source in sources:
        facts = code.kernels.get(source.name)
        if facts is not None:
            native[source.name] = NativeKernel(
                address,
                library.address(source.name),
                source,
                facts,
                _places_of_locals(source, facts),
                functions[source.name],
                library,
            )
    functions |= {name: _native_function(name, kernel) for name, kernel in native.items()}
    refused = {source.name: _in_place(program_of(source)) for source in sources if source.name not in native}
    return Kernels(functions, native, {name: kernel.facts.in_place for name, kernel in native.items()} | refused)


@dataclass(frozen=True)
class Listing:
    """One kernel on its way to the processor, for people: its loops as they run, what LLVM is given, what it makes."""

    loops: str
    llvm: str
    assembly: str


def listing(source: Source) -> Listing:
    """Made anew, alone in its module. Raises `Unsupported` for a kernel that has no machine code."""
    from ferrite.native import build, emit, target

    host, program = target.host(), program_of(source)
    module = emit.emit([program], host)
    if program.name in module.refused:
        raise Unsupported(f"machine code for {program.name}", why=module.refused[program.name])
    return Listing(emit.show_loops(program), module.text, build.assembly(module.text, host))


def _facts(program: Program, spared: frozenset[str]) -> KernelFacts:
    lengths = _lengths_of_locals(program, spared)
    known = None if any(length.terms for length in lengths) else tuple(length.constant for length in lengths)
    counts = len(program.parameters), len(program.sizes)
    return KernelFacts(*counts, known, tuple(sorted(spared)), _in_place(program), _to_put_back(program))


def _native_function(name: str, kernel: NativeKernel) -> Kernel:
    """Calls the code. If a check in it fails, memory that the kernel writes in place is put back as it was, as eager
    would not have touched it yet, and the error is raised.

    Addresses and sizes go as bytes: packing four takes a third of the time that an array of ctypes does.
    """
    count, kept = kernel.parameters, kernel.put_back
    function = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int32)
    launch, address = function(kernel.launch), kernel.address
    locals_ = len(kernel.places((1,) * kernel.facts.sizes)) - 1
    pack_addresses = struct.Struct(f"{count + locals_}P").pack
    pack_sizes = struct.Struct(f"{kernel.facts.sizes}q").pack
    places_of_locals = kernel.places if locals_ else None

    def run(*arguments: Any) -> None:
        sizes = arguments[count:]
        addresses = [tensor.data_ptr() for tensor in arguments[:count]]
        if places_of_locals is not None:
            *places, length = places_of_locals(sizes)
            own = torch.UntypedStorage(length)  # lives until the call is over; half the time of an empty tensor
            start = own.data_ptr()
            addresses += [start + place for place in places]
        before = [arguments[n].detach().clone() for n in kept] if kept else ()
        if launch(address, pack_addresses(*addresses), pack_sizes(*sizes), thread_count()):
            for n, saved in zip(kept, before, strict=True):
                arguments[n].data.copy_(saved)  # autograd does not see it: the call did nothing
            kernel.explain(*arguments)
            raise ToolFailed("a kernel stopped", ran=name, why="a check failed that the oracle does not see")

    return run


def _to_put_back(program: Program) -> tuple[int, ...]:
    """The parameters that the kernel writes in place, if it may stop in the middle of that."""
    from ferrite.loops.rewrite import can_raise

    if not any(can_raise(nest) for nest in program.nests):
        return ()
    return _in_place(program)


def _in_place(program: Program) -> tuple[int, ...]:
    return tuple(n for n, parameter in enumerate(program.parameters) if parameter.role == "inout")


def _places_of_locals(source: Source, facts: KernelFacts) -> Callable[[tuple[int, ...]], list[int]]:
    """Where each local starts in one piece of memory for all of them, and the length of it, by the sizes of a call."""
    if facts.locals is not None:
        always = _one_behind_another(facts.locals)
        return lambda sizes: always

    @lru_cache(maxsize=64)
    def places(sizes: tuple[int, ...]) -> list[int]:
        program = program_of(source)
        known: dict[Atom, int] = dict(zip(program.sizes, map(int, sizes), strict=True))
        return _one_behind_another(evaluate(length, known) for length in _lengths_of_locals(program, facts.spared))

    return places


def _lengths_of_locals(program: Program, spared: Collection[str]) -> tuple[Index, ...]:
    """The bytes of each local; none where the code keeps it in registers."""
    return tuple(ZERO if buffer.name in spared else _length_of(buffer) for buffer in program.locals)


def _length_of(buffer: Buffer) -> Index:
    """The bytes from its first to its last element: rows may have gaps between them."""
    if is_contiguous(buffer.sizes, buffer.strides):
        return product(buffer.sizes) * buffer.dtype.bytes
    steps = [(extent - 1) * stride for extent, stride in zip(buffer.sizes, buffer.strides, strict=True)]
    return maximum(total([*steps, 1]) * buffer.dtype.bytes, 0)


def _one_behind_another(lengths: Iterable[int]) -> list[int]:
    places = [0]
    for length in lengths:
        places.append(places[-1] + -(-length // LINE) * LINE)
    return places


def thread_count() -> int:
    """As many as torch uses; one in a forked child, where the pool of the parent's threads is gone."""
    return 1 if _is_forked else torch.get_num_threads()


def is_forked() -> bool:
    return _is_forked


# Set for good in a child that was forked after this module was imported.
_is_forked = False


def _note_fork() -> None:
    global _is_forked
    _is_forked = True


os.register_at_fork(after_in_child=_note_fork)


def oracle_kernel(source: Source) -> Kernel:
    """A kernel that NumPy runs, plainly and slowly: the reference for every other way to run it."""

    def run(*arguments: Any) -> None:
        from ferrite.loops import oracle  # only kernels without code, and errors, need it

        program = program_of(source)
        names = [parameter.buffer.name for parameter in program.parameters]
        tensors, sizes = arguments[: len(names)], arguments[len(names) :]
        arrays = {name: as_array(tensor) for name, tensor in zip(names, tensors, strict=True)}
        size_names = [size.name for size in program.sizes]
        oracle.run(program, dict(zip(size_names, map(int, sizes), strict=True)), arrays)

    return run


def as_array(tensor: torch.Tensor) -> numpy.ndarray[Any, Any]:
    """The memory of a tensor as an array; bf16, which NumPy does not know, as its bits."""
    plain = tensor.detach()
    if plain.dtype == torch.bfloat16:
        return plain.view(torch.int16).numpy().view(numpy.uint16)
    return plain.numpy()
