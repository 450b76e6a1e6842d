"""Walking and rewriting loop programs, and every loop pass: small programs by their text, random ones by the oracle."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ferrite.errors import Malformed
from ferrite.loops import oracle, oracle_values
from ferrite.loops.check import check_program
from ferrite.loops.dtypes import DTYPES, b8, bf16, f32, i64
from ferrite.loops.index import Axis, Index, axis, constant, data, free_axes, of_atom
from ferrite.loops.nodes import (
    Apply,
    Buffer,
    Cast,
    Checked,
    Const,
    Expr,
    Load,
    Nest,
    Parameter,
    Position,
    Program,
    Reduce,
    Select,
    Store,
)
from ferrite.loops.operations import OPERATIONS
from ferrite.loops.passes import BOX_PASSES, LOOP_PASSES
from ferrite.loops.passes.drop_dead_stores import drop_dead_stores
from ferrite.loops.passes.drop_identity import drop_identity
from ferrite.loops.passes.drop_unit_axes import drop_unit_axes
from ferrite.loops.passes.fold_constants import fold_constants
from ferrite.loops.passes.fold_select import fold_select
from ferrite.loops.passes.merge_axes import merge_axes
from ferrite.loops.passes.simplify_guards import simplify_guards
from ferrite.loops.rewrite import (
    apply_rules,
    can_raise,
    children,
    rebuild,
    rename_buffers,
    substitute_axes,
    walk,
)
from ferrite.loops.text import parse_program, show
from tests.unit.loop_programs import programs, size_values

ALL_PASSES = (*LOOP_PASSES, *BOX_PASSES)

# ---- random programs agree


def inputs(program: Program, sizes: dict[str, int], seed: int) -> dict[str, np.ndarray]:
    """Arrays for the parameters, with zeros of both signs, infinities, NaN and the ends of the integers among them."""
    rng = np.random.default_rng(seed)
    memory = oracle._Memory(sizes, {}, oracle.BOX_LIMIT)
    return {p.buffer.name: array(p.buffer, memory.shape(p.buffer), rng) for p in program.parameters}


def array(buffer: Buffer, shape: tuple[int, ...], rng: np.random.Generator, odd_share: float = 0.3) -> np.ndarray:
    """Small numbers; so many of the floats are infinite, NaN, zeros, tiny or huge."""
    dtype = buffer.dtype
    if dtype.is_bool:
        return rng.integers(0, 2, shape).astype(np.bool_)
    if dtype.is_int:
        limits = np.iinfo(oracle_values.STORAGE[dtype])
        odd = rng.choice(np.array([limits.min, limits.max, 0, 1], oracle_values.STORAGE[dtype]), shape)
        return np.where(rng.random(shape) < 0.2, odd, rng.integers(max(limits.min, -9), 9, shape).astype(odd.dtype))
    odd = rng.choice(np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, 1e30, 1.0], np.float32), shape)
    values = np.where(rng.random(shape) < odd_share, odd, rng.normal(size=shape) * 3)
    values = np.asarray(values, np.float64 if dtype.bits == 64 else np.float32)
    return np.asarray(oracle_values.to_storage(values, dtype))


def executed(program: Program, sizes: dict[str, int], seed: int) -> dict[str, np.ndarray]:
    arrays = inputs(program, sizes, seed)
    oracle.run(program, sizes, arrays)
    return arrays


def assert_same_bits(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray], program: Program) -> None:
    for parameter in program.parameters:
        buffer = parameter.buffer
        left = np.asarray(oracle_values.from_storage(found[buffer.name], buffer.dtype))
        right = np.asarray(oracle_values.from_storage(wanted[buffer.name], buffer.dtype))
        equal = (left == right) | ((left != left) & (right != right))
        if buffer.dtype.is_float:
            equal &= (left != left) | (np.signbit(left) == np.signbit(right))
        assert equal.all(), f"{buffer.name}\n{show(program)}"


RANDOM = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


def assert_keeps_every_bit(run: Callable[[Program], Program]) -> None:
    """Random programs compute the same before and after a pass, and the second time it has nothing to do."""

    @RANDOM
    @given(st.data())
    def compare(draw: st.DataObject) -> None:
        program = draw.draw(programs(max_nests=2))
        sizes = draw.draw(size_values(program))
        result = run(program)
        check_program(result, "test")
        assert run(result) is result, show(result)
        assert_same_bits(executed(result, sizes, 3), executed(program, sizes, 3), program)

    compare()


@pytest.mark.parametrize("run", ALL_PASSES, ids=lambda run: run.__name__)
def test_a_pass_keeps_every_bit_of_random_programs(run: Callable[[Program], Program]) -> None:
    assert_keeps_every_bit(run)


@RANDOM
@given(st.data())
def test_all_passes_together(draw: st.DataObject) -> None:
    program = draw.draw(programs(max_nests=3))
    sizes = draw.draw(size_values(program))
    result = program
    for run in ALL_PASSES:
        result = run(result)
    check_program(result, "test")
    assert_same_bits(executed(result, sizes, 5), executed(program, sizes, 5), program)


@RANDOM
@given(programs())
def test_rebuilding_with_nothing_changed_gives_the_same_program(program: Program) -> None:
    assert all(rebuild(node, lambda child: child) is node for node in walk(program))
    assert apply_rules(program, ()) is program
    names = {parameter.buffer.name: f"new_{parameter.buffer.name}" for parameter in program.parameters}
    renamed = rename_buffers(program, names)
    check_program(renamed, "test")
    assert rename_buffers(renamed, {new: old for old, new in names.items()}) is program


@RANDOM
@given(programs())
def test_walking_visits_each_node_once(program: Program) -> None:
    nodes = list(walk(program))
    assert len(nodes) == len(set(nodes))
    place = {node: number for number, node in enumerate(nodes)}
    assert all(child in place for node in nodes for child in children(node))


# ---- passes by their text


def passed(run: Callable[[Program], Program], before: str) -> str:
    program = parse_program(before)
    check_program(program, "test")
    after = run(program)
    check_program(after, "test")
    return show(after)


def one_line(run: Callable[[Program], Program], line: str) -> str:
    """What becomes of one statement over `i, j in box(8, 4)`."""
    parameters = "x: f32[8, 4], h: bf16[8, 4], n: i64[8, 4], c: b8[8, 4], y: out({})"
    dtype = line.split(":")[0]
    text = (
        f"def program({parameters.format(dtype + '[8, 4]')}):\n    for i, j in box(8, 4):\n"
        f"        y[i, j] = {line.split(':', 1)[1].strip()}\n"
    )
    return passed(run, text).strip().splitlines()[-1].split(" = ", 1)[1]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("f32: x[i, j] * f32(1.0)", "x[i, j]"),
        ("f32: f32(1.0) * x[i, j]", "x[i, j]"),
        ("f32: x[i, j] / f32(1.0)", "x[i, j]"),
        ("f32: x[i, j] - f32(0.0)", "x[i, j]"),
        ("f32: x[i, j] + f32(-0.0)", "x[i, j]"),
        ("f32: x[i, j] + f32(0.0)", "x[i, j] + f32(0.0)"),  # -0.0 would change
        ("f32: x[i, j] - f32(-0.0)", "x[i, j] - f32(-0.0)"),
        ("f32: x[i, j] * f32(0.0)", "x[i, j] * f32(0.0)"),  # NaN and infinity would
        ("i64: n[i, j] + i64(0)", "n[i, j]"),
        ("i64: n[i, j] & i64(-1)", "n[i, j]"),
        ("i64: shl(n[i, j] - i64(0), i64(0))", "n[i, j]"),
        ("b8: c[i, j] ^ b8(False)", "c[i, j]"),
        ("b8: c[i, j] & b8(True)", "c[i, j]"),
        ("f32: neg(neg(x[i, j]))", "x[i, j]"),
        ("f32: abs(abs(x[i, j]))", "abs(x[i, j])"),
        ("f32: f32(f64(x[i, j]))", "x[i, j]"),
        ("bf16: bf16(f32(h[i, j]))", "h[i, j]"),
        ("f32: f32(bf16(x[i, j]))", "f32(bf16(x[i, j]))"),  # rounds
        ("bf16: bf16(f64(x[i, j]))", "bf16(x[i, j])"),
        ("i64: i64(i32(n[i, j]))", "i64(i32(n[i, j]))"),  # wraps
        ("i8: i8(i32(n[i, j]))", "i8(n[i, j])"),
        ("b8: b8(f32(c[i, j]))", "c[i, j]"),
        ("f32: f32(i64(c[i, j]))", "f32(c[i, j])"),
        ("i64: i64(f32(n[i, j]))", "i64(f32(n[i, j]))"),
        ("f32: bits(bits(x[i, j], i32), f32)", "x[i, j]"),
    ],
)
def test_drop_identity(before: str, after: str) -> None:
    assert one_line(drop_identity, before) == after


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("i8: i8(100) + i8(100)", "i8(-56)"),
        ("u8: u8(3) - u8(5)", "u8(254)"),
        ("i64: truncdiv(i64(-7), i64(2))", "i64(-3)"),
        ("i64: truncmod(i64(-7), i64(2))", "i64(-1)"),
        ("i8: floordiv(i8(-128), i8(-1))", "i8(-128)"),
        ("i8: shr(i8(-1), i8(9))", "i8(-1)"),
        ("i8: shl(i8(1), i8(-1))", "i8(0)"),
        ("b8: f32(0.1) < f32(0.10000000001)", "b8(False)"),  # one number in f32
        ("b8: f64(0.1) < f64(0.10000000001)", "b8(True)"),
        ("f32: f32(0.1) + f32(0.2)", "f32(0.30000001192092896)"),
        ("f32: f32(3e38) * f32(3e38)", "f32(inf)"),
        ("f32: minimum(f32(0.0), f32(-0.0))", "minimum(f32(0.0), f32(-0.0))"),
        ("f32: f32(1.0) / f32(0.0)", "f32(1.0) / f32(0.0)"),
        ("f32: ceil(f32(-0.5))", "f32(-0.0)"),
        ("f32: round(f32(2.5))", "f32(2.0)"),
        ("f32: f32(value(7))", "f32(7.0)"),
        ("i8: i8(f32(300.0))", "i8(f32(300.0))"),  # the CPU's business
        ("i8: i8(f32(-3.9))", "i8(-3)"),
        ("b8: b8(f32(1e-60))", "b8(False)"),
        ("bf16: bf16(f32(1.00390625))", "bf16(1.0)"),
    ],
)
def test_fold_constants(before: str, after: str) -> None:
    assert one_line(fold_constants, before) == after


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_folded_operations_are_what_the_oracle_computes(draw: st.DataObject) -> None:
    """One operation or cast on constants of any dtype, folded and not."""
    dtype = draw.draw(st.sampled_from(list(DTYPES.values())))
    if dtype.is_bool:
        number: st.SearchStrategy[bool | int | float] = st.booleans()
    elif dtype.is_int:
        ends = np.iinfo(oracle_values.STORAGE[dtype])
        number = st.one_of(st.integers(int(ends.min), int(ends.max)), st.integers(max(-9, int(ends.min)), 9))
    else:
        number = st.one_of(st.floats(), st.sampled_from([0.0, -0.0, 1.0, 0.1, 2.5, -3.5, 65520.0, 3.4e38, 1e-45]))
    kinds = [operation for operation in OPERATIONS.values() if dtype.kind in operation.kinds]
    operation = draw.draw(st.sampled_from(kinds))
    operands = tuple(Const(draw.draw(number), dtype) for _ in range(operation.arity))
    if dtype.is_int and operation.name in oracle_values.INTEGER_DIVISIONS and operands[1].value == 0:
        return
    value: Expr = Apply(operation.name, operands)
    if draw.draw(st.booleans()):
        value = Cast(draw.draw(st.sampled_from(list(DTYPES.values()))), operands[0])
    target = Buffer("y", value.dtype, (), ())
    program = Program("program", (), (Parameter(target, "out"),), (), (Nest((), (Store(target, (), value),)),))
    assert_same_bits(executed(fold_constants(program), {}, 0), executed(program, {}, 0), program)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("f32: where(c[i, j], x[i, j], x[i, j])", "x[i, j]"),
        ("f32: where(b8(True), x[i, j], f32(2.0))", "x[i, j]"),
        ("f32: where(b8(False), x[i, j], f32(2.0))", "f32(2.0)"),
        ("f32: where(not_(c[i, j]), x[i, j], f32(2.0))", "where(c[i, j], f32(2.0), x[i, j])"),
        ("b8: where(c[i, j], b8(True), b8(False))", "c[i, j]"),
        ("i64: where(c[i, j], i64(1), i64(0))", "where(c[i, j], i64(1), i64(0))"),
        ("f32: where(c[i, j], where(c[i, j], x[i, j], f32(1.0)), f32(2.0))", "where(c[i, j], x[i, j], f32(2.0))"),
        ("f32: where(c[i, j], x[i, j], where(c[i, j], f32(1.0), f32(2.0)))", "where(c[i, j], x[i, j], f32(2.0))"),
        (
            "i64: where(b8(True), i64(1), checked(n[i, j], 4, True, 'IndexError', 'no'))",
            "where(b8(True), i64(1), checked(n[i, j], 4, True, 'IndexError', 'no'))",
        ),
        (
            "i64: where(b8(True), i64(1), require(c[i, j], n[i, j], 'ValueError', 'no'))",
            "where(b8(True), i64(1), require(c[i, j], n[i, j], 'ValueError', 'no'))",
        ),
    ],
)
def test_fold_select(before: str, after: str) -> None:
    assert one_line(fold_select, before) == after


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("f32: guarded(value(i) < i64(8), x[i, j], f32(0.0))", "x[i, j]"),
        ("f32: guarded(value(i) >= i64(8), x[i - 8, j], f32(0.0))", "f32(0.0)"),
        ("f32: guarded(value(i) > i64(0), x[i - 1, j], f32(0.0))", "guarded(value(i) > i64(0), x[i - 1, j], f32(0.0))"),
        ("f32: guarded((value(i) >= i64(0)) & c[i, j], x[i, j], f32(0.0))", "guarded(c[i, j], x[i, j], f32(0.0))"),
        ("b8: value(4*i + j) == value(j + 4*i)", "b8(True)"),
        ("b8: value(i) == i64(9)", "b8(False)"),
        ("b8: value(i) != value(j)", "value(i) != value(j)"),
        ("f32: guarded(c[i, j], x[i, j], x[i, j])", "x[i, j]"),
        ("f32: require(value(i + 1) != i64(0), x[i, j], 'ValueError', 'no')", "x[i, j]"),
        (
            "f32: require(value(i) < i64(0), x[i, j], 'ValueError', 'no')",
            "require(b8(False), x[i, j], 'ValueError', 'no')",
        ),
        ("f32: require(c[i, j], x[i, j], 'ValueError', 'no')", "require(c[i, j], x[i, j], 'ValueError', 'no')"),
        (
            "b8: value(at(checked(n[i, j], 4, True, 'IndexError', 'no'), 0, 3)) >= i64(0)",
            "value(at(checked(n[i, j], 4, True, 'IndexError', 'no'), 0, 3)) >= i64(0)",
        ),
    ],
)
def test_simplify_guards(before: str, after: str) -> None:
    assert one_line(simplify_guards, before) == after


def test_drop_dead_stores() -> None:
    before = """
