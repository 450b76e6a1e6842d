"""Ways to compile and to call: graph breaks, several models, threads, copies, pickles, options and modes."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

import ferrite
import ferrite.backend
from ferrite import pipeline
from tests.behaviour.compare import STRICT, assert_same, compare, equal


def compile_strict(function: Any, **keywords: Any) -> Any:
    return torch.compile(function, backend="ferrite", options=STRICT, **keywords)


class Model(torch.nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, width)
        self.second = torch.nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


def test_fullgraph_and_graph_breaks() -> None:
    def function(x: Tensor) -> Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        return y + 1

    x = torch.randn(3)
    before = counters["ferrite"]["compiled_inference"]
    assert equal(compile_strict(function)(x), x.sin() + 1)
    assert counters["ferrite"]["compiled_inference"] == before + 2
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compile_strict(function, fullgraph=True)(x)


def test_graph_break_while_training() -> None:
    def function(x: Tensor) -> Tensor:
        y = x.sin() * 2
        torch._dynamo.graph_break()
        return (y * x).exp()

    x, twin = (torch.full((3,), 0.5, requires_grad=True) for _ in range(2))
    compile_strict(function)(x).sum().backward()
    function(twin).sum().backward()
    assert equal(x.grad, twin.grad)


def test_branch_on_data() -> None:
    def function(x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x - 1

    compiled = compile_strict(function)
    for sign in (1, -1, 1):
        x = torch.ones(3) * sign
        assert equal(compiled(x), function(x))


def test_two_models_at_once() -> None:
    models = [Model(4), Model(8)]
    compiled = [compile_strict(model) for model in models]
    x = torch.randn(3, 4)
    results = [function(x) for function in compiled]
    for result in results:
        result.sum().backward()
    for model, function, result in zip(models, compiled, results, strict=True):
        assert_same(result, model(x), "result")
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
        expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
        assert_same(gradients, list(expected), "gradient")
        assert equal(function(x), model(x))


def run_in_threads(work: Callable[[int], None], count: int = 8) -> None:
    """Start together; the first exception of any thread fails the test."""
    errors: list[BaseException] = []
    start = threading.Barrier(count)

    def guarded(index: int) -> None:
        try:
            start.wait()
            work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("training", [False, True])
def test_eight_threads_call_one_function(training: bool) -> None:
    model = Model()
    compiled = compile_strict(model)
    inputs = [torch.randn(3, 4, requires_grad=training) for _ in range(8)]
    expected = [model(x).detach() for x in inputs]

    def work(index: int) -> None:
        for _ in range(5):
            result = compiled(inputs[index])
            assert equal(result, expected[index])
            if training:
                result.sum().backward()

    run_in_threads(work)


def test_eight_threads_compile_different_functions() -> None:
    def make(index: int) -> Callable[[Tensor], Tensor]:
        def function(x: Tensor) -> Tensor:
            for _ in range(index + 1):
                x = x.sin() + index
            return x

        return function

    functions = [make(index) for index in range(8)]

    def work(index: int) -> None:
        x = torch.full((4,), float(index), requires_grad=index % 2 == 0)
        result = compile_strict(functions[index])(x)
        assert equal(result, functions[index](x))
        if x.requires_grad:
            result.sum().backward()
            (expected,) = torch.autograd.grad(functions[index](x).sum(), x)
            assert equal(x.grad, expected)

    run_in_threads(work)


def test_options_do_not_leak_between_threads() -> None:
    """Neighbours with other options at the same time: each graph goes to the partitioner of its own options."""
    from torch._functorch.partitioners import default_partition

    split: dict[int, int] = dict.fromkeys(range(8), 0)

    def work(index: int) -> None:
        def partitioner(joint: Any, inputs: Any, **facts: Any) -> Any:
            split[index] += 1
            return default_partition(joint, inputs, **facts)

        def function(x: Tensor) -> Tensor:
            return x.sin() * index

        options = STRICT | ({"partitioner": partitioner} if index % 2 else {})
        x = torch.ones(3, requires_grad=True)
        torch.compile(function, backend="ferrite", options=options)(x).sum().backward()
        assert equal(x.grad, x.detach().cos() * index)

    run_in_threads(work)
    assert split == {index: index % 2 for index in range(8)}


def test_deepcopy_and_pickle_of_a_compiled_module() -> None:
    model = Model()
    compiled = compile_strict(model)
    x = torch.randn(3, 4)
    expected = model(x)
    compiled(x).sum().backward()
    twin = copy.deepcopy(compiled)
    assert equal(twin(x), expected)
    with torch.no_grad():
        twin.second.weight.zero_()
    assert equal(compiled(x), expected)
    assert not equal(twin(x), expected)


def test_deepcopy_and_pickle_of_the_module_below() -> None:
    model = Model()
    x = torch.randn(3, 4)
    compile_strict(model)(x)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert equal(again(x), model(x))
        assert equal(compile_strict(again)(x), model(x))
        assert list(again.state_dict()) == list(model.state_dict())


def test_pickle_of_a_module_compiled_in_place() -> None:
    model = Model()
    model.compile(backend="ferrite", options=STRICT)
    x = torch.randn(3, 4)
    expected = model(x)
    assert counters["ferrite"]["graphs_compiled"] > 0
    again = pickle.loads(pickle.dumps(model))
    assert equal(again(x), expected)
    assert equal(copy.deepcopy(model)(x), expected)


def test_state_dict_of_a_compiled_module(tmp_path: Any) -> None:
    model, other = compile_strict(Model()), compile_strict(Model())
    x = torch.randn(3, 4)
    model(x)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    other.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert equal(other(x), model(x))


def test_compile_of_the_package_on_functions_and_modules() -> None:
    x = torch.randn(3, 4)
    model = Model()
    assert equal(ferrite.compile(model, strict=True)(x), model(x))
    assert equal(ferrite.compile(lambda x: x + 1, strict=True, dynamic=True)(x), x + 1)


def test_compile_of_the_package_as_decorator() -> None:
    @ferrite.compile
    def plain(x: Tensor) -> Tensor:
        return x.sin() + 1

    @ferrite.compile(strict=True, fullgraph=True, keep_text=True)
    def tuned(x: Tensor) -> Tensor:
        return x.cos() + 1

    x = torch.randn(3)
    assert equal(plain(x), x.sin() + 1)
    assert equal(tuned(x), x.cos() + 1)
    assert all(run.before is not None for run in ferrite.last_record().passes)


def test_default_backend() -> None:
    previous = torch.compiler.get_default_backend()
    torch.compiler.set_default_backend("ferrite")
    try:
        before = counters["ferrite"]["graphs_compiled"]
        assert equal(torch.compile(lambda x: x + 1)(torch.ones(2)), torch.full((2,), 2.0))
        assert counters["ferrite"]["graphs_compiled"] == before + 1
    finally:
        torch.compiler.set_default_backend(previous)


def test_backend_is_listed() -> None:
    assert "ferrite" in torch._dynamo.list_backends()


def test_backend_given_as_a_function() -> None:
    x = torch.randn(3)
    assert equal(torch.compile(lambda x: x.sin(), backend=ferrite.backend.compile)(x), x.sin())


# Options and modes.


@pytest.mark.parametrize("given", ["strct", "stirct", "strict_mode"])
def test_unknown_option_names_the_valid_ones_and_the_nearest(given: str) -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.compile(lambda x: x + 1, backend="ferrite", options={given: True})(torch.ones(1))
    text = str(caught.value)
    assert given in text
    assert "'strict'" in text
    for name in ferrite.list_options():
        assert name in text


def test_unknown_option_of_the_package_raises_at_once() -> None:
    with pytest.raises(RuntimeError, match="keep_text"):
        ferrite.compile(lambda x: x, keep_txt=True)


def test_unknown_mode_names_the_valid_ones_and_the_nearest() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.compile(lambda x: x + 1, backend="ferrite", mode="max-autotuned")(torch.ones(1))
    for name in ("max-autotuned", "'max-autotune'", *ferrite.list_mode_options()):
        assert name in str(caught.value)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
def test_modes(mode: str) -> None:
    x = torch.randn(3)
    assert equal(torch.compile(lambda x: x.sin(), backend="ferrite", mode=mode)(x), x.sin())
    assert isinstance(ferrite.list_mode_options(mode), dict)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"strict": 1}, "bool"),
        ({"strict": "yes"}, "bool"),
        ({"bisect_limit": True}, "int"),
        ({"bisect_limit": "3"}, "int"),
        ({"disable": 3}, "tuple"),
        ({"disable": [3]}, "tuple"),
        ({"debug_dir": 3}, "str"),
        ({"partitioner": 3}, "Callable"),
        ({"compile_mode": "serialise"}, "'serialize'"),
    ],
)
def test_option_of_wrong_type(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(RuntimeError, match=expected) as caught:
        torch.compile(lambda x: x + 1, backend="ferrite", options=options)(torch.ones(1))
    (value,) = options.values()
    assert repr(value) in str(caught.value)


def test_misspelt_option_raises_before_any_work() -> None:
    before = dict(counters["ferrite"])
    with pytest.raises(RuntimeError):
        torch.compile(lambda x: x + 1, backend="ferrite", options={"strct": True})(torch.ones(1))
    assert dict(counters["ferrite"]) == before
    assert ferrite.last_record() is None


def test_dashes_are_underscores() -> None:
    options = {"keep-text": True, "bisect-limit": None, "strict": True}
    torch.compile(lambda x: x + 1, backend="ferrite", options=options)(torch.ones(1))
    assert any(run.before is not None for run in ferrite.last_record().passes)


def test_mode_and_options_together_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"(?i)either mode or options"):
        torch.compile(lambda x: x, backend="ferrite", mode="max-autotune", options={"strict": True})


def generated_code(phase: str) -> list[str]:
    entry = ferrite.last_record().phase(phase)
    return [fallback.op for fallback in entry.fallbacks]


def gelu_code(options: dict[str, Any] | None) -> tuple[list[str], list[str]]:
    """The ops of the generated code, forward and (lazily compiled) backward, with some options."""
    torch._dynamo.reset()
    x = torch.randn(3, requires_grad=True)
    options = {"executor": "eager"} | (options or {})
    y = torch.compile(lambda x: torch.nn.functional.gelu(x), backend="ferrite", options=options)(x)
    forward = generated_code("forward")
    y.sum().backward()
    return forward, generated_code("backward")


def test_an_option_shows_in_forward_and_backward_and_not_in_a_neighbour() -> None:
    plain = gelu_code(None)
    names = ("aten.gelu.default", "aten.gelu_backward.default")
    split = gelu_code({"decompose": list(names)})
    assert names[0] in plain[0]
    assert names[1] in plain[1]
    assert names[0] not in split[0]
    assert names[1] not in split[1]
    assert gelu_code(None) == plain


def test_options_of_a_lazily_compiled_backward_are_those_of_its_forward() -> None:
    x = torch.randn(3, requires_grad=True)
    first = torch.compile(lambda x: x.sin() * x, backend="ferrite", options={"keep_text": True, "strict": True})(x)
    record = ferrite.last_record()
    torch.compile(lambda x: x.cos() * x, backend="ferrite", options=STRICT)(x)
    first.sum().backward()
    backward = record.phase("backward")
    assert backward is not None
    assert all(run.before is not None for run in backward.passes)


def test_one_function_compiled_with_two_sets_of_options() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.nn.functional.gelu(x)

    x = torch.randn(3)
    codes = []
    for options in ({}, {"decompose": "aten.gelu.default"}, {}):
        torch.compile(function, backend="ferrite", options={"executor": "eager"} | options)(x)
        codes.append(generated_code("inference"))
    assert "aten.gelu.default" not in codes[1]
    assert "aten.gelu.default" in codes[0]


RESETS = [ferrite.reset, torch._dynamo.reset, torch.compiler.reset]


@pytest.mark.parametrize("reset", RESETS, ids=["ferrite", "dynamo", "compiler"])
def test_reset(reset: Callable[[], None]) -> None:
    for _ in range(2):
        # Dynamo resets the backends of functions that were compiled since its last reset.
        function = torch.compile(lambda x: x + 1, backend="ferrite")
        before = counters["ferrite"]["graphs_compiled"]
        function(torch.ones(2))
        assert counters["ferrite"]["graphs_compiled"] == before + 1
        assert ferrite.last_record().graph_id == 0
        reset()
        assert ferrite.last_record() is None


def test_reset_of_the_package_after_a_direct_call_of_the_backend() -> None:
    """Dynamo resets the backends that it looked up; Ferrite's own reset also forgets what it was handed directly."""
    graph = torch.fx.symbolic_trace(lambda x: (x + 1,))
    ferrite.backend.compile(graph, [torch.ones(2)])(torch.ones(2))
    assert ferrite.last_record() is not None
    ferrite.reset()
    assert ferrite.last_record() is None


