"""A split of a section is part of the split that made the section.

    x: f32[2, 32]
    a, b, c = x.split([10, 10, 12], 1); d, e = a.split([4, 6], 1); (d, e, b, c)
    ->  a, b, c, d = torch.split(x, [4, 6, 10, 12], dim=1); (a, b, c, d)

Both must cut along the same dimension, and the section feed nothing else.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, Node

from ferrite.graph.arguments import find
from ferrite.graph.build import Builder
from ferrite.graph.pieces import SPLITS, Split, item_of, items, read_split
from ferrite.graph.soundness import Soundness


def merge_nested_splits(graph: Graph) -> int:
    sound = Soundness(graph)
    for node in find(graph, *SPLITS):
        _merge(sound, node)
    return sound.rewrites


def _merge(sound: Soundness, node: Node) -> None:
    inner = read_split(node)
    taken = item_of(inner.source) if inner is not None else None
    outer = read_split(taken[0]) if taken is not None else None
    if inner is None or taken is None or outer is None or outer.dim != inner.dim or len(inner.sizes) < 2:
        return
    at = taken[1]
    outside, inside = _read_once(outer), _read_once(inner)
    if outside is None or inside is None:
        sound.refuse(node, f"an item of {node.name if inside is None else outer.node.name} is taken twice")
        return
    wider = len(inner.sizes) - 1
    moved = {index + (wider if index > at else 0): item for index, item in outside.items() if index != at}
    moved |= {index + at: item for index, item in inside.items()}
    sizes = [*outer.sizes[:at], *inner.sizes, *outer.sizes[at + 1 :]]

    def build(new: Builder) -> list[Node]:
        split = new(torch.split, outer.source, sizes, dim=outer.dim)
        return [new(operator.getitem, split, index) for index in sorted(moved)]

    olds = [moved[index] for index in sorted(moved)]
    sound.rewrite(olds, build, objection=sound.only_user(inner.source, node))


def _read_once(split: Split) -> dict[int, Node] | None:
    """The items of a split, each taken once; None if it is read in another way."""
    read = items(split.node)
    if not read or any(len(nodes) != 1 for nodes in read.values()):
        return None
    return {index: nodes[0] for index, nodes in read.items()}
