"""Functions that free and refill the storage of what they are given, as sharded training does between layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

import ferrite
from ferrite import identity
from ferrite.artifact import kernels
from ferrite.artifact.check_inputs import Keeper
from tests.behaviour.compare import STRICT

HOSTS = ("native", "python")


def refusals() -> list[str]:
    """Why graphs do not run natively."""
    record = ferrite.last_record()
    assert record is not None
    return [choice.reason for graph in record.graphs for choice in graph.decisions if choice.what == "native host"]


def resize(x: Tensor, count: int) -> None:
    x.untyped_storage().resize_(4 * count)


def freed_after_reading(x: Tensor, new: Tensor) -> Tensor:
    y = torch.sin(x + 1)
    resize(x, 0)
    return torch.cos(y)


def refilled(x: Tensor, new: Tensor) -> Tensor:
    y = torch.sin(x + 1)
    resize(x, 0)
    resize(x, 4096)
    with torch.no_grad():
        x.copy_(new)
    return torch.cos(y)


def refilled_and_read(x: Tensor, new: Tensor) -> Tensor:
    y = torch.sin(x + 1).sum() + x.view(64, 64).t().sum(0)
    resize(x, 0)
    resize(x, 4096)
    with torch.no_grad():
        x.copy_(new)
    return y + x.view(64, 64).t().cos().sum(0)


def filled_before_reading(x: Tensor, new: Tensor) -> Tensor:
    resize(x, 0)
    resize(x, 4096)
    with torch.no_grad():
        x.copy_(new)
    return (x.view(64, 64) @ new.view(64, 64)).relu() + x[0]


def made_larger(x: Tensor, new: Tensor) -> Tensor:
    y = x * 2
    resize(x, 1 << 16)  # the storage moves
    return y + x.exp() + new


CASES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    each.__name__: each
    for each in (freed_after_reading, refilled, refilled_and_read, filled_before_reading, made_larger)
}


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("name", CASES)
def test_storage_is_resized(name: str, host: str) -> None:
    """Nothing that was read before is computed after, and nothing is read where it was."""
    torch.manual_seed(0)
    start, new = torch.randn(4096), torch.randn(4096)
    compiled = torch.compile(CASES[name], backend="ferrite", fullgraph=True, options={**STRICT, "host": host})
    for _ in range(2):
        x, expected_x = start.clone(), start.clone()
        expected = CASES[name](expected_x, new)
        torch.testing.assert_close(compiled(x, new), expected)
        assert x.untyped_storage().size() == expected_x.untyped_storage().size()
        if x.untyped_storage().size():
            torch.testing.assert_close(x, expected_x)


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("training", [False, True])
def test_an_input_without_memory_is_refused(host: str, training: bool) -> None:
    """Where eager reads address zero. What is smaller than it says is refused too, and what is empty needs nothing."""
    compiled = torch.compile(
        lambda x, w: (x @ w).relu() + x[0], backend="ferrite", dynamic=False, options={**STRICT, "host": host}
    )

    def given(*sizes: int) -> Any:
        return torch.ones(sizes, requires_grad=training)

    x, w = given(8, 8), given(8, 8)
    expected = compiled(x, w)
    for size in (0, 8 * 8 * 4 - 4):
        x.untyped_storage().resize_(size)
        with pytest.raises(RuntimeError, match=f"f32\\[8, 8\\] in a storage of {size} bytes"):
            compiled(x, w)
    x.untyped_storage().resize_(8 * 8 * 4)
    with torch.no_grad():
        x.fill_(1)
    torch.testing.assert_close(compiled(x, w), expected)
    empty = given(0, 8)
    empty.untyped_storage().resize_(0)
    assert torch.compile(lambda x: x.exp() * 2, backend="ferrite", options={**STRICT, "host": host})(empty).shape == (
        0,
        8,
    )


def test_a_parameter_is_freed_between_layers() -> None:
    """Backward gets its memory back before it runs, in another place."""
    torch.manual_seed(0)
    weight, x = torch.randn(64, 64), torch.randn(8, 64)

    def layer(x: Tensor, weight: Tensor) -> Tensor:
        return (x @ weight).tanh() @ weight.t()

    compiled = torch.compile(layer, backend="ferrite", options=STRICT)
    for _ in range(2):
        leaf, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        held = weight.clone().requires_grad_()
        full = layer(other, weight.clone().requires_grad_())
        result = compiled(leaf, held)
        held.untyped_storage().resize_(0)
        held.untyped_storage().resize_(64 * 64 * 4)
        with torch.no_grad():
            held.detach().copy_(weight)
        result.sum().backward()
        full.sum().backward()
        torch.testing.assert_close(leaf.grad, other.grad)


# ---- inputs whose storage has nothing in it when the function is called


def given_and_filled(x: Tensor, new: Tensor) -> Tensor:
    y = new.sin()
    resize(x, 4096)
    with torch.no_grad():
        x.copy_(y.cos())
    return x * 2


def of_any_size(x: Tensor, new: Tensor) -> Tensor:
    resize(x, x.shape[0])
    with torch.no_grad():
        x.copy_(new.cos())
    return x.exp() + x.shape[0]


def viewed_before(x: Tensor, new: Tensor) -> Tensor:
    square, halves = x.view(64, 64), x.view(2, 2048)
    resize(x, 4096)
    with torch.no_grad():
        x.copy_(new.cos())
    return square * 2 + halves.sum(0)[:64]


def filled_in_parts(x: Tensor, new: Tensor) -> Tensor:
    resize(x, 4096)
    with torch.no_grad():
        x[:2000].copy_(new[:2000])
        x[2000:].fill_(1)
    return x + 1


def filled_twice(x: Tensor, new: Tensor) -> Tensor:
    resize(x, 4096)
    with torch.no_grad():
        x.copy_(new.cos())
    y = x.sin()
    resize(x, 0)
    resize(x, 4096)
    with torch.no_grad():
        x.copy_(y + 1)
    return y + x


FILLED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    each.__name__: each for each in (given_and_filled, of_any_size, viewed_before, filled_in_parts, filled_twice)
}


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("name", FILLED)
def test_freed_storage_is_filled(name: str, host: str) -> None:
    """What is not read before it has memory again need not have any at the start."""
    torch.manual_seed(0)
    options = {**STRICT, "host": host}
    compiled = torch.compile(
        FILLED[name], backend="ferrite", fullgraph=True, dynamic=name == "of_any_size", options=options
    )
    for count in (4096, 2048 if name == "of_any_size" else 4096):
        new, x, expected_x = torch.randn(count), torch.randn(count), torch.randn(count)
        for each in (x, expected_x):
            resize(each, 0)
        expected = FILLED[name](expected_x, new)
        torch.testing.assert_close(compiled(x, new), expected)
        torch.testing.assert_close(x, expected_x)
        assert x.untyped_storage().size() == expected_x.untyped_storage().size()
    assert host == "python" or refusals() == []


@pytest.mark.parametrize("host", HOSTS)
def test_freed_storage_is_filled_by_code_from_the_cache(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(identity.versions, "inductor::resize_storage_bytes_", "1")
    options = {**STRICT, "host": host, "cache": "on", "cache_dir": str(tmp_path)}
    new = torch.randn(4096)
    for _ in range(2):
        torch._dynamo.reset()
        counters.clear()
        x, expected_x = torch.randn(4096), torch.randn(4096)
        for each in (x, expected_x):
            resize(each, 0)
        compiled = torch.compile(filled_twice, backend="ferrite", fullgraph=True, options=options)
        torch.testing.assert_close(compiled(x, new), filled_twice(expected_x, new))
        torch.testing.assert_close(x, expected_x)
    assert counters["ferrite"]["graph_cache_hit"] == 1


@pytest.mark.parametrize("host", HOSTS)
def test_what_is_read_before_it_is_filled_is_refused(host: str) -> None:
    """Before anything is written, and whatever leads to its elements."""

    def function(x: Tensor, other: Tensor, new: Tensor) -> Tensor:
        other += 1
        y = x.view(64, 64).t().sin()
        resize(x, 4096)
        with torch.no_grad():
            x.copy_(new)
        return y + x.view(64, 64)

    compiled = torch.compile(function, backend="ferrite", fullgraph=True, options={**STRICT, "host": host})
    new, other, x, freed = torch.randn(4096), torch.zeros(3), torch.randn(4096), torch.randn(4096)
    expected = function(x.clone(), other.clone(), new)
    torch.testing.assert_close(compiled(x, other.clone(), new), expected)
    resize(freed, 0)
    with pytest.raises(RuntimeError, match=r"f32\[4096\] in a storage of 0 bytes"):
        compiled(freed, other, new)
    assert other.sum() == 0
    assert freed.untyped_storage().size() == 0


@torch.library.custom_op("behaviour_storage::cut", mutates_args=())
def cut_down(x: Tensor) -> Tensor:
    """Does something that no schema can say."""
    made = x.clone()
    resize(x, 100)
    return made


@cut_down.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def cut(x: Tensor, new: Tensor) -> Tensor:
    y = new.sin()
    resize(x, 100)
    return y + x.cos()


def cut_by_an_operator(x: Tensor, new: Tensor) -> Tensor:
    return torch.ops.behaviour_storage.cut(x).sin() + x.cos()


def cut_and_multiplied(x: Tensor, new: Tensor) -> Tensor:
    resize(x, 100)
    return (x.view(64, 64) @ new.view(64, 64)).relu()


def cut_by_an_operator_and_multiplied(x: Tensor, new: Tensor) -> Tensor:
    y = torch.ops.behaviour_storage.cut(x).view(64, 64)
    return y.sin() + x.view(64, 64) @ new.view(64, 64)


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("function", [cut, cut_by_an_operator], ids=lambda function: str(function.__name__))
def test_too_little_memory_is_not_read(function: Callable[[Tensor, Tensor], Tensor], host: str) -> None:
    """Eager reads past the end."""
    compiled = torch.compile(function, backend="ferrite", fullgraph=True, options={**STRICT, "host": host})
    for start in (4096, 0, 4096) if function is cut else (4096, 4096):
        x = torch.randn(4096)
        resize(x, start)
        with pytest.raises(RuntimeError, match=r"The memory of .* is gone"):
            compiled(x, torch.randn(4096))


@pytest.mark.parametrize(
    "function", [cut_and_multiplied, cut_by_an_operator_and_multiplied], ids=lambda function: str(function.__name__)
)
def test_a_product_does_not_read_too_little_memory(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Products of native programs are given addresses. Those in Python are operators, and do what they do in eager."""
    options = {**STRICT, "products": "library"}
    compiled = torch.compile(function, backend="ferrite", fullgraph=True, options=options)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"The memory of .* is gone"):
            compiled(torch.randn(4096), torch.randn(4096))


