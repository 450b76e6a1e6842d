"""Many tanh calls on tensors of one form are one tanh of their stack.

    a: f32[4], b: f32[4], c: f32[4], d: f32[4], e: f32[4]
    torch.cat([torch.tanh(t) for t in (a, b, c, d, e)])
    ->  torch.cat(torch.unbind(torch.tanh(torch.stack([a, b, c, d, e], dim=0)), dim=0))

Off unless it is asked for: stacking copies every input, which pays where starting an op costs more than running it.
"""

from __future__ import annotations

import torch
from torch.fx import Graph

from ferrite.graph.pre_grad.batch import Limits, batch, limited, pointwise

TANH = pointwise("tanh", torch.tanh)


@limited()
def batch_tanh(graph: Graph, limits: Limits) -> int:
    return batch(graph, TANH, limits)
