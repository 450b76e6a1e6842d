"""Random loop programs: machine code against the oracle, for every instruction set that this machine has.

The programs are those of `tests/unit/loop_programs.py`. Each becomes code as it is and after the passes that work on
one kernel, each for one of the instruction sets, and is compared with the oracle's run of the program as it is. Numbers
of programs count through all pairs of instruction sets. In every other batch limits are small: what passes and emitter
do for large memory, long rows and many points they do in these programs too, and threads share all loops: then one, two
and three threads give the same bits. Memory that is not an element stays what it is, and buffers lie against pages that
nobody may touch, in turn with their last byte and their first: who reads too far ends the process.

How many programs each pass has changed, and each path of the emitter was taken in, is counted: of one that found none
the programs say nothing.

Note [Time of a loop program]
Of 169 ms a program 105 were LLVM's, 25 the emitter's, 16 those of hypothesis: 3 modules a program at 2 to 7 ms before
their first line. So a batch is one module for each instruction set, and LLVM optimises only what ships from here: the
other instruction sets are the emitter's work that is to be tested, and take half the time without. Every fourth batch
optimises all.

Note [Undecided elements]
Loop programs are free: they compare rounded values, make indices of them, look at the sign of NaN. So where code and
oracle differ, the oracle runs NOISY_RUNS times more with noise. What it computes by approximation moves by a few units
in the last place; sums and products are those of operands that moved, and where some order of them overflows the result
is any; NaN has any bits. The oracle's own formulas for special functions round what they are given in f64 (x / sqrt(2)
for `log_ndtr`, whose relative error is then 64 times as large at x = 8): there the operand moves too. That for `lgamma`
adds numbers of about 1 where its zeros are: there its error is not relative. Code for `ndtr` of f32 and halves is exact
beside 1 only: a small result may be any as small, and 0. An element that
noise changes is undecided: floats may be as far apart as SPREAD times what noise does, other values are not compared.
Which of two equal sums is the greater one is decided by four draws in one of sixteen cases: what they do not explain
may be explained by MOST_NOISY_RUNS.
"""

from __future__ import annotations

import contextlib
import mmap
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import llvmlite.binding as llvm
import numpy as np

from ferrite.loops import oracle
from ferrite.loops.dtypes import DType
from ferrite.loops.nodes import Buffer, Program
from ferrite.loops.oracle_reduce import REDUCE, SCAN, Body
from ferrite.loops.oracle_values import EXACT, STORAGE, from_storage, rounded, to_storage
from ferrite.loops.passes import BOX_PASSES, LOOP_PASSES
from ferrite.loops.text import show
from ferrite.native import ahead, build, emit, reduce, rows, stream
from ferrite.native.target import Target
from ferrite.schedule import arrange, shape, split_reduction, tile
from ferrite.schedule.cut_at_guards import cut_at_guards
from ferrite.schedule.decided import Decided
from ferrite.schedule.keep_exponentials import keep_exponentials
from ferrite.schedule.keep_rows import keep_rows
from ferrite.schedule.lift_reductions import lift_reductions
from ferrite.schedule.split_axes import split_axes
from ferrite.schedule.split_reduction import Limits, split_reductions
from ferrite.schedule.tile import tile_transposes
from tests.unit.fences import Fences
from tests.unit.loop_programs import program_from
from tests.unit.targets import TARGETS
from tests.unit.test_native_kernels import Code, extents, inputs

from .choices import Choices, smaller

