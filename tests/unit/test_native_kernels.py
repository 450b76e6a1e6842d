"""Native kernels against the oracle: random loop programs, sizes around the vector width, threads, errors."""

from __future__ import annotations

import ctypes
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from ferrite.loops import oracle, oracle_values
from ferrite.loops.dtypes import DType
from ferrite.loops.index import evaluate, free_sizes
from ferrite.loops.nodes import Apply, Bits, Buffer, Program
from ferrite.loops.rewrite import walk
from ferrite.loops.text import parse_program
from ferrite.native import ahead, build, launch
from ferrite.native.emit import emit
from ferrite.native.target import Target, host, named, runs_here
from ferrite.schedule import shape
from tests.unit.loop_programs import programs, size_values
from tests.unit.test_rewrite import array

TARGETS = [target for target in (host(), named("x86-64-v3"), named("x86-64")) if runs_here(target)]


class Code:
    """A program in machine code, called with arrays."""

    def __init__(self, program: Program, target: Target) -> None:
        self.program = program
        emitted = emit([program], target)
        self.refused: str | None = emitted.refused.get(program.name)
        if self.refused is None:
            outside = build.library_addresses(emitted.externals)
            self._enter(build.load([build.build(emitted.text, target)], emitted.names, outside))

    @classmethod
    def of(cls, program: Program, library: build.Library) -> Code:
        """Of code that is loaded already, with that of other programs."""
        made = cls.__new__(cls)
        made.program, made.refused = program, None
        made._enter(library)
        return made

    def _enter(self, library: build.Library) -> None:
        self.library = library
        kind = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32)
        self.launch, self.address = kind(launch.launch_address()), library.address(self.program.name)

    def __call__(
        self, sizes: dict[str, int], arrays: dict[str, Any], threads: int = 1, locals: list[Any] | None = None
    ) -> int:
        own = [memory(buffer, sizes) for buffer in self.program.locals] if locals is None else locals
        given = [arrays[p.buffer.name] for p in self.program.parameters] + own
        addresses = (ctypes.c_void_p * (len(given) + 1))(*[each.ctypes.data for each in given])
        numbers = (ctypes.c_int64 * (len(sizes) + 1))(*[sizes[size.name] for size in self.program.sizes])
        return self.launch(self.address, addresses, numbers, threads)


def extents(buffer: Buffer, sizes: dict[str, int]) -> tuple[list[int], list[int]]:
    known = {atom: sizes[atom.name] for part in (*buffer.sizes, *buffer.strides) for atom in free_sizes(part)}
    return [evaluate(s, known) for s in buffer.sizes], [evaluate(s, known) for s in buffer.strides]


def memory(buffer: Buffer, sizes: dict[str, int]) -> Any:
    """An array laid out as the buffer says."""
    shape, strides = extents(buffer, sizes)
    kind = oracle_values.STORAGE[buffer.dtype]
    reach = 1 + sum(max(n - 1, 0) * s for n, s in zip(shape, strides, strict=True))
    flat = np.zeros(max(reach, 1), kind)
    return np.lib.stride_tricks.as_strided(flat, shape, [s * kind.itemsize for s in strides])


def agrees(ours: Any, theirs: Any, dtype: DType) -> bool:
    """Integers and bools by bits; floats within the rounding of a few operations, NaN and infinities in place."""
    if not dtype.is_float:
        return bool(np.array_equal(theirs, ours))
    a, b = (oracle_values.from_storage(each, dtype).astype(np.float64) for each in (theirs, ours))
    tolerance = {64: 1e-10, 32: 2e-4, 16: 5e-2}[dtype.bits]
    return bool(np.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True))


def inputs(program: Program, sizes: dict[str, int], seed: int, odd_share: float = 0.3) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    arrays = {}
    for parameter in program.parameters:
        laid = arrays[parameter.buffer.name] = memory(parameter.buffer, sizes)
        laid[...] = array(parameter.buffer, laid.shape, rng, odd_share)
    return arrays


def assert_as_the_oracle(program: Program, code: Code, sizes: dict[str, int], seed: int, threads: int = 1) -> None:
    ours = inputs(program, sizes, seed)
    theirs = {name: each.copy() for name, each in ours.items()}
    oracle.run(program, sizes, theirs)
    assert code(sizes, ours, threads) == 0
    for parameter in program.parameters:
        name = parameter.buffer.name
        assert agrees(ours[name], theirs[name], parameter.buffer.dtype), name


RANDOM = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],  # a failure prints its program; making it smaller takes minutes
    suppress_health_check=list(HealthCheck),
)


