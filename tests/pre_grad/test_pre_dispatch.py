"""PRE-02: the passes over graphs of ATen overloads."""

from __future__ import annotations

import copy
from itertools import islice
from typing import Any

import pytest
import torch
from torch._ops import OpOverload
from torch.fx import GraphModule
from torch.nn import functional

from ferrite import pipeline
from ferrite.graph.arguments import kind
from ferrite.graph.aten_forms import is_aten
from ferrite.graph.pre_grad import IDLE, PASSES
from ferrite.graph.pre_grad.normalise_aten import normalise_aten
from ferrite.graph.pre_grad.pre_dispatch import LIST, OTHER_NAMES, plan_pre_dispatch
from ferrite.graph.pre_grad.spell_as_aten import spell_as_aten
from ferrite.graph.snapshot import copy_module
from ferrite.graph.values import tensor_of
from ferrite.options import Options, resolve
from ferrite.report.record import GraphRecord
from tests.pre_grad.harness import Captured, ValueCheck, capture, keeps, rewrites

aten = torch.ops.aten
X = torch.randn(4, 10)


def names(**given: Any) -> list[str]:
    options = resolve(Options(), None, given)
    runs = plan_pre_dispatch(options.pre_dispatch_add, options.pre_dispatch_remove)
    return [run.__name__ for run in runs]


def exported(function: Any, inputs: list[Any], **settings: Any) -> Captured:
    class Model(torch.nn.Module):
        def forward(self, *given: Any) -> Any:
            return function(*given)

    module = torch.export.export(Model(), tuple(inputs), strict=False, **settings).module(check_guards=False)
    module.graph.set_codegen(torch.fx.graph.CodeGen())
    module.recompile()
    return Captured(module, copy.deepcopy(inputs))


def edited(captured: Captured, **given: Any) -> tuple[GraphModule, GraphRecord]:
    """What the stage makes of a graph, which then gives the same and has a right value everywhere."""
    module, record = copy_module(captured.module), GraphRecord("test", "pre_grad")
    options = resolve(Options(strict=True), None, {"pre_dispatch": True, **given})
    pipeline.edit_pre_grad(module, options, record)
    ValueCheck(module, set()).run(*captured.inputs)
    torch.testing.assert_close(module(*captured.inputs), captured.module(*captured.inputs))
    assert is_aten(module.graph)
    return module, record


def kinds(module: GraphModule) -> list[str]:
    return [str(kind(node)) for node in module.graph.nodes if node.op == "call_function"]


class TestPlan:
    def test_the_order_is_fixed(self) -> None:
        assert names() == [
            "normalise_aten", "remove_noops", "chunk_reshape_cat", "batch_linear", "batch_layernorm", "batch_relu",
            "batch_sigmoid", "batch_tanh", "normalise_aten", "split_squeeze_cat", "merge_cats", "batch_linear_lhs",
            "remove_splits", "stack_to_unsqueeze", "chunk_reshape_unsqueeze_cat", "remove_noops", "spell_as_aten",
        ]  # fmt: skip

    def test_every_step_has_its_place_and_its_name_elsewhere(self) -> None:
        """One after another, by what others call them: ours at that place, or nothing to run and a reason for it."""
        steps = {
            "normalization_pass_aten": 1, "remove_noop_pass": 1, "relu_nan_to_num": 1,
            "fuse_chunk_reshape_concat_pass": 1, "group_batch_fusion_passes": 5, "normalize_node_kwargs_pass": 1,
            "fuse_chunk_squeeze_cat_pass": 1, "merge_concats_pass": 1, "fuse_split_linear_add_pass": 1,
            "remove_reshape_pass": 1, "fuse_parallel_linear_pass": 1, "remove_split_ops_pass": 1,
            "stack_to_unsqueeze_pass": 1, "fuse_chunk_reshape_unsqueeze_concat_pass": 1,
        }  # fmt: skip
        ours = iter(LIST)
        for step, count in steps.items():
            assert tuple(islice(ours, count)) == OTHER_NAMES.get(step, (step,))
            assert step in OTHER_NAMES or IDLE[step]
            taken_out = set(OTHER_NAMES.get(step, (step,)))
            assert names(pre_dispatch_remove=step) == [name for name in names() if name not in taken_out]
        assert list(ours) == []
        assert names(pre_dispatch_add="merge_concats_pass")[-3:] == ["merge_cats", "remove_noops", "spell_as_aten"]
        for twin in ("remove_split_ops", "fuse_split_getitem_squeeze_cat"):
            assert set(OTHER_NAMES[twin]) < set(LIST)

    def test_add_runs_before_the_last_cleaning(self) -> None:
        assert names(pre_dispatch_add="sink_cat, merge_nested_splits")[-4:] == [
            "sink_cat", "merge_nested_splits", "remove_noops", "spell_as_aten",
        ]  # fmt: skip

    def test_remove_reaches_every_run(self) -> None:
        assert "remove_noops" in names()
        assert "remove_noops" not in names(pre_dispatch_remove="remove_noops")
        assert names(pre_dispatch_remove=("merge_cats", "relu_nan_to_num")).count("merge_cats") == 0

    @pytest.mark.parametrize("option", ["pre_dispatch_add", "pre_dispatch_remove"])
    def test_unknown_names_are_refused(self, option: str) -> None:
        with pytest.raises(
            RuntimeError, match=r"Unknown Ferrite pre_dispatch pass 'merge_cat'\. Did you mean"
        ) as caught:
            pipeline.check_options(resolve(Options(), None, {option: "merge_cat"}))
        for entry in PASSES:
            assert entry.name in str(caught.value)

    def test_the_graph_stays_one_of_aten(self) -> None:
        with pytest.raises(RuntimeError, match="Unknown Ferrite pre_dispatch pass 'spell_as_aten'"):
            names(pre_dispatch_remove="spell_as_aten")


