"""Training: which gradients exist, hooks, functions of one's own, checkpoints, torch.func, optimisers, memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

from ferrite.failure import FerriteError
from tests.behaviour.compare import STRICT, assert_same, compare, equal


def compiled(function: Any, **keywords: Any) -> Any:
    return torch.compile(function, backend="ferrite", fullgraph=True, options=STRICT, **keywords)


@pytest.mark.parametrize("needs", ["x", "w", "b", "xw", "xwb"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_which_inputs_need_gradients(needs: str, dynamic: bool) -> None:
    def function(x: Tensor, w: Tensor, b: Tensor) -> Any:
        return F.linear(x, w, b).tanh(), x.detach() + 1, (x > 0)

    leaves = (torch.randn(3, 4), torch.randn(5, 4), torch.randn(5))
    compare(
        function,
        *(leaf.requires_grad_(name in needs) for name, leaf in zip("xwb", leaves, strict=True)),
        training=True,
        dynamic=dynamic,
    )


def test_result_without_gradient_among_results_with() -> None:
    compare(lambda x: (x * 2, x.argmax(), x.detach() * 3, 5), torch.randn(4, requires_grad=True), training=True)


def test_unused_input_has_no_gradient() -> None:
    compare(lambda x, y: x * 2, *(torch.randn(3, requires_grad=True) for _ in range(2)), training=True)


def test_backward_of_some_results_only() -> None:
    function = lambda x: (x.sin(), x.cos())
    x, twin = (torch.ones(3, requires_grad=True) for _ in range(2))
    compiled(function)(x)[1].sum().backward()
    function(twin)[1].sum().backward()
    assert equal(x.grad, twin.grad)


def test_gradients_accumulate() -> None:
    x, twin = (torch.full((3,), 0.5, requires_grad=True) for _ in range(2))
    function = compiled(lambda x: x.sin().exp())
    for _ in range(3):
        function(x).sum().backward()
        twin.sin().exp().sum().backward()
    assert equal(x.grad, twin.grad)


def test_backward_twice_with_retain_graph() -> None:
    """Saved activations are not given away: eager allows this, so do we."""
    x = torch.randn(4, requires_grad=True)
    y = compiled(lambda x: (x.sin() * x.exp()).sum())(x)
    y.backward(retain_graph=True)
    first = x.grad.clone()
    x.grad = None
    y.backward()
    assert equal(x.grad, first)


def test_retain_graph_after_a_plain_backward_of_another_call() -> None:
    x = torch.randn(4, requires_grad=True)
    function = compiled(lambda x: (x.sin() * x.exp()).sum())
    function(x).backward()
    y = function(x)
    y.backward(retain_graph=True)
    y.backward()
    assert torch.allclose(x.grad, 3 * (x.cos() * x.exp() + x.sin() * x.exp()).detach())


def test_backward_twice_without_retain_graph_raises_as_in_eager() -> None:
    x = torch.randn(4, requires_grad=True)
    y = compiled(lambda x: x.sin().sum())(x)
    y.backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


def test_donated_buffers_may_be_asked_for() -> None:
    x = torch.randn(4, requires_grad=True)
    options = STRICT | {"donate_buffers": True}
    function = torch.compile(lambda x: (x.sin() * x.exp()).sum(), backend="ferrite", options=options)
    function(x).backward()
    assert torch.allclose(x.grad, (x.cos() * x.exp() + x.sin() * x.exp()).detach())


def test_double_backward_is_refused_by_autograd() -> None:
    """AOTAutograd compiles one backward; asking for the gradient of it raises (aot_eager too), never a wrong answer."""
    x = torch.randn(3, requires_grad=True)
    (gradient,) = torch.autograd.grad(compiled(lambda x: x.sin().sum())(x), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        gradient.sum().backward()


class Clip(torch.autograd.Function):
    """Straight-through rounding: a gradient that no formula of the forward gives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, limit: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.limit = limit
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return torch.where(x.abs() < ctx.limit, grad, torch.zeros_like(grad)), None


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_function_of_ones_own(dynamic: bool) -> None:
    x = torch.randn(3, 4, requires_grad=True)
    compare(lambda x: Clip.apply(x * 2, 1.0) * x, x, training=True, dynamic=dynamic)


