"""The sentence on top of every pass is true: its example is captured, rewritten, and compared with what it promises.

    x: f32[4], y: f32[4]
    F.dropout(x, 0.3, training=False) + y  ->  x + y

Types of the inputs stand on a line of their own; several statements are parted by `;`; a line that begins with `->`
belongs to the line above it, and so does one below a `;`. A module, `conv: nn.Conv2d(3, 4, 3)`, is called without
training and without gradients; an input that is read only on the right is a constant that the rewrite makes.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Collection
from inspect import getmodule
from typing import Any

import pytest
import torch
import torch.ao.quantization.fx._decomposed
from torch import nn
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.nn import functional

from ferrite.graph.arguments import bind
from ferrite.graph.pre_grad import PASSES
from ferrite.graph.pre_grad.normalise_aten import normalise_aten
from ferrite.graph.pre_grad.spell_as_aten import spell_as_aten
from ferrite.graph.text import parse_graph
from tests.pre_grad.harness import capture, rewrites, trace

NAMES = {
    "torch": torch,
    "aten": torch.ops.aten,
    "F": functional,
    "operator": operator,
    "quantise": torch.ops.quantized_decomposed.quantize_per_tensor.default,
}


def examples(module: Any) -> list[tuple[str, str, str]]:
    """(types, before, after) of every example in a module's docstring."""
    lines: list[str] = []
    for line in (module.__doc__ or "").splitlines():
        if line.strip().startswith("->") and lines:
            lines[-1] += f"  {line.strip()}"
        elif lines and lines[-1].endswith(";"):
            lines[-1] += f" {line.strip()}"
        elif line.startswith("    "):
            lines.append(line.strip())
    found, types = [], ""
    for line in lines:
        before, arrow, after = line.partition("  ->  ")
        if arrow:
            found.append((types, before.strip(), after.strip()))
        elif ":" in line:
            types = line
    return found


def modules_of(types: str) -> tuple[str, dict[str, nn.Module]]:
    """The types of the tensors, and the modules."""
    entries = {argument.arg: argument.annotation for argument in ast.parse(f"def f({types}): 0").body[0].args.args}  # type: ignore[attr-defined]
    texts = {name: ast.unparse(annotation) for name, annotation in entries.items()}
    modules = {name: eval(text, {"nn": nn}).eval() for name, text in texts.items() if text.startswith("nn.")}
    return ", ".join(f"{name}: {text}" for name, text in texts.items() if name not in modules), modules


def calling(names: list[str], modules: dict[str, nn.Module], text: str) -> nn.Module:
    """A module that holds these modules and does what the text says."""
    function = function_of([*names, *modules], text)
    space: dict[str, Any] = {"function": function}
    held = [f"self.{name}" for name in modules]
    exec(f"def forward(self, {', '.join(names)}): return (function({', '.join([*names, *held])}),)", space)
    made = type("Calling", (nn.Module,), {"forward": space["forward"]})()
    for name, module in modules.items():
        made.add_module(name, module)
    return made


def inputs_of(types: str) -> tuple[list[str], list[torch.Tensor]]:
    module = parse_graph(f"def graph({types}):\n    return ()\n")
    nodes = module.graph.find_nodes(op="placeholder")
    generator = torch.Generator().manual_seed(0)
    fakes = [node.meta["val"] for node in nodes]
    reals = [torch.randn(fake.shape, generator=generator).to(fake.dtype) for fake in fakes]
    return [node.name for node in nodes], reals


def function_of(names: list[str], text: str) -> Callable[..., Any]:
    *statements, result = text.split("; ")
    source = f"def function({', '.join(names)}):\n" + "".join(
        f"    {line}\n" for line in [*statements, f"return {result}"]
    )
    space = dict(NAMES)
    exec(source, space)
    return space["function"]


def shape_of(module: GraphModule, constants: Collection[str] = ()) -> list[Any]:
    """The calls of a graph with their arguments by name, nodes as numbers: equal for programs that do the same."""
    numbers: dict[Node, Any] = {}
    inputs = sorted(node.name for node in module.graph.find_nodes(op="placeholder") if node.users)
    shown: list[Any] = []

    def plain(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        return numbers[value] if isinstance(value, Node) else value

    for node in module.graph.nodes:
        if node.op == "placeholder":
            name = node.name.removeprefix("l_").removesuffix("_")
            numbers[node] = "constant" if name in constants else f"input {name}" if node.name in inputs else None
            continue
        if node.op == "get_attr":
            numbers[node] = "constant"
            continue
        if node.op == "output":
            shown.append(plain(node.args))
            continue
        call = bind(node)
        assert call is not None, f"nothing is known of {node.format_node()}"
        numbers[node] = f"call {len(shown)}"
        arguments = {name: plain(value) for name, value in call.arguments.items() if value is not None}
        name = str(node.target) if isinstance(node.target, OpOverload) else call.kind
        shown.append((name, sorted(arguments.items())))
    return shown


# Those over graphs of ATen overloads too.
RUNS = {entry.name: entry.run for entry in PASSES} | {run.__name__: run for run in (normalise_aten, spell_as_aten)}
CASES = [(name, number, case) for name, run in RUNS.items() for number, case in enumerate(examples(getmodule(run)), 1)]
# How many rewrites an example is, by pass and number, if not one.
TIMES = {("simplify_split_joins", 2): 2}  # the cat, and the split


@pytest.mark.parametrize(
    ("name", "number", "case"), CASES, ids=[f"{name}: {before}" for name, _, (_, before, _) in CASES]
)
def test_the_example_of_a_pass_is_true(name: str, number: int, case: tuple[str, str, str]) -> None:
    run, times = RUNS[name], TIMES.get((name, number), 1)
    types, before, after = case
    types, modules = modules_of(types)
    names, inputs = inputs_of(types)
    if not modules:
        outcome = rewrites(run, function_of(names, before), inputs, times=times, again=None)
        promised = capture(function_of(names, after), inputs)
        assert shape_of(outcome.module) == shape_of(promised.module), outcome.after
        return
    read = [name for name in names if name in before]
    given = [value for name, value in zip(names, inputs, strict=True) if name in read]
    with torch.no_grad():
        traced = trace(calling(read, modules, before), given)
        outcome = rewrites(run, traced, times=times, again=None)
        promised = capture(function_of(names, after), inputs)
    assert shape_of(outcome.module) == shape_of(promised.module, set(names) - set(read)), outcome.after


def test_every_pass_has_an_example() -> None:
    assert RUNS.keys() - {name for name, _, _ in CASES} == set()
    assert TIMES.keys() <= {(name, number) for name, number, _ in CASES}
