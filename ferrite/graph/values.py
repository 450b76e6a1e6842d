"""Fake values of nodes, kept right while passes edit: `meta["val"]` always says what the node gives.

A pass may insert nodes or change arguments without thinking of values: `refresh` recomputes those of nodes that are
new, edited since the snapshot, or read something whose value changed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from ferrite.graph.query import attribute
from ferrite.graph.snapshot import Snapshot, changed_nodes


def refresh(module: GraphModule, snapshot: Snapshot) -> int:
    """Recompute the values that the edits since `snapshot` made stale; gives how many there were."""
    stale = 0
    edited = changed_nodes(module.graph, snapshot)
    changed: set[Node] = set()
    fake_mode: FakeTensorMode | None = None
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        if node not in edited and "val" in node.meta and changed.isdisjoint(node.all_input_nodes):
            continue
        fake_mode = fake_mode or fake_mode_of(module.graph)
        old = node.meta.get("val")
        node.meta["val"] = evaluate(module, node, fake_mode)
        if not same_metadata(old, node.meta["val"]):
            changed.add(node)
        stale += 1
    return stale


def value_of(node: Any) -> Any:
    """The fake value of a node at any stage: Dynamo keeps it in `example_value`, later stages in `val`; a constant is
    its own. None if there is none."""
    if not isinstance(node, Node):
        return None
    for key in ("example_value", "val"):
        if key in node.meta:
            return node.meta[key]
    if node.op == "get_attr" and node.graph.owning_module is not None:
        found = attribute(node.graph.owning_module, str(node.target))
        return found if isinstance(found, torch.Tensor) else None
    return None


def tensor_of(node: Any) -> torch.Tensor | None:
    """The fake tensor of a node that gives one plain tensor; None for anything else."""
    value = value_of(node)
    return value if isinstance(value, torch.Tensor) and value.layout is torch.strided else None


def fake_mode_of(graph: Graph) -> FakeTensorMode:
    """The mode that the values of a graph belong to. Dynamo's graphs keep the mode of the trace: the tracing context
    holds another one by then, with the same sizes."""
    for node in graph.nodes:
        for leaf in tree_leaves(value_of(node)):
            if isinstance(leaf, FakeTensor):
                return leaf.fake_mode
    return detect_fake_mode() or FakeTensorMode(allow_non_fake_inputs=True)


def evaluate(module: GraphModule, node: Node, fake_mode: FakeTensorMode) -> Any:
    def value(source: Node) -> Any:
        return attribute(module, str(source.target)) if source.op == "get_attr" else source.meta["val"]

    args, kwargs = map_arg(node.args, value), map_arg(node.kwargs, value)
    with torch.no_grad(), fake_mode, enable_python_dispatcher():
        return node.target(*args, **kwargs)


def same_metadata(old: Any, new: Any) -> bool:
    """Whether two fake values say the same of what they stand for: type, sizes, strides."""
    if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
        return (
            old.dtype == new.dtype
            and old.device == new.device
            and len(old.shape) == len(new.shape)
            and all(str(a) == str(b) for a, b in zip(old.shape, new.shape, strict=True))
            and (old.layout != torch.strided or [str(s) for s in old.stride()] == [str(s) for s in new.stride()])
        )
    if isinstance(old, (tuple, list)) and isinstance(new, (tuple, list)):
        return len(old) == len(new) and all(same_metadata(a, b) for a, b in zip(old, new, strict=True))
    return type(old) is type(new) and str(old) == str(new)
