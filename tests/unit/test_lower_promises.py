"""Ops in eager that give other strides than tracing said: kernels still read the right elements."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ferrite


@torch.library.custom_op("ferrite_tests::turned", mutates_args=())
def turned(x: torch.Tensor) -> torch.Tensor:
    """A copy that lies in memory column by column."""
    return x.t().contiguous().t().clone()


@turned.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape)  # row by row


@pytest.mark.parametrize("executor", ["oracle", "native"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_kernel_reads_what_the_op_really_made(executor: str, dynamic: bool) -> None:
    def function(x: torch.Tensor) -> Any:
        made = turned(x * 2.0)
        return made + 1.0, made.view(x.shape).sum(0), torch.mm(made, made.t())

    x = torch.arange(35.0).reshape(5, 7)
    assert turned(x).stride() == (1, 5)
    options = {"executor": executor, "strict": True}
    found = torch.compile(function, backend="ferrite", dynamic=dynamic, options=options)(x)
    torch.testing.assert_close(found, function(x), rtol=0, atol=0)


@pytest.mark.parametrize("executor", ["oracle", "native"])
def test_what_follows_from_a_transform_has_eagers_strides(executor: str) -> None:
    """Under symbolic sizes the strides of an FFT are traced wrongly; padding its result follows the real ones."""

    def gradient(function: Any, x: torch.Tensor) -> torch.Tensor:
        given = x.clone().requires_grad_()
        (found,) = torch.autograd.grad(function(given).abs().sum(), given)
        return found

    def transform(x: torch.Tensor) -> torch.Tensor:
        return torch.fft.rfft(x, n=7, dim=1)

    x = torch.randn(6, 6, 6)
    options = {"executor": executor, "strict": True}
    found = gradient(torch.compile(transform, backend="ferrite", dynamic=True, options=options), x)
    expected = gradient(transform, x)
    torch.testing.assert_close(found, expected, check_stride=True)
    reasons = {fallback.reason for fallback in ferrite.last_record().fallbacks}
    assert "a tensor whose strides tracing does not know" in reasons
