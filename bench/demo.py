"""Ferrite in one table: a transformer and a CNN, compiled and run beside eager and Inductor.

    python -m bench.demo                 # what `make demo` runs; a few minutes on two cores

Each contender has a process of its own with empty caches. Steady calls are taken from all of them in turns, so what
else the machine does meanwhile hits everyone alike. Inductor takes part if there is a C++ compiler. The sentences below
the table are computed from its numbers, whoever they favour.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench.compare import Case, Comparison, Plan, Spread, compare
from bench.measure import contender
from bench.show import Column, format_seconds, open_console, show, stoppable, watcher

MODELS = {"bert": "BERT (4 layers)", "resnet": "ResNet-50"}
CONTENDERS = {"eager": None, "Inductor": "inductor", "Ferrite": "ferrite"}
SAME = 0.05  # ratios this close to 1 are called the same: finer steps need more repeats than a demo has

COLUMNS = (
    Column("first call", "first_call", spread=False),
    Column("steady call", "steady_call", spread=False),
    Column("vs eager", "steady_call", ratio=True, spread=False),
    Column("peak memory", "peak_memory", spread=False),
    Column("answer", "difference", spread=False),
)


def sentences(comparison: Comparison) -> list[str]:
    """What the table shows, in words."""
    found = [
        first_call_sentence(comparison),
        steady_sentence(comparison),
        memory_sentence(comparison),
        answer_sentence(comparison),
    ]
    return [sentence for sentence in found if sentence]


def first_call_sentence(comparison: Comparison) -> str:
    parts, absent = [], ""
    for case in comparison.cases:
        ours, theirs = comparison.row(case, "Ferrite"), comparison.row(case, "Inductor")
        if "first_call" not in ours.metrics:
            continue
        seconds = ours.metrics["first_call"].median
        relation = ""
        if "first_call" in theirs.metrics:
            sooner = theirs.metrics["first_call"].median / seconds
            relation = f", {sooner:.1f}x sooner" if sooner >= 1 else f", {1 / sooner:.1f}x later"
            relation += " than by Inductor"
        else:
            absent = f" Inductor could not run here: {theirs.trouble}."
        parts.append(f"{case} in {format_seconds(seconds)}{relation}")
    return f"First result by Ferrite: {'; '.join(parts)}.{absent}" if parts else ""


def steady_sentence(comparison: Comparison) -> str:
    ratios = {case: comparison.row(case, "Ferrite").ratios.get("steady_call") for case in comparison.cases}
    parts = [f"{case} {describe_ratio(ratio)}" for case, ratio in ratios.items() if ratio]
    return f"Once compiled, next to eager: {'; '.join(parts)}." if parts else ""


def describe_ratio(ratio: Spread) -> str:
    """Faster or slower only where at least three quarters of the pairs say so."""
    if ratio.high < 1 - SAME:
        return f"is faster ({ratio.median:.2f}x the time)"
    if ratio.low > 1 + SAME:
        return f"is slower ({ratio.median:.2f}x the time)"
    if ratio.low >= 1 - SAME and ratio.high <= 1 + SAME:
        return f"takes the same time ({ratio.median:.2f}x)"
    return f"shows no clear difference (half of the pairs lie between {ratio.low:.2f}x and {ratio.high:.2f}x the time)"


def memory_sentence(comparison: Comparison) -> str:
    ratios = {case: comparison.row(case, "Ferrite").ratios.get("peak_memory") for case in comparison.cases}
    parts = [f"{ratio.median:.2f}x on {case}" for case, ratio in ratios.items() if ratio]
    return f"Peak memory of a call, next to eager: {', '.join(parts)}." if parts else ""


def answer_sentence(comparison: Comparison) -> str:
    """The runner fails a contender whose answer is off, so what has a difference agrees."""
    distances = [row.metrics["difference"].median for row in comparison.rows() if "difference" in row.metrics]
    if not distances:
        return "No compiled answer could be compared with eager's."
    who = "All" if not any(row.trouble.startswith("failed") for row in comparison.rows()) else "The other"
    if max(distances) == 0:
        return f"{who} compiled answers equal eager's bit for bit."
    return f"{who} compiled answers agree with eager's, within {max(distances):.1g} of the largest element."


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.demo", description=__doc__.split("\n")[0])
    parser.add_argument("--size", default="real", choices=("small", "real"))
    parser.add_argument("--rounds", type=int, default=1, help="fresh processes for each contender (default: 1)")
    parser.add_argument("--turns", type=int, default=7, help="turns of steady calls in a round (default: 7)")
    parser.add_argument("--json", type=Path, help="where to write the numbers (default: a new file under results/)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    wanted = parse(arguments)
    console = open_console()
    cases = [
        Case(
            title if wanted.size == "real" else f"{model} (small)",
            tuple(contender(name, backend, model=model, size=wanted.size) for name, backend in CONTENDERS.items()),
        )
        for model, title in MODELS.items()
    ]
    plan = Plan(rounds=wanted.rounds, turns=wanted.turns)
    names = " and ".join(case.name for case in cases)
    console.print(f"{names}: float32 inference in eager, by Inductor and by Ferrite.", highlight=False)
    comparison = compare("Ferrite demo", cases, baseline="eager", plan=plan, progress=watcher(console))
    show(console, comparison, COLUMNS, who="backend")
    for sentence in sentences(comparison):
        console.print(sentence, highlight=False)
    console.print(f"All numbers: {comparison.save('demo', wanted.json)}", highlight=False, soft_wrap=True)
    ours = [comparison.row(case, "Ferrite") for case in comparison.cases]
    return 1 if any(row.trouble for row in ours) else 0


if __name__ == "__main__":
    sys.exit(stoppable(main))
