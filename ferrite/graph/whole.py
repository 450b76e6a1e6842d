"""Keeps ops whole that PyTorch would split while it traces.

For upsampling, PyTorch has definitions in Python that replace the op before any decomposition table is asked: what is
left are positions from data, one gather for each neighbour, and scatters for the gradient. `kept_whole` takes these
definitions away for the time of a trace, so that the graph has `upsample_nearest2d` and its backward; rows of
`lower/resample.py` know that a doubled size reads o // 2. The backward ops get shapes for symbolic sizes, which they
lack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._C import DispatchKey
from torch._decomp.decompositions import upsample_compute_output_size
from torch._prims_common import suggest_memory_format

aten = torch.ops.aten

# (op, whether it takes align_corners, whether its backward keeps the memory format of the gradient)
UPSAMPLING = (
    ("upsample_nearest1d", False, False),
    ("upsample_nearest2d", False, True),
    ("upsample_nearest3d", False, False),
    ("_upsample_nearest_exact1d", False, False),
    ("_upsample_nearest_exact2d", False, True),
    ("_upsample_nearest_exact3d", False, False),
    ("upsample_linear1d", True, False),
    ("upsample_bilinear2d", True, True),
    ("upsample_trilinear3d", True, True),
    ("upsample_bicubic2d", True, False),
)
SPLITTING = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)


@contextmanager
def kept_whole() -> Iterator[None]:
    """While this is active, upsampling reaches a trace as one op."""
    saved: dict[Any, dict[Any, Any]] = {}

    def change(op: Any, kernels: dict[Any, Any]) -> None:
        saved.setdefault(op, dict(op.py_kernels))
        for key in SPLITTING:
            op.py_kernels.pop(key, None)
        op.py_kernels.update(kernels)
        op._dispatch_cache.clear()

    try:
        for name, corners, keeps_format in UPSAMPLING:
            packet = getattr(aten, name)
            change(packet.default, {})
            change(packet.vec, dict.fromkeys(SPLITTING, _by_sizes(packet.default, corners)))
            backward = getattr(aten, f"{name}_backward").default
            change(backward, {DispatchKey.Meta: _shape_of_backward(keeps_format)})
        yield
    finally:
        for op, kernels in saved.items():
            op.py_kernels.clear()
            op.py_kernels.update(kernels)
            op._dispatch_cache.clear()


def _by_sizes(plain: Any, corners: bool) -> Callable[..., Any]:
    """The overload that takes sizes or scales, as the one that takes both."""

    def call(x: torch.Tensor, sizes: Any, *rest: Any) -> torch.Tensor:
        *align, scales = rest if corners else (rest[-1],)
        sizes = upsample_compute_output_size(x.size(), sizes, scales)
        result: torch.Tensor = plain(x, sizes, *align, *(scales or [None] * len(sizes)))
        return result

    return call


def _shape_of_backward(keeps_format: bool) -> Callable[..., torch.Tensor]:
    def call(grad: torch.Tensor, sizes: Any, source_sizes: Any, *ignored: Any, **others: Any) -> torch.Tensor:
        made = grad.new_empty(source_sizes)
        return made.to(memory_format=suggest_memory_format(grad)) if keeps_format else made

    return call
