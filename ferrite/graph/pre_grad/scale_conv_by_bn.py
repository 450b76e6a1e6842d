"""A batch norm outside training only scales and shifts channels: the layer in front of it can do that.

    x: f32[2, 3, 8, 8], w: f32[4, 3, 3, 3], b: f32[4], mean: f32[4], var: f32[4], gain: f32[4], shift: f32[4]
    F.batch_norm(F.conv2d(x, w, b, stride=2), mean, var, gain, shift)
    ->  scale = (var + 1e-05).rsqrt() * gain; bias = (b - mean) * scale + shift;
        F.conv2d(x, w * scale.view([-1, 1, 1, 1]), bias, stride=2)

The scaled weight is computed in the graph, in every call, so all parameters go on training; the input of the batch norm
is no longer kept for the backward (arXiv 2305.11624).

Results are rounded in other places than eager's, so it runs only if it is asked for. Pairs of constants that
`fold_conv_bn` has folded have no batch norm left to be found here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from ferrite.graph.arguments import find
from ferrite.graph.layers import (
    NORMS,
    TRANSPOSED,
    Layer,
    Norm,
    Parameter,
    parameters,
    read_layer,
    read_norm,
    tensor_behind,
)
from ferrite.graph.soundness import Soundness
from ferrite.graph.values import tensor_of

_HALVES = (torch.float16, torch.bfloat16)


def scale_conv_by_bn(graph: Graph) -> int:
    sound = Soundness(graph)
    for node in find(graph, *NORMS):
        _scale(sound, node)
    return sound.rewrites


def _scale(sound: Soundness, node: Node) -> None:
    norm = read_norm(node)
    layer = read_layer(norm.input) if norm is not None else None
    if norm is None or layer is None:
        return

    def build(new: Any) -> Node:
        return _build(new, layer, norm)

    sound.rewrite(node, build, objection=sound.only_user(layer.node, node) or _objection(layer, norm))


def _objection(layer: Layer, norm: Norm) -> str | None:
    if reason := norm.objection():
        return reason
    if not layer.has_channels_second():
        return f"the channels of {layer.node.name} are not its second dimension"
    if layer.kind in TRANSPOSED and layer.options.get("groups", 1) != 1:
        return f"{layer.node.name} has groups, each with a scale of its own"
    graph = layer.node.graph
    statistics = [tensor_behind(graph, one) for one in (norm.mean, norm.variance)]
    if any(tensor is not None and tensor.requires_grad for tensor in statistics):
        return f"the statistics of {norm.node.name} ask for gradients, which eager refuses"
    tensors = [tensor_behind(graph, one) for one in parameters(layer, norm) if one is not None]
    tensors += [tensor_of(layer.input), tensor_of(layer.node)]
    found = {tensor.dtype if tensor is not None else None for tensor in tensors}
    if None in found:
        return f"a parameter of {layer.node.name} or {norm.node.name} has no fake value"
    names = sorted(str(dtype).removeprefix("torch.") for dtype in found)
    return None if len(names) == 1 else f"{layer.node.name} and {norm.node.name} hold {' and '.join(names)}"


def _build(new: Any, layer: Layer, norm: Norm) -> Node:
    half = tensor_of(layer.node).dtype in _HALVES  # type: ignore[union-attr]

    def read(parameter: Parameter) -> Node:
        """The value of a parameter; halves are computed with in f32, as eager's batch norm does."""
        node = new.attribute(parameter) if isinstance(parameter, str) else parameter
        return new("float", node) if half else node

    def narrow(node: Node) -> Node:
        return new("to", node, tensor_of(layer.node).dtype) if half else node  # type: ignore[union-attr]

    assert norm.mean is not None
    assert norm.variance is not None
    scale = new("rsqrt", new(torch.add, read(norm.variance), norm.eps))
    scale = scale if norm.weight is None else new(torch.mul, scale, read(norm.weight))
    mean = read(norm.mean)
    shift = new(torch.neg, mean) if layer.bias is None else new(torch.sub, read(layer.bias), mean)
    shift = new(torch.mul, shift, scale)
    shift = shift if norm.bias is None else new(torch.add, shift, read(norm.bias))
    weight = read(layer.weight)
    column = [1] * tensor_of(weight).dim()  # type: ignore[union-attr]
    column[layer.channel_dim] = -1
    weight = new(torch.mul, weight, new("view", scale, column))
    return new(layer.function, layer.input, narrow(weight), narrow(shift), **layer.options)
