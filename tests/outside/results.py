"""What the tests of a module did: a JSON line for each, written as soon as the test is over."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec


class Result(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One test. `status`: pass, fail, skip, xfail, crash or hang; "apart" if it was not run, as its source says that it
    counts graphs. `graphs`: how many the replaced backend compiled; `counts`: the test counted graphs or looked at
    them; `reads_code`: it looked at generated code; `warnings`: of Ferrite's log, so what it left to eager."""

    test: str
    status: str
    seconds: float = 0.0
    graphs: int = 0
    counts: bool = False
    reads_code: bool = False
    message: str = ""
    warnings: tuple[str, ...] = ()

    @property
    def is_eligible(self) -> bool:
        """Of a result with `aot_eager`: whether the test is to be asked of Ferrite."""
        return self.status == "pass" and self.graphs > 0 and not self.counts and not self.reads_code

    @property
    def why(self) -> str:
        """The last line of what the test said."""
        return self.message.strip().splitlines()[-1] if self.message.strip() else ""


def read(path: Path) -> dict[str, Result]:
    """By the name of the test. A line that was cut short when a run was ended is left out."""
    found = {}
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            result = msgspec.json.decode(line, type=Result)
        except msgspec.DecodeError:
            continue
        found[result.test] = result
    return found


def write(path: Path, results: Iterable[Result]) -> None:
    path.write_bytes(b"".join(msgspec.json.encode(result) + b"\n" for result in results))
