"""A softmax computes each exponential once, where a row of them fits into the cache, and gives the same."""

from __future__ import annotations

import pytest
import torch

import ferrite
from ferrite.loops.text import parse_program, show
from ferrite.schedule.keep_exponentials import keep_exponentials

SOFTMAX = """
def program(x: f32[64, 128], y: out(f32[64, 128])):
    for i, j in box(64, 128):
        y[i, j] = exp(x[i, j] - softmax(x[i, r] for r in box(128))) / softmax(x[i, r] for r in box(128)).sum
"""


def test_exponentials_are_kept_for_the_sum() -> None:
    assert (
        show(keep_exponentials(parse_program(SOFTMAX)).program).strip()
        == """
def program(x: f32[64, 128], y: out(f32[64, 128])):
    e = local(f32[64, 128])
    for i, j in box(64, 128):
        e[i, j] = exp(x[i, j] - max(x[i, r] for r in box(128)))
    for i, j in box(64, 128):
        y[i, j] = e[i, j] / sum(e[i, r] for r in box(128))
""".strip()
    )


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("128", "12800", "a row is longer than the memory for one"),
        ("exp(x[i, j] - ", "exp(x[0, j] - ", "other numbers than those of the sum"),
        (" / softmax(x[i, r] for r in box(128)).sum", "", "nobody asks for the sum"),
        ("[i, j] = exp(x[i, j]", "[i, j] = exp(x[j, i]", "along the other axis"),
    ],
)
def test_they_are_not(old: str, new: str, reason: str) -> None:
    program = parse_program(
        SOFTMAX.replace(old, new).replace("f32[64, 128]", "f32[128, 128]").replace("box(64", "box(128")
    )
    assert keep_exponentials(program).program is program, reason


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("columns", [1, 7, 129, 5000])
def test_results_are_those_of_eager(dtype: torch.dtype, columns: int, dynamic: bool) -> None:
    x = (torch.randn(5, 3, columns) * 9).to(dtype)
    x[1, 1], x[2, 0, 0], x[3, 2, -1] = -torch.inf, torch.nan, torch.inf
    function = lambda x: (torch.softmax(x * 2, -1), torch.softmax(x.transpose(0, 2), 0))
    options = {"strict": True}
    found = torch.compile(function, backend="ferrite", dynamic=dynamic, options=options)(x)
    torch.testing.assert_close(found, function(x), equal_nan=True)
    record = ferrite.last_record()
    assert record is not None
    assert not record.fallbacks


def test_decisions_say_what_a_second_exponential_costs() -> None:
    (decision,) = keep_exponentials(parse_program(SOFTMAX)).decisions
    cost = "40 operations an element, or 8 bytes written and read"
    assert (decision.what, decision.taken) == ("keep exponentials", True)
    assert decision.reason == f"a second exponential costs more: {cost}"
