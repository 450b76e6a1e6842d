"""Neighbours that were taken out of one tensor and are put side by side again, and what they are together.

    s = x.split(2, 1); torch.stack([y, s[0], s[1], s[2], z], 0)         y, Run(s, 0 to 3), z

One algebra serves every pass over splits, unbinds, cats and stacks. A run is a slice of its source in which the items
stand along an axis of their own: an unbind has that axis, in a split it is cut out of the split dimension. To join the
items is to *move* that axis to its place (never to swap it with another), and in a cat to merge it with the next one:

    split or unbind along s, stack along d      slice [-> unflatten s] -> movedim(s, d)
    split or unbind along s, cat along d        slice [-> unflatten s] -> movedim(s, d) -> flatten(d, d + 1)
    split along d, cat along d                  slice

Items that were all reshaped alike before the join are one reshape, because a reshape keeps the order of elements: the
axis goes to the front, or to any other place where the elements before it are as many before the reshape as after.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from ferrite.graph.arguments import bind, is_int
from ferrite.graph.build import Builder
from ferrite.graph.pieces import Join, Split, Unbind, item_of, read_split, read_unbind
from ferrite.graph.soundness import Soundness
from ferrite.graph.values import tensor_of

RESHAPES = ("reshape", "view")


@dataclass(frozen=True)
class Run:
    """The items `start` to `stop - 1` of `parent`, and the operands of a join that hold them.

    `shape`: what every item was reshaped to before it was joined; None if they are joined as they are.
    """

    parent: Split | Unbind
    start: int
    stop: int
    nodes: tuple[Node, ...]
    shape: tuple[int, ...] | None = None

    @property
    def count(self) -> int:
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        return self.count == count_of(self.parent)

    def __str__(self) -> str:
        return f"items {self.start} to {self.stop - 1} of {count_of(self.parent)} of {self.parent.node.name}"


def count_of(parent: Split | Unbind) -> int:
    return len(parent.sizes) if isinstance(parent, Split) else parent.count


def read_runs(join: Join, links: Sequence[tuple[str, ...]] = ()) -> list[Run | Node]:
    """The operands of a join in order, neighbours as one run; a single item is a run of one.

    `links`: the kinds of reshape between every item and the join, the one next to the join first.
    """
    parents: dict[Node, Split | Unbind | None] = {}
    parts: list[Run | Node] = []
    for node in join.parts:
        found = _read_item(node, links, parents)
        last = parts[-1] if parts else None
        if found is None:
            parts.append(node)
        elif isinstance(last, Run) and _continues(last, found):
            parts[-1] = replace(last, stop=found.stop, nodes=(*last.nodes, node))
        else:
            parts.append(found)
    return parts


def choose(parts: Sequence[Run | Node], wanted: Callable[[Run], bool]) -> list[Run | Node]:
    """The runs that are wanted stay, the others are plain operands again."""
    chosen: list[Run | Node] = []
    for part in parts:
        chosen += part.nodes if isinstance(part, Run) and not wanted(part) else [part]
    return chosen


def runs_in(parts: Sequence[Run | Node]) -> list[Run]:
    return [part for part in parts if isinstance(part, Run)]


def fits(run: Run, join: Join) -> bool:
    """Whether the items can be joined as one: several, and of one size unless they go back to where they were."""
    if run.count < 2:
        return False
    if run.shape is None and _goes_back(run, join):
        return True
    if isinstance(run.parent, Split) and len(set(run.parent.sizes[run.start : run.stop])) > 1:
        return False
    # A cat of reshaped items that cannot be one reshape would copy twice.
    return run.shape is None or join.kind == "stack" or _place(run, run.shape, join) is not None


def is_view(parts: Sequence[Run | Node], join: Join) -> bool:
    """Whether these operands together are one view of what was taken apart."""
    return len(parts) == 1 and isinstance(parts[0], Run) and (join.kind == "stack" or _goes_back(parts[0], join))


def rejoin(new: Builder, join: Join, parts: Sequence[Run | Node]) -> Node:
    """The join with runs in place of single items; without a cat if one run is all."""
    if len(parts) == 1 and isinstance(parts[0], Run):
        return _as_one(new, parts[0], join)
    together = join.kind == "cat"
    operands = [
        _as_one(new, part, join)
        if isinstance(part, Run)
        else part
        if together
        else new(torch.unsqueeze, part, dim=join.dim)
        for part in parts
    ]
    return new(torch.cat, operands, dim=join.dim)


def take_runs(
    sound: Soundness, join: Join, wanted: Callable[[Run], bool], least: int, links: Sequence[tuple[str, ...]] = ()
) -> None:
    """Put each wanted run of a join in as one operand: a whole parent, or at least `least` items."""

    def is_taken(run: Run) -> bool:
        return wanted(run) and fits(run, join) and (run.is_whole or run.count >= least)

    found = read_runs(join, links)
    parts = choose(found, is_taken)
    if runs_in(parts):
        sound.rewrite(join.node, lambda new: rejoin(new, join, parts))
        return
    short = next((run for run in runs_in(found) if run.count > 1 and wanted(run)), None)
    if short is not None:
        sound.refuse(join.node, f"{short} are {f'fewer than {least}' if fits(short, join) else 'not one in the join'}")


def take_all(sound: Soundness, join: Join, links: Sequence[tuple[str, ...]]) -> None:
    """Put in one reshape for a join of all that a split made, if nobody else reads it."""
    parts = read_runs(join, links)
    if len(parts) != 1 or not isinstance(run := parts[0], Run) or not isinstance(run.parent, Split):
        return
    objection = None if run.is_whole and fits(run, join) else f"{run} are not one in the join"
    for node in run.nodes:
        while objection is None and item_of(node) is None:
            objection = sound.only_user(node)
            node = node.all_input_nodes[0]
        objection = objection or sound.only_user(node)
    sound.rewrite(join.node, lambda new: rejoin(new, join, parts), objection=objection)


def slice_of(new: Builder, run: Run) -> Node:
    """The part of the source that holds the run."""
    parent = run.parent
    if run.is_whole:
        return parent.source
    first, length = run.start, run.count
    if isinstance(parent, Split):
        first, length = sum(parent.sizes[: run.start]), sum(parent.sizes[run.start : run.stop])
    return new(torch.narrow, parent.source, parent.dim, first, length)


def _as_one(new: Builder, run: Run, join: Join) -> Node:
    value = slice_of(new, run)
    if run.shape is not None:
        return _reshaped(new, value, run, run.shape, join)
    if join.kind == "cat" and _goes_back(run, join):
        return value
    if isinstance(run.parent, Split):
        value = new(torch.unflatten, value, run.parent.dim, (run.count, run.parent.sizes[run.start]))
    value = _move(new, value, run.parent.dim, join.dim)
    return value if join.kind == "stack" else new(torch.flatten, value, join.dim, join.dim + 1)


def _reshaped(new: Builder, value: Node, run: Run, shape: tuple[int, ...], join: Join) -> Node:
    """All items reshaped at once, and where they need not be moved again, joined by the same reshape."""
    axis, count, dim = run.parent.dim, run.count, join.dim
    if len(_item_shape(run)) == len(tensor_of(run.parent.source).shape):  # type: ignore[union-attr]
        value = new(torch.unflatten, value, axis, (count, _item_shape(run)[axis]))
    place = _place(run, shape, join)
    if place is None:
        return _move(new, new(torch.reshape, _move(new, value, axis, 0), [count, *shape]), 0, dim)
    joined = [count, *shape[dim:]] if join.kind == "stack" else [count * shape[dim], *shape[dim + 1 :]]
    after = [*shape[:dim], *joined]
    value = _move(new, value, axis, place)
    return value if list(tensor_of(value).shape) == after else new(torch.reshape, value, after)  # type: ignore[union-attr]


def _item_shape(run: Run) -> list[int]:
    """The sizes of one item; without the dimension it was taken along, if that is 1 and so the axis of the items."""
    sizes: list[int] = list(tensor_of(run.parent.source).shape)  # type: ignore[union-attr]
    width = run.parent.sizes[run.start] if isinstance(run.parent, Split) else 1
    return [*sizes[: run.parent.dim], *([width] if width != 1 else []), *sizes[run.parent.dim + 1 :]]


def _place(run: Run, shape: tuple[int, ...], join: Join) -> int | None:
    """Where the axis of the items may stand in front of a reshape to `shape` and the join: the elements before it are
    as many as after. Where it is already, if that will do."""
    sizes, elements = _item_shape(run), math.prod(shape[: join.dim])
    places = [place for place in range(len(sizes) + 1) if math.prod(sizes[:place]) == elements]
    return run.parent.dim if run.parent.dim in places else places[0] if places else None


def _move(new: Builder, value: Node, source: int, target: int) -> Node:
    return value if source == target else new(torch.movedim, value, source, target)


def _goes_back(run: Run, join: Join) -> bool:
    return join.kind == "cat" and isinstance(run.parent, Split) and run.parent.dim == join.dim


def _read_item(node: Node, links: Sequence[tuple[str, ...]], parents: dict[Node, Split | Unbind | None]) -> Run | None:
    value, inner = tensor_of(node), node
    for kinds in links:
        call = bind(inner, *kinds)
        if call is None or not isinstance(call["input"], Node):
            return None
        inner = call["input"]
    item = item_of(inner)
    if item is None or value is None:
        return None
    source, index = item
    if source not in parents:
        parents[source] = read_split(source) or read_unbind(source)
    parent = parents[source]
    if parent is None:
        return None
    if not links:
        return Run(parent, index, index + 1, (node,))
    shapes: list[Any] = [*value.shape, *tensor_of(parent.source).shape]  # type: ignore[union-attr]
    return Run(parent, index, index + 1, (node,), tuple(value.shape)) if is_int(*shapes) else None


def _continues(run: Run, item: Run) -> bool:
    return run.parent is item.parent and run.stop == item.start and run.shape == item.shape
