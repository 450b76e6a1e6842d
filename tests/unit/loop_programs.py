"""Random loop programs for property tests: well typed, in bounds, with no two points that fight over one element.

`programs()` gives programs that `check_program` accepts and that run on any input data without raising: integers are
divided by constants and sizes only, checked indices are brought into range first, assertions and requirements hold.
Integer inputs that serve as indices may hold anything. `size_values(program)` gives numbers for its run-time sizes;
loops stay small for all of them.

A program is built the way a lowering would: each nest reads what is there and writes something new, or updates what it
may. Some programs are aimed: one of their nests has the form that a pass over kernels or a path of the emitter looks
for, which free choices hardly ever make (`AIMED`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from hypothesis import strategies as st

from ferrite.loops import index as indices
from ferrite.loops.dtypes import DTYPES, DType, b8, f32, i32, i64
from ferrite.loops.index import ZERO, Axis, Index, Size
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
    Parameter,
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
from ferrite.loops.operations import ACCUMULATIONS, OPERATIONS, REDUCTIONS, SCANS, Reduction
from ferrite.loops.rewrite import substitute_axes
from ferrite.loops.shapes import contiguous_strides

ALL_DTYPES = tuple(DTYPES.values())
DIVISIONS = ("floordiv", "truncdiv", "floormod", "truncmod")
# Around the lanes of vectors of every type, and of a few of them.
LONG = (5, 7, 8, 9, 15, 16, 17, 31, 33, 40, 64, 65, 70)
# Of what is reduced, turned and looked up: more than a few vectors, and now and then more than a thread's share.
LONGER = (20, 32, 33, 48, 64, 65, 96, 100, 128, 192, 257)
AIMED = (
    *("long_reduction", "long_reduction", "row_again", "row_again", "softmax", "softmax", "crossed", "crossed"),
    *("column_sum", "looked_up", "guarded_row", "flattened"),
)
# Hundreds of instructions each, of which `test_native_math` knows more than any program would tell.
SELDOM = frozenset(
    {
        *("pow", "truncmod", "hypot", "ldexp", "expm1", "log1p", "sin", "cos", "tan", "asin", "acos", "atan", "atan2"),
        *("sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc", "erfinv", "lgamma", "digamma"),
        *("i0", "i0e", "i1", "i1e", "ndtr", "ndtri", "log_ndtr"),
    }
)
DEAR = ("exp", "log", "sigmoid", "tanh", "sqrt")  # of what is computed once for a row
JOINING = ("add", "sub", "mul", "minimum", "maximum", "and_", "or_", "xor")
MESSAGE = "index {index} is out of bounds for dimension 0 with size {size}"

T = TypeVar("T")


def programs(
    dtypes: Sequence[DType] = ALL_DTYPES, symbolic: bool = True, max_nests: int = 4, special: bool = True
) -> st.SearchStrategy[Program]:
    """Programs over these dtypes (i64 and b8 occur anyway). `special`: constants may be NaN, infinite and huge."""
    return st.composite(lambda draw: _Builder(_Drawn(draw), tuple(dtypes), symbolic, special).program(max_nests))()


def program_from(source: Source) -> Program:
    """The same without hypothesis: many small programs, with loops that are longer than vectors too, and with little of
    what is long to compile."""
    builder = _Builder(source, ALL_DTYPES, True, True, LONG, SELDOM, (1, 2, 2, 3))
    if builder.chance(40):
        return builder.aimed_program()
    return builder.program(builder.pick((1, 1, 2, 4)))


def size_values(program: Program) -> st.SearchStrategy[dict[str, int]]:
    """A number for each run-time size."""
    return st.fixed_dictionaries({size.name: st.integers(size.low, size.high) for size in program.sizes})


def expressions(
    dtypes: Sequence[DType] = ALL_DTYPES,
) -> st.SearchStrategy[tuple[Expr, tuple[Buffer, ...], tuple[Axis, ...]]]:
    """An expression, with the buffers and axes that it may name."""

    def build(draw: Callable[[st.SearchStrategy[T]], T]) -> tuple[Expr, tuple[Buffer, ...], tuple[Axis, ...]]:
        builder = _Builder(_Drawn(draw), tuple(dtypes), False, True)
        builder.declare_inputs()
        axes = builder.axes()
        expr = builder.expr(builder.pick(builder.dtypes), axes, 4)
        return expr, tuple(builder.readable), axes

    return st.composite(build)()


class Source(Protocol):
    """Where a program's random numbers come from."""

    def number(self, low: int, high: int) -> int: ...

    def real(self) -> float: ...


