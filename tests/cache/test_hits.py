"""A graph from the cache is the graph that was compiled: same bits, strides, aliases, writes, gradients and errors."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters
from torch.fx import Graph
from torch.nn import functional

import ferrite
from ferrite.artifact import autograd_facts
from ferrite.caching import MOST_UNDER_ONE_KEY, _check_guards
from ferrite.errors import BrokenCache
from tests.behaviour.child import run_python
from tests.behaviour.compare import Outcome, assert_same, assert_same_outcome, observe
from tests.ops.check import same_bits, tensors_of

Program = Callable[..., Any]


class Cached:
    """Compiles a function anew each time, with one folder; counts what the cache said."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.options = {"cache": "on", "cache_dir": str(folder), **options}

    def __call__(self, function: Program, dynamic: bool | None = None) -> Program:
        torch._dynamo.reset()
        counters.clear()
        return torch.compile(function, backend="ferrite", dynamic=dynamic, options=self.options)

    @staticmethod
    def said() -> dict[str, int]:
        prefix = "graph_cache_"
        return {name.removeprefix(prefix): n for name, n in counters["ferrite"].items() if name.startswith(prefix)}


@pytest.fixture
def cached(tmp_path: Path) -> Cached:
    return Cached(tmp_path)


def run(call: Program, make: Callable[[], tuple[Any, ...]], training: bool) -> Outcome:
    torch.manual_seed(7)
    with torch.set_grad_enabled(training):
        return observe(call, make(), None, training)


def assert_same_bits(found: Outcome, expected: Outcome) -> None:
    """The same machine code ran twice: not even roundings differ."""
    assert expected.error is None
    assert_same_outcome(found, expected)
    pairs = zip(tensors_of([found.result, found.inputs, found.gradients]),
                tensors_of([expected.result, expected.inputs, expected.gradients]), strict=True)  # fmt: skip
    assert all(same_bits(one.detach(), other.detach()) for one, other in pairs)


def assert_same_result(found: Any, expected: Any) -> None:
    assert_same(found, expected, "result", exact=False)


def normed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return functional.layer_norm(functional.gelu(x @ w), (w.shape[1],)).softmax(-1)


