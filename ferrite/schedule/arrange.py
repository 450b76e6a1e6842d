"""The nests of a kernel as a tree of loops: nests that may run side by side share their outer loops.

    for i in box(512): m[i] = sum(x[i, k] for k in box(768))          for i in box(512):
    for i, j in box(512, 768): y[i, j] = x[i, j] - m[i]          ->       m[i] = sum(x[i, k] for k in box(768))
                                                                          for j in box(768): y[i, j] = x[i, j] - m[i]

A row is read once into the cache, and `m[i]` stays in a register if nobody else wants it. A local that is used row by
row, and nowhere else, needs memory for one row only, which every thread has for itself and which stays in the cache.

Law: two nests may share an axis if, wherever both touch a buffer and one of them writes, some dimension of it is
indexed by that axis alone in both: what a point of the shared loop touches, no other point touches. Inside of a point
everything runs in the order of the program. Points of an axis that statements combine along are not reordered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ferrite.decisions import Decision
from ferrite.loops.access import Access, accesses, axis_at, written_by
from ferrite.loops.index import Axis, Index, constant, free_axes, holds_data, known_equal, of_atom, product
from ferrite.loops.nodes import Apply, Buffer, Load, Nest, Program, Reduce, Statement, Store
from ferrite.loops.passes.merge_axes import Joins, merged, merged_in_reductions
from ferrite.loops.rewrite import fresh_name, names_in, replace_buffers, substitute_axes, walk
from ferrite.loops.text import show
from ferrite.schedule.decided import Refusal, box, on, refused
from ferrite.schedule.shape import are_independent, best_axis, places_of, reductions_in

MOST_STATEMENTS = 24  # of one tree: more of them need more registers and more time to compile
FEW_POINTS = 16  # outer points that cannot keep threads busy ...
MUCH_WORK = 1 << 17  # ... on this many inner ones
FEW_NUMBERS = 8  # that a vector holds
DEAR = frozenset({"exp", "expm1", "log", "log1p", "pow", "sin", "cos", "tan", "tanh", "sigmoid", "erf", "erfc", "ndtr"})
LONGEST_ROW = 1 << 14  # bytes: half of the first cache, for what is worth to be kept for a row
LARGEST_ROW = 1 << 15  # bytes of a row that is kept on the stack of a thread ...
LARGEST_TILE = 1 << 17  # ... or of all of them together: a quarter of the second cache


@dataclass(frozen=True)
class Loop:
    """A loop over a box; what is inside runs in order at each point. `text` of an arrangement shows it as Python."""

    axes: tuple[Axis, ...]
    body: tuple[Loop | Statement, ...]

    @property
    def is_leaf(self) -> bool:
        return not any(isinstance(part, Loop) for part in self.body)

    def statements(self) -> Iterator[Statement]:
        for part in self.body:
            if isinstance(part, Loop):
                yield from part.statements()
            else:
                yield part


@dataclass(frozen=True)
class Arrangement:
    """Trees of loops, which run one after the other. `registers`: locals that need no memory. `rows`: locals of which
    one row is kept, at the same place for all points of the outer loops; each stands for the program's of its name.
    `decisions`: for each nest but the first, whether it shares the loops of those before it."""

    loops: tuple[Loop, ...]
    registers: frozenset[Buffer]
    rows: frozenset[Buffer] = frozenset()
    decisions: tuple[Decision, ...] = ()

    def text(self) -> str:
        lines = [f"{buffer.name} = register({buffer.dtype.name})" for buffer in sorted(self.registers, key=_by_name)]
        lines += [f"{buffer.name} = row({row_length(buffer)})" for buffer in sorted(self.rows, key=_by_name)]
        for loop in self.loops:
            lines += _lines(loop)
        return "\n".join(lines)


def arrange(program: Program) -> Arrangement:
    """Join each nest to the tree before it, if it can be; then give neighbouring axes that run as one to one loop."""
    loops = [Loop(nest.axes, nest.body) for nest in program.nests[:1]]
    decisions: list[Decision] = []
    for nest in program.nests[1:]:
        joined = join(loops[-1], nest)
        if isinstance(joined, Loop):
            loops[-1] = joined
            reason = f"with what stands before it, over {box(joined.axes)}"
            decisions.append(Decision("share loops", on(program, nest.body), True, reason))
        else:
            loops.append(Loop(nest.axes, nest.body))
            decisions.append(refused("share loops", on(program, nest.body), joined))
    joins = Joins(frozenset(names_in(program)))
    whole = tuple(_with_merged_axes(loop, joins) for loop in loops)
    registers = registers_in(whole, program.locals)
    trees = Arrangement(whole, registers, decisions=tuple(decisions))
    return with_rows(trees, [each for each in program.locals if each not in registers])


# ---- joining


def join(loop: Loop, nest: Nest) -> Loop | Refusal:
    """The tree with the nest in it, behind everything that is there."""
    statements = [*loop.statements()]
    if len(statements) + len(nest.body) > MOST_STATEMENTS:
        return Refusal("there are too many statements")
    together = _matched(loop.axes, statements, nest)
    if isinstance(together, Refusal):
        return together
    shared = tuple(axis for axis in loop.axes if axis in together)
    left = tuple(axis for axis in loop.axes if axis not in together)
    rest = tuple(axis for axis in nest.axes if axis not in together.values())
    refusal = _would_hurt(loop, nest, shared, left, rest, together)
    if refusal is not None:
        return refusal
    if left:
        loop = Loop(shared, (Loop(left, loop.body),))
    axes, body = _moved(nest, rest, together, shared)
    if not axes:
        return Loop(shared, (*loop.body, *body))
    return Loop(shared, _with_nest(loop.body, Nest(axes, body)))


def _matched(axes: Sequence[Axis], statements: Iterable[Statement], nest: Nest) -> dict[Axis, Axis] | Refusal:
    """For each axis of the tree that may be shared, the axis of the nest that becomes it."""
    mine = _by_buffer(statements)
    theirs = _by_buffer(nest.body)
    both = [(a, b) for buffer in mine if buffer in theirs for a in mine[buffer] for b in theirs[buffer]]
    if not both:
        return Refusal("they have no memory in common")
    tied = [(a, b) for a, b in both if a.writes or b.writes]
    wanted, have = set(nest.axes), set(axes)
    if tied:
        pairs = _matches(*tied[0], have, wanted)
        for a, b in tied[1:]:
            pairs &= _matches(a, b, have, wanted)
    else:
        # They only read: any axes of equal length will do, best those that read the same.
        pairs = max((_matches(a, b, have, wanted) for a, b in both), key=len) or _equal_lead(axes, nest.axes)
    together: dict[Axis, Axis] = {}
    for axis in axes:
        partners = [n for n in nest.axes if (axis, n) in pairs and n not in together.values()]
        if partners and are_independent(statements, axis) and are_independent(nest.body, partners[0]):
            together[axis] = partners[0]
    if not together and (axes or nest.axes):
        return Refusal("no loop of theirs touches the same places at the same time")
    return together


def _by_buffer(statements: Iterable[Statement]) -> dict[Buffer, list[Access]]:
    found: dict[Buffer, dict[Access, None]] = {}
    for statement in statements:
        for access in accesses(statement):
            found.setdefault(access.buffer, {})[access] = None
    return {buffer: [*places] for buffer, places in found.items()}


def _matches(a: Access, b: Access, mine: set[Axis], theirs: set[Axis]) -> set[tuple[Axis, Axis]]:
    """Axes of equal length that alone index the same dimension."""
    pairs = set()
    for left, right in zip(a.index, b.index, strict=True):
        one, other = axis_at(left), axis_at(right)
        if one is None or other is None or one not in mine or other not in theirs:
            continue
        if one.extent is other.extent or known_equal(one.extent, other.extent):
            pairs.add((one, other))
    return pairs


def _equal_lead(mine: Sequence[Axis], theirs: Sequence[Axis]) -> set[tuple[Axis, Axis]]:
    """The first axes of both, as long as they are equally long."""
    pairs = set()
    for one, other in zip(mine, theirs, strict=False):
        if not known_equal(one.extent, other.extent):
            break
        pairs.add((one, other))
    return pairs


def _would_hurt(
    loop: Loop,
    nest: Nest,
    shared: tuple[Axis, ...],
    left: tuple[Axis, ...],
    rest: tuple[Axis, ...],
    together: dict[Axis, Axis],
) -> Refusal | None:
    """Why sharing would be slower than not, or wrong."""
    if left and not loop.is_leaf:
        return Refusal("it would break up loops that others share")
    if left and not all(isinstance(part, Store) for part in loop.body):
        return Refusal("it would change the order of a loop that combines")
    if left and _lane_axis(loop.axes, loop.body) in shared:
        return Refusal("the loop that they could share is the one that runs along memory")
    if rest and _lane_axis(nest.axes, nest.body) not in rest:
        return Refusal("the loop that they could share is the one that runs along memory")
    if rest and loop.is_leaf and not left and _sums_across(loop.axes, loop.body):
        return Refusal("its sums run across the rows that they could share")
    if not rest and (left or not loop.is_leaf) and _sums_across(nest.axes, nest.body):
        return Refusal("its sums run across the rows that they could share")
    if _is_small_product(loop.axes, loop.body):
        if left or rest or not loop.is_leaf:
            return Refusal("the sums of a small product would run row by row")
        if any(map(_is_dear, nest.body)):
            return Refusal("it would be computed number by number, behind sums that run along memory")
    if _is_small_product(nest.axes, nest.body):
        return Refusal("the sums of a small product would run row by row")
    in_order = shared == loop.axes[: len(shared)] and tuple(together.values()) == nest.axes[: len(shared)]
    if not in_order and not _shares_much(loop, nest, set(together.values())):
        return Refusal("loops would change places for a few elements in common")
    if (left or rest) and _starves_threads(shared, left + rest):
        return Refusal("too few outer points for the threads")
    return None


def _is_small_product(axes: Sequence[Axis], body: Iterable[Statement | Loop]) -> bool:
    """Whether sums of products along memory, whose factors each know only some of the loops, give a number for every
    few that are read."""
    statements = [part for part in body if not isinstance(part, Loop)]
    sums = [node for part in statements for node in reductions_in(part) if _is_of_products(node, frozenset(axes))]
    points = product(axis.extent for axis in axes)
    elements = [product(buffer.sizes) for buffer in {n.buffer for e in sums for n in walk(e) if isinstance(n, Load)}]
    if not sums or points.terms or any(size.terms for size in elements) or _sums_across(axes, statements):
        return False
    return points.constant * FEW_NUMBERS > sum(size.constant for size in elements)


def _is_of_products(node: Reduce, axes: frozenset[Axis]) -> bool:
    body = node.body
    if not (isinstance(body, Apply) and body.operation == "mul"):
        return False
    return all(not axes <= free_axes(factor) for factor in body.operands)


def _is_dear(statement: Statement) -> bool:
    return any(isinstance(node, Apply) and node.operation in DEAR for node in walk(statement))


def _shares_much(loop: Loop, nest: Nest, shared: set[Axis]) -> bool:
    """Whether a buffer that both touch has more elements than the shared loops have points."""
    mine = {access.buffer for statement in loop.statements() for access in accesses(statement)}
    theirs = (access for statement in nest.body for access in accesses(statement) if access.buffer in mine)
    return any(not free_axes(place) <= shared for access in theirs for place in access.index)


def _starves_threads(shared: tuple[Axis, ...], others: tuple[Axis, ...]) -> bool:
    points, inner = product(axis.extent for axis in shared), product(axis.extent for axis in others)
    if points.terms or inner.terms:
        return False
    return points.constant < FEW_POINTS and points.constant * inner.constant >= MUCH_WORK


def _lane_axis(axes: Sequence[Axis], body: Iterable[Statement | Loop]) -> Axis | None:
    statements = [part for part in body if not isinstance(part, Loop)]
    return best_axis(axes, places_of(statements))


def _sums_across(axes: Sequence[Axis], body: Iterable[Statement | Loop]) -> bool:
    """Whether a reduction reads memory without gaps along one of the loops around it, not along its own."""
    for part in body:
        if isinstance(part, Loop):
            continue
        for node in reductions_in(part):
            if best_axis((*axes, *node.axes), places_of([node.body])) in axes:
                return True
    return False


def _moved(
    nest: Nest, rest: tuple[Axis, ...], together: dict[Axis, Axis], around: Sequence[Axis]
) -> tuple[tuple[Axis, ...], tuple[Statement, ...]]:
    """The nest's own axes and statements, written with the axes of the tree."""
    places: dict[Axis, Index] = {theirs: of_atom(mine) for mine, theirs in together.items()}
    taken = {axis.name for axis in around}
    own: list[Axis] = []
    for axis in rest:
        name = fresh_name(axis.name, taken, names_in(nest)) if axis.name in taken else axis.name
        taken.add(name)
        own.append(axis if name == axis.name else Axis(name, axis.extent))
        if own[-1] is not axis:
            places[axis] = of_atom(own[-1])
    inside = (*around, *own)
    return tuple(own), tuple(substitute_axes(part, places, inside) for part in nest.body)


