"""Rows of indexing: reads and writes at positions that come from data.

Every position is checked as eager checks it: which ops count negative positions from the end, which exception is
raised and with which words differs from op to op and stands in the row. Writes that may meet at one element combine
in loop order; of writes that replace, the last one stays. A tensor without dimensions has one element, at position 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ferrite.errors import Unsupported
from ferrite.loops.dtypes import DType, b8, f32, f64, i32, i64
from ferrite.loops.index import (
    ZERO,
    Axis,
    Data,
    Index,
    IndexLike,
    data,
    free_atoms,
    free_axes,
    index,
    known_nonnegative,
    known_zero,
    product,
)
from ferrite.loops.nodes import (
    Accumulate,
    Assert,
    Buffer,
    Checked,
    Expr,
    Guarded,
    Load,
    Nest,
    Position,
    Reduce,
    Scan,
    Statement,
    Store,
)
from ferrite.loops.rewrite import can_raise, met_always, substitute_axes
from ferrite.loops.shapes import contiguous_strides, reshape_index
from ferrite.lower.pointwise import not_bool, truth_of
from ferrite.lower.table import lowers
from ferrite.lower.value import (
    FROM_DTYPE,
    Built,
    Result,
    Tensor,
    apply,
    axes_for,
    broadcast_sizes,
    cast,
    compute_dtype,
    const,
    expand,
    is_one,
    normalize_dim,
    of_buffer,
    of_one_dtype,
    points,
    promote,
    reduce_axes,
    scalar,
    select,
    tensor,
    view,
)
from ferrite.lower.view import result_buffer

aten = torch.ops.aten

OUT_OF_RANGE = "index out of range in self"
OUT_OF_BOUNDS = "index {index} is out of bounds for dimension %d with size {size}"


def position(value: Expr, size: Index, *, wrap: bool, error: str, message: str) -> Index:
    """A position from data, checked against the size of the dimension that it points into."""
    if size is ZERO:
        raise Unsupported("a position in an empty dimension", why="there is none, and eager says so in other words")
    return data(Checked(cast(value, i64), size, wrap, error, message), 0, size - 1)


def clamped(value: Expr, size: Index) -> Index:
    """A position from data that is moved inside, if it is not; below zero counts from the end."""
    value, extent = cast(value, i64), Position(size)
    inside = apply("minimum", apply("maximum", value, apply("neg", extent)), Position(size - 1))
    return data(select(apply("lt", inside, const(0, i64)), apply("add", inside, extent), inside), 0, size - 1)


def fill_nest(buffer: Buffer, value: Tensor) -> Nest:
    axes = axes_for(buffer.sizes)
    return Nest(axes, (Store(buffer, points(axes), cast(value.at(points(axes)), buffer.dtype)),))


def is_empty(x: Tensor) -> bool:
    return ZERO in x.sizes


def straight(x: Tensor) -> Tensor:
    """All elements in one dimension, in row-major order."""
    sizes = [product(x.sizes)]
    return view(x, sizes, lambda *here: reshape_index(here, sizes, x.sizes))


def lifted(x: Tensor) -> Tensor:
    """A tensor without dimensions as one with one."""
    return x if x.rank else view(x, [index(1)], lambda *here: [])


# ---- reads


def read(x: Tensor, place: Sequence[IndexLike]) -> Expr:
    """The element at a place. Where x does not change along a dimension, or is padding, no position is needed: it is
    checked still."""
    value = x.at(place)
    met = {*met_always(value)}
    for at in map(index, place):
        if any(isinstance(atom, Data) and atom.value not in met for atom in free_atoms(at)):
            value = Guarded(apply("ge", Position(at), const(0, i64)), value, value)
    return value


@lowers(aten.embedding.default)
def embedding(
    weight: Tensor, indices: Tensor, padding_idx: IndexLike = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Tensor:
    """Rows of the table. Negative positions are out of range."""

    def body(*here: Index) -> Expr:
        row = position(indices.at(here[:-1]), weight.sizes[0], wrap=False, error="IndexError", message=OUT_OF_RANGE)
        return read(weight, [row, here[-1]])

    return tensor([*indices.sizes, weight.sizes[1]], body)


@lowers(aten.index_select.default)
def index_select(x: Tensor, dim: int, indices: Tensor, *, result: Result) -> Tensor:
    """Negative positions are out of range. Along dimension 1 eager has a kernel of its own, with its own words."""
    if is_empty(indices):
        return Tensor(axes_for(result.sizes), const(0, x.dtype))
    if x.rank == 0:
        if not all(known_zero(extent - 1) for extent in indices.sizes):
            raise Unsupported("several elements of a tensor without dimensions", why="eager raises")
        return view(index_select(lifted(x), 0, indices, result=result), (), lambda: [ZERO])
    dim = normalize_dim(dim, x.rank)
    error, message = "IndexError", OUT_OF_RANGE
    if dim == 1:
        error, message = "RuntimeError", "INDICES element is out of DATA bounds, id={index} axis_dim={size}"
    flat = lifted(indices)

    def body(*here: Index) -> Expr:
        at = position(flat.at([here[dim]]), x.sizes[dim], wrap=False, error=error, message=message)
        return read(x, [*here[:dim], at, *here[dim + 1 :]])

    return tensor([*x.sizes[:dim], flat.sizes[0], *x.sizes[dim + 1 :]], body)


@lowers(aten.gather.default)
def gather(x: Tensor, dim: int, indices: Tensor, *, sparse_grad: bool = False) -> Tensor:
    """One element for each position; negative positions are out of bounds. No position at all fits any tensor."""
    if is_empty(indices):
        return Tensor(indices.axes, const(0, x.dtype))
    x = lifted(x)
    dim = normalize_dim(dim, x.rank)

    def body(*here: Index) -> Expr:
        at = position(indices.at(here), x.sizes[dim], wrap=False, error="RuntimeError", message=OUT_OF_BOUNDS % dim)
        return read(x, [*here[:dim], at, *here[dim + 1 :]])

    return tensor(indices.sizes, body)


OUT_OF_ELEMENTS = "out of range: tried to access index {index} on a tensor of {size} elements."


@lowers(aten.take.default)
def take(x: Tensor, indices: Tensor) -> Tensor:
    """Positions in row-major order, below zero from the end."""
    if is_empty(indices):
        return Tensor(indices.axes, const(0, x.dtype))
    flat = straight(x)

    def body(*here: Index) -> Expr:
        at = position(indices.at(here), flat.sizes[0], wrap=True, error="IndexError", message=OUT_OF_ELEMENTS)
        return read(flat, [at])

    return tensor(indices.sizes, body)


Where = Callable[..., "list[IndexLike]"]


def advanced(x: Tensor, indices: Sequence[Tensor | None], *, unchecked: bool = False) -> tuple[list[Index], Where]:
    """Sizes of `x[indices]`, and a function from a point of it to a point of x.

    Indexed dimensions that stand together are replaced where they stand; otherwise the positions come first.
    """
    padded = [*indices, *([None] * (x.rank - len(indices)))]
    indexed = [dim for dim, part in enumerate(padded) if part is not None]
    if any(part is not None and part.dtype not in (i64, i32) for part in padded):
        raise Unsupported("indexing with a mask", why="its size depends on data")
    if not indexed:
        return list(x.sizes), lambda *here: list(here)
    shape = broadcast_sizes([part.sizes for part in padded if part is not None])
    together = indexed == list(range(indexed[0], indexed[-1] + 1))
    start = indexed[0] if together else 0
    others = [dim for dim in range(x.rank) if dim not in indexed]
    before = [dim for dim in others if dim < start] if together else []
    after = [dim for dim in others if dim not in before]
    sizes = [*(x.sizes[d] for d in before), *shape, *(x.sizes[d] for d in after)]

    def where(*here: Index) -> list[IndexLike]:
        middle = here[len(before) : len(before) + len(shape)]
        rest = [*here[: len(before)], *here[len(before) + len(shape) :]]
        at: dict[int, IndexLike] = dict(zip([*before, *after], rest, strict=True))
        for dim in indexed:
            part = padded[dim]
            assert part is not None
            value = expand(part, shape).at(middle)
            if unchecked:
                at[dim] = clamped(value, x.sizes[dim])
                continue
            # Eager moves indexed dimensions to the front before it checks: its message counts from there.
            message = OUT_OF_BOUNDS % indexed.index(dim)
            at[dim] = position(value, x.sizes[dim], wrap=True, error="IndexError", message=message)
        return [at[dim] for dim in range(x.rank)]

    return sizes, where


@lowers(aten.index.Tensor, aten._unsafe_index.Tensor)
def index_tensor(x: Tensor, indices: Sequence[Tensor | None], *, result: Result) -> Tensor:
    if ZERO in result.sizes:
        return Tensor(axes_for(result.sizes), const(0, x.dtype))
    sizes, where = advanced(x, indices)
    return tensor(sizes, lambda *here: read(x, where(*here)))


@lowers(aten._unsafe_masked_index.default)
def unsafe_masked_index(x: Tensor, mask: Tensor, indices: Sequence[Tensor | None], fill: Any) -> Tensor:
    """x[indices] where the mask is set, else `fill`. Positions are moved inside, not checked."""
    if is_empty(x):
        raise Unsupported("a masked index into a tensor without elements")
    sizes, where = advanced(x, indices, unchecked=True)
    inside = expand(truth_of(mask), sizes)
    return Tensor(inside.axes, Guarded(inside.body, view(x, sizes, where).body, scalar(fill, x.dtype)))


# ---- reads that search

MOST_STEPS = 20  # of a search: a million boundaries. Each is an operand of the next, in one expression.
MOST_CANDIDATES = 32  # that are compared one by one; for more, eager sorts


@lowers(aten.bucketize.Tensor)
def bucketize(x: Tensor, boundaries: Tensor, *, out_int32: bool = False, right: bool = False, result: Result) -> Tensor:
    not_bool(boundaries.dtype, "bucketize")
    if boundaries.rank != 1:
        raise Unsupported("boundaries of several dimensions", why="eager raises")
    return _searched(boundaries, x, "right" if right else "left", result)


@lowers(aten.bucketize.Scalar)
def bucketize_number(
    x: Any, boundaries: Tensor, *, out_int32: bool = False, right: bool = False, result: Result
) -> Tensor:
    number = Tensor((), scalar(x, promote(x, boundaries)))
    return bucketize(number, boundaries, right=right, result=result)


@lowers(aten.searchsorted.Tensor)
def searchsorted(
    sequence: Tensor,
    x: Tensor,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
    result: Result,
) -> Tensor | Built:
    """`side` says the same as `right` and comes first. A sorter gives the order in which the sequence is sorted."""
    side = side or ("right" if right else "left")
    if sorter is None:
        return _searched(sequence, x, side, result)
    if sorter.dtype is not i64 or sorter.sizes != sequence.sizes:
        raise Unsupported("a sorter of another shape or dtype", why="eager raises")
    if is_empty(sequence) or is_empty(x):
        raise Unsupported("a search in or for nothing by a sorter")
    return _searched_by(sorter, sequence, x, side, result)


def _searched_by(sorter: Tensor, sequence: Tensor, x: Tensor, side: str, result: Result) -> Built:
    """The search in sequence[sorter]. Eager checks the whole sorter first, also what no search meets."""
    message = "torch.searchsorted(): sorter index out of range"
    length = sequence.sizes[-1]
    inside = apply(
        "and_", apply("ge", sorter.body, const(0, i64)), apply("lt", sorter.body, cast(Position(length), i64))
    )
    checks = Nest(sorter.axes, (Assert(inside, "RuntimeError", message),))

    def sorted_at(*here: Index) -> list[IndexLike]:
        place = position(sorter.at(here), length, wrap=False, error="RuntimeError", message=message)
        return [*here[:-1], place]

    found = _searched(view(sequence, sequence.sizes, sorted_at), x, side, result)
    buffer = result_buffer(result)
    return Built((buffer,), (checks, fill_nest(buffer, found)))


@lowers(aten.searchsorted.Scalar)
def searchsorted_number(
    sequence: Tensor,
    x: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
    result: Result,
) -> Tensor | Built:
    number = Tensor((), scalar(x, promote(x, sequence)))
    return searchsorted(sequence, number, right=right, side=side, sorter=sorter, result=result)


def _searched(sequence: Tensor, x: Tensor, side: str, result: Result) -> Tensor:
    """Eager's binary search, step by step, so that NaN and sequences that are not sorted come out as they do there.

    An element is passed if it is not >= x (left), or not > x (right): NaN is passed.
    """
    if sequence.rank not in (1, x.rank):
        raise Unsupported("a search in a tensor of other dimensions", why="eager raises")
    if sequence.sizes[-1].terms:
        raise Unsupported("a search in a sequence of unknown length", why="the number of steps depends on it")
    length = sequence.sizes[-1].constant
    if length.bit_length() > MOST_STEPS:
        raise Unsupported(f"a search in {length} elements")
    compute = promote(sequence, x)
    stop = "gt" if side == "right" else "ge"

    def body(*here: Index) -> Expr:
        row = here[: sequence.rank - 1]
        wanted = cast(x.at(here), compute)
        low: Expr = const(0, i64)
        high: Expr = const(length, i64)
        least = length  # how many are left to search at the fewest; while there are some, nothing need be asked
        for step in range(length.bit_length()):
            half = apply("shr", apply("sub", high, low), const(1, i64))
            middle = apply("add", low, half) if step else const(length // 2, i64)
            place = middle if least else apply("minimum", middle, const(length - 1, i64))
            element = cast(sequence.at([*row, data(place, 0, length - 1)]), compute)
            passed = stays = apply("not_", apply(stop, element, wanted))
            if not least:
                searching = apply("lt", low, high)
                passed, stays = apply("and_", searching, passed), apply("or_", apply("not_", searching), passed)
            low, high = select(passed, apply("add", middle, const(1, i64)), low), select(stays, high, middle)
            least = max(least - 1, 0) // 2
        return cast(low, result.dtype)

    return tensor(x.sizes, body)


@lowers(aten.isin.Tensor_Tensor)
def isin(x: Tensor, candidates: Tensor, *, assume_unique: bool = False, invert: bool = False) -> Tensor:
    """Whether an element equals one of the candidates; NaN equals nothing."""
    flat = straight(candidates)
    if flat.sizes[0].terms or flat.sizes[0].constant > MOST_CANDIDATES:
        raise Unsupported("isin with many candidates", why="eager sorts them")
    compute = promote(x, candidates)
    (axis,) = reduce_axes(apply("eq", x.body, x.body), [flat.sizes[0]])
    same = apply("eq", cast(x.body, compute), cast(flat.at(points((axis,))), compute))
    found: Expr = Reduce("any", (axis,), same, "value")
    return Tensor(x.axes, apply("not_", found) if invert else found)


# ---- writes

# How eager combines; a mean is a sum that is divided later. Truth values: sums are or, products are and.
COMBINE = {"sum": "add", "add": "add", "mean": "add", "prod": "mul", "multiply": "mul", "amax": "maximum",
           "amin": "minimum"}  # fmt: skip
COMBINE_TRUTH = {"sum": "maximum", "add": "maximum", "prod": "minimum", "multiply": "minimum", "amax": "maximum",
                 "amin": "minimum"}  # fmt: skip


def combination(reduce: str, dtype: DType) -> str:
    known = COMBINE_TRUTH if dtype.is_bool else COMBINE
    if reduce not in known:
        raise Unsupported(f"a scatter of {dtype} that combines by {reduce}", why="eager raises")
    return known[reduce]


def neutral(operation: str, dtype: DType) -> Expr:
    """What changes nothing when combined."""
    if operation in ("add", "mul"):
        return const(operation == "mul", dtype)
    if dtype.is_float:
        return const(-math.inf if operation == "maximum" else math.inf, dtype)
    if dtype.is_bool:
        return const(operation == "minimum", dtype)
    limits = torch.iinfo(FROM_DTYPE[dtype])
    return const(limits.min if operation == "maximum" else limits.max, dtype)


def own_buffer(name: str, dtype: DType, sizes: Sequence[Index]) -> Buffer:
    """Memory of the kernel's own."""
    return Buffer(name, dtype, tuple(sizes), contiguous_strides(sizes))


