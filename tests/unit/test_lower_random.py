"""Random ops by counters: repeatable, different from call to call, rightly distributed, and eager's on request."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import ferrite

COUNT = 20_000


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, backend="ferrite", options={"executor": "oracle", "strict": True, **options})


def fallbacks() -> dict[str, str]:
    record = ferrite.last_record()
    assert record is not None
    return {fallback.op: fallback.reason for fallback in record.fallbacks}


DRAWS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], float, float]] = {
    # name: the draw, its mean, its variance
    "rand": (lambda x: torch.rand(COUNT), 0.5, 1 / 12),
    "rand_f64": (lambda x: torch.rand(COUNT, dtype=torch.float64), 0.5, 1 / 12),
    "rand_bf16": (lambda x: torch.rand(COUNT, dtype=torch.bfloat16), 0.5, 1 / 12),
    "rand_like": (torch.rand_like, 0.5, 1 / 12),
    "randn": (lambda x: torch.randn(COUNT), 0.0, 1.0),
    "randn_f64": (lambda x: torch.randn(COUNT, dtype=torch.float64), 0.0, 1.0),
    "randn_like": (torch.randn_like, 0.0, 1.0),
    "uniform": (lambda x: x.clone().uniform_(-2, 4), 1.0, 3.0),
    "normal": (lambda x: x.clone().normal_(3, 2), 3.0, 4.0),
    "normal_floats": (lambda x: torch.normal(3.0, 2.0, (COUNT,)), 3.0, 4.0),
    "exponential": (lambda x: x.clone().exponential_(2.0), 0.5, 0.25),
    "log_normal": (
        lambda x: x.clone().log_normal_(0.0, 0.5),
        math.exp(0.125),
        (math.exp(0.25) - 1) * math.exp(0.25),
    ),
    "bernoulli": (lambda x: torch.bernoulli(x, 0.3), 0.3, 0.21),
    "bernoulli_of": (lambda x: torch.bernoulli(torch.full_like(x, 0.3)), 0.3, 0.21),
    "randint": (lambda x: torch.randint(10, (COUNT,)), 4.5, 8.25),
    "randint_between": (lambda x: torch.randint(-5, 5, (COUNT,), dtype=torch.int32), -0.5, 8.25),
    "randint_like": (lambda x: torch.randint_like(x, 10), 4.5, 8.25),
}


@pytest.mark.parametrize("name", DRAWS)
def test_mean_and_variance(name: str) -> None:
    """Within six standard errors: a wrong formula is out by far more, a right one never fails in practice."""
    draw, mean, variance = DRAWS[name]
    x = torch.zeros(COUNT)
    torch.manual_seed(7)
    found = compiled(draw)(x)
    assert fallbacks() == {}
    expected = draw(x)
    assert (found.shape, found.dtype, found.stride()) == (expected.shape, expected.dtype, expected.stride())
    wide = found.double()
    fourth = (wide - mean).pow(4).mean()
    assert abs(wide.mean() - mean) < 6 * math.sqrt(variance / COUNT)
    assert abs(wide.var() - variance) < 6 * math.sqrt((fourth + variance**2) / COUNT)


@pytest.mark.parametrize("name", DRAWS)
def test_numbers_keep_to_their_range(name: str) -> None:
    draw, _, _ = DRAWS[name]
    found = compiled(draw)(torch.zeros(COUNT)).double()
    low, high = {"rand": (0, 1), "uniform": (-2, 4), "bernoulli": (0, 1.5), "randint": (-5, 10)}.get(
        name.split("_")[0], (-math.inf, math.inf)
    )
    assert found.isfinite().all()
    assert low <= found.min()
    assert found.max() < high
    if name == "exponential":
        assert found.min() > 0  # its logarithm is taken by Gumbel's trick


def test_the_seed_repeats_a_run_and_calls_differ() -> None:
    function = compiled(lambda x: (torch.rand_like(x), torch.rand_like(x)))
    x = torch.empty(100)
    torch.manual_seed(3)
    first, second = function(x), function(x)
    torch.manual_seed(3)
    again = function(x)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], second[0])
    assert not torch.equal(first[0], first[1]), "two draws of one call are two streams"


def test_the_generator_advances_once_a_call() -> None:
    function = compiled(lambda x: torch.rand_like(x) + torch.randn_like(x))
    torch.manual_seed(3)
    function(torch.empty(1000))
    after_many = torch.rand(1)
    torch.manual_seed(3)
    function(torch.empty(10))
    assert torch.equal(after_many, torch.rand(1)), "the state after a call depends on how much was drawn"
    torch.manual_seed(3)
    assert not torch.equal(after_many, torch.rand(1)), "the call left the generator where it was"


def test_readers_of_one_draw_see_the_same_numbers() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        noise = torch.rand_like(x)
        return noise + 1, noise.sum(), noise * 2

    shifted, summed, doubled = compiled(function)(torch.empty(64))
    assert torch.allclose(shifted - 1, doubled / 2, atol=1e-6)
    assert torch.allclose(doubled.sum() / 2, summed)


@pytest.mark.parametrize("dynamic", [False, True])
def test_dropout_and_its_gradient_use_one_mask(dynamic: bool) -> None:
    torch._dynamo.reset()
    function = torch.compile(
        lambda x: F.dropout(x, 0.4), backend="ferrite", options={"executor": "oracle", "strict": True}, dynamic=dynamic
    )
    x = torch.ones(50, 40, requires_grad=True)
    y = function(x)
    y.sum().backward()
    assert torch.equal(x.grad, y)
    kept = (y != 0).double().mean()
    assert abs(kept - 0.6) < 0.08
    assert torch.equal(y[y != 0].unique(), torch.tensor([1 / 0.6]))


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_certain_dropout_is_exact(p: float) -> None:
    x = torch.tensor([1.0, -0.0, math.inf, math.nan])
    found, expected = compiled(lambda x: F.dropout(x, p))(x), F.dropout(x, p)
    assert torch.equal(found.view(torch.int32).abs(), expected.view(torch.int32).abs())


def test_chances_outside_of_zero_and_one_raise_as_in_eager() -> None:
    x = torch.tensor([0.5, 1.5])
    with pytest.raises(RuntimeError) as theirs:
        torch.bernoulli(x)
    with pytest.raises(RuntimeError) as ours:
        compiled(torch.bernoulli)(x)
    assert str(ours.value).splitlines()[0] == str(theirs.value).splitlines()[0]


def test_a_generator_of_the_caller_is_left_to_eager() -> None:
    x = torch.zeros(8)

    def function(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return x.clone().uniform_(0, 1, generator=generator)

    ours, theirs = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
    torch._dynamo.reset()
    found = torch.compile(function, backend="ferrite", options={"executor": "oracle"})(x, ours)
    assert torch.equal(found, function(x, theirs))
    assert torch.equal(ours.get_state(), theirs.get_state())


@pytest.mark.parametrize("name", DRAWS)
def test_fallback_random_gives_eagers_stream(name: str) -> None:
    draw, _, _ = DRAWS[name]
    x = torch.zeros(COUNT)
    torch.manual_seed(11)
    expected = draw(x)
    torch.manual_seed(11)
    assert torch.equal(compiled(draw, fallback_random=True)(x), expected)
    assert any("fallback_random" in reason or "random" in reason for reason in fallbacks().values())
