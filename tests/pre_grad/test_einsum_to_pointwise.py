"""A small batched einsum that is added to something becomes a product and a sum (PRE-30)."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from ferrite.graph.pre_grad.einsum_to_pointwise import einsum_to_pointwise
from tests.pre_grad.harness import keeps, rewrites

X, W, C = torch.randn(2, 3, 4), torch.randn(2, 3, 4, 5), torch.randn(5)


@pytest.mark.parametrize("equation", ["bni,bnio->bno", "abi,abio->abo", "xyz,xyzw->xyw", " AbI , AbIq -> Abq "])
def test_in_any_letters(equation: str) -> None:
    def function(x: Any, w: Any, c: Any) -> Any:
        return torch.einsum(equation, x, w) + c

    rewrites(einsum_to_pointwise, function, [X, W, C], times=1, left={"einsum": 0, "mul": 1, "sum": 1, "add": 1})


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w, c: torch.einsum("bni,bnio->bno", [x, w]) + c,
        lambda x, w, c: c + torch.einsum("bni,bnio->bno", x, w),
        lambda x, w, c: torch.add(c, torch.einsum("bni,bnio->bno", x, w), alpha=2),
        lambda x, w, c: torch.einsum("bni,bnio->bno", x, w).add(c),
    ],
)
def test_however_it_is_spelled(function: Any) -> None:
    rewrites(einsum_to_pointwise, function, [X, W, C], times=1, left={"einsum": 0})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_summed_in_f32(dtype: torch.dtype) -> None:
    """256 products of 1 and 1 + 2**-7: their sum in halves would stop growing."""
    x, w, c = torch.ones(2, 3, 256), torch.full((2, 3, 256, 5), 1 + 2**-7), torch.zeros(5)

    def function(x: Any, w: Any, c: Any) -> Any:
        return torch.einsum("bni,bnio->bno", x, w) + c

    inputs = [t.to(dtype) for t in (x, w, c)]
    outcome = rewrites(einsum_to_pointwise, function, inputs, times=1, left={"einsum": 0, "to": 3})
    assert torch.equal(outcome.module(*inputs)[0], torch.full((2, 3, 5), 258.0).to(dtype))


def test_a_dimension_of_one_is_repeated_as_in_einsum() -> None:
    def function(x: Any, w: Any, c: Any) -> Any:
        return (torch.einsum("bni,bnio->bno", x, w) + c).sum(0)

    rewrites(einsum_to_pointwise, function, [torch.randn(1, 3, 4), W, C], times=1, left={"einsum": 0})


def test_strides_that_einsum_chose_are_kept_where_they_are_returned() -> None:
    def function(x: Any, w: Any, c: Any) -> Any:
        return torch.einsum("bni,bnio->bno", x, w) + c

    keeps(einsum_to_pointwise, function, [torch.randn(1, 3, 4), W, C], because="would be returned as")


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("...i,...io->...o", [(2, 3, 4), (2, 3, 4, 5)]),
        ("bii,biio->bo", [(2, 3, 3), (2, 3, 3, 5)]),
        ("bbi,bbio->bo", [(2, 2, 4), (2, 2, 4, 5)]),
        ("bni,bnii->bni", [(2, 3, 4), (2, 3, 4, 4)]),
        ("bni,bnio->bon", [(2, 3, 4), (2, 3, 4, 5)]),
        ("bni,bnio->no", [(2, 3, 4), (2, 3, 4, 5)]),
        ("bni,bnoi->bno", [(2, 3, 4), (2, 3, 5, 4)]),
        ("bni,bio->bno", [(2, 3, 4), (2, 4, 5)]),
        ("bni,bnio,o->bno", [(2, 3, 4), (2, 3, 4, 5), (5,)]),
        ("bni,bnio", [(2, 3, 4), (2, 3, 4, 5)]),
        ("bni,bni->bn", [(2, 3, 4), (2, 3, 4)]),
    ],
)
def test_other_forms_stay(equation: str, shapes: list[tuple[int, ...]]) -> None:
    def function(*operands: Any) -> Any:
        return torch.einsum(equation, *operands) + 1

    keeps(einsum_to_pointwise, function, [torch.randn(shape) for shape in shapes])


def test_without_an_addition_it_stays() -> None:
    keeps(einsum_to_pointwise, lambda x, w: torch.einsum("bni,bnio->bno", x, w).relu(), [X, W], because="is not added")


def test_many_products_stay() -> None:
    @functools.wraps(einsum_to_pointwise)
    def at_most_119(graph: Any) -> int:
        return einsum_to_pointwise(graph, most=119)

    def function(x: Any, w: Any, c: Any) -> Any:
        return torch.einsum("bni,bnio->bno", x, w) + c

    keeps(at_most_119, function, [X, W, C], because="120 products are more than 119")


def test_sizes_that_vary_stay() -> None:
    def function(x: Any, w: Any, c: Any) -> Any:
        return torch.einsum("bni,bnio->bno", x, w) + c

    keeps(einsum_to_pointwise, function, [X, W, C], dynamic=True, because="sizes that vary")


def test_under_autocast_it_stays() -> None:
    """The einsum gives halves there, a product and a sum do not."""

    def function(x: Any, w: Any, c: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.einsum("bni,bnio->bno", x, w) + c

    keeps(einsum_to_pointwise, function, [X, W, C], because="would be f32")
