"""Complex, sparse, subclassed, nested, quantised and meta tensors; parameters, constants, None, Python numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

import ferrite
from tests.behaviour.compare import STRICT, assert_same, compare, equal

DTYPES = [
    torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
    torch.bool, torch.complex64, torch.complex128, torch.uint16, torch.uint32, torch.uint64,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtype(dtype: torch.dtype) -> None:
    x = torch.arange(6).to(dtype).view(2, 3)
    compare(lambda x: (torch.cat([x, x]), x.t().clone(), x == x), x)


COMPLEX: dict[str, Callable[[Tensor], Any]] = {
    "multiply": lambda x: x * (2 + 1j) + x.conj(),
    "conj_view": lambda x: (x.conj(), x.abs()),
    "imag_view": lambda x: (x.imag, x.real + 1),
    "neg_view": lambda x: (x.conj().imag, x.sum()),
    "as_real": lambda x: torch.view_as_real(x) * 2,
    "matmul": lambda x: x @ x.mH,
    "fft": lambda x: torch.fft.ifft(torch.fft.fft(x)) + 1,
    "polar": lambda x: torch.polar(x.abs(), x.angle()),
    "write": lambda x: x.mul_(1j).sum(),
    "write_imag": lambda x: x.imag.fill_(3).sum(),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", COMPLEX)
def test_complex(name: str, dynamic: bool) -> None:
    compare(COMPLEX[name], torch.randn(3, 4, dtype=torch.complex64), dynamic=dynamic)


@pytest.mark.parametrize("name", ["multiply", "matmul", "fft", "as_real", "polar"])
def test_complex_while_training(name: str) -> None:
    compare(COMPLEX[name], torch.randn(3, 4, dtype=torch.complex64, requires_grad=True), training=True, exact=False)


def test_conjugated_input() -> None:
    compare(lambda x: x * 2, torch.randn(3, dtype=torch.complex64).conj())


def coo() -> Tensor:
    return torch.sparse_coo_tensor([[0, 1, 2], [2, 0, 1]], [3.0, 4.0, 5.0], (3, 3))


def csr() -> Tensor:
    return coo().to_sparse_csr()


@pytest.mark.parametrize("make", [coo, csr])
@pytest.mark.parametrize("dynamic", [None, True])
def test_sparse_input(make: Callable[[], Tensor], dynamic: bool | None) -> None:
    """Dynamo leaves frames with sparse inputs to eager where it cannot fake them; answers are eager's either way."""
    x, dense = make(), torch.randn(3, 2)
    function = lambda x, d: torch.sparse.mm(x, d) + 1
    found = torch.compile(function, backend="ferrite", dynamic=dynamic, options=STRICT)(x, dense)
    assert_same(found, function(x, dense), "result")


@pytest.mark.parametrize("kind", ["coo", "csr"])
def test_sparse_intermediate_and_result(kind: str) -> None:
    def function(x: Tensor) -> Any:
        y = x.relu().to_sparse() if kind == "coo" else x.relu().to_sparse_csr()
        return y, y.to_dense() * 2

    x = torch.randn(3, 3)
    assert_same(torch.compile(function, backend="ferrite", options=STRICT)(x), function(x), "result")


def test_sparse_gradient() -> None:
    def function(table: Tensor, index: Tensor) -> Tensor:
        return torch.nn.functional.embedding(index, table, sparse=True).sum()

    table, twin = (torch.ones(5, 2, requires_grad=True) for _ in range(2))
    index = torch.tensor([1, 3, 1])
    torch.compile(function, backend="ferrite", options=STRICT)(table, index).backward()
    function(twin, index).backward()
    assert table.grad.layout == twin.grad.layout == torch.sparse_coo
    assert equal(table.grad.to_dense(), twin.grad.to_dense())


def two(requires_grad: bool = False) -> TwoTensor:
    return TwoTensor(torch.randn(3, 4), torch.randn(3, 4)).requires_grad_(requires_grad)


SUBCLASS: dict[str, Callable[[Any], Any]] = {
    "compute": lambda x: x.sin() @ x.t(),
    "mixed": lambda x: (x * 2, x + torch.ones(3, 4)),
    "view": lambda x: (x.t(), x.sum()),
    "inner_and_outer": lambda x: x.view(-1) * x.shape[0],
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", SUBCLASS)
def test_subclass_input_and_result(name: str, dynamic: bool) -> None:
    x = two()
    compiled = torch.compile(SUBCLASS[name], backend="ferrite", fullgraph=True, dynamic=dynamic, options=STRICT)
    assert_same(compiled(x), SUBCLASS[name](x), "result")
    assert ferrite.last_record() is not None


def test_subclass_while_training() -> None:
    x, twin = two(True), None
    twin = TwoTensor(x.a.detach().clone(), x.b.detach().clone()).requires_grad_()
    function = lambda x: (x.sin() * 2).sum()
    torch.compile(function, backend="ferrite", fullgraph=True, options=STRICT)(x).backward()
    function(twin).backward()
    assert_same(x.grad, twin.grad, "gradient")


def test_subclass_as_parameter() -> None:
    class Holder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(two())

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

    module, x = Holder(), torch.randn(2, 3)
    assert_same(torch.compile(module, backend="ferrite", options=STRICT)(x), module(x), "result")


def test_subclass_input_that_is_written() -> None:
    x = two()
    twin = TwoTensor(x.a.clone(), x.b.clone())

    def function(x: Any) -> Any:
        x.mul_(2)
        return x + 1

    found = torch.compile(function, backend="ferrite", fullgraph=True, options=STRICT)(x)
    assert_same(found, function(twin), "result")
    assert_same(x, twin, "input")


def test_jagged_nested_tensor() -> None:
    def function(x: Tensor) -> Tensor:
        return (x * 2).sin()

    x = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=torch.jagged)
    found = torch.compile(function, backend="ferrite", fullgraph=True, options=STRICT)(x)
    expected = function(x)
    assert equal(found.values(), expected.values())
    assert equal(found.offsets(), expected.offsets())


