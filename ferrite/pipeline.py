"""The story: every stage in order. Start reading here.

    Dynamo's graph ─ pre_grad ─▶ AOTAutograd ─ joint ─▶ partition
        ─▶ forward, backward or inference graph, each: post_grad ─▶ lower ─▶ loops ─▶ schedule ─▶ native ─▶ host

`backend.py` calls AOTAutograd and hands each graph to one of the functions below. The order of passes within a stage
is the tuple that the stage's package defines; a stage whose tuple is empty is passed through.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ferrite.artifact.check_inputs import assumptions
from ferrite.artifact.compiled import PLACELESS, CompiledGraph, Facts
from ferrite.decisions import Decision
from ferrite.errors import Unsupported, place_of, show_place, unknown, within
from ferrite.extension import with_user_passes
from ferrite.graph.aten_forms import is_aten
from ferrite.graph.check import check_graph
from ferrite.graph.decompose import decomposition_table
from ferrite.graph.describe import device_types, mutated_inputs, output_strides, shared_memory
from ferrite.graph.joint import JOINT
from ferrite.graph.ledger import keep_ledger
from ferrite.graph.order import sort_nodes
from ferrite.graph.post_grad import MUTATE, POST_GRAD, PREPARE
from ferrite.graph.post_grad.emit_deferred_asserts import emit_deferred_asserts
from ferrite.graph.pre_grad import PASSES as PRE_GRAD
from ferrite.graph.pre_grad.plan import plan
from ferrite.graph.pre_grad.pre_dispatch import plan_pre_dispatch
from ferrite.graph.query import family
from ferrite.graph.relayout import adopt_inputs
from ferrite.graph.snapshot import take
from ferrite.graph.strides import note_output_strides, restore_output_strides
from ferrite.graph.values import refresh
from ferrite.host.lowered import does_the_same
from ferrite.host.nodes import place_of_kernel
from ferrite.host.plan import plan_all
from ferrite.loops.check import check_program
from ferrite.loops.nodes import Program
from ferrite.loops.passes import LOOP_PASSES
from ferrite.loops.text import show as show_loops
from ferrite.lower.graph import Rules, constant_nodes, lower
from ferrite.lower.library import library_of
from ferrite.native import NATIVE_PASSES
from ferrite.numeric_check import NumericCheck, check_settings, wanted
from ferrite.options import Options
from ferrite.passes import KERNELS, LOWERINGS, edit, number, rewrite, room
from ferrite.registry import registered
from ferrite.report.record import Fallback, GraphRecord
from ferrite.schedule import SCHEDULE_PASSES
from ferrite.schedule.cost import costs_of

if TYPE_CHECKING:
    from torch.fx import GraphModule

log = logging.getLogger(__name__)

HOST_PASSES: tuple[Any, ...] = ()

STAGES = ("pre_grad", "joint", "post_grad", "lower", "loops", "schedule", "native", "host")


@dataclass(frozen=True)
class Inputs:
    """What AOTAutograd knows of a graph's inputs, by position."""

    static: frozenset[int] = frozenset()
    donated: frozenset[int] = frozenset()
    saved: frozenset[int] = frozenset()
    values: tuple[Any, ...] = ()  # as fake tensors; their strides may be others than the trace had


def check_options(options: Options) -> None:
    """Raise RuntimeError for words of the options that mean nothing: passes, stages, settings, ops, nodes."""
    plan(options.pre_grad)
    plan_pre_dispatch(options.pre_dispatch_add, options.pre_dispatch_remove)
    check_settings(options)
    decomposition_table(options.decompose)
    if options.disable:
        words = pass_words()
        for word in options.disable:
            if word not in words:
                raise RuntimeError(unknown("stage or pass to disable", word, words))
    for name in options.explain_patterns:
        if not name.isidentifier():
            raise RuntimeError(f"Ferrite option 'explain_patterns' expects names of nodes, or 'all', given {name!r}")


