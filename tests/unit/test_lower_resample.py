"""Resampling against eager, through the oracle: which element is read, with which weight, and what rounds when."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import ferrite
from ferrite.graph.whole import UPSAMPLING, kept_whole
from tests.unit.test_lower import assert_same
from tests.unit.test_lower_pool import assert_same_dynamic, rand

aten = torch.ops.aten
RANKS = {"linear": 1, "bilinear": 2, "bicubic": 2, "trilinear": 3}


@pytest.fixture(autouse=True)
def _whole() -> Iterator[None]:
    with kept_whole():
        yield


def test_ops_are_whole_only_for_a_time() -> None:
    before = {name: dict(getattr(aten, name).vec.py_kernels) for name, _, _ in UPSAMPLING}
    with kept_whole():
        eager = {"executor": "eager"}
        compiled = torch.compile(lambda v: F.interpolate(v, scale_factor=2), backend="ferrite", options=eager)
        compiled(rand(1, 1, 2, 2))
        assert {f.op for f in ferrite.last_record().fallbacks} == {"aten.upsample_nearest2d.default"}
    assert before == {name: dict(getattr(aten, name).vec.py_kernels) for name, _, _ in UPSAMPLING}


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize(
    "how", [{"scale_factor": 2}, {"scale_factor": 1.7}, {"size": 5}, {"scale_factor": 1.1}], ids=str
)
def test_nearest(mode: str, rank: int, how: dict[str, Any]) -> None:
    """Doubling, odd scales, sizes, and a scale of 1.1 that leaves a size as it is: then two dimensions are copied."""
    x = rand(2, 2, *(6, 7, 4)[:rank], dtype=torch.bfloat16)
    assert_same(lambda v: F.interpolate(v, mode=mode, **how), x)


@pytest.mark.parametrize("name", ["upsample_nearest", "_upsample_nearest_exact"])
def test_doubles_are_placed_in_doubles_in_one_and_three_dimensions(name: str) -> None:
    """With 2 and 41, or 6 and 74 elements, f32 gives other places."""
    one, three = getattr(aten, f"{name}1d"), getattr(aten, f"{name}3d")
    x = torch.arange(6, dtype=torch.float64)
    assert_same(lambda v: (one(v, [74]), one(v[..., :2], [41])), x.expand(1, 2, 6).contiguous())
    assert_same(lambda v: (three(v, [1, 1, 74]), three(v[..., :2], [1, 1, 41])), x.expand(1, 2, 1, 1, 6).contiguous())


@pytest.mark.parametrize(
    ("name", "extent", "count", "twice"),
    [("upsample_nearest2d", 6, 74, 0), ("_upsample_nearest_exact2d", 2, 41, 1)],
)
def test_a_ratio_that_f32_rounds_reads_what_eager_reads(name: str, extent: int, count: int, twice: int) -> None:
    """Whole numbers would give other places; in two dimensions eager computes in f32, for doubles as well."""
    op = getattr(aten, name)
    x = torch.arange(extent, dtype=torch.float64).expand(1, 2, 2, extent).contiguous()
    whole = [(2 * o + twice) * extent // (2 * count) for o in range(count)]
    assert op(x, [2, count])[0, 0, 0].long().tolist() != whole
    assert_same(lambda v: op(v, [2, count]), x)
    backward = getattr(aten, f"{name}_backward")
    assert_same(lambda g: backward(g, [2, count], [1, 2, 2, extent]), torch.ones(1, 2, 2, count))


@pytest.mark.parametrize("name", ["upsample_nearest", "_upsample_nearest_exact"])
@pytest.mark.parametrize(
    ("source", "sizes"), [([8], [24]), ([6, 7], [12, 5]), ([6, 7], [9, 1]), ([3, 4, 5], [6, 4, 7])], ids=str
)
def test_gradients_of_nearest_are_summed_in_f32(name: str, source: list[int], sizes: list[int]) -> None:
    backward = getattr(aten, f"{name}{len(sizes)}d_backward")
    assert_same(lambda g: backward(g, sizes, [2, 3, *source]), rand(2, 3, *sizes, dtype=torch.bfloat16))


@pytest.mark.parametrize("mode", ["linear", "bilinear", "bicubic", "trilinear"])
@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("how", [{"scale_factor": 1.7}, {"size": 1}, {"size": 7}], ids=str)
def test_interpolation(mode: str, corners: bool, how: dict[str, Any]) -> None:
    x = rand(2, 2, *(4, 5, 7)[: RANKS[mode]])
    assert_same(lambda v: F.interpolate(v, mode=mode, align_corners=corners, **how), x, exact=False)


@pytest.mark.parametrize("mode", ["linear", "bilinear", "bicubic", "trilinear"])
@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("sizes", [(8, 5, 12), (3, 1, 17)], ids=str)
def test_gradients_of_interpolation(mode: str, corners: bool, sizes: tuple[int, ...]) -> None:
    rank = RANKS[mode]
    backward = getattr(aten, f"upsample_{mode}{rank}d_backward")
    grad = rand(2, 2, *sizes[:rank])
    assert_same(lambda g: backward(g, sizes[:rank], [2, 2, *(4, 5, 6)[:rank]], corners), grad, exact=False)


@pytest.mark.parametrize("mode", ["linear", "bilinear", "bicubic", "trilinear"])
def test_gradients_of_interpolation_by_a_scale(mode: str) -> None:
    rank = RANKS[mode]
    backward = getattr(aten, f"upsample_{mode}{rank}d_backward")
    grad = rand(2, 2, *(6, 8, 10)[:rank])
    source = [2, 2, *(4, 5, 6)[:rank]]
    assert_same(lambda g: backward(g, g.shape[2:], source, False, *([1.7] * rank)), grad, exact=False)


def test_weights_of_halves_are_halves_but_in_two_linear_dimensions() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        assert_same(lambda v: aten.upsample_linear1d(v, [19], False), rand(2, 4, 8, dtype=dtype))
        assert_same(lambda v: aten.upsample_bilinear2d(v, [16, 16], False), rand(2, 4, 8, 8, dtype=dtype))
        assert_same(lambda v: aten.upsample_bicubic2d(v, [16, 16], False), rand(2, 4, 8, 8, dtype=dtype))
        assert_same(lambda v: aten.upsample_trilinear3d(v, [6, 8, 9], False), rand(1, 2, 3, 4, 5, dtype=dtype))


def test_a_scale_that_does_not_fit_the_sizes_stays_in_eager() -> None:
    assert_same(
        lambda g: aten.upsample_linear1d_backward(g, [19], [2, 3, 8], False, 1.1),
        rand(2, 3, 19),
        eager=("aten.upsample_linear1d_backward.default",),
    )


def test_integers_are_refused_as_by_eager() -> None:
    compiled = torch.compile(
        lambda v: aten.upsample_bilinear2d(v, [4, 4], False), backend="ferrite", options={"executor": "oracle"}
    )
    with pytest.raises(NotImplementedError, match="not implemented for 'Long'"):
        compiled(torch.ones(1, 1, 2, 2, dtype=torch.int64))


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic"])
def test_symbolic_sizes(mode: str) -> None:
    x = rand(2, 3, 6, 7)
    assert_same_dynamic(lambda v: F.interpolate(v, scale_factor=2, mode=mode), x)
    assert_same_dynamic(lambda v: F.interpolate(v, size=(5, 9), mode=mode), x)


def test_gradients_with_symbolic_sizes() -> None:
    def run(grad: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sizes = [grad.shape[2], grad.shape[3]]
        return (
            aten.upsample_nearest2d_backward(grad, sizes, x.shape),
            aten.upsample_bilinear2d_backward(grad, sizes, x.shape, False),
            aten.upsample_bicubic2d_backward(grad, sizes, x.shape, True),
        )

    assert_same_dynamic(run, rand(2, 3, 11, 9), rand(2, 3, 6, 7))
