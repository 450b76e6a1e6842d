"""Constant tensors of a program as plain data: what they hold and how it lies in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from torch.utils._python_dispatch import _disable_current_modes

from ferrite.errors import Unsupported


class StoredTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`data`: the bytes from the first element to the last, whatever lies between."""

    dtype: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    data: bytes


def store_tensors(constants: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Raises `Unsupported` for what is no plain tensor, and for two tensors in one piece of memory."""
    strangers = [name for name, value in constants.items() if not is_plain(value)]
    if strangers:
        raise Unsupported(f"{', '.join(strangers)} cannot leave the process", why="not a plain tensor")
    if len({value.untyped_storage()._cdata for value in constants.values()}) != len(constants):
        raise Unsupported("constants cannot leave the process", why="two of them share memory")
    with _disable_current_modes():
        return {name: _store(value) for name, value in constants.items()}


def load_tensor(stored: StoredTensor) -> torch.Tensor:
    """A tensor with memory of its own. Raises `ValueError` if the data do not fit the sizes."""
    dtype = getattr(torch, stored.dtype, None)
    if not isinstance(dtype, torch.dtype) or len(stored.sizes) != len(stored.strides):
        raise ValueError(f"no tensor is a {stored.dtype} of sizes {stored.sizes} and strides {stored.strides}")
    if min((*stored.sizes, *stored.strides), default=0) < 0:
        raise ValueError("a size or a stride below zero")
    elements = _span(stored.sizes, stored.strides)
    if elements * dtype.itemsize != len(stored.data):
        raise ValueError(f"{len(stored.data)} bytes for {elements} elements of {stored.dtype}")
    with _disable_current_modes():
        if not elements:
            return torch.empty_strided(stored.sizes, stored.strides, dtype=dtype)
        memory = torch.frombuffer(bytearray(stored.data), dtype=dtype)
        return memory.as_strided(stored.sizes, stored.strides)


def _store(tensor: torch.Tensor) -> StoredTensor:
    sizes, strides = tuple(tensor.shape), tuple(tensor.stride())
    span = tensor.detach().as_strided((_span(sizes, strides),), (1,))
    data = span.contiguous().view(torch.uint8).numpy().tobytes() if span.numel() else b""
    return StoredTensor(str(tensor.dtype).removeprefix("torch."), sizes, strides, data)


def _span(sizes: tuple[int, ...], strides: tuple[int, ...]) -> int:
    if 0 in sizes:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


def is_plain(value: Any) -> bool:
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.layout == torch.strided
        and value.device.type == "cpu"
        and not value.requires_grad
        and not value.is_quantized
        and not value.is_conj()
        and not value.is_neg()
    )
