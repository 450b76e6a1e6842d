"""Conformance within the test suite: a seeded sample of the sweep, the known failures, and the harness itself.

The whole sweep is `python -m tests.ops`. Here every family of ops is sampled, and faults are planted in small
backends to see that the harness catches each of them.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch._dynamo.utils import counters

from . import known as known_failures
from . import sweep as sweeping
from .cases import (
    ERRORS,
    IN_LAYOUTS,
    LAYOUTS,
    STANDARD,
    Case,
    Group,
    Plan,
    Sample,
    Unit,
    family,
    groups,
    made_laid,
    matches,
    op_table,
    pick,
    units,
)
from .check import FERRITE, Engine, Verdict, judge_values, run_case, run_group
from .refused import refused_calls

SEED = 0
UNITS_PER_FAMILY = 3
CASES_PER_GROUP = 2
NEVER_ENTERED = {"sparse"}  # Dynamo breaks the graph at tensors in a compressed sparse layout
ENGINE = Engine("ferrite", FERRITE)

# The list of known failures may only shrink. When entries or patterns go away, lower these to what is left.
ENTRIES_CEILING = 15
PATTERNS_CEILING = 68


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    threads = torch.get_num_threads()
    sweeping.quiet()
    yield
    torch.set_num_threads(threads)
    torch._dynamo.reset()


# ---- the sample ---------------------------------------------------------------------------------------------------

FAMILIES = sorted({family(name) for name in op_table()})


def _draw(values: Iterable[Any], name: Callable[[Any], str], count: int) -> list[Any]:
    """A few of the values, chosen by digest: the same ones every time, other ones for another seed."""
    return sorted(values, key=lambda value: hashlib.sha256(f"{SEED} {name(value)}".encode()).digest())[:count]


def sampled_groups(name: str) -> Iterator[Group]:
    """Groups of a family, all of them part of the standard sweep, with a few of their cases each."""
    members = [unit for unit in units(STANDARD) if family(unit.op) == name]
    for unit in _draw(members, lambda unit: unit.id, UNITS_PER_FAMILY):
        for group in groups(unit, STANDARD):
            yield Group(tuple(_draw(group.members, lambda member: member[0].id, CASES_PER_GROUP)))


@pytest.mark.parametrize("name", FAMILIES)
def test_family_sample_matches_eager(name: str, tmp_path: Path) -> None:
    """Compiled, run in both executions of the host program, and then again with what the first time left in the cache:
    the same bits."""
    known = known_failures.load()
    wrong: list[tuple[str, Verdict]] = []
    entered: Counter[str] = Counter()
    saved = hits = 0
    engine = Engine("ferrite", FERRITE | {"cache": "strict", "cache_dir": str(tmp_path)})
    for group in sampled_groups(name):
        counters.clear()
        verdicts = list(run_group(group, msgspec.structs.replace(engine, both_hosts=True), SEED))
        stored = counters["ferrite"]["graph_cache_saved"]
        for verdict in verdicts:
            entered[verdict.entered] += 1
            standing = known_failures.account(verdict, known).standing
            if standing in ("failure", "stale"):
                wrong.append((standing, verdict))
        torch._dynamo.reset()
        counters.clear()
        again = list(run_group(group, engine, SEED))
        said = counters["ferrite"]
        assert said["graph_cache_saved"] == 0, f"what {group.members[0][0].id} had stored was not found"
        assert said["graph_cache_hit"] >= stored
        saved, hits = saved + stored, hits + said["graph_cache_hit"]
        wrong += [
            ("from the cache", warm)
            for cold, warm in zip(verdicts, again, strict=True)
            if (warm.bits, warm.status) != (cold.bits, cold.status) and "repeat itself" not in cold.note
        ]
    assert not wrong, "\n".join(f"{standing}: {verdict.id} {verdict.differences[:2]}" for standing, verdict in wrong)
    assert entered["whole"] > 0 or name in NEVER_ENTERED, f"nothing of {name} went through the backend: {entered}"
    assert hits >= saved > 0 or name in NEVER_ENTERED


@pytest.mark.parametrize("name", FAMILIES)
def test_family_sample_matches_eager_in_other_layouts(name: str) -> None:
    """The whole is `python -m tests.ops --layouts`. What native code refuses is an error, because Ferrite is strict."""
    known = known_failures.load()
    members = [unit for unit in units(IN_LAYOUTS) if family(unit.op) == name]
    torch.set_num_threads(IN_LAYOUTS.threads)
    wrong: list[Verdict] = []
    ran = 0
    for unit in _draw(members, lambda unit: unit.id, 2):
        for group in groups(unit, IN_LAYOUTS):
            some = Group(tuple(_draw(group.members, lambda member: member[0].id, 1)))
            for verdict in run_group(some, ENGINE, SEED):
                ran += 1
                wrong += [verdict] if known_failures.account(verdict, known).standing == "failure" else []
    assert not wrong, "\n".join(f"{verdict.id} {verdict.differences[:2]}" for verdict in wrong)
    assert ran or name in ("sparse", "creation")  # few of these take a tensor that can be laid otherwise


# ---- the known failures -------------------------------------------------------------------------------------------


def test_known_failures_only_shrink() -> None:
    known = known_failures.load()
    written = sum(len(entry.cases) for entry in known.entries)
    assert (len(known.entries), written) == (ENTRIES_CEILING, PATTERNS_CEILING), (
        "known_failures.json changed: it may only shrink; lower the ceilings in this file to what is left"
    )


def test_known_failures_say_why() -> None:
    for entry in known_failures.load().entries:
        assert len(entry.reason) > 30, entry
        assert "not implemented" not in entry.reason.lower(), entry
        for pattern in entry.cases:
            fields = pattern.split("|")
            assert len(fields) in (5, 6), pattern
            for name in fields[0].split(","):
                assert name in op_table(), f"no op is called {name}"


@pytest.mark.parametrize("number", range(max(1, ENTRIES_CEILING)))
def test_known_failure_still_fails(number: int) -> None:
    """Of each entry some cases, chosen by digest, are run; `--known-failures check` runs all of them."""
    entries = known_failures.load().entries
    if not entries:
        return
    entry = entries[number]
    patterns = sorted(entry.cases, key=lambda text: hashlib.sha256(f"{SEED} {text}".encode()).digest())[:2]
    plan = msgspec.structs.replace(STANDARD, only=tuple(_narrow(pattern) for pattern in patterns))
    ran = 0
    for unit in units(plan):
        for group in groups(unit, plan):
            for verdict in run_group(group, ENGINE, plan.seed):
                ran += 1
                assert known_failures.account(verdict, known_failures.load()).standing == "known", verdict
    assert ran, f"no case is named by {patterns}"


def _narrow(pattern: str) -> str:
    """The first alternative of every field."""
    return "|".join(field.split(",")[0] for field in pattern.split("|"))


# ---- the harness: planted faults ----------------------------------------------------------------------------------

Graph = torch.fx.GraphModule


def _changing(change: Callable[[Any], Any]) -> Callable[[Graph, list[Any]], Any]:
    """A backend that runs the graph and then changes every tensor it returns."""

    def backend(graph: Graph, example_inputs: list[Any]) -> Any:
        def run(*args: Any) -> Any:
            return tuple(change(out) if isinstance(out, torch.Tensor) else out for out in graph(*args))

        return run

    return backend


def faithful(graph: Graph, example_inputs: list[Any]) -> Any:
    return graph.forward


def forgets_mutation(graph: Graph, example_inputs: list[Any]) -> Any:
    return lambda *args: graph(*(arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args))


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 1.5


class _Turned(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.t().contiguous().t()


class _Rolled(torch.autograd.Function):
    """The same value, with a gradient that belongs to other elements."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.roll(1)


