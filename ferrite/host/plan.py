"""From lowered steps to a host program: every value is freed right after its last reader.

Memory goes back as early as eager's would and earlier: arguments arrive in a list that is emptied at once, so an
activation that only the backward held dies in the middle of the backward.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ferrite.host.lowered import Lowered
from ferrite.host.nodes import Call, Constant, Free, HostProgram, Input, Launch, Return, Step
from ferrite.loops.nodes import Program
from ferrite.syntax import refs


def plan_all(lowered: Lowered, name: str, constants: tuple[Constant, ...]) -> HostProgram:
    """The program of a graph, with everything that it calls."""
    functions = tuple(plan(body.name, body.inputs, body.steps, body.result) for body in lowered.functions)
    main = lowered.main
    return plan(name, main.inputs, main.steps, main.result, functions, constants, lowered.kernels)


def plan(
    name: str,
    inputs: tuple[Input, ...],
    calls: Iterable[Call | Launch],
    result: Any,
    functions: tuple[HostProgram, ...] = (),
    constants: tuple[Constant, ...] = (),
    kernels: tuple[Program, ...] = (),
) -> HostProgram:
    """Calls and launches in order, with a `Free` after each last use, then the `Return`."""
    calls = tuple(calls)
    returned = set(refs(result))
    local = {entry.name for entry in inputs} | {call.result for call in calls if isinstance(call, Call)}
    last_reader: dict[str, int] = {entry.name: -1 for entry in inputs}
    for position, call in enumerate(calls):
        if isinstance(call, Call):
            last_reader[call.result] = position
        for read in reads(call):
            if read in local:
                last_reader[read] = position
    dying: dict[int, list[str]] = {}
    for value, position in last_reader.items():
        if value not in returned:
            dying.setdefault(position, []).append(value)
    steps: list[Step] = []
    if -1 in dying:
        steps.append(Free(tuple(dying[-1])))
    for position, call in enumerate(calls):
        steps.append(call)
        if position in dying:
            steps.append(Free(tuple(dying[position])))
    steps.append(Return(result))
    return HostProgram(name, inputs, tuple(steps), functions, constants, kernels)


def reads(step: Call | Launch) -> Iterable[str]:
    """The names that a step needs; a kernel's results were allocated before, so it needs them too."""
    match step:
        case Call():
            return refs((step.args, step.kwargs))
        case Launch():
            return (*step.buffers, *refs(step.sizes))
