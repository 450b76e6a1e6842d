"""Which ops of real models are lowered to loops, and which run in eager?

    python -m bench.coverage                           # every model of the zoo, inference and training
    python -m bench.coverage --models bert resnet --ops 40

Counts the calls in the graphs after autograd. Library calls (`ferrite/lower/library.py`) are opaque by design and stand
apart; the share is of the rest. The exit status is 1 if the share is below `LIMIT`.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from bench.graphs import Captured, capture
from bench.zoo import ZOO
from ferrite.lower.graph import Rules, lower
from ferrite.lower.library import library_of

LIMIT = 0.97


@dataclass
class Coverage:
    """Counts over graphs: calls that became loops, calls of libraries, and gaps by (op, reason)."""

    lowered: int = 0
    library: Counter[str] = field(default_factory=Counter)
    gaps: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, graph: Captured) -> None:
        made = lower(graph.module, rules=Rules(use_rows=True))
        self.lowered += made.lowered
        for op, count in made.fallbacks.items():
            if library_of(op) is not None:
                self.library[op] += count
            else:
                self.gaps[op, made.reasons[op]] += count

    def merge(self, other: Coverage) -> None:
        self.lowered += other.lowered
        self.library += other.library
        self.gaps += other.gaps

    @property
    def share(self) -> float:
        """Of the calls that are not meant for a library, how many are lowered."""
        whole = self.lowered + self.gaps.total()
        return self.lowered / whole if whole else 1.0


def coverage_of(name: str) -> Coverage:
    """Over the inference and training graphs of one model."""
    coverage = Coverage()
    for training in (False, True):
        for graph in capture(ZOO[name], "small", training=training):
            coverage.add(graph)
    return coverage


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.coverage", description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=list(ZOO), choices=list(ZOO), metavar="NAME")
    parser.add_argument("--ops", type=int, default=25, help="how many gaps to list (default: 25)")
    wanted = parser.parse_args(arguments)
    console = Console()
    whole = Coverage()
    models = Table("model", "lowered", "library", "gaps", "share", title="calls after autograd", title_justify="left")
    with console.status("lowering") as status:
        for name in wanted.models:
            status.update(f"lowering {name}")
            one = coverage_of(name)
            whole.merge(one)
            models.add_row(
                name, str(one.lowered), str(one.library.total()), str(one.gaps.total()), f"{100 * one.share:.1f}%"
            )
    console.print(models)
    gaps = Table("op", "times", "why", title="ops that run in eager and are no library calls", title_justify="left")
    for (op, reason), count in whole.gaps.most_common(wanted.ops):
        gaps.add_row(op, str(count), reason)
    console.print(gaps)
    console.print(f"library calls: {', '.join(f'{op} {count}' for op, count in whole.library.most_common())}")
    console.print(
        f"{100 * whole.share:.2f}% of {whole.lowered + whole.gaps.total()} calls are lowered; aim {LIMIT:.0%}."
    )
    return 0 if whole.share >= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
