"""Many tanh, sigmoid or relu calls become one (PRE-16), and the limits and rules that all batching keeps (PRE-12)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph
from torch.nn import functional as F

from ferrite.graph.arguments import find
from ferrite.graph.ledger import keep_ledger
from ferrite.graph.pieces import item_of, read_join, read_unbind
from ferrite.graph.pre_grad.batch import Limits
from ferrite.graph.pre_grad.batch_clamp import batch_clamp
from ferrite.graph.pre_grad.batch_detach import batch_detach
from ferrite.graph.pre_grad.batch_dropout import batch_dropout
from ferrite.graph.pre_grad.batch_layernorm import batch_layernorm
from ferrite.graph.pre_grad.batch_linear import batch_linear
from ferrite.graph.pre_grad.batch_linear_lhs import batch_linear_lhs
from ferrite.graph.pre_grad.batch_nan_to_num import batch_nan_to_num
from ferrite.graph.pre_grad.batch_relu import batch_relu
from ferrite.graph.pre_grad.batch_sigmoid import batch_sigmoid
from ferrite.graph.pre_grad.batch_tanh import batch_tanh
from ferrite.graph.pre_grad.drop_unbind_joins import drop_unbind_joins
from ferrite.graph.pre_grad.simplify_split_joins import simplify_split_joins
from tests.pre_grad.harness import capture, keeps, rewrites

FIVE = [torch.randn(2, 3) for _ in range(5)]
SIX = [torch.randn(2, 3) for _ in range(6)]
WEIGHT = torch.randn(3, 3)
UNARY = [(batch_tanh, torch.tanh), (batch_sigmoid, torch.sigmoid), (batch_relu, torch.relu)]


def with_settings(batch: Any, **settings: Any) -> Any:
    @functools.wraps(batch)
    def run(graph: Any) -> int:
        return batch(graph, **settings)

    return run


def each(op: Callable[..., Any]) -> Callable[..., Any]:
    """The op on every input; the results are read by one cat."""
    return lambda *tensors: torch.cat([op(t) for t in tensors])


@pytest.mark.parametrize(("batch", "op"), UNARY, ids=["tanh", "sigmoid", "relu"])
def test_five_calls_become_one(batch: Any, op: Any) -> None:
    rewrites(batch, each(op), FIVE, times=1, left={"stack": 1, op.__name__: 1, "unbind": 1})


def test_every_spelling_is_the_same_call() -> None:
    def function(a: Any, b: Any, c: Any, d: Any, e: Any) -> Any:
        return torch.cat([torch.relu(a), b.relu(), F.relu(c), F.relu(d, False), F.relu(input=e, inplace=False)])

    rewrites(batch_relu, function, FIVE, times=1, left={"relu": 1}, exact=True)


def test_results_that_are_returned_have_memory_of_their_own() -> None:
    rewrites(batch_tanh, lambda *tensors: [torch.tanh(t) for t in tensors], FIVE, times=1, left={"tanh": 1, "clone": 5})


def test_ten_and_ten_become_one_and_one() -> None:
    def function(x: Any) -> Any:
        first, second = x.split(20, 1)
        gates = [torch.sigmoid(part) for half in (first, second) for part in half.split(2, 1)]
        return torch.cat([torch.relu(gate) for gate in gates], 1)

    left = {"sigmoid": 1, "relu": 1, "stack": 2}
    outcome = rewrites([batch_sigmoid, batch_relu], function, [torch.randn(3, 40)], times=2, left=left)
    gates, _ = (read_unbind(node) for node in find(outcome.module.graph, "unbind"))
    _, second = (read_join(node) for node in find(outcome.module.graph, "stack"))
    assert gates is not None
    assert second is not None
    # The stack puts together all that the unbind took apart, in order: what drops such a pair drops this one.
    assert [item_of(part) for part in second.parts] == [(gates.node, index) for index in range(20)]
    assert (gates.dim, second.dim, gates.count) == (0, 0, 20)


def test_passes_over_splits_and_cats_take_the_stacks_away() -> None:
    """Ten sigmoids of parts of one tensor, and ten relus of parts of another, are one each, and nothing is copied."""

    def function(x: Any) -> Any:
        first = torch.cat([torch.sigmoid(part) for part in torch.split(x, 5, 1)], 1)
        return torch.cat([torch.relu(part) for part in torch.split(first * 2, 5, 1)], 1) + 1

    captured = capture(function, [torch.randn(4, 50)])
    batches, left = [batch_sigmoid, batch_relu], {"sigmoid": 1, "relu": 1}
    rewrites(batches, captured, times=2, left={**left, "stack": 2, "cat": 2, "split": 2, "unbind": 2})
    joins = [drop_unbind_joins, simplify_split_joins]
    none = dict.fromkeys(("stack", "cat", "split", "unbind"), 0)
    rewrites([*batches, *joins], captured, times=6, left={**left, **none})


def test_a_layer_above_becomes_one_too() -> None:
    """Each of the second layer reads two of the first; only their stack reads all."""

    def function(*tensors: Any) -> Any:
        first = [torch.tanh(t) for t in tensors]
        return torch.cat([torch.tanh(first[i] + first[i - 1]) for i in range(5)])

    rewrites(batch_tanh, function, FIVE, times=2, left={"tanh": 2})


def test_a_layer_below_that_is_read_first() -> None:
    """The first layer is found first, and the second then reads what it became."""

    def function(*tensors: Any) -> Any:
        first = [torch.tanh(t) for t in tensors]
        return torch.cat([torch.tanh(t) for t in first]), torch.cat(first)

    rewrites(batch_tanh, function, FIVE, times=2, left={"tanh": 2})


def test_inputs_that_are_made_between_the_members() -> None:
    """The one op stands below the last of its inputs, and what reads the first results moves below it."""

    def function(*tensors: Any) -> Any:
        return torch.cat([torch.tanh(t * 2) + 1 for t in tensors])

    rewrites(batch_tanh, function, FIVE, times=1, left={"tanh": 1})


def test_members_that_need_each_other_stay_apart() -> None:
    def function(a: Any, b: Any, c: Any, d: Any) -> Any:
        first = torch.tanh(a)
        return torch.cat([first, torch.tanh(b), torch.tanh(c), torch.tanh(d), torch.tanh(first)])

    keeps(batch_tanh, function, FIVE[:4])
    rewrites(with_settings(batch_tanh, least=4), function, FIVE[:4], times=1, left={"tanh": 2})


def test_the_usual_limits() -> None:
    assert Limits() == Limits(least=5, most=300, depth=5, same_parent=False, same_users=False)


def test_few_stay_and_many_become_several() -> None:
    keeps(batch_tanh, each(torch.tanh), FIVE[:4])
    six = capture(each(torch.tanh), SIX)
    rewrites(batch_tanh, six, times=1, left={"tanh": 1})
    rewrites(with_settings(batch_tanh, least=2, most=3), six, times=2, left={"tanh": 2}, again=None)
    rewrites(with_settings(batch_tanh, least=2, most=4), six, times=2, left={"tanh": 2}, again=None)
    rewrites(with_settings(batch_tanh, least=3, most=4), six, times=1, left={"tanh": 3})
    keeps(with_settings(batch_tanh, least=7), six)


def test_far_away_is_not_close() -> None:
    def function(*tensors: Any) -> Any:
        return torch.cat([torch.tanh(t).neg().abs().neg() for t in tensors])

    captured = capture(function, FIVE)
    keeps(with_settings(batch_tanh, depth=3), captured)
    rewrites(with_settings(batch_tanh, depth=4), captured, times=1, left={"tanh": 1})


def test_only_parts_of_one_tensor() -> None:
    def function(x: Any, y: Any) -> Any:
        return torch.cat([torch.tanh(part) for source in (x, y) for part in source.split(1)])

    captured = capture(function, [torch.randn(5, 3), torch.randn(4, 3)])
    rewrites(batch_tanh, captured, times=1, left={"tanh": 1})
    rewrites(with_settings(batch_tanh, same_parent=True), captured, times=1, left={"tanh": 5})


def test_only_results_that_are_read_by_the_same_kind_of_op() -> None:
    def function(*tensors: Any) -> Any:
        results = [torch.tanh(t) for t in tensors]
        return torch.cat([r.exp() for r in results[:3]] + [r.abs() for r in results[3:]])

    captured = capture(function, SIX)
    rewrites(batch_tanh, captured, times=1, left={"tanh": 1})
    keeps(with_settings(batch_tanh, same_users=True), captured)
    rewrites(with_settings(batch_tanh, same_users=True, least=3), captured, times=2, left={"tanh": 2})


@pytest.mark.parametrize("other", [torch.randn(2, 3).half(), torch.randn(3, 2), torch.randn(6), torch.randn(2, 3, 1)])
def test_other_dtypes_and_shapes_are_no_members(other: torch.Tensor) -> None:
    """A stack would promote f16 to f32."""

    def function(*tensors: Any) -> Any:
        return torch.cat([torch.tanh(t).flatten() for t in tensors])

    keeps(batch_tanh, function, [*FIVE[:4], other])
    rewrites(batch_tanh, function, [*FIVE, other], times=1, left={"tanh": 2})


def test_other_devices_are_no_members() -> None:
    graph = Graph()
    with FakeTensorMode():
        results = []
        for device in ["cpu"] * 3 + ["cuda"] * 3:
            source = graph.placeholder("x")
            source.meta["example_value"] = torch.empty(2, 3, device=device)
            results.append(graph.call_function(torch.tanh, (source,)))
            results[-1].meta["example_value"] = torch.empty(2, 3, device=device)
        graph.output(tuple(results))
    assert batch_tanh(graph) == 0
    assert batch_tanh(graph, least=3) == 2


def test_no_more_sets_than_the_limit_allows() -> None:
    captured = capture(each(torch.tanh), SIX)
    with keep_ledger(captured.module.graph, "batch_tanh", limit=1):
        assert batch_tanh(captured.module.graph, least=2, most=3) == 1
    assert len(find(captured.module.graph, "tanh")) == 4


def test_sizes_that_vary_may_be_the_same() -> None:
    rewrites(batch_tanh, lambda x: torch.cat([torch.tanh(x + i) for i in range(5)]), [FIVE[0]], times=1, dynamic=True)

    def function(*tensors: Any) -> Any:
        return torch.cat([torch.tanh(t) for t in tensors])

    unlike = [torch.randn(rows, 3) for rows in (2, 3, 4, 5, 6)]
    keeps(batch_tanh, function, unlike, dynamic=True)


def test_results_that_are_written_stay_apart() -> None:
    """Autograd refuses a write to one of several views."""

    def function(*tensors: Any) -> Any:
        results = [torch.tanh(t) for t in tensors]
        results[2] += 1
        return torch.cat(results)

    keeps(batch_tanh, function, FIVE, because="may be written by")
    rewrites(batch_tanh, function, SIX, times=1, left={"tanh": 2})


def test_a_write_through_a_view_counts() -> None:
    def function(*tensors: Any) -> Any:
        results = [torch.tanh(t) for t in tensors]
        results[2][0].mul_(2)
        return torch.cat(results)

    keeps(batch_tanh, function, FIVE, because="may be written by")


@pytest.mark.parametrize("spell", [lambda t: F.relu(t, True), lambda t: F.relu(t, inplace=True), lambda t: t.relu_()])
def test_a_relu_in_place_still_changes_its_input(spell: Callable[..., Any]) -> None:
    def function(*tensors: Any) -> Any:
        return torch.cat([spell(t) for t in tensors])

    keeps(batch_relu, function, FIVE)


def test_an_output_given_beforehand_is_written() -> None:
    def function(*tensors: Any) -> Any:
        outs = [torch.empty_like(t) for t in tensors]
        return torch.cat([torch.tanh(t, out=out) for t, out in zip(tensors, outs, strict=True)])

    keeps(batch_tanh, function, FIVE)


def test_other_modes_stay_apart() -> None:
    def grad(*tensors: Any) -> Any:
        with torch.no_grad():
            frozen = [torch.tanh(t) for t in tensors[:3]]
        return torch.cat(frozen + [torch.tanh(t) for t in tensors[3:]])

    keeps(batch_tanh, grad, SIX)

    def autocast(*tensors: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = [torch.tanh(t) for t in tensors[:3]]
        return torch.cat(inside + [torch.tanh(t) for t in tensors[3:]])

    keeps(batch_tanh, autocast, SIX)


def test_what_needs_no_gradient_still_needs_none() -> None:
    mixed = [t.clone().requires_grad_(i > 2) for i, t in enumerate(FIVE)]
    keeps(batch_tanh, lambda *tensors: [torch.tanh(t) for t in tensors], mixed)

    def detached(*tensors: Any) -> Any:
        return [torch.tanh(t if i else t.detach()) for i, t in enumerate(tensors)]

    keeps(batch_tanh, detached, FIVE)

    def after(*tensors: Any) -> Any:
        with torch.no_grad():
            first = tensors[0] * 2
        return [torch.tanh(t) for t in (first, *tensors[1:])]

    keeps(batch_tanh, after, FIVE)


def test_what_gets_no_gradient_still_gets_none() -> None:
    """Not zeros: an optimiser leaves a parameter without a gradient alone."""

    def function(*tensors: Any) -> Any:
        results = [torch.tanh(t) for t in tensors]
        return torch.cat([results[0].detach(), *results[1:]])

    keeps(batch_tanh, function, FIVE)
    rewrites(batch_tanh, function, SIX, times=1, left={"tanh": 2})


def test_results_that_nobody_reads() -> None:
    def function(*tensors: Any) -> Any:
        [torch.tanh(t) for t in tensors]
        return tensors[0] + 1

    keeps(batch_tanh, function, FIVE)


def test_strides_of_a_transposed_result_that_is_returned() -> None:
    """tanh keeps the strides of its input; a part of a stack does not have them."""

    def function(*tensors: Any) -> Any:
        return [torch.tanh(t.t()) for t in tensors]

    keeps(batch_tanh, function, FIVE, because="would be returned as")


CALLS: list[tuple[Any, Callable[..., Any]]] = [
    (batch_tanh, lambda x: torch.tanh(x)),
    (batch_sigmoid, lambda x: torch.sigmoid(x)),
    (batch_relu, lambda x: torch.relu(x)),
    (batch_clamp, lambda x: x.clamp(-1, 1)),
    (batch_nan_to_num, lambda x: x.nan_to_num(5.0)),
    (batch_detach, lambda x: x.detach()),
    (batch_dropout, lambda x: F.dropout(x, 0.5, False)),
    (batch_layernorm, lambda x: F.layer_norm(x, (3,))),
    (batch_linear, lambda x: F.linear(x, WEIGHT)),
    (batch_linear_lhs, lambda x: F.linear(x, WEIGHT)),
]


@pytest.mark.parametrize(("batch", "call"), CALLS, ids=[batch.__name__ for batch, _ in CALLS])
def test_a_write_between_the_members_keeps_them_apart(batch: Any, call: Callable[..., Any]) -> None:
    """Both reads at the first place would read the same numbers."""

    def function(x: Any) -> Any:
        x = x + 1
        before = call(x) * 2
        x.add_(1)
        return torch.cat([before, call(x) * 2])

    keeps(with_settings(batch, least=2), function, [FIVE[0]], because="may be written by")


@pytest.mark.parametrize(("batch", "call"), CALLS, ids=[batch.__name__ for batch, _ in CALLS])
def test_without_the_write_they_are_one(batch: Any, call: Callable[..., Any]) -> None:
    def function(x: Any) -> Any:
        x = x + 1
        return torch.cat([call(x) * 2 for _ in range(2)])

    rewrites(with_settings(batch, least=2), function, [FIVE[0]], times=1)


def test_members_on_either_side_of_a_write_become_two() -> None:
    def function(x: Any) -> Any:
        before = [torch.tanh(part) for part in x.split(1)]
        x.add_(1)
        return torch.cat(before + [torch.tanh(part) for part in x.split(1)])

    rewrites(batch_tanh, function, [torch.randn(5, 3)], times=2, left={"tanh": 2})


def test_a_write_to_something_else_is_no_matter() -> None:
    def function(y: Any, *tensors: Any) -> Any:
        results = []
        for t in tensors:
            results.append(torch.tanh(t))
            y.add_(1)
        return torch.cat(results)

    rewrites(batch_tanh, function, SIX, times=1, left={"tanh": 1})


def test_views_of_members_that_are_not_contiguous_are_returned() -> None:
    """Where they lie in the memory of a result is seen."""

    def function(x: Any) -> Any:
        one, other = (part.relu() for part in x.unbind(0))
        return other[-1][0], other[-1][1], torch.stack([one, other])

    run = functools.partial(batch_relu, least=2)
    keeps(functools.wraps(batch_relu)(run), function, [torch.randn(6, 4, 2).permute(2, 1, 0)], because="lie otherwise")


def test_idle_dropouts_of_one_tensor_that_are_returned() -> None:
    """All of them are that tensor itself, in eager; the memory of four is one chain of finds."""

    def function(x: Any) -> Any:
        joined = torch.cat([F.dropout(x, 0.5, False), F.dropout(x, 0.5, False)], 1)
        return joined, F.dropout(x, 0.5, False), F.dropout(x, 0.5, False)

    for x in (torch.randn(4, 4), torch.randn(30).as_strided((4, 4), (7, 1), 1)):
        rewrites(with_settings(batch_dropout, least=2), function, [x], times=1)


def test_contiguous_may_give_back_its_argument_with_its_gradient() -> None:
    def function(x: Any, one: Any, other: Any) -> Any:
        unasked, asked = F.linear(x, one), F.linear(x, other)
        with torch.no_grad():
            return unasked + 1, asked.contiguous()

    run = functools.partial(batch_linear_lhs, least=2)
    weights = [torch.randn(3, 4, requires_grad=True) for _ in range(2)]
    keeps(functools.wraps(batch_linear_lhs)(run), function, [torch.randn(5, 4), *weights])
