"""The record, the logs, the debug folder, bisection, and graphs that leave the process."""

from __future__ import annotations

import json
import logging
import os
import pickle
import re
import runpy
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import CompileEventLogger, compilation_time_metrics, counters
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx

import ferrite
import ferrite.backend
from ferrite import pipeline
from ferrite.artifact.compiled import CompiledGraph
from ferrite.artifact.kernels import build_code
from ferrite.options import Options
from ferrite.report.record import GraphRecord
from tests.behaviour.child import ROOT, run_python
from tests.behaviour.compare import STRICT, assert_same, compare, equal


def model(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).view(-1).sin() + 1


def leaves(training: bool = False) -> tuple[Tensor, Tensor]:
    return torch.randn(3, 4, requires_grad=training), torch.randn(4, 5, requires_grad=training)


def compile_and_run(training: bool = False, **options: Any) -> ferrite.report.record.Record:
    x, w = leaves(training)
    y = torch.compile(model, backend="ferrite", options=STRICT | options)(x, w)
    assert equal(y, model(x, w))
    if training:
        y.sum().backward()
    record = ferrite.last_record()
    assert record is not None
    return record


def test_record_of_inference() -> None:
    record = compile_and_run(products="library")
    entry = record.phase("inference")
    assert record.graph_id == 0
    assert record.failures == []
    assert [stage for stage in pipeline.STAGES if stage in entry.stages or stage == "pre_grad"] == list(pipeline.STAGES)
    assert all(seconds >= 0 for seconds in entry.stages.values())
    assert entry.seconds <= record.seconds
    assert {fallback.op: fallback.count for fallback in entry.fallbacks}["aten.mm.default"] == 1
    assert all(fallback.reason for fallback in entry.fallbacks)
    assert entry.nodes > 4


def test_making_machine_code_is_time_of_the_native_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    long = 0.2

    def slow(programs: Any) -> Any:
        time.sleep(long)
        return build_code(programs)

    monkeypatch.setattr("ferrite.artifact.compiled.build_code", slow)
    stages = compile_and_run().phase("inference").stages
    assert stages["native"] >= long


def test_record_of_training() -> None:
    record = compile_and_run(training=True, products="library")
    assert [entry.phase for entry in record.graphs] == ["pre_grad", "joint", "forward", "backward"]
    assert any("mm" in fallback.op for fallback in record.phase("backward").fallbacks)


def test_record_prints() -> None:
    record = compile_and_run(training=True, products="library")
    text = str(record)
    for word in ("graph 0 forward", "graph 0 backward", "post_grad", "view_to_reshape", "aten.mm.default", "lower"):
        assert word in text
    assert text == str(record)


def test_record_prints_what_looks_like_markup() -> None:
    """Notes and messages may hold brackets; they are text, not colours."""

    def fails_with_brackets(graph: Graph) -> int:
        raise ValueError("expected [/bold] or [red]f32[3][/red]")

    original = pipeline.POST_GRAD
    pipeline.POST_GRAD = (fails_with_brackets,)
    try:
        x, w = leaves()
        torch.compile(model, backend="ferrite")(x, w)
    finally:
        pipeline.POST_GRAD = original
    assert "fails_with_brackets" in str(ferrite.last_record())
    assert "red" in str(ferrite.last_record())


def test_no_record_before_the_first_compile() -> None:
    assert ferrite.last_record() is None


@pytest.mark.parametrize("name", ["post_grad", "view_to_reshape", "post_grad.view_to_reshape"])
def test_disable_by_name(name: str) -> None:
    record = compile_and_run(disable=[name])
    runs = [run for run in record.passes if run.name == "view_to_reshape"]
    assert runs
    assert all(run.changed is None and name in run.note for run in runs)
    others = [run for run in record.passes if run.name == "emit_deferred_asserts"]
    assert all((run.changed is None) == (name == "post_grad") for run in others)


def test_disable_takes_a_comma_separated_text() -> None:
    record = compile_and_run(disable="view_to_reshape, emit_deferred_asserts")
    off = {run.name for run in record.passes if run.changed is None}
    assert off == {"view_to_reshape", "emit_deferred_asserts"}


