"""Numbers that Python's `random` draws are traced as what arrives: tensors of f64.

    random_value_0: f32                                random_value_0: f64
    mul = x * random_value_0                    ->     to = random_value_0.to(torch.float32)
    mul_1 = d * random_value_0   # f64                 mul = x * to; mul_1 = d * random_value_0

Dynamo makes its example of such a number with `torch.tensor`, which rounds it, and each call passes all its bits. Ops
whose results have twice the precision take the number as it is; for all others it is rounded, so that they give what
Dynamo was told.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._dynamo.source import RandomValueSource
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from ferrite.graph.values import value_of

_PRECISE = frozenset({torch.float64, torch.complex128})


def with_drawn_numbers(module: Any, inputs: Sequence[Any]) -> list[Any]:
    """The examples with those numbers as they arrive; the graph is edited to take them."""
    given = list(inputs)
    if not isinstance(module, GraphModule):
        return given
    for place, node in enumerate(module.graph.find_nodes(op="placeholder")):
        argument, value = node.meta.get("grapharg"), node.meta.get("example_value")
        source = getattr(argument, "source", None)
        if isinstance(source, RandomValueSource) and isinstance(value, torch.Tensor) and value.is_floating_point():
            given[place] = given[place].double()
            _take_all_bits(node, value)
    if any(before is not after for before, after in zip(inputs, given, strict=True)):
        module.recompile()
    return given


def _take_all_bits(node: Node, rounded: torch.Tensor) -> None:
    rounding = [user for user in node.users if not _is_precise(user)]
    node.meta["example_value"] = rounded.double()
    if rounding:
        with node.graph.inserting_after(node):
            cast = node.graph.call_method("to", (node, rounded.dtype))
        cast.meta["example_value"] = rounded
        for user in rounding:
            user.replace_input_with(node, cast)


def _is_precise(user: Node) -> bool:
    """Whether all that a call gives has the precision of the number; the user is given the number itself."""
    given = tree_leaves(value_of(user))
    tensors = [leaf for leaf in given if isinstance(leaf, torch.Tensor)]
    return user.op == "output" or (bool(tensors) and all(tensor.dtype in _PRECISE for tensor in tensors))
