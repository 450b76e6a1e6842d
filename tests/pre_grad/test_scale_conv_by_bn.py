"""PRE-11: a batch norm outside training is done by the layer in front of it, and everything still trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ferrite
from ferrite.graph.arguments import find
from ferrite.graph.pre_grad.fold_conv_bn import fold_conv_bn
from ferrite.graph.pre_grad.scale_conv_by_bn import scale_conv_by_bn
from tests.pre_grad.harness import capture, keeps, rewrites, trace

aten = torch.ops.aten

torch.manual_seed(0)
LAYERS: dict[str, Callable[[bool], nn.Module]] = {
    "linear": lambda bias: nn.Linear(4, 6, bias=bias),
    "conv1d": lambda bias: nn.Conv1d(4, 6, 3, bias=bias),
    "conv2d": lambda bias: nn.Conv2d(4, 6, 3, 2, bias=bias, groups=2),
    "conv3d": lambda bias: nn.Conv3d(4, 6, 2, bias=bias),
    "conv_transpose1d": lambda bias: nn.ConvTranspose1d(4, 6, 3, bias=bias),
    "conv_transpose2d": lambda bias: nn.ConvTranspose2d(4, 6, 3, 2, 1, 1, bias=bias),
    "conv_transpose3d": lambda bias: nn.ConvTranspose3d(4, 6, 2, bias=bias),
}
INPUTS = {name: torch.randn(2, 4, *[5] * (0 if name == "linear" else int(name[-2]))) for name in LAYERS}
ATEN = {
    "linear": aten.linear.default,
    "conv1d": aten.conv1d.default,
    "conv2d": aten.conv2d.default,
    "conv3d": aten.conv3d.default,
    "conv_transpose1d": aten.conv_transpose1d.default,
    "conv_transpose2d": aten.conv_transpose2d.input,
    "conv_transpose3d": aten.conv_transpose3d.input,
}
NORM_OF = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


def settled(norm: nn.Module) -> nn.Module:
    """A batch norm outside training whose numbers are none of the defaults."""
    torch.manual_seed(0)
    for value in [*norm.parameters(), *norm.buffers()]:
        if value.is_floating_point():
            nn.init.uniform_(value, 0.5, 1.5)
    return norm.eval()


class Pair(nn.Module):
    """A layer and a batch norm, as modules."""

    def __init__(self, name: str, bias: bool, *, sync: bool = False) -> None:
        super().__init__()
        self.name = name
        self.layer = LAYERS[name](bias)
        rank = 0 if name == "linear" else int(name[-2])
        self.bn = settled(nn.SyncBatchNorm(6) if sync else NORM_OF[rank](6))

    def forward(self, x: Any) -> Any:
        return self.bn(self.layer(x))

    def options(self) -> dict[str, Any]:
        names = ("stride", "padding", "output_padding", "dilation", "groups")
        names = names if "transpose" in self.name else tuple(name for name in names if name != "output_padding")
        return {} if self.name == "linear" else {name: getattr(self.layer, name) for name in names}


class Functional(Pair):
    def forward(self, x: Any) -> Any:
        y = getattr(F, self.name)(x, self.layer.weight, self.layer.bias, **self.options())
        return F.batch_norm(y, self.bn.running_mean, self.bn.running_var, self.bn.weight, self.bn.bias, eps=self.bn.eps)


class Aten(Pair):
    def forward(self, x: Any) -> Any:
        bn = self.bn
        y = ATEN[self.name](x, self.layer.weight, self.layer.bias, **self.options())
        statistics = (bn.running_mean, bn.running_var)
        return aten.batch_norm.default(y, bn.weight, bn.bias, *statistics, False, 0.1, bn.eps, False)


class Sync(Pair):
    def __init__(self, name: str, bias: bool) -> None:
        super().__init__(name, bias, sync=True)


NONE_LEFT = {"batch_norm": 0, "nn.BatchNorm1d": 0, "nn.BatchNorm2d": 0, "nn.BatchNorm3d": 0, "nn.SyncBatchNorm": 0}


@pytest.mark.parametrize("form", [Pair, Sync, Functional, Aten])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_every_layer(name: str, bias: bool, form: Callable[[str, bool], Pair]) -> None:
    rewrites(scale_conv_by_bn, trace(form(name, bias), [INPUTS[name]]), times=1, left={name: 1} | NONE_LEFT)


def test_all_layers_as_dynamo_writes_them() -> None:
    pairs = [Pair(name, True) for name in LAYERS]

    def function(*inputs: Any) -> Any:
        return [pair(x) for pair, x in zip(pairs, inputs, strict=True)]

    rewrites(scale_conv_by_bn, function, list(INPUTS.values()), times=7, left=NONE_LEFT)


class Reuses(nn.Module):
    """Three of five candidates are a layer that only its norm reads."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))
        self.norms = nn.ModuleList(settled(nn.BatchNorm2d(3)) for _ in range(3))

    def forward(self, x: Any) -> Any:
        x = self.norms[0](self.convs[0](input=x))
        x = self.norms[1](input=self.convs[1](self.convs[1](x)))
        x = self.norms[2](self.convs[2](x))
        return self.norms[2](x) + x


