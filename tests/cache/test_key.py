"""The key has everything in it that a result depends on, and nothing that differs between equal processes."""

from __future__ import annotations

import functools
import importlib
import os
import sys
import time
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental._backward_state import BackwardState
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import ferrite
from ferrite import caching, identity, registry
from ferrite.artifact import key as key_module
from ferrite.errors import Unsupported
from ferrite.identity import identity_of
from ferrite.native import target
from ferrite.options import Options
from ferrite.process import TICK
from tests.behaviour.child import run_python
from tests.cache import subject
from tests.cache.subject import with_inner

# ---- options


class Partitioner:
    def __init__(self, name: str | None) -> None:
        self.name = name

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError

    def uuid(self) -> str | None:
        return self.name


# Another value of every option. A new one must be put into one of the three lists.
CHANGE_THE_KEY: dict[str, Any] = {
    "disable": ("post_grad",),
    "pre_grad": (("normalise_ops", ()),),
    "pre_grad_rewrites": False,
    "pre_dispatch": True,
    "pre_dispatch_add": ("x",),
    "pre_dispatch_remove": ("x",),
    "check": False,
    "decompose": ("aten.silu",),
    "partitioner": Partitioner("mine"),
    "keep_output_stride": False,
    "donate_buffers": True,
    "runtime_asserts": False,
    "skip_unsupported_devices": True,
    "executor": "oracle",
    "host": "python",
    "products": "library",
    "layout": "on",
    "padding": "on",
    "fallback_random": True,
}
CHANGE_NOTHING: dict[str, Any] = {
    "strict": True,  # what failed is not stored
    "cache": "strict",
    "cache_dir": "elsewhere",
    "cache_megabytes": 1,
    "debug_dir": "elsewhere",
    "perf_map": True,
    "gdb": True,
}
BYPASS: dict[str, Any] = {
    "numeric_check": (("pre_grad", ()),),
    "bisect_limit": 3,
    "bisect_rewrites": 3,
    "bisect_lowerings": 3,
    "bisect_kernels": 3,
    "explain_patterns": ("all",),
    "keep_text": True,
    "compile_mode": "serialize",
    "debug": True,
    "debug_inputs": True,
}


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[Options]:
    yield Options(cache="read-only", cache_dir=str(tmp_path))
    caching._opened.cache_clear()


def looked_up(options: Options, function: Callable[..., Any], *inputs: Any, **settings: Any) -> caching.Lookup:
    """What the cache says of the first graph that Dynamo captures of a call."""
    found = []

    def backend(module: GraphModule, _: Any) -> Any:
        found.append(caching.look_up(module, options))
        return module.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend, **settings)(*inputs)
    return found[0]


def key_of(options: Options, function: Callable[..., Any], *inputs: Any, **settings: Any) -> str:
    found = looked_up(options, function, *inputs, **settings)
    assert found.outcome == "miss", found.reason
    return found.key


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x.relu() * 2


def test_every_option_is_in_one_list() -> None:
    lists = [*CHANGE_THE_KEY, *CHANGE_NOTHING, *BYPASS]
    assert len(set(lists)) == len(lists)
    assert set(lists) == {field.name for field in fields(Options)}
    assert all(value != getattr(Options(), name) for name, value in (CHANGE_THE_KEY | BYPASS).items())


def test_options_that_change_the_key(plain: Options) -> None:
    x = torch.ones(4)
    keys = {"plain": key_of(plain, scaled, x)}
    for name, value in CHANGE_THE_KEY.items():
        keys[name] = key_of(replace(plain, **{name: value}), scaled, x)
    keys["another partitioner"] = key_of(replace(plain, partitioner=Partitioner("yours")), scaled, x)
    assert len(set(keys.values())) == len(keys)


