"""The code of a host program for people and tools: its name, its lines and the user's, its file, who may look at it,
what it calls as JSON, and that a function that leaves the process runs without it."""

from __future__ import annotations

import gc
import hashlib
import inspect
import json
import linecache
import logging
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ferrite
from ferrite import caching
from ferrite.artifact.compiled import CompiledGraph
from ferrite.failure import FerriteError
from ferrite.host.eager_calls import show_calls
from ferrite.host.nodes import Call, HostProgram, Return
from ferrite.host.packed import pack, unpack
from ferrite.packaging import Package
from ferrite.syntax import Named, Ref
from tests.behaviour.child import run_python
from tests.behaviour.compare import STRICT

X, W = torch.randn(6, 8), torch.randn(8, 8)
LIBRARY = {**STRICT, "products": "library"}  # products so small would be loops


def two_lines(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    return y.sort(dim=1)[0].tanh()


FIRST = two_lines.__code__.co_firstlineno
PRODUCT, SORTED = (f"test_written_code.py:{FIRST + further}" for further in (1, 2))


def compile_and_call(function: Callable[..., Any] = two_lines, *inputs: Tensor, **options: Any) -> CompiledGraph:
    """The graph of a function of inputs, which is kept alive by the compiler."""
    torch.compile(function, backend="ferrite", options=LIBRARY | options)(*(inputs or (X, W)))
    return graph_of("inference")


def graph_of(phase: str) -> CompiledGraph:
    record = ferrite.last_record()
    assert record is not None
    entry = record.phase(phase)
    assert entry is not None
    assert entry.compiled is not None
    return entry.compiled


# ---- names and lines


def test_code_is_named_by_its_content() -> None:
    code = compile_and_call().code
    digest = hashlib.sha256(code.source.encode()).hexdigest()
    assert code.filename == f"graph_0_inference_{digest[:16]}.py"
    ferrite.reset()
    assert compile_and_call().code.filename == code.filename
    ferrite.reset()
    other = compile_and_call(lambda x, w: (x @ w).sort(dim=0)[0].tanh()).code
    assert other.name == code.name
    assert other.filename != code.filename


@pytest.mark.parametrize("executor", ["native", "eager"])
def test_lines_lead_to_the_users(executor: str) -> None:
    code = compile_and_call(executor=executor).code
    text = code.source.splitlines()
    for line, places in code.lines.items():
        assert text[line - 1].rpartition("  # ")[2].split(" at ")[-1] == ", ".join(places)
    behind = {step: places for line, places in code.lines.items() for step in [text[line - 1].split("(")[0].strip()]}
    assert behind["mm = aten_mm_default"] == (PRODUCT,)
    assert behind["sort = aten_sort_default"] == (SORTED,)
    assert set(code.lines.values()) == {(PRODUCT,), (SORTED,)}


def test_lines_of_a_backward_and_of_functions_that_operators_call() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,)) * 2

    x = torch.randn(4, requires_grad=True)
    torch.compile(function, backend="ferrite", options=STRICT)(x).sum().backward()
    here = f"test_written_code.py:{function.__code__.co_firstlineno + 1}"
    for phase in ("forward", "backward"):
        code = graph_of(phase).code
        assert {place for places in code.lines.values() for place in places} == {here}
        text = code.source.splitlines()
        assert all(here in text[line - 1] for line in code.lines)
        assert sum(line.startswith("def ") for line in text) == 3  # the two branches and the program


def test_a_graph_from_the_cache_has_code_and_lines(tmp_path: Path) -> None:
    codes = []
    for outcome in ("miss", "hit"):
        ferrite.reset()
        codes.append(compile_and_call(cache="on", cache_dir=str(tmp_path)).code)
        assert caching.latest().outcome == outcome
    assert codes[0].source == codes[1].source
    assert codes[0].lines == codes[1].lines != {}


