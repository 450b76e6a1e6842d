"""Long reductions in blocks: what becomes of them, what stays whole, and that answers stay the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ferrite.decisions import Decision
from ferrite.loops import oracle, oracle_values
from ferrite.loops.check import check_program
from ferrite.loops.nodes import Program
from ferrite.loops.text import parse_program, show
from ferrite.native.target import host
from ferrite.schedule.arrange import arrange
from ferrite.schedule.split_reduction import Limits, split_reductions
from tests.unit.loop_programs import programs, size_values
from tests.unit.test_native_kernels import Code, agrees, assert_as_the_oracle, inputs

SMALL = Limits(few=1 << 40, long=0, block=6, columns=240, rows=2, piece=2, cached=0)  # splits whatever can be split
ONE_STREAM = Limits(piece=1 << 40)
STREAMS = Limits(cached=0)


def split(text: str, limits: Limits = SMALL) -> Program:
    program = split_reductions(parse_program(text), limits).program
    check_program(program, "split_reductions")
    return program


def stays(text: str, limits: Limits = SMALL) -> bool:
    return split(text, limits) is parse_program(text)


# ---- what becomes of them


def test_parts_then_the_whole_then_who_asked_for_it() -> None:
    text = """
def program(x: f32[4, 1000000], y: out(f32[4])):
    for i in box(4):
        y[i] = exp(sum(x[i, k] for k in box(1000000)))
"""
    after = """
def program(x: f32[4, 1000000], y: out(f32[4])):
    part_value = local(f32[500])
    whole_value = local(f32[4])
    for i, k_block in box(4, 125):
        part_value[125*i + k_block] = sum(x[i, k + 8000*k_block] for k in box(8000))
    for i in box(4):
        whole_value[i] = sum(part_value[125*i + t] for t in box(125))
    for i in box(4):
        y[i] = exp(whole_value[i])
"""
    assert show(split(text, ONE_STREAM)) == after.lstrip()


def test_what_is_left_over_at_run_time_is_a_loop_of_one_round_or_none() -> None:
    text = """
def program(s0: size(1), x: f32[s0], y: out(f32[()])):
    for _ in box():
        y[()] = max(x[k] for k in box(s0))
"""
    after = """
