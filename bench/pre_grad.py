"""What do the passes before autograd cost, and what do they win?

    python -m bench.pre_grad                                     # both questions
    python -m bench.pre_grad --only cost --rounds 9 --enforce
    python -m bench.pre_grad --only gain --rounds 31 --threads 1

Cost: models of the zoo go through Dynamo and AOTAutograd, with compilers behind that do nothing. The processor time of
the stage, all passes that run by default and the checks around them, is divided by that of AOTAutograd itself in the
same compile; the table shows the median of these shares. Promised is at most `LIMIT`; `--enforce` makes a broken
promise the exit status 1. Beside it stands what the stage takes in the first compile of a process, where nothing is
kept of the signatures of ops yet: one run of each model, in a process of its own, and no part of the promise.

Gain: programs that a pass was written for, compiled by Ferrite without it and with it, called in turns. The ratio is
the time without the pass over the time with it; with `--threads 1` it is processor time. A pass that does not fire, or
another answer, is a failure.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule

import ferrite
from bench.compare import interleave
from bench.show import Column, open_console, show, stoppable, watcher
from bench.zoo import ZOO, Size
from ferrite.graph.decompose import decomposition_table
from ferrite.graph.pre_grad import PASSES
from ferrite.options import Options
from ferrite.pipeline import edit_pre_grad
from ferrite.report.record import GraphRecord, PassRun

MODELS = ("bert", "resnet", "gpt2")
LIMIT = 0.03

# --- cost ---------------------------------------------------------------------------------------------------------


class _Stop(Exception):
    """Raised in place of the first call: only compiling is measured."""


@dataclass
class Compile:
    """Seconds of processor time of one compile: our stage, AOTAutograd without it, and the nodes that Dynamo found."""

    stage: float = 0.0
    autograd: float = 0.0
    nodes: int = 0


def compile_once(name: str, size: Size, *, training: bool) -> Compile:
    example = ZOO[name].build(size, training=training)
    taken = Compile()

    def stage(module: GraphModule, _: Any) -> GraphModule:
        start = time.process_time()
        edit_pre_grad(module, Options(), GraphRecord(name, "pre_grad"))
        taken.stage += time.process_time() - start
        return module

    def nothing(module: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        def stop(*_: Any) -> Any:
            raise _Stop

        return stop

    aot = aot_autograd(
        fw_compiler=nothing,
        bw_compiler=nothing,
        decompositions=decomposition_table(use_rows=True),
        keep_inference_input_mutations=True,
        pre_grad_passes=stage,
    )

    def backend(module: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        taken.nodes += len(module.graph.nodes)
        before, start = taken.stage, time.process_time()
        compiled = aot(module, inputs)
        taken.autograd += time.process_time() - start - (taken.stage - before)
        return compiled

    torch._dynamo.reset()
    gc.collect()
    compiled = torch.compile(example.module, backend=backend, dynamic=False)
    with suppress(_Stop), torch.set_grad_enabled(training):
        compiled(**example.inputs)
    return taken


def compile_first(name: str, training: bool, size: Size) -> Compile:
    """One compile in a process that has compiled nothing before."""
    threads = (torch.get_num_threads(),)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, initializer=torch.set_num_threads, initargs=threads) as fresh:
        return fresh.submit(compile_once, name, size, training=training).result()


def show_cost(console: Console, size: Size, rounds: int) -> bool:
    """Measure and print the shares; gives whether all of them keep the promise."""
    jobs = [(name, training) for name in MODELS for training in (False, True)]
    found: dict[tuple[str, bool], list[Compile]] = {job: [] for job in jobs}
    with console.status(f"compiling, {rounds} times in turns, and once that does not count"):
        for number in range(rounds + 1):
            for name, training in jobs:
                taken = compile_once(name, size, training=training)
                if number:
                    found[name, training].append(taken)
    with console.status("compiling once in a new process for each"):
        first = {job: compile_first(*job, size) for job in jobs}
    heads = ("model", "nodes", "stage, ms", "AOTAutograd, ms", "share", "first: stage, ms", "AOTAutograd, ms", "share")
    table = Table(*heads, title=f"medians of {rounds} compiles; the first of a process")
    worst = 0.0
    for (name, training), runs in found.items():
        share = statistics.median(run.stage / run.autograd for run in runs)
        worst = max(worst, share)
        cells = [
            1e3 * statistics.median(run.stage for run in runs),
            1e3 * statistics.median(run.autograd for run in runs),
        ]
        label = f"{name} {'training' if training else 'inference'}"
        cold = first[name, training]
        shown = [f"{1e3 * cold.stage:.1f}", f"{1e3 * cold.autograd:.1f}", f"{cold.stage / cold.autograd:.2%}"]
        table.add_row(label, str(runs[0].nodes), *(f"{cell:.1f}" for cell in cells), f"{share:.2%}", *shown)
    console.print(table)
    console.print(f"at most {worst:.2%}; promised {LIMIT:.0%}", highlight=False)
    return worst <= LIMIT


# --- gain ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """`passes` are those that the ratio speaks of; one of them must fire."""

    name: str
    passes: tuple[str, ...]
    make: Callable[[], tuple[Callable[..., Any], tuple[Tensor, ...]]]
    is_exported: bool = False  # the pass needs parameters that the graph holds


def _conv_bn() -> Any:
    layers: list[nn.Module] = []
    for width in (3, 32, 32, 32):
        layers += [nn.Conv2d(width, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
    return nn.Sequential(*layers).eval(), (torch.randn(4, 3, 64, 64),)


def _qkv() -> Any:
    """Three projections of one input, and what attention does with them first."""

    def function(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = [F.linear(x, weight).view(8, 128, 12, 32).transpose(1, 2) for weight in (q, k, v)]
        return F.scaled_dot_product_attention(*heads)

    return function, (torch.randn(8, 128, 384), *(torch.randn(384, 384) * 0.05 for _ in range(3)))


def _split_cat() -> Any:
    def function(x: Tensor, y: Tensor) -> Tensor:
        parts = torch.split(x, 64, 1)
        return torch.cat([torch.cat(parts[:8], 1), torch.cat(parts[8:], 1), y], 1).relu()

    return function, (torch.randn(512, 1024), torch.randn(512, 64))


def _sink_cat() -> Any:
    def function(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(torch.cat([x @ w, y * 2], 1).view(-1))

    return function, (torch.randn(1024, 256), torch.randn(1024, 512), torch.randn(256, 512) * 0.05)


SPLIT_CAT = ("cat_of_items_to_slice", "merge_split_items", "simplify_split_joins", "drop_whole_splits", "merge_cats")
CASES = (
    Case("convolution and batch norm", ("fold_conv_bn",), _conv_bn, is_exported=True),
    Case("query, key and value", ("batch_linear_lhs",), _qkv),
    Case("split and cat", SPLIT_CAT, _split_cat),
    Case("cat and tanh", ("sink_cat",), _sink_cat),
)


def contenders(case: Case) -> dict[str, Callable[[], object]]:
    """The program without the passes and with them; both answer as eager does."""
    function, inputs = case.make()
    expected = function(*inputs)
    calls: dict[str, Callable[[], object]] = {}
    asked = [entry.name for entry in PASSES if entry.name in case.passes and not entry.default]
    settings: dict[str, dict[str, Any]] = {"without": {"disable": case.passes}, "with": {"pre_grad": asked}}
    for name, options in settings.items():
        program = function
        if case.is_exported:
            program, options = exported(function, inputs, asked if name == "with" else ()), {}
        torch._dynamo.reset()
        compiled = torch.compile(program, backend="ferrite", options=options, dynamic=False)
        torch.testing.assert_close(compiled(*inputs), expected, rtol=1e-3, atol=1e-3)
        if name == "with" and not case.is_exported:
            check_fired([run for graph in ferrite.last_record().graphs for run in graph.passes], case.passes)
        calls[name] = lambda compiled=compiled: compiled(*inputs)  # type: ignore[misc]
    return calls


def exported(module: Any, inputs: tuple[Tensor, ...], passes: Sequence[str]) -> GraphModule:
    """An exported module, whose graph holds the parameters, after some passes."""
    program = torch.export.export(module, inputs).module(check_guards=False)
    record = GraphRecord("exported", "pre_grad")
    if passes:
        edit_pre_grad(program, Options(strict=True, pre_grad=tuple((name, ()) for name in passes)), record)
        check_fired(record.passes, passes)
    return program


def check_fired(runs: Sequence[PassRun], passes: Sequence[str]) -> None:
    if not any(run.changed for run in runs if run.name in passes):
        raise RuntimeError(f"none of {', '.join(passes)} fired")


def show_gain(console: Console, rounds: int) -> None:
    # What one thread does is its processor time, whatever else the machine is busy with.
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    with torch.no_grad():
        calls = {case.name: contenders(case) for case in CASES}
        result = interleave("Gain", calls, baseline="with", rounds=rounds, progress=watcher(console), clock=clock)
    show(console, result, [Column("call", "steady_call"), Column("x with", "steady_call", ratio=True)])
    console.print(f"saved in {result.save('pre-grad').name}", highlight=False)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.pre_grad", description=__doc__.split("\n")[0])
    parser.add_argument("--only", choices=["cost", "gain"], help="one of the two questions (default: both)")
    parser.add_argument("--rounds", type=int, default=9, help="compiles of each model, and turns of each program")
    parser.add_argument("--size", choices=["small", "real"], default="real", help="of the models (default: real)")
    parser.add_argument("--threads", type=int, help="default: as many as torch uses")
    parser.add_argument("--enforce", action="store_true", help="exit with 1 if the promise is broken")
    wanted = parser.parse_args(arguments)
    if wanted.threads:
        torch.set_num_threads(wanted.threads)
    torch.manual_seed(0)
    console = open_console()
    kept = wanted.only == "gain" or show_cost(console, wanted.size, wanted.rounds)
    if wanted.only != "cost":
        show_gain(console, wanted.rounds)
    return 1 if wanted.enforce and not kept else 0


if __name__ == "__main__":
    sys.exit(stoppable(main))
