"""The command `python -m tests.fuzz`: random programs, each difference shrunk and printed as a script.

    python -m tests.fuzz --programs 3000 --seed 7                    through torch.compile, against eager
    python -m tests.fuzz --programs 10000 --seed 7 --level pre_grad  through the passes before autograd, against eager
    python -m tests.fuzz --programs 20000 --seed 7 --level loops     loop programs, machine code against the oracle
    python -m tests.fuzz --programs 3000 --seed 7 --level assumed    sizes that only a run knows, broken assumptions
    python -m tests.fuzz --seed 7 --only 412                         one program, printed, with all engines
    python -m tests.fuzz --first 500 --programs 500 --seed 7         a range of them; docs/conformance.md
    python -m tests.stacks --programs 3000 --seed 7                  stacks of modules; `--level stacks` by another name

Programs run in worker processes that are replaced now and then, so that a crash or a hang of compiled code costs one
program. Ends with status 1 if there was a difference, or a pass found nothing to do in many programs.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

from rich.console import Console

from ferrite.loops.text import show
from tests.ops.sweep import quiet

from . import assumed, pre_grad
from .engines import TORCH, UNLOWERED
from .judge import Judge
from .loops import check_all_ways
from .programs import reproducer
from .run import TASKS, Plan, counted_passes, engines, idle_passes, program_of, run, task_size


def show_one(plan: Plan, number: int, console: Console) -> bool:
    """One program in this process: its script, and what each engine makes of it."""
    quiet()
    if plan.level == "loops":
        subject, difference = check_all_ways(plan.seed, number)
        console.print(difference or show(subject.program), highlight=False, markup=False, soft_wrap=True)
        return not difference
    if plan.level == "assumed":
        made = assumed.generate(plan.seed, number)
        found = assumed.difference(made)
        console.print(f"{made.script()}\n{found or 'equal'}", highlight=False, markup=False, soft_wrap=True)
        return not found
    if plan.level == "stacks":
        from tests.stacks.report import show_stack

        return show_stack(plan.seed, number, console)
    program, chosen = program_of(plan, number), [engines(plan.level)[name] for name in plan.engines]
    first = chosen[0]
    console.print(
        reproducer(program, first.options, backend=first.backend), highlight=False, markup=False, soft_wrap=True
    )
    judge = Judge(program)
    passed = True
    for engine in chosen if plan.level == "pre_grad" else (*chosen, UNLOWERED, TORCH):
        verdict = pre_grad.judge(program, engine) if plan.level == "pre_grad" else judge.verdict(engine)
        passed &= verdict.status != "different" or engine is TORCH
        console.print(f"{engine.name}: {verdict.status} {verdict.text}", highlight=False, markup=False, soft_wrap=True)
    return passed


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m tests.fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--programs", type=int, default=300, metavar="N")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="first program, or batch of loops")
    parser.add_argument("--only", type=int, metavar="N", help="one program, in this process")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--level", choices=tuple(TASKS), default="torch")
    parser.add_argument("--engines", metavar="LIST", help="of the level; all, if none is named")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="worker processes")
    parser.add_argument("--shrink", type=float, default=60.0, metavar="SECONDS", help="for each difference")
    parser.add_argument("--minutes", type=float, default=1e6, help="start no program after this time")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    arguments = parse_arguments(words)
    console = Console()
    names = tuple(arguments.engines.split(",")) if arguments.engines else tuple(engines(arguments.level))
    plan = Plan(arguments.level, arguments.seed, names, arguments.shrink)
    if arguments.only is not None:
        return 0 if show_one(plan, arguments.only, console) else 1
    size = task_size(plan.level)
    numbers = list(range(arguments.first, arguments.first + -(-arguments.programs // size)))
    began = time.monotonic()
    found = run(plan, numbers, size, arguments.jobs, began + 60 * arguments.minutes, console)
    for status, count in sorted(found.counts.items()):
        console.print(f"{count:7} {status}")
    for name in counted_passes(plan.level):
        console.print(f"{found.rewrites[name]:7} rewrites by {name}", highlight=False)
    idle = idle_passes(plan, found)
    if idle:
        console.print(f"no program was for {', '.join(idle)}", highlight=False)
    console.print(f"{len(found.reports)} differences; seed {plan.seed}; {time.monotonic() - began:.0f} s")
    return 1 if found.reports or idle else 0


if __name__ == "__main__":
    sys.exit(main())
