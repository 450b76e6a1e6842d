"""How fast are the kernels? Ferrite's native code against eager and Inductor, in turns, in one process.

    python -m bench.kernels                            # all cases (make bench-kernels)
    python -m bench.kernels --cases softmax,adam --rounds 15 --no-inductor

Each case is an op or a few that make one kernel, on tensors of some megabytes. `bandwidth` is what the case must read
and write at least, over its time, as a share of what cloning a tensor of the size of its largest one reaches in the
same run. A case whose answer is not eager's is a failure.

C's allocator is told to keep freed memory: otherwise it gives large tensors back to the system at every call or not,
as it happens, and faults on fresh pages cost several times what a kernel does, in all contenders alike.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table

from bench.compare import Comparison, interleave
from bench.measure import find_cxx
from bench.show import format_seconds, open_console, stoppable, watcher

ROWS, COLUMNS = 2048, 1024  # 8 MiB of f32
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
KEPT = 1 << 30  # bytes


@dataclass(frozen=True)
class Case:
    """`make` gives the function and its arguments; `moved` is how many times the main tensor is read or written.
    `is_compared`: not where arguments change or numbers are drawn."""

    name: str
    make: Callable[[torch.dtype], tuple[Callable[..., Any], tuple[Any, ...]]]
    moved: float
    dtype: torch.dtype = torch.float32
    is_compared: bool = True


def _x(dtype: torch.dtype, *sizes: int) -> torch.Tensor:
    return torch.randn(*(sizes or (ROWS, COLUMNS))).to(dtype)


def _softmax(dtype: torch.dtype) -> Any:
    return lambda x: F.softmax(x, -1), (_x(dtype),)


def _log_softmax(dtype: torch.dtype) -> Any:
    return lambda x: F.log_softmax(x, -1), (_x(dtype),)


def _layer_norm(dtype: torch.dtype) -> Any:
    return lambda x, w, b: F.layer_norm(x, (COLUMNS,), w, b), (_x(dtype), _x(dtype, COLUMNS), _x(dtype, COLUMNS))


def _rms_norm(dtype: torch.dtype) -> Any:
    def rms(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    return rms, (_x(dtype), _x(dtype, COLUMNS))


def _gelu(dtype: torch.dtype) -> Any:
    return lambda x, b: F.gelu(x + b), (_x(dtype), _x(dtype, COLUMNS))


def _silu_mul(dtype: torch.dtype) -> Any:
    return lambda x, y: F.silu(x) * y, (_x(dtype), _x(dtype))


def _add_norm(dtype: torch.dtype) -> Any:
    def add_norm(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Any:
        total = x + y
        return total, F.layer_norm(total, (COLUMNS,), w, b)

    return add_norm, (_x(dtype), _x(dtype), _x(dtype, COLUMNS), _x(dtype, COLUMNS))


def _dropout_add_norm(dtype: torch.dtype) -> Any:
    def dropout_add_norm(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(F.dropout(x, 0.1, training=True) + y, (COLUMNS,), w, b)

    return dropout_add_norm, (_x(dtype), _x(dtype), _x(dtype, COLUMNS), _x(dtype, COLUMNS))


def _cross_entropy(dtype: torch.dtype) -> Any:
    return lambda x, n: F.cross_entropy(x, n), (_x(dtype), torch.randint(0, COLUMNS, (ROWS,)))


def _cross_entropy_backward(dtype: torch.dtype) -> Any:
    """As autograd has it: of the log-softmax that the forward kept, by way of the loss."""
    aten = torch.ops.aten

    def backward(kept: torch.Tensor, n: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        of_loss = aten.nll_loss_backward(kept.new_ones(()), kept, n, None, 1, -100, count)
        return aten._log_softmax_backward_data(of_loss, kept, 1, kept.dtype)

    return backward, (F.log_softmax(_x(dtype), -1), torch.randint(0, COLUMNS, (ROWS,)), torch.tensor(float(ROWS)))


def _batch_norm(dtype: torch.dtype) -> Any:
    def norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.relu(F.batch_norm(x, None, None, w, b, training=True))

    return norm, (_x(dtype, 32, 64, 32, 32), _x(dtype, 64), _x(dtype, 64))


def _adam(dtype: torch.dtype) -> Any:
    def step(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> None:
        m.mul_(0.9).add_(g, alpha=0.1)
        v.mul_(0.999).addcmul_(g, g, value=0.001)
        p.addcdiv_(m, v.sqrt().add_(1e-8), value=-1e-3)

    return step, (_x(dtype), _x(dtype), _x(dtype), _x(dtype).abs())


def _transposed_add(dtype: torch.dtype) -> Any:
    return lambda x, y: x + y.t(), (_x(dtype, ROWS, ROWS), _x(dtype, ROWS, ROWS))


def _embedding(dtype: torch.dtype) -> Any:
    return lambda n, w: F.embedding(n, w) * 2.0, (torch.randint(0, 8192, (ROWS,)), _x(dtype, 8192, COLUMNS))


def _sum(dtype: torch.dtype) -> Any:
    return lambda x: x.sum(), (_x(dtype, 4 * ROWS, COLUMNS),)


def _column_sum(dtype: torch.dtype) -> Any:
    return lambda x: x.sum(0), (_x(dtype, 4 * ROWS, COLUMNS),)


def _cumsum(dtype: torch.dtype) -> Any:
    return lambda x: x.cumsum(-1), (_x(dtype),)


def _rotary(dtype: torch.dtype) -> Any:
    def rotate(x: torch.Tensor, c: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        turned = torch.cat((-x[..., half:], x[..., :half]), -1)
        return x * c + turned * s

    return rotate, (_x(dtype, 4, 16, 512, 64), _x(dtype, 512, 64), _x(dtype, 512, 64))


CASES = (
    Case("softmax", _softmax, 2),
    Case("softmax bf16", _softmax, 2, torch.bfloat16),
    Case("log_softmax", _log_softmax, 2),
    Case("layer_norm", _layer_norm, 2),
    Case("layer_norm bf16", _layer_norm, 2, torch.bfloat16),
    Case("rms_norm", _rms_norm, 2),
    Case("rms_norm bf16", _rms_norm, 2, torch.bfloat16),
    Case("bias_gelu", _gelu, 2),
    Case("bias_gelu bf16", _gelu, 2, torch.bfloat16),
    Case("silu_mul", _silu_mul, 3),
    Case("add_norm", _add_norm, 4),
    Case("dropout_add_norm", _dropout_add_norm, 3, is_compared=False),
    Case("cross_entropy", _cross_entropy, 1),
    Case("cross_entropy backward", _cross_entropy_backward, 2),
    Case("batch_norm", _batch_norm, 2),
    Case("adam", _adam, 7, is_compared=False),
    Case("transposed_add", _transposed_add, 3),
    Case("embedding", _embedding, 2),
    Case("sum", _sum, 1),
    Case("column_sum", _column_sum, 1),
    Case("cumsum", _cumsum, 2),
    Case("rotary", _rotary, 2),
)


def contenders(case: Case, peers: Sequence[str]) -> dict[str, Callable[[], object]]:
    """The same call under each backend, on the same tensors; answers are compared with eager's first."""
    function, arguments = case.make(case.dtype)
    calls: dict[str, Callable[[], object]] = {}
    expected = function(*arguments) if case.is_compared else None
    for peer in peers:
        torch._dynamo.reset()
        compiled = function if peer == "eager" else torch.compile(function, backend=peer, options=OPTIONS.get(peer))
        answer = compiled(*arguments)
        if expected is not None:
            torch.testing.assert_close(answer, expected, rtol=2e-2, atol=1e-2 if case.dtype.itemsize == 2 else 1e-3)
        calls[peer] = lambda compiled=compiled: compiled(*arguments)
    return calls


