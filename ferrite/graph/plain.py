"""Whether a tensor is what loops can read: elements at an address, as sizes, strides and the dtype say, in memory that
is there.

A tensor may be anything else, whatever its class: a wrapper around others, a fake one, one whose storage was freed, a
view that is negated when it is read. Its dispatch keys tell. `native/machine.py` asks the same of each argument, with
the same words, and comes here only for what is not as promised.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import DispatchKey, DispatchKeySet

from ferrite.graph.text import show_type

_CPU = DispatchKeySet(DispatchKey.CPU)
_USUAL = (DispatchKey.AutogradCPU, DispatchKey.ADInplaceOrView, DispatchKey.AutocastCPU)
_ALLOWED = DispatchKeySet(DispatchKey.Conjugate)  # of complex numbers, which only operators read
for _key in _USUAL:
    _ALLOWED = _ALLOWED | DispatchKeySet(_key)
REQUIRED = _CPU.raw_repr()
FORBIDDEN = ~(_CPU | _ALLOWED).raw_repr() & (1 << 64) - 1


def why_not_plain(tensor: Any, *, has_memory: bool = True) -> str:
    """What stands in the place of a tensor whose memory can be read; nothing if it is one. `has_memory`: whether its
    memory has to be there."""
    if not isinstance(tensor, torch.Tensor):
        return f"a {type(tensor).__name__}"
    keys = torch._C._dispatch_keys(tensor).raw_repr()
    if keys & REQUIRED == REQUIRED and not keys & FORBIDDEN:
        return why_no_memory(tensor) if has_memory else ""
    if DispatchKeySet.from_raw_repr(keys).has(DispatchKey.Python):
        return f"a {type(tensor).__name__}, which has no memory of its own"
    if tensor.device.type != "cpu":
        return f"a tensor on {tensor.device}"
    if tensor.layout != torch.strided:
        return f"a tensor of {tensor.layout}"
    return f"a tensor of {DispatchKeySet.from_raw_repr(keys)}"


def why_no_memory(tensor: torch.Tensor) -> str:
    """Whether all elements of a strided tensor lie in its storage."""
    if tensor.numel() == 0:
        return ""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((size - 1) * stride for size, stride in steps)
    needed, found = (last + 1) * tensor.element_size(), tensor.untyped_storage().nbytes()
    return "" if needed <= found else f"{show_type(tensor)} in a storage of {found} bytes, which has to have {needed}"


def same_strides(tensor: torch.Tensor, strides: Sequence[int]) -> bool:
    """Where nothing is stepped over, any stride is right."""
    if tensor.numel() == 0:
        return True
    steps = zip(tensor.shape, tensor.stride(), strides, strict=True)
    return all(size == 1 or have == wanted for size, have, wanted in steps)
