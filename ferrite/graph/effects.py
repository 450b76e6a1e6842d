"""What a call of a Torch-level graph does besides giving a value: which memory it writes, whether it draws random
numbers, whether it switches a mode. Not known means yes.
"""

from __future__ import annotations

import functools
import operator
import types
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.fx import GraphModule, Node

from ferrite.graph.arguments import bind, kind, nodes_in
from ferrite.graph.names import OF_TORCH
from ferrite.graph.query import attribute, written_arguments

_WRITING_OPERATORS = frozenset({
    operator.iadd, operator.iand, operator.iconcat, operator.ifloordiv, operator.ilshift, operator.imatmul,
    operator.imod, operator.imul, operator.ior, operator.ipow, operator.irshift, operator.isub, operator.itruediv,
    operator.ixor, operator.setitem, operator.delitem,
})  # fmt: skip
# Methods that change what a tensor is, not only what it holds: its fake value says what it is in the end.
_RESHAPING = frozenset({
    "resize_", "resize_as_", "set_", "unsqueeze_", "squeeze_", "transpose_", "t_", "swapaxes_", "swapdims_",
    "as_strided_", "detach_", "requires_grad_", "rename_", "sparse_resize_", "sparse_resize_and_clear_",
})  # fmt: skip
_STATISTICS = ("running_mean", "running_var")
_RANDOM_KINDS = frozenset({
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "bernoulli", "multinomial",
    "normal", "poisson", "binomial", "gumbel_softmax", "fractional_max_pool2d", "fractional_max_pool3d",
    "_sample_dirichlet", "_standard_gamma", "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_",
    "normal_", "random_", "uniform_", "multi_head_attention_forward", "lstm", "gru", "rnn_tanh", "rnn_relu",
})  # fmt: skip
_MODE_WORDS = ("set_", "enter", "exit", "seed", "_nesting", "push", "pop")
_MODE_NAMES = frozenset({"_set_grad_enabled", "_enter_autocast", "_exit_autocast", "set_rng_state", "get_rng_state"})


def written_by(node: Node) -> list[Node]:
    """The nodes whose memory a call may write, directly."""
    match node.op:
        case "call_function":
            return _written_by_function(node)
        case "call_method":
            return _written_by_method(node)
        case "call_module":
            return _written_by_module(node)
    return []


def reshapes(node: Node) -> list[Node]:
    """The nodes that a call gives other sizes, strides or memory, so that their fake values cannot be trusted."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return list(nodes_in(node.args[:1])) if node.op.startswith("call") and name in _RESHAPING else []


def is_random(node: Node) -> bool:
    """Whether a call draws from a random generator."""
    name = kind(node)
    if isinstance(node.target, OpOverload):
        return torch.Tag.nondeterministic_seeded in node.target.tags
    if isinstance(node.target, HigherOrderOperator):
        inside = any(is_random(inner) for body in _bodies(node) for inner in body.graph.nodes)
        return inside or "rng" in node.target.name()
    if name is None:
        return False
    if "dropout" in name or name.startswith(("rrelu", "nn.Dropout", "nn.RReLU")):
        call = bind(node)
        idle = call is not None and (call.get("training") is False or call.get("p") == 0)
        return not idle
    if name == "scaled_dot_product_attention":
        call = bind(node)
        return call is None or call["dropout_p"] != 0
    return name in _RANDOM_KINDS


def changes_mode(node: Node) -> bool:
    """Whether a call switches what later calls do: grad mode, autocast, a seed, a level of vmap."""
    return node.op == "call_function" and _function_changes_mode(node.target)


@functools.lru_cache(maxsize=4096)
def _function_changes_mode(target: Any) -> bool:
    name = getattr(target, "__name__", "")
    if isinstance(target, (OpOverload, OpOverloadPacket, HigherOrderOperator)) or target in (operator.setitem,):
        return False
    if name in _MODE_NAMES:
        return True
    return kind_of_module(target) != "operator" and any(word in name for word in _MODE_WORDS)


def is_of_torch(target: Any) -> bool:
    """Whether a call runs nothing of the user's: no operator of another library, no function from elsewhere. Operators
    that call graphs are PyTorch's; what the graphs call is asked of them."""
    if isinstance(target, (OpOverload, OpOverloadPacket)):
        return str(target).startswith(OF_TORCH)
    return kind_of_module(target) in ("torch", "operator", "math", "builtins")


@functools.lru_cache(maxsize=4096)
def kind_of_module(target: Any) -> str:
    """The first part of the module that a function comes from."""
    return (getattr(target, "__module__", None) or "torch").split(".")[0].lstrip("_")


