"""Many sigmoid calls on tensors of one form are one sigmoid of their stack.

    a: f32[4], b: f32[4], c: f32[4], d: f32[4], e: f32[4]
    torch.cat([torch.sigmoid(t) for t in (a, b, c, d, e)])
    ->  torch.cat(torch.unbind(torch.sigmoid(torch.stack([a, b, c, d, e], dim=0)), dim=0))

Off unless it is asked for, as `batch_tanh`.
"""

from __future__ import annotations

import torch
from torch.fx import Graph

from ferrite.graph.pre_grad.batch import Limits, batch, limited, pointwise

SIGMOID = pointwise("sigmoid", torch.sigmoid)


@limited()
def batch_sigmoid(graph: Graph, limits: Limits) -> int:
    return batch(graph, SIGMOID, limits)
