"""The loop IR: what a kernel computes, as data. Knows neither torch nor LLVM. The order of its passes is the tuple."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

LOOP_PASSES: tuple[Callable[[Any], Any], ...] = ()
