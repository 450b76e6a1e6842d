"""Names for the objects that a graph calls or passes along, and the objects behind the names.

Every operator, dtype, device, Python function and enum member that can stand in a captured graph has one dotted name,
so that programs print, compare, and load again without pickling code:

    aten.mm.default     higher_order.cond     operator.getitem     torch.float32     torch.device('cpu')

`name_of` and `resolve` are inverse to each other; an object without such a name gets None and stays a live object.
"""

from __future__ import annotations

import ast
import functools
import importlib
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

_MODULES = ("operator", "math", "builtins", "torch", "torch.nn.functional")
OF_TORCH = ("aten.", "prims.", "mkldnn.", "operator.")  # names of what computes, and does nothing else
_LASTING = frozenset({"aten", "builtins", "ferrite", "higher_order", "math", "operator", "prims", "torch"})
_ATOMS = (torch.dtype, torch.layout, torch.memory_format)


def name_of(thing: Any) -> str | None:
    """The dotted name of an outside object, or None if it has none."""
    if isinstance(thing, OpOverload):
        return str(thing)
    if isinstance(thing, HigherOrderOperator):
        return f"higher_order.{thing._name}"
    if isinstance(thing, OpOverloadPacket):
        return str(thing)
    if isinstance(thing, _ATOMS):
        return str(thing)
    if isinstance(thing, torch.device):
        return f"torch.device({str(thing)!r})"
    return _function_name(thing) if callable(thing) and _has_hash(thing) else None


def _has_hash(thing: Any) -> bool:
    """Classes of users may say anything; a weak reference has none once its object is gone."""
    try:
        hash(thing)
    except Exception:
        return False
    return True


@functools.lru_cache(maxsize=4096)
def _function_name(function: Callable[..., Any]) -> str | None:
    """`module.name` of a function that can be imported under exactly that name."""
    # Functions of torch's that are written in C are methods of a class that nobody can import.
    names = [getattr(function, "__qualname__", None), getattr(function, "__name__", None)]
    module = getattr(function, "__module__", None)
    for name in dict.fromkeys(names):
        for candidate in (module, *_MODULES):
            if not name or "<" in name or candidate is None:
                continue
            candidate = "operator" if candidate == "_operator" else candidate
            path = f"{candidate}.{name}"
            try:
                if resolve(path) is function:
                    return path
            except (ImportError, AttributeError):
                continue
    return None


def resolve(path: str) -> Any:
    """The object behind a name. Raises AttributeError or ImportError if there is none.

    An operator of a library may be defined again, and then the one that had the name is gone, with all that it points
    to: it is looked up each time."""
    head, _, rest = path.partition(".")
    if head not in _LASTING and not path.endswith(")") and hasattr(torch.ops, head):
        op = _operator(head, rest)
        if op is not None:
            return op
    return _resolve_lasting(path)


@functools.lru_cache(maxsize=4096)
def _resolve_lasting(path: str) -> Any:
    if path.endswith(")"):
        return _made_by_call(path)
    head, _, rest = path.partition(".")
    if head == "torch":
        return operator.attrgetter(rest)(torch)
    if head in ("operator", "math"):
        return getattr(operator if head == "operator" else math, rest)
    if head == "higher_order":
        return _higher_order(rest)
    if head in _LASTING and (op := _operator(head, rest)) is not None:
        return op
    module, _, name = path.rpartition(".")
    while module:
        try:
            return operator.attrgetter(name)(importlib.import_module(module))
        except ModuleNotFoundError:
            module, _, outer = module.rpartition(".")
            name = f"{outer}.{name}"
    raise AttributeError(f"nothing is called {path!r}")


def _operator(namespace: str, rest: str) -> Any:
    packet_name, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), packet_name, None)
    if packet is None:
        return None
    return getattr(packet, overload) if overload else packet


def _higher_order(name: str) -> Any:
    try:
        return getattr(torch.ops.higher_order, name)
    except AttributeError:
        # Some register themselves only when their module is imported.
        importlib.import_module("torch._higher_order_ops")
        return getattr(torch.ops.higher_order, name)


def _made_by_call(path: str) -> Any:
    """`torch.device('cpu')`: the one outside object that is made by a call with literal arguments."""
    call = ast.parse(path, mode="eval").body
    if isinstance(call, ast.Call) and ast.unparse(call.func) == "torch.device":
        return torch.device(*(ast.literal_eval(arg) for arg in call.args))
    raise AttributeError(f"nothing is called {path!r}")
