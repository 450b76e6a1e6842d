"""A cat of sections, side by side as they were, is a slice of what was split; of all sections, it is all of it.

    x: f32[80, 2]
    s = x.split(20); (torch.cat([s[2], s[3]]) + 1, s[2] + 1)
    ->  s = x.split(20); (torch.narrow(x, 0, 40, 40) + 1, s[2] + 1)

The sections may have other readers. The slice is a view where the cat was a copy: it may be neither written nor
returned.
"""

from __future__ import annotations

from torch.fx import Graph, Node

from ferrite.graph.arguments import find
from ferrite.graph.pieces import Split, read_join
from ferrite.graph.runs import fits, is_view, read_runs, rejoin, runs_in
from ferrite.graph.soundness import Soundness


def cat_of_items_to_slice(graph: Graph) -> int:
    sound = Soundness(graph)
    for node in find(graph, "cat"):
        _slice(sound, node)
    return sound.rewrites


def _slice(sound: Soundness, node: Node) -> None:
    join = read_join(node)
    if join is None:
        return
    parts = read_runs(join)
    runs = [run for run in runs_in(parts) if isinstance(run.parent, Split) and run.parent.dim == join.dim]
    if len(parts) > 1 and len(parts) == len(runs):
        sound.refuse(node, f"{parts[0]} and {parts[1]} are no neighbours")
    elif is_view(parts, join) and runs and fits(runs[0], join):
        sound.rewrite(node, lambda new: rejoin(new, join, parts))
