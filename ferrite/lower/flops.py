"""How many floating-point operations a call of a library takes, by torch's own registry of formulas."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry

from ferrite.graph.query import hint_of


def flops_of(node: Node) -> int | None:
    """None where there is no formula that fits. A size that only the data knows is zero."""
    formula = flop_registry.get(node.target._overloadpacket) if isinstance(node.target, OpOverload) else None
    if formula is None:
        return None
    args, kwargs = map_arg((node.args, node.kwargs), lambda source: source.meta.get("val"))
    args, kwargs, result = tree_map_only(torch.Tensor, _of_the_trace, (args, kwargs, node.meta.get("val")))
    try:
        return int(formula(*args, **kwargs, out_val=result))
    except (AssertionError, TypeError, ValueError):
        return None  # written for other forms of the op


def _of_the_trace(fake: torch.Tensor) -> Any:
    """A tensor with sizes that are numbers, for formulas, which compare them."""
    if all(isinstance(extent, int) for extent in fake.shape):
        return fake
    return torch.empty([hint_of(extent) for extent in fake.shape], dtype=fake.dtype, device="meta")
