"""How one graph is compiled: in this process as it stands, or after a round trip through bytes.

A scheme is a function with the shape of `Scheme`. `serialize` proves that graphs and results survive leaving the
process; schemes that compile elsewhere or later (a child process, first a quick version) take the same shape.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol

from torch._guards import detect_fake_mode
from torch.fx import GraphModule
from torch.fx._graph_pickler import GraphPickler
from torch.fx._graph_pickler import Options as PickleOptions

from ferrite.artifact.compiled import CompiledGraph
from ferrite.errors import Unsupported
from ferrite.options import SCHEMES, Options
from ferrite.pipeline import Inputs, compile_graph
from ferrite.report.record import GraphRecord

log = logging.getLogger(__name__)


class Scheme(Protocol):
    """From a graph after autograd to a compiled graph that is linked into this process."""

    def __call__(
        self, module: GraphModule, graph_id: int, phase: str, inputs: Inputs, options: Options, record: GraphRecord
    ) -> CompiledGraph: ...


def serialize(
    module: GraphModule, graph_id: int, phase: str, inputs: Inputs, options: Options, record: GraphRecord
) -> CompiledGraph:
    """Graph to bytes and back, compile, result to bytes and back. What cannot travel is compiled as it stands."""
    try:
        module = _through_bytes(module)
    except Exception as error:
        # Whatever a pickler may meet: a lambda, a lock, an operator without a name.
        log.debug("graph %d (%s) does not serialise, compiling as it stands: %s", graph_id, phase, error)
    compiled = compile_graph(module, graph_id, phase, inputs, options, record)
    try:
        compiled = CompiledGraph.from_bytes(compiled.to_bytes())
    except Unsupported as error:
        log.debug("the result of graph %d (%s) stays in the process: %s", graph_id, phase, error)
    compiled.load()
    return compiled


def _through_bytes(module: GraphModule) -> GraphModule:
    """The same graph, rebuilt from bytes under the same fake mode. Metadata that no stage reads stays behind."""
    values = [node.meta.get("val") for node in module.graph.nodes]
    fake_mode = detect_fake_mode(values)
    if fake_mode is None:
        raise Unsupported("a graph without fake values", why="nothing says how to rebuild its tensors")
    kept = ("val", "stack_trace", "desc", "unbacked_bindings")
    data = GraphPickler.dumps(module, PickleOptions(node_metadata_key_filter=lambda key: key in kept))
    rebuilt: Any = GraphPickler.loads(data, fake_mode)
    return rebuilt


_SCHEMES: dict[str, Scheme] = {"normal": compile_graph, "serialize": serialize}
assert tuple(_SCHEMES) == SCHEMES


def scheme_of(options: Options) -> Scheme:
    return _SCHEMES[options.compile_mode]
