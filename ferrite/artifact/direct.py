"""An inference graph is called without AOTAutograd's wrappers, where they would do nothing.

    Dynamo -> forward -> runtime wrapper -> its generated code -> graph        becomes        Dynamo -> graph

Between Dynamo and a graph stand functions of PyTorch that write to inputs, rebuild aliases, unpack subclasses, hand
tokens on. Most inference graphs have nothing of that, and then they take 3.5 us of a call of 18 (`bench.overhead`, one
kernel). What is left of them is here: autograd is off while the graph runs. While a profiler looks they are called as
ever, as they leave marks for it; and so they are for a custom op, whose results they compare with its schema.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._functorch._aot_autograd.schemas import MutationType, OutputType, ViewAndMutationMeta
from torch.autograd import profiler
from torch.fx import GraphModule
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from ferrite.artifact.compiled import CompiledGraph
from ferrite.graph.query import output_node
from ferrite.graph.values import value_of
from ferrite.host.nodes import Call, HostProgram

_OWN_MEMORY = (OutputType.non_alias, OutputType.unsafe_view_alias, OutputType.custom_function_view)
_BUILT_IN = ("aten.", "prims.", "operator.", "builtins.", "torch.", "ferrite.")


def direct(
    wrapped: Callable[..., Any], compiled: CompiledGraph | None, facts: ViewAndMutationMeta | None, count: int
) -> Callable[..., Any]:
    """What Dynamo is given for a graph of `count` inputs: `wrapped`, which AOTAutograd made, or something shorter."""
    if compiled is None or facts is None or not _does_nothing(facts) or torch._C._is_any_autocast_enabled():
        return wrapped
    if len(compiled.program.inputs) != count or _has_custom_ops(compiled.program):
        return wrapped
    compiled.load()
    body = compiled.body
    is_grad_enabled, set_grad_enabled = torch.is_grad_enabled, torch._C._set_grad_enabled

    def call(*args: Any) -> Any:
        if profiler._is_profiler_enabled:
            return wrapped(*args)
        if not is_grad_enabled():
            return body([*args])
        set_grad_enabled(False)
        try:
            return body([*args])
        finally:
            set_grad_enabled(True)

    return call


def sees_plain_tensors(module: Any) -> bool:
    """Whether no input or result of a graph of Dynamo's is a wrapper subclass. The graph itself is asked: where there
    is one, `facts` describe what is inside of the wrappers, and an input with one part looks like a plain tensor."""
    if not isinstance(module, GraphModule):
        return False
    seen = [*module.graph.find_nodes(op="placeholder"), *output_node(module.graph).all_input_nodes]
    return not any(is_traceable_wrapper_subclass(leaf) for node in seen for leaf in tree_leaves(value_of(node)))


def _does_nothing(facts: ViewAndMutationMeta) -> bool:
    """Whether the wrappers of an inference graph only turn autograd off."""
    return (
        all(entry.mutation_type == MutationType.NOT_MUTATED for entry in facts.input_info)
        and all(entry.output_type in _OWN_MEMORY for entry in facts.output_info)
        and facts.num_intermediate_bases == 0
        and facts.grad_enabled_mutation is None
        and not facts.dynamic_outputs
        and not facts.tokens
        and not facts.act_input_indices
        and not facts.is_rng_op_functionalized
    )


def _has_custom_ops(program: HostProgram) -> bool:
    parts = (program, *program.functions)
    return any(
        isinstance(step, Call) and not step.target.startswith(_BUILT_IN) for part in parts for step in part.steps
    )
