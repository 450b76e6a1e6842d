"""The oracle's reductions and scans: plain NumPy over all values at once, or chunk by chunk where they are many.

Sums and products of halves and f32 are taken in f64, of f64 in long double, and rounded once; integers wrap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import numpy as np

from ferrite.errors import Malformed
from ferrite.loops.dtypes import DType, f32, f64
from ferrite.loops.oracle_values import STORAGE, Array, rounded, value_type

# ---- reductions


class Body(Protocol):
    """What a reduction combines: `count` values at each point of a box of this shape."""

    @property
    def dtype(self) -> DType: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def count(self) -> int: ...

    @property
    def is_needed(self) -> bool:
        """Whether the result is defined at any point; if not, it may be anything."""
        ...

    def chunks(self) -> Iterator[Array]:
        """Arrays of shape (some of the values, *shape), together all values in order. May be asked for again."""
        ...


def _total(body: Body, of: Callable[[Array], Array]) -> Array:
    """The sum of a function of all values, in the accumulation type."""
    wide = _accumulation_type(body.dtype)
    result = np.zeros(body.shape, wide)
    for chunk in body.chunks():
        result = result + of(chunk.astype(wide)).sum(axis=0, dtype=wide)
    return result


def _accumulation_type(dtype: DType) -> np.dtype[Any]:
    if dtype.is_float:
        return np.dtype(np.longdouble if dtype is f64 else np.float64)
    return STORAGE[dtype]


def _narrowed(value: Array, dtype: DType) -> Array:
    return rounded(value, dtype) if dtype.is_float else value


def _sum(body: Body) -> dict[str, Array]:
    return {"value": _narrowed(_total(body, lambda chunk: chunk), body.dtype)}


def _prod(body: Body) -> dict[str, Array]:
    wide = _accumulation_type(body.dtype)
    result = np.ones(body.shape, wide)
    for chunk in body.chunks():
        result = result * chunk.prod(axis=0, dtype=wide)
    return {"value": _narrowed(result, body.dtype)}


def _any(body: Body) -> dict[str, Array]:
    result = np.zeros(body.shape, np.bool_)
    for chunk in body.chunks():
        result = result | (chunk != 0).any(axis=0)
    return {"value": result}


def _all(body: Body) -> dict[str, Array]:
    result = np.ones(body.shape, np.bool_)
    for chunk in body.chunks():
        result = result & (chunk != 0).all(axis=0)
    return {"value": result}


def _greatest(body: Body) -> dict[str, Array]:
    return _extreme(body, np.argmax, np.greater)


def _least(body: Body) -> dict[str, Array]:
    return _extreme(body, np.argmin, np.less)


def _extreme(body: Body, find: Callable[..., Array], beats: Callable[..., Array]) -> dict[str, Array]:
    """The value that beats all others and its position: the first of equals, but any NaN first, as NumPy's argmax."""
    shape, seen = body.shape, 0
    value, index = np.zeros(shape, value_type(body.dtype)), np.zeros(shape, np.int64)
    for chunk in body.chunks():
        found = np.expand_dims(np.asarray(find(chunk, axis=0)), 0)
        candidate = np.take_along_axis(chunk, found, 0)[0]
        better = beats(candidate, value) | ((candidate != candidate) & (value == value)) if seen else np.True_
        value, index = np.where(better, candidate, value), np.where(better, found[0] + seen, index)
        seen += len(chunk)
    if not seen and body.is_needed:
        raise Malformed("the least or greatest of nothing", where="oracle")
    return {"value": value, "index": index}


def _welford(body: Body) -> dict[str, Array]:
    """In two passes: the mean, then the distances from it. A sum that the dtype cannot hold makes the mean infinite."""
    mean = np.zeros(body.shape)
    if body.count:
        total = _total(body, lambda chunk: chunk)
        held = rounded(total, f32 if body.dtype.is_half else body.dtype)
        mean = np.where(np.isinf(held), held, total / body.count)
    m2 = _total(body, lambda chunk: (chunk - mean) ** 2)
    return {"mean": rounded(mean, body.dtype), "m2": rounded(m2, body.dtype)}


def _softmax(body: Body) -> dict[str, Array]:
    """In two passes. If the greatest is infinite or NaN, so that its distance from itself is NaN, the sum is NaN."""
    if not body.count:
        nothing = np.zeros(body.shape, value_type(body.dtype))
        return {"max": nothing - np.inf, "sum": nothing}
    greatest = _greatest(body)["value"]
    return {"max": greatest, "sum": rounded(_total(body, lambda chunk: np.exp(chunk - greatest)), body.dtype)}


REDUCE: dict[str, Callable[[Body], dict[str, Array]]] = {
    "sum": _sum,
    "prod": _prod,
    "min": _least,
    "max": _greatest,
    "any": _any,
    "all": _all,
    "argmin": _least,
    "argmax": _greatest,
    "welford": _welford,
    "softmax": _softmax,
}


# ---- scans: running results along the first dimension


def _cumsum(value: Array, dtype: DType) -> tuple[Array, ...]:
    """From 0 on: adding it to what NumPy gives makes a 0.0 of the -0.0 that all sums may begin with."""
    return (_narrowed(np.cumsum(value, axis=0, dtype=_accumulation_type(dtype)) + 0, dtype),)


def _cumprod(value: Array, dtype: DType) -> tuple[Array, ...]:
    return (_narrowed(np.cumprod(value, axis=0, dtype=_accumulation_type(dtype)), dtype),)


def _logcumsumexp(value: Array, dtype: DType) -> tuple[Array, ...]:
    """From the logarithm of nothing on, which likewise leaves no -0.0."""
    return (rounded(np.logaddexp.accumulate(value.astype(_accumulation_type(dtype)), axis=0) + 0, dtype),)


def _running(value: Array, not_worse: Callable[..., Array]) -> tuple[Array, ...]:
    """The last of equals and the last NaN win; nothing but a NaN takes over from a NaN."""
    best, index = value.copy(), np.zeros(value.shape, np.int64)
    for k in range(1, len(value)):
        before = best[k - 1]
        takes_over = (value[k] != value[k]) | not_worse(value[k], before)
        best[k] = np.where(takes_over, value[k], before)
        index[k] = np.where(takes_over, k, index[k - 1])
    return best, index


def running(
    combine: Callable[..., tuple[Array, ...]], elements: Iterable[tuple[Array, ...]]
) -> Iterator[tuple[Array, ...]]:
    """What a fold comes to after each element, from left to right. The first is its own result."""
    state: tuple[Array, ...] | None = None
    for element in elements:
        state = element if state is None else combine(state, element)
        yield state


SCAN: dict[str, Callable[[Array, DType], tuple[Array, ...]]] = {
    "cumsum": _cumsum,
    "cumprod": _cumprod,
    "cummax": lambda value, dtype: _running(value, np.greater_equal),
    "cummin": lambda value, dtype: _running(value, np.less_equal),
    "logcumsumexp": _logcumsumexp,
}
