"""A choice that is none is its value.

    where(c, a, a)             ->  a
    where(b8(True), a, b)      ->  a
    where(b8(False), a, b)     ->  b
    where(not_(c), a, b)       ->  where(c, b, a)
    where(c, b8(True), b8(False))  ->  c
    where(c, where(c, a, b), d)    ->  where(c, a, d)

What is dropped must not be able to raise: `where` computes both sides and the condition.
"""

from __future__ import annotations

from ferrite.loops.nodes import Apply, Const, Expr, Program, Select
from ferrite.loops.rewrite import apply_rules, can_raise


def fold_select(program: Program) -> Program:
    return apply_rules(program, (fold_equal, fold_decided, turn_around, fold_truth, fold_nested))


def fold_equal(node: Expr) -> Expr | None:
    """where(c, a, a) -> a"""
    match node:
        case Select(condition=condition, yes=yes, no=no) if yes is no and not can_raise(condition):
            return yes
    return None


def fold_decided(node: Expr) -> Expr | None:
    """where(True, a, b) -> a, where(False, a, b) -> b"""
    match node:
        case Select(condition=Const(value=value), yes=yes, no=no):
            kept, dropped = (yes, no) if value else (no, yes)
            return None if can_raise(dropped) else kept
    return None


def turn_around(node: Expr) -> Expr | None:
    """where(not_(c), a, b) -> where(c, b, a)"""
    match node:
        case Select(condition=Apply(operation="not_", operands=(condition,)), yes=yes, no=no):
            return Select(condition, no, yes)
    return None


def fold_truth(node: Expr) -> Expr | None:
    """where(c, True, False) -> c, where(c, False, True) -> not_(c)"""
    match node:
        case Select(condition=condition, yes=Const(value=True), no=Const(value=False)) if node.dtype.is_bool:
            return condition
        case Select(condition=condition, yes=Const(value=False), no=Const(value=True)) if node.dtype.is_bool:
            return Apply("not_", (condition,))
    return None


def fold_nested(node: Expr) -> Expr | None:
    """where(c, where(c, a, b), d) -> where(c, a, d), where(c, a, where(c, b, d)) -> where(c, a, d)"""
    match node:
        case Select(condition=outer, yes=Select(condition=inner, yes=yes, no=dropped), no=no) if outer is inner:
            return None if can_raise(dropped) else Select(outer, yes, no)
        case Select(condition=outer, yes=yes, no=Select(condition=inner, yes=dropped, no=no)) if outer is inner:
            return None if can_raise(dropped) else Select(outer, yes, no)
    return None