def test_options_that_do_not(plain: Options, tmp_path: Path) -> None:
    x = torch.ones(4)
    expected = key_of(plain, scaled, x)
    for name, value in CHANGE_NOTHING.items():
        changed = replace(plain, **{name: str(tmp_path / "other") if name == "cache_dir" else value})
        assert key_of(changed, scaled, x) == expected, name


def test_options_under_which_nothing_is_found(plain: Options) -> None:
    for name, value in BYPASS.items():
        found = looked_up(replace(plain, **{name: value}), scaled, torch.ones(4))
        assert (found.outcome, name in found.reason) == ("bypass", True)
    found = looked_up(replace(plain, partitioner=lambda *_: None), scaled, torch.ones(4))
    assert (found.outcome, found.reason) == ("bypass", "the partitioner has no uuid()")
    found = looked_up(replace(plain, partitioner=Partitioner(None)), scaled, torch.ones(4))
    assert (found.outcome, "the partitioner says by its uuid(), None" in found.reason) == ("bypass", True)
    named = key_of(replace(plain, partitioner=Partitioner("None")), scaled, torch.ones(4))
    assert named != key_of(plain, scaled, torch.ones(4))


# ---- the state of the process


@contextmanager
def _set(read: Callable[[], Any], write: Callable[[Any], Any], value: Any) -> Iterator[None]:
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


