"""The cache on disk: bytes under names, for this user alone, which no damage to a file can turn into a wrong answer.

    <folder>/graphs/<key>-<n>       an entry; several under one key differ in what their sizes must satisfy
    <folder>/objects/<sha-256>      machine code, shared by the entries that name it

A file is a mark, the SHA-256 of the rest, and the rest. It is written aside, synchronised and renamed, so a reader sees
all of it or nothing, without locks; and whoever reads what does not fit its own digest removes it. Folders are private
to the user (0700, files 0600). A folder that somebody else owns or may write to, or that is a symbolic link, is not
used at all: machine code in it would run with this user's rights.

Nothing here raises for what a disk can do (full, read-only, gone): `read` gives None and `write` gives False, `trouble`
says why, and it is logged once. Under `strict` such trouble is a `ToolFailed`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ferrite.errors import ToolFailed

log = logging.getLogger(__name__)

GRAPHS, OBJECTS = "graphs", "objects"
MARK = b"ferrite cache 1\n"
HEADER = len(MARK) + hashlib.sha256().digest_size
_ASIDE = ".aside-"
_LEFT_BEHIND = 3600.0  # seconds after which a file that is still aside belongs to nobody
_SHARE_KEPT = 0.8  # of the limit, when files have to go
_LARGEST = 1 << 31


@dataclass(frozen=True)
class File:
    """One file of the cache. `used`: when it was last read or written, in seconds."""

    kind: str
    name: str
    size: int
    used: float


@dataclass
class Store:
    """A folder of entries. `limit` in bytes; None: no limit."""

    folder: Path
    writable: bool = True
    strict: bool = False
    limit: int | None = None
    trouble: str = ""  # why it does not work, once it does not
    _opened: dict[str, int] = field(default_factory=dict, repr=False)  # kind -> descriptor of its folder
    _written: int = field(default=0, repr=False)

    def read(self, kind: str, name: str) -> bytes | None:
        """The bytes under a name, None if there are none. What is damaged is removed."""
        folder = self._folder(kind)
        if folder is None:
            return None
        try:
            content = _read_private(folder, name)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self.discard(kind, name, str(error))
            return None
        body = content[HEADER:]
        if content[:HEADER] != _header(body):
            self.discard(kind, name, "it does not match its own digest")
            return None
        if self.writable:
            with suppress(OSError):
                os.utime(name, dir_fd=folder)
        return body

    def write(self, kind: str, name: str, body: bytes) -> bool:
        """Puts bytes under a name; whoever reads meanwhile sees what was there before, or all of it."""
        try:
            try:
                written = self._write(kind, name, body)
            except FileNotFoundError:  # the folder was removed under us
                self.close()
                written = self._write(kind, name, body)
        except OSError as error:
            self._give_up(f"{self.folder / kind} cannot be written: {error}")
            return False
        if not written:
            return False
        self._written += len(body)
        if self.limit is not None and self._written > self.limit * (1 - _SHARE_KEPT):
            self.prune()
        return True

    def _write(self, kind: str, name: str, body: bytes) -> bool:
        folder = self._folder(kind)
        if folder is None or not self.writable:
            return False
        aside = f"{_ASIDE}{os.getpid()}-{secrets.token_hex(8)}"
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=folder)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(_header(body))
                file.write(body)
                file.flush()
                os.fsync(file.fileno())
            os.rename(aside, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(OSError):
                os.unlink(aside, dir_fd=folder)
            raise
        return True

    def discard(self, kind: str, name: str, why: str) -> None:
        """Removes what cannot be used, and says so."""
        log.warning("Ferrite's cache: %s %s is not used and removed: %s", kind, name, why)
        self.remove(kind, name)

    def remove(self, kind: str, name: str) -> None:
        folder = self._folder(kind)
        if folder is not None and self.writable:
            with suppress(OSError):
                os.unlink(name, dir_fd=folder)

    def files(self) -> Iterator[File]:
        """Everything that is kept, in no order."""
        for kind in (GRAPHS, OBJECTS):
            for name, facts in self._listed(kind):
                if not name.startswith(_ASIDE):
                    yield File(kind, name, facts.st_size, facts.st_mtime)

    def prune(self, limit: int | None = None) -> int:
        """Removes what was not used for the longest time until the rest is well below the limit; gives how many files
        went. Files that a process left aside when it died go too."""
        if not self.writable:
            return 0
        self._written = 0
        for kind in (GRAPHS, OBJECTS):
            for name, facts in self._listed(kind):
                if name.startswith(_ASIDE) and time.time() - facts.st_mtime > _LEFT_BEHIND:
                    self.remove(kind, name)
        limit = self.limit if limit is None else limit
        kept = sorted(self.files(), key=lambda file: file.used)
        total, gone = sum(file.size for file in kept), 0
        if limit is None or total <= limit:
            return 0
        for file in kept:
            if total <= limit * _SHARE_KEPT:
                break
            self.remove(file.kind, file.name)
            total, gone = total - file.size, gone + 1
        return gone

    def close(self) -> None:
        for descriptor in self._opened.values():
            with suppress(OSError):
                os.close(descriptor)
        self._opened.clear()

    __del__ = close

    def _listed(self, kind: str) -> Iterator[tuple[str, os.stat_result]]:
        folder = self._folder(kind)
        if folder is None:
            return
        with suppress(OSError):
            for name in os.listdir(folder):
                with suppress(OSError):
                    yield name, os.stat(name, dir_fd=folder, follow_symlinks=False)

    def _folder(self, kind: str) -> int | None:
        """The descriptor of a folder that has been checked; None, and `trouble`, if it must not be used."""
        if self.trouble:
            return None
        if kind not in self._opened:
            try:
                if self.writable:
                    _make_private(self.folder)
                    _make_private(self.folder / kind)
                elif not (self.folder / kind).is_dir():
                    return None
                _check_private(self.folder)
                self._opened[kind] = _open_private(self.folder / kind)
            except OSError as error:
                self._give_up(str(error))
                return None
        return self._opened[kind]

    def _give_up(self, why: str) -> None:
        self.trouble = why
        self.close()
        if self.strict:
            raise ToolFailed("the cache does not work", ran="a file operation", why=why)
        log.warning("Ferrite's cache is off: %s", why)


def _header(body: bytes) -> bytes:
    return MARK + hashlib.sha256(body).digest()


def _read_private(folder: int, name: str) -> bytes:
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    with os.fdopen(descriptor, "rb") as file:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o022:
            raise ValueError("it is not a private file of this user")
        if facts.st_size > _LARGEST:
            raise ValueError("it is larger than any entry")
        return file.read()


def _make_private(folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)


def _open_private(folder: Path) -> int:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _refuse_strangers(folder, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_private(folder: Path) -> None:
    os.close(_open_private(folder))


def _refuse_strangers(folder: Path, facts: os.stat_result) -> None:
    if facts.st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user ({facts.st_uid})")
    if facts.st_mode & 0o022:
        raise PermissionError(f"others may write to {folder} (mode {stat.S_IMODE(facts.st_mode):o})")