NOISY_RUNS, MOST_NOISY_RUNS = 4, 32
NOISE = 3.0  # units in the last place
NORMAL_NOISE = 2.0**-21  # absolute
SPREAD = 6.0
PRECISION = {"f64": 2.0**-52, "f32": 2.0**-23, "f16": 2.0**-10, "bf16": 2.0**-7}
TOLERANCE = 8.0  # units in the last place that need no explanation
OF_ONE_KERNEL = (
    lift_reductions,
    split_axes,
    split_reductions,
    keep_rows,
    keep_exponentials,
    cut_at_guards,
    tile_transposes,
)
KERNEL_PASSES = (*LOOP_PASSES, *OF_ONE_KERNEL, *BOX_PASSES)
# What the emitter looks for: each says what it has found.
EMITTER_PATHS = (
    (emit, "sums_across"),
    (emit, "next_rows"),
    (emit, "next_looked_up"),
    (emit, "streamed_in"),
    (emit, "further_on"),
    (rows, "next_rows_across"),
    (reduce, "next_pieces"),
    (reduce, "next_group"),
    (reduce, "are_pieces_apart"),
)
COUNTED = (*(run.__name__ for run in KERNEL_PASSES), *(path for _, path in EMITTER_PATHS))
# Where a limit stands, and what it is in turn in batches with small limits.
SMALL_LIMITS: tuple[tuple[Any, str, tuple[Any, ...]], ...] = (
    (emit, "GRAIN", (1,)),
    (emit, "STRETCH", (256,)),
    (emit, "COLUMNS", (256,)),
    (emit, "MOST_COLUMNS", (64, 2048)),
    (rows, "MOST_COLUMNS", (64, 2048)),
    (rows, "FEWEST_ROWS", (2, 8)),
    (rows, "FAR", (1,)),
    (ahead, "PIECE_BYTES", (range(1, 1 << 17),)),
    (ahead, "FAR", (1,)),
    (ahead, "CACHED", (0,)),
    (ahead, "FIRST_CACHE", (0, 1 << 14)),
    (ahead, "FEWEST_VECTORS", (0, 1)),
    (stream, "LONG_PIECE", (1,)),
    (stream, "TILE_PIECE", (1,)),
    (shape, "LARGE", (1, 1 << 25)),
    (shape, "LARGE_ACROSS", (1, 1 << 23)),
    (arrange, "LONGEST_ROW", (1 << 14, 256)),
    (sys.modules[keep_rows.__module__], "LONGEST_ROW", (1 << 14, 256)),
    (arrange, "LARGEST_ROW", (1 << 15, 1 << 15, 128)),
    (arrange, "LARGEST_TILE", (1 << 17, 1 << 17, 256)),
    (arrange, "FEW_POINTS", (16, 4)),
    (arrange, "MUCH_WORK", (1 << 17, 64)),
    (tile, "FEW_POINTS", (1,)),
    (tile, "HEIGHTS", ((64, 32), (16,))),
    (tile, "WIDTH", (32, 16)),
    (split_reduction, "STRETCH", (64,)),
    (split_reduction, "SOME_COLUMNS", (4,)),
    (split_reduction, "WHOLE_VECTORS", (4, 64)),
    # Arguments that nobody gives.
    (
        split_reductions,
        "__defaults__",
        (
            (Limits(few=16, long=32, block=16, columns=256, rows=2, piece=2, cached=0),),
            (Limits(few=2, long=64, block=32, columns=1024, rows=4, piece=8, cached=0),),
        ),
    ),
    (tile_transposes, "__defaults__", ((4,), (8,), (5,))),
    (cut_at_guards, "__defaults__", ((1,), (4,))),
    (split_axes, "__defaults__", ((1,), (4,))),
)
SETTINGS = 6  # after which all limits have been through their values in every company
ODD_SHARES = (0.3, 0.02, 0.0)  # of elements that are not finite and the like: a long sum is NaN with many of them
APPROXIMATED = ("sum", "prod", "welford", "softmax")
EXACT_BY_DTYPE = ("shl", "shr", "nextafter", "fma")
BY_FORMULA = ("erfinv", "ndtr", "ndtri", "log_ndtr", "lgamma", "digamma", "i0", "i0e", "i1", "i1e")
MARGIN = 64  # bytes before and after every buffer that stay what they are
UNTOUCHED = 0xA5
SHRINK_SECONDS = 60.0


class Differs(AssertionError):
    """Code and oracle disagree; the message has the program and what to call it with."""


# ---- the oracle with noise