def test_a_kernel_in_python_does_not_read_too_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A native program calls it if it has no machine code, or has to put back what it wrote."""
    monkeypatch.setattr(kernels, "_to_put_back", lambda program: (0,))
    compiled = torch.compile(cut, backend="ferrite", fullgraph=True, options=STRICT)
    with pytest.raises(RuntimeError, match=r"The memory of .* is gone"):
        compiled(torch.randn(4096), torch.randn(4096))
    assert refusals() == []


def test_nothing_is_copied_from_freed_memory() -> None:
    """An argument that lies otherwise than in the trace is copied, if there is something to copy."""
    x = torch.randn(8, 8)
    keeper = Keeper("graph", "x", "f32[8, 8]", torch.float32, may_copy=True, has_memory=False)
    assert torch.equal(keeper.keep(x.t(), [8, 8], [8, 1]), x.t())
    turned = x.t()
    resize(x, 0)
    assert keeper.keep(x, [8, 8], [8, 1]) is x
    with pytest.raises(RuntimeError, match="in a storage of 0 bytes"):
        keeper.keep(turned, [8, 8], [8, 1])


@pytest.mark.parametrize("host", HOSTS)
def test_a_layer_of_sharded_training(host: str) -> None:
    """Forward and backward each gather the full weight into freed memory, and free it behind them."""
    torch.manual_seed(0)
    weight, x, count = torch.randn(64, 64), torch.randn(8, 64), 64 * 64

    def gather(full: Tensor, shard: Tensor) -> None:
        resize(full, count)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(full):
            full.copy_(shard.view(64, 64))

    def forward(x: Tensor, full: Tensor, shard: Tensor) -> Tensor:
        gather(full, shard)
        return (x @ full).tanh() @ full.t()

    compiled = torch.compile(forward, backend="ferrite", fullgraph=True, options={**STRICT, "host": host})
    for _ in range(2):
        leaf, other, full = x.clone().requires_grad_(), x.clone().requires_grad_(), torch.empty(64, 64)
        resize(full, 0)
        result = compiled(leaf, full, weight.view(-1))
        expected = (other @ weight).tanh() @ weight.t()
        torch.testing.assert_close(result, expected)
        resize(full, 0)
        gather(full, weight.view(-1))
        result.sum().backward()
        expected.sum().backward()
        torch.testing.assert_close(leaf.grad, other.grad)
