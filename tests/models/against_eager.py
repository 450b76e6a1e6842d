"""Run a model of the zoo in eager and through the backend, and compare everything that a user can see.

A *trace* is what one run showed: outputs, gradients, parameters and buffers afterwards, and where the random stream
ended. Nothing in it is copied while the run goes on, so a result that a later call overwrites is found out.

Note [Judging a model]
Structure, dtype, shape, strides, `requires_grad` and the end of the random stream are always equal to eager's, and so
are integers and booleans. Random numbers are drawn by eager (`fallback_random`), or nothing could be compared. Floats
are rounded elsewhere than in eager, so they are judged by one of two rules:
- *fp64*: the same run is done in eager in float64 from the same seed. The root-mean-square distance of each tensor from
  that reference is at most `SLACK` times eager's own, or what is usual for eager in a tensor of that size if it was
  lucky there (the median of its group: all outputs, all gradients, ...), plus `UNITS` in the last place of the tensor
  and of its group, without which gradients that are zero but for rounding could not be judged. To show that the
  reference is the same function, eager as a whole has to be within `SANE` of it.
- *near*, where there is no reference: the root-mean-square distance of each tensor from eager's is at most `NEAR` times
  the size of the tensor and of the largest one of its group.

What the passes before autograd made of a graph is also held against the graph itself (`numeric_check`), so that a wrong
one is named. That costs a test 1 to 3% of its time.

The environment variable MODEL_TEST_BACKEND puts another backend in Ferrite's place, to see whose a difference is:
`aot_eager` runs the graphs of AOTAutograd and nothing else.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from bench.allocated import steady_peak
from bench.peak_memory import LIMIT as MOST_MEMORY
from bench.peak_memory import is_as_planned
from bench.zoo import Entry, Inputs
from ferrite.graph.snapshot import copy_module
from ferrite.options import Options, resolve
from ferrite.pipeline import edit_pre_grad
from ferrite.report.record import GraphRecord
from tests.models.expectations import NO_INPUT_GRADIENT

BACKEND = os.environ.get("MODEL_TEST_BACKEND", "ferrite")
# A convolution in another layout is another algorithm of the library: the gradients of a small ResNet lie 1.1 to 1.5
# times as far from float64 as eager's in the median, for three seeds; single ones up to 5 times.
SLACK = 4.0
SANE = 1e-5
NEAR = 2e-6
UNITS = 2.0
Tensors = dict[str, Tensor]
Optimiser = Callable[[Any], torch.optim.Optimizer]


@dataclass
class Probe:
    """Stands before the backend and counts: graphs that it compiled, calls of what it returned, records it left.
    `warm`: the graphs are in the cache."""

    graphs: int = 0
    calls: int = 0
    records: list[Any] = field(default_factory=list)
    cache: str = ""  # a folder
    warm: bool = False

    def __call__(self, graph: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        chosen = {"fallback_random": True, "cache": "strict" if self.cache else "off", "cache_dir": self.cache}
        options = {"options": chosen} if BACKEND == "ferrite" else {}
        if BACKEND == "ferrite" and not self.warm:
            check_numbers(graph, example_inputs)
        compiled = lookup_backend(BACKEND)(graph, example_inputs, **options)
        # Counted after the call: under dynamic shapes AOTAutograd may send Dynamo back to make a constant of a float.
        self.graphs += 1
        if BACKEND == "ferrite":
            import ferrite

            self.records.append(ferrite.last_record())

        def run(*args: Any) -> Any:
            self.calls += 1
            return compiled(*args)

        return run

    def check(self, phases: Sequence[str], steps: int, one_graph: bool) -> None:
        """The model really ran through the backend, whole if `one_graph`, and the backend gave up on no part of it."""
        if one_graph:
            assert self.graphs == 1, f"{self.graphs} graphs were compiled, expected 1"
            assert self.calls == steps, f"the compiled graph ran {self.calls} times in {steps} steps"
        assert self.graphs >= 1, "nothing reached the backend"
        assert self.calls >= steps, f"compiled graphs ran {self.calls} times in {steps} steps"
        for record in self.records:
            assert not record.failures, record.failures
        if BACKEND == "ferrite":
            seen = {entry.phase for record in self.records for entry in record.graphs}
            assert seen.issuperset(phases), f"graphs of the phases {sorted(seen)} were compiled, expected {phases}"

    def came_from_the_cache(self) -> bool:
        """Whether no graph was compiled: every record is that of a hit, or of a graph that is left to eager."""
        wanted = [record for record in self.records if "compile" not in {choice.what for choice in record.decisions}]
        hits = [choice.taken for record in wanted for choice in record.decisions if choice.what == "cache"]
        return len(hits) == len(wanted) > 0 and all(hits)

    def share_lowered(self) -> float:
        """Of the calls that are not meant for a library, and that are not random, how many became loops."""
        graphs = [graph for record in self.records for graph in record.graphs]
        gaps = [gap for graph in graphs for gap in graph.fallbacks if not gap.is_library and "random" not in gap.reason]
        lowered = sum(graph.lowered for graph in graphs)
        return lowered / (lowered + sum(gap.count for gap in gaps))


def check_numbers(graph: torch.fx.GraphModule, example_inputs: list[Any]) -> None:
    """Raise Malformed, which names the pass, if those before autograd change what a graph computes. On a copy, because
    what is checked is not stored. A graph with an operator that is none of PyTorch's is not run for that: the expert
    layers of `transformers` have one."""
    options = resolve(Options(strict=True, fallback_random=True), None, {"numeric_check": {"pre_grad": {}}})
    record = GraphRecord("numeric check", "pre_grad")
    edit_pre_grad(copy_module(graph), options, record, example_inputs)
    (said,) = (decision for decision in record.decisions if decision.what == "numeric_check")
    assert said.taken or said.reason.endswith("may do more than compute"), said.reason


@dataclass
class Trace:
    """What one run showed, in groups that are judged alike. Names say where a tensor was found."""

    structure: list[Any] = field(default_factory=list)
    groups: dict[str, Tensors] = field(default_factory=dict)
    random_state: Tensor | None = None

    def add(self, group: str, tensors: Tensors) -> None:
        self.groups.setdefault(group, {}).update(tensors)

    def add_output(self, step: int, output: Any) -> None:
        leaves, spec = pytree.tree_flatten_with_path(output)
        self.structure.append(spec)
        named = {f"step {step} output{pytree.keystr(path)}": leaf for path, leaf in leaves}
        self.structure.append([name for name, leaf in named.items() if not isinstance(leaf, Tensor)])
        self.add("outputs", {name: leaf for name, leaf in named.items() if isinstance(leaf, Tensor)})


def infer(call: Callable[..., Any], batches: Sequence[Inputs]) -> Trace:
    """Outputs of one call for each batch, without gradients."""
    trace = Trace()
    torch.manual_seed(11)
    with torch.no_grad():
        for step, inputs in enumerate(batches):
            trace.add_output(step, call(**inputs))
    trace.random_state = torch.get_rng_state()
    return trace


def train(
    call: Callable[..., Any], module: nn.Module, entry: Entry, batches: Sequence[Inputs], optimiser: Optimiser
) -> Trace:
    """One optimiser step for each batch. `call` is the module or its compiled form."""
    trace = Trace()
    optimiser_of_run = optimiser(module.parameters())
    torch.manual_seed(11)
    for step, batch in enumerate(batches):
        inputs = leaves_of(entry, batch)
        output = call(**inputs)
        trace.add_output(step, output)
        optimiser_of_run.zero_grad(set_to_none=True)
        entry.loss(output).backward()
        named = {**dict(module.named_parameters()), **{f"input {name}": value for name, value in inputs.items()}}
        gradients = {f"step {step} gradient of {name}": value.grad for name, value in named.items()}
        trace.structure.append([name for name, gradient in gradients.items() if gradient is None])
        trace.add("gradients", {name: gradient for name, gradient in gradients.items() if gradient is not None})
        optimiser_of_run.step()
    trace.random_state = torch.get_rng_state()
    trace.add("parameters", dict(module.named_parameters()))
    trace.add("buffers", dict(module.named_buffers()))
    return trace


def leaves_of(entry: Entry, batch: Inputs) -> Inputs:
    """Floating inputs become leaves of their own; the batch stays as it was for the next run."""
    if entry.name in NO_INPUT_GRADIENT:
        return batch
    return {
        name: value.clone().requires_grad_() if value.is_floating_point() else value for name, value in batch.items()
    }


def compare_memory(
    entry: Entry, eager: nn.Module, compiled: Any, inputs: Inputs, probe: Probe, *, training: bool
) -> None:
    """A steady call needs no more than in eager, as `bench/allocated.py` counts, and what the plans say, beside what
    operators take for themselves. It leaves buffers of the modules changed."""
    if BACKEND != "ferrite":
        return
    inputs = leaves_of(entry, inputs) if training else inputs
    expected = steady_peak(entry, eager, eager, inputs, training=training)
    found = steady_peak(entry, compiled, compiled, inputs, training=training)
    assert found.bytes <= MOST_MEMORY * expected.bytes, (found.bytes, expected.bytes)
    for graph in found.graphs(probe.records):
        assert not graph.is_known or is_as_planned(entry.name, graph), graph


# --- the reference in float64 ------------------------------------------------------------------------------------


class InDouble(TorchFunctionMode):
    """Models ask for float32 by name in places (losses, norms, rotary angles); the reference must not narrow there."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        args, kwargs = pytree.tree_map(lambda x: torch.float64 if x is torch.float32 else x, (args, kwargs or {}))
        return function(*args, **kwargs)


