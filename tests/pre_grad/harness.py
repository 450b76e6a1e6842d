"""Proves one pass on one program: captured as Dynamo does, rewritten, and run before and after in eager.

    rewrites(sink_cat, function, [x, y], times=1, left={"cat": 1, "tanh": 2})
    keeps(sink_cat, function, [x, y], because="is also read by")

The captured graph and the rewritten one run on copies of the inputs; outputs with their strides and the memory they
share, the inputs after the call, and gradients must agree. Nothing is compiled.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Interpreter, Node, Tracer
from torch.utils import _pytree as pytree

from ferrite.graph.arguments import kind
from ferrite.graph.query import family
from ferrite.graph.snapshot import copy_module
from ferrite.graph.text import show_graph
from ferrite.graph.values import fake_mode_of, value_of
from ferrite.options import Options
from ferrite.passes import edit
from ferrite.report.record import GraphRecord

Pass = Callable[[Graph], int]


@dataclass(frozen=True)
class Outcome:
    """A rewritten program: how many rewrites were made, what was left alone and why, which ops stand in it now."""

    module: GraphModule
    before: str
    after: str
    rewrites: int
    reasons: list[str]
    kinds: Counter[str]


@dataclass(frozen=True)
class Captured:
    """A graph of Dynamo's, and the inputs it takes, as they were before the call."""

    module: GraphModule
    inputs: list[Any]


class _Stop(Exception):
    pass


