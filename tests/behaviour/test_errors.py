"""What goes wrong: errors of eager arrive as themselves, faults of the compiler are named, contained and recorded."""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph

import ferrite
from ferrite import compilation, pipeline
from ferrite.errors import Malformed, ToolFailed, Unsupported
from ferrite.failure import FerriteError
from tests.behaviour.compare import STRICT, equal

# Functions that a trace accepts and that fail on some values.
FAILING: dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...]]] = {
    "embedding": (
        lambda i, w: torch.nn.functional.embedding(i, w) * 2,
        (torch.tensor([1]), torch.randn(3, 2)),
        (torch.tensor([7]), torch.randn(3, 2)),
    ),
    "gather": (
        lambda x, i: x.gather(0, i) + 1,
        (torch.randn(3), torch.tensor([2])),
        (torch.randn(3), torch.tensor([3])),
    ),
    "index": (lambda x, i: x[i] + 1, (torch.randn(3), torch.tensor([2])), (torch.randn(3), torch.tensor([5]))),
    "index_select": (
        lambda x, i: x.index_select(0, i),
        (torch.randn(3), torch.tensor([2])),
        (torch.randn(3), torch.tensor([5])),
    ),
    "scatter": (
        lambda x, i: x.scatter(0, i, 1.0),
        (torch.randn(3), torch.tensor([2])),
        (torch.randn(3), torch.tensor([5])),
    ),
    "cross_entropy": (
        lambda x, t: torch.nn.functional.cross_entropy(x, t),
        (torch.randn(2, 3), torch.tensor([0, 2])),
        (torch.randn(2, 3), torch.tensor([0, 5])),
    ),
    "cholesky": (
        lambda x: torch.linalg.cholesky(x) * 2,
        (torch.eye(3),),
        (-torch.eye(3),),
    ),
    "inverse": (lambda x: torch.linalg.inv(x) + 1, (torch.eye(3),), (torch.zeros(3, 3),)),
    "bernoulli": (lambda p: torch.bernoulli(p), (torch.full((3,), 0.5),), (torch.full((3,), 2.0),)),
    "multinomial": (lambda p: torch.multinomial(p, 1), (torch.ones(3),), (-torch.ones(3),)),
    "one_hot": (
        lambda i: torch.nn.functional.one_hot(i, 3) * 2,
        (torch.tensor([2]),),
        (torch.tensor([3]),),
    ),
    "integer_division": (
        lambda a, b: a // b,
        (torch.tensor([4]), torch.tensor([2])),
        (torch.tensor([4]), torch.tensor([0])),
    ),
}


@pytest.mark.parametrize(("name", "dynamic"), [*((name, False) for name in FAILING), ("index", True), ("gather", True)])
def test_an_op_that_raises_raises_the_same(name: str, dynamic: bool) -> None:
    function, good, bad = FAILING[name]
    compiled = torch.compile(function, backend="ferrite", fullgraph=True, dynamic=dynamic, options=STRICT)
    torch.manual_seed(0)
    expected = function(*good)
    torch.manual_seed(0)
    assert equal(compiled(*good), expected)
    with pytest.raises(Exception) as eager:  # noqa: PT011
        function(*bad)
    with pytest.raises(eager.type) as found:
        compiled(*bad)
    assert found.type is eager.type
    # Tracing sees some functions through a definition in Python that words its message a little differently.
    assert str(eager.value).splitlines()[0].rstrip(".") in str(found.value)
    # A failed call leaves the function usable.
    torch.manual_seed(0)
    assert equal(compiled(*good), expected)


@pytest.mark.parametrize("name", ["embedding", "cross_entropy", "gather"])
def test_an_op_that_raises_while_training(name: str) -> None:
    function, good, bad = FAILING[name]
    needs = lambda values: [v.detach().requires_grad_(v.is_floating_point()) for v in values]
    compiled = torch.compile(function, backend="ferrite", fullgraph=True, options=STRICT)
    compiled(*needs(good)).sum().backward()
    with pytest.raises(Exception) as eager:  # noqa: PT011
        function(*bad)
    with pytest.raises(eager.type):
        compiled(*needs(bad))


def test_sizes_that_do_not_fit() -> None:
    """Sizes are known while tracing: Dynamo raises, with the words of the op; without fullgraph eager itself does."""
    function = lambda x, y: (x + 1) @ y
    compiled = torch.compile(function, backend="ferrite", dynamic=True, options=STRICT)
    assert compiled(torch.ones(2, 3), torch.ones(3, 4)).shape == (2, 4)
    with pytest.raises(RuntimeError, match=r"cannot be multiplied|must match|size"):
        compiled(torch.ones(2, 3), torch.ones(4, 5))


