"""Loop programs as text and back: `show` prints any node, `parse_program` and `parse_expr` read.

The text is plain Python, read by Python's own parser; `docs/loop-ir.md` gives the grammar. Nodes are interned, so what
is read back is the very object that was printed. Indices are built through the arithmetic of `index.py` and so come out
in normal form whatever form they were written in. Reading checks that the text is a program, `check.py` that it makes
sense: a program that breaks a rule still prints and parses, so that it can be shown and tested.

Note [Named parts]: expressions share parts, and a tree that repeats each of them can be exponentially longer than what
it prints; they can also be thousands of levels deep, which no parser likes. So a part that is long and occurs more than
once, or that is deep, is named on a line before the statement:

    v0 = each(exp(x[i, k] - m[i]) for k in box(64))
    y[i] = sum(v0 for k in box(64)) / max(v0 for k in box(64))

The name stands for the expression, not for a value that is kept; `each` says which axes it takes from reductions around
its uses. It means nothing after its statement, and no node remembers it. A part of what a fold combines with also says
what it takes from the fold, whose lambda is not around it:

    v0 = each(lambda a0=left(0, f32), b0=right(0, f32): exp(a0 - b0) + f32(1.0))
    y[i] = fold(lambda a0, b0: v0 / (a0 + v0))(x[i, k] for k in box(64))
"""

from __future__ import annotations

import ast
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NoReturn, TypeAlias

from ferrite import syntax
from ferrite.errors import Malformed
from ferrite.loops import index as indices
from ferrite.loops.dtypes import DTYPES, DType, f32, i32
from ferrite.loops.index import Axis, Index, Size, free_axes
from ferrite.loops.nodes import (
    Accumulate,
    AnyNode,
    Apply,
    Argument,
    Assert,
    Bits,
    Buffer,
    Cast,
    Checked,
    Const,
    Expr,
    Fold,
    FoldScan,
    Guarded,
    Load,
    Nest,
    Parameter,
    Position,
    Program,
    Random,
    Reduce,
    Require,
    Scan,
    Select,
    Statement,
    Store,
)
from ferrite.loops.operations import OPERATIONS, REDUCTIONS, SCANS
from ferrite.loops.rewrite import children, fresh_name, held_in, holds_argument, names_in, walk
from ferrite.loops.shapes import contiguous_strides

LINE = 120  # columns; a longer signature has one parameter a line
LONG = 40  # characters; a repeated part with a longer text gets a name
DEEP = 24  # levels; a deeper part gets a name
RANDOM_DTYPES: dict[str, DType] = {"bits": i32, "uniform": f32, "normal": f32}

Place: TypeAlias = "tuple[Buffer, tuple[Index, ...]]"


# ---- printing


def show(node: AnyNode | Index) -> str:
    """The text of any node, without a line end but for programs. The same node always has the same text."""
    match node:
        case Program():
            return _show_program(node)
        case Nest():
            return "\n".join(_nest_lines(node, names_in(node)))
        case Statement():
            return "\n".join(_statement_lines(node, names_in(node)))
        case Parameter(buffer=buffer, role=role):
            kind = show_type(buffer)
            return f"{buffer.name}: {kind if role == 'in' else f'{role}({kind})'}"
        case Buffer():
            return f"{node.name}: {show_type(node)}"
        case Expr():
            printer = _Printer((node,), free_axes(node), names_in(node))
            text = printer.text(node)
            return "\n".join([*printer.lines, text])
        case Index():
            printer = _Printer(held_in(node), free_axes(node), names_in(Position(node)))
            text = printer.index(node)
            return "\n".join([*printer.lines, text])
    raise Malformed(f"a {type(node).__name__} has no text", where="loops.text", program=repr(node))


def show_type(buffer: Buffer) -> str:
    """`f32[8, 64]`, with the strides if they are not contiguous."""
    text = f"{buffer.dtype}[{_subscript(map(str, buffer.sizes))}]"
    if buffer.strides == contiguous_strides(buffer.sizes):
        return text
    return f"{text}.stride({', '.join(map(str, buffer.strides))})"


def _show_program(program: Program) -> str:
    taken = names_in(program)
    entries = [f"{size.name}: {_show_size(size)}" for size in program.sizes] + [show(p) for p in program.parameters]
    head = f"def {program.name}({', '.join(entries)}):"
    lines = [head] if len(head) <= LINE else [f"def {program.name}(", *(f"    {entry}," for entry in entries), "):"]
    body = [f"{buffer.name} = local({show_type(buffer)})" for buffer in program.locals]
    body += [line for nest in program.nests for line in _nest_lines(nest, taken)]
    return "\n".join([*lines, *_indented(body)]) + "\n"


