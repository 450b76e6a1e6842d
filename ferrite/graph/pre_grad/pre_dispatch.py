"""The passes over an exported graph, whose calls are ATen overloads already: one list in a fixed order.

The option `pre_dispatch` asks for it. `pre_dispatch_add` names further passes, which run near the end, and
`pre_dispatch_remove` passes that are left out, wherever they stand in the list. What passes put into the graph is
spelled as ATen overloads in the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.fx import Graph

from ferrite.graph.pre_grad import IDLE, PASSES
from ferrite.graph.pre_grad.normalise_aten import normalise_aten
from ferrite.graph.pre_grad.plan import unknown
from ferrite.graph.pre_grad.spell_as_aten import spell_as_aten

# Names of `IDLE` keep their place here: they may be removed, and there is nothing to run.
LIST = (
    "normalise_aten",
    "remove_noops",
    "relu_nan_to_num",
    "chunk_reshape_cat",
    "batch_linear",
    "batch_layernorm",
    "batch_relu",
    "batch_sigmoid",
    "batch_tanh",
    "normalise_aten",
    "split_squeeze_cat",
    "merge_cats",
    "batch_linear_lhs",
    "remove_splits",
    "stack_to_unsqueeze",
    "chunk_reshape_unsqueeze_cat",
)
LAST = ("remove_noops", "spell_as_aten")


def plan_pre_dispatch(add: Sequence[str], remove: Sequence[str]) -> tuple[Callable[[Graph], int], ...]:
    """The passes to run. Raises RuntimeError for a name that does not exist, with those that do."""
    known: dict[str, Callable[[Graph], int]] = {entry.name: entry.run for entry in PASSES}
    known["normalise_aten"] = normalise_aten
    for name in (*add, *remove):
        if name not in known and name not in IDLE:
            raise RuntimeError(unknown("pre_dispatch pass", name, (*known, *IDLE)))
    known["spell_as_aten"] = spell_as_aten  # a graph of ATen stays one, so this one cannot be removed
    chosen = [name for name in (*LIST, *add, *LAST) if name not in remove and name not in IDLE]
    return tuple(known[name] for name in chosen)
