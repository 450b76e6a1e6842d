"""Makes a failing program smaller while it still fails: fewer steps, outputs and inputs, smaller sizes, plainer data.

Greedy: of the simpler programs next to this one the first that eager takes, that is honest, and that fails in the same
way is the new one, until there is none or no time. Larger cuts come first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import replace
from typing import TypeVar

from .programs import Program, Step, traced

Made = TypeVar("Made", bound=Hashable)


def smallest(
    start: Made, simpler: Callable[[Made], Iterable[Made]], fails: Callable[[Made], bool], seconds: float
) -> Made:
    """The smallest found on the way down: one of what is simpler that fails too, until there is none or no time."""
    stop = time.monotonic() + seconds
    found, tried, progress = start, {start}, True
    while progress and time.monotonic() < stop:
        progress = False
        for candidate in simpler(found):
            if time.monotonic() > stop:
                break
            if candidate in tried:
                continue
            tried.add(candidate)
            if fails(candidate):
                found, progress = candidate, True
                break
    return found


def shrink(program: Program, fails: Callable[[Program], bool], seconds: float = 60.0) -> Program:
    """The smallest program found. `fails` says whether one shows the same failure."""
    return smallest(program, _simpler, lambda candidate: traced(candidate) and fails(candidate), seconds)


def _simpler(program: Program) -> Iterator[Program]:
    yield _without_unused(_pruned(program))
    yield from _fewer_outputs(program)
    yield from _without_steps(program)
    yield from _fewer_inputs(program)
    for place, step in enumerate(program.steps):
        if step.inside:
            steps = (*program.steps[:place], replace(step, inside=""), *program.steps[place + 1 :])
            yield replace(program, steps=steps)
    if program.resized:
        yield replace(program, resized=())
    if program.dynamic and not program.resized:
        yield replace(program, dynamic=False)
    yield from _smaller(program)
    yield from _plainer(program)


def _fewer_outputs(program: Program) -> Iterator[Program]:
    if len(program.outputs) > 1:
        for name in program.outputs:
            yield _without_unused(_pruned(replace(program, outputs=(name,))))
        for name in program.outputs:
            yield _pruned(replace(program, outputs=tuple(other for other in program.outputs if other != name)))


def _without_steps(program: Program) -> Iterator[Program]:
    """Up to a step, without a step and all that needs it, or with something else in the place of its result."""
    for place in range(1, len(program.steps)):
        results = program.steps[place - 1].results
        if results:
            yield _without_unused(_pruned(replace(program, steps=program.steps[:place], outputs=results)))
    for place, step in reversed([*enumerate(program.steps)]):
        others = (*program.steps[:place], *program.steps[place + 1 :])
        if not step.results:
            yield replace(program, steps=others)
            continue
        for stand_in in dict.fromkeys((*step.operands, *(each.name for each in program.inputs))):
            changes = dict.fromkeys(step.results, stand_in)
            steps = tuple(_renamed(other, changes) for other in others)
            outputs = tuple(dict.fromkeys(changes.get(name, name) for name in program.outputs))
            yield replace(program, steps=steps, outputs=outputs)


def _renamed(step: Step, changes: dict[str, str]) -> Step:
    return replace(step, operands=tuple(changes.get(name, name) for name in step.operands))


def _pruned(program: Program) -> Program:
    """Without steps whose results nobody needs. Statements stay."""
    needed, kept = set(program.outputs), []
    for step in reversed(program.steps):
        if not step.results or step.rounding == "raises" or needed & set(step.results):
            kept.append(step)
            needed |= set(step.operands)
    return replace(program, steps=tuple(reversed(kept)))


def _without_unused(program: Program) -> Program:
    used, views = _used(program), " ".join(each.view for each in program.inputs)
    inputs = tuple(each for each in program.inputs if each.name in used or each.name in views)
    return replace(program, inputs=inputs or program.inputs[:1])


def _used(program: Program) -> set[str]:
    return {name for step in program.steps for name in step.operands} | set(program.outputs)


def _fewer_inputs(program: Program) -> Iterator[Program]:
    """One input in the place of two."""
    used, views = _used(program), " ".join(each.view for each in program.inputs)
    for each in program.inputs:
        for other in program.inputs:
            if other is not each and each.name in used and each.name not in views:
                changes = {each.name: other.name}
                yield replace(
                    program,
                    inputs=tuple(one for one in program.inputs if one is not each),
                    steps=tuple(_renamed(step, changes) for step in program.steps),
                    outputs=tuple(dict.fromkeys(changes.get(name, name) for name in program.outputs)),
                )


def _smaller(program: Program) -> Iterator[Program]:
    """Another number for one of the sizes, everywhere or in one input; one dimension less."""
    extents = sorted({n for each in program.inputs for n in each.sizes}, reverse=True)
    for old in extents:
        for new in (1, 2, 3, 4, 8, 16, old // 2, old - 1):
            if 0 < new < old and not program.resized:
                inputs = (
                    replace(each, sizes=tuple(new if n == old else n for n in each.sizes)) for each in program.inputs
                )
                yield replace(program, inputs=tuple(inputs))
    for place, each in enumerate(program.inputs):
        for axis in range(len(each.sizes)):
            yield _with_input(program, place, sizes=(*each.sizes[:axis], *each.sizes[axis + 1 :]))
            for new in (1, 2):
                if each.sizes[axis] > new:
                    yield _with_input(program, place, sizes=(*each.sizes[:axis], new, *each.sizes[axis + 1 :]))


def _plainer(program: Program) -> Iterator[Program]:
    for place, each in enumerate(program.inputs):
        if each.wants_gradient:
            yield _with_input(program, place, wants_gradient=False)
        if each.layout != "contiguous":
            yield _with_input(program, place, layout="contiguous")
        order = ("whole", "positive", "normal", "special")
        for values in order[: order.index(each.values)]:
            yield _with_input(program, place, values=values)
        plain = "float32" if each.kind.is_floating_point else "int64"
        if each.dtype not in (plain, "bool"):
            yield _with_input(program, place, dtype=plain)


def _with_input(program: Program, place: int, **changes: object) -> Program:
    changed = replace(program.inputs[place], **changes)  # type: ignore[arg-type]
    return replace(program, inputs=(*program.inputs[:place], changed, *program.inputs[place + 1 :]))
