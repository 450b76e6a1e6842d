"""One test for each rule of the checker: a program that keeps it, and one that breaks it and nothing else."""

from __future__ import annotations

import ast
import inspect
import re

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from ferrite.errors import Malformed
from ferrite.loops import check
from ferrite.loops import index as indices
from ferrite.loops.check import check_program
from ferrite.loops.dtypes import f32, f64, i64
from ferrite.loops.index import Axis, Index, Size
from ferrite.loops.nodes import (
    Apply,
    Argument,
    Buffer,
    Cast,
    Const,
    Fold,
    Load,
    Nest,
    Parameter,
    Position,
    Program,
    Reduce,
    Scan,
    Statement,
    Store,
)
from ferrite.loops.shapes import contiguous_strides
from ferrite.loops.text import parse_program, show
from tests.unit.loop_programs import programs

random_programs = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])

PARAMETERS = (
    "s0: size(2, 64), s1: size(0), x: f32[8, 64], d: f64[8], n: i64[8], c: b8[8], w: f32[s0], h: f16[8],"
    " y: out(f32[8, 64]), z: inout(f32[8]), m: inout(i64[8]), v: inout(f32[s0])"
)
FILL = "    for i, j in box(8, 64):\n        y[i, j] = x[i, j]\n"


def body(*lines: str, parameters: str = PARAMETERS, fill: str = FILL) -> str:
    """A program with these lines in a loop over i < 8."""
    inner = "".join(f"        {line}\n" for line in lines)
    return f"def program({parameters}):\n{fill}    for i in box(8):\n{inner}"


def broken_rule(program: Program | str) -> str | None:
    """The name of the rule that a program breaks, None if it keeps all."""
    try:
        check_program(parse_program(program) if isinstance(program, str) else program, "a test")
    except Malformed as refusal:
        return refusal.title.partition(":")[0] if refusal.where == "a test" else f"a text: {refusal}"
    return None


# ---- the list of rules


def listed_rules() -> list[str]:
    assert check.__doc__ is not None
    rules = check.__doc__.partition("\nNote [")[0]
    return re.findall(r"^    (\w[\w ]*?)  +\S", rules, re.MULTILINE)


def test_every_rule_in_the_code_is_in_the_list() -> None:
    called = {
        node.args[0].value  # type: ignore[attr-defined]
        for node in ast.walk(ast.parse(inspect.getsource(check)))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "_refuse"
    }
    assert called == set(listed_rules())


def test_every_rule_has_a_test() -> None:
    tested = {rule for rule, _ in BROKEN} | {rule for rule, _ in BROKEN_NODES}
    assert tested == set(listed_rules())


# ---- programs that keep the rules


@random_programs
@given(programs())
def test_random_programs_keep_all_rules(program: Program) -> None:
    check_program(program, "a test")


