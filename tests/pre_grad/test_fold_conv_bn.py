"""PRE-10: a convolution and its batch norm become one convolution, where nothing they hold can change."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ferrite.graph.arguments import find
from ferrite.graph.ledger import keep_ledger
from ferrite.graph.pre_grad.fold_conv_bn import fold_conv_bn
from tests.pre_grad.harness import Captured, capture, keeps, rewrites, trace

torch.manual_seed(0)
CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
NONE_LEFT = {"batch_norm": 0, "nn.BatchNorm1d": 0, "nn.BatchNorm2d": 0, "nn.BatchNorm3d": 0}


def normal(rank: int, channels: int, **settings: Any) -> nn.Module:
    """A batch norm whose numbers are none of the defaults."""
    torch.manual_seed(0)
    norm = NORMS[rank - 1](channels, **settings).eval()
    for value in [*norm.parameters(), *norm.buffers()]:
        if value.is_floating_point():
            nn.init.uniform_(value, 0.5, 1.5)
    return norm


class Pair(nn.Module):
    def __init__(self, conv: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.conv, self.bn = conv.eval(), norm.eval()

    def forward(self, x: Any) -> Any:
        return F.relu(self.bn(self.conv(x)))


class Inlined(Pair):
    """The same as functions on parameters, the way Dynamo writes it."""

    def forward(self, x: Any) -> Any:
        conv, bn = self.conv, self.bn
        convolve = (F.conv1d, F.conv2d, F.conv3d)[len(conv.stride) - 1]
        y = convolve(x, conv.weight, conv.bias, conv.stride, conv.padding, conv.dilation, conv.groups)
        return F.relu(F.batch_norm(y, bn.running_mean, bn.running_var, bn.weight, bn.bias, False, bn.momentum, bn.eps))


def traced(module: nn.Module, *inputs: Any) -> Captured:
    with torch.no_grad():
        return trace(module, inputs)


def folds(module: nn.Module, x: torch.Tensor, **expected: Any) -> Any:
    """It folds, its user's module is untouched, and so is the module that holds the graph, but for what was added."""
    before = copy.deepcopy(module.state_dict())
    captured = traced(module, x)
    with torch.no_grad():
        outcome = rewrites(fold_conv_bn, captured, **({"times": 1, "left": NONE_LEFT} | expected))
    after = module.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    return outcome


def folded_in(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_buffers() if "folded" in name]


def refuses(module: nn.Module, *inputs: Any, because: str | None = None) -> None:
    with torch.no_grad():
        keeps(fold_conv_bn, traced(module, *inputs), because=because)


@pytest.mark.parametrize("form", [Pair, Inlined])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_every_convolution(rank: int, groups: int, bias: bool, form: type[Pair]) -> None:
    conv = CONVS[rank - 1](4, 6, 2, stride=2, padding=1, dilation=2, groups=groups, bias=bias)
    folds(form(conv, normal(rank, 6)), torch.randn(2, 4, *[6] * rank))


@pytest.mark.parametrize("form", [Pair, Inlined])
def test_norm_without_weight_and_bias(form: type[Pair]) -> None:
    folds(form(nn.Conv2d(4, 6, 2, bias=False), normal(2, 6, affine=False)), torch.randn(2, 4, 6, 6))


@pytest.mark.parametrize(
    ("dtype", "wide_norm"),  # eager on a CPU has no batch norm that holds f16
    [(torch.float16, True), (torch.bfloat16, True), (torch.bfloat16, False)],
)
def test_halves_keep_the_dtype_of_the_convolution(dtype: torch.dtype, wide_norm: bool) -> None:
    conv, norm = nn.Conv2d(4, 6, 2).to(dtype), normal(2, 6)
    outcome = folds(Pair(conv, norm if wide_norm else norm.to(dtype)), torch.randn(2, 4, 6, 6, dtype=dtype))
    assert outcome.module.folded_weight_0.dtype == outcome.module.folded_bias_0.dtype == dtype


def test_channels_last() -> None:
    conv = nn.Conv2d(4, 6, 2).to(memory_format=torch.channels_last)
    x = torch.randn(2, 4, 6, 6).to(memory_format=torch.channels_last)
    outcome = folds(Pair(conv, normal(2, 6)), x)
    assert outcome.module.folded_weight_0.is_contiguous(memory_format=torch.channels_last)


