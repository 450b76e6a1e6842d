"""Lowering of losses against eager, through the oracle."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.unit.test_lower import assert_same, fallbacks
from tests.unit.test_lower_norm import assert_raises_alike

aten = torch.ops.aten
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
NONE, MEAN, SUM = 0, 1, 2
IGNORED = 2


def spread(dtype: torch.dtype, *, low: float = -2.0, high: float = 2.0) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.empty(4, 8).uniform_(low, high).to(dtype)


def with_gradient(loss: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """The loss and the gradient of its first argument."""

    def both(x: torch.Tensor, *others: Any) -> Any:
        value = loss(x, *others)
        return value, torch.autograd.grad(value, x, torch.linspace(0.5, 2, value.numel()).view_as(value).to(value))[0]

    return both


def assert_same_with_gradient(loss: Callable[..., torch.Tensor], x: torch.Tensor, *others: Any) -> None:
    compiled = torch.compile(loss, backend="ferrite", options={"executor": "oracle", "strict": True})
    sides = [with_gradient(side)(x.detach().requires_grad_(), *others) for side in (loss, compiled)]
    assert fallbacks() == set()
    torch.testing.assert_close(sides[1], sides[0], check_stride=True, equal_nan=True)


# ---- elementwise losses round where eager rounds

ELEMENTWISE: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "mse": lambda x, t: aten.mse_loss(x, t, NONE),
    "smooth_l1": lambda x, t: aten.smooth_l1_loss(x, t, NONE, 0.7),
    "huber": lambda x, t: aten.huber_loss(x, t, NONE, 0.7),
    "mse gradient": lambda x, t: aten.mse_loss_backward(x * t, x, t, NONE),
    "mse gradient of the mean": lambda x, t: aten.mse_loss_backward(x[0, 0], x, t, MEAN),
    "smooth_l1 gradient": lambda x, t: aten.smooth_l1_loss_backward(x * t, x, t, NONE, 0.7),
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_distances_round_as_in_eager(name: str, dtype: torch.dtype) -> None:
    x, target = spread(dtype), spread(dtype).flip(0).contiguous()
    assert_same(ELEMENTWISE[name], x, target, exact=not (dtype == torch.float32 and "smooth_l1" in name))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_binary_cross_entropy_rounds_as_in_eager(dtype: torch.dtype) -> None:
    x, target = spread(dtype, low=0.01, high=0.99), spread(dtype, low=0, high=1).flip(0).contiguous()
    weight = spread(dtype, low=0.5, high=2)[0]
    exact = dtype != torch.float32  # in f32 eager's vectors and scalars take different logarithms
    assert_same(lambda x, t, w: aten.binary_cross_entropy(x, t, w, NONE), x, target, weight, exact=exact)
    assert_same(lambda g, x, t, w: aten.binary_cross_entropy_backward(g, x, t, w, MEAN), x[0, 0], x, target, weight)
    logits = spread(dtype)
    for positive in (None, weight, weight[0].clone()):
        assert_same(
            lambda x, t, w, p: aten.binary_cross_entropy_with_logits(x, t, w, p, NONE),
            logits, target, weight, positive, exact=exact,
        )  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_soft_margin_rounds_as_in_eager(dtype: torch.dtype) -> None:
    x, target = spread(dtype), spread(dtype).flip(0).sign()
    exact = dtype != torch.float32
    assert_same(lambda x, t: aten.soft_margin_loss(x, t, NONE), x, target, exact=exact)
    assert_same(lambda g, x, t: aten.soft_margin_loss_backward(g, x, t, MEAN), x[0, 0], x, target, exact=exact)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", ["mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy"])
def test_reductions_and_gradients(name: str, reduction: str) -> None:
    x, target = spread(torch.float32, low=0.1, high=0.9), spread(torch.float32, low=0, high=1).flip(0).contiguous()
    assert_same_with_gradient(lambda x, t: getattr(functional, name)(x, t, reduction=reduction), x, target)


def test_corners_of_distances() -> None:
    assert_same(lambda x, t: functional.mse_loss(x, t), torch.empty(0), torch.empty(0))
    assert_same(lambda x, t: functional.mse_loss(x, t, reduction="sum"), torch.empty(0), torch.empty(0))
    assert_same(lambda x, t: functional.mse_loss(x, t), torch.randn(3), torch.randn(3).double(), exact=False)
    x = torch.tensor([1.0, -1.0, 0.0])
    assert_same(lambda x, t: (aten.smooth_l1_loss(x, t, NONE, 0.0),), x, torch.zeros(3))
    assert_same(lambda g, x, t: aten.smooth_l1_loss_backward(g, x, t, NONE, 0.0), torch.ones(3), x, torch.zeros(3))
    assert_raises_alike(lambda x: functional.mse_loss(x, x, reduction="none"), torch.arange(3))


def test_probabilities_outside_raise_as_in_eager() -> None:
    for bad in (1.5, -0.1, math.nan):
        assert_raises_alike(lambda x, t: functional.binary_cross_entropy(x, t), torch.tensor([0.5, bad]), torch.ones(2))
    edges, target = torch.tensor([0.0, 1.0, 0.0, 1.0]), torch.tensor([0.0, 0.0, 1.0, 1.0])
    assert_same(lambda x, t: functional.binary_cross_entropy(x, t, reduction="none"), edges, target)


# ---- losses over classes


def classes(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(6, 5).to(dtype), torch.tensor([0, 4, IGNORED, 1, IGNORED, 3]), torch.rand(5).to(dtype)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("ignored", [-100, IGNORED])
def test_nll_loss(reduction: str, weighted: bool, ignored: int) -> None:
    x, target, weight = classes()

    def loss(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return functional.nll_loss(x, t, weight if weighted else None, ignore_index=ignored, reduction=reduction)

    assert_same_with_gradient(loss, x, target)
    if weighted and ignored == IGNORED:
        assert_same_with_gradient(loss, torch.randn(1, 5, 2, 3), target.view(1, 2, 3))
        assert_same_with_gradient(loss, x[0], target[1])


@pytest.mark.parametrize("dtype", FLOATS[1:], ids=str)
def test_nll_loss_of_halves(dtype: torch.dtype) -> None:
    """Without a sum every step is eager's; sums run in f32 and not, as in eager, in halves."""
    x, target, weight = classes(dtype)
    assert_same(lambda x, t, w: functional.nll_loss(x, t, w, ignore_index=IGNORED, reduction="none"), x, target, weight)
    total = torch.tensor(2.3, dtype=dtype)
    assert_same(lambda x, t, w, n: aten.nll_loss_backward(n, x, t, w, MEAN, IGNORED, n), x, target, weight, total)
    assert_same_with_gradient(lambda x, t, w: functional.nll_loss(x, t, w), x, target, weight)


