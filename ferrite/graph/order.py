"""Puts a graph in order again with as few moves as possible.

A node that stands before something it reads moves right behind the last of it; every other node keeps its place
relative to its neighbours, so that an ordered graph does not change at all. Linear in nodes and edges.
"""

from __future__ import annotations

from torch.fx import Graph, Node

from ferrite.errors import Malformed


def sort_nodes(graph: Graph) -> int:
    """Order the graph; gives how many nodes moved. A cycle is an error."""
    placed: set[Node] = set()
    waiting: dict[Node, list[Node]] = {}  # for a node that is not placed yet, those that wait for it
    missing: dict[Node, int] = {}  # how many a node still waits for
    order: list[Node] = []
    moved = 0
    for first in list(graph.nodes):
        later = [source for source in first.all_input_nodes if source not in placed]
        if later:
            moved += 1
            missing[first] = len(later)
            for source in later:
                waiting.setdefault(source, []).append(first)
            continue
        ready = [first]
        while ready:
            node = ready.pop()
            placed.add(node)
            order.append(node)
            for reader in reversed(waiting.pop(node, ())):
                missing[reader] -= 1
                if not missing[reader]:
                    ready.append(reader)
    if waiting:
        nodes = set(graph.nodes)
        for source, readers in waiting.items():
            if source not in nodes:
                raise Malformed(
                    f"{readers[0].name} reads {source.name}, which is not in the graph", where="graph.order"
                )
        stuck = ", ".join(node.name for node in graph.nodes if node not in placed and node.op != "output")
        raise Malformed(f"these nodes wait for each other: {stuck}", where="graph.order")
    if moved:
        anchor = order[0]
        if graph._root.next is not anchor:
            graph._root.append(anchor)
        for node in order[1:]:
            if anchor.next is not node:
                anchor.append(node)
            anchor = node
    return moved