def test_padding_by_name_and_large_eps() -> None:
    folds(Pair(nn.Conv2d(4, 6, 3, padding="same"), normal(2, 6, eps=0.25)), torch.randn(2, 4, 6, 6))


def test_folded_values_are_no_state() -> None:
    outcome = folds(Pair(nn.Conv1d(4, 6, 2), normal(1, 6)), torch.randn(2, 4, 6))
    assert not [name for name in outcome.module.state_dict() if "folded" in name]


class TestCalledAgain:
    def test_the_same_pair_is_folded_once(self) -> None:
        """The peer folded it twice: #124286, #124808."""

        class Twice(Pair):
            def forward(self, x: Any) -> Any:
                return self.bn(self.conv(x)) + self.bn(self.conv(x * 2))

        outcome = folds(Twice(nn.Conv1d(4, 6, 2), normal(1, 6)), torch.randn(2, 4, 6), times=2)
        assert folded_in(outcome.module) == ["folded_weight_0", "folded_bias_0"]

    def test_the_same_pair_inlined(self) -> None:
        class Twice(Inlined):
            def forward(self, x: Any) -> Any:
                return super().forward(x) + super().forward(x * 2)

        outcome = folds(Twice(nn.Conv1d(4, 6, 2), normal(1, 6)), torch.randn(2, 4, 6), times=2)
        assert folded_in(outcome.module) == ["folded_weight_0", "folded_bias_0"]

    @pytest.mark.parametrize("form", [Pair, Inlined])
    def test_two_norms(self, form: type[Pair]) -> None:
        class Two(form):  # type: ignore[valid-type,misc]
            def forward(self, x: Any) -> Any:
                one = super().forward(x)
                self.bn, self.other = self.other, self.bn
                return one + super().forward(x * 2)

        model = Two(nn.Conv1d(4, 6, 2), normal(1, 6))
        model.other = normal(1, 6, eps=0.5)
        refuses(
            model, torch.randn(2, 4, 6), because="weight is also read by conv" if form is Pair else "is also read by"
        )

    @pytest.mark.parametrize("form", [Pair, Inlined])
    def test_bare_second_use(self, form: type[Pair]) -> None:
        """The peer's bare path gets the folded weights: #197539."""

        class Bare(form):  # type: ignore[valid-type,misc]
            def forward(self, x: Any) -> Any:
                return super().forward(x) + self.conv(x * 2)

        refuses(Bare(nn.Conv1d(4, 6, 2), normal(1, 6)), torch.randn(2, 4, 6), because="is also read by conv")

    def test_two_norms_in_a_row_take_two_runs(self) -> None:
        class Row(Pair):
            def forward(self, x: Any) -> Any:
                return self.other(self.bn(self.conv(x)))

        model = Row(nn.Conv1d(4, 6, 2), normal(1, 6))
        model.other = normal(1, 6, eps=0.5)
        x = torch.randn(2, 4, 6)
        folds(model, x, times=1, left={"nn.BatchNorm1d": 1}, again=1)
        with torch.no_grad():
            rewrites([fold_conv_bn, fold_conv_bn], traced(model, x), times=2, left=NONE_LEFT)

    def test_another_eps_is_another_norm(self) -> None:
        class Two(Inlined):
            def forward(self, x: Any) -> Any:
                conv, bn = self.conv, self.bn
                one, other = (F.conv1d(y, conv.weight) for y in (x, x * 2))
                first = F.batch_norm(one, bn.running_mean, bn.running_var, eps=1e-5)
                return first + F.batch_norm(other, bn.running_mean, bn.running_var, eps=1e-3)

        refuses(Two(nn.Conv1d(4, 6, 2), normal(1, 6)), torch.randn(2, 4, 6), because="is also read by")


