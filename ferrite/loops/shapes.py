"""Tensors as indices see them: strides, places in memory, and where an element was before a reshape."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from ferrite.loops.index import (
    ONE,
    ZERO,
    Index,
    IndexLike,
    floordiv,
    index,
    kept_for_a_while,
    known_equal,
    known_nonnegative,
    maximum,
    mod,
    multiply,
    total,
)


def linear(indices: Sequence[IndexLike], strides: Sequence[IndexLike]) -> Index:
    """The place in memory, counted in elements from the first one."""
    return _linear(tuple(indices), tuple(strides))


@kept_for_a_while
def _linear(indices: tuple[IndexLike, ...], strides: tuple[IndexLike, ...]) -> Index:
    return total(multiply(place, stride) for place, stride in zip(indices, strides, strict=True))


def contiguous_strides(sizes: Sequence[IndexLike]) -> tuple[Index, ...]:
    """Strides of a row-major tensor; as in eager, an empty dimension counts as one."""
    strides: list[Index] = []
    step = ONE
    for extent in reversed(sizes):
        strides.append(step)
        step = multiply(step, maximum(extent, 1))
    return tuple(reversed(strides))


def is_contiguous(sizes: Sequence[IndexLike], strides: Sequence[IndexLike]) -> bool:
    """Whether the elements lie in row-major order without gaps, proven. Dimensions of size 1 may have any stride, and
    so may all of an empty tensor."""
    extents = [index(extent) for extent in sizes]
    if ZERO in extents:
        return True
    step = ONE
    for extent, stride in zip(reversed(extents), reversed(strides), strict=True):
        if extent is ONE:
            continue
        if not known_equal(stride, step):
            return False
        step = multiply(step, extent)
    return True


def stride_order(strides: Sequence[IndexLike]) -> tuple[int, ...] | None:
    """The dimensions from the largest stride to the smallest; equal ones keep their order. None if two that matter
    cannot be compared."""
    steps = [index(stride) for stride in strides]
    order: list[int] = []
    for dimension, step in enumerate(steps):
        place = len(order)
        while place and not known_nonnegative(steps[order[place - 1]] - step):
            if not known_nonnegative(step - steps[order[place - 1]]):
                return None
            place -= 1
        order.insert(place, dimension)
    return tuple(order)


def reshape_index(
    new_index: Sequence[IndexLike], new_sizes: Sequence[IndexLike], old_sizes: Sequence[IndexLike]
) -> tuple[Index, ...]:
    """Where an element of a reshaped tensor was before: indices into the new shape become indices into the old one.

    Leading and trailing dimensions with equal products are matched group by group, so that merging dimensions gives a
    sum and splitting one gives its division; only what cannot be matched is made linear and divided again.

        [i] of [12] from [3, 4]         i // 4, i % 4
        [i, j] of [3, 4] from [12]      4*i + j
        [i, j] of [s0, 4] from [2*s0, 2]  2*i + j // 2, j % 2
    """
    old = [index(extent) for extent in old_sizes]
    if ZERO in old:
        return tuple(ZERO for _ in old)  # there is no element
    # A dimension of size 1 holds nothing: its index is 0, and it takes no part in the matching.
    places = [
        (index(place), extent)
        for place, extent in zip(new_index, map(index, new_sizes), strict=True)
        if extent is not ONE
    ]
    kept = [dimension for dimension, extent in enumerate(old) if extent is not ONE]
    result = [ZERO for _ in old]
    for group, targets in _matched_groups(places, [old[dimension] for dimension in kept]):
        found = _reshape_group(group, [old[kept[target]] for target in targets])
        for target, place in zip(targets, found, strict=True):
            result[kept[target]] = place
    return tuple(result)


_Place: TypeAlias = "tuple[Index, Index]"  # index and size of a dimension


def _matched_groups(new: list[_Place], old: list[Index]) -> Iterator[tuple[list[_Place], range]]:
    """Pairs of new dimensions and old ones with equal products, as small as possible; from the left, then from the
    right, then what is left over in the middle."""
    start, stop = 0, len(old)
    while new and start < stop:
        match = _first_match([extent for _, extent in new], old[start:stop])
        if match is None:
            break
        taken, length = match
        yield new[:taken], range(start, start + length)
        new, start = new[taken:], start + length
    while new and start < stop:
        match = _first_match([extent for _, extent in reversed(new)], old[start:stop][::-1])
        if match is None:
            break
        taken, length = match
        yield new[-taken:], range(stop - length, stop)
        new, stop = new[:-taken], stop - length
    if start < stop:
        yield new, range(start, stop)


def _first_match(new: list[Index], old: list[Index]) -> tuple[int, int] | None:
    """How many leading dimensions on each side have the same product, the fewest possible."""
    products: dict[Index, int] = {}
    for count, running in enumerate(_running_products(new), 1):
        products.setdefault(running, count)
    for length, running in enumerate(_running_products(old), 1):
        if running in products:
            return products[running], length
    return None


def _running_products(sizes: list[Index]) -> Iterator[Index]:
    running = ONE
    for extent in sizes:
        running = multiply(running, extent)
        yield running


def _reshape_group(new: list[_Place], old: list[Index]) -> list[Index]:
    flat = ZERO
    for place, extent in new:
        flat = flat * extent + place
    result: list[Index] = []
    for extent in reversed(old[1:]):
        result.append(mod(flat, extent))
        flat = floordiv(flat, extent)
    return [flat, *reversed(result)]
