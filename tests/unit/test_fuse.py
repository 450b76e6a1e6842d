"""What becomes one kernel, that it computes what eager computes, and what the record says about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import ferrite
from ferrite.artifact.compiled import CompiledGraph
from ferrite.host.lowered import Body, Lowered
from ferrite.host.nodes import Call, HostProgram, Input, Launch
from ferrite.loops.text import parse_program
from ferrite.schedule.alive import Alive
from ferrite.schedule.fuse import fuse
from ferrite.syntax import Ref

EXECUTORS = ("oracle", "native")


def run(function: Callable[..., Any], *arguments: Any, executor: str = "native", **options: Any) -> Any:
    torch._dynamo.reset()
    options = {"executor": executor, "strict": True, "check": True, **options}
    with torch.no_grad():
        return torch.compile(function, backend="ferrite", options=options)(*arguments)


def program_of(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """The host program that a call runs."""
    seen: list[Any] = []
    load = CompiledGraph.load
    monkeypatch.setattr(CompiledGraph, "load", lambda self: (seen.append(self.program), load(self))[1])
    run(function, *arguments, **options)
    return seen[-1]


def launches(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any], *arguments: Any, **options: Any) -> int:
    """How many kernels a call runs."""
    return _launches_in(program_of(monkeypatch, function, *arguments, **options))


def _launches_in(program: HostProgram) -> int:
    return sum(isinstance(step, Launch) for step in program.steps)


def add_norm(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> Any:
    total = x + y
    return total, F.layer_norm(total, (x.shape[-1],), w)


def softmax_of_dear(x: torch.Tensor) -> torch.Tensor:
    return F.softmax(torch.tanh(x) * 3.0, -1)


def two_readers(x: torch.Tensor) -> Any:
    dear = torch.exp(x)
    return dear + 1.0, dear * x


def channel_norm(x: torch.Tensor) -> torch.Tensor:
    return F.relu(F.batch_norm(x, None, None, training=True))


CASES: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "add_norm": (add_norm, ((64, 48), (64, 48), (48,))),
    "softmax": (softmax_of_dear, ((6, 5, 33),)),
    "two readers": (two_readers, ((7, 9),)),
    "batch norm": (channel_norm, ((4, 6, 5, 7),)),
}


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dynamic", [False, True])
def test_one_kernel_with_the_answer_of_eager(
    name: str, executor: str, dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    function, shapes = CASES[name]
    arguments = [torch.randn(shape) for shape in shapes]
    if dynamic:
        for argument in arguments:
            if argument.dim() > 1:
                torch._dynamo.mark_dynamic(argument, 0)
    torch.testing.assert_close(run(function, *arguments, executor=executor), function(*arguments))
    assert launches(monkeypatch, function, *arguments, executor=executor) == 1


def test_disabled_by_name_every_stored_value_has_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(7, 9)
    assert launches(monkeypatch, two_readers, x, disable=("schedule.fuse",)) == 3
    torch.testing.assert_close(run(two_readers, x, disable=("schedule.fuse",)), two_readers(x))


def test_the_record_says_yes_and_no_with_reasons() -> None:
    run(lambda x: (torch.exp(x).sum(0), torch.exp(x) + 1.0), torch.randn(64, 32))
    decisions = [d for d in ferrite.last_record().decisions if d.what == "fuse"]
    assert any(not d.taken and "runs along memory" in d.reason for d in decisions)
    run(two_readers, torch.randn(7, 9))
    decisions = [d for d in ferrite.last_record().decisions if d.what == "fuse"]
    assert [d.taken for d in decisions] == [True, True]
    # `exp` is written and read once less for each that joins: it is no tensor any more once both have.
    assert [d.reason for d in decisions] == [
        "they share loops over box(7, 9), which saves 252 bytes",
        "they share loops over box(7, 9), which saves 756 bytes",
    ]


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_kernel_does_not_pass_a_write_to_what_it_reads(executor: str) -> None:
    """The second exp reads `x` after it has changed: it must not join the first."""

    def function(x: torch.Tensor) -> Any:
        before = torch.exp(x)
        x.mul_(2.0)
        after = torch.exp(x)
        return before, after, before * after

    x = torch.randn(5, 6)
    y = x.clone()
    torch.testing.assert_close(run(function, x, executor=executor), function(y))
    torch.testing.assert_close(x, y)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_views_of_what_is_written_are_seen(executor: str) -> None:
    """`view` and `x` are the same memory: a kernel that writes one is not joined with one that reads the other."""

    def function(x: torch.Tensor) -> Any:
        view = x.t()
        first = torch.exp(view)
        x.copy_(first * 2.0)
        return torch.exp(view) + first

    x = torch.randn(6, 6)
    y = x.clone()
    torch.testing.assert_close(run(function, x, executor=executor), function(y))
    torch.testing.assert_close(x, y)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_an_optimizer_step_updates_in_place(executor: str) -> None:
    def step(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> None:
        m.mul_(0.9).add_(g, alpha=0.1)
        v.mul_(0.999).add_(g * g, alpha=0.001)
        p.sub_(0.1 * m / (v.sqrt() + 1e-8))

    torch.manual_seed(0)
    ours = [torch.randn(33, 5), torch.randn(33, 5), torch.randn(33, 5), torch.rand(33, 5)]
    theirs = [tensor.clone() for tensor in ours]
    run(step, *ours, executor=executor)
    step(*theirs)
    torch.testing.assert_close(ours, theirs)


def test_a_check_in_a_fused_kernel_raises_what_eager_raises() -> None:
    def function(x: torch.Tensor, n: torch.Tensor) -> Any:
        rows = torch.exp(x.index_select(0, n))
        return rows, rows.sum(-1, keepdim=True) * rows

    x = torch.randn(5, 7)
    torch.testing.assert_close(run(function, x, torch.tensor([1, 4])), function(x, torch.tensor([1, 4])))
    with pytest.raises(IndexError, match="out of range"):
        run(function, x, torch.tensor([1, 5]))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_kernels_of_branches_are_joined_too(executor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: torch.Tensor) -> Any:
        return torch.cond(x.sum() > 0, two_readers, lambda x: (x + 1.0, x * x), (x,))

    for x in (torch.rand(5, 7), -torch.rand(5, 7)):
        torch.testing.assert_close(run(function, x, executor=executor), function(x))
    program = program_of(monkeypatch, function, x, executor=executor)
    assert [_launches_in(body) for body in program.functions] == [1, 1]


def test_kernels_that_passes_made_equal_all_stay() -> None:
    """Two programs with one structure under two names: each name is still launched by someone."""
    text = "def {0}(x: f32[8], y: out(f32[8])):\n    for i in box(8):\n        y[i] = exp(x[i])\n"
    kernels = tuple(parse_program(text.format(name)) for name in ("kernel_0", "kernel_1"))
    steps = (Launch("kernel_0", ("a", "b"), ()), Launch("kernel_1", ("c", "d"), ()), Launch("kernel_0", ("b", "e"), ()))
    allocations = tuple(Call(name, "aten.empty_strided.default", ([8], [1]), {}) for name in "bde")
    inputs = (Input("a", "f32[8]"), Input("c", "f32[8]"))
    fused = fuse(Lowered(Body("main", inputs, (*allocations, *steps), (Ref("d"), Ref("e"))), kernels=kernels))
    launched = [step.kernel for step in fused.main.steps if isinstance(step, Launch)]
    assert len(launched) == 2
    assert set(launched) == {program.name for program in fused.kernels}


MAKE = """
def make(x: f32[64], w: f32[64], y: out(f32[64])):
    for i in box(64):
        y[i] = x[i] * w[i]
