"""Every test of this folder starts from the same seed."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _same_seed() -> None:
    torch.manual_seed(0)
