"""Memory does not grow with calls of changing sizes, nor with graphs that are compiled and dropped: the short form of
`make flat-memory`, in which a leak of a few kilobytes a round shows."""

from __future__ import annotations

import torch

from bench.flat_memory import changing_sizes, compile_and_free, growth


def test_calls_with_changing_sizes() -> None:
    torch._dynamo.reset()
    assert growth("calls", changing_sizes(), 500, looks=2).grown < 2 << 20


def test_graphs_that_are_compiled_and_dropped() -> None:
    assert (
        growth("compiles", compile_and_free(), 100, looks=2).grown < 2 << 20
    )  # code of one graph takes 28 KB and more
