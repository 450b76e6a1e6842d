"""How the operands of an op that runs in eager must lie, where passes have laid some otherwise than the trace.

Kernels of libraries look at strides: some demand a layout, some choose between two by one operand and read another by
it. Given operands as they lay in the trace they do what they do without a compiler. So only ops that are known to take
operands in any layout are handed others: those of `ANY_LAYOUT`, views, and custom ops whose tag says so.
`python -m tests.eager_kernels` runs the kernels of PyTorch in mixed layouts, and a test compares what it finds with the
lists here.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node

from ferrite.graph.effects import is_of_torch
from ferrite.graph.query import is_view
from ferrite.graph.relayout import IMAGES, READS_RELAID, TRACED, as_traced, lie_alike, lies_so
from ferrite.graph.values import same_metadata

aten = torch.ops.aten

# Ops that take operands in any layout, all of one or each in its own, and are worth calling so.
ANY_LAYOUT = frozenset({
    operator.getitem, aten.copy_.default, aten.clone.default, aten._to_copy.default, aten.copy.default,
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.linear.default,
    aten.mv.default, aten.dot.default,
    aten.convolution.default, aten.convolution_backward.default,
    aten.max_pool2d_with_indices.default, aten.avg_pool2d.default, aten._adaptive_avg_pool2d.default,
    aten.upsample_nearest2d.vec, aten.upsample_bilinear2d.vec, aten.cat.default, aten.constant_pad_nd.default,
})  # fmt: skip

# Kernels that are wrong or raise, in eager too, where these operands lie in two layouts, or are channels last but for a
# stride in a dimension of one. They are given one layout, which the last operand chooses.
ONE_LAYOUT: dict[Any, tuple[int, ...]] = {
    aten.native_batch_norm_backward.default: (0, 1),
    aten.native_group_norm.default: (0,),
    aten.native_group_norm_backward.default: (0, 1),
}
# Of these, what raises for an image that lies in neither format: a user who calls it so is told.
REFUSES_OTHERS = frozenset({aten.native_group_norm.default})


def layouts_wanted(node: Node) -> Mapping[Node, torch.Tensor]:
    """The operands of an op in eager whose layout is prescribed, as fake tensors that lie so."""
    wanted: dict[Node, torch.Tensor] = {}
    if READS_RELAID in node.meta and not _takes_any_layout(node):
        for source in node.all_input_nodes:
            traced = source.meta.get(TRACED)
            if isinstance(traced, torch.Tensor) and not same_metadata(source.meta["val"], traced):
                wanted[source] = traced
    together = [source for place in ONE_LAYOUT.get(node.target, ()) if isinstance(source := node.args[place], Node)]
    if together:
        layout = format_of(as_traced(together[-1]))
        if layout is None and node.target not in REFUSES_OTHERS:
            layout = torch.contiguous_format
        if layout is not None:
            wanted |= {source: torch.empty_like(source.meta["val"], memory_format=layout) for source in together}
    return wanted


def format_of(image: torch.Tensor) -> torch.memory_format | None:
    """The format that an image lies in, whatever the strides of dimensions of one are."""

    def lies_in(format: torch.memory_format) -> bool:
        return lies_so(image, format) or lie_alike(image, torch.empty_like(image, memory_format=format))

    formats = (torch.contiguous_format, IMAGES.get(image.dim()))
    return next((each for each in formats if each is not None and lies_in(each)), None)


def _takes_any_layout(node: Node) -> bool:
    """An operator of a library says it by its tag: of those without it, `relayout` has not moved an operand."""
    is_custom = isinstance(node.target, OpOverload) and not is_of_torch(node.target)
    return is_custom or node.target in ANY_LAYOUT or is_view(node)
