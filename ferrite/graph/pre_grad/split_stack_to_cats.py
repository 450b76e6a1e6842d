"""A stack that mixes what several splits made is a cat of views of their inputs.

    x: f32[4, 8, 5], y: f32[2, 8, 5]
    torch.stack([*torch.split(x, 2, 0), y], 2)
    ->  a = x.unflatten(0, (2, 2)).movedim(0, 2); torch.cat([a, y.unsqueeze(dim=2)], dim=2)

A run breaks at every change of parent, of order, and at a repetition; all operands keep their order. A run is taken if
it is all of its parent, or has at least `least` items.
"""

from __future__ import annotations

from torch.fx import Graph

from ferrite.graph.arguments import find
from ferrite.graph.pieces import Split, read_join
from ferrite.graph.runs import take_runs
from ferrite.graph.soundness import Soundness


def split_stack_to_cats(graph: Graph, *, least: int = 10) -> int:
    sound = Soundness(graph)
    for node in find(graph, "stack"):
        join = read_join(node)
        if join is not None:
            take_runs(sound, join, lambda run: isinstance(run.parent, Split), least)
    return sound.rewrites
