"""PRE-25 to PRE-29: cats and stacks that mix what several splits or unbinds made; all dimensions, orders and places."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch.fx import Graph

from ferrite.graph.arguments import find
from ferrite.graph.pre_grad.move_reshape_out_of_split_stack import move_reshape_out_of_split_stack
from ferrite.graph.pre_grad.split_cat_to_slices import split_cat_to_slices
from ferrite.graph.pre_grad.split_stack_to_cats import split_stack_to_cats
from ferrite.graph.pre_grad.unbind_cat_to_view import unbind_cat_to_view
from ferrite.graph.pre_grad.unbind_stack_to_slices import unbind_stack_to_slices
from tests.pre_grad.harness import Captured, keeps, rewrites, trace

Pass = Callable[..., int]


def take(parts: Any, count: int) -> list[Any]:
    return [parts[index] for index in range(count)]


def from_two(pass_: Pass) -> Callable[[Graph], int]:
    """The pass with runs of two or more."""

    def run(graph: Graph) -> int:
        return pass_(graph, least=2)

    return run


# What is joined: (parent, item); a parent of 2 is another tensor.
Order = tuple[tuple[int, int], ...]
ORDERS: dict[str, Order] = {
    "in order": ((0, 0), (0, 1), (0, 2)),
    "a part": ((0, 1), (0, 2)),
    "reversed": ((0, 2), (0, 1), (0, 0)),
    "permuted": ((0, 1), (0, 0), (0, 2)),
    "the first again": ((0, 0), (0, 1), (0, 2), (0, 0)),
    "a pair again": ((0, 0), (0, 1), (0, 0), (0, 1)),
    "each twice": ((0, 0), (0, 0), (0, 1), (0, 1)),
    "two parents": ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)),
    "an index goes on in the other parent": ((0, 0), (0, 1), (1, 2)),
    "parents in turn": ((0, 0), (1, 0), (0, 1), (1, 1)),
}


def with_another(order: Order) -> list[Order]:
    """The order as it is, and with another tensor at the start, in the middle and at the end."""
    places = (0, len(order) // 2, len(order))
    return [order, *((*order[:at], (2, 0), *order[at:]) for at in places)]


# With parents of their own: every order and place at one pair of dimensions, some at all pairs of three, fewer at all
# pairs of four. With parents that are shared: all at all pairs.
ALL = [case for order in ORDERS.values() for case in with_another(order)]
SOME = [*with_another(ORDERS["in order"]), with_another(ORDERS["two parents"])[2], ORDERS["a part"]]
FEW = [with_another(ORDERS["two parents"])[2]]


def has_run(order: Order) -> bool:
    return any(one[0] == other[0] != 2 and other[1] == one[1] + 1 for one, other in pairwise(order))


@dataclass(frozen=True)
class Kind:
    """How tensors are taken apart (`lost`: without the dimension) and joined."""

    pass_: Pass
    join: Callable[..., Any]
    lost: bool

    def apart(self, x: Any, dim: int) -> Any:
        return torch.unbind(x.narrow(dim, 0, 3), dim) if self.lost else torch.split(x, SIZES[dim] // 3, dim)

    def other(self, z: Any, dim: int) -> Any:
        return z.select(dim, 0) if self.lost else z.narrow(dim, 0, SIZES[dim] // 3)

    def pairs(self, rank: int) -> list[tuple[int, int]]:
        return list(product(range(rank), range(rank - self.lost + (self.join is torch.stack))))


SIZES = (3, 6, 3, 6)
KINDS = {
    "PRE-25": Kind(split_cat_to_slices, torch.cat, lost=False),
    "PRE-26": Kind(unbind_cat_to_view, torch.cat, lost=True),
    "PRE-27": Kind(split_stack_to_cats, torch.stack, lost=False),
    "PRE-28": Kind(unbind_stack_to_slices, torch.stack, lost=True),
}


def program(kind: Kind, rank: int, pairs: list[tuple[int, int]], orders: list[Order]) -> Captured:
    """Every order for every pair of dimensions, in one program."""

    def function(x: Any, y: Any, z: Any) -> Any:
        results = []
        for (s, d), order in product(pairs, orders):
            parents = [kind.apart(x, s), kind.apart(y, s)]
            parts = [kind.other(z, s) if parent == 2 else parents[parent][item] for parent, item in order]
            results.append((kind.join(parts, d) * 2).flatten())
        return torch.cat(results)

    return trace(function, [torch.randn(SIZES[:rank]) for _ in range(3)])


def shared_program(kind: Kind, rank: int, s: int, dims: list[int], orders: list[Order]) -> Captured:
    """Every order joined along every one of `dims`, all of items of the same two parents, taken apart along `s`."""

    def function(x: Any, y: Any, z: Any) -> Any:
        parents = [take(kind.apart(whole, s), 3) for whole in (x, y)] + [[kind.other(z, s)]]
        cases = product(dims, orders)
        joins = [kind.join([parents[parent][item] for parent, item in order], d) for d, order in cases]
        return torch.cat([(join * 2).flatten() for join in joins])

    return trace(function, [torch.randn(SIZES[:rank]) for _ in range(3)])


class TestMatrix:
    """Outputs are held against eager bit by bit in every case, whether it fires or not."""

    @pytest.mark.parametrize("entry", KINDS)
    @pytest.mark.parametrize(("rank", "orders"), [(3, SOME), (4, FEW)], ids=["rank 3", "rank 4"])
    def test_every_pair_of_dimensions(self, entry: str, rank: int, orders: list[Order]) -> None:
        kind = KINDS[entry]
        pairs = [(s, d) for s, d in kind.pairs(rank) if entry != "PRE-25" or s == d]
        times = len(pairs) * sum(map(has_run, orders))
        captured = program(kind, rank, pairs, orders)
        rewrites(from_two(kind.pass_), captured, times=times, left={"stack": 0}, exact=True, again=None)

    @pytest.mark.parametrize("entry", KINDS)
    def test_every_order_and_place(self, entry: str) -> None:
        kind = KINDS[entry]
        captured = program(kind, 3, [(0, 0 if entry == "PRE-25" else 1)], ALL)
        rewrites(from_two(kind.pass_), captured, times=sum(map(has_run, ALL)), exact=True)

    @pytest.mark.long
    @pytest.mark.parametrize("entry", KINDS)
    def test_all_combinations(self, entry: str) -> None:
        """Every order and place at every pair of dimensions, 4000 joins over the four passes; those that take the same
        tensors apart along the same dimension share the items."""
        kind = KINDS[entry]
        for rank in (3, 4):
            for s in range(rank):
                dims = [d for along, d in kind.pairs(rank) if along == s]
                times = (1 if entry == "PRE-25" else len(dims)) * sum(map(has_run, ALL))
                captured = shared_program(kind, rank, s, dims, ALL)
                rewrites(from_two(kind.pass_), captured, times=times, exact=True, again=None)

    def test_a_slice_minds_the_dimension(self) -> None:
        """Along another dimension a cat of all sections is not the input."""
        pairs = [(s, d) for s, d in product(range(3), range(3)) if s != d]
        keeps(from_two(split_cat_to_slices), program(KINDS["PRE-25"], 3, pairs, FEW))


class TestModels:
    """Programs of the kind these passes were made for: each fires once, with the settings that nobody changed."""

    def test_slices_of_three_splits(self) -> None:
        """Ten of one parent; the other parent's come in two runs of fewer than ten, and stay; all of the third."""

        def function(x: Any, y: Any, z: Any) -> Any:
            one, two, three = take(x.split(5), 10), take(y.split(5), 10), take(z.split(10), 5)
            return torch.cat([one[0].clone(), *one, *two[4:], *two[:4], *three])

        x, y, z = (torch.randn(50, 3) for _ in range(3))
        outcome = rewrites(split_cat_to_slices, trace(function, [x, y, z]), times=1, left={"cat": 1}, exact=True)
        (cat,) = find(outcome.module.graph, "cat")
        assert len(cat.all_input_nodes) == 1 + 1 + 10 + 1

    def test_views_of_two_unbinds(self) -> None:
        def function(x: Any) -> Any:
            y, z = x.view(10, 5, 6), x.view(10, 5, 6)
            one, two = take(torch.unbind(y), 10), take(torch.unbind(z), 10)
            return torch.cat([*one[:7], one[7].clone(), *two, one[8].clone(), one[9].clone()], 1)

        outcome = rewrites(unbind_cat_to_view, trace(function, [torch.randn(10, 30)]), times=1, exact=True)
        (cat,) = find(outcome.module.graph, "cat")
        assert len(cat.args[0]) == 7 + 1 + 1 + 2

    def test_pairs_of_six_splits(self) -> None:
        def function(x: Any) -> Any:
            halves = [take(part.split(5, 1), 2) for part in take(torch.unbind(x.view(10, 5, 10)), 6)]
            copies = [half.clone() for half in (*halves[0], halves[1][0])]
            flat = [half for pair in halves for half in pair]
            return torch.stack([*flat[:6], *copies[:2], *flat[6:], copies[2]], 1)

        left = {"stack": 0, "cat": 1, "split": 2}
        rewrites(split_stack_to_cats, trace(function, [torch.randn(10, 50)]), times=1, left=left, exact=True)

    def test_a_stack_along_another_dimension(self) -> None:
        def function(x: Any, y: Any) -> Any:
            one, two = take(x.split(10, 1), 5), take(y.split(10, 1), 5)
            return torch.stack([*(part.clone() for part in one[:3]), *one, *two], 2)

        inputs = [torch.randn(4, 50), torch.randn(4, 50)]
        rewrites(split_stack_to_cats, trace(function, inputs), times=1, left={"stack": 0, "cat": 1}, exact=True)

    def test_a_stack_of_an_unbind(self) -> None:
        def function(x: Any) -> Any:
            parts = take(torch.unbind(x.view(5, 10, 6), 1), 10)
            return torch.stack([*(part.clone() for part in parts[:3]), *parts], 1)

        rewrites(unbind_stack_to_slices, trace(function, [torch.randn(5, 60)]), times=1, left={"cat": 1}, exact=True)

    def test_all_of_one_split_after_another_tensor(self) -> None:
        def function(x: Any, y: Any) -> Any:
            return torch.cat([y, *take(torch.split(x, 50, 0), 12)], 0)

        inputs = [torch.randn(600, 2), torch.randn(3, 2)]
        outcome = rewrites(split_cat_to_slices, trace(function, inputs), times=1, left={"cat": 1}, exact=True)
        assert len(find(outcome.module.graph, "cat")[0].args[0]) == 2

    def test_all_of_an_unbind_side_by_side(self) -> None:
        captured = trace(lambda x: torch.cat(take(torch.unbind(x, 0), 12), 1) * 2, [torch.randn(12, 4, 5)])
        rewrites(unbind_cat_to_view, captured, times=1, left={"cat": 0, "unbind": 0}, exact=True)

    def test_a_long_stack_of_an_unbind_behind_another_tensor(self) -> None:
        def function(x: Any, y: Any) -> Any:
            return torch.stack([y, *take(torch.unbind(x, 0), 11)], 1)

        inputs = [torch.randn(11, 4, 5), torch.randn(4, 5)]
        left = {"stack": 0, "cat": 1, "unbind": 0}
        rewrites(unbind_stack_to_slices, trace(function, inputs), times=1, left=left, exact=True)

    def test_reshaped_sections_without_others(self) -> None:
        def function(x: Any) -> Any:
            return (torch.stack([part.reshape(-1, 3) for part in take(x.split(1, 1), 12)], 0) * 2).flatten()

        left = {"stack": 0, "split": 0, "cat": 0}
        rewrites(move_reshape_out_of_split_stack, trace(function, [torch.randn(9, 12)]), times=1, left=left, exact=True)

    def test_reshaped_sections(self) -> None:
        def function(x: Any) -> Any:
            parts = [part.reshape(-1, 5) for part in take(x.view(50, 5).split(1, 1), 5)]
            copies = [part.clone() for part in parts[:4]]
            return torch.stack([*copies[:3], *parts, copies[3]], 0)

        left = {"stack": 0, "cat": 1}
        rewrites(
            move_reshape_out_of_split_stack, trace(function, [torch.randn(10, 25)]), times=1, left=left, exact=True
        )


