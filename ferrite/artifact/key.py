"""Everything that a compiled result depends on, field by field, as text; the key is the digest of it.

A key is made before any pass has run, so a hit skips them too: what passes do follows from the graph, the options and
the sources of Ferrite, which are all in it. Two keys are compared field by field to say why a lookup missed
(`ferrite.cache.explain`). What the result would depend on and what has no text (a Python function of the user's, an
operator in C++) is `Unsupported`: such a graph is not cached.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_leaves

from ferrite.artifact.constants import is_plain, store_tensors
from ferrite.errors import Unsupported
from ferrite.graph.names import name_of
from ferrite.graph.query import family, source_line
from ferrite.graph.text import show_graph, show_type
from ferrite.identity import BUILT_IN_OPERATORS, VERSIONED_PACKAGES, identity_of_operator, namespace_of

Fields = dict[str, str]

# Functions that may stand in a graph: their meaning is part of PyTorch's version, of Python's, or of the package's own.
_KNOWN_MODULES = ("torch", "operator", "math", "builtins")
_WITH_TEXT = (Node, slice, str, int, float, complex, type(None))
# Higher-order operators. Of the first, what PyTorch would store is code of the user's; the second do nothing but run
# the graphs that they are given, which are in the key. Of others PyTorch knows whether they may be stored.
_NOT_STORED = frozenset({"autograd_function_apply", "flex_attention", "flex_attention_backward", "register_hook",
                         "triton_kernel_wrapper_functional", "triton_kernel_wrapper_mutation"})  # fmt: skip
_RUN_GRAPHS = frozenset({"associative_scan", "cond", "map_impl", "scan", "strict_mode", "while_loop", "wrap",
                         "wrap_activation_checkpoint", "wrap_with_autocast", "wrap_with_set_grad_enabled"})  # fmt: skip


MOST_HELD = 1 << 20  # bytes of one tensor that a graph holds; its digest is made at each look-up


def digest(fields: Mapping[str, str]) -> str:
    """The key: hexadecimal, the same in every process for the same fields."""
    whole = hashlib.sha256()
    for name in sorted(fields):
        for part in (name, fields[name]):
            data = part.encode()
            whole.update(len(data).to_bytes(8, "little"))
            whole.update(data)
    return whole.hexdigest()


def fields_of(module: GraphModule, options: Mapping[str, str], passes: str) -> Fields:
    """The key of a captured graph. `options` as text; `passes`: the identity of what users registered.

    Raises `Unsupported` with the reason if the graph cannot be stored.
    """
    return {
        "graph": "\n".join(_graph_lines(module)),
        "held": "\n".join(_held_lines(module)),
        "operators": "\n".join(_operator_lines(module)),
        "inputs": "\n".join(_input_lines(module.graph)),
        "state": "\n".join((*_guarded_lines(), *settings_lines())),
        "options": show_options(options),
        "passes": passes,
        **fields_of_machine(),
    }


def show_options(options: Mapping[str, str]) -> str:
    return "\n".join(f"{name} = {text}" for name, text in sorted(options.items()))


def fields_of_machine() -> Fields:
    """The part of a key that is not about the graph: what compiles it, and where it runs."""
    from ferrite.native.target import host, llvm_version  # LLVM is loaded by the first graph that may have kernels

    target = host()
    return {
        "ferrite": source_digest(),
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "python": f"{sys.implementation.cache_tag} {getattr(sys, 'abiflags', '')}",  # how its objects lie in memory
        "llvm": llvm_version(),
        "cpu": f"{target.triple} {target.cpu}\n{target.features}",
    }


# ---- the graph


def _graph_lines(module: GraphModule, name: str = "graph") -> Iterator[str]:
    yield from _checkpoint_lines(module, name)
    for node in module.graph.nodes:
        yield from _check_node(module, node)
        custom = node.meta.get("custom")
        if custom:
            yield f"{name} {node.name} custom {custom!r}"
    yield show_graph(module.graph, name)
    for node in module.graph.find_nodes(op="get_attr"):
        inner = getattr(module, node.target)
        if isinstance(inner, GraphModule):
            yield from _graph_lines(inner, node.target)


def _operator_lines(module: GraphModule) -> list[str]:
    """Those of users, with digests of what they do."""
    return [f"{operator} {identity_of_operator(operator)}" for operator in operators_of_users(module)]


def operators_of_users(module: GraphModule) -> list[OpOverload | OpOverloadPacket]:
    """Those that a graph and the graphs in it name, in order."""
    leaves = (
        leaf
        for _, member in family(module)
        for node in member.graph.nodes
        for leaf in (node.target, *tree_leaves((node.args, node.kwargs)))
        if isinstance(leaf, (OpOverload, OpOverloadPacket)) and is_of_user(leaf)
    )
    return sorted(set(leaves), key=str)


def is_of_user(operator: OpOverload | OpOverloadPacket) -> bool:
    """Whether neither PyTorch's version nor that of a package says what it does."""
    return namespace_of(operator) not in (*BUILT_IN_OPERATORS, *VERSIONED_PACKAGES)


