"""Patterns made of two functions: what to look for, and what to put there.

    register(search=lambda a, b, c: torch.add(torch.mm(a, b), c), replacement=lambda a, b, c: torch.addmm(c, a, b), ...)

Nothing is traced before a graph is searched. After autograd a candidate is held against the search function once more,
traced on the very sizes, strides and dtypes that were found; then the user's check is asked; then the replacement is
traced on the same values. What cannot be traced is no match.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from ferrite.graph.build import Builder, CannotBuild
from ferrite.graph.pattern.check import Check, objection
from ferrite.graph.pattern.lowering import Lowering, as_call
from ferrite.graph.pattern.match import Match, find_match
from ferrite.graph.pattern.nodes import Op, Several, holes
from ferrite.graph.pattern.regions import Regions
from ferrite.graph.pattern.seen import memory_of
from ferrite.graph.pattern.splice import splice, varying_sizes
from ferrite.graph.pattern.table import Explain, PatternTable, may_stand_in
from ferrite.graph.pattern.text import parse_pattern, show_pattern
from ferrite.graph.pattern.trace import (
    parameter_names,
    pattern_of,
    trace_after_autograd,
    trace_before_autograd,
    trace_jointly,
)
from ferrite.graph.post_grad.view_to_reshape import view_to_reshape
from ferrite.graph.soundness import Soundness
from ferrite.graph.values import fake_mode_of, value_of


@dataclass
class TracedPattern:
    """`inputs` are example tensors, one for each parameter of `search`; a parameter that is a number of the program has
    an entry in `scalars` instead, with a value that stands nowhere else in the function. `text` is the pattern as a
    test keeps it: with it nothing is traced to look for candidates. `joint`: what is looked for is the function and its
    gradients by the inputs that require them, and both are replaced; sizes that vary are no match then. `lowering` in
    place of `replacement`: what is found becomes loops by that function, when the graph is lowered."""

    name: str
    search: Callable[..., Any]
    replacement: Callable[..., Any] | None
    inputs: Sequence[Any]
    stage: str = "post_grad"
    extra_check: Check | None = None
    scalars: Mapping[str, Any] = field(default_factory=dict)
    text: str | None = None
    joint: bool = False
    lowering: Callable[..., Any] | None = None
    _traces: dict[Any, GraphModule | None] = field(default_factory=dict)
    _failure: Exception | None = None  # of the latest trace that failed

    def __post_init__(self) -> None:
        values = list(self.scalars.values())
        if len(set(values)) != len(values):
            raise ValueError(f"the scalars of {self.name} must differ from each other, given {dict(self.scalars)}")
        self._check_parameters()
        if self.joint and (self.stage != "joint" or not any(value.requires_grad for value in self.inputs)):
            raise ValueError(f"{self.name} is joint: it needs the stage joint, and an example input that requires grad")
        if (self.replacement is None) == (self.lowering is None):
            raise ValueError(f"{self.name} needs a replacement, or a function that lowers it")
        if self.lowering is not None and self.stage != "post_grad":
            raise ValueError(f"{self.name} is lowered by a function: it needs the stage post_grad")
        if self.text is not None:
            self._check_text(holes(self.pattern), parameter_names(self.search))

    def _check_text(self, found: list[str], names: list[str]) -> None:
        tangents = _tangents(len(found)) if self.joint else []
        if set(found).difference(tangents) != set(names):
            says = f"speaks of {', '.join(found)}, and the function of {', '.join(names)}"
            raise ValueError(f"the text of the pattern {self.name} {says}; it may be out of date")

    def _check_parameters(self) -> None:
        names = parameter_names(self.search)
        tensors = [name for name in names if name not in self.scalars]
        if len(tensors) != len(self.inputs) and self.stage != "pre_grad":
            takes = f"takes {len(tensors)} tensors ({', '.join(tensors)})"
            raise ValueError(f"{self.name} {takes} and has {len(self.inputs)} example inputs")
        for other in (self.replacement, self.lowering):
            if other is None or any(p.kind is p.VAR_POSITIONAL for p in inspect.signature(other).parameters.values()):
                continue
            if len(parameter_names(other)) != len(names):
                takes = f"{len(parameter_names(other))} parameters, not {len(names)} ({', '.join(names)})"
                raise ValueError(f"what {self.name} is replaced by takes {takes}")

    @cached_property
    def pattern(self) -> Op | Several:
        """What is looked for; after autograd without constants."""
        if self.text is not None:
            return parse_pattern(self.text)
        return self._pattern(self._example(), constants=self.stage == "pre_grad")

    def serialised(self) -> str:
        """The text to keep; a test compares it with what is kept."""
        return show_pattern(self._pattern(self._example(), constants=self.stage == "pre_grad"))

    def duplicates(self) -> str:
        """What tells this pattern from another with the same filter: the constants of the example. Parameters are
        numbered as they appear: how they are called does not matter."""
        return show_pattern(self._pattern(self._example(), constants=True, numbered=True))

    def apply(self, graph: Graph, explain: Explain | None = None) -> int:
        """Replace it everywhere in a graph; gives how often."""
        if not may_stand_in(graph, self.pattern):
            return 0
        self._traces.clear()  # their values belong to the mode of one graph
        table = PatternTable()
        if self.stage == "pre_grad":
            sound = Soundness(graph)
            table.add(self.name, self.pattern, lambda match: self._rewrite(match, sound))
        else:
            table.add(self.name, self.pattern, lambda match: self._splice(match))
        return table.apply(graph, explain)

    # Before autograd.

    def _rewrite(self, match: Match, sound: Soundness) -> bool | str:
        if reason := objection(self.extra_check, match):
            return reason
        assert self.replacement is not None
        module = trace_before_autograd(self.replacement)
        ends = [end for end in match.ends if end is not None]

        def build(new: Builder) -> list[Node]:
            made: dict[Node, Any] = {}
            for node in module.graph.nodes:
                args, kwargs = map_arg((node.args, node.kwargs), made.__getitem__)
                match node.op:
                    case "placeholder":
                        if node.users and str(node.target) not in held:
                            raise CannotBuild(f"{node.target} is no part of what was found")
                        made[node] = held.get(str(node.target))
                    case "call_function" | "call_method":
                        made[node] = new(node.target, *args, **kwargs)
                    case "output":
                        results = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
                        return [result for end, result in zip(match_ends, results, strict=True) if end is not None]
                    case _:
                        raise CannotBuild(f"a {node.op} of the replacement cannot be moved")
            raise CannotBuild("the replacement gives nothing")

        match_ends = match.ends
        both = zip(parameter_names(self.search), parameter_names(self.replacement), strict=True)
        held = {other: match.names[one] for one, other in both if one in match.names}
        return sound.rewrite(ends, build)

    # After autograd.

    def _splice(self, match: Match) -> bool | str:
        names = [name for name in parameter_names(self.search) if name not in self.scalars]
        names += [name for name in _tangents(len(match.names)) if name in match.names]
        nodes = [match.names.get(name) for name in names]
        if not all(isinstance(node, Node) and isinstance(value_of(node), torch.Tensor) for node in nodes):
            return False
        end = next(end for end in match.ends if end is not None)
        numbers = {name: match.names[name] for name in self.scalars}
        values = [value_of(node) for node in nodes]
        mode = fake_mode_of(end.graph)
        sizes = varying_sizes(values)
        searched = self._trace(self.search, values, sizes, numbers, mode)
        if searched is None or len(searched.graph.find_nodes(op="placeholder")) != len(sizes) + len(names):
            return False
        labels = [""] * len(sizes) + names
        exact = find_match(pattern_of(searched, labels, constants=True), end)
        if exact is None:
            return False
        exact = Match({**numbers, **exact.names}, exact.nodes, exact.ends)
        if exact.nodes != match.nodes and Regions(end.graph).reach_across(exact.nodes):
            return False
        if any(exact.names.get(name) is not match.names[name] for name in names):
            return False
        if reason := objection(self.extra_check, exact):
            return reason
        if self.lowering is not None:
            replaced = as_call(searched, self.name, Lowering(self.lowering, tuple(names), numbers))
        else:
            replaced = self._trace(self.replacement, values, sizes, numbers, mode)
        if replaced is None or len(replaced.graph.find_nodes(op="placeholder")) != len(sizes) + len(names):
            return False
        made = splice(exact, replaced, [*sizes, *nodes])
        return made if isinstance(made, str) else True

    def _trace(
        self, function: Any, values: list[Any], sizes: dict[str, Any], numbers: dict[str, Any], mode: FakeTensorMode
    ) -> GraphModule | None:
        key = (function, tuple(map(_metadata, values)), tuple(numbers.items()), tuple(sizes))
        if sizes or key not in self._traces or (function is self.replacement and _shows_inputs(self._traces[key])):
            given = iter(values)
            arguments = [None if name in numbers else next(given) for name in parameter_names(function)]

            def called(*tensors: Any) -> Any:
                left = iter(tensors)
                return function(*(numbers[n] if n in numbers else next(left) for n in parameter_names(function)))

            tensors = [a for a in arguments if a is not None]
            try:
                if self.joint:
                    module = self._trace_jointly(called, tensors, sizes, mode)
                else:
                    module = trace_after_autograd(called, tensors, list(sizes.values()), mode)
                if module is not None and self.stage == "post_grad":
                    view_to_reshape(module.graph)
            except Exception as error:
                module, self._failure = None, error
            self._traces[key] = module
        return self._traces[key]

    def _trace_jointly(self, called: Any, tensors: list[Any], sizes: Any, mode: FakeTensorMode) -> GraphModule | None:
        needs = [value.requires_grad for value in self.inputs]
        whole = any(n and not value.is_floating_point() for n, value in zip(needs, tensors, strict=True))
        return None if sizes or whole else trace_jointly(called, tensors, needs, mode)

    def _pattern(self, inputs: list[Any], *, constants: bool, numbered: bool = False) -> Op | Several:
        if self.stage == "pre_grad":
            module, names = trace_before_autograd(self.search), parameter_names(self.search)
            found = pattern_of(module, names, constants=True)
            return pattern_of(module, _numbered(names, found), constants=True) if numbered else found
        mode = next((value.fake_mode for value in inputs if isinstance(value, FakeTensor)), None) or FakeTensorMode()
        module = self._trace(self.search, inputs, {}, dict(self.scalars), mode)
        if module is None:
            why = f": {type(self._failure).__name__}: {self._failure}" if self._failure is not None else ""
            raise ValueError(f"the pattern {self.name} cannot be traced on its example inputs{why}")
        names = [name for name in parameter_names(self.search) if name not in self.scalars]
        names += _tangents(len(module.graph.find_nodes(op="placeholder")) - len(names))
        found = pattern_of(module, names, constants=constants, scalars=self.scalars)
        if unused := set(names) - set(holes(found)):
            raise ValueError(f"the pattern {self.name} does not use {', '.join(sorted(unused))}")
        if not numbered:
            return found
        scalars = dict(zip(_numbered(list(self.scalars), found), self.scalars.values(), strict=True))
        return pattern_of(module, _numbered(names, found), constants=constants, scalars=scalars)

    def _example(self) -> list[Any]:
        """The example inputs as fake tensors: nothing real is kept or computed with."""
        return _apart(self.inputs, FakeTensorMode())


def _tangents(count: int) -> list[str]:
    """What the gradients of the results are called in a pattern."""
    return [f"tangent_{index}" for index in range(count)]


def _numbered(names: Sequence[str], pattern: Op | Several) -> list[str]:
    """Names in the order in which a pattern mentions them."""
    order = holes(pattern)
    return [f"p{order.index(name)}" if name in order else name for name in names]


def _apart(values: Sequence[Any], mode: FakeTensorMode) -> list[Any]:
    """Fake tensors like these, one for each: a trace takes the same tensor twice for one input."""
    with mode:
        return [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device) for v in values]


def _shows_inputs(module: GraphModule | None) -> bool:
    """Whether a trace holds views of its inputs: their values stand in the memory of one place, and no other."""
    if module is None:
        return False
    inputs = memory_of([value_of(node) for node in module.graph.find_nodes(op="placeholder")])
    calls = memory_of([value_of(node) for node in module.graph.nodes if node.op == "call_function"])
    return not inputs.isdisjoint(calls)


def _metadata(value: torch.Tensor) -> tuple[Any, ...]:
    return tuple(map(str, value.shape)), tuple(map(str, value.stride())), value.dtype, value.device
