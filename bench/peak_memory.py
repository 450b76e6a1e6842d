"""How much memory does a call need? Every model of the zoo in Ferrite and in eager, by one counter.

    python -m bench.peak_memory                                  # what `make peak-memory` runs: 26 models, both modes
    python -m bench.peak_memory --models resnet bert --modes training --size real

Counted is what torch's CPU allocator gives and takes back during one steady call (`bench/allocated.py`): a step of
inference, or of training with its loss and the gradients of all parameters; for Ferrite also the block that it keeps
for inner buffers. Beside it stands, for each graph, what tensors outside the block need at most, by the plan and
measured, and then the most that one operator of it took for itself and gave back before it ended (a convolution its
packed weights), which is no part of either; `--own` lists all of those. The exit status is 1 if a model needs more than
LIMIT times what it does in eager, or if plan and measure differ where no other graph made the arguments.
"""

from __future__ import annotations

import argparse
import sys

from rich.table import Table

from bench.allocated import GraphPeak, peaks_of
from bench.show import format_bytes, open_console, stoppable
from bench.zoo import ZOO

LIMIT = 1.02
MODES = ("inference", "training")

# Where a call has less memory than its plan says.
LESS_THAN_PLANNED: dict[tuple[str, str], str] = {
    ("dlrm", "forward"): "a bag that adds up gives nothing for `offset2bag`, whose size the trace promises"
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m bench.peak_memory", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", nargs="+", default=list(ZOO), choices=list(ZOO), metavar="NAME")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--size", default="small", choices=("small", "real"))
    parser.add_argument("--own", action="store_true", help="list what each operator takes for itself")
    chosen = parser.parse_args(arguments)
    console = open_console()
    table = Table("model", "mode", title="peak memory of a call", title_justify="left")
    for heading in ("eager", "Ferrite", "ratio", "block", "plan of each graph / measured + own"):
        table.add_column(heading, justify="right")
    above, other = [], []
    for name in chosen.models:
        for mode in chosen.modes:
            eager, found, graphs = peaks_of(ZOO[name], chosen.size, training=mode == "training")
            ratio = found.bytes / eager.bytes
            if ratio > LIMIT:
                above.append(f"{name} {mode} {ratio:.2f}x")
            other += [f"{name} {graph.name}" for graph in graphs if graph.is_known and not is_as_planned(name, graph)]
            plans = [_beside(graph) for graph in graphs]
            sizes = [format_bytes(size) for size in (eager.bytes, found.bytes, found.block)]
            table.add_row(name, mode, *sizes[:2], f"{ratio:.3f}", sizes[2], "\n".join(plans))
            console.print(f"{name} {mode}: {ratio:.3f}x", highlight=False)
            for graph in graphs if chosen.own else ():
                for step, bytes in graph.own.items():
                    console.print(f"  {graph.name}: {step} takes {bytes:,} for itself", highlight=False)
    console.print(table)
    console.print(f"more than {LIMIT}x: {', '.join(above)}" if above else f"all at most {LIMIT}x", highlight=False)
    if other:
        console.print(f"not as planned: {', '.join(other)}", highlight=False)
    return 1 if above or other else 0


def is_as_planned(name: str, graph: GraphPeak) -> bool:
    """Whether a graph of a model needs what its plan says, or less where that is known."""
    assert graph.plan is not None
    if (name, graph.name.rpartition("_")[2]) in LESS_THAN_PLANNED:
        return graph.measured < graph.plan
    return graph.measured == graph.plan


def _beside(graph: GraphPeak) -> str:
    plan = "?" if graph.plan is None else graph.plan
    return f"{plan} / {graph.measured} + {max(graph.own.values(), default=0)}"


if __name__ == "__main__":
    sys.exit(stoppable(main))
