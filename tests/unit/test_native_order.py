"""Scans and scatters in lanes: rows that meet are combined in order, columns that never meet run side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import ferrite
from ferrite.loops.text import parse_program
from ferrite.schedule.shape import shape_of

ROWS, COLUMNS = 37, 533  # more than one stretch of columns, and a rest


def table() -> torch.Tensor:
    return torch.randint(-4, 5, (ROWS, COLUMNS)).float()


def places(rows: int = ROWS) -> torch.Tensor:
    return torch.randint(0, 5, (rows,))


CASES: dict[str, Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]] = {
    "cumsum": lambda: (lambda x: x.cumsum(0), (table(),)),
    "cumsum of rows": lambda: (lambda x: x.cumsum(1), (table(),)),
    "cumsum of rows of halves": lambda: (lambda x: x.cumsum(1), (table().half(),)),
    "cummax of rows": lambda: (lambda x: torch.cummax(x, 1), (table(),)),
    "cumsum of halves": lambda: (lambda x: x.cumsum(0), (table().bfloat16(),)),
    "cumprod of integers": lambda: (lambda x: x.cumprod(0), (table().long(),)),
    "cummax": lambda: (lambda x: torch.cummax(x, 0), (table(),)),
    "cummin of halves": lambda: (lambda x: torch.cummin(x, 0), (table().half(),)),
    "index_add": lambda: (lambda x, i, y: x.index_add(0, i, y), (table()[:5], places(), table())),
    "index_put": lambda: (lambda x, i, y: x.index_put((i,), y), (table()[:5], places(), table())),
    "scatter_reduce": lambda: (
        lambda x, i, y: x.scatter_reduce(0, i, y, "amax"),
        (table()[:5], torch.randint(0, 5, (ROWS, COLUMNS)), table()),
    ),
    "embedding gradient": lambda: (
        lambda g, i: torch.ops.aten.embedding_dense_backward(g, i, 7, -1, False),
        (table(), places()),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_answer_of_eager_for_any_number_of_threads(name: str) -> None:
    """Sums are of small integers: exact in any order that eager may take."""
    torch.manual_seed(0)
    function, arguments = CASES[name]()
    expected = function(*arguments)
    compiled = torch.compile(function, backend="ferrite", options={"executor": "native", "strict": True})
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            torch.testing.assert_close(compiled(*arguments), expected, rtol=0, atol=0)
    finally:
        torch.set_num_threads(1)
    assert not ferrite.last_record().fallbacks


def lanes_of(text: str) -> str | None:
    nest = parse_program(f"def program(n: i64[8], x: f32[8, 64], y: inout(f32[64, 64])):\n{text}").nests[0]
    shape = shape_of(nest.axes, nest.body)
    return shape.vector and shape.vector.name + (", singly" if shape.is_single else "")


def test_lanes_go_along_an_axis_whose_points_never_meet() -> None:
    place = "at(checked(n[i], 64, False, 'IndexError', 'bad'), 0, 63)"
    assert lanes_of(f"    for i, j in box(8, 64):\n        y[{place}, j] += x[i, j]\n") == "j"
    assert lanes_of(f"    for i, j in box(8, 64):\n        y[{place}, j] = x[i, j]\n") == "j"
    assert lanes_of(f"    for i, j in box(8, 64):\n        y[j, {place}] += x[i, j]\n") is None, "writes with gaps"
    assert lanes_of(f"    for i, j in box(8, 64):\n        y[0, {place}] += x[i, j]\n") is None, "all may meet"
    moved = f"y[{place}, j] = y[0, 63 - j]"
    assert lanes_of(f"    for i, j in box(8, 64):\n        {moved}\n") is None, "reads what another column writes"
    assert lanes_of("    for j in box(64):\n        for k in scan(8):\n            y[k, j] = cumsum(x[k, j])\n") == "j"
    assert (
        lanes_of("    for k in box(8):\n        for j in scan(64):\n            y[k, j] = cumsum(x[k, j])\n")
        == "k, singly"
    )
