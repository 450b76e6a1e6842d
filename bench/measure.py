"""The child of the A/B runner: measures one torch model under one backend, alone in its process.

    echo '{"do": "start", "job": {"model": "mlp", "size": "small", "backend": "ferrite"}}' | python -m bench.measure

What the numbers mean:

- `first_call`: seconds from before `torch.compile` until the first result is there (training: until the gradients are).
  Importing torch and transformers and building the model come before the clock starts; whatever the compile imports
  on its own counts.
- `first_call_cpu`: processor time of this process meanwhile, all threads, child processes not counted. A busy machine
  disturbs it less than the wall clock.
- `cache_misses`: how often the backend asked its cache in vain during that call, or did not ask; 0 in a warm start.
- `steady_call`: median seconds of a call after warm-up, over the `steady_calls` of one turn. Training is a forward pass
  and a backward pass. The optimizer is left out: it is not compiled here and would cost every contender the same.
- `peak_memory`: bytes that a steady call needs beyond what the process held before it; median of a few calls. On Linux:
  give freed memory back to the system, reset the high-water mark (write 5 to /proc/self/clear_refs), call, then `VmHWM`
  after minus `VmRSS` before. Elsewhere: how far a call raises `ru_maxrss`, which sees only a new record of the process.
- `held_memory`: growth of the process from before the compile until between two steady calls. It holds the code and
  imports of the compiler, and buffers that a compiled model keeps between calls, which `peak_memory` cannot see.
- `difference`: largest distance from eager's answer, as a share of the largest element of that answer. Inference only,
  because dropout draws other numbers in eager. An answer beyond `TOLERANCE` is a failure: speed with a wrong answer is
  not a result.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import shutil
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TextIO

from bench.compare import Contender, one_line

Phase = Callable[[str], None]
Metrics = dict[str, float]

# Sums in another order move a float32 answer by about 1e-6 of its size; deep random models amplify that a little.
TOLERANCE = 1e-3
WARM_UP_CALLS = 3
FEWEST_CALLS = 3  # of a turn
MEMORY_CALLS = 5


@dataclass(frozen=True)
class Job:
    """What to measure. The names are the keys of the JSON job."""

    model: str  # a name of bench.zoo
    size: Literal["small", "real"] = "real"
    mode: Literal["inference", "training"] = "inference"
    backend: str | None = None  # None is eager, without torch.compile
    options: Mapping[str, Any] = field(default_factory=dict)
    dynamic: bool | None = None
    keeps_trace: bool = False  # Dynamo keeps what it made in its own store (docs/cache.md, "Without Dynamo")
    turn_seconds: float = 0.5  # how long one turn of steady calls lasts, at least

    def __post_init__(self) -> None:
        if self.mode not in ("inference", "training"):
            raise ValueError(f'mode is "inference" or "training", not {self.mode!r}')


def contender(name: str, backend: str | None, **job: Any) -> Contender:
    """A contender for `bench.compare`: the job under a backend, in a child that runs this module.

    Inductor needs a C++ compiler; it is handed the one that was found, or keeps a row that says there is none.
    """
    wanted = {**job, "backend": backend}
    if backend != "inductor":
        return Contender(name, wanted)
    compiler = find_cxx()
    if compiler is None:
        return Contender(name, wanted, missing="no C++ compiler")
    return Contender(name, wanted, environment={"CXX": compiler})


def find_cxx() -> str | None:
    """The C++ compiler that Inductor would use ($CXX, else g++), or clang++, which it takes when told to."""
    candidates = filter(None, (os.environ.get("CXX"), "g++", "clang++"))
    return next((found for found in map(shutil.which, candidates) if found), None)


class Measurement(Protocol):
    """What answers the three requests of Note [The wire]."""

    def start(self, job: Mapping[str, Any], phase: Phase) -> Metrics: ...

    def turn(self, phase: Phase) -> Metrics: ...

    def finish(self, phase: Phase) -> Metrics: ...


class ModelMeasurement:
    """One model of the zoo under one backend."""

    def start(self, job: Mapping[str, Any], phase: Phase) -> Metrics:
        self.job = Job(**job)
        phase("importing torch and the model")
        import torch

        from bench.zoo import ZOO

        if self.job.model not in ZOO:
            raise ValueError(f"no model {self.job.model!r}; there are {', '.join(sorted(ZOO))}")
        self.entry = ZOO[self.job.model]
        self.training = self.job.mode == "training"
        example = self.entry.build(self.job.size, training=self.training)
        self.module, self.inputs = example.module, example.inputs
        options = dict(self.job.options)
        if self.job.keeps_trace:
            from bench.plain_results import PlainResults, without_defaults

            torch._dynamo.config.caching_precompile = True
            self.module, options["guard_filter_fn"] = PlainResults(self.module), without_defaults
        self.warm = False
        give_back_freed_memory()
        self.held_at_start = resident_memory()

        phase("first call")
        before, before_cpu = time.perf_counter(), time.process_time()
        if self.job.backend is None:
            self.compiled: Callable[..., Any] = self.module
        else:
            self.compiled = torch.compile(
                self.module,
                backend=self.job.backend,
                options=options or None,
                dynamic=self.job.dynamic,
            )
        self.call()
        metrics = {"first_call": time.perf_counter() - before, "first_call_cpu": time.process_time() - before_cpu}
        metrics["cache_misses"] = float(cache_misses(torch._dynamo.utils.counters, self.job))
        if self.job.keeps_trace and not torch._dynamo.utils.counters["dynamo_cache"]["dynamo_cache_hit"]:
            torch.compiler.save_cache_artifacts()
        return metrics

    def call(self) -> object:
        """One call as a user would make it; what it returns is eager's to check."""
        import torch

        if not self.training:
            with torch.no_grad():
                return self.compiled(**self.inputs)
        self.module.zero_grad(set_to_none=True)
        self.entry.loss(self.compiled(**self.inputs)).backward()
        return None

    def turn(self, phase: Phase) -> Metrics:
        if not self.warm:
            phase("warm-up")
            for _ in range(WARM_UP_CALLS):
                self.call()
            self.warm = True
        phase("steady calls")
        seconds: list[float] = []
        while len(seconds) < FEWEST_CALLS or sum(seconds) < self.job.turn_seconds:
            seconds.append(self._time_call())
        return {"steady_call": statistics.median(seconds), "steady_calls": float(len(seconds))}

    def _time_call(self) -> float:
        before = time.perf_counter()
        self.call()
        return time.perf_counter() - before

    def finish(self, phase: Phase) -> Metrics:
        phase("peak memory")
        gc.collect()
        map_large_blocks()
        metrics = {"peak_memory": float(statistics.median(peak_memory(self.call) for _ in range(MEMORY_CALLS)))}
        if self.training:
            self.module.zero_grad(set_to_none=True)
        give_back_freed_memory()
        metrics["held_memory"] = float(max(0, resident_memory() - self.held_at_start))
        if not self.training and self.job.backend is not None:
            phase("comparing the answer with eager")
            metrics["difference"] = self._difference()
        return metrics

    def _difference(self) -> float:
        import torch

        found = self.call()
        with torch.no_grad():
            expected = self.module(**self.inputs)
        distance = largest_difference(found, expected)
        if distance > TOLERANCE:
            raise AssertionError(f"the answer is {distance:.2g} away from eager's")
        return distance


