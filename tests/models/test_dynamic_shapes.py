"""One compile with `dynamic=True` serves several batch sizes and lengths, in inference and in training."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.optim import SGD

from bench.zoo import ZOO, Entry, Inputs
from tests.models.against_eager import Probe, compare, infer, train

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("in_both_executions")]

# Batch size and length of each call. Lengths that the architecture fixes (positions of image patches, steps of a loop
# written in Python) stay the same.
SHAPES: dict[str, tuple[tuple[int, int], ...]] = {
    "mlp": ((4, 12), (7, 12), (3, 12)),
    "bert": ((2, 12), (3, 9), (5, 16)),
    "gpt2": ((2, 12), (3, 9)),
    "t5_encoder": ((2, 12), (3, 10)),
    "vit": ((2, 32), (5, 32)),
    "resnet": ((2, 32), (3, 48)),
    "lstm": ((2, 4), (5, 4)),
    "dlrm": ((6, 3), (9, 5)),  # a batch as large as the number of tables would be taken for it
}
TRAINED = ("mlp", "bert", "gpt2", "resnet", "dlrm")


def batches_for(entry: Entry, module: torch.nn.Module, training: bool) -> list[Inputs]:
    return [
        entry.inputs(module, "small", training=training, batch=batch, length=length)
        for batch, length in SHAPES[entry.name]
    ]


@pytest.mark.parametrize("entry", [pytest.param(ZOO[name], id=name) for name in SHAPES])
def test_inference(entry: Entry) -> None:
    module = entry.build("small").module
    batches = batches_for(entry, module, training=False)
    probe = Probe()
    expected = infer(module, batches)
    found = infer(torch.compile(module, backend=probe, fullgraph=True, dynamic=True), batches)
    probe.check(("inference",), len(batches), one_graph=True)
    compare(expected, found)


@pytest.mark.parametrize("entry", [pytest.param(ZOO[name], id=name) for name in TRAINED])
def test_training(entry: Entry) -> None:
    probe = Probe()
    traces = []
    for compiled in (False, True):
        module = entry.build("small", training=True).module
        batches = batches_for(entry, module, training=True)
        call = torch.compile(module, backend=probe, fullgraph=True, dynamic=True) if compiled else module
        traces.append(train(call, module, entry, batches, partial(SGD, lr=0.05, momentum=0.9)))
    probe.check(("forward", "backward"), len(batches), one_graph=True)
    compare(*traces)
