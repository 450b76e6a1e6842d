"""Many clamps, nan_to_nums, detaches or dropouts with the same options become one (PRE-17)."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from ferrite.graph.ledger import keep_ledger
from ferrite.graph.pre_grad.batch_clamp import batch_clamp
from ferrite.graph.pre_grad.batch_detach import batch_detach
from ferrite.graph.pre_grad.batch_dropout import batch_dropout
from ferrite.graph.pre_grad.batch_nan_to_num import batch_nan_to_num
from ferrite.options import Options, resolve
from ferrite.pipeline import edit_pre_grad
from ferrite.report.record import GraphRecord
from tests.pre_grad.harness import capture, keeps, rewrites

INF, NAN = float("inf"), float("nan")
SIX = [torch.tensor([[NAN, INF, -INF], [3.14, -3.14, 0.5]]) * (i + 1) for i in range(6)]
PLAIN = [torch.randn(2, 3) for _ in range(6)]


def with_settings(batch: Any, **settings: Any) -> Any:
    @functools.wraps(batch)
    def run(graph: Any) -> int:
        return batch(graph, **settings)

    return run


def test_bounds_by_position_by_name_and_mixed() -> None:
    def function(a: Any, b: Any, c: Any, d: Any, e: Any, f: Any) -> Any:
        first = [a.clamp(-1, 1), torch.clamp(b, -1, 1), c.clamp(min=-1, max=1)]
        return torch.cat([*first, torch.clamp(d, -1, max=1), torch.clip(input=e, max=1, min=-1), f.clip(-1, 1)])

    rewrites(batch_clamp, function, SIX, times=1, left={"clamp": 1}, exact=True)


@pytest.mark.parametrize("bounds", [{"min": -1}, {"max": 2.5}, {"min": None, "max": 1}, {"min": -INF, "max": INF}])
def test_one_bound_or_none(bounds: dict[str, Any]) -> None:
    rewrites(
        batch_clamp, lambda *ts: torch.cat([t.clamp(**bounds) for t in ts]), SIX, times=1, left={"clamp": 1}, exact=True
    )


def test_other_bounds_stay_apart() -> None:
    def function(*tensors: Any) -> Any:
        return torch.cat([t.clamp(-1, 1 + i) for i, t in enumerate(tensors)])

    keeps(batch_clamp, function, SIX)

    def two_kinds(*tensors: Any) -> Any:
        return torch.cat([t.clamp(-1, bound) for bound in (1, 2) for t in tensors])

    rewrites(batch_clamp, two_kinds, SIX, times=2, left={"clamp": 2}, exact=True)


def test_bounds_of_another_type_stay_apart() -> None:
    """A float bound makes floats of integers."""
    integers = [torch.arange(6).view(2, 3) for _ in range(6)]

    def function(*tensors: Any) -> Any:
        return torch.cat([t.clamp(1) for t in tensors[:3]]), torch.cat([t.clamp(1.0) for t in tensors[3:]])

    keeps(batch_clamp, function, integers)


def test_bounds_that_are_tensors_stay() -> None:
    def function(low: Any, *tensors: Any) -> Any:
        return torch.cat([torch.clamp(t, low) for t in tensors])

    keeps(batch_clamp, function, [torch.zeros(3), *SIX[:5]], because="values of the graph")


def test_clamps_in_place_stay() -> None:
    keeps(batch_clamp, lambda *ts: torch.cat([t.clamp_(-1, 1) for t in ts]), SIX)


def test_numbers_for_nan_by_position_by_name_and_mixed() -> None:
    def function(a: Any, b: Any, c: Any, d: Any, e: Any, f: Any) -> Any:
        first = [torch.nan_to_num(a, 5.0, 1.0), b.nan_to_num(5.0, posinf=1.0), c.nan_to_num(nan=5.0, posinf=1.0)]
        others = [torch.nan_to_num(d, posinf=1.0, nan=5.0), torch.nan_to_num(input=e, nan=5.0, posinf=1.0)]
        return torch.cat([*first, *others, f.nan_to_num(5.0, 1.0, None)])

    rewrites(batch_nan_to_num, function, SIX, times=1, left={"nan_to_num": 1}, exact=True)


def test_without_numbers() -> None:
    rewrites(batch_nan_to_num, lambda *ts: torch.cat([t.nan_to_num() for t in ts]), SIX, times=1, exact=True)


def test_other_numbers_for_nan_stay_apart() -> None:
    """Merged into the default they would all be 0."""

    def function(*tensors: Any) -> Any:
        return torch.cat([torch.nan_to_num(t, 5.0 if i % 2 else 7.0) for i, t in enumerate(tensors)])

    keeps(batch_nan_to_num, function, SIX)
    rewrites(with_settings(batch_nan_to_num, least=3), function, SIX, times=2, left={"nan_to_num": 2}, exact=True)


def test_numbers_that_look_alike_are_not_the_same() -> None:
    """-0.0 equals 0.0, and NaN nothing."""

    def signs(*tensors: Any) -> Any:
        return torch.cat([torch.nan_to_num(t, 0.0 if i % 2 else -0.0) for i, t in enumerate(tensors)])

    keeps(batch_nan_to_num, signs, SIX)

    def nans(*tensors: Any) -> Any:
        return torch.cat([torch.nan_to_num(t, NAN, 1.0) for t in tensors])

    rewrites(batch_nan_to_num, nans, SIX, times=1, exact=True)


def test_other_readers_stay_apart() -> None:
    def function(*tensors: Any) -> Any:
        results = [t.clamp(-1, 1) for t in tensors]
        return torch.cat([r.exp() for r in results[:3]] + [r.abs() for r in results[3:]])

    captured = capture(function, PLAIN)
    keeps(batch_clamp, captured)
    rewrites(with_settings(batch_clamp, same_users=False), captured, times=1, left={"clamp": 1}, exact=True)


@pytest.mark.parametrize("batch", [batch_clamp, batch_nan_to_num, batch_detach, batch_dropout])
def test_results_that_nobody_reads(batch: Any) -> None:
    def function(*tensors: Any) -> Any:
        [(t.clamp(-1, 1), t.nan_to_num(), t.detach(), F.dropout(t, 0.5, False)) for t in tensors]
        return tensors[0] + 1

    keeps(batch, function, PLAIN)


def test_detached_tensors_are_stacked_and_carry_no_gradient() -> None:
    def function(*tensors: Any) -> Any:
        return torch.cat([t * t.detach() for t in tensors])

    rewrites(batch_detach, function, PLAIN, times=1, left={"detach": 1}, exact=True)


def test_a_detached_tensor_that_is_written_writes_its_source() -> None:
    def function(*tensors: Any) -> Any:
        tensors = [t * 1 for t in tensors]
        with torch.no_grad():
            detached = [t.detach() for t in tensors]
            results = [t + 1 for t in detached]
            detached[0].add_(1)
        return torch.cat(results), tensors[0] * 2

    keeps(with_settings(batch_detach, same_users=False), function, PLAIN[:5], because="may be written by")


def test_a_source_that_is_written_changes_what_was_detached() -> None:
    def function(*tensors: Any) -> Any:
        detached = [t.detach() for t in tensors]
        tensors[0].add_(1)
        return torch.cat([t + 1 for t in detached])

    keeps(batch_detach, function, PLAIN[:5], because="may be written by")
    rewrites(batch_detach, function, PLAIN, times=1, left={"detach": 2}, exact=True)


def test_a_detached_tensor_that_is_returned_is_its_source() -> None:
    keeps(batch_detach, lambda *ts: [t.detach() for t in ts], PLAIN, because="is returned")


def test_a_dropout_that_draws_stays() -> None:
    keeps(batch_dropout, lambda *ts: torch.cat([F.dropout(t, 0.5) for t in ts]), PLAIN, because="draws random numbers")


def test_idle_dropouts_may_be_one() -> None:
    def function(*tensors: Any) -> Any:
        return torch.cat([F.dropout(t + 1, 0.5, False) for t in tensors])

    rewrites(batch_dropout, function, PLAIN, times=1, left={"dropout": 1}, exact=True)


def test_a_dropout_in_place_stays() -> None:
    keeps(batch_dropout, lambda *ts: torch.cat([F.dropout(t, 0.5, False, True) for t in ts]), PLAIN, because="writes")


def dropped(function: Any, inputs: list[Any], **settings: Any) -> tuple[int, Any, list[str]]:
    """Other numbers are drawn, so that nothing can be compared with eager: rewrites, the graph module, reasons."""
    captured = capture(function, inputs)
    with keep_ledger(captured.module.graph, "batch_dropout") as ledger:
        count = batch_dropout(captured.module.graph, other_masks=True, **settings)
    captured.module.graph.lint()
    captured.module.recompile()
    return count, captured.module, [decision.reason for decision in ledger.decisions if not decision.taken]


def test_where_other_masks_are_allowed_one_draw_is_for_all() -> None:
    ones = [torch.ones(50, 40) for _ in range(5)]
    count, module, _ = dropped(lambda *ts: torch.cat([F.dropout(t, 0.25) for t in ts]), ones)
    assert count == 1
    torch.manual_seed(0)
    (found,) = module(*ones)
    assert set(found.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    parts = found.chunk(5)
    assert all(abs((part == 0).float().mean() - 0.25) < 0.05 for part in parts)
    assert not torch.equal(parts[0], parts[1])
    torch.manual_seed(0)
    assert torch.equal(module(*ones)[0], found)


def test_other_probabilities_stay_apart_where_other_masks_are_allowed() -> None:
    """`dropout(a, 1.0, True)` is nothing but zeros."""

    def function(*tensors: Any) -> Any:
        return torch.cat([F.dropout(t, 1.0 if i < 3 else 0.1, True) for i, t in enumerate(tensors)])

    assert dropped(function, PLAIN)[0] == 0
    count, module, _ = dropped(function, PLAIN, least=3)
    assert count == 2
    (found,) = module(*PLAIN)
    assert (found[:6] == 0).all()
    assert (found[6:] != 0).any()


def test_a_draw_between_dropouts_keeps_its_place() -> None:
    def function(*tensors: Any) -> Any:
        results = [F.dropout(t, 0.5) for t in tensors[:3]]
        noise = torch.rand(2, 3)
        return torch.cat([*results, *(F.dropout(t, 0.5) for t in tensors[3:]), noise])

    count, _, reasons = dropped(function, PLAIN)
    assert count == 0
    assert any("draws random numbers between" in reason for reason in reasons)


@pytest.mark.parametrize("fallback", [False, True])
def test_other_masks_are_refused_where_the_numbers_of_eager_are_promised(fallback: bool) -> None:
    captured = capture(lambda *ts: torch.cat([F.dropout(t, 0.5) for t in ts]), PLAIN)
    record = GraphRecord("main", "pre_grad")
    asked = {"pre_grad": {"batch_dropout": {"other_masks": True}}, "fallback_random": fallback}
    edit_pre_grad(captured.module, resolve(Options(), None, asked), record)
    (run,) = (run for run in record.passes if run.name == "batch_dropout")
    assert run.changed == int(not fallback)
    reasons = [decision.reason for decision in record.decisions if not decision.taken]
    assert any("fallback_random promises those of eager" in reason for reason in reasons) == fallback
