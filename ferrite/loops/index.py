"""Index arithmetic: where a loop reads and writes, and how many times it runs.

An `Index` is a polynomial with integer coefficients in normal form: a constant plus terms, each a coefficient times a
product of atoms. Atoms are loop variables (`Axis`), sizes known at run time (`Size`), floor-divisions, remainders,
minima, maxima, and values read from data (`Data`). Normal forms are interned: two indices that simplify to the same
polynomial are the same object. Bounds of atoms decide what can be simplified. Two things are assumed and nothing else:
an axis lies within its extent, and a divisor is not zero (where it is, no point of a loop needs the index).

Floor-division and remainder follow Python: the remainder has the sign of the divisor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import pairwise
from typing import Any, ClassVar, TypeAlias, Union

from ferrite.loops.intern import Interned

Bound: TypeAlias = "int | None"  # None: no bound known on that side


class Node(metaclass=Interned):
    """What indices and expressions share: a place in memory of their own, weak references to it, and answers that are
    worked out once and kept for as long as the node lives."""

    __slots__ = (
        "__weakref__", "_accesses", "_axes", "_children", "_data", "_digest", "_dtype", "_free", "_high",
        "_holds_argument", "_inside", "_key", "_loaded", "_low", "_names", "_raises",
    )  # fmt: skip

    _accesses: tuple[Any, ...]
    _axes: frozenset[Axis]
    _children: tuple[Any, ...]
    _data: bool
    _digest: bytes
    _dtype: Any
    _free: frozenset[Atom]
    _high: Bound
    _holds_argument: bool
    _inside: tuple[Any, ...]
    _key: tuple[Any, ...]
    _loaded: frozenset[Any]
    _low: Bound
    _names: frozenset[str]
    _raises: bool


keep = object.__setattr__  # frozen nodes still keep what was worked out about them


@dataclass(frozen=True, slots=True, eq=False)
class Axis(Node):
    """A loop variable: 0 <= axis < extent. Two loops that bind the same name and extent bind the same axis.

    text:   i
    """

    name: str
    extent: Index

    plain: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, eq=False)
class Size(Node):
    """A size known at run time, within bounds.

    text:   s0
    """

    name: str
    low: Bound = None
    high: Bound = None


@dataclass(frozen=True, slots=True, eq=False)
class FloorDiv(Node):
    """text:   (4*i + j) // 6"""

    dividend: Index
    divisor: Index

    plain: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, eq=False)
class Mod(Node):
    """text:   (4*i + j) % 6"""

    dividend: Index
    divisor: Index

    plain: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, eq=False)
class Least(Node):
    """text:   min(i, s0 - 1)"""

    left: Index
    right: Index

    plain: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, eq=False)
class Most(Node):
    """text:   max(i, 0)"""

    left: Index
    right: Index

    plain: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, eq=False)
class Data(Node):
    """An index read from data, already checked: low <= value <= high. `value` is an expression of `nodes`.

    text:   at(indices[i], 0, 9)
    """

    value: Any
    low: Index
    high: Index


Atom: TypeAlias = Union[Axis, Size, FloorDiv, Mod, Least, Most, Data]  # noqa: UP007
Monomial: TypeAlias = "tuple[Atom, ...]"
IndexLike: TypeAlias = "Index | int"


@dataclass(frozen=True, slots=True, eq=False)
class Index(Node):
    """A polynomial in normal form. Build with arithmetic, not by hand.

    check:  terms are in order (`in_order`); no coefficient is zero; no monomial occurs twice or is empty
    """

    constant: int
    terms: tuple[tuple[int, Monomial], ...]

    plain: ClassVar[bool] = True

    def __add__(self, other: IndexLike) -> Index:
        return add(self, other)

    def __radd__(self, other: int) -> Index:
        return add(self, other)

    def __sub__(self, other: IndexLike) -> Index:
        return subtract(self, other)

    def __rsub__(self, other: int) -> Index:
        return subtract(other, self)

    def __neg__(self) -> Index:
        return multiply(self, -1)

    def __mul__(self, other: IndexLike) -> Index:
        return multiply(self, other)

    def __rmul__(self, other: int) -> Index:
        return multiply(self, other)

    def __floordiv__(self, other: IndexLike) -> Index:
        return floordiv(self, other)

    def __rfloordiv__(self, other: int) -> Index:
        return floordiv(other, self)

    def __mod__(self, other: IndexLike) -> Index:
        return mod(self, other)

    def __rmod__(self, other: int) -> Index:
        return mod(other, self)

    def __str__(self) -> str:
        return show_index(self)

    def __repr__(self) -> str:
        return f"<{show_index(self)}>"


# ---- building

# Results of arithmetic are kept for a while: the same few indices meet again and again while a graph is lowered.
kept_for_a_while = lru_cache(maxsize=1 << 15)


@kept_for_a_while
def constant(value: int) -> Index:
    return Index(int(value), ())


ZERO, ONE = constant(0), constant(1)


def index(value: IndexLike) -> Index:
    """The value as an index. A symbolic integer of PyTorch is refused: `int()` of it would silently fix its value."""
    if isinstance(value, Index):
        return value
    if isinstance(value, int):
        return constant(int(value))
    raise TypeError(f"expected an Index or an int, found {type(value).__name__}: {value}")


def of_atom(atom: Atom) -> Index:
    return Index(0, ((1, (atom,)),))


def axis(name: str, extent: IndexLike) -> Index:
    return of_atom(Axis(name, index(extent)))


def size(name: str, low: Bound = 0, high: Bound = None) -> Index:
    if low is not None and low == high:
        return constant(low)
    return of_atom(Size(name, low, high))


