"""Many layer norms become one (PRE-15)."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ferrite.graph.pre_grad.batch_layernorm import batch_layernorm
from tests.pre_grad.harness import capture, keeps, rewrites

FIVE = [torch.randn(2, 4, 3) for _ in range(5)]
SHAPES = [(3,), (4, 3)]


class TwoLayers(nn.Module):
    """Five parts of the input are normalised, mixed, and normalised again."""

    def __init__(self, shape: tuple[int, ...], weight: bool, bias: bool) -> None:
        super().__init__()
        self.shape = shape
        self.weights = nn.ParameterList(torch.randn(shape) for _ in range(10 if weight else 0))
        self.biases = nn.ParameterList(torch.randn(shape) for _ in range(10 if bias else 0))

    def norm(self, x: torch.Tensor, index: int) -> torch.Tensor:
        weight = self.weights[index] if len(self.weights) else None
        bias = self.biases[index] if len(self.biases) else None
        return F.layer_norm(x, self.shape, weight, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = [self.norm(part, i) for i, part in enumerate(x.unbind(0))]
        return torch.cat([self.norm(part.exp(), 5 + i) for i, part in enumerate(first)])


@pytest.mark.parametrize(("shape", "weight", "bias"), product(SHAPES, (False, True), (False, True)))
def test_two_layers_of_five_become_two(shape: tuple[int, ...], weight: bool, bias: bool) -> None:
    torch.manual_seed(0)
    left = {"layer_norm": 2, "mul": 2 * weight, "add": 2 * bias, "unbind": 3}
    rewrites(
        batch_layernorm, TwoLayers(shape, weight, bias).double(), [torch.randn(5, 2, 4, 3).double()], times=2, left=left
    )


def test_in_f32() -> None:
    torch.manual_seed(0)
    rewrites(batch_layernorm, TwoLayers((3,), True, True), [torch.randn(5, 2, 4, 3)], times=2, left={"layer_norm": 2})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_rounded_once(dtype: torch.dtype) -> None:
    """Normalised, multiplied and shifted in f32: nearly always the very numbers of eager."""

    @torch.no_grad()
    def function(x: Any, w: Any, b: Any) -> Any:
        return torch.cat([F.layer_norm(x[i], (64,), w[i], b[i]) for i in range(5)])

    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator).to(dtype) for shape in [(5, 8, 64), (5, 64), (5, 64)]]
    captured = capture(function, inputs)
    outcome = rewrites(batch_layernorm, captured, times=1, left={"layer_norm": 1})
    with torch.no_grad():
        (found,) = outcome.module(*captured.inputs)
    assert (found != function(*inputs)).double().mean() < 0.005  # an f32 right between two halves


def test_an_eps_that_is_left_out_is_the_usual_one() -> None:
    def function(a: Any, b: Any, c: Any, d: Any, e: Any) -> Any:
        first = [F.layer_norm(a, (3,)), F.layer_norm(b, [3], eps=1e-5), F.layer_norm(input=c, normalized_shape=(3,))]
        return torch.cat([*first, F.layer_norm(d, (3,), None, None, 1e-5), torch.layer_norm(e, (3,))])

    rewrites(batch_layernorm, function, FIVE, times=1, left={"layer_norm": 1})


def test_another_eps_is_another_set() -> None:
    def function(*tensors: Any) -> Any:
        return torch.cat([F.layer_norm(t, (3,), eps=eps) for eps in (1e-5, 1e-3) for t in tensors])

    rewrites(batch_layernorm, function, FIVE, times=2, left={"layer_norm": 2})

    def mixed(*tensors: Any) -> Any:
        return torch.cat([F.layer_norm(t, (3,), eps=1e-5 if i else 1e-3) for i, t in enumerate(tensors)])

    keeps(batch_layernorm, mixed, FIVE)


def test_mixed_presence_of_weights_is_another_set() -> None:
    def function(w: Any, *tensors: Any) -> Any:
        return torch.cat([F.layer_norm(t, (3,), weight) for weight in (w, None) for t in tensors])

    rewrites(batch_layernorm, function, [torch.randn(3), *FIVE], times=2, left={"layer_norm": 2})

    def mixed(w: Any, *tensors: Any) -> Any:
        return torch.cat([F.layer_norm(t, (3,), w if i else None) for i, t in enumerate(tensors)])

    keeps(batch_layernorm, mixed, [torch.randn(3), *FIVE])

    def swapped(w: Any, *tensors: Any) -> Any:
        return torch.cat([F.layer_norm(t, (3,), w if i else None, None if i else w) for i, t in enumerate(tensors)])

    keeps(batch_layernorm, swapped, [torch.randn(3), *FIVE])


def test_other_normalised_dimensions_are_another_set() -> None:
    def function(*tensors: Any) -> Any:
        return torch.cat([F.layer_norm(t, (3,) if i else (4, 3)) for i, t in enumerate(tensors)])

    keeps(batch_layernorm, function, FIVE)


def test_results_that_are_returned_have_the_strides_of_eager() -> None:
    """A part of the stack steps over the parts of the others."""

    def function(*tensors: Any) -> Any:
        return [F.layer_norm(t, (3,)) for t in tensors]

    rewrites(batch_layernorm, function, FIVE, times=1, left={"layer_norm": 1, "clone": 5})


def test_a_view_that_a_part_cannot_have_reads_a_copy() -> None:
    def function(*tensors: Any) -> Any:
        return torch.cat([F.layer_norm(t, (3,)).view(-1) for t in tensors])

    rewrites(batch_layernorm, function, FIVE, times=1, left={"layer_norm": 1, "clone": 5})
