"""The check that the two executions of a host program agree: it lets them pass, and sees each kind of difference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from tests import both_hosts as checking
from tests.both_hosts import HostsDiffer, both_hosts
from tests.fuzz.engines import ENGINES
from tests.fuzz.generate import generate
from tests.fuzz.judge import judge
from tests.ops.cases import STANDARD, groups, units
from tests.ops.check import Engine, run_case

OPTIONS = {"cache": "off", "strict": True, "fallback_random": True}


def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    y.add_(1.0)
    return (x @ y).tanh() + torch.rand_like(x), x[1:]


def run() -> list[str]:
    torch._dynamo.reset()
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    with both_hosts() as compared, torch.no_grad():
        torch.compile(function, backend="ferrite", options=OPTIONS)(x, y)
    return compared


def test_both_run() -> None:
    assert len(run()) == 1


def nudge(results: list[Any], args: list[Any]) -> None:
    first = next(value for value in results if value.numel() == 16)
    first.view(torch.int32)[0, 0] ^= 1


def write(results: list[Any], args: list[Any]) -> None:
    args[-1][0, 0] += 1.0


def draw(results: list[Any], args: list[Any]) -> None:
    torch.rand(1)


def unshare(results: list[Any], args: list[Any]) -> None:
    results[:] = [value.clone() for value in results]


def turn(results: list[Any], args: list[Any]) -> None:
    results[:] = [value.t().contiguous().t() for value in results]


def fail(results: list[Any], args: list[Any]) -> None:
    raise IndexError("planted")


def plant(spoil: Callable[[list[Any], list[Any]], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the execution in Python go wrong."""
    in_python = checking._in_python

    def spoilt(*loading: Any) -> Callable[[list[Any]], Any]:
        python = in_python(*loading)

        def call(args: list[Any]) -> Any:
            given = list(args)
            results = list(python(args))
            spoil(results, given)
            return tuple(results)

        return call

    monkeypatch.setattr(checking, "_in_python", spoilt)


@pytest.mark.parametrize("spoil", [nudge, write, draw, unshare, turn, fail], ids=lambda spoil: spoil.__name__)
def test_a_difference_is_seen(spoil: Callable[[list[Any], list[Any]], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(spoil, monkeypatch)
    with pytest.raises(HostsDiffer):
        run()


def test_the_fuzzer_and_the_conformance_sweep_see_it(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(draw, monkeypatch)
    assert judge(generate(2026, 0), ENGINES["hosts"]).status == "different"
    assert judge(generate(2026, 0), ENGINES["native"]).status != "different"
    unit = next(unit for unit in units(STANDARD) if unit.op == "tanh")
    group = next(iter(groups(unit, STANDARD)))
    case, sample = group.members[0]
    ferrite = Engine("ferrite", {"cache": "off"})
    assert run_case(case, sample, ferrite).passed
    assert run_case(case, sample, msgspec.structs.replace(ferrite, both_hosts=True)).kind == "hosts"