def test_quantised_tensor_breaks_the_graph_and_gives_eagers_values() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.quantize_per_tensor(x.relu(), 0.1, 3, torch.quint8).dequantize() + 1

    x = torch.randn(8)
    assert equal(torch.compile(function, backend="ferrite")(x), function(x))


def test_meta_tensors() -> None:
    result = compare(lambda x: (x @ x).relu(), torch.empty(3, 3, device="meta"))
    assert result.device.type == "meta"


def test_mixed_meta_and_cpu() -> None:
    compare(lambda x, y: (x + 1, y + 1), torch.empty(3, device="meta"), torch.randn(3))


CONSTANTS: dict[str, Callable[[Tensor], Any]] = {
    "small": lambda x: x + torch.tensor([1.0, 2.0, 3.0]),
    "scalar": lambda x: x * torch.tensor(2.5),
    "large": lambda x: x + torch.tensor(list(range(60)), dtype=torch.float32).view(20, 3).sum(0),
    "returned": lambda x: (torch.tensor([1.0, 2.0]), x + 1),
    "view_returned": lambda x: (torch.tensor([1.0, 2.0, 3.0])[1:], x + 1),
    "written": lambda x: torch.tensor([1.0, 2.0, 3.0]).add_(x),
    "nan_and_inf": lambda x: (
        x.clamp(max=float("inf")), torch.full((2,), float("nan")), x.masked_fill(x > 0, -float("inf")),
    ),
    "big_integers": lambda x: x.long() + 2**62 - (-(2**63) + 1),
    "negative_zero": lambda x: x * -0.0 + torch.full((3,), -0.0),
    "strings": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "dtypes": lambda x: x.to(torch.float64, memory_format=torch.contiguous_format).to("cpu", torch.bfloat16),
    "empty": lambda x: torch.cat([x, torch.tensor([])]),
    "lists": lambda x: torch.tensor([[1, 2], [3, 4]]).float() @ x[:2],
}  # fmt: skip


@pytest.mark.parametrize("mode", ["normal", "serialize"])
@pytest.mark.parametrize("name", CONSTANTS)
def test_constants(name: str, mode: str) -> None:
    compare(CONSTANTS[name], torch.randn(3), options={"compile_mode": mode}, calls=3)


def test_a_constant_of_the_closure_changes() -> None:
    """A tensor that the function closes over is an input to Dynamo: its present value counts."""
    held = torch.ones(3)
    compiled = torch.compile(lambda x: x + held, backend="ferrite", options=STRICT)
    assert equal(compiled(torch.zeros(3)), torch.ones(3))
    held.mul_(5)
    assert equal(compiled(torch.zeros(3)), torch.full((3,), 5.0))


def test_parameter_is_replaced() -> None:
    module = torch.nn.Linear(3, 3, bias=False)
    compiled = torch.compile(module, backend="ferrite", options=STRICT)
    x = torch.randn(2, 3)
    for change in ("none", "replace", "data", "in_place", "load"):
        with torch.no_grad():
            if change == "replace":
                module.weight = torch.nn.Parameter(torch.randn(3, 3))
            elif change == "data":
                module.weight.data = torch.randn(3, 3)
            elif change == "in_place":
                module.weight.mul_(2)
            elif change == "load":
                module.load_state_dict({"weight": torch.randn(3, 3)})
        assert equal(compiled(x), x @ module.weight.t()), change


def test_none_numbers_and_structures() -> None:
    def function(x: Tensor, nothing: None, numbers: list[float], tree: dict[str, Any]) -> Any:
        y = x * numbers[0] + numbers[1]
        return None, [y, tree["a"][0] + 1], {"n": numbers, "none": nothing, "t": (3, "s", 2.0, True)}

    compare(function, torch.randn(3), None, [2, 3.5], {"a": (torch.randn(2),), "b": None})


def test_buffers_and_tied_parameters() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(7, 4)
            self.head = torch.nn.Linear(4, 7, bias=False)
            self.head.weight = self.embedding.weight
            self.register_buffer("scale", torch.tensor(0.5), persistent=False)

        def forward(self, index: Tensor) -> Tensor:
            return self.head(self.embedding(index) * self.scale)

    compare(Tied(), torch.tensor([[1, 2], [6, 0]]), training=True)


def test_subclass_without_dispatch() -> None:
    """PyTorch 2.13 runs such a class through AOTAutograd's wrappers or refuses it at run time; with us as with them, or
    as in eager."""

    class Tagged(torch.Tensor):
        pass

    x = torch.randn(3).as_subclass(Tagged)
    function = lambda x: x * 2 + 1
    outcomes = []
    for backend in ("aot_eager", "ferrite"):
        torch._dynamo.reset()
        try:
            outcomes.append(type(torch.compile(function, backend=backend)(x)))
        except TypeError as error:
            outcomes.append(type(error))
    assert outcomes[1] in (outcomes[0], Tagged)


def test_numpy_inside_the_function() -> None:
    import numpy as np

    def function(x: Any) -> Any:
        return np.sin(x) + x.shape[0]

    x = np.arange(4.0)
    found = torch.compile(function, backend="ferrite", options=STRICT)(x)
    assert isinstance(found, np.ndarray)
    np.testing.assert_allclose(found, function(x), rtol=1e-12)
