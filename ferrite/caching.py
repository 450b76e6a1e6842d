"""The cache between Dynamo and AOTAutograd: a graph that was compiled before is neither traced nor compiled again.

    look_up     the key of a captured graph, and the entry under it whose guards hold: hit, miss or bypass, and why
    wrapped     a hit becomes the function that AOTAutograd would have made
    watching    a miss is compiled; what AOTAutograd then knows is stored with the compiled graphs

PyTorch's own cache of AOTAutograd's results does this with pickles and with Inductor's modules, whose import takes
longer than a small trace. Here entries are plain data (`artifact/entry.py`), and PyTorch is asked at two places only:
`graph_compile` tells what it knows of a function when it is done (Note [Watching]), and `_apply_runtime_wrappers`
makes a function of that.

Note [Watching]
    AOTAutograd calls `_cache_inference_info`, or `_cache_autograd_info`, once for each function, with everything that
    its own cache would store. Both are wrapped while Ferrite compiles, under Dynamo's lock. The second gives back a
    function that AOTAutograd calls when it has compiled the backward graph, at once or at the first `backward()`; the
    entry is stored then.
"""

from __future__ import annotations

import ast
import functools
import inspect
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import torch
from torch._dynamo.utils import CompileEventLogger, counters
from torch._functorch import aot_autograd
from torch._functorch._aot_autograd import graph_compile
from torch._functorch._aot_autograd.schemas import AOTConfig
from torch._guards import TracingContext
from torch._logging import _internal as logging_of_torch
from torch._logging import trace_structured
from torch._ops import OpOverload, OpOverloadPacket
from torch.compiler._cache import CacheArtifactRecorder
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP

from ferrite import registry
from ferrite.artifact import autograd_facts
from ferrite.artifact.backward_graph import pack_graph, unpack_graph
from ferrite.artifact.compiled import CompiledGraph
from ferrite.artifact.direct import direct
from ferrite.artifact.entry import Entry, Wrapping, bundle, decode, encode, moved_lines, objects_of, unbundle
from ferrite.artifact.key import (
    Fields,
    digest,
    fields_of,
    fields_of_machine,
    held_by,
    is_of_user,
    operators_of_users,
    sources_of,
)
from ferrite.artifact.outline import outline_of
from ferrite.artifact.store import GRAPHS, OBJECTS, Store, default_folder
from ferrite.carried import GraphArtifact
from ferrite.collection import without_collection
from ferrite.errors import BrokenCache, Unsupported
from ferrite.graph.names import resolve
from ferrite.host.nodes import Call, HostProgram
from ferrite.identity import identity_of_operator
from ferrite.options import Options, from_environment, with_effect
from ferrite.report.record import GraphRecord, Record

log = logging.getLogger(__name__)

MOST_UNDER_ONE_KEY = 8  # entries that differ in what their sizes must satisfy

# Options under which a compile is looked at, which a hit would skip.
_LOOKED_AT = {"bisect_limit": None, "bisect_rewrites": None, "bisect_lowerings": None, "bisect_kernels": None,
              "numeric_check": (), "debug": False, "debug_inputs": False, "keep_text": False,
              "explain_patterns": (), "compile_mode": "normal"}  # fmt: skip
_GRAPH_LOGS = ("pre_grad_graphs", "post_grad_graphs")  # of TORCH_LOGS; what will run is told on a hit as well


Taker = Callable[[bytes], None]  # who else wants an entry, as `bundle` writes it, once there is one


@dataclass
class Lookup:
    """What the cache said of one captured graph. `outcome`: "hit", "miss", "bypass" or "off"; or "package" if the
    caller wants the entry itself, and no other one will do."""

    outcome: str
    reason: str
    key: str = ""
    fields: Fields | None = None
    entry: Entry | None = None
    store: Store | None = None
    name: str = ""  # under which the entry was found
    sizes: tuple[torch.SymInt, ...] = ()  # the symbolic inputs, in order
    sources: tuple[str, ...] = ()  # the user's lines behind the graph
    lines: dict[str, str] | None = None  # those of the entry that are others now
    taker: Taker | None = None
    held: tuple[torch.Tensor, ...] = ()  # by the graph: its first inputs

    def fail(self, why: str) -> None:
        """An entry that was found does not work: it goes, and the graph is compiled."""
        if self.store is not None:
            self.store.discard(GRAPHS, self.name, why)
        self.outcome, self.entry = "miss", None
        self.reason = f"what was stored does not work: {why}"
        counters["ferrite"]["graph_cache_hit"] -= 1
        _tell("miss", self)


