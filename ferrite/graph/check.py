"""What a graph satisfies between any two passes.

order    a node stands after everything it reads
output   exactly one output node, and it is last
names    no two nodes share a name
kinds    after autograd: placeholder, get_attr, call_function and output only
targets  every get_attr resolves
values   before lowering: every call of an aten op that is read carries its fake value in `meta["val"]`
"""

from __future__ import annotations

from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from ferrite.errors import Malformed
from ferrite.graph.query import attribute

_AFTER_AUTOGRAD = ("placeholder", "get_attr", "call_function", "output")


def check_graph(module: GraphModule, where: str, *, after_autograd: bool, values: bool = False) -> None:
    """Raise `Malformed` naming `where` if the graph breaks one of the rules above.

    Between passes values may be missing: a pass need not think of them, they are propagated after the stage.
    """
    seen: set[Node] = set()
    names: set[str] = set()
    node: Node | None = None
    ended = False
    for node in module.graph.nodes:
        if ended:
            raise _malformed("a node stands after the output", where, node)
        for source in node.all_input_nodes:
            if source not in seen:
                raise _malformed(f"{node.name} reads {source.name}, which is not defined before it", where, node)
        if node.name in names:
            raise _malformed(f"two nodes are called {node.name}", where, node)
        if after_autograd and node.op not in _AFTER_AUTOGRAD:
            raise _malformed(f"a {node.op} node is left after autograd", where, node)
        if node.op == "get_attr":
            attribute(module, str(node.target))
        if values and _is_aten(node) and node.users and "val" not in node.meta:
            raise _malformed(f"{node.name} has no fake value", where, node)
        names.add(node.name)
        seen.add(node)
        ended = node.op == "output"
    if not ended:
        raise Malformed("the graph has no output", where=where)


def _is_aten(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target.namespace == "aten"


def _malformed(title: str, where: str, node: Node) -> Malformed:
    return Malformed(title, where=where, program=f"    {node.format_node()}")
