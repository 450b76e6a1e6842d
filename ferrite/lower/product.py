"""Rows of small matrix products: loops, where a library's call costs more than its work or reads with one thread.

    x @ w        out[m, n] = the sum of x[m, k] * w[k, n] over k

All other products are calls by design (`library.py`), and so are those of training graphs: kernels that make many
gradients at once keep them all alive (a small OLMoE needed 1.18 times the memory of eager). Operands are in memory
before the loops run, since each element is read once for every row or column of the other. Time by that of the
library's call, of `addmm` and `relu` in one graph, medians of 15 interleaved rounds, AMD with AVX2, f32 unless said
otherwise, weights (n, k) and (k, n), one and two threads (`python -m bench.products`):

    at most 65 536 multiplications     0.56 - 0.80
    up to 3 rows of 768 x 768          0.52 - 0.77     four rows 0.66 - 0.98, six 0.93 - 1.07, eight 0.91 - 1.38
    one row of 2048 x 2048             0.55 - 1.15     one thread on weights (n, k) is the 1.15
    one or two columns                 0.34 - 0.73     four columns 0.62 - 1.24
    an inner size of one               0.28 - 0.43     four 0.46 - 3.47
    up to 8 rows, bf16 and f16         0.49 - 0.64
"""

from __future__ import annotations

from typing import Any

import torch

from ferrite.loops.nodes import Expr
from ferrite.lower.table import rereads
from ferrite.lower.value import Result, Tensor, accumulator, apply, cast, const, expand, pointwise, reduction, view

aten = torch.ops.aten

SMALL = 1 << 16  # multiplications
ROWS, ROWS_OF_HALVES = 3, 8
COLUMNS = 2


def choose(*operands: torch.Tensor) -> tuple[bool, str]:
    """Whether a product becomes loops, and why; the last two are its factors, with the same number of dimensions."""
    left, right = operands[-2:]
    sizes = (*left.shape, right.shape[-1])
    shape = " x ".join(map(str, sizes))
    if left.dtype not in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        return False, f"{left.dtype} is left to the library"
    if any(each.dtype != left.dtype for each in operands):
        return False, "of several dtypes: the library raises"  # tracing does not
    if not all(isinstance(size, int) for size in sizes):
        return False, f"{shape}: sizes that change"
    *batch, rows, inner, columns = sizes
    multiplications = rows * inner * columns
    for size in batch:
        multiplications *= size
    if multiplications <= SMALL:
        return True, f"{shape}: the library's call would cost more than its work"
    if rows <= (ROWS_OF_HALVES if left.dtype.itemsize == 2 else ROWS):
        return True, f"{shape}: few rows"
    if columns <= COLUMNS:
        return True, f"{shape}: few columns"
    if inner == 1:
        return True, f"{shape}: an outer product"
    return False, f"{shape}: a library is faster"


@rereads(aten.mm.default, aten.bmm.default)
def product(x: Tensor, w: Tensor, *, result: Result) -> Tensor:
    made = _sum_of_products(x, w, result)
    return Tensor(made.axes, cast(made.body, result.dtype))


@rereads(aten.addmm.default, aten.baddbmm.default)
def product_and_sum(added: Tensor, x: Tensor, w: Tensor, *, beta: Any = 1, alpha: Any = 1, result: Result) -> Tensor:
    """beta * added + alpha * (x @ w), rounded once. With a beta of 0 `added` is not read, whatever is in it."""
    made = _sum_of_products(x, w, result)
    wide = made.dtype

    def scaled(value: Expr, factor: Any) -> Expr:
        return value if factor == 1 else apply("mul", value, const(factor, wide))

    if beta == 0:
        return Tensor(made.axes, cast(scaled(made.body, alpha), result.dtype))
    return pointwise(
        lambda total, more: apply("add", scaled(total, alpha), scaled(more, beta)),
        made, expand(added, result.sizes), compute=wide, result=result.dtype,
    )  # fmt: skip


def _sum_of_products(x: Tensor, w: Tensor, result: Result) -> Tensor:
    """In the dtype in which sums run."""
    *batch, rows, inner = x.sizes
    box = [*batch, rows, w.sizes[-1], inner]
    left = view(x, box, lambda *here: [*here[:-2], here[-1]])
    right = view(w, box, lambda *here: [*here[:-3], here[-1], here[-2]])
    terms = pointwise(lambda a, b: apply("mul", a, b), left, right, compute=accumulator(result.dtype))
    return reduction("sum", terms, [len(box) - 1], keep=False, result="value")
