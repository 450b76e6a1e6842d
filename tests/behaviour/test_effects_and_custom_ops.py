"""Custom operators of every shape, side effects in program order, hooks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph

import ferrite
from ferrite import pipeline
from tests.behaviour.compare import STRICT, compare, equal

EVENTS: list[str] = []


@torch.library.custom_op("behaviour::scale", mutates_args=())
def scale(x: Tensor, factor: float = 2.0) -> Tensor:
    EVENTS.append("scale")
    return x * factor


@scale.register_fake
def _(x: Tensor, factor: float = 2.0) -> Tensor:
    return torch.empty_like(x)


def _scale_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.factor = inputs[1]


scale.register_autograd(lambda ctx, grad: (grad * ctx.factor, None), setup_context=_scale_setup)


@torch.library.custom_op("behaviour::fill", mutates_args={"x"})
def fill(x: Tensor, value: float) -> None:
    x.fill_(value)


@torch.library.custom_op("behaviour::add_into", mutates_args={"out"})
def add_into(x: Tensor, out: Tensor) -> Tensor:
    out.add_(x)
    return x * 2


@add_into.register_fake
def _(x: Tensor, out: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("behaviour::bump_all", mutates_args={"xs"})
def bump_all(xs: Sequence[Tensor], by: float | None = None) -> None:
    for x in xs:
        x.add_(1 if by is None else by)


@torch.library.custom_op("behaviour::maybe", mutates_args={"out"})
def maybe(x: Tensor, out: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    if out is not None:
        out.copy_(x)
    return x + (0 if bias is None else bias)


@maybe.register_fake
def _(x: Tensor, out: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("behaviour::pieces", mutates_args=())
def pieces(x: Tensor, names: str, sizes: Sequence[int]) -> list[Tensor]:
    return [part.clone() + len(names) for part in x.split(list(sizes))]


@pieces.register_fake
def _(x: Tensor, names: str, sizes: Sequence[int]) -> list[Tensor]:
    return [x.new_empty(size) for size in sizes]


@torch.library.custom_op("behaviour::positive", mutates_args=())
def positive(x: Tensor) -> Tensor:
    return x[x > 0].clone()


@positive.register_fake
def _(x: Tensor) -> Tensor:
    size = torch.library.get_ctx().new_dynamic_size()
    return x.new_empty(size)


@torch.library.custom_op("behaviour::fails", mutates_args=())
def fails(x: Tensor) -> Tensor:
    raise LookupError("no such thing")


@fails.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_functional_op(dynamic: bool) -> None:
    compare(lambda x: scale(x + 1) * 2 + scale(x, 3.0), torch.randn(4), dynamic=dynamic)


def test_functional_op_with_gradient() -> None:
    compare(lambda x: scale(x.sin(), 3.0).exp(), torch.randn(4, requires_grad=True), training=True)


@pytest.mark.parametrize("returned", [False, True])
def test_op_that_writes_an_input(returned: bool) -> None:
    def function(x: Tensor) -> Any:
        y = x + 1
        fill(x, 7.0)
        return (x, y * x) if returned else y * x

    compare(function, torch.randn(4))


def test_op_that_writes_an_intermediate() -> None:
    def function(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        fill(y, 3.0)
        return y + x

    compare(function, torch.randn(4))


def test_op_that_writes_a_view() -> None:
    def function(x: Tensor) -> Any:
        y = x * 2
        fill(y[1:3], 9.0)
        fill(x.t()[0], 5.0)
        return y, x.sum()

    compare(function, torch.randn(4, 4))


def test_op_that_writes_and_returns() -> None:
    compare(lambda x, out: (add_into(x, out) + 1, out * 2), torch.randn(4), torch.randn(4))


@pytest.mark.parametrize("by", [None, 2.5])
def test_op_that_writes_a_list(by: float | None) -> None:
    def function(a: Tensor, b: Tensor) -> Tensor:
        c = a * 2
        bump_all([a, b, c], by)
        return a + b + c

    compare(function, torch.randn(4), torch.randn(4))


@pytest.mark.parametrize("given", ["none", "out", "bias", "both"])
def test_op_with_optional_arguments(given: str) -> None:
    def function(x: Tensor, out: Tensor, bias: Tensor) -> Tensor:
        return maybe(x, out if given in ("out", "both") else None, bias if given in ("bias", "both") else None) * 2

    compare(function, torch.randn(4), torch.zeros(4), torch.randn(4))


def test_op_that_returns_a_list() -> None:
    compare(lambda x: [part * 2 for part in pieces(x, "a, b\n'c'", [1, 3])], torch.randn(4))


def test_op_with_a_size_that_only_the_data_knows() -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compare(lambda x: positive(x).sin() + 1, torch.randn(8))


def test_op_that_returns_a_view_by_the_old_interface() -> None:
    with torch.library._scoped_library("behaviour_views", "FRAGMENT") as library:
        library.define("first_half(Tensor(a) x) -> Tensor(a)", tags=())
        library.impl("first_half", lambda x: x[: x.shape[0] // 2], "CompositeImplicitAutograd")
        compare(lambda x: (torch.ops.behaviour_views.first_half(x), x + 1), torch.randn(4))


def test_op_that_raises() -> None:
    compiled = torch.compile(lambda x: fails(x + 1), backend="ferrite", fullgraph=True, options=STRICT)
    with pytest.raises(LookupError, match="no such thing"):
        compiled(torch.ones(2))


def test_op_without_a_fake_kernel_breaks_the_graph_as_ever() -> None:
    with torch.library._scoped_library("behaviour_plain", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CPU")
        x = torch.randn(3)
        compiled = torch.compile(lambda x: torch.ops.behaviour_plain.twice(x + 1), backend="ferrite")
        try:
            found = compiled(x)
        except RuntimeError as error:
            # Dynamo's own words (UnsupportedOperatorException turned into advice); aot_eager says the same.
            assert "fake" in str(error)  # noqa: PT017
        else:
            assert equal(found, (x + 1) * 2)


def test_custom_op_through_bytes() -> None:
    compare(lambda x: [*pieces(scale(x), "n", [2, 2])], torch.randn(4), options={"compile_mode": "serialize"})


# Side effects.


def print_twice(x: Tensor) -> Tensor:
    torch.ops.aten._print("first")
    y = x.sin()
    torch.ops.aten._print("second")
    return y + 1


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_prints_keep_their_order(capfd: pytest.CaptureFixture[str], dynamic: bool) -> None:
    compiled = torch.compile(print_twice, backend="ferrite", fullgraph=True, dynamic=dynamic, options=STRICT)
    x = torch.randn(3)
    compiled(x)
    capfd.readouterr()
    assert equal(compiled(x), x.sin() + 1)
    assert capfd.readouterr().out.split() == ["first", "second"]


def test_prints_while_training(capfd: pytest.CaptureFixture[str]) -> None:
    compiled = torch.compile(print_twice, backend="ferrite", fullgraph=True, options=STRICT)
    x = torch.randn(3, requires_grad=True)
    compiled(x)
    capfd.readouterr()
    compiled(x).sum().backward()
    assert capfd.readouterr().out.split() == ["first", "second"]
    assert equal(x.grad, x.detach().cos())


def test_print_of_a_function_without_tensors_left(capfd: pytest.CaptureFixture[str]) -> None:
    """The result does not depend on the effect, and the effect is not dead code."""

    def function(x: Tensor) -> Tensor:
        torch.ops.aten._print("alive")
        return x + 1

    compiled = torch.compile(function, backend="ferrite", fullgraph=True, options=STRICT)
    compiled(torch.ones(1))
    capfd.readouterr()
    compiled(torch.ones(1))
    assert capfd.readouterr().out.split() == ["alive"]


@torch.library.custom_op("behaviour::say", mutates_args=())
def say(x: Tensor, word: str) -> Tensor:
    EVENTS.append(word)
    return x.clone()


@say.register_fake
def _(x: Tensor, word: str) -> Tensor:
    return torch.empty_like(x)


def test_effectful_custom_ops_run_once_each_in_order() -> None:
    from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

    handle = _register_effectful_op(torch.ops.behaviour.say.default, _EffectType.ORDERED)
    try:

        def function(x: Tensor) -> Tensor:
            say(x, "one")
            say(x, "two")
            say(x, "two")
            return say(x, "three") + 1

        compiled = torch.compile(function, backend="ferrite", fullgraph=True, options=STRICT)
        compiled(torch.ones(2))
        EVENTS.clear()
        compiled(torch.ones(2))
        assert EVENTS == ["one", "two", "two", "three"]
    finally:
        if hasattr(handle, "destroy"):
            handle.destroy()


@torch.library.custom_op("behaviour::say_later", mutates_args=())
def say_later(x: Tensor) -> Tensor:
    """Says something in its backward."""
    return x.clone()


say_later.register_fake(torch.empty_like)
say_later.register_autograd(lambda context, gradient: say(gradient, "later"))


def test_effects_in_the_backward() -> None:
    from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

    handle = _register_effectful_op(torch.ops.behaviour.say.default, _EffectType.ORDERED)
    try:

        def function(x: Tensor) -> tuple[Tensor, Tensor]:
            return say_later(x * 2), x.argmax()

        compiled = torch.compile(function, backend="ferrite", fullgraph=True, options=STRICT)
        x = torch.ones(2, requires_grad=True)
        y, _ = compiled(x)
        EVENTS.clear()
        y.backward(torch.tensor([1.0, 3.0]))
        assert EVENTS == ["later"]
        assert x.grad.tolist() == [2.0, 6.0]
    finally:
        if hasattr(handle, "destroy"):
            handle.destroy()


# Compiling runs nothing of the user's but what tracing runs, which is what aot_eager runs.

RUNS = torch.library.Library("behaviour_runs", "FRAGMENT")


def _run(name: str, result: Any = None) -> Any:
    EVENTS.append(name)
    return result


for _schema, _kernel in {
    "tick(int n) -> ()": lambda n: _run("tick"),
    "ends(Tensor x) -> Tensor[]": lambda x: _run("ends", [x[:1] + 0, x[1:] + 1]),
    "both(Tensor x) -> (Tensor, Tensor)": lambda x: _run("both", (x + 1, x.t() * 2)),
}.items():
    RUNS.define(_schema)
    RUNS.impl(_schema.partition("(")[0], _kernel, "CompositeExplicitAutograd")
runs = torch.ops.behaviour_runs


def with_tick(x: Tensor) -> Tensor:
    runs.tick(7)
    return x + 1


WITH_RUNS: dict[str, Any] = {
    "tick": with_tick,
    "ends": lambda x: runs.ends(x)[1].exp() * 2,
    "both": lambda x: runs.both(x)[1].exp() + runs.both(x)[0].t(),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", WITH_RUNS)
def test_compiling_runs_no_custom_op(name: str, dynamic: bool) -> None:
    from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

    handle = _register_effectful_op(runs.tick.default, _EffectType.ORDERED)
    counts = {}
    try:
        for backend, options in (("aot_eager", None), ("ferrite", STRICT | {"cache": "off"})):
            torch._dynamo.reset()
            compiled = torch.compile(WITH_RUNS[name], backend=backend, fullgraph=True, dynamic=dynamic, options=options)
            x = torch.arange(9.0).view(3, 3)
            EVENTS.clear()
            given = compiled(x)
            counts[backend] = len(EVENTS), given
            torch.testing.assert_close(given, WITH_RUNS[name](x))
        assert counts["ferrite"][0] == counts["aot_eager"][0]
    finally:
        if hasattr(handle, "destroy"):
            handle.destroy()


def test_compiling_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """An effect among PyTorch's own operators."""

    def function(x: Tensor) -> Tensor:
        torch.ops.aten._print("told")
        return x + 1

    told = {}
    for backend in ("aot_eager", "ferrite"):
        torch._dynamo.reset()
        capfd.readouterr()
        torch.compile(function, backend=backend, fullgraph=True)(torch.ones(2))
        told[backend] = capfd.readouterr().out.split()
    assert told["ferrite"] == told["aot_eager"]


