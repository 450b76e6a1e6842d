"""The A/B runner: who is faster, by how much, and how sure are we.

Every benchmark of this project measures through here. A *contender* is measured beside its rivals, never alone: the
machine drifts (clock speed, neighbours, page cache), and only what was measured side by side may be divided.

Two ways to measure, one form of result (`Comparison`):

- `compare` gives each contender a fresh child process with fresh caches. In a round every contender starts once, one
  after the other; the children then wait, and steady calls are taken from them in turns (A, B, C, B, C, A, ...).
- `interleave` takes callables that live in this process and calls them in turns. For kernels and call overhead.

Ratios are formed pair by pair, within one round and turn, and then their median is taken. Medians and quartiles only:
one slow sample on a busy machine must not move a result. What a measurement means is the child's business
(`bench/measure.py` measures torch models); the runner only knows names and numbers, and never imports torch.
Progress and tables are `bench/show.py`.

Note [The wire]. Parent and child speak JSON, one object a line. The parent writes `{"do": "start", "job": {...}}`
and then, unless only the start is of interest, `{"do": "turn"}` several times and `{"do": "finish"}`. The child
answers each with `{"metrics": {name: number}}` or `{"failure": reason, "trace": text}`, and may write `{"phase": text}`
before it to say what it is busy with. A child that failed is not asked again. `bench.measure.serve` is the child's end.
"""

from __future__ import annotations

import datetime
import itertools
import json
import os
import platform
import queue
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = 1

# Every cache that a compiler under test may keep between processes.
CACHE_VARIABLES = ("FERRITE_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME")
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


# --- what is compared ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contender:
    """A name, and the job that the child `python -m <module>` is given."""

    name: str
    job: Mapping[str, Any] = field(default_factory=dict)
    module: str = "bench.measure"
    environment: Mapping[str, str] = field(default_factory=dict)
    root: Path = ROOT  # the tree that the child runs in: its bench, its ferrite
    missing: str = ""  # why it cannot run on this machine; it then keeps its row and is never started


@dataclass(frozen=True)
class Case:
    """One question ("BERT, inference") put to several contenders."""

    name: str
    contenders: tuple[Contender, ...]


@dataclass(frozen=True)
class Plan:
    """How often, and under which conditions."""

    rounds: int = 3
    turns: int = 0  # turns of steady calls in a round; 0 measures the start only
    threads: int | None = None  # None leaves the choice to the contender
    cache: str = "cold"  # empty at every start; or "warm": each contender's own, filled by a start that does not count
    timeout: float = 900.0  # seconds that a child may take for one answer

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.turns < 0:
            raise ValueError(f"a plan has at least one round and no negative turns, not {self.rounds} and {self.turns}")
        if self.cache not in ("cold", "warm"):
            raise ValueError(f'cache is "cold" or "warm", not {self.cache!r}')

    def __str__(self) -> str:
        """The repeats behind a number, for a table's caption."""
        text = "1 fresh process" if self.rounds == 1 else f"Medians of {self.rounds} interleaved fresh processes"
        text += f" per contender, {self.cache} caches"
        if self.turns:
            text += f"; steady calls in {self.turns} interleaved turns per process"
        if self.threads:
            text += f"; {self.threads} thread{'s' if self.threads > 1 else ''}"
        return text