class _Tanh(torch.autograd.Function):
    """tanh, with `error` added to the exact derivative."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor, error: float) -> torch.Tensor:
        context.save_for_backward(value)
        context.error = error
        return value.tanh()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (value,) = context.saved_tensors
        exact = value.double().cosh() ** -2
        return (gradient.double() * (exact + context.error)).to(gradient.dtype), None


def _tanh_that_errs_by(error: float) -> Callable[[Graph, list[Any]], Any]:
    return lambda graph, example_inputs: lambda *args: (_Tanh.apply(args[-1], error),)


def raises_another_type(graph: Graph, example_inputs: list[Any]) -> Any:
    def run(*args: Any) -> Any:
        try:
            return graph(*args)
        except Exception as error:
            raise KeyError("wrong") from error

    return run


def raises_nothing(graph: Graph, example_inputs: list[Any]) -> Any:
    def run(*args: Any) -> Any:
        try:
            return graph(*args)
        except Exception:
            return tuple(torch.zeros(2, 2) for _ in graph.graph.output_node().args[0])

    return run


def raises_always(graph: Graph, example_inputs: list[Any]) -> Any:
    def run(*args: Any) -> Any:
        raise RuntimeError("planted")

    return run


def keeps_its_buffer(graph: Graph, example_inputs: list[Any]) -> Any:
    kept: list[torch.Tensor] = []

    def run(*args: Any) -> Any:
        outs = graph(*args)
        if not kept:
            kept.extend(outs)
        for buffer, out in zip(kept, outs, strict=True):
            buffer.copy_(out)
        return tuple(kept)

    return run


def remembers_first_size(graph: Graph, example_inputs: list[Any]) -> Any:
    sizes: list[int] = []

    def run(*args: Any) -> Any:
        outs = graph(*args)
        sizes.append(outs[0].shape[0])
        return tuple(out[: sizes[0]].clone() for out in outs)

    return run


def _sample(value: Any, *args: Any, **kwargs: Any) -> Sample:
    return Sample("s0", value, args, kwargs, lambda result: result)


def _judge(backend: Any, case: str, sample: Sample) -> Verdict:
    return run_case(Case.parse(case), sample, Engine(backend))


def _square(grad: bool = False) -> torch.Tensor:
    return (torch.arange(9.0).reshape(3, 3) + 1.0).requires_grad_(grad)


def test_what_torch_does_not_capture_is_left_to_eager() -> None:
    """The derivative of acosh_ does not exist: eager says so in the backward, the capture at once."""
    verdict = run_case(Case.parse("acosh|f32|s0|static|train|inplace"), _sample(_square(grad=True)), ENGINE)
    assert verdict.passed
    assert verdict.note == "torch does not capture it"


def test_a_compile_that_fails_by_itself_is_not_left_to_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr("ferrite.pipeline.lower", fail)
    verdict = run_case(Case.parse("acosh|f32|s0|static|infer"), _sample(_square()), ENGINE)
    assert verdict.kind == "error"
    assert "planted" in verdict.differences[0].detail


FAULTS: dict[str, tuple[str, Any, str, Sample]] = {
    "value": ("value", _changing(lambda out: out + 1), "sin|f32|s0|static|infer", _sample(_square())),
    "small value": ("value", _changing(lambda out: out * 1.001), "sin|f32|s0|static|infer", _sample(_square())),
    "integer": ("value", _changing(lambda out: out + 1), "abs|i64|s0|static|infer", _sample(torch.arange(4))),
    "zero's sign": ("value", _changing(lambda out: -out), "neg|f32|s0|static|infer", _sample(torch.zeros(3))),
    "nan": ("value", _changing(lambda out: out.nan_to_num()), "log|f32|s0|static|infer", _sample(-_square())),
    "dtype": ("dtype", _changing(lambda out: out.double()), "sin|f32|s0|static|infer", _sample(_square())),
    "shape": ("shape", _changing(lambda out: out[None]), "sin|f32|s0|static|infer", _sample(_square())),
    "strides": (
        "strides",
        _changing(lambda out: out.t().contiguous().t()),
        "sin|f32|s0|static|infer",
        _sample(_square()),
    ),
    "strides of size 1": (
        "strides",
        _changing(lambda out: out.as_strided((1, 3), (7, 1))),
        "sin|f32|s0|static|infer",
        _sample(torch.ones(1, 3)),
    ),
    "lost alias": ("alias", _changing(torch.clone), "t|f32|s0|static|infer", _sample(_square().t().contiguous())),
    "false alias": ("alias", keeps_its_buffer, "sin|f32|s0|static|infer", _sample(_square())),
    "lost mutation": ("mutation: value", forgets_mutation, "abs|f32|s0|static|infer|inplace", _sample(-_square())),
    "gradient": ("gradient value", _changing(_Scaled.apply), "sin|f32|s0|static|train", _sample(_square(True))),
    "gradient strides": (
        "gradient strides",
        _changing(_Turned.apply),
        "sin|f32|s0|static|train",
        _sample(_square(True)),
    ),
    "no gradient": ("requires_grad", _changing(torch.detach), "sin|f32|s0|static|train", _sample(_square(True))),
    "random stream": (
        "random",
        _changing(lambda out: out.roll(1)),
        "bernoulli|f32|s0|static|infer",
        _sample(torch.full((64,), 0.5)),
    ),
    "error type": (
        "error type",
        raises_another_type,
        "linalg.cholesky|f32|s0|static|infer",
        _sample(-torch.eye(2)),
    ),
    "missing error": ("error", raises_nothing, "linalg.cholesky|f32|s0|static|infer", _sample(-torch.eye(2))),
    "new error": ("error", raises_always, "sin|f32|s0|static|infer", _sample(_square())),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_caught(name: str) -> None:
    kind, backend, case, sample = FAULTS[name]
    verdict = _judge(backend, case, sample)
    assert verdict.status == "different"
    assert kind in {difference.kind for difference in verdict.differences}, verdict
    sound = _judge(faithful, case, sample)
    assert sound.status == "equal", sound


def test_wrong_size_after_reuse_is_caught() -> None:
    samples = [msgspec.structs.replace(_sample(torch.ones(size)), label=f"s{size}") for size in (4, 6)]
    members = tuple((Case("sin", "f32", sample.label, "dynamic", "infer"), sample) for sample in samples)
    sound = list(run_group(Group(members), Engine(faithful)))
    assert [(verdict.status, verdict.entered) for verdict in sound] == [("equal", "whole"), ("equal", "reused")]
    wrong = list(run_group(Group(members), Engine(remembers_first_size)))
    assert [verdict.kind for verdict in wrong] == ["equal", "reuse"]


def test_no_farther_from_the_reference_than_eager_is_close_enough() -> None:
    exact = torch.full((4,), 1000.0, dtype=torch.float64)
    eager = torch.full((4,), 1000.5)
    assert judge_values(eager, torch.full((4,), 999.6), exact) == ""
    assert judge_values(eager, torch.full((4,), 998.0), exact) != ""
    assert judge_values(eager, torch.full((4,), 999.6), None) != ""


def test_gradients_are_held_to_the_reference() -> None:
    """Eager's gradient of tanh at 3, made of a result rounded to bf16, is 0.0078 where 0.00987 is right. The right one
    may stand for it, and one that is as wrong as eager's, but not one that errs by more than twice as much."""
    case, sample = "tanh|bf16|s0|static|train", _sample(torch.full((4,), 3.0, dtype=torch.bfloat16, requires_grad=True))
    for error, status in ((0.0, "close"), (0.002, "close"), (0.006, "different"), (-0.006, "different")):
        verdict = _judge(_tanh_that_errs_by(error), case, sample)
        assert (verdict.status, verdict.kind) == (status, status if status == "close" else "gradient value"), verdict


