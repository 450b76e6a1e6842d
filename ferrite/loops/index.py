"""Index arithmetic: where a loop reads and writes, and how many times it runs.

An `Index` is a polynomial with integer coefficients in normal form: a constant plus terms, each a coefficient times a
product of atoms. Atoms are loop variables (`Axis`), sizes known at run time (`Size`), floor-divisions, remainders, minima,
maxima, and values read from data (`Data`). Normal forms are interned: two indices that simplify to the same polynomial
are the same object. Bounds of atoms decide what can be simplified; nothing is ever assumed.

Floor-division and remainder follow Python: the remainder has the sign of the divisor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, Union
from weakref import WeakKeyDictionary

from ferrite.loops.intern import Interned

Bound: TypeAlias = "int | None"  # None: no bound known on that side


class Node(metaclass=Interned):
    """What indices and expressions share: a place in memory of their own, and weak references to it."""

    __slots__ = ("__weakref__",)


@dataclass(frozen=True, slots=True, eq=False)
class Axis(Node):
    """A loop variable: 0 <= axis < extent. Two loops that bind the same name and extent bind the same axis.

    text:   i
    """

    name: str
    extent: Index


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


@dataclass(frozen=True, slots=True, eq=False)
class Mod(Node):
    """text:   (4*i + j) % 6"""

    dividend: Index
    divisor: Index


@dataclass(frozen=True, slots=True, eq=False)
class Least(Node):
    """text:   min(i, s0 - 1)"""

    left: Index
    right: Index


@dataclass(frozen=True, slots=True, eq=False)
class Most(Node):
    """text:   max(i, 0)"""

    left: Index
    right: Index


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

    check:  terms are in the order of their text; no coefficient is zero; no monomial occurs twice or is empty
    """

    constant: int
    terms: tuple[tuple[int, Monomial], ...]

    def __add__(self, other: IndexLike) -> Index:
        return add(self, other)

    def __radd__(self, other: int) -> Index:
        return add(self, other)

    def __sub__(self, other: IndexLike) -> Index:
        return add(self, multiply(other, -1))

    def __rsub__(self, other: int) -> Index:
        return add(multiply(self, -1), other)

    def __neg__(self) -> Index:
        return multiply(self, -1)

    def __mul__(self, other: IndexLike) -> Index:
        return multiply(self, other)

    def __rmul__(self, other: int) -> Index:
        return multiply(self, other)

    def __floordiv__(self, other: IndexLike) -> Index:
        return floordiv(self, other)

    def __mod__(self, other: IndexLike) -> Index:
        return mod(self, other)

    def __str__(self) -> str:
        return show_index(self)


# ---- building


def constant(value: int) -> Index:
    return Index(value, ())


ZERO, ONE = constant(0), constant(1)


def index(value: IndexLike) -> Index:
    return value if isinstance(value, Index) else constant(int(value))


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


def _normal(constant_part: int, coefficients: Mapping[Monomial, int]) -> Index:
    """Normal form, with `d*(x // d) + x % d` put together again."""
    live = {monomial: coefficient for monomial, coefficient in coefficients.items() if coefficient}
    for monomial, coefficient in live.items():
        for position, atom in enumerate(monomial):
            if not isinstance(atom, Mod):
                continue
            rest = monomial[:position] + monomial[position + 1 :]
            quotient = _product(Index(0, ((coefficient, rest),)) if rest else constant(coefficient), atom.divisor)
            quotient = _product(quotient, of_atom(FloorDiv(atom.dividend, atom.divisor)))
            if quotient.terms and all(live.get(m) == c for c, m in quotient.terms) and not quotient.constant:
                whole = _product(Index(0, ((coefficient, rest),)) if rest else constant(coefficient), atom.dividend)
                left = {m: c for m, c in live.items() if m != monomial and all(m != q for _, q in quotient.terms)}
                for c, m in whole.terms:
                    left[m] = left.get(m, 0) + c
                return _normal(constant_part + whole.constant, left)
    ordered = sorted(((c, m) for m, c in live.items()), key=lambda term: _monomial_key(term[1]))
    return Index(constant_part, tuple(ordered))


