"""`nn.Identity` is its input.

    x: f32[4], skip: nn.Identity()
    torch.relu(skip(x))  ->  torch.relu(x)

It gives back the very tensor it was given, so this holds in training too. Dynamo looks into the modules of torch.nn, so
calls of this one stand only in graphs that were traced in another way or built by hand.
"""

from __future__ import annotations

from torch import nn
from torch.fx import Graph, Node

from ferrite.graph.arguments import bind, find
from ferrite.graph.layers import is_plain, module_of
from ferrite.graph.soundness import Soundness


def remove_identity(graph: Graph) -> int:
    sound = Soundness(graph)
    for node in find(graph, "nn.Identity"):
        module, call = module_of(node), bind(node)
        if type(module) is not nn.Identity or call is None or not isinstance(call["input"], Node):
            continue
        objection = None if is_plain(module) else f"{node.target} has hooks, or a forward of its own"
        sound.rewrite(node, call["input"], same_tensor=True, objection=objection)
    return sound.rewrites
