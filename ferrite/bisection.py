"""Finds the pass that breaks a function, and which of its rewrites: the first ones whose presence makes compiled and
eager results differ.

Passes are numbered in the order in which they run. With the first N of them applied the result is right, with N + 1
it is wrong: pass N + 1 is named. The same is then done with the rewrites of that pass, if it keeps count of them. Runs
in this process and keeps nothing. The cache on disk is neither asked, since no pass runs on a hit, nor written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ferrite import backend
from ferrite.graph.trial import run_trial
from ferrite.passes import applications
from ferrite.report.record import PassRun


@dataclass(frozen=True)
class Verdict:
    """What bisection found. `culprit` is None if nothing is wrong, or if it is wrong with no pass at all; `rewrite` is
    the number of the rewrite to blame, from 1, if that can be told."""

    equal: bool
    culprit: PassRun | None
    tried: int
    text: str
    rewrite: int | None = None

    def __str__(self) -> str:
        return self.text


def bisect(
    function: Callable[..., Any],
    inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    same: Callable[[Any, Any], bool] | None = None,
) -> Verdict:
    """Compile `function` with more and fewer passes until the one that changes its result is found.

    `same(expected, found)` decides; by default results agree within the usual tolerance of their dtypes. Gradients are
    compared too if the result requires them, of inputs and, if `function` is a module, of its parameters; so are its
    buffers after the call. Inputs are copied for each run, parameters and buffers are put back; the random state is the
    same in each. Where eager runs, an exception is a difference; if it comes without any pass too, it is raised.
    """
    given = dict(options or {})
    agree = same or _close
    expected = _run(function, inputs)
    tried = 0
    failure: Exception | None = None

    def right_with(limit: int | None, rewrites: int | None = None) -> bool:
        nonlocal tried, failure
        tried, failure = tried + 1, None
        torch._dynamo.reset()
        limits = {"bisect_limit": limit, "bisect_rewrites": rewrites}
        compiled = torch.compile(function, backend="ferrite", options={**given, **limits, "cache": "off"})
        try:
            return agree(expected, _run(compiled, inputs))
        except Exception as error:
            failure = error
            return False

    try:
        if right_with(None):
            return Verdict(True, None, tried, f"equal to eager with all {applications()} passes")
        passes = applications()
        if not right_with(0):
            if failure is not None:
                raise failure
            return Verdict(False, None, tried, "differs from eager with no pass applied: the fault is not in a pass")
        number = _first_wrong(passes, right_with)
        right_with(number)
        what = "makes the result differ from eager" if failure is None else f"fails: {failure}"
        culprit = _number(number)
        if culprit is None:
            return Verdict(False, None, tried, f"pass {number} {what}")
        where = f"{culprit.stage}.{culprit.name} on graph {culprit.graph}"
        text = f"pass {number}, {where}, {what}"
        rewrite = None
        if culprit.rewrites and right_with(number, 0):
            rewrite = _first_wrong(len(culprit.rewrites), lambda limit: right_with(number, limit))
            nodes = ", ".join(culprit.rewrites[rewrite - 1])
            text += f" with its rewrite {rewrite} of {len(culprit.rewrites)} (of {nodes})"
        return Verdict(False, culprit, tried, text, rewrite)
    finally:
        torch._dynamo.reset()


def _first_wrong(last: int, right_with: Callable[[int], bool]) -> int:
    """The first number that is not right; 0 is right and `last` is not."""
    low, high = 0, last
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if right_with(middle) else (low, middle)
    return high


def _number(number: int) -> PassRun | None:
    """The application with this number, in any of the records since the last reset."""
    return next((run for record in backend.records() for run in record.passes if run.number == number), None)


def _run(function: Callable[..., Any], inputs: Sequence[Any]) -> list[Any]:
    """Results, gradients and inputs after one call on copies of the inputs, with the random state left as found."""
    return [value for _, value in run_trial(function, inputs).values]


def _close(expected: Any, found: Any) -> bool:
    try:
        torch.testing.assert_close(found, expected, equal_nan=True)
    except AssertionError:
        return False
    return True