def test_hooks_on_tensors() -> None:
    seen: list[Tensor] = []
    x, twin = (torch.arange(3.0).requires_grad_() for _ in range(2))
    for leaf in (x, twin):
        leaf.register_hook(lambda grad: seen.append(grad.clone()) or grad * 10)
    compiled(lambda x: x.sin())(x).sum().backward()
    twin.sin().sum().backward()
    assert equal(x.grad, twin.grad)
    assert equal(seen[0], seen[1])


def test_hook_on_the_result() -> None:
    x = torch.arange(3.0).requires_grad_()
    y = compiled(lambda x: x.sin())(x)
    y.register_hook(lambda grad: grad * 3)
    y.sum().backward()
    assert equal(x.grad, 3 * x.detach().cos())


def test_hook_registered_inside_the_function() -> None:
    """Dynamo traces it only with compiled autograd; otherwise it breaks the graph. The gradient is eager's."""

    def function(x: Tensor) -> Tensor:
        y = x * 2
        y.register_hook(lambda grad: grad * 5)
        return y.sin()

    x, twin = (torch.arange(3.0).requires_grad_() for _ in range(2))
    torch.compile(function, backend="ferrite", options=STRICT)(x).sum().backward()
    function(twin).sum().backward()
    assert equal(x.grad, twin.grad)


def test_hooks_of_modules() -> None:
    calls: list[str] = []

    def build() -> torch.nn.Module:
        torch.manual_seed(1)
        module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU())
        module[0].register_forward_hook(lambda m, i, o: calls.append("forward") or o * 2)
        module[0].register_forward_pre_hook(lambda m, i: (i[0] + 1,))
        module.register_full_backward_hook(lambda m, gi, go: calls.append("backward") or None)
        return module

    module, twin = build(), build()
    x = torch.randn(2, 3)
    found = torch.compile(module, backend="ferrite", options=STRICT)(x)
    expected = twin(x)
    assert_same(found, expected, "result")
    found.sum().backward()
    expected.sum().backward()
    assert_same([p.grad for p in module.parameters()], [p.grad for p in twin.parameters()], "gradient")
    assert calls.count("backward") == 2


def layer(x: Tensor, w: Tensor) -> Tensor:
    return F.gelu(x @ w).softmax(-1)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpoint(reentrant: bool, dynamic: bool) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return checkpoint(layer, checkpoint(layer, x, w, use_reentrant=reentrant), w, use_reentrant=reentrant)

    compare(function, *(torch.randn(4, 4, requires_grad=True) for _ in range(2)), training=True, dynamic=dynamic)


def test_compiled_function_inside_an_eager_checkpoint() -> None:
    function = compiled(layer)
    x, w = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
    y = checkpoint(function, x, w, use_reentrant=False)
    y.square().sum().backward()
    expected = torch.autograd.grad(layer(x, w).square().sum(), (x, w))
    assert_same([x.grad, w.grad], list(expected), "gradient")


def test_saved_tensor_hooks() -> None:
    packed: list[int] = []
    x = torch.randn(4, requires_grad=True)
    function = compiled(lambda x: (x.sin() * x.exp()).sum())
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(1) or t, lambda t: t):
        y = function(x)
    y.backward()
    assert torch.allclose(x.grad, (x.cos() * x.exp() + x.sin() * x.exp()).detach())


