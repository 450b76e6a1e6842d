"""The host programs of functions that have no text as a graph: what changes, what asks, what writes, what is marked.

A file in `compiled/` is a remark and the programs that a function of `CASES` becomes, one below the other, as the
pipeline makes them; `pytest --bless` rewrites all but the remark. The function runs in both executions, and gives what
eager gives.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._functorch.partitioners import default_partition

from ferrite import compilation, pipeline
from ferrite.artifact.compiled import CompiledGraph
from ferrite.host.text import parse_program, show_program
from tests.both_hosts import both_hosts

HERE = Path(__file__).parent / "compiled"
PLACE = re.compile(r"(  #| at) test_compiled\.py:\d+(, test_compiled\.py:\d+)*$", re.MULTILINE)


@dataclass(frozen=True)
class Case:
    """A function and its arguments. `native`: whether the programs have no step that only Python can do."""

    function: Callable[..., Any]
    arguments: tuple[Tensor, ...]
    dynamic: bool = False
    training: bool = False
    native: bool = True
    options: dict[str, Any] = field(default_factory=dict)


def gelu_between_products(x: Tensor, w: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x @ w) @ w


def doubled(x: Tensor) -> Tensor:
    return torch.cat([x, x]).relu()


def as_many_ones(count: Tensor) -> Tensor:
    size = count.item()
    torch._check(size >= 2)
    torch._check(size <= 8)
    return torch.ones(size) * 2


def written(x: Tensor, y: Tensor) -> Tensor:
    x.add_(y)
    return x * y


def either(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))


def summed(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).exp().sum(0)


def halves(x: Tensor, w: Tensor) -> Tensor:
    first, second = (x @ w).chunk(2, 1)
    return first * second


X, W = torch.randn(64, 64), torch.randn(64, 64) / 8
CASES: dict[str, Case] = {
    "a_result_lies_over_an_operand": Case(gelu_between_products, (X, W)),
    "sizes_are_asked_and_computed": Case(doubled, (torch.randn(6, 5),), dynamic=True),
    "a_size_from_data_is_asserted": Case(as_many_ones, (torch.tensor(4),), native=False),
    "an_input_is_written": Case(written, (torch.randn(4), torch.randn(4))),
    "a_branch_is_a_function": Case(either, (torch.randn(4),)),
    "inputs_of_a_backward_are_saved": Case(summed, (X, W.clone().requires_grad_()), training=True),
    "a_donated_input_is_written": Case(
        summed, (X, W.clone().requires_grad_()), training=True, options={"donate_buffers": True}
    ),
    "saved_parts_of_one_memory": Case(
        halves, (X, W.clone().requires_grad_()), training=True, options={"partitioner": default_partition}
    ),  # min-cut would save the product itself
    "a_parameter_is_static": Case(torch.nn.Linear(4, 3).requires_grad_(False), (torch.randn(2, 4),)),
}


def results(function: Callable[..., Any], case: Case) -> list[Tensor]:
    """What it gives, what it leaves in its arguments, and the gradients of these."""
    given = [argument.detach().clone().requires_grad_(argument.requires_grad) for argument in case.arguments]
    with torch.set_grad_enabled(case.training):
        result = function(*given)
    if case.training:
        result.sum().backward()
    return [result.detach(), *(value.detach() for value in given), *(v.grad for v in given if v.grad is not None)]


@pytest.mark.parametrize("name", CASES)
def test_compiled(name: str, pytestconfig: pytest.Config) -> None:
    case, path, made = CASES[name], HERE / f"{name}.txt", []

    def compile_graph(*arguments: Any) -> CompiledGraph:
        made.append(pipeline.compile_graph(*arguments))
        return made[-1]

    options = {"strict": True, "cache": "off", **case.options}
    dynamic = case.dynamic or None
    compiled = torch.compile(case.function, backend="ferrite", fullgraph=True, dynamic=dynamic, options=options)
    with (
        mock.patch.object(compilation, "scheme_of", return_value=compile_graph),
        torch._dynamo.config.patch(capture_scalar_outputs=True),
        both_hosts() as compared,
    ):
        found = results(compiled, case)
    torch.testing.assert_close(found, results(case.function, case), check_stride=True)
    assert len(compared) == (len(made) if case.native else 0)
    for program in made:
        assert parse_program(show_program(program.program)) == program.program
    text = "\n".join(PLACE.sub("", str(program)) for program in made)
    remark, _, expected = path.read_text().partition("\n\n")
    assert remark.startswith("# ")
    if pytestconfig.getoption("--bless"):
        path.write_text(f"{remark}\n\n{text}")
    else:
        assert text == expected


def test_every_file_has_a_case() -> None:
    assert {path.stem for path in HERE.glob("*.txt")} == CASES.keys()
