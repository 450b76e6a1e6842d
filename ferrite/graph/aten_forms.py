"""Graphs whose calls are ATen overloads: how to tell them, and the one form in which such a call is written."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import Graph, Node

from ferrite.graph.arguments import kind, positive_dim
from ferrite.graph.pieces import read_join, read_split
from ferrite.graph.values import tensor_of

aten = torch.ops.aten

OVERLOADS = (OpOverload, HigherOrderOperator)

Form = tuple[OpOverload, tuple[Any, ...], dict[str, Any]]


def is_aten(graph: Graph) -> bool:
    """Whether all that a graph does to tensors is written as ATen overloads; sizes are reckoned with as they are."""
    functions = [node for node in graph.nodes if node.op.startswith("call") and tensor_of(node) is not None]
    return bool(functions) and all(
        isinstance(node.target, OVERLOADS) or (kind(node) == "getitem" and not is_index(node)) for node in functions
    )


def is_index(node: Node) -> bool:
    """Whether a `getitem` reads a tensor, and not one of several results."""
    return tensor_of(node.args[0]) is not None


def form_of(node: Node, target: OpOverload, given: tuple[Any, ...], named: dict[str, Any]) -> Form:
    """How a call of `target` in the place of `node` is written: a split by the sizes that it gives, arguments by
    position, defaults at the end left out."""
    if (split := read_split(node)) is not None:
        return aten.split_with_sizes.default, (split.source, list(split.sizes), split.dim), {}
    args, kwargs = list(given), dict(named)
    parameters = target._schema.arguments
    if len(args) > len(parameters) or kwargs.keys() - {parameter.name for parameter in parameters}:
        return target, given, named  # which raises, and goes on raising
    for parameter in parameters[len(args) :]:
        if parameter.name not in kwargs or parameter.kwarg_only:
            break
        args.append(kwargs.pop(parameter.name))
    if read_join(node) is not None and len(args) == 2:
        args[1] = positive_dim(args[1], tensor_of(node).dim())  # type: ignore[union-attr]
    while args and not kwargs and _is_default(parameters[len(args) - 1], args[-1]):
        args.pop()
    return target, tuple(args), kwargs


def _is_default(parameter: Any, value: Any) -> bool:
    if not parameter.has_default_value() or isinstance(value, (Node, list, tuple)):
        return False
    return type(value) is type(parameter.default_value) and value == parameter.default_value
