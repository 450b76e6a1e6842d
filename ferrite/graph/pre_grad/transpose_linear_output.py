"""A linear whose result is transposed is a product the other way round.

    x: f32[2, 7, 5], w: f32[6, 5], b: f32[6]
    F.linear(x, w, b).permute(0, 2, 1).contiguous()
    ->  columns = x.transpose(-2, -1); torch.baddbmm(b.unsqueeze(-1), w.expand(2, -1, -1), columns).contiguous()
    F.linear(x, w).mT.sum(0)  ->  torch.matmul(w, x.transpose(-2, -1)).sum(0)

The result then stands in memory as it is read, and the copy that would put it so is gone (`contiguous` above finds
nothing to do). Where nothing copies, there is nothing to win, and a result that is returned keeps the strides it has in
eager: it is left alone. In training a product of batches makes the gradient of the weight batch by batch. So it runs
only if it is asked for.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Graph, Node

from ferrite.graph.arguments import find
from ferrite.graph.soundness import Soundness
from ferrite.graph.transposes import product, read_linear, read_transpose, transpose


def transpose_linear_output(graph: Graph) -> int:
    sound = Soundness(graph)
    for node in find(graph, "permute", "transpose", "movedim", "t", "T", "mT"):
        _turn(sound, node)
    return sound.rewrites


def _turn(sound: Soundness, node: Node) -> None:
    linear = read_linear(read_transpose(node))
    if linear is None:
        return

    def build(new: Any) -> Node:
        columns = transpose(new, linear.input)
        bias = new("unsqueeze", linear.bias, -1) if linear.bias is not None else None
        return product(new, linear.weight, columns, bias)

    sound.rewrite(node, build, objection=sound.only_user(linear.node, node))
