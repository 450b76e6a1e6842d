"""Inputs that a function writes to, and results that share memory with inputs or with each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.behaviour.compare import compare, equal


def contiguous() -> Tensor:
    return torch.randn(4, 6)


def view() -> Tensor:
    return torch.randn(6, 4).t()


def offset() -> Tensor:
    return torch.randn(30)[5:29].view(4, 6)


def expanded() -> Tensor:
    return torch.randn(4, 1).expand(4, 6)


def overlapping() -> Tensor:
    return torch.randn(10).as_strided((4, 6), (1, 1))


def no_dimensions() -> Tensor:
    return torch.randn(())


def no_elements() -> Tensor:
    return torch.randn(0, 6)


def integers() -> Tensor:
    return torch.arange(24).view(4, 6)


KINDS = [contiguous, view, offset, no_dimensions, no_elements, integers]
SELF_OVERLAPPING = [expanded, overlapping]


def multiply(x: Tensor) -> None:
    x.mul_(2)


def write_then_read(x: Tensor) -> Tensor:
    before = x + 1
    x.add_(3)
    return before * x


def fill_part(x: Tensor) -> None:
    x[..., 1:].fill_(7) if x.dim() else x.fill_(7)


def twice_through_a_view(x: Tensor) -> Tensor:
    turned = x.t() if x.dim() == 2 else x
    turned.sub_(1)
    x.mul_(turned.sum())
    return turned.sum()


def copy_from_own_values(x: Tensor) -> None:
    x.copy_(x.flip(0) if x.dim() else x + 1)


MUTATIONS = [multiply, write_then_read, fill_part, twice_through_a_view, copy_from_own_values]


@pytest.mark.parametrize("returned", [False, True], ids=["not_returned", "returned"])
@pytest.mark.parametrize("mutate", MUTATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_mutation_of_an_input(kind: Callable[[], Tensor], mutate: Callable[[Tensor], Any], returned: bool) -> None:
    def function(x: Tensor) -> Any:
        result = mutate(x)
        return (result, x) if returned else result

    compare(function, kind())


def test_mutation_of_an_expanded_input_raises_as_in_eager() -> None:
    """Only where eager notices: what a write to other self-overlapping memory does is not defined there either."""
    for function in (multiply, torch.compile(multiply, backend="ferrite")):
        with pytest.raises(RuntimeError, match="single memory location"):
            function(expanded())


@pytest.mark.parametrize("kind", SELF_OVERLAPPING)
@pytest.mark.parametrize("returned", [False, True])
def test_reading_a_self_overlapping_input(kind: Callable[[], Tensor], returned: bool) -> None:
    def function(x: Tensor) -> Any:
        return (x * 2, x) if returned else x.sum(0)

    compare(function, kind())


@pytest.mark.parametrize("returned", [False, True], ids=["not_returned", "returned"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("kind", [contiguous, view, offset, no_dimensions, no_elements])
def test_mutation_of_a_non_leaf_while_training(kind: Callable[[], Tensor], dynamic: bool, returned: bool) -> None:
    def function(x: Tensor, w: Tensor) -> Any:
        before = x + 1
        x.add_(w)
        x.mul_(3)
        y = x * 2 + before
        return (y, x) if returned else y

    def prepare(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return x * 1, w * 1

    leaves = (kind().detach().requires_grad_(), torch.randn((), requires_grad=True))
    compare(function, *leaves, training=True, prepare=prepare, dynamic=dynamic)


def test_writing_a_tensor_that_autograd_saved() -> None:
    """Eager refuses the backward. AOTAutograd refuses while tracing, so we run eager, and the same error comes."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        x.mul_(w)
        y = x.sin()
        x.add_(1)
        return y

    leaf, w = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
    for run in (function, torch.compile(function, backend="ferrite")):
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
            run(leaf * 1, w).sum().backward()
        assert caught.type is RuntimeError


@pytest.mark.parametrize("kind", [contiguous, view, offset, no_dimensions])
def test_mutation_of_a_plain_input_while_training(kind: Callable[[], Tensor]) -> None:
    def function(state: Tensor, w: Tensor) -> Tensor:
        state.mul_(0.5).add_(w.detach())
        return (w * state).sum()

    compare(function, kind(), torch.randn((), requires_grad=True), training=True)


