"""Sections of size one without the dimension they were cut along are an unbind.

    x: f32[4, 3]
    [t.squeeze(1) for t in x.split(1, 1)]  ->  [t for t in torch.unbind(x, dim=1)]

Every item must be squeezed, and along that dimension alone.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, Node

from ferrite.graph.arguments import bind, find, positive_dim
from ferrite.graph.build import Builder
from ferrite.graph.pieces import SPLITS, Split, items, read_split
from ferrite.graph.soundness import Soundness
from ferrite.graph.values import tensor_of


def split_squeeze_to_unbind(graph: Graph) -> int:
    sound = Soundness(graph)
    for node in find(graph, *SPLITS):
        _unbind(sound, node)
    return sound.rewrites


def _unbind(sound: Soundness, node: Node) -> None:
    split, read = read_split(node), items(node)
    if split is None or not read or set(split.sizes) != {1}:
        return
    places = {user: index for index, nodes in read.items() for item in nodes for user in item.users}
    squeezes = [user for user in places if _squeezes(user, split)]
    if not squeezes:
        return
    other = next((user for user in places if user not in squeezes), None)

    def build(new: Builder) -> list[Node]:
        unbind = new(torch.unbind, split.source, dim=split.dim)
        made = {index: new(operator.getitem, unbind, index) for index in sorted(read)}
        return [made[places[user]] for user in squeezes]

    objection = f"{other.name} reads an item of {node.name} as it is" if other is not None else None
    sound.rewrite(squeezes, build, objection=objection)


def _squeezes(node: Node, split: Split) -> bool:
    """Whether a call takes away the dimension of the split, and names no other."""
    call, whole = bind(node, "squeeze"), tensor_of(split.source)
    if call is None or whole is None:
        return False
    dim = call["dim"][0] if isinstance(call["dim"], (list, tuple)) and len(call["dim"]) == 1 else call["dim"]
    return positive_dim(dim, whole.dim()) == split.dim
