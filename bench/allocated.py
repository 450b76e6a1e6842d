"""How many bytes of tensors a call has at its peak, by torch's own count.

The profiler of torch notes what the CPU allocator gives and takes back; the running sum has a maximum. It sees every
tensor, also those that compiled code makes through torch's C functions, and what libraries take from the allocator for
themselves. It does not see memory that comes from C's library directly, such as the block that Ferrite keeps for inner
buffers, which `kept_memory` knows.

A compiled graph names its calls in the profile, and its steps in them (`host/ranges.py`). So each call is measured
beside the whole, and memory that a step takes and gives back before it ends is told apart: that is what an operator
needs for itself, which no plan knows. Without it, what is measured is what the plan says.

`peaks_of` compares a model of the zoo with eager, by the same count.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._C._profiler import _EventType
from torch.autograd.profiler import profile

import ferrite
from bench.zoo import Entry, Size
from ferrite.artifact.doors import kept_memory
from ferrite.backend import records
from ferrite.report.record import GraphRecord, Record


@dataclass(frozen=True)
class Span:
    """A call of a compiled graph, as a profile has it: the peak of tensors beyond what was there when it began, and the
    same without what steps took for themselves; `own`: the most that each step had of that, by its range."""

    name: str
    bytes: int
    without_own: int
    own: Mapping[str, int]


@dataclass(frozen=True)
class _Change:
    """Memory that was given (`bytes` above 0) or taken back."""

    at: int
    address: int
    bytes: int


@dataclass(frozen=True)
class _Range:
    name: str
    start: int
    end: int


def peak_of_tensors(call: Callable[[], object]) -> int:
    """Bytes beyond those that were there before `call`."""
    return profiled(call)[0]


def profiled(call: Callable[[], object]) -> tuple[int, list[Span]]:
    """The same, and the calls of compiled graphs in it, in order."""
    with profile(use_cpu=True, profile_memory=True) as events:
        call()
    assert events.kineto_results is not None
    changes, ranges = [], []
    waiting = list(events.kineto_results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag == _EventType.Allocation:
            changes.append(_Change(event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
        elif event.name.startswith(("ferrite graph_", "kernel_")) or _OPERATOR.match(event.name):
            ranges.append(_Range(event.name, event.start_time_ns, event.end_time_ns))
    changes.sort(key=lambda change: change.at)
    ranges.sort(key=lambda range: range.start)
    graphs = [range for range in ranges if range.name.startswith("ferrite graph_")]
    return _most(changes), [_span(graph, changes, ranges) for graph in graphs]


_OPERATOR = re.compile(r"[a-z_0-9]+(\.\w+)+")  # a range of a step that is no kernel; torch's own are `aten::mm`


def _span(graph: _Range, changes: Sequence[_Change], ranges: Sequence[_Range]) -> Span:
    inside = _within(graph, changes)
    steps = [step for step in ranges if graph.start < step.start and step.end <= graph.end]
    own: dict[str, int] = {}
    passing: set[_Change] = set()
    for step in steps:
        taken = _taken_and_given_back(_within(step, inside))
        passing.update(taken)
        if taken:
            own[step.name] = max(own.get(step.name, 0), _most(taken))
    rest = [change for change in inside if change not in passing]
    return Span(graph.name.split()[1], _most(inside), _most(rest), own)


def _within(range: _Range, changes: Sequence[_Change]) -> list[_Change]:
    return [change for change in changes if range.start <= change.at <= range.end]


def _taken_and_given_back(changes: Sequence[_Change]) -> list[_Change]:
    """Of the changes during a step, both ends of what does not outlive it, in order."""
    open_: dict[int, _Change] = {}
    found: list[_Change] = []
    for change in changes:
        if change.bytes > 0:
            open_[change.address] = change
        elif change.address in open_:
            found += [open_.pop(change.address), change]
    return sorted(found, key=lambda change: change.at)


def _most(changes: Sequence[_Change]) -> int:
    alive = most = 0
    for change in changes:
        alive += change.bytes
        most = max(most, alive)
    return most


@dataclass(frozen=True)
class GraphPeak:
    """A call of a compiled graph: what tensors outside the block need at most, by its plan and measured, and what was
    measured of what steps took for themselves. `is_known`: no other graph made its arguments, which may die in it."""

    name: str
    plan: int | None
    measured: int
    own: Mapping[str, int]
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
    return GraphPeak(span.name, plan, span.without_own, span.own, plan is not None and is_whole)


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