# --- what came out ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """Numbers that one contender gave at one moment. Samples with equal case, round and turn form a pair."""

    case: str
    contender: str
    round: int
    turn: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Failure:
    """Why a contender gave no numbers in a round."""

    case: str
    contender: str
    round: int
    reason: str
    trace: str = ""


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of `count` values."""

    median: float
    low: float
    high: float
    count: int


@dataclass(frozen=True)
class Row:
    """All that is known of one contender in one case."""

    case: str
    contender: str
    metrics: Mapping[str, Spread]
    ratios: Mapping[str, Spread]  # to the baseline; empty for the baseline itself
    trouble: str  # why there are no numbers, or fewer than planned; "" if all is well


@dataclass
class Comparison:
    """Everything measured in one run, in the order in which it was measured."""

    title: str
    baseline: str
    rounds: int
    conditions: str  # how it was measured, in words
    cases: Mapping[str, tuple[str, ...]]  # contenders of each case, in the order of the table
    missing: Mapping[tuple[str, str], str] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    started: str = field(default_factory=lambda: datetime.datetime.now().astimezone().isoformat(timespec="seconds"))
    machine: Mapping[str, Any] = field(default_factory=lambda: describe_machine())  # as it was at the start

    def rows(self) -> list[Row]:
        return [self.row(case, name) for case, names in self.cases.items() for name in names]

    def row(self, case: str, contender: str) -> Row:
        own = self._values(case, contender)
        base = {} if contender == self.baseline else self._values(case, self.baseline)
        ratios = {metric: _pairwise(values, base[metric]) for metric, values in own.items() if metric in base}
        return Row(
            case,
            contender,
            {metric: summarise(list(values.values())) for metric, values in own.items()},
            {metric: spread for metric, spread in ratios.items() if spread is not None},
            self._trouble(case, contender),
        )

    def _values(self, case: str, contender: str) -> dict[str, dict[tuple[int, int], float]]:
        found: dict[str, dict[tuple[int, int], float]] = {}
        for sample in self.samples:
            if (sample.case, sample.contender) == (case, contender):
                for metric, value in sample.metrics.items():
                    found.setdefault(metric, {})[sample.round, sample.turn] = value
        return found

    def _trouble(self, case: str, contender: str) -> str:
        if (case, contender) in self.missing:
            return self.missing[case, contender]
        reasons = [f.reason for f in self.failures if (f.case, f.contender) == (case, contender)]
        if not reasons:
            return ""
        if len(reasons) >= self.rounds:
            return f"failed: {reasons[0]}"
        return f"failed in {len(reasons)} of {self.rounds} rounds: {reasons[0]}"

    def to_json(self) -> dict[str, Any]:
        """The whole run as plain data; `bench/README.md` describes the fields."""
        return {
            "schema": SCHEMA,
            "title": self.title,
            "started": self.started,
            "machine": self.machine,
            "baseline": self.baseline,
            "rounds": self.rounds,
            "conditions": self.conditions,
            "rows": [asdict(row) for row in self.rows()],
            "samples": [asdict(sample) for sample in self.samples],
            "failures": [asdict(failure) for failure in self.failures],
        }

    def save(self, name: str, path: Path | None = None) -> Path:
        """Write the run to `path`, or to a new file under results/ that carries `name` and the time."""
        if path is None:
            stamp = datetime.datetime.fromisoformat(self.started).strftime("%Y%m%d-%H%M%S")
            path = ROOT / "results" / f"{name}-{stamp}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_json(), indent=1) + "\n")
        return path


def summarise(values: Sequence[float]) -> Spread:
    """Median and quartiles, interpolated linearly between neighbours."""
    ordered = sorted(values)

    def quantile(fraction: float) -> float:
        place = fraction * (len(ordered) - 1)
        below = int(place)
        above = min(below + 1, len(ordered) - 1)
        return ordered[below] + (ordered[above] - ordered[below]) * (place - below)

    return Spread(quantile(0.5), quantile(0.25), quantile(0.75), len(ordered))


def _pairwise(values: Mapping[tuple[int, int], float], base: Mapping[tuple[int, int], float]) -> Spread | None:
    ratios = [value / base[moment] for moment, value in values.items() if base.get(moment)]
    return summarise(ratios) if ratios else None


def order_of(names: Sequence[Any], step: int) -> list[Any]:
    """The order of a round: every contender comes first, second, ... equally often, and after every other one equally
    often, so neither a place nor what the one before left in the caches favours anyone. (A Williams square: there are
    as many rounds as contenders, and if that is odd, as many again the other way round. Where contenders only took
    turns, embedding in `bench.kernels` always came after eager, and was charged with 20% to 50% for what that left.)
    Each square after the first one has the contenders in another order, drawn by its number: from the end of a round to
    the start of the next it would otherwise always be the same ones that follow each other."""
    count = len(names)
    square = step // max(count * (1 + count % 2), 1)
    names = random.Random(square).sample(names, count) if square else names
    zigzag = [(place + 1) // 2 if place % 2 else -place // 2 for place in range(count)]
    order = [names[(place + step) % count] for place in zigzag]
    return order[::-1] if count % 2 and step // count % 2 else order


class Watch:
    """What a run tells of itself while it works. This one keeps silent; `bench/show.py` has those that speak."""

    def phase(self, text: str) -> None:
        """What is going on now."""

    def measured(self, where: str, metrics: Mapping[str, float]) -> None:
        """A contender has given numbers."""

    def failed(self, where: str, reason: str) -> None:
        """A contender has given up."""

    def advance(self, steps: int) -> None:
        """So many steps of the total are done."""


OpenWatch = Callable[[str, int], AbstractContextManager[Watch]]  # takes the title and the number of steps


@contextmanager
def silently(title: str, steps: int) -> Iterator[Watch]:
    yield Watch()


# --- separate processes -------------------------------------------------------------------------------------------


class ContenderFailed(Exception):
    """A child answered with a failure, died, or took too long. The message is fit for a table cell."""

    def __init__(self, reason: str, trace: str = "") -> None:
        super().__init__(reason)
        self.trace = trace


class Worker(Protocol):
    """A running contender, as the runner sees it."""

    def ask(self, request: Mapping[str, Any], heard: Callable[[str], None]) -> dict[str, float]: ...


OpenWorker = Callable[[Contender, Plan, Path], AbstractContextManager[Worker]]


class Child:
    """A contender in a process of its own. See Note [The wire]."""

    def __init__(self, process: subprocess.Popen[str], errors: Path, timeout: float) -> None:
        self.process = process
        self.errors = errors
        self.timeout = timeout
        self.lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)

    def ask(self, request: Mapping[str, Any], heard: Callable[[str], None]) -> dict[str, float]:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self._dead() from None
        deadline = time.monotonic() + self.timeout
        while True:
            message = self._next_message(deadline)
            if "phase" in message:
                heard(message["phase"])
            elif "failure" in message:
                raise ContenderFailed(message["failure"], message.get("trace", ""))
            else:
                metrics: dict[str, float] = message["metrics"]
                return metrics

    def _next_message(self, deadline: float) -> dict[str, Any]:
        while True:
            # Look before asking whether it lives: what a child wrote just before it died still counts. Death is
            # polled because a grandchild (a compiler's worker pool) may keep the pipe open.
            dead = self.process.poll() is not None
            try:
                return _decode(self.lines.get(timeout=0.2))
            except queue.Empty:
                if dead:
                    raise self._dead() from None
                if time.monotonic() > deadline:
                    raise ContenderFailed(f"no answer within {self.timeout:.0f} s", self._last_words()) from None

    def _dead(self) -> ContenderFailed:
        code = self.process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        words = self._last_words()
        last = words.strip().splitlines()[-1:] or [""]
        return ContenderFailed(f"the process {how}" + (f": {last[0]}" if last[0] else ""), words)

    def _last_words(self) -> str:
        return self.errors.read_text(errors="replace")[-4000:]


def _decode(line: str) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except json.JSONDecodeError:
        message = None
    if not isinstance(message, dict) or not message.keys() & {"phase", "metrics", "failure"}:
        raise ContenderFailed(f"the process wrote {line.strip()[:80]!r} in place of an answer")
    return message


@contextmanager
def open_child(contender: Contender, plan: Plan, caches: Path) -> Iterator[Child]:
    """Start the contender's child with its caches under `caches`; it and its descendants end with the block."""
    environment = {
        **os.environ,
        **{name: str(caches / name.lower()) for name in CACHE_VARIABLES},
        "FERRITE_CACHE": "on",
    }
    # An installed package has its bytecode; the sources here get theirs in the first start, as anybody's would. Without
    # it a warm start compiles every module of Ferrite that it imports, and none of torch: 130 ms on one side only.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    if plan.threads is not None:
        environment.update({name: str(plan.threads) for name in THREAD_VARIABLES})
    environment.update(contender.environment)
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        errors = Path(scratch) / "stderr"
        with errors.open("w") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", contender.module],
                cwd=contender.root,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
            )
        try:
            yield Child(process, errors, plan.timeout)
        finally:
            _end_group(process)