def _show_size(size: Size) -> str:
    if size.high is not None:
        return f"size({size.low}, {size.high})"
    return "size()" if size.low is None else f"size({size.low})"


def _nest_lines(nest: Nest, taken: Collection[str]) -> list[str]:
    body = [line for statement in nest.body for line in _statement_lines(statement, taken)]
    return [f"for {_show_axes(nest.axes)}:", *_indented(body)]


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines or ["pass"]]


def _show_axes(axes: Sequence[Axis]) -> str:
    names = ", ".join(axis.name for axis in axes) or "_"
    return f"{names} in box({', '.join(str(axis.extent) for axis in axes)})"


def _statement_lines(statement: Statement, taken: Collection[str]) -> list[str]:
    known = free_axes(statement)
    match statement:
        case Store(buffer=buffer, index=index, value=value):
            printer = _Printer(_operands(statement), known, taken)
            text = f"{printer.place(buffer, index)} = {printer.text(value)}"
        case Accumulate(operation="add", buffer=buffer, index=index, value=value):
            printer = _Printer(_operands(statement), known, taken)
            text = f"{printer.place(buffer, index)} += {printer.text(value)}"
        case Accumulate(operation=operation, buffer=buffer, index=index, value=value):
            printer = _Printer((*held_in(*index), *_operands(statement)), known, taken)
            place, again = printer.place(buffer, index), printer.place(buffer, index)
            text = f"{place} = accumulate({operation!r}, {again}, {printer.text(value)})"
        case Scan(operation=operation, axis=axis, targets=targets, value=value):
            printer = _Printer(_operands(statement), known | {axis}, taken)
            places = ", ".join("_" if target is None else printer.place(*target) for target in targets)
            text = f"{places or '()'} = {operation}({printer.text(value)})"
            return [f"for {axis.name} in scan({axis.extent}):", *_indented([*printer.lines, text])]
        case FoldScan(combine=combine, axis=axis, targets=targets, values=values):
            printer = _Printer(_operands(statement), known | {axis}, taken)
            places = ", ".join("_" if target is None else printer.place(*target) for target in targets)
            made = printer.fold(statement, [printer.text(part) for part in combine])
            text = f"{places or '()'} = {made}({', '.join([printer.text(value) for value in values])})"
            return [f"for {axis.name} in scan({axis.extent}):", *_indented([*printer.lines, text])]
        case Assert(condition=condition, error=error, message=message):
            printer = _Printer(_operands(statement), known, taken)
            text = f"check({printer.text(condition)}, {error!r}, {message!r})"
        case _:
            raise Malformed(f"a {type(statement).__name__} has no text", where="loops.text", program=repr(statement))
    return [*printer.lines, text]


def _subscript(parts: Iterable[str]) -> str:
    return ", ".join(parts) or "()"


# How tightly operators bind, as in Python. All group from the left but comparisons, which do not group at all.
_STRENGTH = {
    symbol: strength
    for strength, symbols in enumerate(("== != < <= > >=", "|", "^", "&", "+ -", "* /"))
    for symbol in symbols.split()
}
_WHOLE = len(_STRENGTH)


@dataclass(frozen=True)
class _Text:
    """A printed expression, how tightly its outermost operator binds, and how deep it is nested."""

    text: str
    strength: int = _WHOLE
    depth: int = 0

    def as_operand(self, least: int) -> str:
        return self.text if self.strength >= least else f"({self.text})"


