"""One captured graph through AOTAutograd, which gives back the graphs that `pipeline` compiles. The one place that
calls it.

Loaded by the first graph that is compiled: what the cache has needs none of it.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from typing import Any

import torch
from torch._dynamo import convert_frame
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import preserve_rng_state
from torch._functorch._aot_autograd.descriptors import BackwardTokenAOTInput
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import _disable_current_modes

from ferrite import caching, pipeline
from ferrite.artifact.compiled import CompiledGraph
from ferrite.artifact.direct import direct, sees_plain_tensors
from ferrite.collection import without_collection
from ferrite.errors import Unsupported, UserFault, take_place, unknown
from ferrite.failure import FerriteError
from ferrite.graph.decompose import decomposition_table
from ferrite.graph.eager_strides import promised_as_in_eager
from ferrite.graph.query import family
from ferrite.graph.snapshot import restore, take
from ferrite.graph.strides import current_strides, output_values
from ferrite.graph.whole import kept_whole
from ferrite.options import Options
from ferrite.packaging import Package
from ferrite.report import trace, watch
from ferrite.report.debug import DebugFolder
from ferrite.report.record import Record
from ferrite.schemes import scheme_of

log = logging.getLogger(__name__)


class Compilation:
    """One captured graph: options, record, and the callbacks that AOTAutograd calls, now or at first backward."""

    def __init__(self, record: Record, options: Options) -> None:
        self.record = record
        self.options = options
        self.made: dict[str, CompiledGraph] = {}  # by phase
        self.nodes: set[str] = set()  # names that `explain_patterns` may mean
        self.is_saved = False  # the function is to leave the process
        self.is_guarded = TracingContext.try_get() is not None  # Dynamo called, and looks at arguments before each call

    def compile(self, module: GraphModule, inputs: list[Any], lookup: caching.Lookup) -> Callable[..., Any]:
        self.is_saved = lookup.outcome == "package"
        self._refuse_python(f"graph {self.record.graph_id}", why_not_native(self.options))
        use_rows = self.options.executor != "eager"
        may_be_direct = self.is_guarded and sees_plain_tensors(module)
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
            promised_as_in_eager(),
            caching.watching(lookup, self.made, self.record),
        ):
            function = run_aot(module, inputs)
        if "forward" not in self.made:  # else the backward graph is to come
            self._tell_unknown_nodes()
        if lookup.outcome == "package":
            return Package.of(function, lookup)
        if not may_be_direct:
            return function
        return direct(function, self.made.get("inference"), _facts(), len(inputs))

    def _edit_pre_grad(self, module: GraphModule, inputs: Sequence[Any]) -> GraphModule:
        trace.graph(f"ferrite graph {self.record.graph_id} before pre_grad", module, trace.pre_grad_log)
        entry = self.record.graph("pre_grad")
        self._note_nodes(module)
        pipeline.edit_pre_grad(module, self.options, entry, inputs)
        trace.count(entry)
        if any(run.changed for run in entry.passes):
            trace.graph(f"ferrite graph {self.record.graph_id} after pre_grad", module, trace.pre_grad_log)
        return module

    def _partition(self, joint: GraphModule, inputs: Sequence[Any], **facts: Any) -> tuple[GraphModule, GraphModule]:
        """Joint passes, then the user's partitioner or min-cut; what AOTAutograd knows is handed on untouched."""
        _refuse_other_results(joint, facts["num_fwd_outputs"])
        self._note_nodes(joint)
        entry = self.record.graph("joint")
        pipeline.edit_joint(joint, self.options, entry)
        trace.count(entry)
        split = self.options.partitioner or min_cut_rematerialization_partition
        # Sharing equal nodes would drop those that define a size which others still have: nothing then says what it is.
        defining = Counter(node.target for node in joint.graph.nodes if node.meta.get("unbacked_bindings"))
        with torch._functorch.config.patch(cse=False) if max(defining.values(), default=0) > 1 else nullcontext():
            return split(joint, inputs, **facts)

    def _compile_backward(self, module: GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        context = TracingContext.try_get()
        saved = _donated(context) | _tangents(module)
        if context is not None and context.fw_metadata is not None and not self.options.donate_buffers:
            # A donated buffer makes a later backward(retain_graph=True) raise, which eager never does.
            context.fw_metadata.bw_donated_idxs = []
        # The first backward may run on a thread of autograd's own.
        with convert_frame.compile_lock:
            return self._compile_after_autograd(module, inputs, "backward", saved)

    def _compile_after_autograd(
        self, module: GraphModule, inputs: Sequence[Any], phase: str, saved: frozenset[int] = frozenset()
    ) -> Callable[[list[Any]], Any]:
        """One graph after autograd becomes a boxed callable: compiled, or FX's own code of it if that fails."""
        record, options, graph_id = self.record.graph(phase), self.options, self.record.graph_id
        log.info("Ferrite compiles %s graph %d", _LOUD[phase], graph_id)
        folder = DebugFolder(options, f"graph_{graph_id}_{phase}")
        with ExitStack() as quiet:
            quiet.enter_context(_disable_current_modes())
            quiet.enter_context(preserve_rng_state())
            quiet.enter_context(without_collection())
            quiet.enter_context(promised_as_in_eager())
            if phase == "inference":
                pipeline.edit_joint(module, options, record)
            trace.graph(f"ferrite graph {graph_id} {phase} before post_grad", module, trace.post_grad_log)
            folder.captured(module, f"graph_{graph_id}_{phase}")
            self._note_nodes(module)
            if phase == "backward":
                self._tell_unknown_nodes()
            spare = {member: take(member.graph) for _, member in family(module)}
            try:
                given = _inputs_of(phase, inputs, saved)
                compiled = scheme_of(options)(module, graph_id, phase, given, options, record)
                record.compiled = compiled
                watch.show_graph(compiled)
            except Exception as error:
                if record.compiled is not None:
                    with suppress(Exception):  # of the code itself, which has been raised then
                        trace.compiled_graph(record.compiled)
                place = take_place(error) or "compilation"
                if options.strict or isinstance(error, UserFault):
                    raise FerriteError(f"{record.name}, {place}", error).with_traceback(error.__traceback__) from error
                why = f"{type(error).__name__}: {error}"
                self.record.failures.append(f"{record.name} runs as captured: failed in {place}: {why}")
                log.warning("Ferrite runs %s as captured: failed in %s: %s", record.name, place, why)
                for member, snapshot in spare.items():
                    restore(member, snapshot)
                return make_boxed_func(module.forward)
            self._refuse_python(record.name, compiled.why_python)
            self.made[phase] = compiled
            if phase == "forward":
                _report_strides(module)
            trace.matrix_products(module)
            trace.compiled_graph(compiled)
            compiled.announce(perf_map=options.perf_map, gdb=options.gdb)
            trace.graph_record(record, options.compile_mode)
            folder.compiled(module, compiled, self.record)
            folder.watch_first_call(compiled)
        log.info("Ferrite compiled %s graph %d in %.1f ms", _LOUD[phase], graph_id, 1e3 * record.seconds)
        return compiled.load() if self.is_guarded else compiled

    def _note_nodes(self, module: Any) -> None:
        if self.options.explain_patterns and isinstance(module, GraphModule):
            self.nodes |= {node.name for _, member in family(module) for node in member.graph.nodes}

    def _tell_unknown_nodes(self) -> None:
        """Warn of a node to explain that no graph of this compile has. It is no error: another one may have it."""
        for name in self.options.explain_patterns:
            if name != "all" and name not in self.nodes:
                where = f"node of graph {self.record.graph_id} to explain"
                log.warning("%s", unknown(where, name, self.nodes | {"all"}))

    def _refuse_python(self, where: str, why: str) -> None:
        """A function that is saved runs no Python between its kernels; in this process it may."""
        if self.is_saved and why:
            raise FerriteError(where, Unsupported("a saved function needs a native wrapper, and has none", why=why))


def why_not_native(options: Options) -> str:
    """Why no graph runs natively, if that is known of all of them."""
    if options.host != "native":
        return f"the option host is {options.host}"
    return f"the executor is {options.executor}" if options.executor != "native" else ""


_LOUD = {"forward": "FORWARDS", "backward": "BACKWARDS", "inference": "INFERENCE"}


def _facts() -> Any:
    """What AOTAutograd knows of the function that it works at, if Dynamo called."""
    context = TracingContext.try_get()
    return context.fw_metadata if context is not None else None


def _donated(context: TracingContext | None) -> frozenset[int]:
    """The inputs of a backward graph that AOTAutograd says nobody else has: activations that the forward saved."""
    facts = context.fw_metadata if context is not None else None
    return frozenset((facts.bw_donated_idxs if facts is not None else None) or ())


def _refuse_other_results(joint: GraphModule, count: int) -> None:
    """AOTAutograd loses a result where a parameter is written to and results are buffers that are written to under
    no_grad (an embedding with `max_norm` before a spectral norm): the caller would get other tensors in its place. That
    is seen by the gradients, each of which is of a result, in the order of results. Sizes of a tensor subclass, and
    tokens of effects that happen in the backward, come among them."""
    results = iter(output_values(joint.graph)[:count])
    for node in joint.graph.find_nodes(op="placeholder"):
        is_gradient = isinstance(node.meta.get("val"), torch.Tensor) and str(node.target).startswith("tangents")
        if not is_gradient or isinstance(node.meta.get("desc"), BackwardTokenAOTInput):
            continue
        if not any(_may_be_of(node, result) for result in results):
            raise Unsupported("a trace that gives other results than the function", at=node.name)


def _may_be_of(gradient: Node, result: Any) -> bool:
    """Whether a result can have this gradient, by dtype and sizes; a size that is a symbol counts as in the trace."""
    one, other = (node.meta.get("val") if isinstance(node, Node) else None for node in (gradient, result))
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    sizes = ([size if isinstance(size, int) else size.node.hint for size in each.shape] for each in (one, other))
    return (
        one.dtype == other.dtype
        and one.dim() == other.dim()
        and all(a is None or b is None or a == b for a, b in zip(*sizes, strict=True))
    )


def _tangents(module: GraphModule) -> frozenset[int]:
    """Gradients of the results, which the engine of autograd hands over; that of a loss is kept by `backward()`."""
    inputs = enumerate(module.graph.find_nodes(op="placeholder"))
    values = {place: node.meta.get("val") for place, node in inputs if str(node.target).startswith("tangents")}
    return frozenset(place for place, value in values.items() if isinstance(value, torch.Tensor) and value.dim())


def _inputs_of(phase: str, values: Sequence[Any], saved: frozenset[int]) -> pipeline.Inputs:
    """Which inputs are the same tensors in every call, which the backward may overwrite or frees, and how they lie in
    memory."""
    context = TracingContext.try_get()
    facts = context.fw_metadata if context is not None else None
    if phase == "backward":
        return pipeline.Inputs(donated=_donated(context), saved=saved, values=tuple(values))
    static = facts.static_input_indices if facts is not None else None
    return pipeline.Inputs(static=frozenset(static or ()))


def _report_strides(module: GraphModule) -> None:
    """Tell AOTAutograd how the outputs of a forward graph lie, so that it gives the backward inputs that lie so."""
    context = TracingContext.try_get()
    if context is not None and context.output_strides is not None:
        context.output_strides += current_strides(module.graph)
