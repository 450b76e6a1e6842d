"""Options: what is accepted, what is refused and with which words, and what the environment says."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ferrite
from ferrite.options import MODES, Options, from_environment, resolve
from tests.behaviour.child import installed, run_python


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


@pytest.mark.parametrize(
    ("variable", "text", "says"),
    [
        ("FERRITE_COMPILE_MODE", "sideways", "normal, serialize"),
        ("FERRITE_EXECUTOR", "nativ", "Did you mean 'native'"),
        ("FERRITE_STRICT", "maybe", "Did you mean 'yes'.*false, no, off, on, true, yes"),
        ("FERRITE_CACHE_MEGABYTES", "-3", "at least 0"),
        ("FERRITE_BISECT_LIMIT", "three", "at least 0"),
        ("FERRITE_BISECT_LIMIT", "1.5", "at least 0"),
        ("FERRITE_STRCIT", "1", "Did you mean 'FERRITE_STRICT'"),
        ("FERRITE_PARTITIONER", "min_cut", "Unknown Ferrite environment variable"),
    ],
)
def test_an_environment_that_means_nothing_is_an_error(variable: str, text: str, says: str) -> None:
    with pytest.raises(RuntimeError, match=says) as caught:
        from_environment({"HOME": "x", variable: text})
    assert variable in str(caught.value)


def test_an_empty_variable_is_the_default() -> None:
    assert from_environment({"FERRITE_STRICT": "", "FERRITE_BISECT_LIMIT": "", "FERRITE_DISABLE": ""}) == Options()


# For every option: what is refused, and the words in which.
REFUSED: dict[str, list[tuple[Any, str]]] = {
    "strict": [(1, "bool"), ("yes", "bool"), (None, "bool")],
    "disable": [
        ("nope", "Valid ones: .*view_to_reshape"),
        ("post_grad.view_to_reshap", "Did you mean 'post_grad.view_to_reshape'"),
        ("joint.view_to_reshape", "Unknown"),
        ("lower", "Unknown"),  # a stage without passes
        (1, "tuple"),
    ],
    "pre_grad": [
        ("normalise_op", "Did you mean 'normalise_ops'"),
        ({"normalise_ops": 3}, "settings"),
        ({"normalise_ops": {"countr": 2}}, "Did you mean 'counter'"),
        ({"normalise_ops": {"counter": -1}}, "at least 0, given -1"),
        ({"normalise_ops": {"counter": True}}, "whole number"),
        ({"split_stack_to_cats": {"least": "10"}}, "'least' of split_stack_to_cats expects a whole number"),
        ({"batch_relu": {"same_users": 1}}, "'same_users' of batch_relu expects True or False"),
    ],
    "pre_grad_rewrites": [(0, "bool")],
    "pre_dispatch": [("on", "bool")],
    "pre_dispatch_add": [("merge_cat", "Did you mean 'merge_cats'"), (3, "tuple")],
    "pre_dispatch_remove": [("merge_cat", "Did you mean 'merge_cats'")],
    "numeric_check": [
        ("pregrad", "Did you mean 'pre_grad'"),
        ({"pre_grad": {"precison": 1.0}}, "Did you mean 'precision'"),
        ({"pre_grad": {"precision": -1.0}}, "above 0"),
        ({"pre_grad": {"precision": "high"}}, "above 0"),
        ({"pre_grad": True, "steps": 1.5}, "whole number"),
        ({"precision": 1.0}, "settings"),
    ],
    "bisect_limit": [(-1, "at least 0"), (True, "int"), ("3", "int")],
    "bisect_rewrites": [(-1, "at least 0")],
    "bisect_lowerings": [(-1, "at least 0")],
    "bisect_kernels": [(1.0, "int")],
    "explain_patterns": [("no node", "names of nodes"), (3, "tuple")],
    "check": [(None, "bool")],
    "keep_text": [(1, "bool")],
    "decompose": [
        ("aten.nope", "no op 'aten.nope'"),
        ("addmm", "Did you mean 'aten.addmm.default'"),
        ("aten.sort.default", "no decomposition"),
        ("math.sin", "no op"),
        ("(", "no op"),
    ],
    "partitioner": [(3, "Callable"), ("min_cut", "Callable")],
    "keep_output_stride": [(1, "bool")],
    "donate_buffers": [(1, "bool")],
    "runtime_asserts": [(1, "bool")],
    "skip_unsupported_devices": [(1, "bool")],
    "compile_mode": [("serialise", "Did you mean 'serialize'"), (3, "str")],
    "executor": [("nativ", "Did you mean 'native'")],
    "host": [("c++", "native, python")],
    "products": [("loop", "Did you mean 'loops'")],
    "layout": [(True, "str")],
    "padding": [("of", "Did you mean 'off'")],
    "fallback_random": [(1, "bool")],
    "cache": [("readonly", "Did you mean 'read-only'"), (False, "str")],
    "cache_dir": [("{file}/below", "Not a directory"), ("{file}", "File exists"), ("a\0b", "null"), (3, "str")],
    "cache_megabytes": [(-3, "at least 0"), (1.5, "int")],
    "debug": [("yes", "bool")],
    "debug_inputs": [(1, "bool")],
    "debug_dir": [("{file}/below", "Not a directory"), ("{file}", "File exists")],
    "perf_map": [(1, "bool")],
    "gdb": [(1, "bool")],
}


def test_the_table_names_every_option() -> None:
    assert REFUSED.keys() == ferrite.list_options().keys()


@pytest.mark.parametrize(
    ("name", "value", "says"), [(name, *case) for name, cases in REFUSED.items() for case in cases], ids=str
)
def test_what_means_nothing_is_an_error(name: str, value: Any, says: str, tmp_path: Path) -> None:
    """At once by `ferrite.compile`; else at the first call, where it is no reason to run the graph in eager."""
    (tmp_path / "file").write_text("in the way")
    if isinstance(value, str):
        value = value.replace("{file}", str(tmp_path / "file"))
    options = {"cache": "on", "cache_dir": str(tmp_path / "cache"), "debug": name == "debug_dir", name: value}
    with pytest.raises(RuntimeError, match=f"(?s){says}"):
        ferrite.compile(lambda x: x + 1, **options)
    compiled = torch.compile(lambda x: x + 1, backend="ferrite", options=options)
    with pytest.raises(RuntimeError, match=f"(?s){says}"):
        compiled(torch.ones(1))
    assert ferrite.last_record() is None


def test_what_is_valid_compiles() -> None:
    with ferrite.register_pass("joint", lambda graph: 0, name="mine"):
        options = {
            "disable": "mine, joint.mine, loops, view_to_reshape, post_grad.channels_last, pre_grad.merge_cats",
            "pre_grad": {"split_stack_to_cats": {"least": 3, "counter": 2}, "batch_relu": {"same_users": True}},
            "numeric_check": {"pre_grad": True, "precision": 1e-3},
            "decompose": ("aten.gelu.default", "aten.addmm"),
            "explain_patterns": ("all", "sin"),
        }
        compiled = torch.compile(lambda x: x.sin(), backend="ferrite", options={**options, "strict": True})
        torch.testing.assert_close(compiled(torch.ones(1)), torch.ones(1).sin())


def test_a_node_to_explain_that_no_graph_has_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """A function may become several graphs, so it is no error that one of them has no such node."""
    x = torch.ones(3, requires_grad=True)
    with caplog.at_level(logging.WARNING, "ferrite"):
        torch.compile(lambda x: x.sin(), backend="ferrite", options={"explain_patterns": "sin, cos, six"})(
            x
        ).sum().backward()
    (said,) = [message for message in caplog.messages if "explain" in message]
    assert "'six'" in said
    assert "Did you mean 'sin'" in said


def test_the_environment_is_judged_when_the_backend_is_looked_up(tmp_path: Path) -> None:
    code = """
import torch
try:
    torch.compile(lambda x: x + 1, backend="ferrite")
except RuntimeError as error:
    print("at once:", error)
"""
    said = run_python(code, environment={"FERRITE_STRIKT": "1"} | installed(tmp_path)).output
    assert "at once: Unknown Ferrite environment variable 'FERRITE_STRIKT'. Did you mean 'FERRITE_STRICT'" in said


def test_the_environment_counts_when_a_graph_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = torch.compile(lambda x: x + 1, backend="ferrite")
    monkeypatch.setenv("FERRITE_EXECUTOR", "nativ")
    with pytest.raises(RuntimeError, match=r"FERRITE_EXECUTOR='nativ'.*Did you mean 'native'"):
        compiled(torch.ones(1))


def test_convenience_refuses_before_the_first_call() -> None:
    with pytest.raises(RuntimeError, match="Unknown Ferrite option"):
        ferrite.compile(lambda x: x, strcit=True)


def test_importing_the_package_is_light() -> None:
    """Neither torch nor LLVM nor rich is loaded until something is compiled or shown."""
    code = "import sys, ferrite; print([m for m in ('torch', 'llvmlite', 'rich') if m in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )
