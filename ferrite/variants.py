"""A graph that is called by hand is compiled again for what it was not compiled for.

Dynamo asks before each call whether numbers, flags and gradients are those of the trace; a caller that has a graph of
its own does not. What a trace makes a constant of is therefore a part of the key here: every argument that is no
tensor, by type and value, and of each tensor whether it needs a gradient and whether it is a subclass. Sizes, strides
and dtypes belong to the graph: what does not fit there raises (`check_inputs.py`).

Each key has a compiled graph of its own, up to `MOST`; for further ones the graph runs as it is, which is logged once.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from ferrite.errors import Unsupported
from ferrite.failure import FerriteError
from ferrite.graph.snapshot import copy_module

log = logging.getLogger(__name__)

MOST = 8  # compiled graphs of one graph


class Variants:
    """What a caller gets for a graph. `compile_one` may edit the graph that it is given."""

    def __init__(
        self, module: Any, inputs: Sequence[Any], compile_one: Callable[[Any, list[Any]], Any], *, strict: bool
    ) -> None:
        self._module, self._compile_one, self._strict = module, compile_one, strict
        self._sizes = [isinstance(leaf, torch.SymInt) for leaf in tree_leaves(list(inputs))]
        self._has_gradients = isinstance(module, torch.nn.Module) and any(p.requires_grad for p in module.parameters())
        self._lock = threading.Lock()
        self._is_logged = False
        self._made = {self._key(inputs): self._compiled(inputs)}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        key = self._key((*args, *kwargs.values()))
        made = self._made.get(key)
        if made is None:
            made = self._another(key, (*args, *kwargs.values()))
        return made(*args, **kwargs)

    def _another(self, key: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
        with self._lock:
            if key not in self._made and len(self._made) < MOST:
                self._made[key] = self._compiled(inputs)
            if key in self._made:
                return self._made[key]
        if self._strict:
            raise FerriteError("variants", Unsupported(f"more than {MOST} kinds of arguments that are no tensors"))
        if not self._is_logged:
            self._is_logged = True
            log.warning(
                "Ferrite has compiled a graph for %d kinds of arguments, and runs it in eager for others: pass numbers "
                "that change as tensors",
                MOST,
            )
        return self._module

    def _compiled(self, inputs: Sequence[Any]) -> Callable[..., Any]:
        module = copy_module(self._module) if isinstance(self._module, GraphModule) else self._module
        return self._compile_one(module, list(inputs))

    def _key(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        is_on = torch.is_grad_enabled()
        leaves = tree_leaves(list(inputs))
        sizes = self._sizes if len(self._sizes) == len(leaves) else [False] * len(leaves)
        parts = tuple(_part(leaf, is_on, is_size) for leaf, is_size in zip(leaves, sizes, strict=True))
        return (is_on and self._has_gradients, *parts)


def _part(leaf: Any, is_grad_on: bool, is_size: bool) -> Any:
    if type(leaf) in (torch.Tensor, torch.nn.Parameter):
        return is_grad_on and leaf.requires_grad
    if isinstance(leaf, torch.Tensor):
        return type(leaf), is_grad_on and leaf.requires_grad
    if is_size and isinstance(leaf, (int, torch.SymInt)):
        return "size"
    if leaf is None or isinstance(leaf, (bool, int, str, complex, torch.dtype, torch.device)):
        return type(leaf), leaf
    return (float, leaf.hex()) if isinstance(leaf, float) else (type(leaf), id(leaf))
