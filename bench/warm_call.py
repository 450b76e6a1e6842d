"""How long until the first result of a process that finds its caches filled?

    python -m bench.warm_call                                # what `make bench-warm` runs
    python -m bench.warm_call --models bert --rounds 5

Every first call happens in a new process, with the caches that an earlier start of the same contender left; contenders
take turns within each round. `dynamo` is Dynamo alone: torch's backend "eager", which has nothing to compile.
`ferrite, no trace` also finds what Dynamo kept in its own store, which the user has to ask for (docs/cache.md). The
promises, for both: at most `LIMIT` times what Dynamo alone takes, and at most `SHARE` of Inductor's time. A start that
did not find everything in its caches (`cache_misses`) is no warm one, and breaks the promise that it was measured for.
The exit status is 1 if Ferrite gave no result, and with `--enforce` also if a promise is broken.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from bench.compare import Case, Comparison, Plan, compare
from bench.first_call import MODELS, MODES
from bench.measure import contender
from bench.show import Column, open_console, show, stoppable, watcher

BACKENDS = {"dynamo": "eager", "ferrite": "ferrite", "inductor": "inductor"}
NO_TRACE = "ferrite, no trace"
LIMIT = 1.25
SHARE = 0.3


def make_case(model: str, mode: str, size: str, *, inductor: bool) -> Case:
    job = {"model": model, "mode": mode, "size": size}
    names = [name for name in BACKENDS if inductor or name != "inductor"]
    contenders = [contender(name, BACKENDS[name], **job) for name in names]
    return Case(f"{model} {mode}", (*contenders, contender(NO_TRACE, "ferrite", **job, keeps_trace=True)))


def verdict(comparison: Comparison) -> tuple[bool, str]:
    """Are both promises kept on every model, with the trace and without, and what to tell about them. Ratios are those
    of starts in the same round; the median of them counts."""
    lines, kept = [], True
    for case in comparison.cases:
        cold = {name for name in (*BACKENDS, NO_TRACE) if _missed(comparison, case, name)}
        for name in ("ferrite", NO_TRACE):
            told = []
            for peer, promise in (("dynamo", LIMIT), ("inductor", SHARE)):
                ratio = replace(comparison, baseline=peer).row(case, name).ratios.get("first_call")
                is_kept = ratio is not None and ratio.median <= promise and not cold & {name, peer}
                told.append(
                    f"no ratio to {peer}: broken"
                    if ratio is None
                    else f"{ratio.median:.2f}x of {peer} (promise {promise}: {'kept' if is_kept else 'broken'})"
                )
                kept = kept and is_kept
            lines.append(f"{case}, {name}: {'; '.join(told)}")
        lines += [f"{case}, {name}: not everything was found in its caches" for name in sorted(cold)]
    return kept, "\n".join(lines)


def _missed(comparison: Comparison, case: str, name: str) -> bool:
    """Whether a start that was measured had to compile something."""
    return any(
        (sample.case, sample.contender) == (case, name) and sample.metrics.get("cache_misses", 0.0) > 0
        for sample in comparison.samples
    )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.warm_call", description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), metavar="NAME", help="names of bench.zoo")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--size", default="real", choices=("small", "real"))
    parser.add_argument("--rounds", type=int, default=5, help="fresh processes for each contender (default: 5)")
    parser.add_argument("--no-inductor", action="store_true", help="its caches take minutes to fill")
    parser.add_argument("--threads", type=int, help="default: the contender's own choice")
    parser.add_argument("--enforce", action="store_true", help="exit with 1 if a promise is broken")
    parser.add_argument("--json", type=Path, help="where to write the numbers (default: a new file under results/)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    wanted = parse(arguments)
    console = open_console()
    cases = [
        make_case(model, mode, wanted.size, inductor=not wanted.no_inductor)
        for model in wanted.models
        for mode in wanted.modes
    ]
    plan = Plan(rounds=wanted.rounds, threads=wanted.threads, cache="warm")
    comparison = compare("Warm first call", cases, baseline="dynamo", plan=plan, progress=watcher(console))
    columns = [
        Column("first call", "first_call"),
        Column("ratio to dynamo", "first_call", ratio=True),
        Column("ratio of cpu time", "first_call_cpu", ratio=True),
    ]
    show(console, comparison, columns, who="backend")
    kept, text = verdict(comparison)
    console.print(text)
    console.print(f"All numbers: {comparison.save('warm_call', wanted.json)}", soft_wrap=True)
    ran = all("first_call" in comparison.row(case, "ferrite").metrics for case in comparison.cases)
    return 0 if ran and (kept or not wanted.enforce) else 1


if __name__ == "__main__":
    sys.exit(stoppable(main))
