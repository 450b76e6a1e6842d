"""What every value of a host program is before it runs: its type, its sizes and strides, and whose memory it has.

`infer` finds it in one of two ways. A program of known sizes has PyTorch's own ops run on tensors without memory; those
of others are never run here, as they may do more than compute: the program says what they give. One with sizes that
change goes by rules of its own, in which sizes are polynomials over the numbers that the program is given; what an op
in eager gives there is known to be a tensor, and its sizes are asked of it when it exists, if somebody needs them.
So does a program with functions that operators call: nobody knows beforehand how often they run, and what they give.

Neither way looks at how the program is run: that is `native_host.py`.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._ops import OpOverload

from ferrite.errors import Malformed, Unsupported, within
from ferrite.graph.names import resolve
from ferrite.graph.text import read_type, read_types, split_type
from ferrite.host.nodes import ALLOCATE, HOLD, PART, VIEWS, Call, HostProgram, Launch, Return, place_of_step
from ferrite.loops import index as sizes_of_loops
from ferrite.loops.index import Index, constant, divides, maximum, minimum, of_atom, product
from ferrite.loops.index import size as symbol
from ferrite.syntax import Named, Ref, refs

Shape = tuple[Index, ...]

PRODUCTS = frozenset({"aten.mm.default", "aten.bmm.default", "aten.addmm.default", "aten.baddbmm.default"})
LENT_TO = frozenset({"aten.convolution.default"})  # ask for their results in the calling thread, and keep nothing
LEAST_LENT = 1 << 17  # bytes


@dataclass
class Value:
    """A tensor of the program. `root` is the value whose memory it shares. What an op in eager made is `is_promised`:
    it may lie otherwise than the trace says, and its type and sizes may not be known. Slots: of its handle, of the
    address of its data; None while nobody has asked for them."""

    root: str
    dtype: torch.dtype | None = None
    sizes: Shape | None = None
    strides: Shape | None = None
    offset: Index = sizes_of_loops.ZERO  # in elements, from where the root starts
    is_promised: bool = False
    asked: Shape | None = None  # sizes that are read when the value exists
    handle: int | None = None
    is_owned: bool = False
    pointer: int | None = None

    @property
    def bytes(self) -> Index:
        """How much memory it spans; at least that where a size is zero."""
        assert self.dtype is not None
        assert self.sizes is not None
        assert self.strides is not None
        if any(not extent.terms and extent.constant == 0 for extent in self.sizes):
            return sizes_of_loops.ZERO
        steps = [(extent - 1) * stride for extent, stride in zip(self.sizes, self.strides, strict=True)]
        return maximum(sizes_of_loops.total([*steps, 1]) * self.dtype.itemsize, 0)


@dataclass(frozen=True)
class Several:
    """What a call gives that gives several tensors, or None in the place of one; `numbers`: sizes in the place of
    tensors, by position."""

    parts: tuple[Value | None, ...]
    numbers: Mapping[int, Index] = field(default_factory=dict)


@dataclass
class Values:
    """All values of a program, by name. `changing`: whether sizes are not all known; `numbers`: sizes; `given`: those
    of them that are arguments of the program; `views`: results that are views for sure; `taken`: parts of several that
    have a name of their own; `escaped`: roots that somebody else may keep."""

    changing: bool = False
    tensors: dict[str, Value] = field(default_factory=dict)
    several: dict[str, Several] = field(default_factory=dict)
    numbers: dict[str, Index] = field(default_factory=dict)
    given: dict[str, Index] = field(default_factory=dict)
    views: set[str] = field(default_factory=set)
    taken: set[int] = field(default_factory=set)
    escaped: set[str] = field(default_factory=set)

    def is_own(self, call: Call) -> bool:
        """Whether a call makes memory that we allocate: by itself, or as a product that writes where it is told to."""
        return call.target == ALLOCATE or (call.target in PRODUCTS and not self.tensors[call.result].is_promised)

    def is_lent(self, call: Call) -> bool:
        """Whether a call makes memory that we can lend it: Note [Lent memory] of `native/machine.py`. Small memory is
        at hand in C's library."""
        made = self.tensors.get(call.result) if call.target in LENT_TO else None
        if made is None or made.sizes is None or made.root != call.result:
            return False
        return not made.bytes.terms and made.bytes.constant >= LEAST_LENT

    def term(self, value: Any) -> Index:
        """A size as it stands in the program: a literal or a name."""
        match value:
            case Ref(name=name) if name in self.numbers:
                return self.numbers[name]
            case int():
                return constant(value)
        raise Unsupported("a size that is no number")


