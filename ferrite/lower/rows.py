"""Every family of rows, listed once: importing this fills the table."""

from __future__ import annotations

from ferrite.lower import (
    activation,
    binary,
    combine,
    create,
    foreach,
    gather,
    loss,
    norm,
    pad,
    pointwise,
    pool,
    product,
    random,
    reduce,
    resample,
    scan,
    view,
)
from ferrite.lower.table import all_rows, row_of

FAMILIES = (
    pointwise,
    binary,
    activation,
    create,
    view,
    reduce,
    scan,
    combine,
    norm,
    gather,
    loss,
    random,
    pool,
    product,
    pad,
    resample,
    foreach,
)

__all__ = ["FAMILIES", "all_rows", "row_of"]