@contextlib.contextmanager
def noise(number: int) -> Iterator[None]:
    """See Note [Undecided elements]."""
    rng = np.random.default_rng(number)
    plain_operate, plain_bits, plain_random = oracle.operate, oracle.bits, oracle._random

    def has_other_sign(value: Any) -> Any:
        """Which NaN are turned: all of them in the first run, so that no element is decided by four lucky draws; in the
        next two those of one sign, since a processor may have the same sign for all."""
        is_turned = [np.ones_like, np.signbit, lambda each: ~np.signbit(each)]
        chosen = is_turned[number](value) if number < len(is_turned) else rng.random(np.shape(value)) < 0.5
        return np.isnan(value) & chosen.astype(np.bool_)

    def operate(operation: str, dtype: DType, *operands: Any) -> Any:
        result = plain_operate(operation, dtype, *operands)
        if not dtype.is_float:
            return result
        if operation in ("signbit", "copysign"):
            odd = has_other_sign(operands[-1])
            return np.where(odd, ~result if operation == "signbit" else -result, result)
        if operation in BY_FORMULA and dtype.name == "f64":
            other = plain_operate(operation, dtype, *(moved(operand, dtype, rng) for operand in operands))
            if operation == "lgamma":
                other = other + NOISE * PRECISION["f64"] * (rng.random(np.shape(other)) * 2 - 1)
            result = np.where(_class(other) == _class(result), other, result)
        if operation == "ndtr" and dtype.name != "f64":
            result = np.maximum(result + PRECISION["f32"] * (rng.random(np.shape(result)) * 2 - 1), 0)
        exact = operation in EXACT or operation in EXACT_BY_DTYPE
        return result if exact or result.dtype == np.bool_ else moved(result, dtype, rng)

    def bits(value: Any, source: DType, target: DType) -> Any:
        """NaN has any sign and any fraction: conversions keep it, or make it the one that the processor prefers."""
        if not source.is_float:
            return plain_bits(value.astype(oracle.value_type(source)), source, target)
        turned = np.where(has_other_sign(value), -value, value).astype(oracle.value_type(source))
        stored = np.ascontiguousarray(to_storage(turned, source)).reshape(np.shape(value))
        whole = stored.view(f"u{stored.dtype.itemsize}")
        fraction = whole.dtype.type(round(1 / PRECISION[source.name]) - 1)
        preferred = (whole & ~fraction) | (fraction // 2 + 1)
        is_other = np.isnan(value) & (rng.random(np.shape(value)) < (0.5 if number else 1.0))
        return from_storage(np.where(is_other, preferred, whole).view(oracle.STORAGE[target]), target)

    def random(draw: str, *given: Any) -> Any:
        """Near 0 a normal number is the cosine of an angle that was rounded: what is right of it is not relative."""
        drawn = plain_random(draw, *given)
        turned = drawn + NORMAL_NOISE * (rng.random(np.shape(drawn)) * 2 - 1)
        return rounded(turned, _F32) if draw == "normal" else drawn

    reductions = {name: _disturbed(REDUCE[name], name, rng) for name in APPROXIMATED}
    scans = {name: _disturbed_scan(SCAN[name], rng) for name in ("cumsum", "cumprod", "logcumsumexp")}
    with (
        mock.patch.multiple(oracle, operate=operate, bits=bits, _random=random),
        mock.patch.dict(REDUCE, reductions),
        mock.patch.dict(SCAN, scans),
    ):
        yield


_F32 = next(dtype for dtype in oracle.STORAGE if dtype.name == "f32")


def moved(value: Any, dtype: DType, rng: np.random.Generator) -> Any:
    """Each element by up to NOISE units in the last place, or so."""
    factor = 1 + NOISE * PRECISION[dtype.name] * (rng.random(np.shape(value)) * 2 - 1)
    return rounded(np.asarray(value, np.float64) * factor, dtype)


class _Moved:
    """What a reduction combines, with noise: the same noise whenever it is asked for."""

    def __init__(self, body: Body, number: int) -> None:
        self.body, self.number = body, number

    def __getattr__(self, name: str) -> Any:
        return getattr(self.body, name)

    def chunks(self) -> Iterator[Any]:
        rng = np.random.default_rng(self.number)
        for chunk in self.body.chunks():
            yield moved(chunk, self.body.dtype, rng)


def _disturbed(plain: Callable[[Any], Any], name: str, rng: np.random.Generator) -> Callable[[Any], Any]:
    def reduce(body: Any) -> Any:
        if not body.dtype.is_float:
            return plain(body)
        results = plain(_Moved(body, int(rng.integers(2**31))))
        odd = _may_overflow(name, body)
        which = rng.choice([np.nan, np.inf, -np.inf, 0.0], np.shape(odd))
        changed = {key: np.where(odd, which, moved(value, body.dtype, rng)) for key, value in results.items()}
        return {key: rounded(value, body.dtype) for key, value in changed.items()}

    return reduce


def _may_overflow(name: str, body: Any) -> Any:
    """Where some order of combining leaves the range of the dtype on the way."""
    limit = {"f16": 3e38, "bf16": 3e38, "f32": 3e38, "f64": 1e308}[body.dtype.name]
    sizes, large, small = np.zeros(body.shape), np.zeros(body.shape), np.zeros(body.shape)
    for chunk in body.chunks():
        magnitude = np.abs(np.asarray(chunk, np.longdouble))
        magnitude = np.where(np.isfinite(magnitude), magnitude, 0)
        logs = np.log2(np.where(magnitude > 0, magnitude, 1))
        sizes = sizes + magnitude.sum(axis=0)
        large, small = large + np.maximum(logs, 0).sum(axis=0), small + np.minimum(logs, 0).sum(axis=0)
    exponent = np.log2(limit)
    if name == "prod":
        return (large > exponent - 1) | (small < 2 - exponent)
    return (sizes > np.sqrt(limit) if name == "welford" else sizes > limit / 4) & (name != "softmax")


def _disturbed_scan(plain: Callable[..., Any], rng: np.random.Generator) -> Callable[..., Any]:
    def scan(value: Any, dtype: DType) -> Any:
        return plain(moved(value, dtype, rng), dtype) if dtype.is_float else plain(value, dtype)

    return scan


# ---- comparing


def run_oracle(program: Program, sizes: dict[str, int], arrays: dict[str, Any]) -> dict[str, Any]:
    """The parameters afterwards, as values; `arrays` stay as they are."""
    own = {name: each.copy() for name, each in arrays.items()}
    oracle.run(program, sizes, own)
    return {p.buffer.name: from_storage(own[p.buffer.name], p.buffer.dtype) for p in program.parameters}


class Reference:
    """What the oracle says about one program and one set of inputs; with noise only if somebody asks."""

    def __init__(self, program: Program, sizes: dict[str, int], seed: int) -> None:
        self.program, self.sizes, self.seed = program, sizes, seed
        self.arrays = inputs(program, sizes, seed, ODD_SHARES[seed % len(ODD_SHARES)])
        self.plain = run_oracle(program, sizes, self.arrays)
        self._noisy: list[dict[str, Any]] = []

    def noisy(self, runs: int) -> list[dict[str, Any]]:
        """So many runs with noise, or more."""
        for number in range(len(self._noisy), runs):
            with noise(number):
                self._noisy.append(run_oracle(self.program, self.sizes, self.arrays))
        return self._noisy

    def complaint(self, arrays: dict[str, Any]) -> str:
        """How these arrays differ; empty if they do not."""
        for parameter in self.program.parameters:
            name, dtype = parameter.buffer.name, parameter.buffer.dtype
            found, wanted = from_storage(arrays[name], dtype), self.plain[name]
            wrong = ~agrees(found, wanted, dtype)
            for runs in (NOISY_RUNS, MOST_NOISY_RUNS):
                if wrong.any():
                    wrong &= ~self._explained(name, found, wanted, dtype, runs)
            if wrong.any():
                first = tuple(int(n) for n in np.argwhere(wrong)[0])
                return f"{name}{list(first)}: the oracle has {wanted[first]!r}, the code {found[first]!r}"
        return ""

    def _explained(self, name: str, found: Any, wanted: Any, dtype: DType, count: int) -> Any:
        runs = np.stack([run[name] for run in self.noisy(count)])
        if not dtype.is_float:
            return (runs != wanted).any(axis=0)
        with np.errstate(all="ignore"):
            changed_class = (_class(runs) != _class(wanted)).any(axis=0)
            spread = np.abs(runs.astype(np.longdouble) - wanted).max(axis=0)
            near = np.abs(found.astype(np.longdouble) - wanted) <= SPREAD * spread
        zeros = (found == 0) & (wanted == 0) & (np.signbit(runs) != np.signbit(wanted)).any(axis=0)
        return changed_class | (near & (_class(found) == _class(wanted)) & (spread > 0)) | zeros


def agrees(found: Any, wanted: Any, dtype: DType) -> Any:
    """Element by element: integers and bools equal, floats within a few units in the last place, zeros by sign."""
    if not dtype.is_float:
        return np.asarray(found == wanted)
    with np.errstate(all="ignore"):
        ulp = PRECISION[dtype.name] * np.maximum(np.abs(wanted.astype(np.longdouble)), _SMALLEST[dtype.name])
        near = np.abs(found.astype(np.longdouble) - wanted) <= TOLERANCE * ulp
    same_zero = ~((found == 0) & (wanted == 0)) | (np.signbit(found) == np.signbit(wanted))
    finite = np.isfinite(found) & np.isfinite(wanted)
    return np.where(finite, near & same_zero, _class(found) == _class(wanted)) & (finite == np.isfinite(wanted))


_SMALLEST = {"f64": 2.0**-1022, "f32": 2.0**-126, "f16": 2.0**-14, "bf16": 2.0**-126}


def _class(value: Any) -> Any:
    """0 for finite values, and a number for each that is not."""
    return np.where(np.isnan(value), 2.0, np.where(np.isinf(value), np.sign(value), 0.0))


# ---- code


@dataclass(frozen=True)
class Subject:
    """A program, what to call it with, and which code to make of it. `seed`: of the inputs."""

    program: Program
    sizes: dict[str, int]
    seed: int

    def forms(self, ways: tuple[Way, Way]) -> Iterator[tuple[Program, Way]]:
        """As it is, and after every pass that works on one kernel."""
        yield self.program, ways[0]
        yield passed(self.program, ways[1]), ways[1]


TAKEN: Counter[str] = Counter()  # programs that a pass changed, and kernels that a path of the emitter was taken in


def passed(program: Program, way: Way) -> Program:
    with way.limits():
        for run in KERNEL_PASSES:
            before, found = program, run(program)
            program = found.program if isinstance(found, Decided) else found
            TAKEN[run.__name__] += program is not before and program != before
    return program


def subject_of(choices: Choices) -> Subject:
    program = program_from(choices)
    sizes = {size.name: choices.number(size.low, size.high) for size in program.sizes}
    return Subject(program, sizes, choices.number(0, 1000))


@dataclass(frozen=True)
class Way:
    """How code is made: for which target, with the product's limits or a setting of small ones, optimised by LLVM."""

    target: Target
    small: int | None
    optimised: bool

    @property
    def threads(self) -> tuple[int, ...]:
        return (1,) if self.small is None else (1, 2, 3)

    def limits(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.small is None else small_limits(self.small)

    def __str__(self) -> str:
        small = "" if self.small is None else f", small limits {self.small}"
        return f"{self.target.name}{small}{', not optimised' * (not self.optimised)}"


@contextlib.contextmanager
def small_limits(setting: int) -> Iterator[None]:
    """What passes and emitter do with large loops they do with small ones."""
    with contextlib.ExitStack() as stack:
        for owner, name, values in SMALL_LIMITS:
            stack.enter_context(mock.patch.object(owner, name, values[setting % len(values)]))
        yield


@cache
def all_ways() -> tuple[Way, ...]:
    return tuple(Way(target, small, True) for target in TARGETS for small in (None, *range(SETTINGS)))


def ways_of(number: int, batch: int) -> tuple[Way, Way]:
    """For a program as it is, and after passes."""
    places = number % len(TARGETS), number // len(TARGETS) % len(TARGETS)
    small = batch // 2 % SETTINGS if batch % 2 else None
    first, second = (Way(TARGETS[n], small, n == 0 or batch % 4 == 0) for n in places)
    return first, second


@contextlib.contextmanager
def counted_paths() -> Iterator[None]:
    """What the emitter finds is counted."""

    def counted(find: Callable[..., Any]) -> Callable[..., Any]:
        def found(*given: Any) -> Any:
            answer = find(*given)
            TAKEN[find.__name__] += bool(answer)
            return answer

        return found

    with contextlib.ExitStack() as stack:
        for module, name in EMITTER_PATHS:
            stack.enter_context(mock.patch.object(module, name, counted(getattr(module, name))))
        yield


def code_of(programs: Sequence[Program], way: Way) -> Iterable[Code | None]:
    """Of one module; None for a program that is refused."""
    renamed = [
        Program(f"p{n}", each.sizes, each.parameters, each.locals, each.nests) for n, each in enumerate(programs)
    ]
    text = emitted(renamed, way)
    if not text.names:
        return [None for _ in programs]
    made = build.build(text.text, way.target) if way.optimised else _quickly(text.text, way.target)
    library = build.load([made], text.names, build.library_addresses(text.externals))
    return [None if each.name in text.refused else Code.of(each, library) for each in renamed]


def emitted(programs: Sequence[Program], way: Way) -> emit.Emitted:
    with way.limits(), counted_paths():
        return emit.emit(programs, way.target)


def _quickly(text: str, target: Target) -> bytes:
    made: bytes = _quick_machine(target).emit_object(build._verified(text))
    return made


@cache
def _quick_machine(target: Target) -> Any:
    found = llvm.Target.from_triple(target.triple)
    return found.create_target_machine(cpu=target.cpu, features=target.features, opt=0, reloc="pic", codemodel="small")


@cache
def _fenced(place: int, pages: int) -> Fences:
    """Memory for the buffer with this place, of every program in turn."""
    return Fences(pages * mmap.PAGESIZE)


class Laid:
    """Memory for a call of a program, with the strides of its buffers, since code knows no others: parameters with
    their values, locals with none. A page that nobody may touch is right behind each, or right before it."""

    def __init__(self, program: Program, reference: Reference, *, at_end: bool) -> None:
        self.at_end = at_end
        self._watched: list[tuple[str, Any, Any]] = []
        self.arrays: dict[str, Any] = {}
        for parameter in program.parameters:
            name = parameter.buffer.name
            self.arrays[name] = self._lay(parameter.buffer, reference.sizes)
            self.arrays[name][...] = reference.arrays[name]
        self.locals = [self._lay(buffer, reference.sizes) for buffer in program.locals]

    def _lay(self, buffer: Buffer, sizes: dict[str, int]) -> Any:
        kind = STORAGE[buffer.dtype]
        shape, steps = extents(buffer, sizes)
        strides = [step * kind.itemsize for step in steps]
        reach = 0 if 0 in shape else kind.itemsize + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        place = len(self._watched)
        memory = _fenced(place, -(-(reach + MARGIN) // mmap.PAGESIZE)).bytes(reach + MARGIN, at_end=self.at_end)
        memory[...] = UNTOUCHED
        start = MARGIN if self.at_end else 0
        is_free = np.ones(memory.shape, np.bool_)
        if reach:
            np.lib.stride_tricks.as_strided(is_free[start:], (*shape, kind.itemsize), (*strides, 1))[...] = False
        self._watched.append((buffer.name, memory, is_free))
        return np.lib.stride_tricks.as_strided(memory[start : start + reach].view(kind), shape, strides)

    def bits(self) -> dict[str, bytes]:
        return {name: array.tobytes() for name, array in self.arrays.items()}

    def spilled(self) -> str:
        """Where bytes changed that are no element's."""
        for name, memory, is_free in self._watched:
            changed = np.flatnonzero(is_free & (memory != UNTOUCHED))
            if changed.size:
                return f"{name}: byte {changed[0] - MARGIN * self.at_end}, which is no element's, was written"
        return ""


# ---- checking


def check(subject: Subject, ways: tuple[Way, Way]) -> int:
    """Raises `Differs`; else says how many runs were compared, of which a refused program has none."""
    how, form = "after all passes", subject.program
    reference, compared = Reference(subject.program, subject.sizes, subject.seed), 0
    try:
        for form, way in subject.forms(ways):
            how = f"{way}, {'as it is' if form is subject.program else 'after all passes'}"
            (code,) = code_of([form], way)
            compared += _compare(code, reference, way)
    except Exception as error:
        # Whatever goes wrong between the program and its result: a pass, LLVM, a check, a value.
        what = str(error) if isinstance(error, Differs) else f"{type(error).__name__}: {error}"
        raise Differs(_message(subject, form, how, what)) from error
    return compared


def _compare(code: Code | None, reference: Reference, way: Way) -> int:
    """The number of runs. Raises `Differs`."""
    if code is None:
        return 0
    first = None
    for threads in way.threads:
        laid = Laid(code.program, reference, at_end=(reference.seed + threads) % 2 == 0)
        if code(reference.sizes, laid.arrays, threads, laid.locals):
            raise Differs(f"a check fails in the code only, with {threads} threads")
        if complaint := laid.spilled():
            raise Differs(complaint)
        if first is None:
            first = laid.bits()
            if complaint := reference.complaint(laid.arrays):
                raise Differs(complaint)
        elif laid.bits() != first:
            raise Differs(f"{threads} threads give other bits than one")
    return len(way.threads)


def _message(subject: Subject, form: Program, how: str, what: str) -> str:
    text = show(subject.program) + (f"\n---- after passes\n{show(form)}" if form is not subject.program else "")
    return f"{what}\n{how}; sizes {subject.sizes}; inputs of seed {subject.seed}\n\n{text}"


@dataclass(frozen=True)
class Batch:
    """How many runs were compared, what differs, each made small, and what passes and emitter found to do."""

    compared: int
    reports: tuple[str, ...]
    taken: Counter[str]


def run_batch(seed: int, batch: int, count: int, shrink: float = SHRINK_SECONDS) -> Batch:
    """The batch of programs with this number."""
    TAKEN.clear()
    numbers = range(batch * count, (batch + 1) * count)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's, for what overflows in the oracle
        try:
            compared = _run_together([(subject_of(choices_of(seed, n)), ways_of(n, batch)) for n in numbers])
            return Batch(compared, (), Counter(TAKEN))
        except Exception:
            taken = Counter(TAKEN)
        # One by one, to know which.
        compared, reports = 0, []
        for number in numbers:
            try:
                compared += check(subject_of(choices_of(seed, number)), ways_of(number, batch))
            except Differs as found:
                reports.append(f"program {number} of seed {seed}: {_explained(seed, number, batch, found, shrink)}")
        if not reports:
            reports.append(f"batch {batch} of seed {seed} differs as one module only")
        return Batch(compared, tuple(reports), taken)


def choices_of(seed: int, number: int) -> Choices:
    return Choices(random.Random(f"{seed}:{number}"))


def _run_together(cases: list[tuple[Subject, tuple[Way, Way]]]) -> int:
    """One module for each way."""
    wanted: dict[Way, list[tuple[Subject, Program]]] = {}
    for subject, ways in cases:
        for form, way in subject.forms(ways):
            wanted.setdefault(way, []).append((subject, form))
    references = {id(subject): Reference(subject.program, subject.sizes, subject.seed) for subject, _ in cases}
    compared = 0
    for way, pairs in wanted.items():
        for (subject, _), code in zip(pairs, code_of([form for _, form in pairs], way), strict=True):
            compared += _compare(code, references[id(subject)], way)
    return compared


def _explained(seed: int, number: int, batch: int, found: Differs, seconds: float) -> str:
    """The difference, by the smallest program that has one."""
    choices = choices_of(seed, number)
    subject_of(choices)
    last = [str(found)]

    def differs(other: Choices) -> bool:
        try:
            check(subject_of(other), ways_of(number, batch))
        except Differs as again:
            last.append(str(again))
            return True
        return False

    smaller(choices.made, differs, seconds)
    return min(last, key=len)


def check_all_ways(seed: int, number: int) -> tuple[Subject, str]:
    """A program and what is wrong with it, in every way that there is."""
    subject = subject_of(choices_of(seed, number))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            for way in all_ways():
                check(subject, (way, way))
        except Differs as found:
            return subject, str(found)
    return subject, ""
