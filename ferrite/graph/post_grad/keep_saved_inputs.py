"""What the backward needs of an input that the call overwrites is kept as a copy.

    return (new_x, y, x)            with new_x written over x after the call, and x saved for the backward
    ->  clone = aten.clone(x); return (new_x, y, clone)

Eager's in-place ops save their operand before they write to it, so `x.acos_()` has a gradient. AOTAutograd saves the
input itself and lets the caller overwrite it: the backward would then refuse to run.
"""

from __future__ import annotations

import torch
from torch._functorch._aot_autograd.descriptors import (
    InputMutationAOTOutput,
    SavedForBackwardsAOTOutput,
    SavedForBackwardsNoVcCheckAOTOutput,
)
from torch.fx import Graph, Node

from ferrite.graph.query import memory_of, output_node, output_roles

aten = torch.ops.aten

_SAVED = (SavedForBackwardsAOTOutput, SavedForBackwardsNoVcCheckAOTOutput)


def keep_saved_inputs(graph: Graph) -> int:
    output = output_node(graph)
    roles = output_roles(graph)
    if not roles or not any(isinstance(role, InputMutationAOTOutput) for role in roles):
        return 0
    overwritten = {role.mutated_input for role in roles if isinstance(role, InputMutationAOTOutput)}
    inputs = {node for node in graph.find_nodes(op="placeholder") if node.meta.get("desc") in overwritten}
    values = list(output.args[0])
    kept = 0
    for position, (value, role) in enumerate(zip(values, roles, strict=True)):
        if isinstance(role, _SAVED) and memory_of(value) in inputs:
            with graph.inserting_before(output):
                values[position] = _clone(graph, value)
            kept += 1
    if kept:
        output.args = (tuple(values),)
    return kept


def _clone(graph: Graph, value: Node) -> Node:
    clone = graph.call_function(aten.clone.default, (value,))
    clone.meta = {key: value.meta[key] for key in ("val", "stack_trace") if key in value.meta}
    return clone
