"""A product of transposed matrices reads them as they stand, without a copy in between.

    x: f32[2, 5, 7], y: f32[2, 5, 6]
    torch.bmm(x.permute(0, 2, 1).contiguous(), y)  ->  torch.matmul(x.transpose(-2, -1), y)

Every spelling of a transpose becomes one, right in front of the product, where the library takes it as a flag. A copy
that other ops read too is made anyway, and stays. It runs only if it is asked for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ferrite.graph.arguments import Call, bind, find
from ferrite.graph.soundness import Soundness
from ferrite.graph.transposes import is_written_plainly, read_copied_transpose, transpose
from ferrite.graph.values import tensor_of


def transpose_matmul(graph: Graph) -> int:
    sound = Soundness(graph)
    for node in find(graph, "matmul", "bmm", "mm"):
        _flag(sound, node)
    return sound.rewrites


def _flag(sound: Soundness, node: Node) -> None:
    call = bind(node)
    if call is None or call.get("out") is not None:
        return
    operands = [call["input"], call["other" if call.kind == "matmul" else "mat2"]]
    sources = [read_copied_transpose(operand) for operand in operands]
    flagged = [operand for operand, source in zip(operands, sources, strict=True) if source is not None]
    if not flagged or (call.kind == "matmul" and all(map(is_written_plainly, flagged))):
        return

    def build(new: Any) -> Node:
        sides = [
            operand if source is None else transpose(new, source)
            for operand, source in zip(operands, sources, strict=True)
        ]
        return new(torch.matmul, *sides)

    sound.rewrite(node, build, objection=sound.has_values(*operands) or _strict(call, operands))


def _strict(call: Call, operands: list[Node]) -> str | None:
    """bmm takes three dimensions and one number of batches, mm two; matmul would take more and broadcast."""
    one, other = (tensor_of(operand) for operand in operands)
    assert one is not None
    assert other is not None
    rank = {"bmm": 3, "mm": 2}.get(call.kind)
    if rank is None:
        return None
    if (one.dim(), other.dim()) != (rank, rank):
        return f"{call.kind} of {one.dim()} and {other.dim()} dimensions"
    same = rank == 2 or statically_known_true(one.shape[0] == other.shape[0])
    return None if same else f"{operands[0].name} and {operands[1].name} may have different numbers of batches"
