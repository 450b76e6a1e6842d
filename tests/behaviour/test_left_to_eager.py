"""Graphs that eager runs as captured: views only, writes that eager refuses, and dtypes that are traced otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import ferrite
from tests.behaviour.compare import equal


def reasons() -> list[str]:
    record = ferrite.last_record()
    assert record is not None
    return [decision.reason for decision in record.decisions if decision.what == "compile"]


VIEWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "expand": lambda x: x.expand(3, -1, -1),
    "chain": lambda x: x.t()[1:].unsqueeze(0),
    "several": lambda x: x.split(2),
    "broadcast": lambda x: torch.broadcast_tensors(x, x[:1]),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", VIEWS)
def test_views_and_their_gradients_are_eagers(name: str, dynamic: bool) -> None:
    def outcome(function: Callable[..., Any]) -> tuple[list[Any], torch.Tensor]:
        x = torch.arange(12.0).reshape(4, 3).t().clone(memory_format=torch.preserve_format).requires_grad_()
        views = torch.utils._pytree.tree_leaves(function(x))
        assert all(view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for view in views)
        (gradient,) = torch.autograd.grad([view.sum() for view in views], x)
        return [(view.shape, view.stride(), view.storage_offset()) for view in views], gradient

    function = VIEWS[name]
    expected, found = outcome(function), outcome(torch.compile(function, backend="ferrite", dynamic=dynamic))
    assert reasons() == ["it only makes views of its inputs"]
    assert found[0] == expected[0]
    assert equal(found[1], expected[1])
    assert found[1].stride() == expected[1].stride()


def test_a_view_beside_other_work_is_compiled() -> None:
    compiled = torch.compile(lambda x: (x.t(), x + 1), backend="ferrite")
    x = torch.randn(2, 3)
    view, other = compiled(x)
    assert reasons() == []
    assert view.data_ptr() == x.data_ptr()
    assert equal(other, x + 1)


def test_a_loss_of_two_dtypes_has_the_dtype_of_eager() -> None:
    loss = lambda x, target: torch.nn.functional.soft_margin_loss(x, target, reduction="none") * 2
    compiled, target = torch.compile(loss, backend="ferrite", options={"strict": True}), torch.ones(5)
    x = torch.linspace(-2, 2, 5, dtype=torch.bfloat16, requires_grad=True)
    assert equal(compiled(x, target), loss(x, target))
    assert "another dtype" in reasons()[0]
    found, expected = (torch.autograd.grad(each(x, target).sum(), x)[0] for each in (compiled, loss))
    assert equal(found, expected)


REFUSED: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "logit_ of integers": (lambda x: x.logit_(), (torch.ones(3, dtype=torch.int64),)),
    "ldexp_ of integers": (lambda x: x.ldexp_(x), (torch.ones(3, dtype=torch.int64),)),
    "take into another dtype": (
        lambda x, i, out: torch.take(x, i, out=out),
        (torch.randn(3), torch.tensor([0]), torch.zeros(1, dtype=torch.float64)),
    ),
    "cat onto its input": (lambda x: torch.cat([x, x], out=x), (torch.randn(3),)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_write_that_eager_refuses_raises_the_same(name: str) -> None:
    function, arguments = REFUSED[name]
    with pytest.raises(RuntimeError) as expected:
        function(*[argument.clone() for argument in arguments])
    with pytest.raises(RuntimeError) as found:
        torch.compile(function, backend="ferrite")(*[argument.clone() for argument in arguments])
    assert str(found.value).splitlines()[0] == str(expected.value).splitlines()[0]


@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        pytest.param(lambda x, out: torch.add(x, 1, out=out), torch.float32, id="out"),
        pytest.param(lambda x, out: x.add_(out), torch.int64, id="integers that fit"),
        pytest.param(lambda x, out: x.sigmoid_(), torch.float32, id="floats"),
    ],
)
def test_writes_that_fit_are_compiled(function: Callable[..., Any], dtype: torch.dtype) -> None:
    x, out = torch.ones(3, dtype=dtype), torch.ones(3, dtype=dtype)
    expected = function(x.clone(), out.clone())
    assert equal(torch.compile(function, backend="ferrite")(x, out), expected)
    assert reasons() == []
