"""What others could see of a replacement after autograd, besides its values: the memory that a result stands in, and
its strides.

    clone = aten.clone.default(x); aten.copy_.default(x, y); return clone       x in place of the clone: returns y

A result may stand in other memory than the end that it replaces if nobody writes there later and the caller does not
get it. It may have other strides if no op further down asks for them and the caller gets those of before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from ferrite.graph.arguments import kind
from ferrite.graph.effects import written_by
from ferrite.graph.strides import noted_strides
from ferrite.graph.values import value_of

_ASKS_FOR_STRIDES = frozenset({"as_strided", "as_strided_scatter", "as_strided_copy", "set_", "resize_"})


def seen_by_others(
    by_end: Sequence[tuple[Node, Any]], module: GraphModule, inputs: Sequence[Any], place: Node
) -> str | None:
    """Why results of a trace cannot stand for these ends, of the same sizes; `inputs` are those of the trace."""
    given = zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True)
    read = [(node, source) for source, node in given if isinstance(node, Node)]
    for number, (end, result) in enumerate(by_end):
        if result is None:
            continue
        for other, stands_for in [*read, *by_end[:number]]:
            apart = memory_of(value_of(end)).isdisjoint(memory_of(value_of(other)))
            if not apart or memory_of(_values(result)).isdisjoint(memory_of(_values(stands_for))):
                continue
            if reason := _is_seen(end, other, place, is_input=other not in dict(by_end)):
                return f"{end.name} would stand in the memory of {other.name}, and {reason}"
        if reason := _strides_seen(end, result):
            return reason
    return None


def memory_of(value: Any) -> set[int]:
    """The storages that a value stands in."""
    tensors = (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided)
    return {tensor.untyped_storage()._cdata for tensor in tensors}


def _values(result: Any) -> list[Any]:
    return [value_of(part) for part in (result if isinstance(result, list) else [result])]


def _is_seen(end: Node, other: Node, place: Node, is_input: bool) -> str | None:
    """Who sees that two values which stood apart share memory."""
    if _is_returned(end) and (is_input or _is_returned(other)):
        return f"{end.name} is returned"
    memory = memory_of((value_of(end), value_of(other)))
    node = place
    while node.op != "root":
        if any(not memory.isdisjoint(memory_of(value_of(written))) for written in written_by(node)):
            return f"{node.name} writes there"
        node = node.next
    return None


def _is_returned(node: Node) -> bool:
    """Whether the caller gets a value, or a view of it."""
    memory = memory_of(value_of(node))
    views, waiting = {node}, [node]
    while waiting:
        for user in waiting.pop().users:
            if user.op == "output":
                return True
            if user not in views and not memory.isdisjoint(memory_of(value_of(user))):
                views.add(user)
                waiting.append(user)
    return False


def _strides_seen(end: Node, result: Any) -> str | None:
    before, after = (list(map(_strides, tree_leaves(value))) for value in (value_of(end), _values(result)))
    if before == after or None in before or None in after:
        return None
    shown = f"strides {after[0]}, not {before[0]}" if len(before) == 1 else "other strides"
    if noted_strides(end.graph) is None and any(user.op == "output" for user in end.users):
        return f"{end.name} would be returned with {shown}"
    asks = next((node for node in _readers(end) if _asks_for_strides(node)), None)
    return None if asks is None else f"{end.name} would have {shown}, and {asks.name} may ask for them"


def _strides(value: Any) -> tuple[str, ...] | None:
    """Along dimensions that have more than one element."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    pairs = zip(value.shape, value.stride(), strict=True)
    return tuple(str(stride) if str(size) != "1" else "" for size, stride in pairs)


def _readers(node: Node) -> Iterator[Node]:
    """Everything that is computed from a value."""
    seen, waiting = {node}, [node]
    while waiting:
        for user in waiting.pop().users:
            if user not in seen:
                seen.add(user)
                waiting.append(user)
                yield user


def _asks_for_strides(node: Node) -> bool:
    if node.op != "call_function":
        return False
    if isinstance(node.target, OpOverload):
        return node.target.namespace not in ("aten", "prims") or kind(node) in _ASKS_FOR_STRIDES
    return False