def _written_by_function(node: Node) -> list[Node]:
    target = node.target
    if isinstance(target, OpOverload):
        # Some norms write their running statistics, and their schemas do not say so.
        return written_arguments(node) + (_written_by_arguments(node) if "_norm" in str(target) else [])
    if isinstance(target, OpOverloadPacket):
        mutable = "_norm" in str(target) or any(getattr(target, name)._schema.is_mutable for name in target.overloads())
        return list(nodes_in((node.args, node.kwargs))) if mutable else []
    if isinstance(target, HigherOrderOperator):
        return _written_by_higher_order(node)
    if target in _WRITING_OPERATORS:
        return list(nodes_in(node.args[:1]))
    if kind_of_module(target) in ("operator", "math", "builtins"):
        return []
    if kind_of_module(target) != "torch":
        return list(nodes_in((node.args, node.kwargs)))
    name = getattr(target, "__name__", "_")
    written = list(nodes_in(node.kwargs.get("out")))
    if _ends_in_one_underscore(name):
        # Private ones, such as the fused optimisers, write several arguments.
        written += nodes_in((node.args, node.kwargs) if name.startswith("_") else (node.args[:1] or node.kwargs))
    return written + _written_by_arguments(node)


def _written_by_arguments(node: Node) -> list[Node]:
    """What a call writes because of what it was given: `inplace`, running statistics, a norm to keep."""
    call = bind(node)
    if call is None:
        told = node.kwargs.get("inplace", False) is not False
        return list(nodes_in((node.args, node.kwargs))) if told or _may_take_inplace(node.target) else []
    written: list[Any] = []
    if call.get("inplace", False) is not False:
        written.append(call.get("input"))
    if call.kind.endswith("batch_norm") and call.get("training", False) is not False:
        written += [call.get(name) for name in _STATISTICS]
    if call.kind == "instance_norm" and call.get("use_input_stats") is not False:
        written += [call.get(name) for name in _STATISTICS]
    if call.kind in ("embedding", "embedding_bag") and call.get("max_norm") is not None:
        written.append(call.get("weight"))
    written += [call.get(name) for name in _written_by_schema(call.kind)]
    return list(nodes_in(written))


@functools.lru_cache(maxsize=4096)
def _may_take_inplace(target: Any) -> bool:
    return isinstance(target, types.FunctionType) and "inplace" in target.__code__.co_varnames


@functools.lru_cache(maxsize=4096)
def _written_by_schema(name: str) -> tuple[str, ...]:
    """Parameters that the plain overloads of an aten op write, as observers do."""
    packet = getattr(torch.ops.aten, name, None)
    if packet is None or _ends_in_one_underscore(name):
        return ()
    schemas = [getattr(packet, overload)._schema for overload in packet.overloads() if "out" not in overload]
    arguments = [entry for schema in schemas for entry in schema.arguments]
    return tuple({entry.name: None for entry in arguments if entry.alias_info and entry.alias_info.is_write})


def _written_by_method(node: Node) -> list[Node]:
    name = str(node.target)
    if not hasattr(torch.Tensor, name):
        return list(nodes_in((node.args, node.kwargs)))
    written = list(nodes_in(node.kwargs.get("out")))
    if _ends_in_one_underscore(name) or name in ("__setitem__", "__delitem__") or name.startswith("__i"):
        written += nodes_in(node.args[:1])
    return written


def _written_by_module(node: Node) -> list[Node]:
    root = node.graph.owning_module
    module = attribute(root, str(node.target)) if root is not None else None
    known = module is not None and type(module).__module__.startswith("torch.nn.modules")
    if not known or getattr(module, "inplace", False):
        return list(nodes_in((node.args, node.kwargs)))
    return []


def _written_by_higher_order(node: Node) -> list[Node]:
    operands = list(nodes_in((node.args, node.kwargs)))
    bodies = _bodies(node)
    if not bodies or "mutation" in node.target.name():
        return operands
    return operands if any(written_by(inner) for body in bodies for inner in body.graph.nodes) else []


def _bodies(node: Node) -> list[GraphModule]:
    """The graphs that a higher-order op runs."""
    root = node.graph.owning_module
    if root is None:
        return []
    operands = [entry for entry in nodes_in((node.args, node.kwargs)) if entry.op == "get_attr"]
    found = [attribute(root, str(entry.target)) for entry in operands]
    return [entry for entry in found if isinstance(entry, GraphModule)]


def _ends_in_one_underscore(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")
