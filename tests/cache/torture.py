"""`make torture`: everything that can happen to the cache, in full. Exit status 1 if something of it does harm.

    python -m tests.cache.torture [--seed N] [--only NAME ...]

One process at a time but for the races; a few minutes. `make test` does a part of each.
"""

from __future__ import annotations

import argparse
import errno
import json
import logging
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["FERRITE_CACHE"] = "off"

import torch
import torch._dynamo
from rich.console import Console

from bench.show import watcher
from ferrite import cache, caching
from ferrite.artifact.store import HEADER
from ferrite.options import Options
from tests.behaviour.child import ROOT
from tests.cache.mutate import mutations
from tests.cache.victim import Victim, cuts, fill, flip, misfits, oddities, signed, truncate, watched

FLIPS, KILLS, FORGED = 2000, 1000, 2000
COMPILE_EACH = 50  # of so many damaged files, one is also compiled and called
FAULTS = (errno.ENOSPC, errno.EROFS, errno.EIO, errno.EACCES, errno.EDQUOT)

# What is wrong after each step; empty texts for steps that did no harm.
Steps = Iterator[str]


def damaged(victim: Victim, ways: list[tuple[str, Path, Callable[[Path], Any]]]) -> Steps:
    for number, (name, path, damage) in enumerate(ways):
        trouble = victim.survives(path, damage, compiles=number % COMPILE_EACH == 0)
        caching._opened.cache_clear()
        yield f"{path.parent.name}, {name}: {trouble}" if trouble else ""


def truncation(victim: Victim, _: int) -> Steps:
    """Every 64th and every edge of a record, of the entry; every 64th of its machine code."""
    lengths = [(victim.entry, length) for length in cuts(victim.files[victim.entry], every_edge=True)]
    lengths += [(victim.object, length) for length in cuts(victim.files[victim.object], every_edge=False)]
    return damaged(victim, [(f"cut to {length}", path, truncate(length)) for path, length in lengths])


def header_bits(victim: Victim, _: int) -> Steps:
    places = [(path, bit) for path in (victim.entry, victim.object) for bit in range(8 * HEADER)]
    return damaged(victim, [(f"bit {bit}", path, flip(bit)) for path, bit in places])


def body_bits(victim: Victim, seed: int) -> Steps:
    chance = random.Random(seed)
    ways = []
    for _ in range(FLIPS):
        path = chance.choice((victim.entry, victim.object))
        bit = chance.randrange(8 * HEADER, 8 * len(victim.files[path]))
        ways.append((f"bit {bit}", path, flip(bit)))
    return damaged(victim, ways)


def odd_files(victim: Victim, _: int) -> Steps:
    for path in (victim.entry, victim.object):
        for name, damage in oddities(victim).items():
            yield from damaged(victim, [(name, path, damage)])  # each is compiled
    for name, damage in misfits(victim).items():
        yield from damaged(victim, [(name, victim.entry, damage)])


def faults(victim: Victim, _: int) -> Steps:
    """Every function of the system that writing uses fails in every way: one warning, and the right answer."""
    for function in ("open", "mkdir", "fdopen", "fsync", "rename"):
        for code in FAULTS:
            with tempfile.TemporaryDirectory() as folder, mock.patch.object(os, function, _failing(function, code)):
                victim.options["cache_dir"] = os.path.join(folder, "cache")
                try:
                    with watched() as said:
                        right = all(victim.is_right(victim.run()) for _ in range(2))
                finally:
                    victim.options["cache_dir"] = str(victim.folder)
            caching._opened.cache_clear()
            where = f"{function} with {errno.errorcode[code]}"
            yield "" if right and len(said) == 1 else f"{where}: right {right}, warnings {said}"


def _failing(function: str, code: int) -> Callable[..., Any]:
    real = getattr(os, function)

    def fail(*args: Any, **kwargs: Any) -> Any:
        by_descriptor = {"dir_fd", "src_dir_fd"} & {name for name, value in kwargs.items() if value is not None}
        of_the_cache = by_descriptor or "cache" in str(args[0]) or function in ("fdopen", "fsync")
        if not of_the_cache or (function == "open" and not args[1] & os.O_CREAT):
            return real(*args, **kwargs)
        if function == "fdopen":
            os.close(args[0])
        raise OSError(code, os.strerror(code))

    return fail


