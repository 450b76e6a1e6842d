"""With rows of inner buffers at cache lines, values and visible strides are eager's, and both hosts agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import ferrite
from tests.behaviour.compare import compare
from tests.both_hosts import both_hosts

ON = {"padding": "on"}
NOTED: list[tuple[int, ...]] = []


@torch.library.custom_op("behaviour_padding::note", mutates_args=())
def note(x: Tensor) -> Tensor:
    NOTED.append(x.stride())
    return x.clone()


note.register_fake(torch.empty_like)


def choices() -> dict[str, tuple[bool, str]]:
    """What was decided on each buffer of all graphs."""
    record = ferrite.last_record()
    assert record is not None
    return {c.subjects[0]: (c.taken, c.reason) for c in record.decisions if c.what == "padding"}


def padded() -> set[str]:
    return {name for name, (taken, _) in choices().items() if taken}


def heads(x: Tensor, w: Tensor) -> Tensor:
    """(9, 250) to 5 heads of 50: rows are cut, turned and put together again."""
    y = (x @ w).sigmoid()
    parts = y.view(3, 3, 5, 50).transpose(1, 2)
    made = torch.matmul(parts, parts.transpose(2, 3)).softmax(-1) @ parts
    return made.transpose(1, 2).reshape(9, 250) @ w + y @ w


def in_parts(x: Tensor, w: Tensor) -> Tensor:
    first, second, third = (x @ w).sigmoid().split([100, 100, 50], 1)
    return first @ second.t() + third.sum(1)


# What is made, and the buffers that have gaps. Rows of 250 numbers are 15 5/8 lines.
CASES: dict[str, tuple[Callable[..., Any], set[str]]] = {
    "one product after the other": (lambda x, w: (x @ w).sigmoid() @ w.t(), {"sigmoid"}),
    "turned": (lambda x, w: (x @ w).sigmoid().t() @ x, {"sigmoid"}),
    "heads": (heads, {"sigmoid"}),
    "parts": (in_parts, {"sigmoid"}),
    "parts of rows": (lambda x, w: (x @ w).sigmoid()[2:7, 3:9] @ x[:6], {"sigmoid"}),
    "every other": (lambda x, w: (x @ w).sigmoid()[::2, ::2] @ w[:125], {"sigmoid"}),
    "one row": (lambda x, w: ((x @ w).sigmoid()[3] @ w.t(), (x @ w).sigmoid() @ w.t()), {"sigmoid", "sigmoid_1"}),
    "joined": (lambda x, w: torch.cat([(x @ w).sin(), (w @ w).cos()]) @ w.t(), {"cat"}),
    "joined into longer rows": (lambda x, w: torch.cat([x, (x @ w)[:, :9]], 1).exp() @ w.new_ones(259, 4), {"exp"}),
    "reduced": (lambda x, w: ((x.exp() @ w), x.exp().sum(0), x.exp().sum(1), x.exp().mean()), {"exp"}),
    "normalised": (lambda x, w: functional.layer_norm(x, (250,)) @ w, {"native_layer_norm_0"}),
    "softmax": (lambda x, w: functional.softmax(x @ w, -1) @ w.t(), {"_softmax"}),
    "repeated": (lambda x, w: torch.bmm(x.tanh().expand(4, 9, 250), w.expand(4, 250, 250)), {"tanh"}),
    "gathered": (lambda x, w: x.tanh()[torch.tensor([3, 1, 3])] @ w + x.tanh()[0], {"index", "mm"}),
    "scattered": (lambda x, w: x.tanh().index_add(0, torch.tensor([1, 2]), x[:2]) @ w, {"index_add"}),
    "rows across their ends": (lambda x, w: ((y := x.tanh()) @ w, y.reshape(250, 9) @ x), set()),
    "results": (lambda x, w: ((y := x.tanh()) @ w, y.t(), y[2:5]), set()),
    "a convolution": (lambda x, w: functional.conv1d(x.tanh(), w[:9].new_ones(4, 9, 3)), set()),
    "a convolution of a sum": (lambda x, w: functional.conv1d(x.expand(4, 9, 250).sum(0), x.new_ones(4, 9, 3)), set()),
    "a custom op": (lambda x, w: note(x.tanh()) @ w, set()),
    "sorted": (lambda x, w: x.tanh().sort(1).values @ w, set()),
    "looked at": (lambda x, w: x.tanh().as_strided((9, 3), (250, 1), 2) @ x[:3], set()),
    "written to": (lambda x, w: x.sin().mul_(2).add_(1) @ w, {"add"}),
    "few candidates too many": (lambda x, w: (torch.isin(y := x.tanh(), w.flatten()), y @ w), {"tanh"}),
    "doubles": (lambda x, w: x.double().tanh() @ w.double(), {"tanh", "_to_copy_1"}),
    "halves": (lambda x, w: x.bfloat16().tanh() @ w.bfloat16(), set()),
    "of three dimensions": (lambda x, w: torch.bmm(x.view(3, 3, 250).tanh(), w.expand(3, 250, 250)), {"tanh"}),
}


def inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(9, 250) / 4, torch.randn(250, 250) / 16


@pytest.mark.parametrize("name", CASES)
def test_inference(name: str) -> None:
    function, expected = CASES[name]
    with torch.no_grad(), both_hosts() as compared:
        compare(function, *inputs(), calls=1, options=ON, exact=False)
    assert padded() == expected, choices()
    assert compared


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("a custom op", "halves", "doubles")])
def test_training(name: str) -> None:
    """What the backward reads is not padded by the forward; what it makes itself may be."""
    x, w = inputs()
    with both_hosts():
        compare(CASES[name][0], x.requires_grad_(), w.requires_grad_(), training=True, calls=1, options=ON, exact=False)


def test_a_gradient_inside_the_backward_is_padded() -> None:
    first, second = torch.nn.Linear(20, 250), torch.nn.Linear(250, 20)
    module = torch.nn.Sequential(first, torch.nn.Tanh(), second)
    compare(module, torch.randn(9, 20), training=True, calls=1, options=ON, exact=False)
    record = ferrite.last_record()
    assert record is not None
    found = {g.phase: [c.taken for c in g.decisions if c.what == "padding"] for g in record.graphs}
    assert not any(found["forward"])
    assert any(found["backward"])


@pytest.mark.parametrize("training", [False, True])
def test_sizes_that_change(training: bool) -> None:
    """How many rows there are may change, but not how long they are."""
    module = torch.nn.Sequential(torch.nn.Linear(20, 250), torch.nn.Sigmoid(), torch.nn.Linear(250, 7))
    with torch.set_grad_enabled(training), both_hosts() as compared:
        compiled = torch.compile(module, backend="ferrite", dynamic=True, options={"strict": True, **ON})
        for rows in (4, 2, 9, 64):
            for batch in (2, 3):
                x = torch.randn(batch, rows, 20)
                found, expected = compiled(x), module(x)
                torch.testing.assert_close(found, expected, check_stride=True)
                if training:
                    gradients = torch.autograd.grad(expected.square().sum(), [*module.parameters()])
                    ours = torch.autograd.grad(found.square().sum(), [*module.parameters()])
                    torch.testing.assert_close(ours, gradients, check_stride=True)
    assert len(compared) >= 8
    assert training or padded() == {"sigmoid"}


def test_rows_whose_length_changes_are_left_alone() -> None:
    compiled = torch.compile(lambda x, w: x.tanh() @ w, backend="ferrite", dynamic=True, options={"strict": True, **ON})
    for length in (250, 63):
        x, w = torch.randn(9, length), torch.randn(length, 5)
        torch.testing.assert_close(compiled(x, w), x.tanh() @ w)
    assert {reason for _, reason in choices().values()} == {"the length of its rows changes"}


def test_a_custom_op_is_given_dense_rows() -> None:
    NOTED.clear()
    with torch.no_grad():
        compare(lambda x, w: note((x @ w).tanh()) @ note((x @ w).amax(0, keepdim=True).expand(9, 250)).t(), *inputs(),
                calls=1, options=ON, exact=False)  # fmt: skip
    assert NOTED[:2] == NOTED[2:]


def test_off_by_default() -> None:
    with torch.no_grad():
        compare(CASES["heads"][0], *inputs(), calls=1, exact=False)
    assert choices() == {}


def test_memory_is_that_of_the_plan() -> None:
    """The gaps are in it: 9 rows of 1024 bytes, but for the last gap."""
    peaks = []
    for options in ({}, ON):
        with torch.no_grad():
            compare(lambda x, w: x.tanh() @ w, *inputs(), calls=1, options=options, exact=False)
        record = ferrite.last_record()
        assert record is not None
        (graph,) = (graph for graph in record.graphs if graph.phase == "inference")
        peaks.append(graph.block_memory)
        torch._dynamo.reset()
    assert peaks == [-(-9 * 1000 // 64) * 64, -(-(9 * 1024 - 24) // 64) * 64]


def test_what_has_no_elements_has_no_gaps() -> None:
    """Ops without elements run in eager, and their strides follow those of what they are given."""
    functions = (
        lambda x: (x @ x.t()).sigmoid()[2:2].bool(),
        lambda x: functional.layer_norm(x[:0], x.shape[-1:]).rot90(),
    )
    for function in functions:
        with both_hosts():
            compare(function, torch.randn(63, 63), options=ON)
