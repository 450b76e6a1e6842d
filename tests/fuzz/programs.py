"""A random program as data: its inputs, its steps, what it returns; its text is Python that runs as it stands.

    def program(x0, x1):
        v0 = torch.where(x1 > 0, x0, 2)
        x0[1:].mul_(3)
        return v0, x0

`source` is that text, and `function_of` the function that it defines: what is compiled, compared and printed is one
thing. `Trace` runs a program step by step in eager. It rejects what eager rejects, and decisions about rounded values:

Note [Honest programs]
    Two right compilers may differ in the last bits of `exp` or of a sum. A program that then asks `y > 0`, or for the
    place of the greatest, or for an integer, may differ in everything. So each value is marked as exact or not. Inputs
    are exact, and what exact operations (IEEE arithmetic, views, integers, comparisons) make of exact values. What
    jumps takes exact values only. A sum is exact if it adds small whole numbers. And a program reads what it has
    written: the memory of a result may be larger in eager than its elements need (a mean of losses lies in the memory
    of the losses), and `as_strided` sees what is there.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional

LAYOUTS = ("contiguous", "transposed", "gaps", "stepped", "offset", "expanded")
VALUES = ("normal", "positive", "whole", "special")
ROUNDINGS = ("exact", "either", "inexact", "sum", "jumps", "raises")
LARGEST = 6000  # elements of a value
MOST_PRINTED = 64  # elements of an input that are printed one by one
ENVIRONMENT = {"torch": torch, "functional": functional}
_NARROW = re.compile(r"torch\.(float16|bfloat16|float32)\b")
_PRODUCT = re.compile(r"\.(cum)?prod\(")


@dataclass(frozen=True)
class Input:
    """A tensor that a program is called with, or a view of an earlier one: `view` is then its text."""

    name: str
    dtype: str
    sizes: tuple[int, ...]
    layout: str = "contiguous"
    values: str = "normal"
    seed: int = 0
    wants_gradient: bool = False
    view: str = ""

    @property
    def kind(self) -> torch.dtype:
        return getattr(torch, self.dtype)


@dataclass(frozen=True)
class Step:
    """One line. `text` has {0}, {1}, ... for operands; without results it is a statement that changes operand 0.

    rounding:  exact    the same bits everywhere, if its operands are the same
               either   exact, but it gives one of its operands, and which of two zeros is not said: of a maximum eager
                        gives the second in whole vectors and the first in what is left
               inexact  floats may differ in the last bits
               sum      inexact, unless it adds whole numbers
               jumps    exact, and a small change of an operand may change the result much
               raises   eager raises an error here, and so does whoever is compared with it
    inside:    text of a context that it runs in; steps in a row with the same one are one block
    """

    text: str
    operands: tuple[str, ...]
    results: tuple[str, ...] = ()
    rounding: str = "exact"
    inside: str = ""

    @property
    def expression(self) -> str:
        return self.text.format(*self.operands)

    @property
    def rounds(self) -> bool:
        return self.rounding in ("inexact", "sum")

    @property
    def casts(self) -> bool:
        """Whether it names the type in which it computes, which may hold fewer digits than an integer has."""
        return _NARROW.search(self.text) is not None

    @property
    def exponent(self) -> int | None:
        """The operand that is an exponent."""
        return 1 if self.text.startswith("torch.pow(") else None

    @property
    def multiplies(self) -> bool:
        """Whether it gives a product of many elements, which may leave the range of halves on the way."""
        return _PRODUCT.search(self.text) is not None

    @property
    def line(self) -> str:
        return f"{', '.join(self.results)} = {self.expression}" if self.results else self.expression


@dataclass(frozen=True)
class Program:
    """`resized`: sizes of inputs in the second call, as pairs (of the first call, of the second)."""

    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    outputs: tuple[str, ...]
    dynamic: bool = False
    resized: tuple[tuple[int, int], ...] = ()

    @property
    def is_training(self) -> bool:
        return any(each.wants_gradient for each in self.inputs)

    def second_inputs(self) -> tuple[Input, ...]:
        changes = dict(self.resized)
        return tuple(replace(each, sizes=tuple(changes.get(n, n) for n in each.sizes)) for each in self.inputs)


# ---- inputs


def numbers(count: int, dtype: torch.dtype, values: str, seed: int) -> torch.Tensor:
    """Values of a kind. Special: with zeros of both signs, infinities, NaN, denormals, the ends of the range of
    integers, and floats whose squares are at the end of theirs: of larger ones sums and norms overflow or not, as it
    happens."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).to(torch.bool)
    if not dtype.is_floating_point:
        low, high = {"positive": (1, 9), "whole": (-4, 5)}.get(values, (-9, 10))
        made = torch.randint(max(low, torch.iinfo(dtype).min), high, (count,), generator=generator)
        odd = torch.tensor([torch.iinfo(dtype).min, torch.iinfo(dtype).max, 0, 1])
    elif values == "whole":
        return torch.randint(-4, 5, (count,), generator=generator).to(dtype)
    elif values == "positive":
        return (torch.rand(count, generator=generator, dtype=torch.float64) * 2 + 0.125).to(dtype)
    else:
        made = torch.randn(count, generator=generator, dtype=torch.float64)
        facts = torch.finfo(dtype)
        large = math.sqrt(facts.max) / 16
        corners = [0.0, -0.0, math.inf, -math.inf, math.nan, large, -large, facts.tiny, facts.tiny / 4, 1.0]
        odd = torch.tensor(corners, dtype=torch.float64)
    if values == "special" and count:
        which = odd[torch.randint(0, len(odd), (count,), generator=generator)]
        made = torch.where(torch.rand(count, generator=generator) < 0.25, which, made)
    return made.to(dtype)


