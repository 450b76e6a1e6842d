"""Does memory grow? Many calls with changing sizes, and many graphs that are compiled, called once and dropped.

    python -m bench.flat_memory                                 # what `make flat-memory` runs: 10 000 of each
    python -m bench.flat_memory --calls 2000 --compiles 0

What is measured is the resident memory of the process, from /proc/self/status, after a collection of garbage and after
C's allocator was asked to give back what it holds free. The first fifth of the rounds warms up; afterwards memory may
be at most ALLOWED above what it was then. The exit status is 1 if it is more.

torch.fx keeps the source of every GraphModule for good, about 1 KB for these; it is cleared here, as it is not ours.
"""

from __future__ import annotations

import argparse
import gc
import linecache
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.fx import graph_module

from bench.measure import give_back_freed_memory, resident_memory
from bench.show import open_console, stoppable
from ferrite import pipeline
from ferrite.graph.text import parse_graph
from ferrite.options import from_environment, resolve
from ferrite.report.record import Record

ALLOWED = 4 << 20  # bytes: half a kilobyte for each of 8000 rounds
WARM = 5  # one in so many rounds

SIZES = ((2, 7), (16, 3), (5, 24), (31, 9), (3, 40), (64, 2), (8, 16), (11, 33))
KINDS = 64  # different graphs

GRAPH = """def graph(x: f32[{rows}, 5], w: f32[5, 5]):
    mm = aten.mm.default(x, w)
    mul = aten.mul.Tensor(mm, {factor})
    soft = aten._softmax.default(mul, -1, False)
    t = aten.t.default(soft)
    clone = aten.clone.default(t, memory_format=torch.contiguous_format)
    amax = aten.amax.default(clone, [0])
    return (clone, amax)
"""


@dataclass(frozen=True)
class Growth:
    """Bytes: resident after warming up, and by how much it was at most more later."""

    name: str
    rounds: int
    resident: int
    grown: int

    def __str__(self) -> str:
        return (
            f"{self.rounds} {self.name}: {self.resident / 2**20:.1f} MB after warming up, at most "
            f"{self.grown / 2**20:+.2f} MB later, allowed {ALLOWED / 2**20:.0f} MB"
        )


def resident() -> int:
    """Bytes of memory that the process has, without what nobody uses."""
    gc.collect()
    give_back_freed_memory()
    return resident_memory()


def growth(
    name: str,
    work: Callable[[int], None],
    rounds: int,
    looks: int = 40,
    watch: Callable[[str], None] = lambda line: None,
) -> Growth:
    """Memory, looked at so many times, while `work` is done `rounds` times with a running number."""
    warm, every = rounds // WARM, max(rounds // looks, 1)
    for number in range(warm):
        work(number)
    start = most = resident()
    for number in range(warm, rounds):
        work(number)
        if number % every == 0:
            most = max(most, resident())
            watch(f"{number} {name}: {(most - start) / 2**20:+.2f} MB")
    return Growth(name, rounds, start, max(most, resident()) - start)


class Layer(nn.Module):
    """What a model has: products, norms, attention, views."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = self.mix(self.norm(x)).view(batch, length, 3, 2, 8).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        return x + torch.nn.functional.gelu(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))


def changing_sizes() -> Callable[[int], None]:
    """A step of training and one of inference, with another batch and length each time."""
    module = Layer()
    inputs = [torch.randn(batch, length, 16) for batch, length in SIZES]
    compiled = torch.compile(module, backend="ferrite", dynamic=True)

    def work(number: int) -> None:
        x = inputs[number % len(inputs)]
        compiled(x).square().mean().backward()
        module.zero_grad()
        with torch.no_grad():
            compiled(x)

    return work


def compile_and_free() -> Callable[[int], None]:
    """A graph through all stages to machine code, called once and dropped with all that it owns."""
    options = resolve(from_environment(os.environ), None, None)
    texts = [GRAPH.format(rows=3 + kind % 8, factor=kind + 0.5) for kind in range(KINDS)]

    def work(number: int) -> None:
        kind = number % KINDS
        module = parse_graph(texts[kind])
        record = Record(0).graph("inference")
        compiled = pipeline.compile_graph(module, 0, "inference", pipeline.Inputs(), options, record)
        compiled([torch.ones(3 + kind % 8, 5), torch.ones(5, 5)])
        if number % KINDS == 0:
            graph_module._loader.eval_cache.clear()
            linecache.clearcache()

    return work


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m bench.flat_memory", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--compiles", type=int, default=10_000)
    chosen = parser.parse_args(arguments)
    console = open_console()
    torch.set_num_threads(1)
    found = []

    def watch(line: str) -> None:
        console.print(line, highlight=False)

    if chosen.calls:
        found.append(growth("calls with changing sizes", changing_sizes(), chosen.calls, watch=watch))
        console.print(str(found[-1]), highlight=False)
    if chosen.compiles:
        found.append(growth("graphs compiled and freed", compile_and_free(), chosen.compiles, watch=watch))
        console.print(str(found[-1]), highlight=False)
    return 1 if any(each.grown > ALLOWED for each in found) else 0


if __name__ == "__main__":
    sys.exit(stoppable(main))
