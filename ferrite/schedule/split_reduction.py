"""A long reduction with few points around it becomes many short ones, so that threads have something to share.

    for i in box(4):                         for i, k_block in box(4, 125):
        y[i] = exp(sum(x[i, k]          ->       part[125*i + k_block] = sum(x[i, 8000*k_block + k] for k in box(8000))
            for k in box(1000000)))          for i in box(4):
                                                 whole[i] = sum(part[125*i + t] for t in box(125))
                                             for i in box(4):
                                                 y[i] = exp(whole[i])

Where a block must end early there is a second nest for the last one. Reductions of one nest that are cut alike are cut
together, so that a block is read once for all of them.

Law: blocks are stretches of the box in row-major order, so what counts the order (the first of equals, positions) is
kept; sums are grouped anew. How they are grouped follows from sizes alone, never from threads or target: results are
the same bits on any number of threads.

    argmin, argmax   the winner among the winners; a part keeps its position in the whole box
    welford          mean = sum(n_t * mean_t) / n;   m2 = sum(m2_t + n_t * (mean_t - mean)**2)   (Chan)
    softmax          max = max(max_t);   sum = sum(sum_t * exp(max_t - max)), where a part of nothing but -inf is 0
    halves           sums of parts are kept in f32 and rounded once, as if there were no parts

A block of which little more than a load is combined has four pieces, a quarter of the box from each other, which are
read at once: memory answers four streams sooner than one, if each goes on where the block before it ended. Pieces that
are neighbours are no such streams: each is over before the processor has seen where it goes. Loops in C that sum 256
MiB on a Zen 4, GB/s on one thread and two: one stream 19.6 and 27.5, four neighbours 17 and 28, four far apart 24.4 and
31.4, if a vector is taken from each in turn (`ways_in_reduction`). What the third cache holds comes as soon in one: by
four, sums of 16, 32, 48, 64, 96 and 128 MiB took 1.18, 1.01, 0.93, 0.95, 0.88 and 0.93 times as long.

A reduction stays whole if moving it in front of its nest could change what happens: it may raise, stands under a guard,
reads what its nest writes, or its box or a loop around it may be empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ferrite.decisions import Decision
from ferrite.loops.access import written_by
from ferrite.loops.dtypes import DType, f32, i64
from ferrite.loops.index import (
    ZERO,
    Axis,
    Index,
    ceildiv,
    data,
    divides,
    free_axes,
    greatest,
    index,
    known_nonnegative,
    least,
    minimum,
    mod,
    of_atom,
    product,
)
from ferrite.loops.nodes import (
    Apply,
    Buffer,
    Cast,
    Const,
    Expr,
    Fold,
    FoldScan,
    Guarded,
    Load,
    Nest,
    Position,
    Program,
    Reduce,
    Require,
    Scan,
    Select,
    Statement,
    Store,
)
from ferrite.loops.rewrite import (
    apply_rules,
    can_raise,
    children,
    fresh_name,
    holds_argument,
    names_in,
    substitute_axes,
    walk,
)
from ferrite.loops.shapes import contiguous_strides
from ferrite.schedule.decided import Decided, Refusal, box, on, refused
from ferrite.schedule.shape import LARGE, best_axis, loads_in

STRETCH = 4096  # columns that the emitter gives to one thread at a time
SOME_COLUMNS = 256  # assumed where the number of columns is known at run time only
STREAMS = 4  # pieces of a block that are read at once ...
STREAMED = {"sum": "add", "max": "maximum", "min": "minimum"}  # ... by what combines neighbours ...
MOST_STREAMED = 2  # ... if no more operations than these are done with each
WHOLE_VECTORS = 64  # elements: a block of a multiple of them leaves no rest in any vector width

# What the parts of a reduction must know so that a result of the whole can be had; by default the result itself.
NEEDS = {
    ("argmin", "index"): ("value", "index"),
    ("argmax", "index"): ("value", "index"),
    ("welford", "m2"): ("mean", "m2"),
    ("softmax", "sum"): ("max", "sum"),
}
ROUNDING = ("sum", "prod", "welford", "softmax")  # kept in f32 for halves


@dataclass(frozen=True)
class Limits:
    """When to split, in points and elements."""

    few: int = 16  # units of work around a reduction that cannot keep threads busy
    long: int = 1 << 16  # elements from which a second thread pays
    block: int = 1 << 13  # elements of a block: 32 KiB of f32, so that a second pass over it finds it in the cache
    columns: int = 1 << 19  # bytes of a block of whole rows: a part is a row, so blocks of many rows store less
    rows: int = 16  # steps of a block at least, if it has no other axis; more than one
    piece: int = 1 << 10  # elements of a piece at least, if a block has several; more than one
    cached: int = LARGE  # bytes that a cache may hold: if there may be no more than these, a block is one piece


@dataclass(frozen=True)
class Cut:
    """How the box of a reduction is cut: its axes are `lead`, `axis` and `inner`, and a piece is `length` steps of
    `axis` by all of `inner`. A block is one piece, or as many as there are `streams`, each from its own part of `axis`.
    Around it are the axes of the nest that it depends on, in their order; `columns` is the one of them that runs along
    memory, if the reduction itself does not."""

    around: tuple[Axis, ...]
    columns: Axis | None
    lead: tuple[Axis, ...]
    axis: Axis
    length: int
    inner: tuple[Axis, ...]
    streams: int = 1

    @property
    def axes(self) -> tuple[Axis, ...]:
        return (*self.lead, self.axis, *self.inner)

    @property
    def rows(self) -> tuple[Axis, ...]:
        """What is around it besides the columns."""
        return tuple(axis for axis in self.around if axis is not self.columns)

    @property
    def blocks(self) -> Index:
        """Of one row of `axis`, the last one included that may be shorter."""
        return ceildiv(self.axis.extent, self.length * self.streams)

    @property
    def parts(self) -> Index:
        """Blocks of the whole box."""
        return product(axis.extent for axis in self.lead) * self.blocks

    @property
    def is_even(self) -> bool:
        return divides(self.length * self.streams, self.axis.extent)


LIMITS = Limits()


def split_reductions(program: Program, limits: Limits = LIMITS) -> Decided:
    """Split what is worth it, nest by nest."""
    taken = names_in(program)
    buffers, nests = [*program.locals], []
    decisions: list[Decision] = []
    for nest in program.nests:
        while cuts := _cuts_in(nest, limits):
            split = _Split([*cuts], _in_streams(next(iter(cuts.values())), [*cuts], limits), taken)
            decisions += [Decision("split", on(program, nest.body), True, _in_parts(node, split.cut)) for node in cuts]
            nests += split.nests()
            buffers += split.buffers
            nest = split.read_in(nest)
        nests.append(nest)
        decisions += [refused("split", on(program, nest.body), why) for why in _whole(nest, limits)]
    split_program = Program(program.name, program.sizes, program.parameters, tuple(buffers), tuple(nests))
    return Decided(split_program, tuple(decisions))


# ---- deciding


def _cuts_in(nest: Nest, limits: Limits) -> dict[Reduce, Cut]:
    """Reductions of the nest that are cut alike, each with one that has no other such inside."""
    cuts = {node: cut_of(node, nest.axes, limits) for node in movable_reductions(nest)}
    found = {node: cut for node, cut in cuts.items() if isinstance(cut, Cut)}
    ready = {node: cut for node, cut in found.items() if not any(part in found for part in walk(node.body))}
    first = next(iter(ready.values()), None)
    return {node: cut for node, cut in ready.items() if cut == first}


def _whole(nest: Nest, limits: Limits) -> Iterator[str]:
    """Why long reductions stay as they are."""
    for node in movable_reductions(nest):
        cut = cut_of(node, nest.axes, limits)
        if isinstance(cut, Refusal):
            yield f"{box_of(node)}: {cut}"
    for node, why in reductions_that_stay(nest):
        elements = greatest(product(axis.extent for axis in node.axes))
        if elements is not None and elements >= limits.long:
            yield f"{box_of(node)}: {why}"


def _in_parts(node: Reduce, cut: Cut) -> str:
    around = product(axis.extent for axis in cut.around)
    return f"{box_of(node)} in {cut.parts} parts, so that threads share it: there are {around} points around it"


def box_of(node: Reduce) -> str:
    """A reduction by its name and size, for people."""
    return f"{node.operation} over {box(node.axes)}"


def movable_reductions(nest: Nest) -> list[Reduce]:
    """Reductions that can as well be computed before the nest."""
    found = [node for node in _open_expressions(nest) if isinstance(node, Reduce)]
    around = _Around(nest)
    return [node for node in found if around.why_it_stays(node) is None]


def reductions_that_stay(nest: Nest) -> list[tuple[Reduce, str]]:
    """The other ones, with the reason."""
    found = dict.fromkeys(node for node in walk(nest) if isinstance(node, Reduce))
    if not found:
        return []
    is_open = {node for node in _open_expressions(nest) if isinstance(node, Reduce)}
    around = _Around(nest)
    reasons = {node: around.why_it_stays(node) if node in is_open else "a guard protects it" for node in found}
    return [(node, why) for node, why in reasons.items() if why is not None]


def _open_expressions(nest: Nest) -> Iterator[Expr]:
    """What is computed at every point, each once: what a guard or a requirement protects is not."""
    waiting = [part for statement in reversed(nest.body) for part in reversed(children(statement))]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if isinstance(node, Expr):
            yield node
        protected = [node.value] if isinstance(node, (Guarded, Require)) else []
        for part in reversed(children(node)):
            if part not in seen and part not in protected:
                seen.add(part)
                waiting.append(part)


class _Around:
    """What is around the reductions of a nest, which is asked for each of them."""

    def __init__(self, nest: Nest) -> None:
        self.nest = nest

    @cached_property
    def written(self) -> set[Buffer]:
        return {buffer for statement in self.nest.body for buffer in written_by(statement)}

    @cached_property
    def all_inside_run(self) -> bool:
        """Whether no loop inside of the nest is empty."""
        inside: set[Axis] = set()
        for part in walk(self.nest):
            if isinstance(part, (Reduce, Fold)):
                inside.update(part.axes)
            elif isinstance(part, (Scan, FoldScan)):
                inside.add(part.axis)
        return all(map(_runs, inside))

    def why_it_stays(self, node: Reduce) -> str | None:
        """What would be different if the reduction were computed before the nest; None if nothing."""
        axes = free_axes(node)
        if can_raise(node):
            return "it may raise"
        if holds_argument(node) or not axes <= set(self.nest.axes):
            return "it is a part of another reduction or scan"
        if any(part.buffer in self.written for part in walk(node) if isinstance(part, Load)):
            return "its nest writes what it reads"
        if self.all_inside_run and all(_runs(axis) for axis in self.nest.axes if axis not in axes):
            return None
        return "a loop around it may be empty, or its own"


def _runs(axis: Axis) -> bool:
    return known_nonnegative(axis.extent - 1)


def cut_of(node: Reduce, axes: Sequence[Axis], limits: Limits) -> Cut | Refusal | None:
    """Where to cut; why not, if there is work for all threads around the reduction; None if there is little in it."""
    around = tuple(axis for axis in axes if axis in free_axes(node))
    columns = best_axis((*around, *node.axes), loads_in(node.body))
    if columns not in around:
        columns = None
    units = product(axis.extent for axis in around if axis is not columns)
    width = index(1) if columns is None else columns.extent
    elements = greatest(product(axis.extent for axis in node.axes) * units * width)
    if elements is not None and elements < limits.long:
        return None
    work = units if width.terms else units * max(width.constant // STRETCH, 1)
    most = greatest(work)
    if most is None or most >= limits.few:
        return Refusal(f"{work} units of work around it are enough for threads, from {limits.few} on")
    block = limits.block if columns is None else limits.columns // node.body.dtype.bytes
    wish = max(block // (SOME_COLUMNS if width.terms else width.constant), 1)
    lead, axis, steps, inner = _cut_at(node.axes, wish)
    cut = Cut(around, columns, lead, axis, _length(axis.extent, steps, 1 if inner else limits.rows), inner)
    parts = greatest(cut.parts)
    return cut if parts is None or parts > 1 else Refusal("all of it is one block")


def _in_streams(cut: Cut, nodes: Sequence[Reduce], limits: Limits) -> Cut:
    """With several pieces to a block, if that suits all that is reduced in it."""
    piece = replace(cut, length=max(cut.length // STREAMS, 1), streams=STREAMS)
    elements = product(axis.extent for axis in piece.inner) * piece.length
    if cut.columns is not None or elements.terms or elements.constant < limits.piece:
        return cut
    if not (piece.is_even or (cut.length % STREAMS == 0 and not cut.is_even)):  # the same rest as without
        return cut
    whole = product(axis.extent for axis in (*cut.around, *cut.axes))
    return piece if all(_gains_by_streams(node, whole, limits.cached) for node in nodes) else cut


def _gains_by_streams(node: Reduce, elements: Index, cached: int) -> bool:
    nodes = [*walk(node.body)]
    if node.operation not in STREAMED or sum(isinstance(part, Apply) for part in nodes) > MOST_STREAMED:
        return False
    loads = [part for part in nodes if isinstance(part, Load)]
    low = least(elements)
    return len(loads) == 1 and low is not None and low * loads[0].dtype.bytes > cached


def _cut_at(axes: tuple[Axis, ...], wish: int) -> tuple[tuple[Axis, ...], Axis, int, tuple[Axis, ...]]:
    """From the innermost axis on, as many as fit into a block of so many elements; the next one is cut.

    An axis with a length known at run time only counts as a block by itself; if it is the first one, it is cut.
    """
    inside, position = 1, len(axes) - 1
    while position > 0:
        extent = axes[position].extent
        more = inside * (wish if extent.terms else extent.constant)
        if more > wish:
            break
        inside, position = more, position - 1
    return axes[:position], axes[position], max(wish // inside, 1), axes[position + 1 :]


def _length(extent: Index, wish: int, least: int) -> int:
    """About as many as wished, and if possible without a rest."""
    wish = max(wish, least)
    if extent.terms:
        return wish
    step = WHOLE_VECTORS if wish >= 4 * WHOLE_VECTORS else 1
    near = range(max(wish // 2 // step * step, least), 2 * wish + 1, step)
    even = [length for length in near if extent.constant % length == 0]
    return min(even, key=lambda length: abs(length - wish), default=min(wish, extent.constant))


# ---- making


@dataclass(frozen=True)
class What:
    """What a reduction combines, and how."""

    operation: str
    body: Expr

    @property
    def wide(self) -> Expr:
        """What its parts combine."""
        return Cast(f32, self.body) if self.body.dtype.is_half and self.operation in ROUNDING else self.body

    def dtype(self, part: str) -> DType:
        return i64 if part == "index" else self.wide.dtype


class _Split:
    """New nests and buffers for reductions that are cut alike. What differs only in the result is one `What`."""

    def __init__(self, nodes: Sequence[Reduce], cut: Cut, taken: set[str]) -> None:
        self.cut, self.taken = cut, taken
        self.buffers: list[Buffer] = []
        wanted: dict[What, list[str]] = {}
        for node in nodes:
            wanted.setdefault(What(node.operation, node.body), []).append(node.result)
        self.parts = {what: self._part_buffers(what, names) for what, names in wanted.items()}
        self.wholes = {node: self._buffer(f"whole_{node.result}", node.dtype, self._sizes_around()) for node in nodes}

    def nests(self) -> list[Nest]:
        return [*self._nests_of_parts(), self._nest_of_wholes()]

    def read_in(self, nest: Nest) -> Nest:
        """The nest with the results read from memory."""
        place = tuple(map(of_atom, self.cut.around))

        def read(node: Expr) -> Expr | None:
            """sum(x[i, k] for k in box(64)) -> whole[i]"""
            return Load(self.wholes[node], place) if isinstance(node, Reduce) and node in self.wholes else None

        return apply_rules(nest, (read,))

    # ---- memory

    def _name(self, wish: str) -> str:
        name = fresh_name(wish, self.taken)
        self.taken.add(name)
        return name

    def _buffer(self, wish: str, dtype: DType, sizes: Sequence[Index]) -> Buffer:
        self.buffers.append(Buffer(self._name(wish), dtype, tuple(sizes), contiguous_strides(sizes)))
        return self.buffers[-1]

    def _part_buffers(self, what: What, names: list[str]) -> dict[str, Buffer]:
        needed = dict.fromkeys(part for name in names for part in NEEDS.get((what.operation, name), (name,)))
        count = product(self._sizes_around()) * self.cut.parts
        return {part: self._buffer(f"part_{part}", what.dtype(part), [count]) for part in needed}

    def _sizes_around(self) -> list[Index]:
        return [axis.extent for axis in self.cut.around]

    def _at_part(self, part: Index) -> tuple[Index, ...]:
        """Where one part is: by the axes around it, its number, and last the columns, along which memory runs.

        All in one dimension: loops are shared between nests that go through a dimension of a buffer in step
        (`arrange.py`), and those that make the parts must not be taken into the few that read them.
        """
        cut = self.cut
        place = _row_major(cut.rows) * cut.parts + part
        return (place if cut.columns is None else place * cut.columns.extent + of_atom(cut.columns),)

    # ---- parts

    def _nests_of_parts(self) -> Iterator[Nest]:
        """Whole blocks, and what is left at the end of an axis; if that is known at run time only, a loop of one
        round or none."""
        cut = self.cut
        extent, length = cut.axis.extent, cut.length * cut.streams
        whole = extent // length
        block = Axis(self._name(f"{cut.axis.name}_block"), whole)
        apart = [whole * (cut.length * n) for n in range(cut.streams)]
        yield self._nest_of_blocks((block,), of_atom(block), of_atom(block) * cut.length, cut.length, apart)
        if cut.is_even:
            return
        last = Axis(self._name(f"{cut.axis.name}_last"), cut.blocks - whole)
        yield self._nest_of_blocks((last,) if last.extent.terms else (), whole, whole * length, extent % length, [ZERO])

    def _nest_of_blocks(
        self, blocks: tuple[Axis, ...], number: Index, start: Index, length: Index | int, apart: Sequence[Index]
    ) -> Nest:
        """`start`: where the first piece of a block starts, `length`: steps of a piece, `apart`: from where to each."""
        cut = self.cut
        axes = (*cut.rows, *cut.lead, *blocks, *(() if cut.columns is None else (cut.columns,)))
        step = Axis(cut.axis.name, index(length))
        own = cut.inner if length == 1 else (step, *cut.inner)
        first = start if length == 1 else start + of_atom(step)
        lead = _row_major(cut.lead)
        place = self._at_part(lead * cut.blocks + number)
        before = (lead * cut.axis.extent + start) * product(axis.extent for axis in cut.inner)
        body: list[Statement] = []
        for what, buffers in self.parts.items():
            pieces = [substitute_axes(what.wide, {cut.axis: first + distance}, (*axes, *own)) for distance in apart]
            value = _combined(what.operation, pieces)
            for name, buffer in buffers.items():
                made: Expr = Reduce(what.operation, own, value, name)
                if name == "index":
                    made = Apply("add", (Position(before), made))
                body.append(Store(buffer, place, made))
        return Nest(axes, tuple(body))

    # ---- wholes

    def _nest_of_wholes(self) -> Nest:
        outer, inner = (Axis(self._name(name), self.cut.parts) for name in ("t", "u"))
        place = tuple(map(of_atom, self.cut.around))
        body = []
        for node, buffer in self.wholes.items():
            value = self._whole(What(node.operation, node.body), node.result, outer, inner)
            body.append(Store(buffer, place, value if value.dtype is node.dtype else Cast(node.dtype, value)))
        return Nest(self.cut.around, tuple(body))

    def _whole(self, what: What, name: str, axis: Axis, inner: Axis) -> Expr:
        """One result, from the parts. `inner` is for a reduction inside of the one over `axis`."""
        buffers, operation = self.parts[what], what.operation

        def part(result: str, at: Axis = axis) -> Expr:
            return Load(buffers[result], self._at_part(of_atom(at)))

        match operation, name:
            case (("argmin" | "argmax"), "index"):
                winner = Reduce(operation, (axis,), part("value"), "index")
                return Load(buffers["index"], self._at_part(data(winner, 0, self.cut.parts - 1)))
            case "softmax", "max":
                return Reduce("max", (axis,), part("max"), "value")
            case "softmax", "sum":
                most = Reduce("max", (inner,), part("max", inner), "value")
                return Reduce("sum", (axis,), _share(part("max"), part("sum"), most), "value")
            case "welford", _:
                mean = self._mean(part("mean", inner), inner)
                if name == "mean":
                    return mean
                distance = Apply("sub", (part("mean"), mean))
                moved = Apply("mul", (self._count(axis, distance.dtype), Apply("mul", (distance, distance))))
                return Reduce("sum", (axis,), Apply("add", (part("m2"), moved)), "value")
        return Reduce(operation, (axis,), part(name), name)

    def _mean(self, part: Expr, axis: Axis) -> Expr:
        total = Reduce("sum", (axis,), Apply("mul", (self._count(axis, part.dtype), part)), "value")
        return Apply("div", (total, Cast(part.dtype, Position(product(axis.extent for axis in self.cut.axes)))))

    def _count(self, part: Axis, dtype: DType) -> Expr:
        """How many elements a part has: the last block of a row of the cut axis may have fewer."""
        cut = self.cut
        block = mod(of_atom(part), cut.blocks)
        rows = index(cut.length) if cut.is_even else minimum(cut.length, cut.axis.extent - cut.length * block)
        return Cast(dtype, Position(rows * product(axis.extent for axis in cut.inner)))


def _combined(operation: str, values: list[Expr]) -> Expr:
    """Neighbours first: (a + b) + (c + d)"""
    while len(values) > 1:
        values = [Apply(STREAMED[operation], pair) for pair in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def _share(greatest_here: Expr, total_here: Expr, most: Expr) -> Expr:
    """A part's sum of exponentials, as seen from the greatest of all. The sum of a part of nothing but -inf is NaN,
    which is right if all parts are like that; otherwise it adds nothing."""
    dtype = most.dtype
    scaled = Apply("mul", (total_here, Apply("exp", (Apply("sub", (greatest_here, most)),))))
    nothing = Apply("eq", (greatest_here, Const(float("-inf"), dtype)))
    here = Select(nothing, Const(0.0, dtype), scaled)
    return Select(Apply("eq", (greatest_here, most)), total_here, here)


def _row_major(axes: Sequence[Axis]) -> Index:
    """The position in a box."""
    place = index(0)
    for axis in axes:
        place = place * axis.extent + of_atom(axis)
    return place
