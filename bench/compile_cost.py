"""What does a compile cost? Milliseconds for each kernel, and the backend's part beside Inductor's.

    python -m bench.compile_cost                          # the demo's models, inference and training
    python -m bench.compile_cost --models bert --no-inductor

`kernel`: writing the LLVM text of one kernel and making its object, each kernel in a module of its own, median of
`--repeats`, less what a module with an empty function costs: the kernels of a graph share one. Garbage is not collected
meanwhile, as in a compile. The line below the table is on the kernels of all models together.
`backend part`: everything after AOTAutograd for all graphs of the model's first call; for Inductor, what PyTorch counts
as `compile_fx_inner`, in the same process, with its caches off.
`200 nodes`: a kernel of a long chain of arithmetic and functions.

Milliseconds are those of the machine. What an empty module takes is told beside them, and what it takes where the
limits were set: LLVM does the same work for it everywhere, so the two say how far the machines are apart.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from rich.table import Table

from bench.measure import find_cxx
from bench.show import open_console, stoppable
from bench.zoo import ZOO

MODELS = ("bert", "resnet")
MODES = ("inference", "training")
KERNEL_LIMIT, CHAIN_LIMIT, SHARE_LIMIT = 8.0, 40.0, 0.1
CHAIN = 200  # expression nodes
MODULE_AT_LIMITS = 1.0  # milliseconds for an empty module on the machine of the limits


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m bench.compile_cost", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=sorted(ZOO))
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-inductor", action="store_true")
    chosen = parser.parse_args(arguments)
    console = open_console()
    peers = not chosen.no_inductor and find_cxx() is not None
    module = cost_of_module(chosen.repeats)
    table = Table(title=f"Cost of a compile, medians of {chosen.repeats}", title_justify="left")
    for column in ("model", "kernels", "median kernel", "slowest", "backend part", "Inductor's", "share"):
        table.add_column(column, justify="left" if column == "model" else "right")
    everywhere: list[float] = []
    for model in chosen.models:
        for mode in chosen.modes:
            console.print(f"compiling {model} {mode}", highlight=False)
            programs, ours = traced(*_call_of(model, mode))
            costs = sorted(cost_of(program, chosen.repeats) - module for program in programs)
            everywhere += costs
            theirs = inductor_part(model, mode) if peers else None
            table.add_row(
                f"{model} {mode}", str(len(programs)), f"{statistics.median(costs):.1f} ms", f"{costs[-1]:.1f} ms",
                f"{ours:.2f} s", "-" if theirs is None else f"{theirs:.1f} s",
                "-" if theirs is None else f"{ours / theirs:.1%}",
            )  # fmt: skip
    console.print(table)
    middle = statistics.median(everywhere)
    console.print(f"median of all {len(everywhere)} kernels: {middle:.1f} ms", highlight=False)
    (chain,), _ = traced(long_chain(CHAIN), (torch.randn(4096), torch.randn(4096)))
    longest = cost_of(chain, chosen.repeats) - module
    console.print(f"kernel of {node_count(chain)} nodes: {longest:.1f} ms", highlight=False)
    console.print(
        f"wanted: median kernel {KERNEL_LIMIT:.0f} ms, {CHAIN} nodes {CHAIN_LIMIT:.0f} ms, share {SHARE_LIMIT:.0%}; an "
        f"empty module takes {module:.1f} ms here, and {MODULE_AT_LIMITS:.1f} where this was set"
    )
    return 0


def traced(call: Callable[..., Any], arguments: Sequence[Any]) -> tuple[list[Any], float]:
    """The kernels of all graphs of a call that Ferrite compiles, and the seconds after AOTAutograd."""
    import ferrite

    torch._dynamo.reset()
    with _programs() as programs:
        call(lambda module: torch.compile(module, backend="ferrite"), *arguments)
    record = ferrite.last_record()
    assert record is not None
    stages = ("post_grad", "lower", "loops", "schedule", "native", "host")
    return programs, sum(graph.stages.get(stage, 0.0) for graph in record.graphs for stage in stages)


@contextmanager
def _programs() -> Iterator[list[Any]]:
    """Collects the programs that are made into machine code meanwhile."""
    from ferrite.artifact import compiled

    seen: list[Any] = []
    real = compiled.build_code

    def noting(programs: Sequence[Any]) -> Any:
        seen.extend(programs)
        return real(programs)

    compiled.build_code = noting
    try:
        yield seen
    finally:
        compiled.build_code = real


def cost_of(program: Any, repeats: int) -> float:
    """Milliseconds from a loop program to its object."""
    from ferrite.native import emit, target

    return _cost_of_object(lambda: emit.emit([program], target.host()).text, repeats)


def cost_of_module(repeats: int) -> float:
    """Milliseconds for an object with next to nothing in it."""
    return _cost_of_object(lambda: "define void @nothing() nounwind {\n  ret void\n}\n", 10 * repeats)


def _cost_of_object(text: Callable[[], str], repeats: int) -> float:
    from ferrite.collection import without_collection
    from ferrite.native import build, target

    seconds = []
    with without_collection():
        for _ in range(repeats):
            before = time.perf_counter()
            build.build(text(), target.host())
            seconds.append(time.perf_counter() - before)
    return 1e3 * statistics.median(seconds)


def inductor_part(model: str, mode: str) -> float:
    """Seconds of Inductor after AOTAutograd, as PyTorch's own counters have it."""
    from torch._dynamo.utils import compilation_time_metrics

    torch._dynamo.reset()
    compilation_time_metrics.clear()
    call, arguments = _call_of(model, mode)
    with torch._inductor.config.patch(force_disable_caches=True):
        call(lambda module: torch.compile(module, backend="inductor"), *arguments)
    return sum(compilation_time_metrics["compile_fx_inner"])


def _call_of(model: str, mode: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    entry = ZOO[model]

    def call(compiler: Callable[[Any], Any]) -> None:
        example = entry.build("real", training=mode == "training")
        compiled = compiler(example.module)
        if mode == "training":
            entry.loss(compiled(**example.inputs)).backward()
        else:
            with torch.no_grad():
                compiled(**example.inputs)

    return call, ()


def long_chain(nodes: int) -> Callable[..., Any]:
    """A call that compiles a function of about so many expression nodes, none of which folds away."""

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for step in range(nodes // 3):  # a product, a number, a sum
            x = x * y + (step + 0.5)
            if step % 20 == 19:
                x = torch.tanh(x)
        return x

    def call(compiler: Callable[[Any], Any], x: torch.Tensor, y: torch.Tensor) -> None:
        compiler(function)(x, y)

    return call


def node_count(program: Any) -> int:
    from ferrite.loops.nodes import Expr
    from ferrite.loops.rewrite import walk

    return len({node for node in walk(program) if isinstance(node, Expr)})


if __name__ == "__main__":
    sys.exit(stoppable(main))
