"""PRE-06, PRE-07, PRE-08: products that read and write transposed matrices as they stand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import ferrite
from ferrite.graph.arguments import find
from ferrite.graph.pre_grad.transpose_linear_input import transpose_linear_input
from ferrite.graph.pre_grad.transpose_linear_output import transpose_linear_output
from ferrite.graph.pre_grad.transpose_matmul import transpose_matmul
from ferrite.graph.text import show_graph
from tests.pre_grad.harness import capture, keeps, rewrites, run_passes

torch.manual_seed(0)
X = torch.randn(2, 7, 5) / 2
W, B = torch.randn(6, 5) / 3, torch.randn(6)
TURNED = X.mT.contiguous()
aten = torch.ops.aten

SWAPS: list[Callable[[Any], Any]] = [
    lambda y: y.permute(0, 2, 1),
    lambda y: y.permute((0, 2, 1)),  # the peer misses this and all below: #194620
    lambda y: y.permute(0, -1, -2),
    lambda y: torch.permute(y, (0, 2, 1)),
    lambda y: torch.permute(input=y, dims=[0, 2, 1]),
    lambda y: y.permute(dims=(0, 2, 1)),
    lambda y: y.transpose(-1, -2),
    lambda y: y.transpose(1, 2),
    lambda y: torch.transpose(y, dim0=2, dim1=1),
    lambda y: y.swapaxes(1, 2),
    lambda y: y.swapdims(-2, -1),
    lambda y: y.mT,
    lambda y: y.movedim(1, 2),
    lambda y: torch.movedim(y, -1, -2),
    lambda y: aten.permute.default(y, [0, 2, 1]),
]
OTHERS: list[Callable[[Any], Any]] = [
    lambda y: y.permute(1, 0, 2),
    lambda y: y.permute(2, 1, 0),
    lambda y: y.permute(1, 2, 0),
    lambda y: y.permute(0, 1, 2),
    lambda y: y.transpose(0, 1),
    lambda y: y.movedim(0, 2),
    lambda y: y.movedim((1, 2), (0, 1)),
]


def used(y: Any) -> Any:
    """Reads every element, whatever the strides, and shows none of them."""
    return (y * 1.5).sum(0).sum(-1)


class TestLinearOutput:
    def test_with_and_without_bias(self) -> None:
        """The peer raised a KeyError without one: #95912."""
        run = transpose_linear_output
        both = {"linear": 0, "bmm": 0}
        rewrites(run, lambda x, w, b: used(F.linear(x, w, b).mT), [X, W, B], times=1, left={"baddbmm": 1} | both)
        rewrites(run, lambda x, w: used(F.linear(x, w).mT), [X, W], times=1, left={"matmul": 1} | both)
        rewrites(run, lambda x, w: used(F.linear(x, w, None).mT), [X, W], times=1, left={"matmul": 1} | both)
        rewrites(
            run,
            lambda x, w, b: used(F.linear(input=x, bias=b, weight=w).mT),
            [X, W, B],
            times=1,
            left={"baddbmm": 1} | both,
        )

    def test_spellings(self) -> None:
        count = len(SWAPS)
        rewrites(
            transpose_linear_output,
            lambda x, w, b: [used(swap(F.linear(x, w, b))) for swap in SWAPS],
            [X, W, B],
            times=count,
            left={"linear": 0, "baddbmm": count},
        )

    def test_two_dimensions(self) -> None:
        swaps = [lambda y: y.t(), lambda y: y.T, lambda y: torch.t(y), lambda y: y.permute(1, 0), lambda y: y.mT]
        rewrites(
            transpose_linear_output,
            lambda x, w, b: [used(swap(F.linear(x, w, b)).contiguous()[None]) for swap in swaps],
            [X[0], W, B],
            times=5,
            left={"linear": 0, "addmm": 5},
        )

    def test_four_dimensions(self) -> None:
        function = lambda x, w, b: F.linear(x, w, b).mT.contiguous()
        four = X.reshape(1, 2, 7, 5)
        rewrites(transpose_linear_output, function, [four, W, B], times=1, left={"linear": 0, "matmul": 1, "add": 1})
        half = [value.bfloat16() for value in (four, W, B)]
        keeps(transpose_linear_output, function, half, because="would be rounded twice")

    def test_halves_round_once(self) -> None:
        half = [value.bfloat16() for value in (X, W, B)]
        rewrites(
            transpose_linear_output,
            lambda x, w, b: F.linear(x, w, b).mT.contiguous(),
            half,
            times=1,
            left={"baddbmm": 1},
        )

    def test_autocast_keeps_its_dtype(self) -> None:
        def function(x: Any, w: Any, b: Any) -> Any:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return F.linear(x, w, b).mT.contiguous()

        with torch.no_grad():  # gradients are f32 here, and rounded as bf16: no tolerance fits both
            rewrites(transpose_linear_output, function, [X, W, B], times=1, left={"linear": 0, "baddbmm": 1})
        keeps(transpose_linear_output, function, [X[None], W, B], because="is bf16")

    def test_batches_may_vary(self) -> None:
        rewrites(
            transpose_linear_output,
            lambda x, w, b: F.linear(x, w, b).mT.contiguous(),
            [X, W, B],
            times=1,
            left={"linear": 0, "matmul": 1, "add": 1},
            dynamic=True,
        )

    def test_other_permutations_stay(self) -> None:
        function = lambda x, w, b: [other(F.linear(x, w, b)).sum() for other in OTHERS]
        keeps(transpose_linear_output, function, [X, W, B])

    def test_linear_used_twice(self) -> None:
        """The peer makes the product twice."""

        def function(x: Any, w: Any) -> Any:
            y = F.linear(x, w)
            return used(y.mT) + y.sum()

        keeps(transpose_linear_output, function, [X, W], because="y has 2 users")

    @pytest.mark.parametrize("written", [0, 1, 2])
    def test_written_between(self, written: int) -> None:
        """The peer gives wrong results."""

        def function(*inputs: Any) -> Any:
            y = F.linear(*inputs)
            inputs[written].add_(1)
            return used(y.permute(0, 2, 1))

        keeps(transpose_linear_output, function, [X, W, B], because="may be written by add_ between")

    def test_result_that_is_returned_keeps_its_strides(self) -> None:
        keeps(transpose_linear_output, lambda x, w, b: F.linear(x, w, b).mT, [X, W, B], because="is returned")
        keeps(
            transpose_linear_output,
            lambda x, w, b: F.linear(x, w, b).mT.relu(),
            [X, W, B],
            because="would be returned as",
        )

    def test_one_dimension_and_one_row(self) -> None:
        keeps(transpose_linear_output, lambda x, w: F.linear(x, w), [X[0, 0], W])
        keeps(transpose_linear_output, lambda x, w: F.linear(x, w[0]).mT.sum(), [X, W])


