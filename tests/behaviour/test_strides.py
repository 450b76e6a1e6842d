"""Strides that the user sees are eager's, whatever passes do inside the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph

import ferrite
from ferrite import pipeline
from ferrite.decisions import Decision
from ferrite.report.record import GraphRecord, Record
from tests.behaviour.compare import compare, equal

aten = torch.ops.aten


def of_rank(rank: int) -> Tensor:
    return torch.randn(2, 3, 4, 5, 6)[(0,) * (5 - rank)].clone()


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x + 1,
    "transposed": lambda x: x.transpose(0, -1) + 1,
    "reversed": lambda x: x.permute(*reversed(range(x.dim()))).sin(),
    "expanded": lambda x: (x + 1).unsqueeze(1).expand(x.shape[0], 3, *x.shape[1:]),
    "expanded_then_computed": lambda x: x.unsqueeze(1).expand(x.shape[0], 3, *x.shape[1:]) * 2,
    "sliced": lambda x: (x + 1)[..., ::2],
    "size_one": lambda x: x.sum(0, keepdim=True).transpose(0, -1) + 1,
    "size_one_view": lambda x: (x + 1)[:1].transpose(0, 1),
    "no_elements": lambda x: (x + 1)[:0].transpose(0, -1),
    "no_elements_computed": lambda x: x[:0].transpose(0, -1) * 2,
    "reduced": lambda x: x.transpose(0, -1).sum(-1),
    "concatenated": lambda x: torch.cat([x.transpose(0, -1), x.transpose(0, -1)], 1),
    "stacked_views": lambda x: torch.stack([x.t() if x.dim() == 2 else x.movedim(0, -1)] * 2, -1),
    "where_of_mixed": lambda x: torch.where(x > 0, x, x.contiguous().movedim(0, -1).contiguous().movedim(-1, 0)),
}


@pytest.mark.parametrize(("rank", "dynamic"), [(2, False), (3, False), (4, False), (5, False), (3, True)])
@pytest.mark.parametrize("name", LAYOUTS)
def test_result_strides(name: str, rank: int, dynamic: bool) -> None:
    compare(LAYOUTS[name], of_rank(rank), dynamic=dynamic, calls=1)


@pytest.mark.parametrize("rank", [2, 4])
@pytest.mark.parametrize("name", [n for n in LAYOUTS if "no_elements" not in n and n != "size_one_view"])
def test_result_and_gradient_strides(name: str, rank: int) -> None:
    compare(LAYOUTS[name], of_rank(rank).requires_grad_(), training=True, calls=1)


def assert_gradient_lies_as_in_eager(function: Callable[[Tensor], Tensor], *given: Tensor, **how: Any) -> None:
    """By `autograd.grad`, for each input in turn: what is accumulated into `.grad` is laid out as the leaf is."""
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="ferrite", options={"strict": True}, **how)
    for each in given:
        x = each.detach().requires_grad_()
        expected, found = (torch.autograd.grad(run(x).square().sum(), x)[0] for run in (function, compiled))
        torch.testing.assert_close(found, expected)
        assert found.stride() == expected.stride()


# Each takes a view that is all of its source, and whose backward is a copy.
WHOLE: dict[str, Callable[[Tensor], Tensor]] = {
    "chunk": lambda x: x.chunk(2, 0)[0].exp(),
    "split": lambda x: torch.split(x, 4, 1)[0].exp(),
    "narrow": lambda x: torch.narrow(x, 1, 0, 4).exp(),
    "split_and_cat": lambda x: torch.cat(x.split(2, 1), 1).exp().sum(),
    "split_and_cat_after_a_sum": lambda x: torch.cat((x + 1).split(2, 1), 1).exp().sum(),
    "split_and_stack": lambda x: torch.stack(x.split(1, 1), 1).exp().sum(),
    "unbind_and_stack": lambda x: torch.stack(x.unbind(1), 0).exp().sum(),
}


@pytest.mark.parametrize("name", WHOLE)
def test_the_gradient_of_what_is_taken_apart_and_stays_whole(name: str) -> None:
    """Of an input that is laid out otherwise than the copy."""
    x = torch.randn(3, 9, 4).transpose(1, 2)
    assert_gradient_lies_as_in_eager(WHOLE[name], x[:1] if name == "chunk" else x)


@pytest.mark.parametrize("host", ["native", "python"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_gradient_that_autograd_adds_to_another(dynamic: bool, host: str) -> None:
    """The compiled one is a part of larger memory, and what it is added to is not."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x, y], 1) @ torch.ones(6, 2)

    x, y = torch.randn(1, 4, 6, requires_grad=True), torch.randn(1, 4, 6)
    compiled = torch.compile(function, backend="ferrite", dynamic=dynamic, options={"strict": True, "host": host})
    found, expected = (torch.autograd.grad(x.sin().sum() + run(x, y).sum(), x)[0] for run in (compiled, function))
    torch.testing.assert_close(found, expected)
    assert found.stride() == expected.stride()
    assert found.untyped_storage().nbytes() == expected.untyped_storage().nbytes()


