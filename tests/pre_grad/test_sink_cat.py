"""PRE-05: a pointwise op of a cat is a cat of pointwise ops, where nobody can tell the difference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from ferrite.graph.arguments import find
from ferrite.graph.pre_grad.sink_cat import sink_cat
from ferrite.graph.text import show_graph
from tests.pre_grad.harness import capture, keeps, rewrites

torch.manual_seed(0)
A, B = torch.randn(2, 3), torch.randn(2, 5)
C = torch.randn(4, 3)
aten = torch.ops.aten


def test_two_operands_give_two_ops_and_one_cat() -> None:
    outcome = rewrites(
        sink_cat,
        lambda a, b: torch.cat([a, b], 1).view(-1).tanh(),
        [A, B],
        times=1,
        left={"tanh": 2, "cat": 1, "view": 1},
        exact=True,
    )
    assert [node.name for node in outcome.module.graph.nodes if node.op.startswith("call")][-1].startswith("view")


SPELLINGS: list[Callable[..., Any]] = [
    lambda a, c: torch.cat([a, c]).tanh(),  # the peer's #98850: no dim
    lambda a, c: torch.tanh(torch.cat(tensors=[a, c], dim=0)),  # #97019
    lambda a, c: F.tanh(torch.cat((a, c), axis=0)),  # #171979
    lambda a, c: torch.tanh(input=torch.concat([a, c], -2)),
    lambda a, c: torch.cat([a, c], 0).relu(),
    lambda a, c: torch.relu(torch.concatenate([a, c], dim=0)),
    lambda a, c: F.relu(torch.cat([a, c], dim=-2), inplace=False),
    lambda a, c: aten.tanh.default(aten.cat.default([a, c])),
]


@pytest.mark.parametrize("function", SPELLINGS)
def test_spellings(function: Callable[..., Any]) -> None:
    outcome = rewrites(sink_cat, function, [A, C], times=1, left={"cat": 1}, exact=True)
    assert outcome.kinds["tanh"] + outcome.kinds["relu"] == 2


def test_several_views_are_made_again() -> None:
    rewrites(
        sink_cat,
        lambda a, b: torch.cat([a, b], 1).view(4, -1).reshape(2, 2, 4).flatten(1).relu(),
        [A, B],
        times=1,
        left={"relu": 2, "view": 1, "reshape": 1, "flatten": 1},
        exact=True,
    )


def test_one_op_sinks_after_the_other() -> None:
    rewrites(
        sink_cat,
        lambda a, b: torch.cat([a, b], 1).tanh().relu(),
        [A, B],
        times=2,
        left={"tanh": 2, "relu": 2, "cat": 1},
    )


def test_an_operand_that_stands_twice_is_computed_once() -> None:
    rewrites(sink_cat, lambda a, b: torch.cat([a, b, a], 1).tanh(), [A, B], times=1, left={"tanh": 2, "cat": 1})


def test_sizes_may_vary() -> None:
    rewrites(sink_cat, lambda a, b: torch.cat([a, b], 1).view(-1).tanh(), [A, B], times=1, dynamic=True)


def test_integers_become_floats_as_in_eager() -> None:
    rewrites(sink_cat, lambda a, b: torch.cat([a, b]).tanh(), [C.long(), A.long()], times=1, left={"tanh": 2})


def test_halves_are_equal_bit_by_bit() -> None:
    rewrites(sink_cat, lambda a, b: torch.cat([a, b]).tanh(), [C.bfloat16(), A.bfloat16()], times=1, exact=True)


class TestMustNotFire:
    def test_second_user_of_the_cat(self) -> None:
        def function(a: Any, b: Any) -> Any:
            whole = torch.cat([a, b], 1)
            return whole.tanh(), whole.sum()

        keeps(sink_cat, function, [A, B], because="whole has 2 users")

    def test_the_cat_is_returned(self) -> None:
        def function(a: Any, b: Any) -> Any:
            whole = torch.cat([a, b], 1)
            return whole.tanh(), whole

        keeps(sink_cat, function, [A, B], because="whole has 2 users")

    def test_second_user_of_a_view(self) -> None:
        def function(a: Any, b: Any) -> Any:
            flat = torch.cat([a, b], 1).view(-1)
            return flat.tanh(), flat.sum()

        keeps(sink_cat, function, [A, B], because="flat has 2 users")

    def test_mixed_dtypes(self) -> None:
        """The peer computes the narrow operand in f16 and gives other numbers."""
        keeps(
            sink_cat,
            lambda a, b: torch.cat([a, b], 1).tanh(),
            [A, B.half()],
            because="l_a_ is f32 and l_b_ f16",
        )

    def test_truth_values_beside_floats(self) -> None:
        """The peer raises: relu of truth values."""
        keeps(sink_cat, lambda a, b: torch.cat([a, b], 1).relu(), [A, B > 0], because="l_a_ is f32 and l_b_ b8")

    def test_truth_values_alone(self) -> None:
        keeps(sink_cat, lambda a, b: torch.cat([a, b], 1).tanh(), [A > 0, B > 0], because="holds truth values")

    def test_out_of_the_op(self) -> None:
        """The peer drops it, and `o` keeps a wrong shape."""

        def function(a: Any, b: Any, o: Any) -> Any:
            torch.tanh(torch.cat([a, b], 1), out=o)
            return o.sum()

        keeps(sink_cat, function, [A, B, torch.zeros(2, 8)])

    def test_out_of_the_cat(self) -> None:
        def function(a: Any, b: Any, o: Any) -> Any:
            return torch.cat([a, b], 1, out=o).tanh()

        keeps(sink_cat, function, [A, B, torch.zeros(2, 8)])

    def test_op_in_place(self) -> None:
        keeps(sink_cat, lambda a, b: F.relu(torch.cat([a, b], 1), inplace=True), [A, B])
        keeps(sink_cat, lambda a, b: torch.cat([a, b], 1).tanh_(), [A, B])

    @pytest.mark.parametrize("arguments", [{"dim": None}, {"dim": 2}, {"dim": True}, {"axis": 1, "dim": 1}])
    def test_a_dim_that_is_none(self, arguments: dict[str, Any]) -> None:
        module = capture(lambda a, b: torch.cat([a, b], dim=1).tanh(), [A, B]).module
        (cat,) = find(module.graph, "cat")
        cat.kwargs = arguments
        before = show_graph(module.graph)
        assert sink_cat(module.graph) == 0
        assert show_graph(module.graph) == before

    def test_operands_that_are_one_value(self) -> None:
        module = capture(lambda a: torch.cat(torch.split(a, 1), 0).tanh(), [A]).module
        (cat,), (split,) = find(module.graph, "cat"), find(module.graph, "split")
        cat.args = (split, 0)
        assert sink_cat(module.graph) == 0

    def test_a_view_as_another_dtype(self) -> None:
        keeps(sink_cat, lambda a, b: torch.cat([a, b], 1).view(torch.int32).relu(), [A, B])

    def test_other_ops(self) -> None:
        keeps(sink_cat, lambda a, b: torch.cat([a, b], 1).softmax(1), [A, B])
        keeps(sink_cat, lambda a, b: torch.stack([a, b], 1).tanh(), [A, A])

    def test_missing_fake_value(self) -> None:
        module = capture(lambda a, b: torch.cat([a.sin(), b], dim=1).tanh(), [A, B]).module
        (sine,) = find(module.graph, "sin")
        del sine.meta["example_value"]
        assert sink_cat(module.graph) == 0

    def test_operand_written_after_the_cat(self) -> None:
        def function(a: Any, b: Any) -> Any:
            whole = torch.cat([a, b], 1)
            a.add_(1)
            return whole.tanh()

        keeps(sink_cat, function, [A, B], because="l_a_ may be written by add_ between whole and tanh")

    def test_the_cat_is_written(self) -> None:
        def function(a: Any, b: Any) -> Any:
            whole = torch.cat([a, b], 1)
            whole[0] = 1
            return whole.tanh()

        keeps(sink_cat, function, [A, B], because="has 2 users")

    def test_result_that_is_written(self) -> None:
        def function(a: Any, b: Any) -> Any:
            result = torch.cat([a, b], 1).view(-1).tanh()
            result.add_(1)
            return result * 2

        keeps(sink_cat, function, [A, B], because="would be a view of cat")

    def test_not_across_modes(self) -> None:
        def function(a: Any, b: Any) -> Any:
            with torch.no_grad():
                whole = torch.cat([a, b], 1)
            return whole.tanh()

        keeps(sink_cat, function, [A.clone().requires_grad_(), B], because="different modes")

    def test_a_view_that_depends_on_strides_of_dimensions_with_one_element(self) -> None:
        """tanh lays out a part that is cut from a larger tensor in a way that fake values do not tell."""

        def function(x: Any) -> Any:
            part = x.chunk(3, 2)[2]
            return torch.tanh(torch.cat([part, part.split(1, -1)[0]], -1).view(-1)) + 1

        keeps(sink_cat, function, [torch.randn(1, 2, 3, 1)], because="strides that are not sure")
