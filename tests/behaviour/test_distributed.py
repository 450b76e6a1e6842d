"""Functional collectives inside compiled graphs: one process with gloo, two processes on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.behaviour.child import run_python
from tests.behaviour.compare import compare, equal

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this build of PyTorch has no torch.distributed")


@pytest.fixture
def one_process() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def all_reduce(x: Tensor) -> Tensor:
    from torch.distributed._functional_collectives import all_reduce

    return all_reduce(x * 2, "sum", dist.group.WORLD) + 1


def gather_and_scatter(x: Tensor) -> Tensor:
    from torch.distributed import _functional_collectives as functional

    gathered = functional.all_gather_tensor(x, 0, dist.group.WORLD)
    # Eager hands out a tensor that still waits; the addition waits for it.
    return functional.reduce_scatter_tensor(gathered * 2, "sum", 0, dist.group.WORLD) + 1


def several(x: Tensor) -> Any:
    from torch.distributed import _functional_collectives as functional

    return [y * 2 for y in functional.all_reduce_coalesced([x, x + 1], "max", dist.group.WORLD)]


def broadcast(x: Tensor) -> Tensor:
    from torch.distributed import _functional_collectives as functional

    return functional.broadcast(x + 1, 0, dist.group.WORLD) * 2


def in_place(x: Tensor) -> Tensor:
    dist.all_reduce(x)
    return x + 1


FUNCTIONS = [all_reduce, gather_and_scatter, several, broadcast, in_place]


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_collective_in_one_process(function: Any, dynamic: bool) -> None:
    compare(function, torch.randn(4, 3), dynamic=dynamic)


@pytest.mark.usefixtures("one_process")
def test_collective_while_training() -> None:
    def function(x: Tensor) -> Tensor:
        from torch.distributed._functional_collectives import all_reduce

        return all_reduce(x.sin(), "sum", dist.group.WORLD).exp()

    compare(function, torch.randn(4, requires_grad=True), training=True)


@pytest.mark.usefixtures("one_process")
def test_data_parallel_module() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    wrapped = torch.nn.parallel.DistributedDataParallel(module)
    x = torch.randn(3, 4)
    expected = torch.autograd.grad(module(x).sum(), list(module.parameters()))
    torch.compile(wrapped, backend="ferrite", options={"strict": True})(x).sum().backward()
    for parameter, gradient in zip(module.parameters(), expected, strict=True):
        assert equal(parameter.grad, gradient)


TWO = """
import sys, torch, torch.distributed as dist
from torch.distributed import _functional_collectives as functional

rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)

def function(x):
    y = functional.all_reduce(x * (rank + 1), "sum", dist.group.WORLD)
    return functional.all_gather_tensor(y + rank, 0, dist.group.WORLD)

x = torch.arange(3.0)
found = torch.compile(function, backend="ferrite", fullgraph=True, options={"strict": True})(x)
assert torch.equal(found, torch.cat([x * 3, x * 3 + 1])), found
dist.barrier()
dist.destroy_process_group()
print("same")
"""


def test_two_processes(tmp_path: Path) -> None:
    children = [run_python(TWO, str(rank), str(tmp_path / "store"), wait=False) for rank in range(2)]
    for child in children:
        assert child.finish() == "same"
