"""Finds the pass that breaks a function: the first one whose presence makes compiled and eager results differ.

Passes are numbered in the order in which they run. With the first N of them applied the result is right, with N + 1
it is wrong: pass N + 1 is named. Runs in this process and keeps nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ferrite import backend
from ferrite.passes import applications
from ferrite.report.record import PassRun


@dataclass(frozen=True)
class Verdict:
    """What bisection found. `culprit` is None if nothing is wrong, or if it is wrong with no pass at all."""

    equal: bool
    culprit: PassRun | None
    tried: int
    text: str

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
    compared too if the result requires them. Inputs are copied for each run; the random state is the same in each.
    """
    given = dict(options or {})
    agree = same or _close
    expected = _run(function, inputs)
    tried = 0

    def right_with(limit: int | None) -> bool:
        nonlocal tried
        tried += 1
        torch._dynamo.reset()
        compiled = torch.compile(function, backend="ferrite", options={**given, "bisect_limit": limit})
        return agree(expected, _run(compiled, inputs))

    try:
        if right_with(None):
            return Verdict(True, None, tried, f"equal to eager with all {applications()} passes")
        high = applications()
        if not right_with(0):
            return Verdict(False, None, tried, "differs from eager with no pass applied: the fault is not in a pass")
        low = 0  # right with `low` passes, wrong with `high`
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if right_with(middle) else (low, middle)
        right_with(high)
        culprit = _number(high)
        where = f"{culprit.stage}.{culprit.name} on graph {culprit.graph}" if culprit else "a pass"
        return Verdict(False, culprit, tried, f"pass {high}, {where}, makes the result differ from eager")
    finally:
        torch._dynamo.reset()


def _number(number: int) -> PassRun | None:
    """The application with this number, in any of the records since the last reset."""
    return next((run for record in backend.records() for run in record.passes if run.number == number), None)


def _run(function: Callable[..., Any], inputs: Sequence[Any]) -> list[Any]:
    """Results and gradients of one call on fresh copies of the inputs, with the random state left as found."""
    copies = [_copy(value) for value in inputs]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        result = function(*copies)
        leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        differentiable = [leaf for leaf in leaves if leaf.requires_grad]
        sources = [value for value in copies if isinstance(value, torch.Tensor) and value.requires_grad]
        gradients: Sequence[Any] = ()
        if differentiable and sources:
            ones = [torch.ones_like(leaf) for leaf in differentiable]
            gradients = torch.autograd.grad(differentiable, sources, ones, allow_unused=True)
    return [*pytree.tree_leaves(result), *gradients, *copies]


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    return deepcopy(value)


def _close(expected: Any, found: Any) -> bool:
    try:
        torch.testing.assert_close(found, expected, equal_nan=True)
    except AssertionError:
        return False
    return True
