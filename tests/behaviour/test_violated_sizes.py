"""Sizes that only a run knows, and what a program assumes of them: if a call finds others, it raises as eager does.

Each program is called with data that satisfies it, with data that does not, and with the first again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.behaviour.compare import STRICT, assert_same


@pytest.fixture(autouse=True)
def data_dependent() -> Iterator[None]:
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        yield


@torch.library.custom_op("ferrite_tests::positive", mutates_args=())
def positive(x: Tensor) -> Tensor:
    return x[x > 0]


@positive.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(torch.library.get_ctx().new_dynamic_size())


def keep_mask(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0] > 0)


def scatter(ctx: Any, gradient: Tensor) -> Tensor:
    (mask,) = ctx.saved_tensors
    return gradient.new_zeros(mask.shape).masked_scatter(mask, gradient)


positive.register_autograd(scatter, setup_context=keep_mask)


@torch.library.custom_op("ferrite_tests::signs_apart", mutates_args=())
def signs_apart(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[x > 0], x[x <= 0]


@signs_apart.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    new = torch.library.get_ctx().new_dynamic_size
    return x.new_empty(new()), x.new_empty(new())


@torch.library.custom_op("ferrite_tests::listed_apart", mutates_args=())
def listed_apart(x: Tensor) -> list[Tensor]:
    return [x[x <= 0], x[x > 0]]


@listed_apart.register_fake
def _(x: Tensor) -> list[Tensor]:
    new = torch.library.get_ctx().new_dynamic_size
    return [x.new_empty(new()), x.new_empty(new())]


def check(condition: Any) -> None:
    torch._check(condition)


def select(x: Tensor) -> Tensor:
    return torch.masked_select(x, x > 0)


def count(x: Tensor) -> Any:
    return (x > 0).sum().item()


def masked_select_in_a_view(x: Tensor) -> Tensor:
    return select(x).view(2, 2) * 3


def masked_select_in_a_view_of_halves(x: Tensor) -> Tensor:
    return select(x).view(-1, 2).sum(1).sin()


def masked_select_is_broadcast(x: Tensor) -> Tensor:
    return (select(x) * torch.arange(4.0)).cos()


def masked_select_is_multiplied(x: Tensor) -> Tensor:
    return torch.mm(select(x).view(2, 2), torch.ones(2, 3)) + 1


def twice_the_size(x: Tensor) -> Tensor:
    y = select(x)
    check(2 * y.size(0) == 8)
    return y.exp() + 1


def divisible_size(x: Tensor) -> Tensor:
    y = select(x)
    check(y.size(0) % 4 == 0)
    return y.sin() * torch.ones(y.size(0))


def sizes_of_two(x: Tensor) -> Tensor:
    y, z = select(x), select(x - 3)
    check(y.size(0) == 2 * z.size(0))
    return y.view(2, -1) * z.view(1, -1)


def boolean_index(x: Tensor) -> Tensor:
    y = x[x > 0]
    check(y.size(0) == 4)
    return y * torch.ones(4)


def nonzero(x: Tensor) -> Tensor:
    y = x.clamp(min=0).nonzero()
    check(y.size(0) == 4)
    return y + 1


def nonzero_index(x: Tensor) -> Tensor:
    (y,) = torch.nonzero(x > 0, as_tuple=True)
    return x[y].view(2, 2).tanh()


def unique(x: Tensor) -> Tensor:
    y = torch.unique(x.detach().clamp(min=0))
    check(y.size(0) == 5)
    return y + torch.ones(5)


def custom_op(x: Tensor) -> Tensor:
    y = positive(x)
    check(y.size(0) == 4)
    return y.sin() * torch.arange(4.0)


def tuple_of_custom_op(x: Tensor) -> Tensor:
    y, z = signs_apart(x.detach())
    check(y.size(0) == 4)
    return y.sin().sum() + z.sum() + torch.ones(4)


def tuple_in_a_view(x: Tensor) -> Tensor:
    y, _ = signs_apart(x.detach())
    return y.view(2, 2) + 1


def list_in_a_view(x: Tensor) -> Tensor:
    return listed_apart(x.detach())[1].view(2, 2) + 1


def item_is_divisible(x: Tensor) -> Tensor:
    n = count(x)
    check(n % 4 == 0)
    return torch.ones(n) * x.sum()


def item_is_a_number(x: Tensor) -> Tensor:
    n = count(x)
    check(n == 4)
    return torch.ones(n) * x.sum()


def items_flag(x: Tensor) -> Tensor:
    flag = ((x > 0).sum() == 4).item()
    check(flag)
    return x * 2


def item_in_a_cat(x: Tensor) -> Tensor:
    n = count(x)
    check(n >= 0)
    return torch.cat([x, torch.ones(n)]) * torch.full((10,), 2.0)


def in_a_branch(x: Tensor) -> Tensor:
    def yes(x: Tensor) -> Tensor:
        return (select(x).view(2, 2) + 1).sum()

    def no(x: Tensor) -> Tensor:
        return x.sum()

    return torch.cond(x.sum() > -100, yes, no, (x,))


def unbacked_input(x: Tensor) -> Tensor:
    check(x.size(0) % 3 == 0)
    return x.view(-1, 3).sin()


PROGRAMS: tuple[Callable[[Tensor], Tensor], ...] = (
    masked_select_in_a_view, masked_select_in_a_view_of_halves, masked_select_is_broadcast,
    masked_select_is_multiplied, twice_the_size, divisible_size, sizes_of_two, boolean_index, nonzero, nonzero_index,
    unique, custom_op, tuple_of_custom_op, tuple_in_a_view, list_in_a_view, item_is_divisible, item_is_a_number,
    items_flag, item_in_a_cat, in_a_branch, unbacked_input,
)  # fmt: skip

GOOD, BAD = (1.0, 2.0, -5.0, 4.0, -1.0, 6.0), (1.0, 2.0, -5.0, -4.0, -1.0, 6.0)
SHORT = (1.0, 2.0, 3.0, 4.0)  # where the size of the input itself is not known


@pytest.mark.parametrize(
    ("dynamic", "training", "host"),
    [(False, False, "native"), (False, True, "python"), (True, False, "python"), (True, True, "native")],
    ids=lambda value: str(value),
)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_size_that_breaks_what_was_assumed_raises(
    program: Callable[[Tensor], Tensor], dynamic: bool, training: bool, host: str
) -> None:
    takes_any_size = program is unbacked_input

    def run(function: Callable[[Tensor], Tensor], data: tuple[float, ...]) -> Any:
        x = torch.tensor(data, requires_grad=training)
        if takes_any_size:
            torch._dynamo.decorators.mark_unbacked(x, 0)
        made = function(x)
        if training and made.requires_grad:
            made.sum().backward()
        return made.detach(), x.grad

    bad = SHORT if takes_any_size else BAD
    with pytest.raises(RuntimeError):
        run(program, bad)
    compiled = torch.compile(
        program, backend="ferrite", fullgraph=True, dynamic=None if takes_any_size else dynamic,
        options=STRICT | {"host": host},
    )  # fmt: skip
    assert_same(run(compiled, GOOD), run(program, GOOD), "before")
    for _ in range(2):
        with pytest.raises(RuntimeError):
            run(compiled, bad)
    assert_same(run(compiled, GOOD), run(program, GOOD), "after")


def test_a_size_that_is_found_twice_is_one_for_each() -> None:
    """Partitioning shares equal nodes, of which each defines a size of its own."""

    def function(x: Tensor) -> Any:
        y = torch.cat([x, torch.ones(count(x.detach()))])
        z = torch.cat([x, torch.ones(count(x.detach()))])
        return y, z.view(2, -1).sum(1) * 2

    compiled = torch.compile(function, backend="ferrite", fullgraph=True, options=STRICT)
    x = torch.tensor(GOOD, requires_grad=True)
    assert_same(compiled(x), function(x), "results")
    assert_same(
        torch.autograd.grad(sum(each.sum() for each in compiled(x)), x),
        torch.autograd.grad(sum(each.sum() for each in function(x)), x),
        "gradients",
    )
    with pytest.raises(RuntimeError):
        compiled(torch.tensor(BAD, requires_grad=True))


def test_the_graphs_own_message_is_what_is_said() -> None:
    compiled = torch.compile(nonzero, backend="ferrite", fullgraph=True, options=STRICT)
    compiled(torch.tensor(GOOD))
    with pytest.raises(RuntimeError, match=r"Runtime assertion failed for expression Eq\(u0, 4\) on node"):
        compiled(torch.tensor(BAD))


def test_an_assert_of_two_sizes_stands_behind_both() -> None:
    """The one that is read by a check of the program's own is measured there, which may be later."""

    def function(x: Tensor) -> Tensor:
        above, below = signs_apart(x.detach())
        product = below * above
        torch._check(above.size(0) == above.size(0))
        return product + below.view(3, 1).sum(1)

    compiled = torch.compile(function, backend="ferrite", options=STRICT)
    x = torch.tensor([1.0, -1.0, 2.0, -2.0, 3.0, -3.0])
    assert_same(compiled(x), function(x), "result")
    with pytest.raises(RuntimeError, match="Eq"):
        compiled(torch.tensor([1.0, -1.0, 2.0, -2.0, -4.0, -3.0]))