def counted_double(x: Tensor) -> Tensor:
    if not isinstance(x, torch._subclasses.FakeTensor):
        EVENTS.append("double")
    return x * 2


def test_compiling_runs_no_function_that_a_pass_inserted(monkeypatch: pytest.MonkeyPatch) -> None:
    def use_it(graph: Graph) -> int:
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default):
            node.target = counted_double
        return 1

    monkeypatch.setattr(pipeline, "POST_GRAD", (use_it, *pipeline.POST_GRAD))
    compiled = torch.compile(lambda x: x.sin() + 1, backend="ferrite", options=STRICT | {"cache": "off"})
    EVENTS.clear()
    assert equal(compiled(torch.ones(3)), torch.full((3,), 3.0))
    assert EVENTS == ["double"]


def test_numeric_check_runs_no_custom_op() -> None:
    options = {"numeric_check": {"pre_grad": {}}, "strict": True}
    compiled = torch.compile(lambda x: scale(x) + 1, backend="ferrite", options=options)
    EVENTS.clear()
    compiled(torch.ones(3))
    assert EVENTS == ["scale"]
    record = ferrite.last_record()
    assert record is not None
    (said,) = [entry.reason for entry in record.decisions if entry.what == "numeric_check"]
    assert said == "not checked: behaviour.scale.default may do more than compute"


