"""What a lowering row sees and gives: tensors as expressions over their own axes.

A `Tensor` is a value at every point of a box. Until something needs it in memory it is only an expression; reading it
at an index is substitution. A `Built` is a tensor that has to be made by loops of its own (scatters, scans): its
nests write buffers that the lowering names. Rows are pure functions of these; `lower/graph.py` decides what is stored
and when.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ferrite.errors import Unsupported
from ferrite.loops.dtypes import DTYPES, DType, b8, f32, f64, i64
from ferrite.loops.index import Axis, Index, IndexLike, index, known_zero, of_atom
from ferrite.loops.nodes import Apply, Buffer, Cast, Const, Expr, Load, Nest, Position, Reduce, Select
from ferrite.loops.rewrite import substitute_axes, walk

AXIS_NAMES = ("i", "j", "k", "l", "m", "n", "o", "p", "q")

TORCH_DTYPES: dict[torch.dtype, DType] = {
    torch.float64: DTYPES["f64"], torch.float32: DTYPES["f32"], torch.float16: DTYPES["f16"],
    torch.bfloat16: DTYPES["bf16"], torch.int64: DTYPES["i64"], torch.int32: DTYPES["i32"],
    torch.int16: DTYPES["i16"], torch.int8: DTYPES["i8"], torch.uint8: DTYPES["u8"], torch.bool: DTYPES["b8"],
}  # fmt: skip
FROM_DTYPE: dict[DType, torch.dtype] = {ours: theirs for theirs, ours in TORCH_DTYPES.items()}


def dtype_of(theirs: torch.dtype) -> DType:
    found = TORCH_DTYPES.get(theirs)
    if found is None:
        raise Unsupported(f"tensors of {theirs}", why="the loop IR has no such element type")
    return found


@dataclass(frozen=True, eq=False)
class Tensor:
    """A value at every point of a box: `body` over `axes`, one axis for each dimension."""

    axes: tuple[Axis, ...]
    body: Expr

    @property
    def sizes(self) -> tuple[Index, ...]:
        return tuple(axis.extent for axis in self.axes)

    @property
    def dtype(self) -> DType:
        return self.body.dtype

    @property
    def rank(self) -> int:
        return len(self.axes)

    def at(self, indices: Sequence[IndexLike]) -> Expr:
        """The value at a point."""
        if len(indices) != len(self.axes):
            raise Unsupported(f"a tensor of rank {len(self.axes)} read with {len(indices)} indices")
        return substitute_axes(self.body, dict(zip(self.axes, map(index, indices), strict=True)))


@dataclass(frozen=True, eq=False)
class Built:
    """Tensors that loops of their own write. `results` are stand-ins, contiguous; the lowering renames them."""

    results: tuple[Buffer, ...]
    nests: tuple[Nest, ...]


@dataclass(frozen=True, eq=False)
class After:
    """A result that is made of other results of its op, `parts` by number. `make` is given each as it lies in memory,
    or as the row gave it if nobody reads it."""

    parts: tuple[int, ...]
    make: Callable[..., Tensor]


@dataclass(frozen=True)
class Result:
    """What eager would give, for rows that ask: sizes, strides and dtype of one result."""

    sizes: tuple[Index, ...]
    strides: tuple[Index, ...]
    dtype: DType
    fake: Any = field(compare=False)


@dataclass(frozen=True)
class Draw:
    """Where a random op gets its numbers: an i64 seed, drawn anew for every call of the graph and every op in it."""

    seed: Expr


# ---- making tensors


def axes_for(sizes: Sequence[IndexLike]) -> tuple[Axis, ...]:
    """The axes of a tensor of these sizes; tensors of equal sizes have equal axes."""
    names = AXIS_NAMES if len(sizes) <= len(AXIS_NAMES) else tuple(f"i{n}" for n in range(len(sizes)))
    return tuple(Axis(name, index(extent)) for name, extent in zip(names, sizes, strict=False))


def points(axes: Sequence[Axis]) -> tuple[Index, ...]:
    return tuple(of_atom(axis) for axis in axes)


def tensor(sizes: Sequence[IndexLike], body: Callable[..., Expr]) -> Tensor:
    """A tensor from its sizes and a function of its indices; the function runs once, now."""
    axes = axes_for(sizes)
    return Tensor(axes, body(*points(axes)))


def of_buffer(buffer: Buffer) -> Tensor:
    axes = axes_for(buffer.sizes)
    return Tensor(axes, Load(buffer, points(axes)))


def view(source: Tensor, sizes: Sequence[IndexLike], where: Callable[..., Sequence[IndexLike]]) -> Tensor:
    """A tensor that reads `source` elsewhere: `where` maps indices of the new tensor to indices of the old one."""
    axes = axes_for(sizes)
    return Tensor(axes, source.at(where(*points(axes))))


# ---- numbers and types


def const(value: Any, dtype: DType) -> Expr:
    """A literal of a dtype; a Python number is converted as PyTorch converts it. A symbolic size is a number too."""
    if isinstance(value, Index):
        return cast(Position(value), dtype)
    if dtype.is_float:
        return Const(float(value), dtype)
    if dtype.is_bool:
        return Const(bool(value), dtype)
    wrapped = int(value) & ((1 << dtype.bits) - 1)
    if dtype.signed and wrapped >> (dtype.bits - 1):
        wrapped -= 1 << dtype.bits
    return Const(wrapped, dtype)


_EXACT_IN_F32 = 1 << 24


def cast(value: Expr, dtype: DType) -> Expr:
    if value.dtype is dtype:
        return value
    if (
        isinstance(value, Const)
        and not value.dtype.is_float
        and abs(value.value) <= _EXACT_IN_F32
        and not dtype.is_half
    ):
        return const(value.value, dtype)  # a float literal is rounded to its own dtype first: it keeps its cast
    return Cast(dtype, value)


def scalar(value: Any, dtype: DType) -> Expr:
    """A number argument of an op (literal or symbolic size) as an expression."""
    if isinstance(value, (bool, int, float, Index)):
        return const(value, dtype)
    raise Unsupported(f"a scalar argument of type {type(value).__name__}")


def as_tensor(value: Any) -> Tensor:
    """A number where an op takes a tensor, as a tensor without dimensions."""
    if isinstance(value, Tensor):
        return value
    return Tensor((), scalar(value, promote(value, default=f64)))


def promote(*operands: Any, default: DType = f32) -> DType:
    """The dtype in which PyTorch computes: tensors decide, then tensors without dimensions, then numbers."""
    levels: list[list[DType]] = [[], [], []]
    for operand in operands:
        if isinstance(operand, Tensor):
            levels[0 if operand.rank else 1].append(operand.dtype)
        elif isinstance(operand, bool):
            levels[2].append(b8)
        elif isinstance(operand, (int, Index)):
            levels[2].append(i64)
        elif isinstance(operand, float):
            levels[2].append(default)
    result: DType | None = None
    for level in levels:
        if not level:
            continue
        joined = level[0]
        for dtype in level[1:]:
            joined = join(joined, dtype)
        if result is None or _KIND_ORDER[joined.kind] > _KIND_ORDER[result.kind]:
            result = joined
    if result is None:
        raise Unsupported("an op without operands that have a dtype")
    return result


_KIND_ORDER = {"bool": 0, "int": 1, "float": 2}


def join(left: DType, right: DType) -> DType:
    """The common dtype of two tensors."""
    return TORCH_DTYPES[torch.promote_types(FROM_DTYPE[left], FROM_DTYPE[right])]


def compute_dtype(dtype: DType) -> DType:
    """Halves are computed in f32."""
    return f32 if dtype.is_half else dtype


def to_float(dtype: DType) -> DType:
    """What a function over the reals gives for this dtype: integers and truth values become f32."""
    return dtype if dtype.is_float else f32


# ---- shapes


def of_one_dtype(op: str, *tensors: Tensor) -> None:
    """Refuse a mixture: eager raises where tracing would promote."""
    if any(other.dtype is not tensors[0].dtype for other in tensors):
        raise Unsupported(f"{op} of several dtypes", why="eager raises")


def broadcast_sizes(shapes: Sequence[Sequence[Index]]) -> tuple[Index, ...]:
    """The common shape, aligned at the end; a size of one stretches. Sizes that may or may not be one are taken as
    equal: tracing has guarded them."""
    rank = max((len(shape) for shape in shapes), default=0)
    common: list[Index] = []
    for back in range(rank, 0, -1):
        here = [shape[-back] for shape in shapes if len(shape) >= back]
        stretched = [extent for extent in here if not is_one(extent)]
        common.append(stretched[0] if stretched else here[0])
    return tuple(common)


def is_one(extent: Index) -> bool:
    return known_zero(extent - 1)


def expand(source: Tensor, sizes: Sequence[Index]) -> Tensor:
    """`source` stretched to `sizes`, new dimensions in front."""
    if tuple(sizes) == source.sizes:
        return source
    ahead = len(sizes) - source.rank

    def where(*indices: Index) -> list[IndexLike]:
        tail = indices[ahead:]
        return [
            0 if is_one(extent) and not is_one(size) else here
            for here, extent, size in zip(tail, source.sizes, sizes[ahead:], strict=True)
        ]

    return view(source, sizes, where)


def normalize_dim(dim: int, rank: int) -> int:
    """A dimension counted from the end as counted from the front; a tensor without dimensions has dimension 0."""
    return dim + max(rank, 1) if dim < 0 else dim


# ---- pointwise


def pointwise(
    function: Callable[..., Expr],
    *operands: Any,
    compute: DType,
    result: DType | None = None,
    numbers: DType | None = None,
) -> Tensor:
    """Apply a function to operands stretched to one shape and converted to `compute`, and convert it to `result`.

    Numbers take part as literals, rounded to `numbers` first where eager makes tensors of them. The function runs
    once, on expressions.
    """
    tensors = [operand for operand in operands if isinstance(operand, Tensor)]
    sizes = broadcast_sizes([operand.sizes for operand in tensors])
    values = [
        cast(
            expand(operand, sizes).body if isinstance(operand, Tensor) else scalar(operand, numbers or compute), compute
        )
        for operand in operands
    ]
    body = function(*values)
    return Tensor(axes_for(sizes), cast(body, result) if result is not None else body)


def apply(operation: str, *operands: Expr) -> Expr:
    return Apply(operation, operands)


def select(condition: Expr, yes: Expr, no: Expr) -> Expr:
    return Select(condition, yes, no)


# ---- reductions


def reduce_axes(body: Expr, extents: Sequence[Index]) -> tuple[Axis, ...]:
    """Fresh axes to reduce over: their names occur nowhere in the body."""
    used = {axis.name for node in walk(body) if isinstance(node, Reduce) for axis in node.axes}
    names = (name for number in range(1000) if (name := f"r{number}" if number else "r") not in used)
    return tuple(Axis(next(names), extent) for extent in extents)


def reduction(
    operation: str, source: Tensor, dims: Sequence[int], *, keep: bool, result: str, accumulate: DType | None = None
) -> Tensor:
    """Reduce `source` over `dims`; `accumulate` is the dtype of the operand and so of the running value."""
    dims = sorted(normalize_dim(dim, source.rank) for dim in dims)
    kept = [dim for dim in range(source.rank) if dim not in dims]
    sizes = [source.sizes[dim] if dim in kept else index(1) for dim in range(source.rank) if keep or dim in kept]
    inner = reduce_axes(source.body, [source.sizes[dim] for dim in dims])
    axes = axes_for(sizes)
    outer = points(axes)
    positions: dict[int, Index] = dict(zip(dims, points(inner), strict=True))
    if keep:
        positions |= {dim: outer[dim] for dim in kept}
    else:
        positions |= dict(zip(kept, outer, strict=True))
    body = source.at([positions[dim] for dim in range(source.rank)])
    if not inner:  # a tensor without dimensions: one element
        inner = reduce_axes(body, [index(1)])
    return Tensor(axes, Reduce(operation, inner, cast(body, accumulate or body.dtype), result))


def accumulator(dtype: DType) -> DType:
    """The dtype in which sums of this dtype run: at least f32, wider integers as they are."""
    return f64 if dtype is f64 else f32 if dtype.is_float else dtype
