"""The passes of the schedule over single kernels: same values, by the oracle and by native code."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from ferrite.artifact.kernels import kernels_of
from ferrite.loops.nodes import Program
from ferrite.loops.text import parse_program, show
from ferrite.schedule.keep_exponentials import keep_exponentials
from ferrite.schedule.keep_rows import keep_rows
from ferrite.schedule.lift_reductions import lift_reductions
from ferrite.schedule.tile import tile_transposes
from tests.unit.test_rewrite import assert_keeps_every_bit

PASSES: dict[str, Callable[[Program], Program]] = {
    "lift_reductions": lift_reductions,
    "keep_rows": keep_rows,
    "keep_exponentials": keep_exponentials,
    "tile_transposes": partial(tile_transposes, side=2),
}


@pytest.mark.parametrize("name", PASSES)
def test_a_pass_keeps_every_bit_of_random_programs(name: str) -> None:
    assert_keeps_every_bit(PASSES[name])


def body_of(program: Program) -> list[str]:
    return show(program).strip().splitlines()[1:]


def test_a_reduction_that_an_outer_loop_would_repeat_is_lifted() -> None:
    program = parse_program("""
def program(x: f32[32, 64, 49], y: out(f32[32, 64, 49])):
    for n, c, h in box(32, 64, 49):
        y[n, c, h] = x[n, c, h] - sum(x[k, c, l] for k, l in box(32, 49)) / f32(1568.0)
""")
    assert body_of(lift_reductions(program)) == [
        "    sum_value = local(f32[64])",
        "    for c in box(64):",
        "        sum_value[c] = sum(x[k, c, l] for k, l in box(32, 49))",
        "    for n, c, h in box(32, 64, 49):",
        "        y[n, c, h] = x[n, c, h] - sum_value[c] / f32(1568.0)",
    ]


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
    assert lift_reductions(program) is program


def test_a_transpose_runs_in_squares() -> None:
    program = parse_program("""
def program(x: f32[256, 130], y: out(f32[130, 256])):
    for i, j in box(130, 256):
        y[i, j] = x[j, i]
""")
    assert body_of(tile_transposes(program)) == [
        "    for i_block, j_block, i_1, j_1 in box(4, 8, 32, 32):",
        "        y[i_1 + 32*i_block, j_1 + 32*j_block] = x[j_1 + 32*j_block, i_1 + 32*i_block]",
        "    for i_2, j in box(2, 256):",
        "        y[i_2 + 128, j] = x[j, i_2 + 128]",
    ]


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
    assert tile_transposes(program) is program


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
    )
    assert len(program.nests) == 3
    x = torch.from_numpy(np.arange(rows * columns, dtype=np.float32).reshape(columns, rows))
    y = torch.full((rows, columns), -1.0)
    kernels_of([program], "native").functions[program.name](x, y, rows, columns)
    assert torch.equal(y, x.t())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("executor", ["oracle", "native"])
def test_squares_are_turned(dtype: torch.dtype, executor: str) -> None:
    """Through torch.compile, with guards, a broadcast and a mixture of dtypes beside the transposed tensor."""

    def function(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> Any:
        padded = torch.nn.functional.pad(x.t().to(torch.float32), (1, 0))[:, :-1]
        return x.t().contiguous(), y + x.t().to(torch.float32) * z, padded + x.t().to(torch.float32)

    torch.manual_seed(0)
    x = torch.randint(0, 2, (163, 131)).to(dtype)
    y, z = torch.randn(131, 163), torch.randn(163)
    options = {"executor": executor, "strict": True}
    found = torch.compile(function, backend="ferrite", options=options)(x, y, z)
    torch.testing.assert_close(found, function(x, y, z))
