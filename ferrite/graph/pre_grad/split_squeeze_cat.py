"""Sections of size one, squeezed and put together again, are the input with that axis at its new place.

    x: f32[2, 3, 4]
    torch.cat([t.squeeze(1) for t in x.chunk(3, 1)], 1) + 1  ->  torch.reshape(x, [2, 12]) + 1
    torch.stack([t.squeeze(1) for t in x.split(1, 1)], 0).sum()  ->  torch.movedim(x, 1, 0).sum()

What `split_squeeze_to_unbind` and `drop_unbind_joins` do one after the other.
"""

from __future__ import annotations

from torch.fx import Graph

from ferrite.graph.arguments import find
from ferrite.graph.pieces import read_join
from ferrite.graph.runs import take_all
from ferrite.graph.soundness import Soundness


def split_squeeze_cat(graph: Graph) -> int:
    sound = Soundness(graph)
    for node in find(graph, "cat", "stack"):
        join = read_join(node)
        if join is not None:
            take_all(sound, join, links=(("squeeze",),))
    return sound.rewrites