def test_keep_text() -> None:
    record = compile_and_run(keep_text=True)
    (run,) = [run for run in record.passes if run.name == "view_to_reshape"]
    assert run.changed == 1
    assert "aten.view.default" in run.before
    assert "aten.reshape.default" in run.after
    assert "aten.view.default" not in run.after


def wrong_sine(graph: Graph) -> int:
    """A pass with a bug: sin becomes cos."""
    found = graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
    for node in found:
        node.target = torch.ops.aten.cos.default
    return len(found)


def harmless(graph: Graph) -> int:
    return 0


def test_bisection_names_the_pass_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "POST_GRAD", (harmless, wrong_sine, harmless))
    x, w = leaves()

    def is_right(limit: int | None) -> bool:
        torch._dynamo.reset()
        y = torch.compile(model, backend="ferrite", options=STRICT | {"bisect_limit": limit})(x, w)
        return equal(y, model(x, w))

    assert is_right(0)
    assert not is_right(None)
    total = max(run.number for run in ferrite.last_record().passes if run.number)
    good, bad = 0, total
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if is_right(middle) else (good, middle)
    is_right(bad)
    (culprit,) = [run.name for run in ferrite.last_record().passes if run.number == bad]
    assert culprit == "wrong_sine"


def test_custom_pass_counts_in_the_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "POST_GRAD", (harmless,))
    counters = torch._dynamo.utils.counters["ferrite"]
    before = counters["view_to_reshape"]
    compile_and_run()
    assert counters["view_to_reshape"] == before + 1
    assert counters["harmless"] == 0


