"""Graphs as text, and text as graphs: plain Python, one call a line.

    def graph(x: f32[8, 4], w: f32[4, 2]):
        mm = aten.mm.default(x, w)
        return (mm,)

A tensor's type says dtype and sizes; strides are added when the tensor is not contiguous: `f32[8, 4].stride(1, 8)`.
What the module holds is read as `w = self.w` and called as `y = self.conv(x)`. What `parse_graph` gives carries fake
values, so that passes and checks work on it as on a captured graph.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv, compute_unbacked_bindings
from torch.fx.node import map_aggregate

from ferrite.errors import Malformed, Unsupported
from ferrite.graph.names import name_of, resolve
from ferrite.graph.query import attribute, source_line
from ferrite.syntax import Named, Ref, dotted, read, show, show_call

SHORT_DTYPES: dict[torch.dtype, str] = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "b8",
    torch.uint16: "u16", torch.uint32: "u32", torch.uint64: "u64", torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip
_LONG_DTYPES = {short: dtype for dtype, short in SHORT_DTYPES.items()}


def show_type(value: Any) -> str:
    """`f32[8, 4]`, `f32` for a tensor without dimensions, `Sym(s0)`, `NestedInt(s0)` for the ragged size of a jagged
    tensor, which is no number in a call, or the Python type of anything else."""
    if isinstance(value, torch.Tensor):
        dtype = SHORT_DTYPES.get(value.dtype, str(value.dtype).removeprefix("torch."))
        text = f"{dtype}[{', '.join(str(extent) for extent in value.shape)}]" if value.dim() else dtype
        if value.layout != torch.strided:
            return f"{text}.layout({str(value.layout).removeprefix('torch.')!r})"
        strides = tuple(str(stride) for stride in value.stride())
        return text if strides == _contiguous(value) else f"{text}.stride({', '.join(strides)})"
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return f"{'NestedInt' if value.node.is_nested_int() else 'Sym'}({value})"
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(show_type(item) for item in value)}]"
    return "None" if value is None else type(value).__name__


def _contiguous(value: torch.Tensor) -> tuple[str, ...]:
    strides: list[Any] = []
    running: Any = 1
    for extent in reversed(value.shape):
        strides.insert(0, running)
        running = running * (extent if not isinstance(extent, int) or extent > 0 else 1)
    return tuple(str(stride) for stride in strides)


def show_graph(graph: Graph, name: str = "graph", *, types: bool = False, sources: bool = False) -> str:
    """The whole graph; `types` adds what each call gives, `sources` the user's lines."""
    inputs, lines = [], []
    for node in graph.nodes:
        if node.op == "placeholder":
            value = node.meta.get("val", node.meta.get("example_value"))
            inputs.append(f"{node.name}: {show_type(value)}")
        elif node.op == "output":
            lines.append(f"return {show(as_value(node.args[0]))}")
        else:
            lines.append(_line(node, types, sources))
    return "\n    ".join([f"def {name}({', '.join(inputs)}):", *lines]) + "\n"


def _line(node: Node, types: bool, sources: bool) -> str:
    args, kwargs = as_value(node.args), as_value(node.kwargs)
    match node.op:
        case "get_attr":
            text = f"{node.name} = self.{node.target}"
        case "call_module":
            text = f"{node.name} = {show_call(f'self.{node.target}', args, kwargs, _path)}"
        case "call_method":
            text = f"{node.name} = {show_call(f'{show(args[0])}.{node.target}', args[1:], kwargs, _path)}"
        case _:
            target = name_of(node.target) or str(getattr(node.target, "__name__", node.target))
            text = f"{node.name} = {show_call(target, args, kwargs, _path)}"
    remarks = [show_type(node.meta["val"])] if types and "val" in node.meta else []
    remarks += [source_line(node)] if sources and source_line(node) else []
    return f"{text}  # {'  '.join(remarks)}" if remarks else text


def _path(named: Named) -> str:
    return named.path


def as_value(value: Any) -> Any:
    """FX arguments as values of `syntax`: nodes become refs, outside objects names, anything else its type."""
    if isinstance(value, Node):
        return Ref(value.name)
    if isinstance(value, (list, tuple)):
        return type_of_list(value)(as_value(item) for item in value)
    if isinstance(value, dict):
        return {key: as_value(item) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(as_value(value.start), as_value(value.stop), as_value(value.step))
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return value
    name = name_of(value)
    return Named(name) if name is not None else f"<{type(value).__name__}>"


def type_of_list(value: Any) -> type:
    """FX's immutable lists and torch.Size are lists and tuples to us."""
    return tuple if isinstance(value, tuple) else list


def parse_graph(text: str, fake_mode: FakeTensorMode | None = None, held: torch.nn.Module | None = None) -> GraphModule:
    """A graph from its text, every call with its fake value; `held` is what the text calls `self`. Raises `Malformed`
    with the line that does not fit."""
    (function,) = ast.parse(text).body
    if not isinstance(function, ast.FunctionDef):
        raise Malformed("graph text is one function", where="graph.text", program=text)
    graph, nodes = Graph(), {}
    held = held or torch.nn.Module()
    fake_mode = fake_mode or FakeTensorMode(shape_env=ShapeEnv())
    for argument in function.args.args:
        node = graph.placeholder(argument.arg)
        with fake_mode:
            node.meta["val"] = _read_type(argument.annotation)
        nodes[argument.arg] = node
    for statement in function.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call() as call):
                nodes[name] = _read_call(graph, name, call, nodes, fake_mode, held)
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Attribute() as path):
                target = dotted(path).removeprefix("self.")
                nodes[name] = graph.create_node("get_attr", target, name=name)
                nodes[name].meta["val"] = fake_mode.from_tensor(attribute(held, target), static_shapes=True)
            case ast.Return(value=ast.expr() as value):
                graph.output(_as_fx(read(value, nodes.__contains__), nodes))
            case _:
                raise Malformed(
                    "expected a call, an attribute or a return", where="graph.text", program=ast.unparse(statement)
                )
    return GraphModule(held, graph)