def rounded_once(built: Built) -> Built:
    """The same, with halves combined in f32 and rounded once at the end. Extremes need no rounding."""
    (buffer,) = built.results
    combined = built.nests[-1].body[0]
    if not buffer.dtype.is_half or not isinstance(combined, Accumulate) or combined.operation not in ("add", "mul"):
        return built
    wide = own_buffer("wide", f32, buffer.sizes)
    nests = []
    for nest in built.nests:
        (statement,) = nest.body
        assert isinstance(statement, (Store, Accumulate))
        value = cast(statement.value, f32)
        nests.append(
            Nest(nest.axes, (Store(wide, statement.index, value),))
            if isinstance(statement, Store)
            else Nest(nest.axes, (Accumulate(statement.operation, wide, statement.index, value),))
        )
    return Built((buffer,), (*nests, fill_nest(buffer, of_buffer(wide))))


def divided(built: Built, include_self: bool) -> Built:
    """Sums divided by how many were added up, the element's own value included or not; integers are rounded down.

    Eager counts in the dtype of the tensor, so a half counts to 256 or 2048 and then in steps.
    """
    (buffer,) = built.results
    nest = next(nest for nest in reversed(built.nests) if isinstance(nest.body[0], Accumulate))
    (added,) = nest.body
    assert isinstance(added, Accumulate)
    count = own_buffer("count", i64, buffer.sizes)
    start = Tensor(axes_for(buffer.sizes), const(int(include_self), i64))
    counting = Nest(nest.axes, (Accumulate("add", count, added.index, const(1, i64)),))
    axes = axes_for(buffer.sizes)
    here = points(axes)
    number = apply("maximum", Load(count, here), const(1, i64))
    total, compute = Load(buffer, here), compute_dtype(buffer.dtype)
    quotient = (
        apply("div", cast(total, compute), cast(cast(number, buffer.dtype), compute))
        if buffer.dtype.is_float
        else apply("floordiv", total, cast(number, buffer.dtype))
    )
    last = Nest(axes, (Store(buffer, here, cast(quotient, buffer.dtype)),))
    return Built((buffer,), (*built.nests, fill_nest(count, start), counting, last))


