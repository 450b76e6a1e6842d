"""Random stacks of modules as data, and that their judge can fail at all.

`python -m tests.stacks` runs them through torch.compile.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule
from torch.nn import functional

from tests.stacks.judge import FERRITE, FORMULAS, Engine, Judge, judge
from tests.stacks.layers import ROWS, Layer
from tests.stacks.shrink import shrink
from tests.stacks.stack import Recipe, Setting, Stack, generate, made_of, script, source


@pytest.fixture(autouse=True)
def _no_warnings() -> Any:
    """Random stacks pad kernels of even size, and use what torch deprecates."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# ---- stacks as data


def stack_of(*layers: Layer, **setting: Any) -> Stack:
    sizes = setting.pop("sizes", (2, 4, 5, 7))
    return Stack(Setting(sizes, setting.pop("second", sizes), **setting), layers, Recipe(()))


CONVOLUTION = Layer("{m}({0})", (0,), "nn.Conv2d(4, 6, 3)")
NORM = Layer("{m}({0})", (1,), "nn.BatchNorm2d(6)")


def test_a_seed_gives_the_same_stacks_again() -> None:
    stacks = [generate(3, number) for number in range(12)]
    assert stacks == [generate(3, number) for number in range(12)]
    assert stacks == [made_of(stack.recipe) for stack in stacks]
    assert len({source(stack) for stack in stacks}) == 12


def test_stacks_hold_every_kind_of_layer_and_setting() -> None:
    stacks = [generate(5, number) for number in range(150)]
    rows = {ROWS[numbers[0]].__name__ for stack in stacks for numbers in stack.recipe.layers}
    assert {row.__name__ for row in ROWS} <= rows
    settings = [stack.setting for stack in stacks]
    assert {len(setting.sizes) for setting in settings} == {2, 3, 4, 5}
    assert {setting.sizes[0] for setting in settings} == {1, 2, 3}
    assert {setting.dynamic for setting in settings} == {False, True, None}
    assert any(setting.second != setting.sizes for setting in settings)
    for name in ("is_channels_last", "holds_tokens", "is_training", "wants_gradients"):
        assert {getattr(setting, name) for setting in settings} == {False, True}
    assert any(stack.raises for stack in stacks)


def test_a_script_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["script", "eager"])
    stack = next(stack for number in range(99) if (stack := generate(6, number)).setting.wants_gradients)
    exec(compile(script(stack, {}), "<script>", "exec"), {})
    assert "gradient of" in capsys.readouterr().out


def test_a_failing_stack_becomes_smaller() -> None:
    asks = lambda stack: any("Norm" in layer.module for layer in stack.layers)
    stack = next(stack for number in range(99) if asks(stack := generate(8, number)) and len(stack.layers) > 4)
    small = shrink(stack, asks, 20.0)
    assert len(small.layers) == 1
    assert small.setting.dynamic is False


# ---- the reference


NORMS = (
    (functional.batch_norm, ("mean", "variance", "weight", "bias", True, 0.3, 1e-3)),
    (functional.batch_norm, ("mean", "variance", "weight", None, False, 0.3, 1e-3)),
    (functional.instance_norm, ("mean", "variance", "weight", "bias", True, 0.3, 1e-3)),
    (functional.instance_norm, ("mean", "variance", None, None, False, 0.3, 1e-3)),
    (functional.group_norm, (2, "weight", "bias", 1e-3)),
    (functional.layer_norm, ([5, 7], None, None, 1e-3)),
    (functional.rms_norm, ([7], None, 1e-3)),
)