def test_effects_in_both_directions_beside_a_mutated_input() -> None:
    """AOTAutograd takes the tokens of effects out of the results and leaves what it says of them behind."""
    from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

    with torch.library._scoped_library("behaviour_effects", "FRAGMENT") as library:
        handles = []
        for name in ("go", "back"):
            library.define(f"{name}(Tensor x) -> Tensor")
            for key in ("CPU", "Meta"):
                library.impl(name, lambda x: x.clone(), key)
            op = getattr(torch.ops.behaviour_effects, name).default
            handles.append(_register_effectful_op(op, _EffectType.ORDERED))

        def backward(context: Any, gradient: Tensor) -> Tensor:
            return torch.ops.behaviour_effects.back(gradient) * 2

        torch.library.register_autograd("behaviour_effects::go", backward, lib=library)

        def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            z = y * 3
            y.acos_()
            return torch.ops.behaviour_effects.go(x.sin()), z

        x, y = torch.rand(3, requires_grad=True), torch.rand(3, requires_grad=True)
        compiled = torch.compile(function, backend="ferrite", fullgraph=True, options={"strict": True, "cache": "off"})
        found: list[list[Tensor]] = []
        try:
            for call in (function, compiled):
                written = y * 1
                first, second = call(x, written)
                sums = first.sum() + (second * 5).sum() + written.sum()
                found.append([first, second, written, *torch.autograd.grad(sums, (x, y))])
        finally:
            for handle in handles:
                if hasattr(handle, "destroy"):
                    handle.destroy()
        torch.testing.assert_close(found[1], found[0])


