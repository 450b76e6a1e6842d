"""What writes, what draws random numbers, and what switches modes, in graphs as Dynamo gives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import Node
from torch.nn import functional as F

from ferrite.graph.effects import changes_mode, is_random, reshapes, written_by
from tests.pre_grad.harness import capture

aten = torch.ops.aten


def with_out(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty(4, 4)
    return torch.tanh(x, out=out)


def by_index(x: torch.Tensor) -> torch.Tensor:
    x[0] = 1
    return x + 1


def augmented(x: torch.Tensor) -> torch.Tensor:
    x = x * 2
    x += 1
    return x


def in_a_branch(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda y: y.clone().add_(1), lambda y: y.sin(), (x,))


@torch.library.custom_op("ferrite_test_effects::fill", mutates_args={"x"})
def fill(x: torch.Tensor) -> None:
    x.fill_(1.0)


def by_custom_op(x: torch.Tensor) -> torch.Tensor:
    fill(x)
    return x + 1


WRITES: list[tuple[Callable[..., Any], str]] = [
    (lambda x: x.add_(1), "add_"),
    (lambda x: F.relu(x, inplace=True), "relu"),
    (lambda x: F.relu(x, True), "relu"),
    (lambda x: F.hardtanh(x, -1.0, 1.0, True), "hardtanh"),
    (lambda x: F.dropout(x, 0.5, True, True), "dropout"),
    (torch.relu_, "relu_"),
    (lambda x: torch.nn.init.zeros_(x) + 1, "zero_"),
    (with_out, "tanh"),
    (by_index, "setitem"),
    (augmented, "iadd"),
    (by_custom_op, "fill"),
    (lambda x: F.batch_norm(x, torch.zeros(4), torch.ones(4), training=True), "batch_norm"),
    (lambda x: F.batch_norm(x, torch.zeros(4), torch.ones(4), None, None, True), "batch_norm"),
    (lambda x: aten.batch_norm.default(x, None, None, torch.zeros(4), torch.ones(4), True, 0.1, 1e-5, 1), "batch_norm"),
    (lambda x: aten.batch_norm(x, None, None, torch.zeros(4), torch.ones(4), True, 0.1, 1e-5, True), "batch_norm"),
    (lambda x: F.embedding(torch.tensor([1]), x, max_norm=1.0), "embedding"),
    (lambda x: torch._foreach_add_([x], 1.0), "_foreach_add_"),
    (in_a_branch, "cond"),
]  # fmt: skip
PURE: list[Callable[..., Any]] = [
    lambda x: F.relu(x),
    lambda x: F.relu(x, False),
    lambda x: x.__and__(x) if x.dtype == torch.bool else x.add(1),
    lambda x: F.batch_norm(x, torch.zeros(4), torch.ones(4), training=False),
    lambda x: aten.batch_norm.default(x, None, None, torch.zeros(4), torch.ones(4), False, 0.1, 1e-5, True),
    lambda x: F.layer_norm(x, (4,)),
    lambda x: torch.cond(x.sum() > 0, lambda y: y.cos(), lambda y: y.sin(), (x,)),
    lambda x: x.to(torch.float64) // 2,
    lambda x: torch._foreach_add([x], 1.0),
]  # fmt: skip


def calls(function: Callable[..., Any], *inputs: Any) -> list[Node]:
    captured = capture(function, inputs or [torch.randn(4, 4)])
    return [node for node in captured.module.graph.nodes if node.op.startswith("call")]


@pytest.mark.parametrize(("function", "name"), WRITES, ids=[name for _, name in WRITES])
def test_a_write_is_seen(function: Callable[..., Any], name: str) -> None:
    writers = [node for node in calls(function) if written_by(node)]
    assert [str(getattr(node.target, "__name__", node.target)) for node in writers if name in str(node.target)], writers


@pytest.mark.parametrize("function", PURE)
def test_nothing_is_seen_where_nothing_is_written(function: Callable[..., Any]) -> None:
    assert [node for node in calls(function) if written_by(node)] == []


def test_functions_that_nobody_knows_may_write() -> None:
    @torch._dynamo.allow_in_graph
    def theirs(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    (node,) = calls(lambda x: theirs(x))
    assert [source.op for source in written_by(node)] == ["placeholder"]


@pytest.mark.parametrize(
    ("function", "random"),
    [
        (lambda x: F.dropout(x), True),
        (lambda x: F.dropout(x, 0.5, False), False),
        (lambda x: F.dropout(x, 0.0), False),
        (lambda x: torch.dropout(x, 0.5, True), True),
        (lambda x: torch.rand_like(x), True),
        (lambda x: x.bernoulli_(0.5), True),
        (lambda x: torch.ops.aten.bernoulli.default(x), True),
        (lambda x: F.scaled_dot_product_attention(x, x, x), False),
        (lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1), True),
        (lambda x: x.relu(), False),
    ],
)
def test_random(function: Callable[..., Any], random: bool) -> None:
    assert any(is_random(node) for node in calls(function, torch.rand(4, 4))) is random


def test_modes_are_seen() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = x.sin()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return y @ x

    switches = [str(getattr(node.target, "__name__", "")) for node in calls(function) if changes_mode(node)]
    assert switches == ["_set_grad_enabled", "_set_grad_enabled", "_enter_autocast", "_exit_autocast"]


def test_reshaped_in_place() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.unsqueeze_(0)
        return y + 1

    assert [source.name for node in calls(function) for source in reshapes(node)] == ["y"]