def infer(program: HostProgram, constants: Mapping[str, Any]) -> Values:
    """Raises `Unsupported` for a program that has other values than plain tensors and whole numbers."""
    changing = bool(program.functions) or any(entry.is_number for entry in program.inputs)
    values = Values(changing)
    walk: _Known | _Changing = _Changing(values) if changing else _Known(values)
    walk.inputs(program)
    for name, tensor in constants.items():
        if not isinstance(tensor, torch.Tensor):
            raise Unsupported("a constant that is no tensor")
        walk.constant(name, tensor)
    for step in program.steps:
        with within(place_of_step, step):
            match step:
                case Call(target=target) if target == PART:
                    take_part(step, values)
                case Call():
                    walk.call(step)
                case Launch():
                    for size in step.sizes:
                        values.term(size)
    return values


def take_part(call: Call, values: Values) -> None:
    """A part of several gets a name."""
    source, index = call.args
    if source.name in values.several and index in values.several[source.name].numbers:
        values.numbers[call.result] = values.several[source.name].numbers[index]
        return
    part = values.several[source.name].parts[index] if source.name in values.several else None
    if part is None or id(part) in values.taken:
        raise Unsupported("a part that is no tensor, or is taken twice")
    values.taken.add(id(part))
    values.tensors[call.result] = part


def filled(value: Any, of_name: Callable[[str], Any]) -> Any:
    """A value of the program with things in the place of names, and objects in the place of their paths."""
    match value:
        case Ref():
            return of_name(value.name)
        case Named():
            return resolve(value.path)
        case tuple() | list():
            return type(value)(filled(item, of_name) for item in value)
        case dict():
            return {key: filled(item, of_name) for key, item in value.items()}
    return value


# ---- known sizes