def test_information_lines(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ferrite"):
        compile_and_run(training=True)
    text = "\n".join(caplog.messages)
    for word in ("FORWARDS graph 0", "BACKWARDS graph 0"):
        assert text.count(word) == 2  # when it starts, when it ends
    assert "matrix products" in text


def test_product_table_has_shapes(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ferrite"):
        compile_and_run()
    (table,) = [message for message in caplog.messages if message.startswith("matrix products")]
    assert table.splitlines()[2].split() == ["mm", "-", "3", "5", "4", "1"]


@pytest.mark.parametrize("function", [torch.bmm, torch.addmm, torch.baddbmm])
def test_product_table_of_other_products(caplog: pytest.LogCaptureFixture, function: Callable[..., Tensor]) -> None:
    shapes = {
        "bmm": ((2, 3, 4), (2, 4, 5)),
        "addmm": ((5,), (3, 4), (4, 5)),
        "baddbmm": ((2, 3, 5), (2, 3, 4), (2, 4, 5)),
    }
    inputs = [torch.randn(shape) for shape in shapes[function.__name__]]
    with caplog.at_level(logging.INFO, "ferrite"):
        compare(lambda *xs: function(*xs) + 1, *inputs, calls=1)
    (table,) = [message for message in caplog.messages if message.startswith("matrix products")]
    assert table.splitlines()[2].split()[2:] == ["3", "5", "4", "1"]


def test_logs_of_torch() -> None:
    code = """
import torch
x = torch.randn(3, 4)
f = torch.compile(lambda x: x.view(-1) @ x.view(-1), backend="ferrite")
f(x)
"""
    child = run_python(code, environment={"TORCH_LOGS": "output_code,pre_grad_graphs,post_grad_graphs,perf_hints"})
    assert "def graph_0_inference(args):" in child.errors
    assert "aten.dot.default" in child.errors
    assert "before pre_grad" in child.errors
    assert "before post_grad" in child.errors
    assert "runs in eager" in child.errors


def test_nothing_is_logged_by_default() -> None:
    code = "import torch; torch.compile(lambda x: x + 1, backend='ferrite')(torch.ones(2)); print('done')"
    child = run_python(code)
    assert child.output.strip() == "done"
    assert "errite" not in child.errors


def test_structured_trace(tmp_path: Path) -> None:
    code = """
import torch
x = torch.randn(3, 4, requires_grad=True)
torch.compile(lambda x: (x * 2).sin(), backend="ferrite")(x).sum().backward()
"""
    run_python(code, environment={"TORCH_TRACE": str(tmp_path)})
    (log,) = tmp_path.iterdir()
    names = []
    for line in log.read_text().splitlines():
        start = line.find("{")
        if start >= 0 and not line.startswith("\t"):
            entry = json.loads(line[start:])
            names.append(entry.get("artifact", {}).get("name", ""))
    for name in (
        "ferrite_output_code_graph_0_forward",
        "ferrite_output_code_graph_0_backward",
        "ferrite_output_code_lines_graph_0_forward",
        "ferrite_eager_calls_graph_0_forward",
        "ferrite_host_program_graph_0_forward",
        "ferrite_graph_0_before_pre_grad",
        "ferrite_graph_0_backward_before_post_grad",
    ):
        assert name in names


# The debug folder.


def test_debug_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "ferrite"):
        compile_and_run(training=True, debug=True, debug_dir=str(tmp_path), products="library")
    folders = sorted(path.name for path in tmp_path.iterdir())
    assert folders == ["graph_0_backward", "graph_0_forward"]
    for folder in tmp_path.iterdir():
        for name in ("captured.txt", "transformed.txt", "host.txt", "record.txt", "run.py", "eager_calls.json"):
            assert (folder / name).stat().st_size > 20, name
        assert len([*folder.glob(f"{folder.name}_*.py")]) == 1
    assert sum(str(tmp_path / "graph_0_forward") in message for message in caplog.messages) == 1
    assert "test_records_and_logs.py" in (tmp_path / "graph_0_forward" / "captured.txt").read_text()


def test_debug_folder_shows_every_kernel(tmp_path: Path) -> None:
    options = STRICT | {"debug": True, "debug_dir": str(tmp_path)}
    torch.compile(lambda x: (x.sin().sum(0), x.t().contiguous()), backend="ferrite", options=options)(
        torch.ones(40, 50)
    )
    folder = tmp_path / "graph_0_inference"
    launched = set(re.findall(r"def (kernel_\d+)", (folder / "host.txt").read_text()))
    assert (
        launched == {path.stem for path in folder.glob("*.ll")} == {path.stem for path in folder.glob("*.s")} != set()
    )
    for name in launched:
        assert "for " in (folder / f"{name}.txt").read_text()
        assert f"@{name}" in (folder / f"{name}.ll").read_text()
        assert "\tret" in (folder / f"{name}.s").read_text()


SCRIPTED: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Tensor, ...]]]] = {
    "products": (model, leaves),
    "constants": (lambda x: x + torch.tensor([1.0, 2.0, 3.0]), lambda: (torch.randn(3),)),
    "dtypes": (lambda x: (x.to(torch.bfloat16), x.masked_fill(x > 0, float("-inf")), x / 3), lambda: (torch.randn(3),)),
    "integers": (lambda x: x // 2 + torch.arange(4, device="cpu"), lambda: (torch.arange(4),)),
    "strided": (lambda x: x.t() + 1, lambda: (torch.randn(3, 4).t(),)),
    "cond": (
        lambda x: torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,)) + 1,
        lambda: (torch.randn(3),),
    ),
}


@pytest.mark.parametrize(("dynamic", "how"), [(False, []), (True, []), (True, ["ferrite"])])
@pytest.mark.parametrize("name", SCRIPTED)
def test_debug_script_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, dynamic: bool,
    how: list[str],
) -> None:  # fmt: skip
    function, make = SCRIPTED[name]
    options = STRICT | {"debug": True, "debug_dir": str(tmp_path)}
    torch.compile(function, backend="ferrite", dynamic=dynamic, options=options)(*make())
    script = tmp_path / "graph_0_inference" / "run.py"
    monkeypatch.setattr(sys, "argv", [str(script), *how])
    runpy.run_path(str(script), run_name="__main__")
    assert "tensor(" in capsys.readouterr().out


