"""Many small linear layers become one batched product (PRE-13)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ferrite.graph.pre_grad.batch_linear import batch_linear
from ferrite.graph.pre_grad.batch_linear_lhs import batch_linear_lhs
from tests.pre_grad.harness import keeps, rewrites

INPUTS = [torch.randn(4, 3) for _ in range(5)]
WEIGHTS = [torch.randn(6, 3) for _ in range(5)]
BIASES = [torch.randn(6) for _ in range(5)]


class Layers(nn.Module):
    def __init__(self, bias: bool, count: int = 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 6, bias=bias) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([layer(part) for layer, part in zip(self.layers, x.split(3, 1), strict=True)], 1)


def layers(*operands: Any) -> Any:
    """Inputs, weights and, if there are as many, biases."""
    count = len(INPUTS)
    columns = [operands[start : start + count] for start in range(0, len(operands), count)]
    return torch.cat([F.linear(*row) for row in zip(*columns, strict=True)])


@pytest.mark.parametrize("bias", [False, True])
def test_five_layers_become_one_product_and_gradients_stay(bias: bool) -> None:
    torch.manual_seed(0)
    left = {"linear": 0, "bmm": int(not bias), "baddbmm": int(bias), "unbind": 1}
    rewrites(batch_linear, Layers(bias), [torch.randn(4, 15)], times=1, left=left)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_in_other_precisions(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 3)] * 5 + [(6, 3)] * 5 + [(6,)] * 5
    operands = [(torch.randn(shape, generator=generator) / 4).to(dtype) for shape in shapes]
    rewrites(batch_linear, layers, operands, times=1, left={"baddbmm": 1})


def test_under_autocast() -> None:
    def function(*operands: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return layers(*operands)

    rewrites(batch_linear, function, [*INPUTS, *WEIGHTS, *BIASES], times=1, left={"baddbmm": 1})


def test_parts_of_one_tensor_come_first() -> None:
    """Five of the six inputs are parts of one tensor: their stack is the one that a later pass can drop."""

    def function(other: Any, x: Any, w: Any) -> Any:
        parts = [other, *x.unbind(0)]
        return torch.cat([F.linear(part, w) for part in parts])

    outcome = rewrites(batch_linear, function, [INPUTS[0], torch.randn(5, 4, 3), WEIGHTS[0]], times=1)
    assert outcome.kinds["linear"] == 1
    assert "torch._C._nn.linear(l_other_, l_w_)" in outcome.after


def test_the_rest_of_several_tensors_are_put_together() -> None:
    def function(x: Any, y: Any, w: Any) -> Any:
        return torch.cat([F.linear(part, w) for source in (x, y) for part in source.unbind(0)])

    inputs = [torch.randn(3, 4, 3), torch.randn(2, 4, 3), WEIGHTS[0]]
    rewrites(batch_linear, function, inputs, times=1, left={"linear": 0, "bmm": 1})


def test_new_nodes_have_values_so_that_later_passes_go_on() -> None:
    outcome = rewrites(batch_linear, layers, [*INPUTS, *WEIGHTS], times=1)
    assert all("example_value" in node.meta for node in outcome.module.graph.nodes if node.op.startswith("call"))


def test_a_sum_that_grows_in_place_keeps_its_first_layer() -> None:
    """`out += layer(x)`: the first result is written, and autograd refuses that for one of several views."""

    def function(*operands: Any) -> Any:
        results = [F.linear(x, w) for x, w in zip(operands[:5], operands[5:], strict=True)]
        out = results[0]
        for result in results[1:]:
            out += result
        return out

    keeps(batch_linear, function, [*INPUTS, *WEIGHTS], because="may be written by")


def test_a_write_to_a_view_of_a_result() -> None:
    def function(*operands: Any) -> Any:
        results = [F.linear(x, w) for x, w in zip(operands[:5], operands[5:], strict=True)]
        results[4].view(-1)[0] = 0
        return torch.cat(results)

    keeps(batch_linear, function, [*INPUTS, *WEIGHTS], because="may be written by")


def test_some_with_a_bias_and_some_without() -> None:
    def function(*operands: Any) -> Any:
        inputs, weights, biases = operands[:5], operands[5:10], operands[10:]
        return torch.cat(
            [F.linear(x, w, b if i else None) for i, (x, w, b) in enumerate(zip(inputs, weights, biases, strict=True))]
        )

    keeps(batch_linear, function, [*INPUTS, *WEIGHTS, *BIASES])


def test_a_bias_however_it_is_given() -> None:
    def function(*operands: Any) -> Any:
        inputs, weights, biases = operands[:5], operands[5:10], operands[10:]
        rows = list(zip(inputs, weights, biases, strict=True))
        return torch.cat([F.linear(x, bias=b, weight=w) for x, w, b in rows[:2]] + [F.linear(*row) for row in rows[2:]])

    rewrites(batch_linear, function, [*INPUTS, *WEIGHTS, *BIASES], times=1, left={"baddbmm": 1})


def test_inputs_of_three_dimensions() -> None:
    keeps(batch_linear, layers, [*(torch.randn(2, 4, 3) for _ in range(5)), *WEIGHTS])


def test_other_sizes_of_weights() -> None:
    def function(*operands: Any) -> Any:
        return torch.cat([F.linear(x, w) for x, w in zip(operands[:5], operands[5:], strict=True)], 1)

    keeps(batch_linear, function, [*INPUTS, *WEIGHTS[:4], torch.randn(7, 3)])


def test_a_batch_that_varies_stays_and_nothing_fails() -> None:
    keeps(batch_linear, layers, [*INPUTS, *WEIGHTS], dynamic=True, because="sizes that vary")


def test_inputs_of_another_dtype_than_the_weights_stay() -> None:
    def function(*operands: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return layers(*operands)

    keeps(batch_linear, function, [*(x.bfloat16() for x in INPUTS), *WEIGHTS], because="is bf16 and")


def test_layers_that_feed_each_other() -> None:
    def function(x: Any, *weights: Any) -> Any:
        results = [x]
        for weight in weights:
            results.append(F.linear(results[-1], weight))
        return torch.cat(results)

    keeps(batch_linear, function, [INPUTS[0], *(torch.randn(3, 3) for _ in range(5))])


def test_a_weight_that_is_written_between_the_layers() -> None:
    def function(x: Any, w: Any) -> Any:
        results = []
        for _ in range(5):
            results.append(F.linear(x, w))
            w.mul_(2)
        return torch.cat(results)

    keeps(batch_linear, function, [INPUTS[0], WEIGHTS[0]], because="may be written by")


@pytest.mark.parametrize("batch", [batch_linear, batch_linear_lhs])
def test_a_set_that_reads_another_one(batch: Any) -> None:
    """The first set is read further down than the second one is made."""

    def function(x: Any, v: Any, w: Any, a: Any, b: Any) -> Any:
        first, second = F.linear(x, v), F.linear(x, w)
        third, fourth = F.linear(second, v, b), F.linear(second, w, a)
        return third, torch.stack([first, second]), fourth

    def run(graph: Any) -> int:
        return batch(graph, least=2)

    run.__name__ = batch.__name__
    inputs = [torch.randn(3, 3), torch.randn(3, 3), torch.randn(3, 3), torch.randn(3), torch.randn(3)]
    rewrites(run, function, inputs, times=2, left={"stack": 1 + 5 * (batch is batch_linear)})


def test_a_layer_that_no_result_comes_from_stays_out() -> None:
    """Its weights get no gradient; one product for all would give them zeros."""

    def function(x: Any, v: Any, w: Any) -> Any:
        kept, lost = F.linear(x, v), F.linear(x, w)
        F.relu(F.linear(lost, w), True)
        return kept

    inputs = [torch.randn(3, 3, requires_grad=True) for _ in range(3)]
    keeps(batch_linear_lhs, function, inputs)
