"""What can be said of a graph without running it: what it writes to, where its tensors live, how its outputs lie."""

from __future__ import annotations

import torch
from torch.fx import Graph
from torch.utils._pytree import tree_leaves

from ferrite.graph.query import written_arguments
from ferrite.graph.strides import current_strides
from ferrite.graph.values import value_of


def mutated_inputs(graph: Graph) -> tuple[int, ...]:
    """Positions of the inputs that some call of the graph writes to, by its schema."""
    positions = {node: index for index, node in enumerate(graph.find_nodes(op="placeholder"))}
    written = {argument for node in graph.nodes for argument in written_arguments(node)}
    return tuple(sorted(positions[argument] for argument in written if argument in positions))


def device_types(graph: Graph) -> tuple[str, ...]:
    """The kinds of device that tensors of the graph live on, without `meta`."""
    leaves = (leaf for node in graph.nodes for leaf in tree_leaves(value_of(node)))
    return tuple(sorted({leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)} - {"meta"}))


def output_strides(graph: Graph) -> tuple[tuple[str, ...] | None, ...]:
    """The strides of every output as expressions; None for what is no plain tensor."""
    return tuple(None if strides is None else tuple(map(str, strides)) for strides in current_strides(graph))
