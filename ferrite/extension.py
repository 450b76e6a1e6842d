"""Passes and patterns that users add to a stage.

    ferrite.register_pass("post_grad", my_pass)                              # at the end of the stage
    with ferrite.register_pass("pre_grad", mine, after="normalise_ops"):     # only in here
        compiled(x)
    ferrite.register_pattern(lambda a, b, c: a @ b + c, lambda a, b, c: torch.addmm(c, a, b), [a, b, c])

A pass is a function of an FX graph that edits it and may say in how many places. After it ran, the graph is put in
order, what was edited and what depends on it gets new fake values, and the result is checked: it must give as many
tensors as before, of the same sizes and dtypes. What is wrong is an error that names the pass, under `strict` or not:
nobody else can repair it.

The list of what is registered is `registry`, from `register_pass` to the end of its scope or `remove`.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_leaves

from ferrite import identity, registry
from ferrite.errors import CompileFault, UserFault
from ferrite.graph.build import fill_values
from ferrite.graph.check import check_graph
from ferrite.graph.ledger import ledger_of
from ferrite.graph.order import sort_nodes
from ferrite.graph.pattern.check import Check
from ferrite.graph.pattern.check import if_option as if_option
from ferrite.graph.pattern.table import may_stand_in
from ferrite.graph.pattern.traced import TracedPattern
from ferrite.graph.snapshot import Snapshot, changed_nodes, take
from ferrite.graph.text import show_type
from ferrite.graph.values import refresh, tensor_of
from ferrite.identity import identity_of, like

STAGES = ("pre_grad", "joint", "post_grad")


class UserPass:
    """One registration; leaving it as a context, or `remove`, ends it."""

    def __init__(
        self, stage: str, function: Callable[[Graph], Any], before: str | None, after: str | None, key: str | None
    ) -> None:
        self.stage = stage
        self.function = function
        self.before = before
        self.after = after
        self.name = str(key or getattr(function, "__name__", type(function).__name__))
        if self.name == "<lambda>":
            self.name = f"pass_{len(registry.registered)}"

    def remove(self) -> None:
        if self in registry.registered:
            registry.registered.remove(self)

    def __enter__(self) -> UserPass:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    @property
    def __name__(self) -> str:  # the runner calls a pass by this name
        return self.name

    def __call__(self, graph: Graph) -> int:
        where = f"{self.stage}.{self.name}"
        facts = ledger_of(graph).facts
        try:
            if isinstance(self.function, _PatternPass) and not may_stand_in(graph, self.function.pattern.pattern):
                return 0
            before = take(graph)
            told = self.function(graph)
            sort_nodes(graph)
            edited = changed_nodes(graph, before)
            changed = len(edited) + len(before.keys() - set(graph.nodes))
            if changed:
                facts.clear()
                self._verify(graph, before, edited, where)
        except Exception as error:
            text = error.title if isinstance(error, CompileFault) else f"{type(error).__name__}: {error}"
            raise UserFault(f"the pass {self.name} that you registered failed: {text}", at=where) from error
        return told if type(told) is int and told > 0 else int(changed > 0)

    def _verify(self, graph: Graph, before: Snapshot, edited: set[Node], where: str) -> None:
        after_autograd = self.stage != "pre_grad"
        if graph.owning_module is not None:
            check_graph(graph.owning_module, where, after_autograd=after_autograd)
        if isinstance(self.function, _PatternPass):
            return  # what it puts in was traced on the values of what it stands for
        if not after_autograd:
            fill_values(graph, edited)
        elif isinstance(graph.owning_module, GraphModule):
            refresh(graph.owning_module, before)
        if reason := _gives_something_else(graph, before):
            raise ValueError(reason)

    def pattern_text(self) -> str:
        """What a registered pattern looks for, as a text to keep: `register_pattern` takes it as `text`."""
        if not isinstance(self.function, _PatternPass):
            raise TypeError(f"{self.name} is a pass, not a pattern")
        return self.function.pattern.serialised()

    def digest(self) -> str:
        """Of everything that the pass does: its `uuid()`, or its code and what that holds and reads. The same in every
        process. Raises `Unsupported` if that has no text."""
        return hashlib.sha256(
            f"{self.stage} {self.before} {self.after} {identity_of(self.function)}".encode()
        ).hexdigest()


def register_pass(
    stage: str,
    function: Callable[[Graph], Any],
    *,
    before: str | None = None,
    after: str | None = None,
    name: str | None = None,
) -> UserPass:
    """Run `function` in a stage, at its end or next to a pass that is named; also a context manager."""
    if stage not in STAGES:
        raise ValueError(f"Ferrite has no graph stage {stage!r}; there are {', '.join(STAGES)}")
    if not callable(function):
        raise TypeError(f"a pass is a function of an FX graph, given {type(function).__name__}")
    if before is not None and after is not None:
        raise ValueError("a pass stands before another one or after it; give one of the two")
    entry = UserPass(stage, function, before, after, name)
    if any(other.stage == stage and other.name == entry.name for other in registry.registered):
        raise ValueError(f"a pass {entry.name!r} is registered for {stage} already")
    registry.registered.append(entry)
    return entry


def register_op_version(op: Any, version: str | None) -> None:
    """Say which version an operator is whose code cannot be read, so that graphs that call it are cached.

    `op` is an operator, its name "namespace::name", or a namespace, then of all operators in it. The version stands for
    all of the operator's code: another one is needed whenever a kernel, fake kernel or gradient formula does something
    else. None takes it back.
    """
    name = getattr(op, "_qualname", None) or getattr(op, "_qualified_op_name", None) or getattr(op, "_name", op)
    if not isinstance(name, str) or not all(map(str.isidentifier, name.split("::"))):
        raise TypeError(f"an operator is named by 'namespace::name' or a namespace, given {op!r}")
    if version is None:
        identity.versions.pop(name, None)
    else:
        identity.versions[name] = str(version)


def _gives_something_else(graph: Graph, before: Snapshot) -> str | None:
    """How the results of a graph differ from those before an edit, as far as sizes and dtypes are known."""
    ends = [entry for entry in before.values() if entry.op == "output"]
    old, new = tree_leaves(ends[0].args), tree_leaves(graph.output_node().args)
    if len(old) != len(new):
        return f"the graph gives {len(new)} results, not {len(old)}"
    for place, (one, other) in enumerate(zip(old, new, strict=True)):
        entry = before[one].meta if isinstance(one, Node) else {}
        was, now = entry.get("example_value", entry.get("val")), tensor_of(other)
        if not isinstance(was, torch.Tensor) or now is None:
            continue
        if was.dtype != now.dtype or [*map(str, was.shape)] != [*map(str, now.shape)]:
            return f"result {place}, {other.name}, is {show_type(now)}, not {show_type(was)}"
    return None


class _PatternPass:
    """Two functions as a pass: wherever the first stands, the second is put."""

    def __init__(self, pattern: TracedPattern) -> None:
        self.pattern = pattern

    def __call__(self, graph: Graph) -> int:
        return self.pattern.apply(graph)

    def uuid(self) -> str:
        parts = (self.pattern.search, self.pattern.replacement, self.pattern.extra_check, self.pattern.lowering)
        held = (dict(self.pattern.scalars), self.pattern.joint, [*map(like, self.pattern.inputs)], self.pattern.text)
        settings = " ".join(map(repr, held))
        return f"{self.pattern.name} {[identity_of(part) for part in parts]} {settings}"


def register_pattern(
    search: Callable[..., Any],
    replacement: Callable[..., Any] | None,
    example_inputs: Sequence[Any],
    *,
    extra_check: Check | None = None,
    scalars: Mapping[str, Any] | None = None,
    stage: str = "post_grad",
    name: str | None = None,
    before: str | None = None,
    after: str | None = None,
    skip_duplicates: bool = False,
    joint: bool = False,
    lowering: Callable[..., Any] | None = None,
    text: str | None = None,
) -> UserPass:
    """Put `replacement` wherever `search` stands in a graph; also a context manager.

    Both are functions of the same parameters, called with tensors like `example_inputs`; after autograd they are traced
    to aten, before autograd they are taken as written. `scalars` gives the parameters that are numbers a value each
    that stands nowhere else in `search`. `extra_check(match)` may say no, or in a text why not; `match["x"]` is the
    node behind a parameter. With `joint` (in the stage of that name) the function is looked for together with its
    gradients by the example inputs that require them, and so is replaced.

    With `lowering`, and None for a replacement, what is found becomes loops by that function when the graph is lowered:
    it is called as `search` is, with tensors of `ferrite.lower.value`, and gives what a row of the table of lowerings
    gives. If it raises `Unsupported`, the calls of `search` run.

    `text` is the pattern as `pattern_text` of an earlier registration gives it: with it nothing is traced before there
    is a candidate. Whoever keeps one compares it with a new one in a test.

    A pattern that is looked for already is an error, or not registered again with `skip_duplicates`. To tell, patterns
    of one stage with equally many parameters are traced here; any other is not traced before a graph is searched.
    """
    known = name or search.__name__
    if known == "<lambda>":
        known = f"pattern_{sum(isinstance(entry.function, _PatternPass) for entry in registry.registered)}"
    numbers = scalars or {}
    pattern = TracedPattern(
        known, search, replacement, example_inputs, stage, extra_check, numbers, text, joint=joint, lowering=lowering
    )
    run = _PatternPass(pattern)
    if (other := _equal_pattern(pattern)) is not None:
        if skip_duplicates:
            return UserPass(stage, run, before, after, known)
        raise ValueError(f"the pattern {known} is registered for {stage} already, as {other}:\n{pattern.duplicates()}")
    return register_pass(stage, run, before=before, after=after, name=known)


def _equal_pattern(pattern: TracedPattern) -> str | None:
    """The name of a registered pattern that looks for the same thing."""
    count = len(inspect.signature(pattern.search).parameters)
    for entry in registry.registered:
        if entry.stage != pattern.stage or not isinstance(entry.function, _PatternPass):
            continue
        other = entry.function.pattern
        if len(inspect.signature(other.search).parameters) != count:
            continue
        try:
            if other.duplicates() == pattern.duplicates():
                return entry.name
        except Exception:  # what cannot be traced is named where it is searched for
            continue
    return None


def with_user_passes(stage: str, passes: Iterable[Any]) -> list[Any]:
    """The passes of a stage and those that users added to it, in order of registration, each at its place."""
    placed = list(passes)
    for entry in registry.registered:
        if entry.stage != stage:
            continue
        target = entry.before or entry.after
        found = [index for index, run in enumerate(placed) if run.__name__ == target]
        if target is not None and not found:
            names = ", ".join(dict.fromkeys(run.__name__ for run in placed))
            raise UserFault(
                f"the pass {entry.name} that you registered stands next to {target!r}, which does not run in {stage}",
                why=f"these do: {names}",
            )
        position = len(placed) if target is None else found[0] if entry.before else found[-1] + 1
        placed.insert(position, entry)
    return placed