def test_forward_and_backward_share_one_graph_id() -> None:
    x = torch.randn(3, requires_grad=True)
    first = compile_strict(lambda x: x.sin())(x)
    record = ferrite.last_record()
    second = compile_strict(lambda x: x.cos())(x)
    first.sum().backward()
    second.sum().backward()
    assert record.graph_id == 0
    assert {entry.phase for entry in record.graphs} >= {"forward", "backward"}
    assert ferrite.last_record().graph_id == 1


def test_recompile_limit_falls_to_eager_not_to_wrong_answers() -> None:
    def function(x: Tensor, n: Any) -> Tensor:
        return x + len(n)

    compiled = compile_strict(function)
    for n in range(20):
        assert equal(compiled(torch.ones(2), "a" * n), torch.ones(2) + n)


def test_disable_inside() -> None:
    @torch.compiler.disable
    def outside(x: Tensor) -> Tensor:
        return x.cos()

    assert equal(compile_strict(lambda x: outside(x.sin()) + 1)(torch.ones(2)), torch.ones(2).sin().cos() + 1)


def test_generator_function_and_recursion() -> None:
    def recurse(x: Tensor, depth: int) -> Tensor:
        return x if depth == 0 else recurse(x.sin() + depth, depth - 1)

    x = torch.randn(3)
    assert equal(compile_strict(recurse)(x, 5), recurse(x, 5))


