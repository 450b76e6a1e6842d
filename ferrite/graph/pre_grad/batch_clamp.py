"""Many clamps to the same bounds are one clamp of the stack.

    a: f32[4], b: f32[4], c: f32[4], d: f32[4], e: f32[4]
    torch.cat([t.clamp(-1, max=1) for t in (a, b, c, d, e)])
    ->  torch.cat(torch.unbind(torch.clamp(torch.stack([a, b, c, d, e], dim=0), min=-1, max=1), dim=0))

Bounds are compared by value and by type: 1 and 1.0 give integers other dtypes. Bounds that are tensors stay.
"""

from __future__ import annotations

import torch
from torch.fx import Graph

from ferrite.graph.pre_grad.batch import Limits, batch, limited, pointwise

CLAMP = pointwise("clamp", torch.clamp, "min", "max")


@limited(same_users=True)
def batch_clamp(graph: Graph, limits: Limits) -> int:
    return batch(graph, CLAMP, limits)
