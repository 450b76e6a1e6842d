"""A record as tables for people."""

from __future__ import annotations

import io
from collections import Counter

from rich.console import Console
from rich.table import Table

from ferrite.report.record import GraphRecord, Record

MOST_SUBJECTS = 3  # of decisions that are alike


def render(record: Record, width: int = 100) -> str:
    """Plain text, the same for the same record but for the times in it."""
    console = Console(
        width=width, record=True, file=io.StringIO(), color_system=None, legacy_windows=False, markup=False, emoji=False
    )
    console.print(f"Ferrite, graph {record.graph_id}: {1e3 * record.seconds:.1f} ms in {len(record.graphs)} graph(s)")
    for entry in record.graphs:
        if entry.stages:
            console.print(stage_table(entry))
        if entry.peak_memory is not None or entry.changing_block:
            console.print(memory_line(entry))
        if entry.passes:
            console.print(pass_table(entry))
        if entry.fallbacks:
            console.print(fallback_table(entry))
        if entry.decisions:
            console.print(decision_table(entry))
    for failure in record.failures:
        console.print(f"fell back: {failure}")
    return console.export_text()


def stage_table(entry: GraphRecord) -> Table:
    table = Table(title=f"{entry.name}: {entry.nodes} nodes", title_justify="left")
    table.add_column("stage")
    table.add_column("ms", justify="right")
    for stage, seconds in entry.stages.items():
        table.add_row(stage, f"{1e3 * seconds:.2f}")
    return table


def memory_line(entry: GraphRecord) -> str:
    """How much a call needs beside its arguments, where that was planned."""
    if entry.peak_memory is None:
        return f"memory of a call: {entry.changing_block} bytes in the block, and what is outside it"
    return f"memory of a call: at most {entry.peak_memory:,} bytes, {entry.block_memory or 0:,} of them in the block"


def pass_table(entry: GraphRecord) -> Table:
    table = Table(title="passes", title_justify="left")
    for column in ("number", "stage", "pass", "graph", "changed", "ms", "note"):
        table.add_column(column, justify="right" if column in ("number", "changed", "ms") else "left")
    for run in entry.passes:
        number = "" if run.number is None else str(run.number)
        changed = "-" if run.changed is None else str(run.changed)
        table.add_row(number, run.stage, run.name, run.graph, changed, f"{1e3 * run.seconds:.2f}", run.note)
    return table


def fallback_table(entry: GraphRecord) -> Table:
    table = Table(title="ops that run in eager", title_justify="left")
    for column in ("op", "times", "why"):
        table.add_column(column, justify="right" if column == "times" else "left")
    for fallback in sorted(entry.fallbacks, key=lambda f: (-f.count, f.op)):
        table.add_row(fallback.op, str(fallback.count), fallback.reason)
    return table


def decision_table(entry: GraphRecord) -> Table:
    table = Table(title="decisions", title_justify="left")
    for column in ("what", "on", "taken", "reason", "times"):
        table.add_column(column)
    alike: dict[tuple[str, bool, str], Counter[str]] = {}
    for decision in entry.decisions:
        found = alike.setdefault((decision.what, decision.taken, decision.reason), Counter())
        found[", ".join(decision.subjects)] += 1
    for (what, taken, reason), found in alike.items():
        shown = [*found][:MOST_SUBJECTS]
        shown += [f"and {len(found) - MOST_SUBJECTS} more"] if len(found) > MOST_SUBJECTS else []
        table.add_row(what, "; ".join(shown), "yes" if taken else "no", reason, str(found.total()))
    return table
