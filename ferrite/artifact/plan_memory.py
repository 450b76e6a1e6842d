"""Which memory each value of a host program has: a place in the block, a tensor of its own, or a tensor that will hold
something else later. And how much of it there is at once.

The block is kept between calls, so it counts in full for the whole of a call, also where little of it is in use.
Tensors outside it come and go: what the caller gets, what libraries make, and arguments that nobody else has, which die
on the way. So there are steps where fewer of them are alive than at the worst one, and what is put outside there costs
nothing. `plan` starts with all inner buffers in the block and then

1. puts buffers into the memory of tensors that are made later anyway, which then are made earlier;
2. makes tensors of buffers that are outside for nothing, if the peak becomes noticeably less by it: that is a call of
   torch's allocator for each of them. Those that fit into gaps of the block that is left stay there. What convolutions
   make is lent to them (Note [Lent memory] of `native/machine.py`), unless the peak becomes much less without.

Steps 1 and 2 also look at what convolutions need for themselves, as far as it is known (`own_need`): it is not part of
the peak that the plan gives, but of the worst step.

Where sizes change, all inner buffers lie in the block, and what a call needs depends on them: `Need` says it for given
sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field, replace

from ferrite.artifact.host_values import PART, PRODUCTS, Values
from ferrite.errors import Unsupported
from ferrite.host.memory import FEW, Gaps, Life, Span, arrange, place
from ferrite.host.nodes import HOLD, Call, Free, HostProgram, Launch, Return
from ferrite.loops.index import ONE, ZERO, Index, constant, evaluate, free_atoms, of_atom
from ferrite.syntax import Ref, refs

WORTH = 0.01  # of the peak: what has to be won before buffers get memory of their own
WORTH_OF_FAULTS = (
    0.25  # the same for what libraries make: to have fresh pages in each call is half of some models' time
)
PARTS = 8  # of the block: how finely is tried how much more may be outside


@dataclass(frozen=True)
class Plan:
    """Offsets in bytes. `places`: in the block; `hosted`: in the memory of another value, by its name. What has neither
    is a tensor of its own. `length`: of the block; `outside`: of tensors beside it, where they are most, if sizes are
    known; `need`: if they are not."""

    places: dict[str, Index] = field(default_factory=dict)
    hosted: dict[str, tuple[str, int]] = field(default_factory=dict)
    length: Index = ZERO
    outside: int | None = None
    need: Need | None = None


@dataclass(frozen=True)
class Need:
    """What a call needs where sizes change: `block`, and the tensors `outside` it, each from the step that makes it to
    the one that frees it, of so many `steps`. None of them if there is one whose sizes are no expressions of what the
    program is given: what an op in eager makes is not looked into. Arguments that die on the way are not taken off,
    since nobody knows which of them share memory."""

    block: Index
    outside: tuple[Span, ...] | None
    steps: int

    def at(self, sizes: Mapping[str, int]) -> int | None:
        """Bytes at most for sizes by name (`s0`). Raises `ValueError` if one is missing."""
        if self.outside is None:
            return None
        lengths = [self.block, *(span.bytes for span in self.outside)]
        free = {str(of_atom(atom)): atom for length in lengths for atom in free_atoms(length)}
        if missing := sorted(free.keys() - sizes.keys()):
            raise ValueError(f"what a call needs depends on {', '.join(missing)}")
        known = {atom: sizes[name] for name, atom in free.items()}
        made = [Life(span.name, evaluate(span.bytes, known), span.first, span.last) for span in self.outside]
        return evaluate(self.block, known) + max((0, *_curve(self.steps, made, ())))


def locals_of(position: int) -> str:
    """What the memory of a kernel's own locals is called."""
    return f"locals of step {position}"


def plan(program: HostProgram, values: Values, own_memory: Callable[[Launch], Index]) -> Plan:
    """`own_memory`: how much a kernel needs for its locals. Raises `Unsupported` for results that are no tensors."""
    lives = _Lives(program, values, own_memory)
    if values.changing:
        places, length = arrange(lives.inner.values())
        made = lives.outside(program, values)
        need = Need(length, None if made is None else tuple(made.values()), lives.steps)
        return Plan(places, {}, length, need=need)
    return _Planner(lives).run()


