"""Options: one frozen value that is handed down; the environment is read here.

A field exists only if something reads it. Each has a `Kind`: the values that it takes, and how an environment variable
spells them. `resolve` turns what a user gave (`mode=`, `options=`) into an `Options`, and `from_environment` what the
environment says; both raise RuntimeError for a name or value that means nothing, with those that do and the nearest.
Words that only the compiler knows, as names of passes, are judged by `pipeline.check_options`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ferrite.errors import unknown

ENVIRONMENT_PREFIX = "FERRITE_"
SCHEMES = ("normal", "serialize")
EXECUTORS = ("eager", "oracle", "native")
HOSTS = ("native", "python")
PRODUCTS = ("loops", "library")
LAYOUTS = ("auto", "on", "off")
PADDINGS = ("off", "on")
CACHES = ("on", "off", "read-only", "strict")

# Names with their settings, in order, as a value that does not change.
Asked = tuple[tuple[str, tuple[tuple[str, Any], ...]], ...]


class _Refused(ValueError):
    """A value of the wrong kind; the text says what is wrong if the kind itself does not."""


@dataclass(frozen=True)
class Kind:
    """The values that an option takes. `accept` makes a value of what a user gave, or raises `_Refused`; `parse` makes
    what a user would give of an environment variable's text, or is None if there is no such variable."""

    expects: str
    accept: Callable[[Any], Any]
    parse: Callable[[str], Any] | None = str


_FLAGS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _Refused
    return value


def _flag_of_text(text: str) -> bool:
    if text and text.lower() not in _FLAGS:
        raise _Refused(unknown("word for yes or no", text, _FLAGS))
    return bool(text) and _FLAGS[text.lower()]


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _Refused
    return value


def _count(value: Any) -> int | None:
    if value is not None and (type(value) is not int or value < 0):
        raise _Refused
    return value


def _count_of_text(text: str) -> Any:
    return int(text) if text.lstrip("-").isdecimal() else text or None


def _names(value: Any) -> tuple[str, ...]:
    parts = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
    if not isinstance(parts, (tuple, list)) or not all(isinstance(part, str) for part in parts):
        raise _Refused
    return tuple(part for part in parts if part)


def _asked(value: Any) -> Asked:
    """A mapping from names to settings, of which True is none, or names alone."""
    if isinstance(value, str):
        value = _names(value)
    if not isinstance(value, (Mapping, tuple, list)):
        raise _Refused
    pairs = list(value.items()) if isinstance(value, Mapping) else [(entry, {}) for entry in value]
    pairs = [(key, {} if settings is True else settings) for key, settings in pairs]
    if not all(isinstance(key, str) and isinstance(settings, Mapping) for key, settings in pairs):
        raise _Refused
    return tuple((key, tuple(settings.items())) for key, settings in pairs)


def _checked_stages(value: Any) -> Asked:
    """As `_asked`; settings that stand beside the stages are those of each: {"pre_grad": True, "precision": 1e-4}."""
    if isinstance(value, Mapping):
        beside = {key: given for key, given in value.items() if not isinstance(given, Mapping) and given is not True}
        stages = {key: given for key, given in value.items() if key not in beside}
        value = {key: {**beside, **({} if given is True else given)} for key, given in stages.items()} or value
    return _asked(value)


def _function(value: Any) -> Any:
    if value is not None and not callable(value):
        raise _Refused
    return value


FLAG = Kind("bool", _flag, _flag_of_text)
TEXT = Kind("str", _text)
COUNT = Kind("int of at least 0 | None", _count, _count_of_text)
NAMES = Kind("tuple[str, ...]", _names)
_SETTINGS = "names alone, or with settings as {'name': {'setting': 1}}"
ASKED = Kind(_SETTINGS, _asked)
CHECKED_STAGES = Kind(_SETTINGS, _checked_stages)
FUNCTION = Kind("Callable[..., Any] | None", _function, None)


def _one_of(what: str, words: tuple[str, ...]) -> Kind:
    def accept(value: Any) -> str:
        if value not in words:
            raise _Refused(unknown(what, value, words) if isinstance(value, str) else "")
        return str(value)

    return Kind("str", accept)


def _option(default: Any, kind: Kind, doc: str) -> Any:
    return field(default=default, metadata={"kind": kind, "doc": doc})


