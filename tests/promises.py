"""Looks whether backward graphs are given what they were compiled for.

A backward graph reads what the forward saved by the sizes and strides that it was compiled for. These are compared here
with the real tensors of every call, which neither Dynamo's guards nor AOTAutograd do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from ferrite.artifact.check_inputs import checker
from ferrite.artifact.compiled import CompiledGraph

Run = Callable[[list[Any]], Any]


@contextlib.contextmanager
def promises_kept() -> Iterator[list[str]]:
    """Around whatever loads graphs: as long as they live, a call of a backward graph with arguments that it was not
    compiled for raises RuntimeError. Yields the phases of the graphs that ran, once for each call."""
    load, looked_at = CompiledGraph.load, []

    def load_and_look(compiled: CompiledGraph) -> Run:
        if compiled.run is None:
            load(compiled)
            compiled.run = _looking(compiled, compiled.run, looked_at)
            compiled.body = _looking(compiled, compiled.body, looked_at)
        return load(compiled)

    with mock.patch.object(CompiledGraph, "load", load_and_look):
        yield looked_at


def _looking(compiled: CompiledGraph, run: Any, looked_at: list[str]) -> Run:
    check = checker(compiled.program, compiled.facts.device_types, compiled.facts.assumed)

    def look(args: list[Any]) -> Any:
        looked_at.append(compiled.facts.phase)
        if compiled.facts.phase == "backward":
            check(args)
        return run(args)

    look.__dict__ |= getattr(run, "__dict__", {})
    return look