def in_double(module: nn.Module) -> nn.Module:
    """The module in float64, where the grouped product of experts has no kernel and the batched one stands in."""
    config = getattr(module, "config", None)
    if getattr(config, "_experts_implementation", None) == "grouped_mm":
        module.set_experts_implementation("batched_mm")
    return module.double()


def widen(batches: Sequence[Inputs]) -> list[Inputs]:
    """The same batches with float32 as float64."""
    return [{k: v.double() if v.is_floating_point() else v for k, v in batch.items()} for batch in batches]


# --- comparing ---------------------------------------------------------------------------------------------------


def compare(
    expected: Trace,
    found: Trace,
    reference: Trace | None = None,
    *,
    near: float = NEAR,
    flips: float = 0.0,
) -> None:
    """Raise AssertionError unless `found` is as `expected`, by the rules of Note [Judging a model]. `flips`: the share
    of its size by which a tensor that is no output may lie farther from the reference."""
    assert found.structure == expected.structure, "outputs or gradients have another structure than in eager"
    assert found.groups.keys() == expected.groups.keys()
    for group, tensors in expected.groups.items():
        assert found.groups[group].keys() == tensors.keys(), f"other {group} than in eager"
    differences = [
        f"{name}: {difference}"
        for group, tensors in expected.groups.items()
        for name, tensor in tensors.items()
        for difference in appearance(tensor, found.groups[group][name])
    ]
    assert not differences, shown(differences)
    for group in expected.groups:
        eager, ours = expected.groups[group], found.groups[group]
        if reference is None:
            differences += by_nearness(eager, ours, near)
        else:
            differences += by_distance(eager, ours, reference.groups[group], 0.0 if group == "outputs" else flips)
    assert not differences, shown(differences)
    assert torch.equal(found.random_state, expected.random_state), "the random stream ended elsewhere than in eager"