def looked_up(ids: Tensor, table: Tensor, scale: Tensor) -> Tensor:
    return torch.nn.functional.embedding(ids, table) * scale + ids.sum()


def looked_up_inputs() -> tuple[Tensor, ...]:
    """Positions up to the last row, and a number that lies on itself twelve times."""
    return torch.tensor([[3, 9, 5], [4, 3, 9]]), torch.randn(10, 4), torch.randn(1).expand(2, 3, 4)


@pytest.mark.parametrize("grads", [False, True])
@pytest.mark.parametrize("how", [[], ["ferrite"]])
def test_debug_script_keeps_positions_in_their_range(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grads: bool, how: list[str]
) -> None:
    """Those of the first call say what may be looked up; all zeros would test little, any number would fail."""
    ids, table, scale = looked_up_inputs()
    compiled = torch.compile(looked_up, backend="ferrite", options=STRICT | {"debug": True, "debug_dir": str(tmp_path)})
    result = compiled(ids, table.requires_grad_(grads), scale)
    if grads:
        result.sum().backward()
    compiled(torch.zeros_like(ids), table, scale)  # a later call says nothing
    for script in tmp_path.glob("*/run.py"):
        monkeypatch.setattr(sys, "argv", [str(script), *how])
        inputs = runpy.run_path(str(script), run_name="__main__")["inputs"]
        (made,) = [value for value in inputs if isinstance(value, Tensor) and value.dtype == torch.int64]
        assert made.shape == ids.shape
        assert 3 <= int(made.min()) <= int(made.max()) <= 9


@pytest.mark.parametrize("host", ["native", "python"])
def test_debug_script_takes_the_inputs_of_the_first_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], host: str
) -> None:
    """As they lay in memory, before the call wrote to them."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return x * 2 + y.t()

    x, y = torch.randn(3, 3), torch.randn(3, 3)
    options = STRICT | {"debug_inputs": True, "debug_dir": str(tmp_path), "host": host}
    compiled = torch.compile(function, backend="ferrite", options=options)
    expected, kept = function(x.clone(), y), x.clone()
    assert equal(compiled(x, y), expected)
    assert equal(compiled(torch.zeros(3, 3), y), function(torch.zeros(3, 3), y))
    script = tmp_path / "graph_0_inference" / "run.py"
    for how in ([], ["ferrite"]):
        monkeypatch.setattr(sys, "argv", [str(script), *how])
        made = runpy.run_path(str(script))["inputs"]
        assert any(equal(value, kept) for value in made)
        runpy.run_path(str(script), run_name="__main__")
        assert all(repr(expected)[8:20] in part for part in [capsys.readouterr().out])


def test_debug_script_compiles_as_this_compile_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what passes were asked for. How the compile was looked at is no part of it."""
    options = {
        "pre_grad": {"normalise_ops": {"counter": 2}}, "disable": "schedule", "host": "python", "keep_text": True,
        "layout": "off", "debug": True, "debug_dir": str(tmp_path),
    }  # fmt: skip
    torch.compile(lambda x: x.sin(), backend="ferrite", options=options)(torch.randn(3))
    script = tmp_path / "graph_0_inference" / "run.py"
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(sys, "argv", [str(script), "ferrite"])
    monkeypatch.setattr(torch, "compile", lambda module, backend, options: asked.append(options) or module)
    runpy.run_path(str(script), run_name="__main__")
    pre_grad = {"pre_grad": {"normalise_ops": {"counter": 2}}}
    assert asked == [{"strict": True, "disable": ("schedule",), "layout": "off", "host": "python", **pre_grad}]


def test_debug_script_runs_alone(tmp_path: Path) -> None:
    compile_and_run(debug=True, debug_dir=str(tmp_path))
    script = tmp_path / "graph_0_inference" / "run.py"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for how in ([], ["ferrite"]):
        done = subprocess.run([sys.executable, str(script), *how], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        assert "tensor(" in done.stdout


def test_debug_folder_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "graph_0_inference").write_text("in the way")
    with caplog.at_level(logging.WARNING, "ferrite"):
        compile_and_run(debug=True, debug_dir=str(tmp_path))
    assert any("could not write" in message for message in caplog.messages)


