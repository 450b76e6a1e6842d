"""Strides of pointwise results in dimensions of size one, as eager gives them.

Tracing promises strides by rules of its own. Where a dimension has one element its stride means nothing, and there the
promise may differ from eager: x of sizes (6, 1) and strides (1, 6) plus a number has strides (1, 6) in eager and (1, 1)
in the trace. Users see strides, and code that runs on them (`.stride()`, `.view`) too, so before anything reads the
promises they are corrected. Only sizes that are known are looked at.

What eager does, found by running it: if all operands have the result's sizes, and all are contiguous, or all are
channels-last, so is the result; or all are dense with the same strides, then the result has them too. Otherwise
dimensions are sorted by the strides of the first operand that tells two of them apart, and the result is dense in that
order. A number counts as an operand without dimensions wherever an op takes a tensor.

Besides, what has no dimension is expanded with strides of 0 only, by which sizes of one are traced with a stride of 1;
and what starts as a copy of an operand (a clone, `index_put`) has the very strides of it, if that is dense.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from ferrite.graph.values import evaluate, fake_mode_of

Extents: TypeAlias = "tuple[int, ...]"
Operand: TypeAlias = "tuple[Extents, Extents]"  # sizes and strides

# Overloads that make a tensor of the number before they compute, and ops with such a name that do not.
_WRAPS = frozenset({"Scalar", "Scalar_Tensor", "Scalar_Self", "Scalar_Other", "self_scalar", "other_scalar"})
_KEEPS_NUMBERS = frozenset({"aten::pow", "aten::lerp"})

# Ops that fill a tensor like their operand, or compute in several steps: the promise of the trace stands.
_OTHER_RULES = frozenset(
    f"aten::{name}"
    for name in ("clone", "deg2rad", "rad2deg", "isinf", "isfinite", "nan_to_num", "relu6", "hardtanh", "ldexp",
                 "_to_copy", "masked_fill")
)  # fmt: skip
# Ops whose result starts as a copy of their operand.
_COPIES = frozenset({"aten::clone", "aten::index_put", "aten::_unsafe_index_put", "aten::index_fill"})
_MEMORY_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def correct_strides(module: GraphModule) -> int:
    """Give nodes the strides that eager would give them; gives how many were promised otherwise."""
    changed: set[Node] = set()
    mode = None
    for node in module.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, OpOverload):
            continue
        if not changed.isdisjoint(node.all_input_nodes):
            mode = mode or fake_mode_of(module.graph)
            node.meta["val"] = evaluate(module, node, mode)
            changed.add(node)
        promised = node.meta.get("val")
        wanted = _strides_in_eager(node, promised)
        if wanted is not None and wanted != tuple(promised.stride()):
            mode = mode or fake_mode_of(module.graph)
            with mode:
                node.meta["val"] = torch.empty_strided(promised.shape, wanted, dtype=promised.dtype)
            changed.add(node)
    return len(changed)


def _strides_in_eager(node: Node, promised: Any) -> Extents | None:
    """None where the promise is sure to hold, or cannot be told."""
    if not _is_static(promised):
        return None
    first = node.args[0].meta.get("val") if node.args and isinstance(node.args[0], Node) else None
    if node.target is torch.ops.aten.expand.default:
        return (0,) * promised.dim() if isinstance(first, torch.Tensor) and first.dim() == 0 else None
    if 1 not in promised.shape:
        return None
    if node.target._schema.name in _COPIES and node.kwargs.get("memory_format") in (None, torch.preserve_format):
        if not isinstance(first, torch.Tensor) or not _is_static(first):
            return None
        return tuple(first.stride()) if _is_dense(tuple(first.shape), tuple(first.stride())) else None
    if torch.Tag.pointwise not in node.target.tags:
        return None
    if node.target.namespace != "aten" or node.target._schema.name in _OTHER_RULES:
        return None
    operands: list[Operand] = []
    for schema, given in zip(node.target._schema.arguments, node.args, strict=False):
        value = given.meta.get("val") if isinstance(given, Node) else given
        if isinstance(value, torch.Tensor):
            if not _is_static(value):
                return None
            operands.append((tuple(value.shape), tuple(value.stride())))
        elif isinstance(value, (bool, int, float)) and _takes_a_tensor(node.target, schema):
            operands.append(((), ()))
    return strides_in_eager(tuple(promised.shape), operands)


def _takes_a_tensor(target: OpOverload, schema: Any) -> bool:
    if isinstance(schema.type, torch.TensorType):
        return True
    wraps = target._overloadname in _WRAPS and target._schema.name not in _KEEPS_NUMBERS
    return wraps and schema.name in ("self", "other")


def _is_static(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and value.device.type == "cpu"
        and all(isinstance(extent, int) for extent in (*value.shape, *value.stride()))
    )


def strides_in_eager(sizes: Extents, operands: Sequence[Operand]) -> Extents:
    """The strides of a pointwise result of these sizes."""
    if all(of == sizes for of, _ in operands):
        tensors = [torch.empty_strided(*operand, device="meta") for operand in operands]
        if all(tensor.is_contiguous() for tensor in tensors):
            return _dense(sizes, range(len(sizes) - 1, -1, -1))
        layout = _MEMORY_FORMATS.get(len(sizes))
        if layout is not None and all(tensor.is_contiguous(memory_format=layout) for tensor in tensors):
            return tuple(torch.empty(sizes, memory_format=layout, device="meta").stride())
        if all(a[1] == b[1] for a, b in pairwise(operands)) and _is_dense(*operands[0]):
            return operands[0][1]
    return _dense(sizes, _order(sizes, [_stretched(sizes, operand) for operand in operands]))


def _is_dense(sizes: Extents, strides: Extents) -> bool:
    """Whether elements lie without gaps, each at a place of its own."""
    tensor = torch.empty_strided(sizes, strides, device="meta")
    return bool(torch.ops.aten.is_non_overlapping_and_dense.default(tensor))


def _stretched(sizes: Extents, operand: Operand) -> Extents:
    """The strides of an operand along the result's dimensions: 0 where it is repeated."""
    of, strides = operand
    missing = len(sizes) - len(of)
    there = zip(of, strides, sizes[missing:], strict=True)
    return (0,) * missing + tuple(0 if extent == 1 != wanted else stride for extent, stride, wanted in there)


def _order(sizes: Extents, operands: Sequence[Extents]) -> list[int]:
    """Dimensions from the fastest to the slowest: from the last one on, each goes down past those that are slower."""
    order = list(range(len(sizes) - 1, -1, -1))
    for start in range(1, len(order)):
        place = start
        for below in range(start - 1, -1, -1):
            faster = _compared(sizes, operands, order[below], order[place])
            if faster < 0:
                break
            if faster > 0:
                order[below], order[place] = order[place], order[below]
                place = below
    return order


def _compared(sizes: Extents, operands: Sequence[Extents], one: int, other: int) -> int:
    """Below 0 if the one dimension is faster than the other, above if slower, 0 if no operand tells."""
    for strides in operands:
        if strides[one] == 0 or strides[other] == 0:
            continue
        if strides[one] != strides[other]:
            return -1 if strides[one] < strides[other] else 1
        if sizes[one] > sizes[other]:
            return 1
    return 0


def _dense(sizes: Extents, order: Sequence[int]) -> Extents:
    strides, step = [0] * len(sizes), 1
    for dimension in order:
        strides[dimension] = step
        step *= sizes[dimension]
    return tuple(strides)
