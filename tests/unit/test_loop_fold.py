"""Folds: reductions and scans with a combine written in the loop IR. What they compute, what passes make of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrite.errors import Malformed
from ferrite.loops import oracle
from ferrite.loops.check import check_program
from ferrite.loops.dtypes import f32, i64
from ferrite.loops.index import Axis, constant, free_axes, index, of_atom
from ferrite.loops.nodes import Apply, Argument, Fold, Program
from ferrite.loops.passes import LOOP_PASSES
from ferrite.loops.passes.drop_dead_stores import drop_dead_stores
from ferrite.loops.passes.drop_unit_axes import drop_unit_axes
from ferrite.loops.passes.fold_constants import fold_constants
from ferrite.loops.passes.merge_axes import merge_axes
from ferrite.loops.rewrite import holds_argument, rename_buffers, substitute_axes, walk
from ferrite.loops.text import parse_program, show

Array = np.ndarray


def run(text: str, sizes: dict[str, int] | None = None, limit: int = oracle.BOX_LIMIT, **arrays: Array) -> None:
    program = parse_program(text)
    check_program(program, "a test")
    oracle.run(program, sizes or {}, arrays, box_limit=limit)


# ---- what they compute

LIMITS = (oracle.BOX_LIMIT, 7, 1)  # whole boxes, boxes in pieces, one element at a time

TWO_SUMS = """\
def program(s0: size(1, 40), x: {kind}[3, s0], y: out({kind}[3]), z: out({kind}[3])):
    for i in box(3):
        y[i] = fold(lambda a0, b0: a0 {sign} b0)(x[i, k] for k in box(s0))
        z[i] = {named}(x[i, k] for k in box(s0))
"""
TWO_SCANS = """\
def program(s0: size(0, 40), x: {kind}[3, s0], y: out({kind}[3, s0]), z: out({kind}[3, s0])):
    for i in box(3):
        for k in scan(s0):
            y[i, k] = fold(lambda a0, b0: a0 {sign} b0)(x[i, k])
        for k in scan(s0):
            z[i, k] = {named}(x[i, k])
"""


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([("i64", np.int64), ("u8", np.uint8), ("f64", np.float64)]),
    st.sampled_from([("+", "sum", "cumsum"), ("*", "prod", "cumprod")]),
    st.integers(1, 40),
    st.sampled_from(LIMITS),
    st.integers(0, 2**32 - 1),
)
def test_a_fold_with_plus_is_a_sum(
    kind: tuple[str, type], sign: tuple[str, str, str], length: int, limit: int, seed: int
) -> None:
    """Integers, and floats whose sums and products are whole numbers or powers of two, have one answer."""
    symbol, reduction, scan = sign
    random = np.random.default_rng(seed)
    x = random.integers(-8, 8, (3, length)).astype(kind[1]) if symbol == "+" else None
    if x is None:
        x = (2.0 ** random.integers(-3, 3, (3, length))).astype(kind[1])
    for text, named, shape in ((TWO_SUMS, reduction, (3,)), (TWO_SCANS, scan, (3, length))):
        y, z = np.empty(shape, kind[1]), np.empty(shape, kind[1])
        run(text.format(kind=kind[0], sign=symbol, named=named), {"s0": length}, limit, x=x, y=y, z=z)
        np.testing.assert_array_equal(y, z)


MATRICES = """\
def program(x: i64[5, 2, 3, 4], y: out(i64[5, 4]), z: out(i64[5, 4, 6])):
    for i in box(5):
{folds}
        for k in scan(6):
            {targets} = {product}({values})
"""


@pytest.mark.parametrize("limit", LIMITS)
def test_order_is_kept_where_combining_does_not_commute(limit: int) -> None:
    """Products of 2x2 matrices along two axes of a fold, and along a scan."""
    names = [f"{side}{n}" for side in "ab" for n in range(4)]
    entries = [f"a{2 * r} * b{c} + a{2 * r + 1} * b{2 + c}" for r in range(2) for c in range(2)]
    product = f"fold(lambda {', '.join(names)}: ({', '.join(entries)}))"
    over = f"{product}(({', '.join(f'x[i, k, l, {n}]' for n in range(4))}) for k, l in box(2, 3))"
    text = MATRICES.format(
        folds="\n".join(f"        y[i, {n}] = {over}" + (f"[{n}]" if n else "") for n in range(4)),
        targets=", ".join(f"z[i, {n}, k]" for n in range(4)),
        product=product,
        values=", ".join(f"x[i, (k // 3), (k % 3), {n}]" for n in range(4)),
    )
    x = np.random.default_rng(0).integers(-3, 4, (5, 2, 3, 4))
    y, z = np.empty((5, 4), np.int64), np.empty((5, 4, 6), np.int64)
    run(text, limit=limit, x=x, y=y, z=z)
    for i in range(5):
        running = np.eye(2, dtype=np.int64)
        for k in range(6):
            running = running @ x[i].reshape(6, 2, 2)[k]
            np.testing.assert_array_equal(z[i, :, k], running.ravel())
        np.testing.assert_array_equal(y[i], running.ravel())


@pytest.mark.parametrize("limit", LIMITS)
def test_values_of_several_dtypes_and_a_combine_that_reads_memory(limit: int) -> None:
    """The greatest with its count of improvements, each row with a bonus of its own."""
    text = """\
