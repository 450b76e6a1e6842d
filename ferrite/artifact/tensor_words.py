"""Where PyTorch keeps what the machine asks of a tensor, looked at before the machine relies on it."""

from __future__ import annotations

import ctypes

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ferrite.errors import Unsupported
from ferrite.native.machine import TensorWords

WORDS = TensorWords(
    rank=7, sizes=8, strides=13, offset=18, count=19, kind=20, keys=21, storage=2, address=2, length=6, inline=5
)


def check_words() -> None:
    """Raises `Unsupported` if this PyTorch keeps something elsewhere: then no program runs natively."""
    with _disable_current_modes():
        for rank in (WORDS.inline, WORDS.inline + 1):
            sizes, strides = [n + 2 for n in range(rank)], [3 * n + 1 for n in range(rank)]
            tensor = torch.empty(4096, dtype=torch.int16, device="cpu").as_strided(sizes, strides, 77)
            storage, keys = tensor.untyped_storage(), torch._C._dispatch_keys(tensor).raw_repr()
            numbers = [77, tensor.numel(), 2, keys, storage.data_ptr(), storage.nbytes()]
            if _word(id(tensor) + object.__basicsize__, 0) != tensor._cdata or _asked(tensor._cdata, rank) != [
                rank, *sizes, *strides, *numbers
            ]:  # fmt: skip
                raise Unsupported("tensors that keep their sizes elsewhere")


def _asked(tensor: int, rank: int) -> list[int]:
    """As the machine finds it."""
    if rank <= WORDS.inline:
        sizes, strides = tensor + 8 * WORDS.sizes, tensor + 8 * WORDS.strides
    else:
        sizes = _word(tensor, WORDS.sizes)
        strides = sizes + 8 * rank
    storage = _word(tensor, WORDS.storage)
    rows = [_word(row, n) for row in (sizes, strides) for n in range(rank)]
    numbers = [_word(tensor, WORDS.offset), _word(tensor, WORDS.count), _word(tensor, WORDS.kind) & 0xFFFF]
    of_storage = [_word(storage, WORDS.address), _word(storage, WORDS.length)]
    return [_word(tensor, WORDS.rank), *rows, *numbers, _word(tensor, WORDS.keys), *of_storage]


def _word(address: int, place: int) -> int:
    return ctypes.c_int64.from_address(address + 8 * place).value
