"""Small functions that host programs call by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ferrite.graph.plain import same_strides, why_not_plain


def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function that has no name of its own (it arrives as a constant)."""
    return function(*args, **kwargs)


def as_promised(tensor: Any, sizes: tuple[int, ...], strides: tuple[int, ...], dtype: Any, maker: str) -> Any:
    """The tensor itself if it lies in memory as tracing promised, or else a copy that does: kernels go by the promise,
    and an op may give other strides than it said (FFT under dynamic sizes does). Where nothing is stepped over, any
    stride is right. Anything else than a tensor of these sizes and this dtype, in memory of its own that is there, is
    refused: eager would go on with that one, so no copy is right. `maker`: an op, or whoever else gave the tensor."""
    if isinstance(tensor, torch.Tensor) and tensor.is_neg():
        tensor = tensor.resolve_neg()
    why = _differs(tensor, sizes, dtype)
    if why:
        promised = f"{str(dtype).removeprefix('torch.')}{list(sizes)}"
        raise RuntimeError(
            f"{maker} gave {why} where tracing promised {promised}. If that is an operator, its fake kernel and its "
            "CPU kernel differ: mend the one that is wrong, or call it outside of the compiled function "
            "(torch.compiler.disable)"
        )
    if same_strides(tensor, strides):
        return tensor
    return tensor.new_empty_strided(sizes, strides).copy_(tensor)


def _differs(tensor: Any, sizes: tuple[int, ...], dtype: Any) -> str:
    """What was found in the place of a tensor that a kernel can read; nothing if it is one."""
    if why := why_not_plain(tensor):
        return why
    same = tensor.dtype == dtype and tensor.shape == sizes
    return "" if same else f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
