"""One try at a rewrite: new nodes are made, judged by the rules of `soundness`, and then stay or go.

Matched nodes are the old ones and all between them and what the new ones read. Where several old nodes become one, the
new ones may have to stand further down than the first of them; what read it then moves below, if it may.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch.fx import Node

from ferrite.graph.arguments import kind
from ferrite.graph.build import Build, Builder, CannotBuild
from ferrite.graph.effects import is_random
from ferrite.graph.gradients import lays_gradient_out
from ferrite.graph.pieces import AT_ONCE, item_of
from ferrite.graph.spread import NEEDS_STRIDES, Spread, fill_alike, is_doubtful
from ferrite.graph.values import value_of

if TYPE_CHECKING:
    from ferrite.graph.soundness import Soundness


class Attempt:
    """`build` gives a reason against, or None; then `commit`, else `undo`."""

    def __init__(self, sound: Soundness, olds: list[Node], place: Node, random: bool) -> None:
        self._sound = sound
        self._olds = olds
        self._place = place
        self._random = random
        self._new = Builder(place, olds[0], sound.evaluator)
        self._results: list[Node] = []
        self._matched: list[Node] = []
        self._moved: list[Node] = []

    def build(self, build: Build | Node, same_tensor: bool) -> str | None:
        try:
            reason = self._make(build)
            if reason is not None:
                return reason
            self._matched = self._match()
            doubted = self._doubted()
            self._spread = Spread(self._sound, dict(zip(self._olds, self._results, strict=True)), doubted)
            reason = self._judge(same_tensor) or _first(map(self._sees_strides, doubted))
            return reason or self._spread.try_values(same_tensor)
        except CannotBuild as failure:
            return str(failure)

    def undo(self) -> None:
        self._new.undo()

    def commit(self) -> None:
        sound = self._sound
        for node in self._moved:
            self._place.prepend(node)
        for old, result in zip(self._olds, self._results, strict=True):
            both = sound.aliases.of(old) | sound.aliases.of(result)
            old.replace_all_uses_with(result, delete_user_cb=lambda user: user not in self._new.made)
            sound.join(both)
        self._spread.commit()
        held = {source for node in self._matched for source in node.all_input_nodes if source.op == "get_attr"}
        for node in [*reversed(self._matched), *sorted(held)]:
            if not node.users:
                node.graph.erase_node(node)

    def _make(self, build: Build | Node) -> str | None:
        """Make the nodes, further down if what they read stands there."""
        for _ in range(2):
            built = build if isinstance(build, Node) else build(self._new)
            self._results = [built] if isinstance(built, Node) else list(built)
            late = [node for node in self._inputs() if not node < self._place]
            if not late:
                for node in self._new.made:
                    self._sound.join(self._sound.aliases.shared_by(node))
                return None
            self._new.undo()
            self._place = max(late).next
            self._new = Builder(self._place, self._olds[0], self._sound.evaluator)
            if reason := self._make_room(late):
                return reason
        return f"{late[0].name} stands after {self._place.name}"

    def _make_room(self, late: list[Node]) -> str | None:
        """Readers of the old nodes that stand above the new place must be free to move below it."""
        below, node = set(self._olds), min(self._olds)
        while node is not self._place:
            if node not in below and not below.isdisjoint(node.all_input_nodes):
                if node in late:
                    return f"{node.name} depends on what it would be joined with"
                reason = self._sound.is_pure(node) or self._sound.one_mode(node, self._place)
                reason = reason or self._written(node, [node, *node.all_input_nodes])
                if reason is not None:
                    return f"{node.name} cannot move: {reason}"
                below.add(node)
                self._moved.append(node)
            node = node.next
        return None

    def _written(self, first: Node, nodes: Iterable[Node]) -> str | None:
        return _first(self._sound.written_between(node, first, self._place) for node in nodes)

    def _judge(self, same_tensor: bool) -> str | None:
        sound, matched, inputs = self._sound, self._matched, self._inputs()
        first, last = min([*matched, self._place]), max([*matched, self._place])
        held = [node for node in self._new.made if node.op == "get_attr"]
        known = set(matched)
        inner = known.difference(self._olds)
        return (
            sound.is_pure(*matched, random=self._random)
            or (self._other_draw(first, last, matched) if self._random else None)
            or sound.one_mode(self._place, *matched)
            or sound.keeps_form(*self._olds, *inputs)
            or _first(sound.written_between(node, first, last) for node in [*inputs, *held, *matched])
            or _first(self._done_twice(node, known) for node in sorted(inner))
            or (None if same_tensor else _first(map(self._unlike, self._olds, self._results)))
            or _first(map(self._part_of_new, self._olds, self._results))
            or _first(map(self._regains_gradient, self._olds, self._results))
            or self._become_one()
            or _first(map(self._lays_gradient_elsewhere, matched))
        )

    def _doubted(self) -> dict[Node, None]:
        """New nodes whose strides are not sure, in order."""
        doubted: dict[Node, None] = {}
        for node in self._new.made:
            if is_doubtful(node, doubted):
                doubted[node] = None
        return doubted

    def _sees_strides(self, source: Node) -> str | None:
        reader = next((user for user in source.users if kind(user) in NEEDS_STRIDES), None)
        return f"{reader.name} would see strides that are not sure" if reader is not None else None

    def _other_draw(self, first: Node, last: Node, matched: list[Node]) -> str | None:
        """Random numbers that are drawn between matched nodes would be drawn in another order."""
        node = first
        while node is not last:
            if node not in matched and node not in self._new.made and is_random(node):
                return f"{node.name} draws random numbers between {first.name} and {last.name}"
            node = node.next
        return None

    def _inputs(self) -> list[Node]:
        """What the new nodes read, and results that were there before."""
        read = [source for node in self._new.made for source in node.all_input_nodes]
        return [node for node in dict.fromkeys([*read, *self._results]) if node not in self._new.made]

    def _match(self) -> list[Node]:
        """The old nodes and all between them and what the new ones read, in order."""
        stop = set(self._inputs())
        seen = dict.fromkeys(self._olds)
        waiting = list(self._olds)
        while waiting:
            for source in waiting.pop().all_input_nodes:
                if source not in stop and source not in seen and source.op.startswith("call"):
                    seen[source] = None
                    waiting.append(source)
        return sorted(seen.keys() - set(self._results))

    def _done_twice(self, node: Node, matched: set[Node]) -> str | None:
        """A matched node that others still read stays; its work may not be done again, unless it does none."""
        if any(self._sound.aliases.shares(node, source) for source in node.all_input_nodes):
            return None
        other = next((user for user in node.users if user not in matched), None)
        return f"{node.name} is also read by {other.name}" if other is not None else None

    def _unlike(self, old: Node, result: Node) -> str | None:
        """A copy for a view, or a view for a copy, that somebody could see."""
        sound = self._sound
        if sound.aliases.of(old) == sound.aliases.of(result):
            return None
        source = self._oldest(result)
        was_view = any(sound.aliases.shares(old, entry) for entry in old.all_input_nodes)
        if source is None and not was_view:
            return None  # new memory for new memory
        seen = sound.returned(old) or sound.written_after(old)
        if seen is None and source is not None:
            seen = sound.written_after(source, old)
        what = "a copy in place of a view" if source is None else f"a view of {source.name} in place of a copy"
        return f"{what}, and {seen}" if seen else None

    def _part_of_new(self, old: Node, result: Node) -> str | None:
        """A view of another new node, where the old value had memory of its own, or may be written."""
        sound = self._sound
        bases = [node for node in self._made_for(result) if sound.aliases.shares(node, result)]
        if not bases:
            return None
        was_view = any(sound.aliases.shares(old, entry) for entry in old.all_input_nodes)
        several = any(isinstance(value_of(node), (tuple, list)) for node in bases)
        if (several or not was_view) and (seen := sound.written_after(old)):
            return f"{seen}, and would be a view of {bases[0].name}"
        alike = was_view or fill_alike(value_of(old), value_of(result))
        if (not alike or (several and not self._is_part(old))) and (seen := sound.returned(old)):
            return f"{seen}, and would be a part of {bases[0].name}"
        return None

    def _is_part(self, node: Node) -> bool:
        """Whether a value is one of several views that were made at once, or a view of one."""
        seen, waiting = {node}, [node]
        while waiting:
            one = waiting.pop()
            item = item_of(one)
            if item is not None and kind(item[0]) in AT_ONCE:
                return True
            found = {source for source in one.all_input_nodes if self._sound.aliases.shares(source, node)} - seen
            seen |= found
            waiting += found
        return False

    def _regains_gradient(self, old: Node, result: Node) -> str | None:
        """A value that was made with gradients in place of one that was made without; or a view, which may need one
        wherever it was made, in place of a copy."""
        modes = self._sound.modes
        disabled = ("grad", False)
        starts_without = disabled in modes.of(next(iter(old.graph.nodes)))
        if starts_without or disabled not in modes.of(old):
            return None
        if result in self._new.made:
            source = self._oldest(result)
            was_view = any(self._sound.aliases.shares(old, entry) for entry in old.all_input_nodes)
            if was_view or source is None:
                return None
            return f"{old.name} is a copy without gradients, and a view of {source.name} may need one"
        if result.op.startswith("call") and disabled in modes.of(result):
            return None
        return f"{old.name} runs without gradients, and {result.name} may need one"

    def _lays_gradient_elsewhere(self, node: Node) -> str | None:
        """A view whose backward lays the gradient of its source out anew goes, no other one comes, and an input would
        get its gradient as it is."""
        if not lays_gradient_out(node):
            return None
        source = node.all_input_nodes[0]
        if not self._sound.gradients.shows_layout(source) or any(map(lays_gradient_out, self._new.made)):
            return None
        return f"the gradient of {source.name} would have other strides"

    def _become_one(self) -> str | None:
        """Two tensors that are returned, and that the caller could no longer tell apart."""
        returned: dict[Node, Node] = {}
        for old, result in zip(self._olds, self._results, strict=True):
            if any(user.op == "output" for user in old.users):
                other = returned.setdefault(result, old)
                if other is not old:
                    return f"{other.name} and {old.name} are returned, and would be one tensor"
        return None

    def _made_for(self, result: Node) -> list[Node]:
        """The other new nodes that a new node reads, directly or not, in order."""
        seen: set[Node] = set()
        waiting = [result] if result in self._new.made else []
        while waiting:
            found = {node for node in waiting.pop().all_input_nodes if node in self._new.made} - seen
            seen |= found
            waiting += found
        return sorted(seen)

    def _oldest(self, result: Node) -> Node | None:
        """The first node of the graph, the new ones left out, whose memory `result` stands in."""
        seen, waiting = {result}, [result]
        while waiting:
            for source in waiting.pop().all_input_nodes:
                if source not in seen and self._sound.aliases.shares(source, result):
                    seen.add(source)
                    waiting.append(source)
        return min(seen.difference(self._new.made), default=None)


def _first(reasons: Iterable[str | None]) -> str | None:
    return next((reason for reason in reasons if reason is not None), None)
