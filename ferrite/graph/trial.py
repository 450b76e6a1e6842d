"""Runs a function or graph on copies of its inputs, so that two of them can be compared and nobody notices.

Copies share memory where the inputs do. Gradients are taken of the copies and of a module's parameters; random numbers
come from a seed of their own; the state of the generators, inputs, grad fields, parameters and buffers are as before.
What cannot be copied is `NotTried`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 1e-2}


class NotTried(Exception):
    """Why a program cannot be run here."""


@dataclass(frozen=True)
class Trial:
    """What one call gave: each value with a name that a reader understands."""

    values: tuple[tuple[str, Any], ...]


def run_trial(
    function: Callable[..., Any],
    inputs: Sequence[Any],
    *,
    steps: int = 1,
    seed: int = 0,
    buffers: Container[str] | None = None,
) -> Trial:
    """Outputs, inputs and buffers after the call, and gradients; with more `steps` leaves go down their gradients in
    between. `buffers`: those that are looked at, if not all."""
    copies = copy_inputs(inputs)
    found: list[tuple[str, Any]] = []
    with torch.random.fork_rng(devices=[]), _disable_current_modes(), _state_kept(function):
        for step in range(steps):
            torch.manual_seed(seed + step)
            label = f"step {step + 1}, " if steps > 1 else ""
            outputs = pytree.tree_leaves(function(*copies))
            found += [(f"{label}output {index}", _detached(value)) for index, value in enumerate(outputs)]
            flat, form = pytree.tree_flatten(copies)
            given = {f"input {index}": value for index, value in enumerate(flat)}
            after = given | {name: v for name, v in _buffers(function).items() if buffers is None or name in buffers}
            found += [(f"{label}{name} after the call", _detached(value)) for name, value in after.items()]
            gradients = _gradients(outputs, {**given, **_parameters(function)})
            found += [(f"{label}gradient of {name}", value) for name, value in gradients.items()]
            if step + 1 < steps:
                copies = pytree.tree_unflatten([_stepped(v, gradients.get(name)) for name, v in given.items()], form)
                _step(_parameters(function), gradients)
    return Trial(tuple(found))


@contextmanager
def _state_kept(function: Any) -> Iterator[None]:
    """A module's parameters and buffers are afterwards the same tensors with the same numbers."""
    members = list(function.modules()) if isinstance(function, torch.nn.Module) else []
    holders = [holder for member in members for holder in (member._parameters, member._buffers)]
    kept = [(holder, dict(holder)) for holder in holders]
    tensors = {id(value): value for _, values in kept for value in values.values() if value is not None}
    if any(isinstance(value, FakeTensor) for value in tensors.values()):
        raise NotTried("the module holds a FakeTensor")
    with torch.no_grad(), _disable_current_modes():
        numbers = {key: value.detach().clone() for key, value in tensors.items()}
    try:
        yield
    finally:
        with torch.no_grad():
            for holder, values in kept:
                holder.update(values)
            for key, value in tensors.items():
                if not torch.equal(value, numbers[key]):
                    value.copy_(numbers[key])


def _parameters(function: Any) -> dict[str, torch.Tensor]:
    return _by_name(function.named_parameters()) if isinstance(function, torch.nn.Module) else {}


def _buffers(function: Any) -> dict[str, torch.Tensor]:
    return _by_name(function.named_buffers()) if isinstance(function, torch.nn.Module) else {}


def _by_name(held: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """By the names that they have in the user's module, compiled or not."""
    return {name.removeprefix("_orig_mod."): tensor for name, tensor in held}


def _step(parameters: dict[str, torch.Tensor], gradients: dict[str, Any]) -> None:
    with torch.no_grad():
        for name, parameter in parameters.items():
            if isinstance(gradients.get(name), torch.Tensor):
                parameter.sub_(0.01 * gradients[name])


def difference(expected: Trial, found: Trial, tolerance: float | None = None) -> str | None:
    """The first value that differs, and by how much; None if none does."""
    if len(expected.values) != len(found.values):
        return f"{len(found.values)} values in place of {len(expected.values)}"
    for (name, one), (_, other) in zip(expected.values, found.values, strict=True):
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            reason = _tensors_differ(one, other, tolerance)
        else:
            reason = None if type(one) is type(other) and one == other else f"is {other!r}, not {one!r}"
        if reason is not None:
            return f"{name} {reason}"
    return None


def copy_inputs(inputs: Sequence[Any]) -> list[Any]:
    storages: dict[int, torch.UntypedStorage] = {}

    def one(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value.node.hint if isinstance(value, torch.SymInt) else deepcopy(value)
        if isinstance(value, FakeTensor) or type(value) not in (torch.Tensor, torch.nn.Parameter):
            raise NotTried(f"an input is a {type(value).__name__}")
        if value.layout is not torch.strided or value.is_quantized:
            return value.detach().clone().requires_grad_(value.requires_grad)
        storage = value.untyped_storage()
        mine = storages.setdefault(storage._cdata, storage.clone())
        same = torch.empty(0, dtype=value.dtype, device=value.device)
        same.set_(mine, value.storage_offset(), value.shape, value.stride())
        return same.requires_grad_(value.requires_grad)

    with torch.no_grad():
        return [pytree.tree_map(one, value) for value in inputs]


def _gradients(outputs: list[Any], given: dict[str, Any]) -> dict[str, Any]:
    ends = [value for value in outputs if isinstance(value, torch.Tensor) and value.requires_grad]
    leaves = {n: v for n, v in given.items() if isinstance(v, torch.Tensor) and v.requires_grad and v.is_leaf}
    if not ends or not leaves:
        return {}
    # Of a softmax or a norm the sum has no gradient, so none of the tangents is all ones.
    generator = torch.Generator().manual_seed(len(ends))
    tangents = [torch.randn(end.shape, generator=generator).to(end.device, end.dtype) for end in ends]
    return dict(zip(leaves, torch.autograd.grad(ends, list(leaves.values()), tangents, allow_unused=True), strict=True))


def _stepped(value: Any, gradient: Any) -> Any:
    if not isinstance(gradient, torch.Tensor):
        return value.detach().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value
    with torch.no_grad():
        return (value - 0.01 * gradient).requires_grad_()


def _detached(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _tensors_differ(one: torch.Tensor, other: torch.Tensor, tolerance: float | None) -> str | None:
    if one.shape != other.shape or one.dtype != other.dtype:
        return f"is {other.dtype} of {tuple(other.shape)}, not {one.dtype} of {tuple(one.shape)}"
    allowed = TOLERANCE.get(one.dtype, 1e-5) if tolerance is None else tolerance
    if torch.allclose(one, other, rtol=allowed, atol=allowed, equal_nan=True):
        return None
    gap = (one.to(torch.complex128) - other.to(torch.complex128)).abs().nan_to_num(nan=float("inf")).max()
    return f"differs by {gap.item():.3g}"
