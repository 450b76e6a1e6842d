"""Rows of ops that read neighbours: padding by reflection or repetition, unfolding and folding.

Padding with a constant is in `view.py`; padding in circles reaches us as slices that are copied. Backwards of pads are
scatters, in the order in which eager adds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ferrite.errors import Unsupported
from ferrite.loops.index import ONE, ZERO, Index, IndexLike, floordiv, index, maximum, minimum, mod
from ferrite.loops.nodes import Accumulate, Expr, Nest, Position
from ferrite.loops.shapes import reshape_index
from ferrite.lower.gather import result_buffer
from ferrite.lower.pointwise import floats_only
from ferrite.lower.pool import Sliding, at_most, few, guarded, summed, zeros_of
from ferrite.lower.table import lowers
from ferrite.lower.value import Built, Result, Tensor, apply, axes_for, const, points, view

aten = torch.ops.aten

# ---- pads

Fold = Callable[[Index, Index], Index]  # a place that may lie outside, and the extent: a place inside


def reflected(place: Index, extent: Index) -> Index:
    """Mirrored at the edges, which are not repeated. Eager wants less padding than there are elements, so the result is
    inside; `repeated` only says so to the checker."""
    ahead = maximum(place, -place)
    return repeated(minimum(ahead, 2 * (extent - 1) - ahead), extent)


def repeated(place: Index, extent: Index) -> Index:
    """The nearest element."""
    return minimum(maximum(place, 0), extent - 1)


def source_of(here: Sequence[Index], extents: Sequence[Index], pad: Sequence[Any], fold: Fold) -> list[Index]:
    """Where an element of the padded tensor comes from. Amounts come in pairs from the last dimension backwards;
    negative ones cut off."""
    places = list(here)
    for number in range(len(pad) // 2):
        dim = len(here) - 1 - number
        before, after = index(pad[2 * number]), index(pad[2 * number + 1])
        if before.terms or after.terms:
            raise Unsupported("padding by a symbolic amount")
        place = places[dim] - before
        places[dim] = place if before.constant <= 0 and after.constant <= 0 else fold(place, extents[dim])
    return places


def pad_row(fold: Fold) -> Callable[..., Tensor]:
    def row(x: Tensor, pad: Sequence[Any], *, result: Result) -> Tensor:
        if x.dtype.is_bool:
            raise Unsupported("a pad of truth values", why="eager raises")
        return view(x, result.sizes, lambda *here: source_of(here, x.sizes, pad, fold))

    return row


def pad_backward_row(fold: Fold) -> Callable[..., Built]:
    """Every element of the gradient is added to the place that it was read from; halves round after every addition."""

    def row(grad: Tensor, x: Tensor, pad: Sequence[Any], *, result: Result) -> Built:
        floats_only(grad, "the backward of a pad")
        buffer = result_buffer(result)
        axes = axes_for(grad.sizes)
        here = points(axes)
        target = tuple(source_of(here, x.sizes, pad, fold))
        nest = Nest(axes, (Accumulate("add", buffer, target, grad.at(here)),))
        return Built((buffer,), (zeros_of(buffer), nest))

    return row


for _fold, _forward, _backward in (
    (reflected, aten.reflection_pad1d, aten.reflection_pad1d_backward),
    (reflected, aten.reflection_pad2d, aten.reflection_pad2d_backward),
    (reflected, aten.reflection_pad3d, aten.reflection_pad3d_backward),
    (repeated, aten.replication_pad1d, aten.replication_pad1d_backward),
    (repeated, aten.replication_pad2d, aten.replication_pad2d_backward),
    (repeated, aten.replication_pad3d, aten.replication_pad3d_backward),
):
    lowers(_forward.default)(pad_row(_fold))
    lowers(_backward.default)(pad_backward_row(_fold))


# ---- windows as columns


def _pair(given: Any) -> list[Index]:
    values = [given] if isinstance(given, (int, Index)) else list(given)
    return [index(value) for value in (values * 2 if len(values) == 1 else values)]


def _windows(sizes: Sequence[Index], kernel: Any, dilation: Any, padding: Any, stride: Any) -> list[Sliding]:
    """The windows of an image with these sizes: as many as fit."""
    windows = []
    parts = zip(_pair(kernel), _pair(stride), _pair(padding), _pair(dilation), strict=True)
    for extent, (taps, step, around, apart) in zip(sizes[-2:], parts, strict=True):
        count = floordiv(extent + 2 * around - apart * (taps - 1) - 1, step) + 1
        windows.append(Sliding(extent, count, taps, step, around, apart, False))
    return windows


@lowers(aten.im2col.default)
def im2col(x: Tensor, kernel: Any, dilation: Any, padding: Any, stride: Any, *, result: Result) -> Tensor:
    """Every window as a column: channel and tap, then window. Zeros stand for what is outside. No integers."""
    if x.dtype.is_int:
        raise Unsupported(f"im2col of {x.dtype}", why="eager raises")
    windows = _windows(x.sizes, kernel, dilation, padding, stride)
    opened = [*x.sizes[:-2], *(window.taps for window in windows), *(window.count for window in windows)]

    def body(*here: Index) -> Expr:
        *lead, tap0, tap1, window0, window1 = reshape_index(here, result.sizes, opened)
        along = list(zip(windows, (window0, window1), (tap0, tap1), strict=True))
        conditions = [condition for window, o, r in along for condition in window.inside(o, r)]
        element = x.at([*lead, *(window.place(o, r) for window, o, r in along)])
        return guarded(conditions, element, const(0, x.dtype))

    axes = axes_for(result.sizes)
    return Tensor(axes, body(*points(axes)))


@lowers(aten.col2im.default)
def col2im(
    x: Tensor, output_size: Any, kernel: Any, dilation: Any, padding: Any, stride: Any, *, result: Result
) -> Tensor | Built:
    """Every place of the image sums over the columns that hold it, in the order of their taps. Of no image, tracing
    promises strides that count the padding."""
    floats_only(x, "col2im")
    if ZERO in result.sizes:
        raise Unsupported("columns of no image", why="tracing promises other strides")
    windows = _windows(result.sizes, kernel, dilation, padding, stride)
    opened = [*result.sizes[:-2], *(window.taps for window in windows), *(window.count for window in windows)]
    extents = [floordiv(w.taps - 1, w.stride) + 1 if w.dilation is ONE else w.taps for w in windows]
    if x.dtype.is_half and not few(extents):
        return _scattered_columns(x, windows, opened, result)
    axes = axes_for(result.sizes)
    *lead, row, column = points(axes)

    def term(steps: Sequence[IndexLike]) -> Expr:
        conditions: list[Expr] = []
        taps, chosen = [], []
        for window, place, step in zip(windows, (row, column), steps, strict=True):
            tap, over, needs = _column_of(window, place, index(step))
            taps.append(tap)
            chosen.append(over)
            conditions += needs
        return guarded(conditions, x.at(reshape_index([*lead, *taps, *chosen], opened, x.sizes)), const(0, x.dtype))

    return Tensor(axes, summed(term, extents, x.dtype, x))


def _scattered_columns(x: Tensor, windows: Sequence[Sliding], opened: Sequence[Index], result: Result) -> Built:
    """The same sum in loops over the columns; `pool.py`, Note [Sums of halves]. What is outside adds 0 at the edge."""
    buffer = result_buffer(result)
    axes = axes_for(opened)
    *lead, tap0, tap1, window0, window1 = points(axes)
    along = list(zip(windows, (window0, window1), (tap0, tap1), strict=True))
    conditions = [condition for window, o, r in along for condition in window.inside(o, r)]
    element = x.at(reshape_index(points(axes), opened, x.sizes))
    target = (*lead, *(repeated(window.place(o, r), window.extent) for window, o, r in along))
    added = Accumulate("add", buffer, target, guarded(conditions, element, const(0, x.dtype)))
    return Built((buffer,), (zeros_of(buffer), Nest(axes, (added,))))


def _column_of(window: Sliding, place: Index, step: Index) -> tuple[Index, Index, list[Expr]]:
    """A tap and a window that meet at the place, and what must hold for them to be there.

    Without dilation, the taps that can meet a window here are a stride apart. Otherwise every tap is tried.
    """
    ahead = place + window.padding
    if window.dilation is ONE:
        tap = mod(ahead, window.stride) + window.stride * step
        over = floordiv(ahead, window.stride) - step
        needs = at_most(tap, window.taps - 1)
    else:
        tap = step
        start = ahead - window.dilation * step
        over = floordiv(start, window.stride)
        needs = []
        if window.stride is not ONE:
            needs.append(apply("eq", Position(mod(start, window.stride)), Position(index(0))))
    return tap, over, [*needs, *at_most(0, over), *at_most(over, window.count - 1)]
