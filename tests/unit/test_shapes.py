"""Strides, and chains of views as indices: each element of a view is where torch says it is."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrite.loops.index import (
    Atom,
    FloorDiv,
    Index,
    Mod,
    axis,
    constant,
    evaluate,
    index,
    known_within,
    product,
    size,
)
from ferrite.loops.shapes import contiguous_strides, is_contiguous, linear, reshape_index, stride_order

Places = tuple[Index, ...]
View = Callable[[Places], Places]


def axes_of(shape: Sequence[Index | int]) -> Places:
    return tuple(axis(f"i{dimension}", extent) for dimension, extent in enumerate(shape))


def atom_of(place: Index) -> Atom:
    ((_, (atom,)),) = place.terms
    return atom


def replaced(places: Places, dimension: int, place: Index) -> Places:
    return (*places[:dimension], place, *places[dimension + 1 :])


# ---- one view: the tensor after it, and indices before it from indices after it


def permute(x: torch.Tensor, rng: random.Random) -> tuple[torch.Tensor, View]:
    order = rng.sample(range(x.dim()), x.dim())
    return x.permute(order), lambda places: tuple(places[order.index(dimension)] for dimension in range(len(order)))


def reshape(x: torch.Tensor, rng: random.Random) -> tuple[torch.Tensor, View]:
    old, new = tuple(x.shape), random_shape(x.numel(), rng)
    return x.reshape(new), lambda places: reshape_index(places, new, old)


def random_shape(count: int, rng: random.Random) -> tuple[int, ...]:
    """A shape with this many elements, ones sprinkled in."""
    if count == 0:
        return tuple(rng.sample([0, rng.randint(1, 3), rng.randint(0, 2)], 3))
    shape = []
    while count > 1 and len(shape) < 4:
        divisors = [d for d in range(1, count + 1) if count % d == 0]
        shape.append(rng.choice(divisors))
        count //= shape[-1]
    shape.append(count)
    rng.shuffle(shape)
    return tuple(shape)


def take(x: torch.Tensor, rng: random.Random) -> tuple[torch.Tensor, View]:
    if not x.dim():
        return x, lambda places: places
    dimension = rng.randrange(x.dim())
    start, step = rng.randint(0, x.shape[dimension]), rng.randint(1, 3)
    stop = rng.randint(start, x.shape[dimension])
    cut = (*[slice(None)] * dimension, slice(start, stop, step))
    return x[cut], lambda places: replaced(places, dimension, places[dimension] * step + start)


def expand(x: torch.Tensor, rng: random.Random) -> tuple[torch.Tensor, View]:
    ones = [dimension for dimension, extent in enumerate(x.shape) if extent == 1]
    new = tuple(rng.randint(0, 3) if dimension in ones else extent for dimension, extent in enumerate(x.shape))
    return x.expand(new), lambda places: tuple(
        constant(0) if dimension in ones else place for dimension, place in enumerate(places)
    )


def flip(x: torch.Tensor, rng: random.Random) -> tuple[torch.Tensor, View]:
    if not x.dim():
        return x, lambda places: places
    dimension = rng.randrange(x.dim())
    last = x.shape[dimension] - 1
    return x.flip(dimension), lambda places: replaced(places, dimension, last - places[dimension])


def unfold(x: torch.Tensor, rng: random.Random) -> tuple[torch.Tensor, View]:
    wide = [dimension for dimension, extent in enumerate(x.shape) if extent > 1]
    if not wide or x.dim() > 4:
        return x, lambda places: places
    dimension = rng.choice(wide)
    length, step = rng.randint(1, x.shape[dimension]), rng.randint(1, 2)
    return x.unfold(dimension, length, step), lambda places: replaced(
        places[:-1], dimension, places[dimension] * step + places[-1]
    )


def unsqueeze(x: torch.Tensor, rng: random.Random) -> tuple[torch.Tensor, View]:
    dimension = rng.randint(0, x.dim())
    return x.unsqueeze(dimension), lambda places: (*places[:dimension], *places[dimension + 1 :])


def select(x: torch.Tensor, rng: random.Random) -> tuple[torch.Tensor, View]:
    wide = [dimension for dimension, extent in enumerate(x.shape) if extent]
    if not wide:
        return x, lambda places: places
    dimension = rng.choice(wide)
    at = rng.randrange(x.shape[dimension])
    return x.select(dimension, at), lambda places: (*places[:dimension], constant(at), *places[dimension:])


VIEWS = [permute, reshape, reshape, take, expand, flip, unfold, unsqueeze, select]


@settings(max_examples=250, deadline=None)
@given(st.lists(st.integers(1, 6), max_size=4), st.lists(st.sampled_from(VIEWS), max_size=6), st.integers(0, 999))
def test_a_chain_of_views_is_where_torch_says(shape: list[int], chain: list[Callable], seed: int) -> None:
    rng = random.Random(seed)
    x = torch.arange(math.prod(shape)).reshape(shape)
    steps: list[View] = []
    for build in chain:
        x, back = build(x, rng)
        steps.append(back)
    places = axes = axes_of(x.shape)
    for back in reversed(steps):
        places = back(places)
    if x.numel():
        assert all(known_within(place, 0, extent) for place, extent in zip(places, shape, strict=True))
    flat = linear(places, contiguous_strides(shape))
    for point in itertools.islice(itertools.product(*map(range, x.shape)), 400):
        assert evaluate(flat, {atom_of(i): at for i, at in zip(axes, point, strict=True)}) == x[point].item()


# ---- symbolic sizes


s0, s1 = size("s0", 1, None), size("s1", 0, None)
FACTORS = [s0, s1, index(2), index(3), index(1)]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from(FACTORS), min_size=1, max_size=5),
    st.randoms(use_true_random=False),
    st.integers(1, 3),
    st.integers(1, 3),
    st.booleans(),
)
def test_a_symbolic_reshape_is_the_reshape_of_numbers(
    factors: list[Index], rng: random.Random, first: int, second: int, mix: bool
) -> None:
    old, new = grouped(factors, rng), grouped(rng.sample(factors, len(factors)) if mix else factors, rng)
    axes = axes_of(new)
    places = reshape_index(axes, new, old)
    numbers: dict[Atom, int] = {atom_of(s0): first, atom_of(s1): second}
    old_shape, new_shape = ([evaluate(extent, numbers) for extent in shape] for shape in (old, new))
    x = torch.arange(math.prod(old_shape)).reshape(old_shape)
    y = x.reshape(new_shape)
    for point in itertools.islice(itertools.product(*map(range, new_shape)), 200):
        environment = numbers | {atom_of(i): at for i, at in zip(axes, point, strict=True)}
        assert x[tuple(evaluate(place, environment) for place in places)] == y[point]
    if not mix:
        assert no_division_by_more_than_needed(places, old, new)


def grouped(factors: list[Index], rng: random.Random) -> tuple[Index, ...]:
    shape: list[Index] = []
    for factor in factors:
        if shape and rng.random() < 0.5:
            shape[-1] = shape[-1] * factor
        else:
            shape.append(factor)
    return tuple(shape)


def no_division_by_more_than_needed(places: Places, old: tuple[Index, ...], new: tuple[Index, ...]) -> bool:
    """Dimensions that stand on both sides, with equal products before them, are not divided."""
    for position, extent in enumerate(old):
        for other, same in enumerate(new):
            if extent is same and product(old[:position]) is product(new[:other]) and extent.terms:
                return not any(isinstance(atom, (FloorDiv, Mod)) for _, m in places[position].terms for atom in m)
    return True


a, b, c = axis("a", s0), axis("b", 4), axis("c", s0 * 12)


@pytest.mark.parametrize(
    ("places", "new", "old", "texts"),
    [
        ((b,), (12,), (3, 4), ["0", "b"]),
        ((a, b), (s0, 4), (s0 * 4,), ["4*a + b"]),
        ((c,), (s0 * 12,), (s0, 12), ["(c // 12)", "(c % 12)"]),
        ((c,), (s0 * 12,), (s0, 3, 4), ["(c // 12)", "((c // 4) % 3)", "(c % 4)"]),
        ((a, b), (s0, 4), (2 * s0, 2), ["2*a + (b // 2)", "(b % 2)"]),
        ((a, b, a), (s0, 4, s0), (s0, 2, 1, 2, s0), ["a", "(b // 2)", "0", "(b % 2)", "a"]),
        ((), (), (1, 1), ["0", "0"]),
        ((constant(0), b), (1, 4), (4, 1, 1), ["b", "0", "0"]),
        ((b, b), (4, 0), (0, 3), ["0", "0"]),
    ],
)
def test_reshape_index(places: Places, new: tuple, old: tuple, texts: list[str]) -> None:
    assert [str(place) for place in reshape_index(places, new, old)] == texts


def test_there_and_back() -> None:
    """Splitting what was merged gives the axes themselves."""
    shape = (s0, 4, s1, 3)
    axes = axes_of(shape)
    (flat,) = reshape_index(axes, shape, (s0 * 4 * s1 * 3,))
    assert reshape_index((flat,), (s0 * 4 * s1 * 3,), shape) == axes


# ---- strides


@given(st.lists(st.integers(0, 4), max_size=5))
def test_contiguous_strides_are_torchs(shape: list[int]) -> None:
    x = torch.empty(shape)
    assert contiguous_strides(shape) == tuple(map(index, x.stride()))
    assert is_contiguous(shape, x.stride())


@given(st.lists(st.integers(0, 3), max_size=4), st.randoms(use_true_random=False))
def test_is_contiguous_is_torchs(shape: list[int], rng: random.Random) -> None:
    x = torch.empty(shape).permute(rng.sample(range(len(shape)), len(shape)))
    if x.dim() and rng.random() < 0.5:
        x = x[..., ::2]
    assert is_contiguous(x.shape, x.stride()) == x.is_contiguous()


def test_symbolic_strides() -> None:
    assert list(map(str, contiguous_strides((s0, s1, 4)))) == ["4*max(s1, 1)", "4", "1"]
    assert list(map(str, contiguous_strides((s1, s0, 4)))) == ["4*s0", "4", "1"]
    assert is_contiguous((s1, s0, 4), (s0 * 4, 4, 1))
    assert not is_contiguous((s1, s0, 4), (s0 * 5, 5, 1))
    assert not is_contiguous((s1, s0, 4), (1, s1, s0 * s1))


@pytest.mark.parametrize(
    ("strides", "order"),
    [
        ((12, 4, 1), (0, 1, 2)),
        ((1, 12, 4), (1, 2, 0)),
        ((4, 4, 1), (0, 1, 2)),
        ((), ()),
        ((s0, 4 * s0, 1), (1, 0, 2)),
        ((s0, s1), None),
        ((0, 5, 0), (1, 0, 2)),
    ],
)
def test_stride_order(strides: tuple, order: tuple[int, ...] | None) -> None:
    assert stride_order(strides) == order