def program(x: f32[8], n: i64[8], y: out(f32[8])):
    t = local(f32[8])
    u = local(f32[8])
    v = local(i64[8])
    a = local(f32[8])
    b = local(i64[8])
    for i in box(8):
        t[i] = exp(x[i])
    for i in box(8):
        u[i] = t[i] + f32(1.0)
        y[i] = neg(x[i])
    for i in box(8):
        v[i] = checked(n[i], 8, True, 'IndexError', 'no')
    for _ in box():
        for k in scan(8):
            a[k], b[k] = cummax(x[k])
    for i in box(8):
        y[i] = a[i]
"""
    after = """
def program(x: f32[8], n: i64[8], y: out(f32[8])):
    v = local(i64[8])
    a = local(f32[8])
    for i in box(8):
        y[i] = neg(x[i])
    for i in box(8):
        v[i] = checked(n[i], 8, True, 'IndexError', 'no')
    for _ in box():
        for k in scan(8):
            a[k], _ = cummax(x[k])
    for i in box(8):
        y[i] = a[i]
"""
    assert passed(drop_dead_stores, before.lstrip()) == after.lstrip()


def test_drop_unit_axes() -> None:
    assert (
        passed(
            drop_unit_axes,
            """
def program(x: f32[1, 8, 1], y: out(f32[1, 8])):
    for i, j in box(1, 8):
        y[i, j] = sum(x[i, j, k] * f32(value(i)) for k in box(1))
