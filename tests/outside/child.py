"""One module of PyTorch's tests in a process of its own: `python -m tests.outside.child`.

The module is loaded once; a worker that is forked from that process runs one test after the other. A worker that dies
or takes too long is named with the test that it was at, and replaced. `--alone` forks a worker for each test.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import io
import logging
import multiprocessing
import os
import re
import sys
import time
import traceback
import unittest
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from .results import Result, read
from .swap import Seen, Table, counts_graphs, load, tests_of

_MOST_TEXT = 3000
_MOST_WARNINGS = 5
PATIENCE = 20  # times what a test may work: how long it may take, as the machine may be busy, or the test asleep


class Warnings(logging.Handler):
    """What Ferrite warns of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if len(self.texts) < _MOST_WARNINGS:
            self.texts.append(record.getMessage()[:600])


def run_test(name: str, kind: type[unittest.TestCase], method: str, seen: Seen, warnings: Warnings) -> Result:
    import torch

    seen.forget()
    warnings.texts = []
    told, began = unittest.TestResult(), time.monotonic()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            torch._dynamo.reset()
            unittest.TestSuite([kind(method)]).run(told)
            status, message = _judge(told)
        except BaseException as error:  # SystemExit too: a test is not the end of the run
            status, message = "fail", "".join(traceback.format_exception(error))
    return Result(
        name, status, round(time.monotonic() - began, 2), seen.graphs, seen.counts, seen.reads_code,
        message[-_MOST_TEXT:], tuple(warnings.texts),
    )  # fmt: skip


def _judge(told: unittest.TestResult) -> tuple[str, str]:
    bad = told.failures + told.errors
    if bad:
        return "fail", re.split(r"\n\s*To execute this test, run the following", bad[0][1])[0].rstrip()
    if told.skipped:
        return "skip", told.skipped[0][1]
    return ("xfail" if told.expectedFailures or told.unexpectedSuccesses else "pass"), ""


def work(pipe: Connection, table: Table, seen: Seen, log: Path) -> None:
    """A worker's life: take names, send results, until the pipe says None."""
    trouble = open(log, "w")  # noqa: SIM115 - lives as long as the process
    faulthandler.enable(trouble)
    warnings = Warnings()
    logging.getLogger("ferrite").addHandler(warnings)
    sys.stdin = open(os.devnull)  # noqa: SIM115
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    while (name := pipe.recv()) is not None:
        trouble.seek(0)
        trouble.truncate()
        pipe.send(run_test(name, *table[name], seen, warnings))
    os._exit(0)


class Worker:
    """The process that runs tests now."""

    def __init__(self, *about: Any) -> None:
        self.about = about
        self.log: Path = about[-1]
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, *about))
        self.process.start()
        theirs.close()

    def run(self, name: str, limit: float) -> tuple[Result, Worker]:
        """Its result, and who runs the next test."""
        self.pipe.send(name)
        began, worked = time.monotonic(), self._worked()
        try:
            while not self.pipe.poll(1.0):
                waited, used = time.monotonic() - began, self._worked() - worked
                if used > limit or waited > PATIENCE * limit:
                    self.end()
                    message = f"no result after {waited:.0f} seconds, {used:.0f} of work"
                    return Result(name, "hang", round(waited, 2), graphs=1, message=message), self.again()
            return self.pipe.recv(), self
        except (EOFError, ConnectionResetError):
            self.process.join()
            said = f"{self.log.read_text()[:_MOST_TEXT]}\nexit code {self.process.exitcode}"
            return Result(name, "crash", graphs=1, message=said), self.again()

    def _worked(self) -> float:
        """Seconds of processor time of the process so far; all that it needed if it is gone."""
        try:
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        except FileNotFoundError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()

    def again(self) -> Worker:
        return Worker(*self.about)


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.outside.child", description=__doc__)
    parser.add_argument("root", type=Path)
    parser.add_argument("module")
    parser.add_argument("backend")
    parser.add_argument("out", type=Path, help="gets a line for each test that it has none for")
    parser.add_argument("--only", type=Path, metavar="FILE", help="names of tests, one a line")
    parser.add_argument("--seconds", type=float, default=60.0, help="that a test may work")
    parser.add_argument("--alone", action="store_true", help="each test in a process of its own")
    given = parser.parse_args()
    sys.argv = ["test"]  # which the tests' own main would read

    seen = Seen()
    table = tests_of(load(given.root, given.module, given.backend, seen))
    wanted = set(given.only.read_text().split()) if given.only else set(table)
    wanted -= read(given.out).keys()
    log = given.out.with_suffix(".trouble")
    with open(given.out, "ab") as out:

        def tell(result: Result) -> None:
            out.write(msgspec.json.encode(result) + b"\n")
            out.flush()

        worker = Worker(table, seen, log)
        for name, (kind, method) in table.items():
            if name not in wanted:
                continue
            if counts_graphs(kind, method):
                tell(Result(name, "apart", counts=True))
                continue
            result, following = worker.run(name, given.seconds)
            tell(result)
            if given.alone and following is worker:
                worker.end()
                following = worker.again()
            worker = following
        worker.end()
    log.unlink(missing_ok=True)
    os._exit(0)  # threads and processes that the tests left behind do not keep it alive


if __name__ == "__main__":
    main()
