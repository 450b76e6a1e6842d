"""A compiled graph: a host program with all that it needs, callable, printable, and able to leave the process.

Life story: the pipeline makes one; `load` turns its program into a function, now or in another process; AOTAutograd
keeps and calls that function; a `Parcel` carries everything else, machine code included (never the function, never
pickled code).
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch._ops import OpOverload
from torch.autograd import profiler

from ferrite.artifact.check_inputs import checker, checking_memory, keeping
from ferrite.artifact.constants import StoredTensor, load_tensor, store_tensors
from ferrite.artifact.kernels import (
    Code,
    Kernels,
    NativeKernel,
    Source,
    StoredProgram,
    build_code,
    kernels_of,
    program_of,
    text_of,
)
from ferrite.artifact.layout import Layout
from ferrite.decisions import Decision
from ferrite.errors import Unsupported
from ferrite.graph.names import resolve
from ferrite.host import packed
from ferrite.host.check import check_program
from ferrite.host.eager_calls import show_calls
from ferrite.host.nodes import ALLOCATE, HostProgram
from ferrite.host.python import PythonCode, emit, load
from ferrite.host.text import show_program
from ferrite.native import support

if TYPE_CHECKING:
    from ferrite.artifact.plan_memory import Need

PLACELESS = "ferrite"  # the folder of code that is in no file
RANGE = "torch._C._profiler._RecordFunctionFast"  # one in a profile, of the kind that the native form makes too


class Facts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is known of a compiled graph beside its program."""

    graph_id: int
    phase: str  # "forward", "backward" or "inference"
    output_strides: tuple[tuple[str, ...] | None, ...]  # as expressions over the symbols of the inputs
    mutated_inputs: tuple[int, ...]
    device_types: tuple[str, ...]
    changes: dict[str, int]  # pass -> number of changes
    seconds: float
    executor: str  # what runs kernels
    host: str  # what runs the program around them: "native" where every step has a door, "python"
    assumed: tuple[str, ...] = ()  # of sizes that change, as `check_inputs.assumptions` writes it