def written(
    x: Tensor, axes: Any, target: Sequence[IndexLike], value: Expr, operation: str | None, result: Result
) -> Built:
    """A copy of x in which every point of a loop replaces an element, or is combined with it."""
    buffer = result_buffer(result)
    place = tuple(map(index, target))
    if operation is None:
        axes, value = _last_written(axes, place, value)
        statement: Statement = Store(buffer, place, value)
    else:
        statement = Accumulate(operation, buffer, place, value)
    return Built((buffer,), (fill_nest(buffer, x), Nest(axes, (statement,))))


def _last_written(axes: Sequence[Axis], place: tuple[Index, ...], value: Expr) -> tuple[tuple[Axis, ...], Expr]:
    """x.scatter(0, zeros, source): all points along an axis that the place does not name meet at one element, where the
    last one's value stays."""
    named = frozenset().union(*map(free_axes, place))
    lost = [axis for axis in axes if axis in free_axes(value) - named and not known_zero(axis.extent - 1)]
    if lost and (can_raise(value) or not all(known_nonnegative(axis.extent - 1) for axis in lost)):
        raise Unsupported("several values for one element")
    ends = {axis: axis.extent - 1 for axis in lost}
    return tuple(axis for axis in axes if axis not in ends), substitute_axes(value, ends)


