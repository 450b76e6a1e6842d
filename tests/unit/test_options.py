"""Options: what is accepted, what is refused and with which words, and what the environment says."""

from __future__ import annotations

import logging
import subprocess
import sys
from dataclasses import fields

import pytest

import ferrite
from ferrite.caching import _WITHOUT_EFFECT
from ferrite.options import MODES, WITHOUT_EFFECT, Options, from_environment, resolve, with_effect


def test_options_on_top_of_a_base() -> None:
    assert resolve(Options(check=False), None, {"strict": True}) == Options(check=False, strict=True)


def test_dashes_are_underscores() -> None:
    assert resolve(Options(), None, {"keep-text": True}) == Options(keep_text=True)


def test_unknown_option_names_the_nearest_and_all() -> None:
    with pytest.raises(
        RuntimeError, match=r"Unknown Ferrite option 'strcit'. Did you mean 'strict'\? Valid ones: "
    ) as caught:
        resolve(Options(), None, {"strcit": True})
    for name in ferrite.list_options():
        assert name in str(caught.value)


def test_unknown_mode_names_the_nearest_and_all() -> None:
    with pytest.raises(
        RuntimeError, match=r"Unknown Ferrite mode 'max-autotun'. Did you mean 'max-autotune'"
    ) as caught:
        resolve(Options(), "max-autotun", None)
    for name in MODES:
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("strict", 1, "bool"),
        ("bisect_limit", "three", "int"),
        ("bisect_limit", True, "int"),
        ("debug_dir", 3, "str"),
        ("disable", (1,), "tuple"),
        ("partitioner", "min-cut", "Callable"),
    ],
)
def test_wrong_type_says_expected_and_given(name: str, value: object, kind: str) -> None:
    with pytest.raises(RuntimeError, match=f"option '{name}' expects .*{kind}.*given"):
        resolve(Options(), None, {name: value})


def test_names_may_come_as_one_string() -> None:
    assert resolve(Options(), None, {"disable": "joint, post_grad.view_to_reshape"}).disable == (
        "joint",
        "post_grad.view_to_reshape",
    )


def test_modes_are_listed() -> None:
    assert set(ferrite.list_mode_options()) == {
        "default",
        "reduce-overhead",
        "max-autotune",
        "max-autotune-no-cudagraphs",
    }
    assert ferrite.list_mode_options("default") == {}


def test_environment_is_read() -> None:
    found = from_environment(
        {"FERRITE_STRICT": "1", "FERRITE_BISECT_LIMIT": "7", "FERRITE_DISABLE": "a,b", "HOME": "x"}
    )
    assert found == Options(strict=True, bisect_limit=7, disable=("a", "b"))


def test_bad_environment_is_reported_once_and_ignored(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FERRITE_CACHE", raising=False)  # which all tests turn off
    monkeypatch.setenv("FERRITE_COMPILE_MODE", "sideways")
    import os

    with caplog.at_level(logging.WARNING):
        assert from_environment(os.environ) == Options()
        assert from_environment(os.environ) == Options()
    assert len(caplog.records) == 1
    assert "sideways" in caplog.text
    assert "serialize" in caplog.text


def test_unknown_environment_variable_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert from_environment({"FERRITE_STRCIT": "1"}) == Options()
    assert "Did you mean 'FERRITE_STRICT'" in caplog.text


def test_convenience_refuses_before_the_first_call() -> None:
    with pytest.raises(RuntimeError, match="Unknown Ferrite option"):
        ferrite.compile(lambda x: x, strcit=True)


def test_what_no_rewrite_may_ask_for_is_what_the_cache_does_not_look_at() -> None:
    assert WITHOUT_EFFECT == _WITHOUT_EFFECT
    assert with_effect(Options()).keys() == {entry.name for entry in fields(Options)} - _WITHOUT_EFFECT


def test_importing_the_package_is_light() -> None:
    """Neither torch nor LLVM nor rich is loaded until something is compiled or shown."""
    code = "import sys, ferrite; print([m for m in ('torch', 'llvmlite', 'rich') if m in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )
