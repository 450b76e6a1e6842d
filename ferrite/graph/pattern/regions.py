"""Stretches of a graph between writes and switches of mode, and the streams that calls are sent to: a pattern never
reaches from one into another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import Graph, Node

from ferrite.graph.effects import changes_mode, written_by


class Regions:
    """The number of the region that each node stands in, kept in mind until a node is asked for that is new."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._numbers: dict[Node, int] = {}

    def of(self, node: Node) -> int:
        if node not in self._numbers:
            self._number()
        return self._numbers[node]

    def reach_across(self, nodes: Sequence[Node]) -> bool:
        return _are_several(map(self.of, nodes)) or _are_several(map(stream_of, nodes))

    def forget(self) -> None:
        """Nodes came or went; what is new may write."""
        self._numbers.clear()

    def _number(self) -> None:
        number = 0
        for node in self._graph.nodes:
            self._numbers[node] = number
            if is_barrier(node):
                number += 1
                self._numbers[node] = number
                number += 1


def stream_of(node: Node) -> Any:
    """The stream that whoever captured the graph says a call is sent to; None: that of the caller."""
    return node.meta.get("custom", {}).get("stream")


def is_barrier(node: Node) -> bool:
    """A write, a switch of mode, or streams that meet. Ops that carry a write in a functional wrapping are none."""
    if isinstance(node.target, OpOverload) and node.target.namespace == "streams":
        return True
    if isinstance(node.target, HigherOrderOperator) and "auto_functionalized" in node.target.name():
        return False
    return bool(written_by(node)) or changes_mode(node)


def _are_several(values: Iterable[Any]) -> bool:
    return len(set(values)) > 1