def tells_what_is_not_promised(node: Any) -> bool:
    """Nothing is promised of a function's last bit, and of the sign of NaN: as an integer, or as a truth value, they
    would be all that counts."""
    match node:
        case Bits(value=value):
            return value.dtype.is_float
        case Apply(operation="signbit" | "copysign"):
            return True
    return False


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, for what overflows in the oracle
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
@RANDOM
@given(st.data())
def test_random_programs_agree_with_the_oracle(target: Target, data: Any) -> None:
    program = data.draw(programs())
    assume(not any(tells_what_is_not_promised(node) for node in walk(program)))
    code = Code(program, target)
    if code.refused is None:
        assert_as_the_oracle(program, code, data.draw(size_values(program)), data.draw(st.integers(0, 1000)), 2)


@RANDOM
@given(st.data())
def test_random_programs_become_code_for_processors_that_are_not_here(data: Any) -> None:
    emitted = emit([data.draw(programs())], named("x86-64-v4"))
    assert build.build(emitted.text, named("x86-64-v4"))


ROW_PROGRAMS = {
    "softmax": "y[i, j] = exp(x[i, j] - softmax(x[i, r] for r in box({n})).max)"
    " / softmax(x[i, r] for r in box({n})).sum",
    "statistics": "y[i, j] = (x[i, j] - welford(x[i, r] for r in box({n})).mean)"
    " * rsqrt(welford(x[i, r] for r in box({n})).m2 + f32(1.0))",
    "columns": "y[i, j] = sum(x[r, j] for r in box(5)) + x[i, j]",
    "position": "y[i, j] = f32(argmax(x[i, r] for r in box({n})).index)",
}


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
@pytest.mark.parametrize("name", ROW_PROGRAMS)
def test_rows_of_every_length_around_the_vectors(name: str, target: Target) -> None:
    for n in (1, 3, 7, 8, 9, 16, 31, 33, 70):
        body = ROW_PROGRAMS[name].format(n=n)
        text = f"def kernel(x: f32[5, {n}], y: out(f32[5, {n}])):\n    for i, j in box(5, {n}):\n        {body}\n"
        program = parse_program(text)
        code = Code(program, target)
        assert code.refused is None
        x = np.random.default_rng(n).normal(size=(5, n)).astype(np.float32)
        theirs, ours = np.zeros_like(x), np.full_like(x, 77)
        oracle.run(program, {}, {"x": x, "y": theirs})
        assert code({}, {"x": x, "y": ours}) == 0
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_threads_do_not_change_a_bit() -> None:
    text = """
def kernel(s0: size(1, 100000), x: f32[s0, 96], y: out(f32[s0, 96])):
    for i, j in box(s0, 96):
        y[i, j] = tanh(x[i, j]) / sum(exp(x[i, r]) for r in box(96))
"""
    program = parse_program(text)
    code = Code(program, host())
    x = np.random.default_rng(0).normal(size=(2000, 96)).astype(np.float32)
    results = []
    for threads in (1, 2, 3, 7):
        y = np.zeros_like(x)
        assert code({"s0": 2000}, {"x": x, "y": y}, threads) == 0
        results.append(y.tobytes())
    assert len(set(results)) == 1


def test_long_sums_keep_their_digits() -> None:
    """One running sum would be off by 1e-6 in the first, 1e-5 in the second."""
    x = np.random.default_rng(0).random(3_200_000, dtype=np.float32)
    for rows, columns, sums in ((3_200_000, 1, "x[k, 0]"), (200_000, 16, "x[k, c]")):
        text = f"""
def kernel(x: f32[{rows}, {columns}], y: out(f32[{columns}])):
    for c in box({columns}):
        y[c] = sum({sums} for k in box({rows}))
"""
        y = np.zeros(columns, np.float32)
        assert Code(parse_program(text), host())({}, {"x": x, "y": y}) == 0
        np.testing.assert_allclose(y, x.reshape(rows, columns).sum(axis=0, dtype=np.float64), rtol=4e-7)


FOUR = "x[r] + x[r + 4096] + (x[r + 8192] + x[r + 12288])"
LANES_AROUND = """
def kernel(s0: size(1, 50), n: i64[s0], x: f32[9, 6], y: out(f32[s0, 9]), z: out(f32[s0, 9])):
    for i, j in box(s0, 9):
        y[i, j] = guarded(n[i] > i64(0), x[j, 0] * sum(max(x[l, k % 6] for l in box(9)) for k in box(9)), f32(7.0))
        z[i, j] = fold(lambda a0, a1, b0, b1: (a0 * b0, a1 * b0 + b1))((x[j, k], x[i % 9, k]) for k in box(6))[1]
"""


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_reductions_that_are_the_same_in_all_lanes_and_folds_in_their_order(target: Target) -> None:
    program = parse_program(LANES_AROUND)
    code = Code(program, target)
    assert code.refused is None
    for s0 in (1, 8, 33):
        assert_as_the_oracle(program, code, {"s0": s0}, s0)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
