"""Runs many programs in worker processes, and turns what differs into a report.

Workers are replaced now and then, and when one dies or hangs: that costs one program, which is then reported.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tests.ops.sweep import quiet

from . import pre_grad
from .engines import ENGINES, NATIVE, Engine
from .generate import generate
from .judge import Judge, Verdict, blamed, judge
from .programs import Program, reproducer
from .shrink import shrink

LOOP_BATCH = 30  # loop programs that are one task
WORKER_TASKS = {"pre_grad": 500}  # after which a worker is replaced: Dynamo keeps some of what it traced
FEWER_TASKS = 150  # elsewhere
HANG_SECONDS = 240.0
LONGEST_GAP = 5.0  # between two looks at a worker; if it is longer, this process did not run either


@dataclass(frozen=True)
class Plan:
    level: str
    seed: int
    engines: tuple[str, ...]
    shrink_seconds: float


@dataclass(frozen=True)
class Outcome:
    """What became of a task: how often each status, and the differences as text; what each pass found to do."""

    counts: Counter[str] = field(default_factory=Counter)
    reports: tuple[str, ...] = ()
    rewrites: Counter[str] = field(default_factory=Counter)


# ---- tasks


def run_torch(plan: Plan, number: int) -> Outcome:
    """One program through torch.compile, with every engine."""
    verdicts = Judge(generate(plan.seed, number)).verdicts([ENGINES[name] for name in plan.engines])
    return _outcome(plan, number, verdicts)


def run_pre_grad(plan: Plan, number: int) -> Outcome:
    """One program through the passes before autograd, with every engine that has something of its own to say."""
    program = pre_grad.generate(plan.seed, number)
    pre_grad.REWRITES.clear()
    verdicts = pre_grad.judge_all(program, pre_grad.engines_for(number, plan.engines, program))
    rewrites = Counter(pre_grad.REWRITES)  # before a difference is made smaller
    return replace(_outcome(plan, number, verdicts), rewrites=rewrites)


def _outcome(plan: Plan, number: int, verdicts: dict[str, Verdict]) -> Outcome:
    """Engines that differ in the same way are one report."""
    counts = Counter(f"{name} {verdict.status}" for name, verdict in verdicts.items())
    alike: dict[str, list[str]] = {}
    for name, verdict in verdicts.items():
        if verdict.status == "different":
            alike.setdefault(verdict.kind, []).append(name)
    return Outcome(counts, tuple(explain(plan, number, names, verdicts[names[0]]) for names in alike.values()))


def explain(plan: Plan, number: int, names: list[str], verdict: Verdict) -> str:
    """The difference, by the smallest program for which the first of these engines has it."""
    engine, program = engines(plan.level)[names[0]], program_of(plan, number)
    if verdict.shared:
        return f"program {number} of seed {plan.seed}, {', '.join(names)}, only in one trace: {verdict.text}"
    ask = pre_grad.judge if plan.level == "pre_grad" else judge
    small = shrink(program, lambda other: ask(other, engine).kind == verdict.kind, plan.shrink_seconds)
    found = ask(small, engine)
    blame = pre_grad.blamed(small, engine, verdict) if plan.level == "pre_grad" else blamed(small, found)
    title = f"program {number} of seed {plan.seed}, {', '.join(names)}: {found.text or verdict.text}"
    script = reproducer(small, engine.options, engine.threads, engine.backend)
    return f"{title}\n({blame}; {len(small.steps)} of {len(program.steps)} steps are left)\n\n{script}"


def engines(level: str) -> dict[str, Engine]:
    return {"torch": ENGINES, "pre_grad": pre_grad.ENGINES}.get(level, {})


def program_of(plan: Plan, number: int) -> Program:
    return (pre_grad.generate if plan.level == "pre_grad" else generate)(plan.seed, number)


def script_of(plan: Plan, number: int) -> str:
    """What a task runs, as a script."""
    if plan.level == "stacks":
        from tests.stacks.report import script_of_stack

        return script_of_stack(plan.seed, number)
    if plan.level == "assumed":
        from . import assumed

        return assumed.generate(plan.seed, number).script()
    return reproducer(program_of(plan, number), NATIVE)


def run_loops(plan: Plan, number: int) -> Outcome:
    """A batch of loop programs."""
    from .loops import run_batch

    batch = run_batch(plan.seed, number, LOOP_BATCH, plan.shrink_seconds)
    counts = Counter({"runs equal": batch.compared, "programs": LOOP_BATCH - len(batch.reports)})
    return Outcome(counts, batch.reports, batch.taken)


def run_assumed(plan: Plan, number: int) -> Outcome:
    """One program that assumes something of its data."""
    from . import assumed

    return Outcome(*assumed.check(plan.seed, number, plan.shrink_seconds > 0))


def run_stack(plan: Plan, number: int) -> Outcome:
    """One stack of modules; see `tests/stacks`."""
    from tests.stacks.report import check

    return check(plan, number)


ENOUGH = 2000  # programs, after which every pass must have found something


def idle_passes(plan: Plan, found: Outcome) -> list[str]:
    """Passes that found nothing to do although all engines ran enough programs: the programs say nothing about them."""
    if set(plan.engines) != {*engines(plan.level)} or found.counts["tasks"] * task_size(plan.level) < ENOUGH:
        return []
    return [name for name in counted_passes(plan.level) if not found.rewrites[name]]


def counted_passes(level: str) -> tuple[str, ...]:
    """Whose rewrites are counted; of loops, paths of the emitter as well."""
    from .loops import COUNTED

    return {"pre_grad": tuple(entry.name for entry in pre_grad.PASSES), "loops": COUNTED}.get(level, ())


def task_size(level: str) -> int:
    """Programs that are one task."""
    return LOOP_BATCH if level == "loops" else 1


TASKS: dict[str, Callable[[Plan, int], Outcome]] = {
    "torch": run_torch,
    "pre_grad": run_pre_grad,
    "loops": run_loops,
    "stacks": run_stack,
    "assumed": run_assumed,
}


# ---- workers


def work(pipe: Any, plan: Plan) -> None:
    """A worker's life: take numbers, send outcomes, until the pipe says None."""
    quiet()
    warnings.simplefilter("ignore")
    while (number := pipe.recv()) is not None:
        try:
            outcome = TASKS[plan.level](plan, number)
        except Exception as error:
            # The fuzzer failed, or a program that eager runs made the compiler fail where no judge looks.
            text = f"program {number} of seed {plan.seed}: the fuzzer stopped with {type(error).__name__}: {error}"
            outcome = Outcome(Counter({"stopped": 1}), (text,))
        pipe.send(outcome)