class TestForms:
    def test_an_uneven_split_is_measured(self) -> None:
        outcome = rewrites(
            normalise_aten, exported(lambda x: [t * 2 for t in x.split(4, -1)], [X]), times=1, exact=True
        )
        (split,) = outcome.module.graph.find_nodes(op="call_function", target=aten.split_with_sizes.default)
        assert split.args[1:] == ([4, 4, 2], 1)

    def test_chunks_names_and_defaults(self) -> None:
        def function(x: Any) -> Any:
            chunks = x.chunk(3, dim=1)
            return torch.cat([chunks[0], chunks[1]], dim=-1) * 2

        outcome = rewrites(normalise_aten, exported(function, [X]), times=2, exact=True)
        assert "aten.cat.default([getitem, getitem_1], 1)" in outcome.after
        assert "aten.split_with_sizes.default(given_0, [4, 4, 2], 1)" in outcome.after

    def test_torch_calls_become_overloads(self) -> None:
        def function(x: Any, w: Any) -> Any:
            y = torch.cat([x, x], dim=1)[:, 2:12]
            return functional.linear(y, w).view(2, -1).transpose(0, 1) + 1, torch.split(y, [4, 6], dim=1)[1] * 2

        outcome = rewrites(spell_as_aten, function, [X, torch.randn(3, 10)], times=8)
        assert is_aten(outcome.module.graph)
        assert outcome.kinds["slice"] == 1

    def test_graphs_of_torch_are_told_apart(self) -> None:
        assert not is_aten(capture(lambda x: torch.relu(x) + 1, [X]).module.graph)
        assert not is_aten(capture(lambda x: x[:, 1:], [X]).module.graph)
        assert is_aten(exported(lambda x: torch.relu(x) + 1, [X]).module.graph)
        assert is_aten(capture(lambda x: aten.relu.default(x), [X]).module.graph)
        keeps(normalise_aten, lambda x: torch.split(x, 4, -1)[0] + 1, [X])


class TestStage:
    def test_everything_in_one_model(self) -> None:
        def function(x: Any, v: Any, w: Any) -> Any:
            a, b, c = x.split(4, 1)
            cats = torch.cat([torch.cat([a, b], 1), c], 1)
            wide = functional.linear(x, v).relu() + functional.linear(x, w).sigmoid()
            return cats.tanh(), wide, torch.stack([x], 0).relu(), x.view(4, 10) + x.size(0) * 2.5

        captured = exported(function, [X, torch.randn(3, 10), torch.randn(3, 10)])
        module, record = edited(captured)
        assert kinds(module).count("linear") == 1
        assert kinds(module).count("stack") == 0
        assert kinds(module).count("view") == 0
        assert {run.name for run in record.passes if run.changed} >= {"batch_linear_lhs", "remove_noops"}
        made = [node for node in module.graph.nodes if node.op == "call_function" and kind(node) != "getitem"]
        assert all(isinstance(node.target, OpOverload) for node in made if tensor_of(node) is not None)

    def test_remove_and_add(self) -> None:
        captured = exported(lambda x, y: torch.cat([x.view(4, 10), y], 1).tanh(), [X, X + 1])
        module, _ = edited(captured, pre_dispatch_remove="remove_noops")
        assert "view" in kinds(module)
        module, _ = edited(captured, pre_dispatch_add="sink_cat")
        assert kinds(module) == ["tanh", "tanh", "cat"]

    def test_it_must_be_asked_for(self) -> None:
        captured = exported(lambda x: torch.stack([x], 0) + 1, [X])
        _, record = edited(captured, pre_dispatch=False)
        assert "spell_as_aten" not in {run.name for run in record.passes}

    def test_sizes_that_vary(self) -> None:
        rows = torch.export.Dim("rows", min=2)
        captured = exported(
            lambda x: torch.stack([x], 0) * (x.size(0) * 0.5), [X], dynamic_shapes={"given": ({0: rows},)}
        )
        module, _ = edited(captured)
        assert "unsqueeze" in kinds(module)
        other = torch.randn(7, 10)
        torch.testing.assert_close(module(other), captured.module(other))
