"""Pointwise rows against eager, through the oracle: where they must agree to the bit, and where eager raises."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.unit.test_lower import ODD, assert_same, fallbacks

aten = torch.ops.aten
INF, NAN = math.inf, math.nan
HALVES = [torch.bfloat16, torch.float16]
VECTORS = 512  # elements: no vector loop of eager leaves a rest, which it computes in other ways


@pytest.fixture(autouse=True)
def _same_numbers_and_no_recompiling() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, backend="ferrite", options={"executor": "oracle", "strict": True}, **options)


def numbers(count: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(VECTORS).to(dtype) for _ in range(count)]


# ---- integers


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.uint8], ids=str)
def test_integer_division_rounds_as_in_eager(dtype: torch.dtype) -> None:
    low = 0 if dtype is torch.uint8 else -9
    x, y = torch.arange(low, 10).to(dtype), torch.tensor([1, 2, 3, 7, *([-1, -2, -3] if low else [])]).to(dtype)
    assert_same(
        lambda a, b: (
            torch.div(a, b, rounding_mode="floor"), torch.div(a, b, rounding_mode="trunc"), torch.remainder(a, b),
            torch.fmod(a, b), a / b, a // 4, a % 3, torch.fmod(a, 5), 100 // b, 100 % b,
        ),
        x[:, None], y,
    )  # fmt: skip


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: torch.div(x, y, rounding_mode="floor"),
        lambda x, y: torch.div(x, y, rounding_mode="trunc"),
        torch.remainder,
        torch.fmod,
        lambda x, y: x // 0,
        lambda x, y: 7 % y,
    ],
    ids=["floor", "trunc", "remainder", "fmod", "by the number 0", "of a number"],
)
def test_division_by_zero_raises_as_in_eager(function: Callable[..., Any]) -> None:
    x, y = torch.tensor([7, -7, 5]), torch.tensor([2, 0, -3])
    with pytest.raises(RuntimeError) as eager:
        function(x, y)
    ours = compiled(function)
    with pytest.raises(RuntimeError) as found:
        ours(x, y)
    assert str(found.value) == str(eager.value) == "ZeroDivisionError"
    assert fallbacks() == set()
    assert function(x[:0], y[:0]).shape == ours(x[:0], y[:0]).shape


def test_a_divisor_that_is_a_size() -> None:
    ours = compiled(lambda x, y: x // y.shape[0], dynamic=True)
    x = torch.arange(8)
    assert torch.equal(ours(x, torch.zeros(3)), x // 3)
    assert torch.equal(ours(x, torch.zeros(4)), x // 4)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.uint8], ids=str)
def test_powers_of_integers(dtype: torch.dtype) -> None:
    low = 0 if dtype is torch.uint8 else -4
    x = torch.arange(low, 6).to(dtype)
    assert_same(lambda a, b: (torch.pow(a, b), torch.pow(3, b), torch.pow(1, b)), x[:, None], x)
    assert_same(lambda a: (a**0, a**1, a**2, a**3, a**7, a**0.5, a**2.0), x, exact=False)


def test_powers_of_integers_wrap() -> None:
    assert_same(lambda a, b: torch.pow(a, b), torch.tensor([3, -7, 10, 2]), torch.tensor([63, 41, 30, 64]))


def test_numbers_that_do_not_fit() -> None:
    """As operands they wrap, as parameters they raise."""
    x = torch.tensor([200, 3], dtype=torch.uint8)
    assert_same(lambda a: (a + 256, a * 300, 300 - a, a > 300, a == -1, a // 300, a & -256, a.clamp(-1, 255)), x)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        compiled(lambda a: a % 256)(x)
    for function in (lambda a: a.clamp(0, 300), lambda a: a.masked_fill(a > 5, 300), lambda a: a.add(a, alpha=300)):
        with pytest.raises(RuntimeError, match="cannot be converted"):
            compiled(function)(x)


def test_eager_raises_for_truth_values() -> None:
    mask, x = torch.tensor([True, False]), torch.ones(2)
    refused = (lambda m, v: v - True, lambda m, v: torch.add(m, m, alpha=1.5), lambda m, v: m.abs())
    for function in refused:
        with pytest.raises((RuntimeError, NotImplementedError)) as eager:
            function(mask, x)
        with pytest.raises(type(eager.value)) as ours:
            compiled(function)(mask, x)
        assert str(ours.value).splitlines()[0] == str(eager.value).splitlines()[0]
    assert_same(lambda m: (torch.add(m, m, alpha=2), torch.clamp_min(m, ~m), m**1, torch.heaviside(m, m)), mask)


def test_shifts_of_a_number() -> None:
    assert_same(lambda n: (1 << n, -9 >> n, n << 2), torch.tensor([0, 3, 63, 64, -1]))


# ---- floats, to the bit


def test_sums_of_products_are_rounded_once() -> None:
    x, y, z = numbers(3)
    assert_same(
        lambda a, b, c: (
            torch.add(a, b, alpha=1.3), torch.sub(a, b, alpha=1.3), torch.rsub(a, b, alpha=3),
            torch.add(a, 2, alpha=0.3),
            torch.addcmul(a, b, c), torch.addcmul(a, b, c, value=1.3), torch.lerp(a, b, 0.3), torch.lerp(a, b, 0.7),
            torch.lerp(a, b, c), aten.tanh_backward(a, b), aten.addcdiv(a, b, c),
        ),
        x, y, z,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_halves_round_where_eager_rounds(dtype: torch.dtype) -> None:
    x, y, z = numbers(3, dtype)
    w = z.abs()
    assert_same(
        lambda a, b, c, d: (
            torch.div(a, b, rounding_mode="trunc"), torch.div(a, b, rounding_mode="floor"), a // 0.3, a * 1.7, a / 1.7,
            torch.div(a, 0.3, rounding_mode="trunc"), torch.remainder(a, 0.3), torch.fmod(a, 0.3), a + 1.7, 1.7 - a,
            torch.add(a, b, alpha=1.3), torch.addcmul(a, b, c, value=1.3), torch.lerp(a, b, 0.3), torch.lerp(a, b, c),
            a**2, a**3, a**-2, d**2.7, 2.7**a, d**0.5, torch.round(a, decimals=2), torch.xlogy(a, d),
            torch.special.xlog1py(a, d), torch.special.entr(d), torch.deg2rad(a), torch.rad2deg(a), a > 0.301,
        ),
        x, y, z, w,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_halves_beside_other_dtypes(dtype: torch.dtype) -> None:
    """Everything becomes a half first, but a single number that multiplies or divides keeps its digits."""
    (x,) = numbers(1, dtype)
    many, single, wide = torch.arange(VECTORS) * 999, torch.tensor(1.7), torch.tensor(100001)
    assert_same(
        lambda a, m, s, w: (a + m, a * m, m / a, a + s, a * s, s * a, a / s, s / a, a * w, torch.maximum(a, s)),
        x, many, single, wide,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_parameters_of_activations(dtype: torch.dtype) -> None:
    """Limits are compared as they are, or rounded, as eager's kernels do."""
    x = torch.linspace(-0.4, 0.4, VECTORS).to(dtype)
    g = torch.ones_like(x)
    assert_same(
        lambda a, b: (
            functional.hardtanh(a, -0.3, 0.301), aten.hardtanh_backward(b, a, -0.3, 0.301),
            functional.threshold(a, 0.3, 7.0), aten.threshold_backward(b, a, 0.301),
            aten.hardshrink_backward(b, a, 0.3), aten.softshrink_backward(b, a, 0.301),
            functional.leaky_relu(a, 0.013), aten.leaky_relu_backward(b, a, 0.013, False), functional.relu(a),
            functional.hardswish(a), aten.hardswish_backward(b, a * 10), functional.hardsigmoid(a),
            aten.hardsigmoid_backward(b, a), aten.sigmoid_backward(b, a), aten.elu_backward(b, 1.3, 1.1, 0.9, True, a),
        ),
        x, g,
    )  # fmt: skip


