"""Stretches of a graph between writes and switches of mode: a pattern never reaches from one into another."""

from __future__ import annotations

from collections.abc import Iterable

from torch._ops import HigherOrderOperator
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

    def reach_across(self, nodes: Iterable[Node]) -> bool:
        return len({self.of(node) for node in nodes}) > 1

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


def is_barrier(node: Node) -> bool:
    """A write, or a switch of mode. Ops that carry a write in a functional wrapping are none."""
    if isinstance(node.target, HigherOrderOperator) and "auto_functionalized" in node.target.name():
        return False
    return bool(written_by(node)) or changes_mode(node)