def data(value: Any, low: IndexLike, high: IndexLike) -> Index:
    return of_atom(Data(value, index(low), index(high)))


def add(left: IndexLike, right: IndexLike) -> Index:
    left, right = index(left), index(right)
    if not right.terms:
        return Index(left.constant + right.constant, left.terms) if right.constant else left
    if not left.terms:
        return Index(left.constant + right.constant, right.terms) if left.constant else right
    return _add(left, right)


@kept_for_a_while
def _add(left: Index, right: Index) -> Index:
    coefficients = _coefficients(left)
    for coefficient, monomial in right.terms:
        coefficients[monomial] = coefficients.get(monomial, 0) + coefficient
    return _normal(left.constant + right.constant, coefficients)


def subtract(left: IndexLike, right: IndexLike) -> Index:
    return ZERO if left is right else add(left, multiply(right, -1))


def total(parts: Iterable[IndexLike]) -> Index:
    result = ZERO
    for part in parts:
        result = add(result, part)
    return result


def multiply(left: IndexLike, right: IndexLike) -> Index:
    left, right = index(left), index(right)
    if not right.terms:
        left, right = right, left
    if left.terms:
        return _multiply(left, right)
    factor = left.constant
    if factor == 1:
        return right
    if factor == 0:
        return ZERO
    return _multiply_by_number(factor, right)


@kept_for_a_while
def _multiply_by_number(factor: int, value: Index) -> Index:
    return Index(factor * value.constant, tuple((factor * c, m) for c, m in value.terms))


@kept_for_a_while
def _multiply(left: Index, right: Index) -> Index:
    product = _product(left, right)
    return _normal(product.constant, _coefficients(product))


def product(parts: Iterable[IndexLike]) -> Index:
    result = ONE
    for part in parts:
        result = multiply(result, part)
    return result


def _term(coefficient: int, monomial: Monomial) -> Index:
    if not monomial:
        return Index(coefficient, ())
    return Index(0, ((coefficient, monomial),)) if coefficient else ZERO


def _coefficients(value: Index) -> dict[Monomial, int]:
    return {monomial: coefficient for coefficient, monomial in value.terms}


def _product(left: Index, right: Index) -> Index:
    """The product, term by term, without looking for remainders to put together."""
    coefficients: dict[Monomial, int] = {}
    for a, m in (*left.terms, (left.constant, ())):
        for b, n in (*right.terms, (right.constant, ())):
            if a and b:
                monomial = tuple(sorted((*m, *n), key=_atom_key)) if m and n else m or n
                coefficients[monomial] = coefficients.get(monomial, 0) + a * b
    return _in_order(coefficients.pop((), 0), coefficients)


# ---- normal form


def _normal(constant_part: int, coefficients: dict[Monomial, int]) -> Index:
    """Normal form, with the parts of a division put together again."""
    if len(coefficients) > 1 and any(type(atom) in _DIVISIONS for monomial in coefficients for atom in monomial):
        joined = _join_division(constant_part, {m: c for m, c in coefficients.items() if c})
        if joined is not None:
            return joined
    return _in_order(constant_part, coefficients)


def _in_order(constant_part: int, coefficients: Mapping[Monomial, int]) -> Index:
    terms = [(coefficient, monomial) for monomial, coefficient in coefficients.items() if coefficient]
    if len(terms) > 1:
        terms.sort(key=_term_key)
    return Index(constant_part, tuple(terms))


def in_order(value: Index) -> bool:
    """Whether terms stand in their order, none is zero, empty or there twice."""
    keys = [_term_key(term) for term in value.terms]
    return all(c and m for c, m in value.terms) and all(a < b for a, b in pairwise(keys))


_DIVISIONS = (FloorDiv, Mod)


def _join_division(constant_part: int, live: dict[Monomial, int]) -> Index | None:
    """Note [Joining a division]. With q = x // d and r = x % d, d*q + r = x, and so for any factor k

        k*d*q + k*r  ->  k*x            k*x - k*d*q  ->  k*r            k*x - k*r  ->  k*d*q

    The terms on the left must stand there as they are (the constant may differ). Each step leaves fewer divisions or
    fewer terms, so this ends. It is no more than that: 3*r + 4*d*q is left alone, and `known_equal` knows that
    it is 3*x + d*q.
    """
    if len(live) < 2:
        return None
    for monomial in sorted(live, key=_monomial_key):
        for atom in dict.fromkeys(monomial):
            if not isinstance(atom, _DIVISIONS):
                continue
            step = (_join_at_mod if isinstance(atom, Mod) else _join_at_floordiv)(live, monomial, atom)
            if step is not None:
                taken, given = step
                return _normal(constant_part + given.constant - taken.constant, _exchange(live, taken, given))
    return None


def _join_at_mod(live: Mapping[Monomial, int], monomial: Monomial, atom: Atom) -> tuple[Index, Index] | None:
    assert isinstance(atom, Mod)
    factor = _term(live[monomial], _without(monomial, (atom,)) or ())
    divided = any(type(other) is FloorDiv for m in live for other in m)
    dividend = None
    if divided:
        quotient = _product(_product(factor, atom.divisor), floordiv(atom.dividend, atom.divisor))
        if quotient.terms and _stands(live, quotient):
            dividend = _product(factor, atom.dividend)
            return _raw_add(_term(live[monomial], monomial), quotient), dividend
    if _lead_stands(live, factor, atom.dividend):
        minus = _product(factor, _product(atom.dividend, constant(-1)))
        if _stands(live, minus):
            quotient = _product(_product(factor, atom.divisor), floordiv(atom.dividend, atom.divisor))
            if len(quotient.terms) <= len(minus.terms):
                return _raw_add(_term(live[monomial], monomial), minus), _product(quotient, constant(-1))
    return None


