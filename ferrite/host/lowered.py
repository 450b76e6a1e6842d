"""What lowering hands to the schedule: the steps of one graph in order, and everything they need. Plain data."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ferrite.decisions import Decision
from ferrite.host.nodes import Call, Input, Launch
from ferrite.loops.nodes import Program


@dataclass(frozen=True)
class Body:
    """One callable: its steps in order. `memory`: for a name that shares memory with others, the one name that stands
    for all of them; `writes`: for the result of a call, the names of the arguments that it writes to; `bytes`: how long
    memory is, by the name that stands for it, unless sizes change; `about`: how many bytes a tensor has in the trace;
    `flops`: operations of the call that makes a result, where they can be counted."""

    name: str
    inputs: tuple[Input, ...]
    steps: tuple[Call | Launch, ...]
    result: Any
    memory: dict[str, str] = field(default_factory=dict)
    writes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    about: dict[str, int] = field(default_factory=dict)
    flops: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Lowered:
    """A graph, the functions that its operators call, and the kernels and constants of all of them. `fallbacks` and
    `reasons`: what runs in eager; `decisions`: what lowering and schedule did and did not do."""

    main: Body
    functions: tuple[Body, ...] = ()
    kernels: tuple[Program, ...] = ()
    constants: dict[str, Any] = field(default_factory=dict)
    fallbacks: Counter[str] = field(default_factory=Counter)
    reasons: dict[str, str] = field(default_factory=dict)
    lowered: int = 0
    decisions: tuple[Decision, ...] = ()
    calls: tuple[str, ...] = ()  # those that were lowered, in order, where only some may be

    @property
    def bodies(self) -> tuple[Body, ...]:
        return self.main, *self.functions


def does_the_same(one: Lowered, other: Lowered) -> bool:
    """Whether two differ in nothing but decisions."""
    parts = zip((*one.bodies, *one.kernels), (*other.bodies, *other.kernels), strict=False)
    return len(one.kernels) == len(other.kernels) and all(a is b for a, b in parts)
