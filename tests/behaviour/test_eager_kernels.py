"""Kernels of PyTorch whose answers depend on layouts: what is known of them is true, and Ferrite keeps clear of them.

The whole is `python -m tests.eager_kernels`. What compiled code makes of them is in test_layouts.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from ferrite.lower.layouts import ANY_LAYOUT, ONE_LAYOUT
from tests import eager_kernels
from tests.eager_kernels import KNOWN, backward, judged, of_own, of_samples, recorded, unexpected

OPS_OF_THE_DATABASE = 40


def image(*sizes: int) -> torch.Tensor:
    return torch.randn(sizes, requires_grad=True)


# A module or function whose forward or backward calls the kernel.
CALLERS: dict[str, Callable[[], Any]] = {
    "aten.native_batch_norm_backward.default": lambda: nn.BatchNorm2d(4)(image(1, 4, 3, 5)),
    "aten.native_group_norm.default": lambda: nn.GroupNorm(2, 4)(image(2, 4, 7)),
    "aten.native_group_norm_backward.default": lambda: nn.GroupNorm(2, 4)(image(2, 4, 3, 5)),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": lambda: (
        functional.scaled_dot_product_attention(image(2, 3, 5, 4), image(2, 3, 5, 4), image(2, 3, 5, 4))
    ),
    "aten._linalg_det.default": lambda: torch.linalg.det(image(3, 5, 5)),
    "aten._linalg_slogdet.default": lambda: torch.linalg.slogdet(image(3, 5, 5)),
    "aten.nll_loss2d_backward.default": lambda: functional.nll_loss(
        image(2, 4, 5, 5), torch.zeros(2, 5, 5, dtype=torch.long)
    ),
    "aten._unsafe_view.default": lambda: torch.ops.aten._unsafe_view(image(2, 3, 4), [6, 4]),
}


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_known_of_a_kernel_is_so(name: str) -> None:
    """If it is no longer, PyTorch has mended it, and the entry can go."""
    found = judged(recorded(iter([lambda: backward(CALLERS[name]())])), name)[name]
    assert found.runs
    assert found.wrong if KNOWN[name].does == eager_kernels.WRONG else found.raised


@pytest.mark.parametrize("name", KNOWN)
def test_a_kernel_that_looks_at_layouts_is_kept_clear_of(name: str) -> None:
    packet, overload = name.removeprefix("aten.").split(".")
    op = getattr(getattr(torch.ops.aten, packet), overload)
    assert op not in ANY_LAYOUT
    assert (op in ONE_LAYOUT) == (KNOWN[name].so == eager_kernels.ONE_LAYOUT)


def test_every_op_that_is_given_one_layout_is_known() -> None:
    assert {str(op) for op in ONE_LAYOUT} == {
        name for name, known in KNOWN.items() if known.so == eager_kernels.ONE_LAYOUT
    }


def test_a_sample_of_kernels_is_right_in_every_layout() -> None:
    """Some modules, and some ops of PyTorch's database, chosen by digest."""
    draw = lambda ops: sorted(ops, key=lambda op: hashlib.sha256(op.full_name.encode()).digest())[:OPS_OF_THE_DATABASE]
    result = judged(recorded(of_own((1,), (4,)), of_samples(draw)))
    assert len(result) > OPS_OF_THE_DATABASE
    assert unexpected(result, is_whole=False) == []


def test_ops_that_take_any_layout_do() -> None:
    """Those of `ANY_LAYOUT` that read images are called by these modules."""

    def runs() -> Iterator[Callable[[], Any]]:
        x, flat = image(2, 4, 6, 6), image(2, 3, 5)
        modules: tuple[Callable[[], Any], ...] = (
            lambda: nn.Conv2d(4, 8, 3)(x), lambda: nn.MaxPool2d(2)(x), lambda: nn.AvgPool2d(2)(x),
            lambda: nn.AdaptiveAvgPool2d(2)(x), lambda: torch.cat([x, x], 1), lambda: functional.pad(x, (1, 1, 2, 0)),
            lambda: torch.bmm(flat, flat.mT), lambda: torch.baddbmm(flat, flat, image(2, 5, 5)),
            lambda: nn.Linear(5, 3)(flat), lambda: x.clone(), lambda: x.to(torch.bfloat16).float(),
            lambda: torch.ops.aten.upsample_nearest2d.vec(x, None, [2.0, 2.0]),
            lambda: torch.ops.aten.upsample_bilinear2d.vec(x, None, False, [2.0, 2.0]),
        )  # fmt: skip
        return (lambda make=make: backward(make()) for make in modules)

    result = judged(recorded(runs()))
    assert unexpected(result, is_whole=False) == []
    run = {name for name, found in result.items() if found.runs > 1}
    assert run >= {
        "aten.convolution.default", "aten.convolution_backward.default", "aten.cat.default", "aten.bmm.default",
        "aten.baddbmm.default", "aten.max_pool2d_with_indices.default", "aten.avg_pool2d.default",
        "aten._adaptive_avg_pool2d.default", "aten.constant_pad_nd.default", "aten.clone.default",
        "aten._to_copy.default",
    }  # fmt: skip