@dataclass(frozen=True)
class Options:
    """Everything a user may set. `doc` is what `ferrite.list_options()` shows."""

    strict: bool = _option(False, FLAG, "raise where the default falls back to eager")
    disable: tuple[str, ...] = _option(
        (), NAMES, "stages or passes to leave out: 'post_grad', 'view_to_reshape', 'post_grad.view_to_reshape'"
    )
    pre_grad: Asked = _option(  # noqa: RUF009
        (), ASKED, "passes before autograd to run with settings, in order: {'normalise_ops': {'counter': 2}}"
    )
    pre_grad_rewrites: bool = _option(
        True, FLAG, "rewrite graphs before autograd; passes that users register run all the same"
    )
    pre_dispatch: bool = _option(
        False, FLAG, "graphs whose calls are ATen overloads get a list of passes of their own before autograd"
    )
    pre_dispatch_add: tuple[str, ...] = _option((), NAMES, "further passes of that list, by name")
    pre_dispatch_remove: tuple[str, ...] = _option(
        (), NAMES, "passes of that list to leave out, wherever they stand in it"
    )
    numeric_check: Asked = _option(  # noqa: RUF009
        (), CHECKED_STAGES, "run stages against what they were given: {'pre_grad': {'precision': 1e-4, 'steps': 2}}"
    )
    bisect_limit: int | None = _option(
        None, COUNT, "apply only the first N passes since the last reset; None: all of them"
    )
    bisect_rewrites: int | None = _option(
        None, COUNT, "of the last pass that bisect_limit applies, only the first N rewrites"
    )
    bisect_lowerings: int | None = _option(
        None, COUNT, "lower only the first N calls since the last reset; the others run in eager"
    )
    bisect_kernels: int | None = _option(
        None, COUNT, "make machine code of only the first N kernels since the last reset; the others are interpreted"
    )
    explain_patterns: tuple[str, ...] = _option((), NAMES, "nodes, or 'all', at which the log says why no pattern fits")
    check: bool = _option(True, FLAG, "check the graph after every pass that changed it")
    keep_text: bool = _option(False, FLAG, "keep the text before and after every pass in the record")
    decompose: tuple[str, ...] = _option((), NAMES, "further aten ops, by name, to split with PyTorch's decompositions")
    partitioner: Callable[..., Any] | None = _option(  # noqa: RUF009
        None, FUNCTION, "replaces min-cut: f(joint, inputs, *, num_fwd_outputs, ...), with a uuid() method"
    )
    keep_output_stride: bool = _option(True, FLAG, "outputs that the user sees keep eager's strides")
    donate_buffers: bool = _option(
        False, FLAG, "backward may reuse saved activations; forbids backward(retain_graph=True) later"
    )
    runtime_asserts: bool = _option(True, FLAG, "emit the asserts that data-dependent sizes ask for")
    skip_unsupported_devices: bool = _option(
        False, FLAG, "run graphs with tensors of other devices in eager instead of raising"
    )
    compile_mode: str = _option(
        "normal",
        _one_of("compile mode", SCHEMES),
        f"how a graph is compiled: {', '.join(SCHEMES)} (a round trip through bytes)",
    )
    executor: str = _option(
        "native", _one_of("executor", EXECUTORS), f"what runs ops that have a lowering: {', '.join(EXECUTORS)}"
    )
    host: str = _option(
        "native",
        _one_of("host", HOSTS),
        f"what runs between kernels: {', '.join(HOSTS)} (native where every step has a door)",
    )
    products: str = _option(
        "loops",
        _one_of("products", PRODUCTS),
        f"what small matrix products of inference become: {', '.join(PRODUCTS)} (others are a library's)",
    )
    layout: str = _option(
        "auto",
        _one_of("layout", LAYOUTS),
        f"whether convolutions run channels last: {', '.join(LAYOUTS)} (auto: if less is copied so)",
    )
    padding: str = _option(
        "off",
        _one_of("padding", PADDINGS),
        f"whether rows of inner buffers start at cache lines: {', '.join(PADDINGS)}",
    )
    fallback_random: bool = _option(
        False, FLAG, "random ops run in eager and give its stream; else lowered ones draw from a counter generator"
    )
    cache: str = _option(
        "on",
        _one_of("cache", CACHES),
        f"compiled graphs on disk: {', '.join(CACHES)} (raise where a broken disk is only logged)",
    )
    cache_dir: str = _option("", TEXT, "where they are; empty: 'ferrite' in the user's folder for caches")
    cache_megabytes: int | None = _option(
        2048, COUNT, "beyond this, what was not used for the longest time goes; None: no limit"
    )
    debug: bool = _option(False, FLAG, "write every stage of every graph below debug_dir")
    debug_inputs: bool = _option(
        False, FLAG, "the same, and save the arguments of each graph's first call, which its script then takes"
    )
    debug_dir: str = _option("ferrite_debug", TEXT, "where debug files go")
    perf_map: bool = _option(False, FLAG, "write where each kernel is to /tmp/perf-<process>.map, which perf reads")
    gdb: bool = _option(False, FLAG, "tell gdb where each kernel is, for backtraces and breakpoints")

    @property
    def has_words(self) -> bool:
        """Whether there are words that only the compiler knows to mean something."""
        return any(getattr(self, name) for name in WITH_WORDS)

    def debug_folder(self, graph: str) -> Path | None:
        """Where files about a graph go, if there are to be some."""
        return Path(self.debug_dir).absolute() / graph if self.debug or self.debug_inputs else None

    def of_a_script(self) -> dict[str, Any]:
        """What a script that compiles one graph again has to ask for, with the values that a user would give."""
        chosen = {name: getattr(self, name) for name in _FIELDS if name not in WITHOUT_EFFECT | _OF_A_LOOK}
        changed = {name: value for name, value in chosen.items() if value != _FIELDS[name].default}
        asked = {name: {key: dict(of) for key, of in changed[name]} for name in changed if name == "pre_grad"}
        return {"strict": True} | changed | asked