class TestFaultsOfThePeer:
    """Each gave a wrong answer or an exception elsewhere."""

    def slices(self, function: Callable[..., Any], times: int) -> None:
        rewrites(from_two(split_cat_to_slices), trace(function, [torch.randn(6, 6), torch.randn(6, 6)]), times=times)

    def test_other_dimension_than_the_split(self) -> None:
        self.slices(lambda x, y: torch.cat(take(x.split(2, 0), 3), 1) * 2, 0)

    def test_last_operand_from_another_split(self) -> None:
        self.slices(lambda x, y: torch.cat([*take(x.split(2, 0), 2), y.split(2, 0)[2]], 0), 1)

    @pytest.mark.parametrize("at", [0, 1, 2, 3])
    def test_an_item_of_an_unbind_between_those_of_a_split(self, at: int) -> None:
        def function(x: Any, y: Any) -> Any:
            parts = take(x.split(2, 0), 3)
            return torch.cat([*parts[:at], torch.unbind(y.view(3, 2, 6), 0)[at % 3], *parts[at:]], 0)

        self.slices(function, 1)

    def test_first_operand_again_at_the_end(self) -> None:
        self.slices(lambda x, y: torch.cat([*(parts := take(x.split(2, 0), 3)), parts[0]], 0), 1)

    def test_a_pair_again(self) -> None:
        self.slices(lambda x, y: torch.cat([*(parts := take(x.split(2, 0), 2)), *parts], 0), 1)

    def test_unbind_reversed(self) -> None:
        captured = trace(lambda x: torch.cat(take(torch.unbind(x), 3)[::-1], 1), [torch.randn(3, 4, 5)])
        keeps(unbind_cat_to_view, captured)

    def test_unbind_cat_two_dimensions_apart(self) -> None:
        captured = trace(lambda x: torch.cat(take(torch.unbind(x), 3), 2), [torch.randn(3, 4, 5, 2)])
        rewrites(unbind_cat_to_view, captured, times=1, left={"cat": 0}, exact=True)

    def test_split_stack_two_dimensions_apart(self) -> None:
        captured = trace(lambda x: torch.stack(take(x.split(2, 0), 2), 2).sum(0), [torch.randn(4, 8, 5)])
        rewrites(split_stack_to_cats, captured, times=1, left={"stack": 0})

    @pytest.mark.parametrize("dim", [1, 2, 3])
    def test_unbind_stack_along_another_dimension(self, dim: int) -> None:
        def function(x: Any, y: Any) -> Any:
            return torch.stack([y, *take(torch.unbind(x), 3)], dim)

        inputs = [torch.randn(3, 4, 5, 2), torch.randn(4, 5, 2)]
        rewrites(unbind_stack_to_slices, trace(function, inputs), times=1, left={"stack": 0}, exact=True)

    def test_reshape_of_sections_wider_than_one(self) -> None:
        captured = trace(
            lambda x: torch.stack([part.reshape(6, 2) for part in take(x.split(3, 1), 2)], 0), [torch.randn(4, 6)]
        )
        rewrites(move_reshape_out_of_split_stack, captured, times=1, left={"stack": 0}, exact=True)

    def test_reshape_split_dimension_0_and_stack_dimension_1(self) -> None:
        captured = trace(
            lambda x: torch.stack([part.reshape(2, 3) for part in take(x.split(1, 0), 4)], 1).sum(2),
            [torch.randn(4, 6)],
        )
        rewrites(move_reshape_out_of_split_stack, captured, times=1, left={"stack": 0})


