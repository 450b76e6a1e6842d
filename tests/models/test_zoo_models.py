"""Every model of the zoo at its small size, in inference and in training, against eager.

Note [Judging a model] in `against_eager.py` says what is compared and by which rule. Each is compiled, and every call
of its graphs runs in both executions of the host program; then it comes from the cache: the same bits. Nearly every
call of it becomes loops; what is left to eager must be a library call, but for a few in a hundred. And it needs no more
memory than in eager.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.optim import SGD

from bench.coverage import LIMIT
from bench.zoo import FAMILIES, ZOO, Entry
from tests.both_hosts import both_hosts
from tests.models.against_eager import (
    InDouble,
    Optimiser,
    Probe,
    Trace,
    assert_same_trace,
    compare,
    compare_memory,
    in_double,
    infer,
    train,
    widen,
)
from tests.models.expectations import FLIPS, GRAPH_BREAKS, NO_REFERENCE, ONE_STEP

pytestmark = pytest.mark.long

# Text and vision transformers are trained with AdamW, the rest with SGD and momentum, as people do. What is judged by
# distance takes SGD: AdamW divides a gradient by its own size, which turns the rounding of a zero gradient into a step.
STEPS = 3


def steps_of(entry: Entry) -> int:
    return 1 if entry.name in ONE_STEP else STEPS


models = pytest.mark.parametrize("entry", [pytest.param(entry, id=name) for name, entry in ZOO.items()])


# Not an adaptive one: it divides by the size of gradients, so that rounding of those that are nearly zero decides.
OPTIMISER: Optimiser = partial(SGD, lr=1e-3, momentum=0.9)


@models
def test_inference(entry: Entry, tmp_path: Path) -> None:
    module = entry.build("small").module
    batches = [entry.inputs(module, "small", seed=seed) for seed in (0, 1)]
    one_graph = (entry.name, "inference") not in GRAPH_BREAKS
    expected = infer(module, batches)
    traces = []
    for warm in (False, True):
        torch._dynamo.reset()
        probe = Probe(cache=str(tmp_path), warm=warm)
        compiled = torch.compile(module, backend=probe, fullgraph=one_graph, dynamic=False)
        with nullcontext() if warm else both_hosts() as compared:
            traces.append(infer(compiled, batches))
        assert warm or compared, "no graph has a native program"
        probe.check(("inference",), len(batches), one_graph)
        assert probe.came_from_the_cache() == warm
        assert probe.share_lowered() >= LIMIT
    found, again = traces
    assert_same_trace(again, found)
    compare(expected, found, reference_inference(entry))
    compare_memory(entry, module, compiled, batches[0], probe, training=False)


def reference_inference(entry: Entry) -> Trace:
    module = in_double(entry.build("small").module)
    with InDouble():
        return infer(module, widen([entry.inputs(module, "small", seed=seed) for seed in (0, 1)]))


@models
def test_training(entry: Entry, tmp_path: Path) -> None:
    one_graph = (entry.name, "training") not in GRAPH_BREAKS
    traces, calls = [], []
    for run in ("eager", "compiled", "from the cache"):
        torch._dynamo.reset()
        probe = Probe(cache=str(tmp_path), warm=run == "from the cache")
        module = entry.build("small", training=True).module
        batches = [entry.inputs(module, "small", training=True, seed=seed) for seed in range(steps_of(entry))]
        call = torch.compile(module, backend=probe, fullgraph=one_graph, dynamic=False) if run != "eager" else module
        calls.append(call)
        with both_hosts() if run == "compiled" else nullcontext() as compared:
            traces.append(train(call, module, entry, batches, OPTIMISER))
        assert compared or run != "compiled", "no graph has a native program"
        if run != "eager":
            probe.check(("forward", "backward"), steps_of(entry), one_graph)
            assert probe.came_from_the_cache() == (run == "from the cache")
            assert probe.share_lowered() >= LIMIT
    *traces, again = traces
    assert_same_trace(again, traces[1])
    reference = None if (entry.name, "training") in NO_REFERENCE else reference_training(entry)
    flips, _ = FLIPS.get(entry.name, (0.0, ""))
    compare(*traces, reference, flips=flips)
    compare_memory(entry, calls[0], calls[-1], batches[0], probe, training=True)


def reference_training(entry: Entry) -> Trace:
    module = in_double(entry.build("small", training=True).module)
    batches = widen([entry.inputs(module, "small", training=True, seed=seed) for seed in range(steps_of(entry))])
    with InDouble():
        return train(module, module, entry, batches, OPTIMISER)


def test_every_family_has_a_model() -> None:
    assert {entry.family for entry in ZOO.values()} == set(FAMILIES)


def test_building_repeats_and_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    first, second = (ZOO["bert"].build("small", training=True) for _ in range(2))
    assert torch.equal(before, torch.get_rng_state())
    for a, b in zip(first.module.parameters(), second.module.parameters(), strict=True):
        assert torch.equal(a, b)
    assert all(torch.equal(first.inputs[name], second.inputs[name]) for name in first.inputs)