SWITCHES: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast to f16": lambda: torch.autocast("cpu", torch.float16),
    "default dtype": lambda: _set(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "deterministic": lambda: _set(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True),
    "matmul precision": lambda: _set(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"),
    "flash attention": lambda: _set(torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp, False),
    "attention by products": lambda: _set(
        torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp, False
    ),
    "no oneDNN": lambda: torch.backends.mkldnn.flags(enabled=False),
    "min-cut by speed": lambda: torch._functorch.config.patch(activation_memory_budget=0.5),
    "donated buffers": lambda: torch._functorch.config.patch(donated_buffer=False),
    "tag": lambda: torch.compiler.config.patch(cache_key_tag="mine"),
}


def test_switches_change_the_key(plain: Options) -> None:
    x = torch.ones(4)
    keys = {"none": key_of(plain, scaled, x)}
    for name, switch in SWITCHES.items():
        with switch():
            keys[name] = key_of(plain, scaled, x)
    assert len(set(keys.values())) == len(keys), keys
    assert key_of(plain, scaled, x) == keys["none"]


def test_inference_mode_is_seen_by_nobody_who_compiles(plain: Options, tmp_path: Path) -> None:
    """Dynamo leaves that mode before it calls a backend: what is found in it is what was made without gradients."""
    options = {"cache": "on", "cache_dir": str(tmp_path / "cache")}
    outcomes = []
    for mode in (torch.no_grad, torch.inference_mode, torch.no_grad):
        torch._dynamo.reset()
        with mode():
            found = torch.compile(scaled, backend="ferrite", options=options)(torch.ones(4))
            expected = scaled(torch.ones(4))
        assert torch.equal(found, expected)
        assert found.is_inference() == expected.is_inference()
        outcomes.append(caching.latest().outcome)
    assert outcomes == ["miss", "hit", "hit"]


def test_another_machine_misses(plain: Options) -> None:
    """An entry of a CPU with AVX-512 is not found on one without, and the other way round."""
    x = torch.ones(4)
    keys = {"host": key_of(plain, scaled, x)}
    for name in ("x86-64-v4", "x86-64-v3", "x86-64", "aarch64"):
        with mock.patch.object(target, "host", return_value=target.named(name)):
            keys[name] = key_of(plain, scaled, x)
    here = target.host()
    less = replace(here, features=here.features.replace("+avx2", "-avx2"))
    with mock.patch.object(target, "host", return_value=less):
        keys["masked"] = key_of(plain, scaled, x)
    assert len(set(keys.values())) == len(keys)


def test_a_masked_feature_compiles_anew(tmp_path: Path) -> None:
    options = {"cache": "on", "cache_dir": str(tmp_path / "cache")}
    x = torch.linspace(-1, 1, 100)
    outcomes = []
    for name in ("host", "x86-64", "x86-64", "host"):
        torch._dynamo.reset()
        chosen = target.host() if name == "host" else target.named(name)
        with mock.patch.object(target, "host", return_value=chosen):
            assert torch.equal(torch.compile(scaled, backend="ferrite", options=options)(x), scaled(x))
        outcomes.append(caching.latest().outcome)
    assert outcomes == ["miss", "miss", "hit", "hit"]


def test_other_versions_miss(plain: Options) -> None:
    x = torch.ones(4)
    before = key_of(plain, scaled, x)
    with mock.patch.object(key_module, "source_digest", return_value="other"):
        assert key_of(plain, scaled, x) != before
    for name in ("torch", "llvm", "cpu"):
        here = key_module.fields_of_machine()
        with mock.patch.object(key_module, "fields_of_machine", return_value=here | {name: "other"}):
            assert key_of(plain, scaled, x) != before
    with mock.patch.object(torch, "__version__", "9.9"):
        assert key_of(plain, scaled, x) != before


# ---- inputs


def pair(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y


def test_inputs_change_the_key(plain: Options) -> None:
    x, base = torch.ones(4, 6), torch.ones(8, 6)
    cases: dict[str, tuple[torch.Tensor, torch.Tensor]] = {
        "plain": (x, torch.ones(4, 6)),
        "dtype": (x, torch.ones(4, 6, dtype=torch.float64)),
        "shape": (x, torch.ones(1, 6)),
        "rank": (x, torch.ones(6)),
        "stride": (x, torch.ones(6, 4).t()),
        "gradient": (x, torch.ones(4, 6, requires_grad=True)),
        "parameter": (x, torch.nn.Parameter(torch.ones(4, 6))),
        "parameter without gradient": (x, torch.nn.Parameter(torch.ones(4, 6), requires_grad=False)),
        "made": (x, torch.ones(4, 6, requires_grad=True) * 1),
        "one memory": (base[:4], base[4:]),
        "one memory, overlapping": (base[:4], base[2:6]),
        "same tensor": (x, x),
        "always at one place": (x, torch.ones(4, 6)),
    }
    torch._dynamo.mark_static_address(cases["always at one place"][1])
    keys = {name: key_of(plain, pair, *inputs, dynamic=False) for name, inputs in cases.items()}
    assert len(set(keys.values())) == len(keys), keys
    assert key_of(plain, pair, torch.zeros(4, 6), torch.zeros(4, 6), dynamic=False) == keys["plain"]


def test_sizes_that_vary_are_one_key(plain: Options) -> None:
    one, other = (key_of(plain, scaled, torch.ones(n), dynamic=True) for n in (40, 50))
    assert one == other != key_of(plain, scaled, torch.ones(40), dynamic=False)


def test_constants_change_the_key(plain: Options) -> None:
    x = torch.ones(4)
    keys = [key_of(plain, lambda x, n=n: x * n + torch.full((4,), n), x) for n in (1, 2, 1.0, 2.5)]
    assert len(set(keys)) == len(keys)


# ---- passes and patterns of the user's


def digest_with(function: Any) -> str:
    with ferrite.register_pass("post_grad", function):
        return registry.digest()


def test_passes_change_the_key(plain: Options) -> None:
    x = torch.ones(4)
    before = key_of(plain, scaled, x)
    with ferrite.register_pass("post_grad", with_inner):
        during = key_of(plain, scaled, x)
    with ferrite.register_pass("joint", with_inner):
        elsewhere = key_of(plain, scaled, x)
    with ferrite.register_pattern(lambda a: a.relu() + 1, lambda a: a.relu() + 1.0, [x]):
        pattern = key_of(plain, scaled, x)
    assert len({before, during, elsewhere, pattern}) == 4
    assert key_of(plain, scaled, x) == before


def test_the_identity_follows_what_a_pass_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    before = digest_with(with_inner)
    assert digest_with(with_inner) == before
    monkeypatch.setattr(subject, "LIMIT", 4)
    assert digest_with(with_inner) != before
    monkeypatch.undo()
    monkeypatch.setattr(subject, "helper", lambda graph: 7)
    assert digest_with(with_inner) != before


def test_the_identity_follows_what_a_pass_holds() -> None:
    class Counting:
        def __init__(self, limit: int) -> None:
            self.limit = limit

        def __call__(self, graph: Graph) -> int:
            return 0

    def closing(limit: int) -> Callable[[Graph], int]:
        return lambda graph: limit * 0

    made = [Counting(1), Counting(2), closing(1), closing(2), functools.partial(with_inner)]
    made += [lambda graph, n=1: n * 0, lambda graph, n=2: n * 0, Counting(3).__call__]
    digests = [identity_of(function) for function in made]
    assert len(set(digests)) == len(digests)
    assert identity_of(Counting(1)) == digests[0]
    assert identity_of(closing(2)) == digests[3]


def made_by(text: str, **given: Any) -> Any:
    """What a text calls `Pass`, as a notebook or a program from standard input would make it: without a file."""
    names = {"__name__": "__main__", **given}
    exec(text, names)
    return names["Pass"]


CLASS = """
class Pass(Base):
    limit = {limit}

    def __call__(self, graph):
        return {result}
"""


def test_the_identity_of_a_class_is_its_code() -> None:
    """Not its name, nor the file that it came from, as there may be none."""
    base = made_by("class Pass:\n    def helper(self): return 1")
    other = made_by("class Pass:\n    def helper(self): return 2")
    texts = [(base, 1, "0"), (base, 1, "0 * self.limit"), (base, 2, "0"), (other, 1, "0"), (object, 1, "0")]
    digests = [
        identity_of(made_by(CLASS.format(limit=limit, result=result), Base=kind)()) for kind, limit, result in texts
    ]
    assert len(set(digests)) == len(digests)
    assert identity_of(made_by(CLASS.format(limit=1, result="0"), Base=base)()) == digests[0]


def test_the_identity_of_odd_things() -> None:
    """Slots, properties, methods of C, and a function that has taken the name of one of torch's."""

    class Slotted:
        __slots__ = ("limit",)

        def __init__(self, limit: int) -> None:
            self.limit = limit

    def renamed(limit: int) -> Callable[..., Any]:
        return functools.wraps(torch.nn.functional.relu)(lambda graph: limit * 0)

    def with_property(limit: int) -> type:
        return type("Pass", (), {"limit": property(lambda self: limit), "first": functools.cached_property(len)})

    makers: list[Callable[[int], Any]] = [Slotted, renamed, with_property, lambda limit: [limit].append]
    for make in makers:
        assert identity_of(make(1)) == identity_of(make(1)) != identity_of(make(2))


def test_the_identity_of_a_module_is_that_of_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def digest_of(inner: str) -> str:
        """Of a pass that calls a function of one module, which calls one of another."""
        folder = tmp_path / inner / "ferrite_test_package"
        (folder / "inner").mkdir(parents=True)
        (folder / "__init__.py").write_text("from .outer import run")
        (folder / "outer.py").write_text("from .inner.deep import LIMIT\ndef run(graph): return LIMIT * 0")
        (folder / "inner" / "__init__.py").write_text("")
        (folder / "inner" / "deep.py").write_text(f"LIMIT = {inner}")
        with monkeypatch.context() as patched:
            patched.setattr(identity, "start_of_interpreter", time.time)
            patched.syspath_prepend(str(folder.parent))
            for name in [name for name in sys.modules if name.startswith("ferrite_test_package")]:
                patched.delitem(sys.modules, name)
            identity._digest_of_package.cache_clear()
            package = importlib.import_module("ferrite_test_package")
            found = identity_of(made_by("Pass = lambda graph: package.run(graph)", package=package))
            for name in [name for name in sys.modules if name.startswith("ferrite_test_package")]:
                del sys.modules[name]
        return found

    assert digest_of("1") != digest_of("2")


def test_a_module_that_is_edited_while_it_is_loaded_has_no_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file says what a next process will load, and not what this one has loaded; whatever date it is given. What
    was written just before Python was started, as in a fresh clone, has one."""
    path = tmp_path / "ferrite_test_edited.py"
    path.write_text("def run(graph): return 0")
    written = path.stat().st_ctime
    monkeypatch.setattr(identity, "start_of_interpreter", lambda: written - TICK / 2)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("ferrite_test_edited")
    made = made_by("Pass = lambda graph: module.run(graph)", module=module)
    identity_of(made)
    monkeypatch.setattr(identity, "start_of_interpreter", lambda: written - TICK * 2)
    os.utime(path, (0, 0))
    with pytest.raises(Unsupported, match="ferrite_test_edited, whose file has changed since Python was started"):
        identity_of(made)
    del sys.modules["ferrite_test_edited"]


FORKED = """
import os, sys, time
import ferrite_test_edited as module
time.sleep(0.1)
open(module.__file__, "a").write("# edited")
time.sleep(0.1)
if child := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
from ferrite.errors import Unsupported
from ferrite.identity import identity_of
from ferrite.process import start_of_interpreter, start_of_process
assert start_of_process() - start_of_interpreter() > 0.15
try:
    identity_of(lambda graph: module.run(graph))
except Unsupported as error:
    print(error.title)
"""


def test_a_module_that_is_edited_before_a_process_is_forked_has_no_identity(tmp_path: Path) -> None:
    (tmp_path / "ferrite_test_edited.py").write_text("def run(graph): return 0")
    child = run_python(f"import sys; sys.path.append({str(tmp_path)!r})\n{FORKED}")
    assert "ferrite_test_edited, whose file has changed" in child.output


def test_a_weak_reference_has_no_identity() -> None:
    """What it leads to is no part of the text, and may be gone."""

    class Held:
        pass

    held = Held()
    for weak in (weakref.ref(held), weakref.proxy(held)):
        with pytest.raises(Unsupported, match="holds a weak reference"):
            identity_of(lambda graph, weak=weak: weak)
    del held
    with pytest.raises(Unsupported, match="holds a weak reference"):
        identity_of(lambda graph: weak)


def test_a_module_without_a_file_has_no_identity() -> None:
    module = types.ModuleType("ferrite_test_nowhere")
    with pytest.raises(Unsupported, match="has no file"):
        identity_of(made_by("Pass = lambda graph: module.run(graph)", module=module))


def test_a_pass_that_cannot_be_told_is_not_cached(plain: Options) -> None:
    held = torch.ones(2)
    with ferrite.register_pass("post_grad", lambda graph: int(held.sum()) * 0, name="mine"):
        found = looked_up(plain, scaled, torch.ones(4))
    assert (found.outcome, "holds a tensor" in found.reason) == ("bypass", True)
    with ferrite.register_pass("post_grad", Partitioner(None), name="mine"):
        found = looked_up(plain, scaled, torch.ones(4))
    assert (found.outcome, "says by its uuid(), None" in found.reason) == ("bypass", True)


# ---- what is not cached


def test_graphs_that_are_not_cached(plain: Options) -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        found = looked_up(plain, scaled, torch.ones(4, requires_grad=True))
    assert found.outcome == "bypass"
    with mock.patch.object(torch.compiler.config, "force_disable_caches", True):
        assert looked_up(plain, scaled, torch.ones(4)).outcome == "off"


def fake(tensor: torch.Tensor) -> torch.Tensor:
    return FakeTensorMode(allow_non_fake_inputs=True).from_tensor(tensor)


def captured(value: Any, edit: Callable[[Graph, Node], Any] = lambda graph, x: x, **held: Any) -> GraphModule:
    """A graph of one input with something in it that Dynamo may give."""
    graph = Graph()
    x = graph.placeholder("x")
    if value is not None:
        x.meta["example_value"] = value
    graph.output(edit(graph, x))
    owner = torch.nn.Module()
    for name, thing in held.items():
        setattr(owner, name, thing)
    return GraphModule(owner, graph)


PLAIN = torch.ones(3)
NOT_CACHED: dict[str, tuple[Callable[[], GraphModule], str]] = {
    "a tensor that is not fake": (lambda: captured(PLAIN), "input x is no plain tensor"),
    "mkldnn": (lambda: captured(PLAIN.to_mkldnn()), "input x is no plain tensor"),
    "sparse": (lambda: captured(fake(PLAIN.to_sparse())), "input x is no plain tensor"),
    "another device": (lambda: captured(fake(PLAIN.to("meta"))), "input x is no plain tensor"),
    "a subclass": (lambda: captured(TwoTensor(PLAIN, PLAIN)), "input x is no plain tensor"),
    "state of a backward": (lambda: captured(BackwardState()), "input x is a BackwardState"),
    "not from Dynamo": (lambda: captured(None), "does not come from Dynamo"),
    "a module": (
        lambda: captured(fake(PLAIN), lambda graph, x: graph.call_module("inner", (x,)), inner=torch.nn.ReLU()),
        "the graph calls a module: inner",
    ),
    "an object": (
        lambda: captured(fake(PLAIN), lambda graph, x: graph.get_attr("thing"), thing=Partitioner("x")),
        "the graph holds an object: thing",
    ),
    "an argument without a text": (
        lambda: captured(fake(PLAIN), lambda graph, x: graph.call_function(torch.relu, (x, {"a": PLAIN.numpy()}))),
        "relu takes a ndarray",
    ),
    "a function of the user's": (
        lambda: captured(fake(PLAIN), lambda graph, x: graph.call_function(known_by_name, (x,))),
        "the graph calls tests.cache.test_key.known_by_name",
    ),
    "a function without a name": (
        lambda: captured(fake(PLAIN), lambda graph, x: graph.call_function(lambda x: x, (x,))),
        "whose meaning may change",
    ),
}


@pytest.mark.parametrize("name", NOT_CACHED)
def test_what_has_no_text_is_not_cached(plain: Options, name: str) -> None:
    make, reason = NOT_CACHED[name]
    found = caching.look_up(make(), plain)
    assert (found.outcome, reason in found.reason) == ("bypass", True), found.reason


def test_nothing_is_cached_under_compiled_autograd(plain: Options) -> None:
    with torch._dynamo.config.patch(compiled_autograd=True):
        found = caching.look_up(captured(fake(PLAIN)), plain)
    assert (found.outcome, found.reason) == ("bypass", "compiled autograd is on")
    assert caching.look_up(captured(fake(PLAIN)), plain).outcome == "miss"


def test_versions_of_other_packages_change_the_key(plain: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    package = types.ModuleType("torchvision")
    exec("def ferrite_test_twice(x): return x * 2", package.__dict__)
    monkeypatch.setitem(sys.modules, "torchvision", package)
    twice = torch._dynamo.allow_in_graph(package.ferrite_test_twice)
    function = lambda x: twice(x) + 1
    assert looked_up(plain, function, torch.ones(4)).outcome == "bypass"
    keys = []
    for version in ("1.0", "1.1", "1.0"):
        package.__version__ = version  # type: ignore[attr-defined]
        keys.append(key_of(plain, function, torch.ones(4)))
    assert keys[0] == keys[2] != keys[1]


def test_what_a_checkpoint_saves_changes_the_key(plain: Options) -> None:
    """A function of the user's says it; its code is not looked at, but it may have a digest."""

    def saves(policy: CheckpointPolicy, told: str | None) -> Callable[..., Any]:
        choose = functools.partial(create_selective_checkpoint_contexts, lambda *_, **__: policy)
        if told is not None:
            choose.cache_hash = told  # type: ignore[attr-defined]
        return lambda x: checkpoint(lambda x: (x @ x).sin(), x, use_reentrant=False, context_fn=choose)

    x = torch.ones(4, 4, requires_grad=True)
    all_of_it, nothing = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
    found = looked_up(plain, saves(all_of_it, None), x)
    assert (found.outcome, "without a cache_hash" in found.reason) == ("bypass", True)
    one = key_of(plain, saves(all_of_it, "all"), x)
    assert one == key_of(plain, saves(all_of_it, "all"), x) != key_of(plain, saves(nothing, "none"), x)


def known_by_name(x: torch.Tensor) -> torch.Tensor:
    return x


def test_functions_that_are_passed_on_are_looked_at(plain: Options) -> None:
    """As those that are called are: a name alone says nothing about the code behind it."""

    def outcome_with(argument: Any) -> caching.Lookup:
        def backend(module: GraphModule, _: Any) -> Any:
            call = next(iter(module.graph.find_nodes(op="call_method", target="relu")))
            call.kwargs = {"given": argument}
            found.append(caching.look_up(module, plain))
            call.kwargs = {}
            return module.forward

        found: list[caching.Lookup] = []
        torch._dynamo.reset()
        torch.compile(scaled, backend=backend)(torch.ones(4))
        return found[0]

    for argument in (torch.float64, torch.relu, torch.ops.aten.relu.default, torch.device("cpu")):
        assert outcome_with(argument).outcome == "miss"
    told = outcome_with(known_by_name)
    assert (told.outcome, "passes on tests.cache.test_key.known_by_name" in told.reason) == ("bypass", True)


def test_higher_order_operators(plain: Options) -> None:
    """Those that run graphs are stored; of others PyTorch is asked, but not of those that hold code of the user's."""
    key_of(plain, lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), torch.ones(4))
    operators = torch.ops.higher_order
    for name, stored in (("wrap", True), ("invoke_subgraph", True), ("call_torchbind", False), ("print", False)):
        operator = getattr(operators, name)
        seen = functools.partial(list, key_module._versions(operator, f"higher_order.{name}", "calls"))
        if stored:
            assert seen() == []
        else:
            with pytest.raises(Unsupported, match=f"higher_order.{name}, whose meaning may change"):
                seen()


# ---- why did it miss


def test_explain(tmp_path: Path) -> None:
    def run(function: Callable[..., Any], *inputs: Any, **settings: Any) -> str:
        torch._dynamo.reset()
        options = {"cache": "on", "cache_dir": str(tmp_path / "cache")} | settings
        torch.compile(function, backend="ferrite", options=options)(*inputs)
        return ferrite.cache.explain()

    def larger(x: torch.Tensor) -> torch.Tensor:
        return x.relu() * 3

    x = torch.ones(4)
    told = run(scaled, x)
    assert told.startswith("miss: nothing is stored under this key")
    assert "No other entry is stored." in told
    assert run(scaled, x).startswith("hit")
    assert "now 0: f32[5] cpu; it was made for 0: f32[4] cpu" in run(scaled, torch.ones(5))
    told = run(scaled, x, host="python")
    assert "  options: now host = 'python'; it was made for host = 'native'" in told.splitlines()
    assert len(told.splitlines()) == 3
    assert "relu, 3)" in run(larger, x)
    assert "bypass: the compile is looked at: keep_text" in run(scaled, x, keep_text=True)
    stats = ferrite.cache.stats()
    assert stats.hits >= 1
    assert stats.misses >= 4
    assert len(ferrite.cache.entries(tmp_path / "cache")) == 4