def read_type(text: str) -> torch.Tensor:
    """A tensor without memory, of a type as `show_type` writes it. Raises `Unsupported` for any other value, and for a
    tensor with sizes that change."""
    try:
        return _read_type(ast.parse(text, mode="eval").body, "meta")
    except (Malformed, KeyError, ValueError) as error:
        raise Unsupported(f"a value that is {text}") from error


def read_types(text: str) -> list[torch.Tensor | None] | None:
    """The parts of what gives several tensors, or None in the place of one; None for what is no list of them."""
    match ast.parse(text, mode="eval").body:
        case ast.List(elts=parts):
            written = [ast.unparse(part) for part in parts]
            return [None if part == "None" else read_type(part) for part in written]
    return None


def split_type(text: str) -> tuple[torch.dtype, list[ast.expr], list[ast.expr] | None]:
    """A tensor's dtype, its sizes, and its strides if they are written. Raises `Unsupported` for any other value."""
    try:
        return _split_type(ast.parse(text, mode="eval").body)
    except (Malformed, KeyError) as error:
        raise Unsupported(f"a value that is {text}") from error


def _read_type(annotation: ast.expr | None, device: str = "cpu") -> torch.Tensor:
    dtype, extents, strides = _split_type(annotation)
    sizes = [ast.literal_eval(extent) for extent in extents]
    if strides is None:
        return torch.empty(sizes, dtype=dtype, device=device)
    return torch.empty_strided(sizes, [ast.literal_eval(stride) for stride in strides], dtype=dtype, device=device)


def _split_type(annotation: ast.expr | None) -> tuple[torch.dtype, list[ast.expr], list[ast.expr] | None]:
    match annotation:
        case ast.Call(func=ast.Attribute(value=ast.Subscript() as tensor, attr="stride"), args=strides):
            return (*_dtype_and_sizes(tensor), strides)
        case ast.Subscript() | ast.Name() as tensor:
            return (*_dtype_and_sizes(tensor), None)
    raise Malformed(
        "expected a type like f32[8, 4]", where="graph.text", program=ast.unparse(annotation) if annotation else ""
    )


def _dtype_and_sizes(tensor: ast.Subscript | ast.Name) -> tuple[torch.dtype, list[ast.expr]]:
    if isinstance(tensor, ast.Name):
        return _LONG_DTYPES[tensor.id], []
    dtype = _LONG_DTYPES[dotted(tensor.value)]
    return dtype, list(tensor.slice.elts) if isinstance(tensor.slice, ast.Tuple) else [tensor.slice]


def _read_call(
    graph: Graph,
    name: str,
    call: ast.Call,
    nodes: dict[str, Node],
    fake_mode: FakeTensorMode,
    held: torch.nn.Module,
) -> Node:
    args = tuple(_as_fx(read(arg, nodes.__contains__), nodes) for arg in call.args)
    kwargs = {str(word.arg): _as_fx(read(word.value, nodes.__contains__), nodes) for word in call.keywords}
    target: Any
    match call.func:
        case ast.Attribute(value=ast.Name(id=owner), attr=target) if owner in nodes:
            node = graph.create_node("call_method", target, (nodes[owner], *args), kwargs, name)
            function = getattr(torch.Tensor, target)
        case ast.Attribute() as path if dotted(path).startswith("self."):
            target = dotted(path).removeprefix("self.")
            node = graph.create_node("call_module", target, args, kwargs, name)
            function = _on_fakes(attribute(held, target), fake_mode)
        case _:
            function = target = resolve(dotted(call.func))
            node = graph.create_node("call_function", target, args, kwargs, name)
    fake_args, fake_kwargs = torch.fx.node.map_arg((node.args, kwargs), lambda source: source.meta["val"])
    with torch.no_grad(), fake_mode:
        node.meta["val"] = function(*fake_args, **fake_kwargs)
    bindings = compute_unbacked_bindings(fake_mode.shape_env, node.meta["val"])
    if bindings:
        node.meta["unbacked_bindings"] = bindings
    return node


def _on_fakes(module: torch.nn.Module, fake_mode: FakeTensorMode) -> Callable[..., Any]:
    """A call of a module with fake tensors in place of all that it holds."""
    state = [*module.named_parameters(), *module.named_buffers()]
    fakes = {name: fake_mode.from_tensor(value, static_shapes=True) for name, value in state}
    return lambda *args, **kwargs: torch.func.functional_call(module, fakes, args, kwargs)


def _as_fx(value: Any, nodes: dict[str, Node]) -> Any:
    def one(item: Any) -> Any:
        if isinstance(item, Ref):
            return nodes[item.name]
        return resolve(item.path) if isinstance(item, Named) else item

    return map_aggregate(value, one)
