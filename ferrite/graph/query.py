"""Small questions about FX graphs."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch._functorch._aot_autograd.descriptors import BackwardTokenAOTOutput, ForwardTokenAOTOutput
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_leaves


def calls(graph: Graph, *targets: Any) -> list[Node]:
    """Every call of one of `targets`, in order; the list stays valid while the graph is edited."""
    return [node for target in targets for node in graph.find_nodes(op="call_function", target=target)]


def is_call(node: Any, *targets: Any) -> bool:
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def only_user(node: Node) -> Node | None:
    """The one node that reads `node`, or None if there are none or several."""
    return next(iter(node.users)) if len(node.users) == 1 else None


_TOKENS = (ForwardTokenAOTOutput, BackwardTokenAOTOutput)


def output_node(graph: Graph) -> Node:
    return graph.output_node()


def output_roles(graph: Graph) -> list[Any] | None:
    """What each output is for, as AOTAutograd says; None if it does not say. It takes the tokens of effects out of the
    outputs and leaves their roles behind."""
    output = output_node(graph)
    roles, values = output.meta.get("desc"), output.args[0]
    if not roles or not isinstance(values, (tuple, list)):
        return None
    if len(roles) != len(values):
        roles = [role for role in roles if not isinstance(role, _TOKENS)]
    return [*roles] if len(roles) == len(values) else None


def tensors(node: Node) -> Iterator[torch.Tensor]:
    """The fake tensors that a node gives: one, several, or none."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def hint_of(extent: Any) -> int:
    """A size; of a symbol, what it was in the trace, and nothing if only the data knows."""
    if isinstance(extent, int):
        return extent
    return int(extent.node.hint) if extent.node.has_hint() else 0


def bytes_of_tensor(value: Any) -> int:
    """How much memory a tensor has elements in, those that lie over one another counted once; nothing for others."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return 0
    steps = zip(value.shape, value.stride(), strict=True)
    return value.element_size() * math.prod(hint_of(extent) for extent, step in steps if str(step) != "0")


def bytes_of(node: Node) -> int:
    """Of the first tensor that a node gives."""
    return bytes_of_tensor(next(tensors(node), None))


def changes_storage(node: Node) -> bool:
    """Whether a call gives the storage of its first argument, and so of all that share it, another size or another
    place in memory, or gives that argument another storage. Addresses that were read before say nothing afterwards."""
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and schema.name in CHANGING_STORAGE


CHANGING_STORAGE = frozenset({
    "inductor::resize_storage_bytes_", "aten::set_", "aten::resize_", "aten::resize_as_", "aten::set_data",
})  # fmt: skip


def written_arguments(node: Node) -> list[Node]:
    """The arguments that a call writes to, by the schema of its op; what changes a storage does not always say so."""
    schema = getattr(node.target, "_schema", None)
    if changes_storage(node):
        return [leaf for leaf in tree_leaves(node.args[:1]) if isinstance(leaf, Node)]
    if node.op != "call_function" or schema is None or not schema.is_mutable:
        return []
    named = dict(zip((argument.name for argument in schema.arguments), node.args, strict=False)) | node.kwargs
    written = [argument.name for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write]
    return [leaf for name in written for leaf in tree_leaves(named.get(name)) if isinstance(leaf, Node)]


def memory_of(value: Any) -> Node | None:
    """The node whose memory a value shares, followed through views. A reshape may be one."""
    while isinstance(value, Node) and is_view(value):
        value = value.args[0]
    return value if isinstance(value, Node) else None


def is_view(node: Node) -> bool:
    """Whether a call may give a view of its first argument. A reshape may."""
    schema = getattr(node.target, "_schema", None) if node.op == "call_function" else None
    aliases = schema is not None and any(result.alias_info is not None for result in schema.returns)
    return aliases or node.target is torch.ops.aten.reshape.default


def attribute(module: Any, path: str) -> Any:
    """The object behind a `get_attr` target; raises RuntimeError with the part of the path that exists."""
    found = module
    parts = path.split(".")
    for depth, part in enumerate(parts):
        if not hasattr(found, part):
            prefix = ".".join(parts[:depth]) or "the graph module"
            raise RuntimeError(f"Node referenced nonexistent target {path}: {prefix} has no attribute {part!r}")
        found = getattr(found, part)
    return found


def children(module: GraphModule) -> Iterator[tuple[str, GraphModule]]:
    """The graph modules that a `get_attr` node of this graph refers to, once each, in the order of the graph."""
    seen: set[int] = set()
    for node in module.graph.find_nodes(op="get_attr"):
        child = attribute(module, str(node.target))
        if isinstance(child, GraphModule) and id(child) not in seen:
            seen.add(id(child))
            yield str(node.target), child


def family(module: GraphModule, name: str = "main") -> Iterator[tuple[str, GraphModule]]:
    """A graph and everything below it, children before parents, each module once."""
    yield from _family(module, name, set())


def _family(module: GraphModule, name: str, seen: set[int]) -> Iterator[tuple[str, GraphModule]]:
    if id(module) in seen:
        return
    seen.add(id(module))
    for path, child in children(module):
        yield from _family(child, path if name == "main" else f"{name}.{path}", seen)
    yield name, module


def source_line(node: Node) -> str:
    """`model.py:41  y = x @ w`: the user's line behind a node, or nothing."""
    return _last_frame(node.meta.get("stack_trace") or "")


def source_place(node: Node) -> str:
    """`model.py:41`: where the user's line stands, or nothing."""
    return source_line(node).partition("  ")[0]


@functools.lru_cache(maxsize=4096)
def _last_frame(stack_trace: str) -> str:
    place, text = "", ""
    for line in reversed(stack_trace.rstrip().splitlines()):
        stripped = line.strip()
        if stripped.startswith('File "'):
            place = stripped
            break
        if not text and stripped and not set(stripped) <= {"^", "~"}:
            text = stripped
    if not place:
        return ""
    path, _, rest = place[len('File "') :].partition('", line ')
    return f"{os.path.basename(path)}:{rest.split(',')[0]}  {text}".rstrip()
