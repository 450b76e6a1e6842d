"""Every family of rows, listed once: importing this fills the table."""

from __future__ import annotations

from ferrite.lower import gather, pointwise, reduce, view
from ferrite.lower.table import all_rows, row_of

FAMILIES = (pointwise, view, reduce, gather)

__all__ = ["FAMILIES", "all_rows", "row_of"]
