"""A loop in lanes is cut where a guard in it changes, so that each part of it knows what the guard says.

    for i, j in box(512, 64):                        for i, j in box(512, 32):
        y[i, j] = guarded(value(j) < i64(32),            y[i, j] = x[i, j + 32]
            x[i, j + 32], z[i, j])              ->   for i, j in box(512, 32):
                                                         y[i, j + 32] = z[i, j + 32]

The nests share the loops around the lanes (`arrange`), so the order in which memory is touched stays. A guard along the
lanes takes masks, and both of its sides are computed. One thread, rotary embedding of 64 MiB of f32 in rows of 64:
14.5 ms -> 5.9, of which stores past the caches (`native/stream.py`) have a part.

Law: points of a nest of plain stores write to different places, so their order does not matter. That holds if a result
lies over an operand, too (`reuse_memory`): each point reads there only what it writes itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from ferrite.decisions import Decision
from ferrite.loops.access import accesses
from ferrite.loops.index import Axis, coefficient_of, constant, of_atom
from ferrite.loops.nodes import Apply, Expr, Fold, Guarded, Load, Nest, Program, Reduce
from ferrite.loops.passes.simplify_guards import RULES, as_index
from ferrite.loops.rewrite import apply_rules, substitute_axes, walk
from ferrite.schedule.decided import Decided, Refusal, on, refused
from ferrite.schedule.shape import are_independent, best_axis, is_free_of_order, places_of

SHORTEST = 16  # elements of a part: some vectors
MOST_PARTS = 4


def cut_at_guards(program: Program, shortest: int = SHORTEST) -> Decided:
    """Only nests that have no memory in common with others that is written: what they hand on stays in registers."""
    nests: list[Nest] = []
    decisions: list[Decision] = []
    for nest in program.nests:
        parts = _parts(nest, program, shortest) if _has_guards(nest) else None
        if parts is None or isinstance(parts, Refusal):
            nests.append(nest)
            decisions += [refused("cut at guards", on(program, nest.body), parts)] if parts is not None else []
            continue
        nests += [part for _, part in parts]
        reason = f"parts of {', '.join(str(length) for length, _ in parts)} elements know what their guards say"
        decisions.append(Decision("cut at guards", on(program, nest.body), True, reason))
    if len(nests) != len(program.nests):
        program = Program(program.name, program.sizes, program.parameters, program.locals, tuple(nests))
    return Decided(program, tuple(decisions))


def _has_guards(nest: Nest) -> bool:
    return any(isinstance(node, Guarded) for node in walk(nest))


def _stands_alone(nest: Nest, program: Program) -> bool:
    """Whether it has no memory in common with another nest that one of them writes."""
    mine = {access.buffer for part in nest.body for access in accesses(part)}
    written = {access.buffer for part in nest.body for access in accesses(part) if access.writes}
    for other in program.nests:
        for part in () if other is nest else other.body:
            if any(each.buffer in written or (each.writes and each.buffer in mine) for each in accesses(part)):
                return False
    return True


def _parts(nest: Nest, program: Program, shortest: int) -> list[tuple[int, Nest]] | Refusal | None:
    """The parts of a nest from cut to cut, each with its length, or why it stays whole; None if no guard
    changes along the lanes."""
    lane = best_axis(nest.axes, places_of(nest.body))
    if lane is None or lane.extent.terms:
        return None
    guards = [node for node in walk(nest) if isinstance(node, Guarded) and _reads_along(node, lane)]
    cuts = {cut for guard in guards for cut in _cuts(guard.condition, lane) if 0 < cut < lane.extent.constant}
    if not cuts:
        return None
    ends = [0, *sorted(cuts), lane.extent.constant]
    lengths = [end - start for start, end in pairwise(ends)]
    if len(lengths) > MOST_PARTS:
        return Refusal(f"{len(lengths)} parts are more than {MOST_PARTS}")
    if min(lengths) < shortest:
        return Refusal(f"a part of {min(lengths)} elements is shorter than {shortest}")
    if any(isinstance(node, (Reduce, Fold)) for node in walk(nest)):
        return Refusal("it has reductions, which every part would do")
    if not all(map(is_free_of_order, nest.body)) or not are_independent(nest.body, lane):
        return Refusal("the order of its points matters")
    if not _stands_alone(nest, program):
        return Refusal("it hands values to other nests, which stay in registers")
    return [(length, _part(nest, lane, start, length)) for start, length in zip(ends, lengths, strict=False)]


def _reads_along(guard: Guarded, lane: Axis) -> bool:
    loads = [node for node in walk(guard) if isinstance(node, Load)]
    return any(coefficient_of(place, lane) != constant(0) for load in loads for place in load.index)


def _cuts(condition: Expr, lane: Axis) -> Iterator[int]:
    """Where along the lanes a comparison changes: at the first point that has the other answer."""
    for node in walk(condition):
        match node:
            case Apply(operation="lt" | "ge" | "le" | "gt" as operation, operands=(left, right)):
                first, second = as_index(left), as_index(right)
                if first is None or second is None:
                    continue
                distance = first - second
                step = coefficient_of(distance, lane)
                if step is None or step.terms or abs(step.constant) != 1:
                    continue
                zero = distance - step.constant * of_atom(lane)
                if zero.terms:
                    continue
                # lane + zero: its sign changes at -zero; zero - lane: at zero.
                rises = step.constant == 1
                yield (-zero.constant if rises else zero.constant) + (rises == (operation in ("le", "gt")))


def _part(nest: Nest, lane: Axis, start: int, length: int) -> Nest:
    own = Axis(lane.name, constant(length))
    axes = tuple(own if axis is lane else axis for axis in nest.axes)
    body = tuple(substitute_axes(statement, {lane: of_atom(own) + start}, axes) for statement in nest.body)
    return apply_rules(Nest(axes, body), RULES)
