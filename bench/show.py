"""How a run of the A/B runner looks to people: progress while it works, a table when it is done.

Reads what `bench/compare.py` measured and changes nothing. Everything fits 100 columns.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Column as TableColumn
from rich.table import Table
from rich.text import Text

from bench.compare import Comparison, OpenWatch, Row, Watch

# --- while it works -----------------------------------------------------------------------------------------------


def watcher(console: Console) -> OpenWatch:
    """Progress for `compare` and `interleave`: a live line with a bar in a terminal, plain lines elsewhere."""

    @contextmanager
    def watch(title: str, steps: int) -> Iterator[Watch]:
        if not console.is_terminal:
            with _PlainWatch(console, steps) as plain:
                yield plain
            return
        doing = TextColumn("{task.description}", table_column=TableColumn(no_wrap=True, overflow="ellipsis"))
        columns = (doing, BarColumn(bar_width=16), TaskProgressColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            yield _LiveWatch(bar, bar.add_task(title, total=steps))

    return watch


class _LiveWatch(Watch):
    def __init__(self, bar: Progress, task: TaskID) -> None:
        self.bar = bar
        self.task = task

    def phase(self, text: str) -> None:
        self.bar.update(self.task, description=text)

    def failed(self, where: str, reason: str) -> None:
        self.bar.console.print(f"{where}: failed: {reason}", style="yellow", markup=False, highlight=False)

    def advance(self, steps: int) -> None:
        self.bar.advance(self.task, steps)


class _PlainWatch(Watch):
    """Lines instead of a bar: a log shows where a run stands, without control characters and without long silence."""

    SILENCE = 15.0  # seconds after which it says what it is busy with

    def __init__(self, console: Console, steps: int) -> None:
        self.console = console
        self.steps = steps
        self.done = 0
        self.begin = time.monotonic()
        self.last_line = self.begin
        self.current = ""
        self.over = threading.Event()

    def __enter__(self) -> _PlainWatch:
        threading.Thread(target=self._break_silence, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.over.set()

    def _break_silence(self) -> None:
        while not self.over.wait(1.0):
            if self.current and time.monotonic() - self.last_line > self.SILENCE:
                self.say(f"{self.current} ...")

    def phase(self, text: str) -> None:
        self.current = text

    def measured(self, where: str, metrics: Mapping[str, float]) -> None:
        told = (f"{name.replace('_', ' ')} {format_metric(name, value)}" for name, value in metrics.items())
        self.say(f"{where}: {', '.join(told)}")

    def failed(self, where: str, reason: str) -> None:
        self.say(f"{where}: failed: {reason}")

    def say(self, text: str) -> None:
        self.last_line = time.monotonic()
        elapsed = int(self.last_line - self.begin)
        where = f"[{elapsed // 60}:{elapsed % 60:02d}, {100 * self.done // max(1, self.steps)}%]"
        self.console.print(f"{where} {text}", markup=False, highlight=False, soft_wrap=True)

    def advance(self, steps: int) -> None:
        self.done += steps


def open_console() -> Console:
    """Where tables and progress go. A log file has no width of its own; the tables are made for 100 columns."""
    console = Console()
    return console if console.is_terminal else Console(width=100)


def stoppable(main: Callable[[], int]) -> int:
    """The exit status of `main`; Ctrl-C ends it (and its children) without a traceback."""
    try:
        return main()
    except KeyboardInterrupt:
        print("\nStopped; nothing was saved.")
        return 130


# --- tables -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """A column of the table: a metric, or its ratio to the baseline."""

    heading: str
    metric: str
    ratio: bool = False
    spread: bool = True


def format_seconds(seconds: float) -> str:
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= scale:
            return f"{_three_digits(seconds / scale)} {unit}"
    return f"{_three_digits(seconds / 1e-9)} ns"


def format_bytes(size: float) -> str:
    for scale, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(size) >= scale:
            return f"{_three_digits(size / scale)} {unit}"
    return f"{size:.0f} B"


def _three_digits(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}" if abs(value) < 100 else f"{value:.0f}"


def format_metric(metric: str, value: float) -> str:
    """A metric's name says its unit: `*_call` and `*_cpu` are seconds, `*_memory` bytes; `difference` is a share."""
    if metric.endswith(("_call", "_cpu")):
        return format_seconds(value)
    if metric.endswith("_memory"):
        return format_bytes(value)
    if metric == "difference":
        return f"within {value:.0e}" if value else "equal"
    return f"{value:.3g}"


def show(console: Console, comparison: Comparison, columns: Sequence[Column], *, who: str = "contender") -> None:
    """The table, and below it what its cells have no room for. `who` is the heading over the contenders."""
    console.print(table(comparison, columns, who))
    for note in notes(comparison):
        console.print(note, style="yellow", highlight=False, markup=False)


def table(comparison: Comparison, columns: Sequence[Column], who: str) -> Table:
    """One row a contender, grouped by case. A contender without numbers says so in place of the first one."""
    grid = Table(title=comparison.title, caption=caption(comparison, columns), title_justify="left")
    grid.caption_justify = "left"
    grid.add_column("model", no_wrap=True)
    grid.add_column(who, no_wrap=True)
    for column in columns:
        grid.add_column(column.heading, justify="right")
    for case, names in comparison.cases.items():
        for place, name in enumerate(names):
            row = comparison.row(case, name)
            cells = [cell(row, column) for column in columns]
            if row.trouble and not row.metrics:
                cells[0] = Text(comparison.missing.get((case, name), "failed (below)"), style="yellow")
            grid.add_row(Text(case if place == 0 else ""), Text(name), *cells, end_section=place == len(names) - 1)
    return grid


def caption(comparison: Comparison, columns: Sequence[Column]) -> str:
    """How it was measured, and how to read what stands behind a number."""
    if comparison.rounds > 1 and any(column.spread for column in columns):
        return f"{comparison.conditions}. ± and brackets: quartiles."
    return f"{comparison.conditions}."


def cell(row: Row, column: Column) -> Text:
    found = (row.ratios if column.ratio else row.metrics).get(column.metric)
    if found is None:
        return Text("")
    if column.ratio:
        text, extent = f"{found.median:.2f}x", f" ({found.low:.2f}-{found.high:.2f})"
    else:
        text = format_metric(column.metric, found.median)
        half = 50 * (found.high - found.low) / found.median if found.median else 0.0
        extent = f" ±{half:.0f}%"
    return Text(text + (extent if column.spread and found.count > 1 else ""))


def notes(comparison: Comparison) -> list[str]:
    """Failures, and whether the machine was busy with something else when the run began."""
    found = [
        f"{row.case}, {row.contender} {row.trouble}"
        for row in comparison.rows()
        if row.trouble and (row.case, row.contender) not in comparison.missing
    ]
    load, cores = comparison.machine["load"], comparison.machine["cores"]
    if load is not None and cores and load > 0.75 * cores:
        busy = f"The machine was busy when this began (load {load:.1f} on {cores} cores)"
        found.append(f"{busy}: trust the ratios more than the times.")
    return found