def test_a_record_keeps_no_graph_alive() -> None:
    compile_and_call()
    record = ferrite.last_record()
    torch._dynamo.reset_code_caches()
    torch._dynamo.reset()
    gc.collect()
    assert record.phase("inference").compiled is None


def failing(x: Tensor, i: Tensor) -> Tensor:
    return x[i] * 2


def traceback_of(call: Callable[[], Any]) -> traceback.StackSummary:
    with pytest.raises(IndexError) as caught:
        call()
    return traceback.extract_tb(caught.value.__traceback__)


def test_python_finds_the_lines_of_code_that_is_in_no_file() -> None:
    options = {"executor": "eager", "host": "python"}
    compiled = torch.compile(failing, backend="ferrite", options=STRICT | options)
    compiled(torch.ones(3), torch.tensor([1]))
    graph = graph_of("inference")
    (frame,) = [each for each in traceback_of(lambda: compiled(torch.ones(3), torch.tensor([7]))) if
                each.filename.endswith(graph.code.filename)]  # fmt: skip
    assert graph.code.lines[frame.lineno] == (f"test_written_code.py:{failing.__code__.co_firstlineno + 1}",)
    assert "aten_index_Tensor(" in frame.line
    assert inspect.getsource(graph.body) == graph.code.source  # `inspect` is what a debugger lists with
    assert linecache.getline(frame.filename, frame.lineno) == graph.code.source.splitlines(True)[frame.lineno - 1]


def test_lines_of_code_go_with_the_last_function_that_has_it() -> None:
    program = HostProgram("program", (), (Call("y", "aten.ones.default", ([2],), {}), Return((Ref("y"),))))
    facts = compile_and_call(host="python").facts
    first, second = CompiledGraph(program, {}, facts), CompiledGraph(program, {}, facts)
    name = f"ferrite/{first.code.filename}"
    first.load()
    second.load()
    del first
    gc.collect()
    assert linecache.getlines(name) == second.code.source.splitlines(True)
    del second
    gc.collect()
    assert name not in linecache.cache
    assert linecache.getlines(name) == []


# ---- files


def test_the_debug_folder_has_the_code_under_its_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = STRICT | {"executor": "eager", "host": "python", "debug": True, "debug_dir": str(tmp_path)}
    compiled = torch.compile(failing, backend="ferrite", options=options)
    with caplog.at_level(logging.INFO, "ferrite"):
        compiled(torch.ones(3), torch.tensor([1]))
    graph = graph_of("inference")
    path = tmp_path / "graph_0_inference" / graph.code.filename
    assert path.read_text() == graph.code.source
    assert f"Ferrite wrote the code of graph_0_inference to {path}" in caplog.messages
    frames = traceback_of(lambda: compiled(torch.ones(3), torch.tensor([7])))
    assert str(path) in [frame.filename for frame in frames]


def test_what_is_in_the_file_is_not_what_runs(tmp_path: Path) -> None:
    options = STRICT | {"host": "python", "debug": True, "debug_dir": str(tmp_path)}
    for _ in range(2):
        torch._dynamo.reset()
        ferrite.reset()
        found = torch.compile(two_lines, backend="ferrite", options=options)(X, W)
        torch.testing.assert_close(found, two_lines(X, W))
        (tmp_path / "graph_0_inference" / graph_of("inference").code.filename).write_text("raise SystemExit")


def test_the_log_of_torch_has_the_path_and_the_text(tmp_path: Path) -> None:
    code = """
import torch
options = {"debug": True, "debug_dir": "written"}
torch.compile(lambda x: x.sin().sort()[0], backend="ferrite", options=options)(torch.ones(3))
import ferrite
print(ferrite.last_record().phase("inference").compiled.code.filename)
"""
    child = run_python(code, environment={"TORCH_LOGS": "output_code"}, folder=tmp_path)
    name = child.output.split()[-1]
    assert f"Output code of graph_0_inference, {name}:" in child.errors
    assert "def graph_0_inference(args):" in child.errors
    assert f"Output code of graph_0_inference is in {tmp_path / 'written' / 'graph_0_inference' / name}" in child.errors


