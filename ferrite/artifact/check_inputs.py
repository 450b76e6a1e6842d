"""Whether arguments are what a program was compiled for.

Dynamo's guards have answered that before they call a compiled graph, so what AOTAutograd keeps does not ask again. Who
calls a graph directly is told here what does not fit, before anything is written.

Sizes that change have to satisfy what the trace assumed of them: that one is even, that two differ. PyTorch keeps these
guards; `assumptions` writes down those that a graph can be asked for, and the checker asks.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from ferrite.artifact.dispatch import changes_storage, may_move_memory
from ferrite.artifact.host_values import Shape, contiguous, read_size
from ferrite.artifact.kernels import Kernel
from ferrite.errors import Unsupported
from ferrite.graph.names import resolve
from ferrite.graph.plain import same_strides, why_no_memory, why_not_plain
from ferrite.graph.text import show_type, split_type
from ferrite.host.nodes import ALLOCATE, HOLD, PART, VIEWS, Call, HostProgram, Input, Launch, Return
from ferrite.loops.index import Atom, Index, evaluate, free_atoms, show_atom
from ferrite.syntax import refs

Known = dict[Atom, int]  # symbols that an argument has fixed
Written = Mapping[str, Sequence[int]]


def assumptions(module: GraphModule) -> tuple[str, ...]:
    """What the trace of a graph has assumed of its symbolic inputs, as text: `Eq(Mod(s0, 2), 0)`, `s0 >= 2`."""
    values = [node.meta.get("val") for node in module.graph.find_nodes(op="placeholder")]
    given = [value.node for value in values if isinstance(value, torch.SymInt)]
    if not given:
        return ()
    shapes = given[0].shape_env
    symbols = {node.expr for node in given if node.expr.is_symbol}
    ranges = [f"{symbol} >= {shapes.var_to_range[symbol].lower}" for symbol in symbols if symbol in shapes.var_to_range]
    guards = dict.fromkeys(guard.expr for guard in shapes.guards)
    return (*sorted(ranges), *(str(guard) for guard in guards if guard.free_symbols <= symbols))


def checker(program: HostProgram, device_types: Sequence[str], assumed: Sequence[str] = ()) -> Callable[[Any], None]:
    """A function that raises for a list of arguments that the program was not compiled for. What is assumed in a form
    that nobody here reads is not asked for."""
    wanted = [_Wanted(entry) for entry in program.inputs]
    guards = {text: guard for text in assumed if (guard := _read_guard(text)) is not None}

    def check(args: Any) -> None:
        if not isinstance(args, list):
            raise TypeError(f"{program.name} takes one list of arguments, found a {type(args).__name__}")
        if len(args) != len(wanted):
            raise TypeError(f"{program.name} takes {len(wanted)} arguments, found {len(args)}")
        known: Known = {}
        # Numbers first: they fix what sizes are.
        for each, arg in sorted(zip(wanted, args, strict=True), key=lambda pair: not pair[0].is_number):
            why = each.differs(arg, known, device_types)
            if why:
                entry = each.entry
                raise RuntimeError(f"{program.name}: {entry.name} should be {entry.type}, {why}")
        for text, guard in guards.items():
            if not guard(known):
                found = ", ".join(sorted(f"{show_atom(atom)} = {number}" for atom, number in known.items()))
                raise RuntimeError(f"{program.name}: sizes should satisfy {text}, found {found}")

    return check


class _Wanted:
    """What an input says of its argument; sizes that are no polynomials are not asked for."""

    def __init__(self, entry: Input) -> None:
        self.entry = entry
        self.is_number = entry.is_number
        self.number: Index | None = None
        self.dtype: torch.dtype | None = None
        self.sizes: Shape = ()
        self.strides: Shape = ()
        try:
            if self.is_number:
                self.number = read_size(entry.type.removeprefix("Sym(").removesuffix(")"))
                return
            dtype, sizes, strides = split_type(entry.type)
            self.sizes = tuple(map(read_size, sizes))
            self.strides = contiguous(self.sizes) if strides is None else tuple(map(read_size, strides))
            self.dtype = dtype
        except Unsupported:
            return

    def differs(self, arg: Any, known: Known, device_types: Sequence[str]) -> str:
        """What is found instead; nothing if the argument fits."""
        if self.number is not None:
            if not isinstance(arg, int):
                return f"found a {type(arg).__name__}"
            return "" if _fits(self.number, arg, known) else f"found {arg}"
        if self.dtype is None:
            return ""
        if not isinstance(arg, torch.Tensor):
            return f"found a {type(arg).__name__}"
        if tuple(device_types) == ("cpu",) and arg.device.type != "cpu":
            return f"found a tensor on {arg.device}"
        if arg.layout != torch.strided or arg.dtype != self.dtype or arg.dim() != len(self.sizes):
            return f"found {show_type(arg)}"
        if not all(_fits(size, have, known) for size, have in zip(self.sizes, arg.shape, strict=True)):
            return f"found {show_type(arg)}"
        if arg.numel() == 0:
            return ""
        for size, stride, have in zip(arg.shape, self.strides, arg.stride(), strict=True):
            if size > 1 and not _fits(stride, have, known):  # where nothing is stepped over, any stride is right
                return f"found {show_type(arg)}"
        return ""

    def shape_of(self, arg: Any, known: Known) -> tuple[list[int], list[int]]:
        """The sizes and strides that an argument should have. A size that nothing has fixed yet is the one it has."""
        if isinstance(arg, torch.Tensor) and arg.dim() == len(self.sizes):
            for size, have in zip(self.sizes, arg.shape, strict=True):
                _fits(size, have, known)
        sizes = [_number(size, known) for size in self.sizes]
        return sizes, [_number(stride, known) for stride in self.strides]


def _number(wanted: Index, known: Known) -> int:
    """Negative if it is not known, which no size is."""
    return evaluate(wanted, known) if free_atoms(wanted) <= known.keys() else -1


def _fits(wanted: Index, found: int, known: Known) -> bool:
    """Whether a number is the wanted one; a symbol that nothing has fixed yet is fixed by it."""
    unknown = [atom for atom in free_atoms(wanted) if atom not in known]
    if not unknown:
        return evaluate(wanted, known) == found
    if wanted.terms == ((1, (unknown[0],)),) and not wanted.constant:
        known[unknown[0]] = found
    return True


# ---- arguments that are read by their address


@dataclass(frozen=True)
class Keeper:
    """What a program takes for granted of a tensor that it is given, because it reads its memory: no guard has looked
    at what stands behind the address. `dtype` is None if only operators are handed the tensor, which look themselves;
    `may_copy`: nobody sees whether another tensor stands in the place of this one; `has_memory`: its elements have to
    be there when the program starts."""

    program: str
    name: str
    type: str
    dtype: torch.dtype | None
    may_copy: bool
    has_memory: bool

    def keep(self, arg: Any, sizes: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
        """The argument, or a copy of it that lies in memory as was promised. Raises RuntimeError if there is none."""
        if not isinstance(arg, torch.Tensor):
            raise self._refusal(f"a {type(arg).__name__}")
        if self.dtype is None:
            return arg
        if self.may_copy and arg._is_zerotensor():
            arg = torch.zeros(arg.shape, dtype=arg.dtype, device=arg.device)
        if self.may_copy and arg.is_neg():
            arg = arg.resolve_neg()
        why = why_not_plain(arg, has_memory=self.has_memory)
        if not why and (arg.dtype != self.dtype or list(arg.shape) != list(sizes)):
            why = show_type(arg)
        if not why and not same_strides(arg, strides):
            why = why_no_memory(arg) if self.may_copy else show_type(arg)
            if not why:
                return arg.new_empty_strided(sizes, strides).copy_(arg)
        if why:
            raise self._refusal(why)
        return arg

    def _refusal(self, found: str) -> RuntimeError:
        return RuntimeError(f"{self.program}: {self.name} should be {self.type}, found {found}")


def keepers_of(program: HostProgram, read: Collection[str], in_place: Written) -> dict[str, Keeper]:
    """One for each input that is no number. `read`: those whose addresses are read; `in_place`: for each kernel, the
    parameters that it changes."""
    seen, later = _seen_by_others(program, in_place), _filled_later(program)
    found = {}
    for entry in program.inputs:
        if not entry.is_number:
            dtype = split_type(entry.type)[0] if entry.name in read else None
            may_copy = entry.saved or entry.donated or entry.name not in seen
            has_memory = entry.name not in later
            found[entry.name] = Keeper(program.name, entry.name, entry.type, dtype, may_copy, has_memory)
    return found


def keeping(program: HostProgram, in_place: Written) -> Callable[[list[Any]], None] | None:
    """A function that puts a list of arguments in order for a program that runs in Python; None if it reads none of
    them by its address."""
    keepers = keepers_of(program, _read_by_kernels(program), in_place)
    wanted = [_Wanted(entry) for entry in program.inputs]
    numbers = [(position, each) for position, each in enumerate(wanted) if each.is_number]
    kept = [
        (position, each, keeper)
        for position, each in enumerate(wanted)
        if (keeper := keepers.get(each.entry.name)) is not None and keeper.dtype is not None
    ]
    if not kept:
        return None

    def keep(args: list[Any]) -> None:
        if len(args) != len(wanted):
            raise TypeError(f"{program.name} takes {len(wanted)} arguments, found {len(args)}")
        known: Known = {}
        for position, each in numbers:
            each.differs(args[position], known, ())
        for position, each, keeper in kept:
            args[position] = keeper.keep(args[position], *each.shape_of(args[position], known))

    return keep


def _read_by_kernels(program: HostProgram) -> set[str]:
    """Names of what kernels read, and of what that is a view of."""
    read: set[str] = set()
    for step in reversed(program.steps):
        if isinstance(step, Launch):
            read.update(step.buffers)
        elif isinstance(step, Call) and step.target in VIEWS and step.result in read:
            read.update(refs(step.args[0]))
    return read


def _filled_later(program: HostProgram) -> set[str]:
    """Inputs of which no step reads or writes elements before a call that gives a storage another size: sharded
    training hands in freed parameters, which the program fills. Nothing says which inputs share that storage, so this
    holds for all. What is read behind the call is looked at there."""
    if not any(isinstance(step, Call) and changes_storage(step) for step in program.steps):
        return set()
    memory = {entry.name: {entry.name} for entry in program.inputs if not entry.is_number}
    unread = {*memory}
    for step in program.steps:
        match step:
            case Call() if changes_storage(step):
                break
            case Call():
                operands = set[str]().union(*(memory.get(name, ()) for name in refs((step.args, step.kwargs))))
                if not _reads_no_elements(step):
                    unread -= operands
                memory[step.result] = operands
            case Launch():
                unread -= set[str]().union(*(memory.get(name, ()) for name in step.buffers))
    return unread


def _reads_no_elements(call: Call) -> bool:
    """Whether a call takes a part of a list, makes a view, or asks for a size."""
    if call.target == PART:
        return True
    schema = getattr(resolve(call.target), "_schema", None)
    if schema is None:
        return False
    aliases = [result.alias_info for result in schema.returns]
    return schema.name.startswith("aten::sym_") or any(each is not None and not each.is_write for each in aliases)


def checking_memory(program: HostProgram, kernels: Mapping[str, Kernel]) -> dict[str, Kernel]:
    """The kernels for a program that runs in Python. Those that are launched behind a call that may give storages other
    memory look at the memory of their arguments first."""
    checked = dict(kernels)
    for part in (*program.functions, program):
        moved = False
        for step in part.steps:
            if isinstance(step, Launch) and moved:
                checked[step.kernel] = check_memory(step.kernel, program.name, kernels[step.kernel])
            moved = moved or (isinstance(step, Call) and may_move_memory(step))
    return checked


def check_memory(name: str, program: str, kernel: Kernel) -> Kernel:
    """A kernel that raises for a tensor whose elements are not all in memory."""

    def run(*arguments: Any) -> None:
        for each in arguments:
            if isinstance(each, torch.Tensor) and (why := why_no_memory(each)):
                raise RuntimeError(f"The memory of an argument of {name} in {program} is gone: {why}")
        kernel(*arguments)

    return run


def _seen_by_others(program: HostProgram, in_place: Written) -> set[str]:
    """Names whose memory others may look at after the call, or know to be the same: of results, of what is written, and
    of what those are made of by some step, which may be views."""
    seen: set[str] = set()
    for step in reversed(program.steps):
        match step:
            case Return():
                seen.update(refs(step.value))
            case Launch():
                seen.update(step.buffers[place] for place in in_place.get(step.kernel, ()))
            case Call() if step.target != ALLOCATE and (step.result in seen or not _only_reads(step)):
                seen.update(refs((step.args, step.kwargs)))
    return seen


def _only_reads(call: Call) -> bool:
    """Whether a call is of an operator of PyTorch that writes to nothing."""
    if call.target == HOLD or not call.target.startswith(("aten.", "prims.", "operator.", "builtins.")):
        return call.target == HOLD
    return not getattr(getattr(resolve(call.target), "_schema", None), "is_mutable", False)


# ---- guards

Guard = Callable[[Mapping[Atom, int]], bool]

_RELATIONS: dict[str | type[ast.cmpop], Callable[[int, int], bool]] = {
    "Eq": operator.eq, "Ne": operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}  # fmt: skip


def _read_guard(text: str) -> Guard | None:
    """A function of the sizes; None if the text is no relation of two of them."""
    try:
        node = ast.parse(text, mode="eval").body
        match node:
            case ast.Call(func=ast.Name(id="Eq" | "Ne" as name), args=[left, right]):
                return _relation(_RELATIONS[name], read_size(left), read_size(right))
            case ast.Compare(left=left, ops=[kind], comparators=[right]) if type(kind) in _RELATIONS:
                return _relation(_RELATIONS[type(kind)], read_size(left), read_size(right))
    except (SyntaxError, Unsupported):
        pass
    return None


def _relation(holds: Callable[[int, int], bool], left: Index, right: Index) -> Guard:
    atoms = free_atoms(left) | free_atoms(right)

    def guard(known: Mapping[Atom, int]) -> bool:
        if not atoms <= known.keys():
            return True
        try:
            return holds(evaluate(left, known), evaluate(right, known))
        except ZeroDivisionError:
            return False

    return guard
