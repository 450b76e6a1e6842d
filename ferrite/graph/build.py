"""Makes new nodes in a Torch-level graph, each with its fake value, or none at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import cached_property
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ferrite.graph.modes import Modes
from ferrite.graph.values import fake_mode_of, value_of

_KEPT = ("stack_trace", "nn_module_stack")


Build = Callable[["Builder"], "Node | Sequence[Node]"]


class CannotBuild(Exception):
    """A node that cannot be made, and why. Whoever tries a rewrite catches it."""


class Evaluator:
    """Fake execution of single calls, under the modes that they run in."""

    def __init__(self, graph: Graph, modes: Modes) -> None:
        self._graph = graph
        self._modes = modes

    @cached_property
    def _fake_mode(self) -> FakeTensorMode:
        return fake_mode_of(self._graph)

    def value(self, node: Node, overlay: dict[Node, Any] | None = None) -> Any:
        """What a call gives; `overlay` holds values that stand for those of other nodes.

        Raises `CannotBuild` if it fails, or if the answer would hold only under a new guard.
        """
        args, kwargs = map_arg((node.args, node.kwargs), lambda source: self._value(source, overlay or {}))
        shape_env = self._fake_mode.shape_env
        no_guards = shape_env.error_on_new_guards() if shape_env is not None else nullcontext()
        try:
            with torch.no_grad(), self._fake_mode, no_guards, self._modes.entered(node):
                if node.op == "call_method":
                    first, *rest = args
                    return getattr(first, str(node.target))(*rest, **kwargs)
                return node.target(*args, **kwargs)
        except Exception as error:
            lines = str(error).strip().splitlines()
            raise CannotBuild(f"{node.name} cannot be evaluated: {lines[0] if lines else repr(error)}") from error

    def _value(self, source: Node, overlay: dict[Node, Any]) -> Any:
        value = overlay[source] if source in overlay else value_of(source)
        if value is None:
            raise CannotBuild(f"{source.name} has no fake value")
        if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
            return self._fake_mode.from_tensor(value)  # a constant; always the same one
        return value


class Builder:
    """`new(torch.cat, [a, b], dim=1)` and `new("relu", x)`: calls inserted at one place, in order."""

    def __init__(self, place: Node, origin: Node, evaluator: Evaluator) -> None:
        self.made: dict[Node, None] = {}
        self._place = place
        self._origin = origin
        self._evaluator = evaluator

    def __call__(self, target: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Node:
        op = "call_method" if isinstance(target, str) else "call_function"
        with self._place.graph.inserting_before(self._place):
            node = self._place.graph.create_node(op, target, args, kwargs)
        self.made[node] = None
        node.meta.update({key: self._origin.meta[key] for key in _KEPT if key in self._origin.meta})
        node.meta[value_key(self._origin)] = self._evaluator.value(node)
        return node

    def undo(self) -> None:
        for node in reversed(self.made):
            node.graph.erase_node(node)
        self.made.clear()


def fill_values(graph: Graph) -> None:
    """Fake values for calls that have none, where they can be told; who made them need not think of it."""
    evaluator = Evaluator(graph, Modes(graph))
    placeholders = graph.find_nodes(op="placeholder")
    key = value_key(placeholders[0]) if placeholders else "example_value"
    for node in graph.nodes:
        if node.op in ("call_function", "call_method") and node.users and value_of(node) is None:
            with suppress(CannotBuild):
                node.meta[key] = evaluator.value(node)


def value_key(node: Node) -> str:
    """Where the stage of a node keeps fake values."""
    return "val" if "val" in node.meta else "example_value"
