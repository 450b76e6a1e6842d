"""Bisection names what breaks a result: a pass, a lowering, a kernel, the native host, or an option."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.fx import Graph, Node

import ferrite
from ferrite import backend, pipeline
from ferrite.artifact.compiled import CompiledGraph
from ferrite.graph import decompose
from ferrite.graph.arguments import bind, find
from ferrite.graph.ledger import ledger_of
from ferrite.graph.soundness import Soundness
from ferrite.loops.nodes import Program
from ferrite.loops.text import parse_program, show
from ferrite.lower import graph as lowering
from ferrite.native import emit as emission

aten = torch.ops.aten


def harmless(graph: Graph) -> int:
    return 0


def sin_becomes_cos(graph: Graph) -> int:
    nodes = graph.find_nodes(op="call_function", target=aten.sin.default)
    for node in nodes:
        node.target = aten.cos.default
    return len(nodes)


def function(x: torch.Tensor) -> torch.Tensor:
    y = x.exp()
    torch._dynamo.graph_break()
    return y.sin() * 2


LINE = f"test_bisection.py:{function.__code__.co_firstlineno + 3}"  # its last


@pytest.mark.parametrize("position", [0, 1, 2])
def test_wrong_pass_is_named(position: int, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = [harmless, harmless]
    passes.insert(position, sin_becomes_cos)
    monkeypatch.setattr(pipeline, "POST_GRAD", tuple(passes))
    verdict = ferrite.bisect(function, [torch.randn(5)])
    assert not verdict.equal
    assert verdict.culprit.name == "sin_becomes_cos"
    assert "post_grad.sin_becomes_cos on graph main" in str(verdict)


def test_wrong_gradient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def cos_becomes_sin(graph: Graph) -> int:
        nodes = graph.find_nodes(op="call_function", target=aten.cos.default)
        for node in nodes:
            node.target = aten.sin.default
        return len(nodes)

    monkeypatch.setattr(pipeline, "POST_GRAD", (harmless, cos_becomes_sin))
    verdict = ferrite.bisect(lambda x: x.sin() * 2, [torch.randn(5, requires_grad=True)])
    assert verdict.culprit.name == "cos_becomes_sin"


def test_nothing_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = ferrite.bisect(function, [torch.randn(5)])
    assert verdict.equal
    assert verdict.culprit is None


def wrong_row(monkeypatch: pytest.MonkeyPatch, op: object, other: object) -> None:
    """Lower one op as another one."""
    real = lowering._row_of
    monkeypatch.setattr(lowering, "_row_of", lambda target: real(other if target is op else target))


def test_a_wrong_lowering_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the second graph, and behind calls that are lowered rightly."""
    wrong_row(monkeypatch, aten.sin.default, aten.cos.default)
    verdict = ferrite.bisect(function, [torch.randn(5)])
    assert not verdict.equal
    assert verdict.culprit is None
    assert verdict.lowering == f"aten.sin.default at {LINE}  return y.sin() * 2"
    assert f"the lowering of aten.sin.default at {LINE}" in str(verdict)
    assert {"executor": "eager"} in verdict.cures


def test_a_wrong_lowering_in_backward_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong_row(monkeypatch, aten.cos.default, aten.sin.default)
    verdict = ferrite.bisect(lambda x: x.exp().sin() * 2, [torch.randn(5, requires_grad=True)])
    assert verdict.lowering.startswith("aten.cos.default")


def test_a_lowering_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a failure is raised: by default eager takes the graph, and nothing differs."""
    real = lowering._row_of

    def fails(target: object) -> object:
        if target is aten.sin.default:
            raise IndexError("boom")
        return real(target)

    monkeypatch.setattr(lowering, "_row_of", fails)
    verdict = ferrite.bisect(function, [torch.randn(5)], options={"strict": True})
    assert "op aten.sin.default" in str(verdict)
    assert "IndexError: boom" in str(verdict)


def test_a_wrong_kernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only machine code is wrong: the interpreter runs the same loops rightly."""
    real = emission._emit_one

    def emit_one(b: object, program: Program) -> object:
        if "sin(" in show(program):
            program = parse_program(show(program).replace("sin(", "cos("))
        return real(b, program)

    monkeypatch.setattr(emission, "_emit_one", emit_one)
    verdict = ferrite.bisect(function, [torch.randn(5)])
    assert verdict.culprit is None
    assert not verdict.lowering
    assert "op sin, mul" in verdict.kernel
    assert LINE in str(verdict)
    assert {"executor": "oracle"} in verdict.cures


def test_a_wrong_native_host_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = CompiledGraph._native_body

    def body(self: CompiledGraph, kernels: object) -> object:
        made = real(self, kernels)
        return None if made is None else lambda arguments: [value + 1 for value in made(arguments)]

    monkeypatch.setattr(CompiledGraph, "_native_body", body)
    verdict = ferrite.bisect(function, [torch.randn(5)])
    assert "the native host makes the result differ" in str(verdict)
    assert {"host": "python"} in verdict.cures