def own_need(call: Call, values: Values) -> int:
    """Bytes that a convolution takes for itself while it runs, in oneDNN or before it: copies of operands and results
    in another order. More than it takes, rather than less."""
    place = {"aten.convolution.default": 0, "aten.convolution_backward.default": 1}.get(call.target)
    if place is None:
        return 0
    operands = [values.tensors[arg.name] for arg in call.args[: place + 2] if isinstance(arg, Ref)]
    if len(operands) < place + 2 or any(operand.sizes is None for operand in operands):
        return 0
    *images, weight = operands
    if place == 0 and call.result in values.tensors:
        images.append(values.tensors[call.result])
    is_last = all(image.strides is not None and image.strides[1] is ONE for image in images)
    copied = [weight, weight] if is_last else [weight, *images]
    return sum(value.bytes.constant for value in copied)


class _Lives:
    """When memory is needed. `inner`: buffers that nobody outside sees; `outer`: tensors that the program makes for
    others to see, or has made by them, from the step that makes them to the one that frees them; `dying`: arguments
    that nobody else has, and the step that frees them; `ours`: of the outer ones, those that we allocate; `foreign`:
    steps that call an op in eager, which may need memory of its own."""

    def __init__(self, program: HostProgram, values: Values, own_memory: Callable[[Launch], Index]) -> None:
        self.steps = len(program.steps)
        self.given = {atom for number in values.given.values() for atom in free_atoms(number)}
        made = {step.result for step in program.steps if isinstance(step, Call) and values.is_own(step)}
        self.lent = {step.result for step in program.steps if isinstance(step, Call) and values.is_lent(step)}
        self.products = {step.result for step in program.steps if isinstance(step, Call) and step.target in PRODUCTS}
        seen = _returned(program, values) | values.escaped
        first: dict[str, int] = {}
        last: dict[str, int] = {}
        lengths: dict[str, Index] = {}
        for position, step in enumerate(program.steps):
            match step:
                case Call():
                    names = [step.result, *refs((step.args, step.kwargs))]
                case Launch():
                    names = list(step.buffers)
                    name, own = locals_of(position), own_memory(step)
                    if own is not ZERO:
                        if not free_atoms(own) <= self.given:
                            raise Unsupported("memory of a kernel that depends on data")
                        first[name] = last[name] = position
                        lengths[name] = own
                case _:
                    continue
            for root in (values.tensors[name].root for name in names if name in values.tensors):
                first.setdefault(root, position)
                last[root] = position
        for root in first:
            if root in made | self.lent and root not in seen and free_atoms(values.tensors[root].bytes) <= self.given:
                lengths[root] = values.tensors[root].bytes
        self.inner = {name: Span(name, length, first[name], last[name]) for name, length in lengths.items()}
        self.tensors = made & self.inner.keys()  # without the locals of kernels
        self.ours = made - self.inner.keys()
        if not values.changing:
            outer = self.outside(program, values) or {}
            self.outer = {name: Life(name, span.bytes.constant, span.first, span.last) for name, span in outer.items()}
            self.dying = _dying(program, values, _freed(program, values))
            self.own = [own_need(step, values) if isinstance(step, Call) else 0 for step in program.steps]
            self.foreign = [
                position
                for position, step in enumerate(program.steps)
                if isinstance(step, Call)
                and step.result not in made
                and step.result not in values.views
                and step.target not in (PART, HOLD)
            ]

    def outside(self, program: HostProgram, values: Values) -> dict[str, Span] | None:
        """The tensors beside the block; None if nobody knows the sizes of one beforehand."""
        freed = _freed(program, values)
        outer: dict[str, Span] = {}
        named = {id(value): name for name, value in values.tensors.items() if value.root in values.several}
        for position, step in enumerate(program.steps):
            if isinstance(step, Call) and step.result not in self.inner and step.target != PART:
                several = values.several.get(step.result)
                for part in [values.tensors.get(step.result)] if several is None else several.parts:
                    if part is not None and part.root == step.result:
                        if part.sizes is None or not free_atoms(part.bytes) <= self.given:
                            return None
                        name = named.get(id(part), step.result)
                        last, before = freed.get(name, self.steps), outer.get(name)
                        length = part.bytes + before.bytes if before else part.bytes
                        outer[name] = Span(name, length, position, last)
        return outer


def _returned(program: HostProgram, values: Values) -> set[str]:
    (final,) = (step for step in program.steps if isinstance(step, Return))
    returned = list(refs(final.value))
    known = all(name in values.tensors or name in values.numbers for name in returned)
    if not isinstance(final.value, tuple) or not known:
        raise Unsupported("results that are no tensors")
    return {values.tensors[name].root for name in returned if name in values.tensors}


