"""Runs a loop program slowly and plainly with NumPy: what every other way of running it is compared with.

A nest is evaluated statement by statement over its whole box: an axis is an `arange` along its own dimension, an
expression is an array that broadcasts over the box. The axes of a reduction are new leading dimensions, so values from
outside broadcast into it as they are. Boxes too large for memory are cut along their outermost axes; nests whose points
depend on one another run one point at a time. A program that breaks its contract (a load outside its buffer, two points
that store different values to one element, an integer division by zero) raises `Malformed` instead of reading rubbish.

`oracle_values.py` says what a value is and does scalar operations, `oracle_reduce.py` reductions and scans.
"""

from __future__ import annotations

import builtins
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, TypeAlias

import numpy as np

from ferrite.errors import Malformed
from ferrite.loops.dtypes import DType
from ferrite.loops.index import Axis, Data, FloorDiv, Index, Least, Most, Node, Size, atoms, free_atoms, of_atom, parts
from ferrite.loops.nodes import (
    Accumulate,
    Apply,
    Argument,
    Assert,
    Bits,
    Buffer,
    Cast,
    Checked,
    Const,
    Expr,
    Fold,
    FoldScan,
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
from ferrite.loops.oracle_reduce import REDUCE, SCAN, running
from ferrite.loops.oracle_values import (
    INTEGER_DIVISIONS,
    STORAGE,
    Array,
    bits,
    cast,
    from_storage,
    operate,
    rounded,
    to_storage,
    value_type,
)
from ferrite.loops.rewrite import holds_argument

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


# ---- memory


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
        return to_storage(np.full(shape, np.nan, value_type(dtype)), dtype)
    return np.full(shape, np.iinfo(STORAGE[dtype]).min + 77 if dtype.is_int else True, STORAGE[dtype])


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
                    return rounded(np.asarray(value, np.float64), kind)
                return np.asarray(value).astype(STORAGE[kind])
            case Load(buffer=buffer, index=index):
                return self._load(buffer, index)
            case Cast(kind=kind, value=value):
                return cast(self.value(value), value.dtype, kind)
            case Bits(kind=kind, value=value):
                return bits(self.value(value), value.dtype, kind)
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
            case Fold():
                return self._fold(node)
        raise Malformed(f"not an expression: {node}", where="oracle")

    def _load(self, buffer: Buffer, index: tuple[Index, ...]) -> Array:
        array = self.memory.arrays[buffer]
        places = _places(self, buffer, index)
        if array.size == 0:  # nothing to read, and `places` has made sure that nobody does
            shape = np.broadcast_shapes(*(place.shape for place in places))
            return np.zeros(shape, value_type(buffer.dtype))
        return from_storage(array[places], buffer.dtype)

    def _apply(self, operation: str, operands: tuple[Expr, ...]) -> Array:
        values = [self.value(operand) for operand in operands]
        dtype = operands[0].dtype
        if dtype.is_int and operation in INTEGER_DIVISIONS and self.any_active(values[1] == 0):
            raise Malformed(f"{operation} by zero", where="oracle")
        return operate(operation, dtype, *values)

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

    def _fold(self, node: Fold) -> Array:
        """All results are kept, as those of a reduction are."""
        key = (node.combine, node.axes, node.values)
        if self._find((*key, node.result)) is None:
            bodies = [_Body(self, node.axes, value) for value in node.values]
            for number, value in enumerate(self._folded(node.combine, bodies)):
                self.known[(*key, number)] = value
        found = self._find((*key, node.result))
        assert found is not None
        return found

    def _folded(self, combine: tuple[Expr, ...], bodies: list[_Body]) -> tuple[Array, ...]:
        weight = max(body.weight for body in bodies)
        chunks = zip(*(body.chunks(weight) for body in bodies), strict=True)
        elements = (element for together in chunks for element in zip(*together, strict=True))
        last = deque(running(self.combiner(combine), elements), maxlen=1)
        if not last and bodies[0].is_needed:
            raise Malformed("a fold of nothing", where="oracle")
        return last[0] if last else tuple(np.zeros(self.shape, value_type(body.dtype)) for body in bodies)

    def combiner(self, combine: tuple[Expr, ...]) -> Callable[..., tuple[Array, ...]]:
        """What a fold combines with, as a function of the values on the left and those on the right."""
        given = [node for node in _everything(combine) if isinstance(node, Argument)]

        def both(left: tuple[Array, ...], right: tuple[Array, ...]) -> tuple[Array, ...]:
            known: dict[Any, Array] = {node: (left if node.side == "left" else right)[node.number] for node in given}
            inside = _Scope(self.memory, self.shape, {}, self.active, self, known)
            return tuple(inside.full(part) for part in combine)

        return both


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
        case FoldScan(combine=combine, targets=targets, values=values):
            inner = _scan_scope(statement, scope)
            elements = zip(*(inner.full(value) for value in values), strict=True)
            steps = [*running(scope.combiner(combine), elements)]
            for number, target in enumerate(targets):
                if target is not None and steps:
                    _store(inner, *target, np.stack([step[number] for step in steps]))
        case Assert(condition=condition, error=error, message=message):
            if not scope.value(condition).all():
                raise _exception(error)(message)
        case _:
            raise Malformed(f"not a statement: {statement}", where="oracle")


def _scan_scope(scan: Scan | FoldScan, scope: _Scope) -> _Scope:
    """The axis of a scan is a leading dimension, as those of a reduction are; it is never cut."""
    (extent,) = scope.memory.extents((scan.axis,))
    grids = _grids((scan.axis,), ((0, extent),), len(scope.shape))
    return _Scope(scope.memory, (extent, *scope.shape), grids, outer=scope)


def _store(scope: _Scope, buffer: Buffer, index: tuple[Index, ...], value: Array) -> None:
    if value.size == 0:
        return
    array, places = _at_each_point(scope, buffer, index)
    stored = to_storage(value, buffer.dtype)
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
        before = from_storage(array[where], buffer.dtype)
        array[where] = to_storage(operate(operation, buffer.dtype, before, value[meeting]), buffer.dtype)


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
            inner = _scan_scope(statement, scope) if isinstance(statement, (Scan, FoldScan)) else scope
            for expression in _expressions(statement):
                if not holds_argument(expression):
                    inner.value(expression)


# ---- looking at programs


def _expressions(statement: Statement) -> tuple[Expr, ...]:
    """The value of a statement, and the data in its indices."""
    match statement:
        case Assert(condition=condition):
            return (condition,)
        case Store(value=value) | Accumulate(value=value) | Scan(value=value):
            return (value, *(data for _, index in _writes(statement) for data in _data(index)))
        case FoldScan(combine=combine, values=values):
            return (*values, *combine, *(data for _, index in _writes(statement) for data in _data(index)))
    return ()


def _writes(statement: Statement) -> tuple[tuple[Buffer, tuple[Index, ...]], ...]:
    match statement:
        case Store(buffer=buffer, index=index) | Accumulate(buffer=buffer, index=index):
            return ((buffer, index),)
        case Scan(targets=targets) | FoldScan(targets=targets):
            return tuple(target for target in targets if target is not None)
    return ()


def _loads(statement: Statement) -> list[tuple[Buffer, tuple[Index, ...]]]:
    return [(node.buffer, node.index) for node in _all_nodes(statement) if isinstance(node, Load)]


def _can_raise(statement: Statement) -> bool:
    return isinstance(statement, Assert) or any(isinstance(node, (Checked, Require)) for node in _all_nodes(statement))


def _all_nodes(statement: Statement) -> list[Expr]:
    return _everything(_expressions(statement))


def _everything(roots: tuple[Expr, ...]) -> list[Expr]:
    seen = dict.fromkeys(roots)
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
        case Fold(combine=combine, values=values):
            return (*combine, *values)
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
    start = math.prod(memory.extents((statement.axis,))) if isinstance(statement, (Scan, FoldScan)) else 1
    return max((_expression_weight(node, start, memory) for node in _expressions(statement)), default=1)


def _expression_weight(node: Expr, around: int, memory: _Memory) -> int:
    """As `_weight`; `around` is what the axes outside the expression come to."""
    largest = around
    seen = {(node, around)}
    waiting = [(node, around)]
    while waiting:
        step, factor = waiting.pop()
        inside = factor * math.prod(memory.extents(step.axes)) if isinstance(step, (Reduce, Fold)) else factor
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
        scanned = tuple(statement.axis for statement in by if isinstance(statement, (Scan, FoldScan)))
        (place, *others) = places | read_at
        if others or not _covers(place, (*nest.axes, *scanned)):
            return False
    return True


# ---- reductions


@dataclass(frozen=True)
class _Body:
    """The values of an expression over `axes` in row-major order, for each point of the scope outside."""

    outside: _Scope
    axes: tuple[Axis, ...]
    expression: Expr

    @property
    def dtype(self) -> DType:
        return self.expression.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.outside.shape

    @property
    def count(self) -> int:
        return math.prod(self.outside.memory.extents(self.axes))

    @property
    def is_needed(self) -> bool:
        return self.outside.any_active(np.ones(self.shape, np.bool_))

    @property
    def weight(self) -> int:
        return math.prod(self.shape) * _expression_weight(self.expression, 1, self.outside.memory)

    def chunks(self, weight: int | None = None) -> Iterator[Array]:
        """Bodies that go in step are cut alike, by the weight of the heaviest."""
        memory = self.outside.memory
        for ranges in _pieces(memory.extents(self.axes), weight or self.weight, memory.box_limit):
            grids = _grids(self.axes, ranges, len(self.shape))
            inside = _Scope(memory, (*_lengths(ranges), *self.shape), grids, self.outside.active, self.outside)
            yield inside.full(self.expression).reshape(-1, *self.shape)


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
