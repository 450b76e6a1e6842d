"""The passes of the schedule over single kernels: same values, by the oracle and by native code."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from ferrite.artifact.kernels import build_code, link
from ferrite.decisions import Decision
from ferrite.loops.nodes import Apply, Expr, Load, Program, Store
from ferrite.loops.rewrite import walk
from ferrite.loops.text import parse_program, show
from ferrite.schedule import shape, tile
from ferrite.schedule.arrange import arrange
from ferrite.schedule.cut_at_guards import cut_at_guards
from ferrite.schedule.decided import Decided
from ferrite.schedule.keep_exponentials import keep_exponentials
from ferrite.schedule.keep_rows import keep_rows
from ferrite.schedule.lift_reductions import lift_reductions
from ferrite.schedule.shape import always_read, are_independent
from ferrite.schedule.split_axes import split_axes
from ferrite.schedule.tile import tile_transposes
from tests.unit.test_rewrite import assert_keeps_every_bit

PASSES: dict[str, Callable[[Program], Decided]] = {
    "lift_reductions": lift_reductions,
    "keep_rows": keep_rows,
    "keep_exponentials": keep_exponentials,
    "split_axes": partial(split_axes, shortest=1),
    "cut_at_guards": partial(cut_at_guards, shortest=1),
    "tile_transposes": partial(tile_transposes, side=2),
}


@pytest.mark.parametrize("name", PASSES)
def test_a_pass_keeps_every_bit_of_random_programs(name: str) -> None:
    assert_keeps_every_bit(lambda program: PASSES[name](program).program)


def body_of(program: Program) -> list[str]:
    return show(program).strip().splitlines()[1:]


def test_a_reduction_that_an_outer_loop_would_repeat_is_lifted() -> None:
    program = parse_program("""
def program(x: f32[32, 64, 49], y: out(f32[32, 64, 49])):
    for n, c, h in box(32, 64, 49):
        y[n, c, h] = x[n, c, h] - sum(x[k, c, l] for k, l in box(32, 49)) / f32(1568.0)
""")
    assert body_of(lift_reductions(program).program) == [
        "    sum_value = local(f32[64])",
        "    for c in box(64):",
        "        sum_value[c] = sum(x[k, c, l] for k, l in box(32, 49))",
        "    for n, c, h in box(32, 64, 49):",
        "        y[n, c, h] = x[n, c, h] - sum_value[c] / f32(1568.0)",
    ]


def test_a_reduction_that_stretches_of_a_loop_would_repeat_is_lifted_once_for_each() -> None:
    text = """
def program(x: f32[4, 24, 5], y: out(f32[4, 24, 5])):
    for n, c, h in box(4, 24, 5):
        y[n, c, h] = x[n, c, h] - sum({value} for k, l in box(8, 5))
"""
    grouped = parse_program(text.format(value="x[n, 8*(c // 8) + k, l]"))
    assert body_of(lift_reductions(grouped).program) == [
        "    sum_value = local(f32[4, 3])",
        "    for n, c in box(4, 3):",
        "        sum_value[n, c] = sum(x[n, 8*c + k, l] for k, l in box(8, 5))",
        "    for n, c, h in box(4, 24, 5):",
        "        y[n, c, h] = x[n, c, h] - sum_value[n, (c // 8)]",
    ]
    reason = "sum over box(8, 5) once instead of 40 times: 1 operations a step again, or 4 bytes read"
    assert lift_reductions(grouped).decisions == (Decision("lift", ("program", "sum_value"), True, reason),)
    for value in ("x[n, 8*(c // 8) + k, l] * x[n, c, 0]", "x[n, (c + k) % 24, l]", "x[n, 5*(c // 5) % 16 + k, l]"):
        other = parse_program(text.format(value=value))
        assert lift_reductions(other).program is other, "it knows where in the stretch it is, or stretches are uneven"


def test_a_loop_may_have_any_name_and_tell_where_in_a_stretch_a_point_is() -> None:
    program = parse_program("""
