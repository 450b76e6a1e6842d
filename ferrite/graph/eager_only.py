"""Graphs that eager runs better than any compiler: nothing to compile, or a check that tracing would lose.

Asked once, of the graph that Dynamo captured, before AOTAutograd sees it.

    only views        x.expand(3, -1).t(): no memory is read or written. Under dynamic shapes AOTAutograd would rebuild
                      each view with `as_strided`, whose gradients have other strides.
    a refused write   x.logit_() of integers, take(x, i, out=f64): eager raises when the result does not fit. Tracing
                      turns the write into a plain op and a copy, and a copy converts anything.
    another dtype     soft_margin_loss(bf16, f32) is bf16 in eager and f32 by the rules of tracing: whoever reads the
                      result, or its gradient, as promised reads twice the memory that is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node, map_arg
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from ferrite.graph.effects import is_of_torch
from ferrite.graph.values import fake_mode_of


def reason_for_eager(module: Any, inputs: Sequence[Any] = ()) -> str | None:
    """Why this graph should run as it was captured; None if it should be compiled."""
    if any(isinstance(value, torch.Generator) for value in inputs):
        return "it draws from a generator that it is given, which no trace can"
    if not isinstance(module, GraphModule):
        return None
    calls = [node for node in module.graph.nodes if node.op in ("call_function", "call_method", "call_module")]
    for node in calls:
        if _is_refused_write(node):
            return f"{node.target} writes what eager refuses to convert"
        if _name(node) in _LIKE_FIRST and _is_traced_otherwise(node):
            return f"{node.target} is traced with another dtype than eager gives it"
    if calls and all(map(_is_pure, calls)) and _only_views(module, calls):
        return "it only makes views of its inputs"
    return None


# ---- dtypes

_LIKE_FIRST = frozenset({"soft_margin_loss"})  # what they give has the dtype of their first operand in eager


def _is_traced_otherwise(node: Node) -> bool:
    first = _fakes(node.args[0] if node.args else node.kwargs.get("input"))
    return isinstance(first, torch.Tensor) and any(made.dtype is not first.dtype for made in _tensors(node))


# ---- views


def _only_views(module: GraphModule, calls: list[Node]) -> bool:
    """Whether every tensor in the graph lies in the memory of an input."""
    given = {_memory(value) for node in module.graph.find_nodes(op="placeholder") for value in _tensors(node)}
    return all(_memory(value) in given for node in calls for value in _tensors(node))


def _is_pure(node: Node) -> bool:
    """Gives tensors, and changes none: a name with an underscore at its end would."""
    return any(True for _ in _tensors(node)) and not _name(node).endswith("_") and "out" not in node.kwargs


def _tensors(node: Node) -> Iterator[torch.Tensor]:
    for leaf in tree_leaves(node.meta.get("example_value")):
        if isinstance(leaf, torch.Tensor):
            yield leaf


def _memory(value: torch.Tensor) -> Any:
    """What tells the memory of one tensor from that of another; a tensor without a storage is only itself."""
    if value.layout is not torch.strided:
        return id(value)
    try:
        return StorageWeakRef(value.untyped_storage())
    except NotImplementedError:
        return id(value)


# ---- writes


def _is_refused_write(node: Node) -> bool:
    """Whether a call writes a result of a dtype that eager does not convert, or into memory that it also reads."""
    if "out" in node.kwargs:
        targets = [value for value in tree_leaves(_fakes(node.kwargs["out"])) if isinstance(value, torch.Tensor)]
        read = {_memory(value) for value in tree_leaves(_fakes(node.args)) if isinstance(value, torch.Tensor)}
        if any(_memory(target) in read for target in targets):
            return True
        plain = {key: value for key, value in node.kwargs.items() if key != "out"}
        results = _results(node, node.target, node.args, plain)
        return results is not None and [r.dtype for r in results] != [t.dtype for t in targets]
    name = _name(node)
    if not name.endswith("_") or name.endswith("__") or not node.args:
        return False
    target = _fakes(node.args[0])
    if not isinstance(target, torch.Tensor) or target.dtype.is_floating_point or target.dtype.is_complex:
        return False
    results = _results(node, getattr(torch.Tensor, name[:-1], None), node.args, node.kwargs)
    return results is not None and any(not torch.can_cast(r.dtype, target.dtype) for r in results)


def _results(node: Node, function: Any, args: Any, kwargs: Any) -> list[torch.Tensor] | None:
    """What a function gives for the fakes of its arguments; None if it cannot be asked: one of the user's is not called
    for that."""
    given = _fakes((args, kwargs))
    if not callable(function) or not is_of_torch(function):
        return None
    try:
        with torch.no_grad(), fake_mode_of(node.graph):
            made = function(*given[0], **given[1])
    except Exception:
        return None  # then tracing meets the same error, and tells it better
    return [leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)]


def _fakes(arguments: Any) -> Any:
    return map_arg(arguments, lambda node: node.meta.get("example_value"))


def _name(node: Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
