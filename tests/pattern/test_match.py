"""The matcher on graphs as text: every kind of expression, users, keywords, order, barriers, text."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch._dynamo.variables.streams  # registers the ops of streams
from torch.fx import Graph, GraphModule, Node, symbolic_trace

from ferrite.decisions import Decision
from ferrite.errors import Malformed
from ferrite.extension import register_pattern, with_user_passes
from ferrite.graph.ledger import keep_ledger
from ferrite.graph.pattern.check import if_option
from ferrite.graph.pattern.match import Match, find_match
from ferrite.graph.pattern.nodes import AllUses, Anything, Each, Hole, Op, Several, any_call, holes, op
from ferrite.graph.pattern.regions import Regions, is_barrier
from ferrite.graph.pattern.table import PatternTable
from ferrite.graph.pattern.text import parse_pattern, show_pattern
from ferrite.graph.pattern.trace import pattern_of
from ferrite.graph.text import parse_graph, show_graph
from ferrite.options import from_environment
from ferrite.passes import edit
from ferrite.report.record import GraphRecord
from tests.pre_grad.harness import capture, trace

aten = torch.ops.aten


def graph(body: str, inputs: str = "x: f32[4, 4], y: f32[4, 4], b: f32[4]") -> GraphModule:
    lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
    return parse_graph(f"def graph({inputs}):\n{lines}")


def node(module: GraphModule, name: str) -> Node:
    return next(entry for entry in module.graph.nodes if entry.name == name)


def found(pattern: Any, module: GraphModule, name: str) -> Match | None:
    return find_match(pattern, node(module, name))


A, B, C = Hole("a"), Hole("b"), Hole("c")


class TestExpressions:
    def test_holes_hold_what_stands_there(self) -> None:
        module = graph("mm = aten.mm.default(x, y)\nadd = aten.add.Tensor(mm, b)\nreturn (add,)")
        match = found(op(aten.add.Tensor, op(aten.mm.default, A, B), C), module, "add")
        assert match is not None
        assert [match[name].name for name in "abc"] == ["x", "y", "b"]
        assert [entry.name for entry in match.nodes] == ["mm", "add"]
        assert [entry.name for entry in match.calls(aten.mm.default)] == ["mm"]
        assert match.calls("add") == [match.ends[0]]

    def test_the_same_name_is_the_same_value(self) -> None:
        module = graph("one = aten.mul.Tensor(x, x)\ntwo = aten.mul.Tensor(x, y)\nreturn (one, two)")
        assert found(op(aten.mul.Tensor, A, A), module, "one")
        assert not found(op(aten.mul.Tensor, A, A), module, "two")

    def test_alone_holds_no_node_twice(self) -> None:
        module = graph("one = aten.mul.Tensor(x, x)\ntwo = aten.mul.Tensor(x, y)\nreturn (one, two)")
        pattern = op(aten.mul.Tensor, Hole("a", alone=True), Hole("b", alone=True))
        assert found(pattern, module, "two")
        assert not found(pattern, module, "one")
        assert found(op(aten.mul.Tensor, A, B), module, "one")

    def test_alternatives_packets_and_any_arguments(self) -> None:
        module = graph(
            "one = aten.sum.dim_IntList(x, [1])\ntwo = aten.sum.default(x)\n"
            "three = aten.sin.default(x)\nreturn (one, two, three)"
        )
        assert found(any_call(aten.sum), module, "one")
        assert found(any_call(aten.sum), module, "two")
        assert not found(any_call(aten.sum), module, "three")
        assert found(op([aten.cos.default, aten.sin.default], A), module, "three")
        assert found(op(aten.sum.dim_IntList, A, Anything()), module, "one")

    def test_constants_and_lists(self) -> None:
        module = graph("one = aten.sum.dim_IntList(x, [1])\nreturn (one,)")
        assert found(op(aten.sum.dim_IntList, A, (1,)), module, "one")
        assert not found(op(aten.sum.dim_IntList, A, [0]), module, "one")
        assert not found(op(aten.sum.dim_IntList, A, [1, 0]), module, "one")

    @pytest.mark.parametrize(
        ("call", "number", "fits"),
        [
            ("aten.mul.Tensor(x, 2.0)", 2, True),
            ("aten.mul.Tensor(n, 2.0)", 2, False),
            ("aten.mul.Tensor(n, 2)", 2, True),
            ("aten.mul.Tensor(n, 1)", True, False),
            ("aten.mul.Tensor(n, True)", 1, False),
            ("aten.full.default([4], 1.0)", 1, False),
            ("aten.mul.Tensor(x, -0.0)", 0.0, False),
            ("aten.mul.Tensor(x, -0.0)", 0, False),
            ("aten.mul.Tensor(x, -0.0)", -0.0, True),
            ("aten.mul.Tensor(x, 0)", 0.0, True),
        ],
    )
    def test_numbers_of_another_kind(self, call: str, number: Any, fits: bool) -> None:
        """An int stands for a float where it makes no difference: in an op on floats."""
        module = graph(f"out = {call}\nreturn (out,)", "x: f32[4], n: i64[4]")
        assert bool(found(op([aten.mul.Tensor, aten.full.default], A, number), module, "out")) is fits

    def test_the_same_name_is_the_same_number(self) -> None:
        module = graph("one = aten.add.Tensor(x, 2)\ntwo = aten.mul.Tensor(one, 2.0)\nreturn (two,)")
        assert not found(op(aten.mul.Tensor, op(aten.add.Tensor, A, B), B), module, "two")
        assert found(op(aten.mul.Tensor, op(aten.add.Tensor, A, B), C), module, "two")

    def test_modules_and_methods(self) -> None:
        captured = trace(torch.nn.Sequential(torch.nn.Tanh(), torch.nn.ReLU()), [torch.randn(4)])
        last = next(entry for entry in reversed(captured.module.graph.nodes) if entry.op == "call_module")
        match = find_match(op("nn.ReLU", op("nn.Tanh", A)), last)
        assert match is not None
        assert match["a"].op == "placeholder"
        module = graph("one = x.tanh()\nreturn (one,)")
        assert found(op("tanh", A), module, "one")

    def test_dictionaries_are_compared_entry_by_entry(self) -> None:
        def unknown(options: Any) -> Any:
            return options

        plain = Graph()
        x = plain.placeholder("x")
        call = plain.call_function(unknown, ({"x": x, "sizes": (2, [3])},))
        assert find_match(op(unknown, {"x": A, "sizes": [2, (3,)]}), call)
        assert not find_match(op(unknown, {"x": A, "sizes": [2, (4,)]}), call)
        assert not find_match(op(unknown, {"x": A}), call)

    def test_an_expression_used_twice_is_one_node(self) -> None:
        module = graph(
            "one = aten.sin.default(x)\ntwo = aten.sin.default(x)\n"
            "same = aten.mul.Tensor(one, one)\nother = aten.mul.Tensor(one, two)\nreturn (same, other)"
        )
        shared = op(aten.sin.default, A, users=None)
        assert found(op(aten.mul.Tensor, shared, shared), module, "same")
        assert not found(op(aten.mul.Tensor, shared, shared), module, "other")

    def test_each_element_of_a_list(self) -> None:
        module = graph(
            "one = aten.sin.default(x)\ntwo = aten.sin.default(y)\n"
            "whole = aten.cat.default([one, two])\nsome = aten.cat.default([one, x])\nreturn (whole, some)"
        )
        each = Each(op(aten.sin.default, A, users=None))
        match = found(op(aten.cat.default, each), module, "whole")
        assert match is not None
        assert [entry.name for entry in match["a"]] == ["x", "y"]
        assert not found(op(aten.cat.default, each), module, "some")
        partly = found(op(aten.cat.default, Each(op(aten.sin.default, A, users=None), partial=True)), module, "some")
        assert partly is not None
        assert [entry.name for entry in partly["a"]] == ["x"]

    def test_all_uses_of_a_producer(self) -> None:
        body = "split = aten.split.Tensor(x, 2)\none = operator.getitem(split, 0)\ntwo = operator.getitem(split, 1)\n"
        split = op(aten.split.Tensor, A, 2, users=None)
        pattern = op(aten.sin.default, AllUses(op(operator.getitem, split, Hole("index"), users=None)))
        module = graph(body + "sin = aten.sin.default(one)\nreturn (sin, two)")
        match = found(pattern, module, "sin")
        assert match is not None
        assert match["index"] == (0, 1)

    @pytest.mark.parametrize("last", ["aten.sub.Tensor(cat, {})", "aten.sub.Tensor({}, cat)"])
    def test_a_name_inside_and_outside_of_repetitions_is_one_value(self, last: str) -> None:
        """Whichever of them is met first. In the first product it may be either factor."""
        cat = op(aten.cat.default, Each(op(aten.mul.Tensor, A, B)))
        pattern = op(aten.sub.Tensor, cat, B) if last.endswith("{})") else op(aten.sub.Tensor, B, cat)
        for one, two, end, fits in (
            ("b, x", "y, b", "b", True),
            ("x, b", "y, c", "b", False),
            ("x, c", "y, c", "b", False),
        ):
            module = graph(
                f"one = aten.mul.Tensor({one})\ntwo = aten.mul.Tensor({two})\ncat = aten.cat.default([one, two])\n"
                f"sub = {last.format(end)}\nreturn (sub,)",
                "x: f32[4, 4], y: f32[4, 4], b: f32[4], c: f32[4]",
            )
            match = found(pattern, module, "sub")
            assert (match is not None) is fits
            if match is not None:
                assert match["b"] is node(module, "b")
                assert [entry.name for entry in match["a"]] == ["x", "y"]

    @pytest.mark.parametrize("first", ["hole", "uses"])
    def test_a_name_inside_and_outside_of_all_uses_is_one_value(self, first: str) -> None:
        exp = op(aten.exp.default, A, users=None)
        uses = AllUses(op(aten.mul.Tensor, exp, B, users=None))
        pattern = op(aten.sub.Tensor, uses, B) if first == "uses" else op(aten.sub.Tensor, B, uses)
        for factor, end, fits in (("b", "b", True), ("c", "b", False), ("b", "c", False)):
            operands = f"one, {end}" if first == "uses" else f"{end}, one"
            module = graph(
                f"exp = aten.exp.default(x)\none = aten.mul.Tensor(exp, b)\ntwo = aten.mul.Tensor(exp, {factor})\n"
                f"sub = aten.sub.Tensor({operands})\nreturn (sub, two)",
                "x: f32[4, 4], b: f32[4], c: f32[4]",
            )
            assert bool(found(pattern, module, "sub")) is fits

    @pytest.mark.parametrize("first", ["list", "hole"])
    def test_alone_inside_and_outside_of_repetitions(self, first: str) -> None:
        alone, other = Hole("a", alone=True), Hole("b", alone=True)
        cat = op(aten.cat.default, Each(op(aten.sin.default, other)))
        pattern = op(aten.sub.Tensor, *((cat, alone) if first == "list" else (alone, cat)))
        for end, fits in (("b", True), ("x", False), ("y", False)):
            operands = f"cat, {end}" if first == "list" else f"{end}, cat"
            module = graph(
                "one = aten.sin.default(x)\ntwo = aten.sin.default(y)\ncat = aten.cat.default([one, two])\n"
                f"sub = aten.sub.Tensor({operands})\nreturn (sub,)",
                "x: f32[1], y: f32[1], b: f32[1]",
            )
            assert bool(found(pattern, module, "sub")) is fits

    def test_alone_in_one_repetition_and_the_next(self) -> None:
        """The same name may hold a node again; another may not."""
        pattern = op(aten.cat.default, Each(op(aten.sub.Tensor, Hole("a", alone=True), Hole("b", alone=True))))
        for two, fits in (("x, y", True), ("y, x", False)):
            module = graph(
                f"one = aten.sub.Tensor(x, y)\ntwo = aten.sub.Tensor({two})\ncat = aten.cat.default([one, two])\n"
                "return (cat,)"
            )
            assert bool(found(pattern, module, "cat")) is fits

    def test_several_ends(self) -> None:
        body = "exp = aten.exp.default(x)\ntotal = aten.sum.default(exp)\nratio = aten.div.Tensor(exp, total)\n"
        module = graph(body + "return (total, ratio)")
        exp = op(aten.exp.default, A, users=2)
        total = op(aten.sum.default, exp, users=None)
        pattern = Several((total, op(aten.div.Tensor, exp, total)))
        match = found(pattern, module, "total")
        assert match is not None
        assert [entry.name for entry in match.ends if entry] == ["total", "ratio"]
        assert not found(pattern, graph(body.replace("(exp, total)", "(x, total)") + "return (total, ratio)"), "total")

    def test_an_end_that_was_tried_and_failed_leaves_nothing_behind(self) -> None:
        """The first product binds b to y, of which there is no cosine; the second is the one."""
        module = graph(
            "exp = aten.exp.default(x)\none = aten.mul.Tensor(exp, y)\ntwo = aten.mul.Tensor(exp, b)\n"
            "cos = aten.cos.default(b)\nreturn (exp, one, two, cos)"
        )
        exp = op(aten.exp.default, A, users=None)
        pattern = Several((exp, op(aten.mul.Tensor, exp, B, users=None), op(aten.cos.default, B)))
        match = found(pattern, module, "exp")
        assert match is not None
        assert [entry.name for entry in match.ends if entry] == ["exp", "two", "cos"]
        assert match["b"].name == "b"
        assert [entry.name for entry in match.nodes] == ["exp", "two", "cos"]

    def test_an_end_that_nobody_needs(self) -> None:
        module = graph("exp = aten.exp.default(x)\nreturn (exp,)")
        match = found(Several((None, op(aten.exp.default, A))), module, "exp")
        assert match is not None
        assert match.ends[0] is None


class TestUsers:
    BODY = "one = aten.view.default(x, [16])\ntwo = aten.view.default(one, [4, 4])\n"
    PATTERN = op(aten.view.default, op(aten.view.default, A, Anything()), Hole("size"))

    def test_one_user(self) -> None:
        assert found(self.PATTERN, graph(self.BODY + "return (two,)"), "two")

    def test_returned_as_well(self) -> None:
        assert not found(self.PATTERN, graph(self.BODY + "return (two, one)"), "two")

    def test_any_number(self) -> None:
        many = op(aten.view.default, op(aten.view.default, A, Anything(), users=None), Hole("size"))
        assert found(many, graph(self.BODY + "return (two, one)"), "two")


class TestKeywords:
    @pytest.mark.parametrize(
        ("call", "fits"),
        [
            ("aten.addmm.default(b, x, y)", True),
            ("aten.addmm.default(b, x, y, beta=1.0)", True),
            ("aten.addmm.default(b, x, y, beta=1, alpha=1)", True),
            ("aten.addmm.default(b, x, y, beta=0.5)", False),
            ("aten.addmm.default(b, x, y, alpha=2)", False),
        ],
    )
    def test_what_is_not_mentioned_has_its_default(self, call: str, fits: bool) -> None:
        assert bool(found(op(aten.addmm.default, C, A, B), graph(f"out = {call}\nreturn (out,)"), "out")) is fits

    def test_what_is_mentioned_may_be_left_out(self) -> None:
        pattern = op(aten.addmm.default, C, A, B, beta=1, alpha=Hole("alpha"))
        match = found(pattern, graph("out = aten.addmm.default(b, x, y)\nreturn (out,)"), "out")
        assert match is not None
        assert match["alpha"] == 1

    @pytest.mark.parametrize("call", ["torch.sum(x, 1)", "torch.sum(x, dim=1)", "x.sum(1)", "x.sum(axis=1)"])
    def test_kinds_stand_for_all_spellings(self, call: str) -> None:
        module = graph(f"out = {call}\nreturn (out,)")
        assert found(op("sum", A, 1), module, "out")
        assert found(op("sum", A, dim=1), module, "out")
        assert not found(op("sum", A, 0), module, "out")
        assert not found(op("sum", A), module, "out")

    @pytest.mark.parametrize(
        ("call", "fits"),
        [
            ("x.to(torch.float64)", True),
            ("x.to(dtype=torch.float64)", True),
            ("x.to(torch.float32)", False),
            ("x.to(torch.float64, copy=True)", False),
            ("x.to(y)", False),
        ],
    )
    def test_casts_by_any_spelling(self, call: str, fits: bool) -> None:
        module = graph(f"out = {call}\nreturn (out,)")
        pattern = pattern_of(symbolic_trace(lambda a: a.to(torch.float64)), ["a"], constants=True)
        assert bool(found(pattern, module, "out")) is fits


class TestCommutative:
    def test_both_orders(self) -> None:
        pattern = op(aten.add.Tensor, op(aten.mm.default, A, B), C)
        for operands in ("mm, b", "b, mm"):
            module = graph(f"mm = aten.mm.default(x, y)\nadd = aten.add.Tensor({operands})\nreturn (add,)")
            match = found(pattern, module, "add")
            assert match is not None
            assert match["c"].name == "b"

    def test_not_with_alpha(self) -> None:
        module = graph("mm = aten.mm.default(x, y)\nadd = aten.add.Tensor(b, mm, alpha=2)\nreturn (add,)")
        assert not found(op(aten.add.Tensor, op(aten.mm.default, A, B), C, alpha=2), module, "add")

    def test_not_for_others(self) -> None:
        module = graph("mm = aten.mm.default(x, y)\nsub = aten.sub.Tensor(b, mm)\nreturn (sub,)")
        assert not found(op(aten.sub.Tensor, op(aten.mm.default, A, B), C), module, "sub")

    def test_a_failed_order_leaves_nothing_behind(self) -> None:
        """In the first order a is bound to y before the rest fails; in the second it must be free."""
        module = graph(
            "one = aten.sin.default(y)\ntwo = aten.sin.default(x)\ncos = aten.cos.default(x)\n"
            "add = aten.add.Tensor(one, two)\nmul = aten.mul.Tensor(add, cos)\nreturn (mul,)"
        )
        pattern = op(aten.mul.Tensor, op(aten.add.Tensor, op(aten.sin.default, A), B), op(aten.cos.default, A))
        match = found(pattern, module, "mul")
        assert match is not None
        assert (match["a"].name, match["b"].name) == ("x", "one")


class TestTable:
    BODY = "one = aten.sin.default(x)\ntwo = aten.sin.default(one)\nreturn (two,)"

    def test_from_last_to_first_and_in_order(self) -> None:
        seen: list[str] = []
        table = PatternTable()
        for name, first in (("late", False), ("later", False), ("early", True)):
            table.add(
                name,
                op(aten.sin.default, Hole(name)),
                lambda match, name=name: bool(seen.append(f"{name} {match.ends[0].name}")),
                first=first,
            )
        module = graph(self.BODY)
        assert table.apply(module.graph) == 0
        assert seen == [f"{name} {where}" for where in ("two", "one") for name in ("early", "late", "later")]

    def test_stops_when_the_node_is_gone(self) -> None:
        table, seen = PatternTable(), []

        def remove(match: Match) -> None:
            end = match.ends[0]
            end.replace_all_uses_with(match["a"])
            end.graph.erase_node(end)

        table.add("remove", op(aten.sin.default, A), remove)
        table.add("never", op(aten.sin.default, B), lambda match: bool(seen.append(match)))
        module = graph(self.BODY)
        with keep_ledger(module.graph, "table") as ledger:
            assert table.apply(module.graph) == 2
        assert (seen, table.counts["remove"], ledger.taken) == ([], 2, 2)
        assert show_graph(module.graph).count("sin") == 0

    def test_the_limit_of_the_ledger(self) -> None:
        table = PatternTable()
        table.add("count", op(aten.sin.default, A), lambda match: None)
        module = graph(self.BODY)
        with keep_ledger(module.graph, "table", 1):
            assert table.apply(module.graph) == 1

    def test_duplicates(self) -> None:
        table = PatternTable()
        table.add("one", op(aten.sin.default, A), lambda match: None)
        with pytest.raises(ValueError, match="the pattern two is registered already, as one"):
            table.add("two", op(aten.sin.default, A), lambda match: None)
        table.add("two", op(aten.sin.default, A), lambda match: None, skip_duplicates=True)
        table.add("three", op(aten.sin.default, A), lambda match: None, also="another constant")
        assert [entry.name for entry in table.entries] == ["one", "three"]

    @pytest.mark.parametrize(
        ("answer", "reason"), [(False, "its check says no"), ("too small", "too small"), ("", "its check says no")]
    )
    def test_a_check_says_no(self, answer: Any, reason: str) -> None:
        table, module = PatternTable(), graph(self.BODY)
        table.add("never", op(aten.sin.default, A), lambda match: None, check=lambda match: answer)
        with keep_ledger(module.graph, "table") as ledger:
            assert table.apply(module.graph) == 0
        assert ledger.decisions == [Decision("table", (name,), False, reason) for name in ("two", "one")]

    @pytest.mark.parametrize(("wanted", "found"), [(True, 2), (False, 0)])
    def test_an_option_is_asked_for_by_name(self, wanted: bool, found: int) -> None:
        table, module = PatternTable(), graph(self.BODY)
        table.add("some", op(aten.sin.default, A), lambda match: None, check=if_option("runtime_asserts", wanted))
        with keep_ledger(module.graph, "table", options={"runtime_asserts": True}) as ledger:
            assert table.apply(module.graph) == found
        refused = {decision.reason for decision in ledger.decisions if not decision.taken}
        assert refused == (set() if found else {"the option runtime_asserts is True, not False"})

    def test_an_option_that_nobody_may_ask_for(self) -> None:
        table, module = PatternTable(), graph(self.BODY)
        table.add("some", op(aten.sin.default, A), lambda match: None, check=if_option("strict"))
        with (
            keep_ledger(module.graph, "table", options={"b": 1, "a": 2}),
            pytest.raises(ValueError, match=r"cannot ask for the option 'strict'; it can for a, b"),
        ):
            table.apply(module.graph)

    def test_says_why_not(self) -> None:
        table, said = PatternTable(), []
        table.add("pair", op(aten.sin.default, op(aten.cos.default, A)), lambda match: None)
        table.apply(graph(self.BODY).graph, lambda *words: said.append(words))
        assert said[0] == ("pair", "two", "aten.cos.default: one is aten.sin.default")

    def test_says_why_not_in_the_log(self, caplog: pytest.LogCaptureFixture) -> None:
        table = PatternTable()
        table.add("pair", op(aten.sin.default, op(aten.cos.default, A)), lambda match: None)
        module = graph(self.BODY)
        with keep_ledger(module.graph, "table", None, ("one",)):
            table.apply(module.graph)
        assert [record.message for record in caplog.records] == [
            "Ferrite's pattern pair does not fit at one: aten.cos.default: x is x"
        ]

    @pytest.mark.parametrize(("names", "heard"), [("all", ["two", "one"]), ("one", ["one"]), ("three", [])])
    def test_the_environment_says_where(self, names: str, heard: list[str], caplog: pytest.LogCaptureFixture) -> None:
        def pair(x: Any) -> Any:
            return torch.ops.aten.sin.default(torch.ops.aten.cos.default(x))

        options = from_environment({"FERRITE_EXPLAIN_PATTERNS": names})
        with register_pattern(pair, lambda x: x, [torch.randn(2)]):
            edit(graph(self.BODY), "post_grad", with_user_passes("post_grad", ()), options, GraphRecord("test", "x"))
        said = [record.message for record in caplog.records]
        assert [next(name for name in ("one", "two") if f"fit at {name}:" in text) for text in said] == heard

    def test_nothing_is_written_unless_somebody_asks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Texts of reasons are made when they are read."""
        body = "split = aten.split.Tensor(x, 2)\none = operator.getitem(split, 0)\nsin = aten.sin.default(one)\n"
        body += (
            "sum = aten.sum.dim_IntList(x, [0], True)\nadd = aten.add.Tensor(sin, sum, alpha=2)\nreturn (add, split)"
        )
        module = graph(body)
        split = op(aten.split.Tensor, A, 2, users=None)
        table = PatternTable()
        for number, pattern in enumerate(
            (
                op(aten.sin.default, AllUses(op(operator.getitem, split, Hole("index"), users=None))),
                op(aten.sum.dim_IntList, A, [0]),
                op(aten.sum.dim_IntList, A, [0, 1], True),
                op(aten.add.Tensor, A, A),
                op(aten.add.Tensor, op(aten.cos.default, A), B, alpha=2),
            )
        ):
            table.add(f"pattern {number}", pattern, lambda match: None)
        said: list[str] = []
        assert table.apply(module.graph, lambda *words: said.append(words[2])) == 0
        assert len(said) == 5
        monkeypatch.setattr(Node, "__repr__", lambda node: pytest.fail("a text was made"))
        assert table.apply(module.graph) == 0

    def test_other_nodes_are_not_looked_at(self, monkeypatch: pytest.MonkeyPatch) -> None:
        table = PatternTable()
        table.add("cos", op(aten.cos.default, A), lambda match: None)
        module = graph(self.BODY)
        assert [table.candidates(entry) for entry in module.graph.nodes] == [[]] * len(module.graph.nodes)