class _Known:
    """Every op is run on tensors without memory."""

    def __init__(self, values: Values) -> None:
        self.values = values
        self.metas: dict[int, torch.Tensor] = {}  # by the identity of the value

    def inputs(self, program: HostProgram) -> None:
        for entry in program.inputs:
            if not entry.is_nested_int:
                self.values.tensors[entry.name] = self._value(read_type(entry.type), entry.name, 0)

    def constant(self, name: str, tensor: torch.Tensor) -> None:
        self.values.tensors[name] = self._value(tensor.to("meta"), name, 0)

    def _value(self, meta: torch.Tensor, root: str, offset: int, *, is_promised: bool = False) -> Value:
        sizes, strides = tuple(map(constant, meta.shape)), tuple(map(constant, meta.stride()))
        made = Value(root, meta.dtype, sizes, strides, constant(offset), is_promised)
        self.metas[id(made)] = meta
        return made

    def meta(self, name: str) -> torch.Tensor:
        return self.metas[id(self.values.tensors[name])]

    def call(self, call: Call) -> None:
        values = self.values
        names = list(refs((call.args, call.kwargs)))
        if not all(name in values.tensors for name in names):
            raise Unsupported("values that are no tensors")
        if call.target == HOLD:
            tensor, sizes, strides, dtype, _ = call.args
            source = values.tensors[tensor.name]
            held = torch.empty_strided(sizes, strides, dtype=resolve(dtype.path), device="meta")
            values.tensors[call.result] = self._value(held, source.root, source.offset.constant)
            return
        if not call.target.startswith("aten."):
            values.escaped |= {values.tensors[name].root for name in names}
        made = self._given(call) if call.gives else self._run(call, is_alone=not names)
        if isinstance(made, torch.Tensor):
            result = values.tensors[call.result] = self._shared(call.result, made, names)
            source = values.tensors[names[0]] if names else result
            if call.target in VIEWS and result.root == source.root and not source.is_promised:
                values.views.add(call.result)
            elif call.target not in PRODUCTS and call.target != ALLOCATE:
                result.is_promised = True
        elif isinstance(made, (tuple, list)) and all(part is None or isinstance(part, torch.Tensor) for part in made):
            parts = [part if part is None else self._shared(call.result, part, names) for part in made]
            for part in parts:
                if part is not None:
                    part.is_promised = True
            values.several[call.result] = Several(tuple(parts))
        else:
            raise Unsupported(f"{call.target}, which gives no tensor")

    @staticmethod
    def _given(call: Call) -> Any:
        """What an operator that is not run gives."""
        parts = read_types(call.gives)
        if parts is not None:
            return parts
        return () if call.gives == "None" else read_type(call.gives)

    def _run(self, call: Call, *, is_alone: bool) -> Any:
        """What an operator of PyTorch gives. `is_alone`: no operand is a tensor without memory."""
        op = resolve(call.target)
        if isinstance(op, OpOverload) and not op._schema.returns:
            return ()
        args, kwargs = filled((call.args, call.kwargs), self.meta)
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type != "cpu":
            raise Unsupported(f"a tensor on {kwargs['device']}")
        if "device" in kwargs or (is_alone and _has_device(op)):
            kwargs["device"] = torch.device("meta")
        try:
            # While a graph is traced, rules in Python stand for some views, with other strides than eager's.
            with torch._C._DisablePythonDispatcher():
                made = op(*args, **kwargs)
        except Exception as error:
            raise Unsupported(f"{call.target}, which does not say what it gives") from error
        # A token of effects, which says its device itself, has no elements.
        return made.to("meta") if isinstance(made, torch.Tensor) else made

    def _shared(self, name: str, made: torch.Tensor, names: Sequence[str]) -> Value:
        """A result as a value: with memory of its own, or sharing that of one of its operands."""
        if made.layout != torch.strided:
            raise Unsupported(f"a tensor that is {made.layout}")
        for other in names:
            source, meta = self.values.tensors[other], self.meta(other)
            if torch._C._is_alias_of(made, meta):
                step = made.storage_offset() - meta.storage_offset()
                return self._value(made, source.root, source.offset.constant + step)
        return self._value(made, name, 0)


# ---- sizes that change

_ARITHMETIC: dict[str, Callable[[Any, Any], Index]] = {
    "operator.add": operator.add, "operator.sub": operator.sub, "operator.mul": operator.mul,
    "operator.floordiv": operator.floordiv, "operator.mod": operator.mod, "builtins.max": maximum,
    "builtins.min": minimum, "torch.sym_max": maximum, "torch.sym_min": minimum,
}  # fmt: skip


