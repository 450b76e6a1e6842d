"""NumPy's names for keywords become torch's, so that whoever reads a call finds one name.

    x: f32[2, 3]
    torch.sum(x, axis=1, keepdims=True)  ->  torch.sum(x, dim=1, keepdim=True)

Torch understands both in its own functions and methods. A call that gives one parameter under both names is an error,
and stays one. This is the first pass: `bind` knows the other names, but not everybody asks `bind`.
"""

from __future__ import annotations

from torch._ops import OpOverload
from torch.fx import Graph, Node

from ferrite.graph.arguments import NUMPY_NAMES, bind, signature
from ferrite.graph.soundness import Soundness


def normalise_keywords(graph: Graph) -> int:
    sound = Soundness(graph)
    for node in graph.nodes:
        if node.kwargs and node.op in ("call_function", "call_method") and not isinstance(node.target, OpOverload):
            renamed = _renamed(node)
            if renamed is not None and bind(node) is not None:
                sound.respell(node, node.target, node.args, renamed)
    return sound.rewrites


def _renamed(node: Node) -> dict[str, object] | None:
    """The keywords under torch's names, or None if they have them already."""
    if NUMPY_NAMES.keys().isdisjoint(node.kwargs):
        return None
    names = {name for parameter in signature(node) or () for name in parameter.names}
    torch_names = {
        given: NUMPY_NAMES[given]
        if given in NUMPY_NAMES and given not in names and NUMPY_NAMES[given] in names
        else given
        for given in node.kwargs
    }
    if len(set(torch_names.values())) < len(torch_names) or all(a == b for a, b in torch_names.items()):
        return None
    return {torch_names[given]: value for given, value in node.kwargs.items()}
