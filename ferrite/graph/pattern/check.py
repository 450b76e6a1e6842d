"""What is asked of a match before anything is done with it, and checks that are made for patterns.

    register_pattern(search, replacement, inputs, extra_check=if_option("fallback_random", False))

A check says True or False, a condition on sizes, or in a text why not. What it refuses is on record with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.fx.experimental.symbolic_shapes import statically_known_true

from ferrite.graph.ledger import ledger_of
from ferrite.graph.pattern.match import Match

Check = Callable[[Match], Any]


def objection(check: Check | None, match: Match) -> str | None:
    """Why a check says no, or None if it says yes. A condition on sizes that vary is no unless it can be proved."""
    answer = check is None or check(match)
    if not isinstance(answer, str):
        answer = None if statically_known_true(answer) else ""
    return "its check says no" if answer == "" else answer


def if_option(name: str, wanted: Any = True) -> Check:
    """A check that says yes where an option of the compile has the value that is wanted."""
    # Not a function in here: the key of a pattern holds what a partial was given, and nothing that our functions close
    # over.
    return partial(_option_is, name, wanted)


def _option_is(name: str, wanted: Any, match: Match) -> bool | str:
    options = ledger_of(match.nodes[0].graph).options
    if name not in options:
        raise ValueError(
            f"a check cannot ask for the option {name!r}; it can for {', '.join(sorted(options)) or 'none'}"
        )
    found = options[name]
    return found == wanted or f"the option {name} is {found!r}, not {wanted!r}"
