"""PRE-33: what does nothing goes, cats of cats are one, one spelling for all arguments; and all through compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule
from torch.nn import functional as F

import ferrite
from ferrite.graph.arguments import bind, find
from ferrite.graph.pre_grad import IDLE
from ferrite.graph.pre_grad.chunk_reshape_cat import chunk_reshape_cat
from ferrite.graph.pre_grad.chunk_reshape_unsqueeze_cat import chunk_reshape_unsqueeze_cat
from ferrite.graph.pre_grad.merge_cats import merge_cats
from ferrite.graph.pre_grad.normalise_arguments import normalise_arguments
from ferrite.graph.pre_grad.plan import plan
from ferrite.graph.pre_grad.pre_dispatch import plan_pre_dispatch
from ferrite.graph.pre_grad.remove_noops import remove_noops
from ferrite.graph.pre_grad.remove_splits import remove_splits
from ferrite.graph.pre_grad.split_squeeze_cat import split_squeeze_cat
from ferrite.graph.pre_grad.stack_to_unsqueeze import stack_to_unsqueeze
from tests.pre_grad.harness import capture, keeps, rewrites, trace
from tests.unit.test_fuse import launches

X, Y = torch.randn(4, 6), torch.randn(4, 6)


def take(parts: Any, count: int) -> list[Any]:
    return [parts[index] for index in range(count)]


class TestRemoveNoops:
    @pytest.mark.parametrize("idle", [lambda x: torch.cat((x,)), lambda x: x.view(4, 6)])
    def test_what_is_made_without_gradients_stays(self, idle: Callable[..., Any]) -> None:
        def function(x: Any) -> Any:
            with torch.no_grad():
                y = idle(x)
            return torch.cat([y, y], 1)

        keeps(remove_noops, function, [X], because="runs without gradients")

    @pytest.mark.parametrize(
        "idle",
        [
            lambda x: x.view(4, 6),
            lambda x: x.view(-1, 6),
            lambda x: torch.reshape(x, (4, 6)),
            lambda x: x.expand(4, 6),
            lambda x: x.expand(-1, 6),
            lambda x: x.to(torch.float32),
            lambda x: x.to("cpu"),
            lambda x: x.to(x),
            lambda x: x.type_as(x),
            lambda x: x[:],
            lambda x: x[...],
            lambda x: x[0:4, :],
            lambda x: x.narrow(1, 0, 6),
            lambda x: torch.cat([x], 1),
        ],
    )
    def test_goes(self, idle: Callable[[Any], Any]) -> None:
        outcome = rewrites(remove_noops, trace(lambda x: idle(x) * 2, [X]), times=1, exact=True)
        assert set(outcome.kinds) - {"getattr"} == {"None", "mul"}

    @pytest.mark.parametrize(
        "busy",
        [
            lambda x: x.view(6, 4),
            lambda x: x.t().reshape(4, 6),
            lambda x: x[None].expand(2, 4, 6),
            lambda x: x.to(torch.float64),
            lambda x: x.to(torch.float32, copy=True),
            lambda x: x[:3],
            lambda x: x[::2],
            lambda x: x[0],
            lambda x: x[:, None],
            lambda x: x[[0, 1, 2, 3]],
            lambda x: x.narrow(0, 1, 2),
            lambda x: torch.cat([x, x], 1),
        ],
    )
    def test_stays(self, busy: Callable[[Any], Any]) -> None:
        keeps(remove_noops, trace(lambda x: busy(x) * 2, [X]))

    @pytest.mark.parametrize("idle", [lambda x: x.view(4, 6), lambda x: x[:], lambda x: torch.cat([x])])
    def test_returned(self, idle: Callable[[Any], Any]) -> None:
        keeps(remove_noops, trace(idle, [X]), because="is returned")

    @pytest.mark.parametrize("idle", [lambda x: x.view(4, 6), lambda x: x[:], lambda x: torch.cat([x])])
    def test_written(self, idle: Callable[[Any], Any]) -> None:
        keeps(remove_noops, trace(lambda x: idle(x).add_(1) * 2, [X]), because="may be written")

    def test_a_cat_of_one_and_the_input_is_written(self) -> None:
        def function(x: Any) -> Any:
            copy = torch.cat([x])
            x.zero_()
            return copy * 2

        keeps(remove_noops, trace(function, [X]), because="may be written")

    def test_a_chain(self) -> None:
        captured = trace(lambda x: x.view(4, 6).reshape(4, 6).to(torch.float32)[:] * 2, [X])
        outcome = rewrites(remove_noops, captured, times=4, exact=True)
        assert set(outcome.kinds) == {"None", "mul"}

    def test_sizes_that_vary(self) -> None:
        """The same size by its name goes; what would have to be guarded stays."""
        x = torch.randn(5, 6)
        torch._dynamo.mark_dynamic(x, 0)
        captured = capture(lambda x: x.view(x.shape[0], 6) * 2, [x], dynamic=None)
        rewrites(remove_noops, captured, times=1, left={"view": 0}, exact=True)


class TestMergeCats:
    A, B, C = torch.randn(2, 3), torch.randn(2, 4), torch.randn(2, 5)

    def test_one_flat_cat(self) -> None:
        captured = trace(lambda a, b, c: torch.cat([torch.cat([a, b], 1), c], -1), [self.A, self.B, self.C])
        rewrites(merge_cats, captured, times=1, left={"cat": 1}, exact=True)

    def test_three_levels_and_two_inner(self) -> None:
        def function(a: Any, b: Any, c: Any) -> Any:
            inner = torch.cat([torch.cat([a, b], 1), c], 1)
            return torch.cat([inner, a, torch.cat([c, c], 1)], 1)

        captured = trace(function, [self.A, self.B, self.C])
        rewrites(merge_cats, captured, times=2, left={"cat": 1}, exact=True)

    def test_other_dimension(self) -> None:
        keeps(merge_cats, trace(lambda a, b: torch.cat([torch.cat([a, b], 1), torch.cat([b, a], 1)]), [self.A, self.B]))

    def test_inner_read_elsewhere(self) -> None:
        def function(a: Any, b: Any, c: Any) -> Any:
            inner = torch.cat([a, b], 1)
            return torch.cat([inner, c], 1), inner.sum()

        keeps(merge_cats, trace(function, [self.A, self.B, self.C]), because="has 2 users")

    def test_inner_taken_twice(self) -> None:
        def function(a: Any, b: Any) -> Any:
            inner = torch.cat([a, b], 1)
            return torch.cat([inner, inner], 1)

        keeps(merge_cats, trace(function, [self.A, self.B]), because="2 times")

    def test_other_dtype(self) -> None:
        """The inner cat of two integers is an integer; one flat cat would be the same here, and is not tried."""
        a, b = torch.arange(6).view(2, 3), torch.arange(8).view(2, 4)
        captured = trace(lambda a, b, c: torch.cat([torch.cat([a, b], 1), c], 1), [a, b, self.C])
        keeps(merge_cats, captured, because="is i64 and")

    def test_an_operand_is_written_between(self) -> None:
        def function(a: Any, b: Any, c: Any) -> Any:
            inner = torch.cat([a, b], 1)
            a.add_(1)
            return torch.cat([inner, c], 1)

        keeps(merge_cats, trace(function, [self.A, self.B, self.C]), because="may be written")


class TestStackToUnsqueeze:
    @pytest.mark.parametrize("dim", [0, 1, 2, -1])
    def test_one_tensor(self, dim: int) -> None:
        captured = trace(lambda x: torch.stack([x], dim) * 2, [X])
        rewrites(stack_to_unsqueeze, captured, times=1, left={"stack": 0, "unsqueeze": 1}, exact=True)

    def test_into_a_cat(self) -> None:
        def function(x: Any, y: Any) -> Any:
            return torch.cat([torch.stack([x, y], 1), y.unsqueeze(1)], 1)

        passes = [stack_to_unsqueeze, merge_cats]
        rewrites(passes, trace(function, [X, Y]), times=2, left={"stack": 0, "cat": 1}, exact=True)

    def test_nothing_is_enabled(self) -> None:
        keeps(stack_to_unsqueeze, trace(lambda x, y: torch.stack([x, y], 1), [X, Y]))

    def test_the_cat_has_another_dimension(self) -> None:
        captured = trace(lambda x, y: torch.cat([torch.stack([x, y], 1), torch.stack([y, x], 1)], 0), [X, Y])
        keeps(stack_to_unsqueeze, captured)

    def test_written(self) -> None:
        keeps(stack_to_unsqueeze, trace(lambda x: torch.stack([x], 1).add_(1) * 2, [X]), because="may be written")

    def test_returned(self) -> None:
        keeps(stack_to_unsqueeze, trace(lambda x: torch.stack([x], 1), [X]), because="is returned")


class TestRemoveSplits:
    def test_one_section_is_read(self) -> None:
        captured = trace(lambda x: x.split([1, 2, 3], 1)[1] * 2, [X])
        rewrites(remove_splits, captured, times=1, left={"split": 0, "narrow": 1}, exact=True)

    def test_one_section(self) -> None:
        rewrites(remove_splits, trace(lambda x: x.split(6, 1)[0] * 2, [X]), times=1, left={"split": 0}, exact=True)

    def test_nobody_reads_it(self) -> None:
        def function(x: Any) -> Any:
            x.split(2, 1)
            return x * 2

        rewrites(remove_splits, trace(function, [X]), times=1, left={"split": 0})

    def test_one_section_is_returned(self) -> None:
        rewrites(remove_splits, trace(lambda x: x.chunk(3, 1)[2], [X]), times=1, left={"chunk": 0}, exact=True)

    def test_several_are_read(self) -> None:
        def function(x: Any) -> Any:
            parts = x.split(2, 1)
            return parts[0] + parts[2]

        keeps(remove_splits, trace(function, [X]), because="2 sections")


def chunks(count: int, dim: int, *shape: int, cat: int = 0, new: int | None = None) -> Callable[[Any], Any]:
    def function(x: Any) -> Any:
        parts = [part.reshape(shape) for part in take(x.chunk(count, dim), count)]
        return torch.cat([part if new is None else part.unsqueeze(new) for part in parts], cat)

    return function


class TestChunkReshapeCat:
    @pytest.mark.parametrize(
        ("dim", "shape", "cat"),
        [
            (1, (12,), 0),
            (1, (4, 3), 0),
            (1, (2, 6), 0),
            (1, (4, 3, 1), 1),
            (0, (12,), 0),
            (0, (2, 2, 3), 1),
            (0, (1, 12), 0),
        ],
    )
    def test_one_reshape(self, dim: int, shape: tuple[int, ...], cat: int) -> None:
        def function(x: Any) -> Any:
            return (chunks(2, dim, *shape, cat=cat)(x) * 2).flatten()

        left = {"chunk": 0, "cat": 0}
        rewrites(chunk_reshape_cat, trace(function, [X]), times=1, left=left, exact=True)

    def test_what_no_single_reshape_can_do(self) -> None:
        """Half of one chunk would have to stand before half of the other, cut in the middle of a row."""
        keeps(chunk_reshape_cat, trace(chunks(2, 1, 3, 4, cat=1), [X]), because="not one in the join")

    def test_unequal_chunks(self) -> None:
        def function(x: Any) -> Any:
            return torch.cat([part.reshape(-1) for part in take(x.chunk(4, 1), 3)])

        keeps(chunk_reshape_cat, trace(function, [X[:, :5]]))

    def test_part_of_the_chunks(self) -> None:
        keeps(
            chunk_reshape_cat,
            trace(lambda x: torch.cat([part.reshape(8) for part in take(x.chunk(3, 1), 2)]), [X]),
            because="not one in the join",
        )

    def test_a_piece_is_read_elsewhere(self) -> None:
        def function(x: Any) -> Any:
            parts = [part.reshape(8) for part in take(x.chunk(3, 1), 3)]
            return torch.cat(parts), parts[0].sin()

        keeps(chunk_reshape_cat, trace(function, [X]), because="has 2 users")

    @pytest.mark.parametrize(("new", "cat"), [(0, 0), (1, 1), (0, 1), (-1, 1)])
    def test_with_a_new_dimension(self, new: int, cat: int) -> None:
        def function(x: Any) -> Any:
            return (chunks(2, 1, 12, cat=cat, new=new)(x) * 2).flatten()

        left = {"chunk": 0, "cat": 0, "unsqueeze": 0}
        rewrites(chunk_reshape_unsqueeze_cat, trace(function, [X]), times=1, left=left, exact=True)

    def test_unequal_chunks_with_a_new_dimension(self) -> None:
        def function(x: Any) -> Any:
            return torch.cat([part.reshape(1, -1).unsqueeze(0) for part in take(x.chunk(4, 1), 3)], 2)

        keeps(chunk_reshape_unsqueeze_cat, trace(function, [X[:, :5]]))


class TestSplitSqueezeCat:
    @pytest.mark.parametrize("apart", [lambda x: x.split(1, 1), lambda x: x.chunk(3, 1)])
    @pytest.mark.parametrize(("join", "dim"), [(torch.cat, 0), (torch.cat, 1), (torch.stack, 0), (torch.stack, 2)])
    def test_one_move(self, apart: Callable[[Any], Any], join: Callable[..., Any], dim: int) -> None:
        def function(x: Any) -> Any:
            return (join([part.squeeze(1) for part in take(apart(x), 3)], dim) * 2).flatten()

        left = {"split": 0, "chunk": 0, "squeeze": 0, "cat": 0, "stack": 0}
        rewrites(split_squeeze_cat, trace(function, [torch.randn(2, 3, 4)]), times=1, left=left, exact=True)

    def test_an_item_has_another_reader(self) -> None:
        def function(x: Any) -> Any:
            parts = take(x.split(1, 1), 3)
            return torch.cat([part.squeeze(1) for part in parts], 0), parts[0].sin()

        keeps(split_squeeze_cat, trace(function, [torch.randn(2, 3, 4)]), because="has 2 users")


class TestNormaliseArguments:
    def test_options_by_name_and_defaults_filled_in(self) -> None:
        def function(x: Any, y: Any) -> Any:
            a = torch.softmax(x, 1).sum(1, True)
            b = F.layer_norm(x, (6,)) + F.relu(y)
            return a, b, torch.add(x, y), x.flatten(1), x.view(6, 4), torch.conv1d(x[None], y[:, :4, None])

        outcome = rewrites(normalise_arguments, trace(function, [X, Y]), times=7, exact=True)
        kwargs = {bind(node).kind: dict(node.kwargs) for node in outcome.module.graph.nodes if bind(node)}  # type: ignore[union-attr]
        assert kwargs["softmax"] == {"dim": 1}
        assert kwargs["sum"] == {"dim": 1, "keepdim": True}
        assert kwargs["layer_norm"] == {"normalized_shape": (6,), "weight": None, "bias": None, "eps": 1e-5}
        assert kwargs["relu"] == {"inplace": False}
        assert kwargs["flatten"] == {"start_dim": 1, "end_dim": -1}
        assert kwargs["conv1d"] == {"stride": [1], "padding": [0], "dilation": [1], "groups": 1}

    def test_spellings_become_one(self) -> None:
        spellings = [lambda x: torch.sum(x, 1), lambda x: torch.sum(input=x, dim=1), lambda x: torch.sum(x, axis=1)]
        found = set()
        for spelling in spellings:
            captured = trace(spelling, [X])
            normalise_arguments(captured.module.graph)
            (node,) = find(captured.module.graph, "sum")
            found.add((len(node.args), *sorted(node.kwargs.items())))
        assert found == {(1, ("dim", 1), ("keepdim", False))}

    @pytest.mark.parametrize(
        "function",
        [
            lambda x: x.view(x.shape),
            lambda x: x[:1].expand(x.size()),
            lambda x: torch.reshape(x, x.shape),
            lambda x: x.repeat(x.shape),
        ],
    )
    def test_sizes_that_are_one_value_of_the_graph(self, function: Callable[[Any], Any]) -> None:
        """They are a list already; one size, or several, make one."""
        keeps(normalise_arguments, trace(function, [X]))
        rewrites(normalise_arguments, trace(lambda x: x[0].expand(x.size(0), -1), [X]), times=1, exact=True)
        rewrites(normalise_arguments, trace(lambda x: x.flatten(0).view(x.numel()), [X]), times=2, exact=True)

    def test_unknown_targets(self) -> None:
        def unknown(x: Any, factor: int = 2) -> Any:
            return x * factor

        graph = Graph()
        x = graph.placeholder("x")
        graph.output(graph.call_function(unknown, (x, 3)))
        assert normalise_arguments(graph) == 0
        assert torch.equal(GraphModule(torch.nn.Module(), graph)(X), X * 3)


class TestReluNanToNum:
    """relu_nan_to_num needs no pass: what is to be one loop is one, also with numbers of the user's own."""

    ODD = torch.tensor([torch.nan, torch.inf, -torch.inf, 3.14, -1.0])

    @pytest.mark.parametrize("numbers", [(), (5.0, 1.0, -1.0)])
    def test_one_kernel(self, numbers: tuple[float, ...], monkeypatch: pytest.MonkeyPatch) -> None:
        def function(x: Any) -> Any:
            return torch.nan_to_num(torch.relu(x), *numbers)

        assert launches(monkeypatch, function, self.ODD, pre_grad="relu_nan_to_num") == 1
        record = ferrite.last_record()
        assert record is not None
        assert not record.fallbacks
        assert not any(run.changed for run in record.passes if run.stage == "pre_grad")

        compiled = torch.compile(function, backend="ferrite", options={"strict": True})
        x, y = self.ODD.clone().requires_grad_(), self.ODD.clone().requires_grad_()
        expected, found = function(x), compiled(y)
        assert torch.equal(found, expected)
        weights = torch.arange(1.0, 6.0)
        expected.backward(weights)
        found.backward(weights)
        assert torch.equal(y.grad, x.grad)


