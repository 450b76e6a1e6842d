"""Associative scans against eager: the combine that becomes one of a fold, what is left to eager, and what never
arrives as a scan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch._higher_order_ops.associative_scan import associative_scan, associative_scan_op
from torch.fx.experimental.proxy_tensor import make_fx

from ferrite.errors import Unsupported
from ferrite.loops.dtypes import DType, b8, f32, f64, i64
from ferrite.loops.index import index
from ferrite.loops.nodes import Buffer
from ferrite.loops.text import show
from ferrite.lower.combine import combined
from ferrite.lower.value import FROM_DTYPE, Tensor, axes_for, of_buffer
from tests.unit.test_lower import both, fallbacks

X = torch.tensor([[1.5, -2.0, 0.0], [0.25, 3.0, -1.0], [-1.0, 0.5, 2.0], [4.0, -0.0, 1.0], [-2.0, 2.0, 0.125]])


# ---- how it is captured


def running(x: torch.Tensor, **others: Any) -> Any:
    """Products of x, and the recurrence h = x*h + x, both at once: nothing here is rounded."""
    return associative_scan(lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), (x, x), combine_mode="generic", **others)


@pytest.mark.parametrize("others", [{"dim": 0}, {"dim": -1}, {"dim": 0, "reverse": True}], ids=str)
def test_the_generic_mode_is_captured_as_slices(others: dict[str, Any]) -> None:
    """PyTorch traces its own tree of slices and concatenations: there is no scan left to lower."""
    expected, found = both(lambda x: running(x, **others), X)
    assert fallbacks() == set()
    torch.testing.assert_close(found, expected, rtol=0, atol=0, check_stride=True)


def test_the_generic_mode_has_a_gradient() -> None:
    x = X.clone().requires_grad_()
    expected, found = both(lambda x: running(x, dim=0), x)
    wanted, given = (torch.autograd.grad([part.sum() for part in each], x) for each in (expected, found))
    torch.testing.assert_close(given, wanted)


def test_the_pointwise_mode_raises_on_the_cpu_as_in_eager() -> None:
    def scan(x: torch.Tensor) -> torch.Tensor:
        return associative_scan(lambda a, b: a + b, x, 0, combine_mode="pointwise")

    message = "For combine_mode='pointwise', all input tensors need to be on CUDA or XPU"
    with pytest.raises(ValueError, match=message):
        scan(X)
    with pytest.raises(ValueError, match=message):
        torch.compile(scan, backend="ferrite")(X)


def recurrence(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    return associative_scan_op(lambda a, c, b, d: [a * b, c * b + d], [x, y], ())


def test_the_op_itself_runs_in_eager() -> None:
    """Eager calls the combine with many slices at once, which a function of the program must stand."""
    found = torch.compile(recurrence, backend="ferrite", options={"strict": True, "executor": "eager"})(X, X + 1)
    torch.testing.assert_close(list(found), recurrence(X, X + 1), rtol=0, atol=0, check_stride=True)
    assert "higher_order.associative_scan" in fallbacks()


# ---- what a combine becomes


def combine_of(
    function: Callable[..., Sequence[torch.Tensor]], *dtypes: DType, others: Sequence[torch.Tensor] = ()
) -> str:
    """The text of what the function makes of two slices f[2, 3]."""
    slices = [torch.ones(2, 3, dtype=FROM_DTYPE[dtype]) for dtype in (*dtypes, *dtypes)]
    module = make_fx(function, tracing_mode="fake")(*slices, *others)
    made = combined(module, dtypes, axes_for((2, 3)), [tensor(f"w{n}", each) for n, each in enumerate(others)])
    return ", ".join(map(show, made))


def tensor(name: str, like: torch.Tensor) -> Tensor:
    sizes, strides = (tuple(map(index, numbers)) for numbers in (like.shape, like.stride()))
    return of_buffer(Buffer(name, f32, sizes, strides))


def test_a_combine_becomes_expressions() -> None:
    assert combine_of(lambda a, b: [a + b], f32) == "a0 + b0"
    assert combine_of(lambda a, c, b, d: [a * b, c * b + d], f64, f64) == "a0 * b0, a1 * b0 + b1"
    assert combine_of(lambda a, c, b, d: [a | b, torch.where(b, d, c)], b8, i64) == "a0 | b0, where(b0, b1, a1)"
    assert combine_of(lambda a, b: [a.to(torch.int64).to(torch.float32) + torch.ones_like(b)], f32) == (
        "f32(i64(a0)) + f32(1.0)"
    )


def test_a_combine_reads_what_it_was_given_besides() -> None:
    """Stretched over the slice; the axes are those of the loops around."""
    row, number = torch.ones(3), torch.tensor(2.0)
    assert combine_of(lambda a, b, w, v: [a * w + b * v], f32, others=[row, number]) == "a0 * w0[j] + b0 * w1[()]"


@pytest.mark.parametrize(
    ("function", "dtype", "title"),
    [
        (lambda a, b: [a + b.sum()], f32, "aten.sum.default in a combine"),
        (lambda a, b: [a + b.flip(0)], f32, "aten.flip.default in a combine"),
        (lambda a, b: [a + b.t().reshape(2, 3)], f32, "aten.t.default in a combine"),
        (lambda a, b: [a + torch.rand_like(b)], f32, "aten.rand_like.default in a combine"),
        (lambda a, b: [a + torch.gcd(a, b)], i64, "aten.gcd.default in a combine"),
        (lambda a, b: [torch.div(a, b, rounding_mode="floor")], i64, "a combine that can raise"),
        (lambda a, b: [a < b], f32, "a combine whose results differ from what it takes"),
        (lambda a, b: [a, b], f32, "a combine whose results differ from what it takes"),
    ],
)
def test_what_is_left_to_eager(function: Callable[..., Any], dtype: DType, title: str) -> None:
    with pytest.raises(Unsupported) as refusal:
        combine_of(function, dtype)
    assert refusal.value.title == title


# ---- the op, lowered


def assert_scanned(function: Callable[..., Any], *inputs: torch.Tensor, eager: bool = False, **options: Any) -> None:
    """Eager's answer from the oracle and from native code; `eager`: by running the scan, and so its combine, there."""
    for executor in ("oracle", "native"):
        torch._dynamo.reset()
        compiled = torch.compile(function, backend="ferrite", options={"executor": executor, "strict": True}, **options)
        found, expected = compiled(*inputs), function(*inputs)
        torch.testing.assert_close(list(found), list(expected), rtol=0, atol=0, check_stride=True)
        assert ("higher_order.associative_scan" in fallbacks()) == eager


