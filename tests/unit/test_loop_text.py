"""Loop programs print as Python and read back as the very same nodes; `docs/loop-ir.md` says what is true."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from ferrite.errors import Malformed
from ferrite.loops import index as indices
from ferrite.loops.check import check_program
from ferrite.loops.dtypes import DTYPES, b8, f32, i64
from ferrite.loops.index import Axis, Size
from ferrite.loops.nodes import (
    Accumulate,
    Apply,
    Buffer,
    Cast,
    Const,
    Expr,
    Load,
    Nest,
    Parameter,
    Program,
    Random,
    Reduce,
    Scan,
    Store,
)
from ferrite.loops.operations import ACCUMULATIONS, OPERATIONS, REDUCTIONS, SCANS, Reduction
from ferrite.loops.shapes import contiguous_strides
from ferrite.loops.text import parse_expr, parse_index, parse_program, show
from tests.unit.loop_programs import expressions, programs

GUIDE = Path(__file__).parents[2] / "docs" / "loop-ir.md"
random_programs = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def buffer(name: str, kind: str, *sizes: indices.IndexLike) -> Buffer:
    extents = tuple(map(indices.index, sizes))
    return Buffer(name, DTYPES[kind], extents, contiguous_strides(extents))


s0 = Size("s0", 2, 512)
i, j, k = Axis("i", indices.constant(8)), Axis("j", indices.constant(64)), Axis("k", indices.of_atom(s0))
at_i, at_j = indices.of_atom(i), indices.of_atom(j)
x, y, n, c = buffer("x", "f32", 8, 64), buffer("y", "f32", 8, 64), buffer("n", "i64", 8), buffer("c", "b8", 8)
seed, w = buffer("seed", "i64"), buffer("w", "f32", indices.of_atom(s0))
BUFFERS, AXES, SIZES = (x, y, n, c, seed, w), (i, j, k), (s0,)
load = Load(x, (at_i, at_j))


def read(text: str) -> Expr:
    return parse_expr(text, BUFFERS, AXES, SIZES)


# ---- both ways


@random_programs
@given(programs())
def test_programs_read_back_as_themselves(program: Program) -> None:
    text = show(program)
    again = parse_program(text)
    assert again is program, f"{text}\n{show(again)}"
    assert show(again) == text


@random_programs
@given(expressions())
def test_expressions_read_back_as_themselves(drawn: tuple[Expr, tuple[Buffer, ...], tuple[Axis, ...]]) -> None:
    expr, buffers, axes = drawn
    assert parse_expr(show(expr), buffers, axes) is expr


@pytest.mark.parametrize(
    "text",
    [
        "x[i, j]",
        "seed[()]",
        "f32(0.5)",
        "f32(-0.0)",
        "f32(inf)",
        "f32(-inf)",
        "f32(nan)",
        "f32(1e-45)",
        "f32(1)",
        "i64(-9223372036854775808)",
        "b8(True)",
        "f32(i64(3))",
        "f32(f32(0.5))",
        "x[i, j] + y[i, j] + f32(1.0)",
        "x[i, j] + (y[i, j] + f32(1.0))",
        "x[i, j] - (y[i, j] - f32(1.0))",
        "x[i, j] * y[i, j] + f32(1.0) / x[i, j]",
        "(x[i, j] + y[i, j]) * f32(2.0)",
        "x[i, j] / (y[i, j] * f32(2.0))",
        "n[i] & i64(1) | n[i] ^ i64(2) & n[i]",
        "(n[i] | i64(1)) & (n[i] ^ i64(2))",
        "(n[i] < i64(3)) == (c[i] != b8(False))",
        "n[i] + i64(1) < n[i] * i64(2)",
        "(n[i] < i64(3)) & c[i]",
        "neg(x[i, j])",
        "fma(x[i, j], y[i, j], f32(1.0))",
        "and_(n[i])",
        "add(n[i], n[i], n[i])",
        "bits(x[i, j], i32)",
        "where(c[i], x[i, j], y[i, j])",
        "guarded(value(i - 1) >= i64(0), x[i - 1, j], f32(0.0))",
        "value(64*i + j)",
        "checked(n[i], s0, False, 'IndexError', \"it's {index}\\n\")",
        "require(n[i] != i64(0), floordiv(i64(7), n[i]), 'RuntimeError', \"it's 0\")",
        "random('uniform', seed[()], 2, 64*i + j)",
        "random('bits', seed[()], 0, i)",
        "random('normal', seed[()], 0, i, f64)",
        "sum(x[i, k1] for k1 in box(64))",
        "sum(w[k] * x[k2, k3] for k2, k3 in box(s0 - 1, 3))",
        "argmax(x[i, k1] for k1 in box(64)).index + i64(1)",
        "welford(x[i, k1] for k1 in box(64)).m2",
        "fold(lambda a0, b0: a0 + b0)(x[i, k1] for k1 in box(64))",
        "fold(lambda a0, a1, b0, b1: (a0 + b0, maximum(a1, b1)))((n[i], x[i, k1]) for k1 in box(64))[1] * f32(2.0)",
        "fold(lambda a0, b0: a0 * b0 + w[k])(fold(lambda a0, b0: b0)(w[k3] for k3 in box(s0)) for k1, k2 in box(2, 3))",
        "x[at(n[i], 0, 7), (j // 4)]",
        "x[((i + 3*j) % 8), min(i, 2*j)]",
    ],
)
def test_expression_text(text: str) -> None:
    assert show(read(text)) == text


def test_grouping_is_structure() -> None:
    a, b, d = load, Load(y, (at_i, at_j)), Const(1.0, f32)
    left = Apply("add", (Apply("add", (a, b)), d))
    right = Apply("add", (a, Apply("add", (b, d))))
    assert show(left) == "x[i, j] + y[i, j] + f32(1.0)"
    assert show(right) == "x[i, j] + (y[i, j] + f32(1.0))"
    assert read(show(left)) is left
    assert read(show(right)) is right


def test_literals_are_constants_and_the_rest_is_cast() -> None:
    assert read("f32(0.5)") is Const(0.5, f32)
    assert read("f32(n[i])") is Cast(f32, Load(n, (at_i,)))
    assert read("f32(i64(3))") is Cast(f32, Const(3, i64))
    assert read("b8(True)") is Const(True, b8)
    assert read("f32(1)") is Const(1, f32)
    assert read("f32(1)") is not read("f32(1.0)")
    assert read("f32(0.0)") is not read("f32(-0.0)")
    nan = read("f32(nan)")
    assert isinstance(nan, Const)
    assert math.isnan(nan.value)


def test_first_result_has_no_suffix() -> None:
    own = Axis("k1", indices.constant(64))
    body = Load(x, (at_i, indices.of_atom(own)))
    assert show(Reduce("argmax", (own,), body, "value")) == "argmax(x[i, k1] for k1 in box(64))"
    assert read("argmax(x[i, k1] for k1 in box(64)).value") is Reduce("argmax", (own,), body, "value")
    assert show(Reduce("argmax", (own,), body, "index")) == "argmax(x[i, k1] for k1 in box(64)).index"


def test_indices_come_out_in_normal_form() -> None:
    def index(text: str) -> indices.Index:
        return parse_index(text, BUFFERS, AXES, SIZES)

    assert show(index("j + 2*i + 2*(i - 1)")) == "4*i + j - 2"
    assert index("(64*i + j) // 64") is at_i
    assert index("(64*i + j) % 64") is at_j
    assert index("-(i - j)") is at_j - at_i
    assert index("max(i, 0)") is at_i
    assert index("at(n[i], 0, 9 - 2)") is indices.data(Load(n, (at_i,)), 0, 7)
    assert show(read("value(s0*k + k*s0)")) == "value(2*k*s0)"


def test_show_gives_every_other_node_a_text() -> None:
    assert show(x) == "x: f32[8, 64]"
    assert show(seed) == "seed: i64[()]"
    turned = Buffer("t", f32, x.sizes, (indices.ONE, indices.constant(8)))
    assert show(Parameter(turned, "inout")) == "t: inout(f32[8, 64].stride(1, 8))"
    assert show(Parameter(n, "in")) == "n: i64[8]"
    assert show(at_i + 1) == "i + 1"
    store = Store(y, (at_i, at_j), load)
    assert show(store) == "y[i, j] = x[i, j]"
    assert show(Nest((i, j), (store,))) == "for i, j in box(8, 64):\n    y[i, j] = x[i, j]"
    assert show(Accumulate("add", y, (at_i, at_j), load)) == "y[i, j] += x[i, j]"
    assert show(Accumulate("mul", y, (at_i, at_j), load)) == "y[i, j] = accumulate('mul', y[i, j], x[i, j])"
    scan = Scan("cummax", j, (None, (buffer("m", "i64", 8, 64), (at_i, at_j))), load)
    assert show(scan) == "for j in scan(64):\n    _, m[i, j] = cummax(x[i, j])"
    assert show(Random("uniform", Load(seed, ()), 3, at_i, f32)) == "random('uniform', seed[()], 3, i)"


# ---- programs

WHOLE = """\
def program(
    s0: size(2, 512),
    s1: size(0),
    s2: size(),
    s3: size(None, 4),
    x: f32[8, s0],
    n: i64[8],
    y: out(f32[8, s0].stride(1, 8)),
    z: inout(f32[8]),
):
    t = local(f32[8])
    u = local(f32[()])
    for i in box(8):
        t[i] = sum(exp(x[i, k]) for k in box(s0))
        z[at(checked(n[i], 8, True, 'IndexError', 'index {index}'), 0, 7)] += t[i]
        z[i] = accumulate('maximum', z[i], x[i, 0])
        for k in scan(s0):
            y[i, k] = cumsum(x[i, k] - t[i])
    for _ in box():
        check(n[0] >= i64(0), 'ValueError', 'negative')
        u[()] = t[3]
