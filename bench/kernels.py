"""How fast are the kernels? Ferrite's native code against eager and Inductor, in turns, in one process.

    python -m bench.kernels                            # all cases (make bench-kernels)
    python -m bench.kernels --cases softmax,adam --rounds 15 --no-inductor

Each case is an op or a few that make one kernel, on tensors of some megabytes. Ratios are medians of those of single
rounds. A case whose answer is not eager's is a failure.

What is timed is the compiled graph, called as Dynamo calls it. Dynamo's own part of a call, guards that look at all
arguments, is the same whoever compiled the graph, is no kernel's, and with megabytes moved between two calls it costs
as much as some of these kernels: what it needs is in no cache then. `--guards` times calls of what `torch.compile`
gives, that part included, and has `dynamo` as a further contender: eager behind guards.

`bandwidth` compares with a copy by eager, in turns with the case, on as many threads and with as large a working set:
a case that touches three tensors of 8 MiB stands beside a copy of 12 MiB to 12 MiB. Both are bytes read and written
over time, for a case those that it cannot do without. So it says how far a case is from doing nothing but move its
data, in whatever cache that lies. Eager copies with plain stores, which read every line that they write: a kernel that
writes past the caches can have more than all of the bandwidth of a copy. Cases that do little more than that run once
more on tensors eight times as large, which no cache holds: there the share is one of the bandwidth of memory, and this
is where it is promised.

C's allocator is told to keep freed memory: otherwise it gives large tensors back to the system at every call or not,
as it happens, and faults on fresh pages cost several times what a kernel does, in all contenders alike.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import partial
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table

from bench.compare import Comparison, interleave
from bench.measure import find_cxx
from bench.show import format_seconds, open_console, stoppable, watcher

ROWS, COLUMNS = 2048, 1024  # 8 MiB of f32
LARGE = 8  # times as many rows
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
KEPT = (1 << 31) - 1  # bytes


@dataclass(frozen=True)
class Case:
    """`make` gives the function and its arguments, by type and number of rows; `moved` is how many times the main
    tensor is read or written, `held` how many of its size there are, if not as many. `is_memory_bound`: no exponentials
    or random numbers, no chain from element to element, and no halves, which take conversions for half the bytes.
    `is_compared`: not where arguments change or numbers are drawn."""

    name: str
    make: Callable[[torch.dtype, int], tuple[FunctionType, tuple[Any, ...]]]
    moved: float
    held: float = 0
    dtype: torch.dtype = torch.float32
    is_memory_bound: bool = False
    is_compared: bool = True
    rows: int = ROWS

    @property
    def traffic(self) -> float:
        """Bytes moved, for each byte of the working set."""
        return self.moved / (self.held or self.moved)

    def large(self) -> Case:
        return replace(self, name=f"{self.name} large", rows=LARGE * self.rows)

    def copied(self) -> torch.Tensor:
        """Half of the working set."""
        _, arguments = self.make(self.dtype, self.rows)
        sizes = [a.nbytes for a in arguments if isinstance(a, torch.Tensor)]
        main = self.rows * COLUMNS * self.dtype.itemsize if self.make is _embedding else max(sizes)
        return torch.ones(int((self.held or self.moved) * main) // 8)


def _x(dtype: torch.dtype, *sizes: int) -> torch.Tensor:
    return torch.randn(*sizes).to(dtype)


def _row(dtype: torch.dtype) -> torch.Tensor:
    return _x(dtype, COLUMNS)


def _softmax(dtype: torch.dtype, rows: int) -> Any:
    return lambda x: F.softmax(x, -1), (_x(dtype, rows, COLUMNS),)


def _log_softmax(dtype: torch.dtype, rows: int) -> Any:
    return lambda x: F.log_softmax(x, -1), (_x(dtype, rows, COLUMNS),)


def _layer_norm(dtype: torch.dtype, rows: int) -> Any:
    return lambda x, w, b: F.layer_norm(x, (COLUMNS,), w, b), (_x(dtype, rows, COLUMNS), _row(dtype), _row(dtype))


def _rms_norm(dtype: torch.dtype, rows: int) -> Any:
    def rms(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    return rms, (_x(dtype, rows, COLUMNS), _row(dtype))


def _gelu(dtype: torch.dtype, rows: int) -> Any:
    return lambda x, b: F.gelu(x + b), (_x(dtype, rows, COLUMNS), _row(dtype))


def _silu_mul(dtype: torch.dtype, rows: int) -> Any:
    return lambda x, y: F.silu(x) * y, (_x(dtype, rows, COLUMNS), _x(dtype, rows, COLUMNS))


def _add_norm(dtype: torch.dtype, rows: int) -> Any:
    def add_norm(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Any:
        total = x + y
        return total, F.layer_norm(total, (COLUMNS,), w, b)

    return add_norm, (_x(dtype, rows, COLUMNS), _x(dtype, rows, COLUMNS), _row(dtype), _row(dtype))


def _dropout_add_norm(dtype: torch.dtype, rows: int) -> Any:
    def dropout_add_norm(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(F.dropout(x, 0.1, training=True) + y, (COLUMNS,), w, b)

    return dropout_add_norm, (_x(dtype, rows, COLUMNS), _x(dtype, rows, COLUMNS), _row(dtype), _row(dtype))


def _cross_entropy(dtype: torch.dtype, rows: int) -> Any:
    return lambda x, n: F.cross_entropy(x, n), (_x(dtype, rows, COLUMNS), torch.randint(0, COLUMNS, (rows,)))


def _cross_entropy_backward(dtype: torch.dtype, rows: int) -> Any:
    """As autograd has it: of the log-softmax that the forward kept, by way of the loss."""
    aten = torch.ops.aten

    def backward(kept: torch.Tensor, n: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        of_loss = aten.nll_loss_backward(kept.new_ones(()), kept, n, None, 1, -100, count)
        return aten._log_softmax_backward_data(of_loss, kept, 1, kept.dtype)

    kept = F.log_softmax(_x(dtype, rows, COLUMNS), -1)
    return backward, (kept, torch.randint(0, COLUMNS, (rows,)), torch.tensor(float(rows)))


def _batch_norm(dtype: torch.dtype, rows: int) -> Any:
    """Goes over its input three times: mean, distances from it, result. What it cannot do without is one read and one
    write all the same, also where no cache holds the tensor: a channel is 1 MiB, and a cache holds that in between. How
    well it does differs from process to process: 73% to 97% of a copy in eight of them. One pass for mean and
    distances, or block by block in the first cache, made no difference that can be told from that."""

    def norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.relu(F.batch_norm(x, None, None, w, b, training=True))

    return norm, (_x(dtype, rows // 64, 64, 32, 32), _x(dtype, 64), _x(dtype, 64))


def _adam(dtype: torch.dtype, rows: int) -> Any:
    def step(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> None:
        m.mul_(0.9).add_(g, alpha=0.1)
        v.mul_(0.999).addcmul_(g, g, value=0.001)
        p.addcdiv_(m, v.sqrt().add_(1e-8), value=-1e-3)

    p, g, m, v = (_x(dtype, rows, COLUMNS) for _ in range(4))
    return step, (p, g, m, v.abs())


def _transposed_add(dtype: torch.dtype, rows: int) -> Any:
    """Memory gives and takes pieces of rows only, 1 KiB of one operand and 128 bytes of the other and of the result."""

    return lambda x, y: x + y.t(), (_x(dtype, rows, 2 * COLUMNS), _x(dtype, 2 * COLUMNS, rows))


def _embedding(dtype: torch.dtype, rows: int) -> Any:
    """Rows of 4 KiB, each in pages of its own of a table four times as large: the processor has to find every page
    first. (Loops in C, one thread, against a copy: rows in their order 150%, in any order 70%, if asked for early 91%,
    if their pages are asked for earlier still 107%; with pages of 2 MiB 113%.)"""

    return lambda n, w: F.embedding(n, w) * 2.0, (torch.randint(0, 4 * rows, (rows,)), _x(dtype, 4 * rows, COLUMNS))


def _sum(dtype: torch.dtype, rows: int) -> Any:
    return lambda x: x.sum(), (_x(dtype, 4 * rows, COLUMNS),)


def _column_sum(dtype: torch.dtype, rows: int) -> Any:
    return lambda x: x.sum(0), (_x(dtype, 4 * rows, COLUMNS),)


def _cumsum(dtype: torch.dtype, rows: int) -> Any:
    return lambda x: x.cumsum(-1), (_x(dtype, rows, COLUMNS),)


def _rotary(dtype: torch.dtype, rows: int) -> Any:
    def rotate(x: torch.Tensor, c: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        turned = torch.cat((-x[..., half:], x[..., :half]), -1)
        return x * c + turned * s

    return rotate, (_x(dtype, rows // 512, 16, 512, 64), _x(dtype, 512, 64), _x(dtype, 512, 64))


CASES = (
    Case("softmax", _softmax, 2),
    Case("softmax bf16", _softmax, 2, dtype=torch.bfloat16),
    Case("log_softmax", _log_softmax, 2),
    Case("layer_norm", _layer_norm, 2, is_memory_bound=True),
    Case("layer_norm bf16", _layer_norm, 2, dtype=torch.bfloat16),
    Case("rms_norm", _rms_norm, 2, is_memory_bound=True),
    Case("rms_norm bf16", _rms_norm, 2, dtype=torch.bfloat16),
    Case("bias_gelu", _gelu, 2),
    Case("bias_gelu bf16", _gelu, 2, dtype=torch.bfloat16),
    Case("silu_mul", _silu_mul, 3),
    Case("add_norm", _add_norm, 4, is_memory_bound=True),
    Case("dropout_add_norm", _dropout_add_norm, 3, is_compared=False),
    Case("cross_entropy", _cross_entropy, 1),
    Case("cross_entropy backward", _cross_entropy_backward, 2),
    Case("batch_norm", _batch_norm, 2, is_memory_bound=True),
    Case("adam", _adam, 7, held=4, is_memory_bound=True, is_compared=False),
    Case("transposed_add", _transposed_add, 3, is_memory_bound=True),
    Case("embedding", _embedding, 2, is_memory_bound=True),
    Case("sum", _sum, 1, is_memory_bound=True),
    Case("column_sum", _column_sum, 1, is_memory_bound=True),
    Case("cumsum", _cumsum, 2),
    Case("rotary", _rotary, 2, is_memory_bound=True),
)


def contenders(case: Case, peers: Sequence[str], *, guards: bool) -> dict[str, Callable[[], object]]:
    """The same call under each backend, on the same tensors; answers are compared with eager's first."""
    function, arguments = case.make(case.dtype, case.rows)
    calls: dict[str, Callable[[], object]] = {}
    expected = function(*arguments) if case.is_compared else None
    for peer in peers:
        if peer == EAGER:
            calls[peer] = partial(function, *arguments)
            continue
        compiled = Compiled(peer, function, case.name)
        answer = compiled.function(*arguments)
        if expected is not None:
            torch.testing.assert_close(answer, expected, rtol=2e-2, atol=1e-2 if case.dtype.itemsize == 2 else 1e-3)
        calls[peer] = partial(compiled.function, *arguments) if guards else compiled.graph_call()
    return calls