OPTIONS = {"ferrite": {"executor": "native"}}


def main_tensor(case: Case) -> int:
    """Bytes of the largest argument."""
    _, arguments = case.make(case.dtype)
    sizes = [a.nbytes for a in arguments if isinstance(a, torch.Tensor)]
    return ROWS * COLUMNS * case.dtype.itemsize if case.name.startswith("embedding") else max(sizes)


def copy_of(size: int) -> str:
    return f"copy of {size >> 10} KiB"


def keep_freed_memory() -> None:
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(M_MMAP_THRESHOLD, KEPT)
        library.mallopt(M_TRIM_THRESHOLD, KEPT)


def table_of(comparison: Comparison, cases: Sequence[Case], peers: Sequence[str]) -> Table:
    table = Table(title=f"Kernels: {comparison.conditions}", title_justify="left")
    table.add_column("case")
    for peer in peers:
        table.add_column(peer, justify="right")
    for peer in peers[:-1]:
        table.add_column(f"x {peer}", justify="right")
    table.add_column("bandwidth", justify="right")
    for case in cases:
        size = main_tensor(case)
        speed = 2 * size / comparison.row(copy_of(size), "eager").metrics["steady_call"].median
        rows = {peer: comparison.row(case.name, peer) for peer in peers}
        times = {peer: row.metrics["steady_call"].median for peer, row in rows.items() if "steady_call" in row.metrics}
        cells = [format_seconds(times[peer]) if peer in times else rows[peer].trouble for peer in peers]
        ours = times.get("ferrite")
        cells += [f"{times[peer] / ours:.2f}" if ours and peer in times else "-" for peer in peers[:-1]]
        share = case.moved * size / ours / speed if ours else math.nan
        table.add_row(case.name, *cells, f"{share:.0%}")
    return table


