"""Every family of rows, listed once: importing this fills the table."""

from __future__ import annotations

from ferrite.lower import activation, create, gather, norm, pointwise, reduce, scan, view
from ferrite.lower.table import all_rows, row_of

FAMILIES = (pointwise, activation, create, view, reduce, scan, norm, gather)

__all__ = ["FAMILIES", "all_rows", "row_of"]