class Compiled:
    """A function through a backend, and the call of the compiled graph that one of it comes to."""

    def __init__(self, peer: str, function: FunctionType, case: str) -> None:
        """Dynamo keeps what it compiles with a function's code, and looks through all of it in every call: each
        contender has a code of its own."""
        code = function.__code__.replace(co_name=f"{case} by {peer}")
        own = FunctionType(code, function.__globals__, closure=function.__closure__)
        self._peer = BACKENDS.get(peer, peer)
        self._graphs: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self.function = torch.compile(own, backend=self._compile)

    def _compile(self, graph: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        given = {"options": OPTIONS[self._peer]} if self._peer in OPTIONS else {}
        compiled = torch._dynamo.lookup_backend(self._peer)(graph, examples, **given)

        def noted(*arguments: Any) -> Any:
            if not self._graphs:
                self._graphs.append((compiled, arguments))
            return compiled(*arguments)

        return noted

    def graph_call(self) -> Callable[[], object]:
        ((graph, arguments),) = self._graphs
        return partial(graph, *arguments)


EAGER, DYNAMO, COPY = "eager", "dynamo", "copy"
BACKENDS = {DYNAMO: "eager"}
OPTIONS = {"ferrite": {"executor": "native"}}


def keep_freed_memory() -> None:
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(M_MMAP_THRESHOLD, KEPT)
        library.mallopt(M_TRIM_THRESHOLD, KEPT)


def ratio(comparison: Comparison, case: Case, peer: str) -> float | None:
    """How many times as long the peer takes as Ferrite."""
    found = comparison.row(case.name, peer).ratios.get("steady_call")
    return None if found is None else found.median


def share(comparison: Comparison, case: Case) -> float | None:
    """Of the bandwidth of a copy."""
    copying = ratio(comparison, case, COPY)
    return None if copying is None else case.traffic * copying


def table_of(comparison: Comparison, cases: Sequence[Case], peers: Sequence[str]) -> Table:
    table = Table(title=f"Kernels: {comparison.conditions}, {torch.get_num_threads()} threads", title_justify="left")
    table.add_column("case")
    for peer in peers:
        table.add_column(peer, justify="right")
    for peer in peers[:-1]:
        table.add_column(f"x {peer}", justify="right")
    table.add_column("bandwidth", justify="right")
    for case in cases:
        rows = {peer: comparison.row(case.name, peer) for peer in peers}
        times = {peer: row.metrics["steady_call"].median for peer, row in rows.items() if "steady_call" in row.metrics}
        cells = [format_seconds(times[peer]) if peer in times else rows[peer].trouble or "-" for peer in peers]
        ratios = [ratio(comparison, case, peer) for peer in peers[:-1]]
        cells += ["-" if each is None else f"{each:.2f}" for each in ratios]
        part = share(comparison, case)
        table.add_row(case.name, *cells, "-" if part is None else f"{part:.0%}")
    return table


def summary(comparison: Comparison, cases: Sequence[Case], peers: Sequence[str]) -> list[str]:
    """How many times faster than each peer, over all cases; how near to a copy where memory is the limit."""
    lines = []
    for peer in peers[:-1]:
        ratios = {case.name: each for case in cases if (each := ratio(comparison, case, peer)) is not None}
        if ratios:
            mean, least = statistics.geometric_mean(ratios.values()), min(ratios, key=ratios.__getitem__)
            worst = f"least {ratios[least]:.2f} ({least}; {len(ratios)} cases)"
            lines.append(f"x {peer}: geometric mean {mean:.2f}, {worst}")
    shares = {case.name: part for case in cases if case.rows > ROWS and (part := share(comparison, case)) is not None}
    if shares:
        least = min(shares, key=shares.__getitem__)
        lines.append(f"bandwidth from memory: least {shares[least]:.0%} ({least}; {len(shares)} cases)")
    return lines


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m bench.kernels", description=__doc__)
    parser.add_argument("--cases", default="*", help="names or patterns, separated by commas")
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--threads", type=int, help="default: as many as torch uses")
    parser.add_argument("--no-inductor", action="store_true")
    parser.add_argument("--guards", action="store_true", help="call what torch.compile gives, with Dynamo's guards")
    chosen = parser.parse_args(arguments)
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    torch.manual_seed(0)
    torch._dynamo.config.automatic_dynamic_shapes = False  # a case and its large one are two cases of fixed sizes
    patterns = chosen.cases.split(",")
    every = [*CASES, *(case.large() for case in CASES if case.is_memory_bound)]
    cases = [case for case in every if any(fnmatch(case.name, pattern) for pattern in patterns)]
    peers = [EAGER, *([DYNAMO] if chosen.guards else ()), "inductor", "ferrite"]
    if chosen.no_inductor or find_cxx() is None:
        peers.remove("inductor")
    console = open_console()
    keep_freed_memory()
    calls = {}
    with torch.no_grad():
        for case in cases:
            console.print(f"compiling {case.name}", highlight=False)
            calls[case.name] = contenders(case, peers, guards=chosen.guards) | {COPY: case.copied().clone}
        comparison = interleave("kernels", calls, baseline="ferrite", rounds=chosen.rounds, progress=watcher(console))
    console.print(table_of(comparison, cases, peers))
    for line in summary(comparison, cases, peers):
        console.print(line, highlight=False)
    console.print(f"saved in {comparison.save('kernels').name}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(stoppable(main))
