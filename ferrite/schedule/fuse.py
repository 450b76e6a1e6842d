"""Kernels that run side by side become one kernel whose loops they share. What only they read needs no tensor.

Launches are taken in order. One may move up to an earlier kernel if everything that it depends on comes before that
kernel or is in it, and joins it if `arrange.join` finds loops for both. Of several it joins the one where that saves
most bytes (`cost.py`), of equals the latest. What lies in between stays where it is, so
nothing but kernels changes places; one that can raise does not pass a call, so that errors come in eager's order.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from ferrite.decisions import Decision
from ferrite.host.lowered import Body, Lowered
from ferrite.host.nodes import ALLOCATE, Call, Launch, join_places
from ferrite.loops.kernel import kernel_of
from ferrite.loops.nodes import Buffer, Nest, Program
from ferrite.loops.rewrite import can_raise, replace_buffers
from ferrite.schedule.alive import SLACK, Alive
from ferrite.schedule.arrange import Loop, join
from ferrite.schedule.cost import saved_by_joining
from ferrite.schedule.decided import Refusal, box, refused
from ferrite.schedule.run_early import run_early
from ferrite.syntax import refs

MOST_BUFFERS = 32  # of one kernel
MOST_TRIES = 3  # earlier kernels that a launch is offered to


def fuse(lowered: Lowered) -> Lowered:
    """Join the launches of a graph, and those of the functions that it calls. Those that can share loops do, unless the
    graph then needs more memory than with all of them apart: then only as long as it does not."""
    if not lowered.kernels:
        return lowered
    joined, apart = _join_launches(lowered), run_early(lowered)
    if all(map(_needs_no_more, run_early(joined).bodies, apart.bodies)):
        return joined
    return _join_launches(apart, limited=True)


def _needs_no_more(body: Body, apart: Body) -> bool:
    return Alive(body).most <= SLACK * Alive(apart).most


def _join_launches(lowered: Lowered, *, limited: bool = False) -> Lowered:
    kernels, constants = _Kernels(lowered.kernels), frozenset(lowered.constants)
    runs = [_Fusion(body, kernels, constants, Alive(body) if limited else None) for body in lowered.bodies]
    main, *functions = (run.run() for run in runs)
    decisions = tuple(decision for run in runs for decision in run.decisions)
    used = {step.kernel for body in (main, *functions) for step in body.steps if isinstance(step, Launch)}
    programs = tuple(program for program in kernels.programs.values() if program.name in used)
    return replace(
        lowered, main=main, functions=tuple(functions), kernels=programs, decisions=lowered.decisions + decisions
    )


@dataclass
class _Part:
    """One launch with the buffers of the graph in the place of the kernel's own."""

    launch: Launch
    step: int
    nests: tuple[Nest, ...]
    read: tuple[Buffer, ...]
    written: tuple[Buffer, ...]
    in_place: tuple[Buffer, ...]
    raises: bool
    size_names: tuple[str, ...]

    @property
    def buffers(self) -> Iterator[Buffer]:
        yield from self.read
        yield from self.written


@dataclass
class _Group:
    """Launches that have become one. `loop` is None if their nests do not share loops; `count`: how many of them touch
    a tensor, by its name; `written`: what they write, in order."""

    position: int
    loop: Loop | None
    parts: list[_Part] = field(default_factory=list)
    count: Counter[str] = field(default_factory=Counter)
    buffers: dict[Buffer, None] = field(default_factory=dict)
    written: dict[Buffer, None] = field(default_factory=dict)
    allocations: list[Call] = field(default_factory=list)

    def add(self, part: _Part) -> None:
        self.parts.append(part)
        self.count.update(buffer.name for buffer in part.buffers)
        self.buffers.update(dict.fromkeys(part.buffers))
        self.written.update(dict.fromkeys(part.written))


