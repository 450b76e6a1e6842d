"""An op whose tag says how its operands must lie gets them so.

    op(x)  ->  op(clone(x, contiguous_format))      needs_contiguous_strides
    op(x)  ->  op(copy of x with eager's strides)   needs_exact_strides: what eager saw is noted when it is traced

An op of the second kind that a pass has inserted has no such note, and no wish. `needs_fixed_stride_order` asks for
nothing here: where the order of an operand was changed, `relayout` has given the op a copy as it lay. A custom op
without a tag has that of `torch._functorch.config.custom_op_default_layout_constraint`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch._library.utils import get_layout_constraint_tag
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._pytree import tree_leaves

from ferrite.graph.relayout import Wish, relayout


def constrain_strides(graph: Graph) -> int:
    if not any(map(_wanted, graph.nodes)):
        return 0
    return relayout(graph, _wanted)


def _wanted(node: Node) -> Mapping[Node, Wish]:
    """How the operands of a node must lie, if its op says so."""
    if not isinstance(node.target, OpOverload):
        return {}
    tag = get_layout_constraint_tag(node.target)
    if tag == torch.Tag.needs_contiguous_strides:
        return {source: torch.contiguous_format for source in node.all_input_nodes if _is_plain(source.meta.get("val"))}
    if tag == torch.Tag.needs_exact_strides and "eager_input_vals" in node.meta:
        return dict(_as_in_eager(node))
    return {}


def _as_in_eager(node: Node) -> Iterator[tuple[Node, tuple[Any, ...]]]:
    given, noted = _by_name(node, node.args, node.kwargs), _by_name(node, *node.meta["eager_input_vals"])
    for name, argument in given.items():
        for source, value in zip(tree_leaves(argument), tree_leaves(noted.get(name)), strict=False):
            if isinstance(source, Node) and _is_plain(value) and _is_plain(source.meta.get("val")):
                yield source, tuple(value.stride())


def _by_name(node: Node, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by the names of the schema: a pass may have given one by position that eager was given by name."""
    names = (argument.name for argument in node.target._schema.arguments)
    return dict(zip(names, args, strict=False)) | dict(kwargs)


def _is_plain(value: Any) -> bool:
    """Whether it has strides that are known before a run."""
    is_strided = isinstance(value, torch.Tensor) and value.layout == torch.strided
    return is_strided and not free_unbacked_symbols((*value.shape, *value.stride()))
