"""How much memory a call needs: what the plan says is what torch's allocator and the block show, and transformers need
no more than in eager.

Counted is what torch's CPU allocator gives and takes back during a call, by its own profiler, and the block of inner
buffers, which is memory from C's library.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ferrite
from bench.allocated import peak_of_tensors
from bench.zoo import ZOO
from ferrite.artifact.native_host import kept_memory
from tests.behaviour.compare import STRICT

MORE_THAN_EAGER = 1.02


def chain(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(4):
        x = (x @ w).softmax(-1).t().contiguous()
    return x


def several_results(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = (x @ w).relu()
    z = (y @ w + x).tanh()
    return y, z.sum(-1), (z @ w).view(-1)[7:], x.t() * 2


def widths(x: Tensor, w: Tensor) -> Tensor:
    wide = F.gelu(torch.cat([x, x @ w, x], 1))
    return (wide[:, :64] @ w).sigmoid() + wide.amax(1, keepdim=True)


def measured(call: Callable[[], Any]) -> int:
    """The peak of one call, with the block that it keeps."""
    ferrite.release_memory()
    call()
    return peak_of_tensors(call) + kept_memory()


@pytest.mark.parametrize("function", [chain, several_results, widths], ids=lambda function: function.__name__)
def test_the_plan_says_what_is_measured(function: Callable[..., Any]) -> None:
    x, w = torch.randn(64, 64), torch.randn(64, 64)
    compiled = torch.compile(function, backend="ferrite", options=STRICT)
    with torch.no_grad():
        compiled(x, w)
        found = measured(lambda: compiled(x, w))
    record = ferrite.last_record()
    assert record is not None
    assert [graph.peak_memory for graph in record.graphs if graph.phase == "inference"] == [found]


def test_sizes_that_change_have_no_plan_beforehand() -> None:
    torch.compile(chain, backend="ferrite", dynamic=True, options=STRICT)(torch.randn(6, 6), torch.randn(6, 6))
    record = ferrite.last_record()
    assert record is not None
    assert {graph.peak_memory for graph in record.graphs} == {None}


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", ["bert", "roberta", "gpt2", "llama", "qwen2"])
def test_models_need_no_more_than_eager(name: str, training: bool) -> None:
    """With tensors of a few kilobytes, lines of 64 bytes count: these models have larger ones."""
    entry = ZOO[name]
    example = entry.build("small", training=training)
    compiled = torch.compile(example.module, backend="ferrite")

    def call(function: Callable[..., Any]) -> None:
        with torch.set_grad_enabled(training):
            result = function(**example.inputs)
            if training:
                entry.loss(result).backward()

    def peak(function: Callable[..., Any]) -> int:
        call(function)
        example.module.zero_grad(set_to_none=True)
        ferrite.release_memory()
        call(function)
        example.module.zero_grad(set_to_none=True)
        found = peak_of_tensors(lambda: call(function)) + kept_memory()
        example.module.zero_grad(set_to_none=True)
        return found

    wanted, found = peak(example.module), peak(compiled)
    assert found <= MORE_THAN_EAGER * wanted
