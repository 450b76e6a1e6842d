"""Layouts that the compiler chooses: values, gradients and draws are those of the layout that eager has.

Gradients are judged by formulas in float64, not by eager: its kernel for the gradient of a batch norm is wrong in some
layouts, and those of the compiler's choice are more than eager ever sees.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ferrite
from tests.behaviour.compare import compare
from tests.promises import promises_kept
from tests.stacks.judge import Formulas

NEAR = 1e-4  # of the largest element
STRICT = {"strict": True, "cache": "off"}


def gradients(run: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The result, and the gradients of input and parameters, by name. The gradient of the result is no constant."""
    given = x.detach().clone().requires_grad_()
    out = run(given)
    start = torch.arange(out.numel(), dtype=out.dtype).reshape(out.shape).cos()
    parameters = dict(module.named_parameters())
    found = torch.autograd.grad(out, [given, *parameters.values()], start)
    return {"result": out.detach(), **dict(zip(("input", *parameters), found, strict=True))}


def assert_right(module: nn.Module, x: Tensor, dynamic: bool = False, options: dict[str, Any] | None = None) -> None:
    """Compiled, a module gives what formulas in float64 give, and its graphs what they promised each other."""
    wide = copy.deepcopy(module).double()
    with Formulas([]):
        expected = gradients(wide, wide, x.double())
    compiled = torch.compile(module, backend="ferrite", dynamic=dynamic, options=STRICT | (options or {}))
    with promises_kept() as looked_at:
        for _ in range(2):
            found = gradients(compiled, module, x)
            for name, right in expected.items():
                error = (found[name] - right).abs().max() / right.abs().max()
                assert error < NEAR, f"{name}: {error:.1e} of the largest"
    assert {*looked_at} == {"forward", "backward"}


# ---- norms and activations behind convolutions

