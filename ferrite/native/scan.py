"""Running results along an axis, one element after the other, with the state in registers. In lanes: many at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ferrite.loops.dtypes import DType, f32, f64, i64
from ferrite.loops.index import Index
from ferrite.loops.nodes import Buffer, FoldScan, Scan
from ferrite.native.builder import Builder, Value
from ferrite.native.math import FUNCTIONS
from ferrite.native.reduce import Reducer
from ferrite.native.scope import Scope

State = tuple[Value, ...]


def emit_scan(evaluator: Reducer, scan: Scan | FoldScan, scope: Scope) -> None:
    if isinstance(scan, FoldScan):
        _emit_fold(evaluator, scan, scope)
    else:
        _emit_named(evaluator, scan, scope)


def _emit_named(evaluator: Reducer, scan: Scan, scope: Scope) -> None:
    """Sums and products of floats run in f64, as eager's."""
    b = evaluator.b
    dtype = scan.value.dtype
    start, step = _STEPS[scan.operation]
    evaluator.hoist([scan.value], scan.axis, scope)
    begin = tuple(evaluator.spread(value, scope) for value in start(b, dtype))
    with b.loop(0, evaluator.scalar_index(scan.axis.extent, scope), 1, begin) as loop:
        inner = scope.inner(axes={scan.axis: loop.index})
        position = evaluator.spread(loop.index, scope)
        state = step(b, tuple(loop.carried), evaluator.lanes(scan.value, inner), position)
        _store(evaluator, scan.targets, state, inner)
        loop.next(*state)


def _emit_fold(evaluator: Reducer, scan: FoldScan, scope: Scope) -> None:
    """The first results are the first values; only real neighbours are combined, which may divide one by the other."""
    b = evaluator.b
    evaluator.hoist(scan.values, scan.axis, scope)
    extent = evaluator.scalar_index(scan.axis.extent, scope)

    def values_at(position: Value) -> tuple[State, Scope]:
        inner = scope.inner(axes={scan.axis: position})
        return tuple(evaluator.lanes(value, inner) for value in scan.values), inner

    with b.if_(b.gt(extent, 0)):
        first, inner = values_at(b.constant(i64, 0))
        _store(evaluator, scan.targets, first, inner)
        with b.loop(1, extent, 1, first) as loop:
            following, inner = values_at(loop.index)
            state = evaluator.combine(scan.combine, loop.carried, following, inner)
            _store(evaluator, scan.targets, state, inner)
            loop.next(*state)


def _store(
    evaluator: Reducer, targets: Sequence[tuple[Buffer, tuple[Index, ...]] | None], state: State, scope: Scope
) -> None:
    for target, result in zip(targets, state, strict=False):
        if target is not None:
            buffer, place = target
            evaluator.store(buffer, place, evaluator.b.convert(result, buffer.dtype), scope)


def _wide(dtype: DType) -> DType:
    return f64 if dtype.is_float else dtype


def _running(operation: str, first: int) -> tuple[Callable[..., State], Callable[..., State]]:
    def start(b: Builder, dtype: DType) -> State:
        return (b.constant(_wide(dtype), float(first) if dtype.is_float else first),)

    def step(b: Builder, state: State, value: Value, position: Value) -> State:
        return (getattr(b, operation)(state[0], b.convert(value, state[0].dtype)),)

    return start, step


def _best(not_worse: str) -> tuple[Callable[..., State], Callable[..., State]]:
    """The last of equals and the last NaN win; nothing but a NaN takes over from a NaN. The first always does."""

    def start(b: Builder, dtype: DType) -> State:
        kind = f32 if dtype.is_half else dtype
        return b.constant(kind, False if kind.is_bool else 0.0 if kind.is_float else 0), b.constant(i64, 0)

    def step(b: Builder, state: State, value: Value, position: Value) -> State:
        best, place = state
        value = b.convert(value, best.dtype)
        better = getattr(b, not_worse)(value, best)
        if best.dtype.is_float:
            better = b.or_(better, b.isnan(value))
        better = b.or_(better, b.eq(position, 0))
        return b.select(better, value, best), b.select(better, position, place)

    return start, step


def _log_sum() -> tuple[Callable[..., State], Callable[..., State]]:
    """log(exp(a) + exp(b)) = max + log1p(exp(min - max)); of equal infinities the infinity."""

    def start(b: Builder, dtype: DType) -> State:
        return (b.constant(f64, float("-inf")),)

    def step(b: Builder, state: State, value: Value, position: Value) -> State:
        value = b.convert(value, f64)
        most, least = b.maximum(state[0], value), b.minimum(state[0], value)
        gap = FUNCTIONS["log1p"](b, FUNCTIONS["exp"](b, b.sub(least, most)))
        equal = b.and_(b.eq(most, least), b.isinf(most))
        return (b.select(equal, most, b.add(most, gap)),)

    return start, step


_STEPS: dict[str, tuple[Callable[..., State], Callable[..., State]]] = {
    "cumsum": _running("add", 0),
    "cumprod": _running("mul", 1),
    "cummax": _best("ge"),
    "cummin": _best("le"),
    "logcumsumexp": _log_sum(),
}
