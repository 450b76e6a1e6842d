"""Kernels as functions on tensors: what a host program calls when it launches one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import torch

from ferrite.loops import oracle
from ferrite.loops.nodes import Program


def oracle_kernel(program: Program) -> Callable[..., None]:
    """A kernel that NumPy runs, plainly and slowly: the reference for every other way to run it."""
    names = [parameter.buffer.name for parameter in program.parameters]
    size_names = [size.name for size in program.sizes]

    def run(*arguments: Any) -> None:
        tensors, sizes = arguments[: len(names)], arguments[len(names) :]
        arrays = {name: as_array(tensor) for name, tensor in zip(names, tensors, strict=True)}
        oracle.run(program, dict(zip(size_names, map(int, sizes), strict=True)), arrays)

    return run


def as_array(tensor: torch.Tensor) -> numpy.ndarray[Any, Any]:
    """The memory of a tensor as an array; bf16, which NumPy does not know, as its bits."""
    plain = tensor.detach()
    if plain.dtype == torch.bfloat16:
        return plain.view(torch.int16).numpy().view(numpy.uint16)
    return plain.numpy()
