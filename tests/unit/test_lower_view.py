"""Views, moves and builders against eager, through the oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.unit.test_lower import assert_same, fallbacks

aten = torch.ops.aten
X = torch.arange(24.0).reshape(2, 3, 4)


def compiled(function: Callable[..., Any], **how: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, backend="ferrite", options={"executor": "oracle", "strict": True}, **how)


def test_lists_of_views_are_read_where_they_are() -> None:
    assert_same(lambda x: [part * 2 for part in x.split(2, 2)], X)
    assert_same(lambda x: [part * 2 for part in x.split([1, 0, 2], 1)], X)
    assert_same(lambda x: [part * 2 for part in x.unbind(-1)], X)
    assert_same(lambda x: [part + 1 for part in x.chunk(3, 2)], X)
    assert_same(lambda x: [part + 1 for part in torch.unsafe_chunk(x, 2, 1)], X)


def test_lists_of_views_share_memory() -> None:
    function = compiled(lambda x: (x.split(2, 2), x.unbind(0)))
    x = X.clone()
    parts, slices = function(x)
    assert not fallbacks()
    x.fill_(7)
    assert all(bool((part == 7).all()) for part in (*parts, *slices))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: aten.slice_copy(x, 2, 1, 4, 2),
        lambda x: aten.select_copy(x, 1, -1),
        lambda x: aten.diagonal_copy(x, 1, 1, 2),
        lambda x: aten.unfold_copy(x, 2, 3, 1),
        lambda x: aten.narrow_copy(x, 2, 1, 2),
        lambda x: aten.permute_copy(x, [2, 0, 1]),
        lambda x: aten.expand_copy(x[:, :1], [2, 5, 4]),
        lambda x: tuple(aten.unbind_copy(x, 1)),
        lambda x: tuple(aten.split_with_sizes_copy(x, [1, 3], 2)),
    ],
)
def test_copies_of_views_are_new_tensors(function: Callable[..., Any]) -> None:
    assert_same(function, X)
    x = X.clone()
    found = compiled(function)(x)
    kept = torch.utils._pytree.tree_map(torch.clone, found)
    x.fill_(-1)
    torch.testing.assert_close(found, kept)


def test_moves() -> None:
    assert_same(lambda x: (x.flip(0, 2), x.roll(5), x.roll((1, -9), (2, 0)), x.roll((1, 1), (2, 2))), X)
    assert_same(lambda x: tuple(torch.rot90(x, k, (0, 2)) for k in range(-1, 5)), X)
    assert_same(lambda x: (x.repeat(2, 1, 3), x.repeat(1, 2, 1, 1), x.repeat(0, 1, 1)), X)
    assert_same(lambda x: (x.repeat(2, 3), x.roll(1), x.flip(1)), torch.empty(2, 0))
    assert_same(lambda x: (x.roll(1), x.flip(0), x.unfold(0, 1, 1) * 2), torch.tensor(3.0))
    assert_same(lambda x: (torch.pixel_shuffle(x, 2), torch.channel_shuffle(x, 4)), torch.randn(2, 8, 3, 5))
    assert_same(lambda x: torch.pixel_unshuffle(x, 3), torch.randn(2, 2, 6, 9))


def test_what_autograd_makes_of_views() -> None:
    g = torch.randn(2, 2, 4)
    assert_same(lambda g: aten.slice_backward(g, [2, 5, 4], 1, 1, 5, 2), g)
    assert_same(lambda g: aten.slice_backward(g, [2, 5, 4], 1, -2, 9223372036854775807, 1), g)
    assert_same(lambda g: aten.select_backward(g, [2, 2, 3, 4], 2, -1), g)
    assert_same(lambda g: aten.diagonal_backward(g, [5, 2, 6, 2], -1, 2, 0), torch.randn(2, 2, 5))
    assert_same(lambda g: aten.unfold_backward(g, [9], 0, 2, 3), torch.randn(3, 2))


@pytest.mark.parametrize(("size", "step"), [(3, 1), (5, 2), (4, 4), (2, 3)])
def test_gradient_of_windows(size: int, step: int) -> None:
    windows = (11 - size) // step + 1
    assert_same(lambda g: aten.unfold_backward(g, [3, 11], 1, size, step), torch.randn(3, windows, size), exact=False)


def test_gradient_of_windows_is_rounded_once() -> None:
    """Eager rounds a half after each window; ours is nearer to the sum."""
    halves = torch.full((9, 3), 1.0).bfloat16() + torch.tensor([256.0, 1.0, 1.0]).bfloat16()
    found = compiled(lambda g: aten.unfold_backward(g, [11], 0, 3, 1))(halves)
    assert torch.equal(found, aten.unfold_backward(halves.float(), [11], 0, 3, 1).bfloat16())


def test_writes_through_views() -> None:
    source = -torch.ones(2, 2, 4)
    assert_same(lambda x, s: torch.slice_scatter(x, s, 1, 0, 3, 2), X, source)
    assert_same(lambda x, s: torch.select_scatter(x, s, 2, 1), X, -torch.ones(2, 3, dtype=torch.float64))
    assert_same(lambda x, s: torch.diagonal_scatter(x, s, 1, 1, 2), X, -torch.ones(2, 3))
    assert_same(lambda x: torch.diag_embed(x, -1, 0, 2), X[0])

    def inplace(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[:, 1:] += 10
        y[0, 0, ::2] = -1
        return y

    assert_same(inplace, X)


def test_cat_and_stack() -> None:
    empty = torch.empty(0)
    assert_same(lambda x, e: (torch.cat([x, e, x[:, :1]], 1), torch.cat([e, e])), X, empty)
    assert_same(lambda x: torch.cat([x[:, :n] for n in (1, 0, 2, 3, 1, 2)], 1), X)
    assert_same(lambda x: (torch.stack([x, -x], 1), torch.stack([x[n % 2] + n for n in range(6)], -1)), X)
    assert_same(lambda x, y: (torch.cat([x, y]), torch.stack([y, y])), torch.arange(3), torch.tensor([1.5]))
    assert_same(lambda x: torch.block_diag(x[0], x[0, 0], torch.tensor(3.0)), X)


def test_padding_cuts_off_and_fills() -> None:
    pad = torch.nn.functional.pad
    assert_same(lambda x: (pad(x, (1, 2)), pad(x, (-1, 1, 2, -2), value=5), pad(x, (0, 0, 1, 0))), X)
    assert_same(lambda x: (pad(x, (1, -1), value=2.9), pad(x > 3, (1, 1), value=True)), torch.arange(6))


def test_builders() -> None:
    def made(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            torch.eye(3, 4, dtype=torch.int32),
            torch.arange(5),
            torch.arange(2, 9, 3, dtype=torch.float32),
            torch.linspace(0, 1, 1),
            torch.linspace(-3.0, 7.5, 6),
            torch.linspace(0, 10, 4, dtype=torch.int64),
            torch.full((2,), 3.5),
            torch.zeros_like(x),
            x.tril(-1),
            x.triu(1),
        )

    assert_same(made, torch.full((3, 3), float("nan")))
    assert_same(lambda x: (torch.linspace(0.1, 0.7, 1000), torch.logspace(-2, 2, 33, dtype=x.dtype)), X, exact=False)


def test_an_empty_tensor_is_not_filled_before_it_is_written() -> None:
    assert_same(lambda x: torch.empty_like(x).copy_(x) * 2, X)


@pytest.mark.parametrize("sizes", [(2, 6), (4, 10), (8, 2)], ids=str)
def test_symbolic_sizes(sizes: tuple[int, int]) -> None:
    def function(x: torch.Tensor, start: int) -> tuple[Any, ...]:
        wide = x.shape[1]
        low, high = x.split([wide - 1, 1], 1)
        return (
            x.roll(wide // 2, 1),
            x.flatten().unfold(0, 2, 2) + 1,
            torch.cat([high, low], 1),
            torch.nn.functional.pad(x, (1, wide - 2)),
            x.repeat(2, 1) + 1,
            x[:, -2:] * 2,
            x.t() + 1,
            torch.stack([x, x], 1).flip(0, 2),
            torch.linspace(0, 1, wide),
        )

    ours = compiled(function, dynamic=True)
    ours(torch.randn(6, 8), 3)
    x = torch.randn(*sizes)
    torch.testing.assert_close(ours(x, 3), function(x, 3), check_stride=True)
    assert not fallbacks()


def test_as_strided_stays_in_eager_and_its_readers_do_not() -> None:
    assert_same(lambda x: x.as_strided((3, 2), (1, 1), 2) * 2, X, eager=("aten.as_strided.default",))


@pytest.mark.parametrize("sizes", [(4, 4), (3, 7), (7, 3), (1, 5), (0, 3), (3, 0)], ids=str)
def test_indices_of_triangles(sizes: tuple[int, int]) -> None:
    def function() -> list[torch.Tensor]:
        made = (torch.tril_indices, torch.triu_indices)
        return [make(*sizes, offset=offset) for offset in (-8, -2, -1, 0, 1, 2, 8) for make in made]

    assert_same(function)


def test_indices_of_triangles_of_another_dtype() -> None:
    assert_same(lambda: torch.tril_indices(300, 200, 17, dtype=torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_stretched_operand_does_not_decide_the_strides(dtype: torch.dtype) -> None:
    """A gradient that a sum stretched, times a transposed weight. Of halves, tracing alone would say otherwise. Small
    integers: their sums are exact in any order."""
    weight, row = torch.arange(-6, 6).reshape(4, 3).to(dtype).t(), torch.tensor([3, -1, 4, 2]).to(dtype)
    assert_same(lambda w, r: (r.sum().expand(3, 4) * w, r.expand(3, 4) + w, w * r.sum().expand(3, 4)), weight, row)
    expected, found = (
        torch.autograd.grad(call(given).sum(), given)[0].stride()
        for call in (lambda w: w * w, compiled(lambda w: w * w))
        for given in (weight.detach().requires_grad_(),)
    )
    assert found == expected
