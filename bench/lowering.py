"""What does lowering cost, per node, and does it stay linear?

    python -m bench.lowering                         # BERT, ResNet-50, GPT-2, and programs of 100 to 10 000 nodes
    python -m bench.lowering --repeats 15 --enforce

Graphs are captured once; then `lower` runs over each of them in turns, and the median over the repeats is shown, with
the first, cold run beside it. The promises: at most `LIMIT_MS` a node on the models, and the time per node of the
largest program at most `LIMIT_GROWTH` times that of the smallest. `--enforce` makes a broken one the exit status 1.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import torch
from rich.console import Console
from rich.table import Table

from bench.graphs import Captured, capture, capture_function
from bench.zoo import ZOO
from ferrite.lower.graph import Rules, lower

MODELS = ("bert", "resnet", "gpt2")
SIZES = (100, 1_000, 10_000)
LIMIT_MS = 0.4
LIMIT_GROWTH = 1.2
RULES = Rules(use_rows=True)


def program(nodes: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function of about so many nodes after autograd, with the mix of a transformer: products, views, chains,
    reductions."""

    def function(x: torch.Tensor) -> torch.Tensor:
        for _ in range(nodes // 20):
            y = (x - x.mean(1, keepdim=True)) * torch.rsqrt(x.var(1, keepdim=True, correction=0) + 1e-5)
            y = torch.sigmoid(y[:, :8]) * y[:, 8:].tanh()
            y = torch.cat([y, y.transpose(0, 1).reshape(16, 8)], 1) * 1.5
            x = x + torch.softmax(y @ x, -1)
        return x

    return function


def programs() -> Iterator[tuple[str, list[Captured]]]:
    """Programs of growing size; Dynamo inlines the loop, so the number of nodes is known afterwards."""
    for size in SIZES:
        yield f"program of {size}", capture_function(program(size), torch.randn(16, 16))


def models() -> Iterator[tuple[str, list[Captured]]]:
    for name in MODELS:
        for training in (False, True):
            yield f"{name} {'training' if training else 'inference'}", capture(ZOO[name], "real", training=training)


def lowered_in(graphs: list[Captured]) -> float:
    """Seconds of processor time to lower these graphs once: one thread, so other work on the machine counts little."""
    gc.collect()
    start = time.process_time()
    for graph in graphs:
        lower(graph.module, rules=RULES)
    return time.process_time() - start


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.lowering", description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=9, help="runs over every graph (default: 9)")
    parser.add_argument("--enforce", action="store_true", help="exit with 1 if a promise is broken")
    wanted = parser.parse_args(arguments)
    console = Console()
    with console.status("capturing graphs"):
        cases = dict([*models(), *programs()])
    times: dict[str, list[float]] = {name: [] for name in cases}
    with console.status(f"lowering, {wanted.repeats} times in turns"):
        for _ in range(wanted.repeats):
            for name, graphs in cases.items():
                times[name].append(lowered_in(graphs))
    table = Table("graphs", "nodes", "ms", "ms a node", "first run, ms a node", title=f"median of {wanted.repeats}")
    per_node: dict[str, float] = {}
    for name, graphs in cases.items():
        nodes = sum(len(graph.module.graph.nodes) for graph in graphs)
        taken = 1e3 * statistics.median(times[name])
        per_node[name] = taken / nodes
        table.add_row(name, str(nodes), f"{taken:.1f}", f"{per_node[name]:.3f}", f"{1e3 * times[name][0] / nodes:.3f}")
    console.print(table)
    worst = max(per_node[name] for name in cases if not name.startswith("program"))
    growth = per_node[f"program of {SIZES[-1]}"] / per_node[f"program of {SIZES[0]}"]
    console.print(f"models: at most {worst:.3f} ms a node; promised {LIMIT_MS}")
    console.print(f"per node, largest over smallest program: {growth:.2f}; promised {LIMIT_GROWTH}")
    kept = worst <= LIMIT_MS and growth <= LIMIT_GROWTH
    return 1 if wanted.enforce and not kept else 0


if __name__ == "__main__":
    sys.exit(main())