FAILS = """
import torch
from ferrite.artifact import compiled
from ferrite.errors import ToolFailed

def fail(*args):
    raise ToolFailed("Python did not compile a host program", ran="the test")

compiled.load = fail
call = torch.compile(lambda x: x.sin().sort()[0], backend="ferrite", options={"host": "python", "strict": STRICT})
try:
    call(torch.ones(3))
    print("fell back")
except Exception as error:
    print(type(error).__name__, "did not compile" in str(error))
"""


@pytest.mark.parametrize(("strict", "said"), [(True, "FerriteError True"), (False, "fell back")])
def test_code_that_cannot_be_loaded_is_in_the_structured_trace(tmp_path: Path, strict: bool, said: str) -> None:
    child = run_python(FAILS.replace("STRICT", str(strict)), environment={"TORCH_TRACE": str(tmp_path)})
    assert child.output.splitlines()[-1] == said
    artifacts = structured(tmp_path)
    assert "def graph_0_inference(args):" in artifacts["ferrite_output_code_graph_0_inference"]
    assert [call["op"] for call in json.loads(artifacts["ferrite_eager_calls_graph_0_inference"])] == [
        "aten.sort.default"
    ]
    lines = json.loads(artifacts["ferrite_output_code_lines_graph_0_inference"])
    assert {*map(int, lines)} <= {*range(1, 20)}


def structured(folder: Path) -> dict[str, str]:
    """The artifacts in a structured trace, by name."""
    (log,) = folder.iterdir()
    found: dict[str, str] = {}
    name = ""
    for line in log.read_text().splitlines():
        if line.startswith("\t"):
            found[name] = found.get(name, "") + line[1:] + "\n"
        elif "{" in line:
            name = json.loads(line[line.find("{") :]).get("artifact", {}).get("name", "")
    return found


# ---- who looks


def test_who_watches_is_given_every_graph(tmp_path: Path) -> None:
    seen: list[CompiledGraph] = []
    leaf = W.clone().requires_grad_()
    for outcome in ("miss", "hit"):
        ferrite.reset()
        call = torch.compile(
            two_lines, backend="ferrite", options=LIBRARY | {"cache": "on", "cache_dir": str(tmp_path)}
        )
        with ferrite.watch_graphs(seen.append):
            call(X, leaf).sum().backward()
        assert caching.latest().outcome == outcome
        assert [graph.facts.phase for graph in seen] == ["forward", "backward"]
        assert "aten_mm_default(" in seen[0].code.source
        assert seen[0].code.lines
        seen.clear()
    ferrite.reset()
    compile_and_call()
    assert seen == []


def test_a_watch_ends_when_it_is_removed() -> None:
    seen: list[CompiledGraph] = []
    watch = ferrite.watch_graphs(seen.append)
    try:
        compile_and_call()
    finally:
        watch.remove()
    watch.remove()
    ferrite.reset()
    compile_and_call()
    assert len(seen) == 1
    with pytest.raises(TypeError, match="not to a str"):
        ferrite.watch_graphs("graph")


def test_a_watch_that_fails_is_named_and_costs_no_entry_of_the_cache(tmp_path: Path) -> None:
    def looks_away(graph: CompiledGraph) -> None:
        raise ValueError("no eyes")

    cached = {"cache": "on", "cache_dir": str(tmp_path), "strict": False}
    for stored in (False, True):
        if stored:
            compile_and_call(**cached)
        ferrite.reset()
        with ferrite.watch_graphs(looks_away), pytest.raises(FerriteError, match=r"looks_away, which watches.*no eyes"):
            compile_and_call(**cached)
    ferrite.reset()
    compile_and_call(**cached)
    assert caching.latest().outcome == "hit"


# ---- what is called, as JSON


