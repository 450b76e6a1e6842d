"""The failures we accept, and why: `known_failures.json`.

One entry names cases by patterns (`cases.matches`: the fields of an id, `*` and commas allowed), what kind of
difference they show, and the reason. The rules keep the file honest:
- a listed case that fails in another kind than its entry says is a failure like any other;
- a listed case that passes is a failure too: remove it from the file;
- the file may only shrink (`test_conformance.py` holds the ceilings).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path

import msgspec

from .cases import FORMS, MODES, SHAPES, Case, matches
from .check import Verdict

FILE = Path(__file__).with_name("known_failures.json")


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Cases that fail for one reason. `kinds` are the kinds of difference (`Verdict.kind`) they show."""

    cases: tuple[str, ...]
    kinds: tuple[str, ...]
    reason: str

    def names(self, case: Case) -> bool:
        return any(matches(case, pattern) for pattern in self.cases)


class Known(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    entries: tuple[Entry, ...]

    def entry_for(self, case: Case) -> Entry | None:
        return next((entry for entry in self.entries if entry.names(case)), None)


def load(path: Path = FILE) -> Known:
    return msgspec.json.decode(path.read_bytes(), type=Known)


class Account(msgspec.Struct, frozen=True):
    """How a verdict stands against the list: pass, known, failure, or stale (listed, yet it passes)."""

    standing: str
    entry: Entry | None = None


def account(verdict: Verdict, known: Known) -> Account:
    entry = known.entry_for(Case.parse(verdict.id))
    if verdict.passed:
        return Account("pass") if entry is None else Account("stale", entry)
    if entry is not None and verdict.kind in entry.kinds:
        return Account("known", entry)
    return Account("failure", entry)


def patterns(cases: Iterable[Case]) -> list[str]:
    """Few patterns without `*` that name exactly these cases, all of one op: fields merged where the rest agrees."""
    rows = {(one.op, one.dtype, one.sample, one.shapes, one.mode, one.form) for one in cases}
    merged: dict[tuple[str, ...], None] = dict.fromkeys(sorted(rows))
    for field in (3, 4, 2, 1, 5):
        together: dict[tuple[str, ...], list[str]] = {}
        for row in merged:
            together.setdefault((*row[:field], *row[field + 1 :]), []).append(row[field])
        merged = dict.fromkeys(
            (*rest[:field], ",".join(sorted(values, key=_order)), *rest[field:]) for rest, values in together.items()
        )
    return ["|".join(row if row[5] != "function" else row[:5]) for row in merged]


def _order(value: str) -> tuple[int, int, str]:
    order = {name: place for place, name in enumerate(itertools.chain(SHAPES, MODES, FORMS))}
    digits = value[1:].split(",")[0]
    return (order.get(value, len(order)), int(digits) if digits.isdigit() else 0, value)
