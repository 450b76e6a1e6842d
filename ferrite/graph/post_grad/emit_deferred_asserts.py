"""Every fact that tracing assumed of a data-dependent size is checked when the size becomes known.

    u0 = _local_scalar_dense(n); y = ones([u0])
    ->  u0 = _local_scalar_dense(n); _assert_scalar(u0 >= 0, "u0 >= 0"); y = ones([u0])

Dynamo writes most of these asserts itself, with the user's message; they stay as they are and speak first. This pass
adds what only the shape environment knows: asserts that AOTAutograd's tracing found, and finite bounds of each
symbol. An assert waits until all its symbols are bound.

Tracing believes an assert as soon as it has met it, so AOTAutograd's second trace folds it: `u0 == 4` becomes
`_assert_scalar(True, ...)`, or one of its neighbours, which was true as well. Such asserts are made again here, with
their message, on the size that is measured.

Inputs that are marked as unbacked bind their symbols, as ops do. A backward graph gets its symbols from the forward,
which has asserted them: nothing is asserted there again.
"""

from __future__ import annotations

import operator
import re
from typing import Any

import sympy
import torch
from torch._guards import detect_fake_mode
from torch.fx import Graph, Node, Proxy
from torch.fx.experimental.symbolic_shapes import (
    CallMethodKey,
    ConvertIntKey,
    DivideByKey,
    ShapeEnv,
    canonicalize_bool_expr,
    resolve_unbacked_bindings,
)
from torch.utils._pytree import SequenceKey
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.reference import PythonReferenceAnalysis
from torch.utils._sympy.symbol import SymT, symbol_is_type

from ferrite.graph.query import calls

aten = torch.ops.aten


def emit_deferred_asserts(graph: Graph) -> int:
    bindings = {node: node.meta["unbacked_bindings"] for node in graph.nodes if node.meta.get("unbacked_bindings")}
    given = _symbols_of_inputs(graph)
    unbacked = {} if _is_backward(graph) else {s: node for s, node in given.items() if symbol_is_type(s, _UNBACKED)}
    shape_env = _shape_env(graph) if bindings or unbacked else None
    if shape_env is None:
        return 0
    messages = _messages(graph)
    last_assert, stated = _stated(graph)
    bound = {symbol: node for symbol, node in given.items() if symbol not in unbacked}
    emitted = 0

    def bind(symbol: sympy.Symbol, value: Node, after: Node) -> None:
        nonlocal emitted
        bound[symbol] = value
        after = max(after, value, last_assert.get(symbol, value))
        for condition in _conditions(shape_env, symbol, bound):
            canonical = canonicalize_bool_expr(condition)
            if canonical in stated or canonical is sympy.true:
                continue
            stated.add(canonical)
            after = _assert(graph, after, condition, messages.get(str(condition), str(condition)), bound)
            emitted += 1

    *_, last_input = graph.find_nodes(op="placeholder") or (None,)
    for symbol, node in unbacked.items():
        bind(symbol, node, last_input or node)
    for node, unresolved in bindings.items():
        for symbol, path in (resolve_unbacked_bindings(shape_env, unresolved) or {}).items():
            value = None if symbol in bound else _read_symbol(graph, node, path)
            if value is not None:
                bind(symbol, value, node)
    return emitted + _drop_folded(graph)


_UNBACKED = (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT)


def _is_backward(graph: Graph) -> bool:
    """AOTAutograd's partitioner names gradients that come in, and knows them, by this word."""
    return any(str(node.target).startswith("tangents_") for node in graph.find_nodes(op="placeholder"))


def _messages(graph: Graph) -> dict[str, str]:
    """What Dynamo's asserts say, by the condition that is written in it: an assert that was folded has no other."""
    said = (node.args[1] for node in calls(graph, aten._assert_scalar.default))
    found = ((_WRITTEN_CONDITION.match(message), message) for message in said if isinstance(message, str))
    return {match[1]: message for match, message in found if match is not None}


_WRITTEN_CONDITION = re.compile(r"Runtime assertion failed for expression (.+) on node '\w+'$")


def _drop_folded(graph: Graph) -> int:
    """Asserts of what is true anyway."""
    folded = [node for node in calls(graph, aten._assert_scalar.default) if node.args[0] is True]
    for node in folded:
        graph.erase_node(node)
    return len(folded)


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
    """A node that gives the symbol bound at `path` in the result of `node`: the result itself, a size or stride of it,
    or one of a tensor among several results. None for parts of a tensor subclass, which no graph after autograd has."""
    match path:
        case ():
            return node
        case (CallMethodKey(name="size"), SequenceKey(idx=dim)):
            return _part(graph, node, aten.sym_size.int, dim)
        case (CallMethodKey(name="stride"), SequenceKey(idx=dim)):
            return _part(graph, node, aten.sym_stride.int, dim)
        case (CallMethodKey(name="storage_offset"),):
            return _part(graph, node, aten.sym_storage_offset.default)
        case (SequenceKey(idx=place), *rest):
            return _read_symbol(graph, _part(graph, node, operator.getitem, place), tuple(rest))
        case (DivideByKey(divisor=step), *rest):
            return _read_symbol(graph, _part(graph, node, operator.floordiv, step), tuple(rest))
        case (ConvertIntKey(), *rest):
            return _read_symbol(graph, _part(graph, node, torch.sym_ite, 1, 0), tuple(rest))
    return None


def _part(graph: Graph, node: Node, target: Any, *args: Any) -> Node:
    """The call that reads something of a result, which may be there already."""
    for user in node.users:
        if user.target is target and user.args == (node, *args):
            return user
    with graph.inserting_after(node):
        part = graph.call_function(target, (node, *args))
    part.meta["val"] = target(node.meta["val"], *args)
    return part


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
    if limits.lower == limits.upper:
        return [*found, sympy.Eq(symbol, limits.lower)]
    if limits.lower not in (-int_oo, 0) and limits.lower.is_finite:
        found.append(sympy.Ge(symbol, limits.lower))
    if limits.upper != int_oo and limits.upper.is_finite:
        found.append(sympy.Le(symbol, limits.upper))
    return found


def _assert(graph: Graph, after: Node, condition: Any, message: str, bound: dict[sympy.Symbol, Node]) -> Node:
    """Nodes that compute `condition`, and the assert, behind `after` and every size that it reads; gives the assert."""
    after = max(after, *(bound[symbol] for symbol in condition.free_symbols))
    with graph.inserting_after(after):
        marker = graph.call_function(aten._assert_scalar.default, (True, message))
    with graph.inserting_before(marker):
        proxies = {symbol: Proxy(bound[symbol]) for symbol in condition.free_symbols}
        truth = sympy_interp(PythonReferenceAnalysis, proxies, condition).node
    for node in _without_value(truth):
        operands = torch.fx.node.map_arg(node.args, lambda source: source.meta["val"])
        node.meta["val"] = node.target(*operands)
    marker.args = (truth, message)
    marker.meta["val"] = None
    return marker


def _without_value(node: Node) -> list[Node]:
    """The nodes just made for a condition, operands first."""
    if "val" in node.meta:
        return []
    return [*(new for source in node.all_input_nodes for new in _without_value(source)), node]
