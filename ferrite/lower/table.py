"""The table of lowerings: which function turns which op into loops. Two rows for one op is an error at once.

A row is called with the op's arguments: tensors as `value.Tensor`, symbolic sizes as `Index`, everything else as it
stands. It gives a `Tensor`, a tuple of them, or a `Built`; it raises `Unsupported` for arguments that it does not
handle, and the op then runs in eager. Rows of views (`views`) give a `Tensor` that only reads its first argument
elsewhere, or a list of such: the lowering may instead run the op itself on the tensor in memory, which keeps
aliasing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ferrite.errors import Malformed


@dataclass(frozen=True)
class Row:
    """One entry: the function, whether its result is a view of its first argument, what else it asks for, and
    whether it reads the elements of its operands many times."""

    lower: Callable[..., Any]
    is_view: bool = False
    wants_result: bool = False
    wants_draw: bool = False
    wants_traced: bool = False
    rereads: bool = False


_rows: dict[Any, Row] = {}


def lowers(*ops: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make the decorated function the row of each op. A row with a keyword `result` is told what eager would give; one
    with a keyword `draw` is given a seed; one with `traced` gets the tensors of the trace as well, for ops that look at
    strides before they look at values. An op that may not exist yet, because a module of PyTorch that we do not
    import defines it, is given by its name."""
    return _enter(ops, is_view=False)


def views(*ops: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """As `lowers`, for ops whose results share memory with their first argument."""
    return _enter(ops, is_view=True)


def rereads(*ops: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """As `lowers`, for ops that read each element of their operands many times: expressions are stored before."""
    return _enter(ops, is_view=False, rereads=True)


def _enter(
    ops: tuple[Any, ...], *, is_view: bool, rereads: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def enter(lower: Callable[..., Any]) -> Callable[..., Any]:
        asked = inspect.signature(lower).parameters
        for op in ops:
            if op in _rows:
                raise Malformed(
                    f"{op} has two rows: {_rows[op].lower.__name__} and {lower.__name__}", where="lower.table"
                )
            _rows[op] = Row(lower, is_view, "result" in asked, "draw" in asked, "traced" in asked, rereads)
        return lower

    return enter


def row_of(op: Any) -> Row | None:
    return _rows.get(op) or _rows.get(str(op))


def all_rows() -> dict[Any, Row]:
    return dict(_rows)
