"""The door: torch.compile enters here.

`compile` is what the entry point `torch_dynamo_backends` names. It checks options, shapes the interface, and asks the
cache; what that does not have goes through `compilation`. Whatever only a compile needs is imported where it starts: a
process that finds its graphs in the cache has its first result sooner.

What fails stays local (Note [Falling back]): a pass is left out, a graph runs as captured, a capture runs in eager;
each is recorded and logged once. Under `strict` it is a `FerriteError` instead.

State that lives here: the counter of graph ids; the latest records.
"""

# Note [Falling back]
#
#   a pass fails         the pass runner starts the stage again without it            (passes.py)
#   a graph fails        after autograd: FX's own code of that graph runs, boxed      (compilation.py)
#   a capture fails      Dynamo's graph runs in eager: an op that raises there raises as ever  (_compile_captured)
#
# What Dynamo itself must see goes through: SkipFrame, its restarts, errors it shortens, and fake-tensor errors that it
# turns into graph breaks.

from __future__ import annotations

import functools
import itertools
import logging
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo.exc import RestartAnalysis, ShortenTraceback, SkipFrame, exceptions_allowed_to_be_fallback
from torch._guards import TracingContext
from torch.fx import GraphModule

from ferrite import caching
from ferrite.collection import without_collection
from ferrite.decisions import Decision
from ferrite.errors import BrokenCache, UserFault, take_place
from ferrite.failure import FerriteError
from ferrite.graph.drawn_numbers import with_drawn_numbers
from ferrite.graph.eager_only import reason_for_eager
from ferrite.graph.query import family
from ferrite.graph.snapshot import restore, take
from ferrite.interface import compile_shaped
from ferrite.options import Options, check_folders, from_environment, resolve
from ferrite.report import trace, watch
from ferrite.report.record import Record
from ferrite.variants import Variants

if TYPE_CHECKING:
    from ferrite.artifact.compiled import CompiledGraph

log = logging.getLogger(__name__)

_PASS_THROUGH = (ShortenTraceback, SkipFrame, RestartAnalysis, *exceptions_allowed_to_be_fallback)
_SUPPORTED_DEVICES = frozenset({"cpu", "meta"})

# What Ferrite does is not the user's program, wherever Dynamo meets it: in a compile within `backward()` after a graph
# break, or in a call.
torch._dynamo.trace_rules.add("ferrite")

_graph_ids = itertools.count()
_records: deque[Record] = deque(maxlen=64)


