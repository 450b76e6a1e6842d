"""Calls that fail in the middle, again and again: nothing that they took or made is kept."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ferrite.artifact import doors
from tests.behaviour.compare import STRICT
from tests.behaviour.test_direct_calls import compiled_graphs
from tests.behaviour.test_native_host import halve, refusals

SIDE = 64
TIMES = 2000
LIBRARY = {**STRICT, "products": "library"}


@torch.library.custom_op("behaviour_failing_calls::refuse", mutates_args=())
def refuse(x: Tensor) -> Tensor:
    raise KeyError("refused")


@refuse.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def in_the_dispatcher(x: Tensor, y: Tensor) -> Tensor:
    return torch.linalg.cholesky((x @ x.t()).neg() - y).sin() + 1


def in_python(x: Tensor, y: Tensor) -> Tensor:
    return refuse((x @ y).sin()) + 1


def in_a_kernel(x: Tensor, y: Tensor) -> Tensor:
    return (x @ y)[(y[0].abs() + SIDE).long()] * 2


def in_a_promise(x: Tensor, y: Tensor) -> Tensor:
    return halve((x @ y).sin(), 2).exp()


def in_a_product(x: Tensor, y: Tensor) -> Tensor:
    return ((x + 1) @ y).sin() @ x


FAILING: dict[Callable[..., Tensor], type[Exception]] = {
    in_the_dispatcher: torch.linalg.LinAlgError,
    in_python: KeyError,
    in_a_kernel: IndexError,
    in_a_promise: RuntimeError,
    in_a_product: RuntimeError,
}


def resident() -> int:
    gc.collect()
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1])


def failing(function: Callable[..., Tensor]) -> Callable[[Tensor], Any]:
    """A call of the compiled function that fails in it. A product never does behind Dynamo's guards: its graph is
    called without them, with a matrix of another size."""
    y = torch.randn(SIDE, SIDE)
    if function is not in_a_product:
        compiled = torch.compile(function, backend="ferrite", options=LIBRARY)
        return lambda x: compiled(x, y)
    (graph,) = compiled_graphs(function, y + 1, y, host="native", products="library")
    return lambda x: graph.body([x, y[:3]])


@pytest.mark.parametrize("function", FAILING, ids=lambda function: function.__name__)
def test_nothing_is_kept(function: Callable[..., Tensor]) -> None:
    call, error = failing(function), FAILING[function]

    def fail() -> weakref.ref[Tensor]:
        x = torch.randn(SIDE, SIDE)
        with pytest.raises(error):
            call(x)
        return weakref.ref(x)

    assert fail()() is None
    assert refusals() == []
    for _ in range(TIMES // 4):
        fail()
    before = resident()
    for _ in range(TIMES):
        fail()
    assert resident() - before < TIMES // 4  # pages: an input has four of them


def test_words_that_the_dispatcher_did_not_get(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two arguments cannot be made."""
    asked = []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)
    def fail(*_: Any) -> int:
        asked.append(1)
        return 1

    monkeypatch.setitem(doors.addresses(), "torch_new_string_handle", ctypes.cast(fail, ctypes.c_void_p).value)
    compiled = torch.compile(lambda x: torch.linalg.qr(x, mode="complete").R + 1, backend="ferrite", options=LIBRARY)
    x = torch.randn(4, 4)
    with pytest.raises(RuntimeError):
        compiled(x)
    assert asked
    died = weakref.ref(x)
    del x
    assert died() is None
    assert refusals() == []
