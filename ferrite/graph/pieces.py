"""Tensors that are taken apart and put together along one dimension: split, unbind, cat and stack, in plain numbers.

    x.split(3, -1)   torch.chunk(x, 3, 1)   torch.split(x, [3, 3, 2], dim=1)       Split(x, dim=1, sizes=(3, 3, 2))

Sizes are measured from the fake values of the outputs. What varies, or does not add up, is None: no pass reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ferrite.graph.arguments import bind, is_int, kind, positive_dim
from ferrite.graph.values import tensor_of, value_of

SPLITS = ("split", "split_with_sizes", "chunk", "tensor_split")
# They give several views at once, none of which autograd lets anybody write.
AT_ONCE = ("split", "split_with_sizes", "chunk", "unbind")


@dataclass(frozen=True)
class Split:
    """`source` cut along `dim` into sections of `sizes`."""

    node: Node
    source: Node
    dim: int
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Unbind:
    """`source` as `count` tensors without the dimension `dim`."""

    node: Node
    source: Node
    dim: int
    count: int


@dataclass(frozen=True)
class Join:
    """`parts` put together along `dim`, by `cat` or by `stack`."""

    node: Node
    kind: str
    parts: tuple[Node, ...]
    dim: int


def read_split(node: Any) -> Split | None:
    call = bind(node, *SPLITS)
    source = call["input"] if call is not None else None
    whole, values = tensor_of(source), value_of(node)
    if call is None or whole is None or not isinstance(values, (tuple, list)):
        return None
    dim = positive_dim(call["dim"], whole.dim())
    if dim is None or not all(isinstance(value, torch.Tensor) and value.dim() == whole.dim() for value in values):
        return None
    sizes = tuple(value.shape[dim] for value in values)
    if not is_int(*sizes, whole.shape[dim]) or sum(sizes) != whole.shape[dim]:
        return None
    return Split(node, source, dim, sizes)


def read_unbind(node: Any) -> Unbind | None:
    call = bind(node, "unbind")
    source = call["input"] if call is not None else None
    whole, values = tensor_of(source), value_of(node)
    if call is None or whole is None or not isinstance(values, (tuple, list)):
        return None
    dim = positive_dim(call["dim"], whole.dim())
    if dim is None or not is_int(whole.shape[dim]) or len(values) != whole.shape[dim]:
        return None
    return Unbind(node, source, dim, len(values))


def read_join(node: Any) -> Join | None:
    """A cat or stack of a plain list of tensors without `out`; the legacy empty tensor that a cat skips is no part."""
    call = bind(node, "cat", "stack")
    result = tensor_of(node) if call is not None else None
    if call is None or result is None or call.get("out") is not None or not isinstance(call["tensors"], (list, tuple)):
        return None
    parts = tuple(call["tensors"])
    dim = positive_dim(call["dim"], result.dim())
    if dim is None or not all(isinstance(part, Node) and tensor_of(part) is not None for part in parts):
        return None
    rank = result.dim() - (call.kind == "stack")
    if any(tensor_of(part).dim() != rank for part in parts):  # type: ignore[union-attr]
        return None
    return Join(node, call.kind, parts, dim)


def items(node: Node) -> dict[int, list[Node]] | None:
    """The readers of a node that gives several values, by index from the front; None if it is read in another way."""
    values = value_of(node)
    if not isinstance(values, (tuple, list)):
        return None
    found: dict[int, list[Node]] = {}
    for user in node.users:
        if kind(user) != "getitem" or user.args[0] is not node:
            return None
        index = positive_dim(user.args[1], len(values))
        if index is None:
            return None
        found.setdefault(index, []).append(user)
    return dict(sorted(found.items()))


def item_of(node: Any) -> tuple[Node, int] | None:
    """The node that a value was taken out of, and its index from the front."""
    if kind(node) != "getitem" or not isinstance(node.args[0], Node):
        return None
    values = value_of(node.args[0])
    if not isinstance(values, (tuple, list)):
        return None
    index = positive_dim(node.args[1], len(values))
    return None if index is None else (node.args[0], index)
