"""Reductions as loops with running values in registers.

Outside of vector lanes a reduction gets lanes of its own, along the axis that reads memory without gaps: several
vectors of partial results, combined in a fixed order at the end. Inside of lanes (a sum over rows, one result in each
lane) its loops are plain. Either way the order depends on sizes and target alone, never on threads.

Note [Long sums of floats]
    A running sum of many numbers of one sign grows until it swallows the digits of what is added. So a running value
    takes about `STRETCH` additions and is then added to one of the next level, which takes as many; the last level
    takes the rest. Eager's cascade does the same. Relative errors against f64 (10**7 numbers, f32, AVX2), which
    `test_long_sums_keep_their_digits` holds within bounds; the time is the same:

                                                     one running sum    in stretches    eager
        sum of numbers from 0 to 1                           1.1e-06         8.8e-08    1.2e-08
        sums of 16 columns of them                           2.2e-05         1.7e-07    9.6e-08
        sum of squared distances, mean 100, deviation 1      9.0e-05         4.6e-08    3.1e-08

Note [Two passes]
    Mean and distances, and maximum and sum of exponentials, are found in two passes over the data. One pass, block by
    block in the first cache, was measured on one thread over 128 MiB of f32 (caches of 32 KiB, 512 KiB, 32 MiB) in
    rows of 512 KiB to 8 MiB: mean and distances took 9.3 to 12.3 ms in two passes and 8.3 to 9.3 in one, maximum and
    sum of exponentials 21 to 23 either way. But a row that is normalised afterwards took 20 to 24 ms in two passes and
    24 to 29 in one, because its loops are no longer shared with those that follow. So rows take two passes, unless
    there are so few of them that `schedule/split_reduction.py` cuts them into blocks for the sake of threads: one row
    of 40 MB then takes 2.5 ms instead of 4.0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ferrite.errors import Unsupported
from ferrite.loops.dtypes import DType, b8, f32, i32, i64
from ferrite.loops.index import Axis, Index, free_axes, greatest, index, known_nonnegative, of_atom, product
from ferrite.loops.nodes import (
    Argument,
    Checked,
    Const,
    Expr,
    Fold,
    Guarded,
    Load,
    Position,
    Random,
    Reduce,
    Require,
)
from ferrite.loops.operations import REDUCTIONS
from ferrite.loops.rewrite import Tree, can_raise, children, holds_argument, walk
from ferrite.native.ahead import are_pieces_apart, next_group, next_pieces
from ferrite.native.builder import Value
from ferrite.native.evaluate import I32_MOST, Evaluator
from ferrite.native.math import FUNCTIONS
from ferrite.native.scope import Groups, Lanes, Scope, whole_ways
from ferrite.schedule.shape import always_read, best_axis, loads_in, ways_in_reduction, width_of

Running = tuple[Value, ...]
Round = Callable[[Value, Running], Running]  # (position, running) -> running

STRETCH = 128  # see Note [Long sums of floats]


@dataclass(frozen=True)
class Combiner:
    """How values are gathered: what one starts with, how a value joins, how two partial results join."""

    start: Callable[[DType, DType], list[tuple[DType, bool | int | float]]]  # (of values, of positions)
    join: Callable[[Any, Running, Running], Running]  # (builder, running, new) -> running
    merge: Callable[[Any, Running, Running], Running]


def _simple(operation: str, start: Callable[[DType], bool | int | float]) -> Combiner:
    def both(b: Any, running: Running, new: Running) -> Running:
        return (getattr(b, operation)(running[0], new[0]),)

    return Combiner(lambda dtype, _: [(dtype, start(dtype))], both, both)


def _lowest(dtype: DType) -> bool | int | float:
    if dtype.is_float:
        return float("-inf")
    if dtype.is_bool:
        return False
    return -(1 << (dtype.bits - 1)) if dtype.signed else 0


def _highest(dtype: DType) -> bool | int | float:
    if dtype.is_float:
        return float("inf")
    if dtype.is_bool:
        return True
    return (1 << (dtype.bits - 1)) - 1 if dtype.signed else (1 << dtype.bits) - 1


def _best(not_better: str, start: Callable[[DType], bool | int | float]) -> Combiner:
    """The best value and its position. Both start from the worst there is, at position 0: if nothing is better, all are
    equal, and that is where the first of them stands."""

    def is_better(b: Any, value: Value, candidate: Value) -> Value:
        """A NaN is, except than a NaN."""
        better = b.not_(getattr(b, not_better)(candidate, value))
        return b.and_(better, b.not_(b.isnan(value))) if value.dtype.is_float else better

    def join(b: Any, running: Running, new: Running) -> Running:
        (value, place), (candidate, position) = running, new
        better = is_better(b, value, candidate)
        return b.select(better, candidate, value), b.select(better, position, place)

    def merge(b: Any, left: Running, right: Running) -> Running:
        """Of equals the one that stands first."""
        (value, place), (candidate, position) = left, right
        better = is_better(b, value, candidate)
        worse = is_better(b, candidate, value)
        better = b.or_(better, b.and_(b.lt(position, place), b.not_(worse)))
        return b.select(better, candidate, value), b.select(better, position, place)

    return Combiner(lambda dtype, place: [(dtype, start(dtype)), (place, 0)], join, merge)


FOLDS: dict[str, Combiner] = {
    "sum": _simple("add", lambda dtype: 0.0 if dtype.is_float else 0),
    "prod": _simple("mul", lambda dtype: 1.0 if dtype.is_float else 1),
    "min": _simple("minimum", _highest),
    "max": _simple("maximum", _lowest),
    "any": _simple("or_", lambda dtype: False),
    "all": _simple("and_", lambda dtype: True),
    "argmin": _best("ge", _highest),
    "argmax": _best("le", _lowest),
}


@dataclass(frozen=True)
class Pass:
    """One walk over the box of a reduction: what is folded, how, in which type and in which lanes.

    `loops` are the axes that are walked element by element, outermost first; `own` is the axis in lanes of the
    reduction's own, or None: then its lanes, if there are any, are those around it.
    """

    fold: Combiner
    node: Reduce
    change: Callable[[Value], Value]  # what is done to a value of the body before it is folded
    wide: DType
    loops: tuple[Axis, ...]
    own: Axis | None
    lanes: int
    ways: int
    apart: int  # how many of the ways stand along the last loop, as far from each other as they can; or one
    start: Running

    @property
    def drifts(self) -> bool:
        return self.fold is FOLDS["sum"] and self.wide.is_float

    @property
    def in_order(self) -> bool:
        """Whether elements join in the order of their positions. A lane of an axis that is not the last one meets some
        of the next rows before what is left of its own."""
        return self.apart == 1 and (self.own is None or self.own is self.node.axes[-1])

    @property
    def group(self) -> int:
        """Elements that one round of the innermost loop takes along `own`."""
        return self.lanes * self.ways // self.apart

    def rounds(self, depth: int) -> Index:
        """How often a loop turns; the last one as often as its ways are apart."""
        return self.loops[depth].extent // (self.apart if depth == len(self.loops) - 1 else 1)

    def additions(self, depth: int) -> int:
        """How often the loops from this depth on add to one running value; STRETCH if that is more, or not known."""
        rounds = [*map(self.rounds, range(depth, len(self.loops)))]
        if self.own is not None:
            rounds.append(self.own.extent // self.group + 1)
        count = product(rounds)
        return STRETCH if count.terms else max(min(count.constant, STRETCH), 1)

    def steps(self, extent: Index, step: int, additions: int) -> list[int]:
        """The steps in which an axis is walked, from coarse to fine; in the finest one so much is added."""
        stretch = step * max(STRETCH // additions, 1)
        coarse = (stretch * STRETCH, stretch) if self.drifts else ()
        return [*(length for length in coarse if extent.terms or extent.constant > length), step]


class Reducer(Evaluator):
    """An evaluator that knows reductions."""

    def reduce(self, node: Reduce | Fold, scope: Scope) -> Value:
        """All results of one reduction are kept; the node that asked takes one."""
        if scope.find(node) is None:
            together = _results_of(node)
            scope.known.update(zip(together, self._values(together, scope), strict=True))
        found = scope.find(node)
        assert found is not None
        return found

    def _values(self, together: Sequence[Reduce | Fold], scope: Scope) -> Running:
        """What is the same in all lanes is computed once, without lanes around it; if no lane counts, not at all."""
        if scope.vector is None or scope.varies(together[0]):
            return self._computed(together[0], scope)
        alone = scope.inner(vector=None, mask=None)
        if scope.mask is None:
            return self._computed(together[0], alone)
        nothing = [self.constant(False if node.dtype.is_bool else 0, node.dtype) for node in together]
        with self.b.if_(self.b.any(scope.mask), nothing) as branch:
            branch.give(*self._computed(together[0], alone))
        return branch.results

    def _computed(self, node: Reduce | Fold, scope: Scope) -> Running:
        """Every result, in the order of the table."""
        if isinstance(node, Fold):
            return self._combined(node, scope)
        b = self.b
        match node.operation:
            case "welford":
                made = self._moments(node, scope)
            case "softmax":
                (most,) = self._fold("max", node, scope)
                (total,) = self._fold("sum", node, scope, lambda v: FUNCTIONS["exp"](b, b.sub(v, most)))
                made = (most, total)
            case operation:
                made = self._fold(operation, node, scope)
        return tuple(b.convert(value, result.dtype) for value, result in zip(made, _results_of(node), strict=True))

    def _moments(self, node: Reduce, scope: Scope) -> Running:
        """The mean, then the distances from it. Of nothing, zeros."""
        b = self.b
        (total,) = self._fold("sum", node, scope)
        count = b.convert(self.scalar_index(product(axis.extent for axis in node.axes), scope), total.dtype)
        mean = b.select(b.eq(count, 0.0), b.like(total, 0.0), b.div(total, count))

        def squared(v: Value) -> Value:
            distance = b.sub(v, mean)
            return b.mul(distance, distance)

        (m2,) = self._fold("sum", node, scope, squared)
        return mean, m2

    # ---- loops

    def _fold(
        self, name: str, node: Reduce, scope: Scope, change: Callable[[Value], Value] = lambda value: value
    ) -> Running:
        """The running values after all of the box; halves are folded in f32."""
        one = self._pass(FOLDS[name], node, scope, change)
        running = self._over(one, 0, scope, one.start)
        if one.own is None:
            return running
        return self.b.reduce_by(lambda x, y: one.fold.merge(self.b, x, y), running)

    def _pass(self, fold: Combiner, node: Reduce, scope: Scope, change: Callable[[Value], Value]) -> Pass:
        b = self.b
        wide = wide_of(node)
        own, lanes, ways = None, 1, 1
        if scope.vector is not None:
            lanes, ways = scope.vector.lanes, scope.vector.ways
        else:
            own = best_axis(node.axes, loads_in(node.body))
        if own is not None:
            lanes = b.target.vector_bytes // width_of(node.body)
            ways = whole_ways(own.extent, lanes, ways_in_reduction(node.body, own))
        loops = tuple(axis for axis in node.axes if axis is not own)
        apart = 1
        if own is not None and loops and are_pieces_apart(node.body, loops[-1], own, lanes):
            apart = math.gcd(ways, loops[-1].extent.constant)
        # Positions in 32 bits, if they fit, fill as many vectors as values of f32.
        points = greatest(product(axis.extent for axis in node.axes))
        place = i32 if points is not None and points <= I32_MOST else i64
        start = tuple(b.with_ways(b.constant(dtype, number, lanes), ways) for dtype, number in fold.start(wide, place))
        return Pass(fold, node, change, wide, loops, own, lanes, ways, apart, start)

    def _over(self, one: Pass, depth: int, scope: Scope, running: Running) -> Running:
        """The loops from this depth on: the axes that are not in lanes, then the one that is."""
        if depth == len(one.loops):
            return self._joined(one, [scope], running) if one.own is None else self._in_lanes(one, [scope], running)
        b, axis = self.b, one.loops[depth]
        self.hoist([one.node.body], axis, scope)
        rounds = one.rounds(depth)

        def each(position: Value, running: Running) -> Running:
            if one.apart == 1 or depth < len(one.loops) - 1:
                return self._over(one, depth + 1, scope.inner(axes={axis: position}), running)
            places = [b.add(position, rounds.constant * way) for way in range(one.apart)]
            return self._in_lanes(one, [scope.inner(axes={axis: place}) for place in places], running)

        def afresh(position: Value, running: Running) -> Running:
            return one.fold.merge(b, running, each(position, one.start))

        additions = one.additions(depth + 1)
        body, additions = (afresh, 1) if one.drifts and additions == STRETCH else (each, additions)
        steps = one.steps(rounds, 1, additions)
        return self._rounds(one, b.constant(i64, 0), self.scalar_index(rounds, scope), steps, running, body)

    def _in_lanes(self, one: Pass, scopes: Sequence[Scope], running: Running) -> Running:
        """Whole groups of vectors, then what is left, a vector at a time, which the first way takes. Each of several
        scopes has its part of the ways."""
        b, axis = self.b, one.own
        assert axis is not None
        first, *others = scopes
        self.hoist([one.node.body], axis, first)
        for way, scope in enumerate(others, 1):
            distance = one.rounds(len(one.loops) - 1).constant * way
            for load in always_read(one.node.body):
                self.step_address(load, axis, one.loops[-1], distance, first, scope)
            self.hoist([one.node.body], axis, scope)
        ways = one.ways // len(scopes)
        groups = Groups(axis.extent, one.lanes, ways)
        extent = self.scalar_index(axis.extent, first)
        whole = b.sub(extent, b.split(extent, one.group)[1])
        read = [*always_read(one.node.body)]
        ahead = next_pieces(read, one.loops[-1], axis) if one.loops else next_group(read, axis, one.group)

        def each(position: Value, running: Running) -> Running:
            vector = Lanes(axis, position, one.lanes, ways)
            inside = [scope.inner(axes={axis: position}, vector=vector, ahead=ahead) for scope in scopes]
            return self._joined(one, inside, running)

        if groups.any:
            steps = one.steps(axis.extent, one.group, 1)
            running = self._rounds(one, b.constant(i64, 0), whole, steps, running, each)
        if groups.left == 0:
            return running
        with b.loop(whole, extent, one.lanes, [_first_ways(value, len(scopes)) for value in running]) as loop:
            mask = None if groups.are_vectors_left else b.tail(b.sub(extent, loop.index), one.lanes).mask
            vector = Lanes(axis, loop.index, one.lanes, 1)
            inside = [scope.inner(axes={axis: loop.index}, vector=vector, mask=mask) for scope in scopes]
            loop.next(*self._joined(one, inside, tuple(loop.carried)))
        return tuple(
            b.join_ways([done, *(value.way(way) for way in range(done.ways, one.ways))])
            for done, value in zip(loop.results, running, strict=True)
        )

    def _rounds(
        self,
        one: Pass,
        start: Value,
        stop: Value,
        steps: Sequence[int],
        running: Running,
        each: Round,
        *,
        surely: bool = False,
    ) -> Running:
        """A loop for each length of a step, from coarse to fine. What a coarse step gathers starts anew; there is
        `surely` something to gather in each."""
        b = self.b
        step, *finer = steps

        def stretch(position: Value, running: Running) -> Running:
            end = b.minimum(b.add(position, step), stop)
            gathered = self._rounds(one, position, end, finer, one.start, each, surely=True)
            return one.fold.merge(b, running, gathered)

        body = stretch if finer else each
        with b.loop(start, stop, step, running, surely=surely) as loop:
            loop.next(*body(loop.index, tuple(loop.carried)))
        return tuple(loop.results)

    def _joined(self, one: Pass, scopes: Sequence[Scope], running: Running) -> Running:
        """One more value, or one for each scope; where a lane does not count, what was there before."""
        b, mask = self.b, scopes[0].mask
        values = [self.lanes(one.node.body, scope) for scope in scopes]
        value = one.change(b.convert(b.join_ways(values), one.wide))
        new: Running = (value,)
        if len(running) == 2:
            places = [self.spread(self.index(_place(one.node.axes), scope), scope) for scope in scopes]
            new = (value, b.convert(b.join_ways(places), running[1].dtype))
        following = (one.fold.join if one.in_order else one.fold.merge)(b, running, new)
        if mask is None:
            return following
        mask = b.with_ways(mask, value.ways)
        return tuple(b.select(mask, now, before) for now, before in zip(following, running, strict=True))

    # ---- folds

    def _combined(self, node: Fold, scope: Scope) -> Running:
        """Element after element, in their order: it need not commute, so lanes of its own are of no use."""
        b = self.b
        start = tuple(
            self.spread(self.constant(False if value.dtype.is_bool else 0, value.dtype), scope) for value in node.values
        )

        def over(axes: tuple[Axis, ...], scope: Scope, running: Running) -> Running:
            if axes:
                axis, *rest = axes
                self.hoist(node.values, axis, scope)
                with b.loop(0, self.scalar_index(axis.extent, scope), 1, running) as loop:
                    inner = scope.inner(axes={axis: loop.index})
                    loop.next(*over(tuple(rest), inner, tuple(loop.carried)))
                return tuple(loop.results)
            *before, some = running
            new = tuple(self.lanes(value, scope) for value in node.values)
            made = self.combine(node.combine, before, new, scope)
            following = (b.select(some, now, first) for now, first in zip(made, new, strict=True))
            return (*following, b.constant(b8, True))

        *results, _ = over(node.axes, scope, (*start, b.constant(b8, False)))
        return tuple(results)

    def combine(self, by: Sequence[Expr], left: Sequence[Value], right: Sequence[Value], scope: Scope) -> Running:
        """What comes of two neighbours."""
        if scope.vector is not None and any(_looks_up(part) for each in by for part in walk(each)):
            raise Unsupported("a combine that looks up memory, in lanes")
        inner = scope.inner()
        for side, values in (("left", left), ("right", right)):
            inner.known.update((Argument(side, n, value.dtype), value) for n, value in enumerate(values))
        return tuple(self.lanes(each, inner) for each in by)

    # ---- what a loop does not change

    def hoist(self, nodes: Iterable[Expr], axis: Axis, scope: Scope) -> None:
        """Before a loop over `axis`: compute what its body would compute again in every round."""
        waiting, seen = [*nodes], set()
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            if axis not in free_axes(node):
                # A loop that never runs must not raise.
                if self._worth_hoisting(node, scope) and (not can_raise(node) or known_nonnegative(axis.extent - 1)):
                    self.value(node, scope)
                continue
            if isinstance(node, Load):
                self.hoist_address(node.buffer, node.index, axis, scope)
            waiting.extend(self._open_parts(node))

    def _worth_hoisting(self, node: Expr, scope: Scope) -> bool:
        """All that it is made of is known here, and it is more than a literal."""
        if not isinstance(node, Expr) or isinstance(node, Const) or holds_argument(node):
            return False
        return scope.binds(free_axes(node))

    @staticmethod
    def _open_parts(node: Any) -> list[Expr]:
        """Parts that are computed whenever the node is: what a guard protects is not."""
        if isinstance(node, Guarded):
            return [node.condition, node.otherwise]
        if isinstance(node, Require):
            return [node.condition]
        if isinstance(node, Fold):
            return [*node.values]
        return [part for part in children(node) if isinstance(part, Expr)]


def _results_of(node: Reduce | Fold) -> list[Reduce | Fold]:
    """The node with each of the results that it could take."""
    if isinstance(node, Fold):
        return [Fold(node.combine, node.axes, node.values, number) for number in range(len(node.values))]
    names = [name for name, _ in REDUCTIONS[node.operation].results]
    return [Reduce(node.operation, node.axes, node.body, name) for name in names]


def _first_ways(value: Value, count: int) -> Value:
    return Value(value.type, value.names[:count], value.literal)


def wide_of(node: Reduce) -> DType:
    """What it combines in: halves in f32."""
    return f32 if node.body.dtype.is_half else node.body.dtype


def _looks_up(node: Tree) -> bool:
    """Whether its place or its loops follow from what a fold combines: it varies over lanes, and no axis says so."""
    return isinstance(node, (Load, Guarded, Reduce, Random, Position, Checked)) and holds_argument(node)


def _place(axes: tuple[Axis, ...]) -> Index:
    """The position in a box, row-major."""
    place = index(0)
    for axis in axes:
        place = place * axis.extent + of_atom(axis)
    return place
