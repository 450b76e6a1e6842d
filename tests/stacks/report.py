"""One stack as a task of the fuzzer: judged, and if it differs made smaller and printed as a script."""

from __future__ import annotations

from collections import Counter

from rich.console import Console

from tests.fuzz.judge import Verdict
from tests.fuzz.run import Outcome, Plan

from .judge import FERRITE, OTHERS, TORCH, Judge, blamed, judge
from .shrink import shrink
from .stack import Stack, generate, script


def check(plan: Plan, number: int) -> Outcome:
    stack = generate(plan.seed, number)
    asked = Judge(stack)
    verdict = asked.verdict(FERRITE)
    # A wrong value is worth a look even if it is torch's own.
    excused = [f"{kind} of stack {number}" if "value" in kind else kind for kind in asked.excused]
    counts = Counter([verdict.status, *(f"torch: {kind}" for kind in excused)])
    return Outcome(counts, (explain(plan, number, stack, verdict),) if verdict.status == "different" else ())


def explain(plan: Plan, number: int, stack: Stack, verdict: Verdict) -> str:
    """The difference, by the smallest stack found that has it."""
    small = shrink(stack, lambda other: judge(other).kind == verdict.kind, plan.shrink_seconds)
    found = judge(small).text or verdict.text
    layers = f"{len(small.layers)} of {len(stack.layers)} layers are left"
    title = f"stack {number} of seed {plan.seed}: {found}\n({blamed(small, verdict.kind)}; {layers})"
    return f"{title}\n\n{script(small, FERRITE.options_for(small) or {})}"


def script_of_stack(seed: int, number: int) -> str:
    stack = generate(seed, number)
    return script(stack, FERRITE.options_for(stack) or {})


def show_stack(seed: int, number: int, console: Console) -> bool:
    """One stack in this process: its script, and what every way to compile makes of it."""
    console.print(script_of_stack(seed, number), highlight=False, markup=False, soft_wrap=True)
    asked, passed = Judge(generate(seed, number)), True
    for engine in (FERRITE, *OTHERS):
        verdict = asked.verdict(engine)
        passed &= verdict.status != "different" or engine is TORCH
        console.print(f"{engine.name}: {verdict.status} {verdict.text}", highlight=False, markup=False, soft_wrap=True)
    return passed
