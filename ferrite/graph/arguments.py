"""What a node of a Torch-level graph calls, and with which arguments, however it was spelled.

    torch.tanh(x)    x.tanh()    F.tanh(x)                 one kind, "tanh"
    x.split(3, -1)   torch.split(x, split_size_or_sections=3, dim=-1)
                                                           one call: split, {input: x, sections: 3, dim: -1}

`kind` gives the name of the op, `bind` the op with every parameter by name, defaults filled in; both say None for
what they do not know, and then a pass leaves the node alone. An op that writes has another kind than the one that
does not: `add_` for `x.add_(1)` and `x += 1`. NumPy's names (`axis`, `keepdims`, ...) are understood everywhere.

Signatures come from the table below where torch's own are overloaded or spelled in several ways, else from Python's
signature of the function or from the op's schema.
"""

from __future__ import annotations

import ast
import functools
import inspect
import math
import operator
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx import Graph, Node

from ferrite.graph.query import attribute
from ferrite.graph.values import value_of

# name|other spelling=default; `*name` takes a list of numbers, or the numbers one by one; `*` begins keywords.
_TABLE = """
add(input, other, *, alpha=1, out=None)
add_(input, other, *, alpha=1)
addmm(input, mat1, mat2, *, beta=1, alpha=1, out=None)
baddbmm(input, batch1, batch2, *, beta=1, alpha=1, out=None)
bmm(input, mat2, *, out=None)
cat(tensors, dim=0, *, out=None)
chunk(input, chunks, dim=0)
clamp(input, min=None, max=None, *, out=None)
clamp_(input, min=None, max=None)
detach(input)
div(input, other, *, rounding_mode=None, out=None)
div_(input, other, *, rounding_mode=None)
dropout(input, p, training|train)
einsum(equation, *operands)
expand(input, *size|sizes)
flatten(input, start_dim=0, end_dim=-1)
flip(input, *dims)
floor_div(input, other)
getitem(input, index)
index_select(input, dim, index, *, out=None)
matmul(input, other|mat2|tensor2, *, out=None)
mean(input, dim=None, keepdim=False, *, dtype=None, out=None)
mm(input, mat2, *, out=None)
movedim(input, source, destination)
mul(input, other, *, out=None)
mul_(input, other)
nan_to_num(input, nan=None, posinf=None, neginf=None, *, out=None)
narrow(input, dim, start, length)
permute(input, *dims)
pow(input, exponent, *, out=None)
quantize_per_tensor(input, scale, zero_point, dtype)
relu(input, inplace=False)
repeat(input, *sizes|repeats)
reshape(input, *shape)
select(input, dim, index)
split(input|tensor, sections|split_size|split_size_or_sections, dim=0)
split_with_sizes(input, sections|split_sizes, dim=0)
squeeze(input, dim=None)
stack(tensors, dim=0, *, out=None)
sub(input, other, *, alpha=1, out=None)
sub_(input, other, *, alpha=1)
sum(input, dim=None, keepdim=False, *, dtype=None, out=None)
t(input)
tensor_split(input, indices_or_sections|sections|indices|tensor_indices_or_sections, dim=0)
tile(input, *dims)
transpose(input, dim0|axis0, dim1|axis1)
unbind(input, dim=0)
unflatten(input, dim, sizes)
unsqueeze(input, dim)
view(input, *shape|size)
view_as(input, other)
"""

