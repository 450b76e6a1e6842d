"""A split with one section is its input.

    x: f32[2, 8]
    torch.split(x, 8, 1)[0] + 1  ->  x + 1
    torch.split(x, 8, 1)[0]  ->  torch.narrow(x, 1, 0, 8)

What is returned, or a view of it, stays another tensor than x that shares its memory, as eager gives it. A split that
nobody reads goes.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from ferrite.graph.arguments import find
from ferrite.graph.pieces import SPLITS, items, read_split
from ferrite.graph.soundness import Soundness


def drop_whole_splits(graph: Graph) -> int:
    sound = Soundness(graph)
    for node in find(graph, *SPLITS):
        drop_if_whole(sound, node)
    return sound.rewrites


def drop_if_whole(sound: Soundness, node: Node) -> None:
    split = read_split(node)
    if split is None or len(split.sizes) != 1:
        return
    if not node.users:
        sound.drop(node)
        return
    read = items(node)
    if read is None:
        sound.refuse(node, f"{node.name} is read as a whole")
        return
    source, (parts,) = split.source, read.values()
    whole = (split.dim, 0, *split.sizes)  # a view would give dimensions of size one other strides
    returned = [part for part in parts if sound.returned(part)]  # `part.to(part.dtype)` is that very tensor
    written = next((reason for part in parts if (reason := sound.written_after(part))), None)
    sound.rewrite(
        parts,
        lambda new: [new(torch.narrow, source, *whole) if part in returned else source for part in parts],
        objection=sound.has_values(source, *parts) or written,
    )
