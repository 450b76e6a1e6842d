"""Stores that go past the caches, and what is asked for before it is needed."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest

from ferrite.loops import oracle, oracle_values
from ferrite.loops.dtypes import DType, f32
from ferrite.loops.text import parse_program
from ferrite.native import ahead
from ferrite.native.builder import Builder, Value
from ferrite.native.emit import emit
from ferrite.native.target import Target, host, named
from ferrite.schedule import shape, tile
from tests.unit.targets import TARGETS
from tests.unit.test_native_kernels import Code, inputs


@pytest.mark.parametrize(
    ("body", "columns", "parameters", "goes_past"),
    [
        ("y[i, j] = x[i, j] * f32(2.0)", 2048, "y: out(f32[{rows}, {columns}])", True),
        ("y[i, j] = x[i, j] / sum(x[i, r] for r in box(2048))", 2048, "y: out(f32[{rows}, {columns}])", True),
        ("y[i, j] = x[i, j] * f32(2.0)", 1024, "y: out(f32[{rows}, {columns}])", False),  # a cache holds it
        ("y[i, j] = x[i, j] + y[i, j]", 2048, "y: inout(f32[{rows}, {columns}])", False),  # it is in the cache by then
        ("y[i, j] = x[i, j]", 2048, "y: out(f32[{rows}, 4096].stride(4096, 1))", True),
        ("y[i, j] = x[i, j]", 2048, "y: out(f32[{rows}, 4096].stride(4097, 1))", False),  # not aligned
        ("y[i, j + 1] = x[i, j]", 2048, "y: out(f32[{rows}, 4096])", False),
        ("y[i, j] = x[i, j]", 2048, "y: out(f32[{rows}, {columns}].stride(4096, 2))", False),  # with gaps
        ("y[i, j] = x[i, j]", 2048, "y: out(f32[{rows}, {columns}].stride(1, {rows}))", True),  # x is turned
    ],
)
def test_which_stores_go_past_the_caches(body: str, columns: int, parameters: str, goes_past: bool) -> None:
    given = f"x: f32[{{rows}}, {{columns}}], {parameters}".format(rows=4096, columns=columns)
    loop = f"    for i, j in box(4096, {columns}):\n        {body}\n"
    program = parse_program(f"def program({given}):\n{loop}")
    for target in (named("x86-64-v4"), named("x86-64-v3"), named("x86-64")):
        assert ("nontemporal" in emit([program], target).text) is goes_past
    assert "nontemporal" not in emit([program], named("aarch64")).text


def test_short_pieces_take_plain_stores_unless_loops_write_them_in_turn() -> None:
    """Rows of 256 bytes: with a gap after each; with the other half from a loop of its own."""
    alone = "    for i, j in box(262144, 64):\n        y[i, j] = x[i, j]\n"
    both = alone + "    for i, j in box(262144, 64):\n        y[i, j + 64] = neg(x[i, j])\n"
    for body, goes_past in ((alone, False), (both, True)):
        program = parse_program(f"def program(x: f32[262144, 64], y: out(f32[262144, 128])):\n{body}")
        assert ("nontemporal" in emit([program], host()).text) is goes_past


def placed(array: Any, offset: int) -> Any:
    """A copy that starts so many bytes after a multiple of 64."""
    raw = np.zeros(array.nbytes + 128, np.uint8)
    start = -raw.ctypes.data % 64 + offset
    made = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    made[...] = array
    return made


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
@pytest.mark.parametrize("offset", [0, 4, 32])
@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16", "i32"])
def test_the_values_are_the_same_wherever_memory_starts(dtype: str, offset: int, target: Target) -> None:
    rows, columns = 5, 320
    text = f"def program(x: {dtype}[5, 320], y: out({dtype}[5, 320])):\n"
    made = parse_program(text + "    for i, j in box(5, 320):\n        y[i, j] = x[i, j] + x[i, 0]\n")
    with mock.patch.object(shape, "LARGE", 1):
        code = Code(made, target)
        goes_past = "nontemporal" in emit([made], target).text
    assert goes_past is (dtype != "bf16" or target.vector_bytes > 16)  # 8 bytes at once are too few
    kind = oracle_values.STORAGE[made.parameters[0].buffer.dtype]
    numbers = np.arange(rows * columns).reshape(rows, columns) % 50
    x = oracle_values.to_storage(numbers.astype(np.float64), made.parameters[0].buffer.dtype).astype(kind)
    theirs = {"x": x.copy(), "y": np.zeros_like(x)}
    oracle.run(made, {}, theirs)
    ours = {"x": placed(x, 0), "y": placed(np.zeros_like(x), offset - offset % x.itemsize)}
    for threads in (1, 2):
        assert code({}, ours, threads) == 0
        assert np.array_equal(ours["y"], theirs["y"])


LOOKED_UP = """
def program(x: f32[1024, 512], n: i64[9], y: out(f32[9, 512])):
    for i, j in box(9, 512):
        y[i, j] = x[at(checked(n[i], 1024, True, 'IndexError', 'no'), 0, 1023), j]