def kills(_: Victim, seed: int) -> Steps:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.cache.writer", "kill", folder + "/cache", str(KILLS), str(seed)]
        child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert child.stdout is not None
        for _ in child.stdout:
            yield ""
        _, errors = child.communicate()
        yield f"status {child.returncode}: {errors}" if child.returncode else ""
        verdict = cache.verify(folder + "/cache")
        yield "" if all("no entry" in why or "name" in why for why in verdict.damaged.values()) else str(verdict)


def races(_: Victim, __: int) -> Steps:
    for _ in range(10):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "tests.cache.writer", "race", folder + "/cache", "16"]
            ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            yield f"status {ran.returncode}: {ran.stderr}" if ran.returncode else ""


def compiling_races(_: Victim, __: int) -> Steps:
    """Sixteen real compiles of one graph, at once; they share two cores or what there is."""
    from tests.cache.test_processes import COMPILE

    with tempfile.TemporaryDirectory() as folder:
        variables = {name: text for name, text in os.environ.items() if not name.startswith(("FERRITE_", "TORCH"))}
        variables |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        variables |= {"FERRITE_CACHE": "on", "FERRITE_CACHE_DIR": folder + "/cache"}
        command = [sys.executable, "-c", COMPILE]
        children = [
            subprocess.Popen(
                command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            for _ in range(16)
        ]
        told = [child.communicate() for child in children]
        values = set()
        for child, (output, errors) in zip(children, told, strict=True):
            if child.returncode or errors:
                yield f"status {child.returncode}: {errors[-500:]}"
                continue
            values.add(json.dumps(json.loads(output.splitlines()[-1])["values"]))
            yield ""
        verdict = cache.verify(folder + "/cache")
        sound = len(values) == 1 and verdict.is_sound and not verdict.unused
        yield "" if sound else f"{len(values)} different answers, {verdict}"


def forged(victim: Victim, seed: int) -> Steps:
    """Entries with one changed value that fit their digest: loaded and linked, not called, as a number in them cannot
    be told from another one. Whatever they are, loading raises or gives a function, and never ends the process."""
    logging.getLogger("ferrite").setLevel(logging.ERROR)
    body, loaded = victim.files[victim.entry][HEADER:], 0
    for what, mutated in mutations(body, count=FORGED, seed=seed):
        victim.restore()
        fill(signed(victim.entry, mutated))(victim.entry)
        try:
            found = victim.look_up()
        except Exception as error:
            yield f"{what}: {type(error).__name__}: {error}"
            continue
        if found.entry is not None:
            try:
                caching.wrapped(found.entry, Options(), found.lines)
                loaded += 1
            except Exception as error:
                found.fail(f"{error}")
        yield ""
    yield "" if 0 < loaded < FORGED else f"{loaded} of {FORGED} were loaded: is this still a test?"
    logging.getLogger("ferrite").setLevel(logging.NOTSET)
    victim.restore()
    caching._opened.cache_clear()
    yield "" if victim.is_right(victim.run()) else "a wrong answer afterwards"


TORTURES: dict[str, Callable[[Victim, int], Steps]] = {
    "truncation": truncation, "header bits": header_bits, "body bits": body_bits, "odd files": odd_files,
    "faults": faults, "kill -9": kills, "races": races, "racing compiles": compiling_races, "forged": forged,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description="Everything that can happen to the cache.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=TORTURES, default=list(TORTURES))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    console = Console() if sys.stdout.isatty() else Console(width=100)
    logging.getLogger("ferrite").addHandler(logging.NullHandler())
    logging.lastResort = None
    harm = 0
    with watcher(console)("torture", len(asked.only)) as watch:
        for name in asked.only:
            begin, count, troubles = time.monotonic(), 0, []
            with tempfile.TemporaryDirectory() as folder:
                caching._opened.cache_clear()
                victim = Victim(Path(folder) / "cache")
                for trouble in TORTURES[name](victim, asked.seed):
                    count += 1
                    watch.phase(f"{name}, step {count}")
                    if trouble:
                        troubles.append(trouble)
            watch.advance(1)
            state = f"{len(troubles)} did harm" if troubles else "no harm"
            console.print(f"{name:16} {count:5} steps, {state}, {time.monotonic() - begin:.0f} s", highlight=False)
            for trouble in troubles[:10]:
                console.print(f"    {trouble}", markup=False, highlight=False, soft_wrap=True)
            harm += len(troubles)
    console.print("The cache survived." if not harm else f"{harm} steps did harm.")
    return int(harm > 0)


if __name__ == "__main__":
    sys.exit(main())
