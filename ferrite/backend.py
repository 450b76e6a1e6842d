"""The door: torch.compile enters here. The one place that calls AOTAutograd.

`compile` is what the entry point `torch_dynamo_backends` names. It checks options, shapes the interface, and calls
AOTAutograd with Ferrite's passes, partitioner and compilers; each graph that comes back goes through `pipeline`.

What fails stays local (Note [Falling back]): a pass is left out, a graph runs as captured, a capture runs in eager;
each is recorded and logged once. Under `strict` it is a `FerriteError` instead.

State that lives here: the options of the environment, read at import; the counter of graph ids; the latest records.
"""

# Note [Falling back]
#
#   a pass fails         the pass runner starts the stage again without it            (passes.py)
#   a graph fails        after autograd: FX's own code of that graph runs, boxed      (_compile_after_autograd)
#   a capture fails      Dynamo's graph runs in eager: an op that raises there raises as ever  (_compile_captured)
#
# What Dynamo itself must see goes through: SkipFrame, its restarts, errors it shortens, and fake-tensor errors that it
# turns into graph breaks.

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch._dynamo import convert_frame
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import (
    BackendCompilerFailed,
    RestartAnalysis,
    ShortenTraceback,
    SkipFrame,
    exceptions_allowed_to_be_fallback,
)
from torch._dynamo.utils import preserve_rng_state
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext
from torch.fx import GraphModule
from torch.utils._python_dispatch import _disable_current_modes

from ferrite import caching, pipeline
from ferrite.artifact.compiled import CompiledGraph
from ferrite.collection import without_collection
from ferrite.decisions import Decision
from ferrite.errors import BrokenCache, UserFault
from ferrite.graph.decompose import decomposition_table
from ferrite.graph.eager_only import reason_for_eager
from ferrite.graph.query import family
from ferrite.graph.snapshot import restore, take
from ferrite.graph.strides import current_strides
from ferrite.graph.whole import kept_whole
from ferrite.interface import compile_shaped
from ferrite.options import Options, from_environment, resolve
from ferrite.packaging import Package
from ferrite.passes import reset_applications
from ferrite.report import trace
from ferrite.report.debug import DebugFolder
from ferrite.report.record import Record
from ferrite.schemes import scheme_of

log = logging.getLogger(__name__)

_PASS_THROUGH = (ShortenTraceback, SkipFrame, RestartAnalysis, *exceptions_allowed_to_be_fallback)
_SUPPORTED_DEVICES = frozenset({"cpu", "meta"})

_environment = from_environment(os.environ)
_graph_ids = itertools.count()
_records: deque[Record] = deque(maxlen=64)


class FerriteError(BackendCompilerFailed):
    """A compile failed. Names the stage, keeps the exception, shows as one readable error through Dynamo."""

    def __init__(self, where: str, inner: Exception) -> None:
        self.backend_name = "ferrite"
        self.inner_exception = inner
        message = f"Ferrite failed in {where}:\n{type(inner).__name__}: {inner}"
        # The frame that raises: Dynamo cuts the traceback there, and must find it in it.
        frame = inspect.currentframe()
        ShortenTraceback.__init__(self, message, first_useful_frame=frame.f_back if frame else None)


