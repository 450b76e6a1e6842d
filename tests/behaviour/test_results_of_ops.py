"""An operator whose kernel gives something else than its fake kernel says: a kernel that reads it raises, and names it.

Other strides than promised are no error: the values are right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing

from tests.behaviour.compare import STRICT, assert_same


class Wrapped(Tensor):
    """A tensor without memory of its own."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        made = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = torch.utils._pytree.tree_map_only(Wrapped, lambda each: each.inner, args)
        return return_and_correct_aliasing(op, args, kwargs or {}, op(*plain, **(kwargs or {})))


def freed(x: Tensor) -> Tensor:
    made = x.clone()
    made.untyped_storage().resize_(0)
    return made


def partly_freed(x: Tensor) -> Tensor:
    made = x.clone()
    made.untyped_storage().resize_(8)
    return made


LIES: dict[str, Callable[[Tensor], Any]] = {
    "fewer_rows": lambda x: x[:2].clone(),
    "fewer_columns": lambda x: x[:, :3].contiguous(),
    "more_rows": lambda x: torch.cat([x, x]),
    "turned": lambda x: x.t().contiguous(),
    "no_elements": lambda x: x[:0].clone(),
    "rank": lambda x: x[None].clone(),
    "dtype": lambda x: x.double(),
    "half": lambda x: x.half(),
    "meta": lambda x: x.to("meta"),
    "sparse": lambda x: x.to_sparse(),
    "freed": freed,
    "partly_freed": partly_freed,
    "subclass": lambda x: Wrapped(x.clone()),
}
TRUTHS: dict[str, Callable[[Tensor], Any]] = {
    "strides": lambda x: x.t().contiguous().t(),
    "overlapping": lambda x: x[:, :1].clone().expand(-1, 8),
    "with_offset": lambda x: torch.cat([x, x])[4:],
    "negated": lambda x: torch._neg_view(-x),
}

kind = ""  # of the table, in the call that follows


def give(x: Tensor) -> Any:
    return {**LIES, **TRUTHS, "honest": torch.clone}[kind](x)


library = torch.library.Library("ferrite_tests", "FRAGMENT")
library.define("lies(Tensor x) -> Tensor")
library.define("lies_in_tuple(Tensor x) -> (Tensor, Tensor)")
library.define("lies_in_list(Tensor x) -> Tensor[]")
library.impl("lies", give, "CPU")
library.impl("lies_in_tuple", lambda x: (x + 1, give(x)), "CPU")
library.impl("lies_in_list", lambda x: [x + 1, give(x)], "CPU")
library.impl("lies", torch.empty_like, "Meta")
library.impl("lies_in_tuple", lambda x: (torch.empty_like(x), torch.empty_like(x)), "Meta")
library.impl("lies_in_list", lambda x: [torch.empty_like(x), torch.empty_like(x)], "Meta")
ops = torch.ops.ferrite_tests


def one(x: Tensor) -> Tensor:
    return ops.lies(x) + 1


def viewed(x: Tensor) -> Tensor:
    return ops.lies(x).t().reshape(-1).sin()


def multiplied(x: Tensor) -> Tensor:
    return torch.mm(ops.lies(x), torch.ones(x.shape[1], 3)).exp()


def of_a_tuple(x: Tensor) -> Tensor:
    one, other = ops.lies_in_tuple(x)
    return one * other


def of_a_list(x: Tensor) -> Tensor:
    one, other = ops.lies_in_list(x)
    return one * other


def of_a_branch(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > -1e9, lambda x: ops.lies(x), lambda x: x + 1, (x,)).cos()


def into_a_branch(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > -1e9, lambda x: x.cos(), lambda x: x + 1, (ops.lies(x),))


PROGRAMS: tuple[Callable[[Tensor], Tensor], ...] = (
    one, viewed, multiplied, of_a_tuple, of_a_list, of_a_branch, into_a_branch,
)  # fmt: skip

NOT_FOR = {into_a_branch: ("negated", "subclass")}  # what cond itself does not take


@pytest.mark.parametrize("host", ["native", "python"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_what_a_kernel_reads_is_what_was_promised(
    program: Callable[[Tensor], Tensor], dynamic: bool, host: str
) -> None:
    global kind
    x = torch.randn(4, 8)
    kind = "honest"
    options = STRICT | {"host": host}
    compiled = torch.compile(program, backend="ferrite", fullgraph=True, dynamic=dynamic, options=options)
    assert_same(compiled(x), program(x), "honest")
    for lie in LIES.keys() - NOT_FOR.get(program, ()):
        kind = lie
        with pytest.raises(RuntimeError, match=r"ferrite_tests\.lies|higher_order\.cond|the caller of the body|meta"):
            compiled(x)
    for truth in TRUTHS.keys() - NOT_FOR.get(program, ()):
        kind = truth
        torch.testing.assert_close(compiled(x), program(x))


@torch.library.custom_op("ferrite_tests::short_list", mutates_args=())
def short_list(x: Tensor) -> list[Tensor]:
    return [x + 1]


@short_list.register_fake
def _(x: Tensor) -> list[Tensor]:
    return [torch.empty_like(x), torch.empty_like(x)]


@torch.library.custom_op("ferrite_tests::nothing", mutates_args=(), schema="(Tensor x) -> Tensor")
def nothing(x: Tensor) -> Any:
    return None


@nothing.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@pytest.mark.parametrize("host", ["native", "python"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: short_list(x)[1] + 1,
        lambda x: torch.mm(short_list(x)[1], x),
        lambda x: nothing(x) + 1,
        lambda x: torch.mm(nothing(x), x),
        lambda x: torch.linalg.det(nothing(x)),
    ],
)
def test_a_result_that_is_not_there_raises(function: Callable[[Tensor], Tensor], dynamic: bool, host: str) -> None:
    options = STRICT | {"host": host}
    compiled = torch.compile(function, backend="ferrite", fullgraph=True, dynamic=dynamic, options=options)
    with pytest.raises((RuntimeError, IndexError, TypeError, AttributeError)):
        compiled(torch.randn(4, 4))
