"""Passes over the graph that Dynamo captured, before autograd, in the order in which they run.

A pass is one line of `PASSES`: what runs, the group that it belongs to, and whether it runs unless it is asked for.
Groups run in the order of `GROUPS`; `plan.py` says how the user's wishes come in. A pass `f(graph) -> int` may take
settings as keywords with defaults: `f(graph, *, least=10)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ferrite.graph.pre_grad.batch_clamp import batch_clamp
from ferrite.graph.pre_grad.batch_detach import batch_detach
from ferrite.graph.pre_grad.batch_dropout import batch_dropout
from ferrite.graph.pre_grad.batch_layernorm import batch_layernorm
from ferrite.graph.pre_grad.batch_linear import batch_linear
from ferrite.graph.pre_grad.batch_linear_lhs import batch_linear_lhs
from ferrite.graph.pre_grad.batch_nan_to_num import batch_nan_to_num
from ferrite.graph.pre_grad.batch_relu import batch_relu
from ferrite.graph.pre_grad.batch_sigmoid import batch_sigmoid
from ferrite.graph.pre_grad.batch_tanh import batch_tanh
from ferrite.graph.pre_grad.cat_of_items_to_slice import cat_of_items_to_slice
from ferrite.graph.pre_grad.chunk_reshape_cat import chunk_reshape_cat
from ferrite.graph.pre_grad.chunk_reshape_unsqueeze_cat import chunk_reshape_unsqueeze_cat
from ferrite.graph.pre_grad.drop_idle_dropout import drop_idle_dropout
from ferrite.graph.pre_grad.drop_unbind_joins import drop_unbind_joins
from ferrite.graph.pre_grad.drop_whole_splits import drop_whole_splits
from ferrite.graph.pre_grad.einsum_to_pointwise import einsum_to_pointwise
from ferrite.graph.pre_grad.fold_conv_bn import fold_conv_bn
from ferrite.graph.pre_grad.lift_quantise import lift_quantise
from ferrite.graph.pre_grad.merge_cats import merge_cats
from ferrite.graph.pre_grad.merge_nested_splits import merge_nested_splits
from ferrite.graph.pre_grad.merge_split_items import merge_split_items
from ferrite.graph.pre_grad.move_reshape_out_of_split_stack import move_reshape_out_of_split_stack
from ferrite.graph.pre_grad.normalise_arguments import normalise_arguments
from ferrite.graph.pre_grad.normalise_keywords import normalise_keywords
from ferrite.graph.pre_grad.normalise_ops import normalise_ops
from ferrite.graph.pre_grad.remove_identity import remove_identity
from ferrite.graph.pre_grad.remove_noops import remove_noops
from ferrite.graph.pre_grad.remove_splits import remove_splits
from ferrite.graph.pre_grad.scale_conv_by_bn import scale_conv_by_bn
from ferrite.graph.pre_grad.simplify_split_joins import simplify_split_joins
from ferrite.graph.pre_grad.sink_cat import sink_cat
from ferrite.graph.pre_grad.split_cat_to_slices import split_cat_to_slices
from ferrite.graph.pre_grad.split_squeeze_cat import split_squeeze_cat
from ferrite.graph.pre_grad.split_squeeze_to_unbind import split_squeeze_to_unbind
from ferrite.graph.pre_grad.split_stack_to_cats import split_stack_to_cats
from ferrite.graph.pre_grad.stack_to_unsqueeze import stack_to_unsqueeze
from ferrite.graph.pre_grad.transpose_linear_input import transpose_linear_input
from ferrite.graph.pre_grad.transpose_linear_output import transpose_linear_output
from ferrite.graph.pre_grad.transpose_matmul import transpose_matmul
from ferrite.graph.pre_grad.unbind_cat_to_view import unbind_cat_to_view
from ferrite.graph.pre_grad.unbind_stack_to_slices import unbind_stack_to_slices

GROUPS = (
    "keywords",  # one name for every keyword: before anybody else reads one
    "clean",  # what does nothing goes
    "device",  # where a cat, a permute or a batch norm stands, as the kernels of a device like it
    "operators",  # one form for every op
    "batch",  # many small ops become one
    "patterns",  # splits and cats, and other patterns; in the order that the user asks for
    "late",  # batch norm into trainable convolutions
    "quantise",  # after the user's passes and the sort
)


@dataclass(frozen=True)
class PreGradPass:
    """`default`: it runs unless it is disabled; else only if the option `pre_grad` names it. `devices`: the kinds of
    device that it is for, if not for all; it leaves a graph alone that has tensors anywhere else. `other_draws`: the
    setting with which it draws other random numbers than eager."""

    run: Callable[..., int]
    group: str
    default: bool
    devices: tuple[str, ...] | None = None
    other_draws: str | None = None

    @property
    def name(self) -> str:
        return self.run.__name__


# Devices whose products read a transposed matrix where it stands.
TRANSPOSING = ("cpu", "cuda", "mps", "xpu")

PASSES: tuple[PreGradPass, ...] = (
    PreGradPass(normalise_keywords, "keywords", default=True),
    PreGradPass(drop_idle_dropout, "clean", default=True),
    PreGradPass(remove_identity, "clean", default=True),
    PreGradPass(remove_noops, "clean", default=True),
    PreGradPass(merge_cats, "clean", default=True),
    PreGradPass(stack_to_unsqueeze, "clean", default=False),
    PreGradPass(sink_cat, "device", default=False),
    PreGradPass(transpose_linear_output, "device", default=False, devices=TRANSPOSING),
    PreGradPass(transpose_linear_input, "device", default=False, devices=TRANSPOSING),
    PreGradPass(transpose_matmul, "device", default=False, devices=TRANSPOSING),
    PreGradPass(fold_conv_bn, "device", default=False),
    PreGradPass(normalise_ops, "operators", default=False),
    PreGradPass(normalise_arguments, "operators", default=False),
    PreGradPass(batch_linear_lhs, "batch", default=False),
    PreGradPass(batch_linear, "batch", default=False),
    PreGradPass(batch_layernorm, "batch", default=False),
    PreGradPass(batch_tanh, "batch", default=False),
    PreGradPass(batch_sigmoid, "batch", default=False),
    PreGradPass(batch_relu, "batch", default=False),
    PreGradPass(batch_clamp, "batch", default=False),
    PreGradPass(batch_nan_to_num, "batch", default=False),
    PreGradPass(batch_detach, "batch", default=False),
    PreGradPass(batch_dropout, "batch", default=False, other_draws="other_masks"),
    PreGradPass(einsum_to_pointwise, "patterns", default=False),
    PreGradPass(drop_whole_splits, "patterns", default=True),
    PreGradPass(remove_splits, "patterns", default=False),
    PreGradPass(merge_split_items, "patterns", default=True),
    PreGradPass(merge_nested_splits, "patterns", default=True),
    PreGradPass(cat_of_items_to_slice, "patterns", default=True),
    PreGradPass(split_squeeze_to_unbind, "patterns", default=True),
    PreGradPass(simplify_split_joins, "patterns", default=True),
    PreGradPass(drop_unbind_joins, "patterns", default=True),
    PreGradPass(split_squeeze_cat, "patterns", default=False),
    PreGradPass(split_cat_to_slices, "patterns", default=False),
    PreGradPass(unbind_cat_to_view, "patterns", default=False),
    PreGradPass(split_stack_to_cats, "patterns", default=False),
    PreGradPass(unbind_stack_to_slices, "patterns", default=False),
    PreGradPass(move_reshape_out_of_split_stack, "patterns", default=False),
    PreGradPass(chunk_reshape_cat, "patterns", default=False),
    PreGradPass(chunk_reshape_unsqueeze_cat, "patterns", default=False),
    PreGradPass(scale_conv_by_bn, "late", default=False),
    PreGradPass(lift_quantise, "quantise", default=True),
)

_PRIVATE = (
    "blocks and kernels of a private package; what is public of them is empty, and small products are fused anyway"
)

_STACKED = "stack, tanh and unbind are one loop; a match across them gave wrong values elsewhere"

# Names that may be asked for and need no pass, and why.
IDLE: Mapping[str, str] = {
    "use_triton_dot_compress": _PRIVATE,
    "use_triton_lce_replace_simple_LCE": _PRIVATE,
    "use_triton_lce_replace_simple_LCE_helper": _PRIVATE,
    "use_triton_lce_replace_normal_LCE": _PRIVATE,
    "use_triton_lce_replace_normal_LCE_helper": _PRIVATE,
    "use_matmul_lce_replace_normal_LCE": _PRIVATE,
    "use_matmul_fuse_lce_replace_first_LCE": _PRIVATE,
    "merge_stack_tanh_unbind": _STACKED,
    "merge_stack_tahn_unbind_pass": _STACKED,  # as others spell it
    "relu_nan_to_num": "nan_to_num of relu is one loop",
    "fuse_split_linear_add_pass": "only its name is public; a section is a view that products read where it stands",
    "remove_reshape_pass": "only its name is public; what gives its input back is for remove_noops, the rest are views",
}