@dataclass(frozen=True)
class _Drawn:
    """Hypothesis as such a source."""

    draw: Callable[..., object]

    def number(self, low: int, high: int) -> int:
        found = self.draw(st.integers(low, high))
        assert isinstance(found, int)
        return found

    def real(self) -> float:
        found = self.draw(st.floats())
        assert isinstance(found, float)
        return found


@dataclass
class _Builder:
    """Draws one program, and keeps what it has declared so far.

    `long`: further extents, of which an index space has at most one. `seldom`: operations that few draws are of.
    `depths`: of what a store computes.
    """

    source: Source
    dtypes: tuple[DType, ...]
    symbolic: bool
    special: bool
    long: tuple[int, ...] = ()
    seldom: frozenset[str] = frozenset()
    depths: tuple[int, ...] = (3,)
    sizes: list[Size] = field(default_factory=list)
    parameters: list[Parameter] = field(default_factory=list)
    locals: list[Buffer] = field(default_factory=list)
    readable: list[Buffer] = field(default_factory=list)
    count: int = 0
    combining: bool = False  # in the combine of a fold, or a calm expression: nothing may raise, and there is no fold

    def pick(self, choices: Sequence[T]) -> T:
        return choices[self.number(0, len(choices) - 1)]

    def number(self, low: int, high: int) -> int:
        return self.source.number(low, high)

    def chance(self, percent: int) -> bool:
        return self.number(1, 100) > 100 - percent

    def depth(self) -> int:
        return self.pick(self.depths) if len(self.depths) > 1 else self.depths[0]

    def name(self, prefix: str) -> str:
        self.count += 1
        return f"{prefix}{self.count}"

    # ---- the frame

    def program(self, max_nests: int) -> Program:
        self.declare_inputs()
        nests = [self.nest() for _ in range(self.number(1, max_nests))]
        return Program("program", tuple(self.sizes), tuple(self.parameters), tuple(self.locals), tuple(nests))

    def aimed_program(self) -> Program:
        """A nest of a form that a pass looks for, alone or next to free ones."""
        self.declare_inputs()
        before = [self.nest()] if self.chance(15) else []
        aimed = getattr(self, self.pick(AIMED))()
        after = [self.nest()] if self.chance(15) else []
        nests = (*before, *aimed, *after)
        return Program("program", tuple(self.sizes), tuple(self.parameters), tuple(self.locals), nests)

    def declare_inputs(self) -> None:
        if self.symbolic:
            for count in range(self.number(0, 2)):
                low = self.number(1, 3)
                self.sizes.append(Size(f"s{count}", low, low + self.number(0, 3)))
        self.parameters.append(Parameter(Buffer("seed", i64, (), ()), "in"))
        for count in range(self.number(1, 3)):
            buffer = self.strided(f"x{count}", self.pick(self.dtypes), self.extents(self.number(0, 3)))
            self.parameters.append(Parameter(buffer, self.pick(("in", "in", "inout"))))
        self.readable = [parameter.buffer for parameter in self.parameters]

    def extents(self, rank: int, empty: bool = False) -> tuple[Index, ...]:
        known = [indices.of_atom(size) for size in self.sizes]
        pool = [
            *map(indices.constant, (1, 2, 3, 4)),
            *known,
            *(size + 1 for size in known),
            *(2 * size for size in known[:1]),
        ]
        made = [ZERO if empty and self.chance(3) else self.pick(pool) for _ in range(rank)]
        if made and self.long and self.chance(30):
            made[self.number(0, rank - 1)] = indices.constant(self.pick(self.long))
        return tuple(made)

    def strided(self, name: str, dtype: DType, sizes: tuple[Index, ...]) -> Buffer:
        """Row-major, or transposed, or with gaps between the rows."""
        form = self.number(0, 3)
        if form == 1 and len(sizes) > 1:
            return Buffer(name, dtype, sizes, contiguous_strides(sizes[::-1])[::-1])
        if form == 2 and sizes:
            return Buffer(name, dtype, sizes, contiguous_strides((*sizes[:-1], sizes[-1] + 1)))
        return Buffer(name, dtype, sizes, contiguous_strides(sizes))

    def axes(self, empty: bool = False) -> tuple[Axis, ...]:
        extents = self.extents(self.pick((0, 1, 1, 2, 2, 3)), empty)
        return tuple(Axis(self.name("j"), extent) for extent in extents)

    # ---- statements

    def nest(self) -> Nest:
        axes = self.axes(empty=True)
        body: list[Statement] = []
        fresh: list[Buffer] = []
        for _ in range(self.pick((1, 1, 2, 3))):
            kind = self.number(0, 9)
            if kind == 0:
                body.append(self.scan(axes))
            elif kind == 1:
                body.append(self.check(axes))
            elif kind in (2, 3) and (update := self.update(axes)) is not None:
                body.append(update)
            else:
                buffer, index = self.target(axes, self.pick(self.dtypes))
                points = [Load(known, known_index) for known, known_index in self.same_points(fresh, axes)]
                body.append(Store(buffer, index, self.expr(buffer.dtype, axes, self.depth(), points)))
                fresh.append(buffer)
        # What a nest writes is whole only after it: until then only the same point may be read.
        self.readable += [target for statement in body for target in _new_targets(statement, self.readable)]
        return Nest(axes, tuple(body))

    def target(self, axes: tuple[Axis, ...], dtype: DType) -> tuple[Buffer, tuple[Index, ...]]:
        """A new buffer that the nest fills, in some order of its axes."""
        order = list(axes)
        if self.chance(30):
            order.reverse()
        sizes = tuple(axis.extent for axis in order)
        if self.chance(50):
            buffer = self.strided(self.name("t"), dtype, sizes)
            self.locals.append(buffer)
        else:
            buffer = self.strided(self.name("y"), dtype, sizes)
            self.parameters.append(Parameter(buffer, "out"))
        return buffer, tuple(indices.of_atom(axis) for axis in order)

    def same_points(self, fresh: list[Buffer], axes: tuple[Axis, ...]) -> list[tuple[Buffer, tuple[Index, ...]]]:
        """Where this nest's earlier statements wrote at this point."""
        straight = tuple(indices.of_atom(axis) for axis in axes)
        sizes = tuple(axis.extent for axis in axes)
        # Equal extents could stand for either axis: only an order that is sure counts.
        sure = len(set(sizes)) == len(sizes)
        found = []
        for buffer in fresh:
            if buffer.sizes == sizes and sure:
                found.append((buffer, straight))
            elif buffer.sizes == sizes[::-1] and sure:
                found.append((buffer, straight[::-1]))
        return found

    def scan(self, axes: tuple[Axis, ...]) -> Scan | FoldScan:
        if self.chance(30):
            return self.fold_scan(axes)
        operation = self.pick(list(SCANS))
        dtype = self.of_kinds(SCANS[operation].kinds)
        axis = Axis(self.name("k"), self.extents(1)[0])
        results = SCANS[operation].results
        used = self.number(0, len(results) - 1)
        targets: list[tuple[Buffer, tuple[Index, ...]] | None] = []
        for position, (_, rule) in enumerate(results):
            keep = position == used or self.chance(50)
            targets.append(self.target((*axes, axis), dtype if rule == "same" else i64) if keep else None)
        return Scan(operation, axis, tuple(targets), self.expr(dtype, (*axes, axis), 2))

    def fold_scan(self, axes: tuple[Axis, ...]) -> FoldScan:
        dtypes = tuple(self.pick(self.dtypes) for _ in range(self.number(1, 3)))
        axis = Axis(self.name("k"), self.extents(1)[0])
        used = self.number(0, len(dtypes) - 1)
        targets = tuple(
            self.target((*axes, axis), dtype) if position == used or self.chance(50) else None
            for position, dtype in enumerate(dtypes)
        )
        values = tuple(self.expr(dtype, (*axes, axis), 2) for dtype in dtypes)
        return FoldScan(self.combine(dtypes, axes, 2), axis, targets, values)

    def combine(self, dtypes: tuple[DType, ...], axes: tuple[Axis, ...], depth: int) -> tuple[Expr, ...]:
        """Any expressions of the arguments. Few are associative: all that runs here goes from left to right."""
        given = [Argument(side, number, kind) for side in ("left", "right") for number, kind in enumerate(dtypes)]
        self.combining = True
        made = tuple(self.expr(dtype, axes, depth, given) for dtype in dtypes)
        self.combining = False
        return made

    def check(self, axes: tuple[Axis, ...]) -> Assert:
        """A truth about some axis, or about nothing."""
        place = indices.of_atom(self.pick(axes)) if axes else ZERO
        condition = Apply("ge", (Position(place), Const(0, i64)))
        return Assert(condition, "RuntimeError", 'an axis is below 0: it\'s "impossible"')

    def update(self, axes: tuple[Axis, ...]) -> Statement | None:
        """Combine something into memory, at a place that may come from data; None if there is nothing to update."""
        roles = {parameter.buffer: parameter.role for parameter in self.parameters}
        operation = self.pick(ACCUMULATIONS)
        kinds = OPERATIONS[operation].kinds
        able = [b for b in self.readable if roles.get(b) != "in" and b.dtype.kind in kinds and ZERO not in b.sizes]
        if not able:
            return None
        buffer = self.pick(able)
        # A value that reads what it updates would depend on the order of points in ways that are hard to state.
        others = [known for known in self.readable if known is not buffer]
        kept, self.readable = self.readable, others
        index, value = self.place(buffer, axes, 1), self.expr(buffer.dtype, axes, 2)
        self.readable = kept
        return Accumulate(operation, buffer, index, value)

    # ---- nests of a form that passes look for

    def long_reduction(self) -> list[Nest]:
        """Few points around reductions of many elements, which some other expression uses."""
        around, own = self.some_axes("j", (0, 1, 1, 2)), self.some_axes("k", (1, 2, 2), long=True)
        row, dtype = self.any_reduction()
        outer = len(own) - 1 if self.chance(60) else 0  # for the statistics of channels, some of its axes are outside
        operand = self.operand(dtype, (*own[:outer], *around, *own[outer:]))
        body = operand if self.chance(50) else self.join(dtype, [operand, self.calm(dtype, (*around, *own), 1)])
        results = [Reduce(row.name, own, body, result) for result, _ in row.results if self.chance(75)]
        return [self.storing(around, results or [Reduce(row.name, own, body, row.results[0][0])])]

    def column_sum(self) -> list[Nest]:
        """A reduction of rows into a row."""
        around, column = self.some_axes("j", (0, 0, 1)), self.long_axis("j")
        row = Axis(self.name("k"), indices.constant(self.pick((2, 7, 8, 12, 32, 33, 40))))
        reductions: list[Expr] = []
        for _ in range(self.pick((1, 1, 2))):
            operation = self.pick(("sum", "max", "min", "sum", "prod"))
            dtype = self.of_kinds(REDUCTIONS[operation].kinds)
            parts = [self.operand(dtype, (*around, row, column)) for _ in range(self.pick((1, 1, 2)))]
            reductions.append(Reduce(operation, (row,), self.join(dtype, parts), "value"))
        return [self.storing((*around, column), reductions)]

    def row_again(self) -> list[Nest]:
        """A row is reduced, and used again with the result; in one nest or in two."""
        rows, lane = self.some_axes("j", (1, 1, 2)), self.long_axis("j")
        row, dtype = self.any_reduction()
        own = self.operand(dtype, (*rows, lane))
        if self.chance(80):
            own = _cast(dtype, Apply(self.pick(DEAR), (own if dtype.is_float else Cast(f32, own),)))
        if self.chance(30):
            own = self.join(dtype, [own, self.calm(dtype, (*rows, lane), 1)])
        along = Axis(self.name("k"), lane.extent)
        body = substitute_axes(own, {lane: indices.of_atom(along)})
        results: list[Expr] = [Reduce(row.name, (along,), body, result) for result, _ in row.results]
        if self.chance(60):
            return [self.storing((*rows, lane), [own, *results])]
        first = self.storing(rows, results[:1])
        (kept,) = (statement for statement in first.body if isinstance(statement, Store))
        return [first, self.storing((*rows, lane), [own, Load(kept.buffer, kept.index)])]

    def softmax(self) -> list[Nest]:
        """exp(x - greatest) / sum, from one reduction of two results or from two."""
        rows, lane = self.some_axes("j", (1, 1, 2)), self.long_axis("j")
        dtype = self.of_kinds(("float",))
        own = self.operand(dtype, (*rows, lane))
        if self.chance(40):
            own = self.join(dtype, [own, self.operand(dtype, (*rows, lane))])
        along = Axis(self.name("k"), lane.extent)
        body = substitute_axes(own, {lane: indices.of_atom(along)})
        if self.chance(60):
            most: Expr = Reduce("softmax", (along,), body, "max")
            total: Expr = Reduce("softmax", (along,), body, "sum")
        else:
            most = Reduce("max", (along,), body, "value")
            total = Reduce("sum", (along,), Apply("exp", (Apply("sub", (body, most)),)), "value")
        exponential = Apply("exp", (Apply("sub", (own, most)),))
        return [self.storing((*rows, lane), [Apply("div", (exponential, total))])]

    def crossed(self) -> list[Nest]:
        """Some buffers are read along the rows and others along the columns."""
        others, sides = self.some_axes("j", (0, 0, 0, 1)), (self.long_axis("j"), self.long_axis("j"))
        dtype = self.pick(self.dtypes)
        across = [self.operand(self.near(dtype), (*others, *sides[::-1])) for _ in range(self.pick((1, 1, 2)))]
        along = [self.operand(self.near(dtype), (*others, *sides)) for _ in range(self.pick((0, 1, 1)))]
        return [self.storing((*others, *sides), [*across, *along], dtype)]

    def looked_up(self) -> list[Nest]:
        """Whole rows from where data says."""
        row, lane = self.long_axis("j") if self.chance(30) else self.some_axes("j", (1,))[0], self.long_axis("j")
        table = self.input(self.pick(self.dtypes), (self.extents(1)[0], lane.extent))
        place = self.operand(self.pick((i64, i64, i32)), (row,))
        size = table.sizes[0]
        value: Expr = Apply("floormod", (_cast(i64, place), Position(size)))
        if self.chance(60):
            value = Checked(value, size, False, "IndexError", MESSAGE)
        looked_up = Load(table, (indices.data(value, 0, size - 1), indices.of_atom(lane)))
        others = [self.operand(table.dtype, (row, lane)) for _ in range(self.pick((0, 1)))]
        return [self.storing((row, lane), [looked_up, *others])]

    def guarded_row(self) -> list[Nest]:
        """Parts of a row come from different buffers, each shorter than the row."""
        rows, lane = self.some_axes("j", (0, 1, 1)), self.long_axis("j")
        at, length = indices.of_atom(lane), lane.extent.constant
        dtype = self.pick(self.dtypes)
        value = self.operand(dtype, (*rows, lane))
        for _ in range(self.pick((1, 1, 2, 3))):
            cut, before = self.number(1, length - 1), self.chance(50)
            part = cut if before else length - cut
            buffer = self.input(dtype, (*(axis.extent for axis in rows), indices.constant(part)))
            index = (*map(indices.of_atom, rows), at if before else at - cut)
            operation, bound = self.pick((("lt", cut), ("le", cut - 1)) if before else (("ge", cut), ("gt", cut - 1)))
            condition = Apply(operation, (Position(at), Const(bound, i64)))
            value = Guarded(condition, Load(buffer, index), value)
        return [self.storing((*rows, lane), [value], dtype)]

    def flattened(self) -> list[Nest]:
        """All elements of a matrix in one loop, with a row that is the same for all rows, or a number for each."""
        height, width = self.pick((2, 3, 8, 9)), self.pick(LONGER[:6])
        lane = Axis(self.name("j"), indices.constant(height * width))
        at = indices.of_atom(lane)
        dtype = self.pick(self.dtypes)
        row = Load(self.input(dtype, (indices.constant(width),)), (at % width,))
        number = Load(self.input(dtype, (indices.constant(height),)), (at // width,))
        return [self.storing((lane,), [self.pick((row, number)), self.operand(dtype, (lane,))], dtype)]

    def some_axes(self, prefix: str, counts: Sequence[int], long: bool = False) -> tuple[Axis, ...]:
        extents = self.extents(self.pick(counts))
        if long:
            place = 0 if self.chance(25) else len(extents) - 1
            many = self.pick(LONGER) * (extents[place] if self.chance(20) else indices.constant(1))
            extents = (*extents[:place], many, *extents[place + 1 :])
        return tuple(Axis(self.name(prefix), extent) for extent in extents)

    def long_axis(self, prefix: str) -> Axis:
        return Axis(self.name(prefix), indices.constant(self.pick(LONGER)))

    def any_reduction(self) -> tuple[Reduction, DType]:
        row = self.pick([*REDUCTIONS.values()])
        return row, self.of_kinds(row.kinds)

    def near(self, dtype: DType) -> DType:
        """The same, or any other."""
        return dtype if self.chance(75) else self.pick(self.dtypes)

    def input(self, dtype: DType, sizes: tuple[Index, ...]) -> Buffer:
        name, dense = self.name("z"), self.chance(80)
        buffer = Buffer(name, dtype, sizes, contiguous_strides(sizes)) if dense else self.strided(name, dtype, sizes)
        self.parameters.append(Parameter(buffer, "in"))
        self.readable.append(buffer)
        return buffer

    def operand(self, dtype: DType, axes: tuple[Axis, ...]) -> Expr:
        """A buffer of its own at this point, or some of it that is the same for all points of an axis."""
        kept = tuple(axis for axis in axes if axis is axes[-1] or not self.chance(8))
        return Load(self.input(dtype, tuple(axis.extent for axis in kept)), tuple(map(indices.of_atom, kept)))

    def calm(self, dtype: DType, axes: tuple[Axis, ...], depth: int) -> Expr:
        """An expression that cannot raise."""
        self.combining = True
        made = self.expr(dtype, axes, depth)
        self.combining = False
        return made

    def join(self, dtype: DType, parts: Sequence[Expr]) -> Expr:
        """One value of several, by operations that are quick."""
        value = _cast(dtype, parts[0])
        quick = [each for each in JOINING if dtype.kind in OPERATIONS[each].kinds]
        for part in parts[1:]:
            value = Apply(self.pick(quick), (value, _cast(dtype, part)))
        return value

    def storing(self, axes: tuple[Axis, ...], parts: Sequence[Expr], dtype: DType | None = None) -> Nest:
        """A nest that fills a new buffer with what it makes of these, in the dtype of the first unless told."""
        dtype = dtype or parts[0].dtype
        sizes = tuple(axis.extent for axis in axes)
        buffer = Buffer(self.name("y"), dtype, sizes, contiguous_strides(sizes))
        index = tuple(map(indices.of_atom, axes))
        if self.chance(15):
            buffer, index = self.target(axes, dtype)
        else:
            self.parameters.append(Parameter(buffer, "out"))
        self.readable.append(buffer)
        return Nest(axes, (Store(buffer, index, self.join(dtype, parts)),))

    # ---- expressions

    def of_kinds(self, kinds: Sequence[str]) -> DType:
        return self.pick([dtype for dtype in (*self.dtypes, f32, i64, b8) if dtype.kind in kinds])

    def expr(self, dtype: DType, axes: tuple[Axis, ...], depth: int, points: Sequence[Expr] = ()) -> Expr:
        if depth == 0 or self.chance(10):
            return self.leaf(dtype, axes, points)
        kind = self.number(0, 12)
        match kind:
            case 0:
                condition = self.expr(b8, axes, depth - 1, points)
                return Select(condition, *(self.expr(dtype, axes, depth - 1, points) for _ in range(2)))
            case 1:
                return self.guarded(dtype, axes, depth, points)
            case 2 | 3:
                return self.reduce(dtype, axes, depth)
            case 4:
                return Cast(dtype, self.expr(self.pick(self.dtypes), axes, depth - 1, points))
            case 5 if not dtype.is_bool:
                alike = [other for other in ALL_DTYPES if other.bits == dtype.bits]
                return Bits(dtype, self.expr(self.pick(alike), axes, depth - 1, points))
            case 6 if dtype in (f32, i32):
                seed = Load(self.parameters[0].buffer, ())
                draw = "bits" if dtype is i32 else self.pick(("uniform", "normal"))
                return Random(draw, seed, self.number(0, 3), self.any_index(axes), dtype)
            case 7 if not self.combining:
                return self.require(dtype, axes, depth, points)
        return self.apply(dtype, axes, depth, points)

    def leaf(self, dtype: DType, axes: tuple[Axis, ...], points: Sequence[Expr]) -> Expr:
        kind = self.number(0, 9)
        if kind == 0:
            return Const(self.constant(dtype), dtype)
        if kind == 1:
            return _cast(dtype, Position(self.any_index(axes)))
        if points and kind < 5:
            return _cast(dtype, self.pick(points))
        return self.load(dtype, axes)

    def constant(self, dtype: DType) -> bool | int | float:
        if dtype.is_bool:
            return self.chance(50)
        if dtype.is_int:
            low = -(2 ** (dtype.bits - 1)) if dtype.signed else 0
            return self.number(low, low + 2**dtype.bits - 1) if self.special else self.number(max(low, -4), 4)
        return self.source.real() if self.special else self.number(-64, 64) / 16

    def load(self, dtype: DType, axes: tuple[Axis, ...], depth: int = 1) -> Expr:
        able = [buffer for buffer in self.readable if ZERO not in buffer.sizes]
        if not able:
            return Const(self.constant(dtype), dtype)
        buffer = self.pick(able)
        return _cast(dtype, Load(buffer, self.place(buffer, axes, depth)))

    def apply(self, dtype: DType, axes: tuple[Axis, ...], depth: int, points: Sequence[Expr]) -> Expr:
        rows = [
            row for row in OPERATIONS.values() if (dtype.is_bool if row.result == "bool" else dtype.kind in row.kinds)
        ]
        if self.seldom and not self.chance(12):
            rows = [row for row in rows if row.name not in self.seldom]
        row = self.pick(rows)
        taken = self.of_kinds(row.kinds) if row.result == "bool" else dtype
        operands = [self.expr(taken, axes, depth - 1, points) for _ in range(row.arity)]
        if row.arity > 1 and self.chance(20):
            operands[1] = operands[0]  # shared parts
        if row.name in DIVISIONS and taken.is_int:
            operands[1] = Const(self.pick((1, 2, 3, 7)), taken)
        return Apply(row.name, tuple(operands))

    def guarded(self, dtype: DType, axes: tuple[Axis, ...], depth: int, points: Sequence[Expr]) -> Expr:
        """A window that looks past the ends of a buffer, and is stopped by its condition."""
        able = [buffer for buffer in self.readable if len(buffer.sizes) > 0 and ZERO not in buffer.sizes]
        if not able:
            return self.leaf(dtype, axes, points)
        buffer = self.pick(able)
        index = list(self.place(buffer, axes, 0))
        spot = self.number(0, len(index) - 1)
        index[spot] = self.any_index(axes) - self.number(0, 2)
        after = Apply("ge", (Position(index[spot]), Const(0, i64)))
        before = Apply("lt", (Position(index[spot]), Position(buffer.sizes[spot])))
        value = _cast(dtype, Load(buffer, tuple(index)))
        return Guarded(Apply("and_", (after, before)), value, self.expr(dtype, axes, depth - 1, points))

    def require(self, dtype: DType, axes: tuple[Axis, ...], depth: int, points: Sequence[Expr]) -> Expr:
        """A value under a condition that holds for all data, but that only some passes can see to hold."""
        if self.chance(50):
            place = indices.of_atom(self.pick(axes)) if axes else ZERO
            condition: Expr = Apply("ge", (Position(place), Const(0, i64)))
        else:
            seen = self.expr(i64, axes, depth - 1, points)
            condition = Apply("ne", (Apply("or_", (seen, Const(1, i64))), Const(0, i64)))
        return Require(condition, self.expr(dtype, axes, depth - 1, points), "RuntimeError", 'it\'s "impossible"')

    def reduce(self, dtype: DType, axes: tuple[Axis, ...], depth: int) -> Expr:
        """A reduction that gives this dtype, over one or two axes of its own."""
        if not self.combining and self.chance(15):
            return self.fold(dtype, axes, depth)
        able = [
            (row, result)
            for row in REDUCTIONS.values()
            for result, rule in row.results
            if (dtype.kind in row.kinds if rule == "same" else dtype is DTYPES[rule])
        ]
        row, result = self.pick(able)
        body = dtype if dict(row.results)[result] == "same" else self.of_kinds(row.kinds)
        extents = self.extents(self.pick((1, 1, 2)), empty=row.empty != "is refused")
        own = tuple(Axis(self.name("k"), extent) for extent in extents)
        return Reduce(row.name, own, self.expr(body, (*axes, *own), depth - 1), result)

    def fold(self, dtype: DType, axes: tuple[Axis, ...], depth: int) -> Expr:
        dtypes = [self.pick(self.dtypes) for _ in range(self.number(1, 2))]
        result = self.number(0, len(dtypes) - 1)
        dtypes[result] = dtype
        own = tuple(Axis(self.name("k"), extent) for extent in self.extents(self.pick((1, 1, 2))))
        values = tuple(self.expr(kind, (*axes, *own), depth - 1) for kind in dtypes)
        return Fold(self.combine(tuple(dtypes), axes, 2), own, values, result)

    # ---- indices

    def any_index(self, axes: tuple[Axis, ...]) -> Index:
        """Arithmetic over the axes that is not meant to stay inside anything."""
        value = indices.constant(self.number(-3, 3))
        for axis in axes:
            value = value + self.number(-2, 4) * indices.of_atom(axis)
        match self.number(0, 5):
            case 0:
                return value // self.pick((2, 3, 4))
            case 1:
                return value % self.pick((2, 3, 4))
            case 2:
                return indices.minimum(value, indices.maximum(self.number(-2, 4), value // 2))
        return value

    def place(self, buffer: Buffer, axes: tuple[Axis, ...], depth: int) -> tuple[Index, ...]:
        """Where to read or update a buffer: as it lies, as some view of it, or where data says."""
        if len(buffer.sizes) > 1 and axes and self.chance(25):
            return self.reshaped(buffer, axes)
        return tuple(self.inside(size, axes, depth) for size in buffer.sizes)

    def inside(self, size: Index, axes: tuple[Axis, ...], depth: int) -> Index:
        """An index into a dimension of this size."""
        fitting = [indices.of_atom(axis) for axis in axes if axis.extent is size]
        if fitting and self.chance(60):
            found = self.pick(fitting)
            return size - 1 - found if self.chance(20) else found
        kind = self.number(0, 4)
        if kind == 0 and depth > 0:
            return self.from_data(size, axes, depth)
        value = self.any_index(axes)
        if kind == 1:
            return indices.maximum(indices.minimum(value, size - 1), 0)
        if kind == 2 and indices.known_within(value, 0, size):
            return value
        return value % size

    def from_data(self, size: Index, axes: tuple[Axis, ...], depth: int) -> Index:
        """An index that is read from memory, brought into range, and perhaps checked."""
        length = Position(size)
        # A remainder by a size is safe: sizes are at least 1 here.
        value: Expr = Apply("floormod", (self.load(i64, axes, depth - 1), length))
        if self.combining or self.chance(50):
            return indices.data(value, 0, size - 1)
        wrap = self.chance(50)
        if wrap:
            value = Select(Apply("gt", (value, Const(0, i64))), Apply("sub", (value, length)), value)
        return indices.data(Checked(value, size, wrap, "IndexError", MESSAGE), 0, size - 1)

    def reshaped(self, buffer: Buffer, axes: tuple[Axis, ...]) -> tuple[Index, ...]:
        """The position in the box, row-major, as a position in the buffer: a chain of views."""
        flat = ZERO
        for axis in axes:
            flat = flat * axis.extent + indices.of_atom(axis)
        place: list[Index] = []
        for size in reversed(buffer.sizes):
            place.append(flat % size)
            flat = flat // size
        return tuple(reversed(place))


def _cast(dtype: DType, value: Expr) -> Expr:
    return value if value.dtype is dtype else Cast(dtype, value)


def _new_targets(statement: Statement, known: Sequence[Buffer]) -> list[Buffer]:
    match statement:
        case Store(buffer=buffer):
            return [buffer]
        case Scan(targets=targets) | FoldScan(targets=targets):
            return [target[0] for target in targets if target is not None]
    return []
