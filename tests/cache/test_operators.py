"""Graphs that call operators of users, or hold tensors: found again while those are what they were, and never after."""

from __future__ import annotations

import collections
import random
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters
from torch._library.custom_ops import CustomOpDef

import ferrite
from ferrite import caching, identity
from tests.behaviour.child import run_python

SCALE = [2.0]
HIT, NEW = {"hit": 1}, {"miss": 1, "saved": 1}


class Cached:
    """Compiles anew each time, with one folder; gives what a call gives, its gradient, and what the cache said."""

    def __init__(self, folder: Path) -> None:
        self.options = {"cache": "on", "cache_dir": str(folder)}

    def __call__(self, function: Callable[..., Any], training: bool = False) -> tuple[Any, Any, dict[str, int]]:
        torch._dynamo.reset()
        counters.clear()
        x = torch.arange(1.0, 5.0).requires_grad_(training)
        result = torch.compile(function, backend="ferrite", fullgraph=True, options=self.options)(x)
        if training:
            result.sum().backward()
        said = {name: n for name, n in counters["ferrite"].items() if name.startswith("graph_cache_")}
        return (
            result.detach().tolist(),
            x.grad.tolist() if training else None,
            {name.removeprefix("graph_cache_"): n for name, n in said.items()},
        )


@pytest.fixture
def cached(tmp_path: Path) -> Iterator[Cached]:
    yield Cached(tmp_path)
    identity.versions.clear()


def define(
    kernel: Callable[..., Any] = lambda x: x * 2,
    fake: Callable[..., Any] = torch.empty_like,
    backward: Callable[..., Any] = lambda ctx, gradient: gradient * 2,
    name: str = "scaled",
) -> CustomOpDef:
    """`ferrite_cache_op::scaled`, again."""

    def body(x: torch.Tensor) -> torch.Tensor:
        return kernel(x)

    operator = torch.library.custom_op(f"ferrite_cache_op::{name}", body, mutates_args=())
    operator.register_fake(lambda x: fake(x))
    operator.register_autograd(lambda ctx, gradient: backward(ctx, gradient))
    return operator