def _tell(action: str, lookup: Lookup) -> None:
    """Counts what the cache did, and tells those who watch compiles: an event, and a line of the structured trace."""
    counters["ferrite"][f"graph_cache_{action}"] += 1
    name = f"ferrite_graph_cache_{action}"
    facts = {"key": lookup.key, "reason": lookup.reason, "cache_state": action}
    CompileEventLogger.instant(name, facts)
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": f"{name}_{counters['ferrite'][f'graph_cache_{action}']}", "encoding": "json"},
        payload_fn=lambda: json.dumps(facts),
    )


_latest: list[Lookup] = []


def latest() -> Lookup | None:
    """The latest lookup of this process."""
    return _latest[-1] if _latest else None


# ---- where


def store_of(options: Options) -> Store | None:
    """The folder that the options name; None if there is to be no cache."""
    if options.cache == "off" or torch.compiler.config.force_disable_caches:
        return None
    return _opened(options.cache, options.cache_dir or default_folder(), options.cache_megabytes)


@lru_cache(maxsize=8)
def _opened(mode: str, folder: str, megabytes: int | None) -> Store:
    limit = None if megabytes is None else megabytes << 20
    store = Store(Path(folder), writable=mode != "read-only", strict=mode == "strict", limit=limit)
    if not folder:
        store.give_up("this user has no home")
    return store


# ---- looking up


def look_up(module: Any, options: Options, taker: Taker | None = None) -> Lookup:
    """Never raises, whatever is on the disk, but under `cache="strict"`."""
    try:
        found = _look_up(module, options, taker)
    except BrokenCache:
        raise
    except Exception as error:
        log.warning("Ferrite's cache: a graph has no key: %s: %s", type(error).__name__, error)
        found = Lookup("bypass", f"{type(error).__name__}: {error}")
    if found.outcome != "off":
        _tell(found.outcome, found)
        _latest[:] = [found]
    return found


def _look_up(module: Any, options: Options, taker: Taker | None) -> Lookup:
    if torch._functorch.config.force_autograd_cache:  # `aot_compile` saves what is compiled
        return Lookup("package", "", fields=fields_of_machine(), held=tuple(held_by(module).values()))
    store = store_of(options)
    if store is None:
        return Lookup("off", "the cache is off")
    if not isinstance(module, GraphModule):
        return Lookup("bypass", "a module without a graph")
    try:
        wanted = fields_of(module, options_text(options), registry.digest())
    except Unsupported as error:
        return Lookup("bypass", error.title)
    key, sizes, sources = digest(wanted), _symbolic_inputs(module), sources_of(module)
    held = tuple(held_by(module).values())
    if held:
        taker = None  # whoever has only the entry does not have them
    miss = Lookup(
        "miss", "nothing is stored under this key", key, wanted, store=store, sizes=sizes, sources=sources, taker=taker,
        held=held,
    )  # fmt: skip
    for name in _names(key):
        data = store.read(GRAPHS, name)
        if data is None:
            continue  # one that was used less often than those behind it may have gone
        told = store.discarded
        try:
            entry = decode(data, lambda sought: store.read(OBJECTS, sought))
            if entry.fields != wanted:
                raise ValueError("it was made for something else")
            lines = moved_lines(entry.sources, sources)
            if lines is None:
                miss.reason = "its lines are no longer those of the entry under this key"
                continue
            if other := redefined(entry):
                miss.reason = f"{other} does something else now"
                continue
            if _guards_hold(sizes, entry.guards):
                _hand_on(name, data, objects_of(entry), taker)
                store.note_hit(name)
                return replace(miss, outcome="hit", reason=f"found as {name[:12]}", entry=entry, name=name, lines=lines)
        except Exception as error:  # whatever an entry makes us do: it is not used
            if store.discarded == told:
                store.discard(GRAPHS, name, str(error) or type(error).__name__)
            else:  # a damaged object, which has been told of
                store.remove(GRAPHS, name)
            continue
        miss.reason = "the sizes are others than those of the entries under this key"
    if store.trouble:
        return Lookup("bypass", store.trouble)
    return miss


