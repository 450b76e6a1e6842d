"""One trace for several engines: Dynamo and AOTAutograd are four fifths of what a program takes.

Engines of Ferrite differ in what is made of a graph after autograd, so each such graph is compiled once for every
engine, and a call goes to the code of the engine whose turn it is. An engine that fails to compile raises when it is
called.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch.fx import GraphModule

from ferrite import compilation
from ferrite.artifact.compiled import CompiledGraph
from ferrite.graph.snapshot import copy_module
from ferrite.options import Options, resolve
from ferrite.pipeline import Inputs, compile_graph
from ferrite.report.record import GraphRecord

from .engines import Engine
from .programs import Program

Body = Callable[[list[Any]], Any]


class Together:
    """A program, compiled for all of these engines. Use inside `watching`."""

    def __init__(self, program: Program, engines: Sequence[Engine]) -> None:
        self.engines = engines
        self.turn = engines[0]
        self.function = engines[0].compiled(program)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Graphs may be compiled by the first backward, or by a call with other sizes."""
        with mock.patch.object(compilation, "scheme_of", return_value=self._compile):
            yield

    def _compile(
        self, module: GraphModule, graph_id: int, phase: str, inputs: Inputs, options: Options, record: GraphRecord
    ) -> CompiledGraph:
        bodies: dict[str, Body] = {}
        made: list[CompiledGraph] = []
        for engine in reversed(self.engines):
            # The first engine's passes edit the graph itself, of which AOTAutograd hears the strides.
            own = module if engine is self.engines[0] else copy_module(module)
            chosen = resolve(Options(), None, engine.options)
            try:
                with engine.compiling():
                    made.append(compile_graph(own, graph_id, phase, inputs, chosen, record))
                    bodies[engine.name] = made[-1].load()
            except Exception as error:
                if len(self.engines) == 1 + len(bodies) and not made:
                    raise  # as all have done
                bodies[engine.name] = _raising(error)
        made[-1].run = self._dispatch(bodies)
        return made[-1]

    def _dispatch(self, bodies: dict[str, Body]) -> Body:
        def run(args: list[Any]) -> Any:
            # Here and not around the call: Dynamo would compile again for another number of threads.
            before = torch.get_num_threads()
            torch.set_num_threads(self.turn.threads)
            try:
                return bodies[self.turn.name](args)
            finally:
                torch.set_num_threads(before)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run


def _raising(error: Exception) -> Body:
    def run(args: list[Any]) -> Any:
        raise error

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