def test_hardtanh_of_integers_keeps_them() -> None:
    assert_same(lambda x: (functional.hardtanh(x), functional.relu6(x), torch.relu(x)), torch.tensor([-5, 0, 9]))


# ---- functions


def test_functions_of_odd_numbers() -> None:
    x = torch.cat([ODD, torch.tensor([0.3, 0.5, 1.0, -1.0, 2.0])])
    assert_same(
        lambda v: (
            torch.sinc(v), torch.logit(v), torch.logit(v, 0.2), torch.special.entr(v), torch.angle(v), v.sgn(),
            torch.xlogy(0.0, v), torch.special.xlog1py(v, v), torch.logaddexp(v, v), torch.nan_to_num(v, 1.0, 2.0),
            torch.round(v, decimals=3), torch.round(v, decimals=-2), functional.softplus(v, 1.3, 2),
            torch.fmax(v, -v), torch.special.i1e(v), torch.polygamma(0, v.abs()), torch.special.modified_bessel_i0(v),
        ),
        x, exact=False,
    )  # fmt: skip
    assert_same(lambda v: torch.heaviside(v, v.new_tensor(0.5)), x)
    assert_same(lambda v: torch.logaddexp2(v, v.flip(0)), x, exact=False)


def test_trigamma_of_both_sides() -> None:
    x = torch.tensor([0.1, 0.5, 0.7, 3.0, 40.0, -0.3, -2.5, 0.0, INF, NAN])
    assert_same(lambda v: torch.polygamma(1, v), x, exact=False)
    assert_same(lambda v: torch.polygamma(1, v), x.double(), exact=False)
    assert_same(lambda v: torch.polygamma(2, v), x, eager=("aten.polygamma.default",), exact=False)


