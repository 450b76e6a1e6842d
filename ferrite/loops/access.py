"""Which memory statements read and write, and where."""

from __future__ import annotations

from dataclasses import dataclass

from ferrite.loops.index import Axis, Index, keep
from ferrite.loops.nodes import Accumulate, Buffer, FoldScan, Load, Scan, Statement, Store
from ferrite.loops.rewrite import walk


@dataclass(frozen=True, slots=True)
class Access:
    """One place of a statement that touches a buffer. Accumulating reads and writes there; it counts as writing."""

    buffer: Buffer
    index: tuple[Index, ...]
    writes: bool


def accesses(statement: Statement) -> tuple[Access, ...]:
    """Every access of a statement: loads, those inside of reductions and indices included, then what it writes."""
    try:
        return statement._accesses
    except AttributeError:
        loads = [Access(node.buffer, node.index, False) for node in walk(statement) if isinstance(node, Load)]
        keep(statement, "_accesses", (*loads, *_writes(statement)))
        return statement._accesses


def _writes(statement: Statement) -> tuple[Access, ...]:
    match statement:
        case Store(buffer=buffer, index=index) | Accumulate(buffer=buffer, index=index):
            return (Access(buffer, index, True),)
        case Scan(targets=targets) | FoldScan(targets=targets):
            return tuple(Access(*target, True) for target in targets if target is not None)
    return ()


def written_by(statement: Statement) -> tuple[Buffer, ...]:
    return tuple(access.buffer for access in _writes(statement))


def read_by(statement: Statement) -> set[Buffer]:
    """What is in memory before matters to it there."""
    found = {access.buffer for access in accesses(statement) if not access.writes}
    return found | {statement.buffer} if isinstance(statement, Accumulate) else found


def axis_at(place: Index) -> Axis | None:
    """The axis that an index is, if it is nothing but an axis."""
    if place.constant or len(place.terms) != 1:
        return None
    ((coefficient, monomial),) = place.terms
    if coefficient != 1 or len(monomial) != 1:
        return None
    (atom,) = monomial
    return atom if isinstance(atom, Axis) else None
