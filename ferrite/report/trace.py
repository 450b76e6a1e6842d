"""Sends what a compile did to PyTorch's own logs: artifacts of TORCH_LOGS, structured traces, counters.

Text is made only if somebody listens.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch._logging import getArtifactLogger, trace_structured
from torch.fx import GraphModule

from ferrite.artifact.compiled import CompiledGraph
from ferrite.graph.text import show_graph
from ferrite.report.record import GraphRecord

log = logging.getLogger("ferrite")
# Below "torch", because that is where TORCH_LOGS puts its handlers.
output_code_log = getArtifactLogger("torch.ferrite", "output_code")
pre_grad_log = getArtifactLogger("torch.ferrite", "pre_grad_graphs")
post_grad_log = getArtifactLogger("torch.ferrite", "post_grad_graphs")
perf_hint_log = getArtifactLogger("torch.ferrite", "perf_hints")

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


def artifact(name: str, text: Any, encoding: str = "string") -> None:
    """One named text in the structured trace; `text` is a function that makes it."""
    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": encoding}, payload_fn=text)


def graph(title: str, module: GraphModule, logger: logging.Logger) -> None:
    """A graph at a stage, to the log that asked for it and to the structured trace."""
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("%s\n%s", title, show_graph(module.graph, types=True, sources=True))
    artifact(title.replace(" ", "_"), lambda: show_graph(module.graph, types=True))


def compiled_graph(compiled: CompiledGraph) -> None:
    """The code that will run."""
    name = compiled.program.name
    if output_code_log.isEnabledFor(logging.DEBUG):
        output_code_log.debug("Output code of %s, %s:\n%s", name, compiled.code.filename, compiled.code.source)
    artifact(f"ferrite_output_code_{name}", lambda: compiled.code.source)
    artifact(f"ferrite_output_code_lines_{name}", lambda: json.dumps(compiled.code.lines), "json")
    artifact(f"ferrite_host_program_{name}", lambda: str(compiled))
    artifact(f"ferrite_eager_calls_{name}", lambda: compiled.eager_calls, "json")


def code_is_in(compiled: CompiledGraph, path: Path) -> None:
    """A file has the code."""
    output_code_log.debug("Output code of %s is in %s", compiled.program.name, path)
    log.info("Ferrite wrote the code of %s to %s", compiled.program.name, path)


def graph_record(record: GraphRecord, scheme: str) -> None:
    """Counters of PyTorch's own kind, and the record in the structured trace."""
    ours = counters["ferrite"]
    ours["graphs_compiled"] += 1
    ours[f"compiled_{record.phase}"] += 1
    ours[f"scheme_{scheme}"] += 1
    count(record)
    artifact(f"ferrite_record_{record.name.replace(' ', '_')}", lambda: repr(record.stages))
    if perf_hint_log.isEnabledFor(logging.INFO):
        for fallback in record.fallbacks:
            perf_hint_log.info("%s runs in eager %d times: %s", fallback.op, fallback.count, fallback.reason)


def count(record: GraphRecord) -> None:
    """What passes changed and what runs in eager: counted where a graph is compiled, and where it is found again."""
    ours = counters["ferrite"]
    for run in record.passes:
        if run.changed:
            ours[run.name] += run.changed
    for fallback in record.fallbacks:
        ours["fallbacks"] += fallback.count


def matrix_products(module: GraphModule) -> None:
    """At INFO: which matrix products the graph holds, by shape."""
    if log.isEnabledFor(logging.INFO) and (rows := product_shapes(module)):
        lines = [f"{'name':<10}{'batch':>8}{'M':>8}{'N':>8}{'K':>8}{'count':>8}"]
        lines += [f"{n:<10}{b:>8}{m:>8}{c:>8}{k:>8}{count:>8}" for (n, b, m, c, k), count in rows.items()]
        log.info("matrix products\n%s", "\n".join(lines))


def product_shapes(module: GraphModule) -> Counter[tuple[str, str, str, str, str]]:
    """(name, batch or "-", M, N, K) of each product, with how often it occurs."""
    found: Counter[tuple[str, str, str, str, str]] = Counter()
    for name in _PRODUCTS:
        for node in module.graph.find_nodes(op="call_function", target=getattr(torch.ops.aten, name).default):
            left, right = (argument.meta["val"] for argument in node.args[-2:])
            batch = str(left.shape[0]) if left.dim() == 3 else "-"
            found[name, batch, str(left.shape[-2]), str(right.shape[-1]), str(left.shape[-1])] += 1
    return found
