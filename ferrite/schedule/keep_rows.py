"""What a reduction combines and its nest uses again is computed once, if that takes long: it is kept for a row.

    for i, j in box(64, 128):                       for i, j in box(64, 128):
        y[i, j] = exp(x[i, j])                          e[i, j] = exp(x[i, j])
            / sum(exp(x[i, r]) for r in box(128))   ->  for i, j in box(64, 128):
                                                        y[i, j] = e[i, j] / sum(e[i, r] for r in box(128))

The nests share the loop over rows, and `e` is memory for one row (`arrange`). A dropout in front of a layer norm draws
its numbers once instead of three times. A few quick operations are done again: to write a row and read it costs as
much (`cost.pays_to_keep`).

Law: a value is stored in the type that it has, so every reader sees the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ferrite.decisions import Decision
from ferrite.loops.index import Axis, free_axes, of_atom
from ferrite.loops.nodes import Buffer, Expr, Fold, Guarded, Load, Nest, Program, Reduce, Store
from ferrite.loops.rewrite import apply_rules, can_raise, fresh_name, loaded_in, names_in, substitute_axes, walk
from ferrite.loops.shapes import contiguous_strides
from ferrite.schedule.arrange import LONGEST_ROW
from ferrite.schedule.cost import kept_bytes, operations_in, pays_to_keep
from ferrite.schedule.decided import Decided, Refusal, on, refused
from ferrite.schedule.shape import best_axis, places_of

TWO_PASSES = ("welford", "softmax")  # reductions that go over what they combine twice


@dataclass(frozen=True)
class Kept:
    """A nest in two: what is kept, the nest that makes it, the one that reads it, and why that is better."""

    buffer: Buffer
    maker: Nest
    reader: Nest
    reason: str


Split = Callable[[Nest, Axis, str], Kept | Refusal | None]


def keep_rows(program: Program) -> Decided:
    return with_kept_rows(program, "keep row", _once)


def with_kept_rows(program: Program, what: str, split: Split) -> Decided:
    """The program with every nest in two that `split` takes apart; it is asked with the axis that lanes take, and a
    name for what is kept."""
    nests: list[Nest] = []
    kept: list[Buffer] = []
    decisions: list[Decision] = []
    taken = names_in(program)
    for nest in program.nests:
        lane = best_axis(nest.axes, places_of(nest.body))
        found = split(nest, lane, fresh_name("e", taken)) if lane is not None and _may_be_split(nest) else None
        if isinstance(found, Kept):
            taken.add(found.buffer.name)
            kept.append(found.buffer)
            nests += (found.maker, found.reader)
            decisions.append(Decision(what, (program.name, found.buffer.name), True, found.reason))
            continue
        nests.append(nest)
        if found is not None:
            decisions.append(refused(what, on(program, nest.body), found))
    if kept:
        local = (*program.locals, *kept)
        program = Program(program.name, program.sizes, program.parameters, local, tuple(nests))
    return Decided(program, tuple(decisions))


def _may_be_split(nest: Nest) -> bool:
    """Whether nobody sees it if a part of the values is computed before the rest. What a guard lets compute at some
    points only is not computed at all of them."""
    match nest.body:
        case (Store(buffer=buffer) as store,):
            guarded = (node for node in walk(store) if isinstance(node, Guarded))
            if any(isinstance(node, (Reduce, Fold)) for guard in guarded for node in walk(guard)):
                return False
            return not can_raise(store) and buffer not in loaded_in(store)
    return False


def kept_row(nest: Nest, lane: Axis, along: Axis, value: Expr, name: str) -> tuple[Buffer, Load, Load]:
    """Memory for a value at every point of a nest, and how it is read: at the point, and along a reduction."""
    sizes = tuple(axis.extent for axis in nest.axes)
    kept = Buffer(name, value.dtype, sizes, contiguous_strides(sizes))
    here = tuple(of_atom(axis) for axis in nest.axes)
    there = tuple(of_atom(along) if axis is lane else of_atom(axis) for axis in nest.axes)
    return kept, Load(kept, here), Load(kept, there)


def goes_along(reduction: Reduce, lane: Axis) -> bool:
    """Whether it goes over one axis in the place of the one that lanes take."""
    if len(reduction.axes) != 1 or reduction.axes[0].extent is not lane.extent:
        return False
    return lane not in free_axes(reduction.body)


def too_long(reduction: Reduce, lane: Axis) -> Refusal | None:
    """Why a row of what it combines is not kept: it would not stay in the cache."""
    if lane.extent.terms:
        return Refusal("how long a row is, only a call knows")
    row = lane.extent.constant * reduction.body.dtype.bytes
    return Refusal(f"a row of {row:,} bytes is longer than {LONGEST_ROW:,}") if row > LONGEST_ROW else None


def _once(nest: Nest, lane: Axis, name: str) -> Kept | Refusal | None:
    nodes = dict.fromkeys(walk(nest))  # in their order
    refusal: Refusal | None = None
    for node in nodes:
        if not isinstance(node, Reduce) or isinstance(node.body, Load) or not goes_along(node, lane):
            continue
        (along,) = node.axes
        operations = operations_in(node.body, node.axes)
        own = substitute_axes(node.body, {along: of_atom(lane)})
        again = (node.operation in TWO_PASSES) + (own in nodes)  # times after the first
        if not operations or not again or not {along} <= free_axes(node.body) <= {*nest.axes, along}:
            continue  # what is the same all along a row is computed once anyway
        cost = f"{again} times {operations} operations an element, or {kept_bytes(own)} bytes written and read"
        if not pays_to_keep(own, operations, again, lane.extent):
            refusal = refusal or Refusal(f"to compute it again costs less: {cost}")
            continue
        if (why := too_long(node, lane)) is not None:
            refusal = refusal or Refusal(f"{why}; to compute it again: {cost}")
            continue
        kept, here, there = kept_row(nest, lane, along, own, name)
        places: dict[Expr, Expr] = {own: here, node.body: there}
        maker = Nest(nest.axes, (Store(kept, here.index, own),))
        return Kept(kept, maker, apply_rules(nest, (places.get,)), f"to compute it again costs more: {cost}")
    return refusal