def compile(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """What `torch.compile(..., backend="ferrite")` calls with each captured graph. Also callable with any FX graph."""
    chosen = resolve(_environment, mode, options)
    pipeline.check_options(chosen)
    return compile_shaped(gm, example_inputs, functools.partial(_compile_captured, options=chosen))


def reset() -> None:
    """Forget what earlier compiles left behind; `torch._dynamo.reset()` calls this too."""
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
    """One graph from Dynamo becomes one callable: through AOTAutograd, or in eager if that fails."""
    record = Record(next(_graph_ids))
    _records.append(record)
    compilation = _Compilation(record, options)
    _refuse_other_devices(inputs, options)
    reason = reason_for_eager(module)
    if reason is not None:
        entry = record.graph("pre_grad")
        entry.decisions.append(Decision("compile", (entry.name,), False, reason))
        return torch._dynamo.disable(module.forward, reason=f"Ferrite leaves this graph to eager: {reason}")
    spare = {member: take(member.graph) for _, member in family(module)} if isinstance(module, GraphModule) else {}
    try:
        return compilation.compile(module, inputs)
    except _PASS_THROUGH:
        raise
    except Exception as error:
        if options.strict or isinstance(error, (UserFault, BrokenCache)) or _tracing_changed_inputs(module, inputs):
            raise _same_kind(error)(f"graph {record.graph_id}", error).with_traceback(error.__traceback__) from error
        record.failures.append(f"graph {record.graph_id} runs in eager: {type(error).__name__}: {error}")
        log.warning("Ferrite runs graph %d in eager: %s: %s", record.graph_id, type(error).__name__, error)
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


class _Compilation:
    """One call of the backend: options, record, and the callbacks that AOTAutograd calls, now or at first backward."""

    def __init__(self, record: Record, options: Options) -> None:
        self.record = record
        self.options = options
        self.made: dict[str, CompiledGraph] = {}  # by phase
        self.is_guarded = TracingContext.try_get() is not None  # Dynamo called, and looks at arguments before each call

    def compile(self, module: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        lookup = caching.look_up(module, self.options)
        function = self._from_cache(lookup)
        return function or self._through_autograd(module, inputs, lookup)

    def _from_cache(self, lookup: caching.Lookup) -> Callable[..., Any] | None:
        """What was compiled before, with the record of that; None if there is nothing, or nothing that works."""
        if lookup.outcome in ("off", "package"):
            return None
        told, function = self.record.graph("cache"), None
        with told.stage("load"):
            if lookup.entry is not None:
                try:
                    function, graphs = caching.wrapped(lookup.entry), caching.said_by(lookup.entry)
                    self.record.graphs += graphs
                except Exception as error:
                    # The digest is right, so this is an entry that we should not have written.
                    lookup.fail(f"{type(error).__name__}: {error}")
        told.decisions.append(Decision("cache", (told.name,), function is not None, lookup.reason))
        return function

    def _through_autograd(self, module: GraphModule, inputs: list[Any], lookup: caching.Lookup) -> Callable[..., Any]:
        use_rows = self.options.executor != "eager"
        run_aot = aot_autograd(
            fw_compiler=functools.partial(self._compile_after_autograd, phase="forward"),
            bw_compiler=self._compile_backward,
            inference_compiler=functools.partial(self._compile_after_autograd, phase="inference"),
            partition_fn=self._partition,
            decompositions=decomposition_table(self.options.decompose, use_rows=use_rows),
            keep_inference_input_mutations=True,
            pre_grad_passes=lambda captured, _: self._edit_pre_grad(captured, inputs),
        )
        with (
            # PyTorch's own cache knows results of its own kind only.
            torch._functorch.config.patch(unlift_effect_tokens=True, force_autograd_cache=False),
            kept_whole() if use_rows else nullcontext(),
            caching.watching(lookup, self.made, self.record),
        ):
            function = run_aot(module, inputs)
        return Package.of(function, lookup) if lookup.outcome == "package" else function

    def _edit_pre_grad(self, module: GraphModule, inputs: Sequence[Any]) -> GraphModule:
        trace.graph(f"ferrite graph {self.record.graph_id} before pre_grad", module, trace.pre_grad_log)
        entry = self.record.graph("pre_grad")
        pipeline.edit_pre_grad(module, self.options, entry, inputs)
        if any(run.changed for run in entry.passes):
            trace.graph(f"ferrite graph {self.record.graph_id} after pre_grad", module, trace.pre_grad_log)
        return module

    def _partition(self, joint: GraphModule, inputs: Sequence[Any], **facts: Any) -> tuple[GraphModule, GraphModule]:
        """Joint passes, then the user's partitioner or min-cut; what AOTAutograd knows is handed on untouched."""
        pipeline.edit_joint(joint, self.options, self.record.graph("joint"))
        split = self.options.partitioner or min_cut_rematerialization_partition
        return split(joint, inputs, **facts)

    def _compile_backward(self, module: GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        context = TracingContext.try_get()
        if context is not None and context.fw_metadata is not None and not self.options.donate_buffers:
            # A donated buffer makes a later backward(retain_graph=True) raise, which eager never does.
            context.fw_metadata.bw_donated_idxs = []
        # The first backward may run on a thread of autograd's own.
        with convert_frame.compile_lock:
            return self._compile_after_autograd(module, inputs, "backward")

    def _compile_after_autograd(
        self, module: GraphModule, inputs: Sequence[Any], phase: str
    ) -> Callable[[list[Any]], Any]:
        """One graph after autograd becomes a boxed callable: compiled, or FX's own code of it if that fails."""
        record, options, graph_id = self.record.graph(phase), self.options, self.record.graph_id
        log.info("Ferrite compiles %s graph %d", _LOUD[phase], graph_id)
        folder = DebugFolder(options, f"graph_{graph_id}_{phase}")
        with ExitStack() as quiet:
            quiet.enter_context(_disable_current_modes())
            quiet.enter_context(preserve_rng_state())
            quiet.enter_context(without_collection())
            if phase == "inference":
                pipeline.edit_joint(module, options, record)
            trace.graph(f"ferrite graph {graph_id} {phase} before post_grad", module, trace.post_grad_log)
            folder.captured(module, f"graph_{graph_id}_{phase}")
            spare = {member: take(member.graph) for _, member in family(module)}
            try:
                compiled = scheme_of(options)(module, graph_id, phase, _inputs_of(phase, inputs), options, record)
            except Exception as error:
                if options.strict or isinstance(error, UserFault):
                    raise FerriteError(f"{record.name}", error).with_traceback(error.__traceback__) from error
                self.record.failures.append(f"{record.name} runs as captured: {type(error).__name__}: {error}")
                log.warning("Ferrite runs %s as captured: %s: %s", record.name, type(error).__name__, error)
                for member, snapshot in spare.items():
                    restore(member, snapshot)
                return make_boxed_func(module.forward)
            self.made[phase] = compiled
            if phase == "forward":
                _report_strides(module)
            trace.matrix_products(module)
            trace.compiled_graph(compiled)
            trace.graph_record(record, options.compile_mode)
            folder.compiled(module, compiled, self.record)
        log.info("Ferrite compiled %s graph %d in %.1f ms", _LOUD[phase], graph_id, 1e3 * record.seconds)
        return compiled.load() if self.is_guarded else compiled


_LOUD = {"forward": "FORWARDS", "backward": "BACKWARDS", "inference": "INFERENCE"}


def _inputs_of(phase: str, values: Sequence[Any]) -> pipeline.Inputs:
    """Which inputs are the same tensors in every call, which the backward may overwrite, and how they lie in memory."""
    context = TracingContext.try_get()
    facts = context.fw_metadata if context is not None else None
    if phase == "backward":
        donated = facts.bw_donated_idxs if facts is not None else None
        return pipeline.Inputs(donated=frozenset(donated or ()), values=tuple(values))
    static = facts.static_input_indices if facts is not None else None
    return pipeline.Inputs(static=frozenset(static or ()))


def _report_strides(module: GraphModule) -> None:
    """Tell AOTAutograd how the outputs of a forward graph lie, so that it gives the backward inputs that lie so."""
    context = TracingContext.try_get()
    if context is not None and context.output_strides is not None:
        context.output_strides += current_strides(module.graph)


def _refuse_other_devices(inputs: Sequence[Any], options: Options) -> None:
    for value in inputs:
        if isinstance(value, torch.Tensor) and value.device.type not in _SUPPORTED_DEVICES:
            if options.skip_unsupported_devices:
                raise SkipFrame(f"Ferrite compiles for the CPU; an input is on {value.device}")
            raise FerriteError("inputs", RuntimeError(f"Ferrite compiles for the CPU; an input is on {value.device}"))
