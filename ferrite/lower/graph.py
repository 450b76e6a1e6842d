"""One graph becomes steps: ops with a row in the table become kernels, every other op an eager call in its place.

Values keep the names that they have in the graph. A lowered value stays an expression until something needs it in
memory (`policy.py` says when); a value with a name exists on the host. Graph modules that higher-order ops call become
functions of the program, each once; tensors and other objects that the graph module owns become constants.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from ferrite.decisions import Decision
from ferrite.errors import Unsupported, within
from ferrite.graph.effects import is_of_torch
from ferrite.graph.names import OF_TORCH, name_of
from ferrite.graph.pattern.lowering import lowering_of
from ferrite.graph.query import (
    attribute,
    bytes_of_tensor,
    changes_storage,
    family,
    source_line,
    source_place,
    tensors,
    written_arguments,
)
from ferrite.graph.relayout import READS_RELAID, as_traced, lies_so
from ferrite.graph.strides import REALISED, output_values, shown_as_made
from ferrite.graph.text import show_type, type_of_list
from ferrite.host.lowered import Body, Lowered
from ferrite.host.nodes import ALLOCATE, HOLD, Call, Constant, Input, Launch, Origin, join_places
from ferrite.loops.dtypes import i64
from ferrite.loops.index import Axis, Index, known_equal, multiply, of_atom
from ferrite.loops.kernel import kernel_of
from ferrite.loops.nodes import Assert, Buffer, Checked, Const, Load, Nest, Program, Require, Store
from ferrite.loops.rewrite import Tree, can_raise, replace_buffers, walk
from ferrite.loops.shapes import contiguous_strides
from ferrite.lower.captured import (
    BREAKS_ITS_PROMISE,
    CALLS_AS_TRACED,
    KEEPS_ITS_PROMISE,
    is_empty,
    is_of_data,
    is_plain,
    is_size_arithmetic,
    is_static,
    last_readers,
    library_calls_before,
    may_alias,
    part_of,
    refuse_sizes,
    size_in_bytes,
    why_in_eager,
)
from ferrite.lower.flops import flops_of
from ferrite.lower.host_sizes import HostSizes
from ferrite.lower.layouts import format_of, layouts_wanted
from ferrite.lower.padding import choose_strides, refusals, wants_dense
from ferrite.lower.policy import Cost, cost_of
from ferrite.lower.product import choose
from ferrite.lower.sizes import Sizes
from ferrite.lower.table import Row
from ferrite.lower.value import (
    TORCH_DTYPES,
    After,
    Built,
    Draw,
    Result,
    Tensor,
    axes_for,
    cast,
    dtype_of,
    expand,
    of_buffer,
    points,
)
from ferrite.syntax import Named, Ref, renamed

aten = torch.ops.aten


@dataclass(frozen=True)
class Rules:
    """What an option decides about lowering."""

    use_rows: bool = False
    counter_random: bool = True  # random ops that have a row draw from the counter generator
    own_products: bool = False  # small matrix products are loops
    padding: bool = False  # rows of inner buffers start at cache lines
    most: int | None = None  # lower only so many calls, and say which; bisection asks for it


EVERYTHING_IN_EAGER = Rules()
MOST_STORES = 24  # of one kernel: norms of hundreds of tensors all have the same box


@dataclass
class _Shared:
    """What a graph and its children have in common: names are unique across all of them."""

    sizes: Sizes
    rules: Rules
    # by id of the graph module, which outlives this, and whether it has kernels
    functions: dict[tuple[int, bool], Body] = field(default_factory=dict)
    kernels: dict[Program, str] = field(default_factory=dict)  # canonical program -> its name
    constants: dict[str, Any] = field(default_factory=dict)
    constant_names: dict[int, str] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)
    fallbacks: Counter[str] = field(default_factory=Counter)
    reasons: dict[str, str] = field(default_factory=dict)
    lowered: int = 0
    calls: list[Node] = field(default_factory=list)  # those that were lowered, if somebody asks
    decisions: list[Decision] = field(default_factory=list)
    latest: Counter[str] = field(default_factory=Counter)  # the latest number that was given to a word

    def fresh(self, wanted: str) -> str:
        name = wanted
        while name in self.taken:
            self.latest[wanted] += 1
            name = f"{wanted}_{self.latest[wanted]}"
        self.taken.add(name)
        return name


def lower(
    module: GraphModule,
    static: frozenset[int] = frozenset(),
    donated: frozenset[int] = frozenset(),
    saved: frozenset[int] = frozenset(),
    *,
    parts: Mapping[int, tuple[int, int]] | None = None,
    rules: Rules = EVERYTHING_IN_EAGER,
) -> Lowered:
    """Lower a whole graph, children included. `static`, `donated` and `saved` are positions of inputs; `parts`: for
    those that are a part of larger memory, the first input that is one, and its bytes."""
    names = {node.name for _, member in family(module) for node in member.graph.nodes}
    sizes = Sizes(shape_env := _shape_env(module))
    if shape_env is not None:
        nodes = (node for _, member in family(module) for node in member.graph.nodes)
        sizes.note_extents(
            extent for node in nodes for fake in tensors(node) if is_plain(fake) for extent in fake.shape
        )
    shared = _Shared(sizes, rules, taken=names)
    one = _OneGraph(module, shared, (static, donated, saved), parts)
    one.run()
    return Lowered(
        one.body("main"),
        tuple(shared.functions.values()),
        tuple(Program(name, p.sizes, p.parameters, p.locals, p.nests) for p, name in shared.kernels.items()),
        shared.constants,
        shared.fallbacks,
        shared.reasons,
        shared.lowered,
        tuple(shared.decisions),
        tuple(map(_shown, shared.calls)),
    )


def _place(node: Node) -> dict[str, str]:
    return {"op": name_of(node.target) or node.name, "line": source_line(node)}


def _shown(node: Node) -> str:
    op, line = _place(node).values()
    return f"{op} at {line}" if line else op


def constant_nodes(constants: dict[str, Any]) -> tuple[Constant, ...]:
    return tuple(Constant(name, show_type(value)) for name, value in constants.items())


def _shape_env(module: GraphModule) -> Any:
    mode = detect_fake_mode([node.meta.get("val") for node in module.graph.nodes])
    return mode.shape_env if mode is not None else None


@dataclass(eq=False)
class _Value:
    """A node's value, or one of several (`part`), while its graph is lowered: on the host under a name, as a tensor
    expression, or both."""

    node: Node
    host: str | None = None
    tensor: Tensor | None = None
    body: GraphModule | None = None  # a graph that an op calls: a function of the program once eager asks for it
    part: int | None = None
    is_view: bool = False
    is_promised: bool = False  # an eager op made or gave it, with the strides that tracing promised, or with others
    is_doubtful: bool = False  # its strides, and those of what follows from it, are known to eager only
    root: _Value | None = None  # whose memory a view shares
    seen: Tensor | None = None  # what that was when the view was made
    origins: tuple[Origin, ...] = ()  # the ops whose checks the expression holds
    made_of: tuple[_Value, ...] = ()  # expressions that it holds

    @property
    def fake(self) -> Any:
        given = self.node.meta.get("val")
        return given if self.part is None else given[self.part]

    @property
    def is_lazy(self) -> bool:
        return self.host is None and self.tensor is not None

    @cached_property
    def cost(self) -> Cost:
        """Of the expression that it is before it is stored."""
        assert self.tensor is not None
        return cost_of(self.tensor.body)

    @property
    def readers(self) -> int:
        return len(self.node.users) if self.part is None else sum(len(taker.users) for taker in self.takers)

    @property
    def takers(self) -> list[Node]:
        """The nodes that take this one of several results."""
        return [user for user in self.node.users if part_of(user) == self.part]

    def memory(self) -> _Value:
        return self if self.root is None else self.root.memory()


class _OneGraph:
    """The lowering of one graph: an environment, and the growing list of steps."""

    def __init__(
        self,
        module: GraphModule,
        shared: _Shared,
        marked: tuple[frozenset[int], frozenset[int], frozenset[int]] = (frozenset(), frozenset(), frozenset()),
        parts: Mapping[int, tuple[int, int]] | None = None,
        *,
        is_body: bool = False,
    ) -> None:
        """`marked`: positions of inputs, for each mark in the order in which `Input` has them. `is_body`: an operator
        calls it, with tensors that may be laid out otherwise than in the trace: a slice of `scan` has the strides of
        what it is a slice of."""
        self.module, self.shared, self.marked, self.parts = module, shared, marked, parts or {}
        self.is_body = is_body
        self.inputs: list[Input] = []
        self.steps: list[Call | Launch] = []
        self.result: Any = None
        self.values: dict[Node, Any] = {}  # _Value, Index, or a tuple of them
        self.host_sizes = HostSizes(shared.sizes, self.steps, shared.fresh)
        self.last_reader = last_readers(module)
        self.calls_before = library_calls_before(module)
        self.position = 0  # of the node that is being lowered
        self.lists: dict[Node, str] = {}  # views that an op gives as a list, by the op's node
        self.names_of: defaultdict[_Value, list[str]] = defaultdict(list)  # memory -> every name under which it exists
        self.writes: dict[str, tuple[str, ...]] = {}  # by the result of a call
        self.about: dict[str, int] = {}  # name -> bytes
        self.flops: dict[str, int] = {}  # by the result of a call
        self.lazy_readers: defaultdict[str, list[_Value]] = defaultdict(list)  # name -> expressions that read it
        self.of_data: set[Node] = set()  # sizes that only the run knows, and what is made of them
        self.draws = 0
        self.seeds = ""
        pads = shared.rules.use_rows and shared.rules.padding
        self.unpadded = refusals(module.graph, _has_row) if pads else None  # values that lie as traced, and why
        self.padded: dict[_Value, int | None] = {}  # memory with gaps between rows, and its bytes

    def run(self) -> None:
        for position, node in enumerate(self.module.graph.nodes):
            self.position = position
            with within(_place, node):
                match node.op:
                    case "placeholder":
                        self._placeholder(node)
                    case "get_attr":
                        self.values[node] = self._attribute(node)
                    case "call_function":
                        self._call(node)
                    case "output":
                        self._output(node)
                    case _:
                        raise Unsupported(f"a {node.op} node in a graph after autograd", at=source_place(node))
        if self.draws:
            self.steps.insert(0, _draw_seeds(self.seeds, self.draws))

    def _output(self, node: Node) -> None:
        """The results. Whoever reads one by the strides of the trace is given it so."""
        given = output_values(self.module.graph)
        for argument, is_shown in zip(given, shown_as_made(self.module.graph), strict=True):
            value = self.values.get(argument) if isinstance(argument, Node) else None
            if isinstance(value, _Value) and not (is_shown and not _reads_relaid(argument)):
                self._keep_promise(value)
        self.result = self._host_value(node.args[0])

    def body(self, name: str) -> Body:
        """What became of the graph."""
        memory = {each: names[0] for names in self.names_of.values() if len(names) > 1 for each in names}
        tensors = [(names[0], v) for v, names in self.names_of.items() if isinstance(v.fake, torch.Tensor)]
        bytes: dict[str, Any] = {
            each: self.padded[v] if v in self.padded else size_in_bytes(v.fake) for each, v in tensors
        }
        known = {} if None in bytes.values() else bytes
        steps, costs = tuple(self.steps), (self.about, self.flops)
        return Body(name, tuple(self.inputs), steps, self.result, memory, self.writes, known, *costs)

    # ---- where values come from

    def _placeholder(self, node: Node) -> None:
        position = len(self.inputs)
        kind = show_type(node.meta.get("val"))
        static, donated, saved = (position in each for each in self.marked)
        self.inputs.append(Input(node.name, kind, static, donated, saved))
        if position in self.parts:
            first, length = self.parts[position]
            self.inputs[-1] = replace(self.inputs[-1], part=(self.inputs[first].name, length))
        value = self.values[node] = self._on_host(node, node.name)
        value.is_promised = self.is_body and value.tensor is not None

    def _attribute(self, node: Node) -> _Value:
        path = str(node.target)
        owned = attribute(self.module, path)
        if isinstance(owned, GraphModule):
            return _Value(node, body=owned)
        name = _constant(path, owned, self.shared)
        value = _Value(node, name)
        self.about[name] = bytes_of_tensor(owned)
        if self.shared.rules.use_rows and is_plain(owned):
            value.tensor = of_buffer(self._buffer(name, owned))
        return value

    def _on_host(self, node: Node, name: str, root: _Value | None = None) -> _Value:
        """A value that exists under a name: note its memory and the sizes that it makes known."""
        value, fake = _Value(node, name, root=root), node.meta.get("val")
        self.host_sizes.learn(name, fake)
        if not self.shared.rules.use_rows:
            return value
        self._exists(value, name)
        if is_of_data(fake):
            self.of_data.add(node)
        if is_plain(fake):
            try:
                value.tensor = of_buffer(self._buffer(name, fake))
            except Unsupported:
                value.tensor = None  # a size without a form in our algebra: readers run in eager
        return value

    def _exists(self, value: _Value, name: str) -> None:
        """A value now has a name, under which its memory is known."""
        self.names_of[value.memory()].append(name)
        self.about[name] = bytes_of_tensor(value.fake)

    def _lazy(self, node: Node, tensor: Tensor, part: int | None = None, root: _Value | None = None) -> _Value:
        """A value that is an expression for now."""
        value = _Value(node, tensor=tensor, part=part, root=root, made_of=self._lazy_inputs(node))
        if value.cost.can_raise:
            value.origins = self._origins(node, (tensor.body,))
        for name in value.cost.buffers:
            self.lazy_readers[name].append(value)
        return value

    def _origins(self, node: Node, made: Sequence[Tree]) -> tuple[Origin, ...]:
        """The ops whose checks are in what became of a node: those of the expressions that it reads, and the node
        itself if there are more checks now. They are told apart by what they say, which no pass rewrites."""
        lazy = self._lazy_inputs(node)
        own = _checks(made) - _checks([value.tensor.body for value in lazy if value.tensor is not None])
        line, op = source_line(node), name_of(node.target) or node.name
        inherited = (origin for value in lazy for origin in value.origins)
        return tuple(dict.fromkeys((*inherited, *(Origin(op, line, message) for message in own))))

    def _lazy_inputs(self, node: Node) -> tuple[_Value, ...]:
        read = [value for value in map(self.values.get, node.all_input_nodes) if isinstance(value, _Value)]
        return tuple(value for value in read if value.is_lazy)

    def _buffer(self, name: str, fake: torch.Tensor) -> Buffer:
        sizes = tuple(self.shared.sizes.index(extent) for extent in fake.shape)
        strides = tuple(self.shared.sizes.index(stride) for stride in fake.stride())
        return Buffer(name, dtype_of(fake.dtype), sizes, strides)

    def _own_buffer(self, name: str, value: _Value) -> Buffer:
        """The buffer of a value that a kernel stores, with gaps between its rows if nobody minds them."""
        buffer = self._buffer(name, value.fake)
        if self.unpadded is None:
            return buffer
        strides, why = choose_strides((value.node, value.part), buffer, self.unpadded, self.shared.sizes)
        self.shared.decisions.append(Decision("padding", (name,), strides is not None, why))
        if strides is None:
            return buffer
        length = multiply(buffer.sizes[0], strides[0]) * buffer.dtype.bytes
        self.padded[value] = None if length.terms else length.constant
        return Buffer(name, buffer.dtype, buffer.sizes, strides)

    # ---- calls

    def _call(self, node: Node) -> None:
        if node.target is operator.getitem and isinstance(self.values.get(node.args[0]), tuple):
            self.values[node] = self.values[node.args[0]][node.args[1]]
            return
        rules = self.shared.rules
        if not rules.use_rows:
            return self._stay_in_eager(node, None)
        if rules.most is not None and self.shared.lowered >= rules.most:
            return self._stay_in_eager(node, "past the limit of bisection")
        try:
            if self._lowered(node):
                self.shared.lowered += 1
                if rules.most is not None:
                    self.shared.calls.append(node)
                return
        except Unsupported as refusal:
            return self._stay_in_eager(node, refusal.title)
        self._stay_in_eager(node, None)

    def _lowered(self, node: Node) -> bool:
        """Lower the node if there is a way to."""
        lowering = lowering_of(node)
        row = Row(_in_a_tuple(lowering)) if lowering is not None else _row_of(node.target)
        if row is not None and row.rereads and not self._is_our_product(node):
            return False
        if row is not None:
            self.values[node] = self._by_row(node, row)
            return True
        if node.target is aten.copy_.default:
            self.values[node] = self._written_in_place(node)
            return True
        return self._symbolic(node)

    def _stay_in_eager(self, node: Node, refusal: str | None) -> None:
        if node.target is not operator.getitem:
            op = name_of(node.target) or node.name
            self.shared.fallbacks[op] += 1
            self.shared.reasons.setdefault(op, refusal or why_in_eager(op))
        self._eager(node)

    def _symbolic(self, node: Node) -> bool:
        """Arithmetic on sizes is done in our own algebra and computed on the host when something asks for it. But that
        reads a size from data as tracing believes it to be, and believes it because of an assert: so what is made of
        such a size is computed of the number that is there, or the assert would compare a belief with itself."""
        if self._is_made_of_data(node):
            self._call_on_host(node)
            return True
        if not isinstance(node.meta.get("val"), torch.SymInt):
            return False
        if node.meta.get("unbacked_bindings") or not is_size_arithmetic(node):
            return False
        extent = self.shared.sizes.index(node.meta["val"])
        if not self.host_sizes.knows(extent):
            return False
        self.values[node] = extent
        return True

    def _is_made_of_data(self, node: Node) -> bool:
        """Whether arithmetic on sizes starts from one that only the run knows."""
        if not is_size_arithmetic(node) or node.target is operator.getitem:
            return False
        return is_of_data(node.meta.get("val")) or any(source in self.of_data for source in node.all_input_nodes)

    def _call_on_host(self, node: Node) -> None:
        """Arithmetic on numbers that exist on the host."""
        args, kwargs = self._host_value(node.args), self._host_value(node.kwargs)
        self.steps.append(Call(node.name, str(name_of(node.target)), args, kwargs, source_place(node)))
        value = self.values[node] = _Value(node, node.name)
        self.of_data.add(node)
        self._exists(value, node.name)
        self.host_sizes.learn(node.name, value.fake)

    def _eager(self, node: Node) -> None:
        """Run the op itself, on values that exist on the host."""
        written = self._written(node)
        for value in written:
            self._store_readers_of(value)
        target = name_of(node.target)
        if target in KEEPS_ITS_PROMISE:
            self._check_operands(node)
        root = self.values.get(node.args[0]) if node.args and isinstance(node.args[0], Node) else None
        root = root if isinstance(root, _Value) and may_alias(node) else None
        if root is not None and not root.is_doubtful:
            self._keep_promise(root)
        args, kwargs = self._host_value(node.args), self._host_value(node.kwargs)
        if copied := self._as_wanted(node):
            args, kwargs = renamed((args, kwargs), copied)
        if target is None:
            # A function that only this process knows: it is a constant, called through a function with a name.
            args = (Ref(_constant("_function", node.target, self.shared)), *args)
            target = "ferrite.artifact.host_calls.call"
        # The partitioner's calls that keep the generator's state say nothing of what they give.
        schema = getattr(node.target, "_schema", None)
        gives_nothing = schema is not None and not schema.returns
        told = show_type(node.meta.get("val")) if "val" in node.meta or gives_nothing else "unknown"
        gives = "" if target.startswith(OF_TORCH) else told
        self.steps.append(Call(node.name, target, args, kwargs, source_place(node), gives))
        if (flops := flops_of(node)) is not None:
            self.flops[node.name] = flops
        self.writes[node.name] = tuple(v.host for v in written if isinstance(v, _Value) and v.host is not None)
        value = self.values[node] = self._on_host(node, node.name, root)
        value.is_promised = value.tensor is not None and not self._keeps_its_promise(node, target)
        value.is_doubtful = self._is_doubtful(node, target)

    def _keeps_its_promise(self, node: Node, target: str) -> bool:
        """Whether the host program knows the result's type and strides: those of a product follow from an operand that
        it knows, unless a factor is known at run time only. Then an op makes the product, and it is read as held."""
        if target not in KEEPS_ITS_PROMISE or any(isinstance(factor, Node) for factor in node.kwargs.values()):
            return False
        operands = map(self.values.get, node.all_input_nodes)
        return any(isinstance(value, _Value) and not value.is_promised for value in operands)

    def _check_operands(self, node: Node) -> None:
        """A product keeps its promise if its operands do. An operator of PyTorch gives the sizes that it says."""
        for value in map(self.values.get, node.all_input_nodes):
            if isinstance(value, _Value) and value.is_promised and not _is_of_known_sizes(value.node):
                self._in_memory_as_promised(value)

    def _written(self, node: Node) -> list[Any]:
        """The values whose memory a call may change. Nothing says which inputs share the storage of the one that a call
        gives another size: AOTAutograd looks for that only where elements are written."""
        written = written_arguments(node)
        if changes_storage(node):
            written = [*written, *(each for each in self.values if each.op == "placeholder" and each not in written)]
        return [self.values.get(argument) for argument in written]

    def _as_wanted(self, node: Node) -> dict[str, str]:
        """Names of what an op in eager is given in the place of operands that lie as it does not take them: otherwise
        than in the trace, or in more layouts than it knows of."""
        copied: dict[str, str] = {}
        is_padded = self.padded and wants_dense(node, lambda op: False) is not None
        for argument, fake in layouts_wanted(node).items():
            value = self.values[argument]
            if not isinstance(value, _Value) or value.host is None:
                continue
            is_copied = not lies_so(value.fake, tuple(fake.stride()))
            if is_copied or value.is_promised or value.tensor is None:
                copied[value.host] = self._laid_out(value, fake)
            if is_copied:
                lies = f"{argument.name} as {node.name} takes it; {bytes_of_tensor(fake):,} bytes"
                self.shared.decisions.append(Decision("layout copy", (argument.name,), True, lies))
        for value in map(self.values.get, node.all_input_nodes if is_padded else ()):
            # The op was taken for loops, and its row has refused it: it is not to see the gaps.
            if isinstance(value, _Value) and value.host not in copied and value.memory() in self.padded:
                copied[str(value.host)] = self._held(value)
        return copied

    def _is_doubtful(self, node: Node, target: str) -> bool:
        if all(user.target is aten.copy.default and user.args[1] is node for user in node.users):
            return False  # a copy takes the strides of what it goes to
        if target in BREAKS_ITS_PROMISE:
            return isinstance(node.meta.get("val"), torch.Tensor) and not is_static(node.meta["val"])
        if node.target is operator.getitem and node.args[1] == 1:
            # The gradient of a weight: where it has dimensions of one, eager and trace choose different strides.
            return node.args[0].target is aten.convolution_backward.default and 1 in node.meta["val"].shape
        return any(isinstance(v := self.values[a], _Value) and v.is_doubtful for a in node.all_input_nodes)

    def _by_row(self, node: Node, row: Row) -> Any:
        """The row's value, stored now if it should not be computed again by every reader."""
        reads_all = torch.Tag.pointwise in getattr(node.target, "tags", ())  # an op that calls graphs has no tags
        for argument in node.all_input_nodes:
            if argument.op == "call_function" and isinstance(self.values[argument], _Value):
                self._store_if_needed(self.values[argument], reads_all)
                if row.rereads:
                    self._store_source(self.values[argument])
        fakes = node.meta["val"]
        several = isinstance(fakes, (tuple, list))
        made_of = [fake for fake in (fakes if several else (fakes,)) if fake is not None]
        if not all(is_plain(fake) for fake in made_of):
            raise Unsupported("a result that is no plain tensor on the CPU")
        if not row.is_view and all(is_empty(fake) for fake in made_of):
            # A loop that does not run gains nothing, and what strides eager gives here tracing does not know.
            raise Unsupported("a result without elements")
        made = self._made(node, row)
        if isinstance(made, Built):
            return self._build(node, made, several)
        if row.is_view:
            return self._view(node, made)
        if several:
            return self._parts(node, made)
        value = self._lazy(node, self._expected(made, fakes))
        if value.cost.store_at_once or self._frees(value) or node.meta.get(REALISED):
            self._store(value)
        return value

    def _made(self, node: Node, row: Row) -> Any:
        """What the row makes of the arguments as they are now."""
        args = tuple(self._row_value(argument) for argument in node.args)
        kwargs = {key: self._row_value(argument) for key, argument in node.kwargs.items()}
        refuse_sizes(node.target, args, kwargs)
        if row.wants_result:
            fakes = node.meta["val"]
            several = isinstance(fakes, (tuple, list))
            kwargs["result"] = tuple(self._result(fake) for fake in fakes) if several else self._result(fakes)
        if row.wants_draw:
            kwargs["draw"] = self._draw()
        if row.wants_traced:
            kwargs["traced"] = tuple(as_traced(a) if isinstance(a, Node) else a for a in node.args)
        return row.lower(*args, **kwargs)

    def _is_our_product(self, node: Node) -> bool:
        operands = (argument.meta["val"] for argument in node.args)
        is_ours, why = choose(*operands) if self.shared.rules.own_products else (False, "all are the library's here")
        self.shared.decisions.append(Decision("product by loops", (node.name,), is_ours, why))
        return is_ours

    def _frees(self, value: _Value) -> bool:
        """Whether it takes the place of two others in memory, which are as large and are read for the last time: they
        would have to wait for its readers while libraries are called. So do gradients that are added up as they come,
        and what goes past the layers of a model."""
        last = self.last_reader.get(value.node, self.position)
        if self.calls_before[last] == self.calls_before[self.position]:
            return False
        size = size_in_bytes(value.fake)
        dying = [memory for memory in map(self._dying, value.node.all_input_nodes) if memory is not None]
        return size is not None and sum(size_in_bytes(memory.fake) == size for memory in dict.fromkeys(dying)) > 1

    def _dying(self, node: Node) -> _Value | None:
        """Memory that the graph has made and that is read for the last time as `node`."""
        value = self.values[node]
        if not isinstance(value, _Value) or self.last_reader[node] > self.position:
            return None
        memory = value.memory()
        if memory.host is None or memory.node.op != "call_function":
            return None
        # Of several results, the others may be read later: the gradients of a layer norm's weights, by the caller.
        nodes = [memory.node] if memory.part is None else memory.takers
        return memory if all(self.last_reader.get(each, -1) <= self.position for each in nodes) else None

    def _view(self, node: Node, made: Tensor | Sequence[Tensor]) -> _Value | tuple[_Value, ...]:
        """One view of the first argument, or a list of them."""
        source = self.values[node.args[0]]
        root = source if isinstance(source, _Value) else None
        if isinstance(made, Tensor):
            views = [self._lazy(node, self._expected(made, node.meta["val"]), root=root)]
        else:
            parts = zip(made, node.meta["val"], strict=True)
            views = [self._lazy(node, self._expected(v, fake), n, root) for n, (v, fake) in enumerate(parts)]
        for value in views:
            value.is_view, value.seen = True, root.tensor if root is not None else None
        return views[0] if isinstance(made, Tensor) else tuple(views)

    def _up_to_date(self, value: _Value) -> _Value:
        """A view of an expression reads the memory of that one as soon as it has some, instead of computing it again:
        what it was computed from need not wait for readers of the view."""
        if not value.is_view or value.root is None or value.seen is None:
            return value
        now = self._up_to_date(value.root).tensor
        row = _row_of(value.node.target)
        if now is value.seen or row is None:
            return value
        made = self._made(value.node, row)
        value.tensor = self._expected(made if value.part is None else made[value.part], value.fake)
        value.seen, value.made_of = now, self._lazy_inputs(value.node)
        del value.cost
        if not value.cost.can_raise:
            value.origins = ()
        for name in value.cost.buffers:
            self.lazy_readers[name].append(value)
        return value

    def _parts(self, node: Node, made: Sequence[Tensor | After | None]) -> tuple[_Value, ...]:
        """Several results, first those that are made of no other. If one of them holds a reduction, all that are read
        are stored at once, by one kernel for each box; otherwise each is a value on its own."""
        fakes = node.meta["val"]
        read = {part_of(user) for user in node.users}
        values = [_Value(node, part=number) for number in range(len(made))]

        def add(parts: Mapping[int, Tensor]) -> None:
            for number, part in parts.items():
                values[number] = self._lazy(node, self._expected(part, fakes[number]), number)
            added = [values[number] for number in parts]
            if any(value.cost.store_at_once for value in added):
                self._store(*added)

        add({n: part for n, part in enumerate(made) if n in read and isinstance(part, Tensor)})
        for number, part in enumerate(made):
            if number in read and isinstance(part, After):
                add({number: part.make(*(values[n].tensor or made[n] for n in part.parts))})
        return tuple(values)

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
                    return self._in_memory_as_promised(value)
                if value.body is not None:
                    return value.body
                fake = argument.meta.get("val")
                if isinstance(fake, torch.SymInt):
                    return self.shared.sizes.index(fake)
                if isinstance(fake, int):
                    return fake
                raise Unsupported(f"an argument that is {show_type(fake)}")
            return value if isinstance(value, Index) else tuple(self._up_to_date(part).tensor for part in value)
        if isinstance(argument, (list, tuple)):
            return type_of_list(argument)(self._row_value(item) for item in argument)
        return argument

    def _in_memory_as_promised(self, value: _Value) -> Tensor:
        """The tensor of a value, for a kernel to read: what an eager op made is held to strides and dtype of the
        trace."""
        self._up_to_date(value)
        assert value.tensor is not None
        if value.is_doubtful:
            raise Unsupported("a tensor whose strides tracing does not know")
        self._keep_promise(value)
        return value.tensor

    def _keep_promise(self, value: _Value) -> None:
        """From here on a value lies as was promised, for whoever reads it: kernels, views, the backward. Only an
        argument stays what it is: who writes to it writes to the caller's."""
        if not value.is_promised:
            return
        name = self._held(value)
        value.tensor, value.is_promised = of_buffer(self._buffer(name, value.fake)), False
        if value.node.op == "call_function":
            value.host = name

    def _laid_out(self, value: _Value, fake: torch.Tensor) -> str:
        """The name of a value's elements, laid out as a fake tensor is; by an op, where a size of it has no form."""
        layout = format_of(fake)
        try:
            return self._exactly(self._held(value, fake), fake)
        except Unsupported:
            if layout is None:
                raise
        name = self.shared.fresh(f"{value.host}_laid_out")
        kind = {"memory_format": Named(str(layout))}
        self.steps.append(Call(name, "aten.contiguous.default", (Ref(str(value.host)),), kind))
        self._exists(value, name)
        return name

    def _exactly(self, name: str, fake: torch.Tensor) -> str:
        """The name of the same memory with the strides of a fake tensor where it has dimensions of one, too."""
        if all(str(size) != "1" for size in fake.shape):
            return name
        exact = self.shared.fresh(name)
        buffer = self._buffer(exact, fake)
        sizes, strides = (list(map(self.host_sizes.value, each)) for each in (buffer.sizes, buffer.strides))
        self.steps.append(Call(exact, "aten.as_strided.default", (Ref(name), sizes, strides), {}))
        return exact

    def _held(self, value: _Value, fake: Any = None) -> str:
        """The name of a tensor that lies as a fake one does, by default the value's: the value itself, or a copy."""
        name = self.shared.fresh(f"{value.host}_strided")
        buffer = self._buffer(name, value.fake if fake is None else fake)
        sizes, strides = (tuple(map(self.host_sizes.value, each)) for each in (buffer.sizes, buffer.strides))
        dtype, maker = _NAMED_DTYPES[buffer.dtype.name], _maker(value.node)
        self.steps.append(Call(name, HOLD, (Ref(str(value.host)), sizes, strides, dtype, maker), {}))
        self._exists(value, name)
        return name

    def _draw(self) -> Draw:
        """A seed for one random op. Seeds of a call are drawn together, from torch's generator."""
        if not self.shared.rules.counter_random:
            raise Unsupported("a random op", why="the option fallback_random asks for the stream of eager")
        self.seeds = self.seeds or self.shared.fresh("seeds")
        name = self.shared.fresh("seed")
        self.steps.append(Call(name, "aten.select.int", (Ref(self.seeds), 0, self.draws), {}))
        self.draws += 1
        return Draw(Load(Buffer(name, i64, (), ()), ()))

    # ---- storing

    def _store_if_needed(self, value: _Value, reads_all: bool) -> None:
        """Before an op reads a value: is it better computed once, or must it be, because the op may leave out the
        element that raises?"""
        if not value.is_lazy:
            return
        is_shared = not value.is_view and value.readers > 1 and value.cost.store_if_shared
        if is_shared or (not reads_all and value.cost.can_raise):
            self._store(value)

    def _store_source(self, value: _Value) -> None:
        """Before a row reads elements again and again: what it reads, or is a view of, is no computation."""
        memory = value.memory()
        if memory.is_lazy and memory.tensor is not None and not isinstance(memory.tensor.body, (Load, Const)):
            self._store(memory)

    def _store(self, *values: _Value) -> None:
        """Give tensors memory, with the strides of eager, and fill them: one kernel for all with the same box, as far
        as a kernel may be that large."""
        buffers: list[Buffer] = []
        stores: dict[tuple[Axis, ...], list[Store]] = {}
        origins: dict[tuple[Axis, ...], dict[Origin, None]] = {}
        stored: dict[tuple[Axis, ...], list[_Value]] = {}
        for value in map(self._up_to_date, values):
            assert value.tensor is not None
            name = value.node.name
            if value.part is not None:
                name = self.shared.fresh(f"{name}_{value.part}")
            buffers.append(self._own_buffer(name, value))
            here = value.tensor.axes
            stores.setdefault(here, []).append(Store(buffers[-1], points(here), value.tensor.body))
            origins.setdefault(here, {}).update(dict.fromkeys(value.origins))
            stored.setdefault(here, []).append(value)
        for axes, whole in stores.items():
            for start in range(0, len(whole), MOST_STORES):
                body = tuple(whole[start : start + MOST_STORES])
                results = tuple(store.buffer for store in body)
                nodes = _computed(stored[axes][start : start + MOST_STORES])
                self._launch((Nest(axes, body),), results, nodes, tuple(origins[axes]))
        for value, buffer in zip(values, buffers, strict=True):
            value.host, value.tensor, value.is_view, value.root = buffer.name, of_buffer(buffer), False, None
            value.origins, value.made_of = (), ()
            self._exists(value, buffer.name)

    def _build(self, node: Node, built: Built, several: bool) -> Any:
        """Name the buffers that the row's own loops write, and run them."""
        fakes = node.meta["val"] if several else (node.meta["val"],)
        names = [self.shared.fresh(f"{node.name}_{n}") for n in range(len(fakes))] if several else [node.name]
        values = tuple(_Value(node, part=number if several else None) for number in range(len(fakes)))
        buffers = tuple(map(self._own_buffer, names, values))
        named = dict(zip(built.results, buffers, strict=True))
        origins = self._origins(node, built.nests) if any(map(can_raise, built.nests)) else ()
        nodes = [*_computed(self._lazy_inputs(node)), node]
        self._launch(tuple(replace_buffers(nest, named) for nest in built.nests), buffers, nodes, origins)
        for value, buffer in zip(values, buffers, strict=True):
            value.host, value.tensor = buffer.name, of_buffer(buffer)
            self._exists(value, buffer.name)
        return values if several else values[0]

    def _launch(
        self, nests: tuple[Nest, ...], results: tuple[Buffer, ...], nodes: Sequence[Node], origins: tuple[Origin, ...]
    ) -> None:
        """Allocate the results, and call the kernel that these nests make."""
        allocations = [self._allocation(buffer, nodes[-1]) for buffer in results]
        launch = self._kernel(nests, results, nodes, origins)
        self.steps += [*allocations, launch]

    def _allocation(self, buffer: Buffer, node: Node) -> Call:
        sizes = [self.host_sizes.value(extent) for extent in buffer.sizes]
        strides = [self.host_sizes.value(stride) for stride in buffer.strides]
        kind = {"dtype": _NAMED_DTYPES[buffer.dtype.name], "device": Named("torch.device('cpu')")}
        return Call(buffer.name, ALLOCATE, (sizes, strides), kind, source_place(node))

    def _kernel(
        self,
        nests: tuple[Nest, ...],
        written: tuple[Buffer, ...],
        nodes: Sequence[Node],
        origins: tuple[Origin, ...],
        *,
        in_place: bool = False,
    ) -> Launch:
        """A call of the kernel that these nests make of `nodes`; equal kernels are one."""
        program, buffers = kernel_of(nests, written, in_place=written if in_place else ())
        sizes = tuple(self.host_sizes.value(of_atom(size)) for size in program.sizes)
        name = self.shared.kernels.get(program)
        if name is None:
            name = self.shared.kernels[program] = self.shared.fresh(f"kernel_{len(self.shared.kernels)}")
        source, ops = join_places(map(source_place, nodes)), tuple(dict.fromkeys(map(_op_of, nodes)))
        return Launch(name, tuple(b.name for b in buffers), sizes, source, origins, ops)

    # ---- writing to memory that exists

    def _written_in_place(self, node: Node) -> _Value:
        """`copy_`: a kernel that writes straight into the target, reading of it at most what it overwrites."""
        target, source = (self.values[argument] for argument in node.args[:2])
        if not (_is_stored(target) and isinstance(source, _Value) and source.tensor is not None):
            raise Unsupported("a copy between values that are no plain tensors")
        if target.is_promised:
            raise Unsupported("a copy into memory whose strides are known to eager only")
        self._in_memory_as_promised(source)
        buffer: Buffer = target.tensor.body.buffer
        if not _is_dense(buffer):
            raise Unsupported("a copy into memory that may lie over itself")
        axes = axes_for(buffer.sizes)
        if source.is_lazy and (self._is_read_later(source) or not self._reads_only_here(source, target, axes)):
            self._store(source)
        elif source.is_view and not self._reads_only_here(source, target, axes):
            raise Unsupported("a copy from a view of the same memory")
        self._store_readers_of(target, but=source)
        value = cast(expand(source.tensor, buffer.sizes).body, buffer.dtype)
        nest = Nest(axes, (Store(buffer, points(axes), value),))
        nodes = [*_computed([source]), node]
        self.steps.append(self._kernel((nest,), (buffer,), nodes, source.origins, in_place=True))
        return _Value(node, target.host, target.tensor, root=target)

    def _reads_only_here(self, source: _Value, target: _Value, axes: tuple[Axis, ...]) -> bool:
        """Whether `source`, stretched over the target's axes, reads of its memory only the very element it writes."""
        assert source.tensor is not None
        assert target.tensor is not None
        names = set(self.names_of[target.memory()])
        if not names & source.cost.buffers:
            return True
        body = expand(source.tensor, tuple(axis.extent for axis in axes)).body
        loads = [n for n in walk(body) if isinstance(n, Load) and n.buffer.name in names]
        return all(n is target.tensor.body for n in loads) and not source.cost.holds_reduction

    def _store_readers_of(self, changed: Any, but: _Value | None = None) -> None:
        """Before memory changes: store every expression that reads it and is read later."""
        if not isinstance(changed, _Value) or not self.shared.rules.use_rows:
            return
        memory = changed.memory()
        readers = [value for name in self.names_of[memory] for value in self.lazy_readers.pop(name, ())]
        waiting = [
            value
            for value in dict.fromkeys(readers)
            if value.is_lazy and value is not but and value.memory() is not memory and self._is_read_later(value)
        ]
        waiting_for = Counter(value.memory() for value in waiting)
        for value in waiting:
            owner = value.memory()
            is_alone = waiting_for[owner] == 1 and not self._is_read_later(owner)
            if is_alone and (value is owner or _is_dense(self._buffer("", value.fake))):
                self._store(value)
            elif owner.is_lazy:  # views that others share memory with, or that repeat elements, read it from there
                self._store(owner)

    def _is_read_later(self, value: _Value) -> bool:
        return self.last_reader.get(value.node, -1) > self.position

    # ---- what the host sees

    def _host_value(self, argument: Any) -> Any:
        """An argument of an eager call: every tensor in memory, every size a number."""
        if isinstance(argument, Node):
            value = self.values[argument]
            if isinstance(value, Index):
                return self.host_sizes.value(value)
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
        if value.host is None and value.body is not None:
            value.host = _function(value.node, value.body, self.shared)
        elif value.host is None and value.is_view and value.root is not None:
            self._run_view(value)
        elif value.host is None:
            self._store(value)
        assert value.host is not None
        return value.host

    def _run_view(self, value: _Value) -> None:
        """Make a view by running the op itself; a list of views is made once."""
        node, name = value.node, value.node.name
        target = name_of(node.target)
        assert target is not None
        if value.part is None or node not in self.lists:
            self.lists[node] = name
            args, kwargs = self._host_value(node.args), self._host_value(node.kwargs)
            self.steps.append(Call(name, target, args, kwargs, source_place(node)))
        if value.part is not None:
            name = self.shared.fresh(f"{node.name}_{value.part}")
            self.steps.append(Call(name, "operator.getitem", (Ref(node.name), value.part), {}, source_place(node)))
        value.host = name  # kernels go on reading what it is a view of
        self._exists(value, name)


