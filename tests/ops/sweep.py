"""Run many cases in worker processes, survive what they do, and sum up.

The state of a sweep is one file of JSON lines under `results/conformance/`, named by a digest of everything the
verdicts depend on: backend, options, plan, torch, and the sources of package and harness. An interrupted sweep goes on
where it was; one of other sources is never mistaken for it. A worker that dies or stops answering marks the case it was
at (`crash`, `hang`) and is replaced.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import multiprocessing
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from . import known as known_failures
from .cases import ERRORS, Case, Plan, Unit, family, groups, units
from .check import Difference, Engine, Verdict, run_group

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results" / "conformance"
HANG_SECONDS = 600.0  # without a word from a worker; symbolic convolutions take a minute on a busy machine
MOST_HARNESS_FAILURES = 10
WORKER_MEMORY = 3 << 30  # bytes after which a worker is replaced between two units: Dynamo keeps some of what it traced


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the state file: a verdict, or the end of a unit."""

    verdict: Verdict | None = None
    finished: str = ""


# ---- the worker ---------------------------------------------------------------------------------------------------


def work(pipe: Connection, plan: Plan, engine: Engine, log: str) -> None:
    """A worker's life: take units, announce each case, send each verdict, until the pipe says None."""
    stream = open(log, "a")  # noqa: SIM115 - lives as long as the process
    os.dup2(stream.fileno(), sys.stdout.fileno())
    os.dup2(stream.fileno(), sys.stderr.fileno())
    faulthandler.enable(stream)
    quiet(plan.threads)
    while (order := pipe.recv()) is not None:
        unit, done = order
        try:
            for group in groups(unit, plan):
                announce = lambda case: pipe.send(("start", case.id))
                for verdict in run_group(group, engine, plan.seed, done, announce):
                    pipe.send(("verdict", msgspec.json.encode(verdict)))
        except Exception as error:
            # The harness or the database failed, not a case: it must be seen, and the sweep must go on.
            verdict = broken(f"{unit.op}|{unit.dtype}|s0|static|infer", "harness", f"{type(error).__name__}: {error}")
            pipe.send(("verdict", msgspec.json.encode(verdict)))
        pipe.send(("finished", unit.id))


def quiet(threads: int = 1) -> None:
    """So many threads, and no logs of traced errors: error cases raise on purpose."""
    import logging

    torch.set_num_threads(threads)
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    logging.getLogger("torch._dynamo").setLevel(logging.CRITICAL)


def broken(case: str, status: str, detail: str) -> Verdict:
    """The verdict on a case that did not get as far as being compared."""
    return Verdict(case, status, (Difference(status, "worker", detail[:500]),))


class Worker:
    """A worker process as its owner sees it. Lives from `start` to `stop`; `kill` is for one that hangs."""

    def __init__(self, number: int, plan: Plan, engine: Engine) -> None:
        self.number, self.plan, self.engine = number, plan, engine
        self.unit: Unit | None = None
        self.case = ""
        self.done: set[str] = set()
        self.start()

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        RESULTS.mkdir(parents=True, exist_ok=True)
        log = RESULTS / f"worker-{self.number}.log"
        self.process = context.Process(target=work, args=(theirs, self.plan, self.engine, str(log)), daemon=True)
        # Few threads per worker: set before torch loads its OpenMP runtime.
        threads = str(self.plan.threads)
        with _environment(OMP_NUM_THREADS=threads, MKL_NUM_THREADS=threads):
            self.process.start()
        theirs.close()
        self.heard = time.monotonic()

    def give(self, unit: Unit, done: set[str]) -> None:
        self.unit, self.done, self.case = unit, set(done), ""
        self.heard = time.monotonic()
        self.pipe.send((unit, frozenset(done)))

    def memory(self) -> int:
        with contextlib.suppress(OSError):
            return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return 0

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self.pipe.send(None)
        self.process.join(5)
        self.kill()

    def kill(self) -> int | None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.pipe.close()
        return self.process.exitcode


@contextlib.contextmanager
def _environment(**values: str) -> Any:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# ---- the state on disk --------------------------------------------------------------------------------------------


