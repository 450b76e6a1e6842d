"""What is written to a local and never read after it is not computed.

    t = local(f32[8]); u = local(f32[8])
    for i in box(8):
        t[i] = exp(x[i])       ->      nothing, if nobody reads u
        u[i] = t[i] + f32(1.0)

Law: nests run in order, so a local is of use to a write only if the same nest or a later one reads it. A statement that
can raise stays.
"""

from __future__ import annotations

from ferrite.loops.access import read_by, written_by
from ferrite.loops.nodes import Buffer, FoldScan, Nest, Program, Scan, Statement
from ferrite.loops.rewrite import can_raise


def drop_dead_stores(program: Program) -> Program:
    local_buffers = frozenset(program.locals)
    if not local_buffers:
        return program
    read: set[Buffer] = set()
    kept: list[Nest] = []
    for nest in reversed(program.nests):
        body = _live(nest.body, local_buffers, read)
        if body:
            kept.append(nest if body == nest.body else Nest(nest.axes, body))
    nests = tuple(reversed(kept))
    used = read | {buffer for nest in nests for statement in nest.body for buffer in written_by(statement)}
    return Program(
        program.name,
        program.sizes,
        program.parameters,
        tuple(buffer for buffer in program.locals if buffer in used),
        nests,
    )


def _live(body: tuple[Statement, ...], local_buffers: frozenset[Buffer], read: set[Buffer]) -> tuple[Statement, ...]:
    """The statements that are of use. Their reads are entered, and may make others useful: later points of the nest
    read what earlier ones wrote, whatever the order of statements."""
    live: set[Statement] = set()
    grown = True
    while grown:
        grown = False
        for statement in reversed(body):
            if statement in live:
                continue
            if can_raise(statement) or any(b not in local_buffers or b in read for b in written_by(statement)):
                live.add(statement)
                read |= read_by(statement)
                grown = True
    return tuple(_without_dead_targets(statement, local_buffers, read) for statement in body if statement in live)


def _without_dead_targets(statement: Statement, local_buffers: frozenset[Buffer], read: set[Buffer]) -> Statement:
    """A scan keeps only the results that someone reads, and at least one."""
    if not isinstance(statement, (Scan, FoldScan)):
        return statement
    targets = tuple(
        None if target is None or (target[0] in local_buffers and target[0] not in read) else target
        for target in statement.targets
    )
    if targets == statement.targets or not any(targets):
        return statement
    if isinstance(statement, FoldScan):
        return FoldScan(statement.combine, statement.axis, targets, statement.values)
    return Scan(statement.operation, statement.axis, targets, statement.value)
