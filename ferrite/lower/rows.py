"""Every family of rows, listed once: importing this fills the table."""

from __future__ import annotations

from ferrite.lower import gather, norm, pointwise, reduce, scan, view
from ferrite.lower.table import all_rows, row_of

FAMILIES = (pointwise, view, reduce, scan, norm, gather)

__all__ = ["FAMILIES", "all_rows", "row_of"]