def test_python_print_breaks_the_graph_and_prints(capfd: pytest.CaptureFixture[str]) -> None:
    def function(x: Tensor) -> Tensor:
        y = x + 1
        print("between")
        return y * 2

    compiled = torch.compile(function, backend="ferrite", options=STRICT)
    for _ in range(2):
        assert equal(compiled(torch.ones(2)), torch.full((2,), 4.0))
        assert capfd.readouterr().out.split() == ["between"]


# Functions that only this process knows.


def local_double(x: Tensor) -> Tensor:
    return x * 2


@pytest.mark.parametrize("kind", ["lambda", "local"])
def test_a_pass_may_insert_a_python_function(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    function = (lambda x: x * 2) if kind == "lambda" else local_double

    def insert_call(graph: Graph) -> int:
        count = 0
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default):
            with graph.inserting_after(node):
                call = graph.call_function(function, (node,))
            call.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(call, delete_user_cb=lambda user, call=call: user is not call)
            count += 1
        return count

    monkeypatch.setattr(pipeline, "POST_GRAD", (insert_call,))
    x = torch.randn(3)
    for mode in ("normal", "serialize"):
        torch._dynamo.reset()
        options = STRICT | {"compile_mode": mode}
        found = torch.compile(lambda x: x.sin() + 1, backend="ferrite", options=options)(x)
        assert equal(found, x.sin() * 2 + 1)


def test_names_that_collide_with_generated_code() -> None:
    """User names become names of values; none of them may hide a global of the generated module."""

    def function(args: Tensor, inf: Tensor, nan: Tensor, slice: Tensor, complex: Tensor) -> Any:
        torch_float32 = args + inf
        return torch_float32 * float("inf"), nan.clamp(max=float("inf")), slice + 2j, complex * float("nan")

    compare(function, *(torch.randn(3) for _ in range(5)))
