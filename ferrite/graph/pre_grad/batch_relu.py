"""Many relu calls on tensors of one form are one relu of their stack.

    a: f32[4], b: f32[4], c: f32[4], d: f32[4], e: f32[4]
    torch.cat([torch.relu(t) for t in (a, b, c, d, e)])
    ->  torch.cat(torch.unbind(torch.relu(torch.stack([a, b, c, d, e], dim=0)), dim=0))

A relu in place stays: its input would keep what it held. Off unless it is asked for, as `batch_tanh`.
"""

from __future__ import annotations

import torch
from torch.fx import Graph

from ferrite.graph.pre_grad.batch import Limits, batch, limited, pointwise

RELU = pointwise("relu", torch.relu)


@limited()
def batch_relu(graph: Graph, limits: Limits) -> int:
    return batch(graph, RELU, limits)
