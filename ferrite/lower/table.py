"""The table of lowerings: which function turns which op into loops. Two rows for one op is an error at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ferrite.errors import Malformed

Row = Callable[..., Any]

_rows: dict[Any, Row] = {}


def lowers(*ops: Any) -> Callable[[Row], Row]:
    """Make the decorated function the row of each op."""

    def enter(row: Row) -> Row:
        for op in ops:
            if op in _rows:
                raise Malformed(f"{op} has two rows: {_rows[op].__name__} and {row.__name__}", where="lower.table")
            _rows[op] = row
        return row

    return enter


def row_of(op: Any) -> Row | None:
    return _rows.get(op)
