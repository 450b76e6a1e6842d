"""What takes long and is needed by a reduction and by its nest is computed once, where a row of it fits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import ferrite
from ferrite.loops.text import parse_program, show
from ferrite.schedule.keep_rows import keep_rows

NORM = """
def program(x: f32[64, 128], y: out(f32[64, 128])):
    for i, j in box(64, 128):
        y[i, j] = tanh(x[i, j]) / sum(tanh(x[i, r]) for r in box(128))
"""


def test_a_row_is_kept() -> None:
    assert (
        show(keep_rows(parse_program(NORM)).program).strip()
        == """
def program(x: f32[64, 128], y: out(f32[64, 128])):
    e = local(f32[64, 128])
    for i, j in box(64, 128):
        e[i, j] = tanh(x[i, j])
    for i, j in box(64, 128):
        y[i, j] = e[i, j] / sum(e[i, r] for r in box(128))
""".strip()
    )


@pytest.mark.parametrize("operation", ["welford", "softmax"])
def test_a_reduction_that_goes_over_it_twice_is_reason_enough(operation: str) -> None:
    program = parse_program(NORM.replace("tanh(x[i, j]) / sum(", f"{operation}("))
    assert "e[i, j] = tanh(x[i, j])" in show(keep_rows(program).program)


def test_a_reduction_for_each_lane_is_none_along_the_lanes() -> None:
    program = parse_program("""
def program(x: f32[15, 15], y: out(f32[15])):
    for i in box(15):
        y[i] = welford(tanh(x[i, r]) for r in box(15)).m2
""")
    assert keep_rows(program).program is program


def test_what_is_the_same_all_along_a_row_is_not_kept() -> None:
    program = parse_program("""
def program(x: f32[64, 1], y: out(f32[64, 128])):
    for i, j in box(64, 128):
        y[i, j] = tanh(x[i, 0]) / sum(tanh(x[i, 0]) for r in box(128)) + softmax(tanh(x[i, 0]) for r in box(128))
""")
    assert keep_rows(program).program is program


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("128", "12800", "a row is longer than the memory for one"),
        ("tanh(", "abs(", "it is done as quickly again"),
        ("tanh(x[i, j]) /", "tanh(x[j, i]) /", "nobody needs it again"),
        ("y: out", "y: inout", "the kernel changes what it reads"),
    ],
)
def test_it_is_not(old: str, new: str, reason: str) -> None:
    text = NORM.replace("f32[64, 128]", "f32[128, 128]").replace("box(64", "box(128").replace(old, new)
    if "inout" in new:
        text = text.replace("x[", "y[").replace("x: f32[128, 128], ", "")
    program = parse_program(text)
    assert keep_rows(program).program is program, reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("columns", [3, 7, 130, 5000])
def test_results_are_those_of_eager(dtype: torch.dtype, columns: int) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return F.layer_norm(F.gelu(x) + y, (columns,)), torch.sigmoid(x) / torch.sigmoid(x).sum(-1, keepdim=True)

    x, y = (torch.randn(6, columns).to(dtype) for _ in range(2))
    x[1, 0], x[2] = torch.nan, torch.inf
    found = torch.compile(function, backend="ferrite", options={"strict": True})(x, y)
    torch.testing.assert_close(found, function(x, y), equal_nan=True)
    record = ferrite.last_record()
    assert record is not None
    assert not record.fallbacks


def test_a_dropout_before_a_norm_draws_each_number_once() -> None:
    """Were numbers drawn anew for the statistics, they would be those of other rows."""
    x = torch.randn(64, 512)
    function = lambda x: F.layer_norm(F.dropout(x, 0.5, training=True), (512,))
    made = torch.compile(function, backend="ferrite", options={"strict": True})(x)
    torch.testing.assert_close(made.mean(-1), torch.zeros(64), atol=1e-5, rtol=0)
    torch.testing.assert_close(made.var(-1, unbiased=False), torch.ones(64), atol=1e-3, rtol=0)


def decided(text: str) -> list[tuple[tuple[str, ...], bool, str]]:
    decisions = keep_rows(parse_program(text)).decisions
    assert all(decision.what == "keep row" for decision in decisions)
    return [(decision.subjects, decision.taken, decision.reason) for decision in decisions]


def test_decisions_tell_what_was_compared() -> None:
    cost = "1 times 40 operations an element, or 8 bytes written and read"
    assert decided(NORM) == [(("program", "e"), True, f"to compute it again costs more: {cost}")]
    assert decided(NORM.replace("128", "12800")) == [
        (("program", "y"), False, f"a row of 51,200 bytes is longer than 16,384; to compute it again: {cost}")
    ]
    cheap = "1 times 1 operations an element, or 8 bytes written and read"
    assert decided(NORM.replace("tanh(", "abs(")) == [
        (("program", "y"), False, f"to compute it again costs less: {cheap}")
    ]
    assert decided(NORM.replace("tanh(", "(")) == []


@pytest.mark.parametrize(("columns", "is_kept"), [(128, False), (768, True)])
def test_many_quick_operations_are_kept_in_long_rows(columns: int, is_kept: bool) -> None:
    chain = "x[i, j]"
    for number in range(1, 5):
        chain = f"maximum({chain} * f32({number}.5), f32({number}.0))"
    text = f"""
def program(x: f32[64, {columns}], y: out(f32[64, {columns}])):
    for i, j in box(64, {columns}):
        y[i, j] = {chain} * sum({chain.replace("j", "r")} for r in box({columns}))
"""
    ((_, taken, reason),) = decided(text)
    assert taken == is_kept
    assert "1 times 8 operations" in reason


def test_what_a_guard_keeps_from_being_read_is_not_kept_for_all_rows() -> None:
    program = parse_program("""
def program(x: f32[8, 768], y: out(f32[16, 768])):
    for i, j in box(16, 768):
        y[i, j] = guarded(value(i) < i64(8), tanh(x[i, j]) * sum(tanh(x[i, r]) for r in box(768)), f32(0.0))
""")
    assert keep_rows(program).program is program