def test_cross_entropy() -> None:
    x, target, weight = classes()
    assert_same_with_gradient(lambda x, t: functional.cross_entropy(x, t, weight, label_smoothing=0.1), x, target)
    probabilities = torch.rand(6, 5).softmax(1)
    assert_same_with_gradient(lambda x, t: functional.cross_entropy(x, t, label_smoothing=0.1), x, probabilities)


def test_cross_entropy_serves_many_sizes() -> None:
    compiled = torch.compile(
        functional.cross_entropy, backend="ferrite", dynamic=True, options={"executor": "oracle", "strict": True}
    )
    for batch, count in ((4, 7), (6, 3)):
        x, target = torch.randn(batch, count), torch.arange(batch) % count
        torch.testing.assert_close(compiled(x, target), functional.cross_entropy(x, target))
    assert fallbacks() == set()


@pytest.mark.parametrize("shape", [(3, 4), (1, 4, 1, 3)], ids=["vectors", "pictures"])
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("bad", [-1, 4])
def test_targets_outside_raise_as_in_eager(shape: tuple[int, ...], reduction: str, bad: int) -> None:
    x, target = torch.randn(shape), torch.tensor([0, bad, 3]).reshape(shape[:1] + shape[2:])
    assert_raises_alike(lambda x, t: functional.nll_loss(x, t, reduction=reduction), x, target)
    assert_same(lambda x, t: functional.nll_loss(x, t, reduction=reduction, ignore_index=bad), x, target, exact=False)


def test_losses_over_no_targets() -> None:
    x, target = torch.empty(0, 5), torch.empty(0, dtype=torch.int64)
    for reduction in ("none", "mean", "sum"):
        assert_same_with_gradient(lambda x, t, how=reduction: functional.nll_loss(x, t, reduction=how), x, target)
    ignored = torch.full((6,), IGNORED)
    assert_same_with_gradient(lambda x, t: functional.nll_loss(x, t, ignore_index=IGNORED), classes()[0], ignored)
    assert_raises_alike(lambda x, t: functional.nll_loss(x, t), torch.empty(2, 0), torch.zeros(2, dtype=torch.int64))


def test_gradient_into_channels_last_raises_as_in_eager() -> None:
    x = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    target, one = torch.zeros(2, 4, 4, dtype=torch.int64), torch.tensor(1.0)
    assert_raises_alike(lambda x, t, n: aten.nll_loss2d_backward(n, x, t, None, MEAN, -100, n), x, target, one)


@pytest.mark.parametrize("name", ["hinge_embedding_loss", "margin_ranking_loss", "kl_div", "poisson_nll_loss"])
def test_losses_that_pytorch_makes_of_ops(name: str) -> None:
    x, target = spread(torch.float32), spread(torch.float32).sign()
    others = (x.flip(0).contiguous(), target) if name == "margin_ranking_loss" else (target,)
    assert_same_with_gradient(getattr(functional, name), x, *others)


@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.float64), (torch.bfloat16, torch.float32), (torch.float64,) * 2]
)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_huber_loss_has_the_dtype_of_its_input(dtypes: tuple[torch.dtype, torch.dtype], reduction: str) -> None:
    x, target = spread(dtypes[0]), spread(dtypes[1]).flip(0)
    assert_same(lambda x, target: functional.huber_loss(x, target, reduction=reduction), x, target, exact=False)
