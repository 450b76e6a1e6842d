"""Many small linear layers of one form are one batched matrix product.

    x: f32[5, 2, 3], w: f32[5, 4, 3]
    x, w = x.unbind(), w.unbind(); torch.cat([F.linear(a, b) for a, b in zip(x, w)])
    ->  x, w = x.unbind(), w.unbind(); torch.cat(torch.bmm(torch.stack(x), torch.stack(w).transpose(1, 2)).unbind())

With a bias it is `baddbmm`. Layers whose inputs are parts of one tensor are put together first, because a stack of all
parts of a tensor is that tensor. Off unless it is asked for: stacking copies inputs and weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Graph, Node

from ferrite.graph.arguments import bind
from ferrite.graph.build import Builder
from ferrite.graph.pre_grad.batch import Limits, Member, Rule, batch, limited, sized, unbind
from ferrite.graph.soundness import Soundness
from ferrite.graph.values import tensor_of


@limited()
def batch_linear(graph: Graph, limits: Limits) -> int:
    return batch(graph, LINEAR, limits)


def read_linear(node: Node) -> tuple[Node, ...] | None:
    """Input, weight and, if there is one, bias of a linear layer with a matrix of weights."""
    call = bind(node, "linear")
    if call is None:
        return None
    operands = (call["input"], call["weight"]) + (() if call["bias"] is None else (call["bias"],))
    values = [tensor_of(operand) for operand in operands]
    ranks = [None if value is None else value.dim() for value in values]
    return operands if ranks[0] is not None and ranks[1:] in ([2], [2, 1]) else None


def _read(sound: Soundness, node: Node) -> Member | str | None:
    operands = read_linear(node)
    if operands is None or tensor_of(operands[0]).dim() != 2:  # type: ignore[union-attr]
        return None
    reason = sound.is_static(*operands) or sound.agree(*operands)
    return reason or Member(node, operands, tuple(map(sized, operands)))


def _fuse(new: Builder, members: Sequence[Member]) -> Sequence[Node]:
    inputs, weights, *bias = (
        new(torch.stack, list(column), dim=0) for column in zip(*(member.operands for member in members), strict=True)
    )
    across = new("transpose", weights, 1, 2)
    if bias:
        return unbind(new, new(torch.baddbmm, new("unsqueeze", bias[0], 1), inputs, across), 0)
    return unbind(new, new(torch.bmm, inputs, across), 0)


LINEAR = Rule(("linear",), _read, _fuse, by_parent=True)
