"""Files of the cache that are damaged: one warning, the file goes, the graph is compiled anew, the answer is right."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from ferrite import caching
from ferrite.artifact.compiled import CompiledGraph
from ferrite.artifact.entry import decode
from ferrite.artifact.store import GRAPHS, HEADER, OBJECTS
from ferrite.errors import CompileFault
from ferrite.failure import FerriteError
from tests.cache.mutate import mutations
from tests.cache.victim import Victim, cuts, fill, flip, misfits, oddities, signed, truncate, watched


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    made = Victim(tmp_path_factory.mktemp("victim") / "cache")
    yield made
    caching._opened.cache_clear()


@pytest.fixture(autouse=True)
def _intact(victim: Victim) -> Iterator[None]:
    """Whatever a test did: the next one finds a store that works, and whole files."""
    yield
    caching._opened.cache_clear()
    victim.restore()


def test_undamaged_is_a_hit(victim: Victim) -> None:
    with watched() as said:
        assert victim.is_right(victim.run())
        assert caching.latest().outcome == "hit"
        assert victim.look_up().outcome == "hit"
    assert not said


@pytest.mark.parametrize("kind", [GRAPHS, OBJECTS])
def test_cut(victim: Victim, kind: str) -> None:
    path = victim.entry if kind == GRAPHS else victim.object
    for length in cuts(victim.files[path], every_edge=False):
        assert not victim.survives(path, truncate(length)), length


def test_cut_at_the_edges_of_records(victim: Victim) -> None:
    lengths = cuts(victim.files[victim.entry], every_edge=True)
    for length in lengths[:: len(lengths) // 100]:
        assert not victim.survives(victim.entry, truncate(length)), length


@pytest.mark.parametrize("kind", [GRAPHS, OBJECTS])
def test_flipped_bits(victim: Victim, kind: str) -> None:
    path = victim.entry if kind == GRAPHS else victim.object
    length, chance = len(victim.files[path]), random.Random(7)
    bits = [*range(0, 8 * HEADER, 5), *(chance.randrange(8 * HEADER, 8 * length) for _ in range(60))]
    for bit in bits:
        assert not victim.survives(path, flip(bit)), bit


@pytest.mark.parametrize("kind", [GRAPHS, OBJECTS])
def test_oddities(victim: Victim, kind: str) -> None:
    path = victim.entry if kind == GRAPHS else victim.object
    for name, damage in oddities(victim).items():
        assert not victim.survives(path, damage), name


def test_misfits(victim: Victim) -> None:
    for name, damage in misfits(victim).items():
        assert not victim.survives(victim.entry, damage), name


@pytest.mark.parametrize("odd", ["empty", "of another kind", "a folder", "a pipe"])
def test_compiled_again(victim: Victim, odd: str) -> None:
    assert not victim.survives(victim.entry, oddities(victim)[odd], compiles=True)


def test_missing_object(victim: Victim) -> None:
    assert not victim.survives(victim.object, lambda path: path.unlink(), compiles=True)


def test_full_folder_in_the_place_of_an_entry(victim: Victim) -> None:
    victim.entry.unlink()
    (victim.entry / "inner").mkdir(parents=True)
    with watched() as said:
        assert victim.is_right(victim.run())
        assert victim.is_right(victim.run())
    (victim.entry / "inner").rmdir()
    assert len(said) == 1
    assert "cannot be removed" in said[0]


def test_wrong_bodies_with_right_digests(victim: Victim) -> None:
    """What is no entry is refused, and nothing else is raised; numbers in an entry cannot be told from others."""
    body = victim.files[victim.entry][HEADER:]
    kept = {path.name: data[HEADER:] for path, data in victim.files.items()}
    refused = 0
    for _, mutated in mutations(body, count=400, seed=3):
        try:
            entry = decode(mutated, kept.get)
            for parcel in entry.graphs.values():
                CompiledGraph.unpack(parcel)
        except (ValueError, LookupError, CompileFault):
            refused += 1
    assert refused > 100


def test_guards_that_raise(victim: Victim) -> None:
    for guards in ("1 // 0 > 0", "L['t9'] > 1", "open('x')", "9 ** 9 ** 9 > 1", "1 << 10 ** 9 > 1", "L.x", "(" * 500):
        whole = msgspec.msgpack.decode(victim.files[victim.entry][HEADER:])
        data = signed(victim.entry, msgspec.msgpack.encode(whole | {"guards": guards}))
        assert victim.survives(victim.entry, fill(data)) in ("", _NOT_REMOVED), guards


# Outside of a compile there is no shape environment: guards that can be read do not hold then.
_NOT_REMOVED = "0 warnings: []; the file stays"


# ---- a disk that does not work


def failing(function: Any, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        if function is not os.open or args[1] & os.O_CREAT:
            raise OSError(code, os.strerror(code))
        return function(*args, **kwargs)

    monkeypatch.setattr(os, function.__name__, fail)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_disk_that_cannot_be_written(
    victim: Victim, tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(os.fsync, code, monkeypatch)
    options = victim.options | {"cache_dir": str(tmp_path / "cache")}
    with watched() as said:
        for _ in range(2):
            torch._dynamo.reset()
            compiled = torch.compile(lambda x: x.relu() + 1, backend="ferrite", options=options)
            assert torch.equal(compiled(victim.inputs[0]), victim.expected[1])
    assert len(said) == 1
    assert os.strerror(code) in said[0]
    assert not list((tmp_path / "cache" / OBJECTS).iterdir())


def test_a_folder_of_others(victim: Victim, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(0o777)
    victim.options["cache_dir"] = str(folder)
    try:
        with watched() as said:
            assert victim.is_right(victim.run())
            assert victim.is_right(victim.run())
        assert caching.latest().outcome == "bypass"
        assert len(said) == 1
        assert "others may write" in said[0]
        assert not list(folder.iterdir())
        victim.options["cache"] = "strict"
        with pytest.raises(FerriteError, match="others may write"):
            victim.run()
    finally:
        victim.options.update(cache="on", cache_dir=str(victim.folder))


def test_nobody_at_home(victim: Victim, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/nonexistent/home")
    victim.options["cache_dir"] = ""
    try:
        with watched() as said:
            assert victim.is_right(victim.run())
        assert len(said) == 1
        assert "no home" in said[0]
    finally:
        victim.options["cache_dir"] = str(victim.folder)


def test_a_folder_that_goes_while_it_is_used(victim: Victim, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    victim.options["cache_dir"] = str(folder)
    try:
        victim.run()
        folder.rename(tmp_path / "gone")
        with watched() as said:
            assert victim.is_right(victim.run())  # a miss or a hit in what the process has open
            for kind in (GRAPHS, OBJECTS):
                for path in (tmp_path / "gone" / kind).iterdir():
                    path.unlink()
                (tmp_path / "gone" / kind).rmdir()
            assert victim.is_right(victim.run())
            assert caching.latest().outcome == "miss"
            assert victim.is_right(victim.run())
            assert caching.latest().outcome == "hit"
        assert not said
        assert list((folder / GRAPHS).iterdir())
    finally:
        victim.options["cache_dir"] = str(victim.folder)


# ---- modes


def test_off_neither_reads_nor_writes(victim: Victim, tmp_path: Path) -> None:
    victim.options.update(cache="off", cache_dir=str(tmp_path / "cache"))
    try:
        assert victim.is_right(victim.run())
        assert not (tmp_path / "cache").exists()
    finally:
        victim.options.update(cache="on", cache_dir=str(victim.folder))


def test_read_only_finds_and_leaves_alone(victim: Victim, tmp_path: Path) -> None:
    victim.options["cache"] = "read-only"
    before = {path: path.stat().st_mtime_ns for path in victim.folder.rglob("*")}
    try:
        assert victim.is_right(victim.run())
        assert caching.latest().outcome == "hit"
        victim.options["cache_dir"] = str(tmp_path / "cache")
        assert victim.is_right(victim.run())
        assert caching.latest().outcome == "miss"
        assert not (tmp_path / "cache").exists()
    finally:
        victim.options.update(cache="on", cache_dir=str(victim.folder))
    assert before == {path: path.stat().st_mtime_ns for path in victim.folder.rglob("*")}
