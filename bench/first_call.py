"""How long until the first result? Ferrite against `aot_eager`, the floor that does no backend work.

    python -m bench.first_call                                   # what `make bench` runs
    python -m bench.first_call --models bert --modes inference --rounds 7
    python -m bench.first_call --peer inductor --peer eager      # more contenders, same run

Every first call happens in a new process with empty caches; the contenders take turns within each round. The promise is
that Ferrite needs at most `LIMIT` times what `aot_eager` needs. The exit status is 1 if Ferrite gave no result, and
with `--enforce` also if the promise is broken. On a machine that is busy with other things, `--threads 1` is steadier.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from bench.compare import Case, Comparison, Plan, compare
from bench.measure import contender
from bench.show import Column, open_console, show, stoppable, watcher

MODELS = ("bert", "resnet", "gpt2")
MODES = ("inference", "training")
BASELINE = "aot_eager"
LIMIT = 1.15
BACKENDS = {BASELINE: BASELINE, "ferrite": "ferrite"}
PEERS = {"eager": None, "dynamo": "eager", "inductor": "inductor"}  # torch's backend "eager" is Dynamo alone


def make_case(model: str, mode: str, size: str, backends: Mapping[str, str | None]) -> Case:
    job = {"model": model, "mode": mode, "size": size}
    return Case(f"{model} {mode}", tuple(contender(name, backend, **job) for name, backend in backends.items()))


def verdict(comparison: Comparison, limit: float) -> tuple[bool, str]:
    """Is the promise kept on every model, and what to tell about it."""
    ratios = {
        row.case: row.ratios["first_call"].median
        for row in comparison.rows()
        if row.contender == "ferrite" and "first_call" in row.ratios
    }
    if not ratios:
        return False, "No ratio could be formed: Ferrite or aot_eager gave no result."
    worst = max(ratios, key=lambda case: ratios[case])
    missing = len(comparison.cases) - len(ratios)
    kept = ratios[worst] <= limit and not missing
    text = (
        f"Ferrite's first call takes at most {ratios[worst]:.2f}x the time of aot_eager ({worst}); the promise is "
        f"{limit:.2f}x: {'kept' if ratios[worst] <= limit else 'broken'}."
    )
    return kept, text + (f" {missing} of {len(comparison.cases)} cases have no ratio." if missing else "")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.first_call", description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), metavar="NAME", help="names of bench.zoo")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--size", default="real", choices=("small", "real"))
    parser.add_argument("--rounds", type=int, default=3, help="fresh processes for each contender (default: 3)")
    parser.add_argument("--threads", type=int, help="default: the contender's own choice")
    parser.add_argument("--cache", default="cold", choices=("cold", "warm"))
    parser.add_argument("--peer", action="append", default=[], choices=tuple(PEERS), help="may be given several times")
    parser.add_argument("--limit", type=float, default=LIMIT, help=f"the promised ratio (default: {LIMIT})")
    parser.add_argument("--enforce", action="store_true", help="exit with 1 if the promise is broken")
    parser.add_argument("--json", type=Path, help="where to write the numbers (default: a new file under results/)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    wanted = parse(arguments)
    console = open_console()
    backends = BACKENDS | {peer: PEERS[peer] for peer in wanted.peer}
    cases = [make_case(model, mode, wanted.size, backends) for model in wanted.models for mode in wanted.modes]
    plan = Plan(rounds=wanted.rounds, threads=wanted.threads, cache=wanted.cache)
    comparison = compare("First call", cases, baseline=BASELINE, plan=plan, progress=watcher(console))
    columns = [
        Column("first call", "first_call"),
        Column(f"ratio to {BASELINE}", "first_call", ratio=True),
        Column("ratio of cpu time", "first_call_cpu", ratio=True),
    ]
    show(console, comparison, columns, who="backend")
    kept, text = verdict(comparison, wanted.limit)
    console.print(text)
    console.print(f"All numbers: {comparison.save('first_call', wanted.json)}", soft_wrap=True)
    ran = all("first_call" in comparison.row(case, "ferrite").metrics for case in comparison.cases)
    return 0 if ran and (kept or not wanted.enforce) else 1


if __name__ == "__main__":
    sys.exit(stoppable(main))