_SAME = {
    "absolute": "abs", "clip": "clamp", "clip_": "clamp_", "concat": "cat", "concatenate": "cat", "divide": "div",
    "multiply": "mul", "subtract": "sub", "true_divide": "div", "moveaxis": "movedim", "negative": "neg",
    "swapaxes": "transpose", "swapdims": "transpose", "special_expit": "sigmoid", "type_as": "to",
}  # fmt: skip
_OPERATORS = {
    operator.add: "add", operator.sub: "sub", operator.mul: "mul", operator.truediv: "div", operator.pow: "pow",
    operator.matmul: "matmul", operator.neg: "neg", operator.getitem: "getitem", operator.setitem: "setitem",
    operator.iadd: "add_", operator.isub: "sub_", operator.imul: "mul_", operator.itruediv: "div_",
    operator.floordiv: "floor_div", operator.mod: "remainder", operator.eq: "eq", operator.ne: "ne",
    operator.lt: "lt", operator.le: "le", operator.gt: "gt", operator.ge: "ge", operator.abs: "abs",
    operator.and_: "bitwise_and", operator.or_: "bitwise_or", operator.xor: "bitwise_xor",
    operator.invert: "bitwise_not",
}  # fmt: skip
NUMPY_NAMES: Mapping[str, str] = {
    "axis": "dim", "keepdims": "keepdim", "x": "input", "a": "input", "x1": "input", "x2": "other"
}  # fmt: skip
_NAMESPACES = (
    torch,
    torch.nn.functional,
    torch._C._nn,
    torch._C._VariableFunctions,
    torch.special,
    torch.linalg,
    torch.fft,
)


@dataclass(frozen=True)
class Parameter:
    """One parameter of an op. `names`: the first is ours, the others are spellings of it."""

    names: tuple[str, ...]
    default: Any = inspect.Parameter.empty
    by_position: bool = True
    takes_rest: bool = False  # `view(2, 3)` for `view([2, 3])`


@dataclass(frozen=True)
class Call:
    """An op with its arguments. `given`: the parameters that the program wrote; the others hold their defaults."""

    kind: str
    arguments: Mapping[str, Any]
    given: frozenset[str]

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str, default: Any = None) -> Any:
        """For parameters that only some spellings have: `inplace` of relu."""
        return self.arguments.get(name, default)


def kind(node: Any) -> str | None:
    """The op that a node calls, one name for all spellings; None for anything but a call of a known op that stands in
    its graph."""
    if not isinstance(node, Node) or node._erased:
        return None
    if node.op == "call_function":
        if node.target is getattr:
            return node.args[1] if len(node.args) == 2 and isinstance(node.args[1], str) else None
        return _kind_of_function(node.target)
    if node.op == "call_method":
        return _SAME.get(node.target, node.target) if isinstance(node.target, str) else None
    if node.op == "call_module" and node.graph.owning_module is not None:
        module = attribute(node.graph.owning_module, str(node.target))
        return f"nn.{type(module).__name__}" if type(module).__module__.startswith("torch.nn.") else None
    return None


def find(graph: Graph, *kinds: str) -> list[Node]:
    """Every call of one of these kinds, in graph order; the list stays valid while the graph is edited."""
    found: list[Node] = []
    # FX keeps its calls by what they call, so most of a graph need not be looked at.
    for (op, target), nodes in graph._find_nodes_lookup_table.table.items():
        if op == "call_function" and target is not getattr:
            found += nodes if _kind_of_function(target) in kinds else ()
        elif op.startswith("call"):
            found += [node for node in nodes if kind(node) in kinds]
    return sorted(found)


def bind(node: Any, *kinds: str) -> Call | None:
    """The call with its arguments by name, if it is one of `kinds` (of any kind, if none is given)."""
    name = kind(node)
    if name is None or (kinds and name not in kinds):
        return None
    if name == "to":
        return _bind_to(node)
    if node.target is getattr:
        return Call(name, {"input": node.args[0]}, frozenset({"input"}))
    parameters = signature(node)
    return None if parameters is None else _bind(name, parameters, node.args, node.kwargs)


def signature(node: Node) -> tuple[Parameter, ...] | None:
    """The parameters of what a node calls, by our names; None if nobody knows them."""
    if node.op == "call_function":
        return _signature_of_function(node.target)
    if node.op == "call_method":
        return _signature_of_method(str(node.target))
    if node.op == "call_module" and node.graph.owning_module is not None:
        module = attribute(node.graph.owning_module, str(node.target))
        return _from_python(type(module).forward, skip=1)
    return None


