"""Loop programs as an LLVM module: a function for each tree of loops, and for each program a table of its trees.

    void tree(ptr buffers, ptr sizes, ptr error, i64 low, i64 high)

`buffers` holds the addresses of parameters and locals in order, `sizes` the run-time sizes. The work of a tree is
a range of units (points of its outer loops, or stretches of its only loop); threads get equal, consecutive parts of it,
and who gets none does not call.
What a unit computes does not depend on who computes it, so results do not depend on the number of threads.

The table is what stands under the program's name, and `team.py` says what is in it and runs it: code that walks over
the trees is made once in a process, not with each kernel. (A function for that cost 1.3 to 1.8 ms of 6 to 12.)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from ferrite.decisions import Decision
from ferrite.errors import Unsupported, within
from ferrite.loops.access import accesses, read_by, written_by
from ferrite.loops.dtypes import f32, i64
from ferrite.loops.index import (
    ONE,
    Axis,
    Index,
    Size,
    coefficient_of,
    constant,
    floordiv,
    free_axes,
    holds_data,
    known_nonnegative,
    maximum,
    product,
)
from ferrite.loops.nodes import Accumulate, Assert, Buffer, Expr, FoldScan, Load, Program, Scan, Statement, Store
from ferrite.loops.rewrite import children, loaded_in
from ferrite.loops.shapes import linear
from ferrite.native.ahead import (
    LINE,
    Ahead,
    further_on,
    next_looked_up,
    next_rows,
    next_tile,
    rows_apart,
    together,
)
from ferrite.native.builder import Builder, Value, pointer, scalar
from ferrite.native.reduce import Reducer
from ferrite.native.rows import MOST_COLUMNS, Kept, fold_rows, kept_values, sums_across
from ferrite.native.scan import emit_scan
from ferrite.native.scope import Groups, Lanes, Scope, even_ways
from ferrite.native.stream import streamed_in
from ferrite.native.target import Target
from ferrite.native.team import PLAN_PARAMETERS, Row, write_kernel
from ferrite.schedule.arrange import Arrangement, Loop, arrange, row_length
from ferrite.schedule.decided import on
from ferrite.schedule.shape import Shape, are_independent, reductions_in, shape_of

STRETCH = 4096  # elements of a tree with one loop that make a unit: whole groups of vectors, which have up to 256
COLUMNS = 256  # the same where loops around the lanes must run in order
ENOUGH_UNITS = 512  # for any number of threads
GRAIN = 32_768  # elements for which a further thread pays


@dataclass(frozen=True)
class Emitted:
    """The module, the programs that are in it, those that are not and why, and what the code calls from outside.
    `spared`: for each program the names of locals that need no memory from the caller."""

    text: str
    names: tuple[str, ...]
    refused: dict[str, str]
    externals: tuple[str, ...]
    spared: dict[str, frozenset[str]]
    decisions: tuple[Decision, ...]


def emit(programs: Sequence[Program], target: Target) -> Emitted:
    """One module for all programs; one with something that native code cannot do yet is left out."""
    b = Builder(target)
    names, refused, spared = [], {}, {}
    decisions: list[Decision] = []
    for program in programs:
        try:
            with within(dict, {"kernel": program.name}):
                spared[program.name], decided = _emit_one(b, program)
            names.append(program.name)
            decisions += decided
        except Unsupported as refusal:
            refused[program.name] = refusal.title
    return Emitted(b.text(), tuple(names), refused, tuple(b.externals), spared, tuple(decisions))


def show_loops(program: Program) -> str:
    """The trees of loops that a kernel runs."""
    return arrange(program).text()


def _emit_one(b: Builder, program: Program) -> tuple[frozenset[str], list[Decision]]:
    """The locals that need no memory, and how loops, lanes and threads were chosen."""
    arrangement = arrange(program)
    works = [_Work(b, program, n, loop, arrangement) for n, loop in enumerate(arrangement.loops)]
    for work in works:
        work.write()
    write_kernel(b, program.name, [work.row() for work in works])
    decisions = [*arrangement.decisions, *(each for work in works for each in work.decisions())]
    return frozenset(buffer.name for buffer in arrangement.registers | arrangement.rows), decisions


class _Work:
    """One tree of loops: the function that does a range of its units, and how many there are."""

    def __init__(self, b: Builder, program: Program, number: int, loop: Loop, arrangement: Arrangement) -> None:
        self.b, self.program, self.loop = b, program, loop
        self.registers, self.rows = arrangement.registers, arrangement.rows
        self.name = f"{program.name}_{number}"
        self.shapes: dict[Loop, Shape] = {}
        self.statements = [*loop.statements()]
        self.shape = self._shape(loop)
        self.shared = self._shared_axes()

    def _shape(self, loop: Loop) -> Shape:
        """Only a loop without loops inside runs in lanes."""
        if loop not in self.shapes:
            body = [part for part in loop.body if not isinstance(part, Loop)]
            self.shapes[loop] = shape_of(loop.axes, body) if loop.is_leaf else Shape(loop.axes, None, 1, 1)
        return self.shapes[loop]

    def _shared_axes(self) -> tuple[Axis, ...]:
        """The outer loops that threads share: the first ones whose points write to different places, until there are
        units enough. To find the place of a unit takes a division for each of them."""
        shared: list[Axis] = []
        for axis in self.shape.outer[:-1] if self.shape.turned else self.shape.outer:
            if not are_independent(self.statements, axis):
                break
            if known_nonnegative(product(a.extent for a in shared) - ENOUGH_UNITS):
                break
            shared.append(axis)
        return tuple(shared)

    @property
    def in_stretches(self) -> bool:
        """Whether threads share the loop in lanes: it is the only one, or those around it must run in order."""
        return self.shape.vector is not None and not self.shared

    @property
    def stretch(self) -> int:
        if self.shape.is_single:
            return self.shape.ways
        return COLUMNS if self.shape.outer else STRETCH

    # ---- how much there is to do

    def row(self) -> Row:
        """The numbers themselves, or a function that finds them from sizes."""
        units, parts = self.units, self.parts
        if not units.terms and not parts.terms:
            return Row(self.name, units.constant, parts.constant)
        b, plan = self.b, f"{self.name}_plan"
        with b.function(plan, PLAN_PARAMETERS, internal=True) as (sizes, numbers):
            evaluator, scope = Reducer(b, {}, self._sizes(sizes), lambda: None), Scope()
            for place, number in enumerate((units, parts)):
                b.store(evaluator.scalar_index(number, scope), numbers, place)
        return Row(self.name, plan=plan)

    @cached_property
    def units(self) -> Index:
        if self.in_stretches:
            assert self.shape.vector is not None
            return floordiv(self.shape.vector.extent + (self.stretch - 1), self.stretch)
        return product(axis.extent for axis in self.shared)

    @cached_property
    def parts(self) -> Index:
        """How many threads have enough to do. A reduction of nothing is something to do."""
        elements = product(axis.extent for axis in self.loop.axes)
        return floordiv(elements * maximum(self._inner_work(), 1) + (GRAIN - 1), GRAIN)

    def _inner_work(self) -> Index:
        """Elements that one point of the outer loops touches, by its longest reduction, scan or inner loop."""
        inner = [reduction.axes for statement in self.statements for reduction in reductions_in(statement)]
        inner += [(statement.axis,) for statement in self.statements if isinstance(statement, (Scan, FoldScan))]
        inner += [part.axes for part in self.loop.body if isinstance(part, Loop)]
        longest = constant(1)
        for axes in inner:
            extent = product(axis.extent for axis in axes)
            if free_axes(extent):
                continue
            if longest is constant(1) or known_nonnegative(extent - longest):
                longest = extent
        return longest

    # ---- what was decided

    def decisions(self) -> Iterator[Decision]:
        """On the lanes of each loop that has no loop inside, and on the threads of all."""
        for loop, shape in self.shapes.items():
            if loop.is_leaf and loop.axes:
                where = on(self.program, loop.statements())
                yield Decision("lanes", where, shape.vector is not None, self._about_lanes(loop, shape))
        units, parts = self.units, self.parts
        where = on(self.program, self.statements)
        if units.terms or parts.terms:
            yield Decision("threads", where, True, "the sizes of a call say how many have enough to do")
        elif units.constant > 1 and parts.constant > 1:
            yield Decision("threads", where, True, f"{units} units of work, and enough of it for {parts}")
        else:
            few = "one unit of work" if units.constant <= 1 else f"less work than {GRAIN:,} elements"
            yield Decision("threads", where, False, few)

    def _about_lanes(self, loop: Loop, shape: Shape) -> str:
        if shape.vector is None:
            body = [*loop.statements()]
            meet = not any(are_independent(body, axis) for axis in loop.axes)
            return "points of every loop may meet" if meet else "what is combined in it goes along memory by itself"
        along = f"{shape.lanes(self.b.target.vector_bytes)} along {shape.vector.name}, {shape.ways} vectors at once"
        return f"{along}; what lies across is turned in squares" if shape.turned else along

    # ---- the work

    def write(self) -> None:
        b = self.b
        parameters = {"buffers": pointer, "sizes": pointer, "error": pointer, "low": i64, "high": i64}
        with b.function(self.name, parameters, internal=True) as (buffers, sizes, error, low, high):
            used = {access.buffer for statement in self.statements for access in accesses(statement)} - self.registers
            order = [p.buffer for p in self.program.parameters] + list(self.program.locals)
            addresses = {buffer: b.load(pointer, buffers, n) for n, buffer in enumerate(order) if buffer in used}
            rows = sorted(used & self.rows, key=lambda row: row.name)
            addresses |= {row: b.slot(scalar(row.dtype), row_length(row)) for row in rows}

            def fail() -> None:
                b.store(b.constant(i64, 1), error)
                b.ret()

            self.evaluator = Reducer(b, addresses, self._sizes(sizes), fail)
            self.evaluator.read = frozenset[Buffer]().union(*map(read_by, self.statements))
            streamed = streamed_in(self.loop, b.target) - self.registers
            if not streamed:
                self._do(low, high)
                return
            with b.either(b.are_aligned([addresses[each] for each in sorted(streamed, key=_by_name)])) as (yes, no):
                with b.inside(yes):
                    self.evaluator.streamed = streamed
                    self._do(low, high)
                    b.streams_end()
                with b.inside(no):
                    self.evaluator.streamed = frozenset()
                    self._do(low, high)

    def _do(self, low: Value, high: Value) -> None:
        """All units of a range."""
        b = self.b
        if not self.in_stretches:
            self._over_units(low, high)
            return
        assert self.shape.vector is not None
        scope, span = Scope(), None
        if self.units is not ONE:  # else all of it is one range, whose ends are known
            extent = self.evaluator.scalar_index(self.shape.vector.extent, scope)
            span = b.mul(low, self.stretch), b.minimum(b.mul(high, self.stretch), extent)
        self._around(self.loop, self.shape, list(self.shape.outer), scope, span)

    def _sizes(self, sizes: Value) -> dict[Size, Value]:
        return {size: self.b.load(i64, sizes, n) for n, size in enumerate(self.program.sizes)}

    def _over_units(self, low: Value, high: Value) -> None:
        b = self.b
        if not self.shared:
            self._around(self.loop, self.shape, list(self.shape.outer), Scope())
            return
        outside = Scope()
        self._hoist(self.loop, outside, self.shared[0])
        with b.loop(low, high, surely=True) as loop:
            loop.next()
            axes: dict[Axis, Value] = {}
            rest = loop.index
            for axis in reversed(self.shared[1:]):
                rest, axes[axis] = b.split(rest, self.evaluator.scalar_index(axis.extent, outside))
            axes[self.shared[0]] = rest
            left = list(self.shape.outer[len(self.shared) :])
            self._around(self.loop, self.shape, left, outside.inner(axes=axes))

    def _around(
        self, loop: Loop, shape: Shape, axes: list[Axis], scope: Scope, span: tuple[Value, Value] | None = None
    ) -> None:
        """The loops around the lanes, outermost first, then what is inside. `span`: from where to where lanes go, which
        is not nothing."""
        b = self.b
        if shape.turned and len(axes) == 1:
            self._in_squares(loop, shape, scope)
        elif axes:
            axis, *rest = axes
            self._hoist(loop, scope, axis)
            with b.loop(0, self.evaluator.scalar_index(axis.extent, scope)) as here:
                here.next()
                self._around(loop, shape, rest, scope.inner(axes={axis: here.index}), span)
        elif shape.vector is None:
            self._body(loop, scope)
        else:
            start, stop = span or (b.constant(i64, 0), self.evaluator.scalar_index(shape.vector.extent, scope))
            self._over_lanes(loop, shape, scope, start, stop, surely=span is not None)

    def _over_lanes(self, loop: Loop, shape: Shape, scope: Scope, start: Value, stop: Value, *, surely: bool) -> None:
        """All at once, or as many columns as sums across rows are kept for."""
        b, axis = self.b, shape.vector
        assert axis is not None
        body = [part for part in loop.body if not isinstance(part, Loop)]
        reduces = any(map(reductions_in, body))
        sums = sums_across([*self.loop.axes, *loop.axes], body, axis) if reduces else []
        self._hoist(loop, scope, axis)
        if not sums:
            self._between(loop, shape, scope, start, stop, {}, surely=surely)
            return
        lanes = shape.lanes(b.target.vector_bytes)
        is_even = Groups(axis.extent, lanes, 1).left == 0
        with b.loop(start, stop, MOST_COLUMNS, surely=surely) as here:
            here.next()
            end, inside = b.minimum(b.add(here.index, MOST_COLUMNS), stop), scope.inner()
            vector = Lanes(axis, here.index, lanes, 1)
            kept = fold_rows(self.evaluator, sums, vector, end, is_even=is_even, scope=inside)
            self._between(loop, shape, inside, here.index, end, kept, surely=True)

    def _between(
        self, loop: Loop, shape: Shape, scope: Scope, start: Value, stop: Value, kept: Kept, *, surely: bool
    ) -> None:
        """Whole groups of vectors, then what is left, a vector at a time; under a mask if it may be less than one."""
        b, axis = self.b, shape.vector
        assert axis is not None
        lanes = shape.lanes(b.target.vector_bytes)
        # Next to sums over many rows it does not matter how fast the rest is.
        ways = 1 if kept else even_ways(axis.extent, lanes, shape.ways)
        groups = Groups(axis.extent, lanes, ways)
        whole = stop if groups.left == 0 else b.sub(stop, b.split(b.sub(stop, start), groups.size)[1])
        if groups.any:
            ahead = self._ahead(loop, shape, scope)
            with b.loop(start, whole, groups.size, surely=surely and groups.left == 0) as here:
                here.next()
                vector = Lanes(axis, here.index, lanes, groups.ways)
                inside = scope.inner(axes={axis: here.index}, vector=vector, ahead=ahead)
                inside.known.update(kept_values(self.evaluator, kept, start, vector))
                self._body(loop, inside)
        if groups.left != 0:
            with b.loop(whole, stop, lanes) as here:
                here.next()
                mask = None if groups.are_vectors_left else b.tail(b.sub(stop, here.index), lanes, 1).mask
                vector = Lanes(axis, here.index, lanes, 1)
                inside = scope.inner(axes={axis: here.index}, vector=vector, mask=mask)
                inside.known.update(kept_values(self.evaluator, kept, start, vector))
                self._body(loop, inside)

    def _ahead(self, loop: Loop, shape: Shape, scope: Scope) -> Ahead:
        """What the lanes ask for, for the next round of the loop around them."""
        axis = shape.vector
        assert axis is not None
        statements = [*loop.statements()]
        outer = [each for each in (*self.loop.axes, *self.shape.outer) if each is not axis]
        if not outer:
            return self._further_on(loop, statements, axis)
        made = {buffer for statement in self.statements for buffer in written_by(statement)}
        found = together(
            next_looked_up(self.evaluator, statements, made, outer[-1], axis, scope),
            next_rows(self.statements, statements, loop.axes, outer[-1]),
        )
        return found or self._further_on(loop, statements, axis)

    def _further_on(self, loop: Loop, statements: Sequence[Statement], axis: Axis) -> Ahead:
        """Of what a loop before this one reads too, nothing: that one has asked for it."""
        if not self.evaluator.streamed:
            return {}
        before = itertools.takewhile(lambda part: part is not loop, self.loop.body)
        loops = [part for part in before if isinstance(part, Loop)]
        asked = {buffer for part in loops for each in part.statements() for buffer in read_by(each)}
        return {node: asks for node, asks in further_on(statements, axis).items() if node.buffer not in asked}

    def _in_squares(self, loop: Loop, shape: Shape, scope: Scope) -> None:
        """As many rows at once as there are lanes. What has gaps between lanes is read along the rows, and turned.
        Where results go past the caches, rows are written one square after the other; elsewhere all that lies together
        is read before the next columns (large ones: 1.25 times as fast)."""
        b, row, column = self.b, shape.outer[-1], shape.vector
        assert column is not None
        lanes, streamed = shape.lanes(b.target.vector_bytes), self.evaluator.streamed
        # Lines that go past the caches are written at once, if squares come out even.
        ways = max((LINE // (lanes * buffer.dtype.bytes) for buffer in streamed), default=1)
        while ways > 1 and column.extent.constant % (ways * lanes):
            ways //= 2
        ways = max(ways, 1)
        self._hoist(loop, scope, column)
        ask = self._next_tile(loop, shape, scope)
        steps = {row: lanes, column: ways * lanes}
        first, second = (row, column) if streamed else (column, row)
        with b.loop(0, first.extent.constant, steps[first]) as around:
            around.next()
            with b.loop(0, second.extent.constant, steps[second]) as inside:
                inside.next()
                if ask is not None:
                    ask(b.add(b.mul(around.index, second.extent.constant // lanes), inside.index), ways * lanes)
                at = {first: around.index, second: inside.index}
                self._squares(loop, shape, ways, at[row], at[column], scope)

    def _squares(self, loop: Loop, shape: Shape, ways: int, down: Value, along: Value, scope: Scope) -> None:
        """So many side by side."""
        b, row, column, lanes = self.b, shape.outer[-1], shape.vector, shape.lanes(self.b.target.vector_bytes)
        assert column is not None
        vector = Lanes(column, along, lanes, ways)
        rows = [scope.inner(axes={row: b.add(down, number), column: along}, vector=vector) for number in range(lanes)]
        starts = [scope.inner(axes={row: down, column: b.add(along, way * lanes)}) for way in range(ways)]
        for node in shape.turned:
            squares = [self._turned(node, column, lanes, start) for start in starts]
            for here, *parts in zip(rows, *squares, strict=True):
                here.known[node] = b.join_ways(parts)
        for here in rows:
            self._body(loop, here)

    def _next_tile(self, loop: Loop, shape: Shape, scope: Scope) -> Callable[[Value, int], None] | None:
        """What asks for the next tile: only where results go past the caches, and of places that are known here."""
        tiles = [*(self.loop.axes if loop is not self.loop else ()), *shape.outer[:-1]]
        if not self.evaluator.streamed or not tiles:
            return None
        row, column = shape.outer[-1], shape.vector
        assert column is not None

        def is_known(node: Load) -> bool:
            place = linear(node.index, node.buffer.strides)
            bound = scope.binds(free_axes(place) - {row, column})
            return bound and not holds_data(place) and node.buffer not in self.registers

        along = rows_apart([*loop.statements()], row, column)
        return next_tile(self.evaluator, filter(is_known, shape.turned), filter(is_known, along), shape, tiles, scope)

    def _turned(self, node: Load, column: Axis, lanes: int, first: Scope) -> list[Value]:
        """The values of a load for each of the rows, which are neighbours in memory."""
        b, evaluator = self.b, self.evaluator
        place = linear(node.index, node.buffer.strides)
        start, step = evaluator.scalar_index(place, first), coefficient_of(place, column)
        assert step is not None
        apart, base = evaluator.scalar_index(step, first), evaluator.buffers[node.buffer]
        starts = [b.add(start, b.mul(apart, number)) for number in range(lanes)]
        return b.transpose([b.load(node.dtype, base, each, lanes) for each in starts])

    def _hoist(self, loop: Loop, scope: Scope, axis: Axis) -> None:
        """What a loop does not change is computed before it, unless the loop may change memory that it reads."""
        written = {buffer for statement in loop.statements() for buffer in written_by(statement)}
        nodes: list[Expr] = []
        for statement in loop.statements():
            nodes += [part for part in _expressions(statement) if not written & loaded_in(part)]
            for access in accesses(statement):
                if access.writes and access.buffer not in self.registers:
                    self.evaluator.hoist_address(access.buffer, access.index, axis, scope)
        self.evaluator.hoist(nodes, axis, scope)

    def _body(self, loop: Loop, scope: Scope) -> None:
        for part in loop.body:
            if not isinstance(part, Loop):
                self._statement(part, scope)
                continue
            written = {buffer for statement in part.statements() for buffer in written_by(statement)}
            _forget(scope, written)
            shape = self._shape(part)
            self._around(part, shape, list(shape.outer), scope)

    def _statement(self, statement: Statement, scope: Scope) -> None:
        b, evaluator = self.b, self.evaluator
        match statement:
            case Store(buffer=buffer, index=place, value=value):
                now = evaluator.value(value, scope)
                if buffer not in self.registers:
                    evaluator.store(buffer, place, now, scope)
                _forget(scope, {buffer})
                scope.known[Load(buffer, place)] = now
            case Accumulate(operation=operation, buffer=buffer, index=place, value=value):
                now = evaluator.lanes(Load(buffer, place), scope)
                new = evaluator.lanes(value, scope)
                made = evaluator.apply(operation, [_wide(b, now), _wide(b, new)])
                evaluator.store(buffer, place, b.convert(made, buffer.dtype), scope)
                _forget(scope, {buffer})
            case Scan() | FoldScan():
                emit_scan(evaluator, statement, scope)
                _forget(scope, set(written_by(statement)))
            case Assert(condition=condition):
                evaluator.require(evaluator.value(condition, scope), scope)
            case _:
                raise Unsupported(f"{type(statement).__name__} in native code")


def _wide(b: Builder, value: Value) -> Value:
    return b.convert(value, f32) if value.dtype.is_half else value


def _forget(scope: Scope, buffers: set[Buffer]) -> None:
    """What was read from memory that has just changed is read again, here and around."""
    here: Scope | None = scope
    while here is not None:
        stale = [key for key in here.known if isinstance(key, Expr) and buffers & loaded_in(key)]
        for key in stale:
            del here.known[key]
        here = here.parent


def _by_name(buffer: Buffer) -> str:
    return buffer.name


def _expressions(statement: Statement) -> list[Expr]:
    return [part for part in children(statement) if isinstance(part, Expr)]
