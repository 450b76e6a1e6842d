"""Two neighbouring axes that every access runs through as one are one.

    for i, j in box(8, 64): y[i, j] = exp(x[i, j])
    ->
    for i_j in box(512): y[i_j // 64, i_j % 64] = exp(x[i_j // 64, i_j % 64])

The box has one axis, and the place in memory of every access is `i_j`: the division is in the indices only, and
cancels when they are made linear. Where it does not (strides with gaps, transposes, `value(j)`, guards on one of the
two), the axes stay apart.

Law: i = k // n and j = k % n for k = n*i + j run through the same points in the same order. That is all that stores,
accumulations and reductions (argmax counts positions in that order) can see.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from ferrite.loops.index import (
    Axis,
    FloorDiv,
    Index,
    Mod,
    atoms,
    coefficient_of,
    floordiv,
    mod,
    multiply,
    of_atom,
    parts,
)
from ferrite.loops.nodes import (
    Accumulate,
    Checked,
    Expr,
    Fold,
    FoldScan,
    Load,
    Nest,
    Position,
    Program,
    Random,
    Reduce,
    Scan,
    Store,
)
from ferrite.loops.rewrite import Tree, apply_rules, fresh_name, names_in, substitute_axes, walk
from ferrite.loops.shapes import linear

T = TypeVar("T", bound=Tree)


def merge_axes(program: Program) -> Program:
    taken = frozenset(names_in(program))
    nests = tuple(_merge_in_nest(nest, taken) for nest in program.nests)
    return Program(program.name, program.sizes, program.parameters, program.locals, nests)


def _merge_in_nest(nest: Nest, taken: frozenset[str]) -> Nest:
    joins = Joins(taken)
    axes, body = merged(nest.axes, nest.body, joins)
    return merged_in_reductions(Nest(axes, body), joins)


def merged_in_reductions(tree: T, joins: Joins) -> T:
    """The same with the axes of every reduction in it merged."""

    def merge_in_reduce(node: Expr) -> Expr | None:
        """sum(x[i, k, l] for k, l in box(4, 8)) -> sum(x[i, k_l // 8, k_l % 8] for k_l in box(32))"""
        match node:
            case Reduce(operation=operation, axes=axes, body=body, result=result):
                kept, (moved,) = merged(axes, (body,), joins)
                return Reduce(operation, kept, moved, result) if kept != axes else None
            case Fold(combine=combine, axes=axes, values=values, result=number):
                kept, several = merged(axes, values, joins)
                return Fold(combine, kept, several, number) if kept != axes else None
        return None

    if not any(isinstance(node, (Reduce, Fold)) and len(node.axes) > 1 for node in walk(tree)):
        return tree
    return apply_rules(tree, (merge_in_reduce,))


class Joins:
    """The axes that pairs became. A pair becomes the same axis wherever it is bound in a nest, so that reductions which
    are computed together still are."""

    def __init__(self, taken: frozenset[str]) -> None:
        self.taken = taken
        self.names: set[str] = set()
        self.axes: dict[tuple[Axis, Axis], Axis] = {}

    def of(self, outer: Axis, inner: Axis) -> Axis:
        found = self.axes.get((outer, inner))
        if found is None:
            name = fresh_name(f"{outer.name}_{inner.name}", self.taken, self.names)
            self.names.add(name)
            found = self.axes[outer, inner] = Axis(name, multiply(outer.extent, inner.extent))
        return found


def merged(axes: tuple[Axis, ...], body: tuple[T, ...], joins: Joins) -> tuple[tuple[Axis, ...], tuple[T, ...]]:
    """The axes with every pair merged that can be, from the innermost pair outwards."""
    for position in reversed(range(1, len(axes))):
        outer, inner = axes[position - 1], axes[position]
        if any(_steps_apart(part, outer, inner) for part in body):
            continue
        joined = joins.of(outer, inner)
        place = of_atom(joined)
        moves = {outer: floordiv(place, inner.extent), inner: mod(place, inner.extent)}
        moved = tuple(substitute_axes(part, moves) for part in body)
        if all(_runs_along(part, joined) for part in moved):
            axes = (*axes[: position - 1], joined, *axes[position + 1 :])
            body = moved
    return axes, body


def _steps_apart(part: Tree, outer: Axis, inner: Axis) -> bool:
    """Whether a step of the outer axis is known not to be the end of the inner one, at some place: most pairs that
    cannot be merged are found so, without trying."""
    for node in walk(part):
        for place in places_in(node):
            far, near = coefficient_of(place, outer), coefficient_of(place, inner)
            if far is not None and near is not None and far is not multiply(near, inner.extent):
                return True
    return False


def _runs_along(part: Tree, axis: Axis) -> bool:
    """Whether no place and no value in it needs the axis divided."""
    return not any(_divides(place, axis) for node in walk(part) for place in places_in(node))


def places_in(node: Tree) -> Iterator[Index]:
    """What a node uses of indices: where in memory, and numbers."""
    match node:
        case Load(buffer=buffer, index=places) | Store(buffer=buffer, index=places):
            yield linear(places, buffer.strides)
        case Accumulate(buffer=buffer, index=places):
            yield linear(places, buffer.strides)
        case Scan(targets=targets) | FoldScan(targets=targets):
            yield from (linear(target[1], target[0].strides) for target in targets if target is not None)
        case Position(index=place) | Checked(size=place) | Random(counter=place):
            yield place


def _divides(place: Index, axis: Axis) -> bool:
    """Whether the axis stands inside a division. Inside data it does not count: what is there has places of its own."""
    return any(
        any(_mentions(part, axis) for part in parts(atom))
        if isinstance(atom, (FloorDiv, Mod))
        else any(_divides(part, axis) for part in parts(atom))
        for atom in atoms(place)
    )


def _mentions(place: Index, axis: Axis) -> bool:
    return any(atom is axis or any(_mentions(part, axis) for part in parts(atom)) for atom in atoms(place))
