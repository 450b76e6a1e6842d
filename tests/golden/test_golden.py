"""Runs every golden file: a remark, what to run, the text before, and the text that must come out.

    # One sentence on what this shows.
    view_to_reshape

    def graph(x: f32[2, 6]):
        view = aten.view.default(x, [3, 4])
        return (view,)

    ---- after
    def graph(x: f32[2, 6]):
        view = aten.reshape.default(x, [3, 4])
        return (view,)

What the graph's module holds stands above the graph, a line each, with its type or with what makes it:

    self.w: f32[6, 4]
    self.skip: torch.nn.Identity()
    self.half: torch.tensor(0.5)
    def graph(x: f32[2, 4]):

The folder names the stage: `post_grad` (and its sisters) run the named graph passes, `host` goes on to a host
program, and `python` to the code that runs. `pytest --bless` rewrites the lower half. Both halves are also executed
on random data, and must agree: every golden is a correctness test as well. Host programs run by the oracle and, as
machine code, in both executions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.ao.quantization.fx._decomposed  # the ops that goldens of quantising name
from torch.fx import GraphModule, Interpreter, Node

from ferrite.artifact.compiled import CompiledGraph, Facts
from ferrite.artifact.kernels import kernels_of
from ferrite.artifact.native_host import assemble
from ferrite.graph.joint import JOINT
from ferrite.graph.post_grad import MUTATE, POST_GRAD, PREPARE
from ferrite.graph.pre_grad import PASSES as PRE_GRAD
from ferrite.graph.pre_grad.normalise_aten import normalise_aten
from ferrite.graph.pre_grad.spell_as_aten import spell_as_aten
from ferrite.graph.strides import note_output_strides, restore_output_strides
from ferrite.graph.text import parse_graph, read_type, show_graph
from ferrite.host.nodes import HostProgram
from ferrite.host.plan import plan_all
from ferrite.host.text import parse_program, show_program
from ferrite.loops.check import check_program
from ferrite.lower.graph import EVERYTHING_IN_EAGER, Rules, constant_nodes, lower
from ferrite.options import Options
from ferrite.passes import edit
from ferrite.report.record import GraphRecord
from tests.both_hosts import in_both

HERE = Path(__file__).parent
SEPARATOR = "---- after\n"
PASSES = {entry.name: entry.run for entry in PRE_GRAD} | {
    run.__name__: run for run in (normalise_aten, spell_as_aten, *JOINT, *PREPARE, *POST_GRAD, *MUTATE)
}
# Another order of the same sums and products.
ROUND_ELSEWHERE = {
    "batch_layernorm", "batch_linear", "batch_linear_lhs", "batch_sigmoid", "batch_tanh", "bias_after_product",
    "channels_last", "einsum_to_pointwise", "fold_conv_bn", "scale_conv_by_bn", "transpose_linear_input",
    "transpose_linear_output", "transpose_matmul",
}  # fmt: skip


@torch.library.custom_op("golden::needs_contiguous", mutates_args=(), tags=(torch.Tag.needs_contiguous_strides,))
def needs_contiguous(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@torch.library.custom_op("golden::halve", mutates_args={"x"}, tags=(torch.Tag.needs_contiguous_strides,))
def halve(x: torch.Tensor) -> None:
    x.mul_(0.5)


needs_contiguous.register_fake(torch.clone)


@dataclass(frozen=True)
class Outcome:
    """What a stage made: its text, and how to run it on flat inputs."""

    text: str
    run: Callable[..., Any]
    exact: bool = True  # the same kernels as eager, so the same bits
    program: HostProgram | None = None  # of the stages that make one


def run_before_autograd(module: GraphModule, names: list[str]) -> Outcome:
    return run_graph_passes(module, names, after_autograd=False)


def run_graph_passes(module: GraphModule, names: list[str], *, after_autograd: bool = True) -> Outcome:
    record = GraphRecord("golden", "golden")
    passes = [PASSES[name] for name in names]
    edit(module, "golden", passes, Options(strict=True), record, after_autograd=after_autograd)
    exact = ROUND_ELSEWHERE.isdisjoint(names)
    return Outcome(show_graph(module.graph), GraphModule(module, module.graph), exact)


def run_post_grad(module: GraphModule, names: list[str]) -> Outcome:
    """As the pipeline does: strides of outputs are noted before the passes, and restored after them."""
    note_output_strides(module.graph)
    outcome = run_graph_passes(module, names)
    restore_output_strides(module.graph)
    return Outcome(show_graph(module.graph), GraphModule(module, module.graph), outcome.exact)


def host_program(module: GraphModule, rules: Rules = EVERYTHING_IN_EAGER) -> HostProgram:
    lowered = lower(module, rules=rules)
    for kernel in lowered.kernels:
        check_program(kernel, "golden")
    constants = constant_nodes(lowered.constants)
    return plan_all(lowered, "program", constants)


def compiled(program: HostProgram, executor: str = "oracle") -> CompiledGraph:
    return CompiledGraph(program, {}, Facts(0, "inference", (), (), ("cpu",), {}, 0.0, executor, "python"))


def run_natively(program: HostProgram, inputs: list[Any]) -> Any:
    """Machine code for its kernels, in both executions of the program, which must give the same bits. A program without
    kernels is assembled as well, which the pipeline does not do: it would be no faster."""
    python = compiled(program, "native")
    run = python.load()
    assert not python.refused
    compared: list[str] = []
    native = assemble(program, {}, kernels_of(python.kernels, python.built))
    results = in_both(python, native.function, run, compared)(inputs)
    assert compared
    return results


def run_lower(module: GraphModule, names: list[str]) -> Outcome:
    program = host_program(module, Rules(use_rows=True, own_products="products" in names, padding="padding" in names))
    text = show_program(program)
    assert parse_program(text) == program
    return Outcome(text, lambda *inputs: compiled(program)(list(inputs)), exact=False, program=program)


def run_host(module: GraphModule, names: list[str]) -> Outcome:
    program = host_program(module)
    text = show_program(program)
    assert parse_program(text) == program
    return Outcome(text, lambda *inputs: compiled(program)(list(inputs)), program=program)


def run_python(module: GraphModule, names: list[str]) -> Outcome:
    program = host_program(module)
    made = compiled(program)
    return Outcome(made.code.source, lambda *inputs: made(list(inputs)), program=program)


STAGES: dict[str, Callable[[GraphModule, list[str]], Outcome]] = {
    "pre_grad": run_before_autograd,
    "joint": run_graph_passes,
    "post_grad": run_post_grad,
    "lower": run_lower,
    "host": run_host,
    "python": run_python,
}


def golden_files() -> list[Path]:
    return sorted(path for path in HERE.glob("*/*.txt") if path.parent.name in STAGES)


@pytest.mark.parametrize("path", golden_files(), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_golden(path: Path, pytestconfig: pytest.Config) -> None:
    upper, separator, expected = path.read_text().partition(SEPARATOR)
    assert separator, f"{path.name} has no line {SEPARATOR!r}"
    remark, names, held, before = split(upper)
    assert remark, f"{path.name} does not say what it shows"
    assert show_graph(parse(before, held).graph) == before, "the text before must be as the printer writes it"
    outcome = STAGES[path.parent.name](parse(before, held), names)
    if pytestconfig.getoption("--bless"):
        path.write_text(upper + SEPARATOR + outcome.text)
    else:
        assert outcome.text == expected
    assert_same_results(parse(before, held), outcome)


def split(upper: str) -> tuple[str, list[str], list[str], str]:
    """The remark, the names of what to run, what the module holds, and the program."""
    lines = upper.splitlines(keepends=True)
    remark = [line for line in lines if line.startswith("#")]
    held = [line.strip() for line in lines if line.startswith("self.")]
    rest = [line for line in lines if not line.startswith(("#", "self."))]
    names = rest[0].strip().split(", ")
    return "".join(remark), names, held, "".join(rest[1:]).strip() + "\n"


def parse(text: str, held: list[str]) -> GraphModule:
    """The graph, and a module that holds the same positive numbers in every call and is not in training."""
    module = torch.nn.Module()
    for line in held:
        name, _, made = line.removeprefix("self.").partition(": ")
        if made.startswith("torch.nn."):
            setattr(module, name, eval(made))
        elif not made.startswith("torch.tensor("):
            module.register_buffer(name, torch.empty_like(read_type(made), device="cpu"))
    generator = torch.Generator().manual_seed(0)
    for tensor in module.state_dict().values():
        if tensor.is_floating_point():
            tensor.uniform_(0.5, 1.5, generator=generator)
    for line in held:
        name, _, made = line.removeprefix("self.").partition(": ")
        if made.startswith("torch.tensor("):
            module.register_buffer(name, eval(made))
    return parse_graph(text, held=module.eval())


def assert_same_results(module: GraphModule, outcome: Outcome) -> None:
    given = random_inputs(module)
    torch.manual_seed(0)
    expected = Interpreter(module).run(*given)
    # The oracle rounds sums and special functions once, from double precision: at least as near as eager.
    tolerance = {"rtol": 0.0, "atol": 0.0} if outcome.exact else {}
    program = outcome.program
    for run in (outcome.run, *([] if program is None else [lambda *inputs: run_natively(program, list(inputs))])):
        taken = random_inputs(module)
        torch.manual_seed(0)
        found = run(*taken)
        torch.testing.assert_close(found, expected, equal_nan=True, check_stride=True, **tolerance)
        torch.testing.assert_close(taken, given, equal_nan=True, check_stride=True, **tolerance)


def random_inputs(module: GraphModule) -> list[Any]:
    """Real tensors like the fake ones, the same in every call; integers are small and positive, as sizes are."""
    generator = torch.Generator().manual_seed(0)
    inputs = []
    for node in module.graph.find_nodes(op="placeholder"):
        fake = node.meta["val"]
        tensor = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype)
        if fake.dtype.is_floating_point or fake.dtype.is_complex:
            tensor.normal_(generator=generator)
        else:
            tensor.random_(1, 2 if fake.dtype == torch.bool else 5, generator=generator)
        inputs.append(tensor)
    return inputs


# What AOTAutograd says of outputs has no text: these are tested on captured graphs, in tests/unit.
NEEDS_ROLES = {"keep_saved_inputs"}


def test_every_pass_has_a_golden() -> None:
    shown = {name for path in golden_files() for name in split(path.read_text().partition(SEPARATOR)[0])[1]}
    assert set(PASSES) - NEEDS_ROLES <= shown


@pytest.mark.parametrize("name", [entry.name for entry in PRE_GRAD])
def test_every_pass_before_autograd_is_shown_to_fire_and_to_stay_away(name: str) -> None:
    kinds = set()
    for path in (HERE / "pre_grad").glob("*.txt"):
        upper, _, after = path.read_text().partition(SEPARATOR)
        _, names, _, before = split(upper)
        if name in names:
            kinds.add(before == after)
    assert kinds == {True, False}


def with_an_unknown_keyword(node: Node) -> None:
    node.kwargs = {**node.kwargs, "banana": 1}


def with_too_many_arguments(node: Node) -> None:
    node.args = (*node.args, *[None] * 12)


def without_value(node: Node) -> None:
    node.meta.pop("example_value", None)
    node.meta.pop("val", None)


# They only spell a call in another way, or take away one that gives back the very tensor it was given.
NEED_NO_VALUE = {"normalise_keywords", "normalise_arguments", "normalise_aten", "drop_idle_dropout", "remove_identity"}


@pytest.mark.parametrize("spoil", [with_an_unknown_keyword, with_too_many_arguments, without_value])
def test_calls_that_a_pass_cannot_read_are_left_alone(spoil: Callable[[Node], None]) -> None:
    """Every golden in which a pass fires, with all its calls spoilt: nothing fires, and nothing fails."""
    spoilt = 0
    for path in sorted((HERE / "pre_grad").glob("*.txt")):
        upper, _, after = path.read_text().partition(SEPARATOR)
        _, names, held, before = split(upper)
        if before == after or (spoil is without_value and not NEED_NO_VALUE.isdisjoint(names)):
            continue
        graph = parse(before, held).graph
        for node in [node for node in graph.nodes if node.op.startswith("call")]:
            spoil(node)
        text = show_graph(graph)
        assert [PASSES[name](graph) for name in names] == [0] * len(names), path.stem
        assert show_graph(graph) == text, path.stem
        spoilt += 1
    assert spoilt > 50
