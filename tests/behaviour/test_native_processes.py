"""Machine code in processes that fork, in many threads, at the end of the interpreter, and under Ctrl-C.

Each scenario runs in a fresh process with a deadline, so that a hang is a failure. A forked child has lost the threads
of its parent: there kernels run alone, and nothing here asks eager for an op that would share its work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.behaviour.child import ROOT

DEADLINE = 240  # seconds; a scenario takes a few

START = (
    f"""
import faulthandler
faulthandler.dump_traceback_later({DEADLINE - 20}, exit=True)  # if it hangs, it says where
"""
    + """
import os, signal, sys, threading, time
import numpy, torch
torch.set_num_threads(2)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background is started deaf to Ctrl-C

def compiled(function):
    return torch.compile(function, backend="ferrite", fullgraph=True, options={"strict": True, "executor": "native"})

f = compiled(lambda x: ((x * 2 + 1).sin(), x.sum()))
x = torch.from_numpy(numpy.random.default_rng(0).standard_normal(1 << 20, dtype=numpy.float32))
expected = [result.clone() for result in f(x)]  # by two threads, which exist from now on

def is_right():
    # NumPy compares: in a forked child eager would wait for threads that are gone.
    return all(numpy.array_equal(a.numpy(), b.numpy()) for a, b in zip(f(x), expected, strict=True))

def in_child(work):
    child = os.fork()
    if child == 0:
        signal.alarm(120)  # the way out of a hang
        os._exit(0 if work() else 1)
    return child

def succeeded(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

assert is_right()
"""
)


def last_line_of(code: str, *, codes: tuple[int, ...] = (0,)) -> str:
    """What a scenario prints last. It and all that it started end by the deadline, it with one of these codes."""
    variables = {
        name: value for name, value in os.environ.items() if not name.startswith(("FERRITE_", "TORCH", "OMP_"))
    }
    process = subprocess.Popen(
        [sys.executable, "-c", START + code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=variables | {"PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
        pytest.fail(f"it hangs\n{output[-2000:]}\n{errors[-4000:]}")
    assert process.returncode in codes, errors[-4000:]
    return output.strip().splitlines()[-1]


FORK = """
# A child calls what its parent compiled; so does a child of the child, and a thread that the child starts.
def in_a_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(is_right()))
    thread.start()
    thread.join()
    return found == [True]

assert succeeded(in_child(is_right))
assert succeeded(in_child(lambda: succeeded(in_child(is_right))))
assert succeeded(in_child(in_a_thread))
assert is_right()

# Two children at once, while the parent goes on.
children = [in_child(is_right) for _ in range(2)]
assert is_right()
assert all([succeeded(child) for child in children])

# A child compiles.
def compiles():
    g = compiled(lambda x: x * 3 - 1)
    return numpy.array_equal(g(x).numpy(), x.numpy() * 3 - 1)

assert succeeded(in_child(compiles))

# An error in a child is an error like any other.
pick = compiled(lambda x, n: x[n] + 1)
good = torch.from_numpy(numpy.arange(1 << 18))
bad = torch.from_numpy(numpy.where(good.numpy() == 1 << 17, 1 << 20, good.numpy()))

def raises():
    pick(x, good)
    try:
        pick(x, bad)
    except IndexError as error:
        pick(x, good)
        return str(error) == "index 1048576 is out of bounds for dimension 0 with size 1048576"
    return False

assert raises()
assert succeeded(in_child(raises))

# A child is killed in the middle of a kernel.
def forever():
    while True:
        f(x)

child = in_child(forever)
time.sleep(0.3)
os.kill(child, signal.SIGKILL)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
assert is_right()

# Fork while other threads of the parent are inside of a kernel. They call it directly: a fork while a thread is inside
# of Dynamo may leave Dynamo locked in the child, with any backend.
from ferrite.artifact.kernels import build_code, link
from ferrite.loops.text import parse_program

text = "def kernel(x: f32[1048576], y: out(f32[1048576])):\\n    for i in box(1048576):\\n        y[i] = sin(x[i])\\n"
programs = [parse_program(text)]
kernel = link(programs, build_code(programs)[0]).functions["kernel"]
stop = threading.Event()

def busy():
    y = torch.from_numpy(numpy.empty_like(x.numpy()))
    while not stop.is_set():
        kernel(x, y)

workers = [threading.Thread(target=work) for work in (busy, busy)]
for worker in workers:
    worker.start()
results = [succeeded(in_child(is_right)) for _ in range(5)]
stop.set()
for worker in workers:
    worker.join()
assert results == [True] * 5, results
assert is_right()
print("worked")
"""

FORKS = """
# Two threads fork at once, while others make machine code; so does every child.
from ferrite.native.build import build
from ferrite.native.target import host

def makes():
    return build("define i32 @f(i32 %x) { ret i32 %x }", host())

stop, results = threading.Event(), []

def busy():
    while not stop.is_set():
        makes()

def forks():
    results.extend(succeeded(in_child(makes)) for _ in range(20))

sys.setswitchinterval(1e-6)
workers, forking = [threading.Thread(target=busy) for _ in range(3)], [threading.Thread(target=forks) for _ in range(2)]
for thread in (*workers, *forking):
    thread.start()
for thread in forking:
    thread.join()
stop.set()
for thread in workers:
    thread.join()
assert results == [True] * 40, results
print("worked")
"""

POOL = """
import multiprocessing
from torch.utils.data import DataLoader, Dataset

def work(n):
    return is_right() and float(f(torch.from_numpy(numpy.full(1 << 18, n, numpy.float32)))[1]) == n * (1 << 18)

with multiprocessing.get_context("fork").Pool(2) as pool:
    assert pool.map(work, range(6)) == [True] * 6

