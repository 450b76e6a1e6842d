"""Which results of kernels lie over operands, that they may, and that nobody sees it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ferrite
from ferrite.host.lowered import Body, Lowered
from ferrite.host.nodes import Call, Launch, Return
from ferrite.host.text import parse_program as parse_host_program
from ferrite.loops.text import parse_program
from ferrite.schedule.arrange import arrange
from ferrite.schedule.reuse_memory import overwritten, reuse_memory
from tests.both_hosts import both_hosts

# ---- kernels

POINTWISE = """
def program(x: f32[8, 64], z: f32[64], y: out(f32[8, 64])):
    for i, j in box(8, 64):
        y[i, j] = exp(x[i, j]) + z[j]
"""


def test_a_result_may_lie_over_what_is_read_at_the_same_point() -> None:
    assert overwritten(parse_program(POINTWISE)) == {2: [0]}


def test_sizes_may_be_others_if_both_lie_alike() -> None:
    text = POINTWISE.replace("x: f32[8, 64]", "x: f32[2, 4, 64]").replace("x[i, j]", "x[i // 4, i % 4, j]")
    assert overwritten(parse_program(text)) == {2: [0]}


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("x[i, j]", "x[i, 63 - j]", "another element is read"),
        ("x: f32[8, 64]", "x: f32[16, 64]", "it is longer"),
        ("x: f32[8, 64]", "x: f32[8, 64].stride(1, 8)", "it lies otherwise"),
        ("x: f32[8, 64]", "x: inout(f32[8, 64])", "it is written as well"),
        ("exp(x[i, j])", "f32(x[i, j])", "it has elements of another size"),
        ("exp(x[i, j])", "sum(x[i, r] for r in box(64))", "other elements are read too"),
        ("exp(x[i, j])", "require(x[i, j] > f32(0.0), x[i, j], 'ValueError', 'small')", "it may raise"),
        ("y[i, j] = exp(x[i, j])", "y[i, j] += exp(x[i, j])", "the result is read before it is written"),
    ],
)
def test_it_may_not(old: str, new: str, reason: str) -> None:
    text = POINTWISE.replace(old, new)
    if "f32(x" in new:
        text = text.replace("x: f32", "x: i64")
    if "+=" in new:
        text = text.replace("y: out", "y: inout")
    if "inout(f32[8, 64])" in new:
        text += "    for i, j in box(8, 64):\n        x[i, j] = f32(0.0)\n"
    assert overwritten(parse_program(text)) == {}, reason


MOVED = """
def f(x: f32[32, 64], p: f32[32, 64], a: f32[32, 64], c: out(f32[32, 64]), b: out(f64[32, 64]), r: out(f32[32, 64])):
    m = local(f32[32])
    q = local(f32[32])
    for i in box(32):
        m[i] = sum(x[i, k] for k in box(64))
    for i in box(32):
        q[i] = sum(x[i, k] * x[i, k] for k in box(64))
    for i, j in box(32, 64):
        c[i, j] = p[i, j] * m[i]
    for i, j in box(32, 64):
        b[i, j] = f64(a[i, j] * q[i])
    for i, j in box(32, 64):
        r[i, j] = sin(c[i, j])
"""


def test_what_runs_first_is_what_the_loops_say() -> None:
    """The nest that stores `r` moves up to the one that stores `c`, before `a` is read."""
    program = parse_program(MOVED)
    text = arrange(program).text()
    assert text.index("r[") < text.index("b["), "the nest does not move: the test shows nothing"
    assert overwritten(program) == {3: [1], 5: [1]}, "over `p`, which is read when `c` is stored, but not over `a`"


TWO = """
def program(x: f32[8, 64], y: out(f32[8, 64]), z: out(f32[8, 64])):
    for i, j in box(8, 64):
        y[i, j] = x[i, j] + f32(1.0)
    for i, j in box(8, 64):
        z[i, j] = x[i, j] * f32(2.0)
