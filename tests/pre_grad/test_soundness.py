"""The judge of rewrites, rule by rule, with small passes that know nothing of the rules."""

from __future__ import annotations

import itertools
import operator
from typing import Any

import pytest
import torch
from torch.fx import Graph, Node
from torch.nn import functional as F

from ferrite.graph.aliases import Aliases
from ferrite.graph.arguments import bind, find
from ferrite.graph.ledger import keep_ledger
from ferrite.graph.pre_grad.simplify_split_joins import simplify_split_joins
from ferrite.graph.soundness import Soundness
from ferrite.graph.spread import fill_alike
from ferrite.graph.text import show_graph
from ferrite.graph.values import fake_mode_of
from tests.pre_grad.harness import capture, keeps, rewrites, trace

X, Y = torch.randn(2, 3), torch.randn(2, 4)


def careless_sink(graph: Graph) -> int:
    """tanh(cat(a, b)) -> cat(tanh(a), tanh(b)), with no question asked."""
    sound = Soundness(graph)
    for node in find(graph, "tanh"):
        _sink(sound, node)
    return sound.rewrites


def _sink(sound: Soundness, node: Node) -> None:
    call = bind(node)
    cat = bind(call["input"], "cat") if call else None
    if cat is not None:
        parts, dim = cat["tensors"], cat["dim"]
        sound.rewrite(node, lambda new: new(torch.cat, [new(torch.tanh, part) for part in parts], dim=dim))


def careless_cat_of_one(graph: Graph) -> int:
    """cat([x]) -> x"""
    sound = Soundness(graph)
    for node in find(graph, "cat"):
        call = bind(node)
        if call is not None and len(call["tensors"]) == 1:
            sound.rewrite(node, call["tensors"][0])
    return sound.rewrites


def careless_copy(graph: Graph) -> int:
    """x.view(...) -> x.clone().view(...)"""
    sound = Soundness(graph)
    for node in find(graph, "view"):
        _copy(sound, node)
    return sound.rewrites


def _copy(sound: Soundness, node: Node) -> None:
    source, *shape = node.args
    sound.rewrite(node, lambda new: new("view", new(torch.clone, source), *shape))


def careless_batch(graph: Graph) -> int:
    """tanh(a), tanh(b) -> unbind(tanh(stack(a, b)))"""
    sound = Soundness(graph)
    nodes = find(graph, "tanh")
    sources = [bind(node)["input"] for node in nodes]  # type: ignore[index]

    def build(new: Any) -> list[Node]:
        parts = new(torch.unbind, new(torch.tanh, new(torch.stack, sources)), dim=0)
        return [new(operator.getitem, parts, index) for index in range(len(nodes))]

    if len(nodes) > 1:
        sound.rewrite(nodes, build)
    return sound.rewrites


def test_a_rewrite_that_nobody_objects_to() -> None:
    outcome = rewrites(careless_sink, lambda x, y: torch.cat([x, y], 1).tanh(), [X, Y], times=1)
    assert (outcome.kinds["tanh"], outcome.kinds["cat"]) == (2, 1)


def test_sizes_may_vary_and_no_guard_is_added() -> None:
    captured = capture(lambda x, y: torch.cat([x, y], 1).tanh(), [X, Y], dynamic=True)
    environment = fake_mode_of(captured.module.graph).shape_env
    before = len(environment.guards)
    rewrites(careless_sink, captured, times=1)
    assert len(environment.guards) == before


def test_what_needs_a_guard_is_refused() -> None:
    def twice(graph: Graph) -> int:
        sound = Soundness(graph)
        for node in find(graph, "cos"):
            _stack(sound, node)
        return sound.rewrites

    def _stack(sound: Soundness, node: Node) -> None:
        one, other = (
            entry for entry in sound.graph.find_nodes(op="placeholder") if "x" in entry.name or "y" in entry.name
        )
        sound.rewrite(node, lambda new: new(torch.select, new(torch.stack, [one, other]), 0, 0))

    torch._dynamo.reset()
    keeps(
        twice,
        lambda x, y: (x.cos(), y.sin()),
        [torch.randn(5), torch.randn(7)],
        because="cannot be evaluated",
        dynamic=True,
    )