"""


def test_the_next_row_that_an_index_leads_to_is_asked_for_and_not_checked_early() -> None:
    """Of a later row the ends; where results go past the caches also all lines of the next one."""
    program = parse_program(LOOKED_UP)
    assert "llvm.prefetch" not in emit([program], host()).text, "a cache may hold the table"
    with mock.patch.object(ahead, "CACHED", 0):
        assert emit([program], host()).text.count("call void @llvm.prefetch") == 2
        with mock.patch.object(shape, "LARGE", 1):
            assert emit([program], host()).text.count("call void @llvm.prefetch") > 4  # also without streams
            code = Code(program, host())
    x = np.arange(1024 * 512, dtype=np.float32).reshape(1024, 512)
    n, y = np.array([3, -1, 7, 0, 1023, -1024, 5, 5, 2], np.int64), np.zeros((9, 512), np.float32)
    assert code({}, {"x": x, "n": n, "y": y}) == 0
    assert np.array_equal(y, x[n])
    n[8] = 1024
    y[...] = 0
    assert code({}, {"x": x, "n": n, "y": y}) == 1
    assert np.array_equal(y[:8], x[n[:8]])


def test_a_reduction_asks_for_the_next_piece_where_that_lies_elsewhere() -> None:
    text = "def program(x: f32[64, 16, 1024], y: out(f32[16])):\n    for j in box(16):\n        y[j] = {}\n"
    apart = parse_program(text.format("sum(x[r, j, k] for r, k in box(64, 1024))"))
    assert "llvm.prefetch" in emit([apart], host()).text
    short = parse_program(text.format("sum(x[r, j, k] for r, k in box(64, 128))"))
    assert "llvm.prefetch" not in emit([short], host()).text


def test_what_is_large_is_asked_for_further_on_in_one_stream_and_after_the_rows_that_are_summed_at_once() -> None:
    pointwise = (
        "def program(x: f32[64, 512], y: out(f32[64, 512])):\n    for i, j in box(64, 512):\n        y[i, j] = {}\n"
    )
    scaled = parse_program(pointwise.format("x[i, j] * f32(2.0)"))
    across = "def program(x: f32[64, 512], y: out(f32[512])):\n    for j in box(512):\n        y[j] = {}\n"
    summed = parse_program(across.format("sum(x[r, j] for r in box(64))"))
    for program, distance in ((scaled, f"i64 {2048 // 4}\n"), (summed, f"i64 {8 * 512}\n")):
        assert "llvm.prefetch" not in emit([program], host()).text
        with mock.patch.object(shape, "LARGE", 1):
            text = emit([program], host()).text
        assert "llvm.prefetch" in text
        assert distance in text


def test_a_long_reduction_asks_for_its_next_round_and_one_over_a_row_does_not() -> None:
    text = "def program(x: f32[64, {0}], y: out(f32[64])):\n    for i in box(64):\n        y[i] = {1}\n"
    text = text.replace("{1}", "sum(x[i, k] for k in box({0}))")
    long = emit([parse_program(text.format(8192))], named("x86-64-v4")).text
    assert long.count("call void @llvm.prefetch") == long.count("load <16 x float>") == 4
    assert "prefetch" not in emit([parse_program(text.format(4096))], named("x86-64-v4")).text
    two = parse_program(text.format(8192).replace("sum(x[i, k]", "sum(x[i, k] * x[63 - i, k]"))
    assert "prefetch" not in emit([two], named("x86-64-v4")).text, "a cache may hold it"
    with mock.patch.object(shape, "LARGE", 1):
        assert f"i64 {2048 // 4}\n" in emit([two], named("x86-64-v4")).text


TRANSPOSED = """
def program(x: f32[256, 256], y: f32[256, 256], z: out(f32[256, 256])):
    for i, j in box(256, 256):
        z[i, j] = x[i, j] + y[j, i]
"""


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_while_a_tile_is_turned_every_line_of_the_next_one_is_asked_for(target: Target) -> None:
    """What is asked for is marked here instead: all tiles but the first, and one after the last."""

    def mark(
        self: Builder, base: Value, dtype: DType, offset: Any, distance: Any, count: int, *, level: int = 1
    ) -> None:
        assert level == 2
        self.store(self.constant(f32, -1.0), base, self.add(offset, distance))

    with mock.patch.object(shape, "LARGE_ACROSS", 1), mock.patch.object(tile, "HEIGHTS", (256,)):
        program = tile.tile_transposes(parse_program(TRANSPOSED)).program
        with mock.patch.object(Builder, "prefetch", mark):
            code = Code(program, target)
    x, y = np.zeros((320, 256), np.float32), np.zeros((257, 256), np.float32)
    z = placed(np.zeros((256, 256), np.float32), 0)
    assert code({}, {"x": x[:256], "y": y[:256], "z": z}, 1) == 0
    in_y, in_x = np.zeros_like(y), np.zeros_like(x)
    in_x[:256, ::16], in_y[:256, ::16] = -1.0, -1.0
    in_x[:64, :32], in_y[:32, :64] = 0.0, 0.0  # the first tile
    in_x[256:, :32:16] = -1.0  # the one after the last: in rows that are not there ...
    in_y.reshape(-1)[np.add.outer(np.arange(1, 33) * 256, np.arange(0, 64, 16)).reshape(-1)] = -1.0  # ... or columns
    assert np.array_equal(y, in_y)
    assert np.array_equal(x, in_x)


CROSSED = """
def program({parameters}):
    for i, j in box({rows}, {columns}):
        {body}
