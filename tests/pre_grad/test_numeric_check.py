"""PRE-32: a wrong pass is named on real inputs, and the process is as it was."""

from __future__ import annotations

import logging
import os
import random
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node

from ferrite import pipeline
from ferrite.errors import Malformed
from ferrite.extension import register_pass
from ferrite.graph.arguments import bind, find
from ferrite.graph.soundness import Soundness
from ferrite.graph.trial import difference, run_trial
from ferrite.options import Options, resolve
from ferrite.report.record import GraphRecord
from tests.pre_grad.harness import capture

X = torch.randn(3, 4)


def forget_alpha(graph: Graph) -> int:
    """The second rewrite drops what the add was told."""
    sound = Soundness(graph)
    for number, node in enumerate(find(graph, "add"), 1):
        _forget(sound, node, number)
    return sound.rewrites


def _forget(sound: Soundness, node: Node, number: int) -> None:
    call = bind(node)
    if call is not None and call["alpha"] != 1:
        factor = 1 if number == 2 else call["alpha"]
        sound.rewrite(node, lambda new: new(torch.add, call["input"], new(torch.mul, call["other"], factor)))


def function(x: Any) -> Any:
    return torch.add(torch.add(x.sin(), x, alpha=2), x.cos(), alpha=3)


def checked(inputs: list[Any], *, strict: bool = False, **settings: Any) -> GraphRecord:
    captured = capture(function, [X])
    record = GraphRecord("test", "pre_grad")
    options = resolve(Options(strict=strict), None, {"numeric_check": {"pre_grad": settings}})
    pipeline.edit_pre_grad(captured.module, options, record, inputs)
    return record


def said(record: GraphRecord) -> list[tuple[tuple[str, ...], bool, str]]:
    return [(entry.subjects, entry.taken, entry.reason) for entry in record.decisions if entry.what == "numeric_check"]


def test_right_passes_are_equal() -> None:
    assert said(checked([X])) == [(("pre_grad",), True, "equal within 0.0001 over 2 steps")]


def test_a_wrong_pass_is_named_with_its_rewrite(caplog: pytest.LogCaptureFixture) -> None:
    with register_pass("pre_grad", forget_alpha), caplog.at_level(logging.WARNING):
        ((subjects, taken, reason),) = said(checked([X]))
    assert (subjects, taken) == (("forget_alpha",), False)
    assert reason.startswith("step 1, output 0 differs by")
    assert "with its rewrite 2 of 2" in reason
    assert "forget_alpha" in caplog.text


def test_under_strict_it_is_an_error() -> None:
    with (
        register_pass("pre_grad", forget_alpha),
        pytest.raises(Malformed, match="forget_alpha: step 1, output 0 differs"),
    ):
        checked([X], strict=True)


def test_fake_inputs_are_not_checked() -> None:
    with FakeTensorMode():
        fake = torch.empty(3, 4)
    assert said(checked([fake])) == [(("pre_grad",), False, "not checked: an input is a FakeTensor")]


def test_a_stage_may_be_asked_for_without_settings() -> None:
    assert resolve(Options(), None, {"numeric_check": {"pre_grad": True}}).numeric_check == (("pre_grad", ()),)
    with pytest.raises(RuntimeError, match=r"expects names alone, or with settings as \{'name': \{'setting': 1\}\}"):
        resolve(Options(), None, {"pre_grad": {"normalise_ops": True, "counter": 2}})


def test_settings_beside_the_stage() -> None:
    """As if they stood below it; those below it come first."""
    for given, found in [
        ({"pre_grad": True, "precision": 1e-3}, {"precision": 1e-3}),
        ({"precision": 1e-3, "pre_grad": {"steps": 1}}, {"precision": 1e-3, "steps": 1}),
        ({"pre_grad": {"precision": 1e-2}, "precision": 1e-3}, {"precision": 1e-2}),
    ]:
        ((stage, settings),) = resolve(Options(), None, {"numeric_check": given}).numeric_check
        assert (stage, dict(settings)) == ("pre_grad", found)
    with pytest.raises(RuntimeError, match="Unknown Ferrite setting of numeric_check 'precison'"):
        pipeline.check_options(resolve(Options(), None, {"numeric_check": {"pre_grad": True, "precison": 1e-4}}))


def test_precision_is_honoured() -> None:
    with register_pass("pre_grad", forget_alpha):
        assert said(checked([X], precision=100.0))[0][1]


@pytest.mark.parametrize("asked", [{"joint": {}}, {"pre_grad": {"tolerance": 1}}])
def test_unknown_settings(asked: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match="Valid"):
        pipeline.check_options(resolve(Options(), None, {"numeric_check": asked}))


