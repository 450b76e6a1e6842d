"""The border to ShapeEnv: real symbols in, indices with their facts; and back as text that the host can evaluate."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._sympy import functions

from ferrite.errors import Unsupported
from ferrite.loops.index import bounds, divides, evaluate, free_sizes, known_nonnegative, show_index
from ferrite.lower.sizes import Sizes


def symbols(*shape: int) -> tuple[ShapeEnv, tuple[Any, ...]]:
    """Symbolic sizes as Dynamo makes them; `shape` is what they are in this call."""
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * len(shape))
    return env, tuple(mode.from_tensor(torch.empty(shape), symbolic_context=context).shape)


FORMS: list[Callable[[Any, Any], Any]] = [
    lambda a, b: a + b * 3 - 7,
    lambda a, b: a * b * b,
    lambda a, b: a * b // 4,
    lambda a, b: (a * b) // b + a % 5,
    lambda a, b: (a - 20) % 7 + (a - 20) // 3,
    lambda a, b: torch.sym_max(a, b) - torch.sym_min(a, 9),
    lambda a, b: (a + 2 * 1 - 3) // 2 + 1,
    lambda a, b: -(-a // 4),
    lambda a, b: (a // 2) * (b // 3) % 11,
    lambda a, b: a**3 if isinstance(a, int) else a * a * a,
]


@pytest.mark.parametrize("form", FORMS, ids=range(len(FORMS)))
def test_arithmetic_on_symbols_is_arithmetic_on_integers(form: Callable[[Any, Any], Any]) -> None:
    env, (a, b) = symbols(8, 12)
    sizes = Sizes(env)
    value = sizes.index(form(a, b))
    first, second = str(a.node.expr), str(b.node.expr)
    rng = random.Random(1)
    for _ in range(50):
        x, y = rng.randint(2, 90), rng.randint(2, 90)
        numbers = {first: x, second: y}
        expected = int(form(x, y))
        assert evaluate(value, {size: numbers[size.name] for size in sizes.sizes()}) == expected
        assert eval(show_index(value), {"min": min, "max": max}, numbers) == expected
    assert {size.name for size in free_sizes(value)} <= set(numbers)


def test_a_symbol_brings_its_range() -> None:
    env, (a, b) = symbols(8, 12)
    torch._check(a <= 512)
    torch._check(b >= 6)
    sizes = Sizes(env)
    assert bounds(sizes.index(a)) == (2, 512)
    assert bounds(sizes.index(b)) == (6, None)
    assert sizes.index(a) is sizes.index(a)
    assert [sizes.symbol(size) for size in sizes.sizes()] == [a.node.expr, b.node.expr]


def test_equal_sizes_are_one() -> None:
    env, (a, b) = symbols(8, 12)
    before = Sizes(env).index(b - a)
    assert before.terms
    torch._check(b == a + 4)
    assert str(Sizes(env).index(b - a)) == "4"


def test_what_is_learned_later_is_seen() -> None:
    env, (a, b) = symbols(8, 12)
    sizes = Sizes(env)
    assert sizes.index(b).terms
    torch._check(b == a + 4)
    assert sizes.index(b) is sizes.index(a) + 4


def test_divisibility_is_known() -> None:
    env, (a, _) = symbols(8, 12)
    torch._check(a % 4 == 0)
    value = Sizes(env).index(a)
    assert divides(4, value)
    assert show_index(value // 4) == f"({a} // 4)"
    assert bounds(value) == (4, None)


def test_a_fixed_symbol_is_a_number() -> None:
    env, (a, _) = symbols(8, 12)
    torch._check(a == 8)
    assert str(Sizes(env).index(a)) == "8"


def test_unbacked_sizes() -> None:
    env = ShapeEnv()
    count = env.create_unbacked_symint()
    sizes = Sizes(env)
    assert bounds(sizes.index(count)) == (None, None)
    length = env.create_unbacked_symint()
    torch._check(length >= 0)
    assert bounds(Sizes(env).index(length))[0] == 0


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda s: functions.FloorDiv(s, 4), "(s // 4)"),
        (lambda s: functions.CeilDiv(s, 4), "((s + 3) // 4)"),
        (lambda s: functions.CleanDiv(s * 4, 4), "s"),
        (lambda s: functions.ModularIndexing(s, 4, 3), "((s // 4) % 3)"),
        (lambda s: functions.PythonMod(s - 9, 4), "((s + 3) % 4)"),
        (lambda s: functions.Max(s, 9), "max(s, 9)"),
        (lambda s: functions.Min(s, 9, 5 * s), "min(s, 9)"),
        (lambda s: functions.LShift(s, 3), "8*s"),
        (lambda s: functions.RShift(s, 3), "(s // 8)"),
        (lambda s: functions.PowByNatural(s, sympy.Integer(2)), "s*s"),
        (lambda s: s**2, "s*s"),
        (lambda s: functions.Where(s > 0, s, sympy.Integer(3)), "s"),
        (lambda s: functions.Identity(s + 1), "s + 1"),
        (lambda s: sympy.Abs(s - 100), "max(-s + 100, s - 100)"),
    ],
)
def test_forms_of_sympy(build: Callable[[Any], Any], text: str) -> None:
    symbol = sympy.Symbol("s", integer=True, positive=True)
    assert str(Sizes().index(build(symbol))) == text


@pytest.mark.parametrize(
    "build",
    [
        lambda s: functions.IntTrueDiv(s, 3),
        lambda s: functions.TruncToInt(functions.ToFloat(s) * 1.5),
        lambda s: s / 2,
        lambda s: s**-1,
        lambda s: functions.Where(s > 5, s, sympy.Integer(3)),
        lambda s: sympy.Symbol("z", real=True) + s,
        lambda s: sympy.Float(2.5),
    ],
)
def test_what_has_no_form_is_refused(build: Callable[[Any], Any]) -> None:
    symbol = sympy.Symbol("s", integer=True, positive=True)
    with pytest.raises(Unsupported):
        Sizes().index(build(symbol))


def test_a_float_is_refused() -> None:
    with pytest.raises(Unsupported, match="float"):
        Sizes().index(2.0)  # type: ignore[arg-type]


def test_every_size_of_a_traced_graph_has_a_form() -> None:
    """A model with the usual shape arithmetic, exported with dynamic sizes."""

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            batch, length, width = x.shape
            heads = x.reshape(batch, length, 4, width // 4).transpose(1, 2)
            pooled = torch.nn.functional.avg_pool1d(x.transpose(1, 2), 3, 2, 1)
            windows = x.unfold(1, 3, 2)
            joined = torch.cat([x, y], 1)[:, 1:]
            return heads.sum() + pooled.sum() + windows.sum() + joined.flatten().sum()

    batch, first, second = torch.export.Dim("batch"), torch.export.Dim("first", min=5), torch.export.Dim("second")
    program = torch.export.export(
        Model(),
        (torch.randn(3, 10, 8), torch.randn(3, 5, 8)),
        dynamic_shapes=({0: batch, 1: first}, {0: batch, 1: second}),
    )
    found = 0
    sizes: Sizes | None = None
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            continue
        for extent, step in zip(value.shape, value.stride(), strict=True):
            if isinstance(extent, torch.SymInt):
                sizes = sizes or Sizes(extent.node.shape_env)
            if sizes is not None:
                index, stride = sizes.index(extent), sizes.index(step)
                found += bool(index.terms) + bool(stride.terms)
                assert known_nonnegative(index), extent
                assert known_nonnegative(stride), step
    assert found > 20


def test_a_size_that_a_guard_says_is_one() -> None:
    """No bound and no replacement tells of it: half of 3, rounded down."""
    env, (a,) = symbols(3)
    rest = a - (a + 1) // 2
    assert Sizes(env).index(rest).terms
    assert rest == 1  # as tracing asks where it stretches
    assert show_index(Sizes(env).index(rest)) == "1"
    assert Sizes(env).index(a - 1).terms
