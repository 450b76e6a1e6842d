"""Patterns as text, one call a line, and back: what is kept in files, compared and shown.

    mm = aten.mm.default(a, b)
    return aten.add.Tensor(mm, c)

A call that stands in one place only is written there; one that is shared has a line of its own. Names that no line
defines are holes.
"""

from __future__ import annotations

import ast
import textwrap
from collections import Counter
from typing import Any

from ferrite.errors import Malformed
from ferrite.graph.names import name_of, resolve
from ferrite.graph.pattern.nodes import AllUses, Anything, Each, Hole, Op, Several, Size
from ferrite.syntax import Named, dotted, read, show


def show_pattern(pattern: Op | Several) -> str:
    """The whole pattern; equal text, equal pattern."""
    counted = Counter(id(part) for part in _each_once(pattern) if isinstance(part, Op))
    lines: list[str] = []
    names: dict[int, str] = {}

    def value(part: Any) -> str:
        match part:
            case Anything():
                return "_"
            case Hole(name=name, alone=alone):
                return f"alone({name!r})" if alone else name
            case Size(text=text):
                return f"size({text!r})"
            case Op():
                if id(part) in names:
                    return names[id(part)]
                text = call(part)
                if counted[id(part)] > 1:
                    names[id(part)] = f"t{len(names)}"
                    lines.append(f"{names[id(part)]} = {text}")
                    return names[id(part)]
                return text
            case Each(pattern=inner, partial=partial):
                return f"{'some' if partial else 'each'}({value(inner)})"
            case AllUses(pattern=inner):
                return f"all_uses({value(inner)})"
            case Several(outputs=outputs):
                return f"several({', '.join(value(output) for output in outputs)})"
            case list() | tuple():
                return f"[{', '.join(value(item) for item in part)}]"
        outside = name_of(part)
        return show(Named(outside) if outside is not None else part)

    def call(part: Op) -> str:
        targets = [f"kind.{target}" if isinstance(target, str) else str(name_of(target)) for target in part.ops]
        head = targets[0] if len(targets) == 1 else f"either({', '.join(targets)})"
        inner = ["..."] if part.any_arguments else [value(arg) for arg in part.args]
        inner += [f"{name}={value(arg)}" for name, arg in part.kwargs.items()]
        text = f"{head}({', '.join(inner)})"
        return text if part.users == 1 else f"users({part.users}, {text})"

    result = value(pattern)
    return "\n".join([*lines, f"return {result}"]) + "\n"


def _each_once(pattern: Any) -> list[Any]:
    """The places in a pattern; inside of a call that stands in several places is looked into once."""
    seen: set[int] = set()
    found: list[Any] = []

    def walk(part: Any) -> None:
        found.append(part)
        if isinstance(part, Op):
            if id(part) in seen:
                return
            seen.add(id(part))
        for inner in _parts(part):
            walk(inner)

    walk(pattern)
    return found


def _parts(pattern: Any) -> list[Any]:
    match pattern:
        case Op(args=args, kwargs=kwargs):
            return [*args, *kwargs.values()]
        case Each(pattern=inner) | AllUses(pattern=inner):
            return [inner]
        case Several(outputs=outputs):
            return list(outputs)
        case list() | tuple():
            return list(pattern)
    return []


def parse_pattern(text: str) -> Op | Several:
    """A pattern from its text. Raises `Malformed` with what does not fit."""
    names: dict[str, Op] = {}
    (function,) = ast.parse("def pattern():\n" + textwrap.indent(text, "    ")).body
    for statement in getattr(function, "body", ()):
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                names[name] = _read(value, names)
            case ast.Return(value=ast.expr() as value):
                found = _read(value, names)
                if isinstance(found, (Op, Several)):
                    return found
    raise Malformed("not a pattern", where="pattern.text", program=text)


def _read(node: ast.expr, names: dict[str, Op]) -> Any:
    match node:
        case ast.Name(id="_"):
            return Anything()
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.Name(id=name) if name not in ("inf", "nan"):
            return Hole(name)
        case ast.Call(func=ast.Name(id="alone"), args=[ast.Constant(value=name)]):
            return Hole(str(name), alone=True)
        case ast.Call(func=ast.Name(id="size"), args=[ast.Constant(value=text)]):
            return Size(str(text))
        case ast.Call(func=ast.Name(id="each"), args=[inner]):
            return Each(_read(inner, names))
        case ast.Call(func=ast.Name(id="some"), args=[inner]):
            return Each(_read(inner, names), partial=True)
        case ast.Call(func=ast.Name(id="all_uses"), args=[inner]):
            return AllUses(_read(inner, names))
        case ast.Call(func=ast.Name(id="several"), args=outputs):
            return Several(tuple(_read(output, names) for output in outputs))
        case ast.Call(func=ast.Name(id="users"), args=[ast.Constant(value=count), ast.Call() as inner]):
            return _read_call(inner, names, count)
        case ast.Call(func=func) if _is_target(func):
            return _read_call(node, names, 1)
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_read(item, names) for item in items]
    value = read(node, lambda _: False)
    return resolve(value.path) if isinstance(value, Named) else value


def _is_target(func: ast.expr) -> bool:
    match func:
        case ast.Call(func=ast.Name(id="either")):
            return True
        case ast.Attribute():
            return dotted(func) != "torch.device"
    return False


def _read_call(node: ast.Call, names: dict[str, Op], users: Any) -> Op:
    targets = node.func.args if isinstance(node.func, ast.Call) else [node.func]
    ops = tuple(_target(dotted(target)) for target in targets)
    kwargs = {str(word.arg): _read(word.value, names) for word in node.keywords}
    match node.args:
        case [ast.Constant(value=value)] if value is ...:
            return Op(ops, (), kwargs, users, any_arguments=True)
    return Op(ops, tuple(_read(arg, names) for arg in node.args), kwargs, users)


def _target(path: str) -> Any:
    return path.removeprefix("kind.") if path.startswith("kind.") else resolve(path)