def program(s0: size(1), x: f32[s0], y: out(f32[()])):
    part_value = local(f32[((s0 + 8191) // 8192)])
    whole_value = local(f32[()])
    for k_block in box((s0 // 8192)):
        part_value[k_block] = max(x[k + 8192*k_block] for k in box(8192))
    for k_last in box(-(s0 // 8192) + ((s0 + 8191) // 8192)):
        part_value[(s0 // 8192)] = max(x[k + 8192*(s0 // 8192)] for k in box((s0 % 8192)))
    for _ in box():
        whole_value[()] = max(part_value[t] for t in box(((s0 + 8191) // 8192)))
    for _ in box():
        y[()] = whole_value[()]
"""
    assert show(split(text, ONE_STREAM)) == after.lstrip()


def test_a_block_has_four_pieces_a_quarter_of_the_box_from_each_other() -> None:
    text = """
def program(x: f32[1000000], y: out(f32[()])):
    for _ in box():
        y[()] = sum(x[k] for k in box(1000000))
"""
    after = """
    for k_block in box(125):
        part_value[k_block] = sum(x[k + 2000*k_block] + x[k + 2000*k_block + 250000] + (x[k + 2000*k_block + 500000] + x[k + 2000*k_block + 750000]) for k in box(2000))
"""  # noqa: E501
    assert after.lstrip("\n") in show(split(text, STREAMS))
    assert "sum(x[k + 8000*k_block] for k in box(8000))" in show(split(text, Limits())), "a cache may hold it"
    assert "+ 9000000]" in show(split(text.replace("1000000", "12000000"), Limits())), "none holds 48 MB"


def test_sizes_of_run_time_have_pieces_too_and_one_for_what_is_left() -> None:
    text = """
def program(s0: size(1), x: f32[s0], y: out(f32[()])):
    for _ in box():
        y[()] = max(x[k] for k in box(s0))
"""
    made = show(split(text, STREAMS))
    assert "x[k + 2048*k_block + 6144*(s0 // 8192)]" in made
    assert "max(x[k + 8192*(s0 // 8192)] for k in box((s0 % 8192)))" in made
    assert "max(x[k + 8192*k_block] for k in box(8192))" in show(split(text, Limits())), "a cache may hold it"


def test_pieces_of_several_rows_and_rows_that_are_pieces_themselves() -> None:
    text = """
def program(x: f32[{rows}, {columns}], y: out(f32[()])):
    for _ in box():
        y[()] = max(x[r, k] for r, k in box({rows}, {columns}))
"""
    several = show(split(text.format(rows=4096, columns=1024), STREAMS))
    assert "for r, k in box(2, 1024)" in several
    assert "x[r + 2*r_block + 3072, k]" in several
    one = show(split(text.format(rows=64, columns=8192), STREAMS))
    assert "for r_block in box(16):" in one
    assert "x[r_block + 48, k]" in one
    assert "for k in box(8192)" in one


@pytest.mark.parametrize(("dtype", "rows"), [("f32", 128), ("f64", 64), ("i8", 512)])
def test_blocks_of_rows_have_as_many_bytes_in_every_type(dtype: str, rows: int) -> None:
    text = f"""
def program(x: {dtype}[65536, 1024], y: out({dtype}[1024])):
    for j in box(1024):
        y[j] = max(x[r, j] for r in box(65536))
"""
    assert f"for r in box({rows})" in show(split(text, Limits()))


def test_what_reads_a_block_once_for_several_reductions_has_pieces_for_all_or_none() -> None:
    text = """
def program(x: f32[1000000], y: out(f32[()]), z: out({dtype}[()])):
    for _ in box():
        y[()] = sum(x[k] for k in box(1000000))
        z[()] = {other}(x[k] for k in box(1000000)){part}
"""
    both = show(split(text.format(dtype="f32", other="max", part=""), STREAMS))
    assert both.count("+ 750000]") == 2
    neither = show(split(text.format(dtype="i64", other="argmax", part=".index"), STREAMS))
    assert "750000" not in neither
    assert neither.count("for k in box(8000)") == 3  # the sum, the greatest and where it is


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("x[k] * y[k]", "two loads are two streams already"),
        ("exp(x[k] * 2.0 + 1.0)", "it is not memory that takes the time"),
    ],
)
def test_one_stream_is_enough_for(value: str, reason: str) -> None:
    text = f"""
def program(x: f32[1000000], y: f32[1000000], z: out(f32[()])):
    for _ in box():
        z[()] = sum({value.replace("2.0", "f32(2.0)").replace("1.0", "f32(1.0)")} for k in box(1000000))
"""
    assert "for k in box(8000)" in show(split(text, STREAMS)), reason


def test_reductions_over_one_box_are_cut_together_and_columns_stay_last() -> None:
    text = """
def program(x: f32[9, 40], y: out(f32[40]), z: out(f32[40])):
    for c in box(40):
        y[c] = sum(x[r, c] for r in box(9))
        z[c] = sum(x[r, c] * x[r, c] for r in box(9))
"""
    after = """
def program(x: f32[9, 40], y: out(f32[40]), z: out(f32[40])):
    part_value = local(f32[120])
    part_value_1 = local(f32[120])
    whole_value = local(f32[40])
    whole_value_1 = local(f32[40])
    for r_block, c in box(3, 40):
        part_value[c + 40*r_block] = sum(x[r + 3*r_block, c] for r in box(3))
        part_value_1[c + 40*r_block] = sum(x[r + 3*r_block, c] * x[r + 3*r_block, c] for r in box(3))
    for c in box(40):
        whole_value[c] = sum(part_value[c + 40*t] for t in box(3))
        whole_value_1[c] = sum(part_value_1[c + 40*t] for t in box(3))
    for c in box(40):
        y[c] = whole_value[c]
        z[c] = whole_value_1[c]
"""
    assert show(split(text)) == after.lstrip()


def test_a_reduction_inside_another_one_is_read_by_it() -> None:
    text = """
def program(x: f32[60], y: out(f32[()])):
    for _ in box():
        y[()] = sum((x[k] - sum(x[m] for m in box(60))) * x[k] for k in box(60))
"""
    program = split(text)
    assert len(program.nests) == 5
    assert "x[k + 6*k_block] - whole_value[()]" in show(program)


# ---- what stays whole


def test_enough_work_around_it_or_too_little_in_it() -> None:
    for text in (
        "def program(x: f32[600], y: out(f32[()])):\n    for _ in box():\n"
        "        y[()] = sum(x[k] for k in box(600))\n",
        "def program(x: f32[64, 90000], y: out(f32[64])):\n    for i in box(64):\n"
        "        y[i] = sum(x[i, k] for k in box(90000))\n",
        "def program(s0: size(1), x: f32[s0, 90000], y: out(f32[s0])):\n    for i in box(s0):\n"
        "        y[i] = sum(x[i, k] for k in box(90000))\n",
    ):
        assert stays(text, Limits())


def test_what_a_guard_protects_stays_behind_it() -> None:
    text = """
def program(x: f32[60], y: out(f32[5])):
    for i in box(5):
        y[i] = guarded(value(i) > i64(2), sum(x[k] for k in box(60)), f32(0.0))
"""
    assert stays(text)


def test_what_its_nest_writes_is_read_in_its_turn() -> None:
    text = """
def program(x: inout(f32[60])):
    for i in box(60):
        x[i] = x[i] / sum(x[k] for k in box(60))
"""
    assert stays(text)


def test_an_error_keeps_its_turn() -> None:
    text = """
def program(n: i64[60], x: f32[9], y: out(f32[()])):
    for _ in box():
        y[()] = sum(x[at(checked(n[k], 9, False, 'IndexError', 'no'), 0, 8)] for k in box(60))
"""
    assert stays(text)


def test_a_box_that_may_be_empty_stays_whole() -> None:
    text = """
def program(s0: size(0), x: f32[s0], y: out(f32[()])):
    for _ in box():
        y[()] = sum(x[k] for k in box(s0))
"""
    assert stays(text)


# ---- the same answers

NESTS = {
    "sum": ("f32", "f32", "sum(x[i, k, l] for k, l in box(s0, 7))"),
    "sum of halves": ("bf16", "bf16", "sum(x[i, k, l] for k, l in box(s0, 7))"),
    "sum of integers": ("i8", "i8", "sum(x[i, k, l] for k, l in box(s0, 7))"),
    "product": ("f64", "f64", "prod(x[i, k, l] for k, l in box(s0, 7))"),
    "least": ("f32", "f32", "min(x[i, k, l] for k, l in box(s0, 7))"),
    "greatest": ("i64", "i64", "max(x[i, k, l] for k, l in box(s0, 7))"),
    "any": ("b8", "b8", "any(x[i, k, l] for k, l in box(s0, 7))"),
    "all": ("b8", "b8", "all(x[i, k, l] for k, l in box(s0, 7))"),
    "first of the greatest": ("f32", "i64", "argmax(x[i, k, l] for k, l in box(s0, 7)).index"),
    "first of the least": ("u8", "i64", "argmin(x[i, k, l] for k, l in box(s0, 7)).index"),
    "least by position": ("f16", "f16", "argmin(x[i, k, l] for k, l in box(s0, 7)).value"),
    "mean": ("f32", "f32", "welford(x[i, k, l] for k, l in box(s0, 7)).mean"),
    "distances": ("f64", "f64", "welford(x[i, k, l] for k, l in box(s0, 7)).m2"),
    "distances of halves": ("f16", "f16", "welford(x[i, k, l] for k, l in box(s0, 7)).m2"),
    "greatest of a softmax": ("f32", "f32", "softmax(x[i, k, l] for k, l in box(s0, 7)).max"),
    "sum of a softmax": ("f32", "f32", "softmax(x[i, k, l] for k, l in box(s0, 7)).sum"),
    "sum of a softmax of halves": ("bf16", "bf16", "softmax(x[i, k, l] for k, l in box(s0, 7)).sum"),
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", NESTS)
def test_every_reduction_gives_the_same_in_blocks(name: str) -> None:
    """In the oracle and in native code, with NaN, infinities and zeros of both signs here and there."""
    taken, given_back, value = NESTS[name]
    text = f"""
def kernel(s0: size(1, 100), x: {taken}[3, s0, 7], y: out({given_back}[3])):
    for i in box(3):
        y[i] = {value}
"""
    program, blocks = parse_program(text), split(text)
    assert blocks is not program
    code = Code(blocks, host())
    assert code.refused is None
    for s0 in (1, 2, 5, 17):
        for seed in range(6):
            whole, parts = inputs(program, {"s0": s0}, seed), inputs(program, {"s0": s0}, seed)
            if seed % 2 and taken in ("f32", "f64", "bf16", "f16"):  # without them, so that sums say something
                for arrays in (whole, parts):
                    arrays["x"][...] = oracle_values.to_storage(
                        np.random.default_rng(seed).normal(size=arrays["x"].shape), program.parameters[0].buffer.dtype
                    )
            oracle.run(program, {"s0": s0}, whole)
            oracle.run(blocks, {"s0": s0}, parts)
            assert agrees(parts["y"], whole["y"], program.parameters[1].buffer.dtype)
            assert_as_the_oracle(blocks, code, {"s0": s0}, seed)


def test_rows_of_nothing_but_minus_infinity() -> None:
    """A block of them adds nothing to a row that has more; a row of nothing else is NaN, as it is in eager."""
    text = """
def kernel(x: f32[3, 24], m: out(f32[3]), s: out(f32[3])):
    for i in box(3):
        m[i] = softmax(x[i, k] for k in box(24)).max
        s[i] = softmax(x[i, k] for k in box(24)).sum
"""
    program = split(text)
    x = np.full((3, 24), -np.inf, np.float32)
    x[0, 20], x[1, 3] = 2.0, np.inf
    arrays = {"x": x, "m": np.zeros(3, np.float32), "s": np.zeros(3, np.float32)}
    oracle.run(program, {}, arrays)
    np.testing.assert_array_equal(arrays["m"], np.array([2.0, np.inf, -np.inf], np.float32))
    np.testing.assert_array_equal(arrays["s"], np.array([1.0, np.nan, np.nan], np.float32))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(st.data())
def test_random_programs_give_the_same_in_blocks(data: Any) -> None:
    program = data.draw(programs())
    sizes, seed = data.draw(size_values(program)), data.draw(st.integers(0, 1000))
    blocks = split_reductions(program, Limits(few=1 << 40, long=0, block=2, columns=16, rows=2)).program
    check_program(blocks, "split_reductions")
    whole, parts = inputs(program, sizes, seed), inputs(program, sizes, seed)
    oracle.run(program, sizes, whole)
    oracle.run(blocks, sizes, parts)
    for parameter in program.parameters:
        name = parameter.buffer.name
        assert agrees(parts[name], whole[name], parameter.buffer.dtype), name


@pytest.mark.parametrize("value", ["sum(x[i, k] for k in box(s0))", "welford(x[i, k] for k in box(s0)).m2"])
def test_threads_share_long_sums_and_do_not_change_a_bit_of_them(value: str) -> None:
    text = f"""
def kernel(s0: size(1), x: f32[2, s0], y: out(f32[2])):
    for i in box(2):
        y[i] = {value}
"""
    program = split(text, Limits())
    # Blocks, what is left over, and the few that read them stay apart.
    assert [len(loop.axes) for loop in arrange(program).loops] == [2, 2, 1]
    code = Code(program, host())
    x = np.random.default_rng(0).normal(size=(2, 300_001)).astype(np.float32)
    results = set()
    for threads in (1, 2, 3, 7):
        y = np.zeros(2, np.float32)
        assert code({"s0": 300_001}, {"x": x, "y": y}, threads) == 0
        results.add(y.tobytes())
    assert len(results) == 1


@pytest.mark.parametrize(
    ("rows", "columns", "taken", "reason"),
    [
        (
            4,
            1000000,
            True,
            "sum over box(1000000) in 125 parts, so that threads share it: there are 4 points around it",
        ),
        (512, 768, False, "sum over box(768): 512 units of work around it are enough for threads, from 16 on"),
    ],
)
def test_decisions_on_long_reductions(rows: int, columns: int, taken: bool, reason: str) -> None:
    program = parse_program(f"""
def program(x: f32[{rows}, {columns}], y: out(f32[{rows}])):
    for i in box({rows}):
        y[i] = sum(x[i, k] for k in box({columns}))
""")
    assert split_reductions(program).decisions == (Decision("split", ("program", "y"), taken, reason),)


def test_short_reductions_are_not_worth_a_word() -> None:
    program = parse_program("""
def program(x: f32[4, 8], y: out(f32[4])):
    for i in box(4):
        y[i] = sum(x[i, k] for k in box(8))
""")
    assert split_reductions(program).decisions == ()
