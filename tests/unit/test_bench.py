"""The A/B runner judges every speed claim of the project, so its arithmetic, its order and its manners are tested here.

Times are made up (fake workers, fake clocks) wherever the arithmetic is tested. Two tests at the end run real models in
real child processes and look at everything but the times.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from io import StringIO
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench import demo, first_call, measure, overhead, versus, warm_call
from bench.compare import (
    CACHE_VARIABLES,
    ROOT,
    Case,
    Comparison,
    Contender,
    ContenderFailed,
    Failure,
    Plan,
    Sample,
    compare,
    interleave,
    open_child,
    order_of,
    summarise,
)
from bench.show import Column, format_bytes, format_seconds, show, watcher

FIRST = Column("first call", "first_call")
FIRST_RATIO = Column("ratio", "first_call", ratio=True)


# --- statistics ---------------------------------------------------------------------------------------------------


def test_median_and_quartiles_interpolate() -> None:
    spread = summarise([4.0, 1.0, 3.0, 2.0])
    assert (spread.median, spread.low, spread.high, spread.count) == (2.5, 1.75, 3.25, 4)


def test_one_value_is_its_own_spread() -> None:
    spread = summarise([7.0])
    assert (spread.median, spread.low, spread.high, spread.count) == (7.0, 7.0, 7.0, 1)


def test_one_wild_value_moves_neither_median_nor_quartiles_far() -> None:
    calm, wild = summarise([1.0, 1.1, 1.2, 1.3, 1.4]), summarise([1.0, 1.1, 1.2, 1.3, 1000.0])
    assert wild == calm


def test_ratios_are_formed_in_pairs_before_the_median_is_taken() -> None:
    """The machine slows down tenfold in the last rounds; B is always twice A, though the ratio of medians is 0.4."""
    result = make_comparison({"A": [1.0, 1.0, 10.0], "B": [2.0, 2.0, 20.0]})
    result.samples = [s for s in result.samples if (s.contender, s.round) not in {("A", 0), ("B", 2)}]
    row = result.row("case", "B")
    assert row.ratios["first_call"].median == 2.0
    assert row.ratios["first_call"].count == 1  # only round 1 has both
    assert row.metrics["first_call"].median / result.row("case", "A").metrics["first_call"].median < 0.5


def test_the_baseline_and_metrics_it_lacks_have_no_ratio() -> None:
    result = make_comparison({"A": [1.0], "B": [2.0]})
    result.samples.append(Sample("case", "B", 0, 0, {"difference": 1e-7}))
    assert result.row("case", "A").ratios == {}
    assert set(result.row("case", "B").ratios) == {"first_call"}


@pytest.mark.parametrize("names", ["AB", "ABC", "ABCD", "ABCDE"])
def test_everyone_has_every_place_and_follows_everyone_equally_often(names: str) -> None:
    orders = [order_of(names, step) for step in range(len(names) * (1 + len(names) % 2))]
    times = len(orders) // len(names)
    assert Counter((place, name) for order in orders for place, name in enumerate(order)) == Counter(
        {(place, name): times for place in range(len(names)) for name in names}
    )
    neighbours = Counter(pair for order in orders for pair in pairwise(order))
    assert neighbours == Counter(dict.fromkeys(permutations(names, 2), times))


def test_also_from_round_to_round_everyone_comes_after_everyone() -> None:
    orders = [order_of("ABCD", step) for step in range(400)]
    assert orders == [order_of("ABCD", step) for step in range(400)]
    follows = Counter((last[-1], first[0]) for last, first in pairwise(orders) if last[-1] != first[0])
    assert set(follows) == set(permutations("ABCD", 2))
    assert max(follows.values()) < 2 * min(follows.values())


def test_an_order_of_one_or_none() -> None:
    assert order_of("A", 5) == ["A"]
    assert order_of([], 5) == []


# --- the runner, with workers that only pretend -------------------------------------------------------------------


class Stage:
    """Opens fake workers and keeps a log of what was asked of whom."""

    def __init__(self, answers: Mapping[str, Callable[[str, int], dict[str, float]]]) -> None:
        self.answers = answers
        self.log: list[str] = []
        self.directories: list[tuple[str, Path]] = []
        self.open = 0

    @contextmanager
    def __call__(self, contender: Contender, plan: Plan, caches: Path) -> Iterator[FakeWorker]:
        assert caches.is_dir()
        self.directories.append((contender.name, caches))
        self.open += 1
        try:
            yield FakeWorker(contender.name, self)
        finally:
            self.open -= 1


class FakeWorker:
    def __init__(self, name: str, stage: Stage) -> None:
        self.name = name
        self.stage = stage
        self.requests = 0

    def ask(self, request: Mapping[str, Any], heard: Callable[[str], None]) -> dict[str, float]:
        self.stage.log.append(f"{self.name}:{request['do']}")
        heard(request["do"])
        self.requests += 1
        return self.stage.answers[self.name](request["do"], self.requests)


def steady(seconds: float) -> Callable[[str, int], dict[str, float]]:
    return lambda what, count: {"start": {"first_call": seconds}, "turn": {"steady_call": seconds / 10}}.get(what, {})


def stumble(at: str, reason: str = "boom") -> Callable[[str, int], dict[str, float]]:
    def answer(what: str, count: int) -> dict[str, float]:
        if what == at:
            raise ContenderFailed(reason, "the trace")
        return steady(1.0)(what, count)

    return answer


def run(stage: Stage, plan: Plan, *, missing: Mapping[str, str] | None = None, **more: Any) -> Comparison:
    contenders = [Contender(name, missing=(missing or {}).get(name, "")) for name in stage.answers]
    return compare("test", [Case("case", tuple(contenders))], baseline="A", plan=plan, open_worker=stage, **more)


def test_starts_and_turns_interleave_in_every_order() -> None:
    stage = Stage({"A": steady(1.0), "B": steady(3.0)})
    result = run(stage, Plan(rounds=2, turns=2))
    assert stage.log == [
        *("A:start", "B:start", "A:turn", "B:turn", "B:turn", "A:turn", "A:finish", "B:finish"),
        *("B:start", "A:start", "B:turn", "A:turn", "A:turn", "B:turn", "B:finish", "A:finish"),
    ]
    assert stage.open == 0
    row = result.row("case", "B")
    assert row.ratios["first_call"].median == pytest.approx(3.0)
    assert row.ratios["steady_call"].count == 4
    assert row.trouble == ""


def test_without_turns_only_the_start_is_measured() -> None:
    stage = Stage({"A": steady(1.0), "B": steady(2.0)})
    result = run(stage, Plan(rounds=1))
    assert stage.log == ["A:start", "B:start"]
    assert {metric for row in result.rows() for metric in row.metrics} == {"first_call"}


def test_cold_caches_are_new_at_every_start() -> None:
    stage = Stage({"A": steady(1.0), "B": steady(1.0)})
    run(stage, Plan(rounds=3))
    assert len({directory for _, directory in stage.directories}) == 6


def test_warm_caches_are_filled_once_and_then_kept_by_each_contender() -> None:
    stage = Stage({"A": steady(1.0), "B": steady(1.0)})
    result = run(stage, Plan(rounds=2, cache="warm"))
    assert [name for name, _ in stage.directories] == ["A", "B", "A", "B", "B", "A"]
    assert len({directory for _, directory in stage.directories}) == 2
    assert result.row("case", "A").metrics["first_call"].count == 2  # the filling start is not counted


def test_a_contender_that_fails_is_a_row_and_the_others_go_on() -> None:
    stage = Stage({"A": steady(1.0), "B": stumble("start", "RuntimeError: no luck")})
    result = run(stage, Plan(rounds=2, turns=2))
    row = result.row("case", "B")
    assert row.metrics == {}
    assert row.trouble == "failed: RuntimeError: no luck"
    assert [failure.trace for failure in result.failures] == ["the trace"] * 2
    assert result.row("case", "A").metrics["steady_call"].count == 4
    assert "B:turn" not in stage.log


def test_a_contender_that_fails_late_keeps_its_numbers_and_says_why_there_are_no_more() -> None:
    stage = Stage({"A": steady(1.0), "B": stumble("finish", "wrong answer")})
    row = run(stage, Plan(rounds=1, turns=1)).row("case", "B")
    assert row.metrics["first_call"].count == 1
    assert row.trouble == "failed: wrong answer"


def test_failing_in_some_rounds_is_told_with_their_number() -> None:
    results = iter([ContenderFailed("once"), None])

    def answer(what: str, count: int) -> dict[str, float]:
        failure = next(results)
        if failure:
            raise failure
        return {"first_call": 1.0}

    stage = Stage({"A": steady(1.0), "B": answer})
    row = run(stage, Plan(rounds=2)).row("case", "B")
    assert row.trouble == "failed in 1 of 2 rounds: once"
    assert row.metrics["first_call"].count == 1


def test_a_missing_contender_keeps_its_row_and_is_never_started() -> None:
    stage = Stage({"A": steady(1.0), "B": steady(1.0)})
    result = run(stage, Plan(rounds=1), missing={"B": "no C++ compiler"})
    assert result.row("case", "B").trouble == "no C++ compiler"
    assert not any(entry.startswith("B") for entry in stage.log)


def test_progress_ends_at_the_end_even_when_contenders_fail() -> None:
    steps = []

    @contextmanager
    def count(title: str, total: int) -> Iterator[Any]:
        watch = CountingWatch()
        yield watch
        steps.append((watch.done, total))

    answers = {"A": steady(1.0), "B": stumble("turn"), "C": stumble("start"), "D": stumble("finish")}
    run(Stage(answers), Plan(rounds=2, turns=3), progress=count)
    assert steps == [(32, 32)]


class CountingWatch:
    def __init__(self) -> None:
        self.done = 0

    def advance(self, steps: int) -> None:
        self.done += steps

    def phase(self, text: str) -> None: ...

    def measured(self, where: str, metrics: Mapping[str, float]) -> None: ...

    def failed(self, where: str, reason: str) -> None: ...


@pytest.mark.parametrize("wrong", [{"rounds": 0}, {"turns": -1}, {"cache": "lukewarm"}])
def test_a_plan_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"round|cache"):
        Plan(**wrong)


def test_equal_names_are_refused_before_anything_runs() -> None:
    stage = Stage({"A": steady(1.0)})
    with pytest.raises(ValueError, match="same name twice in a comparison: A"):
        compare("t", [Case("c", (Contender("A"), Contender("A")))], baseline="A", plan=Plan(), open_worker=stage)
    assert stage.log == []


# --- what is kept -------------------------------------------------------------------------------------------------


def test_the_json_file_holds_rows_samples_in_order_and_the_conditions(tmp_path: Path) -> None:
    stage = Stage({"A": steady(1.0), "B": stumble("turn")})
    result = run(stage, Plan(rounds=2, turns=1, threads=1))
    path = result.save("name", tmp_path / "deep" / "result.json")
    found = json.loads(path.read_text())
    assert set(found) == {
        *("schema", "title", "started", "machine", "baseline", "rounds", "conditions", "rows", "samples", "failures")
    }
    assert found["schema"] == 1
    assert found["baseline"] == "A"
    assert found["rounds"] == 2
    assert "2 interleaved fresh processes" in found["conditions"]
    assert "1 thread" in found["conditions"]
    assert [row["contender"] for row in found["rows"]] == ["A", "B"]
    assert set(found["rows"][1]) == {"case", "contender", "metrics", "ratios", "trouble"}
    assert set(found["rows"][1]["ratios"]["first_call"]) == {"median", "low", "high", "count"}
    assert [(s["round"], s["contender"], *s["metrics"]) for s in found["samples"]] == [
        (0, "A", "first_call"),
        (0, "B", "first_call"),
        (0, "A", "steady_call"),
        (1, "B", "first_call"),
        (1, "A", "first_call"),
        (1, "A", "steady_call"),
    ]
    assert [failure["reason"] for failure in found["failures"]] == ["boom", "boom"]
    assert set(found["machine"]) == {"system", "processor", "cores", "load", "python", "packages"}


def make_comparison(values: Mapping[str, list[float]], metric: str = "first_call", **more: Any) -> Comparison:
    """A finished run of one case whose first contender is the baseline."""
    rounds = max(map(len, values.values()))
    result = Comparison(
        "made up", next(iter(values)), rounds, str(Plan(rounds=rounds)), {"case": tuple(values)}, **more
    )
    result.samples += [
        Sample("case", name, number, 0, {metric: value})
        for name, series in values.items()
        for number, value in enumerate(series)
    ]
    return result


# --- what a call may cost -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "many", "broken"),
    [
        (13e-6, 20e-6, []),
        (13.2e-6, 20e-6, ["one kernel: 3.2 us added to the floor, wanted 3.0"]),
        (12e-6, 22e-6, ["each further kernel: 0.53 us added to the floor, wanted 0.4"]),
        (
            13e-6,
            40e-6,
            [
                "20 kernels: 0.80x of Inductor, wanted 0.7x",
                "each further kernel: 1.42 us added to the floor, wanted 0.4",
            ],
        ),
    ],
)
def test_what_ferrite_adds_to_the_floor_is_limited(one: float, many: float, broken: list[str]) -> None:
    kernels = {"one kernel": one, f"{overhead.CHAIN} kernels": many}
    names = ("inductor", "ferrite", "floor")
    result = Comparison("made up", "inductor", 1, str(Plan(rounds=1)), dict.fromkeys(kernels, names))
    for case, ours in kernels.items():
        times = {"inductor": 50e-6, "ferrite": ours, "floor": 10e-6}
        result.samples += [Sample(case, name, 0, 0, {"steady_call": time}) for name, time in times.items()]
    assert overhead.verdict(result) == broken


# --- real child processes, without torch --------------------------------------------------------------------------

CHILD = """
import os, signal, sys, time
from bench.measure import serve

