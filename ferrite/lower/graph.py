"""One graph becomes steps: an op with a row in the table becomes loops, every other op an eager call in its place.

Values keep the names that they have in the graph. Graph modules that higher-order ops call become functions of the
program, each once; tensors and other objects that the graph module owns become constants.
"""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ferrite.errors import Unsupported
from ferrite.graph.names import name_of
from ferrite.graph.query import attribute, family, source_place
from ferrite.graph.text import show_type, type_of_list
from ferrite.host.nodes import Call, Constant, HostProgram, Input
from ferrite.host.plan import plan
from ferrite.lower.table import row_of
from ferrite.syntax import Named, Ref


@dataclass
class Lowered:
    """What lowering gives: the calls in order, what they need, and what runs in eager."""

    inputs: tuple[Input, ...]
    calls: list[Call]
    result: Any
    functions: tuple[HostProgram, ...]
    constants: dict[str, Any]
    fallbacks: Counter[str]
    reasons: dict[str, str]


@dataclass
class _Shared:
    """What a graph and its children have in common: names are unique across all of them."""

    functions: dict[int, HostProgram] = field(default_factory=dict)  # by id of the graph module, which outlives this
    constants: dict[str, Any] = field(default_factory=dict)
    constant_names: dict[int, str] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)
    fallbacks: Counter[str] = field(default_factory=Counter)

    def fresh(self, wanted: str) -> str:
        name, number = wanted, 0
        while name in self.taken:
            number += 1
            name = f"{wanted}_{number}"
        self.taken.add(name)
        return name


def lower(module: GraphModule, static: frozenset[int] = frozenset(), donated: frozenset[int] = frozenset()) -> Lowered:
    """Lower a whole graph, children included. `static` and `donated` are positions of inputs."""
    shared = _Shared(taken={node.name for _, member in family(module) for node in member.graph.nodes})
    inputs, calls, result = _lower_graph(module, shared, static, donated)
    reasons = {op: _reason(op) for op in shared.fallbacks}
    functions = tuple(shared.functions.values())
    return Lowered(inputs, calls, result, functions, shared.constants, shared.fallbacks, reasons)


def constant_nodes(constants: dict[str, Any]) -> tuple[Constant, ...]:
    return tuple(Constant(name, show_type(value)) for name, value in constants.items())


def _lower_graph(
    module: GraphModule, shared: _Shared, static: frozenset[int], donated: frozenset[int]
) -> tuple[tuple[Input, ...], list[Call], Any]:
    inputs: list[Input] = []
    calls: list[Call] = []
    names: dict[Node, str] = {}
    result: Any = None

    def value(argument: Any) -> Any:
        if isinstance(argument, Node):
            return Ref(names[argument])
        if argument is None or isinstance(argument, (bool, int, float, complex, str)):
            return argument
        if isinstance(argument, (list, tuple)):
            return type_of_list(argument)(value(item) for item in argument)
        if isinstance(argument, dict):
            return {key: value(item) for key, item in argument.items()}
        if isinstance(argument, slice):
            return slice(value(argument.start), value(argument.stop), value(argument.step))
        if isinstance(argument, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise Unsupported(f"the size {argument} stands in the graph without a node that computes it")
        name = name_of(argument)
        return Named(name) if name is not None else Ref(_constant("_object", argument, shared))

    for node in module.graph.nodes:
        match node.op:
            case "placeholder":
                position = len(inputs)
                names[node] = node.name
                kind = show_type(node.meta.get("val"))
                inputs.append(Input(node.name, kind, position in static, position in donated))
            case "get_attr":
                names[node] = _lower_attribute(module, str(node.target), shared)
            case "call_function":
                names[node] = node.name
                calls.append(_lower_call(node, value, shared))
            case "output":
                result = value(node.args[0])
            case _:
                raise Unsupported(f"a {node.op} node in a graph after autograd", at=source_place(node))
    return tuple(inputs), calls, result


def _lower_attribute(module: GraphModule, path: str, shared: _Shared) -> str:
    """The name of a constant, or of the function that a child graph becomes."""
    owned = attribute(module, path)
    if not isinstance(owned, GraphModule):
        return _constant(path, owned, shared)
    known = shared.functions.get(id(owned))
    if known is not None:
        return known.name
    inputs, calls, result = _lower_graph(owned, shared, frozenset(), frozenset())
    # Two steps, so that functions called by this one stand before it.
    name = shared.fresh(_identifier(path))
    shared.functions[id(owned)] = plan(name, inputs, calls, result)
    return name


def _lower_call(node: Node, value: Any, shared: _Shared) -> Call:
    target = name_of(node.target)
    if row_of(node.target) is None and node.target is not operator.getitem:
        shared.fallbacks[target or node.name] += 1
    if target is None:
        # A function that only this process knows: keep it as an object and call it through operator.call's shape.
        called = Ref(_constant("_function", node.target, shared))
        return Call(
            node.name, "ferrite.host.calls.call", (called, *value(node.args)), value(node.kwargs), source_place(node)
        )
    return Call(node.name, target, value(node.args), value(node.kwargs), source_place(node))


def _constant(wanted: str, thing: Any, shared: _Shared) -> str:
    """One name for one object, however often the graph refers to it."""
    known = shared.constant_names.get(id(thing))
    if known is None:
        known = shared.constant_names[id(thing)] = shared.fresh(_identifier(wanted))
        shared.constants[known] = thing
    return known


def _identifier(path: str) -> str:
    word = "".join(letter if letter.isalnum() or letter == "_" else "_" for letter in path)
    return f"_{word}" if not word or word[0].isdigit() else word


def _reason(op: str) -> str:
    namespace = op.partition(".")[0]
    match namespace:
        case "higher_order":
            return "control flow: runs the compiled bodies from eager"
        case "operator" | "math" | "torch" | "builtins":
            return "arithmetic on sizes"
        case "aten" | "prims" | "prim":
            return "no row in the lowering table"
    return "an operator from outside PyTorch"
