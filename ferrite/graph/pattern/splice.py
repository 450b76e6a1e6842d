"""Puts the calls of a trace in place of what was matched, after autograd.

The new calls stand right before the first end of the match and keep the values of the trace; where the user's line or
other metadata is missing, they take it from an end that they replace. Whether an end is saved or computed again holds
for all new calls that lead to its result. An end that gives several values is replaced by as many, through the calls
that take it apart. Nothing that was inserted is itself rewired.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from ferrite.graph.arguments import kind, nodes_in
from ferrite.graph.build import value_key
from ferrite.graph.effects import written_by
from ferrite.graph.pattern.match import Match
from ferrite.graph.pattern.seen import seen_by_others
from ferrite.graph.pattern.trace import trace_after_autograd
from ferrite.graph.query import attribute, output_node
from ferrite.graph.spread import differs
from ferrite.graph.values import fake_mode_of, value_of

_INHERITED = ("stack_trace", "nn_module_stack", "original_aten", "from_node", "partitioner_tag", "custom")
_RECOMPUTED = ("recompute", "ac_graph_id")  # what a value that is saved or computed again was marked with
_SIZE = torch.ops.aten.sym_size.int


def replace_by_example(match: Match, function: Callable[..., Any], args: Sequence[Any]) -> list[Node] | str:
    """Trace `function` on what `args` hold, and put it in place of `match`; gives the new calls, or a text why not.

    Arguments may be nodes, numbers, or lists of both.
    """
    leaves, spec = pytree.tree_flatten(list(args))
    places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Node)]
    nodes = [leaves[index] for index in places]
    values = [value_of(node) for node in nodes]
    if any(value is None for value in values):
        return "a value that it reads is not known"
    graph = next(end for end in match.ends if end is not None).graph
    sizes = varying_sizes(values)

    def flat(*tensors: Any) -> Any:
        given = list(leaves)
        for index, tensor in zip(places, tensors, strict=True):
            given[index] = tensor
        return function(*pytree.tree_unflatten(given, spec))

    try:
        module = trace_after_autograd(flat, values, list(sizes.values()), fake_mode_of(graph))
    except Exception as error:
        return f"the replacement cannot be traced: {error}"
    return splice(match, module, [*sizes, *nodes])


def splice(match: Match, module: GraphModule, inputs: Sequence[Any]) -> list[Node] | str:
    """Put the calls of `module` in place of `match`; gives them, in order, or a text why not. `inputs` are nodes,
    numbers, or names of sizes that vary."""
    ends = [end for end in match.ends if end is not None]
    place = min(ends)
    results = output_node(module.graph).args[0]
    results = list(results) if isinstance(results, (list, tuple)) else [results]
    if reason := _unlike(match.ends, results) or _too_late(match.ends, module, results, inputs):
        return reason
    pairs = zip(match.ends, _per_end(match.ends, results), strict=True)
    by_end = [(end, result) for end, result in pairs if end is not None]
    if reason := seen_by_others(by_end, module, inputs, place):
        return reason
    made = _copy_calls(place, max(ends), module, inputs)
    new = {copy for node, copy in made.items() if node.op != "placeholder"}
    _mark(by_end, made, new)
    for end, result in by_end:
        _replace(end, result, made, new)
    _clean({*match.nodes, *new})
    return sorted(node for node in new if not node._erased)


def varying_sizes(values: Sequence[Any]) -> dict[str, Any]:
    """The distinct sizes of these tensors that vary, by their text."""
    found: dict[str, Any] = {}
    for value in pytree.tree_leaves(list(values)):
        if isinstance(value, torch.Tensor):
            found |= {str(extent): extent for extent in value.shape if isinstance(extent, torch.SymInt)}
    return found


def _too_late(
    ends: Sequence[Node | None], module: GraphModule, results: list[Any], inputs: Sequence[Any]
) -> str | None:
    """An input (a tangent of a joint pattern) may stand after an end that is made without it."""
    reads: dict[Node, set[Node]] = {}
    place = min(end for end in ends if end is not None)
    for node, given in zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True):
        source = _size_source(place, given, inputs)[0] if isinstance(given, str) and node.users else given
        reads[node] = {source} if isinstance(source, Node) else set()
    for node in module.graph.nodes:
        if node not in reads:
            reads[node] = {read for source in node.all_input_nodes for read in reads[source]}
    for end, result in zip(ends, _per_end(ends, results), strict=True):
        for part in result if isinstance(result, list) else [result]:
            late = [read for read in reads.get(part, ()) if end is not None and not read < end]
            if late:
                return f"{late[0].name} stands after {end.name}"  # type: ignore[union-attr]
    return None


def _copy_calls(place: Node, last_end: Node, module: GraphModule, inputs: Sequence[Any]) -> dict[Node, Any]:
    """The calls of a trace in the graph, before `place` or right after what they wait for; gives what each node of the
    trace became."""
    made: dict[Node, Any] = {}
    inherited = {key: place.meta[key] for key in _INHERITED if key in place.meta}
    final = {key: last_end.meta[key] for key in _INHERITED if key in last_end.meta}
    for node, given in zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True):
        made[node] = _size_node(place, given, inputs) if isinstance(given, str) and node.users else given
    for node in module.graph.nodes:
        if node.op not in ("call_function", "get_attr") or not (node.users or written_by(node)):
            continue
        args, kwargs = map_arg((node.args, node.kwargs), made.__getitem__)
        last = max((source for source in nodes_in((args, kwargs))), default=None)
        is_late = last is not None and not last < place
        with place.graph.inserting_after(last) if is_late else place.graph.inserting_before(place):
            target = _adopt(place.graph, module, node.target) if node.op == "get_attr" else node.target
            made[node] = place.graph.create_node(node.op, target, args, kwargs)
        origin = final if is_late else inherited
        made[node].meta = {**origin, **node.meta}
    return made


def _size_node(place: Node, text: str, inputs: Sequence[Any]) -> Node:
    """The graph's own number for a size that varies, read from a tensor if there is none yet."""
    source, dim = _size_source(place, text, inputs)
    if dim is None:
        return source
    graph = place.graph
    with graph.inserting_before(place) if source < place else graph.inserting_after(source):
        made = graph.call_function(_SIZE, (source, dim))
    made.meta[value_key(source)] = value_of(source).shape[dim]
    return made


