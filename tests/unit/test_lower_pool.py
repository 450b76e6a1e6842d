"""Pools, pads and windows against eager, through the oracle: edges, ties, NaN, and how halves are rounded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.unit.test_lower import INF, NAN, assert_same, fallbacks

aten = torch.ops.aten
HALVES = [torch.bfloat16, torch.float16]


def rand(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(0)).to(dtype)


def last(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def assert_same_dynamic(function: Callable[..., Any], *inputs: torch.Tensor) -> None:
    """As `assert_same`, with symbolic sizes: compiled at the sizes of the inputs, run again with one row less."""
    options = {"executor": "oracle", "strict": True}
    compiled = torch.compile(function, backend="ferrite", options=options, dynamic=True)
    for shorter in (0, 1):
        given = [x.narrow(-1, 0, x.shape[-1] - shorter).contiguous() for x in inputs]
        torch.testing.assert_close(compiled(*given), function(*given), equal_nan=True)
        assert fallbacks() == set()


# ---- the greatest


def test_the_position_is_that_of_the_first_of_equals_and_of_the_last_nan() -> None:
    x = torch.tensor([NAN, 1, NAN, 2, -INF, 4, 5, -INF, -INF, INF, INF, 0, -0.0, NAN, -1, -1]).view(1, 1, 4, 4)
    assert_same(lambda v: aten.max_pool2d_with_indices(v, [3, 3], [1, 1], [1, 1]), x)
    assert_same(lambda v: aten.max_pool2d_with_indices(v, [3, 3], [1, 1], [1, 1]), last(x.expand(1, 8, 4, 4)))
    assert_same(lambda v: aten.adaptive_max_pool2d(v, [3, 2]), x)
    assert_same(lambda v: aten.max_pool3d_with_indices(v, [1, 3, 3], [1, 1, 1], [0, 1, 1]), x[None])


def test_padding_never_wins() -> None:
    least = torch.full((1, 2, 5, 5), -INF)
    assert_same(lambda v: aten.max_pool2d_with_indices(v, [3, 3], [2, 2], [1, 1]), least)
    assert_same(lambda v: aten.max_pool2d_with_indices(v, [2, 2], [1, 1], [1, 1], [2, 2]), least)
    assert_same(lambda v: aten.max_pool2d_with_indices(v, [2, 2], [1, 1], [1, 1], [2, 2]), least[:, :, :1, :1])
    for dtype in (torch.int64, torch.uint8):
        smallest = torch.full((1, 3, 3), torch.iinfo(dtype).min, dtype=dtype)
        assert_same(lambda v: aten.max_pool2d_with_indices(v, [3, 3], [1, 1], [1, 1]), smallest)


def test_the_last_window_of_ceil_mode_hangs_over_the_edge() -> None:
    x = rand(2, 3, 7, 6)
    assert_same(lambda v: F.max_pool2d(v, (3, 2), (2, 3), (1, 0), ceil_mode=True, return_indices=True), x)
    assert_same(lambda v: F.avg_pool2d(v, 3, 2, 1, ceil_mode=True), x, exact=False)
    assert_same(lambda v: F.avg_pool2d(v, 3, 2, 1, ceil_mode=True, count_include_pad=False), x, exact=False)
    assert_same(lambda v: F.avg_pool2d(v, (3, 2), (2, 1), divisor_override=5), x, exact=False)


def test_pools_of_other_ranks() -> None:
    x = rand(2, 2, 5, 4, 5)
    assert_same(lambda v: F.max_pool1d(v, 3, 2, 1, return_indices=True), x[0, 0])
    assert_same(lambda v: F.max_pool3d(v, 3, 2, 1, return_indices=True), x)
    assert_same(lambda v: F.avg_pool3d(v, 2, ceil_mode=True, count_include_pad=False), x[0], exact=False)
    assert_same(lambda v: F.adaptive_avg_pool3d(v, (2, 3, 4)), x, exact=False)
    assert_same(lambda v: F.adaptive_max_pool3d(v, (2, 3, 7)), x)


def test_means_of_integers_are_rounded_towards_zero() -> None:
    assert_same(lambda v: F.avg_pool2d(v, 2, 1, 1), torch.tensor([[[-5, 3, 2], [1, -7, 2], [9, 9, 4]]]))


def test_a_batch_may_be_empty() -> None:
    assert_same(lambda v: (F.max_pool2d(v, 2), F.avg_pool2d(v, 2)), torch.empty(0, 3, 4, 4))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_means_of_halves_are_rounded_once(dtype: torch.dtype) -> None:
    x = rand(2, 4, 9, 7, dtype=dtype)
    for given in (x, last(x)):
        assert_same(lambda v: (F.avg_pool2d(v, 3, 2, 1), F.adaptive_avg_pool2d(v, (4, 3))), given)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_gradients_of_halves_are_rounded_after_every_addition(dtype: torch.dtype) -> None:
    x, grad = rand(2, 4, 9, 7, dtype=dtype), rand(2, 4, 9, 7, dtype=dtype)
    _, where = aten.max_pool2d_with_indices(x, [3, 3], [1, 1], [1, 1])
    windows: tuple[Any, ...] = ([3, 3], [1, 1], [1, 1])
    assert_same(lambda g, v, i: aten.max_pool2d_with_indices_backward(g, v, *windows, [1, 1], False, i), grad, x, where)
    assert_same(lambda g, v: aten.avg_pool2d_backward(g, v, *windows, False, True, None), grad, x)
    assert_same(lambda g, v: aten._adaptive_avg_pool2d_backward(g, v), grad[:, :, :4, :3].contiguous(), x)
    _, where = aten.adaptive_max_pool2d(x, [4, 3])
    assert_same(lambda g, v, i: aten.adaptive_max_pool2d_backward(g, v, i), grad[:, :, :4, :3].contiguous(), x, where)


def test_gradients_of_halves_over_many_windows_are_scattered() -> None:
    """25 windows over a place; and symbolic sizes, for which nobody knows how many."""
    x, grad = rand(2, 4, 9, 7, dtype=torch.bfloat16), rand(2, 4, 9, 7, dtype=torch.bfloat16)
    windows: tuple[Any, ...] = ([5, 5], [1, 1], [2, 2])
    _, where = aten.max_pool2d_with_indices(x, *windows)
    assert_same(lambda g, v, i: aten.max_pool2d_with_indices_backward(g, v, *windows, [1, 1], False, i), grad, x, where)
    assert_same(lambda g, v: aten.avg_pool2d_backward(g, v, *windows, False, False, None), grad, x)
    assert_same(lambda c: aten.col2im(c, [9, 7], [5, 5], [1, 1], [2, 2], [1, 1]), rand(2, 75, 63, dtype=torch.bfloat16))
    x, grad = rand(2, 2, 5, 6, 7, dtype=torch.bfloat16), rand(2, 2, 5, 9, 9, dtype=torch.bfloat16)
    assert_same(lambda g, v: aten._adaptive_avg_pool3d_backward(g, v), rand(2, 2, 7, 9, 9, dtype=torch.bfloat16), x)
    options = {"executor": "oracle", "strict": True}
    run = torch.compile(aten._adaptive_avg_pool2d_backward, backend="ferrite", options=options, dynamic=True)
    assert torch.equal(run(grad[0], x[0]), aten._adaptive_avg_pool2d_backward(grad[0], x[0]))
    assert fallbacks() == set()


def test_three_dimensional_means_of_halves_are_rounded_after_every_step() -> None:
    assert_same(lambda v: aten._adaptive_avg_pool3d(v, [2, 4, 3]), rand(2, 4, 5, 6, 7, dtype=torch.float16))


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation", "ceil"),
    [(3, 2, 1, 1, True), (2, 3, 0, 1, False), (5, 1, 2, 1, False), (2, 2, 1, 1, True), (2, 2, 1, 2, False)],
)
def test_gradients_of_windows_that_overlap_or_leave_gaps(
    kernel: int, stride: int, padding: int, dilation: int, ceil: bool
) -> None:
    x = rand(2, 3, 8, 7)
    args: tuple[Any, ...] = ([kernel] * 2, [stride] * 2, [padding] * 2)
    value, where = aten.max_pool2d_with_indices(x, *args, [dilation] * 2, ceil)
    grad = torch.ones_like(value)  # whole numbers: every order of additions gives the same sum
    assert_same(
        lambda g, v, i: aten.max_pool2d_with_indices_backward(g, v, *args, [dilation] * 2, ceil, i), grad, x, where
    )
    if dilation == 1:
        assert_same(lambda g, v: aten.avg_pool2d_backward(g, v, *args, ceil, False, None), grad, x, exact=False)


def test_a_gradient_of_minus_zero_alone_gives_zero() -> None:
    x = rand(1, 1, 4, 4)
    value, where = aten.max_pool2d_with_indices(x, [2, 2])
    assert_same(
        lambda g, v, i: aten.max_pool2d_with_indices_backward(g, v, [2, 2], [2, 2], [0, 0], [1, 1], False, i),
        torch.full_like(value, -0.0), x, where,
    )  # fmt: skip


@pytest.mark.parametrize("sizes", [[4, 7], [3, 5], [9, 13], [12, 20], [1, 1]], ids=str)
def test_adaptive_windows_of_every_kind(sizes: list[int]) -> None:
    """Fewer than places, a divisor of them, more, a multiple, and one."""
    x, grad = rand(1, 2, 6, 10), torch.ones(1, 2, *sizes)
    assert_same(lambda v: aten._adaptive_avg_pool2d(v, sizes), x, exact=False)
    assert_same(lambda g, v: aten._adaptive_avg_pool2d_backward(g, v), grad, x, exact=False)
    _, where = aten.adaptive_max_pool2d(x, sizes)
    assert_same(lambda g, v, i: aten.adaptive_max_pool2d_backward(g, v, i), grad, x, where)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16], ids=str)
def test_what_eager_refuses_is_refused_as_by_eager(dtype: torch.dtype) -> None:
    x = torch.ones(1, 1, 4, 4, 4, dtype=dtype)

    def run(v: torch.Tensor) -> torch.Tensor:
        return aten._adaptive_avg_pool3d(v, [2, 2, 2]) if dtype == torch.int64 else aten.avg_pool3d(v, [2, 2, 2])

    messages = []
    for call in (run, torch.compile(run, backend="ferrite", options={"executor": "oracle"})):
        with pytest.raises(NotImplementedError) as raised:
            call(x)
        messages.append(str(raised.value))
    assert messages[0] == messages[1]


def test_values_go_back_to_where_they_were_taken_from() -> None:
    values, where = F.max_pool2d(rand(2, 3, 6, 8), 2, return_indices=True)
    assert_same(lambda v, i: F.max_unpool2d(v, i, 2), values, where)
    assert_same(lambda v, i: F.max_unpool2d(v, i, 2, output_size=(7, 8)), last(values), last(where))
    assert_same(lambda v, i: F.max_unpool2d(v[0].half(), i[0], 2), values, where)
    assert_same(lambda v, i: F.max_unpool2d(v, i, 2), last(values[:, :1]), where[:, :1])
    assert_same(lambda v, i: F.max_unpool1d(v, i, 2), *F.max_pool1d(rand(3, 8), 2, return_indices=True))
    assert_same(lambda v, i: F.max_unpool3d(v, i, 2), *F.max_pool3d(rand(2, 3, 4, 4, 6), 2, return_indices=True))
    # Of values that meet the last one stays.
    assert_same(lambda v, i: F.max_unpool2d(v, i * 0, 2), values, where)


@pytest.mark.parametrize("beyond", [30, -30])
def test_a_position_outside_its_plane_raises_with_eagers_words(beyond: int) -> None:
    values, where = F.max_pool2d(rand(1, 1, 4, 8), 2, return_indices=True)
    where[0, 0, 1, 2] += beyond
    function = lambda v, i: F.max_unpool2d(v, i, 2)
    messages = []
    for call in (function, torch.compile(function, backend="ferrite", options={"executor": "oracle", "strict": True})):
        with pytest.raises(RuntimeError) as raised:
            call(values, where)
        messages.append(str(raised.value).splitlines()[0])
    assert messages[0] == messages[1]
    assert fallbacks() == set()


def test_symbolic_sizes() -> None:
    x = rand(2, 3, 8, 9)
    assert_same_dynamic(lambda v: F.max_pool2d(v, 3, 2, 1, return_indices=True), x)
    assert_same_dynamic(lambda v: F.avg_pool2d(v, 3, 2, 1, ceil_mode=True, count_include_pad=False), x)
    assert_same_dynamic(lambda v: F.avg_pool2d(v, v.shape[2:]), x)
    assert_same_dynamic(lambda v: (F.adaptive_avg_pool2d(v, (3, 4)), F.adaptive_max_pool2d(v, (3, 4))), x)
    assert_same_dynamic(lambda v: F.pad(v, (3, 2, 1, 0), mode="reflect"), x)
    assert_same_dynamic(lambda v: F.pad(v, (3, 2, 1, 0), mode="replicate"), x)
    assert_same_dynamic(lambda v: F.unfold(v, 3, 1, 1, 2), x)


# ---- pads


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
def test_pads(mode: str) -> None:
    x = rand(1, 2, 4, 5, 6)
    assert_same(lambda v: F.pad(v, (3, 2), mode=mode), x[0, 0])
    assert_same(lambda v: F.pad(v, (0, 5), mode=mode), x[0, 0])
    assert_same(lambda v: F.pad(v, (3, 2, 1, 0), mode=mode), x[0])
    assert_same(lambda v: F.pad(v, (3, 2, 1, 0), mode=mode), last(x[0]))
    assert_same(lambda v: F.pad(v, (1, 2, 2, 1, 3, 1), mode=mode), x)
    assert_same(lambda v: F.pad(v, (-1, 2, 2, -1), mode=mode), x[0])
    assert_same(lambda v: F.pad(v, (3, 2), mode=mode), torch.arange(12).view(2, 6))


def test_repetition_may_be_longer_than_the_tensor() -> None:
    assert_same(lambda v: F.pad(v, (9, 7), mode="replicate"), rand(2, 3, 2))


@pytest.mark.parametrize("name", ["reflection", "replication"])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_gradients_of_pads_are_added_in_the_order_of_eager(name: str, rank: int) -> None:
    pad = [1, 2, 2, 1, 3, 1][: 2 * rank]
    x = rand(2, 2, *(4, 5, 6)[:rank], dtype=torch.bfloat16)
    backward = getattr(aten, f"{name}_pad{rank}d_backward")
    grad = rand(*getattr(aten, f"{name}_pad{rank}d")(x, pad).shape, dtype=torch.bfloat16)
    assert_same(lambda g, v: backward(g, v, pad), grad, x)


# ---- windows as columns


@pytest.mark.parametrize(
    ("kernel", "dilation", "padding", "stride"),
    [
        ([3, 3], [1, 1], [1, 1], [1, 1]),
        ([3, 3], [1, 1], [1, 1], [2, 2]),
        ([2, 2], [1, 1], [0, 0], [3, 3]),
        ([2, 3], [2, 1], [1, 0], [3, 1]),
        ([3, 3], [2, 2], [1, 1], [2, 2]),
    ],
    ids=str,
)
def test_unfold_and_fold(kernel: Any, dilation: Any, padding: Any, stride: Any) -> None:
    """Sums of halves are rounded after every tap."""
    x = rand(2, 3, 8, 7, dtype=torch.bfloat16)
    args = (kernel, dilation, padding, stride)
    assert_same(lambda v: aten.im2col(v, *args), x)
    columns = rand(*aten.im2col(x, *args).shape, dtype=torch.bfloat16)
    assert_same(lambda c: aten.col2im(c, [8, 7], *args), columns)


def test_unfold_of_truth_values() -> None:
    assert_same(lambda v: aten.im2col(v, [2, 2], [1, 1], [0, 0], [1, 1]), rand(3, 8, 7) > 0)
