"""Random numbers: eager's stream, bit for bit, and a compile that draws none of its own."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.behaviour.compare import STRICT, assert_same, compare, equal

DRAWS: dict[str, Callable[[Tensor], Any]] = {
    "rand": lambda x: x + torch.rand(4, 6),
    "rand_like": lambda x: x + torch.rand_like(x),
    "randn": lambda x: x * torch.randn(x.shape),
    "randn_like": lambda x: x * torch.randn_like(x),
    "randint": lambda x: x + torch.randint(0, 10, (6,)),
    "randint_like": lambda x: x + torch.randint_like(x, 3, 9),
    "randperm": lambda x: x[torch.randperm(4)],
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli_p": lambda x: torch.bernoulli(x, 0.3),
    "normal": lambda x: torch.normal(x, 2.0),
    "uniform_": lambda x: torch.empty_like(x).uniform_(-1, 1) + x,
    "normal_": lambda x: x.clone().normal_(1, 3),
    "exponential_": lambda x: x.clone().exponential_(),
    "multinomial": lambda x: torch.multinomial(x.abs() + 0.1, 3),
    "poisson": lambda x: torch.poisson(x.abs()),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout_0": lambda x: F.dropout(x, 0.0) * 2,
    "dropout_1": lambda x: F.dropout(x, 1.0) * 2,
    "dropout_eval": lambda x: F.dropout(x, 0.5, training=False) * 2,
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "feature_dropout": lambda x: F.dropout1d(x, 0.5),
    "two_draws_differ": lambda x: (torch.rand_like(x), torch.rand_like(x)),
    "draw_between_work": lambda x: F.dropout(F.dropout(x, 0.2).sin(), 0.3) + torch.rand(()),
}

# Eager draws nothing for p = 1; the op that AOTAutograd traces for it draws and multiplies by zero. Values are equal.
DRAWS_FOR_NOTHING = ("dropout_1",)


@pytest.mark.parametrize(
    ("name", "dynamic"), [*((name, False) for name in DRAWS), ("rand_like", True), ("dropout", True), ("randn", True)]
)
def test_draws_are_those_of_eager(name: str, dynamic: bool) -> None:
    compare(DRAWS[name], torch.randn(4, 6), dynamic=dynamic, calls=3, random=name not in DRAWS_FOR_NOTHING)


@pytest.mark.parametrize(
    "name", ["dropout", "dropout_0", "dropout_1", "rrelu", "alpha_dropout", "randn_like", "normal"]
)
def test_draws_while_training(name: str) -> None:
    x = torch.randn(4, 6, requires_grad=True)
    compare(DRAWS[name], x, training=True, random=name not in DRAWS_FOR_NOTHING)


@pytest.mark.parametrize("fallback_random", [False, True])
def test_gradients_of_dropout_lie_as_its_input(fallback_random: bool) -> None:
    """PyTorch's own backward of the op gives them contiguously where it is traced."""
    options = {"strict": True, "fallback_random": fallback_random}
    compiled = torch.compile(lambda x: F.dropout(x, 0.5), backend="ferrite", dynamic=False, options=options)
    for given in (torch.randn(4, 3, 2).permute(2, 1, 0), torch.randn(1, 5, 3).transpose(0, 2)):
        x = given.detach().requires_grad_()
        out = compiled(x)
        (gradient,) = torch.autograd.grad(out, x, torch.ones_like(out))
        assert (out.stride(), gradient.stride()) == (x.stride(), x.stride())
        assert torch.equal(gradient, torch.where(out == 0, 0.0, 2.0))


def test_calls_differ_and_repeat_under_one_seed() -> None:
    compiled = torch.compile(lambda x: F.dropout(x, 0.5), backend="ferrite", options={"strict": True})
    x = torch.ones(64)
    torch.manual_seed(3)
    first, second = compiled(x), compiled(x)
    assert not equal(first, second)
    torch.manual_seed(3)
    assert equal(compiled(x), first)
    assert equal(compiled(x), second)


@pytest.mark.parametrize("training", [False, True])
def test_compiling_draws_nothing(training: bool) -> None:
    """`torch.rand` after a compile is `torch.rand` without it."""

    def function(x: Tensor) -> Tensor:
        return F.dropout(torch.nn.functional.linear(x, x), 0.5).sum()

    x = torch.randn(4, 4, requires_grad=training)
    torch.manual_seed(5)
    function(x).backward() if training else function(x)
    expected = torch.rand(3)
    torch.manual_seed(5)
    result = torch.compile(function, backend="ferrite", options=STRICT)(x)
    if training:
        result.backward()
    assert equal(torch.rand(3), expected)


