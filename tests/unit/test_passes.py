"""The pass runner: order, numbers, limits, checks, and what happens when a pass fails."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.fx import Graph, GraphModule

from ferrite.errors import Malformed
from ferrite.graph.snapshot import changed_nodes, restore, take
from ferrite.graph.text import parse_graph, show_graph
from ferrite.options import Options
from ferrite.passes import applications, edit, reset_applications, rewrite
from ferrite.report.record import GraphRecord

aten = torch.ops.aten

TEXT = """def graph(x: f32[4]):
    sin = aten.sin.default(x)
    cos = aten.cos.default(sin)
    return (cos,)
"""


def sin_to_exp(graph: Graph) -> int:
    nodes = graph.find_nodes(op="call_function", target=aten.sin.default)
    for node in nodes:
        node.target = aten.exp.default
    return len(nodes)


def cos_to_tanh(graph: Graph) -> int:
    nodes = graph.find_nodes(op="call_function", target=aten.cos.default)
    for node in nodes:
        node.target = aten.tanh.default
    return len(nodes)


def half_then_fail(graph: Graph) -> int:
    sin_to_exp(graph)
    raise ValueError("gave up")


def break_order(graph: Graph) -> int:
    sin, cos = (node for node in graph.nodes if node.op == "call_function")
    cos.append(sin)
    return 1


@pytest.fixture(autouse=True)
def _count_from_zero():
    reset_applications()


def run(passes: list, **settings: object) -> tuple[str, GraphRecord]:
    module, record = parse_graph(TEXT), GraphRecord("test", "inference")
    edit(module, "stage", passes, Options(**settings), record)  # type: ignore[arg-type]
    return show_graph(module.graph), record


def targets(text: str) -> list[str]:
    return [line.split(".")[1] for line in text.splitlines() if "aten" in line]


def test_passes_run_in_order_and_are_numbered() -> None:
    text, record = run([sin_to_exp, cos_to_tanh])
    assert targets(text) == ["exp", "tanh"]
    assert [(entry.name, entry.number, entry.changed) for entry in record.passes] == [
        ("sin_to_exp", 1, 1),
        ("cos_to_tanh", 2, 1),
    ]
    assert applications() == 2


@pytest.mark.parametrize("word", ["sin_to_exp", "stage.sin_to_exp"])
def test_disabled_pass_is_left_out(word: str) -> None:
    text, record = run([sin_to_exp, cos_to_tanh], disable=(word,))
    assert targets(text) == ["sin", "tanh"]
    assert record.passes[0].changed is None
    assert word in record.passes[0].note


def test_disabled_stage_is_left_out() -> None:
    text, _ = run([sin_to_exp, cos_to_tanh], disable=("stage",))
    assert targets(text) == ["sin", "cos"]


@pytest.mark.parametrize(("limit", "expected"), [(0, ["sin", "cos"]), (1, ["exp", "cos"]), (2, ["exp", "tanh"])])
def test_bisect_limit_counts_applications(limit: int, expected: list[str]) -> None:
    text, _ = run([sin_to_exp, cos_to_tanh], bisect_limit=limit)
    assert targets(text) == expected


def test_texts_are_kept_on_request() -> None:
    _, record = run([sin_to_exp], keep_text=True)
    assert record.passes[0].before == TEXT
    assert record.passes[0].after == TEXT.replace("aten.sin", "aten.exp")
    _, record = run([sin_to_exp])
    assert record.passes[0].before is None


def test_failing_pass_is_named_undone_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        text, record = run([half_then_fail, cos_to_tanh])
    assert targets(text) == ["sin", "tanh"]
    assert "stage.half_then_fail" in caplog.text
    assert "gave up" in record.passes[0].note
    assert len(caplog.records) == 1


def test_failing_pass_raises_under_strict() -> None:
    with pytest.raises(Malformed, match=r"pass stage\.half_then_fail failed on graph main: ValueError: gave up"):
        run([half_then_fail], strict=True)


def test_broken_graph_is_caught_and_names_the_pass() -> None:
    with pytest.raises(Malformed, match=r"cos reads sin, which is not defined before it") as caught:
        run([break_order], strict=True)
    assert caught.value.where == "stage.break_order"
    text, _ = run([break_order, cos_to_tanh])
    assert targets(text) == ["sin", "tanh"]


def test_children_come_before_parents_and_only_referenced_ones() -> None:
    def child(name: str) -> GraphModule:
        return parse_graph(TEXT.replace("sin", name))

    parent = parse_graph(TEXT)
    parent.add_submodule("used", child("exp"))
    parent.add_submodule("unused", child("log"))
    with parent.graph.inserting_before(parent.graph.output_node()):
        reference = parent.graph.get_attr("used")
        again = parent.graph.get_attr("used")
    assert reference is not again
    seen: list[str] = []

    def probe(graph: Graph) -> int:
        seen.append(targets(show_graph(graph))[0])
        return 0

    edit(parent, "stage", [probe], Options(), GraphRecord("test", "inference"))
    assert seen == ["exp", "sin"]


def test_rewrite_keeps_the_program_of_a_failing_pass() -> None:
    def add_one(program: int) -> int:
        return program + 1

    def fail(program: int) -> int:
        raise KeyError("no")

    record = GraphRecord("test", "inference")
    assert rewrite(1, "loops", [add_one, fail, add_one], Options(), record) == 3
    assert [entry.changed for entry in record.passes] == [1, None, 1]
    with pytest.raises(Malformed, match=r"loops\.fail"):
        rewrite(1, "loops", [fail], Options(strict=True), record)


def test_snapshot_restores_names_metadata_and_order() -> None:
    module = parse_graph(TEXT)
    snapshot = take(module.graph)
    values = [node.meta.get("val") for node in module.graph.nodes]
    assert changed_nodes(module.graph, snapshot) == set()
    sin_to_exp(module.graph)
    assert {node.name for node in changed_nodes(module.graph, snapshot)} == {"sin"}
    module.graph.erase_node(module.graph.output_node())
    restore(module, snapshot)
    assert show_graph(module.graph) == TEXT
    assert [node.meta.get("val") for node in module.graph.nodes] == values
    assert torch.equal(module(torch.ones(4))[0], torch.ones(4).sin().cos())