def pass_words() -> set[str]:
    """The words that the option `disable` takes: stages that have passes, passes, and both with a dot."""
    stages: dict[str, Sequence[Any]] = {
        "pre_grad": [*(entry.run for entry in PRE_GRAD), *plan_pre_dispatch((), ()), sort_nodes],
        "joint": JOINT,
        "post_grad": (*PREPARE, *POST_GRAD, *MUTATE),
        "loops": LOOP_PASSES,
        "schedule": SCHEDULE_PASSES,
        "native": NATIVE_PASSES,
        "host": HOST_PASSES,
    }
    passes = {(stage, run.__name__) for stage, runs in stages.items() for run in runs}
    passes |= {(entry.stage, entry.name) for entry in registered}
    return {*stages, *(name for _, name in passes), *(f"{stage}.{name}" for stage, name in passes)}


def edit_pre_grad(module: GraphModule, options: Options, record: GraphRecord, inputs: Sequence[Any] = ()) -> None:
    """Passes over what Dynamo captured; `module` is edited in place. Users may insert nodes where they like: the graph
    is put in order after them."""
    with record.stage("pre_grad"):
        first, last = plan(options.pre_grad, rewrites=options.pre_grad_rewrites, eager_draws=options.fallback_random)
        if options.pre_dispatch and options.pre_grad_rewrites and is_aten(module.graph):
            first = plan_pre_dispatch(options.pre_dispatch_add, options.pre_dispatch_remove)
        passes = (*with_user_passes("pre_grad", first), sort_nodes, *last)
        check = NumericCheck("pre_grad", module, inputs, options) if wanted("pre_grad", options) else None
        if edit(module, "pre_grad", passes, options, record, after_autograd=False):
            for _, member in family(module):
                member.recompile()
        if check is not None:
            check.report(module, passes, record)


def edit_joint(module: GraphModule, options: Options, record: GraphRecord) -> None:
    """Passes over forward and backward in one graph, or over an inference graph."""
    with record.stage("joint"):
        edit(module, "joint", with_user_passes("joint", JOINT), options, record)


def compile_graph(
    module: GraphModule, graph_id: int, phase: str, inputs: Inputs, options: Options, record: GraphRecord
) -> CompiledGraph:
    """One graph after autograd becomes one compiled graph."""
    record.nodes = len(module.graph.nodes)
    with record.stage("post_grad"):
        edit_post_grad(module, inputs, options, record)
    with record.stage("lower"):
        check_graph(module, "lower", after_autograd=True, values=True)
        own_products = options.products == "loops" and phase == "inference"
        most = room(LOWERINGS, options.bisect_lowerings)
        rules = Rules(
            options.executor != "eager", not options.fallback_random, own_products, options.padding == "on", most
        )
        parts = shared_memory(inputs.values, inputs.saved | inputs.donated)
        lowered = lower(module, inputs.static, inputs.donated, inputs.saved, parts=parts, rules=rules)
        record.lowered = lowered.lowered
        record.number(LOWERINGS, number(LOWERINGS, lowered.lowered), lowered.calls)
        record.fallbacks = [
            Fallback(op, count, lowered.reasons[op], library_of(op) is not None)
            for op, count in lowered.fallbacks.items()
        ]
    with record.stage("loops"):
        kernels = []
        for kernel in lowered.kernels:
            with within(place_of_kernel, kernel.name, lowered.main.steps):
                kernels.append(rewrite_kernel(kernel, options, record))
        lowered = replace(lowered, kernels=tuple(kernels))
    with record.stage("schedule"):
        lowered = rewrite(lowered, "schedule", SCHEDULE_PASSES, options, record, same=does_the_same)
        record.decisions += lowered.decisions
        record.costs = costs_of(lowered)
        log.info("%s reads and writes %s bytes in %d steps", record.name, f"{record.bytes:,}", len(record.costs))
    with record.stage("native"):
        lowered = rewrite(lowered, "native", NATIVE_PASSES, options, record)
    with record.stage("host"):
        program = plan_all(lowered, f"graph_{graph_id}_{phase}", constant_nodes(lowered.constants))
        program = rewrite(program, "host", HOST_PASSES, options, record)
        facts, folder = facts_of(module, graph_id, phase, options, record), options.debug_folder(program.name)
        compiled = CompiledGraph(program, lowered.constants, facts, folder=str(folder or PLACELESS))
        record.compiled = compiled  # before it is loaded: whoever hears that this failed has the code
    with record.stage("native"):
        try:
            most = room(KERNELS, options.bisect_kernels)
            compiled.build(most)
        except Exception as error:
            with within(place_of_kernel, place_of(error).get("kernel", ""), program.steps):
                raise
        if most is not None:
            shown = [show_place(place_of_kernel(kernel.name, program.steps)) for kernel in program.kernels]
            record.number(KERNELS, number(KERNELS, len(shown[:most])), shown)
        else:
            number(KERNELS, len(program.kernels))
    with record.stage("host"):
        compiled.load()
        record.decisions += compiled.decisions
        for name, why in compiled.refused.items():
            record.decisions.append(Decision("native", (name,), False, why))
            if options.strict and most is None:
                with within(place_of_kernel, name, program.steps):
                    raise Unsupported(f"machine code for {name}", why=why)
        record.peak_memory, record.block_memory = compiled.peak, compiled.block
        record.changing_block = str(compiled.need.block) if compiled.need is not None else ""
        if compiled.why_python:
            record.decisions.append(Decision("native host", (program.name,), False, compiled.why_python))
    return compiled


