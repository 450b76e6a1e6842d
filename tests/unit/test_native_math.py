"""Functions over the reals in native code: errors within what was measured, corners as eager, on every instruction set.

The bounds are the largest errors in docs/vector-math.md, rounded up a little; `python -m bench.vector_math` measures
them on many more numbers.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from bench.native_code import TARGETS, Kernel, Module
from bench.vector_math import LONG, MEASURED_AT_ONE, eager, exact, points, ulp_errors
from ferrite.loops.dtypes import DType, f16, f32, f64, i8, i16, i32, i64, u8
from ferrite.loops.operations import OPERATIONS
from ferrite.loops.oracle import STORAGE
from ferrite.native.build import build, load
from ferrite.native.builder import Builder, pointer
from ferrite.native.math import FUNCTIONS
from ferrite.native.target import named

# ulp for f32 and f64
BOUNDS: dict[str, tuple[float, float]] = {
    "exp": (0.98, 1.02),
    "exp2": (1.02, 1.08),
    "expm1": (1.55, 2.15),
    "sigmoid": (2.2, 2.05),
    "tanh": (1.6, 1.55),
    "sinh": (1.6, 1.5),
    "cosh": (1.4, 1.35),
    "log": (0.85, 0.8),
    "log2": (1.9, 0.75),
    "log10": (1.9, 0.75),
    "log1p": (1.5, 1.35),
    "asinh": (0.51, 1.8),
    "acosh": (0.51, 2.1),
    "atanh": (0.51, 1.8),
    "pow": (0.51, 1.15),
    "sin": (1.55, 1.5),
    "cos": (1.55, 1.5),
    "tan": (0.51, 1.0),
    "asin": (2.0, 2.1),
    "acos": (1.45, 1.3),
    "atan": (1.9, 1.8),
    "atan2": (2.0, 1.8),
    "rsqrt": (1.5, 1.5),
    "hypot": (0.51, 0.52),
    "erf": (1.5, 1.25),
    "erfc": (0.52, 3.8),
    "erfinv": (0.51, 6.0),
    "ndtr": (0.6, 4.6),
    "ndtri": (0.51, 6.0),
    "log_ndtr": (0.51, 6.0),
    "lgamma": (0.51, 3.0),
    "digamma": (0.51, 12.0),
    "i0": (0.51, 5.5),
    "i0e": (0.51, 3.2),
    "i1": (0.51, 5.5),
    "i1e": (0.51, 3.2),
}

targets = pytest.mark.parametrize("target", TARGETS)
dtypes = pytest.mark.parametrize("dtype", [f32, f64], ids=str)


def test_every_function_is_there() -> None:
    """What the builder has no method for is a function here, and has a bound."""
    assert set(FUNCTIONS) == {name for name in OPERATIONS if not hasattr(Builder, name)} == set(BOUNDS)


@cache
def functions(target: str, dtype: DType) -> Module:
    kernels = [
        Kernel(f"{name}_{dtype}", (dtype,) * OPERATIONS[name].arity, dtype, function, ways=2 if dtype is f32 else 1)
        for name, function in FUNCTIONS.items()
    ]
    return Module(target, kernels)


@cache
def numbers_and_truth(name: str, dtype: DType) -> tuple[list[Any], Any]:
    slow = dtype is f64 and name not in LONG
    operands = points(name, dtype, 60 if slow else 3000, seed=1)
    return operands, exact(name, dtype, *operands)


@targets
@dtypes
@pytest.mark.parametrize("name", FUNCTIONS)
def test_error_stays_within_its_bound(target: str, dtype: DType, name: str) -> None:
    operands, truth = numbers_and_truth(name, dtype)
    found = functions(target, dtype).run(f"{name}_{dtype}", *operands)
    errors = ulp_errors(found, truth, dtype, 1.0 if (name, dtype) in MEASURED_AT_ONE else 0.0)
    worst = int(errors.argmax())
    bound = BOUNDS[name][dtype is f64]
    assert errors[worst] <= bound, f"{[operand[worst] for operand in operands]}: {found[worst]!r}, not {truth[worst]!r}"


@targets
@dtypes
@pytest.mark.parametrize("name", FUNCTIONS)
def test_corners_are_those_of_eager(target: str, dtype: DType, name: str) -> None:
    """NaN where eager has NaN, infinities and zeros with their signs."""
    info = np.finfo(STORAGE[dtype])
    some = [0.0, 1.0, 2.0, 3.0, 0.5, np.inf, info.max, info.tiny]  # eager's own functions differ on denormals
    corners = np.array([*some, *(-number for number in some), np.nan], STORAGE[dtype])
    operands = [corners]
    if OPERATIONS[name].arity == 2:
        operands = [part.ravel() for part in np.meshgrid(corners, corners)]
    found = functions(target, dtype).run(f"{name}_{dtype}", *operands)
    expected = eager(name)(*(torch.from_numpy(operand.copy()) for operand in operands)).numpy()
    wrong = np.flatnonzero(kinds(found) != kinds(expected))
    shown = [(*(operand[k] for operand in operands), found[k], expected[k]) for k in wrong[:6]]
    assert not len(wrong), f"operands, found, eager: {shown}"


def kinds(values: Any) -> Any:
    """9: NaN. 5 and -5: infinite. 1 and -1: zero. 0: any other number."""
    kind = np.where(np.isinf(values), 5, np.where(values == 0, 1, 0))
    return np.where(np.isnan(values), 9, kind * np.where(np.signbit(values), -1, 1))


@targets
@pytest.mark.parametrize("dtype", [i64, i32, i16, i8, u8], ids=str)
def test_power_of_integers(target: str, dtype: DType) -> None:
    base, exponent = (part.ravel() for part in np.meshgrid(np.arange(-5, 8), np.array([-3, -2, -1, 0, 1, 2, 3, 7, 40])))
    if not dtype.signed:
        base, exponent = np.abs(base), np.abs(exponent)
    operands = [part.astype(STORAGE[dtype]) for part in (base, exponent)]
    module = Module(target, [Kernel("pow", (dtype, dtype), dtype, FUNCTIONS["pow"], ways=2)])
    wrapped = np.array([int(a) ** int(n) if n >= 0 else (int(a) ** -int(n) if abs(a) == 1 else 0)
                        for a, n in zip(base, exponent, strict=True)], object)  # fmt: skip
    bits = 2**dtype.bits
    expected = np.array([number % bits for number in wrapped], object)
    assert [int(number) % bits for number in module.run("pow", *operands)] == list(expected)


def test_scalars_and_other_widths() -> None:
    """One lane, and vectors wider and narrower than registers, give the same as whole ones."""
    shapes = [(1, 1), (2, 3), (4, 1), (8, 2), (16, 1), (32, 1)]
    for target in TARGETS:
        kernels = [
            Kernel(f"{name}_{lanes}_{ways}", (f32,), f32, FUNCTIONS[name], lanes=lanes, ways=ways)
            for name in ("exp", "log", "tanh", "sin", "erfc")
            for lanes, ways in shapes
        ]
        module = Module(target, kernels)
        x = np.random.default_rng(0).uniform(0.1, 5, 192).astype(np.float32)
        for name in ("exp", "log", "tanh", "sin", "erfc"):
            results = [module.run(f"{name}_{lanes}_{ways}", x) for lanes, ways in shapes]
            truth = exact(name, f32, x)
            for found in results:
                assert ulp_errors(found, truth, f32).max() <= BOUNDS[name][0]


def test_the_normal_distribution_as_a_factor() -> None:
    """0 and 1 at the ends, so that products with large numbers are right; f32 is better than (1 + erf) / 2, beside the
    tail too."""
    ends = np.array([-np.inf, -np.finfo(np.float32).max, -1e30, -1e4, -40, 9, 1e4, np.inf, 0.0, -0.0], np.float32)
    x = np.linspace(-6, 6, 50001).astype(np.float32)
    truth = exact("ndtr", f32, x)
    for target in TARGETS:
        for dtype in (f32, f64):
            found = functions(target, dtype).run(f"ndtr_{dtype}", ends.astype(STORAGE[dtype]))
            assert found.tolist() == [0] * 5 + [1] * 3 + [0.5] * 2
        error = np.abs(functions(target, f32).run("ndtr_f32", x) - truth)
        by_erf = functions(target, f32).run("erf_f32", x * np.float32(0.5**0.5))
        former_error = np.abs((by_erf + np.float32(1)) * np.float32(0.5) - truth)
        for low, high in ((-6, -5), (-5, -4), (-4, -3), (-3, -2), (-6, 0), (0, 6)):
            inside = (x >= low) & (x <= high)
            assert error[inside].max() <= former_error[inside].max() <= 8e-8


def test_large_angles() -> None:
    """Beyond the reduction C's library takes over, for these lanes alone."""
    x = np.array([1e5, 2.0**17, 1.5e6, 3e15, 1e22, 3.4e38, 0.5, -1e30], np.float32)
    for target in TARGETS:
        for dtype in (f32, f64):
            numbers = x.astype(STORAGE[dtype])
            for name in ("sin", "cos", "tan"):
                found = functions(target, dtype).run(f"{name}_{dtype}", numbers)
                assert ulp_errors(found, exact(name, dtype, numbers), dtype).max() <= BOUNDS[name][dtype is f64]