@pytest.mark.parametrize(("function", "arguments"), NORMS)
def test_formulas_of_norms(function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Forwards, backwards and statistics, for a batch that eager is right for."""
    found = []
    for is_formula in (False, True):
        torch.manual_seed(0)
        held = {name: torch.rand(4, dtype=torch.float64) + 0.5 for name in ("mean", "variance", "weight", "bias")}
        value = torch.randn(3, 4, 5, 7, dtype=torch.float64, requires_grad=True)
        given = [held.get(each, each) if isinstance(each, str) else each for each in arguments]
        made = (FORMULAS[function] if is_formula else function)(value, *given)
        (gradient,) = torch.autograd.grad(made, value, torch.randn_like(made))
        found.append([made.detach(), gradient, held["mean"], held["variance"]])
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two)


RANDOM_LAYERS = ("nn.Dropout(0.5)", "nn.Dropout2d(0.5)", "nn.AlphaDropout(0.5)", "nn.RReLU(inplace=True)")


@pytest.mark.parametrize("module", RANDOM_LAYERS)
def test_the_reference_draws_what_eager_drew(module: str) -> None:
    """Also where eager draws in the order of memory that lies channels last, which in float64 may lie otherwise."""
    stack = stack_of(CONVOLUTION, Layer("{m}({0})", (1,), module), is_channels_last=True)
    asked = Judge(stack)
    for eager, wide in zip(asked.eager, asked.reference, strict=True):
        torch.testing.assert_close(eager.result.double(), wide.result, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(eager.gradients[0].double(), wide.gradients[0], rtol=1e-4, atol=1e-5)
        assert torch.equal(eager.inputs[-1], wide.inputs[-1])


# ---- engines that are wrong


@dataclass(frozen=True)
class Wrong(Engine):
    """A backend that calls something else for functions with these names, or does something else around the graph."""

    functions: Any = None
    around: Any = None

    def compiled(self, stack: Stack, model: nn.Module) -> Callable[..., Any]:
        def backend(module: GraphModule, inputs: Any) -> Any:
            for node in module.graph.nodes:
                name = getattr(node.target, "__name__", "")
                if node.op == "call_function" and name in (self.functions or {}):
                    node.target = self.functions[name]
            module.recompile()
            return (lambda *given: self.around(module.forward, given)) if self.around else module.forward

        torch._dynamo.reset()
        return torch.compile(model, backend=backend)


def _forgets_statistics(value: Any, mean: Any, variance: Any, *others: Any) -> Any:
    return functional.batch_norm(value, mean.clone(), variance.clone(), *others)


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, value: Any) -> Any:
        return value.clone()

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        return gradient * 1.001


BIASED = {"conv2d": lambda *given: torch.conv2d(*given) * 1.001}
WRONG = {
    "value": Wrong("", functions=BIASED),
    "strides": Wrong("", around=lambda run, given: tuple(each.mT.contiguous().mT for each in run(*given))),
    "gradient value": Wrong("", functions={"conv2d": lambda *given: _WrongGradient.apply(torch.conv2d(*given))}),
    "mutation: value": Wrong("", functions={"batch_norm": _forgets_statistics}),
    "error": Wrong("", functions={"conv2d": lambda *given: torch.conv2d(*given)[0, 0, 0, 0, 0, 0]}),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_engine_is_found(kind: str) -> None:
    """Statistics that are kept in front of the convolution are right even if that is wrong."""
    stack = stack_of(replace(NORM, operands=(0,), module="nn.BatchNorm2d(4)"), replace(CONVOLUTION, operands=(1,)))
    verdict = judge(stack, WRONG[kind])
    assert (verdict.status, verdict.kind) == ("different", kind)
    assert judge(stack, Wrong("")).status == "equal"


@pytest.mark.parametrize(("factor", "status"), [(1.002, "torch"), (1.1, "different"), (float("nan"), "different")])
def test_a_wrong_value_is_torchs_as_far_as_torch_is_wrong(
    factor: float, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.stacks.judge.TORCH", Wrong("", functions=BIASED))
    engine = Wrong("", functions={"conv2d": lambda *given: torch.conv2d(*given) * factor})
    assert judge(stack_of(CONVOLUTION), engine).status == status


def test_eager_that_is_wrong_is_not_what_others_are_judged_by() -> None:
    """Its batch norm has wrong gradients for a batch of one, a contiguous input and a gradient that lies channels last,
    in float64 as well."""
    layers = (replace(NORM, operands=(0,), module="nn.BatchNorm2d(4)"), Layer("{0}.flatten(2).mT.contiguous()", (1,)))
    asked = Judge(stack_of(*layers, sizes=(1, 4, 3, 5)))
    eager, wide = (seen[0].gradients[0].double() for seen in (asked.eager, asked.reference))
    assert (eager - wide).abs().max() > 0.1 * wide.abs().max()
    assert asked.verdict(FERRITE).status in ("close", "torch")  # strides of gradients may be torch's error
