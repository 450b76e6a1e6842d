"""A split of a section is part of the split that made the section.

    x: f32[2, 32]
    a, b, c = x.split([10, 10, 12], 1); d, e = a.split([4, 6], 1); (d, e, b, c)
    ->  a, b, c, d = torch.split(x, [4, 6, 10, 12], dim=1); (a, b, c, d)

Both must cut along the same dimension, and the section feed nothing else and be taken once, by its index from the
front. Counted from the back it would be right too; the rule is that such a section keeps its split, and that costs
nothing, because Dynamo counts from the front. It is a rule about sections that are split again: others, and sections of
sections, may be taken twice or from the back, and are renumbered as they were counted.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, Node

from ferrite.graph.arguments import find
from ferrite.graph.build import Builder
from ferrite.graph.pieces import SPLITS, Split, items, read_split
from ferrite.graph.soundness import Soundness


def merge_nested_splits(graph: Graph) -> int:
    sound = Soundness(graph)
    for node in find(graph, *SPLITS):
        outer: Node | None = node
        while outer is not None:
            outer = _merge(sound, outer)
    return sound.rewrites


def _merge(sound: Soundness, node: Node) -> Node | None:
    """Take all splits of sections into one split, which is given back; None if there is nothing to do."""
    outer, read = read_split(node), items(node)
    if outer is None or not read:
        return None
    children = {index: child for index, nodes in read.items() if (child := _child(sound, outer, nodes))}
    places = list(children)[: sound.ledger.room(len(children))]
    if not places:
        return None
    sizes: list[int] = []
    olds: dict[Node, int] = {}  # what is read, and where it stands in the new split
    for index, size in enumerate(outer.sizes):
        inner = children[index] if index in places else None
        parts = (items(inner.node) or {}) if inner is not None else {0: read.get(index, [])}
        olds |= {item: len(sizes) + position for position, nodes in parts.items() for item in nodes}
        sizes += inner.sizes if inner is not None else [size]
    made: list[Node] = []

    def build(new: Builder) -> list[Node]:
        made[:] = [new(torch.split, outer.source, sizes, dim=outer.dim)]
        counted = ((at - len(sizes) if item.args[1] < 0 else at) for item, at in olds.items())
        return [new(operator.getitem, made[0], index) for index in counted]

    done = sound.rewrite(list(olds), build, each=[children[index].node for index in places])
    return made[0] if done else None


def _child(sound: Soundness, outer: Split, nodes: list[Node]) -> Split | None:
    """The split along the same dimension that alone reads a section."""
    found = [split for item in nodes for user in item.users if (split := read_split(user)) and split.source is item]
    inner = next((split for split in found if split.dim == outer.dim and len(split.sizes) > 1), None)
    if inner is None or not items(inner.node):
        return None
    reason = sound.only_user(inner.source, inner.node)
    if len(nodes) > 1:
        reason = f"{inner.source.name} is taken twice out of {outer.node.name}"
    elif inner.source.args[1] < 0:
        reason = f"{inner.source.name} is taken out of {outer.node.name} by an index from the back"
    if reason is not None:
        sound.refuse(inner.node, reason)
        return None
    return inner
