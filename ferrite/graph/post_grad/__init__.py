"""Passes over a forward, backward or inference graph, after autograd; the order is the tuples.

`PREPARE` makes the graph safe to optimise and changes no value, so that nothing needs to be propagated after it;
`POST_GRAD` optimises; `MUTATE` comes last, when all values lie as they will, because only then may a graph write to
memory before its end.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import Graph

from ferrite.graph.post_grad.bias_after_product import bias_after_product
from ferrite.graph.post_grad.channels_last import channels_last
from ferrite.graph.post_grad.constrain_strides import constrain_strides
from ferrite.graph.post_grad.emit_deferred_asserts import emit_deferred_asserts
from ferrite.graph.post_grad.keep_saved_inputs import keep_saved_inputs
from ferrite.graph.post_grad.scalar_literals import scalar_literals
from ferrite.graph.post_grad.view_to_reshape import view_to_reshape
from ferrite.graph.post_grad.write_in_place import write_in_place

PREPARE: tuple[Callable[[Graph], int], ...] = (
    view_to_reshape, scalar_literals, keep_saved_inputs, emit_deferred_asserts,
)  # fmt: skip
POST_GRAD: tuple[Callable[[Graph], int], ...] = (channels_last, bias_after_product)
MUTATE: tuple[Callable[[Graph], int], ...] = (constrain_strides, write_in_place)