def test_a_guard_that_a_pass_adds_is_seen() -> None:
    """By the harness, in every test with sizes that vary."""

    def asks(graph: Graph) -> int:
        (node,) = find(graph, "sin")
        return 0 * bool(node.meta["example_value"].shape[0] == 5)

    with pytest.raises(AssertionError, match="guards were added"):
        keeps(asks, lambda x: x.sin(), [torch.randn(5)], dynamic=True)


class TestReadTime:
    def test_input_written_between(self) -> None:
        def function(x: Any, y: Any) -> Any:
            whole = torch.cat([x, y], 1)
            x.add_(1)
            return whole.tanh()

        keeps(careless_sink, function, [X, Y], because="l_x_ may be written by add_ between whole and tanh")

    def test_a_view_of_the_input_written_between(self) -> None:
        def function(x: Any, y: Any) -> Any:
            part = x.t()[1]
            whole = torch.cat([x, y], 1)
            part.mul_(2)
            return whole.tanh()

        keeps(careless_sink, function, [X, Y], because="may be written by mul_")

    def test_the_value_between_is_written(self) -> None:
        def function(x: Any, y: Any) -> Any:
            whole = torch.cat([x, y], 1)
            whole[0] = 1
            return whole.tanh()

        keeps(careless_sink, function, [X, Y], because="may be written by setitem")

    def test_written_before_or_after_is_fine(self) -> None:
        def function(x: Any, y: Any) -> Any:
            x.add_(1)
            result = torch.cat([x, y], 1).tanh()
            y.mul_(2)
            return result

        rewrites(careless_sink, function, [X, Y], times=1)

    def test_inputs_that_share_memory(self) -> None:
        def function(x: Any, y: Any) -> Any:
            whole = torch.cat([x, x], 1)
            y.add_(1)
            return whole.tanh()

        base = torch.randn(4, 3)
        keeps(careless_sink, function, [base[:2], base[1:3]], because="may be written")

    def test_a_branch_that_writes(self) -> None:
        @torch._dynamo.allow_in_graph
        def theirs(x: torch.Tensor) -> torch.Tensor:
            return x.add_(1)

        def function(x: Any, y: Any) -> Any:
            whole = torch.cat([x, y], 1)
            theirs(x)
            return whole.tanh()

        keeps(careless_sink, function, [X, Y], because="may be written by theirs")


class TestAlias:
    def test_a_copy_that_nobody_minds(self) -> None:
        rewrites(careless_cat_of_one, lambda x: torch.cat([x]) + 1, [X], times=1, exact=True)

    def test_a_copy_that_is_returned(self) -> None:
        keeps(
            careless_cat_of_one,
            lambda x: torch.cat([x]),
            [X],
            because="a view of l_x_ in place of a copy, and cat is returned",
        )

    def test_a_copy_whose_view_is_returned(self) -> None:
        keeps(careless_cat_of_one, lambda x: torch.cat([x])[0].t(), [X], because="is returned")

    @pytest.mark.parametrize("target", ["copy", "source"])
    def test_a_copy_that_is_written(self, target: str) -> None:
        def function(x: Any) -> Any:
            copied = torch.cat([x])
            (copied if target == "copy" else x).add_(1)
            return x + copied

        keeps(careless_cat_of_one, function, [X], because="may be written by add_")

    def test_a_view_that_is_written(self) -> None:
        def function(x: Any) -> Any:
            flat = x.view(-1)
            flat.add_(1)
            return flat + 1

        keeps(careless_copy, function, [X], because="a copy in place of a view")

    def test_a_view_that_is_returned(self) -> None:
        keeps(careless_copy, lambda x: x.view(-1), [X], because="is returned")

    def test_a_view_that_nobody_minds(self) -> None:
        rewrites(careless_copy, lambda x: x.view(-1) + 1, [X], times=1, again=None)

    def test_two_rewrites_see_each_other(self) -> None:
        """Once the first cat is x itself, a write to what the second gives is a write to x."""

        def function(x: Any) -> Any:
            once = torch.cat([x])
            twice = torch.cat([once])
            twice.add_(1)
            return x + once

        rewrites(careless_cat_of_one, function, [X], times=1)

    def test_views_of_what_was_replaced_stand_in_its_memory(self) -> None:
        """The next pass must know that `row` is now a view of x, not of a copy."""

        def function(x: Any) -> Any:
            row = torch.cat([x])[0]
            return torch.cat([row]), x

        outcome = rewrites(careless_cat_of_one, function, [X], times=1)
        sound = Soundness(outcome.module.graph)
        (source,) = outcome.module.graph.find_nodes(op="placeholder")
        (row,) = find(outcome.module.graph, "getitem")
        assert sound.aliases.shares(source, row)


