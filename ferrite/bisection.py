"""Finds what makes a compiled function differ from eager: a pass and which of its rewrites, the lowering of a call, the
machine code of a kernel, the native host, or an option.

Passes, calls and kernels are numbered in the order in which they come. With the first N of them the result is right,
with N + 1 it is wrong: number N + 1 is named. First each of `PARTS` is left out alone, which says where to search, and
which options a user may set until the fault is mended. Runs in this process and keeps nothing. The cache on disk is
neither asked, since no pass runs on a hit, nor written.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ferrite import backend
from ferrite.graph.trial import run_trial
from ferrite.options import Options, from_environment, resolve
from ferrite.passes import KERNELS, LOWERINGS, applications
from ferrite.report.record import PassRun

LAYOUT, HOST = "the channels-last layout", "the native host"
MACHINE_CODE, LOWERED = "machine code of kernels", "kernels of its own"

# What can be left out, and the option that does so; what leaves out more comes later.
PARTS: dict[str, dict[str, Any]] = {
    LAYOUT: {"layout": "off"},
    "gaps between rows": {"padding": "off"},
    "small products as loops": {"products": "library"},
    "random numbers of its own": {"fallback_random": True},
    "donated buffers": {"donate_buffers": False},
    "rewrites before autograd": {"pre_grad_rewrites": False},
    "asserts on sizes": {"runtime_asserts": False},
    HOST: {"host": "python"},
    MACHINE_CODE: {"executor": "oracle"},
    LOWERED: {"executor": "eager"},
}


@dataclass(frozen=True)
class Verdict:
    """What bisection found. `culprit` is the pass to blame, and `rewrite` the number of its rewrite, from 1; `lowering`
    or `kernel` the call or kernel, if it is none of the passes. `cures`: options each of which makes the result right.
    All are empty if nothing is wrong, or if that cannot be told."""

    equal: bool
    culprit: PassRun | None
    tried: int
    text: str
    rewrite: int | None = None
    lowering: str = ""
    kernel: str = ""
    cures: tuple[Mapping[str, Any], ...] = field(default=())

    def __str__(self) -> str:
        return self.text


def bisect(
    function: Callable[..., Any],
    inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    same: Callable[[Any, Any], bool] | None = None,
) -> Verdict:
    """Compile `function` with more and less of the compiler until what changes its result is found.

    `same(expected, found)` decides; by default results agree within the usual tolerance of their dtypes. Gradients are
    compared too if the result requires them, of inputs and, if `function` is a module, of its parameters; so are its
    buffers after the call. Inputs are copied for each run, parameters and buffers are put back; the random state is the
    same in each. Where eager runs, an exception is a difference; if it comes without any pass or kernel too, it is
    raised.
    """
    try:
        return _Search(function, inputs, dict(options or {}), same or _close).verdict()
    finally:
        torch._dynamo.reset()


class _Search:
    """One bisection: what is compiled, what eager gives, and how many compiles it took."""

    def __init__(
        self,
        function: Callable[..., Any],
        inputs: Sequence[Any],
        options: dict[str, Any],
        same: Callable[[Any, Any], bool],
    ) -> None:
        self.function, self.inputs, self.same = function, inputs, same
        self.options = {name.replace("-", "_"): value for name, value in options.items()}
        self.asked = resolve(from_environment(os.environ), None, options)
        self.expected = _run(function, inputs)
        self.tried = 0
        self.failure: Exception | None = None  # of the latest compile or call

    def verdict(self) -> Verdict:
        if self.is_right():
            return self._says(f"equal to eager with all {applications()} passes", equal=True)
        first_failure, passes = self.failure, applications()
        without_passes = self.is_right(bisect_limit=0)
        last_failure = self.failure
        cures = {part: change for part, change in self._changes().items() if self.is_right(**change)}
        if without_passes:
            return self._blame_pass(passes, cures)
        if MACHINE_CODE in cures:
            if HOST in cures:
                return self._says(f"{HOST} {self._does(first_failure)}", cures)
            number = self._first_wrong_of(KERNELS, "bisect_kernels", host="python", bisect_limit=0)
            if number is not None:
                shown = _named(KERNELS, number)
                text = f"the machine code of {shown} {self._does()}; interpreted, the same loops are right"
                return self._says(text, cures, kernel=shown)
        elif LOWERED in cures:
            number = self._first_wrong_of(LOWERINGS, "bisect_lowerings", bisect_limit=0)
            if number is not None:
                shown = _named(LOWERINGS, number)
                return self._says(f"the lowering of {shown} {self._does()}", cures, lowering=shown)
        if not cures:
            if last_failure is not None:
                raise last_failure
            if not self._agrees("aot_eager"):
                return self._says("PyTorch's own tracing differs from eager, so backend='aot_eager' does too")
        if first_failure is not None:  # which says where
            return self._says(f"it {self._does(first_failure)}", cures)
        return self._says("differs from eager with no pass applied: the fault is not in a pass", cures)

    def _blame_pass(self, passes: int, cures: Mapping[str, Any]) -> Verdict:
        number = _first_wrong(passes, lambda limit: self.is_right(bisect_limit=limit))
        self.is_right(bisect_limit=number)
        does, culprit = self._does(), _pass(number)
        if culprit is None:
            return self._says(f"pass {number} {does}", cures)
        text = f"pass {number}, {culprit.stage}.{culprit.name} on graph {culprit.graph}, {does}"
        rewrite = None
        if culprit.rewrites and self.is_right(bisect_limit=number, bisect_rewrites=0):
            count = len(culprit.rewrites)
            rewrite = _first_wrong(count, lambda limit: self.is_right(bisect_limit=number, bisect_rewrites=limit))
            nodes = ", ".join(culprit.rewrites[rewrite - 1])
            text += f" with its rewrite {rewrite} of {count} (of {nodes})"
        return self._says(text, cures, culprit=culprit, rewrite=rewrite)

    def _first_wrong_of(self, kind: str, option: str, **others: Any) -> int | None:
        """The number of the call or kernel with which the result becomes wrong, in the latest compile; None if it is
        not one of them alone."""
        if self.is_right(**others):
            return None
        count = applications(kind)
        if not self.is_right(**others, **{option: 0}):
            return None
        number = _first_wrong(count, lambda limit: self.is_right(**others, **{option: limit}))
        return None if self.is_right(**others, **{option: number}) else number

    def _changes(self) -> dict[str, dict[str, Any]]:
        """The options to try alone: those that leave out a part, and the defaults of those that were given."""
        plain = Options()
        changes = PARTS | {
            f"{name}={getattr(self.asked, name)!r}": {name: getattr(plain, name)}
            for name in sorted(self.options)
            if not any(name in change for change in PARTS.values())
        }
        return {
            part: change
            for part, change in changes.items()
            if any(getattr(self.asked, name) != value for name, value in change.items())
        }

    def is_right(self, **changes: Any) -> bool:
        """Whether the result is eager's with these options on top of those given."""
        return self._agrees("ferrite", {**self.options, **changes, "cache": "off"})

    def _agrees(self, compiler: str, options: dict[str, Any] | None = None) -> bool:
        self.tried, self.failure = self.tried + 1, None
        torch._dynamo.reset()
        compiled = torch.compile(self.function, backend=compiler, options=options)
        try:
            return self.same(self.expected, _run(compiled, self.inputs))
        except Exception as error:
            self.failure = error
            return False

    def _does(self, failure: Exception | None = None) -> str:
        failure = failure or self.failure
        return "makes the result differ from eager" if failure is None else f"fails: {failure}"

    def _says(self, text: str, cures: Mapping[str, Mapping[str, Any]] | None = None, **found: Any) -> Verdict:
        if cures:
            ways = (f"{part} ({', '.join(f'{k}={v!r}' for k, v in change.items())})" for part, change in cures.items())
            text += f"; right without {', or without '.join(ways)}"
        facts = {"equal": False, "culprit": None, "cures": tuple((cures or {}).values())} | found
        return Verdict(tried=self.tried, text=text, **facts)


def _first_wrong(last: int, right_with: Callable[[int], bool]) -> int:
    """The first number that is not right; 0 is right and `last` is not."""
    low, high = 0, last
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if right_with(middle) else (low, middle)
    return high


def _pass(number: int) -> PassRun | None:
    """The application with this number, in any of the records since the last reset."""
    return next((run for record in backend.records() for run in record.passes if run.number == number), None)


def _named(kind: str, number: int) -> str:
    """The call or kernel with this number."""
    graphs = (graph for record in backend.records() for graph in record.graphs)
    return next((found[number] for graph in graphs if number in (found := graph.numbered.get(kind, {}))), "unknown")


def _run(function: Callable[..., Any], inputs: Sequence[Any]) -> list[Any]:
    """Results, gradients and inputs after one call on copies of the inputs, with the random state left as found."""
    return [value for _, value in run_trial(function, inputs).values]


def _close(expected: Any, found: Any) -> bool:
    try:
        torch.testing.assert_close(found, expected, equal_nan=True)
    except AssertionError:
        return False
    return True
