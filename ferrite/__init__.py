"""Ferrite: a graph compiler for PyTorch.

    torch.compile(model, backend="ferrite")

works without importing this package; what is here makes it convenient to tune, inspect and reset.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from typing import TYPE_CHECKING, Any

SUPPORTED_TORCH = "2.13"


def _require_supported_torch() -> None:
    try:
        found = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(f"Ferrite needs PyTorch {SUPPORTED_TORCH}.*, and none is installed") from None
    if found.split("+")[0].split(".")[:2] != SUPPORTED_TORCH.split("."):
        raise ImportError(f"Ferrite works with PyTorch {SUPPORTED_TORCH}.*, and {found} is installed")


_require_supported_torch()

from ferrite import errors  # noqa: E402
from ferrite.options import list_mode_options, list_options  # noqa: E402

if TYPE_CHECKING:
    from ferrite import cache as cache
    from ferrite.report.record import Record

__version__ = "0.1.0"
__all__ = [
    "bisect", "cache", "compile", "errors", "if_option", "last_record", "list_mode_options", "list_options",
    "register_op_version", "register_pass", "register_pattern", "release_memory", "reset", "watch_graphs",
]  # fmt: skip


if "torch" in sys.modules:  # which then must know our artifacts; else the first compile tells it of them
    from ferrite import carried as carried


def __getattr__(name: str) -> Any:
    """`ferrite.cache` is loaded when it is asked for."""
    if name != "cache":
        raise AttributeError(f"module 'ferrite' has no attribute {name!r}")
    return importlib.import_module("ferrite.cache")


def compile(
    model: Any = None, *, fullgraph: bool = False, dynamic: bool | None = None, mode: str | None = None, **options: Any
) -> Any:
    """`torch.compile` with Ferrite as backend; further keywords are Ferrite's options. Also a decorator."""
    import torch

    if model is None:
        return lambda function: compile(function, fullgraph=fullgraph, dynamic=dynamic, mode=mode, **options)
    from ferrite.backend import chosen_options

    chosen_options(mode, options)  # what means nothing is an error here, not at the first call
    return torch.compile(
        model, backend="ferrite", fullgraph=fullgraph, dynamic=dynamic, mode=mode, options=options or None
    )


def bisect(function: Any, inputs: Any, **keywords: Any) -> Any:
    """What makes `function(*inputs)` differ from eager: a pass, the lowering of a call, a kernel, the native host or an
    option, if one does. See `ferrite.bisection.bisect`."""
    from ferrite.bisection import bisect

    return bisect(function, inputs, **keywords)


def register_pass(stage: str, function: Any, **place: Any) -> Any:
    """Run your own pass in a stage, `before=` or `after=` another one; also a context manager.
    See `ferrite.extension.register_pass`."""
    from ferrite.extension import register_pass

    return register_pass(stage, function, **place)


def register_op_version(op: Any, version: str | None) -> None:
    """The version of an operator whose code cannot be read, so that graphs that call it are cached. See
    `ferrite.extension.register_op_version`."""
    from ferrite.extension import register_op_version

    register_op_version(op, version)


def register_pattern(search: Any, replacement: Any, example_inputs: Any, **settings: Any) -> Any:
    """Put one function in place of another wherever it stands in a graph; also a context manager.
    See `ferrite.extension.register_pattern`."""
    from ferrite.extension import register_pattern

    return register_pattern(search, replacement, example_inputs, **settings)


def if_option(name: str, wanted: Any = True) -> Any:
    """An `extra_check` for a pattern that is only for compiles in which an option has this value."""
    from ferrite.extension import if_option
    from ferrite.options import Options, resolve

    resolve(Options(), None, {name: wanted})  # a misspelt option is an error here
    return if_option(name, wanted)


def last_record() -> Record | None:
    """What the latest compile in this process did: stages, passes, decisions, fallbacks. `print` it."""
    from ferrite.backend import last_record

    return last_record()


def watch_graphs(function: Any) -> Any:
    """Give `function` every graph that will run, compiled or found in the cache: its code, its text, what it calls;
    also a context manager. See `ferrite.report.watch`."""
    from ferrite.report.watch import watch_graphs

    return watch_graphs(function)


def reset() -> None:
    """Forget every compiled function, as `torch._dynamo.reset()` does, and what earlier compiles left behind."""
    import torch._dynamo

    from ferrite import backend

    torch._dynamo.reset()
    backend.reset()


def release_memory() -> None:
    """Give back the memory that compiled graphs keep between calls; the next call takes it anew."""
    from ferrite.artifact.doors import release_memory

    release_memory()
