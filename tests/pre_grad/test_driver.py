"""PRE-01: which passes run, in which order, how often, on which graphs, and what users may add."""

from __future__ import annotations

import itertools
import operator
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node

import ferrite
from ferrite import pipeline
from ferrite.errors import UserFault
from ferrite.extension import register_pass, with_user_passes
from ferrite.graph import pre_grad
from ferrite.graph.arguments import find
from ferrite.graph.order import sort_nodes
from ferrite.graph.pre_grad import GROUPS, PASSES, PreGradPass
from ferrite.graph.pre_grad import plan as planning
from ferrite.graph.pre_grad.plan import plan
from ferrite.graph.snapshot import copy_module
from ferrite.graph.text import show_graph
from ferrite.options import Options, resolve
from ferrite.registry import digest
from ferrite.report import trace
from ferrite.report.record import GraphRecord
from tests.pre_grad.harness import Captured, assert_same, capture

X = torch.randn(2, 8)


def edited(captured: Captured, **given: Any) -> GraphRecord:
    record = GraphRecord("test", "pre_grad")
    pipeline.edit_pre_grad(captured.module, resolve(Options(strict=True), None, given), record)
    return record


def names(runs: Any) -> list[str]:
    return [run.__name__ for run in runs]


@pytest.fixture
def with_passes(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put other passes in the place of the real ones."""

    def put(*passes: PreGradPass) -> None:
        monkeypatch.setattr(planning, "PASSES", passes)

    return put


def make(name: str, log: list[str]) -> Any:
    def run(graph: Graph, *, least: int = 2) -> int:
        log.append(f"{name} {least}")
        return 0

    run.__name__ = name
    return run


# The passes that only remove work; all others must be asked for.
BY_DEFAULT = (
    "normalise_keywords",
    "drop_idle_dropout",
    "remove_identity",
    "remove_noops",
    "merge_cats",
    "drop_whole_splits",
    "merge_split_items",
    "merge_nested_splits",
    "cat_of_items_to_slice",
    "split_squeeze_to_unbind",
    "simplify_split_joins",
    "drop_unbind_joins",
    "lift_quantise",
)


ENDS = ("normalise_keywords", "lift_quantise")


class TestPlan:
    def test_what_runs_by_default(self) -> None:
        first, last = plan(())
        assert (*names(first), *names(last)) == BY_DEFAULT

    def test_names_are_unique_and_groups_exist(self) -> None:
        assert len({entry.name for entry in PASSES}) == len(PASSES)
        assert {entry.group for entry in PASSES} <= set(GROUPS)
        order = [GROUPS.index(entry.group) for entry in PASSES]
        assert order == sorted(order), "PASSES is written in the order in which it runs"

    def test_keywords_come_first(self) -> None:
        assert names(plan(())[0])[0] == "normalise_keywords"

    def test_groups_and_the_order_of_the_user(self, with_passes: Any) -> None:
        log: list[str] = []
        with_passes(
            PreGradPass(make("words", log), "keywords", default=True),
            PreGradPass(make("batch", log), "batch", default=False),
            PreGradPass(make("one", log), "patterns", default=True),
            PreGradPass(make("two", log), "patterns", default=False),
            PreGradPass(make("three", log), "patterns", default=False),
            PreGradPass(make("lift", log), "quantise", default=True),
        )
        assert tuple(map(names, plan(()))) == (["words", "one"], ["lift"])
        asked = resolve(
            Options(), None, {"pre_grad": {"three": {"counter": 2}, "batch": {}, "two": {"least": 5}}}
        ).pre_grad
        first, last = plan(asked)
        assert (names(first), names(last)) == (["words", "batch", "one", "three", "three", "two"], ["lift"])
        for run in (*first, *last):
            run(Graph())
        assert log == ["words 2", "batch 2", "one 2", "three 2", "three 2", "two 5", "lift 2"]

    def test_a_default_pass_that_is_named_runs_where_it_is_named(self, with_passes: Any) -> None:
        log: list[str] = []
        with_passes(*(PreGradPass(make(name, log), "patterns", default=True) for name in ("one", "two", "three")))
        asked = resolve(Options(), None, {"pre_grad": "two, one"}).pre_grad
        assert names(plan(asked)[0]) == ["three", "two", "one"]

    def test_the_master_switch_leaves_quantisation(self, with_passes: Any) -> None:
        log: list[str] = []
        with_passes(
            PreGradPass(make("one", log), "patterns", default=True),
            PreGradPass(make("lift", log), "quantise", default=True),
        )
        assert tuple(map(names, plan((), rewrites=False))) == ([], ["lift"])

    def test_unknown_names_list_the_valid_ones(self) -> None:
        with pytest.raises(
            RuntimeError, match=r"Unknown Ferrite pre_grad pass 'normalize_ops'. Did you mean 'normalise_ops'"
        ) as caught:
            plan((("normalize_ops", ()),))
        for entry in PASSES:
            assert entry.name in str(caught.value)

    def test_unknown_settings_list_the_valid_ones(self) -> None:
        with pytest.raises(RuntimeError, match=r"Unknown Ferrite setting of normalise_ops 'count'.*counter"):
            plan((("normalise_ops", (("count", 2),)),))
        with pytest.raises(RuntimeError, match="a whole number of at least 0, given -1"):
            plan((("normalise_ops", (("counter", -1),)),))

    def test_the_device_gate_asks_all_values(self, with_passes: Any) -> None:
        """A graph without inputs has its device inside; one tensor elsewhere is enough to leave the graph alone."""
        log: list[str] = []
        with_passes(
            PreGradPass(make("here", log), "device", default=True, devices=("cpu",)),
            PreGradPass(make("there", log), "device", default=True, devices=("cuda",)),
            PreGradPass(make("anywhere", log), "device", default=True),
        )
        inside = capture(lambda: torch.zeros(2, 2).relu(), [])
        record = edited(inside)
        assert log == ["here 2", "anywhere 2"]
        assert [decision.reason for decision in record.decisions] == ["there is not for tensors on cpu"]
        log.clear()
        mode = FakeTensorMode()
        with mode:
            elsewhere = torch.empty(2, 2, device="cuda")
        next(node for node in inside.module.graph.nodes if node.op == "call_function").meta["example_value"] = elsewhere
        record = edited(inside)
        assert log == ["anywhere 2"]
        assert len(record.decisions) == 2

    def test_unknown_names_raise_out_of_torch_compile(self) -> None:
        torch._dynamo.reset()
        compiled = torch.compile(lambda x: x + 1, backend="ferrite", options={"pre_grad": {"bananas": {}}})
        with pytest.raises(Exception, match="Unknown Ferrite pre_grad pass 'bananas'"):
            compiled(X)

    def test_what_the_docs_ask_for_exists(self) -> None:
        text = (Path(__file__).parent.parent.parent / "docs" / "passes.md").read_text()
        rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
        spans = [span for row in rows for span in re.findall(r"`(\w+=[^`]*)`", row)]
        assert len(spans) >= 7
        for span in spans:
            pipeline.check_options(resolve(Options(), None, eval(f"dict({span})")))

    def test_the_name_that_others_have_for_a_pass_that_does_nothing(self) -> None:
        assert plan((("merge_stack_tahn_unbind_pass", ()),)) == plan(())

    def test_names_with_a_leading_underscore_can_be_named(self, with_passes: Any) -> None:
        with_passes(PreGradPass(make("_private", []), "patterns", default=False))
        assert names(plan((("_private", ()),))[0]) == ["_private"]


class TestStage:
    def test_the_order_of_everything(self) -> None:
        """One pass of every group, asked for in another order, and one of the user's; each is on record as it ran."""

        def mine(graph: Graph) -> int:
            return 0

        asked = ["scale_conv_by_bn", "unbind_cat_to_view", "batch_tanh", "normalise_ops", "einsum_to_pointwise"]
        asked += ["fold_conv_bn", "sink_cat"]
        with register_pass("pre_grad", mine):
            record = edited(capture(lambda x: x.sum(axis=1), [X]), pre_grad=asked)
        ran = [run.name for run in record.passes if run.name in (*asked, "mine", "sort_nodes") or run.name in ENDS]
        assert ran == [
            "normalise_keywords", "sink_cat", "fold_conv_bn", "normalise_ops", "batch_tanh", "unbind_cat_to_view",
            "einsum_to_pointwise", "scale_conv_by_bn", "mine", "sort_nodes", "lift_quantise",
        ]  # fmt: skip

    def test_order_of_the_record(self) -> None:
        record = edited(
            capture(lambda x: x.split(3, axis=1) if False else x.sum(axis=1), [X]), pre_grad=["normalise_ops"]
        )
        expected = [*names(plan((("normalise_ops", ()),))[0]), "sort_nodes", *names(plan(())[1])]
        assert [run.name for run in record.passes] == expected
        assert [run.number for run in record.passes] == sorted(run.number or 0 for run in record.passes)

    def test_edits_the_module_it_is_given(self) -> None:
        captured = capture(lambda x: torch.sum(x, axis=1), [X])
        module, graph = captured.module, captured.module.graph
        edited(captured)
        assert captured.module is module
        assert module.graph is graph
        assert "dim = 1" in module.code

    def test_disabled_means_untouched(self) -> None:
        captured = capture(lambda x: torch.sum(x, axis=1), [X])
        before, code = show_graph(captured.module.graph), captured.module.code
        record = edited(captured, disable=("pre_grad",))
        assert show_graph(captured.module.graph) == before
        assert captured.module.code == code
        assert all(run.changed is None for run in record.passes)

    def test_without_options_no_opt_in_pass_runs(self) -> None:
        record = edited(capture(lambda x: torch.cat(x.split(4, -1), -1), [X]))
        assert not {entry.name for entry in PASSES if not entry.default} & {run.name for run in record.passes}

    def test_texts_of_unchanged_graphs_are_not_made_again(self) -> None:
        record = edited(capture(lambda x: torch.sum(x, axis=1), [X]), keep_text=True)
        changed = [run for run in record.passes if run.before is not run.after]
        assert [run.name for run in changed] == ["normalise_keywords"]

    @pytest.mark.parametrize(
        ("function", "changed"), [(lambda x: torch.sum(x, axis=1), True), (lambda x: torch.sum(x, dim=1), False)]
    )
    def test_only_graphs_that_changed_go_to_the_structured_log_again(
        self, function: Any, changed: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sent: list[str] = []
        monkeypatch.setattr(trace, "artifact", lambda name, text: sent.append(name))
        torch._dynamo.reset()
        torch.compile(function, backend="ferrite", options={"executor": "eager", "cache": "off"})(X)
        assert any(name.endswith("before_pre_grad") for name in sent)
        assert any(name.endswith("after_pre_grad") for name in sent) == changed

    def test_the_limit_counts_rewrites(self) -> None:
        def function(x: Any) -> Any:
            return torch.sum(x, axis=1) + x.mean(axis=1) + x.amax(axis=1)

        for limit, left in [(0, 3), (1, 2), (2, 1), (3, 0)]:
            ferrite.passes.reset_applications()
            captured = capture(function, [X])
            edited(captured, bisect_limit=1, bisect_rewrites=limit)
            assert show_graph(captured.module.graph).count("axis") == left

    def test_graphs_inside_are_rewritten_by_the_sizes_of_their_inputs(self) -> None:
        """Nobody has example inputs for a branch."""

        def joined(x: torch.Tensor) -> torch.Tensor:
            return torch.cat([*x.split(4, 1)], 1) + torch.sum(x, axis=1, keepdim=True)

        captured = capture(lambda x: torch.cond(x.sum() > 0, joined, lambda y: y + 1, (x,)), [X])
        record = edited(captured)
        inside = {(run.name, run.changed) for run in record.passes if run.graph != "main" and run.changed}
        assert inside == {("normalise_keywords", 1), ("merge_split_items", 1)}
        assert not [run.name for run in record.passes if run.graph == "main" and run.changed]
        torch.testing.assert_close(captured.module(*captured.inputs)[0], joined(X) if X.sum() > 0 else X + 1)

    def test_without_rewrites_users_passes_the_sort_and_the_check_are_left(self) -> None:
        def insert_above(graph: Graph) -> int:
            (node,) = find(graph, "sum")
            with graph.inserting_before(next(iter(graph.nodes))):
                node.replace_all_uses_with(graph.call_function(torch.neg, (node,)), lambda user: user.op == "output")
            return 1

        captured = capture(lambda x: torch.sum(x, axis=1), [X])
        with register_pass("pre_grad", insert_above):
            record = edited(captured, pre_grad_rewrites=False)
        assert [run.name for run in record.passes] == ["insert_above", "sort_nodes", *names(plan(())[1])]
        assert "axis" in captured.module.code
        torch.testing.assert_close(captured.module(*captured.inputs)[0], -X.sum(1))

    def test_the_same_rewrites_in_the_same_order_every_time(self) -> None:
        """All passes on copies of one graph, whose nodes stand elsewhere in memory."""

        def function(x: Any, w: Any, c: Any) -> Any:
            parts = torch.split(x, 2, -1)
            tanhs = [torch.tanh(part) for part in parts]
            inner = [piece for part in parts[:2] for piece in part.split(1, 1)]
            layers = [torch.nn.functional.linear(x, w * i) for i in range(5)]
            joined = torch.cat([torch.cat(tanhs, 1), torch.cat([parts[0], parts[1]], 1)], axis=1)
            rows = torch.stack([row.squeeze(0) for row in x.split(1, 0)], 1)
            return joined.relu(), torch.cat(inner, 0), torch.stack(layers), rows.unbind(1)[0] + c.view(c.shape)

        captured = capture(function, [torch.randn(2, 8), torch.randn(8, 8), torch.randn(8)])
        asked = {entry.name: {"least": 2} if entry.group == "batch" else {} for entry in PASSES}
        found = []
        for _ in range(3):
            copy = Captured(copy_module(captured.module), captured.inputs)
            record = edited(copy, pre_grad=asked)
            found.append((show_graph(copy.module.graph), record.decisions, [run.changed for run in record.passes]))
        assert found[0] == found[1] == found[2]
        assert sum(1 for changed in found[0][2] if changed) >= 6

    def test_rewrites_are_on_record(self) -> None:
        record = edited(capture(lambda x: torch.sum(x, axis=1), [X]))
        assert [(entry.what, entry.taken) for entry in record.decisions] == [("normalise_keywords", True)]


def nested(x: torch.Tensor) -> torch.Tensor:
    def inner(y: torch.Tensor) -> torch.Tensor:
        return torch.cond(y.sum() > 1, lambda z: z.sin(), lambda z: z.cos(), (y,))

    return torch.cond(x.sum() > 0, inner, lambda y: y + 1, (x,))


class TestUserPasses:
    def test_runs_once_for_every_graph_children_first(self) -> None:
        seen: list[int] = []

        def count(graph: Graph) -> int:
            seen.append(len(graph.nodes))
            return 0

        with register_pass("pre_grad", count):
            record = edited(capture(nested, [X]))
        assert len(seen) == 5  # two branches inside one of two branches inside one graph
        assert [run.graph for run in record.passes if run.name == "count"][-1] == "main"
        assert len(edited(capture(nested, [X])).passes) < len(record.passes), "the scope has ended"

    def test_eleven_graphs_of_five_conditions_in_each_other(self) -> None:
        def deep(x: torch.Tensor, depth: int = 5) -> torch.Tensor:
            if depth == 0:
                return x.sin()
            return torch.cond(x.sum() > depth, lambda y: deep(y, depth - 1), lambda y: y.cos(), (x,))

        seen: list[Graph] = []
        with register_pass("pre_grad", seen.append, name="count"):
            edited(capture(deep, [X]))
        assert len(seen) == len({id(graph) for graph in seen}) == 11

    def test_four_products_become_one(self) -> None:
        """The user inserts where he likes: the sort puts things right, and new nodes have values."""

        def merge_products(graph: Graph) -> None:
            nodes = find(graph, "mm")
            left = [node.args[0] for node in nodes]
            with graph.inserting_before(nodes[0]):
                whole = graph.call_function(torch.mm, (graph.call_function(torch.cat, (left,)), nodes[0].args[1]))
                parts = graph.call_function(torch.chunk, (whole, 4))
                for index, node in enumerate(nodes):
                    node.replace_all_uses_with(graph.call_function(operator.getitem, (parts, index)))
            for node in nodes:
                graph.erase_node(node)

        def function(a: Any, b: Any, c: Any, d: Any, w: Any) -> Any:
            return torch.mm(a, w) + torch.mm(b, w).sin() + torch.mm(c, w) * torch.mm(d.exp(), w)

        inputs = [torch.randn(3, 4) for _ in range(4)] + [torch.randn(4, 5)]
        captured, original = capture(function, inputs), capture(function, inputs)
        with register_pass("pre_grad", merge_products):
            record = edited(captured)
        assert len(find(captured.module.graph, "mm")) == 1
        assert all("example_value" in node.meta for node in find(captured.module.graph, "mm", "cat", "chunk"))
        assert [run.changed for run in record.passes if run.name == "merge_products"] == [1]
        assert_same(original.module, captured.module, captured.inputs)

    @pytest.mark.parametrize(
        ("place", "expected"),
        [
            ({}, ["a", "b", "mine"]),
            ({"before": "a"}, ["mine", "a", "b"]),
            ({"after": "a"}, ["a", "mine", "b"]),
            ({"before": "b"}, ["a", "mine", "b"]),
        ],
    )
    def test_place(self, place: dict[str, str], expected: list[str]) -> None:
        def mine(graph: Graph) -> int:
            return 0

        with register_pass("joint", mine, **place):
            assert names(with_user_passes("joint", [make("a", []), make("b", [])])) == expected
            assert names(with_user_passes("post_grad", [make("a", [])])) == ["a"]

    def test_it_stays_until_it_is_removed_or_its_scope_ends(self) -> None:
        def registered() -> list[str]:
            return names(with_user_passes("joint", []))

        entry = register_pass("joint", make("mine", []))
        assert registered() == ["mine"]
        for _ in range(2):
            entry.remove()
            assert registered() == []
        with register_pass("joint", make("outer", [])):
            with suppress(KeyError), register_pass("joint", make("inner", [])):
                assert registered() == ["outer", "inner"]
                raise KeyError
            assert registered() == ["outer"]
        assert registered() == []

    def test_wrong_places_are_errors(self) -> None:
        with pytest.raises(ValueError, match="no graph stage 'loops'; there are pre_grad, joint, post_grad"):
            register_pass("loops", lambda graph: 0)
        with pytest.raises(ValueError, match="one of the two"):
            register_pass("joint", lambda graph: 0, before="a", after="b")
        with pytest.raises(TypeError, match="given int"):
            register_pass("joint", 3)  # type: ignore[arg-type]
        with register_pass("joint", make("mine", []), after="bananas"):
            with pytest.raises(ValueError, match="registered for joint already"):
                register_pass("joint", make("mine", []))
            with pytest.raises(UserFault, match="mine that you registered stands next to 'bananas'"):
                with_user_passes("joint", [])

    @pytest.mark.parametrize("strict", [False, True])
    def test_a_pass_that_breaks_the_graph_is_named(self, strict: bool) -> None:
        def drops_the_output(graph: Graph) -> int:
            graph.erase_node(graph.output_node())
            return 1

        captured = capture(lambda x: x.sin(), [X])
        with (
            register_pass("pre_grad", drops_the_output),
            pytest.raises(UserFault, match="drops_the_output that you registered"),
        ):
            pipeline.edit_pre_grad(captured.module, Options(strict=strict), GraphRecord("test", "pre_grad"))

    @pytest.mark.parametrize(
        ("stage", "target", "message"),
        [
            ("pre_grad", torch.isnan, "result 0, sin, is b8[2, 8], not f32[2, 8]"),
            ("post_grad", torch.ops.aten.isnan.default, "is b8[2, 8], not f32[2, 8]"),
            ("pre_grad", torch.det, "sin cannot be evaluated"),
            ("joint", torch.ops.aten.mm.default, "aten::mm"),
        ],
    )
    def test_a_pass_that_calls_something_else_is_named(self, stage: str, target: Any, message: str) -> None:
        def calls_another(graph: Graph) -> None:
            (node,) = [node for node in graph.nodes if "sin" in node.name]
            node.op, node.target, node.kwargs = "call_function", target, {}

        torch._dynamo.reset()
        with (
            register_pass(stage, calls_another),
            pytest.raises(Exception, match="calls_another that you registered failed") as caught,
        ):
            torch.compile(lambda x: x.sin(), backend="ferrite", options={"cache": "off"})(X)
        assert message in str(caught.value)

    def test_values_of_what_was_edited_are_made_again(self) -> None:
        """A copy that becomes a view shares memory; what reads it has another shape."""

        def copy_to_transpose(graph: Graph) -> None:
            (node,) = find(graph, "clone")
            node.op, node.target = "call_method", "t"

        captured = capture(lambda x: x.clone().relu().sum(), [X])
        with register_pass("pre_grad", copy_to_transpose):
            edited(captured)
        (view,), (relu,) = (find(captured.module.graph, name) for name in ("t", "relu"))
        source = view.args[0].meta["example_value"]
        assert view.meta["example_value"].untyped_storage()._cdata == source.untyped_storage()._cdata
        assert relu.meta["example_value"].shape == (8, 2)

    def test_two_lambdas(self) -> None:
        with register_pass("joint", lambda graph: 0) as one, register_pass("joint", lambda graph: 0) as other:
            assert one.name != other.name

    def test_the_error_comes_out_of_torch_compile(self) -> None:
        def fails(graph: Graph) -> int:
            raise KeyError("missing")

        torch._dynamo.reset()
        with (
            register_pass("post_grad", fails),
            pytest.raises(Exception, match="the pass fails that you registered failed: KeyError"),
        ):
            torch.compile(lambda x: x.sin(), backend="ferrite")(X)

    def test_a_pass_of_every_stage_changes_the_result(self) -> None:
        def sin_to_cos(graph: Graph) -> int:
            nodes = [*graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default), *find(graph, "sin")]
            for node in dict.fromkeys(nodes):
                after = isinstance(node.target, torch._ops.OpOverload)
                node.op, node.target = "call_function", torch.ops.aten.cos.default if after else torch.cos
            return len(nodes)

        for stage in ("pre_grad", "joint", "post_grad"):
            torch._dynamo.reset()
            with ferrite.register_pass(stage, sin_to_cos):
                found = torch.compile(lambda x: x.sin(), backend="ferrite", options={"strict": True})(X)
            torch.testing.assert_close(found, X.cos())

    def test_the_digest_follows_the_source(self) -> None:
        def one(graph: Graph) -> int:
            return 0

        def holding(value: int) -> Any:
            def held(graph: Graph) -> int:
                return value

            return held

        class Named:
            def uuid(self) -> str:
                return "fixed"

            def __call__(self, graph: Graph) -> int:
                return 0

        seen = [digest()]
        for stage, function in [
            ("joint", one),
            ("post_grad", one),
            ("joint", holding(1)),
            ("joint", holding(2)),
            ("joint", Named()),
        ]:
            with register_pass(stage, function):
                seen.append(digest())
        assert len(set(seen)) == len(seen)
        assert digest() == seen[0]
        with register_pass("joint", Named()):
            assert digest() == seen[-1]


class TestSort:
    def graph(self, *edges: tuple[str, str]) -> tuple[Graph, dict[str, Node]]:
        graph = Graph()
        nodes = {name: graph.call_function(torch.sin, (), name=name) for name, _ in edges}
        for name, reads in edges:
            nodes[name].args = tuple(nodes[source] for source in reads)
        graph.output(list(nodes.values())[-1])
        return graph, nodes

    def order(self, graph: Graph) -> str:
        return "".join(node.name for node in graph.nodes if node.op != "output")

    def test_an_ordered_graph_does_not_change(self) -> None:
        graph, _ = self.graph(("b", ""), ("a", ""), ("c", "ba"))
        assert sort_nodes(graph) == 0
        assert self.order(graph) == "bac"

    def test_a_node_moves_right_behind_what_it_reads(self) -> None:
        graph, _ = self.graph(("a", ""), ("b", "c"), ("c", ""), ("d", ""), ("e", "b"))
        assert sort_nodes(graph) == 1
        assert self.order(graph) == "acbde"
        assert sort_nodes(graph) == 0

    def test_several_keep_their_order(self) -> None:
        graph, _ = self.graph(("a", "d"), ("b", "d"), ("c", "ab"), ("d", ""))
        assert sort_nodes(graph) == 3
        assert self.order(graph) == "dabc"

    def test_a_cycle_is_an_error(self) -> None:
        graph, nodes = self.graph(("a", ""), ("b", "a"))
        nodes["a"].args = (nodes["b"],)
        with pytest.raises(ferrite.errors.Malformed, match="wait for each other: a, b"):
            sort_nodes(graph)

    def test_long_chains_are_linear(self) -> None:
        graph = Graph()
        nodes = [graph.call_function(torch.sin, ()) for _ in range(5000)]
        for node, source in itertools.pairwise(nodes):
            node.args = (source,)
        graph.output(nodes[0])
        assert sort_nodes(graph) == 4999
        graph.lint()


def test_the_registry_is_what_the_package_exports() -> None:
    assert pre_grad.PASSES is PASSES
