"""The folder of the cache: private, atomic, bounded, and quiet about whatever a disk can do. Nothing here compiles."""

from __future__ import annotations

import errno
import hashlib
import os
import resource
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import ferrite
from ferrite import cache
from ferrite.artifact import store as store_module
from ferrite.artifact.outline import GraphFacts, GraphOutline, Outline
from ferrite.artifact.store import GRAPHS, HITS, OBJECTS, Store, default_folder
from ferrite.command import main
from ferrite.errors import BrokenCache
from tests.behaviour.child import ROOT
from tests.cache.victim import watched

FAULTS = (errno.ENOSPC, errno.EROFS, errno.EIO, errno.EACCES, errno.EDQUOT, errno.EPERM)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def said() -> Iterator[list[str]]:
    with watched() as texts:
        yield texts


def entry(key: str, *objects: str, graph: str = "", source: str = "", guards: str = "") -> bytes:
    graphs = {"inference": GraphOutline({"kernel_0": ""}, GraphFacts(0.5, "native", "native"))}
    fields = {"graph": graph, "cpu": key}
    return msgspec.msgpack.encode(Outline(fields, ("", source), guards, graphs, {"inference": objects}, 1))


def keep(store: Store, key: str, *codes: bytes, used: float | None = None, **about: str) -> None:
    """An entry with its objects."""
    names = [hashlib.sha256(code).hexdigest() for code in codes]
    for name, code in zip(names, codes, strict=True):
        assert store.write(OBJECTS, name, code)
    assert store.write(GRAPHS, f"{key}-0", entry(key, *names, **about))
    if used is not None:
        os.utime(store.folder / GRAPHS / f"{key}-0", (used, used))


# ---- bytes under names


@pytest.mark.parametrize("size", [0, 1, 100_000])
def test_what_is_written_is_read(folder: Path, size: int) -> None:
    assert Store(folder).write(GRAPHS, "aa-0", bytes(size))
    assert Store(folder).read(GRAPHS, "aa-0") == bytes(size)
    assert Store(folder).read(GRAPHS, "bb-0") is None
    assert Store(folder).read(OBJECTS, "aa-0") is None


def test_a_second_write_replaces(folder: Path) -> None:
    store = Store(folder)
    assert store.write(GRAPHS, "aa-0", b"one")
    assert store.write(GRAPHS, "aa-0", b"two")
    assert store.read(GRAPHS, "aa-0") == b"two"
    assert [path.name for path in (folder / GRAPHS).iterdir()] == ["aa-0"]


@pytest.mark.parametrize("name", ["", "..", "../x", "a/b", ".aside-1", "a\0b", "x" * 300, "a b"])
def test_names_that_are_none(folder: Path, name: str, said: list[str]) -> None:
    store = Store(folder)
    assert store.read(GRAPHS, name) is None
    store.note_hit(name)
    with pytest.raises(ValueError, match="no name"):
        store.write(GRAPHS, name, b"")
    assert not said


def test_private(folder: Path) -> None:
    before = os.umask(0)
    try:
        store = Store(folder)
        store.write(GRAPHS, "aa-0", b"x")
        store.note_hit("aa-0")
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (folder, folder / GRAPHS, folder / HITS)} == {0o700}
    assert {stat.S_IMODE((folder / kind / "aa-0").stat().st_mode) for kind in (GRAPHS, HITS)} == {0o600}


def test_nothing_is_made_by_reading(folder: Path, said: list[str]) -> None:
    store = Store(folder, writable=False)
    assert store.read(GRAPHS, "aa-0") is None
    assert not store.write(GRAPHS, "aa-0", b"")
    assert not list(store.files())
    assert not folder.exists()
    assert not said


# ---- folders that are not used


def _others_may_write(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o770)


def _others_may_write_within(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / GRAPHS).mkdir()
    (folder / GRAPHS).chmod(0o707)


def _link(folder: Path) -> None:
    real = folder.with_name("real")
    real.mkdir(mode=0o700)
    folder.symlink_to(real)


