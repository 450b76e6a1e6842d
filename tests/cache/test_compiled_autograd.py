"""Backward graphs from the cache under compiled autograd; and Dynamo, which never traces Ferrite's own code."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo import compiled_autograd
from torch._dynamo.utils import clear_compilation_metrics, counters, get_compilation_metrics
from torch._functorch._aot_autograd.schemas import ViewAndMutationMeta
from torch.fx import GraphModule

import ferrite
from ferrite import caching
from ferrite.artifact import autograd_facts
from ferrite.artifact.backward_graph import pack_graph, unpack_graph
from tests.behaviour.compare import equal

PACKAGE = Path(ferrite.__file__).parent
Program = Callable[..., Any]


def through_cond(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.cond(y.sum() > 0, lambda x: (x * x).sin(), lambda x: x.exp(), (x,)) * y


def through_views(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x.t().reshape(-1) * 3).view(y.t().shape) @ y.softmax(0)


def through_numbers(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x * torch.tensor([0.5, 2.0, 4.0])).tanh() + y[:, ::2].sum()


PROGRAMS = {"cond": through_cond, "views": through_views, "numbers": through_numbers}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_cached_backward_under_compiled_autograd(tmp_path: Path, name: str, dynamic: bool) -> None:
    options = {"cache": "strict", "cache_dir": str(tmp_path)}
    made = torch.randn(4, 3), torch.randn(4, 3)
    for round_ in range(2):  # the second finds what the first stored
        torch._dynamo.reset()
        counters.clear()
        compiled = torch.compile(PROGRAMS[name], backend="ferrite", dynamic=dynamic, fullgraph=True, options=options)
        gradients = []
        for call in (PROGRAMS[name], compiled):
            x, y = (tensor.clone().requires_grad_() for tensor in made)
            under = round_ and call is compiled
            given = call(x, y).square().sum()
            with compiled_autograd._enable(torch.compile(backend="eager")) if under else nullcontext():
                given.backward()
            gradients.append((x.grad, y.grad))
        torch.testing.assert_close(gradients[1], gradients[0])
    assert counters["ferrite"]["graph_cache_hit"] == 1


def test_a_backward_graph_comes_back_as_it_was() -> None:
    inner = torch.fx.symbolic_trace(lambda x: x * 2)
    root = torch.nn.Module()
    root.inner, root.numbers = inner, torch.arange(6.0).view(2, 3).t()
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    held = graph.get_attr("numbers")
    body = graph.get_attr("inner")
    called = graph.call_function(torch.ops.higher_order.invoke_subgraph, (body, "name", x))
    sliced = graph.call_function(torch.ops.aten.index.Tensor, (held, [None, called]))
    made = graph.call_function(torch.ops.aten.full.default, ([2, 3], float("inf")), {"dtype": torch.float64})
    graph.output((sliced, None, [made, 3, 1j]))
    module = GraphModule(root, graph)
    again = unpack_graph(pack_graph(module))
    assert str(again.graph) == str(module.graph)
    assert str(again.inner.graph) == str(inner.graph)
    assert equal(again.numbers, root.numbers)
    assert again.numbers.stride() == root.numbers.stride()


# ---- Dynamo and Ferrite's own code


def backward_after_a_break(x: torch.Tensor) -> torch.Tensor | None:
    a = torch.sin(x)
    torch._dynamo.graph_break()
    torch.sigmoid(a).sum().backward()
    return x.grad


@pytest.mark.parametrize("host", ["native", "python"])
def test_dynamo_traces_nothing_of_ferrite(tmp_path: Path, caplog: pytest.LogCaptureFixture, host: str) -> None:
    """A compile in the midst of `backward()` runs where Dynamo looks at every frame."""
    options = {"cache": "strict", "cache_dir": str(tmp_path), "host": host}
    clear_compilation_metrics()
    for _ in range(2):
        torch._dynamo.reset()
        counters.clear()
        with warnings.catch_warnings(record=True) as warned, caplog.at_level(logging.WARNING):
            warnings.simplefilter("always")
            x = torch.randn(3, requires_grad=True)
            compiled = torch.compile(backward_after_a_break, backend="ferrite", options=options)
            torch.testing.assert_close(compiled(x), torch.sigmoid(x.sin()) * torch.sigmoid(-x.sin()) * x.cos())
        assert not [each for each in warned if "lru_cache" in str(each.message)]
    traced = [metrics.co_filename for metrics in get_compilation_metrics()]
    assert __file__ in traced
    assert not [name for name in traced if name is not None and PACKAGE in Path(name).parents]
    assert counters["ferrite"]["graph_cache_hit"] == 2
    assert not [entry for entry in caplog.records if entry.name.startswith("ferrite")]


def test_what_could_not_be_read_again_is_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Facts that are packed into something else, as a trace of `pack` once did."""
    pack = autograd_facts.pack

    def wrongly(value: Any) -> Any:
        return ["tuple"] if isinstance(value, ViewAndMutationMeta) else pack(value)

    monkeypatch.setattr(autograd_facts, "pack", wrongly)
    kept = {"cache": "on", "cache_dir": str(tmp_path)}
    compiled = torch.compile(lambda x: x.sin() + 1, backend="ferrite", options=kept)
    assert equal(compiled(torch.zeros(3)), torch.ones(3))
    assert not list(tmp_path.rglob("graphs/*/*"))
    latest = caching.latest()
    assert latest is not None
    assert "not stored: not what AOTAutograd knows" in latest.reason
    torch._dynamo.reset()
    with pytest.raises(Exception, match="not what AOTAutograd knows"):
        torch.compile(lambda x: x.sin() + 1, backend="ferrite", options=kept | {"cache": "strict"})(torch.zeros(3))
