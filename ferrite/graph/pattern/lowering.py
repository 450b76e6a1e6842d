"""A pattern that becomes loops by a function of its own: its calls move into a graph, and one call of it stands there.

    mm = aten.mm.default(a, b)                     body = mm, then relu
    aten.relu.default(mm)                ->        invoke_subgraph(body, 'mm_relu', a, b)[0]

The call is marked with the function. Who asks what the call gives, or runs it in eager, runs the body and has not heard
of the mark; the lowering calls the function with the operands as it sees them, and it gives loops, or raises
`Unsupported`: then the body runs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ferrite.errors import Unsupported, UserFault
from ferrite.graph.pattern.seen import memory_of
from ferrite.graph.query import output_node
from ferrite.graph.values import value_of

_MARK = "lowering"


@dataclass(frozen=True)
class Lowering:
    """`handler` takes what the holes of a pattern hold, by name: tensors of the lowering, and plain `numbers`. `names`
    are those of the last operands of the call; in front of them stand sizes that vary."""

    handler: Callable[..., Any]
    names: tuple[str, ...]
    numbers: Mapping[str, Any]

    def __call__(self, body: Any, name: str, *operands: Any) -> Any:
        given = operands[len(operands) - len(self.names) :]
        try:
            return self.handler(**dict(zip(self.names, given, strict=True)), **self.numbers)
        except Unsupported:
            raise
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            raise UserFault(f"the lowering of the pattern {name} that you registered failed: {text}") from error


def lowering_of(node: Node) -> Lowering | None:
    """The function that makes loops of a call, if it is marked with one."""
    found = node.meta.get(_MARK)
    return found if isinstance(found, Lowering) else None


def as_call(body: GraphModule, name: str, lowering: Lowering) -> GraphModule | None:
    """A graph with the inputs of `body` that does nothing but call it; None if a result of the body is an input, or a
    view of one, which a call cannot give."""
    results = list(output_node(body.graph).args[0])
    inputs = body.graph.find_nodes(op="placeholder")
    if not all(isinstance(result, Node) for result in results) or memory_of(list(map(value_of, inputs))) & memory_of(
        list(map(value_of, results))
    ):
        return None
    graph = Graph()
    operands = [graph.placeholder(node.name) for node in inputs]
    for operand, node in zip(operands, inputs, strict=True):
        operand.meta = dict(node.meta)
    call = graph.call_function(torch.ops.higher_order.invoke_subgraph, (graph.get_attr("body"), name, *operands))
    call.meta = {"val": tuple(map(value_of, results)), _MARK: lowering}
    ends = [graph.call_function(operator.getitem, (call, index)) for index in range(len(results))]
    for end, value in zip(ends, call.meta["val"], strict=True):
        end.meta = {"val": value}
    graph.output(ends)
    return GraphModule({"body": body}, graph)
