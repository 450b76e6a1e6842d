"""Values that come to lie otherwise in memory, and everything behind them in the graph.

`relayout` walks a graph once. A caller may ask that an operand has a memory format, or strides: a copy is inserted, one
for all who ask for it. Whatever reads a value that moved gets a new fake value, and may move too. An op that may look
at strides (a custom op, unless its tag says that it does not, a function that control flow calls, `as_strided`,
attention) is handed a copy that lies as the trace had it; if it writes to that, so does a `copy_` to the original.
Every copy is a decision `layout copy` in the ledger of the graph.

Note [Marks]
    A node that lies otherwise than in the trace keeps the value that the trace had under `TRACED`, and one that reads
    such a node, or a copy that somebody wished for, is marked `READS_RELAID`. By these lowering gives an op that turns
    out to run in eager its operands as they lay, if it is none of those that take them in any layout.

Note [Follows]
    Sizes and dtypes stay, only strides change. To run an op on fake tensors for that takes 0.2 to 7 ms, so the results
    of ops that work on images (norms, pools, convolutions, everything pointwise) are simply said to lie in the order
    of what they read. Nothing can go wrong by it: a kernel of ours writes as it is told, and the result of an op that
    runs in eager is held to what was said.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch._library.utils import get_layout_constraint_tag
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_map_only

from ferrite.graph.query import is_view, memory_of, written_arguments
from ferrite.graph.strides import copy_with_strides, insert, note_copy, noted_strides, order_of, output_values
from ferrite.graph.values import evaluate, fake_mode_of, same_metadata

aten = torch.ops.aten

IMAGES = {4: torch.channels_last, 5: torch.channels_last_3d}  # by rank
Wish: TypeAlias = torch.memory_format | tuple[Any, ...]  # a format, or strides
Wanted: TypeAlias = Callable[[Node], Mapping[Node, Wish]]  # for operands of a node

TRACED = "traced_layout"  # the value of a node as the trace had it
READS_RELAID = "reads_relaid"  # an operand lies otherwise than in the trace

_STRIDES_MATTER = frozenset({
    aten.as_strided.default, aten.as_strided_.default, aten.as_strided_scatter.default, aten.resize.default,
    aten.resize_as.default, aten.view.default, aten.view.dtype, aten._unsafe_view.default,
    # The backward graph may be given such a number, and takes it for the one that the trace had.
    aten.sym_stride.int, aten.sym_stride.default, aten.sym_storage_offset.default, aten.sym_is_contiguous.default,
    # These take the last dimension for one that lies in a row, without a look.
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    aten.mkldnn_rnn_layer.default, aten.mkldnn_rnn_layer_backward.default,
    # Gradients that only eager computes: it may have written them for the strides that it sees itself.
    aten.grid_sampler_2d_backward.default, aten.grid_sampler_3d_backward.default,
    aten.fractional_max_pool2d_backward.default, aten.fractional_max_pool3d_backward.default,
    aten._upsample_bilinear2d_aa_backward.default, aten._upsample_bicubic2d_aa_backward.default,
})  # fmt: skip
_SAME = frozenset({aten.detach.default, aten.alias.default})
_FOLLOWS = frozenset({
    aten.convolution.default, aten.convolution_backward.default, aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit_no_training.default, aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit.no_stats, aten.native_batch_norm_backward.default, aten.native_group_norm.default,
    aten.native_group_norm_backward.default, aten.max_pool2d_with_indices.default,
    aten.max_pool2d_with_indices_backward.default, aten.max_pool3d_with_indices.default,
    aten.max_pool3d_with_indices_backward.default, aten.avg_pool2d.default, aten.avg_pool2d_backward.default,
    aten.avg_pool3d.default, aten.avg_pool3d_backward.default, aten._adaptive_avg_pool2d.default,
    aten._adaptive_avg_pool2d_backward.default, aten.adaptive_max_pool2d.default, aten.native_dropout.default,
    aten.cat.default, aten.constant_pad_nd.default,
    aten.upsample_nearest2d.vec, aten.upsample_bilinear2d.vec,
})  # fmt: skip
# Their results have sizes that only a run tells: a second fake value would have other symbols than the first.
_ONCE = frozenset({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output})


def relayout(graph: Graph, wanted: Wanted | None = None, moved: Mapping[Node, Any] | None = None) -> int:
    """Give operands what `wanted` names for a node; gives how many copies were made, those that undo it included.

    `moved`: nodes that lie otherwise than the trace had it already, with the value they had.
    """
    walk = _Walk(graph, moved or {})
    exposed = _exposed_views(graph)
    for node in list(graph.nodes):
        if node.op == "output":
            walk.restore_results(node)
        if node.op != "call_function":
            continue
        edited = False
        for source, wish in (wanted(node) if wanted else {}).items():
            if not lies_so(source.meta["val"], wish):
                walk.hand_copy(source, wish, node, f"{node.name} reads {_words(wish)}")
                edited = True
        touched = [source for source in node.all_input_nodes if source in walk.before]
        why = ""
        if touched:
            why = "is a view that the caller sees" if node in exposed else _why_as_traced(node, touched)
        if not why and (touched or edited):
            node.meta[READS_RELAID] = True
            why = walk.follow(node)
        if why:
            for source in touched:
                walk.hand_copy(source, None, node, f"{node.name} {why}")
    return walk.made


def _why_as_traced(node: Node, moved: Sequence[Node]) -> str:
    """Why a node has to read operands as they lay in the trace; nothing if it may read them as they lie now."""
    if looks_at_strides(node):
        return "may look at strides"
    written = written_arguments(node)
    return "writes to it" if node.target is not aten.copy_.default and any(s in written for s in moved) else ""


def _words(wish: Wish) -> str:
    return f"strides {list(wish)}" if isinstance(wish, tuple) else str(wish).removeprefix("torch.").replace("_", " ")


class _Walk:
    """What has moved so far, with the value it had, and the copies that were made: of a node as somebody wished, or,
    where the wish is None, as it lay before."""

    def __init__(self, graph: Graph, moved: Mapping[Node, Any]) -> None:
        assert isinstance(graph.owning_module, GraphModule)
        self.graph = graph
        self.module = graph.owning_module
        self.mode = fake_mode_of(graph)
        self.before: dict[Node, Any] = dict(moved)
        self.copies: dict[tuple[Node, Wish | None], Node] = {}
        self.made = 0

    def copy(self, source: Node, wish: Wish | None, reader: Node, why: str) -> Node:
        if (source, wish) not in self.copies:
            with self.graph.inserting_before(reader):
                if isinstance(wish, torch.memory_format):
                    made = insert(self.graph, aten.clone.default, (source,), {"memory_format": wish})
                else:
                    made = copy_with_strides(self.graph, source, wish or self.before[source].stride())
            self.copies[source, wish] = made
            self.made += 1
            note_copy(self.graph, source, why)
        return self.copies[source, wish]

    def hand_copy(self, source: Node, wish: Wish | None, reader: Node, why: str) -> None:
        """Let a node read a copy. What it writes is written to the original as well, and the copy is not read again."""
        made = self.copy(source, wish, reader, why)
        is_written = source in written_arguments(reader)
        reader.replace_input_with(source, made)
        if is_written:
            with self.graph.inserting_after(reader):
                insert(self.graph, aten.copy_.default, (source, made))
            for known in [key for key in self.copies if memory_of(key[0]) is memory_of(source)]:
                del self.copies[known]

    def follow(self, node: Node) -> str:
        """The node has an operand that moved: so may its result. Gives why it cannot be so."""
        old = node.meta.get("val")
        try:
            node.meta["val"] = _value(self.module, node, self.mode)
        except RuntimeError:  # what eager calls: it views an operand
            return "takes no other strides"
        if not same_metadata(old, node.meta["val"]):
            self.before[node] = old
            node.meta.setdefault(TRACED, old)
        return ""

    def restore_results(self, output: Node) -> None:
        """Results that the user sees lie as in eager; here, so that their views share memory with them. Of a graph that
        an op runs, all results do."""
        noted = noted_strides(self.graph)
        values = output_values(self.graph)
        for index, value in enumerate(values):
            if value in self.before and (noted is None or noted[index] is not None):
                values[index] = self.copy(value, None, output, "the caller sees it")
        given = output.args[0]
        output.args = (type(given)(values) if isinstance(given, (tuple, list)) else values[0],)


def _exposed_views(graph: Graph) -> set[Node]:
    """Views on the way from a result that the user sees back to the memory that it is part of."""
    found: set[Node] = set()
    for value, strides in zip(output_values(graph), noted_strides(graph) or (), strict=False):
        while strides is not None and isinstance(value, Node) and is_view(value) and value not in found:
            found.add(value)
            value = value.args[0]
    return found


def _value(module: GraphModule, node: Node, mode: FakeTensorMode) -> Any:
    """The fake value of a node whose operands lie otherwise than it knew. See Note [Follows]."""
    if node.target is operator.getitem:
        source, index = node.args
        return source.meta["val"][index]
    if node.target in _SAME:
        return node.args[0].meta["val"]
    if isinstance(node.target, OpOverload) and (node.target in _FOLLOWS or torch.Tag.pointwise in node.target.tags):
        orders = _orders(node)
        if not orders and node.target is aten.convolution_backward.default:
            return node.meta["val"]  # only the gradient that it reads has moved
        if orders:
            return tree_map_only(
                torch.Tensor, lambda value: _in_order(value, orders.get(value.dim()), mode), node.meta["val"]
            )
    return evaluate(module, node, mode)


def _orders(node: Node) -> dict[int, list[int]]:
    """For images of a rank, dimensions from the slowest to the fastest, as the operands of a node lie that are not
    simply contiguous; of several, the first. The backward of a convolution looks at image and weight alone."""
    orders: dict[int, list[int]] = {}
    for source in node.args[1:3] if node.target is aten.convolution_backward.default else node.all_input_nodes:
        value = source.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dim() not in IMAGES or value.layout != torch.strided:
            continue
        order = order_of(value.shape, value.stride())
        if 0 not in value.stride() and order != sorted(order):
            orders.setdefault(value.dim(), order)
    return orders


def _in_order(value: torch.Tensor, order: Sequence[int] | None, mode: FakeTensorMode) -> torch.Tensor:
    """A dense tensor of the same sizes, with dimensions in this order; None: the tensor as it is."""
    if order is None:
        return value
    strides: list[Any] = [0] * value.dim()
    step: Any = 1
    for dim in reversed(order):
        strides[dim] = step
        step = step * value.shape[dim]
    if all(isinstance(extent, int) for extent in (*value.shape, *strides)):
        # A fifth of the time that it takes through the mode.
        memory = torch.empty_strided(value.shape, strides, dtype=value.dtype, device="meta")
        return FakeTensor(mode, memory, value.device)
    with mode:
        return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)


def adopt_inputs(graph: Graph, values: Iterable[Any]) -> int:
    """Inputs lie as `values` do, not as the trace had it: a forward pass may save activations in a layout of its own.
    Gives how many do."""
    moved: dict[Node, Any] = {}
    for node, value in zip(graph.find_nodes(op="placeholder"), values, strict=False):
        traced = node.meta.get("val")
        if isinstance(traced, torch.Tensor) and isinstance(value, torch.Tensor) and not same_metadata(traced, value):
            node.meta["val"] = value
            node.meta[TRACED] = moved[node] = traced
    if moved:
        relayout(graph, moved=moved)
    return len(moved)


def lie_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of the same sizes have their elements at the same places: what a dimension of one has for a
    stride does not matter."""
    if one.layout != torch.strided:
        return True
    steps = zip(one.shape, one.stride(), other.stride(), strict=True)
    return all(str(a) == str(b) for size, a, b in steps if str(size) != "1")


