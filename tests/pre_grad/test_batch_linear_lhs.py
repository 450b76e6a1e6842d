"""Linear layers on one input become one wide layer (PRE-14)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ferrite
from ferrite.graph.pre_grad.batch_linear_lhs import batch_linear_lhs
from tests.pre_grad.harness import keeps, rewrites

X = torch.randn(4, 8)
W = [torch.randn(6, 8) for _ in range(3)]


class Attention(nn.Module):
    """Grouped heads: keys and values are narrower than queries."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(8, 8, bias), nn.Linear(8, 4, bias), nn.Linear(8, 4, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        q = self.q(x).view(b, s, 4, 2).transpose(1, 2)
        k = self.k(x).view(b, s, 2, 2).transpose(1, 2).repeat_interleave(2, 1)
        v = self.v(x).view(b, s, 2, 2).transpose(1, 2).repeat_interleave(2, 1)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, s, 8)


@pytest.mark.parametrize("bias", [False, True])
def test_ten_layers_of_other_widths_become_one_for_each_input(bias: bool) -> None:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, width, bias) for width in range(1, 11))

        def forward(self, x: Any, y: Any) -> Any:
            return torch.cat([layer(source).relu() for source in (x, y) for layer in self.layers], 1)

    rewrites(batch_linear_lhs, Towers(), [X, X + 1], times=2, left={"linear": 2, "split": 2, "clone": 0})


@pytest.mark.parametrize("bias", [False, True])
def test_queries_keys_and_values(bias: bool) -> None:
    rewrites(batch_linear_lhs, Attention(bias), [torch.randn(2, 5, 8)], times=1, left={"linear": 1, "clone": 0})


def test_as_exported_graphs_spell_it() -> None:
    linear = torch.ops.aten.linear.default

    def function(x: Any, v: Any, w: Any) -> Any:
        return linear(x, v).relu() * linear(x, w).tanh()  # an exponential would make rounding a difference

    rewrites(batch_linear_lhs, function, [X, *W[:2]], times=1, left={"linear": 1})


def test_gate_and_up() -> None:
    def function(x: Any, gate: Any, up: Any) -> Any:
        return F.silu(F.linear(x, gate)) * F.linear(x, up)

    rewrites(batch_linear_lhs, function, [X, *W[:2]], times=1, left={"linear": 1, "clone": 0})


def test_a_batch_that_varies() -> None:
    rewrites(batch_linear_lhs, Attention(), [torch.randn(2, 5, 8)], times=1, left={"linear": 1}, dynamic=True)


def test_weights_that_vary_stay() -> None:
    def function(x: Any, gate: Any, up: Any) -> Any:
        return F.silu(F.linear(x, gate)) * F.linear(x, up)

    keeps(batch_linear_lhs, function, [X, *W[:2]], dynamic=True, because="sizes that vary")


def test_results_that_are_returned_have_the_strides_of_eager() -> None:
    def function(x: Any, *weights: Any) -> Any:
        return [F.linear(x, w) for w in weights]

    outcome = rewrites(
        batch_linear_lhs, function, [X, torch.randn(4, 8), torch.randn(4, 8)], times=1, left={"clone": 2}
    )
    assert [result.stride() for result in outcome.module(*[X, *(torch.randn(4, 8) for _ in range(2))])] == [(4, 1)] * 2


def test_one_row_that_is_returned_has_memory_of_its_own() -> None:
    """A part of one row is contiguous: `contiguous` would not copy it."""

    def function(x: Any, *weights: Any) -> Any:
        return [F.linear(x, w) for w in weights]

    rewrites(batch_linear_lhs, function, [X[:1], *W], times=1, left={"clone": 3})


def test_a_view_of_a_result_that_is_returned() -> None:
    def function(x: Any, v: Any, w: Any) -> Any:
        return F.linear(x, v).view(2, 2, 6), F.linear(x, w).relu()

    rewrites(batch_linear_lhs, function, [X, *W[:2]], times=1, left={"linear": 1, "clone": 1})