def _link_within(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    real = folder.with_name("real")
    real.mkdir(mode=0o700)
    (folder / GRAPHS).symlink_to(real)


def _file(folder: Path) -> None:
    folder.write_text("")


@pytest.mark.parametrize(
    "make", [_others_may_write, _others_may_write_within, _link, _link_within, _file], ids=lambda make: make.__name__
)
@pytest.mark.parametrize("writable", [True, False])
def test_refused(folder: Path, make: Any, writable: bool, said: list[str]) -> None:
    make(folder)
    store = Store(folder, writable=writable)
    for _ in range(3):
        assert store.read(GRAPHS, "aa-0") is None
        assert not store.write(GRAPHS, "aa-0", b"x")
    assert store.trouble
    assert len(said) == 1
    assert not list(folder.parent.glob("real/*"))
    with pytest.raises(BrokenCache, match=r"may write|link|no folder"):
        Store(folder, writable=writable, strict=True).read(GRAPHS, "aa-0")


def test_of_another_user(folder: Path, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    Store(folder).write(GRAPHS, "aa-0", b"x")
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    store = Store(folder)
    assert store.read(GRAPHS, "aa-0") is None
    assert "another user" in store.trouble
    assert len(said) == 1
    assert (folder / GRAPHS / "aa-0").exists()


def test_a_file_of_another_user(folder: Path, said: list[str]) -> None:
    if os.getuid():
        pytest.skip("only root may give files away")
    store = Store(folder)
    store.write(GRAPHS, "aa-0", b"x")
    os.chown(folder / GRAPHS / "aa-0", 12345, 12345)
    assert store.read(GRAPHS, "aa-0") is None
    assert not (folder / GRAPHS / "aa-0").exists()
    assert len(said) == 1


def test_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert default_folder() == "/x/ferrite"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which the specification says to ignore
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_folder() == str(tmp_path / ".cache" / "ferrite")
    for home in ("", "/nonexistent", "relative"):
        monkeypatch.setenv("HOME", home)
        assert not default_folder()
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # an unknown user
    assert not default_folder()


# ---- disks that fail


@pytest.mark.parametrize("code", FAULTS, ids=errno.errorcode.get)
@pytest.mark.parametrize("function", ["open", "fdopen", "fsync", "rename"])
def test_a_write_that_fails(
    folder: Path, function: str, code: int, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(folder)
    assert store.write(GRAPHS, "aa-0", b"before")
    real = getattr(os, function)

    def fail(*args: Any, **kwargs: Any) -> Any:
        if function == "open" and not args[1] & os.O_CREAT:
            return real(*args, **kwargs)
        if function == "fdopen":
            os.close(args[0])
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as broken:
        broken.setattr(os, function, fail)
        assert not store.write(GRAPHS, "bb-0", b"x")
    assert not store.write(GRAPHS, "bb-0", b"x")  # it has given up
    assert store.read(GRAPHS, "aa-0") == b"before"  # but what is there is found
    assert len(said) == 1
    assert os.strerror(code) in said[0]
    assert [path.name for path in (folder / GRAPHS).iterdir()] == ["aa-0"]
    with monkeypatch.context() as broken:
        broken.setattr(os, function, fail)
        with pytest.raises(BrokenCache):
            Store(folder, strict=True).write(GRAPHS, "bb-0", b"x")


def test_a_full_disk(folder: Path) -> None:
    """A real one, as far as that can be had: files of this child may not become longer."""
    child = os.fork()
    if child == 0:
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
            store = Store(folder)
            held = store.write(GRAPHS, "aa-0", bytes(1000)) and not store.write(GRAPHS, "bb-0", bytes(100_000))
            os._exit(0 if held and store.read(GRAPHS, "aa-0") == bytes(1000) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert [path.name for path in (folder / GRAPHS).iterdir()] == ["aa-0"]


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES], ids=errno.errorcode.get)
def test_a_read_that_fails(folder: Path, code: int, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(folder)
    store.write(GRAPHS, "aa-0", b"x")

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as broken:
        broken.setattr(store_module, "_read_private", fail)
        assert store.read(GRAPHS, "aa-0") is None
    assert len(said) == 1
    assert not (folder / GRAPHS / "aa-0").exists()
    assert store.write(GRAPHS, "aa-0", b"x")


def test_too_many_open_files_harm_no_entry(folder: Path, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(folder)
    store.write(GRAPHS, "aa-0", b"x")

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as broken:
        broken.setattr(store_module, "_read_private", fail)
        assert store.read(GRAPHS, "aa-0") is None
    assert store.read(GRAPHS, "aa-0") == b"x"


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC], ids=errno.errorcode.get)
def test_a_folder_that_cannot_be_made(
    folder: Path, code: int, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "mkdir", fail)
    store = Store(folder)
    assert not store.write(GRAPHS, "aa-0", b"x")
    assert store.read(GRAPHS, "aa-0") is None
    assert store.trouble
    assert len(said) == 1


def test_a_folder_that_is_removed_is_made_again(folder: Path, said: list[str]) -> None:
    store = Store(folder)
    store.write(GRAPHS, "aa-0", b"x")
    subprocess.run(["rm", "-r", str(folder)], check=True)
    assert store.read(GRAPHS, "aa-0") is None
    assert store.write(GRAPHS, "aa-0", b"y")
    assert store.read(GRAPHS, "aa-0") == b"y"
    assert not said


def test_descriptors_do_not_leak(folder: Path) -> None:
    Store(folder).write(GRAPHS, "aa-0", b"x")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        store = Store(folder)
        store.read(GRAPHS, "aa-0")
        store.write(OBJECTS, "aa-0", b"x")
        store.note_hit("aa-0")
        store.close()
    assert len(os.listdir("/proc/self/fd")) == before


# ---- how much is kept


def test_what_was_used_last_is_kept(folder: Path) -> None:
    store, now = Store(folder), time.time()
    for number in range(10):
        keep(store, f"k{number}", bytes([number]) * 10_000, used=now - 100 + number)
    store.note_hit("k0-0")
    assert store.prune(60_000) == 12
    left = {file.name: file.hits for file in store.files() if file.kind == GRAPHS}
    assert left == {"k0-0": 1, "k9-0": 0, "k8-0": 0, "k7-0": 0}
    assert sum(file.size for file in store.files()) < 60_000 * 0.8
    verdict = cache.verify(folder)
    assert verdict.is_sound
    assert not verdict.unused


def test_shared_objects_stay_with_the_last_entry(folder: Path) -> None:
    store, now = Store(folder), time.time()
    keep(store, "old", b"shared" * 1000, b"own" * 1000, used=now - 50)
    keep(store, "new", b"shared" * 1000, used=now)
    assert store.prune(9_000) == 2
    assert cache.verify(folder).is_sound
    assert [found.key for found in cache.entries(folder)] == ["new"]


def test_writing_keeps_the_limit(folder: Path) -> None:
    for number in range(20):  # each a process of its own
        keep(Store(folder, limit=50_000), f"k{number}", bytes([number]) * 10_000)
    assert sum(file.size for file in Store(folder).files()) < 60_000


def test_left_behind(folder: Path) -> None:
    store = Store(folder)
    keep(store, "aa", b"code")
    old, new = folder / GRAPHS / ".aside-1-old", folder / OBJECTS / ".aside-2-new"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    assert {file.name for file in store.files()} == {"aa-0", hashlib.sha256(b"code").hexdigest()}
    assert store.prune() == 1
    assert not old.exists()
    assert new.exists()  # somebody may be writing it


# ---- for people


def test_entries(folder: Path) -> None:
    store = Store(folder)
    assert cache.entries(folder) == []
    keep(store, "aa", b"x" * 100, source="model.py:7  y = x.relu()")
    (folder / GRAPHS / "bb-0").write_bytes(b"garbage")
    store.note_hit("aa-0")
    store.note_hit("aa-0")
    (found,) = cache.entries(folder)
    assert (found.key, found.hits, found.phases, found.kernels) == ("aa", 2, ("inference",), 1)
    assert found.hint == "model.py:7  y = x.relu()"
    assert found.size > 100
    assert abs(found.used - time.time()) < 60


def test_verify(folder: Path) -> None:
    store = Store(folder)
    keep(store, "aa", b"one")
    keep(store, "bb", b"two", b"three")
    store.write(OBJECTS, "unnamed", b"")
    store.write(OBJECTS, hashlib.sha256(b"four").hexdigest(), b"four")
    (folder / OBJECTS / hashlib.sha256(b"two").hexdigest()).unlink()
    (folder / GRAPHS / "cc-0").write_bytes(b"garbage")
    verdict = cache.verify(folder)
    assert set(verdict.damaged) == {"graphs/cc-0", "objects/unnamed"}
    assert set(verdict.incomplete) == {"graphs/bb-0"}
    assert {name[8:16] for name in verdict.unused} == {hashlib.sha256(b).hexdigest()[:8] for b in (b"three", b"four")}
    assert [found.key for found in cache.entries(folder)] == ["aa"]
    again = cache.verify(folder)
    assert again.is_sound
    assert (again.files, again.unused) == (2, {})


def test_clear(folder: Path) -> None:
    assert cache.clear(folder) == cache.prune(0, folder) == cache.verify(folder).files == 0
    assert not folder.exists()
    keep(Store(folder), "aa", b"x")
    assert cache.clear(folder) == 2
    assert not list(Store(folder).files())


def test_difference_names_fields_and_lines() -> None:
    told = cache.difference({"graph": "a\nb\nc", "cpu": "one"}, {"graph": "a\nx\nc\nd", "cpu": "one", "new": "1"})
    assert told == ["graph: now b; it was made for x (and 1 lines more)", "new: now nothing; it was made for 1"]


def test_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        code = main(["cache", *arguments, "--dir", str(folder)])
        found = capsys.readouterr()
        return code, found.out + found.err

    code, text = run("list")
    assert (code, "nothing is stored" in text) == (0, True)
    keep(Store(folder), "abcd", b"x", graph="def graph():\n    y = relu(x)", source="model.py:7  y = x.relu()")
    keep(Store(folder), "abff", b"x", guards="L['t0'] > 1")
    code, text = run("list")
    assert code == 0
    assert "abcd-0" in text
    assert "model.py:7" in text
    assert "hits" in text
    code, text = run("show", "abc")
    assert code == 0
    assert "y = relu(x)" in text
    assert "model.py:7  y = x.relu()" in text
    assert run("show", "ab")[0] == run("show", "zz")[0] == 1
    assert run("verify")[0] == 0
    (folder / GRAPHS / "abcd-0").write_bytes(b"")
    code, text = run("verify")
    assert code == 1
    assert "graphs/abcd-0" in text
    assert run("prune", "--megabytes", "0")[0] == 0
    assert run("clear") == (0, "0 files removed\n")
    folder.chmod(0o777)
    code, text = run("list")
    assert code == 2
    assert "others may write" in text
    for wrong in (["prune"], ["prune", "--megabytes", "-1"], ["unknown"]):
        with pytest.raises(SystemExit) as ended:
            main(["cache", *wrong])
        assert ended.value.code == 2


def test_command_without_torch(folder: Path) -> None:
    keep(Store(folder), "abcd", b"x")
    code = "import sys; from ferrite.command import main; main(); print(sorted({'torch', 'llvmlite'} & {*sys.modules}))"
    variables = os.environ | {"PYTHONPATH": str(ROOT), "FERRITE_CACHE_DIR": str(folder)}
    ran = subprocess.run(
        [sys.executable, "-c", code, "cache"], env=variables, capture_output=True, text=True, check=True
    )
    assert "abcd-0" in ran.stdout
    assert ran.stdout.splitlines()[-1] == "[]"


def test_exported() -> None:
    assert ferrite.cache is cache
    with pytest.raises(AttributeError):
        _ = ferrite.nothing