@pytest.mark.parametrize("layout", ["auto", "on", "off"])
@pytest.mark.parametrize("kind", [torch.nn.Conv2d, torch.nn.ConvTranspose2d])
def test_the_gradient_of_images_of_one_channel(kind: type[torch.nn.Module], layout: str) -> None:
    """The stride of the channels is eager's also where sizes change."""
    module = kind(1, 4, 3).to(memory_format=torch.channels_last)
    options = {"strict": True, "layout": layout}
    compiled = torch.compile(module, backend="ferrite", options=options)
    for sizes in ((3, 1, 3, 9), (2, 1, 4, 10), (2, 1, 5, 7)):
        x = torch.randn(sizes, requires_grad=True)
        expected, found = (torch.autograd.grad(run(x).square().sum(), x)[0] for run in (module, compiled))
        torch.testing.assert_close(found, expected)
        assert found.stride() == expected.stride()


def test_stride_of_a_dimension_of_size_one_in_a_view_while_training() -> None:
    """AOTAutograd rebuilds views of intermediates itself; in a dimension of size one it may choose another stride."""
    x = torch.randn(3, 4, 5, requires_grad=True)
    function = LAYOUTS["size_one_view"]
    found = torch.compile(function, backend="ferrite", options={"strict": True})(x)
    expected = function(x)
    assert equal(found, expected)
    significant = [dim for dim, extent in enumerate(expected.shape) if extent != 1]
    assert [found.stride(dim) for dim in significant] == [expected.stride(dim) for dim in significant]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("bias", [False, True])
def test_channels_last_convolution(training: bool, dynamic: bool, bias: bool) -> None:
    module = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1, bias=bias), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.MaxPool2d(2)
    ).to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    # The gradient of a bias in front of a batch norm is 0: what is there is rounding.
    result = compare(module, x, training=training, dynamic=dynamic, calls=1, exact=not (training and bias))
    assert result.is_contiguous(memory_format=torch.channels_last)


def layouts(record: Record) -> list[tuple[GraphRecord, Decision]]:
    """What was decided on the layout of each graph's convolutions."""
    return [(graph, choice) for graph in record.graphs for choice in graph.decisions if choice.what == "channels last"]


