"""Rows of resampling: nearest, linear and cubic interpolation in one to three dimensions, and their backwards.

`Resized` is one dimension. Eager computes the place in the source in floats; where whole-number arithmetic gives the
same places for every element, `nearest` and `floor` use it, because o // 2 is a better index than one from data.
Backwards are gathers: every element of the source sums over the elements that may have read it. Where those cannot be
told beforehand (odd ratios of sizes that are not known), nearest scatters and the others stay in eager.

PyTorch splits these ops while it traces; `graph/whole.py` keeps them whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from ferrite.errors import Unsupported
from ferrite.loops.dtypes import DType, f32, f64, i64, u8
from ferrite.loops.index import (
    ONE,
    ZERO,
    Index,
    IndexLike,
    ceildiv,
    data,
    divides,
    floordiv,
    index,
    known_equal,
    maximum,
    minimum,
)
from ferrite.loops.nodes import Accumulate, Expr, Nest, Position
from ferrite.lower.gather import result_buffer
from ferrite.lower.pointwise import floats_only, limit
from ferrite.lower.pool import at_most, guarded, summed, zeros_of
from ferrite.lower.table import lowers
from ferrite.lower.value import (
    Built,
    Result,
    Tensor,
    accumulator,
    apply,
    axes_for,
    cast,
    compute_dtype,
    const,
    points,
    select,
)

aten = torch.ops.aten

NUMPY: dict[DType, Any] = {f32: np.float32, f64: np.float64}
MOST_DENOMINATOR = 1 << 12  # of a ratio that a given scale stands for


@dataclass(frozen=True)
class Resized:
    """One dimension: `extent` elements of the source become `count`. A scale that was given decides over the sizes;
    with `corners`, the first and last elements of both lie on each other."""

    extent: Index
    count: Index
    scale: float | None
    corners: bool = False

    @property
    def is_static(self) -> bool:
        return not self.extent.terms and not self.count.terms

    @property
    def ratio(self) -> tuple[Index, Index] | None:
        """Numerator and denominator of source elements for one result element; None if a scale hides them."""
        if self.corners:
            return self.extent - 1, self.count - 1
        if self.scale is None:
            return _reduced(self.extent, self.count)
        if self.is_static:
            step = Fraction(1 / self.scale).limit_denominator(MOST_DENOMINATOR)
            return index(step.numerator), index(step.denominator)
        whole = Fraction(self.scale)
        return (ONE, index(int(self.scale))) if whole.denominator == 1 and self._times(int(self.scale)) else None

    def _times(self, factor: int) -> bool:
        return known_equal(self.count, self.extent * factor)

    def step(self, dtype: DType) -> Expr:
        """Source elements for one result element, as eager rounds them to a float."""
        if self.is_static:
            return const(float(self._step(NUMPY[dtype])), dtype)
        if self.scale is not None and not self.corners:
            return const(float(NUMPY[dtype](1.0 / self.scale)), dtype)
        less = 1 if self.corners else 0
        number, count = (cast(Position(extent - less), dtype) for extent in (self.extent, self.count))
        step = apply("div", number, count)
        if not self.corners:
            return step
        return select(apply("gt", Position(self.count), Position(ONE)), step, const(0, dtype))

    def _step(self, kind: Any) -> Any:
        extent, count = self.extent.constant, self.count.constant
        if self.corners:
            return kind(extent - 1) / kind(count - 1) if count > 1 else kind(0)
        return kind(1.0 / self.scale) if self.scale is not None else kind(extent) / kind(count)

    def places(self, dtype: DType) -> Any:
        """The unlimited places of all elements, for a dimension of known size."""
        kind = NUMPY[dtype]
        here, step = np.arange(self.count.constant).astype(kind), self._step(kind)
        if self.corners:
            return step * here
        return (step.astype(np.longdouble) * (here + kind(0.5)) - kind(0.5)).astype(kind)

    def place(self, o: Index, dtype: DType) -> Expr:
        """The unlimited place in the source: step * (o + 0.5) - 0.5, rounded once."""
        here = cast(Position(o), dtype)
        if self.corners:
            return apply("mul", self.step(dtype), here)
        return apply("fma", self.step(dtype), apply("add", here, const(0.5, dtype)), const(-0.5, dtype))


def _reduced(extent: Index, count: Index) -> tuple[Index, Index]:
    if not extent.terms and not count.terms:
        step = Fraction(extent.constant, max(count.constant, 1))
        return index(step.numerator), index(step.denominator)
    if divides(extent, count) and not floordiv(count, extent).terms:
        return ONE, floordiv(count, extent)
    if divides(count, extent) and not floordiv(extent, count).terms:
        return floordiv(extent, count), ONE
    return extent, count


def resized(
    source: Sequence[Index], result: Sequence[Index], scales: Sequence[float | None], corners: bool = False
) -> list[Resized]:
    """One for each of the last dimensions. As in eager, a scale that is not positive counts for none."""
    rank = len(source) - 2
    given = [*scales, *([None] * rank)][:rank]
    if any(isinstance(scale, Index) for scale in given):
        raise Unsupported("resampling by a symbolic scale")
    return [
        Resized(extent, count, scale if scale is not None and scale > 0 else None, corners)
        for extent, count, scale in zip(source[2:], result[2:], given, strict=True)
    ]


def from_data(value: Expr, low: IndexLike, high: Index) -> Index:
    """A whole number in floats as an index, at most `high`."""
    whole = apply("minimum", cast(value, i64), Position(high))
    return data(whole, low, high)


# ---- nearest


@dataclass(frozen=True)
class Nearest:
    """Which element a result element copies. `exact` looks from the middle of an element. Eager has two kernels: one
    (`by_sizes`) computes in f32, and knows equal and doubled sizes whatever the scale; the other one computes in the
    dtype of the tensor."""

    dim: Resized
    exact: bool
    by_sizes: bool
    compute: DType

    def whole(self) -> tuple[Index, Index] | None:
        """The ratio p / q, if (p * o) // q, or (p * (2 * o + 1)) // (2 * q), is what eager reads for every o."""
        dim = self.dim
        if self.by_sizes and not self.exact:
            if known_equal(dim.extent, dim.count):
                return ONE, ONE
            if known_equal(dim.extent * 2, dim.count):
                return ONE, index(2)
        ratio = dim.ratio
        if ratio is None:
            return None
        p, q = ratio
        if dim.is_static:
            here = np.arange(dim.count.constant)
            twice = 2 * here + 1 if self.exact else 2 * here
            return ratio if np.array_equal(twice * p.constant // (2 * q.constant), self._table()) else None
        # Only steps that a float holds: whole numbers, and one over a power of two.
        is_exact = q is ONE or (p is ONE and not q.terms and q.constant & (q.constant - 1) == 0)
        return ratio if is_exact and not p.terms else None

    def _table(self) -> Any:
        kind = NUMPY[self.compute]
        step, here = self.dim._step(kind), np.arange(self.dim.count.constant)
        if not self.exact:
            found = here.astype(kind) * step
        elif self.by_sizes:
            found = (here + 0.5) * np.float64(step)
        else:
            found = np.maximum(self.dim.places(self.compute), 0) + kind(0.5)
        return np.minimum(np.floor(found.astype(np.float32)).astype(np.int64), self.dim.extent.constant - 1)

    def source(self, o: Index) -> Index:
        ratio = self.whole()
        if ratio is not None:
            p, q = ratio
            return floordiv(p * (2 * o + 1), 2 * q) if self.exact else floordiv(p * o, q)
        dim, compute = self.dim, self.compute
        if not self.exact:
            found = apply("mul", cast(Position(o), compute), dim.step(compute))
        elif self.by_sizes:
            middle = apply("add", cast(Position(o), f64), const(0.5, f64))
            found = apply("mul", middle, cast(dim.step(compute), f64))
        else:
            found = apply("add", apply("maximum", dim.place(o, compute), const(0, compute)), const(0.5, compute))
        value = apply("floor", cast(found, f32))
        place = from_data(value, 0, dim.extent - 1)
        if not self.by_sizes or self.exact or dim.scale is None or dim.is_static:
            return place
        same, doubled = (apply("eq", Position(dim.count), Position(dim.extent * k)) for k in (1, 2))
        by_size = select(doubled, Position(floordiv(o, 2)), Position(place))
        return data(select(same, Position(o), by_size), 0, dim.extent - 1)

    def readers(self, i: Index) -> Index:
        """The first result element that reads source element i or a later one; only if `whole`."""
        ratio = self.whole()
        assert ratio is not None
        p, q = ratio
        return ceildiv(2 * q * i - p, 2 * p) if self.exact else ceildiv(q * i, p)


def nearest(rank: int, exact: bool) -> Callable[..., Tensor]:
    """In two dimensions eager decides by the sizes, in one and three it computes in the dtype of the tensor."""

    def row(x: Tensor, sizes: Any, *scales: Any, result: Result) -> Tensor:
        if not (x.dtype.is_float or x.dtype is u8):
            raise Unsupported(f"upsample_nearest{rank}d of {x.dtype}", why="eager raises")
        compute = f64 if x.dtype is f64 and rank != 2 else f32
        dims = [Nearest(dim, exact, rank == 2, compute) for dim in resized(x.sizes, result.sizes, scales)]
        axes = axes_for(result.sizes)
        batch, channel, *here = points(axes)
        return Tensor(axes, x.at([batch, channel, *(dim.source(o) for dim, o in zip(dims, here, strict=True))]))

    return row


def nearest_backward(rank: int, exact: bool) -> Callable[..., Tensor | Built]:
    """Sums run in at least f32 and are rounded once. In every rank eager decides by the sizes."""

    def row(grad: Tensor, sizes: Any, source_sizes: Any, *scales: Any, result: Result) -> Tensor | Built:
        floats_only(grad, f"upsample_nearest{rank}d_backward")
        dims = [Nearest(dim, exact, True, f32) for dim in resized(result.sizes, grad.sizes, scales)]
        if any(dim.whole() is None for dim in dims):
            return _nearest_scattered(grad, dims, result)
        compute = compute_dtype(grad.dtype)
        axes = axes_for(result.sizes)
        batch, channel, *here = points(axes)
        turns = [ceildiv(q, p) for p, q in (dim.whole() or (ONE, ONE) for dim in dims)]

        def term(steps: Sequence[IndexLike]) -> Expr:
            places = [dim.readers(i) + step for dim, i, step in zip(dims, here, steps, strict=True)]
            conditions = []
            for dim, i, place in zip(dims, here, places, strict=True):
                conditions += at_most(0, place)
                conditions += at_most(place + 1, minimum(dim.readers(i + 1), dim.dim.count))
            return guarded(conditions, cast(grad.at([batch, channel, *places]), compute), const(0, compute))

        return Tensor(axes, summed(term, turns, grad.dtype, grad))

    return row


def _nearest_scattered(grad: Tensor, dims: Sequence[Nearest], result: Result) -> Built:
    if accumulator(grad.dtype) is not grad.dtype:
        raise Unsupported("the backward of nearest resampling of halves by an odd ratio", why="eager sums in f32")
    buffer = result_buffer(result)
    axes = axes_for(grad.sizes)
    batch, channel, *here = points(axes)
    target = (batch, channel, *(dim.source(o) for dim, o in zip(dims, here, strict=True)))
    nest = Nest(axes, (Accumulate("add", buffer, target, grad.at(points(axes))),))
    return Built((buffer,), (zeros_of(buffer), nest))


# ---- linear and cubic


@dataclass(frozen=True)
class Weighted:
    """One dimension of an interpolation: element o is a weighted sum of neighbours, two if linear, four if cubic."""

    dim: Resized
    cubic: bool
    compute: DType

    @property
    def reach(self) -> int:
        """How many neighbours lie on either side."""
        return 2 if self.cubic else 1

    def taps(self, o: Index) -> list[tuple[Index, Expr]]:
        """The neighbours of o and their weights. Neighbours outside are those at the edge."""
        dim, compute = self.dim, self.compute
        if not self.cubic and known_equal(dim.extent, dim.count):
            # Eager copies, whatever the scale: the weight of the second neighbour, the element itself, is 0.
            return [(o, const(1, compute)), (o, const(0, compute))]
        place = dim.place(o, compute)
        if not self.cubic and not dim.corners:
            place = apply("maximum", place, const(0, compute))
        base = self.base(o, place)
        ahead = limit(apply("sub", place, cast(Position(base), compute)), const(0, compute), const(1, compute))
        if self.cubic:
            weights = _cubic_weights(ahead)
            return [(self._inside(base - 1 + number), weight) for number, weight in enumerate(weights)]
        return [(base, apply("sub", const(1, compute), ahead)), (minimum(base + 1, dim.extent - 1), ahead)]

    def _inside(self, place: Index) -> Index:
        return minimum(maximum(place, 0), self.dim.extent - 1)

    def base(self, o: Index, place: Expr) -> Index:
        """The last neighbour that is not behind the place; eager rounds the place to f32 before it cuts."""
        low = -1 if self.cubic and not self.dim.corners else 0
        whole = self._whole()
        if whole is not None:
            p, q = whole
            cut = floordiv(p * o, q) if self.dim.corners else floordiv(p * (2 * o + 1) - q, 2 * q)
            return maximum(cut, low)
        return from_data(apply("floor", cast(place, f32)), low, self.dim.extent - 1)

    def _whole(self) -> tuple[Index, Index] | None:
        """The ratio, if whole numbers cut as floats do."""
        if not self.dim.is_static:
            return None
        ratio = self._ratio()
        if ratio is None:
            return None
        p, q = ratio[0].constant, ratio[1].constant
        here = np.arange(self.dim.count.constant)
        cut = here * p // q if self.dim.corners else (p * (2 * here + 1) - q) // (2 * q)
        return ratio if np.array_equal(np.maximum(cut, -1 if self.cubic else 0), self._table()) else None

    def _ratio(self) -> tuple[Index, Index] | None:
        ratio = self.dim.ratio
        return None if ratio is None or ratio[1] is ZERO else ratio  # one result element that is both corners

    def _table(self) -> Any:
        places = self.dim.places(self.compute)
        if not self.cubic:
            places = np.maximum(places, 0)
        return np.minimum(np.floor(places.astype(np.float32)).astype(np.int64), self.dim.extent.constant - 1)

    def readers(self, i: Index) -> tuple[Index, Index]:
        """A result element before all that may read source element i, and how many there are at most.

        o reads i if its place is less than `reach` away. One more on either side allows for rounding.
        """
        if self.dim.extent is ONE or self.dim.count is ONE:
            return ZERO, self.dim.count
        ratio = self._ratio()
        if ratio is None:
            raise Unsupported("the backward of resampling by a scale of symbolic sizes")
        p, q = ratio
        shift = ZERO if self.dim.corners else q - p
        first = floordiv(2 * q * (i - self.reach) + shift, 2 * p)
        count = ceildiv(2 * self.reach * q, p) + 2
        if self.dim.is_static:
            self._prove_readers(p.constant, q.constant, shift.constant, count)
        return first, count

    def _prove_readers(self, p: int, q: int, shift: int, count: Index) -> None:
        """Every element that reads i is among its readers; a scale that does not fit the sizes may put more at an edge.
        What is read with a weight of 0 does not count."""
        here, base, last = np.arange(self.dim.count.constant), self._table(), self.dim.extent.constant - 1
        reads_next = np.maximum(self.dim.places(self.compute), 0) > base
        for ahead in range(1 - self.reach, self.reach + 1):
            i = np.clip(base + ahead, 0, last)
            first = (2 * q * (i - self.reach) + shift) // (2 * p)
            is_reader = (first <= here) & (here < first + count.constant)
            if not (is_reader | (~reads_next if ahead == self.reach else False)).all():
                raise Unsupported("the backward of resampling by a scale that does not fit the sizes")


def _cubic_weights(t: Expr) -> list[Expr]:
    """Weights of the four neighbours for a place t behind the second one; eager's polynomials, with a = -0.75."""

    def number(value: float) -> Expr:
        return const(value, t.dtype)

    def near(v: Expr) -> Expr:  # ((a + 2) v - (a + 3)) v v + 1
        inner = apply("sub", apply("mul", number(1.25), v), number(2.25))
        return apply("add", apply("mul", apply("mul", inner, v), v), number(1))

    def far(v: Expr) -> Expr:  # ((a v - 5 a) v + 8 a) v - 4 a
        inner = apply("add", apply("mul", number(-0.75), v), number(3.75))
        return apply("add", apply("mul", apply("add", apply("mul", inner, v), number(-6)), v), number(3))

    back = apply("sub", number(1), t)
    return [far(apply("add", t, number(1))), near(t), near(back), far(apply("add", back, number(1)))]


def interpolate(cubic: bool, round_weights: bool) -> Callable[..., Tensor]:
    """Weighted sums from the last dimension to the first, in at least f32, rounded once. With `round_weights` eager
    keeps weights in the dtype of the tensor."""

    def row(x: Tensor, sizes: Any, corners: bool, *scales: Any, result: Result) -> Tensor:
        floats_only(x, "interpolation")
        compute = compute_dtype(x.dtype)
        axes = axes_for(result.sizes)
        batch, channel, *here = points(axes)
        taps = []
        for dim, o in zip(resized(x.sizes, result.sizes, scales, corners), here, strict=True):
            found = Weighted(dim, cubic, compute).taps(o)
            taps.append(_rounded(found, x.dtype, cubic) if round_weights and x.dtype.is_half else found)

        def sum_from(dim: int, places: list[Index]) -> Expr:
            if dim == len(taps):
                return cast(x.at([batch, channel, *places]), compute)
            terms = [apply("mul", sum_from(dim + 1, [*places, place]), weight) for place, weight in taps[dim]]
            total = terms[0]
            for term in terms[1:]:
                total = apply("add", total, term)
            return total

        return Tensor(axes, cast(sum_from(0, []), x.dtype))

    return row


def _rounded(taps: list[tuple[Index, Expr]], dtype: DType, cubic: bool) -> list[tuple[Index, Expr]]:
    """Weights that were kept as halves; the first linear one is what is left of 1 then."""
    halves = [cast(cast(weight, dtype), f32) for _, weight in taps]
    if not cubic:
        halves[0] = cast(cast(apply("sub", const(1, f32), halves[1]), dtype), f32)
    return [(place, weight) for (place, _), weight in zip(taps, halves, strict=True)]


def interpolate_backward(cubic: bool) -> Callable[..., Tensor]:
    """Every element of the source sums over what may have read it, in at least f32, rounded once. An infinite gradient
    gives NaN where the weight is 0, as in eager; but not to all of the elements beyond an edge, which it reads too."""

    def row(grad: Tensor, sizes: Any, source_sizes: Any, corners: bool, *scales: Any, result: Result) -> Tensor:
        floats_only(grad, "the backward of interpolation")
        compute = compute_dtype(grad.dtype)
        dims = [Weighted(d, cubic, compute) for d in resized(result.sizes, grad.sizes, scales, corners)]
        axes = axes_for(result.sizes)
        batch, channel, *here = points(axes)
        if cubic and all(known_equal(d.dim.extent, d.dim.count) for d in dims):
            return Tensor(axes, grad.at(points(axes)))  # eager copies, whatever the scale
        found = [dim.readers(i) for dim, i in zip(dims, here, strict=True)]

        def term(steps: Sequence[IndexLike]) -> Expr:
            places = [first + step for (first, _), step in zip(found, steps, strict=True)]
            ranges: list[Expr] = []
            reads: list[Expr] = []
            value: Expr = cast(grad.at([batch, channel, *places]), compute)
            for dim, i, place in zip(dims, here, places, strict=True):
                ranges += [*at_most(0, place), *at_most(place, dim.dim.count - 1)]
                weight, read = _weight_at(dim.taps(place), Position(i))
                value = apply("mul", value, weight)
                reads.append(read)
            zero = const(0, compute)
            return guarded(ranges, guarded(reads, value, zero), zero)

        return Tensor(axes, summed(term, [count for _, count in found], grad.dtype, grad))

    return row


def _weight_at(taps: Sequence[tuple[Index, Expr]], place: Expr) -> tuple[Expr, Expr]:
    """The sum of the weights that a source element has among the taps, and whether it is one of them."""
    weight: Expr | None = None
    read: Expr | None = None
    for tap, part in taps:
        here = apply("eq", Position(tap), place)
        part = select(here, part, const(0, part.dtype))
        weight = part if weight is None else apply("add", weight, part)
        read = here if read is None else apply("or_", read, here)
    assert weight is not None
    assert read is not None
    return weight, read


for _rank, _plain, _exact in (
    (1, "upsample_nearest1d", "_upsample_nearest_exact1d"),
    (2, "upsample_nearest2d", "_upsample_nearest_exact2d"),
    (3, "upsample_nearest3d", "_upsample_nearest_exact3d"),
):
    for _name, _from_middle in ((_plain, False), (_exact, True)):
        lowers(getattr(aten, _name).default)(nearest(_rank, _from_middle))
        lowers(getattr(aten, f"{_name}_backward").default)(nearest_backward(_rank, _from_middle))

lowers(aten.upsample_linear1d.default)(interpolate(cubic=False, round_weights=True))
lowers(aten.upsample_bilinear2d.default)(interpolate(cubic=False, round_weights=False))
lowers(aten.upsample_trilinear3d.default)(interpolate(cubic=False, round_weights=True))
lowers(aten.upsample_bicubic2d.default)(interpolate(cubic=True, round_weights=True))
lowers(
    aten.upsample_linear1d_backward.default,
    aten.upsample_bilinear2d_backward.default,
    aten.upsample_trilinear3d_backward.default,
)(interpolate_backward(cubic=False))
lowers(aten.upsample_bicubic2d_backward.default)(interpolate_backward(cubic=True))