def test_calls_that_are_no_kernels_as_json(tmp_path: Path) -> None:
    graph = compile_and_call(debug=True, debug_dir=str(tmp_path))
    product, sort = json.loads(graph.eager_calls)
    assert product == {
        "op": "aten.mm.default",
        "arguments": [["ref", graph.program.inputs[0].name], ["ref", graph.program.inputs[1].name]],
        "keywords": {},
        "outputs": ["mm"],
        "program": "graph_0_inference",
        "source": PRODUCT,
    }
    assert sort["op"] == "aten.sort.default"
    assert sort["arguments"][0] == ["ref", "mm"]
    (values,) = sort["outputs"]  # nobody reads the order
    assert f"{values} = sort[0]" in graph.code.source
    assert (tmp_path / "graph_0_inference" / "eager_calls.json").read_text() == graph.eager_calls


def test_every_kind_of_argument_has_a_form_in_json() -> None:
    arguments = (
        Ref("x"), None, True, 3, -0.5, float("-inf"), 1 - 2j, "mode", [Ref("x"), None], (1, 2), slice(0, None, 2),
        {"a": float("nan")},
    )  # fmt: skip
    keywords = {"dtype": Named("torch.float32"), "device": Named("torch.device('cpu')")}
    made = Call("y", "somebody.op.default", arguments, keywords, "model.py:41")
    parts = [Call(f"part{n}", "operator.getitem", (Ref("y"), n), {}) for n in (3, 1)]
    inner = HostProgram("body", (), (Call("z", "aten.sin.default", (Ref("a"),), {}), Return(Ref("z"))))
    view = Call("v", "aten.view.default", (Ref("x"), [2]), {})
    program = HostProgram("program", (), (view, made, *parts, Return((Ref("part1"),))), (inner,))

    def no_constant(text: str) -> Any:
        raise AssertionError(f"{text} is not JSON")

    first, second = json.loads(show_calls(program), parse_constant=no_constant)
    assert (first["program"], first["op"], first["outputs"]) == ("body", "aten.sin.default", ["z"])
    assert second["outputs"] == [None, "part1", None, "part3"]
    assert second["arguments"][5] == ["float", "-inf"]
    assert second["arguments"][11] == ["dict", ["a", ["float", "nan"]]]
    assert second["keywords"] == {"dtype": ["named", "torch.float32"], "device": ["named", "torch.device('cpu')"]}
    step = ["call", "y", second["op"], second["arguments"][:5], second["keywords"], second["source"], made.gives]
    (again,) = unpack([*pack(program)[:2], [step], [], []]).steps
    assert again == Call("y", made.target, made.args[:5], made.kwargs, made.source)
    assert json.loads(show_calls(HostProgram("empty", (), (Return(()),)))) == []


# ---- a function that leaves the process has a native wrapper


def by_a_third(x: Tensor) -> Tensor:
    return x.softmax(-1) * (x.shape[0] / 3)


@pytest.mark.parametrize(
    ("function", "options", "reason"),
    [
        (two_lines, {"host": "python"}, "the option host is python"),
        (two_lines, {"executor": "oracle"}, "the executor is oracle"),
        (by_a_third, {}, "truediv"),
    ],
    ids=["no native host", "no native code", "numbers that are not whole"],
)
def test_what_has_no_native_wrapper_is_not_saved_and_runs_in_python(
    function: Callable[..., Tensor], options: dict[str, Any], reason: str
) -> None:
    inputs = (X, W)[: function.__code__.co_argcount]
    compiled = torch.compile(function, backend="ferrite", fullgraph=True, dynamic=True, options=options)
    with pytest.raises(FerriteError, match=f"(?s)native wrapper.*{reason}"):
        compiled.aot_compile((inputs, {}))
    torch.testing.assert_close(compiled(*inputs), function(*inputs))
    record = ferrite.last_record()
    assert record is not None
    assert record.failures == []
    said = [choice.reason for choice in record.decisions if choice.what == "native host"]
    assert all(reason in each for each in said)
    assert bool(said) is ("host" not in options)  # who asks for Python is not told why


