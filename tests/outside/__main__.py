"""The command `python -m tests.outside`: PyTorch's own tests with Ferrite as the backend. `--help` lists options."""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.util import find_spec

from rich.console import Console
from rich.table import Table

from . import known as known_failures
from .modules import MODULES
from .results import Result
from .run import KEEP, NEEDED, RESULTS, Run
from .source import VARIABLE, default_folder, fetch, find, named, root_below


@dataclass(frozen=True)
class Score:
    """One module: what its eligible tests did. `known`: reasons by test, of those that were run."""

    module: str
    tests: int
    eligible: int
    results: dict[str, Result]
    known: dict[str, str]
    trouble: str = ""  # why it was not run

    @property
    def passed(self) -> list[Result]:
        return [result for result in self.results.values() if result.status == "pass"]

    @property
    def explained(self) -> list[Result]:
        return [one for one in self.results.values() if one.status != "pass" and one.test in self.known]

    @property
    def failed(self) -> list[Result]:
        return [one for one in self.results.values() if one.status != "pass" and one.test not in self.known]

    @property
    def stale(self) -> list[Result]:
        return [result for result in self.passed if result.test in self.known]

    @property
    def left_to_eager(self) -> list[Result]:
        return [result for result in self.results.values() if result.warnings]

    @property
    def clean(self) -> bool:
        return not (self.failed or self.stale or self.trouble)


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tests.outside", description=__doc__)
    parser.add_argument("--root", metavar="FOLDER", help=f"the source of PyTorch (${VARIABLE})")
    parser.add_argument(
        "--fetch", action="store_true", help=f"get it from Debian if it is not there, into --root or {default_folder()}"
    )
    parser.add_argument("--modules", default="*", metavar="PATTERNS", help="e.g. 'dynamo/*,inductor/test_foreach'")
    parser.add_argument("--tests", default="*", metavar="PATTERN", help="of Class.method")
    parser.add_argument("--sample", type=int, default=1, metavar="N", help="every Nth eligible test of a module")
    parser.add_argument("--backend", default="ferrite", metavar="NAME")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="modules at a time")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="of processor time that a test may take (%(default)s)"
    )
    parser.add_argument("--alone", action="store_true", help="each test in a process of its own")
    parser.add_argument("--fresh", action="store_true", help="measure again which tests are eligible")
    parser.add_argument(
        "--keep", choices=KEEP, default="none", help="results of the run before that stand; other tests are run"
    )
    parser.add_argument("--details", action="store_true", help="what each failing test said, in full")
    parser.add_argument("--markdown", action="store_true", help="the table as docs/conformance.md has it")
    return parser.parse_args(words)


def choose(patterns: str) -> list[str]:
    chosen = [module for module in MODULES if any(fnmatchcase(module, one) for one in patterns.split(","))]
    if not chosen:
        raise SystemExit(f"no module is named {patterns}: they are {', '.join(MODULES)}")
    return chosen


def score(run: Run, module: str, arguments: argparse.Namespace, entries: list[known_failures.Entry]) -> Score:
    try:
        base = run.base(module, arguments.fresh)
        eligible = [name for name, result in base.items() if result.is_eligible]
        chosen = [name for name in eligible if fnmatchcase(name, arguments.tests)][:: arguments.sample]
        results = run.with_backend(module, arguments.backend, chosen) if chosen else {}
    except RuntimeError as error:
        return Score(module, 0, 0, {}, {}, str(error))
    return Score(module, len(base), len(eligible), results, known_failures.reasons(entries, module))


HEADINGS = ("module", "tests", "eligible", "run", "passed", "known", "failed", "warned")


def _row(scores: list[Score], title: str) -> tuple[str, ...]:
    lists = [[s.results for s in scores], [s.passed for s in scores], [s.explained for s in scores],
             [s.failed for s in scores], [s.left_to_eager for s in scores]]  # fmt: skip
    counts = [sum(map(len, found)) for found in lists]
    return tuple(map(str, (title, sum(s.tests for s in scores), sum(s.eligible for s in scores), *counts)))


def show(scores: list[Score], console: Console, details: bool) -> None:
    table = Table()
    for heading in HEADINGS:
        table.add_column(heading, no_wrap=True, justify="left" if heading == "module" else "right")
    for one in scores:
        table.add_row(*_row([one], one.module), style="" if one.clean else "red")
    table.add_section()
    table.add_row(*_row(scores, "all"))
    console.print(table)
    for one in scores:
        if one.trouble:
            console.print(one.trouble, style="red", markup=False)
        for result in one.explained:
            console.print(f"known   {one.module} {result.test}: {one.known[result.test]}", markup=False)
        for result in one.left_to_eager:
            console.print(f"warned  {one.module} {result.test}: {result.warnings[0].splitlines()[0]}", markup=False)
        for result in one.stale:
            console.print(f"listed in known.json, yet it passes: {one.module} {result.test}", style="red", markup=False)
        for result in one.failed:
            told = result.message if details else result.why
            console.print(f"{result.status}    {one.module} {result.test}: {told}", style="red", markup=False)


def show_markdown(scores: list[Score], console: Console) -> None:
    """The table, and below it why the known tests do not pass, a line for each reason of a module."""

    def write(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    rows = [HEADINGS, ("---",) + ("---:",) * (len(HEADINGS) - 1), *(_row([one], f"`{one.module}`") for one in scores)]
    for row in (*rows, _row(scores, "all")):
        write(f"| {' | '.join(row)} |")
    write("")
    for one in scores:
        tests: dict[str, list[str]] = {}
        for result in one.explained:
            tests.setdefault(one.known[result.test], []).append(result.test.partition(".")[2])
        for reason, names in tests.items():
            write(f"- `{one.module}`, {', '.join(f'`{name}`' for name in names)}: {reason}")


def main(words: list[str] | None = None) -> int:
    arguments = parse_arguments(words)
    console = Console()
    folder = named(arguments.root)
    if arguments.fetch and root_below(folder) is None:
        fetch(folder)
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise SystemExit(f"PyTorch's tests need {', '.join(missing)}: pip install -e '.[outside]'")
    run = Run(find(folder), arguments.seconds, arguments.alone, arguments.keep)
    entries = known_failures.load()
    scores = []
    with ThreadPoolExecutor(arguments.jobs) as pool:
        chosen = choose(arguments.modules)
        for one in pool.map(lambda module: score(run, module, arguments, entries), chosen):
            scores.append(one)
            if len(chosen) > 1:
                console.print(f"{one.module}: {len(one.passed)} of {len(one.results)} pass", highlight=False)
    (show_markdown(scores, console) if arguments.markdown else show(scores, console, arguments.details))
    console.print(f"results: {os.path.relpath(RESULTS)}")
    return 0 if all(one.clean for one in scores) else 1


if __name__ == "__main__":
    sys.exit(main())