def digest(plan: Plan, engine: Engine) -> str:
    """Names everything the verdicts depend on."""
    values = (plan, engine, str(torch.__version__))
    parts = [msgspec.json.encode(value) for value in values]
    for folder in ("ferrite", "tests/ops"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not path.name.startswith(("test_", "known")):
                parts += [str(path.relative_to(ROOT)).encode(), path.read_bytes()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]


class State:
    """The verdicts so far, mirrored line by line to a file that outlives the process. Opened once a sweep."""

    def __init__(self, path: Path, fresh: bool) -> None:
        self.verdicts: dict[str, Verdict] = {}
        self.finished: set[str] = set()
        if fresh:
            path.unlink(missing_ok=True)
        if path.exists():
            self._read(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("ab")

    def _read(self, path: Path) -> None:
        for raw in path.read_bytes().splitlines():
            # the last line may be cut short by whatever ended the sweep
            with contextlib.suppress(msgspec.DecodeError):
                line = msgspec.json.decode(raw, type=Line)
                if line.verdict is not None:
                    self.verdicts[line.verdict.id] = line.verdict
                if line.finished:
                    self.finished.add(line.finished)

    def add(self, verdict: Verdict) -> None:
        self.verdicts[verdict.id] = verdict
        self._write(Line(verdict=verdict))

    def finish(self, unit: str) -> None:
        self.finished.add(unit)
        self._write(Line(finished=unit))

    def _write(self, line: Line) -> None:
        self.file.write(msgspec.json.encode(line) + b"\n")
        self.file.flush()


# ---- the sweep ----------------------------------------------------------------------------------------------------


def sweep(
    plan: Plan,
    engine: Engine,
    jobs: int,
    state: State,
    progress: Callable[[int, int, Counter[str]], None],
    limit: int | None = None,
) -> dict[str, Verdict]:
    """Run what is left of a plan and return all verdicts, those of earlier runs included."""
    everything = units(plan)
    # Errors first, for they are quick, then dtype by dtype. Neighbours in the database are alike: within a dtype a
    # fixed shuffle by digest makes the first minutes a fair sample and spreads slow families over the run.
    order = {dtype: place for place, dtype in enumerate((ERRORS, *plan.dtypes))}
    everything.sort(key=lambda unit: (order[unit.dtype], hashlib.sha256(unit.id.encode()).digest()))
    if limit is not None:
        everything = everything[:limit]
    left = [unit for unit in reversed(everything) if unit.id not in state.finished]
    workers = [Worker(number, plan, engine) for number in range(min(jobs, max(1, len(left))))]
    counts = Counter(verdict.status for verdict in state.verdicts.values())
    shown = 0.0

    def give_next(worker: Worker) -> None:
        worker.unit = None
        if not left:
            return
        if worker.memory() > WORKER_MEMORY:
            worker.stop()
            worker.start()
        unit = left.pop()
        worker.give(unit, {case for case in state.verdicts if case.startswith(unit.id + "|")})

    def record(verdict: Verdict) -> None:
        if verdict.status == "harness" and counts["harness"] >= MOST_HARNESS_FAILURES:
            raise RuntimeError(
                f"units fail before any case is run, lastly {verdict.id}: {verdict.differences[0].detail}"
            )
        state.add(verdict)
        counts[verdict.status] += 1

    try:
        for worker in workers:
            give_next(worker)
        while any(worker.unit is not None for worker in workers):
            busy = [worker for worker in workers if worker.unit is not None]
            ready = wait([worker.pipe for worker in busy], timeout=1.0)
            for worker in busy:
                if worker.pipe in ready:
                    _hear(worker, record, state, give_next)
                elif time.monotonic() - worker.heard > HANG_SECONDS:
                    _replace(worker, record, "hang", f"no answer for {HANG_SECONDS:.0f} s")
            if time.monotonic() - shown > 0.5:
                shown = time.monotonic()
                progress(len(state.finished), len(everything), counts)
    finally:
        for worker in workers:
            worker.stop()
    return state.verdicts


def _hear(worker: Worker, record: Callable[[Verdict], None], state: State, give_next: Callable[[Worker], None]) -> None:
    worker.heard = time.monotonic()
    try:
        word, payload = worker.pipe.recv()
    except (EOFError, OSError):
        worker.process.join()
        _replace(worker, record, "crash", f"worker ended with exit code {worker.process.exitcode}")
        return
    if word == "start":
        worker.case = payload
    elif word == "verdict":
        verdict = msgspec.json.decode(payload, type=Verdict)
        worker.done.add(verdict.id)
        record(verdict)
    else:
        state.finish(payload)
        give_next(worker)


def _replace(worker: Worker, record: Callable[[Verdict], None], status: str, detail: str) -> None:
    """Mark the case a worker was at, and let a new process take the rest of its unit."""
    unit, done, case = worker.unit, worker.done, worker.case
    assert unit is not None
    worker.kill()
    case = case if case and case not in done else f"{unit.op}|{unit.dtype}|s0|static|infer"
    record(broken(case, status, detail))
    worker.start()
    worker.give(unit, done | {case})


def run(
    plan: Plan, engine: Engine, jobs: int, console: Console, fresh: bool = False, limit: int | None = None
) -> dict[str, Verdict]:
    """A sweep with its state file and a progress bar."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{plan.name}-{engine.backend}-{digest(plan, engine)}.jsonl"
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    state = State(path, fresh)
    if state.verdicts:
        console.print(f"going on with {path.relative_to(ROOT)}: {len(state.verdicts)} cases done")
    with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("conformance", total=None)

        def progress(done: int, total: int, counts: Counter[str]) -> None:
            failed = sum(count for status, count in counts.items() if status not in ("equal", "close"))
            text = f"{plan.name}: {sum(counts.values())} cases, {failed} unequal"
            bar.update(task, completed=done, total=total, description=text)

        return sweep(plan, engine, jobs, state, progress, limit)


# ---- summing up ---------------------------------------------------------------------------------------------------


class Summary(msgspec.Struct):
    """What a sweep found, as written to JSON."""

    backend: str
    plan: str
    seed: int
    seconds: float
    cases: int
    equal: int
    close: int
    known: int
    failures: list[Verdict]
    stale: list[str]
    entered: dict[str, int]
    families: dict[str, dict[str, int]]
    kinds: dict[str, int]

    @property
    def rate(self) -> float:
        return (self.equal + self.close) / self.cases if self.cases else 0.0

    @property
    def clean(self) -> bool:
        return not self.failures and not self.stale


def summarise(
    verdicts: Iterable[Verdict], known: known_failures.Known, plan: Plan, engine: Engine, seconds: float
) -> Summary:
    made = Summary(str(engine.backend), plan.name, plan.seed, round(seconds, 1), 0, 0, 0, 0, [], [], {}, {}, {})
    families: defaultdict[str, Counter[str]] = defaultdict(Counter)
    kinds: Counter[str] = Counter()
    entered: Counter[str] = Counter()
    for verdict in verdicts:
        standing = known_failures.account(verdict, known).standing
        made.cases += 1
        made.equal += verdict.status == "equal"
        made.close += verdict.status == "close"
        made.known += standing == "known"
        entered[verdict.entered] += 1
        row = families[family(Case.parse(verdict.id).op)]
        row["cases"] += 1
        row[verdict.status if verdict.passed else standing] += 1
        if standing == "failure":
            made.failures.append(verdict)
        if standing == "stale":
            made.stale.append(verdict.id)
        if not verdict.passed:
            kinds[verdict.kind] += 1
    made.entered = dict(entered.most_common())
    made.families = {name: dict(row) for name, row in sorted(families.items())}
    made.kinds = dict(kinds.most_common())
    return made


def show(summary: Summary, console: Console, most: int = 40) -> None:
    """The tables a person reads at the end."""
    table = Table(title=f"{summary.plan} sweep, backend {summary.backend}")
    table.add_column("family")
    columns = ("cases", "equal", "close", "known", "failure")
    for name in columns:
        table.add_column(name, justify="right")
    for name, row in summary.families.items():
        table.add_row(name, *(str(row.get(column) or "") for column in columns))
    totals = (summary.cases, summary.equal, summary.close, summary.known, len(summary.failures))
    table.add_row("all", *map(str, totals), style="bold")
    console.print(table)
    if summary.kinds:
        kinds = Table(title="unequal cases by kind")
        kinds.add_column("kind")
        kinds.add_column("cases", justify="right")
        for kind, count in summary.kinds.items():
            kinds.add_row(kind, str(count))
        console.print(kinds)
    running = sum(count for how, count in summary.entered.items() if how != "raised")
    through = sum(summary.entered.get(how, 0) for how in ("whole", "partly", "reused"))
    console.print(
        f"{summary.rate:.2%} equal or close; {through} of {running} cases that do not raise went through the backend "
        f"({summary.entered.get('partly', 0)} with graph breaks); {summary.seconds:.0f} s"
    )
    for verdict in summary.failures[:most]:
        first = verdict.differences[0]
        text = f"{first.kind}, {first.where}: {first.detail[:200]}"
        console.print(f"[red]fails[/red] {verdict.id}: {escape(text)}", highlight=False, soft_wrap=True)
    if len(summary.failures) > most:
        console.print(f"… and {len(summary.failures) - most} more failures (all are in the JSON result)")
    for case in summary.stale[:most]:
        console.print(f"[yellow]passes[/yellow] {case} is in {known_failures.FILE.name}: remove it", highlight=False)