class TestBarriers:
    @pytest.mark.parametrize("kind", ["plain", "copy_", "no_grad", "autocast", "seed", "out"])
    def test_a_pattern_does_not_reach_across(self, kind: str) -> None:
        def function(x: Any, y: Any) -> Any:
            one = x.sin()
            if kind == "copy_":
                y.copy_(x)
            elif kind == "no_grad":
                with torch.no_grad():
                    return one + y
            elif kind == "autocast":
                with torch.autocast("cpu"):
                    return one + y
            elif kind == "out":
                torch.cos(x, out=y)
            return one + y

        captured = capture(function, [torch.randn(4), torch.randn(4)])
        if kind == "seed":  # Dynamo breaks the graph here, others may not
            with captured.module.graph.inserting_before(node(captured.module, "add")):
                captured.module.graph.call_function(torch.manual_seed, (3,))
        table = PatternTable()
        table.add("pair", op("add", op("sin", A), B), lambda match: None)
        assert table.apply(captured.module.graph) == (1 if kind == "plain" else 0)

    @pytest.mark.parametrize(("streams", "times"), [((None, None), 1), ((1, None), 0), ((1, 2), 0), ((1, 1), 1)])
    def test_a_pattern_stays_on_one_stream(self, streams: tuple[int | None, ...], times: int) -> None:
        module = graph("one = aten.sin.default(x)\nadd = aten.add.Tensor(one, y)\nreturn (add,)")
        for name, stream in zip(("one", "add"), streams, strict=True):
            if stream is not None:
                node(module, name).meta["custom"] = {"stream": stream}
        table = PatternTable()
        table.add("pair", op(aten.add.Tensor, op(aten.sin.default, A), B), lambda match: None)
        assert table.apply(module.graph) == times

    def test_a_write_that_a_rewrite_brings_in_is_a_barrier(self) -> None:
        module = graph(
            "one = aten.sin.default(x)\ntwo = aten.cos.default(x)\nadd = aten.add.Tensor(one, two)\nreturn (add,)"
        )
        found: list[str] = []

        def writes(match: Match) -> None:
            with module.graph.inserting_before(match.ends[0]):
                module.graph.call_function(aten.zero_.default, (match["b"],))
            match.ends[0].target = aten.tan.default

        table = PatternTable()
        table.add("first", op(aten.cos.default, B), writes)
        table.add("second", op(aten.add.Tensor, op(aten.sin.default, A), C), lambda match: bool(found.append("sum")))
        assert table.apply(module.graph) == 1  # the sum is visited first, and left alone
        assert table.apply(module.graph) == 0
        assert found == ["sum"]

    @pytest.mark.parametrize(
        ("target", "arguments", "expected"),
        [
            (torch.manual_seed, {}, True),
            (torch.random.set_rng_state, {}, True),
            (torch._C._set_grad_enabled, {}, True),
            (torch.amp.autocast_mode._enter_autocast, {}, True),
            (torch.amp.autocast_mode._exit_autocast, {}, True),
            (torch.cuda.set_stream, {}, True),
            (operator.setitem, {}, True),
            (operator.iadd, {}, True),
            (torch.relu_, {}, True),
            (aten.add_.Tensor, {}, True),
            (torch.ops.streams.record_event.default, {}, True),
            (torch.ops.streams.wait_event.default, {}, True),
            (torch.sin, {"out": "x"}, True),
            ("mul_", {}, True),
            ("mul", {}, False),
            ("__rshift__", {}, False),
            (torch.sin, {}, False),
            (torch.nn.functional.one_hot, {}, False),
        ],
    )
    def test_what_is_a_barrier(self, target: Any, arguments: dict[str, str], expected: bool) -> None:
        plain = Graph()
        x = plain.placeholder("x")
        given = dict.fromkeys(arguments, x)
        make = plain.call_method if isinstance(target, str) else plain.call_function
        assert is_barrier(make(target, (x,), given)) is expected

    def test_a_wrapped_write_is_none(self) -> None:
        wrapped = torch.ops.higher_order.auto_functionalized
        plain = Graph()
        x = plain.placeholder("x")
        assert not is_barrier(plain.call_function(wrapped, (aten.copy_.default,), {"self": x, "src": x}))
        assert is_barrier(plain.call_function(aten.copy_.default, (x, x)))

    def test_a_write_stands_between_two_regions(self) -> None:
        module = graph(
            "one = aten.sin.default(x)\ntwo = aten.cos.default(x)\nwrite = aten.zero_.default(y)\n"
            "add = aten.add.Tensor(one, two)\nreturn (add,)"
        )
        regions = Regions(module.graph)
        one, two, write, add = (node(module, name) for name in ("one", "two", "write", "add"))
        assert regions.of(one) == regions.of(two) < regions.of(write) < regions.of(add)
        assert regions.reach_across([one, add])
        assert not regions.reach_across([one, two])

    @pytest.mark.parametrize(
        "shift", [lambda x: x >> 1, lambda x: x.__rshift__(1), lambda x: aten.__rshift__.Scalar(x, 1), lambda x: 1 << x]
    )
    def test_shifts_are_no_writes(self, shift: Any) -> None:
        captured = capture(lambda x: shift(x) + 1, [torch.arange(4)])
        regions = Regions(captured.module.graph)
        assert not regions.reach_across(captured.module.graph.nodes)


