"""Small matrix products as loops beside the library's call: the figures behind `ferrite/lower/product.py`.

    python -m bench.products                     # one thread
    python -m bench.products --threads 2 --dtype bfloat16

Both are Ferrite, the same graph of `addmm` and `relu`; one is forced to loops whatever its size, one to the library.
They are called in turns in one process, and the ratio is time by that of the library.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from bench.compare import interleave
from bench.show import Column, open_console, show, stoppable, watcher
from ferrite.lower import graph

# rows, inner size, columns
SHAPES = (
    (1, 16, 32), (32, 32, 32), (32, 32, 4), (4, 64, 64), (16, 64, 64), (128, 32, 16), (64, 64, 64),
    (1, 768, 768), (1, 768, 3072), (1, 2048, 2048), (2, 768, 768), (3, 768, 768), (4, 768, 768), (6, 768, 768),
    (8, 768, 768), (8, 256, 256), (768, 768, 1), (768, 768, 2), (768, 768, 4), (768, 1, 768), (768, 4, 768),
)  # fmt: skip
COLUMNS = (Column("call", "steady_call"), Column("ratio to library", "steady_call", ratio=True))


def contenders(shape: tuple[int, int, int], dtype: torch.dtype, turned: bool) -> dict[str, Callable[[], object]]:
    rows, inner, columns = shape
    x, bias = torch.randn(rows, inner, dtype=dtype), torch.randn(columns, dtype=dtype)
    w = torch.randn(columns, inner, dtype=dtype).t() if turned else torch.randn(inner, columns, dtype=dtype)
    calls: dict[str, Callable[[], object]] = {}
    for name in ("library", "loops"):

        def layer(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            return torch.addmm(bias, x, w).relu()

        layer.__code__ = layer.__code__.replace(co_name=name)  # Dynamo keeps what it made by code, not by function
        options: dict[str, Any] = {"cache": "off", "strict": True, "products": name}
        compiled = torch.compile(layer, backend="ferrite", dynamic=False, options=options)
        with mock.patch.object(graph, "choose", return_value=(True, "to measure it")):
            compiled(x, w, bias)
        calls[name] = lambda compiled=compiled: compiled(x, w, bias)  # type: ignore[misc]
    return calls


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m bench.products", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="float32", choices=("float32", "float64", "bfloat16", "float16"))
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    console = open_console()
    calls = {}
    with torch.no_grad():
        for shape in SHAPES:
            for turned in (True, False):
                words = " x ".join(map(str, shape)) + (", weights (n, k)" if turned else ", weights (k, n)")
                calls[words] = contenders(shape, getattr(torch, chosen.dtype), turned)
        title = f"Products, {chosen.dtype}, {chosen.threads} threads"
        comparison = interleave(title, calls, baseline="library", rounds=chosen.rounds, progress=watcher(console))
    show(console, comparison, COLUMNS, who="product")
    console.print(f"saved in {comparison.save('products').name}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(stoppable(main))