"""


def test_program_text() -> None:
    program = parse_program(WHOLE)
    assert show(program) == WHOLE
    assert parse_program(show(program)) is program
    check_program(program, "test")
    assert [size.low for size in program.sizes] == [2, 0, None, None]
    assert [size.high for size in program.sizes] == [512, None, None, 4]


def test_program_without_loops_or_parameters() -> None:
    text = "def nothing():\n    pass\n"
    assert show(parse_program(text)) == text
    assert parse_program(text) is Program("nothing", (), (), (), ())


def test_short_signatures_stay_on_one_line() -> None:
    text = "def program(x: f32[8], y: out(f32[8])):\n    for i in box(8):\n        y[i] = x[i]\n"
    assert show(parse_program(text.replace("(x", "(\n    x").replace("])):", "]),\n):"))) == text


def test_empty_dimensions_are_contiguous_as_in_torch() -> None:
    assert contiguous_strides((2, 0, 3)) == tuple(map(indices.constant, (3, 3, 1)))
    assert contiguous_strides(()) == ()


# ---- named parts


def test_long_repeated_parts_get_a_line() -> None:
    text = "v0 = exp(x[i, j] - sum(x[i, k1] for k1 in box(64)))\nv0 / (v0 + f32(1.0))"
    expr = read(text)
    assert isinstance(expr, Apply)
    assert expr.operands[0] is expr.operands[1].operands[0]  # type: ignore[attr-defined]
    assert show(expr) == text


def test_short_repeated_parts_are_repeated() -> None:
    assert show(read("exp(x[i, j]) * exp(x[i, j])")) == "exp(x[i, j]) * exp(x[i, j])"


def test_text_of_shared_parts_grows_with_nodes_not_paths() -> None:
    expr: Expr = load
    for _ in range(60):
        expr = Apply("mul", (Apply("sin", (expr,)), Apply("cos", (expr,))))
    text = show(expr)
    assert len(text) < 60 * 60
    assert read(text) is expr


@pytest.mark.parametrize("chain", ["exp({})", "{} + f32(1.0)", "f32(1.0) - ({})"])
def test_deep_expressions_are_cut_into_lines(chain: str) -> None:
    deep: Expr = load
    step = parse_expr(chain.format("hole[()]"), [buffer("hole", "f32")])
    assert isinstance(step, Apply)
    for _ in range(3000):
        deep = Apply(step.operation, tuple(deep if isinstance(part, Load) else part for part in step.operands))
    text = show(deep)
    assert 100 < len(text.splitlines()) < 200
    assert read(text) is deep
    whole = Program(
        "program",
        (),
        (Parameter(x, "in"), Parameter(y, "out")),
        (),
        (Nest((i, j), (Store(y, (at_i, at_j), deep),)),),
    )
    assert parse_program(show(whole)) is whole
    check_program(whole, "test")


def test_parts_inside_reductions_say_their_axes() -> None:
    text = (
        "v0 = floormod(n[i] + i64(1234567), i64(7) + n[0])\n"
        "v1 = each(exp(x[i, k1] * y[i, k1] + f32(0.125) * w[k]) for k1 in box(64))\n"
        "x[at(v0, 0, 7), 0] + max(f32(v1) for k1 in box(64)) + sum(v1 for k1 in box(64)) + f32(v0)"
    )
    assert show(read(text)) == text


def test_parts_of_a_combine_say_what_they_take_from_the_fold() -> None:
    text = (
        "v0 = each(lambda a0=left(0, f32), b1=right(1, i64): exp(a0 * f32(0.125) + f32(b1)) + w[k] * a0)\n"
        "v1 = each(lambda a0=left(0, f32): x[i, k2] * a0 * f32(0.125) + f32(123456.5) for k2 in box(4))\n"
        "fold(lambda a0, a1, b0, b1: (v0 * v0 + max(v1 for k2 in box(4)) - sum(v1 for k2 in box(4)), b1))"
        "((x[i, k1], n[i]) for k1 in box(64))"
    )
    assert show(read(text)) == text


def test_names_of_arguments_avoid_what_the_program_names() -> None:
    a0, b0_1 = buffer("a0", "f32", 8), buffer("b0", "f32", 8)
    text = "fold(lambda a0_1, b0_1: a0_1 + a0[i] + b0_1)(b0[k1] for k1 in box(8))"
    assert show(parse_expr(text, (a0, b0_1), AXES)) == text


def test_parts_of_every_statement_stand_before_it() -> None:
    text = """\
