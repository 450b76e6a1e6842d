"""Did a change make anything slower? Two commits of Ferrite, interleaved in one run.

    python -m bench.versus OLD NEW
    python -m bench.versus main~20 main --models bert resnet --modes inference --rounds 5
    python -m bench.versus HEAD HEAD             # what this machine's noise looks like

Each commit's package is checked out into a folder of its own and measured by today's benchmarks: the functions of
`bench.overhead` (what a call costs), and first and steady calls of models of the zoo. The ratio is time of NEW by time
of OLD, pair by pair: above 1 is slower. `changes` lists the geometric mean for each metric. The exit status is 1 if a
case gave no result, and with `--enforce` also if a geometric mean is above `LIMIT`.
"""

from __future__ import annotations

import argparse
import compileall
import io
import math
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from bench.compare import ROOT, Case, Comparison, Contender, Plan, compare
from bench.first_call import MODES
from bench.show import Column, open_console, show, stoppable, watcher

OLD, NEW = "old", "new"
FUNCTIONS = ("one kernel", "20 kernels", "mlp, batch 1", "mlp, batch 32")
MODELS = ("mlp", "bert", "gpt2", "resnet", "mobilenet_v2", "convnext")
LIMIT = 1.02
COLUMNS = (
    Column("first call", "first_call"),
    Column("ratio", "first_call", ratio=True),
    Column("steady call", "steady_call"),
    Column("ratio", "steady_call", ratio=True),
)


def check_out(commit: str, folder: Path) -> None:
    """The package of a commit with the benchmarks of this tree beside it. Bytecode is made here, for a first call that
    compiles Ferrite's own sources would count them."""
    command = ["git", "archive", commit, "ferrite", "pyproject.toml"]
    packed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    _write_entry_points(folder)
    shutil.copytree(ROOT / "bench", folder / "bench", ignore=shutil.ignore_patterns("__pycache__"))
    compileall.compile_dir(folder, quiet=1)


def _write_entry_points(folder: Path) -> None:
    """By which PyTorch finds the backend of this commit: those that are installed name modules of another one."""
    sections = re.findall(
        r"^\[project\.entry-points\.(\S+)\]\n((?:.+\n)*)", (folder / "pyproject.toml").read_text(), re.M
    )
    about = folder / "ferrite-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: ferrite\nVersion: 0\n")
    (about / "entry_points.txt").write_text(
        "".join(f"[{group}]\n{names}\n" for group, names in sections).replace('"', "")
    )


def model_cases(trees: dict[str, Path], models: list[str], modes: list[str], size: str) -> list[Case]:
    cases = []
    for model in models:
        for mode in modes:
            job = {"model": model, "mode": mode, "size": size, "backend": "ferrite"}
            cases.append(Case(f"{model} {mode}", tuple(Contender(n, job, root=tree) for n, tree in trees.items())))
    return cases


def function_cases(trees: dict[str, Path]) -> list[Case]:
    module = "bench.measure_function"
    return [
        Case(function, tuple(Contender(n, {"function": function}, module, root=tree) for n, tree in trees.items()))
        for function in FUNCTIONS
    ]


def changes(comparison: Comparison) -> dict[str, float]:
    """The geometric mean over cases of NEW by OLD, for each metric that every case has."""
    found: dict[str, list[float]] = {}
    for case in comparison.cases:
        for metric, ratio in comparison.row(case, NEW).ratios.items():
            if metric in ("first_call", "steady_call"):
                found.setdefault(metric, []).append(ratio.median)
    return {metric: math.exp(sum(map(math.log, ratios)) / len(ratios)) for metric, ratios in found.items()}


def verdict(comparison: Comparison, limit: float) -> list[str]:
    """A sentence for each geometric mean above the limit, and for each case without a ratio."""
    means = changes(comparison).items()
    slower = [f"{metric}: {mean:.3f}x, at most {limit}x wanted" for metric, mean in means if mean > limit]
    missing = [case for case in comparison.cases if "steady_call" not in comparison.row(case, NEW).ratios]
    return slower + [f"{case}: no ratio" for case in missing]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.versus", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("old", help="a commit")
    parser.add_argument("new", help="a commit")
    parser.add_argument("--models", nargs="*", default=list(MODELS), metavar="NAME", help="names of bench.zoo")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--size", default="real", choices=("small", "real"))
    parser.add_argument("--no-functions", action="store_true", help="models only")
    parser.add_argument("--rounds", type=int, default=3, help="fresh processes for each commit (default: 3)")
    parser.add_argument("--turns", type=int, default=5, help="turns of steady calls in a round (default: 5)")
    parser.add_argument("--threads", type=int, help="default: Ferrite's own choice")
    parser.add_argument("--cache", default="cold", choices=("cold", "warm"))
    parser.add_argument("--enforce", action="store_true", help=f"exit with 1 if a geometric mean is above {LIMIT}")
    parser.add_argument("--json", type=Path, help="where to write the numbers (default: a new file under results/)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    wanted = parse(arguments)
    console = open_console()
    with tempfile.TemporaryDirectory(prefix="versus-") as scratch:
        trees = {OLD: Path(scratch) / OLD, NEW: Path(scratch) / NEW}
        check_out(wanted.old, trees[OLD])
        check_out(wanted.new, trees[NEW])
        cases = [] if wanted.no_functions else function_cases(trees)
        cases += model_cases(trees, wanted.models, wanted.modes, wanted.size)
        plan = Plan(rounds=wanted.rounds, turns=wanted.turns, threads=wanted.threads, cache=wanted.cache)
        title = f"{wanted.new} against {wanted.old}"
        comparison = compare(title, cases, baseline=OLD, plan=plan, progress=watcher(console))
    show(console, comparison, COLUMNS, who="commit")
    for metric, mean in changes(comparison).items():
        console.print(f"{metric}, geometric mean of {len(comparison.cases)} cases: {mean:.3f}x", highlight=False)
    told = verdict(comparison, LIMIT)
    for line in told:
        console.print(line, highlight=False)
    console.print(f"All numbers: {comparison.save('versus', wanted.json)}", soft_wrap=True)
    return 1 if any("no ratio" in line for line in told) or (told and wanted.enforce) else 0


if __name__ == "__main__":
    sys.exit(stoppable(main))