def writes_inputs(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    y.mul_(2).add_(x.detach())
    return (x * y).sum(0)


def gives_views(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    z = (x * y).sin()
    return z, z.t()[1:], x.view(-1), y, z.transpose(0, 1)


def normalises_batches(x: torch.Tensor, w: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> torch.Tensor:
    y = functional.conv2d(x, w, padding=1)
    return functional.relu(functional.batch_norm(y, mean, var, training=True))


def drops(x: torch.Tensor) -> torch.Tensor:
    return functional.dropout(x.tanh(), 0.5, training=True) * 2


def breaks(x: torch.Tensor) -> torch.Tensor:
    y = x.cos() + 1
    torch._dynamo.graph_break()
    return y.sin() * x


def holds_numbers(x: torch.Tensor) -> torch.Tensor:
    return x * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]) + torch.arange(5)


def leaf(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*sizes, dtype=dtype).requires_grad_()


CASES: dict[str, tuple[Program, Callable[[], tuple[Any, ...]]]] = {
    "normed": (normed, lambda: (leaf(6, 8), leaf(8, 10))),
    "half": (normed, lambda: (leaf(6, 8, dtype=torch.bfloat16), leaf(8, 10, dtype=torch.bfloat16))),
    "writes inputs": (writes_inputs, lambda: (leaf(4, 5), torch.randn(4, 5))),
    "gives views": (gives_views, lambda: (leaf(4, 5), torch.randn(4, 5))),
    "normalises batches": (
        normalises_batches,
        lambda: (leaf(2, 3, 8, 8), leaf(16, 3, 3, 3), torch.zeros(16), torch.ones(16)),
    ),
    "drops": (drops, lambda: (leaf(7, 9),)),
    "breaks": (breaks, lambda: (leaf(5, 3),)),
    "holds numbers": (holds_numbers, lambda: (leaf(3, 5),)),
    "no kernels": (lambda x, w: x @ w, lambda: (leaf(3, 4), leaf(4, 2))),
    "strided": (lambda x: x.t().exp() + 1, lambda: (torch.randn(6, 8)[::2, 1::3].requires_grad_(),)),
    "integers": (lambda x, n: x[n].sum(1), lambda: (leaf(6, 4), torch.tensor([5, 0, 3]))),
}


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", CASES)
def test_hit_is_the_compiled_graph(cached: Cached, name: str, training: bool) -> None:
    function, make = CASES[name]
    cold = run(cached(function), make, training)
    said = cached.said()
    assert said["miss"] == said["saved"] > 0, said
    warm = run(cached(function), make, training)
    assert cached.said() == {"hit": said["miss"]}
    assert counters["ferrite"]["graphs_compiled"] == 0
    assert counters["aot_autograd"]["total"] == 0, "a hit does not trace"
    assert_same_bits(warm, cold)


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_dynamic_sizes(cached: Cached, training: bool) -> None:
    def makes(rows: int) -> Callable[[], tuple[Any, ...]]:
        return lambda: (leaf(rows, 8), leaf(8, 10))

    call = cached(normed, dynamic=True)
    cold = [run(call, makes(rows), training) for rows in (6, 9)]
    assert cached.said()["saved"] == 1
    call = cached(normed, dynamic=True)
    warm = [run(call, makes(rows), training) for rows in (6, 9)]
    assert cached.said() == {"hit": 1}
    for found, expected in zip(warm, cold, strict=True):
        assert_same_bits(found, expected)


def test_guards_of_the_trace_hold_after_a_hit(cached: Cached) -> None:
    """What a trace assumed about sizes is checked when an entry is found, and guarded on from then on."""

    def branches(x: torch.Tensor) -> torch.Tensor:
        return x.sin() if x.shape[0] > 16 else x.cos() + x.shape[0]

    small, large = torch.randn(5, 3), torch.randn(40, 3)
    call = cached(branches, dynamic=True)
    assert torch.equal(call(small), small.cos() + 5)
    call = cached(branches, dynamic=True)
    assert_same_result(call(large), large.sin())
    assert_same_result(call(small), small.cos() + 5)
    assert cached.said()["hit"] >= 1


def test_a_shape_that_depends_on_sizes(cached: Cached) -> None:
    """Whichever way was compiled first, and whatever was found: each size takes its own."""

    def folds(x: torch.Tensor) -> torch.Tensor:
        y = torch.cat([x, x])
        return y.view(-1, 4).sum(0) if y.shape[0] % 4 == 0 else y * 3

    for rows in (8, 6, 8, 6):
        x = torch.randn(rows)
        call = cached(folds, dynamic=True)
        assert_same_result(call(x), folds(x))
        for other in (10, 12):
            x = torch.randn(other)
            assert_same_result(call(x), folds(x))


class AsksForSizes:
    """A pass that looks at the first size of the input, so that what it leaves is right on one side of limits only."""

    def __init__(self, *limits: int) -> None:
        self.limits = limits

    def __call__(self, graph: Graph) -> int:
        sizes = [node.meta["val"] for node in graph.find_nodes(op="placeholder")]
        rows = next(size for size in sizes if isinstance(size, torch.SymInt))
        return sum(bool(rows > limit) for limit in self.limits) * 0

    def uuid(self) -> str:
        return f"asks for {self.limits}"


def entries_in(folder: Path) -> list[str]:
    return sorted(path.name[-2:] for path in (folder / "graphs").iterdir())


def test_entries_under_one_key_differ_in_their_guards(cached: Cached, tmp_path: Path) -> None:
    """What a trace assumed of sizes is looked at before an entry is used, and guarded on from then on."""

    def plain(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * 2

    few, many = torch.randn(8, 3), torch.randn(40, 3)
    with ferrite.register_pass("post_grad", AsksForSizes(16)):
        for x, entries in ((few, ["-0"]), (many, ["-0", "-1"])):
            assert_same_result(cached(plain, dynamic=True)(x), plain(x))
            assert cached.said() == {"miss": 1, "saved": 1}
            assert entries_in(tmp_path) == entries
        for first, second in ((few, many), (many, few)):
            call = cached(plain, dynamic=True)
            for number, (x, hits) in enumerate(
                ((first, 1), (first[:5] if first is few else first[:30], 1), (second, 2))
            ):
                assert_same_result(call(x), plain(x))
                assert cached.said() == {"hit": hits}, f"call {number} with {len(x)} rows"


def test_an_entry_that_does_not_work_is_stored_anew_with_its_guards(
    cached: Cached, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpack, calls = autograd_facts.unpack_whole, iter((True,))

    def fails_once(packed: Any) -> Any:
        if next(calls, False):
            raise ValueError("out of luck")
        return unpack(packed)

    few, many = torch.randn(8), torch.randn(40)
    with ferrite.register_pass("post_grad", AsksForSizes(16)):
        cached(torch.sin, dynamic=True)(few)
        with monkeypatch.context() as broken:
            broken.setattr("ferrite.caching.autograd_facts.unpack_whole", fails_once)
            assert_same_result(cached(torch.sin, dynamic=True)(few), few.sin())
            assert {name: n for name, n in cached.said().items() if n} == {"miss": 1, "saved": 1}
        for x, said in ((few, {"hit": 1}), (many, {"miss": 1, "saved": 1})):
            assert_same_result(cached(torch.sin, dynamic=True)(x), x.sin())
            assert cached.said() == said


def test_the_last_place_under_a_key_is_used_again(cached: Cached, tmp_path: Path) -> None:
    limits = range(10, 10 * MOST_UNDER_ONE_KEY + 20, 10)
    sizes = [5, *(limit + 5 for limit in limits)]
    assert len(sizes) > MOST_UNDER_ONE_KEY
    places = [f"-{place}" for place in range(MOST_UNDER_ONE_KEY)]
    with ferrite.register_pass("post_grad", AsksForSizes(*limits)):
        for rows in sizes:
            assert_same_result(cached(torch.sin, dynamic=True)(torch.ones(rows)), torch.ones(rows).sin())
            assert cached.said() == {"miss": 1, "saved": 1}
        assert entries_in(tmp_path) == places
        for rows, said in ((sizes[0], "hit"), (sizes[-1], "hit"), (sizes[-2], "miss")):
            assert_same_result(cached(torch.sin, dynamic=True)(torch.ones(rows)), torch.ones(rows).sin())
            assert cached.said()[said] == 1
    assert entries_in(tmp_path) == places


def test_errors_are_those_of_eager(cached: Cached) -> None:
    def picks(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return x[n] * 2

    good, bad = torch.tensor([1, 2]), torch.tensor([1, 7])
    for _ in range(2):
        call = cached(picks)
        x = torch.randn(4, 3)
        assert_same_result(call(x, good), picks(x, good))
        with pytest.raises(IndexError, match="out of bounds") as caught:
            call(x, bad)
        assert any("test_hits.py" in note for note in caught.value.__notes__)
        assert_same_result(call(x, good), picks(x, good))
    assert cached.said() == {"hit": 1}


def test_backward_twice_and_in_a_hook(cached: Cached) -> None:
    for _ in range(2):
        x = leaf(6, 8)
        result = cached(normed)(x, torch.ones(8, 10)).sum()
        result.backward(retain_graph=True)
        first = x.grad.clone()
        result.backward()
        assert torch.equal(x.grad, first + first)
    assert cached.said() == {"hit": 1}


def test_an_input_with_a_history_that_is_written_to(cached: Cached) -> None:
    """The wrapper of AOTAutograd writes it, by what the entry says."""

    def doubles(x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2).sin()

    for said in ({"miss": 1, "saved": 1}, {"hit": 1}, {"hit": 1}):
        x, other = torch.ones(4, requires_grad=True), torch.ones(4, requires_grad=True)
        given, plain = x * 3, other * 3
        found, expected = cached(doubles)(given), doubles(plain)
        (found.sum() + given.sum()).backward()
        (expected.sum() + plain.sum()).backward()
        assert_same_result([found, given, x.grad], [expected, plain, other.grad])
        assert cached.said() == said


def test_autocast_is_part_of_the_key(cached: Cached) -> None:
    x, w = torch.randn(6, 8), torch.randn(8, 10)
    plain = cached(normed)(x, w)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = cached(normed)(x, w)
        assert cached.said()["miss"] == 1
        assert_same_result(cached(normed)(x, w), half)
        assert cached.said() == {"hit": 1}
    assert_same_result(cached(normed)(x, w), plain)
    assert cached.said() == {"hit": 1}


def test_record_tells_what_the_compile_said(cached: Cached) -> None:
    make = CASES["normed"][1]
    run(cached(normed), make, training=True)
    cold = ferrite.last_record()
    run(cached(normed), make, training=True)
    warm = ferrite.last_record()
    assert [entry.phase for entry in warm.graphs] == ["cache", "pre_grad", "joint", "forward", "backward"]
    assert warm.fallbacks == cold.fallbacks
    assert warm.graphs[1:] == cold.graphs[1:]
    (decision,) = warm.graphs[0].decisions
    assert decision.taken
    assert "cache" in str(warm)


def test_counters_of_the_compile_are_counted_again(cached: Cached) -> None:
    """But not that something was compiled."""

    def counted() -> dict[str, int]:
        ours = counters["ferrite"]
        return {name: ours[name] for name in ours if not name.startswith(("graph", "compiled_", "scheme_"))}

    make = CASES["normed"][1]
    for training in (False, True):
        run(cached(normed), make, training)
        cold = counted()
        assert cold.keys() - {"fallbacks"}, "no pass did anything"
        assert "fallbacks" in cold or not training
        run(cached(normed), make, training)
        assert cached.said() == {"hit": 1}
        assert counted() == cold


LOGS = """
import torch
from ferrite import caching
call = torch.compile(lambda x, w: (x @ w).view(-1).sin(), backend="ferrite")
call(torch.ones(3, 4), torch.ones(4, 5))
print(caching.latest().outcome)
"""


def test_logs_of_torch_are_not_empty_on_a_hit(tmp_path: Path) -> None:
    """What runs is shown; where the graphs of a compile are to be shown, there is one."""
    given = {"FERRITE_CACHE": "on", "FERRITE_CACHE_DIR": str(tmp_path)}
    asked = [("", "miss", False), ("output_code", "hit", True), ("post_grad_graphs", "bypass", False)]
    for logs, outcome, shows_code in asked:
        child = run_python(LOGS, environment=given | ({"TORCH_LOGS": logs} if logs else {}))
        assert child.output.split() == [outcome]
        assert ("def graph_0_inference(args):" in child.errors) is shows_code
    assert "graph 0 inference before post_grad" in child.errors


def custom_sine(x: torch.Tensor) -> torch.Tensor:
    class Sine(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * ctx.saved_tensors[0].cos() * 2

    return Sine.apply(x) + 1


def test_what_may_mean_something_else_tomorrow_is_not_stored(cached: Cached) -> None:
    """A function with a backward of its own."""
    for _ in range(2):
        x = leaf(3, 4)
        result = cached(custom_sine)(x)
        assert_same_result(result, custom_sine(x))
        assert cached.said() == {"bypass": 1}
        (decision,) = ferrite.last_record().graphs[0].decisions
        assert "autograd_function_apply" in decision.reason


def test_one_tensor_for_two_inputs(cached: Cached) -> None:
    def adds(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x * y

    for shared in (False, True, False, True):
        x = torch.ones(4)
        y = x if shared else torch.ones(4)
        assert_same_result(cached(adds)(x, y), torch.full((4,), 4.0 if shared else 2.0))
    for offset in (0, 2, 0, 2):
        base, plain = torch.arange(8.0), torch.arange(8.0)
        result = cached(adds)(base[:4], base[4 - offset : 8 - offset])
        assert_same_result(result, adds(plain[:4], plain[4 - offset : 8 - offset]))
        assert_same_result(base, plain)


def test_modes(tmp_path: Path) -> None:
    x, w = torch.randn(6, 8), torch.randn(8, 10)
    Cached(tmp_path, cache="off")(normed)(x, w)
    assert not list(tmp_path.iterdir())
    reader = Cached(tmp_path, cache="read-only")
    expected = reader(normed)(x, w)
    assert reader.said() == {"miss": 1}
    assert not list(tmp_path.iterdir())
    Cached(tmp_path)(normed)(x, w)
    assert torch.equal(reader(normed)(x, w), expected)
    assert reader.said() == {"hit": 1}
    with torch.compiler.config.patch(force_disable_caches=True):
        Cached(tmp_path)(normed)(x, w)
        assert Cached.said() == {}


def test_a_graph_that_cannot_be_stored_works(
    cached: Cached, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr("ferrite.caching.write", fails)
    cold = run(cached(normed), CASES["normed"][1], training=True)
    assert cold.error is None
    assert "out of luck" in caplog.text
    cached.options["cache"] = "strict"
    result = cached(normed)(*CASES["normed"][1]()).sum()
    with pytest.raises(BrokenCache, match="out of luck"):
        result.backward()


def test_a_graph_without_a_key_works(
    cached: Cached, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> None:
        raise KeyError("no key")

    monkeypatch.setattr("ferrite.caching.fields_of", fails)
    assert run(cached(normed), CASES["normed"][1], training=True).error is None
    assert cached.said() == {"bypass": 1}
    assert "no key" in caplog.text


LOOKED_UP = "def looked_up(table, index):\n    return table.sin()[index].cos()\n"


def written(folder: Path, text: str) -> Program:
    """A function of a file that has this text now."""
    path = folder / "model.py"
    path.write_text(text)
    linecache.clearcache()
    names: dict[str, Any] = {}
    exec(compile(text, str(path), "exec"), names)
    return names["looked_up"]


@pytest.mark.parametrize("host", ["native", "python"])
def test_code_that_moves_in_its_file(tmp_path: Path, host: str) -> None:
    """A line above it misses nothing, and errors name the line where the code stands now; what was written in one
    line and is now in two is compiled again."""
    cached = Cached(tmp_path / "cache", host=host)

    def notes(text: str) -> tuple[dict[str, int], str]:
        with pytest.raises(IndexError) as caught:
            cached(written(tmp_path, text))(torch.arange(4.0), torch.tensor([1, 7]))
        return cached.said(), "\n".join(caught.value.__notes__)

    said, told = notes(LOOKED_UP)
    assert said == {"miss": 1, "saved": 1}
    assert "model.py:2" in told
    said, told = notes("# a remark\n\n" + LOOKED_UP)
    assert said == {"hit": 1}
    assert "model.py:4" in told
    assert "model.py:2" not in told
    said, told = notes(LOOKED_UP.replace("return table.sin()", "found = table.sin()\n    return found"))
    assert said == {"miss": 1, "saved": 1}
    assert "model.py:3" in told
    said, told = notes(LOOKED_UP.replace("return table.sin()", "found = table.sin()\n\n    return found"))
    assert said == {"hit": 1}
    assert "model.py:4" in told


HOSTILE = 'it\'s """ \'\'\' \\ {x} %s\n#\nraise SystemExit(\'injected\')\n""" + "#")'
MODEL = """
import torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_parameter(NAME, torch.nn.Parameter(torch.arange(4.0)))
        self.register_buffer(NAME + "#", torch.ones(4))
        self.add_module(NAME + ";", torch.nn.LayerNorm(4, bias=False))
    def forward(self, index):
        found = getattr(self, NAME + ";")(getattr(self, NAME).sin() * getattr(self, NAME + "#"))
        return found[index].cos()
"""


@pytest.mark.parametrize("host", ["native", "python"])
def test_names_that_would_be_code(tmp_path: Path, host: str) -> None:
    """Of a file, a class and what it holds: they are shown, and never run."""
    folder = tmp_path / "it's \"\"\"\n#\nraise SystemExit('injected') \\"
    folder.mkdir()
    path = folder / "model ' \" {0} %s \n raise SystemExit('injected') #.py"
    path.write_text(MODEL)
    names: dict[str, Any] = {"NAME": HOSTILE}
    exec(compile(MODEL, str(path), "exec"), names)
    linecache.clearcache()
    torch.manual_seed(0)
    model = names["Model"]()
    cached = Cached(tmp_path / "cache", host=host)
    for said in ({"miss": 1, "saved": 1}, {"hit": 1}):
        call = cached(model)
        index = torch.tensor([3, 0])
        with torch.no_grad():
            assert_same_result(call(index), model(index))
            with pytest.raises(IndexError) as caught:
                call(torch.tensor([1, 7]))
        assert cached.said() == said
        assert any("return found[index].cos()" in note for note in caught.value.__notes__)
    for said in ({"miss": 1, "saved": 1}, {"hit": 1}):
        cached(model)(torch.tensor([1, 2])).sum().backward()
        assert cached.said() == said


def test_guards_with_a_maximum_are_kept() -> None:
    """What PyTorch writes of `max(1, s0)`; anything but arithmetic is not evaluated."""
    _check_guards("max(1, L['t0']*L['t1']) == L['t1'] and min(L['t0'], 3) >= 2")
    for text in ("open('x')", "max.__self__", "L['t0'].__class__", "(lambda: 1)()", "2 ** 99"):
        with pytest.raises(ValueError, match="its guards hold"):
            _check_guards(text)
