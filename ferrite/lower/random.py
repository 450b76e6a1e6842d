"""Rows of random ops, by counters: number k of an op is a function of the op's seed and k.

A call draws its seeds from torch's default generator, so `manual_seed` repeats a run and every call differs. Nobody
has to keep a state: readers may compute a number again and find the same one. The streams are not eager's; the option
`fallback_random` runs these ops in eager instead. A generator that the caller gives is left to eager, which advances
it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ferrite.errors import Unsupported
from ferrite.loops.dtypes import DType, b8, f32, f64, i32, i64
from ferrite.loops.index import Index, total
from ferrite.loops.nodes import Expr, Random, Require
from ferrite.loops.shapes import contiguous_strides
from ferrite.lower.pointwise import floats_only
from ferrite.lower.table import lowers
from ferrite.lower.value import (
    Draw,
    Result,
    Tensor,
    apply,
    axes_for,
    cast,
    compute_dtype,
    const,
    points,
    select,
    tensor,
)

aten = torch.ops.aten

DIGITS = {"f16": 11, "bf16": 8}  # of eager's uniform halves: fewer than 24, so that rounding never gives 1
LEAST = 2.0**-25  # stands for the uniform number 0 where a logarithm is taken: half of the next one


# ---- numbers


def uniform(draw: Draw, counter: Index, dtype: DType) -> Expr:
    """In [0, 1): 24 digits for f32, 48 for f64, as many as fit for halves."""
    first = Random("uniform", draw.seed, 0, counter, f32)
    if dtype is f64:
        rest = cast(Random("uniform", draw.seed, 1, counter, f32), f64)
        return apply("add", cast(first, f64), apply("mul", rest, const(2.0**-24, f64)))
    if dtype.is_half:
        steps = const(2.0 ** DIGITS[dtype.name], f32)
        return cast(apply("div", apply("floor", apply("mul", first, steps)), steps), dtype)
    return first


def open_uniform(draw: Draw, counter: Index, compute: DType) -> Expr:
    """In (0, 1)."""
    number = uniform(draw, counter, compute)
    return select(apply("eq", number, const(0, compute)), const(LEAST, compute), number)


def normal(draw: Draw, counter: Index, compute: DType) -> Expr:
    """Mean 0, deviation 1."""
    if compute is f32:
        return Random("normal", draw.seed, 0, counter, f32)
    radius = apply("sqrt", apply("mul", const(-2, f64), apply("log", open_uniform(draw, counter, f64))))
    other = cast(Random("uniform", draw.seed, 2, counter, f32), f64)
    return apply("mul", radius, apply("cos", apply("mul", const(2 * math.pi, f64), other)))


def drawn(result: Result, number: Callable[[Index, DType], Expr]) -> Tensor:
    """A tensor of numbers: `number` of the counter, computed in at least f32."""
    if not result.dtype.is_float:
        raise Unsupported(f"a draw from the reals as {result.dtype}")
    strides = contiguous_strides(result.sizes)
    compute = compute_dtype(result.dtype)

    def body(*here: Index) -> Expr:
        return cast(number(_counter(here, strides), compute), result.dtype)

    return tensor(result.sizes, body)


def _counter(here: tuple[Index, ...], strides: tuple[Index, ...]) -> Index:
    return total(at * stride for at, stride in zip(here, strides, strict=True))


def default_generator(generator: Any) -> None:
    if generator is not None:
        raise Unsupported("a draw from a generator of the caller")


# ---- dropout


@lowers(aten.native_dropout.default)
def native_dropout(x: Tensor, p: float, train: bool | None, *, draw: Draw) -> tuple[Tensor, Tensor]:
    """x * mask * 1/(1 - p); with p = 1 the factor is 0, and infinities become NaN, as in eager."""
    if train is False:
        return x, Tensor(x.axes, const(True, b8))
    compute = compute_dtype(x.dtype)
    counter = _counter(points(x.axes), contiguous_strides(x.sizes))
    mask = apply("lt", uniform(draw, counter, f32), const(1 - p, f32))
    scale = const(0 if p == 1 else 1 / (1 - p), compute)
    kept = apply("mul", apply("mul", cast(x.body, compute), cast(mask, compute)), scale)
    return Tensor(x.axes, cast(kept, x.dtype)), Tensor(x.axes, mask)


# ---- distributions


@lowers(aten.rand.default, aten.rand_like.default)
def rand(*ignored: Any, result: Result, draw: Draw, **others: Any) -> Tensor:
    return tensor(result.sizes, _uniforms(result, draw))


def _uniforms(result: Result, draw: Draw) -> Callable[..., Expr]:
    if not result.dtype.is_float:
        raise Unsupported(f"a draw from the reals as {result.dtype}")
    strides = contiguous_strides(result.sizes)
    return lambda *here: uniform(draw, _counter(here, strides), result.dtype)


@lowers(aten.randn.default, aten.randn_like.default)
def randn(*ignored: Any, result: Result, draw: Draw, **others: Any) -> Tensor:
    return drawn(result, lambda counter, compute: normal(draw, counter, compute))


@lowers(aten.uniform.default)
def uniform_between(
    x: Tensor, low: float = 0.0, high: float = 1.0, generator: Any = None, *, result: Result, draw: Draw
) -> Tensor:
    default_generator(generator)

    def number(counter: Index, compute: DType) -> Expr:
        scaled = apply("mul", cast(uniform(draw, counter, result.dtype), compute), const(high - low, compute))
        return apply("add", scaled, const(low, compute))

    return drawn(result, number)


@lowers(aten.normal_functional.default)
def normal_functional(
    x: Tensor, mean: float = 0.0, std: float = 1.0, generator: Any = None, *, result: Result, draw: Draw
) -> Tensor:
    default_generator(generator)
    return _gaussian(mean, std, result, draw)


@lowers(aten.normal.float_float)
def normal_floats(
    mean: float, std: float, size: Any, *, generator: Any = None, result: Result, draw: Draw, **others: Any
) -> Tensor:
    default_generator(generator)
    return _gaussian(mean, std, result, draw)


def _gaussian(mean: float, std: float, result: Result, draw: Draw) -> Tensor:
    if std < 0:
        raise Unsupported("a negative deviation", why="eager raises")

    def number(counter: Index, compute: DType) -> Expr:
        return apply("add", apply("mul", normal(draw, counter, compute), const(std, compute)), const(mean, compute))

    return drawn(result, number)


@lowers(aten.exponential.default)
def exponential(x: Tensor, rate: float = 1.0, generator: Any = None, *, result: Result, draw: Draw) -> Tensor:
    """-log(u) / rate: never 0."""
    default_generator(generator)
    if rate <= 0:
        raise Unsupported("a rate that is not positive", why="eager raises")

    def number(counter: Index, compute: DType) -> Expr:
        # log1p(-u) keeps small values exact; u is never 0.
        logarithm = apply("log1p", apply("neg", open_uniform(draw, counter, compute)))
        return apply("mul", logarithm, const(-1 / rate, compute))

    return drawn(result, number)


@lowers(aten.log_normal.default)
def log_normal(
    x: Tensor, mean: float = 1.0, std: float = 2.0, generator: Any = None, *, result: Result, draw: Draw
) -> Tensor:
    default_generator(generator)
    gaussian = _gaussian(mean, std, result, draw)
    compute = compute_dtype(result.dtype)
    return Tensor(gaussian.axes, cast(apply("exp", cast(gaussian.body, compute)), result.dtype))


# ---- truth and integers


@lowers(aten.bernoulli.p)
def bernoulli(x: Tensor, p: float = 0.5, generator: Any = None, *, result: Result, draw: Draw) -> Tensor:
    default_generator(generator)
    if not 0 <= p <= 1:
        raise Unsupported("a chance outside of 0 and 1", why="eager raises")
    return _chances(Tensor(axes_for(result.sizes), const(p, f64)), result, draw)


@lowers(aten.bernoulli.default)
def bernoulli_of(chances: Tensor, *, generator: Any = None, result: Result, draw: Draw) -> Tensor:
    """Each element with its own chance, which eager checks."""
    default_generator(generator)
    floats_only(chances, "bernoulli")
    value = chances.body
    zero, one = const(0, value.dtype), const(1, value.dtype)
    allowed = apply("and_", apply("ge", value, zero), apply("le", value, one))
    message = "Expected p_in >= 0 && p_in <= 1 to be true, but got false.  (Could this error message be improved?  If so, please report an enhancement request to PyTorch.)"  # noqa: E501 - eager's words
    return _chances(Tensor(chances.axes, Require(allowed, value, "RuntimeError", message)), result, draw)


def _chances(chances: Tensor, result: Result, draw: Draw) -> Tensor:
    counter = _counter(points(chances.axes), contiguous_strides(chances.sizes))
    chosen = apply("lt", uniform(draw, counter, f64), cast(chances.body, f64))
    return Tensor(chances.axes, cast(chosen, result.dtype))


@lowers(aten.randint.default, aten.randint_like.default)
def randint(first: Any, second: Any, *, result: Result, draw: Draw, **others: Any) -> Tensor:
    """From 0 up to, not including, the bound, which stands before the size, or behind the tensor to be like."""
    return _integers(0, second if isinstance(first, Tensor) else first, result, draw)


@lowers(aten.randint.low, aten.randint_like.low_dtype)
def randint_between(first: Any, second: Any, third: Any, *, result: Result, draw: Draw, **others: Any) -> Tensor:
    if isinstance(first, Tensor):
        return _integers(second, third, result, draw)
    return _integers(first, second, result, draw)


def _integers(low: Any, high: Any, result: Result, draw: Draw) -> Tensor:
    """low + (bits * (high - low) >> 32): even to one part in 2**32 / (high - low)."""
    if not (isinstance(low, int) and isinstance(high, int)) or not 0 < high - low < 1 << 31:
        raise Unsupported("a range of integers of 2**31 or more, or one that is not known")
    if not result.dtype.is_float:
        highest = 1 if result.dtype.is_bool else (1 << (result.dtype.bits - result.dtype.signed)) - 1
        if high - 1 > highest or low < (-highest - 1 if result.dtype.signed else 0):
            raise Unsupported(f"integers that {result.dtype} does not hold", why="eager raises")
    strides = contiguous_strides(result.sizes)

    def body(*here: Index) -> Expr:
        bits = cast(Random("bits", draw.seed, 0, _counter(here, strides), i32), i64)
        word = apply("and_", bits, const(0xFFFFFFFF, i64))
        scaled = apply("shr", apply("mul", word, const(high - low, i64)), const(32, i64))
        return cast(apply("add", scaled, const(low, i64)), result.dtype)

    return tensor(result.sizes, body)
