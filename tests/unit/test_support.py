"""Objects that all graphs share: the first that is given is used, and one that does not load harms nobody for long."""

from __future__ import annotations

from typing import Any

import pytest

from ferrite.errors import ToolFailed
from ferrite.native import support


@pytest.fixture(autouse=True)
def _nothing_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "_objects", {})


def load(made: bytes) -> Any:
    if made == b"garbage":
        raise ToolFailed("code did not load", ran="link")
    return made


def test_what_was_given_first_is_used() -> None:
    support.give({support.LAUNCHER: b"first"})
    support.give({support.LAUNCHER: b"second"})
    assert support.loaded(support.LAUNCHER, lambda: b"made", load) == b"first"
    assert support.held() == {support.LAUNCHER: b"first"}


def test_an_object_that_does_not_load_is_forgotten() -> None:
    support.give({support.LAUNCHER: b"garbage"})
    with pytest.raises(ToolFailed):
        support.loaded(support.LAUNCHER, lambda: b"made", load)
    assert support.loaded(support.LAUNCHER, lambda: b"made", load) == b"made"


def test_nobody_knows_another_name() -> None:
    with pytest.raises(ValueError, match="no graph needs a spring"):
        support.give({"spring": b""})