def test_only_a_view_that_cannot_be_is_given_a_copy() -> None:
    def function(x: Any, v: Any, w: Any) -> Any:
        return F.linear(x, v).view(-1).relu(), F.linear(x, w).view(4, 2, 3).relu()

    rewrites(batch_linear_lhs, function, [X, *W[:2]], times=1, left={"linear": 1, "clone": 1})


@torch.library.custom_op("ferrite_tests::sum_of_memory", mutates_args=())
def sum_of_memory(x: torch.Tensor) -> torch.Tensor:
    """Reads memory as if it were dense."""
    assert x.is_contiguous()
    return x.sum()


@sum_of_memory.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(())


def test_an_op_that_nobody_knows_sees_the_strides_of_eager() -> None:
    def function(x: Any, v: Any, w: Any) -> Any:
        with torch.no_grad():
            return sum_of_memory(F.linear(x, v)), F.linear(x, w).relu()

    rewrites(batch_linear_lhs, function, [X, *W[:2]], times=1, left={"linear": 1, "clone": 1})


def test_strides_that_are_asked_for_are_those_of_eager() -> None:
    def function(x: Any, v: Any, w: Any) -> Any:
        return torch.as_strided(F.linear(x, v), (4, 3), (6, 2)) + 1, F.linear(x, w).relu()

    rewrites(batch_linear_lhs, function, [X, *W[:2]], times=1, left={"linear": 1, "clone": 1})


def test_mixed_biases_stay_apart() -> None:
    def function(x: Any, v: Any, w: Any, b: Any) -> Any:
        return torch.cat([F.linear(x, v, b), F.linear(x, w)])

    keeps(batch_linear_lhs, function, [X, *W[:2], torch.randn(6)])


def test_an_input_that_is_written_in_between() -> None:
    def function(x: Any, v: Any, w: Any) -> Any:
        first = F.linear(x, v)
        x.add_(1)
        return torch.cat([first, F.linear(x, w)])

    keeps(batch_linear_lhs, function, [X, *W[:2]], because="may be written by")


def test_a_result_that_is_written_stays() -> None:
    def function(x: Any, *weights: Any) -> Any:
        first, second, third = (F.linear(x, w) for w in weights)
        return torch.cat([first.relu_(), second, third])

    rewrites(batch_linear_lhs, function, [X, *W], times=1, left={"linear": 2})
    keeps(
        batch_linear_lhs, lambda x, v, w: F.linear(x, v).relu_() + F.linear(x, w), [X, *W[:2]], because="may be written"
    )


def test_other_inputs_stay_apart() -> None:
    keeps(batch_linear_lhs, lambda x, y, v, w: F.linear(x, v) + F.linear(y, w), [X, X + 1, *W[:2]])


def test_weights_of_another_dtype_stay() -> None:
    def function(x: Any, v: Any, w: Any) -> Any:
        # The gradient of x would be a sum of halves, rounded elsewhere.
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            return F.linear(x, v) + F.linear(x, w)

    keeps(batch_linear_lhs, function, [X, W[0], W[1].bfloat16()], because="is f32 and")
    rewrites(batch_linear_lhs, function, [X, *W[:2]], times=1, left={"linear": 1})


def test_a_weight_that_a_member_makes() -> None:
    def function(x: Any, v: Any, w: Any) -> Any:
        made = F.linear(x, v)
        return F.linear(x, made @ w) + 1, made.sum()

    keeps(batch_linear_lhs, function, [torch.randn(6, 8), torch.randn(6, 8), torch.randn(6, 8)])


def test_asked_for_it_runs_in_training() -> None:
    torch.manual_seed(0)
    module = Attention()
    x = torch.randn(2, 5, 8, requires_grad=True)
    expected = module(x)
    gradients = torch.autograd.grad(expected.sum(), [x, *module.parameters()])
    compiled = torch.compile(module, backend="ferrite", options={"pre_grad": {"batch_linear_lhs": {}}})
    found = compiled(x)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found.sum(), [x, *module.parameters()]), gradients)
    runs = {run.name: run.changed for run in ferrite.last_record().passes if run.stage == "pre_grad"}
    assert runs["batch_linear_lhs"] == 1
