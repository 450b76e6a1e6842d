"""An operator that is defined again under its name, as a cell of a notebook that is run twice does it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor

import ferrite
from ferrite import identity

BY_CUSTOM_OP = "behaviour_again::scale"
BY_LIBRARY = "behaviour_again_raw::scale"  # `custom_op` keeps a name for itself
Definer = Callable[[float, ExitStack], None]


# ---- the ways to define one; each gives `x` times a factor


def by_custom_op(factor: float, stack: ExitStack) -> None:
    def body(x: Tensor) -> Tensor:
        return x * factor

    operator = torch.library.custom_op(BY_CUSTOM_OP, body, mutates_args=())
    operator.register_fake(torch.empty_like)
    operator.register_autograd(lambda ctx, gradient: gradient * factor)


def by_custom_op_of_another_schema(factor: float, stack: ExitStack) -> None:
    """A further argument, and a further result."""

    def one(x: Tensor) -> Tensor:
        return x * factor

    def two(x: Tensor, more: float = 0.0) -> tuple[Tensor, Tensor]:
        return x * factor, x + more

    operator = torch.library.custom_op(BY_CUSTOM_OP, two if factor > 3 else one, mutates_args=())
    if factor > 3:
        operator.register_fake(lambda x, more=0.0: (torch.empty_like(x), torch.empty_like(x)))
        operator.register_autograd(lambda ctx, gradient, other: (gradient * factor + other, None))
    else:
        operator.register_fake(torch.empty_like)
        operator.register_autograd(lambda ctx, gradient: gradient * factor)


def in_library(library: torch.library.Library, factor: float, schema: str) -> None:
    library.define(f"scale{schema}")
    library.impl("scale", lambda x, *more: x * factor, "CPU")
    torch.library.register_fake(BY_LIBRARY, lambda x, *more: torch.empty_like(x), lib=library)
    torch.library.register_autograd(
        BY_LIBRARY,
        lambda ctx, gradient: gradient * factor if schema == SCHEMA else (gradient * factor, None),
        lib=library,
    )
    ferrite.register_op_version(BY_LIBRARY, f"{factor}")


SCHEMA, LONGER_SCHEMA = "(Tensor x) -> Tensor", "(Tensor x, int more=1) -> Tensor"


def by_fragment(factor: float, stack: ExitStack) -> None:
    library = torch.library.Library("behaviour_again_raw", "FRAGMENT")
    stack.callback(library._destroy)
    in_library(library, factor, SCHEMA)


def by_fragment_of_another_schema(factor: float, stack: ExitStack) -> None:
    library = torch.library.Library("behaviour_again_raw", "FRAGMENT")
    stack.callback(library._destroy)
    in_library(library, factor, LONGER_SCHEMA if factor > 3 else SCHEMA)


def by_scoped_library(factor: float, stack: ExitStack) -> None:
    in_library(stack.enter_context(torch.library._scoped_library("behaviour_again_raw", "DEF")), factor, SCHEMA)


DEFINERS: dict[str, Definer] = {
    "custom_op": by_custom_op,
    "custom_op, another schema": by_custom_op_of_another_schema,
    "fragment": by_fragment,
    "fragment, another schema": by_fragment_of_another_schema,
    "scoped library": by_scoped_library,
}


@pytest.fixture
def defined() -> Iterator[Callable[[Definer, float], None]]:
    """Defines the operator; what defined it before is gone."""
    stack = ExitStack()

    def define(definer: Definer, factor: float) -> None:
        stack.close()
        definer(factor, stack)

    yield define
    stack.close()
    identity.versions.clear()


def calls_custom_op(x: Tensor) -> Tensor:
    result = torch.ops.behaviour_again.scale(x.sin())
    return (result if isinstance(result, Tensor) else result[0] - result[1]) + 1


def calls_raw(x: Tensor) -> Tensor:
    return torch.ops.behaviour_again_raw.scale(x.sin()) + 1


def caller(kind: str) -> Callable[[Tensor], Tensor]:
    return calls_custom_op if kind.startswith("custom_op") else calls_raw


def outcome(function: Callable[..., Any], training: bool) -> list[Tensor]:
    x = torch.arange(1.0, 5.0, requires_grad=training)
    result = function(x)
    return [result.detach(), *(torch.autograd.grad(result.sum(), x) if training else ())]


def check(calls: Callable[[Tensor], Tensor], options: dict[str, Any], training: bool) -> str:
    """A function that is compiled anew does what eager does. Gives what the cache said."""
    expected = outcome(calls, training)
    torch._dynamo.reset()
    compiled = torch.compile(calls, backend="ferrite", fullgraph=True, options={"strict": True, **options})
    for _ in range(2):
        torch.testing.assert_close(outcome(compiled, training), expected)
    return ferrite.cache.explain().partition(":")[0]


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("host", ["native", "python"])
@pytest.mark.parametrize("kind", DEFINERS)
def test_an_operator_that_is_defined_again(kind: str, host: str, training: bool, defined: Any) -> None:
    for factor in (2.0, 5.0, 3.0):
        defined(DEFINERS[kind], factor)
        check(caller(kind), {"host": host}, training)


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("kind", DEFINERS)
def test_an_operator_that_is_defined_again_and_found(kind: str, training: bool, defined: Any, tmp_path: Path) -> None:
    """In the cache, when it does again what it did."""
    options = {"cache": "strict", "cache_dir": str(tmp_path)}
    said = []
    for factor in (2.0, 2.0, 5.0, 5.0, 2.0):
        defined(DEFINERS[kind], factor)
        said.append(check(caller(kind), options, training))
    assert said == ["miss", "hit", "miss", "hit", "hit"]


@pytest.mark.parametrize("host", ["native", "python"])
@pytest.mark.parametrize("kind", DEFINERS)
def test_an_operator_that_is_defined_again_under_a_compiled_function(kind: str, host: str, defined: Any) -> None:
    """As with `aot_eager`: a backward graph that was traced calls what has the name by then."""

    def outcomes(backend: str, options: dict[str, Any] | None) -> list[Any]:
        torch._dynamo.reset()
        defined(DEFINERS[kind], 2.0)
        compiled = torch.compile(caller(kind), backend=backend, options=options)
        x = torch.arange(1.0, 5.0, requires_grad=True)
        result = compiled(x)
        defined(DEFINERS[kind], 3.0)
        return [result.detach(), *torch.autograd.grad(result.sum(), x), *outcome(compiled, True)]

    expected = outcomes("aot_eager", None)
    torch.testing.assert_close(outcomes("ferrite", {"strict": True, "host": host}), expected)


@contextmanager
def broken_definition() -> Iterator[None]:
    """A scope in which the operator is there, and whose end takes it away."""
    with torch.library._scoped_library("behaviour_again_raw", "DEF") as library:
        in_library(library, 2.0, SCHEMA)
        yield


def test_an_operator_that_is_gone() -> None:
    """What asks for it by name says so, and what is defined then is found."""
    with broken_definition():
        check(calls_raw, {}, training=False)
    torch._dynamo.reset()
    compiled = torch.compile(calls_raw, backend="ferrite", options={"strict": True})
    with pytest.raises(Exception, match="scale"):
        compiled(torch.ones(3))
    with broken_definition():
        check(calls_raw, {}, training=True)
    identity.versions.clear()