IN_PLACE: dict[str, Callable[[], nn.Module]] = {
    "relu": lambda: nn.ReLU(inplace=True),
    "leaky_relu": lambda: nn.LeakyReLU(0.01, inplace=True),
    "elu": lambda: nn.ELU(inplace=True),
    "celu": lambda: nn.CELU(inplace=True),
    "selu": lambda: nn.SELU(inplace=True),
    "hardtanh": lambda: nn.Hardtanh(inplace=True),
    "silu": lambda: nn.SiLU(inplace=True),
    "threshold": lambda: nn.Threshold(0.1, 0.0, inplace=True),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", IN_PLACE)
def test_instance_norm_and_an_activation_in_place_twice(name: str, dynamic: bool) -> None:
    """As nnU-Net has it, with batches of one."""
    layers: list[nn.Module] = []
    for _ in range(2):
        layers += [nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.InstanceNorm2d(4, affine=True), IN_PLACE[name]()]
    assert_right(nn.Sequential(*layers), torch.randn(1, 4, 16, 16), dynamic)


class OverChannels(nn.Module):
    """A layer norm over the channels of images."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.movedim(1, -1)).movedim(-1, 1)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_norms_between_convolutions_without_an_op_in_place(dynamic: bool) -> None:
    module = nn.Sequential(
        nn.Conv2d(4, 12, 3, bias=False),
        nn.InstanceNorm2d(12),
        nn.Conv2d(12, 12, 3, groups=12, bias=False),
        OverChannels(12),
        nn.Tanh(),
        nn.ReflectionPad2d(2),
    )
    assert_right(module, torch.randn(1, 4, 14, 13), dynamic)


def test_a_batch_norm_of_sizes_that_only_a_factor_knows() -> None:
    """Half of a size that is a symbol has no form among the sizes of loops: ops in eager are given their layout by one
    of PyTorch's own."""
    layers = (nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.Upsample(scale_factor=0.5), nn.BatchNorm2d(4), nn.ReLU())
    assert_right(nn.Sequential(*layers, nn.Conv2d(4, 4, 3)), torch.randn(1, 3, 12, 15), dynamic=True)


# ---- what is saved lies as the backward was compiled for


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_what_a_grouped_convolution_saves(dynamic: bool) -> None:
    """Kernels of the forward read its result as it was promised; so does the backward."""
    convolutions = (nn.Conv3d(4, 4, 3, padding=1, groups=4), nn.Conv3d(4, 8, 3, padding=1, bias=False))
    assert_right(nn.Sequential(*convolutions, nn.InstanceNorm3d(8)), torch.randn(1, 4, 8, 8, 8), dynamic)


# ---- kernels of libraries that look at strides


@pytest.mark.parametrize("executor", ["native", "eager"])
def test_the_gradient_of_a_batch_norm_is_not_eagers(executor: str) -> None:
    """Eager's kernel is wrong for a batch of one, a contiguous image and a gradient that lies channels last in all but
    the stride of the batch."""

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.weight = nn.BatchNorm2d(4), nn.Parameter(torch.randn(1, 15, 4))

        def forward(self, x: Tensor) -> Tensor:
            return (self.norm(x).flatten(2).transpose(1, 2) * self.weight).sum((1, 2))

    module, x = Flat(), torch.randn(1, 4, 3, 5)
    assert_right(module, x, options={"executor": executor})


WEIGHT = torch.randn(32, 32, 3, 3, generator=torch.Generator().manual_seed(0)) / 10
TO_64 = torch.randn(64, 32, generator=torch.Generator().manual_seed(1)) / 10


def convolved(x: Tensor) -> Tensor:
    return functional.conv2d(x, WEIGHT, padding=1)


GROUP_NORMS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "flattened": (lambda x: functional.group_norm(convolved(x).flatten(2), 8), (2, 32, 8, 8)),
    "flattened_and_computed": (lambda x: functional.group_norm(convolved(x).flatten(2) + 1, 8), (2, 32, 8, 8)),
    "image": (lambda x: functional.group_norm(convolved(x).relu(), 8), (2, 32, 8, 8)),
    "of_rank_5": (lambda x: functional.group_norm(convolved(x)[:, :, None], 8), (2, 32, 8, 8)),
    "transposed": (lambda x: functional.group_norm(x.transpose(1, 2), 8).transpose(1, 2), (2, 64, 32)),
    "transposed_twice": (
        lambda x: functional.group_norm(x.flatten(2).transpose(1, 2).transpose(1, 2), 8), (2, 32, 8, 8)
    ),
    "convolved_and_transposed": (
        lambda x: functional.group_norm(convolved(x).flatten(2).transpose(1, 2), 8), (2, 32, 8, 8)
    ),
}  # fmt: skip


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", GROUP_NORMS)
def test_group_norms_of_what_others_lay_out(name: str, training: bool) -> None:
    function, shape = GROUP_NORMS[name]
    compare(function, torch.randn(shape, requires_grad=training), training=training, calls=1, exact=False)


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("executor", ["native", "eager"])
def test_a_group_norm_behind_attention(training: bool, executor: str) -> None:
    """The trace takes this image of a batch of one for one that lies channels last, and eager does not."""

    def function(x: Tensor) -> Tensor:
        attended = functional.linear(x, TO_64).transpose(1, 2).reshape(1, 64, 8, 8)
        return functional.group_norm(attended / 1.0, 8)

    x = torch.randn(1, 64, 32, requires_grad=training)
    options = STRICT | {"executor": executor}
    expected, found = function(x), torch.compile(function, backend="ferrite", options=options)(x)
    torch.testing.assert_close(found, expected)
    if training:
        start = torch.randn(1, 64, 8, 8)
        (ours,), (theirs,) = (torch.autograd.grad(out, x, start) for out in (found, expected))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


SQUARE = torch.randn(8, 8, 3, 3, generator=torch.Generator().manual_seed(0)) / 10


def squares(x: Tensor) -> Tensor:
    """What a convolution gives that runs channels last: matrices whose rows are no rows in memory."""
    return functional.conv2d(x, SQUARE, padding=1)


