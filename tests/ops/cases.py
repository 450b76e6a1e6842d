"""Which cases exist, and what they are called.

A case is one call of one op: an op of PyTorch's op database, a dtype, one of the op's samples, static or dynamic
shapes, inference or training, and the function or its in-place form. Its id is stable and reproduces it alone:

    add|f32|s3|dynamic|train            sample 3 of `add`
    add|f32|n3|static|infer             the same sample with every tensor made non-contiguous
    add|f32|t3|static|infer             the same sample with every tensor transposed in memory; see `LAYOUTS`
    add|f32|S3|static|infer             sample 3 with the larger sizes of `LARGE`; T3 is that one transposed
    add|f32|s3|static|infer|inplace     x.add_(...)
    add|any|e2|static|infer             error input 2: eager raises (error inputs choose their own dtypes)

Sample numbers count within the list the database gives for that dtype and for inference or training.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import random
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import Any
from unittest import mock

import msgspec
import numpy
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

DTYPES: dict[str, torch.dtype] = {
    "f32": torch.float32,
    "f64": torch.float64,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "u8": torch.uint8,
    "bool": torch.bool,
    "c64": torch.complex64,
}
ERRORS = "any"
SHAPES = ("static", "dynamic")
MODES = ("infer", "train")
FORMS = ("function", "inplace")
# What the database builds the sizes of its samples from. Its own numbers are 5, 10 and 20, which few vector registers
# are filled by, and no two threads.
LARGE = {"S": 23, "M": 37, "L": 71}

MOST_ELEMENTS = 1 << 20  # of a larger sample

# Results are memory nobody wrote, so two runs of eager differ as well: everything but the values is compared.
UNDEFINED_VALUES = frozenset(
    (
        "empty",
        "empty_like",
        "empty_permuted",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "resize_",
        "resize_as_",
    )
)


class Case(msgspec.Struct, frozen=True, order=True):
    """One call to compare; `id` names it and `parse` reads the name back."""

    op: str
    dtype: str
    sample: str
    shapes: str
    mode: str
    form: str = "function"

    @property
    def id(self) -> str:
        fields = [self.op, self.dtype, self.sample, self.shapes, self.mode]
        return "|".join(fields if self.form == "function" else [*fields, self.form])

    @staticmethod
    def parse(text: str) -> Case:
        fields = text.split("|")
        if len(fields) not in (5, 6):
            raise ValueError(f"a case id has 5 or 6 fields between bars, like add|f32|s3|dynamic|train; found {text!r}")
        case = Case(*fields)
        allowed = (("shapes", SHAPES), ("mode", MODES), ("form", FORMS), ("dtype", (*DTYPES, ERRORS)))
        for field, values in allowed:
            if getattr(case, field) not in values:
                raise ValueError(f"{field} is one of {', '.join(values)}; found {getattr(case, field)!r} in {text!r}")
        return case


class Sample(msgspec.Struct, frozen=True):
    """Arguments of one call. `process` makes what gradients are taken of (the database's choice, mostly itself)."""

    label: str
    input: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    process: Callable[[Any], Any]


class Plan(msgspec.Struct, frozen=True):
    """Which cases a sweep runs. `samples` bounds the samples of one op by dtype; None takes all of them."""

    name: str
    dtypes: tuple[str, ...]
    samples: dict[str, int] | None
    strided: int = 1  # how many of the picked samples are repeated with non-contiguous tensors
    layouts: str = ""  # letters of `LAYOUTS`; if there are any, every picked sample runs in each of these alone
    large: bool = False  # samples have the sizes of `LARGE` where the database does not prescribe sizes
    threads: int = 1
    errors: int | None = 3
    shapes: tuple[str, ...] = SHAPES
    modes: tuple[str, ...] = MODES
    forms: tuple[str, ...] = FORMS
    ops: str = "*"
    only: tuple[str, ...] = ()
    seed: int = 0


STANDARD = Plan("standard", ("f32", "bf16", "i64", "bool"), {"f32": 4, "bf16": 2, "i64": 2, "bool": 1})
FULL = Plan("full", tuple(DTYPES), None, strided=8, errors=None)
IN_LAYOUTS = Plan(
    "layouts", ("f32", "bf16", "i64"), {"f32": 3, "bf16": 1, "i64": 1}, strided=0, errors=0, forms=("function",),
    layouts="twxc", large=True, threads=2,
)  # fmt: skip


class Unit(msgspec.Struct, frozen=True, order=True):
    """What a worker takes at a time: all cases of one op and dtype."""

    op: str
    dtype: str

    @property
    def id(self) -> str:
        return f"{self.op}|{self.dtype}"


@functools.cache
def op_table() -> dict[str, Any]:
    """Every op of the database by full name (`name.variant`), in the database's order.

    Random ops seed the generator inside the call, where Dynamo breaks the graph and the op would run in eager on both
    sides. We seed before every call ourselves, so theirs is taken out.
    """
    from torch.testing._internal import common_methods_invocations as database

    database.wrapper_set_seed = lambda function, *args, **kwargs: function(*args, **kwargs)
    return {op.full_name: op for op in database.op_db}


_PREFIX_FAMILY = {
    "linalg": "linalg",
    "fft": "spectral",
    "signal": "spectral",
    "special": "special",
    "masked": "masked",
    "nn": "nn",
    "sparse": "sparse",
    "torch": "aten",
}
_CLASS_FAMILY = {
    "UnaryUfuncInfo": "unary",
    "BinaryUfuncInfo": "binary",
    "ReductionOpInfo": "reduction",
    "SpectralFuncInfo": "spectral",
    "ShapeFuncInfo": "shape",
}
_WORD_FAMILY = (
    ("random", ("rand", "normal", "bernoulli", "multinomial", "uniform", "exponential", "cauchy", "geometric")),
    ("creation", ("empty", "zeros", "ones", "full", "arange", "linspace", "logspace", "eye", "tensor", "complex")),
    ("index", ("index", "gather", "scatter", "take", "masked", "nonzero", "where", "put", "argwhere")),
    (
        "view",
        ("view", "reshape", "permute", "transpose", "expand", "squeeze", "split", "chunk", "stack", "cat", "strided"),
    ),
    ("matmul", ("mm", "mv", "matmul", "bmm", "dot", "einsum", "addr", "outer", "inner", "ger")),
    ("scan", ("cum", "sort", "unique", "topk", "kthvalue", "median", "mode", "hist", "bucketize", "search", "trapez")),
)


def family(name: str) -> str:
    """The family an op is reported under."""
    op = op_table()[name]
    if "." in op.name and op.name.split(".")[0] in _PREFIX_FAMILY:
        return _PREFIX_FAMILY[op.name.split(".")[0]]
    if type(op).__name__ in _CLASS_FAMILY:
        return _CLASS_FAMILY[type(op).__name__]
    for label, words in _WORD_FAMILY:
        if any(word in op.name for word in words):
            return label
    return "other"


def units(plan: Plan) -> list[Unit]:
    """Every unit of a plan: the ops by dtype, and the error inputs of each op as a unit of their own."""
    found = []
    for name, op in op_table().items():
        if not any(fnmatchcase(name, pattern) for pattern in plan.ops.split(",")):
            continue
        dtypes = op.supported_dtypes("cpu")
        found += [Unit(name, short) for short in plan.dtypes if DTYPES[short] in dtypes]
        if op.error_inputs_func is not None and plan.errors != 0:
            found.append(Unit(name, ERRORS))
    return [unit for unit in found if not plan.only or any(_may_hold(unit, pattern) for pattern in plan.only)]


def _may_hold(unit: Unit, pattern: str) -> bool:
    fields = pattern.split("|")
    return field_matches(unit.op, fields[0]) and (len(fields) < 2 or field_matches(unit.dtype, fields[1]))


def field_matches(value: str, pattern: str) -> bool:
    """Whether one field of an id fits one field of a pattern: alternatives between commas, `*` for anything."""
    return any(fnmatchcase(value, choice) for choice in pattern.split(","))


def matches(case: Case, pattern: str) -> bool:
    """Whether a case fits a pattern: an id whose fields may hold `*` and commas. A missing form means `function`."""
    fields = pattern.split("|")
    fields += ["*"] * (5 - len(fields))
    if len(fields) == 5:
        fields.append("function")
    values = (case.op, case.dtype, case.sample, case.shapes, case.mode, case.form)
    return all(field_matches(value, field) for value, field in zip(values, fields, strict=True))


def seed_everything(seed: int) -> None:
    """The same random numbers for whoever draws next, from any of the generators a sample or an op may use."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)


def function_of(case: Case) -> Callable[..., Any] | None:
    """What a case calls, or None if the op has no in-place form."""
    op = op_table()[case.op]
    return op.inplace_variant if case.form == "inplace" else op.op


@contextlib.contextmanager
def _sizes(numbers: dict[str, int]) -> Iterator[None]:
    """Around the functions of the database that make samples: other numbers in the place of its own."""
    folder = "torch.testing._internal."
    places = ("common_methods_invocations", "opinfo.core", *(f"opinfo.definitions.{n}" for n in ("linalg", "_masked")))
    with contextlib.ExitStack() as changed:
        for module in (importlib.import_module(folder + place) for place in places):
            there = {name: number for name, number in numbers.items() if hasattr(module, name)}
            changed.enter_context(mock.patch.multiple(module, **there))
        yield


def larger_samples(name: str, dtype: str, mode: str, seed: int = 0) -> Iterator[Sample]:
    """The samples that have more elements with the sizes of `LARGE`, under the numbers that they have in the list, and
    behind them our own, for kinds of ops whose samples in the database are small whatever its constants are."""
    usual = {sample.label: sample for sample in samples(name, dtype, mode, seed)}
    with _sizes(LARGE), contextlib.suppress(Exception):  # a sample that combines other numbers with its own
        for sample in samples(name, dtype, mode, seed):
            if sample.label in usual and _elements(usual[sample.label]) < _elements(sample) <= MOST_ELEMENTS:
                yield msgspec.structs.replace(sample, label=sample.label.upper())
    op = op_table()[name]
    seed_everything(seed)
    for number, (value, kwargs) in enumerate(_own_samples(op, DTYPES[dtype], mode == "train"), start=len(usual)):
        yield Sample(f"S{number}", value, (), kwargs, lambda result: result)


def _own_samples(op: Any, dtype: torch.dtype, requires_grad: bool) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
    """Inputs and keywords for functions of one tensor, element by element or along dimensions."""
    from torch.testing._internal.opinfo.core import ReductionOpInfo, UnaryUfuncInfo

    sizes = (LARGE["M"], LARGE["S"], LARGE["L"])
    make = functools.partial(torch.testing.make_tensor, sizes, device="cpu", dtype=dtype, requires_grad=requires_grad)
    if isinstance(op, UnaryUfuncInfo):
        value = make(low=op.domain[0], high=op.domain[1])
        yield value, op.sample_kwargs("cpu", dtype, value)[0]
    elif isinstance(op, ReductionOpInfo):
        low, high = (0.0, 1.5) if dtype.is_floating_point else (None, None)  # a product of so many is no infinity
        for dims in (0, 1, 2, (0, 2)):
            if isinstance(dims, int) or op.supports_multiple_dims:
                yield make(low=low, high=high), {"dim": dims}


def _elements(sample: Sample) -> int:
    leaves = tree_leaves((sample.input, sample.args, sample.kwargs))
    return sum(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided)


def samples(name: str, dtype: str, mode: str, seed: int = 0) -> Iterator[Sample]:
    """The database's samples in order, each drawn from the same seed so that it does not depend on the others."""
    op = op_table()[name]
    if dtype == ERRORS:
        source = iter(op.error_inputs_func(op, "cpu"))
        prefix = "e"
    else:
        source = iter(op.sample_inputs("cpu", DTYPES[dtype], requires_grad=mode == "train", set_seed=False))
        prefix = "s"
    number = 0
    while True:
        seed_everything(seed + number)
        try:
            item = next(source)
        except StopIteration:
            return
        if prefix == "e":
            item = item.sample_input
        yield Sample(f"{prefix}{number}", item.input, tuple(item.args), dict(item.kwargs), item.output_process_fn_grad)
        number += 1


def made_strided(sample: Sample, seed: int = 0) -> Sample:
    """The same sample with every tensor non-contiguous."""
    from torch.testing._internal.opinfo.core import SampleInput

    seed_everything(seed)
    twin = SampleInput(sample.input, args=sample.args, kwargs=sample.kwargs).noncontiguous()
    return Sample("n" + sample.label[1:], twin.input, tuple(twin.args), dict(twin.kwargs), sample.process)


def transposed(value: torch.Tensor) -> torch.Tensor:
    """The first dimension is the fastest."""
    order = [*reversed(range(value.dim()))]
    return value.permute(order).clone(memory_format=torch.contiguous_format).permute(order)


def window(value: torch.Tensor) -> torch.Tensor:
    """Every second element of rows that lie in larger memory, behind its start."""
    if value.dim() == 0:
        return value
    sizes = [*value.shape]
    sizes[-1] = 2 * sizes[-1] + 1
    sizes[0] += value.dim() > 1
    view = value.new_zeros(sizes)[..., 1::2]
    return (view[1:] if value.dim() > 1 else view).copy_(value)


def expanded(value: torch.Tensor) -> torch.Tensor:
    """The first slice of the first dimension, repeated in place."""
    return value[:1].clone().expand(value.shape) if value.dim() > 1 and value.shape[0] > 1 else value


def channels_last(value: torch.Tensor) -> torch.Tensor:
    """The second dimension is the fastest."""
    if value.dim() < 3:
        return value
    return value.movedim(1, -1).clone(memory_format=torch.contiguous_format).movedim(-1, 1)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "t": transposed,
    "w": window,
    "x": expanded,
    "c": channels_last,
}


