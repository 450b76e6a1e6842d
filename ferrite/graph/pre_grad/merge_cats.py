"""A cat of cats along one dimension is one cat.

    a: f32[2, 3], b: f32[2, 4], c: f32[2, 5]
    torch.cat([torch.cat([a, b], 1), c], 1)  ->  torch.cat([a, b, c], dim=1)

The inner cat must have no other reader: it would be made all the same.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from ferrite.graph.arguments import find
from ferrite.graph.pieces import Join, read_join
from ferrite.graph.soundness import Soundness


def merge_cats(graph: Graph) -> int:
    sound = Soundness(graph)
    for node in find(graph, "cat"):
        _merge(sound, node)
    return sound.rewrites


def _merge(sound: Soundness, node: Node) -> None:
    outer = read_join(node)
    if outer is None:
        return
    inner = {part: join for part in outer.parts if (join := _inner(part, outer))}
    if not inner:
        return
    flat = [leaf for part in outer.parts for leaf in (inner[part].parts if part in inner else (part,))]
    shared = next((reason for part in inner if (reason := sound.only_user(part, node))), None)
    sound.rewrite(node, lambda new: new(torch.cat, flat, dim=outer.dim), objection=shared or sound.agree(*flat))


def _inner(part: Node, outer: Join) -> Join | None:
    join = read_join(part)
    return join if join is not None and (join.kind, join.dim) == ("cat", outer.dim) else None
