"""Compiled functions that leave the process: PyTorch's bundles of cache artifacts, and functions that are saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch._dynamo.utils import counters
from torch.compiler._cache import CacheArtifactManager
from torch.nn import functional

import ferrite
from ferrite.artifact import key
from ferrite.artifact.entry import Bundle, unbundle
from ferrite.carried import GraphArtifact
from ferrite.packaging import Package
from tests.behaviour.child import run_python
from tests.cache.test_hits import AsksForSizes


def scaled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x @ w).softmax(-1)


def inputs(training: bool, rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x, w = torch.randn(rows, 5, generator=generator), torch.randn(5, 6, generator=generator)
    return x, w.requires_grad_(training)


def outcome(call: Any, training: bool, rows: int = 4) -> list[torch.Tensor]:
    x, w = inputs(training, rows)
    result = call(x, w)
    if training:
        result.square().sum().backward()
    return [result.detach(), *([w.grad] if training else [])]


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_artifacts_fill_another_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, training: bool) -> None:
    torch.compiler._cache.CacheArtifactManager.clear()
    here, there = tmp_path / "here", tmp_path / "there"
    call = torch.compile(scaled, backend="ferrite", options={"cache": "on", "cache_dir": str(here)})
    expected = outcome(call, training)
    data, saved = torch.compiler.save_cache_artifacts()
    assert len(saved.ferrite_artifacts) == 1

    monkeypatch.setenv("FERRITE_CACHE", "on")
    monkeypatch.setenv("FERRITE_CACHE_DIR", str(there))
    assert torch.compiler.load_cache_artifacts(data).ferrite_artifacts == saved.ferrite_artifacts
    torch._dynamo.reset()
    counters.clear()
    call = torch.compile(scaled, backend="ferrite", options={"cache": "read-only", "cache_dir": str(there)})
    for found, wanted in zip(outcome(call, training), expected, strict=True):
        assert torch.equal(found, wanted)
    said = {name: count for name, count in counters["ferrite"].items() if "graph" in name}
    assert said == {"graph_cache_hit": 1}


WAYS = [(training, dynamic) for training in (False, True) for dynamic in (False, True)]
FILL = """
import sys, torch
import ferrite
assert "ferrite.caching" not in sys.modules
with open({data!r}, "rb") as file:
    told = torch.compiler.load_cache_artifacts(file.read())
assert len(told.ferrite_artifacts) == 4, told
from torch._dynamo.utils import counters
from tests.cache.test_leaving import WAYS, outcomes
results = [outcomes(*way, {{"cache": "read-only"}}) for way in WAYS]
torch.save(results, {result!r})
assert counters["ferrite"]["graph_cache_hit"] == 4 and not counters["ferrite"]["graph_cache_miss"], counters
assert counters["aot_autograd"]["total"] == 0, counters
"""


def outcomes(training: bool, dynamic: bool, options: dict[str, str]) -> list[torch.Tensor]:
    """In a compiler that knows nothing; of two sizes if they may vary."""
    torch._dynamo.reset()
    return called(torch.compile(scaled, backend="ferrite", dynamic=dynamic, options=options), training, dynamic)


def test_artifacts_fill_the_cache_of_a_new_process(tmp_path: Path) -> None:
    """One that has said no more than `import ferrite`: without, PyTorch does not know what it reads."""
    torch.compiler._cache.CacheArtifactManager.clear()
    expected = [outcomes(*way, {"cache": "on", "cache_dir": str(tmp_path / "here")}) for way in WAYS]
    data, _ = torch.compiler.save_cache_artifacts()
    (tmp_path / "data").write_bytes(data)
    there = {"FERRITE_CACHE": "on", "FERRITE_CACHE_DIR": str(tmp_path / "there")}
    run_python(FILL.format(data=str(tmp_path / "data"), result=str(tmp_path / "result")), environment=there)
    for found, wanted in zip(torch.load(tmp_path / "result"), expected, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_an_artifact_under_a_name_that_is_not_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch.compiler._cache.CacheArtifactManager.clear()
    call = torch.compile(scaled, backend="ferrite", options={"cache": "on", "cache_dir": str(tmp_path / "here")})
    call(*inputs(training=False))
    data, _ = torch.compiler.save_cache_artifacts()
    (artifact,) = CacheArtifactManager.deserialize(data)["ferrite"]
    name, content = artifact.key, artifact.content
    monkeypatch.setenv("FERRITE_CACHE", "on")
    monkeypatch.setenv("FERRITE_CACHE_DIR", str(tmp_path / "there"))
    whole = unbundle(content)
    for changed in (
        {"name": "../../elsewhere"},
        {"name": "0" * 64 + "-0"},
        {"objects": dict.fromkeys(whole.objects, b"other code")},
        {"objects": {}},
    ):
        caplog.clear()
        GraphArtifact(name, msgspec.msgpack.encode(msgspec.structs.replace(whole, **changed))).populate_cache()
        assert "an artifact is not used" in caplog.text, changed
    assert not [path for path in (tmp_path / "there").rglob("*") if path.is_file()]
    GraphArtifact(name, content).populate_cache()
    assert (tmp_path / "there" / "graphs" / name).exists()


def test_damaged_artifact_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FERRITE_CACHE", "on")
    monkeypatch.setenv("FERRITE_CACHE_DIR", str(tmp_path))
    GraphArtifact("some key", b"nonsense").populate_cache()
    assert "not used" in caplog.text
    assert not list(tmp_path.rglob("*-0"))


def saved(path: Path, training: bool, dynamic: bool = False) -> Any:
    torch._dynamo.reset()
    whole = torch.compile(scaled, backend="ferrite", fullgraph=True, dynamic=dynamic)
    compiled = whole.aot_compile((inputs(training), {}))
    compiled.save_compiled_function(str(path))
    return compiled


LOAD = """
import torch
from torch._dynamo.utils import counters
from tests.cache.test_leaving import called
results = []
for path, training, dynamic in {saved!r}:
    with open(path, "rb") as file:
        call = torch.compiler.load_compiled_function(file)
    results.append(called(call, training, dynamic))
