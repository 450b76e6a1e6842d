"""A reduction that a loop around it would repeat gets a nest of its own, in front.

    for n, c, h in box(32, 64, 49):                    for c in box(64):
        y[n, c, h] = x[n, c, h]                ->          m[c] = sum(x[k, c, l] for k, l in box(32, 49))
            - sum(x[k, c, l] for k, l in box(32, 49))  for n, c, h in box(32, 64, 49):
                                                           y[n, c, h] = x[n, c, h] - m[c]

One that depends on the first loops of its nest, and on nothing inside of them, stays: it is computed before the inner
loops start. What was lifted may share loops with its reader again (`arrange.py`), in an order that repeats nothing.
"""

from __future__ import annotations

from ferrite.decisions import Decision
from ferrite.loops.index import Axis, free_axes, of_atom, product
from ferrite.loops.nodes import Buffer, Expr, Load, Nest, Program, Reduce, Store
from ferrite.loops.rewrite import apply_rules, fresh_name, names_in, walk
from ferrite.loops.shapes import contiguous_strides
from ferrite.schedule.cost import element_bytes, operations_in
from ferrite.schedule.decided import Decided, on, refused
from ferrite.schedule.split_reduction import box_of, movable_reductions, reductions_that_stay


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
            at = tuple(map(of_atom, around))
            decisions += [
                Decision("lift", (program.name, buffer.name), True, _saved(node, around, nest))
                for node, buffer in places.items()
            ]
            nests.append(Nest(around, tuple(Store(buffer, at, node) for node, buffer in places.items())))
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


def _saved(node: Reduce, around: tuple[Axis, ...], nest: Nest) -> str:
    """What it would cost to stay, and what it costs to be read. To read what was combined once is never dearer."""
    rounds = product(axis.extent for axis in nest.axes if axis not in around)
    again, read = operations_in(node.body, node.axes) + 1, element_bytes(node.dtype)
    return f"{box_of(node)} once instead of {rounds} times: {again} operations a step again, or {read} bytes read"


def _repeated(nest: Nest) -> list[Reduce]:
    """Reductions that would be computed again for other points, and hold no such themselves."""
    found = [node for node in movable_reductions(nest) if nest.axes and _is_repeated(node, nest)]
    return [node for node in found if not any(part in found for part in walk(node.body))]


def _is_repeated(node: Reduce, nest: Nest) -> bool:
    around = _around(node, nest)
    return not around or around != nest.axes[: len(around)]


def _around(node: Reduce, nest: Nest) -> tuple[Axis, ...]:
    return tuple(axis for axis in nest.axes if axis in free_axes(node))


def _buffer_for(node: Reduce, around: tuple[Axis, ...], taken: set[str]) -> Buffer:
    name = fresh_name(f"{node.operation}_{node.result}", taken)
    taken.add(name)
    sizes = tuple(axis.extent for axis in around)
    return Buffer(name, node.dtype, sizes, contiguous_strides(sizes))


def _reading(nest: Nest, places: dict[Reduce, Buffer], around: tuple[Axis, ...]) -> Nest:
    at = tuple(map(of_atom, around))

    def read(node: Expr) -> Expr | None:
        """sum(x[i, k] for k in box(64)) -> s[i]"""
        return Load(places[node], at) if isinstance(node, Reduce) and node in places else None

    return apply_rules(nest, (read,))
