"""Whether a pattern stands at a node. Nothing is changed; what does not fit leaves nothing behind.

Matching goes from a call to what it reads. Additions and multiplications of two tensors are tried in both orders, and
what one order bound is forgotten before the other is tried.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx import Node

from ferrite.graph.arguments import Parameter, bind, kind, signature, times_read
from ferrite.graph.pattern.nodes import AllUses, Anything, Each, Hole, Op, Several, Size, holes, inside
from ferrite.graph.values import value_of

_COMMUTE = ("add", "mul")
Note = Callable[[str, Callable[[], str]], None]


@dataclass(frozen=True)
class Match:
    """A pattern found: what its holes hold, the calls that it covers, and those that it ends in."""

    names: Mapping[str, Any]
    nodes: tuple[Node, ...]
    ends: tuple[Node | None, ...]

    def __getitem__(self, name: str) -> Any:
        if name not in self.names:
            raise KeyError(f"the pattern has no parameter {name!r}; it has {', '.join(self.names)}")
        return self.names[name]

    def calls(self, *targets: Any) -> list[Node]:
        """The matched calls of these ops, by target or kind."""
        return [node for node in self.nodes if node.target in targets or kind(node) in targets]


@dataclass(frozen=True)
class _State:
    """What is bound so far; a new one for every step, so that nothing has to be taken back."""

    names: Mapping[str, Any] = field(default_factory=dict)
    calls: Mapping[int, Node] = field(default_factory=dict)
    nodes: tuple[Node, ...] = ()
    alone: tuple[tuple[str, Any], ...] = ()  # names that share no value, and what they hold

    def bound(self, pattern: Op, node: Node) -> _State:
        return _State(self.names, {**self.calls, id(pattern): node}, (*self.nodes, node), self.alone)

    def named(self, name: str, value: Any, alone: bool) -> _State:
        held = (*self.alone, (name, value)) if alone else self.alone
        return _State({**self.names, name: value}, self.calls, self.nodes, held)


def find_match(pattern: Op | Several, node: Node, note: Note | None = None) -> Match | None:
    """The first way in which `pattern` ends in `node`, or None. `note` hears why not, place by place."""
    return next(_Matcher(pattern, note).matches(node), None)


class _Matcher:
    def __init__(self, pattern: Op | Several, note: Note | None) -> None:
        self._pattern = pattern
        self._note = note
        outputs = pattern.outputs if isinstance(pattern, Several) else (pattern,)
        self._outputs = outputs
        self._ends = {id(output) for output in outputs}

    def matches(self, node: Node) -> Iterator[Match]:
        first, *rest = (output for output in self._outputs if output is not None)
        for state in self._op(first, node, _State()):
            for whole in self._rest(rest, state):
                ends = tuple(None if output is None else whole.calls[id(output)] for output in self._outputs)
                yield Match(whole.names, tuple(dict.fromkeys(sorted(whole.nodes))), ends)

    def _rest(self, outputs: Sequence[Op], state: _State) -> Iterator[_State]:
        """The other ends: looked for among the readers of what is bound already."""
        if not outputs:
            yield state
            return
        output, *others = outputs
        for node in self._candidates(output, state):
            for found in self._op(output, node, state):
                yield from self._rest(others, found)

    def _candidates(self, output: Op, state: _State) -> list[Node]:
        if id(output) in state.calls:
            return [state.calls[id(output)]]
        found: dict[Node, None] = {}
        for anchor, distance in _anchors(output, state):
            reached = {anchor}
            for _ in range(distance):
                reached = {user for node in reached for user in node.users}
            found.update(dict.fromkeys(sorted(reached)))
        return list(found)

    def _value(self, pattern: Any, value: Any, state: _State) -> Iterator[_State]:
        match pattern:
            case Anything():
                yield state
            case Hole(name=name, alone=alone):
                yield from self._hole(name, alone, value, state)
            case Op():
                yield from self._op(pattern, value, state)
            case Each():
                yield from self._each(pattern, value, state)
            case AllUses():
                yield from self._all_uses(pattern, value, state)
            case Size(text=text):
                if _size_text(value) == text:
                    yield state
            case list() | tuple():
                if isinstance(value, (list, tuple)) and len(value) == len(pattern):
                    yield from self._in_turn(list(zip(pattern, value, strict=True)), state)
                else:
                    self._say("list", lambda: f"{value!r} is not a list of {len(pattern)}")
            case dict():
                if isinstance(value, dict) and value.keys() == pattern.keys():
                    yield from self._in_turn([(pattern[key], value[key]) for key in pattern], state)
            case _:
                if _same_constant(pattern, value):
                    yield state
                else:
                    self._say("constant", lambda: f"{value!r} is not {pattern!r}")

    def _in_turn(self, pairs: list[tuple[Any, Any]], state: _State) -> Iterator[_State]:
        if not pairs:
            yield state
            return
        (pattern, value), *rest = pairs
        for found in self._value(pattern, value, state):
            yield from self._in_turn(rest, found)

    def _hole(self, name: str, alone: bool, value: Any, state: _State) -> Iterator[_State]:
        if name in state.names:
            if _same_constant(state.names[name], value) and not _other_kind(state.names[name], value):
                yield state
            else:
                self._say(name, lambda: f"{name} is {state.names[name]!r} already, not {value!r}")
            return
        if alone and any(held is value and other != name for other, held in state.alone):
            self._say(name, lambda: f"{value!r} has another name already")
            return
        yield state.named(name, value, alone)

    def _op(self, pattern: Op, value: Any, state: _State) -> Iterator[_State]:
        where = _show_ops(pattern)
        if id(pattern) in state.calls:
            if state.calls[id(pattern)] is value:
                yield state
            else:
                self._say(where, lambda: f"{value!r} is not {state.calls[id(pattern)]!r}, which it was before")
            return
        if not isinstance(value, Node) or not any(_is_op(value, target) for target in pattern.ops):
            self._say(where, lambda: f"{value!r} is {getattr(value, 'target', 'no call')}")
            return
        if pattern.users is not None and id(pattern) not in self._ends and times_read(value) != pattern.users:
            self._say(where, lambda: f"{value!r} is read {times_read(value)} times, not {pattern.users}")
            return
        begun = state.bound(pattern, value)
        if pattern.any_arguments:
            yield begun
            return
        for pairs in _argument_pairs(pattern, value, lambda text: self._say(where, text)):
            if any(_other_kind(*pair) for pair in pairs) and not _reads_floats(value):
                self._say(where, lambda: f"a number of {value!r} is an int, and a float in the pattern, or the reverse")
            else:
                yield from self._in_turn(pairs, begun)

    def _each(self, pattern: Each, value: Any, state: _State) -> Iterator[_State]:
        if not isinstance(value, (list, tuple)):
            return
        own = self._own_names(pattern)
        for place, element in enumerate(value):
            matched = False
            # What the first one binds for all is tried in every way; the others then have little choice.
            for first in self._value(pattern.pattern, element, _fresh(state, pattern.pattern, own)):
                matched = True
                collected, current = [first.names], first
                for other in value[place + 1 :]:
                    found = next(self._value(pattern.pattern, other, _fresh(current, pattern.pattern, own)), None)
                    if found is not None:
                        collected.append(found.names)
                        current = found
                    elif not pattern.partial:
                        break
                else:
                    yield from self._gathered(state, current, own, collected)
            if matched or not pattern.partial:
                return

    def _all_uses(self, pattern: AllUses, value: Any, state: _State) -> Iterator[_State]:
        own = self._own_names(pattern)
        for first in self._op(pattern.pattern, value, _fresh(state, pattern.pattern, own)):
            producer = next((first.calls[id(part)] for part in pattern.pattern.args if id(part) in first.calls), None)
            if producer is None:
                return
            collected, current = [], first
            for user in sorted(producer.users):
                found = next(self._op(pattern.pattern, user, _fresh(current, pattern.pattern, own, producer)), None)
                if found is None:
                    self._say("all_uses", partial("{!r} reads {!r} in another way".format, user, producer))
                    break
                collected.append(found.names)
                current = found
            else:
                yield from self._gathered(state, current, own, collected)

    def _own_names(self, repeated: Each | AllUses) -> frozenset[str]:
        """The holes that hold one value for each repetition: those that stand nowhere else."""
        return frozenset(holes(repeated.pattern)).difference(holes(self._pattern, but=repeated))

    def _gathered(
        self, outer: _State, current: _State, own: frozenset[str], collected: list[Mapping[str, Any]]
    ) -> Iterator[_State]:
        """After all repetitions: what is one for all, and of the others one value for each."""
        names = {name: value for name, value in current.names.items() if name not in own}
        names |= {name: tuple(each[name] for each in collected) for name in collected[0] if name in own}
        for name in own & outer.names.keys():
            if not _same_constant(outer.names[name], names[name]):
                self._say(name, partial("{} is {!r} already, not {!r}".format, name, outer.names[name], names[name]))
                return
        yield replace(current, names=names)

    def _say(self, where: str, text: Callable[[], str]) -> None:
        if self._note is not None:
            self._note(where, text)


def _argument_pairs(
    pattern: Op, node: Node, say: Callable[[Callable[[], str]], None]
) -> Iterator[list[tuple[Any, Any]]]:
    """The arguments of pattern and node side by side, by name; twice for ops whose operands may change places."""
    call, parameters = bind(node), signature(node)
    if call is not None and parameters is None and not pattern.args:  # `to`, which sorts its arguments by type
        if call.given == pattern.kwargs.keys():
            yield [(pattern.kwargs[name], call[name]) for name in pattern.kwargs]
        return
    if call is None or parameters is None:
        if len(node.args) == len(pattern.args) and node.kwargs.keys() == pattern.kwargs.keys():
            both = [*zip(pattern.args, node.args, strict=True)]
            yield both + [(pattern.kwargs[name], node.kwargs[name]) for name in pattern.kwargs]
        return
    wanted = _by_name(pattern, parameters)
    if wanted is None:
        return
    defaults = {entry.names[0]: entry.default for entry in parameters}
    for name in call.arguments.keys() - wanted.keys():
        if not _same_constant(defaults.get(name, inspect.Parameter.empty), call.arguments[name]):
            say(partial("{!r} has {}={!r}".format, node, name, call.arguments[name]))
            return
    missing = object()
    pairs = {name: (value, call.arguments.get(name, missing)) for name, value in wanted.items()}
    if any(value is missing for _, value in pairs.values()):
        return
    yield list(pairs.values())
    if call.kind in _COMMUTE and _two_tensors(call.get("input"), call.get("other")) and call.get("alpha", 1) == 1:
        swapped = {**pairs}
        if "input" in pairs and "other" in pairs:
            swapped["input"] = (pairs["input"][0], call["other"])
            swapped["other"] = (pairs["other"][0], call["input"])
            yield list(swapped.values())


def _by_name(pattern: Op, parameters: tuple[Parameter, ...]) -> dict[str, Any] | None:
    """The arguments of a pattern by the names of the op that it meets."""
    positional = [entry for entry in parameters if entry.by_position]
    found: dict[str, Any] = {}
    rest = list(pattern.args)
    for entry in positional:
        if not rest:
            break
        if entry.takes_rest and not (len(rest) == 1 and not _is_number_pattern(rest[0])):
            found[entry.names[0]], rest = rest, []
        else:
            found[entry.names[0]] = rest.pop(0)
    ours = {spelling: entry.names[0] for entry in parameters for spelling in entry.names}
    for name, value in pattern.kwargs.items():
        if name not in ours or ours[name] in found:
            return None
        found[ours[name]] = value
    return None if rest else found


def _is_number_pattern(pattern: Any) -> bool:
    return isinstance(pattern, (int, Size)) and not isinstance(pattern, bool)


def _is_op(node: Node, target: Any) -> bool:
    if isinstance(target, str):
        return kind(node) == target
    if isinstance(target, OpOverloadPacket):
        return isinstance(node.target, OpOverload) and node.target.overloadpacket is target
    return node.target is target or node.target == target


def _two_tensors(*values: Any) -> bool:
    numbers = (int, float, torch.SymInt, torch.SymFloat)
    return all(isinstance(value, Node) and not isinstance(value_of(value), numbers) for value in values)


def _other_kind(one: Any, other: Any) -> bool:
    """Whether one is an int and the other a float."""
    return {type(one), type(other)} == {int, float}


def _reads_floats(node: Node) -> bool:
    """Whether a call gives the same with 2 as with 2.0: all tensors that it reads are floats."""
    values = [value_of(source) for source in node.all_input_nodes]
    return bool(values) and all(isinstance(value, torch.Tensor) and value.is_floating_point() for value in values)


def _same_constant(one: Any, other: Any) -> bool:
    """Equal, and of one kind as far as it always matters: 1 is 1.0, but neither is True, and 0.0 is not -0.0."""
    if isinstance(one, Node) or isinstance(other, Node):
        return one is other
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same_constant, one, other))
    if isinstance(one, bool) != isinstance(other, bool):
        return False
    if isinstance(one, torch.SymInt) or isinstance(other, torch.SymInt):
        return str(one) == str(other)
    if one != one and other != other:
        return True
    if type(one) in (int, float) and type(other) in (int, float) and one == other == 0:
        return math.copysign(1, one) == math.copysign(1, other)
    return bool(one == other) if isinstance(one, (int, float)) or type(one) is type(other) else False


def _size_text(value: Any) -> str | None:
    found = value_of(value) if isinstance(value, Node) else value
    return str(found) if isinstance(found, (int, torch.SymInt)) else None


def _fresh(state: _State, pattern: Any, own: frozenset[str], keep: Node | None = None) -> _State:
    """A state for one of several repetitions: without the names and the calls that belong to one repetition alone."""
    single = {id(part) for part in inside(pattern) if isinstance(part, Op) and (part is pattern or part.users == 1)}
    calls = {key: node for key, node in state.calls.items() if key not in single or node is keep}
    return replace(state, names={name: value for name, value in state.names.items() if name not in own}, calls=calls)


def _anchors(output: Op, state: _State) -> Iterator[tuple[Node, int]]:
    """Nodes bound already that stand in an end that is not, with their distance from it, nearest first."""
    waiting: list[tuple[Any, int]] = [(output, 0)]
    while waiting:
        pattern, depth = waiting.pop(0)
        if isinstance(pattern, Op) and id(pattern) in state.calls:
            yield state.calls[id(pattern)], depth
        elif isinstance(pattern, Hole) and isinstance(state.names.get(pattern.name), Node):
            yield state.names[pattern.name], depth
        elif isinstance(pattern, Op):
            waiting += [(part, depth + 1) for part in (*pattern.args, *pattern.kwargs.values())]
        elif isinstance(pattern, (list, tuple)):
            waiting += [(part, depth) for part in pattern]


def _show_ops(pattern: Op) -> str:
    return " or ".join(str(target) for target in pattern.ops)