def sources_of(module: GraphModule) -> tuple[str, ...]:
    """The user's lines, node by node. They are no part of the key: what stands above a function may change."""
    nested = (getattr(module, node.target) for node in module.graph.find_nodes(op="get_attr"))
    return tuple(source_line(node) for node in module.graph.nodes) + tuple(
        line for inner in nested if isinstance(inner, GraphModule) for line in sources_of(inner)
    )


def held_by(module: GraphModule) -> dict[str, torch.Tensor]:
    """The parameters and buffers of a graph: AOTAutograd makes them its first inputs, in this order."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def _held_lines(module: GraphModule) -> Iterator[str]:
    """They are read in each call, as inputs are; but passes may look at their values, so those are in the key."""
    for name, tensor in held_by(module).items():
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) or not is_plain(tensor.detach()):
            raise Unsupported(f"the graph holds a tensor that is not plain: {name}")
        if tensor.untyped_storage().nbytes() > MOST_HELD:
            raise Unsupported(f"the graph holds a large tensor: {name}")
        stored = store_tensors({name: tensor.detach()})[name]
        marks = f"{type(tensor).__name__} {tensor.requires_grad} {tensor.is_leaf}"
        yield f"{name}: {show_type(tensor)} {marks} {hashlib.sha256(stored.data).hexdigest()}"


def _checkpoint_lines(module: GraphModule, name: str) -> Iterator[str]:
    """If a function of the user's chooses what is saved: it has no text, but may have the digest that PyTorch wants."""
    chooser = module.meta.get("_checkpoint_context_fn")
    if chooser is None:
        return
    told = getattr(chooser, "cache_hash", None)
    if told is None:
        raise Unsupported("a function without a cache_hash chooses what a checkpoint saves")
    yield f"{name} saves by {told!r}"


def _check_node(module: GraphModule, node: Node) -> Iterator[str]:
    """The versions of what it calls, where PyTorch's does not say it. Raises `Unsupported` for what has no text."""
    match node.op:
        case "call_module":
            raise Unsupported(f"the graph calls a module: {node.target}")
        case "get_attr":
            inner = getattr(module, node.target, None)
            if not isinstance(inner, GraphModule) and node.target not in held_by(module):
                raise Unsupported(f"the graph holds an object: {node.target}")
        case "call_function":
            name = name_of(node.target)
            if name is None:
                raise Unsupported(f"the graph calls {node.target}, whose meaning may change")
            yield from _versions(node.target, name, "calls")
    for leaf in tree_leaves((node.args, node.kwargs)):
        if isinstance(leaf, _WITH_TEXT) or leaf is Ellipsis:
            continue
        name = name_of(leaf)
        if name is None:
            raise Unsupported(f"{node.name} takes a {type(leaf).__name__}")
        yield from _versions(leaf, name, "passes on")


def _versions(thing: Any, name: str, does: str) -> Iterator[str]:
    """What its meaning depends on beside PyTorch and Python. Raises `Unsupported` if nobody knows."""
    package = name.partition(".")[0]
    if package in VERSIONED_PACKAGES:
        version = getattr(sys.modules.get(package), "__version__", None)
        known = version is not None
        yield f"{package} {version}"
    elif isinstance(thing, HigherOrderOperator):
        known = thing._name in _RUN_GRAPHS or (thing._name not in _NOT_STORED and thing.cacheable())
    elif isinstance(thing, (OpOverload, OpOverloadPacket)):
        known = True  # see `_operator_lines`
    else:
        known = package in _KNOWN_MODULES
    if not known:
        raise Unsupported(f"the graph {does} {name}, whose meaning may change")


# ---- inputs and the state of the process


