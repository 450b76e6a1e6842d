"""The border between ShapeEnv and the index algebra: symbolic sizes come in as `Index`.

What ShapeEnv knows comes in with a symbol: its range as the bounds of a `Size`; equalities, because expressions are
read after its replacements; divisibility, because a symbol that 8 divides is read as `8*(s0 // 8)`. This is the one
place where sympy is met.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import reduce
from typing import TYPE_CHECKING, Any, TypeAlias

import sympy
import torch
from torch.utils._sympy import functions

from ferrite.errors import Unsupported
from ferrite.loops import index as indices
from ferrite.loops.index import Index, Size, known_nonnegative, of_atom

if TYPE_CHECKING:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

Symbolic: TypeAlias = "int | torch.SymInt | sympy.Expr"

MOST_POWERS = 16  # s0**16 is no size
UNBOUNDED = 1 << 62  # ShapeEnv's way of saying "up to what an i64 holds"


class Sizes:
    """Sizes of one graph as indices. What was read once is looked up until ShapeEnv learns something; a symbol keeps
    the bounds with which it was first met, so that it is one `Size` throughout a program."""

    def __init__(self, shape_env: ShapeEnv | None = None) -> None:
        self._env = shape_env
        self._sizes: dict[sympy.Symbol, Size] = {}
        self._symbols: dict[str, sympy.Symbol] = {}
        self._read: dict[sympy.Expr, Index] = {}
        self._version: object = None
        self._extents: set[sympy.Symbol] = set()  # sizes of tensors

    def note_extents(self, extents: Iterable[Symbolic]) -> None:
        """Note sizes of tensors, so none is negative. ShapeEnv may not know it of a number that was given as a size:
        the other sizes of a tensor without elements are never compared."""
        for extent in extents:
            if isinstance(extent, torch.SymInt) and isinstance(extent.node.expr, sympy.Symbol):
                self._extents.add(extent.node.expr)

    def index(self, value: Symbolic) -> Index:
        """The size as an index. `Unsupported` if the algebra has no form for it."""
        if isinstance(value, int):
            return indices.constant(value)
        if self._is_guarded_one(value):
            return indices.ONE
        return self._expression(_as_sympy(value))

    def indices(self, values: Iterable[Symbolic]) -> tuple[Index, ...]:
        return tuple(map(self.index, values))

    def sizes(self) -> tuple[Size, ...]:
        """Every run-time size met so far, in the order of their meeting."""
        return tuple(self._sizes.values())

    def symbol(self, size: Size) -> sympy.Symbol:
        """The symbol that a size stands for."""
        return self._symbols[size.name]

    def _expression(self, value: sympy.Expr) -> Index:
        version = getattr(self._env, "_version_counter", None)
        if version != self._version:
            self._read.clear()
            self._version = version
        found = self._read.get(value)
        if found is None:
            simple = value if self._env is None else self._env.replace(value)
            found = self._read[value] = self._form(simple)
        return found

    def _is_guarded_one(self, value: Symbolic) -> bool:
        """Whether a computed size is one by a guard that no bound or replacement tells of: tracing has stretched it.
        ShapeEnv is handed its guards, because it keeps answers that it gave when it had fewer."""
        if self._env is None or not isinstance(value, torch.SymInt) or value.node.hint != 1:
            return False
        expression = value.node.expr
        if isinstance(expression, (sympy.Symbol, sympy.Integer)):
            return False
        guards = tuple(guard.expr for guard in self._env.guards)
        return self._env._maybe_evaluate_static(sympy.Eq(expression, 1), axioms=guards) == sympy.true

    def _form(self, value: sympy.Expr) -> Index:
        if isinstance(value, sympy.Symbol):
            return self._symbol(value)
        if isinstance(value, sympy.Integer):
            return indices.constant(int(value))
        build = _FORMS.get(type(value))
        if build is None:
            raise _no_form(value)
        return build(self, value)

    def _symbol(self, symbol: sympy.Symbol) -> Index:
        if not symbol.is_integer:
            raise Unsupported(f"size {symbol} is not an integer", why="indices are integers")
        step = self._known_divisor(symbol)
        size = self._sizes.get(symbol)
        if size is None:
            low, high = self._range(symbol)
            # A multiple of 8 that is at least 2 is at least 8.
            size = Size(str(symbol), low if low is None else -(-low // step) * step, high)
            self._sizes[symbol], self._symbols[size.name] = size, symbol
        if size.low is not None and size.low == size.high:
            return indices.constant(size.low)
        whole = of_atom(size)
        return whole if step == 1 else step * indices.floordiv(whole, step)

    def _range(self, symbol: sympy.Symbol) -> tuple[int | None, int | None]:
        known = None if self._env is None else self._env.var_to_range.get(symbol)
        low = _number(known.lower) if known is not None else None
        high = _number(known.upper) if known is not None else None
        if low is None and symbol.is_nonnegative:
            low = 1 if symbol.is_positive else 0
        if symbol in self._extents:
            low = max(low or 0, 0)
        return low, high

    def _known_divisor(self, symbol: sympy.Symbol) -> int:
        """The largest number that ShapeEnv knows to divide the symbol."""
        result = 1
        for fact in self._env.divisible if self._env is not None else ():
            if isinstance(fact, (functions.Mod, functions.PythonMod)):
                value, step = fact.args
                if value == symbol and isinstance(step, sympy.Integer) and step > 0:
                    result = math.lcm(result, int(step))
        return result


def _as_sympy(value: torch.SymInt | sympy.Expr) -> sympy.Expr:
    if isinstance(value, torch.SymInt):
        return value.node.expr
    if isinstance(value, sympy.Expr):
        return value
    raise Unsupported(f"a size of type {type(value).__name__}", why=f"{value} is neither an int nor a symbolic one")


def _number(bound: Any) -> int | None:
    """A bound of a range as a number; None where it is infinite."""
    try:
        number = int(bound)
    except (TypeError, ValueError, OverflowError, AttributeError):
        return None
    return number if abs(number) < UNBOUNDED else None


def _no_form(value: sympy.Expr) -> Unsupported:
    return Unsupported(
        f"size {value}", why=f"{type(value).__name__} has no form in sums, products, divisions, minima and maxima"
    )


# ---- forms


def _sum(sizes: Sizes, value: sympy.Expr) -> Index:
    return indices.total(sizes._form(part) for part in value.args)


def _product(sizes: Sizes, value: sympy.Expr) -> Index:
    return indices.product(sizes._form(part) for part in value.args)


def _power(sizes: Sizes, value: sympy.Expr) -> Index:
    base, exponent = value.args
    if not isinstance(exponent, sympy.Integer) or not 0 <= exponent <= MOST_POWERS:
        raise _no_form(value)
    return indices.product([sizes._form(base)] * int(exponent))


def _of_two(build: Callable[[Index, Index], Index]) -> Callable[[Sizes, sympy.Expr], Index]:
    def form(sizes: Sizes, value: sympy.Expr) -> Index:
        left, right = value.args
        return build(sizes._form(left), sizes._form(right))

    return form


def _of_many(build: Callable[[Index, Index], Index]) -> Callable[[Sizes, sympy.Expr], Index]:
    def form(sizes: Sizes, value: sympy.Expr) -> Index:
        kept: list[Index] = []
        # Arguments of Max and Min come in no particular order. One that never wins against another is left out.
        for part in (sizes._form(part) for part in sorted(value.args, key=str)):
            if not any(build(other, part) is other for other in kept):
                kept = [other for other in kept if build(other, part) is not part] + [part]
        return reduce(build, kept)

    return form


def _modular_indexing(sizes: Sizes, value: sympy.Expr) -> Index:
    base, divisor, modulus = (sizes._form(part) for part in value.args)
    return indices.mod(indices.floordiv(base, divisor), modulus)


def _shift(sizes: Sizes, value: sympy.Expr) -> Index:
    base, by = value.args
    if not isinstance(by, sympy.Integer) or not 0 <= by < 63:
        raise _no_form(value)
    step = 1 << int(by)
    move = indices.multiply if isinstance(value, functions.LShift) else indices.floordiv
    return move(sizes._form(base), step)


def _identity(sizes: Sizes, value: sympy.Expr) -> Index:
    return sizes._form(value.args[0])


def _absolute(sizes: Sizes, value: sympy.Expr) -> Index:
    inner = sizes._form(value.args[0])
    return indices.maximum(inner, -inner)


def _choice(sizes: Sizes, value: sympy.Expr) -> Index:
    """Only where the bounds decide it."""
    condition, yes, no = value.args
    decided = _decided(sizes, condition)
    if decided is None:
        raise _no_form(value)
    return sizes._form(yes if decided else no)


def _decided(sizes: Sizes, condition: Any) -> bool | None:
    if condition in (sympy.true, sympy.false):
        return bool(condition)
    if isinstance(condition, (sympy.Eq, sympy.Ne)):
        left, right = (sizes._form(part) for part in condition.args)
        equal = True if indices.known_equal(left, right) else _apart(left, right)
        return equal if equal is None else equal == isinstance(condition, sympy.Eq)
    if isinstance(condition, (sympy.Lt, sympy.Le, sympy.Gt, sympy.Ge)):
        left, right = (sizes._form(part) for part in condition.args)
        if isinstance(condition, (sympy.Gt, sympy.Ge)):
            left, right = right, left
        strict = isinstance(condition, (sympy.Lt, sympy.Gt))
        if known_nonnegative(right - left - strict):
            return True
        return False if known_nonnegative(left - right - (not strict)) else None
    return None


def _apart(left: Index, right: Index) -> bool | None:
    """False if the two are known to differ."""
    return False if known_nonnegative(left - right - 1) or known_nonnegative(right - left - 1) else None


_FORMS: dict[type, Callable[[Sizes, sympy.Expr], Index]] = {
    sympy.Add: _sum,
    sympy.Mul: _product,
    sympy.Pow: _power,
    sympy.Abs: _absolute,
    functions.PowByNatural: _power,
    functions.FloorDiv: _of_two(indices.floordiv),
    functions.CleanDiv: _of_two(indices.floordiv),
    functions.CeilDiv: _of_two(indices.ceildiv),
    # Mod promises operands that are not negative: there it is Python's remainder.
    functions.Mod: _of_two(indices.mod),
    functions.PythonMod: _of_two(indices.mod),
    functions.ModularIndexing: _modular_indexing,
    functions.LShift: _shift,
    functions.RShift: _shift,
    functions.Max: _of_many(indices.maximum),
    functions.Min: _of_many(indices.minimum),
    sympy.Max: _of_many(indices.maximum),
    sympy.Min: _of_many(indices.minimum),
    functions.Where: _choice,
    functions.Identity: _identity,
}