@pytest.mark.parametrize("kind", ["unbacked", "none", "symint", "random"])
def test_debug_folder_of_odd_graphs(tmp_path: Path, kind: str) -> None:
    """Whatever the graph holds, writing it down never fails the compile."""
    options = {"debug": True, "debug_dir": str(tmp_path)}
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        match kind:
            case "unbacked":
                compare(lambda x: x[x > 0] * 2, torch.randn(8).abs().requires_grad_(), options=options, training=True)
            case "none":
                compare(lambda x: (None, x + 1), torch.ones(3), options=options)
            case "symint":
                compare(lambda x: (x.shape[0], x + 1), torch.ones(3, 2), options=options, dynamic=True)
            case "random":
                compare(lambda x: torch.nn.functional.dropout(x, 0.5), torch.ones(3), options=options)


# Graphs that leave the process.

TRAVELLERS: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Tensor, ...]]]] = {
    **SCRIPTED,
    "mutation": (lambda x: x.mul_(2).sum(), lambda: (torch.randn(3),)),
    "special_floats": (lambda x: x.clamp(-float("inf"), 1e-300).nan_to_num(float("nan")), lambda: (torch.randn(3),)),
    "complex": (lambda x: x * (1 + 2j), lambda: (torch.randn(3),)),
    "random": (lambda x: torch.nn.functional.dropout(x, 0.5), lambda: (torch.randn(3),)),
    "strings": (lambda x: torch.einsum("ij,jk->ik", x, x) + 1, lambda: (torch.randn(3, 3),)),
    "views": (lambda x: (x.t(), x[1:], x.sum()), lambda: (torch.randn(3, 3),)),
    "embedding_bag": (
        lambda i, w: torch.nn.functional.embedding_bag(i, w, mode="sum"),
        lambda: (torch.tensor([[0, 1]]), torch.randn(3, 2)),
    ),
}


@pytest.mark.parametrize("name", TRAVELLERS)
def test_serialize_gives_the_same(name: str) -> None:
    function, make = TRAVELLERS[name]
    compare(function, *make(), dynamic=True, options={"compile_mode": "serialize"})


@pytest.mark.parametrize("name", ["products", "dtypes", "random", "strings", "constants"])
def test_serialize_while_training(name: str) -> None:
    function, make = TRAVELLERS[name]
    inputs = [x.requires_grad_() for x in make()]
    compare(function, *inputs, training=True, options={"compile_mode": "serialize"})


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", TRAVELLERS)
def test_pickle_of_a_compiled_graph(name: str, dynamic: bool) -> None:
    """call -> pickle -> unpickle -> call: the same bits, and the live object is left in peace."""
    function, make = TRAVELLERS[name]
    inputs = make()
    compiled = compiled_graph(function, inputs, dynamic)
    arguments = lambda: [x.clone() for x in inputs]
    torch.manual_seed(0)
    expected = compiled(arguments())
    data = pickle.dumps(compiled)
    again = pickle.loads(data)
    torch.manual_seed(0)
    found = again(arguments())
    assert_same(list(found), list(expected), "result")
    torch.manual_seed(0)
    assert_same(list(compiled(arguments())), list(expected), "result")
    assert str(again) == str(compiled)
    assert again.key == compiled.key
    assert again.facts == compiled.facts
    assert pickle.dumps(again) == data


def compiled_graph(function: Callable[..., Any], inputs: tuple[Tensor, ...], dynamic: bool) -> CompiledGraph:
    flat = lambda *xs: tuple(torch.utils._pytree.tree_leaves(function(*xs)))
    mode = "symbolic" if dynamic else "fake"
    module = make_fx(flat, tracing_mode=mode)(*(x.clone() for x in inputs))
    record = GraphRecord("graph 0 inference", "inference")
    return pipeline.compile_graph(module, 0, "inference", pipeline.Inputs(), Options(), record)


