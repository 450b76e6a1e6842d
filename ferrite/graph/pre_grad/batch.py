"""Many small ops of one kind become one large op: the engine of the passes `batch_*`.

    [torch.tanh(t) for t in tensors]  becomes  torch.tanh(torch.stack(tensors)).unbind(0)

A `Rule` reads a node as a member (which op, on what), and makes one op of many members. The engine finds members that
are read close together, have one key, and do not wait for each other; sets are made in graph order.

A member stays out if its value is written later: autograd refuses writes to one of several views. One that is returned,
or read by somebody to whom strides matter, gets a copy of its part.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any

import torch
from torch.fx import Graph, Node

from ferrite.graph.arguments import bind, find, kind
from ferrite.graph.build import Builder, CannotBuild
from ferrite.graph.gradients import Gradients
from ferrite.graph.groups import Groups, Set
from ferrite.graph.pieces import item_of
from ferrite.graph.soundness import Soundness
from ferrite.graph.values import same_metadata, tensor_of, value_of


@dataclass(frozen=True)
class Member:
    """One op that may become part of a larger one. `key`: what all members of a set have in common; the engine adds
    modes, where gradients flow and, if that is asked for, the kinds of readers."""

    node: Node
    operands: tuple[Node, ...]
    key: Hashable
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def parent(self) -> Node:
        """Where the first operand comes from: what it is a part of, or itself."""
        item = item_of(self.operands[0])
        return self.operands[0] if item is None else item[0]


@dataclass(frozen=True)
class Limits:
    """`least`, `most`: members of a set. `depth`: how far above its reader a member may stand. `same_parent`: only
    members whose inputs come from one node. `same_users`: only members that are read by ops of the same kinds."""

    least: int = 5
    most: int = 300
    depth: int = 5
    same_parent: bool = False
    same_users: bool = False


@dataclass(frozen=True)
class Rule:
    """`read` gives a member, the reason why a node cannot be one, or None for a node that does not look like one.
    `fuse` gives one node for each member, in order. `by_parent`: sets whose inputs come from one node are made first.
    `random`: members may draw random numbers, and need not draw those that eager draws."""

    kinds: tuple[str, ...]
    read: Callable[[Soundness, Node], Member | str | None]
    fuse: Callable[[Builder, Sequence[Member]], Sequence[Node]]
    by_parent: bool = False
    random: bool = False


def limited(**usual: Any) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """A pass `f(graph, limits)` becomes one that takes each limit as a setting, `f(graph, least=3)`; the others are as
    `Limits` says, or as `usual` does."""
    defaults = Limits(**usual)
    names = [entry.name for entry in fields(Limits)]

    def decorate(run: Callable[..., int]) -> Callable[..., int]:
        @wraps(run)
        def with_settings(graph: Graph, **settings: Any) -> int:
            given = {name: settings.pop(name) for name in names if name in settings}
            return run(graph, replace(defaults, **given), **settings)

        graph, _, *own = signature(run).parameters.values()
        limits = [Parameter(name, Parameter.KEYWORD_ONLY, default=getattr(defaults, name)) for name in names]
        with_settings.__signature__ = Signature([graph, *limits, *own])  # type: ignore[attr-defined]
        return with_settings

    return decorate


def batch(graph: Graph, rule: Rule, limits: Limits) -> int:
    """Make one op of every set of members that the limits allow; gives the number of sets."""
    sound = Soundness(graph)
    members = _members(sound, rule)
    if len(members) < limits.least:
        return 0
    gradients = Gradients(graph, sound.modes, sound.aliases)
    members = {
        node: replace(member, key=(member.key, gradients.of(node), sound.modes.of(node), _users(node, limits)))
        for node, member in members.items()
    }
    groups = Groups(graph, list(members), limits.depth)
    alike = [groups.of(nodes) for nodes in _by(members, lambda member: member.key) if len(nodes) >= limits.least]
    parents = [groups.of(nodes) for nodes in _by(members, lambda member: member.parent)]
    engine = _Engine(sound, rule, limits, groups)
    seen: set[Set] = set()
    for near in groups.close():
        for key in alike:
            among = near & key & ~engine.refused
            if among.bit_count() < limits.least or among in seen:
                continue
            seen.add(among)
            if rule.by_parent or limits.same_parent:
                for parent in parents:
                    engine.fuse(among & parent)
            if not limits.same_parent:
                engine.fuse(among)
    return engine.finish()


def pointwise(name: str, function: Callable[..., Any], *options: str, random: bool = False) -> Rule:
    """The rule for an op that treats every number alike: on the stack of all inputs, with the same options."""

    def read(sound: Soundness, node: Node) -> Member | str | None:
        call = bind(node, name)
        if call is None or not isinstance(call["input"], Node) or call.get("out") is not None:
            return None
        if call.get("inplace", False) is not False:
            return f"{node.name} writes its input"
        if call.given - {"input", "inplace", *options}:
            return f"{node.name} is given more than {name} takes"
        given = {option: call.get(option) for option in options}
        if not all(value is None or type(value) in (bool, int, float) for value in given.values()):
            return f"{node.name} has options that are values of the graph"
        # 1 and 1.0 may give other dtypes, 0.0 and -0.0 other signs, and NaN is not equal to itself.
        key = (sized(call["input"]), strides(node), *((type(value), repr(value)) for value in given.values()))
        return Member(node, (call["input"],), key, {word: value for word, value in given.items() if value is not None})

    def fuse(new: Builder, members: Sequence[Member]) -> Sequence[Node]:
        whole = new(torch.stack, [member.operands[0] for member in members], dim=0)
        return unbind(new, new(function, whole, **members[0].options), 0)

    return Rule((name,), read, fuse, random=random)


def unbind(new: Builder, whole: Node, dim: int) -> Sequence[Node]:
    """Every part of `whole` along `dim`."""
    return items(new, new(torch.unbind, whole, dim=dim))


def items(new: Builder, parts: Node) -> Sequence[Node]:
    """Every value of a node that gives several."""
    return [new(operator.getitem, parts, index) for index in range(len(value_of(parts)))]


def sized(node: Node | None) -> Hashable:
    """What tensors have in common that can be stacked; None for an argument that is not given."""
    value = tensor_of(node)
    return None if value is None else (value.dtype, value.device, tuple(str(extent) for extent in value.shape))


class _Engine:
    """Makes sets of members and one op of each; `refused` are those that could not become one."""

    def __init__(self, sound: Soundness, rule: Rule, limits: Limits, groups: Groups) -> None:
        self._sound = sound
        self._rule = rule
        self._limits = limits
        self._groups = groups
        self.refused: Set = 0
        self._apart: dict[Node, str] = {}
        self._written: dict[Node, list[Node]] = {}

    def fuse(self, among: Set) -> None:
        among &= ~self.refused & ~self._groups.joined
        if among.bit_count() < self._limits.least:
            return
        for nodes in self._groups.independent(among, self._limits.least, self._limits.most, self._fits):
            if self._fuse_set(nodes):
                self._groups.join(nodes)
                self._written.clear()
            else:
                self.refused |= self._groups.of(nodes)

    def finish(self) -> int:
        """Say which members were left because of a write between them and the others; gives the number of rewrites."""
        for node, reason in self._apart.items():
            if not self._groups.of([node]) & (self._groups.joined | self.refused):
                self._sound.refuse(node, reason)
        return self._sound.rewrites

    def _fits(self, chosen: list[Node], node: Node) -> bool:
        """Nobody writes what one of them reads between the first and the last of them."""
        window = [*chosen, node]
        read = [operand for member in window for operand in self._written_operands(member)]
        reasons = (self._sound.written_between(operand, min(window), max(window)) for operand in read)
        reason = next(filter(None, reasons), None)
        if reason is not None:
            self._apart[node] = reason
        return reason is None

    def _written_operands(self, node: Node) -> list[Node]:
        """What a member reads and somebody writes, anywhere."""
        if node not in self._written:
            first = next(iter(self._sound.graph.nodes))
            self._written[node] = [entry for entry in node.all_input_nodes if self._sound.written_after(entry, first)]
        return self._written[node]

    def _fuse_set(self, nodes: list[Node]) -> bool:
        # Read again: what a member reads may have become part of a larger op.
        members = [member for node in nodes if isinstance(member := self._rule.read(self._sound, node), Member)]

        def build(new: Builder) -> list[Node]:
            parts = self._rule.fuse(new, members)
            return [self._own(new, node, part) for node, part in zip(nodes, parts, strict=True)]

        objection = None if len(members) == len(nodes) else f"{nodes[0].name} is no longer alike"
        return self._sound.rewrite(nodes, build, objection=objection, random=self._rule.random)

    def _own(self, new: Builder, node: Node, part: Node) -> Node:
        """The part itself, or a copy of it where somebody would see that it is one."""
        if not (self._sound.returned(node) or self._sound.layout_matters(node, part)):
            return part
        copy = new("clone", part, memory_format=torch.contiguous_format)
        views = [user for user in node.users if user.op != "output" and self._sound.aliases.shares(node, user)]
        if any(map(self._sound.returned, views)) and not same_metadata(value_of(node), value_of(copy)):
            raise CannotBuild(f"views of {node.name} are returned, and a copy would lie otherwise")
        return copy


def _by(members: Mapping[Node, Member], sort: Callable[[Member], Hashable]) -> list[list[Node]]:
    found: dict[Hashable, list[Node]] = {}
    for node, member in members.items():
        found.setdefault(sort(member), []).append(node)
    return list(found.values())


def strides(node: Node) -> Hashable:
    """As text, so that nothing is assumed of sizes that vary."""
    value = tensor_of(node)
    return None if value is None else tuple(str(stride) for stride in value.stride())


def _members(sound: Soundness, rule: Rule) -> dict[Node, Member]:
    found: dict[Node, Member] = {}
    for node in find(sound.graph, *rule.kinds):
        member = rule.read(sound, node) if node.users else None
        if member is None:
            continue
        reason = member if isinstance(member, str) else _stays_out(sound, rule, member)
        if reason is not None:
            sound.refuse(node, reason)
        elif isinstance(member, Member):
            found[node] = member
    return found


def _stays_out(sound: Soundness, rule: Rule, member: Member) -> str | None:
    node = member.node
    reason = sound.has_values(node, *member.operands) or sound.written_after(node)
    if any(sound.aliases.shares(node, operand) for operand in member.operands):
        reason = reason or sound.returned(node)
    return reason or (None if rule.random else sound.is_pure(node))


def _users(node: Node, limits: Limits) -> Hashable:
    return tuple(sorted({str(kind(user) or user.op) for user in node.users})) if limits.same_users else None
