"""The child of the A/B runner for small functions: what a call costs that does next to nothing.

    echo '{"do": "start", "job": {"function": "one kernel"}}' | python -m bench.measure_function

`first_call` and `steady_call` are those of `bench.measure`, for a function of `bench.overhead` in one thread.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from bench.compare import Timer
from bench.measure import Metrics, Phase, serve

SHORTEST = 0.02  # seconds of calls behind a sample


class FunctionMeasurement:
    """One function of `bench.overhead` through Ferrite."""

    def start(self, job: Mapping[str, Any], phase: Phase) -> Metrics:
        phase("importing torch")
        import torch

        from bench.overhead import examples

        torch.set_num_threads(1)  # nothing here is worth a team
        torch.set_grad_enabled(False)
        function, x = examples()[job["function"]]
        phase("first call")
        before = time.perf_counter()
        compiled = torch.compile(function, backend="ferrite")
        compiled(x)
        seconds = time.perf_counter() - before
        self.timer = Timer(lambda: compiled(x), warm_up=3, shortest=SHORTEST, clock=time.perf_counter)
        return {"first_call": seconds}

    def turn(self, phase: Phase) -> Metrics:
        phase("steady calls")
        return {"steady_call": self.timer.sample()}

    def finish(self, phase: Phase) -> Metrics:
        return {}


if __name__ == "__main__":
    serve(FunctionMeasurement())
