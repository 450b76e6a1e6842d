"""Strides of the outputs that a user can see: noted before any pass, put back after the last one.

Code that calls `.view`, `.stride()` or hands an output to another kernel must behave as in eager. Passes and layout
choices are free to change strides inside the graph; `note_output_strides` writes down what eager gives,
`restore_output_strides` copies the outputs that came out otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._functorch._aot_autograd.descriptors import (
    IntermediateBaseAOTOutput,
    SavedForBackwardsAOTOutput,
    SavedForBackwardsNoVcCheckAOTOutput,
)
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ferrite.decisions import Decision
from ferrite.graph.ledger import ledger_of
from ferrite.graph.query import bytes_of, output_node, output_roles

aten = torch.ops.aten

NOTED = "ferrite_output_strides"
REALISED = "realise_to_strides"  # a pass says so of a node whose value is to be in memory, as its fake value lies
_SAVED = (SavedForBackwardsAOTOutput, SavedForBackwardsNoVcCheckAOTOutput)


def note_output_strides(graph: Graph, *, keep: bool = True) -> None:
    """Store on the output node the strides that each visible output must have; None where nothing is asked: of what is
    saved for the backward, and, if `keep` is false, of all."""
    output = output_node(graph)
    values = output_values(graph)
    roles = output_roles(graph)
    noted: list[tuple[Any, ...] | None] = []
    for index, node in enumerate(values):
        visible = keep and not (roles is not None and isinstance(roles[index], _SAVED))
        noted.append(_strides(node) if visible else None)
    output.meta[NOTED] = noted


def shown_as_made(graph: Graph) -> list[bool]:
    """Of each output, whether nobody reads it by the strides of the trace: the user sees it as eager makes it. What is
    saved for the backward, or what AOTAutograd makes views of, is read by them."""
    roles = output_roles(graph)
    noted = noted_strides(graph)
    if noted is None:  # a graph that an op runs
        return [True] * len(output_values(graph))
    if roles is None:
        return [strides is not None for strides in noted]
    read = (*_SAVED, IntermediateBaseAOTOutput)
    return [not isinstance(role, read) for role in roles]


def order_of(sizes: Sequence[Any], strides: Sequence[Any]) -> list[int]:
    """Dimensions from the slowest to the fastest; a stride that is a symbol counts as what it was in the trace. Of two
    with one stride, a dimension of size one is the faster: of size (2, 1, 3) and strides (3, 1, 1), the second."""
    hints = [stride if isinstance(stride, int) else stride.node.hint for stride in strides]
    return sorted(range(len(hints)), key=lambda dim: (-hints[dim], isinstance(sizes[dim], int) and sizes[dim] == 1))


def restore_output_strides(graph: Graph) -> int:
    """output(x), x with other strides than noted  ->  output(copy of x with the noted strides)"""
    output, noted = output_node(graph), noted_strides(graph)
    if noted is None:
        return 0
    values = output_values(graph)
    copies: dict[tuple[Node, tuple[str, ...]], Node] = {}  # a result that is given twice is one tensor
    for index, (node, wanted) in enumerate(zip(values, noted, strict=True)):
        if wanted is None or _same(_strides(node), wanted):
            continue
        key = (node, tuple(map(str, wanted)))
        if key not in copies:
            with graph.inserting_before(output):
                copies[key] = copy_with_strides(graph, node, wanted)
                note_copy(graph, node, "the caller sees it")
        values[index] = copies[key]
    if copies:
        output.args = (type(output.args[0])(values),)
    return len(copies)


def noted_strides(graph: Graph) -> list[tuple[Any, ...] | None] | None:
    """What `note_output_strides` wrote down; None if it did not run on this graph."""
    noted: list[tuple[Any, ...] | None] | None = output_node(graph).meta.get(NOTED)
    return noted


def output_values(graph: Graph) -> list[Any]:
    result = output_node(graph).args[0]
    return list(result) if isinstance(result, (tuple, list)) else [result]


def current_strides(graph: Graph) -> list[tuple[Any, ...] | None]:
    """How each output lies now; None for what is no plain tensor."""
    return [_strides(node) for node in output_values(graph)]


def _strides(node: Any) -> tuple[Any, ...] | None:
    """The strides of a plain tensor; None for other values and where a stride is known only at run time."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return None
    strides = tuple(value.stride())
    return None if free_unbacked_symbols(strides) else strides


def _same(found: tuple[Any, ...] | None, wanted: tuple[Any, ...]) -> bool:
    return found is None or [str(s) for s in found] == [str(s) for s in wanted]


def note_copy(graph: Graph, source: Node, why: str) -> None:
    """Write a copy that is made for the sake of strides into the ledger of a graph."""
    ledger_of(graph).decisions.append(
        Decision("layout copy", (source.name,), True, f"{why}; {bytes_of(source):,} bytes")
    )


def copy_with_strides(graph: Graph, node: Node, strides: tuple[Any, ...]) -> Node:
    """Static strides are made exactly; symbolic ones by their order: a contiguous clone of a permuted view."""
    value = node.meta["val"]
    if all(isinstance(extent, int) for extent in (*value.shape, *strides)):
        kind = {"dtype": value.dtype, "device": value.device}
        buffer = insert(graph, aten.empty_strided.default, (list(value.shape), list(strides)), kind, value.fake_mode)
        return insert(graph, aten.copy.default, (buffer, node))
    order = order_of(value.shape, strides)
    inverse = [order.index(dim) for dim in range(len(order))]
    permuted = insert(graph, aten.permute.default, (node, order))
    dense = insert(graph, aten.clone.default, (permuted,), {"memory_format": torch.contiguous_format})
    return insert(graph, aten.permute.default, (dense, inverse))


def insert(
    graph: Graph, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, mode: Any = None
) -> Node:
    """A call whose fake value is known at once, so that the graph stays checkable. `mode`: that of its operands, if it
    has none."""
    node = graph.call_function(target, args, kwargs or {})
    values = torch.fx.node.map_arg((args, kwargs or {}), lambda source: source.meta["val"])
    operands = (value for value in torch.utils._pytree.tree_leaves(values) if isinstance(value, torch.Tensor))
    with torch.no_grad(), mode or next(operands).fake_mode:
        node.meta["val"] = target(*values[0], **values[1])
    return node