def is_int(*values: Any) -> bool:
    """Whether all of these are plain numbers of the program, neither sizes that may vary nor values of the graph."""
    return all(type(value) is int for value in values)


def is_ints(values: Any) -> bool:
    return isinstance(values, (list, tuple)) and is_int(*values)


def positive_dim(dim: Any, rank: int) -> int | None:
    """A dimension counted from the front; None if it is not a plain number of this rank."""
    if not is_int(dim) or not -rank <= dim < rank:
        return None
    return dim % rank


@functools.lru_cache(maxsize=4096)
def _kind_of_function(target: Any) -> str | None:
    if target in _OPERATORS:
        return _OPERATORS[target]
    if isinstance(target, OpOverload):
        name = target._schema.name
        return _same(name.removeprefix("aten::"))
    if isinstance(target, OpOverloadPacket):
        return _same(target._qualified_op_name.removeprefix("aten::"))
    name = getattr(target, "__name__", None)
    if isinstance(name, str) and any(getattr(space, name, None) is target for space in _NAMESPACES):
        return _same(name)
    if isinstance(name, str) and name.startswith(("linalg_", "special_", "fft_")):
        return _same(name)
    return None


def _same(name: str) -> str:
    return _SAME.get(name, name)


@functools.lru_cache(maxsize=4096)
def _signature_of_function(target: Any) -> tuple[Parameter, ...] | None:
    name = _kind_of_function(target)
    if name is None:
        return None
    if isinstance(target, OpOverload):
        return _from_schema(target._schema)
    if isinstance(target, OpOverloadPacket):
        return _from_schemas(target)
    if isinstance(target, types.FunctionType) and (target.__module__ == "torch.nn.functional" or name not in _table()):
        return _from_python(target)
    return _table().get(name) or _from_schemas(getattr(torch.ops.aten, name, None))


@functools.lru_cache(maxsize=4096)
def _signature_of_method(name: str) -> tuple[Parameter, ...] | None:
    name = _same(name)
    method = getattr(torch.Tensor, name, None)
    if name in _table():
        return _table()[name]
    return _from_schemas(getattr(torch.ops.aten, name, None)) or (
        _from_python(method) if isinstance(method, types.FunctionType) else None
    )


@functools.lru_cache(maxsize=1)
def _table() -> dict[str, tuple[Parameter, ...]]:
    return dict(_read_line(line) for line in _TABLE.strip().splitlines())


def _read_line(line: str) -> tuple[str, tuple[Parameter, ...]]:
    name, _, rest = line.partition("(")
    parameters: list[Parameter] = []
    by_position = True
    for word in rest.rstrip(")").split(", "):
        if word == "*":
            by_position = False
            continue
        names, _, default = word.lstrip("*").partition("=")
        parameters.append(
            Parameter(
                tuple(names.split("|")),
                ast.literal_eval(default) if default else inspect.Parameter.empty,
                by_position,
                word.startswith("*"),
            )
        )
    return name, tuple(parameters)


def _from_python(function: Callable[..., Any], skip: int = 0) -> tuple[Parameter, ...] | None:
    try:
        found = list(inspect.signature(function).parameters.values())[skip:]
    except (TypeError, ValueError):
        return None
    if any(entry.kind in (entry.VAR_POSITIONAL, entry.VAR_KEYWORD) for entry in found):
        return None
    return tuple(
        Parameter((_our_name(entry.name),), entry.default, entry.kind is not entry.KEYWORD_ONLY) for entry in found
    )


def _our_name(name: str) -> str:
    return "input" if name == "self" else name


def _from_schema(schema: Any) -> tuple[Parameter, ...]:
    return tuple(
        Parameter(
            (_our_name(entry.name),),
            entry.default_value if entry.has_default_value() else inspect.Parameter.empty,
            not entry.kwarg_only,
        )
        for entry in schema.arguments
    )


