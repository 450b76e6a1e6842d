"""Many dropouts of one probability are one dropout of the stack, if other masks than eager's are allowed.

    a: f32[4], b: f32[4], c: f32[4], d: f32[4], e: f32[4]
    torch.cat([F.dropout(t, 0.3, False) for t in (a, b, c, d, e)])
    ->  torch.cat(torch.unbind(F.dropout(torch.stack([a, b, c, d, e], dim=0), p=0.3, training=False), dim=0))

In training one draw for all gives other numbers than a draw for each, from the same seed. `other_masks` says that this
is wanted; without it a dropout that draws stays. The option `fallback_random` promises eager's numbers, and takes
`other_masks` back.
"""

from __future__ import annotations

from torch.fx import Graph
from torch.nn import functional

from ferrite.graph.pre_grad.batch import Limits, batch, limited, pointwise


@limited(same_users=True)
def batch_dropout(graph: Graph, limits: Limits, *, other_masks: bool = False) -> int:
    rule = pointwise("dropout", functional.dropout, "p", "training", random=other_masks)
    return batch(graph, rule, limits)
