"""One compiled function serves many sizes, sizes that only the data knows included."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from tests.behaviour.compare import STRICT, assert_same, compare, equal

SIZES = (7, 2, 5, 13, 3)


@pytest.fixture
def data_dependent() -> Iterator[None]:
    """Capture `item()` and data-dependent sizes into the graph instead of breaking it."""
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        yield


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "pointwise": lambda x: x.sin() * x.shape[0],
    "reduce": lambda x: x.sum() / x.numel() + x.amax(-1).sum(),
    "view": lambda x: x.view(-1) + 1,
    "reshape_transpose": lambda x: x.t().reshape(-1),
    "matmul": lambda x: x @ x.t(),
    "cat": lambda x: torch.cat([x, x[:1], torch.zeros(x.shape[0], x.shape[1])]),
    "size_outputs": lambda x: (x + 1, x.shape[0], x.shape[0] * 2 + 1, x.stride(0)),
    "arange": lambda x: torch.arange(x.shape[0]) + x.shape[1],
    "expand": lambda x: x.unsqueeze(0).expand(x.shape[0], -1, -1).sum(1),
    "split_half": lambda x: x.split(x.shape[0] // 2 + 1),
    "pad": lambda x: torch.nn.functional.pad(x, (1, x.shape[0])),
    "float_size": lambda x: x * (x.shape[0] / 3) + x.shape[0] ** 0.5,
    "softmax": lambda x: torch.softmax(x, 0),
    "interpolate": lambda x: torch.nn.functional.interpolate(x[None, None], scale_factor=1.5),
    "slice": lambda x: x[1 : x.shape[0] - 1, ::2],
    "max_of_sizes": lambda x: torch.zeros(max(x.shape[0], x.shape[1])) + x.abs().sum(),
}


def graphs_needed(function: Callable[..., Any], calls: list[tuple[Any, ...]], backend: str = "aot_eager") -> int:
    """How many graphs these calls compile; with `aot_eager`, what Dynamo and AOTAutograd ask for by themselves."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(function, backend=counter, dynamic=True, fullgraph=True)
    for arguments in calls:
        assert_same(compiled(*arguments), function(*arguments), f"{backend} {arguments}")
    return counter.frame_count


@pytest.mark.parametrize("name", FUNCTIONS)
def test_sizes_through_one_compile(name: str) -> None:
    """Ferrite adds no guard: it compiles as many graphs as tracing alone needs, one for most functions."""
    calls = [(torch.randn(size, size + 1),) for size in SIZES]
    needed = graphs_needed(FUNCTIONS[name], calls)
    assert graphs_needed(FUNCTIONS[name], calls, "ferrite") == needed
    assert needed == 1 or name in ("split_half", "slice", "max_of_sizes", "interpolate", "pad")


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("size", [0, 1])
def test_sizes_zero_and_one_afterwards(name: str, size: int) -> None:
    compiled = torch.compile(FUNCTIONS[name], backend="ferrite", dynamic=True, fullgraph=True, options=STRICT)
    compiled(torch.randn(4, 5))
    x = torch.randn(size, 5)
    expected = error = None
    try:
        expected = FUNCTIONS[name](x)
    except Exception as raised:
        error = raised
    if error is None:
        assert_same(compiled(x), expected, "result")
    else:
        with pytest.raises(type(error)):
            compiled(x)


@pytest.mark.parametrize("name", [n for n in FUNCTIONS if n != "arange"])
def test_sizes_while_training(name: str) -> None:
    compare(FUNCTIONS[name], torch.randn(7, 5, requires_grad=True), dynamic=True, training=True)


def test_one_backward_for_all_sizes() -> None:
    counter = CompileCounterWithBackend("ferrite")
    module = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.LayerNorm(6), torch.nn.GELU())
    compiled = torch.compile(module, backend=counter, dynamic=True)
    for size in SIZES:
        x = torch.randn(size, 6)
        gradients = []
        for function in (compiled, module):
            module.zero_grad()
            function(x).sum().backward()
            gradients.append([p.grad.clone() for p in module.parameters()])
        assert_same(gradients[0], gradients[1], f"size {size}")
    assert counter.frame_count == 2  # before there were gradients on the parameters, and after


