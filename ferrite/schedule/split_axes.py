"""An axis in lanes that places divide is two axes, so that lanes run along memory and guards are cut.

    for i in box(8192):                              for i, j in box(8, 1024):
        y[i] = x[i] + row[i % 1024]         ->           y[1024*i + j] = x[1024*i + j] + row[j]

A tensor that was flattened behind a broadcast or a `cat` reads so. Lanes along `i` would look up every element.
`tanh(cat([x, y], 1).view(-1))` of two f32[1024, 512], one thread: 3.8 ms -> 1.6;
`(x + row).view(-1).relu()` of a f32[1024, 1024]: 0.78 ms -> 0.49 (processor time, medians of 30 turns).

Not where it would cost more than it gives: rows that are a little longer than whole vectors end in one that is nearly
empty, which matters where much is computed (tanh, sin, exp in rows of 17: 1.3 ms -> 2.1), and nests that read the same
tensor share loops only as long as they have the same ones.

Law: with k = n*i + j, where n divides the length of k, the points are the same ones in the same order. That is all that
stores, accumulations and reductions can see.
"""

from __future__ import annotations

from collections.abc import Iterator

from ferrite.decisions import Decision
from ferrite.loops.access import accesses
from ferrite.loops.index import Axis, FloorDiv, Index, Mod, atoms, divides, floordiv, least, of_atom, parts
from ferrite.loops.nodes import Apply, Nest, Program, Random
from ferrite.loops.passes.merge_axes import places_in
from ferrite.loops.rewrite import fresh_name, names_in, substitute_axes, walk
from ferrite.schedule.decided import Decided, Refusal, box, on, refused
from ferrite.schedule.shape import best_axis, is_free_of_order, is_quick, places_of

SHORTEST = 16  # elements of the inner axis: some vectors
LANES = 16


def split_axes(program: Program, shortest: int = SHORTEST) -> Decided:
    """Only nests that have no memory in common with others: they could share no loops any more."""
    nests: list[Nest] = []
    decisions: list[Decision] = []
    for nest in program.nests:
        split = _split(nest, program, shortest) if _divides(nest) else None
        nests.append(split if isinstance(split, Nest) else nest)
        if isinstance(split, Nest):
            reason = f"what divided it runs along the loops of {box(split.axes)}"
            decisions.append(Decision("split axis", on(program, nest.body), True, reason))
        elif split is not None:
            decisions.append(refused("split axis", on(program, nest.body), split))
    if any(decision.taken for decision in decisions):
        program = Program(program.name, program.sizes, program.parameters, program.locals, tuple(nests))
    return Decided(program, tuple(decisions))


def _divides(nest: Nest) -> bool:
    places = (place for node in walk(nest) for place in places_in(node))
    return any(isinstance(atom, (FloorDiv, Mod)) for place in places for atom in atoms(place))


def _split(nest: Nest, program: Program, shortest: int) -> Nest | Refusal | None:
    """The nest with its lanes in two, or why they stay; None if no place divides them."""
    lane = best_axis(nest.axes, places_of(nest.body))
    if lane is None:
        return None
    divisors = {n for node in walk(nest) for place in places_in(node) for n in divisors_of(place, lane)}
    if not divisors:
        return None
    lengths = sorted((low, str(n), n) for n in divisors if (low := least(n)) is not None and low >= shortest)
    length = next((n for _, _, n in lengths if divides(n, lane.extent)), None)
    if length is None:
        return Refusal(f"no part of at least {shortest} elements goes into {lane.extent}")
    if not all(map(is_free_of_order, nest.body)):
        return Refusal("the order of its points matters, and places of two axes do not tell them apart")
    if not _fills_vectors(length) and not all(map(is_quick, _operations_in(nest))):
        return Refusal(f"rows of {length} would end in a vector that is nearly empty")
    if _has_company(nest, program):
        return Refusal("other nests share its loops")
    outer = Axis(lane.name, floordiv(lane.extent, length))
    inner = Axis(fresh_name(f"{lane.name}_rest", names_in(program)), length)
    position = nest.axes.index(lane)
    axes = (*nest.axes[:position], outer, inner, *nest.axes[position + 1 :])
    moves = {lane: length * of_atom(outer) + of_atom(inner)}
    return Nest(axes, tuple(substitute_axes(part, moves, axes) for part in nest.body))


def _operations_in(nest: Nest) -> list[Apply | Random]:
    return [part for part in walk(nest) if isinstance(part, (Apply, Random))]


def _fills_vectors(length: Index) -> bool:
    """Whether at most one lane in eight is idle, in the longest vectors of f32. Rows of any length are taken to be
    long."""
    return bool(length.terms) or 8 * (-length.constant % LANES) <= length.constant


def _has_company(nest: Nest, program: Program) -> bool:
    mine = {access.buffer for part in nest.body for access in accesses(part)}
    others = (part for other in program.nests if other is not nest for part in other.body)
    return any(access.buffer in mine for part in others for access in accesses(part))


def divisors_of(place: Index, axis: Axis) -> Iterator[Index]:
    """What the axis itself is divided by, wherever that stands in the place."""
    for atom in atoms(place):
        if isinstance(atom, (FloorDiv, Mod)) and atom.dividend is of_atom(axis):
            yield atom.divisor
        for part in parts(atom):
            yield from divisors_of(part, axis)
