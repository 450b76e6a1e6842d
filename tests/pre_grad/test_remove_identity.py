"""PRE-09: a call of nn.Identity is its input, under every name and however it is called."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ferrite.graph.arguments import find
from ferrite.graph.pre_grad.fold_conv_bn import fold_conv_bn
from ferrite.graph.pre_grad.remove_identity import remove_identity
from tests.pre_grad.harness import capture, keeps, rewrites, trace

torch.manual_seed(0)
X = torch.randn(2, 3)


class Model(nn.Module):
    """Calls an Identity by position, by name, below another module, and one instance under two names."""

    def __init__(self, identity: nn.Module) -> None:
        super().__init__()
        self.skip = identity
        self.same = identity
        self.inner = nn.Sequential(nn.Identity(), nn.ReLU(), nn.Identity())

    def forward(self, x: Any) -> Any:
        return self.same(input=self.skip(x)).sin() + self.inner(x)


class Subclass(nn.Identity):
    def forward(self, input: Any) -> Any:
        return input * 2


class Only(nn.Module):
    def __init__(self, identity: nn.Module) -> None:
        super().__init__()
        self.skip = identity

    def forward(self, x: Any) -> Any:
        return self.skip(x)


def test_shared_keyword_and_nested_calls_all_go() -> None:
    """The peer crashed on the keyword (#195569) and left one of two names behind (#195568)."""
    captured = trace(Model(nn.Identity()), [X])
    captured.module.same = captured.module.skip  # torch.fx knows only the first name
    _, second, *_ = find(captured.module.graph, "nn.Identity")
    second.target = "same"
    rewrites(remove_identity, captured, times=4, left={"nn.Identity": 0}, exact=True)


def test_without_fake_values() -> None:
    """A graph straight from torch.fx has none, and none is needed."""
    module = torch.fx.symbolic_trace(Model(nn.Identity()))
    expected = module(X)
    assert remove_identity(module.graph) == 4
    module.graph.lint()
    module.recompile()
    assert torch.equal(module(X), expected)


def test_the_result_is_the_input_itself() -> None:
    rewrites(remove_identity, trace(Only(nn.Identity(54, unused=True)), [X]), times=1, exact=True)


def test_in_training_too() -> None:
    captured = trace(Model(nn.Identity()).train(), [X.clone().requires_grad_()])
    rewrites(remove_identity, captured, times=4, left={"nn.Identity": 0}, exact=True)


def test_a_value_that_is_written_afterwards() -> None:
    class Writes(Only):
        def forward(self, x: Any) -> Any:
            y = self.skip(x)
            y.add_(1)
            return x * 2

    rewrites(remove_identity, trace(Writes(nn.Identity()), [X]), times=1, left={"nn.Identity": 0}, exact=True)


def test_subclass_stays() -> None:
    class Leaf(torch.fx.Tracer):
        def is_leaf_module(self, m: nn.Module, path: str) -> bool:
            return True

    model = Only(Subclass())
    module = torch.fx.GraphModule(model, Leaf().trace(model))
    assert [node.op for node in module.graph.nodes] == ["placeholder", "call_module", "output"]
    assert remove_identity(module.graph) == 0


def test_hooks_stay() -> None:
    for register in ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"):
        identity = nn.Identity()
        captured = trace(Only(identity), [X])
        getattr(identity, register)(lambda *_: None)
        keeps(remove_identity, captured, because="skip has hooks")


def test_global_hooks_stay() -> None:
    captured = trace(Only(nn.Identity()), [X])
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        keeps(remove_identity, captured, because="skip has hooks")
    finally:
        handle.remove()


def test_a_forward_of_its_own_stays() -> None:
    identity = nn.Identity()
    captured = trace(Only(identity), [X])
    identity.forward = lambda input: input * 2  # type: ignore[method-assign]
    assert remove_identity(captured.module.graph) == 0


def test_dynamo_leaves_none() -> None:
    assert capture(Model(nn.Identity()), [X]).module.graph.find_nodes(op="call_module") == []


def test_it_brings_conv_and_bn_together() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.drop, self.bn = nn.Conv1d(3, 4, 1), nn.Identity(), nn.BatchNorm1d(4)

        def forward(self, x: Any) -> Any:
            return self.bn(self.drop(self.conv(x)))

    with torch.no_grad():
        captured = trace(Block().eval(), [torch.randn(2, 3, 5)])
        keeps(fold_conv_bn, captured)
        rewrites([remove_identity, fold_conv_bn], captured, times=2, left={"nn.Identity": 0, "nn.BatchNorm1d": 0})
