"""`perf` and `gdb` know kernels by name when they are asked to: the real tools, where this machine lets them run."""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from ferrite.artifact.compiled import CompiledGraph
from ferrite.native import build, elf, gdb, perf_map, target
from ferrite.native.builder import Builder, Value, pointer, scalar
from ferrite.native.launch import LAUNCH
from ferrite.native.team import launch_text
from ferrite.report import trace
from tests.behaviour.child import ROOT, run_python

SOFTMAX = "graph_0_inference.kernel_0_0._softmax"

CODE = """
import os
import sys

import torch


def function(x):
    return torch.softmax(x + 1, -1), x.exp().sum(0)


x = torch.randn(64, 64)
compiled = torch.compile(function, backend="ferrite")
for _ in range(int(sys.argv[1])):
    compiled(x)
print(os.getpid())
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(perf_map, "FOLDER", str(tmp_path))
    monkeypatch.setattr(perf_map, "_is_given_up", False)
    return tmp_path


@pytest.fixture
def compiled() -> Iterator[Callable[..., Callable[[torch.Tensor], torch.Tensor]]]:
    """A way to compile and call a function that no other test has."""

    def make(**options: bool) -> Callable[[torch.Tensor], torch.Tensor]:
        torch._dynamo.reset()
        function = torch.compile(lambda x: torch.softmax(x + 1, -1), backend="ferrite", options=options)
        function(torch.randn(8, 70))
        return function

    yield make
    torch._dynamo.reset()


def lines_of(path: Path) -> list[tuple[int, int, str]]:
    parts = (line.split(" ", 2) for line in path.read_text().splitlines())
    return [(int(address, 16), int(size, 16), name) for address, size, name in parts]


def own_file(folder: Path) -> Path:
    return folder / f"perf-{os.getpid()}.map"


# ---- where functions are


def test_functions_of_loaded_code() -> None:
    """Those that only a table leads to as well as those that are exported, all in memory that can be executed."""
    b = Builder(target.host())
    with b.function("hidden", {}, internal=True):
        pass
    with b.function("seen", {}):
        b.call("@hidden", None)
    b.record("table", [Value(scalar(pointer), ("@hidden",))])
    data = build.build(b.text(), target.host())
    for exports in (["seen", "table"], ["table"]):
        library = build.load([data], exports)
        found = {each.name: each for each in elf.functions_in(data, library.addresses)}
        assert set(found) == {"hidden", "seen"}
        assert found["hidden"].address == ctypes.c_uint64.from_address(library.address("table")).value
        assert library.addresses.get("seen", found["seen"].address) == found["seen"].address
        for each in found.values():
            assert each.size > 0
            assert is_code(each.address, each.size)


def is_code(address: int, size: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights = line.split()[:2]
        low, high = (int(end, 16) for end in span.split("-"))
        if low <= address and address + size <= high:
            return "x" in rights
    return False


# ---- perf


def test_a_map_for_perf(folder: Path, compiled: Callable[..., object]) -> None:
    kept = compiled(perf_map=True)
    assert kept
    path = own_file(folder)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    told = lines_of(path)
    assert all(is_code(address, size) for address, size, _ in told), told
    names = [name for _, _, name in told]
    assert any(name.startswith(SOFTMAX) and "test_code_names.py:" in name for name in names), names


def test_nothing_is_written_unless_asked_for(folder: Path, compiled: Callable[..., object]) -> None:
    compiled()
    assert not list(folder.iterdir())


def test_what_all_graphs_share_is_told_with_a_graph_from_the_cache_too(tmp_path: Path) -> None:
    """In a process of its own each time: the second one finds the graph."""
    for outcome in ("miss", "hit"):
        code = CODE + "from ferrite import caching\nprint(os.getpid(), caching.latest().outcome)"
        variables = {"FERRITE_CACHE": "on", "FERRITE_CACHE_DIR": str(tmp_path / "cache"), "FERRITE_PERF_MAP": "1"}
        process, found = run_python(code, "1", environment=variables).output.splitlines()[-1].split()
        path = Path(perf_map.FOLDER, f"perf-{process}.map")
        names = [name for _, _, name in lines_of(path)]
        path.unlink()
        assert found == outcome
        assert {LAUNCH, "ferrite_enter", "ferrite_run"} <= set(names)
        assert len([name for name in names if name.startswith("graph_0_inference.kernel_")]) >= 2
        assert len(names) == len(set(names))


def test_a_forked_child_has_a_file_of_its_own(folder: Path, compiled: Callable[..., object]) -> None:
    kept = compiled(perf_map=True)
    assert kept
    before = own_file(folder).read_text()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            perf_map.tell_perf([elf.Function("of the child", 4096, 16)])
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert own_file(folder).read_text() == before
    inherited = lines_of(folder / f"perf-{child}.map")
    assert inherited[-1] == (4096, 16, "of the child")
    assert set(lines_of(own_file(folder))) <= set(inherited)


@pytest.mark.parametrize("kind", ["link", "second name", "pipe"])
def test_a_file_that_somebody_put_there_is_not_written(
    folder: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    victim = folder / "victim"
    victim.write_text("precious")
    match kind:
        case "link":
            own_file(folder).symlink_to(victim)
        case "second name":
            own_file(folder).hardlink_to(victim)
        case "pipe":
            os.mkfifo(own_file(folder))
    for _ in range(2):
        perf_map.tell_perf([elf.Function("kernel", 4096, 16)])
    assert victim.read_text() == "precious"
    assert [entry.getMessage().split(":")[0] for entry in caplog.records] == [
        "Ferrite does not tell perf the names of its kernels"
    ]


def test_lines_are_appended_and_a_name_is_one_line(folder: Path) -> None:
    own_file(folder).write_text("1000 10 of somebody else\n")
    perf_map.tell_perf([elf.Function("two\nlines", 0x2000, 0x20)])
    assert lines_of(own_file(folder)) == [(0x1000, 0x10, "of somebody else"), (0x2000, 0x20, "two lines")]


def test_the_file_of_an_earlier_process_with_the_same_number_is_emptied(folder: Path) -> None:
    own_file(folder).write_text("1000 10 of yesterday\n")
    yesterday = own_file(folder).stat().st_mtime - 86400
    os.utime(own_file(folder), (yesterday, yesterday))
    for name in ("first", "second"):
        perf_map.tell_perf([elf.Function(name, 0x2000, 0x20)])
    assert lines_of(own_file(folder)) == [(0x2000, 0x20, "first"), (0x2000, 0x20, "second")]


def test_a_graph_runs_although_its_names_cannot_be_told(
    folder: Path, compiled: Callable[..., object], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The object of a machine that is read wrongly must not send a graph to eager."""

    def fail(*_: object) -> None:
        raise IndexError("no such section")

    monkeypatch.setattr("ferrite.artifact.announce.functions_in", fail)
    kept = compiled(perf_map=True, strict=True)
    assert kept
    assert not own_file(folder).exists()
    assert [entry.getMessage() for entry in caplog.records if "names" in entry.getMessage()] == [
        "Ferrite does not tell the names of the kernels of graph_0_inference"
    ]