"""


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
@pytest.mark.parametrize(
    ("rows", "columns", "is_tiled"),
    [(256, 256, True), (530, 292, True), (96, 224, True), (1040, 64, True), (64, 96, False)],
)
@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16", "i8", "i64"])
def test_tiles_of_any_size_give_the_values_of_the_oracle(
    dtype: str, rows: int, columns: int, is_tiled: bool, target: Target
) -> None:
    """Copied, added, and two across into results of two types; wherever memory starts."""
    across, along = f"{dtype}[{columns}, {rows}]", f"{dtype}[{rows}, {columns}]"
    other = "f64" if dtype == "f32" else "f32"
    for parameters, body in (
        (f"x: {across}, z: out({along})", "z[i, j] = x[j, i]"),
        (f"x: {across}, y: {along}, z: out({along})", "z[i, j] = y[i, j] + x[j, i]"),
        (
            f"x: {across}, y: {across}, w: out({other}[{rows}, {columns}]), z: out({along})",
            f"z[i, j] = y[j, i] + x[j, i]\n        w[i, j] = {other}(x[j, i])",
        ),
    ):
        text = CROSSED.format(parameters=parameters, rows=rows, columns=columns, body=body)
        with mock.patch.object(shape, "LARGE_ACROSS", 1), mock.patch.object(tile, "FEW_POINTS", 1):
            program = parse_program(text)
            if is_tiled:
                program = tile.tile_transposes(program).program
            code = Code(program, target)
        given = inputs(program, {}, 3, 0.0)
        theirs = {name: each.copy() for name, each in given.items()}
        oracle.run(program, {}, theirs)
        for offset, threads in ((0, 1), (0, 3), (32, 2)):
            ours = {name: placed(each, offset) for name, each in given.items()}
            assert code({}, ours, threads) == 0
            assert all(np.array_equal(ours[name], theirs[name], equal_nan=True) for name in ours)


BESIDE = """
def program({parameters}, m: i64[64], y: f32[64, 32, 32], n: out(i64[64]), z: out(f32[64, {planes}32, 32])):
    r = local(i64[64])
    t = local(f32[64, 32, 32])
    for b in box(64):
        r[b] = m[b] & i64(7)
    for b, i, j in box(64, 32, 32):
        t[b, i, j] = {turned} + f32(r[b])
    for b in box(64):
        n[b] = i64(t[b, 0, 0] > f32(0.0))
    for b, i, j in box(64, 32, 32):
        {written}
"""
TURNED = " + t[b, 31 - i, j]"
LED_TO = "x[at(checked({}, 8, False, 'IndexError', 'no'), 0, 7), i, j]" + TURNED
LOOKED_AT = "at(checked(m[b], 64, False, 'IndexError', 'no'), 0, 63)"


@pytest.mark.parametrize(
    ("x", "turned", "written"),
    [
        ("8, 32, 64", "y[b, j, i]", f"z[b, i, j] = {LED_TO.format('r[b]')}"),  # a register, which has no memory
        ("8, 32, 64", "y[b, j, i]", f"z[b, i, j] = {LED_TO.format('n[b]')}"),  # written when the tile has been turned
        (
            "64, 8, 32, 64",
            "y[b, j, i]",
            f"for k in scan(8):\n            z[b, k, i, j] = cumsum(x[b, k, i, j]{TURNED})",
        ),
        ("64, 32, 64", f"y[{LOOKED_AT}, j, i]", f"z[b, i, j] = x[b, i, j]{TURNED}"),
    ],
)
def test_what_data_or_scans_lead_to_is_not_asked_for_before_its_turn(x: str, turned: str, written: str) -> None:
    planes = "8, " if "scan" in written else ""
    program = parse_program(BESIDE.format(parameters=f"x: f32[{x}]", planes=planes, turned=turned, written=written))
    code = Code(program, host())
    ours = inputs(program, {}, 3, 0.0)
    behind = np.full(128, 99, np.int64)  # nobody looks there
    behind[:64] = np.arange(64)
    ours["m"], ours["n"][...] = behind[:64], 99
    theirs = {name: each.copy() for name, each in ours.items()}
    oracle.run(program, {}, theirs)
    assert code({}, ours, 2) == 0
    assert np.allclose(ours["z"], theirs["z"], rtol=1e-5, atol=1e-5)


def test_a_register_is_not_stored() -> None:
    """Nobody reads `t`: it has no memory."""
    program = parse_program("""
def program(x: f32[8, 64], y: out(f32[8, 64])):
    t = local(f32[8, 64])
    for i, j in box(8, 64):
        t[i, j] = x[i, j]
        y[i, j] = x[i, j] + f32(1.0)
""")
    with mock.patch.object(shape, "LARGE", 1):
        assert emit([program], host()).names == ("program",)
