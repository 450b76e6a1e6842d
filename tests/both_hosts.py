"""Runs every compiled graph in both executions of its host program, native and Python, and compares all bits.

It is the same program with the same kernels, so nothing is traced or compiled twice: Python runs first, on copies of
the arguments, then the native program as ever, from the same random state. Compared are results (values, dtypes,
strides, which of them share memory with what), arguments that somebody sees afterwards, errors, and where the random
stream ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import msgspec
import torch
from torch import Tensor

from ferrite.artifact.compiled import CompiledGraph
from tests.copies import Copier, dense_parts

Run = Callable[[list[Any]], Any]


class HostsDiffer(AssertionError):
    """What the two executions of one graph gave differs."""


@contextlib.contextmanager
def both_hosts(found: list[str] | None = None) -> Iterator[list[str]]:
    """Around whatever loads graphs, which then run twice for as long as they live. Differences are raised, or go into
    `found` if that is given. Yields the names of the graphs that ran in both executions, once for each call."""
    load, compared = CompiledGraph.load, []

    def load_both(compiled: CompiledGraph) -> Run:
        if compiled.run is None:
            run = load(compiled)
            if compiled._alive is not None:  # it is a native program
                python = _in_python(compiled, load)
                compiled.run = in_both(compiled, run, python, compared, found)
                compiled.body = in_both(compiled, compiled.body, python, compared, found)
        return load(compiled)

    with mock.patch.object(CompiledGraph, "load", load_both):
        yield compared


def _in_python(compiled: CompiledGraph, load: Callable[[CompiledGraph], Run]) -> Run:
    facts = msgspec.structs.replace(compiled.facts, host="python")
    return load(CompiledGraph(compiled.program, compiled.constants, facts, compiled.stored, compiled.built))


def in_both(
    compiled: CompiledGraph, native: Run, python: Run, compared: list[str], found: list[str] | None = None
) -> Run:
    """A function that runs both, compares them, and gives what the native one gave."""

    def run(args: list[Any]) -> Any:
        given, copies = list(args), list(map(Copier(), args))
        before = torch.get_rng_state()
        theirs = _outcome(python, list(copies))
        after = torch.get_rng_state()
        torch.set_rng_state(before)
        ours = _outcome(native, args)
        compared.append(compiled.program.name)
        seen = [n for n, entry in enumerate(compiled.program.inputs) if not (entry.saved or entry.donated)]
        differences = [
            *_differences(ours, theirs),
            *(f"argument {n}" for n in seen if _bits(given[n]) != _bits(copies[n])),
            *([] if _sharing(ours, given) == _sharing(theirs, copies) else ["shared memory"]),
            *([] if torch.equal(torch.get_rng_state(), after) else ["the end of the random stream"]),
        ]
        if differences:
            text = f"{compiled.program.name} in Python is another one: {', '.join(differences)}"
            if found is None:
                raise HostsDiffer(text)
            found.append(text)
        if isinstance(ours, Exception):
            raise ours
        return ours

    run.__dict__ |= getattr(native, "__dict__", {})
    return run


def _outcome(run: Run, args: list[Any]) -> Any:
    """Results, or the error."""
    try:
        return run(args)
    except Exception as error:
        return error


def _differences(ours: Any, theirs: Any) -> list[str]:
    if isinstance(ours, Exception) or isinstance(theirs, Exception):
        alike = type(ours) is type(theirs) and str(ours) == str(theirs)
        return [] if alike else [f"{theirs!r} instead of {ours!r}"]
    if len(ours) != len(theirs):
        return [f"{len(theirs)} results instead of {len(ours)}"]
    return [f"result {n}" for n, pair in enumerate(zip(ours, theirs, strict=True)) if _bits(pair[0]) != _bits(pair[1])]


def _bits(value: Any) -> Any:
    """What is equal for equal values, zeros by sign and NaN by payload, in equal layouts. A tensor without elements
    that is kept for the backward graph may lie as the trace says or as the argument does that it is a view of."""
    if not isinstance(value, Tensor):
        return type(value), repr(value)
    strides = value.stride() if value.layout is torch.strided and value.numel() else value.layout
    layout = (value.dtype, tuple(value.shape), strides)
    parts = []
    for part in dense_parts(value):
        plain = part.detach().resolve_conj().resolve_neg()
        plain = plain.int_repr() if plain.is_quantized else plain
        flat = plain.reshape(-1).clone(memory_format=torch.contiguous_format)
        parts.append(flat.view(torch.uint8).numpy().tobytes())
    return layout, parts


def _sharing(results: Any, args: Sequence[Any]) -> list[tuple[int, int]]:
    """For each tensor, the first one with the same memory, and where it starts there."""
    results = () if isinstance(results, Exception) else results
    plain = [value for value in (*args, *results) if isinstance(value, Tensor) and value.layout is torch.strided]
    first: dict[int, int] = {}
    return [
        (first.setdefault(value.untyped_storage()._cdata, n), value.storage_offset()) for n, value in enumerate(plain)
    ]
