"""Conditions that the bounds of indices decide are decided now, and with them the guards that ask for them.

    for i in box(8): y[i] = guarded(value(i) < i64(8), x[i], f32(0.0))     ->  y[i] = x[i]
    for i in box(8): y[i] = guarded(value(i) >= i64(8), x[i - 8], z[i])    ->  y[i] = z[i]
    for i in box(8): y[i] = require(value(i + 1) != i64(0), x[i], ...)     ->  y[i] = x[i]

Law: `known_nonnegative` proves an order between two indices for every point of the loops. Nothing that can raise is
dropped from a condition; the branch of `guarded` that is never taken is never computed, and may go with all it holds.
A requirement that is always met goes; one that is never met stays: it raises.
"""

from __future__ import annotations

from ferrite.loops.dtypes import b8
from ferrite.loops.index import Index, constant, known_equal, known_nonnegative
from ferrite.loops.nodes import Apply, Const, Expr, Guarded, Position, Program, Require
from ferrite.loops.rewrite import apply_rules, can_raise

TRUE, FALSE = Const(True, b8), Const(False, b8)


def simplify_guards(program: Program) -> Program:
    return apply_rules(program, RULES)


def decide_comparison(node: Expr) -> Expr | None:
    """value(i) < value(s0) -> True where i is known to be below s0"""
    match node:
        case Apply(operation=operation, operands=(left, right)) if operation in _NEGATED:
            first, second = as_index(left), as_index(right)
            if first is None or second is None or can_raise(node):
                return None
            if _proven(operation, first, second):
                return TRUE
            if _proven(_NEGATED[operation], first, second):
                return FALSE
    return None


_NEGATED = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt", "eq": "ne", "ne": "eq"}


def as_index(node: Expr) -> Index | None:
    """An integer that is made of sizes and positions."""
    match node:
        case Position(index=place):
            return place
        case Const(value=int() as value, kind=kind) if kind.is_int:
            return constant(value)
    return None


def _proven(operation: str, left: Index, right: Index) -> bool:
    match operation:
        case "le":
            return known_nonnegative(right - left)
        case "lt":
            return known_nonnegative(right - left - 1)
        case "ge" | "gt":
            return _proven("le" if operation == "ge" else "lt", right, left)
        case "eq":
            return known_equal(left, right) or (_proven("le", left, right) and _proven("le", right, left))
    return _proven("lt", left, right) or _proven("lt", right, left)


def fold_logic(node: Expr) -> Expr | None:
    """c & True -> c, c & False -> False, c | False -> c, c | True -> True, c & c -> c, not_(True) -> False"""
    match node:
        case Apply(operation="not_", operands=(Const(value=bool() as value),)):
            return FALSE if value else TRUE
        case Apply(operation="and_" | "or_" as operation, operands=(left, right)) if node.dtype.is_bool:
            if left is right:
                return left
            for known, other in ((left, right), (right, left)):
                if isinstance(known, Const):
                    if known.value is (operation == "and_"):
                        return other
                    return None if can_raise(other) else known
    return None


def fold_guard(node: Expr) -> Expr | None:
    """guarded(True, a, b) -> a, guarded(False, a, b) -> b, guarded(c, a, a) -> a"""
    match node:
        case Guarded(condition=Const(value=value), value=inside, otherwise=otherwise):
            return inside if value else otherwise
        case Guarded(condition=condition, value=inside, otherwise=otherwise) if inside is otherwise:
            return None if can_raise(condition) else inside
    return None


def drop_requirement(node: Expr) -> Expr | None:
    """require(True, a, ...) -> a"""
    match node:
        case Require(condition=Const(value=True), value=value):
            return value
    return None


RULES = (decide_comparison, fold_logic, fold_guard, drop_requirement)
