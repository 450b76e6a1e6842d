"""Reductions as loops with running values in registers.

Outside of vector lanes a reduction gets lanes of its own, along the axis that reads memory without gaps: several
vectors of partial results, combined in a fixed order at the end. Inside of lanes (a sum over rows, one result in each
lane) its loops are plain. Either way the order depends on sizes alone, never on threads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ferrite.errors import Unsupported
from ferrite.loops.dtypes import DType, f32, i64
from ferrite.loops.index import Axis, free_axes, index, known_nonnegative, of_atom, product
from ferrite.loops.nodes import Const, Expr, Guarded, Reduce
from ferrite.loops.rewrite import can_raise, children, walk
from ferrite.native.builder import Value
from ferrite.native.evaluate import Evaluator
from ferrite.native.math import FUNCTIONS
from ferrite.native.scope import Lanes, Scope
from ferrite.schedule.shape import best_axis, loads_in, ways_of, width_of

Running = tuple[Value, ...]


@dataclass(frozen=True)
class Fold:
    """How values are gathered: what one starts with, how a value joins, how two partial results join."""

    start: Callable[[DType], list[tuple[DType, bool | int | float]]]
    join: Callable[[Any, Running, Running], Running]  # (builder, running, new) -> running
    merge: Callable[[Any, Running, Running], Running]


def _simple(operation: str, start: Callable[[DType], bool | int | float]) -> Fold:
    def both(b: Any, running: Running, new: Running) -> Running:
        return (getattr(b, operation)(running[0], new[0]),)

    return Fold(lambda dtype: [(dtype, start(dtype))], both, both)


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


def _place(beats: str, start: Callable[[DType], bool | int | float]) -> Fold:
    """The best value and its position. A position of -1 means none yet."""

    def join(b: Any, running: Running, new: Running) -> Running:
        (value, place), (candidate, position) = running, new
        better = getattr(b, beats)(candidate, value)
        if value.dtype.is_float:
            better = b.or_(better, b.and_(b.isnan(candidate), b.not_(b.isnan(value))))
        better = b.or_(better, b.lt(place, 0))
        return b.select(better, candidate, value), b.select(better, position, place)

    def merge(b: Any, left: Running, right: Running) -> Running:
        """Of equals the one that stands first; a side that saw nothing loses."""
        (value, place), (candidate, position) = left, right
        same = b.eq(candidate, value)
        better = getattr(b, beats)(candidate, value)
        if value.dtype.is_float:
            both = b.and_(b.isnan(candidate), b.isnan(value))
            same = b.or_(same, both)
            better = b.or_(better, b.and_(b.isnan(candidate), b.not_(b.isnan(value))))
        better = b.or_(better, b.and_(same, b.lt(position, place)))
        better = b.or_(b.and_(better, b.ge(position, 0)), b.lt(place, 0))
        return b.select(better, candidate, value), b.select(better, position, place)

    return Fold(lambda dtype: [(dtype, start(dtype)), (i64, -1)], join, merge)


FOLDS: dict[str, Fold] = {
    "sum": _simple("add", lambda dtype: 0.0 if dtype.is_float else 0),
    "prod": _simple("mul", lambda dtype: 1.0 if dtype.is_float else 1),
    "min": _simple("minimum", _highest),
    "max": _simple("maximum", _lowest),
    "any": _simple("or_", lambda dtype: False),
    "all": _simple("and_", lambda dtype: True),
    "argmin": _place("lt", _highest),
    "argmax": _place("gt", _lowest),
}


class Reducer(Evaluator):
    """An evaluator that knows reductions."""

    def reduce(self, node: Reduce, scope: Scope) -> Value:
        """All results of one reduction are kept; the node that asked takes one."""
        key = (node.operation, node.axes, node.body)
        found = scope.find((*key, node.result))
        if found is None:
            if scope.vector is not None and not scope.varies(node):
                raise Unsupported("a reduction that is the same in all lanes, met inside of them")
            for name, value in self._results(node, scope).items():
                scope.known[(*key, name)] = value
            found = scope.find((*key, node.result))
        assert found is not None
        return found

    def _results(self, node: Reduce, scope: Scope) -> dict[str, Value]:
        dtype = node.body.dtype
        wide = f32 if dtype.is_half else dtype
        match node.operation:
            case "welford":
                return self._moments(node, scope, wide)
            case "softmax":
                (most,) = self._fold("max", node, scope, wide, lambda v: v)
                exp = FUNCTIONS["exp"]
                (total,) = self._fold("sum", node, scope, wide, lambda v: exp(self.b, self.b.sub(v, most)))
                made = {"max": most, "sum": total}
            case "argmin" | "argmax":
                value, place = self._fold(node.operation, node, scope, wide, lambda v: v)
                made = {"value": value, "index": place}
            case _:
                (value,) = self._fold(node.operation, node, scope, wide, lambda v: v)
                made = {"value": value}
        return {name: self.b.convert(v, dtype) if v.dtype is wide else v for name, v in made.items()}

    def _moments(self, node: Reduce, scope: Scope, wide: DType) -> dict[str, Value]:
        """In two passes: the mean, then the distances from it. Of nothing, zeros."""
        b = self.b
        count = b.convert(self.scalar_index(product(axis.extent for axis in node.axes), scope), wide)
        (total,) = self._fold("sum", node, scope, wide, lambda v: v)
        mean = b.select(b.eq(count, 0.0), b.like(total, 0.0), b.div(total, count))

        def squared(v: Value) -> Value:
            distance = b.sub(v, mean)
            return b.mul(distance, distance)

        (m2,) = self._fold("sum", node, scope, wide, squared)
        return {"mean": b.convert(mean, node.body.dtype), "m2": b.convert(m2, node.body.dtype)}

    # ---- loops

    def _fold(
        self, name: str, node: Reduce, scope: Scope, wide: DType, change: Callable[[Value], Value]
    ) -> tuple[Value, ...]:
        fold = FOLDS[name]
        own = None if scope.vector is not None else best_axis(node.axes, loads_in(node.body))
        if scope.vector is not None:
            lanes, ways = scope.vector.lanes, scope.vector.ways
        elif own is None:
            lanes, ways = 1, 1
        else:
            lanes, ways = self.b.target.vector_bytes // width_of(node.body), ways_of(node.body)
        start = tuple(
            self.b.with_ways(self.b.splat(self.b.constant(dtype, number), lanes), ways)
            for dtype, number in fold.start(wide)
        )
        loops = [axis for axis in node.axes if axis is not own]
        running = self._around(loops, own, node, scope, fold, wide, change, start, lanes, ways)
        if own is None:
            return running
        return self.b.reduce_by(lambda x, y: fold.merge(self.b, x, y), running)

    def _around(
        self,
        loops: list[Axis],
        own: Axis | None,
        node: Reduce,
        scope: Scope,
        fold: Fold,
        wide: DType,
        change: Callable[[Value], Value],
        running: Running,
        lanes: int,
        ways: int,
    ) -> Running:
        """The loops over the axes that are not in lanes, outermost first, then the one that is."""
        if not loops:
            if own is None:
                return self._joined(node, scope, fold, wide, change, running)
            return self._in_lanes(own, node, scope, fold, wide, change, running, lanes, ways)
        axis, *rest = loops
        self.hoist([node.body], axis, scope)
        with self.b.loop(0, self.scalar_index(axis.extent, scope), 1, running) as loop:
            inner = scope.inner(axes={axis: loop.index})
            loop.next(*self._around(rest, own, node, inner, fold, wide, change, tuple(loop.carried), lanes, ways))
        return tuple(loop.results)

    def _in_lanes(
        self,
        axis: Axis,
        node: Reduce,
        scope: Scope,
        fold: Fold,
        wide: DType,
        change: Callable[[Value], Value],
        running: Running,
        lanes: int,
        ways: int,
    ) -> Running:
        """Whole groups of vectors, then what is left under a mask."""
        b = self.b
        extent = self.scalar_index(axis.extent, scope)
        self.hoist([node.body], axis, scope)
        whole = b.sub(extent, b.floormod(extent, lanes * ways))
        with b.loop(0, whole, lanes * ways, running) as loop:
            inner = scope.inner(axes={axis: loop.index}, vector=Lanes(axis, loop.index, lanes, ways))
            loop.next(*self._joined(node, inner, fold, wide, change, tuple(loop.carried)))
        running = tuple(loop.results)
        with b.if_(b.lt(whole, extent), running) as branch:
            tail = b.tail(b.sub(extent, whole), lanes, ways)
            inner = scope.inner(axes={axis: whole}, vector=Lanes(axis, whole, lanes, ways), mask=tail.mask)
            branch.give(*self._joined(node, inner, fold, wide, change, running))
        return tuple(branch.results)

    def _joined(
        self, node: Reduce, scope: Scope, fold: Fold, wide: DType, change: Callable[[Value], Value], running: Running
    ) -> Running:
        b = self.b
        value = change(b.convert(self.lanes(node.body, scope), wide))
        new: Running = (value,)
        if len(running) == 2:
            place = index(0)
            for axis in node.axes:
                place = place * axis.extent + of_atom(axis)
            new = (value, self.spread(self.index(place, scope), scope))
        following = fold.join(b, running, new)
        if scope.mask is None:
            return following
        return tuple(b.select(scope.mask, now, before) for now, before in zip(following, running, strict=True))

    # ---- what a loop does not change

    def hoist(self, nodes: list[Expr], axis: Axis, scope: Scope) -> None:
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
            waiting.extend(self._open_parts(node))

    def _worth_hoisting(self, node: Expr, scope: Scope) -> bool:
        """All of its axes are bound, and it is more than a literal. Vector lanes never hold what is the same in all."""
        if isinstance(node, Const) or not isinstance(node, Expr):
            return False
        if scope.vector is not None and any(isinstance(part, Reduce) for part in walk(node)) and not scope.varies(node):
            return False
        return scope.binds(free_axes(node))

    @staticmethod
    def _open_parts(node: Any) -> list[Expr]:
        """Parts that are computed whenever the node is: what a guard protects is not."""
        if isinstance(node, Guarded):
            return [node.condition, node.otherwise]
        return [part for part in children(node) if isinstance(part, Expr)]
