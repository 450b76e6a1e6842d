"""What does a call cost when its kernels do next to nothing? Ferrite beside Inductor, eager and an empty backend.

    python -m bench.overhead                     # what `make bench-overhead` runs
    python -m bench.overhead --rounds 101

Tensors are tiny, so what is measured is what stands around the kernels. `floor` is AOTAutograd with a backend that does
nothing: what Dynamo and AOTAutograd take of every call. All contenders are called in turns in one process; the ratio is
time by Inductor's. The exit status is 1 if a case gave no result, and with `--enforce` also if a limit is broken.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bench.compare import Comparison, interleave
from bench.measure import find_cxx
from bench.show import Column, open_console, show, stoppable, watcher

CHAIN = 20
SHARE = 0.7  # of Inductor's time
MOST_ONCE, MOST_EACH = 3e-6, 0.4e-6  # seconds that one kernel, and each further one, may add to the floor
COLUMNS = (Column("call", "steady_call"), Column("ratio to inductor", "steady_call", ratio=True))


def one_kernel(x: Tensor) -> Tensor:
    return x.sin() + 1


def chain(x: Tensor) -> Tensor:
    """Each step needs all of the one before: no two are one kernel."""
    for _ in range(CHAIN):
        x = x.softmax(-1).t().contiguous()
    return x


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4))


def examples() -> dict[str, tuple[Callable[..., Any], Tensor]]:
    return {
        "one kernel": (one_kernel, torch.randn(16)),
        f"{CHAIN} kernels": (chain, torch.randn(4, 4)),
        "mlp, batch 1": (mlp(), torch.randn(1, 16)),
        "mlp, batch 32": (mlp(), torch.randn(32, 16)),
    }


def empty_backend(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Through AOTAutograd, to graphs that give their first results again and again."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    def nothing(graph: torch.fx.GraphModule, example: list[Any]) -> Callable[..., Any]:
        results: list[Any] = []

        def run(*args: Any) -> Any:
            if not results:
                results.append(graph(*args))
            return results[0]

        return make_boxed_func(run)

    compiled: Callable[..., Any] = aot_autograd(fw_compiler=nothing)(module, inputs)
    return compiled


def contenders(function: Callable[..., Any], x: Tensor, peers: bool) -> dict[str, Callable[[], object]]:
    backends: dict[str, Any] = {"ferrite": "ferrite", "floor": empty_backend}
    if peers:
        backends = {"inductor": "inductor"} | backends
    calls: dict[str, Callable[[], object]] = {}
    for name, backend in backends.items():
        torch._dynamo.reset()
        compiled = torch.compile(function, backend=backend)
        compiled(x)
        calls[name] = lambda compiled=compiled: compiled(x)  # type: ignore[misc]
    calls["eager"] = lambda: function(x)
    return calls


def verdict(comparison: Comparison) -> list[str]:
    """A sentence for every limit that is broken."""
    medians = _medians(comparison)
    broken = []
    for case in comparison.cases:
        ours, theirs = medians.get((case, "ferrite")), medians.get((case, "inductor"))
        if ours is not None and theirs is not None and ours > SHARE * theirs:
            broken.append(f"{case}: {ours / theirs:.2f}x of Inductor, wanted {SHARE}x")
        if "mlp" in case and ours is not None and ours > medians[case, "eager"]:
            broken.append(f"{case}: {ours / medians[case, 'eager']:.2f}x of eager, wanted 1x")
    once, each = added(comparison)
    if once > MOST_ONCE:
        broken.append(f"one kernel: {1e6 * once:.1f} us added to the floor, wanted {1e6 * MOST_ONCE:.1f}")
    if each > MOST_EACH:
        broken.append(f"each further kernel: {1e6 * each:.2f} us added to the floor, wanted {1e6 * MOST_EACH:.1f}")
    return broken


def added(comparison: Comparison) -> tuple[float, float]:
    """The seconds that Ferrite adds to the floor: for one kernel, and for each further one."""
    medians = _medians(comparison)
    one = medians["one kernel", "ferrite"] - medians["one kernel", "floor"]
    many = medians[f"{CHAIN} kernels", "ferrite"] - medians[f"{CHAIN} kernels", "floor"]
    return one, (many - one) / (CHAIN - 1)


def _medians(comparison: Comparison) -> dict[tuple[str, str], float]:
    return {
        (row.case, row.contender): row.metrics["steady_call"].median
        for row in comparison.rows()
        if "steady_call" in row.metrics
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m bench.overhead", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=51)
    parser.add_argument("--no-inductor", action="store_true")
    parser.add_argument("--enforce", action="store_true", help="exit with 1 if a limit is broken")
    chosen = parser.parse_args(arguments)
    console = open_console()
    peers = not chosen.no_inductor and find_cxx() is not None
    torch.set_num_threads(1)  # nothing here is worth a team
    torch._dynamo.config.automatic_dynamic_shapes = False  # two batches of one MLP are two cases of fixed sizes
    with torch.no_grad():
        console.print("compiling", highlight=False)
        calls = {name: contenders(*example, peers) for name, example in examples().items()}
        baseline = "inductor" if peers else "eager"
        comparison = interleave("Overhead", calls, baseline=baseline, rounds=chosen.rounds, progress=watcher(console))
    show(console, comparison, COLUMNS, who="backend")
    broken, (once, each) = verdict(comparison), added(comparison)
    said = f"Ferrite adds {1e6 * once:.1f} us to the floor for one kernel and {1e6 * each:.2f} us for each further one."
    for line in (said, *broken):
        console.print(line, highlight=False)
    console.print(f"saved in {comparison.save('overhead').name}", highlight=False)
    return 1 if broken and chosen.enforce else 0


if __name__ == "__main__":
    sys.exit(stoppable(main))