BEHIND: dict[str, Callable[[Tensor], Any]] = {
    "matrix_exp": lambda x: torch.matrix_exp(squares(x) / 10),
    "det": lambda x: torch.linalg.det(squares(x)),
    "slogdet": lambda x: torch.linalg.slogdet(squares(x))[1],
    "inv": lambda x: torch.linalg.inv(squares(x) + 8 * torch.eye(8)),
    "nll_loss_2d": lambda x: functional.nll_loss(squares(x), (x[:, 0] > 0).long()),
    "attention": lambda x: functional.scaled_dot_product_attention(squares(x), x, squares(x + 1)),
    "fft": lambda x: torch.fft.rfft2(squares(x)).abs(),
    "grid_sample": lambda x: functional.grid_sample(squares(x), x[:, :2].tanh().movedim(1, -1), align_corners=False),
}


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", BEHIND)
def test_kernels_of_libraries_behind_a_convolution(name: str, training: bool) -> None:
    x = torch.randn(2, 8, 8, 8, requires_grad=training)
    with promises_kept():
        compare(BEHIND[name], x, training=training, calls=1, exact=False, options={"layout": "on"})
    record = ferrite.last_record()
    assert record is not None
    assert any(choice.what == "channels last" and choice.taken for choice in record.decisions)


# ---- draws

DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: functional.dropout(x, 0.3),
    "dropout_of_channels": lambda x: functional.dropout2d(x, 0.3),
    "alpha_dropout": lambda x: functional.alpha_dropout(x, 0.3, training=True),
    "rrelu": lambda x: functional.rrelu(x, training=True),
    "rand_like": lambda x: x * torch.rand_like(x),
    "bernoulli": lambda x: x * torch.bernoulli(x.sigmoid()),
}


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", DRAWS)
def test_draws_behind_a_convolution_are_those_of_eager(name: str, training: bool) -> None:
    """The convolution runs channels last; draws follow the memory of the layout that eager has."""
    function = lambda x: DRAWS[name](squares(x)).movedim(1, -1) * 2
    x = torch.randn(1, 8, 8, 7, requires_grad=training)
    compare(function, x, training=training, calls=1, exact=False, options={"layout": "on"})
    record = ferrite.last_record()
    assert record is not None
    assert any(choice.what == "channels last" and choice.taken for choice in record.decisions)


# ---- strides that users and backward graphs see


class TurnedAndClipped(nn.Module):
    """The gradient of what is written in place to a view is laid out by strides that the forward saved as numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(8, 1, 5, stride=2, dilation=2, bias=False)
        self.second = nn.Conv2d(1, 4, 1, stride=(1, 2), padding=2, dilation=2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return functional.hardtanh(self.second(self.first(x)).transpose(0, 1), inplace=True)


@pytest.mark.parametrize("layout", ["on", "off"])
def test_strides_that_a_forward_graph_saves(layout: str) -> None:
    torch.manual_seed(0)
    module = TurnedAndClipped()
    assert_right(module, torch.randn(2, 8, 15, 12), dynamic=True, options={"layout": layout})


def test_the_gradient_of_a_weight_behind_one_channel() -> None:
    """An image of one channel lies both ways at once, but for a stride that tells nothing; kernels look at that too."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(4, 1, 5, padding=1), nn.ConvTranspose2d(1, 4, 3))
    x = torch.randn(1, 4, 7, 7, requires_grad=True)
    compiled = torch.compile(module, backend="ferrite", dynamic=False, options=STRICT)
    strides = []
    for run in (module, compiled):
        made = run(x)
        gradients = torch.autograd.grad(made, [x, *module.parameters()], torch.randn(made.shape))
        strides.append([gradient.stride() for gradient in gradients])
    assert strides[0] == strides[1]


