"""Lowering against eager, through the oracle: the classes of wrong answers that compilers are known for."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ferrite

ROOT = Path(__file__).parents[2]
INF, NAN = math.inf, math.nan
ODD = torch.tensor([NAN, INF, -INF, 0.0, -0.0, 1e-42, -1e-42, 1.5, -2.5, 3e38])


def both(function: Callable[..., Any], *inputs: Any) -> tuple[Any, Any]:
    """Eager's result and ours; nothing but `allowed` ops may run in eager."""
    compiled = torch.compile(function, backend="ferrite", options={"executor": "oracle", "strict": True})
    return function(*inputs), compiled(*inputs)


def fallbacks() -> set[str]:
    """Ops that run in eager, except where they would compute nothing."""
    record = ferrite.last_record()
    assert record is not None
    return {fallback.op for fallback in record.fallbacks if fallback.reason != "a result without elements"}


def assert_same(function: Callable[..., Any], *inputs: Any, eager: tuple[str, ...] = (), exact: bool = True) -> None:
    expected, found = both(function, *inputs)
    assert fallbacks() == set(eager)
    tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {}
    torch.testing.assert_close(found, expected, equal_nan=True, check_stride=True, **tolerance)
    if isinstance(expected, torch.Tensor) and expected.dtype.is_floating_point and exact:
        finite = ~expected.isnan()
        assert torch.equal(found.signbit()[finite], expected.signbit()[finite]), "the sign of zero differs"


@pytest.mark.parametrize("name", ["maximum", "minimum", "fmax", "fmin"])
def test_nan_and_infinity_in_extremes(name: str) -> None:
    left = ODD[ODD != 0]
    right = left.flip(0)
    assert_same(lambda a, b: getattr(torch, name)(a, b), left, right)


def test_clamp_keeps_nan_and_prefers_the_upper_limit() -> None:
    assert_same(lambda x: (x.clamp(-1, 1), x.clamp(min=0.5), x.clamp(3, -3)), ODD)


@pytest.mark.parametrize("name", ["argmax", "argmin", "amax", "amin"])
def test_nan_and_ties_in_reductions(name: str) -> None:
    rows = torch.tensor([[1.0, 3.0, 3.0, -INF], [NAN, 3.0, NAN, INF], [-INF, -INF, -INF, -INF], [0.0, 0.0, 1.0, 1.0]])
    assert_same(lambda x: getattr(torch, name)(x, -1), rows)


def test_signed_zero_and_denormals_survive() -> None:
    assert_same(lambda x: x.neg(), ODD)
    assert_same(lambda x: x * 1.0, ODD)
    assert_same(lambda x: x.abs(), ODD)
    assert_same(lambda x: torch.copysign(x, -x), ODD)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_op_of_halves_rounds(dtype: torch.dtype) -> None:
    x = torch.linspace(-3, 3, 257).to(dtype)
    assert_same(lambda v: (v * 1.1 + 0.3) * v - v, x)
    assert_same(lambda v: v.float().to(v.dtype).double(), x)


def test_low_precision_casts_are_not_elided() -> None:
    assert_same(lambda v: v.bfloat16().float(), torch.rand(64))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64, torch.uint8], ids=str)
def test_integers_wrap_around(dtype: torch.dtype) -> None:
    limits = torch.iinfo(dtype)
    x = torch.tensor([limits.min, limits.max, 0, 1, 3], dtype=dtype)
    assert_same(lambda v: (v + v, v * v, v - 1, v.neg(), v.abs() if v.dtype != torch.uint8 else v), x)
    assert_same(lambda v: (v & 3, v | 4, v ^ v, ~v, v << 1, v >> 1), x)


def test_shifts_by_too_much() -> None:
    x = torch.tensor([-5, 7, 1 << 40])
    amount = torch.tensor([63, 64, 70])
    assert_same(lambda v, n: (v >> n, v << n), x, amount)