def made_laid(sample: Sample, letter: str) -> Sample | None:
    """The same sample with every tensor in a layout; None if all tensors lie so already."""
    changed = False

    def lay(value: torch.Tensor) -> torch.Tensor:
        nonlocal changed
        if value.layout is not torch.strided or value.is_nested or value.is_quantized:
            return value
        laid = LAYOUTS[letter](value.detach())
        if laid.stride() == value.stride():
            return value
        changed = True
        return laid.requires_grad_(value.requires_grad)

    given = tree_map_only(torch.Tensor, lay, (sample.input, sample.args, sample.kwargs))
    label = (letter.upper() if sample.label[0].isupper() else letter) + sample.label[1:]
    return Sample(label, *given, sample.process) if changed else None


def _look(value: Any) -> tuple[Any, ...]:
    """What distinguishes one argument from another at a glance: its sort, and the edge cases of a tensor."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_nested:
            return ("tensor", str(value.layout))
        edges = (0 in value.shape, 1 in value.shape, value.is_contiguous(), value.storage_offset() != 0)
        return ("tensor", value.dim(), str(value.dtype), value.is_conj(), *edges)
    if isinstance(value, list | tuple):
        return (type(value).__name__, len(value), *sorted({_look(item) for item in value}, key=repr))
    if value is None or isinstance(value, bool | str):
        return (value,)
    if isinstance(value, int | float):
        return (type(value).__name__, (value > 0) - (value < 0))
    return (type(value).__name__, str(value) if isinstance(value, torch.dtype | torch.memory_format) else "")


def traits(sample: Sample) -> frozenset[Any]:
    """The features `pick` spreads over: each argument's look by position or name, and how the shapes relate."""
    found: set[Any] = {("input", _look(sample.input)), ("count", len(sample.args))}
    found |= {(place, _look(value)) for place, value in enumerate(sample.args)}
    found |= {(name, _look(value)) for name, value in sample.kwargs.items()}
    if isinstance(sample.input, torch.Tensor):
        found.add(("rank", sample.input.dim()))
        found.add(("empty", sample.input.numel() == 0))
        others = [value for value in sample.args if isinstance(value, torch.Tensor)]
        found |= {("broadcast", other.shape == sample.input.shape) for other in others}
    return frozenset(found)


