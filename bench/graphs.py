"""The graphs after autograd that a model gives, as Ferrite's lowering gets them. Nothing of ours runs them: the call
that captures them is answered by FX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule

from bench.zoo import Entry, Size
from ferrite.graph.decompose import decomposition_table
from ferrite.options import Options
from ferrite.pipeline import Inputs, edit_post_grad
from ferrite.report.record import GraphRecord

OPTIONS = Options(executor="oracle", strict=True)


@dataclass(frozen=True)
class Captured:
    """One graph, edited by the passes that come before lowering."""

    name: str
    phase: str
    module: GraphModule


def capture(entry: Entry, size: Size, *, training: bool) -> list[Captured]:
    """Every graph of one call of a model; of a call and its backward if it trains."""
    example = entry.build(size, training=training)
    found: list[Captured] = []
    torch._dynamo.reset()
    compiled = torch.compile(example.module, backend=_catcher(entry.name, found), dynamic=False)
    if training:
        entry.loss(compiled(**example.inputs)).backward()
    else:
        with torch.no_grad():
            compiled(**example.inputs)
    torch._dynamo.reset()
    return found


def capture_function(function: Callable[..., Any], *inputs: torch.Tensor) -> list[Captured]:
    """The inference graphs of a function."""
    found: list[Captured] = []
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(function, backend=_catcher("function", found), dynamic=False)(*inputs)
    torch._dynamo.reset()
    return found


def _catcher(name: str, found: list[Captured]) -> Callable[..., Any]:
    def keep(phase: str) -> Callable[[GraphModule, Sequence[Any]], Any]:
        def compile(module: GraphModule, inputs: Sequence[Any]) -> Any:
            edit_post_grad(module, Inputs(), OPTIONS, GraphRecord(name, phase))
            found.append(Captured(name, phase, module))
            return make_boxed_func(module.forward)

        return compile

    return aot_autograd(
        fw_compiler=keep("forward"),
        bw_compiler=keep("backward"),
        inference_compiler=keep("inference"),
        decompositions=decomposition_table(use_rows=True),
        keep_inference_input_mutations=True,
    )
