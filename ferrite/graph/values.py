"""Fake values of nodes, kept right while passes edit: `meta["val"]` always says what the node gives.

A pass may insert nodes or change arguments without thinking of values: `refresh` recomputes those of nodes that are
new, edited since the snapshot, or read something whose value changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import compute_unbacked_bindings, rebind_unbacked
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from ferrite.errors import Malformed
from ferrite.graph.query import attribute
from ferrite.graph.snapshot import Snapshot, changed_nodes, take

# Ops that hand their operands on as they are: the last operands are the inputs of the graphs that they run.
_HAND_ON = (torch.ops.higher_order.cond, torch.ops.higher_order.while_loop, torch.ops.higher_order.invoke_subgraph)

# Ops that hand on the rows of some operands, one by one, and others as they are: which argument holds the former.
_HAND_ON_ROWS: dict[Any, int] = {torch.ops.higher_order.scan: 2, torch.ops.higher_order.map_impl: 1}


def refresh(module: GraphModule, snapshot: Snapshot, below: Mapping[GraphModule, Snapshot] | None = None) -> int:
    """Recompute the values that the edits since `snapshot` made stale, in this graph and in those that its ops run;
    gives how many there were. `below` holds the snapshots of the latter; a graph without one was not edited."""
    return _refresh(module, snapshot, below or {}, set())


def _refresh(module: GraphModule, snapshot: Snapshot, below: Mapping[GraphModule, Snapshot], changed: set[Node]) -> int:
    """`changed`: inputs that were given another value."""
    stale = 0
    edited = changed_nodes(module.graph, snapshot)
    touched: set[GraphModule] = set()
    fake_mode: FakeTensorMode | None = None
    for node in module.graph.nodes:
        if node.op == "get_attr" and isinstance(child := attribute(module, str(node.target)), GraphModule):
            before = below.get(child) or take(child.graph)
            inside = _refresh(child, before, below, set()) if child not in touched else 0
            stale += inside
            if inside or changed_nodes(child.graph, before):
                touched.add(child)
                child.recompile()  # its code is run to tell what the call gives
        if node.op != "call_function":
            continue
        graphs = _graphs_of(module, node)
        if graphs and not changed.isdisjoint(node.all_input_nodes):
            stale += sum(_hand_on(node, graph, below) for graph in graphs)
        is_fresh = node not in edited and changed.isdisjoint(node.all_input_nodes) and touched.isdisjoint(graphs)
        if is_fresh and "val" in node.meta:
            continue
        fake_mode = fake_mode or fake_mode_of(module.graph)
        old = node.meta.get("val")
        node.meta["val"] = evaluate(module, node, fake_mode)
        _bind_sizes(node, fake_mode, keep=node not in snapshot or snapshot[node].target is node.target)
        if not same_metadata(old, node.meta["val"]) or _views_moved(node, old):
            changed.add(node)
        stale += 1
    return stale


def _views_moved(node: Node, old: Any) -> bool:
    """Whether a value stands elsewhere in memory than `old` did, and a reader still shows the old place. New memory
    that no reader shows is as good as the old."""
    was, now = (_places(value) for value in (old, node.meta["val"]))
    if was == now:
        return False
    memory = {storage for storage, _ in was}
    return any(storage in memory for user in node.users for storage, _ in _places(user.meta.get("val")))


def _places(value: Any) -> list[tuple[int, str]]:
    """The memory and the offset of every tensor in a value."""
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided]
    return [(leaf.untyped_storage()._cdata, str(leaf.storage_offset())) for leaf in tensors]


def _graphs_of(module: Any, node: Node) -> list[GraphModule]:
    """The graphs that a call runs."""
    read = [source for source in node.all_input_nodes if source.op == "get_attr"]
    found = [attribute(module, str(source.target)) for source in read]
    return [graph for graph in found if isinstance(graph, GraphModule)]


def _hand_on(node: Node, graph: GraphModule, below: Mapping[GraphModule, Snapshot]) -> int:
    """Give the inputs of a graph the strides of what is handed to it, and refresh it, unless others run it too. Other
    sizes or another dtype are an error: the graph was traced for these."""
    owner = node.graph.owning_module
    callers = [one for one in node.graph.nodes if one.op == "call_function" and graph in _graphs_of(owner, one)]
    if node.target not in (*_HAND_ON, *_HAND_ON_ROWS) or callers != [node]:
        return 0
    inputs = graph.graph.find_nodes(op="placeholder")
    cut = _HAND_ON_ROWS.get(node.target)
    operands = [(operand, at == cut) for at, argument in enumerate(node.args) for operand in tree_leaves(argument)]
    operands += [(operand, False) for operand in tree_leaves(node.kwargs)]
    changed: set[Node] = set()
    for place, (operand, by_row) in zip(inputs, operands[len(operands) - len(inputs) :], strict=True):
        old, new = value_of(place), value_of(operand)
        if by_row and isinstance(new, torch.Tensor):  # a row; an index would ask whether there is one
            new = new.new_empty_strided(new.shape[1:], new.stride()[1:])
        if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor) or same_metadata(old, new):
            continue
        if (old.dtype, old.device, [*map(str, old.shape)]) != (new.dtype, new.device, [*map(str, new.shape)]):
            raise Malformed(f"{node.name} hands {operand.name} to a graph traced for other sizes", where="refresh")
        place.meta["val"] = new
        changed.add(place)
    return _refresh(graph, take(graph.graph), below, changed) if changed else 0


def _bind_sizes(node: Node, fake_mode: FakeTensorMode, *, keep: bool = True) -> None:
    """Sizes that only running can tell keep their symbols: those of a second evaluation are the ones that were made
    before. With `keep` the node calls what it called before; else its symbols are its own."""
    shape_env = fake_mode.shape_env
    if shape_env is None:
        return
    fresh = compute_unbacked_bindings(shape_env, node.meta["val"])
    known = node.meta.get("unbacked_bindings") if keep else None
    if fresh and known:
        rebind_unbacked(shape_env, node, node.meta["val"])
    elif fresh:
        node.meta["unbacked_bindings"] = fresh
    elif not keep:
        node.meta.pop("unbacked_bindings", None)


def value_of(node: Any) -> Any:
    """The fake value of a node at any stage: Dynamo keeps it in `example_value`, later stages in `val`; a constant is
    its own. None if there is none."""
    if not isinstance(node, Node):
        return None
    for key in ("example_value", "val"):
        if key in node.meta:
            return node.meta[key]
    if node.op == "get_attr" and node.graph.owning_module is not None:
        found = attribute(node.graph.owning_module, str(node.target))
        return found if isinstance(found, torch.Tensor) else None
    return None


def tensor_of(node: Any) -> torch.Tensor | None:
    """The fake tensor of a node that gives one plain tensor; None for anything else."""
    value = value_of(node)
    return value if isinstance(value, torch.Tensor) and value.layout is torch.strided else None


def fake_mode_of(graph: Graph) -> FakeTensorMode:
    """The mode that the values of a graph belong to. Dynamo's graphs keep the mode of the trace: the tracing context
    holds another one by then, with the same sizes."""
    for node in graph.nodes:
        for leaf in tree_leaves(value_of(node)):
            if isinstance(leaf, FakeTensor):
                return leaf.fake_mode
    return detect_fake_mode() or FakeTensorMode(allow_non_fake_inputs=True)


def evaluate(module: GraphModule, node: Node, fake_mode: FakeTensorMode) -> Any:
    def value(source: Node) -> Any:
        return attribute(module, str(source.target)) if source.op == "get_attr" else source.meta["val"]

    args, kwargs = map_arg(node.args, value), map_arg(node.kwargs, value)
    with torch.no_grad(), fake_mode, enable_python_dispatcher():
        return node.target(*args, **kwargs)


def same_metadata(old: Any, new: Any) -> bool:
    """Whether two fake values say the same of what they stand for: type, sizes, strides; not where in memory it is."""
    if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
        return (
            _same_sizes(old.shape, new.shape)
            and old.dtype == new.dtype
            and old.device == new.device
            and (old.layout != torch.strided or _same_sizes(old.stride(), new.stride()))
        )
    if isinstance(old, (tuple, list)) and isinstance(new, (tuple, list)):
        return len(old) == len(new) and all(same_metadata(a, b) for a, b in zip(old, new, strict=True))
    return type(old) is type(new) and str(old) == str(new)


def _same_sizes(old: Sequence[Any], new: Sequence[Any]) -> bool:
    """Sizes that vary are compared as they are written: asking whether they are equal would add a guard."""
    return len(old) == len(new) and all(
        a == b if type(a) is type(b) is int else str(a) == str(b) for a, b in zip(old, new, strict=True)
    )
