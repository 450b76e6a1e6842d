"""Which nodes of a Torch-level graph may share memory.

A fake tensor has a storage as a real one has, and views of it share that storage: two nodes share memory if their
fake values do. A node without a fake value may share with everything it reads; one that reads a constant, whose value
is real, with that; and an op that gives its input back in eager and a copy when it is traced with its input (dropout
outside training).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves

from ferrite.graph.arguments import kind, nodes_in
from ferrite.graph.values import value_of


class Aliases:
    """Memory of nodes as roots of a union-find: equal roots, maybe shared memory."""

    def __init__(self, graph: Graph) -> None:
        self._above: dict[Any, Any] = {}
        self._kept: list[Any] = []  # a storage that dies would hand its address to another one
        self._known: dict[Node, tuple[Any, list[Any]]] = {}
        for node in graph.nodes:
            if node.op.startswith("call") and node.users:
                self.join(self.shared_by(node))

    def of(self, node: Node) -> set[Any]:
        """The memory that a node's value stands in; empty for values that are no tensors."""
        found = {self.root(key) for key in self._keys(node)}
        if node in self._above:
            found.add(self.root(node))
        return found

    def of_all(self, nodes: Any) -> set[Any]:
        return {root for node in nodes for root in self.of(node)}

    def shares(self, one: Node, other: Node) -> bool:
        return not self.of(one).isdisjoint(self.of(other))

    def join(self, roots: set[Any]) -> None:
        """From now on, these may be one."""
        if len(roots) > 1:
            first, *rest = roots
            for root in rest:
                self._above[self.root(root)] = self.root(first)

    def shared_by(self, node: Node) -> set[Any]:
        """Memory that a call may share although its fake value does not say so."""
        known = "example_value" in node.meta or "val" in node.meta
        if not known or node in self._keys(node):
            self._above.setdefault(node, node)
            return self.of(node) | self.of_all(nodes_in((node.args, node.kwargs)))
        constants = [source for source in node.all_input_nodes if source.op == "get_attr" and not source.meta]
        if constants:
            return self.of(node) | self.of_all(constants)
        if "dropout" in (kind(node) or "").lower():
            return self.of(node) | self.of_all(nodes_in(node.args[:1] or node.kwargs.get("input")))
        return set()

    def _keys(self, node: Node) -> list[Any]:
        """The storages of a node's value, each once; found again only if the node was given another value."""
        value = value_of(node)
        known = self._known.get(node)
        if known is not None and known[0] is value:
            return known[1]
        keys: dict[Any, None] = {}
        for leaf in (value,) if isinstance(value, torch.Tensor) else tree_leaves(value):
            if not isinstance(leaf, torch.Tensor):
                continue
            try:
                storage = leaf.untyped_storage()
            except (NotImplementedError, RuntimeError):  # sparse, opaque and wrapped tensors have none
                keys[node] = None
                self._above.setdefault(node, node)
                continue
            key = storage._cdata
            if key not in self._above:
                self._above[key] = key
                self._kept.append(storage)
            keys[key] = None
        self._known[node] = value, list(keys)
        return self._known[node][1]

    def root(self, key: Any) -> Any:
        while (above := self._above.get(key, key)) != key:
            farther = self._above[key] = self._above.get(above, above)
            key = farther
        return key
