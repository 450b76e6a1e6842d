"""Control flow inside the graph: cond, while_loop, scan, map, associative_scan, regions, alone and nested."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from functorch.experimental.control_flow import map as map_over
from torch import Tensor
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.fx import Graph
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils import _pytree as pytree

import ferrite
from ferrite import pipeline
from ferrite.failure import FerriteError
from tests.behaviour.compare import STRICT, compare, equal
from tests.both_hosts import both_hosts

FLOWS: dict[str, Callable[[Tensor, Tensor], Any]] = {}
DIFFERENTIABLE: list[str] = []


def flow(*, differentiable: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        FLOWS[function.__name__] = function
        if differentiable:
            DIFFERENTIABLE.append(function.__name__)
        return function

    return enter


@flow(differentiable=True)
def cond_on_data(x: Tensor, w: Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda x: (x @ w).sin(), lambda x: x @ w - 1, (x,)) * 2


@flow(differentiable=True)
def cond_several_results(x: Tensor, w: Tensor) -> Any:
    return torch.cond(x.sum() < 0, lambda x, w: (x + w, x * w), lambda x, w: (x - w, x / w), (x, w))


@flow(differentiable=True)
def cond_within_cond(x: Tensor, w: Tensor) -> Any:
    def inner(x: Tensor) -> Tensor:
        return torch.cond(x.mean() > 0.1, lambda x: x.cos(), lambda x: x.exp(), (x,)) @ w

    return torch.cond(x.sum() > 0, inner, lambda x: x.sin() @ w, (x,))


@flow(differentiable=False)
def while_counting(x: Tensor, w: Tensor) -> Any:
    def go_on(i: Tensor, x: Tensor) -> Tensor:
        return i < 4

    def body(i: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return i + 1, (x @ w).sin()

    return while_loop(go_on, body, (torch.tensor(0), x))


@flow(differentiable=False)
def while_zero_times(x: Tensor, w: Tensor) -> Any:
    return while_loop(lambda i, x: i < 0, lambda i, x: (i + 1, x * w), (torch.tensor(0), x))


@flow(differentiable=False)
def while_with_cond_inside(x: Tensor, w: Tensor) -> Any:
    def body(i: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return i + 1, torch.cond(i % 2 == 0, lambda x: x @ w, lambda x: x.sin(), (x,))

    return while_loop(lambda i, x: i < 3, body, (torch.tensor(0), x))


@flow(differentiable=True)
def scan_recurrence(x: Tensor, w: Tensor) -> Any:
    def step(carry: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        new = (carry @ w + row).tanh()
        return new, new * 2

    return scan(step, torch.zeros(4), x)


@flow(differentiable=True)
def map_rows(x: Tensor, w: Tensor) -> Any:
    return map_over(lambda row, w: (row @ w).sin(), x, w)


@flow(differentiable=False)
def associative_sum(x: Tensor, w: Tensor) -> Any:
    return associative_scan(lambda a, b: a + b, x, 0, combine_mode="generic") @ w


@torch.compiler.nested_compile_region
def region(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).sin() + 1


@flow(differentiable=True)
def region_twice(x: Tensor, w: Tensor) -> Any:
    return region(region(x, w), w)


@flow(differentiable=True)
def region_within_cond(x: Tensor, w: Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda x: region(x, w), lambda x: x * 2, (x,)) + 1


def square() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 4), torch.randn(4, 4)


@pytest.mark.parametrize(("dynamic", "sign"), [(False, 1), (False, -1), (True, 1)])
@pytest.mark.parametrize("name", FLOWS)
def test_inference(name: str, dynamic: bool, sign: int) -> None:
    x, w = square()
    compare(FLOWS[name], x.abs() * sign, w, dynamic=dynamic)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_training(name: str, dynamic: bool) -> None:
    x, w = square()
    leaves = x.abs().requires_grad_(), w.requires_grad_()
    compare(FLOWS[name], *leaves, dynamic=dynamic, training=True, exact=False)


def _refusals() -> list[str]:
    record = ferrite.last_record()
    assert record is not None
    return [choice.reason for choice in record.decisions if choice.what == "native host"]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", FLOWS)
def test_both_hosts(name: str, dynamic: bool) -> None:
    """The program around the flow runs natively and calls the bodies in Python: the same bits as all in Python."""
    x, w = square()
    needs_grad = name in DIFFERENTIABLE
    with both_hosts() as compared:
        compiled = torch.compile(FLOWS[name], backend="ferrite", fullgraph=True, dynamic=dynamic, options=STRICT)
        for sign in (1, -1):
            with torch.no_grad():
                compiled(x.abs() * sign, w)
        assert _refusals() == []
        if needs_grad:
            leaves = x.abs().requires_grad_(), w.clone().requires_grad_()
            result = compiled(*leaves)
            sum(part.sum() for part in pytree.tree_leaves(result)).backward()
            assert _refusals() == []
    assert len(compared) == 2 + 2 * needs_grad


@pytest.mark.parametrize("name", ["cond_on_data", "while_counting", "scan_recurrence", "map_rows", "region_twice"])
def test_through_bytes(name: str) -> None:
    compare(FLOWS[name], *square(), options={"compile_mode": "serialize"})


def test_both_branches_of_one_compiled_cond() -> None:
    function = FLOWS["cond_on_data"]
    compiled = torch.compile(function, backend="ferrite", fullgraph=True, options=STRICT)
    x, w = square()
    for sign in (1, -1, 1):
        assert equal(compiled(x.abs() * sign, w), function(x.abs() * sign, w))


class Gated(torch.nn.Module):
    """Bodies that read parameters and buffers from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("shift", torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: self.linear(x) + self.shift, lambda x: self.linear(x).relu(), (x,))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("sign", [1, -1])