@targets
@pytest.mark.parametrize("name", ["asin", "asinh", "atan", "erf", "ndtr", "sinh", "tanh"])
def test_a_half_that_was_a_double_needs_no_routine(target: str, name: str) -> None:
    """Signs are taken from the number as it is: LLVM, looking behind its conversions, would turn an f64 into an f16 at
    once, by a routine that is in no library here. Code with such a call does not load."""
    b = Builder(named(target))
    with b.function(name, {"x": pointer, "y": pointer}) as (x, y):
        half = b.convert(b.load(f64, x, 0), f16)
        b.store(b.convert(FUNCTIONS[name](b, b.convert(half, f32)), f16), y)
    assert load([build(b.text(), b.target)], [name]).address(name)


@pytest.mark.parametrize("name", ["x86-64-v4", "aarch64"])
def test_code_for_another_machine_is_made(name: str) -> None:
    b = Builder(named(name))
    for dtype in (f32, f64):
        for function in ("exp", "log", "pow", "sin", "tanh", "erf", "ndtr"):
            with b.function(f"{function}_{dtype}", {"x": pointer, "y": pointer}) as (x, y):
                value = b.load(dtype, x, 0, b.target.lanes(dtype))
                b.store(FUNCTIONS[function](b, *[value] * OPERATIONS[function].arity), y)
    assert len(build(b.text(), b.target)) > 5000
