"""Kernels never touch a byte outside of their buffers.

Every buffer lies against a page that nobody may touch: its last byte just before it, or its first byte just after it.
A kernel that reads or writes one byte too far dies, so kernels run in a child process, which says how far it came.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import traceback
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ferrite.loops import oracle, oracle_values
from ferrite.loops.nodes import Buffer, Program
from ferrite.loops.text import parse_program
from ferrite.native.target import Target
from tests.unit.fences import Fences
from tests.unit.targets import TARGETS
from tests.unit.test_native_kernels import Code, agrees, extents, inputs

# From nothing to past a vector of 64 bytes, and around whole groups of four vectors. A buffer that ends at a page
# starts where its size says: at every odd element too.
SIZES = [*range(71), 95, 96, 97, 127, 128, 129, 130, 255, 256, 257, 259]

BODIES = {
    "neighbours": ("x: f32[s0], y: out(f32[s0])", "i in box(s0)", "y[i] = x[i] + f32(1.0)"),
    "f16": ("x: f16[s0], y: out(f16[s0])", "i in box(s0)", "y[i] = x[i] * f16(2.0)"),
    "bf16": ("x: bf16[s0], y: out(f32[s0])", "i in box(s0)", "y[i] = f32(x[i])"),
    "bool": ("x: b8[s0], y: out(b8[s0])", "i in box(s0)", "y[i] = not_(x[i])"),
    "widths": ("x: u8[s0], z: f64[s0], y: out(i64[s0])", "i in box(s0)", "y[i] = i64(x[i]) + i64(z[i])"),
    "bytes": ("x: i8[s0], y: out(i8[s0])", "i in box(s0)", "y[i] = x[i] + i8(1)"),
    "steps": ("x: f32[s0].stride(3), y: out(f32[s0].stride(2))", "i in box(s0)", "y[i] = x[i]"),
    "steps of bytes": ("x: u8[s0].stride(3), y: out(u8[s0].stride(2))", "i in box(s0)", "y[i] = x[i]"),
    "backwards": ("x: f32[s0], y: out(f32[s0])", "i in box(s0)", "y[i] = x[s0 - 1 - i]"),
    "turned": ("x: f32[5, s0], y: out(f32[s0, 5])", "i, j in box(s0, 5)", "y[i, j] = x[j, i]"),
    "rows with gaps": (
        "x: bf16[3, s0].stride(s0 + 1, 1), y: out(bf16[3, s0].stride(s0 + 2, 1))",
        "i, j in box(3, s0)",
        "y[i, j] = x[i, j]",
    ),
    "gathered": (
        "n: i64[s0], x: f32[s0], y: out(f32[s0])",
        "i in box(s0)",
        "y[i] = x[at(floormod(n[i], value(s0)), 0, s0 - 1)]",
    ),
    "gathered bytes": (
        "n: i64[s0], x: b8[s0], y: out(b8[s0])",
        "i in box(s0)",
        "y[i] = x[at(floormod(n[i], value(s0)), 0, s0 - 1)]",
    ),
    "scattered": (
        "n: i64[s0], x: f16[s0], y: inout(f16[s0])",
        "i in box(s0)",
        "y[at(floormod(n[i], value(s0)), 0, s0 - 1)] = x[i]",
    ),
    "window": (
        "x: f32[s0], y: out(f32[s0])",
        "i in box(s0)",
        "y[i] = guarded(value(i) > i64(0), x[i - 1], f32(0.0)) + guarded(value(i + 1) < value(s0), x[i + 1], f32(5.0))",
    ),
    "window of halves": (
        "x: f16[s0], y: out(f16[s0])",
        "i in box(s0)",
        "y[i] = guarded(value(i) > i64(1), x[i - 2], f16(1.0))",
    ),
    "sum of rows": ("x: f32[3, s0], y: out(f32[3])", "i in box(3)", "y[i] = sum(x[i, k] for k in box(s0))"),
    "sum of halves": ("x: bf16[s0, 2], y: out(bf16[2])", "i in box(2)", "y[i] = sum(x[k, i] for k in box(s0))"),
    "sum of columns": ("x: f32[3, s0], y: out(f32[s0])", "j in box(s0)", "y[j] = sum(x[k, j] for k in box(3))"),
    "any": ("x: b8[s0], y: out(b8[()])", "_ in box()", "y[()] = any(x[k] for k in box(s0))"),
    "softmax": (
        "x: f32[2, s0], y: out(f32[2, s0])",
        "i, j in box(2, s0)",
        "y[i, j] = exp(x[i, j] - softmax(x[i, k] for k in box(s0)).max) / softmax(x[i, k] for k in box(s0)).sum",
    ),
    "places": (
        "x: f32[3, s0], y: out(f32[3, s0])",
        "i, j in box(3, s0)",
        "y[i, j] = x[i, at(argmax(x[i, k] for k in box(s0)).index, 0, s0 - 1)]",
    ),
}


def program_of(name: str) -> Program:
    parameters, loop, statement = BODIES[name]
    return parse_program(f"def kernel(s0: size(0, 300), {parameters}):\n    for {loop}:\n        {statement}\n")


def reach(buffer: Buffer, sizes: dict[str, int]) -> int:
    """Elements from the first to the last one."""
    shape, strides = extents(buffer, sizes)
    return 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))


def laid_out(buffer: Buffer, sizes: dict[str, int], flat: Any) -> Any:
    shape, strides = extents(buffer, sizes)
    kind = oracle_values.STORAGE[buffer.dtype]
    return np.lib.stride_tricks.as_strided(flat.view(kind), shape, [s * kind.itemsize for s in strides])


def values(buffer: Buffer, count: int, rng: np.random.Generator) -> Any:
    if buffer.dtype.is_float:
        return oracle_values.to_storage(rng.normal(size=count).astype(np.float32), buffer.dtype)
    return rng.integers(0, 2 if buffer.dtype.is_bool else 100, count).astype(oracle_values.STORAGE[buffer.dtype])


def run_all(program: Program, code: Code) -> Iterator[str]:
    """Says what it is about to do, before it does it; raises where the answer is not the oracle's."""
    fences = {parameter.buffer: Fences(1 << 14) for parameter in program.parameters}
    rng = np.random.default_rng(0)
    for n in SIZES:
        sizes = {"s0": n}
        for at_end in (True, False):
            yield f"size {n}, at the {'end' if at_end else 'start'}"
            arrays, expected = {}, {}
            for buffer, fence in fences.items():
                count = reach(buffer, sizes)
                memory = fence.bytes(count * buffer.dtype.bytes, at_end=at_end)
                memory[...] = values(buffer, count, rng).view(np.uint8)
                arrays[buffer.name] = laid_out(buffer, sizes, memory)
                expected[buffer.name] = laid_out(buffer, sizes, memory.copy())
            oracle.run(program, sizes, expected)
            assert code(sizes, arrays) == 0
            for buffer in fences:
                assert agrees(arrays[buffer.name], expected[buffer.name], buffer.dtype), buffer.name


