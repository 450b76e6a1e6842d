"""What a pattern is made of. A pattern is an expression over calls; a value in it that is none of these is a constant
and must be equal. Lists and tuples are the same, and match element by element.

    mm = Op(aten.mm.default, Hole("a"), Hole("b"))
    Op(aten.add.Tensor, mm, Hole("c"))                       add(mm(a, b), c), and add(c, mm(a, b))

An expression object that is used twice must be one node. Arguments are compared by name, with the defaults of the op
filled in: what the pattern does not mention must have its default.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, eq=False)
class Anything:
    """Matches whatever stands there.

    text:  _
    """


@dataclass(frozen=True, eq=False)
class Hole:
    """Matches whatever stands there and gives it a name; the same name twice is the same value. With `alone`, a hole of
    another name that is alone may not hold the same node.

    text:  a        alone('a')
    """

    name: str
    alone: bool = False


@dataclass(frozen=True, eq=False)
class Size:
    """A size that varies: the graph's own number, provably the same as this one of the trace.

    text:  size('s0')
    """

    text: str


@dataclass(frozen=True, eq=False)
class Op:
    """A call. `ops` are alternatives: an overload, a packet for all its overloads, a function, or the name of a kind
    for all spellings of an op before autograd. `users` is how often it is read, None for any number; a node that the
    pattern ends in may be read by anybody. With `any_arguments` nothing is said about those.

    text:  aten.mm.default(a, b)     either(aten.add.Tensor, aten.sub.Tensor)(a, b)     users(2, aten.mm.default(a, b))
    """

    ops: tuple[Any, ...]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    users: int | None = 1
    any_arguments: bool = False


@dataclass(frozen=True, eq=False)
class Each:
    """A list all of whose elements match `pattern`, at least one; holes inside hold one value for each, but a name that
    also stands outside is one value for all. With `partial` elements that do not match are passed over.

    text:  each(aten.getitem(split, _))
    """

    pattern: Any
    partial: bool = False


@dataclass(frozen=True, eq=False)
class AllUses:
    """A call that matches `pattern`, as does every other reader of what it reads first; holes inside hold one value for
    each reader, but a name that also stands outside is one value for all.

    text:  all_uses(operator.getitem(split, _))
    """

    pattern: Op


@dataclass(frozen=True, eq=False)
class Several:
    """A pattern that ends in several nodes. The first is found where a search looks; the others from what they share
    with those before. None stands for a result that nobody needs.

    text:  several(first, second)
    """

    outputs: tuple[Op | None, ...]


def op(target: Any, *args: Any, users: int | None = 1, **kwargs: Any) -> Op:
    """A call of one op or, given a list of them, of any of these."""
    return Op(tuple(target) if isinstance(target, (list, tuple)) else (target,), args, kwargs, users)


def any_call(target: Any, users: int | None = 1) -> Op:
    """A call with whatever arguments."""
    return Op(tuple(target) if isinstance(target, (list, tuple)) else (target,), users=users, any_arguments=True)


def ends_of(pattern: Any) -> list[Op]:
    """The calls that a pattern ends in; the first is where a search looks for it."""
    if isinstance(pattern, Several):
        return [output for output in pattern.outputs if output is not None]
    return [pattern]


def inside(pattern: Any, but: Any = None) -> Iterator[Any]:
    """A pattern and everything in it, outermost first, `but` for one part of it."""
    if but is not None and pattern is but:
        return
    yield pattern
    parts: list[Any] = []
    match pattern:
        case Op(args=args, kwargs=kwargs):
            parts = [*args, *kwargs.values()]
        case Each(pattern=inner) | AllUses(pattern=inner):
            parts = [inner]
        case Several(outputs=outputs):
            parts = list(outputs)
        case list() | tuple():
            parts = list(pattern)
        case dict():
            parts = list(pattern.values())
    for part in parts:
        yield from inside(part, but)


def holes(pattern: Any, but: Any = None) -> list[str]:
    return list(dict.fromkeys(part.name for part in inside(pattern, but) if isinstance(part, Hole)))
