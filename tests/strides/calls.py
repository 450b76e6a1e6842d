"""Calls of PyTorch's op database in many layouts, in eager and compiled: strides of results and of gradients."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tests.ops.cases import DTYPES, op_table, pick, samples

from .layouts import LAYOUTS, Lay, as_it_is, channels_last, contiguous, laid_out, raised, transposed, with_ones
from .ops import Found, Judge, described

WAYS = (*LAYOUTS, "first transposed", "first channels_last", "first odd")
COTANGENTS = (as_it_is, contiguous, transposed, channels_last)  # how gradients of results lie
# Eager does not take such sizes, or has no such op on this device.
REFUSALS = (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError, AssertionError)


@dataclass
class Plan:
    """Which calls of an op are made, and what is looked at."""

    level: str = "ops"  # or "calls"
    dynamic: bool = False
    dtypes: tuple[str, ...] = ("f32",)
    samples: int = 3  # of an op
    ways: tuple[str, ...] = WAYS
    ranks: tuple[int | None, ...] = (None, 4, 5)  # that samples are raised to; None: as they are
    backend: str = "ferrite"


def judge(name: str, plan: Plan) -> Found:
    """Every call of one op of the database that the plan asks for."""
    found = Found()
    for each in judged(name, plan):
        found.add(each)
    return found


def judged(name: str, plan: Plan, skipped: int = 0) -> Iterator[Found]:
    """What came of each call but the first ones, as soon as it is known: the next may end the process."""
    op = op_table()[name]
    observer = Judge(dynamic=plan.dynamic)
    for arguments, process in islice(_arguments(name, op, plan), skipped, None):
        if plan.level == "calls":
            yield _of_call(name, op, arguments, process, plan)
            continue
        try:
            with observer:
                _gradients(op.op, arguments, process, COTANGENTS)
        except REFUSALS:
            pass
        yield observer.found
        observer.found = Found()


def _arguments(name: str, op: Any, plan: Plan) -> Iterator[tuple[Any, Any]]:
    """Those of the database, and last the same in higher ranks, which not every kernel survives."""
    for dtype in plan.dtypes:
        if DTYPES[dtype] not in op.supported_dtypes("cpu"):
            continue
        trains = op.supports_autograd and DTYPES[dtype] in op.supported_backward_dtypes("cpu")
        picked = pick(list(samples(name, dtype, "train" if trains else "infer")), plan.samples)
        for rank in plan.ranks:
            for sample in picked:
                given = (sample.input, sample.args, sample.kwargs)
                each = raised(given, rank) if rank else given
                if each is None:
                    continue
                for _, cut in with_ones(each):
                    for way in plan.ways:
                        yield laid_out(cut, way), sample.process


def _of_call(name: str, op: Any, arguments: Any, process: Any, plan: Plan) -> Found:
    found = Found()
    given = ", ".join(map(described, tree_leaves(arguments)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = _gradients(op.op, arguments, process)
        except REFUSALS:
            return found
        found.calls[name] += 1
        torch._dynamo.reset()
        options = {"cache": "off", "fallback_random": True} if plan.backend == "ferrite" else None
        # A function of its own: what is in the database may be no function at all.
        function = lambda x, args, kwargs: op.op(x, *args, **kwargs)
        compiled = torch.compile(function, backend=plan.backend, dynamic=plan.dynamic, options=options)
        try:
            made = _gradients(lambda x, *args, **kwargs: compiled(x, args, kwargs), arguments, process)
        except Exception as error:  # other tests look at these
            found.unknown[f"{name}: {type(error).__name__}: {str(error)[:80]}"] += 1
            return found
    for what, one, other in zip(("result", "gradient"), made, expected, strict=True):
        if one != other:
            found.differences.append((name, f"{name}({given}): {what}s: eager {other}, compiled {one}"))
    return found


def _gradients(
    function: Any, arguments: Any, process: Any, cotangents: Sequence[Lay] = (as_it_is,)
) -> tuple[list[Any], list[Any]]:
    """The strides of results, and of the gradients that tensors have which want some: for gradients of the results that
    lie in each of these ways."""
    first, args, kwargs = arguments
    made = function(first, *args, **kwargs)
    wanted = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    outputs = [leaf for leaf in tree_leaves(process(made)) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    gradients: list[Any] = []
    if wanted and outputs and all(output.layout == torch.strided for output in outputs):
        for lay in cotangents:
            tangents = [lay(torch.ones_like(output)) for output in outputs]
            gradients += torch.autograd.grad(outputs, wanted, tangents, allow_unused=True, retain_graph=True)
    return [_strides(leaf) for leaf in tree_leaves(made)], [_strides(leaf) for leaf in gradients]


def _strides(value: Any) -> Any:
    """Of a tensor with elements."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.is_nested:
        return None
    return (tuple(value.shape), value.stride())
