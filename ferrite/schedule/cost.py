"""What each step of a graph costs: bytes that it reads and writes, floating-point operations, and a guess of its time.

A kernel moves its parameters, each as often as it is an operand and a result; a call moves its operands and results.
Views, allocations and arithmetic on sizes move nothing. A size that is a symbol counts as what it was in the trace, one
that only the data knows as nothing. What functions of the program do (branches, bodies of loops) is not counted: nobody
knows how often they run.
"""

from __future__ import annotations

from collections.abc import Mapping

from ferrite.host.lowered import Body, Lowered
from ferrite.host.nodes import ALLOCATE, HOLD, Call, Launch
from ferrite.loops.nodes import Program
from ferrite.step_cost import StepCost
from ferrite.syntax import refs

PART = "operator.getitem"


def costs_of(lowered: Lowered) -> tuple[StepCost, ...]:
    """Of each step of the graph itself, in order."""
    kernels = {program.name: program for program in lowered.kernels}
    body = lowered.main
    parts: dict[str, list[str]] = {}  # what is taken out of the result of a call that gives several
    for step in body.steps:
        if isinstance(step, Call) and step.target == PART:
            parts.setdefault(next(iter(refs(step.args))), []).append(step.result)
    return tuple(_cost(step, body, kernels, parts) for step in body.steps)


def _cost(step: Call | Launch, body: Body, kernels: Mapping[str, Program], parts: Mapping[str, list[str]]) -> StepCost:
    if isinstance(step, Launch):
        parameters = zip(kernels[step.kernel].parameters, step.buffers, strict=True)
        moved = sum(body.about.get(name, 0) * (2 if parameter.role == "inout" else 1) for parameter, name in parameters)
        return StepCost(f"{step.kernel}({', '.join(step.buffers)})", moved)
    name = f"{step.result} = {step.target}"
    operands = list(dict.fromkeys(refs((step.args, step.kwargs))))
    written = list(body.writes.get(step.result, ()))
    if step.target in (ALLOCATE, HOLD, PART) or (not written and _is_view(step.result, operands, body)):
        return StepCost(name, 0)
    results = written or [step.result, *parts.get(step.result, ())]
    return StepCost(name, sum(body.about.get(each, 0) for each in (*operands, *results)), body.flops.get(step.result))


def _is_view(result: str, operands: list[str], body: Body) -> bool:
    memory = body.memory.get(result)
    return memory is not None and any(body.memory.get(operand) == memory for operand in operands)