def _in_a_tuple(lower: Callable[..., Any]) -> Callable[..., Any]:
    """A row for a call of a graph, which gives a tuple even of one."""

    def lower_call(*args: Any) -> Any:
        made = lower(*args)
        return (made,) if isinstance(made, Tensor) else made

    return lower_call


def _maker(node: Node) -> str:
    """The op that made a value, or one of several; the caller of the function whose argument it is."""
    source = _source_of(node)
    return (
        f"the caller of the body with {node.name}"
        if source.op == "placeholder"
        else name_of(source.target) or source.name
    )


def _reads_relaid(node: Node) -> bool:
    """Whether the op that made a value, or one of several, has read what lies otherwise than in the trace."""
    return READS_RELAID in _source_of(node).meta


def _is_of_known_sizes(node: Node) -> bool:
    target = _source_of(node).target
    return isinstance(target, OpOverload) and is_of_torch(target)


def _source_of(node: Node) -> Node:
    """The call that gives a value among several, or the value's own."""
    return node.args[0] if node.target is operator.getitem else node


def _computed(values: Sequence[_Value]) -> list[Node]:
    """The nodes whose ops a kernel that stores these values computes, in the order of the graph. Views compute nothing,
    unless there is nothing else."""
    found: dict[_Value, None] = {}
    waiting = [value for value in values if value.host is None]
    while waiting:
        value = waiting.pop()
        if value not in found:
            found[value] = None
            waiting += value.made_of
    return sorted({value.node for value in found if not value.is_view} or {value.node for value in found})