class TestUsers:
    def test_work_is_not_done_twice(self) -> None:
        def function(x: Any, y: Any) -> Any:
            whole = torch.cat([x, y], 1)
            return whole.tanh(), whole.sum()

        keeps(careless_sink, function, [X, Y], because="whole is also read by sum_1")

    def test_only_user(self) -> None:
        def function(x: Any) -> Any:
            one, two, three = x.sin(), x.cos(), x.exp()
            return one + 1, two * two, three.relu(), three

        graph = capture(function, [X]).module.graph
        sound = Soundness(graph)
        one, two, three = (find(graph, name)[0] for name in ("sin", "cos", "exp"))
        (add,) = find(graph, "add")
        assert sound.only_user(one) is None
        assert sound.only_user(one, add) is None
        assert sound.only_user(one, two) == f"{one.name} is read by {add.name}, not by {two.name}"
        assert "reads two 2 times" in str(sound.only_user(two))
        assert sound.only_user(three) == "three has 2 users"


class TestValues:
    def test_dtype_of_the_result(self) -> None:
        def sum_of(graph: Graph) -> int:
            sound = Soundness(graph)
            for node in find(graph, "cat"):
                sound.rewrite(node, node.args[0][0])
            return sound.rewrites

        keeps(
            sum_of, lambda x, y: torch.cat([x, y]) + 1, [X, X.double()], because="is f64[4, 3] and would be f32[2, 3]"
        )

    def test_agree(self) -> None:
        graph = capture(lambda x, y: (x.sin(), y.sin()), [X, Y.half()]).module.graph
        one, two = find(graph, "sin")
        assert Soundness(graph).agree(one, one) is None
        assert Soundness(graph).agree(one, two) == f"{one.name} is f32 and {two.name} f16"
        assert "is not a value" in str(Soundness(graph).agree(one, 3))

    def test_missing_value(self) -> None:
        captured = capture(lambda x, y: torch.cat([x, y], 1).tanh(), [X, Y])
        del captured.module.graph.find_nodes(op="placeholder")[0].meta["example_value"]
        with keep_ledger(captured.module.graph, "sink") as ledger:
            assert careless_sink(captured.module.graph) == 0
        assert "l_x_ has no fake value" in ledger.decisions[0].reason

    def test_reshaped_in_place(self) -> None:
        def function(x: Any) -> Any:
            y = x * 2
            z = y.sin()
            y.unsqueeze_(0)
            return y + z

        graph = capture(function, [X]).module.graph
        y = next(node for node in graph.nodes if node.name == "y")
        assert Soundness(graph).has_values(y) == "y is given other sizes or memory in place"

    def test_varying_sizes(self) -> None:
        graph = capture(lambda x: x.sin(), [torch.randn(5, 3)], dynamic=True).module.graph
        assert "sizes that vary" in str(Soundness(graph).is_static(*find(graph, "sin")))

    def test_autocast_is_on_where_it_is_on(self) -> None:
        def swap(graph: Graph) -> int:
            sound = Soundness(graph)
            for node in find(graph, "matmul"):
                _swap(sound, node)
            return sound.rewrites

        def _swap(sound: Soundness, node: Node) -> None:
            a, b = node.args
            sound.rewrite(node, lambda new: new(torch.mm, a, b))

        def function(x: Any, y: Any) -> Any:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return x @ y

        outcome = rewrites(swap, function, [torch.randn(2, 3), torch.randn(3, 4)], times=1)
        assert find(outcome.module.graph, "mm")[0].meta["example_value"].dtype == torch.bfloat16


