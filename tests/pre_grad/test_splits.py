"""PRE-18 to PRE-21 and PRE-23: splits that go, that become one, and whose sections go back together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import Graph

from ferrite.graph.arguments import bind, find
from ferrite.graph.ledger import keep_ledger
from ferrite.graph.pieces import read_split
from ferrite.graph.pre_grad.cat_of_items_to_slice import cat_of_items_to_slice
from ferrite.graph.pre_grad.drop_whole_splits import drop_whole_splits
from ferrite.graph.pre_grad.merge_nested_splits import merge_nested_splits
from ferrite.graph.pre_grad.merge_split_items import merge_split_items
from ferrite.graph.pre_grad.split_squeeze_to_unbind import split_squeeze_to_unbind
from tests.pre_grad.harness import Captured, capture, keeps, rewrites, trace

X = torch.randn(2, 32)


def take(parts: Any, count: int) -> list[Any]:
    return [parts[index] for index in range(count)]


def sections(graph: Graph) -> list[tuple[int, ...]]:
    """The sizes of every split in a graph."""
    found = [read_split(node) for node in find(graph, "split")]
    return [split.sizes for split in found if split is not None]


class TestDropWholeSplits:
    def test_the_item_is_the_input(self) -> None:
        rewrites(drop_whole_splits, trace(lambda x: torch.split(x, 32, 1)[0] + 1, [X]), times=1, left={"split": 0})

    @pytest.mark.parametrize(
        "split",
        [
            lambda x: x.split(40, 1),
            lambda x: torch.split(x, [32], dim=-1),
            lambda x: x.chunk(1, 1),
            lambda x: torch.tensor_split(x, 1, 1),
        ],
    )
    def test_spellings(self, split: Callable[[Any], Any]) -> None:
        outcome = rewrites(drop_whole_splits, trace(lambda x: split(x)[0] + 1, [X]), times=1, exact=True)
        assert set(outcome.kinds) == {"None", "add"}

    def test_two_items_of_index_zero_are_both_redirected(self) -> None:
        def function(x: Any) -> Any:
            parts = torch.split(x, 32, 1)
            return parts[0] + 1, parts[0] * 2, parts[-1] * 3

        rewrites(drop_whole_splits, trace(function, [X]), times=1, left={"split": 0, "getitem": 0}, exact=True)

    def test_nobody_reads_it(self) -> None:
        def function(x: Any) -> Any:
            torch.split(x, 32, 1)
            return x + 1

        rewrites(drop_whole_splits, trace(function, [X]), times=1, left={"split": 0})

    def test_what_is_returned_is_another_tensor_with_the_same_memory(self) -> None:
        outcome = rewrites(
            drop_whole_splits, trace(lambda x: torch.split(x, 32, 1)[0], [X]), times=1, left={"split": 0}
        )
        x = X.clone()
        y = outcome.module(x)
        assert y is not x
        assert y.data_ptr() == x.data_ptr()

    def test_a_call_that_gives_its_argument_back_is_returned(self) -> None:
        """What eager returns is the section, not the input itself."""

        def function(x: Any) -> Any:
            part = torch.split(x, 32, 1)[0]
            return part.to(part.dtype)

        rewrites(drop_whole_splits, trace(function, [X]), times=1, left={"split": 0, "narrow": 1})

    def test_returned_and_read(self) -> None:
        def function(x: Any) -> Any:
            part = torch.split(x, 32, 1)[0]
            return part, part + 1

        rewrites(drop_whole_splits, trace(function, [X]), times=1, left={"split": 0, "narrow": 1})

    def test_strides_of_dimensions_of_size_one(self) -> None:
        """What is returned has the strides of eager, those that nobody steps along too."""
        captured = trace(lambda x: torch.split(x.transpose(0, 1), 1, 1)[0], [torch.randn(1, 3, 2)])
        rewrites(drop_whole_splits, captured, times=1, left={"split": 0}, exact=True)

    def test_uneven_split_stays(self) -> None:
        keeps(drop_whole_splits, trace(lambda x: torch.split(x, 20, 1)[0] + 1, [X]))

    def test_an_empty_second_section_stays(self) -> None:
        keeps(drop_whole_splits, trace(lambda x: torch.split(x, [32, 0], 1)[0] + 1, [X]))

    @pytest.mark.parametrize("name", ["t_", "squeeze_"])
    def test_given_other_sizes_in_place(self, name: str) -> None:
        def function(x: Any) -> Any:
            y = x + 1
            part = torch.split(y, 32, 1)[0]
            getattr(part, name)()
            return part + 1

        keeps(drop_whole_splits, trace(function, [X]))

    def test_resized(self) -> None:
        captured = trace(lambda x: torch.split(x + 1, 32, 1)[0].resize_([2, 32]) + 1, [X])
        keeps(drop_whole_splits, captured, because="in place")

    def test_written(self) -> None:
        """Eager forbids to write what a split made if a gradient is asked for; so it must stay a split."""
        keeps(drop_whole_splits, trace(lambda x: torch.split(x, 32, 1)[0].add_(1) + 1, [X]), because="may be written")

    def test_a_dimension_that_varies(self) -> None:
        keeps(drop_whole_splits, lambda x: torch.split(x, 64, 0)[0] + 1, [torch.randn(64, 3)], dynamic=True)

    def test_only_other_dimensions_vary(self) -> None:
        def function(x: Any) -> Any:
            return torch.split(x, 3, 1)[0] + 1

        x = torch.randn(6, 3)
        torch._dynamo.mark_dynamic(x, 0)
        rewrites(drop_whole_splits, function, [x], dynamic=None, times=1, left={"split": 0})


def children(*cuts: Any) -> Callable[[Any], Any]:
    """x split into 10, 10 and 12; each cut splits one section, or reads it as it is."""

    def function(x: Any) -> Any:
        parts = torch.split(x, [10, 10, 12], dim=1)
        found: list[Any] = []
        for index, cut in enumerate(cuts):
            found += [parts[index].sin()] if cut is None else take(parts[index].split(cut, 1), len(cut))
        return [torch.relu(one) for one in found]

    return function


class TestMergeNestedSplits:
    @pytest.mark.parametrize(("outer", "inner"), [(1, 1), (-1, 1), (1, -1)])
    def test_sixteen_children_are_sixteen_merges(self, outer: int, inner: int) -> None:
        def function(x: Any) -> Any:
            parts = take(x.split(2, outer), 16)
            return [torch.relu(one) for part in parts for one in take(part.split(1, inner), 2)]

        outcome = rewrites(merge_nested_splits, trace(function, [X]), times=16, left={"split": 1}, exact=True)
        assert sections(outcome.module.graph) == [(1,) * 32]

    def test_the_limit_counts_merges(self) -> None:
        graph = trace(children([4, 6], [6, 4], [4, 4, 4]), [X]).module.graph
        with keep_ledger(graph, "merge_nested_splits", limit=2):
            assert merge_nested_splits(graph) == 2
        assert sections(graph) == [(4, 6, 6, 4, 12), (4, 4, 4)]

    def test_as_dynamo_gives_it(self) -> None:
        def function(x: Any) -> Any:
            return [s.split(1, 1) for s in x.split(8, 1)]

        rewrites(merge_nested_splits, function, [X], times=4, left={"split": 1}, exact=True)

    def test_the_sections_are_spliced_in(self) -> None:
        outcome = rewrites(merge_nested_splits, trace(children([4, 6], None, None), [X]), times=1, exact=True)
        assert sections(outcome.module.graph) == [(4, 6, 10, 12)]

    def test_three_unequal_children(self) -> None:
        captured = trace(children([4, 6], [6, 4], [4, 4, 4]), [X])
        outcome = rewrites(merge_nested_splits, captured, times=3, exact=True)
        assert sections(outcome.module.graph) == [(4, 6, 6, 4, 4, 4, 4)]

    def test_an_item_that_is_taken_from_the_back_keeps_its_branch(self) -> None:
        def function(x: Any) -> Any:
            parts = torch.split(x, [10, 10, 12], dim=1)
            items = [*take(parts[0].split([4, 6], 1), 2), *take(parts[-2].split([6, 4], 1), 2), parts[2]]
            return [torch.relu(one) for one in items]

        outcome = rewrites(merge_nested_splits, trace(function, [X]), times=1, exact=True)
        assert sections(outcome.module.graph) == [(4, 6, 10, 12), (6, 4)]
        assert any("by an index from the back" in reason for reason in outcome.reasons)

    def test_others_that_are_taken_from_the_back_are_renumbered(self) -> None:
        def function(x: Any) -> Any:
            parts = torch.split(x, [10, 10, 12], dim=1)
            inner = parts[0].split([4, 6], 1)
            return [torch.relu(one) for one in (inner[-1], inner[-2], inner[0], parts[-1], parts[2])]

        rewrites(merge_nested_splits, trace(function, [X]), times=1, left={"split": 1}, exact=True)

    def test_the_third_section_feeds_another_op(self) -> None:
        rewrites(
            merge_nested_splits, trace(children([4, 6], [6, 4], None), [X]), times=2, left={"split": 1}, exact=True
        )

    def test_other_dimension(self) -> None:
        def function(x: Any) -> Any:
            return [torch.relu(part.split(1, 0)[1]) for part in take(x.split(16, 1), 2)]

        keeps(merge_nested_splits, trace(function, [X]))

    @pytest.mark.parametrize("order", [[0, 2], [0, 2, 1], [2], [1, 2, 0]])
    def test_gaps_and_other_orders(self, order: list[int]) -> None:
        def function(x: Any) -> Any:
            parts = torch.split(x, [4, 4, 24], dim=1)
            items = [one for at in order for one in (take(parts[2].split(4, 1), 6) if at == 2 else [parts[at]])]
            return torch.cat(items, dim=1)

        rewrites(merge_nested_splits, trace(function, [X]), times=1, left={"split": 1}, exact=True)

    def test_children_that_are_used_in_part(self) -> None:
        def function(x: Any) -> Any:
            parts = torch.split(x, [4, 4, 24], dim=1)
            inner = parts[2].split(4, 1)
            return parts[0] + inner[3], inner[5] + inner[1]

        rewrites(merge_nested_splits, trace(function, [X]), times=1, left={"split": 1}, exact=True)

    @pytest.mark.parametrize("again", [1, -2])
    def test_an_item_that_is_taken_twice_keeps_its_branch(self, again: int) -> None:
        def function(x: Any) -> Any:
            parts = torch.split(x, [10, 10, 12], dim=1)
            return *take(parts[1].split([6, 4], 1), 2), parts[again].sin(), parts[2].sin()

        keeps(merge_nested_splits, trace(function, [X]), because="is taken twice")

    def test_an_item_that_feeds_something_else_keeps_its_branch(self) -> None:
        def function(x: Any) -> Any:
            parts = torch.split(x, [10, 10, 12], dim=1)
            first, second = parts[0], parts[1]
            return *take(first.split([4, 6], 1), 2), *take(second.split([6, 4], 1), 2), second.sin()

        outcome = rewrites(merge_nested_splits, trace(function, [X]), times=1, exact=True)
        assert sections(outcome.module.graph) == [(4, 6, 10, 12), (6, 4)]
        assert any("has 2 users" in reason for reason in outcome.reasons)

    def test_read_as_a_whole(self) -> None:
        def function(x: Any) -> Any:
            parts = torch.split(x, [16, 16], dim=1)
            return parts[0].split(8, 1)[0] + 1, parts

        keeps(merge_nested_splits, trace(function, [X]))

    def test_written_between(self) -> None:
        def function(x: Any) -> Any:
            part = torch.split(x, [16, 16], dim=1)[0]
            x.add_(1)
            return take(part.split(8, 1), 2)

        keeps(merge_nested_splits, trace(function, [X]), because="may be written")

    def test_what_is_written_afterwards(self) -> None:
        def function(x: Any) -> Any:
            parts = torch.split(x * 2, [16, 16], dim=1)
            inner = parts[0].split(8, 1)
            return inner[0].add_(1) * 2, parts[1] * 2

        keeps(merge_nested_splits, trace(function, [X]), because="may be written")

    def test_three_levels(self) -> None:
        def function(x: Any) -> Any:
            first = x.split(16, 1)
            second = first[1].split(8, 1)
            third = second[0].split(2, 1)
            return first[0] + 1, third[2] + 1, second[1] + 1

        outcome = rewrites(merge_nested_splits, trace(function, [X]), times=2, exact=True)
        assert sections(outcome.module.graph) == [(16, 2, 2, 2, 2, 8)]


W = torch.randn(2, 16, 3)


def merged(*order: int, dim: int = 1) -> Callable[[Any], Any]:
    """Sections of 4, 4, 2 and 6: those in `order` go into a cat, the others are read one by one."""

    def function(x: Any) -> Any:
        parts = take(torch.split(x, [4, 4, 2, 6], 1), 4)
        rest = [part + 1 for index, part in enumerate(parts) if index not in order]
        return torch.cat([parts[index] for index in order], dim) * 2, *rest

    return function


class TestMergeSplitItems:
    @pytest.mark.parametrize(
        ("order", "sizes"),
        [((0, 1), (8, 2, 6)), ((1, 2), (4, 6, 6)), ((2, 3), (4, 4, 8)), ((0, 1, 2), (10, 6)), ((1, 2, 3), (4, 12))],
    )
    def test_one_wider_section(self, order: tuple[int, ...], sizes: tuple[int, ...]) -> None:
        outcome = rewrites(merge_split_items, trace(merged(*order), [W]), times=1, left={"cat": 0}, exact=True)
        assert sections(outcome.module.graph) == [sizes]

    def test_all_sections_are_the_input(self) -> None:
        outcome = rewrites(merge_split_items, trace(merged(0, 1, 2, 3), [W]), times=1, exact=True)
        assert set(outcome.kinds) == {"None", "mul"}

    def test_two_cats_on_one_split(self) -> None:
        def function(x: Any) -> Any:
            parts = take(torch.split(x, [4, 4, 2, 6], 1), 4)
            return torch.cat(parts[:2], 1) * 2, torch.cat(parts[2:], -2) * 2

        outcome = rewrites(merge_split_items, trace(function, [W]), times=2, left={"cat": 0}, exact=True)
        assert sections(outcome.module.graph) == [(8, 8)]

    def test_the_limit_counts_cats(self) -> None:
        def function(x: Any) -> Any:
            parts = take(torch.split(x, [4, 4, 2, 6], 1), 4)
            return torch.cat(parts[:2], 1) * 2, torch.cat(parts[2:], 1) * 2

        graph = trace(function, [W]).module.graph
        with keep_ledger(graph, "merge_split_items", limit=1):
            assert merge_split_items(graph) == 1
        assert sections(graph) == [(8, 2, 6)]

    def test_split_cat_split(self) -> None:
        """The wide sections are split again: two merges, and then the splits are one."""

        def function(x: Any) -> Any:
            parts = take(torch.split(x, [8, 2, 2, 4, 4, 4, 5, 3], 1), 8)
            first, last = torch.cat(parts[:2], 1), torch.cat(parts[6:], 1)
            inner = [*take(torch.split(first, [5, 5], 1), 2), *take(torch.split(last, [2, 6], 1), 2)]
            return torch.cat([*inner, *parts[2:6]], 1)

        passes = [merge_split_items, merge_nested_splits]
        outcome = rewrites(passes, trace(function, [X]), times=4, left={"cat": 1, "split": 1}, exact=True)
        assert sections(outcome.module.graph) == [(5, 5, 2, 4, 4, 4, 2, 6)]

    @pytest.mark.parametrize("order", [(1, 0), (0, 0), (0, 2), (0, 1, 1), (0, 1, 3), (3, 2, 1, 0)])
    def test_other_orders(self, order: tuple[int, ...]) -> None:
        keeps(merge_split_items, trace(merged(*order), [W]))

    def test_other_dimension(self) -> None:
        keeps(merge_split_items, trace(merged(0, 1, dim=0), [W]))

    def test_an_item_with_another_reader(self) -> None:
        def function(x: Any) -> Any:
            parts = take(torch.split(x, [4, 4, 8], 1), 3)
            return torch.cat(parts[:2], 1) * 2, parts[1] + 1

        keeps(merge_split_items, trace(function, [W]), because="has 2 users")

    def test_other_operands(self) -> None:
        def function(x: Any) -> Any:
            parts = torch.split(x, [4, 4, 8], 1)
            return torch.cat([parts[0], parts[1], x], 1)

        keeps(merge_split_items, trace(function, [W]))

    def test_the_result_is_written(self) -> None:
        """A section is a view of the input: writing it would write the input."""

        def function(x: Any) -> Any:
            parts = torch.split(x, [4, 4, 8], 1)
            return torch.cat([parts[0], parts[1]], 1).add_(1) * 2

        keeps(merge_split_items, trace(function, [W]), because="a view of x in place of a copy")

    def test_the_input_is_written_afterwards(self) -> None:
        def function(x: Any) -> Any:
            parts = torch.split(x, [4, 4, 8], 1)
            both = torch.cat([parts[0], parts[1]], 1)
            x.zero_()
            return both * 2

        keeps(merge_split_items, trace(function, [W]), because="a view of x in place of a copy")

    def test_the_result_is_returned(self) -> None:
        def function(x: Any) -> Any:
            parts = torch.split(x, [4, 4, 8], 1)
            return torch.cat([parts[0], parts[1]], 1)

        keeps(merge_split_items, trace(function, [W]), because="is returned")

    def test_a_view_of_the_result_is_returned(self) -> None:
        def function(x: Any) -> Any:
            parts = torch.split(x, [4, 4, 8], 1)
            return torch.cat([parts[0], parts[1]], 1)[0]

        keeps(merge_split_items, trace(function, [W]), because="is returned")

    def test_another_section_is_returned(self) -> None:
        def function(x: Any) -> Any:
            parts = take(torch.split(x, [4, 4, 8], 1), 3)
            return torch.cat(parts[:2], 1) * 2, parts[2]

        rewrites(merge_split_items, function, [W], times=1, left={"cat": 0}, exact=True)


ROWS = torch.randn(80, 3)


class TestCatOfItemsToSlice:
    def test_a_part_and_the_whole(self) -> None:
        def function(x: Any) -> Any:
            parts = take(x.split(20), 4)
            return torch.cat(parts) * 2, torch.cat(parts[2:]) * 2, parts[2] + 1

        outcome = rewrites(cat_of_items_to_slice, trace(function, [ROWS]), times=2, left={"cat": 0}, exact=True)
        (narrow,) = (bind(node) for node in find(outcome.module.graph, "narrow"))
        assert narrow is not None
        assert (narrow["dim"], narrow["start"], narrow["length"]) == (0, 40, 40)

    def test_a_comprehension_that_picks_every_section(self) -> None:
        def function(x: Any) -> Any:
            parts = x.split([5, 15, 20, 40])
            return torch.cat([parts[index] for index in range(4)]) * 2, parts[0] + 1

        rewrites(cat_of_items_to_slice, function, [ROWS], times=1, left={"cat": 0, "narrow": 0}, exact=True)

    @pytest.mark.parametrize("order", [(3, 2), (0, 2), (1, 1), (0, 1, 3), (2, 3, 0, 1), (0, 1, 2, 3, 0)])
    def test_other_orders(self, order: tuple[int, ...]) -> None:
        def function(x: Any) -> Any:
            parts = x.split(20)
            return torch.cat([parts[index] for index in order]) * 2

        keeps(cat_of_items_to_slice, trace(function, [ROWS]), because="are no neighbours")

    def test_some_cats_of_a_split(self) -> None:
        """One cat of neighbours and one of others: one slice."""

        def function(x: Any) -> Any:
            parts = take(x.split([10, 10, 40, 20]), 4)
            return (
                torch.cat([*parts[2:], *parts[:2]]) * 2,
                torch.cat(parts[:2]) * 2,
                torch.cat([parts[0], parts[3]]) * 2,
            )

        rewrites(cat_of_items_to_slice, trace(function, [ROWS]), times=1, left={"cat": 2, "narrow": 1}, exact=True)

    def test_other_dimension(self) -> None:
        keeps(cat_of_items_to_slice, trace(lambda x: torch.cat(take(x.split(20), 4), 1) * 2, [ROWS]))

    def test_items_of_another_split_do_not_continue(self) -> None:
        def function(x: Any, y: Any) -> Any:
            one, other = x.split(20), y.split(20)
            return torch.cat([one[0], one[1], other[2]]) * 2

        keeps(cat_of_items_to_slice, trace(function, [ROWS, ROWS]), because="are no neighbours")

    def test_the_result_is_written(self) -> None:
        keeps(
            cat_of_items_to_slice,
            trace(lambda x: torch.cat(take(x.split(20), 4)).add_(1) * 2, [ROWS]),
            because="a view of x in place of a copy",
        )

    def test_the_result_is_returned(self) -> None:
        keeps(cat_of_items_to_slice, trace(lambda x: torch.cat(take(x.split(20), 4)), [ROWS]), because="is returned")

    def test_the_input_is_written_between(self) -> None:
        def function(x: Any) -> Any:
            parts = take(x.split(20), 4)
            parts[1].copy_(parts[0])
            both = torch.cat(parts) * 2
            return both

        keeps(cat_of_items_to_slice, trace(function, [ROWS]), because="may be written")

    def test_the_input_is_written_afterwards(self) -> None:
        def function(x: Any) -> Any:
            both = torch.cat(take(x.split(20), 4))
            x.zero_()
            return both * 2

        keeps(cat_of_items_to_slice, trace(function, [ROWS]), because="a view of x in place of a copy")


def squeezed(squeeze: Callable[[Any], Any], size: int = 1) -> Captured:
    def function(x: Any) -> Any:
        return torch.stack([squeeze(part) for part in take(x.split(size, 1), x_width // size)])

    x_width = 4
    return trace(function, [torch.randn(2, x_width)])


class TestSplitSqueezeToUnbind:
    @pytest.mark.parametrize(
        "squeeze",
        [
            lambda part: torch.squeeze(part, 1),
            lambda part: part.squeeze(1),
            lambda part: torch.squeeze(part, dim=1),
            lambda part: part.squeeze(dim=-1),
            lambda part: part.squeeze((1,)),
        ],
    )
    def test_spellings(self, squeeze: Callable[[Any], Any]) -> None:
        left = {"split": 0, "squeeze": 0, "unbind": 1}
        rewrites(split_squeeze_to_unbind, squeezed(squeeze), times=1, left=left, exact=True)

    @pytest.mark.parametrize("squeeze", [lambda part: part.squeeze(), lambda part: part.squeeze((0, 1))])
    def test_more_than_one_dimension_is_meant(self, squeeze: Callable[[Any], Any]) -> None:
        keeps(split_squeeze_to_unbind, squeezed(squeeze))

    def test_other_dimension(self) -> None:
        keeps(split_squeeze_to_unbind, squeezed(lambda part: part.squeeze(0)))

    def test_sections_of_two(self) -> None:
        keeps(split_squeeze_to_unbind, squeezed(lambda part: part.squeeze(1), 2))

    @pytest.mark.parametrize("first", [0, 1])
    def test_an_item_has_another_reader(self, first: int) -> None:
        def function(x: Any) -> Any:
            parts = take(x.split(1, 1), 4)
            return torch.stack([part.squeeze(1) for part in parts[first:]]), torch.relu(parts[0])

        keeps(split_squeeze_to_unbind, trace(function, [torch.randn(2, 4)]), because="reads an item of split as it is")

    def test_results_with_several_readers(self) -> None:
        def function(x: Any) -> Any:
            parts = [part.squeeze(1) for part in take(x.split(1, 1), 4)]
            return torch.stack(parts), torch.relu(parts[0]), torch.tanh(parts[1])

        rewrites(split_squeeze_to_unbind, trace(function, [torch.randn(2, 4)]), times=1, left={"unbind": 1}, exact=True)

    def test_readers_between_the_squeezes(self) -> None:
        """The sections are read as they come: what reads the first stands before the squeeze of the second."""

        def function(x: Any) -> Any:
            return torch.stack([torch.sin(part.squeeze(dim=0)) for part in x.split(1)])

        outcome = rewrites(
            split_squeeze_to_unbind, function, [torch.randn(3, 4)], times=1, left={"unbind": 1, "split": 0}, exact=True
        )
        outcome.module.graph.lint()

    def test_a_write_between_the_squeezes(self) -> None:
        def function(x: Any) -> Any:
            parts = torch.split(x, 1, 0)
            first = torch.sin(parts[0].squeeze(0))
            x.mul_(2)
            return first, torch.sin(parts[1].squeeze(0))

        keeps(split_squeeze_to_unbind, trace(function, [torch.randn(2, 4)]), because="may be written")

    def test_squeezed_in_place(self) -> None:
        def function(x: Any) -> Any:
            parts = take(torch.split(x + 1, 1, 0), 2)
            return [part.squeeze_(0) * 2 for part in parts]

        keeps(split_squeeze_to_unbind, trace(function, [torch.randn(2, 4)]))

    def test_the_result_is_written(self) -> None:
        def function(x: Any) -> Any:
            parts = [part.squeeze(1) for part in take((x * 2).split(1, 1), 4)]
            parts[0].add_(1)
            return torch.stack(parts)

        keeps(split_squeeze_to_unbind, trace(function, [torch.randn(2, 4)]), because="may be written")


def test_what_varies_is_left_alone() -> None:
    """Sections that are known only at run time are no plain numbers: nothing is folded, and no guard is added."""

    def function(x: Any) -> Any:
        parts = x.split(x.shape[0] // 2)
        return torch.cat([parts[0], parts[1]]) * 2, parts[1] + 1

    captured = capture(function, [torch.randn(8, 3)], dynamic=True)
    for pass_ in (drop_whole_splits, merge_split_items, cat_of_items_to_slice, merge_nested_splits):
        keeps(pass_, captured)


def test_calls_without_a_fake_value_are_left_alone() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    parts = graph.call_function(torch.split, (x, 4))
    graph.output(graph.call_function(torch.cat, ([graph.call_method("relu", (parts,))],)))
    for pass_ in (drop_whole_splits, merge_split_items, cat_of_items_to_slice, merge_nested_splits):
        assert pass_(graph) == 0