scale = compiled(lambda x: x * 2)

class Numbers(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, n):
        assert is_right()
        return scale(torch.from_numpy(numpy.full(1 << 16, n, numpy.float32)))

def collate(items):
    return compiled_stack(*items)

compiled_stack = compiled(lambda a, b: torch.stack([a, b]) + 1)
for workers in (0, 2):
    method = "fork" if workers else None
    loader = DataLoader(Numbers(), 2, num_workers=workers, collate_fn=collate, multiprocessing_context=method)
    assert [batch[:, 5].tolist() for batch in loader] == [[4.0 * n + 1, 4.0 * n + 3] for n in range(4)]
assert is_right()
print("worked")
"""

THREADS = """
def in_threads(count, work):
    failures = []

    def guarded(n):
        try:
            assert work(n)
        except BaseException as error:
            failures.append(repr(error))

    threads = [threading.Thread(target=guarded, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures

# One function in many threads, whose kernels have memory of their own.
centre = compiled(lambda x: x.view(64, -1) - x.view(64, -1).mean(1, keepdim=True))
inputs = [x[n << 16 : (n + 4) << 16].clone() for n in range(6)]
answers = [centre(each).clone() for each in inputs]
in_threads(6, lambda n: all(torch.equal(centre(inputs[n]), answers[n]) for _ in range(10)))

# A function of its own for each thread, compiled there.
def own(n):
    g = compiled(lambda x: x * n + 1)
    return all(torch.equal(g(inputs[n]), inputs[n] * n + 1) for _ in range(5))

in_threads(4, own)

# Threads with errors beside threads without.
pick = compiled(lambda x, n: x[n] + 1)
good = torch.arange(1 << 18)
bad = good.clone()
bad[1 << 17] = 1 << 20
picked = pick(x, good).clone()

def errors_here_and_there(n):
    for _ in range(5):
        if n % 2:
            try:
                pick(x, bad)
                return False
            except IndexError as error:
                assert "index 1048576 is out of bounds" in str(error)
        elif not torch.equal(pick(x, good), picked):
            return False
    return True

in_threads(4, errors_here_and_there)

# Other numbers of threads, between calls and in threads that differ in it.
for count in (1, 2, 3, 7, 2):
    torch.set_num_threads(count)
    assert is_right()

# Ctrl-C in the middle of a call that takes long.
long = compiled(lambda x: x.sin().cos().tan().exp().log1p().tanh().erf().lgamma())
much = x.double().repeat(8)
want = long(much).clone()
started = time.perf_counter()
long(much)
duration = time.perf_counter() - started
heard = []

def press():
    # Again until it is heard: Python drops an interrupt that arrives inside of a finalizer or of Dynamo's guards. No
    # lock is shared with the thread that is interrupted: it might keep it.
    time.sleep(duration * 1.5)
    while not heard:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10 + 10 * duration)

threading.Thread(target=press, daemon=True).start()
try:
    while True:
        long(much)
except KeyboardInterrupt:
    heard.append(True)
assert torch.equal(long(much), want)
assert is_right()

print("worked")
"""

END = """
def forever():
    while True:
        f(x)

threading.Thread(target=forever, daemon=True).start()
time.sleep(0.1)
print("worked", flush=True)
"""


@pytest.mark.parametrize("code", [FORK, FORKS, POOL, THREADS], ids=["fork", "forks", "pools_and_loaders", "threads"])
def test_nothing_hangs_and_all_answers_are_right(code: str) -> None:
    assert last_line_of(code) == "worked"


def test_the_interpreter_ends_while_a_thread_is_inside_of_a_kernel() -> None:
    """It must not hang. Eager's own ops abort there: the thread is ended in the middle of C++."""
    assert last_line_of(END, codes=(0, -signal.SIGABRT, -signal.SIGSEGV)) == "worked"


# ---- the number of threads


def norms(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return torch.nn.functional.layer_norm(x, (x.shape[1],), w), x.softmax(1), x.norm()


def sums(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return x.sum(), x.sum(0), x.sum(1), x.var(0), (x * w).mean(), x.amax(0), x.argmax(1)


def scans(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return x.cumsum(0), x.cumsum(1), torch.zeros(5, x.shape[1]).index_add(0, torch.arange(x.shape[0]) % 5, x)


@pytest.fixture
def as_before() -> Iterator[None]:
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize("function", [norms, sums, scans])
@pytest.mark.parametrize("sizes", [(1023, 257), (3, 300_000)], ids=str)
def test_results_do_not_depend_on_the_number_of_threads(function: Callable[..., Any], sizes: tuple[int, int]) -> None:
    x, w = torch.randn(sizes), torch.randn(sizes[1])
    compiled = torch.compile(
        function, backend="ferrite", fullgraph=True, options={"strict": True, "executor": "native"}
    )
    answers = []
    for count in (1, 2, 3, 7):
        torch.set_num_threads(count)
        answers.append(compiled(x, w))
    for answer in answers[1:]:
        assert all(torch.equal(a, b) for a, b in zip(answer, answers[0], strict=True))


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize("count", [2, 3, 7])
def test_pieces_that_threads_take_from_each_other_are_done_once(count: int) -> None:
    """Enough for every thread to leave the last quarter of its part to whoever is done; each call adds to the last."""
    compiled = torch.compile(
        lambda x: x.add_(1), backend="ferrite", fullgraph=True, options={"strict": True, "executor": "native"}
    )
    torch.set_num_threads(count)
    x = torch.zeros(8 * 32_768 * count + 12_345)
    for _ in range(20):
        compiled(x)
    assert torch.equal(x, torch.full_like(x, 20))
