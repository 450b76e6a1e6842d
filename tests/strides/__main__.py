"""The command `python -m tests.strides`: strides of results and gradients against eager's, in many layouts.

    python -m tests.strides                                     what tracing promises of each aten op, static sizes
    python -m tests.strides --dynamic                           the same, with symbols for sizes
    python -m tests.strides --level calls --ops 'nn.functional.*norm*'    through torch.compile, gradients too
    python -m tests.strides --dtypes f32,bf16,i64,bool --samples 8

Calls are those of PyTorch's op database, their tensors in each layout of `layouts.py`, with each size made 1 in turn.
Each op runs in a process of its own: some of eager's kernels write past the end when they are given such sizes. Ends
with status 1 if there was a difference.
"""

from __future__ import annotations

import argparse
import logging
import os
import pickle
import signal
import sys
import warnings
from fnmatch import fnmatchcase

os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.ops.cases import DTYPES, op_table

from .calls import Found, Plan, judge

SECONDS = 600  # for one op


def in_a_process(name: str, plan: Plan) -> Found | None:
    """What came of an op; None if its process died."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(SECONDS)
        try:
            os.close(reader)
            made = pickle.dumps(judge(name, plan))
            with os.fdopen(writer, "wb") as stream:
                stream.write(made)
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        data = stream.read()
    os.waitpid(child, 0)
    return pickle.loads(data) if data else None


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
            found = in_a_process(name, plan)
            if found is None:
                died.append(name)
                continue
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
