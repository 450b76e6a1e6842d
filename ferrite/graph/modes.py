"""Under which modes a call of a Torch-level graph runs: Dynamo writes the switches down as calls.

    _set_grad_enabled(False)  ...  _set_grad_enabled(True)
    mode = _enter_autocast(...)  ...  _exit_autocast(mode)

Two calls run alike if the switches before them left the same state; every other switch (a seed, a level of vmap)
makes a state of its own, because nobody here knows how to undo it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.fx import Graph, Node

from ferrite.graph.effects import changes_mode


class Modes:
    """The state that each call runs in."""

    def __init__(self, graph: Graph) -> None:
        self._states: dict[Node, tuple[Any, ...]] = {}
        # Dynamo restores the modes of the call for the backend, so this is what the graph begins with.
        state: tuple[Any, ...] = (("grad", torch.is_grad_enabled()),)
        for node in graph.nodes:
            self._states[node] = state
            if changes_mode(node):
                state = _after(node, state)

    def of(self, node: Node) -> tuple[Any, ...]:
        """The state of a node; one that was inserted since has that of the node that it was put before."""
        while node not in self._states:
            node = node.next
        return self._states[node]

    @contextmanager
    def entered(self, node: Node) -> Iterator[None]:
        """Autocast as it is at a node. Grad mode changes no fake value."""
        with ExitStack() as stack:
            for entry in self.of(node):
                if entry[0] == "autocast":
                    stack.enter_context(torch.autocast(*entry[2]))
            yield


def _after(node: Node, state: tuple[Any, ...]) -> tuple[Any, ...]:
    name = getattr(node.target, "__name__", "")
    if name == "_set_grad_enabled":
        rest = tuple(entry for entry in state if entry[0] != "grad")
        return (("grad", *node.args), *rest)
    if name == "_enter_autocast":
        return (*state, ("autocast", node, node.args))
    if name == "_exit_autocast":
        kept = tuple(entry for entry in state if entry[0] != "autocast" or entry[1] is not node.args[0])
        return kept if len(kept) < len(state) else (*state, ("other", node))
    return (*state, ("other", node))
