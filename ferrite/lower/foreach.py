"""Rows of ops on lists of tensors, as optimizers use them: each tensor of a list by the row of the op on one tensor.

Eager's kernels on the CPU do the same, one tensor after the other, so rounding and promotion are those of the single
op. Lists go in step; a number or a tensor beside them takes part in every turn. The fused optimizers (_fused_adam and
its like) stay in eager: one library kernel each, and results that are lists of lists.
"""

from __future__ import annotations

from typing import Any

import torch

from ferrite.errors import Unsupported
from ferrite.lower.table import lowers, row_of
from ferrite.lower.value import Result, Tensor

aten = torch.ops.aten

# Arguments that the single op names or places otherwise: how it is called.


def _with_value(x: Tensor, first: Tensor, second: Tensor, value: Any = 1) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (x, first, second), {"value": value}


def _all_dims(x: Tensor, order: Any = 2, dtype: Any = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (x, order), {"dtype": dtype}


def _enter(op: Any, single: Any, arranged: Any = None) -> None:
    """The row of `op`: the row of `single` on every turn."""

    def row(*lists: Any, result: tuple[Result, ...], **others: Any) -> list[Tensor]:
        made = []
        for turn, expected in enumerate(result):
            args = tuple(part[turn] if isinstance(part, (list, tuple)) else part for part in lists)
            keywords = dict(others)
            if arranged is not None:
                args, keywords = arranged(*args, **others)
            made.append(_on_one(single, args, keywords, expected))
        return made

    row.__name__ = op._schema.name.removeprefix("aten::")
    lowers(op)(row)


def _on_one(single: Any, args: tuple[Any, ...], keywords: dict[str, Any], expected: Result) -> Tensor:
    row = row_of(single)
    if row is None:
        raise Unsupported(f"{single} on lists", why="it has no row on one tensor either")
    if row.wants_result:
        keywords["result"] = expected
    made = row.lower(*args, **keywords)
    if not isinstance(made, Tensor):
        raise Unsupported(f"{single} on lists", why="it needs loops of its own")
    return made


for _name in (
    "abs", "acos", "asin", "atan", "ceil", "clone", "cos", "cosh", "erf", "erfc", "exp", "expm1", "floor", "frac",
    "lgamma", "log", "log10", "log1p", "log2", "max", "neg", "reciprocal", "round", "rsqrt", "sigmoid", "sign", "sin",
    "sinh", "sqrt", "tan", "tanh", "trunc", "zero", "copy",
):  # fmt: skip
    _enter(getattr(aten, f"_foreach_{_name}").default, getattr(aten, _name).default)

for _name in ("add", "sub", "mul", "div"):
    _lists, _numbers = getattr(aten, f"_foreach_{_name}"), getattr(aten, _name)
    _enter(_lists.List, _numbers.Tensor)
    _enter(_lists.Scalar, _numbers.Scalar)
    _enter(_lists.ScalarList, _numbers.Scalar)
    if _name != "sub":
        _enter(_lists.Tensor, _numbers.Tensor)

# The larger of a tensor and a number is the tensor cut off below; maximum is clamp_min by another name.
for _name, _single in (
    ("maximum", aten.clamp_min), ("clamp_min", aten.clamp_min),
    ("minimum", aten.clamp_max), ("clamp_max", aten.clamp_max),
):  # fmt: skip
    _lists = getattr(aten, f"_foreach_{_name}")
    _enter(_lists.List, _single.Tensor)
    _enter(_lists.Scalar, _single.default)
    _enter(_lists.ScalarList, _single.default)

for _overload, _single in (
    ("List", aten.pow.Tensor_Tensor), ("Scalar", aten.pow.Tensor_Scalar), ("ScalarList", aten.pow.Tensor_Scalar),
    ("ScalarAndTensor", aten.pow.Scalar),
):  # fmt: skip
    _enter(getattr(aten._foreach_pow, _overload), _single)

_enter(aten._foreach_lerp.List, aten.lerp.Tensor)
_enter(aten._foreach_lerp.Scalar, aten.lerp.Scalar)
_enter(aten._foreach_lerp.ScalarList, aten.lerp.Scalar)
for _name in ("addcmul", "addcdiv"):
    for _overload in ("Scalar", "ScalarList"):
        _enter(getattr(getattr(aten, f"_foreach_{_name}"), _overload), getattr(aten, _name).default, _with_value)
_enter(aten._foreach_norm.Scalar, aten.linalg_vector_norm.default, _all_dims)
