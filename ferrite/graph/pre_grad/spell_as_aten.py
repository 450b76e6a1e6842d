"""Calls of Torch functions and methods are written as the ATen overloads that they reach.

    x: f32[2, 10]
    torch.cat([x, x], dim=1)  ->  aten.cat.default([x, x], 1)
    x[:, 2:4]  ->  aten.slice.Tensor(x, 1, 2, 4)

Indices that are slices are taken one dimension after another; other ways of indexing stay.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ferrite.graph.arguments import kind
from ferrite.graph.aten_forms import OVERLOADS, Form, aten, form_of, is_index
from ferrite.graph.build import Builder
from ferrite.graph.soundness import Soundness
from ferrite.graph.values import value_of


def spell_as_aten(graph: Graph) -> int:
    sound = Soundness(graph)
    for node in list(graph.nodes):
        if node.op not in ("call_function", "call_method") or isinstance(node.target, OVERLOADS):
            continue
        if kind(node) == "getitem":
            _spell_index(sound, node)
        elif (form := _overload(node)) is not None:
            sound.respell(node, *form)
    return sound.rewrites


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
        return form_of(node, getattr(packet, name or "default"), tuple(args), node.kwargs)
    return None


def _spell_index(sound: Soundness, node: Node) -> None:
    if len(node.args) != 2 or node.kwargs:
        return
    source, index = node.args
    entries = index if isinstance(index, tuple) else (index,)
    if not is_index(node) or not all(isinstance(entry, slice) for entry in entries):
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
