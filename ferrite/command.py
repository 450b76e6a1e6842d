"""The command line: `ferrite cache [list | show KEY | verify | prune --megabytes N | clear] [--dir FOLDER]`.

Loads neither torch nor LLVM: it is meant to answer at once. Status 0: done; 1: what was asked for is not there, or
`verify` found damage; 2: the command is not understood, or the folder cannot be used.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ferrite import cache
from ferrite.errors import BrokenCache


def main(arguments: Sequence[str] | None = None) -> int:
    asked = _parser().parse_args(arguments)
    console = Console()
    if not console.is_terminal:
        console = Console(width=100)
    try:
        return int(asked.run(asked, console))
    except BrokenPipeError:  # whoever reads this has seen enough
        return 0
    except (BrokenCache, OSError, RuntimeError) as error:  # RuntimeError: of a variable that means nothing
        why = error.why or error.title if isinstance(error, BrokenCache) else error
        print(f"ferrite cache: {why}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    whole = argparse.ArgumentParser(prog="ferrite", description="Ferrite, a graph compiler for PyTorch.")
    tools = whole.add_subparsers(metavar="TOOL", required=True)
    tool = tools.add_parser("cache", help="compiled graphs on disk: list, show, verify, prune, clear")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--dir", metavar="FOLDER", default=argparse.SUPPRESS, help="another folder than the user's own")
    tool.add_argument("--dir", metavar="FOLDER", default=None, help="another folder than the user's own")
    tool.set_defaults(run=_list)
    verbs = tool.add_subparsers(metavar="VERB")
    verbs.add_parser("list", parents=[shared], help="what is stored, latest use first").set_defaults(run=_list)
    show = verbs.add_parser("show", parents=[shared], help="everything about one entry: its key, field by field")
    show.add_argument("key", metavar="KEY", help="the first letters of it")
    show.set_defaults(run=_show)
    verify = verbs.add_parser("verify", parents=[shared], help="read every file; what is damaged or of no use goes")
    verify.set_defaults(run=_verify)
    prune = verbs.add_parser("prune", parents=[shared], help="keep what was used last")
    prune.add_argument("--megabytes", metavar="N", type=_megabytes, required=True, help="up to so many")
    prune.set_defaults(run=_prune)
    verbs.add_parser("clear", parents=[shared], help="remove everything").set_defaults(run=_clear)
    return whole


def _megabytes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number from 0, given {text!r}")
    return value


def _list(asked: argparse.Namespace, console: Console) -> int:
    stored = cache.entries(asked.dir)
    folder = cache.folder_of(asked.dir)
    if not stored:
        _say(console, f"{folder}: nothing is stored")
        return 0
    table = Table(title=f"{folder}", title_justify="left", caption_justify="left", expand=True)
    table.caption = f"{len(stored)} entries, with machine code {_bytes(sum(entry.size for entry in stored))}"
    for heading in ("key", "used", "hits", "size", "kernels", "graphs"):
        table.add_column(heading, justify="left" if heading in ("key", "graphs") else "right", no_wrap=True)
    table.add_column("from", no_wrap=True, overflow="ellipsis", ratio=1)  # what the others leave
    for entry in stored:
        table.add_row(*map(Text, _cells(entry)))
    console.print(table)
    return 0


def _cells(entry: cache.Entry) -> tuple[str, ...]:
    size, graphs = _bytes(entry.size), ", ".join(entry.phases)
    return entry.name[:12], _ago(entry.used), str(entry.hits), size, str(entry.kernels), graphs, entry.hint


def _show(asked: argparse.Namespace, console: Console) -> int:
    found = [entry for entry in cache.entries(asked.dir) if entry.name.startswith(asked.key)]
    if not found:
        print(f"ferrite cache: no key in {cache.folder_of(asked.dir)} starts with {asked.key!r}", file=sys.stderr)
        return 1
    if len({entry.key for entry in found}) > 1:
        names = ", ".join(entry.name[:20] for entry in found)
        print(f"ferrite cache: several keys start with {asked.key!r}: {names}", file=sys.stderr)
        return 1
    for entry in found:
        _say(console, f"entry     {entry.name}")
        _say(console, f"from      {entry.hint}")
        _say(console, f"made      {_when(entry.made)}, in {entry.seconds:.2f} s of compiling")
        _say(console, f"used      {entry.hits} times, last {_when(entry.used)}")
        _say(console, f"size      {_bytes(entry.size)}, {entry.kernels} kernels in {', '.join(entry.phases)}")
        _say(console, f"sizes     {entry.guards or 'as in the key'}")
    for name, text in found[0].fields.items():
        _say(console, f"\n{name}")
        _say(console, "\n".join(f"    {line}" for line in text.splitlines()))
    return 0


def _verify(asked: argparse.Namespace, console: Console) -> int:
    verdict = cache.verify(asked.dir)
    for word, found in (("damaged", verdict.damaged), ("incomplete", verdict.incomplete), ("unused", verdict.unused)):
        for place, why in found.items():
            _say(console, f"{word}, removed: {place}: {why}")
    state = "sound" if verdict.is_sound else f"{len(verdict.damaged) + len(verdict.incomplete)} were not sound"
    _say(console, f"{verdict.files} files, {_bytes(verdict.bytes)}: {state}")
    return 0 if verdict.is_sound else 1


def _prune(asked: argparse.Namespace, console: Console) -> int:
    _say(console, f"{cache.prune(asked.megabytes, asked.dir)} files removed")
    return 0


def _clear(asked: argparse.Namespace, console: Console) -> int:
    _say(console, f"{cache.clear(asked.dir)} files removed")
    return 0


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _bytes(size: float) -> str:
    for scale, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size:.0f} B"


def _ago(when: float) -> str:
    seconds = max(time.time() - when, 0.0)
    for scale, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= scale:
            return f"{seconds / scale:.0f} {unit} ago"
    return "now"


def _when(when: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when))
