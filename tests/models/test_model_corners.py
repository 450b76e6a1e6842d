"""What else people do with a model: switch between modes, decode with a cache, freeze a part, lower the precision."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from bench.zoo import ZOO, Entry, Inputs, seeded
from tests.models.against_eager import (
    Probe,
    Trace,
    compare,
    in_double,
    infer,
    same_bits,
    train,
    widen,
)

pytestmark = pytest.mark.usefixtures("in_both_executions")


def named_entry(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("entry", [pytest.param(ZOO[name], id=name) for name in names])


def test_dropout_is_drawn_at_every_call() -> None:
    example = ZOO["bert"].build("small", training=True)
    probe = Probe()
    compiled = torch.compile(example.module, backend=probe, fullgraph=True)
    torch.manual_seed(5)
    first, second = (compiled(**example.inputs).logits for _ in range(2))
    torch.manual_seed(5)
    again = compiled(**example.inputs).logits
    assert probe.calls == 3
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


@named_entry("resnet", "vit")
def test_switching_between_training_and_evaluation(entry: Entry) -> None:
    """Batch-norm statistics move in training only and are used in evaluation only; dropout likewise."""
    results = []
    probe = Probe()
    for compile_it in (False, True):
        module = entry.build("small", training=True).module
        inputs = entry.inputs(module, "small", training=True)
        call = torch.compile(module, backend=probe, fullgraph=True) if compile_it else module
        trace = Trace()
        torch.manual_seed(11)
        for step, training in enumerate((True, False, True, False)):
            module.train(training)
            with torch.set_grad_enabled(training):
                trace.add_output(step, call(**inputs))
        trace.add("buffers", dict(module.named_buffers()))
        trace.random_state = torch.get_rng_state()
        results.append(trace)
    probe.check(("forward", "inference"), steps=4, one_graph=False)
    assert probe.graphs == 2
    compare(*results)


@named_entry("gpt2", "llama")
def test_decoding_with_a_cache(entry: Entry) -> None:
    """A prompt, then one token at a time, each step reading and extending the keys and values of those before."""
    module = entry.build("small").module
    prompt = entry.inputs(module, "small")["input_ids"]
    probe = Probe()
    expected = decode(module, prompt, steps=4)
    found = decode(torch.compile(module, backend=probe), prompt, steps=4)
    probe.check(("inference",), steps=4, one_graph=False)
    compare(expected, found)


def decode(call: Any, prompt: Tensor, steps: int) -> Trace:
    trace = Trace()
    cache = None
    ids = prompt
    with torch.no_grad():
        for step in range(steps):
            output = call(input_ids=ids, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            ids = output.logits[:, -1:].argmax(dim=-1)
            trace.add("tokens", {f"step {step} token": ids, f"step {step} logits": output.logits})
    for number, layer in enumerate(cache.layers):
        trace.add("cache", {f"keys of layer {number}": layer.keys, f"values of layer {number}": layer.values})
    trace.random_state = torch.get_rng_state()
    return trace


class Tagger(nn.Module):
    """A two-layer bidirectional `nn.LSTM` or `nn.GRU`, as a whole and not by cells.

    Without dropout: the decomposition that is traced leaves it out (`_rnn_helper` in torch/_decomp/decompositions.py
    sets the rate to zero unless `num_layers < i - 1`, which no layer `i` fulfils).
    """

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = kind(6, 10, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(20, 4)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.rnn(x)
        return self.head(states)


def tagger(kind: type[nn.RNNBase], training: bool) -> nn.Module:
    with seeded(0):
        return Tagger(kind).train(training)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU], ids=["lstm", "gru"])
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_recurrent_modules_that_dynamo_is_told_to_trace(kind: type[nn.RNNBase], training: bool) -> None:
    """Judged by distance: eager runs a fused layer, and what is traced is a loop over its steps."""
    with seeded(1):
        batches = [{"x": torch.randn(3, 5, 6)} for _ in range(3)]
    probe = Probe()

    def trace_of(module: nn.Module, call: Any, batches: list[Inputs]) -> Trace:
        if training:
            return train(call, module, ZOO["lstm"], batches, partial(SGD, lr=0.05, momentum=0.9))
        return infer(call, batches)

    eager, module, double = tagger(kind, training), tagger(kind, training), in_double(tagger(kind, training))
    expected = trace_of(eager, eager, batches)
    with torch._dynamo.config.patch(allow_rnn=True):
        found = trace_of(module, torch.compile(module, backend=probe, fullgraph=True), batches)
    probe.check(("forward", "backward") if training else ("inference",), len(batches), one_graph=True)
    compare(expected, found, reference=trace_of(double, double, widen(batches)))


@named_entry("bert", "llama", "resnet")
def test_inference_in_bfloat16(entry: Entry) -> None:
    module = entry.build("small").module.to(torch.bfloat16)
    inputs = entry.inputs(module, "small")
    batch = {name: value.bfloat16() if value.is_floating_point() else value for name, value in inputs.items()}
    probe = Probe()
    expected = infer(module, [batch])
    found = infer(torch.compile(module, backend=probe, fullgraph=True), [batch])
    probe.check(("inference",), steps=1, one_graph=True)
    compare(expected, found)
    assert expected.groups["outputs"]["step 0 output['logits']"].dtype is torch.bfloat16


@named_entry("bert", "convnext")
def test_training_under_autocast(entry: Entry) -> None:
    """Autocast stands around the forward only, as PyTorch advises: eager keeps narrowed weights as long as it lasts.

    Without dropout: its backward multiplies by a scale that eager has rounded to bfloat16 and the traced op has not.
    Two units: the gradient of a bias has few elements, and one that is rounded the other way is a unit of them all.
    """
    probe = Probe()
    results = []
    for compile_it in (False, True):
        module = entry.build("small", training=True).module
        for part in module.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
        batches = [entry.inputs(module, "small", training=True, seed=seed) for seed in (0, 1)]
        call = torch.compile(module, backend=probe, fullgraph=True) if compile_it else module
        results.append(train(narrowed(call), module, entry, batches, partial(SGD, lr=1e-3)))
    probe.check(("forward", "backward"), steps=2, one_graph=True)
    compare(*results, near=2 * torch.finfo(torch.bfloat16).eps)


def narrowed(call: Callable[..., Any]) -> Callable[..., Any]:
    def run(**inputs: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return call(**inputs)

    return run


def test_frozen_parameters_get_no_gradient() -> None:
    """Fine-tuning: the body is frozen, only the head learns."""
    entry = ZOO["distilbert"]
    probe = Probe()
    results = []
    for compile_it in (False, True):
        module = entry.build("small", training=True).module
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(not name.startswith("distilbert."))
        batches = [entry.inputs(module, "small", training=True, seed=seed) for seed in (0, 1)]
        call = torch.compile(module, backend=probe, fullgraph=True) if compile_it else module
        results.append(train(call, module, entry, batches, partial(SGD, lr=0.05, momentum=0.9)))
    probe.check(("forward", "backward"), steps=2, one_graph=True)
    compare(*results)
    start = entry.build("small", training=True).module.distilbert.embeddings.word_embeddings.weight
    assert same_bits(results[1].groups["parameters"]["distilbert.embeddings.word_embeddings.weight"], start)