def test_calls_while_profiling() -> None:
    compiled = compile_strict(lambda x: x.sin() + 1)
    x = torch.randn(3)
    compiled(x)
    with torch.profiler.profile() as profile:
        assert equal(compiled(x), x.sin() + 1)
    assert any(event.key.startswith("ferrite graph_0_inference") for event in profile.key_averages())


@pytest.mark.parametrize("enabled", [True, False])
def test_collection_of_garbage_is_as_before_after_a_compile(enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Off while a graph is compiled, also if that fails."""
    seen = []
    real = pipeline.edit_post_grad

    def noting(*arguments: Any, **keywords: Any) -> Any:
        seen.append(gc.isenabled())
        if len(seen) == 2:
            raise RuntimeError("the second compile fails")
        return real(*arguments, **keywords)

    monkeypatch.setattr(pipeline, "edit_post_grad", noting)
    before = gc.isenabled()
    try:
        gc.enable() if enabled else gc.disable()
        for factor in (2, 3):
            torch.compile(lambda x, factor=factor: x * factor, backend="ferrite")(torch.ones(2))
            assert gc.isenabled() == enabled
    finally:
        gc.enable() if before else gc.disable()
    assert seen == [False, False]


@pytest.mark.parametrize("number", [3.14, -2, True])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_vmap_over_an_op_with_a_number(number: float, dynamic: bool) -> None:
    """Batching makes a tensor of the number: the graph has an op on tensors that is given a number."""
    mapped = torch.vmap(torch.mul, in_dims=(0, None))
    compare(lambda x: mapped(x, number), torch.randn(3, 4), dynamic=dynamic)
    compare(lambda x: mapped(x, number), torch.arange(6).reshape(2, 3), dynamic=dynamic)
