"""Runs what a stage made against what it was given, on the real inputs, and names the pass that changed the numbers.

    options={"numeric_check": {"pre_grad": {"precision": 1e-4, "steps": 2}}}

    normalise_ops: output 0 differs by 0.3, with its rewrite 2 of 5 (of cat_1)

For debugging: everything runs twice. Outputs, inputs after the call and gradients are compared, then once more after a
step down the gradients. Nothing else in the process notices. Inputs that are fake are not checked; the record says so.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ferrite.decisions import Decision
from ferrite.errors import Malformed, unknown
from ferrite.graph.effects import is_of_torch
from ferrite.graph.ledger import keep_ledger
from ferrite.graph.names import name_of
from ferrite.graph.query import family
from ferrite.graph.snapshot import copy_module
from ferrite.graph.trial import NotTried, Trial, difference, run_trial
from ferrite.options import Options, with_effect
from ferrite.passes import GraphPass
from ferrite.report.record import GraphRecord

if TYPE_CHECKING:
    from torch.fx import GraphModule

log = logging.getLogger(__name__)

STAGES = ("pre_grad",)
SETTINGS = {"precision": 1e-4, "steps": 2}


def check_settings(options: Options) -> None:
    """Raise RuntimeError for a stage or setting that does not exist, or a value that means nothing."""
    for stage, settings in options.numeric_check:
        if stage not in STAGES:
            raise RuntimeError(unknown("stage of numeric_check", stage, STAGES))
        for name, value in settings:
            if name not in SETTINGS:
                raise RuntimeError(unknown("setting of numeric_check", str(name), SETTINGS))
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not value > 0 or (name == "steps" and not isinstance(value, int)):
                expected = "a whole number above 0" if name == "steps" else "a number above 0"
                raise RuntimeError(f"Ferrite's setting {name!r} of numeric_check expects {expected}, given {value!r}")


def wanted(stage: str, options: Options) -> bool:
    return any(name == stage for name, _ in options.numeric_check)


class NumericCheck:
    """One stage of one graph: made before the passes run, asked after them."""

    def __init__(self, stage: str, module: GraphModule, inputs: Sequence[Any], options: Options) -> None:
        self._stage = stage
        self._original = copy_module(module)
        # Constants that passes make are held as further ones.
        self._buffers = {name for name, _ in module.named_buffers()}
        self._inputs = inputs
        self._settings = SETTINGS | dict(dict(options.numeric_check)[stage])
        self._strict = options.strict
        self._asked = with_effect(options)

    def report(self, module: GraphModule, passes: Sequence[GraphPass], record: GraphRecord) -> None:
        try:
            expected = self._try(self._original)
        except NotTried as reason:
            record.decisions.append(Decision("numeric_check", (self._stage,), False, f"not checked: {reason}"))
            return
        text = difference(expected, self._try(module), self._settings["precision"])
        if text is None:
            equal = f"equal within {self._settings['precision']} over {self._settings['steps']} steps"
            record.decisions.append(Decision("numeric_check", (self._stage,), True, equal))
            return
        name, found = self._culprit(expected, passes, record) or (self._stage, text)
        record.decisions.append(Decision("numeric_check", (name,), False, found))
        if self._strict:
            raise Malformed(f"{name}: {found}", where=f"{self._stage}.{name}")
        log.warning("Ferrite's numeric check of %s: %s: %s", self._stage, name, found)

    def _culprit(self, expected: Trial, passes: Sequence[GraphPass], record: GraphRecord) -> tuple[str, str] | None:
        """The first pass after which the numbers differ; they run again, one by one, on a copy."""
        current = copy_module(self._original)
        ran = {(run.graph, run.name) for run in record.passes if run.changed}
        for place, (graph, _) in enumerate(family(current)):
            for run in passes:
                if (graph, run.__name__) not in ran:
                    continue
                before = copy_module(current)
                rewrites = self._apply(current, place, run, None)
                if (text := self._differs(expected, current)) is not None:
                    return run.__name__, text + self._which(expected, before, place, run, rewrites)
        return None

    def _which(self, expected: Trial, before: GraphModule, place: int, run: GraphPass, rewrites: list[str]) -> str:
        """Which rewrite of the pass it is, by trying with more and more of them."""
        for number, nodes in enumerate(rewrites, 1):
            current = copy_module(before)
            self._apply(current, place, run, number)
            if self._differs(expected, current) is not None:
                return f", with its rewrite {number} of {len(rewrites)} (of {nodes})"
        return ""

    def _apply(self, module: GraphModule, place: int, run: GraphPass, limit: int | None) -> list[str]:
        _, member = list(family(module))[place]
        with keep_ledger(member.graph, run.__name__, limit, options=self._asked) as ledger:
            run(member.graph)
        member.recompile()
        return [", ".join(decision.subjects) for decision in ledger.decisions if decision.taken]

    def _differs(self, expected: Trial, module: GraphModule) -> str | None:
        return difference(expected, self._try(module), self._settings["precision"])

    def _try(self, module: GraphModule) -> Trial:
        for _, member in family(self._original):
            for node in member.graph.nodes:
                if node.op == "call_function" and not is_of_torch(node.target):
                    raise NotTried(f"{name_of(node.target) or node.name} may do more than compute")
        return run_trial(module, self._inputs, steps=self._settings["steps"], buffers=self._buffers)
