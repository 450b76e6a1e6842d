"""What a reduction combines and its nest uses again is computed once, if that takes long: it is kept for a row.

    for i, j in box(64, 128):                       for i, j in box(64, 128):
        y[i, j] = exp(x[i, j])                          e[i, j] = exp(x[i, j])
            / sum(exp(x[i, r]) for r in box(128))   ->  for i, j in box(64, 128):
                                                        y[i, j] = e[i, j] / sum(e[i, r] for r in box(128))

The nests share the loop over rows, and `e` is memory for one row (`arrange`). A dropout in front of a layer norm draws
its numbers once instead of three times. What is done quickly is done again: to write a row and read it costs as much.

Law: a value is stored in the type that it has, so every reader sees the same bits.
"""

from __future__ import annotations

from collections.abc import Callable

from ferrite.loops.index import Axis, free_axes, of_atom
from ferrite.loops.nodes import Apply, Buffer, Expr, Load, Nest, Program, Random, Reduce, Store
from ferrite.loops.rewrite import apply_rules, can_raise, fresh_name, loaded_in, names_in, substitute_axes, walk
from ferrite.loops.shapes import contiguous_strides
from ferrite.schedule.arrange import LONGEST_ROW
from ferrite.schedule.shape import best_axis, is_quick, places_of

TWO_PASSES = ("welford", "softmax")  # reductions that go over what they combine twice


def keep_rows(program: Program) -> Program:
    return with_kept_rows(program, _once)


def with_kept_rows(program: Program, split: Callable[[Nest, Axis, str], tuple[Buffer, Nest, Nest] | None]) -> Program:
    """The program with every nest in two that `split` takes apart; it is asked with the axis that lanes take, and a
    name for what is kept."""
    nests: list[Nest] = []
    kept: list[Buffer] = []
    taken = names_in(program)
    for nest in program.nests:
        lane = best_axis(nest.axes, places_of(nest.body))
        found = split(nest, lane, fresh_name("e", taken)) if lane is not None and _may_be_split(nest) else None
        if found is None:
            nests.append(nest)
            continue
        buffer, *parts = found
        taken.add(buffer.name)
        kept.append(buffer)
        nests += parts
    if not kept:
        return program
    return Program(program.name, program.sizes, program.parameters, (*program.locals, *kept), tuple(nests))


def _may_be_split(nest: Nest) -> bool:
    """Whether nobody sees it if a part of the values is computed before the rest."""
    match nest.body:
        case (Store(buffer=buffer) as store,):
            return not can_raise(store) and buffer not in loaded_in(store)
    return False


def kept_row(nest: Nest, lane: Axis, along: Axis, value: Expr, name: str) -> tuple[Buffer, Load, Load]:
    """Memory for a value at every point of a nest, and how it is read: at the point, and along a reduction."""
    sizes = tuple(axis.extent for axis in nest.axes)
    kept = Buffer(name, value.dtype, sizes, contiguous_strides(sizes))
    here = tuple(of_atom(axis) for axis in nest.axes)
    there = tuple(of_atom(along) if axis is lane else of_atom(axis) for axis in nest.axes)
    return kept, Load(kept, here), Load(kept, there)


def goes_along(reduction: Reduce, lane: Axis) -> bool:
    """Whether it goes over one axis in the place of the one that lanes take, in rows that are short."""
    if len(reduction.axes) != 1 or reduction.axes[0].extent is not lane.extent or lane.extent.terms:
        return False
    if lane in free_axes(reduction.body):
        return False
    return lane.extent.constant * reduction.body.dtype.bytes <= LONGEST_ROW


def _once(nest: Nest, lane: Axis, name: str) -> tuple[Buffer, Nest, Nest] | None:
    nodes = dict.fromkeys(walk(nest))  # in their order
    for node in nodes:
        if isinstance(node, Reduce) and goes_along(node, lane) and _takes_long(node.body):
            (along,) = node.axes
            own = substitute_axes(node.body, {along: of_atom(lane)})
            if free_axes(node.body) <= {*nest.axes, along} and (own in nodes or node.operation in TWO_PASSES):
                kept, here, there = kept_row(nest, lane, along, own, name)
                places: dict[Expr, Expr] = {own: here, node.body: there}
                return kept, Nest(nest.axes, (Store(kept, here.index, own),)), apply_rules(nest, (places.get,))
    return None


def _takes_long(value: Expr) -> bool:
    return not all(is_quick(node) for node in walk(value) if isinstance(node, (Apply, Random)))
