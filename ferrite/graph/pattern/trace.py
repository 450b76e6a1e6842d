"""A pattern from a function: traced, and every call of the trace is a call of the pattern.

Before autograd a function is traced as it is written, and constants are what they are. After autograd it is traced to
aten on values of certain sizes, and constants may come from those sizes: a pattern `without_constants` is then a filter
that holds for all sizes, and one with them is asked again at every place that the filter finds.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._guards import TracingContext, tracing
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node, symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from ferrite.graph.arguments import bind, times_read
from ferrite.graph.decompose import decomposition_table
from ferrite.graph.pattern.nodes import Anything, Hole, Op, Several, Size
from ferrite.graph.query import output_node
from ferrite.graph.values import value_of


def parameter_names(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def trace_before_autograd(function: Callable[..., Any]) -> GraphModule:
    """The calls of a function as it is written, without values."""
    return symbolic_trace(function)


def trace_after_autograd(
    function: Callable[..., Any], values: Sequence[Any], sizes: Sequence[Any], fake_mode: FakeTensorMode
) -> GraphModule:
    """The aten calls of a function on fake values, decomposed as our graphs are. `sizes` that vary come first, so that
    reading one is no call. Raises if the trace would hold only under a new guard."""

    def flat(*given: Any) -> Any:
        return pytree.tree_leaves(function(*given[len(sizes) :]))

    environment = fake_mode.shape_env
    no_guards = environment.error_on_new_guards() if environment is not None else nullcontext()
    with torch.no_grad(), fake_mode, no_guards:
        return make_fx(flat, decomposition_table=decomposition_table((), use_rows=True))(*sizes, *values)


def trace_jointly(
    function: Callable[..., Any], values: Sequence[Any], needs_gradient: Sequence[bool], fake_mode: FakeTensorMode
) -> GraphModule:
    """Forward and backward of a function in one graph, as autograd makes it: the inputs, then one tangent for each
    result; the results, then the gradients, None by what needs none. Raises if the function writes its inputs."""

    def flat(*given: Any) -> Any:
        return pytree.tree_leaves(function(*given))

    with tracing(TracingContext(fake_mode)), fake_mode, torch.enable_grad():
        leaves = [
            torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device, requires_grad=needs)
            for v, needs in zip(values, needs_gradient, strict=True)
        ]
        table = decomposition_table((), use_rows=True)
        return aot_export_joint_simple(flat, leaves, trace_joint=True, decompositions=table)


def pattern_of(
    module: GraphModule, names: Sequence[str], *, constants: bool, scalars: Mapping[str, Any] | None = None
) -> Op | Several:
    """The pattern that a trace stands for. `names` are those of its inputs, None for a size; `scalars` are constants of
    the trace that stand for inputs."""
    holes = {(type(value), value): name for name, value in (scalars or {}).items()}
    made: dict[Node, Any] = {}
    for node, name in zip(module.graph.find_nodes(op="placeholder"), names, strict=True):
        made[node] = Hole(name) if name else Size(str(value_of(node))) if constants else Anything()
    outputs = pytree.tree_leaves(output_node(module.graph).args)

    def value(part: Any) -> Any:
        if isinstance(part, Node):
            return made[part]
        if isinstance(part, (list, tuple)):
            nodes = any(isinstance(item, Node) and not isinstance(made[item], (Size, Anything)) for item in part)
            return [value(item) for item in part] if constants or nodes else Anything()
        if type(part) in (int, float) and (type(part), part) in holes:
            return Hole(holes[type(part), part])
        if constants or part is None or isinstance(part, (str, bool)):
            return part
        return Anything()

    for node in module.graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        call = bind(node)
        users = None if node in outputs else times_read(node)
        if call is not None and not isinstance(node.target, OpOverload):
            arguments = {name: value(call[name]) for name in call.arguments if name in call.given}
            made[node] = Op((call.kind,), (), arguments, users)
            continue
        arguments = {name: value(part) for name, part in node.kwargs.items()}
        made[node] = Op((node.target,), tuple(value(part) for part in node.args), arguments, users)
    ends = [made[output] if isinstance(output, Node) else None for output in outputs]
    if not all(end is None or isinstance(end, Op) for end in ends) or all(end is None for end in ends):
        raise ValueError("a pattern ends in calls")
    return ends[0] if len(ends) == 1 and isinstance(ends[0], Op) else Several(tuple(ends))