class TestMustNotFire:
    X = torch.randn(2, 4, 6)

    def test_norm_in_training(self) -> None:
        """The peer's #141317."""
        model = Pair(nn.Conv1d(4, 6, 2), normal(1, 6))
        captured = traced(model, self.X)
        model.bn.train()
        assert fold_with_reasons(captured) == ["bn is in training"]

    def test_functional_norm_in_training(self) -> None:
        class Trains(Inlined):
            def forward(self, x: Any) -> Any:
                y = F.conv1d(x, self.conv.weight)
                return F.batch_norm(y, self.bn.running_mean, self.bn.running_var, training=True)

        assert fold_with_reasons(traced(Trains(nn.Conv1d(4, 6, 2), normal(1, 6)), self.X)) == [
            "batch_norm is in training"
        ]

    def test_convolution_in_training(self) -> None:
        model = Pair(nn.Conv1d(4, 6, 2), normal(1, 6))
        captured = traced(model, self.X)
        model.conv.train()
        assert fold_with_reasons(captured) == ["conv is in training"]

    def test_no_running_statistics(self) -> None:
        refuses(
            Pair(nn.Conv1d(4, 6, 2), normal(1, 6, track_running_stats=False)), self.X, because="no running statistics"
        )

    @pytest.mark.parametrize("form", [Pair, Inlined])
    def test_output_used_twice(self, form: type[Pair]) -> None:
        class Shared(form):  # type: ignore[valid-type,misc]
            def forward(self, x: Any) -> Any:
                y = F.conv1d(x, self.conv.weight) if form is Inlined else self.conv(x)
                bn = self.bn
                z = F.batch_norm(y, bn.running_mean, bn.running_var) if form is Inlined else bn(y)
                return z + y

        refuses(Shared(nn.Conv1d(4, 6, 2), normal(1, 6)), self.X, because="has 2 users")

    def test_gradients_enabled(self) -> None:
        captured = traced(Pair(nn.Conv1d(4, 6, 2), normal(1, 6)), self.X)
        keeps(fold_conv_bn, captured, because="bn runs with gradients enabled")

    def test_without_gradients_only_where_they_are_off(self) -> None:
        """Dynamo writes the switch into the graph."""
        assert fold_with_reasons(with_switch(traced(Pair(nn.Conv1d(4, 6, 2), normal(1, 6)), self.X)), grad=True) == []

    def test_parameters_that_are_inputs(self) -> None:
        """The only form that torch.compile gives: post-grad folding of constants has to do it."""
        with torch.no_grad():
            captured = capture(Pair(nn.Conv1d(4, 6, 2), normal(1, 6)), [self.X])
            keeps(fold_conv_bn, captured, because="is not a constant of the graph, but a value of op placeholder")

    def test_parameters_that_are_computed(self) -> None:
        class Computed(Inlined):
            def forward(self, x: Any) -> Any:
                y = F.conv1d(x, self.conv.weight * 2)
                return F.batch_norm(y, self.bn.running_mean, self.bn.running_var)

        refuses(Computed(nn.Conv1d(4, 6, 2), normal(1, 6)), self.X, because="is not a constant of the graph")

    @pytest.mark.parametrize("name", ["conv.weight", "bn.running_mean", "bn.weight"])
    def test_parameters_that_are_written(self, name: str) -> None:
        class Writes(Inlined):
            def forward(self, x: Any) -> Any:
                y = super().forward(x)
                owner, _, leaf = name.partition(".")
                getattr(getattr(self, owner), leaf).mul_(2)
                return y

        captured = traced(Writes(nn.Conv1d(4, 6, 2), normal(1, 6)), self.X)
        assert [reason for reason in fold_with_reasons(captured) if "is also read by mul_" in reason]

    def test_statistics_shared_with_a_norm_in_training(self) -> None:
        class Shares(Inlined):
            def forward(self, x: Any) -> Any:
                y = super().forward(x)
                return y + F.batch_norm(y, self.bn.running_mean, self.bn.running_var, training=True)

        reasons = fold_with_reasons(traced(Shares(nn.Conv1d(4, 6, 2), normal(1, 6)), self.X))
        assert reasons == ["bn_running_mean is also read by batch_norm_1"]

    def test_a_parameter_that_is_returned(self) -> None:
        class Returns(Inlined):
            def forward(self, x: Any) -> Any:
                return super().forward(x), self.bn.running_mean

        refuses(Returns(nn.Conv1d(4, 6, 2), normal(1, 6)), self.X, because="is also read by output")

    def test_tied_weights(self) -> None:
        """Two modules, one tensor: whoever reads the other one reads this one."""

        class Tied(Pair):
            def forward(self, x: Any) -> Any:
                return super().forward(x) + self.twin(x)

        model = Tied(nn.Conv1d(4, 6, 2), normal(1, 6))
        model.twin = nn.Conv1d(4, 6, 2)
        model.twin.weight = model.conv.weight
        refuses(model, self.X, because="conv.weight is also read by twin")

    def test_input_written_between(self) -> None:
        class Writes(Pair):
            def forward(self, x: Any) -> Any:
                y = self.conv(x)
                x.add_(1)
                return self.bn(y)

        refuses(
            Writes(nn.Conv1d(4, 6, 2), normal(1, 6)), self.X, because="x may be written by add_ between conv and bn"
        )

    def test_channels_that_are_not_second(self) -> None:
        """A convolution without a batch: the norm takes its rows for channels."""
        model = Pair(nn.Conv2d(4, 6, 1), normal(1, 6))
        refuses(model, torch.randn(4, 6, 5), because="the channels of conv are not its second dimension")

    @pytest.mark.parametrize("name", ["conv", "bn"])
    def test_hooks(self, name: str) -> None:
        model = Pair(nn.Conv1d(4, 6, 2), normal(1, 6))
        captured = traced(model, self.X)
        getattr(model, name).register_forward_hook(lambda *_: None)
        with torch.no_grad():
            assert fold_conv_bn(captured.module.graph) == 0

    def test_padding_that_a_function_does_not_know(self) -> None:
        refuses(Pair(nn.Conv1d(4, 6, 2, padding=1, padding_mode="reflect"), normal(1, 6)), self.X)

    def test_transposed_and_linear_stay(self) -> None:
        refuses(Pair(nn.ConvTranspose1d(4, 6, 2), normal(1, 6)), self.X)
        refuses(Pair(nn.Linear(6, 4), normal(1, 4)), self.X)

    def test_eps_that_is_no_number(self) -> None:
        class Varies(Inlined):
            def forward(self, x: Any, eps: Any) -> Any:
                y = F.conv1d(x, self.conv.weight)
                return F.batch_norm(y, self.bn.running_mean, self.bn.running_var, eps=eps.item())

        with torch.no_grad():
            tracer = torch.fx.Tracer()
            tracer.proxy_buffer_attributes = True
            model = Varies(nn.Conv1d(4, 6, 2), normal(1, 6))
            graph = torch.fx.GraphModule(model, tracer.trace(model)).graph
            assert fold_conv_bn(graph) == 0


