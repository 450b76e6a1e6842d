"""Every kind of thing that may stand where a plain tensor was traced, in every way into compiled code.

    python -m tests.behaviour.kinds_of_tensors WAY ...

says `begin WAY: KIND` and `end WAY: KIND: VERDICT` for each kind, so that the last line of a process that died names
the cell. A verdict is "right" if the call ends as eager does, "refused" if it raises where eager goes on, and else says
what is wrong. Eager itself reads address zero where a storage was freed: there only a refusal is right.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import symbolic_trace
from torch.testing._internal.two_tensor import TwoTensor

import ferrite.backend


class Wrapper(Tensor):
    """One plain tensor inside."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        return Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], meta: None, size: Any, stride: Any) -> Wrapper:
        return Wrapper(parts["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def inside(value: Any) -> Any:
            return value.inner if isinstance(value, Wrapper) else value

        made = func(*map(inside, args), **{key: inside(value) for key, value in (kwargs or {}).items()})
        return Wrapper(made) if isinstance(made, Tensor) else made


class Named(Tensor):
    """Plain memory under another class, which PyTorch's own `__torch_function__` carries on."""


def base() -> Tensor:
    return torch.arange(16.0).view(4, 4) - 5


def freed(bytes_left: int) -> Tensor:
    x = base().clone()
    x.untyped_storage().resize_(bytes_left)
    return x


def inferred() -> Tensor:
    with torch.inference_mode():
        return base() + 0


def wide(rows: int) -> Tensor:
    return torch.cat([torch.full((1, 4), 99.0), base(), torch.full((rows, 4), 99.0)])[1:5]


FITS: dict[str, Callable[[], Any]] = {
    "plain": base,
    "view": lambda: wide(3),
    "parameter": lambda: torch.nn.Parameter(base(), requires_grad=False),
    "inference": inferred,
    "subclass without dispatch": lambda: base().as_subclass(Named),
}
DIFFERS: dict[str, Callable[[], Any]] = {
    "transposed": lambda: base().t().contiguous().t(),
    "expanded": lambda: torch.arange(4.0).expand(4, 4),
    "negated": lambda: torch.complex(base(), base()).conj().imag,
    "conjugated": lambda: torch.complex(base(), base()).conj(),
    "wrapper": lambda: Wrapper(base()),
    "wrapper of two": lambda: TwoTensor(base(), base()),
    "fake": lambda: FakeTensorMode().from_tensor(base()),
    "functional": lambda: torch._to_functional_tensor(base()),
    "meta": lambda: base().to("meta"),
    "zero": lambda: torch._efficientzerotensor((4, 4)),
    "sparse": lambda: base().to_sparse(),
    "rows": lambda: base().to_sparse_csr(),
    "quantised": lambda: torch.quantize_per_tensor(base(), 0.5, 0, torch.qint8),
    "jagged": lambda: torch.nested.nested_tensor([base(), base()[:2]], layout=torch.jagged),
    "f64": lambda: base().double(),
    "f16": lambda: base().half(),
    "i64": lambda: base().long(),
    "bool": lambda: base() > 0,
    "scalar": lambda: torch.tensor(3.0),
    "rank three": lambda: base().view(1, 4, 4),
    "more rows": lambda: torch.ones(6, 4),
    "fewer rows": lambda: torch.ones(2, 4),
    "no elements": lambda: torch.ones(0, 4),
    "number": lambda: 3,
    "nothing": lambda: None,
    "list": lambda: [base()],
}
GONE: dict[str, Callable[[], Any]] = {"freed": lambda: freed(0), "cut": lambda: freed(40)}
KINDS = FITS | DIFFERS | GONE


def work(x: Tensor, y: Tensor) -> Tensor:
    return (x @ y).relu() + (x * 2).sum(0)


def branch(x: Tensor, y: Tensor) -> Tensor:
    return torch.cond(x.sum() < 1e9, lambda x, y: (x @ y).relu() + (x * 2).sum(0), lambda x, y: x - y, (x, y))


OTHER = torch.arange(16.0).view(4, 4).flip(0)


# ---- ways


def compiled(make: Callable[[], Any]) -> Any:
    torch._dynamo.reset()
    return torch.compile(work, backend="ferrite")(make(), OTHER)


def behind_guards(function: Callable[..., Any] = work, **options: Any) -> Callable[[Callable[[], Any]], Any]:
    """What Dynamo is given, called without Dynamo."""
    made: list[Callable[..., Any]] = []

    def backend(graph: Any, inputs: Any) -> Callable[..., Any]:
        made.append(ferrite.backend.compile(graph, inputs, options=options))
        return made[-1]

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(function, backend=backend, dynamic=False)(base(), OTHER)
    return lambda make: made[-1](make(), OTHER)[0]


def changing() -> Callable[[Callable[[], Any]], Any]:
    """With sizes that change, where the rank is all that the trace knows."""
    made: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Callable[..., Any]:
        places = [index for index, value in enumerate(inputs) if isinstance(value, Tensor)]
        made.append((ferrite.backend.compile(graph, inputs), [*inputs], places))
        return made[-1][0]

    torch._dynamo.reset()
    torch.compile(lambda x: x.exp() * 2 + 1, backend=backend, dynamic=True)(base())
    function, inputs, (place,) = made[-1]
    numbers = [4 if not isinstance(value, Tensor) else value for value in inputs]
    return lambda make: function(*numbers[:place], make(), *numbers[place + 1 :])[0]


def by_hand() -> Callable[[Callable[[], Any]], Any]:
    function = ferrite.backend.compile(symbolic_trace(work), [base(), OTHER])
    return lambda make: function(make(), OTHER)


def cached() -> Callable[[Callable[[], Any]], Any]:
    behind_guards(cache="on", cache_dir=os.environ["KINDS_CACHE"])
    found = behind_guards(cache="on", cache_dir=os.environ["KINDS_CACHE"])
    record = ferrite.last_record()
    assert record is not None
    assert any("found as" in decision.reason for graph in record.graphs for decision in graph.decisions)
    return found


def backward(function: Callable[..., Any] = work) -> Callable[[Callable[[], Any]], Any]:
    """Kinds of gradients."""

    def gradients(function: Callable[..., Any], given: Any) -> Any:
        x = base().requires_grad_()
        function(x, OTHER).backward(given)
        return x.grad

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="ferrite")
    gradients(compiled, base())
    return lambda make: gradients(compiled, make())


WAYS: dict[str, Callable[[], Callable[[Callable[[], Any]], Any]]] = {
    "compiled": lambda: compiled,
    "behind guards": behind_guards,
    "in python": lambda: behind_guards(host="python"),
    "without code": lambda: behind_guards(executor="oracle"),
    "by hand": by_hand,
    "cached": cached,
    "backward": backward,
    "in a body": lambda: behind_guards(branch),
    "changing sizes": changing,
}


# ---- verdicts


def expected(way: str, make: Callable[[], Any]) -> Any:
    if way == "changing sizes":
        return make().exp() * 2 + 1
    if way != "backward":
        return work(make(), OTHER)
    x = base().requires_grad_()
    work(x, OTHER).backward(make())
    return x.grad


def outcome(run: Callable[[], Any]) -> Any:
    try:
        return run()
    except Exception as error:
        return error


def verdict(found: Any, wanted: Any) -> str:
    if isinstance(found, Exception):
        if not isinstance(wanted, Exception):
            return f"refused: {type(found).__name__}: {str(found).strip().partition(chr(10))[0]}"
        return "right" if isinstance(found, (type(wanted), RuntimeError)) else repr(found)
    if isinstance(wanted, Exception):
        return f"eager raises {wanted!r}"
    return "right" if is_same(found, wanted) else f"{found} for {wanted}"


def is_same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, Named):  # AOTAutograd's graphs give plain tensors for them, which Dynamo wraps again
        found, wanted = found.as_subclass(Tensor), wanted.as_subclass(Tensor)
    if type(found) is not type(wanted):
        return False
    if not isinstance(wanted, Tensor) or wanted.device.type == "meta":
        return True
    if isinstance(wanted, Wrapper):
        return is_same(found.inner, wanted.inner)
    if isinstance(wanted, TwoTensor):
        return is_same(found.a, wanted.a) and is_same(found.b, wanted.b)
    if wanted.is_nested:
        return is_same(found.values(), wanted.values())
    if found.dtype != wanted.dtype or found.shape != wanted.shape or found.layout != wanted.layout:
        return False
    if torch._is_functional_tensor(wanted) or isinstance(wanted, torch._subclasses.FakeTensor):
        return True
    return torch.allclose(found.to_dense(), wanted.to_dense(), rtol=1e-3)


def main(way: str) -> None:
    warnings.simplefilter("ignore")
    run = WAYS[way]()
    for name, make in KINDS.items():
        print(f"begin {way}: {name}", flush=True)
        wanted = RuntimeError("no memory") if name in GONE else outcome(lambda make=make: expected(way, make))
        print(f"end {way}: {name}: {verdict(outcome(lambda make=make: run(make)), wanted)}", flush=True)


if __name__ == "__main__":
    for way in sys.argv[1:]:
        main(way)
