"""The cache on disk: bytes under names, for this user alone, which no damage to a file can turn into a wrong answer.

    <folder>/graphs/<key>-<n>       an entry; several under one key differ in what their sizes must satisfy
    <folder>/objects/<sha-256>      machine code, shared by the entries that name it
    <folder>/hits/<key>-<n>         one byte for each time that the entry was used, the last time at its own time

An entry or an object is a mark, the SHA-256 of its place and of the rest, and the rest: one that was cut, changed or
put in the place of another does not fit. It is written aside, synchronised and renamed, so a reader sees all of it or
nothing, without locks; and whoever reads what does not fit removes it. Folders are private to the user (0700, files
0600). A folder that somebody else owns or may write to, or that is a symbolic link, is not used at all: machine code
in it would run with this user's rights. Code is never executed from these files: it is read and put into memory of the
process, so a file system without the right to execute will do.

Nothing here raises for what a disk can do. What cannot be read is not there; what cannot be written ends writing, and
what was stored before is still found; a folder that must not be used ends both. `trouble` says why, and it is logged
once. Under `strict` such trouble is a `BrokenCache`.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ferrite.artifact.outline import Outline, outline_of
from ferrite.errors import BrokenCache

log = logging.getLogger(__name__)

GRAPHS, OBJECTS, HITS = "graphs", "objects", "hits"
MARK = b"ferrite cache 1\n"
HEADER = len(MARK) + hashlib.sha256().digest_size
_NAME = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]{0,150}")
_ASIDE = ".aside-"
_LEFT_BEHIND = 3600.0  # seconds after which a file that is still aside, or that no entry names, belongs to nobody
_SHARE_KEPT = 0.8  # of the limit, when files have to go
_LARGEST = 1 << 31
# What a process has too little of says nothing about the file that it wanted to read.
_OF_THE_PROCESS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN})
_GONE = frozenset({errno.ENOENT, errno.ESTALE})


@dataclass(frozen=True)
class File:
    """One file of the cache. `made` and `used`: when it was written, and when it was last found, in seconds."""

    kind: str
    name: str
    size: int
    made: float
    used: float
    hits: int = 0

    @property
    def place(self) -> str:
        return f"{self.kind}/{self.name}"


@dataclass
class Store:
    """A folder of entries. `limit` in bytes; None: no limit."""

    folder: Path
    writable: bool = True
    strict: bool = False
    limit: int | None = None
    trouble: str = ""  # why nothing is found, once that is so
    discarded: int = field(default=0, repr=False)  # how many files were not used although they are there
    _told: set[tuple[str, str]] = field(default_factory=set, repr=False)  # files that were warned of
    _opened: dict[str, int] = field(default_factory=dict, repr=False)  # kind -> descriptor of its folder
    _written: int | None = field(default=None, repr=False)  # since the limit was last looked at; None: it never was

    def read(self, kind: str, name: str) -> bytes | None:
        """The bytes under a name, None if there are none. What is damaged is removed."""
        folder = self._folder(kind) if _NAME.fullmatch(name) else None
        if folder is None:
            return None
        try:
            return read_checked(folder, kind, name)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno in _OF_THE_PROCESS:
                log.warning("Ferrite's cache: %s %s cannot be read now: %s", kind, name, error)
            else:
                self.discard(kind, name, str(error))
            return None

    def write(self, kind: str, name: str, body: bytes) -> bool:
        """Puts bytes under a name; whoever reads meanwhile sees what was there before, or all of it."""
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name of a file in the cache")
        try:
            try:
                written = self._write(kind, name, body)
            except OSError as error:
                if error.errno not in _GONE:
                    raise
                self.close()  # the folder was removed under us
                written = self._write(kind, name, body)
        except OSError as error:
            self._stop_writing(f"{self.folder / kind} cannot be written: {error}")
            return False
        if written and self.limit is not None:
            self._written = None if self._written is None else self._written + len(body)
            if self._written is None or self._written > self.limit * (1 - _SHARE_KEPT):
                self.prune()
        return written

    def _write(self, kind: str, name: str, body: bytes) -> bool:
        if not self.writable:
            return False
        folder = self._folder(kind)
        if folder is None:
            return False
        aside = f"{_ASIDE}{os.getpid()}-{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(aside, flags, 0o600, dir_fd=folder)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(_header(kind, name, body))
                file.write(body)
                file.flush()
                os.fsync(file.fileno())
            os.rename(aside, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(OSError):
                os.unlink(aside, dir_fd=folder)
            raise
        return True

    def note_hit(self, name: str) -> None:
        """An entry was used: one more byte. Whatever goes wrong here only makes the entry look older."""
        folder = self._folder(HITS) if self.writable and _NAME.fullmatch(name) else None
        if folder is None:
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with suppress(OSError):
            descriptor = os.open(name, flags, 0o600, dir_fd=folder)
            try:
                os.write(descriptor, b".")
            finally:
                os.close(descriptor)

    def discard(self, kind: str, name: str, why: str) -> None:
        """Removes what cannot be used, and says so."""
        self.discarded += 1
        if not self.writable:
            if (kind, name) not in self._told:
                log.warning("Ferrite's cache: %s %s is not used: %s", kind, name, why)
            self._told.add((kind, name))
            return
        self._told.add((kind, name))
        try:
            self._unlink(kind, name)
        except OSError as error:
            self._stop_writing(f"{self.folder / kind / name} is not used ({why}), and cannot be removed: {error}")
        else:
            log.warning("Ferrite's cache: %s %s is not used and removed: %s", kind, name, why)

    def remove(self, kind: str, name: str) -> bool:
        """Whether it was there and is gone."""
        try:
            return self.writable and self._unlink(kind, name)
        except OSError:
            return False

    def _unlink(self, kind: str, name: str) -> bool:
        folder = self._folder(kind)
        if folder is None:
            return False
        try:
            os.unlink(name, dir_fd=folder)
        except FileNotFoundError:
            return False
        except (IsADirectoryError, PermissionError):  # the second is what POSIX says of a folder
            os.rmdir(name, dir_fd=folder)
        if kind == GRAPHS:
            self.remove(HITS, name)
        return True

    def files(self) -> Iterator[File]:
        """Everything that is kept, in no order."""
        hits = dict(self._listed(HITS))
        for name, facts in self._listed(GRAPHS):
            if not name.startswith(_ASIDE):
                counted = hits.get(name)
                used = max(facts.st_mtime, counted.st_mtime) if counted else facts.st_mtime
                yield File(GRAPHS, name, facts.st_size, facts.st_mtime, used, counted.st_size if counted else 0)
        for name, facts in self._listed(OBJECTS):
            if not name.startswith(_ASIDE):
                yield File(OBJECTS, name, facts.st_size, facts.st_mtime, facts.st_mtime)

    def outline(self, name: str) -> Outline:
        """What an entry says of itself; its digest is checked. Raises `OSError` or `ValueError` if it cannot be read,
        and then leaves it where it is."""
        folder = self._folder(GRAPHS)
        if folder is None:
            raise FileNotFoundError(errno.ENOENT, "there is no cache", str(self.folder))
        return outline_of(read_checked(folder, GRAPHS, name))

    def check(self, kind: str, name: str) -> None:
        """Raises as `outline` does if a file is not what was written there."""
        folder = self._folder(kind)
        if folder is None:
            raise FileNotFoundError(errno.ENOENT, "there is no cache", str(self.folder))
        body = read_checked(folder, kind, name)
        if kind == OBJECTS and hashlib.sha256(body).hexdigest() != name:
            raise ValueError("it has the name of another object")

    def prune(self, limit: int | None = None) -> int:
        """Keeps what was used last, entries with their objects, as long as that is well below the limit; gives how many
        files went. Files that a process left behind when it died go too."""
        if not self.writable:
            return 0
        self._written = 0
        gone = self.remove_left_behind()
        limit = self.limit if limit is None else limit
        files = list(self.files())
        if limit is None or sum(file.size for file in files) <= limit:
            return gone
        room = limit * _SHARE_KEPT
        objects = {file.name: file for file in files if file.kind == OBJECTS}
        kept: set[str] = set()
        unnamed: set[str] = set()
        for entry in sorted((file for file in files if file.kind == GRAPHS), key=lambda file: file.used, reverse=True):
            try:
                named = self.outline(entry.name).object_names
            except (OSError, ValueError):
                gone += self.remove(GRAPHS, entry.name)
                continue
            size = entry.size + sum(objects[name].size for name in named - kept if name in objects)
            if size <= room:
                room -= size
                kept |= named
            else:
                gone += self.remove(GRAPHS, entry.name)
                unnamed |= named
        gone += sum(self.remove(OBJECTS, name) for name in sorted(unnamed - kept))
        # What no entry names may belong to one that is being written.
        old = [file for file in objects.values() if file.name not in kept | unnamed and _is_old(file.made)]
        return gone + sum(self.remove(OBJECTS, file.name) for file in old)

    def remove_left_behind(self) -> int:
        """Files that a process which died had not put in their place yet, and counts of entries that are gone."""
        gone = 0
        for kind in (GRAPHS, OBJECTS):
            aside = [name for name, facts in self._listed(kind) if name.startswith(_ASIDE) and _is_old(facts.st_mtime)]
            gone += sum(self.remove(kind, name) for name in aside)
        entries = {name for name, _ in self._listed(GRAPHS)}
        for name, facts in list(self._listed(HITS)):
            if name not in entries and _is_old(facts.st_mtime):
                self.remove(HITS, name)
        return gone

    def clear(self) -> int:
        """Removes everything, what others are writing included; gives how many files went."""
        return sum(self.remove(kind, name) for kind in (GRAPHS, OBJECTS, HITS) for name, _ in list(self._listed(kind)))

    def close(self) -> None:
        while self._opened:
            _, descriptor = self._opened.popitem()
            with suppress(OSError):
                os.close(descriptor)

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
        """The descriptor of a folder that has been checked. None if there is none, and none is to be made; None, and
        `trouble`, if it must not be used."""
        if self.trouble:
            return None
        if kind not in self._opened:
            try:
                self._opened[kind] = self._open(kind)
            except OSError as error:
                if self.writable or not isinstance(error, FileNotFoundError):
                    self.give_up(str(error))
                return None
        return self._opened[kind]

    def _open(self, kind: str) -> int:
        """By the descriptor of the folder that was checked, so that nobody can put another one in its place between."""
        if self.writable:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                self.folder.mkdir(mode=0o700)
        outer = _open_private(self.folder, None, self.folder)
        try:
            if self.writable:
                with suppress(FileExistsError):
                    os.mkdir(kind, 0o700, dir_fd=outer)
            return _open_private(kind, outer, self.folder / kind)
        finally:
            os.close(outer)

    def give_up(self, why: str) -> None:
        """Nothing is read or written from now on."""
        self.trouble = why
        self.close()
        if self.strict:
            raise BrokenCache("the cache does not work", ran="a file operation", why=why)
        log.warning("Ferrite's cache is off: %s", why)

    def _stop_writing(self, why: str) -> None:
        self.writable = False
        if self.strict:
            raise BrokenCache("the cache does not work", ran="a file operation", why=why)
        log.warning("Ferrite's cache is only read from now on: %s", why)


def default_folder() -> str:
    """`ferrite` in the user's folder for caches; empty if there is no such user, or no such home."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(given):
        return os.path.join(given, "ferrite")
    home = os.path.expanduser("~") if os.environ.get("HOME", "~") else ""
    return os.path.join(home, ".cache", "ferrite") if os.path.isabs(home) and os.path.isdir(home) else ""