class _Printer:
    """Prints the expressions of one statement, from left to right. `lines` come before it: Note [Named parts]."""

    def __init__(self, roots: Sequence[Expr], known: frozenset[Axis], taken: Collection[str]) -> None:
        self.lines: list[str] = []
        self._repeated = _repeated(roots)
        self._known = known
        self._taken = taken
        self._named: dict[Expr, _Text] = {}
        self._count = 0

    def text(self, root: Expr) -> str:
        return self._print(root).text

    def index(self, value: Index) -> str:
        return _show_index(value, iter([self.text(held) for held in held_in(value)]))

    def place(self, buffer: Buffer, index: tuple[Index, ...]) -> str:
        return f"{buffer.name}[{_subscript(map(self.index, index))}]"

    def fold(self, node: Fold | FoldScan, combine: list[str]) -> str:
        """`fold(lambda a0, b0: a0 + b0)`: the values of the left side, then those of the right."""
        names = [self._name(side, number) for side in _SIDES for number in range(len(node.values))]
        return f"fold(lambda {', '.join(names)}: {_several(combine)})"

    def _name(self, side: str, number: int) -> str:
        return fresh_name(f"{_SIDES.get(side, side)}{number}", self._taken)

    def _compose(self, node: Expr, operands: list[_Text]) -> _Text:
        """As the function of this name, for what takes part in folds."""
        match node:
            case Argument(side=side, number=number):
                return _Text(self._name(side, number))
            case Fold(combine=combine, axes=axes, result=result):
                depth = 1 + max((operand.depth for operand in operands), default=-1)
                texts = [operand.text for operand in operands]
                made = self.fold(node, texts[: len(combine)])
                text = f"{made}({_several(texts[len(combine) :])} for {_show_axes(axes)})"
                return _Text(f"{text}[{result}]" if result else text, _WHOLE, depth)
        return _compose(node, operands)

    def _print(self, root: Expr) -> _Text:
        """Operands first, without recursion."""
        if root in self._named:
            return self._named[root]
        open_ones: list[tuple[Expr, Iterator[Expr], list[_Text]]] = [(root, iter(_operands(root)), [])]
        while True:
            node, waiting, texts = open_ones[-1]
            operand = next(waiting, None)
            if operand is None:
                open_ones.pop()
                done = self._perhaps_named(node, self._compose(node, texts))
                if not open_ones:
                    return done
                open_ones[-1][2].append(done)
            elif operand in self._named:
                texts.append(self._named[operand])
            else:
                open_ones.append((operand, iter(_operands(operand)), []))

    def _perhaps_named(self, node: Expr, text: _Text) -> _Text:
        if text.depth <= DEEP and (node not in self._repeated or len(text.text) <= LONG):
            return text
        name = self._fresh()
        self.lines.append(f"{name} = {self._part(node, text.text)}")
        self._named[node] = _Text(name)
        return self._named[node]

    def _part(self, node: Expr, text: str) -> str:
        given = [f"{self._name(a.side, a.number)}={a.side}({a.number}, {a.kind})" for a in _arguments_in(node)]
        if given:
            text = f"lambda {', '.join(given)}: {text}"
        own = sorted(free_axes(node) - self._known, key=lambda axis: axis.name)
        if own:
            text = f"{text} for {_show_axes(own)}"
        return f"each({text})" if given or own else text

    def _fresh(self) -> str:
        while (name := f"v{self._count}") in self._taken:
            self._count += 1
        self._count += 1
        return name


def _repeated(roots: Iterable[Expr]) -> set[Expr]:
    """The expressions that occur more than once."""
    seen: set[Expr] = set()
    repeated: set[Expr] = set()
    waiting = [*roots]
    while waiting:
        node = waiting.pop()
        if node in seen:
            repeated.add(node)
        else:
            seen.add(node)
            waiting += _operands(node)
    return repeated


def _operands(node: Expr | Statement) -> tuple[Expr, ...]:
    """The expressions right below, in the order of its text, those in its indices included."""
    return tuple(child for child in children(node) if isinstance(child, Expr))


_SIDES = {"left": "a", "right": "b"}  # of an argument, with the letter that its name begins with


def _arguments_in(node: Expr) -> list[Argument]:
    """The arguments that an expression takes from a fold around it, in order."""
    found = [inner for inner in walk(node) if isinstance(inner, Argument)] if holds_argument(node) else []
    return sorted(found, key=lambda argument: (argument.side, argument.number, argument.kind.name))


def _several(texts: Sequence[str]) -> str:
    """One thing as it stands, another number of them in brackets."""
    return texts[0] if len(texts) == 1 else f"({', '.join(texts)})"


def _show_index(value: Index, texts: Iterator[str]) -> str:
    """An index, with the texts of the expressions in it given in order."""
    return indices.show_index(value, lambda held: next(texts))


def _compose(node: Expr, operands: list[_Text]) -> _Text:
    """The text of an expression, from those of its operands."""
    depth = 1 + max((operand.depth for operand in operands), default=-1)
    if isinstance(node, Apply) and len(operands) == 2 and node.operation in OPERATIONS:
        symbol = OPERATIONS[node.operation].symbol
        if symbol:
            strength, (left, right) = _STRENGTH[symbol], operands
            text = f"{left.as_operand(max(strength, 1))} {symbol} {right.as_operand(strength + 1)}"
            return _Text(text, strength, depth)
    return _Text(_show_call(node, [operand.text for operand in operands]), _WHOLE, depth)


