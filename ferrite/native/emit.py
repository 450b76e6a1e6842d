"""Loop programs as an LLVM module: for each one function to call, and one for each nest that threads share.

    i64 kernel(ptr buffers, ptr sizes, i32 threads)      0, or 1 if a check failed

`buffers` holds the addresses of parameters and locals in order, `sizes` the run-time sizes. The work of a nest is a
range of units (points of its outer loops, or stretches of its only loop); threads get equal, consecutive parts of it.
What a unit computes does not depend on who computes it, so results do not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ferrite.errors import Unsupported
from ferrite.loops.dtypes import f32, i32, i64
from ferrite.loops.index import Axis, Index, Size, constant, product
from ferrite.loops.nodes import Accumulate, Assert, Buffer, Expr, Load, Nest, Program, Scan, Statement, Store
from ferrite.loops.rewrite import children, walk
from ferrite.loops.shapes import linear
from ferrite.native.builder import Builder, Type, Value, pointer, scalar
from ferrite.native.reduce import Reducer
from ferrite.native.scan import emit_scan
from ferrite.native.scope import Lanes, Scope
from ferrite.native.target import Target
from ferrite.schedule.shape import Shape, is_independent, reductions_in, shape_of

I32: Type = scalar(i32)
STRETCH = 4096  # elements of a nest with one loop that make a unit
GRAIN = 32_768  # elements for which a further thread pays
FRAME = ("buffers", "sizes", "error", "units")


@dataclass(frozen=True)
class Emitted:
    """The module, the programs that are in it, those that are not and why, and what the code calls from outside."""

    text: str
    names: tuple[str, ...]
    refused: dict[str, str]
    externals: tuple[str, ...]


def emit(programs: Sequence[Program], target: Target) -> Emitted:
    """One module for all programs; one with something that native code cannot do yet is left out."""
    b = Builder(target)
    names, refused = [], {}
    for program in programs:
        try:
            _emit_one(b, program)
            names.append(program.name)
        except Unsupported as refusal:
            refused[program.name] = refusal.title
    return Emitted(b.text(), tuple(names), refused, tuple(b.externals))


def _emit_one(b: Builder, program: Program) -> None:
    works = [_Work(b, program, number, nest) for number, nest in enumerate(program.nests)]
    for work in works:
        work.write()
    _write_entry(b, program, works)


def _write_entry(b: Builder, program: Program, works: list[_Work]) -> None:
    parameters = {"buffers": pointer, "sizes": pointer, "threads": i32}
    with b.function(program.name, parameters, i64) as (buffers, sizes, threads):
        error = b.slot(b.constant(i64, 0).type)
        b.store(b.constant(i64, 0), error)
        for work in works:
            work.launch(buffers, sizes, error, threads)
            with b.if_(b.ne(b.load(i64, error), 0), unlikely=True):
                b.ret(b.constant(i64, 1))
        b.ret(b.constant(i64, 0))


class _Work:
    """One nest: the function that does a range of its units, and the call of it from one or many threads."""

    def __init__(self, b: Builder, program: Program, number: int, nest: Nest) -> None:
        self.b, self.program, self.nest = b, program, nest
        self.name = f"{program.name}_{number}"
        self.shape: Shape = shape_of(nest)
        self.lanes = max(b.target.vector_bytes // self.shape.width, 1) if self.shape.vector is not None else 1
        self.shared = self._shared_axes()

    def _shared_axes(self) -> tuple[Axis, ...]:
        """The outer loops that threads may share: the first ones whose points write to different places."""
        shared: list[Axis] = []
        for axis in self.shape.outer:
            if not all(is_independent(statement, axis) for statement in self.nest.body):
                break
            shared.append(axis)
        return tuple(shared)

    @property
    def in_stretches(self) -> bool:
        """Whether the only loop is the one in lanes."""
        return self.shape.vector is not None and not self.shape.outer

    def units(self, evaluator: Reducer, scope: Scope) -> Value:
        if self.in_stretches:
            assert self.shape.vector is not None
            extent = evaluator.scalar_index(self.shape.vector.extent, scope)
            return self.b.floordiv(self.b.add(extent, STRETCH - 1), STRETCH)
        return evaluator.scalar_index(product(axis.extent for axis in self.shared), scope)

    # ---- the call

    def launch(self, buffers: Value, sizes: Value, error: Value, threads: Value) -> None:
        b = self.b
        evaluator = Reducer(b, {}, self._sizes(sizes), lambda: None)
        scope = Scope()
        elements = evaluator.scalar_index(product(axis.extent for axis in self.nest.axes), scope)
        with b.if_(b.gt(elements, 0)):
            units = self.units(evaluator, scope)
            work = b.mul(elements, evaluator.scalar_index(self._reduced(), scope))
            useful = b.minimum(b.add(b.floordiv(work, GRAIN), 1), units)
            team = b.minimum(b.convert(threads, i64), useful)
            frame = b.slot(b.constant(i64, 0).type, len(FRAME))
            for place, value in enumerate((buffers, sizes, error)):
                b.store(value, frame, place)
            b.store(units, frame, 3)
            with b.either(b.le(team, 1)) as (alone, together):
                with b.inside(alone):
                    self._call_work(frame, b.constant(i64, 0), units)
                with b.inside(together):
                    parallel = b.external("GOMP_parallel", None, [frame.type, frame.type, I32, I32])
                    body = Value(frame.type, (f"@{self.name}_body",))
                    b.call(parallel, None, body, frame, b.convert(team, i32), b.constant(i32, 0))
        self._write_body()

    def _reduced(self) -> Index:
        """Elements that one point reads by its longest reduction."""
        longest = constant(1)
        for reduction in reductions_in(self.nest):
            extent = product(axis.extent for axis in reduction.axes)
            if all(isinstance(atom, Size) for _, m in extent.terms for atom in m):
                longest = extent if longest is constant(1) else longest
        return longest

    def _call_work(self, frame: Value, low: Value, high: Value) -> None:
        b = self.b
        buffers, sizes, error = (b.load(pointer, frame, place) for place in range(3))
        b.call(f"@{self.name}", None, buffers, sizes, error, low, high)

    def _write_body(self) -> None:
        """What a thread of a team runs: its part of the units."""
        b = self.b
        with b.function(f"{self.name}_body", {"frame": pointer}, internal=True) as (frame,):
            thread = b.convert(b.call(b.external("omp_get_thread_num", I32, []), I32), i64)
            count = b.convert(b.call(b.external("omp_get_num_threads", I32, []), I32), i64)
            units = b.load(i64, frame, 3)
            low = b.floordiv(b.mul(units, thread), count)
            high = b.floordiv(b.mul(units, b.add(thread, 1)), count)
            with b.if_(b.lt(low, high)):
                self._call_work(frame, low, high)

    # ---- the work

    def write(self) -> None:
        b = self.b
        parameters = {"buffers": pointer, "sizes": pointer, "error": pointer, "low": i64, "high": i64}
        with b.function(self.name, parameters, internal=True) as (buffers, sizes, error, low, high):
            used = _buffers_in(self.nest)
            order = [p.buffer for p in self.program.parameters] + list(self.program.locals)
            addresses = {buffer: b.load(pointer, buffers, n) for n, buffer in enumerate(order) if buffer in used}

            def fail() -> None:
                b.store(b.constant(i64, 1), error)
                b.ret()

            self.evaluator = Reducer(b, addresses, self._sizes(sizes), fail)
            if self.in_stretches:
                assert self.shape.vector is not None
                scope = Scope()
                extent = self.evaluator.scalar_index(self.shape.vector.extent, scope)
                stop = b.minimum(b.mul(high, STRETCH), extent)
                self._over_lanes(scope, b.mul(low, STRETCH), stop)
            else:
                self._over_units(low, high)

    def _sizes(self, sizes: Value) -> dict[Size, Value]:
        return {size: self.b.load(i64, sizes, n) for n, size in enumerate(self.program.sizes)}

    def _over_units(self, low: Value, high: Value) -> None:
        b = self.b
        if not self.shared:
            self._inside(Scope(), list(self.shape.outer))
            return
        outside = Scope()
        self._hoist(outside, self.shared[0])
        with b.loop(low, high) as loop:
            loop.next()
            axes: dict[Axis, Value] = {}
            rest = loop.index
            for axis in reversed(self.shared[1:]):
                extent = self.evaluator.scalar_index(axis.extent, outside)
                axes[axis] = b.floormod(rest, extent)
                rest = b.floordiv(rest, extent)
            axes[self.shared[0]] = rest
            self._inside(outside.inner(axes=axes), list(self.shape.outer[len(self.shared) :]))

    def _inside(self, scope: Scope, loops: list[Axis]) -> None:
        b = self.b
        if loops:
            axis, *rest = loops
            self._hoist(scope, axis)
            with b.loop(0, self.evaluator.scalar_index(axis.extent, scope)) as loop:
                loop.next()
                self._inside(scope.inner(axes={axis: loop.index}), rest)
            return
        if self.shape.vector is None:
            self._statements(scope)
            return
        self._over_lanes(scope, b.constant(i64, 0), self.evaluator.scalar_index(self.shape.vector.extent, scope))

    def _over_lanes(self, scope: Scope, start: Value, stop: Value) -> None:
        """Whole groups of vectors, then what is left under a mask, a vector at a time."""
        b, axis, lanes, ways = self.b, self.shape.vector, self.lanes, self.shape.ways
        assert axis is not None
        self._hoist(scope, axis)
        group = lanes * ways
        count = b.sub(stop, start)
        whole = b.add(start, b.sub(count, b.floormod(count, group)))
        with b.loop(start, whole, group) as loop:
            loop.next()
            self._statements(scope.inner(axes={axis: loop.index}, vector=Lanes(axis, loop.index, lanes, ways)))
        with b.loop(whole, stop, lanes) as loop:
            loop.next()
            tail = b.tail(b.sub(stop, loop.index), lanes, 1)
            vector = Lanes(axis, loop.index, lanes, 1)
            self._statements(scope.inner(axes={axis: loop.index}, vector=vector, mask=tail.mask))

    def _hoist(self, scope: Scope, axis: Axis) -> None:
        """What a loop does not change is computed before it, unless the loop may change memory that it reads."""
        written = {statement.buffer for statement in self.nest.body if isinstance(statement, (Store, Accumulate))}
        nodes: list[Expr] = []
        for statement in self.nest.body:
            nodes += [part for part in _expressions(statement) if not written & _buffers_in(part)]
        self.evaluator.hoist(nodes, axis, scope)

    def _statements(self, scope: Scope) -> None:
        for statement in self.nest.body:
            self._statement(statement, scope)

    def _statement(self, statement: Statement, scope: Scope) -> None:
        b, evaluator = self.b, self.evaluator
        match statement:
            case Store(buffer=buffer, index=place, value=value):
                evaluator.store(buffer, place, value, scope)
                _forget(scope, buffer)
            case Accumulate(operation=operation, buffer=buffer, index=place, value=value):
                now = evaluator.value(Load(buffer, place), scope)
                new = evaluator.value(value, scope)
                made = evaluator.apply(operation, [_wide(b, now), _wide(b, new)])
                offset = evaluator.scalar_index(linear(place, buffer.strides), scope)
                b.store(b.convert(made, buffer.dtype), evaluator.buffers[buffer], offset)
                _forget(scope, buffer)
            case Scan():
                emit_scan(evaluator, statement, scope)
            case Assert(condition=condition):
                evaluator.require(evaluator.value(condition, scope), scope)
            case _:
                raise Unsupported(f"{type(statement).__name__} in native code")


def _wide(b: Builder, value: Value) -> Value:
    return b.convert(value, f32) if value.dtype.is_half else value


def _forget(scope: Scope, buffer: Buffer) -> None:
    """What was read from memory that has just changed is read again."""
    stale = [key for key in scope.known if isinstance(key, Expr) and buffer in _buffers_in(key)]
    for key in stale:
        del scope.known[key]


def _buffers_in(node: object) -> set[Buffer]:
    found = set()
    for part in walk(node):  # type: ignore[arg-type]
        buffer = getattr(part, "buffer", None)
        if buffer is not None:
            found.add(buffer)
        for target in getattr(part, "targets", ()):
            if target is not None:
                found.add(target[0])
    return found


def _expressions(statement: Statement) -> list[Expr]:
    return [part for part in children(statement) if isinstance(part, Expr)]