LINEAR = torch.nn.Linear(3, 2, bias=False)
FUNC: dict[str, Callable[[Tensor], Any]] = {
    "grad": lambda x: torch.func.grad(lambda x: (x.sin() * x).sum())(x),
    "grad_of_grad": lambda x: torch.func.grad(torch.func.grad(lambda x: (x**3).sum()))(x.sum()),
    "vmap": lambda x: torch.func.vmap(lambda row: row.sin() @ row)(x),
    "vmap_of_grad": lambda x: torch.func.vmap(torch.func.grad(lambda row: (row**2).sum()))(x),
    "vjp": lambda x: torch.func.vjp(torch.sin, x)[1](torch.ones_like(x)),
    "jvp": lambda x: torch.func.jvp(torch.sin, (x,), (torch.ones_like(x),)),
    "jacrev": lambda x: torch.func.jacrev(lambda x: x.sin().sum(0))(x),
    "jacfwd": lambda x: torch.func.jacfwd(lambda x: x.sin().sum(0))(x),
    "hessian": lambda x: torch.func.hessian(lambda x: (x**3).sum())(x[0]),
    "functional_call": lambda x: torch.func.functional_call(LINEAR, {"weight": torch.ones(2, 3)}, (x,)),
}


@pytest.mark.parametrize("name", FUNC)
def test_function_transforms_inside(name: str) -> None:
    compare(FUNC[name], torch.randn(3, 3), exact=False)


@pytest.mark.parametrize("name", ["vmap", "vjp"])
def test_function_transforms_inside_while_training(name: str) -> None:
    compare(FUNC[name], torch.randn(3, 3, requires_grad=True), training=True, exact=False)


def test_autograd_grad_inside() -> None:
    """Dynamo breaks the graph at `torch.autograd.grad`; results are eager's."""

    def function(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad((x.sin() * x).sum(), x)
        return gradient + 1

    x = torch.randn(3)
    torch.testing.assert_close(torch.compile(function, backend="ferrite", options=STRICT)(x), function(x))


class Watched:
    """Weak references to tensors, noted by a custom op in the forward, read by another in the backward."""

    saved: list[Any] = []  # noqa: RUF012
    alive: list[bool] = []  # noqa: RUF012


@torch.library.custom_op("behaviour_autograd::watch", mutates_args=())
def watch(x: Tensor) -> Tensor:
    return x.clone()


@watch.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("behaviour_autograd::look", mutates_args=())
def look(grad: Tensor) -> Tensor:
    Watched.alive.extend(storage() is not None for storage in Watched.saved)
    return grad.clone()


@look.register_fake
def _(grad: Tensor) -> Tensor:
    return torch.empty_like(grad)


watch.register_autograd(lambda ctx, grad: look(grad))


def test_saved_activation_dies_in_the_middle_of_the_backward() -> None:
    """The list of arguments is emptied: after its last reader, nothing holds the activation."""
    x, y = torch.randn(1000, requires_grad=True), torch.randn(1000)
    run = compiled(lambda x, y: (watch(x).sin() * y).sum())
    run(x, y).backward()  # compiled by now
    Watched.saved.clear()
    Watched.alive.clear()
    z = run(x, y)
    node = z.grad_fn
    while node is not None and not hasattr(node, "saved_tensors"):
        node = node.next_functions[0][0]
    tensors = [tensor for tensor in node.saved_tensors if tensor is not x and tensor is not y]
    Watched.saved.extend(weakref.ref(tensor.untyped_storage()) for tensor in tensors)
    count = len(tensors)
    assert count > 0
    del tensors, node
    gc.collect()
    z.backward()
    assert Watched.alive == [False] * count


def test_memory_of_the_graph_is_released() -> None:
    x = torch.randn(10, requires_grad=True)
    function = compiled(lambda x: x.sin().exp())
    y = function(x)
    reference = weakref.ref(y)
    del y
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad"])
def test_compiled_optimiser_step(name: str) -> None:
    def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(3)
        module = torch.nn.Linear(4, 3)
        return module, getattr(torch.optim, name)(module.parameters(), lr=torch.tensor(0.1) if "Adam" in name else 0.1)

    (module, optimiser), (twin, plain) = build(), build()
    step = torch.compile(optimiser.step, backend="ferrite", options=STRICT)
    x = torch.randn(5, 4)
    for _ in range(3):
        for one, advance in ((module, step), (twin, plain.step)):
            one.zero_grad()
            one(x).square().sum().backward()
            advance()
    for found, expected in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(found, expected)


def test_whole_training_step_with_compiled_autograd() -> None:
    def build() -> torch.nn.Module:
        torch.manual_seed(2)
        return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))

    module, twin = build(), build()
    x = torch.randn(5, 4)

    def step(module: torch.nn.Module) -> None:
        module(x).square().mean().backward()

    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(lambda: step(module), backend="ferrite", options=STRICT)()
    step(twin)
    for found, expected in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)