def test_a_wrong_layout_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass that lays a convolution out breaks the gradient of what follows."""

    def channels_last(graph: Graph) -> int:
        if ledger_of(graph).options["layout"] == "off":
            return 0
        nodes = graph.find_nodes(op="call_function", target=aten.tanh_backward.default)
        for node in nodes:
            node.args = (node.args[0], node.args[0])
        return len(nodes)

    monkeypatch.setattr(pipeline, "POST_GRAD", (harmless, channels_last))
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 2, 3), torch.nn.Tanh())
    verdict = ferrite.bisect(model, [torch.randn(1, 2, 5, 5)])
    assert verdict.culprit is not None
    assert verdict.culprit.name == "channels_last"
    assert "right without the channels-last layout (layout='off')" in str(verdict)
    assert {"layout": "off"} in verdict.cures


def test_an_option_that_was_given_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong with a part on that is off by default."""
    monkeypatch.setitem(decompose.OWN, aten.sin.default, lambda x: x.cos() if option_is_set() else NotImplemented)
    asked: list[bool] = []

    def option_is_set() -> bool:
        return asked[-1]

    real = backend.chosen_options

    def chosen(mode: str | None, options: dict[str, object]) -> object:
        asked.append(options.get("donate_buffers", False) is True)
        return real(mode, options)

    monkeypatch.setattr(backend, "chosen_options", chosen)
    verdict = ferrite.bisect(lambda x: x.sin(), [torch.randn(5)], options={"donate_buffers": True})
    assert {"donate_buffers": False} in verdict.cures
    assert "right without donated buffers (donate_buffers=False)" in str(verdict)


def test_what_pytorch_itself_traces_otherwise_is_no_fault_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that asks whether it is compiled."""
    verdict = ferrite.bisect(lambda x: x + int(torch.compiler.is_compiling()), [torch.randn(5)])
    assert not verdict.equal
    assert "aot_eager" in str(verdict)


def test_leaves_random_state_and_inputs_alone() -> None:
    x = torch.randn(5)
    kept, state = x.clone(), torch.get_rng_state()
    ferrite.bisect(lambda v: v.add_(1), [x])
    assert torch.equal(x, kept)
    assert torch.equal(torch.get_rng_state(), state)


def test_what_is_stored_is_neither_asked_nor_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No pass runs on a hit, so none could be named."""
    monkeypatch.setattr(pipeline, "POST_GRAD", (harmless, sin_becomes_cos))
    options, x = {"cache": "on", "cache_dir": str(tmp_path)}, torch.randn(5)
    torch._dynamo.reset()
    torch.compile(function, backend="ferrite", options=options)(x)
    stored = sorted(tmp_path.rglob("*"))
    assert stored
    verdict = ferrite.bisect(function, [x], options=options)
    assert verdict.culprit is not None
    assert verdict.culprit.name == "sin_becomes_cos"
    assert sorted(tmp_path.rglob("*")) == stored


def test_a_pass_that_fails_is_named() -> None:
    def fails(graph: Graph) -> int:
        raise KeyError("gone")

    with ferrite.register_pass("pre_grad", fails):
        verdict = ferrite.bisect(lambda x: x.sin(), [torch.randn(5)])
    assert not verdict.equal
    assert "fails: " in str(verdict)
    assert "KeyError: 'gone'" in str(verdict)


def test_what_fails_without_passes_is_raised() -> None:
    with pytest.raises(Exception, match="Unknown Ferrite option 'strictt'"):
        ferrite.bisect(lambda x: x.sin(), [torch.randn(5)], options={"strictt": True})


def test_the_wrong_rewrite_is_named() -> None:
    """Of four rewrites the third drops what its op was told."""

    def spell_out(graph: Graph) -> int:
        sound = Soundness(graph)
        for number, node in enumerate(find(graph, "add"), 1):
            _spell_out(sound, node, forgets=number == 3)
        return sound.rewrites

    def _spell_out(sound: Soundness, node: Node, forgets: bool) -> None:
        call = bind(node)
        alpha = 1 if forgets else call["alpha"]
        sound.rewrite(node, lambda new: new(torch.add, call["input"], new(torch.mul, call["other"], alpha)))

    def function(x: torch.Tensor) -> torch.Tensor:
        for alpha in (2, 3, 4, 5):
            x = torch.add(x, x.sin(), alpha=alpha)
        return x

    with ferrite.register_pass("pre_grad", spell_out):
        verdict = ferrite.bisect(function, [torch.randn(5)])
    assert verdict.culprit.name == "spell_out"
    assert verdict.rewrite == 3
    assert "rewrite 3 of 4" in str(verdict)


class Normed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(numbers.float())).tanh()


def test_gradients_of_the_parameters_of_a_module_are_compared() -> None:
    """Its inputs are whole numbers, so there is no other gradient."""

    def forgets(graph: Graph) -> int:
        nodes = graph.find_nodes(op="call_function", target=aten.tanh_backward.default)
        for node in nodes:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        return len(nodes)

    model, numbers = Normed(), torch.randint(9, (5, 4))
    assert ferrite.bisect(model, [numbers]).equal
    with ferrite.register_pass("joint", forgets):
        verdict = ferrite.bisect(model, [numbers])
    assert verdict.culprit is not None
    assert verdict.culprit.name == "forgets"


def test_buffers_are_compared_and_a_module_is_left_as_it_was() -> None:
    def keeps_statistics(graph: Graph) -> int:
        copies = graph.find_nodes(op="call_function", target=aten.copy_.default)
        for node in copies:
            node.args = (node.args[0], node.args[0])
        return len(copies)

    model, numbers = Normed(), torch.randint(9, (5, 4))
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    with ferrite.register_pass("post_grad", keeps_statistics):
        verdict = ferrite.bisect(model, [numbers])
    assert verdict.culprit is not None
    assert verdict.culprit.name == "keeps_statistics"
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
