"""Checks that fail inside machine code: eager's exception in eager's words, a note with the op and the user's line,
inputs as they were, and a function that goes on working."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import ferrite

NATIVE = {"strict": True, "executor": "native"}
notes = pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes before Python 3.11")


# In each of these the first line is the one that can fail; what follows is in the same kernel.


def embedding(n: Tensor, w: Tensor) -> Tensor:
    h = F.embedding(n, w)
    return h * 2


def gather(x: Tensor, n: Tensor) -> Tensor:
    y = x.gather(0, n)
    return y + 1


def index(x: Tensor, n: Tensor) -> Tensor:
    y = x[n]
    return y.sin()


def index_of_columns(x: Tensor, n: Tensor) -> Tensor:
    y = x[:, n]
    return y * x[:, :1]


def index_select(x: Tensor, n: Tensor) -> Tensor:
    y = x.index_select(0, n)
    return y - 1


def index_put(x: Tensor, n: Tensor) -> Tensor:
    y = x.index_put((n,), torch.ones(()))
    return y * 2


def index_add(x: Tensor, n: Tensor) -> Tensor:
    y = x.index_add(0, n, torch.ones(n.shape))
    return y * 2


def scatter(x: Tensor, n: Tensor) -> Tensor:
    y = x.scatter(0, n, 1.0)
    return y * 2


def floor_division(a: Tensor, b: Tensor) -> Tensor:
    q = a // b
    return q + 1


def remainder(a: Tensor, b: Tensor) -> Tensor:
    r = a % b
    return r + 1


def nll_loss(x: Tensor, t: Tensor) -> Tensor:
    loss = F.nll_loss(x, t)
    return loss * 2


def cross_entropy(x: Tensor, t: Tensor) -> Tensor:
    loss = F.cross_entropy(x, t, label_smoothing=0.1)
    return loss * 2


def cross_entropy_of_pixels(x: Tensor, t: Tensor) -> Tensor:
    loss = F.cross_entropy(x, t, reduction="none")
    return loss * 2


TABLE, ROW = torch.arange(12.0).view(4, 3), torch.arange(6.0)
PIXELS = torch.zeros(1, 2, 2, dtype=torch.long)
Case = tuple[Callable[..., Tensor], tuple[Tensor, ...], tuple[Tensor, ...], str]
CASES: list[Case] = [
    (embedding, (torch.tensor([1, 3]), TABLE), (torch.tensor([1, 7]), TABLE), "aten.embedding.default"),
    (gather, (ROW, torch.tensor([5])), (ROW, torch.tensor([2, -1])), "aten.gather.default"),
    (index, (ROW, torch.tensor([5, -6])), (ROW, torch.tensor([0, -7])), "aten.index.Tensor"),
    (index_of_columns, (TABLE, torch.tensor([2])), (TABLE, torch.tensor([0, 3])), "aten.index.Tensor"),
    (index_select, (ROW, torch.tensor([5])), (ROW, torch.tensor([6])), "aten.index_select.default"),
    (index_put, (ROW, torch.tensor([5, 1])), (ROW, torch.tensor([1, 6])), "aten.index_put.default"),
    (index_add, (ROW, torch.tensor([5, 1])), (ROW, torch.tensor([1, 6])), "aten.index_add.default"),
    (scatter, (ROW, torch.tensor([5])), (ROW, torch.tensor([1, 6])), "aten.scatter.value"),
    (floor_division, (torch.tensor([4]), torch.tensor([2])), (torch.tensor([4]), torch.tensor([0])), "floor_divide"),
    (remainder, (torch.tensor([4]), torch.tensor([2])), (torch.tensor([4]), torch.tensor([0])), "aten.remainder"),
    (nll_loss, (TABLE, torch.tensor([0, 1, 2, 0])), (TABLE, torch.tensor([0, 1, 5, 0])), "aten.nll_loss_forward"),
    (cross_entropy, (TABLE, torch.tensor([0, 1, 2, 0])), (TABLE, torch.tensor([0, 1, 2, -1])), "aten."),
    (
        cross_entropy_of_pixels,
        (torch.ones(1, 3, 2, 2), PIXELS),
        (torch.ones(1, 3, 2, 2), PIXELS + 4),
        "aten.nll_loss2d",
    ),
]


def error_of(function: Callable[..., Any], *arguments: Any) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        function(*arguments)
    return caught.value


def copies(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(tensor.clone() for tensor in tensors)


def runs_as_machine_code() -> bool:
    """Whether the latest compile left nothing to eager and nothing to the oracle."""
    record = ferrite.last_record()
    assert record is not None
    refused = [decision for graph in record.graphs for decision in graph.decisions if decision.what == "native"]
    return not record.fallbacks and not refused


def note_of(error: Exception) -> str:
    (note,) = error.__notes__  # type: ignore[attr-defined]
    return str(note)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@notes
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0].__name__)
def test_type_words_and_place_of_an_error(case: Case) -> None:
    function, good, bad, op = case
    compiled = torch.compile(function, backend="ferrite", fullgraph=True, options=NATIVE)
    expected = function(*good)
    torch.testing.assert_close(compiled(*copies(good)), expected)
    # With other sizes Dynamo compiles anew, with sizes that are known at run time only.
    eager, found = error_of(function, *bad), error_of(compiled, *copies(bad))
    assert runs_as_machine_code()
    assert type(found) is type(eager)
    assert str(found) == str(eager)
    assert op in note_of(found)
    assert f"test_native_errors.py:{function.__code__.co_firstlineno + 1}: " in note_of(found)
    torch.testing.assert_close(compiled(*copies(good)), expected)


def test_where_memory_repeats() -> None:
    """The index has no part in the address of what is read: it is checked all the same."""
    x = torch.randn(1).expand(16)
    compiled = torch.compile(index, backend="ferrite", fullgraph=True, options=NATIVE)
    for n in (torch.full((20,), -16), torch.full((20,), 15)):
        torch.testing.assert_close(compiled(x, n), index(x, n))
    for n in (torch.full((20,), -17), torch.tensor([0] * 19 + [16])):
        assert str(error_of(compiled, x, n)) == str(error_of(index, x, n))
    assert runs_as_machine_code()


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("place", [0, 1_000_003, 2**21 - 1])
def test_in_a_parallel_kernel(count: int, place: int, threads: Callable[[int], None]) -> None:
    """The bad element is the first, one in the middle of a thread's part, the last."""
    threads(count)
    x, n = torch.randn(1000), torch.randint(0, 1000, (2**21,))
    bad = n.clone()
    bad[place] = 1000
    compiled = torch.compile(index, backend="ferrite", fullgraph=True, options=NATIVE)
    expected = compiled(x, n)
    torch.testing.assert_close(expected, index(x, n))
    error = error_of(compiled, x, bad)
    assert type(error) is IndexError
    assert str(error) == "index 1000 is out of bounds for dimension 0 with size 1000"
    assert torch.equal(compiled(x, n), expected)
    assert runs_as_machine_code()


