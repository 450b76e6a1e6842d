"""Chunks that are reshaped alike and put together by a cat are one reshape of what was chunked.

    x: f32[2, 4, 6]
    torch.cat([c.reshape(8, 3) for c in x.chunk(2, 2)], 0)
    ->  torch.reshape(torch.movedim(torch.unflatten(x, 2, (2, 3)), 2, 0), [16, 3])

All chunks, in order, and of one size.
"""

from __future__ import annotations

from torch.fx import Graph

from ferrite.graph.arguments import find
from ferrite.graph.pieces import read_join
from ferrite.graph.runs import RESHAPES, take_all
from ferrite.graph.soundness import Soundness


def chunk_reshape_cat(graph: Graph) -> int:
    sound = Soundness(graph)
    for node in find(graph, "cat"):
        join = read_join(node)
        if join is not None:
            take_all(sound, join, links=(RESHAPES,))
    return sound.rewrites
