"""Many detach calls on tensors of one form are one of their stack.

    a: f32[4], b: f32[4], c: f32[4], d: f32[4], e: f32[4]
    torch.cat([t.detach() for t in (a, b, c, d, e)])
    ->  torch.cat(torch.unbind(torch.detach(torch.stack([a, b, c, d, e], dim=0)), dim=0))

A detached tensor stands in the memory of its source, and a part of the stack does not: where either is written later,
or the detached one is returned, it stays.
"""

from __future__ import annotations

import torch
from torch.fx import Graph

from ferrite.graph.pre_grad.batch import Limits, batch, limited, pointwise

DETACH = pointwise("detach", torch.detach)


@limited(same_users=True)
def batch_detach(graph: Graph, limits: Limits) -> int:
    return batch(graph, DETACH, limits)
