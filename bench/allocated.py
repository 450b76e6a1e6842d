"""How many bytes of tensors a call has at its peak, by torch's own count.

The profiler of torch notes what the CPU allocator gives and takes back; the running sum has a maximum. It sees every
tensor, also those that compiled code makes through torch's C functions. It does not see memory that comes from C's
library directly: what libraries need for themselves, and the block that Ferrite keeps for inner buffers, which
`kept_memory` knows.

`peaks_of` compares a model of the zoo with eager, by the same count. A compiled graph names its calls in the profile,
so each of them is measured beside the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import profile

import ferrite
from bench.zoo import Entry, Size
from ferrite.artifact.host_values import PRODUCTS, VIEWS
from ferrite.artifact.native_host import kept_memory
from ferrite.backend import records
from ferrite.report.record import GraphRecord, Record


@dataclass(frozen=True)
class Span:
    """A call of a compiled graph, as a profile has it: the peak of tensors beyond what was there when it began."""

    name: str
    bytes: int


def peak_of_tensors(call: Callable[[], object]) -> int:
    """Bytes beyond those that were there before `call`."""
    return profiled(call)[0]


def profiled(call: Callable[[], object]) -> tuple[int, list[Span]]:
    """The same, and the calls of compiled graphs in it, in order."""
    with profile(use_cpu=True, profile_memory=True) as events:
        call()
    assert events.kineto_results is not None
    seen = sorted(events.kineto_results.events(), key=lambda event: int(event.start_ns()))
    changes = [(event.start_ns(), event.nbytes()) for event in seen if event.name() == "[memory]"]
    spans = []
    for event in seen:
        if event.name().startswith("ferrite graph_"):
            inside = [bytes for at, bytes in changes if event.start_ns() <= at <= event.end_ns()]
            spans.append(Span(event.name().split()[1], _most(inside)))
    return _most([bytes for _, bytes in changes]), spans


def _most(changes: Sequence[int]) -> int:
    alive = most = 0
    for change in changes:
        alive += change
        most = max(most, alive)
    return most


@dataclass(frozen=True)
class GraphPeak:
    """A call of a compiled graph: what tensors outside the block need at most, by its plan and measured. `is_known`: no
    op runs in eager there, whose own needs no plan knows, and no other graph made its arguments: they may die in it."""

    name: str
    plan: int | None
    measured: int
    is_known: bool


@dataclass(frozen=True)
class Peak:
    """Bytes of one call. `block`: the memory for inner buffers that it leaves behind."""

    tensors: int
    block: int
    spans: tuple[Span, ...]

    @property
    def bytes(self) -> int:
        return self.tensors + self.block

    def graphs(self, made: Iterable[Record]) -> list[GraphPeak]:
        """The calls of compiled graphs, with what their records say."""
        known = {graph.name.replace(" ", "_"): graph for record in made for graph in record.graphs}
        is_whole = len({span.name.rpartition("_")[0] for span in self.spans}) == 1
        return [_beside_plan(span, known[span.name], is_whole) for span in self.spans]


def _beside_plan(span: Span, graph: GraphRecord, is_whole: bool) -> GraphPeak:
    plan = None if graph.peak_memory is None else graph.peak_memory - (graph.block_memory or 0)
    is_ours = all(fallback.op in PRODUCTS | VIEWS for fallback in graph.fallbacks)
    return GraphPeak(span.name, plan, span.bytes, plan is not None and is_whole and is_ours)


def steady_peak(entry: Entry, function: Callable[..., Any], module: nn.Module, inputs: Any, *, training: bool) -> Peak:
    """A call of a model of the zoo, or of what it was compiled to, once all that it needs is there: a step of
    inference, or of training with its loss and all gradients."""

    def call() -> None:
        with torch.set_grad_enabled(training):
            result = function(**inputs)
            if training:
                entry.loss(result).backward()

    def forget() -> None:
        for tensor in (*module.parameters(), *inputs.values()):
            tensor.grad = None

    forget()
    call()
    forget()
    ferrite.release_memory()
    call()
    forget()
    tensors, spans = profiled(call)
    forget()
    return Peak(tensors, kept_memory(), tuple(spans))


def peaks_of(entry: Entry, size: Size, *, training: bool) -> tuple[Peak, Peak, list[GraphPeak]]:
    """A model in eager and compiled, and the graphs of the latter."""
    example = entry.build(size, training=training)
    eager = steady_peak(entry, example.module, example.module, example.inputs, training=training)
    ferrite.reset()
    compiled = torch.compile(example.module, backend="ferrite", dynamic=False, options={"cache": "off"})
    found = steady_peak(entry, compiled, example.module, example.inputs, training=training)
    return eager, found, found.graphs(records())
