"""Rows of pools: the greatest or the mean of every window, fixed or adaptive, and their backwards.

A window is a box of its own: a forward pool reduces over it, with a guard where it hangs over the edge. A backward pool
is a gather too: every place of the input sums over the windows that may cover it. `Sliding` and `Adaptive` say for one
dimension which places a window covers and which windows cover a place; `pad.py` unfolds and folds with them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product as box
from typing import Any, TypeAlias

import torch

from ferrite.errors import Unsupported
from ferrite.loops.dtypes import DType, i64
from ferrite.loops.index import (
    ONE,
    ZERO,
    Axis,
    Index,
    IndexLike,
    ceildiv,
    divides,
    floordiv,
    index,
    known_nonnegative,
    maximum,
    minimum,
    product,
)
from ferrite.loops.nodes import Accumulate, Apply, Buffer, Expr, Guarded, Load, Nest, Position, Reduce, Store
from ferrite.loops.shapes import reshape_index
from ferrite.lower.gather import fill_nest, position, result_buffer, written
from ferrite.lower.pointwise import floats_only
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
    reduce_axes,
    select,
)

aten = torch.ops.aten

# Sums of halves are written out up to this many terms; Note [Sums of halves].
MAX_TERMS = 9


# ---- windows


# A window is one dimension of a pool. Places are indices into the input (`extent`), windows are indices into the output
# (`count`). A tap counts the places of a window, at most `taps`; a turn counts the windows that may cover a place, at
# most `turns`. `inside` lists what must hold for a tap to be a place of the input; `over` gives the window of a turn,
# and what must hold for it to be one; `reaches` lists what must hold for that window to cover the place.


@dataclass(frozen=True)
class Sliding:
    """Windows of one shape at a fixed stride; padding, and the last window in ceil mode, hang over the edge."""

    extent: Index
    count: Index
    kernel: Index
    stride: Index
    padding: Index
    dilation: Index
    ceil_mode: bool

    @property
    def taps(self) -> Index:
        return self.kernel

    @cached_property
    def turns(self) -> Index:
        return floordiv((self.kernel - 1) * self.dilation, self.stride) + 1

    @property
    def may_start_outside(self) -> bool:
        return self.padding is not ZERO

    def place(self, window: IndexLike, tap: IndexLike) -> Index:
        return self.stride * window - self.padding + self.dilation * tap

    def first(self, window: Index) -> Index:
        """The first place of the window that is not before the input."""
        start = self.place(window, 0)
        return start + self.dilation * maximum(ceildiv(-start, self.dilation), 0)

    def inside(self, window: Index, tap: Index) -> list[Expr]:
        place = self.place(window, tap)
        conditions = at_most(0, place) if self.may_start_outside else []
        if self.may_start_outside or self.ceil_mode:
            conditions += at_most(place, self.extent - 1)
        return conditions

    def over(self, place: Index, turn: IndexLike) -> tuple[Index, list[Expr]]:
        """The last turn is the last window that does not start behind the place."""
        window = floordiv(place + self.padding, self.stride) - (self.turns - 1) + turn
        return window, [*at_most(0, window), *at_most(window, self.count - 1)]

    def reaches(self, window: Index, place: Index) -> list[Expr]:
        return at_most(place - self.place(window, 0), (self.kernel - 1) * self.dilation)

    def length(self, window: IndexLike, count_pad: bool) -> Index:
        """By what a mean divides: padding counts or not, what ceil mode adds behind it never does."""
        if count_pad and not self.ceil_mode:
            return self.kernel
        start = self.place(window, 0)
        if count_pad:
            return minimum(start + self.kernel, self.extent + self.padding) - start
        return minimum(start + self.kernel, self.extent) - maximum(start, 0)


@dataclass(frozen=True)
class Adaptive:
    """As many windows as are asked for: window w covers [floor(w * extent / count), ceil((w + 1) * extent / count))."""

    extent: Index
    count: Index

    @cached_property
    def taps(self) -> Index:
        return _longest(self.extent, self.count)

    @cached_property
    def turns(self) -> Index:
        return _longest(self.count, self.extent)

    def place(self, window: IndexLike, tap: IndexLike) -> Index:
        return floordiv(self.extent * window, self.count) + tap

    def end(self, window: IndexLike) -> Index:
        return ceildiv(self.extent * (index(window) + 1), self.count)

    def inside(self, window: Index, tap: Index) -> list[Expr]:
        if divides(self.count, self.extent):
            return []
        return at_most(self.place(window, tap) + 1, self.end(window))

    def over(self, place: Index, turn: IndexLike) -> tuple[Index, list[Expr]]:
        window = floordiv(self.count * place, self.extent) + turn
        if turn == 0 or divides(self.extent, self.count):
            return window, []
        return window, at_most(window + 1, ceildiv(self.count * (place + 1), self.extent))

    def reaches(self, window: Index, place: Index) -> list[Expr]:
        return []  # every window that `over` gives

    def length(self, window: IndexLike) -> Index:
        return self.end(window) - self.place(window, 0)


Window: TypeAlias = Sliding | Adaptive


def _longest(extent: Index, count: Index) -> Index:
    """The most places that one of `count` adaptive windows over `extent` has. A window starts up to count - gcd
    fractions of a place before its first whole one; sizes that are not known share no divisor."""
    if divides(count, extent):
        return floordiv(extent, count)
    common = 1 if extent.terms or count.terms else math.gcd(extent.constant, count.constant)
    return floordiv(extent + 2 * count - common - 1, count)


def at_most(left: IndexLike, right: IndexLike) -> list[Expr]:
    """The condition left <= right, unless it always holds."""
    left, right = index(left), index(right)
    return [] if known_nonnegative(right - left) else [apply("le", Position(left), Position(right))]


def guarded(conditions: Sequence[Expr], value: Expr, otherwise: Expr) -> Expr:
    """The value where all conditions hold."""
    if not conditions:
        return value
    together = conditions[0]
    for condition in conditions[1:]:
        together = apply("and_", together, condition)
    return Guarded(together, value, otherwise)


def sliding(
    x: Tensor,
    result_sizes: Sequence[Index],
    rank: int,
    kernel: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    ceil: bool,
) -> list[Sliding]:
    """One window for each of the last dimensions of x. One number stands for all; no stride means the kernel."""

    def each(given: Any) -> list[Index]:
        values = [given] if isinstance(given, (int, Index)) else list(given)
        return [index(value) for value in (values * rank if len(values) == 1 else values)]

    parts = zip(*(each(part) for part in (kernel, stride or kernel, padding, dilation)), strict=True)
    return [
        Sliding(extent, count, taps, step, around, apart, ceil)
        for extent, count, (taps, step, around, apart) in zip(x.sizes[-rank:], result_sizes[-rank:], parts, strict=True)
    ]


def adaptive(x_sizes: Sequence[Index], result_sizes: Sequence[Index], rank: int) -> list[Adaptive]:
    windows = [Adaptive(e, c) for e, c in zip(x_sizes[-rank:], result_sizes[-rank:], strict=True)]
    if not all(known_nonnegative(part - 1) for window in windows for part in (window.extent, window.count)):
        raise Unsupported("an adaptive pool of a dimension that may be empty")
    return windows


def tap_axes(extents: Sequence[Index], *sources: Tensor) -> tuple[Axis, ...]:
    """Axes to reduce over that none of the sources uses."""
    return reduce_axes(Apply("eq", tuple(source.body for source in sources)), extents)  # only looked at, never kept


def flat(places: Sequence[Index], extents: Sequence[Index]) -> Index:
    """The position in row-major order."""
    result = ZERO
    for place, extent in zip(places, extents, strict=True):
        result = result * extent + place
    return result


# ---- the greatest


def lowest(dtype: DType) -> Expr:
    """What loses against everything: -inf, or the least integer."""
    if dtype.is_float:
        return const(-math.inf, dtype)
    return const(-(1 << (dtype.bits - 1)) if dtype.signed else 0, dtype)


def greatest(x: Tensor, sizes: Sequence[Index], windows: Sequence[Window]) -> tuple[Tensor, Tensor]:
    """The greatest element of every window, and its position in the plane of the input.

    Eager keeps the first of equals, but takes every NaN that it meets: the position is that of the last one. Padding
    never wins: the position in a window of nothing but -inf is that of the first element.
    """
    if x.dtype.is_bool:
        raise Unsupported("a pool of truth values", why="eager raises")
    if not all(known_nonnegative(window.taps - 1) for window in windows):
        raise Unsupported("a pool over windows that may be empty")
    rank = len(windows)
    axes = axes_for(sizes)
    here = points(axes)
    lead, outer = here[:-rank], here[-rank:]
    taps = tap_axes([window.taps for window in windows], x)
    extents = [window.extent for window in windows]
    places = [window.place(o, r) for window, o, r in zip(windows, outer, points(taps), strict=True)]
    conditions = [c for window, o, r in zip(windows, outer, points(taps), strict=True) for c in window.inside(o, r)]
    element = x.at([*lead, *places])
    value = Reduce("argmax", taps, guarded(conditions, element, lowest(x.dtype)), "value")

    start = [window.place(o, 0) for window, o in zip(windows, outer, strict=True)]
    where = apply("add", Position(flat(start, extents)), _steps(value, windows, extents))
    if any(isinstance(window, Sliding) and window.may_start_outside for window in windows):
        first = [w.first(o) if isinstance(w, Sliding) else w.place(o, 0) for w, o in zip(windows, outer, strict=True)]
        nothing = apply("eq", value, lowest(x.dtype))
        where = select(nothing, Position(flat(first, extents)), where)
    if x.dtype.is_float:
        absent = const(-1, i64)
        is_nan = select(apply("isnan", element), Position(flat(places, extents)), absent)
        last_nan = Reduce("max", taps, guarded(conditions, is_nan, absent), "value")
        where = Guarded(apply("isnan", value), last_nan, where)
    return Tensor(axes, value), Tensor(axes, where)


def _steps(value: Reduce, windows: Sequence[Window], extents: Sequence[Index]) -> Expr:
    """How far the winning tap lies behind the start of its window, in the plane of the input."""
    rest: Expr = Reduce(value.operation, value.axes, value.body, "index")
    steps: Expr | None = None
    distance = ONE  # between neighbours of this dimension, in the plane
    for number in reversed(range(len(windows))):
        window, taps = windows[number], windows[number].taps
        if taps is not ONE:
            is_first = all(outer.taps is ONE for outer in windows[:number])
            tap = rest if is_first else apply("floormod", rest, Position(taps))
            rest = rest if is_first else apply("floordiv", rest, Position(taps))
            step = distance * (window.dilation if isinstance(window, Sliding) else ONE)
            tap = tap if step is ONE else apply("mul", tap, Position(step))
            steps = tap if steps is None else apply("add", steps, tap)
        distance = distance * extents[number]
    return steps if steps is not None else const(0, i64)


def max_pool(rank: int) -> Callable[..., Any]:
    def row(
        x: Tensor,
        kernel: Any,
        stride: Any = (),
        padding: Any = 0,
        dilation: Any = 1,
        ceil: bool = False,
        *,
        result: Any,
    ) -> tuple[Tensor, Tensor]:
        sizes = result[0].sizes
        return greatest(x, sizes, sliding(x, sizes, rank, kernel, stride, padding, dilation, ceil))

    return row


def adaptive_max_pool(rank: int) -> Callable[..., Any]:
    def row(x: Tensor, sizes: Any, *, result: Any) -> tuple[Tensor, Tensor]:
        floats_only(x, f"adaptive_max_pool{rank}d")
        return greatest(x, result[0].sizes, adaptive(x.sizes, result[0].sizes, rank))

    return row


lowers(aten.max_pool2d_with_indices.default)(max_pool(2))
lowers(aten.max_pool3d_with_indices.default)(max_pool(3))
lowers(aten.adaptive_max_pool2d.default)(adaptive_max_pool(2))
lowers(aten.adaptive_max_pool3d.default)(adaptive_max_pool(3))


# ---- sums over the windows of a place

# Note [Sums of halves]
#
# Eager's backwards keep halves in memory: every share is rounded, and so is every sum so far, in the order of the
# windows. A gather does the same if its sum is written out, term by term; over many windows, or an unknown number of
# them, the loops scatter instead, in eager's order.


def few(extents: Sequence[Index]) -> bool:
    """Whether a sum over a box is short enough to be written out."""
    return not any(extent.terms for extent in extents) and math.prod(e.constant for e in extents) <= MAX_TERMS


def summed(
    term: Callable[[Sequence[IndexLike]], Expr], extents: Sequence[Index], dtype: DType, *sources: Tensor
) -> Expr:
    """The sum of `term` over a box, in its own dtype, then as `dtype`; from zero upwards, so that -0.0 alone gives 0.0.
    Halves are added one by one: there must be few."""
    axes = tap_axes(extents, *sources)
    whole = term(points(axes))
    if not whole.dtype.is_half and any(extent is not ONE for extent in extents):
        return cast(Reduce("sum", axes, whole, "value"), dtype)
    result = const(0, whole.dtype)
    for place in box(*(range(extent.constant) for extent in extents)):
        result = apply("add", result, term(place))
    return cast(result, dtype)


def zeros_of(buffer: Buffer) -> Nest:
    return fill_nest(buffer, Tensor(axes_for(buffer.sizes), const(0, buffer.dtype)))


def gathered(
    grad: Tensor, x: Tensor, windows: Sequence[Window], share: Callable[[list[Index]], Expr], *more: Tensor, reach: bool
) -> Tensor:
    """For every place of x, the sum of `share(window)` over the windows near it; with `reach`, those that reach it."""
    rank = len(windows)
    here = points(x.axes)
    chosen: dict[tuple[int, IndexLike], tuple[Index, list[Expr]]] = {}

    def choose(dim: int, turn: IndexLike) -> tuple[Index, list[Expr]]:
        if (dim, turn) not in chosen:
            window, place = windows[dim], here[dim - rank]
            over, conditions = window.over(place, turn)
            chosen[dim, turn] = over, conditions + (window.reaches(over, place) if reach else [])
        return chosen[dim, turn]

    def term(turns: Sequence[IndexLike]) -> Expr:
        found = [choose(dim, turn) for dim, turn in enumerate(turns)]
        conditions = [condition for _, needs in found for condition in needs]
        return guarded(conditions, share([*here[:-rank], *(over for over, _ in found)]), const(0, grad.dtype))

    return Tensor(x.axes, summed(term, [window.turns for window in windows], grad.dtype, grad, *more))


def must_scatter(grad: Tensor, windows: Sequence[Window]) -> bool:
    """See Note [Sums of halves]."""
    return grad.dtype.is_half and not few([window.turns for window in windows])


def scattered(grad: Tensor, windows: Sequence[Window], share: Callable[[list[Index]], Expr], result: Result) -> Built:
    """Every window adds `share(window)` to its places; a tap outside adds 0 to the place at the edge."""
    rank = len(windows)
    buffer = result_buffer(result)
    outer = axes_for(grad.sizes)
    taps = tap_axes([window.taps for window in windows], grad)
    chosen = points(outer)
    along = list(zip(windows, chosen[-rank:], points(taps), strict=True))
    places = [minimum(maximum(window.place(o, r), 0), window.extent - 1) for window, o, r in along]
    conditions = [condition for window, o, r in along for condition in window.inside(o, r)]
    value = guarded(conditions, share(list(chosen)), const(0, grad.dtype))
    added = Accumulate("add", buffer, (*chosen[:-rank], *places), value)
    return Built((buffer,), (zeros_of(buffer), Nest((*outer, *taps), (added,))))


def to_the_greatest(
    grad: Tensor, x: Tensor, indices: Tensor, windows: Sequence[Window], result: Result
) -> Tensor | Built:
    """The gradient goes to the place that the forward pool names. Eager does not check what is named, and writes there:
    a gather passes over what is outside, a scatter raises."""
    extents = [window.extent for window in windows]
    if must_scatter(grad, windows):
        buffer = result_buffer(result)
        axes = axes_for(grad.sizes)
        here = points(axes)
        lead, plane = here[: -len(windows)], product(extents)
        named = position(
            indices.at(here), plane, wrap=False, error="IndexError", message="max index {index} out of range"
        )
        target = reshape_index([*lead, named], [*x.sizes[: -len(windows)], plane], x.sizes)
        return Built((buffer,), (zeros_of(buffer), Nest(axes, (Accumulate("add", buffer, target, grad.at(here)),))))
    place = Position(flat(points(x.axes)[-len(windows) :], extents))

    def share(chosen: list[Index]) -> Expr:
        named = apply("eq", cast(indices.at(chosen), i64), place)
        return select(named, grad.at(chosen), const(0, grad.dtype))

    return gathered(grad, x, windows, share, indices, reach=False)


def max_pool_backward(rank: int) -> Callable[..., Tensor | Built]:
    def row(
        grad: Tensor,
        x: Tensor,
        kernel: Any,
        stride: Any,
        padding: Any,
        dilation: Any,
        ceil: bool,
        indices: Tensor,
        *,
        result: Result,
    ) -> Tensor | Built:
        floats_only(grad, f"max_pool{rank}d_backward")
        windows = sliding(x, grad.sizes, rank, kernel, stride, padding, dilation, ceil)
        return to_the_greatest(grad, x, indices, windows, result)

    return row


def adaptive_max_pool_backward(rank: int) -> Callable[..., Tensor | Built]:
    def row(grad: Tensor, x: Tensor, indices: Tensor, *, result: Result) -> Tensor | Built:
        floats_only(grad, f"adaptive_max_pool{rank}d_backward")
        return to_the_greatest(grad, x, indices, adaptive(x.sizes, grad.sizes, rank), result)

    return row


lowers(aten.max_pool2d_with_indices_backward.default)(max_pool_backward(2))
lowers(aten.max_pool3d_with_indices_backward.default)(max_pool_backward(3))
lowers(aten.adaptive_max_pool2d_backward.default)(adaptive_max_pool_backward(2))
lowers(aten.adaptive_max_pool3d_backward.default)(adaptive_max_pool_backward(3))


# ---- means


def mean_of(x: Tensor, sizes: Sequence[Index], windows: Sequence[Window], divide: Callable[..., Expr]) -> Tensor:
    """The sum of every window in at least f32, divided by `divide(sum, window)`, rounded once."""
    rank = len(windows)
    axes = axes_for(sizes)
    here = points(axes)
    lead, outer = here[:-rank], here[-rank:]
    taps = tap_axes([window.taps for window in windows], x)
    along = list(zip(windows, outer, points(taps), strict=True))
    element = cast(x.at([*lead, *(window.place(o, r) for window, o, r in along)]), accumulator(x.dtype))
    conditions = [condition for window, o, r in along for condition in window.inside(o, r)]
    total = Reduce("sum", taps, guarded(conditions, element, const(0, element.dtype)), "value")
    return Tensor(axes, cast(divide(total, outer), x.dtype))


def divided(value: Expr, divisors: Sequence[Index]) -> Expr:
    """The value over the product of the divisors; integers are rounded towards 0."""
    known = math.prod(divisor.constant for divisor in divisors if not divisor.terms)
    factors: list[Expr] = [Position(divisor) for divisor in divisors if divisor.terms]
    if known != 1 or not factors:
        factors.append(const(known, i64))
    number = factors[0]
    for factor in factors[1:]:
        number = apply("mul", number, factor)
    return apply("div" if value.dtype.is_float else "truncdiv", value, cast(number, value.dtype))


def divisors_of(windows: Sequence[Sliding], place: Sequence[Index], count_pad: bool, override: Any) -> list[Index]:
    if override is not None:
        return [index(override)]
    return [window.length(o, count_pad) for window, o in zip(windows, place, strict=True)]


def shared_out(
    grad: Tensor, x: Tensor, windows: Sequence[Window], share: Callable[[list[Index]], Expr], result: Result
) -> Tensor | Built:
    if must_scatter(grad, windows):
        return scattered(grad, windows, share, result)
    return gathered(grad, x, windows, share, reach=True)


def _averages(dtype: DType, rank: int) -> None:
    """Eager has means of floats and of i64; in three dimensions none of halves."""
    if not (dtype.is_float or dtype is i64) or (dtype.is_half and rank == 3):
        raise Unsupported(f"avg_pool{rank}d of {dtype}", why="eager raises")


def avg_pool(rank: int) -> Callable[..., Tensor]:
    def row(
        x: Tensor,
        kernel: Any,
        stride: Any = (),
        padding: Any = 0,
        ceil: bool = False,
        count_pad: bool = True,
        override: Any = None,
        *,
        result: Result,
    ) -> Tensor:
        _averages(x.dtype, rank)
        windows = sliding(x, result.sizes, rank, kernel, stride, padding, 1, ceil)

        def divide(total: Expr, place: Sequence[Index]) -> Expr:
            return divided(total, divisors_of(windows, place, count_pad, override))

        return mean_of(x, result.sizes, windows, divide)

    return row


def avg_pool_backward(rank: int) -> Callable[..., Tensor | Built]:
    """Every window gives each of its places an equal share, which is rounded before it is added."""

    def row(
        grad: Tensor,
        x: Tensor,
        kernel: Any,
        stride: Any,
        padding: Any,
        ceil: bool,
        count_pad: bool,
        override: Any,
        *,
        result: Result,
    ) -> Tensor | Built:
        _averages(grad.dtype, rank)
        floats_only(grad, f"avg_pool{rank}d_backward")
        windows = sliding(x, grad.sizes, rank, kernel, stride, padding, 1, ceil)

        def share(chosen: list[Index]) -> Expr:
            wide = cast(grad.at(chosen), compute_dtype(grad.dtype))
            return cast(divided(wide, divisors_of(windows, chosen[-rank:], count_pad, override)), grad.dtype)

        return shared_out(grad, x, windows, share, result)

    return row


lowers(aten.avg_pool2d.default)(avg_pool(2))
lowers(aten.avg_pool3d.default)(avg_pool(3))
lowers(aten.avg_pool2d_backward.default)(avg_pool_backward(2))
lowers(aten.avg_pool3d_backward.default)(avg_pool_backward(3))


def divided_in_turn(value: Expr, windows: Sequence[Adaptive], place: Sequence[Index], compute: DType) -> Expr:
    """The value over the length of its window, dimension by dimension, as eager's loops over planes do."""
    for window, o in zip(windows, place, strict=True):
        length = window.length(o)
        if length is not ONE:
            value = cast(divided(cast(value, compute), [length]), value.dtype)
    return value


