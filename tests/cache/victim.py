"""A small compiled function whose files are damaged: `test_damage.py` does a part of that, `torture.py` all of it."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import torch
from torch.fx import Graph, GraphModule

from ferrite import caching
from ferrite.artifact.store import GRAPHS, HEADER, MARK, OBJECTS, _header
from ferrite.options import Options, resolve

NOTHING = GraphModule(torch.nn.Module(), Graph())


def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.softmax(x @ w, -1).sum(0), x.relu() + 1


class Warnings(logging.Handler):
    """What Ferrite says while it is watched."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextmanager
def watched() -> Iterator[list[str]]:
    handler, log = Warnings(), logging.getLogger("ferrite")
    log.addHandler(handler)
    try:
        yield handler.texts
    finally:
        log.removeHandler(handler)


class Victim:
    """`function`, compiled once; `files` are what that left in the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.options: dict[str, Any] = {"cache": "on", "cache_dir": str(folder)}
        self.inputs = torch.linspace(-2, 2, 32).reshape(4, 8), torch.linspace(-1, 1, 64).reshape(8, 8)
        self.expected = self.run()
        made = caching.latest()
        assert made is not None
        assert made.outcome == "miss"
        assert made.fields is not None
        self.key, self.fields, self.sources = made.key, made.fields, made.sources
        self.files = {
            path: path.read_bytes() for kind in (GRAPHS, OBJECTS) for path in sorted((folder / kind).iterdir())
        }
        self.entry = folder / GRAPHS / f"{self.key}-0"
        self.object = next(path for path in self.files if path.parent.name == OBJECTS)

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Compiles as a new process would, and calls."""
        torch._dynamo.reset()
        return torch.compile(function, backend="ferrite", options=self.options)(*self.inputs)

    def is_right(self, results: tuple[torch.Tensor, ...]) -> bool:
        return all(torch.equal(one, other) for one, other in zip(results, self.expected, strict=True))

    def look_up(self) -> caching.Lookup:
        """As the compile of the function would, without capturing it again."""
        with (
            mock.patch.object(caching, "fields_of", return_value=self.fields),
            mock.patch.object(caching, "sources_of", return_value=self.sources),
        ):
            return caching.look_up(NOTHING, resolve(Options(), None, self.options))

    def restore(self) -> None:
        for path, data in self.files.items():
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
            if path.is_symlink() or not path.is_file() or path.read_bytes() != data:
                path.unlink(missing_ok=True)
                path.write_bytes(data)
                path.chmod(0o600)

    def survives(self, path: Path, damage: Callable[[Path], Any], *, compiles: bool = False) -> str:
        """What is wrong after a file was damaged; nothing if the graph is compiled anew, with one warning, and the file
        is removed or replaced. `compiles`: and if the answer is right."""
        self.restore()
        damage(path)
        spoilt = _content(path)
        with watched() as said:
            if compiles:
                right = self.is_right(self.run())
                found = caching.latest()
            else:
                right, found = True, self.look_up()
        assert found is not None
        troubles = [
            (not right, "a wrong answer"),
            (found.outcome != "miss", f"a {found.outcome}: {found.reason}"),
            (len(said) != 1, f"{len(said)} warnings: {said}"),
            (os.path.lexists(path) and _content(path) == spoilt, "the file stays"),
            (compiles and not path.is_file(), "not stored again"),
        ]
        return "; ".join(text for is_so, text in troubles if is_so)


def _content(path: Path) -> tuple[int, bytes] | None:
    """With who may do what; None for whatever is no plain file."""
    return (path.stat().st_mode, path.read_bytes()) if path.is_file() and not path.is_symlink() else None


# ---- ways to damage a file


def truncate(length: int) -> Callable[[Path], Any]:
    return lambda path: os.truncate(path, length)


def flip(bit: int) -> Callable[[Path], Any]:
    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)

    return damage


def fill(data: bytes) -> Callable[[Path], Any]:
    return lambda path: path.write_bytes(data)


def signed(path: Path, body: bytes) -> bytes:
    """A file with this body that fits its digest."""
    return _header(path.parent.name, path.name, body) + body