@pytest.mark.parametrize(
    "function",
    [lambda x: x.view(5), lambda x: x.sum(7), lambda x: torch.cat([x, torch.ones(2, 2)]), lambda x: x + "a"],
    ids=["view", "dim", "cat", "type"],
)
def test_what_eager_always_refuses(function: Callable[[Tensor], Any]) -> None:
    x = torch.randn(6)
    with pytest.raises(Exception) as eager:  # noqa: PT011
        function(x)
    with pytest.raises(Exception) as found:  # noqa: PT011
        torch.compile(function, backend="ferrite", options=STRICT)(x)
    # Dynamo reports what it meets while tracing as its own TorchRuntimeError, a RuntimeError.
    assert issubclass(found.type, (eager.type, RuntimeError))


def test_traceback_shows_generated_code_and_the_users_line() -> None:
    import traceback

    def function(x: Tensor, i: Tensor) -> Tensor:
        return x[i] * 2

    compiled = torch.compile(function, backend="ferrite", options=STRICT | {"executor": "eager"})
    compiled(torch.ones(3), torch.tensor([1]))
    try:
        compiled(torch.ones(3), torch.tensor([9]))
    except IndexError as error:
        text = "".join(traceback.format_exception(error))
    assert "aten_index_Tensor(" in text
    assert "test_errors.py:" in text.partition("aten_index_Tensor(")[2].splitlines()[0]


# Faults of the compiler.


class Fault(Exception):
    """What the injected passes raise."""


def broken_pass(graph: Graph) -> int:
    """Damages the graph first, so that only a full restore helps."""
    for node in list(graph.nodes):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)
    output = graph.output_node()
    output.args = ((None,),)
    raise Fault("the pass fell over")


def lying_pass(graph: Graph) -> int:
    """Makes a malformed graph and claims success."""
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    if len(nodes) < 2:
        return 0
    nodes[-1].append(nodes[0])
    return 1


STAGES = ["PRE_GRAD", "JOINT", "POST_GRAD"]


def model(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).sin() + 1


def leaves(training: bool) -> tuple[Tensor, Tensor]:
    return torch.randn(3, 3, requires_grad=training), torch.randn(3, 3, requires_grad=training)


def put_pass(monkeypatch: pytest.MonkeyPatch, stage: str, run: Any) -> None:
    """Make `run` the only pass of a stage."""
    if stage == "PRE_GRAD":
        monkeypatch.setattr(pipeline, "plan", lambda *_, **__: ((run,), ()))
    else:
        monkeypatch.setattr(pipeline, stage, (run,))


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("run", [broken_pass, lying_pass])
def test_a_pass_that_fails_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stage: str, run: Any, training: bool
) -> None:
    put_pass(monkeypatch, stage, run)
    x, w = leaves(training)
    with caplog.at_level(logging.WARNING, "ferrite"):
        y = torch.compile(model, backend="ferrite", fullgraph=True)(x, w)
        if training:
            y.sum().backward()
    assert equal(y, model(x, w))
    name = f"{stage.lower()}.{run.__name__}"
    failed = [entry for entry in ferrite.last_record().passes if entry.note.startswith("failed")]
    assert failed
    assert all(f"{entry.stage}.{entry.name}" == name for entry in failed)
    lines = [message for message in caplog.messages if name in message]
    assert len(lines) == len(failed)
    if training:
        expected = torch.autograd.grad(model(x, w).sum(), (x, w))
        assert equal(x.grad, expected[0])
        assert equal(w.grad, expected[1])


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("run", [broken_pass, lying_pass])
def test_a_pass_that_fails_is_named_under_strict(monkeypatch: pytest.MonkeyPatch, stage: str, run: Any) -> None:
    put_pass(monkeypatch, stage, run)
    for training in (False, True):
        torch._dynamo.reset()
        with pytest.raises(FerriteError) as caught:
            torch.compile(model, backend="ferrite", fullgraph=True, options=STRICT)(*leaves(training))
        assert f"{stage.lower()}.{run.__name__}" in str(caught.value)
        assert isinstance(caught.value, torch._dynamo.exc.BackendCompilerFailed)


def test_other_passes_of_the_stage_still_run(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def before(graph: Graph) -> int:
        seen.append("before")
        return 0

    def after(graph: Graph) -> int:
        seen.append("after")
        return 0

    monkeypatch.setattr(pipeline, "POST_GRAD", (before, broken_pass, after))
    x, w = leaves(False)
    assert equal(torch.compile(model, backend="ferrite")(x, w), model(x, w))
    assert seen[-1] == "after"
    assert "before" in seen


def fail_in_backward(graph: Graph) -> int:
    if any("cos" in str(node.target) for node in graph.nodes):
        raise Fault("only in the backward")
    return 0


def test_a_fault_in_the_lazily_compiled_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "POST_GRAD", (fail_in_backward,))
    x, w = leaves(True)
    y = torch.compile(lambda x, w: (x @ w).sin().sum(), backend="ferrite", options=STRICT)(x, w)
    with pytest.raises(FerriteError, match=r"post_grad\.fail_in_backward"):
        y.backward()


