"""A kernel that needs less memory for its results than it frees runs as early as that frees it.

    gates = mm(h, w)                                    gates = mm(h, w)
    more = mm(y, v)                                     cell = empty_strided([2, 24], [24, 1])
    cell = empty_strided([2, 24], [24, 1])      ->      kernel_3(gates, cell)
    kernel_3(gates, cell)                               more = mm(y, v)

Kernels are made where somebody asks for their results, which may be long after all that they read is there. It moves up
to where its operands exist and most of the memory that it frees is read by nobody else, with the allocations of its
results. One that can raise stays, and so does one that writes to what others see.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

from ferrite.decisions import Decision
from ferrite.host.lowered import Body, Lowered
from ferrite.host.memory import nominal
from ferrite.host.nodes import ALLOCATE, Call, Launch
from ferrite.loops.index import product
from ferrite.loops.nodes import Buffer, Program
from ferrite.loops.rewrite import can_raise
from ferrite.syntax import refs

Place = tuple[int, int]  # the step behind which something stands, and the how-manieth it is there


def run_early(lowered: Lowered) -> Lowered:
    """Over the steps of a graph, and of the functions that it calls."""
    kernels = {program.name: program for program in lowered.kernels}
    raising = frozenset(name for name, program in kernels.items() if can_raise(program))
    walks = [_Walk(body, kernels, raising) for body in (lowered.main, *lowered.functions)]
    main, *functions = (walk.run() for walk in walks)
    decisions = tuple(decision for walk in walks for decision in walk.decisions)
    if not decisions:
        return lowered
    return replace(lowered, main=main, functions=tuple(functions), decisions=lowered.decisions + decisions)


@dataclass
class _Item:
    """A step, and the allocations of what it fills."""

    step: Call | Launch
    allocations: list[Call]
    place: Place


class _Walk:
    """One walk over the steps of a body. Places are those that steps have once earlier ones have moved."""

    def __init__(self, body: Body, kernels: dict[str, Program], raising: frozenset[str]) -> None:
        self.body, self.kernels, self.raising = body, kernels, raising
        self.decisions: list[Decision] = []
        self.last: dict[str, int] = {}  # the step that touches memory last, by the name that stands for it
        first: dict[str, int] = {}
        for position, step in enumerate(body.steps):
            for name in _touched(step):
                self.last[self._root(name)] = position
                first.setdefault(name, position)
        self.filled = {
            step.result: first[step.result]
            for step in body.steps
            if isinstance(step, Call) and step.target == ALLOCATE and step.result in first
        }
        kept = {self._root(entry.name) for entry in body.inputs if not (entry.saved or entry.donated)}
        self.kept = kept | {self._root(name) for name in refs(body.result)}
        self.made: dict[str, Place] = {}  # by name
        self.touched: dict[str, Place] = {}  # the last time, by the name that stands for the memory
        self.written: dict[str, Place] = {}

    def _root(self, name: str) -> str:
        return self.body.memory.get(name, name)

    def run(self) -> Body:
        items: list[_Item] = []
        waiting: defaultdict[int, list[Call]] = defaultdict(list)  # allocations, by the step that fills them
        end: Place = (-1, 0)
        for position, step in enumerate(self.body.steps):
            if isinstance(step, Call) and step.target == ALLOCATE and step.result in self.filled:
                waiting[self.filled[step.result]].append(step)
                continue
            item = _Item(step, waiting[position], (position, 0))
            if isinstance(step, Launch):
                earliest = self._earliest(position, step, item.allocations)
                if earliest is not None and earliest < end:
                    item.place = (earliest[0], len(items) + 1)
                    subject = (step.buffers[-1],)
                    self.decisions.append(Decision("run early", subject, True, "it frees more than it needs"))
            items.append(item)
            end = max(end, item.place)
            self._enter(item)
        if not self.decisions:
            return self.body
        items.sort(key=lambda item: item.place)
        return replace(self.body, steps=tuple(step for item in items for step in (*item.allocations, item.step)))

    def _enter(self, item: _Item) -> None:
        step, place = item.step, item.place
        for call in item.allocations:
            self.made[call.result] = place
        for name in _touched(step):
            root = self._root(name)
            self.touched[root] = max(self.touched.get(root, place), place)
        if isinstance(step, Call):
            self.made[step.result] = place
            written = self.body.writes.get(step.result, ())
        else:
            parameters = self.kernels[step.kernel].parameters
            written = tuple(n for n, p in zip(step.buffers, parameters, strict=True) if p.role != "in")
        for name in written:
            self.written[self._root(name)] = place

    def _earliest(self, position: int, launch: Launch, allocations: list[Call]) -> Place | None:
        """The place behind which it frees more than it needs; None if it stays where it is."""
        parameters = list(zip(launch.buffers, self.kernels[launch.kernel].parameters, strict=True))
        results = {name: parameter.buffer for name, parameter in parameters if parameter.role != "in"}
        if launch.kernel in self.raising or results.keys() != {call.result for call in allocations}:
            return None
        dying: dict[str, int] = {}
        for name, parameter in parameters:
            root = self._root(name)
            if name not in results and self.last[root] == position and root not in self.kept:
                dying[root] = max(dying.get(root, 0), _bytes(parameter.buffer))
        needed = sum(map(_bytes, results.values()))
        freed, enough = 0, None
        for root in sorted(dying, key=lambda root: self.touched.get(root, (-1, 0))):
            freed += dying[root]
            if freed > needed:
                enough = self.touched.get(root, (-1, 0))
                break
        if enough is None:
            return None
        names = [name for name in launch.buffers if name not in results]
        sizes = list(refs((launch.sizes, [call.args for call in allocations])))
        needs = [self.made[name] for name in (*names, *sizes) if name in self.made]
        needs += [self.written[root] for root in map(self._root, names) if root in self.written]
        return max(enough, *needs) if needs else enough


def _bytes(buffer: Buffer) -> int:
    return nominal(product(buffer.sizes)) * buffer.dtype.bytes


def _touched(step: Call | Launch) -> list[str]:
    if isinstance(step, Launch):
        return [*step.buffers, *refs(step.sizes)]
    return list(refs((step.args, step.kwargs)))