def test_bodies_read_parameters_and_buffers(sign: int, training: bool) -> None:
    x = torch.randn(3, 4).abs() * sign
    with torch.set_grad_enabled(training):
        compare(Gated(), x.requires_grad_(training), training=training, exact=not training)


def test_loop_over_parameters() -> None:
    class Repeat(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)
            self.register_buffer("times", torch.tensor(3))

        def forward(self, x: Tensor) -> Tensor:
            body = lambda i, x: (i + 1, self.linear(x))
            return while_loop(lambda i, x: i < self.times, body, (torch.tensor(0), x))[1]

    with torch.no_grad():
        compare(Repeat(), torch.randn(2, 4))


def test_what_autograd_cannot_trace_runs_in_eager() -> None:
    """PyTorch fails on a region used both inside a branch and outside (aot_eager too); the answer is right anyway."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: region(x, w), lambda x: x * 2, (x,)) + region(x, w)

    x, w = square()
    found = torch.compile(function, backend="ferrite", fullgraph=True)(x, w)
    assert equal(found, function(x, w))
    assert "repeated_subgraph0" in ferrite.last_record().failures[0]
    torch._dynamo.reset()
    with pytest.raises(FerriteError, match="repeated_subgraph0"):
        torch.compile(function, backend="ferrite", fullgraph=True, options=STRICT)(x, w)


@pytest.mark.parametrize("size", [2, 5])
def test_symbolic_predicate(size: int) -> None:
    def function(x: Tensor) -> Tensor:
        return torch.cond(x.shape[0] > 3, lambda x: x.sin(), lambda x: x.cos(), (x,))

    compare(function, torch.randn(size, 2), dynamic=True)


def test_unknown_size_inside_a_branch() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x[x > 0].sum(), lambda x: x.sum(), (x,))

    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        compare(function, torch.randn(5).abs())


def test_dropout_inside_a_branch() -> None:
    def function(x: Tensor) -> Tensor:
        drop = lambda x: torch.nn.functional.dropout(x, 0.5)
        return torch.cond(x.sum() > 0, drop, lambda x: x.sin(), (x,))

    compare(function, torch.randn(16).abs())


def test_error_inside_the_taken_branch_is_eagers() -> None:
    def function(x: Tensor, index: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x, i: x[i], lambda x, i: x[i] * 2, (x, index))

    compiled = torch.compile(function, backend="ferrite", fullgraph=True, options=STRICT)
    x = torch.ones(3)
    assert equal(compiled(x, torch.tensor([2])), torch.ones(1))
    with pytest.raises(IndexError):
        compiled(x, torch.tensor([7]))


# Passes reach every graph, once.


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, list[Graph]]]:
    """A pass in every graph stage that notes which graphs it saw."""
    seen: dict[str, list[Graph]] = {"PRE_GRAD": [], "JOINT": [], "POST_GRAD": []}
    for stage, graphs in seen.items():

        def probe(graph: Graph, graphs: list[Graph] = graphs) -> int:
            graphs.append(graph)
            return 0

        if stage == "PRE_GRAD":
            monkeypatch.setattr(pipeline, "plan", lambda *_, probe=probe, **__: ((probe,), ()))
        else:
            monkeypatch.setattr(pipeline, stage, (probe,))
    return seen


def nested(x: Tensor, w: Tensor) -> Any:
    def inner(x: Tensor) -> Tensor:
        return torch.cond(x.mean() > 0, lambda x: x.cos(), lambda x: x.exp(), (x,))

    return torch.cond(x.sum() > 0, inner, lambda x: x.sin(), (x,)) @ w


# Of `nested`: the main graph, two branches of the outer cond, two of the inner one.
GRAPHS = 5


def test_a_pass_sees_every_graph_once_in_inference(probes: dict[str, list[Graph]]) -> None:
    torch.compile(nested, backend="ferrite", fullgraph=True, options=STRICT)(*square())
    for stage, graphs in probes.items():
        assert len(graphs) == GRAPHS, stage
        assert len({id(graph) for graph in graphs}) == GRAPHS, stage


def test_a_pass_sees_children_before_parents(probes: dict[str, list[Graph]]) -> None:
    torch.compile(nested, backend="ferrite", fullgraph=True, options=STRICT)(*square())
    for stage, graphs in probes.items():
        conditionals = [
            sum("cond" in str(node.target) for node in graph.nodes if node.op != "get_attr") for graph in graphs
        ]
        assert conditionals[-1] == 1, stage  # the main graph is last
        assert conditionals.index(1) >= 2, stage  # the bodies of the inner cond come before the branch that holds it


def test_a_pass_sees_every_graph_once_in_training(probes: dict[str, list[Graph]]) -> None:
    x, w = (leaf.requires_grad_() for leaf in square())
    torch.compile(nested, backend="ferrite", fullgraph=True, options=STRICT)(x, w).sum().backward()
    for stage, graphs in probes.items():
        assert max(Counter(id(graph) for graph in graphs).values()) == 1, stage
    record = ferrite.last_record()
    assert record is not None
    for phase in ("forward", "backward"):
        names = [run.graph for run in record.phase(phase).passes if run.name == "probe"]
        assert "main" in names
        assert len(names) == len(set(names)) > 2


def test_a_region_used_twice_is_one_graph_and_one_function(probes: dict[str, list[Graph]]) -> None:
    torch.compile(FLOWS["region_twice"], backend="ferrite", fullgraph=True, options=STRICT)(*square())
    assert len(probes["POST_GRAD"]) == 2


def test_all_stages_off_still_compiles() -> None:
    compare(nested, *square(), options={"disable": [stage for stage in pipeline.STAGES if stage != "lower"]})


@pytest.mark.parametrize("body", ["true", "false"])
def test_result_of_a_branch_that_is_its_input(body: str) -> None:
    """PyTorch refuses a branch that returns its operand, whatever the backend; so does eager under compile."""
    branches = {body: lambda x: x, "true" if body == "false" else "false": lambda x: x + 1}

    def function(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, branches["true"], branches["false"], (x,))

    with pytest.raises(RuntimeError):
        torch.compile(function, backend="ferrite", fullgraph=True)(torch.ones(3))


# ---- bodies that are given other strides than those of their trace


def scan_over(dim: int) -> Callable[..., Any]:
    def along(x: Tensor, init: Tensor) -> Any:
        return scan(lambda carry, part: (carry * 0.5 + part, (carry + part).exp()), init, x, dim=dim)

    return along


def map_over_slices(x: Tensor, w: Tensor) -> Any:
    return map_over(lambda part, w: (part * w).sin() + part.flip(0), x, w)


def cond_on_transposed_fft(x: Tensor, w: Tensor) -> Any:
    """What the FFT gives lies otherwise than tracing says, where sizes are dynamic."""
    spectrum = torch.fft.fft2(x.t()).real
    return torch.cond(x.sum() > 0, lambda s: s.exp() + s.t().contiguous().t(), lambda s: s - 1, (spectrum,))


STRIDED: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Tensor, Tensor]]]] = {
    "scan_second": (scan_over(1), lambda: (torch.randn(3, 4, 5), torch.randn(3, 5))),
    "scan_last": (scan_over(2), lambda: (torch.randn(3, 4, 5), torch.randn(3, 4))),
    "scan_transposed": (scan_over(0), lambda: (torch.randn(4, 3, 5).transpose(1, 2), torch.randn(3, 5).t())),
    "scan_of_one": (scan_over(1), lambda: (torch.randn(3, 1, 5), torch.randn(5, 3).t())),
    "scan_expanded": (scan_over(0), lambda: (torch.randn(4, 3, 1).expand(4, 3, 5), torch.randn(3, 5))),
    "map_transposed": (map_over_slices, lambda: (torch.randn(4, 3, 5).permute(2, 1, 0), torch.randn(3, 4))),
    "map_stepped": (map_over_slices, lambda: (torch.randn(2, 4, 6)[:, :, ::2], torch.randn(6, 4)[::2].t())),
    "cond_fft": (cond_on_transposed_fft, lambda: (torch.randn(4, 6), torch.randn(1))),
}


@pytest.mark.parametrize("options", [{}, {"host": "python"}], ids=["native", "python"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", STRIDED)
def test_body_is_given_other_strides(name: str, dynamic: bool, options: dict[str, Any]) -> None:
    function, make = STRIDED[name]
    compare(function, *make(), dynamic=dynamic, options=options, exact=False)


@pytest.mark.parametrize("name", ["scan_second", "map_transposed"])
def test_body_is_given_other_strides_while_training(name: str) -> None:
    function, make = STRIDED[name]
    leaves = [leaf.requires_grad_() for leaf in make()]
    compare(function, *leaves, training=True, exact=False)


# ---- flex_attention: eager calls the graphs under vmap. PyTorch has no backward of it for the CPU.


def causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def heads(length: int) -> list[Tensor]:
    return [torch.randn(2, 4, length, 16) for _ in range(3)]


def attend_with_bias(bias: Tensor, slope: Tensor) -> Callable[..., Tensor]:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return s + bias[h] * (i - j) + torch.tanh(slope[b, h])

        return flex_attention(query, key, value, score_mod=score, kernel_options={"BLOCK_M": 32})

    return attend


def attend_in_blocks(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    length = query.shape[2]
    mask = create_block_mask(causal, None, None, length, length, device="cpu", BLOCK_SIZE=32)
    return flex_attention(query, key, value, block_mask=mask)


def attend_in_given_blocks(mask: BlockMask) -> Callable[..., Tensor]:
    return lambda query, key, value: flex_attention(query, key, value, block_mask=mask, enable_gqa=False)


FLEX: dict[str, Callable[[], Callable[..., Tensor]]] = {
    "bias": lambda: attend_with_bias(torch.randn(4), torch.randn(2, 4)),
    "blocks": lambda: attend_in_blocks,
    "given blocks": lambda: attend_in_given_blocks(create_block_mask(causal, None, None, 64, 64, device="cpu")),
}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", FLEX)
def test_flex_attention(name: str) -> None:
    compare(FLEX[name](), *heads(64), exact=False)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_of_other_lengths() -> None:
    attend = attend_with_bias(torch.randn(4), torch.randn(2, 4))
    compiled = torch.compile(attend, backend="ferrite", dynamic=True, options=STRICT)
    for length in (64, 96, 33):
        inputs = heads(length)
        torch.testing.assert_close(compiled(*inputs), attend(*inputs))