def _join_at_floordiv(live: Mapping[Monomial, int], monomial: Monomial, atom: Atom) -> tuple[Index, Index] | None:
    assert isinstance(atom, FloorDiv)
    step, factors = atom.divisor.terms[0] if atom.divisor.terms else (atom.divisor.constant, ())
    rest = _without(monomial, (atom, *factors))
    if rest is None or not step or live[monomial] % step:
        return None
    factor = _term(-live[monomial] // step, rest)
    if not _lead_stands(live, factor, atom.dividend):
        return None
    whole = _product(factor, atom.dividend)
    quotient = _product(_product(factor, _product(atom.divisor, constant(-1))), of_atom(atom))
    if not _stands(live, whole) or not _stands(live, quotient):
        return None
    return _raw_add(whole, quotient), _product(factor, mod(atom.dividend, atom.divisor))


def _stands(live: Mapping[Monomial, int], value: Index) -> bool:
    return all(live.get(monomial) == coefficient for coefficient, monomial in value.terms)


def _lead_stands(live: Mapping[Monomial, int], factor: Index, dividend: Index) -> bool:
    """Whether a first look finds the dividend: a cheap way to say no."""
    return bool(dividend.terms) and _product(factor, _term(1, dividend.terms[0][1])).terms[0][1] in live


def _raw_add(left: Index, right: Index) -> Index:
    coefficients = _coefficients(left)
    for coefficient, monomial in right.terms:
        coefficients[monomial] = coefficients.get(monomial, 0) + coefficient
    return _in_order(left.constant + right.constant, coefficients)


def _exchange(live: Mapping[Monomial, int], taken: Index, given: Index) -> dict[Monomial, int]:
    left = dict(live)
    for coefficient, monomial in taken.terms:
        left[monomial] = left.get(monomial, 0) - coefficient
    for coefficient, monomial in given.terms:
        left[monomial] = left.get(monomial, 0) + coefficient
    return left


def _without_mods(value: Index) -> Index:
    """Every remainder written as dividend - divisor * quotient: equal values then have one form."""
    result = constant(value.constant)
    for coefficient, monomial in value.terms:
        term = constant(coefficient)
        for atom in monomial:
            if isinstance(atom, Mod):
                taken = _product(_product(atom.divisor, constant(-1)), floordiv(atom.dividend, atom.divisor))
                term = _product(term, _without_mods(_raw_add(atom.dividend, taken)))
            else:
                term = _product(term, of_atom(atom))
        result = _raw_add(result, term)
    return result


# ---- order: depends on the program only, never on where a node lies in memory


def _term_key(term: tuple[int, Monomial]) -> tuple[Any, ...]:
    return _monomial_key(term[1])


@kept_for_a_while
def _monomial_key(monomial: Monomial) -> tuple[Any, ...]:
    return (-len(monomial), *map(_atom_key, monomial))


def _atom_key(atom: Atom) -> tuple[Any, ...]:
    """Axes first, then sizes, then the rest; by name, then by what else tells two of one name apart."""
    try:
        return atom._key
    except AttributeError:
        key = _atom_order(atom)
        keep(atom, "_key", key)
        return key


def _atom_order(atom: Atom) -> tuple[Any, ...]:
    match atom:
        case Axis(name=name, extent=extent):
            return (0, name, _index_key(extent))
        case Size(name=name, low=low, high=high):
            return (1, name, low is None, low or 0, high is None, high or 0)
        case FloorDiv(dividend=a, divisor=b):
            return (2, _index_key(a), _index_key(b))
        case Mod(dividend=a, divisor=b):
            return (3, _index_key(a), _index_key(b))
        case Least(left=a, right=b):
            return (4, _index_key(a), _index_key(b))
        case Most(left=a, right=b):
            return (5, _index_key(a), _index_key(b))
        case Data():
            return (6, digest(atom))


def _index_key(value: Index) -> tuple[Any, ...]:
    try:
        return value._key
    except AttributeError:
        key = (tuple((_monomial_key(m), c) for c, m in value.terms), value.constant)
        keep(value, "_key", key)
        return key


def digest(node: Node) -> bytes:
    """A fingerprint of the structure, the same in every process."""
    found: bytes = answer(node, "_digest", _digest_of)
    return found


def _digest_of(node: Node) -> bytes:
    state = blake2b(type(node).__name__.encode(), digest_size=16)
    for field in _fields(node):
        state.update(_field_bytes(field))
    return state.digest()


def _field_bytes(value: Any) -> bytes:
    if isinstance(value, Node):
        return b"n" + value._digest
    if isinstance(value, tuple):
        return b"(%d:" % len(value) + b"".join(map(_field_bytes, value))
    text = value.hex() if isinstance(value, float) else str(value)
    return f"{type(value).__name__}:{len(text)}:{text};".encode()


def _fields(node: Node) -> list[Any]:
    return [getattr(node, name) for name in type(node).__match_args__]  # type: ignore[attr-defined]


def inner_nodes(node: Node) -> list[Node]:
    """The nodes in the fields of a node of any kind, in order."""
    found: list[Node] = []
    waiting = _fields(node)[::-1]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Node):
            found.append(value)
        elif isinstance(value, tuple):
            waiting.extend(reversed(value))
    return found


def answer(
    node: Node, slot: str, work_out: Callable[[Any], Any], inside: Callable[[Any], Iterable[Node]] = inner_nodes
) -> Any:
    """What the slot keeps, worked out for the nodes inside first. Without recursion: expressions can be deep."""
    if hasattr(node, slot):
        return getattr(node, slot)
    waiting = [node]
    while waiting:
        last = waiting[-1]
        open_ones = [] if hasattr(last, slot) else [inner for inner in inside(last) if not hasattr(inner, slot)]
        if open_ones:
            waiting.extend(open_ones)
            continue
        waiting.pop()
        if not hasattr(last, slot):
            keep(last, slot, work_out(last))
    return getattr(node, slot)


