"""What a pass over one kernel gives: the kernel, and what was decided on the way. Both are values, so that a pass can
be run and read alone; `of_each_kernel` (`schedule/__init__.py`) puts those of all kernels of a graph together.

A yes is recorded where something is done; a no where it was to be expected: the loops have the form that the pass looks
for, and a reason spoke against it. Kernels that have nothing of that form say nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ferrite.decisions import Decision
from ferrite.loops.access import written_by
from ferrite.loops.index import Axis
from ferrite.loops.nodes import Program, Statement


class Refusal(str):
    """Why something is not done."""


def refused(what: str, subjects: tuple[str, ...], why: str) -> Decision:
    """The no for which a refusal, or a text, gives the reason. Decisions are stored, so their texts are plain ones."""
    return Decision(what, subjects, False, str(why))


@dataclass(frozen=True)
class Decided:
    """A kernel after a pass, and the decisions of the pass."""

    program: Program
    decisions: tuple[Decision, ...] = ()


def box(axes: Iterable[Axis]) -> str:
    """Loops as the text of a program has them."""
    return f"box({', '.join(str(axis.extent) for axis in axes)})"


def on(program: Program, statements: Iterable[Statement]) -> tuple[str, str]:
    """The subjects of a decision on a nest: the kernel, and for the nest the buffer that it writes last."""
    names = [buffer.name for statement in statements for buffer in written_by(statement)]
    return program.name, names[-1] if names else "nothing"
