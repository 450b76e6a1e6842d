"""Sections that are reshaped alike and stacked are one reshape of what was split.

    x: f32[6, 4]
    torch.stack([s.reshape(-1, 3) for s in x.split(1, 1)], 0).sum()
    ->  torch.movedim(x, 1, 0).reshape([4, 2, 3]).sum()

A part of the sections is a slice. Other operands of the stack stay in place, and a cat joins the parts:

    x: f32[4, 6], y: f32[2, 3]
    torch.stack([*(s.reshape(2, 3) for s in x.split(1, 0)), y], 1)
    ->  a = torch.movedim(x.reshape([4, 2, 3]), 0, 1); torch.cat([a, y.unsqueeze(dim=1)], dim=1)
"""

from __future__ import annotations

from torch.fx import Graph

from ferrite.graph.arguments import find
from ferrite.graph.pieces import Split, read_join
from ferrite.graph.runs import RESHAPES, take_runs
from ferrite.graph.soundness import Soundness


def move_reshape_out_of_split_stack(graph: Graph, *, least: int = 10) -> int:
    sound = Soundness(graph)
    for node in find(graph, "stack"):
        join = read_join(node)
        if join is not None:
            take_runs(sound, join, lambda run: isinstance(run.parent, Split), least, links=(RESHAPES,))
    return sound.rewrites