def _replace(path: Path, make: Callable[[Path], Any]) -> None:
    path.unlink()
    make(path)


def _make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:  # the path may be longer than a socket's address
        here = os.getcwd()
        os.chdir(path.parent)
        try:
            made.bind(path.name[:50])
            os.rename(path.name[:50], path.name)
        finally:
            os.chdir(here)


def _make_link(path: Path) -> None:
    real = path.with_name("elsewhere")
    path.rename(real)
    path.symlink_to(real)


def oddities(victim: Victim) -> dict[str, Callable[[Path], Any]]:
    """Everything but cuts and flips."""
    body = victim.files[victim.entry][HEADER:]
    old, new = MARK.replace(b"1", b"0"), MARK.replace(b"1", b"2")
    return {
        "empty": fill(b""),
        "garbage": fill(bytes(range(256)) * 40),
        "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
        "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
        "older format": lambda path: path.write_bytes(path.read_bytes().replace(MARK, old)),
        "newer format": lambda path: path.write_bytes(path.read_bytes().replace(MARK, new)),
        "of another name": lambda path: path.write_bytes(_header(path.parent.name, "aa-0", body) + body),
        "of another kind": lambda path: path.write_bytes(
            victim.files[victim.object if path == victim.entry else victim.entry]
        ),
        "a pipe": lambda path: _replace(path, os.mkfifo),
        "a folder": lambda path: _replace(path, os.mkdir),
        "a socket": lambda path: _replace(path, _make_socket),
        "a link": _make_link,
        "a link to nowhere": lambda path: _replace(path, lambda there: there.symlink_to("nowhere")),
        "others may write": lambda path: path.chmod(0o666),
    }


def misfits(victim: Victim) -> dict[str, Callable[[Path], Any]]:
    """Files in the place of the entry that fit their digest and are no entries."""
    whole = msgspec.msgpack.decode(victim.files[victim.entry][HEADER:])
    packed = msgspec.msgpack.encode
    bodies = {
        "no msgpack": b"\xc1" * 100,
        "another record": packed({"a": 1}),
        "a deep one": b"\x91" * 100_000,
        "a longer one": packed(whole | {"more": 1}),
        "no record": b"",
        "of another key": packed(whole | {"fields": whole["fields"] | {"cpu": "another"}}),
        "an older entry": packed(whole | {"format": 0}),
        "a newer entry": packed(whole | {"format": 99}),
        "an object that leads out": packed(whole | {"objects": {"inference": ["../graphs/" + victim.entry.name]}}),
        "an object without a name": packed(whole | {"objects": {"inference": ["\0"]}}),
    }
    return {name: fill(signed(victim.entry, body)) for name, body in bodies.items()}


def edges(body: bytes) -> list[int]:
    """Where a value of a msgpack text starts or ends."""
    found: set[int] = set()

    def walk(value: Any, start: int) -> int:
        found.add(start)
        match value:
            case dict():
                position = start + len(msgspec.msgpack.encode(dict.fromkeys(range(len(value))))) - _width(len(value))
                for key, item in value.items():
                    position = walk(item, walk(key, position))
            case list():
                position = start + len(msgspec.msgpack.encode([None] * len(value))) - len(value)
                for item in value:
                    position = walk(item, position)
            case _:
                position = start + len(msgspec.msgpack.encode(value))
        found.add(position)
        return position

    whole = msgspec.msgpack.decode(body)
    assert msgspec.msgpack.encode(whole) == body
    assert walk(whole, 0) == len(body)
    return sorted(found)


def _width(count: int) -> int:
    """Of the keys and values of a map from 0, 1, ... to None."""
    return sum(len(msgspec.msgpack.encode(number)) + 1 for number in range(count))


def cuts(data: bytes, *, every_edge: bool) -> list[int]:
    """Lengths to cut a file to: 64ths of it, the edges of its header, and those of the records in it."""
    known = {len(data) * part // 64 for part in range(64)} | {len(MARK), HEADER}
    if every_edge:
        known |= {HEADER + edge for edge in edges(data[HEADER:])}
    return sorted(length for length in known if length < len(data))
