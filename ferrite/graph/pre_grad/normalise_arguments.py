"""Every call says all it means: tensors by position, options by name, defaults filled in.

    x: f32[2, 3], y: f32[2, 3]
    torch.add(x, y)  ->  torch.add(x, y, alpha=1)
    torch.nn.functional.gelu(x)  ->  torch.nn.functional.gelu(x, approximate="none")

A parameter that has several names (the sections of a split) and a list of sizes stay by position; one whose default is
None is not filled in. Calls that nobody knows the parameters of stay as they are. (`normalise_ops` chooses one op where
there are several.)
"""

from __future__ import annotations

from typing import Any

from torch._ops import OpOverload
from torch.fx import Graph, Node

from ferrite.graph.arguments import Call, Parameter, bind, nodes_in, signature
from ferrite.graph.effects import kind_of_module
from ferrite.graph.soundness import Soundness


def normalise_arguments(graph: Graph) -> int:
    sound = Soundness(graph)
    for node in list(graph.nodes):
        call = bind(node) if _takes_names(node) else None
        parameters = signature(node) if call is not None else None
        if call is None or parameters is None:
            continue
        args, kwargs = _spell(call, parameters)
        if (args, kwargs) != (node.args, node.kwargs):
            sound.respell(node, node.target, args, kwargs)
    return sound.rewrites


def _takes_names(node: Node) -> bool:
    """Python's operators and `getattr` take no names; overloads of aten have their own form."""
    if node.op == "call_function":
        return not isinstance(node.target, OpOverload) and kind_of_module(node.target) == "torch"
    return node.op == "call_method"


def _spell(call: Call, parameters: tuple[Parameter, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    wanted = [entry for entry in parameters if entry.names[0] in call.given or entry.default is not None]
    by_position = 0
    for count, entry in enumerate(wanted, start=1):
        several = len(entry.names) > 1 or entry.takes_rest or any(nodes_in(call[entry.names[0]]))
        if entry.by_position and (several or count == 1) and wanted[:count] == list(parameters[:count]):
            by_position = count
    args = tuple(call[entry.names[0]] for entry in wanted[:by_position])
    return args, {entry.names[0]: call[entry.names[0]] for entry in wanted[by_position:]}