class Residual(torch.nn.Module):
    """Convolutions whose layout the compiler may choose, with a custom op and a view in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = torch.nn.BatchNorm2d(8)
        self.inner = torch.nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.last = torch.nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        stem = self.norm(self.stem(x)).relu()
        inner = note(self.inner(stem)) + stem
        pooled = torch.nn.functional.max_pool2d(inner, 2)
        return self.last(pooled), pooled.flatten(1), inner.permute(0, 2, 3, 1), pooled[:, 1:3]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_the_layout_that_is_chosen_for_convolutions_is_not_seen(training: bool, dynamic: bool) -> None:
    Recorder.strides.clear()
    # What goes through convolutions in another layout is summed in another order.
    module = Residual().requires_grad_(training)
    compare(module, torch.randn(2, 3, 8, 8), training=training, dynamic=dynamic, calls=1, exact=False)
    assert len(set(Recorder.strides)) == 1
    record = ferrite.last_record()
    assert record is not None
    taken = {graph.phase: choice.taken for graph, choice in layouts(record)}
    assert taken == ({"forward": True, "backward": True} if training else {"inference": True})


@pytest.mark.parametrize("asked", ["on", "off", "auto"])
def test_a_layout_that_is_asked_for(asked: str) -> None:
    """A single convolution is not worth two copies, several are worth them."""
    one = torch.nn.Conv2d(8, 8, 3)
    for module, chosen in ((one, False), (torch.nn.Sequential(one, torch.nn.Conv2d(8, 8, 3)), True)):
        torch._dynamo.reset()
        options = {"strict": True, "cache": "off", "layout": asked}
        x = torch.randn(2, 8, 12, 12)
        with torch.no_grad():
            found, expected = torch.compile(module, backend="ferrite", options=options)(x), module(x)
        torch.testing.assert_close(found, expected)
        assert found.stride() == expected.stride()
        record = ferrite.last_record()
        assert record is not None
        ((_, choice),) = layouts(record)
        assert choice.taken is (chosen if asked == "auto" else asked == "on")
        assert asked == "auto" or choice.reason == f"the option layout is {asked!r}"
        assert any(choice.what == "layout copy" for choice in record.decisions) is choice.taken


def test_a_layout_is_not_chosen_for_what_onednn_does_not_do() -> None:
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Conv2d(8, 8, 3)).double()
    compare(module, torch.randn(2, 3, 8, 8, dtype=torch.float64), training=True)
    record = ferrite.last_record()
    assert record is not None
    assert not any(choice.taken for _, choice in layouts(record))


def test_channels_last_3d() -> None:
    x = torch.randn(2, 3, 4, 4, 4).to(memory_format=torch.channels_last_3d)
    compare(torch.nn.Conv3d(3, 4, 3).to(memory_format=torch.channels_last_3d), x)


def test_view_of_a_result_is_legal_where_it_is_in_eager() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.nn.functional.conv2d(x, torch.ones(4, 3, 1, 1))

    x = torch.randn(2, 3, 4, 4)
    result = torch.compile(function, backend="ferrite", options={"strict": True})(x)
    assert equal(result.view(2, -1), function(x).view(2, -1))


def test_view_of_a_result_fails_where_it_does_in_eager() -> None:
    def function(x: Tensor) -> Tensor:
        return x.t() + 1

    x = torch.randn(3, 4)
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        function(x).view(-1)
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        torch.compile(function, backend="ferrite", options={"strict": True})(x).view(-1)


def test_view_inside_fails_where_it_does_in_eager() -> None:
    """Ferrite turns views into reshapes; the error of an impossible view comes before that, from tracing."""

    def function(x: Tensor) -> Tensor:
        return (x.t() + 1).view(-1)

    with pytest.raises(RuntimeError, match="view"):
        torch.compile(function, backend="ferrite")(torch.randn(3, 4))


@pytest.mark.parametrize("sizes", [(1, 4), (4, 1), (1, 1), (1, 1, 1)])
def test_insignificant_strides_of_inputs_and_results(sizes: tuple[int, ...]) -> None:
    def odd(x: Tensor) -> Tensor:
        return x.as_strided(
            x.shape, [7 if extent == 1 else stride for extent, stride in zip(x.shape, x.stride(), strict=True)]
        )

    compare(lambda x: (x + 1, x.sin().transpose(0, 1)), odd(torch.randn(sizes)))


@pytest.mark.parametrize("offset", [0, 1, 3, 8])
def test_inputs_at_any_offset(offset: int) -> None:
    compare(lambda x: (x * 2).sum(), torch.randn(40)[offset : offset + 17], calls=1)


def test_offset_changes_between_calls() -> None:
    def function(x: Tensor) -> Tensor:
        return x.sin() * 2

    compiled = torch.compile(function, backend="ferrite", options={"strict": True})
    base = torch.randn(64)
    for start in (0, 1, 3, 16):
        part = base[start : start + 32]
        assert equal(compiled(part), function(part))


# What a pass may do to strides inside the graph. The user sees none of it.


def transpose_every_sum_of_two(graph: Graph) -> int:
    """add(a, b) -> a copy of it whose memory runs the other way"""
    found = graph.find_nodes(op="call_function", target=aten.add.Tensor)
    for node in found:
        rank = node.meta["val"].dim()
        order = list(reversed(range(rank)))
        with graph.inserting_after(node):
            turned = graph.call_function(aten.permute.default, (node, order))
        with graph.inserting_after(turned):
            dense = graph.call_function(aten.clone.default, (turned,), {"memory_format": torch.contiguous_format})
        with graph.inserting_after(dense):
            back = graph.call_function(aten.permute.default, (dense, order))
        node.replace_all_uses_with(back, delete_user_cb=lambda user, turned=turned: user is not turned)
    return len(found)


RESULTS: dict[str, Callable[[Tensor], Any]] = {
    "the_sum": lambda x: x + 1,
    "a_view_of_it": lambda x: (x + 1).flatten(1),
    "a_transpose_of_it": lambda x: (x + 1).transpose(0, 1),
    "computed_from_it": lambda x: (x + 1).sin(),
    "several": lambda x: ((x + 1), (x + 2).sum(), (x + 3).transpose(-1, -2)),
}


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", RESULTS)
def test_a_pass_that_changes_strides_is_not_seen(
    monkeypatch: pytest.MonkeyPatch, name: str, dynamic: bool, training: bool
) -> None:
    runs: list[int] = []

    def change_strides(graph: Graph) -> int:
        runs.append(transpose_every_sum_of_two(graph))
        return runs[-1]

    monkeypatch.setattr(pipeline, "POST_GRAD", (change_strides,))
    compare(RESULTS[name], torch.randn(3, 4, 5, requires_grad=training), dynamic=dynamic, training=training)
    assert sum(runs) > 0


def test_a_pass_that_changes_strides_sizes_one_and_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "POST_GRAD", (transpose_every_sum_of_two,))
    compare(RESULTS["several"], torch.randn(1, 4, 1), calls=1)
    compare(RESULTS["several"], torch.randn(3, 0, 5), calls=1)
    compare(RESULTS["the_sum"], torch.randn(3, 4, 5).transpose(0, 2), calls=1)


def test_keep_output_stride_off_keeps_values_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "POST_GRAD", (transpose_every_sum_of_two,))
    x = torch.randn(3, 4)
    options = {"strict": True, "keep_output_stride": False}
    result = torch.compile(lambda x: x + 1, backend="ferrite", options=options)(x)
    assert equal(result, x + 1)
    assert result.stride() == (1, 3)


class Recorder:
    """A custom op that notes the strides it is called with."""

    strides: list[tuple[int, ...]] = []  # noqa: RUF012


@torch.library.custom_op("behaviour_strides::note", mutates_args=())
def note(x: Tensor) -> Tensor:
    Recorder.strides.append(x.stride())
    return x.clone()


@note.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


note.register_autograd(lambda context, gradient: gradient)


@pytest.mark.parametrize("name", ["contiguous", "transposed", "expanded", "sliced", "size_one"])
def test_a_custom_op_sees_the_strides_of_eager(name: str) -> None:
    def function(x: Tensor) -> Tensor:
        return note(LAYOUTS[name](x)) * 2

    x = torch.randn(3, 4, 5)
    Recorder.strides.clear()
    expected = function(x)
    found = torch.compile(function, backend="ferrite", fullgraph=True, options={"strict": True})(x)
    assert equal(found, expected)
    assert Recorder.strides[0] == Recorder.strides[1]


def test_a_custom_op_behind_a_channels_last_convolution_sees_the_strides_of_eager() -> None:
    convolution = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)

    def function(x: Tensor) -> Tensor:
        return note(convolution(x))

    x = torch.randn(2, 3, 6, 6)
    Recorder.strides.clear()
    with torch.no_grad():
        function(x)
        torch.compile(function, backend="ferrite", fullgraph=True, options={"strict": True})(x)
    assert Recorder.strides[0] == Recorder.strides[1]


# Tags: what an op says about the strides of its operands. Each op below notes those that it is given.

TAGS = ("needs_exact_strides", "needs_fixed_stride_order", "needs_contiguous_strides", "flexible_layout")
NOTED: list[tuple[int, ...]] = []


def noting(tag: str) -> Callable[[Tensor], Tensor]:
    def body(x: Tensor) -> Tensor:
        NOTED.append(x.stride())
        return x.clone()

    op = torch.library.custom_op(f"behaviour_strides::{tag}", body, mutates_args=(), tags=(getattr(torch.Tag, tag),))
    op.register_fake(torch.empty_like)
    return op


NOTING = {tag: noting(tag) for tag in TAGS}


def noted_by(function: Callable[[Tensor], Any], x: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The strides that the op was given in eager and compiled; results and strides that the caller sees are equal."""
    NOTED.clear()
    with torch.no_grad():
        compare(function, x, calls=1, exact=False)
    assert len(NOTED) == 2
    return NOTED[0], NOTED[1]