def _with_nest(body: tuple[Loop | Statement, ...], nest: Nest) -> tuple[Loop | Statement, ...]:
    """The nest in the latest loop that has the same axes, unless what stands behind that must come first; else behind
    everything."""
    theirs = _by_buffer(nest.body)
    for place in reversed(range(len(body))):
        part = body[place]
        inner = _joined_inside(part, nest) if isinstance(part, Loop) else None
        if inner is not None:
            return (*body[:place], inner, *body[place + 1 :])
        if _depend(_by_buffer(part.statements() if isinstance(part, Loop) else (part,)), theirs):
            break
    return (*body, Loop(nest.axes, nest.body))


def _joined_inside(loop: Loop, nest: Nest) -> Loop | None:
    """The nest in a loop inside, if that has the same axes."""
    if not loop.is_leaf or len(loop.axes) != len(nest.axes):
        return None
    together = _matched(loop.axes, loop.body, nest)  # type: ignore[arg-type]
    if isinstance(together, Refusal) or len(together) != len(loop.axes):
        return None
    _, body = _moved(nest, (), together, loop.axes)
    return Loop(loop.axes, (*loop.body, *body))


def _depend(mine: dict[Buffer, list[Access]], theirs: dict[Buffer, list[Access]]) -> bool:
    """Whether both touch a buffer that one of them writes."""
    both = (access for buffer in mine if buffer in theirs for access in (*mine[buffer], *theirs[buffer]))
    return any(access.writes for access in both)


