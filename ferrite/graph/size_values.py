"""Sizes that are expressions, as arithmetic on values at hand: so that they can stand in a graph.

s1 * s2, s1 + s2   with   s1: a, s2: b      ->      a * b, a + b
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis


def size_values(sizes: Sequence[Any], values: Mapping[str, Any]) -> tuple[Any, ...]:
    """Each size from `values`, which gives a number, a proxy or another value for every symbol; numbers stay.

    Raises KeyError for a symbol without a value.
    """
    return tuple(_size_value(size, values) for size in sizes)


def _size_value(size: Any, values: Mapping[str, Any]) -> Any:
    expression = size.node.expr if isinstance(size, torch.SymInt) else size
    if isinstance(expression, int):
        return expression
    if isinstance(expression, sympy.Integer):
        return int(expression)
    given = {symbol: values[str(symbol)] for symbol in sorted(expression.free_symbols, key=str)}
    return sympy_interp(PythonReferenceAnalysis, given, expression)