class _Fusion:
    """One walk over the steps of a body."""

    def __init__(self, body: Body, kernels: _Kernels, constants: frozenset[str], alive: Alive | None) -> None:
        self.body, self.kernels, self.constants, self.alive = body, kernels, constants, alive
        self.items: list[Call | _Group] = []
        self.last_write: dict[str, int] = {}  # by the name that stands for the memory
        self.last_touch: dict[str, int] = {}
        self.last_call = -1
        self.groups_at: defaultdict[str, list[_Group]] = defaultdict(list)
        self.waiting: dict[str, Call] = {}  # allocations whose kernel has not come yet
        self.users = self._users()
        self.decisions: list[Decision] = []

    def run(self) -> Body:
        ours = self._filled_by_kernels()
        for position, step in enumerate(self.body.steps):
            if isinstance(step, Launch):
                self._place(self._part(step, position))
            elif step.target == ALLOCATE and step.result in ours:
                self.waiting[step.result] = step
            else:
                self._call(step)
        return self._result()

    def _filled_by_kernels(self) -> set[str]:
        """Tensors that are allocated for a kernel to fill."""
        found = set()
        for step in self.body.steps:
            if isinstance(step, Launch):
                parameters = self.kernels.programs[step.kernel].parameters
                found |= {n for n, p in zip(step.buffers, parameters, strict=True) if p.role == "out"}
        return found

    def _root(self, name: str) -> str:
        return self.body.memory.get(name, name)

    # ---- what steps touch

    def _call(self, step: Call) -> None:
        position = self.last_call = len(self.items)
        self.items.append(step)
        for name in refs((step.args, step.kwargs)):
            self.last_touch[self._root(name)] = position
        for name in (step.result, *self.body.writes.get(step.result, ())):
            self.last_write[self._root(name)] = self.last_touch[self._root(name)] = position

    def _part(self, launch: Launch, step: int) -> _Part:
        program = self.kernels.programs[launch.kernel]
        names = dict(zip((p.buffer for p in program.parameters), launch.buffers, strict=True))
        moved = {b: Buffer(name, b.dtype, b.sizes, b.strides) for b, name in names.items()}
        result = launch.buffers[-1] if launch.buffers else launch.kernel
        moved |= {b: Buffer(f"{result}.{b.name}", b.dtype, b.sizes, b.strides) for b in program.locals}
        roles = {moved[p.buffer]: p.role for p in program.parameters}
        nests = tuple(replace_buffers(nest, moved) for nest in program.nests)
        return _Part(
            launch,
            step,
            nests,
            tuple(buffer for buffer, role in roles.items() if role == "in"),
            tuple(buffer for buffer, role in roles.items() if role != "in"),
            tuple(buffer for buffer, role in roles.items() if role == "inout"),
            any(can_raise(nest) for nest in nests),
            tuple(size.name for size in program.sizes),
        )

    def _earliest(self, part: _Part) -> int:
        """The position before which the launch must not stand."""
        needs = [self.last_write.get(self._root(b.name), -1) for b in part.read]
        needs += [self.last_touch.get(self._root(b.name), -1) for b in part.written]
        sizes = [part.launch.sizes, *(self.waiting[b.name].args for b in part.written if b.name in self.waiting)]
        needs += [self.last_write.get(self._root(name), -1) for name in refs(sizes)]
        if part.raises:
            needs.append(self.last_call)
        return max(needs, default=-1)

    # ---- joining

    def _place(self, part: _Part) -> None:
        """Into an earlier kernel, or into one of its own."""
        earliest = self._earliest(part)
        for saved, group in self._candidates(part, earliest):
            loop = self._joined(group, part)
            subjects = (_name(group.parts[-1]), _name(part))
            if isinstance(loop, Refusal):
                reason = f"{loop}; it would save {saved:,} bytes" if saved else str(loop)
                self.decisions.append(refused("fuse", subjects, reason))
                continue
            reason = f"they share loops over {box(loop.axes)}" + (f", which saves {saved:,} bytes" if saved else "")
            self.decisions.append(Decision("fuse", subjects, True, reason))
            group.loop = loop
            self._enter(group, part)
            return
        group = _Group(len(self.items), _one_loop(part.nests))
        self.items.append(group)
        self._enter(group, part)

    def _enter(self, group: _Group, part: _Part) -> None:
        group.add(part)
        group.allocations += [self.waiting.pop(b.name) for b in part.written if b.name in self.waiting]
        for buffer in part.buffers:
            root = self._root(buffer.name)
            self.last_touch[root] = max(self.last_touch.get(root, -1), group.position)
            if group not in self.groups_at[root][-1:]:
                self.groups_at[root].append(group)
        for buffer in part.written:
            root = self._root(buffer.name)
            self.last_write[root] = max(self.last_write.get(root, -1), group.position)

    def _candidates(self, part: _Part, earliest: int) -> list[tuple[int, _Group]]:
        """The latest kernels that touch the same memory, with the bytes that a join saves: most first, of equals the
        latest."""
        found = {
            group.position: group
            for buffer in part.buffers
            for group in self.groups_at[self._root(buffer.name)][-MOST_TRIES:]
            if group.position >= earliest
        }
        latest = [found[position] for position in sorted(found, reverse=True)][:MOST_TRIES]
        return sorted(((self._saved(group, part), group) for group in latest), key=lambda each: -each[0])

    def _saved(self, group: _Group, part: _Part) -> int:
        """Bytes that need not be moved if the launch joins."""
        read = [buffer.name for buffer in (*part.read, *part.in_place) if buffer.name in group.count]
        written = {buffer.name for buffer in group.written}
        here = group.count + Counter(buffer.name for buffer in part.buffers)
        gone = [name for name in read if name in written and self.users[self._root(name)] == here[name]]
        return saved_by_joining(self.body, read, gone)

    def _users(self) -> defaultdict[str, int]:
        """How many steps touch each memory; what the caller gets or gave is touched outside."""
        count: defaultdict[str, int] = defaultdict(int)
        for step in self.body.steps:
            if isinstance(step, Call) and step.target == ALLOCATE:
                continue
            names = step.buffers if isinstance(step, Launch) else refs((step.args, step.kwargs))
            for root in {self._root(name) for name in names}:
                count[root] += 1
        return self._with_outside(count)

    def _with_outside(self, count: defaultdict[str, int]) -> defaultdict[str, int]:
        given = (entry.name for entry in self.body.inputs)
        for name in (*refs(self.body.result), *given, *self.constants):
            count[self._root(name)] += 2
        return count

    def _joined(self, group: _Group, part: _Part) -> Loop | Refusal:
        if group.loop is None:
            return Refusal("the nests of the first do not share loops")
        together = group.buffers | dict.fromkeys(part.buffers)
        if len(together) > MOST_BUFFERS:
            return Refusal("there are too many tensors")
        in_place = part.in_place or any(one.in_place for one in group.parts)
        if in_place and (part.raises or any(one.raises for one in group.parts)):
            return Refusal("one writes in place, and one may raise before all is written")
        if self._under_two_names(together, {*group.written, *part.written}):
            return Refusal("they know the same memory by different names")
        loop: Loop | Refusal = group.loop
        for nest in part.nests:
            if isinstance(loop, Refusal):
                break
            loop = join(loop, nest)
        if self.alive is None or isinstance(loop, Refusal):
            return loop
        if not self.alive.join(group.parts[0].step, part.step, part.launch.buffers):
            return Refusal("more memory would be alive at once than with all launches apart")
        return loop

    def _under_two_names(self, buffers: Iterable[Buffer], written: set[Buffer]) -> bool:
        """Whether memory that one of them writes is known as two buffers: what touches what cannot be seen."""
        known: defaultdict[str, list[Buffer]] = defaultdict(list)
        for buffer in buffers:
            known[self._root(buffer.name)].append(buffer)
        return any(len(them) > 1 and not written.isdisjoint(them) for them in known.values())

    # ---- the steps afterwards

    def _result(self) -> Body:
        if not any(decision.taken for decision in self.decisions):
            return self.body
        outside = self._read_outside()
        steps: list[Call | Launch] = []
        for item in self.items:
            if isinstance(item, Call):
                steps.append(item)
                continue
            kept = [b for b in item.written if len(item.parts) == 1 or outside[self._root(b.name)] > 1]
            wanted = {buffer.name for buffer in kept}
            steps += [call for call in item.allocations if call.result in wanted]
            steps.append(_launch(item, tuple(kept), self.kernels))
        steps += self.waiting.values()
        return replace(self.body, steps=tuple(steps))

    def _read_outside(self) -> defaultdict[str, int]:
        """How many items touch each memory; what the caller gets or gave is touched outside."""
        count: defaultdict[str, int] = defaultdict(int)
        for item in self.items:
            names = item.count if isinstance(item, _Group) else refs((item.args, item.kwargs))
            for root in {self._root(name) for name in names}:
                count[root] += 1
        return self._with_outside(count)


