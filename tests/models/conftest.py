"""What tests of models share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.both_hosts import both_hosts
from tests.models.against_eager import BACKEND


@pytest.fixture
def in_both_executions() -> Iterator[None]:
    """Every call of a compiled graph runs natively and in Python, and gives the same bits."""
    with both_hosts() as compared:
        yield
    assert compared or BACKEND != "ferrite", "no graph has a native program"
