"""A cat that mixes what several splits made along its dimension reads slices of their inputs.

    x: f32[100, 2], y: f32[3, 2]
    torch.cat([y] + list(torch.split(x, 50, 0)), 0)  ->  torch.cat([y, x], dim=0)

A run breaks at every change of parent, of order, and at a repetition; all operands keep their order. A run is taken if
it is all of its parent, or has at least `least` items.
"""

from __future__ import annotations

from torch.fx import Graph, Node

from ferrite.graph.arguments import find
from ferrite.graph.pieces import Split, read_join
from ferrite.graph.runs import take_runs
from ferrite.graph.soundness import Soundness


def split_cat_to_slices(graph: Graph, *, least: int = 10) -> int:
    sound = Soundness(graph)
    for node in find(graph, "cat"):
        _slice(sound, node, least)
    return sound.rewrites


def _slice(sound: Soundness, node: Node, least: int) -> None:
    join = read_join(node)
    if join is not None:
        take_runs(sound, join, lambda run: isinstance(run.parent, Split) and run.parent.dim == join.dim, least)