def _show_call(node: Expr, texts: list[str]) -> str:
    """The text of what is not an operator between two operands."""
    rest = iter(texts)
    match node:
        case Const(value=value, kind=kind):
            return f"{kind}({syntax.show(value)})"
        case Load(buffer=buffer, index=index):
            return f"{buffer.name}[{_subscript(_show_index(part, rest) for part in index)}]"
        case Cast(kind=kind):
            return f"{kind}({texts[0]})"
        case Bits(kind=kind):
            return f"bits({texts[0]}, {kind})"
        case Apply(operation=operation):
            return f"{operation}({', '.join(texts)})"
        case Select():
            return f"where({', '.join(texts)})"
        case Guarded():
            return f"guarded({', '.join(texts)})"
        case Position(index=index):
            return f"value({_show_index(index, rest)})"
        case Checked(size=size, wrap=wrap, error=error, message=message):
            return f"checked({next(rest)}, {_show_index(size, rest)}, {wrap}, {error!r}, {message!r})"
        case Require(error=error, message=message):
            return f"require({', '.join(texts)}, {error!r}, {message!r})"
        case Random(draw=draw, stream=stream, counter=counter, kind=kind):
            text = f"random({draw!r}, {next(rest)}, {stream}, {_show_index(counter, rest)}"
            return f"{text})" if kind is RANDOM_DTYPES.get(draw) else f"{text}, {kind})"
        case Reduce(operation=operation, axes=axes, result=result):
            text = f"{operation}({texts[0]} for {_show_axes(axes)})"
            return text if result == _first_result(operation) else f"{text}.{result}"
    raise Malformed(f"a {type(node).__name__} has no text", where="loops.text", program=repr(node))


def _first_result(operation: str) -> str | None:
    return REDUCTIONS[operation].results[0][0] if operation in REDUCTIONS else None


# ---- reading


def parse_program(text: str) -> Program:
    """The program that prints as `text`. Raises `Malformed` with the line that does not fit."""
    match _python(text):
        case [ast.FunctionDef() as function]:
            with _nested_too_deeply(text):
                return _read_program(function, tuple(text.splitlines()))
    raise Malformed("a program is one function", where="loops.text", program=text)


def parse_expr(
    text: str, buffers: Iterable[Buffer] = (), axes: Iterable[Axis] = (), sizes: Iterable[Size] = ()
) -> Expr:
    """The expression that prints as `text`, over buffers, axes and sizes that are known."""
    scope = _scope(text, buffers, axes, sizes)
    with _nested_too_deeply(text):
        return _read_expr(_after_parts(text, scope), scope)


def parse_index(
    text: str, buffers: Iterable[Buffer] = (), axes: Iterable[Axis] = (), sizes: Iterable[Size] = ()
) -> Index:
    """The index that prints as `text`."""
    scope = _scope(text, buffers, axes, sizes)
    with _nested_too_deeply(text):
        return _read_index(_after_parts(text, scope), scope)


@dataclass(frozen=True)
class _Scope:
    """What names mean at one place of the text."""

    lines: tuple[str, ...]
    buffers: Mapping[str, Buffer]
    places: Mapping[str, Axis | Size]
    named: dict[str, Expr]  # Note [Named parts]; one for each statement, filled on the way to it

    def inside(self, axes: tuple[Axis, ...]) -> _Scope:
        return replace(self, places={**self.places, **{axis.name: axis for axis in axes}})

    def at_statement(self) -> _Scope:
        return replace(self, named={})

    def refuse(self, node: ast.stmt | ast.expr | ast.arg, title: str) -> NoReturn:
        line = self.lines[node.lineno - 1].strip() if node.lineno <= len(self.lines) else ""
        raise Malformed(f"line {node.lineno}: {title}", where="loops.text", program=line)


def _scope(text: str, buffers: Iterable[Buffer], axes: Iterable[Axis], sizes: Iterable[Size]) -> _Scope:
    places: dict[str, Axis | Size] = {size.name: size for size in sizes}
    places.update((axis.name, axis) for axis in axes)
    return _Scope(tuple(text.splitlines()), {buffer.name: buffer for buffer in buffers}, places, {})


def _python(text: str) -> list[ast.stmt]:
    try:
        return ast.parse(text).body
    except SyntaxError as error:
        line = (error.text or "").strip()
        raise Malformed(f"line {error.lineno}: {error.msg}", where="loops.text", program=line) from error
    except (RecursionError, MemoryError) as error:
        raise Malformed("nested too deeply", where="loops.text", program=text[:LINE]) from error


@contextmanager
def _nested_too_deeply(text: str) -> Iterator[None]:
    """What `show` prints is never that deep; what people write may be."""
    try:
        yield
    except RecursionError as error:
        raise Malformed("nested too deeply", where="loops.text", program=text[:LINE]) from error


