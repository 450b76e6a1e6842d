"""Grad modes, autocast, default dtype, dispatch modes: honoured inside, and left as found by a compile."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.behaviour.compare import STRICT, assert_same, compare, equal


def affine(x: Tensor, w: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, w).relu() * 2


def leaves() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)


def state() -> tuple[Any, ...]:
    """Every global switch that a compile might touch."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_float32_matmul_precision(),
        torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(),
        torch.is_anomaly_enabled(),
        torch.get_num_threads(),
    )


OUTSIDE: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "plain": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast_half": lambda: torch.autocast("cpu", torch.float16),
    "autocast_off_inside": lambda: torch.autocast("cpu", enabled=False),
    "enable_grad": torch.enable_grad,
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    "default_device": lambda: torch.device("cpu"),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_mode_around_the_call(name: str) -> None:
    x, w = leaves()
    compiled = torch.compile(affine, backend="ferrite", fullgraph=True, options=STRICT)
    with OUTSIDE[name]():
        before = state()
        found = compiled(x, w)
        assert state() == before
        expected = affine(x, w)
    assert_same(found, expected, "result")


@pytest.mark.parametrize("name", ["plain", "autocast", "enable_grad"])
def test_mode_around_the_call_while_training(name: str) -> None:
    x, w = leaves()
    compiled = torch.compile(affine, backend="ferrite", fullgraph=True, options=STRICT)
    gradients = []
    for function in (compiled, affine):
        with OUTSIDE[name]():
            y = function(x, w)
        before = state()
        gradients.append(torch.autograd.grad(y.float().sum(), (x, w)))
        assert state() == before
    assert_same(gradients[0], gradients[1], "gradient")


def test_modes_alternate_between_calls() -> None:
    compiled = torch.compile(affine, backend="ferrite", fullgraph=True, options=STRICT)
    x, w = leaves()
    for name in ("plain", "no_grad", "autocast", "inference_mode", "plain", "autocast_half", "no_grad"):
        with OUTSIDE[name]():
            assert_same(compiled(x, w), affine(x, w), name)


INSIDE: dict[str, Callable[[Tensor, Tensor], Any]] = {}


def inside(function: Callable[[Tensor, Tensor], Any]) -> Callable[[Tensor, Tensor], Any]:
    INSIDE[function.__name__] = function
    return function


@inside
def no_grad_for_a_part(x: Tensor, w: Tensor) -> Any:
    with torch.no_grad():
        scale = (x @ w).amax()
    return (x @ w) / scale, scale


@inside
def enable_grad_within_no_grad(x: Tensor, w: Tensor) -> Any:
    with torch.no_grad():
        a = x @ w
        with torch.enable_grad():
            b = x * 2
    return a, b


@inside
def set_grad_enabled(x: Tensor, w: Tensor) -> Any:
    with torch.set_grad_enabled(False):
        a = x.sum()
    return x @ w * a


@inside
def autocast_for_a_part(x: Tensor, w: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        y = x @ w
        with torch.autocast("cpu", enabled=False):
            z = y.float() @ w
    return y, z, x @ w


@inside
def autocast_and_no_grad(x: Tensor, w: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        s = torch.nn.functional.linear(x, w)
    return x * s.float()


@inside
def detached(x: Tensor, w: Tensor) -> Any:
    return x.detach() @ w, (x @ w).detach()


@inside
def reads_the_modes(x: Tensor, w: Tensor) -> Any:
    y = x @ w
    return y, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), y.requires_grad


@pytest.mark.parametrize("name", INSIDE)
def test_mode_within_the_function(name: str) -> None:
    with torch.no_grad():
        compare(INSIDE[name], *(leaf.detach() for leaf in leaves()))


@pytest.mark.parametrize("name", INSIDE)
def test_mode_within_the_function_while_training(name: str) -> None:
    compare(INSIDE[name], *leaves(), training=True)


def test_grad_mode_that_the_function_leaves_switched() -> None:
    def function(x: Tensor) -> Tensor:
        y = x * 2
        torch.set_grad_enabled(False)
        return y + 1

    x = torch.randn(3, requires_grad=True)
    try:
        found = torch.compile(function, backend="ferrite", options=STRICT)(x)
        assert not torch.is_grad_enabled()
        torch.set_grad_enabled(True)
        expected = function(x)
        assert not torch.is_grad_enabled()
    finally:
        torch.set_grad_enabled(True)
    assert_same(found, expected, "result")


def test_inference_mode_inside() -> None:
    """Dynamo cannot leave inference mode inside a graph: the frame runs in pieces, results are eager's."""

    def function(x: Tensor) -> Tensor:
        with torch.inference_mode():
            y = x.sin()
        return y

    x = torch.randn(3)
    found, expected = torch.compile(function, backend="ferrite", options=STRICT)(x), function(x)
    assert equal(found, expected)


def test_result_of_inference_mode_is_refused_by_autograd_as_in_eager() -> None:
    compiled = torch.compile(lambda x: x * 2, backend="ferrite", options=STRICT)
    with torch.inference_mode():
        y = compiled(torch.ones(3))
    w = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):
        (w * y).sum()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_default_dtype(dtype: torch.dtype) -> None:
    def function(x: Tensor) -> Tensor:
        return x + torch.ones(3) * torch.arange(3) / 2 + torch.rand(3)

    torch.set_default_dtype(dtype)
    result = compare(function, torch.ones(3))
    assert torch.get_default_dtype() is dtype
    assert result.dtype is dtype