""".lstrip(),
        )
        == """
def program(x: f32[1, 8, 1], y: out(f32[1, 8])):
    for j in box(8):
        y[0, j] = sum(x[0, j, k] * f32(value(0)) for k in box(1))
""".lstrip()
    )


MERGED = [
    (
        "def program(x: f32[8, 4], y: out(f32[8, 4])):\n    for i, j in box(8, 4):\n        y[i, j] = exp(x[i, j])\n",
        "def program(x: f32[8, 4], y: out(f32[8, 4])):\n    for i_j in box(32):\n"
        "        y[(i_j // 4), (i_j % 4)] = exp(x[(i_j // 4), (i_j % 4)])\n",
    ),
    (
        "def program(s0: size(1, 9), s1: size(1, 9), x: f32[s0, s1], y: out(f32[s0, s1])):\n"
        "    for i, j in box(s0, s1):\n        y[i, j] = exp(x[i, j])\n",
        "def program(s0: size(1, 9), s1: size(1, 9), x: f32[s0, s1], y: out(f32[s0, s1])):\n"
        "    for i_j in box(s0*s1):\n        y[(i_j // s1), (i_j % s1)] = exp(x[(i_j // s1), (i_j % s1)])\n",
    ),
    (  # three become one, and the reduction's two as well
        "def program(x: f32[2, 3, 4, 5, 6], y: out(f32[2, 3, 4])):\n    for i, j, k in box(2, 3, 4):\n"
        "        y[i, j, k] = sum(x[i, j, k, l, m] for l, m in box(5, 6))\n",
        "def program(x: f32[2, 3, 4, 5, 6], y: out(f32[2, 3, 4])):\n    for i_j_k in box(24):\n"
        "        y[(i_j_k // 12), ((i_j_k // 4) % 3), (i_j_k % 4)] = sum("
        "x[(i_j_k // 12), ((i_j_k // 4) % 3), (i_j_k % 4), (l_m // 6), (l_m % 6)] for l_m in box(30))\n",
    ),
]
KEPT_APART = [
    # a transpose, a bias along one axis, gaps between rows, a number that needs one axis, an index from data
    "def program(x: f32[4, 8], y: out(f32[8, 4])):\n    for i, j in box(8, 4):\n        y[i, j] = x[j, i]\n",
    "def program(x: f32[4], y: out(f32[8, 4])):\n    for i, j in box(8, 4):\n        y[i, j] = x[j]\n",
    "def program(x: f32[8, 4].stride(5, 1), y: out(f32[8, 4])):\n"
    "    for i, j in box(8, 4):\n        y[i, j] = x[i, j]\n",
    "def program(y: out(i64[8, 4])):\n    for i, j in box(8, 4):\n        y[i, j] = value(j)\n",
    "def program(n: i64[4], x: f32[9], y: out(f32[8, 4])):\n    for i, j in box(8, 4):\n"
    "        y[i, j] = x[at(checked(n[j], 9, True, 'IndexError', 'no'), 0, 8)]\n",
]


@pytest.mark.parametrize(("before", "after"), MERGED)
def test_merge_axes(before: str, after: str) -> None:
    assert passed(merge_axes, before) == after


@pytest.mark.parametrize("text", KEPT_APART)
def test_merge_axes_keeps_apart(text: str) -> None:
    assert passed(merge_axes, text) == text


def test_merge_axes_through_data() -> None:
    before = (
        "def program(n: i64[8, 4], x: f32[9], y: out(f32[8, 4])):\n    for i, j in box(8, 4):\n"
        "        y[i, j] = x[at(checked(n[i, j], 9, True, 'IndexError', 'no'), 0, 8)]\n"
    )
    assert "for i_j in box(32)" in passed(merge_axes, before)


def test_results_of_one_reduction_stay_together() -> None:
    program = merge_axes(
        parse_program(
            "def program(x: f32[2, 3, 4], y: out(f32[2]), n: out(i64[2])):\n    for i in box(2):\n"
            "        y[i] = argmax(x[i, j, k] for j, k in box(3, 4)).value\n"
            "        n[i] = argmax(x[i, j, k] for j, k in box(3, 4)).index\n"
        )
    )
    first, second = (node for node in walk(program) if isinstance(node, Reduce))
    assert (first.axes, first.body) == (second.axes, second.body)
    assert len(first.axes) == 1


# ---- the machinery


i, j, k = axis("i", 8), axis("j", 4), axis("k", 16)
X = Buffer("x", f32, (constant(8), constant(16)), (constant(16), constant(1)))
N = Buffer("n", i64, (constant(8),), (constant(1),))


def only_axis(value: Index) -> Axis:
    (found,) = free_axes(value)
    return found


def test_substitution_reaches_data() -> None:
    inner = Load(N, (i,))
    held = data(Checked(inner, constant(16), True, "IndexError", "no"), 0, 15)
    expr = Apply("add", (Load(X, (i, held)), Cast(f32, Position(held + i))))
    moved = substitute_axes(expr, {only_axis(i): 2 * j + 1})
    assert free_axes(moved) == {only_axis(j)}
    assert show(moved).count("n[2*j + 1]") >= 1
    assert substitute_axes(expr, {only_axis(j): i}) is expr


def test_substitution_does_not_capture() -> None:
    total = Reduce("sum", (only_axis(k),), Load(X, (i, k)), "value")
    moved = substitute_axes(total, {only_axis(i): k // 2})
    assert show(moved) == "sum(x[(k // 2), k_1] for k_1 in box(16))"
    assert show(substitute_axes(total, {}, around=[only_axis(k)])) == "sum(x[i, k_1] for k_1 in box(16))"


def test_rules_run_to_the_end() -> None:
    def halve(node: Expr) -> Expr | None:
        """i64(2*n) -> i64(n)"""
        match node:
            case Const(value=int() as value) if value and value % 2 == 0:
                return Const(value // 2, i64)
        return None

    def join(node: Expr) -> Expr | None:
        """n + n -> n * 2"""
        match node:
            case Apply(operation="add", operands=(left, right)) if left is right:
                return Apply("mul", (left, Const(2, i64)))
        return None

    value = Apply("add", (Const(64, i64), Const(32, i64)))
    assert show(apply_rules(value, (halve, join))) == "i64(1) * i64(1)"


def test_rules_that_undo_each_other_are_found() -> None:
    def flip(node: Expr) -> Expr | None:
        """b8(c) -> b8(not c)"""
        return Const(not node.value, b8) if isinstance(node, Const) else None

    with pytest.raises(Malformed, match="circles"):
        apply_rules(Const(True, b8), (flip,))

    def grow(node: Expr) -> Expr | None:
        """x[...] -> neg(x[...])"""
        return Apply("neg", (node,)) if isinstance(node, Load) else None

    with pytest.raises(Malformed, match="circles"):
        apply_rules(Load(X, (i, k)), (grow,))


def test_deep_and_shared_expressions_cost_one_visit_a_node() -> None:
    """5000 levels, each used twice: as a tree it would have 2**5000 nodes."""
    value: Expr = Load(X, (i, k))
    for _ in range(5000):
        value = Apply("add", (value, value))
    visits = 0

    def count(node: Expr) -> Expr | None:
        """x -> x"""
        nonlocal visits
        visits += 1
        return None

    assert apply_rules(value, (count,)) is value
    assert visits == 5001
    assert sum(1 for _ in walk(value)) == 5001
    assert not can_raise(value)
    moved = substitute_axes(value, {only_axis(i): j})
    assert free_axes(moved) == {only_axis(j), only_axis(k)}


def test_order_of_walking_is_the_order_of_reading() -> None:
    value = Select(Const(True, b8), Load(X, (i, k)), Cast(f32, Const(1.0, bf16)))
    assert list(walk(value)) == [value, value.condition, value.yes, value.no, *children(value.no)]
    assert of_atom(only_axis(i)) is i
