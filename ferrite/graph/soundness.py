"""The one judge of rewrites before autograd: a pass says what it would put in place of what; `Soundness` tries it,
checks the rules below, and either leaves the graph rewritten or as it was, with the reason on record.

    sound = Soundness(graph)
    for node in find(graph, "cat"):
        ...                                                          # does the shape fit?
        sound.rewrite(node, lambda new: new(torch.tanh, source), objection=sound.only_user(source, node))
    return sound.rewrites

Rules, and who looks after them:

read time  nothing that the new nodes read, or that the old ones made, is written between the first matched node and
           the place of the rewrite
alias      a view may stand for a copy, or a copy for a view, only if nobody can see the difference: no write
           afterwards, not returned
users      nothing is erased that is still read; work that stays is not done twice
values     every new node has a fake value; the result has the dtype, device and sizes of what it replaces; no guard is
           added to find out
layout     strides that would change do not reach an output, a view that cannot be, or an op that nobody knows; an
           input does not get its gradient in another layout
modes      all matched nodes run under one grad mode and autocast; none draws random numbers or writes
limits     each rewrite is counted once, and left out past the limit that bisection sets

All of them are asked in `rewrite`, whatever the pass forgot. A pass asks beforehand what only it knows (which node must
have one reader, which operands must agree), with the questions below: each gives a reason against, or None.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from ferrite.graph.aliases import Aliases
from ferrite.graph.arguments import bind, is_int, times_read
from ferrite.graph.attempt import Attempt
from ferrite.graph.build import Build, CannotBuild, Evaluator
from ferrite.graph.effects import changes_mode, is_random, reshapes, written_by
from ferrite.graph.gradients import Gradients
from ferrite.graph.ledger import ledger_of
from ferrite.graph.modes import Modes
from ferrite.graph.spread import Spread
from ferrite.graph.text import SHORT_DTYPES, show_type
from ferrite.graph.values import same_metadata, tensor_of, value_of


class Soundness:
    """Facts about one graph: gathered once, in linear time, when they are first asked for; kept right by `rewrite`, and
    handed on to the next pass if nothing else edits the graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.ledger = ledger_of(graph)

    @property
    def aliases(self) -> Aliases:
        return self._fact("aliases", lambda: Aliases(self.graph))

    @property
    def modes(self) -> Modes:
        return self._fact("modes", lambda: Modes(self.graph))

    @property
    def evaluator(self) -> Evaluator:
        return self._fact("evaluator", lambda: Evaluator(self.graph, self.modes))

    @property
    def gradients(self) -> Gradients:
        return self._fact("gradients", lambda: Gradients(self.graph, self.modes, self.aliases))

    @property
    def _writers(self) -> dict[Any, list[Node]]:
        """The calls that write each memory, in order."""
        return self._fact("writers", self._find_writers)

    @property
    def _reshaped(self) -> set[Any]:
        """Memory whose tensors are given other sizes in place."""
        return self._fact("reshaped", self._find_reshaped)

    def _fact(self, name: str, find: Callable[[], Any]) -> Any:
        known = self.ledger.facts
        if name not in known:
            known[name] = find()
        return known[name]

    def _find_writers(self) -> dict[Any, list[Node]]:
        found: dict[Any, list[Node]] = {}
        for node in self.graph.nodes:
            if written := written_by(node):
                for root in self.aliases.of_all(written):
                    found.setdefault(root, []).append(node)
        return found

    def _find_reshaped(self) -> set[Any]:
        return self.aliases.of_all(source for node in self.graph.nodes for source in reshapes(node))

    @property
    def rewrites(self) -> int:
        """How many rewrites this pass has made on this graph."""
        return self.ledger.taken

    # Questions: a reason against, or None.

    def refuse(self, node: Node, reason: str) -> None:
        """Put on record that a candidate was left alone."""
        self.ledger.refuse((node.name,), reason)

    def only_user(self, node: Node, user: Node | None = None) -> str | None:
        """`node` is read once, by `user` if one is named, and is not returned."""
        if len(node.users) != 1:
            return f"{node.name} has {len(node.users)} users"
        (reader,) = node.users
        if user is not None and reader is not user:
            return f"{node.name} is read by {reader.name}, not by {user.name}"
        times = times_read(node)
        return None if times == 1 else f"{reader.name} reads {node.name} {times} times"

    def has_values(self, *nodes: Any) -> str | None:
        """Every node gives one plain tensor with a fake value that holds from its making to the end."""
        for node in nodes:
            if not isinstance(node, Node):
                return f"{node!r} is not a value of the graph"
            if tensor_of(node) is None:
                return f"{node.name} has no fake value" if value_of(node) is None else f"{node.name} is not one tensor"
            if reason := self.keeps_form(node):
                return reason
        return None

    def keeps_form(self, *nodes: Node) -> str | None:
        """None of them is given other sizes, strides or memory in place: fake values tell how it ends."""
        for node in nodes if self._reshaped else ():
            if not self._reshaped.isdisjoint(self.aliases.of(node)):
                return f"{node.name} is given other sizes or memory in place"
        return None

    def agree(self, *nodes: Any) -> str | None:
        """All of them are plain tensors of one dtype and device."""
        if missing := self.has_values(*nodes):
            return missing
        first = tensor_of(nodes[0])
        for node in nodes[1:]:
            value = tensor_of(node)
            assert first is not None
            assert value is not None
            if value.dtype != first.dtype:
                return f"{nodes[0].name} is {_short(first)} and {node.name} {_short(value)}"
            if value.device != first.device:
                return f"{nodes[0].name} is on {first.device} and {node.name} on {value.device}"
        return None

    def is_static(self, *nodes: Any) -> str | None:
        """All sizes of these tensors are plain numbers."""
        for node in nodes:
            value = tensor_of(node)
            if value is None:
                return f"{getattr(node, 'name', node)} has no fake value"
            if not is_int(*value.shape):
                return f"{node.name} has sizes that vary: {tuple(str(extent) for extent in value.shape)}"
        return None

    def written_between(self, node: Node, first: Node, last: Node) -> str | None:
        """Nothing writes the memory of `node` after `first` and before `last`."""
        for root in self.aliases.of(node):
            writers = self._writers.get(root, [])
            index = bisect_right(writers, first)
            if index < len(writers) and writers[index] < last:
                return f"{node.name} may be written by {writers[index].name} between {first.name} and {last.name}"
        return None

    def written_after(self, node: Node, place: Node | None = None) -> str | None:
        """Nothing writes the memory of `node` after `place`, which is its making if not named."""
        place = place or node
        for root in self.aliases.of(node):
            writers = self._writers.get(root, [])
            if writers and writers[-1] > place:
                return f"{node.name} may be written by {writers[bisect_right(writers, place)].name}"
        return None

    def returned(self, node: Node) -> str | None:
        """Neither the value of `node` nor a view of it is returned."""
        roots = self.aliases.of(node)
        seen, waiting = {node}, [node]
        while waiting:
            for user in waiting.pop().users:
                if user.op == "output":
                    return f"{node.name} is returned"
                if user not in seen and not roots.isdisjoint(self.aliases.of(user)):
                    seen.add(user)
                    waiting.append(user)
        return None

    def one_mode(self, *nodes: Node) -> str | None:
        """All of them run under one grad mode and autocast, with no seed set in between."""
        first = nodes[0]
        for node in nodes[1:]:
            if self.modes.of(node) != self.modes.of(first):
                return f"{first.name} and {node.name} run in different modes"
        return None

    def without_grad(self, node: Node) -> str | None:
        """No gradient is taken through `node`."""
        return None if ("grad", False) in self.modes.of(node) else f"{node.name} runs with gradients enabled"

    def is_pure(self, *nodes: Node, random: bool = False) -> str | None:
        """None of them writes memory, switches a mode or, unless `random` allows it, draws random numbers."""
        for node in nodes:
            if written_by(node):
                return f"{node.name} writes memory"
            if not random and is_random(node):
                return f"{node.name} draws random numbers"
            if changes_mode(node):
                return f"{node.name} switches a mode"
        return None

    def layout_matters(self, old: Node, result: Node) -> str | None:
        """No reader of `old` would mind the strides of `result` in its place."""
        if same_metadata(value_of(old), value_of(result)):
            return None
        try:
            return Spread(self, {old: result}).try_values(same_tensor=False)
        except CannotBuild as failure:
            return str(failure)

    # The rewrite.

    def rewrite(
        self,
        old: Node | Sequence[Node],
        build: Build | Node,
        *,
        objection: str | None = None,
        before: Node | None = None,
        same_tensor: bool = False,
        each: Sequence[Node] = (),
        random: bool = False,
    ) -> bool:
        """Put what `build` makes in place of `old`, one node or several, if no rule speaks against it.

        `build(new)` gives as many nodes as `old` has: made by `new(function, *args, **kwargs)` or `new("method", x)`
        right before `before` (the first of `old`, if not named), or found in the graph; a node of the graph may also be
        given at once. `same_tensor`: eager gives this very tensor, whatever the fake values say. `each`: the places
        that are rewritten at once, each counted as one; a pass asks `ledger.room` how many it may take. `random`: what
        is matched may draw random numbers, and the new nodes others, as long as no other call draws in between.
        """
        olds = [old] if isinstance(old, Node) else list(old)
        if self.ledger.is_full:
            return False
        if objection is not None:
            self.refuse(olds[0], objection)
            return False
        attempt = Attempt(self, olds, before or min(olds), random)
        reason = attempt.build(build, same_tensor)
        if reason is not None:
            attempt.undo()
            self.refuse(olds[0], reason)
            return False
        attempt.commit()
        for places in [[place] for place in each] or [olds]:
            self.ledger.take(tuple(one.name for one in places))
        return True

    def drop(self, node: Node) -> bool:
        """Take away a call that nobody reads and that does nothing else."""
        if node.users or self.ledger.is_full:
            return False
        if reason := self.is_pure(node):
            self.refuse(node, reason)
            return False
        self.graph.erase_node(node)
        self.ledger.take((node.name,))
        return True

    def respell(
        self, node: Node, target: Callable[..., Any] | str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Write the same call in another way; the node stays what it is to everybody else."""
        if self.ledger.is_full:
            return False
        known, spelling = bind(node), (node.op, node.target, node.args, node.kwargs)
        node.op = "call_method" if isinstance(target, str) else "call_function"
        node.target, node.args, node.kwargs = target, args, kwargs
        if known is None or known != bind(node):
            reason = self._gives_something_else(node)
            if reason is not None:
                node.op, node.target, node.args, node.kwargs = spelling
                self.refuse(node, reason)
                return False
        self.ledger.take((node.name,))
        return True

    def _gives_something_else(self, node: Node) -> str | None:
        try:
            value = self.evaluator.value(node)
        except CannotBuild as failure:
            return str(failure)
        return None if same_metadata(value_of(node), value) else f"{node.name} would be {show_type(value)}"

    def join(self, roots: set[Any]) -> None:
        """From now on these may be the same memory."""
        if len(roots) < 2:
            return
        writers = {writer for root in roots for writer in self._writers.pop(root, ())}
        self.aliases.join(roots)
        if writers:
            self._writers[self.aliases.root(next(iter(roots)))] = sorted(writers)
        if not self._reshaped.isdisjoint(roots):
            self._reshaped.update(self.aliases.root(root) for root in roots)


def _short(value: torch.Tensor) -> str:
    return SHORT_DTYPES.get(value.dtype, str(value.dtype))
