"""Options: one frozen value that is handed down; the environment is read here, once.

A field exists only if something reads it. `resolve` turns what a user gave (`mode=`, `options=`) into an `Options`,
and refuses unknown names and wrong types with a message that lists the valid ones.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

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


@dataclass(frozen=True)
class Options:
    """Everything a user may set. `doc` is what `ferrite.list_options()` shows."""

    strict: bool = field(default=False, metadata={"doc": "raise where the default falls back to eager"})
    disable: tuple[str, ...] = field(
        default=(),
        metadata={"doc": "stages or passes to leave out: 'post_grad', 'view_to_reshape', 'post_grad.view_to_reshape'"},
    )
    pre_grad: Asked = field(
        default=(),
        metadata={"doc": "passes before autograd to run with settings, in order: {'normalise_ops': {'counter': 2}}"},
    )
    pre_grad_rewrites: bool = field(
        default=True, metadata={"doc": "rewrite graphs before autograd; passes that users register run all the same"}
    )
    pre_dispatch: bool = field(
        default=False,
        metadata={"doc": "graphs whose calls are ATen overloads get a list of passes of their own before autograd"},
    )
    pre_dispatch_add: tuple[str, ...] = field(default=(), metadata={"doc": "further passes of that list, by name"})
    pre_dispatch_remove: tuple[str, ...] = field(
        default=(), metadata={"doc": "passes of that list to leave out, wherever they stand in it"}
    )
    numeric_check: Asked = field(
        default=(),
        metadata={"doc": "run stages against what they were given: {'pre_grad': {'precision': 1e-4, 'steps': 2}}"},
    )
    bisect_limit: int | None = field(
        default=None, metadata={"doc": "apply only the first N passes since the last reset; None: all of them"}
    )
    bisect_rewrites: int | None = field(
        default=None, metadata={"doc": "of the last pass that bisect_limit applies, only the first N rewrites"}
    )
    explain_patterns: tuple[str, ...] = field(
        default=(), metadata={"doc": "nodes, or 'all', at which the log says why no pattern fits"}
    )
    check: bool = field(default=True, metadata={"doc": "check the graph after every pass that changed it"})
    keep_text: bool = field(default=False, metadata={"doc": "keep the text before and after every pass in the record"})
    decompose: tuple[str, ...] = field(
        default=(), metadata={"doc": "further aten ops, by name, to split with PyTorch's decompositions"}
    )
    partitioner: Callable[..., Any] | None = field(
        default=None,
        metadata={"doc": "replaces min-cut: f(joint, inputs, *, num_fwd_outputs, ...), with a uuid() method"},
    )
    keep_output_stride: bool = field(default=True, metadata={"doc": "outputs that the user sees keep eager's strides"})
    donate_buffers: bool = field(
        default=False,
        metadata={"doc": "backward may reuse saved activations; forbids backward(retain_graph=True) later"},
    )
    runtime_asserts: bool = field(default=True, metadata={"doc": "emit the asserts that data-dependent sizes ask for"})
    skip_unsupported_devices: bool = field(
        default=False, metadata={"doc": "run graphs with tensors of other devices in eager instead of raising"}
    )
    compile_mode: str = field(
        default="normal",
        metadata={"doc": f"how a graph is compiled: {', '.join(SCHEMES)} (a round trip through bytes)"},
    )
    executor: str = field(
        default="native", metadata={"doc": f"what runs ops that have a lowering: {', '.join(EXECUTORS)}"}
    )
    host: str = field(
        default="native",
        metadata={"doc": f"what runs between kernels: {', '.join(HOSTS)} (native where every step has a door)"},
    )
    products: str = field(
        default="loops",
        metadata={
            "doc": f"what small matrix products of inference become: {', '.join(PRODUCTS)} (others are a library's)"
        },
    )
    layout: str = field(
        default="auto",
        metadata={"doc": f"whether convolutions run channels last: {', '.join(LAYOUTS)} (auto: if less is copied so)"},
    )
    padding: str = field(
        default="off",
        metadata={"doc": f"whether rows of inner buffers start at cache lines: {', '.join(PADDINGS)}"},
    )
    fallback_random: bool = field(
        default=False,
        metadata={
            "doc": "random ops run in eager and give its stream; else lowered ones draw from a counter generator"
        },
    )
    cache: str = field(
        default="on",
        metadata={"doc": f"compiled graphs on disk: {', '.join(CACHES)} (raise where a broken disk is only logged)"},
    )
    cache_dir: str = field(
        default="", metadata={"doc": "where they are; empty: 'ferrite' in the user's folder for caches"}
    )
    cache_megabytes: int | None = field(
        default=2048, metadata={"doc": "beyond this, what was not used for the longest time goes; None: no limit"}
    )
    debug: bool = field(default=False, metadata={"doc": "write every stage of every graph below debug_dir"})
    debug_dir: str = field(default="ferrite_debug", metadata={"doc": "where debug files go"})
    perf_map: bool = field(
        default=False, metadata={"doc": "write where each kernel is to /tmp/perf-<process>.map, which perf reads"}
    )
    gdb: bool = field(default=False, metadata={"doc": "tell gdb where each kernel is, for backtraces and breakpoints"})

    @property
    def names_passes(self) -> bool:
        """Whether there are names that only the passes themselves know to be right."""
        return bool(self.pre_grad or self.pre_dispatch_add or self.pre_dispatch_remove or self.numeric_check)

    def debug_folder(self, graph: str) -> Path | None:
        """Where files about a graph go, if there are to be some."""
        return Path(self.debug_dir).absolute() / graph if self.debug else None


# `reduce-overhead` speaks of CUDA graphs: accepted, nothing to do on a CPU. The others wait for what they tune.
MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "reduce-overhead": {},
    "max-autotune": {},
    "max-autotune-no-cudagraphs": {},
}

# Options that do not change what is made: no part of what a compiled graph is found by, so that no rewrite may ask.
WITHOUT_EFFECT = frozenset(
    {"cache", "cache_dir", "cache_megabytes", "debug_dir", "perf_map", "gdb", "strict", "partitioner"}
)

_CHOICES = {
    "compile_mode": SCHEMES,
    "executor": EXECUTORS,
    "host": HOSTS,
    "products": PRODUCTS,
    "layout": LAYOUTS,
    "padding": PADDINGS,
    "cache": CACHES,
}
_FIELDS = {entry.name: entry for entry in fields(Options)}
_KINDS: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "str": (str,),
    "int | None": (int, type(None)),
    "tuple[str, ...]": (tuple, list, str),
    "Asked": (Mapping, tuple, list, str),
    "Callable[..., Any] | None": (object,),
}


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
        raise RuntimeError(_unknown("mode", mode, MODES))
    return mode


def resolve(base: Options, mode: str | None, options: Mapping[str, Any] | None) -> Options:
    """`base` with what the user asked for on top; raises RuntimeError before any work is done."""
    settings: dict[str, Any] = {}
    if mode is not None:
        settings.update(MODES[known_mode(mode)])
    for given, value in (options or {}).items():
        name = str(given).replace("-", "_")
        if name not in _FIELDS:
            raise RuntimeError(_unknown("option", str(given), _FIELDS))
        settings[name] = _typed(name, value)
    return replace(base, **settings) if settings else base


def with_effect(options: Options) -> dict[str, Any]:
    """The options that may change what is made, by name."""
    return {name: getattr(options, name) for name in _FIELDS if name not in WITHOUT_EFFECT}


def from_environment(environment: Mapping[str, str]) -> Options:
    """Defaults with every `FERRITE_<OPTION>` applied; a name or value that means nothing is reported and left out."""
    settings: dict[str, Any] = {}
    for variable, text in environment.items():
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        name = variable[len(ENVIRONMENT_PREFIX) :].lower()
        if name not in _FIELDS or name == "partitioner":
            log.warning(
                "%s", _unknown("environment variable", variable, [ENVIRONMENT_PREFIX + n.upper() for n in _FIELDS])
            )
            continue
        try:
            settings[name] = _typed(name, _parse(name, text))
        except (RuntimeError, ValueError) as error:
            log.error("%s=%r is ignored: %s", variable, text, error)
            # Children would only repeat the message.
            os.environ.pop(variable, None)
    return replace(Options(), **settings)


def _parse(name: str, text: str) -> Any:
    match _FIELDS[name].type:
        case "bool":
            words = {
                "1": True,
                "true": True,
                "yes": True,
                "on": True,
                "0": False,
                "false": False,
                "no": False,
                "off": False,
                "": False,
            }
            if text.lower() not in words:
                raise ValueError(f"expected one of {', '.join(w for w in words if w)}")
            return words[text.lower()]
        case "int | None":
            return int(text) if text else None
        case _:
            return text


def _typed(name: str, value: Any) -> Any:
    expected = str(_FIELDS[name].type)
    kinds = _KINDS[expected]
    wrong = not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds and object not in kinds)
    if name == "partitioner":
        wrong = value is not None and not callable(value)
    if wrong:
        raise RuntimeError(f"Ferrite option {name!r} expects {expected}, given {type(value).__name__}: {value!r}")
    if expected == "tuple[str, ...]":
        parts = [part.strip() for part in value.split(",")] if isinstance(value, str) else list(value)
        if not all(isinstance(part, str) for part in parts):
            kinds_given = ", ".join(type(part).__name__ for part in parts)
            raise RuntimeError(f"Ferrite option {name!r} expects {expected}, given a list of {kinds_given}: {value!r}")
        return tuple(part for part in parts if part)
    if expected == "Asked":
        return _asked(name, value)
    if name in _CHOICES and value not in _CHOICES[name]:
        raise RuntimeError(_unknown(name.replace("_", " "), value, _CHOICES[name]))
    return value


def _asked(name: str, value: Any) -> Asked:
    """A mapping from names to settings, of which True is none, or names alone."""
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    pairs = list(value.items()) if isinstance(value, Mapping) else [(entry, {}) for entry in value]
    pairs = [(key, {} if settings is True else settings) for key, settings in pairs]
    if name == "numeric_check":
        pairs = _spread_settings(pairs)
    if not all(isinstance(key, str) and isinstance(settings, Mapping) for key, settings in pairs):
        form = "names alone, or with settings as {'name': {'setting': 1}}"
        raise RuntimeError(f"Ferrite option {name!r} expects {form}, given {value!r}")
    return tuple((key, tuple(settings.items())) for key, settings in pairs)


def _spread_settings(pairs: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Settings that stand beside the stages are those of each of them: {"pre_grad": True, "precision": 1e-4}."""
    beside = {key: value for key, value in pairs if not isinstance(value, Mapping)}
    stages = [(key, settings) for key, settings in pairs if isinstance(settings, Mapping)]
    return [(key, {**beside, **settings}) for key, settings in stages] if stages else pairs


def _unknown(kind: str, name: str, valid: Mapping[str, Any] | list[str] | tuple[str, ...]) -> str:
    nearest = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.5)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    return f"Unknown Ferrite {kind} {name!r}.{hint} Valid ones: {', '.join(sorted(valid))}"