KEPT = [
    body("z[i] = x[i, 3]"),
    body("z[i] += x[i, j] * x[i, j]").replace("for i in box(8)", "for i, j in box(8, 64)"),
    body("z[i] = f32(argmax(x[i, k] for k in box(64)).index)"),
    body("z[i] = max(w[k] for k in box(s0))"),
    body("z[i] = sum(v[k] for k in box(s0)) + sum(x[i, 0] for k in box(s1))"),
    body("z[i] = x[7 - i, 63 - 9*i]"),
    body("z[i] = x[i, (5*i) % 64]"),
    body("z[i] = x[i, min(max(100*i - 3, 0), 63)]"),
    body("z[i] = guarded(value(i) >= i64(1), x[i - 1, 0], f32(0.0))"),
    body("z[i] = require(value(i) >= i64(1), x[i - 1, 0], 'ValueError', 'no')"),
    body("z[i] = require(c[j], x[i, 0], 'ValueError', 'no')").replace("for i in box(8)", "for i, j in box(8, 8)"),
    body("z[i] = x[at(n[i], 0, 7), 0]"),
    body("z[i] = x[at(checked(n[i], 8, True, 'IndexError', ''), 0, 7), 0]"),
    body("z[i] = w[at(n[i], 0, s0 - 1)]"),
    body("z[i] = w[at(checked(n[i], s0, True, 'IndexError', ''), 0, s0 - 1)]"),
    body("z[at(n[i], 0, 7)] = x[i, 0]"),
    # Facts about sizes that the program does not carry are trusted: s0 may be even.
    body("z[i] = sum(w[2*k + 1] for k in box(s0 // 2))"),
    body("z[i] = max(w[k] for k in box(s0 - s1))"),
    # The same value to one element.
    body("m[i] = n[i]").replace("for i in box(8)", "for i, j in box(8, 64)"),
    body("z[i] = x[i, k]").replace("for i in box(8)", "for i, k in box(8, 1)"),
    # A loop that never runs reads nothing.
    body("z[i] = x[i + 100, 0]").replace("for i in box(8)", "for i, j in box(8, 0)"),
    body("z[i] = sum(x[i, k + 100] for k in box(0))"),
    # What a statement wrote, the next one reads.
    body("t[i] = x[i, 0]", "z[i] = t[i]", fill="    t = local(f32[8])\n" + FILL),
    # Bools are ordered.
    body("for k in scan(8):", "    _, m[k] = cummax(where(c[k], c[0], c[k]))").replace("i in box(8)", "_ in box()"),
    body("m[i] = argmin(c[k] for k in box(8)).index & i64(max(c[k] for k in box(8)))"),
    # The combine of a fold may read memory, at a place outside of the fold.
    body("z[i] = fold(lambda a0, b0: a0 + b0 * f32(h[i]))(x[i, k] for k in box(64))"),
    body("m[i] = fold(lambda a0, a1, b0, b1: (maximum(a0, b0), a1 & b1))((x[i, k], n[i]) for k in box(s0 - s1))[1]"),
    body(
        "z[i] = fold(lambda a0, b0: a0 * sum(w[l] for l in box(s0)))(fold(lambda a0, b0: b0)(w[l] for l in box(s0))"
        " for k in box(8))"
    ),
    body("for k in scan(64):", "    y[i, k], _ = fold(lambda a0, a1, b0, b1: (a0 * f32(a1), b1))(x[i, k], d[i])"),
    body("for k in scan(s1):", "    y[i, at(value(k), 0, 63)] = fold(lambda a0, b0: b0)(f32(1.0))"),
    # Nothing to write.
    "def p(y: out(f32[8, 0])):\n    pass\n",
    "def p(y: out(f32[0, 8].stride(0, 0))):\n    for i, j in box(0, 8):\n        y[i, j] = f32(0.0)\n",
    "def p():\n    pass\n",
]


@pytest.mark.parametrize("text", KEPT)
def test_programs_that_keep_all_rules(text: str) -> None:
    assert broken_rule(text) is None


# ---- programs that break one rule

