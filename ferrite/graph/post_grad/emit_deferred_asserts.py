"""Every fact that tracing assumed of a data-dependent size is checked when the size becomes known.

    u0 = _local_scalar_dense(n); y = ones([u0])
    ->  u0 = _local_scalar_dense(n); _assert_scalar(u0 >= 0, "u0 >= 0"); y = ones([u0])

Dynamo writes most of these asserts itself, with the user's message; they stay as they are and speak first. This pass
adds what only the shape environment knows: asserts that AOTAutograd's tracing found, and finite bounds of each
symbol. An assert waits until all its symbols are bound. A backward graph gets its symbols as inputs: nothing is
asserted there again.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch._guards import detect_fake_mode
from torch.fx import Graph, Node, Proxy
from torch.fx.experimental.symbolic_shapes import (
    CallMethodKey,
    ShapeEnv,
    canonicalize_bool_expr,
    resolve_unbacked_bindings,
)
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.reference import PythonReferenceAnalysis

from ferrite.graph.query import calls

aten = torch.ops.aten


def emit_deferred_asserts(graph: Graph) -> int:
    bindings = {node: node.meta["unbacked_bindings"] for node in graph.nodes if node.meta.get("unbacked_bindings")}
    shape_env = _shape_env(graph) if bindings else None
    if shape_env is None:
        return 0
    bound = _symbols_of_inputs(graph)
    last_assert, stated = _stated(graph)
    emitted = 0
    for node, unresolved in bindings.items():
        for symbol, path in (resolve_unbacked_bindings(shape_env, unresolved) or {}).items():
            if symbol in bound:
                continue
            value = _read_symbol(graph, node, path)
            if value is None:
                continue
            bound[symbol] = value
            after = max(node, value, last_assert.get(symbol, value))
            for condition in _conditions(shape_env, symbol, bound):
                canonical = canonicalize_bool_expr(condition)
                if canonical in stated or canonical is sympy.true:
                    continue
                stated.add(canonical)
                after = _assert(graph, after, condition, bound)
                emitted += 1
    return emitted


def _shape_env(graph: Graph) -> ShapeEnv | None:
    mode = detect_fake_mode([node.meta.get("val") for node in graph.nodes])
    return mode.shape_env if mode is not None else None


def _symbols_of_inputs(graph: Graph) -> dict[sympy.Symbol, Node]:
    """The symbols that arrive as inputs of their own."""
    found: dict[sympy.Symbol, Node] = {}
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and isinstance(value.node.expr, sympy.Symbol):
            found.setdefault(value.node.expr, node)
    return found


def _stated(graph: Graph) -> tuple[dict[sympy.Symbol, Node], set[Any]]:
    """What the graph asserts already, and for each symbol the last assert that mentions it."""
    last: dict[sympy.Symbol, Node] = {}
    stated: set[Any] = set()
    for node in calls(graph, aten._assert_scalar.default):
        condition = node.args[0]
        value = condition.meta.get("val") if isinstance(condition, Node) else None
        if not isinstance(value, torch.SymBool):
            continue
        stated.add(canonicalize_bool_expr(value.node.expr))
        for symbol in value.node.expr.free_symbols:
            last[symbol] = node
    return last, stated


def _read_symbol(graph: Graph, node: Node, path: tuple[Any, ...]) -> Node | None:
    """A node that gives the symbol bound at `path` in the result of `node`: the result itself, or a size of it."""
    if path == ():
        return node
    match path:
        case (CallMethodKey(name="size"), *rest) if len(rest) == 1:
            dim = rest[0].idx
            for user in node.users:
                if user.target is aten.sym_size.int and user.args == (node, dim):
                    return user
            with graph.inserting_after(node):
                size = graph.call_function(aten.sym_size.int, (node, dim))
            size.meta["val"] = node.meta["val"].shape[dim]
            return size
    # A size inside a tuple of results: the getitem node that reads it carries no binding; its asserts are Dynamo's.
    return None


def _conditions(shape_env: ShapeEnv, symbol: sympy.Symbol, bound: dict[sympy.Symbol, Node]) -> list[Any]:
    """Asserts on `symbol` whose symbols are all bound, then its finite bounds."""
    found = [
        pending.expr
        for waiting in (*bound, symbol)
        for pending in shape_env.deferred_runtime_asserts.get(waiting, ())
        if symbol in pending.expr.free_symbols and pending.expr.free_symbols <= bound.keys()
    ]
    limits = shape_env.var_to_range.get(symbol)
    if limits is None or not limits.is_int:
        return found
    if limits.lower not in (-int_oo, 0) and limits.lower.is_finite:
        found.append(sympy.Ge(symbol, limits.lower))
    if limits.upper != int_oo and limits.upper.is_finite:
        found.append(sympy.Le(symbol, limits.upper))
    return found


def _assert(graph: Graph, after: Node, condition: Any, bound: dict[sympy.Symbol, Node]) -> Node:
    """Nodes that compute `condition`, and the assert, behind `after`; gives the assert."""
    with graph.inserting_after(after):
        marker = graph.call_function(aten._assert_scalar.default, (True, str(condition)))
    with graph.inserting_before(marker):
        proxies = {symbol: Proxy(bound[symbol]) for symbol in condition.free_symbols}
        truth = sympy_interp(PythonReferenceAnalysis, proxies, condition).node
    for node in _without_value(truth):
        operands = torch.fx.node.map_arg(node.args, lambda source: source.meta["val"])
        node.meta["val"] = node.target(*operands)
    marker.args = (truth, str(condition))
    marker.meta["val"] = None
    return marker


def _without_value(node: Node) -> list[Node]:
    """The nodes just made for a condition, operands first."""
    if "val" in node.meta:
        return []
    return [*(new for source in node.all_input_nodes for new in _without_value(source)), node]
