"""Sizes as arithmetic on values at hand."""

from __future__ import annotations

import operator
import random

import pytest
import sympy
import torch
from torch.fx import Graph, GraphModule, Proxy
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.functions import FloorDiv, Max, Min, Mod

from ferrite.graph.size_values import size_values

S1, S2 = sympy.symbols("s1 s2", integer=True, positive=True)


def test_products_and_sums() -> None:
    assert size_values((S1 * S2, S1 + S2, 7, sympy.Integer(3)), {"s1": 4, "s2": 5}) == (20, 9, 7, 3)


def expression(generator: random.Random, depth: int) -> sympy.Expr:
    if depth == 0:
        return generator.choice([S1, S2, sympy.Integer(generator.randint(1, 9))])
    one, other = expression(generator, depth - 1), expression(generator, depth - 1)
    return generator.choice(
        [
            operator.add,
            operator.mul,
            operator.sub,
            Min,
            Max,
            lambda a, b: FloorDiv(a, b + 100),
            lambda a, b: Mod(a * a, 7),
        ]
    )(one, other)


@pytest.mark.parametrize("seed", range(40))
def test_random_expressions(seed: int) -> None:
    generator = random.Random(seed)
    size = expression(generator, 3)
    for _ in range(5):
        given = {"s1": generator.randint(1, 50), "s2": generator.randint(1, 50)}
        assert size_values((size,), given)[0] == int(size.subs({S1: given["s1"], S2: given["s2"]}))


def test_lands_in_a_graph() -> None:
    graph = Graph()
    a, b = Proxy(graph.placeholder("a")), Proxy(graph.placeholder("b"))
    product, total = size_values((S1 * S2, FloorDiv(S1, S2)), {"s1": a, "s2": b})
    graph.output((product.node, total.node))
    assert GraphModule(torch.nn.Module(), graph)(7, 2) == (14, 3)


def test_a_size_of_the_shape_environment() -> None:
    size = ShapeEnv().create_unbacked_symint()
    assert size_values((size * 2,), {str(size): 5}) == (10,)


def test_a_symbol_without_a_value() -> None:
    with pytest.raises(KeyError):
        size_values((S1,), {})
