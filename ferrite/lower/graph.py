"""One graph becomes steps: ops with a row in the table become kernels, every other op an eager call in its place.

Values keep the names that they have in the graph. A lowered value stays an expression until something needs it in
memory (Note [When a value is stored]); a value with a name exists on the host. Graph modules that higher-order ops
call become functions of the program, each once; tensors and other objects that the graph module owns become
constants.
"""

# Note [When a value is stored]
#
# Pointwise values and views stay expressions and are computed again by each reader. A value is stored
#   - when an eager call, an output or a mutation needs it as a tensor;
#   - when it is a reduction: readers would repeat the whole sum;
#   - when it is long (over MAX_OPERATIONS) or reads much (over MAX_READS);
#   - when it has several readers and is dear: it reads more than MAX_SHARED_READS elements or holds a transcendental;
#   - before anything writes to memory that it reads.
# A view of a stored tensor that is needed as a tensor is made by running the view op itself, which keeps aliasing.

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from ferrite.errors import Unsupported
from ferrite.graph.names import name_of
from ferrite.graph.query import attribute, family, source_place, written_arguments
from ferrite.graph.text import show_type, type_of_list
from ferrite.host.nodes import Call, Constant, HostProgram, Input, Launch
from ferrite.host.plan import plan
from ferrite.loops.index import Atom, Axis, FloorDiv, Index, Least, Mod, Most, Size, free_atoms
from ferrite.loops.nodes import Apply, Buffer, Load, Nest, Parameter, Program, Reduce, Store
from ferrite.loops.rewrite import replace_buffers, walk
from ferrite.lower.rows import row_of
from ferrite.lower.sizes import Sizes
from ferrite.lower.table import Row
from ferrite.lower.value import TORCH_DTYPES, Built, Result, Tensor, axes_for, dtype_of, of_buffer, points
from ferrite.syntax import Named, Ref

MAX_OPERATIONS = 50
MAX_READS = 12
MAX_SHARED_READS = 4
DEAR = frozenset({
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "pow", "sin", "cos", "tan", "asin", "acos", "atan",
    "atan2", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "sigmoid", "erf", "erfc", "erfinv", "lgamma", "digamma",
    "i0", "i0e", "i1", "i1e", "ndtri", "log_ndtr", "div", "sqrt", "rsqrt", "truncmod", "floordiv", "floormod",
})  # fmt: skip


@dataclass
class Lowered:
    """What lowering gives: the steps in order, what they need, and what runs in eager."""

    inputs: tuple[Input, ...]
    steps: list[Call | Launch]
    result: Any
    functions: tuple[HostProgram, ...]
    kernels: tuple[Program, ...]
    constants: dict[str, Any]
    fallbacks: Counter[str]
    reasons: dict[str, str]


@dataclass
class _Shared:
    """What a graph and its children have in common: names are unique across all of them."""

    sizes: Sizes
    use_rows: bool
    functions: dict[int, HostProgram] = field(default_factory=dict)  # by id of the graph module, which outlives this
    kernels: dict[Program, str] = field(default_factory=dict)  # canonical program -> its name
    constants: dict[str, Any] = field(default_factory=dict)
    constant_names: dict[int, str] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)
    fallbacks: Counter[str] = field(default_factory=Counter)
    reasons: dict[str, str] = field(default_factory=dict)

    def fresh(self, wanted: str) -> str:
        name, number = wanted, 0
        while name in self.taken:
            number += 1
            name = f"{wanted}_{number}"
        self.taken.add(name)
        return name


def lower(
    module: GraphModule,
    static: frozenset[int] = frozenset(),
    donated: frozenset[int] = frozenset(),
    *,
    use_rows: bool = False,
) -> Lowered:
    """Lower a whole graph, children included. `static` and `donated` are positions of inputs."""
    names = {node.name for _, member in family(module) for node in member.graph.nodes}
    shared = _Shared(Sizes(_shape_env(module)), use_rows, taken=names)
    one = _OneGraph(module, shared, static, donated)
    one.run()
    return Lowered(
        tuple(one.inputs),
        one.steps,
        one.result,
        tuple(shared.functions.values()),
        tuple(Program(name, p.sizes, p.parameters, p.locals, p.nests) for p, name in shared.kernels.items()),
        shared.constants,
        shared.fallbacks,
        shared.reasons,
    )


