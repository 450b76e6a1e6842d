"""The exponentials of a softmax are computed once: they are kept for a row, summed, and divided.

    for i, j in box(64, 128):                       for i, j in box(64, 128):
        y[i, j] = exp(x[i, j] - M) / S                  e[i, j] = exp(x[i, j] - max(x[i, r] for r in box(128)))
                                             ->     for i, j in box(64, 128):
                                                        y[i, j] = e[i, j] / sum(e[i, r] for r in box(128))

where M is `softmax(x[i, r] for r in box(128))` and S its `.sum`. The nests share the loop over rows, and `e` is memory
for one row (`arrange`). Taken only where a row fits there: to write longer ones and read them again costs more than a
second exponential.

Law: the sum has the same terms in the same order, each rounded to its type before it is added.
"""

from __future__ import annotations

from ferrite.loops.index import Axis, of_atom
from ferrite.loops.nodes import Apply, Buffer, Expr, Load, Nest, Program, Reduce, Store
from ferrite.loops.rewrite import apply_rules, can_raise, fresh_name, names_in, substitute_axes, walk
from ferrite.loops.shapes import contiguous_strides
from ferrite.schedule.arrange import LONGEST_ROW
from ferrite.schedule.shape import best_axis, places_of


def keep_exponentials(program: Program) -> Program:
    nests: list[Nest] = []
    kept: list[Buffer] = []
    taken = names_in(program)
    for nest in program.nests:
        found = _exponential(nest)
        if found is None:
            nests.append(nest)
            continue
        buffer, *parts = _in_two(nest, *found, fresh_name("e", taken))
        taken.add(buffer.name)
        kept.append(buffer)
        nests += parts
    if not kept:
        return program
    return Program(program.name, program.sizes, program.parameters, (*program.locals, *kept), tuple(nests))


def _exponential(nest: Nest) -> tuple[Apply, Reduce, Axis] | None:
    """exp(x - max), the reduction that gives the maximum, and the axis of the nest along which it goes."""
    lane = best_axis(nest.axes, places_of(nest.body))
    if len(nest.body) != 1 or not isinstance(nest.body[0], Store) or lane is None or can_raise(nest.body[0]):
        return None
    nodes = {*walk(nest.body[0])}
    for node in nodes:
        match node:
            case Apply(operation="exp", operands=(Apply(operation="sub", operands=(own, Reduce() as most)),)):
                total = Reduce(most.operation, most.axes, most.body, "sum")
                if most.operation == "softmax" and total in nodes and _is_along(own, most, lane):
                    return node, most, lane
    return None


def _is_along(own: Expr, most: Reduce, lane: Axis) -> bool:
    """Whether the reduction goes over the very expression, along the axis that lanes take, in rows that are short."""
    if len(most.axes) != 1 or most.axes[0].extent is not lane.extent or lane.extent.terms:
        return False
    if lane.extent.constant * own.dtype.bytes > LONGEST_ROW:
        return False
    return substitute_axes(most.body, {most.axes[0]: of_atom(lane)}) is own


def _in_two(nest: Nest, exponential: Apply, most: Reduce, lane: Axis, name: str) -> tuple[Buffer, Nest, Nest]:
    sizes = tuple(axis.extent for axis in nest.axes)
    kept = Buffer(name, exponential.dtype, sizes, contiguous_strides(sizes))
    here = tuple(of_atom(axis) for axis in nest.axes)
    there = tuple(of_atom(most.axes[0]) if axis is lane else of_atom(axis) for axis in nest.axes)
    greatest = Reduce("max", most.axes, most.body, "value")
    total = Reduce("sum", most.axes, Load(kept, there), "value")
    first: dict[Expr, Expr] = {most: greatest}
    second: dict[Expr, Expr] = {
        exponential: Load(kept, here),
        Reduce("softmax", most.axes, most.body, "sum"): total,
    }
    store = Store(kept, here, apply_rules(exponential, [lambda node: first.get(node)]))
    return kept, Nest(nest.axes, (store,)), apply_rules(nest, [lambda node: second.get(node)])
