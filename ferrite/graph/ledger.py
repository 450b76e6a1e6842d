"""What a pass did to one graph, place by place: the rewrites it made, and the candidates it left alone and why.

The runner opens a ledger for a graph before a pass runs and reads it afterwards; the pass writes into it through
`Soundness`. A ledger may allow only so many rewrites: that is how a wrong one is found by its number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch.fx import Graph

from ferrite.decisions import Decision


@dataclass
class Ledger:
    """`limit`: how many rewrites may be made; None: all of them. `explain`: nodes, or "all", for which patterns say why
    they do not fit. `facts`: what is known of the graph, handed on from pass to pass while it stays true. `options`: of
    the compile, for checks of patterns that ask for one by name."""

    name: str = "rewrite"
    limit: int | None = None
    explain: tuple[str, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    taken: int = 0
    decisions: list[Decision] = field(default_factory=list)

    @property
    def is_full(self) -> bool:
        return self.room() == 0

    def room(self, wanted: int = 1) -> int:
        """How many of so many rewrites may still be made."""
        return wanted if self.limit is None else max(0, min(wanted, self.limit - self.taken))

    def take(self, subjects: tuple[str, ...]) -> None:
        self.taken += 1
        self.decisions.append(Decision(self.name, subjects, True, f"rewrite {self.taken}"))

    def refuse(self, subjects: tuple[str, ...], reason: str) -> None:
        self.decisions.append(Decision(self.name, subjects, False, reason))


_open: WeakKeyDictionary[Graph, Ledger] = WeakKeyDictionary()


@contextmanager
def keep_ledger(
    graph: Graph,
    name: str,
    limit: int | None = None,
    explain: tuple[str, ...] = (),
    facts: dict[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Iterator[Ledger]:
    """The ledger of `graph` while a pass runs over it."""
    before = _open.get(graph)
    ledger = _open[graph] = Ledger(name, limit, explain, {} if facts is None else facts, options or {})
    try:
        yield ledger
    finally:
        if before is None:
            del _open[graph]
        else:
            _open[graph] = before


def ledger_of(graph: Graph) -> Ledger:
    """The ledger that is open for a graph, or a new one that nobody reads."""
    return _open.get(graph) or Ledger()
