"""Which aten ops are split before we see them, and why.

A row names an op that AOTAutograd replaces, while it traces, by its definition in simpler ops. Splitting pays once
the parts have lowerings and can be fused; an op that runs in eager anyway is better left whole: one library kernel,
eager's rounding, fewer nodes to trace. So the table starts empty and grows with `lower/`; the option `decompose` adds
rows by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._decomp import get_decompositions

from ferrite.graph.names import resolve

# (op, why it is split)
DECOMPOSED: tuple[tuple[str, str], ...] = ()


def decomposition_table(further: tuple[str, ...] = ()) -> dict[Any, Callable[..., Any]]:
    """The table for AOTAutograd; raises RuntimeError for an op that does not exist or has no decomposition."""
    table: dict[Any, Callable[..., Any]] = {}
    for name in (*(name for name, _ in DECOMPOSED), *further):
        try:
            op = resolve(name)
        except (AttributeError, ImportError):
            raise RuntimeError(
                f"option 'decompose': there is no op {name!r}; ops are named like 'aten.gelu.default'"
            ) from None
        found = get_decompositions([op])
        if not found:
            raise RuntimeError(f"option 'decompose': PyTorch has no decomposition of {name}")
        table.update(found)
    return table