class TestLayout:
    def test_strides_reach_an_output(self) -> None:
        keeps(
            careless_cat_of_one,
            lambda x: torch.cat([x.t()]).relu(),
            [X],
            because="relu would be returned as f32[3, 2].stride(1, 3)",
        )

    def test_strides_do_not_reach_it(self) -> None:
        rewrites(careless_cat_of_one, lambda x: torch.cat([x.t()]).sum(0), [X], times=1)

    def test_a_view_that_could_not_be(self) -> None:
        keeps(careless_cat_of_one, lambda x: torch.cat([x.t()]).view(-1).sum(), [X], because="cannot be evaluated")

    def test_as_strided(self) -> None:
        keeps(
            careless_cat_of_one,
            lambda x: torch.cat([x.t()]).as_strided((2,), (1,)).sum(),
            [X],
            because="would see other strides",
        )

    @pytest.mark.parametrize("op", [torch.nan_to_num, lambda v: v + 1, lambda v: torch.nan_to_num(v).unbind(0)])
    def test_strides_of_dimensions_with_one_element(self, op: Any) -> None:
        """Fake values promise them by other rules than eager: nothing is built on that."""
        x = torch.randn(1, 6)
        keeps(careless_cat_of_one, lambda x: op(torch.cat([x.t()])), [x], because="would be returned as")
        rewrites(careless_cat_of_one, lambda x: torch.nan_to_num(torch.cat([x.t()])) @ x, [x], times=1)

    def test_strides_of_tensors_without_elements(self) -> None:
        """As little to be trusted: of a product by a number fake values say (2, 1, 1), eager gives (1, 0, 3)."""
        x = torch.randn(0, 2, 3)
        keeps(careless_cat_of_one, lambda x: torch.cat([x.movedim(2, 0)]) * 2, [x], because="would be returned as")
        rewrites(careless_cat_of_one, lambda x: (torch.cat([x.movedim(2, 0)]) * 2).sum(), [x], times=1)

    def test_values_further_down_are_refreshed(self) -> None:
        """relu of the transposed value is transposed as well; the harness holds its fake value against the real one."""
        rewrites(careless_cat_of_one, lambda x: torch.cat([x.t()]).relu().exp().sum(0), [X], times=1)


class TestParts:
    """Autograd lets nobody write one of several views that were made at once."""

    @staticmethod
    def careless_split(graph: Graph) -> int:
        """narrow(x, 0, 0, 1) -> split(x, [1, 1])[0]"""
        sound = Soundness(graph)
        for node in find(graph, "narrow"):
            source = node.args[0]
            sound.rewrite(node, lambda new, x=source: new(operator.getitem, new(torch.split, x, [1, 1]), 0))
        return sound.rewrites

    def test_a_view_that_is_returned_may_be_written_by_the_caller(self) -> None:
        keeps(self.careless_split, lambda x: x.narrow(0, 0, 1), [X], because="would be a part of")

    def test_a_part_for_a_part(self) -> None:
        rewrites(self.careless_split, lambda x: x.split(2)[0].narrow(0, 0, 1), [X], times=1, exact=True)

    def test_a_view_that_stays_inside(self) -> None:
        rewrites(self.careless_split, lambda x: x.narrow(0, 0, 1) + 1, [X], times=1, exact=True)


class TestReshapes:
    """Other strides decide whether a reshape further down copies: `cat([x.t()])` is dense, x.t() is not."""

    def test_a_view_that_becomes_a_copy(self) -> None:
        rewrites(careless_cat_of_one, lambda x: (torch.cat([x.t()]) + 1).reshape(-1), [X], times=1)

    def test_and_what_it_was_a_view_of_is_written(self) -> None:
        def function(x: Any) -> Any:
            base = torch.cat([x.t()]) + 1
            view = base.reshape(-1)
            base.mul_(2)
            return view

        keeps(careless_cat_of_one, function, [X], because="would be a copy and was a view, and view may be written")

    def test_and_what_it_was_a_view_of_is_returned(self) -> None:
        def function(x: Any) -> Any:
            base = torch.cat([x.t()]) + 1
            return base.reshape(-1), base[0]

        keeps(careless_cat_of_one, function, [X], because="is returned, and shares memory with")

    def test_a_copy_that_becomes_a_view(self) -> None:
        rewrites(careless_cat_of_one, lambda x: torch.cat([x.t()]).t().reshape(-1) + 1, [X], times=1)

    def test_and_is_returned(self) -> None:
        keeps(careless_cat_of_one, lambda x: torch.cat([x.t()]).t().reshape(-1), [X], because="was a copy")

    def test_and_is_returned_with_memory_of_its_own(self) -> None:
        rewrites(careless_cat_of_one, lambda x: (torch.cat([x.t()]) + 1).t().contiguous(), [X], times=1)

    def test_and_shares_it_with_another_result(self) -> None:
        def function(x: Any) -> Any:
            base = torch.cat([x.t()]) + 1
            return base.t().reshape(-1), base.t().contiguous()

        keeps(careless_cat_of_one, function, [X], because="shares memory with")

    def test_and_shares_it_with_what_a_fake_value_says_is_another(self) -> None:
        """Outside training eager's dropout gives its input back, a fake one gives a copy: the result would be x."""

        def function(x: Any) -> Any:
            idle = F.dropout(x, 0.5, False)
            return torch.cat([idle.t()]).t().contiguous()

        keeps(careless_cat_of_one, function, [X], because="is returned, and shares memory with l_x_")

    def test_and_is_written(self) -> None:
        def function(x: Any) -> Any:
            return torch.cat([x.t()]).t().reshape(-1).add_(1) * 2

        keeps(careless_cat_of_one, function, [X], because="was a copy")