class TestLeast:
    @pytest.mark.parametrize("count", [9, 10])
    def test_ten_items_unless_it_is_the_whole(self, count: int) -> None:
        def function(x: Any, y: Any) -> Any:
            return torch.cat([y, *take(x.split(1), count)])

        captured = trace(function, [torch.randn(12, 2), torch.randn(1, 2)])
        if count == 10:
            rewrites(split_cat_to_slices, captured, times=1, left={"narrow": 1}, exact=True)
        else:
            keeps(split_cat_to_slices, captured, because="fewer than 10")

    def test_one_item_is_no_run(self) -> None:
        captured = trace(lambda x, y: torch.cat([y, x.split(4)[0]]), [torch.randn(4, 2), torch.randn(4, 2)])
        keeps(from_two(split_cat_to_slices), captured)

    def test_views_are_not_returned(self) -> None:
        captured = trace(lambda x: torch.cat(take(x.split(2), 2)), [torch.randn(4, 2)])
        keeps(split_cat_to_slices, captured, because="is returned")


# Sections of one shape with the dimension that is split first, by how wide they are.
BASES = {3: {1: (1, 3, 4), 2: (2, 3, 4)}, 4: {1: (1, 3, 2, 2), 2: (2, 3, 2, 2)}}
RESHAPED = {
    "one each": (1, (3, 4)),
    "wide": (2, (4, 6)),
    "flat": (2, (24,)),
    "longer": (1, (2, 3, 2)),
    "as it is": (2, (2, 12)),
}