def test_default_dtype_changes_between_calls() -> None:
    def function(x: Tensor) -> Tensor:
        return x + torch.ones(3)

    compiled = torch.compile(function, backend="ferrite", options=STRICT)
    x = torch.ones(3, dtype=torch.int64)
    for dtype in (torch.float32, torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        assert compiled(x).dtype is dtype


def test_deterministic_algorithms() -> None:
    def function(x: Tensor, index: Tensor, y: Tensor) -> Tensor:
        return x.index_put((index,), y, accumulate=True) + torch.empty(3, 4)

    torch.use_deterministic_algorithms(True)
    result = compare(function, torch.zeros(3, 4), torch.tensor([0, 0, 2]), torch.randn(3, 4))
    assert torch.are_deterministic_algorithms_enabled()
    assert result.isnan().all()  # torch.empty is filled with NaN in this mode


class Counting(TorchDispatchMode):
    """Counts the ops that reach it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Doubling(TorchFunctionMode):
    """Changes what `torch.add` means."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.add else result


@pytest.mark.parametrize("training", [False, True])
def test_dispatch_mode_around_compile_and_call(training: bool) -> None:
    """Whatever Dynamo decides to do under such a mode, the answer is eager's and the mode stays in place."""
    x, w = (leaf if training else leaf.detach() for leaf in leaves())
    compiled = torch.compile(affine, backend="ferrite", options=STRICT)
    with Counting():
        before = state()
        found = compiled(x, w)
        if training:
            found.sum().backward()
        assert state() == before
    assert equal(found, affine(x, w))


def test_dispatch_mode_sees_the_ops_of_a_function_compiled_before() -> None:
    x, w = (leaf.detach() for leaf in leaves())
    compiled = torch.compile(affine, backend="ferrite", options=STRICT)
    compiled(x, w)
    with Counting() as mode:
        found = compiled(x, w)
    assert equal(found, affine(x, w))
    assert mode.seen


def test_function_mode_around_the_call() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.add(x, 1).sin()

    x = torch.randn(3)
    compiled = torch.compile(function, backend="ferrite", options=STRICT)
    plain = compiled(x)
    with Doubling():
        before = state()
        found, expected = compiled(x), function(x)
        assert state() == before
    assert equal(found, expected)
    assert not equal(found, plain)


def test_recursion_limit_is_restored() -> None:
    import sys

    before = sys.getrecursionlimit()

    def deep(x: Tensor) -> Tensor:
        for _ in range(300):
            x = x + 1
        return x

    compare(deep, torch.zeros(2), calls=1)
    assert sys.getrecursionlimit() == before


def test_user_tensors_are_not_touched_by_a_compile() -> None:
    module = torch.nn.Linear(3, 3)
    x = torch.randn(2, 3)
    versions = [p._version for p in (*module.parameters(), x)]
    hooks = [len(p._backward_hooks or ()) for p in module.parameters()]
    torch.compile(module, backend="ferrite", options=STRICT)(x).sum().backward()
    assert [p._version for p in (*module.parameters(), x)] == versions
    assert [len(p._backward_hooks or ()) for p in module.parameters()] == hooks


def test_configuration_of_pytorch_is_left_as_found() -> None:
    from torch._dynamo import config as dynamo_config
    from torch._functorch import config as functorch_config

    before = dynamo_config.get_config_copy(), functorch_config.get_config_copy()
    x, w = leaves()
    torch.compile(affine, backend="ferrite", options=STRICT)(x, w).sum().backward()
    assert (dynamo_config.get_config_copy(), functorch_config.get_config_copy()) == before