def _from_schemas(packet: OpOverloadPacket | None) -> tuple[Parameter, ...] | None:
    """The one signature that all overloads of an op on tensors share."""
    if packet is None:
        return None
    found: dict[tuple[str, ...], tuple[Parameter, ...]] = {}
    for overload in packet.overloads():
        arguments = getattr(packet, overload)._schema.arguments
        if "out" in overload or not arguments or "Tensor" not in str(arguments[0].type):
            continue
        parameters = _from_schema(getattr(packet, overload)._schema)
        found.setdefault(tuple(entry.names[0] for entry in parameters), parameters)
    if len(found) != 1:
        return None
    (parameters,) = found.values()
    out = Parameter(("out",), None, by_position=False)
    return parameters if any(entry.names[0] == "out" for entry in parameters) else (*parameters, out)


def _bind(name: str, parameters: tuple[Parameter, ...], args: Any, kwargs: Mapping[str, Any]) -> Call | None:
    arguments: dict[str, Any] = {}
    rest = list(args)
    for entry in parameters:
        if not rest or not entry.by_position:
            break
        if entry.takes_rest:
            first = rest[0] if len(rest) == 1 else None
            if isinstance(first, Node) and not isinstance(value_of(first), (int, torch.SymInt, torch.Tensor)):
                return None  # all sizes of another tensor
            arguments[entry.names[0]] = list(first) if isinstance(first, (list, tuple)) else rest
            rest = []
        else:
            arguments[entry.names[0]] = rest.pop(0)
    if rest:
        return None
    ours = {spelling: entry.names[0] for entry in parameters for spelling in entry.names} if kwargs else {}
    for given, value in kwargs.items():
        known = ours.get(given) or ours.get(NUMPY_NAMES.get(given, ""))
        if known is None or known in arguments:
            return None
        arguments[known] = value
    given_names = frozenset(arguments)
    for entry in parameters:
        if entry.takes_rest:
            values = arguments.get(entry.names[0])
            if not isinstance(values, (list, tuple)) or not all(map(_is_number, values)):
                return None  # view(dtype), or size=y.shape
            arguments[entry.names[0]] = list(values)
        elif entry.names[0] not in arguments:
            if entry.default is inspect.Parameter.empty:
                return None
            arguments[entry.names[0]] = entry.default
    return Call(name, arguments, given_names)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, torch.SymInt, Node))


def _bind_to(node: Node) -> Call | None:
    """`to` and `type_as` sort their arguments by type: a dtype, a device, or another tensor."""
    arguments: dict[str, Any] = dict.fromkeys(("input", "device", "dtype", "other"))
    arguments |= {"non_blocking": False, "copy": False, "memory_format": None}
    flags = ["non_blocking", "copy"]
    given = {"input"}
    if not 1 <= len(node.args) <= 5:  # with a device, a dtype and both flags
        return None
    arguments["input"] = node.args[0]
    for value in node.args[1:]:
        match value:
            case bool() if flags:
                name = flags.pop(0)
            case torch.dtype():
                name = "dtype"
            case torch.device() | str() | int():
                name = "device"
            case Node():
                name = "other"
            case None:
                continue
            case _:
                return None
        if name in given:
            return None
        arguments[name] = value
        given.add(name)
    for name, value in node.kwargs.items():
        if name not in arguments or name in given:
            return None
        arguments[name] = value
        given.add(name)
    return Call("to", arguments, frozenset(given))


def nodes_in(value: Any) -> Iterator[Node]:
    """Every node in an argument, in order, repeats included."""
    match value:
        case Node():
            yield value
        case list() | tuple():
            for item in value:
                yield from nodes_in(item)
        case dict():
            for item in value.values():
                yield from nodes_in(item)
        case slice():
            yield from nodes_in((value.start, value.stop, value.step))


def times_read(node: Node) -> int:
    """How often a node is read: `x * x` reads x twice."""
    return sum(entry is node for user in node.users for entry in nodes_in((user.args, user.kwargs)))


def is_finite(value: Any) -> bool:
    """A plain number that is neither infinite nor NaN."""
    return type(value) in (int, float) and math.isfinite(value)
