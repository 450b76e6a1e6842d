"""Makes a failing stack smaller while it still fails: fewer layers, a plainer setting, plainer layers."""

from __future__ import annotations

import time
from collections.abc import Callable

from .stack import Recipe, Stack, made_of, simpler


def shrink(stack: Stack, fails: Callable[[Stack], bool], seconds: float = 60.0) -> Stack:
    """The smallest stack found. `fails` says whether one shows the same failure."""
    stop = time.monotonic() + seconds
    tried: set[Recipe] = {stack.recipe}
    progress = True
    while progress and time.monotonic() < stop:
        progress = False
        for recipe in simpler(stack):
            if time.monotonic() > stop:
                break
            if recipe in tried:
                continue
            tried.add(recipe)
            candidate = made_of(recipe)
            if candidate is not None and candidate.layers and fails(candidate):
                stack, progress = candidate, True
                break
    return stack
