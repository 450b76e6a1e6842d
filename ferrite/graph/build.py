"""Makes new nodes in a Torch-level graph, each with its fake value, or none at all."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, _ShapeEnvGuardError
from torch.fx.node import map_arg

from ferrite.graph.effects import reshapes
from ferrite.graph.modes import Modes
from ferrite.graph.query import attribute
from ferrite.graph.values import fake_mode_of, value_of

_KEPT = ("stack_trace", "nn_module_stack", "custom")  # the last one holds the stream, and what users annotate
# What fake execution says where a call may be right and only running it can tell.
_NO_ANSWER = (
    _ShapeEnvGuardError,
    GuardOnDataDependentSymNode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    DynamicOutputShapeException,
    DataDependentOutputException,
)


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
            return self._fake_mode.from_tensor(value, static_shapes=True)  # a constant; always the same one
        return value


class Builder:
    """`new(torch.cat, [a, b], dim=1)` and `new("relu", x)`: calls inserted at one place, in order.

    `new.attribute("conv.weight")` reads what the graph's module holds; `new.constant(tensor)` gives it something to
    hold, which is no part of its state.
    """

    def __init__(self, place: Node, origin: Node, evaluator: Evaluator) -> None:
        self.made: dict[Node, None] = {}
        self._held: list[str] = []
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

    def attribute(self, path: str) -> Node:
        graph, root = self._place.graph, self._root()
        tensor = attribute(root, path)
        same = [node for node in graph.find_nodes(op="get_attr") if attribute(root, str(node.target)) is tensor]
        with graph.inserting_before(self._place):
            node = graph.get_attr(path)
        # One fake value for one tensor, so that a write through another node is seen.
        node.meta.update({key: one.meta[key] for one in same for key in ("example_value", "val") if key in one.meta})
        self.made[node] = None
        return node

    def constant(self, tensor: torch.Tensor, name: str) -> Node:
        """A tensor made at compile time; one that is held already is not held twice."""
        root = self._root()
        held = [path for path, other in root.named_buffers(recurse=False) if other is tensor]
        if not held:
            held = [next(path for number in itertools.count() if not hasattr(root, path := f"{name}_{number}"))]
            root.register_buffer(held[0], tensor, persistent=False)
            self._held += held
        return self.attribute(held[0])

    def undo(self) -> None:
        for node in reversed(self.made):
            node.graph.erase_node(node)
        for path in self._held:
            delattr(self._root(), path)
        self.made.clear()
        self._held.clear()

    def _root(self) -> torch.nn.Module:
        root = self._place.graph.owning_module
        if root is None:
            raise CannotBuild("the graph has no module to hold parameters")
        return root


def fill_values(graph: Graph, changed: Collection[Node] = ()) -> None:
    """Fake values for calls that have none, for those that were `changed`, and for what depends on them; who made them
    need not think of it. What cannot be told has none afterwards. Raises `CannotBuild` if a changed call fails."""
    evaluator = Evaluator(graph, Modes(graph))
    placeholders = graph.find_nodes(op="placeholder")
    key = value_key(placeholders[0]) if placeholders else "example_value"
    stale = set(changed)
    for node in graph.nodes:
        known = value_of(node) is not None
        if not node.op.startswith("call") or (known and node not in stale and stale.isdisjoint(node.all_input_nodes)):
            continue
        if not known and not node.users:
            continue
        stale.add(node)  # others may share its memory now, even if it looks the same
        node.meta.pop(key, None)
        if node.op == "call_module" or (reshapes(node) and stale.isdisjoint(node.all_input_nodes)):
            continue  # what is given other sizes in place has them already
        try:
            node.meta[key] = evaluator.value(node)
        except CannotBuild as failure:
            if node in changed and _would_fail(failure.__cause__):
                raise


def _would_fail(cause: BaseException | None) -> bool:
    """Whether a call that has no fake value has none because it is wrong."""
    return isinstance(cause, (RuntimeError, TypeError, ValueError, IndexError, AttributeError)) and not isinstance(
        cause, _NO_ANSWER
    )


def value_key(node: Node) -> str:
    """Where the stage of a node keeps fake values."""
    return "val" if "val" in node.meta else "example_value"
