"""How much of every model becomes loops. What is left to eager must be a library call, but for a few in a hundred."""

from __future__ import annotations

import pytest

from bench.coverage import LIMIT, coverage_of
from bench.zoo import ZOO


@pytest.mark.parametrize("name", ZOO)
def test_nearly_every_call_is_lowered(name: str) -> None:
    coverage = coverage_of(name)
    gaps = ", ".join(f"{op} {count} ({reason})" for (op, reason), count in coverage.gaps.most_common())
    assert coverage.lowered > 0
    assert coverage.share >= LIMIT, f"{100 * coverage.share:.1f}% of {name}; in eager: {gaps}"
