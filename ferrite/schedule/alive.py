"""How much memory is alive at each step of a body, and what joining two launches does to that.

A launch that joins an earlier one moves up to it: its results are there earlier, what it reads last is free earlier,
and what only the two of them touch is no memory any more. Steps keep their places here; a launch that has moved leaves
its own empty. What is not counted is there all the time: arguments that the caller keeps, constants.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

from ferrite.host.lowered import Body
from ferrite.host.nodes import ALLOCATE, Call, Launch
from ferrite.syntax import refs

SLACK = 1.01  # times what is alive at the worst step of launches apart: what joined ones may need


class Alive:
    """Of a body whose launches are joined one after the other."""

    def __init__(self, body: Body) -> None:
        self.body = body
        self.end = len(body.steps)
        self.given = {entry.name: entry for entry in body.inputs}
        self.kept = {self._root(name) for name in refs(body.result)}
        self.steps: dict[str, set[int]] = {}  # by memory, those that touch it
        filled = {name for step in body.steps if isinstance(step, Launch) for name in step.buffers}
        for position, step in enumerate(body.steps):
            if isinstance(step, Call) and step.target == ALLOCATE and step.result in filled:
                continue  # it is there from the launch on that fills it
            for root in map(self._root, _touched(step)):
                if root in body.bytes and self._dies(root):
                    self.steps.setdefault(root, set()).add(position)
        changes = [0] * (self.end + 1)
        for root, steps in self.steps.items():
            first, last = self._span(root, steps)
            changes[first] += body.bytes[root]
            changes[last + 1] -= body.bytes[root]
        self.curve = list(accumulate(changes))
        self.most = max(self.curve)

    def _root(self, name: str) -> str:
        return self.body.memory.get(name, name)

    def _dies(self, root: str) -> bool:
        entry = self.given.get(root)
        return entry is None or entry.saved or entry.donated

    def _span(self, root: str, steps: set[int]) -> tuple[int, int]:
        return 0 if root in self.given else min(steps), self.end - 1 if root in self.kept else max(steps)

    def join(self, to: int, position: int, names: Iterable[str]) -> bool:
        """Move a launch, which touches `names`, to an earlier one, unless more would then be alive somewhere than at
        the worst step of all launches apart."""
        moved: dict[str, set[int]] = {}
        changes: dict[int, int] = {}

        def change(span: tuple[int, int], bytes: int) -> None:
            first, last = span
            changes[first] = changes.get(first, 0) + bytes
            changes[last + 1] = changes.get(last + 1, 0) - bytes

        for root in dict.fromkeys(map(self._root, names)):
            before = self.steps.get(root)
            if not before:
                continue
            after = moved[root] = before - {position} | {to}
            change(self._span(root, before), -self.body.bytes[root])
            if after == {to} and root not in self.given and root not in self.kept:
                moved[root] = set()
            else:
                change(self._span(root, after), self.body.bytes[root])
        first, last = min(changes, default=0), max(changes, default=0)
        more = accumulate(changes.get(step, 0) for step in range(first, last))
        curve = [alive + change for alive, change in zip(self.curve[first:last], more, strict=True)]
        if any(now > SLACK * self.most and now > was for was, now in zip(self.curve[first:last], curve, strict=True)):
            return False
        self.curve[first:last] = curve
        self.steps |= moved
        return True


def _touched(step: Call | Launch) -> list[str]:
    return list(step.buffers) if isinstance(step, Launch) else [step.result, *refs((step.args, step.kwargs))]
