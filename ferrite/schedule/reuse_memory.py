"""A kernel writes its result where it has read, if nobody reads that again: less memory, and none that is touched anew.

    gelu = empty_strided([8, 64], [64, 1])
    kernel_3(mm, gelu)                          ->      kernel_3(mm, mm)
    mm_1 = mm(gelu, w)                                  mm_1 = mm(mm, w)

If the two have other sizes but lie alike, `gelu = view(mm, [2, 4, 64])` stands in the place of the allocation.

Arguments are read for the last time too, but are the caller's, unless they are donated; what he gets is never one of
them.

The kernel itself stays as it is, and is the same one that others launch with memory of their own. So it must read each
element before it writes it (`overwritten`): at the same point of the same loops, in a statement that does not run
behind the one that writes. Which one runs first is what `arrange` says, not the text: a nest may move up to one whose
loop it shares, past others that have no memory in common with it as long as nobody lies over anybody. It must not
raise: an error speaks of what its operands hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ferrite.decisions import Decision
from ferrite.host.lowered import Body, Lowered
from ferrite.host.nodes import ALLOCATE, HOLD, Call, Launch
from ferrite.loops.access import accesses
from ferrite.loops.index import Axis, Index, known_equal, product
from ferrite.loops.nodes import Accumulate, Buffer, FoldScan, Load, Program, Scan, Statement, Store
from ferrite.loops.rewrite import can_raise, walk
from ferrite.loops.shapes import is_contiguous, linear
from ferrite.schedule.arrange import arrange
from ferrite.schedule.cut_at_guards import cut_at_guards
from ferrite.syntax import Ref, refs, renamed

# What makes a tensor that lies as the trace says, to the last stride: others may not be seen by the caller.
EXACT = frozenset({ALLOCATE, "aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default"})
OURS = EXACT | {"aten.convolution.default"}  # nobody but the program has what these make


def reuse_memory(lowered: Lowered) -> Lowered:
    """Over the steps of a graph, and of the functions that it calls."""
    able = {program.name: overwritten(program) for program in lowered.kernels}
    if not any(able.values()):
        return lowered
    kernels = {program.name: program for program in lowered.kernels}
    walks = [_Walk(body, kernels, able) for body in (lowered.main, *lowered.functions)]
    main, *functions = (walk.run() for walk in walks)
    decisions = tuple(decision for walk in walks for decision in walk.decisions)
    return replace(lowered, main=main, functions=tuple(functions), decisions=lowered.decisions + decisions)


# ---- kernels


@dataclass(frozen=True)
class _Touch:
    """Where a buffer is read or written: the loops around it, the place in memory."""

    axes: tuple[Axis, ...]
    place: Index


def overwritten(program: Program) -> dict[int, list[int]]:
    """By number, for each parameter that is only written those that are only read and that it may lie over."""
    if can_raise(program):
        return {}
    reads: dict[Buffer, list[_Touch]] = {}
    writes: dict[Buffer, list[_Touch | None]] = {}
    for nest, statement in [(each, statement) for each in program.nests for statement in each.body]:
        for node in walk(statement):
            if isinstance(node, Load):
                touch = _Touch(nest.axes, linear(node.index, node.buffer.strides))
                reads.setdefault(node.buffer, []).append(touch)
        for buffer, index in _written(statement):
            touch_or_none = None if index is None else _Touch(nest.axes, linear(index, buffer.strides))
            writes.setdefault(buffer, []).append(touch_or_none)
    found: dict[int, list[int]] = {}
    for number, result in enumerate(program.parameters):
        if result.role != "out" or len(writes.get(result.buffer, ())) != 1:
            continue
        (write,) = writes[result.buffer]
        if write is None:
            continue
        found[number] = [
            other
            for other, operand in enumerate(program.parameters)
            if operand.role == "in"
            and lie_alike(operand.buffer, result.buffer)
            and all(read.axes == write.axes and read.place is write.place for read in reads.get(operand.buffer, ()))
        ]
    if not any(found.values()):
        return {}
    order = _Order(program)
    buffers = [parameter.buffer for parameter in program.parameters]
    for number, others in found.items():
        found[number] = [other for other in others if order.reads_first(buffers[other], buffers[number])]
    return {number: others for number, others in found.items() if others}


class _Order:
    """The order in which the statements of a kernel run."""

    def __init__(self, program: Program) -> None:
        self.reads: dict[str, int] = {}  # the last statement that reads it, by name
        self.writes: dict[str, int] = {}  # the first one that writes it
        statements = (part for loop in arrange(cut_at_guards(program).program).loops for part in loop.statements())
        for number, statement in enumerate(statements):
            for access in accesses(statement):
                if access.writes:
                    self.writes.setdefault(access.buffer.name, number)
                else:
                    self.reads[access.buffer.name] = number

    def reads_first(self, operand: Buffer, result: Buffer) -> bool:
        """Whether nothing of the operand is read in a statement behind one that writes the result."""
        return self.reads.get(operand.name, -1) <= self.writes[result.name]


def _written(statement: Statement) -> Iterator[tuple[Buffer, tuple[Index, ...] | None]]:
    """What it writes, and where; None for a place that it writes more than once."""
    match statement:
        case Store(buffer=buffer, index=index):
            yield buffer, index
        case Accumulate(buffer=buffer):
            yield buffer, None
        case Scan(targets=targets) | FoldScan(targets=targets):
            for target in targets:
                if target is not None:
                    yield target[0], None


def have_one_type(one: Buffer, other: Buffer) -> bool:
    return one.dtype is other.dtype and one.sizes == other.sizes and one.strides == other.strides


def lie_alike(one: Buffer, other: Buffer) -> bool:
    """Whether they span the same memory: of one type, or both without gaps."""
    if have_one_type(one, other):
        return True
    dense = all(is_contiguous(buffer.sizes, buffer.strides) for buffer in (one, other))
    return dense and one.dtype is other.dtype and known_equal(product(one.sizes), product(other.sizes))


# ---- steps


class _Walk:
    """One walk over the steps of a body. What takes the place of something is known by that name from there on."""

    def __init__(self, body: Body, kernels: dict[str, Program], able: dict[str, dict[int, list[int]]]) -> None:
        self.body, self.kernels, self.able = body, kernels, able
        self.made = {step.result: step for step in body.steps if isinstance(step, Call)}
        self.memory = dict(body.memory)  # grows with what shares memory from now on
        self.names: dict[str, str] = {}  # what is known by another name
        self.views: dict[str, Call] = {}  # in the place of allocations
        self.decisions: list[Decision] = []
        # Arguments that may be written: of those that share memory with others, these may still be read. Where sizes
        # change, nobody knows which do.
        self.donated = {e.name for e in body.inputs if e.donated and e.part is None and e.name in body.bytes}
        self.returned = {self._root(name) for name in refs(body.result)}
        self.last: dict[str, int] = {}  # the step that touches memory last, by the name that stands for it
        for position, step in enumerate(body.steps):
            for name in _touched(step):
                self.last[self._root(name)] = position

    def _root(self, name: str) -> str:
        while (other := self.memory.get(name, name)) != name:
            name = other
        return name

    def run(self) -> Body:
        for position, step in enumerate(self.body.steps):
            if isinstance(step, Launch):
                self._take_places(position, step)
        if not self.decisions:
            return self.body
        steps = [
            self._renamed(self.views.get(step.result, step) if isinstance(step, Call) else step)
            for step in self.body.steps
            if not (isinstance(step, Call) and step.result in self.names)
        ]
        result, memory = renamed(self.body.result, self.names), {name: self._root(name) for name in self.memory}
        return replace(self.body, steps=tuple(steps), result=result, memory=memory)

    def _take_places(self, position: int, launch: Launch) -> None:
        """For each result of a launch the place of an operand, if there is one that it can take."""
        parameters = self.kernels[launch.kernel].parameters
        for number, others in self.able[launch.kernel].items():
            result = launch.buffers[number]
            allocation = self.made.get(result)
            if allocation is None or allocation.target != ALLOCATE:
                continue
            for other in others:
                operand = self.names.get(launch.buffers[other], launch.buffers[other])
                same = have_one_type(parameters[other].buffer, parameters[number].buffer)
                if not self._may_take(position, launch, result, operand, same):
                    continue
                if same:
                    self.names[result] = operand
                else:
                    self.views[result] = Call(result, "aten.view.default", (Ref(operand), allocation.args[0]), {})
                root = self._root(operand)
                self.last[root] = max(self.last[root], self.last.pop(result, -1))
                self.memory |= {root: root, result: root}
                if result in self.returned:
                    self.returned.add(root)
                self.decisions.append(Decision("reuse", (result, operand), True, "it is read here for the last time"))
                break

    def _may_take(self, position: int, launch: Launch, result: str, operand: str, same: bool) -> bool:
        root = self._root(operand)
        maker = self.made.get(root)
        is_donated = operand in self.donated and same and result not in self.returned
        if not is_donated and (maker is None or maker.target not in OURS):
            return False
        if self.last[root] > position or root in self.returned or self._root(result) != result:
            return False
        if sum(self._root(name) == root for name in launch.buffers) > 1:
            return False  # known by two names, or taken by another result
        if operand != root and operand not in self.views and self.made[operand].target != HOLD:
            return False  # it may be a part
        return result not in self.returned or (same and operand == root and maker is not None and maker.target in EXACT)

    def _renamed(self, step: Call | Launch) -> Call | Launch:
        if isinstance(step, Launch):
            buffers = tuple(self.names.get(name, name) for name in step.buffers)
            return replace(step, buffers=buffers, sizes=renamed(step.sizes, self.names))
        return replace(step, args=renamed(step.args, self.names), kwargs=renamed(step.kwargs, self.names))


def _touched(step: Call | Launch) -> Iterator[Any]:
    if isinstance(step, Launch):
        yield from (*step.buffers, *refs(step.sizes))
    else:
        yield from (step.result, *refs((step.args, step.kwargs)))