def layout_of(sizes: Sequence[int], layout: str) -> tuple[tuple[int, ...], int, int]:
    """Strides, offset, and how many elements the storage has."""
    rank = len(sizes)
    if layout == "expanded" and rank:
        inner, offset, count = layout_of(sizes[1:], "contiguous")
        return (0, *inner), offset, count
    padded = list(sizes)
    order = list(range(rank))[::-1]
    if layout == "transposed":
        order.reverse()
    if layout == "gaps" and rank:
        padded[-1] += 3
    step = 2 if layout == "stepped" else 1
    strides = [0] * rank
    for place in order:
        strides[place] = step
        step *= max(padded[place], 1)
    offset = {"gaps": 1, "offset": 3}.get(layout, 0)
    reach = 1 + sum((n - 1) * stride for n, stride in zip(sizes, strides, strict=True)) if 0 not in sizes else 0
    return tuple(strides), offset, offset + reach


def make_inputs(inputs: Sequence[Input]) -> dict[str, torch.Tensor]:
    made: dict[str, torch.Tensor] = {}
    for each in inputs:
        if each.view:
            made[each.name] = eval(each.view, ENVIRONMENT, made).detach()
            continue
        strides, offset, count = layout_of(each.sizes, each.layout)
        flat = numbers(count, each.kind, each.values, each.seed)
        made[each.name] = flat.as_strided(each.sizes, strides, offset).requires_grad_(each.wants_gradient)
    return made


# ---- text


def source(program: Program, disturbed: bool = False) -> str:
    """The function. If disturbed, what steps that round take and give goes through `moved` and `noted`, products go
    through `widely`, and what gives one of its operands through `swapped`."""
    lines = [f"def program({', '.join(each.name for each in program.inputs)}):"]
    for inside, steps in itertools.groupby(program.steps, key=lambda step: step.inside):
        block = [line for step in steps for line in _lines(step, disturbed)]
        lines += (
            [f"    with {inside}:", *(f"        {line}" for line in block)] if inside else [f"    {x}" for x in block]
        )
    lines.append(f"    return {', '.join(program.outputs)}" + ("," if len(program.outputs) == 1 else ""))
    return "\n".join(lines) + "\n"


def _lines(step: Step, disturbed: bool) -> list[str]:
    if not disturbed:
        return [step.line]
    given, made = ", ".join(step.operands), ", ".join(step.results)
    lines = [step.line]
    if step.results and step.rounds:
        moved = (f"moved({name}, {step.casts}, {n == step.exponent})" for n, name in enumerate(step.operands))
        lines = [replace(step, operands=tuple(moved)).line]
    if step.results and step.multiplies:
        lines.append(f"{made} = widely({made}, lambda given: {_wide(step).text.format('given')}, {given})")
    if step.rounding == "either":
        lines += [f"swapped({name}, {given})" for name in step.results]
    return lines + [f"noted({name}, {step.rounds})" for name in step.results or step.operands[:1]]


