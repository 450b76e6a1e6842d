"""Functions of the user's that are given every graph that will run: compiled here, or found in the cache.

    with ferrite.watch_graphs(lambda graph: print(graph.code.source)):
        compiled(x)

What they are given is a `CompiledGraph`: its Python with the user's lines (`code`), its text (`str`), what it calls
(`eager_calls`), what is known of it (`facts`). They look and change nothing, so no key of the cache depends on them.
One that raises is an error that names it, as for a pass that the user registered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ferrite.artifact.compiled import CompiledGraph
from ferrite.errors import UserFault


class Watch:
    """One function that looks; leaving it as a context, or `remove`, ends it."""

    def __init__(self, function: Callable[[CompiledGraph], Any]) -> None:
        self.function = function

    def remove(self) -> None:
        if self in _watching:
            _watching.remove(self)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


_watching: list[Watch] = []


def watch_graphs(function: Callable[[CompiledGraph], Any]) -> Watch:
    """Give `function` each graph that will run, from now on."""
    if not callable(function):
        raise TypeError(f"a graph is given to a function, not to a {type(function).__name__}")
    watch = Watch(function)
    _watching.append(watch)
    return watch


def show_graph(compiled: CompiledGraph) -> None:
    """To all who watch. Raises `UserFault` for what one of them raises."""
    for watch in tuple(_watching):
        try:
            watch.function(compiled)
        except Exception as error:
            name = getattr(watch.function, "__name__", type(watch.function).__name__)
            raise UserFault(
                f"{name}, which watches graphs, failed: {type(error).__name__}: {error}", at=compiled.program.name
            ) from error
