"""A stack of one tensor is that tensor with one more dimension.

    x: f32[2, 3], y: f32[2, 3], z: f32[2, 1, 3]
    torch.stack([x], 1) * 2  ->  torch.unsqueeze(x, dim=1) * 2

A stack that only goes into a cat along its dimension becomes a cat as well, which `merge_cats` then takes in:

    torch.cat([torch.stack([x, y], 1), z], 1)
    ->  torch.cat([torch.cat([torch.unsqueeze(x, dim=1), torch.unsqueeze(y, dim=1)], dim=1), z], 1)
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from ferrite.graph.arguments import find
from ferrite.graph.build import Builder
from ferrite.graph.pieces import Join, read_join
from ferrite.graph.soundness import Soundness


def stack_to_unsqueeze(graph: Graph) -> int:
    sound = Soundness(graph)
    for node in find(graph, "stack"):
        _unsqueeze(sound, node)
    return sound.rewrites


def _unsqueeze(sound: Soundness, node: Node) -> None:
    join = read_join(node)
    if join is None or not (len(join.parts) == 1 or _goes_into_cat(join)):
        return

    def build(new: Builder) -> Node:
        parts = [new(torch.unsqueeze, part, dim=join.dim) for part in join.parts]
        return parts[0] if len(parts) == 1 else new(torch.cat, parts, dim=join.dim)

    sound.rewrite(node, build)


def _goes_into_cat(join: Join) -> bool:
    outer = read_join(next(iter(join.node.users))) if len(join.node.users) == 1 else None
    return outer is not None and (outer.kind, outer.dim) == ("cat", join.dim)
