"""The command `python -m tests.ops`: the conformance sweep. `--help` lists what it takes."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import defaultdict
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # workers have what their plan says

import msgspec
from rich.console import Console

from . import known as known_failures
from .cases import DTYPES, ERRORS, FULL, IN_LAYOUTS, STANDARD, Case, Plan, groups, units
from .check import FERRITE, Engine, Verdict, caller, compile_call, compiling, function_of, observe, run_group
from .sweep import RESULTS, Summary, quiet, run, show, summarise


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tests.ops", description=__doc__)
    parser.add_argument("--full", action="store_true", help="every dtype and every sample (many hours)")
    parser.add_argument(
        "--layouts",
        action="store_true",
        help="larger samples, each transposed, cut out of larger memory, expanded and channels last (hours)",
    )
    parser.add_argument("--ops", default="*", metavar="PATTERN", help="ops by name, e.g. 'add,nn.functional.*'")
    parser.add_argument("--dtypes", metavar="LIST", help=f"of {','.join(DTYPES)}; '{ERRORS}' keeps only error inputs")
    parser.add_argument("--backend", default="ferrite", metavar="NAME")
    parser.add_argument(
        "--options",
        type=json.loads,
        metavar="JSON",
        help="options= of torch.compile; for Ferrite fallback_random and strict are set: eager's results are asked for",
    )
    parser.add_argument(
        "--both-hosts",
        action="store_true",
        help="every graph runs in both executions of its host program",
    )
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), metavar="N", help="worker processes")
    parser.add_argument("--resume", action="store_true", help="go on with an interrupted sweep (this is the default)")
    parser.add_argument("--fresh", action="store_true", help="forget an interrupted sweep")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N units (an op with a dtype)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="PATH", help="where the result goes")
    parser.add_argument("--only", action="append", default=[], metavar="ID", help="ids or patterns, with a full report")
    parser.add_argument(
        "--known-failures",
        choices=("use", "check", "ignore", "suggest"),
        default="use",
        help="check: run only the listed cases; ignore: count them as failures; suggest: print entries for the rest",
    )
    return parser.parse_args(words)


def make_plan(arguments: argparse.Namespace) -> Plan:
    if arguments.full and arguments.layouts:
        raise SystemExit("--full and --layouts are two sweeps: choose one")
    plan = FULL if arguments.full else IN_LAYOUTS if arguments.layouts else STANDARD
    changes: dict[str, object] = {"ops": arguments.ops, "seed": arguments.seed, "only": tuple(arguments.only)}
    if arguments.dtypes:
        wanted = tuple(arguments.dtypes.split(","))
        unknown = [name for name in wanted if name not in DTYPES and name != ERRORS]
        if unknown:
            raise SystemExit(f"unknown dtype {', '.join(unknown)}: choose from {', '.join(DTYPES)}, {ERRORS}")
        changes["dtypes"] = tuple(name for name in wanted if name != ERRORS)
        if ERRORS not in wanted:
            changes["errors"] = 0
        if plan.samples is not None:
            changes["samples"] = {name: plan.samples.get(name, 3) for name in wanted}
    elif plan.samples is not None and arguments.only:
        # a named case may be of any dtype
        changes |= {"dtypes": tuple(DTYPES), "samples": {name: plan.samples.get(name, 3) for name in DTYPES}}
    return msgspec.structs.replace(plan, **changes)


def report_cases(plan: Plan, engine: Engine, console: Console) -> bool:
    """Run the named cases in this process and print both sides of each."""
    passed, found = True, False
    quiet(plan.threads)
    for unit in units(plan):
        for group in groups(unit, plan):
            pairs = {case.id: (case, sample) for case, sample in group.members}
            for verdict in run_group(group, engine, plan.seed):
                found = True
                passed &= verdict.passed
                if len(pairs) == 1 or not verdict.passed:
                    _print_sides(*pairs[verdict.id], engine, plan.seed, console)
                _print_verdict(verdict, console)
    if not found:
        console.print("no case has such a name", style="red")
    return passed and found


def _print_sides(case: Case, sample: object, engine: Engine, seed: int, console: Console) -> None:
    with compiling(case.shapes):
        sides = (("eager", caller(function_of(case))), (str(engine.backend), compile_call(case, engine)))
        console.rule(case.id)
        console.print(f"input  {sample.input!r}\nargs   {sample.args!r}\nkwargs {sample.kwargs!r}", markup=False)
        for name, call in sides:
            seen = observe(call, case, sample, seed)
            console.print(f"-- {name}", markup=False)
            for field in ("result", "error", "inputs", "gradients", "backward_error"):
                if getattr(seen, field) is not None:
                    console.print(f"{field}: {getattr(seen, field)!r}", markup=False)


def _print_verdict(verdict: Verdict, console: Console) -> None:
    console.print(f"{verdict.id}: {verdict.status}, entered {verdict.entered} {verdict.note}", markup=False)
    for difference in verdict.differences:
        console.print(f"   {difference.kind}, {difference.where}: {difference.detail}", markup=False)


def suggest(summary: Summary, console: Console) -> None:
    """Entries for the failures of a sweep, to be given a reason by whoever finds it."""
    found: defaultdict[tuple[str, str], list[Case]] = defaultdict(list)
    for verdict in summary.failures:
        case = Case.parse(verdict.id)
        found[case.op, verdict.kind].append(case)
    for (_, kind), cases in found.items():
        entry = {"cases": known_failures.patterns(cases), "kinds": [kind], "reason": ""}
        console.print(json.dumps(entry), markup=False, highlight=False, soft_wrap=True)


def main(words: list[str] | None = None) -> int:
    arguments = parse_arguments(words)
    console = Console()
    plan = make_plan(arguments)
    options = FERRITE | (arguments.options or {}) if arguments.backend == "ferrite" else None
    engine = Engine(arguments.backend, options or arguments.options, arguments.both_hosts)
    if arguments.only:
        return 0 if report_cases(plan, engine, console) else 1
    known = known_failures.Known(()) if arguments.known_failures == "ignore" else known_failures.load()
    if arguments.known_failures == "check":
        only = tuple(pattern for entry in known.entries for pattern in entry.cases)
        plan = msgspec.structs.replace(plan, only=only, name=f"{plan.name}-known")
    began = time.monotonic()
    verdicts = run(plan, engine, arguments.jobs, console, arguments.fresh, arguments.limit)
    summary = summarise(verdicts.values(), known, plan, engine, time.monotonic() - began)
    show(summary, console)
    target = arguments.json or RESULTS / f"{plan.name}-{engine.backend}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(msgspec.json.format(msgspec.json.encode(summary)))
    console.print(f"result: {target}")
    if arguments.known_failures == "suggest":
        suggest(summary, console)
    return 0 if summary.clean else 1


if __name__ == "__main__":
    sys.exit(main())