class _Changing:
    """Sizes are polynomials. A view that no rule proves to be one is left to eager, whatever it turns out to be."""

    def __init__(self, values: Values) -> None:
        self.values = values
        self.parts: dict[str, int] = {}  # for a result of several, how many of them are read
        self.functions: dict[str, tuple[str, ...]] = {}  # that operators call, and what they give

    def inputs(self, program: HostProgram) -> None:
        values, bound = self.values, set()
        self.functions = {function.name: _given_by(function) for function in program.functions}
        for step in program.steps:
            if isinstance(step, Call) and step.target == PART:
                source, index = step.args
                self.parts[source.name] = max(self.parts.get(source.name, 0), index + 1)
        for entry in program.inputs:
            if entry.is_number:
                expression = read_size(entry.type.removeprefix("Sym(").removesuffix(")"))
                values.numbers[entry.name] = values.given[entry.name] = expression
                if expression is symbol(str(expression), None):
                    bound.add(expression)
        for entry in program.inputs:
            if entry.name not in values.given and not entry.is_nested_int:
                dtype, sizes, strides = split_type(entry.type)
                extents = tuple(map(read_size, sizes))
                steps = contiguous(extents) if strides is None else tuple(map(read_size, strides))
                values.tensors[entry.name] = Value(entry.name, dtype, extents, steps)
        used = [each for value in values.tensors.values() for each in (*(value.sizes or ()), *(value.strides or ()))]
        for each in (*used, *values.given.values()):
            if not all(of_atom(atom) in bound for atom in sizes_of_loops.free_atoms(each)):
                raise Unsupported(f"the size {each}, which is no argument")

    def constant(self, name: str, tensor: torch.Tensor) -> None:
        sizes, strides = tuple(map(constant, tensor.shape)), tuple(map(constant, tensor.stride()))
        self.values.tensors[name] = Value(name, tensor.dtype, sizes, strides)

    def call(self, call: Call) -> None:
        values = self.values
        if call.target in _ARITHMETIC:
            left, right = map(values.term, call.args)
            values.numbers[call.result] = sizes_of_loops.index(_ARITHMETIC[call.target](left, right))
        elif call.target == "aten.sym_size.int":
            tensor, dim = call.args
            source = values.tensors[tensor.name]
            if source.sizes is None and dim < 0:
                raise Unsupported("a size of a tensor whose dimensions are not known")
            values.numbers[call.result] = source.sizes[dim] if source.sizes else self._ask(tensor.name, dim + 1)[dim]
        elif call.target == ALLOCATE:
            sizes, strides = (tuple(map(values.term, part)) for part in call.args)
            kind = filled(call.kwargs, Ref)
            if torch.device(kind["device"]).type != "cpu" or not isinstance(kind["dtype"], torch.dtype):
                raise Unsupported(f"a tensor on {kind['device']}")
            values.tensors[call.result] = Value(call.result, kind["dtype"], sizes, strides)
        elif call.target == HOLD:
            tensor, sizes, strides, dtype, _ = call.args
            source = values.tensors[tensor.name]
            shape, steps = (tuple(map(values.term, each)) for each in (sizes, strides))
            values.tensors[call.result] = Value(source.root, resolve(dtype.path), shape, steps, source.offset)
        elif call.target in PRODUCTS and (made := self._product(call)) is not None:
            values.tensors[call.result] = made
        else:
            seen = self._view(call) if call.target in VIEWS else None
            if seen is None:
                self._eager(call)
            else:
                values.tensors[call.result] = seen
                values.views.add(call.result)

    def _ask(self, name: str, count: int) -> Shape:
        """The first sizes of a tensor that eager makes: numbers that are read as soon as it is there."""
        value = self.values.tensors[name]
        have = value.asked or ()
        value.asked = (*have, *(symbol(f"{name}.{dim}", None) for dim in range(len(have), count)))
        return value.asked

    def _product(self, call: Call) -> Value | None:
        """None if nobody knows of which type it is: then it is an op like others."""
        values = self.values
        operands = [arg.name for arg in call.args if isinstance(arg, Ref)]
        *_, left, right = operands
        count = 3 if "bmm" in call.target else 2
        kinds = {values.tensors[name].dtype for name in operands} - {None}
        if len(kinds) != 1 or any(not isinstance(word, (int, float)) for word in call.kwargs.values()):
            return None
        (dtype,) = kinds
        first = values.tensors[left].sizes or self._ask(left, count)
        second = values.tensors[right].sizes or self._ask(right, count)
        sizes = (*first[:-1], second[-1])
        return Value(call.result, dtype, sizes, _clamped(sizes))

    def _eager(self, call: Call) -> None:
        """An op that is called as it is: its schema says how many tensors it gives, and whether they are new. One that
        calls functions gives as many as are read."""
        values, op = self.values, resolve(call.target)
        for name in (names := list(refs((call.args, call.kwargs)))):
            if name not in values.tensors and name not in values.numbers and name not in self.functions:
                raise Unsupported("values that are neither tensors nor whole numbers")
        if not self.functions.keys().isdisjoint(names):
            values.escaped |= {values.tensors[name].root for name in names if name in values.tensors}
            given = [self.functions[name] for name in names if name in self.functions]
            if len(given) > 1 and any(kind != "tensor" for kinds in given for kind in kinds):
                raise Unsupported("several functions of one operator that give something else than tensors")
            self._several(call, given[0])
            return
        if not isinstance(op, OpOverload):
            raise Unsupported(f"{call.target}, which is no operator")
        if not call.target.startswith("aten.") or may_share(op):
            values.escaped |= {values.tensors[name].root for name in names if name in values.tensors}
        kinds = [str(each.type) for each in op._schema.returns]
        if kinds == ["Tensor"]:
            # A view that no rule proves to be one has its source's elements, whatever its memory is.
            dtype = values.tensors[call.args[0].name].dtype if call.target in VIEWS else None
            values.tensors[call.result] = Value(call.result, dtype, is_promised=True)
        elif all(kind in ("Tensor", "Optional[Tensor]") for kind in kinds):
            values.several[call.result] = Several(tuple(Value(call.result, is_promised=True) for _ in kinds))
        elif kinds == ["List[Tensor]"]:
            self._several(call)
        else:
            raise Unsupported(f"{call.target}, which gives {', '.join(kinds)}")

    def _several(self, call: Call, kinds: Sequence[str] = ()) -> None:
        """As many as are read of what a call gives: tensors, or what `kinds` says instead."""
        count = self.parts.get(call.result, 0)
        of_kind = {place: kind for place, kind in enumerate(kinds) if kind != "tensor"}
        parts = [None if place in of_kind else Value(call.result, is_promised=True) for place in range(count)]
        numbers = {
            place: symbol(f"{call.result}.{place}", None) for place in range(count) if of_kind.get(place) == "number"
        }
        self.values.several[call.result] = Several(tuple(parts), numbers)

    # ---- views

    def _view(self, call: Call) -> Value | None:
        """What a view is, as eager would say; None if that depends on sizes in a way that no rule here knows."""
        source = self.values.tensors[call.args[0].name]
        if source.is_promised or source.sizes is None or source.strides is None or call.kwargs:
            return None
        rest = [self._argument(arg) for arg in call.args[1:]]
        shape = _VIEW_RULES[call.target](source.sizes, source.strides, *rest) if call.target in _VIEW_RULES else None
        if shape is None:
            return None
        sizes, strides, step = shape
        return Value(source.root, source.dtype, sizes, strides, source.offset + step)

    def _argument(self, arg: Any) -> Any:
        if isinstance(arg, list):
            return [self._argument(item) for item in arg]
        return self.values.term(arg) if isinstance(arg, Ref) else arg


