"""Running results along every dimension of tensors in every layout, large enough for lanes, tiles and threads."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations

import pytest
import torch
from torch import Tensor

from tests.behaviour.compare import compare

SCANS: dict[str, Callable[[Tensor, int], object]] = {
    "cumsum": torch.cumsum,
    "cummax": torch.cummax,
    "logcumsumexp": torch.logcumsumexp,
}


@pytest.mark.parametrize("order", permutations(range(3)))
@pytest.mark.parametrize("name", SCANS)
def test_a_scan_of_a_permuted_tensor(name: str, order: tuple[int, ...]) -> None:
    """The other dimensions are whole tiles, and two of the three run along memory: of the input and of the result."""
    sizes = (8, 64, 96)
    x = torch.randn([sizes[order.index(dim)] for dim in range(3)]).permute(order)
    assert x.shape == sizes
    compare(lambda x: tuple(SCANS[name](x, dim) for dim in range(3)), x, calls=1)