def channels_are_last(result: Result) -> bool:
    """Whether eager runs its loops over channels: it does where the strides are those of channels last."""
    return len(result.sizes) == 4 and result.strides[1] is ONE and result.sizes[1] is not ONE


def adaptive_avg_pool(rank: int) -> Callable[..., Tensor | Built]:
    """Eager divides by one length after the other; in its loops over channels by their product."""

    def row(x: Tensor, sizes: Any, *, result: Result) -> Tensor | Built:
        floats_only(x, f"adaptive_avg_pool{rank}d")
        windows = adaptive(x.sizes, result.sizes, rank)
        if rank == 3 and x.dtype.is_half:
            return _rounded_mean(x, windows, result)

        def divide(total: Expr, place: Sequence[Index]) -> Expr:
            if channels_are_last(result):
                return divided(total, [window.length(o) for window, o in zip(windows, place, strict=True)])
            return divided_in_turn(total, windows, place, total.dtype)

        return mean_of(x, result.sizes, windows, divide)

    return row


def _rounded_mean(x: Tensor, windows: Sequence[Adaptive], result: Result) -> Built:
    """In three dimensions eager keeps the sum in memory: halves are rounded after every addition and every division."""
    buffer = result_buffer(result)
    outer = axes_for(result.sizes)
    taps = tap_axes([window.taps for window in windows], x)
    here = points(outer)
    lead, chosen = here[: -len(windows)], here[-len(windows) :]
    along = list(zip(windows, chosen, points(taps), strict=True))
    conditions = [condition for window, o, r in along for condition in window.inside(o, r)]
    element = x.at([*lead, *(window.place(o, r) for window, o, r in along)])
    added = Accumulate("add", buffer, here, guarded(conditions, element, const(0, x.dtype)))
    mean = divided_in_turn(Load(buffer, here), windows, chosen, compute_dtype(x.dtype))
    divide = Nest(outer, (Store(buffer, here, mean),))
    return Built((buffer,), (zeros_of(buffer), Nest((*outer, *taps), (added,)), divide))


