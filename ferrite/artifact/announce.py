"""Tells `perf` and `gdb` which kernel is where in memory, if a user asks for it.

    graph_0_inference.kernel_6_0.sin.mul (model.py:4, model.py:7)

is the first tree of loops of a kernel: the graph, the kernel, the results that it writes as the record names them, and
for perf the user's lines. What runs between kernels and what shares them out to threads is told with the first graph.
A graph that comes from the cache has the name that it was compiled under.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

from ferrite.artifact.kernels import NativeKernel, program_of
from ferrite.host.nodes import HostProgram, Launch
from ferrite.native.build import LASTING, Library
from ferrite.native.elf import functions_in, is_elf
from ferrite.native.gdb import tell_gdb
from ferrite.native.perf_map import tell_perf

MOST_RESULTS = 4  # in a name

log = logging.getLogger(__name__)


def announce(program: HostProgram, kernels: Mapping[str, NativeKernel], *, perf_map: bool, gdb: bool) -> None:
    """All code of a graph, whose kernels are in one library, and what all graphs share; each of it once. Never raises:
    nothing but names depends on it."""
    try:
        for library in {kernel.library for kernel in kernels.values()}:
            _tell(library, _names_in(program, kernels), perf_map, gdb)
        for each in LASTING:
            _tell(each, _as_it_is, perf_map, gdb)
    except Exception:  # whatever an object of a strange form leads to, the graph runs
        log.warning("Ferrite does not tell the names of the kernels of %s", program.name, exc_info=True)


Naming = Callable[[str], tuple[str, str]]  # from a symbol to a name without blanks, and lines


def _as_it_is(symbol: str) -> tuple[str, str]:
    return symbol, ""


def _names_in(program: HostProgram, kernels: Mapping[str, NativeKernel]) -> Naming:
    results: dict[str, dict[str, None]] = {}
    lines: dict[str, dict[str, None]] = {}
    roles = {
        name: [parameter.role for parameter in program_of(kernel.source).parameters] for name, kernel in kernels.items()
    }
    for part in (program, *program.functions):
        for step in part.steps:
            if isinstance(step, Launch) and step.kernel in roles:
                written = [name for name, role in zip(step.buffers, roles[step.kernel], strict=True) if role != "in"]
                results.setdefault(step.kernel, {}).update(dict.fromkeys(written))
                lines.setdefault(step.kernel, {}).update(dict.fromkeys(filter(None, step.source.split(", "))))

    def name(symbol: str) -> tuple[str, str]:
        kernel = max((each for each in results if symbol.startswith(f"{each}_")), key=len, default="")
        first = list(results.get(kernel, ()))[:MOST_RESULTS]
        return ".".join((program.name, symbol, *first)), ", ".join(lines.get(kernel, ()))

    return name


def _tell(library: Library, naming: Naming, perf_map: bool, gdb: bool) -> None:
    wanted = {who for who, is_wanted in (("perf", perf_map), ("gdb", gdb)) if is_wanted} - library.told
    library.told |= wanted
    for data in library.objects if wanted else ():
        if not is_elf(data):
            continue
        functions = functions_in(data, library.addresses)
        names = [naming(function.name) for function in functions]
        if "perf" in wanted:
            with_lines = [f"{name} ({lines})" if lines else name for name, lines in names]
            tell_perf(replace(each, name=name) for each, name in zip(functions, with_lines, strict=True))
        if "gdb" in wanted:
            plain = [replace(each, name=name) for each, (name, _) in zip(functions, names, strict=True)]
            library.leaving += (tell_gdb(data, plain),)