def test_gradient_by_another_draw_is_random() -> None:
    """Of two seeds only the draw differs, not the cotangent: gradients of ops that draw nothing stay comparable."""
    case, sample = "nn.functional.dropout|f32|s0|static|train", _sample(torch.ones(64, requires_grad=True))
    verdict = _judge(_changing(_Rolled.apply), case, sample)
    assert [difference.kind for difference in verdict.differences] == ["gradient random"], verdict


def test_a_random_op_may_round_otherwise() -> None:
    case, sample = "nn.functional.dropout|f32|s0|static|infer", _sample(torch.ones(64))
    for factor, status in ((1 + 2.0**-23, "close"), (1.001, "different")):
        verdict = _judge(_changing(lambda out, factor=factor: out * factor), case, sample)
        assert (verdict.status, verdict.kind) == (status, status if status == "close" else "random"), verdict


# ---- the harness: names, choices, processes -----------------------------------------------------------------------


def test_ids_read_back() -> None:
    for case in (Case("add", "f32", "s3", "dynamic", "train"), Case("add", "f32", "n3", "static", "infer", "inplace")):
        assert Case.parse(case.id) == case
    for text in ("add|f32|s3|dynamic", "add|f32|s3|dynamical|train", "add|f99|s3|static|infer"):
        with pytest.raises(ValueError, match="found"):
            Case.parse(text)


