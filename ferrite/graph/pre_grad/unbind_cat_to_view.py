"""A cat that mixes what several unbinds made reads views of their inputs.

    x: f32[3, 4, 5]
    torch.cat(torch.unbind(x, 0), 1)  ->  x.movedim(0, 1).flatten(1, 2)

A run breaks at every change of parent, of order, and at a repetition; all operands keep their order. A run is taken if
it is all of its parent, or has at least `least` items.
"""

from __future__ import annotations

from torch.fx import Graph

from ferrite.graph.arguments import find
from ferrite.graph.pieces import Unbind, read_join
from ferrite.graph.runs import take_runs
from ferrite.graph.soundness import Soundness


def unbind_cat_to_view(graph: Graph, *, least: int = 10) -> int:
    sound = Soundness(graph)
    for node in find(graph, "cat"):
        join = read_join(node)
        if join is not None:
            take_runs(sound, join, lambda run: isinstance(run.parent, Unbind), least)
    return sound.rewrites
