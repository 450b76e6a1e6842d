"""A linear of a transposed input is a product that reads the input as it stands.

    x: f32[2, 5, 7], w: f32[6, 5], b: f32[6]
    F.linear(x.permute(0, 2, 1), w, b)
    ->  torch.baddbmm(b, x.transpose(-2, -1), w.transpose(-2, -1).expand(2, -1, -1))
    F.linear(x.mT.contiguous(), w)  ->  torch.matmul(x.transpose(-2, -1), w.transpose(-2, -1))

A linear flattens the batches of its input into one matrix, and copies a transposed one to do so; a product of batches
does not. In training it makes the gradient of the weight batch by batch. So it runs only if it is asked for.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Graph, Node

from ferrite.graph.arguments import find
from ferrite.graph.soundness import Soundness
from ferrite.graph.transposes import product, read_copied_transpose, read_linear, transpose


def transpose_linear_input(graph: Graph) -> int:
    sound = Soundness(graph)
    for node in find(graph, "linear"):
        _turn(sound, node)
    return sound.rewrites


def _turn(sound: Soundness, node: Node) -> None:
    linear = read_linear(node)
    source = read_copied_transpose(linear.input) if linear is not None else None
    if linear is None or source is None:
        return

    def build(new: Any) -> Node:
        return product(new, transpose(new, source), transpose(new, linear.weight), linear.bias)

    sound.rewrite(node, build)
