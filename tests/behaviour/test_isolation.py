"""In a fresh process: no compiler on the path, no child process, no import needed, no Inductor."""

from __future__ import annotations

import pytest

from tests.behaviour.child import run_python

pytestmark = pytest.mark.long

WORK = """
import torch

options = {"strict": True, "fallback_random": True}

def work():
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(8, 2))
    x = torch.randn(3, 4)
    for dynamic in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="ferrite", dynamic=dynamic, options=options)
        torch.manual_seed(0)
        found = compiled(x)
        torch.manual_seed(0)
        expected = model(x)
        torch.testing.assert_close(found, expected)
        gradients = torch.autograd.grad(expected.sum(), list(model.parameters()))
        found.sum().backward()
        for parameter, gradient in zip(model.parameters(), gradients):
            torch.testing.assert_close(parameter.grad, gradient)
            parameter.grad = None
        with torch.no_grad():
            torch.compile(model.eval(), backend="ferrite", dynamic=dynamic, options=options)(x)
            model.train()
"""

WITHOUT_TOOLS = (
    WORK
    + """
import multiprocessing.process, os, subprocess, sys
import torch._dynamo, torch._functorch.aot_autograd  # what PyTorch itself does at import is not ours

started = []
watched = {"subprocess.Popen", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system"}
sys.addaudithook(lambda event, args: started.append((event, str(args)[:200])) if event in watched else None)

def refuse(*arguments, **keywords):
    raise AssertionError("a compile started a process")

subprocess.Popen.__init__ = refuse
os.fork = os.posix_spawn = os.posix_spawnp = os.system = refuse
multiprocessing.process.BaseProcess.start = refuse
assert os.environ["PATH"] == "/nonexistent"
work()
assert started == [], started
print("worked")
"""
)


def test_without_a_compiler_on_the_path_and_without_child_processes() -> None:
    assert run_python(WITHOUT_TOOLS, environment={"PATH": "/nonexistent"}, wait=False).finish() == "worked"


WITHOUT_IMPORT = """
import sys, torch
assert "ferrite" in torch._dynamo.list_backends()
assert not [name for name in sys.modules if name.startswith("ferrite")]
with torch.no_grad():
    assert torch.equal(torch.compile(lambda x: x + 1, backend="ferrite")(torch.ones(2)), torch.full((2,), 2.0))
assert "ferrite.backend" in sys.modules
assert "torch._inductor.lowering" not in sys.modules
assert "rich" not in sys.modules
print("worked")
"""


def test_without_an_import_and_without_inductors_lowering() -> None:
    assert run_python(WITHOUT_IMPORT, wait=False).finish() == "worked"


IMPORT_ALONE = """
import sys
import ferrite
assert "torch._dynamo" not in sys.modules
ferrite.list_options(), ferrite.list_mode_options()
print("worked")
"""


def test_importing_the_package_is_light() -> None:
    assert run_python(IMPORT_ALONE, wait=False).finish() == "worked"


ENVIRONMENT = """
import os, torch
import ferrite
x = torch.ones(2)
assert torch.equal(torch.compile(lambda x: x.view(2) + 1, backend="ferrite")(x), x + 1)
record = ferrite.last_record()
assert all(run.before is not None for run in record.passes if run.changed is not None), "FERRITE_KEEP_TEXT"
assert any("disabled" in run.note for run in record.passes if run.name == "view_to_reshape"), "FERRITE_DISABLE"
assert torch._dynamo.utils.counters["ferrite"]["scheme_normal"] == 1
print("worked")
"""


def test_environment() -> None:
    """`tests/unit/test_options.py` says what is refused."""
    environment = {"FERRITE_KEEP_TEXT": "1", "FERRITE_DISABLE": "view_to_reshape, joint"}
    assert run_python(ENVIRONMENT, environment=environment, wait=False).finish() == "worked"


SERIALIZE = """
import torch
work_with = torch.compile(lambda x: (x @ x).sin(), backend="ferrite")
x = torch.ones(3, 3)
assert torch.allclose(work_with(x), (x @ x).sin())
assert torch._dynamo.utils.counters["ferrite"]["scheme_serialize"] == 1
print("worked")
"""


def test_compile_mode_of_the_environment() -> None:
    assert run_python(SERIALIZE, environment={"FERRITE_COMPILE_MODE": "serialize"}, wait=False).finish() == "worked"


FORK = """
import os, torch
f = torch.compile(lambda x: (x @ x).sin(), backend="ferrite", options={"strict": True})
x = torch.ones(3, 3)
f(x)
child = os.fork()
if child == 0:
    ok = torch.allclose(f(x), (x @ x).sin())
    os._exit(0 if ok else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
print("worked")
"""


def test_a_forked_child_calls_what_the_parent_compiled() -> None:
    assert run_python(FORK, wait=False).finish() == "worked"
