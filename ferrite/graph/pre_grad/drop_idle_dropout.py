"""Dropout outside training, or of nothing, is nothing at all.

    x: f32[4]
    F.dropout(x, 0.3, training=False) + 1  ->  x + 1
    F.dropout(x, 0.0) + 1  ->  x + 1

Eager gives x itself, the same tensor. Traced, the op becomes a copy: one pass over memory, and an output that no longer
is the input.
"""

from __future__ import annotations

from torch.fx import Graph, Node

from ferrite.graph.arguments import bind, find
from ferrite.graph.soundness import Soundness


def drop_idle_dropout(graph: Graph) -> int:
    sound = Soundness(graph)
    for node in find(graph, "dropout", "alpha_dropout", "feature_alpha_dropout"):
        call = bind(node)
        if call is None or not isinstance(call["input"], Node) or call.get("inplace", False) is not False:
            continue
        if call["training"] is False or call["p"] == 0:
            sound.rewrite(node, call["input"], same_tensor=True)
    return sound.rewrites