@pytest.mark.long
def test_perf_names_kernels(tmp_path: Path) -> None:
    """perf itself, where it may count."""
    data = tmp_path / "perf.data"
    tool = shutil.which("perf")
    if tool is None:
        pytest.skip("perf is not here")
    record = (tool, "record", "-q", "-e", "cpu-clock", "-o", str(data))
    if subprocess.run([*record, "true"], capture_output=True).returncode:
        pytest.skip("perf may not count here")
    child = run_python(CODE, "20000", environment={"FERRITE_PERF_MAP": "1"}, under=record)
    path = Path(perf_map.FOLDER, f"perf-{child.output.split()[-1]}.map")
    report = subprocess.run(
        [tool, "report", "-i", str(data), "--stdio"], capture_output=True, text=True, check=True, cwd=tmp_path
    ).stdout
    path.unlink()
    assert SOFTMAX in report


# ---- gdb


def registered() -> list[str]:
    """The names in the objects that are registered with debuggers now."""
    interface = gdb._interface()
    if interface is None:
        pytest.skip("llvmlite's library has no symbols")
    names, entry = [], interface[0].first
    previous = None
    while entry:
        assert (ctypes.addressof(entry.contents.previous.contents) if entry.contents.previous else None) == previous
        previous = ctypes.addressof(entry.contents)
        address = gdb._Entry.file.offset + previous
        start = ctypes.c_void_p.from_address(address).value
        names.append(ctypes.string_at(start, entry.contents.size).decode("latin-1"))
        entry = entry.contents.next
    return names