def test_what_nobody_reads_is_dropped() -> None:
    def drop_all(graph: Graph) -> int:
        sound = Soundness(graph)
        for node in find(graph, "sin", "cos", "add_"):
            sound.drop(node)
        return sound.rewrites

    graph = capture(lambda x: x + 1, [X]).module.graph
    source, result = next(iter(graph.nodes)), next(node for node in graph.nodes if node.op == "call_function")
    with graph.inserting_before(result):
        graph.call_function(torch.sin, (source,))
        read = graph.call_function(torch.cos, (source,))
        writes = graph.call_method("add_", (source, read))
    assert drop_all(graph) == 1
    assert [node for node in graph.nodes if node.op.startswith("call")] == [read, writes, result]


class TestModes:
    def test_grad_mode(self) -> None:
        def function(x: Any, y: Any) -> Any:
            whole = torch.cat([x, y], 1)
            with torch.no_grad():
                return whole.tanh()

        keeps(careless_sink, function, [X, Y], because="run in different modes")

    def test_a_view_in_place_of_a_copy_without_gradients(self) -> None:
        def function(x: Any) -> Any:
            with torch.no_grad():
                joined = torch.stack(x.split(1, 1), 1)
            return torch.stack([joined, joined])

        x = torch.randn(1, 6, requires_grad=True)
        keeps(simplify_split_joins, function, [x], because="a copy without gradients")

    def test_around_a_block_is_one_mode(self) -> None:
        def function(x: Any, y: Any) -> Any:
            whole = torch.cat([x, y], 1)
            with torch.no_grad():
                other = x.sin()
            return whole.tanh(), other

        rewrites(careless_sink, function, [X, Y], times=1)

    def test_random(self) -> None:
        def function(x: Any, y: Any) -> Any:
            return torch.cat([F.dropout(torch.cat([x])), y], 1).tanh()

        def drop_all(graph: Graph) -> int:
            sound = Soundness(graph)
            for node in find(graph, "dropout"):
                sound.rewrite(node, bind(node)["input"])  # type: ignore[index]
            return sound.rewrites

        keeps(drop_all, function, [X, Y], because="draws random numbers")


class TestSeveral:
    def test_readers_move_below(self) -> None:
        def function(x: Any, y: Any) -> Any:
            a = torch.tanh(x)
            r = a + 1
            return r + torch.tanh(y * 2)

        outcome = rewrites(careless_batch, function, [X, X + 1], times=1, again=None)
        assert outcome.kinds["tanh"] == 1

    def test_dependent(self) -> None:
        keeps(careless_batch, lambda x: torch.tanh(torch.tanh(x) + 1), [X], because="depends on")

    def test_read_before_and_after_a_write(self) -> None:
        def function(x: Any) -> Any:
            a = torch.tanh(x)
            x.add_(1)
            return a + torch.tanh(x)

        keeps(careless_batch, function, [X], because="l_x_ may be written by add_")

    def test_random_readers_do_not_move(self) -> None:
        def function(x: Any, y: Any) -> Any:
            r = torch.rand_like(torch.tanh(x))
            return r + torch.tanh(y * 2)

        keeps(careless_batch, function, [X, X + 1], because="r cannot move: r draws random numbers")

    def test_parts_are_not_returned(self) -> None:
        keeps(careless_batch, lambda x, y: (torch.tanh(x), torch.tanh(y)), [X, X + 1], because="would be a part of")

    def test_parts_are_not_written(self) -> None:
        def function(x: Any, y: Any) -> Any:
            a, b = torch.tanh(x), torch.tanh(y)
            b += a
            return a * 2 + b

        keeps(careless_batch, function, [X, X + 1], because="may be written by b_1, and would be a view of")


