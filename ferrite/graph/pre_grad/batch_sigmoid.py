"""Many sigmoid calls on tensors of one form are one sigmoid of their stack.

    a: f32[4], b: f32[4], c: f32[4], d: f32[4], e: f32[4]
    torch.cat([torch.sigmoid(t) for t in (a, b, c, d, e)])
    ->  torch.cat(torch.unbind(torch.sigmoid(torch.stack([a, b, c, d, e], dim=0)), dim=0))

Off unless it is asked for, as `batch_tanh`.
"""

from __future__ import annotations

import torch
from torch.fx import Graph

from ferrite.graph.pre_grad.batch import Limits, batch, pointwise

SIGMOID = pointwise("sigmoid", torch.sigmoid)


def batch_sigmoid(
    graph: Graph,
    *,
    least: int = 5,
    most: int = 300,
    depth: int = 5,
    same_parent: bool = False,
    same_users: bool = False,
) -> int:
    return batch(graph, SIGMOID, Limits(least, most, depth, same_parent, same_users))