def _end_group(process: subprocess.Popen[str]) -> None:
    """End a child and whatever it started. It leads its own group, so this reaches nobody else."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with suppress(BrokenPipeError):  # a request that the child never read may still be buffered
            pipe.close()


def compare(
    title: str,
    cases: Sequence[Case],
    *,
    baseline: str,
    plan: Plan,
    progress: OpenWatch = silently,
    open_worker: OpenWorker = open_child,
) -> Comparison:
    """Measure every case in `plan.rounds` rounds of fresh processes. Failures become rows, not exceptions."""
    _check_names([case.name for case in cases])
    for case in cases:
        _check_names([contender.name for contender in case.contenders])
    result = Comparison(
        title,
        baseline,
        plan.rounds,
        str(plan),
        {case.name: tuple(contender.name for contender in case.contenders) for case in cases},
        {(case.name, c.name): c.missing for case in cases for c in case.contenders if c.missing},
    )
    present = {case.name: [c for c in case.contenders if not c.missing] for case in cases}
    steps = sum(len(contenders) for contenders in present.values()) * plan.rounds * (plan.turns + 1)
    with progress(title, steps) as watch, tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        for case in cases:
            caches = Caches(Path(scratch), plan.cache)
            runner = _Rounds(result, plan, case.name, caches, watch, open_worker)
            if plan.cache == "warm":
                runner.fill(present[case.name])
            for number in range(plan.rounds):
                runner.round(number, order_of(present[case.name], number))
            for row in (result.row(case.name, contender.name) for contender in present[case.name] if plan.turns):
                # A run of an hour that is stopped has said what it knows.
                watch.measured(f"{case.name}, {row.contender}", {name: m.median for name, m in row.metrics.items()})
    return result


def _check_names(names: Sequence[str]) -> None:
    """Names tell samples apart, so two of a kind would be mixed into one row."""
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"the same name twice in a comparison: {', '.join(twice)}")


class Caches:
    """Which directory a contender's start finds its caches in: always a new one, or always the same one."""

    def __init__(self, scratch: Path, kind: str) -> None:
        self.scratch = scratch
        self.kind = kind
        self.kept: dict[str, Path] = {}

    def directory(self, contender: str) -> Path:
        if self.kind == "warm" and contender in self.kept:
            return self.kept[contender]
        self.kept[contender] = Path(tempfile.mkdtemp(dir=self.scratch))
        return self.kept[contender]


