"""A convolution and the batch norm behind it are one convolution, if nothing they hold changes any more.

    x: f32[2, 3, 8, 8], conv: nn.Conv2d(3, 4, 3), bn: nn.BatchNorm2d(4), weight: f32[4, 3, 3, 3], bias: f32[4]
    torch.relu(bn(conv(x)))
    ->  torch.relu(F.conv2d(x, weight, bias, stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=1))

The weights are scaled and the bias is shifted here, once, on a copy that the graph's module holds besides; the user's
parameters stay as they are. The same pair called twice is folded once.

What the graph holds counts as constant: parameters below a module it calls, and what its `get_attr` nodes read. In a
graph of Dynamo's the parameters are inputs, which may be others in the next call, and the pass says so and does nothing
there. Whoever knows them to be frozen must make them attributes first, or leave the fold to the constants that are
found after autograd. Attributes, too, are constant only to somebody who no longer trains: it runs only if it is asked
for. The pass is to be on where a graph is frozen; there is no option that freezes one, so by default it is off, and an
option that comes must ask for it. Measured by `python -m bench.pre_grad` on two cores (two runs of 9 rounds): 0.99x and
1.03x, since the batch norm is one pass over memory that the cache still holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Graph, GraphModule, Node

from ferrite.graph.arguments import find
from ferrite.graph.layers import CONVOLUTIONS, NORMS, Layer, Norm, module_of, parameters, read_layer, read_norm
from ferrite.graph.query import attribute
from ferrite.graph.soundness import Soundness

Key: TypeAlias = tuple[Any, ...]


def fold_conv_bn(graph: Graph) -> int:
    if graph.owning_module is None:
        return 0  # nothing holds constants
    folding = _Folding(graph)
    for node in find(graph, *NORMS):
        folding.fold(node)
    return folding.sound.rewrites


class _Folding:
    """One run over one graph: who reads which constant, and what was folded already."""

    def __init__(self, graph: Graph) -> None:
        self.sound = Soundness(graph)
        self._root = graph.owning_module
        self._folded: dict[Key, tuple[torch.Tensor, torch.Tensor]] = {}
        # Read before anything is folded: a pair that is gone was no stranger to its twin.
        self._pairs = dict(self._keys_of_pairs())
        self._readers: dict[int, list[Node]] = {}
        for node, tensor in self._reads():
            self._readers.setdefault(_memory(tensor), []).append(node)

    def fold(self, node: Node) -> None:
        pair = _pair(node)
        if pair is None or node not in self._pairs:
            return  # a second norm behind one that was folded now: another run finds it
        layer, norm = pair

        def build(new: Any) -> Node:
            weight, bias = self._fold(node, layer, norm)
            operands = new.constant(weight, "folded_weight"), new.constant(bias, "folded_bias")
            return new(layer.function, layer.input, *operands, **layer.options)

        self.sound.rewrite(node, build, objection=self._objection(node, layer, norm))

    def _objection(self, node: Node, layer: Layer, norm: Norm) -> str | None:
        if reason := norm.objection() or self.sound.only_user(layer.node, node) or self.sound.without_grad(node):
            return reason
        module = module_of(layer.node)
        if module is not None and module.training:
            return f"{layer.node.target} is in training"
        if not layer.has_channels_second():
            return f"the channels of {layer.node.name} are not its second dimension"
        held = [parameter for parameter in parameters(layer, norm) if parameter is not None]
        reasons = (self._varies(parameter) or self._shared(parameter, node) for parameter in held)
        return next((reason for reason in reasons if reason is not None), None)

    def _varies(self, parameter: Any) -> str | None:
        tensor = self._constant(parameter)
        if tensor is None:
            return f"{parameter.name} is not a constant of the graph, but a value of op {parameter.op}"
        plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.device.type != "meta"
        return None if plain and tensor.is_floating_point() else f"{parameter} holds no plain numbers"

    def _shared(self, parameter: Any, node: Node) -> str | None:
        tensor = self._constant(parameter)
        assert tensor is not None
        others = (one for one in self._readers[_memory(tensor)] if self._pairs.get(one) != self._pairs[node])
        other = next(others, None)
        return f"{parameter} is also read by {other.name}" if other is not None else None

    def _fold(self, node: Node, layer: Layer, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
        key = self._pairs[node]
        if key not in self._folded:
            self._folded[key] = _scaled(*map(self._constant, parameters(layer, norm)), eps=float(norm.eps))
        return self._folded[key]

    def _constant(self, parameter: Any) -> torch.Tensor | None:
        """The real tensor that a parameter is in every call."""
        if isinstance(parameter, Node):
            found = attribute(self._root, str(parameter.target)) if parameter.op == "get_attr" else None
            return found if isinstance(found, torch.Tensor) else None
        return attribute(self._root, parameter) if parameter is not None else None

    def _keys_of_pairs(self) -> Iterator[tuple[Node, Key]]:
        """Both nodes of every pair, with what says that two pairs are the same."""
        for node in find(self.sound.graph, *NORMS):
            pair = _pair(node)
            if pair is None:
                continue
            layer, norm = pair
            key = (*(id(self._constant(one)) for one in parameters(layer, norm)), norm.eps, norm.training)
            yield node, key
            if self.sound.only_user(layer.node, node) is None:
                yield layer.node, key

    def _reads(self) -> Iterator[tuple[Node, torch.Tensor]]:
        """Every node that reads a tensor that the graph's module holds."""
        for node in self.sound.graph.nodes:
            if node.op == "call_module":
                yield from ((node, tensor) for tensor in _state(attribute(self._root, str(node.target))))
            if node.op != "get_attr":
                continue
            held = attribute(self._root, str(node.target))
            tensors = [held] if isinstance(held, torch.Tensor) else _state(held)
            yield from ((user, tensor) for tensor in tensors for user in node.users)


def _pair(node: Node) -> tuple[Layer, Norm] | None:
    norm = read_norm(node)
    layer = read_layer(norm.input) if norm is not None else None
    return (layer, norm) if layer is not None and norm is not None and layer.kind in CONVOLUTIONS else None


def _state(held: Any) -> list[torch.Tensor]:
    return [*held.parameters(), *held.buffers()] if isinstance(held, (nn.Module, GraphModule)) else []


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _scaled(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    variance: torch.Tensor,
    gain: torch.Tensor | None,
    shift: torch.Tensor | None,
    *,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The folded weight and bias, in the dtype of the convolution; each number is rounded to it once."""
    with torch.no_grad(), unset_fake_temporarily():
        scale = (variance.double() + eps).rsqrt()
        scale = scale if gain is None else scale * gain.double()
        moved = (-mean.double() if bias is None else bias.double() - mean.double()) * scale
        moved = moved if shift is None else moved + shift.double()
        wide = torch.promote_types(weight.dtype, torch.float32)
        column = scale.to(wide).view(-1, *[1] * (weight.dim() - 1))
        return (weight.to(wide) * column).to(weight.dtype), moved.to(weight.dtype)
