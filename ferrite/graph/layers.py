"""Layers and batch norms of a Torch-level graph, the same whether functions or modules are called.

    F.conv2d(x, w, b, stride=2)    aten.conv2d.default(x, w, b, [2, 2])    self.conv(x)       a `Layer`
    F.batch_norm(y, mean, var)     aten.batch_norm.default(y, ...)         self.bn(y)         a `Norm`

A parameter is a node of the graph or, below a module, the path of what the module holds. A module is read only if a
call of it does what its type does: no hooks, no forward of its own, no subclass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.fx import Graph, Node
from torch.nn.modules.module import _has_any_global_hook

from ferrite.graph.arguments import bind
from ferrite.graph.query import attribute
from ferrite.graph.values import tensor_of

Parameter: TypeAlias = "Node | str"

CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")
TRANSPOSED = ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
NORMS = ("batch_norm", "nn.BatchNorm1d", "nn.BatchNorm2d", "nn.BatchNorm3d", "nn.SyncBatchNorm")

_LAYER_MODULES: dict[type, str] = {
    nn.Linear: "linear",
    nn.Conv1d: "conv1d", nn.Conv2d: "conv2d", nn.Conv3d: "conv3d",
    nn.ConvTranspose1d: "conv_transpose1d", nn.ConvTranspose2d: "conv_transpose2d",
    nn.ConvTranspose3d: "conv_transpose3d",
}  # fmt: skip
_NORM_MODULES = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_HELD = ("running_mean", "running_var", "weight", "bias")
_OPERANDS = ("input", "weight", "bias")


@dataclass(frozen=True)
class Layer:
    """A linear or a convolution. `function(input, weight, bias, **options)` is the same call."""

    node: Node
    kind: str
    function: Callable[..., Any]
    input: Node
    weight: Parameter
    bias: Parameter | None
    options: Mapping[str, Any]

    @property
    def channel_dim(self) -> int:
        """The dimension of the weight that counts the channels of the result."""
        return 1 if self.kind in TRANSPOSED else 0

    def has_channels_second(self) -> bool:
        """Whether the result's channels are its second dimension: not those of a linear on more than two dimensions or
        by one row, nor without a batch."""
        value, weight = tensor_of(self.node), tensor_behind(self.node.graph, self.weight)
        expected = 2 if self.kind == "linear" else 2 + int(self.kind[-2])
        return value is not None and weight is not None and (value.dim(), weight.dim()) == (expected, expected)


@dataclass(frozen=True)
class Norm:
    """A batch norm. `training`: what the program says, False only if it says so plainly."""

    node: Node
    input: Node
    mean: Parameter | None
    variance: Parameter | None
    weight: Parameter | None
    bias: Parameter | None
    training: Any
    eps: Any

    def objection(self) -> str | None:
        """Why it is no fixed scale and shift of each channel."""
        if self.training is not False:
            return f"{self.node.name} is in training"
        if self.mean is None or self.variance is None:
            return f"{self.node.name} has no running statistics"
        return None if type(self.eps) in (int, float) else f"eps of {self.node.name} is not a plain number"


def read_layer(node: Any) -> Layer | None:
    call = bind(node, "linear", *CONVOLUTIONS, *TRANSPOSED)
    if call is None:
        return _read_layer_module(node)
    operands = (call["input"], call["weight"])
    if (
        not all(isinstance(one, Node) for one in operands)
        or call.get("out") is not None
        or not _is_optional(call["bias"])
    ):
        return None
    options = {name: call[name] for name in call.arguments if name in call.given and name not in (*_OPERANDS, "out")}
    return Layer(node, call.kind, node.target, *operands, call["bias"], options)


def read_norm(node: Any) -> Norm | None:
    call = bind(node, "batch_norm")
    if call is None:
        return _read_norm_module(node)
    held = {name: call[name] for name in _HELD}
    if not isinstance(call["input"], Node) or not all(map(_is_optional, held.values())):
        return None
    return _norm(node, call["input"], held, call["training"], call["eps"])


def parameters(layer: Layer, norm: Norm) -> tuple[Parameter | None, ...]:
    """What a pair holds: the weight and bias of the layer, then the mean, variance, weight and bias of the norm."""
    return (layer.weight, layer.bias, norm.mean, norm.variance, norm.weight, norm.bias)


def tensor_behind(graph: Graph, parameter: Parameter | None) -> torch.Tensor | None:
    """The tensor of a parameter: fake for a node, real for what a module holds."""
    return attribute(graph.owning_module, parameter) if isinstance(parameter, str) else tensor_of(parameter)


def module_of(node: Any) -> nn.Module | None:
    """The module that a node calls."""
    if not isinstance(node, Node) or node._erased or node.op != "call_module" or node.graph.owning_module is None:
        return None
    found = attribute(node.graph.owning_module, str(node.target))
    return found if isinstance(found, nn.Module) else None


def is_plain(module: nn.Module) -> bool:
    """Whether a call of this module is a call of its type's forward, and nothing else."""
    hooked = any(getattr(module, name) for name in _HOOKS) or _has_any_global_hook()
    return not hooked and "forward" not in vars(module)


def _read_layer_module(node: Any) -> Layer | None:
    module = module_of(node)
    kind = _LAYER_MODULES.get(type(module))
    call = bind(node)
    if module is None or kind is None or call is None or not is_plain(module) or not isinstance(call["input"], Node):
        return None
    if call.get("output_size") is not None or getattr(module, "padding_mode", "zeros") != "zeros":
        return None
    names = ("stride", "padding", "dilation", "groups", *(("output_padding",) if kind in TRANSPOSED else ()))
    options = {name: getattr(module, name) for name in names} if kind != "linear" else {}
    weight, bias = (_held(node, module, name) for name in ("weight", "bias"))
    return Layer(node, kind, getattr(nn.functional, kind), call["input"], weight, bias, options) if weight else None


def _read_norm_module(node: Any) -> Norm | None:
    module, call = module_of(node), bind(node)
    if not isinstance(module, _NORM_MODULES) or type(module) not in _NORM_MODULES or not is_plain(module):
        return None
    if call is None or not isinstance(call["input"], Node):
        return None
    held = {name: _held(node, module, name) for name in _HELD}
    return _norm(node, call["input"], held, module.training, module.eps)


def _norm(node: Node, source: Node, held: Mapping[str, Any], training: Any, eps: Any) -> Norm:
    mean, variance, weight, bias = (held[name] for name in _HELD)
    return Norm(node, source, mean, variance, weight, bias, training, eps)


def _held(node: Node, module: nn.Module, name: str) -> str | None:
    return f"{node.target}.{name}" if getattr(module, name, None) is not None else None


def _is_optional(value: Any) -> bool:
    return value is None or isinstance(value, Node)