def test_mutation_of_a_leaf_that_needs_gradient_raises_as_in_eager() -> None:
    leaf = torch.randn(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf Variable"):
        multiply(leaf)
    with pytest.raises(RuntimeError, match="leaf Variable"):
        torch.compile(multiply, backend="ferrite", options={"strict": True})(leaf)


def test_mutation_of_a_parameter_without_grad() -> None:
    def function(w: Tensor, g: Tensor) -> None:
        with torch.no_grad():
            w.sub_(g, alpha=0.1)

    compare(function, torch.nn.Parameter(torch.randn(4)), torch.randn(4))


def test_one_input_is_a_view_of_another_and_is_written() -> None:
    def function(base: Tensor, part: Tensor) -> Tensor:
        part.mul_(3)
        return base + 1

    base = torch.randn(4, 6)
    compare(function, base, base[1:3])


def test_two_overlapping_slices_are_written() -> None:
    def function(left: Tensor, right: Tensor) -> Tensor:
        left.add_(1)
        right.mul_(2)
        left.sub_(3)
        return left.sum() + right.sum()

    base = torch.randn(10)
    compare(function, base[:6], base[4:])


def test_base_and_view_are_written_while_training() -> None:
    def function(base: Tensor, part: Tensor, w: Tensor) -> Tensor:
        part.mul_(w)
        return base.sin() * part.sum()

    def prepare(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        base = x * 1
        return base, base[1], w

    compare(
        function,
        torch.randn(3, 4, requires_grad=True),
        torch.randn(4, requires_grad=True),
        prepare=prepare,
        training=True,
    )


def test_the_same_tensor_twice_is_written_once() -> None:
    def function(a: Tensor, b: Tensor) -> Tensor:
        a.add_(1)
        return a + b

    x = torch.randn(4)
    compare(function, x, x)


VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda x: x,
    "twice": lambda x: (x, x),
    "transpose": lambda x: x.t(),
    "view": lambda x: x.view(-1),
    "slice": lambda x: x[1:, ::2],
    "expand": lambda x: x.unsqueeze(0).expand(3, 4, 6),
    "split": lambda x: x.split(2),
    "chunk_and_sum": lambda x: (x.chunk(2), x.sum()),
    "unbind": lambda x: x.unbind(1),
    "diagonal": lambda x: x.diagonal(),
    "as_strided": lambda x: x.as_strided((2, 2), (1, 2), 1),
    "detach": lambda x: x.detach(),
    "alias": lambda x: torch.ops.aten.alias(x),
    "real_dtype_view": lambda x: x.view(torch.int32),
    "view_as_complex": lambda x: torch.view_as_complex(x.view(4, 3, 2)),
    "view_and_compute": lambda x: (x.t(), x + 1, x[0]),
    "contiguous_is_itself": lambda x: x.contiguous(),
    "to_same_dtype_is_itself": lambda x: x.to(torch.float32),
    "reshape_may_view": lambda x: x.reshape(24),
    "flatten_of_transpose_copies": lambda x: x.t().flatten(),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", VIEWS)
def test_result_shares_memory_with_an_input(name: str, dynamic: bool) -> None:
    """A function that only makes views may be no graph at all to Dynamo; something is computed beside it."""

    def function(x: Tensor) -> Any:
        return VIEWS[name](x), x.sum()

    compare(function, torch.randn(4, 6), dynamic=dynamic)


@pytest.mark.parametrize("name", [n for n in VIEWS if n not in ("real_dtype_view", "detach")])
def test_result_shares_memory_with_an_input_while_training(name: str) -> None:
    """Gradients to one unit in the last place: autograd adds the tangent of an aliased input in another order."""

    def function(x: Tensor) -> Any:
        return VIEWS[name](x), (x * x).sum()

    def prepare(x: Tensor) -> tuple[Tensor]:
        return (x * 1,)

    compare(function, torch.randn(4, 6, requires_grad=True), prepare=prepare, training=True, exact=False)


@pytest.mark.parametrize(
    ("name", "training"),
    [*((name, False) for name in VIEWS), *((name, True) for name in VIEWS if "dtype_view" not in name)],
)
def test_results_share_memory_with_each_other(name: str, training: bool) -> None:
    def function(x: Tensor) -> Any:
        y = x.sin()
        return y, VIEWS[name](y)

    compare(function, torch.randn(4, 6, requires_grad=training), training=training)


def result_and_view(x: Tensor) -> tuple[Tensor, ...]:
    made = x == x
    view = made.squeeze()
    x.sub_(x)
    return view, made


def two_views(x: Tensor) -> tuple[Tensor, ...]:
    made = x * 2
    views = made.reshape(-1), made[..., :2]
    x.add_(1)
    return views


def one_view(x: Tensor) -> Tensor:
    view = x.exp()[..., :2]
    x.add_(1)
    return view


@pytest.mark.parametrize("function", [result_and_view, two_views, one_view])
def test_views_made_before_their_source_is_written(function: Callable[[Tensor], Any]) -> None:
    compare(function, torch.randn(3, 4))


def test_a_view_of_no_dimensions_made_before_its_source_is_written() -> None:
    compare(result_and_view, torch.tensor(-2))


def test_writing_to_a_result_that_is_a_view_reaches_the_input() -> None:
    def function(x: Tensor) -> Any:
        return x.t(), x.sum()

    compiled = torch.compile(function, backend="ferrite", options={"strict": True})
    x = torch.zeros(2, 3)
    rows, _ = compiled(x)
    rows[0, 0] = 5.0
    assert x[0, 0] == 5.0


def test_in_place_on_a_view_of_an_intermediate() -> None:
    def function(x: Tensor) -> Any:
        y = x * 2
        y[:, 1].fill_(9)
        part = y.t()
        part.add_(1)
        return y, part

    compare(function, torch.randn(4, 6))
    compare(function, torch.randn(4, 6, requires_grad=True), training=True)


def test_detached_view_is_written() -> None:
    def function(x: Tensor) -> Any:
        y = x * 2
        y.detach().zero_()
        return y

    compare(function, torch.randn(4, 6))


def transpose_in_place(x: Tensor) -> Tensor:
    y = x + 1
    x.transpose_(0, 1)
    return x * 2 + y.t()


def unsqueeze_and_write(x: Tensor) -> Tensor:
    x.unsqueeze_(0)
    x.mul_(2)
    return x + 1


def resize_an_intermediate(x: Tensor) -> Tensor:
    y = torch.empty(0)
    y.resize_(x.shape)
    y.copy_(x)
    return y.mul_(2)


@pytest.mark.parametrize("function", [transpose_in_place, unsqueeze_and_write, resize_an_intermediate])
def test_metadata_mutation(function: Callable[[Tensor], Tensor]) -> None:
    """Dynamo breaks the graph at these methods; sizes and values of the input are eager's afterwards."""
    compare(function, torch.randn(4, 6), fullgraph=False)


def test_metadata_mutation_of_an_intermediate() -> None:
    def function(x: Tensor) -> Tensor:
        y = x + 1
        y.t_()
        return y * 2

    compare(function, torch.randn(4, 6))


@pytest.mark.parametrize("returned", [False, True])
def test_out_argument(returned: bool) -> None:
    def function(x: Tensor, out: Tensor) -> Any:
        result = torch.add(x, 1, out=out)
        return result if returned else x.sum()

    compare(function, torch.randn(4, 6), torch.empty(4, 6))


def test_out_argument_of_wrong_size_behaves_as_in_eager() -> None:
    """Eager resizes (with a warning); Dynamo breaks the graph there, so the answer and the resize are eager's."""

    def function(x: Tensor, out: Tensor) -> Tensor:
        torch.add(x, 1, out=out)
        return x * 2

    found, expected = torch.empty(0), torch.empty(0)
    x = torch.randn(3)
    assert equal(torch.compile(function, backend="ferrite")(x, found), function(x, expected))
    assert equal(found, expected)


def test_set_of_an_input() -> None:
    """`set_` swaps the storage of an input; Ferrite or a graph break, the user sees what eager gives."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            x.set_(y)
        return x * 2

    a, b = torch.randn(3), torch.randn(5)
    c, d = a.clone(), b.clone()
    found = torch.compile(function, backend="ferrite")(a, b)
    assert equal(found, function(c, d))
    assert a.shape == c.shape
    assert a.data_ptr() == b.data_ptr()


def test_data_assignment() -> None:
    def function(x: Tensor) -> Tensor:
        x.data = x.data * 2
        return x + 1

    a = torch.randn(3)
    b = a.clone()
    assert equal(torch.compile(function, backend="ferrite")(a), function(b))
    assert equal(a, b)


class Statistics(torch.nn.Module):
    """Batch norm and a counter of its own: buffers that every call updates."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(6)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(6), persistent=True)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.copy_(torch.maximum(self.seen, x.detach().amax(0)))
        return self.norm(x) * self.seen


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("training", [False, True])
def test_buffers_are_updated(mode: str, training: bool) -> None:
    module = Statistics().train(mode == "train")
    compare(module, torch.randn(8, 6, requires_grad=training), training=training)


def test_buffers_after_many_calls() -> None:
    eager = Statistics()
    compiled_from = Statistics()
    compiled_from.load_state_dict(eager.state_dict())
    compiled = torch.compile(compiled_from, backend="ferrite", options={"strict": True})
    for step in range(5):
        x = torch.randn(8 + step, 6)
        assert equal(compiled(x), eager(x))
    for found, expected in zip(compiled_from.buffers(), eager.buffers(), strict=True):
        assert equal(found, expected)


def test_version_counter_of_a_written_input_moves() -> None:
    x = torch.randn(3)
    before = x._version
    torch.compile(multiply, backend="ferrite", options={"strict": True})(x)
    assert x._version > before


def test_autograd_notices_a_saved_tensor_that_a_compiled_function_writes() -> None:
    leaf = torch.randn(3, requires_grad=True)
    saved = leaf * 1
    y = saved.sin()
    torch.compile(multiply, backend="ferrite", options={"strict": True})(saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_repeated_and_constant_results() -> None:
    def function(x: Tensor) -> Any:
        y = x + 1
        return {"a": [y, y], "b": (x, None, 3, 2.5, "word", True), "c": y}

    compare(function, torch.randn(4))


def test_aliasing_changes_between_calls() -> None:
    """The same function with separate inputs, then with inputs that share memory."""

    def function(a: Tensor, b: Tensor) -> Tensor:
        a.add_(1)
        return a * b

    compiled = torch.compile(function, backend="ferrite", options={"strict": True})
    base, twin = torch.arange(6.0), torch.arange(6.0)
    other = torch.ones(3)
    assert equal(compiled(base[:3], other), function(twin[:3], other))
    assert equal(compiled(base[:4], base[2:]), function(twin[:4], twin[2:]))
    assert equal(compiled(base, base), function(twin, twin))
    assert equal(base, twin)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_repeated_result_before_its_source_changes(dynamic: bool) -> None:
    """What is kept is what was computed, not each of its copies."""

    def function(x: Tensor) -> Any:
        repeated = (x | 4).expand(3, *x.shape)
        windows = (x | 2).unfold(0, 2, 1)
        x.index_fill_(0, torch.zeros(1, dtype=torch.int64), 1)
        return repeated, windows

    compare(function, torch.arange(7), dynamic=dynamic)


@pytest.mark.parametrize("second", ["squeeze", "diagonal", "unfold", "split"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_results_with_one_memory_have_one_base(second: str, dynamic: bool) -> None:
    """The next graph writes to one of them, for which AOTAutograd wants either the same base in all, or none."""
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "squeeze": lambda a: a.squeeze(),
        "diagonal": lambda a: a.diagonal(),
        "unfold": lambda a: a.unfold(0, 2, 1),
        "split": lambda a: a.split(1)[1],
    }

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        first = (x + 1)[0:2]
        return first, ways[second](first)

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        first, other = both(x)
        torch._dynamo.graph_break()
        first[0] = 2
        other.add_(1)
        return first, other

    compare(function, torch.randn(3, 3), dynamic=dynamic, fullgraph=False)
    # Not one of the two: PyTorch cannot trace two inputs of unknown sizes if one is the base of the other.
    first, other = torch.compile(both, backend="ferrite", dynamic=dynamic)(torch.randn(3, 3))
    assert first._base is not None
    assert first._base is other._base
