"""Runs a function in eager and through Ferrite on equal inputs, and compares everything that its user can see.

`compare(f, *inputs)` copies the inputs twice (storage sharing, strides and `requires_grad` survive the copy), calls
`f` once in eager and `calls` times compiled, and asks for equality of: results (values, dtype, sizes, strides, offset,
layout, `requires_grad`), which results and inputs share storage or are one object, the inputs after the call, the RNG
state, or the exception; with `training`, also of the gradients. It fails if Ferrite was not entered, or fell back, and
if a backward graph is given other tensors than it was compiled for: what was saved lies as it reads it.

Values are equal bit by bit, except floats: a kernel rounds in other places than eager's does (a fused product and sum,
a sum in another order, its own exponential), so floats may differ by `ROUNDINGS` of the largest number of the tensor.
Random numbers are eager's here (`fallback_random`), because the generator's state is compared as well.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch.utils import _pytree as pytree

import ferrite
from tests.promises import promises_kept

STRICT = {"strict": True, "fallback_random": True}
ROUNDINGS = 64


@dataclass
class Outcome:
    """All that one call leaves behind."""

    result: Any
    inputs: Sequence[Any]
    error: Exception | None
    random_state: torch.Tensor
    gradients: list[Any]


def compare(
    function: Callable[..., Any],
    *inputs: Any,
    training: bool = False,
    dynamic: bool | None = None,
    fullgraph: bool = True,
    options: dict[str, Any] | None = None,
    prepare: Callable[..., Sequence[Any]] | None = None,
    calls: int = 2,
    random: bool = True,
    exact: bool = True,
) -> Any:
    """See the module. `prepare` makes the real inputs from copies of the given leaves. Gives the compiled result."""
    before = counters["ferrite"]["graphs_compiled"]
    chosen = STRICT | (options or {})
    found: Outcome | None = None
    compiled: Callable[..., Any] | None = None
    for _ in range(calls):
        eager_function, eager_leaves = copy.deepcopy((function, inputs))
        expected = observe(eager_function, eager_leaves, prepare, training)
        # One compiled object serves all calls; a module keeps its state between them, so it is compiled anew.
        if compiled is None or isinstance(function, torch.nn.Module):
            copied = copy.deepcopy(function)
            compiled = torch.compile(copied, backend="ferrite", dynamic=dynamic, fullgraph=fullgraph, options=chosen)
        with promises_kept():
            found = observe(compiled, copy.deepcopy(inputs), prepare, training)
        assert_same_outcome(found, expected, random=random, exact=exact)
        if isinstance(function, torch.nn.Module):
            assert_same(list(copied.state_dict().values()), list(eager_function.state_dict().values()), "state")
    assert counters["ferrite"]["graphs_compiled"] > before, "Ferrite compiled nothing"
    record = ferrite.last_record()
    assert record is None or record.failures == []
    assert found is not None
    return found.result


def observe(
    function: Callable[..., Any], leaves: Sequence[Any], prepare: Callable[..., Sequence[Any]] | None, training: bool
) -> Outcome:
    """Call once from a fixed seed; with `training`, run the backward of every result that takes part in it."""
    inputs = leaves if prepare is None else prepare(*leaves)
    torch.manual_seed(17)
    result, error, gradients = None, None, []
    try:
        result = function(*inputs)
        if training:
            run_backward(result)
    except Exception as raised:
        error = raised
    state = torch.get_rng_state()
    if training and error is None:
        owners = [leaf for leaf in pytree.tree_leaves(leaves) if isinstance(leaf, torch.Tensor)]
        module = getattr(function, "_orig_mod", function)
        if isinstance(module, torch.nn.Module):
            owners += list(module.parameters())
        gradients = [owner.grad for owner in owners]
    return Outcome(result, inputs, error, state, gradients)


def run_backward(result: Any) -> None:
    """Backward with fixed, uneven cotangents, so that no gradient is right by symmetry."""
    outputs = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad]
    unique = list({id(t): t for t in outputs}.values())
    assert unique, "nothing to differentiate"
    tangents = [_tangent(t) for t in unique]
    torch.autograd.backward(unique, tangents)


def _tangent(tensor: torch.Tensor) -> torch.Tensor:
    values = torch.arange(1, tensor.numel() + 1, dtype=torch.float64).remainder(7) / 4 - 0.75
    return values.reshape(tensor.shape).to(tensor.dtype)


def assert_same_outcome(found: Outcome, expected: Outcome, *, random: bool = True, exact: bool = True) -> None:
    if expected.error is not None or found.error is not None:
        assert_same_error(found.error, expected.error)
        return
    assert_same(found.result, expected.result, "result", exact)
    assert_same(found.inputs, expected.inputs, "input", exact)
    assert_same(found.gradients, expected.gradients, "gradient", exact)
    assert sharing(found) == sharing(expected), "results and inputs share storage otherwise than in eager"
    if random:
        assert torch.equal(found.random_state, expected.random_state), "the RNG state differs afterwards"


def assert_same_error(found: Exception | None, expected: Exception | None) -> None:
    assert expected is not None, f"eager raises nothing, compiled raises {found!r}"
    assert found is not None, f"eager raises {expected!r}, compiled raises nothing"
    assert type(found) is type(expected), f"eager raises {expected!r}, compiled {found!r}"


def assert_same(found: Any, expected: Any, where: str, exact: bool = True) -> None:
    """Equal structure, and equal leaves: see `equal`, or what `assert_close` accepts when not `exact`."""
    found_leaves, found_spec = pytree.tree_flatten(found)
    expected_leaves, expected_spec = pytree.tree_flatten(expected)
    assert found_spec == expected_spec, f"{where}: structure"
    for index, (left, right) in enumerate(zip(found_leaves, expected_leaves, strict=True)):
        _assert_same_leaf(left, right, f"{where} {index}", exact)


def _assert_same_leaf(found: Any, expected: Any, where: str, exact: bool) -> None:
    assert type(found) is type(expected), f"{where}: {type(found)} for {type(expected)}"
    if not isinstance(expected, torch.Tensor):
        if not isinstance(expected, (torch.Generator, torch.nn.Module)) and not callable(expected):
            assert found == expected or (found != found and expected != expected), f"{where}: {found} for {expected}"
        return
    assert appearance(found) == appearance(expected), where
    if hasattr(type(expected), "__tensor_flatten__"):
        names, _ = expected.__tensor_flatten__()
        for name in names:
            _assert_same_leaf(getattr(found, name), getattr(expected, name), f"{where}.{name}", exact)
        return
    if expected.device.type == "meta":
        return
    if exact:
        assert equal(found, expected), f"{where}: {found} for {expected}"
    else:
        torch.testing.assert_close(found, expected, equal_nan=True)


def appearance(tensor: torch.Tensor) -> dict[str, Any]:
    """Everything about a tensor but its values."""
    seen: dict[str, Any] = {
        "dtype": tensor.dtype,
        "size": tuple(tensor.shape),
        "layout": tensor.layout,
        "device": tensor.device,
        "requires_grad": tensor.requires_grad,
        "is_inference": tensor.is_inference(),
        "is_conj": tensor.is_conj(),
        "is_neg": tensor.is_neg(),
    }
    if tensor.layout == torch.strided and not tensor.is_nested:
        seen |= {"stride": tensor.stride(), "offset": tensor.storage_offset()}
    return seen


def equal(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """The same values, up to the rounding of floats; NaN and infinities are the same too."""
    if found.shape != expected.shape or found.dtype != expected.dtype or found.layout != expected.layout:
        return False
    if bits(found) == bits(expected):
        return True
    if not expected.dtype.is_floating_point or expected.layout != torch.strided:
        return False
    rounding = torch.finfo(expected.dtype).eps
    found, expected = (each.detach().to(torch.float64) for each in (found, expected))
    finite = expected.isfinite()
    largest = float(expected[finite].abs().max()) if finite.any() else 0.0
    allowed = ROUNDINGS * rounding * largest
    special = (found == expected) | (found.isnan() & expected.isnan())
    near = (found - expected).abs() <= allowed
    return bool(torch.where(finite, near, special).all())


def bits(tensor: torch.Tensor) -> list[bytes]:
    """The exact values, as bytes; of a sparse tensor, of each of its parts."""
    tensor = tensor.detach()
    if tensor.layout == torch.strided:
        plain = tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        return [bytes(plain.reshape(-1).view(torch.uint8).tolist())]
    if tensor.layout == torch.sparse_coo:
        tensor = tensor.coalesce()
        return [*bits(tensor.indices()), *bits(tensor.values())]
    if tensor.layout == torch.sparse_csr:
        return [*bits(tensor.crow_indices()), *bits(tensor.col_indices()), *bits(tensor.values())]
    return bits(tensor.to_dense())


def sharing(outcome: Outcome) -> tuple[list[int], list[int]]:
    """For each tensor of inputs and results: the first one with the same storage, and the first that is the same."""
    tensors = [
        leaf
        for leaf in pytree.tree_leaves((list(outcome.inputs), outcome.result))
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided and not leaf.is_nested
    ]
    storages: dict[Any, int] = {}
    objects: dict[int, int] = {}
    same_storage, same_object = [], []
    for index, tensor in enumerate(tensors):
        same_storage.append(storages.setdefault(_storage_key(tensor), index))
        same_object.append(objects.setdefault(id(tensor), index))
    return same_storage, same_object


def _storage_key(tensor: torch.Tensor) -> Any:
    """Empty storages have no address of their own; a wrapper subclass has none at all."""
    if hasattr(type(tensor), "__tensor_flatten__"):
        return id(tensor)
    storage = tensor.untyped_storage()
    return storage._cdata if storage.nbytes() == 0 else storage.data_ptr() or storage._cdata