def test_ldexp_is_exact_and_takes_32_bits() -> None:
    x = torch.tensor([1e-40, 1.5, -0.0, INF, 3.0])
    exponents = torch.tensor([149, -140, 5, -3, 2**32 + 3])
    assert_same(lambda a, b: torch.ldexp(a, b), x, exponents)
    assert_same(lambda a, b: torch.ldexp(a, b), torch.tensor([3, 5]), torch.tensor([2, -2]))
    assert_same(lambda a, b: torch.ldexp(a, b), x, torch.tensor([149.0, 0.5, 1.0, 2.0, -1.5]), exact=False)


@pytest.mark.parametrize("name", ["ndtri", "log_ndtr", "modified_bessel_i0"])
def test_eager_raises_for_special_functions_of_halves(name: str) -> None:
    function = getattr(torch.special, name)
    with pytest.raises(NotImplementedError, match="not implemented for"):
        compiled(lambda x: function(x))(torch.rand(4).bfloat16())


# ---- activations and their gradients


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "mish": functional.mish,
    "gelu": functional.gelu,
    "gelu by tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "elu": lambda x: functional.elu(x, 1.3),
    "celu": lambda x: functional.celu(x, 1.3),
    "selu": functional.selu,
    "softplus": lambda x: functional.softplus(x, 1.3, 2),
    "logsigmoid": functional.logsigmoid,
    "hardswish": functional.hardswish,
    "hardsigmoid": functional.hardsigmoid,
    "leaky_relu": lambda x: functional.leaky_relu(x, 0.1),
    "glu": lambda x: functional.glu(x, 0),
    "prelu": lambda x: functional.prelu(x, torch.tensor([0.1, -0.2, 0.3, 2.0]).to(x.dtype)),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_and_their_gradients(name: str) -> None:
    activation = ACTIVATIONS[name]

    def value_and_gradient(x: torch.Tensor, function: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
        x = x.detach().requires_grad_()
        y = function(x)
        (gradient,) = torch.autograd.grad(y, x, torch.linspace(-1, 1, y.numel()).reshape(y.shape).to(y.dtype))
        return y.detach(), gradient

    x = torch.randn(4, 4) * 4
    ours = compiled(activation)
    for dtype in (torch.float32, torch.bfloat16):
        given = x.to(dtype)
        torch.testing.assert_close(value_and_gradient(given, ours), value_and_gradient(given, activation))
        assert fallbacks() == set()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_gelu_where_its_input_is_odd(dtype: torch.dtype) -> None:
    """As eager of doubles. In f32 it overflows for the largest number, and has NaN for inf."""
    info = torch.finfo(dtype)
    sizes = [0.0, info.smallest_normal, info.smallest_normal * 0.75, 40.0, 1e4, info.max, INF]
    x = torch.tensor([*sizes, *(-size for size in sizes), NAN], dtype=dtype).repeat(9)
    g = torch.ones_like(x)
    found = compiled(lambda a, b: (functional.gelu(a), aten.gelu_backward(b, a)))(x, g)
    wanted = functional.gelu(x.double()), aten.gelu_backward(g.double(), x.double())
    for ours, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, exact.to(dtype), rtol=0, atol=0, equal_nan=True)
    finite = x.isfinite()
    assert torch.equal(found[0][finite].signbit(), x[finite].signbit())


def test_gelu_is_no_farther_from_the_truth_than_eager() -> None:
    x = torch.linspace(-14, 10, 24001)
    exact = x.double() * torch.special.erfc(-x.double() / math.sqrt(2)) / 2
    errors = [(gelu(x).double() - exact).abs() for gelu in (compiled(functional.gelu), functional.gelu)]
    for low, high in ((-14, -4), (-4, -1), (-1, 1), (1, 10)):
        ours, eagers = (error[(x >= low) & (x < high)].max() for error in errors)
        assert ours <= eagers


