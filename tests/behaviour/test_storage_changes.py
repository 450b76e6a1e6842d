"""Functions that free and refill the storage of what they are given, as sharded training does between layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.behaviour.compare import STRICT

HOSTS = ("native", "python")


def resize(x: Tensor, count: int) -> None:
    x.untyped_storage().resize_(4 * count)


def freed_after_reading(x: Tensor, new: Tensor) -> Tensor:
    y = torch.sin(x + 1)
    resize(x, 0)
    return torch.cos(y)


def refilled(x: Tensor, new: Tensor) -> Tensor:
    y = torch.sin(x + 1)
    resize(x, 0)
    resize(x, 4096)
    with torch.no_grad():
        x.copy_(new)
    return torch.cos(y)


def refilled_and_read(x: Tensor, new: Tensor) -> Tensor:
    y = torch.sin(x + 1).sum() + x.view(64, 64).t().sum(0)
    resize(x, 0)
    resize(x, 4096)
    with torch.no_grad():
        x.copy_(new)
    return y + x.view(64, 64).t().cos().sum(0)


def filled_before_reading(x: Tensor, new: Tensor) -> Tensor:
    resize(x, 0)
    resize(x, 4096)
    with torch.no_grad():
        x.copy_(new)
    return (x.view(64, 64) @ new.view(64, 64)).relu() + x[0]


def made_larger(x: Tensor, new: Tensor) -> Tensor:
    y = x * 2
    resize(x, 1 << 16)  # the storage moves
    return y + x.exp() + new


CASES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    each.__name__: each
    for each in (freed_after_reading, refilled, refilled_and_read, filled_before_reading, made_larger)
}


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("name", CASES)
def test_storage_is_resized(name: str, host: str) -> None:
    """Nothing that was read before is computed after, and nothing is read where it was."""
    torch.manual_seed(0)
    start, new = torch.randn(4096), torch.randn(4096)
    compiled = torch.compile(CASES[name], backend="ferrite", fullgraph=True, options={**STRICT, "host": host})
    for _ in range(2):
        x, expected_x = start.clone(), start.clone()
        expected = CASES[name](expected_x, new)
        torch.testing.assert_close(compiled(x, new), expected)
        assert x.untyped_storage().size() == expected_x.untyped_storage().size()
        if x.untyped_storage().size():
            torch.testing.assert_close(x, expected_x)


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("training", [False, True])
def test_an_input_without_memory_is_refused(host: str, training: bool) -> None:
    """Where eager reads address zero. What is smaller than it says is refused too, and what is empty needs nothing."""
    compiled = torch.compile(
        lambda x, w: (x @ w).relu() + x[0], backend="ferrite", dynamic=False, options={**STRICT, "host": host}
    )

    def given(*sizes: int) -> Any:
        return torch.ones(sizes, requires_grad=training)

    x, w = given(8, 8), given(8, 8)
    expected = compiled(x, w)
    for size in (0, 8 * 8 * 4 - 4):
        x.untyped_storage().resize_(size)
        with pytest.raises(RuntimeError, match=f"f32\\[8, 8\\] in a storage of {size} bytes"):
            compiled(x, w)
    x.untyped_storage().resize_(8 * 8 * 4)
    with torch.no_grad():
        x.fill_(1)
    torch.testing.assert_close(compiled(x, w), expected)
    empty = given(0, 8)
    empty.untyped_storage().resize_(0)
    assert torch.compile(lambda x: x.exp() * 2, backend="ferrite", options={**STRICT, "host": host})(empty).shape == (
        0,
        8,
    )


def test_a_parameter_is_freed_between_layers() -> None:
    """Backward gets its memory back before it runs, in another place."""
    torch.manual_seed(0)
    weight, x = torch.randn(64, 64), torch.randn(8, 64)

    def layer(x: Tensor, weight: Tensor) -> Tensor:
        return (x @ weight).tanh() @ weight.t()

    compiled = torch.compile(layer, backend="ferrite", options=STRICT)
    for _ in range(2):
        leaf, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        held = weight.clone().requires_grad_()
        full = layer(other, weight.clone().requires_grad_())
        result = compiled(leaf, held)
        held.untyped_storage().resize_(0)
        held.untyped_storage().resize_(64 * 64 * 4)
        with torch.no_grad():
            held.detach().copy_(weight)
        result.sum().backward()
        full.sum().backward()
        torch.testing.assert_close(leaf.grad, other.grad)
