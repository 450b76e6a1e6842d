"""The bias of a large product is added by the kernel that reads the product.

    addmm(bias, x, w)  ->  add(mm(x, w), bias)

A library first copies the bias into every row of the result and then reads what it wrote. Time of `mm` by that of
`addmm`, least of 9 interleaved rounds, two threads, MKL on AVX-512, f32: 0.77 (12544 x 96 x 384), 0.84 (12544 x 384 x
96), 0.91 (3136 x 192 x 768), 0.94 (784 x 384 x 1536), 0.96 (512 x 768 x 3072). A kernel that reads the product anyway
adds the bias for nothing: inference of ConvNeXt 0.92 of the time without this pass, BERT 0.94, ViT 0.93 (real sizes,
medians of 13 interleaved rounds, quartiles 0.84-0.95, 0.93-1.05, 0.90-1.00).

So it is done where one call that is computed element by element, or a layer norm, reads the product, through views or
not; where a library or the caller reads it (a training graph keeps it for its backward), a further pass over the result
would cost more than the copy. Halves stay: a library rounds product and bias once.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from ferrite.graph.query import calls, is_view, only_user

aten = torch.ops.aten

MANY = 1 << 16  # elements of a result, and
FEWEST = 16  # rows and columns: fewer are products that no library computes


def bias_after_product(graph: Graph) -> int:
    moved = [node for node in calls(graph, aten.addmm.default) if _has_plain_bias(node) and _is_read_by_a_kernel(node)]
    for node in moved:
        bias, x, w = node.args
        with graph.inserting_before(node):
            product = graph.call_function(aten.mm.default, (x, w))
        product.meta = dict(node.meta)
        node.target, node.args = aten.add.Tensor, (product, bias)
    return len(moved)


def _has_plain_bias(node: Node) -> bool:
    """Whether all of a large product takes the same bias, which is added as it is."""
    bias, made = node.args[0].meta["val"], node.meta["val"]
    if node.kwargs or bias.dim() != 1 or made.dtype not in (torch.float32, torch.float64):
        return False
    if not all(isinstance(size, int) for size in made.shape):
        return False
    return made.numel() >= MANY and min(made.shape) >= FEWEST


def _is_read_by_a_kernel(node: Node) -> bool:
    reader = only_user(node)
    while reader is not None and is_view(reader):
        reader = only_user(reader)
    if reader is None or reader.op != "call_function":
        return False
    return reader.target is aten.native_layer_norm.default or torch.Tag.pointwise in getattr(reader.target, "tags", ())
