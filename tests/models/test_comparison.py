"""The comparison itself: each kind of difference is found, and the fp64 rule lets through rounding and nothing more."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.models.against_eager import Trace, compare


def trace_of(values: Tensor, structure: str = "one tensor") -> Trace:
    trace = Trace(structure=[structure], random_state=torch.zeros(3, dtype=torch.uint8))
    trace.add("outputs", {"out": values})
    return trace


@pytest.fixture
def exact() -> Tensor:
    return torch.randn(40, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_equal_bits_pass(exact: Tensor) -> None:
    compare(trace_of(exact.float()), trace_of(exact.float()))


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "one element": lambda x: x.index_put((torch.tensor([3]), torch.tensor([4])), x[3, 4] + 0.001),
    "strides": lambda x: x.t().contiguous().t(),
    "dtype": lambda x: x.double(),
    "shape": lambda x: x[None],
    "requires_grad": lambda x: x.clone().requires_grad_(),
    "class": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "not a number": lambda x: x.index_fill(0, torch.tensor([3]), float("nan")),
}


@pytest.mark.parametrize("change", [pytest.param(change, id=name) for name, change in CHANGES.items()])
def test_a_difference_is_found(exact: Tensor, change: Callable[[Tensor], Tensor]) -> None:
    eager = exact.float()
    with pytest.raises(AssertionError, match="out: "):
        compare(trace_of(eager), trace_of(change(eager)))


def test_rounding_passes_and_integers_are_exact(exact: Tensor) -> None:
    eager = exact.float()
    compare(trace_of(eager), trace_of(torch.nextafter(eager, eager + 1)))
    with pytest.raises(AssertionError, match="out: "):
        compare(trace_of(torch.arange(9)), trace_of(torch.arange(9).index_fill(0, torch.tensor([3]), 4)))


def test_structure_names_and_random_stream_count(exact: Tensor) -> None:
    eager = trace_of(exact.float())
    with pytest.raises(AssertionError, match="structure"):
        compare(eager, trace_of(exact.float(), structure="another"))
    renamed = trace_of(exact.float())
    renamed.groups["outputs"] = {"other": exact.float()}
    with pytest.raises(AssertionError, match="other outputs than in eager"):
        compare(eager, renamed)
    moved = trace_of(exact.float())
    moved.random_state = torch.ones(3, dtype=torch.uint8)
    with pytest.raises(AssertionError, match="random stream ended elsewhere"):
        compare(eager, moved)


def rounded(exact: Tensor, units: float) -> Tensor:
    """`exact` in float32 with an error of about so many units in the last place."""
    noise = torch.randn(exact.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return (exact * (1 + units * torch.finfo(torch.float32).eps * noise)).float()


def test_distance_allows_the_rounding_of_eager(exact: Tensor) -> None:
    eager = trace_of(rounded(exact, units=4))
    compare(eager, trace_of(rounded(exact, units=7)), reference=trace_of(exact))


def test_distance_refuses_more(exact: Tensor) -> None:
    eager = trace_of(rounded(exact, units=4))
    with pytest.raises(AssertionError, match="from float64, allowed"):
        compare(eager, trace_of(rounded(exact, units=24)), reference=trace_of(exact))


def test_distance_refuses_one_wrong_element(exact: Tensor) -> None:
    wrong = exact.float()
    wrong[0, 0] += 0.01
    with pytest.raises(AssertionError, match="from float64, allowed"):
        compare(trace_of(exact.float()), trace_of(wrong), reference=trace_of(exact))


def test_distance_refuses_not_a_number(exact: Tensor) -> None:
    broken = exact.float()
    broken[0, 0] = float("nan")
    with pytest.raises(AssertionError, match="from float64, allowed"):
        compare(trace_of(exact.float()), trace_of(broken), reference=trace_of(exact))


def test_a_reference_of_another_function_is_refused(exact: Tensor) -> None:
    eager = trace_of(exact.float())
    with pytest.raises(AssertionError, match="not a reference of the same function"):
        compare(eager, eager, reference=trace_of(exact * 1.01))


def test_integers_are_equal_under_both_rules() -> None:
    eager, off = torch.arange(5), torch.arange(5).clamp(max=3)
    for reference in (None, trace_of(eager)):
        with pytest.raises(AssertionError, match="1 of 5 elements differ"):
            compare(trace_of(eager), trace_of(off), reference)