def compile(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """What `torch.compile(..., backend="ferrite")` calls with each captured graph. Also callable with any FX graph."""
    chosen = chosen_options(mode, options)
    compile_flat = functools.partial(_compile_captured, options=chosen)
    if TracingContext.try_get() is not None or torch._functorch.config.force_autograd_cache:
        return compile_shaped(gm, example_inputs, compile_flat)
    shaped = functools.partial(compile_shaped, compile_flat=compile_flat)
    return Variants(gm, example_inputs, shaped, strict=chosen.strict)


def chosen_options(mode: str | None, options: Mapping[str, Any] | None) -> Options:
    """What the environment says, with what the user asks for on top; raises RuntimeError for what means nothing."""
    chosen = resolve(from_environment(os.environ), mode, options)
    check_folders(chosen)
    if chosen.has_words:
        from ferrite.pipeline import check_options

        check_options(chosen)
    return chosen


def reset() -> None:
    """Forget what earlier compiles left behind; `torch._dynamo.reset()` calls this too."""
    from ferrite.passes import reset_applications

    global _graph_ids
    reset_applications()
    _graph_ids = itertools.count()
    _records.clear()


compile.reset = reset  # type: ignore[attr-defined]


def last_record() -> Record | None:
    """What the latest compile in this process did; None before the first one."""
    return _records[-1] if _records else None


def records() -> list[Record]:
    """The records of the latest compiles since the last reset, oldest first."""
    return list(_records)


def _compile_captured(module: GraphModule, inputs: list[Any], options: Options) -> Callable[..., Any]:
    """One graph from Dynamo becomes one callable: from the cache, compiled, or in eager if that fails."""
    record = Record(next(_graph_ids))
    _records.append(record)
    _refuse_other_devices(inputs, options)
    inputs = with_drawn_numbers(module, inputs)
    reason = reason_for_eager(module, inputs)
    if reason is not None:
        entry = record.graph("pre_grad")
        entry.decisions.append(Decision("compile", (entry.name,), False, reason))
        return torch._dynamo.disable(module.forward, reason=f"Ferrite leaves this graph to eager: {reason}")
    spare = {member: take(member.graph) for _, member in family(module)} if isinstance(module, GraphModule) else {}
    try:
        with without_collection():
            lookup = caching.look_up(module, options, _taker(module))
            function = _from_cache(lookup, record, options)
        if function is None:
            from ferrite.compilation import Compilation

            function = Compilation(record, options).compile(module, inputs, lookup)
        return function
    except _PASS_THROUGH:
        raise
    except Exception as error:
        place = take_place(error) or "stage autograd"
        if options.strict or isinstance(error, (UserFault, BrokenCache)) or _tracing_changed_inputs(module, inputs):
            where = f"graph {record.graph_id}, {place}"
            raise _same_kind(error)(where, error).with_traceback(error.__traceback__) from error
        why = f"{type(error).__name__}: {error}"
        record.failures.append(f"graph {record.graph_id} runs in eager: failed in {place}: {why}")
        log.warning("Ferrite runs graph %d in eager: failed in %s: %s", record.graph_id, place, why)
        for member, snapshot in spare.items():
            restore(member, snapshot)
        return torch._dynamo.disable(module.forward, reason="runs in eager after a failed compile")


def _same_kind(error: Exception) -> type[FerriteError]:
    """FerriteError, or a kind of it that a handler for eager's exception catches as well."""
    if isinstance(error, RuntimeError):  # which FerriteError is already
        return FerriteError
    return type("FerriteError", (FerriteError, type(error)), {})


def _tracing_changed_inputs(module: Any, inputs: list[Any]) -> bool:
    """Whether a trace that failed left a fake input with other sizes: Dynamo cannot guard such a graph, so it cannot
    run in eager. In-place ops with wrong shapes do this: eager would raise what the trace raised."""
    if not isinstance(module, GraphModule):
        return False
    for node, real in zip(module.graph.find_nodes(op="placeholder"), inputs, strict=False):
        fake = node.meta.get("example_value")
        if isinstance(fake, torch.Tensor) and isinstance(real, torch.Tensor):
            sizes = [extent if isinstance(extent, int) else extent.node.hint for extent in fake.shape]
            if sizes != list(real.shape):
                return True
    return False


def _taker(module: Any) -> caching.Taker | None:
    """PyTorch's own store of whole functions, if it is on and will have the one with this graph."""
    if not torch._dynamo.config.caching_precompile:
        return None
    from ferrite.packaging import offer

    identity = getattr(module, "_backend_id", None)
    return None if identity is None else functools.partial(offer, identity)


def _from_cache(lookup: caching.Lookup, record: Record, options: Options) -> Callable[..., Any] | None:
    """What was compiled before, with the record of that; None if there is nothing, or nothing that works."""
    if lookup.outcome in ("off", "package"):
        return None
    told, function = record.graph("cache"), None
    made: dict[str, CompiledGraph] = {}  # by phase

    def tell(compiled: CompiledGraph) -> None:
        made[compiled.facts.phase] = compiled
        trace.compiled_graph(compiled)

    with told.stage("load"):
        if lookup.entry is not None:
            try:
                function = caching.wrapped(lookup.entry, options, lookup.lines, tell, lookup.held)
                graphs = caching.said_by(lookup.entry)
                record.graphs += graphs
                for graph in graphs:
                    trace.count(graph)
                    if graph.phase in lookup.entry.graphs:
                        graph.compiled = made[graph.phase]
            except Exception as error:
                # The digest is right, so this is an entry that we should not have written.
                lookup.fail(f"{type(error).__name__}: {error}")
    told.decisions.append(Decision("cache", (told.name,), function is not None, lookup.reason))
    for compiled in made.values() if function is not None else ():
        watch.show_graph(compiled)
    return function


def _refuse_other_devices(inputs: Sequence[Any], options: Options) -> None:
    for value in inputs:
        if isinstance(value, torch.Tensor) and value.device.type not in _SUPPORTED_DEVICES:
            if options.skip_unsupported_devices:
                raise SkipFrame(f"Ferrite compiles for the CPU; an input is on {value.device}")
            raise FerriteError("inputs", RuntimeError(f"Ferrite compiles for the CPU; an input is on {value.device}"))