def function_of(program: Program, **disturbed: Callable[..., Any]) -> Callable[..., Any]:
    """The function that the text defines; of the disturbed text, if what disturbs it is given."""
    environment = {**ENVIRONMENT, **disturbed}
    exec(compile(source(program, bool(disturbed)), "<program>", "exec"), environment)
    return environment["program"]  # type: ignore[return-value]


def widened(program: Program) -> Program:
    """The same computation in float64: casts to narrower floats become casts to it."""
    return replace(program, steps=tuple(map(_wide, program.steps)))


def _wide(step: Step) -> Step:
    return replace(step, text=_NARROW.sub("torch.float64", step.text))


def reproducer(program: Program, options: Mapping[str, Any], threads: int = 1, backend: Any = "ferrite") -> str:
    """A script that shows a difference: prints what eager and the compiled program return."""
    name = backend if isinstance(backend, str) else backend.__name__
    calls = [program.inputs] + ([program.second_inputs()] if program.resized else [])
    makers = [_inputs_text(inputs, f"inputs{n}") for n, inputs in enumerate(calls)]
    lines = ["import torch", "from torch.nn import functional"]
    if any("numbers(" in text for text in makers):
        lines.append("from tests.fuzz.programs import numbers")
    if name != backend:
        lines.append(f"from {backend.__module__} import {name}")
    lines += ["", source(program), *makers]
    lines.append(f"torch.set_num_threads({threads})")
    lines.append(
        f"compiled = torch.compile(program, backend={repr(name) if name == backend else name}, "
        f"dynamic={program.dynamic}, options={dict(options)!r})"
    )
    lines.append(f"for inputs in ({', '.join(f'inputs{n}' for n in range(len(calls)))},):")
    lines += [
        "    for function in (program, compiled):",
        "        given = inputs()",
        "        results = function(*given)",
    ]
    lines.append("        print(results, given)" if _changes_inputs(program) else "        print(results)")
    if program.is_training:
        lines += [
            "        results = [r for r in results if r.requires_grad]",
            "        leaves = [x for x in given if x.is_leaf and x.requires_grad]",
            "        weights = [torch.ones_like(r) for r in results]",
            "        print(torch.autograd.grad(results, leaves, weights, allow_unused=True))",
        ]
    return "\n".join(lines) + "\n"


def _changes_inputs(program: Program) -> bool:
    return any(not step.results for step in program.steps)


def _inputs_text(inputs: Sequence[Input], name: str) -> str:
    lines = (f"    {each.name} = {_input_text(each)}" for each in inputs)
    return "\n".join([f"def {name}():", *lines, f"    return {', '.join(each.name for each in inputs)},", ""])


def _input_text(each: Input) -> str:
    if each.view:
        return f"{each.view}.detach()"
    strides, offset, count = layout_of(each.sizes, each.layout)
    if count <= MOST_PRINTED:
        items = numbers(count, each.kind, each.values, each.seed).tolist()
        text = f"torch.tensor([{', '.join(map(_number_text, items))}], dtype=torch.{each.dtype})"
    else:
        text = f"numbers({count}, torch.{each.dtype}, {each.values!r}, {each.seed})"
    text += f".as_strided({each.sizes}, {strides}, {offset})"
    return text + (".requires_grad_()" if each.wants_gradient else "")


def _number_text(value: float) -> str:
    return repr(value) if math.isfinite(value) else f"float('{value}')"


# ---- running step by step


class Rejected(Exception):
    """A step that eager does not take, or that is not honest."""