def test_a_fault_in_the_lazily_compiled_backward_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "POST_GRAD", (fail_in_backward,))
    x, w = leaves(True)
    torch.compile(lambda x, w: (x @ w).sin().sum(), backend="ferrite")(x, w).backward()
    expected = torch.autograd.grad((x @ w).sin().sum(), (x, w))
    assert equal(x.grad, expected[0])
    assert equal(w.grad, expected[1])


FAULTS = [
    Fault("bare"),
    Unsupported("a thing", at="model.py:3", why="because", then="eager"),
    Malformed("our bug", where="lower", program="x = y"),
    ToolFailed("the tool", ran="ld"),
    IndexError("list index out of range"),
    KeyError("k"),
]


# Every kind of fault in one place, and one kind of fault in every place.
PLACES = [("lower", fault, "inference") for fault in FAULTS[1:]]
PLACES += [
    (where, FAULTS[0], phase)
    for where in ("lower", "plan_all", "check_graph", "note_output_strides")
    for phase in ("inference", "forward", "backward")
]


@pytest.mark.parametrize(
    ("where", "fault", "phase"), PLACES, ids=lambda value: value if isinstance(value, str) else type(value).__name__
)
def test_a_fault_in_a_stage(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str, fault: Exception, phase: str
) -> None:
    """By default the graph runs as captured, the record and one log line say so; under strict it is a FerriteError."""
    original = getattr(pipeline, where)

    def fail(*arguments: Any, **keywords: Any) -> Any:
        if ferrite.last_record().phase(phase) is not None:
            raise fault
        return original(*arguments, **keywords)

    monkeypatch.setattr(pipeline, where, fail)
    x, w = leaves(phase != "inference")
    with caplog.at_level(logging.WARNING, "ferrite"):
        y = torch.compile(model, backend="ferrite", fullgraph=True)(x, w)
        if phase != "inference":
            y.sum().backward()
    assert equal(y, model(x, w))
    if phase != "inference":
        assert equal(x.grad, torch.autograd.grad(model(x, w).sum(), x)[0])
    failures = ferrite.last_record().failures
    assert any(phase in failure and type(fault).__name__ in failure for failure in failures)
    assert sum(f"{phase} as captured" in message for message in caplog.messages) == 1

    torch._dynamo.reset()
    compiled = torch.compile(model, backend="ferrite", fullgraph=True, options=STRICT)
    with pytest.raises(FerriteError) as caught:
        compiled(x, w).sum().backward()
    assert phase in str(caught.value)
    assert type(fault).__name__ in str(caught.value)
    assert caught.value.inner_exception is fault


def softened(x: Tensor) -> Tensor:
    y = x.sin() * 2
    return torch.softmax(y, 0)


# Where something is made to fail, and what must be named: the stage, the op, and text of the user's line if it is kept.
EVERYWHERE: dict[str, tuple[str, tuple[str, ...]]] = {
    "ferrite.lower.graph._row_of": ("stage lower", ("op aten.sin.default", "y = x.sin() * 2")),
    "ferrite.pipeline.check_program": ("stage loops", ("kernel ", "op sin, mul, _softmax", "at test_errors.py:")),
    "ferrite.native.emit._emit_one": ("stage native", ("kernel ", "op sin, mul, _softmax", "at test_errors.py:")),
    "ferrite.artifact.native_host._Assembler._write_launch": (
        "stage host",
        ("op sin, mul, _softmax", "test_errors.py:"),
    ),
    "ferrite.host.python._line": ("stage host", ("op aten.empty_strided.default", "test_errors.py:")),
    "ferrite.pipeline.costs_of": ("stage schedule", ()),
    "ferrite.pipeline.plan_all": ("stage host", ()),
}


@pytest.mark.parametrize("where", EVERYWHERE)
def test_a_fault_of_ours_is_named_by_stage_op_and_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    def fail(*arguments: Any, **keywords: Any) -> Any:
        raise IndexError("boom")

    monkeypatch.setattr(where, fail)
    stage, named = EVERYWHERE[where]
    options = {"host": "python" if "host.python" in where else "native"}
    x = torch.randn(8)
    with caplog.at_level(logging.WARNING, "ferrite"):
        assert equal(torch.compile(softened, backend="ferrite", options=options)(x), softened(x))
    (said,) = [message for message in caplog.messages if "boom" in message]
    (recorded,) = ferrite.last_record().failures
    torch._dynamo.reset()
    with pytest.raises(FerriteError) as caught:
        torch.compile(softened, backend="ferrite", options=options | {"strict": True})(x)
    for text in (said, recorded, str(caught.value)):
        for word in ("graph 0 inference", stage, *named, "IndexError: boom"):
            assert word in text