def modes() -> tuple[Any, ...]:
    """What a check could leave behind in a process."""
    deterministic = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic
    switches = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_default_dtype()
    return *deterministic, *switches, dict(os.environ), random.getstate()


@pytest.mark.parametrize("wrong", [False, True])
def test_the_process_is_as_it_was(wrong: bool) -> None:
    """Also where the passes run again, one by one, to find the one to blame."""
    w = torch.nn.Parameter(torch.randn(4, 4))
    w.grad = torch.ones(4, 4)
    kept = (X.clone(), w.detach().clone(), torch.get_rng_state(), modes())

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return function(torch.nn.functional.dropout(x @ w)).sum()

    captured = capture(program, [X.clone(), w])
    record = GraphRecord("test", "pre_grad")
    options = resolve(Options(), None, {"numeric_check": "pre_grad"})
    order = {"x": X, "w": w}
    inputs = [order[node.name.strip("l_")] for node in captured.module.graph.find_nodes(op="placeholder")]
    with register_pass("pre_grad", forget_alpha if wrong else lambda graph: 0, name="mine"):
        pipeline.edit_pre_grad(captured.module, options, record, inputs)
    assert said(record)[0][:2] == ((("mine",), False) if wrong else (("pre_grad",), True))
    assert torch.equal(X, kept[0])
    assert torch.equal(w, kept[1])
    assert torch.equal(w.grad, torch.ones(4, 4))
    assert torch.equal(torch.get_rng_state(), kept[2])
    assert modes() == kept[3]


def test_through_torch_compile() -> None:
    torch._dynamo.reset()
    named = pytest.raises(Exception, match="forget_alpha: step 1, output 0 differs")
    with register_pass("pre_grad", forget_alpha), named:
        torch.compile(function, backend="ferrite", options={"strict": True, "numeric_check": "pre_grad"})(X)


class TestTrial:
    def test_a_step_down_the_gradients_is_compared(self) -> None:
        """Of a tensor that is lifted to an input, and of a module's own parameter."""
        x = torch.ones(3, requires_grad=True)
        found = dict(run_trial(lambda x: x * x, [x], steps=2).values)
        moved = found["step 1, input 0 after the call"] - 0.01 * found["step 1, gradient of input 0"]
        torch.testing.assert_close(found["step 2, input 0 after the call"], moved)
        torch.testing.assert_close(found["step 2, output 0"], moved * moved)
        layer = torch.nn.Linear(3, 2)
        found = dict(run_trial(layer, [torch.ones(1, 3)], steps=2).values)
        assert not torch.equal(found["step 1, output 0"], found["step 2, output 0"])

    def test_gradients_and_inputs_are_compared(self) -> None:
        x = torch.randn(3, requires_grad=True)
        right = run_trial(lambda x: x * 2, [x])
        assert difference(right, run_trial(lambda x: x * 2, [x])) is None
        assert "gradient of input 0 differs by" in str(difference(right, run_trial(lambda x: x + x.detach(), [x])))
        y = torch.randn(3)
        assert "input 0 after the call" in str(
            difference(run_trial(lambda y: y.clone(), [y]), run_trial(lambda y: y.add_(1) - 1, [y]), 1e-5)
        )

    def test_a_gradient_that_vanishes_in_the_sum_is_compared(self) -> None:
        x = torch.randn(3, requires_grad=True)
        found = difference(
            run_trial(lambda x: x.softmax(0), [x]), run_trial(lambda x: x.softmax(0).detach() + 0 * x, [x])
        )
        assert "gradient of input 0" in str(found)

    def test_inputs_inside_of_others(self) -> None:
        x = torch.randn(3, requires_grad=True)

        right = run_trial(lambda given: given["x"][0] * 2, [{"x": [x]}])
        wrong = run_trial(lambda given: given["x"][0] + given["x"][0].detach(), [{"x": [x]}])
        assert "gradient of input 0" in str(difference(right, wrong))

    def test_copies_share_memory_as_inputs_do(self) -> None:
        base = torch.zeros(6)

        def program(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            a.add_(1)
            return b.clone()

        found = dict(run_trial(program, [base[:4], base[2:]]).values)
        assert found["output 0"].tolist() == [1, 1, 0, 0]
        assert base.eq(0).all()

    def test_another_dtype_or_number_of_values_is_a_difference(self) -> None:
        one, two = run_trial(lambda x: x, [X]), run_trial(lambda x: x.double(), [X])
        assert "is torch.float64" in str(difference(one, two))
        assert "values in place of" in str(difference(one, run_trial(lambda x: (x, x), [X])))
