"""Lowering of normalisations, reductions and scans against eager, through the oracle."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ferrite.graph.decompose import DECOMPOSED, OWN, decomposition_table
from ferrite.graph.names import resolve
from tests.unit.test_lower import assert_same, fallbacks

aten = torch.ops.aten
INF, NAN = math.inf, math.nan
HALVES = (torch.bfloat16, torch.float16)


def trained(module: nn.Module, x: torch.Tensor, *, dynamic: bool = False, close: bool = False) -> None:
    """One step forward and backward, in eager and compiled: results, gradients, buffers, and nothing left in eager."""
    sides = []
    for compiled in (False, True):
        mine = copy.deepcopy(module)
        options = {"executor": "oracle", "strict": True}
        call = torch.compile(mine, backend="ferrite", dynamic=dynamic, options=options) if compiled else mine
        given = x.detach().requires_grad_()
        result = call(given)
        slope = torch.linspace(-2, 3, result.numel(), dtype=torch.float64).reshape(result.shape).to(result.dtype)
        result.backward(slope)
        sides.append([result, given.grad, *(p.grad for p in mine.parameters()), *mine.buffers()])
    assert fallbacks() <= {"aten.copy_.default"}
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if close else {}
    for expected, found in zip(*sides, strict=True):
        torch.testing.assert_close(found, expected, check_stride=True, equal_nan=True, **tolerance)


def assert_raises_alike(function: Callable[..., Any], *inputs: Any) -> None:
    with pytest.raises(Exception) as eager:  # noqa: PT011
        function(*inputs)
    compiled = torch.compile(function, backend="ferrite", options={"executor": "oracle", "strict": True})
    with pytest.raises(type(eager.value)) as ours:
        compiled(*inputs)
    assert str(ours.value).splitlines()[0] == str(eager.value).splitlines()[0]


def picture(dtype: torch.dtype = torch.float32, *, layout: Any = torch.contiguous_format) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(2, 4, 3, 5).to(dtype).contiguous(memory_format=layout)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "layer": lambda: nn.LayerNorm((3, 5)),
    "layer without bias": lambda: nn.LayerNorm(5, bias=False),
    "layer without parameters": lambda: nn.LayerNorm(5, elementwise_affine=False),
    "batch": lambda: nn.BatchNorm2d(4, momentum=0.3),
    "batch without parameters": lambda: nn.BatchNorm2d(4, affine=False),
    "batch without running statistics": lambda: nn.BatchNorm2d(4, track_running_stats=False),
    "batch in inference": lambda: nn.BatchNorm2d(4).eval(),
    "group": lambda: nn.GroupNorm(2, 4),
    "group without parameters": lambda: nn.GroupNorm(4, 4, affine=False),
    "instance": lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
    "rms": lambda: nn.RMSNorm(5),
}


@pytest.mark.parametrize("name", NORMS)
def test_norms_of_contiguous_and_channels_last_tensors(name: str) -> None:
    trained(NORMS[name](), picture())
    if name in ("batch", "batch in inference", "group"):
        trained(NORMS[name](), picture(layout=torch.channels_last))


@pytest.mark.parametrize("name", ["layer", "batch", "group"])
def test_norms_of_many_sizes(name: str) -> None:
    trained(NORMS[name](), picture(), dynamic=True)


@pytest.mark.parametrize("name", ["layer", "batch", "batch in inference", "group"])
@pytest.mark.parametrize("parameters", ["halves", "f32"])
def test_norms_of_halves_compute_in_f32(name: str, parameters: str) -> None:
    """Beside f32 parameters statistics are f32, whatever PyTorch's fake kernels promise. Eager sums the gradients of a
    layer norm's parameters in halves; ours are nearer to the truth."""
    module = NORMS[name]()
    if parameters == "halves":
        module = module.bfloat16()
    trained(module, picture(torch.bfloat16), close=name == "layer")


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_running_statistics_move_as_in_eager(dtype: torch.dtype) -> None:
    """Whole numbers: mean and sum of squares are exact, so that only the update rounds. It rounds often, but in f16."""
    x = torch.arange(96).remainder(7).sub(3).reshape(2, 3, 4, 4).to(dtype)
    module = nn.BatchNorm2d(3, momentum=0.1).to(dtype)
    with torch.no_grad():
        assert module.running_mean is not None
        assert module.running_var is not None
        module.running_mean.copy_(torch.tensor([0.3, -1.7, 0.01]))
        module.running_var.copy_(torch.tensor([0.7, 3.1, 0.2]))
    ours = copy.deepcopy(module)
    module(x)
    torch.compile(ours, backend="ferrite", options={"executor": "oracle", "strict": True})(x)
    assert torch.equal(ours.running_mean, module.running_mean)
    assert torch.equal(ours.running_var, module.running_var)