def _freed(program: HostProgram, values: Values) -> dict[str, int]:
    """The step that frees memory, for what is freed before the end: when the last name of a value that shares it goes.
    Memory has the name of the value that it was made for; each of several tensors that a call gives has memory of its
    own, by the name of the part, or goes with all of them if it has none."""
    owners = {entry.name: entry.name for entry in program.inputs}
    made = {step.result: step for step in program.steps if isinstance(step, Call)}
    for result, call in made.items():
        maker = made[call.args[0].name] if call.target == PART else call  # which may have given several views
        operands = refs((maker.args, maker.kwargs))
        source = next((name for name in operands if _is_shared(name, result, values)), None)
        owners[result] = result if source is None else owners.get(source, source)
    names: dict[str, set[str]] = {}
    for name, owner in owners.items():
        names.setdefault(owner, set()).add(name)
    found: dict[str, int] = {}
    for position, step in enumerate(program.steps):
        if isinstance(step, Free):
            for name in step.names:
                owner = owners.get(name, name)
                names.get(owner, set()).discard(name)
                if not names.get(owner):
                    found[owner] = position
    return found


def _is_shared(name: str, result: str, values: Values) -> bool:
    """Whether a result has the memory of an operand."""
    tensors = values.tensors
    return name in tensors and result in tensors and tensors[name].root == tensors[result].root


def _dying(program: HostProgram, values: Values, freed: Mapping[str, int]) -> list[tuple[int, int]]:
    """When arguments die that nobody else has, and how much memory goes with them: of several that share it, all of it
    with the last one."""
    lengths: dict[str, int] = {}
    last: dict[str, int] = {}
    for entry in program.inputs:
        if entry.saved or entry.donated:
            name, length = entry.part or (entry.name, values.tensors[entry.name].bytes.constant)
            lengths[name] = length
            last[name] = max(last.get(name, 0), freed.get(entry.name, len(program.steps)))
    return [(position, lengths[name]) for name, position in last.items() if position < len(program.steps)]


@dataclass
class _Host:
    """A tensor that is made at `life.first`, but whose memory may be had from `start` on."""

    life: Life
    start: int
    gaps: Gaps


