"""Splits that do not split: a single section is the input, a single section that is read is a slice.

    x: f32[2, 12]
    x.split(4, 1)[1] + 1  ->  torch.narrow(x, 1, 4, 4) + 1
    torch.split(x, 12, 1)[0] + 1  ->  x + 1

A split that nobody reads goes.
"""

from __future__ import annotations

from torch.fx import Graph, Node

from ferrite.graph.arguments import find
from ferrite.graph.build import Builder
from ferrite.graph.pieces import SPLITS, items, read_split
from ferrite.graph.pre_grad.drop_whole_splits import drop_if_whole
from ferrite.graph.runs import Run, slice_of
from ferrite.graph.soundness import Soundness


def remove_splits(graph: Graph) -> int:
    sound = Soundness(graph)
    for node in find(graph, *SPLITS):
        _remove(sound, node)
    return sound.rewrites


def _remove(sound: Soundness, node: Node) -> None:
    split, read = read_split(node), items(node)
    if split is None or read is None or len(split.sizes) == 1:
        drop_if_whole(sound, node)
    elif not read:
        sound.drop(node)
    elif len(read) == 1:
        ((index, parts),) = read.items()

        def build(new: Builder) -> list[Node]:
            piece = slice_of(new, Run(split, index, index + 1, ()))
            return [piece for _ in parts]

        sound.rewrite(parts, build)
    else:
        sound.refuse(node, f"{len(read)} sections of {node.name} are read")
