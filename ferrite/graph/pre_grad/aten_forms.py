"""One form for the calls of a graph of ATen overloads, and ATen overloads for what other passes put there.

    x: f32[2, 10]
    aten.split.Tensor(x, 4, -1)  ->  aten.split_with_sizes.default(x, [4, 4, 2], 1)
    torch.cat([x, x], dim=1)  ->  aten.cat.default([x, x], 1)

The sizes of a split are measured from what it gives. Arguments stand by position, defaults at the end are left out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ferrite.graph.arguments import kind, positive_dim
from ferrite.graph.build import Builder
from ferrite.graph.pieces import read_join, read_split
from ferrite.graph.soundness import Soundness
from ferrite.graph.values import tensor_of, value_of

aten = torch.ops.aten

_OVERLOADS = (OpOverload, HigherOrderOperator)

Form = tuple[OpOverload, tuple[Any, ...], dict[str, Any]]


def is_aten(graph: Graph) -> bool:
    """Whether all that a graph does to tensors is written as ATen overloads; sizes are reckoned with as they are."""
    functions = [node for node in graph.nodes if node.op.startswith("call") and tensor_of(node) is not None]
    return bool(functions) and all(
        isinstance(node.target, _OVERLOADS) or (kind(node) == "getitem" and not _is_index(node)) for node in functions
    )


def normalise_aten(graph: Graph) -> int:
    """Splits by their sizes, dimensions counted from the front, arguments by position."""
    sound = Soundness(graph)
    for node in list(graph.nodes):
        if isinstance(node.target, OpOverload) and node.target.namespace == "aten":
            form = _form(node, node.target, node.args, node.kwargs)
            if form != (node.target, node.args, node.kwargs):
                sound.respell(node, *form)
    return sound.rewrites


def spell_as_aten(graph: Graph) -> int:
    """Calls of Torch functions and methods as the overloads that they reach."""
    sound = Soundness(graph)
    for node in list(graph.nodes):
        if node.op not in ("call_function", "call_method") or isinstance(
            node.target, (OpOverload, HigherOrderOperator)
        ):
            continue
        if kind(node) == "getitem":
            _spell_index(sound, node)
        elif (form := _overload(node)) is not None:
            sound.respell(node, *form)
    return sound.rewrites


def _form(node: Node, target: OpOverload, given: tuple[Any, ...], named: dict[str, Any]) -> Form:
    """How a call of `target` in the place of `node` is written."""
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


def _overload(node: Node) -> Form | None:
    """The overload of a Torch call that takes its arguments as they are, or with its numbers as a list."""
    packet = getattr(aten, kind(node) or "", None)
    if packet is None or value_of(node) is None or not node.args:
        return None
    for args in (node.args, (node.args[0], list(node.args[1:]))):
        given, named = map_arg((args, node.kwargs), value_of)
        try:
            name = torch._C._jit_resolve_packet(packet._qualified_op_name, *given, **named)
        except RuntimeError:
            continue
        return _form(node, getattr(packet, name or "default"), tuple(args), node.kwargs)
    return None


def _is_index(node: Node) -> bool:
    return tensor_of(node.args[0]) is not None


def _spell_index(sound: Soundness, node: Node) -> None:
    """`x[:, 2:4]` as slices of one dimension after another; other ways of indexing stay."""
    if len(node.args) != 2 or node.kwargs:
        return
    source, index = node.args
    entries = index if isinstance(index, tuple) else (index,)
    if not _is_index(node) or not all(isinstance(entry, slice) for entry in entries):
        return

    def build(new: Builder) -> Node:
        result = source
        for dim, entry in enumerate(entries):
            if entry != slice(None):
                result = new(
                    aten.slice.Tensor, result, dim, entry.start, entry.stop, *([entry.step] if entry.step else [])
                )
        return result if result is not source else new(aten.alias.default, source)

    sound.rewrite(node, build)
