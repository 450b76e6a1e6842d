"""Passes over the graph that Dynamo captured, before autograd, in the order in which they run.

A pass is one line of `PASSES`: what runs, the group that it belongs to, and whether it runs unless it is asked for.
Groups run in the order of `GROUPS`; `plan.py` says how the user's wishes come in. A pass `f(graph) -> int` may take
settings as keywords with defaults: `f(graph, *, least=10)`.
"""

from __future__ import annotations

from collections.abc import Callable
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
from ferrite.graph.pre_grad.drop_idle_dropout import drop_idle_dropout
from ferrite.graph.pre_grad.einsum_to_pointwise import einsum_to_pointwise
from ferrite.graph.pre_grad.fold_conv_bn import fold_conv_bn
from ferrite.graph.pre_grad.lift_quantise import lift_quantise
from ferrite.graph.pre_grad.normalise_keywords import normalise_keywords
from ferrite.graph.pre_grad.normalise_ops import normalise_ops
from ferrite.graph.pre_grad.remove_identity import remove_identity
from ferrite.graph.pre_grad.scale_conv_by_bn import scale_conv_by_bn
from ferrite.graph.pre_grad.sink_cat import sink_cat
from ferrite.graph.pre_grad.transpose_linear_input import transpose_linear_input
from ferrite.graph.pre_grad.transpose_linear_output import transpose_linear_output
from ferrite.graph.pre_grad.transpose_matmul import transpose_matmul

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
    """`default`: it runs unless it is disabled; else only if the option `pre_grad` names it."""

    run: Callable[..., int]
    group: str
    default: bool

    @property
    def name(self) -> str:
        return self.run.__name__


PASSES: tuple[PreGradPass, ...] = (
    PreGradPass(normalise_keywords, "keywords", default=True),
    PreGradPass(drop_idle_dropout, "clean", default=True),
    PreGradPass(remove_identity, "clean", default=True),
    PreGradPass(sink_cat, "device", default=False),
    PreGradPass(transpose_linear_output, "device", default=False),
    PreGradPass(transpose_linear_input, "device", default=False),
    PreGradPass(transpose_matmul, "device", default=False),
    PreGradPass(fold_conv_bn, "device", default=False),
    PreGradPass(normalise_ops, "operators", default=False),
    PreGradPass(batch_linear_lhs, "batch", default=False),
    PreGradPass(batch_linear, "batch", default=False),
    PreGradPass(batch_layernorm, "batch", default=False),
    PreGradPass(batch_tanh, "batch", default=False),
    PreGradPass(batch_sigmoid, "batch", default=False),
    PreGradPass(batch_relu, "batch", default=False),
    PreGradPass(batch_clamp, "batch", default=False),
    PreGradPass(batch_nan_to_num, "batch", default=False),
    PreGradPass(batch_detach, "batch", default=False),
    PreGradPass(batch_dropout, "batch", default=False),
    PreGradPass(einsum_to_pointwise, "patterns", default=False),
    PreGradPass(scale_conv_by_bn, "late", default=False),
    PreGradPass(lift_quantise, "quantise", default=True),
)
