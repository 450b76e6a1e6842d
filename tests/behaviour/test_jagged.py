"""Jagged tensors, whose ragged size is a number for the tracer and none in a call: as `aot_eager` has them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch.nested import nested_tensor_from_jagged
from torch.utils._pytree import tree_leaves

import ferrite
from tests.both_hosts import both_hosts

OFFSETS = ([0, 2, 6, 9], [0, 1, 1, 9])

# Each takes a jagged tensor of three pieces, nine rows and five columns, and a plain one that is 9 by 5.
FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "shared offsets": lambda x, y: x + nested_tensor_from_jagged(y, x.offsets()),
    "shared offsets, twice": lambda x, y: (x * nested_tensor_from_jagged(y, x.offsets())).sin() - x,
    "other offsets": lambda x, y: (x.sin(), nested_tensor_from_jagged(y, torch.tensor([0, 3, 4, 9])).cos()),
    "a ragged size is a result": lambda x, y: (x * 2, x.size(1)),
    "a ragged size is compared": lambda x, y: x + y.size(0) if x.size(1) == x.sin().size(1) else x - 1,
    "a ragged size is given to an op": lambda x, y: x.sin().expand(3, x.size(1), 5) * 2,
    "a stride is a product of one": lambda x, y: (x.sin(), x.stride(0)),
    "transposed": lambda x, y: x.transpose(1, 2) * 2,
    "another rank": lambda x, y: x.unflatten(-1, (5, 1)).transpose(1, 2).exp(),
    "rows": lambda x, y: torch.softmax(x, -1) + nested_tensor_from_jagged(y, x.offsets()),
    "a product": lambda x, y: torch.nn.functional.linear(x, torch.eye(5, 5)) + 1,
    "padded": lambda x, y: x.to_padded_tensor(0.5) + 1,
    "values alone": lambda x, y: torch.nn.functional.gelu(x).values() + y,
    "like another": lambda x, y: torch.zeros_like(x) + x,
}

# Where every size of the parts is known, or an argument; else Python runs between the kernels.
NATIVE = ("shared offsets", "shared offsets, twice", "rows", "values alone")


def parts(value: Any) -> list[Any]:
    """What can be compared of a result. Each jagged tensor has a ragged size of its own."""
    if isinstance(value, Tensor) and value.is_nested:
        place: int = value._ragged_idx  # type: ignore[attr-defined]
        sizes = [size for dim, size in enumerate(value.shape) if dim != place]
        return [value.values(), value.offsets(), place, sizes, value.requires_grad]
    if isinstance(value, torch.SymInt):
        return [type(value), value.node.nested_int_coeff()]
    return [value]


def outcome(function: Callable[..., Any], training: bool, offsets: list[int]) -> list[Any]:
    """What a call gives, and gradients."""
    torch.manual_seed(0)
    rows, other = (torch.randn(9, 5, requires_grad=training) for _ in range(2))
    result = function(nested_tensor_from_jagged(rows, torch.tensor(offsets)), other)
    found = [part for leaf in tree_leaves(result) for part in parts(leaf)]
    if training:
        terms = [leaf.sin().sum() for leaf in found if isinstance(leaf, Tensor) and leaf.requires_grad]
        found += torch.autograd.grad(sum(terms), (rows, other), allow_unused=True)  # type: ignore[arg-type]
    return found


def check(found: list[Any], expected: list[Any]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        if isinstance(theirs, Tensor):
            torch.testing.assert_close(ours, theirs)
            assert ours.stride() == theirs.stride()
        else:
            assert ours == theirs


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_jagged(name: str, training: bool) -> None:
    reference = torch.compile(FUNCTIONS[name], backend="aot_eager", fullgraph=True)
    expected = [outcome(reference, training, offsets) for offsets in OFFSETS]
    torch._dynamo.reset()
    with both_hosts() as ran:
        compiled = torch.compile(FUNCTIONS[name], backend="ferrite", fullgraph=True, options={"strict": True})
        for offsets, outcomes in zip(OFFSETS, expected, strict=True):
            check(outcome(compiled, training, offsets), outcomes)
    if name in NATIVE:
        assert len(ran) == len(OFFSETS) * (1 + training)


def test_jagged_with_a_cache(tmp_path: Path) -> None:
    """A graph of wrappers is not stored, and is right each time."""
    function = FUNCTIONS["shared offsets"]
    expected = outcome(function, True, OFFSETS[0])
    for _ in range(2):
        torch._dynamo.reset()
        options = {"strict": True, "cache": "on", "cache_dir": str(tmp_path)}
        check(outcome(torch.compile(function, backend="ferrite", options=options), True, OFFSETS[0]), expected)
        assert "no plain tensor" in ferrite.cache.explain()
