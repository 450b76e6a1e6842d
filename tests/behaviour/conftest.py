"""Every test starts with nothing compiled and with PyTorch's global state as a fresh process has it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import ferrite.backend

pytest.register_assert_rewrite("tests.behaviour.compare")


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    ferrite.backend.reset()  # also of what tests compiled by calling the backend themselves
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
