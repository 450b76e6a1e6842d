"""Convolutions read and write channels last, the layout that oneDNN computes in.

    convolution(x, w)               ->  convolution(clone(x, channels_last), w)
    convolution_backward(dy, x, w)  ->  convolution_backward(clone(dy, channels_last), clone(x, channels_last), w)

What follows takes the layout of what it reads, so a chain of convolutions, norms, activations and pools has one copy in
front and none inside; outputs that the user sees get eager's strides back at the end.

It pays if it saves more bytes than it moves. Given other layouts, oneDNN copies the operands of each convolution into
one of its own and the result back; given channels last it reads and writes in place. `choose_layout` counts the former
for every convolution against the copies that the layout would need here, and says how it came out.

The first convolution of a network is another matter: oneDNN reads pictures of three colours as they are. Channels last
it spares a copy of the result alone, at the price of copies of the picture and the weight; it is left as it is where
these are longer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ferrite.decisions import Decision
from ferrite.graph.ledger import ledger_of
from ferrite.graph.query import bytes_of, calls, tensors
from ferrite.graph.relayout import IMAGES, convolves_grouped_volumes, lies_so, relayout
from ferrite.graph.strides import noted_strides, output_values

aten = torch.ops.aten

# The operands that are images, by position; the first result is one too.
CONVOLUTIONS: dict[Any, tuple[int, ...]] = {
    aten.convolution.default: (0,),
    aten.convolution_backward.default: (0, 1),
}
COLOURS = 3  # an image of so many channels oneDNN reads without a copy
_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


def channels_last(graph: Graph) -> int:
    if noted_strides(graph) is None:  # a graph that an op runs: its inputs and results lie as the op was traced
        return 0
    ledger = ledger_of(graph)
    choice = choose_layout(graph, ledger.options.get("layout", "auto"))
    ledger.decisions.append(choice)
    return relayout(graph, _wanted) if choice.taken else 0


def choose_layout(graph: Graph, asked: str = "auto") -> Decision:
    """Whether the convolutions of a graph run channels last, and why. `asked`: the option `layout`."""
    convolutions = [node for node in calls(graph, *CONVOLUTIONS) if _wanted(node)]
    names = tuple(node.name for node in convolutions)
    if not convolutions:
        return Decision("channels last", names, False, "no convolution that oneDNN does")
    if asked != "auto":
        return Decision("channels last", names, asked == "on", f"the option layout is {asked!r}")
    saved = sum(bytes_of(image) for node in convolutions for image in (*_images(node), node))
    moved = sum(map(bytes_of, _copied(graph, set(convolutions))))
    reason = f"oneDNN would copy {saved:,} bytes, {moved:,} are copied to have the layout"
    return Decision("channels last", names, moved < saved, reason)


def _wanted(node: Node) -> Mapping[Node, torch.memory_format]:
    """For each image among the operands of a convolution the layout it is to have; nothing for other nodes."""
    if node.target not in CONVOLUTIONS or not torch.backends.mkldnn.enabled or not torch.backends.mkldnn.is_available():
        return {}
    images = [image.meta.get("val") for image in _images(node)]
    if not all(isinstance(value, torch.Tensor) and _is_oneDNN(value) for value in images):
        return {}
    if _is_first(node) or convolves_grouped_volumes(node):
        return {}
    return {image: IMAGES[image.meta["val"].dim()] for image in _images(node)}


def _is_first(node: Node) -> bool:
    """Whether it reads a picture, and less is copied if that stays as it is."""
    *_, picture = _images(node)
    weight = node.args[CONVOLUTIONS[node.target][-1] + 1]
    if picture.meta["val"].shape[1] > COLOURS or lies_so(picture.meta["val"], IMAGES[picture.meta["val"].dim()]):
        return False
    result = node if node.target is aten.convolution.default else _images(node)[0]
    return isinstance(weight, Node) and bytes_of(picture) + bytes_of(weight) > bytes_of(result)


def _is_oneDNN(value: torch.Tensor) -> bool:
    return (
        value.dim() in IMAGES
        and value.dtype in _DTYPES
        and value.device.type == "cpu"
        and value.layout == torch.strided
        and not free_unbacked_symbols((*value.shape, *value.stride()))
    )


def _images(node: Node) -> list[Node]:
    return [
        image for image in (node.args[position] for position in CONVOLUTIONS[node.target]) if isinstance(image, Node)
    ]


def _copied(graph: Graph, convolutions: set[Node]) -> list[Node]:
    """What has to be copied: images that do not come from a convolution, and visible outputs that do."""
    laid: set[Node] = set()
    copied: dict[Node, None] = {}
    for node in graph.nodes:
        if node in convolutions:
            for image, wish in _wanted(node).items():
                if image not in laid and not lies_so(image.meta["val"], wish):
                    copied[image] = None
            laid.add(node)
        elif _is_image(node) and not laid.isdisjoint(node.all_input_nodes):
            laid.add(node)
    results = output_values(graph)
    seen = [node for node, strides in zip(results, noted_strides(graph) or (), strict=False) if strides is not None]
    return [*copied, *(node for node in seen if node in laid)]


def _is_image(node: Node) -> bool:
    return any(value.dim() in IMAGES for value in tensors(node))
