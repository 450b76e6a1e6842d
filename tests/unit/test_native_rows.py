"""Sums across rows run row by row, and give what they would column by column."""

from __future__ import annotations

import pytest
import torch

from ferrite.loops.text import parse_program
from ferrite.native.rows import sums_across


@pytest.mark.parametrize(
    ("sizes", "value", "count"),
    [
        ("64, 1024", "sum(x[r, i] for r in box(64))", 1),
        ("64, 1024", "sum(x[r, i] * x[r, 0] for r in box(64)) + max(x[r, i] for r in box(64))", 2),
        ("64, 64", "sum(x[r, i] for r in box(64))", 0),  # rows are near to one another
        ("8, 1024", "sum(x[r, i] for r in box(8))", 0),  # few rows
        ("1024, 1024", "sum(x[r, i] for r in box(1024))", 0),  # so many that a running sum would lose digits
        ("64, 1024", "sum(x[r, 0] for r in box(64)) + x[0, i]", 0),  # the same for all columns
        ("64, 1024", "guarded(value(i) < i64(9), sum(x[r, i] for r in box(64)), f32(0.0))", 0),  # not everywhere
    ],
)
def test_which_sums_run_row_by_row(sizes: str, value: str, count: int) -> None:
    columns = sizes.split(", ")[1]
    (nest,) = parse_program(f"""
def program(x: f32[{sizes}], y: out(f32[{columns}])):
    for i in box({columns}):
        y[i] = {value}
""").nests
    assert len(sums_across(nest.axes, nest.body, nest.axes[0])) == count


@pytest.mark.parametrize("rows", [16, 67, 300])
@pytest.mark.parametrize("columns", [257, 2050])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_the_answer_of_eager_for_any_number_of_threads(rows: int, columns: int, dtype: torch.dtype) -> None:
    """Of small integers, exact in any order; several results that share what they read, and what follows them."""
    torch.manual_seed(0)
    x, y = (torch.randint(-3, 4, (rows, columns)).to(dtype) for _ in range(2))

    def sums(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.float().sum(0), (x * y).amax(0), x.amin(0) - y[0], (x * (y - x[:, :1])).float().sum(0) + 1

    expected = sums(x, y)
    compiled = torch.compile(sums, backend="ferrite", dynamic=False, options={"strict": True})
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            torch.testing.assert_close(compiled(x, y), expected, rtol=0, atol=0)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("rows", [32, 33, 70, 100, 513])
def test_a_sum_of_negative_zeros_is_zero(rows: int) -> None:
    """Whether or not rows come out even."""
    x = torch.full((rows, 300), -0.0)
    compiled = torch.compile(lambda x: x.sum(0), backend="ferrite", dynamic=False, options={"strict": True})
    assert not compiled(x).signbit().any()
    assert not x.sum(0).signbit().any()