def adaptive_avg_pool_backward(rank: int) -> Callable[..., Tensor | Built]:
    """Shares of halves are rounded after each division, in loops over channels after the only one."""

    def row(grad: Tensor, x: Tensor, *, result: Result) -> Tensor | Built:
        floats_only(grad, f"adaptive_avg_pool{rank}d_backward")
        windows = adaptive(x.sizes, grad.sizes, rank)
        compute = compute_dtype(grad.dtype)

        def share(chosen: list[Index]) -> Expr:
            outer = chosen[-rank:]
            if channels_are_last(result):
                lengths = [window.length(o) for window, o in zip(windows, outer, strict=True)]
                return cast(divided(cast(grad.at(chosen), compute), lengths), grad.dtype)
            return divided_in_turn(grad.at(chosen), windows, outer, compute)

        return shared_out(grad, x, windows, share, result)

    return row


lowers(aten._adaptive_avg_pool2d.default)(adaptive_avg_pool(2))
lowers(aten._adaptive_avg_pool3d.default)(adaptive_avg_pool(3))
lowers(aten._adaptive_avg_pool2d_backward.default)(adaptive_avg_pool_backward(2))
lowers(aten._adaptive_avg_pool3d_backward.default)(adaptive_avg_pool_backward(3))


# ---- what a greatest was taken from