def without_self(built: Built, operation: str) -> Built:
    """The same, but elements that are met start from what changes nothing instead of their own value."""
    fill, nest = built.nests
    (statement,) = nest.body
    assert isinstance(statement, Accumulate)
    start = Store(statement.buffer, statement.index, neutral(operation, statement.buffer.dtype))
    return Built(built.results, (fill, Nest(nest.axes, (start,)), nest))


@lowers(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(
    x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False, *, result: Result
) -> Tensor | Built:
    """A copy with elements replaced or added to. Halves that meet are rounded after each addition, as in eager."""
    masks = [part for part in indices if part is not None and part.dtype.is_bool]
    if accumulate or not masks or any(not is_one(extent) for extent in values.sizes):
        of_one_dtype("index_put", x, values)  # a single value wherever a mask is set is converted
    if masks and len([part for part in indices if part is not None]) == 1:
        return _put_where(x, list(indices).index(masks[0]), masks[0], values, accumulate)
    sizes, where = advanced(x, indices)
    if ZERO in sizes:
        return x
    axes = axes_for(sizes)
    here = points(axes)
    source = cast(expand(values, sizes).at(here), x.dtype)
    operation = combination("sum", x.dtype) if accumulate else None
    return written(x, axes, where(*here), source, operation, result)


def _put_where(x: Tensor, dim: int, mask: Tensor, values: Tensor, accumulate: bool) -> Tensor:
    """One value wherever a mask is set: no position is needed. Values one by one would have to be counted."""
    rest = x.rank - dim - mask.rank
    if values.rank > rest and any(not known_zero(extent - 1) for extent in values.sizes[: values.rank - rest]):
        raise Unsupported("a value for each place of a mask", why="which one depends on the places before it")
    ahead = max(values.rank - rest, 0)
    slim = view(values, values.sizes[ahead:], lambda *here: [*[ZERO] * ahead, *here])
    here = points(x.axes)
    value = cast(expand(slim, x.sizes).at(here), x.dtype)
    if accumulate:
        value = apply(combination("sum", x.dtype), x.body, value)
    return Tensor(x.axes, select(mask.at(here[dim : dim + mask.rank]), value, x.body))


@lowers(aten._unsafe_masked_index_put_accumulate.default)
def unsafe_masked_index_put(
    x: Tensor, mask: Tensor, indices: Sequence[Tensor | None], values: Tensor, *, result: Result
) -> Built:
    """Values added where the mask is set; elsewhere zero is added to a position that is moved inside."""
    of_one_dtype("index_put", x, values)
    if is_empty(x):
        raise Unsupported("a masked index into a tensor without elements")
    sizes, where = advanced(x, indices, unchecked=True)
    axes = axes_for(sizes)
    here = points(axes)
    inside = expand(truth_of(mask), sizes).at(here)
    source = select(inside, cast(expand(values, sizes).at(here), x.dtype), const(0, x.dtype))
    return written(x, axes, where(*here), source, combination("sum", x.dtype), result)


@lowers(aten.put.default)
def put(x: Tensor, indices: Tensor, source: Tensor, accumulate: bool = False, *, result: Result) -> Tensor | Built:
    """Positions in row-major order, below zero from the end."""
    if is_empty(indices):
        return x
    count = product(x.sizes)
    where, values = straight(indices), straight(source)
    here = points(where.axes)
    at = position(where.body, count, wrap=True, error="IndexError", message=OUT_OF_ELEMENTS)
    target = reshape_index([at], [count], x.sizes)
    operation = combination("sum", x.dtype) if accumulate else None
    return written(x, where.axes, target, values.at(here), operation, result)


def scattered(
    x: Tensor, dim: int, indices: Tensor, value: Any, operation: str | None, result: Result
) -> Tensor | Built:
    """A copy of x with `value` written to, or combined into, the position that `indices` names along `dim`."""
    if is_empty(indices):
        return x
    if max(x.rank, 1) != max(indices.rank, 1):
        raise Unsupported("a scatter by positions of another rank", why="eager raises")
    if x.rank == 0 or indices.rank == 0:
        return _scattered_in_line(x, indices, value, operation, result)
    dim = normalize_dim(dim, x.rank)
    axes = axes_for(indices.sizes)
    here = points(axes)
    at = position(indices.at(here), x.sizes[dim], wrap=False, error="RuntimeError", message=OUT_OF_BOUNDS % dim)
    source = cast(value.at(here) if isinstance(value, Tensor) else scalar(value, x.dtype), x.dtype)
    return written(x, axes, (*here[:dim], at, *here[dim + 1 :]), source, operation, result)


def _scattered_in_line(x: Tensor, indices: Tensor, value: Any, operation: str | None, result: Result) -> Built:
    """The same for tensors of which one has no dimensions: every operand is a line."""
    where = lifted(indices)
    (here,) = points(where.axes)
    source = lifted(value).at([here]) if isinstance(value, Tensor) else scalar(value, x.dtype)
    at = position(where.body, lifted(x).sizes[0], wrap=False, error="RuntimeError", message=OUT_OF_BOUNDS % 0)
    if x.rank:
        return written(x, where.axes, [at], cast(source, x.dtype), operation, result)
    return to_one(x, where, at, cast(source, x.dtype), operation, result)


def to_one(x: Tensor, where: Tensor, at: Index, value: Expr, operation: str | None, result: Result) -> Built:
    """Writes to the only element of a tensor without dimensions; that the position is 0 is checked all the same."""
    if operation is None and not known_zero(where.sizes[0] - 1):
        raise Unsupported("several values for one element")
    found = Guarded(apply("eq", Position(at), const(0, i64)), value, const(0, x.dtype))
    return written(x, where.axes, [], found, operation, result)


@lowers(aten.scatter.src)
def scatter_src(x: Tensor, dim: int, indices: Tensor, source: Tensor, *, result: Result) -> Tensor | Built:
    return scattered(x, dim, indices, source, None, result)


@lowers(aten.scatter.value)
def scatter_value(x: Tensor, dim: int, indices: Tensor, value: Any, *, result: Result) -> Tensor | Built:
    return scattered(x, dim, indices, value, None, result)


@lowers(aten.scatter.reduce)
def scatter_src_reduce(
    x: Tensor, dim: int, indices: Tensor, source: Tensor, *, reduce: str, result: Result
) -> Tensor | Built:
    operation = combination(reduce, x.dtype)
    return _rounded(scattered(x, dim, indices, source, operation, result))


@lowers(aten.scatter.value_reduce)
def scatter_value_reduce(
    x: Tensor, dim: int, indices: Tensor, value: Any, *, reduce: str, result: Result
) -> Tensor | Built:
    operation = combination(reduce, x.dtype)
    return _rounded(scattered(x, dim, indices, value, operation, result))


def _rounded(made: Tensor | Built) -> Tensor | Built:
    return made if isinstance(made, Tensor) else rounded_once(made)


@lowers(aten.scatter_add.default)
def scatter_add(x: Tensor, dim: int, indices: Tensor, source: Tensor, *, result: Result) -> Tensor | Built:
    """Halves are added up in f32 and rounded once, as in eager."""
    return _rounded(scattered(x, dim, indices, source, combination("sum", x.dtype), result))


@lowers(aten.scatter_reduce.two)
def scatter_reduce(
    x: Tensor, dim: int, indices: Tensor, source: Tensor, reduce: str, *, include_self: bool = True, result: Result
) -> Tensor | Built:
    """Halves are combined in f32 and rounded once; a mean divides the rounded sum."""
    operation = combination(reduce, x.dtype)
    built = scattered(x, dim, indices, source, operation, result)
    if isinstance(built, Tensor):
        return built
    if not include_self:
        built = without_self(built, operation)
    built = rounded_once(built)
    return divided(built, include_self) if reduce == "mean" else built


def along(
    x: Tensor, dim: int, indices: Tensor, source: Tensor, operation: str | None, result: Result, **check: Any
) -> Tensor | Built:
    """A copy of x with slices of `source` written to, or combined into, the positions that `indices` names."""
    if is_empty(indices) or is_empty(source):
        return x
    dim = normalize_dim(dim, x.rank)
    source = lifted(source)
    if source.rank != max(x.rank, 1):
        raise Unsupported("slices of another rank", why="eager raises")
    here = points(source.axes)
    where = lifted(indices)
    at = position(where.at([here[dim]]), lifted(x).sizes[dim], **check)
    value = cast(source.body, x.dtype)
    if x.rank == 0:
        return to_one(x, where, at, value, operation, result)
    return written(x, source.axes, (*here[:dim], at, *here[dim + 1 :]), value, operation, result)


@lowers(aten.index_add.default)
def index_add(
    x: Tensor, dim: int, indices: Tensor, source: Tensor, *, alpha: Any = 1, result: Result
) -> Tensor | Built:
    """Slices added at positions; negative ones are out of range.

    Eager runs a scatter_add, with its words and its sums of halves, along the first and the last of several dimensions.
    """
    of_one_dtype("index_add", x, source)
    plain = not isinstance(alpha, Index) and alpha == 1
    if not plain:
        if not (x.dtype.is_float or x.dtype.is_int) or x.dtype.is_half:
            raise Unsupported("index_add with alpha of halves or truth values")
        source = Tensor(source.axes, apply("mul", cast(source.body, x.dtype), scalar(alpha, x.dtype)))
    operation = combination("sum", x.dtype)
    dim = normalize_dim(dim, x.rank)
    if x.rank > 1 and plain and indices.dtype is i64 and dim in (0, x.rank - 1):
        check = {"wrap": False, "error": "RuntimeError", "message": OUT_OF_BOUNDS % dim}
        return _rounded(along(x, dim, indices, source, operation, result, **check))
    check = {"wrap": False, "error": "IndexError", "message": OUT_OF_RANGE}
    return along(x, dim, indices, source, operation, result, **check)


@lowers(aten.index_copy.default)
def index_copy(x: Tensor, dim: int, indices: Tensor, source: Tensor, *, result: Result) -> Tensor | Built:
    of_one_dtype("index_copy", x, source)
    message = f"index_copy_(): {OUT_OF_BOUNDS % normalize_dim(dim, x.rank)}"
    return along(x, dim, indices, source, None, result, wrap=False, error="IndexError", message=message)


@lowers(aten.index_reduce.default)
def index_reduce(
    x: Tensor, dim: int, indices: Tensor, source: Tensor, reduce: str, *, include_self: bool = True, result: Result
) -> Tensor | Built:
    """Slices combined at positions; halves are rounded each time, as in eager."""
    not_bool(x.dtype, "index_reduce")
    of_one_dtype("index_reduce", x, source)
    operation = combination(reduce, x.dtype)
    built = along(x, dim, indices, source, operation, result, wrap=False, error="IndexError", message=OUT_OF_RANGE)
    if isinstance(built, Tensor):
        return built
    if not include_self:
        built = without_self(built, operation)
    return divided(built, include_self) if reduce == "mean" else built


@lowers(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
def index_fill(x: Tensor, dim: int, indices: Tensor, value: Any, *, result: Result) -> Tensor | Built:
    """One value at all positions; below zero counts from the end."""
    if is_empty(indices) or is_empty(x):
        return x
    flat, dim = lifted(indices), normalize_dim(dim, x.rank)
    number = cast(value.at(()) if isinstance(value, Tensor) else scalar(value, x.dtype), x.dtype)
    axes = axes_for([*x.sizes[:dim], flat.sizes[0], *x.sizes[dim + 1 :]])
    here = points(axes)
    extent = x.sizes[dim] if x.rank else index(1)
    at = position(flat.at([here[dim]]), extent, wrap=True, error="IndexError", message=OUT_OF_BOUNDS % dim)
    if x.rank == 0:
        return to_one(x, flat, at, number, None, result)
    return written(x, axes, (*here[:dim], at, *here[dim + 1 :]), number, None, result)


@lowers(aten.embedding_dense_backward.default)
def embedding_dense_backward(
    grad: Tensor,
    indices: Tensor,
    num_weights: IndexLike,
    padding_idx: IndexLike,
    scale_grad_by_freq: bool,
    *,
    result: Result,
) -> Built:
    """Gradients added to the rows that were read; the padding row stays zero, and positions outside count for nothing,
    as in eager, which leaves the checking to the forward. Halves are rounded after each addition."""
    axes = axes_for(grad.sizes)
    here = points(axes)
    row = cast(indices.at(here[:-1]), i64)
    count = index(num_weights)
    outside = apply("or_", apply("lt", row, const(0, i64)), apply("ge", row, Position(count)))
    ignored = apply("or_", apply("eq", row, const(padding_idx, i64)), outside)
    value = select(ignored, const(0, grad.dtype), grad.at(here))
    at = data(select(outside, const(0, i64), row), 0, count - 1)
    zeros = Tensor(axes_for(result.sizes), const(0, result.dtype))
    if not scale_grad_by_freq:
        return written(zeros, axes, (at, here[-1]), value, "add", result)
    if grad.dtype.is_half:
        raise Unsupported("halves scaled by frequency", why="eager rounds the scaled sum once")
    often = own_buffer("often", i64, [count])
    once = select(outside, const(0, i64), const(1, i64))
    counting = Nest(axes[:-1], (Accumulate("add", often, (at,), once),))
    scale = cast(apply("div", const(1, f64), cast(Load(often, (at,)), f64)), grad.dtype)
    scaled = apply("mul", value, select(outside, const(0, grad.dtype), scale))
    built = written(zeros, axes, (at, here[-1]), scaled, "add", result)
    never = Tensor(axes_for([count]), const(0, i64))
    return Built(built.results, (fill_nest(often, never), counting, *built.nests))


# ---- elements one by one where a mask is set


def counted(mask: Tensor) -> tuple[Buffer, tuple[Nest, ...]]:
    """How many places of a mask are set up to each one, in row-major order, that one included."""
    flat = straight(mask)
    count = own_buffer("count", i64, flat.sizes)
    (axis,) = flat.axes
    scan = Scan("cumsum", axis, ((count, points((axis,))),), cast(flat.body, i64))
    return count, (Nest((), (scan,)),)


@lowers(aten.repeat_interleave.Tensor)
def repeat_interleave(repeats: Tensor, *, output_size: Any = None, result: Result) -> Built:
    """Each position as often as `repeats` says: 2, 0, 1 gives 0, 0, 2.

    The position at a place is the number of runs that end up to there. Eager checks that the runs fill the result, and
    then that none is negative. Without positions it gives nothing, whatever size was asked for.
    """
    if output_size is None:
        raise Unsupported("positions repeated", why="how many there are depends on data")
    if repeats.rank != 1 or repeats.dtype not in (i64, i32):
        raise Unsupported(f"repeats of {repeats.dtype} and rank {repeats.rank}", why="eager raises")
    if is_empty(repeats) or ZERO in result.sizes:
        raise Unsupported("nothing repeated")
    (run,), (count,) = repeats.axes, result.sizes
    here = points((run,))
    ends = own_buffer("ends", i64, repeats.sizes)
    add_up = Scan("cumsum", run, ((ends, here),), cast(repeats.body, i64))
    full = apply("eq", Load(ends, (repeats.sizes[0] - 1,)), Position(count))
    end = Load(ends, here)
    ended = own_buffer("ended", result.dtype, result.sizes)
    place = apply("minimum", apply("maximum", end, const(0, i64)), Position(count - 1))
    one_more = cast(apply("lt", end, Position(count)), result.dtype)
    buffer = result_buffer(result)
    (axis,) = axes_for(result.sizes)
    number = Scan("cumsum", axis, ((buffer, points((axis,))),), Load(ended, points((axis,))))
    return Built(
        (buffer,),
        (
            Nest((), (add_up,)),
            Nest((), (Assert(full, "RuntimeError", "allocated size does not match required size"),)),
            Nest((run,), (_no_negative_repeat(repeats),)),
            fill_nest(ended, Tensor((axis,), const(0, result.dtype))),
            Nest((run,), (Accumulate("add", ended, (data(place, 0, count - 1),), one_more),)),
            Nest((), (number,)),
        ),
    )


def _no_negative_repeat(repeats: Tensor) -> Assert:
    return Assert(apply("ge", repeats.body, const(0, repeats.dtype)), "RuntimeError", "repeats can not be negative")


@lowers(aten.masked_scatter.default)
def masked_scatter(x: Tensor, mask: Tensor, source: Tensor, *, result: Result) -> Tensor | Built:
    """Where the mask is set, the elements of `source` one after the other, in row-major order. Eager raises for a mask
    that is not boolean."""
    if mask.dtype is not b8:
        raise Unsupported("masked_scatter with a mask that is not boolean")
    if ZERO in result.sizes:
        return Tensor(axes_for(result.sizes), const(0, x.dtype))
    inside = expand(truth_of(mask), result.sizes)
    count, nests = counted(inside)
    values = straight(source)
    axes = axes_for(result.sizes)
    here = points(axes)
    message = "Number of elements of source < number of ones in mask"
    ordinal = apply("sub", Load(count, reshape_index(here, result.sizes, count.sizes)), const(1, i64))
    at = position(ordinal, values.sizes[0], wrap=False, error="RuntimeError", message=message)
    body = Guarded(inside.at(here), cast(values.at([at]), x.dtype), expand(x, result.sizes).at(here))
    buffer = result_buffer(result)
    return Built((buffer,), (*nests, Nest(axes, (Store(buffer, here, body),))))


@lowers(aten.masked_scatter_backward.default)
def masked_scatter_backward(grad: Tensor, mask: Tensor, sizes: Any, *, result: Result) -> Tensor | Built:
    """The gradients where the mask is set, one after the other; zeros behind them."""
    zeros = Tensor(axes_for(result.sizes), const(0, result.dtype))
    if is_empty(grad) or ZERO in result.sizes:
        return zeros
    inside = expand(truth_of(mask), grad.sizes)
    count, nests = counted(inside)
    here = points(grad.axes)
    ordinal = apply("sub", Load(count, reshape_index(here, grad.sizes, count.sizes)), const(1, i64))
    length = product(result.sizes)
    at = data(apply("minimum", apply("maximum", ordinal, const(0, i64)), Position(length - 1)), 0, length - 1)
    value = select(inside.at(here), grad.body, const(0, grad.dtype))
    target = reshape_index([at], [length], result.sizes)
    built = written(zeros, grad.axes, target, value, "add", result)
    return Built(built.results, (*nests, *built.nests))