class TestPrivateKernels:
    """PRE-34: names for blocks that a private package replaces may be asked for, and the blocks are ordinary ops."""

    NAMES = tuple(name for name in IDLE if name.startswith(("use_triton_", "use_matmul_")))

    @staticmethod
    def compress(x: Any, w: Any, b: Any) -> Any:
        """A linear layer over the middle dimension, and the products of what it gives with its input."""
        small = F.linear(x.transpose(1, 2), w, b).transpose(1, 2)
        return torch.bmm(small, x.transpose(1, 2)).flatten(1).relu()

    def test_there_are_seven(self) -> None:
        assert len(self.NAMES) == 7
        assert all(IDLE[name] for name in self.NAMES)

    def test_asked_for_they_change_nothing(self) -> None:
        assert plan(tuple((name, ()) for name in self.NAMES)) == plan(())
        assert plan_pre_dispatch(self.NAMES, ()) == plan_pre_dispatch((), ())

    def test_the_block_compiles(self) -> None:
        inputs = [torch.randn(2, 6, 4), torch.randn(3, 6), torch.randn(3)]
        torch._dynamo.reset()
        run = torch.compile(self.compress, backend="ferrite", options={"pre_grad": self.NAMES, "strict": True})
        torch.testing.assert_close(run(*inputs), self.compress(*inputs))