def max_unpool(rank: int) -> Callable[..., Built]:
    """Values put back to the positions, counted within a plane, that a max pool took them from; zeros elsewhere.

    Of values that meet, the last one stays. The size that is asked for is in the result; eager's stride and padding do
    nothing. Eager's error names the sizes of a plane, so they have to be known.
    """

    def row(x: Tensor, indices: Tensor, sizes: Any, *ignored: Any, result: Result) -> Built:
        floats_only(x, f"max_unpool{rank}d")
        if indices.dtype is not i64 or indices.sizes != x.sizes:
            raise Unsupported("positions of another shape or dtype", why="eager raises")
        plane = result.sizes[-rank:]
        if ZERO in (*x.sizes, *result.sizes) or any(extent.terms for extent in plane):
            raise Unsupported("planes that are empty, or of sizes that are not known")
        words = "x".join(str(extent.constant) for extent in plane)
        message = f"Found an invalid max index: {{index}} (output volumes are of size {words})"
        here = points(x.axes)
        count = product(plane)
        at = position(indices.at(here), count, wrap=False, error="RuntimeError", message=message)
        target = [*here[:-rank], *reshape_index([at], [count], plane)]
        zeros = Tensor(axes_for(result.sizes), const(0, x.dtype))
        return written(zeros, x.axes, target, x.body, None, result)

    return row


lowers(aten.max_unpool2d.default)(max_unpool(2))
lowers(aten.max_unpool3d.default)(max_unpool(3))