def cache_misses(counters: Mapping[str, Mapping[str, int]], job: Job) -> int:
    """How often the first call asked a cache of its backend in vain, or did not ask."""
    asked = {
        "ferrite": {"ferrite": ("graph_cache_miss", "graph_cache_bypass")},
        "inductor": {
            "aot_autograd": ("autograd_cache_miss", "autograd_cache_bypass"),
            "inductor": ("fxgraph_cache_miss", "fxgraph_cache_bypass"),
        },
    }.get(str(job.backend), {})
    missed = sum(counters.get(group, {}).get(name, 0) for group, names in asked.items() for name in names)
    traced = job.keeps_trace and not counters.get("dynamo_cache", {}).get("dynamo_cache_hit", 0)
    return missed + int(traced)


def largest_difference(found: object, expected: object) -> float:
    """Over all tensors: the largest distance, as a share of the largest element; raises where even the form differs."""
    import torch
    from torch.utils import _pytree as pytree

    largest = 0.0
    pairs = zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True)
    for one, other in pairs:
        if not isinstance(other, torch.Tensor):
            continue
        if one.shape != other.shape or one.dtype != other.dtype:
            raise AssertionError(
                f"the answer is {one.dtype} {tuple(one.shape)}, eager's {other.dtype} {tuple(other.shape)}"
            )
        one, other = one.double(), other.double()
        apart = (one - other).abs().masked_fill((one == other) | (one.isnan() & other.isnan()), 0.0)
        if apart.isnan().any():
            raise AssertionError("the answer has NaN where eager's has not")
        if apart.numel() and apart.max() > 0:
            largest = max(largest, float(apart.max() / other.abs().max().clamp_min(1e-30)))
    return largest


# --- memory -------------------------------------------------------------------------------------------------------


def peak_memory(call: Callable[[], object]) -> int:
    """Bytes that `call` needs at its peak beyond what the process holds before it."""
    give_back_freed_memory()
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        before = _record_memory()
        call()
        return _record_memory() - before
    before = resident_memory()
    call()
    return max(0, _status("VmHWM") - before)


def resident_memory() -> int:
    """Bytes of memory that the process occupies now (on systems without /proc: that it ever occupied)."""
    try:
        return _status("VmRSS")
    except OSError:
        return _record_memory()


def give_back_freed_memory() -> None:
    """glibc keeps freed blocks; kept ones would hide the next call's needs. Other allocators have no such call."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def map_large_blocks() -> None:
    """Let glibc map every block above 64 KiB on its own, so that what is freed leaves the process at once.

    Otherwise the same call differs by a quarter from time to time, by where in the heap its blocks happen to fall.
    This costs time, so it comes after all timing.
    """
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 64 * 1024)


M_MMAP_THRESHOLD = -3  # from malloc.h


def _status(field_name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field_name + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field_name}")


def _record_memory() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


# --- the child's end of the wire ----------------------------------------------------------------------------------


def serve(measurement: Measurement) -> None:
    """Answer the parent's requests until it closes the line. See Note [The wire] in bench/compare.py."""
    with claimed_output() as wire:

        def send(message: Mapping[str, Any]) -> None:
            wire.write(json.dumps(message) + "\n")
            wire.flush()

        def phase(text: str) -> None:
            send({"phase": text})

        for line in sys.stdin:
            request = json.loads(line)
            try:
                match request["do"]:
                    case "start":
                        metrics = measurement.start(request["job"], phase)
                    case "turn":
                        metrics = measurement.turn(phase)
                    case "finish":
                        metrics = measurement.finish(phase)
                    case other:
                        raise ValueError(f"unknown request {other!r}")
            except Exception as error:  # whatever the contender raises is its result
                send({"failure": one_line(error), "trace": traceback.format_exc()})
                return
            send({"metrics": metrics})


@contextmanager
def claimed_output() -> Iterator[TextIO]:
    """Standard output for the wire alone; what models and compilers print goes to standard error instead."""
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w") as wire:
        os.dup2(2, 1)
        yield wire


if __name__ == "__main__":
    serve(ModelMeasurement())
