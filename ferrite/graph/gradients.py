"""Where gradients flow in a Torch-level graph: from which inputs, and whether an output asks for them.

Ops that become one have one gradient: a result that needed none would need one, and a parameter that got none would
get zeros. `Gradients.of` tells such nodes apart. It follows the graph, not what fake values say of themselves: passes
make those without gradients.

`Gradients.shows_layout` tells where an input may get a gradient that lies as the one of a node does: an op that lays
its gradient out anew may not go there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves

from ferrite.graph.aliases import Aliases
from ferrite.graph.arguments import kind
from ferrite.graph.effects import written_by
from ferrite.graph.modes import Modes
from ferrite.graph.pieces import SPLITS
from ferrite.graph.values import value_of


class Gradients:
    """Facts about one graph, gathered once."""

    def __init__(self, graph: Graph, modes: Modes, aliases: Aliases) -> None:
        self._modes = modes
        self._aliases = aliases
        self._needed = self._follow(graph, lambda node: getattr(value_of(node), "requires_grad", False))
        self._possible = self._follow(graph, _is_float)
        self._asked = self._follow_back(graph)
        self._nodes = set(graph.nodes)
        self._shown = self._follow(graph, _shows_layout, lambda node: kind(node) not in _GRADIENT_IS_LAID_OUT)

    def of(self, node: Node) -> tuple[bool, bool, bool]:
        """Whether it needs a gradient; whether it would if all inputs did; whether a gradient comes back to it."""
        return node in self._needed, node in self._possible, node in self._asked

    def shows_layout(self, node: Node) -> bool:
        """Whether an input that needs a gradient may get it in the layout of that of this node."""
        if node in self._nodes:
            return node in self._shown
        return any(map(self.shows_layout, node.all_input_nodes))  # made since

    def _follow(
        self, graph: Graph, starts: Callable[[Node], bool], through: Callable[[Node], bool] = lambda node: True
    ) -> set[Node]:
        found: set[Node] = set()
        for node in graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                if starts(node):
                    found.add(node)
            elif self._passes(node) and through(node) and not found.isdisjoint(node.all_input_nodes):
                found.update((node, *written_by(node)))
        return found

    def _follow_back(self, graph: Graph) -> set[Node]:
        found: set[Node] = set()
        memory = self._aliases.of_all(graph.find_nodes(op="placeholder"))  # and that of all that is found
        for node in reversed(graph.nodes):
            written = not memory.isdisjoint(self._aliases.of_all(written_by(node)))
            if node.op == "output" or written or (node in found and self._passes(node)):
                found.update(node.all_input_nodes)
                memory |= self._aliases.of_all(node.all_input_nodes)
        return found

    def _passes(self, node: Node) -> bool:
        disabled = any(entry[:2] == ("grad", False) for entry in self._modes.of(node))
        return (not disabled or kind(node) in _MAYBE_NOTHING) and kind(node) != "detach" and _is_float(node)


# They give their very argument where there is nothing to do, with its gradient, whatever the mode.
_MAYBE_NOTHING = frozenset({"contiguous", "to", "float", "double", "half", "bfloat16", "type", "type_as"})

# Whatever gradient they are given, that of what they read is laid out anew.
_GRADIENT_IS_LAID_OUT = frozenset({
    "linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "layer_norm", "softmax", "log_softmax",
    *SPLITS, "unbind", "narrow",
})  # fmt: skip


def lays_gradient_out(node: Node) -> bool:
    """Whether a view has a backward that copies: the gradient of what it reads lies as that copy does."""
    return kind(node) in (*SPLITS, "unbind", "narrow")


def _shows_layout(node: Node) -> bool:
    """An input that needs a gradient, which may lie in more than one way."""
    value = value_of(node)
    return isinstance(value, torch.Tensor) and value.requires_grad and value.dim() > 1


def _is_float(node: Node) -> bool:
    """What is not known may be."""
    value = value_of(node)
    leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return value is None or any(leaf.is_floating_point() or leaf.is_complex() for leaf in leaves)
