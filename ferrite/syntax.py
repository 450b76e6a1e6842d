"""Values as text: what graph text and host text share. Plain Python both ways, read by Python's own parser.

A value is None, a bool, number or string, a `Ref` to something that the program names, a `Named` object that lives
outside it (a dtype, a device, an operator), or a tuple, list, dict or slice of values. Nothing here knows torch:
whoever prints or reads a program brings the objects behind the names.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ferrite.errors import Malformed


@dataclass(frozen=True)
class Ref:
    """A value that the program itself names.

    text:  mm
    """

    name: str


@dataclass(frozen=True)
class Named:
    """An object that lives outside the program, by its dotted name, with literal arguments if it is made by a call.

    text:  aten.mm.default      torch.float32      torch.device('cpu')
    """

    path: str


def show(value: Any, name: Callable[[Named], str] = lambda named: named.path) -> str:
    """The text of a value; `name` may give outside objects another spelling."""
    match value:
        case Ref():
            return value.name
        case Named():
            return name(value)
        case None | bool() | int() | str():
            return repr(value)
        case float():
            return _show_float(value)
        case complex():
            return f"complex({_show_float(value.real)}, {_show_float(value.imag)})"
        case tuple():
            inner = ", ".join(show(item, name) for item in value)
            return f"({inner},)" if len(value) == 1 else f"({inner})"
        case list():
            return "[" + ", ".join(show(item, name) for item in value) + "]"
        case dict():
            return "{" + ", ".join(f"{show(k, name)}: {show(v, name)}" for k, v in value.items()) + "}"
        case slice():
            return f"slice({show(value.start, name)}, {show(value.stop, name)}, {show(value.step, name)})"
    raise Malformed(f"a {type(value).__name__} has no text", where="syntax.show", program=repr(value))


def show_call(target: str, args: tuple[Any, ...], kwargs: dict[str, Any], name: Callable[[Named], str]) -> str:
    parts = [show(arg, name) for arg in args]
    parts += [f"{key}={show(value, name)}" for key, value in kwargs.items()]
    return f"{target}({', '.join(parts)})"


def _show_float(value: float) -> str:
    """`inf` and `nan` are names that a reader knows; every other float is Python's shortest exact text."""
    if math.isnan(value):
        return "nan"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return repr(value)


def read(node: ast.expr, known: Callable[[str], bool]) -> Any:
    """The value behind a parsed expression. `known` tells a name of the program from an outside one."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id="inf"):
            return math.inf
        case ast.Name(id="nan"):
            return math.nan
        case ast.Name(id=name) if known(name):
            return Ref(name)
        case ast.Name() | ast.Attribute():
            return Named(dotted(node))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -read(operand, known)
        case ast.Tuple(elts=items):
            return tuple(read(item, known) for item in items)
        case ast.List(elts=items):
            return [read(item, known) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {read(key, known): read(value, known) for key, value in zip(keys, values, strict=True) if key}
        case ast.Call(func=ast.Name(id="slice"), args=[start, stop, step]):
            return slice(read(start, known), read(stop, known), read(step, known))
        case ast.Call(func=ast.Name(id="complex"), args=[real, imag]):
            return complex(read(real, known), read(imag, known))
        case ast.Call(keywords=[]):
            return Named(ast.unparse(node))
    raise Malformed("not a value", where="syntax.read", program=ast.unparse(node))


def dotted(node: ast.expr) -> str:
    """`a.b.c` as text."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attr):
            return f"{dotted(value)}.{attr}"
    raise Malformed("not a dotted name", where="syntax.dotted", program=ast.unparse(node))


def refs(value: Any) -> Iterator[str]:
    """Every name that a value reads, in order, repeats included."""
    match value:
        case Ref(name=name):
            yield name
        case tuple() | list():
            for item in value:
                yield from refs(item)
        case dict():
            for key, item in value.items():
                yield from refs(key)
                yield from refs(item)
        case slice():
            yield from refs((value.start, value.stop, value.step))


def renamed(value: Any, names: Mapping[str, str]) -> Any:
    """The value with other names for those that `names` has."""
    match value:
        case Ref(name=name):
            return Ref(names[name]) if name in names else value
        case tuple() | list():
            return type(value)(renamed(item, names) for item in value)
        case dict():
            return {renamed(key, names): renamed(item, names) for key, item in value.items()}
        case slice():
            return slice(*(renamed(part, names) for part in (value.start, value.stop, value.step)))
    return value
