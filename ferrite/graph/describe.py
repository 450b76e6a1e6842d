"""What can be said of a graph without running it: what it writes to, where its tensors live, how its outputs lie."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves

from ferrite.graph.query import output_node, tensors


def mutated_inputs(graph: Graph) -> tuple[int, ...]:
    """Positions of the inputs that some call of the graph writes to, by its schema."""
    positions = {node: index for index, node in enumerate(graph.find_nodes(op="placeholder"))}
    written: set[int] = set()
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None or not schema.is_mutable:
            continue
        named = dict(zip((argument.name for argument in schema.arguments), node.args, strict=False)) | node.kwargs
        for argument in schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                leaves = tree_leaves(named.get(argument.name))
                written |= {positions[leaf] for leaf in leaves if isinstance(leaf, Node) and leaf in positions}
    return tuple(sorted(written))


def device_types(graph: Graph) -> tuple[str, ...]:
    """The kinds of device that tensors of the graph live on, without `meta`."""
    found = {tensor.device.type for node in graph.nodes for tensor in tensors(node)}
    return tuple(sorted(found - {"meta"}))


def output_strides(graph: Graph) -> tuple[tuple[str, ...] | None, ...]:
    """The strides of every output as expressions; None for what is no plain tensor."""
    result = output_node(graph).args[0]
    nodes = result if isinstance(result, (tuple, list)) else [result]
    return tuple(_stride_text(node.meta.get("val") if isinstance(node, Node) else node) for node in nodes)


def _stride_text(value: Any) -> tuple[str, ...] | None:
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return None
    return tuple(str(stride) for stride in value.stride())
