"""Names of loaded code for `perf`: lines of an address, a size and a name in /tmp/perf-<process>.map.

`perf report` reads the file after the process has ended, so it stays. Other makers of code in the same process may
write to it (Python does under `-X perf`): everyone appends whole lines. Code that is freed keeps its line; what is
loaded at its place later comes behind it. A file that was last written before this process began is that of an earlier
one with the same number: it is emptied.

The folder belongs to everyone, so a file there is used only if it is a plain file of this user's that has no other
name, and no link is followed. A forked child starts a file of its own with what it has inherited.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterable

from ferrite.native.elf import Function
from ferrite.process import start_of_process

log = logging.getLogger(__name__)

FOLDER = "/tmp"  # where perf looks

_told: list[bytes] = []  # of this process and of those it was forked from
_is_given_up = False  # a file that must not be written is warned of once


def tell_perf(functions: Iterable[Function]) -> None:
    """Never raises: nothing but names depends on it."""
    if not _told:
        os.register_at_fork(after_in_child=_start_anew)
    lines = "".join(f"{each.address:x} {each.size:x} {_one_line(each.name)}\n" for each in functions).encode()
    _told.append(lines)
    _write(lines)


def _one_line(name: str) -> str:
    return " ".join(name.split())


def _write(lines: bytes) -> None:
    global _is_given_up
    if _is_given_up:
        return
    path = f"{FOLDER}/perf-{os.getpid()}.map"
    try:
        place = os.open(
            path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600
        )
        try:
            found = os.fstat(place)
            _check(found)
            if found.st_mtime < start_of_process() - 1:
                os.ftruncate(place, 0)
            while lines:
                lines = lines[os.write(place, lines) :]
        finally:
            os.close(place)
    except OSError as error:
        _is_given_up = True
        log.warning("Ferrite does not tell perf the names of its kernels: %s: %s", path, error)


def _check(found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_nlink != 1:
        raise PermissionError("it is no file of this user's alone")


def _start_anew() -> None:
    global _is_given_up
    _is_given_up = False
    _write(b"".join(_told))
