"""A reduction that a loop around it would repeat gets a nest of its own, in front.

    for n, c, h in box(32, 64, 49):                    for c in box(64):
        y[n, c, h] = x[n, c, h]                ->          m[c] = sum(x[k, c, l] for k, l in box(32, 49))
            - sum(x[k, c, l] for k, l in box(32, 49))  for n, c, h in box(32, 64, 49):
                                                           y[n, c, h] = x[n, c, h] - m[c]

A loop may repeat it in stretches only: the statistics of a group are the same for all channels of the group.

    for n, c, h in box(4, 512, 49):                    for n, c in box(4, 8):
        y[n, c, h] = x[n, c, h]                ->          m[n, c] = sum(x[n, 64*c + k, l] for k, l in box(64, 49))
            - sum(x[n, 64*(c // 64) + k, l]            for n, c, h in box(4, 512, 49):
                for k, l in box(64, 49))                   y[n, c, h] = x[n, c, h] - m[n, c // 64]

One that depends on the first loops of its nest, and on nothing inside of them, stays: it is computed before the inner
loops start. What was lifted may share loops with its reader again (`arrange.py`), in an order that repeats nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from ferrite.decisions import Decision
from ferrite.loops.index import ONE, Axis, Index, divides, floordiv, free_axes, index, of_atom, product
from ferrite.loops.nodes import Buffer, Expr, Load, Nest, Program, Reduce, Store
from ferrite.loops.passes.merge_axes import places_in
from ferrite.loops.rewrite import apply_rules, fresh_name, names_in, substitute_axes, walk
from ferrite.loops.shapes import contiguous_strides
from ferrite.schedule.cost import element_bytes, operations_in
from ferrite.schedule.decided import Decided, on, refused
from ferrite.schedule.split_axes import divisors_of
from ferrite.schedule.split_reduction import box_of, movable_reductions, reductions_that_stay


@dataclass(frozen=True)
class Around:
    """A loop around a reduction, of whose points so many in a row have the same one."""

    axis: Axis
    grain: Index

    @property
    def lifted(self) -> Axis:
        """The loop that has one point for each reduction."""
        return self.axis if self.grain is ONE else Axis(self.axis.name, floordiv(self.axis.extent, self.grain))

    @property
    def place(self) -> Index:
        """Where the reduction of a point is."""
        return floordiv(of_atom(self.axis), self.grain)


def lift_reductions(program: Program) -> Decided:
    """Nest by nest; inner ones first, so that a reduction inside of a lifted one can be lifted as well."""
    taken = names_in(program)
    buffers, nests = [*program.locals], []
    decisions: list[Decision] = []
    for nest in program.nests:
        while repeated := _repeated(nest):
            around = _around(repeated[0], nest)
            alike = [node for node in repeated if _around(node, nest) == around]
            places = {node: _buffer_for(node, around, taken) for node in alike}
            buffers += places.values()
            decisions += [
                Decision("lift", (program.name, buffer.name), True, _saved(node, around, nest))
                for node, buffer in places.items()
            ]
            nests.append(_lifted(places, around))
            nest = _reading(nest, places, around)
        nests.append(nest)
        for node, why in reductions_that_stay(nest):
            if nest.axes and _is_repeated(node, nest):
                reason = f"{box_of(node)} is computed again and again: {why}"
                decisions.append(refused("lift", on(program, nest.body), reason))
    if len(nests) == len(program.nests):
        return Decided(program, tuple(decisions))
    lifted = Program(program.name, program.sizes, program.parameters, tuple(buffers), tuple(nests))
    return Decided(lifted, tuple(decisions))


def _lifted(places: dict[Reduce, Buffer], around: tuple[Around, ...]) -> Nest:
    axes = tuple(each.lifted for each in around)
    at = tuple(map(of_atom, axes))
    first = {each.axis: each.grain * of_atom(each.lifted) for each in around if each.grain is not ONE}
    return Nest(axes, tuple(Store(buffer, at, substitute_axes(node, first, axes)) for node, buffer in places.items()))


def _saved(node: Reduce, around: tuple[Around, ...], nest: Nest) -> str:
    """What it would cost to stay, and what it costs to be read. To read what was combined once is never dearer."""
    axes = [each.axis for each in around]
    rounds = product([*(axis.extent for axis in nest.axes if axis not in axes), *(each.grain for each in around)])
    again, read = operations_in(node.body, node.axes) + 1, element_bytes(node.dtype)
    return f"{box_of(node)} once instead of {rounds} times: {again} operations a step again, or {read} bytes read"


def _repeated(nest: Nest) -> list[Reduce]:
    """Reductions that would be computed again for other points, and hold no such themselves."""
    found = [node for node in movable_reductions(nest) if nest.axes and _is_repeated(node, nest)]
    return [node for node in found if not any(part in found for part in walk(node.body))]


def _is_repeated(node: Reduce, nest: Nest) -> bool:
    around = _around(node, nest)
    axes = tuple(each.axis for each in around)
    return not axes or axes != nest.axes[: len(axes)] or any(each.grain is not ONE for each in around)


def _around(node: Reduce, nest: Nest) -> tuple[Around, ...]:
    return tuple(Around(axis, _grain(node, axis)) for axis in nest.axes if axis in free_axes(node))


def _grain(node: Reduce, axis: Axis) -> Index:
    """How many points of the axis in a row do not matter to a reduction: it divides the axis, and knows no rest."""
    divisors = {n for part in walk(node) for place in places_in(part) for n in divisors_of(place, axis)}
    known = sorted((n.constant for n in divisors if not n.terms and n.constant > 1), reverse=True)
    names = [fresh_name(name, names_in(node)) for name in ("coarse", "rest")] if known else []
    for grain in known:
        coarse, rest = (Axis(*each) for each in zip(names, (floordiv(axis.extent, grain), index(grain)), strict=True))
        moved = {axis: of_atom(coarse) * grain + of_atom(rest)}
        if divides(grain, axis.extent) and rest not in free_axes(substitute_axes(node, moved)):
            return index(grain)
    return ONE


def _buffer_for(node: Reduce, around: tuple[Around, ...], taken: set[str]) -> Buffer:
    name = fresh_name(f"{node.operation}_{node.result}", taken)
    taken.add(name)
    sizes = tuple(each.lifted.extent for each in around)
    return Buffer(name, node.dtype, sizes, contiguous_strides(sizes))


def _reading(nest: Nest, places: dict[Reduce, Buffer], around: tuple[Around, ...]) -> Nest:
    at = tuple(each.place for each in around)

    def read(node: Expr) -> Expr | None:
        """sum(x[i, k] for k in box(64)) -> s[i]"""
        return Load(places[node], at) if isinstance(node, Reduce) and node in places else None

    return apply_rules(nest, (read,))
