"""PRE-22 and PRE-24: all cats and stacks of what one split or unbind made."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import Graph

from ferrite.graph.arguments import find
from ferrite.graph.pieces import read_split
from ferrite.graph.pre_grad.drop_unbind_joins import drop_unbind_joins
from ferrite.graph.pre_grad.simplify_split_joins import simplify_split_joins
from ferrite.graph.pre_grad.split_squeeze_to_unbind import split_squeeze_to_unbind
from tests.pre_grad.harness import capture, keeps, rewrites, run_passes, trace


def take(parts: Any, count: int) -> list[Any]:
    return [parts[index] for index in range(count)]


def sections(graph: Graph) -> list[tuple[int, ...]]:
    found = [read_split(node) for node in find(graph, "split")]
    return [split.sizes for split in found if split is not None]


def join(kind: str, parts: list[Any], dim: int) -> Any:
    """Joined, and then read in a way that cares for no strides and makes something new."""
    return ((torch.cat if kind == "cat" else torch.stack)(parts, dim) * 2).flatten()


SHAPES = {3: (4, 6, 8), 4: (4, 6, 2, 8)}


@pytest.mark.parametrize("dead", [False, True])
def test_a_split_of_what_was_joined_anew(dead: bool) -> None:
    """The second split reads the first cat, which is another node by then."""

    def function(x: Any) -> Any:
        a, b, c = x.split(2, 1)
        around = torch.cat([c, a, b], 1)
        s = around.split(2, 1)
        again = torch.cat([around, s[0], s[1], around, s[2]], 1)
        return torch.relu(x if dead else again)

    captured = trace(function, [torch.randn(2, 5)])
    rewrites(simplify_split_joins, captured, times=4, left={"split": 2, "cat": 2}, exact=True)


@pytest.mark.parametrize("foreign", [0, 1, 2])
@pytest.mark.parametrize("rank", [3, 4])
def test_every_pair_of_dimensions_of_a_split(rank: int, foreign: int) -> None:
    """Split along s, joined along d, for all s and d; with other operands before, or before and after."""
    x, y = torch.randn(SHAPES[rank]), torch.randn(SHAPES[rank])
    pairs = [(s, "cat", d) for s in range(rank) for d in range(rank)]
    pairs += [(s, "stack", d) for s in range(rank) for d in range(rank + 1)]

    def function(x: Any, y: Any) -> Any:
        results = []
        for s, kind, d in pairs:
            width = SHAPES[rank][s] // 2
            other = y.narrow(s, 0, width)
            parts = take(x.split(width, s), 2)
            results.append(join(kind, [*[other] * (foreign > 0), *parts, *[other] * (foreign > 1)], d))
        return torch.cat(results)

    left = {"split": 0, "getitem": 0, "stack": 0, "cat": 1 + (len(pairs) if foreign else 0)}
    rewrites(simplify_split_joins, trace(function, [x, y]), times=len(pairs), left=left, exact=True, again=None)


@pytest.mark.parametrize("foreign", [0, 1, 2])
@pytest.mark.parametrize("rank", [3, 4])
def test_every_pair_of_dimensions_of_an_unbind(rank: int, foreign: int) -> None:
    x, y = torch.randn(SHAPES[rank]), torch.randn(SHAPES[rank])
    pairs = [(s, "cat", d) for s in range(rank) for d in range(rank - 1)]
    pairs += [(s, "stack", d) for s in range(rank) for d in range(rank)]

    def function(x: Any, y: Any) -> Any:
        results = []
        for s, kind, d in pairs:
            other = y.select(s, 0)
            parts = take(torch.unbind(x, s), SHAPES[rank][s])
            results.append(join(kind, [*[other] * (foreign > 0), *parts, *[other] * (foreign > 1)], d))
        return torch.cat(results)

    left = {"unbind": 0, "getitem": 0, "stack": 0, "cat": 1 + (len(pairs) if foreign else 0)}
    rewrites(drop_unbind_joins, trace(function, [x, y]), times=len(pairs), left=left, exact=True, again=None)


WIDE = torch.randn(2, 32, 8, 4)
ONES = torch.ones(2, 4, 8, 4)


class TestSimplifySplitJoins:
    @pytest.mark.parametrize(
        ("kind", "dim"), [("cat", 1), ("cat", -3), ("cat", 2), ("stack", 1), ("stack", 3), ("stack", 0)]
    )
    def test_all_sections_with_others_around(self, kind: str, dim: int) -> None:
        def function(x: Any, y: Any) -> Any:
            op = torch.cat if kind == "cat" else torch.stack
            return op([y, *take(x.split(4, 1), 8), y, y], dim)

        left = {"split": 0, "stack": 0, "cat": 1}
        rewrites(simplify_split_joins, trace(function, [WIDE, ONES]), times=1, left=left, exact=True)

    @pytest.mark.parametrize(("kind", "dim"), [("cat", 1), ("stack", 1), ("cat", 2), ("stack", 2)])
    def test_two_runs_with_gaps(self, kind: str, dim: int) -> None:
        """Sections 1 to 3 and 5 to 7 of 8: a split with four sections is left, four fewer than before."""

        def function(x: Any, y: Any) -> Any:
            parts = take(x.split(4, 1), 8)
            op = torch.cat if kind == "cat" else torch.stack
            return op([y, *parts[1:4], y, *parts[5:8], y], dim)

        left = {"split": 1, "stack": 0, "cat": 1, "narrow": 0}
        outcome = rewrites(simplify_split_joins, trace(function, [WIDE, ONES]), times=2, left=left, exact=True)
        assert sections(outcome.module.graph) == [(4, 12, 4, 12)]

    @pytest.mark.parametrize("returned", [False, True])
    def test_several_outputs(self, returned: bool) -> None:
        """A cat of 1 to 3, a stack of 4 and 5, and section 6 as it is: five sections are left, three fewer."""

        def function(x: Any, y: Any) -> Any:
            parts = take(x.split(4, 1), 8)
            one = torch.cat([y, *parts[1:4], y], 2)
            other = torch.stack([y, *parts[4:6], y], 1)
            return one, other, parts[6] if returned else parts[6].relu()

        left = {"split": 1, "stack": 0, "cat": 2, "narrow": 0}
        outcome = rewrites(simplify_split_joins, trace(function, [WIDE, ONES]), times=3, left=left, exact=True)
        assert sections(outcome.module.graph) == [(4, 12, 8, 4, 4)]

    @pytest.mark.parametrize(("kind", "dim"), [("cat", 1), ("cat", 2), ("stack", 1)])
    def test_runs_in_another_order(self, kind: str, dim: int) -> None:
        """The later run stands first, and others stand between: each is one section, in the place of its run."""

        def function(x: Any, y: Any) -> Any:
            parts = take(x.split(4, 1), 8)
            op = torch.cat if kind == "cat" else torch.stack
            return op([*parts[5:8], y, *parts[1:4], parts[0]], dim)

        left = {"split": 1, "stack": 0, "cat": 1, "narrow": 0}
        outcome = rewrites(simplify_split_joins, trace(function, [WIDE, ONES]), times=2, left=left, exact=True)
        assert sections(outcome.module.graph) == [(4, 12, 4, 12)]

    def test_unequal_sections(self) -> None:
        def function(x: Any, y: Any) -> Any:
            parts = take(x.split([2, 4, 4, 4, 4, 4, 8, 2], 1), 8)
            return torch.cat([y, *parts[1:4], y], 2), torch.stack([y, *parts[4:6], y], 1), parts[6].relu()

        outcome = rewrites(simplify_split_joins, trace(function, [WIDE, ONES]), times=3, left={"cat": 2}, exact=True)
        assert sections(outcome.module.graph) == [(2, 12, 8, 8, 2)]

    def test_two_readers_of_the_same_runs(self) -> None:
        def function(x: Any, y: Any) -> Any:
            parts = take(x.split(4, 1), 8)
            cats = [torch.cat([y, *parts[1:4], y], dim) for dim in (2, 1)]
            return *cats, torch.stack([y, *parts[4:6], y], 1), parts[6].relu()

        outcome = rewrites(simplify_split_joins, trace(function, [WIDE, ONES]), times=4, left={"cat": 3}, exact=True)
        assert sections(outcome.module.graph) == [(4, 12, 8, 4, 4)]

    def test_two_splits_in_one_join(self) -> None:
        def function(x: Any, z: Any, y: Any) -> Any:
            one, other = take(x.split(4, 1), 8), take(z.split(4, 1), 8)
            cat = torch.cat([y, *one[1:4], y, *other[1:4], y], 2)
            stack = torch.stack([y, *one[4:6], y, *other[4:6]], 1)
            return cat, stack, one[6].relu(), other[6].relu()

        captured = trace(function, [WIDE, WIDE + 1, ONES])
        outcome = rewrites(simplify_split_joins, captured, times=4, left={"cat": 2, "stack": 0}, exact=True)
        assert sections(outcome.module.graph) == [(4, 12, 8, 4, 4)] * 2

    def test_a_join_that_reads_another_join(self) -> None:
        def function(x: Any) -> Any:
            parts = take(x.split(8, 1), 4)
            first = torch.cat(parts[:2], 2).narrow(2, 0, 8).sin()
            return torch.cat([first, *parts[2:], first], 1)

        outcome = rewrites(simplify_split_joins, trace(function, [WIDE]), times=3, exact=True)
        assert sections(outcome.module.graph) == [(16, 16)]

    def test_as_dynamo_gives_it(self) -> None:
        def function(x: Any, y: Any) -> Any:
            return torch.cat([y, *torch.split(x, 4, 1), y], 2), torch.stack(torch.split(x, 4, 1), 0).sum()

        rewrites(simplify_split_joins, function, [WIDE, ONES], times=2, left={"split": 0, "cat": 1, "stack": 0})

    def test_runs_that_overlap(self) -> None:
        def function(x: Any) -> Any:
            parts = take(x.split(8, 1), 4)
            return torch.cat(parts[:3], 2) * 2, torch.cat(parts[1:], 2) * 2

        keeps(simplify_split_joins, trace(function, [WIDE]), because="overlap")

    def test_a_section_of_a_run_is_read_alone(self) -> None:
        def function(x: Any) -> Any:
            parts = take(x.split(8, 1), 4)
            return torch.cat(parts[:3], 2) * 2, parts[1] + 1

        keeps(simplify_split_joins, trace(function, [WIDE]), because="overlap")

    def test_an_empty_section(self) -> None:
        captured = trace(lambda x: torch.cat(take(x.split([0, 4], 0), 2), 0) * 2, [torch.ones(4, 2)])
        rewrites(simplify_split_joins, captured, times=1, left={"cat": 0}, exact=True)

    def test_empty_sections_along_another_dimension(self) -> None:
        captured = trace(lambda x: torch.stack(take(x.split([0, 0], 0), 2), 1), [torch.ones(0, 2)])
        rewrites(simplify_split_joins, captured, times=0)

    def test_a_split_cannot_be_narrowed_by_a_reversed_list(self) -> None:
        captured = trace(lambda x: torch.cat(take(x.split(8, 1), 4)[::-1], 1) * 2, [WIDE])
        keeps(simplify_split_joins, captured)

    def test_a_section_is_written_between_split_and_cat(self) -> None:
        def function(x: Any) -> Any:
            parts = take(x.split(4, 1), 8)
            parts[1].copy_(parts[0])
            return torch.cat(parts, 1), torch.cat(parts, 2)

        keeps(simplify_split_joins, trace(function, [WIDE]))

    def test_the_input_is_written_between_split_and_cat(self) -> None:
        def function(x: Any) -> Any:
            parts = take(x.split(4, 1), 8)
            x.mul_(2)
            return torch.cat(parts, 2)

        keeps(simplify_split_joins, trace(function, [WIDE]), because="may be written")

    def test_the_result_is_returned_or_written(self) -> None:
        def function(x: Any) -> Any:
            parts = take(x.split(16, 1), 2)
            return torch.stack(parts), torch.cat(parts, 1).add_(1) * 2

        outcome = keeps(simplify_split_joins, trace(function, [WIDE]), because="is returned")
        assert any("may be written" in reason for reason in outcome.reasons)

    def test_a_copy_is_as_good_as_the_cat(self) -> None:
        """A flatten that copies gives new memory, as the cat did: it may be returned and written."""

        def function(x: Any) -> Any:
            parts = take(x.split(16, 1), 2)
            return torch.cat(parts, 2).add_(1)

        rewrites(simplify_split_joins, trace(function, [WIDE]), times=1, left={"cat": 0}, exact=True)

    def test_one_reader_stays_and_the_other_does_not_mind(self) -> None:
        """What is returned as it is stays a cat of sections; its sections are apart from the others."""

        def function(x: Any, y: Any) -> Any:
            parts = take(x.split(4, 1), 8)
            return torch.cat(parts[:2], 1), torch.cat([y, *parts[2:]], 1)

        outcome = rewrites(simplify_split_joins, trace(function, [WIDE, ONES]), times=2, left={"cat": 2}, exact=True)
        assert sections(outcome.module.graph) == [(4, 4, 24)]

    def test_a_missing_value_stops_it_before_anything_is_edited(self) -> None:
        def function(x: Any, y: Any) -> Any:
            parts = take(x.split(4, 1), 8)
            return torch.cat([y, *parts[:4]], 2), torch.cat([y.sin(), *parts[4:]], 2)

        captured = trace(function, [WIDE, ONES])
        (sin,) = find(captured.module.graph, "sin")
        del sin.meta["example_value"]
        graph = captured.module.graph
        assert simplify_split_joins(graph) == 2  # the first cat, and one split for what is left
        assert len(find(graph, "cat")) == 2
        graph.lint()

    def test_other_sizes_may_vary(self) -> None:
        def function(x: Any, y: Any) -> Any:
            parts = x.split(2, 1)
            return torch.cat([y, parts[0], parts[1]], 2)

        x, y = torch.randn(5, 4, 3), torch.randn(5, 2, 3)
        for value in (x, y):
            torch._dynamo.mark_dynamic(value, 0)
        rewrites(simplify_split_joins, function, [x, y], dynamic=None, times=1, left={"split": 0}, exact=True)

    def test_mixed_dtypes_are_promoted_as_before(self) -> None:
        def function(x: Any, y: Any) -> Any:
            return torch.cat([y, *take(x.split(4, 1), 8)], 2)

        inputs = [WIDE.half(), ONES]
        rewrites(simplify_split_joins, trace(function, inputs), times=1, left={"cat": 1}, exact=True)

    def test_grad_mode_differs(self) -> None:
        def function(x: Any, y: Any) -> Any:
            parts = torch.split(x, 16, 1)
            with torch.no_grad():
                result = torch.cat([y, parts[0], parts[1]], 1)
            return result

        inputs = [WIDE.clone().requires_grad_(), ONES]
        keeps(simplify_split_joins, function, inputs, because="modes")


def eight(x: Any) -> list[Any]:
    return take(x.split(4, 1), 8)


def across(x: Any) -> list[Any]:
    return take(x.split(4, 2), 8)


def gaps(x: Any, y: Any) -> list[Any]:
    parts = eight(x)
    return [y, *parts[1:4], y, *parts[5:8], y]


def mixed(parts: list[Any], y: Any) -> tuple[Any, Any]:
    return torch.cat([y, *parts[1:4], y], 2), torch.stack([y, *parts[4:6], y], 1)


def joins(graph: Graph) -> int:
    return len(find(graph, "cat")) + len(find(graph, "stack"))


def of_two(x: Any, z: Any, y: Any) -> tuple[Any, ...]:
    one, other = eight(x), eight(z)
    joined = torch.cat([y, *one[1:4], y, *other[1:4], y], 2), torch.stack([y, *one[4:6], y, *other[4:6], y], 1)
    return *joined, one[6].relu(), other[6].relu()


# Splits made and removed, joins made and removed, sections that are gone: what the peer's suite expects of its pass.
# x is (2, 32, 32, 16), y a section along dimension 1, w one along dimension 2.
PEER: list[tuple[str, Callable[..., Any], tuple[int, ...]]] = [
    ("a cat as before", lambda x: torch.cat(eight(x), dim=1), (0, 0, 0, 0, 0)),
    ("a cat as before, by place", lambda x: torch.cat(eight(x), 1), (0, 0, 0, 0, 0)),
    ("a cat as before, by name", lambda x: torch.cat(tensors=eight(x), dim=1), (0, 0, 0, 0, 0)),
    ("a cat along another", lambda x: torch.cat(eight(x), -2), (0, 1, 0, 1, 7)),
    ("a cat along another, by name", lambda x: torch.cat(tensors=eight(x), dim=-2), (0, 1, 0, 1, 7)),
    # Returned, such a stack must not share the input's memory, as the peer's does: here something reads it.
    ("a stack", lambda x: torch.stack(eight(x), dim=1).neg(), (0, 1, 0, 1, 7)),
    ("a stack, by place", lambda x: torch.stack(eight(x), 1).neg(), (0, 1, 0, 1, 7)),
    ("a stack, by name", lambda x: torch.stack(tensors=eight(x), dim=1).neg(), (0, 1, 0, 1, 7)),
    ("a cat with others", lambda x, y: torch.cat([y, *eight(x), y], 1), (0, 1, 1, 1, 7)),
    ("a stack with others", lambda x, y: torch.stack([y, *eight(x), y, y], 1), (0, 1, 1, 1, 7)),
    ("along dimension 2", lambda x, w: torch.cat([w, *across(x), w], 2), (0, 1, 1, 1, 7)),
    ("1 to 2, cat", lambda x, y: torch.cat([y, *eight(x), y], 2), (0, 1, 1, 1, 7)),
    ("1 to 2, stack", lambda x, y: torch.stack([y, *eight(x), y], 2), (0, 1, 1, 1, 7)),
    ("1 to 3, cat", lambda x, y: torch.cat([y, *eight(x), y], 3), (0, 1, 1, 1, 7)),
    ("1 to 3, stack", lambda x, y: torch.stack([y, *eight(x), y], 3), (0, 1, 1, 1, 7)),
    ("2 to 0, cat", lambda x, w: torch.cat([w, *across(x), w], 0), (0, 1, 1, 1, 7)),
    ("2 to 0, stack", lambda x, w: torch.stack([w, *across(x), w], 0), (0, 1, 1, 1, 7)),
    ("gaps, cat", lambda x, y: torch.cat(gaps(x, y), 1), (1, 1, 1, 1, 4)),
    ("gaps, stack", lambda x, y: torch.stack(gaps(x, y), 1), (1, 1, 1, 1, 4)),
    ("gaps, cat along another", lambda x, y: torch.cat(gaps(x, y), 2), (1, 1, 1, 1, 4)),
    ("gaps, stack along another", lambda x, y: torch.stack(gaps(x, y), 2), (1, 1, 1, 1, 4)),
    ("several readers", lambda x, y: (*mixed(p := eight(x), y), p[6].relu()), (1, 1, 2, 2, 3)),
    ("a section is returned", lambda x, y: (*mixed(p := eight(x), y), p[6]), (1, 1, 2, 2, 3)),
    (
        "unequal sections",
        lambda x, y: (*mixed(p := take(x.split([2, 4, 4, 4, 4, 4, 8, 2], 1), 8), y), p[6].relu()),
        (1, 1, 2, 2, 3),
    ),
    # The peer stops after one of the two splits: (1, 1, 2, 2, 3).
    ("two splits", of_two, (2, 2, 2, 2, 6)),
]


@pytest.mark.parametrize(("function", "counts"), [row[1:] for row in PEER], ids=[row[0] for row in PEER])
def test_counts_of_the_peers_table(function: Callable[..., Any], counts: tuple[int, ...]) -> None:
    x = torch.randn(2, 32, 32, 16)
    given = {"x": x, "z": x + 1, "y": torch.ones(2, 4, 32, 16), "w": torch.ones(2, 32, 4, 16)}
    captured = trace(function, [given[name] for name in inspect.signature(function).parameters])
    before = captured.module.graph
    after = run_passes(captured, simplify_split_joins, exact=True).module.graph
    splits_made, splits_gone, joins_made, joins_gone, sections_gone = counts
    fewer = len(find(before, "split")) - len(find(after, "split"))
    assert fewer == splits_gone - splits_made
    assert joins(before) - joins(after) == joins_gone - joins_made
    whole = fewer  # what a split that is gone had been read from counts as one section
    assert sum(map(len, sections(before))) - sum(map(len, sections(after))) - whole == sections_gone


CUBE = torch.randn(2, 3, 4)


class TestDropUnbindJoins:
    @pytest.mark.parametrize(
        "unbind", [lambda x: torch.unbind(x, 1), lambda x: torch.unbind(input=x, dim=1), lambda x: x.unbind(-2)]
    )
    @pytest.mark.parametrize(
        "stack", [lambda parts: torch.stack(parts, 1), lambda parts: torch.stack(tensors=parts, dim=-2)]
    )
    def test_spellings(self, unbind: Callable[[Any], Any], stack: Callable[[Any], Any]) -> None:
        captured = trace(lambda x: stack(take(unbind(x), 3)) * 2, [CUBE])
        outcome = rewrites(drop_unbind_joins, captured, times=1, exact=True)
        assert set(outcome.kinds) == {"None", "mul"}

    def test_after_split_and_squeeze(self) -> None:
        def function(x: Any) -> Any:
            return torch.stack([part.squeeze(1) for part in take(x.split(1, 1), 3)], 1) * 2

        passes = [split_squeeze_to_unbind, drop_unbind_joins]
        outcome = rewrites(passes, trace(function, [CUBE]), times=2, exact=True)
        assert set(outcome.kinds) == {"None", "mul"}

    def test_two_readers_with_different_dimensions(self) -> None:
        def function(x: Any, y: Any) -> Any:
            parts = take(torch.unbind(x, 1), 3)
            return torch.cat([y, *parts, y], 1), torch.stack([y, *parts, y], 2)

        left = {"unbind": 0, "cat": 2, "stack": 0}
        rewrites(drop_unbind_joins, trace(function, [CUBE, torch.randn(2, 4)]), times=2, left=left, exact=True)

    def test_an_item_has_another_reader(self) -> None:
        def function(x: Any) -> Any:
            parts = take(torch.unbind(x, 1), 3)
            return torch.cat(parts, 0), parts[0].sin()

        rewrites(drop_unbind_joins, trace(function, [CUBE]), times=1, left={"unbind": 1, "cat": 0}, exact=True)

    @pytest.mark.parametrize("order", [(2, 1, 0), (0, 2, 1), (0, 1), (1, 2), (0, 1, 1, 2), (1, 2, 0)])
    def test_other_orders_and_parts(self, order: tuple[int, ...]) -> None:
        def function(x: Any) -> Any:
            parts = torch.unbind(x, 1)
            return torch.stack([parts[index] for index in order], 0) * 2

        keeps(drop_unbind_joins, trace(function, [CUBE]), because="are not all in order")

    def test_reversed(self) -> None:
        keeps(drop_unbind_joins, lambda x: torch.stack(torch.unbind(x, 1)[::-1], 0), [CUBE], because="not all in order")

    @pytest.mark.parametrize("order", [(0, 1, 2, 0, 1, 2), (0, 0, 1, 2, 2)])
    def test_all_items_and_some_again(self, order: tuple[int, ...]) -> None:
        def function(x: Any) -> Any:
            parts = torch.unbind(x, 1)
            return torch.stack([parts[index] for index in order], 0)

        rewrites(drop_unbind_joins, trace(function, [CUBE]), times=1, left={"stack": 0, "cat": 1}, exact=True)

    def test_the_result_is_written(self) -> None:
        """A stack is a copy, the moved axis is not: writing it would write the input."""
        captured = trace(lambda x: torch.stack(take(torch.unbind(x, 1), 3), 0).add_(1) * 2, [CUBE])
        keeps(drop_unbind_joins, captured, because="a view of x in place of a copy")

    def test_the_result_is_returned(self) -> None:
        captured = trace(lambda x: torch.stack(take(torch.unbind(x, 1), 3), 1), [CUBE])
        keeps(drop_unbind_joins, captured, because="is returned")

    def test_the_input_is_written_afterwards(self) -> None:
        def function(x: Any) -> Any:
            stack = torch.stack(take(torch.unbind(x, 1), 3), 1)
            x.zero_()
            return stack * 2

        keeps(drop_unbind_joins, trace(function, [CUBE]), because="a view of x in place of a copy")

    @pytest.mark.parametrize("dim", [0, 1, -1])
    def test_stack_tanh_unbind_is_left_alone(self, dim: int) -> None:
        """The relative that the peer matched, and got wrong along the last dimension."""

        def function(x: Any, y: Any) -> Any:
            return torch.unbind(torch.tanh(torch.stack([x, y], dim)), dim)

        captured = capture(function, [CUBE, CUBE + 1])
        keeps([drop_unbind_joins, simplify_split_joins], captured)