def test_partitioner_of_ones_own() -> None:
    from torch._functorch.partitioners import default_partition

    class Plain:
        calls: list[dict[str, Any]] = []  # noqa: RUF012

        def __call__(self, joint: Any, inputs: Any, **facts: Any) -> Any:
            self.calls.append(facts)
            return default_partition(joint, inputs, **facts)

        def uuid(self) -> str:
            return "plain"

    partitioner = Plain()
    x = torch.randn(3, 3, requires_grad=True)
    compare(lambda x: (x @ x).relu().sum(), x, training=True, options={"partitioner": partitioner})
    assert len(partitioner.calls) == 1
    assert partitioner.calls[0]["num_fwd_outputs"] == 1


def test_unbacked_sizes_are_saved_for_the_backward() -> None:
    def function(x: Tensor) -> Tensor:
        y = x[x > 0]
        return (y.sin() * y.exp()).sum()

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compare(function, torch.randn(16, requires_grad=True), training=True)


def test_view_and_mutation_with_gradient() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        y = x * w
        y[:, 0] = y[:, 1] * 2
        y.t()[2].mul_(w[0, 0])
        return y

    compare(function, *(torch.randn(3, 3, requires_grad=True) for _ in range(2)), training=True, exact=False)


LEAVES: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: torch.randn(4, 6),
    "transposed": lambda: torch.randn(6, 4).t(),
    "repeated": lambda: torch.randn(6).as_strided((4, 6), (0, 1)),
}


@pytest.mark.parametrize("name", LEAVES)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_results_that_are_views_of_leaves(name: str, dynamic: bool) -> None:
    """Gradients come back through the same views: with their strides, and to each element its own."""
    function = lambda x: (x.reshape(x.shape), x.expand(3, *x.shape), x.t()[1:], x.sin().sum())
    leaf = LEAVES[name]()
    sides = []
    for call in (function, compiled(function, dynamic=dynamic)):
        x = leaf.as_strided(leaf.shape, leaf.stride()).detach().requires_grad_()
        results = call(x)
        weights = [torch.empty_like(r.detach()).copy_(torch.linspace(1, 2, r.numel()).view(r.shape)) for r in results]
        sides.append(
            [torch.autograd.grad(r, x, w, retain_graph=True)[0] for r, w in zip(results, weights, strict=True)]
        )
    for eager, ours in zip(*sides, strict=True):
        assert ours.stride() == eager.stride()
        torch.testing.assert_close(ours, eager)


def test_results_that_autograd_loses_are_left_to_eager() -> None:
    """AOTAutograd hands on a buffer in the place of the result, where a parameter is written to as well."""

    def made() -> nn.Module:
        torch.manual_seed(0)
        embedding = nn.Embedding(10, 6, max_norm=1.0)
        return nn.Sequential(embedding, spectral_norm(nn.Conv1d(12, 12, 5, bias=False)))

    tokens = torch.arange(24).reshape(2, 12) % 10
    with pytest.raises(FerriteError, match="other results than the function"):
        torch.compile(made(), backend="ferrite", options=STRICT)(tokens)
    torch._dynamo.reset()
    model, compiled = made(), made()
    run = torch.compile(compiled, backend="ferrite", options={"cache": "off"})
    for call in (lambda: model(tokens), lambda: run(tokens)):
        call().square().sum().backward()
    for one, other in zip(compiled.parameters(), model.parameters(), strict=True):
        assert equal(one, other)
        assert equal(one.grad, other.grad)
