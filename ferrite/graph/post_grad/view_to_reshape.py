"""A view of the same elements becomes a reshape, which is legal for any strides.

    view(x, sizes)  ->  reshape(x, sizes)

Traced strides allowed the view; a later choice of layout may not. Where the view is legal, reshape gives the same
view.
"""

from __future__ import annotations

import torch
from torch.fx import Graph

from ferrite.graph.query import calls

aten = torch.ops.aten


def view_to_reshape(graph: Graph) -> int:
    views = calls(graph, aten.view.default, aten._unsafe_view.default)
    for node in views:
        node.target = aten.reshape.default
    return len(views)
