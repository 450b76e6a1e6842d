"""The ways in which Ferrite fails, by who can act on it.

`Unsupported`: we cannot do it yet; the part runs in eager and the record says so.
`Malformed`:   our own bug; names the stage or pass and shows the program around the spot.
`ToolFailed`:  LLVM, the linker or the disk failed; keeps what was run.
`UserFault`:   something that the user registered is wrong; names it, and is always raised.

At the border to PyTorch what is raised is wrapped into `FerriteError` (`failure.py`). An exception of any type carries
its place there: the stage, and the op and the user's line as far as the code around it knows them (`within`).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any


class CompileFault(Exception):
    """What all kinds share: a title, and lines that say where, why and what happens then."""

    def __init__(self, title: str, *, at: str | None = None, why: str | None = None, then: str | None = None) -> None:
        self.title = title
        self.at = at
        self.why = why
        self.then = then
        lines = [title]
        for label, text in (("at", at), ("why", why), ("then", then)):
            if text:
                lines.append(f"  {label:<5} {text}")
        super().__init__("\n".join(lines))


class Unsupported(CompileFault):
    """A program that we cannot compile yet. The part that needs it runs in eager."""


class Malformed(CompileFault):
    """A program that breaks an invariant: a bug in the pass or stage that it names."""

    def __init__(self, title: str, *, where: str, program: str | None = None, why: str | None = None) -> None:
        self.where = where
        self.program = program
        super().__init__(title if program is None else f"{title}\n{program}", at=where, why=why)


class ToolFailed(CompileFault):
    """A tool outside Ferrite (LLVM, the loader, the disk) failed on what we gave it."""

    def __init__(self, title: str, *, ran: str, why: str | None = None, then: str | None = None) -> None:
        self.ran = ran
        super().__init__(title, at=ran, why=why, then=then)


class BrokenCache(ToolFailed):
    """The folder of the cache cannot be used, and the user asked to hear of it: always raised."""


class UserFault(CompileFault):
    """A pass or pattern that the user registered does not work, or cannot be placed."""


def unknown(kind: str, name: str, valid: Iterable[str]) -> str:
    """The text of an error about a name: what there is instead, the nearest first."""
    valid = sorted(set(valid))
    nearest = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    return f"Unknown Ferrite {kind} {name!r}.{hint} Valid ones: {', '.join(valid)}"


class within:
    """`with within(place, node)`: what `place(node)` says, as {"op": ..., "line": ...}, is noted of an exception that
    leaves the block, and asked for only then. What was noted nearer to the origin stays."""

    def __init__(self, place: Callable[..., Mapping[str, str]], *arguments: Any) -> None:
        self._place, self._arguments = place, arguments

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception):
            noted = place_of(error)
            vars(error)["ferrite_place"] = {**self._place(*self._arguments), **noted}


def place_of(error: BaseException) -> dict[str, str]:
    """What is known of where an exception came from: "stage", "kernel", "op", "line"."""
    return dict(vars(error).get("ferrite_place", ()))


def take_place(error: BaseException) -> str:
    """The same as a text, or nothing. The exception forgets it: the same object may be raised again elsewhere."""
    return show_place(vars(error).pop("ferrite_place", {}))


def show_place(place: Mapping[str, str]) -> str:
    known = [f"{name} {place[name]}" for name in ("stage", "kernel", "op") if place.get(name)]
    known += [f"at {place['line']}"] if place.get("line") else []
    return ", ".join(known)
