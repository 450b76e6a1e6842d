"""Walking, rebuilding and rewriting programs.

Nodes are interned, so a program is a graph in which equal parts are one object: everything here visits a node once, and
nothing recurses along expressions, which can be thousands of nodes deep. A rule is a function from an expression to
another one, or to None where it does not apply; its docstring says "before -> after".
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, count
from typing import Any, TypeAlias, TypeVar, Union, cast

from ferrite.errors import Malformed
from ferrite.loops.index import (
    Axis,
    Data,
    Index,
    Node,
    Size,
    Substitution,
    answer,
    atoms,
    data,
    free_atoms,
    free_axes,
    holds_data,
    inner_nodes,
    keep,
    of_atom,
    parts,
)
from ferrite.loops.nodes import (
    Accumulate,
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

Tree: TypeAlias = Union[Program, Nest, Statement, Expr]  # noqa: UP007
Rule: TypeAlias = Callable[[Expr], "Expr | None"]
T = TypeVar("T", bound=Tree)

# ---- looking


def children(node: Tree) -> tuple[Tree, ...]:
    """What a node is made of, in the order in which it is read; expressions inside indices included."""
    try:
        return node._children
    except AttributeError:
        keep(node, "_children", _children_of(node))
        return node._children


def _children_of(node: Tree) -> tuple[Tree, ...]:
    match node:  # the most frequent first
        case Load(index=places):
            return held_in(*places)
        case Apply(operands=operands):
            return operands
        case Const():
            return ()
        case Cast(value=value) | Bits(value=value):
            return (value,)
        case Select(condition=condition, yes=yes, no=no) | Guarded(condition=condition, value=yes, otherwise=no):
            return (condition, yes, no)
        case Reduce(body=body):
            return (body,)
        case Position(index=place):
            return held_in(place)
        case Store(index=places, value=value) | Accumulate(index=places, value=value):
            return (*held_in(*places), value)
        case Nest(body=body):
            return body
        case Program(nests=nests):
            return nests
        case Checked(value=value, size=size):
            return (value, *held_in(size))
        case Require(condition=condition, value=value):
            return (condition, value)
        case Random(seed=seed, counter=counter):
            return (seed, *held_in(counter))
        case Scan(targets=targets, value=value):
            return (*held_in(*(place for target in targets if target is not None for place in target[1])), value)
        case FoldScan(combine=combine, targets=targets, values=values):
            places = tuple(place for target in targets if target is not None for place in target[1])
            return (*held_in(*places), *combine, *values)
        case Assert(condition=condition):
            return (condition,)
        case Fold(combine=combine, values=values):
            return (*combine, *values)
    return ()


def held_in(*indices: Index) -> tuple[Expr, ...]:
    """The expressions that indices read from data, outermost ones only."""
    found: list[Expr] = []
    for value in indices:
        if not holds_data(value):
            continue
        for atom in atoms(value):
            if isinstance(atom, Data):
                found += (atom.value, *held_in(atom.low, atom.high))
            else:
                found += held_in(*parts(atom))
    return tuple(found)


def walk(node: Tree) -> Iterator[Tree]:
    """The node and everything in it, each once, parents first."""
    yield node
    if isinstance(node, Statement):  # everybody asks about them
        try:
            yield from node._inside
        except AttributeError:
            keep(node, "_inside", tuple(_everything_inside(node)))
            yield from node._inside
    else:
        yield from _everything_inside(node)


def _everything_inside(node: Tree) -> Iterator[Tree]:
    waiting = [*dict.fromkeys(reversed(children(node)))]
    seen = {node, *waiting}
    while waiting:
        current = waiting.pop()
        yield current
        for child in reversed(children(current)):
            if child not in seen:
                seen.add(child)
                waiting.append(child)


def met_always(node: Tree) -> Iterator[Tree]:
    """What is computed at every point, each once: not what a guard or a requirement protects, nor what reductions and
    scans compute along axes of their own."""
    waiting: list[Tree] = [node]
    seen: set[Tree] = set()
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        yield current
        if isinstance(current, (Guarded, Require)):
            waiting.append(current.condition)
        elif not isinstance(current, (Reduce, Fold, Scan, FoldScan)):
            waiting.extend(children(current))


def can_raise(node: Tree) -> bool:
    """Whether evaluating it may stop the kernel with an error: such a thing is not dropped."""
    raises: bool = answer(node, "_raises", _raises_of, children)
    return raises


def _raises_of(node: Tree) -> bool:
    return isinstance(node, (Checked, Require, Assert)) or any(child._raises for child in children(node))


def holds_argument(node: Tree) -> bool:
    """Whether it has a value only inside of the combine of a fold around it: such a thing is not moved out."""
    holds: bool = answer(node, "_holds_argument", _holds_argument_of, children)
    return holds


def _holds_argument_of(node: Tree) -> bool:
    # What a fold combines with binds its arguments.
    inner = node.values if isinstance(node, (Fold, FoldScan)) else children(node)
    return isinstance(node, Argument) or any(child._holds_argument for child in inner)


def loaded_in(node: Tree) -> frozenset[Buffer]:
    """The buffers that it reads."""
    loaded: frozenset[Buffer] = answer(node, "_loaded", _loaded_of, children)
    return loaded


def _loaded_of(node: Tree) -> frozenset[Buffer]:
    found = _NO_BUFFERS.union(*[child._loaded for child in children(node)])
    return found | {node.buffer} if isinstance(node, Load) else found


_NO_BUFFERS: frozenset[Buffer] = frozenset()


def _operands_first(node: Tree, done: Mapping[Tree, Any]) -> Iterator[Tree]:
    """What is not yet done of the node and everything in it, children first. The caller enters each into `done`."""
    waiting = [node]
    while waiting:
        current = waiting[-1]
        open_ones = [] if current in done else [child for child in children(current) if child not in done]
        if open_ones:
            waiting.extend(reversed(open_ones))
            continue
        waiting.pop()
        if current not in done:
            yield current


# ---- rebuilding


def _same_buffer(buffer: Buffer) -> Buffer:
    return buffer


def rebuild(
    node: T,
    of_child: Callable[[Any], Any],
    of_index: Callable[[Index], Index] | None = None,
    of_buffer: Callable[[Buffer], Buffer] = _same_buffer,
) -> T:
    """The same node with its children, and if asked its indices and buffers, replaced; itself if nothing changed.

    Without `of_index` the expressions inside indices are children like others.
    """
    move = of_index or Substitution({}, lambda held: _moved_data(held, of_child, move))
    return cast(T, _rebuild(node, of_child, move, of_buffer))


def _moved_data(held: Data, of_child: Callable[[Any], Any], move: Callable[[Index], Index]) -> Index:
    return data(of_child(held.value), move(held.low), move(held.high))


def _rebuild(
    node: Tree,
    of_child: Callable[[Any], Any],
    of_index: Callable[[Index], Index],
    of_buffer: Callable[[Buffer], Buffer],
) -> Tree:
    def moved(places: tuple[Index, ...]) -> tuple[Index, ...]:
        return tuple(map(of_index, places))

    match node:
        case Load(buffer=buffer, index=places):
            return Load(of_buffer(buffer), moved(places))
        case Apply(operation=operation, operands=operands):
            return Apply(operation, tuple(map(of_child, operands)))
        case Cast(kind=kind, value=value):
            return Cast(kind, of_child(value))
        case Select(condition=condition, yes=yes, no=no):
            return Select(of_child(condition), of_child(yes), of_child(no))
        case Program(name=name, sizes=sizes, parameters=parameters, locals=local_buffers, nests=nests):
            given = tuple(Parameter(of_buffer(parameter.buffer), parameter.role) for parameter in parameters)
            return Program(name, sizes, given, tuple(map(of_buffer, local_buffers)), tuple(map(of_child, nests)))
        case Nest(axes=axes, body=body):
            return Nest(axes, tuple(map(of_child, body)))
        case Store(buffer=buffer, index=places, value=value):
            return Store(of_buffer(buffer), moved(places), of_child(value))
        case Accumulate(operation=operation, buffer=buffer, index=places, value=value):
            return Accumulate(operation, of_buffer(buffer), moved(places), of_child(value))
        case Scan(operation=operation, axis=axis, targets=targets, value=value):
            kept = tuple(None if target is None else (of_buffer(target[0]), moved(target[1])) for target in targets)
            return Scan(operation, axis, kept, of_child(value))
        case FoldScan(combine=combine, axis=axis, targets=targets, values=values):
            kept = tuple(None if target is None else (of_buffer(target[0]), moved(target[1])) for target in targets)
            return FoldScan(tuple(map(of_child, combine)), axis, kept, tuple(map(of_child, values)))
        case Assert(condition=condition, error=error, message=message):
            return Assert(of_child(condition), error, message)
        case Bits(kind=kind, value=value):
            return Bits(kind, of_child(value))
        case Guarded(condition=condition, value=value, otherwise=otherwise):
            return Guarded(of_child(condition), of_child(value), of_child(otherwise))
        case Position(index=place):
            return Position(of_index(place))
        case Checked(value=value, size=size, wrap=wrap, error=error, message=message):
            return Checked(of_child(value), of_index(size), wrap, error, message)
        case Require(condition=condition, value=value, error=error, message=message):
            return Require(of_child(condition), of_child(value), error, message)
        case Random(draw=draw, seed=seed, stream=stream, counter=counter, kind=kind):
            return Random(draw, of_child(seed), stream, of_index(counter), kind)
        case Reduce(operation=operation, axes=axes, body=body, result=result):
            return Reduce(operation, axes, of_child(body), result)
        case Fold(combine=combine, axes=axes, values=values, result=result):
            return Fold(tuple(map(of_child, combine)), axes, tuple(map(of_child, values)), result)
    return node


def substitute_axes(node: T, replacements: Mapping[Axis, Index], around: Iterable[Axis] = ()) -> T:
    """An expression or statement with axes replaced by indices, wherever they stand: in loads, in positions, in data.

    Axes that reductions and scans bind inside get new names where the new indices, or the axes `around` the place to
    which the node moves, have those names: a name is bound once.
    """
    bound = _bound_inside(node)
    moves: dict[Any, Index] = {**replacements}
    renamed = _renamed_axes(node, bound, replacements, around)
    moves |= {old: of_atom(new) for old, new in renamed.items()}
    if not moves or (not renamed and free_atoms(node).isdisjoint(moves)):
        return node
    done: dict[Tree, Any] = {}

    def of_data(held: Data) -> Index:
        return _moved_data(held, done.__getitem__, move)

    move = Substitution(moves, of_data)
    for current in _operands_first(node, done):
        done[current] = _with_bound(rebuild(current, done.__getitem__, move), renamed)
    return cast(T, done[node])


def _bound_inside(node: Tree) -> dict[Axis, None]:
    """Axes that are bound somewhere inside, in order."""
    bound: dict[Axis, None] = {}
    for current in walk(node):
        if isinstance(current, (Reduce, Fold)):
            bound |= dict.fromkeys(current.axes)
        elif isinstance(current, (Scan, FoldScan)):
            bound[current.axis] = None
    return bound


def _renamed_axes(
    node: Tree, bound: Iterable[Axis], replacements: Mapping[Axis, Index], around: Iterable[Axis]
) -> dict[Axis, Axis]:
    """New axes for those bound inside whose name is taken outside, or whose extent changes."""
    taken = {axis.name for place in replacements.values() for axis in free_axes(place)} | {axis.name for axis in around}
    extents = Substitution(dict(replacements.items()), None)
    renamed: dict[Axis, Axis] = {}
    names: set[str] = set()
    for axis in bound:
        name = axis.name
        if name in taken:
            names = names or names_in(node) | taken
            name = fresh_name(axis.name, names)
            names.add(name)
        fresh = Axis(name, extents(axis.extent))
        if fresh is not axis:
            renamed[axis] = fresh
    return renamed


def _with_bound(node: Tree, renamed: Mapping[Axis, Axis]) -> Tree:
    match node:
        case Reduce(operation=operation, axes=axes, body=body, result=result):
            return Reduce(operation, tuple(renamed.get(axis, axis) for axis in axes), body, result)
        case Scan(operation=operation, axis=axis, targets=targets, value=value):
            return Scan(operation, renamed.get(axis, axis), targets, value)
        case Fold(combine=combine, axes=axes, values=values, result=number):
            return Fold(combine, tuple(renamed.get(axis, axis) for axis in axes), values, number)
        case FoldScan(combine=combine, axis=axis, targets=targets, values=values):
            return FoldScan(combine, renamed.get(axis, axis), targets, values)
    return node


def fresh_name(wish: str, *taken: Collection[str]) -> str:
    """The wish itself if it is free, or the first of wish_1, wish_2, ... that is."""
    names = chain((wish,), (f"{wish}_{number}" for number in count(1)))
    return next(name for name in names if not any(name in those for those in taken))


def names_in(node: Tree) -> set[str]:
    """Every name of a size, an axis or a buffer, wherever it stands."""
    names: set[str] = set()
    seen: set[Node] = {node}
    waiting: list[Node] = [node]
    while waiting:
        current = waiting.pop()
        if isinstance(current, (Axis, Size, Buffer)):
            names.add(current.name)
        for inner in inner_nodes(current):
            if isinstance(inner, Statement):
                names |= _names_in_statement(inner)
            elif inner not in seen:
                seen.add(inner)
                waiting.append(inner)
    return names


def _names_in_statement(statement: Statement) -> frozenset[str]:
    try:
        return statement._names
    except AttributeError:
        keep(statement, "_names", frozenset(names_in(statement)))
        return statement._names


def replace_buffers(node: T, replacements: Mapping[Buffer, Buffer]) -> T:
    """Every buffer that is declared, read or written becomes the one that stands for it."""
    done: dict[Tree, Any] = {}

    def of_buffer(buffer: Buffer) -> Buffer:
        return replacements.get(buffer, buffer)

    for current in _operands_first(node, done):
        done[current] = rebuild(current, done.__getitem__, of_buffer=of_buffer)
    return cast(T, done[node])


def rename_buffers(program: Program, names: Mapping[str, str]) -> Program:
    """The same program with other names for its buffers."""
    declared = (*(parameter.buffer for parameter in program.parameters), *program.locals)
    return replace_buffers(
        program,
        {
            buffer: Buffer(names[buffer.name], buffer.dtype, buffer.sizes, buffer.strides)
            for buffer in declared
            if buffer.name in names
        },
    )


# ---- rules


def apply_rules(program: T, rules: Sequence[Rule]) -> T:
    """Rewrite every expression, operands first, until no rule applies anywhere. Each node is settled once."""
    settled: dict[Tree, Tree] = {}
    for current in _operands_first(program, settled):
        if isinstance(current, Expr):
            _settle(current, rules, settled)
        else:
            settled[current] = rebuild(current, settled.__getitem__)
    return cast(T, settled[program])


def _settle(root: Expr, rules: Sequence[Rule], settled: dict[Tree, Tree]) -> None:
    """Find what the expression comes to, and what everything that turns up on the way comes to."""
    becomes: dict[Tree, Tree] = {}  # one step; the node waits until the next one is settled
    waiting: list[Tree] = [root]
    while waiting:
        current = waiting[-1]
        if current in settled:
            waiting.pop()
            continue
        step = becomes.get(current)
        if step is None:
            operands = children(current)
            open_ones = [operand for operand in operands if operand not in settled]
            if open_ones:
                _refuse_circles(current, open_ones, becomes)
                waiting.extend(reversed(open_ones))
                continue
            step = _one_step(current, operands, rules, settled)
            if step is None:
                settled[current] = current
                waiting.pop()
                continue
            becomes[current] = step
        if step in settled:
            settled[current] = settled[step]
            waiting.pop()
            continue
        _refuse_circles(current, [step], becomes)
        waiting.append(step)


def _one_step(node: Tree, operands: Sequence[Tree], rules: Sequence[Rule], settled: dict[Tree, Tree]) -> Tree | None:
    if any(settled[operand] is not operand for operand in operands):
        return rebuild(node, settled.__getitem__)
    assert isinstance(node, Expr)
    for rule in rules:
        found = rule(node)
        if found is not None and found is not node:
            return found
    return None


def _refuse_circles(node: Tree, following: Sequence[Tree], becomes: Mapping[Tree, Tree]) -> None:
    """A node that is waiting for its own result never gets one."""
    if any(other in becomes for other in following):
        raise Malformed(f"rules go in circles at {node!r:.300}", where="loops.rewrite", why="a rule undoes another one")
