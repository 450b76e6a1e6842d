"""Reads and writes at positions from data against eager, through the oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.unit.test_lower import NAN, assert_same, both, fallbacks

aten = torch.ops.aten
X = torch.arange(24.0).reshape(4, 6)
ROWS = torch.tensor([3, 0, 3, 1])


def test_indexing_in_every_arrangement() -> None:
    x = torch.arange(120.0).reshape(2, 3, 4, 5)
    i, j = torch.tensor([[0, -1], [1, 0]]), torch.tensor([2, -3])
    assert_same(lambda x, i, j: (x[:, i], x[:, :, j], x[i, :, j], x[:, j, i], x[i, j, i, j]), x, i, j)
    assert_same(lambda x, i: (x[i.int()], x[..., i], x[i, 1:, 2]), x, i)
    assert_same(lambda x, e: (x[e], x[:, e, :, e]), x, torch.empty(0, dtype=torch.long))
    assert_same(lambda x, i: torch.take_along_dim(x, i, 1), X, torch.tensor([[0, 5], [1, -1], [2, 2], [3, 3]]))


def test_tensors_without_dimensions() -> None:
    x, at, one = torch.tensor(2.5), torch.tensor(0), torch.tensor(4.0)
    assert_same(lambda x, i: (x.gather(0, i), x.index_select(0, i), x.index_fill(0, i, 9)), x, at)
    assert_same(lambda x, i, s: (x.scatter(0, i, s), x.scatter_add(0, i, s), x.scatter(0, i, 7)), x, at, one)
    assert_same(lambda x, i, s: (x.index_add(0, i, s), x.index_copy(0, i, s)), x, at, one)
    assert_same(lambda x, i: (x.gather(0, i), x.take(i)), torch.arange(5.0), torch.tensor(3))
    assert_same(lambda x, i, s: x.scatter_add(0, i, s), x, torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
def test_scatters_that_replace_or_compare(dtype: torch.dtype) -> None:
    x, source = X.to(dtype), (X.flip(0) - 9).to(dtype)
    rows = torch.tensor([[0, 1, 2, 3, 0, 1], [1, 2, 3, 0, 1, 1]])
    assert_same(lambda x, i: x.scatter(0, i, 3), x, rows)
    assert_same(lambda x, i, s: (x.scatter_reduce(0, i, s, "amax"), x.scatter_reduce(0, i, s, "amin")), x, rows, source)
    assert_same(lambda x, i, s: x.scatter_reduce(0, i, s, "amax", include_self=False), x, rows, source)
    assert_same(lambda x, i, s: x.index_put((i,), s, accumulate=True), x, ROWS, source)
    assert_same(lambda x, i, s: x.put(i, s, accumulate=True), x, ROWS, source[0, :4])
    assert_same(lambda x, i: (x.index_fill(1, i, 1), x.index_fill(0, -1 - i, 0)), x, ROWS)
    assert_same(lambda x, i, s: (x.index_copy(0, i, s[:3]), x.scatter(0, i[:, None], s)), x, ROWS[1:], source)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("include", [True, False])
def test_scatters_that_combine(dtype: torch.dtype, include: bool) -> None:
    x, source = (X - 3).to(dtype), (X.flip(0) - 9).to(dtype)
    rows = torch.tensor([[0, 1, 2, 3, 0, 1], [1, 2, 3, 0, 1, 1], [1, 2, 3, 0, 1, 1]])
    for reduce in ("sum", "prod"):
        assert_same(lambda x, i, s: x.scatter_reduce(0, i, s, reduce, include_self=include), x, rows, source)  # noqa: B023
    assert_same(lambda x, i, s: x.scatter_add(1, i, s), x, rows, source)
    if dtype is not torch.bool:
        assert_same(lambda x, i, s: x.index_reduce(0, i, s, "prod", include_self=include), x, ROWS, source)
        assert_same(lambda x, i, s: x.scatter(0, i, s, reduce="multiply"), x, rows, source)
        assert_same(lambda x, i, s: x.index_add(0, i, s, alpha=-2), x, ROWS, source)


def test_of_values_for_one_element_the_last_one_stays() -> None:
    """Where all points meet is known here, so the place does not change along the axis; a program of the fuzzer was
    refused for that."""

    def replaced(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ones = torch.ones(x.shape[0], dtype=torch.long)
        rows = x.scatter(0, torch.full_like(x, 2, dtype=torch.long), x * 2)
        return rows, x.scatter(1, torch.ones_like(x, dtype=torch.long), x), x.index_put((ones,), x - 1)

    assert_same(replaced, X)
    assert_same(replaced, X[:, :2])


def test_nothing_to_write() -> None:
    none = torch.empty(0, dtype=torch.long)
    assert_same(lambda x, i: (x.scatter(0, i, 1.0), x.index_fill(0, i, 1.0), x.gather(0, i)), torch.arange(4.0), none)
    assert_same(lambda x, i: (x.index_put((i,), x[i]), x.take(i)), X, none)


def test_a_value_where_a_mask_is_set() -> None:
    mask = X % 3 == 0

    def write(x: torch.Tensor, mask: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[mask] = 0
        x[mask[:, 0]] = row
        return x.index_put((mask,), row[:1], accumulate=True)

    assert_same(write, X, mask, -X[0])


def test_masked_index_reads_nothing_outside() -> None:
    at, mask = torch.tensor([0, 9, -9, 2]), torch.tensor([True, False, False, True])
    assert_same(lambda x, i, m: aten._unsafe_masked_index(x, m, [i], 5.0), torch.arange(4.0), at, mask)
    assert_same(
        lambda x, i, m, v: aten._unsafe_masked_index_put_accumulate(x, m, [i], v),
        torch.arange(4.0), at, mask, torch.ones(4),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradient_of_an_embedding(dtype: torch.dtype) -> None:
    """The padding row stays zero; rows outside count for nothing; halves are rounded after each addition."""
    grad, rows = torch.randn(40, 3).to(dtype), torch.arange(40) % 7 - 1
    assert_same(lambda g, i: aten.embedding_dense_backward(g, i, 5, 2, False), grad, rows)


@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("sequence", [[1.0, 2.0, 3.0, NAN], [1.0, NAN, NAN], [3.0, 1.0, 2.0], [1.0, 1.0, 2.0, 2.0], []])
def test_searches_meet_the_elements_that_eagers_meet(sequence: list[float], right: bool) -> None:
    values = torch.tensor([NAN, 0.0, 1.0, 2.0, 3.0, 4.0, float("inf"), -float("inf")])
    assert_same(lambda v, b: torch.bucketize(v, b, right=right), values, torch.tensor(sequence))


def test_searches() -> None:
    rows, values = torch.randn(3, 9).sort()[0], torch.randn(3, 5)
    assert_same(lambda s, v: (torch.searchsorted(s, v), torch.searchsorted(s[0], v, side="right")), rows, values)
    assert_same(lambda s: (torch.searchsorted(s, 2, out_int32=True), torch.bucketize(3, s)), torch.arange(0, 40, 3))
    assert_same(lambda a, b: (torch.isin(a, b), torch.isin(a, b, invert=True)), values, values[:, 0])


def test_searches_by_a_sorter() -> None:
    rows, values = torch.randn(3, 9), torch.randn(3, 5)
    assert_same(lambda s, v, o: torch.searchsorted(s, v, sorter=o), rows, values, rows.argsort())
    assert_same(lambda s, o: torch.searchsorted(s, 0.5, side="right", sorter=o), rows[0], rows[0].argsort())
    # Not sorted at all, with a position that comes twice: the search meets the elements that eager's meets.
    assert_same(lambda s, v, o: torch.searchsorted(s, v, sorter=o, right=True), rows, values, rows.argsort() // 2)


@pytest.mark.parametrize("place", [0, 4, 8])
@pytest.mark.parametrize("wrong", [-1, 9])
def test_all_of_a_sorter_is_checked(place: int, wrong: int) -> None:
    """Also where the search for a large number never looks."""
    order = torch.arange(9)
    order[place] = wrong

    def function(sequence: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        return torch.searchsorted(sequence, 100.0, sorter=order)

    raises_as_eager(function, torch.arange(9.0), order)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("repeats", [[2, 0, 1, 3], [0, 0, 4], [1, 0, 0], [5]], ids=str)
def test_positions_repeated(repeats: list[int], dtype: torch.dtype) -> None:
    total, often = sum(repeats), torch.tensor(repeats, dtype=dtype)
    assert_same(lambda r: torch.repeat_interleave(r, output_size=total), often)
    assert_same(lambda x, r: torch.repeat_interleave(x, r, 0, output_size=total), X[: len(repeats)], often)


@pytest.mark.parametrize("repeats", [[2, 1], [9, 9], [7, -1], [9, -1], [-6, 12]], ids=str)
def test_repeats_that_do_not_fill_six_places(repeats: list[int]) -> None:
    """Too few, too many, negative, and both: eager looks at the sum first."""
    raises_as_eager(lambda r: torch.repeat_interleave(r, output_size=6), torch.tensor(repeats))


def test_positions_repeated_in_symbolic_sizes() -> None:
    function = lambda x, r: torch.repeat_interleave(x, r, 0, output_size=2 * x.shape[0])
    ours = torch.compile(function, backend="ferrite", dynamic=True, options={"executor": "oracle", "strict": True})
    for repeats in ([2, 0, 3, 3], [0, 4, 2]):
        x = torch.randn(len(repeats), 3)
        assert torch.equal(ours(x, torch.tensor(repeats)), function(x, torch.tensor(repeats)))
        assert fallbacks() == set()


BAD = torch.tensor([0, -1])


def raises_as_eager(function: Callable[..., Any], *inputs: Any) -> None:
    """The type and the first line of what eager raises."""
    with pytest.raises((IndexError, RuntimeError)) as eager:
        function(*inputs)
    ours = torch.compile(function, backend="ferrite", options={"executor": "oracle", "strict": True})
    with pytest.raises(type(eager.value)) as found:
        ours(*inputs)
    assert type(found.value) is type(eager.value)
    assert str(found.value).splitlines()[0] == str(eager.value).splitlines()[0]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, i: x.index_select(0, i),
        lambda x, i: x.index_select(1, i),
        lambda x, i: x[None].index_select(2, i),
        lambda x, i: x.scatter(1, i[:, None], 1.0),
        lambda x, i: x.scatter_add(0, i[:, None], x),
        lambda x, i: x.index_add(1, i, x[:, :2]),
        lambda x, i: x[0].index_add(0, i, x[0, :2]),
        lambda x, i: x[None].index_add(1, i, x[None, :2]),
        lambda x, i: x.index_copy(1, i, x[:, :2]),
        lambda x, i: x.index_fill(1, i * 7, 1.0),
        lambda x, i: x.index_reduce(0, i, x[:2], "amax"),
        lambda x, i: x.take(i * 25),
        lambda x, i: x.put(i * 25, x[0, :2]),
        lambda x, i: x[:, i * 7],
        lambda x, i: x.index_put((i * 7,), x[:2]),
        lambda x, i: x[0, 0].gather(0, i),
        lambda x, i: torch.nn.functional.embedding(i, x),
        lambda x, i: x[0, 0].index_select(0, i),
        lambda x, i: x[0, 0].index_select(0, i[1:]),
        lambda x, i: x[:1].expand(4, 6)[i * 7],
        lambda x, i: torch.ones(4)[i * 7],
    ],
)
def test_positions_outside_raise_with_eagers_words(function: Callable[..., Any]) -> None:
    raises_as_eager(function, X, BAD)


@pytest.mark.parametrize("count", [3, 8])
def test_symbolic_sizes(count: int) -> None:
    def function(x: torch.Tensor, i: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            x[i],
            x.gather(0, i[:, None]),
            x.index_add(0, i, s),
            x.scatter_reduce(0, i[:, None].expand_as(s), s, "amax"),
            x.index_put((i,), s, accumulate=True),
            x.take(i),
        )

    ours = torch.compile(function, backend="ferrite", dynamic=True, options={"executor": "oracle", "strict": True})
    for rows, positions in ((5, 4), (6, count)):
        x, i, s = torch.randn(rows, 3), torch.arange(positions) % 4, torch.randn(positions, 3)
        torch.testing.assert_close(ours(x, i, s), function(x, i, s), check_stride=True)


@pytest.mark.parametrize("reduce", ["sum", "mean", "prod"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64], ids=str)
def test_sums_of_halves_are_rounded_once(reduce: str, dtype: torch.dtype) -> None:
    """And a mean of integers is rounded down."""
    count = 12 if reduce == "prod" else 300
    rows, source = torch.arange(count)[:, None].expand(count, 6) % 3, torch.randn(count, 6).mul(3).to(dtype)
    x = (X - 9).to(dtype)
    assert_same(lambda x, i, s: x.scatter_reduce(0, i, s, reduce), x, rows, source)
    assert_same(lambda x, i, s: x.scatter_reduce(0, i, s, reduce, include_self=False), x, rows, source)
    assert_same(lambda x, i, s: (x.scatter_add(0, i, s), x.index_add(0, i[:, 0], s)), x, rows, source)


def test_means_at_positions() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        x, source = (X - 9).to(dtype), (X * 2 - 21).to(dtype)
        assert_same(lambda x, i, s: x.index_reduce(0, i, s, "mean"), x, ROWS, source)
        assert_same(lambda x, i, s: x.index_reduce(0, i, s, "mean", include_self=False), x, ROWS, source)


def test_the_last_of_several_writes_stays() -> None:
    assert_same(lambda x, i, s: (x.index_put((i,), s), x.index_copy(0, i, s)), X, ROWS, -X)
    assert_same(lambda x, i, s: (x.scatter(0, i[:, None].expand(4, 6), s), x.put(i, s[0, :4])), X, ROWS, -X)


def test_elements_one_by_one_where_a_mask_is_set() -> None:
    mask = X % 5 < 2
    assert_same(lambda x, m, s: (x.masked_scatter(m, s), x.masked_scatter(m[:1], s)), X, mask, -X)
    assert_same(lambda g, m: aten.masked_scatter_backward(g, m, [3, 5]), X, mask)
    with pytest.raises(RuntimeError, match="Number of elements of source < number of ones in mask"):
        both(
            lambda x, m, s: torch.compile(
                lambda *a: torch.masked_scatter(*a), backend="ferrite", options={"executor": "oracle", "strict": True}
            )(x, m, s),
            X,
            mask,
            X[0, :2],
        )
