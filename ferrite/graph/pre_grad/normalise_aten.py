"""One form for the calls of a graph of ATen overloads.

    x: f32[2, 10]
    aten.split.Tensor(x, 4, -1)  ->  aten.split_with_sizes.default(x, [4, 4, 2], 1)
    aten.cat.default(tensors=[x, x], dim=-1)  ->  aten.cat.default([x, x], 1)

The sizes of a split are measured from what it gives.
"""

from __future__ import annotations

from torch._ops import OpOverload
from torch.fx import Graph

from ferrite.graph.aten_forms import form_of
from ferrite.graph.soundness import Soundness


def normalise_aten(graph: Graph) -> int:
    sound = Soundness(graph)
    for node in list(graph.nodes):
        if isinstance(node.target, OpOverload) and node.target.namespace == "aten":
            form = form_of(node, node.target, node.args, node.kwargs)
            if form != (node.target, node.args, node.kwargs):
                sound.respell(node, *form)
    return sound.rewrites