class Parcel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A compiled graph outside of any process. `program` as `host.packed` writes it, without its kernels: these are
    texts by name, which are read only when one fails. `layout`: of a program that runs natively, if sizes are known.
    `support`: objects that all graphs share, by name."""

    program: Any
    kernels: dict[str, str]
    facts: Facts
    constants: dict[str, StoredTensor]
    code: Code | None
    layout: Layout | None
    support: dict[str, bytes]


@dataclass
class CompiledGraph:
    """One graph, compiled. Calling it takes one list of arguments and empties it."""

    program: HostProgram
    constants: dict[str, Any]
    facts: Facts
    stored: tuple[StoredProgram, ...] = ()  # the kernels, if the program is without them
    built: Code | None = None  # machine code of the kernels, once there is some
    layout: Layout | None = None  # of the native program, once there is one
    support: Mapping[str, bytes] = field(default_factory=dict, repr=False)  # what it was carried here with
    folder: str = PLACELESS  # of its Python, if that is written to a file
    run: Callable[[list[Any]], Any] | None = field(init=False, default=None, repr=False)
    body: Callable[[list[Any]], Any] = field(init=False, repr=False)  # `run` without marks for a profiler
    check: Callable[[Any], None] | None = field(init=False, default=None, repr=False)
    native: dict[str, NativeKernel] = field(init=False, default_factory=dict, repr=False)  # once it is loaded
    decisions: tuple[Decision, ...] = field(init=False, default=(), repr=False)  # on kernels, if made here
    peak: int | None = field(init=False, default=None)  # bytes that a call needs at most, if memory was planned
    block: int | None = field(init=False, default=None)  # of them, those for inner buffers
    need: Need | None = field(init=False, default=None, repr=False)  # of memory, where sizes change
    why_python: str = field(init=False, default="")  # why Python runs between kernels although it need not

    def __post_init__(self) -> None:
        # AOTAutograd's wrappers copy only an instance's own attributes: a class attribute would not be seen.
        self._boxed_call = True
        self._alive: Any = None  # what the native program points to
        self._passed: Any = None  # what its calls have learned

    @cached_property
    def code(self) -> PythonCode:
        """The program in Python: what runs where the native host does not, and what people read."""
        return emit(self.program)

    @cached_property
    def key(self) -> str:
        return hashlib.sha256(msgspec.msgpack.encode(packed.pack(self.program))).hexdigest()

    @property
    def eager_calls(self) -> str:
        """What it calls that is no kernel: a JSON list, as `host.eager_calls` has it."""
        return show_calls(self.program)

    @property
    def kernels(self) -> tuple[Source, ...]:
        return self.stored or self.program.kernels

    def build(self, most: int | None = None) -> None:
        """Make the machine code of its kernels, or of the first `most`, unless it was carried here with it."""
        if self.built is None and self.kernels and self.facts.executor == "native":
            programs = [program_of(kernel) for kernel in self.kernels]
            self.built, self.decisions = build_code(programs[:most])
            for left_out in programs[len(programs[:most]) :]:
                self.built.refused[left_out.name] = "past the limit of bisection"

    @property
    def refused(self) -> dict[str, str]:
        """Kernels without machine code, and why."""
        return self.built.refused if self.built is not None else {}

    def load(self) -> Callable[[list[Any]], Any]:
        """Link the program into this process; the second time gives the same function."""
        if self.run is None:
            support.give(self.support)
            self.build()
            kernels = kernels_of(self.kernels, self.built)
            self.native = kernels.native
            body = self._native_body(kernels)
            if body is None:
                body = self._in_python(kernels, self.code)[self.program.name]
            self.body = body
            self.run = _with_profiler_scope(body, lambda: self._profiled(kernels))
            self.run.compiled = self  # type: ignore[attr-defined]
            self.run.alive = self._alive  # type: ignore[attr-defined]
        return self.run

    def peak_at(self, sizes: Mapping[str, int]) -> int | None:
        """Bytes that a call needs at most beside its arguments if sizes are these (`{"s0": 64}`, by the names that they
        have among the inputs of the program); None if memory was not planned, or if an op in eager makes a part of it.
        Raises `ValueError` for a size that is missing."""
        self.load()
        return self.peak if self.need is None else self.need.at(sizes)

    def announce(self, *, perf_map: bool, gdb: bool) -> None:
        """Tells the tools that the user named where its code is."""
        if perf_map or gdb:
            from ferrite.artifact.announce import announce  # it knows LLVM, which a graph without kernels does not need

            self.load()
            announce(self.program, self.native, perf_map=perf_map, gdb=gdb)

    def _native_body(self, kernels: Kernels) -> Callable[[list[Any]], Any] | None:
        """The program without Python; None if that is not asked for, or if a reason against it was found."""
        if self.facts.host != "native":
            return None
        from ferrite.artifact.native_host import assemble  # LLVM is loaded by the first graph that runs natively

        try:
            if self.facts.executor != "native":
                raise Unsupported(f"the executor is {self.facts.executor}")
            if self.facts.device_types != ("cpu",):
                raise Unsupported("tensors that are not on the CPU")
            functions = self._in_python(kernels, self.code) if self.program.functions else {}
            made = assemble(
                self.program, self.constants, kernels, functions, self.layout, settles=self.folder != PLACELESS,
                backward=self.facts.phase == "backward",
            )  # fmt: skip
        except Unsupported as error:
            self.why_python = str(error)
            return None
        self.peak, self.block, self._alive, self.layout = made.peak, made.block, made.alive, made.layout
        self.need, self._passed = made.need, made.passed
        return made.function

    def _in_python(self, kernels: Kernels, code: PythonCode) -> dict[str, Callable[..., Any]]:
        """The program in Python, and the functions that its operators call, by name. Each looks at the arguments whose
        memory it reads."""
        checked = checking_memory(self.program, kernels.functions)
        made = load(self.program, code, self.constants, checked, resolve, _callable, self.folder)
        for part in (*self.program.functions, self.program):
            keep = keeping(part, kernels.in_place)
            if keep is not None:
                wrap = _kept_boxed if part is self.program else _kept
                made[part.name] = wrap(made[part.name], keep)
        return made

    def _profiled(self, kernels: Kernels) -> _Profiled:
        """The same program with a range for each step, made when a profiler looks for the first time."""
        code = emit(self.program, RANGE)
        name, label = self.program.name, f"ferrite {self.program.name} {self.key[:12]}"
        if self._alive is None:
            return _Profiled(label, self._in_python(kernels, code)[name])
        from ferrite.artifact.native_host import assemble

        functions = self._in_python(kernels, code) if self.program.functions else {}
        made = assemble(
            self.program, self.constants, kernels, functions, self.layout, ranges=True, passed=self._passed,
            backward=self.facts.phase == "backward",
        )  # fmt: skip
        return _Profiled(label, made.function, made.alive)

    def __call__(self, args: list[Any]) -> Any:
        """For whoever calls it directly: wrong arguments are an error, before anything is written. AOTAutograd behind
        Dynamo, whose guards have looked, calls what `load` gives."""
        if self.check is None:
            self.check = checker(self.program, self.facts.device_types, self.facts.assumed)
        self.check(args)
        return self.load()(args)

    def __str__(self) -> str:
        kernels = tuple(program_of(kernel) for kernel in self.kernels)
        return show_program(replace(self.program, kernels=kernels))

    def parcel(self) -> Parcel:
        """Everything but the function. Raises `Unsupported` if a constant exists only in this process."""
        return Parcel(
            packed.pack(self.program),
            {source.name: text_of(source) for source in self.kernels},
            self.facts,
            store_tensors(self.constants),
            self.built,
            self.layout,
            support.held(),
        )

    @staticmethod
    def unpack(parcel: Parcel, lines: Mapping[str, str] | None = None) -> CompiledGraph:
        """`lines`: the user's that are others now. Raises `ValueError` or `Malformed` for what is no parcel."""
        constants = {name: load_tensor(stored) for name, stored in parcel.constants.items()}
        stored = tuple(StoredProgram(name, text) for name, text in parcel.kernels.items())
        program = packed.unpack(parcel.program, lines)
        check_program(program, _taken(parcel))
        if {constant.name for constant in program.constants} != constants.keys():
            raise ValueError("the constants are not those of the program")
        return CompiledGraph(program, constants, parcel.facts, stored, parcel.code, parcel.layout, parcel.support)

    def to_bytes(self) -> bytes:
        return msgspec.msgpack.encode(self.parcel())

    @staticmethod
    def from_bytes(data: bytes) -> CompiledGraph:
        return CompiledGraph.unpack(msgspec.msgpack.decode(data, type=Parcel))

    def __reduce__(self) -> tuple[Any, ...]:
        return CompiledGraph.from_bytes, (self.to_bytes(),)