class _Rounds:
    """The rounds of one case."""

    def __init__(
        self, result: Comparison, plan: Plan, case: str, caches: Caches, watch: Watch, open_worker: OpenWorker
    ) -> None:
        self.result = result
        self.plan = plan
        self.case = case
        self.caches = caches
        self.watch = watch
        self.open_worker = open_worker

    def fill(self, contenders: Sequence[Contender]) -> None:
        """Start everyone once so that the caches have content. A failure here will show again when it counts."""
        for contender in contenders:
            directory = self.caches.directory(contender.name)
            with self.open_worker(contender, self.plan, directory) as worker, suppress(ContenderFailed):
                worker.ask(_start(contender), self._hear(contender, "filling caches"))

    def round(self, number: int, contenders: Sequence[Contender]) -> None:
        turns = self.plan.turns
        with ExitStack() as running:
            workers: dict[str, Worker] = {}
            for contender in contenders:
                directory = self.caches.directory(contender.name)
                workers[contender.name] = running.enter_context(self.open_worker(contender, self.plan, directory))
                if not self._ask(workers, contender, number, 0, _start(contender)):
                    self.watch.advance(turns)
            for turn in range(turns):
                for contender in order_of(contenders, turn):
                    if contender.name in workers:
                        left = turns - turn - 1
                        if not self._ask(workers, contender, number, turn, {"do": "turn"}):
                            self.watch.advance(left)
            for contender in contenders if turns else ():
                if contender.name in workers:
                    self._ask(workers, contender, number, 0, {"do": "finish"}, counts=False)

    def _ask(
        self,
        workers: dict[str, Worker],
        contender: Contender,
        number: int,
        turn: int,
        request: Mapping[str, Any],
        counts: bool = True,
    ) -> bool:
        """Put one request; keep the numbers, or drop the contender from this round and keep the reason."""
        name = contender.name
        try:
            metrics = workers[name].ask(request, self._hear(contender, f"round {number + 1}"))
        except ContenderFailed as failure:
            del workers[name]
            self.result.failures.append(Failure(self.case, name, number, str(failure), failure.trace))
            self.watch.failed(f"{self.case}, {name}, round {number + 1}", str(failure))
            return False
        else:
            if metrics:
                self.result.samples.append(Sample(self.case, name, number, turn, metrics))
            if request["do"] != "turn":  # turns are many and short; the table will have them
                self.watch.measured(f"{self.case}, {name}, round {number + 1}", metrics)
            return True
        finally:
            if counts:
                self.watch.advance(1)

    def _hear(self, contender: Contender, when: str) -> Callable[[str], None]:
        return lambda phase: self.watch.phase(f"{self.case}, {contender.name}, {when}: {phase}")


