"""A small batched product of vectors with matrices that is added to something is a pointwise product and a sum.

    x: f32[2, 3, 4], w: f32[2, 3, 4, 5], c: f32[5]
    torch.einsum("bni,bnio->bno", x, w) + c  ->  (x.unsqueeze(-1) * w).sum(-2) + c

Reading `w` is all the work there is, and the sum fuses with the addition. Halves are multiplied and summed in f32, as
in a matrix product. Off unless it is asked for, and left alone above `most` products: if they are not fused into the
sum, all of them stand in memory at once.
"""

from __future__ import annotations

from math import prod

import torch
from torch.fx import Graph, Node

from ferrite.graph.arguments import bind, find, kind
from ferrite.graph.build import Builder
from ferrite.graph.soundness import Soundness
from ferrite.graph.values import tensor_of

_HALVES = (torch.float16, torch.bfloat16)


def einsum_to_pointwise(graph: Graph, *, most: int = 1 << 20) -> int:
    sound = Soundness(graph)
    for node in find(graph, "einsum"):
        _spell_out(sound, node, most)
    return sound.rewrites


def _spell_out(sound: Soundness, node: Node, most: int) -> None:
    operands = _vectors_and_matrices(node)
    if operands is None:
        return
    vectors, matrices = operands
    objection = (
        sound.agree(vectors, matrices)
        or sound.is_static(vectors, matrices)
        or (None if any(kind(user) == "add" for user in node.users) else f"{node.name} is not added to anything")
        or _too_large(vectors, matrices, most)
    )

    def build(new: Builder) -> Node:
        value = tensor_of(vectors)
        assert value is not None
        narrow = value.dtype in _HALVES
        left, right = (new("to", part, torch.float32) if narrow else part for part in operands)
        total = new("sum", new(torch.mul, new("unsqueeze", left, -1), right), -2)
        return new("to", total, value.dtype) if narrow else total

    sound.rewrite(node, build, objection=objection)


def _vectors_and_matrices(node: Node) -> tuple[Node, Node] | None:
    """The operands of `abi,abio->abo`, in any letters."""
    call = bind(node, "einsum")
    if call is None or not isinstance(call["equation"], str) or len(call["operands"]) != 2:
        return None
    inputs, arrow, output = call["equation"].replace(" ", "").partition("->")
    left, comma, right = inputs.partition(",")
    letters = right.isalpha() and len(right) == 4 == len(set(right))
    if not (arrow and comma and letters) or left != right[:3] or output != right[:2] + right[3]:
        return None
    return tuple(call["operands"]) if all(isinstance(part, Node) for part in call["operands"]) else None


def _too_large(vectors: Node, matrices: Node, most: int) -> str | None:
    values = tensor_of(vectors), tensor_of(matrices)
    assert values[0] is not None
    assert values[1] is not None
    products = prod(torch.broadcast_shapes((*values[0].shape, 1), values[1].shape))
    return f"{products} products are more than {most}" if products > most else None
