"""Whether arguments are what a program was compiled for.

Dynamo's guards have answered that before they call a compiled graph, so what AOTAutograd keeps does not ask again. Who
calls a graph directly is told here what does not fit, before anything is written.

Sizes that change have to satisfy what the trace assumed of them: that one is even, that two differ. PyTorch keeps these
guards; `assumptions` writes down those that a graph can be asked for, and the checker asks.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from ferrite.artifact.host_values import Shape, contiguous, read_size
from ferrite.errors import Unsupported
from ferrite.graph.text import show_type, split_type
from ferrite.host.nodes import HostProgram, Input
from ferrite.loops.index import Atom, Index, evaluate, free_atoms, show_atom

Known = dict[Atom, int]  # symbols that an argument has fixed


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
        self.is_number = entry.type.startswith("Sym(")
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


def _fits(wanted: Index, found: int, known: Known) -> bool:
    """Whether a number is the wanted one; a symbol that nothing has fixed yet is fixed by it."""
    unknown = [atom for atom in free_atoms(wanted) if atom not in known]
    if not unknown:
        return evaluate(wanted, known) == found
    if wanted.terms == ((1, (unknown[0],)),) and not wanted.constant:
        known[unknown[0]] = found
    return True


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