def _size_source(place: Node, text: str, inputs: Sequence[Any]) -> tuple[Node, int | None]:
    """A number of the graph that is this size, or the first of the inputs that has it, and where."""
    for node in place.graph.nodes:
        if node is place:
            break
        if isinstance(value_of(node), torch.SymInt) and str(value_of(node)) == text:
            return node, None
    for source in sorted(source for source in inputs if isinstance(source, Node)):
        value = value_of(source)
        for dim, extent in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if str(extent) == text:
                return source, dim
    raise KeyError(text)


def _adopt(graph: Graph, module: GraphModule, target: Any) -> str:
    """Give what a trace refers to (a constant, the body of a higher-order op) a name in the graph's own module."""
    owner = graph.owning_module
    assert owner is not None
    base = f"replaced_{str(target).replace('.', '_')}"
    name, number = base, 0
    while hasattr(owner, name):
        number += 1
        name = f"{base}_{number}"
    setattr(owner, name, attribute(module, str(target)))
    return name


def _per_end(ends: Sequence[Node | None], results: list[Any]) -> list[Any]:
    """One end that gives several values takes all results."""
    if len(ends) == 1 and len(results) != 1:
        return [results]
    return results


def _unlike(ends: Sequence[Node | None], results: list[Any]) -> str | None:
    per_end = _per_end(ends, results)
    if len(per_end) != len(ends):
        return f"{len(per_end)} results in place of {len(ends)}"
    for end, result in zip(ends, per_end, strict=True):
        if end is None or result is None:
            continue
        after = [value_of(item) for item in result] if isinstance(result, list) else value_of(result)
        before = value_of(end)
        if isinstance(result, list):
            before = [b for b, item in zip(before, result, strict=False) if item is not None]
            after = [a for a, item in zip(after, result, strict=True) if item is not None]
        if reason := differs(end.name, before, after):
            return reason
    return None


def _mark(by_end: Sequence[tuple[Node, Any]], made: dict[Node, Any], new: set[Node]) -> None:
    """New calls are recomputed as the end is that they lead to; the first that is marked, if there are several."""
    marked: set[Node] = set()
    for end, result in by_end:
        marks = {key: end.meta[key] for key in _RECOMPUTED if key in end.meta}
        parts = result if isinstance(result, list) else [result]
        waiting: list[Any] = [made.get(part) for part in parts] if marks else []
        while waiting:
            node = waiting.pop()
            if node in new and node not in marked:
                marked.add(node)
                node.meta |= marks
                waiting += node.all_input_nodes


def _replace(end: Node, result: Any, made: dict[Node, Any], new: set[Node]) -> None:
    def is_old(user: Node) -> bool:
        return user not in new

    if isinstance(result, list):
        for user in list(end.users):
            if kind(user) == "getitem" and user not in new and result[user.args[1]] is not None:
                user.replace_all_uses_with(made[result[user.args[1]]], delete_user_cb=is_old)
                user.graph.erase_node(user)
    elif result is not None:
        end.replace_all_uses_with(made[result], delete_user_cb=is_old)


def _clean(nodes: set[Node]) -> None:
    """Matched calls that nobody reads any more go, and so do new ones that nobody reads."""
    for node in sorted(nodes, reverse=True):
        if not node.users and not node._erased and not written_by(node):
            node.graph.erase_node(node)
