"""Copies of images that a graph has beyond those of the trace are those that its record justifies, one by one."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

import ferrite
from bench.zoo import ZOO
from ferrite import pipeline
from tests.models.against_eager import infer, leaves_of

aten = torch.ops.aten


def copies(module: GraphModule) -> int:
    """Calls that only move an image to other places."""
    return sum(map(is_copy, module.graph.nodes))


def is_copy(node: Node) -> bool:
    return node.target in (aten.clone.default, aten.copy.default) and node.meta["val"].dim() in (4, 5)


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", ["resnet", "mobilenet_v2", "convnext"])
def test_every_copy_of_an_image_is_a_decision(name: str, training: bool) -> None:
    entry, added, undecided = ZOO[name], [], []

    def edit(module: GraphModule, *rest: Any) -> None:
        before = copies(module)
        edit_post_grad(module, *rest)
        added.append(copies(module) - before)

    def copy(tensor: Tensor, shape: Any, strides: Any) -> Tensor:
        undecided.append((tuple(shape), tensor.stride(), tuple(strides)))
        return new_empty_strided(tensor, shape, strides)

    edit_post_grad, new_empty_strided = pipeline.edit_post_grad, Tensor.new_empty_strided
    example = entry.build("small", training=training)
    options = {"host": "python", "cache": "off", "strict": True}
    compiled = torch.compile(example.module, backend="ferrite", fullgraph=True, options=options)
    with mock.patch.object(pipeline, "edit_post_grad", edit), mock.patch.object(Tensor, "new_empty_strided", copy):
        if training:
            entry.loss(compiled(**leaves_of(entry, example.inputs))).backward()
        else:
            infer(compiled, [example.inputs])
    record = ferrite.last_record()
    assert record is not None
    graphs = [graph for graph in record.graphs if graph.phase in ("forward", "backward", "inference")]
    decided = [[choice for choice in graph.decisions if choice.what == "layout copy"] for graph in graphs]
    assert [len(choices) for choices in decided] == added
    assert undecided == [], "ops gave other strides than tracing said, and were copied"
    assert any(choice.what == "channels last" and choice.taken for graph in graphs for choice in graph.decisions)
    for choice in (choice for choices in decided for choice in choices):
        assert choice.taken
        assert choice.reason.endswith(" bytes")