def test_batch_norm_of_strided_tensors_gives_eagers_strides() -> None:
    trained(nn.BatchNorm1d(4), torch.randn(4, 3, 5).permute(1, 0, 2))
    trained(nn.BatchNorm2d(4).eval(), torch.randn(5, 3, 6, 4).permute(1, 3, 0, 2))


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_layer_norm_without_bias_gives_no_negative_zero(dtype: torch.dtype) -> None:
    x, weight = torch.full((2, 5), 2.5, dtype=dtype), -torch.ones(5, dtype=dtype)
    assert_same(lambda x, w: nn.functional.layer_norm(x, [5], w), x, weight)
    assert_same(lambda x, w: nn.functional.layer_norm(x, [5], w, -torch.zeros_like(w)), x, weight)
    assert_same(lambda x: nn.functional.layer_norm(x, [2]), torch.tensor([[0.0, -0.0]], dtype=dtype))


def test_strides_of_norms_of_nothing_are_eagers() -> None:
    """Tracing promises other strides for products of tensors without elements, and for copies of them."""
    for dtype in (torch.float32, torch.float16):
        compiled = torch.compile(nn.functional.rms_norm, backend="ferrite", options={"executor": "oracle"})
        x, weight = torch.empty(0, 1, dtype=dtype), torch.ones(1, dtype=dtype)
        assert compiled(x, [1], weight).stride() == nn.functional.rms_norm(x, [1], weight).stride() == (1, 0)


def test_norms_of_nothing() -> None:
    trained(nn.LayerNorm(4), torch.empty(0, 4))
    trained(nn.GroupNorm(2, 4), torch.empty(0, 4, 3))
    assert_same(lambda x: aten.native_layer_norm(x, [0], None, None, 1e-5), torch.empty(3, 0))
    assert_same(lambda x: aten.native_group_norm(x, None, None, 2, 4, 0, 2, 1e-5), torch.empty(2, 4, 0))


