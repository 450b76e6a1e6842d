"""Processes that write, race and die, without torch: each is a fork of a small one, so a thousand take seconds.

python -m tests.cache.writer kill FOLDER COUNT SEED      children that are killed while they write
python -m tests.cache.writer race FOLDER PROCESSES       children that write, read and prune the same names
"""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from ferrite.artifact import store as store_module
from ferrite.artifact.store import GRAPHS, OBJECTS, Store

SIZES = (0, 1, 1000, 4096, 70_000, 1_000_000)
NAMES = ("aa-0", "bb-0", "cc-0")


def body_of(seed: int, size: int) -> bytes:
    """Bytes that tell whether they are whole: all are the same."""
    return bytes([seed % 251]) * size


def is_whole(body: bytes) -> bool:
    return len(body) in SIZES and len(set(body)) <= 1


# ---- kill -9


def kill(folder: Path, count: int, seed: int, done: Callable[[int], Any] = lambda _: None) -> list[str]:
    """Kills `count` writers, each at another point: at a line of the store, or after some time. What is wrong then."""
    wrong = []
    chance = random.Random(seed)
    for number in range(count):
        name, size = chance.choice(NAMES), chance.choice(SIZES)
        pause = chance.random() * 4e-3
        child = os.fork()
        if child == 0:
            _die_while_writing(folder, name, number, size, at_line=number // 2 if number % 2 else None)
        if number % 2 == 0:
            time.sleep(pause)
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        wrong += [f"after kill {number}: {text}" for text in damage(folder)]
        done(number + 1)
    return wrong


def _die_while_writing(folder: Path, name: str, seed: int, size: int, at_line: int | None) -> None:
    """Writes until it is killed; with `at_line`, kills itself at that line of the store, counted from the first."""
    left = [10**9 if at_line is None else at_line % 70]

    def watch(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != store_module.__file__:
            return None
        if event == "line":
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return watch

    try:
        opened = Store(folder)
        sys.settrace(watch if at_line is not None else None)
        while True:
            opened.write(GRAPHS, name, body_of(seed, size))
            opened.write(OBJECTS, name, body_of(seed + 1, size))
    finally:
        os._exit(1)


def damage(folder: Path) -> Iterator[str]:
    """What a reader would stumble over."""
    reader = Store(folder)
    for kind in (GRAPHS, OBJECTS):
        for name in NAMES:
            body = reader.read(kind, name)
            if body is not None and not is_whole(body):
                yield f"{kind}/{name} has {len(body)} bytes that are not whole"
    if reader.discarded:
        yield f"{reader.discarded} files were damaged"
    reader.close()


# ---- races


def race(folder: Path, processes: int, rounds: int = 40) -> list[str]:
    """All write, read, count, prune and list the same names at once. What is wrong then."""
    children = []
    for number in range(processes):
        child = os.fork()
        if child == 0:
            os._exit(_race_alone(folder, number, rounds))
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    wrong = [f"process {number} ended with {code}" for number, code in enumerate(codes) if code]
    return wrong + list(damage(folder))


def _race_alone(folder: Path, number: int, rounds: int) -> int:
    chance = random.Random(number)
    opened = Store(folder, limit=3_000_000)
    try:
        for _ in range(rounds):
            kind, name = chance.choice((GRAPHS, OBJECTS)), chance.choice(NAMES)
            if not opened.write(kind, name, body_of(number, chance.choice(SIZES))):
                return 2
            body = opened.read(kind, name)
            if body is not None and not is_whole(body):
                return 3
            opened.note_hit(name)
            list(opened.files())
    except BaseException:
        logging.exception("a process of the race")
        return 4
    return 5 if opened.discarded or opened.trouble else 0


def main() -> int:
    task, folder, *numbers = sys.argv[1:]
    if task == "kill":
        wrong = kill(Path(folder), int(numbers[0]), int(numbers[1]), lambda n: print(n, flush=True))
    else:
        wrong = race(Path(folder), int(numbers[0]))
    for line in wrong:
        print(line, file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