def _names(key: str) -> Iterator[str]:
    return (f"{key}-{number}" for number in range(MOST_UNDER_ONE_KEY))


def options_text(options: Options) -> Mapping[str, str]:
    """Those that can change what is made. Raises `Unsupported` if what is made under them is not stored."""
    watched = [name for name, idle in _LOOKED_AT.items() if getattr(options, name) != idle]
    watched += [name for name in _GRAPH_LOGS if logging_of_torch.log_state.is_artifact_enabled(name)]
    if watched:
        raise Unsupported(f"the compile is looked at: {', '.join(watched)}")
    partitioner: Any = options.partitioner
    if partitioner is not None and not callable(getattr(partitioner, "uuid", None)):
        raise Unsupported("the partitioner has no uuid()")
    if torch._dynamo.compiled_autograd.in_compiled_autograd_region or torch._dynamo.config.compiled_autograd:
        raise Unsupported("compiled autograd is on")
    texts = {name: repr(value) for name, value in with_effect(options).items()}
    if partitioner is None:
        return texts | {"partitioner": "None"}
    told = partitioner.uuid()
    if told is None:
        raise Unsupported("the partitioner says by its uuid(), None, that it is not to be cached")
    return texts | {"partitioner": f"uuid {told}"}


# ---- guards: expressions over the symbolic inputs in order, L['t0'], L['t1'], ...


def _symbolic_inputs(module: GraphModule) -> tuple[torch.SymInt, ...]:
    values = (node.meta.get("example_value") for node in module.graph.find_nodes(op="placeholder"))
    return tuple(value for value in values if isinstance(value, torch.SymInt) and value.node.has_hint())


def _shapes() -> Any:
    context = TracingContext.try_get()
    return context.fake_mode.shape_env if context is not None and context.fake_mode is not None else None


def _guards_of(sizes: tuple[torch.SymInt, ...]) -> str:
    """What the trace of a function assumed about its symbolic inputs."""
    shapes = _shapes()
    if shapes is None:
        return ""
    return shapes.produce_guards_expression(list(sizes), guards=shapes.get_pruned_guards(sizes)) or ""


def _guards_hold(sizes: tuple[torch.SymInt, ...], guards: str) -> bool:
    """Whether they hold for the sizes of this call; if so, Dynamo from now on guards on them, as after a trace."""
    if not guards:
        return True
    _check_guards(guards)
    shapes = _shapes()
    if shapes is None:
        return False
    hints = [size.node.hint for size in sizes]
    return bool(shapes.evaluate_guards_expression(guards, hints)) and bool(
        shapes.evaluate_guards_expression(guards, sizes)
    )


_GUARD_NODES = (
    ast.Expression, ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.BinOp, ast.operator, ast.Compare,
    ast.cmpop, ast.Constant, ast.Name, ast.Load, ast.Subscript, ast.Call, ast.IfExp,
)  # fmt: skip

_GUARD_FUNCTIONS = frozenset({*SYMPY_INTERP, "max", "min"})  # those of Python are written as they are


def _check_guards(text: str) -> None:
    """Raises `ValueError` for all but arithmetic and comparisons of the inputs: PyTorch evaluates them as Python."""
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"its guards cannot be read: {error}") from error
    for node in ast.walk(tree):
        known = isinstance(node, _GUARD_NODES)
        match node:
            case ast.Name():
                known = node.id == "L" or node.id in _GUARD_FUNCTIONS
            case ast.Call():
                known = isinstance(node.func, ast.Name) and node.func.id in _GUARD_FUNCTIONS and not node.keywords
            case ast.Constant():
                known = isinstance(node.value, (bool, int, float, str))
            case ast.Pow() | ast.LShift():  # numbers without end
                known = False
        if not known:
            raise ValueError(f"its guards hold a {type(node).__name__}")