class _Planner:
    """For sizes that are known. Bytes while each step runs: `alive` outside the block, of which there are `most`
    anyway, and `inside`."""

    def __init__(self, lives: _Lives) -> None:
        self.lives = lives
        self.inner = {
            name: Life(name, span.bytes.constant, span.first, span.last) for name, span in lives.inner.items()
        }
        self.alive = _curve(lives.steps, lives.outer.values(), lives.dying)
        for step, own in enumerate(lives.own):
            self.alive[step] += own
        self.most = max((0, *self.alive))
        self.foreign = set(lives.foreign)
        self.most_at_foreign = max((self.alive[step] for step in lives.foreign), default=0)
        self.inside = [0] * len(self.alive)
        for life in self.inner.values():
            _add(self.inside, life.first, life.last, life.bytes)
        made = [life for name, life in lives.outer.items() if name in lives.ours and life.bytes]
        self.hosts = [_Host(life, life.first, Gaps(life.bytes)) for life in made]
        self.host_of = {host.life.name: host for host in self.hosts}
        self.hosted: dict[str, tuple[str, int]] = {}

    def run(self) -> Plan:
        self._lower(self._host)
        offsets, length = place(life for name, life in self.inner.items() if name not in self.hosted)
        least = max((0, *map(sum, zip(self.alive, self.inside, strict=True))))
        total = length + self.most
        for movable, worth in ((self.lives.tensors, WORTH), (self.lives.tensors | self.lives.lent, WORTH_OF_FAULTS)):
            if (1 - worth) * total > least:
                offsets, length, total = self._with_tensors(offsets, length, total, movable, worth)
        places = {name: constant(offset) for name, offset in offsets.items()}
        return Plan(places, self.hosted, constant(length), self._most_outside(places))

    def _most_outside(self, places: Mapping[str, Index]) -> int:
        """Bytes of tensors that the program makes, where they are most; arguments that died make it less."""
        made = [
            replace(life, first=host.start) if (host := self.host_of.get(name)) else life
            for name, life in self.lives.outer.items()
        ]
        inner = [
            replace(life, last=life.last + 1)
            for name, life in self.inner.items()
            if name not in places and name not in self.hosted
        ]
        return max((0, *_curve(self.lives.steps, [*made, *inner], self.lives.dying)))

    def _with_tensors(
        self, offsets: dict[str, int], length: int, total: int, movable: Set[str], worth: float
    ) -> tuple[dict[str, int], int, int]:
        """The block, smaller if buffers outside it make the peak noticeably less, and the peak: as many as fit beside
        the others, or some more, if they make less of the block than they add outside."""
        alive, inside, most = self.alive, self.inside, self.most
        found = offsets, length, total
        limits = [most + length * part // PARTS for part in range(PARTS + 1)]
        if len(self.inner) <= FEW:  # also as much as one of them needs, where nothing else is outside
            limits += sorted({life.bytes for life in self.inner.values() if life.bytes > most}, reverse=True)[:PARTS]
        enough = (1 - worth) * total
        for limit in limits:
            self.alive, self.inside, self.most = [*alive], [*inside], limit
            outside = self._lower(lambda life: life.name in movable and self._make_tensor(life))
            if outside and max(self.inside) + max(self.alive) < enough:
                offsets, length = self._place_without(outside)
                total = length + max(self.alive)
                if total < enough:
                    found, enough = (offsets, length, total), (1 - WORTH) * total
        self.alive, self.inside, self.most = alive, inside, most
        return found

    def _lower(self, move: Callable[[Life], bool]) -> list[Life]:
        """Moves buffers out of the block for as long as that makes less of it at its worst step."""
        moved: list[Life] = []
        at_step: list[list[Life]] = [[] for _ in self.inside]
        for life in self.inner.values():
            if life.name not in self.hosted:
                for step in range(life.first, life.last + 1):
                    at_step[step].append(life)
        while self.inside:
            worst = max(range(len(self.inside)), key=self.inside.__getitem__)
            waiting = sorted(at_step[worst], key=lambda life: (-life.bytes, -life.last, life.name))
            found = next((life for life in waiting if move(life)), None)
            if found is None:
                break
            moved.append(found)
            _add(self.inside, found.first, found.last, -found.bytes)
            for step in range(found.first, found.last + 1):
                at_step[step].remove(found)
        return moved

    def _fits(self, first: int, last: int, bytes: int) -> bool:
        return max(self.alive[first : last + 1], default=0) + bytes <= self.most

    def _host(self, life: Life) -> bool:
        """Into a tensor that is made later; best into one whose memory is there already. It is not there while an op in
        eager runs at a step where most is alive of all such steps: nobody knows what that needs for itself."""
        able = [host for host in self.hosts if life.last < host.life.first and life.bytes <= host.life.bytes]
        for host in sorted(able, key=lambda host: max(host.start - life.first, 0) * host.life.bytes):
            earlier = range(life.first, host.start)
            if earlier and not self._fits(life.first, host.start - 1, host.life.bytes):
                continue
            at_foreign = max((self.alive[step] for step in earlier if step in self.foreign), default=0)
            if at_foreign and at_foreign + host.life.bytes > self.most_at_foreign:
                continue
            offset = host.gaps.take(life)
            if offset is not None:
                self.hosted[life.name] = host.life.name, offset
                _add(self.alive, life.first, host.start - 1, host.life.bytes)
                host.start = min(host.start, life.first)
                return True
        return False

    def _make_tensor(self, life: Life) -> bool:
        """Outside the block, while fewer tensors than at the worst step are."""
        if not self._fits(life.first, life.last, life.bytes):
            return False
        _add(self.alive, life.first, life.last, life.bytes)
        return True

    def _place_without(self, outside: list[Life]) -> tuple[dict[str, int], int]:
        """The block of what stays. Of what need not, that goes back which fits into its gaps: first what only kernels
        use, since a product asks for a tensor anyway."""
        names = {life.name for life in outside} | self.hosted.keys()
        stay = [life for name, life in self.inner.items() if name not in names]
        offsets, length = place(stay)
        gaps = Gaps(length)
        for life in stay:
            gaps.put(life, offsets[life.name])
        for life in sorted(outside, key=lambda life: (life.name in self.lives.products, life.bytes, life.first)):
            offset = gaps.take(life)
            if offset is not None:
                offsets[life.name] = offset
        return offsets, length


def _add(curve: list[int], first: int, last: int, bytes: int) -> None:
    for step in range(first, last + 1):
        curve[step] += bytes


def _curve(steps: int, lives: Iterable[Life], dying: Iterable[tuple[int, int]]) -> list[int]:
    changes = [0] * (steps + 2)
    for life in lives:
        changes[life.first] += life.bytes
        changes[life.last] -= life.bytes  # a step that frees runs without what it frees
    for position, bytes in dying:
        changes[position] -= bytes
    curve, alive = [], 0
    for change in changes[: steps + 1]:
        alive += change
        curve.append(alive)
    return curve
