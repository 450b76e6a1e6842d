"""Whether arguments are what a program was compiled for.

Dynamo's guards have answered that before they call a compiled graph, so what AOTAutograd keeps does not ask again. Who
calls a graph directly is told here what does not fit, before anything is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ferrite.artifact.host_values import Shape, contiguous, read_size
from ferrite.errors import Unsupported
from ferrite.graph.text import show_type, split_type
from ferrite.host.nodes import HostProgram, Input
from ferrite.loops.index import Atom, Index, evaluate, free_atoms

Known = dict[Atom, int]  # symbols that an argument has fixed


def checker(program: HostProgram, device_types: Sequence[str]) -> Callable[[Any], None]:
    """A function that raises for a list of arguments that the program was not compiled for."""
    wanted = [_Wanted(entry) for entry in program.inputs]

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
