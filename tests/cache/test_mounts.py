"""File systems that really are full, read-only or without the right to execute, where this user may mount some."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.behaviour.child import run_python

# In mounts of its own: compiles once for each folder, twice where something is stored. Says what came of it, as JSON.
COMPILE = """
import json, os, subprocess, sys
root = sys.argv[1]

def mount(name, *options):
    os.makedirs(f"{root}/{name}", exist_ok=True)
    subprocess.run(["mount", *options, f"{root}/{name}"], check=True)

mount("full", "-t", "tmpfs", "-o", "size=64k", "tmpfs")
mount("noexec", "-t", "tmpfs", "-o", "noexec,nosuid,nodev", "tmpfs")
mount("readonly", "-t", "tmpfs", "tmpfs")

import torch
from ferrite import caching
from tests.cache.victim import watched

def function(x):
    return torch.softmax(x.sin() * 2, -1)

x = torch.linspace(-2, 2, 32).reshape(4, 8)
told = {}

def run(name, folder):
    torch._dynamo.reset()
    caching._opened.cache_clear()
    options = {"cache": "on", "cache_dir": f"{root}/{folder}/cache"}
    with watched() as said:
        found = torch.compile(function, backend="ferrite", options=options)(x)
        torch._dynamo.reset()
        again = torch.compile(function, backend="ferrite", options=options)(x)
    right = torch.allclose(found, function(x)) and torch.equal(found, again)
    files = [os.path.join(path, name) for path, _, names in os.walk(f"{root}/{folder}/cache") for name in names]
    told[name] = {"right": right, "said": said, "outcome": caching.latest().outcome, "files": files}

with open(f"{root}/full/filler", "wb", buffering=0) as file:
    try:
        while file.write(bytes(4096)):
            pass
    except OSError:
        pass
os.truncate(f"{root}/full/filler", os.path.getsize(f"{root}/full/filler") - 8192)  # room for a part of a file
run("full", "full")
run("noexec", "noexec")
run("before", "readonly")
subprocess.run(["mount", "-o", "remount,bind,ro", f"{root}/readonly"], check=True)
run("read-only and filled", "readonly")
subprocess.run(["mount", "-o", "remount,bind,rw", f"{root}/readonly"], check=True)
for path, _, names in os.walk(f"{root}/readonly/cache", topdown=False):
    [os.unlink(os.path.join(path, name)) for name in names]
    os.rmdir(path)
subprocess.run(["mount", "-o", "remount,bind,ro", f"{root}/readonly"], check=True)
run("read-only and empty", "readonly")
print(json.dumps(told))
"""


def _why_not(folder: Path) -> str:
    """Why nothing can be mounted here; empty if it can."""
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    try:
        ran = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        return str(error)
    return ran.stderr.strip() or ("" if ran.returncode == 0 else f"unshare gave {ran.returncode}")


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    folder = tmp_path_factory.mktemp("mounts")
    why_not = _why_not(folder)
    if why_not:
        pytest.skip(f"this user may not mount a file system: {why_not}")
    child = run_python(COMPILE, str(folder), under=("unshare", "--mount"))
    found = json.loads(child.output.splitlines()[-1])
    assert isinstance(found, dict)
    assert all(outcome["right"] for outcome in found.values()), found
    return found


def test_full_disk(told: Mapping[str, Any]) -> None:
    """One warning, nothing half-written, no harm. Machine code that fitted stays without an entry: pruning takes it."""
    (said,) = told["full"]["said"]
    assert "No space left on device" in said
    assert told["full"]["outcome"] == "miss"
    assert all("/objects/" in file and ".aside" not in file for file in told["full"]["files"])


def test_noexec(told: Mapping[str, Any]) -> None:
    """Machine code is never executed from a file."""
    assert told["noexec"]["said"] == []
    assert told["noexec"]["outcome"] == "hit"


def test_read_only(told: Mapping[str, Any]) -> None:
    """What is there is found; where nothing is there, the cache is off with one warning."""
    assert told["before"]["said"] == []
    assert told["read-only and filled"]["outcome"] == "hit"
    assert told["read-only and filled"]["said"] == []
    (said,) = told["read-only and empty"]["said"]
    assert "Read-only file system" in said