def _op_of(node: Node) -> str:
    """`gelu`, `prims.iota`: an op without its overload."""
    packet = getattr(node.target, "overloadpacket", node.target)
    return (name_of(packet) or node.name).removeprefix("aten.")


_NAMED_DTYPES = {ours.name: Named(str(theirs)) for theirs, ours in TORCH_DTYPES.items()}


def _draw_seeds(name: str, count: int) -> Call:
    """One seed for each random op of a call, from torch's default generator, which advances."""
    kind = {"dtype": Named("torch.int64"), "device": Named("torch.device('cpu')")}
    return Call(name, "aten.randint.low", (-(1 << 63), (1 << 63) - 1, [count]), kind)


def _checks(made: Sequence[Tree]) -> Counter[str]:
    """What the checks in it say; one that occurs twice counts once."""
    nodes = {node for each in made for node in walk(each) if isinstance(node, (Checked, Require, Assert))}
    return Counter(sorted(node.message for node in nodes))


def _row_of(op: Any) -> Row | None:
    """The table is filled when the first graph asks for it: it takes a tenth of a second."""
    from ferrite.lower.rows import row_of

    return row_of(op)


def _has_row(op: Any) -> bool:
    return _row_of(op) is not None


def _is_stored(value: Any) -> bool:
    return (
        isinstance(value, _Value)
        and value.host is not None
        and value.tensor is not None
        and isinstance(value.tensor.body, Load)
        and value.tensor.body.buffer.name == value.host
    )


