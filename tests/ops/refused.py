"""Dtypes that eager refuses: what raises there must not give an answer when it is compiled.

    python -m tests.ops.refused        every op of the database; about three minutes

Tracing promotes where kernels do not, and lets dtypes pass for which there is no kernel. Each op is called with a
sample of the database whose tensors all have a dtype that the op does not support, and with one in which a single
tensor has another dtype than the rest. Calls that eager allows are not looked at: the sweep compares those.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.exc import TorchRuntimeError
from torch.utils._pytree import tree_flatten, tree_unflatten

from .cases import DTYPES, op_table, samples
from .check import same_error_type
from .sweep import quiet

OTHERS = ("f64", "i64", "bf16", "bool")
SPLIT_BY_PYTORCH = frozenset(
    {"nn.functional.hardshrink", "nn.functional.multi_margin_loss", "nn.functional.multilabel_margin_loss"}
)  # while it traces, into parts that take more dtypes than the op; no backend sees the op


@dataclass(frozen=True)
class Call:
    """A call that eager refuses."""

    id: str
    function: Callable[..., Any]
    tensors: tuple[torch.Tensor, ...]
    error: Exception

    def answers(self, backend: str, **options: Any) -> bool:
        """Whether the compiled function gives a result, or an error of another kind than eager's. What Dynamo refuses
        while it traces has not reached a backend: its error is of its own kind."""
        torch._dynamo.reset()
        try:
            with torch.no_grad():
                torch.compile(self.function, backend=backend, options=options)(*self.tensors)
        except TorchRuntimeError:
            return False
        except Exception as error:
            return not same_error_type(self.error, error)
        return True


def refused_calls(name: str) -> Iterator[Call]:
    """The calls of one op that eager refuses for their dtypes."""
    op = op_table()[name]
    supported = op.supported_dtypes("cpu")
    usual = next((dtype for dtype in ("f32", "i64") if DTYPES[dtype] in supported), None)
    if usual is None or name in SPLIT_BY_PYTORCH:
        return
    for sample in samples(name, usual, "infer"):
        flat, structure = tree_flatten((sample.input, sample.args, sample.kwargs))
        places = [n for n, leaf in enumerate(flat) if isinstance(leaf, torch.Tensor) and leaf.dtype == DTYPES[usual]]
        if not places:
            continue
        unknown = [short for short, dtype in DTYPES.items() if dtype not in supported and short != "c64"]
        for short in unknown:
            yield from _if_refused(f"{name}|{short}", op.op, flat, structure, places, short)
        for place in places[:4] if len(places) > 1 else ():
            for short in OTHERS:
                yield from _if_refused(f"{name}|{place}:{short}", op.op, flat, structure, [place], short)
        return


def _if_refused(id: str, op: Any, flat: list[Any], structure: Any, places: list[int], short: str) -> Iterator[Call]:
    values = [leaf.detach().to(DTYPES[short]) if n in places else leaf for n, leaf in enumerate(flat)]
    tensors = tuple(value for value in values if isinstance(value, torch.Tensor))

    def function(*given: torch.Tensor) -> Any:
        rest = iter(given)
        leaves = [next(rest) if isinstance(value, torch.Tensor) else value for value in values]
        first, args, kwargs = tree_unflatten(leaves, structure)
        return op(first, *args, **kwargs)

    try:
        function(*(tensor.clone() for tensor in tensors))
    except Exception as error:
        yield Call(id, function, tensors, error)


def main() -> None:
    quiet()
    warnings.simplefilter("ignore")
    tried = 0
    answered = []
    for name in op_table():
        for call in refused_calls(name):
            tried += 1
            if call.answers("ferrite", strict=True):
                answered.append(call.id)
                print(f"{call.id} gives an answer; eager: {' '.join(str(call.error).split())[:100]}", flush=True)
    print(f"{tried} calls that eager refuses, {len(answered)} of them with an answer")
    raise SystemExit(bool(answered))


if __name__ == "__main__":
    main()