class Child:
    def start(self, job, phase):
        phase("thinking")
        print("noise on standard output")
        match job["behave"]:
            case "well":
                return {"first_call": 1.5}
            case "raise":
                raise LookupError("not here\\nsecond line")
            case "die":
                print("last words", file=sys.stderr, flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                os._exit(3)
            case "hang":
                time.sleep(60)
            case "environment":
                assert all(os.environ[name].startswith(job["caches"]) for name in job["names"])
                return {"threads": float(os.environ["OMP_NUM_THREADS"])}
            case "where":
                import bench.measure
                return {"own": float(bench.measure.__file__.startswith(job["root"]))}

    def turn(self, phase):
        return {"steady_call": 0.5}

    def finish(self, phase):
        return {}

serve(Child())
"""


@pytest.fixture
def child(tmp_path: Path) -> Callable[..., Contender]:
    (tmp_path / "a_child.py").write_text(CHILD)
    (tmp_path / "a_babbler.py").write_text("print('hello, parent', flush=True); input()")

    def make(module: str = "a_child", **job: Any) -> Contender:
        return Contender("A", job, module=module, environment={"PYTHONPATH": str(tmp_path)})

    return make


def ask_start(contender: Contender, caches: Path, timeout: float = 60.0) -> tuple[dict[str, float], list[str]]:
    heard: list[str] = []
    with open_child(contender, Plan(threads=3, timeout=timeout), caches) as running:
        answer = running.ask({"do": "start", "job": dict(contender.job)}, heard.append)
    assert running.process.returncode is not None
    return answer, heard


def test_a_child_answers_and_its_prints_do_not_disturb(child: Callable[..., Contender], tmp_path: Path) -> None:
    assert ask_start(child(behave="well"), tmp_path) == ({"first_call": 1.5}, ["thinking"])


def test_a_child_finds_its_caches_and_threads_in_its_environment(
    child: Callable[..., Contender], tmp_path: Path
) -> None:
    job = {"behave": "environment", "caches": str(tmp_path / "fresh"), "names": CACHE_VARIABLES}
    answer, _ = ask_start(child(**job), tmp_path / "fresh")
    assert answer == {"threads": 3.0}


def test_a_child_imports_from_the_tree_of_its_contender(child: Callable[..., Contender], tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(ROOT / "bench", tree / "bench")
    here = child(behave="where", root=str(tree.resolve()))
    assert ask_start(here, tmp_path)[0] == {"own": 0.0}
    assert ask_start(replace(here, root=tree), tmp_path)[0] == {"own": 1.0}


@pytest.mark.parametrize(
    ("behave", "reason"),
    [
        ("raise", r"^LookupError: not here$"),
        ("die", r"^the process was killed by SIGKILL: last words$"),
        ("exit", r"^the process ended with status 3"),
        ("hang", r"^no answer within 1 s$"),
    ],
)
def test_a_child_in_trouble_gives_a_reason(
    child: Callable[..., Contender], tmp_path: Path, behave: str, reason: str
) -> None:
    with pytest.raises(ContenderFailed, match=reason):
        ask_start(child(behave=behave), tmp_path, timeout=1.0 if behave == "hang" else 60.0)


def test_a_child_that_does_not_speak_json_gives_a_reason(child: Callable[..., Contender], tmp_path: Path) -> None:
    with pytest.raises(ContenderFailed, match="wrote 'hello, parent' in place of an answer"):
        ask_start(child(module="a_babbler"), tmp_path)


def test_a_child_that_cannot_start_gives_a_reason(child: Callable[..., Contender], tmp_path: Path) -> None:
    with pytest.raises(ContenderFailed, match="No module named no_such_module"):
        ask_start(child(module="no_such_module"), tmp_path)


# --- one process --------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def spend(self, seconds: float) -> Callable[[], None]:
        def call() -> None:
            self.now += seconds

        return call


def test_interleave_times_calls_and_forms_ratios() -> None:
    clock = Clock()
    calls = {"A": clock.spend(0.010), "B": clock.spend(0.025), "quick": clock.spend(0.0001)}
    result = interleave("t", {"case": calls}, baseline="A", rounds=5, clock=clock)
    assert result.row("case", "A").metrics["steady_call"].median == pytest.approx(0.010)
    assert result.row("case", "B").ratios["steady_call"].median == pytest.approx(2.5)
    assert result.row("case", "quick").metrics["steady_call"].median == pytest.approx(0.0001)
    assert [s.contender for s in result.samples[:6]] == ["A", "B", "quick", "B", "quick", "A"]


def test_interleave_repeats_quick_calls_until_the_clock_can_see_them() -> None:
    clock, count = Clock(), 0

    def quick() -> None:
        nonlocal count
        count += 1
        clock.now += 0.0001

    interleave("t", {"case": {"A": quick}}, baseline="A", rounds=10, warm_up=0, shortest=0.002, clock=clock)
    assert count >= 10 * 20  # 20 calls of 0.1 ms make 2 ms


def test_interleave_turns_an_exception_into_a_row() -> None:
    clock, left = Clock(), iter(range(20))

    def breaks_in_the_end() -> None:
        clock.now += 0.010
        if next(left) > 8:
            raise ZeroDivisionError("too far")

    calls = {"A": clock.spend(0.010), "B": breaks_in_the_end}
    result = interleave("t", {"case": calls}, baseline="A", rounds=10, clock=clock)
    row = result.row("case", "B")
    assert row.trouble.startswith("failed in")
    assert row.trouble.endswith("of 10 rounds: ZeroDivisionError: too far")
    assert row.ratios["steady_call"].median == pytest.approx(1.0)
    assert result.row("case", "A").metrics["steady_call"].count == 10


# --- what people see ----------------------------------------------------------------------------------------------


def screen(terminal: bool = False) -> Console:
    return Console(width=100, file=StringIO(), force_terminal=terminal, color_system=None, legacy_windows=False)


def seen(console: Console) -> str:
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_table_fits_and_shows_medians_ratios_and_repeats() -> None:
    console = screen()
    result = make_comparison({"aot_eager": [1.0, 1.0, 1.0], "ferrite": [1.1, 1.3, 1.2]}, machine=IDLE)
    show(console, result, [FIRST, FIRST_RATIO])
    text = seen(console)
    assert "1.20 s ±4%" in text
    assert "1.20x (1.15-1.25)" in text
    assert "3 interleaved fresh processes" in text
    assert max(map(len, text.splitlines())) <= 100


IDLE = {"load": 0.1, "cores": 2}


def test_failures_are_told_below_the_table_in_full() -> None:
    console = screen()
    reason = "RuntimeError: a long story about what happened"
    result = make_comparison({"A": [1.0]}, machine=IDLE)
    result.cases = {"case": ("A", "B", "C")}
    result.missing = {("case", "C"): "no C++ compiler"}
    result.failures = [Failure("case", "B", 0, reason)]
    show(console, result, [FIRST, FIRST_RATIO])
    text = seen(console)
    assert "failed (below)" in text
    assert f"case, B failed: {reason}" in text
    assert text.count("no C++ compiler") == 1


def test_a_busy_machine_is_mentioned() -> None:
    console = screen()
    show(console, make_comparison({"A": [1.0]}, machine={"load": 3.0, "cores": 2}), [FIRST])
    assert "busy" in seen(console)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (format_seconds(12.34), "12.3 s"),
        (format_seconds(0.5), "500 ms"),
        (format_seconds(0.00123), "1.23 ms"),
        (format_seconds(4.2e-6), "4.20 us"),
        (format_seconds(3e-9), "3.00 ns"),
        (format_bytes(3 * 2**30), "3.00 GiB"),
        (format_bytes(200 * 2**20), "200 MiB"),
        (format_bytes(100), "100 B"),
    ],
)
def test_numbers_carry_units(text: str, expected: str) -> None:
    assert text == expected


def test_a_log_file_gets_lines_without_control_characters() -> None:
    console = screen()
    run(Stage({"A": steady(1.0), "B": stumble("turn", "why")}), Plan(rounds=1, turns=1), progress=watcher(console))
    lines = seen(console).splitlines()
    assert any(line.endswith("case, A, round 1: first call 1.00 s") for line in lines)
    assert any(line.endswith("case, B, round 1: failed: why") for line in lines)
    assert "\x1b" not in seen(console)


def test_a_terminal_gets_a_bar_that_names_contender_and_phase() -> None:
    console = screen(terminal=True)
    shown = []

    def answer(what: str, count: int) -> dict[str, float]:
        shown.append(what)
        return steady(1.0)(what, count)

    run(Stage({"A": answer}), Plan(rounds=1, turns=1), progress=watcher(console))
    assert "case, A, round 1: finish" in seen(console)
    assert "100%" in seen(console)


# --- first_call and demo ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ferrite", "kept"), [(1.1, True), (1.2, False)])
def test_the_verdict_on_the_first_call(ferrite: float, kept: bool) -> None:
    result = make_comparison({"aot_eager": [1.0, 1.0], "ferrite": [ferrite, ferrite]})
    found, text = first_call.verdict(result, 1.15)
    assert found is kept
    assert f"{ferrite:.2f}x" in text
    assert ("kept" in text) is kept


def test_no_verdict_without_numbers() -> None:
    result = make_comparison({"aot_eager": [1.0]})
    result.cases = {"case": ("aot_eager", "ferrite")}
    kept, text = first_call.verdict(result, 1.15)
    assert not kept
    assert "no result" in text


# --- versus -------------------------------------------------------------------------------------------------------


def test_two_commits_are_checked_out_beside_the_same_benchmarks(tmp_path: Path) -> None:
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    if head.returncode:
        pytest.skip("this tree is no git checkout: there are no commits to compare")
    versus.check_out("HEAD", tmp_path)
    assert (tmp_path / "ferrite" / "__init__.py").is_file()
    assert (tmp_path / "bench" / "measure.py").read_text() == (ROOT / "bench" / "measure.py").read_text()
    assert not (tmp_path / "tests").exists()


def test_the_change_between_commits_is_a_geometric_mean() -> None:
    result = make_comparison({versus.OLD: [1.0, 2.0, 4.0], versus.NEW: [1.1, 2.2, 4.4]}, "steady_call")
    assert versus.changes(result) == {"steady_call": pytest.approx(1.1)}
    assert versus.verdict(result, 1.02) == ["steady_call: 1.100x, at most 1.02x wanted"]
    assert versus.verdict(result, 1.2) == []


def test_a_commit_that_gives_no_result_is_told() -> None:
    result = make_comparison({versus.OLD: [1.0]}, "steady_call")
    result.cases = {"case": (versus.OLD, versus.NEW)}
    assert versus.verdict(result, 1.02) == ["case: no ratio"]


KEPT = {"dynamo": [1.0, 1.0, 9.0], "inductor": [5.0, 5.0, 45.0]}


@pytest.mark.parametrize(
    ("ferrite", "no_trace", "broken"),
    [
        ([1.1, 1.1, 9.9], [0.5, 0.5, 4.5], []),
        ([1.3, 1.3, 11.7], [0.5, 0.5, 4.5], ["ferrite: 1.30x of dynamo"]),
        ([1.1, 1.1, 9.9], [1.6, 1.6, 14.4], ["ferrite, no trace: 1.60x of dynamo", "0.32x of inductor"]),
        # Pair by pair: the medians alone are 1.0 of dynamo.
        ([9.0, 1.0, 1.0], [0.5, 0.5, 4.5], []),
        ([1.0, 9.0, 12.0], [0.5, 0.5, 4.5], ["ferrite: 1.33x of dynamo"]),
    ],
)
def test_the_verdict_on_warm_calls(ferrite: list[float], no_trace: list[float], broken: list[str]) -> None:
    result = make_comparison({**KEPT, "ferrite": ferrite, warm_call.NO_TRACE: no_trace})
    kept, text = warm_call.verdict(result)
    assert kept is not bool(broken)
    assert ("broken" in text) is bool(broken)
    assert all(part in text for part in broken), text


def test_the_trace_is_no_excuse_for_missing_the_share_of_inductor() -> None:
    result = make_comparison({"dynamo": [1.0], "inductor": [3.0], "ferrite": [1.0], warm_call.NO_TRACE: [0.5]})
    kept, text = warm_call.verdict(result)
    assert not kept
    assert "case, ferrite: 1.00x of dynamo (promise 1.25: kept); 0.33x of inductor (promise 0.3: broken)" in text


@pytest.mark.parametrize("cold", ["ferrite", "inductor", warm_call.NO_TRACE])
def test_a_start_that_compiled_is_no_warm_one(cold: str) -> None:
    result = make_comparison({**KEPT, "ferrite": [1.0, 1.0, 9.0], warm_call.NO_TRACE: [0.5, 0.5, 4.5]})
    assert warm_call.verdict(result)[0]
    result.samples.append(Sample("case", cold, 1, 1, {"cache_misses": 1.0}))
    kept, text = warm_call.verdict(result)
    assert not kept
    assert f"case, {cold}: not everything was found in its caches" in text


def test_without_a_peer_a_promise_is_not_kept() -> None:
    result = make_comparison({"dynamo": [1.0], "ferrite": [1.0], warm_call.NO_TRACE: [0.5]})
    kept, text = warm_call.verdict(result)
    assert not kept
    assert "no ratio to inductor: broken" in text


@pytest.mark.parametrize(
    ("backend", "keeps_trace", "said", "missed"),
    [
        ("ferrite", False, {"ferrite": {"graph_cache_hit": 2}}, 0),
        ("ferrite", False, {"ferrite": {"graph_cache_miss": 2, "graph_cache_bypass": 1}}, 3),
        ("ferrite", True, {"ferrite": {"graph_cache_hit": 1}}, 1),
        ("ferrite", True, {"dynamo_cache": {"dynamo_cache_hit": 1}}, 0),
        ("inductor", False, {"aot_autograd": {"autograd_cache_miss": 1}, "inductor": {"fxgraph_cache_hit": 1}}, 1),
        ("eager", False, {}, 0),
    ],
)
def test_misses_are_counted(backend: str, keeps_trace: bool, said: dict[str, dict[str, int]], missed: int) -> None:
    assert measure.cache_misses(said, measure.Job("mlp", backend=backend, keeps_trace=keeps_trace)) == missed


def demo_result(first: Mapping[str, float], steady_seconds: Mapping[str, float], difference: float = 0.0) -> Comparison:
    result = make_comparison({name: [value] for name, value in first.items()})
    result.cases = {"case": ("eager", "Inductor", "Ferrite")}
    for name, value in steady_seconds.items():
        metrics = {"steady_call": value, "peak_memory": value * 2**30}
        if name != "eager":
            metrics["difference"] = difference
        result.samples.append(Sample("case", name, 0, 0, metrics))
    return result


def test_the_demo_says_it_when_ferrite_is_slower() -> None:
    result = demo_result(
        {"eager": 0.1, "Inductor": 2.0, "Ferrite": 4.0}, {"eager": 1.0, "Inductor": 0.5, "Ferrite": 2.0}
    )
    text = " ".join(demo.sentences(result))
    assert "2.0x later than by Inductor" in text
    assert "case is slower (2.00x the time)" in text
    assert "2.00x on case" in text
    assert "bit for bit" in text


def test_the_demo_says_it_when_ferrite_is_quicker() -> None:
    result = demo_result(
        {"eager": 0.1, "Inductor": 8.0, "Ferrite": 4.0}, {"eager": 1.0, "Inductor": 0.5, "Ferrite": 0.5}, 2e-6
    )
    text = " ".join(demo.sentences(result))
    assert "2.0x sooner than by Inductor" in text
    assert "case is faster (0.50x the time)" in text
    assert "agree with eager's, within 2e-06" in text


def test_the_demo_claims_no_difference_within_the_noise() -> None:
    result = demo_result({"eager": 0.1, "Ferrite": 4.0}, {"eager": 1.0, "Ferrite": 0.98})
    result.missing = {("case", "Inductor"): "no C++ compiler"}
    text = " ".join(demo.sentences(result))
    assert "case takes the same time (0.98x)" in text
    assert "Inductor could not run here: no C++ compiler." in text
    assert "sooner" not in text


def test_the_demo_claims_nothing_where_the_pairs_disagree() -> None:
    result = demo_result({"eager": 0.1, "Ferrite": 4.0}, {"eager": 1.0, "Ferrite": 0.5})
    for turn, seconds in enumerate([1.6, 0.6, 1.5], start=1):
        result.samples.append(Sample("case", "eager", 0, turn, {"steady_call": 1.0}))
        result.samples.append(Sample("case", "Ferrite", 0, turn, {"steady_call": seconds}))
    text = demo.steady_sentence(result)
    assert "no clear difference" in text
    assert "faster" not in text


def test_the_demo_does_not_praise_answers_when_one_was_wrong() -> None:
    result = demo_result({"eager": 0.1, "Inductor": 8.0, "Ferrite": 4.0}, {"eager": 1.0, "Inductor": 0.5})
    result.failures = [Failure("case", "Ferrite", 0, "AssertionError: the answer is 0.3 away from eager's")]
    text = " ".join(demo.sentences(result))
    assert "All compiled answers" not in text


# --- what a measurement measures ----------------------------------------------------------------------------------


def test_differences_are_relative_to_the_largest_element() -> None:
    import torch

    expected = {"x": torch.tensor([1.0, 100.0]), "y": [torch.tensor([1])]}
    found = {"x": torch.tensor([1.0, 101.0]), "y": [torch.tensor([1])]}
    assert measure.largest_difference(found, expected) == pytest.approx(0.01)
    assert measure.largest_difference(expected, expected) == 0.0


def test_another_form_or_a_stray_nan_is_no_small_difference() -> None:
    import torch

    one = torch.ones(3)
    assert measure.largest_difference(one * torch.nan, one * torch.nan) == 0.0
    with pytest.raises(AssertionError, match="NaN"):
        measure.largest_difference(one * torch.nan, one)
    with pytest.raises(AssertionError, match=r"float64 \(3,\)"):
        measure.largest_difference(one.double(), one)
    with pytest.raises(AssertionError, match=r"\(1, 3\)"):
        measure.largest_difference(one[None], one)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can reset the high-water mark of memory")
def test_peak_memory_is_that_of_the_call_alone() -> None:
    """An earlier, higher peak and memory held all along do not count."""
    import torch

    mebibyte = 2**20
    held = torch.ones(128 * mebibyte, dtype=torch.uint8)
    torch.ones(256 * mebibyte, dtype=torch.uint8)
    found = measure.peak_memory(lambda: torch.ones(64 * mebibyte, dtype=torch.uint8))
    assert 60 * mebibyte < found < 80 * mebibyte
    assert held.numel() == 128 * mebibyte


def test_inductor_is_handed_a_compiler_or_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert measure.contender("Inductor", "inductor", model="mlp").missing == "no C++ compiler"
    assert measure.contender("Ferrite", "ferrite", model="mlp").missing == ""
    compiler = tmp_path / "clang++"
    compiler.touch(mode=0o755)
    assert measure.contender("Inductor", "inductor", model="mlp").environment == {"CXX": str(compiler)}


# --- all of it, for real ------------------------------------------------------------------------------------------


def test_first_call_runs_a_real_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "first_call.json"
    arguments = "--models mlp --modes training --size small --rounds 1 --threads 1 --json"
    assert first_call.main([*arguments.split(), str(path)]) == 0
    found = json.loads(path.read_text())
    assert [row["contender"] for row in found["rows"]] == ["aot_eager", "ferrite"]
    assert all(row["metrics"]["first_call"]["median"] > 0 for row in found["rows"])
    assert found["rows"][1]["ratios"]["first_call"]["count"] == 1
    assert "ratio to aot_eager" in capsys.readouterr().out


def test_the_demo_runs_a_real_model_without_a_compiler(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(demo, "MODELS", {"mlp": "MLP"})
    path = tmp_path / "demo.json"
    assert demo.main(["--size", "small", "--turns", "2", "--json", str(path)]) == 0
    eager, inductor, ferrite = json.loads(path.read_text())["rows"]
    assert inductor["trouble"] == "no C++ compiler"
    assert eager["metrics"]["steady_call"]["count"] == ferrite["metrics"]["steady_call"]["count"] == 2
    assert {"first_call", "steady_call", "peak_memory", "held_memory", "difference"} <= set(ferrite["metrics"])
    assert "compiled answers" in capsys.readouterr().out
