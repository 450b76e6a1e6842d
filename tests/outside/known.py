"""The eligible tests that do not pass, and why: `known.json`.

An entry names tests of one module that fail for one reason. As with the conformance sweep, a listed test that passes is
a failure too: the entry goes.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

FILE = Path(__file__).with_name("known.json")


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    module: str
    tests: tuple[str, ...]
    reason: str


def load(path: Path = FILE) -> list[Entry]:
    return msgspec.json.decode(path.read_bytes(), type=list[Entry])


def reasons(entries: Iterable[Entry], module: str) -> dict[str, str]:
    """By the name of the test."""
    return {test: entry.reason for entry in entries if entry.module == module for test in entry.tests}
