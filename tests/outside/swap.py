"""A module of PyTorch's tests, loaded with its backends replaced.

The tests are of PyTorch 2.6 and run with a newer torch. Whatever a test means to check, its backend "eager",
"aot_eager" or "inductor", and its calls of Inductor's `compile_fx`, become the backend that is asked for. Classes that
count or record graphs are left alone, since they look at what a backend is given and not at what it makes; a test that
uses one says so. `CompileCounterWithBackend` counts too, but hands each graph on to the backend that it names.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import os
import re
import sys
import unittest
from collections.abc import Callable
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch

BACKENDS = ("eager", "eager_noexcept", "aot_eager", "aot_eager_default_partitioner", "aot_eager_decomp_partition",
            "inductor")  # fmt: skip
COUNTERS = ("CompileCounter", "EagerAndRecordGraphs", "AotEagerAndRecordGraphs", "InductorAndRecordGraphs")
READ_CODE = ("run_and_get_code", "run_and_get_cpp_code", "run_and_get_triton_code", "run_fw_bw_and_get_code",
             "get_triton_code", "run_and_get_kernels")  # fmt: skip
# Modules with tests for the CPU only, which are skipped where the device is GPU_TYPE.
TELL_DEVICES_APART = ("inductor/test_inductor_freezing", "inductor/test_torchinductor",
                      "inductor/test_torchinductor_dynamic_shapes")  # fmt: skip
# Modules whose tests name the GPU where they make tensors, and mean any device: their source says "cpu" instead.
NAME_THE_GPU = ("inductor/test_foreach",)
_MOST_MISSING_NAMES = 60

Table = dict[str, tuple[type[unittest.TestCase], str]]


class Seen:
    """What the test that runs did so far."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.graphs, self.counts, self.reads_code = 0, False, False


def load(root: Path, name: str, backend: str, seen: Seen) -> ModuleType:
    """The module `name`, such as "dynamo/test_misc", of the source at `root`."""
    os.environ.setdefault("PYTORCH_TESTING_DEVICE_ONLY_FOR", "cpu")
    folder, _, module = name.partition("/")
    sys.path[:0] = [str(root / "test" / folder)]
    sys.path.append(str(root / "test"))
    torch.set_num_threads(1)
    if backend == "ferrite":
        import ferrite  # noqa: F401
    from torch.testing._internal import inductor_utils

    inductor_utils.HAS_CPU = True
    if name not in TELL_DEVICES_APART:
        inductor_utils.GPU_TYPE = "cpu"  # what asks for a GPU unchecked runs on the CPU
    if name in NAME_THE_GPU:
        sys.meta_path.insert(0, OnTheCpu(module))
    _replace_backends(backend, seen)
    _watch_counters(seen)
    _watch_readers_of_code(seen)
    try:
        loaded = _import(module)
    except AssertionError as error:
        if "Redefinition of test" not in str(error):
            raise
        inductor_utils.GPU_TYPE = "cuda"  # tests are made for the CPU and "the GPU": two that are named alike
        sys.modules.pop(module, None)
        loaded = _import(module)
    _bend(loaded)
    _count_nothing()
    return loaded


def tests_of(module: ModuleType) -> Table:
    """By name, "Class.method". Tests of another module, which this one imports, are left to that one."""
    table: Table = {}
    for name, kind in list(vars(module).items()):
        if not (isinstance(kind, type) and issubclass(kind, unittest.TestCase)):
            continue
        home = kind.__module__
        if home != module.__name__ and re.search(r"(^|\.)test_\w+$", home) and "torch" not in home:
            continue
        for method in unittest.TestLoader().getTestCaseNames(kind):
            table[f"{name}.{method}"] = (kind, method)
    return table


def counts_graphs(kind: type, method: str) -> bool:
    """Whether the source of a test says that it counts or records graphs."""
    try:
        text = inspect.getsource(inspect.unwrap(getattr(kind, method)))
    except (OSError, TypeError):
        return False
    return bool(re.search(r"CompileCounter\b|RecordGraphs", text))


# ---- backends