_Viewed = tuple[Shape, Shape, Index]


def _same(sizes: Shape, strides: Shape) -> _Viewed:
    return sizes, strides, sizes_of_loops.ZERO


def _permute(sizes: Shape, strides: Shape, dims: list[int]) -> _Viewed:
    return _same(tuple(sizes[d] for d in dims), tuple(strides[d] for d in dims))


def _transpose(sizes: Shape, strides: Shape, one: int, other: int) -> _Viewed:
    dims = list(range(len(sizes)))
    if dims:  # a tensor without dimensions has dimension 0, and stays itself
        dims[one], dims[other] = dims[other], dims[one]
    return _permute(sizes, strides, dims)


def _t(sizes: Shape, strides: Shape) -> _Viewed:
    return _permute(sizes, strides, list(reversed(range(len(sizes)))))


def _select(sizes: Shape, strides: Shape, dim: int, at: Any) -> _Viewed | None:
    if not isinstance(at, int) or at < 0 or bool(sizes[dim].terms):
        return None  # eager checks that the place is there
    dim %= len(sizes)
    return (*_without(dim, sizes, strides), strides[dim] * at)


def _without(dim: int, *shapes: Shape) -> tuple[Shape, Shape]:
    one, other = ((*shape[:dim], *shape[dim + 1 :]) for shape in shapes)
    return one, other


