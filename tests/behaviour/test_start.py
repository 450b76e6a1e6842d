"""The first use of Ferrite in a process: found by name from many threads at once, sharing the threads of torch."""

from __future__ import annotations

from pathlib import Path

from tests.behaviour.child import installed, run_python

FIRST_COMPILES = """
import sys, threading
import torch

failures, results = [], []
gate = threading.Barrier(8)
sys.setswitchinterval(1e-6)

def first():
    gate.wait()
    try:
        results.append(torch.compile(lambda x: x + 1, backend="ferrite"))
    except BaseException as error:
        failures.append(f"{type(error).__name__}: {error}")

threads = [threading.Thread(target=first) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not failures, failures
assert len(results) == 8
from torch._dynamo.backends.registry import lookup_backend
import ferrite.backend
assert lookup_backend("ferrite") is ferrite.backend.compile
print(results[0](torch.ones(2)).tolist())
"""


def test_the_first_compile_in_eight_threads_at_once(tmp_path: Path) -> None:
    child = run_python(FIRST_COMPILES, environment=installed(tmp_path))
    assert child.output.strip() == "[2.0, 2.0]"


def test_a_program_that_registered_the_backend_itself(tmp_path: Path) -> None:
    code = """
import torch, ferrite.backend
torch._dynamo.register_backend(ferrite.backend.compile, name="ferrite")
import ferrite.registration
print(torch.compile(lambda x: x + 1, backend="ferrite")(torch.ones(2)).tolist())
"""
    assert run_python(code, environment=installed(tmp_path)).output.strip() == "[2.0, 2.0]"


TWO_RUNTIMES = """
import ctypes, os, shutil, sys
import torch
torch.set_num_threads(2)
own = os.path.join(os.path.dirname(torch.__file__), "lib", "libgomp.so.1")
if not os.path.exists(own):  # torch is linked with the system's
    own = next(line.split()[-1] for line in open("/proc/self/maps") if "libgomp" in line)
other = os.path.join(sys.argv[1], "libgomp-a34b3233.so.1.0.0")
shutil.copyfile(own, other)
ctypes.CDLL(other)

x = torch.randn(1 << 20)
(x * 2).sum()  # by two threads: torch's runtime has started its pool
compiled = torch.compile(lambda x: (x * 2 + 1).sin(), backend="ferrite", options={"strict": True})
torch.set_num_threads(1)
compiled(x)
torch.set_num_threads(2)
before = set(os.listdir("/proc/self/task"))
torch.testing.assert_close(compiled(x), (x * 2 + 1).sin())
print(len(before) > 1, len(set(os.listdir("/proc/self/task")) - before))
"""


def test_kernels_run_in_the_pool_of_threads_that_torch_is_bound_to(tmp_path: Path) -> None:
    """Another library may have brought an OpenMP runtime of its own, which would start threads of its own."""
    child = run_python(TWO_RUNTIMES, str(tmp_path), environment={"OMP_NUM_THREADS": "2"})
    assert child.output.strip() == "True 0"