def _kept_boxed(run: Callable[[list[Any]], Any], keep: Callable[[list[Any]], None]) -> Callable[[list[Any]], Any]:
    def call(args: list[Any]) -> Any:
        keep(args)
        return run(args)

    return call


def _kept(run: Callable[..., Any], keep: Callable[[list[Any]], None]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        given = [*args]
        keep(given)
        del args
        return run(*given)

    return call


def _taken(parcel: Parcel) -> dict[str, tuple[int, int] | None]:
    """What each kernel takes, as its code says. Raises `ValueError` if that cannot be."""
    known: dict[str, tuple[int, int] | None] = dict.fromkeys(parcel.kernels)
    for name, facts in (parcel.code.kernels if parcel.code else {}).items():
        if name not in known or not facts.fits():
            raise ValueError(f"the code of {name} is not that of a kernel here")
        known[name] = facts.parameters, facts.sizes
    return known


def _callable(path: str) -> Any:
    """What generated code calls: for a plain operator what its Python wrapper would call, one frame less. Memory is
    allocated by the function of torch's own binding, which takes a fifth of the time."""
    if path == ALLOCATE:
        return torch.empty_strided
    found = resolve(path)
    return found._op if type(found) is OpOverload else found


@dataclass(frozen=True)
class _Profiled:
    """What runs while a profiler looks: a function, the name of the range around it, and what it points to."""

    label: str
    function: Callable[[list[Any]], Any]
    alive: Any = None


def _with_profiler_scope(body: Callable[[list[Any]], Any], make: Callable[[], _Profiled]) -> Callable[[list[Any]], Any]:
    """Calls `body`, or what `make` gives while a profiler looks. That is made once, in a thread of its own: neither the
    profile nor the modes of the caller have to do with it."""
    profiled: _Profiled | None = None
    making = threading.Lock()

    def run(args: list[Any]) -> Any:
        if profiler._is_profiler_enabled:
            nonlocal profiled
            with making:
                if profiled is None:
                    with ThreadPoolExecutor(1) as other:
                        profiled = other.submit(make).result()
            with profiler.record_function(profiled.label):
                return profiled.function(args)
        return body(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
