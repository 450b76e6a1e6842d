"""Quantising moves above views (PRE-31)."""

from __future__ import annotations

from typing import Any

import torch
import torch.ao.quantization.fx._decomposed
from torch import nn
from torch.fx import Node
from torch.nn import functional as F

from ferrite.graph.arguments import kind
from ferrite.graph.pre_grad.lift_quantise import lift_quantise
from tests.pre_grad.harness import Outcome, keeps, rewrites

library = torch.ops.quantized_decomposed
X, W = torch.randn(2, 5, 8), torch.randn(8, 8)


def quantise(x: Any, scale: Any = 0.05, zero: Any = 3) -> Any:
    return library.quantize_per_tensor.default(x, scale, zero, -128, 127, torch.int8)


def dequantise(x: Any) -> Any:
    return library.dequantize_per_tensor.default(x, 0.05, 3, -128, 127, torch.int8)


def quantised(outcome: Outcome) -> list[Node]:
    return [node for node in outcome.module.graph.nodes if "::quantize_per_tensor" in str(kind(node))]


class Attention(nn.Module):
    """Queries, keys and values are quantised after they were cut into heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        q = dequantise(quantise(self.q(x).view(b, s, 2, 4).permute(0, 2, 1, 3)))
        k = dequantise(quantise(self.k(x).view(b, s, 2, 4).permute(0, 2, 1, 3).transpose(-1, -2)))
        v = dequantise(quantise(self.v(x).reshape(b, s, 2, 4).transpose(1, 2)))
        return (q @ k).softmax(-1) @ v


def test_in_an_attention_block_every_projection_is_quantised_at_once() -> None:
    outcome = rewrites(lift_quantise, Attention(), [X], times=3, exact=True)
    assert [kind(node.args[0]) for node in quantised(outcome)] == ["linear"] * 3
    assert all(node.meta["example_value"].dtype is torch.int8 for node in quantised(outcome))
    views = [node for node in outcome.module.graph.nodes if kind(node) in ("view", "reshape", "permute", "transpose")]
    assert {node.meta["example_value"].dtype for node in views} == {torch.int8}


def test_as_exported_graphs_spell_it() -> None:
    aten = torch.ops.aten

    def function(x: Any) -> Any:
        y = aten.permute.default(aten.view.default(aten.relu.default(x), [2, 5, 2, 4]), [0, 2, 1, 3])
        return quantise(aten.reshape.default(aten.transpose.int(y, -1, -2), [2, 2, 20]))

    outcome = rewrites(lift_quantise, function, [X], times=1, exact=True)
    assert [kind(node.args[0]) for node in quantised(outcome)] == ["relu"]


def test_as_the_name_without_an_overload_and_by_keyword() -> None:
    def function(x: Any) -> Any:
        y = x.relu().view(2, 40)
        return library.quantize_per_tensor(
            input=y, scale=0.05, zero_point=0, quant_min=0, quant_max=255, dtype=torch.uint8
        )

    outcome = rewrites(lift_quantise, function, [X], times=1, exact=True)
    assert [kind(node.kwargs["input"]) for node in quantised(outcome)] == ["relu"]


def test_sizes_that_vary() -> None:
    def function(x: Any) -> Any:
        return quantise(x.relu().view(x.shape[0], x.shape[1], 2, -1).transpose(1, 2))

    torch._dynamo.mark_dynamic(x := torch.randn(2, 5, 8), 1)
    rewrites(lift_quantise, function, [x], times=1, exact=True, dynamic=None)


def test_without_views_nothing_moves() -> None:
    keeps(lift_quantise, lambda x: quantise(x.relu()), [X])


def test_a_view_with_another_reader_stays() -> None:
    def function(x: Any) -> Any:
        y = x.relu().view(2, 40)
        return quantise(y), y + 1

    keeps(lift_quantise, function, [X], because="has 2 users")


def test_a_view_in_the_middle_with_another_reader_stays() -> None:
    def function(x: Any) -> Any:
        y = x.relu().view(2, 40)
        return quantise(y.transpose(0, 1)), y + 1

    keeps(lift_quantise, function, [X], because="has 2 users")


def test_what_is_read_twice_stays() -> None:
    def function(x: Any) -> Any:
        y = x.relu()
        return quantise(y.view(2, 40)), y + 1

    keeps(lift_quantise, function, [X], because="y has 2 users")


def test_scales_of_channels_stay() -> None:
    def function(x: Any, scales: Any, zeros: Any) -> Any:
        return library.quantize_per_channel.default(x.relu().transpose(0, 1), scales, zeros, 0, -128, 127, torch.int8)

    keeps(lift_quantise, function, [X, torch.rand(5) + 0.1, torch.zeros(5, dtype=torch.int64)])


def test_a_scale_that_is_a_tensor_stays() -> None:
    def function(x: Any, scale: Any, zero: Any) -> Any:
        return library.quantize_per_tensor.tensor(x.relu().transpose(0, 1), scale, zero, -128, 127, torch.int8)

    keeps(lift_quantise, function, [X, torch.tensor(0.1), torch.tensor(0)], because="l_scale_, a value of the graph")


def test_a_write_in_between_stays() -> None:
    def function(x: Any) -> Any:
        base = x * 2
        y = base.view(2, 40)
        x.add_(1)
        torch.relu_(y)
        return quantise(y)

    keeps(lift_quantise, function, [X])


def test_a_write_to_what_is_viewed() -> None:
    def function(x: Any) -> Any:
        y = x.view(2, 40)
        x.add_(1)
        return quantise(y)

    keeps(lift_quantise, function, [X], because="has 2 users")


def test_a_quantised_tensor_that_is_written_stays() -> None:
    def function(x: Any) -> Any:
        y = quantise(x.relu().view(2, 40))
        y.add_(1)
        return y

    keeps(lift_quantise, function, [X], because="may be written by")


def test_what_is_no_view_stays_above() -> None:
    """Every other column: only the transpose below the slice moves."""

    def function(x: Any) -> Any:
        return quantise(F.relu(x)[:, :, ::2].transpose(1, 2))

    outcome = rewrites(lift_quantise, function, [X], times=1, exact=True)
    assert [kind(node.args[0]) for node in quantised(outcome)] == ["getitem"]


def test_tensors_of_quantised_dtypes_stay() -> None:
    """Their fake values say f32: nothing can be checked."""

    def function(x: Any) -> Any:
        return torch.quantize_per_tensor(x.relu().view(2, 40).transpose(0, 1), 0.05, 0, torch.qint8).dequantize()

    keeps(lift_quantise, function, [X])