def program(n: i64[64], x: f32[8, 64], y: inout(f32[8]), z: out(f32[8, 64])):
    for i in box(8):
        v0 = each(exp(x[i, k] * f32(0.123456789) + f32(0.5)) for k in box(64))
        y[i] += sum(v0 for k in box(64)) / max(v0 for k in box(64))
        v0 = floormod(n[i] + i64(1234567), n[0] + i64(7654321))
        y[at(v0, 0, 7)] = accumulate('mul', y[at(v0, 0, 7)], x[i, 0])
        for k in scan(64):
            v0 = exp(x[i, k] * f32(0.123456789) + f32(0.5))
            z[i, k] = cumsum(v0 / (v0 + f32(1.0)))
        v0 = exp(x[i, 0] * f32(0.123456789) + f32(0.5))
        check((v0 < f32(1.0)) | (v0 > f32(2.0)), 'ValueError', 'no')
"""
    program = parse_program(text)
    assert show(program) == text
    assert parse_program(show(program)) is program


def test_names_avoid_what_the_program_names() -> None:
    taken = buffer("v0", "f32", 8)
    long = read("exp(x[i, j] - sum(x[i, k1] for k1 in box(64)))")
    text = show(Apply("mul", (Apply("add", (long, Load(taken, (at_i,)))), long)))
    assert text == "v1 = exp(x[i, j] - sum(x[i, k1] for k1 in box(64)))\n(v1 + v0[i]) * v1"


def test_parts_do_not_leave_their_statement() -> None:
    head = "def p(x: f32[8], y: out(f32[8])):\n  for i in box(8):\n    v0 = x[i]\n    y[i] = v0 + v0\n"
    parse_program(head)
    with pytest.raises(Malformed, match="line 5: v0 is not an expression"):
        parse_program(head + "    y[i] = v0\n")
    with pytest.raises(Malformed, match="line 5: a named part has no statement after it"):
        parse_program(head + "    v0 = x[i]\n")
    with pytest.raises(Malformed, match="line 5: x has a meaning already"):
        parse_program(head + "    x = x[i]\n")


# ---- refusals

HEAD = "def program(s0: size(2), x: f32[8, 64], n: i64[8], y: out(f32[8, 64])):\n"


@pytest.mark.parametrize(
    ("line", "title"),
    [
        ("y[i, j] = q[i]", "there is no buffer q"),
        ("y[i, j] = x[i, q]", "q is neither a loop variable nor a size here"),
        ("y[i, j] = x[i, x]", "x is neither a loop variable nor a size here"),
        ("y[i, j] = x", "x is not an expression"),
        ("y[i, j] = frobnicate(x[i, j])", "there is no operation frobnicate"),
        ("y[i, j] = x[i, j] ** x[i, j]", "there is no operator Pow"),
        ("y[i, j] = -x[i, j]", "-x[i, j] is not an expression"),
        ("y[i, j] = f32(n[i], n[i])", "f32 takes other arguments"),
        ("y[i, j] = where(x[i, j])", "where takes other arguments"),
        ("y[i, j] = bits(x[i, j], q32)", "bits takes other arguments"),
        ("y[i, j] = checked(n[i], 8, 1, 'IndexError', '')", "checked takes other arguments"),
        ("y[i, j] = require(c[i], n[i], 'ValueError')", "require takes other arguments"),
        ("y[i, j] = random('dice', n[i], 0, i)", "random draws bits, uniform, normal, not dice, of a known dtype"),
        ("y[i, j] = random('bits', n[i], 1.5, i)", "the stream of a random draw is an integer"),
        ("y[i, j] = median(x[i, k] for k in box(8))", "there is no reduction median"),
        ("y[i, j] = sum(x[i, k] for k in range(8))", "expected box(...)"),
        ("y[i, j] = sum(x[i, k] for k in box(8) if k)", "expected a reduction over one box"),
        ("y[i, j] = sum(x[i, k] for k, l in box(8))", "2 loop variables for 1 extents"),
        ("y[i, j] = sum(x[i, k] for k in box(8)).index", "sum gives value, not index"),
        ("y[i, j] = x[i, j] < x[i, j] < x[i, j]", "x[i, j] < x[i, j] < x[i, j] is not an expression"),
        ("y[i, j] = (i := x[i, j])", "(i := x[i, j]) is not an expression"),
        ("i = x[i, j]", "i has a meaning already"),
        ("y[i, j] = x[i, j / 2]", "there is no operator Div in an index"),
        ("y[i, j] = x[i, True]", "True is not an index"),
        ("y[i, j] = x[i, abs(j)]", "abs(j) is not an index"),
        ("y = x[i, j]", "y has a meaning already"),
        ("y[i, j], n[i] = x[i, j]", "expected an element of a buffer"),
        ("y[i, j] = accumulate('mul', y[i, 0], x[i, j])", "an accumulation reads the element that it writes"),
        ("y[i, j] *= x[i, j]", "expected a store, an accumulation, a scan or a check"),
        ("check(n[i] > i64(0), IndexError, 'no')", "expected a string"),
        ("for k in scan(8): y[i, k] = median(x[i, k])", "there is no scan median"),
        ("for k in scan(8): y[i, k] = unfold(lambda a, b: a)(x[i, k])", "expected fold(lambda ...)"),
        ("for k in scan(8): y[i, k] = fold(lambda a, b: c)(x[i, k])", "c is not an expression"),
        ("for k in scan(8): y[i, k] = fold(lambda a: a)(x[i, k])", "expected 2 names for what is combined"),
        ("y[i, j] = fold(lambda a, b, *c: a)(x[i, k] for k in box(8))", "expected 2 names for what is combined"),
        ("y[i, j] = fold(lambda a, x: a)(x[i, k] for k in box(8))", "x has a meaning already"),
        ("y[i, j] = fold(lambda a, b=left(0, f32): a)(x[i, k] for k in box(8))", "expected fold(lambda ...)"),
        ("y[i, j] = fold(add)(x[i, k] for k in box(8))", "expected fold(lambda ...)"),
        ("y[i, j] = fold(lambda a, b: a)(x[i, k] for k in box(8) if k)", "expected a fold over one box"),
        ("y[i, j] = fold(lambda a, b: a)(x[i, j])", "expected a fold over one box"),
        ("v = each(lambda a=middle(0, f32): a)", "expected what an argument is, like left(0, f32)"),
        ("v = each(lambda a, b=left(0, f32): a)", "expected 1 names for what is combined"),
        ("for k in scan(8): y[i, k] = x[i, k]", "expected the targets of a scan and its call"),
        ("for k in box(8): y[i, k] = cumsum(x[i, k])", "expected scan(...)"),
        ("for k, l in scan(8, 8): y[k, l] = cumsum(x[k, l])", "a scan runs along one axis"),
    ],
)
def test_statements_that_do_not_fit(line: str, title: str) -> None:
    with pytest.raises(Malformed) as refusal:
        parse_program(f"{HEAD}    for i, j in box(8, 64):\n        {line}\n")
    assert refusal.value.title == f"line 3: {title}\n{line}"
    assert refusal.value.where == "loops.text"


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("x = 1", "a program is one function"),
        ("", "a program is one function"),
        ("def p(:", "line 1: invalid syntax"),
        ("def p(x):\n    pass", "line 1: x has no type"),
        ("def p(x: float):\n    pass", "line 1: the type of x is not like"),
        ("def p(x: q32[8]):\n    pass", "line 1: the type of x is not like"),
        ("def p(x: f32[8], s0: size()):\n    pass", "line 1: sizes come before buffers"),
        ("def p(s0: size('a')):\n    pass", "line 1: the bound of a size is an integer or None"),
        ("def p(x: f32[8] = 3):\n    pass", "line 1: a parameter is a name and a type"),
        ("def p(x: f32[s0]):\n    pass", "line 1: s0 is neither a loop variable nor a size here"),
        ("def p():\n    return 3", "line 2: expected a local or a loop over a box"),
        ("def p():\n    for i in box(8):\n        pass\n    t = local(f32[8])", "line 4: locals come before loops"),
        ("def p():\n    for i in range(8):\n        pass", "line 2: expected box(...)"),
        ("def p():\n    for x[0] in box(8):\n        pass", "line 2: a loop variable is a name"),
        ("def p():\n    for i in box(8):\n        pass\n    else:\n        pass", "line 2: a loop has no else"),
    ],
)
def test_programs_that_do_not_fit(text: str, title: str) -> None:
    with pytest.raises(Malformed) as refusal:
        parse_program(text)
    assert refusal.value.title.startswith(title)


def test_what_python_cannot_parse_is_malformed() -> None:
    with pytest.raises(Malformed):
        read("exp(" * 300 + "x[i, j]" + ")" * 300)
    with pytest.raises(Malformed, match="nested too deeply"):
        read("x[i, j]" + " + x[i, j]" * 5000)
    with pytest.raises(Malformed, match="expected a named part"):
        read("x[i, j]; y[i, j]")
    with pytest.raises(Malformed, match="expected one expression"):
        read("v0 = x[i, j]")


def test_objects_without_text_are_refused() -> None:
    with pytest.raises(Malformed, match="a Size has no text"):
        show(s0)  # type: ignore[arg-type]


# ---- the guide


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", GUIDE.read_text(), re.DOTALL | re.MULTILINE)


def test_every_program_of_the_guide_is_one() -> None:
    found = blocks("python")
    assert len(found) >= 7
    for text in found:
        program = parse_program(text)
        check_program(program, "docs/loop-ir.md")
        assert show(program) == text


def guide_expressions() -> list[str]:
    lines = [line for text in blocks("text") for line in text.splitlines()]
    assert len(lines) >= 25
    return lines


@pytest.mark.parametrize("text", guide_expressions())
def test_every_expression_of_the_guide_is_one(text: str) -> None:
    """The guide says which buffers, axes and sizes its examples use: those of this file."""
    if text.startswith("index: "):
        text = text.removeprefix("index: ")
        assert show(parse_index(text, BUFFERS, AXES, SIZES)) == text
    else:
        assert show(read(text)) == text


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def operation_table() -> str:
    rows = []
    for row in OPERATIONS.values():
        names = ("a", "b", "c")[: row.arity]
        text = f"a {row.symbol} b" if row.symbol else f"{row.name}({', '.join(names)})"
        result = "b8" if row.result == "bool" else "the same"
        rows.append((f"`{row.name}`", f"`{text}`", ", ".join(row.kinds), result, row.meaning))
    return table(("operation", "text", "takes", "gives", "meaning"), rows)


def results_table(rows: dict[str, Reduction], empty: bool) -> str:
    head = ("name", "takes", "gives", "meaning", *(("an empty box",) if empty else ()))
    lines = []
    for row in rows.values():
        gives = ", ".join(f"`{name}` ({'the same' if rule == 'same' else rule})" for name, rule in row.results)
        lines.append((f"`{row.name}`", ", ".join(row.kinds), gives, row.meaning, *((row.empty,) if empty else ())))
    return table(head, lines)


TABLES = {
    "operations": operation_table,
    "reductions": lambda: results_table(REDUCTIONS, True),
    "scans": lambda: results_table(SCANS, False),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_of_the_guide_say_what_the_code_says(name: str, request: pytest.FixtureRequest) -> None:
    """`pytest --bless` writes them anew."""
    text = GUIDE.read_text()
    start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    before, rest = text.split(start)
    written, after = rest.split(end)
    made = TABLES[name]()
    if request.config.getoption("--bless"):
        GUIDE.write_text(before + start + made + end + after)
    else:
        assert written == made


def test_the_guide_names_every_accumulation_and_dtype() -> None:
    text = GUIDE.read_text()
    for name in (*ACCUMULATIONS, *DTYPES):
        assert f"`{name}`" in text
