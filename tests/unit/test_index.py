"""Index arithmetic against plain integers: whatever is built, moved or concluded must hold at every point in range."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrite.loops import intern
from ferrite.loops.index import (
    ONE,
    ZERO,
    Atom,
    Axis,
    Data,
    FloorDiv,
    Index,
    Least,
    Mod,
    Most,
    Size,
    axis,
    bounds,
    ceildiv,
    coefficient_of,
    constant,
    data,
    divides,
    evaluate,
    floordiv,
    free_atoms,
    free_axes,
    in_order,
    index,
    known_equal,
    known_nonnegative,
    known_within,
    known_zero,
    maximum,
    minimum,
    mod,
    of_atom,
    product,
    size,
    substitute,
    total,
)

Tree: TypeAlias = "int | str | tuple[Any, ...]"
Point: TypeAlias = "dict[str, int]"

EXAMPLES = settings(max_examples=250, deadline=None)

# Sizes with different knowledge about them, axes of fixed, empty, single and symbolic extent, data within bounds.
SIZES: dict[str, Index] = {
    "s0": size("s0", 1, 4),
    "s1": size("s1", 2, None),
    "s2": size("s2", 0, None),
    "s3": size("s3", None, None),
}
AXES: dict[str, Index] = {
    "i": axis("i", 6),
    "j": axis("j", 4),
    "k": axis("k", 1),
    "e": axis("e", 0),
    "p": axis("p", SIZES["s0"]),
    "q": axis("q", SIZES["s1"] * 3),
    "r": axis("r", SIZES["s2"] + 1),
    "t": axis("t", SIZES["s0"] * SIZES["s1"]),
}
DATA: dict[str, Index] = {"d": data("held", -2, 5), "n": data("other", 0, SIZES["s1"] - 1)}
LEAVES = SIZES | AXES | DATA

OPERATIONS: dict[str, tuple[Callable[..., Index], Callable[..., int]]] = {
    "+": (lambda a, b: a + b, lambda a, b: a + b),
    "-": (lambda a, b: a - b, lambda a, b: a - b),
    "*": (lambda a, b: a * b, lambda a, b: a * b),
    "//": (floordiv, lambda a, b: a // b),
    "%": (mod, lambda a, b: a % b),
    "ceil": (ceildiv, lambda a, b: -(-a // b)),
    "min": (minimum, min),
    "max": (maximum, max),
    "neg": (lambda a: -a, lambda a: -a),
}


def trees(names: list[str], leaves: int = 8) -> st.SearchStrategy[Tree]:
    small = st.integers(-9, 9)
    leaf = st.one_of(small, st.sampled_from(names), st.sampled_from(names))
    scaled = st.tuples(st.just("*"), st.sampled_from([-12, -4, -3, -1, 2, 3, 4, 6, 8, 12]), leaf)
    divisor = st.one_of(st.integers(1, 13), st.sampled_from([n for n in names if n in SIZES] or [4]), small)
    return st.recursive(
        st.one_of(leaf, scaled),
        lambda inner: st.one_of(
            st.tuples(st.sampled_from(["+", "-", "+"]), inner, inner),
            st.tuples(st.sampled_from(["//", "%", "ceil"]), inner, st.one_of(divisor, divisor, inner)),
            st.tuples(st.sampled_from(["*", "min", "max"]), inner, inner),
            st.tuples(st.just("neg"), inner),
        ),
        max_leaves=leaves,
    )


ANY_TREE = trees(sorted(LEAVES))
NUMBERS_ONLY = trees(["i", "j", "k", "d"])


def built(tree: Tree) -> Index:
    if isinstance(tree, int):
        return constant(tree)
    if isinstance(tree, str):
        return LEAVES[tree]
    return OPERATIONS[tree[0]][0](*map(built, tree[1:]))


def plain(tree: Tree, point: Point) -> int:
    if isinstance(tree, int):
        return tree
    if isinstance(tree, str):
        return point[tree]
    return OPERATIONS[tree[0]][1](*(plain(part, point) for part in tree[1:]))


def names_in(tree: Tree) -> set[str]:
    if isinstance(tree, str):
        return {tree}
    return set() if isinstance(tree, int) else set().union(*map(names_in, tree[1:]))


def points(seed: int, names: set[str], count: int = 30) -> Iterator[Point]:
    """Random points in range; corners come up often. None if an axis that occurs is empty."""
    rng = random.Random(seed)

    def pick(low: int, high: int) -> int:
        return rng.choice([low, high, rng.randint(low, high)])

    if "e" in names:
        return
    for _ in range(count):
        s0, s1, s2, s3 = pick(1, 4), pick(2, 7), pick(0, 5), pick(-4, 4)
        extents = {"i": 6, "j": 4, "k": 1, "p": s0, "q": 3 * s1, "r": s2 + 1, "t": s0 * s1}
        point = {"s0": s0, "s1": s1, "s2": s2, "s3": s3, "d": pick(-2, 5), "n": pick(0, s1 - 1)}
        yield point | {name: pick(0, extent - 1) for name, extent in extents.items()}


def environment(point: Point) -> dict[Atom, int]:
    return {of_leaf(name): number for name, number in point.items()}


def of_leaf(name: str) -> Atom:
    ((_, (atom,)),) = LEAVES[name].terms
    return atom


def values(tree: Tree, seed: int) -> Iterator[tuple[Point, int]]:
    """The points at which the tree has a value: nothing is divided by zero."""
    for point in points(seed, names_in(tree)):
        try:
            yield point, plain(tree, point)
        except ZeroDivisionError:
            continue


def rebuilt(value: Index) -> Index:
    """The same value, built again from its parts through the arithmetic."""

    def again(atom: Atom) -> Index:
        match atom:
            case FloorDiv(dividend=a, divisor=b):
                return floordiv(rebuilt(a), rebuilt(b))
            case Mod(dividend=a, divisor=b):
                return mod(rebuilt(a), rebuilt(b))
            case Least(left=a, right=b):
                return minimum(rebuilt(a), rebuilt(b))
            case Most(left=a, right=b):
                return maximum(rebuilt(a), rebuilt(b))
        return of_atom(atom)

    return total([*(c * product(map(again, m)) for c, m in value.terms), value.constant])


# ---- building


@EXAMPLES
@given(ANY_TREE, st.integers(0, 99))
def test_building_keeps_the_value(tree: Tree, seed: int) -> None:
    value = built(tree)
    assert in_order(value)
    for point, expected in values(tree, seed):
        assert evaluate(value, environment(point)) == expected, (str(value), point)


@EXAMPLES
@given(ANY_TREE)
def test_building_again_gives_the_same_object(tree: Tree) -> None:
    value = built(tree)
    assert rebuilt(value) is value


@EXAMPLES
@given(NUMBERS_ONLY)
def test_every_point_of_a_fixed_box(tree: Tree) -> None:
    value = built(tree)
    for i, j, d in itertools.product(range(6), range(4), (-2, 0, 5)):
        point = {"i": i, "j": j, "k": 0, "d": d}
        try:
            expected = plain(tree, point)
        except ZeroDivisionError:
            continue
        assert evaluate(value, environment(point)) == expected


# Atoms whose parts do not add up to one another: each sum has one normal form.
BASIS = [
    *LEAVES.values(),
    floordiv(axis("x", 90), 4),
    mod(axis("y", 90), 5),
    minimum(AXES["q"], 3),
    maximum(AXES["p"], AXES["j"]),
]


@EXAMPLES
@given(
    st.lists(st.tuples(st.integers(-4, 4), st.lists(st.sampled_from(BASIS), max_size=3)), max_size=6),
    st.randoms(use_true_random=False),
)
def test_a_polynomial_has_one_form(terms: list[tuple[int, list[Index]]], rng: random.Random) -> None:
    straight = total(coefficient * product(factors) for coefficient, factors in terms)
    mixed = [(coefficient, rng.sample(factors, len(factors))) for coefficient, factors in terms]
    rng.shuffle(mixed)
    backwards = ZERO
    for coefficient, factors in mixed:
        backwards = product([*factors, coefficient]) + backwards
    assert straight is backwards
    assert straight - backwards is ZERO
    assert (straight + backwards) - backwards is straight


def test_axes_of_one_name_and_different_extent_have_one_order() -> None:
    short, long = axis("i", 3), axis("i", 8)
    assert short + long is long + short
    assert short * long is long * short


def test_a_symbolic_integer_of_another_kind_is_refused() -> None:
    with pytest.raises(TypeError, match="float"):
        index(1.5)  # type: ignore[arg-type]
    assert constant(True) is ONE


def test_the_order_of_terms_does_not_depend_on_the_hash_seed() -> None:
    script = (
        "from tests.unit.test_index import *\n"
        "rng = random.Random(5)\n"
        "for _ in range(60):\n"
        "    parts = [rng.randint(-5, 5) * product(rng.sample(BASIS, 2)) for _ in range(4)]\n"
        "    value = total(parts)\n"
        "    print(value, bounds(value), value // 4, value % 6, minimum(value, 3), maximum(value, 7 * SIZES['s3']))\n"
    )
    texts = [
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1")
    ]
    assert texts[0] == texts[1]
    assert texts[0].count("\n") == 60


def test_nodes_go_when_nobody_holds_them() -> None:
    def of_this_test() -> int:
        return sum(1 for key in intern._entries if key[0] is Axis and key[1].startswith("short_lived"))

    for number in range(2000):
        Axis(f"short_lived{number}", ONE)
    assert of_this_test() < 2000
    intern._sweep()
    assert of_this_test() == 0


def test_threads_build_one_node() -> None:
    built_at_once: list[list[Axis]] = [[] for _ in range(4)]
    start = threading.Barrier(4)

    def build(into: list[Axis]) -> None:
        start.wait()
        into.extend(Axis(f"threaded{number}", ONE) for number in range(3000))

    threads = [threading.Thread(target=build, args=(into,)) for into in built_at_once]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert all(len({id(node) for node in same}) == 1 for same in zip(*built_at_once, strict=True))


# ---- facts


@EXAMPLES
@given(ANY_TREE, st.integers(0, 99))
def test_values_lie_within_bounds(tree: Tree, seed: int) -> None:
    value = built(tree)
    low, high = bounds(value)
    for point, number in values(tree, seed):
        assert low is None or low <= number, (str(value), point)
        assert high is None or number <= high, (str(value), point)


@EXAMPLES
@given(st.lists(st.tuples(st.integers(-5, 5), st.sampled_from(["i", "j", "k", "d"])), max_size=4), st.integers(-3, 3))
def test_bounds_of_a_sum_over_a_fixed_box_are_sharp(terms: list[tuple[int, str]], offset: int) -> None:
    value = total(c * LEAVES[name] for c, name in terms) + offset
    numbers = [
        evaluate(value, environment({"i": i, "j": j, "k": 0, "d": d}))
        for i, j, d in itertools.product((0, 5), (0, 3), (-2, 5))
    ]
    assert bounds(value) == (min(numbers), max(numbers))


@EXAMPLES
@given(ANY_TREE, ANY_TREE, ANY_TREE, st.integers(0, 99))
def test_what_is_known_holds(left: Tree, middle: Tree, right: Tree, seed: int) -> None:
    low, value, end = built(left), built(middle), built(right)
    within, multiple, equal = known_within(value, low, end), divides(low, value), known_equal(low, value)
    for point, (a, b, c) in triples(left, middle, right, seed):
        assert not within or a <= b < c, point
        assert not multiple or (b % a == 0 if a else b == 0), point
        assert not equal or a == b, point
        assert not known_zero(value) or b == 0


def triples(left: Tree, middle: Tree, right: Tree, seed: int) -> Iterator[tuple[Point, tuple[int, int, int]]]:
    for point in points(seed, names_in(left) | names_in(middle) | names_in(right)):
        try:
            yield point, (plain(left, point), plain(middle, point), plain(right, point))
        except ZeroDivisionError:
            continue


@EXAMPLES
@given(ANY_TREE, st.integers(2, 9), st.integers(0, 99))
def test_parts_of_a_division_are_equal_to_the_whole(tree: Tree, divisor: int, seed: int) -> None:
    value = built(tree)
    again = divisor * (value // divisor) + value % divisor
    if not divided(tree):
        assert known_equal(again, value)
    for point, number in values(tree, seed):
        assert evaluate(again, environment(point)) == number


def divided(tree: Tree) -> bool:
    return isinstance(tree, tuple) and (tree[0] in ("//", "%", "ceil") or any(map(divided, tree[1:])))


i, j, k, p, q, t = (AXES[name] for name in "ijkpqt")
s0, s1, s2, s3 = (SIZES[name] for name in ("s0", "s1", "s2", "s3"))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ((4 * i + j) // 4, "i"),
        ((4 * i + j) % 4, "j"),
        ((s1 * i + q) // s1, "i + (q // s1)"),
        (floordiv(s0 * i + p, s0), "i"),
        (mod(s0 * i + p, s0), "p"),
        ((4 * i - j + 3) // 4, "i"),
        ((12 * i + 4 * j) // 8, "i + ((i + j) // 2)"),
        ((8 * i + j) // 12, "((2*i) // 3)"),
        ((8 * i + j) % 12, "j + 4*((2*i) % 3)"),
        (floordiv(s0 * i + p, 4 * s0), "(i // 4)"),
        (mod(s0 * i + p, 4 * s0), "s0*(i % 4) + p"),
        (t // 4 // 3, "(t // 12)"),
        ((t // 4 + 1) // 3, "((t + 4) // 12)"),
        ((t // 4 - i) // 3, "((-4*i + t) // 12)"),
        (t % 12 // 4, "((t // 4) % 3)"),
        (t % 12 % 4, "(t % 4)"),
        (4 * (t // 4) + t % 4, "t"),
        (12 * (t // 12) + 4 * (t // 4 % 3) + t % 4, "t"),
        (s1 * (t // s1) + t % s1, "t"),
        (t - 4 * (t // 4), "(t % 4)"),
        (t - t % 4, "4*(t // 4)"),
        (i * s1 - i * s1, "0"),
        (i // -4, "((-i) // 4)"),
        (minimum(i, 5), "i"),
        (minimum(i, s0), "min(i, s0)"),
        (minimum(p, s0 - 1), "p"),
        (minimum(minimum(i, s0), s0), "min(i, s0)"),
        (maximum(s0, 1), "s0"),
        (maximum(s2, 1), "max(s2, 1)"),
        ((s1 + 1) * i // (s1 + 1), "i"),
        (ceildiv(s0 * 4, 4), "s0"),
        (7 % of_atom(Size("z", 8, None)), "7"),
    ],
    ids=lambda given: str(given),
)
def test_a_form(value: Index, text: str) -> None:
    assert str(value) == text


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (s0 - 1 - p, (0, 3)),
        (s0 * s1 - 1 - t, (0, None)),
        (s1 * s2 - s2, (0, None)),
        (s1 * 3 - 1 - q, (0, None)),
        (s1 - 1 - q // 3, (0, None)),
        (s1 - 1 - t % s1, (0, None)),
        (s1 - 1 - minimum(t, s1 - 1), (0, None)),
        (s1 - 1 - DATA["n"], (0, None)),
        (i * j - 2, (-2, 13)),
        (5 - i, (0, 5)),
        (i // 4 + i % 4, (0, 4)),
    ],
    ids=lambda given: str(given),
)
def test_bounds_of(value: Index, expected: tuple[int | None, int | None]) -> None:
    assert bounds(value) == expected


# ---- changing


@EXAMPLES
@given(ANY_TREE, st.integers(0, 5), st.integers(0, 3), st.integers(0, 99))
def test_an_axis_replaced_by_a_number(tree: Tree, row: int, column: int, seed: int) -> None:
    value = substitute(built(tree), {of_leaf("i"): constant(row), of_leaf("j"): constant(column)})
    assert not free_axes(value) & {of_leaf("i"), of_leaf("j")}
    for point in points(seed, names_in(tree)):
        moved = point | {"i": row, "j": column}
        check_moved(tree, value, moved, point)


@EXAMPLES
@given(ANY_TREE, st.integers(0, 99))
def test_axes_replaced_by_sums(tree: Tree, seed: int) -> None:
    """i and j become parts of one new axis and of other axes, all of them in range."""
    x, y = axis("x", 24), axis("y", 2)
    value = substitute(
        built(tree), {of_leaf("i"): x // 4, of_leaf("j"): 3 - 2 * y - mod(x, 2), of_leaf("p"): AXES["t"] // s1}
    )
    rng = random.Random(seed)
    for point in points(seed, names_in(tree)):
        a, b = rng.randrange(24), rng.randrange(2)
        moved = point | {"i": a // 4, "j": 3 - 2 * b - a % 2, "p": point["t"] // point["s1"]}
        try:
            expected = plain(tree, moved)
        except ZeroDivisionError:
            continue
        outer = environment(point) | {x.terms[0][1][0]: a, y.terms[0][1][0]: b}
        assert evaluate(value, outer) == expected


@EXAMPLES
@given(ANY_TREE, st.integers(1, 4), st.integers(2, 5), st.integers(0, 99))
def test_sizes_replaced_by_numbers(tree: Tree, first: int, second: int, seed: int) -> None:
    value = substitute(built(tree), {of_leaf("s0"): constant(first), of_leaf("s1"): constant(second)})
    assert "n" in names_in(tree) or not free_atoms(value) & {of_leaf("s0"), of_leaf("s1")}
    extents = {"p": first, "q": 3 * second, "t": first * second}
    for point in points(seed, names_in(tree)):
        clipped = {name: min(point[name], extent - 1) for name, extent in extents.items()}
        moved = point | {"s0": first, "s1": second, "n": min(point["n"], second - 1)} | clipped
        check_moved(tree, value, moved, moved)


def check_moved(tree: Tree, value: Index, moved: Point, point: Point) -> None:
    try:
        expected = plain(tree, moved)
    except ZeroDivisionError:
        return
    assert evaluate(value, environment(point)) == expected


@EXAMPLES
@given(ANY_TREE, st.sampled_from(["i", "j", "p", "q"]), st.integers(0, 99))
def test_the_coefficient_is_the_step(tree: Tree, name: str, seed: int) -> None:
    moving = of_leaf(name)
    assert isinstance(moving, Axis)
    step = coefficient_of(built(tree), moving)
    if step is None:
        return
    for point in points(seed, names_in(tree) | {name}):
        inside = point | {name: point[name] + 1}
        if inside[name] >= evaluate(moving.extent, environment(point)):
            continue
        try:
            grown = plain(tree, inside) - plain(tree, point)
        except ZeroDivisionError:
            continue
        assert evaluate(step, environment(point)) == grown


def test_the_coefficient_sees_into_data() -> None:
    (_, (row,)), *_ = i.terms
    assert isinstance(row, Axis)
    held = data(Data("nothing", i, i), 0, 9)
    assert coefficient_of(held + 4 * i, row) is None
    assert free_axes(held) == {row}


def test_a_long_sum_is_no_catastrophe() -> None:
    """Forms stay small while divisions are nested: each level adds a few atoms, not twice as many."""
    value = axis("x", 2**40)
    for step in range(2, 40):
        value = value // step + value % step
    assert known_nonnegative(value)
    long = total((n + 1) * axis(f"x{n}", 100) for n in range(300))
    assert len(long.terms) == 300
    assert bounds(long) == (0, 99 * 300 * 301 // 2)