def program(x: f32[4, 9], bonus: i64[4], most: out(f32[4]), times: out(i64[4]), seen: out(b8[4])):
    for i in box(4):
        most[i] = fold(lambda a0, a1, a2, b0, b1, b2: (maximum(a0, b0), where(b0 > a0, a1 + bonus[i], a1), a2 | b2))\
((x[i, k], i64(0), x[i, k] > f32(1.5)) for k in box(9))
        times[i] = fold(lambda a0, a1, a2, b0, b1, b2: (maximum(a0, b0), where(b0 > a0, a1 + bonus[i], a1), a2 | b2))\
((x[i, k], i64(0), x[i, k] > f32(1.5)) for k in box(9))[1]
        seen[i] = fold(lambda a0, a1, a2, b0, b1, b2: (maximum(a0, b0), where(b0 > a0, a1 + bonus[i], a1), a2 | b2))\
((x[i, k], i64(0), x[i, k] > f32(1.5)) for k in box(9))[2]
"""
    x = np.random.default_rng(3).standard_normal((4, 9)).astype(np.float32)
    x[1, 4] = np.nan
    bonus = np.array([1, 10, 100, 1000])
    most, times, seen = np.empty(4, np.float32), np.empty(4, np.int64), np.empty(4, np.bool_)
    run(text, limit=limit, x=x, bonus=bonus, most=most, times=times, seen=seen)
    np.testing.assert_array_equal(most, x.max(-1))
    improvements = [sum(bool(row[k] > row[:k].max()) for k in range(1, 9)) for row in x]
    np.testing.assert_array_equal(times, bonus * improvements)
    np.testing.assert_array_equal(seen, (x > 1.5).any(-1))


def test_halves_are_rounded_at_every_step() -> None:
    """Adding 1 to 2048 in f16 is 2048 again; a sum would be rounded once."""
    text = """\
def program(x: f16[4], y: out(f16[()]), z: out(f16[4])):
    for _ in box():
        y[()] = fold(lambda a0, b0: a0 + b0)(x[k] for k in box(4))
    for _ in box():
        for k in scan(4):
            z[k] = fold(lambda a0, b0: a0 + b0)(x[k])
"""
    x, y, z = np.array([2048, 1, 1, 1], np.float16), np.empty((), np.float16), np.empty(4, np.float16)
    run(text, x=x, y=y, z=z)
    assert y == 2048
    assert z.tolist() == [2048] * 4


def test_a_guard_around_a_fold_and_one_in_its_combine() -> None:
    """Where the guard is false nothing is read and nothing divided, whatever the rubbish that is combined there."""
    text = """\
def program(x: i64[4], y: out(i64[6])):
    for i in box(6):
        y[i] = guarded(value(i) < i64(4), fold(lambda a0, b0: guarded(b0 != i64(0), floordiv(a0, b0), a0))\
(x[i] - value(k) for k in box(3)), i64(-1))
"""
    x, y = np.array([2, 7, 100, 1]), np.empty(6, np.int64)
    run(text, x=x, y=y)
    assert y.tolist() == [2, 7 // 6 // 5, 100 // 99 // 98, -1, -1, -1]


def test_a_fold_of_nothing_has_no_answer() -> None:
    """The checker trusts a difference of sizes; the oracle finds out."""
    text = """\
def program(s0: size(0, 4), x: f32[4], y: out(f32[()])):
    for _ in box():
        y[()] = fold(lambda a0, b0: a0 + b0)(x[k] for k in box(4 - s0))
"""
    x, y = np.arange(4, dtype=np.float32), np.empty((), np.float32)
    run(text, {"s0": 1}, x=x, y=y)
    assert y == 3
    with pytest.raises(Malformed, match="a fold of nothing"):
        run(text, {"s0": 4}, x=x, y=y)


def test_a_scan_in_place_with_a_result_unused() -> None:
    """A recurrence h = a*h + b, over what was there."""
    text = """\
def program(a: f64[3, 5], h: inout(f64[3, 5])):
    for i in box(3):
        for k in scan(5):
            _, h[i, k] = fold(lambda a0, a1, b0, b1: (a0 * b0, a1 * b0 + b1))(a[i, k], h[i, k])
"""
    random = np.random.default_rng(1)
    a, h = random.standard_normal((3, 5)), random.standard_normal((3, 5))
    wanted = h.copy()
    for k in range(1, 5):
        wanted[:, k] += a[:, k] * wanted[:, k - 1]
    run(text, a=a, h=h)
    np.testing.assert_array_equal(h, wanted)


def test_what_the_values_raise_comes_before_any_store() -> None:
    text = """\