class TestText:
    @pytest.mark.parametrize(
        "text",
        [
            "return aten.add.Tensor(aten.mm.default(a, b), c)\n",
            "t0 = users(2, aten.sin.default(a))\nreturn aten.mul.Tensor(t0, t0)\n",
            "return aten.sum.dim_IntList(a, [1, -1], True, dtype=torch.float32)\n",
            "return either(aten.add.Tensor, aten.sub.Tensor)(a, _)\n",
            "return users(None, aten.sum(...))\n",
            "return kind.cat(tensors=each(kind.tanh(input=a)), dim=1)\n",
            "return kind.cat(tensors=some(kind.tanh(input=a)), dim=1)\n",
            "return aten.sin.default(all_uses(operator.getitem(users(None, aten.split.Tensor(x, 2)), index)))\n",
            "return aten.mul.Tensor(alone('a'), alone('b'))\n",
            "return aten.view.default(a, [size('s0'), 4])\n",
            "t0 = users(2, aten.exp.default(a))\nt1 = users(None, aten.sum.default(t0))\n"
            "return several(t1, aten.div.Tensor(t0, t1), None)\n",
            "return aten.add.Tensor(a, inf, alpha=-1.5)\n",
            "return aten.full.default([2], 1, device=torch.device('cpu'))\n",
        ],
    )
    def test_reads_back(self, text: str) -> None:
        assert show_pattern(parse_pattern(text)) == text

    def test_what_is_no_pattern(self) -> None:
        for text in ("return a\n", "t0 = aten.sin.default(a)\n"):
            with pytest.raises(Malformed, match="not a pattern"):
                parse_pattern(text)

    def test_holes(self) -> None:
        assert holes(parse_pattern("return aten.add.Tensor(aten.mm.default(a, b), a)\n")) == ["a", "b"]
        assert isinstance(parse_pattern("return aten.sin.default(a)\n"), Op)
