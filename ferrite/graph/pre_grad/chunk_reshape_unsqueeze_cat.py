"""Chunks that are reshaped alike, given a new dimension and put together by a cat are one reshape of what was chunked.

    x: f32[4, 6]
    torch.cat([c.reshape(12).unsqueeze(0) for c in x.chunk(2, 1)], 0)
    ->  torch.reshape(torch.movedim(torch.unflatten(x, 1, (2, 3)), 1, 0), [2, 12])

All chunks, in order, and of one size.
"""

from __future__ import annotations

from torch.fx import Graph

from ferrite.graph.arguments import find
from ferrite.graph.pieces import read_join
from ferrite.graph.runs import RESHAPES, take_all
from ferrite.graph.soundness import Soundness


def chunk_reshape_unsqueeze_cat(graph: Graph) -> int:
    sound = Soundness(graph)
    for node in find(graph, "cat"):
        join = read_join(node)
        if join is not None:
            take_all(sound, join, links=(("unsqueeze",), RESHAPES))
    return sound.rewrites