# `reduce-overhead` speaks of CUDA graphs: accepted, nothing to do on a CPU. The others wait for what they tune.
MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "reduce-overhead": {},
    "max-autotune": {},
    "max-autotune-no-cudagraphs": {},
}

# Options whose words `pipeline.check_options` judges.
WITH_WORDS = (
    "disable", "pre_grad", "pre_dispatch_add", "pre_dispatch_remove", "numeric_check", "explain_patterns", "decompose",
)  # fmt: skip

# Options that do not change what is made: no part of what a compiled graph is found by, so that no rewrite may ask.
WITHOUT_EFFECT = frozenset(
    {"cache", "cache_dir", "cache_megabytes", "debug_dir", "perf_map", "gdb", "strict", "partitioner"}
)

# Options under which a compile is looked at.
_OF_A_LOOK = frozenset({
    "debug", "debug_inputs", "keep_text", "explain_patterns", "numeric_check", "bisect_limit", "bisect_rewrites",
    "bisect_lowerings", "bisect_kernels",
})  # fmt: skip

_FIELDS = {entry.name: entry for entry in fields(Options)}


def list_options() -> dict[str, str]:
    """Every option with its default and what it does."""
    return {entry.name: f"{entry.metadata['doc']} (default: {entry.default!r})" for entry in fields(Options)}


def list_mode_options(mode: str | None = None) -> dict[str, Any]:
    """The options that each mode stands for, or those of one mode."""
    if mode is None:
        return {name: dict(settings) for name, settings in MODES.items()}
    return dict(MODES[known_mode(mode)])


def known_mode(mode: str) -> str:
    if mode not in MODES:
        raise RuntimeError(unknown("mode", mode, MODES))
    return mode


def resolve(base: Options, mode: str | None, options: Mapping[str, Any] | None) -> Options:
    """`base` with what the user asked for on top; raises RuntimeError before any work is done."""
    settings: dict[str, Any] = {}
    if mode is not None:
        settings.update(MODES[known_mode(mode)])
    for given, value in (options or {}).items():
        name = str(given).replace("-", "_")
        if name not in _FIELDS:
            raise RuntimeError(unknown("option", str(given), _FIELDS))
        settings[name] = _typed(name, value)
    return replace(base, **settings) if settings else base


def with_effect(options: Options) -> dict[str, Any]:
    """The options that may change what is made, by name."""
    return {name: getattr(options, name) for name in _FIELDS if name not in WITHOUT_EFFECT}


def from_environment(environment: Mapping[str, str]) -> Options:
    """Defaults with every `FERRITE_<OPTION>` applied; raises RuntimeError for a name or value that means nothing."""
    settings: dict[str, Any] = {}
    for variable, text in environment.items():
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        name = variable[len(ENVIRONMENT_PREFIX) :].lower()
        parse = kind_of(name).parse if name in _FIELDS else None
        if parse is None:
            valid = (n for n in _FIELDS if kind_of(n).parse is not None)
            raise RuntimeError(
                unknown("environment variable", variable, [ENVIRONMENT_PREFIX + n.upper() for n in valid])
            )
        try:
            settings[name] = _typed(name, parse(text))
        except (RuntimeError, ValueError) as error:
            raise RuntimeError(f"environment variable {variable}={text!r}: {error}") from None
    return replace(Options(), **settings) if settings else Options()


def kind_of(name: str) -> Kind:
    return _FIELDS[name].metadata["kind"]


def check_folders(options: Options) -> None:
    """Raise RuntimeError for a folder that the options name, that is to be written to, and that cannot be made."""
    wanted = {}
    if options.cache in ("on", "strict") and options.cache_dir:
        wanted["cache_dir"] = (options.cache_dir, 0o700)
    if options.debug or options.debug_inputs:
        wanted["debug_dir"] = (options.debug_dir, 0o777)
    for name, (folder, mode) in wanted.items():
        if why := _why_impossible(folder, mode):
            raise RuntimeError(f"Ferrite option {name!r} expects a folder that can be made, given {folder!r}: {why}")


# What an error of the system says of a path itself. A disk that is full, read-only or broken is answered by whoever
# writes to it: the same program may run on another one.
_OF_THE_PATH = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL})


def _why_impossible(folder: str, mode: int) -> str:
    try:
        os.makedirs(folder or os.curdir, mode, exist_ok=True)
    except ValueError as error:
        return str(error)
    except OSError as error:
        there = next(path for path in (Path(folder).absolute(), *Path(folder).absolute().parents) if path.exists())
        may_write = error.errno == errno.EROFS or os.access(there, os.W_OK | os.X_OK)
        if error.errno in _OF_THE_PATH or not may_write:
            return f"{there}: {os.strerror(error.errno or 0)}"
    return ""


def _typed(name: str, value: Any) -> Any:
    kind = kind_of(name)
    try:
        return kind.accept(value)
    except _Refused as why:
        given = f"given {type(value).__name__}: {value!r}"
        raise RuntimeError(str(why) or f"Ferrite option {name!r} expects {kind.expects}, {given}") from None