def test_integer_division_raises_as_in_eager() -> None:
    compiled = torch.compile(lambda x, y: x // y, backend="ferrite", options={"executor": "oracle", "strict": True})
    x, y = torch.tensor([7, -7, 5]), torch.tensor([2, 2, -3])
    assert torch.equal(compiled(x, y), x // y)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        compiled(x, torch.zeros_like(y))


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda x, y: (x // y)[:1] + 1, id="slice"),
        pytest.param(lambda x, y: (x % y).index_select(0, torch.tensor([0])), id="index_select"),
        pytest.param(lambda x, y: (x // y).reshape(2, 1)[0] * 2, id="view of a view"),
    ],
)
def test_an_element_that_raises_is_not_left_out(function: Callable[..., Any]) -> None:
    x, y = torch.tensor([4, 5]), torch.tensor([2, 0])
    compiled = torch.compile(function, backend="ferrite", options={"executor": "oracle", "strict": True})
    for call in (function, compiled):
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            call(x, y)


def test_bool_and_uint8_promote_as_in_eager() -> None:
    mask, small, number = (
        torch.tensor([True, False]),
        torch.tensor([200, 100], dtype=torch.uint8),
        torch.tensor([1.5, 2]),
    )
    assert_same(lambda m, u: (m + m, m * m, m + u, u + 100, u + 1.5, m + 1), mask, small)
    assert_same(lambda m, f: (m * f, torch.where(m, f, 1), f > m), mask, number)
    zero_dim = torch.tensor(2.5, dtype=torch.float64)
    assert_same(lambda f, z: (f * z, z * 2), number, zero_dim)


def test_empty_and_single_reductions() -> None:
    empty, single = torch.empty(0, 3), torch.randn(1, 1)
    assert_same(lambda x: (x.sum(), x.sum(0), x.prod(0), x.any(), x.all(), x.sum(1)), empty)
    assert_same(lambda x: (x.sum(), x.mean(), x.amax(), x.var(correction=0), x.argmax()), single)


def test_sums_of_integers_and_truth_values_are_wide() -> None:
    assert_same(lambda x: (x.sum(), x.sum(0), (x > 0).sum()), torch.full((100, 3), 100, dtype=torch.int8))


def test_scatter_with_repeated_positions() -> None:
    x, rows, source = torch.zeros(4), torch.tensor([1, 1, 3, 1]), torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert_same(lambda a, r, s: a.scatter_add(0, r, s), x, rows, source)
    assert_same(lambda a, r, s: a.index_add(0, r, s, alpha=2), x, rows, source)
    assert_same(lambda a, r, s: a.index_put((r,), s, accumulate=True), x, rows, source)
    assert_same(lambda a, r, s: a.scatter_reduce(0, r, s, "amax"), x, rows, source)


@pytest.mark.parametrize(
    ("function", "error"),
    [
        (lambda x, i: torch.index_select(x, 0, i), IndexError),
        (lambda x, i: torch.index_select(x, 1, i), RuntimeError),
        (lambda x, i: torch.nn.functional.embedding(i, x), IndexError),
        (lambda x, i: torch.gather(x, 0, i[:, None]), RuntimeError),
        (lambda x, i: x[i - 9], IndexError),
    ],
    ids=["index_select rows", "index_select columns", "embedding", "gather", "index"],
)
def test_bad_positions_raise_as_in_eager(function: Callable[..., Any], error: type[Exception]) -> None:
    x, positions = torch.randn(4, 4), torch.tensor([-1, 0])
    with pytest.raises(error) as eager:
        function(x, positions)
    compiled = torch.compile(function, backend="ferrite", options={"executor": "oracle", "strict": True})
    with pytest.raises(error) as ours:
        compiled(x, positions)
    assert type(ours.value) is type(eager.value)
    assert str(ours.value).splitlines()[0] == str(eager.value).splitlines()[0]


def test_margin_ranking_loss_gradient_in_bf16() -> None:
    """-0.5, not -0.0: a gradient that a rounded mask would lose."""

    def gradient(loss: Callable[..., torch.Tensor]) -> torch.Tensor:
        left = torch.tensor([1.0, 2.0], dtype=torch.bfloat16, requires_grad=True)
        right = torch.tensor([2.0, 3.0], dtype=torch.bfloat16)
        loss(left, right, torch.ones(2, dtype=torch.bfloat16)).backward()
        assert left.grad is not None
        return left.grad

    loss = torch.nn.functional.margin_ranking_loss
    compiled = torch.compile(loss, backend="ferrite", options={"executor": "oracle", "strict": True})
    assert torch.equal(gradient(compiled), gradient(loss))
    assert gradient(compiled).tolist() == [-0.5, -0.5]


def test_amax_gradient_shares_ties() -> None:
    def gradient(function: Callable[..., torch.Tensor]) -> torch.Tensor:
        x = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]], requires_grad=True)
        function(x).sum().backward()
        assert x.grad is not None
        return x.grad

    compiled = torch.compile(lambda x: x.amax(1), backend="ferrite", options={"executor": "oracle", "strict": True})
    assert torch.equal(gradient(compiled), gradient(lambda x: x.amax(1)))


def test_mutation_after_a_read_sees_the_old_value() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        x.mul_(2)
        return y * x

    eager, ours = torch.randn(4), None
    ours = eager.clone()
    expected = function(eager)
    found = torch.compile(function, backend="ferrite", options={"executor": "oracle", "strict": True})(ours)
    assert torch.equal(found, expected)
    assert torch.equal(ours, eager)


@pytest.mark.parametrize("sizes", [(2, 3), (5, 7), (1, 4), (8, 0)], ids=str)
def test_one_kernel_serves_many_sizes(sizes: tuple[int, int]) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        flat = x.transpose(0, 1).reshape(-1)
        return flat * 2, x.sum(1), torch.cat([x, x], 1), x[:, 1:].relu()

    compiled = torch.compile(function, backend="ferrite", dynamic=True, options={"executor": "oracle", "strict": True})
    compiled(torch.randn(3, 6))
    x = torch.randn(*sizes)
    torch.testing.assert_close(compiled(x), function(x), check_stride=True)


def test_strides_of_results_are_eagers() -> None:
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert_same(
        lambda v: (v + 1, v.relu().clone(), v.permute(1, 0, 2, 3) * 2, v.expand(2, 3, 4, 5).exp()), x, exact=False
    )


def test_the_guide_shows_the_row_as_it_is() -> None:
    guide = (ROOT / "docs" / "add-an-op.md").read_text()
    row = guide.partition("## 3. The row")[2].partition("```python\n")[2].partition("\n```")[0]
    assert "@lowers(aten.hardswish.default)" in row
    assert row in (ROOT / "ferrite" / "lower" / "activation.py").read_text()
