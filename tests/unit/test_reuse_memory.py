"""Which results of kernels lie over operands, that they may, and that nobody sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ferrite
from ferrite.loops.text import parse_program
from ferrite.schedule.arrange import arrange
from ferrite.schedule.reuse_memory import overwritten

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
