"""Shapes the interface of graphs that did not come from Dynamo, so that the compiler behind sees one form only.

Dynamo's graphs take flat inputs and give a flat tuple. Graphs made by hand, by `make_fx` or by `torch.export` may
give one tensor or a dict, take lists, or carry pytree specs. Each function below removes one such freedom, compiles
what is left, and gives it back around every call.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo.utils import flatten_graph_inputs
from torch._guards import TracingContext
from torch.fx import GraphModule, Node
from torch.fx.graph import CodeGen, _PyTreeCodeGen
from torch.utils import _pytree as pytree

from ferrite.graph.query import output_node

Compiler = Callable[[Any, list[Any]], Callable[..., Any]]


def compile_shaped(module: Any, inputs: Sequence[Any], compile_flat: Compiler) -> Callable[..., Any]:
    """Compile a module of any interface with a compiler that takes flat inputs and flat tuples only."""
    inputs = list(inputs)
    if not isinstance(module, GraphModule):
        return _through_flat_outputs(module, inputs, compile_flat)
    if isinstance(module.graph._codegen, _PyTreeCodeGen):
        return _through_pytree_specs(module, inputs, compile_flat)
    if TracingContext.try_get() is None or not _returns_flat_tuple(module):
        # Dynamo takes any sequence for a tuple; any other caller gets what the graph returns.
        return _through_output_spec(module, inputs, compile_flat)
    return _through_flat_inputs(module, inputs, compile_flat)


def _through_flat_inputs(module: GraphModule, inputs: list[Any], compile_flat: Compiler) -> Callable[..., Any]:
    """A graph that takes lists, tuples or dicts: compile it on their leaves."""
    if any(isinstance(value, (list, tuple, dict)) for value in inputs):
        return flatten_graph_inputs(module, inputs, compile_flat)
    return compile_flat(module, inputs)


def _through_pytree_specs(module: GraphModule, inputs: list[Any], compile_flat: Compiler) -> Callable[..., Any]:
    """An exported module: compile on the leaves, run its own processing of inputs and outputs around each call."""
    codegen = module.graph._codegen
    module.graph.set_codegen(CodeGen())
    module.recompile()
    compiled = compile_shaped(module, codegen.process_inputs(*inputs), compile_flat)

    def call(*args: Any, **kwargs: Any) -> Any:
        ordered = (*args, *kwargs.values())
        return codegen.process_outputs(compiled(*codegen.process_inputs(*ordered)))

    return call


def _returns_flat_tuple(module: GraphModule) -> bool:
    result = output_node(module.graph).args[0]
    return isinstance(result, (tuple, list)) and all(_is_leaf(item) for item in result)


def _is_leaf(item: Any) -> bool:
    """One value: a node that gives several tensors has to be taken apart first."""
    if isinstance(item, Node):
        return not isinstance(item.meta.get("val"), (tuple, list, dict))
    return not isinstance(item, (tuple, list, dict))


def _through_output_spec(module: GraphModule, inputs: list[Any], compile_flat: Compiler) -> Callable[..., Any]:
    """A graph that gives one value, or values in a structure: compile it with a flat tuple as result."""
    vars(module).pop("_backend_id", None)  # what is compiled is not all of what Dynamo gets
    output = output_node(module.graph)
    result = output.args[0]
    if isinstance(result, Node) and (count := _number_of_results(result)) is not None:
        with module.graph.inserting_before(output):
            result = _type_of_results(result)(
                module.graph.call_function(operator.getitem, (result, index)) for index in range(count)
            )
    leaves, spec = pytree.tree_flatten(_plain(result))
    output.args = (tuple(leaves),)
    module.recompile()
    if not _returns_flat_tuple(module):
        raise RuntimeError(f"Ferrite compiles graphs that return tensors in a tuple; this one returns\n{module.graph}")
    compiled = _through_flat_inputs(module, inputs, compile_flat)

    def call(*args: Any) -> Any:
        return pytree.tree_unflatten(list(compiled(*args)), spec)

    return call


def _plain(result: Any) -> Any:
    """FX keeps lists and dicts in classes of its own; the caller knows Python's."""
    if isinstance(result, dict):
        return {key: _plain(item) for key, item in result.items()}
    if isinstance(result, list):
        return [_plain(item) for item in result]
    if type(result) is tuple:
        return tuple(_plain(item) for item in result)
    return result


def _number_of_results(node: Node) -> int | None:
    """How many tensors a call gives, if its operator gives several."""
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)):
        return len(value)
    schema = getattr(node.target, "_schema", None)
    if schema is not None and len(schema.returns) > 1:
        return len(schema.returns)
    return None


def _type_of_results(node: Node) -> type:
    return list if isinstance(node.meta.get("val"), list) else tuple


def _through_flat_outputs(module: Any, inputs: list[Any], compile_flat: Compiler) -> Callable[..., Any]:
    """A bare module or function: no graph says what it returns, so the structure is noted while it is traced."""
    spec: pytree.TreeSpec | None = None
    flat_inputs, input_spec = pytree.tree_flatten(tuple(inputs))

    class FlatModule(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, *leaves: Any) -> tuple[Any, ...]:
            nonlocal spec
            result, spec = pytree.tree_flatten(self.inner(*pytree.tree_unflatten(list(leaves), input_spec)))
            return tuple(result)

    compiled = compile_flat(FlatModule(), flat_inputs)

    def call(*args: Any) -> Any:
        assert spec is not None
        return pytree.tree_unflatten(list(compiled(*pytree.tree_leaves(args))), spec)

    return call
