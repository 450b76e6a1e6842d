"""What torch's profiler shows of a compiled graph: a range for each kernel and each library call, with the ops behind
it and the user's lines, in either execution of the host program; and nothing is made for it while no profiler looks."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import profile

from ferrite.artifact import native_host
from ferrite.artifact.compiled import CompiledGraph
from tests.behaviour.compare import STRICT

HOSTS = ("native", "python")


class Block(nn.Module):
    """Line by line: a convolution, a product, and what becomes one kernel of two lines."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(4, 4, 3, padding=1)
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.convolution(x)
        y = F.gelu(self.linear(x))
        return y.softmax(-1) + x


def place(lines_below: int, function: Callable[..., Any] = Block.forward) -> str:
    return f"test_profile.py:{function.__code__.co_firstlineno + lines_below}"


def compiled(function: Callable[..., Any], host: str, **settings: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    options = STRICT | {"products": "library", "host": host}
    return torch.compile(function, backend="ferrite", options=options, **settings)


def ranges(seen: profile) -> dict[str, list[str]]:
    """For each call of a graph, the ranges right below its own."""
    return {
        event.name.split()[1]: [child.name for child in event.cpu_children if "::" not in child.name]
        for event in seen.events()
        if event.name.startswith("ferrite graph")
    }


@pytest.mark.parametrize("dynamic", [False, True], ids=["known sizes", "sizes that change"])
def test_steps_of_inference(dynamic: bool) -> None:
    block, x = Block().eval(), torch.randn(2, 4, 16)
    results, found = [], []
    for host in HOSTS:
        call = compiled(block, host, dynamic=dynamic)
        with torch.no_grad():
            plain = call(x)
            with profile() as seen:
                results.append(call(x))
        assert torch.equal(plain, results[-1])
        found.append(ranges(seen))
    assert torch.equal(*results)
    assert found[0] == found[1]
    (names,) = found[0].values()
    convolution, product, kernel = names
    assert convolution == f"aten.convolution.default {place(1)}"
    assert product == f"aten.addmm.default {place(2)}"
    kernel_name, _, rest = kernel.partition(" ")
    assert kernel_name.startswith("kernel_")
    ops, _, lines = rest.partition(") ")
    assert set(ops.removeprefix("(").split(", ")) >= {"gelu", "_softmax", "add"}
    assert lines == f"{place(2)}, {place(3)}"


def test_steps_of_training() -> None:
    block, x = Block(), torch.randn(2, 4, 16)
    gradients, found = [], []
    for host in HOSTS:
        call = compiled(block, host)
        call(x).sum().backward()
        block.zero_grad(set_to_none=True)
        with profile() as seen:
            call(x).sum().backward()
        gradients.append([parameter.grad for parameter in block.parameters()])
        block.zero_grad(set_to_none=True)
        found.append(ranges(seen))
    assert all(map(torch.equal, *gradients))
    assert found[0] == found[1]
    assert set(found[0]) == {"graph_0_forward", "graph_0_backward"}
    backward = found[0]["graph_0_backward"]
    assert backward[-1] == f"aten.convolution_backward.default {place(1)}"
    assert f"aten.mm.default {place(2)}" in backward
    assert all(any(place(n) in name for n in (1, 2, 3)) for name in backward)


@pytest.mark.parametrize("host", HOSTS)
def test_the_steps_of_a_function_lie_in_the_op_that_calls_it(host: str) -> None:
    def function(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin() + 1, lambda x: x.cos(), (x,))

    call, x = compiled(function, host), torch.ones(3)
    with torch.no_grad():
        call(x)
        with profile() as seen:
            assert torch.equal(call(x), x.sin() + 1)
    (kernel,) = (event for event in seen.events() if "(sin, add)" in event.name)
    parents = []
    while (kernel := kernel.cpu_parent) is not None:  # type: ignore[assignment]
        parents.append(kernel.name)
    assert any(name.startswith("higher_order.cond") for name in parents)


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("fails_in", ["kernel", "library"])
def test_a_range_ends_if_its_step_fails(host: str, fails_in: str) -> None:
    def function(x: Tensor, n: Tensor) -> Tensor:
        if fails_in == "kernel":
            return x[n].exp()
        return F.embedding_bag(n[None], x, mode="sum").exp()

    x, good, bad = torch.randn(4, 4), torch.tensor([1]), torch.tensor([7])
    call = compiled(function, host)
    with torch.no_grad():
        call(x, good)
        with profile() as seen:
            with pytest.raises((IndexError, RuntimeError)):
                call(x, bad)
            assert torch.equal(call(x, good), function(x, good))
    first, second = (event for event in seen.events() if event.name.startswith("ferrite graph"))
    assert first.cpu_parent is not second.cpu_parent
    assert not any(event.name.startswith(("kernel_", "aten.")) for event in (first.cpu_parent, second.cpu_parent))
    names = [[child.name for child in graph.cpu_children if "::" not in child.name] for graph in (first, second)]
    assert names[0] == names[1][: len(names[0])]
    assert len(names[0]) >= 1


@pytest.fixture
def calls_of_native_programs(monkeypatch: pytest.MonkeyPatch) -> list[str | int]:
    called: list[str | int] = []
    real = native_host._Assembler.call

    def noting(self: Any, function: str | int, *operands: int, **rest: Any) -> None:
        called.append(function)
        real(self, function, *operands, **rest)

    monkeypatch.setattr(native_host._Assembler, "call", noting)
    return called


@pytest.mark.parametrize("host", HOSTS)
def test_nothing_of_it_is_there_while_no_profiler_looks(
    host: str, calls_of_native_programs: list[str | int], monkeypatch: pytest.MonkeyPatch
) -> None:
    called = calls_of_native_programs
    made = []
    real = CompiledGraph._profiled
    monkeypatch.setattr(CompiledGraph, "_profiled", lambda *args: made.append(real(*args)) or made[-1])
    block, x = Block().eval(), torch.randn(2, 4, 16)
    call = compiled(block, host)
    with torch.no_grad():
        for _ in range(3):
            call(x)
        assert not made
        assert "aoti_record_function_start" not in called
        assert bool(called) == (host == "native")
        with profile():
            call(x)
            call(x)
        assert len(made) == 1
        assert ("aoti_record_function_start" in called) == (host == "native")


@torch.library.custom_op("ferrite_profile::wait", mutates_args=())
def wait(x: Tensor) -> Tensor:
    time.sleep(0.002)
    return x + 1


@wait.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@pytest.mark.parametrize("host", HOSTS)
def test_threads_that_are_profiled_at_once_share_what_is_made_for_it(host: str) -> None:
    """Each is still in the middle of a call when the next one looks for the first time."""

    def function(x: Tensor) -> Tensor:
        for _ in range(10):
            x = wait(x).sin() * 2
        return x

    x = torch.randn(16, 16)
    run = compiled(function, host)
    expected = run(x)
    with profile(), ThreadPoolExecutor(4) as threads:
        found = [*threads.map(lambda _: run(x), range(8))]
    assert all(torch.equal(each, expected) for each in found)