# ---- a hit


def wrapped(
    entry: Entry,
    options: Options,
    lines: Mapping[str, str] | None = None,
    tell: Callable[[CompiledGraph], None] | None = None,
    held: tuple[torch.Tensor, ...] = (),
) -> Callable[..., Any]:
    """The function that AOTAutograd made when the graph was compiled; `lines`: the user's that are others now; `tell`:
    is told of each graph that will run; `held`: the tensors that the captured graph holds."""
    graphs = {phase: CompiledGraph.unpack(parcel, lines) for phase, parcel in entry.graphs.items()}
    for graph in graphs.values():
        if tell is not None:
            tell(graph)
        graph.announce(perf_map=options.perf_map, gdb=options.gdb)
    facts = autograd_facts.unpack_whole(entry.wrapping.facts)
    backward = graphs.get("backward")
    result = _result_type()(
        compiled_fw=None,
        compiled_bw=SimpleNamespace(num_symints_saved_for_bw_=entry.wrapping.saved_sizes, backward_state_indices=[])
        if backward is not None
        else None,
        aot_joint_graph_str=None,
        aot_forward_graph_str=None,
        aot_backward_graph_str=None,
        min_cut_info_str=None,
        runtime_metadata=facts,
        dispatch_wrappers=[],
        maybe_subclass_meta=None,
        num_fw_outs_saved_for_bw=entry.wrapping.saved,
        indices_of_inps_to_detach=list(entry.wrapping.detached),
        forward_time_taken_ns=0,
        backward_time_taken_ns=0,
        sanitized_aot_config=None,
        guards_expr=None,
        # Compiled autograd alone asks for the graph.
        serialized_bw_module=SimpleNamespace(deserialize=functools.partial(unpack_graph, entry.wrapping.backward))
        if backward is not None
        else None,
    )
    forward = (graphs.get("inference") or graphs["forward"]).load()
    reverse = None
    if backward is not None:
        reverse = torch._dynamo.disable(backward.load(), reason="do not trace generated backwards pass")
    function = result._apply_runtime_wrappers(forward, reverse, backward is not None, _configuration(facts))

    def call(*args: Any) -> Any:
        return function([*held, *args])

    chosen = call if held else direct(call, graphs.get("inference"), facts, len(facts.input_info))
    return torch._dynamo.disable(chosen, reason="do not trace AOT-compiled graph")


def said_by(entry: Entry) -> list[GraphRecord]:
    """What its compile said."""
    return msgspec.msgpack.decode(entry.records, type=list[GraphRecord])


def _result_type() -> Any:
    from torch._functorch._aot_autograd.aot_autograd_result import BundledAOTAutogradResult

    return BundledAOTAutogradResult


def _configuration(facts: Any) -> AOTConfig:
    return AOTConfig(
        fw_compiler=None,
        bw_compiler=None,
        partition_fn=None,
        decompositions=None,
        num_params_buffers=0,
        aot_id=next(aot_autograd.AOT_COUNTER),
        keep_inference_input_mutations=facts.keep_input_mutations,
        static_input_indices=facts.static_input_indices,
        enable_log=False,
    )


# ---- a miss