class TestLinearInput:
    def test_with_and_without_bias(self) -> None:
        run = transpose_linear_input
        both = {"linear": 0, "bmm": 0}
        rewrites(run, lambda x, w, b: F.linear(x.mT, w, b), [TURNED, W, B], times=1, left={"baddbmm": 1} | both)
        rewrites(run, lambda x, w: F.linear(x.mT, w), [TURNED, W], times=1, left={"matmul": 1} | both)
        rewrites(run, lambda x, w: F.linear(weight=w, input=x.mT), [TURNED, W], times=1, left={"matmul": 1} | both)

    def test_spellings(self) -> None:
        count = len(SWAPS)
        rewrites(
            transpose_linear_input,
            lambda x, w, b: [F.linear(swap(x), w, b) for swap in SWAPS],
            [TURNED, W, B],
            times=count,
            left={"linear": 0, "baddbmm": count},
        )

    def test_the_copy_goes(self) -> None:
        rewrites(
            transpose_linear_input,
            lambda x, w, b: F.linear(x.mT.contiguous(), w, b),
            [TURNED, W, B],
            times=1,
            left={"contiguous": 0, "linear": 0, "baddbmm": 1},
        )

    def test_a_copy_that_others_read_stays(self) -> None:
        def function(x: Any, w: Any) -> Any:
            copy = x.mT.contiguous()
            return F.linear(copy, w), copy.sum()

        keeps(transpose_linear_input, function, [TURNED, W], because="copy is also read by")

    def test_two_and_four_dimensions(self) -> None:
        rewrites(
            transpose_linear_input, lambda x, w, b: F.linear(x.t(), w, b), [TURNED[0], W, B], times=1, left={"addmm": 1}
        )
        rewrites(
            transpose_linear_input,
            lambda x, w, b: F.linear(x.mT, w, b),
            [TURNED[None], W, B],
            times=1,
            left={"linear": 0, "matmul": 1, "add": 1},
        )

    def test_halves_and_autocast(self) -> None:
        half = [value.bfloat16() for value in (TURNED, W, B)]
        rewrites(transpose_linear_input, lambda x, w, b: F.linear(x.mT, w, b), half, times=1, left={"baddbmm": 1})

        def function(x: Any, w: Any, b: Any) -> Any:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return F.linear(x.mT, w, b)

        with torch.no_grad():
            rewrites(transpose_linear_input, function, [TURNED, W, B], times=1, left={"baddbmm": 1})

    def test_a_transpose_that_others_read_costs_nothing(self) -> None:
        def function(x: Any, w: Any) -> Any:
            turned = x.mT
            return F.linear(turned, w), turned.sum()

        rewrites(transpose_linear_input, function, [TURNED, W], times=1, left={"linear": 0, "matmul": 1})

    def test_other_permutations_stay(self) -> None:
        cube = torch.randn(5, 5, 5)
        keeps(transpose_linear_input, lambda x, w: [F.linear(other(x), w) for other in OTHERS], [cube, W])

    def test_written_between(self) -> None:
        def function(x: Any, w: Any) -> Any:
            turned = x.mT.contiguous()
            x.add_(1)
            return F.linear(turned, w)

        keeps(transpose_linear_input, function, [TURNED, W], because="l_x_ may be written by add_ between")

    def test_a_view_sees_the_write_and_so_does_the_product(self) -> None:
        def function(x: Any, w: Any) -> Any:
            turned = x.mT
            x.add_(1)
            return F.linear(turned, w)

        keeps(transpose_linear_input, function, [TURNED, W], because="may be written by add_ between")


