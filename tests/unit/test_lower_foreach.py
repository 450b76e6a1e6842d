"""Ops on lists of tensors, and the optimizers that are made of them, against eager."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ferrite import pipeline
from ferrite.host.lowered import Lowered
from ferrite.lower.graph import MOST_STORES
from tests.unit.test_lower import assert_same, fallbacks

ITEMS = [torch.linspace(0.5, 3.1, 6).reshape(3, 2), torch.linspace(0.7, 1.9, 4), torch.tensor(1.5)]
OTHERS = [torch.linspace(2.7, 0.4, 6).reshape(3, 2), torch.linspace(1.3, 0.9, 4), torch.tensor(2.5)]


def on_lists(function: Callable[..., Any], *, exact: bool = True, dtype: torch.dtype = torch.float32) -> None:
    items, others = ([item.to(dtype) for item in part] for part in (ITEMS, OTHERS))
    assert_same(function, items, others, exact=exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_arithmetic(dtype: torch.dtype) -> None:
    each = torch
    on_lists(lambda x, y: (each._foreach_add(x, y), each._foreach_sub(x, y, alpha=2)), dtype=dtype)
    on_lists(lambda x, y: (each._foreach_sub(x, 1.5), each._foreach_mul(x, [1.25, 2, 3.5])), dtype=dtype)
    on_lists(lambda x, y: (each._foreach_div(x, y), each._foreach_mul(x, y[2])), dtype=dtype)
    on_lists(lambda x, y: (each._foreach_maximum(x, y), each._foreach_minimum(x, 1.0)), dtype=dtype)
    on_lists(lambda x, y: (each._foreach_clamp_min(x, 1.0), each._foreach_clamp_max(x, y)), dtype=dtype)
    on_lists(lambda x, y: (each._foreach_neg(x), each._foreach_abs(x), each._foreach_sign(x)), dtype=dtype)


def test_functions() -> None:
    on_lists(lambda x, y: (torch._foreach_exp(x), torch._foreach_log(x), torch._foreach_sqrt(x)), exact=False)
    on_lists(lambda x, y: (torch._foreach_pow(x, y), torch._foreach_pow(2.0, y), torch._foreach_pow(x, 2)), exact=False)
    on_lists(lambda x, y: torch._foreach_lerp(x, y, 0.3), exact=False)
    on_lists(lambda x, y: torch._foreach_lerp(x, y, x), exact=False)
    on_lists(lambda x, y: torch._foreach_addcmul(x, y, y, 0.5), exact=False)
    on_lists(lambda x, y: torch._foreach_addcdiv(x, y, x, [0.5, 1.0, 2.0]), exact=False)
    on_lists(lambda x, y: (torch._foreach_norm(x), torch._foreach_norm(x, 1)), exact=False)


def test_norms_of_many_tensors_are_several_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """All norms have the same box, that of a scalar, and a kernel has an end."""
    lengths = []

    def noted(lowered: Lowered) -> Lowered:
        lengths.extend(len(nest.body) for kernel in lowered.kernels for nest in kernel.nests)
        return lowered

    monkeypatch.setattr(pipeline, "SCHEDULE_PASSES", (noted,))
    items = [torch.linspace(-1, 1, 3 + n) for n in range(2 * MOST_STORES + 1)]
    assert_same(lambda x: torch._foreach_norm(x), items, exact=False)
    assert sorted(lengths) == [1, MOST_STORES, MOST_STORES]


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(*sizes, generator=generator)) for sizes in ((3, 2), (4,), (1, 5))]


def steps(make: Callable[..., Any], backend: str, options: dict[str, Any] | None) -> Iterator[torch.Tensor]:
    """The parameters after three steps. Compiled by either backend: Dynamo traces another formula than eager runs."""
    torch._dynamo.reset()
    optimized = parameters()
    optimizer = make(optimized)
    step = torch.compile(optimizer.step, backend=backend, options=options)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        for parameter in optimized:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        step()
    yield from optimized


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01, foreach=True),
        lambda p: torch.optim.AdamW(p, 0.1, amsgrad=True, foreach=True),
        lambda p: torch.optim.RMSprop(p, 0.1, momentum=0.9, centered=True, foreach=True),
        lambda p: torch.optim.Adam(p, 0.1, weight_decay=0.01),  # without lists: Dynamo writes products with sums
    ],
    ids=["SGD", "AdamW", "RMSprop", "Adam one by one"],
)
def test_optimizer_steps(make: Callable[..., Any]) -> None:
    expected = list(steps(make, "aot_eager", None))
    found = list(steps(make, "ferrite", {"executor": "oracle", "strict": True}))
    assert not fallbacks()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    plain = parameters()
    assert not any(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
