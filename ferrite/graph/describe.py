"""What can be said of a graph without running it: what it writes to, where its tensors live, how its outputs lie."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from ferrite.graph.query import output_node, tensors, written_arguments


def mutated_inputs(graph: Graph) -> tuple[int, ...]:
    """Positions of the inputs that some call of the graph writes to, by its schema."""
    positions = {node: index for index, node in enumerate(graph.find_nodes(op="placeholder"))}
    written = {argument for node in graph.nodes for argument in written_arguments(node)}
    return tuple(sorted(positions[argument] for argument in written if argument in positions))


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
