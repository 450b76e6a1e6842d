"""Copies of tensors that lie as the originals do, and the plain tensors that hold what a tensor of any layout holds."""

from __future__ import annotations

from typing import Any

import torch


class Copier:
    """Copies arguments with their layout: strides, offsets, bits, and who shares storage with whom."""

    def __init__(self, widen: bool = False) -> None:
        self.storages: dict[int, torch.UntypedStorage] = {}
        self.tensors: dict[int, torch.Tensor] = {}
        self.widen = widen

    def __call__(self, value: Any) -> Any:
        if isinstance(value, torch.Generator):
            twin = torch.Generator(value.device)
            twin.set_state(value.get_state())
            return twin
        if isinstance(value, torch.dtype) and self.widen:
            return WIDE.get(value, value)
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in self.tensors:
            self.tensors[id(value)] = self._tensor(value)
        return self.tensors[id(value)]

    def _tensor(self, value: torch.Tensor) -> torch.Tensor:
        if self.widen and value.dtype in WIDE:
            return value.detach().to(WIDE[value.dtype], copy=True).requires_grad_(value.requires_grad)
        if not is_plain(value):
            return value.detach().clone().requires_grad_(value.requires_grad)
        storage = value.untyped_storage()
        if storage._cdata not in self.storages:
            self.storages[storage._cdata] = storage.clone()
        twin = torch.empty(0, dtype=value.dtype, device=value.device)
        twin.set_(self.storages[storage._cdata], value.storage_offset(), value.shape, value.stride())
        if value.is_conj():
            twin = torch._conj(twin)
        if value.is_neg():
            twin = torch._neg_view(twin)
        if isinstance(value, torch.nn.Parameter):
            return torch.nn.Parameter(twin.detach(), value.requires_grad)
        return twin.detach().requires_grad_(value.requires_grad)


WIDE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
    torch.complex32: torch.complex128,
}


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is memory and strides, which sparse, nested and opaque ones are not."""
    ordinary = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return ordinary and tensor.layout is torch.strided and not tensor.is_nested


def dense_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that hold a tensor's values, whatever its layout."""
    tensor = tensor.detach()
    if tensor.is_nested:
        return [part.detach() for part in tensor.unbind()]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    if tensor.layout is not torch.strided:
        return [tensor.to_dense()]
    return [tensor.resolve_conj().resolve_neg()]