L, R = torch.randn(2, 5, 7), torch.randn(2, 5, 6)


class TestMatmul:
    def test_spellings(self) -> None:
        count = len(SWAPS)
        rewrites(
            transpose_matmul,
            lambda x, y: [torch.bmm(swap(x), y) for swap in SWAPS],
            [L, R],
            times=count,
            left={"bmm": 0, "permute": 0, "mT": 0, "movedim": 0, "matmul": count, "transpose": count},
        )

    def test_products(self) -> None:
        def function(x: Any, y: Any) -> Any:
            first = torch.matmul(x.mT, y), x.mT @ y, x.mT.matmul(y)
            return *first, torch.bmm(x.mT, mat2=y), torch.matmul(input=x.mT, other=y), x.mT.bmm(y)

        rewrites(transpose_matmul, function, [L, R], times=6, left={"bmm": 0, "matmul": 6, "transpose": 6})

    def test_right_operand_and_both(self) -> None:
        rewrites(transpose_matmul, lambda x, y: x @ y.mT, [L.mT, R.mT.contiguous()], times=1, left={"transpose": 1})
        rewrites(
            transpose_matmul,
            lambda x, y: torch.bmm(x.mT, y.permute(0, 2, 1)),
            [L, R.mT.contiguous()],
            times=1,
            left={"bmm": 0, "matmul": 1, "transpose": 2},
        )

    def test_two_and_four_dimensions(self) -> None:
        rewrites(transpose_matmul, lambda x, y: x.T @ y, [L[0], R[0]], times=1, left={"matmul": 1, "transpose": 1})
        rewrites(transpose_matmul, lambda x, y: torch.mm(x.t(), y), [L[0], R[0]], times=1, left={"mm": 0, "matmul": 1})
        rewrites(transpose_matmul, lambda x, y: x.mT @ y, [L[None], R[None]], times=1, left={"transpose": 1})

    def test_operands_of_different_rank(self) -> None:
        rewrites(transpose_matmul, lambda x, y: x.mT @ y, [L, R[0]], times=1, left={"matmul": 1, "transpose": 1})

    def test_the_copy_goes(self) -> None:
        rewrites(
            transpose_matmul,
            lambda x, y: torch.bmm(x.mT.contiguous(), y.mT.clone().mT),
            [L, R],
            times=1,
            left={"contiguous": 0, "matmul": 1},
        )

    def test_sizes_may_vary(self) -> None:
        rewrites(transpose_matmul, lambda x, y: torch.bmm(x.mT, y), [L, R], times=1, left={"bmm": 0}, dynamic=True)

    def test_products_that_are_written_plainly_are_no_candidates(self) -> None:
        outcome = keeps(transpose_matmul, lambda x, y: torch.matmul(x.transpose(-2, -1), y), [L, R])
        assert outcome.reasons == []

    def test_other_permutations_stay(self) -> None:
        cube = torch.randn(5, 5, 5)
        keeps(transpose_matmul, lambda x, y: [torch.bmm(other(x), y) for other in OTHERS], [cube, cube + 1])

    def test_written_between(self) -> None:
        def function(x: Any, y: Any) -> Any:
            turned = x.mT.contiguous()
            x.add_(1)
            return torch.bmm(turned, y)

        keeps(transpose_matmul, function, [L, R], because="l_x_ may be written by add_ between")

    def test_bmm_of_two_dimensions_goes_on_raising(self) -> None:
        """A graph built by hand: eager refuses it, and matmul would not."""
        module = capture(lambda x, y: torch.mm(x.t(), y), [L[0], R[0]]).module
        (product,) = find(module.graph, "mm")
        product.target = torch.bmm
        before = show_graph(module.graph)
        assert transpose_matmul(module.graph) == 0
        assert show_graph(module.graph) == before

    def test_bmm_with_other_batches_goes_on_raising(self) -> None:
        module = capture(lambda x, y: torch.matmul(x.mT, y), [L, R[:1]]).module
        (product,) = find(module.graph, "matmul")
        product.target = torch.bmm
        before = show_graph(module.graph)
        assert transpose_matmul(module.graph) == 0
        assert show_graph(module.graph) == before

    def test_out_stays(self) -> None:
        def function(x: Any, y: Any, o: Any) -> Any:
            return torch.bmm(x.mT, y, out=o).sum()

        keeps(transpose_matmul, function, [L, R, torch.zeros(2, 7, 6)])


