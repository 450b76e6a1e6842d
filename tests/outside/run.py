"""Runs modules with a backend, each in a process of its own, and keeps the results below `results/outside`.

What `aot_eager` does is measured once for a version of torch, and asked for again by `--fresh` only. A run that was cut
off is carried on by `--keep all`: results that are there stay, and the tests that have none are run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from .results import Result, read, write

PROJECT = Path(__file__).resolve().parents[2]
RESULTS = PROJECT / "results" / "outside"
BASE = "aot_eager"
KEEP: dict[str, Callable[[Result], bool]] = {
    "none": lambda _: False,
    "passed": lambda result: result.status == "pass",
    "all": lambda _: True,
}
NEEDED = ("expecttest", "hypothesis", "parameterized", "psutil", "scipy")  # the extra `outside` of the project


@dataclass(frozen=True)
class Run:
    root: Path
    seconds: float  # of processor time that a test may take
    alone: bool = False  # each test in a process of its own
    keep: str = "none"  # results of an earlier run that stand, one of `KEEP`: the other tests are run

    def base(self, module: str, fresh: bool) -> dict[str, Result]:
        """What each test of a module does with `aot_eager`."""
        place = RESULTS / f"{BASE}-{version('torch')}" / _file(module)
        if fresh or not place.exists():
            self._run(module, BASE, None, place, KEEP["none"] if fresh else KEEP["all"])
        return read(place)

    def with_backend(self, module: str, backend: str, names: Collection[str]) -> dict[str, Result]:
        place = RESULTS / backend / _file(module)
        self._run(module, backend, names, place, KEEP[self.keep])
        return {name: result for name, result in read(place).items() if name in names}

    def _run(
        self, module: str, backend: str, names: Collection[str] | None, place: Path, keeps: Callable[[Result], bool]
    ) -> None:
        """The results appear at `place` when all are there. Raises `RuntimeError` if the module cannot be loaded."""
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="outside-") as folder:  # tests write where they are
            out = place.with_suffix(".part")
            kept = {name: one for name, one in (read(place) | read(out)).items() if keeps(one)}
            write(out, kept.values())  # the child runs what is not in it
            if names is not None and kept.keys() >= set(names):
                out.replace(place)
                return
            words = [sys.executable, "-m", "tests.outside.child", self.root, module, backend, out]
            words += ["--seconds", self.seconds]
            if names is not None:
                chosen = Path(folder, "names")
                chosen.write_text("\n".join(names))
                words += ["--only", chosen]
            if self.alone:
                words.append("--alone")
            child = subprocess.run(
                list(map(str, words)), cwd=folder, env=_environment(folder), capture_output=True, text=True
            )
            if child.returncode:
                raise RuntimeError(f"{module} with {backend}: exit code {child.returncode}\n{child.stderr[-3000:]}")
            out.replace(place)


def _environment(folder: str) -> dict[str, str]:
    """Draws are compared with eager's; graphs of one run are cached for that run."""
    ours = {
        "PYTHONPATH": os.pathsep.join([str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "FERRITE_CACHE_DIR": str(Path(folder, "cache")),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "FERRITE_FALLBACK_RANDOM": "1",
    }
    return {**os.environ, **ours}


def _file(module: str) -> str:
    return module.replace("/", ".") + ".jsonl"