def _unsqueeze(sizes: Shape, strides: Shape, dim: int) -> _Viewed:
    dim %= len(sizes) + 1
    step = sizes[dim] * strides[dim] if dim < len(sizes) else constant(1)
    return _same((*sizes[:dim], constant(1), *sizes[dim:]), (*strides[:dim], step, *strides[dim:]))


def _slice(
    sizes: Shape, strides: Shape, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1
) -> _Viewed | None:
    extent = sizes[dim]
    dim %= len(sizes)
    if not isinstance(step, int):
        return None
    first = _clipped(0 if start is None else start, extent)
    last = _clipped(extent if end is None else end, extent)
    if first is None or last is None:
        return None
    length = maximum(sizes_of_loops.ceildiv(last - first, step), 0)
    return (
        (*sizes[:dim], length, *sizes[dim + 1 :]), (*strides[:dim], strides[dim] * step, *strides[dim + 1 :]),
        strides[dim] * first,
    )  # fmt: skip


def _clipped(place: Any, extent: Index) -> Index | None:
    """Where a slice starts or ends: counted from the end if it is negative, and within the extent."""
    if isinstance(place, Index) and place is not extent:
        return None  # whether it is negative is not known
    if isinstance(place, int) and place < 0:
        return maximum(extent + place, 0)
    return extent if isinstance(place, int) and place >= 2**63 - 1 else minimum(place, extent)


def _expand(sizes: Shape, strides: Shape, target: list[Any]) -> _Viewed | None:
    """A size stays as it is, or is one and repeated; where it is neither for sure, eager decides. What has no dimension
    gets only strides of 0."""
    if not sizes:
        return _same(tuple(map(sizes_of_loops.index, target)), (sizes_of_loops.ZERO,) * len(target))
    made: list[tuple[Index, Index]] = []
    for place in reversed(range(len(target))):
        dim = place - (len(target) - len(sizes))
        wanted = target[place]
        have = sizes[dim] if dim >= 0 else constant(1)
        if isinstance(wanted, int) and wanted == -1:
            wanted = have
        wanted = sizes_of_loops.index(wanted)
        if have is wanted:
            step = strides[dim] if dim >= 0 else product(made[-1]) if made else constant(1)
        elif have is sizes_of_loops.ONE:
            step = sizes_of_loops.ZERO
        else:
            return None
        made.append((wanted, step))
    made.reverse()
    return _same(tuple(size for size, _ in made), tuple(step for _, step in made))


def _reshape(sizes: Shape, strides: Shape, target: list[Any]) -> _Viewed | None:
    """Sizes from the last one on, old beside new, in groups of equal product: a group of the old lies as one row, and
    is cut anew."""
    if any(isinstance(extent, int) and extent < 0 for extent in target):
        return None
    new = tuple(map(sizes_of_loops.index, target))
    if new == sizes:
        return _same(sizes, strides)
    if strides in (contiguous(sizes), _clamped(sizes)):
        return _same(new, _clamped(new)) if product(new) is product(sizes) else None
    steps: list[Index] = []
    old_at, new_at = len(sizes) - 1, len(new) - 1
    while old_at >= 0 and new_at >= 0:
        base, row = strides[old_at], sizes[old_at]
        steps.append(base)
        cut = new[new_at]
        while row is not cut:
            if divides(row, cut) and old_at > 0:
                old_at -= 1
                if strides[old_at] is not base * row and sizes[old_at] is not sizes_of_loops.ONE:
                    return None
                row = row * sizes[old_at]
            elif divides(cut, row) and new_at > 0:
                new_at -= 1
                steps.append(base * cut)
                cut = cut * new[new_at]
            else:
                return None
        old_at, new_at = old_at - 1, new_at - 1
        while old_at >= 0 and sizes[old_at] is sizes_of_loops.ONE:
            old_at -= 1
        while new_at >= 0 and new[new_at] is sizes_of_loops.ONE:  # one more row of the group below, as eager has it
            steps.append(base * cut)
            new_at -= 1
    if old_at >= 0 or new_at >= 0:
        return None
    return _same(new, tuple(reversed(steps)))


