"""Dynamo's own store of whole functions (`caching_precompile`) with what Ferrite puts into it: a process that finds a
function there does not trace, and one that asks for something else does."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.precompile_context import PrecompileContext
from torch._dynamo.utils import counters
from torch.nn import functional

import ferrite
from ferrite import packaging
from tests.behaviour.child import run_python
from tests.cache.subject import with_inner


def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x @ w).softmax(-1)


def broken(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.sin(x @ w)
    torch._dynamo.graph_break()
    return y.softmax(-1)


def shared(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Its inputs are views of one memory and one is written to: such a graph is not stored."""
    x.add_(1)
    return x * w


def inputs(rows: int = 4, training: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x, w = torch.randn(rows, 5, generator=generator), torch.randn(5, 6, generator=generator)
    return x, w.requires_grad_(training)


def as_in_a_new_process(known: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, of which Dynamo knows nothing."""
    torch._dynamo.reset()
    PrecompileContext.clear()
    counters.clear()
    copy = types.FunctionType(known.__code__.replace(), known.__globals__, known.__name__)
    copy.__qualname__, copy.__module__ = known.__qualname__, known.__module__
    return copy


def traced() -> int:
    return counters["frames"]["ok"]


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("FERRITE_CACHE", "on")
    monkeypatch.setenv("FERRITE_CACHE_DIR", str(tmp_path / "ferrite"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torch"))
    with torch._dynamo.config.patch(caching_precompile=True):
        yield tmp_path / "torch" / "dynamo"
    PrecompileContext.clear()
    torch._dynamo.reset()


def kept(known: Callable[..., Any] = function, *values: torch.Tensor, **asked: Any) -> torch.Tensor:
    """Compiles, runs and stores; gives the result."""
    compiled = torch.compile(as_in_a_new_process(known), backend="ferrite", **asked)
    result = compiled(*(values or inputs()))
    if result.requires_grad:
        result.square().sum().backward()
    assert traced() > 0
    torch.compiler.save_cache_artifacts()
    return result


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_nothing_is_traced(training: bool) -> None:
    x, w = inputs(training=training)
    expected = kept(function, x, w)
    gradient, w.grad = w.grad, None
    compiled = torch.compile(as_in_a_new_process(function), backend="ferrite")
    found = compiled(x, w)
    assert counters["dynamo_cache"] == {"dynamo_cache_hit": 1}
    if training:
        found.square().sum().backward()
        assert torch.equal(w.grad, gradient)
    assert torch.equal(found, expected)
    assert traced() == 0
    assert not counters["ferrite"]


def test_guards_are_kept() -> None:
    """Other sizes, another dtype, another mode: traced again, and right; what was loaded is still used."""
    expected = kept()
    compiled = torch.compile(as_in_a_new_process(function), backend="ferrite")
    for number, (x, w) in enumerate((inputs(7), [value.double() for value in inputs()], inputs(training=True)), 1):
        torch.testing.assert_close(compiled(x, w), function(x, w))
        assert traced() == number
    assert torch.equal(compiled(*inputs()), expected)
    assert traced() == 3


def test_sizes_that_change() -> None:
    """What the trace after Dynamo assumed of sizes is among the guards."""

    def dynamic(x: torch.Tensor) -> torch.Tensor:
        return x.view(-1, 2).softmax(-1)

    kept(dynamic, torch.randn(6, 5), dynamic=True)
    compiled = torch.compile(as_in_a_new_process(dynamic), backend="ferrite", dynamic=True)
    for rows in (6, 8, 10):
        x = torch.randn(rows, 5)
        torch.testing.assert_close(compiled(x), dynamic(x))
    assert traced() == 0


def test_graph_break() -> None:
    expected = kept(broken)
    compiled = torch.compile(as_in_a_new_process(broken), backend="ferrite")
    assert torch.equal(compiled(*inputs()), expected)
    assert traced() == 0


def test_graph_that_is_not_stored() -> None:
    base = torch.randn(8)
    kept(shared, base[:4], base[2:6])
    compiled = torch.compile(as_in_a_new_process(shared), backend="ferrite")
    base = torch.ones(8)
    assert torch.equal(compiled(base[:4], base[2:6]), torch.tensor([4.0, 4.0, 2.0, 2.0]))
    assert traced() == 1


def _without_mkldnn() -> Any:
    return torch.backends.mkldnn.flags(enabled=False)


OTHERWISE = {
    "option": ({"backend": "ferrite", "options": {"host": "python"}}, nullcontext),
    "option that looks": ({"backend": "ferrite", "options": {"keep_text": True}}, nullcontext),
    "no cache": ({"backend": "ferrite", "options": {"cache": "off"}}, nullcontext),
    "backend": ({"backend": "eager"}, nullcontext),
    "pass": ({"backend": "ferrite"}, lambda: ferrite.register_pass("post_grad", with_inner)),
    "setting": ({"backend": "ferrite"}, _without_mkldnn),
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_another_thing_is_asked_for(name: str) -> None:
    """Dynamo finds the function by its name: Ferrite does not give it out."""
    kept()
    asked, surroundings = OTHERWISE[name]
    with surroundings():
        compiled = torch.compile(as_in_a_new_process(function), **asked)
        torch.testing.assert_close(compiled(*inputs()), function(*inputs()))
    assert counters["dynamo_cache"]["dynamo_cache_error"] == 1
    assert traced() == 1


def test_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    kept()
    fields = packaging.fields_of_machine() | {"cpu": "with other features"}
    monkeypatch.setattr(packaging, "fields_of_machine", lambda: fields)
    compiled = torch.compile(as_in_a_new_process(function), backend="ferrite")
    torch.testing.assert_close(compiled(*inputs()), function(*inputs()))
    assert traced() == 1


@pytest.mark.parametrize("damage", ["cut", "emptied", "changed"])
def test_damaged_store(store: Path, damage: str) -> None:
    """PyTorch's store has no digest; what Ferrite put into it has none to itself either, but the objects do."""
    kept()
    (entry,) = store.glob("*/entry")
    data = entry.read_bytes()
    at = data.index(b"\x7fELF") + 64
    bad = {"cut": data[: len(data) // 2], "emptied": b"", "changed": data[:at] + b"\xff" * 8 + data[at + 8 :]}
    entry.write_bytes(bad[damage])
    compiled = torch.compile(as_in_a_new_process(function), backend="ferrite")
    torch.testing.assert_close(compiled(*inputs()), function(*inputs()))
    assert traced() == 1


def test_nobody_asked() -> None:
    """To read such a file by hand gives nothing."""
    kept()
    (artifact,) = PrecompileContext._backend_artifacts_by_key.values()
    make, arguments = artifact.__reduce__()
    with pytest.raises(RuntimeError, match="nobody asked"):
        make(*arguments)


SECOND = """
import torch
from torch._dynamo.utils import counters
from tests.cache.test_precompiled import function, inputs
compiled = torch.compile(function, backend="ferrite")
x, w = inputs(training=True)
result = compiled(x, w)
result.square().sum().backward()
numbers = (*result.flatten().tolist(), *w.grad.flatten().tolist())
print(dict(counters["frames"]), dict(counters["dynamo_cache"]), hash(numbers))
torch.compiler.save_cache_artifacts()
"""


@pytest.mark.long
def test_second_process(tmp_path: Path) -> None:
    """The first traces and stores, the second needs no tool and traces nothing, and both find the same numbers."""
    variables = {
        "FERRITE_CACHE": "on",
        "FERRITE_CACHE_DIR": str(tmp_path / "ferrite"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "torch"),
        "TORCH_CACHING_PRECOMPILE": "1",
        "PYTHONHASHSEED": "0",
    }
    first = run_python(SECOND, environment=variables).output.splitlines()[-1]
    second = run_python(SECOND, environment=variables | {"PATH": "/nonexistent"}).output.splitlines()[-1]
    assert "'ok': 1" in first
    assert first.split()[-1] == second.split()[-1]
    assert second.startswith("{} {'dynamo_cache_hit': 1}")


def test_an_operator_that_does_something_else_now() -> None:
    """Dynamo's guards do not look at it, so it is compared while the store is read."""

    def define(fake: Callable[..., Any]) -> None:
        operator = torch.library.custom_op("ferrite_test_stored::first", lambda x: x[:2] * 2, mutates_args=(),
                                           schema="(Tensor x) -> Tensor")  # fmt: skip
        operator.register_fake(fake)

    def calls(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.ops.ferrite_test_stored.first(x) + 1

    define(lambda x: x.new_empty(2, x.shape[1]))
    expected = kept(calls)
    for fake, hits in ((lambda x: x.new_empty(2, x.shape[1]), 0), (lambda x: torch.empty_like(x[:2]), 1)):
        define(fake)
        compiled = torch.compile(as_in_a_new_process(calls), backend="ferrite")
        assert torch.equal(compiled(*inputs()), expected)
        assert traced() == hits