def _replace_backends(backend: str, seen: Seen) -> None:
    from torch._dynamo.backends import registry
    from torch._inductor import compile_fx

    registry._lazy_import()
    inner = registry.lookup_backend(backend)

    def replaced(module: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        seen.graphs += 1
        return inner(module, list(inputs))

    replaced._tags = ()  # type: ignore[attr-defined]  # as the registry gives every backend
    if hasattr(inner, "reset"):
        replaced.reset = inner.reset  # type: ignore[attr-defined]
    for name in BACKENDS:
        if name in registry._BACKENDS:
            registry._COMPILER_FNS[name] = replaced
    torch._TorchCompileInductorWrapper.__call__ = lambda _, module, inputs, **__: replaced(module, inputs)
    compile_fx.compile_fx = replaced


def _watch_counters(seen: Seen) -> None:
    from torch._dynamo import testing

    for name in COUNTERS:
        kind = getattr(testing, name, None)
        for method in ("__init__", "__call__") if kind is not None else ():
            setattr(kind, method, _noting(getattr(kind, method), lambda: setattr(seen, "counts", True)))


def _watch_readers_of_code(seen: Seen) -> None:
    from torch._inductor import utils

    for name in READ_CODE:
        if hasattr(utils, name):
            setattr(utils, name, _noting(getattr(utils, name), lambda: setattr(seen, "reads_code", True)))


def _noting(function: Callable[..., Any], note: Callable[[], None]) -> Callable[..., Any]:
    def noting(*args: Any, **kwargs: Any) -> Any:
        note()
        return function(*args, **kwargs)

    return noting


# ---- tests of 2.6 with today's torch


class OnTheCpu(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):  # type: ignore[misc]
    """Loads one module from its source, with the GPU's name replaced, past Python's cache of compiled files."""

    def __init__(self, name: str) -> None:
        super().__init__(name, "")

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        found = importlib.machinery.PathFinder.find_spec(fullname, path) if fullname == self.name else None
        if found is None or found.origin is None:
            return None
        self.path = found.origin
        return importlib.util.spec_from_file_location(fullname, found.origin, loader=self)

    def get_code(self, fullname: str) -> CodeType:
        source = Path(self.path).read_text()
        return self.source_to_code(re.sub(r"""(["'])cuda(:0)?\1""", '"cpu"', source).encode(), self.path)


def _import(name: str) -> ModuleType:
    """What torch no longer has under a name that the module imports is replaced by something that does nothing."""
    for _ in range(_MOST_MISSING_NAMES):
        try:
            return importlib.import_module(name)
        except ImportError as error:
            missing = re.match(r"cannot import name '(\w+)' from '([\w.]+)'", str(error))
            if missing is None:
                raise
            from torch._inductor import utils

            holder = sys.modules.get(missing[2]) or importlib.import_module(missing[2])
            setattr(holder, missing[1], getattr(utils, missing[1], None) or _stub(missing[1]))
            sys.modules.pop(name, None)
    raise ImportError(f"{name} imports more than {_MOST_MISSING_NAMES} names that torch does not have")


def _stub(name: str) -> Any:
    if not name.startswith(("skip", "requires", "expected", "xfail", "only", "unittest")):
        return False if name.isupper() else (lambda *_, **__: False)

    def decorate(*args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else (lambda function: function)

    return decorate


class AnyCount(int):
    """A number that is equal to all others, and as large as is asked."""

    def _yes(self, other: object) -> bool:
        return True

    def _no(self, other: object) -> bool:
        return False

    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = _yes  # type: ignore[assignment]
    __ne__ = _no  # type: ignore[assignment]
    __hash__ = int.__hash__


def _count_nothing() -> None:
    """Tests that compare results go on to compare Inductor's counts of its kernels, which say nothing of results."""
    from torch._inductor import metrics

    for name, value in list(vars(metrics).items()):
        if type(value) is int:
            setattr(metrics, name, AnyCount())
    metrics.reset = lambda: None


def _bend(module: ModuleType) -> None:
    """Texts of graphs differ between versions and are not compared; Dynamo's hook got an argument more."""
    import expecttest

    for kind in (unittest.TestCase, expecttest.TestCase):
        kind.assertExpectedInline = lambda _, *__, **___: None  # type: ignore[attr-defined]
    for kind in vars(module).values():
        if isinstance(kind, type) and hasattr(kind, "guard_manager_clone_hook_fn"):
            kind.guard_manager_clone_hook_fn = lambda _, *__: None
