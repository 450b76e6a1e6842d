"""Ways to lay out the tensors of a call, and to give them sizes of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch.utils._pytree import tree_leaves, tree_map

Lay: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
ODD = 77  # the stride of a dimension of one that no layout explains


def as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x


def contiguous(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def transposed(x: torch.Tensor) -> torch.Tensor:
    """Dense, and the first dimension is the fastest."""
    order = list(reversed(range(x.dim())))
    return x.permute(order).contiguous().permute(order)


def channels_last(x: torch.Tensor) -> torch.Tensor:
    """Dense, and the second dimension is the fastest, as images have it; the same stride in dimensions of one."""
    if x.dim() < 3:
        return contiguous(x)
    rank = x.dim()
    return x.permute([0, *range(2, rank), 1]).contiguous().permute([0, rank - 1, *range(1, rank - 1)])


def sliced(x: torch.Tensor) -> torch.Tensor:
    """Every second element of something larger."""
    wide = x.new_empty([*x.shape[:-1], 2 * x.shape[-1]])[..., ::2] if x.dim() else x.new_empty(())
    return wide.copy_(x)


def odd(x: torch.Tensor) -> torch.Tensor:
    """Contiguous, but dimensions of one have a stride that tells nothing."""
    plain = contiguous(x)
    strides = [ODD if size == 1 else step for size, step in zip(x.shape, plain.stride(), strict=True)]
    return plain.as_strided(x.shape, strides)


def moved(x: torch.Tensor) -> torch.Tensor:
    """Dense, and the dimension before the last is the fastest: what a product of matrices is given."""
    if x.dim() < 2:
        return contiguous(x)
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


LAYOUTS: dict[str, Lay] = {
    function.__name__: function for function in (contiguous, transposed, channels_last, sliced, odd, moved)
}


def is_laid_out(value: Any) -> bool:
    """Whether a value is a tensor whose layout can be varied."""
    return (
        isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and type(value) in (torch.Tensor, torch.nn.Parameter)
        and not value.is_nested
        and not value.is_conj()
        and not value.is_neg()
        and 0 < value.numel() < 1 << 14
    )


def laid_out(arguments: Any, layout: str) -> Any:
    """Arguments, their tensors in a layout; with `first `, only the first of them. They keep `requires_grad`."""
    name = layout.removeprefix("first ")
    left = [1 if name != layout else 1 << 20]

    def lay(value: Any) -> Any:
        if not is_laid_out(value):
            return value
        left[0] -= 1
        with torch.no_grad():
            made = (LAYOUTS[name] if left[0] >= 0 else contiguous)(value.detach())
        return made.requires_grad_(value.requires_grad)

    return tree_map(lay, arguments)


def raised(arguments: Any, rank: int) -> Any | None:
    """Arguments with more leading dimensions, so that each tensor has `rank`; None if one has that many. Not every op
    takes them."""
    tensors = [leaf for leaf in tree_leaves(arguments) if is_laid_out(leaf)]
    if not tensors or not all(0 < leaf.dim() < rank for leaf in tensors):
        return None

    def raise_one(value: Any) -> Any:
        if not is_laid_out(value):
            return value
        missing = rank - value.dim()
        made = value.detach()[(None,) * missing].repeat((2, 3, 2, 2)[:missing] + (1,) * value.dim())
        return made.requires_grad_(value.requires_grad)

    return tree_map(raise_one, arguments)


def with_ones(arguments: Any) -> Iterator[tuple[str, Any]]:
    """Arguments, then the same with one size made 1 wherever it is found, for each size of more than one."""
    yield "as they are", arguments
    sizes = {size for leaf in tree_leaves(arguments) if is_laid_out(leaf) for size in leaf.shape if size > 1}
    for size in sorted(sizes):

        def cut(value: Any, size: int = size) -> Any:
            if not is_laid_out(value):
                return value
            made = value.detach()
            for dim, extent in enumerate(value.shape):
                made = made.narrow(dim, 0, 1) if extent == size else made
            return made.clone().requires_grad_(value.requires_grad)

        yield f"{size} as 1", tree_map(cut, arguments)