@pytest.mark.parametrize("dim", [0, -1])
def test_glu_over_any_dimension(dim: int) -> None:
    x = torch.randn(4, 6).t()
    g = torch.randn_like(functional.glu(x, dim))
    assert_same(lambda a, b: (functional.glu(a, dim), aten.glu_backward(b, a, dim)), x, g, exact=False)


def test_one_kernel_serves_many_sizes() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gated = functional.glu(x.float())
        return x // y, torch.lerp(x.float(), y.float(), 0.3), x**3, gated, aten.glu_backward(gated, x.float(), 1)

    ours = compiled(function, dynamic=True)
    for sizes in ((4, 6), (8, 2), (1, 10), (0, 4)):
        x, y = torch.randint(-9, 9, sizes), torch.randint(1, 9, sizes[1:])
        torch.testing.assert_close(ours(x, y), function(x, y), check_stride=True)
        assert fallbacks() == set()


def test_gradients_where_the_input_is_nan() -> None:
    """What eager's vector loops do; its loop for the last few elements lets some of these through."""
    x, g = torch.full((VECTORS,), NAN), torch.ones(VECTORS)
    assert_same(
        lambda a, b: (
            aten.hardtanh_backward(b, a, -1.0, 1.0), aten.hardshrink_backward(b, a, 0.5),
            aten.hardsigmoid_backward(b, a), aten.hardswish_backward(b, a), aten.threshold_backward(b, a, 0),
            aten.elu_backward(b, 1.0, 1.0, 1.0, False, a), aten.logit_backward(b, a, 0.2), aten.logit_backward(b, a),
        ),
        x, g,
    )  # fmt: skip


# ---- shapes


def test_zero_dimensions_and_zero_sizes() -> None:
    scalar, empty = torch.tensor(7), torch.empty(0, 3, dtype=torch.int64)
    assert_same(
        lambda s, e: (s // 2, e // s, s % e, e**s, torch.lerp(e.float(), s.float(), 0.3), e.float() + s), scalar, empty
    )


def test_strides_of_nothing_are_eagers() -> None:
    """Where shapes differ, eager orders dimensions of equal strides by their sizes, and tracing does not. A number has
    a shape of its own."""
    x, one = torch.empty(3, 0, 1), torch.ones(1)
    assert_same(lambda x, y: x * y, torch.empty(0, 1), one)
    assert_same(lambda x, y: (x + y, x + 2), x, one)
    assert_same(lambda x, y: x - y[0], x, one)
    assert_same(lambda x, y: (x + x, x.neg(), x.transpose(0, 1) * x.transpose(0, 1)), x, one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_a_product_added_in_place(dtype: torch.dtype) -> None:
    """Dynamo writes an op of its own for addcmul_ and addcdiv_ with a factor, which only it defines."""
    x, y, z = ((torch.randn(3, 5) * 9).to(dtype) for _ in range(3))
    assert_same(lambda x, y, z: x.clone().addcmul_(y, z, value=3), x, y, z, exact=not dtype.is_floating_point)
    assert_same(lambda x, y, z: x.clone().addcmul_(y, z[:1], value=3), x, y, z, exact=not dtype.is_floating_point)
    if dtype.is_floating_point:
        assert_same(lambda x, y, z: x.clone().addcdiv_(y, z, value=-0.3), x, y, z, exact=False)


def test_views_and_steps_are_read_as_they_lie() -> None:
    x = torch.arange(1, 25).reshape(4, 6)
    assert_same(lambda v: (v.t() // v.t().flip(0), v[:, ::2] % v[:, 1::2], v.t()[1:] ** 2), x)


@pytest.mark.parametrize("name", ["logical_and", "logical_or", "logical_xor"])
def test_truth_is_asked_in_the_common_dtype(name: str) -> None:
    """One number beside a tensor has its dtype, in which it may be zero."""
    function = getattr(torch, name)
    for x, number in [
        (torch.tensor([0.0, 1.0]), torch.tensor(2.2e-308, dtype=torch.float64)),
        (torch.tensor([0.0, 1.0], dtype=torch.float16), torch.tensor(1e-9)),
        (torch.tensor([0, 1], dtype=torch.int8), torch.tensor(256)),
        (torch.tensor([False, True]), torch.tensor(256)),
    ]:
        assert_same(function, x, number)
        assert_same(function, number, x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_a_power_of_one_half_is_no_square_root(dtype: torch.dtype) -> None:
    """Of -0.0 and of the least number: 0.0 and infinity."""
    x = torch.tensor([-0.0, 0.0, -math.inf, math.inf, 4.0, -4.0], dtype=dtype)
    assert_same(lambda x: (x**0.5, torch.pow(x, torch.full_like(x, 0.5))), x)
