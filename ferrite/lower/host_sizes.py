"""Sizes at run time: where the host finds each symbol, and the steps that compute what is made of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ferrite.errors import Unsupported
from ferrite.host.nodes import Call, Launch
from ferrite.loops.index import Atom, FloorDiv, Index, Least, Mod, Most, Size, free_atoms
from ferrite.lower.sizes import Sizes
from ferrite.syntax import Ref


class HostSizes:
    """The sizes that the host of one graph knows or has computed. Steps that compute more are added to `steps`."""

    def __init__(self, sizes: Sizes, steps: list[Call | Launch], fresh: Callable[[str], str]) -> None:
        self._sizes, self._steps, self._fresh = sizes, steps, fresh
        self._symbols: dict[Size, tuple[str, int | None]] = {}  # symbol -> host value that is it, or has it as a size
        self._computed: dict[Index, Any] = {}

    def learn(self, name: str, fake: Any) -> None:
        """A value that now exists on the host: it is a symbol, or a tensor that has symbols as sizes."""
        if isinstance(fake, torch.SymInt):
            self._learn(fake, name, None)
        elif isinstance(fake, torch.Tensor) and fake.layout == torch.strided:
            for dim, extent in enumerate(fake.shape):
                if isinstance(extent, torch.SymInt):
                    self._learn(extent, name, dim)

    def _learn(self, extent: torch.SymInt, name: str, dim: int | None) -> None:
        """Only of what is the symbol itself, whatever else is known to be equal to it."""
        if not extent.node._expr.is_symbol:
            return
        try:
            atom = _only_size(self._sizes.index(extent))
        except Unsupported:
            return
        if atom is not None and (atom not in self._symbols or (dim is None and self._symbols[atom][1] is not None)):
            self._symbols[atom] = (name, dim)

    def knows(self, extent: Index) -> bool:
        return all(atom in self._symbols for atom in free_atoms(extent))

    def value(self, extent: Index) -> Any:
        """A size as a literal, or as a name that the host has computed."""
        if not extent.terms:
            return extent.constant
        known = self._computed.get(extent)
        if known is None:
            known = self._computed[extent] = self._compute(extent)
        return known

    def _compute(self, extent: Index) -> Any:
        terms = [self._product(coefficient, monomial) for coefficient, monomial in extent.terms]
        if extent.constant:
            terms.append(extent.constant)
        value = terms[0]
        for term in terms[1:]:
            value = self._call("operator.add", (value, term))
        return value

    def _product(self, coefficient: int, monomial: tuple[Atom, ...]) -> Any:
        value: Any = None
        for atom in monomial:
            factor = self._atom(atom)
            value = factor if value is None else self._call("operator.mul", (value, factor))
        return value if coefficient == 1 else self._call("operator.mul", (value, coefficient))

    def _atom(self, atom: Atom) -> Any:
        match atom:
            case Size():
                if atom not in self._symbols:
                    raise Unsupported(f"the size {atom.name}, which nothing on the host knows")
                name, dim = self._symbols[atom]
                return Ref(name) if dim is None else self._call("aten.sym_size.int", (Ref(name), dim))
            case FloorDiv(dividend=a, divisor=b):
                return self._call("operator.floordiv", (self.value(a), self.value(b)))
            case Mod(dividend=a, divisor=b):
                return self._call("operator.mod", (self.value(a), self.value(b)))
            case Least(left=a, right=b):
                return self._call("builtins.min", (self.value(a), self.value(b)))
            case Most(left=a, right=b):
                return self._call("builtins.max", (self.value(a), self.value(b)))
        raise Unsupported(f"the size {atom}, which depends on a loop")

    def _call(self, target: str, args: tuple[Any, ...]) -> Ref:
        name = self._fresh("size")
        self._steps.append(Call(name, target, args, {}))
        return Ref(name)


def _only_size(extent: Index) -> Size | None:
    """The symbol that a size is; one that 8 divides is read as 8*(s0 // 8), and is the symbol all the same."""
    match extent:
        case Index(constant=0, terms=((1, (Size() as atom,)),)):
            return atom
        case Index(constant=0, terms=((step, (FloorDiv(dividend=whole, divisor=divisor),)),)):
            return _only_size(whole) if divisor.constant == step and not divisor.terms else None
    return None