def test_a_scan_of_several_operands_is_lowered() -> None:
    assert_scanned(recurrence, X, X + 1)
    assert_scanned(recurrence, X[:1], X[1:2])
    assert_scanned(recurrence, X, X + 1, dynamic=True)
    assert_scanned(lambda x: associative_scan_op(lambda a, b: [a + b], [x], ()), torch.arange(7))
    assert_scanned(lambda x: associative_scan_op(lambda a, b: [torch.maximum(a, b)], [x * 2], ()), X)
    assert_scanned(
        lambda m, n: associative_scan_op(lambda a, c, b, d: [a | b, torch.where(b, d, c + d)], [m, n], ()),
        X > 0,
        torch.arange(15).reshape(5, 3),
    )


def test_a_combine_may_read_a_tensor_of_the_graph() -> None:
    def scan(x: torch.Tensor, w: torch.Tensor) -> Any:
        return associative_scan_op(lambda a, b: [a + b + w], [x], ())

    assert_scanned(scan, X, torch.tensor([0.5, 1.0, -2.0]))


def test_a_scan_that_is_left_to_eager_calls_its_combine_with_other_shapes() -> None:
    """Halves, and results that are traced with strides which eager does not give."""
    assert_scanned(lambda x: associative_scan_op(lambda a, b: [a + b], [x], ()), X.bfloat16(), eager=True)
    assert_scanned(lambda x: associative_scan_op(lambda a, b: [a + b], [x], ()), X.t(), eager=True)


@pytest.mark.parametrize("executor", ["oracle", "native"])
def test_a_scan_has_a_gradient(executor: str) -> None:
    inputs = [X.clone().requires_grad_(), (X + 1).requires_grad_()]
    compiled = torch.compile(recurrence, backend="ferrite", options={"executor": executor, "strict": True})
    wanted, given = (
        torch.autograd.grad([part.square().sum() for part in run(*inputs)], inputs) for run in (recurrence, compiled)
    )
    torch.testing.assert_close(given, wanted)
