"""One form for the ops that tensors are taken apart and put together with.

    x: f32[2, 8]
    x.split(3, -1)  ->  torch.split(x, [3, 3, 2], dim=1)
    torch.concat([x, x], -1)  ->  torch.cat([x, x], dim=1)
    x.reshape(4, -1)  ->  torch.reshape(x, shape=[4, 4])
    x.clamp(0)  ->  torch.clamp(x, min=0)

A split of any spelling (a size, sections, chunks) is a function with its sections, which are measured from what it
gives and must add up; a cat, stack or unbind is a function with its dimension counted from the front. Sizes that vary
and calls without a fake value stay as they are; so does a `tensor_split` whose parts are written or returned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from ferrite.graph.arguments import Call, bind, find, is_int, is_ints, kind, positive_dim
from ferrite.graph.pieces import SPLITS, read_split, read_unbind
from ferrite.graph.soundness import Soundness
from ferrite.graph.values import tensor_of, value_of

Form = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def normalise_ops(graph: Graph) -> int:
    sound = Soundness(graph)
    for node in find(graph, *_FORMS):
        form = None if isinstance(node.target, OpOverload) else _FORMS[str(kind(node))](node)
        if form is None or value_of(node) is None or form == (node.target, node.args, node.kwargs):
            continue
        if reason := sound.keeps_form(node, *node.all_input_nodes) or _may_be_written(sound, node):
            sound.refuse(node, reason)
        else:
            sound.respell(node, *form)
    return sound.rewrites


def _may_be_written(sound: Soundness, node: Node) -> str | None:
    """Autograd lets nobody write a part of a split, but it does let a part of `tensor_split` be written."""
    return sound.written_after(node) or sound.returned(node) if kind(node) == "tensor_split" else None


def _split(node: Node) -> Form | None:
    split = read_split(node)
    return (torch.split, (split.source, list(split.sizes)), {"dim": split.dim}) if split is not None else None


def _unbind(node: Node) -> Form | None:
    unbind = read_unbind(node)
    return (torch.unbind, (unbind.source,), {"dim": unbind.dim}) if unbind is not None else None


def _join(node: Node) -> Form | None:
    """The dimension counts in the result: a cat may hold the legacy empty tensor of one dimension."""
    call, result = bind(node), tensor_of(node)
    if call is None or result is None or not isinstance(call["tensors"], (list, tuple)):
        return None
    dim = positive_dim(call["dim"], result.dim())
    if dim is None or not all(isinstance(part, Node) for part in call["tensors"]):
        return None
    return getattr(torch, call.kind), (list(call["tensors"]),), {"dim": dim} | _out(call)


def _squeeze(node: Node) -> Form | None:
    call = bind(node)
    source = tensor_of(call["input"]) if call is not None else None
    if call is None or source is None:
        return None
    dim = call["dim"]
    if dim is None:
        return torch.squeeze, (call["input"],), {}
    dims = [positive_dim(one, source.dim()) for one in (dim if isinstance(dim, (list, tuple)) else [dim])]
    if not is_ints(dims):
        return None
    return torch.squeeze, (call["input"],), {"dim": dims if isinstance(dim, (list, tuple)) else dims[0]}


def _reshape(node: Node) -> Form | None:
    call, result = bind(node), tensor_of(node)
    if call is None or result is None or not is_int(*result.shape) or not is_ints(call["shape"]):
        return None
    return torch.reshape, (call["input"],), {"shape": list(result.shape)}


def _clamp(node: Node) -> Form | None:
    call = bind(node)
    if call is None:
        return None
    bounds = {name: call[name] for name in ("min", "max") if call[name] is not None}
    return torch.clamp, (call["input"],), bounds | _out(call)


def _detach(node: Node) -> Form | None:
    call = bind(node)
    return (torch.detach, (call["input"],), {}) if call is not None else None


def _out(call: Call) -> dict[str, Any]:
    return {"out": call["out"]} if call.get("out") is not None else {}


_FORMS: dict[str, Callable[[Node], Form | None]] = {
    **dict.fromkeys(SPLITS, _split),
    "unbind": _unbind,
    "cat": _join,
    "stack": _join,
    "squeeze": _squeeze,
    "reshape": _reshape,
    "clamp": _clamp,
    "detach": _detach,
}
