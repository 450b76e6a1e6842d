"""Makes and runs native code for tests and measurements: kernels of one vector loop each, many in one module.

`TARGETS` are the instruction sets that are tested. Where the machine has no AVX-512, the code for it runs on AVX2: LLVM
splits its vectors, and the few instructions that only AVX-512 has are replaced by functions that do the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ferrite.loops.dtypes import DType, i64
from ferrite.loops.oracle import STORAGE
from ferrite.native.build import Library, build, library_addresses, load
from ferrite.native.builder import Builder, Value, pointer
from ferrite.native.target import Target, named, runs_here

TARGETS = ("x86-64-v4", "x86-64-v3", "x86-64")


class WithoutAVX512(Builder):
    """Writes the code of an AVX-512 target so that any processor runs it."""

    def scalef(self, a: Value, n: Value) -> Value:
        return self.ldexp(a, self.floor(n))

    def getexp(self, a: Value) -> Value:
        return self.call_lanes(self.c_function("logb", a.dtype), (self.abs(a),))

    def getmant(self, a: Value) -> Value:
        inside = self.and_(self.gt(a, 0.0), self.lt(a, float("inf")))
        fraction = self.ldexp(a, self.neg(self.getexp(a)))
        one = self.select(self.lt(a, 0.0), float("nan"), self.copysign(self.like(a, 1.0), a))
        return self.select(self.or_(inside, self.isnan(a)), fraction, one)


def builder_for(name: str) -> Builder:
    target = named(name)
    if runs_here(target):
        return Builder(target)
    return WithoutAVX512(replace(target, name=f"{name} by AVX2", cpu="x86-64-v3"))


@dataclass(frozen=True)
class Kernel:
    """One vector loop: `write(b, *inputs)` gives the value that is stored for each group of lanes."""

    name: str
    inputs: tuple[DType, ...]
    output: DType
    write: Callable[..., Value]
    lanes: int | None = None  # what the target has for the widest input
    ways: int = 1


class Module:
    """Kernels that were built together, for one target."""

    def __init__(self, target: str, kernels: Sequence[Kernel]) -> None:
        b = builder_for(target)
        self.kernels = {kernel.name: kernel for kernel in kernels}
        self.steps = {}
        for kernel in kernels:
            self.steps[kernel.name] = _write(b, kernel)
        self.text = b.text()
        self.library = loaded(b, list(self.kernels))

    def run(self, name: str, *arrays: Any) -> Any:
        """The result for arrays of equal length, or of length 1; they are padded to whole steps of the loop."""
        kernel, step = self.kernels[name], self.steps[name]
        length = max(len(array) for array in arrays)
        padded = -(-length // step) * step
        inputs = [np.ascontiguousarray(np.resize(array, padded)) for array in arrays]
        output = np.zeros(padded, STORAGE[kernel.output])
        call(self.library, name, *inputs, output, padded)
        return output[:length]


def _write(b: Builder, kernel: Kernel) -> int:
    widest = max((*kernel.inputs, kernel.output), key=lambda dtype: dtype.bytes)
    lanes = kernel.lanes or b.target.lanes(widest)
    step = lanes * kernel.ways
    names = {f"x{k}": pointer for k in range(len(kernel.inputs))}
    arguments = {**names, "y": pointer, "count": i64}
    with b.function(kernel.name, arguments) as (*places, result, count), b.loop(0, count, step) as loop:
        pairs = zip(kernel.inputs, places, strict=True)
        values = [b.load(dtype, place, loop.index, lanes, kernel.ways) for dtype, place in pairs]
        b.store(kernel.write(b, *values), result, loop.index)
        loop.next()
    return step


def loaded(b: Builder, names: Sequence[str]) -> Library:
    return load([build(b.text(), b.target)], names, library_addresses(b.externals))


def call(library: Library, name: str, *arguments: Any) -> None:
    prepared(library, name, *arguments)()


def prepared(library: Library, name: str, *arguments: Any) -> Callable[[], None]:
    """A call that is made by calling the result. Arrays are passed as pointers, integers as i64."""
    values = [ctypes.c_int64(arg.ctypes.data if isinstance(arg, np.ndarray) else arg) for arg in arguments]
    function = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * len(values))(library.address(name))
    return lambda: function(*values)


def target_of(name: str) -> Target:
    return builder_for(name).target