def capture(function: Callable[..., Any], inputs: Sequence[Any], *, dynamic: bool | None = False) -> Captured:
    """What Dynamo gives a backend for this call. The call itself does not run."""
    found: list[Captured] = []

    def keep(module: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        sizes = [value.node.hint if isinstance(value, torch.SymInt) else value for value in example_inputs]
        found.append(Captured(module, copy.deepcopy(sizes)))

        def stop(*_: Any) -> Any:
            raise _Stop

        return stop

    torch._dynamo.reset()
    with suppress(_Stop):
        torch.compile(function, backend=keep, fullgraph=True, dynamic=dynamic)(*inputs)
    (captured,) = found
    return captured


def trace(function: Callable[..., Any], inputs: Sequence[Any], *, gradients: bool = False) -> Captured:
    """The calls as they are written, without Dynamo, with their values: quick, and for modules a graph that calls those
    inside and holds parameters. `gradients`: values know whether they ask for one."""
    tracer = Tracer()
    tracer.proxy_buffer_attributes = True
    graph = tracer.trace(function)
    traced = GraphModule(tracer.root, graph)
    mode = FakeTensorMode()
    with mode, torch.set_grad_enabled(gradients):
        _Noted(traced, mode).run(*(mode.from_tensor(value, static_shapes=True) for value in inputs))
    return Captured(traced, copy.deepcopy(list(inputs)))


class _Noted(Interpreter):
    """Runs a graph on fake tensors and writes down what each node gives."""

    def __init__(self, module: GraphModule, mode: FakeTensorMode) -> None:
        super().__init__(module)
        self._mode = mode

    def run_node(self, node: Node) -> Any:
        value = super().run_node(node)
        if node.op != "output":
            node.meta["example_value"] = value
        return value

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._mode.from_tensor(super().get_attr(target, args, kwargs), static_shapes=True)

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        module = self.fetch_attr(target)
        state = [*module.named_parameters(), *module.named_buffers()]
        fakes = {name: self._mode.from_tensor(value, static_shapes=True) for name, value in state}
        return torch.func.functional_call(module, fakes, args, kwargs)


def rewrites(
    passes: Pass | Sequence[Pass],
    function: Callable[..., Any] | Captured,
    inputs: Sequence[Any] = (),
    *,
    times: int,
    left: Mapping[str, int] | None = None,
    exact: bool = False,
    dynamic: bool | None = False,
    again: int | None = 0,
) -> Outcome:
    """The passes make exactly `times` rewrites, `left` counts ops that stand afterwards, and nobody sees a difference.

    `exact`: the same bits. `again`: how many rewrites a second run makes; None: anything.
    """
    captured = function if isinstance(function, Captured) else capture(function, inputs, dynamic=dynamic)
    outcome = run_passes(captured, passes, exact=exact)
    assert outcome.rewrites == times, f"{outcome.rewrites} rewrites: {outcome.reasons}\n{outcome.after}"
    for name, count in (left or {}).items():
        assert outcome.kinds[name] == count, f"{outcome.kinds[name]} of {name} are left\n{outcome.after}"
    if again is not None:
        once_more = run_passes(Captured(outcome.module, captured.inputs), passes)
        assert once_more.rewrites == again, f"a second run makes {once_more.rewrites} rewrites\n{once_more.after}"
    return outcome


def keeps(
    passes: Pass | Sequence[Pass],
    function: Callable[..., Any] | Captured,
    inputs: Sequence[Any] = (),
    *,
    because: str | None = None,
    dynamic: bool | None = False,
) -> Outcome:
    """The passes leave the graph byte for byte as it is; if it was a candidate, with a reason that says `because`."""
    outcome = rewrites(passes, function, inputs, times=0, dynamic=dynamic, again=None)
    assert outcome.after == outcome.before
    if because is not None:
        assert any(because in reason for reason in outcome.reasons), f"the reasons are {outcome.reasons}"
    return outcome


def run_passes(captured: Captured, passes: Pass | Sequence[Pass], *, exact: bool = False) -> Outcome:
    """Run the passes on a copy of the graph, check it, and compare it with the original."""
    original = copy_module(captured.module)
    module = copy_module(captured.module)
    before = show_graph(module.graph)
    known = {id(value_of(node)) for node in module.graph.nodes}
    guards = _guards(module)
    record = GraphRecord("test", "pre_grad")
    chosen = list(passes) if isinstance(passes, Sequence) else [passes]
    count = edit(module, "pre_grad", chosen, Options(strict=True), record, after_autograd=False)
    taken = sum(decision.taken for decision in record.decisions)
    assert count == taken, f"{count} rewrites were counted and {taken} made"
    assert _guards(module) == guards, "guards were added"
    module.graph.lint()
    module.recompile()
    ValueCheck(module, known).run(*copy.deepcopy(captured.inputs))
    assert_same(original, module, captured.inputs, exact=exact)
    return Outcome(
        module,
        before,
        show_graph(module.graph),
        count,
        [decision.reason for decision in record.decisions if not decision.taken],
        Counter(str(kind(node)) for _, member in family(module) for node in member.graph.nodes),
    )


def _guards(module: GraphModule) -> list[str]:
    """What is assumed of the sizes that vary."""
    environment = fake_mode_of(module.graph).shape_env
    return [] if environment is None else [str(guard.expr) for guard in environment.guards]


class ValueCheck(Interpreter):
    """Runs a graph and holds every value that a pass wrote down against the real one."""

    def __init__(self, module: GraphModule, known: set[int]) -> None:
        super().__init__(module, garbage_collect_values=False)
        self._known = known

    def run_node(self, node: Node) -> Any:
        real = super().run_node(node)
        one = pytree.tree_leaves(real)
        if node.op.startswith("call") and node.users and any(isinstance(leaf, torch.Tensor) for leaf in one):
            fake = value_of(node)
            assert fake is not None, f"{node.name} has no fake value"
            if id(fake) not in self._known:
                other = pytree.tree_leaves(fake)
                assert len(one) == len(other), f"{node.name} gives {len(one)} values, not {len(other)}"
                for a, b in zip(one, other, strict=True):
                    if isinstance(a, torch.Tensor):
                        assert facts(a) == facts(b), f"{node.name} is {facts(a)}, and its fake value says {facts(b)}"
        return real


def facts(value: torch.Tensor) -> tuple[Any, ...]:
    def plain(numbers: Sequence[Any]) -> tuple[int, ...]:
        return tuple(number.node.hint if isinstance(number, torch.SymInt) else number for number in numbers)

    shape = plain(value.shape)
    # Strides of dimensions that are never stepped along mean nothing.
    strides = tuple(stride for size, stride in zip(shape, plain(value.stride()), strict=True) if size > 1)
    return value.dtype, value.device.type, shape, strides if 0 not in shape else ()


def assert_same(one: GraphModule, other: GraphModule, inputs: Sequence[Any], *, exact: bool = False) -> None:
    """Both do the same to anybody who calls them."""
    ones, others = copy.deepcopy(list(inputs)), copy.deepcopy(list(inputs))
    expected, found = _call(one, ones), _call(other, others)
    if isinstance(expected, Exception):
        assert type(found) is type(expected), f"{found!r} instead of {expected!r}"
        return
    assert not isinstance(found, Exception), repr(found)
    _close(found, expected, exact)
    _close(others, ones, exact)
    assert _sharing(found, others) == _sharing(expected, ones), "outputs share other memory than before"
    _assert_same_gradients(one, other, inputs, exact)


def _call(module: GraphModule, inputs: list[Any]) -> Any:
    torch.manual_seed(0)
    try:
        with _modes_restored():
            return module(*inputs)
    except Exception as error:
        return error


@contextmanager
def _modes_restored() -> Iterator[None]:
    """A graph that fails between two switches leaves its modes on."""
    with (
        torch.set_grad_enabled(torch.is_grad_enabled()),
        torch.autocast("cpu", enabled=torch.is_autocast_enabled("cpu")),
    ):
        yield


def _close(found: Any, expected: Any, exact: bool, *, strides: bool = True) -> None:
    left, right = pytree.tree_leaves(found), pytree.tree_leaves(expected)
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        if not isinstance(a, torch.Tensor):
            assert a == b
            continue
        narrow = a.dtype in (torch.float16, torch.bfloat16)
        tolerance = 0.0 if exact else 1e-2 if narrow else 1e-5
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True, check_stride=strides)
        assert a.requires_grad == b.requires_grad