def test_sizes_become_dynamic_by_themselves() -> None:
    counter = CompileCounterWithBackend("ferrite")
    compiled = torch.compile(FUNCTIONS["view"], backend=counter)
    for size in (4, 5, 6, 17, 101):
        x = torch.randn(size, 3)
        assert equal(compiled(x), FUNCTIONS["view"](x))
    assert counter.frame_count == 2


def test_mark_dynamic() -> None:
    counter = CompileCounterWithBackend("ferrite")
    compiled = torch.compile(FUNCTIONS["reduce"], backend=counter, fullgraph=True)
    first = torch.randn(5, 3)
    torch._dynamo.mark_dynamic(first, 0)
    compiled(first)
    for size in (2, 9, 100):
        x = torch.randn(size, 3)
        assert equal(compiled(x), FUNCTIONS["reduce"](x))
    assert counter.frame_count == 1


def test_mark_unbacked_serves_zero_and_one() -> None:
    counter = CompileCounterWithBackend("ferrite")
    compiled = torch.compile(lambda x: x.sin() * 2, backend=counter, fullgraph=True)
    first = torch.randn(5, 3)
    torch._dynamo.decorators.mark_unbacked(first, 0)
    compiled(first)
    for size in (0, 1, 2, 9):
        x = torch.randn(size, 3)
        torch._dynamo.decorators.mark_unbacked(x, 0)
        assert_same(compiled(x), x.sin() * 2, f"size {size}")
    assert counter.frame_count == 1


def test_a_constraint_that_compiling_would_break_is_refused_as_ever() -> None:
    """Nothing in Ferrite specialises a dimension silently, and a user's specialisation is reported by Dynamo."""

    def function(x: Tensor) -> Tensor:
        return x + 1 if x.shape[0] == 5 else x

    x = torch.randn(5, 3)
    torch._dynamo.mark_dynamic(x, 0)
    with pytest.raises(torch.fx.experimental.symbolic_shapes.ConstraintViolationError, match="mark_dynamic"):
        torch.compile(function, backend="ferrite", options=STRICT)(x)


def test_integer_and_float_arguments() -> None:
    def function(x: Tensor, n: int, scale: float, flag: bool) -> Any:
        y = x * scale + n
        return (y.repeat(n, 1) if flag else y), n + 1, scale * 2

    x = torch.randn(3, 2)
    numbers = ((2, 0.5), (3, 1.5), (4, -2.25), (5, 1e300), (2, float("inf")), (3, 0.0))
    calls = [(x, n, scale, True) for n, scale in numbers]
    assert graphs_needed(function, calls, "ferrite") == graphs_needed(function, calls)


def test_only_sizes_are_returned() -> None:
    def function(x: Tensor) -> Any:
        return x.shape[0] + 1, x.sum()

    compare(function, torch.randn(4, 3), dynamic=True)


# Sizes that only the data knows.

DATA: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Tensor, ...]]]] = {}


