"""Writes vector code as LLVM IR. See `values.py` for what a value is, `writer.py` for functions and constants.

    values       Type, Value: element type, lanes, and one name for each of several ways
    writer       functions, constants, globals, shuffles
    arithmetic   operations in one basic block
    convert      casts as PyTorch's; division of integers
    control      loops and branches
    shuffle      reductions over lanes, transposes
    memory       loads and stores, masked, strided, gathered
    floats       exact operations on floats; calls of C's library

Each is a class on top of the one before; `Builder` is all of them. An operation of `loops/operations.py` that is not a
function over the reals (see `native/math`) is the method of that name.
"""

from __future__ import annotations

from ferrite.native.builder.control import Branch, Loop
from ferrite.native.builder.floats import Floats
from ferrite.native.builder.memory import Mask, Tail
from ferrite.native.builder.values import Type, Value, pointer, scalar, u16, u32, u64, vector
from ferrite.native.builder.writer import Operand


class Builder(Floats):
    """Writes one module for one target. `text()` is the module, `externals` the functions that it calls by name."""


__all__ = [
    "Branch",
    "Builder",
    "Loop",
    "Mask",
    "Operand",
    "Tail",
    "Type",
    "Value",
    "pointer",
    "scalar",
    "u16",
    "u32",
    "u64",
    "vector",
]