"""
ADD = """
def add(x: f32[64], s: f32[64], y: out(f32[64])):
    for i in box(64):
        y[i] = sum(x[r] for r in box(64)) + s[i]
"""


def steps_of_a_cell(depth: int) -> Lowered:
    """In each step one launch makes a row, another adds it to what came before. All that make rows could be one."""
    made, sums = ([f"{kind}{n}" for n in range(depth)] for kind in "ma")
    steps: list[Call | Launch] = [Call(name, "aten.empty_strided.default", ([64], [1]), {}) for name in (*made, *sums)]
    for row, before, after in zip(made, ("s", *sums), sums, strict=False):
        steps += [Launch("make", ("x", "w", row), ()), Launch("add", (row, before, after), ())]
    inputs = tuple(Input(name, "f32[64]") for name in "xws")
    bytes = dict.fromkeys(("x", "w", "s", *made, *sums), 256)
    body = Body("main", inputs, tuple(steps), (Ref(sums[-1]),), bytes=bytes)
    return Lowered(body, kernels=(parse_program(MAKE), parse_program(ADD)))


def test_joins_need_no_more_memory_than_launches_apart() -> None:
    depth = 5
    lowered = steps_of_a_cell(depth)
    free = fuse(replace(lowered, main=replace(lowered.main, bytes={})))
    fused = fuse(lowered)
    assert Alive(replace(free.main, bytes=lowered.main.bytes)).most >= depth * 256  # all rows at once
    assert Alive(fused.main).most <= Alive(lowered.main).most
    reasons = {decision.reason for decision in fused.decisions if not decision.taken}
    assert "more memory would be alive at once than with all launches apart" in reasons
