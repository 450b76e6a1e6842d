"""A sample of `python -m tests.strides`: what it once found, and what the issue of that time named."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from .calls import Plan, judge
from .layouts import LAYOUTS, channels_last, contiguous, laid_out, moved, odd, sliced, transposed
from .ops import Judge

aten = torch.ops.aten

OPS = (
    "tril", "triu", "flip", "roll", "renorm", "rot90", "sort", "ones_like", "zeros_like", "expand", "view", "addr",
    "stack", "diag_embed", "isnan", "nn.functional.glu", "nn.functional.relu", "nn.functional.leaky_relu",
    "mvlgamma.mvlgamma_p_1", "__rpow__", "frexp", "deg2rad", "nan_to_num", "nn.functional.layer_norm",
    "nn.functional.group_norm",
    "nn.functional.batch_norm", "nn.functional.instance_norm", "log_softmax", "softmax", "nn.functional.logsigmoid",
    "nn.functional.prelu", "nn.functional.hardswish", "nn.functional.hardtanh", "nn.functional.smooth_l1_loss",
    "nn.functional.binary_cross_entropy", "nn.functional.binary_cross_entropy_with_logits",
    "nn.functional.huber_loss", "nn.functional.mse_loss", "nn.functional.nll_loss",
)  # fmt: skip

WAYS = ("contiguous", "transposed", "channels_last", "first odd")


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", OPS)
def test_what_is_promised_is_eagers(name: str, dynamic: bool) -> None:
    found = judge(name, Plan(dynamic=dynamic, samples=2, ways=WAYS, ranks=(None, 4)))
    assert found.calls
    assert [line for _, line in found.differences] == []


def test_the_judge_sees_a_wrong_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ferrite.graph.eager_strides.rules_of", lambda op: ())
    with Judge() as observer:
        torch.randn(5, 5).t().pow(2)
        aten.log_sigmoid_forward(torch.randn(5, 5).t())
    ((op, line), _) = observer.found.differences  # result and buffer
    assert op == "aten.log_sigmoid_forward.default"
    assert line.endswith("eager (5, 1), promised (1, 5)")


def _marks(x: Tensor) -> Tensor:
    """Of this layout, zeros to index with."""
    return torch.zeros_like(x, dtype=torch.int64)


def _repeated(x: Tensor) -> Tensor:
    return x[:1].expand(x.shape)


# Single ops, of two operands of the same sizes in layouts of their own.
PAIRS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "masked_fill": lambda x, y: aten.masked_fill.Scalar(x, y > 0, 1.0),
    "isin": lambda x, y: aten.isin.Tensor_Tensor(x, y.reshape(-1)[:2]),
    "normal": lambda x, y: (aten.normal.Tensor_Tensor(x, y.exp()), aten.normal.Tensor_float(x, 1.5)),
    "rsub": lambda x, y: aten.rsub.Tensor(x, y, alpha=2),
    "ldexp": lambda x, y: (aten.ldexp.Tensor(x[..., :1], y), aten.ldexp.Tensor(x, y[:1])),
    "isinf": lambda x, y: (aten.isinf.default(x), aten.isinf.default(torch.complex(x, y)), aten.isinf.default(x.int())),
    "conj_physical": lambda x, y: aten._conj_physical.default(torch.complex(x, y)),
    "complex": lambda x, y: (torch.complex(sliced(x), y), torch.polar(sliced(x.exp()), y)),
    "complex number": lambda x, y: aten.mul.Scalar(torch.complex(x, y), 1j),
    "complex length": lambda x, y: (aten.abs.default(torch.complex(x, y)), aten.angle.default(torch.complex(x, y))),
    "other dtypes": lambda x, y: (aten.add.Tensor(x, _repeated(y.int())), aten.mul.Tensor(x.cfloat(), y)),
    "integers": lambda x, y: aten.exp.default(_repeated(y.int())),
    "condition": lambda x, y: aten.where.self(_repeated(y > 0), x, x),
    "stack": lambda x, y: aten.stack.default([x.new_ones(2, 5, 1).mT] * 2, -1),
    "index": lambda x, y: (aten.index.Tensor(x, [None, _marks(y)]), aten._unsafe_index.Tensor(x, [_marks(y), None])),
    "two indices": lambda x, y: aten.index.Tensor(x, [_marks(y)[0], None, _marks(x)[:1, 0]]),
    "masked_index": lambda x, y: aten._unsafe_masked_index.default(x, y > 0, [_marks(y), _marks(y)], 0.5),
    "index_add": lambda x, y: aten.index_add.default(x, 0, torch.arange(len(x)), y),
    "index_copy": lambda x, y: aten.index_copy.default(x, 0, torch.arange(len(x)), y),
    "matrix_exp": lambda x, y: aten.linalg_matrix_exp.default(x[..., :1, :1]),
    "fourier": lambda x, y: aten._fft_c2c.default(torch.complex(x, y), [1], 0, True),
    "fourier, two": lambda x, y: aten._fft_c2c.default(torch.complex(x, y), [0, 1], 0, True),
    "fourier of reals": lambda x, y: aten._fft_r2c.default(x, [1], 0, True),
    "fourier to reals": lambda x, y: aten._fft_c2r.default(torch.complex(x, y), [1], 0, max(1, 2 * x.shape[1] - 2)),
    "losses": lambda x, y: (aten.mse_loss.default(x, y, 0), aten.smooth_l1_loss.default(x, y, 0)),
    "soft_margin": lambda x, y: aten.soft_margin_loss_backward.default(x, y, y, 0),
    "rrelu, training": lambda x, y: aten.rrelu_with_noise_backward.default(x, x, y, 0.0, 1.0, True, False),
    "rrelu": lambda x, y: aten.rrelu_with_noise_backward.default(x, y, y, 0.0, 1.0, False, False),
    "no distances": lambda x, y: aten._cdist_backward.default(y[..., :0], x, y[..., :0, :], 2.0, y[..., :0]),
}  # fmt: skip
IMAGES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "attention": lambda x, y: aten._scaled_dot_product_flash_attention_for_cpu.default(x, y, y),
    "grid_sampler": lambda x, y: aten.grid_sampler_2d.default(x, transposed(torch.ones(len(x), 1, 4, 2)), 1, 1, True),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", [*PAIRS, *IMAGES])
def test_a_single_op_is_promised_as_in_eager(name: str, dynamic: bool) -> None:
    observer = Judge(dynamic=dynamic)
    for sizes in ((2, 3, 1, 2), (1, 3, 5, 2)) if name in IMAGES else ((2, 3, 2, 1), (2, 1, 2, 4)):
        for one, other in product((contiguous, transposed, odd), (contiguous, channels_last, odd, moved)):
            x, y = one(torch.randn(sizes)), other(torch.randn(sizes))
            with observer:
                (PAIRS.get(name) or IMAGES[name])(x, y)
    assert observer.found.calls
    assert not observer.found.unknown
    assert [line for _, line in observer.found.differences] == []


CALLS: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "layer_norm": (lambda x: F.layer_norm(x, x.shape[-1:]), (4, 1, 6)),
    "group_norm": (lambda x: F.group_norm(x, 2), (1, 4, 5, 3)),
    "group_norm_one_wide": (lambda x: F.group_norm(x, 2), (2, 4, 1, 3)),
    "batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), (3, 4, 1, 2)),
    "log_softmax": (lambda x: F.log_softmax(x, 1), (3, 1, 5)),
    "prelu": (lambda x: F.prelu(x, x.new_full((1,), 0.5)), (4, 1, 5)),
    "hardswish": (F.hardswish, (4, 1, 5)),
    "flip": (lambda x: x.flip(0, 2), (4, 1, 5)),
    "roll": (lambda x: x.roll(1, 0), (4, 1, 5)),
    "bce_with_logits": (
        lambda x: F.binary_cross_entropy_with_logits(x, x.detach().sigmoid(), reduction="none"), (4, 1, 5)
    ),
    "smooth_l1": (lambda x: F.smooth_l1_loss(x, x.detach() * 2, reduction="none"), (4, 1, 5)),
    "smooth_l1_mean": (lambda x: F.smooth_l1_loss(x, x.detach() * 2), (4, 1, 5)),
    "mse_mean": (lambda x: F.mse_loss(x, x.detach() * 2), (4, 3, 5)),
    "huber_mean": (lambda x: F.huber_loss(x, x.detach() * 2), (4, 3, 5)),
    "tril": (lambda x: x.tril(), (4, 1, 5)),
    "renorm": (lambda x: x.renorm(2, 0, 1.0), (4, 1, 5)),
    "logsigmoid": (F.logsigmoid, (3, 4, 5)),
    "expanded": (lambda x: x.sum(0).expand(1, 2, *x.shape[1:]) + 0 * x.sum(), (4, 1, 5)),
    "broadcast_view": (lambda x: torch.fmin(x[-1], x[None]), (5, 5)),
    "max_unpool": (lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), (1, 3, 4, 6)),
    "halves": (lambda x: x.bfloat16().sum(0, keepdim=True).mT * x.bfloat16(), (3, 4, 4)),
}  # fmt: skip


# Gradients that are traced in other steps than eager's, whose strides in dimensions of one differ.
TRACED_OTHERWISE = ("renorm",)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", CALLS)
def test_results_and_gradients_lie_as_in_eager(name: str, dynamic: bool) -> None:
    """AOTAutograd hands gradients of results to the backward contiguously (or channels-last) where sizes are dynamic,
    so a gradient follows eager's only where the result lies so."""
    function, sizes = CALLS[name]
    for layout in LAYOUTS:
        torch._dynamo.reset()  # a stride that is a symbol counts as what it was in the trace
        compiled = torch.compile(function, backend="ferrite", dynamic=dynamic, options={"cache": "off"})
        x: Tensor = laid_out(torch.randn(sizes, requires_grad=True), layout)
        strides = []
        for call in (function, compiled):
            made = call(x)
            (gradient,) = torch.autograd.grad(made, x, torch.ones_like(made))
            is_handed_on = name not in TRACED_OTHERWISE and (made.is_contiguous() or not dynamic)
            strides.append((made.stride(), gradient.stride() if is_handed_on else None))
        assert strides[1] == strides[0], layout