@pytest.mark.parametrize("tag", TAGS)
@pytest.mark.parametrize("name", ["contiguous", "transposed", "expanded", "sliced"])
def test_what_a_tag_says(tag: str, name: str) -> None:
    eager, found = noted_by(lambda x: NOTING[tag](LAYOUTS[name](x)) * 2, torch.randn(3, 4, 5))
    if tag == "needs_contiguous_strides":
        shape = LAYOUTS[name](torch.randn(3, 4, 5)).shape
        assert found == torch.empty(shape).stride()
    else:
        assert found == eager


@pytest.mark.parametrize("tag", TAGS)
def test_what_a_tag_says_behind_convolutions(tag: str) -> None:
    """They run channels last, which only an op is shown that does not look."""
    stem, last = torch.nn.Conv2d(8, 8, 3), torch.nn.Conv2d(8, 8, 3)
    eager, found = noted_by(lambda x: last(NOTING[tag](stem(x))), torch.randn(2, 8, 12, 12))
    assert eager == torch.empty(2, 8, 10, 10).stride()
    assert found == (torch.empty(2, 10, 10, 8).permute(0, 3, 1, 2).stride() if tag == "flexible_layout" else eager)


def test_a_custom_op_without_a_tag_has_that_of_pytorchs_setting() -> None:
    convolutions = torch.nn.Conv2d(8, 8, 3), torch.nn.Conv2d(8, 8, 3)
    strides = []
    for default in ("needs_exact_strides", "flexible_layout"):
        with torch._functorch.config.patch(custom_op_default_layout_constraint=default), torch.no_grad():
            Recorder.strides.clear()
            torch._dynamo.reset()
            function = torch.compile(lambda x: convolutions[1](note(convolutions[0](x))), backend="ferrite")
            function(torch.randn(2, 8, 12, 12))
            strides += Recorder.strides
    assert strides == [(800, 100, 10, 1), (800, 1, 80, 8)]


@torch.library.custom_op("behaviour_strides::halve", mutates_args={"x"})
def halve(x: Tensor) -> None:
    NOTED.append(x.stride())
    x.mul_(0.5)


def test_an_op_that_writes_behind_convolutions() -> None:
    stem, last = torch.nn.Conv2d(8, 8, 3), torch.nn.Conv2d(8, 8, 3)

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        inner = stem(x)
        halve(inner)
        return last(inner), inner + 1

    eager, found = noted_by(function, torch.randn(2, 8, 12, 12))
    assert eager == found


def test_an_op_that_needs_the_strides_of_eager_has_them_behind_a_pass_that_changes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pipeline, "POST_GRAD", (transpose_every_sum_of_two,))
    eager, found = noted_by(lambda x: NOTING["needs_exact_strides"](x + 1), torch.randn(3, 4))
    assert eager == found == (4, 1)
