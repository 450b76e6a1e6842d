"""What a replaced value changes further down: strides that differ, and views that now stand in other memory.

Users of a replaced node are evaluated again, with the new value, as long as something about theirs changes or they
share its memory. Strides may change on the way as long as they do not reach an output or an op that nobody knows.
What fake values say of the strides of dimensions with one element, or of tensors with none, is not always what eager
gives: there, a value that read other strides counts as changed.
"""

from __future__ import annotations

from collections.abc import Container
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._pytree import tree_leaves

from ferrite.graph.arguments import is_int, kind
from ferrite.graph.build import value_key
from ferrite.graph.text import show_type
from ferrite.graph.values import same_metadata, value_of

if TYPE_CHECKING:
    from ferrite.graph.soundness import Soundness

_FARTHEST = 200  # users that are evaluated again before a rewrite is given up
# Ops whose result is contiguous, whatever the strides of what they read.
_LAYS_OUT_ANEW = frozenset({"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "embedding", "contiguous"})
NEEDS_STRIDES = frozenset({"view", "view_as", "as_strided"})  # may fail, depending on the strides of what they read
_LAYOUT_MATTERS = frozenset({"as_strided", "stride", "is_contiguous", "storage_offset", "data_ptr", "set_", "resize_"})


class Spread:
    """One try: `try_values` looks ahead and gives a reason against, `commit` writes the new values down. `doubted`:
    new nodes whose strides are not sure."""

    def __init__(self, sound: Soundness, replaced: dict[Node, Node], doubted: Container[Node] = ()) -> None:
        self._sound = sound
        self._replaced = replaced
        self._overlay: dict[Node, Any] = {}
        self._doubted = {old for old, result in replaced.items() if result in doubted}

    def try_values(self, same_tensor: bool) -> str | None:
        """`same_tensor`: the new values are right whatever the old ones say, strides too."""
        affected: set[Node] = set()
        roots: set[Any] = set()
        for old, result in self._replaced.items():
            before, after = value_of(old), value_of(result)
            if same_tensor and before is None:
                continue  # nothing was known of it, so nothing that was known changes
            if not same_tensor and (reason := differs(old.name, before, after)):
                return reason
            self._overlay[old] = after
            roots |= self._sound.aliases.of(old)
            if self._is_changed(old) or self._sound.aliases.of(old) != self._sound.aliases.of(result):
                affected.add(old)
        return self._walk(affected, roots, same_tensor)

    def commit(self) -> None:
        for node, value in self._overlay.items():
            if node not in self._replaced:
                before = self._sound.aliases.of(node)
                node.meta[value_key(node)] = value
                self._sound.join(before | self._sound.aliases.of(node))

    def _walk(self, affected: set[Node], roots: set[Any], same_tensor: bool) -> str | None:
        waiting = sorted({user for node in affected for user in node.users if user not in self._replaced})
        seen = set(waiting)
        evaluated = 0
        while waiting:
            node = heappop(waiting)
            # Few values are new, and a node may read thousands.
            changed = [source for source in self._overlay if node in source.users and self._is_changed(source)]
            shares = not roots.isdisjoint(self._sound.aliases.of(node))
            if changed and not same_tensor and (reason := self._minds(node, changed[0])):
                return reason
            if node.op == "output" or not (changed or shares) or _gives_nothing(node):
                continue
            evaluated += 1
            if evaluated > _FARTHEST:
                return f"other strides reach more than {_FARTHEST} nodes"
            self._overlay[node] = self._sound.evaluator.value(node, self._overlay)
            if changed and kind(node) not in _LAYS_OUT_ANEW and _has_idle_strides(self._overlay[node]):
                self._doubted.add(node)
            was_view, is_view = self._is_view(node)
            reason = differs(node.name, value_of(node), self._overlay[node])
            if reason is None and was_view != is_view:
                roots |= self._sound.aliases.of(node)  # views of it stand in other memory now
                reason = self._turns(node, is_view)
            if not same_tensor and reason is not None:
                return reason
            if not (shares or was_view != is_view or self._is_changed(node)):
                del self._overlay[node]  # what it gave is still true, memory and all
            else:
                for user in node.users.keys() - seen - self._replaced.keys():
                    seen.add(user)
                    heappush(waiting, user)
        return None

    def _minds(self, node: Node, source: Node) -> str | None:
        """Why a reader of a value with other strides must not see them."""
        if node.op == "output":
            new, old = show_type(self._overlay[source]), show_type(value_of(source))
            return f"{source.name} would be returned as {new}, not {old}"
        name = kind(node)
        # A fake `view` of sizes (2, 1, 2) with strides (4, 2, 1) as one of four is given, and raises in eager.
        doubted = name in NEEDS_STRIDES and (source in self._doubted or _has_idle_strides(self._overlay[source]))
        # Only aten's ops go without the name of a library.
        if name is None or "::" in name or name in _LAYOUT_MATTERS or doubted:
            return f"{node.name} would see other strides"
        return None

    def _is_view(self, node: Node) -> tuple[bool, bool]:
        """Whether a node gave a view of what it reads, and whether it would now."""
        inputs = node.all_input_nodes
        was_view = any(self._sound.aliases.shares(node, source) for source in inputs)
        read = {storage for source in inputs for storage in _storages(self._overlay.get(source, value_of(source)))}
        return was_view, not read.isdisjoint(_storages(self._overlay[node]))

    def _turns(self, node: Node, is_view: bool) -> str | None:
        """A reshape that copied and now gives a view, or the other way round, where somebody could see it."""
        sound, inputs = self._sound, node.all_input_nodes
        memory = _storages(self._overlay[node] if is_view else value_of(node))
        seen = sound.written_after(node) or self._also_seen(node, memory)
        for source in (*inputs, *self._replaced.values()) if is_view else ():
            seen = seen or sound.written_after(source, node)
        what = "would be a view and was a copy" if is_view else "would be a copy and was a view"
        return f"{node.name} {what}, and {seen}" if seen else None

    def _also_seen(self, node: Node, memory: set[int]) -> str | None:
        """A node is returned, and this memory is not its own: an input's, another result's, or only a part."""
        aliases, graph = self._sound.aliases, self._sound.graph
        views, waiting = {node}, [node]
        while waiting:
            found = {user for user in waiting.pop().users if aliases.shares(user, node)} - views
            views |= found
            waiting += found
        returned = next(iter(reversed(graph.nodes))).all_input_nodes
        if views.isdisjoint(returned):
            return None
        if not fill_alike(value_of(node), self._overlay[node]):
            return f"{node.name} is returned"
        roots = {aliases.root(one) for one in memory}
        for other in (*graph.find_nodes(op="placeholder"), *graph.find_nodes(op="get_attr"), *returned):
            if other in views:
                continue
            stands_in = _storages(self._overlay.get(other, value_of(other)))
            if not memory.isdisjoint(stands_in) or not roots.isdisjoint(aliases.of(other)):
                return f"{node.name} is returned, and shares memory with {other.name}"
        return None

    def _is_changed(self, node: Node) -> bool:
        if node not in self._overlay:
            return False
        return node in self._doubted or not same_metadata(value_of(node), self._overlay[node])


def _has_idle_strides(value: Any) -> bool:
    """Whether a tensor has a dimension of one element, or of none: its stride means nothing, and may be any."""
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return any(is_int(extent) and extent <= 1 for tensor in tensors for extent in tensor.shape)


def is_doubtful(node: Node, doubted: Container[Node]) -> bool:
    """Whether eager may give a value other strides than its fake value says: a pointwise result with dimensions of one
    element or of none, unless all that it reads is laid out plainly; and what is made of such a value."""
    if kind(node) in _LAYS_OUT_ANEW or not _has_idle_strides(value_of(node)):
        return False
    if node.kwargs.get("memory_format") is torch.contiguous_format:
        return False
    sources = node.all_input_nodes
    plain = all(_is_plain(value_of(source)) for source in sources)
    return any(source in doubted for source in sources) or (_is_pointwise(node) and not plain)


def _is_pointwise(node: Node) -> bool:
    overload = getattr(getattr(torch.ops.aten, kind(node) or "", None), "default", None)
    overload = overload or getattr(getattr(torch.ops.aten, kind(node) or "", None), "Tensor", None)
    return overload is not None and torch.Tag.pointwise in overload.tags


def _is_plain(value: Any) -> bool:
    """Whether the strides of a tensor are those of a new one, in every dimension."""
    if not isinstance(value, torch.Tensor):
        return True
    expected: Any = 1
    for extent, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if str(stride) != str(expected):
            return False
        expected = expected * (1 if is_int(extent) and extent == 0 else extent)
    return True


def _gives_nothing(node: Node) -> bool:
    """A write by index: no value, nobody reads it."""
    return not node.users and value_of(node) is None


def differs(name: str, before: Any, after: Any) -> str | None:
    """Dtype, device or sizes that are not provably the same."""
    if isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor):
        same = (
            before.dtype == after.dtype
            and before.device == after.device
            and before.layout == after.layout
            and before.dim() == after.dim()
            and all(statically_known_true(a == b) for a, b in zip(before.shape, after.shape, strict=True))
        )
        return None if same else f"{name} is {show_type(before)} and would be {show_type(after)}"
    if isinstance(before, (tuple, list)) and isinstance(after, (tuple, list)) and len(before) == len(after):
        reasons = (differs(name, a, b) for a, b in zip(before, after, strict=True))
        return next((reason for reason in reasons if reason is not None), None)
    if before is None and after is not None:
        return f"{name} has no fake value"
    return None if type(before) is type(after) else f"{name} gives another kind of value"


def fill_alike(one: Any, other: Any) -> bool:
    """Whether two tensors stand at the same place of storages of one size."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    first, second = _storage(one), _storage(other)
    if first is None or second is None:
        return False
    same_size = statically_known_true(first.nbytes() == second.nbytes())
    return same_size and statically_known_true(one.storage_offset() == other.storage_offset())


def _storage(value: torch.Tensor) -> torch.UntypedStorage | None:
    """None for what functorch wraps, which shows no memory."""
    try:
        return value.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def _storages(value: Any) -> set[int]:
    found = set()
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
            storage = _storage(leaf)
            found.add(id(leaf) if storage is None else storage._cdata)
    return found
