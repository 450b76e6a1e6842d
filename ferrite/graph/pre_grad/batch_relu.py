"""Many relu calls on tensors of one form are one relu of their stack.

    a: f32[4], b: f32[4], c: f32[4], d: f32[4], e: f32[4]
    torch.cat([torch.relu(t) for t in (a, b, c, d, e)])
    ->  torch.cat(torch.unbind(torch.relu(torch.stack([a, b, c, d, e], dim=0)), dim=0))

A relu in place stays: its input would keep what it held. Off unless it is asked for, as `batch_tanh`.
"""

from __future__ import annotations

import torch
from torch.fx import Graph

from ferrite.graph.pre_grad.batch import Limits, batch, pointwise

RELU = pointwise("relu", torch.relu)


def batch_relu(
    graph: Graph,
    *,
    least: int = 5,
    most: int = 300,
    depth: int = 5,
    same_parent: bool = False,
    same_users: bool = False,
) -> int:
    return batch(graph, RELU, Limits(least, most, depth, same_parent, same_users))