"""


def test_what_is_read_by_a_later_statement_is_overwritten_by_that_one() -> None:
    assert overwritten(parse_program(TWO)) == {2: [0]}


def test_loops_in_another_order_pass_at_other_times() -> None:
    """If the two share a loop, its first turn reads a row and writes a column."""
    text = TWO.replace("x[i, j] * f32(2.0)", "f32(2.0)").replace("64", "8")
    assert overwritten(parse_program(text)) == {1: [0], 2: [0]}
    turned = text.replace("for i, j in box(8, 8):\n        z", "for j, i in box(8, 8):\n        z")
    assert overwritten(parse_program(turned)) == {1: [0]}


# ---- graphs


def taken(function: Callable[..., Any], *arguments: Any, **options: Any) -> set[tuple[str, ...]]:
    """What lies over what, by the record; the results are those of eager, and so are the arguments afterwards."""
    torch._dynamo.reset()
    given = [argument.clone() for argument in arguments]
    options = {"strict": True, "check": True, **options}
    with torch.no_grad():
        compiled = torch.compile(function, backend="ferrite", options=options)
        compiled(*given)  # the first call may find memory as it came
        found, wanted = compiled(*given), function(*arguments)
    torch.testing.assert_close(found, wanted)
    for one, other in zip(given, arguments, strict=True):
        assert torch.equal(one, other)
    for one in found if isinstance(found, tuple) else (found,):
        assert not one._is_view()
    record = ferrite.last_record()
    assert record is not None
    return {d.subjects for graph in record.graphs for d in graph.decisions if d.what == "reuse" and d.taken}


X, W = torch.randn(64, 64), torch.randn(64, 64) / 8  # results of size one


@pytest.mark.parametrize("host", ["native", "python"])
def test_between_products(host: str) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return F.gelu(F.gelu(x @ w) @ w)

    assert taken(function, X, W, host=host) == {("gelu", "mm"), ("gelu_1", "mm_1")}


def test_of_other_sizes_behind_a_view() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return (F.gelu((x @ w).view(4, 16, 64)) + x.view(4, 16, 64)[:, :1]).view(64, 64) @ w

    assert taken(function, X, W) == {("add", "mm")}


def test_over_a_row_that_the_kernel_keeps_for_itself() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return torch.softmax(F.gelu(x @ w), -1) @ w

    assert taken(function, X, W) == {("_softmax", "mm")}


def test_over_a_convolution_that_the_caller_does_not_see() -> None:
    image, weight = torch.randn(1, 4, 32, 32), torch.randn(4, 4, 3, 3) / 6  # results of size one

    def function(x: Tensor, w: Tensor) -> Tensor:
        return F.conv2d(F.relu(F.conv2d(x, w)), w)

    assert taken(function, image, weight) == {("relu", "convolution_strided")}
    assert taken(lambda x, w: F.relu(F.conv2d(x, w)), image, weight) == set()


def read_again(x: Tensor, w: Tensor) -> Tensor:
    product = x @ w
    return F.gelu(product) @ w + product


def given_out(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    product = x @ w
    return product, F.gelu(product)


def a_part(x: Tensor, w: Tensor) -> Tensor:
    return F.gelu((x @ w)[:32]) @ w


def an_argument(x: Tensor, w: Tensor) -> Tensor:
    return F.gelu(x) @ w


def other_sizes_given_out(x: Tensor, w: Tensor) -> Tensor:
    return F.gelu((x @ w).view(8, 8, 64))


@pytest.mark.parametrize(
    ("function", "forbidden"),
    [
        (read_again, ("gelu", "mm")),
        (given_out, ("gelu", "mm")),
        (a_part, ("gelu", "mm")),
        (an_argument, ("gelu", "x")),
        (other_sizes_given_out, ("gelu", "mm")),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_it_does_not(function: Callable[..., Any], forbidden: tuple[str, str]) -> None:
    assert forbidden not in taken(function, X, W)


# ---- donated arguments


class Summed(torch.nn.Module):
    """Its backward reads the saved `exp` for a gradient that only products read."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).exp().sum(0)


