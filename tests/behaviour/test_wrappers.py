"""AOTAutograd's wrappers around an inference graph are left out where they do nothing, and only there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.behaviour.compare import STRICT, equal


def is_wrapped(call: Callable[[], Any]) -> bool:
    """Whether a call passes through the functions in question."""
    seen = []

    def look(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.endswith("runtime_wrappers.py"):
            seen.append(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(before)
    return bool(seen)


def compiled(function: Callable[..., Any], *args: Any) -> Any:
    made = torch.compile(function, backend="ferrite", options=STRICT)
    made(*args)
    return made


@pytest.mark.parametrize("has_grad_mode", [False, True])
def test_plain_graph(has_grad_mode: bool) -> None:
    """Products in eager's library would note gradients if autograd were on: it is off inside, and on again behind."""
    weight, x = torch.randn(3, 4, requires_grad=True), torch.randn(2, 3)

    def function(x: Tensor) -> Tensor:
        return (x @ weight.detach()).sin()

    with torch.set_grad_enabled(has_grad_mode):
        made = compiled(function, x)
        assert not is_wrapped(lambda: made(x))
        result = made(x)
        assert torch.is_grad_enabled() == has_grad_mode
    assert not result.requires_grad
    assert torch.allclose(result, function(x))


def test_grad_mode_after_an_error() -> None:
    def function(x: Tensor, n: Tensor) -> Tensor:
        return x[n] * 2

    x = torch.randn(3)
    made = compiled(function, x, torch.tensor([1]))
    with pytest.raises(IndexError):
        made(x, torch.tensor([7]))
    assert torch.is_grad_enabled()
    assert equal(made(x, torch.tensor([2])), x[2:] * 2)


def write(x: Tensor) -> Tensor:
    x.add_(1)
    return x * 2


def alias(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.t(), x * 2


def switch(x: Tensor) -> Tensor:
    torch._C._set_grad_enabled(False)
    return x * 2


@pytest.mark.parametrize("function", [write, alias, switch])
def test_graphs_that_need_them(function: Callable[..., Any]) -> None:
    try:
        with torch.enable_grad():
            made = compiled(function, torch.ones(2, 3))
            assert is_wrapped(lambda: made(torch.ones(2, 3)))
    finally:
        torch.set_grad_enabled(True)


def test_custom_op() -> None:
    with torch.library._scoped_library("wrappers", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")

        def function(x: Tensor) -> Tensor:
            return torch.ops.wrappers.twice(x) + 1

        made = compiled(function, torch.ones(2))
        assert is_wrapped(lambda: made(torch.ones(2)))


def test_autocast() -> None:
    def function(x: Tensor) -> Tensor:
        return x @ x

    x = torch.randn(3, 3)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        made = compiled(function, x)
        assert is_wrapped(lambda: made(x))
        assert made(x).dtype is torch.bfloat16


def test_profiler_sees_the_graph() -> None:
    x = torch.randn(3)
    made = compiled(torch.sin, x)
    with torch.profiler.profile() as profile:
        made(x)
    assert any(event.name.startswith("ferrite graph") for event in profile.events())


def test_from_the_cache(tmp_path: Any) -> None:
    def function(x: Tensor) -> Tensor:
        return x.sin() + 1

    options = STRICT | {"cache": "on", "cache_dir": str(tmp_path)}
    x = torch.randn(3)
    for _ in range(2):
        torch._dynamo.reset()
        made = torch.compile(function, backend="ferrite", options=options)
        assert equal(made(x), function(x))
        assert not is_wrapped(lambda: made(x))  # noqa: B023
