"""Which loops share a kernel, in what order, in what memory. The order of its passes is the tuple."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SCHEDULE_PASSES: tuple[Callable[[Any], Any], ...] = ()
