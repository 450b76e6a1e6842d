"""What all tests share: `--bless` for golden texts, one thread, and a compiler that remembers nothing."""

from __future__ import annotations

import gc
import logging

import pytest
import torch
import torch._dynamo

from ferrite.artifact import native_host


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--bless", action="store_true", help="rewrite the lower half of golden files with what came out")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)  # test processes run side by side
    native_host.SETTLES_ALL = True  # what native code calls leaves no Python error behind
    # pytest's log capture would otherwise receive, and so pay for, every structured trace of every compile.
    logging.getLogger("torch.__trace").propagate = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long begins first: with several processes, short tests are left to even out the end of a run."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_collection_finish() -> None:
    """Torch and nine thousand tests stay until the end: a collection of garbage need not look at them each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