def test_samples_do_not_depend_on_what_ran_before() -> None:
    whole = {case.id: sample for group in groups(Unit("add", "f32"), STANDARD) for case, sample in group.members}
    last = max(whole)
    plan = msgspec.structs.replace(STANDARD, only=(last,))
    torch.manual_seed(5)
    (alone,) = [member for group in groups(Unit("add", "f32"), plan) for member in group.members]
    assert alone[0].id == last
    assert torch.equal(alone[1].input, whole[alone[0].id].input)


def test_a_layout_changes_strides_and_expanding_alone_changes_values() -> None:
    x = torch.randn(3, 4, 5, requires_grad=True)
    found = {letter: made_laid(_sample(x, [x.detach()], dim=1), letter) for letter in LAYOUTS}
    for letter, laid in found.items():
        assert laid is not None
        assert laid.label == letter + "0"
        assert laid.kwargs == {"dim": 1}
        for value in (laid.input, laid.args[0][0]):
            assert value.stride() != x.stride()
            assert torch.equal(value, x) == (letter != "x")
        assert laid.input.is_leaf
        assert laid.input.requires_grad
    assert found["w"].input.storage_offset() > 0
    assert made_laid(_sample(torch.randn(3)), "t") is None


def test_samples_in_layouts_are_large_and_can_be_run_alone() -> None:
    whole = {case.id: sample for group in groups(Unit("mul", "f32"), IN_LAYOUTS) for case, sample in group.members}
    assert {case.split("|")[2][0] for case in whole} >= {"T", "W", "X"}
    assert max(sample.input.numel() for sample in whole.values()) > 15000
    chosen = max(whole)
    plan = msgspec.structs.replace(STANDARD, only=(chosen,))
    (alone,) = [member for group in groups(Unit("mul", "f32"), plan) for member in group.members]
    assert alone[0].id == chosen
    assert torch.equal(alone[1].input, whole[chosen].input)
    assert alone[1].input.stride() == whole[chosen].input.stride()