def test_the_limit_stops_rewrites() -> None:
    def function(x: Any, y: Any) -> Any:
        return torch.cat([torch.cat([x, y], 1).tanh(), torch.cat([y, x], 1).tanh()]).sum()

    for limit, expected in [(0, 0), (1, 1), (2, 2), (5, 2)]:
        graph = capture(function, [X, Y]).module.graph
        with keep_ledger(graph, "sink", limit) as ledger:
            assert careless_sink(graph) == expected
        assert [decision.reason for decision in ledger.decisions] == [f"rewrite {n + 1}" for n in range(expected)]


def test_facts_are_handed_on_and_stay_true() -> None:
    """A second pass knows what the first one did, without looking at the graph again."""
    captured = capture(lambda x: torch.cat([torch.cat([x])[0]]) + 1, [X])
    facts: dict[str, Any] = {}
    with keep_ledger(captured.module.graph, "one", 1, facts=facts):
        careless_cat_of_one(captured.module.graph)
    known = facts["aliases"]
    with keep_ledger(captured.module.graph, "two", facts=facts):
        sound = Soundness(captured.module.graph)
        assert sound.aliases is known
        fresh = Soundness(captured.module.graph)
        nodes = [node for node in captured.module.graph.nodes if node.op != "output"]
    with keep_ledger(captured.module.graph, "three"):
        again = Soundness(captured.module.graph)
        for one in nodes:
            for other in nodes:
                if again.aliases.shares(one, other):
                    assert fresh.aliases.shares(one, other)


class Scaled(torch.nn.Module):
    """cos(sin(x)), and a weight that may be written on the way."""

    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Buffer(torch.ones(4))
        self.writes = writes

    def forward(self, x: Any) -> Any:
        y = x.sin()
        if self.writes:
            self.weight.add_(1)
        return y.cos() + 0 * self.weight


def held(graph: Graph) -> int:
    """cos(sin(x)) -> x * self.weight * 2, which is wrong, but not for the rules that are asked here"""
    sound = Soundness(graph)
    for node in find(graph, "cos"):
        source = bind(bind(node)["input"])["input"]  # type: ignore[index]
        _hold(sound, node, source)
    return sound.rewrites


def _hold(sound: Soundness, node: Node, source: Node) -> None:
    two = torch.full((4,), 2.0)

    def build(new: Any) -> Node:
        scaled = new(torch.mul, source, new.attribute("weight"))
        return new(torch.mul, scaled, new(torch.add, new.constant(two, "two"), new.constant(two, "two")))

    sound.rewrite(node, build)


class TestHeldByTheModule:
    def test_constants_are_held_once_and_are_no_state(self) -> None:
        module = trace(Scaled(False), [torch.ones(4)]).module
        with keep_ledger(module.graph, "held"):
            assert held(module.graph) == 1
        module.graph.lint()
        module.recompile()
        assert [name for name, _ in module.named_buffers()] == ["weight", "two_0"]
        assert list(module.state_dict()) == ["weight"]
        assert torch.equal(module(torch.ones(4)), torch.full((4,), 4.0))

    def test_a_write_to_what_would_be_read_is_seen_and_nothing_is_left_behind(self) -> None:
        module = trace(Scaled(True), [torch.ones(4)]).module
        before = show_graph(module.graph)
        with keep_ledger(module.graph, "held") as ledger:
            assert held(module.graph) == 0
        assert "may be written by add_ between sin and cos" in ledger.decisions[0].reason
        assert show_graph(module.graph) == before
        assert [name for name, _ in module.named_buffers()] == ["weight"]


