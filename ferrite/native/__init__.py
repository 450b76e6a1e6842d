"""From scheduled loops to machine code. The order of its passes is the tuple."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

NATIVE_PASSES: tuple[Callable[[Any], Any], ...] = ()