def test_code_is_registered_until_it_is_freed(compiled: Callable[..., object]) -> None:
    def count() -> int:
        return sum(SOFTMAX in names for names in registered())

    before = count()
    kept = compiled(gdb=True)
    assert count() == before + 1
    del kept
    torch._dynamo.reset()
    gc.collect()
    assert count() == before


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_what_is_registered_goes_in_any_order(order: tuple[int, ...]) -> None:
    model = build.build(launch_text(target.host()), target.host())
    before = registered()
    take_back = [gdb.tell_gdb(model, [elf.Function(f"number_{n}", 4096, 16)]) for n in range(3)]
    left = {0, 1, 2}
    for number in order:
        take_back[number]()
        left -= {number}
        now = registered()
        assert len(now) == len(before) + len(left)
        assert all(any(f"number_{n}" in names for names in now) == (n in left) for n in range(3))


def test_each_is_told_once(folder: Path, compiled: Callable[..., object], monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[CompiledGraph] = []
    monkeypatch.setattr(trace, "compiled_graph", graphs.append)
    compiled(perf_map=True)
    (graph,) = graphs
    told = own_file(folder).read_text()
    graph.announce(perf_map=True, gdb=False)
    assert own_file(folder).read_text() == told


GDB_CODE = f"""
import gc
import signal

import llvmlite.binding
{CODE.split("x = torch.randn")[0]}
llvmlite.binding.initialize_all_targets()
signal.raise_signal(signal.SIGTRAP)
compiled = torch.compile(function, backend="ferrite")
compiled(torch.randn(64, 64))
del compiled
torch._dynamo.reset()
gc.collect()
signal.raise_signal(signal.SIGTRAP)
"""

GDB_COMMANDS = (
    "set pagination off", "set confirm off", "set debuginfod enabled off", "set breakpoint pending on",
    "set auto-solib-add off",  # the symbols of torch take seconds to read
    "run", "sharedlibrary libllvmlite", f"break {SOFTMAX}", "continue", "bt 2", "info functions kernel_0_0",
    "delete", "continue", "echo later", "info functions kernel_0_0", "kill",
)  # fmt: skip


@pytest.mark.long
def test_gdb_names_kernels(tmp_path: Path) -> None:
    """gdb itself: it stops in a kernel by its name, and forgets the name with the code."""
    if shutil.which("gdb") is None:
        pytest.skip("gdb is not here")
    if gdb._interface() is None:
        pytest.skip("llvmlite's library has no symbols")
    script = tmp_path / "script.py"
    script.write_text(GDB_CODE)
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("FERRITE_", "TORCH"))}
    variables |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "FERRITE_CACHE": "off", "FERRITE_GDB": "1"}
    commands = [word for command in GDB_COMMANDS for word in ("-ex", command)]
    command = ["gdb", "-nx", "-batch", *commands, "--args", sys.executable, str(script)]
    said = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=300)
    if "ptrace" in said.stderr:
        pytest.skip("no process may look into another one here")
    assert f" in {SOFTMAX} ()" in said.stdout, said.stdout + said.stderr
    assert f" in {LAUNCH} ()" in said.stdout
    then, later = (text.partition("regular expression")[2] for text in said.stdout.split("later"))
    assert SOFTMAX in then
    assert later
    assert SOFTMAX not in later