def data(*make: Callable[[], Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        DATA[function.__name__] = (function, lambda: tuple(one() for one in make))
        return function

    return enter


def signs() -> Tensor:
    return torch.tensor([1.0, -2.0, 3.0, 0.0, 5.0, -6.0])


def three() -> Tensor:
    return torch.tensor(3)


@data(signs)
def nonzero(x: Tensor) -> Any:
    return x.nonzero() * 2


@data(signs)
def nonzero_as_tuple(x: Tensor) -> Any:
    return x[torch.nonzero(x, as_tuple=True)]


@data(signs)
def masked_select(x: Tensor) -> Any:
    y = x.masked_select(x > 0)
    return y * 2, y.sum(), y.shape[0]


@data(signs)
def boolean_index(x: Tensor) -> Any:
    return x[x > 0].exp()


@data(signs)
def unique(x: Tensor) -> Any:
    values, inverse, counts = torch.unique(x.round(), return_inverse=True, return_counts=True)
    return values + 1, inverse, counts


@data(signs)
def unique_consecutive(x: Tensor) -> Any:
    return torch.unique_consecutive((x > 0).long())


@data(signs, three)
def item_as_size(x: Tensor, n: Tensor) -> Any:
    count = n.item()
    torch._check(count >= 0)
    torch._check(count <= x.shape[0])
    return torch.ones(count) * 2, x[:count]


@data(signs, three)
def item_as_factor(x: Tensor, n: Tensor) -> Any:
    return x * n.item() + n.item()


@data(signs, lambda: torch.tensor(2.5))
def float_item(x: Tensor, n: Tensor) -> Any:
    return x * n.item()


@data(signs, lambda: torch.tensor(float("inf")))
def infinite_item(x: Tensor, n: Tensor) -> Any:
    return x + n.item()


@data(signs, lambda: torch.tensor(True))
def bool_item(x: Tensor, flag: Tensor) -> Any:
    return x + flag.item(), flag.item()


@data(signs, lambda: torch.tensor([1, 2, 3]))
def split_sizes(x: Tensor, sizes: Tensor) -> Any:
    parts = sizes.tolist()
    for part in parts:
        torch._check(part >= 0)
    return [part * 2 for part in x.split(parts)]


@data(lambda: torch.randn(3, 2), lambda: torch.tensor([1, 0, 2]))
def repeat_interleave(x: Tensor, counts: Tensor) -> Any:
    return torch.repeat_interleave(x, counts, dim=0) + 1


@data(signs)
def cat_with_unknown_size(x: Tensor) -> Any:
    y = x[x > 0]
    return torch.cat([y, x, y]) + 1


@data(signs)
def empty_result(x: Tensor) -> Any:
    y = x[x > 100]
    return y * 2, y.sum(), y.shape[0]


@data(three, three)
def equal_unknowns(a: Tensor, b: Tensor) -> Any:
    u, v = a.item(), b.item()
    torch._check(u >= 2)
    torch._check(u == v)
    return torch.ones(u) + torch.zeros(v)


@data(signs)
def bincount(x: Tensor) -> Any:
    return torch.bincount((x > 0).long()) + 1


@pytest.mark.usefixtures("data_dependent")
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", DATA)
def test_data_dependent_sizes(name: str, dynamic: bool) -> None:
    function, make = DATA[name]
    compare(function, *make(), dynamic=dynamic)


TRAINED = ("masked_select", "boolean_index", "item_as_size", "item_as_factor", "float_item", "split_sizes")


@pytest.mark.usefixtures("data_dependent")
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", [*TRAINED, "cat_with_unknown_size", "repeat_interleave", "empty_result"])
def test_data_dependent_sizes_while_training(name: str, dynamic: bool) -> None:
    function, make = DATA[name]
    x, *rest = make()
    compare(function, x.requires_grad_(), *rest, dynamic=dynamic, training=True)


@pytest.mark.usefixtures("data_dependent")
def test_unknown_size_changes_between_calls_without_recompile() -> None:
    counter = CompileCounterWithBackend("ferrite")
    function, _ = DATA["boolean_index"]
    compiled = torch.compile(function, backend=counter, fullgraph=True)
    for threshold in (-100.0, 0.0, 100.0, 5.5):
        x = signs() - threshold
        assert_same(compiled(x), function(x), f"threshold {threshold}")
    assert counter.frame_count == 1


class Noted(list[Any]):
    """What a custom op was called with, to see whether it ran at all."""


NOTED = Noted()


@torch.library.custom_op("behaviour_shapes::note", mutates_args=())
def note(x: Tensor) -> Tensor:
    NOTED.append(tuple(x.shape))
    return x.clone()


@note.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@pytest.mark.usefixtures("data_dependent")
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_violated_check_raises_its_message_before_dependent_work(training: bool, dynamic: bool) -> None:
    def function(x: Tensor, n: Tensor) -> Tensor:
        count = n.item()
        torch._check(count > 1, lambda: "count has to be more than one")
        torch._check(count < 10, lambda: "count has to be less than ten")
        y = note(torch.ones(count).detach())
        return x.sum() * y.sum()

    compiled = torch.compile(function, backend="ferrite", fullgraph=True, dynamic=dynamic, options=STRICT)
    x = torch.randn(3, requires_grad=training)
    assert equal(compiled(x, torch.tensor(4)), function(x, torch.tensor(4)))
    for wrong, words in ((1, "more than one"), (0, "more than one"), (10, "less than ten")):
        NOTED.clear()
        with pytest.raises(RuntimeError, match=words):
            compiled(x, torch.tensor(wrong))
        assert NOTED == [], "work that depends on the check ran before it"


@pytest.mark.usefixtures("data_dependent")
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_a_violated_size_assumption_raises(training: bool) -> None:
    """Eager's broadcast would fail; here the assumption made while tracing is what fails, also with a RuntimeError."""

    def function(x: Tensor, n: Tensor) -> Tensor:
        count = n.item()
        torch._check(count == x.shape[0])
        return x + torch.ones(count)

    compiled = torch.compile(function, backend="ferrite", fullgraph=True, dynamic=True, options=STRICT)
    x = torch.randn(5, requires_grad=training)
    assert equal(compiled(x, torch.tensor(5)), x + 1)
    with pytest.raises(RuntimeError):
        compiled(x, torch.tensor(4))


@pytest.mark.usefixtures("data_dependent")
def test_negative_size_raises() -> None:
    compiled = torch.compile(lambda n: torch.ones(n.item()), backend="ferrite", fullgraph=True, options=STRICT)
    assert compiled(torch.tensor(2)).shape == (2,)
    with pytest.raises(RuntimeError):
        compiled(torch.tensor(-1))


@pytest.mark.usefixtures("data_dependent")
def test_runtime_asserts_may_be_switched_off() -> None:
    options = STRICT | {"runtime_asserts": False}
    compare(DATA["item_as_size"][0], *DATA["item_as_size"][1](), options=options)


@pytest.mark.usefixtures("data_dependent")
def test_a_satisfied_check_costs_no_recompile() -> None:
    function, _ = DATA["item_as_size"]
    calls = [(signs(), torch.tensor(n)) for n in (2, 3, 4, 5)]
    assert graphs_needed(function, calls, "ferrite") == graphs_needed(function, calls) == 1


@pytest.mark.usefixtures("data_dependent")
def test_index_that_eager_refuses_is_refused() -> None:
    def function(x: Tensor, n: Tensor) -> Tensor:
        return x.select(0, n.item())

    compiled = torch.compile(function, backend="ferrite", fullgraph=True, options=STRICT)
    assert equal(compiled(signs(), torch.tensor(2)), signs()[2])
    with pytest.raises((IndexError, RuntimeError)):
        compiled(signs(), torch.tensor(6))


def test_a_computed_size_of_one_is_stretched() -> None:
    """The halves of 3 are 2 and 1."""
    function = lambda x: torch.mul(*x.chunk(2, 1))
    compiled = torch.compile(function, backend="ferrite", dynamic=True, options=STRICT)
    for n in (3, 4, 8, 3):
        x = torch.randn(2, n)
        assert equal(compiled(x), function(x))


def test_numbers_as_sizes_of_a_tensor_without_elements() -> None:
    """Tracing never asks whether the other size is negative; eager's op does."""

    def function(x: Tensor, size: list[int], stride: list[int]) -> Tensor:
        part = x.as_strided(size, stride)
        return x * part.view(-1).sum() + (part * 2).sum()

    compare(function, torch.randn(3), [0, 3], [3, 1], dynamic=True)