def backward_of(module: torch.nn.Module, x: Tensor, **options: Any) -> tuple[list[Tensor], dict[str, Any]]:
    """The gradients of a step, and what results of the backward lie over, with the decision."""
    torch._dynamo.reset()
    options = {"strict": True, "check": True, "cache": "off", **options}
    compiled = torch.compile(module, backend="ferrite", options=options)
    for _ in range(2):
        module.zero_grad()
        compiled(x).sum().backward()
    record = ferrite.last_record()
    assert record is not None
    graph = record.phase("backward")
    assert graph is not None
    taken = {d.subjects[1]: d for d in graph.decisions if d.what == "reuse" and d.taken}
    return [parameter.grad.clone() for parameter in module.parameters()], taken


@pytest.mark.parametrize("host", ["native", "python"])
def test_over_an_argument_that_is_donated(host: str) -> None:
    module, x = Summed(), torch.randn(32, 64)
    module(x).sum().backward()
    expected = [parameter.grad.clone() for parameter in module.parameters()]
    with both_hosts():
        kept, taken = backward_of(module, x, host=host)
        assert "detach_1" not in taken
        donated, taken = backward_of(module, x, host=host, donate_buffers=True)
        assert "detach_1" in taken  # the saved `exp`
    for one, other, eager in zip(kept, donated, expected, strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, eager)


@pytest.mark.parametrize("cache", ["off", "on"])
@pytest.mark.parametrize("plain", [(False, True), (True, False)], ids=["at_once", "after_a_plain_one"])
def test_donated_arguments_and_a_backward_that_is_to_be_repeated(
    plain: tuple[bool, ...], cache: str, tmp_path: Path
) -> None:
    """It gives eager's gradients or is refused: by PyTorch, for a backward that was compiled to be called once."""
    module, x = Summed(), torch.randn(32, 64)
    module(x).sum().backward()
    expected = module.linear.weight.grad.clone()
    options = {"strict": True, "cache": cache, "cache_dir": str(tmp_path), "donate_buffers": True}
    for first_is_plain in plain:
        torch._dynamo.reset()
        compiled = torch.compile(module, backend="ferrite", options=options)
        if first_is_plain:
            compiled(x).sum().backward()
        # What is found in the cache was compiled for the first of the two.
        result, refused = compiled(x).sum(), first_is_plain if cache == "off" else plain[0]
        for retain in (True, False):
            module.zero_grad()
            with pytest.raises(RuntimeError, match="donated") if refused and retain else nullcontext():
                result.backward(retain_graph=retain)
            if not refused:
                torch.testing.assert_close(module.linear.weight.grad, expected)


DONATED = """
@kernel
def kernel_0(x: f32[64, 64], y: out(f32[64, 64])):
    for i, j in box(64, 64):
        y[i, j] = exp(x[i, j])

def program(x: donated(f32[64, 64])):
    y = aten.empty_strided.default([64, 64], [64, 1], dtype=torch.float32, device=torch.device('cpu'))
    kernel_0(x, y)
    mm = aten.mm.default(y, y)
    return (mm,)
"""


@pytest.mark.parametrize(
    ("old", "new", "reused"),
    [
        ("", "", True),
        ("donated(f32[64, 64])", "f32[64, 64]", False),
        ("donated(f32[64, 64])", "saved(f32[64, 64])", False),
        ("donated(f32[64, 64])", "donated(part(f32[64, 64], x, 32768))", False),
        ("return (mm,)", "return (mm, x)", False),
        ("return (mm,)", "return (mm, y)", False),
        ("mm.default(y, y)", "mm.default(x, y)", False),
        ("program(x: donated(f32[64, 64]))", "program(x: donated(f32[64, 64]), known: f32[2])", False),
    ],
    ids=["donated", "the_callers", "saved", "a_part", "returned", "the_result_is_returned", "read_again", "sizes"],
)
def test_which_arguments_are_written(old: str, new: str, reused: bool) -> None:
    program = parse_host_program(DONATED.replace(old, new) if old else DONATED)
    steps = tuple(step for step in program.steps if isinstance(step, (Call, Launch)))
    (result,) = (step.value for step in program.steps if isinstance(step, Return))
    lengths = {} if "known" in new else dict.fromkeys(("x", "y", "mm"), 64 * 64 * 4)
    body = Body("main", program.inputs, steps, result, bytes=lengths)
    lowered = reuse_memory(Lowered(body, kernels=program.kernels))
    assert [d.subjects for d in lowered.decisions] == ([("y", "x")] if reused else [])
