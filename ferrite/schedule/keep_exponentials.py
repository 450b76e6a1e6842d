"""The exponentials of a softmax are computed once: they are kept for a row, summed, and divided.

    for i, j in box(64, 128):                       for i, j in box(64, 128):
        y[i, j] = exp(x[i, j] - M) / S                  e[i, j] = exp(x[i, j] - max(x[i, r] for r in box(128)))
                                             ->     for i, j in box(64, 128):
                                                        y[i, j] = e[i, j] / sum(e[i, r] for r in box(128))

where M is `softmax(x[i, r] for r in box(128))` and S its `.sum`. The nests share the loop over rows, and `e` is memory
for one row (`arrange`). Taken only where a row fits there: to write longer ones and read them again costs more than a
second exponential.

Law: the sum has the same terms in the same order, each rounded to its type before it is added.
"""

from __future__ import annotations

from ferrite.loops.index import Axis, of_atom
from ferrite.loops.nodes import Apply, Expr, Nest, Program, Reduce, Store
from ferrite.loops.rewrite import apply_rules, substitute_axes, walk
from ferrite.schedule.cost import kept_bytes, weight_of
from ferrite.schedule.decided import Decided, Refusal
from ferrite.schedule.keep_rows import Kept, goes_along, kept_row, too_long, with_kept_rows


def keep_exponentials(program: Program) -> Decided:
    return with_kept_rows(program, "keep exponentials", _in_two)


def _in_two(nest: Nest, lane: Axis, name: str) -> Kept | Refusal | None:
    found = _exponential(nest, lane)
    if found is None:
        return None
    exponential, most = found
    cost = f"{weight_of(exponential)} operations an element, or {kept_bytes(exponential)} bytes written and read"
    if (why := too_long(most, lane)) is not None:
        return Refusal(f"{why}; a second exponential: {cost}")
    kept, here, there = kept_row(nest, lane, most.axes[0], exponential, name)
    first: dict[Expr, Expr] = {most: Reduce("max", most.axes, most.body, "value")}
    second: dict[Expr, Expr] = {
        exponential: here,
        Reduce("softmax", most.axes, most.body, "sum"): Reduce("sum", most.axes, there, "value"),
    }
    store = Store(kept, here.index, apply_rules(exponential, (first.get,)))
    reader = apply_rules(nest, (second.get,))
    return Kept(kept, Nest(nest.axes, (store,)), reader, f"a second exponential costs more: {cost}")


def _exponential(nest: Nest, lane: Axis) -> tuple[Apply, Reduce] | None:
    """exp(x - max), and the reduction over the very x along the axis that lanes take, which gives the maximum."""
    nodes = dict.fromkeys(walk(nest.body[0]))  # in their order
    for node in nodes:
        match node:
            case Apply(operation="exp", operands=(Apply(operation="sub", operands=(own, Reduce() as most)),)):
                total = Reduce(most.operation, most.axes, most.body, "sum")
                if most.operation != "softmax" or total not in nodes or not goes_along(most, lane):
                    continue
                if substitute_axes(most.body, {most.axes[0]: of_atom(lane)}) is own:
                    return node, most
    return None
