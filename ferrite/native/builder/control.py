"""Loops and branches, as context managers that take care of blocks and phis.

with b.loop(0, count, 16, carried=(total,)) as loop:
    ...
    loop.next(b.add(loop.carried[0], x))
total, = loop.results

Note [No strength reduction]
    LLVM looks for cheaper ways to step through the addresses of a loop, which takes a third of all the time that it
    needs for a kernel. What it finds is no better than what is written: pointers that a loop does not move are computed
    before it, and the processor adds the index. It looks at what it knows to grow by equal steps; so the next index is
    made of one of which a number is "expected". To LLVM's analyses that is a call like any other, and it becomes no
    instruction. (An empty piece of assembly does as much, but then a kernel took 2 to 5% longer to compile.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ferrite.errors import Malformed
from ferrite.loops.dtypes import i64
from ferrite.native.builder.convert import Convert
from ferrite.native.builder.values import Value


class Loop:
    """`index` and `carried` inside, `results` afterwards; `next` gives the values for the next round, once."""

    def __init__(self, index: Value | None, carried: tuple[Value, ...]) -> None:
        self.index_or_none = index
        self.carried = carried
        self.results: tuple[Value, ...] = ()
        self.following: tuple[Value, ...] | None = None
        self.condition: Value | None = None

    @property
    def index(self) -> Value:
        assert self.index_or_none is not None
        return self.index_or_none

    def next(self, *values: Value) -> None:
        self.following = values

    def again(self, condition: Value, *values: Value) -> None:
        """For `repeat`: go on while the condition holds."""
        self.condition, self.following = condition, values


class Branch:
    """`give` inside says what the results are if this branch is taken; `results` afterwards."""

    def __init__(self) -> None:
        self.results: tuple[Value, ...] = ()
        self.given: tuple[Value, ...] = ()

    def give(self, *values: Value) -> None:
        self.given = values


class Control(Convert):
    @contextmanager
    def loop(
        self,
        start: Value | int,
        stop: Value | int,
        step: Value | int = 1,
        carried: Sequence[Value] = (),
        *,
        surely: bool = False,
    ) -> Iterator[Loop]:
        """For index = start, start + step, ... below stop, all i64. The test is at the end, with one before, unless
        there is `surely` a first round. What is known to run once is no loop."""
        first, last, stride = (self._index(each) for each in (start, stop, step))
        if _runs_once(first.literal, last.literal, stride.literal):
            loop = Loop(first, tuple(carried))
            yield loop
            loop.results = self._following(loop, carried)
            return
        before, body, after = self._function.block, self._new_label(), self._new_label()
        assert before is not None
        surely |= first.literal is not None and last.literal is not None and first.literal < last.literal
        if surely:
            self._jump(body)
        else:
            self._branch(self.lt(first, last), body, after)
        self._start_block(body)
        spot, (index, *inside) = self._reserve_phis((first, *carried))
        loop = Loop(index, tuple(inside))
        yield loop
        end = self._function.block
        if end is None:
            raise Malformed("a loop whose body never ends", where="native builder")
        following = self._following(loop, carried)
        onward = self.add(self._opaque(index), stride)  # See Note [No strength reduction].
        self._branch(self.lt(onward, last), body, after)
        self._fill_phis(spot, (index, *inside), [(before, (first, *carried)), (end, (onward, *following))])
        self._start_block(after)
        loop.results = following if surely else self._merge([(before, tuple(carried)), (end, following)])

    @contextmanager
    def repeat(self, carried: Sequence[Value]) -> Iterator[Loop]:
        """Runs at least once; `again(condition, *values)` inside says how it goes on."""
        before, body, after = self._function.block, self._new_label(), self._new_label()
        assert before is not None
        self._jump(body)
        self._start_block(body)
        spot, inside = self._reserve_phis(tuple(carried))
        loop = Loop(None, tuple(inside))
        yield loop
        end = self._function.block
        if end is None or loop.condition is None:
            raise Malformed("a loop whose body never ends", where="native builder")
        following = self._following(loop, carried)
        self._branch(loop.condition, body, after)
        self._fill_phis(spot, inside, [(before, tuple(carried)), (end, following)])
        self._start_block(after)
        loop.results = following

    @contextmanager
    def if_(self, condition: Value, otherwise: Sequence[Value] = (), *, unlikely: bool = False) -> Iterator[Branch]:
        """Runs what is inside if the scalar condition holds. Results: what was given, or else `otherwise`."""
        if condition.literal:
            branch = Branch()
            yield branch
            if self._function.block is None:  # it left the function: nothing comes to what is written behind it
                self._start_block(self._new_label())
            branch.results = branch.given
            return
        before, inside, after = self._function.block, self._new_label(), self._new_label()
        assert before is not None
        self._branch(condition, inside, after, unlikely=unlikely)
        self._start_block(inside)
        branch = Branch()
        yield branch
        end = self._function.block
        self._jump(after)
        self._start_block(after)
        arrivals = [(before, tuple(otherwise))]
        if end is not None:
            arrivals.append((end, branch.given))
        branch.results = self._merge(arrivals)

    @contextmanager
    def either(self, condition: Value) -> Iterator[tuple[Branch, Branch]]:
        """Both branches, in this order, each with its own block:

        with b.either(condition) as (yes, no):
            with b.inside(yes): ...; yes.give(x)
            with b.inside(no): ...; no.give(y)
        x_or_y, = yes.results
        """
        yes, no = _Side(self._new_label()), _Side(self._new_label())
        after = self._new_label()
        self._branch(condition, yes.label, no.label)
        yield yes, no
        arrivals = []
        for side in (yes, no):
            if not side.written:
                raise Malformed("a branch that was not written", where="native builder")
            if side.end is not None:
                arrivals.append((side.end, side.given))
        # Each side jumps to the place that follows; it is known only now.
        for side in (yes, no):
            if side.end is not None:
                self._lines[side.spot] = f"  br label %{after}"
        if arrivals:
            self._start_block(after)
            yes.results = no.results = self._merge(arrivals)

    @contextmanager
    def inside(self, branch: Branch) -> Iterator[None]:
        assert isinstance(branch, _Side)
        self._start_block(branch.label)
        yield
        branch.written, branch.end = True, self._function.block
        if branch.end is not None:
            branch.spot = len(self._lines)
            self._lines.append("")
            self._function.block = None

    def _opaque(self, value: Value) -> Value:
        """The same, and LLVM cannot see it. See Note [No strength reduction]."""
        return self._intrinsic("expect", value.type, value, after=f", {value.type.text} 0")

    def _in_register(self, value: Value, kind: str) -> Value:
        """The same in a register of this kind, and LLVM cannot see how it came there. Becomes no instruction."""
        text = value.type.text
        names = [self._line(f'call {text} asm "", "={kind},0"({text} {name})') for name in value.names]
        return Value(value.type, tuple(names))

    # ---- phis

    def _index(self, value: Value | int) -> Value:
        return value if isinstance(value, Value) else self.constant(i64, value)

    def _following(self, loop: Loop, carried: Sequence[Value]) -> tuple[Value, ...]:
        following = loop.following or ()
        if len(following) == len(carried):  # what is the same in all ways may be known by one name
            following = tuple(self.with_ways(each, old.ways) for each, old in zip(following, carried, strict=True))
        shapes = [(value.type, value.ways) for value in following]
        if shapes != [(value.type, value.ways) for value in carried]:
            raise Malformed(
                f"a loop carries {list(carried)} and goes on with {list(following)}", where="native builder"
            )
        return following

    def _reserve_phis(self, values: Sequence[Value]) -> tuple[int, list[Value]]:
        """Names and lines for phis at the start of a block; their text comes when the block that loops is known."""
        spot = len(self._lines)
        function = self._function
        reserved = []
        for value in values:
            names = tuple(f"%{function.values + way}" for way in range(value.ways))
            function.values += value.ways
            self._lines.extend([""] * value.ways)
            reserved.append(Value(value.type, names))
        return spot, reserved

    def _fill_phis(self, spot: int, phis: Sequence[Value], arrivals: Sequence[tuple[str, tuple[Value, ...]]]) -> None:
        for position, phi in enumerate(phis):
            for way, name in enumerate(phi.names):
                sources = ", ".join(f"[ {values[position].names[way]}, %{block} ]" for block, values in arrivals)
                self._lines[spot] = f"  {name} = phi {phi.type.text} {sources}"
                spot += 1

    def _merge(self, arrivals: Sequence[tuple[str, tuple[Value, ...]]]) -> tuple[Value, ...]:
        """The values at the start of a block that is reached from several."""
        first = arrivals[0][1]
        if any([(v.type, v.ways) for v in values] != [(v.type, v.ways) for v in first] for _, values in arrivals):
            raise Malformed(f"branches give different values: {[values for _, values in arrivals]}", where="builder")
        if len(arrivals) == 1:
            return first
        spot, phis = self._reserve_phis(first)
        self._fill_phis(spot, phis, arrivals)
        return tuple(phis)


def _runs_once(first: int | float | None, last: int | float | None, step: int | float | None) -> bool:
    return first is not None and last is not None and step is not None and first < last <= first + step


class _Side(Branch):
    def __init__(self, label: str) -> None:
        super().__init__()
        self.label = label
        self.written = False
        self.end: str | None = None
        self.spot = 0
