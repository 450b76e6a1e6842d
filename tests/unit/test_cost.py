"""Bytes and operations of every step of small graphs, counted by hand."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ferrite
from ferrite.report.record import GraphRecord
from ferrite.step_cost import BYTES_PER_NANOSECOND, FLOPS_PER_NANOSECOND, StepCost


def record_of(
    function: Callable[..., Any], *inputs: Tensor, options: dict[str, Any] | None = None, **how: Any
) -> GraphRecord:
    options = {"strict": True, "cache": "off", "products": "library", **(options or {})}
    with torch.no_grad(), torch._dynamo.config.patch(capture_scalar_outputs=True):
        torch.compile(function, backend="ferrite", fullgraph=True, options=options, **how)(*inputs)
    record = ferrite.last_record()
    assert record is not None
    graph = record.phase("inference")
    assert graph is not None
    return graph


def counted(graph: GraphRecord) -> dict[str, int]:
    """Bytes of the steps that move any."""
    return {cost.step: cost.bytes for cost in graph.costs if cost.bytes}


def test_a_kernel_reads_its_operands_and_writes_its_result() -> None:
    """Two operands, of which one is expanded from a row, and one result."""
    graph = record_of(lambda x, y: (x + y.expand(8, 16)).exp() * 2, torch.randn(8, 16), torch.randn(1, 16))
    assert counted(graph) == {"kernel_0(arg1_1, arg0_1, mul)": 512 + 64 + 512}
    assert graph.bytes == 1088


def test_products_and_what_lies_over_them() -> None:
    graph = record_of(lambda x, w: (x @ w).relu() @ w, torch.randn(64, 32), torch.randn(32, 32))
    matrix, weight = 64 * 32 * 4, 32 * 32 * 4
    assert counted(graph) == {
        "mm = aten.mm.default": 2 * matrix + weight,
        "kernel_0(mm, mm)": 2 * matrix,
        "mm_1 = aten.mm.default": 2 * matrix + weight,
    }
    products = [cost for cost in graph.costs if cost.flops is not None]
    assert [cost.flops for cost in products] == [2 * 64 * 32 * 32] * 2


def test_memory_that_is_written_in_place_is_read_and_written() -> None:
    graph = record_of(lambda x, y: (x.add_(y), None)[1], torch.randn(100), torch.randn(100))
    assert counted(graph) == {"kernel_0(arg1_1, arg0_1)": 400 + 2 * 400}


def test_views_and_parts() -> None:
    """A sort reads a slice and writes values and places; to take them out of its result moves nothing."""

    def function(x: Tensor) -> tuple[Tensor, ...]:
        values, order = x[:4].sort(1)
        return values * 2, order.t()

    graph = record_of(function, torch.randn(8, 16))
    slice_, places = 4 * 16 * 4, 4 * 16 * 8
    assert sorted(counted(graph).values()) == [2 * slice_, 2 * slice_ + places]


def test_sizes_that_change_count_as_in_the_trace() -> None:
    graph = record_of(lambda x: torch.cat([x, x]).relu(), torch.randn(6, 5), dynamic=True)
    assert counted(graph) == {"kernel_0(arg2_1, relu)": 3 * 6 * 5 * 4}


def test_sizes_that_only_the_data_knows_count_nothing() -> None:
    def function(count: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        return torch.ones(count.item()) * 2, x + 1

    graph = record_of(function, torch.tensor(4), torch.randn(10))
    assert graph.bytes == 8 + 80  # the count that is read, and the sum


def test_elements_and_time() -> None:
    cost = StepCost("mm", 4000, 3_300_000)
    assert cost.elements == 1000
    assert cost.nanoseconds == 3_300_000 / FLOPS_PER_NANOSECOND
    assert StepCost("kernel_0", 4000).nanoseconds == 4000 / BYTES_PER_NANOSECOND


def test_a_graph_from_the_cache_has_its_costs_too(tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        torch._dynamo.reset()
        found.append(record_of(lambda x: x + 1, torch.randn(1000), options={"cache": "on", "cache_dir": str(tmp_path)}))
    assert found[0].costs == found[1].costs != ()
    assert found[1].passes == found[0].passes  # it is the record of the compile that is kept


def test_the_log_tells(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="ferrite"):
        graph = record_of(lambda x: x + 1, torch.randn(1000))
    told = [message for message in caplog.messages if "bytes" in message]
    assert told == [f"{graph.name} reads and writes 8,000 bytes in 2 steps"]
