"""When this process began, by the clock that files are dated with."""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path

TICK = 1 / os.sysconf("SC_CLK_TCK")  # the system tells when a process began in whole ticks, rounded down

# Fields of /proc/<process>/stat, counted from the one behind the name.
_PARENT, _BEGAN, _START_OF_CODE, _START_OF_STACK = 1, 19, 23, 25


def start_of_process() -> float:
    """0 where the system does not tell."""
    return _date(_facts_of("self"))


@functools.cache
def start_of_interpreter() -> float:
    """When its first process began, if this one is a fork: a module may have been loaded before that. 0 where the
    system does not tell."""
    facts = _facts_of("self")
    while facts and _is_fork(parent := _facts_of(facts[_PARENT]), facts):
        facts = parent
    return _date(facts)


def _is_fork(parent: list[str], child: list[str]) -> bool:
    """Whether both have the same image: a program that is started anew gets other addresses."""
    places = (_START_OF_CODE, _START_OF_STACK)
    return bool(parent) and all(parent[place] == child[place] and int(child[place]) > 1 for place in places)


def _facts_of(process: str) -> list[str]:
    try:
        found = Path("/proc", process, "stat").read_bytes().rpartition(b")")[2].decode().split()
    except OSError:
        return []
    return found if len(found) > _START_OF_STACK else []


def _date(facts: list[str]) -> float:
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + int(facts[_BEGAN]) * TICK if facts else 0.0
