"""Many nan_to_num calls with the same numbers are one of the stack.

    a: f32[4], b: f32[4], c: f32[4], d: f32[4], e: f32[4]
    torch.cat([torch.nan_to_num(t, 5.0) for t in (a, b, c, d, e)])
    ->  torch.cat(torch.unbind(torch.nan_to_num(torch.stack([a, b, c, d, e], dim=0), nan=5.0), dim=0))

Numbers are compared by value and by type, however they are spelled.
"""

from __future__ import annotations

import torch
from torch.fx import Graph

from ferrite.graph.pre_grad.batch import Limits, batch, limited, pointwise

NAN_TO_NUM = pointwise("nan_to_num", torch.nan_to_num, "nan", "posinf", "neginf")


@limited(same_users=True)
def batch_nan_to_num(graph: Graph, limits: Limits) -> int:
    return batch(graph, NAN_TO_NUM, limits)
