"""How fast is a model once it is compiled? Ferrite and eager beside Inductor.

    python -m bench.steady                                       # what `make bench-models` runs: three CNNs and BERT
    python -m bench.steady --models convnext --modes training --rounds 3

Every contender has a process of its own with empty caches; steady calls are taken from all of them in turns. The ratio
is time by Inductor's: below 1 is faster. The exit status is 1 if Ferrite gave no result or a wrong one, and with
`--enforce` also if a model is slower than `LIMIT` times Inductor.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench.compare import Comparison, Plan, compare
from bench.first_call import MODES, make_case
from bench.show import Column, open_console, show, stoppable, watcher

MODELS = ("resnet", "mobilenet_v2", "convnext", "bert")
BACKENDS = {"inductor": "inductor", "ferrite": "ferrite", "eager": None}
BASELINE = "inductor"
LIMIT = 1.0
COLUMNS = (
    Column("steady call", "steady_call"),
    Column(f"ratio to {BASELINE}", "steady_call", ratio=True),
    Column("peak memory", "peak_memory"),
    Column("held", "held_memory"),
)


def verdict(comparison: Comparison, limit: float) -> tuple[bool, str]:
    """Whether no model is slower than promised, and a sentence for each that is."""
    ratios = {case: comparison.row(case, "ferrite").ratios.get("steady_call") for case in comparison.cases}
    slow = [f"{case} {ratio.median:.2f}x" for case, ratio in ratios.items() if ratio and ratio.median > limit]
    missing = [str(case) for case, ratio in ratios.items() if ratio is None]
    parts = [f"slower than Inductor: {', '.join(slow)}"] if slow else []
    parts += [f"without a ratio: {', '.join(missing)}"] if missing else []
    return not parts, "; ".join(parts) or "No model is slower than with Inductor."


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.steady", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), metavar="NAME", help="names of bench.zoo")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--size", default="real", choices=("small", "real"))
    parser.add_argument("--rounds", type=int, default=1, help="fresh processes for each contender (default: 1)")
    parser.add_argument("--turns", type=int, default=7, help="turns of steady calls in a round (default: 7)")
    parser.add_argument("--threads", type=int, help="default: the contender's own choice")
    parser.add_argument("--enforce", action="store_true", help="exit with 1 if a model is slower than with Inductor")
    parser.add_argument("--json", type=Path, help="where to write the numbers (default: a new file under results/)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    wanted = parse(arguments)
    console = open_console()
    cases = [make_case(model, mode, wanted.size, BACKENDS) for model in wanted.models for mode in wanted.modes]
    plan = Plan(rounds=wanted.rounds, turns=wanted.turns, threads=wanted.threads)
    comparison = compare("Steady calls", cases, baseline=BASELINE, plan=plan, progress=watcher(console))
    show(console, comparison, COLUMNS, who="backend")
    kept, text = verdict(comparison, LIMIT)
    console.print(text, highlight=False)
    console.print(f"All numbers: {comparison.save('steady', wanted.json)}", soft_wrap=True)
    ran = all("steady_call" in comparison.row(case, "ferrite").metrics for case in comparison.cases)
    return 0 if ran and (kept or not wanted.enforce) else 1


if __name__ == "__main__":
    sys.exit(stoppable(main))
