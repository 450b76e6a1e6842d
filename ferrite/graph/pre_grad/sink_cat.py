"""A pointwise op of a cat is a cat of pointwise ops, through views in between.

    a: f32[2, 3], b: f32[2, 5]
    torch.cat([a, b], 1).view(-1).tanh()  ->  torch.cat([a.tanh(), b.tanh()], dim=1).view(-1)
    F.relu(torch.cat([a, b], 1))  ->  torch.cat([F.relu(a), F.relu(b)], dim=1)

The op then joins the loops that make each part. It runs only if it is asked for: the scheduler puts a cat, what makes
its parts and a pointwise reader of it into one kernel already, so that on a CPU the example is one kernel before the
pass and one after it, with one more op inside. It is for targets where a cat is a call into a library. Measured by
`python -m bench.pre_grad` on two cores (medians of 9 rounds): 1.04x, with quartiles of 1.03 and 1.14.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ferrite.graph.arguments import bind, find
from ferrite.graph.pieces import read_join
from ferrite.graph.soundness import Soundness
from ferrite.graph.values import tensor_of


def sink_cat(graph: Graph) -> int:
    sound = Soundness(graph)
    for node in find(graph, "relu", "tanh"):
        _sink(sound, node)
    return sound.rewrites


def _sink(sound: Soundness, node: Node) -> None:
    call = bind(node)
    if call is None or call.get("out") is not None or call.get("inplace", False) is not False:
        return
    source, views = _views_above(call["input"])
    join = read_join(source)
    if join is None or join.kind != "cat":
        return

    def build(new: Any) -> Node:
        parts = {part: new(node.target, part) for part in dict.fromkeys(join.parts)}
        result = new(torch.cat, [parts[part] for part in join.parts], dim=join.dim)
        for above, view in zip([join.node, *views], views, strict=False):
            result = _again(new, view, above, result)
        return result

    chain = [join.node, *views, node]
    shared = next(filter(None, map(sound.only_user, chain, chain[1:])), None)
    sound.rewrite(node, build, objection=shared or sound.agree(*join.parts) or _truth(join.parts))


def _views_above(source: Any) -> tuple[Any, list[Node]]:
    """What a chain of views begins with, and the views, the first one first."""
    views: list[Node] = []
    while (call := bind(source, "view", "reshape", "flatten")) is not None:
        views.insert(0, source)
        source = call["input"]
    return source, views


def _again(new: Any, view: Node, above: Node, source: Node) -> Node:
    """The same view of `source` instead of `above`."""
    args, kwargs = map_arg((view.args, view.kwargs), lambda read: source if read is above else read)
    return new(view.target, *args, **kwargs)


def _truth(parts: tuple[Node, ...]) -> str | None:
    """Eager refuses relu of truth values, and what it says speaks of the cat."""
    found = next((part for part in parts if tensor_of(part).dtype is torch.bool), None)  # type: ignore[union-attr]
    return f"{found.name} holds truth values" if found is not None else None