@notes
def test_of_several_ops_the_one_that_says_it_is_named() -> None:
    def function(n: Tensor, m: Tensor) -> Tensor:
        a = F.embedding(n, TABLE)
        b = TABLE[m]
        return a + b

    compiled = torch.compile(function, backend="ferrite", fullgraph=True, options=NATIVE)
    good, bad = torch.tensor([1, 2]), torch.tensor([1, 9])
    first = function.__code__.co_firstlineno
    note = note_of(error_of(compiled, bad, good))
    assert "aten.embedding.default" in note
    assert f"test_native_errors.py:{first + 1}: a = F.embedding(n, TABLE)" in note
    note = note_of(error_of(compiled, good, bad))
    assert "aten.index.Tensor" in note
    assert f"test_native_errors.py:{first + 2}: b = TABLE[m]" in note


@notes
def test_ops_that_say_the_same_are_all_named() -> None:
    def function(n: Tensor, m: Tensor) -> Tensor:
        a = TABLE[n]
        return a + TABLE[m]

    compiled = torch.compile(function, backend="ferrite", fullgraph=True, options=NATIVE)
    note = note_of(error_of(compiled, torch.tensor([1, 2]), torch.tensor([1, 9])))
    first = function.__code__.co_firstlineno
    assert [f"test_native_errors.py:{first + line}: " in note for line in (1, 2)] == [True, True]


@notes
def test_inside_a_branch() -> None:
    def function(x: Tensor, n: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x, n: x[n] * 2, lambda x, n: x[n] * 3, (x, n))

    compiled = torch.compile(function, backend="ferrite", fullgraph=True, options=NATIVE)
    assert torch.equal(compiled(torch.ones(4), torch.tensor([3])), torch.tensor([2.0]))
    error = error_of(compiled, torch.ones(4), torch.tensor([4]))
    assert type(error) is IndexError
    assert "aten.index.Tensor" in note_of(error)
    assert f"test_native_errors.py:{function.__code__.co_firstlineno + 1}: " in note_of(error)


def test_an_assert_shows_its_op_and_line() -> None:
    """It runs on the host: the error has the step of the program, and at its end the user's line."""

    def function(x: Tensor) -> Tensor:
        torch.ops.aten._assert_async.msg((x > 0).all(), "all must be positive")
        return x + 1

    compiled = torch.compile(function, backend="ferrite", fullgraph=True, options=NATIVE)
    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))
    error = error_of(compiled, torch.zeros(3))
    assert (type(error), str(error)) == (RuntimeError, "all must be positive")
    shown = next(line for line in traceback.format_exception(error) if "_assert_async.msg(" in line)
    assert f"# test_native_errors.py:{function.__code__.co_firstlineno + 1}" in shown
    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))


# ---- memory that is written in place


def multiply_in_place(x: Tensor, y: Tensor, n: Tensor) -> None:
    x.mul_(y[n])


def look_up_in_place(x: Tensor, table: Tensor) -> None:
    x.copy_(table[x])


