"""Runs a loop program slowly and plainly with NumPy: what every other way of running it is compared with.

A nest is evaluated statement by statement over its whole box: an axis is an `arange` along its own dimension, an
expression is an array that broadcasts over the box. The axes of a reduction are new leading dimensions, so values from
outside broadcast into it as they are. Boxes too large for memory are cut along their outermost axes; nests whose points
depend on one another run one point at a time. A program that breaks its contract (a load outside its buffer, two points
that store different values to one element, an integer division by zero) raises `Malformed` instead of reading rubbish.

    arrays   f64, f32, f16, i64..i8, u8, b8: the NumPy type of that name; bf16: its bits as uint16
    values   the same, but both halves are float32 that hold a half: every operation computes in f32 and rounds
    f32      functions without an exact IEEE result are computed in f64 and rounded once
    sums     of halves and f32 are taken in f64, of f64 in long double, rounded once; integers wrap

Where eager has no one answer (the sign of min(0.0, -0.0) depends on how far a vector loop came) the first operand wins.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import reduce
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ferrite.errors import Malformed
from ferrite.loops.dtypes import DType, b8, bf16, f16, f32, f64, i8, i16, i32, i64, u8
from ferrite.loops.index import Axis, Data, FloorDiv, Index, Least, Most, Node, Size, atoms, free_atoms, of_atom, parts
from ferrite.loops.nodes import (
    Accumulate,
    Apply,
    Assert,
    Bits,
    Buffer,
    Cast,
    Checked,
    Const,
    Expr,
    Guarded,
    Load,
    Nest,
    Position,
    Program,
    Random,
    Reduce,
    Require,
    Scan,
    Select,
    Statement,
    Store,
)
from ferrite.loops.special import IN_DOUBLE

Array: TypeAlias = NDArray[Any]
Ranges: TypeAlias = "tuple[tuple[int, int], ...]"  # [start, stop) of each axis of a box

BOX_LIMIT = 2**22  # elements of one array, if that can be helped


def run(program: Program, sizes: Mapping[str, int], arrays: Mapping[str, Array], *, box_limit: int = BOX_LIMIT) -> None:
    """Execute all nests in order. Parameters are arrays by buffer name, written in place; locals are made here."""
    memory = _Memory(sizes, {}, box_limit)
    for parameter in program.parameters:
        buffer = parameter.buffer
        memory.arrays[buffer] = _given(buffer, arrays[buffer.name], memory.shape(buffer))
    for buffer in program.locals:
        memory.arrays[buffer] = _unwritten(buffer.dtype, memory.shape(buffer))
    with np.errstate(all="ignore"):
        for nest in program.nests:
            _run_nest(nest, memory)


# ---- memory and element types

STORAGE: dict[DType, np.dtype[Any]] = {
    f64: np.dtype(np.float64),
    f32: np.dtype(np.float32),
    f16: np.dtype(np.float16),
    bf16: np.dtype(np.uint16),
    i64: np.dtype(np.int64),
    i32: np.dtype(np.int32),
    i16: np.dtype(np.int16),
    i8: np.dtype(np.int8),
    u8: np.dtype(np.uint8),
    b8: np.dtype(np.bool_),
}


@dataclass(frozen=True)
class _Memory:
    """The arrays of all buffers, and the sizes of this call."""

    sizes: Mapping[str, int]
    arrays: dict[Buffer, Array]
    box_limit: int

    def number(self, value: Index) -> int:
        """An index that depends on sizes only."""
        return int(_index(value, lambda atom: self._size(atom, value)))

    def shape(self, buffer: Buffer) -> tuple[int, ...]:
        return tuple(self.number(size) for size in buffer.sizes)

    def extents(self, axes: tuple[Axis, ...]) -> tuple[int, ...]:
        return tuple(max(self.number(axis.extent), 0) for axis in axes)

    def _size(self, atom: Node, value: Index) -> Array:
        if isinstance(atom, Size):
            return np.asarray(self.sizes[atom.name], np.int64)
        raise Malformed(f"a size or extent depends on more than sizes: {value}", where="oracle")


def _given(buffer: Buffer, array: Array, shape: tuple[int, ...]) -> Array:
    if array.shape != shape or array.dtype != STORAGE[buffer.dtype]:
        expected = f"{STORAGE[buffer.dtype]}{list(shape)}"
        raise ValueError(f"{buffer.name}: expected {expected}, found {array.dtype}{list(array.shape)}")
    return array


def _unwritten(dtype: DType, shape: tuple[int, ...]) -> Array:
    """Memory whose values show when they are read before they are written."""
    if dtype.is_float:
        return _to_storage(np.full(shape, np.nan, _value_type(dtype)), dtype)
    return np.full(shape, np.iinfo(STORAGE[dtype]).min + 77 if dtype.is_int else True, STORAGE[dtype])


def _value_type(dtype: DType) -> np.dtype[Any]:
    return STORAGE[f32] if dtype.is_half else STORAGE[dtype]


def _from_storage(array: Array, dtype: DType) -> Array:
    if dtype is bf16:
        return (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return np.asarray(array, _value_type(dtype))


def _to_storage(value: Array, dtype: DType) -> Array:
    """A value as it lies in memory. For bf16: the nearest, ties to even, by carrying into the kept bits."""
    if dtype is not bf16:
        return np.asarray(value, STORAGE[dtype])
    bits = np.ascontiguousarray(value, np.float32).reshape(np.shape(value)).view(np.uint32)
    nearest = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(np.isnan(value), quiet, nearest).astype(np.uint16)


def _rounded(value: Array, dtype: DType) -> Array:
    """A float of more precision as the nearest value of the dtype; halves by way of f32, as C++ converts them."""
    value = np.asarray(value, _value_type(dtype))
    return _from_storage(_to_storage(value, dtype), dtype) if dtype.is_half else value


def _cast(value: Array, source: DType, target: DType) -> Array:
    """To b8: != 0. To a float: rounded. From a float to an integer: truncated. Between integers: wraps."""
    if target is b8:
        return np.asarray(value != 0)
    if target.is_float:
        return _rounded(value, target)
    if source.is_float:
        # What the CPU gives when it does not fit, as eager compiles it: u8 by way of i64, i8 and i16 by way of i32.
        value = _truncated(value, i64 if target in (i64, u8) else i32)
    return value.astype(STORAGE[target])


def _truncated(value: Array, target: DType) -> Array:
    """Towards zero; NaN and what does not fit become the least integer, as x86 does."""
    least = -(2.0 ** (target.bits - 1))
    whole = np.trunc(value.astype(np.float64))
    fits = (whole >= least) & (whole < -least)
    return np.where(fits, whole, least).astype(STORAGE[target])


def _bits(value: Array, source: DType, target: DType) -> Array:
    stored = np.ascontiguousarray(_to_storage(value, source)).reshape(value.shape)
    return _from_storage(stored.view(STORAGE[target]), target)


# ---- boxes


def _pieces(extents: tuple[int, ...], weight: int, limit: int) -> Iterator[Ranges]:
    """The box in row-major order, cut so that each piece has at most limit // weight points, but at least one."""
    if 0 in extents:
        return
    room = max(limit // max(weight, 1), 1)
    whole = tuple((0, extent) for extent in extents)
    if math.prod(extents) <= room:
        yield whole
        return
    rest = math.prod(extents[1:])
    step = max(room // rest, 1)
    for start in range(0, extents[0], step):
        first = (start, min(start + step, extents[0]))
        if rest <= room:
            yield (first, *whole[1:])
        else:
            yield from ((first, *others) for others in _pieces(extents[1:], weight, limit))


def _grids(axes: tuple[Axis, ...], ranges: Ranges, below: int) -> dict[Axis, Array]:
    """Each axis as its numbers along its own dimension; `below` dimensions of the box around come after them."""
    grids = {}
    for position, (axis, (start, stop)) in enumerate(zip(axes, ranges, strict=True)):
        trailing = (1,) * (len(axes) - 1 - position + below)
        grids[axis] = np.arange(start, stop, dtype=np.int64).reshape(-1, *trailing)
    return grids


def _lengths(ranges: Ranges) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in ranges)


# ---- indices


def _index(value: Index, meaning: Callable[[Node], Array]) -> Array:
    """The polynomial over arrays; `meaning` says what axes, sizes and data are."""
    result = np.asarray(value.constant, np.int64)
    for coefficient, monomial in value.terms:
        factors = [_atom(atom, meaning) for atom in monomial]
        result = result + reduce(np.multiply, factors, np.asarray(coefficient, np.int64))
    return np.asarray(result)


def _atom(atom: Any, meaning: Callable[[Node], Array]) -> Array:
    inner = parts(atom)
    if not inner:
        return meaning(atom)
    left, right = (_index(part, meaning) for part in inner)
    if isinstance(atom, (Least, Most)):
        return np.asarray(np.minimum(left, right) if isinstance(atom, Least) else np.maximum(left, right))
    # NumPy's // and % are Python's. Its 0 for a zero divisor can only meet points where a guard is false.
    return np.asarray(left // right if isinstance(atom, FloorDiv) else left % right)


# ---- expressions


@dataclass
class _Scope:
    """Where expressions are evaluated: a box, and the points of it where they must be defined.

    Inner scopes (under a guard, inside a reduction) see what the outer ones have evaluated already.
    """

    memory: _Memory
    shape: tuple[int, ...]
    grids: dict[Axis, Array]
    active: Array | None = None  # None: everywhere
    outer: _Scope | None = None
    known: dict[Any, Array] = field(default_factory=dict)
    guards: dict[Expr, _Scope] = field(default_factory=dict)

    def value(self, node: Expr) -> Array:
        """Each expression is evaluated once, operands first: a long chain must not become a deep recursion."""
        found = self._find(node)
        if found is None:
            for step in _operands_first(node):
                found = self._find(step)
                if found is None:
                    found = self.known[step] = np.asarray(self._evaluate(step))
        assert found is not None
        return found

    def full(self, node: Expr) -> Array:
        return np.broadcast_to(self.value(node), self.shape)

    def index(self, value: Index) -> Array:
        return _index(value, self._of_atom)

    def axes(self) -> tuple[Axis, ...]:
        return (*self.grids, *(self.outer.axes() if self.outer is not None else ()))

    def any_active(self, where: Array) -> bool:
        return bool((where if self.active is None else where & self.active).any())

    def _find(self, key: Any) -> Array | None:
        scope: _Scope | None = self
        while scope is not None:
            if key in scope.known:
                return scope.known[key]
            scope = scope.outer
        return None

    def _of_atom(self, atom: Node) -> Array:
        match atom:
            case Axis():
                return self._grid(atom)
            case Size(name=name):
                return np.asarray(self.memory.sizes[name], np.int64)
            case Data(value=value, low=low, high=high):
                found = self.value(value).astype(np.int64)
                if self.any_active((found < self.index(low)) | (found > self.index(high))):
                    raise Malformed(f"an index from data lies outside {low}..{high}", where="oracle")
                return found
        raise Malformed(f"not an atom: {atom}", where="oracle")

    def _grid(self, axis: Axis) -> Array:
        scope: _Scope | None = self
        while scope is not None:
            if axis in scope.grids:
                return scope.grids[axis]
            scope = scope.outer
        raise Malformed(f"axis {axis.name} is not bound", where="oracle")

    def _evaluate(self, node: Expr) -> Array:
        match node:
            case Const(value=value, kind=kind):
                if kind.is_float:
                    return _rounded(np.asarray(value, np.float64), kind)
                return np.asarray(value).astype(STORAGE[kind])
            case Load(buffer=buffer, index=index):
                return self._load(buffer, index)
            case Cast(kind=kind, value=value):
                return _cast(self.value(value), value.dtype, kind)
            case Bits(kind=kind, value=value):
                return _bits(self.value(value), value.dtype, kind)
            case Apply(operation=operation, operands=operands):
                return self._apply(operation, operands)
            case Select(condition=condition, yes=yes, no=no):
                return np.where(self.value(condition), self.value(yes), self.value(no))
            case Guarded(condition=condition, value=value, otherwise=otherwise):
                holds = self.value(condition)
                inside = self._guarded(condition, holds).value(value)
                return np.where(holds, inside, self.value(otherwise))
            case Position(index=index):
                return self.index(index)
            case Checked():
                return self._checked(node)
            case Require(condition=condition, value=value):
                holds = self.value(condition)
                if self.any_active(~holds):
                    raise _exception(node.error)(node.message)
                return self._guarded(condition, holds).value(value)
            case Random(draw=draw, seed=seed, stream=stream, counter=counter):
                return _random(draw, self.value(seed), stream, self.index(counter))
            case Reduce():
                return self._reduce(node)
        raise Malformed(f"not an expression: {node}", where="oracle")

    def _load(self, buffer: Buffer, index: tuple[Index, ...]) -> Array:
        array = self.memory.arrays[buffer]
        places = _places(self, buffer, index)
        if array.size == 0:  # nothing to read, and `places` has made sure that nobody does
            shape = np.broadcast_shapes(*(place.shape for place in places))
            return np.zeros(shape, _value_type(buffer.dtype))
        return _from_storage(array[places], buffer.dtype)

    def _apply(self, operation: str, operands: tuple[Expr, ...]) -> Array:
        values = [self.value(operand) for operand in operands]
        dtype = operands[0].dtype
        if dtype.is_int and operation in INTEGER_DIVISIONS and self.any_active(values[1] == 0):
            raise Malformed(f"{operation} by zero", where="oracle")
        return _operate(operation, dtype, *values)

    def _guarded(self, condition: Expr, holds: Array) -> _Scope:
        inner = self.guards.get(condition)
        if inner is None:
            active = holds if self.active is None else holds & self.active
            inner = self.guards[condition] = _Scope(self.memory, self.shape, {}, active, self)
        return inner

    def _checked(self, node: Checked) -> Array:
        number, size = self.value(node.value).astype(np.int64), self.index(node.size)
        wrong = (number < (-size if node.wrap else 0)) | (number >= size)
        if self.any_active(wrong):
            wrong, number, size = np.broadcast_arrays(
                wrong if self.active is None else wrong & self.active, number, size
            )
            first = int(np.argmax(wrong))
            message = node.message.replace("{index}", str(number.flat[first])).replace("{size}", str(size.flat[first]))
            raise _exception(node.error)(message)
        return np.where(number < 0, number + size, number) if node.wrap else number

    def _reduce(self, node: Reduce) -> Array:
        """All results of one reduction are kept; the node that asked takes one."""
        key = (node.operation, node.axes, node.body)
        if self._find((*key, node.result)) is None:
            for result, value in REDUCE[node.operation](_Body(self, node.axes, node.body)).items():
                self.known[(*key, result)] = value
        found = self._find((*key, node.result))
        assert found is not None
        return found


def _places(scope: _Scope, buffer: Buffer, index: tuple[Index, ...]) -> tuple[Array, ...]:
    """The subscript for a buffer's array. A place outside is an error if its point is active; else it moves inside."""
    places = []
    for dimension, (part, size) in enumerate(zip(index, scope.memory.arrays[buffer].shape, strict=True)):
        place = scope.index(part)
        outside = (place < 0) | (place >= size)
        if outside.any():
            if scope.any_active(outside):
                raise Malformed(f"{buffer.name} is met outside dimension {dimension} of size {size}", where="oracle")
            place = place.clip(0, max(size - 1, 0))
        places.append(place)
    return tuple(places)


def _exception(name: str) -> type[Exception]:
    found = getattr(builtins, name, None)
    if isinstance(found, type) and issubclass(found, Exception):
        return found
    raise Malformed(f"{name} is not an exception", where="oracle")


# ---- statements


def _run_nest(nest: Nest, memory: _Memory) -> None:
    weight = max((_weight(statement, memory) for statement in nest.body), default=1)
    if not _points_are_independent(nest):
        weight = memory.box_limit  # one point at a time
    pieces = list(_pieces(memory.extents(nest.axes), weight, memory.box_limit))
    if len(pieces) * len(nest.body) > 1:
        _check_first(nest, pieces, memory)
    for ranges in pieces:
        for statement in nest.body:
            _run_statement(statement, _nest_scope(nest, ranges, memory))


def _nest_scope(nest: Nest, ranges: Ranges, memory: _Memory) -> _Scope:
    return _Scope(memory, _lengths(ranges), _grids(nest.axes, ranges, 0))


def _run_statement(statement: Statement, scope: _Scope) -> None:
    match statement:
        case Store(buffer=buffer, index=index, value=value):
            _store(scope, buffer, index, scope.full(value))
        case Accumulate(operation=operation, buffer=buffer, index=index, value=value):
            _accumulate(scope, operation, buffer, index, scope.full(value))
        case Scan(operation=operation, targets=targets, value=value):
            inner = _scan_scope(statement, scope)
            results = SCAN[operation](inner.full(value), value.dtype)
            for target, result in zip(targets, results, strict=True):
                if target is not None:
                    _store(inner, *target, result)
        case Assert(condition=condition, error=error, message=message):
            if not scope.value(condition).all():
                raise _exception(error)(message)
        case _:
            raise Malformed(f"not a statement: {statement}", where="oracle")


def _scan_scope(scan: Scan, scope: _Scope) -> _Scope:
    """The axis of a scan is a leading dimension, as those of a reduction are; it is never cut."""
    (extent,) = scope.memory.extents((scan.axis,))
    grids = _grids((scan.axis,), ((0, extent),), len(scope.shape))
    return _Scope(scope.memory, (extent, *scope.shape), grids, outer=scope)


def _store(scope: _Scope, buffer: Buffer, index: tuple[Index, ...], value: Array) -> None:
    if value.size == 0:
        return
    array, places = _at_each_point(scope, buffer, index)
    stored = _to_storage(value, buffer.dtype)
    if any(isinstance(atom, Data) for part in index for atom in free_atoms(part)):
        # Through data points may meet: one after the other, the last one stays.
        array[tuple(np.broadcast_to(place, scope.shape).ravel() for place in places)] = stored.ravel()
        return
    array[places] = stored
    if not _covers(index, scope.axes()) and not _same_bits(array[places], stored):
        raise Malformed(f"points store different values to one element of {buffer.name}", where="oracle")


def _at_each_point(scope: _Scope, buffer: Buffer, index: tuple[Index, ...]) -> tuple[Array, tuple[Array, ...]]:
    """An array and a subscript for it that has the shape of the box. A single element is an array of one element."""
    array, places = scope.memory.arrays[buffer], _places(scope, buffer, index)
    if not places:
        array, places = array.reshape(1), (np.asarray(0),)
    return array, (np.broadcast_to(places[0], scope.shape), *places[1:])


def _covers(index: tuple[Index, ...], axes: tuple[Axis, ...]) -> bool:
    """Whether every axis is an index of its own, so that no two points meet."""
    return all(of_atom(axis) in index for axis in axes)


def _same_bits(left: Array, right: Array) -> bool:
    same = (left == right) & (np.signbit(left) == np.signbit(right)) if left.dtype.kind == "f" else left == right
    return bool((same | ((left != left) & (right != right))).all())


def _accumulate(scope: _Scope, operation: str, buffer: Buffer, index: tuple[Index, ...], value: Array) -> None:
    """One point after the other, in row-major order of the box. What is in memory is rounded each time."""
    array, places = _at_each_point(scope, buffer, index)
    places, value = tuple(np.broadcast_to(place, scope.shape).ravel() for place in places), value.ravel()
    if not buffer.dtype.is_half and operation in ("add", "mul"):
        (np.add if operation == "add" else np.multiply).at(array, places, value)
        return
    for meeting in _meetings(np.ravel_multi_index(places, array.shape)):
        where = tuple(place[meeting] for place in places)
        before = _from_storage(array[where], buffer.dtype)
        array[where] = _to_storage(_operate(operation, buffer.dtype, before, value[meeting]), buffer.dtype)


def _meetings(places: Array) -> Iterator[Array]:
    """Positions in `places`: all that come first to their place, then all that come second, and so on."""
    if not places.size:
        return
    order = np.argsort(places, kind="stable")
    ordered = places[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    turn = np.arange(places.size) - np.repeat(starts, np.diff(np.r_[starts, places.size]))
    by_turn = order[np.argsort(turn, kind="stable")]
    yield from np.split(by_turn, np.cumsum(np.bincount(turn))[:-1])


def _check_first(nest: Nest, pieces: list[Ranges], memory: _Memory) -> None:
    """Raise what the nest will raise before it stores anything. A check of what the nest itself stores has to wait."""
    written = {buffer for statement in nest.body for buffer, _ in _writes(statement)}
    early = [
        statement
        for statement in nest.body
        if _can_raise(statement) and not any(buffer in written for buffer, _ in _loads(statement))
    ]
    for ranges in pieces if early else ():
        for statement in early:
            scope = _nest_scope(nest, ranges, memory)
            if isinstance(statement, Assert):
                _run_statement(statement, scope)
                continue
            inner = _scan_scope(statement, scope) if isinstance(statement, Scan) else scope
            for expression in _expressions(statement):
                inner.value(expression)


# ---- looking at programs


def _expressions(statement: Statement) -> tuple[Expr, ...]:
    """The value of a statement, and the data in its indices."""
    match statement:
        case Assert(condition=condition):
            return (condition,)
        case Store(value=value) | Accumulate(value=value) | Scan(value=value):
            return (value, *(data for _, index in _writes(statement) for data in _data(index)))
    return ()


def _writes(statement: Statement) -> tuple[tuple[Buffer, tuple[Index, ...]], ...]:
    match statement:
        case Store(buffer=buffer, index=index) | Accumulate(buffer=buffer, index=index):
            return ((buffer, index),)
        case Scan(targets=targets):
            return tuple(target for target in targets if target is not None)
    return ()


def _loads(statement: Statement) -> list[tuple[Buffer, tuple[Index, ...]]]:
    return [(node.buffer, node.index) for node in _all_nodes(statement) if isinstance(node, Load)]


def _can_raise(statement: Statement) -> bool:
    return isinstance(statement, Assert) or any(isinstance(node, (Checked, Require)) for node in _all_nodes(statement))


def _all_nodes(statement: Statement) -> list[Expr]:
    seen = dict.fromkeys(_expressions(statement))
    waiting = list(seen)
    while waiting:
        for node in _children(waiting.pop()):
            if node not in seen:
                seen[node] = None
                waiting.append(node)
    return list(seen)


def _children(node: Expr) -> tuple[Expr, ...]:
    match node:
        case Guarded(value=value) | Require(value=value):
            return (*_operands(node), value)
        case Reduce(body=body):
            return (body,)
        case Load(index=index):
            return _data(index)
        case Position(index=one):
            return _data((one,))
        case Checked(size=size):
            return (*_operands(node), *_data((size,)))
        case Random(counter=counter):
            return (*_operands(node), *_data((counter,)))
    return _operands(node)


def _operands(node: Expr) -> tuple[Expr, ...]:
    """The expressions that have a value wherever the node has one."""
    match node:
        case Cast(value=value) | Bits(value=value) | Checked(value=value):
            return (value,)
        case Apply(operands=operands):
            return operands
        case Select(condition=condition, yes=yes, no=no):
            return (condition, yes, no)
        case Guarded(condition=condition, otherwise=otherwise):
            return (condition, otherwise)
        case Require(condition=condition):
            return (condition,)
        case Random(seed=seed):
            return (seed,)
    return ()


def _operands_first(node: Expr) -> Iterator[Expr]:
    """The node after all that it is made of, each once."""
    seen: set[Expr] = set()
    waiting = [(node, False)]
    while waiting:
        step, ready = waiting.pop()
        if ready:
            yield step
        elif step not in seen:
            seen.add(step)
            waiting.append((step, True))
            waiting.extend((operand, False) for operand in reversed(_operands(step)))


def _data(index: tuple[Index, ...]) -> tuple[Expr, ...]:
    found: list[Expr] = []
    waiting = [atom for part in index for atom in atoms(part)]
    while waiting:
        atom = waiting.pop()
        if isinstance(atom, Data):
            found.append(atom.value)
        waiting.extend(inner for part in parts(atom) for inner in atoms(part))
    return tuple(found)


def _weight(statement: Statement, memory: _Memory) -> int:
    """How many elements the largest array inside has for each point of the nest."""
    start = math.prod(memory.extents((statement.axis,))) if isinstance(statement, Scan) else 1
    return max((_expression_weight(node, start, memory) for node in _expressions(statement)), default=1)


def _expression_weight(node: Expr, around: int, memory: _Memory) -> int:
    """As `_weight`; `around` is what the axes outside the expression come to."""
    largest = around
    seen = {(node, around)}
    waiting = [(node, around)]
    while waiting:
        step, factor = waiting.pop()
        inside = factor * math.prod(memory.extents(step.axes)) if isinstance(step, Reduce) else factor
        largest = max(largest, inside)
        for child in _children(step):
            if (child, inside) not in seen:
                seen.add((child, inside))
                waiting.append((child, inside))
    return largest


def _points_are_independent(nest: Nest) -> bool:
    """Whether running each statement over the whole box gives what running all statements point by point gives.

    So it is for a buffer that is written if it is only stored to (points that meet store the same value), if one
    accumulation is all that touches it, or if every access is at one index that no two points share.
    """
    loads = [access for statement in nest.body for access in _loads(statement)]
    writes = [(statement, *access) for statement in nest.body for access in _writes(statement)]
    for buffer in dict.fromkeys(buffer for _, buffer, _ in writes):
        by = [statement for statement, written, _ in writes if written is buffer]
        places = {index for _, written, index in writes if written is buffer}
        read_at = {index for read, index in loads if read is buffer}
        accumulates = any(isinstance(statement, Accumulate) for statement in by)
        if not read_at and (len(by) == 1 or not accumulates):
            continue
        scanned = tuple(statement.axis for statement in by if isinstance(statement, Scan))
        (place, *others) = places | read_at
        if others or not _covers(place, (*nest.axes, *scanned)):
            return False
    return True


# ---- scalar operations

INTEGER_DIVISIONS = ("floordiv", "truncdiv", "floormod", "truncmod")


def _operate(operation: str, dtype: DType, *operands: Array) -> Array:
    """One operation of the table on operands of one dtype; a float result is rounded to it."""
    if operation in BY_DTYPE:
        return np.asarray(BY_DTYPE[operation](dtype, *operands))
    if operation in EXACT:
        result = np.asarray(EXACT[operation](*operands))
    else:
        result = np.asarray(IN_DOUBLE[operation](*(operand.astype(np.float64) for operand in operands)))
    return result if result.dtype == np.bool_ or not dtype.is_float else _rounded(result, dtype)


def _minimum(a: Array, b: Array) -> Array:
    return np.where((a <= b) | (a != a), a, b)


def _maximum(a: Array, b: Array) -> Array:
    return np.where((a >= b) | (a != a), a, b)


def _fmin(a: Array, b: Array) -> Array:
    return np.where((a <= b) | (b != b), a, b)


def _fmax(a: Array, b: Array) -> Array:
    return np.where((a >= b) | (b != b), a, b)


def _truncdiv(a: Array, b: Array) -> Array:
    """One more than the floor where that was rounded down past zero."""
    floor = np.floor_divide(a, b)
    return np.asarray(floor + ((np.remainder(a, b) != 0) & ((a < 0) != (b < 0))).astype(a.dtype))


def _popcount(a: Array) -> Array:
    each_byte = np.unpackbits(np.ascontiguousarray(a).view(np.uint8).reshape(*a.shape, -1), axis=-1)
    return np.asarray(each_byte.sum(axis=-1), a.dtype)


def _shl(dtype: DType, a: Array, b: Array) -> Array:
    inside = (b >= 0) & (b < dtype.bits)
    return np.where(inside, np.left_shift(a, np.where(inside, b, 0).astype(a.dtype)), np.zeros((), a.dtype))


def _shr(dtype: DType, a: Array, b: Array) -> Array:
    inside = (b >= 0) & (b < dtype.bits)
    sign = np.where(a < 0, -1, 0).astype(a.dtype)
    return np.where(inside, np.right_shift(a, np.where(inside, b, 0).astype(a.dtype)), sign)


def _pow(dtype: DType, a: Array, b: Array) -> Array:
    """Of integers: by squaring, which wraps as multiplication does; 1 and -1 are their own inverses."""
    if dtype.is_float:
        return _rounded(IN_DOUBLE["pow"](a.astype(np.float64), b.astype(np.float64)), dtype)
    left, result = np.abs(b.astype(np.int64)).astype(np.uint64), np.ones(np.broadcast_shapes(a.shape, b.shape), a.dtype)
    power = a
    while left.any():
        result = np.where(left & np.uint64(1), result * power, result)
        left, power = left >> np.uint64(1), power * power
    return np.where((b < 0) & (a != 1) & (a != -1), np.zeros((), a.dtype), result)


def _nextafter(dtype: DType, a: Array, b: Array) -> Array:
    """For halves: one step of the bit pattern, which counts magnitudes."""
    if not dtype.is_half:
        return np.nextafter(a, b)
    bits = _to_storage(a, dtype).view(np.uint16)
    away = np.where(np.signbit(a), b < a, b > a)
    step = np.where(away, bits + np.uint16(1), bits - np.uint16(1))
    from_zero = np.where(np.signbit(b), np.uint16(0x8001), np.uint16(1))
    moved = _from_storage(np.where(a == 0, from_zero, step).astype(np.uint16).view(STORAGE[dtype]), dtype)
    return np.where((a != a) | (b != b), np.float32(np.nan), np.where(a == b, b, moved))


def _fma(dtype: DType, a: Array, b: Array, c: Array) -> Array:
    return _fma_double(a, b, c) if dtype is f64 else _rounded(_fma_single(a, b, c), dtype)


def _fma_single(a: Array, b: Array, c: Array) -> Array:
    """The product is exact in f64. The sum is rounded to odd there, so that rounding to f32 sees what was lost."""
    product, addend = np.broadcast_arrays(a.astype(np.float64) * b, c.astype(np.float64))
    total = np.asarray(product + addend)
    part = total - product
    lost = (product - (total - part)) + (addend - part)
    even = (np.ascontiguousarray(total).reshape(total.shape).view(np.int64) & 1) == 0
    odd = np.nextafter(total, np.where(lost > 0, np.inf, -np.inf))
    return np.where(np.isfinite(total) & (lost != 0) & even, odd, total).astype(np.float32)


def _fma_double(a: Array, b: Array, c: Array) -> Array:
    def exactly(a: float, b: float, c: float) -> float:
        if not (math.isfinite(a) and math.isfinite(b) and math.isfinite(c)):
            return float(np.float64(a) * b + c)
        exact = Fraction(a) * Fraction(b) + Fraction(c)
        if not exact:
            return float(np.float64(a) * b + c)  # for the sign
        try:
            return float(exact)
        except OverflowError:
            return math.inf if exact > 0 else -math.inf

    return np.asarray(np.frompyfunc(exactly, 3, 1)(a, b, c), np.float64)


# Operations with one right answer in every dtype that they know.
EXACT: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "neg": np.negative,
    "abs": np.abs,
    "floordiv": np.floor_divide,
    "truncdiv": _truncdiv,
    "floormod": np.remainder,
    "truncmod": np.fmod,
    "minimum": _minimum,
    "maximum": _maximum,
    "fmin": _fmin,
    "fmax": _fmax,
    "copysign": np.copysign,
    "floor": np.floor,
    "ceil": np.ceil,
    "trunc": np.trunc,
    "round": np.rint,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "and_": np.bitwise_and,
    "or_": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not_": np.invert,
    "popcount": _popcount,
    "signbit": np.signbit,
    "isnan": np.isnan,
    "isinf": np.isinf,
    "sqrt": np.sqrt,
}

# Operations that have to know the dtype, and round by themselves.
BY_DTYPE: dict[str, Callable[..., Array]] = {
    "shl": _shl,
    "shr": _shr,
    "pow": _pow,
    "nextafter": _nextafter,
    "fma": _fma,
}


# ---- reductions


@dataclass(frozen=True)
class _Body:
    """What a reduction combines: for each point of the scope outside, the values over `axes` in row-major order."""

    outside: _Scope
    axes: tuple[Axis, ...]
    expression: Expr

    @property
    def dtype(self) -> DType:
        return self.expression.dtype

    @property
    def count(self) -> int:
        return math.prod(self.outside.memory.extents(self.axes))

    def chunks(self) -> Iterator[Array]:
        """Arrays of shape (some of the values, *shape outside), together all values. May be asked for again."""
        memory, shape = self.outside.memory, self.outside.shape
        weight = math.prod(shape) * _expression_weight(self.expression, 1, memory)
        for ranges in _pieces(memory.extents(self.axes), weight, memory.box_limit):
            grids = _grids(self.axes, ranges, len(shape))
            inside = _Scope(memory, (*_lengths(ranges), *shape), grids, self.outside.active, self.outside)
            yield inside.full(self.expression).reshape(-1, *shape)

    def total(self, of: Callable[[Array], Array]) -> Array:
        """The sum of a function of all values, in the accumulation type."""
        wide = _accumulation_type(self.dtype)
        result = np.zeros(self.outside.shape, wide)
        for chunk in self.chunks():
            result = result + of(chunk.astype(wide)).sum(axis=0, dtype=wide)
        return result


def _accumulation_type(dtype: DType) -> np.dtype[Any]:
    if dtype.is_float:
        return np.dtype(np.longdouble if dtype is f64 else np.float64)
    return STORAGE[dtype]


def _narrowed(value: Array, dtype: DType) -> Array:
    return _rounded(value, dtype) if dtype.is_float else value


def _sum(body: _Body) -> dict[str, Array]:
    return {"value": _narrowed(body.total(lambda chunk: chunk), body.dtype)}


def _prod(body: _Body) -> dict[str, Array]:
    wide = _accumulation_type(body.dtype)
    result = np.ones(body.outside.shape, wide)
    for chunk in body.chunks():
        result = result * chunk.prod(axis=0, dtype=wide)
    return {"value": _narrowed(result, body.dtype)}


def _any(body: _Body) -> dict[str, Array]:
    result = np.zeros(body.outside.shape, np.bool_)
    for chunk in body.chunks():
        result = result | (chunk != 0).any(axis=0)
    return {"value": result}


def _all(body: _Body) -> dict[str, Array]:
    result = np.ones(body.outside.shape, np.bool_)
    for chunk in body.chunks():
        result = result & (chunk != 0).all(axis=0)
    return {"value": result}


def _greatest(body: _Body) -> dict[str, Array]:
    return _extreme(body, np.argmax, np.greater)


def _least(body: _Body) -> dict[str, Array]:
    return _extreme(body, np.argmin, np.less)


def _extreme(body: _Body, find: Callable[..., Array], beats: Callable[..., Array]) -> dict[str, Array]:
    """The value that beats all others and its position: the first of equals, but any NaN first, as NumPy's argmax."""
    shape, seen = body.outside.shape, 0
    value, index = np.zeros(shape, _value_type(body.dtype)), np.zeros(shape, np.int64)
    for chunk in body.chunks():
        found = np.expand_dims(np.asarray(find(chunk, axis=0)), 0)
        candidate = np.take_along_axis(chunk, found, 0)[0]
        better = beats(candidate, value) | ((candidate != candidate) & (value == value)) if seen else np.True_
        value, index = np.where(better, candidate, value), np.where(better, found[0] + seen, index)
        seen += len(chunk)
    if not seen and body.outside.any_active(np.ones(shape, np.bool_)):
        raise Malformed("the least or greatest of nothing", where="oracle")
    return {"value": value, "index": index}


def _welford(body: _Body) -> dict[str, Array]:
    """In two passes: the mean, then the distances from it."""
    mean = body.total(lambda chunk: chunk) / body.count if body.count else np.zeros(body.outside.shape)
    m2 = body.total(lambda chunk: (chunk - mean) ** 2)
    return {"mean": _rounded(mean, body.dtype), "m2": _rounded(m2, body.dtype)}


def _softmax(body: _Body) -> dict[str, Array]:
    """In two passes. If the greatest is infinite or NaN, so that its distance from itself is NaN, the sum is NaN."""
    if not body.count:
        nothing = np.zeros(body.outside.shape, _value_type(body.dtype))
        return {"max": nothing - np.inf, "sum": nothing}
    greatest = _greatest(body)["value"]
    return {"max": greatest, "sum": _rounded(body.total(lambda chunk: np.exp(chunk - greatest)), body.dtype)}


REDUCE: dict[str, Callable[[_Body], dict[str, Array]]] = {
    "sum": _sum,
    "prod": _prod,
    "min": _least,
    "max": _greatest,
    "any": _any,
    "all": _all,
    "argmin": _least,
    "argmax": _greatest,
    "welford": _welford,
    "softmax": _softmax,
}


# ---- scans: running results along the first dimension


def _cumsum(value: Array, dtype: DType) -> tuple[Array, ...]:
    return (_narrowed(np.cumsum(value, axis=0, dtype=_accumulation_type(dtype)), dtype),)


def _cumprod(value: Array, dtype: DType) -> tuple[Array, ...]:
    return (_narrowed(np.cumprod(value, axis=0, dtype=_accumulation_type(dtype)), dtype),)


def _logcumsumexp(value: Array, dtype: DType) -> tuple[Array, ...]:
    return (_rounded(np.logaddexp.accumulate(value.astype(_accumulation_type(dtype)), axis=0), dtype),)


def _running(value: Array, not_worse: Callable[..., Array]) -> tuple[Array, ...]:
    """The last of equals and the last NaN win; nothing but a NaN takes over from a NaN."""
    best, index = value.copy(), np.zeros(value.shape, np.int64)
    for k in range(1, len(value)):
        before = best[k - 1]
        takes_over = (value[k] != value[k]) | not_worse(value[k], before)
        best[k] = np.where(takes_over, value[k], before)
        index[k] = np.where(takes_over, k, index[k - 1])
    return best, index


SCAN: dict[str, Callable[[Array, DType], tuple[Array, ...]]] = {
    "cumsum": _cumsum,
    "cumprod": _cumprod,
    "cummax": lambda value, dtype: _running(value, np.greater_equal),
    "cummin": lambda value, dtype: _running(value, np.less_equal),
    "logcumsumexp": _logcumsumexp,
}


# ---- random numbers


def philox(seed: Array, stream: int, counter: Array) -> tuple[Array, Array, Array, Array]:
    """Philox 4x32-10 (Salmon et al., 2011): four 32-bit words, here in arrays of uint64, for each counter.

        key       (seed & 0xFFFFFFFF, seed >> 32), the seed taken as 64 bits without sign
        counter   (counter & 0xFFFFFFFF, counter >> 32, stream, 0)
        a round   (c0, c1, c2, c3), (k0, k1)  ->  (high(M1*c2) ^ c1 ^ k0, low(M1*c2), high(M0*c0) ^ c3 ^ k1, low(M0*c0))
                  M0 = 0xD2511F53, M1 = 0xCD9E8D57
        10 rounds; between two, k0 += 0x9E3779B9 and k1 += 0xBB67AE85, modulo 2**32

    What the draws take from the words w0..w3, with uniform(w) = (w >> 8) * 2**-24:

        bits      w0, as i32
        uniform   uniform(w0), exact in f32
        normal    sqrt(-2 * log(1 - uniform(w0))) * cos(2 * pi * uniform(w1)); 1 - uniform(w0) is exact and not 0
    """
    mask, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    k0, k1 = seed.astype(np.uint64) & mask, seed.astype(np.uint64) >> half
    c0, c1 = counter.astype(np.uint64) & mask, counter.astype(np.uint64) >> half
    c2, c3 = np.asarray(stream, np.uint64) & mask, np.asarray(0, np.uint64)
    for _ in range(10):
        left, right = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (right >> half) ^ c1 ^ k0, right & mask, (left >> half) ^ c3 ^ k1, left & mask
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & mask, (k1 + np.uint64(0xBB67AE85)) & mask
    return c0, c1, c2, c3


def _random(draw: str, seed: Array, stream: int, counter: Array) -> Array:
    first, second, _, _ = philox(seed, stream, counter)
    if draw == "bits":
        return first.astype(np.uint32).astype(np.int32)
    uniform, angle = ((word >> np.uint64(8)).astype(np.float64) * 2.0**-24 for word in (first, second))
    if draw == "uniform":
        return uniform.astype(np.float32)
    if draw == "normal":
        return np.asarray(np.sqrt(-2 * np.log(1 - uniform)) * np.cos(2 * math.pi * angle), np.float32)
    raise Malformed(f"no random draw {draw!r}", where="oracle")
