"""An axis that has one value is that value.

    for i, j in box(8, 1): y[i, j] = x[i, j]     ->     for i in box(8): y[i, 0] = x[i, 0]

Law: an axis of extent 1 is always 0. A reduction keeps one axis, since it must have one.
"""

from __future__ import annotations

from ferrite.loops.index import ONE, ZERO, Axis, Index
from ferrite.loops.nodes import Expr, Fold, Nest, Program, Reduce
from ferrite.loops.rewrite import apply_rules, substitute_axes


def drop_unit_axes(program: Program) -> Program:
    nests = tuple(map(_drop_from_nest, program.nests))
    smaller = Program(program.name, program.sizes, program.parameters, program.locals, nests)
    return apply_rules(smaller, (drop_from_reduce,))


def _drop_from_nest(nest: Nest) -> Nest:
    kept, places = _divide(nest.axes)
    if not places:
        return nest
    return Nest(kept, tuple(substitute_axes(statement, places) for statement in nest.body))


def drop_from_reduce(node: Expr) -> Expr | None:
    """sum(x[i, k] for i, k in box(1, 64)) -> sum(x[0, k] for k in box(64))"""
    match node:
        case Reduce(operation=operation, axes=axes, body=body, result=result):
            kept, places = _divide_but_one(axes)
            return Reduce(operation, kept, substitute_axes(body, places), result) if places else None
        case Fold(combine=combine, axes=axes, values=values, result=number):
            kept, places = _divide_but_one(axes)
            moved = tuple(substitute_axes(value, places) for value in values)
            return Fold(combine, kept, moved, number) if places else None
    return None


def _divide_but_one(axes: tuple[Axis, ...]) -> tuple[tuple[Axis, ...], dict[Axis, Index]]:
    kept, places = _divide(axes)
    return (kept, places) if kept else (axes[:1], dict.fromkeys(axes[1:], ZERO))


def _divide(axes: tuple[Axis, ...]) -> tuple[tuple[Axis, ...], dict[Axis, Index]]:
    """The axes that stay, and where the others are."""
    return tuple(axis for axis in axes if axis.extent is not ONE), {axis: ZERO for axis in axes if axis.extent is ONE}