def adds_up(total: Tensor, x: Tensor) -> Tensor:
    total.add_(x)
    return (total @ x.t()).sort(dim=1)[0]


@pytest.mark.parametrize("dynamic", [False, True])
def test_inputs_are_written_once_in_a_call_and_never_by_a_compile(tmp_path: Path, dynamic: bool) -> None:
    """Neither to find out what a graph does nor to find out which way is faster."""
    total, x = torch.zeros(6, 8), torch.ones(6, 8)
    strided = torch.zeros(8, 6).t()
    compiled = torch.compile(adds_up, backend="ferrite", fullgraph=True, dynamic=dynamic, options=LIBRARY)
    saved = compiled.aot_compile(((total, x), {}))
    assert torch.equal(total, torch.zeros(6, 8))
    saved.save_compiled_function(str(tmp_path / "function"))
    with open(tmp_path / "function", "rb") as file:
        loaded = torch.compiler.load_compiled_function(file)
    assert torch.equal(total, torch.zeros(6, 8))
    for count, call in enumerate((saved, loaded, compiled, compiled), 1):
        call(total, x)
        assert torch.equal(total, torch.full((6, 8), float(count)))
    compiled(strided, x)
    assert torch.equal(strided, torch.ones(6, 8))
    assert strided.stride() == (1, 6)


LOADED = """
import sys, torch
with open({path!r}, "rb") as file:
    call = torch.compiler.load_compiled_function(file)
result = call(torch.zeros(6, 8), torch.ones(6, 8))
assert result.shape == (6, 6)
parts = ("compilation", "pipeline", "schedule", "lower", "graph.pre_grad", "graph.post_grad", "native.emit")
print([name for name in parts if f"ferrite.{{name}}" in sys.modules])
"""


def test_a_saved_function_runs_without_the_compiler(tmp_path: Path) -> None:
    compiled = torch.compile(adds_up, backend="ferrite", fullgraph=True, options=LIBRARY)
    saved = compiled.aot_compile(((torch.zeros(6, 8), torch.ones(6, 8)), {}))
    assert isinstance(saved._artifacts.compiled_fn, Package)
    saved.save_compiled_function(str(tmp_path / "function"))
    child = run_python(LOADED.format(path=str(tmp_path / "function")))
    assert child.output.splitlines()[-1] == "[]"


# ---- two calls at once


class Meeting:
    """Where two threads wait for each other in the middle of a graph."""

    barrier = threading.Barrier(2)


@torch.library.custom_op("behaviour_written_code::meet", mutates_args=())
def meet(x: Tensor) -> Tensor:
    Meeting.barrier.wait(60)
    return x.clone()


@meet.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def meets(x: Tensor, w: Tensor) -> Tensor:
    y = (x @ w).softmax(-1)
    for _ in range(3):
        y = meet(y.t().contiguous() + 1)
        y = (y @ y.t()).tanh() @ w
    return y


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("host", ["native", "python"])
def test_two_calls_of_a_graph_that_are_in_its_middle_at_once(host: str, dynamic: bool) -> None:
    inputs = [(torch.randn(6, 8), torch.randn(8, 8)) for _ in range(2)]
    Meeting.barrier = threading.Barrier(1)
    compiled = torch.compile(meets, backend="ferrite", dynamic=dynamic, options=LIBRARY | {"host": host})
    alone = [compiled(*each) for each in inputs]
    for found, each in zip(alone, inputs, strict=True):
        torch.testing.assert_close(found, meets(*each))
    Meeting.barrier = threading.Barrier(2)
    with ThreadPoolExecutor(2) as threads:
        for _ in range(5):
            together = list(threads.map(lambda each: compiled(*each), inputs))
            assert all(torch.equal(one, other) for one, other in zip(together, alone, strict=True))
    record = ferrite.last_record()
    assert record is not None
    assert [choice for choice in record.decisions if choice.what == "native host"] == []
