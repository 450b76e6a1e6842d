"""Rows of inner buffers that start at cache lines: which buffers get a longer stride, and why others do not.

    relu: f32[64, 1000]  ->  f32[64, 1000].stride(1008, 1)          with the option `padding`

The rule: rows that are no whole number of lines of 64 bytes get a gap up to the next line, or up to the one behind it
where they would become whole pages of 4096 bytes, if that is at most a sixteenth of a row. The length of rows has to be
known; how many there are may change.

`refusals` walks a graph backwards and says of values that they lie as traced: results of the graph, and what these are
views of; what is written to; what an op reads that runs in eager (convolutions, custom ops, whatever has no row) or
that may look at strides; operands of products of halves. What such an op reads is dense, whoever makes it. So is what
that was made from, back to a reduction or a product: a chain of dense values is one flat loop, and gaps would cut it
into rows. `tears_rows` looks for views that would then be copies. Every buffer is a decision `padding`.

Only kernels of ours write with gaps: what a library or eager gives lies as it likes. What is saved for the backward is
a result here: it lives for long, and gaps are memory.

It was not seen to pay. Processor time with gaps by that without, one thread, f32, a Zen with AVX2, medians of 15
interleaved rounds on a machine with nothing else to do (quartiles); y is m rows of n, made from x @ w:

    relu(x @ w) @ v                 512 x 1000  1.08 (1.02-1.11)        64 x 4090  1.06 (1.02-1.10)
    softmax(x @ w) @ v              512 x 1000  0.98 (0.96-1.02)
    y.t().contiguous(), y @ v       512 x 1000  1.00 (1.00-1.03)
    y.sum(0), y.amax(0), y @ v      512 x 1000  1.02 (1.00-1.04)
    y.t() @ y                       512 x 1000  0.98 (0.97-1.01)        512 x 1001  0.96 (0.91-1.02)
    bmm(y, y.transpose(1, 2))       8 x 64 x 1000  1.01 (0.98-1.05)

What is lost is a place: a kernel writes over its operand only if both lie alike, which the relu above does without gaps
and does not with them. The following was measured beside other work, and says less. Products alone, with gaps in one
operand or both, took 0.96 to 1.04 of the time (64 to 512 rows of 250 to 4095). A gap of one line after rows of 1024 to
4096, which start at the same place of a page, gave 0.92 to 1.02 for products alone, but 0.96 to 1.08 for the graphs
above, so whole lines are left alone. `y.t().contiguous()` of 64 rows of 4090 took 1.31 of its time with a stride of
4096, and 1.00 with 4112. Products of bf16, which this machine has no instructions for, took 2.2 times as long with gaps
in the second operand; those of other halves were not tried.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.fx import Graph, Node

from ferrite.errors import Unsupported
from ferrite.graph.names import name_of
from ferrite.graph.query import is_view, tensors, written_arguments
from ferrite.graph.relayout import looks_at_strides
from ferrite.graph.strides import REALISED, output_values
from ferrite.loops.index import ONE, ZERO, Index, constant, divides, multiply, product
from ferrite.loops.nodes import Buffer
from ferrite.loops.shapes import is_contiguous
from ferrite.lower.captured import KEEPS_ITS_PROMISE, is_empty, why_in_eager
from ferrite.lower.sizes import Sizes

aten = torch.ops.aten

Place: TypeAlias = tuple[Node, int | None]  # a value: a node, or one of several that it gives

LINE, PAGE = 64, 4096  # bytes
SHARE = 16  # a gap is at most this part of a row

# Ops that read no element, and the write that is a kernel.
_READ_ANYTHING = frozenset({operator.getitem, aten.sym_size.int, aten.sym_numel.default, aten.copy_.default})
_PRODUCTS = KEEPS_ITS_PROMISE
_ROW_LOOKS = frozenset({aten.nll_loss2d_backward.default})  # at strides: eager raises for some
_WHOLE = frozenset({torch.float32, torch.float64})


# ---- who wants what dense


def refusals(graph: Graph, has_row: Callable[[Any], bool]) -> dict[Place, str]:
    """Of each value that has to lie as traced, why. `has_row`: whether an op becomes loops."""
    found: dict[Place, str] = {}
    spreading: dict[Node, str] = {}  # nodes that lead to an op that wants its operands dense, and which op that is

    def refuse(value: Node, why: str) -> Node:
        """The node that makes the memory of a value."""
        for place in _memory(value):
            found.setdefault(place, why)
        return place[0]

    for node in reversed(graph.nodes):
        if node.op == "output":
            for value in output_values(graph):
                if isinstance(value, Node):
                    refuse(value, "it is a result of the graph")
        if node.op != "call_function":
            continue
        if node.meta.get(REALISED):
            refuse(node, "a pass asks for its strides")
        for value in written_arguments(node):
            refuse(value, f"{node.name} writes to it")
        why = wants_dense(node, has_row)
        for value in node.all_input_nodes:
            if why is not None:
                maker = refuse(value, f"{node.name} reads it: {why}")
                reader = node.name
            elif node in spreading and not _is_reduction(_maker(value)):
                reader = spreading[node]
                maker = refuse(value, f"it leads to {reader}, which reads dense values")
            else:
                continue
            if not _is_reduction(maker):
                spreading.setdefault(maker, reader)
    return found


def wants_dense(node: Node, has_row: Callable[[Any], bool]) -> str | None:
    """Why what a node reads has to lie as traced; None if it may lie otherwise."""
    if node.op != "call_function" or node.target in _READ_ANYTHING:
        return None
    if node.target in _ROW_LOOKS or looks_at_strides(node):
        return "it may look at strides"
    name = name_of(node.target) or node.name
    made = [*tensors(node)]
    if made and all(map(is_empty, made)) and not is_view(node):
        return "its result has no elements"
    if name in _PRODUCTS:
        return None if node.meta["val"].dtype in _WHOLE else "a product of halves"
    return None if has_row(node.target) else why_in_eager(name)


def _is_reduction(node: Node) -> bool:
    if node.op != "call_function":
        return False
    return torch.Tag.reduction in getattr(node.target, "tags", ()) or name_of(node.target) in _PRODUCTS


def _maker(value: Node) -> Node:
    """The node that makes the memory of a value."""
    *_, (node, _) = _memory(value)
    return node


def _memory(value: Node) -> Iterator[Place]:
    """A value and what it is a view of, down to what has the memory."""
    while True:
        part = None
        if value.target is operator.getitem and isinstance(value.args[0], Node):
            value, part = value.args
        yield value, part
        if not is_view(value) or not isinstance(value.args[0], Node):
            return
        value = value.args[0]


# ---- how rows lie


def choose_strides(
    place: Place, buffer: Buffer, refused: Mapping[Place, str], sizes: Sizes
) -> tuple[tuple[Index, ...] | None, str]:
    """Strides with gaps for the buffer of a value, or None; and why. `refused`: what `refusals` found."""
    strides, why = padded_strides(buffer.sizes, buffer.strides, buffer.dtype.bytes)
    if strides is None:
        return None, why
    if place in refused:
        return None, refused[place]
    view = tears_rows(place, buffer.sizes[-1].constant, sizes)
    return (strides, why) if view is None else (None, f"{view.name} reads it across the ends of rows")


def padded_strides(
    sizes: Sequence[Index], strides: Sequence[Index], bytes: int
) -> tuple[tuple[Index, ...] | None, str]:
    """Strides of a buffer of elements of so many bytes with gaps between rows, or None; and why."""
    if len(sizes) < 2 or product(sizes[:-1]) is ONE:
        return None, "it is one row"
    if ZERO in sizes:
        return None, "it has no elements"
    if not is_contiguous(sizes, strides):
        return None, "it does not lie row after row"
    if sizes[-1].terms:
        return None, "the length of its rows changes"
    row = sizes[-1].constant * bytes
    gap = -row % LINE
    if not gap:
        return None, f"its rows are {row // LINE} whole lines"
    if (row + gap) % PAGE == 0:
        gap += LINE
    if gap * SHARE > row:
        return None, f"its rows of {row} bytes are too short for gaps of {gap}"
    steps, step = [ONE], constant((row + gap) // bytes)
    for extent in reversed(sizes[:-1]):
        steps.append(step)
        step = multiply(step, extent)
    return tuple(reversed(steps)), f"gaps of {gap} bytes after rows of {row}"


def tears_rows(place: Place, row: int, sizes: Sizes) -> Node | None:
    """A view of a value that has a dimension across the ends of its rows: with gaps there it would be a copy, or a loop
    with divisions."""
    waiting = [user for user in place[0].users if place[1] is None or user.args[1:] == (place[1],)]
    while waiting:
        node = waiting.pop()
        if node.target is not operator.getitem and not is_view(node):
            continue
        if not all(_keeps_rows(view, row, sizes) for view in tensors(node) if _is_part(view, place)):
            return node
        waiting += node.users
    return None


def _is_part(view: torch.Tensor, place: Place) -> bool:
    """Whether it shares memory with a value. A reshape may be a copy."""
    made = place[0].meta["val"] if place[1] is None else place[0].meta["val"][place[1]]
    return torch._C._is_alias_of(view, made)


def _keeps_rows(view: torch.Tensor, row: int, sizes: Sizes) -> bool:
    """Whether each dimension of a view steps within a row or from row to row."""
    try:
        extents, strides = sizes.indices(view.shape), sizes.indices(view.stride())
        start = sizes.index(view.storage_offset())
    except Unsupported:
        return False
    inside = [pair for pair in zip(extents, strides, strict=True) if not divides(row, pair[1])]
    if any(number.terms for pair in inside for number in pair):
        return False
    last = sum((extent.constant - 1) * stride.constant for extent, stride in inside)
    first = start.constant % row if divides(row, start - start.constant) else row
    return first + last < row
