"""What can be said of a graph without running it: what it writes to, where its tensors live, how its outputs lie."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.fx import Graph
from torch.utils._pytree import tree_leaves

from ferrite.graph.query import memory_of, written_arguments
from ferrite.graph.strides import current_strides
from ferrite.graph.values import value_of


def mutated_inputs(graph: Graph) -> tuple[int, ...]:
    """Positions of the inputs that some call of the graph writes to, itself or through a view, by its schema."""
    positions = {node: index for index, node in enumerate(graph.find_nodes(op="placeholder"))}
    written = {memory_of(argument) for node in graph.nodes for argument in written_arguments(node)}
    return tuple(sorted(positions[argument] for argument in written if argument in positions))


def device_types(graph: Graph) -> tuple[str, ...]:
    """The kinds of device that tensors of the graph live on, without `meta`."""
    leaves = (leaf for node in graph.nodes for leaf in tree_leaves(value_of(node)))
    return tuple(sorted({leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)} - {"meta"}))


def output_strides(graph: Graph) -> tuple[tuple[str, ...] | None, ...]:
    """The strides of every output as expressions; None for what is no plain tensor."""
    return tuple(None if strides is None else tuple(map(str, strides)) for strides in current_strides(graph))


def shared_memory(values: Sequence[Any], saved: Collection[int]) -> dict[int, tuple[int, int]]:
    """By position, the saved tensors that are parts of larger memory or share it with others: the first of them that
    has this memory, and its bytes. A view keeps all of what it is a view of."""
    owners: dict[int, list[int]] = {}
    storages = {place: values[place].untyped_storage() for place in sorted(saved) if _has_known_memory(values, place)}
    for place, storage in storages.items():
        owners.setdefault(storage._cdata, []).append(place)
    found: dict[int, tuple[int, int]] = {}
    for places in owners.values():
        first, length = places[0], storages[places[0]].nbytes()
        if len(places) > 1 or length != _span(values[first]):
            found |= dict.fromkeys(places, (first, length))
    return found


def _has_known_memory(values: Sequence[Any], place: int) -> bool:
    value = values[place] if place < len(values) else None
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return False
    return all(isinstance(number, int) for number in (*value.shape, *value.stride(), value.untyped_storage().nbytes()))


def _span(value: torch.Tensor) -> int:
    """Bytes from the first element to the last."""
    if not value.numel():
        return 0
    steps = ((extent - 1) * stride for extent, stride in zip(value.shape, value.stride(), strict=True))
    return (sum(steps) + 1) * value.element_size()