def shown(differences: list[str], most: int = 12) -> str:
    rest = len(differences) - most
    return "\n".join(
        [f"{len(differences)} differences", *differences[:most], *([f"and {rest} more"] if rest > 0 else [])]
    )


def appearance(eager: Tensor, ours: Tensor) -> list[str]:
    """Everything about a tensor but its values."""
    facts = ("dtype", "shape", "layout", "device", "requires_grad", "is_leaf")
    pairs = [(fact, getattr(eager, fact), getattr(ours, fact)) for fact in facts]
    pairs.append(("strides", eager.stride(), ours.stride()))
    pairs.append(("class", type(eager), type(ours)))
    return [f"{fact} {b}, in eager {a}" for fact, a, b in pairs if a != b]


def by_bits(eager: Tensors, ours: Tensors) -> list[str]:
    return [f"{name}: {distance(eager[name], ours[name])}" for name in eager if not same_bits(eager[name], ours[name])]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Every byte, so zeros by sign and NaN by payload."""
    raw = [t.detach().contiguous().flatten().view(torch.uint8) for t in (a, b)]
    return torch.equal(*raw)


def distance(a: Tensor, b: Tensor) -> str:
    if not a.is_floating_point():
        return f"{int((a != b).sum())} of {a.numel()} elements differ"
    return f"differs from eager by up to {float((a.double() - b.double()).abs().max()):.3g}, rms {rms(a):.3g}"


def split(eager: Tensors, ours: Tensors) -> tuple[list[str], list[str]]:
    """The names of floating tensors, and the differences among the others."""
    floating = [name for name, tensor in eager.items() if tensor.is_floating_point()]
    return floating, by_bits(*({name: side[name] for name in eager if name not in floating} for side in (eager, ours)))


def by_nearness(eager: Tensors, ours: Tensors, near: float) -> list[str]:
    """The rule *near* of Note [Judging a model]."""
    floating, differences = split(eager, ours)
    scale = max((rms(eager[name]) for name in floating), default=0.0)
    for name in floating:
        limit = near * (rms(eager[name]) + scale)
        if not rms(ours[name].double() - eager[name].double()) <= limit:  # written so that NaN fails
            differences.append(f"{name}: {distance(eager[name], ours[name])}")
    return differences


def by_distance(eager: Tensors, ours: Tensors, reference: Tensors, flips: float) -> list[str]:
    """The rule *fp64* of Note [Judging a model]."""
    floating, differences = split(eager, ours)
    if not floating:
        return differences
    scale = max(rms(reference[name]) for name in floating)
    distances = {name: rms(eager[name].double() - reference[name]) for name in floating}
    worst = max(distances.values())
    if not worst <= SANE * scale:
        differences.append(
            f"eager is {worst:.3g} from float64 at scale {scale:.3g}: not a reference of the same function"
        )
    usual = statistics.median(distances[name] / (rms(reference[name]) or 1.0) for name in floating)
    for name in floating:
        unit, size = torch.finfo(eager[name].dtype).eps, rms(reference[name])
        limit = SLACK * max(distances[name], usual * size) + UNITS * unit * (size + scale) + flips * size
        error = rms(ours[name].double() - reference[name])
        if not error <= limit:  # written so that NaN fails
            differences.append(f"{name}: {error:.3g} from float64, allowed {limit:.3g}, rms {rms(reference[name]):.3g}")
    return differences


def rms(tensor: Tensor) -> float:
    return float(tensor.detach().double().square().mean().sqrt()) if tensor.numel() else 0.0


def assert_same_trace(found: Trace, expected: Trace) -> None:
    """Equal to the bit: the same machine code ran twice."""
    assert found.structure == expected.structure
    assert torch.equal(found.random_state, expected.random_state)
    for group, tensors in expected.groups.items():
        for name, tensor in tensors.items():
            other = found.groups[group][name]
            assert other.stride() == tensor.stride(), name
            assert same_bits(other.detach(), tensor.detach()), name