def as_traced(node: Node) -> Any:
    """The fake value of a node, lying as it did in the trace."""
    return node.meta.get(TRACED, node.meta.get("val"))


def lies_so(value: Any, wish: Wish) -> bool:
    """Whether a tensor lies as wished already, without asking a size that is a symbol."""
    if isinstance(wish, tuple):
        return list(map(str, value.stride())) == list(map(str, wish))
    order = [0, *range(2, value.dim()), 1] if wish in IMAGES.values() else range(value.dim())
    step = 1
    for dim in reversed(order):
        if str(value.stride(dim)) != str(step):
            return False
        step = step * value.shape[dim]
    return True


def convolves_grouped_volumes(node: Node) -> bool:
    """oneDNN's gradient of such a weight is ten times as far from the exact one if the image lies channels last."""
    if node.target not in (aten.convolution.default, aten.convolution_backward.default):
        return False
    value, groups = node.meta["val"], node.args[-1 if node.target is aten.convolution.default else -2]
    image = value if isinstance(value, torch.Tensor) else node.args[0].meta["val"]
    return groups != 1 and image.dim() == 5


def looks_at_strides(node: Node) -> bool:
    target = node.target
    if convolves_grouped_volumes(node):
        return True
    if not isinstance(target, OpOverload):
        return target is not operator.getitem
    if get_layout_constraint_tag(target) != torch.Tag.flexible_layout:
        return True
    return target in _STRIDES_MATTER or not _ONCE.isdisjoint(target.tags)