def constant_nodes(constants: dict[str, Any]) -> tuple[Constant, ...]:
    return tuple(Constant(name, show_type(value)) for name, value in constants.items())


def _shape_env(module: GraphModule) -> Any:
    mode = detect_fake_mode([node.meta.get("val") for node in module.graph.nodes])
    return mode.shape_env if mode is not None else None


@dataclass(eq=False)
class _Value:
    """A node's value while its graph is lowered: on the host under a name, as a tensor expression, or both."""

    node: Node
    host: str | None = None
    tensor: Tensor | None = None
    is_view: bool = False
    root: _Value | None = None  # whose memory a view shares

    def memory(self) -> _Value:
        return self if self.root is None else self.root.memory()


class _OneGraph:
    """The lowering of one graph: an environment, and the growing list of steps."""

    def __init__(self, module: GraphModule, shared: _Shared, static: frozenset[int], donated: frozenset[int]) -> None:
        self.module, self.shared, self.static, self.donated = module, shared, static, donated
        self.inputs: list[Input] = []
        self.steps: list[Call | Launch] = []
        self.result: Any = None
        self.values: dict[Node, Any] = {}  # _Value, Index, or a tuple of them
        self.symbols: dict[Size, tuple[str, int | None]] = {}  # symbol -> host value that is it, or has it as a size
        self.computed: dict[Index, Any] = {}  # sizes that were computed on the host already

    def run(self) -> None:
        for node in self.module.graph.nodes:
            match node.op:
                case "placeholder":
                    self._placeholder(node)
                case "get_attr":
                    self.values[node] = self._attribute(node)
                case "call_function":
                    self._call(node)
                case "output":
                    self.result = self._host_value(node.args[0])
                case _:
                    raise Unsupported(f"a {node.op} node in a graph after autograd", at=source_place(node))

    # ---- where values come from

    def _placeholder(self, node: Node) -> None:
        position = len(self.inputs)
        kind = show_type(node.meta.get("val"))
        self.inputs.append(Input(node.name, kind, position in self.static, position in self.donated))
        self.values[node] = self._on_host(node, node.name)

    def _attribute(self, node: Node) -> _Value:
        path = str(node.target)
        owned = attribute(self.module, path)
        if isinstance(owned, GraphModule):
            return _Value(node, _function(path, owned, self.shared))
        name = _constant(path, owned, self.shared)
        value = _Value(node, name)
        if self.shared.use_rows and isinstance(owned, torch.Tensor) and _is_plain(owned):
            value.tensor = of_buffer(self._buffer(name, owned))
        return value

    def _on_host(self, node: Node, name: str, root: _Value | None = None) -> _Value:
        """A value that exists under a name: note its memory and the sizes that it makes known."""
        value, fake = _Value(node, name, root=root), node.meta.get("val")
        if not self.shared.use_rows:
            return value
        self._learn_sizes(name, fake)
        if isinstance(fake, torch.Tensor) and _is_plain(fake):
            try:
                value.tensor = of_buffer(self._buffer(name, fake))
            except Unsupported:
                value.tensor = None  # a size without a form in our algebra: readers run in eager
        return value

    def _learn_sizes(self, name: str, fake: Any) -> None:
        if isinstance(fake, torch.SymInt):
            self._learn(fake, name, None)
        elif isinstance(fake, torch.Tensor) and fake.layout == torch.strided:
            for dim, extent in enumerate(fake.shape):
                if isinstance(extent, torch.SymInt):
                    self._learn(extent, name, dim)

    def _learn(self, extent: torch.SymInt, name: str, dim: int | None) -> None:
        try:
            atom = _only_size(self.shared.sizes.index(extent))
        except Unsupported:
            return
        if atom is not None and (atom not in self.symbols or (dim is None and self.symbols[atom][1] is not None)):
            self.symbols[atom] = (name, dim)

    def _buffer(self, name: str, fake: torch.Tensor) -> Buffer:
        sizes = tuple(self.shared.sizes.index(extent) for extent in fake.shape)
        strides = tuple(self.shared.sizes.index(stride) for stride in fake.stride())
        return Buffer(name, dtype_of(fake.dtype), sizes, strides)

    # ---- calls

    def _call(self, node: Node) -> None:
        if node.target is operator.getitem and isinstance(self.values.get(node.args[0]), tuple):
            self.values[node] = self.values[node.args[0]][node.args[1]]
            return
        row = row_of(node.target) if self.shared.use_rows else None
        if row is not None:
            try:
                self.values[node] = self._lowered(node, row)
                return
            except Unsupported as refusal:
                self._fell_back(node, refusal.title)
        elif self._symbolic(node):
            return
        elif node.target is not operator.getitem:
            self._fell_back(node, _reason(name_of(node.target) or node.name))
        self._eager(node)

    def _fell_back(self, node: Node, reason: str) -> None:
        op = name_of(node.target) or node.name
        self.shared.fallbacks[op] += 1
        self.shared.reasons.setdefault(op, reason)

    def _symbolic(self, node: Node) -> bool:
        """Arithmetic on sizes is done in our own algebra and computed on the host when something asks for it."""
        if not self.shared.use_rows or not isinstance(node.meta.get("val"), torch.SymInt):
            return False
        if node.meta.get("unbacked_bindings") or not _is_size_arithmetic(node):
            return False
        try:
            self.values[node] = self.shared.sizes.index(node.meta["val"])
        except Unsupported:
            return False
        return all(atom in self.symbols for atom in free_atoms(self.values[node]))

    def _eager(self, node: Node) -> None:
        """Run the op itself, on values that exist on the host."""
        written = written_arguments(node)
        for argument in written:
            self._store_readers_of(argument)
        target = name_of(node.target)
        args, kwargs = self._host_value(node.args), self._host_value(node.kwargs)
        if target is None:
            # A function that only this process knows: it is a constant, called through a function with a name.
            args = (Ref(_constant("_function", node.target, self.shared)), *args)
            target = "ferrite.host.calls.call"
        self.steps.append(Call(node.name, target, args, kwargs, source_place(node)))
        root = self.values.get(node.args[0]) if node.args and isinstance(node.args[0], Node) else None
        shares = isinstance(root, _Value) and _may_alias(node)
        self.values[node] = self._on_host(node, node.name, root if shares else None)

    def _lowered(self, node: Node, row: Row) -> Any:
        """The row's value, stored now if it should not be computed again by every reader."""
        for leaf in tree_leaves((node.args, node.kwargs, [])):
            if isinstance(leaf, Node) and leaf.op == "call_function" and isinstance(self.values[leaf], _Value):
                self._store_if_shared(self.values[leaf])
        fakes = node.meta["val"]
        several = isinstance(fakes, (tuple, list))
        if not all(_is_plain(fake) for fake in (fakes if several else (fakes,)) if fake is not None):
            raise Unsupported("a result that is no plain tensor on the CPU")
        args = tuple(self._row_value(argument) for argument in node.args)
        kwargs = {key: self._row_value(argument) for key, argument in node.kwargs.items()}
        if row.wants_result:
            kwargs["result"] = tuple(self._result(fake) for fake in fakes) if several else self._result(fakes)
        made = row.lower(*args, **kwargs)
        if isinstance(made, Built):
            return self._build(node, made, several)
        if several:
            return self._parts(node, made, fakes)
        value = _Value(node, tensor=self._expected(made, fakes), is_view=row.is_view)
        if row.is_view:
            value.root = self.values[node.args[0]] if isinstance(self.values[node.args[0]], _Value) else None
        elif _holds_reduction(made) or _is_long(made):
            self._store(value)
        return value

    def _parts(self, node: Node, made: Sequence[Tensor | None], fakes: Sequence[Any]) -> tuple[_Value, ...]:
        """Several results: those that are read are stored at once, by one kernel, each under a name of its own."""
        read = {user.args[1] for user in node.users if user.target is operator.getitem}
        values = tuple(_Value(node) for _ in made)
        stores: dict[tuple[Axis, ...], list[Store]] = {}
        buffers: list[Buffer] = []
        for number, (part, fake) in enumerate(zip(made, fakes, strict=True)):
            if part is None or number not in read:
                continue
            part = self._expected(part, fake)
            buffer = self._buffer(self.shared.fresh(f"{node.name}_{number}"), fake)
            self._allocate(buffer, node)
            stores.setdefault(part.axes, []).append(Store(buffer, points(part.axes), part.body))
            buffers.append(buffer)
            values[number].host, values[number].tensor = buffer.name, of_buffer(buffer)
        if buffers:
            self._launch(tuple(Nest(axes, tuple(body)) for axes, body in stores.items()), tuple(buffers), node)
        return values

    def _expected(self, made: Tensor, fake: torch.Tensor) -> Tensor:
        """The row's tensor, with the dtype and sizes that tracing promised; anything else is the row's fault."""
        sizes = tuple(self.shared.sizes.index(extent) for extent in fake.shape)
        if made.dtype is not TORCH_DTYPES[fake.dtype] or len(sizes) != made.rank:
            raise Unsupported(
                f"the row gives {made.dtype} of rank {made.rank}, eager {fake.dtype} of rank {len(sizes)}"
            )
        if made.sizes != sizes:
            # Equal under the guards, written differently: read with the sizes of the trace.
            return Tensor(axes_for(sizes), made.at(points(axes_for(sizes))))
        return made

    def _result(self, fake: Any) -> Result | None:
        if not isinstance(fake, torch.Tensor):
            return None
        buffer = self._buffer("result", fake)
        return Result(buffer.sizes, buffer.strides, buffer.dtype, fake)

    def _row_value(self, argument: Any) -> Any:
        """An argument as rows see it."""
        if isinstance(argument, Node):
            value = self.values[argument]
            if isinstance(value, _Value):
                if value.tensor is not None:
                    return value.tensor
                fake = argument.meta.get("val")
                if isinstance(fake, torch.SymInt):
                    return self.shared.sizes.index(fake)
                raise Unsupported(f"an argument that is {show_type(fake)}")
            return value if isinstance(value, Index) else tuple(part.tensor for part in value)
        if isinstance(argument, (list, tuple)):
            return type_of_list(argument)(self._row_value(item) for item in argument)
        return argument

    # ---- storing

    def _store_if_shared(self, value: _Value) -> None:
        if value.host is not None or value.tensor is None or value.is_view or len(value.node.users) < 2:
            return
        if _is_dear(value.tensor):
            self._store(value)

    def _store(self, value: _Value) -> None:
        """Give a tensor memory, with the strides of eager, and a kernel that fills it."""
        assert value.tensor is not None
        buffer = self._buffer(value.node.name, value.node.meta["val"])
        nest = Nest(value.tensor.axes, (Store(buffer, points(value.tensor.axes), value.tensor.body),))
        self._allocate(buffer, value.node)
        self._launch((nest,), (buffer,), value.node)
        value.host, value.tensor, value.is_view = buffer.name, of_buffer(buffer), False

    def _build(self, node: Node, built: Built, several: bool) -> Any:
        """Name the buffers that the row's own loops write, and run them."""
        fakes = node.meta["val"] if several else (node.meta["val"],)
        buffers, values = [], []
        for number, fake in enumerate(fakes):
            name = self.shared.fresh(f"{node.name}_{number}") if several else node.name
            buffers.append(self._buffer(name, fake))
            self._allocate(buffers[-1], node)
            values.append(_Value(node, name, of_buffer(buffers[-1])))
        named = dict(zip(built.results, buffers, strict=True))
        nests = tuple(replace_buffers(nest, named) for nest in built.nests)
        self._launch(nests, tuple(buffers), node)
        return tuple(values) if several else values[0]

    def _allocate(self, buffer: Buffer, node: Node) -> None:
        sizes = [self._host_size(extent) for extent in buffer.sizes]
        strides = [self._host_size(stride) for stride in buffer.strides]
        kind = {"dtype": Named(f"torch.{_TORCH_NAMES[buffer.dtype.name]}"), "device": Named("torch.device('cpu')")}
        self.steps.append(Call(buffer.name, "aten.empty_strided.default", (sizes, strides), kind, source_place(node)))

    def _launch(self, nests: tuple[Nest, ...], written: tuple[Buffer, ...], node: Node) -> None:
        """A call of the kernel that these nests make; equal kernels are one."""
        program, buffers = _canonical(nests, written)
        if program not in self.shared.kernels:
            self.shared.kernels[program] = self.shared.fresh(f"kernel_{len(self.shared.kernels)}")
        sizes = tuple(self._host_size(Index(0, ((1, (size,)),))) for size in program.sizes)
        name = self.shared.kernels[program]
        self.steps.append(Launch(name, tuple(b.name for b in buffers), sizes, source_place(node)))

    def _store_readers_of(self, argument: Any) -> None:
        """Before memory changes: store every expression that reads it and is still needed."""
        changed = self.values.get(argument)
        if not isinstance(changed, _Value) or not self.shared.use_rows:
            return
        memory = changed.memory()
        sharing = {v.host for v in self._all_values() if v.memory() is memory and v.host is not None}
        for value in list(self._all_values()):
            if value.host is None and value.tensor is not None and value.memory() is not memory:
                reads = {node.buffer.name for node in walk(value.tensor.body) if isinstance(node, Load)}
                if reads & sharing:
                    self._store(value)

    def _all_values(self) -> list[_Value]:
        return [value for value in self.values.values() if isinstance(value, _Value)]

    # ---- what the host sees

    def _host_value(self, argument: Any) -> Any:
        """An argument of an eager call: every tensor in memory, every size a number."""
        if isinstance(argument, Node):
            value = self.values[argument]
            if isinstance(value, Index):
                return self._host_size(value)
            if isinstance(value, tuple):
                return tuple(Ref(self._host_name(part)) if part.host or part.tensor else None for part in value)
            return Ref(self._host_name(value))
        if argument is None or isinstance(argument, (bool, int, float, complex, str)):
            return argument
        if isinstance(argument, (list, tuple)):
            return type_of_list(argument)(self._host_value(item) for item in argument)
        if isinstance(argument, dict):
            return {key: self._host_value(item) for key, item in argument.items()}
        if isinstance(argument, slice):
            return slice(*(self._host_value(part) for part in (argument.start, argument.stop, argument.step)))
        if isinstance(argument, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise Unsupported(f"the size {argument} stands in the graph without a node that computes it")
        name = name_of(argument)
        return Named(name) if name is not None else Ref(_constant("_object", argument, self.shared))

    def _host_name(self, value: _Value) -> str:
        if value.host is not None:
            return value.host
        if value.is_view and isinstance(value.root, _Value):
            node = value.node
            target = name_of(node.target)
            assert target is not None
            args, kwargs = self._host_value(node.args), self._host_value(node.kwargs)
            self.steps.append(Call(node.name, target, args, kwargs, source_place(node)))
            value.host, value.tensor = node.name, of_buffer(self._buffer(node.name, node.meta["val"]))
            return node.name
        self._store(value)
        assert value.host is not None
        return value.host

    def _host_size(self, extent: Index) -> Any:
        """A size as a literal, or as a name that the host has computed."""
        if not extent.terms:
            return extent.constant
        known = self.computed.get(extent)
        if known is None:
            known = self.computed[extent] = self._compute_size(extent)
        return known

    def _compute_size(self, extent: Index) -> Any:
        terms = [self._product(coefficient, monomial) for coefficient, monomial in extent.terms]
        if extent.constant:
            terms.append(extent.constant)
        value = terms[0]
        for term in terms[1:]:
            value = self._host_call("operator.add", (value, term))
        return value

    def _product(self, coefficient: int, monomial: tuple[Atom, ...]) -> Any:
        value: Any = None
        for atom in monomial:
            factor = self._host_atom(atom)
            value = factor if value is None else self._host_call("operator.mul", (value, factor))
        return value if coefficient == 1 else self._host_call("operator.mul", (value, coefficient))

    def _host_atom(self, atom: Atom) -> Any:
        match atom:
            case Size():
                if atom not in self.symbols:
                    raise Unsupported(f"the size {atom.name}, which nothing on the host knows")
                name, dim = self.symbols[atom]
                return Ref(name) if dim is None else self._host_call("aten.sym_size.int", (Ref(name), dim))
            case FloorDiv(dividend=a, divisor=b):
                return self._host_call("operator.floordiv", (self._host_size(a), self._host_size(b)))
            case Mod(dividend=a, divisor=b):
                return self._host_call("operator.mod", (self._host_size(a), self._host_size(b)))
            case Least(left=a, right=b):
                return self._host_call("builtins.min", (self._host_size(a), self._host_size(b)))
            case Most(left=a, right=b):
                return self._host_call("builtins.max", (self._host_size(a), self._host_size(b)))
        raise Unsupported(f"the size {atom}, which depends on a loop")

    def _host_call(self, target: str, args: tuple[Any, ...]) -> Ref:
        name = self.shared.fresh("size")
        self.steps.append(Call(name, target, args, {}))
        return Ref(name)


# ---- kernels


def _canonical(nests: tuple[Nest, ...], written: tuple[Buffer, ...]) -> tuple[Program, tuple[Buffer, ...]]:
    """A program whose names depend on its structure only, and the buffers in the order of its parameters."""
    read: dict[Buffer, None] = {}
    sizes: dict[Size, None] = {}
    for nest in nests:
        for node in walk(nest):
            if isinstance(node, Load) and node.buffer not in written:
                read[node.buffer] = None
            for atom in _sizes_in(node):
                sizes[atom] = None
    buffers = (*read, *written)
    for buffer in buffers:
        for extent in (*buffer.sizes, *buffer.strides):
            sizes |= dict.fromkeys(a for a in sorted(free_atoms(extent), key=str) if isinstance(a, Size))
    renamed = {b: Buffer(f"x{n}", b.dtype, b.sizes, b.strides) for n, b in enumerate(read)}
    renamed |= {b: Buffer(f"y{n}", b.dtype, b.sizes, b.strides) for n, b in enumerate(written)}
    parameters = tuple(Parameter(renamed[b], "out" if b in written else "in") for b in buffers)
    ordered = tuple(sorted(sizes, key=lambda size: size.name))
    moved = tuple(replace_buffers(nest, renamed) for nest in nests)
    return Program("kernel", ordered, parameters, (), moved), buffers


def _sizes_in(node: Any) -> list[Size]:
    """The sizes that loop extents of a node name; those of buffers are counted with the buffers."""
    axes = node.axes if isinstance(node, (Nest, Reduce)) else ()
    return [a for axis in axes for a in sorted(free_atoms(axis.extent), key=str) if isinstance(a, Size)]


def _holds_reduction(value: Any) -> bool:
    return isinstance(value, Tensor) and any(isinstance(node, Reduce) for node in walk(value.body))


def _is_long(value: Any) -> bool:
    operations = reads = 0
    for node in walk(value.body):
        operations += isinstance(node, Apply)
        reads += isinstance(node, Load)
    return operations > MAX_OPERATIONS or reads > MAX_READS


def _is_dear(value: Tensor) -> bool:
    reads = 0
    for node in walk(value.body):
        reads += isinstance(node, Load)
        if isinstance(node, Apply) and node.operation in DEAR:
            return True
    return reads > MAX_SHARED_READS


_TORCH_NAMES = {ours.name: str(theirs).removeprefix("torch.") for theirs, ours in TORCH_DTYPES.items()}

# ---- nodes


def _is_plain(fake: Any) -> bool:
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


def _only_size(extent: Index) -> Size | None:
    match extent:
        case Index(constant=0, terms=((1, (Size() as atom,)),)):
            return atom
    return None


def _is_size_arithmetic(node: Node) -> bool:
    name = name_of(node.target) or ""
    return name.startswith(("operator.", "math.", "builtins.", "torch.sym_", "aten.sym_"))


def _may_alias(node: Node) -> bool:
    """Whether a result may share memory with the first argument, by the schema; reshape says nothing and may."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return True
    return any(r.alias_info is not None for r in schema.returns) or schema.name in ("aten::reshape", "aten::contiguous")


def _function(path: str, owned: GraphModule, shared: _Shared) -> str:
    """The name of the function that a child graph becomes."""
    known = shared.functions.get(id(owned))
    if known is not None:
        return known.name
    one = _OneGraph(owned, shared, frozenset(), frozenset())
    one.run()
    # After its own children, so that a function stands behind those that it calls.
    name = shared.fresh(_identifier(path))
    shared.functions[id(owned)] = plan(name, tuple(one.inputs), one.steps, one.result)
    return name


def _constant(wanted: str, thing: Any, shared: _Shared) -> str:
    """One name for one object, however often the graph refers to it."""
    known = shared.constant_names.get(id(thing))
    if known is None:
        known = shared.constant_names[id(thing)] = shared.fresh(_identifier(wanted))
        shared.constants[known] = thing
    return known


def _identifier(path: str) -> str:
    word = "".join(letter if letter.isalnum() or letter == "_" else "_" for letter in path)
    return f"_{word}" if not word or word[0].isdigit() else word


def _reason(op: str) -> str:
    namespace = op.partition(".")[0]
    match namespace:
        case "higher_order":
            return "control flow: runs the compiled bodies from eager"
        case "operator" | "math" | "torch" | "builtins":
            return "arithmetic on sizes"
        case "aten" | "prims" | "prim":
            return "no row in the lowering table"
    return "an operator from outside PyTorch"