def test_reused_modules() -> None:
    x = torch.randn(2, 3, 6, 6)
    rewrites(scale_conv_by_bn, trace(Reuses(), [x]), times=3, left={"nn.BatchNorm2d": 1, "conv2d": 3, "nn.Conv2d": 1})
    rewrites(scale_conv_by_bn, Reuses(), [x], times=3, left={"batch_norm": 1, "conv2d": 4})


def test_it_trains() -> None:
    """Forward, one step, forward again, through torch.compile, against eager."""
    torch._dynamo.reset()
    ours, theirs = Reuses(), Reuses()
    theirs.load_state_dict(ours.state_dict())
    options = {"pre_grad": {"scale_conv_by_bn": {}}, "executor": "eager", "strict": True}
    compiled = torch.compile(ours, backend="ferrite", options=options)
    x = torch.randn(2, 3, 6, 6)
    results = []
    for model, call in ((ours, compiled), (theirs, theirs)):
        optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
        first = call(x)
        first.square().mean().backward()
        optimiser.step()
        results.append((first, call(x), [value.detach() for value in model.parameters()]))
    torch.testing.assert_close(*results, rtol=3e-4, atol=3e-4)
    assert not torch.equal(results[0][0], results[0][1])
    assert [run.changed for run in ferrite.last_record().passes if run.name == "scale_conv_by_bn"] == [3]


W, B = torch.randn(6, 4, 3, 3) / 4, torch.randn(6)
MEAN, VAR, GAIN, SHIFT = torch.randn(6), torch.rand(6) + 0.5, torch.rand(6) + 0.5, torch.randn(6)
X = torch.randn(2, 4, 6, 6)


class TestArguments:
    def test_norm_with_defaults(self) -> None:
        """The peer crashed: #169011, #169126."""
        rewrites(scale_conv_by_bn, lambda x, w, m, v: F.batch_norm(F.conv2d(x, w), m, v), [X, W, MEAN, VAR], times=1)

    def test_only_a_gain_or_only_a_shift(self) -> None:
        inputs = [X, W, MEAN, VAR, GAIN]
        rewrites(scale_conv_by_bn, lambda x, w, m, v, g: F.batch_norm(F.conv2d(x, w), m, v, g), inputs, times=1)
        rewrites(scale_conv_by_bn, lambda x, w, m, v, s: F.batch_norm(F.conv2d(x, w), m, v, bias=s), inputs, times=1)

    def test_keywords_of_the_convolution(self) -> None:
        """The peer drops them: wrong shape or wrong values."""
        rewrites(
            scale_conv_by_bn,
            lambda x, w, b, m, v: F.batch_norm(F.conv2d(x, w, stride=2, bias=b, padding="valid"), m, v),
            [X, W, B, MEAN, VAR],
            times=1,
        )

    def test_all_by_keyword(self) -> None:
        """The peer crashes."""
        rewrites(
            scale_conv_by_bn,
            lambda x, w, b, m, v: F.batch_norm(
                running_var=v, input=F.conv2d(bias=b, weight=w, input=x), training=False, running_mean=m, eps=0.25
            ),
            [X, W, B, MEAN, VAR],
            times=1,
        )

    def test_the_function_of_torch(self) -> None:
        """Its arguments stand in another order than those of torch.nn.functional."""
        rewrites(
            scale_conv_by_bn,
            lambda x, w, m, v, g, s: torch.batch_norm(torch.conv2d(x, w), g, s, m, v, False, 0.1, 1e-3, False),
            [X, W, MEAN, VAR, GAIN, SHIFT],
            times=1,
        )


