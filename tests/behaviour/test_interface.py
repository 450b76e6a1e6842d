"""Calling the backend itself, on graphs that Dynamo did not make."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx

import ferrite.backend
from tests.behaviour.compare import STRICT, assert_same, equal


def run(graph: Any, *inputs: Any, expected: Any) -> None:
    function = ferrite.backend.compile(graph, list(inputs), options=STRICT)
    for _ in range(2):
        assert_same(function(*inputs), expected, "result")
    record = ferrite.last_record()
    assert record is not None
    assert record.failures == []


def leaves() -> tuple[Tensor, Tensor]:
    return torch.randn(3, 3), torch.randn(3, 3)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.register_buffer("shift", torch.randn(3))

    def forward(self, x: Tensor) -> Any:
        return self.linear(x).relu() + self.shift


def test_symbolic_trace_with_a_tensor_result() -> None:
    x, y = leaves()
    function = lambda x, y: torch.relu(x @ y).sum(0)
    run(symbolic_trace(function), x, y, expected=function(x, y))


def test_symbolic_trace_of_a_module_with_parameters() -> None:
    module, (x, _) = Model(), leaves()
    with torch.no_grad():
        run(symbolic_trace(module), x, expected=module(x))


def test_symbolic_trace_of_a_module_while_training() -> None:
    module, (x, _) = Model(), leaves()
    expected = torch.autograd.grad(module(x).sum(), list(module.parameters()))
    function = ferrite.backend.compile(symbolic_trace(module), [x], options=STRICT)
    function(x).sum().backward()
    for parameter, gradient in zip(module.parameters(), expected, strict=True):
        assert equal(parameter.grad, gradient)


def test_make_fx() -> None:
    x, y = leaves()
    function = lambda x, y: (x @ y + 1, x.sum())
    run(make_fx(function)(x, y), x, y, expected=function(x, y))


def test_make_fx_with_a_dict_result() -> None:
    x, y = leaves()
    function = lambda x, y: {"a": x + y, "b": [x, (y * 2,)]}
    run(make_fx(function)(x, y), x, y, expected=function(x, y))


def test_make_fx_with_a_dict_input() -> None:
    x, y = leaves()
    function = lambda tree: {"out": tree["a"] + tree["b"][0]}
    tree = {"a": x, "b": [y]}
    run(make_fx(function)(tree), tree, expected=function(tree))


def test_make_fx_with_a_list_input() -> None:
    x, y = leaves()
    function = lambda items: (items[0] @ items[1],)
    run(make_fx(function)([x, y]), [x, y], expected=function([x, y]))


@pytest.mark.parametrize("symbolic", [False, True])
def test_make_fx_symbolic(symbolic: bool) -> None:
    x, y = leaves()
    mode = "symbolic" if symbolic else "fake"
    graph = make_fx(lambda x, y: (x.view(-1) * y.reshape(-1),), tracing_mode=mode)(x, y)
    run(graph, x, y, expected=(x.view(-1) * y.reshape(-1),))


def test_hand_made_graph_with_one_op_that_has_several_results() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.ops.aten.sort.default, (x,)))
    value = torch.randn(5)
    run(GraphModule(torch.nn.Module(), graph), value, expected=tuple(torch.sort(value)))


def test_hand_made_graph_with_a_nested_result() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.ops.aten.sin.default, (x,))
    graph.output({"one": [y, x], "two": (y, 3, None)})
    value = torch.randn(3)
    run(
        GraphModule(torch.nn.Module(), graph),
        value,
        expected={"one": [value.sin(), value], "two": (value.sin(), 3, None)},
    )


def test_hand_made_graph_without_calls() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    graph.output((x, x))
    value = torch.randn(3)
    run(GraphModule(torch.nn.Module(), graph), value, expected=(value, value))


def test_unused_inputs_and_none_results() -> None:
    graph = Graph()
    x, _unused = graph.placeholder("x"), graph.placeholder("unused")
    graph.output((None, graph.call_function(torch.ops.aten.neg.default, (x,))))
    value = torch.randn(3)
    run(GraphModule(torch.nn.Module(), graph), value, torch.ones(1), expected=(None, -value))


class Structured(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)

    def forward(self, batch: dict[str, Any], scale: Tensor) -> dict[str, Any]:
        y = self.linear(batch["x"]) * scale
        return {"y": y, "both": [y + 1, batch["items"][0] * 2]}


def test_exported_module_with_dict_inputs_and_results() -> None:
    module = Structured()
    x, y = leaves()
    batch = {"x": x, "items": [y]}
    with torch.no_grad():
        program = torch.export.export(module, (batch, torch.tensor(2.0)))
        run(program.module(), batch, torch.tensor(2.0), expected=module(batch, torch.tensor(2.0)))


def test_exported_module_with_one_tensor() -> None:
    module, (x, _) = Model(), leaves()
    with torch.no_grad():
        run(torch.export.export(module, (x,)).module(), x, expected=module(x))


def test_exported_module_called_by_keyword() -> None:
    class Two(torch.nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a - b

    x, y = leaves()
    exported = torch.export.export(Two(), (x,), {"b": y}).module()
    function = ferrite.backend.compile(exported, [x, y], options=STRICT)
    assert equal(function(x, b=y), x - y)


def test_bare_module() -> None:
    module, (x, _) = Model(), leaves()
    with torch.no_grad():
        run(module, x, expected=module(x))


def test_bare_module_with_structures() -> None:
    module = Structured()
    x, y = leaves()
    batch = {"x": x, "items": [y]}
    with torch.no_grad():
        run(module, batch, torch.tensor(2.0), expected=module(batch, torch.tensor(2.0)))


def test_plain_function() -> None:
    x, y = leaves()
    run(lambda x, y: (x + y, [x * y]), x, y, expected=(x + y, [x * y]))


def test_a_result_that_is_no_tensor_is_refused_or_returned() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.ops.aten.sym_size.int, (x, 0)), x))
    value = torch.randn(4)
    run(GraphModule(torch.nn.Module(), graph), value, expected=(4, value))


def test_a_missing_attribute_is_named() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.ops.aten.add.Tensor, (x, graph.get_attr("inner.weight"))),))
    root = torch.nn.Module()
    root.inner = torch.nn.Module()
    root.inner.weight = torch.nn.Parameter(torch.ones(3))
    module = GraphModule(root, graph)
    del module.inner.weight
    with pytest.raises((RuntimeError, AttributeError), match="weight"):
        ferrite.backend.compile(module, [torch.ones(3)], options=STRICT)(torch.ones(3))


def test_same_storage_under_two_names_is_one_tensor() -> None:
    class Shared(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Parameter(torch.randn(3))
            self.b = self.a

        def forward(self, x: Tensor) -> Tensor:
            return x * self.a + self.b

    module, x = Shared(), torch.randn(3)
    with torch.no_grad():
        run(symbolic_trace(module), x, expected=module(x))


def test_fake_inputs_as_examples() -> None:
    """An ahead-of-time caller has sizes, not values."""
    x, y = leaves()
    graph = make_fx(lambda x, y: (x @ y,), tracing_mode="fake")(x, y)
    mode = torch._subclasses.FakeTensorMode()
    function = ferrite.backend.compile(graph, [mode.from_tensor(x), mode.from_tensor(y)], options=STRICT)
    assert equal(function(x, y)[0], x @ y)


# ---- what a graph takes beside tensors

NUMBERS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "int": (lambda x, n: x + n, (3, 4, True, 3.5)),
    "float": (lambda x, n: x * n, (0.5, -0.0, float("nan"), 2)),
    "bool": (lambda x, n: x.sum(0, keepdim=n), (True, False)),
    "size": (lambda x, n: x.reshape(n, -1), (1, 3, 9)),
    "string": (lambda x, n: torch.nn.functional.gelu(x, approximate=n), ("none", "tanh")),
    "nothing": (lambda x, n: x.clamp(n, 0.5), (None, 0.25)),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_arguments_that_are_no_tensors(name: str) -> None:
    """A trace makes constants of them: for others the graph is compiled again, and once only."""
    function, values = NUMBERS[name]
    x, _ = leaves()
    compiled = ferrite.backend.compile(symbolic_trace(function), [x, values[0]], options=STRICT)
    for _ in range(2):
        for value in values:
            assert_same(compiled(x, value), function(x, value), f"result for {value}")
    assert len(ferrite.backend.records()) == len(values)


def test_a_graph_is_compiled_for_so_many_numbers_and_runs_in_eager_for_more(caplog: pytest.LogCaptureFixture) -> None:
    x, _ = leaves()
    compiled = ferrite.backend.compile(symbolic_trace(lambda x, n: (x + n).sin()), [x, 0])
    for number in range(12):
        assert_same(compiled(x, number), (x + number).sin(), "result")
    assert len(ferrite.backend.records()) == 8
    assert sum("pass numbers that change as tensors" in record.message for record in caplog.records) == 1


def test_gradients_of_a_graph_that_was_compiled_without_them() -> None:
    x, _ = leaves()
    compiled = ferrite.backend.compile(symbolic_trace(lambda x: (x * x).sum()), [x], options=STRICT)
    leaf = x.clone().requires_grad_()
    compiled(leaf).backward()
    assert equal(leaf.grad, 2 * x)
    assert not compiled(x).requires_grad
    with torch.no_grad():
        assert not compiled(leaf).requires_grad


def test_the_graph_of_the_caller_stays_as_it_was() -> None:
    graph = symbolic_trace(lambda x: torch.cat([torch.cat([x, x]), x]).sum(0))
    before = str(graph.graph)
    x, _ = leaves()
    ferrite.backend.compile(graph, [x], options=STRICT)(x)
    assert str(graph.graph) == before


def test_a_generator() -> None:
    graph = Graph()
    x, generator = graph.placeholder("x"), graph.placeholder("generator")
    drawn = graph.call_function(torch.ops.aten.rand.generator, ([3, 3],), {"generator": generator})
    graph.output((graph.call_function(torch.add, (x, drawn)),))
    source, value = torch.Generator(), torch.ones(3, 3)
    compiled = ferrite.backend.compile(GraphModule(torch.nn.Module(), graph), [value, source], options=STRICT)
    first = compiled(value, source.manual_seed(3))[0]
    assert equal(first, value + torch.rand(3, 3, generator=torch.Generator().manual_seed(3)))


# ---- results whose structure the graph does not say


def only(target: Any, *arguments: Any) -> GraphModule:
    graph = Graph()
    graph.output(graph.call_function(target, (graph.placeholder("x"), *arguments)))
    return GraphModule(torch.nn.Module(), graph)


@pytest.mark.parametrize("target", [torch.ops.aten.split.Tensor, torch.split, torch.ops.aten.max.dim, torch.max])
def test_one_op_that_gives_as_many_as_it_finds(target: Any) -> None:
    x = torch.randn(5, 3)
    run(only(target, 2 if "split" in str(target) else 0), x, expected=tuple_or_list(target, x))


def tuple_or_list(target: Any, x: Tensor) -> Any:
    return target(x, 2 if "split" in str(target) else 0)


def test_a_slice_of_tensors() -> None:
    graph = Graph()
    x, n = graph.placeholder("x"), graph.placeholder("n")
    doubled = graph.call_function(torch.add, (n, n))
    graph.output((graph.call_function(torch.sin, (x,)), graph.call_function(slice, (n, doubled))))
    x, n = torch.randn(3), torch.tensor(1)
    result, found = ferrite.backend.compile(GraphModule(torch.nn.Module(), graph), [x, n], options=STRICT)(x, n)
    assert equal(result, x.sin())
    assert type(found.start) is Tensor
    assert (int(found.start), int(found.stop), found.step) == (1, 2, None)
    assert torch.arange(4)[found].tolist() == [1]


# ---- modules


def test_an_exported_module_with_sizes_that_change() -> None:
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).relu() * x.shape[0]

    module = Scaled()
    rows = {0: torch.export.Dim("rows")}
    exported = torch.export.export(module, (torch.randn(4, 3),), dynamic_shapes=(rows,)).module()
    with torch.no_grad():
        compiled = ferrite.backend.compile(exported, [torch.randn(4, 3)], options=STRICT)
        for count in (4, 7, 2):
            x = torch.randn(count, 3)
            assert equal(compiled(x), module(x))
    assert len(ferrite.backend.records()) == 1


def test_nothing_is_logged_of_modules_without_a_graph(caplog: pytest.LogCaptureFixture, tmp_path: Any) -> None:
    x, y = leaves()
    options = {**STRICT, "cache_dir": str(tmp_path), "cache": "on"}
    ferrite.backend.compile(Model(), [x], options=options)(x)
    function = lambda given: given["x"] + given["y"]
    traced = make_fx(function)({"x": x, "y": y})
    assert_same(ferrite.backend.compile(traced, [{"x": x, "y": y}], options=options)({"x": x, "y": y}), x + y, "sum")
    assert [record.message for record in caplog.records if record.name.startswith("ferrite")] == []
