"""Many processes, and processes that die: nobody reads half a file, and a second process compiles nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ferrite import cache
from ferrite.artifact.store import GRAPHS, OBJECTS
from tests.behaviour.child import ROOT, run_python

pytestmark = pytest.mark.long

# Compiles for inference and for training, with a pass of its own; says what became of it, as JSON.
COMPILE = """
import json, os, sys
started = []
forbidden = ("subprocess.Popen", "os.fork", "os.forkpty", "os.exec", "os.posix_spawn", "os.system", "os.spawn")
import torch, torch._dynamo
import ferrite
from ferrite import caching
from tests.cache.subject import with_inner

sys.addaudithook(lambda event, arguments: started.append(event) if event in forbidden else None)

def function(x, w):
    return torch.softmax(x @ w, -1).sum(0)

ferrite.register_pass("post_grad", with_inner)
outcomes, values = [], []
for needs_grad in (False, True):
    x = torch.linspace(-2, 2, 32).reshape(4, 8).requires_grad_(needs_grad)
    w = torch.linspace(-1, 1, 64).reshape(8, 8).requires_grad_(needs_grad)
    torch._dynamo.reset()
    result = torch.compile(function, backend="ferrite")(x, w)
    outcomes.append(caching.latest().outcome)
    values.append(result.detach().numpy().tobytes().hex())
    if needs_grad:
        result.square().sum().backward()
        values += [x.grad.numpy().tobytes().hex(), w.grad.numpy().tobytes().hex()]
compilers = ("compilation", "pipeline", "schedule", "lower.graph", "graph.pre_grad", "native.builder", "loops.nodes")
loaded = [name for name in compilers if f"ferrite.{name}" in sys.modules]
told = {"outcomes": outcomes, "values": values, "started": started, "loaded": loaded}
print(json.dumps(told | {"key": caching.latest().key}))
"""


def test_two_at_once_then_one_without_tools(tmp_path: Path) -> None:
    """The first two race; the third has no PATH, another hash seed, a folder that it may only read, and starts
    nothing, not even our own compiler."""
    folder = tmp_path / "given"
    given = {"FERRITE_CACHE": "on", "FERRITE_CACHE_DIR": str(folder), "HOME": str(tmp_path / "home")}
    racing = [run_python(COMPILE, environment=given | {"PYTHONHASHSEED": str(n)}, wait=False) for n in (1, 2)]
    first, second = (json.loads(child.finish()) for child in racing)
    assert not any(child.errors for child in racing)
    assert not (tmp_path / "home").exists()
    made = {path: path.read_bytes() for kind in (GRAPHS, OBJECTS) for path in (folder / kind).iterdir()}
    assert len(cache.entries(folder)) == 2
    assert cache.verify(folder).is_sound

    alone = given | {"PATH": "/nonexistent", "PYTHONHASHSEED": "3", "FERRITE_CACHE": "read-only"}
    child = run_python(COMPILE, environment=alone)
    third = json.loads(child.output.splitlines()[-1])
    assert third["outcomes"] == ["hit", "hit"]
    assert third["started"] == []
    assert third["loaded"] == [] != first["loaded"]
    assert first["key"] == second["key"] == third["key"]
    assert first["values"] == second["values"] == third["values"]
    assert made == {path: path.read_bytes() for kind in (GRAPHS, OBJECTS) for path in (folder / kind).iterdir()}
    assert not child.errors


def write(*arguments: str) -> None:
    """Without torch: see `tests/cache/writer.py`."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.cache.writer", *arguments], cwd=ROOT, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr[-2000:]


def test_killed_while_writing(tmp_path: Path) -> None:
    write("kill", str(tmp_path / "cache"), "150", "1")
    assert list((tmp_path / "cache").rglob(".aside-*"))  # some were killed in the middle


def test_sixteen_race_on_the_same_names(tmp_path: Path) -> None:
    write("race", str(tmp_path / "cache"), "16")


NOBODY = 54321  # a number that the system has no name and no home for
RIGHT_ANSWER = """
import os, torch
x = torch.linspace(-2, 2, 16).reshape(4, 4)
found = torch.compile(lambda x: x.softmax(-1) + 1, backend="ferrite")(x)
print(os.getuid(), torch.allclose(found, x.softmax(-1) + 1))
"""


def test_a_user_whom_the_system_does_not_know() -> None:
    """No name, no home, no variables: the cache is off, which is said once, and the answer is right."""

    become = shutil.which("setpriv")

    def as_nobody(program: str) -> subprocess.CompletedProcess[str]:
        user = [str(become), f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
        bare = {"PATH": os.environ.get("PATH", ""), "PYTHONPATH": str(ROOT)}
        return subprocess.run([*user, sys.executable, "-c", program], cwd="/", env=bare, capture_output=True, text=True)

    if become is None or as_nobody("import ferrite").returncode != 0:
        pytest.skip("only root may become another user, who must be able to read the interpreter and the package")
    ran = as_nobody(RIGHT_ANSWER)
    assert ran.stdout.split() == [str(NOBODY), "True"], ran.stderr[-2000:]
    assert ran.stderr.count("cache is off: this user has no home") == 1
