"""The lowering of whole graphs: writes in place, lists of views, what is stored and what is not, counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import ferrite
from ferrite.graph.query import calls
from ferrite.graph.strides import REALISED
from ferrite.graph.text import parse_graph
from ferrite.host.nodes import ALLOCATE, Call
from ferrite.lower.graph import Rules, lower
from ferrite.lower.library import library_of

aten = torch.ops.aten

OPTIONS = {"executor": "oracle", "strict": True, "products": "library"}


def assert_same_effect(function: Callable[..., Any], *inputs: torch.Tensor, eager: tuple[str, ...] = ()) -> None:
    """Results and what became of the inputs are eager's; nothing but `eager` stays there."""
    theirs, ours = [x.clone() for x in inputs], [x.clone() for x in inputs]
    expected = function(*theirs)
    found = torch.compile(function, backend="ferrite", options=OPTIONS)(*ours)
    record = ferrite.last_record()
    assert record is not None
    assert {fallback.op for fallback in record.fallbacks} == set(eager)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, check_stride=True)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, check_stride=True)


def launches(function: Callable[..., Any], *inputs: torch.Tensor, folder: Any) -> list[str]:
    """The kernel calls of the host program, as text."""
    options = {**OPTIONS, "debug": True, "debug_dir": str(folder)}
    torch.compile(function, backend="ferrite", options=options)(*inputs)
    texts = [path.read_text() for path in folder.rglob("*host*")]
    assert texts
    lines = [line.strip() for text in texts for line in text.splitlines()]
    return [line for line in lines if line.startswith("kernel_") and "(" in line]


# ---- writes in place


def test_an_update_writes_straight_into_its_parameter(tmp_path: Any) -> None:
    def update(p: torch.Tensor, g: torch.Tensor) -> None:
        p.sub_(g * 0.1)

    p, g = torch.randn(8), torch.randn(8)
    assert_same_effect(update, p, g)
    assert len(launches(update, p, g, folder=tmp_path)) == 1


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda x: x.copy_(x.flip(0)), id="reads what another point writes"),
        pytest.param(lambda x: x.copy_(x.sum()), id="reads everything"),
        pytest.param(lambda x: x.copy_(x[0].clone()), id="stretches a part of itself"),
        pytest.param(lambda x: (x + 1, x.mul_(2), x - 1), id="an old and a new value"),
        pytest.param(lambda x: x.t().add_(x * 1), id="through a view that is transposed"),
        pytest.param(lambda x: (x.add_(1), x.mul_(3))[1].sum(), id="twice"),
    ],
)
def test_a_write_never_disturbs_its_own_reads(function: Callable[..., Any]) -> None:
    assert_same_effect(function, torch.arange(16.0).view(4, 4))  # whole numbers: sums are exact in any order


def test_a_write_onto_a_part_that_overlaps_what_it_reads_is_left_to_eager() -> None:
    x = torch.arange(16.0).view(4, 4)
    assert_same_effect(lambda x: x[1:].copy_(x[:-1].neg()), x, eager=("aten.copy_.default",))


def test_a_value_that_is_read_after_the_write_is_stored_before() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        old = x * 3 + 1
        kept = old.view(2, 2)
        x.copy_(y)
        return kept + 1, old * x

    assert_same_effect(function, torch.randn(4), torch.randn(4))


def test_copies_convert_and_stretch() -> None:
    assert_same_effect(lambda x, y: x.copy_(y), torch.zeros(3, 4, dtype=torch.int32), torch.randn(4) * 9)
    assert_same_effect(lambda x, y: x.copy_(y), torch.zeros(3, 4, dtype=torch.bfloat16), torch.randn(3, 1))


def test_writes_under_dynamic_sizes() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(y)
        return x * 2

    compiled = torch.compile(function, backend="ferrite", dynamic=True, options=OPTIONS)
    for size in (5, 9, 3):
        theirs, y = torch.randn(size, 4), torch.randn(4)
        ours = theirs.clone()
        assert torch.equal(compiled(ours, y), function(theirs, y))
        assert torch.equal(ours, theirs)


# ---- lists of views


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda x: [part.abs() for part in x.split(2)], id="split"),
        pytest.param(lambda x: [part * 2 for part in x.split([1, 4], 1)], id="split with sizes"),
        pytest.param(lambda x: torch.stack(x.unbind(1)[1:], 1) + 1, id="unbind"),
        pytest.param(lambda x: x.chunk(2)[0] * x.chunk(2)[1].relu(), id="chunk"),
    ],
)
def test_parts_are_read_where_they_lie(function: Callable[..., Any]) -> None:
    assert_same_effect(function, torch.randn(6, 5))


