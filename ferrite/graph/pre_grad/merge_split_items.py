"""Sections that only go into one cat, side by side as they were, are one wider section.

    x: f32[2, 16]
    a, b, c = x.split([4, 4, 8], 1); (torch.cat([a, b], 1) + 1, c)
    ->  ab, c = torch.split(x, [8, 8], dim=1); (ab + 1, c)

The wide section is a view where the cat was a copy: it may be neither written nor returned.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, Node

from ferrite.graph.arguments import find
from ferrite.graph.build import Builder
from ferrite.graph.pieces import Split, items, read_join
from ferrite.graph.runs import Run, fits, is_view, read_runs
from ferrite.graph.soundness import Soundness


def merge_split_items(graph: Graph) -> int:
    sound = Soundness(graph)
    for node in find(graph, "cat"):
        _merge(sound, node)
    return sound.rewrites


def _merge(sound: Soundness, node: Node) -> None:
    join = read_join(node)
    parts = read_runs(join) if join is not None else []
    if join is None or not is_view(parts, join) or not isinstance(run := parts[0], Run) or not fits(run, join):
        return
    shared = next((reason for item in run.nodes if (reason := sound.only_user(item, node))), None)
    if shared is not None:
        sound.refuse(node, shared)
        return
    assert isinstance(run.parent, Split)
    split, sizes = run.parent, list(run.parent.sizes)
    others = [(index, item) for index, found in (items(split.node) or {}).items() for item in found]
    others = [(index, item) for index, item in others if item not in run.nodes]
    sizes[run.start : run.stop] = [sum(sizes[run.start : run.stop])]

    def build(new: Builder) -> list[Node]:
        if len(sizes) == 1:
            return [split.source]
        whole = new(torch.split, split.source, sizes, dim=split.dim)
        places = [index if index < run.start else index - run.count + 1 for index, _ in others]
        return [new(operator.getitem, whole, place) for place in (run.start, *places)]

    sound.rewrite([node, *(item for _, item in others)], build)