def add_in_place(x: Tensor, y: Tensor, n: Tensor) -> Tensor:
    x.add_(1)
    return y[n]


SIZE = 2**18
MANY = torch.arange(SIZE) % 4
MANY_BAD = MANY.index_put((torch.tensor([SIZE - 3]),), torch.tensor(9))


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    ("function", "good", "bad"),
    [
        (multiply_in_place, (torch.ones(SIZE), ROW[:4], MANY), (torch.ones(SIZE), ROW[:4], MANY_BAD)),
        # What was written would itself be out of range when the kernel is run again.
        (look_up_in_place, (MANY, torch.full((4,), 100)), (MANY_BAD, torch.full((4,), 100))),
        # Eager has finished the addition by then.
        (add_in_place, (torch.ones(SIZE), ROW[:4], MANY), (torch.ones(SIZE), ROW[:4], MANY_BAD)),
    ],
    ids=["multiply", "look_up", "add"],
)
def test_inputs_after_an_error_are_those_of_eager(
    function: Callable[..., Any],
    good: tuple[Tensor, ...],
    bad: tuple[Tensor, ...],
    count: int,
    threads: Callable[[int], None],
) -> None:
    threads(count)
    compiled = torch.compile(function, backend="ferrite", fullgraph=True, options=NATIVE)
    ours, eagers = copies(good), copies(good)
    assert_same(compiled(*ours), function(*eagers))
    assert_same(ours, eagers)
    ours, eagers = copies(bad), copies(bad)
    eager, found = error_of(function, *eagers), error_of(compiled, *ours)
    assert runs_as_machine_code()
    assert (type(found), str(found)) == (type(eager), str(eager))
    assert_same(ours, eagers)
    ours, eagers = copies(good), copies(good)
    assert_same(compiled(*ours), function(*eagers))
    assert_same(ours, eagers)


def assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "write",
    [
        lambda x, n, v: x.index_put_((n,), v),
        lambda x, n, v: x.index_add_(0, n, v),
        lambda x, n, v: x.scatter_(0, n, v),
        lambda x, n, v: x.index_copy_(0, n, v),
    ],
    ids=["index_put_", "index_add_", "scatter_", "index_copy_"],
)
def test_a_write_to_a_bad_place_leaves_what_eager_leaves(write: Callable[..., Tensor]) -> None:
    """Eager has written what comes before the bad index when it finds it."""

    def function(x: Tensor, n: Tensor, v: Tensor) -> None:
        write(x, n, v)

    ours, theirs, n = torch.zeros(6), torch.zeros(6), torch.tensor([0, 1, 9])
    compiled = torch.compile(function, backend="ferrite", fullgraph=True, options=NATIVE)
    eager = error_of(function, theirs, n, torch.ones(3))
    found = error_of(compiled, ours, n, torch.ones(3))
    assert (type(found), str(found)) == (type(eager), str(eager))
    assert torch.equal(ours, theirs)


def test_rows_whose_index_is_looked_up_itself() -> None:
    """Large rows are asked for early, by an index that is not checked yet: one that another index leads to must not be
    read before its turn, nor one that the kernel writes itself."""
    x, n, m = torch.randn(600, 1024), torch.randint(0, 600, (40,)), torch.randint(0, 40, (30,))
    compiled = torch.compile(lambda x, n, m: x[n[m]] * 2, backend="ferrite", options=NATIVE)
    assert torch.equal(compiled(x, n, m), x[n[m]] * 2)
    assert runs_as_machine_code()
    wrong = m.clone()
    wrong[20] = 1 << 40
    with pytest.raises(IndexError, match="out of bounds for dimension 0 with size 40"):
        compiled(x, n, wrong)
    assert torch.equal(compiled(x, n, m), x[n[m]] * 2)


PADDED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gather": lambda x, n: F.pad(x, (-1, 1)).gather(0, n[None]),
    "index": lambda x, n: F.pad(x, (0, 2))[:, 4:][n],
    "index_select": lambda x, n: torch.cat([x, torch.zeros(3, 2)], 1)[:, 3:].index_select(0, n),
    "embedding": lambda x, n: F.embedding(n, F.pad(x, (4, -4))),
}


@pytest.mark.parametrize("name", PADDED)
def test_positions_of_padding_are_checked(name: str) -> None:
    """Nothing is read where a tensor is padded."""
    function = PADDED[name]
    compiled = torch.compile(function, backend="ferrite", options=NATIVE)
    x, good = torch.randn(3, 4), torch.tensor([0, 2, 1, 0])
    assert torch.equal(compiled(x, good), function(x, good))
    for bad in (torch.tensor([0, 1, 2, 3]), torch.tensor([0, 1, 2, -4])):
        with pytest.raises((IndexError, RuntimeError)) as eager:
            function(x, bad)
        with pytest.raises(eager.type, match=re.escape(str(eager.value).split("\n")[0])):
            compiled(x, bad)
    assert torch.equal(compiled(x, good), function(x, good))
