"""What a captured graph says of its nodes, before any of them is lowered."""

from __future__ import annotations

import operator
from itertools import accumulate
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ferrite.errors import Unsupported
from ferrite.graph.names import name_of
from ferrite.loops.index import Index
from ferrite.lower.library import library_of
from ferrite.lower.value import TORCH_DTYPES


def refuse_sizes(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a symbolic size where the op wants a plain number. Its row looks at that: it is a dimension, an order, a
    precision. What may be symbolic is a SymInt of the schema, or a Scalar, which rows take to `const`."""
    schema = getattr(op, "_schema", None)  # an op that calls graphs has none
    if schema is None or not _holds_size((*args, *kwargs.values())):
        return
    for place, parameter in enumerate(schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(parameter.name)
        kind = parameter.real_type
        while kind.kind() in ("OptionalType", "ListType"):
            kind = kind.getElementType()
        if kind.kind() in ("IntType", "FloatType", "BoolType") and _holds_size(value):
            raise Unsupported(f"a size for {parameter.name!r}", why="code depends on the number")


def _holds_size(value: Any) -> bool:
    return isinstance(value, Index) or (isinstance(value, (list, tuple)) and any(map(_holds_size, value)))


# Ops that give other strides than traced when sizes are symbolic; what is computed from them follows the real ones.
BREAKS_ITS_PROMISE = frozenset(
    {"aten._fft_c2c.default", "aten._fft_r2c.default", "aten._fft_c2r.default", "aten.nonzero.default"}
)

# Ops whose results are always new and contiguous, as traced.
KEEPS_ITS_PROMISE = frozenset({"aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default"})


def last_readers(module: GraphModule) -> dict[Node, int]:
    """The position of the last node that reads each value; reading a part of a value reads the value."""
    last: dict[Node, int] = {}
    position = len(module.graph.nodes)
    for node in reversed(module.graph.nodes):
        position -= 1
        reaches = last.get(node, position) if node.target is operator.getitem else position
        for argument in node.all_input_nodes:
            last[argument] = max(last.get(argument, -1), reaches)
    return last


def library_calls_before(module: GraphModule) -> list[int]:
    """How many libraries are called up to and with each node."""
    called = (node.op == "call_function" and library_of(name_of(node.target) or "") for node in module.graph.nodes)
    return list(accumulate(map(bool, called)))


def size_in_bytes(fake: Any) -> Any:
    """In bytes, if that is a number."""
    count = fake.numel() if isinstance(fake, torch.Tensor) else None
    return count * fake.element_size() if isinstance(count, int) else None


def part_of(user: Node) -> Any:
    """Which of several results a node takes."""
    return user.args[1] if user.target is operator.getitem else None


def is_plain(fake: Any) -> bool:
    """A tensor that loops can read: strided, on the CPU, of a dtype of the loop IR, without lazy negation."""
    return (
        isinstance(fake, torch.Tensor)
        and fake.layout == torch.strided
        and fake.device.type == "cpu"
        and fake.dtype in TORCH_DTYPES
        and not fake.is_quantized
        and not fake.is_neg()
        and not torch._is_functional_tensor(fake)
    )


def is_empty(fake: torch.Tensor) -> bool:
    return any(isinstance(extent, int) and extent == 0 for extent in fake.shape)


def is_static(fake: torch.Tensor) -> bool:
    return all(isinstance(extent, int) for extent in (*fake.shape, *fake.stride()))


def is_size_arithmetic(node: Node) -> bool:
    name = name_of(node.target) or ""
    return name.startswith(("operator.", "math.", "builtins.", "torch.sym_", "aten.sym_"))


def is_of_data(fake: Any) -> bool:
    """A number that the run finds in its data, or that is made of one. ShapeEnv may know an expression that is no
    longer one: what it has come to believe is not asked."""
    is_symbolic = isinstance(fake, (torch.SymInt, torch.SymFloat, torch.SymBool))
    return is_symbolic and bool(free_unbacked_symbols(fake.node._expr))


def may_alias(node: Node) -> bool:
    """Whether a result may share memory with the first argument, by the schema; reshape says nothing and may."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return True
    return any(r.alias_info is not None for r in schema.returns) or schema.name in ("aten::reshape", "aten::contiguous")


# Operators that call the graphs given to them with tensors of the traced shapes. All others may stack slices
# (associative_scan) or call under a transform whose tensors have no memory of their own (the vmap of flex_attention).
CALLS_AS_TRACED = frozenset({
    "higher_order.cond", "higher_order.while_loop", "higher_order.while_loop_stack_output", "higher_order.scan",
    "higher_order.map_impl", "higher_order.invoke_subgraph",
})  # fmt: skip


def why_in_eager(op: str) -> str:
    """Why an op without a row runs in eager."""
    library = library_of(op)
    if library is not None:
        return library
    match op.partition(".")[0]:
        case "higher_order":
            return "control flow: runs the compiled bodies from eager"
        case "operator" | "math" | "torch" | "builtins":
            return "arithmetic on sizes"
        case "aten" | "prims" | "prim":
            return "no row in the lowering table"
    return "an operator from outside PyTorch"