def _after_parts(text: str, scope: _Scope) -> ast.expr:
    """The one expression that a text ends with; named parts before it are put into the scope."""
    match _python(text):
        case [*parts, ast.Expr(value=value)]:
            for part in parts:
                if not _read_part(part, scope):
                    scope.refuse(part, "expected a named part")
            return value
    raise Malformed("expected one expression", where="loops.text", program=text)


def _read_part(line: ast.stmt, scope: _Scope) -> bool:
    """Whether the line names a part of the statement that follows. If so, the scope knows it from now on."""
    match line:
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            pass
        case _:
            return False
    if name in scope.named or name in scope.buffers or name in scope.places:
        scope.refuse(line, f"{name} has a meaning already")
    match value:
        case ast.Call(func=ast.Name(id="each"), args=[ast.GeneratorExp(elt=body, generators=[loop])], keywords=[]):
            inner = scope.inside(_read_axes(loop.target, loop.iter, "box", scope))
            scope.named[name] = _read_each(body, inner)
        case ast.Call(func=ast.Name(id="each"), args=[body], keywords=[]):
            scope.named[name] = _read_each(body, scope)
        case _:
            scope.named[name] = _read_expr(value, scope)
    return True


def _read_each(node: ast.expr, scope: _Scope) -> Expr:
    """A part, perhaps of what a fold combines with."""
    if isinstance(node, ast.Lambda):
        given = [_read_argument(default, scope) for default in node.args.defaults]
        return _read_expr(node.body, _inside_lambda(node, given, scope))
    return _read_expr(node, scope)


def _read_argument(node: ast.expr, scope: _Scope) -> Argument:
    match node:
        case ast.Call(
            func=ast.Name(id=side), args=[ast.Constant(value=int() as number), ast.Name(id=kind)], keywords=[]
        ) if side in _SIDES and kind in DTYPES:
            return Argument(side, number, DTYPES[kind])
    scope.refuse(node, "expected what an argument is, like left(0, f32)")


def _read_program(function: ast.FunctionDef, lines: tuple[str, ...]) -> Program:
    buffers: dict[str, Buffer] = {}
    places: dict[str, Axis | Size] = {}
    scope = _Scope(lines, buffers, places, {})
    given = function.args
    if given.defaults or given.vararg or given.kwarg or given.kwonlyargs or given.posonlyargs or function.returns:
        scope.refuse(function, "a parameter is a name and a type")
    sizes: list[Size] = []
    parameters: list[Parameter] = []
    for argument in given.args:
        read = _read_parameter(argument, scope)
        if isinstance(read, Size):
            if parameters:
                scope.refuse(argument, "sizes come before buffers")
            sizes.append(read)
            places[read.name] = read
        else:
            parameters.append(read)
            buffers[read.buffer.name] = read.buffer
    own: list[Buffer] = []
    nests: list[Nest] = []
    for statement in function.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=ast.Name(id="local"), args=[kind])):
                if nests:
                    scope.refuse(statement, "locals come before loops")
                own.append(_read_type(name, kind, scope))
                buffers[name] = own[-1]
            case ast.For():
                nests.append(_read_nest(statement, scope))
            case ast.Pass():
                pass
            case _:
                scope.refuse(statement, "expected a local or a loop over a box")
    return Program(function.name, tuple(sizes), tuple(parameters), tuple(own), tuple(nests))


def _read_parameter(argument: ast.arg, scope: _Scope) -> Size | Parameter:
    match argument.annotation:
        case None:
            scope.refuse(argument, f"{argument.arg} has no type")
        case ast.Call(func=ast.Name(id="size"), args=bounds, keywords=[]):
            low, high = ([_read_bound(bound, scope) for bound in bounds] + [None, None])[:2]
            return Size(argument.arg, low, high)
        case ast.Call(func=ast.Name(id="out" | "inout" as role), args=[kind], keywords=[]):
            return Parameter(_read_type(argument.arg, kind, scope), role)
        case kind:
            return Parameter(_read_type(argument.arg, kind, scope), "in")


def _read_bound(node: ast.expr, scope: _Scope) -> int | None:
    if isinstance(node, ast.Constant) and node.value is None:
        return None
    value = _literal(node)
    if not isinstance(value, int):
        scope.refuse(node, "the bound of a size is an integer or None")
    return value


def _read_type(name: str, node: ast.expr, scope: _Scope) -> Buffer:
    match node:
        case ast.Subscript(value=ast.Name(id=kind), slice=sizes) if kind in DTYPES:
            extents = _read_indices(sizes, scope)
            return Buffer(name, DTYPES[kind], extents, contiguous_strides(extents))
        case ast.Call(func=ast.Attribute(value=ast.Subscript() as inner, attr="stride"), args=steps, keywords=[]):
            dense = _read_type(name, inner, scope)
            return Buffer(name, dense.dtype, dense.sizes, tuple(_read_index(step, scope) for step in steps))
    scope.refuse(node, f"the type of {name} is not like f32[8, 64] or f32[8, 64].stride(1, 8)")


