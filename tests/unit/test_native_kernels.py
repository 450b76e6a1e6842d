"""Native kernels against the oracle: sizes around the vector width, threads, errors."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch

from ferrite.artifact.kernels import openmp
from ferrite.loops import oracle, oracle_values
from ferrite.loops.index import evaluate, free_sizes
from ferrite.loops.nodes import Buffer, Program
from ferrite.loops.text import parse_program
from ferrite.native import build
from ferrite.native.emit import emit
from ferrite.native.target import Target, host, named, runs_here

TARGETS = [target for target in (host(), named("x86-64-v3"), named("x86-64")) if runs_here(target)]


class Code:
    """A program in machine code, called with arrays."""

    def __init__(self, program: Program, target: Target) -> None:
        self.program = program
        emitted = emit([program], target)
        self.refused = emitted.refused.get(program.name)
        if self.refused is None:
            ours = {name: at for name, at in openmp().items() if name in emitted.externals}
            rest = build.library_addresses(name for name in emitted.externals if name not in ours)
            self.library = build.load([build.build(emitted.text, target)], emitted.names, ours | rest)
            kind = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32)
            self.entry = kind(self.library.address(program.name))

    def __call__(self, sizes: dict[str, int], arrays: dict[str, Any], threads: int = 1) -> int:
        own = [memory(buffer, sizes) for buffer in self.program.locals]
        given = [arrays[p.buffer.name] for p in self.program.parameters] + own
        addresses = (ctypes.c_void_p * (len(given) + 1))(*[each.ctypes.data for each in given])
        numbers = (ctypes.c_int64 * (len(sizes) + 1))(*[sizes[size.name] for size in self.program.sizes])
        return self.entry(addresses, numbers, threads)


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
