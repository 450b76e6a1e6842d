"""Which passes run before autograd, in which order: `PASSES` by default, and what the option `pre_grad` asks for.

    {"normalise_ops": {}, "merge_nested_splits": {"counter": 2}}

A pass that is named runs even if it is off by default, with the settings given, `counter` times (once, if not given).
It runs at the place of its group; within the group `patterns` named passes run in the order of the names, after those
that run by default.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch.fx import Graph

from ferrite.errors import unknown
from ferrite.graph.describe import device_types
from ferrite.graph.ledger import ledger_of
from ferrite.graph.pre_grad import GROUPS, IDLE, PASSES, PreGradPass

Run = Callable[[Graph], int]
Asked = tuple[tuple[str, tuple[tuple[str, Any], ...]], ...]


def plan(asked: Asked, *, rewrites: bool = True, eager_draws: bool = False) -> tuple[tuple[Run, ...], tuple[Run, ...]]:
    """The passes before and after the user's own. Without `rewrites` only the latter are left. `eager_draws`: random
    numbers are to be eager's, whatever a setting says.

    Raises RuntimeError for a name or setting that does not exist, with those that do.
    """
    settings = {name: dict(values) for name, values in asked if name not in IDLE}
    known = {entry.name: entry for entry in PASSES}
    for name, values in settings.items():
        if name not in known:
            raise RuntimeError(unknown("pre_grad pass", name, (*known, *IDLE)))
        _check_settings(known[name], values)
    chosen = [entry for entry in PASSES if entry.default and entry.name not in settings]
    chosen += [known[name] for name in settings]
    chosen = [entry for entry in chosen if rewrites or entry.group == "quantise"]
    by_group = {group: [entry for entry in chosen if entry.group == group] for group in GROUPS}
    for group, entries in by_group.items():
        if group != "patterns":
            entries.sort(key=PASSES.index)
    runs = {
        group: [run for entry in entries for run in _runs(entry, settings, eager_draws)]
        for group, entries in by_group.items()
    }
    last = runs.pop("quantise")
    return tuple(run for group in runs.values() for run in group), tuple(last)


def _runs(entry: PreGradPass, settings: Mapping[str, dict[str, Any]], eager_draws: bool) -> list[Run]:
    values = dict(settings.get(entry.name, {}))
    times = values.pop("counter", 1)
    refused = entry.other_draws if eager_draws and values.get(str(entry.other_draws)) else None
    if refused is not None:
        del values[refused]

    @functools.wraps(entry.run)
    def run(graph: Graph) -> int:
        if others := _other_devices(graph, entry):
            ledger_of(graph).refuse(("graph",), f"{entry.name} is not for tensors on {', '.join(others)}")
            return 0
        if refused is not None:
            why = "the option fallback_random promises those of eager"
            ledger_of(graph).refuse(("graph",), f"{refused} gives {entry.name} random numbers of its own, and {why}")
        return entry.run(graph, **values)

    return [run if values or refused is not None or entry.devices is not None else entry.run] * times


def _other_devices(graph: Graph, entry: PreGradPass) -> list[str]:
    """The devices in a graph that a pass is not for, by the values of all nodes: a graph may have no inputs."""
    return [] if entry.devices is None else [kind for kind in device_types(graph) if kind not in entry.devices]


def _check_settings(entry: PreGradPass, values: Mapping[str, Any]) -> None:
    """Raise RuntimeError for a setting that the pass does not have, or a value unlike its default."""
    parameters = inspect.signature(entry.run).parameters.values()
    usual = {parameter.name: parameter.default for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}
    usual["counter"] = 1
    for name, value in values.items():
        if name not in usual:
            raise RuntimeError(unknown(f"setting of {entry.name}", name, usual))
        if type(value) is not type(usual[name]) or (type(value) is int and value < 0):
            expected = "True or False" if isinstance(usual[name], bool) else "a whole number of at least 0"
            raise RuntimeError(f"Ferrite's setting {name!r} of {entry.name} expects {expected}, given {value!r}")
