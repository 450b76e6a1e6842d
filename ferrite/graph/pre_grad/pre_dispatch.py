"""The passes over an exported graph, whose calls are ATen overloads already: one list in a fixed order.

The option `pre_dispatch` asks for it. `pre_dispatch_add` names further passes, which run near the end, and
`pre_dispatch_remove` passes that are left out, wherever they stand in the list; both also take the names that other
compilers have for steps of it. What passes put into the graph is spelled as ATen overloads in the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch.fx import Graph

from ferrite.errors import unknown
from ferrite.graph.pre_grad import IDLE, PASSES
from ferrite.graph.pre_grad.normalise_aten import normalise_aten
from ferrite.graph.pre_grad.spell_as_aten import spell_as_aten

BATCH = ("batch_linear", "batch_layernorm", "batch_relu", "batch_sigmoid", "batch_tanh")

# Names of `IDLE` keep their place here: they may be removed, and there is nothing to run.
LIST = (
    "normalise_aten",
    "remove_noops",
    "relu_nan_to_num",
    "chunk_reshape_cat",
    *BATCH,
    "normalise_aten",
    "split_squeeze_cat",
    "merge_cats",
    "fuse_split_linear_add_pass",
    "remove_reshape_pass",
    "batch_linear_lhs",
    "remove_splits",
    "stack_to_unsqueeze",
    "chunk_reshape_unsqueeze_cat",
)
LAST = ("remove_noops", "spell_as_aten")

# What others call the steps, and the passes that they are here; names of `IDLE` are theirs already.
OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    "normalization_pass_aten": ("normalise_aten",),
    "normalize_node_kwargs_pass": ("normalise_aten",),
    "remove_noop_pass": ("remove_noops",),
    "fuse_chunk_reshape_concat_pass": ("chunk_reshape_cat",),
    "group_batch_fusion_passes": BATCH,
    "fuse_chunk_squeeze_cat_pass": ("split_squeeze_cat",),
    "fuse_split_getitem_squeeze_cat": ("split_squeeze_cat",),
    "merge_concats_pass": ("merge_cats",),
    "fuse_parallel_linear_pass": ("batch_linear_lhs",),
    "remove_split_ops": ("remove_splits",),
    "remove_split_ops_pass": ("remove_splits",),
    "stack_to_unsqueeze_pass": ("stack_to_unsqueeze",),
    "fuse_chunk_reshape_unsqueeze_concat_pass": ("chunk_reshape_unsqueeze_cat",),
}


def plan_pre_dispatch(add: Sequence[str], remove: Sequence[str]) -> tuple[Callable[[Graph], int], ...]:
    """The passes to run. Raises RuntimeError for a name that does not exist, with those that do."""
    known: dict[str, Callable[[Graph], int]] = {entry.name: entry.run for entry in PASSES}
    known["normalise_aten"] = normalise_aten
    valid = (*known, *IDLE, *OTHER_NAMES)
    for name in (*add, *remove):
        if name not in valid:
            raise RuntimeError(unknown("pre_dispatch pass", name, valid))
    add, remove = _ours(add), _ours(remove)
    known["spell_as_aten"] = spell_as_aten  # a graph of ATen stays one, so this one cannot be removed
    chosen = [name for name in (*LIST, *add, *LAST) if name not in remove and name not in IDLE]
    return tuple(known[name] for name in chosen)


def _ours(names: Sequence[str]) -> list[str]:
    return [ours for name in names for ours in OTHER_NAMES.get(name, (name,))]