class Trace:
    """The values of a program so far, in eager, and which of them are exact. See Note [Honest programs]."""

    def __init__(self, inputs: Sequence[Input]) -> None:
        self.values = make_inputs(inputs)
        for each in inputs:
            if each.wants_gradient and not each.kind.is_floating_point:
                raise Rejected("only floats have gradients")
        self.exact = dict.fromkeys(self.values, True)
        self.given = {value.untyped_storage()._cdata for value in self.values.values()}
        self.raised = False

    def add(self, step: Step) -> None:
        """Run one step; `Rejected` if it must not be part of a program."""
        if any(name not in self.values for name in step.operands):
            raise Rejected("an operand is not there")
        if step.rounding == "raises":
            return self._raises(step)
        from_exact = all(self.exact[name] for name in step.operands)
        if step.rounding == "jumps" and not from_exact:
            raise Rejected("a decision about rounded values")
        adds_whole = step.rounding == "sum" and from_exact and self._adds_whole(step)
        stays_exact = from_exact and (step.rounding in ("exact", "either", "jumps") or adds_whole)
        if step.results:
            self._assign(step, self._run(step), stays_exact)
        else:
            self._change(step, stays_exact)

    def _run(self, step: Step) -> Any:
        try:
            with warnings.catch_warnings(), _inside(step):
                warnings.simplefilter("ignore")
                return eval(compile(step.expression, "<step>", "eval"), ENVIRONMENT, self.values)
        except Exception as error:
            raise Rejected(str(error)) from error

    def _assign(self, step: Step, made: Any, stays_exact: bool) -> None:
        results = [made] if isinstance(made, torch.Tensor) else list(made)
        if len(results) != len(step.results):
            raise Rejected("another number of results")
        for result in results:
            self._check(result, stays_exact or all(self.exact[name] for name in step.operands))
        for name, result in zip(step.results, results, strict=True):
            self.values[name] = result
            self.exact[name] = stays_exact or not result.is_floating_point()

    def _check(self, result: Any, from_exact: bool) -> None:
        if not isinstance(result, torch.Tensor) or result.is_complex() or result.layout is not torch.strided:
            raise Rejected("not a plain tensor")
        if result.numel() > LARGEST or result.dim() > 6:
            raise Rejected("too large")
        if not result.is_floating_point() and not from_exact:
            raise Rejected("an integer or truth value from rounded values")
        storage = result.untyped_storage()._cdata
        shared = [each for each in self.values.values() if each.untyped_storage()._cdata == storage]
        if shared and storage not in self.given and _reach(result) > max(map(_reach, shared)):
            raise Rejected("memory that nobody has written")

    def _change(self, step: Step, stays_exact: bool) -> None:
        """A statement: whatever shares memory with what it changes is as exact as the result."""
        changed = self.values[step.operands[0]]
        if not changed.is_floating_point() and not all(self.exact[name] for name in step.operands):
            raise Rejected("an integer or truth value from rounded values")
        if _overlaps(changed):
            raise Rejected("a write to memory that several elements share")  # which torch.compile refuses
        try:
            with _inside(step):
                exec(compile(step.expression, "<step>", "exec"), ENVIRONMENT, self.values)
        except Exception as error:
            raise Rejected(str(error)) from error
        if changed.is_floating_point() and not stays_exact:
            storage = changed.untyped_storage()._cdata
            for name, value in self.values.items():
                if value.untyped_storage()._cdata == storage:
                    self.exact[name] = False

    def _adds_whole(self, step: Step) -> bool:
        """Whether all operands are small whole numbers, so that sums in any order are exact, in halves too."""
        floats = [self.values[name].detach() for name in step.operands if self.values[name].is_floating_point()]
        return all(bool((v == v.trunc()).all()) and float(v.double().abs().sum()) < 256 for v in floats)

    def _raises(self, step: Step) -> None:
        try:
            exec(compile(step.expression, "<step>", "exec"), ENVIRONMENT, dict(self.values))
        except (IndexError, RuntimeError):
            self.raised = True
        else:
            raise Rejected("raises nothing")


def _inside(step: Step) -> Any:
    return eval(step.inside, ENVIRONMENT) if step.inside else contextlib.nullcontext()


def _reach(value: torch.Tensor) -> int:
    """How many bytes of its memory a tensor reads, from the first one on."""
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return (value.storage_offset() + last + 1) * value.element_size() if value.numel() else 0


def _overlaps(value: torch.Tensor) -> bool:
    """Whether two elements share memory."""
    places = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(value.shape, value.stride(), strict=True):
        places = places.unsqueeze(-1) + torch.arange(size) * stride
    return places.numel() != places.unique().numel()


def traced(program: Program) -> bool:
    """Whether eager takes the program, with both its sizes, and it is honest."""
    try:
        for inputs in (program.inputs, program.second_inputs()):
            trace = Trace(inputs)
            for step in program.steps:
                trace.add(step)
            if any(name not in trace.values for name in program.outputs) and not trace.raised:
                return False
            if trace.raised and not set(program.steps[-1].results) & set(program.outputs):
                return False
            if not program.resized:
                break
    except (Rejected, RuntimeError, IndexError, ValueError, TypeError, SyntaxError):
        return False
    return True