def _sharing(outputs: Any, inputs: Sequence[Any]) -> list[Any]:
    """For each output the inputs and outputs that it is, whose memory it stands in, and where in it."""
    tensors = [leaf for leaf in pytree.tree_leaves([list(inputs), outputs]) if isinstance(leaf, torch.Tensor)]
    groups: dict[int, int] = {}
    same: dict[int, int] = {}
    return [
        (
            same.setdefault(id(tensor), len(same)),
            groups.setdefault(tensor.untyped_storage().data_ptr(), len(groups)),
            tensor.storage_offset(),
        )
        for tensor in tensors
    ]


def _assert_same_gradients(one: GraphModule, other: GraphModule, inputs: Sequence[Any], exact: bool) -> None:
    """Gradients by all floating inputs, which arrive as copies of leaves, so that they may be written in place. Where
    there is none by some input (running statistics), by those that came with a gradient."""
    chosen = [isinstance(value, torch.Tensor) and value.dtype.is_floating_point for value in inputs]
    expected = _gradients(one, inputs, chosen, exact)
    if isinstance(expected, Exception):
        chosen = [isinstance(value, torch.Tensor) and value.requires_grad for value in inputs]
        expected = _gradients(one, inputs, chosen, exact)
    found = _gradients(other, inputs, chosen, exact)
    if isinstance(expected, Exception):
        assert isinstance(found, Exception), "gradients exist now and did not before"
        return
    assert not isinstance(found, Exception), f"the gradient cannot be taken: {found!r}"
    _close(found, expected, exact, strides=False)


def _gradients(module: GraphModule, inputs: Sequence[Any], chosen: Sequence[bool], exact: bool) -> Any:
    leaves, given = [], []
    for value, by_this in zip(inputs, chosen, strict=True):
        if by_this:
            leaf = value.detach().clone(memory_format=torch.preserve_format).requires_grad_()
            leaves.append(leaf)
            given.append(leaf.clone(memory_format=torch.preserve_format))
        else:
            given.append(copy.deepcopy(value))
    torch.manual_seed(0)
    try:
        with _modes_restored():
            outputs = pytree.tree_leaves(module(*given))
        ends = [end for end in outputs if isinstance(end, torch.Tensor) and end.requires_grad]
        if not ends or not leaves:
            return []
        generator = torch.Generator().manual_seed(1)
        # Where a value only moves, sums of small whole numbers are the same in every order.
        whole = [torch.randint(-8, 9, end.shape, generator=generator).to(end.dtype) for end in ends]
        tangents = whole if exact else [torch.randn(end.shape, generator=generator).to(end.dtype) for end in ends]
        return torch.autograd.grad(ends, leaves, tangents, allow_unused=True)
    except RuntimeError as error:
        return error
