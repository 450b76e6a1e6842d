"""Linear layers on one input are one wide linear layer, cut into its parts.

    x: f32[2, 3], v: f32[4, 3], w: f32[5, 3]
    F.linear(x, v).relu().sum() + F.linear(x, w).relu().sum()
    ->  y = F.linear(x, torch.cat([v, w])).split([4, 5], dim=-1); y[0].relu().sum() + y[1].relu().sum()

Queries, keys and values, or gate and up: the input is read once, and one larger product keeps all cores busy. The input
may have any rank, and sizes in front that vary. A part has the strides of the whole: where an output or an op would see
them, it is copied. The weights are put together in every call, since nothing here knows them to be frozen. Measured by
`python -m bench.pre_grad` on two cores (two runs of 9 rounds): 0.94x and 1.00x, in earlier ones 1.06x; so it runs only
if it is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Graph, Node
from torch.nn import functional

from ferrite.graph.arguments import is_int
from ferrite.graph.build import Builder
from ferrite.graph.pre_grad.batch import Limits, Member, Rule, batch, items, limited
from ferrite.graph.pre_grad.batch_linear import read_linear
from ferrite.graph.soundness import Soundness
from ferrite.graph.values import tensor_of


@limited(least=2, depth=10)
def batch_linear_lhs(graph: Graph, limits: Limits) -> int:
    return batch(graph, PARALLEL, limits)


def _read(sound: Soundness, node: Node) -> Member | str | None:
    operands = read_linear(node)
    if operands is None:
        return None
    if not all(is_int(*tensor_of(operand).shape) for operand in operands[1:]):  # type: ignore[union-attr]
        return f"{node.name} has weights of sizes that vary"
    return sound.agree(*operands) or Member(node, operands, (operands[0], len(operands)))


def _fuse(new: Builder, members: Sequence[Member]) -> Sequence[Node]:
    columns = list(zip(*(member.operands for member in members), strict=True))
    weights, *bias = (new(torch.cat, list(column), dim=0) for column in columns[1:])
    whole = new(functional.linear, members[0].operands[0], weights, *bias)
    widths = [tensor_of(weight).shape[0] for weight in columns[1]]  # type: ignore[union-attr]
    return items(new, new(torch.split, whole, widths, dim=-1))


PARALLEL = Rule(("linear",), _read, _fuse)
