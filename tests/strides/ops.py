"""What tracing promises of each aten op, against what the op gives: strides, op by op, without compiling anything.

An op's call is run as it is, and again on fake tensors of the same strides, which is what a trace does; with symbols
for sizes of more than one, if sizes are dynamic.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ferrite.graph.eager_strides import promised_as_in_eager

# In the sizes that a tensor has already, these keep its strides where eager replaces those that tell nothing: by such a
# view AOTAutograd notes how gradients of results are to lie.
KEPT_BY_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


@dataclass
class Found:
    """What came of one call, or of many."""

    calls: Counter[str] = field(default_factory=Counter)
    differences: list[tuple[str, str]] = field(default_factory=list)  # op, and what differs
    unknown: Counter[str] = field(default_factory=Counter)  # errors of fake kernels

    def add(self, other: Found) -> None:
        self.calls += other.calls
        self.unknown += other.unknown
        self.differences += other.differences


class Judge(TorchDispatchMode):
    """Compares every call that is made in it, once for each combination of sizes, strides and numbers."""

    def __init__(self, *, dynamic: bool = False) -> None:
        super().__init__()
        self.dynamic = dynamic
        self.found = Found()
        self._seen: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        shown = ", ".join(map(described, leaves))
        if (func, shown) in self._seen or func.namespace != "aten" or func._schema.is_mutable:
            return func(*args, **kwargs)
        self._seen.add((func, shown))
        mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        made = func(*args, **kwargs)
        self.found.calls[str(func)] += 1
        try:
            fakes = self._faked(mode, (args, kwargs))
            with torch.no_grad(), enable_python_dispatcher(), promised_as_in_eager(), mode:
                promised = func(*fakes[0], **fakes[1])
        except Exception as error:  # what only a run can tell
            self.found.unknown[f"{func}: {type(error).__name__}: {str(error)[:80]}"] += 1
            return made
        for place, (real, fake) in enumerate(zip(tree_leaves(made), tree_leaves(promised), strict=False)):
            if _has_strides(real, fake):
                strides = tuple(step if isinstance(step, int) else step.node.hint for step in fake.stride())
                is_known = func in KEPT_BY_VIEWS and leaves[0].shape == real.shape
                if strides != real.stride() and None not in strides and not is_known:
                    where = f"{func}({shown}) [{place}] {tuple(real.shape)}"
                    self.found.differences.append((str(func), f"{where}: eager {real.stride()}, promised {strides}"))
        return made

    def _faked(self, mode: FakeTensorMode, arguments: Any) -> Any:
        known: dict[int, Any] = {}

        def fake(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if id(value) not in known:
                kind = DimDynamic.DUCK if self.dynamic else DimDynamic.STATIC
                context = StatelessSymbolicContext(
                    dynamic_sizes=[DimDynamic.STATIC if size < 2 else kind for size in value.shape],
                    constraint_sizes=[None] * value.dim(),
                    constraint_strides=[None] * value.dim(),
                    dynamic_strides=[DimDynamic.INFER_STRIDE] * value.dim(),
                )
                source = ConstantSource(f"x{len(known)}")
                known[id(value)] = mode.from_tensor(value.detach(), source=source, symbolic_context=context)
            return known[id(value)]

        return tree_map(fake, arguments)


def _has_strides(real: Any, fake: Any) -> bool:
    """Whether a promise can be held against a result: not that of a sparse op whose fake kernel makes up a result which
    has other dimensions than eager's."""
    if not isinstance(real, torch.Tensor) or not isinstance(fake, torch.Tensor):
        return False
    return real.layout == fake.layout == torch.strided and real.dim() == fake.dim()


def described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        short = str(value.dtype).removeprefix("torch.")
        strides = list(value.stride()) if value.layout == torch.strided else value.layout
        return f"{short} {list(value.shape)} by {strides}"
    return repr(value)[:60]