# ---- division


def floordiv(dividend: IndexLike, divisor: IndexLike) -> Index:
    """dividend // divisor, with every part that divides evenly or cannot matter taken out."""
    dividend, divisor = index(dividend), index(divisor)
    if divisor is ONE:
        return dividend
    if not dividend.terms and not divisor.terms and divisor.constant:
        return constant(dividend.constant // divisor.constant)
    return _floordiv(dividend, divisor)


@kept_for_a_while
def _floordiv(dividend: Index, divisor: Index) -> Index:
    sign = _sign(divisor)
    if sign < 0:
        return floordiv(-dividend, -divisor)
    if sign == 0:
        return of_atom(FloorDiv(dividend, divisor))
    quotient, rest = _split(dividend, divisor)
    return add(quotient, _floordiv_rest(rest, divisor))


def _floordiv_rest(rest: Index, divisor: Index) -> Index:
    if known_within(rest, 0, divisor):
        return ZERO
    scaled = _scale_down(rest, divisor)
    if scaled is not None:
        _, outer, _, smaller = scaled
        return floordiv(outer, smaller)
    # (a // b + c) // d  ->  (a + b*c) // (b*d)
    for coefficient, monomial in rest.terms:
        match monomial:
            case (FloorDiv(dividend=a, divisor=b),) if coefficient == 1 and _sign(b) > 0:
                return floordiv(a + (rest - _term(1, monomial)) * b, b * divisor)
    # (a % (c*d)) // d  ->  (a // d) % c
    match rest:
        case Index(constant=0, terms=((1, (Mod(dividend=a, divisor=b),)),)) if _sign(b) > 0 and divides(divisor, b):
            return mod(floordiv(a, divisor), floordiv(b, divisor))
    return of_atom(FloorDiv(rest, divisor))


def mod(dividend: IndexLike, divisor: IndexLike) -> Index:
    """dividend % divisor, with multiples of the divisor taken out."""
    dividend, divisor = index(dividend), index(divisor)
    if divisor is ONE:
        return ZERO
    if not dividend.terms and not divisor.terms and divisor.constant:
        return constant(dividend.constant % divisor.constant)
    return _mod(dividend, divisor)


@kept_for_a_while
def _mod(dividend: Index, divisor: Index) -> Index:
    sign = _sign(divisor)
    if sign < 0:
        return -mod(-dividend, -divisor)
    if sign == 0:
        return of_atom(Mod(dividend, divisor))
    _, rest = _split(dividend, divisor)
    if known_within(rest, 0, divisor):
        return rest
    scaled = _scale_down(rest, divisor)
    if scaled is not None:
        factor, outer, inner, smaller = scaled
        return factor * mod(outer, smaller) + inner
    opened = _open_mods(rest, divisor)
    return mod(opened, divisor) if opened is not rest else of_atom(Mod(rest, divisor))


def _open_mods(value: Index, divisor: Index) -> Index:
    """(k*(a % m) + ...) % d  ->  (k*a + ...) % d where d divides k*m"""
    result = value
    for coefficient, monomial in value.terms:
        for atom in monomial:
            if isinstance(atom, Mod):
                factor = _term(coefficient, _without(monomial, (atom,)) or ())
                if divides(divisor, factor * atom.divisor):
                    result = result - _term(coefficient, monomial) + factor * atom.dividend
                    break
    return result


def ceildiv(dividend: IndexLike, divisor: IndexLike) -> Index:
    dividend, divisor = index(dividend), index(divisor)
    if _sign(divisor) > 0:
        return floordiv(dividend + divisor - 1, divisor)
    return -floordiv(-dividend, divisor)


def _sign(divisor: Index) -> int:
    """1 or -1 if a divisor, which is not zero, is known to lie on that side; else 0."""
    if not divisor.terms:
        return (divisor.constant > 0) - (divisor.constant < 0)
    low, high = bounds(divisor)
    if low is not None and low >= 0:
        return 0 if high == 0 else 1
    return -1 if high is not None and high <= 0 else 0


def _split(dividend: Index, divisor: Index) -> tuple[Index, Index]:
    """dividend = divisor * quotient + rest, with every evenly divisible term in the quotient."""
    if not divisor.terms:
        return _split_by_number(dividend, divisor.constant)
    if len(divisor.terms) == 1 and not divisor.constant:
        return _split_by_term(dividend, *divisor.terms[0])
    return _split_by_sum(dividend, divisor)


def _split_by_number(dividend: Index, divisor: int) -> tuple[Index, Index]:
    whole, left = divmod(dividend.constant, divisor)
    wholes: list[tuple[int, Monomial]] = []
    lefts: list[tuple[int, Monomial]] = []
    for coefficient, monomial in dividend.terms:
        # Towards zero: what is left keeps its sign, and quotient and rest still grow in the same direction.
        part = coefficient // divisor if coefficient >= 0 else -(-coefficient // divisor)
        if part:
            wholes.append((part, monomial))
        if coefficient != part * divisor:
            lefts.append((coefficient - part * divisor, monomial))
    if not wholes and not whole:
        return ZERO, dividend
    # Divided coefficients can make a division whole that was not: `_normal` looks again.
    return _normal(whole, {m: c for c, m in wholes}), _normal(left, {m: c for c, m in lefts})


def _split_by_term(dividend: Index, step: int, factors: Monomial) -> tuple[Index, Index]:
    quotient: dict[Monomial, int] = {}
    rest: dict[Monomial, int] = {}
    for coefficient, monomial in dividend.terms:
        others = None if coefficient % step else _without(monomial, factors)
        if others is None:
            rest[monomial] = coefficient
        else:
            quotient[others] = coefficient // step
    if not quotient:
        return ZERO, dividend
    return _normal(quotient.pop((), 0), quotient), _normal(dividend.constant, rest)


def _split_by_sum(dividend: Index, divisor: Index) -> tuple[Index, Index]:
    """A divisor that is a sum: only its multiples as they stand."""
    lead_coefficient, lead = divisor.terms[0]
    quotient, rest = ZERO, dividend
    for coefficient, monomial in dividend.terms:
        others = None if coefficient % lead_coefficient else _without(monomial, lead)
        if others is None:
            continue
        part = _term(coefficient // lead_coefficient, others)
        left = rest - part * divisor
        if len(left.terms) < len(rest.terms):
            quotient, rest = quotient + part, left
    return quotient, rest


def _without(monomial: Monomial, factors: Monomial) -> Monomial | None:
    """The monomial divided by others, or None if it does not divide."""
    left = list(monomial)
    for factor in factors:
        if factor not in left:
            return None
        left.remove(factor)
    return tuple(left)


def _scale_down(rest: Index, divisor: Index) -> tuple[Index, Index, Index, Index] | None:
    """(g, a, b, d) with rest = g*a + b, 0 <= b < g and divisor = g*d, for the largest g > 1 that is found. Then

    rest // divisor = a // d        rest % divisor = g*(a % d) + b
    """
    for coefficient, monomial in _common_factors(rest, divisor):
        factor = _term(coefficient, monomial)
        if monomial and _sign(factor) <= 0:
            continue
        outer, inner = _split(rest, factor)
        if outer is not ZERO and known_within(inner, 0, factor):
            smaller, nothing = _split(divisor, factor)
            assert nothing is ZERO
            return factor, outer, inner, smaller
    return None


def _common_factors(rest: Index, divisor: Index) -> list[tuple[int, Monomial]]:
    """What a term of the rest has in common with the divisor, largest first."""
    if len(divisor.terms) == 1 and not divisor.constant:
        step, factors = divisor.terms[0]
    else:
        step, factors = math.gcd(divisor.constant, *(c for c, _ in divisor.terms)), ()
    found: dict[tuple[int, Monomial], None] = {} if rest.terms else {(step, ()): None}
    for coefficient, monomial in rest.terms:
        shared, left = [], list(monomial)
        for atom in factors:
            if atom in left:
                left.remove(atom)
                shared.append(atom)
        found[math.gcd(coefficient, step), tuple(shared)] = None
    found.pop((1, ()), None)
    return sorted(found, key=lambda factor: (-len(factor[1]), -factor[0], _monomial_key(factor[1])))


def minimum(left: IndexLike, right: IndexLike) -> Index:
    left, right = index(left), index(right)
    if left is right or known_nonnegative(right - left):
        return left
    if known_nonnegative(left - right):
        return right
    return of_atom(Least(*sorted((left, right), key=_side_key)))


def maximum(left: IndexLike, right: IndexLike) -> Index:
    left, right = index(left), index(right)
    if left is right or known_nonnegative(right - left):
        return right
    if known_nonnegative(left - right):
        return left
    return of_atom(Most(*sorted((left, right), key=_side_key)))


def _side_key(value: Index) -> tuple[Any, ...]:
    """Numbers last, as one writes them."""
    return (not value.terms, _index_key(value))


# ---- facts


def bounds(value: IndexLike) -> tuple[Bound, Bound]:
    """The least and the greatest value that can be proven, None where there is no proof."""
    value = index(value)
    return least(value), greatest(value)


def least(value: Index) -> Bound:
    if not value.terms:
        return value.constant
    try:
        return value._low
    except AttributeError:
        keep(value, "_low", _extreme(value, -1))
        return value._low


def greatest(value: Index) -> Bound:
    if not value.terms:
        return value.constant
    try:
        return value._high
    except AttributeError:
        keep(value, "_high", _extreme(value, 1))
        return value._high


def known_nonnegative(value: IndexLike) -> bool:
    value = index(value)
    if value.terms and not hasattr(value, "_low"):
        # The interval of each term is often enough, and cheap.
        low = _interval_extreme(value, -1)
        if low is not None and low >= 0:
            return True
    low = least(value)
    return low is not None and low >= 0


def known_within(value: IndexLike, low: IndexLike, end: IndexLike) -> bool:
    """low <= value < end, proven."""
    value, low, end = index(value), index(low), index(end)
    if not known_nonnegative(value - low):
        return False
    if end.terms:
        return known_nonnegative(end - value - 1)
    high = greatest(value)
    return high is not None and high < end.constant


def known_equal(left: IndexLike, right: IndexLike) -> bool:
    left, right = index(left), index(right)
    return left is right or _without_mods(left - right) is ZERO


def known_zero(value: IndexLike) -> bool:
    return bounds(value) == (0, 0) or known_equal(value, ZERO)


def divides(divisor: IndexLike, value: IndexLike) -> bool:
    """Whether `value` is a multiple of `divisor`, proven."""
    divisor, value = index(divisor), index(value)
    if divisor is ZERO:
        return False
    if not divisor.terms:
        return value.constant % divisor.constant == 0 and all(c % divisor.constant == 0 for c, _ in value.terms)
    return _split(value, divisor)[1] is ZERO


# Note [How bounds are found]. First each term by itself, with the interval of each atom. If atoms occur once and have
# numbers as ends, nothing better can be had. Otherwise atoms are moved to an end of their range, one at a time, where
# the value is known to grow or fall with them: `s0 - 1 - i` with i below s0 falls with i, so its least is at
# i = s0 - 1, which is 0. Each move gives a value that is at least as extreme, so what holds for the last one holds for
# the first.

_MOVES = 24  # atoms moved before giving up
_BRANCHES = 4  # minima and maxima opened, each of which doubles the work


def _extreme(value: Index, side: int) -> Bound:
    """The bound on one side: 1 above, -1 below."""
    plain = _interval_extreme(value, side)
    if plain is not None and _is_separable(value):
        return plain
    moved = _moved_extreme(value, side, _BRANCHES)
    if plain is None or moved is None:
        return moved if plain is None else plain
    return min(plain, moved) if side > 0 else max(plain, moved)


def _interval_extreme(value: Index, side: int) -> Bound:
    result = value.constant
    for coefficient, monomial in value.terms:
        low, high = _interval(monomial)
        part = high if (coefficient > 0) == (side > 0) else low
        if part is None:
            return None
        result += coefficient * part
    return result


def _is_separable(value: Index) -> bool:
    """Whether the terms are independent: axes with a number as extent, each in one place."""
    seen: set[Atom] = set()
    for _, monomial in value.terms:
        for atom in monomial:
            if not isinstance(atom, Axis) or atom.extent.terms or atom in seen:
                return False
            seen.add(atom)
    return True


def _moved_extreme(value: Index, side: int, branches: int) -> Bound:
    for _ in range(_MOVES):
        if not value.terms:
            return value.constant
        moved = _move_one(value, side)
        if moved is None:
            choice = _open_choice(value, side) if branches else None
            if choice is None:
                break
            (left, right), both_hold = choice
            return _combine(
                _moved_extreme(left, side, branches - 1), _moved_extreme(right, side, branches - 1), side, both_hold
            )
        value = moved
    return _interval_extreme(value, side)


def _combine(left: Bound, right: Bound, side: int, both_hold: bool) -> Bound:
    """If both bounds hold, the sharper one; if one of the two holds, the weaker one."""
    if left is None or right is None:
        return (right if left is None else left) if both_hold else None
    return min(left, right) if (side > 0) == both_hold else max(left, right)


def _move_one(value: Index, side: int) -> Index | None:
    """The value with one atom at the end of its range that makes it most extreme."""
    for atom, everywhere in _movable(value):
        slope = _slope(value, atom) if everywhere else _slope_direct(value, atom)
        end = _end(atom, slope, side)
        if end is not None:
            return substitute(value, {atom: end}) if everywhere else _replace_direct(value, atom, end)
    return None


def _movable(value: Index) -> Iterator[tuple[Atom, bool]]:
    """Atoms to move, in order, and whether everywhere or only where they are factors of a term.

    Axes come before sizes, because their extents may cancel sizes. An axis as a factor and the same axis inside another
    atom may be taken apart in the end, as if they were two axes of one range.
    """
    free = sorted(free_atoms(value), key=_atom_key)
    direct = sorted({atom for _, monomial in value.terms for atom in monomial}, key=_atom_key)
    yield from ((atom, True) for atom in free if isinstance(atom, Axis))
    yield from ((atom, False) for atom in direct if isinstance(atom, (Mod, Data)))
    yield from ((atom, True) for atom in free if isinstance(atom, Size))
    yield from ((atom, False) for atom in direct if isinstance(atom, Axis))


def _end(atom: Atom, slope: int | None, side: int) -> Index | None:
    """The end of the atom's range where a value with this slope is most extreme on that side."""
    if not slope:
        return None
    upper = slope == side
    match atom:
        case Axis(extent=extent):
            return extent - 1 if upper else ZERO
        case Mod(divisor=divisor) if _sign(divisor) > 0:
            return divisor - 1 if upper else ZERO
        case Data(low=low, high=high):
            return high if upper else low
        case Size(low=low, high=high):
            number = high if upper else low
            return None if number is None else constant(number)
    return None


def _open_choice(value: Index, side: int) -> tuple[tuple[Index, Index], bool] | None:
    """The value with a minimum or maximum replaced by each of its sides; and whether bounds of both hold, or of one."""
    for atom in dict.fromkeys(atom for _, monomial in value.terms for atom in monomial):
        if isinstance(atom, (Least, Most)):
            slope = _slope_direct(value, atom)
            if slope:
                upper = slope == side
                sides = _replace_direct(value, atom, atom.left), _replace_direct(value, atom, atom.right)
                return sides, upper == isinstance(atom, Least)
    return None


def _slope(value: Index, atom: Atom) -> int | None:
    """1 if the value never falls as the atom grows, -1 if it never grows, 0 if it does not change, None if unknown."""
    if atom not in free_atoms(value):
        return 0
    result = 0
    for coefficient, monomial in value.terms:
        slope = _monomial_slope(monomial, [_atom_slope(factor, atom) for factor in monomial])
        if slope is None:
            return None
        if slope:
            slope = slope if coefficient > 0 else -slope
            if result == -slope:
                return None
            result = slope
    return result


def _slope_direct(value: Index, atom: Atom) -> int | None:
    """The same, as if the atom stood only where it is a factor of a term."""
    result = 0
    for coefficient, monomial in value.terms:
        if atom in monomial:
            slope = _monomial_slope(monomial, [int(factor is atom) for factor in monomial])
            if slope is None:
                return None
            slope = slope if coefficient > 0 else -slope
            if result == -slope:
                return None
            result = slope
    return result


def _monomial_slope(monomial: Monomial, slopes: Sequence[int | None]) -> int | None:
    """A product of factors that are not negative grows where none of them falls."""
    if None in slopes:
        return None
    if len(monomial) == 1 or not any(slopes):
        return slopes[0]
    if 1 in slopes and -1 in slopes:
        return None
    for factor in monomial:
        low = _atom_bounds(factor)[0]
        if low is None or low < 0:
            return None
    return 1 if 1 in slopes else -1


def _atom_slope(factor: Atom, atom: Atom) -> int | None:
    if factor is atom:
        return 1
    # Data that depends on the axis counts as independent of it: anything within its bounds, at each point.
    if isinstance(factor, (Axis, Size, Data)) or atom not in free_atoms(factor):
        return 0
    match factor:
        case FloorDiv(dividend=a, divisor=b) if _sign(b) > 0 and atom not in free_atoms(b):
            return _slope(a, atom)
        case Least(left=a, right=b) | Most(left=a, right=b):
            left, right = _slope(a, atom), _slope(b, atom)
            if left is None or right is None or left == -right != 0:
                return None
            return left or right
    return None


def _replace_direct(value: Index, atom: Atom, replacement: Index) -> Index:
    """Replace the atom where it is a factor of a term, not inside other atoms."""
    result = constant(value.constant)
    for coefficient, monomial in value.terms:
        kept = tuple(factor for factor in monomial if factor is not atom)
        term = _term(coefficient, kept)
        for _ in range(len(monomial) - len(kept)):
            term = term * replacement
        result = result + term
    return result


def _interval(monomial: Monomial) -> tuple[Bound, Bound]:
    low, high = _atom_bounds(monomial[0])
    for atom in monomial[1:]:
        low, high = _times((low, high), _atom_bounds(atom))
    return low, high


def _times(left: tuple[Bound, Bound], right: tuple[Bound, Bound]) -> tuple[Bound, Bound]:
    (a, b), (c, d) = left, right
    if (a == 0 and b == 0) or (c == 0 and d == 0):
        return 0, 0
    if a is not None and a >= 0 and c is not None and c >= 0:
        return a * c, (b * d if b is not None and d is not None else None)
    if a is None or b is None or c is None or d is None:
        return None, None
    corners = (a * c, a * d, b * c, b * d)
    return min(corners), max(corners)


def _atom_bounds(atom: Atom) -> tuple[Bound, Bound]:
    match atom:
        case Axis(extent=extent):
            high = greatest(extent)
            return 0, (None if high is None else max(high - 1, 0))
        case Size(low=low, high=high):
            return low, high
    try:
        return atom._low, atom._high
    except AttributeError:
        low, high = _composite_bounds(atom)
        keep(atom, "_low", low)
        keep(atom, "_high", high)
        return low, high


def _composite_bounds(atom: Atom) -> tuple[Bound, Bound]:
    match atom:
        case Data(low=low, high=high):
            return least(low), greatest(high)
        case Mod(dividend=dividend, divisor=divisor) if _sign(divisor) > 0:
            most, top = greatest(divisor), greatest(dividend)
            limit = None if most is None else most - 1
            if top is not None and known_nonnegative(dividend):
                limit = top if limit is None else min(limit, top)
            return 0, limit
        case FloorDiv(dividend=dividend, divisor=divisor) if _sign(divisor) > 0:
            smallest, largest = max(least(divisor) or 0, 1), greatest(divisor)
            return (
                _quotient_low(least(dividend), smallest, largest),
                _quotient_high(greatest(dividend), smallest, largest),
            )
        case Least(left=left, right=right):
            (a, b), (c, d) = bounds(left), bounds(right)
            return _combine(a, c, -1, False), _combine(b, d, 1, True)
        case Most(left=left, right=right):
            (a, b), (c, d) = bounds(left), bounds(right)
            return _combine(a, c, -1, True), _combine(b, d, 1, False)
    return None, None


def _quotient_low(low: Bound, least_divisor: int, most_divisor: Bound) -> Bound:
    if low is None:
        return None
    if low < 0:
        return low // least_divisor
    return 0 if most_divisor is None else low // most_divisor


def _quotient_high(high: Bound, least_divisor: int, most_divisor: Bound) -> Bound:
    if high is None:
        return None
    if high >= 0:
        return high // least_divisor
    return -1 if most_divisor is None else high // most_divisor


# ---- looking and changing


def atoms(value: Index) -> Iterator[Atom]:
    """The atoms of the polynomial itself, repeats included."""
    for _, monomial in value.terms:
        yield from monomial


def parts(atom: Atom) -> tuple[Index, ...]:
    """The indices inside an atom that take part in its value."""
    match atom:
        case (
            FloorDiv(dividend=a, divisor=b)
            | Mod(dividend=a, divisor=b)
            | Least(left=a, right=b)
            | Most(left=a, right=b)
        ):
            return (a, b)
    return ()


_NOTHING: frozenset[Atom] = frozenset()


def free_atoms(node: Node) -> frozenset[Atom]:
    """Every axis, size and data atom that a node of any kind depends on: extents of axes not counted, what is inside
    data counted, axes that are bound inside left out."""
    try:
        return node._free
    except AttributeError:
        if isinstance(node, Index):
            keep(node, "_free", _union([free_atoms(atom) for _, monomial in node.terms for atom in monomial]))
            return node._free
    free: frozenset[Atom] = answer(node, "_free", _free_of)
    return free


def _union(found: list[frozenset[Atom]]) -> frozenset[Atom]:
    return found[0] if len(found) == 1 else _NOTHING.union(*found)


def _free_of(node: Node) -> frozenset[Atom]:
    if isinstance(node, (Axis, Size)):
        return frozenset((node,))
    free = _union([inner._free for inner in inner_nodes(node) if inner._free])
    if isinstance(node, Data):
        return free | {node}
    bound = getattr(node, "axes", None) or getattr(node, "axis", None)
    return free.difference(bound if isinstance(bound, tuple) else (bound,)) if bound else free


def holds_data(node: Node) -> bool:
    """Whether it depends on something that is read from memory as an index."""
    try:
        return node._data
    except AttributeError:
        keep(node, "_data", any(isinstance(atom, Data) for atom in free_atoms(node)))
        return node._data


def free_axes(node: Node) -> frozenset[Axis]:
    try:
        return node._axes
    except AttributeError:
        keep(node, "_axes", frozenset([atom for atom in free_atoms(node) if isinstance(atom, Axis)]))
        return node._axes


def free_sizes(node: Node) -> frozenset[Size]:
    return frozenset(atom for atom in free_atoms(node) if isinstance(atom, Size))


def substitute(
    value: Index, replacements: Mapping[Atom, Index], of_data: Callable[[Data], Index] | None = None
) -> Index:
    """The value with atoms replaced and simplified anew. `of_data` rebuilds atoms that hold expressions; without it
    they stay as they are, so give it wherever an axis is replaced for good (`rewrite.substitute_axes` does)."""
    return Substitution(replacements, of_data)(value)


class Substitution:
    """One substitution, for as many indices as share it: what was done once is looked up."""

    def __init__(self, replacements: Mapping[Atom, Index], of_data: Callable[[Data], Index] | None) -> None:
        self.replacements = replacements
        self.replaced = frozenset(replacements)
        self.of_data = of_data
        self.done: dict[Index, Index] = {}

    def __call__(self, value: Index) -> Index:
        if not value.terms or not self._touches(value):
            return value
        found = self.done.get(value)
        if found is None:
            found = self.done[value] = self._index(value)
        return found

    def _touches(self, node: Node) -> bool:
        free = free_atoms(node)
        if not self.replaced.isdisjoint(free):
            return True
        return self.of_data is not None and any(isinstance(atom, Data) for atom in free)

    def _index(self, value: Index) -> Index:
        result = constant(value.constant)
        for coefficient, monomial in value.terms:
            term = constant(coefficient)
            for atom in monomial:
                term = multiply(term, self._atom(atom))
            result = add(result, term)
        return result

    def _atom(self, atom: Atom) -> Index:
        found = self.replacements.get(atom)
        if found is not None:
            return found
        if not self._touches(atom):
            return of_atom(atom)
        match atom:
            case FloorDiv(dividend=a, divisor=b):
                return floordiv(self(a), self(b))
            case Mod(dividend=a, divisor=b):
                return mod(self(a), self(b))
            case Least(left=a, right=b):
                return minimum(self(a), self(b))
            case Most(left=a, right=b):
                return maximum(self(a), self(b))
            case Data() if self.of_data is not None:
                return self.of_data(atom)
        return of_atom(atom)


@kept_for_a_while
def coefficient_of(value: Index, atom: Axis) -> Index | None:
    """What the value grows by when the axis moves one step; None if that is not the same everywhere."""
    step = ZERO
    for coefficient, monomial in value.terms:
        if not any(atom in free_atoms(factor) for factor in monomial):
            continue
        rest = _without(monomial, (atom,))
        if rest is None or any(atom in free_atoms(factor) for factor in rest):
            return None
        step = step + _term(coefficient, rest)
    return step


def evaluate(value: IndexLike, environment: Mapping[Atom, int]) -> int:
    """The number that the value is when every free atom has one."""
    value = index(value)
    result = value.constant
    for coefficient, monomial in value.terms:
        part = coefficient
        for atom in monomial:
            part *= _evaluate_atom(atom, environment)
        result += part
    return result


def _evaluate_atom(atom: Atom, environment: Mapping[Atom, int]) -> int:
    match atom:
        case FloorDiv(dividend=a, divisor=b):
            return evaluate(a, environment) // evaluate(b, environment)
        case Mod(dividend=a, divisor=b):
            return evaluate(a, environment) % evaluate(b, environment)
        case Least(left=a, right=b):
            return min(evaluate(a, environment), evaluate(b, environment))
        case Most(left=a, right=b):
            return max(evaluate(a, environment), evaluate(b, environment))
    return environment[atom]


# ---- text


def show_index(value: IndexLike, show_data: Callable[[Any], str] = str) -> str:
    """Terms first, the constant last: `4*i + j - 1`."""
    value = index(value)
    text = ""
    for coefficient, monomial in value.terms:
        factors = [] if abs(coefficient) == 1 else [str(abs(coefficient))]
        factors += [show_atom(atom, show_data) for atom in monomial]
        sign = " - " if coefficient < 0 else " + "
        text += (sign if text else sign.strip(" +")) + "*".join(factors)
    if value.constant or not text:
        text += f" {'-' if value.constant < 0 else '+'} {abs(value.constant)}" if text else str(value.constant)
    return text


def show_atom(atom: Atom, show_data: Callable[[Any], str] = str) -> str:
    def inner(part: Index) -> str:
        text = show_index(part, show_data)
        match part:
            case Index(constant=0, terms=((1, (_,)),)):
                return text  # an atom has its own brackets
        return text if text.isdigit() else f"({text})"

    match atom:
        case Axis(name=name) | Size(name=name):
            return name
        case FloorDiv(dividend=a, divisor=b):
            return f"({inner(a)} // {inner(b)})"
        case Mod(dividend=a, divisor=b):
            return f"({inner(a)} % {inner(b)})"
        case Least(left=a, right=b):
            return f"min({show_index(a, show_data)}, {show_index(b, show_data)})"
        case Most(left=a, right=b):
            return f"max({show_index(a, show_data)}, {show_index(b, show_data)})"
        case Data(value=held, low=low, high=high):
            return f"at({show_data(held)}, {show_index(low, show_data)}, {show_index(high, show_data)})"