class TestMustBeCorrect:
    """Faults of the peer's, and cases where the rewrite would be wrong."""

    def test_grouped_transposed_convolution(self) -> None:
        """The peer crashes."""
        model = Pair("conv_transpose2d", True)
        model.layer = nn.ConvTranspose2d(4, 6, 3, groups=2)
        keeps(scale_conv_by_bn, trace(model, [INPUTS["conv_transpose2d"]]), because="has groups")

    def test_linear_on_three_dimensions(self) -> None:
        """The peer scales the wrong dimension, in silence."""
        inputs = [torch.randn(2, 6, 4), torch.randn(6, 4), MEAN, VAR]
        keeps(
            scale_conv_by_bn, lambda x, w, m, v: F.batch_norm(F.linear(x, w), m, v), inputs, because="second dimension"
        )

    def test_linear_by_one_row(self) -> None:
        inputs = [torch.randn(2, 6, 6), torch.randn(6), MEAN, VAR]
        keeps(
            scale_conv_by_bn, lambda x, w, m, v: F.batch_norm(F.linear(x, w), m, v), inputs, because="second dimension"
        )

    def test_convolution_without_a_batch(self) -> None:
        inputs = [torch.randn(4, 8, 8), W, MEAN, VAR]
        keeps(
            scale_conv_by_bn, lambda x, w, m, v: F.batch_norm(F.conv2d(x, w), m, v), inputs, because="second dimension"
        )

    def test_convolution_of_halves_and_norm_of_floats(self) -> None:
        """The peer crashes."""
        inputs = [X.bfloat16(), W.bfloat16(), MEAN, VAR]
        keeps(
            scale_conv_by_bn,
            lambda x, w, m, v: F.batch_norm(F.conv2d(x, w), m, v),
            inputs,
            because="hold bfloat16 and float32",
        )

    def test_autocast(self) -> None:
        def function(x: Any, w: Any, m: Any, v: Any) -> Any:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return F.batch_norm(F.conv2d(x, w), m, v)

        keeps(scale_conv_by_bn, function, [X, W, MEAN, VAR], because="hold bfloat16 and float32")

    def test_halves_everywhere(self) -> None:
        inputs = [value.bfloat16() / 2 for value in (X, W, MEAN, VAR)]
        rewrites(scale_conv_by_bn, lambda x, w, m, v: F.batch_norm(F.conv2d(x, w), m, v), inputs, times=1)

    @pytest.mark.parametrize("written", [0, 1])
    def test_weight_or_input_written_between(self, written: int) -> None:
        """The peer gives wrong results."""

        def function(*inputs: Any) -> Any:
            y = F.conv2d(*inputs[:2])
            inputs[written].mul_(2)
            return F.batch_norm(y, *inputs[2:])

        keeps(scale_conv_by_bn, function, [X, W, MEAN, VAR], because="may be written by mul_ between")

    def test_weight_below_a_module_written_between(self) -> None:
        class Writes(Pair):
            def forward(self, x: Any) -> Any:
                y = self.layer(x)
                self.layer.weight.mul_(2)
                return self.bn(y)

        with torch.no_grad():
            module = trace(Writes("conv1d", True), [INPUTS["conv1d"]]).module
            assert scale_conv_by_bn(module.graph) == 0

    def test_statistics_written_by_a_norm_between(self) -> None:
        def function(x: Any, w: Any, m: Any, v: Any) -> Any:
            y = F.conv2d(x, w)
            z = F.batch_norm(y.detach() + 1, m, v, training=True)
            return F.batch_norm(F.conv2d(x, w * 2), m, v) + z, y

        rewrites(scale_conv_by_bn, function, [X, W, MEAN, VAR], times=1, again=0)

    @pytest.mark.parametrize("training", [True, 1, None])
    def test_norm_in_training(self, training: Any) -> None:
        module = capture(lambda x, w, m, v: F.batch_norm(F.conv2d(x, w), m, v), [X, W, MEAN, VAR]).module
        (norm,) = find(module.graph, "batch_norm")
        norm.args, norm.kwargs = norm.args[:3], {"training": training}
        assert scale_conv_by_bn(module.graph) == 0

    def test_module_in_training(self) -> None:
        model = Pair("conv1d", True)
        model.bn.train()
        assert scale_conv_by_bn(trace(model, [INPUTS["conv1d"]]).module.graph) == 0

    def test_no_running_statistics(self) -> None:
        keeps(scale_conv_by_bn, lambda x, w: F.batch_norm(F.conv2d(x, w), None, None, training=True), [X, W])
        model = Pair("conv1d", True)
        model.bn = nn.BatchNorm1d(6, track_running_stats=False).eval()
        keeps(scale_conv_by_bn, trace(model, [INPUTS["conv1d"]]), because="has no running statistics")

    def test_statistics_that_ask_for_gradients(self) -> None:
        """Eager raises, and goes on raising."""
        module = capture(lambda x, w, m, v: F.batch_norm(F.conv2d(x, w), m, v), [X, W, MEAN, VAR]).module
        (norm,) = find(module.graph, "batch_norm")
        norm.args[1].meta["example_value"] = norm.args[1].meta["example_value"].clone().requires_grad_()
        assert scale_conv_by_bn(module.graph) == 0

    def test_layer_used_twice(self) -> None:
        def function(x: Any, w: Any, m: Any, v: Any) -> Any:
            y = F.conv2d(x, w)
            return F.batch_norm(y, m, v) + y

        keeps(scale_conv_by_bn, function, [X, W, MEAN, VAR], because="y has 2 users")

    def test_hooks_and_subclasses(self) -> None:
        model = Pair("conv1d", True)
        captured = trace(model, [INPUTS["conv1d"]])
        model.layer.register_forward_hook(lambda *_: None)
        assert scale_conv_by_bn(captured.module.graph) == 0

        class Own(nn.BatchNorm1d):
            pass

        model = Pair("conv1d", True)
        captured = trace(model, [INPUTS["conv1d"]])
        captured.module.bn = settled(Own(6))
        assert scale_conv_by_bn(captured.module.graph) == 0

    def test_size_of_the_output_given(self) -> None:
        class Sized(Pair):
            def forward(self, x: Any) -> Any:
                return self.bn(self.layer(x, output_size=(10, 10)))

        keeps(scale_conv_by_bn, trace(Sized("conv_transpose2d", True), [INPUTS["conv_transpose2d"]]))


def test_sizes_may_vary() -> None:
    rewrites(
        scale_conv_by_bn,
        lambda x, w, m, v: F.batch_norm(F.conv2d(x, w, padding=1), m, v),
        [X, W, MEAN, VAR],
        times=1,
        dynamic=True,
    )


def test_channels_last() -> None:
    x, w = (value.to(memory_format=torch.channels_last) for value in (X, W))
    rewrites(scale_conv_by_bn, lambda x, w, m, v: F.batch_norm(F.conv2d(x, w), m, v), [x, w, MEAN, VAR], times=1)


def test_constants_are_folded_first() -> None:
    with torch.no_grad():
        captured = trace(Functional("conv2d", True), [INPUTS["conv2d"]])
        outcome = rewrites([fold_conv_bn, scale_conv_by_bn], captured, times=1, left={"mul": 0, "conv2d": 1})
    assert outcome.kinds["batch_norm"] == 0