def test_gradients_in_other_layouts_may_have_the_strides_of_aot_eager() -> None:
    """The derivative of put, as it is traced, gives a gradient in contiguous memory."""
    (member,) = [
        (case, sample)
        for group in groups(Unit("put", "f32"), msgspec.structs.replace(STANDARD, only=("put|f32|w21|static|train",)))
        for case, sample in group.members
    ]
    verdict = run_case(*member, ENGINE)
    assert verdict.passed
    assert "strides are those of aot_eager" in verdict.note
    wrong = run_case(
        Case.parse("sin|f32|t0|static|train"),
        msgspec.structs.replace(_sample(_square(True)), label="t0"),
        Engine(_changing(_Turned.apply)),
    )
    assert wrong.kind == "gradient strides"


def test_pick_prefers_what_looks_different() -> None:
    plain = [msgspec.structs.replace(_sample(torch.ones(3)), label=f"s{number}") for number in range(9)]
    empty = msgspec.structs.replace(_sample(torch.ones(0)), label="s9")
    turned = msgspec.structs.replace(_sample(torch.ones(3, 4).t()), label="s10")
    chosen = [sample.label for sample in pick([*plain, empty, turned], 4)]
    assert {"s0", "s9", "s10"} < set(chosen)


def test_patterns_name_exactly_their_cases() -> None:
    cases = [Case("add", dtype, label, "static", "train") for dtype in ("f32", "bf16") for label in ("s1", "n1")]
    cases.append(Case("add", "f32", "s2", "dynamic", "infer", "inplace"))
    written = known_failures.patterns(cases)
    assert len(written) == 2
    everything = [case for group in groups(Unit("add", "f32"), STANDARD) for case, _ in group.members] + cases
    assert {case for case in everything if any(matches(case, text) for text in written)} == set(cases)


