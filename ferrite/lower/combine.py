"""The row of `associative_scan`: running results of a combine that the user wrote.

The combine arrives as a graph over one slice: the values on the left, those on the right, then what it reads besides.
Its ops go through the rows of the table, on stand-ins for the slices, and what comes out is the combine of a fold.

Where eager and a fold agree: eager calls the combine with many slices at once, stacked along the first dimension, in
the shape of a tree. An op that treats every element alike gives the same either way; any other one (a sum over a slice,
a view) sees eager's stack, and the whole scan is left to eager. A fold goes from left to right, so sums of floats are
rounded elsewhere than eager's; halves, where each step loses much, are left to eager as well.

A user on the CPU meets the op by calling it: `associative_scan(..., combine_mode="pointwise")` raises for tensors on
the CPU, in eager and when it is captured, and `combine_mode="generic"` is captured as slices and concatenations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._higher_order_ops.associative_scan import associative_scan_op
from torch.fx import GraphModule, Node

from ferrite.errors import Unsupported
from ferrite.graph.names import name_of
from ferrite.loops.dtypes import DType
from ferrite.loops.index import Axis, index
from ferrite.loops.nodes import Argument, Buffer, Expr, FoldScan, Load, Nest
from ferrite.loops.rewrite import apply_rules, can_raise, walk
from ferrite.loops.shapes import contiguous_strides, is_contiguous
from ferrite.lower.table import lowers, row_of
from ferrite.lower.value import Built, Result, Tensor, axes_for, broadcast_sizes, dtype_of, of_buffer, points

aten = torch.ops.aten

# Beside the ops that carry the tag: those that copy, convert or make something, element by element.
ALIKE_EVERYWHERE = frozenset({
    aten._to_copy.default, aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default,
    aten.full_like.default, aten.ones_like.default, aten.zeros_like.default, aten.fill.Scalar,
    aten.full.default, aten.scalar_tensor.default, torch.ops.prims.convert_element_type.default,
})  # fmt: skip


@lowers(associative_scan_op)
def associative_scan(combine: GraphModule, xs: Sequence[Tensor], others: Sequence[Any], *, result: Any) -> Built:
    """Along the first dimension. The first results are the first slices, so one slice is its own result (eager gives
    the very tensor back, a graph a copy), and no slices are none. Eager's results are contiguous, whatever `xs` are."""
    for x, made in zip(xs, result, strict=True):
        if x.dtype.is_half:
            raise Unsupported(
                f"an associative scan of {x.dtype}", why="one step after the other rounds more than eager"
            )
        if x.sizes != xs[0].sizes or not is_contiguous(made.sizes, made.strides):
            raise Unsupported("an associative scan of tensors of several shapes, or that are not contiguous")
    axes = axes_for(xs[0].sizes)
    body = combined(combine, [x.dtype for x in xs], axes[1:], others)
    buffers = tuple(
        Buffer(f"result_{number}", made.dtype, made.sizes, contiguous_strides(made.sizes))
        for number, made in enumerate(result)
    )
    targets = tuple((buffer, points(axes)) for buffer in buffers)
    scan = FoldScan(body, axes[0], targets, tuple(x.at(points(axes)) for x in xs))
    return Built(buffers, (Nest(axes[1:], (scan,)),))


def combined(
    module: GraphModule, dtypes: Sequence[DType], axes: tuple[Axis, ...], others: Sequence[Any]
) -> tuple[Expr, ...]:
    """What a combine makes of two slices of these dtypes over `axes`: expressions over arguments."""
    sizes = tuple(axis.extent for axis in axes)
    arguments: dict[Buffer, Argument] = {}
    for side in ("left", "right"):
        for number, dtype in enumerate(dtypes):
            # No tensor of a graph has a name with a space in it.
            buffer = Buffer(f"{side} {number}", dtype, sizes, contiguous_strides(sizes))
            arguments[buffer] = Argument(side, number, dtype)

    def name_argument(node: Expr) -> Expr | None:
        """left_0[i, j] -> a0, where it stands at the very element that is combined"""
        match node:
            case Load(buffer=buffer, index=place) if buffer in arguments and place == points(axes):
                return arguments[buffer]
        return None

    made = _run(module, [*map(of_buffer, arguments), *others])
    if [(tensor.sizes, tensor.dtype) for tensor in made] != [(sizes, dtype) for dtype in dtypes]:
        raise Unsupported("a combine whose results differ from what it takes")
    body = tuple(apply_rules(tensor.at(points(axes)), (name_argument,)) for tensor in made)
    for part in body:
        if any(isinstance(node, Load) and node.buffer in arguments for node in walk(part)):
            raise Unsupported("a combine that moves elements", why="eager calls it with many slices at once")
        if can_raise(part):
            raise Unsupported("a combine that can raise", why="eager combines other pairs")
    return body


def _run(module: GraphModule, given: Sequence[Any]) -> list[Tensor]:
    """The results of a graph, by the rows of its ops."""
    known: dict[Node, Any] = {}
    values = iter(given)
    for node in module.graph.nodes:
        match node.op:
            case "placeholder":
                known[node] = next(values)
            case "call_function":
                known[node] = _by_row(node, known)
            case "output":
                return [known[entry] for entry in node.args[0]]
            case _:
                raise Unsupported(f"a combine with a {node.op} node")
    raise Unsupported("a combine without results")


def _by_row(node: Node, known: Mapping[Node, Any]) -> Tensor:
    op: Any = node.target
    row = row_of(op)
    alike = op in ALIKE_EVERYWHERE or torch.Tag.pointwise in getattr(op, "tags", ())
    if row is None or row.wants_draw or not alike:
        raise Unsupported(f"{name_of(op)} in a combine", why="only what treats every element alike is taken along")
    args = torch.fx.map_arg(node.args, known.__getitem__)
    kwargs = dict(torch.fx.map_arg(node.kwargs, known.__getitem__))
    if row.wants_result:
        kwargs["result"] = _result(node, [known[argument] for argument in node.all_input_nodes])
    made = row.lower(*args, **kwargs)
    if not isinstance(made, Tensor):
        raise Unsupported(f"{name_of(op)} in a combine", why="it gives more than one tensor")
    return made


def _result(node: Node, operands: Sequence[Any]) -> Result:
    """What an op of a combine gives: as large as its operands together, or as large as it says."""
    fake = node.meta["val"]
    tensors = [operand for operand in operands if isinstance(operand, Tensor)]
    if not tensors and not all(isinstance(extent, int) for extent in fake.shape):
        raise Unsupported("a tensor of a run-time size that a combine makes")
    sizes = broadcast_sizes([tensor.sizes for tensor in tensors]) if tensors else tuple(map(index, fake.shape))
    return Result(sizes, contiguous_strides(sizes), dtype_of(fake.dtype), fake)