torch.save(results, {result!r})
assert not counters["ferrite"] and not counters["aot_autograd"], counters
"""


def called(call: Any, training: bool, dynamic: bool) -> list[torch.Tensor]:
    return [tensor for rows in ((4, 7) if dynamic else (4,)) for tensor in outcome(call, training, rows)]


def test_functions_that_are_saved_run_in_a_new_process(tmp_path: Path) -> None:
    """For inference and for training, with sizes that vary and without."""
    paths = [(str(tmp_path / f"function {number}"), *way) for number, way in enumerate(WAYS)]
    expected = [called(saved(Path(path), *way), *way) for path, *way in paths]
    run_python(LOAD.format(saved=paths, result=str(tmp_path / "result")))
    for found, wanted in zip(torch.load(tmp_path / "result"), expected, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_a_function_that_was_saved_asks_its_guards(tmp_path: Path) -> None:
    """Those of Dynamo, and those of what a pass asked for while the graph was compiled."""
    with ferrite.register_pass("post_grad", AsksForSizes(16)):
        saved(tmp_path / "function", training=False, dynamic=True)
    with open(tmp_path / "function", "rb") as file:
        call = torch.compiler.load_compiled_function(file)
    x, w = inputs(training=False, rows=9)
    assert torch.allclose(call(x, w), scaled(x, w))
    with torch.no_grad(), pytest.raises(RuntimeError, match="grad_mode"):
        call(x, w)
    with pytest.raises(RuntimeError, match="dtype mismatch"):
        call(x.double(), w.double())
    with pytest.raises(RuntimeError, match="requires_grad mismatch"):
        call(x, w.clone().requires_grad_())
    with pytest.raises(RuntimeError, match=r"size\(\)\[0\] <= 16"):
        call(*inputs(training=False, rows=40))
    assert torch.allclose(call(x, w), scaled(x, w))


def test_package_checks_what_it_is_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiled = saved(tmp_path / "function", training=False)
    data = Package.serialize_compile_artifacts(compiled._artifacts.compiled_fn)
    Package.deserialize_compile_artifacts(data)
    for damaged in (b"", data[:-20], b"nonsense", msgspec.msgpack.encode(Bundle("package", b"\x00", {}))):
        with pytest.raises(RuntimeError, match="no package of Ferrite"):
            Package.deserialize_compile_artifacts(damaged)
    lost = msgspec.structs.replace(unbundle(data), objects={})
    with pytest.raises(RuntimeError, match="is gone"):
        Package.deserialize_compile_artifacts(msgspec.msgpack.encode(lost))
    here = key.fields_of_machine()
    for name in ("cpu", "torch", "ferrite"):
        monkeypatch.setattr("ferrite.packaging.fields_of_machine", lambda name=name: here | {name: "another one"})
        with pytest.raises(RuntimeError, match=f"cannot run here: {name}"):
            Package.deserialize_compile_artifacts(data)


def test_what_cannot_be_saved_says_why() -> None:
    def shares(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x * y

    base = torch.randn(8)
    with pytest.raises(Exception, match="cannot save this function"):
        torch.compile(shares, backend="ferrite", fullgraph=True, options={"strict": True}).aot_compile(
            ((base[:4], base[2:6]), {})
        )
