"""Every node of the loop IR except indices (`index.py`) and element types (`dtypes.py`).

Nodes are frozen and interned: equal structure is the same object. Building one does no work and no checking;
`check.py` says what a program must satisfy, `text.py` prints and parses, `oracle.py` runs. A new node is five short
edits: here, text, check, oracle, emit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias, Union

from ferrite.loops.dtypes import DType, b8, i64
from ferrite.loops.index import Axis, Index, Node, Size
from ferrite.loops.operations import OPERATIONS, REDUCTIONS, SCANS

# ---- expressions


@dataclass(frozen=True, slots=True, eq=False)
class Expr(Node):
    """A scalar value at one point of a loop nest. Every expression has a `dtype`."""

    @property
    def dtype(self) -> DType:
        raise NotImplementedError


@dataclass(frozen=True, slots=True, eq=False)
class Buffer(Node):
    """Memory for a tensor: element type, sizes and strides in elements. Sizes and strides may be symbolic.

    text:   x: f32[8, 64]      y: f32[8, 64].stride(1, 8)
    """

    name: str
    dtype: DType
    sizes: tuple[Index, ...]
    strides: tuple[Index, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Const(Expr):
    """A literal. Floats hold the value in double precision; it is rounded to the dtype.

    text:   f32(0.5)     i64(3)     b8(True)
    """

    value: bool | int | float
    kind: DType

    @property
    def dtype(self) -> DType:
        return self.kind


@dataclass(frozen=True, slots=True, eq=False)
class Load(Expr):
    """One element of a buffer.

    text:   x[i, 4*j + k]      s[()] for a buffer without dimensions
    check:  one index for each dimension, proven or checked to lie inside
    """

    buffer: Buffer
    index: tuple[Index, ...]

    @property
    def dtype(self) -> DType:
        return self.buffer.dtype


@dataclass(frozen=True, slots=True, eq=False)
class Cast(Expr):
    """Convert as PyTorch does: float to int truncates, to b8 means != 0, int wraps.

    A float out of range, or NaN: i64 and i32 give their least integer; i8 and i16 wrap by way of i32, u8 by way of i64.

    text:   f32(x[i])
    """

    kind: DType
    value: Expr

    @property
    def dtype(self) -> DType:
        return self.kind


@dataclass(frozen=True, slots=True, eq=False)
class Bits(Expr):
    """The same bits read as another type of the same width.

    text:   bits(x[i], i32)
    """

    kind: DType
    value: Expr

    @property
    def dtype(self) -> DType:
        return self.kind


@dataclass(frozen=True, slots=True, eq=False)
class Apply(Expr):
    """A scalar operation of the table `OPERATIONS`.

    text:   x[i] + y[i]      exp(x[i])      maximum(x[i], f32(0.0))
    check:  the operation exists, takes this many operands of one dtype of a kind that it knows
    """

    operation: str
    operands: tuple[Expr, ...]

    @property
    def dtype(self) -> DType:
        return b8 if OPERATIONS[self.operation].result == "bool" else _dtype_of_first(self)


@dataclass(frozen=True, slots=True, eq=False)
class Select(Expr):
    """One of two values. Both must be defined: a load in the branch not taken is still in bounds, or `guarded`.

    text:   where(c[i], x[i], y[i])
    check:  the condition is b8, both branches have one dtype
    """

    condition: Expr
    yes: Expr
    no: Expr

    @property
    def dtype(self) -> DType:
        return _dtype_of_first(self)


@dataclass(frozen=True, slots=True, eq=False)
class Guarded(Expr):
    """A value that is computed only where the condition holds; elsewhere it is `otherwise`. Loads inside need not be in
    bounds where the condition is false: padding, concatenation, windows.

    text:   guarded(c, x[i - 1], f32(0.0))
    """

    condition: Expr
    value: Expr
    otherwise: Expr

    @property
    def dtype(self) -> DType:
        return _dtype_of_first(self)


@dataclass(frozen=True, slots=True, eq=False)
class Position(Expr):
    """An index as a value of type i64.

    text:   value(4*i + j)
    """

    index: Index

    @property
    def dtype(self) -> DType:
        return i64


@dataclass(frozen=True, slots=True, eq=False)
class Checked(Expr):
    """An integer from data that is used as an index: below zero counts from the end if `wrap`; outside, the kernel
    stops and the caller raises `error` with `message`. `{index}` and `{size}` in the message stand for the offending
    value (as it was before wrapping) and the size.

    text:   checked(n[i], 10, True, 'IndexError', 'index {index} is out of bounds for dimension 0 with size {size}')
    check:  the value is an integer
    """

    value: Expr
    size: Index
    wrap: bool
    error: str
    message: str

    @property
    def dtype(self) -> DType:
        return i64


@dataclass(frozen=True, slots=True, eq=False)
class Require(Expr):
    """A value that is computed only where the condition holds; where it does not, the kernel stops and the caller
    raises `error` with `message`: integer division, arguments that eager looks at.

    text:   require(m[i] != i64(0), floordiv(n[i], m[i]), 'RuntimeError', 'ZeroDivisionError')
    check:  the condition is b8, the error is the name of a Python exception
    """

    condition: Expr
    value: Expr
    error: str
    message: str

    @property
    def dtype(self) -> DType:
        return _dtype_of_first(self)


@dataclass(frozen=True, slots=True, eq=False)
class Random(Expr):
    """A counter-based random number: Philox 4x32-10 with key `seed` and counter `(counter, stream)`.

    kind "bits": i32, all values alike.  "uniform": f32 in [0, 1), 24 bits.  "normal": f32, Box-Muller of two draws.

    text:   random('uniform', seed[()], 0, 4*i + j)
    """

    draw: str
    seed: Expr  # i64
    stream: int  # which random op of the graph
    counter: Index
    kind: DType

    @property
    def dtype(self) -> DType:
        return self.kind


@dataclass(frozen=True, slots=True, eq=False)
class Reduce(Expr):
    """Combine `body` over `axes` with a reduction of the table `REDUCTIONS`, and take one of its results.

    Two that differ only in `result` are computed together.

    text:   sum(x[i, k] * y[k] for k in box(64))      argmax(x[i, k] for k in box(64)).index
    check:  at least one axis; none bound outside already; the reduction knows the result
    """

    operation: str
    axes: tuple[Axis, ...]
    body: Expr
    result: str

    @property
    def dtype(self) -> DType:
        return _result_dtype(dict(REDUCTIONS[self.operation].results)[self.result], self.body.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Argument(Expr):
    """What the combine of a fold is given: running value `number`, of what comes first ("left") or after it ("right").

    text:   a0 and b0 inside of fold(lambda a0, b0: a0 + b0); the lambda names them
    check:  stands in the combine of a fold, and has the dtype of the value with this number
    """

    side: str
    number: int
    kind: DType

    @property
    def dtype(self) -> DType:
        return self.kind


@dataclass(frozen=True, slots=True, eq=False)
class Fold(Expr):
    """Combine several values over `axes` by expressions, and take one of the results: a reduction without a name.

    `combine` has one expression for each value, over `Argument`s. It is associative, so neighbours may be combined in
    any grouping; it need not commute, so their order, row-major, is kept. There is no value to start from: one element
    is its own result, and no elements have none. Two folds that differ only in `result` are computed together.

    text:   fold(lambda a0, a1, b0, b1: (a0 * b0, a1 * b0 + b1))((x[i, k], y[i, k]) for k in box(64))[1]
    check:  at least one axis, none that may be empty; a result of the dtype of its value for each value; the combine
            depends on no axis of the fold, holds no other fold and cannot raise
    """

    combine: tuple[Expr, ...]
    axes: tuple[Axis, ...]
    values: tuple[Expr, ...]
    result: int

    @property
    def dtype(self) -> DType:
        return self.values[self.result].dtype


def _dtype_of_first(node: Expr) -> DType:
    """The dtype that a node takes over from an operand, looked up once and kept. Without recursion: chains are long."""
    above: list[Expr] = []
    while not hasattr(node, "_dtype"):
        match node:
            case Apply(operation=operation, operands=(first, *_)) if OPERATIONS[operation].result == "same":
                above.append(node)
                node = first
            case Select(yes=first) | Guarded(value=first) | Require(value=first):
                above.append(node)
                node = first
            case _:
                break
    dtype: DType = node._dtype if hasattr(node, "_dtype") else node.dtype
    for waiting in above:
        object.__setattr__(waiting, "_dtype", dtype)
    return dtype


# ---- statements


@dataclass(frozen=True, slots=True, eq=False)
class Statement(Node):
    """Something that a loop nest does at each of its points."""


@dataclass(frozen=True, slots=True, eq=False)
class Store(Statement):
    """Write one element. Points that meet at one element through an index from data write in loop order.

    text:   y[i, j] = exp(x[i, j])
    check:  the value has the buffer's dtype; no two points write one element otherwise, unless the same value
    """

    buffer: Buffer
    index: tuple[Index, ...]
    value: Expr


@dataclass(frozen=True, slots=True, eq=False)
class Accumulate(Statement):
    """Combine what is in memory with a value. Points of the nest may meet at one element: they combine in loop order.

    text:   y[at(n[i], 0, 9)] += x[i]      y[i] = accumulate('maximum', y[i], x[i])
    """

    operation: str
    buffer: Buffer
    index: tuple[Index, ...]
    value: Expr


@dataclass(frozen=True, slots=True, eq=False)
class Scan(Statement):
    """Running results along `axis`, from 0 upwards; one target for each result of the table `SCANS`, None where unused.

    text:   for k in scan(64):
                y[i, k], n[i, k] = cummax(x[i, k])
    """

    operation: str
    axis: Axis
    targets: tuple[tuple[Buffer, tuple[Index, ...]] | None, ...]
    value: Expr


@dataclass(frozen=True, slots=True, eq=False)
class FoldScan(Statement):
    """Running results of a fold along `axis`, from 0 upwards; one target for each value, None where unused.

    text:   for k in scan(64):
                y[i, k], _ = fold(lambda a0, a1, b0, b1: (a0 * b0, a1 * b0 + b1))(x[i, k], w[i, k])
    check:  as for `Fold`; the combine reads nothing that the scan writes
    """

    combine: tuple[Expr, ...]
    axis: Axis
    targets: tuple[tuple[Buffer, tuple[Index, ...]] | None, ...]
    values: tuple[Expr, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Assert(Statement):
    """Stop with an error unless the condition holds.

    text:   check(n[i] >= i64(0), 'IndexError', 'negative index')
    """

    condition: Expr
    error: str
    message: str


@dataclass(frozen=True, slots=True, eq=False)
class Nest(Node):
    """A loop over a box, in row-major order; the statements run in order at each point. No axes: once.

    text:   for i, j in box(8, 64):
                y[i, j] = exp(x[i, j])
    """

    axes: tuple[Axis, ...]
    body: tuple[Statement, ...]


# ---- programs


@dataclass(frozen=True, slots=True, eq=False)
class Parameter(Node):
    """A buffer that the caller gives. `role` is "in" (only read), "out" (only written, every element) or "inout".

    text:   x: f32[8]      y: out(f32[8])      z: inout(f32[8])
    """

    buffer: Buffer
    role: str


@dataclass(frozen=True, slots=True, eq=False)
class Program(Node):
    """Loop nests over parameters and locals, run in order. Sizes are run-time arguments.

    text:   def program(s0: size(2, 512), x: f32[s0], y: out(f32[s0])):
                t = local(f32[s0])
                for i in box(s0):
                    t[i] = exp(x[i])
                ...
    """

    name: str
    sizes: tuple[Size, ...]
    parameters: tuple[Parameter, ...]
    locals: tuple[Buffer, ...]
    nests: tuple[Nest, ...]


AnyNode: TypeAlias = Union[Expr, Statement, Nest, Program, Buffer, Parameter]  # noqa: UP007


def _result_dtype(rule: str, same: DType) -> DType:
    return {"same": same, "i64": i64, "b8": b8}[rule]


def scan_dtypes(scan: Scan) -> tuple[DType, ...]:
    """The dtype of each result of a scan."""
    return tuple(_result_dtype(rule, scan.value.dtype) for _, rule in SCANS[scan.operation].results)
