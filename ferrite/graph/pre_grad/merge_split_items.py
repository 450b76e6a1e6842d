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
from ferrite.graph.pieces import SPLITS, Split, items, read_join, read_split
from ferrite.graph.runs import Run, fits, is_view, read_runs
from ferrite.graph.soundness import Soundness


def merge_split_items(graph: Graph) -> int:
    sound = Soundness(graph)
    for node in find(graph, *SPLITS):
        _merge(sound, node)
    return sound.rewrites


def _merge(sound: Soundness, node: Node) -> None:
    split, read = read_split(node), items(node)
    if split is None or not read:
        return
    users = dict.fromkeys(user for nodes in read.values() for item in nodes for user in item.users)
    found = {user: run for user in users if (run := _run(sound, split, user))}
    cats = dict(list(found.items())[: sound.ledger.room(len(found))])
    if not cats:
        return
    wide = {run.start: run for run in cats.values()}
    taken = {item for run in cats.values() for item in run.nodes}
    olds: dict[Node, int] = {}  # what is read, and where it stands in the new split
    sizes: list[int] = []
    index = 0
    while index < len(split.sizes):
        stop = wide[index].stop if index in wide else index + 1
        olds |= {item: len(sizes) for item in read.get(index, []) if item not in taken}
        olds |= {cat: len(sizes) for cat, run in cats.items() if run.start == index}
        sizes.append(sum(split.sizes[index:stop]))
        index = stop

    def build(new: Builder) -> list[Node]:
        if len(sizes) == 1:
            return [split.source]
        cut = new(torch.split, split.source, sizes, dim=split.dim)
        return [new(operator.getitem, cut, position) for position in olds.values()]

    sound.rewrite(list(olds), build, each=list(cats))


def _run(sound: Soundness, split: Split, node: Node) -> Run | None:
    """The run that is all of a cat, and goes nowhere else."""
    join = read_join(node)
    parts = read_runs(join) if join is not None else []
    if join is None or not is_view(parts, join) or not isinstance(run := parts[0], Run) or not fits(run, join):
        return None
    if join.kind != "cat" or run.parent.node is not split.node:
        return None
    shared = next((reason for item in run.nodes if (reason := sound.only_user(item, node))), None)
    seen = shared or sound.returned(node) or sound.written_after(node)
    if seen is not None:
        sound.refuse(node, seen if shared else f"a view of {split.source.name} in place of a copy, and {seen}")
        return None
    return run