@pytest.mark.parametrize("operation", ["argmin", "argmax"])
def test_of_equals_the_first_one_is_found_also_across_memory(operation: str, target: Target) -> None:
    """Lanes go along k, where memory is, and so meet (32, 0) before (0, 1), which comes first in the box."""
    program = parse_program(f"""
def program(s0: size(1), x: f32[3, s0], y: out(i64[1])):
    for i in box(1):
        y[i] = {operation}(x[l, k] for k, l in box(s0, 3)).index
""")
    code = Code(program, target)
    for s0 in (1, 5, 17, 33, 70, 300):
        for row, k in ((1, 0), (2, 0), (1, s0 // 2)):
            arrays = {"x": np.ones((3, s0), np.float32), "y": np.zeros(1, np.int64)}
            arrays["x"][:, :k], arrays["x"][:row, k] = 0.0, 0.0
            if operation == "argmin":
                arrays["x"] = 1 - arrays["x"]
            assert code({"s0": s0}, arrays) == 0
            assert arrays["y"][0] == 3 * k + row


@pytest.mark.parametrize("body", ["x[r]", "x[r] * x[r + 4096]", "x[r] * z[0]", FOUR])
def test_a_reduction_loads_four_vectors_at_once_from_however_many_places(body: str) -> None:
    """Four from one place, two from each of two, one from each of four; what all lanes share does not count."""
    text = f"def program(x: f32[16384], z: f32[1], y: out(f32[1])):\n    for i in box(1):\n        y[i] = sum({body}"
    emitted = emit([parse_program(f"{text} for r in box(4096))\n")], named("x86-64-v4")).text
    assert emitted.count("load <16 x float>") == 4


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, for what overflows in the oracle
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
@pytest.mark.parametrize(("rows", "apart"), [(4, 4), (8, 4), (6, 2), (5, 1)])
def test_pieces_of_large_memory_are_read_from_places_far_apart(rows: int, apart: int, target: Target) -> None:
    """Every kind of reduction: what is combined, where it stood, and vectors that are cut off."""
    for length in (128, 131, 257):
        program = parse_program(f"""
def program(
    x: f32[{rows}, 3, {length}], m: out(f32[3]), d: out(f32[3]), y: out(f32[3]), n: out(i64[3]), s: out(f32[3])
):
    for j in box(3):
        m[j] = welford(x[r, j, k] for r, k in box({rows}, {length}))
        d[j] = welford(x[r, j, k] for r, k in box({rows}, {length})).m2
        y[j] = max(x[r, j, k] for r, k in box({rows}, {length}))
        n[j] = argmax(x[r, j, k] for r, k in box({rows}, {length})).index
        s[j] = softmax(x[r, j, k] for r, k in box({rows}, {length})).sum
""")
        small = {"FAR": 1, "PIECE_BYTES": range(1, 1 << 17), "FEWEST_VECTORS": 1}
        with mock.patch.object(shape, "LARGE", 1), mock.patch.multiple(ahead, **small):
            code = Code(program, target)
        for odd_share in (0.0, 0.3):
            ours = inputs(program, {}, length, odd_share)
            ours["x"][...] = np.round(ours["x"])  # several are the greatest
            theirs = {name: each.copy() for name, each in ours.items()}
            oracle.run(program, {}, theirs)
            assert code({}, ours, 2) == 0
            for parameter in program.parameters:
                name = parameter.buffer.name
                assert agrees(ours[name], theirs[name], parameter.buffer.dtype), (name, length)
    text = f"def program(x: f32[{rows}, 4096, 1024], y: out(f32[4096])):\n    for j in box(4096):\n        y[j] = sum("
    emitted = emit([parse_program(f"{text}x[r, j, k] for r, k in box({rows}, 1024))\n")], named("x86-64-v4")).text
    distances = [f"i64 {rows // apart * way * 4096 * 1024}\n" for way in range(1, apart)]
    assert all(distance in emitted for distance in distances)
    assert emitted.count("load <16 x float>") == 4


def test_a_loop_that_reads_a_row_again_asks_for_the_next_one() -> None:
    text = "def program(x: f32[64, 512], y: out(f32[64, 512])):\n    for i, j in box(64, 512):\n        y[i, j] = {}\n"
    norm = emit([parse_program(text.format("x[i, j] / sum(x[i, r] for r in box(512))"))], host()).text
    assert "llvm.prefetch" in norm
    assert "prefetch" not in emit([parse_program(text.format("x[i, j] * f32(2.0)"))], host()).text


ORDERED = {
    "a later statement changes what a later point reads": """
    for i, j in box(6, s0):
        y[i, j] = x[s0 - 1 - j]
        x[j] = accumulate('maximum', x[j], z[i, j])
""",
    "a point reads what the one before it wrote": """
    for j in box(s0 - 1):
        x[j + 1] = x[j] + z[0, j]
""",
}


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
@pytest.mark.parametrize("reason", ORDERED)
def test_points_run_in_their_order_where_it_matters(reason: str, target: Target) -> None:
    parameters = "s0: size(2), x: inout(f32[s0]), z: f32[6, s0], y: out(f32[6, s0])"
    program = parse_program(f"def program({parameters}):{ORDERED[reason]}")
    code = Code(program, target)
    for s0 in (2, 9, 70):
        ours = inputs(program, {"s0": s0}, s0)
        theirs = {name: each.copy() for name, each in ours.items()}
        oracle.run(program, {"s0": s0}, theirs)
        assert code({"s0": s0}, ours, 2) == 0
        assert np.array_equal(ours["x"], theirs["x"], equal_nan=True), reason
        assert "y[" not in ORDERED[reason] or np.array_equal(ours["y"], theirs["y"], equal_nan=True), reason


def test_a_reduction_whose_value_is_known_is_the_same_in_all_ways() -> None:
    program = parse_program("""
def program(s0: size(1), y: out(b8[4, s0])):
    for i, j in box(4, s0):
        y[i, j] = all(b8(False) for k in box(s0 + 1))
""")
    for s0 in (1, 40, 200):
        assert_as_the_oracle(program, Code(program, host()), {"s0": s0}, s0)


def test_a_failed_check_raises_what_eager_raises_and_the_next_call_works() -> None:
    table, good, bad = torch.randn(10, 40), torch.arange(10).repeat(300), torch.full((3000,), 10)
    function = torch.compile(
        lambda t, i: torch.nn.functional.embedding(i, t) + 1, backend="ferrite", options={"executor": "native"}
    )
    expected = torch.nn.functional.embedding(good, table) + 1
    assert torch.equal(function(table, good), expected)
    with pytest.raises(IndexError, match="index out of range in self"):
        function(table, bad)
    assert torch.equal(function(table, good), expected)


FOLD_SCAN = """\
def program(s0: size(0, 9), a: {0}[5, s0], b: {1}[5, s0], w: {0}[5], y: out({0}[5, s0]), z: inout({1}[5, s0])):
    for i in box(5):
        for k in scan(s0):
            y[i, k], z[i, k] = fold(lambda a0, a1, b0, b1: ({2}, {3}))(a[i, k], {1}(b[i, k]) + z[i, k])
"""


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_random_words_in_any_number_of_lanes(target: Target) -> None:
    """From 16 lanes of f32 to two of f64, where a pair of words fills a register by itself; counters of more than 32
    bits; a seed for each lane."""
    program = parse_program("""
def program(
    s0: size(1, 40), seed: i64[()], seeds: i64[s0], x: out(i32[s0]), y: out(f64[s0]), z: out(i32[s0]), n: out(f32[s0])
):
    for i in box(s0):
        x[i] = random('bits', seed[()], 3, i)
    for j in box(s0):
        y[j] = f64(random('uniform', seed[()], 1, 2*j)) + f64(0.5)
    for k in box(s0):
        z[k] = random('bits', seeds[k], 2, 8589934592*k + 4294967290)
    for l in box(s0):
        n[l] = random('normal', seed[()], 5, 3*l)
""")
    code = Code(program, target)
    assert code.refused is None
    for size in (1, 2, 3, 17, 40):
        assert_as_the_oracle(program, code, {"s0": size}, size)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_scans_of_folds(target: Target) -> None:
    """A recurrence, several dtypes, halves, a combine that reads memory, one that divides real neighbours only."""
    for parts in (
        ("f32", "f32", "a0 * b0", "a1 * b0 + b1"),
        ("f64", "i32", "maximum(a0, b0)", "where(b0 > a0, b1, a1 + i32(1))"),
        ("bf16", "f16", "a0 + b0 * w[i]", "a1 * b1"),
        ("i64", "i64", "a0 + b0", "floordiv(b1, a0 * a0 + i64(1))"),
    ):
        program = parse_program(FOLD_SCAN.format(*parts))
        code = Code(program, target)
        assert code.refused is None
        for extent in (0, 1, 2, 9):
            assert_as_the_oracle(program, code, {"s0": extent}, extent, threads=2)