# ---- after joining


def _with_merged_axes(loop: Loop, joins: Joins) -> Loop:
    """Neighbouring axes that everything below runs through as one become one, level by level."""
    axes, moved = merged(loop.axes, tuple(loop.statements()), joins)
    replaced = _with_statements(loop.body, (merged_in_reductions(statement, joins) for statement in moved))
    return Loop(axes, tuple(_with_merged_axes(part, joins) if isinstance(part, Loop) else part for part in replaced))


def _with_statements(body: Iterable[Loop | Statement], statements: Iterator[Statement]) -> tuple[Loop | Statement, ...]:
    return tuple(
        Loop(part.axes, _with_statements(part.body, statements)) if isinstance(part, Loop) else next(statements)
        for part in body
    )


def registers_in(loops: Iterable[Loop], local_buffers: Iterable[Buffer]) -> frozenset[Buffer]:
    """Locals that are stored once and read only where the stored value is at hand: at the same place, in the same loop
    or deeper."""
    candidates = set(local_buffers)
    stored: set[Buffer] = set()

    def visit(loop: Loop, visible: dict[Buffer, tuple[Index, ...]]) -> None:
        for part in loop.body:
            if isinstance(part, Loop):
                visit(part, dict(visible))
                continue
            for access in accesses(part):
                if not access.writes and visible.get(access.buffer) != access.index:
                    candidates.discard(access.buffer)
                elif access.writes:
                    if not isinstance(part, Store) or access.buffer in stored:
                        candidates.discard(access.buffer)
                    stored.add(access.buffer)
                    visible[access.buffer] = access.index

    for loop in loops:
        visit(loop, {})
    return frozenset(candidates)


