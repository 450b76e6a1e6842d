"""Makes a failing stack smaller while it still fails: fewer layers, a plainer setting, plainer layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.fuzz.shrink import smallest

from .stack import Recipe, Stack, made_of, simpler


def shrink(stack: Stack, fails: Callable[[Stack], bool], seconds: float = 60.0) -> Stack:
    """The smallest stack found. `fails` says whether one shows the same failure."""

    def next_to(recipe: Recipe) -> Iterator[Recipe]:
        made = made_of(recipe)
        return simpler(made) if made is not None else iter(())

    def is_one(recipe: Recipe) -> bool:
        made = made_of(recipe)
        return made is not None and bool(made.layers) and fails(made)

    return made_of(smallest(stack.recipe, next_to, is_one, seconds)) or stack