def read_checked(folder: int, kind: str, name: str) -> bytes:
    """What stands behind the header of a file. Raises `ValueError` if it is not what was written there."""
    content = _read_private(folder, name)
    body = content[HEADER:]
    if content[:HEADER] != _header(kind, name, body):
        mark = content[: len(MARK)]
        if mark != MARK and mark.startswith(MARK.split(b" 1")[0]):
            raise ValueError("it has another format")
        raise ValueError("it does not match its own digest")
    return body


def _header(kind: str, name: str, body: bytes) -> bytes:
    whole = hashlib.sha256(f"{kind}/{name}\n".encode())
    whole.update(body)
    return MARK + whole.digest()


def _is_old(when: float) -> bool:
    return time.time() - when > _LEFT_BEHIND


def _read_private(folder: int, name: str) -> bytes:
    # Without O_NONBLOCK, to open a pipe would wait for its writer.
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o022:
            raise ValueError("it is not a private file of this user")
        if facts.st_size > _LARGEST:
            raise ValueError("it is larger than any entry")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


def _open_private(folder: Path | str, outer: int | None, shown: Path) -> int:
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=outer)
    except NotADirectoryError:
        is_link = stat.S_ISLNK(os.stat(folder, dir_fd=outer, follow_symlinks=False).st_mode)
        raise PermissionError(f"{shown} is {'a symbolic link' if is_link else 'no folder'}") from None
    try:
        _refuse_strangers(shown, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _refuse_strangers(folder: Path, facts: os.stat_result) -> None:
    if facts.st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user ({facts.st_uid})")
    if facts.st_mode & 0o022:
        raise PermissionError(f"others may write to {folder} (mode {stat.S_IMODE(facts.st_mode):o})")
