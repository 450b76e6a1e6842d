"""A stack that mixes what several unbinds made is a cat of slices of their inputs.

    x: f32[3, 4, 5], y: f32[4, 5]
    torch.stack([y] + list(torch.unbind(x, 0)), 1)
    ->  torch.cat([y.unsqueeze(dim=1), x.movedim(0, 1)], dim=1)

A run breaks at every change of parent, of order, and at a repetition; all operands keep their order. A run is taken if
it is all of its parent, or has at least `least` items.
"""

from __future__ import annotations

from torch.fx import Graph

from ferrite.graph.arguments import find
from ferrite.graph.pieces import Unbind, read_join
from ferrite.graph.runs import take_runs
from ferrite.graph.soundness import Soundness


def unbind_stack_to_slices(graph: Graph, *, least: int = 10) -> int:
    sound = Soundness(graph)
    for node in find(graph, "stack"):
        join = read_join(node)
        if join is not None:
            take_runs(sound, join, lambda run: isinstance(run.parent, Unbind), least)
    return sound.rewrites