BROKEN = [
    ("identifiers", "def _(x: f32[8]):\n    pass\n"),
    ("identifiers", body("z[i] = sum(x[i, _] for _ in box(8))")),
    ("unique names", "def p(x: f32[8], x: f32[8]):\n    pass\n"),
    ("unique names", "def p(s0: size(), s0: size(1)):\n    pass\n"),
    ("unique names", "def p(s0: size(), s0: f32[8]):\n    pass\n"),
    ("unique names", "def p(x: f32[8]):\n    x = local(f32[8])\n"),
    ("unique names", body("z[i] = sum(c[i] for x in box(8))")),
    ("unique names", body("z[i] = f32(1.0)").replace("for i in box(8)", "for i, s0 in box(8, 8)")),
    ("size bounds", "def p(s0: size(3, 2)):\n    pass\n"),
    ("strides", "def p(x: f32[8, 8].stride(1)):\n    pass\n"),
    ("strides", "def p():\n    t = local(f32[()].stride(1))\n"),
    ("extents", "def p(x: f32[-1]):\n    pass\n"),
    ("extents", "def p(s0: size(), x: f32[s0]):\n    pass\n"),
    ("extents", "def p(s0: size(2, 4), x: f32[s0 - 5]):\n    pass\n"),
    ("extents", body("z[i] = sum(x[i, k] for k in box(i))")),
    ("extents", body("z[i] = sum(x[i, k] for k in box(-2))")),
    ("extents", body("z[i] = sum(x[i, k] for k in box(at(n[i], 0, 3)))")),
    ("read only", body("d[i] = f64(0.0)")),
    ("read only", body("d[i] += f64(0.0)")),
    ("read only", body("for k in scan(8):", "    n[k] = cumsum(n[k])")),
    ("written first", body("z[i] = y[i, 0]", fill="")),
    ("written first", body("y[i, 0] += x[i, 0]", fill="")),
    ("written first", body("check(t[i] == i64(0), 'ValueError', '')", fill="    t = local(i64[8])\n" + FILL)),
    ("written first", "def p(y: out(f32[8])):\n    for i in box(8):\n        y[i] = y[i] + f32(1.0)\n"),
    ("written first", body("m[at(t[i], 0, 7)] = i64(0)", fill="    t = local(i64[8])\n" + FILL)),
    ("written", body("z[i] = x[i, 0]", fill="")),
    ("one element", body("z[i] = x[i, j]").replace("for i in box(8)", "for i, j in box(8, 64)")),
    ("one element", body("z[0] = x[i, 0]")),
    ("one element", body("z[0] = f32(n[at(n[i], 0, 7)])")),
    ("one element", body("for k in scan(64):", "    z[i] = cumsum(x[i, k])")),
    ("one element", body("for k in scan(64):", "    z[i] = cumsum(f32(1.0))")),
    ("one element", "def p(y: out(f32[8].stride(0))):\n    for i in box(8):\n        y[i] = f32(0.0)\n"),
    ("bound once", body("z[i] = sum(x[i, i] for i in box(8))")),
    ("bound once", body("z[i] = sum(sum(x[i, k] for k in box(8)) for k in box(8))")),
    ("bound once", body("z[i] = sum(x[k, 0] for k, k in box(8, 8))")),
    ("bound once", body("for i in scan(8):", "    z[i] = cumsum(x[i, 0])")),
    ("bound once", body("z[i] = f32(0.0)").replace("for i in box(8)", "for i, i in box(8, 8)")),
    ("nest", body("pass")),
    ("divisor", body("z[i] = x[i, i // 0]")),
    ("divisor", body("z[i] = f32(value(i % 0))")),
    ("index rank", body("z[i] = x[i]")),
    ("index rank", body("z[()] = f32(0.0)")),
    ("index rank", body("z[i, 0] += f32(0.0)")),
    ("bounds", body("z[i] = x[i, 64]")),
    ("bounds", body("z[i] = x[i, -1]")),
    ("bounds", body("z[i] = x[i + 1, 0]")),
    ("bounds", body("z[i] = x[i, 10*i]")),
    ("bounds", body("z[i + 1] = x[i, 0]")),
    ("bounds", body("z[i - 1] += x[i, 0]")),
    ("bounds", body("z[i] = sum(x[i, k] for k in box(65))")),
    ("bounds", body("for k in scan(64):", "    y[i, k + 1] = cumsum(x[i, k])")),
    ("bounds", body("z[i] = where(i64(0) < value(i), x[i - 1, 0], f32(0.0))")),
    ("bounds", body("z[i] = guarded(x[i - 1, 0] > f32(0.0), x[i, 0], f32(0.0))")),
    ("bounds", body("z[i] = guarded(c[i], x[i, 0], x[i - 1, 0])")),
    ("bounds", body("z[i] = x[at(n[i], 0, 8), 0]")),
    ("bounds", body("z[i] = x[at(n[i], 0, 7) + 1, 0]")),
    ("bounds", body("z[i] = x[at(n[i + 1], 0, 7), 0]")),
    ("bounds", body("z[i] = w[s0]")),
    ("bounds", body("z[i] = w[-1 - i]")),
    ("bounds", body("z[i] = w[at(n[i], 0, s0)]")),
    ("bounds", body("z[i] = w[at(n[i], -1, s0 - 1)]")),
    ("bounds", body("z[i] = sum(w[k] for k in box(s0 + 1))")),
    ("bounds", body("z[i] = sum(w[s0 - k] for k in box(s0))")),
    ("data index", body("z[i] = x[at(x[i, 0], 0, 7), 0]")),
    ("data index", body("z[i] = x[at(checked(n[i], 9, True, 'IndexError', ''), 0, 7), 0]")),
    ("data index", body("z[i] = x[at(checked(n[i], 8, True, 'IndexError', ''), 1, 7), 0]")),
    ("data index", body("z[i] = w[at(checked(n[i], s0 + 1, True, 'IndexError', ''), 0, s0 - 1)]")),
    ("constant", body("z[i] = f32(1)")),
    ("constant", body("m[i] = i64(1.0)")),
    ("constant", body("m[i] = i64(True)")),
    ("constant", body("m[i] = where(b8(1), n[i], n[i])")),
    ("constant", body("m[i] = i64(9223372036854775808)")),
    ("constant", body("m[i] = i64(u8(-1))")),
    ("constant", body("m[i] = i64(i8(128))")),
    ("operation", body("z[i] = accumulate('sub', z[i], x[i, 0])")),
    ("arity", body("z[i] = exp(x[i, 0], x[i, 0])")),
    ("arity", body("z[i] = add(x[i, 0])")),
    ("one dtype", body("z[i] = x[i, 0] + d[i]")),
    ("one dtype", body("z[i] = fma(x[i, 0], x[i, 0], h[i])")),
    ("one dtype", body("z[i] = n[i]")),
    ("one dtype", body("z[i] = x[i, 0] < x[i, 1]")),
    ("one dtype", body("z[i] += d[i]")),
    ("one dtype", body("z[i] = where(c[i], x[i, 0], d[i])")),
    ("one dtype", body("z[i] = guarded(c[i], x[i, 0], d[i])")),
    ("one dtype", body("z[i] = argmax(x[i, k] for k in box(8)).index")),
    ("one dtype", body("for k in scan(8):", "    _, z[k] = cummax(x[0, k])")),
    ("one dtype", body("for k in scan(8):", "    m[k] = cumsum(x[0, k])")),
    ("kind", body("z[i] = x[i, 0] & x[i, 0]")),
    ("kind", body("m[i] = exp(n[i])")),
    ("kind", body("m[i] = n[i] / n[i]")),
    ("kind", body("m[i] = i64(c[i] + c[i])")),
    ("kind", body("m[i] = i64(sum(c[k] for k in box(8)))")),
    ("kind", body("m[i] = i64(any(n[k] for k in box(8)))")),
    ("kind", body("m[i] = welford(n[k] for k in box(8))")),
    ("kind", body("for k in scan(8):", "    m[k] = logcumsumexp(n[k])")),
    ("kind", "def p(c: inout(b8[8])):\n    for i in box(8):\n        c[i] += b8(True)\n"),
    ("condition", body("z[i] = where(n[i], x[i, 0], x[i, 0])")),
    ("condition", body("z[i] = guarded(x[i, 0], x[i, 0], x[i, 0])")),
    ("condition", body("check(n[i], 'ValueError', '')")),
    ("condition", body("z[i] = require(n[i], x[i, 0], 'ValueError', '')")),
    ("bounds", body("z[i] = require(x[i - 1, 0] > f32(0.0), x[i, 0], 'ValueError', '')")),
    ("bits", body("m[i] = bits(x[i, 0], i64)")),
    ("bits", body("m[i] = i64(bits(u8(n[i]), b8))")),
    ("checked", body("z[i] = x[at(checked(d[i], 8, True, 'IndexError', ''), 0, 7), 0]")),
    ("checked", body("m[i] = checked(n[i], 8, True, 'MissingError', '')")),
    ("checked", body("check(c[i], 'print', '')")),
    ("checked", body("z[i] = require(c[i], x[i, 0], 'MissingError', '')")),
    ("random", body("z[i] = f32(random('uniform', n[i], 0, i, f64))")),
    ("random", body("z[i] = random('uniform', x[i, 0], 0, i)")),
    ("random", body("z[i] = random('uniform', n[i], -1, i)")),
    ("reduction", body("z[i] = sum(x[i, 0] for _ in box())")),
    ("not empty", body("z[i] = max(x[i, 0] for k in box(0))")),
    ("not empty", body("z[i] = max(x[i, 0] for k in box(s1))")),
    ("not empty", body("z[i] = f32(argmin(x[i, 0] for k, l in box(4, 2*s0*s1)).index)")),
    ("not empty", body("z[i] = max(x[i, 0] for k in box(min(s0, 0)))")),
    ("not empty", body("z[i] = fold(lambda a0, b0: a0 + b0)(x[i, 0] for k in box(s1))")),
    ("not empty", body("z[i] = fold(lambda a0, b0: a0 + b0)(x[i, 0] for k, l in box(3, 0))")),
    ("reduction", body("z[i] = fold(lambda a0, b0: a0 + b0)(x[i, 0] for _ in box())")),
    ("reduction", body("z[i] = fold(lambda a0, b0: a0 + b0)(x[i, k] for k in box(8))[1]")),
    ("fold", body("z[i] = fold(lambda a0, b0: f64(a0))(x[i, k] for k in box(8))")),
    ("fold", body("z[i] = fold(lambda a0, b0: (a0, b0))(x[i, k] for k in box(8))")),
    ("fold", body("z[i] = fold(lambda a0, a1, b0, b1: a0)((x[i, k], n[i]) for k in box(8))")),
    ("fold", body("z[i] = fold(lambda : ())(() for k in box(8))")),
    ("fold", body("z[i] = fold(lambda a0, b0: a0 + fold(lambda a1, b1: a1)(x[i, l] for l in box(2)))(x[i, k]"
                  " for k in box(8))")),
    ("fold", body("m[i] = fold(lambda a0, b0: checked(a0, 8, True, 'IndexError', ''))(n[k] for k in box(8))")),
    ("fold", body("z[i] = fold(lambda a0, b0: require(c[i], a0, 'ValueError', ''))(x[i, k] for k in box(8))")),
    ("fold", body("for k in scan(64):", "    y[i, k] = fold(lambda a0, b0: a0 + y[i, 0])(x[i, k])")),
    ("fold", body("for k in scan(64):", "    y[i, k] = fold(lambda a0, b0: a0 < b0)(x[i, k])")),
    ("one element", body("z[0] = fold(lambda a0, b0: a0 + x[i, 0])(x[0, k] for k in box(8))")),
    ("one element", body("z[0] = fold(lambda a0, b0: a0 + b0)(x[i, k] for k in box(8))")),
    ("one element", body("for k in scan(64):", "    z[i] = fold(lambda a0, b0: a0)(f32(1.0))")),
    ("bounds", body("z[i] = fold(lambda a0, b0: a0 + x[i + 1, 0])(x[i, k] for k in box(8))")),
    ("bounds", body("for k in scan(65):", "    z[i] = fold(lambda a0, b0: a0)(x[i, k])")),
    ("one dtype", body("for k in scan(8):", "    m[k] = fold(lambda a0, b0: a0)(x[0, k])")),
    ("read only", body("for k in scan(8):", "    n[k] = fold(lambda a0, b0: a0)(m[k])")),
    ("bound once", body("for i in scan(8):", "    z[i] = fold(lambda a0, b0: a0)(x[i, 0])")),
    ("scan targets", body("for k in scan(8):", "    m[k], _ = fold(lambda a0, b0: a0)(n[k])")),
    ("scan targets", body("for k in scan(8):", "    _ = fold(lambda a0, b0: a0)(n[k])")),
    ("argument", body("v0 = each(lambda a0=left(0, f32): a0)", "z[i] = v0")),
    ("argument", body("v0 = each(lambda a1=left(1, f32): a1)",
                      "z[i] = fold(lambda a0, b0: v0)(x[i, k] for k in box(8))")),
    ("argument", body("v0 = each(lambda a1=left(0, f64): a1)",
                      "z[i] = fold(lambda a0, b0: f32(v0))(x[i, k] for k in box(8))")),
    ("argument", body("v0 = each(lambda b1=right(0, f32): b1)",
                      "z[i] = fold(lambda a0, b0: a0)(v0 for k in box(8))")),
    ("scan targets", body("for k in scan(8):", "    m[k] = cummax(n[k])")),
    ("scan targets", body("for k in scan(8):", "    m[k], _ = cumsum(n[k])")),
    ("scan targets", body("for k in scan(8):", "    _, _ = cummax(n[k])")),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "text"), BROKEN)
