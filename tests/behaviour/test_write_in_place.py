"""Writes to a few places of an input: what the user sees is eager's, and the rest of the input is not copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ferrite
from tests.behaviour.compare import STRICT, compare

# Nothing is negative, so that no sum cancels: eager's own rounding would then be as large as its result.
CACHE, ROWS, AT = torch.rand(3, 9, 8), torch.rand(3, 2, 8), torch.tensor([5, 0])


def written() -> int:
    """How many writes of the last compile became writes in memory."""
    record = ferrite.last_record()
    assert record is not None
    return sum(run.changed or 0 for graph in record.graphs for run in graph.passes if run.name == "write_in_place")


def index_copy(cache: Tensor, at: Tensor, rows: Tensor) -> Tensor:
    cache.index_copy_(1, at, rows)
    return cache.sum()


def index_assign(cache: Tensor, at: Tensor, rows: Tensor) -> Tensor:
    cache[:, at] = rows * 2
    return cache * 2


def accumulate(cache: Tensor, at: Tensor, rows: Tensor) -> Tensor:
    cache[:, at] += rows
    return cache.amax()


def slice_assign(cache: Tensor, at: Tensor, rows: Tensor) -> Tensor:
    cache[:, 4:6] = rows
    return cache[:, 5] + 1


def select_assign(cache: Tensor, at: Tensor, rows: Tensor) -> Tensor:
    cache[1] = 3.0
    return cache.sum()


def layer(cache: Tensor, at: Tensor, rows: Tensor) -> Tensor:
    cache[1].index_copy_(0, at, rows[0])
    return cache[1].sum()


def several(cache: Tensor, at: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    cache.index_add_(1, at, rows)
    between = cache.sum()
    cache[:, 2] = between
    cache.scatter_(1, torch.zeros(3, 1, 8, dtype=torch.int64), rows[:, :1])
    return between, cache.sum()


def old_is_read(cache: Tensor, at: Tensor, rows: Tensor) -> Tensor:
    before = cache + 0
    cache.index_copy_(1, at, rows)
    return before - cache


def shifted(cache: Tensor, at: Tensor, rows: Tensor) -> Tensor:
    cache[:, 1:] = cache[:, :-1].clone()
    return cache.sum()


def swapped(cache: Tensor, at: Tensor, rows: Tensor) -> Tensor:
    cache[:, at] = cache[:, at.flip(0)]
    return cache.sum()


def returned(cache: Tensor, at: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    cache.index_copy_(1, at, rows)
    return cache, cache[:, 1:]


def returned_anew(cache: Tensor, at: Tensor, rows: Tensor) -> Tensor:
    new = cache.index_copy(1, at, rows)
    cache.copy_(new)
    return new[:, 1:]


IN_PLACE = (index_copy, index_assign, slice_assign, select_assign, layer, several, returned)
ALL = (*IN_PLACE, accumulate, old_is_read, shifted, swapped, returned_anew)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("function", ALL, ids=lambda function: function.__name__)
def test_results_and_input_are_those_of_eager(function: Callable[..., Any], dynamic: bool) -> None:
    compare(function, CACHE, AT, ROWS, dynamic=dynamic)


@pytest.mark.parametrize("function", IN_PLACE, ids=lambda function: function.__name__)
def test_they_write_in_memory(function: Callable[..., Any]) -> None:
    compare(function, CACHE, AT, ROWS)
    assert written() >= 1


@pytest.mark.parametrize("layout", ["transposed", "a part"])
@pytest.mark.parametrize("function", ALL, ids=lambda function: function.__name__)
def test_inputs_with_gaps(function: Callable[..., Any], layout: str) -> None:
    cache = torch.rand(8, 9, 3).transpose(0, 2) if layout == "transposed" else torch.rand(4, 12, 8)[1:, 2:11]
    compare(function, cache, AT, ROWS)


def test_a_bad_index_leaves_the_cache_as_eager_does_and_the_next_call_works() -> None:
    compiled = torch.compile(index_copy, backend="ferrite", options=STRICT)
    for position in (torch.tensor([1, 2]), torch.tensor([1, 9]), torch.tensor([3, 4])):
        ours, theirs = CACHE.clone(), CACHE.clone()
        failures = []
        for function, cache in ((compiled, ours), (index_copy, theirs)):
            try:
                function(cache, position, ROWS)
            except IndexError as error:
                failures.append(str(error))
        assert len(set(failures)) <= 1
        assert len(failures) in (0, 2)
        assert torch.equal(ours, theirs)


def test_a_view_taken_outside_sees_the_write() -> None:
    cache = CACHE.clone()
    view = cache[0]
    torch.compile(index_copy, backend="ferrite", options=STRICT)(cache, AT, ROWS)
    assert torch.equal(view[5], ROWS[0, 0])


def test_training_through_a_cache_that_needs_no_gradient() -> None:
    def function(cache: Tensor, at: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
        cache.index_copy_(1, at, (rows * weight).detach())
        return (cache * weight).sum()

    compare(function, CACHE, AT, ROWS, torch.randn(8, requires_grad=True), training=True)