def test_parts_that_are_returned_share_memory() -> None:
    x = torch.randn(6, 4)
    a, b = torch.compile(lambda v: v.split(3), backend="ferrite", options=OPTIONS)(x)
    assert a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert (b.storage_offset(), b.stride()) == (12, (4, 1))


def test_parts_that_a_library_reads_are_made_once() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        a, b = x.split(3, 1)
        return a @ b.t() + b @ a.t()

    assert_same_effect(function, torch.randn(4, 6), eager=("aten.mm.default",))


# ---- counts


def test_the_record_counts_what_was_lowered() -> None:
    torch.compile(lambda x: (x @ x).relu().median(), backend="ferrite", options=OPTIONS)(torch.randn(3, 3))
    record = ferrite.last_record()
    assert record is not None
    graph = record.phase("inference")
    assert graph is not None
    assert graph.lowered == 1
    assert {f.op: f.is_library for f in graph.fallbacks} == {"aten.mm.default": True, "aten.median.default": True}
    assert graph.share_lowered == 1.0


def test_library_ops_are_named() -> None:
    assert "matrix product" in (library_of("aten.addmm.default") or "")
    assert "linear algebra" in (library_of("aten.linalg_inv_ex.default") or "")
    assert library_of("aten.linalg_vector_norm.default") is None
    assert library_of("aten.add.Tensor") is None


def test_a_size_that_is_known_to_be_even_is_found_on_the_host() -> None:
    compiled = torch.compile(lambda x: x.reshape(2, -1) * 2, backend="ferrite", dynamic=True, options=OPTIONS)
    for size in (8, 12, 6):
        x = torch.randn(size)
        assert torch.equal(compiled(x), x.reshape(2, -1) * 2)


# ---- numbers that are symbolic

LABELS = torch.tensor([0, 3, 5])
NUMBERS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "of a variance": (lambda x, n: (*torch.var_mean(x.detach(), 1, correction=n), x.cos()), ()),
    "a label that is ignored": (lambda x, n: torch.nn.functional.cross_entropy(x, LABELS, ignore_index=n), ()),
    "a row of padding": (lambda x, n: torch.nn.functional.embedding(LABELS, torch.cat([x, x]), padding_idx=n), ()),
    "an exponent": (lambda x, n: (x.detach().pow(n), x * n), ()),
    "an order, which code depends on": (lambda x, n: torch.polygamma(n, x), ("aten.polygamma.default",)),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_may_be_symbolic(name: str) -> None:
    function, eager = NUMBERS[name]
    compiled = torch.compile(function, backend="ferrite", dynamic=True, options=OPTIONS)
    x = torch.linspace(0.5, 3, 18).reshape(3, 6)
    for number in (3, 4):
        results = []
        for call in (function, compiled):
            given = x.clone().requires_grad_()
            made = call(given, number)
            parts = (made,) if isinstance(made, torch.Tensor) else made
            sum((part * part).sum() for part in parts if part.requires_grad).backward()
            results.append([given.grad, *(part.detach() for part in parts)])
        torch.testing.assert_close(results[1], results[0], check_stride=True)
        record = ferrite.last_record()
        assert record is not None
        assert {fallback.op for fallback in record.fallbacks} <= set(eager)


def test_what_a_pass_marks_is_in_memory() -> None:
    """As its fake value lies: here channels last. Without the mark its two readers compute it again."""
    text = """def graph(x: f32[2, 3, 4, 4].stride(48, 1, 12, 3)):
    add = aten.add.Tensor(x, 1)
    neg = aten.neg.default(add)
    sqrt = aten.sqrt.default(add)
    return (neg, sqrt)
"""
    allocated = []
    for marked in (False, True):
        module = parse_graph(text)
        (add,) = calls(module.graph, aten.add.Tensor)
        add.meta[REALISED] = marked
        steps = lower(module, rules=Rules(use_rows=True)).main.steps
        allocations = {step.result: step.args for step in steps if isinstance(step, Call) and step.target == ALLOCATE}
        allocated.append(allocations)
    assert allocated[0].keys() == {"neg", "sqrt"}
    assert allocated[1].keys() == {"add", "neg", "sqrt"}
    assert allocated[1]["add"] == ([2, 3, 4, 4], [48, 1, 12, 3])
