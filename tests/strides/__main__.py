"""The command `python -m tests.strides`: strides of results and gradients against eager's, in many layouts.

    python -m tests.strides                                     what tracing promises of each aten op, static sizes
    python -m tests.strides --dynamic                           the same, with symbols for sizes
    python -m tests.strides --level calls --ops 'nn.functional.*norm*'    through torch.compile, gradients too
    python -m tests.strides --dtypes f32,bf16,i64,bool --samples 8

Calls are those of PyTorch's op database, their tensors in each layout of `layouts.py`, with each size made 1 in turn.
Each op runs in processes of its own: some of eager's kernels write past the end when they are given such sizes. Ends
with status 1 if there was a difference.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import pickle
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from fnmatch import fnmatchcase

os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.ops.cases import DTYPES, op_table

from .calls import Plan, judged
from .ops import Found

SECONDS = 600  # for one op


def in_processes(name: str, plan: Plan) -> tuple[Found, Counter[str]]:
    """What came of an op, and how processes died of its calls; another process goes on behind such a call."""
    found, deaths = Found(), Counter[str]()
    done, ends = 0, time.monotonic() + SECONDS
    while True:
        count, end = _in_a_process(name, plan, done, max(1, int(ends - time.monotonic())), found)
        if not end:
            return found, deaths
        deaths[end] += 1
        if end in ("SIGALRM", "error"):
            return found, deaths
        done += count + 1


def _in_a_process(name: str, plan: Plan, skipped: int, seconds: int, found: Found) -> tuple[int, str]:
    """Adds what comes of an op's calls but the first ones; how many they were, and what ended the process too early."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(seconds)
        try:
            os.close(reader)
            with os.fdopen(writer, "wb") as stream:
                for each in judged(name, plan, skipped):
                    pickle.dump(each, stream)
                    stream.flush()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(writer)
    count = 0
    with os.fdopen(reader, "rb") as stream, contextlib.suppress(EOFError, pickle.UnpicklingError):  # cut short
        while True:
            found.add(pickle.load(stream))
            count += 1
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return count, "" if not status else "error" if status > 0 else signal.Signals(-status).name


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m tests.strides", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--level", choices=("ops", "calls"), default="ops")
    parser.add_argument("--ops", default="*", metavar="PATTERNS", help="of the op database, between commas")
    parser.add_argument("--dynamic", action="store_true")
    parser.add_argument("--dtypes", default="f32", help=f"of {','.join(DTYPES)}")
    parser.add_argument("--samples", type=int, default=3, metavar="N", help="of each op")
    parser.add_argument("--backend", default="ferrite")
    chosen = parser.parse_args(words)
    plan = Plan(chosen.level, chosen.dynamic, tuple(chosen.dtypes.split(",")), chosen.samples, backend=chosen.backend)
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)  # of fake kernels that lack symbols; they are counted
    everything, died = Found(), []
    for name in op_table():
        if any(fnmatchcase(name, pattern) for pattern in chosen.ops.split(",")):
            found, deaths = in_processes(name, plan)
            died += [f"{name} ({count} times {end})" for end, count in deaths.items()]
            everything.add(found)
            for line in dict.fromkeys(line for _, line in found.differences):
                print(line, flush=True)
    for text, count in everything.unknown.most_common():
        print(f"{count} without an answer: {text}")
    if died:
        print(f"died: {', '.join(died)}")
    calls, differences = sum(everything.calls.values()), len(set(everything.differences))
    print(f"{len(everything.calls)} ops, {calls:,} calls, {differences} differences")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
