"""Cats and stacks of what one split made read wide sections of it, or its input.

    x: f32[2, 8, 3]
    torch.cat(torch.split(x, 4, 1), 2) * 2  ->  x.unflatten(1, (2, 4)).movedim(1, 2).flatten(2, 3) * 2

Each run of neighbours in a cat or stack becomes one slice, brought into shape if the dimensions differ; other operands
stay where they are. Then the slices and the sections that somebody else reads are cut out by one new split:

    x: f32[2, 12], y: f32[2, 1]
    s = x.split(2, 1); torch.cat([y, s[0], s[1], y, s[4], s[5]], 1)
    ->  s = torch.split(x, [4, 4, 4], dim=1); torch.cat([y, s[0], y, s[2]], dim=1)

Runs of different readers must be the same or apart: else the sections would have to stay as well.

Measured by `python -m bench.pre_grad` on two cores (two runs of 9 rounds): 2.7x and 4.1x, together with its
neighbours.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable
from itertools import pairwise

import torch
from torch.fx import Graph, Node

from ferrite.graph.arguments import bind, find, kind
from ferrite.graph.build import Builder
from ferrite.graph.pieces import SPLITS, Join, Split, items, read_join, read_split
from ferrite.graph.runs import Run, choose, fits, is_view, read_runs, rejoin, runs_in
from ferrite.graph.soundness import Soundness

Range = tuple[int, int]
Parts = list[Run | Node]


def simplify_split_joins(graph: Graph) -> int:
    sound = Soundness(graph)
    splits = [split for node in find(graph, *SPLITS) if (split := read_split(node))]
    joins = [join for node in find(graph, "cat", "stack") if (join := read_join(node))]
    plans = {join.node: parts for join in joins if (parts := _plan(sound, join))}
    stay = {split.node for split in splits if _stays(sound, split, plans)}
    before = set(find(graph, "narrow"))
    latest = {split.node: split for split in splits}
    for node in plans:
        latest |= _rejoin(sound, node, stay)
    for split in latest.values():
        split = read_split(split.node) or split
        _cut_anew(sound, split, [user for user in split.source.users if user not in before])
    return sound.rewrites


def _plan(sound: Soundness, join: Join) -> Parts | None:
    """The operands of a join, runs of splits taken together; None if it has none."""
    parts = _parts(join)
    if not runs_in(parts):
        return None
    seen = sound.returned(join.node) or sound.written_after(join.node) if is_view(parts, join) else None
    if seen is not None:
        sound.refuse(join.node, f"a view in place of a copy, and {seen}")
        return None
    return parts


def _parts(join: Join, stay: Container[Node] = ()) -> Parts:
    def is_taken(run: Run) -> bool:
        return isinstance(run.parent, Split) and fits(run, join) and run.parent.node not in stay

    return choose(read_runs(join), is_taken)


def _stays(sound: Soundness, split: Split, plans: dict[Node, Parts]) -> bool:
    """Whether the sections of a split have to stay as they are."""
    read = items(split.node)
    if not read:
        return True
    reads: set[Range] = set()
    wide = False
    for index, nodes in read.items():
        for item in nodes:
            for user in item.users:
                parts = plans.get(user, [item])
                runs = [run for run in runs_in(parts) if item in run.nodes]
                reads |= {(run.start, run.stop) for run in runs}
                reads |= {(index, index + 1)} if item in parts else set()
                wide = wide or bool(runs)
    overlap = _overlap(reads) if wide else None
    if overlap is not None:
        sound.refuse(split.node, overlap)
    return overlap is not None


def _overlap(reads: Iterable[Range]) -> str | None:
    for (start, stop), (after, end) in pairwise(sorted(reads)):
        if after < stop:
            return f"items {start} to {stop - 1} and {after} to {end - 1} are read, which overlap"
    return None


def _rejoin(sound: Soundness, node: Node, stay: Container[Node]) -> dict[Node, Split]:
    """Read again: what was split may be a join that was rewritten before. Gives the splits that it read."""
    join = read_join(node)
    parts = _parts(join, stay) if join is not None else []
    if join is not None and runs_in(parts):
        sound.rewrite(node, lambda new: rejoin(new, join, parts))
    return {run.parent.node: run.parent for run in runs_in(parts) if isinstance(run.parent, Split)}


def _cut_anew(sound: Soundness, split: Split, users: list[Node]) -> None:
    """One split in place of the slices that were made, and of what is left of the old split."""
    starts = [sum(split.sizes[:index]) for index in range(len(split.sizes) + 1)]
    found: dict[Node, Range] = {}
    for user in users:
        call = bind(user, "narrow")
        if call is None or call["dim"] != split.dim:
            continue
        first, last = call["start"], call["start"] + call["length"]
        if first in starts and last in starts:
            found[user] = (starts.index(first), starts.index(last))
    if not found:
        return
    read = (items(split.node) or {}) if kind(split.node) else {}
    found |= {item: (index, index + 1) for index, nodes in read.items() for item in nodes}
    ranges = sorted(set(found.values()))
    if len(ranges) < 2 or _overlap(ranges) is not None:
        return
    edges = sorted({0, len(split.sizes), *(edge for one in ranges for edge in one)})
    sizes = [starts[end] - starts[begin] for begin, end in pairwise(edges)]

    def build(new: Builder) -> list[Node]:
        cut = new(torch.split, split.source, sizes, dim=split.dim)
        made = {one: new(operator.getitem, cut, edges.index(one[0])) for one in ranges}
        return [made[one] for one in found.values()]

    sound.rewrite(list(found), build)