def in_child(steps: Iterator[str]) -> str | None:
    """Runs the steps in a process of their own. None if all went well, else the step that did not."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        faulthandler.disable()  # whoever waits says what went wrong
        outcome = 1
        try:
            for step in steps:
                os.write(writer, f"{step}\n".encode())
            outcome = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(outcome)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        done = pipe.read().splitlines()
    _, status = os.waitpid(child, 0)
    return None if status == 0 else f"{done[-1] if done else 'the start'}: status {status}"


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
@pytest.mark.parametrize("name", BODIES)
def test_no_byte_outside_of_a_buffer_is_touched(name: str, target: Target) -> None:
    program = program_of(name)
    code = Code(program, target)
    assert code.refused is None
    assert in_child(run_all(program, code)) is None


def test_a_byte_too_far_is_noticed() -> None:
    """The fences hold: a test that cannot fail would prove nothing."""

    def too_far() -> Iterator[str]:
        memory = Fences(100).bytes(100, at_end=True)
        yield "one byte after the end"
        ctypes.c_uint8.from_address(memory.ctypes.data + 100).value = 1

    found = in_child(too_far())
    assert found is not None
    assert found.startswith("one byte after the end")


def test_what_a_requirement_protects_is_not_read_before_it() -> None:
    """Neither in its place nor, because it is the same in every round, before the loop."""
    text = """
def kernel(n: i64[()], x: f32[4], y: out(f32[40])):
    for j in box(40):
        y[j] = require((value(j) >= i64(0)) & (n[()] < i64(4)), x[at(n[()], 0, 3)], 'IndexError', 'too far')
"""
    code = Code(parse_program(text), TARGETS[0])

    def far() -> Iterator[str]:
        yield "an index that does not exist"
        arrays = {"n": np.array(1 << 40), "x": np.zeros(4, np.float32), "y": np.zeros(40, np.float32)}
        assert code({}, arrays) == 1

    assert in_child(far()) is None


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
@pytest.mark.parametrize("narrow", ["i8", "i16", "i32"])
def test_a_lane_that_is_left_alone_writes_one_element(narrow: str, target: Target) -> None:
    """A store of narrowed lanes under a known mask of one lane: LLVM wrote the wide element."""
    text = f"def kernel(x: f64[9], y: out({narrow}[9])):\n    for i in box(9):\n        y[i] = {narrow}(x[i])\n"
    program = parse_program(text)
    x, y = np.arange(9.0), np.full(16, 77, oracle_values.STORAGE[program.parameters[1].buffer.dtype])
    assert Code(program, target)({}, {"x": x, "y": y}) == 0
    assert y.tolist() == [*range(9), *[77] * 7]


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
@pytest.mark.parametrize(("wide", "narrow", "n"), [("i64", "i32", 8), ("f32", "i16", 16), ("f32", "bf16", 16)])
def test_a_lane_that_alone_changes_writes_one_element(wide: str, narrow: str, n: int, target: Target) -> None:
    """Without a mask in the text: LLVM makes one of what stays, and wrote the wide element."""
    statement = f"y[i] = where(value(i) == i64({n - 2}), {narrow}(x[i]), y[i])"
    text = f"def kernel(x: {wide}[{n}], y: inout({narrow}[{n}])):\n    for i in box({n}):\n        {statement}\n"
    program = parse_program(text)
    x, y = inputs(program, {}, 0).values()
    x[...], y[...] = 3, 77
    assert Code(program, target)({}, {"x": x, "y": y}) == 0
    assert [*np.flatnonzero(y != 77)] == [n - 2]
