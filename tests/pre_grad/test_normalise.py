"""PRE-03 and PRE-04: one name for every keyword, one form for every op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule

from ferrite.graph.arguments import NUMPY_NAMES
from ferrite.graph.pre_grad.normalise_keywords import normalise_keywords
from ferrite.graph.pre_grad.normalise_ops import normalise_ops
from ferrite.graph.text import show_graph
from tests.pre_grad.harness import Captured, capture, keeps, rewrites, run_passes

X, Y = torch.randn(2, 8), torch.randn(2, 8)


class TestKeywords:
    def test_six_calls_leave_no_name_of_numpy_behind(self) -> None:
        def function(x: Any, y: Any) -> Any:
            a = torch.stack([x, y], axis=1)
            b = torch.sum(x, axis=1, keepdims=True)
            c = torch.tanh(x=x)
            d = torch.sin(a=x)
            e = torch.add(x1=x, x2=y)
            f = y.amax(axis=1, keepdims=True)
            return a, b, c, d, e, f

        outcome = rewrites(normalise_keywords, function, [X, Y], times=6, exact=True)
        written = {name for node in outcome.module.graph.nodes for name in node.kwargs}
        assert written == {"dim", "keepdim", "input", "other"}

    def test_methods_too(self) -> None:
        outcome = rewrites(normalise_keywords, lambda x: x.sum(axis=1).cumsum(axis=0), [X], times=2, exact=True)
        assert "axis" not in outcome.after

    def test_cat_then_relu(self) -> None:
        rewrites(normalise_keywords, lambda x, y: torch.cat([x, y], axis=1).relu(), [X, Y], times=1, exact=True)

    def test_names_that_are_right_stay(self) -> None:
        keeps(normalise_keywords, lambda x, y: torch.cat([x, y], dim=1).sum(dim=0, keepdim=True), [X, Y])

    @pytest.mark.parametrize("kwargs", [{"dim": 1, "axis": 1}, {"banana": 1}, {"axis": 1, "banana": 2}])
    def test_calls_that_raise_still_raise(self, kwargs: dict[str, Any]) -> None:
        graph = Graph()
        x = graph.placeholder("x")
        graph.output(graph.call_function(torch.sum, (x,), kwargs))
        module = GraphModule(torch.nn.Module(), graph)
        before = show_graph(graph)
        assert normalise_keywords(graph) == 0
        assert show_graph(graph) == before
        with pytest.raises(TypeError):
            module(X)

    def test_aten_overloads_are_left_alone(self) -> None:
        graph = Graph()
        x = graph.placeholder("x")
        node = graph.call_function(torch.ops.aten.sum.dim_IntList, (x,), {"dim": [1], "axis": 1})
        graph.output(node)
        assert normalise_keywords(graph) == 0
        assert "axis" in node.kwargs

    def test_a_parameter_that_is_called_so_keeps_its_name(self) -> None:
        """`torch.where` has a parameter named as NumPy names others: nothing is renamed that torch itself knows."""

        def function(x: Any) -> Any:
            return torch.nn.functional.pad(x, (1, 1)), torch.logit(x)

        keeps(normalise_keywords, function, [X.sigmoid()])
        assert set(NUMPY_NAMES) == {"axis", "keepdims", "x", "a", "x1", "x2"}


SPELLINGS: dict[str, list[Callable[..., Any]]] = {
    "split": [
        lambda x, y: x.split(3, -1),
        lambda x, y: x.split(3, 1),
        lambda x, y: x.split(3, dim=-1),
        lambda x, y: x.split([3, 3, 2], 1),
        lambda x, y: x.split((3, 3, 2), dim=-1),
        lambda x, y: x.split(split_size=3, dim=1),
        lambda x, y: torch.split(x, 3, -1),
        lambda x, y: torch.split(x, 3, dim=1),
        lambda x, y: torch.split(tensor=x, split_size_or_sections=[3, 3, 2], dim=-1),
        lambda x, y: torch.split(x, split_size_or_sections=3, dim=1),
        lambda x, y: x.split_with_sizes([3, 3, 2], -1),
        lambda x, y: torch.split_with_sizes(x, [3, 3, 2], dim=1),
        lambda x, y: x.chunk(3, -1),
        lambda x, y: torch.chunk(x, 3, dim=1),
        lambda x, y: torch.chunk(input=x, chunks=3, dim=-1),
        lambda x, y: [part + 1 for part in x.tensor_split((3, 6), 1)],
    ],
    "unbind": [
        lambda x, y: x.unbind(-2),
        lambda x, y: x.unbind(0),
        lambda x, y: torch.unbind(x),
        lambda x, y: torch.unbind(x, 0),
        lambda x, y: torch.unbind(x, dim=-2),
        lambda x, y: torch.unbind(input=x),
    ],
    "cat": [
        lambda x, y: torch.cat([x, y], 1),
        lambda x, y: torch.cat((x, y), -1),
        lambda x, y: torch.cat(tensors=[x, y], dim=-1),
        lambda x, y: torch.concat([x, y], dim=1),
        lambda x, y: torch.concatenate([x, y], axis=1),
    ],
    "stack": [
        lambda x, y: torch.stack([x, y]),
        lambda x, y: torch.stack((x, y), -3),
        lambda x, y: torch.stack(tensors=[x, y], dim=0),
    ],
    "squeeze": [
        lambda x, y: x[:1].squeeze(0),
        lambda x, y: x[:1].squeeze(dim=-2),
        lambda x, y: torch.squeeze(x[:1], 0),
        lambda x, y: torch.squeeze(input=x[:1], dim=0),
    ],
    "reshape": [
        lambda x, y: x.reshape(4, -1),
        lambda x, y: x.reshape((4, 4)),
        lambda x, y: x.reshape([-1, 4]),
        lambda x, y: torch.reshape(x, (4, 4)),
        lambda x, y: torch.reshape(input=x, shape=(4, -1)),
    ],
    "clamp": [
        lambda x, y: x.clamp(0, 1),
        lambda x, y: x.clamp(min=0, max=1),
        lambda x, y: x.clip(0, max=1),
        lambda x, y: torch.clamp(x, 0, 1),
    ],
    "detach": [lambda x, y: x.detach() + 1, lambda x, y: torch.detach(x) + 1],
}  # fmt: skip


class TestForms:
    @pytest.mark.parametrize("name", SPELLINGS)
    def test_spellings_converge(self, name: str) -> None:
        """Every spelling becomes the same node, and a second run changes nothing."""
        found = set()
        for function in SPELLINGS[name]:
            captured = capture(function, [X, Y])
            outcome = run_passes(captured, normalise_ops, exact=True)
            keeps(normalise_ops, Captured(outcome.module, captured.inputs))
            (node,) = (node for node in outcome.module.graph.nodes if getattr(node.target, "__name__", "") == name)
            found.add(node.format_node().partition(":")[2].replace("l_x_", "x"))
        shown = {text[text.index("call_function") :] for text in found}
        assert len(shown) == 1, shown

    def test_at_least_fifteen_spellings_are_tried(self) -> None:
        assert sum(len(functions) for functions in SPELLINGS.values()) >= 15

    def test_the_canonical_split_is_left_alone(self) -> None:
        keeps(normalise_ops, lambda x: torch.split(x, [3, 3, 2], dim=1), [X])

    def test_seventeen_splits(self) -> None:
        x = torch.randn(2, 32)
        function = lambda x: [part.split(1, 1) for part in x.split(2, 1)]
        rewrites(normalise_ops, function, [x], times=17, left={"split": 17}, exact=True)

    @pytest.mark.parametrize("where", [0, 1])
    def test_parts_of_a_tensor_split_that_are_written_stay(self, where: int) -> None:
        """Autograd lets nobody write a part of a split, or what was split, and go on reading parts."""

        def function(x: Any) -> Any:
            whole = x * 1
            parts = whole.tensor_split(2, 1)
            (parts[0], whole)[where].mul_(2)
            return parts[1] + 1, whole * 1

        keeps(normalise_ops, function, [X], because="may be written by")

    def test_parts_of_a_tensor_split_that_are_returned_stay(self) -> None:
        """Whoever gets them may write them."""
        keeps(normalise_ops, lambda x: x.tensor_split(2, 1), [X], because="is returned")

    @pytest.mark.parametrize(
        "function",
        [
            lambda v: (v.unsqueeze_(0), torch.stack([v, v], -1))[1],
            lambda v: (torch.stack([v, v], -1), v.unsqueeze_(0))[0],
            lambda v: (v.squeeze(-1), v.unsqueeze_(-1))[0],
            lambda v: torch.stack([v]).squeeze_(0),
            lambda v: v.reshape(-1).unsqueeze_(0),
        ],
    )
    def test_what_is_given_other_sizes_in_place_stays(self, function: Any) -> None:
        """Fake values tell the sizes in the end, which are not those at the call."""
        keeps(normalise_ops, lambda x: function(x + 1), [X], because="is given other sizes")

    def test_a_split_of_what_is_given_other_sizes_in_place_stays(self) -> None:
        def function(x: Any) -> Any:
            v = x + 1
            parts = v.split(2, -1)
            v.unsqueeze_(0)
            return [part + 1 for part in parts], v

        keeps(normalise_ops, function, [X])

    def test_sizes_that_vary_stay(self) -> None:
        keeps(normalise_ops, lambda x: (x.reshape(-1, 2), x.split(2, 0)[0]), [torch.randn(6, 4)], dynamic=True)

    def test_static_dimension_of_a_tensor_that_varies(self) -> None:
        x = torch.randn(6, 4)
        torch._dynamo.mark_dynamic(x, 0)
        outcome = rewrites(normalise_ops, lambda x: x.split(2, -1), [x], times=1, dynamic=None)
        assert "[2, 2], dim=1" in outcome.after

    def test_legacy_empty_tensor(self) -> None:
        outcome = rewrites(normalise_ops, lambda x, e: torch.cat([e, x], -1), [X, torch.empty(0)], times=1, exact=True)
        assert "dim=1" in outcome.after

    def test_cat_over_split_with_negative_dimension(self) -> None:
        rewrites(normalise_ops, lambda x: torch.cat(x.split(4, -1), dim=-1), [X], times=2, exact=True)

    @pytest.mark.parametrize("sections", [[3, 3], [3, 3, 3], [-1, 9], []])
    def test_sections_that_do_not_add_up_still_raise(self, sections: list[int]) -> None:
        captured = capture(lambda x: x.split([4, 4], 1), [X])
        (node,) = (node for node in captured.module.graph.nodes if node.target == "split")
        node.args = (node.args[0], sections, 1)
        node.meta["example_value"] = tuple(X[:, :size] if size >= 0 else X for size in sections)
        before = show_graph(captured.module.graph)
        assert normalise_ops(captured.module.graph) == 0
        assert show_graph(captured.module.graph) == before
        captured.module.recompile()
        with pytest.raises(RuntimeError):
            captured.module(X)

    def test_zero_and_none_are_not_swallowed(self) -> None:
        outcome = rewrites(normalise_ops, lambda x: x.clamp(None, 0), [X], times=1, exact=True)
        assert "max=0" in outcome.after
        assert "min" not in outcome.after

    def test_a_call_without_a_value_stays(self) -> None:
        captured = capture(lambda x: x.split(4, 1), [X])
        for node in captured.module.graph.nodes:
            node.meta.pop("example_value", None)
        assert normalise_ops(captured.module.graph) == 0

    def test_aten_stays(self) -> None:
        keeps(normalise_ops, lambda x: torch.ops.aten.split.Tensor(x, 4, 1), [X])

    def test_out_is_kept(self) -> None:
        def function(x: Any, y: Any) -> Any:
            out = torch.empty(2, 16)
            torch.cat([x, y], -1, out=out)
            return out + 1

        outcome = rewrites(normalise_ops, function, [X, Y], times=1, exact=True)
        assert "dim=1, out=out" in outcome.after


def test_both_are_idempotent_together() -> None:
    captured = capture(lambda x, y: torch.cat([x, y], axis=-1).split(4, -1), [X, Y])
    outcome = rewrites([normalise_keywords, normalise_ops], captured, times=3)
    keeps([normalise_keywords, normalise_ops], Captured(outcome.module, captured.inputs))
