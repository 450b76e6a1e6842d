"""The record of one compile: stages, passes, decisions, fallbacks and texts, as plain data.

One `Record` belongs to one call of the backend; its forward and backward graphs each add a `GraphRecord`. The pass
runner and the pipeline write into it while they work; everybody else only reads. What was compiled is not part of a
record, which outlives it: a graph's record leads to it for as long as it is alive.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch._dynamo.utils import dynamo_timed

from ferrite.decisions import Decision
from ferrite.errors import within
from ferrite.step_cost import StepCost

if TYPE_CHECKING:
    from ferrite.artifact.compiled import CompiledGraph


@dataclass(frozen=True)
class Fallback:
    """An op that runs in eager, how often it stands in the graph, and why; `is_library`: it is meant to."""

    op: str
    count: int
    reason: str
    is_library: bool = False


@dataclass(frozen=True)
class PassRun:
    """One pass over one graph. `changed` is None when the pass did not run; `note` then says why. `rewrites` names the
    nodes of each rewrite, in order, if the pass keeps count of them."""

    stage: str
    name: str
    graph: str
    changed: int | None
    seconds: float
    number: int | None = None
    note: str = ""
    before: str | None = None
    after: str | None = None
    rewrites: tuple[tuple[str, ...], ...] = ()


@dataclass
class GraphRecord:
    """What became of one graph: its stages in order, and what they said."""

    name: str
    phase: str
    stages: dict[str, float] = field(default_factory=dict)
    passes: list[PassRun] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    fallbacks: list[Fallback] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    nodes: int = 0
    lowered: int = 0  # calls that became loops, or arithmetic of the host
    peak_memory: int | None = None  # bytes that a call needs at most beside its arguments, if memory was planned
    block_memory: int | None = None  # bytes of them that lie in the block
    changing_block: str = ""  # the same by the sizes of a call, where these change: "256*s0 + 64"
    costs: tuple[StepCost, ...] = ()  # of each step, in order
    numbered: dict[str, dict[int, str]] = field(default_factory=dict)  # calls and kernels, while bisection limits them

    def __post_init__(self) -> None:
        self._compiled: weakref.ref[CompiledGraph] | None = None  # no field: nothing of it is stored

    @property
    def compiled(self) -> CompiledGraph | None:
        """What runs, while somebody can still call it: `code.source` is its Python, `code.lines` leads from a line of
        that to the user's."""
        return None if self._compiled is None else self._compiled()

    @compiled.setter
    def compiled(self, compiled: CompiledGraph) -> None:
        self._compiled = weakref.ref(compiled)

    def number(self, kind: str, numbers: Iterable[int], shown: Iterable[str]) -> None:
        """Which calls or kernels have these numbers, where somebody asks."""
        if found := dict(zip(numbers, shown, strict=False)):
            self.numbered[kind] = found

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage, here and in PyTorch's own timers; a stage that runs twice adds up. What fails in it carries its
        name."""
        start = time.perf_counter()
        try:
            with within(dict, {"stage": name}), dynamo_timed(f"ferrite.{name}"):
                yield
        finally:
            self.stages[name] = self.stages.get(name, 0.0) + time.perf_counter() - start

    @property
    def share_lowered(self) -> float:
        """Of the calls that are not meant for a library, how many were lowered."""
        rest = sum(fallback.count for fallback in self.fallbacks if not fallback.is_library)
        return self.lowered / (self.lowered + rest) if self.lowered + rest else 1.0

    @property
    def bytes(self) -> int:
        """That a call reads and writes, over all its steps."""
        return sum(cost.bytes for cost in self.costs)

    @property
    def seconds(self) -> float:
        return sum(self.stages.values())


@dataclass
class Record:
    """One call of the backend, from Dynamo's graph to callables."""

    graph_id: int
    graphs: list[GraphRecord] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def graph(self, phase: str) -> GraphRecord:
        """Open the record of the next graph of this call."""
        entry = GraphRecord(name=f"graph {self.graph_id} {phase}", phase=phase)
        self.graphs.append(entry)
        return entry

    def phase(self, phase: str) -> GraphRecord | None:
        """The latest graph of a phase ("pre_grad", "joint", "forward", "backward", "inference"), if there is one."""
        return next((entry for entry in reversed(self.graphs) if entry.phase == phase), None)

    @property
    def passes(self) -> list[PassRun]:
        return [run for entry in self.graphs for run in entry.passes]

    @property
    def fallbacks(self) -> list[Fallback]:
        return [fallback for entry in self.graphs for fallback in entry.fallbacks]

    @property
    def decisions(self) -> list[Decision]:
        return [decision for entry in self.graphs for decision in entry.decisions]

    @property
    def seconds(self) -> float:
        return sum(entry.seconds for entry in self.graphs)

    def __str__(self) -> str:
        from ferrite.report.render import (
            render,
        )  # the only user of rich; a compile that nobody looks at does not load it

        return render(self)
