"""How much memory a call needs: what the plan says is what torch's allocator and the block show. That models need no
more than in eager is tested with the models, and `make peak-memory` shows it.

Counted is what torch's CPU allocator gives and takes back during a call, by its own profiler, and the block of inner
buffers, which is memory from C's library.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ferrite
from bench.allocated import peak_of_tensors, profiled
from ferrite.artifact.compiled import CompiledGraph
from ferrite.artifact.doors import kept_memory
from ferrite.artifact.host_values import read_size
from ferrite.graph.text import split_type
from ferrite.loops.index import evaluate, free_atoms
from tests.behaviour.compare import STRICT


def chain(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(4):
        x = (x @ w).softmax(-1).t().contiguous()
    return x


def several_results(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = (x @ w).relu()
    z = (y @ w + x).tanh()
    return y, z.sum(-1), (z @ w).view(-1)[7:], x.t() * 2


def widths(x: Tensor, w: Tensor) -> Tensor:
    wide = F.gelu(torch.cat([x, x @ w, x], 1))
    return (wide[:, :64] @ w).sigmoid() + wide.amax(1, keepdim=True)


def measured(call: Callable[[], Any]) -> int:
    """The peak of one call, with the block that it keeps."""
    ferrite.release_memory()
    call()
    return peak_of_tensors(call) + kept_memory()


@pytest.mark.parametrize("function", [chain, several_results, widths], ids=lambda function: function.__name__)
def test_the_plan_says_what_is_measured(function: Callable[..., Any]) -> None:
    x, w = torch.randn(64, 64), torch.randn(64, 64)
    compiled = torch.compile(function, backend="ferrite", options=STRICT)
    with torch.no_grad():
        compiled(x, w)
        found = measured(lambda: compiled(x, w))
    record = ferrite.last_record()
    assert record is not None
    assert [graph.peak_memory for graph in record.graphs if graph.phase == "inference"] == [found]
    said = f"memory of a call: at most {found:,} bytes, {kept_memory():,} of them in the block"
    assert str(record).count(said) == 1


def library_calls(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """A convolution and attention, which give tensors of their own and need memory for themselves, and a sort."""
    images = x.view(1, 16, 16, 16)
    filters = w[:36].reshape(16, 16, 3, 3).contiguous()
    y = F.conv2d(images, filters).relu()
    q = (x @ w).view(1, 4, 64, 16)
    attended = F.scaled_dot_product_attention(q, q, q * 2)
    return y.sum((2, 3)), attended.sort(-1)[0].tanh()


def test_what_libraries_make_is_in_the_plan_and_what_they_take_for_themselves_is_told_apart() -> None:
    x, w = torch.randn(64, 64), torch.randn(64, 64)
    compiled = torch.compile(library_calls, backend="ferrite", options=STRICT)
    with torch.no_grad():
        compiled(x, w)
        _, (span,) = profiled(lambda: compiled(x, w))
    record = ferrite.last_record()
    assert record is not None
    graph = record.phase("inference")
    assert graph.peak_memory - graph.block_memory == span.without_own
    assert span.without_own < span.bytes <= span.without_own + max(span.own.values())
    takers = {step.split()[0] for step in span.own}
    assert "aten.convolution.default" in takers
    assert takers <= {
        "aten.convolution.default", "aten._scaled_dot_product_flash_attention_for_cpu.default", "aten.sort.default"
    }  # fmt: skip


def named_sizes(graph: CompiledGraph) -> list[str]:
    """The sizes that change, by the names that they have in the program, in order."""
    return [entry.type[len("Sym(") : -1] for entry in graph.program.inputs if entry.type.startswith("Sym(")]


def joined(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = (x @ w).relu()
    pairs = torch.cat([y, y + 1])
    return pairs.softmax(-1) @ w, pairs[1:-1].sum(0), (y @ w).t()


@pytest.mark.parametrize("function", [chain, widths, joined], ids=lambda function: function.__name__)
def test_where_sizes_change_the_plan_says_what_is_measured_for_each(function: Callable[..., Any]) -> None:
    compiled = torch.compile(function, backend="ferrite", options=STRICT)
    w = torch.randn(64, 64)
    for rows in (64, 2, 33, 200):
        if function is chain:  # whose rows and columns change places
            w = torch.randn(rows, rows)
        x = torch.randn(rows, w.shape[0])
        torch._dynamo.mark_dynamic(x, 0)
        for dim in (0, 1) if function is chain else ():
            torch._dynamo.mark_dynamic(w, dim)
            torch._dynamo.mark_dynamic(x, dim)
        with torch.no_grad():
            compiled(x, w)
            found = measured(lambda: compiled(x, w))  # noqa: B023
        record = ferrite.last_record()
        assert record is not None
        assert record.graph_id == 0, "one graph for all sizes"
        entry = record.phase("inference")
        (name,) = named_sizes(entry.compiled)
        assert entry.compiled.peak_at({name: rows}) == found
    assert entry.peak_memory is None
    assert name in entry.changing_block
    assert f"memory of a call: {entry.changing_block} bytes in the block" in " ".join(str(record).split())
    with pytest.raises(ValueError, match=f"depends on {name}"):
        entry.compiled.peak_at({})


def test_known_sizes_have_one_peak_and_what_eager_makes_has_none() -> None:
    x = torch.randn(64, 64)
    with torch.no_grad():
        torch.compile(chain, backend="ferrite", options=STRICT)(x, x)
        entry = ferrite.last_record().phase("inference")
        assert entry.compiled.peak_at({}) == entry.peak_memory
        assert entry.changing_block == ""
        sorts = torch.compile(lambda x: x.tanh().sort()[0] @ x.t(), backend="ferrite", dynamic=True, options=STRICT)
        sorts(x)
    graph = ferrite.last_record().phase("inference").compiled
    assert graph.peak_at(dict.fromkeys(named_sizes(graph), 64)) is None


def four_products() -> Callable[[Tensor], Tensor]:
    w = torch.randn(64, 64)

    def function(x: Tensor) -> Tensor:
        for _ in range(4):
            x = (x @ w).tanh()
        return x

    return function


def test_a_backward_of_changing_sizes_needs_what_is_said_if_its_arguments_live_on() -> None:
    function = four_products()
    x = torch.randn(40, 64, requires_grad=True)
    torch._dynamo.mark_dynamic(x, 0)
    compiled = torch.compile(function, backend="ferrite", options=STRICT)
    compiled(x).square().mean().backward()
    graph = backward_graph().compiled
    (name,) = named_sizes(graph)
    for rows in (40, 7):
        args = [
            rows if entry.type.startswith("Sym(") else like(entry.type, name, rows) for entry in graph.program.inputs
        ]
        assert graph.peak_at({name: rows}) == measured(lambda: graph([*args]))  # noqa: B023


def like(kind: str, name: str, size: int) -> Tensor:
    """A tensor of a type in which one size has a name."""
    dtype, sizes, strides = split_type(kind)
    atoms = dict.fromkeys(free_atoms(read_size(name)), size)
    extents, steps = ([evaluate(read_size(each), atoms) for each in part or ()] for part in (sizes, strides))
    made = torch.empty(extents, dtype=dtype) if strides is None else torch.empty_strided(extents, steps, dtype=dtype)
    return made.normal_()


def backward_graph() -> Any:
    record = ferrite.last_record()
    assert record is not None
    return record.phase("backward")


def test_a_backward_frees_what_the_forward_saved_as_it_goes() -> None:
    function = four_products()
    x = torch.randn(64, 64, requires_grad=True)
    compiled = torch.compile(function, backend="ferrite", options=STRICT)

    def step() -> None:
        x.grad = None
        compiled(x).square().mean().backward()

    step()
    _, (_, span) = profiled(step)  # of a tensor that was there before, the profiler does not see the end
    graph = backward_graph()
    assert graph.peak_memory - graph.block_memory == span.bytes
    assert graph.peak_memory <= x.nbytes  # one gradient more than what the forward saved, at any step


def test_of_views_that_the_forward_saved_all_memory_goes_with_the_last() -> None:
    """The two halves of a product, each saved for the gradient of a weight of its own."""
    w, v = (torch.randn(64, 64, requires_grad=True) for _ in range(2))

    def function(x: Tensor) -> Tensor:
        left, right = (x @ x).tanh().split(32)
        return (left @ w).tanh() + (right @ v).tanh()

    x = torch.randn(64, 64)
    compiled = torch.compile(function, backend="ferrite", options=STRICT)

    def step() -> None:
        w.grad = v.grad = None
        compiled(x).square().mean().backward()

    step()
    _, (_, span) = profiled(step)
    graph = backward_graph()
    assert graph.peak_memory - graph.block_memory == span.bytes


def test_a_saved_tensor_that_nobody_reads_goes_at_once() -> None:
    """The statistics that a batch norm has updated are saved for its backward, which does not read them."""
    module = torch.nn.Sequential(torch.nn.Conv2d(4, 64, 1), torch.nn.BatchNorm2d(64), torch.nn.ReLU())
    compiled = torch.compile(module, backend="ferrite", options=STRICT)
    x = torch.randn(2, 4, 2, 2)

    def step() -> None:
        module.zero_grad(set_to_none=True)
        compiled(x).square().mean().backward()

    step()
    _, (_, span) = profiled(step)
    graph = backward_graph()
    assert graph.peak_memory - graph.block_memory == span.without_own