@pytest.mark.parametrize("name", IDLE)
def test_names_that_need_no_pass_are_accepted(name: str) -> None:
    assert plan(((name, ()),)) == plan(())


def test_through_compile() -> None:
    """All that is on by default, in one model with its gradient."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = torch.nn.Linear(12, 12)

        def forward(self, x: Any, y: Any) -> Any:
            a, b, c = self.mix(x).split([4, 4, 4], 1)
            d, e = a.split(2, 1)
            wide = torch.cat([b, c], 1).tanh()
            rows = torch.stack([row.squeeze(0) for row in y.split(1, 0)], 1)
            heads = torch.cat([d, e, *wide.split(2, 1)], 0)
            odd = torch.nan_to_num(torch.relu(y.log()))
            return torch.cat([torch.cat([heads, heads], 1), heads], 1), rows.unbind(0)[1].sum(), odd.view(odd.shape) * 2

    model = Model()
    x = torch.randn(3, 12)
    y = torch.tensor([[0.0, -1.0, torch.inf], [1.0, 2.0, torch.nan]])
    compiled = torch.compile(model, backend="ferrite")
    expected, found = model(x, y), compiled(x, y)
    torch.testing.assert_close(found, expected, equal_nan=True, check_stride=True)
    wanted = torch.autograd.grad(expected[0].sum(), list(model.parameters()))
    torch.testing.assert_close(torch.autograd.grad(found[0].sum(), list(model.parameters())), wanted)