def test_a_graph_with_an_object_of_this_process_does_not_pickle() -> None:
    from ferrite.errors import Unsupported

    module = make_fx(lambda x: (x + 1,), tracing_mode="fake")(torch.ones(2))
    (node,) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
    node.target = lambda x, one: x + one
    record = GraphRecord("graph 0 inference", "inference")
    compiled = pipeline.compile_graph(module, 0, "inference", pipeline.Inputs(), Options(), record)
    assert equal(compiled([torch.ones(2)])[0], torch.full((2,), 2.0))
    with pytest.raises(Unsupported):
        pickle.dumps(compiled)


def test_a_boxed_call_empties_its_list() -> None:
    compiled = compiled_graph(model, leaves(), False)
    arguments = list(leaves())
    compiled(arguments)
    assert arguments == []


def test_arguments_die_before_the_call_returns() -> None:
    import weakref

    alive: list[bool] = []

    def watch(graph_value: Tensor) -> Tensor:
        alive.append(reference() is not None)
        return graph_value

    module = make_fx(lambda x: ((x + 1).sin().cos(),), tracing_mode="fake")(torch.ones(2))
    sine = module.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)[0]
    with module.graph.inserting_after(sine):
        call = module.graph.call_function(watch, (sine,))
    call.meta["val"] = sine.meta["val"]
    sine.replace_all_uses_with(call, delete_user_cb=lambda user: user is not call)
    record = GraphRecord("graph 0 inference", "inference")
    compiled = pipeline.compile_graph(module, 0, "inference", pipeline.Inputs(), Options(), record)
    arguments = [torch.ones(2)]
    reference = weakref.ref(arguments[0])
    compiled(arguments)
    assert alive == [False]


def test_facts() -> None:
    compiled = compiled_graph(lambda x, y: (x.add_(y).t(), y * 2), (torch.randn(3, 4), torch.randn(3, 4)), False)
    assert compiled.facts.mutated_inputs == (0,)
    assert compiled.facts.device_types == ("cpu",)
    assert compiled.facts.output_strides[1] == ("4", "1")
    assert compiled.facts.phase == "inference"
    assert compiled.facts.seconds > 0


def test_same_graph_same_code() -> None:
    """Byte for byte, and no graph id in the way of it being the same."""
    codes = set()
    for _ in range(2):
        torch._dynamo.reset()
        record = compile_and_run(keep_text=True)
        codes.add("\n".join(run.after for run in record.passes))
    assert len(codes) == 1


def test_what_happens_before_autograd_is_counted(tmp_path: Path) -> None:
    """Where a graph is compiled, and where it is found again; PyTorch's timers and events tell of both."""

    def joins(x: Tensor) -> Tensor:
        return torch.cat([torch.cat([x, x]), x]).contiguous() + 1

    options = {"cache": "on", "cache_dir": str(tmp_path), "pre_grad": {"normalise_ops": {}}}
    told: list[str] = []
    counted, timed = [], []
    with mock.patch.object(CompileEventLogger, "instant", lambda name, facts: told.append(name)):
        for _ in range(2):
            torch._dynamo.reset()
            counters.clear()
            compilation_time_metrics.clear()
            torch.compile(joins, backend="ferrite", options=options)(torch.ones(2, 3))
            ours = counters["ferrite"]
            counted.append({name: ours[name] for name in ours if not name.startswith(("graph", "compiled", "scheme"))})
            timed.append({name for name in compilation_time_metrics if name.startswith("ferrite.")})
    record = ferrite.last_record()
    assert record is not None
    before_autograd = {run.name for run in record.passes if run.stage == "pre_grad" and run.changed}
    assert before_autograd
    assert before_autograd <= counted[0].keys()
    assert counted[0] == counted[1]
    assert {"ferrite.pre_grad", "ferrite.lower", "ferrite.native"} <= timed[0]
    assert timed[1] == {"ferrite.load"}
    assert [name for name in told if name.startswith("ferrite")] == [
        f"ferrite_graph_cache_{action}" for action in ("miss", "saved", "hit")
    ]
