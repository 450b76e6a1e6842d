"""A call that gives its input as it is goes.

    x: f32[2, 3]
    x.view(2, 3) + 1  ->  x + 1
    x.reshape(-1, 3) + 1  ->  x + 1
    x.expand(2, -1) + 1  ->  x + 1
    x.to(torch.float32) + 1  ->  x + 1
    x[:, 0:3] + 1  ->  x + 1
    torch.cat([x], 1) + 1  ->  x + 1

The result must have the same sizes, strides and memory; a cat of one tensor is a copy, and goes if nobody could tell.
What is written or returned stays: eager gives another tensor than x. (Dropout outside training: `drop_idle_dropout`.)
"""

from __future__ import annotations

from typing import Any

from torch.fx import Graph, Node

from ferrite.graph.arguments import bind, find
from ferrite.graph.pieces import read_join
from ferrite.graph.soundness import Soundness
from ferrite.graph.values import same_metadata, tensor_of

_VIEWS = ("view", "reshape", "expand", "to", "getitem", "narrow")


def remove_noops(graph: Graph) -> int:
    sound = Soundness(graph)
    for node in find(graph, *_VIEWS, "cat"):
        _remove(sound, node)
    return sound.rewrites


def _remove(sound: Soundness, node: Node) -> None:
    join = read_join(node)
    if join is not None and len(join.parts) == 1:
        sound.rewrite(node, join.parts[0])
        return
    call = bind(node, *_VIEWS)
    if call is None or not _is_same(sound, node, call["input"]) or not _is_slices(call.get("index", slice(None))):
        return
    sound.rewrite(node, call["input"], objection=sound.returned(node) or sound.written_after(node))


def _is_same(sound: Soundness, node: Node, source: Any) -> bool:
    """Whether two nodes give the same elements at the same places of the same memory."""
    one, other = tensor_of(node), tensor_of(source)
    if one is None or other is None or not same_metadata(one, other):
        return False
    return sound.aliases.shares(node, source) and str(one.storage_offset()) == str(other.storage_offset())


def _is_slices(index: Any) -> bool:
    entries = index if isinstance(index, tuple) else (index,)
    return all(entry is Ellipsis or isinstance(entry, slice) for entry in entries)
