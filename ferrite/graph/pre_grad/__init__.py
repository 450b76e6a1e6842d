"""Passes over the graph that Dynamo captured, before autograd; the order is the tuple.

A pass is one line of `PASSES`: what runs, whether it runs unless it is asked for, and the group that the driver runs it
in (`GROUPS`, in order). A pass `f(graph) -> int` may take settings as keywords with defaults: `f(graph, *, least=10)`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ferrite.graph.pre_grad.drop_idle_dropout import drop_idle_dropout
from ferrite.graph.pre_grad.normalise_keywords import normalise_keywords
from ferrite.graph.pre_grad.normalise_ops import normalise_ops

GROUPS = ("normalise", "clean", "device", "batch", "split_cat", "other", "last")


@dataclass(frozen=True)
class PreGradPass:
    """`default`: it runs unless it is disabled; else only if the option `pre_grad` names it."""

    run: Callable[..., int]
    group: str
    default: bool

    @property
    def name(self) -> str:
        return self.run.__name__


PASSES: tuple[PreGradPass, ...] = (
    PreGradPass(normalise_keywords, "normalise", default=True),
    PreGradPass(normalise_ops, "normalise", default=False),
    PreGradPass(drop_idle_dropout, "clean", default=True),
)  # fmt: skip

PRE_GRAD: tuple[Callable[..., int], ...] = tuple(entry.run for entry in PASSES if entry.default)
