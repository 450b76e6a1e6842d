"""Small functions that host programs call by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function that has no name of its own (it arrives as a constant)."""
    return function(*args, **kwargs)


def as_promised(tensor: Any, strides: tuple[int, ...], dtype: Any) -> Any:
    """The tensor itself if it lies in memory as tracing promised, or else a copy that does: kernels go by the promise,
    and an op may give other strides than it said (FFT under dynamic sizes does). Where nothing is stepped over, any
    stride is right. A tensor of another dtype is refused: eager would go on with that one, so no copy is right."""
    if tensor.dtype != dtype or tensor.dim() != len(strides):
        found = f"{tensor.dtype} of {tensor.dim()} dimensions"
        raise RuntimeError(
            f"an operator gave {found} where tracing promised {dtype} of {len(strides)}. Its fake kernel and its CPU "
            "kernel differ; compile the function around it with torch.compiler.disable, or cast its operands"
        )
    have = tensor.stride()
    if have == strides or tensor.numel() == 0:
        return tensor
    if all(a == b or size == 1 for a, b, size in zip(have, strides, tensor.shape, strict=True)):
        return tensor
    return tensor.new_empty_strided(tensor.shape, strides).copy_(tensor)