def test_asked_for_by_name() -> None:
    """All passes of the group at once, through torch.compile."""

    def function(x: Any, w: Any, b: Any) -> Any:
        turned = F.linear(x, w, b).permute(0, 2, 1).contiguous()
        again = F.linear(turned.mT, w.t(), None)
        return torch.bmm(again.transpose(1, 2).contiguous(), again)

    torch._dynamo.reset()
    names = ["transpose_linear_output", "transpose_linear_input", "transpose_matmul"]
    options = {"pre_grad": {name: {} for name in names}, "executor": "eager", "strict": True}
    found = torch.compile(function, backend="ferrite", options=options)(X, W, B)
    torch.testing.assert_close(found, function(X, W, B))
    changed = {run.name: run.changed for run in ferrite.last_record().passes}
    assert [changed[name] for name in names] == [1, 1, 1]


def test_new_calls_keep_what_the_user_annotated() -> None:
    """A stream, for one."""
    captured = capture(lambda x, w: used(F.linear(x, w).mT), [X, W])
    for node in captured.module.graph.nodes:
        if node.op not in ("placeholder", "output"):
            node.meta["custom"] = {"stream": 1}
    known = {node.name for node in captured.module.graph.nodes}
    found = run_passes(captured, transpose_linear_output)
    made = [node for node in found.module.graph.nodes if node.name not in known]
    assert made
    assert all(node.meta["custom"] == {"stream": 1} for node in made)
