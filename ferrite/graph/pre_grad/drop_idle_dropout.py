"""Dropout outside training, or of nothing, is nothing at all.

    dropout(x, p, training=False)  ->  x        dropout(x, 0.0)  ->  x

Eager gives x itself, the same tensor. Traced, the op becomes a copy: one pass over memory, and an output that no longer
is the input.
"""

from __future__ import annotations

from torch.fx import Graph, Node
from torch.nn import functional

from ferrite.graph.query import calls

_DROPOUTS = (functional.dropout, functional.alpha_dropout, functional.feature_alpha_dropout)


def drop_idle_dropout(graph: Graph) -> int:
    dropped = 0
    for node in calls(graph, *_DROPOUTS):
        source, training = _argument(node, 0, "input", None), _argument(node, 2, "training", _DEFAULTS[node.target])
        idle = training is False or _argument(node, 1, "p", 0.5) == 0
        if not idle or not isinstance(source, Node):
            continue
        node.replace_all_uses_with(source)
        graph.erase_node(node)
        dropped += 1
    return dropped


# What `training` is when it is not given: only plain dropout is on by default.
_DEFAULTS = {functional.dropout: True, functional.alpha_dropout: False, functional.feature_alpha_dropout: False}


def _argument(node: Node, position: int, name: str, default: object) -> object:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)