def _is_dense(buffer: Buffer) -> bool:
    """Whether no two elements can share an address: strides, from the smallest up, step over all that lies below."""
    if all(map(known_equal, buffer.strides, contiguous_strides(buffer.sizes))):
        return True
    if any(extent.terms for extent in (*buffer.sizes, *buffer.strides)):
        return False
    below = 0
    for stride, extent in sorted((s.constant, e.constant) for s, e in zip(buffer.strides, buffer.sizes, strict=True)):
        if extent > 1:
            if stride <= below:
                return False
            below += stride * (extent - 1)
    return True


def _function(node: Node, owned: GraphModule, shared: _Shared) -> str:
    """The name of the function that a child graph becomes. One that may be called with other shapes than those that it
    was traced with runs in eager: kernels are made for the shapes of the trace."""
    if not all(name_of(user.target) in CALLS_AS_TRACED for user in node.users):
        shared = replace(shared, rules=EVERYTHING_IN_EAGER)
    key = id(owned), shared.rules.use_rows
    known = shared.functions.get(key)
    if known is not None:
        return known.name
    one = _OneGraph(owned, shared, is_body=True)
    one.run()
    # After its own children, so that a function stands behind those that it calls.
    name = shared.fresh(_identifier(str(node.target)))
    shared.functions[key] = one.body(name)
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