class _Kernels:
    """Programs by name, and distinct ones by structure; new ones get the next free number."""

    def __init__(self, programs: Iterable[Program]) -> None:
        self.programs = {program.name: program for program in programs}
        self.names = {_plain(program): program.name for program in self.programs.values()}
        self.next = len(self.programs)

    def name(self, program: Program) -> str:
        known = self.names.get(program)
        while known is None:
            wanted = f"kernel_{self.next}"
            self.next += 1
            if wanted not in self.programs:
                known = self.names[program] = wanted
                named = Program(wanted, program.sizes, program.parameters, program.locals, program.nests)
                self.programs[wanted] = named
        return known


def _plain(program: Program) -> Program:
    return Program("kernel", program.sizes, program.parameters, program.locals, program.nests)


def _launch(group: _Group, written: tuple[Buffer, ...], kernels: _Kernels) -> Launch:
    if len(group.parts) == 1:
        return group.parts[0].launch
    nests = tuple(nest for part in group.parts for nest in part.nests)
    in_place = {buffer for part in group.parts for buffer in part.in_place}
    program, buffers = kernel_of(nests, written, in_place=in_place)
    sizes: dict[str, Any] = {}
    for part in group.parts:
        sizes |= dict(zip(part.size_names, part.launch.sizes, strict=True))
    source = join_places(part.launch.source for part in group.parts)
    given = tuple(sizes[size.name] for size in program.sizes)
    origins = tuple(dict.fromkeys(origin for part in group.parts for origin in part.launch.origins))
    ops = tuple(dict.fromkeys(op for part in group.parts for op in part.launch.ops))
    return Launch(kernels.name(program), tuple(buffer.name for buffer in buffers), given, source, origins, ops)


def _one_loop(nests: tuple[Nest, ...]) -> Loop | None:
    loop: Loop | Refusal = Loop(nests[0].axes, nests[0].body)
    for nest in nests[1:]:
        if isinstance(loop, Refusal):
            return None
        loop = join(loop, nest)
    return None if isinstance(loop, Refusal) else loop


def _name(part: _Part) -> str:
    return part.written[-1].name if part.written else part.launch.kernel