def rewrite_kernel(kernel: Program, options: Options, record: GraphRecord) -> Program:
    """Loop passes over one kernel, which is checked before and after them."""
    if options.check:
        check_program(kernel, "lower")
    rewritten = rewrite(kernel, "loops", LOOP_PASSES, options, record, name=kernel.name, show=show_loops)
    if options.check and rewritten is not kernel:
        check_program(rewritten, "loops")
    return rewritten


def edit_post_grad(module: GraphModule, inputs: Inputs, options: Options, record: GraphRecord) -> None:
    """Passes over a graph after autograd, with the strides that the user sees noted before and restored after. Inputs
    lie as they are given."""
    note_output_strides(module.graph, keep=options.keep_output_stride)
    prepare = PREPARE if options.runtime_asserts else tuple(run for run in PREPARE if run is not emit_deferred_asserts)
    edit(module, "post_grad", prepare, options, record)
    with keep_ledger(module.graph, "adopt_inputs") as ledger:
        adopted = adopt_inputs(module.graph, inputs.values)
    record.decisions += ledger.decisions
    before = {member: take(member.graph) for _, member in family(module)}
    if edit(module, "post_grad", with_user_passes("post_grad", POST_GRAD), options, record) or adopted:
        refresh(module, before[module], before)
        with keep_ledger(module.graph, "restore_output_strides") as ledger:
            restore_output_strides(module.graph)
        record.decisions += ledger.decisions
    edit(module, "post_grad", MUTATE, options, record)


def facts_of(module: GraphModule, graph_id: int, phase: str, options: Options, record: GraphRecord) -> Facts:
    """What a caller may want to know of a graph without running it."""
    changes: Counter[str] = Counter()
    for run in record.passes:
        changes[f"{run.stage}.{run.name}"] += run.changed or 0
    return Facts(
        graph_id=graph_id,
        phase=phase,
        output_strides=output_strides(module.graph),
        mutated_inputs=mutated_inputs(module.graph),
        device_types=device_types(module.graph),
        changes=dict(changes),
        seconds=record.seconds,
        executor=options.executor,
        host=options.host,
        assumed=assumptions(module),
    )
