"""Runs a program in eager and through an engine, and says how they differ.

Everything that `tests/ops/check.py` compares for one op is compared here for a program: errors, dtypes, sizes, strides,
aliasing of inputs and outputs, inputs afterwards, gradients, values. The compiled program is called twice, with the
sizes of the second call if it has any.

Note [Judging programs]
Floats may differ as they may for one op: within the tolerance of the dtype, or no farther from float64 than eager is.
But a program can subtract nearly equal numbers, and then eager may be right to the last bit by luck where one unit in
the last place of `exp` is a large error of the result. So if these rules do not accept a value, eager runs NOISY_RUNS
times more with noise: what an inexact step takes and gives, and every gradient on its way back, is moved by a few units
in the last place. Who is no farther from eager than SPREAD times the noisy runs are has made no error that matters.
There are many runs, because a softmax of large numbers only shows that it could be 1 where noise makes a number the
greatest. Integers that such a step casts to floats are moved as far as floats would be. Whole exponents stay whole: of
a negative number there is no other power. In every other run what takes one of two zeros takes the other one, and the
last run makes products of halves in float64 and rounds them once.
A zero that no noise moves, and whose sign none changes, has eager's sign.
Where noise changes which values are NaN or infinite, nobody can say which are right; such elements are not compared.
Eager may leave the range of a type on the way to a result that is in it: products of halves, and squares of the
largest numbers under a norm, which come to NaN. There float64 is right of halves, with which nobody else computes; of
others nobody is, and they are not compared (`in_range`). If a program goes on with such halves in a wider type, the
last of the noisy runs shows it. Some libraries that eager calls, on some processors, have NaN for what is infinite:
gelu(inf), and in bfloat16 inf times a number so small that instructions for it take it for 0. Who has the infinity that
float64 has is right.
Integers and truth values come from exact values only, and are equal or wrong.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.ops.cases import Case, Sample
from tests.ops.check import Call, Comparison, Difference, Observation, compiling, judge_values, observe, same_bits

from .engines import TORCH, UNLOWERED, Engine
from .programs import Input, Program, function_of, make_inputs, widened
from .together import Together

NOISY_RUNS = 24
NOISE = 2.0  # units in the last place
SPREAD = 4.0
HALVES = (torch.float16, torch.bfloat16)
SEED = 5
SECOND = "second call: "


@dataclass(frozen=True)
class Verdict:
    """How one engine did.

    status:  equal (to the bit), close, different
             torch: each difference is torch's: its own capture (`aot_eager`) has it as well, or it is about strides
             that eager has and torch's fake kernels do not know of
             dropped: eager itself cannot run the program backwards
    shared:  it differs only where engines share one trace
    """

    status: str
    differences: tuple[Difference, ...] = ()
    seconds: float = 0.0
    shared: bool = False

    @property
    def kind(self) -> str:
        return self.differences[0].kind if self.differences else self.status

    @property
    def text(self) -> str:
        return "; ".join(f"{each.kind}, {each.where}: {each.detail}" for each in self.differences[:2])


# ---- eager, and eager with noise


class Eager:
    """All that is asked of eager about one program, each once: shared by the engines that are compared with it."""

    def __init__(self, program: Program, inputs: Sequence[Input]) -> None:
        self.program = program
        given = tuple(make_inputs(inputs).values())
        mode = "train" if program.is_training else "infer"
        self.case = Case("program", "f32", "s0", "dynamic" if program.dynamic else "static", mode)
        self.sample = Sample("s0", given, (), {}, lambda result: result)
        self.seen = self.observe(_call(function_of(program)))
        self._promised: dict[str, tuple[int, ...]] | None = None
        self._reference: Observation | None = None
        self._noisy: list[Observation] | None = None

    @property
    def is_usable(self) -> bool:
        """Eager forbids a few backward passes after writes in place that compiled code has no trouble with."""
        return self.seen.backward_error is None

    def observe(self, call: Call, widen: bool = False) -> Observation:
        cotangents = self.seen.cotangents if hasattr(self, "seen") else None
        return observe(call, self.case, self.sample, SEED, widen, cotangents)

    @property
    def promised(self) -> dict[str, tuple[int, ...]]:
        """Strides of outputs and gradients by torch's fake kernels, which stand for eager while a graph is captured."""
        if self._promised is None:
            self._promised = {}
            # A step may have no fake kernel for such data; then nothing was promised.
            with contextlib.suppress(Exception), FakeTensorMode() as fake:
                given = [fake.from_tensor(tensor) for tensor in self.sample.input]
                made = function_of(self.program)(*given)
                self._promised = {f"output[{n}]": tuple(each.stride()) for n, each in enumerate(made)}
                leaves = [tensor for tensor in given if tensor.requires_grad]
                outputs = [each for each in made if each.requires_grad]
                starts = [torch.empty_like(each) for each in outputs]
                gradients = torch.autograd.grad(outputs, leaves, starts, allow_unused=True) if leaves else ()
                found = {f"gradient {n}": each for n, each in enumerate(gradients) if each is not None}
                self._promised |= {where: tuple(each.stride()) for where, each in found.items()}
        return self._promised

    @property
    def reference(self) -> Observation:
        """In float64, to which integers are promoted as well."""
        if self._reference is None:
            with torch.enable_grad(), _default_dtype(torch.float64):
                self._reference = self.observe(_call(function_of(widened(self.program))), widen=True)
        return self._reference

    @property
    def noisy(self) -> list[Observation]:
        if self._noisy is None:
            with torch.enable_grad():
                self._noisy = [self.observe(_call(self._with_noise(seed))) for seed in range(NOISY_RUNS)]
        return self._noisy

    def _with_noise(self, seed: int) -> Callable[..., Any]:
        generator = torch.Generator().manual_seed(seed)

        class Move(torch.autograd.Function):
            @staticmethod
            def forward(context: Any, value: torch.Tensor) -> torch.Tensor:
                return nudged(value, generator)

            @staticmethod
            def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
                return gradient

        def moved(value: torch.Tensor, casts: bool, is_exponent: bool) -> torch.Tensor:
            if value.is_floating_point():
                made = Move.apply(value)
                return torch.where(value == value.round(), value, made) if is_exponent else made
            return _nearer(value, generator) if casts and value.dtype != torch.bool else value

        def swapped(value: torch.Tensor, *operands: torch.Tensor) -> None:
            if value.is_floating_point() and seed % 2:
                negative = _any([(each == 0) & each.signbit() for each in operands])
                positive = _any([(each == 0) & ~each.signbit() for each in operands])
                two_zeros = (value == 0) & negative & positive
                value.data.copy_(torch.where(two_zeros, -value.data, value.data))

        def widely(made: torch.Tensor, step: Callable[..., torch.Tensor], given: torch.Tensor) -> torch.Tensor:
            return step(given.double()).to(made.dtype) if made.dtype in HALVES and seed == NOISY_RUNS - 1 else made

        def noted(value: torch.Tensor, rounds: bool) -> None:
            if value.is_floating_point() and rounds:
                # `.data`: autograd is not told, so it differentiates the step as if its result were the noisy one
                value.data.copy_(nudged(value.data, generator))
            if value.requires_grad:
                # Of several parts, one that nobody reads has no gradient.
                value.register_hook(lambda gradient: None if gradient is None else nudged(gradient, generator))

        return function_of(self.program, moved=moved, noted=noted, swapped=swapped, widely=widely)