def program(x: f32[3, 31, 4], y: out(f32[24, 8])):
    for c, rest in box(24, 8):
        y[c, rest] = sum(x[(c // 8), c - rest + 7, k] for k in box(4))
""")
    assert lift_reductions(program).program is program


FLAT = """
def program(x: f32[256], z: f32[{n}], y: out(f32[256])):
    for i in box(256):
        y[i] = x[i] + {value}
"""


@pytest.mark.parametrize(
    ("value", "n", "length", "split"),
    [
        ("z[i % 64]", 64, 64, "z[i_rest]"),
        ("z[i // 64]", 4, 64, "z[i]"),
        ("z[i // 32 % 4]", 4, 32, "z[(i % 4)]"),
        ("z[i // 16 + i % 64]", 99, 16, "z[i + i_rest + 16*(i % 4)]"),
        ("guarded(value(i % 64) < i64(32), z[0], f32(0.0))", 1, 64, "guarded(value(i_rest) < i64(32), z[0], f32(0.0))"),
    ],
)
def test_lanes_that_a_place_divides_are_two_loops(value: str, n: int, length: int, split: str) -> None:
    program = parse_program(FLAT.format(value=value, n=n))
    place = f"{length}*i + i_rest"
    found = split_axes(program)
    assert body_of(found.program) == [
        f"    for i, i_rest in box({256 // length}, {length}):",
        f"        y[{place}] = x[{place}] + {split}",
    ]
    reason = f"what divided it runs along the loops of box({256 // length}, {length})"
    assert found.decisions == (Decision("split axis", ("program", "y"), True, reason),)


@pytest.mark.parametrize(
    ("value", "reasons"),
    [
        ("z[i % 8]", ["no part of at least 16 elements goes into 256"]),
        ("z[i % 48]", ["no part of at least 16 elements goes into 256"]),
        ("z[4*(i // 4) + i % 4]", []),  # the division is none
        ("z[(i + 1) % 64]", []),  # rows begin elsewhere
    ],
)
def test_an_axis_stays_one(value: str, reasons: list[str]) -> None:
    program = parse_program(FLAT.format(value=value, n=512))
    found = split_axes(program)
    assert found.program is program
    assert found.decisions == tuple(Decision("split axis", ("program", "y"), False, reason) for reason in reasons)


@pytest.mark.parametrize(("operation", "is_split"), [("exp", False), ("neg", True)])
def test_rows_that_do_not_fill_vectors_stay_where_much_is_computed(operation: str, is_split: bool) -> None:
    program = parse_program(f"""
def program(x: f32[187], z: f32[17], y: out(f32[187])):
    for i in box(187):
        y[i] = {operation}(x[i] + z[i % 17])
""")
    found = split_axes(program)
    (decision,) = found.decisions
    assert decision.taken == (found.program is not program) == is_split
    assert is_split or decision.reason == "rows of 17 would end in a vector that is nearly empty"


def test_a_scan_keeps_its_axes() -> None:
    program = parse_program("""
def program(x: f32[8, 64], z: f32[16], y: out(f32[8, 64])):
    for i in box(64):
        for k in scan(8):
            y[k, i] = cumsum(x[k, i] + z[i % 16])
""")
    found = split_axes(program)
    assert found.program is program
    assert [decision.taken for decision in found.decisions] == [False]


def test_nests_that_hand_something_on_keep_their_axes() -> None:
    program = parse_program("""
def program(x: f32[64], y: out(f32[256])):
    t = local(f32[256])
    for i in box(256):
        t[i] = exp(x[i % 64])
    for i in box(256):
        y[i] = t[i] * f32(2.0)
""")
    found = split_axes(program)
    assert found.program is program
    reason = "other nests share its loops"
    assert found.decisions == (Decision("split axis", ("program", "t"), False, reason),)


STAY = {
    "of the first loops": "y[i, j] = x[i, j] - sum(x[i, k] for k in box(8))",
    "under a guard": "y[i, j] = guarded(value(i) < i64(3), sum(x[k, j] for k in box(8)), f32(0.0))",
    "of what the nest writes": "y[i, j] = sum(y[k, j] for k in box(8))",
}


@pytest.mark.parametrize("why", STAY)
def test_a_reduction_stays(why: str) -> None:
    program = parse_program(f"""
def program(x: f32[8, 8], y: inout(f32[8, 8])):
    for i, j in box(8, 8):
        {STAY[why]}
""")
    assert lift_reductions(program).program is program


def test_a_transpose_runs_in_squares() -> None:
    program = parse_program("""
def program(x: f32[256, 130], y: out(f32[130, 256])):
    for i, j in box(130, 256):
        y[i, j] = x[j, i]
""")
    assert body_of(tile_transposes(program).program) == [
        "    for i_block, j_block, i_1, j_1 in box(4, 8, 32, 32):",
        "        y[i_1 + 32*i_block, j_1 + 32*j_block] = x[j_1 + 32*j_block, i_1 + 32*i_block]",
        "    for i_2, j in box(2, 256):",
        "        y[i_2 + 128, j] = x[j, i_2 + 128]",
    ]


def test_large_tiles_are_high_and_narrow() -> None:
    """1 KiB of what is read across, 128 bytes of what is written."""
    program = parse_program("""
def program(x: f32[256, 514], z: f32[514, 256], y: out(f32[514, 256])):
    for i, j in box(514, 256):
        y[i, j] = x[j, i] + z[i, j]
""")
    with mock.patch.object(shape, "LARGE_ACROSS", 1):
        tiled = tile_transposes(program).program
    assert body_of(tiled) == [
        "    for i_block, j_block, i_1, j_1 in box(2, 8, 256, 32):",
        "        y[i_1 + 256*i_block, j_1 + 32*j_block] = x[j_1 + 32*j_block, i_1 + 256*i_block]"
        " + z[i_1 + 256*i_block, j_1 + 32*j_block]",
        "    for i_2, j in box(2, 256):",
        "        y[i_2 + 512, j] = x[j, i_2 + 512] + z[i_2 + 512, j]",
    ]


def test_high_and_narrow_tiles_keep_every_bit() -> None:
    tiny = mock.patch.multiple(tile, HEIGHTS=(64, 16), WIDTH=8, FEW_POINTS=1)
    with tiny, mock.patch.object(shape, "LARGE_ACROSS", 0):
        assert_keeps_every_bit(lambda program: tile_transposes(program, side=2).program)


ROTATED = """
def program(x: f32[8, 64], z: f32[8, 64], y: out(f32[8, 64])):
    for i, j in box(8, 64):
        y[i, j] = x[i, j] * guarded({condition}, z[i, j + 32], z[i, j])
"""


@pytest.mark.parametrize(
    ("condition", "cut"),
    [
        ("value(j) < i64(20)", 20),
        ("value(j) <= i64(20)", 21),
        ("i64(20) > value(j)", 20),
        ("i64(20) >= value(j)", 21),
        ("value(20 - j) >= i64(0)", 21),
        ("value(j + 12) < i64(32)", 20),
    ],
)
def test_lanes_are_cut_where_a_guard_changes(condition: str, cut: int) -> None:
    program = parse_program(ROTATED.format(condition=condition))
    places = ["j", f"j + {cut}"]
    assert body_of(cut_at_guards(program).program) == [
        f"    for i, j in box(8, {cut}):",
        "        y[i, j] = x[i, j] * z[i, j + 32]",
        f"    for i, j in box(8, {64 - cut}):",
        f"        y[i, {places[1]}] = x[i, {places[1]}] * z[i, {places[1]}]",
    ]


@pytest.mark.parametrize(
    "condition",
    [
        "value(j) < i64(8)",  # a part would be short
        "value(j) < value(i)",  # another place in each row
        "value(i) < i64(4)",  # the same for all lanes
        "(value(j) < i64(24)) & (z[i, j] > f32(0.0)) & (value(j) >= i64(20))",  # a part would be short
    ],
)
def test_lanes_stay_whole(condition: str) -> None:
    program = parse_program(ROTATED.format(condition=condition))
    assert cut_at_guards(program).program is program


def test_what_nests_hand_on_is_not_cut() -> None:
    program = parse_program("""
def program(x: f32[8, 64], y: out(f32[8, 64])):
    t = local(f32[8, 64])
    for i, j in box(8, 64):
        t[i, j] = guarded(value(j) < i64(32), x[i, j + 32], f32(0.0))
    for i, j in box(8, 64):
        y[i, j] = exp(t[i, j])
""")
    assert cut_at_guards(program).program is program


def test_threads_share_rows_that_are_cut() -> None:
    """Two stores per row, rows counted by one axis that stands for two dimensions."""
    program = parse_program("""
def program(x: f32[4, 8, 64], y: out(f32[4, 8, 64])):
    for i, k, j in box(4, 8, 64):
        y[i, k, j] = guarded(value(j) < i64(32), x[i, k, j + 32], x[i, k, j - 32])
""")
    (loop,) = arrange(cut_at_guards(program).program).loops
    assert [axis.name for axis in loop.axes] == ["i_k"]
    assert are_independent([*loop.statements()], loop.axes[0])


@pytest.mark.parametrize(
    "text",
    [
        "y[i, j] = x[i, j]",  # along memory on both sides
        "y[i, j] = x[0, i]",  # the same for all columns
        "y[i, j] += x[j, i]",  # the order of points matters
    ],
)
def test_nothing_to_tile(text: str) -> None:
    role = "inout" if "+=" in text else "out"
    program = parse_program(f"""
def program(x: f32[256, 256], y: {role}(f32[256, 256])):
    for i, j in box(256, 256):
        {text}
""")
    assert tile_transposes(program).program is program


@pytest.mark.parametrize("rows", [0, 1, 31, 32, 33, 127, 128, 129, 160, 191])
@pytest.mark.parametrize("columns", [127, 128, 161])
def test_squares_cover_every_element_once(rows: int, columns: int) -> None:
    """Sizes known at run time only, native code."""
    program = tile_transposes(
        parse_program("""
def program(s0: size(0, 512), s1: size(0, 512), x: f32[s1, s0], y: out(f32[s0, s1])):
    for i, j in box(s0, s1):
        y[i, j] = x[j, i]
""")
    ).program
    assert len(program.nests) == 3
    x = torch.from_numpy(np.arange(rows * columns, dtype=np.float32).reshape(columns, rows))
    y = torch.full((rows, columns), -1.0)
    link([program], build_code([program])[0]).functions[program.name](x, y, rows, columns)
    assert torch.equal(y, x.t())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize(
    ("executor", "rows", "columns"), [("oracle", 131, 163), ("native", 131, 163), ("native", 514, 257)]
)
def test_tiles_are_turned(dtype: torch.dtype, executor: str, rows: int, columns: int) -> None:
    """Through torch.compile, with guards, a broadcast and a mixture of dtypes beside the transposed tensor."""

    def function(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> Any:
        padded = torch.nn.functional.pad(x.t().to(torch.float32), (1, 0))[:, :-1]
        return x.t().contiguous(), y + x.t().to(torch.float32) * z, padded + x.t().to(torch.float32)

    torch.manual_seed(0)
    x = torch.randint(0, 2, (columns, rows)).to(dtype)
    y, z = torch.randn(rows, columns), torch.randn(columns)
    options = {"executor": executor, "strict": True, "cache": "off"}
    with mock.patch.object(shape, "LARGE", 1):
        found = torch.compile(function, backend="ferrite", options=options)(x, y, z)
    torch.testing.assert_close(found, function(x, y, z))


def test_decisions_on_lifted_reductions() -> None:
    text = """
def program(x: f32[32, 64, 49], y: out(f32[32, 64, 49])):
    for n, c, h in box(32, 64, 49):
        y[n, c, h] = {}
"""
    lifted = lift_reductions(parse_program(text.format("x[n, c, h] - sum(x[k, c, l] for k, l in box(32, 49))")))
    reason = "sum over box(32, 49) once instead of 1568 times: 1 operations a step again, or 4 bytes read"
    assert lifted.decisions == (Decision("lift", ("program", "sum_value"), True, reason),)
    guarded = "guarded(value(h) < i64(3), sum(x[k, c, l] for k, l in box(32, 49)), f32(0.0))"
    reason = "sum over box(32, 49) is computed again and again: a guard protects it"
    assert lift_reductions(parse_program(text.format(guarded))).decisions == (
        Decision("lift", ("program", "y"), False, reason),
    )


@pytest.mark.parametrize(
    ("rows", "columns", "taken", "reason"),
    [
        (256, 130, True, "j and i both run along memory: tiles of 32 by 32, which the cache holds"),
        (256, 12, False, "i has 12 points, no more than a tile of 32"),
    ],
)
def test_decisions_on_transposes(rows: int, columns: int, taken: bool, reason: str) -> None:
    program = parse_program(f"""
def program(x: f32[{rows}, {columns}], y: out(f32[{columns}, {rows}])):
    for i, j in box({columns}, {rows}):
        y[i, j] = x[j, i]
""")
    assert tile_transposes(program).decisions == (Decision("tile", ("program", "y"), taken, reason),)


@pytest.mark.parametrize(
    ("at", "taken", "reason"),
    [
        (32, True, "parts of 32, 32 elements know what their guards say"),
        (4, False, "a part of 4 elements is shorter than 16"),
    ],
)
def test_decisions_on_guards(at: int, taken: bool, reason: str) -> None:
    program = parse_program(f"""
def program(x: f32[512, 128], z: f32[512, 64], y: out(f32[512, 64])):
    for i, j in box(512, 64):
        y[i, j] = guarded(value(j) < i64({at}), x[i, j + 32], z[i, j])
""")
    assert cut_at_guards(program).decisions == (Decision("cut at guards", ("program", "y"), taken, reason),)


def test_what_is_used_twice_is_looked_at_once() -> None:
    """A value that is doubled again and again is a million paths to one load. The gradient of i1e took minutes."""
    program = parse_program("def kernel(x: f32[8], y: out(f32[8])):\n    for i in box(8):\n        y[i] = x[i]\n")
    (store,) = program.nests[0].body
    assert isinstance(store, Store)
    value: Expr = store.value
    for _ in range(20):
        value = Apply("add", (value, value))
    loads = [*always_read(Store(store.buffer, store.index, value))]
    assert loads == [node for node in walk(store) if isinstance(node, Load)]