def summary(comparison: Comparison, cases: Sequence[Case], peers: Sequence[str]) -> list[str]:
    """How many times faster than each peer, over all cases."""
    lines = []
    for peer in peers[:-1]:
        ratios = []
        for case in cases:
            ours, theirs = comparison.row(case.name, "ferrite").metrics, comparison.row(case.name, peer).metrics
            if "steady_call" in ours and "steady_call" in theirs:
                ratios.append(theirs["steady_call"].median / ours["steady_call"].median)
        if ratios:
            mean = statistics.geometric_mean(ratios)
            lines.append(f"x {peer}: geometric mean {mean:.2f}, least {min(ratios):.2f} ({len(ratios)} cases)")
    return lines


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m bench.kernels", description=__doc__)
    parser.add_argument("--cases", default="*", help="names or patterns, separated by commas")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--threads", type=int, help="default: as many as torch uses")
    parser.add_argument("--no-inductor", action="store_true")
    chosen = parser.parse_args(arguments)
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    torch.manual_seed(0)
    patterns = chosen.cases.split(",")
    cases = [case for case in CASES if any(fnmatch(case.name, pattern) for pattern in patterns)]
    peers = ["eager", "inductor", "ferrite"]
    if chosen.no_inductor or find_cxx() is None:
        peers.remove("inductor")
    console = open_console()
    keep_freed_memory()
    calls = {copy_of(size): {"eager": torch.zeros(size // 4).clone} for size in sorted(set(map(main_tensor, cases)))}
    with torch.no_grad():
        for case in cases:
            console.print(f"compiling {case.name}", highlight=False)
            calls[case.name] = contenders(case, peers)
        comparison = interleave("kernels", calls, baseline="eager", rounds=chosen.rounds, progress=watcher(console))
    console.print(table_of(comparison, cases, peers))
    for line in summary(comparison, cases, peers):
        console.print(line, highlight=False)
    console.print(f"saved in {comparison.save('kernels').name}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(stoppable(main))