def program(n: i64[3], x: i64[4], y: inout(i64[2, 3])):
    for i in box(2):
        for k in scan(3):
            y[i, k] = fold(lambda a0, b0: a0 + b0)(x[at(checked(n[k] + value(i), 4, True, 'IndexError', 'no'), 0, 3)])
"""
    y = np.full((2, 3), 7)
    with pytest.raises(IndexError, match="no"):
        run(text, limit=1, n=np.array([0, 1, 3]), x=np.arange(4), y=y)
    assert (y == 7).all()


# ---- what passes and walks do to them

HEAD = "def program(x: f32[4, 2, 3], w: f32[4], y: out(f32[4]), z: out(f32[4, 6])):\n"


def passed(change: Callable[[Program], Program], before: str) -> str:
    program = change(parse_program(before))
    check_program(program, "a test")
    return show(program)


@pytest.mark.parametrize(
    ("change", "before", "after"),
    [
        (
            merge_axes,
            "y[i] = fold(lambda a0, b0: a0 + b0 * w[i])(x[i, k, l] for k, l in box(2, 3))",
            "y[i] = fold(lambda a0, b0: a0 + b0 * w[i])(x[i, (k_l // 3), (k_l % 3)] for k_l in box(6))",
        ),
        (
            drop_unit_axes,
            "y[i] = fold(lambda a0, b0: a0 + b0)(x[i, k, l] for k, l in box(1, 3))",
            "y[i] = fold(lambda a0, b0: a0 + b0)(x[i, 0, l] for l in box(3))",
        ),
        (
            drop_unit_axes,
            "y[i] = fold(lambda a0, b0: a0 + b0)(x[i, k, l] for k, l in box(1, 1))",
            "y[i] = fold(lambda a0, b0: a0 + b0)(x[i, k, 0] for k in box(1))",
        ),
        (
            fold_constants,
            "y[i] = fold(lambda a0, b0: a0 + b0 * (f32(2.0) + f32(3.0)))(x[i, k, 0] for k in box(2))",
            "y[i] = fold(lambda a0, b0: a0 + b0 * f32(5.0))(x[i, k, 0] for k in box(2))",
        ),
    ],
)
def test_passes_reach_into_folds(change: Callable[[Program], Program], before: str, after: str) -> None:
    frame = HEAD + "    for i in box(4):\n        {}\n    for i, j in box(4, 6):\n        z[i, j] = w[i]\n"
    assert passed(change, frame.format(before)) == frame.format(after)


def test_a_target_that_nobody_reads_goes() -> None:
    frame = (
        "def program(x: f32[4, 6], y: out(f32[4, 6])):\n{}    for i in box(4):\n        for k in scan(6):\n"
        "            {} = fold(lambda a0, a1, b0, b1: (a0 + a1, b1))(x[i, k], f32(1.0))\n"
    )
    before = frame.format("    t = local(f32[4, 6])\n", "y[i, k], t[i, k]")
    assert passed(drop_dead_stores, before) == frame.format("", "y[i, k], _")


i, k = Axis("i", constant(4)), Axis("k", constant(6))
left, right = Argument("left", 0, f32), Argument("right", 0, f32)


def test_axes_of_a_fold_are_its_own() -> None:
    program = parse_program(
        "def program(x: f32[4, 6], y: out(f32[4])):\n    for i in box(4):\n"
        "        y[i] = fold(lambda a0, b0: a0 + b0)(x[i, k] for k in box(6))\n"
    )
    (fold,) = (node for node in walk(program) if isinstance(node, Fold))
    assert free_axes(fold) == {i}
    # The place to which it moves has a k already: the fold's own gets another name.
    moved = substitute_axes(fold, {i: index(3)}, around=(k,))
    assert show(moved) == "fold(lambda a0, b0: a0 + b0)(x[3, k_1] for k_1 in box(6))"
    assert show(substitute_axes(fold, {i: of_atom(k)})).endswith("(x[k, k_1] for k_1 in box(6))")
    assert "fold(lambda a0, b0: a0 + b0)(u[i, k]" in show(rename_buffers(program, {"x": "u"}))


def test_what_holds_an_argument() -> None:
    total = Apply("add", (left, right))
    values = (Apply("exp", (Argument("left", 0, i64),)),)
    assert holds_argument(total)
    assert not holds_argument(Fold((total,), (k,), (Apply("abs", ()),), 0)), "the fold binds it"
    assert holds_argument(Fold((total,), (k,), values, 0)), "its values stand outside of the combine"


def test_all_passes_keep_a_fold_that_has_nothing_to_simplify() -> None:
    text = (
        "def program(a: f32[4, 6], b: f32[4, 6], h: out(f32[4, 6])):\n    for i in box(4):\n"
        "        for k in scan(6):\n"
        "            _, h[i, k] = fold(lambda a0, a1, b0, b1: (a0 * b0, a1 * b0 + b1))(a[i, k], b[i, k])\n"
    )
    program = parse_program(text)
    for change in LOOP_PASSES:
        program = change(program)
    assert show(program) == text