def _read_axes(target: ast.expr, domain: ast.expr, word: str, scope: _Scope) -> tuple[Axis, ...]:
    match domain:
        case ast.Call(func=ast.Name(id=called), args=extents, keywords=[]) if called == word:
            pass
        case _:
            scope.refuse(domain, f"expected {word}(...)")
    names: list[str] = []
    for name in target.elts if isinstance(target, ast.Tuple) else [target]:
        if not isinstance(name, ast.Name):
            scope.refuse(target, "a loop variable is a name")
        names.append(name.id)
    if not extents and names == ["_"]:
        return ()
    if len(names) != len(extents):
        scope.refuse(target, f"{len(names)} loop variables for {len(extents)} extents")
    return tuple(Axis(name, _read_index(extent, scope)) for name, extent in zip(names, extents, strict=True))


def _read_nest(loop: ast.For, scope: _Scope) -> Nest:
    axes = _read_axes(loop.target, loop.iter, "box", scope)
    if loop.orelse:
        scope.refuse(loop, "a loop has no else")
    inner = scope.inside(axes).at_statement()
    body: list[Statement] = []
    for line in loop.body:
        if not isinstance(line, ast.Pass) and not _read_part(line, inner):
            body.append(_read_statement(line, inner))
            inner = inner.at_statement()
    if inner.named:
        inner.refuse(loop.body[-1], "a named part has no statement after it")
    return Nest(axes, tuple(body))


def _read_statement(line: ast.stmt, scope: _Scope) -> Statement:
    match line:
        case ast.Assign(
            targets=[target], value=ast.Call(func=ast.Name(id="accumulate"), args=[operation, there, value])
        ):
            buffer, index = _read_place(target, scope)
            if _read_place(there, scope) != (buffer, index):
                scope.refuse(line, "an accumulation reads the element that it writes")
            return Accumulate(_read_string(operation, scope), buffer, index, _read_expr(value, scope))
        case ast.AugAssign(target=target, op=ast.Add(), value=value):
            return Accumulate("add", *_read_place(target, scope), _read_expr(value, scope))
        case ast.Assign(targets=[target], value=value):
            return Store(*_read_place(target, scope), _read_expr(value, scope))
        case ast.For():
            return _read_scan(line, scope)
        case ast.Expr(value=ast.Call(func=ast.Name(id="check"), args=[condition, error, message], keywords=[])):
            found = _read_expr(condition, scope)
            return Assert(found, _read_string(error, scope), _read_string(message, scope))
    scope.refuse(line, "expected a store, an accumulation, a scan or a check")


def _read_scan(loop: ast.For, scope: _Scope) -> Scan | FoldScan:
    axes = _read_axes(loop.target, loop.iter, "scan", scope)
    if len(axes) != 1:
        scope.refuse(loop, "a scan runs along one axis")
    inner = scope.inside(axes)
    *parts, last = loop.body
    for part in parts:
        if not _read_part(part, inner):
            inner.refuse(part, "expected a named part")
    match last:
        case ast.Assign(targets=[target], value=ast.Call(func=ast.Name(id=operation), args=[value], keywords=[])):
            if operation not in SCANS:
                inner.refuse(last, f"there is no scan {operation}")
            places = target.elts if isinstance(target, ast.Tuple) else [target]
            targets = tuple(_read_target(place, inner) for place in places)
            return Scan(operation, axes[0], targets, _read_expr(value, inner))
        case ast.Assign(targets=[target], value=ast.Call(func=ast.Call() as made, args=values, keywords=[])):
            places = target.elts if isinstance(target, ast.Tuple) else [target]
            targets = tuple(_read_target(place, inner) for place in places)
            given = tuple(_read_expr(value, inner) for value in values)
            return FoldScan(_read_combine(made, given, inner), axes[0], targets, given)
    scope.refuse(last, "expected the targets of a scan and its call")


def _read_target(node: ast.expr, scope: _Scope) -> Place | None:
    return None if isinstance(node, ast.Name) and node.id == "_" else _read_place(node, scope)


def _read_place(node: ast.expr, scope: _Scope) -> Place:
    match node:
        case ast.Subscript(value=ast.Name(id=name), slice=index):
            if name not in scope.buffers:
                scope.refuse(node, f"there is no buffer {name}")
            return scope.buffers[name], _read_indices(index, scope)
    scope.refuse(node, "expected an element of a buffer")