@contextmanager
def watching(lookup: Lookup, made: Mapping[str, CompiledGraph], record: Record) -> Iterator[None]:
    """While AOTAutograd works: see Note [Watching]. `made` has the compiled graphs by phase when it calls."""
    stores = lookup.outcome == "miss" and lookup.store is not None and lookup.store.writable
    if not stores and lookup.outcome != "package":
        yield
        return
    inference, autograd = graph_compile._cache_inference_info, graph_compile._cache_autograd_info
    signatures = {tell: inspect.signature(tell) for tell in (inference, autograd)}
    overlaps = _number_of_overlap_guards()

    def told(tell: Any, args: Any, kwargs: Any) -> dict[str, Any] | None:
        """What AOTAutograd says, with the guards of its trace; None if it cannot be stored."""
        with _nobody_sees(lookup):
            if _number_of_overlap_guards() != overlaps:
                raise Unsupported("inputs must not overlap otherwise than now")
            said = signatures[tell].bind(*args, **kwargs).arguments
            told = {name: said.get(name) for name in _TOLD}
            return told | {"guards": _guards_of(lookup.sizes), "operators": _operators_named_by(told["bw_module"])}
        return None

    def after_inference(*args: Any, **kwargs: Any) -> Any:
        result = inference(*args, **kwargs)
        said = told(inference, args, kwargs)
        if said is not None:
            with _nobody_sees(lookup):
                _keep(lookup, said, made, ("inference",), record)
        return result

    def after_autograd(*args: Any, **kwargs: Any) -> Any:
        result = autograd(*args, **kwargs)
        said = told(autograd, args, kwargs)
        if said is None:
            return result

        def keep(*_: Any) -> None:
            with _nobody_sees(lookup):
                _keep(lookup, said, made, ("forward", "backward"), record)

        if "backward" not in made:  # PyTorch will call this in the first backward, where Dynamo may look at frames
            return torch._dynamo.disable(keep, reason="writes to Ferrite's cache"), result[1]
        keep()
        return result

    with (
        mock.patch.object(graph_compile, "_cache_inference_info", after_inference),
        mock.patch.object(graph_compile, "_cache_autograd_info", after_autograd),
    ):
        yield


_TOLD = ("fw_metadata", "wrappers", "maybe_subclass_meta", "num_fw_outs_saved_for_bw", "_indices_of_inps_to_detach",
         "num_symints_saved_for_bw", "bw_module")  # fmt: skip


