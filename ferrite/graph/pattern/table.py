"""Many patterns over one graph, found by the op that they end in.

Nodes are visited from last to first; at a node, patterns are tried in the order of registration, those that were put in
front first, until the node is gone. One pass over the graph: whoever wants a fixed point calls again.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch._ops import OpOverload
from torch.fx import Graph, Node

from ferrite.graph.arguments import find, kind
from ferrite.graph.ledger import ledger_of
from ferrite.graph.pattern.check import Check, objection
from ferrite.graph.pattern.match import Match, find_match
from ferrite.graph.pattern.nodes import Op, Several, ends_of
from ferrite.graph.pattern.regions import Regions
from ferrite.graph.pattern.text import show_pattern

log = logging.getLogger(__name__)

Act = Callable[[Match], "bool | str | None"]
Explain = Callable[[str, str, str], None]  # the pattern, the node, and why it does not fit


@dataclass(frozen=True)
class Entry:
    """A pattern with what is done when it is found; `act` may say False, or in a text why not: then it was not."""

    name: str
    pattern: Op | Several
    act: Act
    check: Check | None = None
    order: int = 0


@dataclass
class PatternTable:
    """Patterns that are looked for together. `counts` says how often each was applied since the table was made."""

    entries: list[Entry] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    _by_target: dict[Any, list[Entry]] = field(default_factory=dict)

    def add(
        self,
        name: str,
        pattern: Op | Several,
        act: Act,
        *,
        check: Check | None = None,
        first: bool = False,
        skip_duplicates: bool = False,
        also: str = "",
    ) -> None:
        """Register a pattern, in front of all others with `first`. One that is there already is an error, unless it may
        be skipped; `also` tells apart patterns whose texts are equal."""
        text = show_pattern(pattern) + also
        if text in self._texts:
            if skip_duplicates:
                return
            raise ValueError(f"the pattern {name} is registered already, as {self._texts[text]}:\n{text}")
        self._texts[text] = name
        orders = [entry.order for entry in self.entries]
        order = min(orders, default=0) - 1 if first else max(orders, default=0) + 1
        entry = Entry(name, pattern, act, check, order)
        self.entries.append(entry)
        for key in _keys(ends_of(pattern)[0]):
            self._by_target.setdefault(key, []).append(entry)

    def __post_init__(self) -> None:
        self._texts: dict[str, str] = {}

    def candidates(self, node: Node) -> list[Entry]:
        if not node.op.startswith("call"):
            return []
        found = [*self._by_target.get(node.target, ()), *self._by_target.get(("kind", kind(node)), ())]
        return sorted(found, key=lambda entry: entry.order) if len(found) > 1 else found

    def apply(self, graph: Graph, explain: Explain | None = None) -> int:
        """Look for every pattern once; gives how many were applied."""
        if not any(may_stand_in(graph, entry.pattern) for entry in self.entries):
            return 0
        regions, applied = Regions(graph), 0
        ledger = ledger_of(graph)
        explain = explain or (_to_log(ledger.explain) if ledger.explain else None)
        for node in reversed(list(graph.nodes)):
            for entry in self.candidates(node):
                if node._erased or ledger.is_full:
                    break
                before = ledger.taken
                reason = self._try(entry, node, regions, explain)
                if reason is None:
                    if ledger.taken == before:  # what goes through `Soundness` is counted there
                        ledger.take((node.name,))
                    applied += 1
                    self.counts[entry.name] += 1
                    regions.forget()
                elif explain is not None:
                    explain(entry.name, node.name, reason)
        return applied

    def _try(self, entry: Entry, node: Node, regions: Regions, explain: Explain | None) -> str | None:
        """Apply one pattern at one node; gives why not, or None if it was done."""
        heard: list[tuple[str, Callable[[], str]]] = []
        note = (lambda where, text: heard.append((where, text))) if explain is not None else None
        match = find_match(entry.pattern, node, note)
        if match is None:
            return f"{heard[-1][0]}: {heard[-1][1]()}" if heard else "does not fit"
        if regions.reach_across(match.nodes):
            return "reaches across a write, a switch of mode or a stream"
        answer = objection(entry.check, match) or entry.act(match)
        if isinstance(answer, str):
            ledger_of(node.graph).refuse((node.name,), answer)
            return answer
        return "was found and left alone" if answer is False else None


def may_stand_in(graph: Graph, pattern: Op | Several) -> bool:
    """Whether a graph has a call that a search for the pattern would look at. FX keeps calls by what they call: that
    index serves all patterns, and no node is visited."""
    calls = graph._find_nodes_lookup_table.table
    keys = list(_keys(ends_of(pattern)[0]))
    kinds = [key[1] for key in keys if isinstance(key, tuple)]
    return any(calls.get(("call_function", key)) for key in keys) or (bool(kinds) and bool(find(graph, *kinds)))


def _to_log(names: tuple[str, ...]) -> Explain:
    def explain(pattern: str, node: str, reason: str) -> None:
        if "all" in names or node in names:
            log.warning("Ferrite's pattern %s does not fit at %s: %s", pattern, node, reason)

    return explain


def _keys(end: Op) -> Iterable[Any]:
    for target in end.ops:
        if isinstance(target, str):
            yield ("kind", target)
        elif hasattr(target, "overloads") and not isinstance(target, OpOverload):
            yield from (getattr(target, name) for name in target.overloads())
        else:
            yield target
