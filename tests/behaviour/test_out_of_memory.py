"""Memory that is not there, and sizes that no machine has: eager's error, nothing lost, and the next call works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.behaviour.child import run_python
from tests.behaviour.compare import STRICT

UNDER_A_LIMIT = """
import gc, re, resource
import torch, ferrite

ROOM = 1 << 26  # bytes that a call may still take

def block(x):  # two inner buffers as large as x
    for _ in range(3):
        x = x.softmax(-1).t().contiguous()
    return x.sum()

def result(x):
    return x * 2

def pages(which):
    gc.collect()
    return int(open("/proc/self/statm").read().split()[which])

def words(function, x):
    try:
        function(x)
    except RuntimeError as error:
        assert type(error) is RuntimeError, type(error)
        return str(error)
    raise SystemExit("it should have failed")

one = torch.ones(1)
small, large = one.expand(30, 40), one.expand(6000, 8000)
for host in ("native", "python"):
    for function in (block, result):
        torch._dynamo.reset()
        options = {"strict": True, "host": host}
        compiled = torch.compile(function, backend="ferrite", dynamic=True, options=options)
        expected = compiled(small)
        assert [d.reason for g in ferrite.last_record().graphs for d in g.decisions if d.what == "native host"] == []
        ferrite.release_memory()
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (pages(0) * resource.getpagesize() + ROOM, hard))
        for said in (words(function, large), words(compiled, large)):
            assert "DefaultCPUAllocator: can't allocate memory: you tried to allocate" in said, said
            assert int(re.search(r"allocate (\\d+) bytes", said)[1]) >= 4 * 6000 * 8000, said
        for _ in range(20):
            words(compiled, large)
        before = pages(1)
        for _ in range(300):
            words(compiled, large)
        assert pages(1) - before < 100, (host, function, pages(1), before)
        assert torch.equal(compiled(small), expected)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
print("done")
"""


def test_memory_that_is_not_there() -> None:
    assert run_python(UNDER_A_LIMIT).output.strip().endswith("done")


def inner(x: Tensor, y: Tensor) -> Tensor:
    """Two inner buffers of all pairs."""
    pairs = x[:, None] * y
    for _ in range(3):
        pairs = pairs.softmax(-1).t().contiguous()
    return pairs.sum()


def given(x: Tensor, y: Tensor) -> Tensor:
    return x[:, None] * y


@pytest.mark.parametrize("host", ["native", "python"])
@pytest.mark.parametrize("function", [inner, given])
def test_sizes_whose_product_no_machine_has(function: Callable[..., Any], host: str) -> None:
    """The bytes of 2^32 pairs of 2^32 numbers are 0 in 64 bits."""
    one = torch.ones(1)
    compiled = torch.compile(function, backend="ferrite", dynamic=True, options={**STRICT, "host": host})
    expected = compiled(one.expand(6), one.expand(8))
    for rows, columns in ((2**32, 2**32), (2**32, 2**30), (2**31, 2**31 + 8), (2**40, 2**21)):
        with pytest.raises(RuntimeError, match=r"Storage size calculation overflowed|can't allocate memory"):
            function(one.expand(rows), one.expand(columns))
        with pytest.raises(RuntimeError, match=r"Storage size calculation overflowed|can't allocate memory"):
            compiled(one.expand(rows), one.expand(columns))
    assert torch.equal(compiled(one.expand(6), one.expand(8)), expected)
