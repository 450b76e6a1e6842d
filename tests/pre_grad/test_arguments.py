"""One call, however it is spelled: the same kind and the same arguments."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule, Node
from torch.nn import functional as F

from ferrite.graph.arguments import bind, find, is_int, is_ints, kind, nodes_in, positive_dim


@pytest.fixture
def graph() -> Graph:
    return Graph()


def call(graph: Graph, target: Any, *args: Any, **kwargs: Any) -> Node:
    op = "call_method" if isinstance(target, str) else "call_function"
    return graph.create_node(op, target, args, kwargs)


SAME: dict[str, list[Callable[[Callable[..., Node], Node, Node], Node]]] = {
    "tanh": [
        lambda c, x, y: c(torch.tanh, x),
        lambda c, x, y: c("tanh", x),
        lambda c, x, y: c(F.tanh, x),
        lambda c, x, y: c(torch.tanh, input=x),
        lambda c, x, y: c(torch.ops.aten.tanh.default, x),
        lambda c, x, y: c(torch.ops.aten.tanh, x),
    ],
    "cat": [
        lambda c, x, y: c(torch.cat, [x, y], 1),
        lambda c, x, y: c(torch.cat, [x, y], dim=1),
        lambda c, x, y: c(torch.cat, [x, y], axis=1),
        lambda c, x, y: c(torch.concat, tensors=[x, y], dim=1),
        lambda c, x, y: c(torch.concatenate, [x, y], axis=1),
        lambda c, x, y: c(torch.ops.aten.cat.default, [x, y], 1),
    ],
    "split": [
        lambda c, x, y: c("split", x, 3, 1),
        lambda c, x, y: c("split", x, 3, dim=1),
        lambda c, x, y: c("split", x, split_size=3, dim=1),
        lambda c, x, y: c(torch.split, x, 3, 1),
        lambda c, x, y: c(torch.split, tensor=x, split_size_or_sections=3, dim=1),
    ],
    "permute": [
        lambda c, x, y: c("permute", x, 1, 0),
        lambda c, x, y: c("permute", x, (1, 0)),
        lambda c, x, y: c("permute", x, [1, 0]),
        lambda c, x, y: c("permute", x, dims=(1, 0)),
        lambda c, x, y: c(torch.permute, x, (1, 0)),
    ],
    "sum": [
        lambda c, x, y: c("sum", x, 1, True),
        lambda c, x, y: c("sum", x, axis=1, keepdims=True),
        lambda c, x, y: c(torch.sum, x, dim=1, keepdim=True),
        lambda c, x, y: c(torch.sum, a=x, axis=1, keepdim=True),
    ],
    "add": [
        lambda c, x, y: c(operator.add, x, y),
        lambda c, x, y: c("add", x, y),
        lambda c, x, y: c(torch.add, x, y),
        lambda c, x, y: c(torch.add, x1=x, x2=y),
    ],
    "add_": [
        lambda c, x, y: c(operator.iadd, x, y),
        lambda c, x, y: c("add_", x, y),
    ],
    "linear": [
        lambda c, x, y: c(F.linear, x, y),
        lambda c, x, y: c(F.linear, x, weight=y, bias=None),
        lambda c, x, y: c(F.linear, input=x, weight=y),
        lambda c, x, y: c(torch.ops.aten.linear.default, x, y),
    ],
    "transpose": [
        lambda c, x, y: c("transpose", x, 0, 1),
        lambda c, x, y: c("swapaxes", x, 0, 1),
        lambda c, x, y: c(torch.swapdims, x, 0, 1),
        lambda c, x, y: c(torch.transpose, x, dim0=0, dim1=1),
    ],
    "clamp": [
        lambda c, x, y: c("clamp", x, 0, 1),
        lambda c, x, y: c(torch.clip, x, min=0, max=1),
        lambda c, x, y: c(torch.clamp, x, 0, max=1),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_spellings_of_one_call_are_one(name: str, graph: Graph) -> None:
    x, y = graph.placeholder("x"), graph.placeholder("y")
    bound = [bind(make(lambda *a, **k: call(graph, *a, **k), x, y)) for make in SAME[name]]
    shown = [
        {key: value for key, value in (entry.arguments if entry else {}).items() if value is not None}
        for entry in bound
    ]
    assert all(entry is not None and entry.kind == name for entry in bound), bound
    without_out = [{key: value for key, value in entry.items() if key != "dtype"} for entry in shown]
    assert without_out == [without_out[0]] * len(bound)


def test_defaults_are_filled_in_and_what_was_given_is_known(graph: Graph) -> None:
    x, w = graph.placeholder("x"), graph.placeholder("w")
    found = bind(call(graph, F.batch_norm, x, w, w, training=True))
    assert found is not None
    assert (found["eps"], found["momentum"], found["weight"], found["training"]) == (1e-5, 0.1, None, True)
    assert found.given == {"input", "running_mean", "running_var", "training"}
    by_position = bind(call(graph, torch.batch_norm, x, None, None, w, w, True, 0.1, 1e-5, False))
    assert by_position is not None
    assert (by_position["running_mean"], by_position["weight"], by_position["training"]) == (w, None, True)


def test_legitimate_zero_and_none_are_kept(graph: Graph) -> None:
    x = graph.placeholder("x")
    found = bind(call(graph, torch.clamp, x, None, 0))
    assert found is not None
    assert (found["min"], found["max"]) == (None, 0)
    assert bind(call(graph, torch.cat, [x], None))["dim"] is None  # type: ignore[index]


@pytest.mark.parametrize(
    ("target", "args", "kwargs"),
    [
        (torch.cat, (), {"dim": 1}),  # nothing to put together
        (torch.cat, ([],), {"dim": 1, "axis": 1}),  # eager raises
        (torch.tanh, ("x",), {"banana": 1}),
        (torch.tanh, ("x", 1, 2, 3), {}),
        ("view", ("x", torch.int32), {}),  # another op under the same name
        ("to", ("x", torch.int32, torch.int64), {}),
        ("to", ("x", "cpu", torch.device("cpu")), {}),
        (len, ("x",), {}),
        (max, ("x",), {}),
    ],
)
def test_what_does_not_fit_is_not_bound(graph: Graph, target: Any, args: Any, kwargs: Any) -> None:
    node = graph.placeholder("x")
    given = tuple(node if value == "x" else value for value in args)
    assert bind(call(graph, target, *given, **kwargs)) is None


def test_to_sorts_its_arguments_by_type(graph: Graph) -> None:
    x, y = graph.placeholder("x"), graph.placeholder("y")
    for arguments, expected in [
        ((torch.float16,), {"dtype": torch.float16}),
        (("cpu", torch.float16), {"device": "cpu", "dtype": torch.float16}),
        ((torch.float16, False, True), {"dtype": torch.float16, "copy": True}),
        ((y,), {"other": y}),
    ]:
        found = bind(call(graph, "to", x, *arguments))
        assert found is not None
        assert {name: found[name] for name in expected} == expected
    assert bind(call(graph, "to", x, copy=True, dtype=torch.int8))["copy"] is True  # type: ignore[index]


def test_attributes_and_modules_have_kinds() -> None:
    root = torch.nn.Module()
    root.skip = torch.nn.Identity()
    graph = Graph()
    x = graph.placeholder("x")
    turned = call(graph, getattr, x, "mT")
    skipped = graph.call_module("skip", (), {"input": turned})
    graph.output(skipped)
    GraphModule(root, graph)
    assert [kind(node) for node in graph.nodes] == [None, "mT", "nn.Identity", None]
    assert bind(skipped)["input"] is turned  # type: ignore[index]
    assert find(graph, "mT", "nn.Identity") == [turned, skipped]


def test_erased_node_has_no_kind(graph: Graph) -> None:
    node = call(graph, torch.tanh, graph.placeholder("x"))
    assert kind(node) == "tanh"
    graph.erase_node(node)
    assert kind(node) is None
    assert bind(node) is None


def test_functions_of_others_have_no_kind(graph: Graph) -> None:
    def tanh(x: Any) -> Any:
        return x

    assert kind(call(graph, tanh, graph.placeholder("x"))) is None


def test_small_questions() -> None:
    assert is_int(1, -2)
    assert not is_int(True)
    assert not is_int(1.0)
    assert is_ints([1, 2])
    assert not is_ints(3)
    assert [positive_dim(dim, 3) for dim in (0, -1, 3, -4, True, None)] == [0, 2, None, None, None, None]
    graph = Graph()
    x = graph.placeholder("x")
    assert list(nodes_in(([x, 1], {"a": slice(None, x)}))) == [x, x]
