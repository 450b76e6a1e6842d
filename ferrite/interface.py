"""Shapes the interface of graphs that did not come from Dynamo, so that the compiler behind sees one form only.

Dynamo's graphs take flat inputs and give a flat tuple. Graphs made by hand, by `make_fx` or by `torch.export` may
give one tensor or a dict, take lists, or carry pytree specs. Each function below removes one such freedom, compiles
what is left, and gives it back around every call.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.utils import flatten_graph_inputs, preserve_rng_state
from torch._guards import TracingContext, detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.graph import CodeGen, _PyTreeCodeGen
from torch.utils import _pytree as pytree

from ferrite.graph.query import output_node
from ferrite.graph.values import value_of

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
    compiled = compile_shaped(module, _as_exported(module, codegen.process_inputs(*inputs)), compile_flat)

    def call(*args: Any, **kwargs: Any) -> Any:
        ordered = (*args, *kwargs.values())
        return codegen.process_outputs(compiled(*codegen.process_inputs(*ordered)))

    return call


def _as_exported(module: GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """The examples that a module was exported with, where a size of one may change; else those that are given."""
    known = [value_of(node) for node in module.graph.find_nodes(op="placeholder")]
    tensors = [value for value in known if isinstance(value, FakeTensor)]
    may_change = any(not isinstance(extent, int) for tensor in tensors for extent in tensor.shape)
    if not may_change or len(known) != len(inputs):
        return list(inputs)
    return [fake if isinstance(fake, FakeTensor) else given for fake, given in zip(known, inputs, strict=True)]


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
    result = _plain(output.args[0])
    if not all(map(_is_one_value, pytree.tree_leaves(result))):
        values = _values_of_results(module, inputs)
        with module.graph.inserting_before(output):
            result = _taken_apart(result, values)
    leaves, spec = pytree.tree_flatten(result)
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


def _is_one_value(leaf: Any) -> bool:
    """Whether it is known of a part of the result that it is one tensor or number."""
    if not isinstance(leaf, Node) or leaf.op in ("placeholder", "get_attr"):
        return True
    if (value := value_of(leaf)) is not None:
        return isinstance(value, (torch.Tensor, torch.SymInt, int))
    schema = getattr(leaf.target, "_schema", None)
    return schema is not None and [str(each.type) for each in schema.returns] == ["Tensor"]


def _values_of_results(module: GraphModule, inputs: list[Any]) -> Any:
    """What a graph gives, on tensors without memory: how many a split gives depends on sizes. None if that fails, and
    then compiling it does, too."""
    tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    mode = detect_fake_mode(tensors) or FakeTensorMode(allow_non_fake_inputs=True)

    def fake(leaf: Any) -> Any:
        return mode.from_tensor(leaf, static_shapes=True) if isinstance(leaf, torch.Tensor) else leaf

    with suppress(Exception), mode, torch.no_grad(), preserve_rng_state():
        return module(*pytree.tree_map(lambda leaf: leaf if isinstance(leaf, FakeTensor) else fake(leaf), inputs))
    return None


def _taken_apart(result: Any, value: Any) -> Any:
    """A result with nodes in place of what some node of it gives several of."""
    if isinstance(value, slice):
        parts = (getattr(value, name) for name in ("start", "stop", "step"))
        return _Slice(*(_part_of(result, getattr, name, part) for name, part in zip(_SLICE, parts, strict=True)))
    if isinstance(value, dict):
        return {key: _part_of(result, operator.getitem, key, item) for key, item in value.items()}
    if not isinstance(value, (tuple, list)):
        return result
    items = [_part_of(result, operator.getitem, index, item) for index, item in enumerate(value)]
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def _part_of(result: Any, take: Callable[..., Any], place: Any, value: Any) -> Any:
    if not isinstance(result, Node):
        return _taken_apart(take(result, place), value)
    if value is None or isinstance(value, (bool, float, str)):
        return value
    return _taken_apart(result.graph.call_function(take, (result, place)), value)


_SLICE = ("start", "stop", "step")


@dataclass(frozen=True)
class _Slice:
    """A slice whose parts are results of a graph: for the caller it becomes one again."""

    start: Any
    stop: Any
    step: Any


pytree.register_pytree_node(
    _Slice, lambda made: ([made.start, made.stop, made.step], None), lambda parts, _: slice(*parts)
)


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
