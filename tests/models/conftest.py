"""Every test starts with nothing compiled, and leaves nothing compiled behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
