"""The runner of PyTorch's own tests: which tests it asks of a backend, and what becomes of those that crash or hang."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from tests.outside import known, run
from tests.outside.__main__ import Score, choose, show_markdown
from tests.outside.results import Result, read, write
from tests.outside.run import Run
from tests.outside.source import find

MODULE = """
import os, unittest
import torch
from functools import partial
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torch._inductor import metrics
from torch._inductor.utils import a_name_that_is_gone
from torch.testing._internal.common_utils import TestCase

class Tests(TestCase):
    @unittest.skipIf("inductor" not in torch._dynamo.list_backends(), "it is replaced")
    def test_compiles(self):
        f = torch.compile(lambda x: x.sin() + 1, backend="inductor")
        torch.testing.assert_close(f(torch.ones(3)), torch.ones(3).sin() + 1)

        metrics.reset()
        assert metrics.generated_kernel_count == 3
        self.assertEqual(1, metrics.generated_kernel_count)
        self.assertEqual(metrics.generated_kernel_count, 1)

    def test_eager_only(self):
        pass

    def test_counts(self):
        torch.compile(lambda x: x + 1, backend=CompileCounter())(torch.ones(2))

    def test_counts_and_compiles(self):
        counter = CompileCounterWithBackend("inductor")
        self.assertEqual(torch.compile(lambda x: x + 1, backend=counter)(torch.ones(2)).tolist(), [2.0, 2.0])
        self.assertEqual(counter.frame_count, 1)

    def test_fails(self):
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
        self.fail("as it does everywhere")

    def test_crashes(self):
        os.abort()

    def test_hangs(self):
        while True:
            pass

    def test_ends_the_process(self):
        raise SystemExit(0)
"""

CPU_ONLY = """
import unittest
from torch.testing._internal.inductor_utils import GPU_TYPE

class Tests(unittest.TestCase):
    def test_small(self):
        if "cpu" == GPU_TYPE:
            self.skipTest("of the CPU only")
"""

ON_THE_GPU = """
import unittest
import torch

class Tests(unittest.TestCase):
    def test_small(self):
        self.assertEqual(torch.ones(2, device='cuda:0').device, torch.ones(2, device="cuda").device)
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "pytorch-v2.6.0" / "test" / "dynamo"
    folder.mkdir(parents=True)
    (folder / "test_small.py").write_text(MODULE)
    monkeypatch.setattr(run, "RESULTS", tmp_path / "results")
    return find(tmp_path)


def test_a_module_is_run_to_its_end(source: Path) -> None:
    runs = Run(source, seconds=10.0)
    base = runs.base("dynamo/test_small", fresh=False)
    said = {name.removeprefix("Tests.test_"): result.status for name, result in base.items()}
    assert said == {
        "compiles": "pass", "eager_only": "pass", "counts": "apart", "counts_and_compiles": "pass", "fails": "fail",
        "crashes": "crash", "hangs": "hang", "ends_the_process": "fail",
    }  # fmt: skip
    assert "Abort" in base["Tests.test_crashes"].message
    eligible = [name for name, result in base.items() if result.is_eligible]
    assert eligible == ["Tests.test_compiles", "Tests.test_counts_and_compiles"]
    results = runs.with_backend("dynamo/test_small", "ferrite", eligible)
    assert [(one.test, one.status, one.graphs) for one in results.values()] == [(name, "pass", 1) for name in eligible]
    assert not any(one.warnings for one in results.values())


def test_a_run_that_was_cut_off_is_carried_on(source: Path) -> None:
    module, names = "dynamo/test_small", ["Tests.test_compiles", "Tests.test_fails"]

    def seconds(keep: str) -> dict[str, float]:
        results = Run(source, seconds=10.0, keep=keep).with_backend(module, "ferrite", names)
        return {name: result.seconds for name, result in results.items()}

    place = run.RESULTS / "ferrite" / "dynamo.test_small.jsonl"
    place.parent.mkdir(parents=True)
    passed, failed = (Result(name, status, 1234.0) for name, status in zip(names, ("pass", "fail"), strict=True))
    write(place.with_suffix(".part"), [passed])
    first = seconds("all")
    assert first[names[0]] == 1234.0 > first[names[1]]
    assert seconds("all") == first
    write(place, [passed, failed])
    second = seconds("passed")
    assert second[names[0]] == 1234.0 > second[names[1]]
    assert 1234.0 not in seconds("none").values()


@pytest.mark.parametrize(("module", "text"), [("test_torchinductor", CPU_ONLY), ("test_foreach", ON_THE_GPU)])
def test_tests_that_tell_devices_apart_are_run_on_the_cpu(source: Path, module: str, text: str) -> None:
    folder = source / "test" / "inductor"
    folder.mkdir()
    (folder / f"{module}.py").write_text(text)
    base = Run(source, seconds=10.0).base(f"inductor/{module}", fresh=False)
    assert base["Tests.test_small"].status == "pass"


def test_a_module_that_cannot_be_loaded_is_trouble(source: Path) -> None:
    with pytest.raises(RuntimeError, match="dynamo/test_nothing with aot_eager"):
        Run(source, seconds=10.0).base("dynamo/test_nothing", fresh=False)


def test_a_score_is_clean_without_failures_and_without_reasons_for_what_passes() -> None:
    passed, failed = Result("T.one", "pass", graphs=1), Result("T.two", "fail", graphs=1)

    def clean(result: Result, **reasons: str) -> bool:
        named = {f"T.{name}": reason for name, reason in reasons.items()}
        return Score("m", 2, 1, {result.test: result}, named).clean

    assert clean(passed)
    assert not clean(passed, one="a convention")
    assert not clean(failed)
    assert clean(failed, two="a convention")


def test_the_markdown_names_what_is_known_once_for_each_reason() -> None:
    results = {name: Result(name, status, graphs=1) for name, status in
               (("T.test_one", "fail"), ("T.test_two", "hang"), ("T.test_three", "pass"))}  # fmt: skip
    scores = [Score("dynamo/test_m", 7, 3, results, {"T.test_one": "It reads names.", "T.test_two": "It reads names."})]
    console = Console(record=True, file=io.StringIO())
    show_markdown(scores, console)
    lines = console.export_text().splitlines()
    assert "| `dynamo/test_m` | 7 | 3 | 3 | 1 | 2 | 0 | 0 |" in lines
    assert lines[-1] == "- `dynamo/test_m`, `test_one`, `test_two`: It reads names."


def test_lines_that_were_cut_short_are_left_out(tmp_path: Path) -> None:
    place = tmp_path / "some.jsonl"
    write(place, [Result("T.one", "pass")])
    place.write_bytes(place.read_bytes() + b'{"test": "T.t')
    assert list(read(place)) == ["T.one"]


def test_every_known_reason_is_of_a_module_that_is_run() -> None:
    for entry in known.load():
        assert choose(entry.module) == [entry.module]
        assert entry.reason
        assert entry.tests
