"""Patterns that become loops by a function of their own, when the graph is lowered (PM-6c)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import ferrite
from ferrite import registry
from ferrite.errors import Unsupported
from ferrite.graph.pattern.lowering import lowering_of
from ferrite.graph.pattern.traced import TracedPattern
from ferrite.graph.snapshot import take
from ferrite.graph.values import refresh
from ferrite.loops.dtypes import b8
from ferrite.lower.value import Tensor, apply, const, pointwise

X, Y = torch.randn(5, 7), torch.randn(5, 7)
EXAMPLES = [torch.randn(4, 4), torch.randn(4, 4)]


def search(x: Any, y: Any, k: float) -> Any:
    return torch.tanh(x * y) * k


def program(x: Any, y: Any) -> Any:
    return (torch.tanh(x * y) * 3.5).sum(1) + 1


class Handler:
    """Makes other loops than the ops would give: twice as much, so that it shows who made them."""

    def __init__(self) -> None:
        self.given: list[Any] = []

    def __call__(self, x: Any, y: Any, k: float) -> Any:
        self.given.append((x, y, k))
        return pointwise(lambda a, b: apply("mul", apply("mul", a, b), const(2 * k, a.dtype)), x, y, compute=x.dtype)

    def uuid(self) -> str:
        return "twice"


def refuses(x: Any, y: Any, k: float) -> Any:
    raise Unsupported("not today")


def traced(function: Any, *inputs: Any) -> GraphModule:
    return make_fx(lambda *given: [function(*given)], tracing_mode="fake")(*inputs)


def compiled(handler: Callable[..., Any], function: Any = program, dynamic: bool = False, **options: Any) -> Any:
    torch._dynamo.reset()
    with ferrite.register_pattern(search, None, EXAMPLES, scalars={"k": 0.3713}, lowering=handler, name="scaled"):
        run = torch.compile(function, backend="ferrite", dynamic=dynamic, options={"strict": True, **options})
        return run(X, Y)


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_function_makes_the_loops(dynamic: bool) -> None:
    handler = Handler()
    found = compiled(handler, dynamic=dynamic)
    torch.testing.assert_close(found, (X * Y * 7).sum(1) + 1)
    ((x, y, k),) = handler.given
    assert isinstance(x, Tensor)
    assert isinstance(y, Tensor)
    assert k == 3.5


def test_nothing_is_left_to_eager() -> None:
    compiled(Handler())
    record = ferrite.last_record()
    assert record is not None
    assert not record.fallbacks


@pytest.mark.parametrize("dynamic", [False, True])
def test_if_it_refuses_the_calls_run(dynamic: bool) -> None:
    torch.testing.assert_close(compiled(refuses, dynamic=dynamic), program(X, Y))
    record = ferrite.last_record()
    assert record is not None
    assert [fallback.reason for fallback in record.fallbacks if "invoke_subgraph" in fallback.op] == ["not today"]


def test_where_nothing_is_lowered_the_calls_run() -> None:
    handler = Handler()
    torch.testing.assert_close(compiled(handler, executor="eager"), program(X, Y))
    assert not handler.given


def test_a_function_that_fails_is_named() -> None:
    def fails(x: Any, y: Any, k: float) -> Any:
        raise KeyError("weights")

    with pytest.raises(Exception, match=r"lowering of the pattern scaled .* failed: KeyError"):
        compiled(fails)


def test_a_result_of_another_form_is_refused() -> None:
    def of_another_dtype(x: Any, y: Any, k: float) -> Any:
        return pointwise(lambda a, b: apply("lt", a, b), x, y, compute=x.dtype, result=b8)

    torch.testing.assert_close(compiled(of_another_dtype), program(X, Y))


def test_values_are_told_by_the_calls_and_never_by_the_function() -> None:
    """Propagation runs the graph that holds them."""
    handler = Handler()
    module = traced(program, X, Y)
    pattern = TracedPattern("scaled", search, None, EXAMPLES, scalars={"k": 0.3713}, lowering=handler)
    assert pattern.apply(module.graph) == 1
    (call,) = (node for node in module.graph.nodes if lowering_of(node))
    snapshot = take(module.graph)
    del call.meta["val"]
    refresh(module, snapshot)
    assert [tuple(value.shape) for value in call.meta["val"]] == [(5, 7)]
    module.recompile()
    torch.testing.assert_close(module(X, Y)[0], program(X, Y))
    assert not handler.given


def test_a_result_that_is_an_input_is_no_match() -> None:
    module = traced(lambda x: x.reshape(7, 5).sum(), X)
    pattern = TracedPattern("shaped", lambda x: x.reshape(7, 5), None, [X], lowering=lambda x: x)
    assert pattern.apply(module.graph) == 0


def test_two_results() -> None:
    def both(x: Any, y: Any) -> Any:
        product = x * y
        return product.tanh(), product.sigmoid()

    def loops(x: Any, y: Any) -> Any:
        parts = [partial(apply, op) for op in ("add", "sub")]
        return tuple(pointwise(part, x, y, compute=x.dtype) for part in parts)

    torch._dynamo.reset()
    with ferrite.register_pattern(both, None, EXAMPLES, lowering=loops):
        first, second = torch.compile(both, backend="ferrite", options={"strict": True})(X, Y)
    torch.testing.assert_close(first, X + Y)
    torch.testing.assert_close(second, X - Y)


def test_the_function_is_part_of_the_key() -> None:
    def digest(handler: Callable[..., Any]) -> str:
        with ferrite.register_pattern(search, None, EXAMPLES, scalars={"k": 0.3713}, lowering=handler, name="scaled"):
            return registry.digest()

    assert digest(refuses) == digest(refuses) != digest(Handler())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"replacement": None}, "needs a replacement"),
        ({"replacement": search, "lowering": refuses}, "needs a replacement"),
        ({"replacement": None, "lowering": refuses, "stage": "pre_grad"}, "needs the stage post_grad"),
    ],
)
def test_what_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TracedPattern("scaled", search, inputs=EXAMPLES, scalars={"k": 0.3713}, **settings)