def moved(sizes: tuple[int, ...], dim: int) -> tuple[int, ...]:
    """The first size at place `dim`, the others in order."""
    return (*sizes[1 : dim + 1], sizes[0], *sizes[dim + 1 :])


class TestReshapes:
    @pytest.mark.parametrize("rank", BASES)
    @pytest.mark.parametrize("name", RESHAPED)
    def test_matrix(self, name: str, rank: int) -> None:
        """Split along every dimension, reshaped, stacked along every dimension; another operand at every place."""
        width, shape = RESHAPED[name]
        base = BASES[rank][width]

        def function(x: Any, y: Any) -> Any:
            results = []
            for s, d, at in product(range(rank), range(len(shape) + 1), (None, 0, 3)):
                sizes = [3 * width if dim == s else size for dim, size in enumerate(moved(base, s))]
                whole = x.narrow(0, 0, math.prod(sizes)).view(sizes)
                parts = [part.reshape(shape) for part in take(whole.split(width, s), 3)]
                if at is not None:
                    parts.insert(at, y.reshape(shape))
                results.append((torch.stack(parts, d) * 2).flatten())
            return torch.cat(results)

        inputs = [torch.randn(200), torch.randn(math.prod(shape))]
        run, times = from_two(move_reshape_out_of_split_stack), 3 * rank * (len(shape) + 1)
        rewrites(run, trace(function, inputs), times=times, left={"stack": 0}, exact=True, again=None)

    @pytest.mark.parametrize("rank", BASES)
    @pytest.mark.parametrize("name", RESHAPED)
    def test_some_of_all_orders_and_places(self, name: str, rank: int) -> None:
        """Of one split or two, permuted and repeated, with another operand anywhere, at every pair of dimensions."""
        width, shape = RESHAPED[name]
        base = BASES[rank][width]
        cases = list(product(product(range(rank), range(len(shape) + 1)), ALL))
        chosen = random.Random(f"{name} {rank}").sample(cases, 24)

        def function(x: Any, y: Any, z: Any) -> Any:
            results = []
            for (s, d), order in chosen:
                sizes = [3 * width if dim == s else size for dim, size in enumerate(moved(base, s))]
                wholes = [value.narrow(0, 0, math.prod(sizes)).view(sizes) for value in (x, y)]
                parents = [[part.reshape(shape) for part in take(whole.split(width, s), 3)] for whole in wholes]
                parts = [z.reshape(shape) if parent == 2 else parents[parent][item] for parent, item in order]
                results.append((torch.stack(parts, d) * 2).flatten())
            return torch.cat(results)

        inputs = [torch.randn(200), torch.randn(200), torch.randn(math.prod(shape))]
        run, times = from_two(move_reshape_out_of_split_stack), sum(has_run(order) for _, order in chosen)
        rewrites(run, trace(function, inputs), times=times, exact=True, again=None)

    @pytest.mark.parametrize("order", [(2, 1, 0), (0, 2, 1), (0, 0, 1)])
    def test_other_orders(self, order: tuple[int, ...]) -> None:
        def function(x: Any) -> Any:
            parts = [part.reshape(2, 2) for part in take(x.split(1, 1), 3)]
            return torch.stack([parts[index] for index in order], 0)

        keeps(move_reshape_out_of_split_stack, trace(function, [torch.randn(4, 3)]))

    def test_different_shapes(self) -> None:
        def function(x: Any) -> Any:
            one, two = take(x.split(2, 1), 2)
            return torch.stack([one.reshape(2, 4), two.reshape(4, 2).reshape(2, 4)], 0)

        keeps(move_reshape_out_of_split_stack, trace(function, [torch.randn(4, 4)]))

    def test_unequal_sections_of_nothing(self) -> None:
        """Sections of different sizes have one shape only if they are empty."""
        captured = trace(
            lambda x: torch.stack([part.reshape(0) for part in take(x.split([2, 3], 1), 2)]), [torch.ones(0, 5)]
        )
        keeps(move_reshape_out_of_split_stack, captured, because="not one in the join")

    def test_a_reshape_that_copies_and_is_read_elsewhere(self) -> None:
        """The copy would be made all the same."""

        def function(x: Any) -> Any:
            parts = [part.reshape(6) for part in take(x.split(3, 1), 2)]
            return torch.stack(parts, 0), parts[0].sin()

        keeps(move_reshape_out_of_split_stack, trace(function, [torch.randn(2, 6)]), because="is also read by")

    def test_written_between(self) -> None:
        def function(x: Any) -> Any:
            parts = [part.reshape(4) for part in take(x.split(2, 0), 2)]
            x.add_(1)
            return torch.stack(parts, 0) * 2

        keeps(move_reshape_out_of_split_stack, trace(function, [torch.randn(4, 2)]), because="may be written")
