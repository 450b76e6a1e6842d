"""A graph that is called directly, with no guards before it, says what does not fit before it writes anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import symbolic_trace

import ferrite
from ferrite.artifact.compiled import CompiledGraph
from tests.behaviour.compare import STRICT

HOSTS = ("python", "native")


def work(x: Tensor, w: Tensor) -> Tensor:
    x.mul_(2)
    return (x.t() @ w).relu() + 1


def compiled_graphs(
    function: Callable[..., Any], *inputs: Any, host: str, dynamic: bool = False, **options: Any
) -> list[CompiledGraph]:
    """What compiling a function and calling it once made."""
    made: list[CompiledGraph] = []
    with ferrite.watch_graphs(made.append):
        chosen = {**STRICT, "host": host, **options}
        torch.compile(function, backend="ferrite", dynamic=dynamic, options=chosen)(*inputs)
    return made


X, W = torch.randn(6, 4), torch.randn(6, 5)
BAD: dict[str, tuple[Callable[[Tensor, Tensor], list[Any]], type[Exception], str]] = {
    "shape": (lambda x, w: [x[:5], w], RuntimeError, r"f32\[6, 4\], found f32\[5, 4\]"),
    "rank": (lambda x, w: [x.view(-1), w], RuntimeError, r"f32\[6, 4\], found f32\[24\]"),
    "dtype": (lambda x, w: [x, w.double()], RuntimeError, r"f32\[6, 5\], found f64\[6, 5\]"),
    "device": (lambda x, w: [x.to("meta"), w], RuntimeError, "a tensor on meta"),
    "stride": (lambda x, w: [x.t().contiguous().t(), w], RuntimeError, r"found f32\[6, 4\].stride\(1, 6\)"),
    "layout": (lambda x, w: [x, w.to_sparse()], RuntimeError, "sparse"),
    "kind": (lambda x, w: [x, 3], RuntimeError, "found a int"),
    "fewer": (lambda x, w: [x], TypeError, "takes 2 arguments, found 1"),
    "more": (lambda x, w: [x, w, w], TypeError, "takes 2 arguments, found 3"),
}


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("name", BAD)
def test_wrong_arguments(name: str, host: str) -> None:
    (graph,) = compiled_graphs(work, X.clone(), W, host=host)
    make, error, words = BAD[name]
    x = X.clone()
    with pytest.raises(error, match=words):
        graph(make(x, W))
    assert torch.equal(x, X)
    (result,) = graph([x, W])
    torch.testing.assert_close(result, work(X.clone(), W))


@pytest.mark.parametrize("host", HOSTS)
def test_a_tuple_is_no_list(host: str) -> None:
    (graph,) = compiled_graphs(work, X.clone(), W, host=host)
    with pytest.raises(TypeError, match="one list"):
        graph((X, W))  # type: ignore[arg-type]


@pytest.mark.parametrize("host", HOSTS)
def test_sizes_that_change_have_to_agree(host: str) -> None:
    (graph,) = compiled_graphs(lambda x, w: (x.t() @ w).relu(), X, W, host=host, dynamic=True)
    kinds = [entry.type for entry in graph.program.inputs]
    x, w = torch.randn(9, 3), torch.randn(9, 5)
    symbols = [kind.removeprefix("Sym(").removesuffix(")") for kind in kinds if kind.startswith("Sym(")]
    types = [kind for kind in kinds if not kind.startswith("Sym(")]
    assert len(symbols) == 3
    assert len(types) == 2
    fixed = dict(zip([*_names(types[0]), *_names(types[1])], [*x.shape, *w.shape], strict=True))
    assert fixed.keys() == set(symbols)

    def given(first: Tensor, second: Tensor) -> list[Any]:
        tensors = iter((first, second))
        return [fixed[kind[4:-1]] if kind.startswith("Sym(") else next(tensors) for kind in kinds]

    (result,) = graph(given(x, w))
    torch.testing.assert_close(result, (x.t() @ w).relu())
    with pytest.raises(RuntimeError, match="should be"):
        graph(given(x, w[:8]))
    with pytest.raises(RuntimeError, match="should be"):
        graph(given(x, w.t().contiguous().t()))


def halves(x: Tensor) -> Tensor:
    x.mul_(2)
    return x.view(2, -1).softmax(-1) + 1 if x.shape[0] % 2 == 0 else x.sin()


@pytest.mark.parametrize("mode", ["normal", "serialize"])
@pytest.mark.parametrize("host", HOSTS)
def test_sizes_satisfy_what_the_trace_assumed(host: str, mode: str) -> None:
    *_, graph = compiled_graphs(halves, torch.randn(6), host=host, dynamic=True, compile_mode=mode)
    for size, words in ((7, r"Eq\(Mod\(s\d+, 2\), 0\), found s\d+ = 7"), (0, r"s\d+ >= 2, found s\d+ = 0")):
        x = torch.ones(size)
        with pytest.raises(RuntimeError, match=f"sizes should satisfy {words}"):
            graph([size, x])
        assert torch.equal(x, torch.ones(size))
    x = torch.randn(10)
    expected = halves(x.clone())
    torch.testing.assert_close(graph([10, x])[0], expected)


def _names(kind: str) -> list[str]:
    return kind.partition("[")[2].removesuffix("]").split(", ")


def test_strides_do_not_matter_where_nothing_is_stepped_over() -> None:
    (graph,) = compiled_graphs(lambda x, w: (x + w).relu(), torch.randn(1, 4), torch.randn(1, 4), host="native")
    odd = torch.randn(8).as_strided((1, 4), (100, 1))
    (result,) = graph([odd, odd])
    torch.testing.assert_close(result, (odd + odd).relu())


def test_a_graph_that_was_compiled_without_dynamo_checks_too() -> None:
    function = ferrite.backend.compile(symbolic_trace(lambda x: x.sin() + 1), [X], options=STRICT)
    torch.testing.assert_close(function(X), X.sin() + 1)
    with pytest.raises(RuntimeError, match="should be"):
        function(X[:3])
    with pytest.raises(RuntimeError, match="should be"):
        function(X.double())
    torch.testing.assert_close(function(X), X.sin() + 1)
