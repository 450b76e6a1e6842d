"""Patterns made of functions: found by a filter, held against the real thing, and replaced."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import ferrite
from ferrite import pipeline
from ferrite.extension import register_pattern, with_user_passes
from ferrite.graph.decompose import decomposition_table
from ferrite.graph.pattern import trace as tracing
from ferrite.graph.pattern.match import Match, find_match
from ferrite.graph.pattern.nodes import Hole, op
from ferrite.graph.pattern.splice import replace_by_example
from ferrite.graph.pattern.table import PatternTable
from ferrite.graph.pattern.traced import TracedPattern
from ferrite.graph.strides import note_output_strides
from ferrite.graph.text import parse_graph, show_graph
from ferrite.options import Options, resolve
from ferrite.registry import digest
from ferrite.report.record import GraphRecord
from tests.pre_grad.harness import capture, keeps, rewrites

aten = torch.ops.aten


def graph(body: str, inputs: str = "x: f32[4, 5], y: f32[5, 6], b: f32[6]") -> GraphModule:
    lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
    return parse_graph(f"def graph({inputs}):\n{lines}")


def calls(module: GraphModule) -> list[Node]:
    return [node for node in module.graph.nodes if node.op == "call_function"]


def in_a_list(function: Any) -> Any:
    return lambda x, y: [function(x, y)]


def add_of_product(**settings: Any) -> TracedPattern:
    inputs = [torch.randn(2, 3), torch.randn(3, 4), torch.randn(4)]
    return TracedPattern(
        "addmm", lambda a, b, c: torch.mm(a, b) + c, lambda a, b, c: torch.addmm(c, a, b), inputs, **settings
    )


PRODUCT = "mm = aten.mm.default(x, y)\nadd = aten.add.Tensor({})\nreturn (add,)"


def applied(pattern: TracedPattern, module: GraphModule) -> int:
    """Apply it, and hold the results of both graphs against each other."""
    inputs = [torch.randn(node.meta["val"].shape) for node in module.graph.find_nodes(op="placeholder")]
    expected = Interpreter(module).run(*(value.clone() for value in inputs))
    count = pattern.apply(module.graph)
    module.graph.lint()
    assert all("val" in node.meta for node in module.graph.nodes if node.op == "call_function")
    torch.testing.assert_close(Interpreter(module).run(*inputs), expected)
    return count


class TestAfterAutograd:
    @pytest.mark.parametrize("operands", ["mm, b", "b, mm"])
    def test_replaced(self, operands: str) -> None:
        module = graph(PRODUCT.format(operands))
        assert applied(add_of_product(), module) == 1
        assert "aten.addmm.default(b, x, y)" in show_graph(module.graph)
        assert "aten.mm" not in show_graph(module.graph)

    @pytest.mark.parametrize("operands", ["mm, b, alpha=3", "mm, 4", "mm, mm"])
    def test_what_only_looks_like_it_stays(self, operands: str) -> None:
        assert applied(add_of_product(), graph(PRODUCT.format(operands))) == 0

    def test_a_middle_value_that_is_returned_stays(self) -> None:
        assert applied(add_of_product(), graph(PRODUCT.format("mm, b").replace("(add,)", "(add, mm)"))) == 0

    def test_the_check_decides(self) -> None:
        seen = []
        pattern = add_of_product(extra_check=lambda match: seen.append(match["c"].name) or False)
        assert applied(pattern, graph(PRODUCT.format("mm, b"))) == 0
        assert seen == ["b"]

    def test_constants_are_held_against_the_real_thing(self) -> None:
        """The filter takes any dimension; the trace on the real value knows that it must be the last."""
        pattern = TracedPattern(
            "shift",
            lambda x: torch.exp(x - x.amax(1, keepdim=True)),
            lambda x: torch.exp(x) / x.amax(1, keepdim=True).exp(),
            [torch.randn(2, 3)],
        )
        body = "amax = aten.amax.default(x, [{}], True)\nsub = aten.sub.Tensor(x, amax)\n"
        body += "exp = aten.exp.default(sub)\nreturn (exp,)"
        assert applied(pattern, graph(body.format(1), "x: f32[4, 4]")) == 1
        assert applied(pattern, graph(body.format(0), "x: f32[4, 4]")) == 0

    def test_constants_are_held_against_the_real_thing_with_a_kept_text_too(self) -> None:
        """The peer took any permute for that of its attention, and any constant: #195320, #195282."""

        def scaled(x: Any, y: Any, order: Any = (0, 2, 1), scale: float = 8.0) -> Any:
            return torch.softmax(x.permute(order) / scale, -1) + y

        settings = {"search": lambda x, y: scaled(x, y), "replacement": lambda x, y: y + torch.softmax(x.mT / 8.0, -1)}
        text = TracedPattern("kept", inputs=[torch.randn(2, 3, 3), torch.randn(2, 3, 3)], **settings).serialised()
        trace = partial(make_fx, tracing_mode="fake", decomposition_table=decomposition_table((), use_rows=True))
        for order, scale, count in (([0, 2, 1], 8.0, 1), ([1, 0, 2], 8.0, 0), ([0, 2, 1], 4.0, 0)):
            program = partial(scaled, order=order, scale=scale)
            module = trace(in_a_list(program))(torch.randn(3, 3, 3), torch.randn(3, 3, 3))
            pattern = TracedPattern("kept", inputs=[torch.randn(2, 3, 3)] * 2, text=text, **settings)
            assert pattern.apply(module.graph) == count

    def test_a_replacement_of_another_kind_is_refused(self) -> None:
        pattern = TracedPattern("half", lambda x: x.sin(), lambda x: x.sin().half(), [torch.randn(2)])
        assert applied(pattern, graph("sin = aten.sin.default(x)\nreturn (sin,)", "x: f32[4]")) == 0

    def test_what_cannot_be_traced_is_no_match(self) -> None:
        pattern = TracedPattern(
            "wide", lambda x: x.sin(), lambda x: x.reshape(7, 7).sin().reshape(x.shape), [torch.randn(49)]
        )
        assert applied(pattern, graph("sin = aten.sin.default(x)\nreturn (sin,)", "x: f32[4]")) == 0

    def test_numbers_that_are_parameters(self) -> None:
        pattern = TracedPattern(
            "scale",
            lambda x, s: torch.relu(x * s),
            lambda x, s: torch.clamp(x, min=0) * s,
            [torch.randn(2)],
            scalars={"s": 0.113377},
        )
        module = graph("mul = aten.mul.Tensor(x, 3.0)\nrelu = aten.relu.default(mul)\nreturn (relu,)", "x: f32[4]")
        assert applied(pattern, module) == 1
        assert "3.0" in show_graph(module.graph)
        with pytest.raises(ValueError, match="must differ from each other"):
            TracedPattern("bad", lambda x, s, t: x * s * t, lambda x, s, t: x, [], scalars={"s": 1.5, "t": 1.5})

    def test_several_results(self) -> None:
        pattern = TracedPattern(
            "both", lambda x: (x.sin(), x.cos()), lambda x: (torch.sin(x + 0), torch.cos(x + 0)), [torch.randn(2)]
        )
        module = graph("sin = aten.sin.default(x)\ncos = aten.cos.default(x)\nreturn (sin, cos)", "x: f32[4]")
        assert applied(pattern, module) == 1
        assert show_graph(module.graph).count("aten.add") == 2

    @pytest.mark.parametrize("first", ["sin", "cos"])
    def test_several_results_come_before_the_first_of_them(self, first: str) -> None:
        """Whichever of the ends that is: what reads it stands before the other end."""
        pattern = TracedPattern(
            "both", lambda x: (x.sin(), x.cos()), lambda x: (torch.sin(x + 0), torch.cos(x + 0)), [torch.randn(2)]
        )
        second = "cos" if first == "sin" else "sin"
        body = f"one = aten.{first}.default(x)\nneg = aten.neg.default(one)\ntwo = aten.{second}.default(x)\n"
        module = graph(body + "return (neg, two)", "x: f32[4]")
        assert applied(pattern, module) == 1
        assert [node.name for node in calls(module)][-1] == "neg"

    def test_an_input_that_stands_too_late(self) -> None:
        pattern = TracedPattern(
            "two", lambda x, y: (x.sin(), y.cos()), lambda x, y: (y.sin() * 0 + x.sin(), y.cos()), [torch.randn(2)] * 2
        )
        body = "sin = aten.sin.default(x)\nexp = aten.exp.default(sin)\ncos = aten.cos.default(exp)\nreturn (sin, cos)"
        assert applied(pattern, graph(body, "x: f32[4]")) == 0

    def test_results_by_index(self) -> None:
        module = graph(
            "both = aten.aminmax.default(x)\nleast = operator.getitem(both, 0)\n"
            "most = operator.getitem(both, 1)\nreturn (least, most)",
            "x: f32[4]",
        )
        match = find_match(op(aten.aminmax.default, Hole("x")), calls(module)[0])
        assert match is not None
        made = replace_by_example(match, lambda x: (x.amin(), x.amax()), [match["x"]])
        assert made == calls(module)
        text = show_graph(module.graph)
        assert "aminmax" not in text
        assert "getitem" not in text

    def test_nested_arguments_of_a_replacement(self) -> None:
        module = graph("cat = aten.cat.default([x, x])\nreturn (cat,)", "x: f32[4]")
        match = find_match(op(aten.cat.default, Hole("parts")), calls(module)[0])
        assert match is not None
        assert replace_by_example(match, lambda parts, k: parts[0].repeat(k), [match["parts"], 2]) == calls(module)
        assert "aten.repeat.default(x, [2])" in show_graph(module.graph)

    @pytest.mark.parametrize(
        ("replacement", "reason"),
        [
            (lambda x: x.sin().half(), "f16"),
            (lambda x: x.nosuch(), "the replacement cannot be traced: .*nosuch"),
            (lambda x: (x.sin(), x.cos()), "2 results in place of 1|sin"),
        ],
    )
    def test_a_replacement_that_does_not_fit_says_why_and_changes_nothing(self, replacement: Any, reason: str) -> None:
        module = graph("sin = aten.sin.default(x)\nreturn (sin,)", "x: f32[4]")
        before = show_graph(module.graph)
        match = find_match(op(aten.sin.default, Hole("x")), calls(module)[0])
        assert match is not None
        said = replace_by_example(match, replacement, [match["x"]])
        assert isinstance(said, str)
        assert re.search(reason, said)
        assert show_graph(module.graph) == before

    def test_what_the_replacement_computes_for_nobody_is_left_out(self) -> None:
        module = graph("sin = aten.sin.default(x)\nreturn (sin,)", "x: f32[4]")
        pattern = TracedPattern("dead", lambda x: x.sin(), lambda x: (x.exp(), x.sin() + 0)[1], [torch.randn(2)])
        assert applied(pattern, module) == 1
        assert "exp" not in show_graph(module.graph)

    def test_arguments_of_a_replacement_that_are_numbers_of_the_graph(self) -> None:
        """They are read when the graph runs: neither the node nor its value is written into the call."""
        module = graph("mul = aten.mul.Tensor(x, s)\nreturn (mul,)", "x: f32[4], s: f32[1]")
        match = find_match(op(aten.mul.Tensor, Hole("x"), Hole("s")), calls(module)[0])
        assert match is not None
        made = replace_by_example(match, lambda x, s: (x + x) * (s / 2), [match["x"], match["s"]])
        assert made == calls(module)
        assert len(made) == 3
        x, s = torch.randn(4), torch.tensor([3.0])
        torch.testing.assert_close(Interpreter(module).run(x, s)[0], x * s)

    def test_a_replacement_that_writes(self) -> None:
        """Nobody reads what the write gives, and it stays all the same."""
        module = graph("sin = aten.sin.default(x)\nreturn (sin,)", "x: f32[4], y: f32[4]")
        match = find_match(op(aten.sin.default, Hole("x")), calls(module)[0])
        assert match is not None
        y = module.graph.find_nodes(op="placeholder")[1]

        def writes(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            y.copy_(x)
            return x.cos()

        assert replace_by_example(match, writes, [match["x"], y]) == calls(module)
        given, kept = torch.randn(4), torch.zeros(4)
        torch.testing.assert_close(Interpreter(module).run(given, kept)[0], given.cos())
        torch.testing.assert_close(kept, given)

    def test_what_a_replacement_refers_to_gets_names_of_its_own(self) -> None:
        def branches(x: torch.Tensor) -> torch.Tensor:
            return torch.ops.higher_order.cond(x.sum() > 0, lambda y: (y.sin() + 0,), lambda y: (y.sin() * 1,), (x,))[0]

        pattern = TracedPattern("cond", lambda x: x.sin(), branches, [torch.randn(2)])
        module = graph("one = aten.sin.default(x)\ntwo = aten.sin.default(one)\nreturn (two,)", "x: f32[4]")
        assert applied(pattern, module) == 2
        bodies = [str(node.target) for node in module.graph.find_nodes(op="get_attr")]
        assert len(set(bodies)) == len(bodies) == 4

    def test_a_result_that_is_none(self) -> None:
        pattern = TracedPattern(
            "first", lambda x: (x.sin(), x.cos()), lambda x: (torch.sin(x + 0), None), [torch.randn(2)]
        )
        module = graph("sin = aten.sin.default(x)\ncos = aten.cos.default(x)\nreturn (sin, cos)", "x: f32[4]")
        sin, cos = calls(module)
        match = find_match(pattern.pattern, sin)
        assert match is not None
        made = replace_by_example(match, lambda x: [torch.sin(x + 0), None], [match["x"]])
        assert isinstance(made, list)
        assert [node.target for node in made] == [aten.add.Tensor, aten.sin.default]
        assert not cos._erased
        assert "aten.add.Tensor(x, 0)" in show_graph(module.graph)

    def test_a_check_of_sizes_that_vary_must_be_proved(self) -> None:
        mode = FakeTensorMode(shape_env=ShapeEnv())
        varies = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
        x = mode.from_tensor(torch.randn(8, 10), symbolic_context=varies)
        size = lambda match: match["x"].meta["val"].shape[0]
        for check, count in ((lambda m: size(m) == 8, 0), (lambda m: size(m) > 7, 0), (lambda m: size(m) >= 0, 1)):
            with mode:
                module = make_fx(lambda x: x.sin())(x)
            guards = len(mode.shape_env.guards)
            pattern = TracedPattern(
                "sized", lambda x: x.sin(), lambda x: x.sin() + 0, [torch.randn(2, 2)], extra_check=check
            )
            assert pattern.apply(module.graph) == count
            assert len(mode.shape_env.guards) == guards

    def test_provenance_moves(self) -> None:
        module = graph(PRODUCT.format("mm, b"))
        for node in calls(module):
            node.meta |= {"stack_trace": 'File "model.py", line 3\n  y = a @ b + c', "recompute": 2}
            node.meta["custom"] = {"stream": 1}
        assert applied(add_of_product(), module) == 1
        (node,) = calls(module)
        assert "model.py" in node.meta["stack_trace"]
        assert node.meta["custom"] == {"stream": 1}
        assert node.meta["recompute"] == 2

    @pytest.mark.parametrize("tagged", ["sin", "cos"])
    def test_recomputation_goes_from_a_result_to_what_it_is_made_of(self, tagged: str) -> None:
        """And not to what the other result is made of."""
        pattern = TracedPattern(
            "both", lambda x: (x.sin(), x.cos()), lambda x: ((x + 0).sin(), (x * 1).cos()), [torch.randn(2)]
        )
        module = graph("sin = aten.sin.default(x)\ncos = aten.cos.default(x)\nreturn (sin, cos)", "x: f32[4]")
        tags = {"recompute": 2, "ac_graph_id": 7}
        next(node for node in calls(module) if node.name == tagged).meta |= tags
        assert applied(pattern, module) == 1
        wanted = {"sin": ["add", "sin"], "cos": ["cos", "mul"]}[tagged]
        found = [node for node in calls(module) if "recompute" in node.meta]
        assert sorted(node.target.overloadpacket.__name__ for node in found) == wanted
        assert all(node.meta["ac_graph_id"] == 7 for node in found)

    def test_what_leads_to_two_results_is_recomputed_as_the_first_of_them(self) -> None:
        def replacement(x: Any) -> Any:
            whole = x + 0
            return whole.sin(), whole.cos()

        pattern = TracedPattern("both", lambda x: (x.sin(), x.cos()), replacement, [torch.randn(2)])
        module = graph("sin = aten.sin.default(x)\ncos = aten.cos.default(x)\nreturn (sin, cos)", "x: f32[4]")
        for node, tag in zip(calls(module), (1, 2), strict=True):
            node.meta["recompute"] = tag
        assert applied(pattern, module) == 1
        tags = {node.target.overloadpacket.__name__: node.meta["recompute"] for node in calls(module)}
        assert tags == {"add": 1, "sin": 1, "cos": 2}

    def test_sizes_that_vary(self) -> None:
        """Registered on fixed sizes, found where they vary; reading the size is one node that both calls share."""
        mode = FakeTensorMode(shape_env=ShapeEnv())
        varies = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
        x = mode.from_tensor(torch.randn(8, 10), symbolic_context=varies)

        def program(x: torch.Tensor) -> torch.Tensor:
            return (x.sin() + torch.ones(x.shape[0], 1)).cos()

        with mode:
            module = make_fx(program)(x)
        pattern = TracedPattern(
            "ones",
            lambda x: x.sin() + torch.ones(x.shape[0], 1),
            lambda x: torch.ones(x.shape[0], 1) + x.sin() * torch.ones(x.shape[0], 1),
            [torch.randn(8, 10)],
        )
        guards = len(mode.shape_env.guards)
        assert pattern.apply(module.graph) == 1
        module.graph.lint()
        sizes = module.graph.find_nodes(op="call_function", target=aten.sym_size.int)
        assert [len(node.users) for node in sizes] == [2]
        assert len(mode.shape_env.guards) == guards
        real = torch.randn(6, 10)
        torch.testing.assert_close(module(real), program(real))

    @pytest.mark.parametrize("needed_early", [False, True])
    def test_sizes_that_vary_of_an_input_that_stands_late(self, needed_early: bool) -> None:
        """Read where it stands; an end before it that needs the size is left alone."""
        mode = FakeTensorMode(shape_env=ShapeEnv())
        varies = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
        x, y = (mode.from_tensor(torch.randn(size), symbolic_context=varies) for size in (8, 6))
        with mode:
            module = make_fx(lambda x, y: (x.sin(), y.exp().cos()))(x, y)
        sin, exp, cos = calls(module)

        def replacement(x: Any, y: Any) -> Any:
            ones = torch.ones(y.shape[0])
            return (x.sin() + ones.sum() * 0 if needed_early else x.sin() + 0), y.cos() * ones

        made = replace_by_example(Match({}, (sin, cos), (sin, cos)), replacement, [sin.args[0], exp])
        module.graph.lint()
        assert made == "exp stands after sin" if needed_early else isinstance(made, list)
        real = torch.randn(5), torch.randn(7)
        torch.testing.assert_close(Interpreter(module).run(*real), (real[0].sin(), real[1].exp().cos()))

    @pytest.mark.parametrize(
        ("factor", "kind", "times"), [(2, "i8", 1), (2.0, "i8", 0), (2, "f32", 1), (2.0, "f32", 1)]
    )
    def test_whole_numbers_and_others(self, factor: float, kind: str, times: int) -> None:
        """100 * 2 is -56 in eight bits, and 100 * 2.0 is 200."""
        pattern = TracedPattern("twice", lambda n, y: n * 2 + y, lambda n, y: (n + n) + y, [torch.ones(2)] * 2)
        module = graph(
            f"mul = aten.mul.Tensor(n, {factor})\nadd = aten.add.Tensor(mul, y)\nreturn (add,)",
            f"n: {kind}[4], y: f32[4]",
        )
        assert pattern.apply(module.graph) == times

    def test_scalars_are_told_from_equal_numbers_of_another_kind(self) -> None:
        pattern = TracedPattern(
            "power", lambda x, p: torch.hypot(x, x * p).sum(2), lambda x, p: x.sum(2), [torch.randn(2, 2, 2)],
            scalars={"p": 2.0},
        )  # fmt: skip
        assert "[2]" in pattern.duplicates()


class TestWhatOthersSee:
    """Memory and strides of a replacement, where somebody else would notice."""

    COPY = TracedPattern("copy", lambda x: x.clone(), lambda x: x.view(-1).view(x.shape), [torch.randn(2, 2)])

    @pytest.mark.parametrize(
        ("rest", "times"),
        [
            ("sin = aten.sin.default(clone)\nreturn (sin,)", 1),
            ("return (clone,)", 0),
            ("t = aten.t.default(clone)\nreturn (t,)", 0),
            ("copy_ = aten.copy_.default(x, y)\nsin = aten.sin.default(clone)\nreturn (sin,)", 0),
            ("fill_ = aten.fill_.Scalar(clone, 3)\nsin = aten.sin.default(clone)\nreturn (sin,)", 0),
            ("copy_ = aten.copy_.default(y, x)\nsin = aten.sin.default(clone)\nreturn (sin,)", 1),
        ],
    )
    def test_a_view_in_place_of_a_copy(self, rest: str, times: int) -> None:
        module = graph(f"clone = aten.clone.default(x)\n{rest}", "x: f32[4, 4], y: f32[4, 4]")
        assert applied(self.COPY, module) == times

    @pytest.mark.parametrize("stage", ["joint", "post_grad"])
    def test_a_copy_of_what_is_written_later_through_torch_compile(self, stage: str) -> None:
        def program(x: torch.Tensor) -> torch.Tensor:
            before = x.clone()
            x.add_(1)
            return before

        x = torch.randn(4)
        torch._dynamo.reset()
        with ferrite.register_pattern(lambda x: x.clone(), lambda x: x, [torch.randn(2)], stage=stage, name="same"):
            found = torch.compile(program, backend="ferrite", options={"strict": True})(x)
        torch.testing.assert_close(found, x - 1)

    @pytest.mark.parametrize(("returned", "times"), [("one, two", 0), ("one, neg", 1)])
    def test_one_tensor_in_place_of_two(self, returned: str, times: int) -> None:
        def once(x: Any) -> Any:
            sin = x.sin()
            return sin, sin

        pattern = TracedPattern("once", lambda x: (x.sin(), x.sin()), once, [torch.randn(2)])
        body = "one = aten.sin.default(x)\ntwo = aten.sin.default(x)\nneg = aten.neg.default(two)\n"
        module = graph(f"{body}return ({returned},)", "x: f32[4]")
        found = find_match(pattern.pattern, calls(module)[0])
        assert found is not None
        apart = Match(found.names, tuple(calls(module)[:2]), tuple(calls(module)[:2]))
        made = replace_by_example(apart, once, [found["x"]])
        assert isinstance(made, list) is bool(times)

    @pytest.mark.parametrize(
        ("rest", "noted", "times"),
        [
            ("sin = aten.sin.default(clone)\nreturn (sin,)", False, 1),
            ("part = aten.as_strided.default(clone, [3], [1])\nsin = aten.sin.default(part)\nreturn (sin,)", False, 0),
            ("sin = aten.sin.default(clone)\npart = aten.as_strided.default(sin, [3], [1])\nreturn (part,)", True, 0),
            ("return (clone,)", False, 0),
            ("return (clone,)", True, 1),
        ],
    )
    def test_other_strides(self, rest: str, noted: bool, times: int) -> None:
        """The caller's are put back after the last pass, if they were written down before the first."""
        whole = torch.contiguous_format
        pattern = TracedPattern(
            "lazy", lambda x: x.cos().t().clone(memory_format=whole), lambda x: x.cos().t(), [torch.randn(2, 2)]
        )
        body = "cos = aten.cos.default(x)\nt = aten.t.default(cos)\n"
        body += "clone = aten.clone.default(t, memory_format=torch.contiguous_format)\n"
        module = graph(body + rest, "x: f32[4, 3]")
        if noted:
            note_output_strides(module.graph)
        assert pattern.apply(module.graph) == times

    def test_views_of_a_kept_trace_stand_in_the_memory_of_their_place(self) -> None:
        pattern = TracedPattern(
            "flat", lambda x: x.sin(), lambda x: x.view(-1).sin().view(x.shape), [torch.randn(2, 2)]
        )
        module = graph(
            "one = aten.sin.default(x)\ntwo = aten.sin.default(y)\nreturn (one, two)", "x: f32[4, 4], y: f32[4, 4]"
        )
        assert applied(pattern, module) == 2
        first = [node for node in calls(module) if node.args[0].op == "placeholder"]
        assert len(first) == 2
        for node in first:
            memory = [one.meta["val"].untyped_storage()._cdata for one in (node, node.args[0])]
            assert memory[0] == memory[1]

    def test_another_end_than_the_filter_found_is_in_its_region_too(self) -> None:
        """The filter takes the sum of rows for the other end; the one that is meant stands behind a write."""
        pattern = TracedPattern(
            "sums", lambda x: (x.sin(), x.sum(1)), lambda x: (x.sin(), x.sum(1)), [torch.randn(2, 2)]
        )
        body = "sin = aten.sin.default(x)\nrows = aten.sum.dim_IntList(x, [0])\n{}"
        body += "columns = aten.sum.dim_IntList(x, [1])\nreturn (sin, rows, columns)"
        inputs = "x: f32[4, 4], y: f32[4, 4]"
        assert applied(pattern, graph(body.format(""), inputs)) == 1
        assert applied(pattern, graph(body.format("fill_ = aten.fill_.Scalar(x, 3)\n"), inputs)) == 0


class TestLazy:
    def test_the_kept_text_is_what_a_trace_gives(self) -> None:
        text = "return users(None, aten.add.Tensor(aten.mm.default(a, b), c))\n"
        assert add_of_product().serialised() == text

    def test_with_text_only_candidates_are_traced(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pattern = add_of_product(text=add_of_product().serialised())
        calls = []
        real = tracing.make_fx
        monkeypatch.setattr(tracing, "make_fx", lambda *a, **k: calls.append(1) or real(*a, **k))
        assert pattern.apply(graph("sin = aten.sin.default(x)\nreturn (sin,)").graph) == 0
        assert calls == []
        assert pattern.apply(graph(PRODUCT.format("mm, b")).graph) == 1
        assert len(calls) == 2  # the search and the replacement, on the real sizes

    def test_a_registered_text_is_used_and_kept_in_the_key(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def search(a: Any, b: Any, c: Any) -> Any:
            return torch.mm(a, b) + c

        inputs = [torch.randn(2, 3), torch.randn(3, 4), torch.randn(4)]
        register = partial(register_pattern, search, lambda a, b, c: torch.addmm(c, a, b), inputs)
        with register() as plain:
            text, without = plain.pattern_text(), digest()
        assert text == "return users(None, aten.add.Tensor(aten.mm.default(a, b), c))\n"
        calls = []
        real = tracing.make_fx
        monkeypatch.setattr(tracing, "make_fx", lambda *a, **k: calls.append(1) or real(*a, **k))
        with register(text=text) as kept:
            assert digest() != without
            assert kept(graph("mul = aten.mul.Tensor(x, x)\nadd = aten.add.Tensor(mul, x)\nreturn (add,)").graph) == 0
            assert calls == []
            assert kept(graph(PRODUCT.format("mm, b")).graph) == 1
            assert len(calls) == 2

    def test_a_text_of_another_pattern_is_refused(self) -> None:
        with pytest.raises(ValueError, match="speaks of a, d, and the function of a; it may be out of date"):
            register_pattern(
                lambda a: a.sin(), lambda a: a, [torch.randn(2)], text="return aten.mul.Tensor(a, d)\n", name="one"
            )
        with pytest.raises(TypeError, match="mine is a pass"), ferrite.register_pass("joint", len, name="mine") as mine:
            mine.pattern_text()

    @pytest.mark.parametrize("stage", ["pre_grad", "post_grad"])
    def test_a_graph_without_its_last_op_is_not_walked(self, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """By target after autograd, by kind before; alternatives and packets as well."""
        seen = []
        real = PatternTable.candidates
        monkeypatch.setattr(PatternTable, "candidates", lambda *a: seen.append(1) or real(*a))
        module = graph("sin = aten.sin.default(x)\nreturn (sin,)", "x: f32[4]")
        with register_pattern(lambda x: x.sin().tanh(), lambda x: x, [torch.randn(2)], stage=stage) as entry:
            assert entry(module.graph) == 0
            assert seen == []
        present = ([aten.cos.default, aten.sin.default], aten.sin, "sin")
        absent = ([aten.cos.default, aten.tan.default], aten.cos, "cos")
        for target, visited in (*((one, True) for one in present), *((one, False) for one in absent)):
            seen.clear()
            table = PatternTable()
            table.add("one", op(target, Hole("x")), lambda match: None)
            assert table.apply(module.graph) == int(visited)
            assert bool(seen) is visited

    def test_registration_traces_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tracing, "make_fx", lambda *a, **k: pytest.fail("traced"))
        with register_pattern(lambda x: x.sin(), lambda x: x.cos(), [torch.randn(2)]):
            pass

    def test_traces_are_kept_for_equal_values(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls = []
        real = tracing.make_fx
        monkeypatch.setattr(tracing, "make_fx", lambda *a, **k: calls.append(1) or real(*a, **k))
        pattern = TracedPattern(
            "s", lambda x: x.sin(), lambda x: x + 0, [torch.randn(2)], text="return users(None, aten.sin.default(x))\n"
        )
        assert (
            pattern.apply(
                graph("one = aten.sin.default(x)\ntwo = aten.sin.default(one)\nreturn (two,)", "x: f32[4]").graph
            )
            == 2
        )
        assert len(calls) == 2

    def test_equal_filters_with_other_constants_are_two_patterns(self) -> None:
        table = PatternTable()
        for dim in (0, 1):
            pattern = TracedPattern(
                f"d{dim}", lambda x, dim=dim: x.sum(dim), lambda x, dim: x, [torch.randn(2, 2)], scalars={"dim": dim}
            )
            table.add(pattern.name, pattern.pattern, lambda match: None, also=pattern.duplicates() + pattern.name)
        assert len(table.entries) == 2

    @pytest.mark.parametrize("stage", ["pre_grad", "post_grad"])
    def test_equal_patterns_are_refused(self, stage: str) -> None:
        def register(search: Any, **settings: Any) -> Any:
            return register_pattern(search, lambda *given: given[0], [torch.randn(4, 4)] * 2, stage=stage, **settings)

        product = lambda a, b: torch.relu(torch.mm(a, b))
        with register(product, name="one"):
            for again in (product, lambda left, right: torch.relu(torch.mm(left, right))):
                with pytest.raises(ValueError, match=f"the pattern two is registered for {stage} already, as one:"):
                    register(again, name="two")
            with pytest.raises(ValueError, match="as one"):  # parameters in another order, the same calls
                register(lambda right, left: torch.relu(torch.mm(left, right)), name="two")
            with register(product, name="two", skip_duplicates=True):
                assert [run.__name__ for run in with_user_passes(stage, ())] == ["one"]
            assert [run.__name__ for run in with_user_passes(stage, ())] == ["one"]
            with register(lambda a, b: torch.relu(torch.mm(b, torch.mm(a, b))), name="two"):
                pass
        with register(product, name="two"):
            pass

    def test_patterns_that_differ_in_constants_are_both_registered(self) -> None:
        x = [torch.randn(2, 2)]
        with (
            register_pattern(lambda x: x.sum(0), lambda x: x, x, name="rows"),
            register_pattern(lambda x: x.sum(1), lambda x: x, x, name="columns"),
            pytest.raises(ValueError, match="as columns"),
        ):
            register_pattern(lambda x: x.sum(1), lambda x: x, x, name="again")

    def test_a_pattern_that_cannot_be_traced_is_no_duplicate(self) -> None:
        def fails(x: Any) -> Any:
            raise RuntimeError

        with (
            register_pattern(fails, lambda x: x, [torch.randn(2)], name="one"),
            register_pattern(lambda x: x.sin(), lambda x: x, [torch.randn(2)], name="two"),
        ):
            assert len(with_user_passes("post_grad", ())) == 2

    def test_nothing_leaks(self) -> None:
        """Neither counters of torch's nor fake tensors of whoever compiles."""
        before = {name: dict(counts) for name, counts in counters.items()}
        with FakeTensorMode(), register_pattern(lambda x: x.sin(), lambda x: x.cos(), [torch.empty(2)], name="one"):
            pass
        pattern = add_of_product()
        with FakeTensorMode():
            assert "mm" in pattern.serialised()
        assert pattern.apply(graph(PRODUCT.format("mm, b")).graph) == 1
        assert {name: dict(counts) for name, counts in counters.items()} == before

    def test_methods_of_objects(self) -> None:
        class Scaled:
            factor = 3.0

            def search(self, x: Any) -> Any:
                return x.sin() * self.factor

            def replacement(self, x: Any) -> Any:
                return self.factor * x.cos()

        held = Scaled()
        pattern = TracedPattern("held", held.search, held.replacement, [torch.randn(2)])
        module = graph("sin = aten.sin.default(x)\nmul = aten.mul.Tensor(sin, 3.0)\nreturn (mul,)", "x: f32[4]")
        assert pattern.apply(module.graph) == 1
        assert "cos" in show_graph(module.graph)

    def test_a_parameter_that_is_not_used(self) -> None:
        with pytest.raises(ValueError, match="does not use y"):
            TracedPattern("bad", lambda x, y: x.sin(), lambda x, y: x, [torch.randn(2)] * 2).serialised()


class TestBeforeAutograd:
    PATTERN = TracedPattern(
        "unit", lambda x: torch.tanh(x) * 1.0 + x, lambda x: torch.add(x, torch.tanh(x)), [], stage="pre_grad"
    )

    def test_any_spelling(self) -> None:
        run = lambda graph: self.PATTERN.apply(graph)
        run.__name__ = "unit"
        for function in (lambda x: torch.tanh(x) * 1.0 + x, lambda x: x + x.tanh().mul(1.0)):
            rewrites(run, function, [torch.randn(3)], times=1, left={"mul": 0})

    def test_parameters_may_be_called_otherwise_in_the_replacement(self) -> None:
        pattern = TracedPattern(
            "turned", lambda a, b: torch.sin(a) - b, lambda b, c: torch.neg(c - torch.sin(b)), [], stage="pre_grad"
        )
        run = lambda graph: pattern.apply(graph)
        run.__name__ = "turned"
        inputs = [torch.randn(3), torch.randn(3)]
        rewrites(run, lambda x, y: torch.sin(x) - y, inputs, times=1, left={"neg": 1}, again=None)

    def test_the_judge_is_asked(self) -> None:
        def function(x: Any) -> Any:
            y = torch.tanh(x) * 1.0
            x.add_(1)
            return y + x

        run = lambda graph: self.PATTERN.apply(graph)
        run.__name__ = "unit"
        keeps(run, function, [torch.randn(3)])


class TestRegister:
    @pytest.mark.parametrize("stage", ["pre_grad", "joint", "post_grad"])
    def test_through_torch_compile(self, stage: str) -> None:
        def search(a: Any, b: Any) -> Any:
            return torch.sin(a) * b

        def replacement(a: Any, b: Any) -> Any:
            return torch.cos(a) * b  # wrong on purpose: so that it is seen

        x, y = torch.randn(4), torch.randn(4)
        torch._dynamo.reset()
        with ferrite.register_pattern(search, replacement, [x, y], stage=stage):
            found = torch.compile(lambda x, y: x.sin() * y, backend="ferrite", options={"strict": True})(x, y)
            record = ferrite.last_record()
        torch.testing.assert_close(found, x.cos() * y)
        assert sum(run.changed or 0 for run in record.passes if run.name == "search") == 1

    @pytest.mark.parametrize("stage", ["pre_grad", "post_grad"])
    @pytest.mark.parametrize("asked", [True, False])
    def test_only_with_an_option(self, stage: str, asked: bool) -> None:
        x = torch.randn(4)
        torch._dynamo.reset()
        settings = {"extra_check": ferrite.if_option("fallback_random"), "stage": stage, "name": "wrong"}
        options = {"strict": True, "fallback_random": asked}
        with ferrite.register_pattern(lambda x: x.sin(), lambda x: x.cos(), [x], **settings):
            found = torch.compile(lambda x: x.sin(), backend="ferrite", options=options)(x)
            record = ferrite.last_record()
        torch.testing.assert_close(found, x.cos() if asked else x.sin())
        reasons = [one.reason for one in record.decisions if one.what == "wrong" and not one.taken]
        assert reasons == ([] if asked else ["the option fallback_random is False, not True"])

    def test_the_numeric_check_runs_it_with_the_same_options(self) -> None:
        x = torch.randn(4)
        options = resolve(Options(), None, {"numeric_check": {"pre_grad": {}}})
        settings = {"extra_check": ferrite.if_option("fallback_random", False), "stage": "pre_grad", "name": "wrong"}
        captured, record = capture(lambda x: x.sin(), [x]), GraphRecord("test", "pre_grad")
        with register_pattern(lambda x: x.sin(), lambda x: x.cos(), [x], **settings):
            pipeline.edit_pre_grad(captured.module, options, record, [x])
        assert [one.subjects for one in record.decisions if one.what == "numeric_check"] == [("wrong",)]

    def test_other_numbers_of_parameters_are_errors_at_once(self) -> None:
        x = torch.randn(3)
        with pytest.raises(ValueError, match=r"pair takes 2 tensors \(a, b\) and has 1 example inputs"):
            ferrite.register_pattern(lambda a, b: a + b, lambda a, b: a, [x], name="pair")
        with pytest.raises(ValueError, match=r"what pair is replaced by takes 1 parameters, not 2 \(a, b\)"):
            ferrite.register_pattern(lambda a, b: a + b, lambda a: a, [x, x], name="pair")

    def test_what_cannot_be_traced_says_why(self) -> None:
        pattern = TracedPattern("gone", lambda a: a.sin().nosuch(), lambda a: a, [torch.randn(2)])
        with pytest.raises(ValueError, match=r"gone cannot be traced on its example inputs: AttributeError: .*nosuch"):
            pattern.serialised()

    def test_a_check_that_asks_for_another_parameter(self) -> None:
        module = graph("sin = aten.sin.default(x)\nreturn (sin,)", "x: f32[4]")
        pattern = TracedPattern(
            "one", lambda a: a.sin(), lambda a: a.cos(), [torch.randn(2)], extra_check=lambda match: bool(match["b"])
        )
        with pytest.raises(KeyError, match="the pattern has no parameter 'b'; it has a"):
            applied(pattern, module)

    def test_an_option_that_does_not_exist(self) -> None:
        with pytest.raises(RuntimeError, match="Did you mean 'fallback_random'"):
            ferrite.if_option("fallback_randon")

    def test_the_digest_follows_the_option(self) -> None:
        seen = []
        for check in (ferrite.if_option("strict"), ferrite.if_option("check"), ferrite.if_option("check", False)):
            with register_pattern(lambda x: x.sin(), lambda x: x.cos(), [torch.randn(2)], extra_check=check):
                seen.append(digest())
        assert len(set(seen)) == 3

    def test_the_digest_follows_both_functions(self) -> None:
        seen = []
        for replacement in (lambda x: x.cos(), lambda x: x.tan()):
            with register_pattern(lambda x: x.sin(), replacement, [torch.randn(2)]):
                seen.append(digest())
        assert len(set(seen)) == 2


class TestJoint:
    """A function with its gradients, in the graph that autograd made of both."""

    @staticmethod
    def search(x: Any, y: Any) -> Any:
        return torch.tanh(x @ y) * x

    @staticmethod
    def other(x: Any, y: Any) -> Any:
        return torch.relu(x @ y) * x

    @staticmethod
    def run(function: Any, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        x, y = x.clone().requires_grad_(), y.clone().requires_grad_()
        loss = (function(x.sin(), y) * 3).sum()
        return [loss.detach(), *torch.autograd.grad(loss, [x, y])]

    def compiled(self, inputs: list[torch.Tensor], **settings: Any) -> tuple[list[torch.Tensor], int]:
        torch._dynamo.reset()
        with register_pattern(self.search, self.other, inputs, stage="joint", joint=True, name="both", **settings):
            run = torch.compile(self.search, backend="ferrite", options={"strict": True})
            found = self.run(run, torch.full((4, 4), 0.5), torch.eye(4) - 0.3)
            runs = [run for graph in ferrite.last_record().graphs for run in graph.passes if run.name == "both"]
        return found, sum(run.changed or 0 for run in runs)

    def test_forward_and_backward_are_replaced(self) -> None:
        example = [torch.randn(2, 2, requires_grad=True) for _ in range(2)]
        found, count = self.compiled(example)
        assert count == 1
        torch.testing.assert_close(found, self.run(self.other, torch.full((4, 4), 0.5), torch.eye(4) - 0.3))

    def test_a_gradient_more_than_the_pattern_has(self) -> None:
        """The pattern takes none by `y`; the graph does, so that what is inside has another reader."""
        found, count = self.compiled([torch.randn(2, 2, requires_grad=True), torch.randn(2, 2)])
        assert count == 0
        torch.testing.assert_close(found, self.run(self.search, torch.full((4, 4), 0.5), torch.eye(4) - 0.3))

    def test_whole_numbers_where_a_gradient_is_expected(self) -> None:
        example = [torch.randn(2, requires_grad=True)]
        pattern = TracedPattern("s", lambda x: x.sin(), lambda x: (x + 0).sin(), example, "joint", joint=True)
        body = (
            "sin = aten.sin.default(x)\ncos = aten.cos.default(x)\nback = aten.mul.Tensor(t, cos)\nreturn (sin, back)"
        )
        assert pattern.apply(graph(body, "x: i64[4], t: f32[4]").graph) == 0
        assert pattern.apply(graph(body, "x: f32[4], t: f32[4]").graph) == 1

    def test_inference_is_left_alone(self) -> None:
        example = [torch.randn(2, 2, requires_grad=True) for _ in range(2)]
        pattern = TracedPattern("both", self.search, self.other, example, "joint", joint=True)
        body = "mm = aten.mm.default(x, y)\ntanh = aten.tanh.default(mm)\nmul = aten.mul.Tensor(tanh, x)\nreturn (mul,)"
        assert pattern.apply(graph(body, "x: f32[4, 4], y: f32[4, 4]").graph) == 0

    def test_it_needs_its_stage_and_a_gradient(self) -> None:
        for stage, needs in (("post_grad", True), ("joint", False)):
            with pytest.raises(ValueError, match="needs the stage joint, and an example input that requires grad"):
                TracedPattern(
                    "b", lambda x: x.sin(), lambda x: x, [torch.randn(2, requires_grad=needs)], stage, joint=True
                )
