"""Which nodes of a graph are close together and do not wait for each other: what may become one op.

Two nodes are close if some node reads both, at most `depth` steps further up; the way up ends at the first of the given
nodes that it meets. Sets of nodes are numbers, one bit for each, so that a graph of thousands of nodes is walked once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch.fx import Graph, Node

from ferrite.graph.arguments import kind

Set = int  # bit i stands for nodes[i]
_FUTILE = 20  # sets that turned out too small before a search is given up


class Groups:
    """Facts about some nodes of a graph, in graph order. `join` keeps them right when several become one:
    `joined` are those that did."""

    def __init__(self, graph: Graph, nodes: Sequence[Node], depth: int) -> None:
        self.nodes = tuple(nodes)
        self._bits = {node: 1 << index for index, node in enumerate(self.nodes)}
        self._near = self._read_near(graph, depth)
        self._roots = [node for node in graph.nodes if kind(node) != "getitem"]
        self._fresh: list[Set] = []
        self._above = self._read_above(graph)
        self.joined: Set = 0

    def of(self, members: Sequence[Node]) -> Set:
        return sum(self._bits[node] for node in members)

    def close(self) -> Iterator[Set]:
        """What each node of the graph reads close by, without those joined so far: from the last node to the first, and
        what a new node reads right after it was made. Parts of one value read less than what they are parts of."""
        for root in reversed(self._roots):
            yield self._near[root] & ~self.joined
            while self._fresh:
                yield self._fresh.pop() & ~self.joined

    def independent(
        self, among: Set, least: int, most: int, fits: Callable[[list[Node], Node], bool] = lambda chosen, node: True
    ) -> Iterator[list[Node]]:
        """Sets of `least` to `most` nodes in graph order, none of which needs another, even through others.

        `fits` may keep a node out of a set. A set may be joined before the next one is asked for.
        """
        left = [index for index in range(len(self.nodes)) if among >> index & 1]
        futile = 0
        while len(left) >= least and futile < _FUTILE:
            chosen, left = self._choose(left, most, fits)
            if len(chosen) >= least:
                yield [self.nodes[index] for index in chosen]
            else:
                futile += 1

    def join(self, members: Sequence[Node]) -> None:
        """These are one node now: what waits for one of them waits for all, and for all that they wait for."""
        joined = above = self.of(members)
        near = 0
        for node in members:
            above |= self._above[node]
            near |= self._near[node]
        for node, needed in self._above.items():
            if needed & joined:
                self._above[node] |= above
        self.joined |= joined
        self._fresh.append(near)

    def _choose(
        self, left: list[int], most: int, fits: Callable[[list[Node], Node], bool]
    ) -> tuple[list[int], list[int]]:
        chosen: list[int] = []
        rest: list[int] = []
        members: list[Node] = []
        taken = above = 0
        for index in left:
            node = self.nodes[index]
            # After a join an earlier node may wait for a later one.
            waits = self._above[node] & taken or above >> index & 1
            if len(chosen) == most or waits or not fits(members, node):
                rest.append(index)
                continue
            chosen.append(index)
            members.append(node)
            taken |= 1 << index
            above |= self._above[node]
        return chosen, rest

    def _read_near(self, graph: Graph, depth: int) -> dict[Node, Set]:
        nodes = list(graph.nodes)
        near = dict.fromkeys(nodes, 0)
        for _ in range(depth):
            deeper = {}
            for node in nodes:
                found = 0
                for source in node.all_input_nodes:
                    found |= self._bits.get(source) or near[source]
                deeper[node] = found
            near = deeper
        return near

    def _read_above(self, graph: Graph) -> dict[Node, Set]:
        above: dict[Node, Set] = {}
        for node in graph.nodes:
            found = 0
            for source in node.all_input_nodes:
                found |= above[source] | self._bits.get(source, 0)
            above[node] = found
        return {node: above[node] for node in self.nodes}