def test_programs_that_break_a_rule(rule: str, text: str) -> None:
    assert broken_rule(text) == rule


# What has no text, or what reading puts right.
i = Axis("i", indices.constant(8))
at_i = indices.of_atom(i)


def one_nest(statement: Statement, *parameters: Parameter, sizes: tuple[Size, ...] = ()) -> Program:
    return Program("program", sizes, parameters, (), (Nest((i,), (statement,)),))


def vector(name: str, size: indices.IndexLike = 8) -> Buffer:
    return Buffer(name, f32, (indices.index(size),), contiguous_strides((size,)))


x, y = Parameter(vector("x"), "in"), Parameter(vector("y"), "out")
s0 = Size("s0", 2, 8)
zero, two = Const(0.0, f32), Size("s0", 2, 9)
along = Axis("k", indices.constant(8))
at_along = Load(x.buffer, (indices.of_atom(along),))
unordered = Index(0, ((1, (Axis("k", indices.constant(2)),)), (1, (i,))))
BROKEN_NODES = [
    ("identifiers", Program("two words", (), (), (), ())),
    ("identifiers", Program("lambda", (), (), (), ())),
    ("role", Program("p", (), (Parameter(vector("x"), "borrowed"),), (), ())),
    ("declared", one_nest(Store(vector("y"), (at_i,), zero))),
    ("declared", one_nest(Store(vector("y", 9), (at_i,), zero), y)),
    ("declared", one_nest(Store(y.buffer, (at_i,), Load(x.buffer, (at_i,))), y)),
    ("bound", one_nest(Store(y.buffer, (indices.axis("k", 8),), zero), y)),
    ("bound", one_nest(Store(y.buffer, (indices.axis("i", 7),), zero), y)),
    ("bound", one_nest(Store(y.buffer, (at_i,), Cast(f32, Position(indices.axis("i", 7)))), y)),
    ("sizes", one_nest(Store(y.buffer, (at_i,), Cast(f32, Position(indices.of_atom(s0)))), y)),
    ("sizes", one_nest(Store(y.buffer, (at_i,), Cast(f32, Position(indices.of_atom(s0)))), y, sizes=(two,))),
    ("sizes", one_nest(Store(y.buffer, (at_i,), zero), Parameter(vector("w", indices.of_atom(s0)), "in"), y)),
    ("bound", one_nest(Store(y.buffer, (at_i,), Fold((at_along,), (along,), (at_along,), 0)), x, y)),
    ("argument", one_nest(Store(y.buffer, (at_i,), Fold((Argument("up", 0, f32),), (along,), (at_along,), 0)), x, y)),
    ("argument", one_nest(Store(y.buffer, (at_i,), Fold((Argument("left", 1, f32),), (along,), (at_along,), 0)), x, y)),
    ("argument", one_nest(Store(y.buffer, (at_i,), Fold((Argument("left", -1, f32),), (along,), (zero,), 0)), y)),
    ("normal form", one_nest(Store(y.buffer, (at_i,), Cast(f32, Position(Index(1, ((0, (i,)),))))), y)),
    ("normal form", one_nest(Store(y.buffer, (at_i,), Cast(f32, Position(Index(1, ((2, ()),))))), y)),
    ("normal form", one_nest(Store(y.buffer, (at_i,), Cast(f32, Position(Index(1, ((2, (i,)), (1, (i,))))))), y)),
    ("normal form", one_nest(Store(y.buffer, (at_i,), Cast(f32, Position(unordered))), y)),
    ("operation", one_nest(Store(y.buffer, (at_i,), Apply("frobnicate", (zero,))), y)),
    ("operation", one_nest(Store(y.buffer, (at_i,), Reduce("median", (Axis("k", indices.ONE),), zero, "value")), y)),
    ("operation", one_nest(Scan("cumulate", Axis("k", indices.constant(8)), (), zero), y)),
    ("reduction", one_nest(Store(y.buffer, (at_i,), Reduce("sum", (Axis("k", indices.ONE),), zero, "index")), y)),
]


