"""Quantising a tensor through views is the views of the quantised tensor.

    x: f32[2, 12]
    quantise((x + 1).view(2, 3, 4).transpose(1, 2), 0.1, 0, -128, 127, torch.int8)
    ->  quantise(x + 1, 0.1, 0, -128, 127, torch.int8).view(2, 3, 4).transpose(1, 2)

`quantise` is `torch.ops.quantized_decomposed.quantize_per_tensor`. Next to what it quantises the two can become one
kernel, and views of bytes move a quarter of the memory. One scale and zero point hold for the whole tensor, so the
order of its elements does not matter; those of channels would move with them. Every link, and what is quantised, must
have no other reader: it would be kept in f32 as well.
"""

from __future__ import annotations

from itertools import pairwise

from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ferrite.graph.arguments import bind, find, nodes_in
from ferrite.graph.build import Builder
from ferrite.graph.soundness import Soundness

_QUANTISE = "quantized_decomposed::quantize_per_tensor"
_VIEWS = ("transpose", "permute", "view", "reshape")


def lift_quantise(graph: Graph) -> int:
    sound = Soundness(graph)
    for node in find(graph, _QUANTISE):
        _lift(sound, node)
    return sound.rewrites


def _lift(sound: Soundness, node: Node) -> None:
    call = bind(node)
    chain = _chain(call["input"]) if call is not None else []
    if call is None or not chain:
        return
    options = {name: value for name, value in call.arguments.items() if name != "input"}
    varies = next(nodes_in(options), None)
    objection = None if varies is None else f"{node.name} is given {varies.name}, a value of the graph"
    for source, reader in zip(chain, [*chain[1:], node], strict=True):
        objection = objection or sound.only_user(source, reader)

    def build(new: Builder) -> Node:
        current = _copy(new, node, chain[-1], chain[0])
        for source, link in pairwise(chain):
            current = _copy(new, link, source, current)
        return current

    sound.rewrite(node, build, objection=objection)


def _chain(node: Node) -> list[Node]:
    """What is quantised, and the views that lead from it to `node`; empty if there are none."""
    chain = [node]
    while (call := bind(chain[0], *_VIEWS)) is not None and isinstance(call["input"], Node):
        chain.insert(0, call["input"])
    return chain if len(chain) > 1 else []


def _copy(new: Builder, node: Node, source: Node, other: Node) -> Node:
    """The same call, reading `other` in place of `source`."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda entry: other if entry is source else entry)
    return new(node.target, *args, **kwargs)
