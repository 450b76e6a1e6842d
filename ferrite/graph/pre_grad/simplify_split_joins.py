"""Cats and stacks of what one split made read wide sections of it, or its input.

    x: f32[2, 8, 3]
    torch.cat(torch.split(x, 4, 1), 2) * 2  ->  x.unflatten(1, (2, 4)).movedim(1, 2).flatten(2, 3) * 2

Each run of neighbours in a cat or stack becomes one slice, brought into shape if the dimensions differ; other operands
stay where they are. Then the slices and the sections that somebody else reads are cut out by one new split:

    s = x.split(2, 1); torch.cat([y, s[0], s[1], y, s[4], s[5]], 1)
    s = x.split([4, 4, 4], 1); torch.cat([y, s[0], y, s[2]], 1)

Runs of different readers must be the same or apart: else the sections would have to stay as well.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from itertools import pairwise

import torch
from torch.fx import Graph, Node

from ferrite.graph.arguments import bind, find, kind
from ferrite.graph.build import Builder
from ferrite.graph.pieces import SPLITS, Join, Split, items, read_join, read_split
from ferrite.graph.runs import Run, choose, fits, is_view, read_runs, rejoin, runs_in
from ferrite.graph.soundness import Soundness

Range = tuple[int, int]


def simplify_split_joins(graph: Graph) -> int:
    sound = Soundness(graph)
    for node in find(graph, *SPLITS):
        _simplify(sound, node)
    return sound.rewrites


def _simplify(sound: Soundness, node: Node) -> None:
    split, read = read_split(node), items(node)
    if split is None or not read:
        return
    users = [user for found in read.values() for item in found for user in item.users]
    plans = [plan for user in dict.fromkeys(users) if (plan := _plan(sound, split, user))]
    if not plans:
        return
    wide = {run: (run.start, run.stop) for _, parts in plans for run in runs_in(parts)}
    reads = [*wide.values(), *_read_singly(read, {join.node: parts for join, parts in plans})]
    if (overlap := _overlap(reads)) is not None:
        sound.refuse(node, overlap)
        return
    before = set(split.source.users)
    for join, parts in plans:
        _rejoin(sound, join, parts)
    _cut_anew(sound, split, [user for user in split.source.users if user not in before and kind(user) == "narrow"])


def _plan(sound: Soundness, split: Split, user: Node) -> tuple[Join, list[Run | Node]] | None:
    """A join and its operands, runs of this split taken together; None if it has none."""
    join = read_join(user)
    if join is None:
        return None
    found = read_runs(join)
    parts = choose(found, lambda run: run.parent.node is split.node and fits(run, join))
    if not runs_in(parts):
        uneven = next((run for run in runs_in(found) if run.parent.node is split.node and run.count > 1), None)
        if uneven is not None:
            sound.refuse(user, f"{uneven} are of different sizes")
        return None
    seen = sound.returned(user) or sound.written_after(user) if is_view(parts, join) else None
    if seen is not None:
        sound.refuse(user, f"a view in place of a copy, and {seen}")
        return None
    return join, parts


def _read_singly(read: dict[int, list[Node]], plans: dict[Node, list[Run | Node]]) -> list[Range]:
    """The sections that somebody reads one by one."""
    singly: dict[Range, None] = {}
    for index, nodes in read.items():
        for item in nodes:
            if any(user not in plans or item in plans[user] for user in item.users):
                singly[index, index + 1] = None
    return list(singly)


def _overlap(reads: Iterable[Range]) -> str | None:
    ranges = sorted(set(reads))
    for (start, stop), (after, end) in pairwise(ranges):
        if after < stop:
            return f"items {start} to {stop - 1} and {after} to {end - 1} are read, which overlap"
    return None


def _rejoin(sound: Soundness, join: Join, parts: list[Run | Node]) -> None:
    sound.rewrite(join.node, lambda new: rejoin(new, join, parts))


def _cut_anew(sound: Soundness, split: Split, slices: list[Node]) -> None:
    """One split in place of the slices and of what is left of the old one."""
    starts = [sum(split.sizes[:index]) for index in range(len(split.sizes) + 1)]
    found: dict[Node, Range] = {}
    for node in slices:
        call = bind(node)
        assert call is not None
        found[node] = (starts.index(call["start"]), starts.index(call["start"] + call["length"]))
    read = (items(split.node) or {}) if kind(split.node) else {}
    found |= {item: (index, index + 1) for index, nodes in read.items() for item in nodes}
    ranges = sorted(set(found.values()))
    if not slices or len(ranges) < 2 or _overlap(ranges) is not None:
        return
    edges = sorted({0, len(split.sizes), *(edge for one in ranges for edge in one)})
    sizes = [starts[end] - starts[begin] for begin, end in pairwise(edges)]

    def build(new: Builder) -> list[Node]:
        cut = new(torch.split, split.source, sizes, dim=split.dim)
        made = {one: new(operator.getitem, cut, edges.index(one[0])) for one in ranges}
        return [made[one] for one in found.values()]

    sound.rewrite(list(found), build)