def _monomial_key(monomial: Monomial) -> tuple[Any, ...]:
    return (-len(monomial), tuple(_atom_key(atom) for atom in monomial))


def _atom_key(atom: Atom) -> tuple[int, str]:
    """An order that depends on the program only: axes first, then sizes, then the rest by their text."""
    match atom:
        case Axis(name=name):
            return (0, name)
        case Size(name=name):
            return (1, name)
    return (2, show_atom(atom))


def add(left: IndexLike, right: IndexLike) -> Index:
    left, right = index(left), index(right)
    if not right.terms:
        return left if not right.constant else Index(left.constant + right.constant, left.terms)
    if not left.terms and not left.constant:
        return right
    coefficients = {monomial: coefficient for coefficient, monomial in left.terms}
    for coefficient, monomial in right.terms:
        coefficients[monomial] = coefficients.get(monomial, 0) + coefficient
    return _normal(left.constant + right.constant, coefficients)


def total(parts: Iterable[IndexLike]) -> Index:
    result = ZERO
    for part in parts:
        result = add(result, part)
    return result


def multiply(left: IndexLike, right: IndexLike) -> Index:
    left, right = index(left), index(right)
    if not left.terms and not right.terms:
        return constant(left.constant * right.constant)
    if not right.terms:
        left, right = right, left
    if not left.terms:
        factor = left.constant
        if factor == 0:
            return ZERO
        return right if factor == 1 else Index(factor * right.constant, tuple((factor * c, m) for c, m in right.terms))
    product = _product(left, right)
    return _normal(product.constant, {m: c for c, m in product.terms})


def product(parts: Iterable[IndexLike]) -> Index:
    result = ONE
    for part in parts:
        result = multiply(result, part)
    return result


def _product(left: Index, right: Index) -> Index:
    """The product, term by term, without looking for remainders to put together."""
    coefficients: dict[Monomial, int] = {}
    for a, m in (*left.terms, (left.constant, ())):
        for b, n in (*right.terms, (right.constant, ())):
            if a * b:
                monomial = tuple(sorted((*m, *n), key=_atom_key))
                coefficients[monomial] = coefficients.get(monomial, 0) + a * b
    constant_part = coefficients.pop((), 0)
    live = ((c, m) for m, c in coefficients.items() if c)
    return Index(constant_part, tuple(sorted(live, key=lambda term: _monomial_key(term[1]))))


