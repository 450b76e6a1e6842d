"""In-place ops on inputs that need a gradient: the backward sees what was there before the write."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import ferrite


def gradient(function: Callable[..., torch.Tensor], leaf: torch.Tensor) -> torch.Tensor:
    leaf = leaf.clone().requires_grad_()
    function(leaf * 0.5).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


def saved_clones() -> int:
    record = ferrite.last_record()
    assert record is not None
    return sum(run.changed or 0 for run in record.passes if run.name == "keep_saved_inputs")


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.acos_(),
        lambda x: x.log_(),
        lambda x: x.view(2, 3).t().sin_() * 2,
    ],
    ids=["acos_", "log_", "view"],
)
def test_gradient_of_an_overwritten_input(function: Callable[..., torch.Tensor]) -> None:
    leaf = torch.linspace(0.25, 0.75, 6)  # of which no cosine is rounded in two ways
    compiled = torch.compile(function, backend="ferrite", options={"strict": True})
    assert torch.equal(gradient(compiled, leaf), gradient(function, leaf))
    assert saved_clones() > 0


def test_nothing_is_copied_that_is_not_overwritten() -> None:
    compiled = torch.compile(lambda x: x.acos(), backend="ferrite", options={"strict": True})
    gradient(compiled, torch.rand(6))
    assert saved_clones() == 0


def test_nothing_is_copied_that_is_not_saved() -> None:
    compiled = torch.compile(lambda x: x.exp_(), backend="ferrite", options={"strict": True})
    gradient(compiled, torch.rand(6))
    assert saved_clones() == 0