def fold_with_reasons(captured: Captured, *, grad: bool = False) -> list[str]:
    """Why nothing was folded; nothing, if it was."""
    graph = captured.module.graph
    with torch.set_grad_enabled(grad), keep_ledger(graph, "fold_conv_bn") as ledger:
        fold_conv_bn(graph)
    return [decision.reason for decision in ledger.decisions if not decision.taken]


def with_switch(captured: Captured) -> Captured:
    """The graph with gradients switched off in front of its first call."""
    graph = captured.module.graph
    (conv,) = find(graph, "nn.Conv1d")
    with graph.inserting_before(conv):
        graph.call_function(torch._C._set_grad_enabled, (False,))
    return captured


def test_a_graph_without_a_module() -> None:
    graph = torch.fx.Graph()
    graph.output(graph.call_module("bn", (graph.call_module("conv", (graph.placeholder("x"),)),)))
    with torch.no_grad():
        assert fold_conv_bn(graph) == 0


def test_nothing_is_left_behind_by_a_refusal() -> None:
    class Writes(Pair):
        def forward(self, x: Any) -> Any:
            y = self.conv(x)
            x.add_(1)
            return self.bn(y)

    captured = traced(Writes(nn.Conv1d(4, 6, 2), normal(1, 6)), TestMustNotFire.X)
    assert fold_with_reasons(captured)
    assert folded_in(captured.module) == []


def test_a_fold_is_no_farther_from_the_truth_than_eager() -> None:
    """Sixty-four channels, in f32, against f64."""
    model = Pair(nn.Conv2d(16, 64, 3), normal(2, 64))
    x = torch.randn(2, 16, 8, 8)
    captured = traced(model, x)
    with torch.no_grad():
        truth, eager = copy.deepcopy(model).double()(x.double()), model(x)
        assert fold_conv_bn(captured.module.graph) == 1
        captured.module.recompile()
        assert torch.dist(captured.module(x), truth) <= 2 * torch.dist(eager, truth)