def nudged(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Each element by up to NOISE units in the last place, or so."""
    noise = torch.rand(value.shape, generator=generator, dtype=torch.float64) * 2 - 1
    wide = value.to(torch.float64)
    moved = wide * (1 + NOISE * torch.finfo(value.dtype).eps * noise)
    return torch.where(wide.isfinite(), moved, wide).to(value.dtype)


def _nearer(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Integers nearer to zero, each by up to NOISE units in the last place that it would have as a float."""
    noise = torch.rand(value.shape, generator=generator, dtype=torch.float64)
    return value - (value.double() * NOISE * torch.finfo(torch.float32).eps * noise).to(value.dtype)


def _any(masks: Sequence[torch.Tensor]) -> torch.Tensor:
    return functools.reduce(torch.logical_or, masks)


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _call(function: Callable[..., Any]) -> Call:
    return lambda value, args, kwargs: function(*value)


# ---- comparing


class Promised(Comparison):
    """Strides that differ from eager's are torch's error if its fake kernels promised them; then a result that is a
    copy in eager may be a view. `promised`: those strides, by place."""

    promised: dict[str, tuple[int, ...]]
    as_promised = False

    def differs(self, kind: str, where: str, eager: Any, compiled: Any) -> None:
        strides = kind in ("strides", "gradient strides")
        if strides and self.promised.get(where.removeprefix(SECOND)) == compiled:
            self.as_promised = True
        elif kind == "alias" and self.as_promised:
            pass
        else:
            super().differs(kind, where, eager, compiled)

    def _values(
        self,
        eager: torch.Tensor,
        compiled: torch.Tensor,
        where: str,
        read: Callable[[Observation], Any],
        prefix: str,
    ) -> None:
        eager, compiled = eager.detach(), compiled.detach()
        if same_bits(eager, compiled):
            return
        kind = f"{prefix}value"
        if complaint := self._complaint((kind, where), eager, compiled, read):
            self.differences.append(Difference(kind, where, complaint))
        else:
            self.close = True

    def _complaint(
        self, place: tuple[str, str], eager: torch.Tensor, compiled: torch.Tensor, read: Callable[[Observation], Any]
    ) -> str:
        """What is wrong with a tensor that is not the same bits as in eager, if anything is. `read` finds it in
        another run, `place` is the kind of the difference and where it is."""
        raise NotImplementedError


class ProgramComparison(Promised):
    """As for one op, but values by Note [Judging programs]."""

    def __init__(self, eager: Eager) -> None:
        self.asked = eager
        self.case, self.sample, self.seed, self.eager = eager.case, eager.sample, SEED, eager.seen
        self.differences: list[Difference] = []
        self.notes: list[str] = []
        self.close = False
        self.values_defined = True

    @property
    def promised(self) -> dict[str, tuple[int, ...]]:  # type: ignore[override]
        return self.asked.promised

    def _complaint(
        self, place: tuple[str, str], eager: torch.Tensor, compiled: torch.Tensor, read: Callable[[Observation], Any]
    ) -> str:
        reference = _read(read, self.asked.reference)
        eager = in_range(eager, compiled, reference)
        complaint = judge_values(eager, compiled, reference)
        if complaint and eager.is_floating_point():
            noisy = [found for run in self.asked.noisy if (found := _read(read, run)) is not None]
            if is_within_noise(eager, compiled, noisy):
                return ""
        return complaint


def _read(read: Callable[[Observation], Any], run: Observation) -> torch.Tensor | None:
    """A tensor of another run; None if that run came to nothing there."""
    found = read(run) if run.error is None else None
    return found.detach() if isinstance(found, torch.Tensor) else None


def in_range(eager: torch.Tensor, compiled: torch.Tensor, reference: torch.Tensor | None) -> torch.Tensor:
    """What is wanted where eager left the range of its type, the result is in it, and who is judged did not leave; or
    where eager has NaN for the infinity that float64 has, and who is judged has that."""
    if reference is None or not eager.is_floating_point() or reference.shape != eager.shape:
        return eager
    rounded = reference.to(eager.dtype)
    wanted = rounded if eager.dtype in HALVES else compiled
    wanted = torch.where(rounded.isfinite() & compiled.isfinite() & ~eager.isfinite(), wanted, eager)
    return torch.where(eager.isnan() & rounded.isinf() & (compiled == rounded), compiled, wanted)


def is_within_noise(eager: torch.Tensor, compiled: torch.Tensor, noisy: list[torch.Tensor]) -> bool:
    """See Note [Judging programs]."""
    noisy = [run for run in noisy if run.shape == eager.shape]
    if len(noisy) < NOISY_RUNS or not eager.numel():
        return False
    left, right = eager.double(), compiled.double()
    runs = torch.stack([left, *(run.double() for run in noisy)])
    decided = _class(runs).eq(_class(left)).all(0)
    finite = left.isfinite() & right.isfinite()
    spread = torch.where(finite & decided, (runs - left).abs().amax(0), 0.0)
    ulp = torch.finfo(eager.dtype).eps * left.abs().clamp(min=torch.finfo(eager.dtype).tiny)
    near = (left - right).abs() <= SPREAD * spread + 2 * ulp
    same = (left == right) | (left.isnan() & right.isnan())
    sure_zeros = ((runs == 0) & (runs.signbit() == left.signbit())).all(0)
    odd_zeros = sure_zeros & (right == 0) & (left.signbit() != right.signbit())
    return bool(((same | near) & ~odd_zeros | ~decided).all())


def _class(value: torch.Tensor) -> torch.Tensor:
    """0 for finite values, and a number for each that is not."""
    return torch.where(value.isnan(), 2.0, torch.where(value.isinf(), value.sign(), 0.0))


# ---- the verdict


class Judge:
    """Judges one program, by one engine after the other. `baseline`: the engine whose differences are torch's."""

    def __init__(self, program: Program, baseline: Engine = TORCH) -> None:
        self.program, self.baseline = program, baseline
        self.first = Eager(program, program.inputs)
        self.second = Eager(program, program.second_inputs()) if program.resized else self.first
        self._torch: set[tuple[str, str]] | None = None

    def verdict(self, engine: Engine) -> Verdict:
        began = time.perf_counter()
        if not (self.first.is_usable and self.second.is_usable):
            return Verdict("dropped")
        with compiling(self.first.case.shapes), engine.compiling(), engine.running():
            return self._judged(engine, self._compare(engine.compiled(self.program)), began)

    def verdicts(self, engines: Sequence[Engine]) -> dict[str, Verdict]:
        """The same for several engines with one trace. One that differs is asked again alone: its word counts."""
        if not (self.first.is_usable and self.second.is_usable):
            return {engine.name: Verdict("dropped") for engine in engines}
        found = {}
        together = Together(self.program, engines)
        with compiling(self.first.case.shapes), together.watching():
            for engine in engines:
                began = time.perf_counter()
                together.turn = engine
                found[engine.name] = self._judged(engine, self._compare(together.function), began)
        for engine in engines:
            if found[engine.name].status == "different":
                alone = self.verdict(engine)
                found[engine.name] = alone if alone.status == "different" else replace(found[engine.name], shared=True)
        return found

    def _judged(self, engine: Engine, comparisons: list[ProgramComparison], began: float) -> Verdict:
        differences = [each for comparison in comparisons for each in comparison.differences]
        excused = any(comparison.as_promised for comparison in comparisons)
        if differences and engine is not self.baseline:
            known = self._differences_of_torch()
            excused |= any((each.kind, each.where) in known for each in differences)
            differences = [each for each in differences if (each.kind, each.where) not in known]
        close = any(comparison.close for comparison in comparisons)
        status = "different" if differences else "torch" if excused else "close" if close else "equal"
        return Verdict(status, tuple(differences), time.perf_counter() - began)

    def _differences_of_torch(self) -> set[tuple[str, str]]:
        if self._torch is None:
            self._torch = {(each.kind, each.where) for each in self.verdict(self.baseline).differences}
        return self._torch

    def _compare(self, compiled: Callable[..., Any]) -> list[ProgramComparison]:
        """Both calls; the second only if there is nothing to say against the first."""
        first = self.first.observe(_call(compiled))
        comparison = ProgramComparison(self.first)
        again = None if first.error is not None else self.second.observe(_call(compiled))
        comparison.compare(first)
        if again is None or comparison.differences:
            return [comparison]
        other = ProgramComparison(self.second)
        other.compare(again, SECOND)
        other.kept_apart(first, again)
        return [comparison, other]


def judge(program: Program, engine: Engine, baseline: Engine = TORCH) -> Verdict:
    return Judge(program, baseline).verdict(engine)


def blamed(program: Program, verdict: Verdict) -> str:
    """Whether the lowering has a part in a difference."""
    alike = judge(program, UNLOWERED).kind == verdict.kind
    return "not in torch's own capture, but in ours without lowering" if alike else "not without lowering"
