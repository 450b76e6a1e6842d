"""The strides that eager gives to pointwise results: the rule against eager itself, and nodes that it corrects."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations

import pytest
import torch
from torch import Tensor

import ferrite
from ferrite.graph.eager_strides import Operand, strides_in_eager

NUMBER: Operand = ((), ())
SHAPES = [(6, 1), (1, 6), (1, 1), (2, 1, 3), (1, 3, 1, 2), (2, 1, 3, 1), (1, 4, 2, 2)]

OPS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Operand], list[Operand]]]] = {
    "plus a number": (lambda x: x + 1, lambda x: [x, NUMBER]),
    "number minus": (lambda x: 1 - x, lambda x: [x, NUMBER]),
    "compared with a number": (lambda x: x == 1, lambda x: [x, NUMBER]),
    "square": (lambda x: x * x, lambda x: [x, x]),
    "power": (lambda x: x**3, lambda x: [x]),
    "unary": (lambda x: x.sin(), lambda x: [x]),
    "clamp": (lambda x: x.clamp(0), lambda x: [x]),
    "three": (lambda x: torch.addcmul(x, x, x), lambda x: [x, x, x]),
    "a row added": (lambda x: x + torch.ones(x.shape[-1]), lambda x: [x, ((x[0][-1],), (1,))]),
    "contiguous added": (lambda x: x + torch.ones(x.shape), lambda x: [x, contiguous(x)]),
}


def contiguous(x: Operand) -> Operand:
    return x[0], tuple(torch.empty(x[0]).stride())


def layouts(sizes: tuple[int, ...]) -> list[Tensor]:
    """Tensors of these sizes in every order of dimensions, also with strides of ones that no order explains."""
    found = []
    for order in permutations(range(len(sizes))):
        dense = torch.randn([sizes[dim] for dim in order]).permute([order.index(dim) for dim in range(len(sizes))])
        odd = [77 if extent == 1 else stride for extent, stride in zip(sizes, dense.stride(), strict=True)]
        found += [dense, torch.randn(500).as_strided(sizes, odd)]
    return found


@pytest.mark.parametrize("name", OPS)
def test_the_rule_is_eagers(name: str) -> None:
    function, operands = OPS[name]
    for sizes in SHAPES:
        for x in layouts(sizes):
            wanted = function(x).stride()
            assert strides_in_eager(sizes, operands((sizes, x.stride()))) == wanted, f"{sizes}, {x.stride()}"


@pytest.mark.parametrize("name", [*OPS, "chain"])
def test_compiled_results_have_them(name: str) -> None:
    chain = lambda x: ((x + 1).transpose(0, 1) * 2, (x + 1).sin() + x)
    function = chain if name == "chain" else OPS[name][0]
    compiled = torch.compile(function, backend="ferrite", dynamic=False, options={"strict": True})
    for x in (torch.randn(6).as_strided((6, 1), (1, 6)), torch.randn(300).as_strided((2, 1, 3), (3, 77, 1))):
        found, wanted = compiled(x), function(x)
        pairs = zip(found, wanted, strict=True) if name == "chain" else [(found, wanted)]
        for ours, eager in pairs:
            assert ours.stride() == eager.stride()
            torch.testing.assert_close(ours, eager)
    record = ferrite.last_record()
    assert record is not None
    assert record.graphs[-1].lowered


@pytest.mark.parametrize("dynamic", [False, True])
def test_views_of_what_has_no_dimension(dynamic: bool) -> None:
    """Expanded it has strides of 0 only, in dimensions of one too; and its dimension 0 can be swapped with itself."""
    function = lambda x, y: (x.sum().expand(1), x.sum().expand(1, 1), y.sin().swapaxes(0, -1), y.sin() + x)
    compiled = torch.compile(function, backend="ferrite", dynamic=dynamic, options={"strict": True, "cache": "off"})
    given = torch.randn(3), torch.randn(())
    for ours, eager in zip(compiled(*given), function(*given), strict=True):
        assert ours.stride() == eager.stride()
        torch.testing.assert_close(ours, eager)


COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "clone": lambda x: x.clone(),
    "index_put": lambda x: x.index_put((torch.zeros((), dtype=torch.int64),), torch.ones(())),
    "index_fill": lambda x: x.index_fill(0, torch.zeros(1, dtype=torch.int64), 2),
    "masked_fill": lambda x: x.masked_fill(x > 0, 1),
}


@pytest.mark.parametrize("name", COPIES)
def test_what_starts_as_a_copy(name: str) -> None:
    """It has the very strides of what is copied, if that is dense; only `masked_fill` makes its copy contiguous."""
    compiled = torch.compile(COPIES[name], backend="ferrite", dynamic=False, options={"strict": True})
    for sizes, strides in [((1,), (0,)), ((1,), (5,)), ((1, 4, 3), (17, 1, 4)), ((1, 4, 1, 3), (3, 1, 12, 4))]:
        x = torch.randn(100).as_strided(sizes, strides)
        ours, eager = compiled(x), COPIES[name](x)
        assert ours.stride() == eager.stride()
        assert torch.equal(ours, eager)
