"""Which kernels run earlier than where somebody asked for their results, and which stay."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ferrite
from ferrite.host.lowered import Body, Lowered
from ferrite.host.nodes import Call, Launch, Return
from ferrite.host.text import parse_program, show_step
from ferrite.schedule.run_early import run_early

SUM = """
@kernel
def kernel_0(x0: f32[16, 16], y0: out(f32[16])):
    for i in box(16):
        y0[i] = sum(x0[i, r] for r in box(16))
"""
EMPTY = "aten.empty_strided.default"


def order(text: str, kernel: str = SUM, memory: dict[str, str] | None = None) -> list[str]:
    """The steps of a program afterwards: what calls make, and what kernels are launched on."""
    program = parse_program(kernel + text)
    steps = tuple(step for step in program.steps if isinstance(step, Call | Launch))
    (result,) = (step.value for step in program.steps if isinstance(step, Return))
    body = Body("main", program.inputs, steps, result, memory or {})
    lowered = run_early(Lowered(body, kernels=program.kernels))
    assert sorted(map(show_step, lowered.main.steps)) == sorted(map(show_step, steps))
    return [step.result if isinstance(step, Call) else f"{step.kernel}({', '.join(step.buffers)})"
            for step in lowered.main.steps]  # fmt: skip


def test_a_kernel_runs_before_a_product_that_it_does_not_wait_for() -> None:
    found = order(f"""
def program(x: f32[16, 16], w: static(f32[16, 16])):
    a = aten.mm.default(x, w)
    b = aten.mm.default(w, x)
    s = {EMPTY}([16], [1], dtype=torch.float32)
    kernel_0(a, s)
    return (b, s)
""")
    assert found == ["a", "s", "kernel_0(a, s)", "b"]


def test_not_before_the_last_other_reader() -> None:
    """As long as that one needs it, nothing is freed."""
    found = order(f"""
def program(x: f32[16, 16], w: static(f32[16, 16])):
    a = aten.mm.default(x, w)
    b = aten.mm.default(a, x)
    c = aten.mm.default(x, x)
    s = {EMPTY}([16], [1], dtype=torch.float32)
    kernel_0(a, s)
    return (b, c, s)
""")
    assert found == ["a", "b", "s", "kernel_0(a, s)", "c"]


def test_not_before_a_name_that_it_reads_is_there() -> None:
    found = order(
        f"""
def program(x: f32[16, 16], w: static(f32[16, 16])):
    a = aten.mm.default(x, w)
    b = aten.mm.default(x, x)
    v = aten.t.default(a)
    c = aten.mm.default(w, w)
    s = {EMPTY}([16], [1], dtype=torch.float32)
    kernel_0(v, s)
    return (b, c, s)
""",
        memory={"a": "a", "v": "a"},
    )
    assert found == ["a", "b", "v", "s", "kernel_0(v, s)", "c"]


STAYS = {
    "what it reads is the caller's": ("a = aten.mm.default(x, w)", "a = aten.mm.default(x, w)", "(a, b, s)"),
    "it frees no more than it needs": ("x0: f32[16, 16], y0: out(f32[16])", "x0: f32[16, 1], y0: out(f32[16])", ""),
    "it may raise": ("x0[i, r]", "require(x0[i, r] > f32(0.0), x0[i, r], 'ValueError', 'small')", ""),
    "others see what it writes": ("y0: out", "y0: inout", ""),
}


@pytest.mark.parametrize("reason", STAYS)
def test_it_stays(reason: str) -> None:
    old, new, returned = STAYS[reason]
    kernel = SUM.replace(old, new)
    if "16, 1]" in new:
        kernel = kernel.replace("box(16))", "box(1))")
    if "inout" in new:
        kernel = kernel.replace("y0[i] = sum", "y0[i] = y0[i] + sum")
    allocation = "" if "inout" in new else f"s = {EMPTY}([16], [1], dtype=torch.float32)"
    found = order(f"""
def program(x: f32[16, 16], w: static(f32[16, 16]), {"s: f32[16]" if "inout" in new else "t: f32[16]"}):
    a = aten.mm.default(x, w)
    b = aten.mm.default(w, x)
    {allocation}
    kernel_0(a, s)
    return {returned or "(b, s)"}
""", kernel)  # fmt: skip
    assert found[-1] == "kernel_0(a, s)", reason


def test_a_gradient_takes_the_place_of_another_before_the_next_product() -> None:
    def function(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, w, b)), w, b)

    torch._dynamo.reset()
    leaves = [
        torch.randn(64, 64).requires_grad_(),
        torch.randn(64, 64).requires_grad_(),
        torch.randn(64).requires_grad_(),
    ]
    compiled = torch.compile(function, backend="ferrite", options={"strict": True, "check": True})
    found, wanted = (torch.autograd.grad(run(*leaves).square().mean(), leaves) for run in (compiled, function))
    torch.testing.assert_close(found, wanted)
    record = ferrite.last_record()
    assert record is not None
    graph = record.phase("backward")
    assert graph is not None
    assert ("gelu_backward",) in [choice.subjects for choice in graph.decisions if choice.what == "run early"]