class Worker:
    """A worker process as its owner sees it."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.number: int | None = None
        self.start()

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, self.plan), daemon=True)
        self.process.start()
        theirs.close()
        self.done = 0

    def give(self, number: int) -> None:
        if self.done >= WORKER_TASKS.get(self.plan.level, FEWER_TASKS):
            self.stop()
            self.start()
        self.number, self.waited, self.looked = number, 0.0, time.monotonic()
        self.pipe.send(number)

    def hear(self) -> Outcome | None:
        """An outcome; a report if the process died or hangs; None if it is still at work."""
        if self.pipe.poll():
            try:
                outcome: Outcome = self.pipe.recv()
            except (EOFError, OSError):
                self.process.join()
                return self._lost("crash", f"the process ended with {self.process.exitcode}")
            self.done += 1
            return outcome
        now = time.monotonic()
        self.waited, self.looked = self.waited + min(now - self.looked, LONGEST_GAP), now
        if self.waited > HANG_SECONDS + self.plan.shrink_seconds * max(len(self.plan.engines), 4):
            return self._lost("hang", "no answer")
        return None

    def _lost(self, word: str, what: str) -> Outcome:
        word_for_task = {"loops": "batch", "stacks": "stack"}.get(self.plan.level, "program")
        report = f"{word_for_task} {self.number} of seed {self.plan.seed}: {what}"
        if self.plan.level != "loops":
            assert self.number is not None
            report += "\n\n" + script_of(self.plan, self.number)
        self.stop()
        self.start()
        return Outcome(Counter({word: 1}), (report,))

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self.pipe.send(None)
        self.process.join(3)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.pipe.close()


def run(plan: Plan, numbers: list[int], size: int, jobs: int, stop_at: float, console: Console) -> Outcome:
    """All tasks, with a progress bar. Differences are printed as they are found."""
    counts: Counter[str] = Counter()
    rewrites: Counter[str] = Counter()
    reports: list[str] = []
    left = numbers[::-1]
    workers = [Worker(plan) for _ in range(min(jobs, max(len(numbers), 1)))]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task(plan.level, total=len(numbers) * size)
        try:
            while True:
                for worker in workers:
                    if worker.number is None and left and time.monotonic() < stop_at:
                        worker.give(left.pop())
                busy = [worker for worker in workers if worker.number is not None]
                if not busy:
                    break
                wait([worker.pipe for worker in busy], timeout=1.0)
                for worker in busy:
                    outcome = worker.hear()
                    if outcome is None:
                        continue
                    worker.number = None
                    counts.update(outcome.counts)
                    counts["tasks"] += 1
                    rewrites.update(outcome.rewrites)
                    reports += outcome.reports
                    for report in outcome.reports:
                        console.print(f"\n{report}", highlight=False, markup=False, soft_wrap=True)
                    bar.update(task, advance=size, description=f"{plan.level}: {len(reports)} differences")
        finally:
            for worker in workers:
                worker.stop()
    return Outcome(counts, tuple(reports), rewrites)