def test_compiling_a_function_without_draws_leaves_the_state() -> None:
    before = torch.get_rng_state()
    torch.compile(lambda x: x @ x, backend="ferrite", options={"strict": True})(torch.ones(3, 3))
    assert torch.equal(torch.get_rng_state(), before)


def test_explicit_generator() -> None:
    """Dynamo breaks the graph at a generator that is passed along; results and the generator are eager's."""

    def function(x: Tensor, generator: torch.Generator) -> Tensor:
        return x.sin() + torch.rand(4, generator=generator)

    x = torch.randn(4)
    ours, theirs = torch.Generator().manual_seed(9), torch.Generator().manual_seed(9)
    compiled = torch.compile(function, backend="ferrite", options={"strict": True})
    for _ in range(2):
        assert equal(compiled(x, ours), function(x, theirs))
    assert equal(ours.get_state(), theirs.get_state())


def test_seed_inside_the_function() -> None:
    def function(x: Tensor) -> Tensor:
        torch.manual_seed(1)
        return x + torch.rand(4)

    compare(function, torch.randn(4), fullgraph=False)


def block(x: Tensor, w: Tensor) -> Tensor:
    return F.dropout((x @ w).sin(), 0.5).relu()


def checkpointed(x: Tensor, w: Tensor, reentrant: bool) -> Tensor:
    return checkpoint(block, checkpoint(block, x, w, use_reentrant=reentrant), w, use_reentrant=reentrant)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["not_reentrant", "reentrant"])
def test_checkpointed_dropout(reentrant: bool, dynamic: bool) -> None:
    """The recomputation in the backward sees the mask of the forward, and the state ends where eager's does."""
    x, w = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    compare(lambda x, w: checkpointed(x, w, reentrant).sum(), x, w, training=True, dynamic=dynamic)


@pytest.mark.parametrize("reentrant", [False, True], ids=["not_reentrant", "reentrant"])
def test_checkpointed_dropout_without_gradients(reentrant: bool) -> None:
    """AOTAutograd refuses a checkpoint with random ops in an inference graph; such a capture runs in eager."""
    x, w = torch.randn(8, 8), torch.randn(8, 8)
    torch.manual_seed(2)
    expected = checkpointed(x, w, reentrant)
    state = torch.get_rng_state()
    torch.manual_seed(2)
    found = torch.compile(checkpointed, backend="ferrite", fullgraph=True)(x, w, reentrant)
    assert equal(found, expected)
    assert torch.equal(torch.get_rng_state(), state)


def test_gradient_of_checkpointed_dropout_uses_the_mask_of_the_forward() -> None:
    def function(x: Tensor) -> Tensor:
        return checkpoint(lambda x: F.dropout(x, 0.5) * x, x, use_reentrant=False)

    x = torch.ones(256, requires_grad=True)
    y = torch.compile(function, backend="ferrite", options={"strict": True})(x)
    y.sum().backward()
    # y = x * mask * x with x = 1: the gradient is twice the value exactly where the mask let it through.
    assert equal(x.grad, 2 * y)


def test_attention_with_dropout() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.3)

    q, k, v = (torch.randn(2, 2, 5, 4, requires_grad=True) for _ in range(3))
    compare(function, q, k, v, training=True)


def test_transformer_layer_with_dropout() -> None:
    module = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)
    compare(module, torch.randn(2, 3, 8), training=True)


@pytest.mark.parametrize("dynamic", [False, True])
def test_numbers_that_python_draws(dynamic: bool) -> None:
    """They arrive with all their bits, whatever the example had."""

    def function(x: torch.Tensor, d: torch.Tensor, i: torch.Tensor) -> Any:
        drawn = random.uniform(0, 1)
        return (
            (x + 1) * drawn,
            d * drawn,
            i * random.random(),
            x.add(random.random(), alpha=2),
            x * random.randint(1, 9),
        )

    given = torch.ones(2), torch.ones(2, dtype=torch.float64) / 3, torch.ones(2, dtype=torch.int64)
    compiled = torch.compile(function, backend="ferrite", dynamic=dynamic, options=STRICT)
    for seed in range(3):
        random.seed(seed)
        expected = function(*given)
        random.seed(seed)
        assert_same(compiled(*given), expected, "result")