WRITTEN: dict[str, Callable[[Tensor], Tensor]] = {
    "tril": lambda x: x.tril_(),
    "renorm": lambda x: x.renorm_(2, 0, 1.0),
    "rrelu": lambda x: functional.rrelu(x, inplace=True, training=True),
    "add": lambda x: x.add_(torch.ones(x.shape)),
    "copy": lambda x: x.copy_(torch.ones(x.shape)),
    "part": lambda x: x[..., 1:3].tril_(),
    "transposed": lambda x: x.transpose_(-1, -2),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_in_place_stays_where_it_is(name: str, dynamic: bool) -> None:
    """The op that stands in for one in place may lay out its result in another way."""
    write = WRITTEN[name]
    options = STRICT | {"fallback_random": True}
    compiled = torch.compile(lambda x: write(x + 1), backend="ferrite", dynamic=dynamic, options=options)
    images = torch.randn(2, 3, 5, 4).contiguous(memory_format=torch.channels_last)
    for x in (torch.randn(4, 5).t(), images, torch.randn(3, 1, 5).as_strided((3, 1, 5), (5, 77, 1))):
        made = []
        for run in (lambda x: write(x + 1), compiled):
            torch.manual_seed(0)
            made.append(run(x))
        assert made[1].stride() == made[0].stride()
        torch.testing.assert_close(made[1], made[0])


def written_part(y: Tensor) -> Tensor:
    y.unfold(0, 1, 1).add_(1)
    return y


def written_flat(y: Tensor) -> Tensor:
    y = y.contiguous()
    y.view(-1).mul_(2)
    return y


def written_squeezed(y: Tensor) -> Tensor:
    y.squeeze().mul_(2)
    return y


def written_list(y: Tensor) -> Tensor:
    torch._foreach_add_([y], [torch.ones(y.shape)])
    return y


WRITTEN_THROUGH: dict[str, Callable[[Tensor], Tensor]] = {
    "out": lambda y: torch.add(y, 1, out=torch.empty(y.shape)),
    "part": written_part,
    "flat": written_flat,
    "squeezed": written_squeezed,
    "list": written_list,
}


@pytest.mark.parametrize(
    ("name", "needs_gradient"),
    [(name, needs) for name in WRITTEN_THROUGH for needs in (False, True) if (name, needs) != ("out", True)],
)  # autograd refuses the pair that is left out
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_what_is_written_through_a_view_or_as_out_stays(name: str, dynamic: bool, needs_gradient: bool) -> None:
    """And so do its views, and what is made of it; they share memory as in eager."""
    write = WRITTEN_THROUGH[name]

    def function(x: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        y = write(x * scale)
        return y, y[..., 1:], y * 2, y.transpose(0, -1)

    compiled = torch.compile(function, backend="ferrite", dynamic=dynamic, options=STRICT)
    images = torch.randn(2, 3, 5, 4).contiguous(memory_format=torch.channels_last)
    odd = torch.randn(3, 1, 5).as_strided((3, 1, 5), (5, 77, 1))
    for x in (torch.randn(4, 5).t(), images, odd, torch.randn(2, 3, 1, 4)):
        scale = torch.tensor(3.0, requires_grad=needs_gradient)
        made = []
        for run in (function, compiled):
            results = run(x, scale)
            if needs_gradient:
                results = (*results, *torch.autograd.grad(results[2].square().sum(), scale))
            made.append(results)
        assert [each.stride() for each in made[1]] == [each.stride() for each in made[0]]
        torch.testing.assert_close(made[1], made[0])
        starts = [[each.untyped_storage().data_ptr() for each in results] for results in made]
        assert [each == starts[1][0] for each in starts[1]] == [each == starts[0][0] for each in starts[0]]


@pytest.mark.parametrize("layout", ["on", "off"])
def test_a_result_that_is_given_twice_is_one_tensor(layout: str) -> None:
    """Also if it is copied because it lies otherwise than the user is to see it; here, by sizes that are symbols."""
    module = nn.Sequential(nn.Conv2d(3, 12, (2, 3), dilation=2, bias=False), nn.LocalResponseNorm(5))

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        made = module(x)
        return functional.elu(made, inplace=True), made

    compiled = torch.compile(function, backend="ferrite", dynamic=True, options=STRICT | {"layout": layout})
    with torch.no_grad():
        one, other = compiled(torch.randn(1440).as_strided((4, 3, 10, 12), (1, 4, 12, 120)))
    assert one is other or one.data_ptr() == other.data_ptr()


def test_a_grouped_convolution_of_volumes_stays_as_traced() -> None:
    """Channels last, oneDNN's gradient of its weight is ten times as far from the exact one."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv3d(4, 8, 3), nn.Conv3d(8, 8, 3, groups=4), nn.Conv3d(8, 4, 3))
    compiled = torch.compile(module, backend="ferrite", dynamic=False, options=STRICT | {"layout": "on"})
    compiled(torch.randn(2, 4, 9, 9, 9)).sum().backward()
    record = ferrite.last_record()
    assert record is not None
    chosen = [choice for choice in record.decisions if choice.what == "channels last"]
    assert [len(choice.subjects) for choice in chosen] == [2, 2]