def calls(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.ferrite_cache_op.scaled(x) + 1


PLAIN = [3.0, 5.0, 7.0, 9.0]


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_a_graph_with_an_operator_is_found(cached: Cached, training: bool) -> None:
    gradient = [2.0] * 4 if training else None
    for said in (NEW, HIT, HIT):
        define()
        assert cached(calls, training) == (PLAIN, gradient, said)


def test_another_body_is_another_operator(cached: Cached) -> None:
    define()
    cached(calls)
    define(kernel=lambda x: x * 3)
    assert cached(calls) == ([4.0, 7.0, 10.0, 13.0], None, NEW)
    define()
    assert cached(calls) == (PLAIN, None, HIT)


def test_another_gradient_is_another_operator(cached: Cached) -> None:
    define()
    cached(calls, training=True)
    define(backward=lambda ctx, gradient: gradient * 5)
    assert cached(calls, training=True) == (PLAIN, [5.0] * 4, NEW)
    scale = [7.0]
    for factor, said in ((7.0, NEW), (7.0, HIT), (8.0, NEW)):
        scale[0] = factor
        define(backward=lambda ctx, gradient: gradient * scale[0])
        assert cached(calls, training=True) == (PLAIN, [factor] * 4, said)


def test_another_fake_kernel_is_another_operator(cached: Cached) -> None:
    """It says that the result is a column, so the sum of rows is one of columns."""
    sums = lambda x: torch.ops.ferrite_cache_op.scaled(x).sum(0) + 1
    define()
    assert cached(sums)[0] == 21.0
    define(kernel=lambda x: x.view(2, 2) * 2, fake=lambda x: x.new_empty(2, 2))
    assert cached(sums) == ([9.0, 13.0], None, NEW)


def test_globals_that_a_formula_reads(cached: Cached) -> None:
    for scale, said in ((2.0, NEW), (2.0, HIT), (3.0, NEW)):
        SCALE[0] = scale
        define(backward=lambda ctx, gradient: gradient * SCALE[0])
        assert cached(calls, training=True) == (PLAIN, [scale] * 4, said)


def reads_by_name(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    return torch.ops.ferrite_cache_op.inner(gradient)


def reads_by_text(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    return getattr(torch.ops.ferrite_cache_op, "".join(["in", "ner"]))(gradient)


@pytest.mark.parametrize("backward", [reads_by_name, reads_by_text])
def test_an_operator_that_only_a_formula_calls(cached: Cached, backward: Callable[..., Any]) -> None:
    """Its name stands in the code; or it is seen when the graph has been made."""

    def widened(x: torch.Tensor) -> torch.Tensor:
        return x.new_empty(x.shape, dtype=torch.float64)

    define(backward=backward)
    define(kernel=lambda x: x * 4, name="inner")
    for said in (NEW, HIT):
        assert cached(calls, training=True) == (PLAIN, [4.0] * 4, said)
    define(kernel=lambda x: x.double() * 6, fake=widened, name="inner")
    assert cached(calls, training=True) == (PLAIN, [6.0] * 4, NEW)
    assert cached(calls, training=True) == (PLAIN, [6.0] * 4, HIT)


def test_an_operator_that_changes_before_backward(cached: Cached) -> None:
    """The entry is stored at the first `backward()`, and says what the operators did when the graph was traced."""
    define(backward=reads_by_text)
    inner = define(kernel=lambda x: x * 4, name="inner")
    torch._dynamo.reset()
    x = torch.arange(1.0, 5.0, requires_grad=True)
    result = torch.compile(calls, backend="ferrite", options=cached.options)(x).sum()
    inner.register_fake(lambda x: x.new_empty(x.shape))
    result.backward()
    assert cached(calls, training=True) == (PLAIN, [4.0] * 4, NEW)


def test_state_without_a_text(cached: Cached) -> None:
    held = torch.full((), 2.0)
    define(kernel=lambda x: x * held)
    assert cached(calls) == (PLAIN, None, {"bypass": 1})
    assert "holds a tensor" in caching.latest().reason  # type: ignore[union-attr]


class Scales(list[float]):
    factor = 1.0


class Settings(collections.UserDict[str, float]):
    pass


STATE: dict[str, Any] = {}


def of_a_list(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    return gradient * STATE["held"].factor


def of_a_default(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    held = STATE["held"]
    return gradient * (held.default_factory(1.5) if isinstance(held, collections.defaultdict) else held["missing"])


@pytest.mark.parametrize(
    ("backward", "make"),
    [(of_a_list, lambda n: with_factor(n)), (of_a_default, lambda n: collections.defaultdict((int, float)[n])),
     (of_a_default, lambda n: Settings(missing=n))],
    ids=["of a list", "of a default", "of a mapping"],
)  # fmt: skip
def test_what_a_container_holds_beside_its_items(
    cached: Cached, backward: Callable[..., Any], make: Callable[[int], Any]
) -> None:
    for number, said in ((0, NEW), (0, HIT), (1, NEW)):
        STATE["held"] = make(number)
        define(backward=backward)
        assert cached(calls, training=True)[2] == said


def with_factor(number: int) -> Scales:
    made = Scales()
    made.factor = float(number)
    return made


@pytest.mark.parametrize("state", [random.Random(3), collections.deque([2.0])], ids=lambda state: type(state).__name__)
def test_state_that_a_type_of_c_keeps(cached: Cached, state: Any) -> None:
    STATE["held"] = state
    define(backward=lambda ctx, gradient: gradient * (1 if STATE["held"] else 2))
    assert cached(calls, training=True)[2] == {"bypass": 1}
    assert f"holds a {type(state).__name__}" in caching.latest().reason  # type: ignore[union-attr]


def test_an_operator_whose_code_cannot_be_read(cached: Cached) -> None:
    """It is cached if somebody says which version it is."""
    with torch.library._scoped_library("ferrite_cache_raw", "FRAGMENT") as library:
        library.define("scaled(Tensor x) -> Tensor")
        library.impl("scaled", lambda x: x * 2, "CompositeExplicitAutograd")
        torch.library.register_fake("ferrite_cache_raw::scaled", torch.empty_like, lib=library)
        raw = lambda x: torch.ops.ferrite_cache_raw.scaled(x) + 1
        assert cached(raw) == (PLAIN, None, {"bypass": 1})
        assert "ferrite_cache_raw.scaled.default has code that cannot be read" in ferrite.cache.explain()
        for name, version, said in (
            ("ferrite_cache_raw::scaled", "1", NEW), ("ferrite_cache_raw::scaled", "1", HIT),
            ("ferrite_cache_raw::scaled", "2", NEW), ("ferrite_cache_raw::scaled", None, {"bypass": 1}),
            ("ferrite_cache_raw", "1", HIT),
        ):  # fmt: skip
            ferrite.register_op_version(name, version)
            assert cached(raw) == (PLAIN, None, said)
        ferrite.register_op_version("ferrite_cache_raw", None)
        ferrite.register_op_version(torch.ops.ferrite_cache_raw.scaled, "2")
        assert cached(raw) == (PLAIN, None, HIT)


def test_a_kernel_from_elsewhere_makes_an_operator_unreadable(cached: Cached) -> None:
    define()
    with torch.library._scoped_library("ferrite_cache_op", "IMPL") as library:
        library.impl("scaled", lambda x: x * 3, "CPU")
        assert cached(calls) == ([4.0, 7.0, 10.0, 13.0], None, {"bypass": 1})
    assert cached(calls) == (PLAIN, None, NEW)


def test_versions_are_of_names() -> None:
    for wrong in (3, "a b", "mine::", "", torch.relu):
        with pytest.raises(TypeError, match="an operator is named by"):
            ferrite.register_op_version(wrong, "1")


def test_an_operator_that_writes(cached: Cached) -> None:
    def writes(factor: float) -> None:
        def body(x: torch.Tensor) -> None:
            x.mul_(factor)

        torch.library.custom_op("ferrite_cache_op::writes", body, mutates_args=("x",))

    def uses(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        torch.ops.ferrite_cache_op.writes(y)
        return y + 1

    for factor, said in ((2.0, NEW), (2.0, HIT), (3.0, NEW)):
        writes(factor)
        assert cached(uses) == ([(1 + n) * factor + 1 for n in range(1, 5)], None, said)


def test_operators_that_a_graph_does_not_call(cached: Cached) -> None:
    """Whatever they hold, and whatever became of it."""

    class Held:
        pass

    held = Held()
    gone = weakref.ref(held)
    del held
    define(kernel=lambda x: x * (2 if gone() is None else 3), name="unused")
    for said in (NEW, HIT):
        assert cached(lambda x: x * 2 + 1, training=True) == (PLAIN, [2.0] * 4, said)


# ---- tensors that graphs hold


def holding(tensor: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function whose graph holds a tensor: what Dynamo is told to take as it is."""
    constant = torch._dynamo.assume_constant_result(lambda: tensor)
    return lambda x: x * constant() + 1


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_a_tensor_that_a_graph_holds(cached: Cached, training: bool) -> None:
    for factors, said in (([2.0] * 4, NEW), ([2.0] * 4, HIT), ([2.0, 2.0, 2.0, 3.0], NEW)):
        expected = [n * factor + 1 for n, factor in zip(range(1, 5), factors, strict=True)]
        assert cached(holding(torch.tensor(factors)), training) == (expected, factors if training else None, said)


def test_how_a_held_tensor_lies_is_in_the_key(cached: Cached) -> None:
    matrix = torch.arange(16.0).view(4, 4)
    expected = cached(holding(matrix))
    assert expected[2] == NEW
    assert cached(holding(matrix.t().contiguous().t())) == (*expected[:2], NEW)
    assert cached(holding(matrix.double()))[2] == NEW
    assert cached(holding(matrix)) == (*expected[:2], HIT)


def test_a_held_tensor_is_read_in_each_call(cached: Cached) -> None:
    """After a hit as after a compile, and as in eager."""
    for said in (NEW, HIT):
        factors = torch.full((4,), 2.0)
        torch._dynamo.reset()
        counters.clear()
        call = torch.compile(holding(factors), backend="ferrite", options=cached.options)
        assert call(torch.ones(4)).tolist() == [3.0] * 4
        assert counters["ferrite"]["graph_cache_hit"] == said.get("hit", 0)
        factors.fill_(5.0)
        assert call(torch.ones(4)).tolist() == [6.0] * 4


def test_a_gradient_for_a_held_parameter(cached: Cached) -> None:
    for said in (NEW, HIT):
        factors = torch.nn.Parameter(torch.full((4,), 2.0))
        assert cached(holding(factors), training=True) == ([3.0, 5.0, 7.0, 9.0], [2.0] * 4, said)
        assert factors.grad is not None
        assert factors.grad.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_large_and_odd_tensors_are_not_held_by_an_entry(cached: Cached) -> None:
    for tensor, reason in ((torch.ones(1 << 19), "a large tensor"), (torch.ones(4) * 1j, "not plain")):
        tensor = tensor.conj()
        torch._dynamo.reset()
        call = torch.compile(holding(tensor), backend="ferrite", options=cached.options)
        assert torch.equal(call(torch.ones(1)), tensor + 1)
        found = caching.latest()
        assert found is not None
        assert (found.outcome, reason in found.reason) == ("bypass", True), found.reason


# ---- another process

PROGRAM = """
import sys
import torch
from ferrite import caching

FACTOR = float(sys.argv[1]) if len(sys.argv) > 1 else {factor}

@torch.library.custom_op("mine::scaled", mutates_args=())
def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * FACTOR

@scaled.register_fake
def _(x):
    return torch.empty_like(x)

scaled.register_autograd(lambda ctx, gradient: gradient * FACTOR)
x = torch.ones(3, requires_grad=True)
scaled_plus = torch.compile(lambda x: scaled(x) + 1, backend="ferrite")
scaled_plus(x).sum().backward()
print(caching.latest().outcome, x.grad.tolist())
"""


def test_another_process_finds_it_while_the_operator_is_the_same(tmp_path: Path) -> None:
    given = {"FERRITE_CACHE": "on", "FERRITE_CACHE_DIR": str(tmp_path)}
    for factor, outcome in ((2.0, "miss"), (2.0, "hit"), (3.0, "miss")):
        child = run_python(PROGRAM.replace("{factor}", str(factor)), environment=given)
        assert child.output.strip() == f"{outcome} {[factor] * 3}", child.errors
