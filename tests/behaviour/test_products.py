"""Small matrix products as loops: the values of eager, whatever the layout, and a decision with its reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ferrite
from tests.behaviour.compare import STRICT, compare

SHAPES = [(1, 1, 1), (1, 17, 5), (3, 300, 301), (7, 5, 9), (33, 31, 29), (2, 0, 3), (70, 900, 2), (300, 1, 301)]
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def decided(what: str = "product by loops") -> list[tuple[bool, str]]:
    return [
        (decision.taken, decision.reason)
        for entry in ferrite.last_record().graphs
        for decision in entry.decisions
        if decision.what == what
    ]


def run(function: Any, *inputs: Tensor) -> Tensor:
    torch._dynamo.reset()
    made: Tensor = torch.compile(function, backend="ferrite", options=STRICT)(*inputs)
    return made


def assert_as_close_as_eager(made: Tensor, eager: Tensor, exact: Tensor) -> None:
    """Within the rounding of the dtype, of sums over the magnitudes that occur."""
    assert (made.dtype, made.stride()) == (eager.dtype, eager.stride())
    scale = exact.abs().max().clamp(min=1) if exact.numel() else 1
    error, allowed = (made.double() - exact).abs() / scale, 8 * torch.finfo(made.dtype).eps
    assert error.numel() == 0 or error.max() <= allowed


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_products_of_every_layout(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, inner, columns = shape
    x, w = torch.randn(rows, inner).to(dtype), torch.randn(inner, columns).to(dtype)
    for left in (x, x.t().contiguous().t()):
        for right in (w, w.t().contiguous().t()):
            made = run(torch.mm, left, right)
            assert_as_close_as_eager(made, left @ right, left.double() @ right.double())
            assert made.numel() == 0 or decided()[0][0]


@pytest.mark.parametrize("dtype", FLOATS)
def test_products_with_a_sum(dtype: torch.dtype) -> None:
    bias, x, w = torch.randn(9).to(dtype), torch.randn(5, 21).to(dtype), torch.randn(21, 9).to(dtype)
    batch, others = torch.randn(3, 5, 21).to(dtype), torch.randn(3, 21, 9).to(dtype)
    for beta, alpha in ((1, 1), (0.5, 2.0), (0, 3), (2, 0)):
        made = run(lambda b, x, w: torch.addmm(b, x, w, beta=beta, alpha=alpha), bias, x, w)  # noqa: B023
        exact = beta * bias.double() + alpha * (x.double() @ w.double())
        assert_as_close_as_eager(made, torch.addmm(bias, x, w, beta=beta, alpha=alpha), exact)
        made = run(lambda b, x, w: torch.baddbmm(b, x, w, beta=beta, alpha=alpha), bias, batch, others)  # noqa: B023
        exact = beta * bias.double() + alpha * (batch.double() @ others.double())
        assert_as_close_as_eager(made, torch.baddbmm(bias, batch, others, beta=beta, alpha=alpha), exact)


def test_what_a_beta_of_zero_leaves_out_is_not_read() -> None:
    bias, x, w = torch.full((4,), torch.nan), torch.randn(3, 4), torch.randn(4, 4)
    made = run(lambda b, x, w: torch.addmm(b, x, w, beta=0), bias, x, w)
    torch.testing.assert_close(made, x @ w)


def test_infinities_and_nan_go_where_eager_has_them() -> None:
    x, w = torch.randn(4, 6), torch.randn(6, 5)
    x[1, 2], w[3, 4], x[2, 0] = torch.inf, torch.nan, 0.0
    w[0, 0] = torch.inf
    torch.testing.assert_close(run(torch.mm, x, w), x @ w, equal_nan=True)


def test_expanded_and_overlapping_operands() -> None:
    x, w = torch.randn(1, 6).expand(5, 6), torch.randn(11).as_strided((6, 6), (1, 1))
    torch.testing.assert_close(run(torch.mm, x, w), x @ w)
    torch.testing.assert_close(
        run(lambda x, w: torch.bmm(x.expand(3, 5, 6), w.expand(3, 6, 6)), x, w), (x @ w).expand(3, 5, 6)
    )


def test_products_of_training_are_left_to_the_library() -> None:
    layers = [torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 3)]
    model = torch.nn.Sequential(*layers)
    compare(lambda x: model(x).square().sum(), torch.randn(5, 6, requires_grad=True), training=True, exact=False)
    assert decided()
    assert not any(taken for taken, _ in decided())


@pytest.mark.parametrize(
    ("left", "right", "reason"),
    [
        ((128, 256), (256, 128), "128 x 256 x 128: a library is faster"),
        ((1, 2000), (2000, 64), "1 x 2000 x 64: few rows"),
        ((4000, 64), (64, 2), "4000 x 64 x 2: few columns"),
        ((400, 1), (1, 300), "400 x 1 x 300: an outer product"),
        ((8, 8), (8, 8), "8 x 8 x 8: the library's call would cost more than its work"),
    ],
)
def test_the_choice_is_in_the_record(left: tuple[int, int], right: tuple[int, int], reason: str) -> None:
    run(lambda x, w: torch.mm(x, w).relu(), torch.randn(left), torch.randn(right))
    assert decided() == [("library" not in reason or "cost" in reason, reason)]


def test_the_option_gives_them_to_the_library() -> None:
    torch._dynamo.reset()
    options = {**STRICT, "products": "library"}
    torch.compile(lambda x: (x @ x).relu(), backend="ferrite", options=options)(torch.randn(4, 4))
    assert decided() == [(False, "all are the library's here")]
    assert [fallback.op for fallback in ferrite.last_record().fallbacks] == ["aten.mm.default"]


def test_integers_and_changing_sizes_are_left_to_the_library() -> None:
    x = torch.arange(12).view(3, 4)
    assert torch.equal(run(lambda x: (x @ x.t()) + 1, x), x @ x.t() + 1)
    assert decided()[0] == (False, "torch.int64 is left to the library")
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: (x @ x.t()).relu(), backend="ferrite", options=STRICT, dynamic=True)
    for size in (3, 5):
        y = torch.randn(size, 4)
        torch.testing.assert_close(compiled(y), (y @ y.t()).relu())
    assert all(not taken and reason.endswith("sizes that change") for taken, reason in decided())


@pytest.mark.parametrize("added", [(), (torch.float64,), (torch.int64,)])
def test_operands_of_several_dtypes_raise_as_in_eager(added: tuple[torch.dtype, ...]) -> None:
    """Tracing lets them pass; the library does not."""
    factors = torch.randn(3, 4), torch.randn(4, 5, dtype=torch.float32 if added else torch.float64)
    operands = [*(torch.ones(3, 5, dtype=dtype) for dtype in added), *factors]

    def function(*operands: torch.Tensor) -> torch.Tensor:
        return torch.mm(*operands) if len(operands) == 2 else torch.addmm(*operands)

    with pytest.raises(RuntimeError) as expected:
        function(*operands)
    with torch.no_grad(), pytest.raises(RuntimeError) as found:
        torch.compile(function, backend="ferrite", options={"strict": True})(*operands)
    assert str(found.value) == str(expected.value)
