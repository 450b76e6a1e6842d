"""Native code that works and leaves a Python error behind: the check behind each call of a program finds it, where it
was left and before something else is blamed."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ferrite.artifact import doors, native_host
from ferrite.native.build import Library, build, load
from ferrite.native.machine import outside
from ferrite.native.target import host

# Says that it worked, with Python's lock or without.
LEAVES_AN_ERROR = """
target triple = "{triple}"
declare i32 @PyGILState_Ensure()
declare void @PyGILState_Release(i32)
declare ptr @PyErr_NoMemory()
define i32 @leaves_an_error() {{
  %state = call i32 @PyGILState_Ensure()
  %nothing = call ptr @PyErr_NoMemory()
  call void @PyGILState_Release(i32 %state)
  ret i32 0
}}
"""


@pytest.fixture(scope="module")
def planted() -> Library:
    target = host()
    text = LEAVES_AN_ERROR.format(triple=target.triple)
    names = ("PyGILState_Ensure", "PyGILState_Release", "PyErr_NoMemory")
    imports = dict(outside(dict.fromkeys(names, ctypes.pythonapi)))
    return load([build(text, target)], ["leaves_an_error"], imports)


def function(x: Tensor) -> Tensor:
    return (x @ x).sin()


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("ferrite_count", ""),  # with Python's lock, before the first step
        ("aoti_torch_cpu_mm_out", "aten.mm.default"),  # without it
    ],
)
def test_an_error_that_is_left_behind(name: str, step: str, planted: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.rand(128, 128)
    torch.compile(function, backend="ferrite", options={"strict": True})(x)
    torch._dynamo.reset()
    monkeypatch.setitem(doors.addresses(), name, planted.address("leaves_an_error"))  # type: ignore[arg-type]
    compiled = torch.compile(function, backend="ferrite", options={"strict": True})
    with pytest.raises(SystemError, match=f"{name} worked in graph_0_inference, and left a Python error.*{step}") as e:
        compiled(x)
    assert isinstance(e.value.__cause__, MemoryError)
    monkeypatch.undo()
    torch._dynamo.reset()
    again = torch.compile(function, backend="ferrite", options={"strict": True})
    torch.testing.assert_close(again(x), function(x))


def test_a_graph_with_a_debug_folder_is_checked(
    planted: Library, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(native_host, "SETTLES_ALL", False)
    monkeypatch.setitem(doors.addresses(), "aoti_torch_cpu_mm_out", planted.address("leaves_an_error"))  # type: ignore[arg-type]
    options = {"strict": True, "debug": True, "debug_dir": str(tmp_path)}
    compiled = torch.compile(function, backend="ferrite", options=options)
    with pytest.raises(SystemError, match="left a Python error"):
        compiled(torch.rand(128, 128))
