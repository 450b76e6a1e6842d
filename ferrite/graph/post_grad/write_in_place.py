"""A write to a few places of an input writes there, instead of making a new tensor and copying it back.

    new = aten.index_copy(cache, 2, position, row); copy_(cache, new)
    ->  aten.index_copy_(cache, 2, position, row)

    new = aten.slice_scatter(cache, row, 2, p, p + 1); copy_(cache, new)
    ->  aten.copy_(aten.slice(cache, 2, p, p + 1), row)

Tracing makes every write functional: for a key-value cache that is the whole cache, twice, for each token.

Law: nobody can tell the two apart. Between the write and the copy nobody reads what was there before, neither through
the input nor through a view of it; what is written is not read from the same memory; the new tensor is no result, or
one that is the input to the user as well.
Writes that follow one another on one input are taken together, and a write to a view of the input that is then written
into the input is one to the view itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch._functorch._aot_autograd.descriptors import PlainAOTOutput
from torch._functorch._aot_autograd.schemas import OutputType
from torch._guards import TracingContext, detect_fake_mode
from torch.fx import Graph, Node, map_arg
from torch.utils._pytree import tree_leaves

from ferrite.graph.query import calls, is_call, memory_of, output_node, output_roles, written_arguments

aten = torch.ops.aten

# Each writes the places that its further arguments name; the same op with an underscore does it in memory.
IN_PLACE: dict[Any, Any] = {
    aten.index_put.default: aten.index_put_.default,
    aten._unsafe_index_put.default: aten.index_put_.default,
    aten.index_copy.default: aten.index_copy_.default,
    aten.index_add.default: aten.index_add_.default,
    aten.index_fill.int_Scalar: aten.index_fill_.int_Scalar,
    aten.index_fill.int_Tensor: aten.index_fill_.int_Tensor,
    aten.scatter.src: aten.scatter_.src,
    aten.scatter.value: aten.scatter_.value,
    aten.scatter.reduce: aten.scatter_.reduce,
    aten.scatter.value_reduce: aten.scatter_.value_reduce,
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.scatter_reduce.two: aten.scatter_reduce_.two,
}

# Each is a copy into a view: of the first argument, by all but the second.
INTO_VIEW: dict[Any, Any] = {
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.select_scatter.default: aten.select.int,
    aten.diagonal_scatter.default: aten.diagonal.default,
    aten.as_strided_scatter.default: aten.as_strided.default,
}


def write_in_place(graph: Graph) -> int:
    written = 0
    waiting = calls(graph, aten.copy_.default)
    while waiting:
        copy = waiting.pop()
        writes = _writes_before(copy)
        if not writes or not _nobody_can_tell(graph, copy, writes):
            continue
        target = copy.args[0]
        assert isinstance(target, Node)
        start = writes[0].args[0]
        assert isinstance(start, Node)
        for write in writes:
            copied = _replace(graph, write, start)
            waiting += [copied] if copied is not None else []
        copy.replace_all_uses_with(start)
        graph.erase_node(copy)
        if target is not start and not target.users:
            graph.erase_node(target)
        written += len(writes)
    return written


def _writes_before(copy: Node) -> list[Node]:
    """The writes, first to last, whose result is copied to where the first one reads."""
    target, value = copy.args[:2]
    found: list[Node] = []
    while is_call(value, *IN_PLACE, *INTO_VIEW):
        found.append(value)
        value = value.args[0]
    if not found or not isinstance(value, Node) or not isinstance(target, Node) or not _is_same_place(target, value):
        return []
    return found[::-1]


def _is_same_place(one: Node, other: Node) -> bool:
    """The same input, or the same view of the same input."""
    while one is not other:
        if one.op != "call_function" or one.target is not other.target or memory_of(one) is one:
            return False
        if one.args[1:] != other.args[1:] or one.kwargs != other.kwargs:
            return False
        one, other = one.args[0], other.args[0]
    return True


def _nobody_can_tell(graph: Graph, copy: Node, writes: list[Node]) -> bool:
    """Whether everyone who reads the memory finds there what the functional graph would have given it.

    Versions: 0 is what was there, n what the n-th write made. Who reads a version does so before the next one."""
    memory = memory_of(writes[0].args[0])
    if memory is None or memory.op != "placeholder":
        return False
    versions: dict[Node, int] = {memory: 0} | {write: number for number, write in enumerate(writes, 1)}
    for write in writes:
        others = (leaf for leaf in tree_leaves((write.args[1:], write.kwargs)) if isinstance(leaf, Node))
        if any(memory_of(other) in versions for other in others):
            return False
    output = output_node(graph)
    for value, version in versions.items():
        for shared, reader in _readers(value):
            if reader is copy or reader in versions:
                continue
            if reader is output and value is not memory and not _are_inputs(output, shared):
                return False
            now = sum(write < reader for write in writes)
            if version != now and not (value is memory and copy < reader):
                return False
    return True


def _readers(value: Node) -> Iterator[tuple[Node, Node]]:
    """Who reads elements of a value, itself or through views: what they read, and they."""
    waiting = [value]
    while waiting:
        shared = waiting.pop()
        for user in shared.users:
            if memory_of(user) is not user and user.op == "call_function" and not written_arguments(user):
                waiting.append(user)
            if not _reads_no_element(user):
                yield shared, user


def _are_inputs(output: Node, value: Node) -> bool:
    """Whether all results with this value share memory with an input for the user too: AOTAutograd knows, and makes
    them of the input again."""
    context = TracingContext.try_get()
    facts = context.fw_metadata if context is not None else None
    roles = output_roles(output.graph)
    if facts is None or roles is None:
        return False
    places = [role for role, given in zip(roles, output.args[0], strict=True) if given is value]
    return all(
        isinstance(role, PlainAOTOutput)
        and role.idx < len(facts.output_info)
        and facts.output_info[role.idx].output_type in (OutputType.alias_of_input, OutputType.is_input)
        for role in places
    )


def _reads_no_element(node: Node) -> bool:
    """A view, or a question about sizes. A reshape may have to copy."""
    if is_call(node, aten.sym_size.int, aten.sym_stride.int, aten.sym_numel.default, aten.sym_storage_offset.default):
        return True
    is_alias = node.op == "call_function" and memory_of(node) is not node and not written_arguments(node)
    return is_alias and node.target is not aten.reshape.default


def _replace(graph: Graph, write: Node, start: Node) -> Node | None:
    """The write in memory; gives the copy into a view that it became, if it did. Who read its result reads memory."""
    copied = None
    with graph.inserting_before(write):
        if write.target in IN_PLACE:
            made = graph.call_function(IN_PLACE[write.target], (start, *write.args[1:]), write.kwargs)
        else:
            keywords = {name: value for name, value in write.kwargs.items() if name != "src"}
            source = write.kwargs.get("src", write.args[1] if len(write.args) > 1 else None)
            view = graph.call_function(INTO_VIEW[write.target], (start, *write.args[2:]), keywords)
            view.meta = {"val": _value_of(view), **_origin(write)}
            made = copied = graph.call_function(aten.copy_.default, (view, source))
    made.meta = {"val": made.args[0].meta["val"], **_origin(write)}
    write.replace_all_uses_with(start)
    graph.erase_node(write)
    return copied


def _origin(node: Node) -> dict[str, Any]:
    return {key: node.meta[key] for key in ("stack_trace", "original_aten", "from_node") if key in node.meta}


def _value_of(view: Node) -> torch.Tensor:
    args, kwargs = map_arg((view.args, view.kwargs), lambda node: node.meta["val"])
    target: Callable[..., torch.Tensor] = view.target
    with detect_fake_mode(args[0]) or nullcontext():
        return target(*args, **kwargs)