def _start(contender: Contender) -> dict[str, Any]:
    return {"do": "start", "job": dict(contender.job)}


# --- one process --------------------------------------------------------------------------------------------------


def interleave(
    title: str,
    cases: Mapping[str, Mapping[str, Callable[[], object]]],
    *,
    baseline: str,
    rounds: int = 31,
    warm_up: int = 3,
    shortest: float = 0.002,
    progress: OpenWatch = silently,
    clock: Callable[[], float] = time.perf_counter,
) -> Comparison:
    """Call contenders that live in this process in turns; the metric is `steady_call`, seconds a call.

    A contender that takes less than `shortest` seconds is called several times for a sample, so that the clock's own
    cost does not show. As many calls come before each sample that are not timed, so that it finds the caches as its own
    calls leave them: after somebody else's the same code took up to twice as long, or half as long, by who that was,
    and some calls later still 1.4 times. Results of calls are dropped at once; a callable that raises becomes a failed
    row.
    """
    conditions = f"Medians of {rounds} interleaved rounds in one process"
    result = Comparison(title, baseline, rounds, conditions, {case: tuple(calls) for case, calls in cases.items()})
    with progress(title, sum(map(len, cases.values())) * rounds) as watch:
        for case, calls in cases.items():
            timers = {name: Timer(call, warm_up, shortest, clock) for name, call in calls.items()}
            for number in range(rounds):
                for name in order_of(list(timers), number):
                    watch.phase(f"{case}, {name}, round {number + 1}")
                    try:
                        metrics = {"steady_call": timers[name].sample()}
                        result.samples.append(Sample(case, name, number, 0, metrics))
                    except Exception as error:  # whatever a contender raises is its own result
                        result.failures.append(Failure(case, name, number, one_line(error), traceback.format_exc()))
                        watch.failed(f"{case}, {name}, round {number + 1}", one_line(error))
                    watch.advance(1)
    return result


class Timer:
    """Times one callable; warms up, and learns how many calls make a sample, before its first one."""

    def __init__(self, call: Callable[[], object], warm_up: int, shortest: float, clock: Callable[[], float]) -> None:
        self.call = call
        self.warm_up = warm_up
        self.shortest = shortest
        self.clock = clock
        self.count = 0

    def sample(self) -> float:
        """Seconds a call."""
        if not self.count:
            self._prepare()
        self._time(self.count)
        return self._time(self.count) / self.count

    def _prepare(self) -> None:
        for _ in range(self.warm_up):
            self.call()
        count = 1
        while self._time(count) < self.shortest and count < 1_000_000:
            count *= 2
        self.count = count

    def _time(self, count: int) -> float:
        before = self.clock()
        for _ in itertools.repeat(None, count):
            self.call()
        return self.clock() - before


def one_line(error: BaseException) -> str:
    """An exception as one line for a table: its type and the first line that it says."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


# --- the machine --------------------------------------------------------------------------------------------------


def describe_machine() -> dict[str, Any]:
    """What a reader of the numbers needs to know of the computer; nothing that names it."""
    return {
        "system": platform.system(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in ("torch", "transformers", "ferrite", "llvmlite")},
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
