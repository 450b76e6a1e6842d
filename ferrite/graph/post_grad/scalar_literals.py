"""A constant that is one number becomes a literal.

    lift_fresh_copy(self.c)  ->  full(sizes of c, the number of c)

`torch.tensor(2.5)` in a traced function is a tensor that the graph holds, and a copy of it; nobody else has that
tensor. A kernel that reads the literal has one argument less. Up to `MOST_ELEMENTS` equal elements are one number too;
different ones stay a constant: a kernel reads an element by its index, and would have to choose between literals.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils._python_dispatch import _disable_current_modes

from ferrite.graph.query import attribute, calls

MOST_ELEMENTS = 8

aten = torch.ops.aten


def scalar_literals(graph: Graph) -> int:
    changed = 0
    for node in calls(graph, aten.lift_fresh_copy.default):
        source: Any = node.args[0]
        held: Any = attribute(graph.owning_module, source.target) if source.op == "get_attr" else None
        number = _only_number(held)
        if number is None:
            continue
        node.target = aten.full.default
        node.args = (list(held.shape), number)
        node.kwargs = {"dtype": held.dtype, "device": held.device}
        changed += 1
        _erase_unread(source)
    return changed


def _only_number(held: Any) -> bool | int | float | None:
    if type(held) is not torch.Tensor or held.device.type != "cpu" or held.layout != torch.strided:
        return None
    if held.dim() > 1 or not 0 < held.numel() <= MOST_ELEMENTS or held.is_quantized or held.is_complex():
        return None
    with _disable_current_modes():
        numbers = held.tolist() if held.dim() else [held.item()]
    first = numbers[0]
    if math.isnan(first) or (isinstance(first, int) and abs(first) >= 1 << 63):  # no text of theirs is read again
        return None
    one = all(number == first and math.copysign(1.0, number) == math.copysign(1.0, first) for number in numbers)
    return first if one else None


def _erase_unread(source: Node) -> None:
    if not source.users:
        source.graph.erase_node(source)