def test_every_family_has_units_and_errors_are_among_them() -> None:
    found = units(STANDARD)
    assert {family(unit.op) for unit in found} == set(FAMILIES)
    assert sum(unit.dtype == ERRORS for unit in found) > 100


def breaks(graph: Graph, example_inputs: list[Any]) -> Any:
    """Crashes, or hangs where sizes are symbols."""
    if any(isinstance(each, torch.SymInt) for each in example_inputs):
        time.sleep(600)
    os.kill(os.getpid(), signal.SIGSEGV)


def _small_sweep(backend: Any, folder: Path) -> dict[str, Verdict]:
    plan = Plan("small", ("f32",), {"f32": 1}, strided=0, errors=0, modes=("infer",), forms=("function",), ops="t")
    state = sweeping.State(folder / "state.jsonl", fresh=False)
    return sweeping.sweep(plan, Engine(backend), 1, state, lambda *_: None)


def test_crashes_and_hangs_mark_their_cases_and_the_sweep_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeping, "HANG_SECONDS", 15.0)
    verdicts = _small_sweep(breaks, tmp_path)
    by_sizes = {verdict.id.split("|")[3]: verdict.status for verdict in verdicts.values()}
    assert by_sizes == {"static": "crash", "dynamic": "hang"}
    again = _small_sweep("eager", tmp_path)  # what is done is not run again
    assert again == verdicts


def test_a_listed_case_that_passes_is_stale_and_another_kind_fails() -> None:
    entry = known_failures.Entry(("add|f32|s3|static|infer",), ("strides",), "a reason")
    known = known_failures.Known((entry,))
    standing = lambda verdict: known_failures.account(verdict, known).standing
    assert standing(Verdict("add|f32|s3|static|infer", "equal")) == "stale"
    assert standing(sweeping.broken("add|f32|s3|static|infer", "crash", "")) == "failure"
    assert standing(sweeping.broken("add|f32|s4|static|infer", "crash", "")) == "failure"
    assert standing(sweeping.broken("add|f32|s3|static|infer", "strides", "")) == "known"


# ---- dtypes that eager refuses

ANSWERED_ONCE = (
    "addmm",
    "argmax",
    "bernoulli",
    "bucketize",
    "dist",
    "heaviside",
    "index_add",
    "index_copy",
    "index_put",
    "mm",
    "std.unbiased",
)


@pytest.mark.parametrize("name", ANSWERED_ONCE)
def test_what_eager_refuses_raises(name: str) -> None:
    calls = list(refused_calls(name))
    assert calls
    assert [call.id for call in calls if call.answers("ferrite", strict=True)] == []


@pytest.mark.parametrize("part", range(4))
def test_a_sample_of_what_eager_refuses_raises(part: int) -> None:
    """The whole is `python -m tests.ops.refused`."""
    names = _draw(op_table(), str, len(op_table()))[part::4]
    calls = itertools.chain.from_iterable(_draw(refused_calls(name), lambda call: call.id, 2) for name in names)
    chosen = list(itertools.islice(calls, 30))
    assert len(chosen) == 30
    assert [call.id for call in chosen if call.answers("ferrite", strict=True)] == []
