"""Random loop programs: machine code against the oracle, for every instruction set that this machine has.

The programs are those of `tests/unit/loop_programs.py`. Each becomes code as it is and after the passes that work on
one kernel, runs with one thread and with two, and is compared with the oracle's run of the program as it is.

Note [Undecided elements]
Loop programs are free: they compare rounded values, make indices of them, look at the sign of NaN. So where code and
oracle differ, the oracle runs NOISY_RUNS times more with noise. What it computes by approximation moves by a few units
in the last place; sums and products are those of operands that moved, and where some order of them overflows the result
is any; NaN has any bits. The oracle's own formulas for special functions round what they are given in f64 (x / sqrt(2)
for `log_ndtr`, whose relative error is then 64 times as large at x = 8): there the operand moves too. An element that
noise changes is undecided: floats may be as far apart as SPREAD times what noise does, other values are not compared.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from ferrite.loops import oracle
from ferrite.loops.dtypes import DType
from ferrite.loops.nodes import Program
from ferrite.loops.oracle_reduce import REDUCE, SCAN, Body
from ferrite.loops.oracle_values import EXACT, from_storage, rounded, to_storage
from ferrite.loops.passes import BOX_PASSES, LOOP_PASSES
from ferrite.loops.text import show
from ferrite.native.target import Target
from ferrite.schedule.keep_exponentials import keep_exponentials
from ferrite.schedule.keep_rows import keep_rows
from ferrite.schedule.lift_reductions import lift_reductions
from ferrite.schedule.split_reduction import split_reductions
from ferrite.schedule.tile import tile_transposes
from tests.unit.loop_programs import programs, size_values
from tests.unit.test_native_kernels import TARGETS as ALL_TARGETS
from tests.unit.test_native_kernels import Code, inputs

NOISY_RUNS = 4
NOISE = 3.0  # units in the last place
NORMAL_NOISE = 2.0**-21  # absolute
SPREAD = 6.0
PRECISION = {"f64": 2.0**-52, "f32": 2.0**-23, "f16": 2.0**-10, "bf16": 2.0**-7}
TOLERANCE = 8.0  # units in the last place that need no explanation
OF_ONE_KERNEL = (lift_reductions, split_reductions, keep_rows, keep_exponentials, tile_transposes)
KERNEL_PASSES = (*LOOP_PASSES, *OF_ONE_KERNEL, *BOX_PASSES)
APPROXIMATED = ("sum", "prod", "welford", "softmax")
EXACT_BY_DTYPE = ("shl", "shr", "nextafter", "fma")
BY_FORMULA = ("erfinv", "ndtri", "log_ndtr", "lgamma", "digamma", "i0", "i0e", "i1", "i1e")
# One for each instruction set. Two that differ in nothing that code is written by would only double LLVM's work, which
# is most of the time that a program takes.
TARGETS = tuple({replace(each, name="", cpu="", features=""): each for each in reversed(ALL_TARGETS)}.values())[::-1]


class Differs(AssertionError):
    """Code and oracle disagree; the message has the program and what to call it with."""


# ---- the oracle with noise


@contextlib.contextmanager
def noise(number: int) -> Iterator[None]:
    """See Note [Undecided elements]."""
    rng = np.random.default_rng(number)
    plain_operate, plain_bits, plain_random = oracle.operate, oracle.bits, oracle._random

    def has_other_sign(value: Any) -> Any:
        """Which NaN are turned: all of them in the first run, so that no element is decided by four lucky draws."""
        return np.isnan(value) & (rng.random(np.shape(value)) < (0.5 if number else 1.0))

    def operate(operation: str, dtype: DType, *operands: Any) -> Any:
        result = plain_operate(operation, dtype, *operands)
        if not dtype.is_float:
            return result
        if operation in ("signbit", "copysign"):
            odd = has_other_sign(operands[-1])
            return np.where(odd, ~result if operation == "signbit" else -result, result)
        if operation in BY_FORMULA and dtype.name == "f64":
            other = plain_operate(operation, dtype, *(moved(operand, dtype, rng) for operand in operands))
            result = np.where(_class(other) == _class(result), other, result)
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

    def __init__(self, program: Program, sizes: dict[str, int], number: int) -> None:
        self.program, self.sizes = program, sizes
        self.arrays = inputs(program, sizes, number)
        self.plain = run_oracle(program, sizes, self.arrays)
        self._noisy: list[dict[str, Any]] | None = None

    @property
    def noisy(self) -> list[dict[str, Any]]:
        if self._noisy is None:
            self._noisy = []
            for number in range(NOISY_RUNS):
                with noise(number):
                    self._noisy.append(run_oracle(self.program, self.sizes, self.arrays))
        return self._noisy

    def complaint(self, arrays: dict[str, Any]) -> str:
        """How these arrays differ; empty if they do not."""
        for parameter in self.program.parameters:
            name, dtype = parameter.buffer.name, parameter.buffer.dtype
            found, wanted = from_storage(arrays[name], dtype), self.plain[name]
            wrong = ~agrees(found, wanted, dtype)
            if wrong.any():
                wrong &= ~self._explained(name, found, wanted, dtype)
            if wrong.any():
                first = tuple(int(n) for n in np.argwhere(wrong)[0])
                return f"{name}{list(first)}: the oracle has {wanted[first]!r}, the code {found[first]!r}"
        return ""

    def _explained(self, name: str, found: Any, wanted: Any, dtype: DType) -> Any:
        runs = np.stack([run[name] for run in self.noisy])
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


def passed(program: Program) -> Program:
    """After every pass that works on one kernel."""
    for run in KERNEL_PASSES:
        program = run(program)
    return program


def check(program: Program, sizes: dict[str, int], number: int, targets: tuple[Target, ...]) -> int:
    """Raises `Differs`; else says how many runs were compared, of which a refused program has none."""
    reference, compared = Reference(program, sizes, number), 0
    how, form = "after all passes", program
    try:
        for place, form in enumerate(dict.fromkeys((program, passed(program)))):
            # Passes know nothing of targets: code of what they give is made for the first one only.
            for target in targets[:1] if place else targets:
                how = f"{target.name}, {'after all passes' if place else 'as it is'}"
                code = Code(form, target)
                for threads in (1, 2) if code.refused is None else ():
                    compared += 1
                    how = f"{target.name}, {threads} threads, {'after all passes' if place else 'as it is'}"
                    _compare(code, reference, sizes, threads)
    except Exception as error:
        # Whatever goes wrong between the program and its result: a pass, LLVM, a check, a value.
        what = str(error) if isinstance(error, Differs) else f"{type(error).__name__}: {error}"
        raise Differs(_message(program, form, sizes, number, how, what)) from error
    return compared


def _compare(code: Code, reference: Reference, sizes: dict[str, int], threads: int) -> None:
    arrays = {name: _copy(each) for name, each in reference.arrays.items()}
    if code(sizes, arrays, threads):
        raise Differs("a check fails in the code only")
    if complaint := reference.complaint(arrays):
        raise Differs(complaint)


def _copy(array: Any) -> Any:
    """With the same strides: code knows no others."""
    flat = np.empty(1 + sum(max(n - 1, 0) * s for n, s in zip(array.shape, array.strides, strict=True)), array.dtype)
    made = np.lib.stride_tricks.as_strided(flat, array.shape, array.strides)
    made[...] = array
    return made


def _message(program: Program, form: Program, sizes: dict[str, int], number: int, how: str, what: str) -> str:
    text = show(program) + (f"\n---- after passes\n{show(form)}" if form is not program else "")
    return f"{what}\n{how}; sizes {sizes}; inputs of seed {number}\n\n{text}"


def run_batch(start: int, count: int, targets: tuple[Target, ...] = TARGETS, shrink: bool = True) -> int:
    """`count` programs from a seed; raises `Differs` for the smallest program like the first that differs."""
    phases = [Phase.generate, Phase.shrink] if shrink else [Phase.generate]
    compared = [0]

    @seed(start)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=phases,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @given(st.data())
    def one(data: Any) -> None:
        program = data.draw(programs())
        sizes = data.draw(size_values(program))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's, for what overflows in the oracle
            compared[0] += check(program, sizes, data.draw(st.integers(0, 1000)), targets)

    try:
        one()
    except Differs as found:
        raise Differs(str(found)) from None  # without the notes of hypothesis, which print the program as a tree
    return compared[0]
