"""Which aten ops are split before we see them, and why.

A row names an op that AOTAutograd replaces, while it traces, by its definition in simpler ops. Splitting costs a trace
of every part, so an op is split only where that says more than a row of `lower/` could; an op that runs in eager
anyway is better left whole: one library kernel, eager's rounding, fewer nodes to trace. So the own tables are used
only when ops are lowered at all; the option `decompose` adds rows by name.

`DECOMPOSED` names ops that PyTorch itself splits, and well: the parts give eager's bits (halves rounded where eager
rounds), strides and errors. `OWN` holds functions of ours, which may return NotImplemented to leave a call whole.
"""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

import torch
from torch._decomp import get_decompositions, global_decomposition_table
from torch._ops import OpOverload, OpOverloadPacket
from torch._prims_common import suggest_memory_format

from ferrite.graph.names import resolve

aten = torch.ops.aten

# (op, why it is split)
DECOMPOSED: tuple[tuple[str, str], ...] = (
    ("aten.tril_indices.default", "two parts, each a formula of the position; roots of whole squares are exact in f64"),
    ("aten.triu_indices.default", "as tril_indices"),
)


def decomposition_table(further: tuple[str, ...] = (), *, use_rows: bool = False) -> dict[Any, Callable[..., Any]]:
    """The table for AOTAutograd; raises RuntimeError for an op that does not exist or has no decomposition."""
    table: dict[Any, Callable[..., Any]] = dict(OWN) if use_rows else {}
    for name in (*(name for name, _ in DECOMPOSED if use_rows), *further):
        op = _op_named(name)
        found = get_decompositions([op]) if op is not None else None
        if not found:
            why = "there is no op" if op is None else "PyTorch has no decomposition of"
            valid = [*map(str, global_decomposition_table["post_autograd"])]
            usual = [near for near in (f"{name}.default", f"aten.{name}.default") if near in valid]
            nearest = usual or get_close_matches(name, valid, n=1, cutoff=0.5)
            hint = f". Did you mean {nearest[0]!r}?" if nearest else ""
            expected = "ops that PyTorch can split, as 'aten.gelu.default'"
            raise RuntimeError(f"Ferrite option 'decompose' expects {expected}: {why} {name!r}{hint}")
        table.update(found)
    return table


def _op_named(name: str) -> OpOverload | OpOverloadPacket | None:
    try:
        op = resolve(name)
    except (AttributeError, ImportError, ValueError, SyntaxError):
        return None
    return op if isinstance(op, (OpOverload, OpOverloadPacket)) else None


# ---- normalisations that PyTorch traces wrongly
#
# Halves beside f32 parameters: eager's kernels compute in f32 and keep statistics in f32, but PyTorch's fake kernels
# promise statistics (or gradients) of other dtypes: graphs would be wrong about what lies in memory, and backward
# would read rounded statistics. In f32 and back again is the same computation, with the dtypes of eager.
#
# Batch norm of strided tensors: eager gives a contiguous or channels-last tensor, the fake one keeps the strides.

_HALVES = (torch.float16, torch.bfloat16)


def _is_mixed(x: torch.Tensor, arguments: tuple[Any, ...]) -> bool:
    return x.dtype in _HALVES and any(isinstance(a, torch.Tensor) and a.dtype == torch.float32 for a in arguments)


def _made_in_f32(op: Any, x: torch.Tensor, arguments: tuple[Any, ...]) -> Any:
    """A norm of halves in f32, its results rounded: statistics have the dtype of the parameters, if there are any."""
    kept = torch.float32 if _is_mixed(x, arguments) else x.dtype
    wide = (a.float() if isinstance(a, torch.Tensor) else a for a in arguments)
    normal, mean, rstd, *running = op(x.float(), *wide)
    return (normal.to(x.dtype), mean.to(kept), rstd.to(kept), *running)


def _in_f32(op: Any) -> Callable[..., Any]:
    """norm(x, ...)  ->  norm(f32(x), ...), rounded"""

    def split(x: torch.Tensor, *arguments: Any) -> Any:
        return _made_in_f32(op, x, arguments) if _is_mixed(x, arguments) else NotImplemented

    return split


def _group_norm_backward_in_f32(grad: torch.Tensor, x: torch.Tensor, *arguments: Any) -> Any:
    """The gradients of weight and bias stay f32, as in eager; those of the other norms are promised rightly."""
    if not _is_mixed(x, arguments):
        return NotImplemented
    to_input, *others = aten.native_group_norm_backward.default(grad.float(), x.float(), *arguments)
    return (to_input if to_input is None else to_input.to(x.dtype), *others)


def _dense(x: torch.Tensor) -> torch.Tensor:
    """x as batch norms see it: contiguous or channels-last. The same tensor if it is so already."""
    return x.contiguous(memory_format=suggest_memory_format(x))


def _batch_norm(op: Any) -> Callable[..., Any]:
    """batch_norm(x, ...)  ->  batch_norm(dense(x), ...), in f32 where dtypes are mixed, or x is strided: for strided
    halves eager does not round what statistics are made of."""

    def split(x: torch.Tensor, *arguments: Any) -> Any:
        dense = _dense(x)
        if _is_mixed(x, arguments) or (dense is not x and x.dtype in _HALVES):
            return _made_in_f32(op, dense, arguments)
        return NotImplemented if dense is x else op(dense, *arguments)

    return split


def _batch_norm_backward(grad: torch.Tensor, x: torch.Tensor, *arguments: Any) -> Any:
    dense = _dense(x)
    return NotImplemented if dense is x else aten.native_batch_norm_backward.default(grad, dense, *arguments)


# ---- what PyTorch traces with another dtype than eager gives


def _huber_loss(x: torch.Tensor, target: torch.Tensor, how: int = 1, delta: float = 1.0) -> torch.Tensor:
    """Eager's loss has the dtype of x, whatever the target is of; tracing promotes both.

    huber_loss(x, target, how)  ->  huber_loss(wide x, wide target), in the dtype of x, and then its mean or sum
    """
    if x.dtype == target.dtype or not (x.is_floating_point() and target.is_floating_point()):
        return NotImplemented
    wide = torch.promote_types(x.dtype, target.dtype)
    loss = aten.huber_loss.default(x.to(wide), target.to(wide), 0, delta).to(x.dtype)
    return {1: torch.mean, 2: torch.sum}[how](loss) if how else loss


# ---- what PyTorch traces with other strides than eager gives


def _dropout_backward(grad: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """Tracing promises what a GPU gives, a result that lies contiguously or channels-last.

    native_dropout_backward(grad, mask, scale)  ->  grad * mask * scale
    """
    return aten.mul.Scalar(aten.mul.Tensor(grad, mask), scale)


OWN: dict[Any, Callable[..., Any]] = {
    aten.huber_loss.default: _huber_loss,
    aten.native_dropout_backward.default: _dropout_backward,
    aten.native_layer_norm.default: _in_f32(aten.native_layer_norm.default),
    aten.native_group_norm.default: _in_f32(aten.native_group_norm.default),
    aten.native_group_norm_backward.default: _group_norm_backward_in_f32,
    aten._native_batch_norm_legit_functional.default: _batch_norm(aten._native_batch_norm_legit_functional.default),
    aten._native_batch_norm_legit.no_stats: _batch_norm(aten._native_batch_norm_legit.no_stats),
    aten._native_batch_norm_legit_no_training.default: _batch_norm(aten._native_batch_norm_legit_no_training.default),
    aten.native_batch_norm_backward.default: _batch_norm_backward,
}
