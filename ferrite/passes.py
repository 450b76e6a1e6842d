"""Runs a list of passes: checks, times and records around each one.

A graph pass is a function `pass_(graph) -> int` that edits an FX graph and says in how many places; `edit` runs a
list of them over a graph and everything below it, children first. A data pass is a function from a program to a new
program; `rewrite` runs a list of those. The name of a pass is its function's name.

Around every pass: it is left out if the option `disable` names it or its stage, or if `bisect_limit` passes have run
since the last reset, the last of which makes only `bisect_rewrites` rewrites; the graph is checked if it changed; a
pass that fails is named, the stage starts again from its snapshot without that pass, and under `strict` the failure is
raised.

One piece of state lives here: how many passes were applied, calls lowered and kernels made since `reset_applications`.
Numbers are given out in order, so a limit found by bisection means the same thing in the next run.
"""

from __future__ import annotations

import logging
import operator
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from ferrite.errors import Malformed, UserFault
from ferrite.graph.check import check_graph
from ferrite.graph.ledger import keep_ledger
from ferrite.graph.query import family
from ferrite.graph.snapshot import restore, take
from ferrite.graph.text import show_graph
from ferrite.options import Options, with_effect
from ferrite.report.record import GraphRecord, PassRun

if TYPE_CHECKING:
    from torch.fx import Graph, GraphModule

log = logging.getLogger(__name__)

GraphPass: TypeAlias = "Callable[[Graph], int]"
Program = TypeVar("Program")

PASSES, LOWERINGS, KERNELS = "passes", "lowerings", "kernels"
_applied: Counter[str] = Counter()
_applied_lock = threading.Lock()


def reset_applications() -> None:
    with _applied_lock:
        _applied.clear()


def applications(kind: str = PASSES) -> int:
    """How many passes were applied since the last reset, or calls lowered, or kernels made."""
    return _applied[kind]


def room(kind: str, limit: int | None) -> int | None:
    """How many more of a kind a limit allows."""
    return None if limit is None else max(0, limit - _applied[kind])


def number(kind: str, count: int) -> range:
    """The numbers of so many further ones."""
    with _applied_lock:
        _applied[kind] += count
        return range(_applied[kind] - count + 1, _applied[kind] + 1)


def edit(
    module: GraphModule,
    stage: str,
    passes: Sequence[GraphPass],
    options: Options,
    record: GraphRecord,
    *,
    after_autograd: bool = True,
) -> int:
    """Run `passes` over the graph and its children; gives the number of changes."""
    if not passes:
        return 0
    changed = 0
    for name, member in family(module):
        changed += _edit_one(member, name, stage, tuple(passes), options, record, after_autograd)
    return changed


def _edit_one(
    module: GraphModule,
    name: str,
    stage: str,
    passes: tuple[GraphPass, ...],
    options: Options,
    record: GraphRecord,
    after_autograd: bool,
) -> int:
    spare = take(module.graph)
    changed, decisions = 0, len(record.decisions)
    facts: dict[str, Any] = {}
    explain, asked = options.explain_patterns, with_effect(options)
    text = show_graph(module.graph) if options.keep_text else None
    for position, run in enumerate(passes):
        where = f"{stage}.{run.__name__}"
        number, note = _admit(stage, run.__name__, options)
        if number is None:
            record.passes.append(PassRun(stage, run.__name__, name, None, 0.0, note=note))
            continue
        before = text
        start = time.perf_counter()
        try:
            allowed = _rewrites_allowed(number, options)
            with keep_ledger(module.graph, run.__name__, allowed, explain, facts, asked) as ledger:
                count = run(module.graph)
            if count != ledger.taken:
                facts.clear()  # edited by other means than the judge, who keeps them right
            if count and options.check:
                check_graph(module, where, after_autograd=after_autograd)
        except Exception as error:
            seconds = time.perf_counter() - start
            if options.strict or isinstance(error, UserFault):
                raise error if isinstance(error, (Malformed, UserFault)) else _failed(where, name, error) from error
            note = f"failed: {type(error).__name__}: {error}"
            log.warning(
                "Ferrite pass %s failed on graph %s and is left out: %s: %s", where, name, type(error).__name__, error
            )
            record.passes.append(PassRun(stage, run.__name__, name, None, seconds, number, note.splitlines()[0]))
            del record.decisions[decisions:]
            restore(module, spare)
            rest = passes[:position] + passes[position + 1 :]
            return _edit_one(module, name, stage, rest, options, record, after_autograd)
        seconds = time.perf_counter() - start
        if count and options.keep_text:
            text = show_graph(module.graph)
        rewrites = tuple(decision.subjects for decision in ledger.decisions if decision.taken)
        record.passes.append(PassRun(stage, run.__name__, name, count, seconds, number, "", before, text, rewrites))
        record.decisions += ledger.decisions
        changed += count
    return changed


def rewrite(
    program: Program,
    stage: str,
    passes: Sequence[Callable[[Program], Program]],
    options: Options,
    record: GraphRecord,
    *,
    name: str = "main",
    show: Callable[[Any], str] = str,
    same: Callable[[Program, Program], bool] = operator.is_,
) -> Program:
    """Run data passes, each from a program to a new one; a pass that fails leaves the program as it was. `same`:
    whether a pass has changed nothing."""
    for run in passes:
        number, note = _admit(stage, run.__name__, options)
        if number is None:
            record.passes.append(PassRun(stage, run.__name__, name, None, 0.0, note=note))
            continue
        start = time.perf_counter()
        try:
            result = run(program)
        except Exception as error:
            if options.strict:
                raise (
                    error if isinstance(error, Malformed) else _failed(f"{stage}.{run.__name__}", name, error)
                ) from error
            note = f"failed: {type(error).__name__}: {error}"
            log.warning("Ferrite pass %s.%s failed and is left out: %s", stage, run.__name__, note)
            record.passes.append(PassRun(stage, run.__name__, name, None, time.perf_counter() - start, number, note))
            continue
        seconds = time.perf_counter() - start
        texts = (show(program), show(result)) if options.keep_text else (None, None)
        record.passes.append(
            PassRun(stage, run.__name__, name, int(not same(result, program)), seconds, number, "", *texts)
        )
        program = result
    return program


def _admit(stage: str, name: str, options: Options) -> tuple[int | None, str]:
    """The number of this application, or None and why the pass is left out."""
    for word in (stage, name, f"{stage}.{name}"):
        if word in options.disable:
            return None, f"disabled by {word!r}"
    with _applied_lock:
        if options.bisect_limit is not None and _applied[PASSES] >= options.bisect_limit:
            return None, f"past the bisect limit of {options.bisect_limit}"
        _applied[PASSES] += 1
        return _applied[PASSES], ""


def _rewrites_allowed(number: int, options: Options) -> int | None:
    """Of the last pass that the limit lets through, only so many rewrites."""
    return options.bisect_rewrites if number == options.bisect_limit else None


def _failed(where: str, graph: str, error: Exception) -> Malformed:
    return Malformed(f"pass {where} failed on graph {graph}: {type(error).__name__}: {error}", where=where)