def _read_string(node: ast.expr, scope: _Scope) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    scope.refuse(node, "expected a string")


# ---- reading expressions

_SYMBOLS: dict[type[ast.AST], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.BitAnd: "&", ast.BitOr: "|", ast.BitXor: "^",
    ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
}  # fmt: skip
_OPERATORS = {row.symbol: row.name for row in OPERATIONS.values() if row.symbol}


def _read_expr(node: ast.expr, scope: _Scope) -> Expr:
    match node:
        case ast.Name(id=name):
            if name not in scope.named:
                scope.refuse(node, f"{name} is not an expression")
            return scope.named[name]
        case ast.Subscript(value=ast.Call(func=ast.Call()) as call, slice=ast.Constant(value=int() as number)):
            return _read_fold(call, number, scope)
        case ast.Subscript():
            return Load(*_read_place(node, scope))
        case ast.BinOp(left=left, op=sign, right=right):
            return _read_infix(node, sign, left, right, scope)
        case ast.Compare(left=left, ops=[sign], comparators=[right]):
            return _read_infix(node, sign, left, right, scope)
        case ast.Attribute(value=ast.Call(args=[ast.GeneratorExp()]) as call, attr=result):
            return _read_reduce(call, result, scope)
        case ast.Call(func=ast.Call()):
            return _read_fold(node, 0, scope)
        case ast.Call(args=[ast.GeneratorExp()]):
            return _read_reduce(node, None, scope)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
            return _read_call(node, name, args, scope)
    scope.refuse(node, f"{ast.unparse(node)} is not an expression")


def _read_infix(node: ast.expr, sign: ast.AST, left: ast.expr, right: ast.expr, scope: _Scope) -> Expr:
    operation = _OPERATORS.get(_SYMBOLS.get(type(sign), ""))
    if operation is None:
        scope.refuse(node, f"there is no operator {type(sign).__name__}")
    return Apply(operation, (_read_expr(left, scope), _read_expr(right, scope)))


def _read_reduce(call: ast.Call, result: str | None, scope: _Scope) -> Expr:
    match call:
        case ast.Call(func=ast.Name(id=name), args=[ast.GeneratorExp(elt=body, generators=[loop])], keywords=[]) if (
            not loop.ifs
        ):
            if name not in REDUCTIONS:
                scope.refuse(call, f"there is no reduction {name}")
            axes = _read_axes(loop.target, loop.iter, "box", scope)
            results = [known for known, _ in REDUCTIONS[name].results]
            if result is not None and result not in results:
                scope.refuse(call, f"{name} gives {' and '.join(results)}, not {result}")
            return Reduce(name, axes, _read_expr(body, scope.inside(axes)), results[0] if result is None else result)
    scope.refuse(call, "expected a reduction over one box")


def _read_fold(call: ast.Call, result: int, scope: _Scope) -> Expr:
    match call:
        case ast.Call(func=made, args=[ast.GeneratorExp(elt=body, generators=[loop])], keywords=[]) if not loop.ifs:
            axes = _read_axes(loop.target, loop.iter, "box", scope)
            inner = scope.inside(axes)
            values = tuple(_read_expr(value, inner) for value in _read_several(body))
            return Fold(_read_combine(made, values, scope), axes, values, result)
    scope.refuse(call, "expected a fold over one box")


def _read_combine(made: ast.expr, values: Sequence[Expr], scope: _Scope) -> tuple[Expr, ...]:
    """What a fold of these values combines with."""
    match made:
        case ast.Call(func=ast.Name(id="fold"), args=[ast.Lambda(body=body) as function], keywords=[]) if (
            not function.args.defaults
        ):
            given = [Argument(side, number, value.dtype) for side in _SIDES for number, value in enumerate(values)]
            inner = _inside_lambda(function, given, scope)
            return tuple(_read_expr(part, inner) for part in _read_several(body))
    scope.refuse(made, "expected fold(lambda ...)")


def _read_several(node: ast.expr) -> list[ast.expr]:
    return node.elts if isinstance(node, ast.Tuple) else [node]


def _inside_lambda(function: ast.Lambda, given: Sequence[Argument], scope: _Scope) -> _Scope:
    """Where the names of a lambda mean these arguments."""
    own = function.args
    names = [argument.arg for argument in own.args]
    if own.vararg or own.kwarg or own.kwonlyargs or own.posonlyargs or len(names) != len(given):
        scope.refuse(function, f"expected {len(given)} names for what is combined")
    for name in names:
        if name in scope.named or name in scope.buffers or name in scope.places:
            scope.refuse(function, f"{name} has a meaning already")
    return replace(scope, named={**scope.named, **dict(zip(names, given, strict=True))})


