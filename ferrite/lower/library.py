"""Ops that are calls by design, and why: no loop of ours is meant to replace them.

They are opaque steps of the host program. Everything else that runs in eager is a gap, and counts as one in the share
of lowered nodes.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import lru_cache

# why -> ops, by name without overload; `*` stands for any ending
LIBRARY: dict[str, tuple[str, ...]] = {
    "a library kernel: matrix product": (
        "aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten.addbmm", "aten.mv", "aten.addmv", "aten.dot",
        "aten.vdot", "aten.linear", "aten.matmul", "aten._int_mm", "aten._addmm_activation", "aten._scaled_mm",
        "aten._grouped_mm", "aten._weight_int*",
    ),
    "a library kernel: convolution": ("aten.convolution*", "aten._convolution*", "aten.mkldnn_convolution", "mkldnn.*"),
    "a library kernel: attention": ("aten._scaled_dot_product_*", "aten.scaled_dot_product_attention"),
    "a library kernel: recurrent network": ("aten.mkldnn_rnn_layer*", "aten.lstm*", "aten.gru*", "aten._thnn_fused_*"),
    "a library kernel: Fourier transform": ("aten._fft_*", "aten.fft_*", "aten.stft", "aten.istft"),
    "a library kernel: linear algebra": (
        "aten.linalg_*", "aten._linalg_*", "aten.cholesky*", "aten.triangular_solve", "aten.lu_unpack", "aten.geqrf",
        "aten.ormqr", "aten._cdist_*", "aten._pdist_*", "aten._trilinear", "aten.logdet",
    ),
    "a library kernel: sorting and selection": (
        "aten.sort", "aten.topk", "aten.kthvalue", "aten.median", "aten.nanmedian", "aten.mode", "aten.msort",
        "aten.argsort", "aten.histc", "aten.histogram*", "aten._histogramdd_*", "aten.bincount", "aten.unique*",
        "aten._unique*",
    ),
    "a library kernel: bags of embeddings": ("aten._embedding_bag*",),
    "a library kernel: quantised arithmetic": ("quantized.*", "quantized_decomposed.*", "onednn.*"),
    "a size that depends on data": (
        "aten.nonzero*", "aten.masked_select", "aten.repeat_interleave", "aten._local_scalar_dense", "aten.item",
    ),
    "a draw without a counter form": ("aten.randperm", "aten.multinomial", "aten._standard_gamma", "aten.poisson"),
    "a check on the host": (
        "aten._assert_*", "aten.sym_constrain_*", "torch._check*", "torch.sym_constrain_*",
    ),
}  # fmt: skip

_NORM = "aten.linalg_vector_norm"  # the one op of its prefix that is a plain reduction


@lru_cache(maxsize=4096)
def library_of(op: str) -> str | None:
    """Why an op, by name as in `aten.mm.default`, is a call by design; None if it is not."""
    name = ".".join(op.split(".")[:2])
    if name == _NORM:
        return None
    for why, patterns in LIBRARY.items():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            return why
    return None