_VIEW_RULES: dict[str, Callable[..., _Viewed | None]] = {
    "aten.t.default": _t, "aten.permute.default": _permute, "aten.transpose.int": _transpose,
    "aten.select.int": _select, "aten.slice.Tensor": _slice, "aten.unsqueeze.default": _unsqueeze,
    "aten.expand.default": _expand, "aten.detach.default": _same, "aten.alias.default": _same,
    "aten.reshape.default": _reshape, "aten.view.default": _reshape,
}  # fmt: skip


def contiguous(sizes: Shape) -> Shape:
    return tuple(product(sizes[dim + 1 :]) for dim in range(len(sizes)))


def _clamped(sizes: Shape) -> Shape:
    """As eager makes them: a size of zero counts as one."""
    return contiguous(tuple(maximum(extent, 1) for extent in sizes))


def _has_device(op: Any) -> bool:
    """Whether an operator can be told where to make its result."""
    return isinstance(op, OpOverload) and any(each.name == "device" for each in op._schema.arguments)


def may_share(op: OpOverload) -> bool:
    """Whether a result may share memory with an argument. Composite ops may without saying so."""
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(
        op._schema.name + _overload(op), "CompositeImplicitAutograd"
    )
    return composite or any(each.alias_info is not None for each in (*op._schema.arguments, *op._schema.returns))


def _given_by(function: HostProgram) -> tuple[str, ...]:
    """For each value that a function gives, "tensor", "number" or "nothing". Raises `Unsupported` if it is none of them
    for sure."""
    known = {entry.name: "number" if entry.is_number else "tensor" for entry in function.inputs}
    given: tuple[Any, ...] = ()
    for step in function.steps:
        match step:
            case Call(target=target) if target in (PART, HOLD):
                known[step.result] = "tensor"
            case Call(target=target) if target in _ARITHMETIC or target == "aten.sym_size.int":
                known[step.result] = "number"
            case Call(target=target) if isinstance(op := resolve(target), OpOverload):
                if [str(each.type) for each in op._schema.returns] == ["Tensor"]:
                    known[step.result] = "tensor"
            case Return(value=value):
                given = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    kinds = ["nothing" if each is None else known.get(each.name) if isinstance(each, Ref) else None for each in given]
    if None in kinds:
        raise Unsupported("a function that gives something else than tensors and sizes")
    return tuple(kind for kind in kinds if kind is not None)


def _overload(op: OpOverload) -> str:
    return f".{op._schema.overload_name}" if op._schema.overload_name else ""


# ---- sizes as text


def read_size(text: str | ast.expr) -> Index:
    """A size as a type writes it: `s0`, `2*s0 + 1`, `(s0//2)`. Raises `Unsupported` for anything else."""
    try:
        return _read_size(ast.parse(text, mode="eval").body if isinstance(text, str) else text)
    except (Malformed, SyntaxError) as error:
        raise Unsupported(f"the size {text}") from error


_SIZE_OPERATORS: dict[type[ast.operator], Callable[[Index, Index], Index]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
}  # fmt: skip
_SIZE_FUNCTIONS: dict[str, Callable[[Index, Index], Index]] = {
    "Max": maximum, "Min": minimum, "Mod": operator.mod, "PythonMod": operator.mod, "FloorDiv": operator.floordiv,
}  # fmt: skip


def _read_size(node: ast.expr) -> Index:
    match node:
        case ast.Constant(value=int() as value):
            return constant(value)
        case ast.Name(id=name) if name[0] in "su":
            return symbol(name, None)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_read_size(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=int() as power)) if power > 0:
            return product([_read_size(left)] * power)
        case ast.BinOp(left=left, op=kind, right=right) if type(kind) in _SIZE_OPERATORS:
            return _SIZE_OPERATORS[type(kind)](_read_size(left), _read_size(right))
        case ast.Call(func=ast.Name(id=name), args=[left, right]) if name in _SIZE_FUNCTIONS:
            return _SIZE_FUNCTIONS[name](_read_size(left), _read_size(right))
    raise Malformed("no size", where="artifact.host_values", program=ast.unparse(node))