def _read_call(node: ast.expr, name: str, args: list[ast.expr], scope: _Scope) -> Expr:
    match name, args:
        case _, [operand] if name in DTYPES:
            value = _literal(operand)
            return Cast(DTYPES[name], _read_expr(operand, scope)) if value is None else Const(value, DTYPES[name])
        case "where", [a, b, c]:
            return Select(_read_expr(a, scope), _read_expr(b, scope), _read_expr(c, scope))
        case "guarded", [a, b, c]:
            return Guarded(_read_expr(a, scope), _read_expr(b, scope), _read_expr(c, scope))
        case "value", [position]:
            return Position(_read_index(position, scope))
        case "bits", [a, ast.Name(id=kind)] if kind in DTYPES:
            return Bits(DTYPES[kind], _read_expr(a, scope))
        case "checked", [a, size, ast.Constant(value=bool() as wrap), error, message]:
            found, extent = _read_expr(a, scope), _read_index(size, scope)
            return Checked(found, extent, wrap, _read_string(error, scope), _read_string(message, scope))
        case "require", [a, b, error, message]:
            condition, found = _read_expr(a, scope), _read_expr(b, scope)
            return Require(condition, found, _read_string(error, scope), _read_string(message, scope))
        case "random", [draw, seed, stream, counter, *rest]:
            return _read_random(node, (draw, seed, stream, counter), rest, scope)
    if name in OPERATIONS:
        return Apply(name, tuple(_read_expr(operand, scope) for operand in args))
    known = name in ("where", "guarded", "value", "bits", "checked", "require", "random") or name in DTYPES
    scope.refuse(node, f"{name} takes other arguments" if known else f"there is no operation {name}")


def _read_random(
    node: ast.expr, given: tuple[ast.expr, ast.expr, ast.expr, ast.expr], rest: list[ast.expr], scope: _Scope
) -> Expr:
    draw, stream = _read_string(given[0], scope), _literal(given[2])
    match rest:
        case []:
            kind = RANDOM_DTYPES.get(draw)
        case [ast.Name(id=name)]:
            kind = DTYPES.get(name)
        case _:
            kind = None
    if kind is None:
        scope.refuse(node, f"random draws {', '.join(RANDOM_DTYPES)}, not {draw}, of a known dtype")
    if type(stream) is not int:
        scope.refuse(node, "the stream of a random draw is an integer")
    return Random(draw, _read_expr(given[1], scope), stream, _read_index(given[3], scope), kind)


def _literal(node: ast.expr) -> bool | int | float | None:
    """The number that is written there, None if it is not a number."""
    match node:
        case ast.Constant(value=bool() | int() | float() as value):
            return value
        case ast.Name(id="inf"):
            return math.inf
        case ast.Name(id="nan"):
            return math.nan
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            inner = _literal(operand)
            return None if inner is None or isinstance(inner, bool) else -inner
    return None


# ---- reading indices


def _read_indices(node: ast.expr, scope: _Scope) -> tuple[Index, ...]:
    parts = node.elts if isinstance(node, ast.Tuple) else [node]
    return tuple(_read_index(part, scope) for part in parts)


def _read_index(node: ast.expr, scope: _Scope) -> Index:
    match node:
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            return indices.constant(value)
        case ast.Name(id=name):
            if name not in scope.places:
                scope.refuse(node, f"{name} is neither a loop variable nor a size here")
            return indices.of_atom(scope.places[name])
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_read_index(operand, scope)
        case ast.BinOp(left=left, op=sign, right=right):
            return _read_arithmetic(node, sign, _read_index(left, scope), _read_index(right, scope), scope)
        case ast.Call(func=ast.Name(id="min"), args=[left, right], keywords=[]):
            return indices.minimum(_read_index(left, scope), _read_index(right, scope))
        case ast.Call(func=ast.Name(id="max"), args=[left, right], keywords=[]):
            return indices.maximum(_read_index(left, scope), _read_index(right, scope))
        case ast.Call(func=ast.Name(id="at"), args=[value, low, high], keywords=[]):
            return indices.data(_read_expr(value, scope), _read_index(low, scope), _read_index(high, scope))
    scope.refuse(node, f"{ast.unparse(node)} is not an index")


def _read_arithmetic(node: ast.expr, sign: ast.operator, left: Index, right: Index, scope: _Scope) -> Index:
    match sign:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.FloorDiv():
            return left // right
        case ast.Mod():
            return left % right
    scope.refuse(node, f"there is no operator {type(sign).__name__} in an index")