def pick(found: list[Sample], count: int) -> list[Sample]:
    """`count` samples that look as different as possible: the first, then whichever adds the most new traits.

    Ties go to the later sample of the list, since databases put plain samples first. The order of the list is kept.
    """
    if len(found) <= count:
        return found
    looks = [traits(sample) for sample in found]
    chosen = [0]
    seen = set(looks[0])
    while len(chosen) < count:
        gains = [(-1 if i in chosen else len(look - seen), i) for i, look in enumerate(looks)]
        best = max(gains)
        if best[0] <= 0:
            # nothing new to see: spread what is left evenly
            rest = [i for i in range(len(found)) if i not in chosen]
            wanted = count - len(chosen)
            chosen += [rest[(2 * k + 1) * len(rest) // (2 * wanted)] for k in range(wanted)]
            break
        chosen.append(best[1])
        seen |= looks[best[1]]
    return [found[i] for i in sorted(chosen)]


class Group(msgspec.Struct, frozen=True):
    """Cases that differ only in their sample, with the samples: the compiled function of dynamic shapes is shared."""

    members: tuple[tuple[Case, Sample], ...]


def _can_train(op: Any, dtype: str) -> bool:
    return op.supports_autograd and DTYPES[dtype] in op.supported_backward_dtypes("cpu")


def groups(unit: Unit, plan: Plan) -> Iterator[Group]:
    """The cases of a unit under a plan, with their samples."""
    op = op_table()[unit.op]
    for mode in plan.modes:
        if mode == "train" and (unit.dtype == ERRORS or not _can_train(op, unit.dtype)):
            continue
        found = list(samples(unit.op, unit.dtype, mode, plan.seed))
        if unit.dtype != ERRORS and (plan.large or any(map(_names_large, plan.only))):
            larger = list(larger_samples(unit.op, unit.dtype, mode, plan.seed))
        else:
            larger = []
        chosen = _choose(found, larger, unit, plan)
        for form in plan.forms:
            if form == "inplace" and (op.inplace_variant is None or unit.dtype == ERRORS):
                continue
            for shapes in plan.shapes:
                made = [(Case(unit.op, unit.dtype, one.label, shapes, mode, form), one) for one in chosen]
                if plan.only:
                    made = [(case, one) for case, one in made if any(matches(case, only) for only in plan.only)]
                if made:
                    yield Group(tuple(made))


def _choose(found: list[Sample], larger: list[Sample], unit: Unit, plan: Plan) -> list[Sample]:
    named = [_labels(pattern) for pattern in plan.only]
    chosen = _usual(found, larger, unit, plan) if not plan.only or None in named else []
    have = {sample.label for sample in chosen}
    wanted = {label for labels in named if labels for label in labels} - have
    for sample in (*found, *larger):
        if sample.label in wanted:
            chosen.append(sample)
        if "n" + sample.label[1:] in wanted and sample.label[0] == "s":
            chosen.append(made_strided(sample, plan.seed))
        for letter in LAYOUTS:
            laid = made_laid(sample, letter)
            if laid is not None and laid.label in wanted:
                chosen.append(laid)
    return chosen


def _usual(found: list[Sample], larger: list[Sample], unit: Unit, plan: Plan) -> list[Sample]:
    if unit.dtype == ERRORS:
        return found if plan.errors is None else pick(found, plan.errors)
    if plan.large:
        instead = {sample.label.lower(): sample for sample in larger}
        found = [instead.pop(sample.label, sample) for sample in found] + [*instead.values()]
    chosen = found if plan.samples is None else pick(found, plan.samples[unit.dtype])
    if plan.large and found and (largest := max(found, key=_elements)).label not in {sample.label for sample in chosen}:
        chosen[-1] = largest
    if plan.layouts:
        laid = [made_laid(sample, letter) for sample in chosen for letter in plan.layouts]
        return [sample for sample in laid if sample is not None]
    return chosen + [made_strided(sample, plan.seed) for sample in _worth_striding(chosen)[: plan.strided]]


def _names_large(pattern: str) -> bool:
    return any(label[:1].isupper() for label in _labels(pattern) or ())


def _labels(pattern: str) -> set[str] | None:
    """The samples a pattern names, or None if it leaves them open."""
    fields = pattern.split("|")
    labels = set(fields[2].split(",")) if len(fields) > 2 else {"*"}
    return None if any("*" in label for label in labels) else labels


def _worth_striding(chosen: list[Sample]) -> list[Sample]:
    """Samples whose input has a layout to change, those of highest rank first."""

    def rank(sample: Sample) -> int:
        value = sample.input[0] if isinstance(sample.input, list | tuple) and sample.input else sample.input
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_nested:
            return -1
        return value.dim() if value.numel() > 1 else -1

    return sorted((sample for sample in chosen if rank(sample) > 0), key=rank, reverse=True)