def floordiv(dividend: IndexLike, divisor: IndexLike) -> Index:
    """dividend // divisor, with every part that divides evenly or cannot matter taken out."""
    dividend, divisor = index(dividend), index(divisor)
    if divisor is ONE:
        return dividend
    if not dividend.terms and not divisor.terms and divisor.constant:
        return constant(dividend.constant // divisor.constant)
    if divisor is ZERO or not _positive(divisor):
        return of_atom(FloorDiv(dividend, divisor))
    quotient, rest = _split(dividend, divisor)
    if known_within(rest, 0, divisor):
        return quotient
    rest, divisor = _divide_by_common_factor(rest, divisor)
    if divisor is ONE:
        return add(quotient, rest)
    inner = _only_atom(rest)
    if isinstance(inner, FloorDiv) and _positive(inner.divisor):
        return add(quotient, floordiv(inner.dividend, multiply(inner.divisor, divisor)))
    return add(quotient, of_atom(FloorDiv(rest, divisor)))


def mod(dividend: IndexLike, divisor: IndexLike) -> Index:
    """dividend % divisor, with multiples of the divisor taken out."""
    dividend, divisor = index(dividend), index(divisor)
    if divisor is ONE:
        return ZERO
    if not dividend.terms and not divisor.terms and divisor.constant:
        return constant(dividend.constant % divisor.constant)
    if divisor is ZERO or not _positive(divisor):
        return of_atom(Mod(dividend, divisor))
    _, rest = _split(dividend, divisor)
    if known_within(rest, 0, divisor):
        return rest
    inner = _only_atom(rest)
    if isinstance(inner, Mod) and divides(divisor, inner.divisor) and _positive(inner.divisor):
        return mod(inner.dividend, divisor)
    factor = _common_factor(rest, divisor)
    if factor > 1 and rest.constant % factor == 0:
        return multiply(mod(_exact_quotient(rest, factor), _exact_quotient(divisor, factor)), factor)
    return of_atom(Mod(rest, divisor))


def ceildiv(dividend: IndexLike, divisor: IndexLike) -> Index:
    return floordiv(add(dividend, add(divisor, -1)), divisor)


def minimum(left: IndexLike, right: IndexLike) -> Index:
    left, right = index(left), index(right)
    if known_nonnegative(right - left):
        return left
    if known_nonnegative(left - right):
        return right
    return of_atom(Least(*sorted((left, right), key=str)))


def maximum(left: IndexLike, right: IndexLike) -> Index:
    left, right = index(left), index(right)
    if known_nonnegative(right - left):
        return right
    if known_nonnegative(left - right):
        return left
    return of_atom(Most(*sorted((left, right), key=str)))


def _split(dividend: Index, divisor: Index) -> tuple[Index, Index]:
    """dividend = divisor * quotient + rest, with every evenly divisible term in the quotient."""
    quotient, rest = ZERO, constant(dividend.constant)
    if not divisor.terms:
        whole, left = divmod(dividend.constant, divisor.constant)
        quotient, rest = constant(whole), constant(left)
        for coefficient, monomial in dividend.terms:
            whole, left = divmod(coefficient, divisor.constant)
            if left and _keeps_sign_small(coefficient, divisor.constant):
                whole, left = 0, coefficient
            quotient = add(quotient, Index(0, ((whole, monomial),)) if whole else 0)
            rest = add(rest, Index(0, ((left, monomial),)) if left else 0)
        return quotient, rest
    if len(divisor.terms) == 1 and not divisor.constant:
        ((step, factors),) = divisor.terms
        for coefficient, monomial in dividend.terms:
            others = _without(monomial, factors)
            if others is not None and coefficient % step == 0:
                quotient = add(quotient, Index(0, ((coefficient // step, others),)) if others else coefficient // step)
            else:
                rest = add(rest, Index(0, ((coefficient, monomial),)))
        return quotient, rest
    # A divisor that is a sum: only its multiples as they stand.
    whole_term = _whole_multiple(dividend, divisor)
    return whole_term if whole_term is not None else (ZERO, dividend)


def _keeps_sign_small(coefficient: int, divisor: int) -> bool:
    """Whether a term is better left whole: -1*i over 4 would otherwise become -i + 3*i."""
    return abs(coefficient) < divisor


def _whole_multiple(dividend: Index, divisor: Index) -> tuple[Index, Index] | None:
    """quotient and rest if a monomial times the divisor can be taken out of the dividend."""
    lead_coefficient, lead = divisor.terms[0]
    quotient, rest = ZERO, dividend
    for coefficient, monomial in dividend.terms:
        left = _without(monomial, lead)
        if left is None or coefficient % lead_coefficient:
            continue
        factor = coefficient // lead_coefficient
        part = Index(0, ((factor, left),)) if left else constant(factor)
        taken = rest - multiply(part, divisor)
        if len(taken.terms) < len(rest.terms):
            quotient, rest = add(quotient, part), taken
    return (quotient, rest) if quotient is not ZERO else None


def _without(monomial: Monomial, factors: Monomial) -> Monomial | None:
    """The monomial divided by others, or None if it does not divide."""
    left = list(monomial)
    for factor in factors:
        if factor not in left:
            return None
        left.remove(factor)
    return tuple(left)


def _common_factor(left: Index, right: Index) -> int:
    return math.gcd(*(c for c, _ in left.terms), *(c for c, _ in right.terms), right.constant) if left.terms else 1


def _divide_by_common_factor(rest: Index, divisor: Index) -> tuple[Index, Index]:
    """(g*a + c) // (g*d)  ->  (a + c // g) // d"""
    factor = _common_factor(rest, divisor)
    if factor <= 1:
        return rest, divisor
    terms = tuple((c // factor, m) for c, m in rest.terms)
    return Index(rest.constant // factor, terms), _exact_quotient(divisor, factor)


def _exact_quotient(value: Index, factor: int) -> Index:
    return Index(value.constant // factor, tuple((c // factor, m) for c, m in value.terms))


def _only_atom(value: Index) -> Atom | None:
    match value:
        case Index(constant=0, terms=((1, (atom,)),)):
            return atom
    return None


# ---- facts


def bounds(value: IndexLike) -> tuple[Bound, Bound]:
    """The least and the greatest value that can be proven, None where there is no proof."""
    value = index(value)
    if not value.terms:
        return value.constant, value.constant
    extreme = _memo_bounds.get(value)
    if extreme is None:
        extreme = _memo_bounds[value] = (_extreme(value, -1), _extreme(value, 1))
    return extreme


def _extreme(value: Index, side: int) -> Bound:
    """The bound on one side: axes at the end of their range first (extents may cancel), then the interval of each term."""
    for _ in range(8):
        moved = _axes_to_ends(value, side)
        if moved is value:
            break
        value = moved
    result: Bound = value.constant
    for coefficient, monomial in value.terms:
        low, high = _interval(monomial)
        part = (high if coefficient > 0 else low) if side > 0 else (low if coefficient > 0 else high)
        if part is None or result is None:
            return None
        result += coefficient * part
    return result


def _axes_to_ends(value: Index, side: int) -> Index:
    """Replace an axis whose terms all grow in one direction by 0 or extent - 1, whichever is extreme."""
    for atom in {atom: None for _, monomial in value.terms for atom in monomial if isinstance(atom, Axis)}:
        signs = set()
        for coefficient, monomial in value.terms:
            occurs = monomial.count(atom)
            inside = any(atom in free_atoms(part) for part in monomial if not isinstance(part, (Axis, Size)))
            if inside or occurs > 1:
                signs = {0}
                break
            if occurs:
                others_low = [_interval((other,))[0] for other in monomial if other is not atom]
                if any(low is None or low < 0 for low in others_low):
                    signs = {0}
                    break
                signs.add(1 if coefficient > 0 else -1)
        if len(signs) == 1 and signs != {0}:
            (sign,) = signs
            end = atom.extent - 1 if sign == side else ZERO
            return substitute(value, {atom: end})
    return value


def _interval(monomial: Monomial) -> tuple[Bound, Bound]:
    low: Bound = 1
    high: Bound = 1
    for atom in monomial:
        low, high = _times((low, high), _atom_bounds(atom))
    return low, high


def _times(left: tuple[Bound, Bound], right: tuple[Bound, Bound]) -> tuple[Bound, Bound]:
    (a, b), (c, d) = left, right
    if a is not None and a >= 0 and c is not None and c >= 0:
        return a * c, (b * d if b is not None and d is not None else (0 if b == 0 or d == 0 else None))
    if None in (a, b, c, d):
        return None, None
    corners = [x * y for x in (a, b) for y in (c, d)]  # type: ignore[operator]
    return min(corners), max(corners)


def _atom_bounds(atom: Atom) -> tuple[Bound, Bound]:
    match atom:
        case Axis(extent=extent):
            high = bounds(extent)[1]
            return 0, (None if high is None else max(high - 1, 0))
        case Size(low=low, high=high):
            return low, high
        case Data(low=low, high=high):
            return bounds(low)[0], bounds(high)[1]
        case Mod(dividend=dividend, divisor=divisor):
            low, high = bounds(divisor)
            if low is None or low <= 0:
                return None, None
            top = bounds(dividend)
            limit = None if high is None else high - 1
            if top[0] is not None and top[0] >= 0 and top[1] is not None:
                limit = top[1] if limit is None else min(limit, top[1])
            return 0, limit
        case FloorDiv(dividend=dividend, divisor=divisor):
            (low, high), (least, most) = bounds(dividend), bounds(divisor)
            if least is None or least <= 0:
                return None, None
            return _quotient_low(low, least, most), _quotient_high(high, least, most)
        case Least(left=left, right=right):
            (a, b), (c, d) = bounds(left), bounds(right)
            highs = [high for high in (b, d) if high is not None]
            return (min(a, c) if a is not None and c is not None else None), (min(highs) if highs else None)
        case Most(left=left, right=right):
            (a, b), (c, d) = bounds(left), bounds(right)
            lows = [low for low in (a, c) if low is not None]
            return (max(lows) if lows else None), (max(b, d) if b is not None and d is not None else None)


def _quotient_low(low: Bound, least: int, most: Bound) -> Bound:
    if low is None:
        return None
    if low < 0:
        return low // least
    return 0 if most is None else low // most


def _quotient_high(high: Bound, least: int, most: Bound) -> Bound:
    if high is None:
        return None
    if high >= 0:
        return high // least
    return -1 if most is None else high // most


_memo_bounds: WeakKeyDictionary[Index, tuple[Bound, Bound]] = WeakKeyDictionary()


def known_nonnegative(value: IndexLike) -> bool:
    low = bounds(value)[0]
    return low is not None and low >= 0


def known_within(value: IndexLike, low: IndexLike, end: IndexLike) -> bool:
    """low <= value < end, proven."""
    return known_nonnegative(index(value) - low) and known_nonnegative(index(end) - value - 1)


def known_zero(value: IndexLike) -> bool:
    return bounds(value) == (0, 0)


def _positive(value: Index) -> bool:
    low = bounds(value)[0]
    return low is not None and low > 0


def divides(divisor: IndexLike, value: IndexLike) -> bool:
    """Whether `value` is a multiple of `divisor`, proven."""
    divisor, value = index(divisor), index(value)
    if divisor is ZERO:
        return False
    if not divisor.terms:
        return value.constant % divisor.constant == 0 and all(c % divisor.constant == 0 for c, _ in value.terms)
    return _split(value, divisor)[1] is ZERO


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


def free_atoms(value: Index | Atom) -> frozenset[Atom]:
    """Every axis, size and data atom that the value depends on, extents of axes not counted."""
    if isinstance(value, Index):
        return frozenset().union(*(free_atoms(atom) for atom in atoms(value))) if value.terms else frozenset()
    inner = parts(value)
    return frozenset().union(*(free_atoms(part) for part in inner)) if inner else frozenset((value,))


def free_axes(value: Index) -> frozenset[Axis]:
    return frozenset(atom for atom in free_atoms(value) if isinstance(atom, Axis))


def substitute(
    value: Index, replacements: Mapping[Atom, Index], of_data: Callable[[Data], Index] | None = None
) -> Index:
    """The value with atoms replaced and simplified anew. `of_data` rebuilds atoms that hold expressions."""
    if not value.terms:
        return value
    result = constant(value.constant)
    for coefficient, monomial in value.terms:
        term = constant(coefficient)
        for atom in monomial:
            term = multiply(term, _substitute_atom(atom, replacements, of_data))
        result = add(result, term)
    return result


def _substitute_atom(atom: Atom, replacements: Mapping[Atom, Index], of_data: Callable[[Data], Index] | None) -> Index:
    found = replacements.get(atom)
    if found is not None:
        return found

    def again(part: Index) -> Index:
        return substitute(part, replacements, of_data)

    match atom:
        case FloorDiv(dividend=a, divisor=b):
            return floordiv(again(a), again(b))
        case Mod(dividend=a, divisor=b):
            return mod(again(a), again(b))
        case Least(left=a, right=b):
            return minimum(again(a), again(b))
        case Most(left=a, right=b):
            return maximum(again(a), again(b))
        case Data() if of_data is not None:
            return of_data(atom)
    return of_atom(atom)


def coefficient_of(value: Index, atom: Axis) -> Index | None:
    """What the value grows by when the axis moves one step; None if that is not the same everywhere."""
    step = ZERO
    for coefficient, monomial in value.terms:
        occurs = monomial.count(atom)
        if occurs > 1 or any(atom in free_atoms(part) for part in monomial if part is not atom):
            return None
        if occurs:
            rest = list(monomial)
            rest.remove(atom)
            step = add(step, Index(0, ((coefficient, tuple(rest)),)) if rest else coefficient)
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
        return text if text.isidentifier() or text.isdigit() else f"({text})"

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
