"""Many layer norms of one form are one, without weights, on the stack; the stacks of weights and biases come after.

    x: f32[5, 2, 3], w: f32[5, 3]
    x, w = x.unbind(), w.unbind(); torch.cat([F.layer_norm(a, (3,), b) for a, b in zip(x, w)])
    ->  x, w = x.unbind(), w.unbind(); torch.cat((F.layer_norm(torch.stack(x, 1), (3,)) * torch.stack(w)).unbind(1))

The stack is made right before the dimensions that are normalised, where weights line up by themselves. Halves are
computed in f32 from the mean to the bias and rounded once, as one layer norm does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Graph, Node
from torch.nn import functional

from ferrite.graph.arguments import bind, is_finite, is_ints
from ferrite.graph.build import Builder
from ferrite.graph.pre_grad.batch import Limits, Member, Rule, batch, limited, sized, strides, unbind
from ferrite.graph.soundness import Soundness
from ferrite.graph.values import tensor_of

_HALVES = (torch.float16, torch.bfloat16)


@limited()
def batch_layernorm(graph: Graph, limits: Limits) -> int:
    return batch(graph, LAYER_NORM, limits)


def _read(sound: Soundness, node: Node) -> Member | str | None:
    call = bind(node, "layer_norm")
    if call is None or not is_ints(call["normalized_shape"]) or not is_finite(call["eps"]):
        return None
    affine = {name: call[name] for name in ("weight", "bias") if call[name] is not None}
    operands = (call["input"], *affine.values())
    if reason := sound.has_values(*operands):
        return reason
    shape = tuple(call["normalized_shape"])
    options = {"shape": shape, "eps": float(call["eps"]), "affine": tuple(affine)}
    return Member(node, operands, (strides(node), *map(sized, operands), *options.values()), options)


def _fuse(new: Builder, members: Sequence[Member]) -> Sequence[Node]:
    options = members[0].options
    inputs, *affine = zip(*(member.operands for member in members), strict=True)
    value = tensor_of(inputs[0])
    assert value is not None
    dim = value.dim() - len(options["shape"])
    whole = new(torch.stack, list(inputs), dim=dim)
    widens = bool(affine) and value.dtype in _HALVES
    if widens:
        whole = new("to", whole, torch.float32)
    whole = new(functional.layer_norm, whole, options["shape"], eps=options["eps"])
    for name, column in zip(options["affine"], affine, strict=True):
        parameters = new(torch.stack, list(column), dim=0)
        if widens:
            parameters = new("to", parameters, torch.float32)
        whole = new(torch.mul if name == "weight" else torch.add, whole, parameters)
    if widens:
        whole = new("to", whole, value.dtype)
    return unbind(new, whole, dim)


LAYER_NORM = Rule(("layer_norm",), _read, _fuse)
