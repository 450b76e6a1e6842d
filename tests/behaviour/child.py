"""Runs Python code in a fresh process, where nothing is imported or compiled yet."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 300


@dataclass
class Child:
    """A running process. `finish` gives its last line of output, and fails with its errors if it failed."""

    process: subprocess.Popen[str]
    errors: str = ""
    output: str = ""

    def finish(self) -> str:
        self.output, self.errors = self.process.communicate(timeout=PATIENCE)
        assert self.process.returncode == 0, self.errors[-4000:]
        lines = self.output.strip().splitlines()
        return lines[-1] if lines else ""


def run_python(
    code: str,
    *arguments: str,
    environment: dict[str, str] | None = None,
    folder: Path | None = None,
    wait: bool = True,
    under: tuple[str, ...] = (),
) -> Child:
    """Start `code` in a new process; with `wait`, also finish it; `under`: a command that starts another one. Ferrite's
    own variables are not inherited, and its cache is off."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("FERRITE_", "TORCH"))}
    variables = inherited | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "FERRITE_CACHE": "off"}
    variables |= environment or {}
    command = [*under, sys.executable, "-c", code, *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables, cwd=folder or ROOT
    )
    child = Child(process)
    if wait:
        child.finish()
    return child


def installed(folder: Path) -> dict[str, str]:
    """The environment of a process in which Ferrite is installed with the entry point that `pyproject.toml` names now:
    tests may run from a source tree next to an older installation."""
    project = (ROOT / "pyproject.toml").read_text()
    value = re.search(r'\[project\.entry-points\.torch_dynamo_backends\]\nferrite = "(.*)"', project)
    assert value is not None
    facts = folder / "ferrite-0.1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: ferrite\nVersion: 0.1.0\n")
    (facts / "entry_points.txt").write_text(f"[torch_dynamo_backends]\nferrite = {value[1]}\n")
    return {"PYTHONPATH": f"{folder}:{ROOT}"}