def with_rows(arrangement: Arrangement, local_buffers: Sequence[Buffer]) -> Arrangement:
    """Locals that one tree uses, row by row, become rows."""
    loops, rows = [*arrangement.loops], []
    held = [0] * len(loops)  # bytes, for each tree
    for buffer in local_buffers:
        users = [n for n, loop in enumerate(loops) if buffer in _by_buffer(loop.statements())]
        row = _row_of(buffer, loops[users[0]]) if len(users) == 1 else None
        if row is None:
            continue
        size = row_length(row) * row.dtype.bytes
        if size <= LARGEST_ROW or size + held[users[0]] <= LARGEST_TILE:
            loops[users[0]] = _with_buffer(loops[users[0]], buffer, row)
            held[users[0]] += size
            rows.append(row)
    return replace(arrangement, loops=tuple(loops), rows=frozenset(rows))


def _row_of(buffer: Buffer, loop: Loop) -> Buffer | None:
    """The buffer without the dimensions that stay the same at a point of the outer loops: their strides are 0. Every
    outer loop moves one of them, so that in the whole buffer each point would have a row of its own."""
    if loop.is_leaf:
        return None
    touching = [part for part in loop.statements() if any(each.buffer is buffer for each in accesses(part))]
    places = [each.index for part in touching for each in accesses(part) if each.buffer is buffer]
    if not all(isinstance(part, Store) for part in touching if buffer in written_by(part)):
        return None
    outer = set(loop.axes)
    fixed = [len(set(along)) == 1 and _moves_with(along[0], outer) for along in zip(*places, strict=True)]
    moved = {axis for place, stays in zip(places[0], fixed, strict=True) if stays for axis in free_axes(place)}
    if moved != outer:
        return None
    if any(extent.terms for extent, stays in zip(buffer.sizes, fixed, strict=True) if not stays):
        return None
    strides, step = [], constant(1)
    for extent, stays in zip(reversed(buffer.sizes), reversed(fixed), strict=True):
        strides.append(constant(0) if stays else step)
        step = step if stays else step * extent
    return Buffer(buffer.name, buffer.dtype, buffer.sizes, tuple(reversed(strides)))


def _moves_with(place: Index, axes: set[Axis]) -> bool:
    """Whether it depends on these axes alone: not on others, nor on what is in memory."""
    return free_axes(place) <= axes and not holds_data(place)


def row_length(row: Buffer) -> int:
    """Elements of a row."""
    return 1 + sum((e.constant - 1) * s.constant for e, s in zip(row.sizes, row.strides, strict=True))


def _with_buffer(loop: Loop, old: Buffer, new: Buffer) -> Loop:
    statements = (replace_buffers(statement, {old: new}) for statement in loop.statements())
    return Loop(loop.axes, _with_statements(loop.body, statements))


# ---- text


def _lines(loop: Loop) -> list[str]:
    lines: list[str] = []
    inside = ""
    if loop.axes:
        names = ", ".join(axis.name for axis in loop.axes)
        extents = ", ".join(str(axis.extent) for axis in loop.axes)
        lines, inside = [f"for {names} in box({extents}):"], "    "
    for part in loop.body:
        inner = _lines(part) if isinstance(part, Loop) else show(part).splitlines()
        lines += [inside + line for line in inner]
    return lines


def _by_name(buffer: Buffer) -> str:
    return buffer.name
