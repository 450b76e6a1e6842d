"""Small functions that host programs call by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function that has no name of its own (it arrives as a constant)."""
    return function(*args, **kwargs)
