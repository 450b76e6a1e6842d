"""Products of matrices that stand transposed in memory.

    x.permute(0, 2, 1)   torch.permute(x, (0, 2, 1))   x.transpose(-1, -2)   x.mT   x.swapaxes(1, 2)   x.movedim(1, 2)

All of these swap the last two dimensions of x: `read_transpose` gives x. A product takes such an operand as it stands;
`product` writes it so, with the bias inside the product, where a sum of low precision is rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ferrite.graph.arguments import Call, bind, is_int, positive_dim
from ferrite.graph.build import Builder, CannotBuild
from ferrite.graph.values import tensor_of

_WIDE = (torch.float32, torch.float64)


def read_transpose(node: Any) -> Node | None:
    """The node whose last two dimensions `node` swaps, and does nothing else."""
    call = bind(node, "permute", "transpose", "movedim", "t", "T", "mT")
    value = tensor_of(call["input"]) if call is not None else None
    if call is None or value is None or value.dim() < 2:
        return None
    rank = value.dim()
    swapped = [*range(rank - 2), rank - 1, rank - 2]
    return call["input"] if _order(call, rank) == swapped else None


def read_copied_transpose(node: Any) -> Node | None:
    """The same, also through a copy that only puts the elements in order."""
    call = bind(node, "contiguous", "clone")
    return read_transpose(call["input"] if call is not None else node)


def is_written_plainly(node: Node) -> bool:
    """Whether a transpose is spelled as `transpose` below spells it."""
    return (node.op, node.target, node.args[1:]) == ("call_method", "transpose", (-2, -1))


def transpose(new: Builder, node: Node) -> Node:
    return new("transpose", node, -2, -1)


def product(new: Builder, left: Node, right: Node, bias: Node | None) -> Node:
    """left @ right + bias, as one call where torch has one."""
    if bias is None:
        return new(torch.matmul, left, right)
    ranks = {_rank(left), _rank(right)}
    if ranks == {2}:
        return new(torch.addmm, bias, left, right)
    batch = _batch(left) if _rank(left) == 3 else _batch(right)
    if ranks == {2, 3} and is_int(batch):
        left, right = (one if _rank(one) == 3 else new("expand", one, batch, -1, -1) for one in (left, right))
        return new(torch.baddbmm, bias, left, right)
    if tensor_of(left).dtype not in _WIDE:  # type: ignore[union-attr]
        raise CannotBuild(f"the sum with {bias.name} would be rounded twice")
    return new(torch.add, new(torch.matmul, left, right), bias)


@dataclass(frozen=True)
class Linear:
    """A linear of one matrix and, maybe, one bias for each column of the result."""

    node: Node
    input: Node
    weight: Node
    bias: Node | None


def read_linear(node: Any) -> Linear | None:
    call = bind(node, "linear")
    if call is None or call.get("out") is not None:
        return None
    given, weight, bias = (tensor_of(call[name]) for name in ("input", "weight", "bias"))
    if given is None or weight is None or given.dim() < 2 or weight.dim() != 2:
        return None
    if call["bias"] is not None and (bias is None or bias.dim() != 1):
        return None
    return Linear(node, call["input"], call["weight"], call["bias"])


def _order(call: Call, rank: int) -> list[int | None] | None:
    """The order that a call puts the dimensions in."""
    order: list[int | None] = list(range(rank))
    match call.kind:
        case "permute":
            return [positive_dim(dim, rank) for dim in call["dims"]]
        case "transpose":
            one, other = positive_dim(call["dim0"], rank), positive_dim(call["dim1"], rank)
        case "movedim":
            one, other = positive_dim(call["source"], rank), positive_dim(call["destination"], rank)
            if one is None or other is None or abs(one - other) != 1:
                return None
        case "mT":
            one, other = rank - 2, rank - 1
        case _:  # t and T, which turn all dimensions round
            return [1, 0] if rank == 2 else None
    if one is None or other is None:
        return None
    order[one], order[other] = order[other], order[one]
    return order


def _rank(node: Node) -> int:
    value = tensor_of(node)
    assert value is not None
    return value.dim()


def _batch(node: Node) -> Any:
    value = tensor_of(node)
    assert value is not None
    return value.shape[0]