@contextmanager
def _nobody_sees(lookup: Lookup) -> Iterator[None]:
    """The graph is compiled and works: that it is not stored is no error, but under `strict`."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, Unsupported):
            if lookup.store is not None and lookup.store.strict:
                if isinstance(error, BrokenCache):
                    raise
                raise BrokenCache("a graph is not stored", ran="what makes an entry", why=str(error)) from error
            log.warning("Ferrite's cache: a graph is not stored: %s: %s", type(error).__name__, error)
        lookup.reason += f"; not stored: {error.title if isinstance(error, Unsupported) else error}"
        _tell("unstored", lookup)


@without_collection()
def _keep(
    lookup: Lookup, told: Mapping[str, Any], made: Mapping[str, CompiledGraph], phases: tuple[str, ...], record: Record
) -> None:
    """Writes an entry. Raises `Unsupported` if a part of it cannot leave the process."""
    assert lookup.fields is not None
    if lookup.outcome == "package" and lookup.held:
        raise Unsupported("the graph holds a tensor")
    if told["maybe_subclass_meta"] is not None:
        raise Unsupported("subclasses of Tensor")
    if any(wrapper.needs_post_compile for wrapper in told["wrappers"]):
        raise Unsupported("inputs that are the same tensor, or that share memory")
    if not all(phase in made for phase in phases):
        raise Unsupported("a graph runs as captured")
    if any(run.changed is None and run.note.startswith("failed") for run in record.passes):
        raise Unsupported("a pass failed")  # which is an error under `strict`
    guards = told["guards"]
    try:
        _check_guards(guards or "True")
    except ValueError as error:
        raise Unsupported("sizes of which the trace assumed more than arithmetic", why=str(error)) from error
    entry = Entry(
        lookup.fields,
        lookup.sources,
        guards,
        Wrapping(
            autograd_facts.pack(told["fw_metadata"]),
            told["num_fw_outs_saved_for_bw"],
            tuple(told["_indices_of_inps_to_detach"] or ()),
            told["num_symints_saved_for_bw"],
            pack_graph(told["bw_module"]) if "backward" in phases else b"",
        ),
        {phase: made[phase].parcel() for phase in phases},
        {},
        {}
        if lookup.outcome == "package"
        else _operators_called((made[phase].program for phase in phases), told["operators"]),
        msgspec.msgpack.encode([graph for graph in record.graphs if graph.phase != "cache"]),
    )
    if lookup.store is None:
        lookup.entry = entry
        return
    name = _free_name(lookup.store, lookup.key, guards)
    data, objects = encode(entry)
    _check_readable(data, objects)
    if write(lookup.store, name, data, objects):
        lookup.reason += f"; stored as {name[:12]}"
        _tell("saved", lookup)
        _hand_on(name, data, objects, lookup.taker)


def _operators_named_by(backward: GraphModule | None) -> dict[str, str]:
    """The operators of users in a graph that may be compiled later, with digests of what they do now."""
    found = {}
    for operator in operators_of_users(backward) if backward is not None else ():
        with suppress(Unsupported):  # which matters if what is compiled calls it
            found[str(operator)] = identity_of_operator(operator)
    return found


def _operators_called(programs: Iterable[HostProgram], then: Mapping[str, str]) -> dict[str, str]:
    """The operators of users that compiled graphs call, with digests of what they did when the graph was traced. The
    key has those of the captured graph; a trace may lead to others. Raises `Unsupported` if one cannot be read."""
    targets = {
        step.target
        for program in programs
        for part in (program, *program.functions)
        for step in part.steps
        if isinstance(step, Call)
    }
    found = [operator for operator in map(_resolved, sorted(targets)) if operator is not None and is_of_user(operator)]
    return {str(operator): then.get(str(operator)) or identity_of_operator(operator) for operator in found}


def redefined(entry: Entry) -> str | None:
    """The first operator of users, in the captured graph or those that run, that is not what it was."""
    captured = dict(line.split(" ", 1) for line in entry.fields["operators"].splitlines())
    for name, digest_then in (captured | entry.operators).items():
        operator = _resolved(name)
        if operator is None or identity_of_operator(operator) != digest_then:
            return name
    return None


def _resolved(name: str) -> OpOverload | OpOverloadPacket | None:
    try:
        thing = resolve(name)
    except (AttributeError, ImportError):
        return None
    return thing if isinstance(thing, (OpOverload, OpOverloadPacket)) else None


def _check_readable(data: bytes, objects: Mapping[str, bytes]) -> None:
    """Raises what a reader would: an entry that cannot be read again is not stored."""
    entry = decode(data, objects.get)
    autograd_facts.unpack_whole(entry.wrapping.facts)
    for parcel in entry.graphs.values():
        CompiledGraph.unpack(parcel)


def write(store: Store, name: str, entry: bytes, objects: Mapping[str, bytes]) -> bool:
    """Objects first: an entry never names what is not there."""
    return all(store.write(OBJECTS, digest, code) for digest, code in objects.items()) and store.write(
        GRAPHS, name, entry
    )


def _free_name(store: Store, key: str, guards: str) -> str:
    """Where an entry goes: over one with the same guards, else behind the others; the last place is used again."""
    name = ""
    for name in _names(key):
        data = store.read(GRAPHS, name)
        if data is None:
            break
        try:
            if outline_of(data).guards == guards:
                break
        except ValueError:
            break
    return name


# ---- torch.compiler.save_cache_artifacts and load_cache_artifacts


def put(data: bytes) -> None:
    """Writes an entry that was carried here, if it is one, into the folder that the environment names."""
    store = store_of(from_environment(os.environ))
    try:
        found = unbundle(data)
        entry = decode(found.entry, found.objects.get)
        if found.name not in _names(digest(entry.fields)):
            raise ValueError(f"{found.name!r} is not its name")
        if store is not None:
            write(store, found.name, found.entry, objects_of(entry))
    except (ValueError, LookupError) as error:
        log.warning("Ferrite's cache: an artifact is not used: %s", error)


def _hand_on(name: str, entry: bytes, objects: dict[str, bytes], taker: Taker | None) -> None:
    whole = bundle(name, entry, objects)
    CacheArtifactRecorder(GraphArtifact.type(), name).record(whole)
    if taker is not None:
        taker(whole)


def _number_of_overlap_guards() -> int:
    context = TracingContext.try_get()
    return len(context.guards_context.aotautograd_guards) if context is not None else 0