def test_a_kernel_that_is_refused_is_named_by_op_and_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **keywords: Any) -> Any:
        raise Unsupported("a thing")

    monkeypatch.setattr("ferrite.native.emit._emit_one", refuse)
    with pytest.raises(FerriteError, match=r"stage host, kernel \w+, op sin, mul, _softmax, at test_errors.py:"):
        torch.compile(softened, backend="ferrite", options=STRICT)(torch.randn(8))


def test_a_fault_before_autograd_runs_the_capture_in_eager(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: Any, **keywords: Any) -> Any:
        raise Fault("no table")

    monkeypatch.setattr(compilation, "decomposition_table", fail)
    x, w = leaves(True)
    with caplog.at_level(logging.WARNING, "ferrite"):
        y = torch.compile(model, backend="ferrite", fullgraph=True)(x, w)
    y.sum().backward()
    assert equal(y, model(x, w))
    assert equal(x.grad, torch.autograd.grad(model(x, w).sum(), x)[0])
    assert "no table" in ferrite.last_record().failures[0]
    assert sum("in eager" in message for message in caplog.messages) == 1
    torch._dynamo.reset()
    with pytest.raises(FerriteError, match="no table"):
        torch.compile(model, backend="ferrite", fullgraph=True, options=STRICT)(x, w)


def test_a_fault_in_the_users_partitioner() -> None:
    def fail(*arguments: Any, **keywords: Any) -> Any:
        raise Fault("cannot split")

    x, w = leaves(True)
    with pytest.raises(FerriteError, match="cannot split"):
        torch.compile(model, backend="ferrite", options=STRICT | {"partitioner": fail})(x, w)
    torch._dynamo.reset()
    y = torch.compile(model, backend="ferrite", options={"partitioner": fail})(x, w)
    y.sum().backward()
    assert equal(x.grad, torch.autograd.grad(model(x, w).sum(), x)[0])


def test_suppress_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "POST_GRAD", (broken_pass,))
    x, w = leaves(False)
    with torch._dynamo.config.patch(suppress_errors=True):
        assert equal(torch.compile(model, backend="ferrite", options=STRICT)(x, w), model(x, w))


def test_compile_errors_show_the_whole_stack_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "POST_GRAD", (broken_pass,))
    with torch._dynamo.config.patch(verbose=True), pytest.raises(FerriteError) as caught:
        torch.compile(model, backend="ferrite", options=STRICT)(*leaves(False))
    # Dynamo cuts the chain of its own exceptions; the inner one keeps its cause.
    assert isinstance(caught.value.inner_exception, Malformed)
    assert isinstance(caught.value.inner_exception.__cause__, Fault)


def test_the_global_state_is_restored_after_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "POST_GRAD", (broken_pass,))
    torch.manual_seed(4)
    before = torch.get_rng_state()
    with pytest.raises(FerriteError):
        torch.compile(model, backend="ferrite", options=STRICT)(torch.ones(3, 3), torch.ones(3, 3))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch._guards.TracingContext.try_get() is None


@pytest.mark.parametrize("version", ["2.12.1", "2.14.0+cu130", "3.0", "2.1"])
def test_wrong_version_of_torch(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.raises(ImportError) as caught:
        ferrite._require_supported_torch()
    assert version in str(caught.value)
    assert "2.13" in str(caught.value)


@pytest.mark.parametrize("version", ["2.13.0", "2.13.1+cpu", "2.13.0a0+git1234"])
def test_right_version_of_torch(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    ferrite._require_supported_torch()


def test_no_torch_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ImportError, match="none is installed"):
        ferrite._require_supported_torch()


def test_other_devices_are_refused_or_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other device exists here; the supported set is narrowed so that `meta` plays one."""
    monkeypatch.setattr(ferrite.backend, "_SUPPORTED_DEVICES", frozenset({"cpu"}))
    x = torch.empty(3, device="meta")
    with pytest.raises(FerriteError, match="meta"):
        torch.compile(lambda x: x + 1, backend="ferrite")(x)
    torch._dynamo.reset()
    result = torch.compile(lambda x: x + 1, backend="ferrite", options={"skip_unsupported_devices": True})(x)
    assert result.device.type == "meta"


def test_pass_through_of_what_dynamo_must_see(monkeypatch: pytest.MonkeyPatch) -> None:
    def skip(*arguments: Any, **keywords: Any) -> Any:
        raise torch._dynamo.exc.SkipFrame("run this in eager")

    monkeypatch.setattr(compilation, "decomposition_table", skip)
    x, w = leaves(False)
    assert equal(torch.compile(model, backend="ferrite", options=STRICT)(x, w), model(x, w))