@pytest.mark.parametrize(("rule", "program"), BROKEN_NODES)
def test_nodes_that_break_a_rule(rule: str, program: Program) -> None:
    assert broken_rule(program) == rule


def test_refusals_show_the_statement_and_who_made_it() -> None:
    with pytest.raises(Malformed) as refusal:
        check_program(parse_program(body("z[i] = x[i, 0]", "z[i] = x[i + 1, 0]")), "loop pass inline_scalars")
    text = "bounds: i + 1 in a dimension of 8\nz[i] = x[i + 1, 0]\n  at    loop pass inline_scalars"
    assert str(refusal.value) == text


# ---- mutations of random programs


def change(program: Program, **fields: object) -> Program:
    names = ("name", "sizes", "parameters", "locals", "nests")
    return Program(*(fields.get(name, getattr(program, name)) for name in names))


@random_programs
@given(programs(), st.data())
def test_mutated_programs_are_refused(program: Program, data: st.DataObject) -> None:
    outs = [parameter for parameter in program.parameters if parameter.role == "out"]
    stores = [s for nest in program.nests for s in nest.body if isinstance(s, Store)]
    mutation = data.draw(st.sampled_from(["in", "twice", "sizes", "dtype", "rank", "far", "gone"]))
    if mutation == "in":
        written = [parameter for parameter in outs if 0 not in map(indices.least, parameter.buffer.sizes)]
        assume(written)
        changed = tuple(Parameter(p.buffer, "in") if p is written[0] else p for p in program.parameters)
        assert broken_rule(change(program, parameters=changed)) == "read only"
    elif mutation == "twice":
        twice = (*program.parameters, Parameter(program.parameters[0].buffer, "in"))
        assert broken_rule(change(program, parameters=twice)) == "unique names"
    elif mutation == "sizes":
        used = any(indices.free_sizes(size) for p in program.parameters for size in p.buffer.sizes)
        assume(used)
        assert broken_rule(change(program, sizes=())) == "sizes"
    elif mutation == "gone":
        kept = tuple(p for p in program.parameters if p.role != "out")
        assume(outs)
        assert broken_rule(change(program, parameters=kept)) == "declared"
    else:
        assume(stores)
        store = data.draw(st.sampled_from(stores))
        if mutation == "dtype":
            other = f64 if store.buffer.dtype is not f64 else i64
            broken, rule = Store(store.buffer, store.index, Cast(other, store.value)), "one dtype"
        elif mutation == "rank":
            broken, rule = Store(store.buffer, (*store.index, indices.ZERO), store.value), "index rank"
        else:
            assume(store.index and all((indices.least(size) or 0) > 0 for size in store.buffer.sizes))
            far = (store.index[0] + store.buffer.sizes[0], *store.index[1:])
            broken, rule = Store(store.buffer, far, store.value), "bounds"
        nests = tuple(Nest(n.axes, tuple(broken if s is store else s for s in n.body)) for n in program.nests)
        assert broken_rule(change(program, nests=nests)) == rule, show(change(program, nests=nests))
