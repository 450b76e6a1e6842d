"""All that an unbind took apart, put together again in order, is the input with that axis at its new place.

    x: f32[2, 3, 4], y: f32[2, 4]
    torch.stack(torch.unbind(x, 1), 0).sum()  ->  torch.movedim(x, 1, 0).sum()
    torch.cat([y, *torch.unbind(x, 1)], 1)  ->  torch.cat([y, torch.flatten(x, 1, 2)], dim=1)
    torch.stack([y, *torch.unbind(x, 1)], 2)
    ->  torch.cat([torch.unsqueeze(y, dim=2), torch.movedim(x, 1, 2)], dim=2)

Other operands stay where they are. An unbind cannot be narrowed, so a part of it does not match.
"""

from __future__ import annotations

from torch.fx import Graph, Node

from ferrite.graph.arguments import find
from ferrite.graph.pieces import Unbind, read_join
from ferrite.graph.runs import choose, fits, read_runs, rejoin, runs_in
from ferrite.graph.soundness import Soundness


def drop_unbind_joins(graph: Graph) -> int:
    sound = Soundness(graph)
    for node in find(graph, "cat", "stack"):
        _drop(sound, node)
    return sound.rewrites


def _drop(sound: Soundness, node: Node) -> None:
    join = read_join(node)
    if join is None:
        return
    found = choose(read_runs(join), lambda run: isinstance(run.parent, Unbind))
    parts = choose(found, lambda run: run.is_whole and fits(run, join))
    if runs_in(parts):
        sound.rewrite(node, lambda new: rejoin(new, join, parts))
    elif runs_in(found):
        sound.refuse(node, f"{runs_in(found)[0]} are not all in order")
