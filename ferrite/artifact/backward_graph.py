"""The backward graph of a stored function, as plain data and back: compiled autograd takes it apart, whoever else runs
the compiled graph.

    ["input", "tangents_1"]
    ["call", "mul", "aten.mul.Tensor", [["ref", "tangents_1"], 3], {}]
    ["held", "_tensor_constant0", "_tensor_constant0"]
    ["output", ["tuple", ["ref", "mul"]]]

It is the graph as the partitioner gave it, before any pass. Nodes come back without values: what reads them asks for
none.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from torch.fx import Graph, GraphModule, Node

from ferrite.artifact.constants import StoredTensor, load_tensor, store_tensors
from ferrite.errors import Unsupported
from ferrite.graph.names import name_of, resolve
from ferrite.graph.query import attribute
from ferrite.graph.text import type_of_list
from ferrite.host.packed import pack_value, unpack_value
from ferrite.syntax import Named, Ref


class StoredGraph(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`tensors` and `graphs`: held by the module, by the paths that nodes name."""

    nodes: list[Any]
    tensors: dict[str, StoredTensor]
    graphs: dict[str, StoredGraph]


def pack_graph(module: GraphModule) -> bytes:
    """Raises `Unsupported` if a part of the graph exists only in this process."""
    return msgspec.msgpack.encode(_stored(module))


def unpack_graph(data: bytes) -> GraphModule:
    """The inverse. Raises `ValueError` for what `pack_graph` did not make."""
    return _loaded(msgspec.msgpack.decode(data, type=StoredGraph))


def _stored(module: GraphModule) -> StoredGraph:
    held = {str(node.target): attribute(module, str(node.target)) for node in module.graph.find_nodes(op="get_attr")}
    graphs = {path: _stored(value) for path, value in held.items() if isinstance(value, GraphModule)}
    tensors = store_tensors({path: value for path, value in held.items() if path not in graphs})
    return StoredGraph([_stored_node(node) for node in module.graph.nodes], tensors, graphs)


def _stored_node(node: Node) -> list[Any]:
    match node.op:
        case "placeholder":
            return ["input", node.name]
        case "get_attr":
            return ["held", node.name, str(node.target)]
        case "output":
            return ["output", pack_value(_value(node.args[0]))]
        case "call_function" if (target := name_of(node.target)) is not None:
            kwargs = {name: pack_value(_value(value)) for name, value in node.kwargs.items()}
            return ["call", node.name, target, [pack_value(_value(value)) for value in node.args], kwargs]
    raise Unsupported(f"a backward graph that calls {node.target}", why="it has no name")


def _value(value: Any) -> Any:
    """An argument of a node as a value of `syntax`."""
    match value:
        case Node():
            return Ref(value.name)
        case None | bool() | int() | float() | complex() | str():
            return value
        case list() | tuple():
            return type_of_list(value)(map(_value, value))
        case dict():
            return {key: _value(item) for key, item in value.items()}
        case slice():
            return slice(_value(value.start), _value(value.stop), _value(value.step))
    name = name_of(value)
    if name is None:
        raise Unsupported(f"a backward graph with a {type(value).__name__}", why="it has no name")
    return Named(name)


def _loaded(stored: StoredGraph) -> GraphModule:
    held = torch.nn.Module()
    for path, tensor in stored.tensors.items():
        _hold(held, path, load_tensor(tensor))
    for path, inner in stored.graphs.items():
        _hold(held, path, _loaded(inner))
    graph = Graph()
    nodes: dict[str, Node] = {}
    for entry in stored.nodes:
        match entry:
            case ["input", str(name)]:
                nodes[name] = graph.create_node("placeholder", name, name=name)
            case ["held", str(name), str(path)]:
                nodes[name] = graph.create_node("get_attr", path, name=name)
            case ["output", value]:
                graph.output(_argument(unpack_value(value), nodes))
            case ["call", str(name), str(target), list(args), dict(kwargs)]:
                given = tuple(_argument(unpack_value(value), nodes) for value in args)
                named = {key: _argument(unpack_value(value), nodes) for key, value in kwargs.items()}
                nodes[name] = graph.create_node("call_function", resolve(target), given, named, name)
            case _:
                raise ValueError("not a node of a stored graph")
    return GraphModule(held, graph)


def _hold(root: torch.nn.Module, path: str, value: Any) -> None:
    *outer, name = path.split(".")
    for part in outer:
        if not hasattr(root, part):
            root.add_module(part, torch.nn.Module())
        root = getattr(root, part)
    setattr(root, name, value)


def _argument(value: Any, nodes: dict[str, Node]) -> Any:
    match value:
        case Ref(name=name):
            if name not in nodes:
                raise ValueError(f"{name} is read and not there")
            return nodes[name]
        case Named(path=path):
            return resolve(path)
        case list() | tuple():
            return type(value)(_argument(item, nodes) for item in value)
        case dict():
            return {key: _argument(item, nodes) for key, item in value.items()}
        case slice():
            return slice(*(_argument(part, nodes) for part in (value.start, value.stop, value.step)))
    return value