def _input_lines(graph: Graph) -> Iterator[str]:
    storages: dict[int, int] = {}  # who shares memory with whom
    symbols: dict[str, str] = {}
    for position, node in enumerate(graph.find_nodes(op="placeholder")):
        if "example_value" not in node.meta:
            raise Unsupported("the graph does not come from Dynamo, whose guards watch over inputs")
        value = node.meta["example_value"]
        if isinstance(value, torch.Tensor):
            _refuse_tensor(node, value)
            storage = value.untyped_storage()._cdata
            shared = storages.setdefault(storage, position)
            told = node.meta.get("tensor_dict", {})  # attributes of the real tensor
            marks = [
                "parameter" if isinstance(value, torch.nn.Parameter) else "",
                "gradient" if value.requires_grad else "",
                "" if value.is_leaf else "made",
                f"shares {shared} at {value.storage_offset()}" if shared != position else "",
                f"static {kind}" if (kind := told.get("_dynamo_static_input_type")) else "",
                "conj" if value.is_conj() else "",
                "neg" if value.is_neg() else "",
                "of inference mode" if value.is_inference() else "",
            ]
            yield " ".join((f"{position}: {show_type(value)} {value.device}", *filter(None, marks)))
            extents: Sequence[Any] = (*value.shape, *value.stride(), value.storage_offset())
        elif isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            yield f"{position}: {show_type(value)}"
            extents = (value,)
        elif value is None or isinstance(value, (bool, int, float)):
            yield f"{position}: {value!r}"
            extents = ()
        else:
            raise Unsupported(f"input {node.name} is a {type(value).__name__}")
        for extent in extents:
            if isinstance(extent, torch.SymInt):
                for symbol in extent.node.expr.free_symbols:
                    symbols[str(symbol)] = str(extent.node.shape_env.bound_sympy(symbol))
    for name in sorted(symbols):
        yield f"{name} in {symbols[name]}"


def _refuse_tensor(node: Node, value: torch.Tensor) -> None:
    if not isinstance(value, FakeTensor) or value.layout != torch.strided or value.device.type != "cpu":
        raise Unsupported(f"input {node.name} is no plain tensor on the CPU")


def _guarded_lines() -> Iterator[str]:
    """Switches of PyTorch that steer what is traced, and that Dynamo's guards watch over."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        raise Unsupported("hooks on saved tensors are active")
    yield f"gradients {torch.is_grad_enabled()}, inference mode {torch.is_inference_mode_enabled()}"
    yield f"autocast {torch.is_autocast_enabled('cpu')} {torch.get_autocast_dtype('cpu')}"
    yield f"default dtype {torch.get_default_dtype()}"


def settings_lines() -> Iterator[str]:
    """Further ones, which steer which kernel of a library runs: a process sets them once."""
    yield (
        f"deterministic {torch.are_deterministic_algorithms_enabled()} "
        f"{torch.is_deterministic_algorithms_warn_only_enabled()} {torch.utils.deterministic.fill_uninitialized_memory}"
    )
    yield f"oneDNN {torch._C._get_mkldnn_enabled()} {torch.backends.mkldnn.deterministic}"
    yield f"float32 products {torch.get_float32_matmul_precision()}"
    attention = torch.backends.cuda
    yield (
        f"attention {attention.flash_sdp_enabled()} {attention.mem_efficient_sdp_enabled()} "
        f"{attention.math_sdp_enabled()} {attention.cudnn_sdp_enabled()}"
    )
    yield f"autograd {torch._functorch.config.get_hash().hex()}"
    yield f"tag {torch.compiler.config.cache_key_tag!r}"


@cache
def source_digest() -> str:
    """Of all sources of Ferrite, since any of them may change what is made."""
    return digest_of_sources(Path(__file__).parents[1])


def digest_of_sources(package: Path) -> str:
    whole = hashlib.sha256()
    for name, path in _sources_below(str(package), ""):
        with open(path, "rb", buffering=0) as file:
            whole.update(name.encode())
            whole.update(hashlib.sha256(file.read()).digest())
    return whole.hexdigest()


def _sources_below(folder: str, prefix: str) -> Iterator[tuple[str, str]]:
    """Names and paths, in order. Every process does this: with `pathlib` it took twice as long, 12 ms."""
    with os.scandir(folder) as found:
        for entry in sorted(found, key=lambda entry: entry.name):
            if entry.is_dir():
                yield from _sources_below(entry.path, f"{prefix}{entry.name}/")
            elif entry.name.endswith(".py"):
                yield prefix + entry.name, entry.path