def test_gradients_are_asked_for_at_the_node() -> None:
    def function(x: Any) -> Any:
        with torch.no_grad():
            y = x.sin()
        return y, x.cos()

    graph = capture(function, [X]).module.graph
    sound = Soundness(graph)
    (sine,), (cosine,) = find(graph, "sin"), find(graph, "cos")
    assert sound.without_grad(sine) is None
    assert sound.without_grad(cosine) == f"{cosine.name} runs with gradients enabled"


def test_a_new_dropout_may_give_back_what_it_reads() -> None:
    """Its fake value is a copy; in eager, outside training, it is the very tensor."""

    def idle(graph: Graph) -> int:
        sound = Soundness(graph)
        for node in find(graph, "clone"):
            _idle(sound, node)
        return sound.rewrites

    def _idle(sound: Soundness, node: Node) -> None:
        source = bind(node)["input"]  # type: ignore[index]
        sound.rewrite(node, lambda new: new(F.dropout, source, 0.5, False))

    def function(x: Any) -> Any:
        copied = x.clone()
        x.add_(1)
        return copied + x

    keeps(idle, function, [X], because="a view of l_x_ in place of a copy, and l_x_ may be written by add_")
    keeps(idle, lambda x: x.clone(), [X], because="is returned")
    rewrites(idle, lambda x: x.clone() + 1, [X], times=1)


def straighten(graph: Graph) -> int:
    """cos(x).t() -> cos(x.t().contiguous()): the same numbers with other strides"""
    sound = Soundness(graph)
    for node in find(graph, "t"):
        cosine = bind(bind(node)["input"], "cos")  # type: ignore[index]
        if cosine is not None:
            _straighten(sound, node, cosine["input"])
    return sound.rewrites


def _straighten(sound: Soundness, node: Node, source: Node) -> None:
    sound.rewrite(node, lambda new: new(torch.cos, new("contiguous", new("t", source))))


class TestCopiesThatBecomeViews:
    """`contiguous` and `reshape` copy only what is not in order."""

    @pytest.mark.parametrize("order", [lambda y: y.contiguous(), lambda y: y.reshape(-1)])
    def test_written(self, order: Any) -> None:
        def function(x: Any) -> Any:
            y = x.cos().t()
            z = order(y)
            z.add_(1)
            return y.sum(0), z.sum()

        keeps(straighten, function, [X], because="z would be a view and was a copy, and z may be written by add_")

    def test_source_written(self) -> None:
        def function(x: Any) -> Any:
            y = x.cos().t()
            z = y.contiguous()
            y.add_(1)
            return z.sum()

        keeps(straighten, function, [X], because="y")

    def test_returned_beside_another(self) -> None:
        def function(x: Any) -> Any:
            y = x.cos().t()
            return y.contiguous(), y.reshape(-1)

        keeps(straighten, function, [X], because="would be a view and was a copy")

    def test_returned_alone(self) -> None:
        def function(x: Any) -> Any:
            y = x.cos().t()
            z = y.contiguous()
            return z.view(-1), y.sum()

        rewrites(straighten, function, [X], times=1)

    def test_views_of_it_follow(self) -> None:
        """What stands in the memory of the copy stands in that of the value now."""

        def function(x: Any) -> Any:
            y = x.cos().t()
            return y.contiguous().view(-1).sum(), y.sum()

        graph = rewrites(straighten, function, [X], times=1).module.graph
        assert Aliases(graph).shares(find(graph, "cos")[0], find(graph, "view")[0])

    def test_views_of_what_did_not_change_stay_where_they_are(self) -> None:
        def function(x: Any) -> Any:
            return x.cos().t().sum(0).view(-1).sin()

        graph = rewrites(straighten, function, [X], times=1).module.graph
        assert Aliases(graph).shares(find(graph, "sum")[0], find(graph, "view")[0])


def test_tensors_that_functorch_wraps_show_no_memory() -> None:
    seen = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(fill_alike(x, x))
        return x.sum()

    torch.func.grad(function)(torch.ones(3))
    assert seen == [False]
    assert fill_alike(torch.ones(3), torch.ones(3))


def test_memory_that_is_joined_stays_joined() -> None:
    """However the links between pieces of memory lie, and whichever is asked for first."""
    for order in itertools.permutations(range(5)):
        aliases = Aliases(Graph())
        for one, other in itertools.pairwise(order):
            aliases.join({one, other})
            aliases.root(order[0])
        assert len({aliases.root(number) for number in order}) == 1, order