def test_batch_norm_of_mixed_floats_is_left_to_eager() -> None:
    weight = torch.ones(4, dtype=torch.float64)
    assert_raises_alike(
        lambda x, w: aten._native_batch_norm_legit.no_stats(x, w, w, True, 0.1, 1e-5), picture(), weight
    )


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_functional_batch_norm_by_running_statistics_keeps_them(dtype: torch.dtype) -> None:
    statistics = torch.rand(4).to(dtype), torch.rand(4).to(dtype)

    def inference(x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> Any:
        return torch._native_batch_norm_legit(x, None, None, mean, variance, False, 0.1, 1e-5)

    assert_same(inference, picture(dtype), *statistics, exact=dtype != torch.float32)


def test_weight_norm() -> None:
    v, g = torch.randn(3, 4), torch.rand(3, 1)
    assert_same(lambda v, g: aten._weight_norm_interface(v, g, 0), v, g, exact=False)
    assert_same(lambda v, g: aten._weight_norm_interface(v, g, 1), v, torch.rand(1, 4), exact=False)
    norms = v.norm(dim=1, keepdim=True)
    arguments = (torch.randn(3, 4), v, g, norms)
    assert_same(lambda *a: aten._weight_norm_interface_backward(*a, 0), *arguments, exact=False)


def test_own_decompositions_serve_lowering_only() -> None:
    assert not decomposition_table()
    assert decomposition_table(use_rows=True).keys() == OWN.keys() | {resolve(name) for name, _ in DECOMPOSED}
    assert aten.gelu.default in decomposition_table(("aten.gelu.default",))


# ---- reductions

ROWS = torch.tensor([[1.0, 3.0, 3.0, -INF], [NAN, 3.0, NAN, INF], [-INF] * 4, [0.0, -0.0, 1.0, 1.0]])
EMPTY = (torch.empty(0, 4), torch.empty(3, 0))


def test_norms_of_vectors_in_every_order() -> None:
    x = torch.tensor([[1.0, 2.0, 4.0], [0.0, -2.0, 2.0]])
    assert_same(lambda v: [(v.norm(order), v.norm(order, 1, True)) for order in (0, 1, 2, INF, -INF)], x)
    assert_same(lambda v: [(v.norm(order), v.norm(order, 1)) for order in (0.5, 3, -1, -2)], x, exact=False)
    assert_same(lambda v: (v.norm(0, 1), v.norm(INF, 1), v.norm(1, 1)), ROWS)
    for empty in EMPTY:
        assert_same(lambda v: (v.norm(), v.norm(1, 0), v.norm(0, 1), v.norm(3, 1)), empty)


def test_older_norms() -> None:
    x = torch.randn(3, 4)
    assert_same(lambda v: aten.norm.ScalarOpt_dim(v, None, [1], True), x, exact=False)
    assert_same(lambda v: aten.norm.ScalarOpt_dtype(v, 2, dtype=torch.float64), x, exact=False)
    assert_same(lambda v: (torch.dist(v, v + 1, 1), torch.dist(v, v[0])), x, exact=False)
    assert_same(lambda v: (torch.renorm(v, 2, 0, 1.0), torch.renorm(v, 1, 1, 100.0)), x, exact=False)


def test_sums_that_skip_nan() -> None:
    assert_same(lambda v: (v.nansum(1), v.nansum(0, dtype=torch.float64), v[:, :3].nanmean(1)), ROWS)
    assert_same(lambda v: v.nansum(dtype=torch.int64), torch.tensor([1.5, NAN, 2.5]))
    assert_same(lambda v: (v.nansum(), v.nansum(0)), torch.tensor([[100, 100]], dtype=torch.int8))


def test_sums_as_truth_values() -> None:
    for x in (torch.tensor([[1, -1], [0, 0]]), torch.tensor([[True, True], [False, False]])):
        assert_same(lambda v: (v.sum(1, dtype=torch.bool), v.prod(dtype=torch.bool), v.prod(1)), x)


def test_logsumexp_of_infinities_integers_and_nothing() -> None:
    assert_same(lambda v: v.logsumexp(1), ROWS, exact=False)
    assert_same(lambda v: (v.logsumexp(0), v.logsumexp((0, 1))), torch.tensor([[1, 2], [3, 4]]), exact=False)
    assert_same(lambda v: (v.logsumexp(0), v.logsumexp(1)), EMPTY[1])
    assert_same(lambda v: v.logsumexp(0), torch.tensor(2.0))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_log_softmax_of_halves_rounds_the_sum_along_the_last_dimension(dtype: torch.dtype) -> None:
    x = torch.tensor([[2.921875, -5.125, -6.84375], [4.0, -1.0, -8.0]], dtype=dtype)
    assert_same(lambda v: (v.log_softmax(1), v.log_softmax(0), v[0].log_softmax(0)), x)


def test_safe_softmax_of_hidden_rows() -> None:
    assert_same(lambda v: aten._safe_softmax(v, 1), ROWS, exact=False)


@pytest.mark.parametrize("correction", [0, 1, 2.5, 9])
def test_statistics(correction: float) -> None:
    x = torch.randn(3, 4)

    def statistics(v: torch.Tensor) -> Any:
        return torch.std_mean(v, 1, correction=correction), torch.var_mean(v, correction=correction)

    assert_same(statistics, x, exact=False)
    assert_same(statistics, EMPTY[1])
    assert_same(statistics, x.bfloat16(), exact=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_deviation_may_fit_where_its_square_does_not(dtype: torch.dtype) -> None:
    x = (torch.randn(4, 8) * 1e30).to(dtype)
    assert x.std(1).isfinite().all()
    assert_same(lambda v: (v.std(1), v.var(1), torch.std_mean(v, 1)), x, exact=False)


@pytest.mark.parametrize("executor", ["oracle", "native"])
def test_variances_of_numbers_far_from_zero(executor: str) -> None:
    """Eager works in f64. Thousandths around 10000 have a variance in f32 too, and so have the largest numbers."""
    x = 10000 + 1e-3 * torch.randn(4, 100)
    largest = torch.full((4, 9), 3e38)

    def statistics(v: torch.Tensor) -> Any:
        return v.var(1), *torch.var_mean(v, 0), v.std(), v.view(2, -1).var(1)

    assert largest.var(1).eq(0).all()
    for given in (x, largest):
        found = torch.compile(statistics, backend="ferrite", options={"executor": executor, "strict": True})(given)
        for mine, exact in zip(found, statistics(given.double()), strict=True):
            torch.testing.assert_close(mine, exact.float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("executor", ["oracle", "native"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALVES])
def test_means_of_infinite_elements(executor: str, dtype: torch.dtype) -> None:
    """One infinity at any place, then others. Eager's running means are infinite only after the last element."""
    x = torch.linspace(-1, 1, 21).repeat(26, 1).to(dtype)
    x.fill_diagonal_(INF)
    x[21, 20] = -INF
    x[22, :2] = INF
    x[23, 19:] = INF
    x[24, 20], x[25, 5] = NAN, NAN

    def statistics(v: torch.Tensor) -> Any:
        return (
            *torch.var_mean(v, 1),
            *torch.std_mean(v.t(), 0, keepdim=True),
            *torch.var_mean(v[:7].view(7, 3, 7), (0, 2)),
            *torch.std_mean(v[20:21]),
            *torch.var_mean(v[0, 0], correction=0),
            *aten.native_layer_norm(v[:7, :10], (10,), None, None, 1e-5),
            *aten.native_batch_norm(v, None, None, None, None, True, 0.1, 1e-5)[1:],
        )

    compiled = torch.compile(statistics, backend="ferrite", options={"executor": executor, "strict": True})
    torch.testing.assert_close(compiled(x), statistics(x), equal_nan=True)
    assert not fallbacks()


@pytest.mark.parametrize("executor", ["oracle", "native"])
def test_a_batch_norm_whose_sums_overflow(executor: str) -> None:
    """Eager sums bf16 in f32, as we do. It sums f32 in f64 if the channels are contiguous, which we do not follow."""
    x = torch.linspace(-1, 1, 16).reshape(2, 1, 8).bfloat16()
    x[0, 0, 2:4] = torch.finfo(x.dtype).min
    function = torch.nn.functional.instance_norm
    compiled = torch.compile(function, backend="ferrite", options={"executor": executor, "strict": True})
    expected = function(x)
    assert expected[0].isnan().all()
    torch.testing.assert_close(compiled(x), expected, equal_nan=True)


def test_position_of_the_greatest_counts_all_elements() -> None:
    x = torch.tensor([[1.0, 5.0], [5.0, 2.0], [NAN, 0.0]])
    assert_same(lambda v: (v[:2].argmax(), v.argmax(), v[:2].argmin(), v.argmax(None, True)), x)


def test_traces() -> None:
    assert_same(
        lambda a, b, c: (a.trace(), b.trace(), c.trace()), ROWS[:, :3], torch.ones(2, 5, dtype=torch.int8), EMPTY[0]
    )
    assert_raises_alike(lambda v: v.trace(), torch.ones(2, 2, dtype=torch.bool))


# ---- scans


def test_scans() -> None:
    x = torch.tensor([[1.0, 5.0, 5.0, 2.0], [NAN, 7.0, 7.0, 1.0], [-INF, INF, 0.0, 0.0]])
    assert_same(lambda v: (v.cummax(1), v.cummin(0), v[:, :3].cumsum(1), v.cumprod(0)), x)
    assert_same(lambda v: v.cumsum(0), torch.linspace(0.1, 3, 60).bfloat16().reshape(20, 3))
    assert_same(lambda v: v.logcumsumexp(1), x, exact=False)
    assert_same(lambda v: (v.cummax(0), v.cumsum(0), v.cumprod(0)), torch.tensor([True, False, True]))
    assert_same(lambda v: (v.cumsum(0, dtype=torch.int8), v.cumsum(0)), torch.tensor([100, 100], dtype=torch.uint8))
    assert_same(lambda v: v.cumsum(0, dtype=torch.int64), torch.tensor([1.5, 1.5]))
    for empty in EMPTY:
        assert_same(lambda v: (v.cumsum(0), v.cummax(1)), empty)


@pytest.mark.parametrize("name", ["cumsum", "cumprod", "logcumsumexp"])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_scans_of_negative_zeros(name: str, dtype: torch.dtype) -> None:
    assert_same(lambda v: getattr(v, name)(0), torch.tensor([[-0.0, -0.0], [-0.0, 0.0], [0.0, -0.0]], dtype=dtype))


def test_scans_of_single_numbers() -> None:
    assert_same(lambda v: (v.cumsum(0), v.cumprod(0), v.logcumsumexp(0), v.cummax(0)), torch.tensor(2.5))
    assert_same(lambda v: v.cumsum(0), torch.tensor(True))


def test_scans_without_a_kernel_raise_as_in_eager() -> None:
    assert_raises_alike(lambda v: v.logcumsumexp(0), torch.tensor([1, 2]))
    assert_raises_alike(lambda v: v.cumsum(0, dtype=torch.bool), torch.tensor([1, 2]))


def test_group_norm_raises_for_strides_as_eager_does() -> None:
    x = torch.randn(2, 5, 6).transpose(1, 2)

    def function(x: torch.Tensor) -> Any:
        return torch.ops.aten.native_group_norm(x, None, None, 2, 6, 5, 3, 1e-5)

    compiled = torch.compile(function, backend="ferrite", options={"executor": "oracle"})
    for call in (function, compiled):
        with pytest.raises(RuntimeError, match="is_contiguous"):
            call(x)


def test_a_gradient_of_a_size_that_is_one_by_a_guard() -> None:
    """The second quarter of four columns, the sizes of which are differences: x has them, its gradient has 1."""

    class Quarter(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            first, second = x.chunk(2, 1)[0].chunk(2, 1)
            normal = nn.functional.layer_norm(first, first.shape[-2:])
            return second / normal + nn.functional.layer_norm(second, second.shape[-2:])

    torch.manual_seed(0)
    trained(Quarter(), torch.randn(4, 4), dynamic=True, close=True)


@pytest.mark.parametrize("order", [0, 0.5, 1, 2, 3, -1, -2, INF, -INF])
def test_the_norm_of_one_element_is_its_size(order: float) -> None:
    """Also where its power is outside of the range."""
    x = torch.tensor([[1e30], [-3e-30], [NAN], [-0.0]])

    def norms(x: torch.Tensor) -> Any:
        return (
            torch.linalg.vector_norm(x, order, 1),
            torch.linalg.vector_norm(x[0, 0], order),
            torch.linalg.vector_norm(x[None], order, (0, 2), keepdim=True),
            torch.dist(x[0], x[3], order),
        )

    assert_same(norms, x)
